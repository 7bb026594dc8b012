"""What goes into a case, what has to come out, and whether it does."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.cases import Case

NAMES = {"forward": ("out",), "decode": ("out",), "backward": ("dq", "dk", "dv")}
# Largest difference from the reference, as a part of the reference's largest number
CLOSE = {"float64": 1e-10, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
PEERS_CLOSE = CLOSE | {"float32": 1e-3, "float16": 1e-2}  # a peer's error stands beside its time
ROWS = 2048  # of scores that the reference has at a time


@dataclass
class Inputs:
    """Arrays of one problem, ``(B, H, T, d)``: PyTorch's, or NumPy's on a CPU without it.

    Attributes
    ----------
    blocks : tuple of array
        Of a paged cache: the pools of K and V, and the table.
    starts : array
        Of packed sequences: where each begins, and the last one ends.
    """

    q: Any
    k: Any
    v: Any
    dout: Any = None
    blocks: tuple[Any, ...] = field(default=())
    starts: Any = None


def torch_or_none() -> Any:
    """PyTorch where it is installed."""
    try:
        import torch
    except ImportError:
        return None
    return torch


def make(case: Case, seed: int = 0) -> Inputs:
    """Random normal numbers; with a paged cache its blocks in random order."""
    sizes = [(case.Hq, case.Tq, case.d), (case.Hkv, case.Tk, case.d), (case.Hkv, case.Tk, case.dv)]
    sizes += [(case.Hq, case.Tq, case.dv)] * (case.direction == "backward")
    shapes, starts = [(case.B, *size) for size in sizes], [*itertools.accumulate(case.packed, initial=0)]
    torch = torch_or_none()
    if torch is None:
        if case.device != "cpu":
            raise ImportError("inputs of GPU cases are made, and their results checked, by torch")
        rng = np.random.default_rng(seed)
        x = Inputs(*(rng.standard_normal(shape).astype(_numpy_dtype(case.dtype)) for shape in shapes))
        x.starts = np.array(starts, np.int32) if case.packed else None
        return x
    device = "cuda" if case.device == "gpu" else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    how = dict(generator=generator, device=device, dtype=getattr(torch, case.dtype))
    x = Inputs(*(torch.randn(shape, **how) for shape in shapes))
    if case.packed:
        x.starts = torch.tensor(starts, dtype=torch.int32, device=device)
    if case.page:
        n = case.Tk // case.page
        order = torch.randperm(case.B * n, generator=generator, device=device)
        # Block `i` of a pool holds what is block `order[i]` of the sequences, one behind the other
        pools = (a.unflatten(2, (n, case.page)).transpose(1, 2).reshape(-1, case.Hkv, case.page, a.shape[-1])[order]
                 for a in (x.k, x.v))  # fmt: skip
        x.blocks = (*pools, order.argsort().reshape(case.B, n))
    return x


def probe() -> None:
    """One kernel on the GPU, to the end."""
    import torch

    torch.zeros(1, device="cuda").add_(1).item()


def _numpy_dtype(name: str) -> np.dtype:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def nbytes(arrays: Sequence[Any]) -> int:
    """Bytes of arrays."""
    return sum(int(a.nbytes) for a in arrays)


# ---- what has to come out ------------------------------------------------------------------------------------


def _wide(case: Case, array: Any) -> Any:
    """float64; on a GPU float32, but for float64 inputs."""
    if case.device == "cpu":
        return array.double().numpy() if hasattr(array, "double") else np.asarray(array).astype(np.float64)
    return array.double() if case.dtype == "float64" else array.float()


def picked(case: Case) -> list[tuple[int, int]]:
    """Sequences and key/value heads that are compared: the first, the last, and one between."""
    ends = [(0, 0), (case.B - 1, case.Hkv - 1), (case.B // 2, case.Hkv // 2)]
    return list(dict.fromkeys(ends))[: 1 if case.device == "cpu" and case.Tq * case.Tk >= 1 << 24 else 3]


def _library_of(array: Any) -> Any:
    return np if isinstance(array, np.ndarray) else sys.modules["torch"]


def head(q: Any, k: Any, v: Any, dout: Any, causal: bool) -> tuple[Any, ...]:
    """Dense attention of one head, some rows at a time: out, or with ``dout`` the gradients. NumPy or PyTorch."""
    xp = _library_of(q)
    scale = 1 / math.sqrt(q.shape[-1])
    outs, dqs, dk, dv = [], [], xp.zeros_like(k), xp.zeros_like(v)
    for start in range(0, len(q), ROWS):
        rows = slice(start, start + ROWS)
        keys = slice(0, min(start + ROWS, len(k)) if causal else len(k))
        s = q[rows] @ k[keys].T * scale
        if causal:
            s = xp.where(xp.tril(xp.ones_like(s), start) > 0, s, -math.inf)
        p = xp.exp(s - xp.amax(s, -1, keepdims=True))
        p = p / p.sum(-1)[:, None]
        if dout is None:
            outs.append(p @ v[keys])
            continue
        dv[keys] += p.T @ dout[rows]
        dp = dout[rows] @ v[keys].T
        ds = p * (dp - (p * dp).sum(-1)[:, None]) * scale
        dqs.append(ds @ k[keys])
        dk[keys] += ds.T @ q[rows]
    return (xp.concatenate(outs),) if dout is None else (xp.concatenate(dqs), dk, dv)


def _of_sequences(case: Case, *arrays: Any) -> tuple[Any, ...]:
    """`head` of one head; of packed sequences, each by itself."""
    found, end = [], 0
    for rows in case.packed or (max(case.Tq, case.Tk),):
        found.append(head(*(a if a is None else a[end : end + rows] for a in arrays), case.causal))
        end += rows
    if len(found) == 1:
        return found[0]
    xp = _library_of(arrays[0])
    return tuple(xp.concatenate(parts) for parts in zip(*found, strict=True))


def reference(case: Case, x: Inputs) -> dict[tuple[int, int], list[Any]]:
    """For each sequence and key/value head picked: results of its query heads, as in NAMES."""
    group, found = case.Hq // case.Hkv, {}
    for b, h in picked(case):
        k, v = (_wide(case, a[b, h]) for a in (x.k, x.v))
        each = []
        for i in range(h * group, (h + 1) * group):
            dout = _wide(case, x.dout[b, i]) if case.direction == "backward" else None
            each.append(_of_sequences(case, _wide(case, x.q[b, i]), k, v, dout))
        first = [[heads[0] for heads in each]]
        found[b, h] = first if case.direction != "backward" else first + [
            sum(heads[n] for heads in each[1:]) + each[0][n] if group > 1 else each[0][n] for n in (1, 2)
        ]  # fmt: skip
    return found


def errors(case: Case, results: Sequence[Any], expected: dict[tuple[int, int], list[Any]]) -> dict[str, float]:
    """Largest difference of each result, as a part of the largest number; NaN is infinitely far."""
    group = case.Hq // case.Hkv
    found = dict.fromkeys(NAMES[case.direction], 0.0)
    for (b, h), wanted in expected.items():
        for n, name in enumerate(found):
            heads = range(h * group, (h + 1) * group) if n == 0 else [h]
            for i, w in zip(heads, wanted[n] if n == 0 else [wanted[n]], strict=True):
                got = _wide(case, results[n][b, i])
                if got.shape != w.shape:
                    raise ValueError(f"{name} has shape {tuple(got.shape)}; expected {tuple(w.shape)}")
                error = float(abs(got - w).max()) / float(abs(w).max())
                found[name] = max(found[name], error if math.isfinite(error) else math.inf)
    return found


def wrong(case: Case, found: dict[str, float], close: dict[str, float] = CLOSE) -> str | None:
    """Why results do not count, or None where they do."""
    bound = close[case.dtype]
    far = [f"{name} by {error:.1e}" for name, error in found.items() if not error <= bound]
    return f"differs, as a part of the largest number: {', '.join(far)}; {bound:.0e} is allowed" if far else None
