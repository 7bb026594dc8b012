"""Do the kernels for Hopper give right results always, and how exact are they? On a GPU; writes a record.

    python -m bench.reliability --record OUT.json                    # all of it, some minutes
    python -m bench.reliability --record OUT.json --part forward repeats
    python -m bench.reliability --only backward/17                   # one job again, as its name is in the record

The parts:

* ``forward``, ``backward``: random shapes in sets of constants, each of which a kernel is compiled for. Results are
  compared with the dense formula in float64 on the GPU (:mod:`bench.dense`), by the contract's own bound (section 6):
  a ratio above 1 is a failure. Some calls are compared with the NumPy oracle, too. ``long``: the same of backward
  passes that are planned as long calls are: rows of others are prepared and finished, blocks of threads go in pairs.
* ``repeats``: the same call thousands of times: bits, or where the order of additions is not fixed the bound.
* ``graphs``: forward and backward pass of a call in one CUDA graph, replayed with new numbers.
* ``accuracy``: scores that are made to be hard for a maximum that stays, beside the loop that follows the maximum and
  cuDNN, on some rows of up to 65,536; ``gradients``: all gradients beside cuDNN's, each from its own out, and ours from
  cuDNN's.
* ``redo``: what a call takes of which no piece, one or every piece is done again. By itself, after all others.

Jobs are shared out to processes on one GPU. Exit status: 0; 1 if something failed or was not run; 2 when the call makes
no sense; 3 when a job has not ended within ``--limit`` seconds, which is what a deadlock looks like.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from bench import dense, record
from bench.draws import HEADS, Drawn, Kind, Made, Where, call, draw, expected_of, kinds, make, ratios, served, traits

SCHEMA = "rawflash-reliability-1"
PARTS = ("forward", "backward", "long", "repeats", "graphs", "accuracy", "gradients", "redo")
EXIT_FAILED, EXIT_USAGE, EXIT_STUCK = 1, 2, 3
SHAPES = {"forward": 32, "backward": 34, "long": 30}  # of each
ORACLE_EVERY = 4  # of every fourth set one call is compared with the NumPy oracle, too
ORACLE_MOST = 2_000_000  # scores
PROCESSES = 15
TEXT = 300  # characters of an error
BY_CUDNN = 1.5  # times cuDNN's may be our root of mean square; the largest, one number's chance, is told beside it
Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Something to do in any process: a function of this module, and what it is given."""

    name: str
    function: str
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def part(self) -> str:
        return self.name.partition("/")[0]


def of_oracle(x: Drawn, made: Made, results: dict[str, Any], expected: dict[str, tuple[Any, Any]]) -> Row:
    """The same results held against the NumPy oracle, and how far the two references are apart."""
    from rawflash.accuracy import error_ratio
    from rawflash.accuracy import reference as numpy_reference

    def host(a: Any, wide: bool = False) -> Any:
        """As NumPy has it, without the axis of a batch if sequences are packed."""
        a = (a.double() if wide else a.float()).cpu().numpy()
        return a[0] if x.cu_seqlens is not None and a.ndim > 2 else a

    clean, options = made.clean, dict(x.options)
    options |= {name: host(made.options[name]) for name in ("sinks", "alibi_slopes") if name in made.options}
    if x.cu_seqlens is not None:
        options |= {"cu_seqlens_q": x.cu_seqlens[0], "cu_seqlens_k": x.cu_seqlens[1]}
    if clean.dout is not None:
        options |= {"dout": host(clean.dout), "wrt": tuple(name[1:] for name in clean.names()[2:])}
        if clean.dlse is not None:
            options["dlse"] = host(clean.dlse)
    found = numpy_reference(host(clean.q), host(clean.k), host(clean.v), dtype=x.kind.dtype, **options)
    apart, wider, worst = 0.0, 0.0, {}
    for name, (exact, allowed) in expected.items():
        true, bound = found.oracle[name], found.allowed[name]
        want, mine = host(exact, True), host(allowed.expand(exact.shape), True)
        where_finite = np.isfinite(true)
        if want.shape != true.shape or not (np.isfinite(want) == where_finite).all():
            raise ArithmeticError(f"the references differ: {name}")
        differences = np.abs(want[where_finite] - true[where_finite])
        apart = max(apart, float(differences.max(initial=0.0) / np.abs(true[where_finite]).max(initial=1e-30)))
        wider = max(wider, float((mine / bound).max(initial=0.0)))
        worst[name] = round(error_ratio(name, host(made.axes(results[name])), found), 4)
    return {"apart": apart, "bound_by_oracle": round(wider, 4), "worst": worst}


APART = 1e-9  # of the largest number: the two references are float64, in other orders


def soak(where: Where, kind: Kind, shapes: int, seed: int, oracle: bool = False,
         only: int | None = None) -> Row:  # fmt: skip
    """Random calls of one set of constants."""
    lag = LAGS[kind.number // 4 % len(LAGS)]
    # Small calls have few blocks of keys: half of the sets of constants are planned as if these were many
    many = kind.number // (2 * len(HEADS[kind.part])) % 2
    plan = planned_as_long(lag) if kind.part == "long" else planned_as_many() if many else planned_as_few()
    with plan:
        return _soak(where, kind, shapes, seed, oracle, only)


LAGS = (0.0, 0.25)  # where blocks of threads work so little ahead, and, by the second, the last ones may be divided


@contextlib.contextmanager
def _planned(**changed: Any) -> Iterator[None]:
    """Calls inside are planned by these values of :mod:`rawflash.sm90`, which keeps no plan of theirs."""
    from rawflash import problem, sm90

    with mock.patch.multiple(sm90, **changed), mock.patch.object(problem, "_MEMO", {}):
        yield


NEVER = {0: 1 << 30, 1: 1 << 30}
ONE_SUM = {256: (0.0, 0.0)}


def planned_as_many() -> contextlib.AbstractContextManager[None]:
    """Backward passes inside are planned as if they had many blocks of keys, and few heads: ``_divided_by_heads`` and
    ``_together`` there; in a fixed order only those that ask for one."""
    from rawflash.tiles import Divided

    return _planned(
        _divided_by_heads=lambda *_: Divided(), WGMMA_TOGETHER=NEVER, WGMMA_STORED_HEADS=0.0, WGMMA_SUMS=ONE_SUM,
        _order_gains=lambda *_: False,
    )  # fmt: skip


def planned_as_few() -> contextlib.AbstractContextManager[None]:
    """Backward passes inside are planned as they are, and short ones in a fixed order as long ones: ``_has_sums``."""
    return _planned(WGMMA_SUMS_KEYS=0, WGMMA_SUMS_ONCE=(0.0, 0.0), WGMMA_SUMS_SHORT={256: ()})


@contextlib.contextmanager
def planned_as_long(lag: float = 0.0) -> Iterator[None]:
    """Backward passes inside have what only long ones have else: ``_can_be_fused`` there. With sections of all heads,
    as short ones have in a fixed order, nobody would prepare rows of others."""
    from rawflash import sections

    as_long = _planned(
        WGMMA_FUSED=defaultdict(lambda: (0, 0)), WGMMA_FUSED_GAIN=(math.inf,) * 3,
        WGMMA_FUSED_KEYS=1, WGMMA_FUSED_LAG=lag, WGMMA_FUSED_ROWS={64: 0, 128: 0},
        WGMMA_FUSED_IN_ORDER={64: 0, 128: 0}, WGMMA_FUSED_STORED={64: 0, 128: 0}, WGMMA_PAIRED_ROWS=0,
        WGMMA_PAIRED_ODD=defaultdict(int), WGMMA_STORED_HEADS=0.0, WGMMA_TOGETHER=NEVER, WGMMA_DOWN_WAVES=0.0,
        WGMMA_SUMS=ONE_SUM, _order_gains=lambda *_: False,
    )  # fmt: skip
    with as_long, mock.patch.object(sections, "_section_in_order", lambda *_: 0):
        yield


def _soak(where: Where, kind: Kind, shapes: int, seed: int, oracle: bool, only: int | None) -> Row:
    backward = kind.backward
    counts: Counter[str] = Counter()
    families: Counter[str] = Counter()
    worst: dict[str, list[float]] = {}
    failures: list[Row] = []
    compared: Row = {}
    for n in range(shapes) if only is None else [only]:
        x = draw(kind, n, seed)
        try:
            made = make(x, where)
            families[served(made, "backward" if backward else "forward")] += 1
            spoil(made, backward)
            results = call(made, backward)
            expected = expected_of(made, results)
            found = ratios(made, results, expected)
            *values, empty, nothing = _together([*found.values(), made.empty_rows, made.nothing])
            if oracle and not compared and x.B * x.Hkv * x.group * x.Tq * x.Tk <= ORACLE_MOST:
                compared = of_oracle(x, made, results, expected)
                bad = {name: r for name, r in compared["worst"].items() if not r <= 1}
                if compared["apart"] > APART or bad:
                    failures.append({"shape": n, "what": f"NumPy oracle: {compared}", "call": x.words()})
        except Exception as error:
            traceback.print_exc()
            failures.append({"shape": n, "what": said(error), "call": x.words()})
            if lost(where):
                break
            continue
        counts.update(traits(x) + ["rows without keys"] * bool(empty) + ["nothing visible"] * bool(nothing))
        for name, value in zip(found, values, strict=True):
            if not value <= worst.get(name, [-1.0])[0]:
                worst[name] = [round(value, 4), n]
            if not value <= 1:
                failures.append({"shape": n, "what": f"{name}: {value:.4g} times the error allowed", "call": x.words()})
    return {"kind": asdict(kind), "seed": seed, "shapes": sum(families.values()), "served": dict(families),
            "worst": worst, "counts": dict(counts), "failures": failures} | (
                {"oracle": compared} if compared else {})  # fmt: skip


def spoil(made: Made, backward: bool) -> None:
    """Leave NaN in the memory that results of these sizes are likely to get: what is not written then shows."""
    import torch

    q, k, v, dout = (made.arrays[name] for name in ("q", "k", "v", "dout"))
    some = [torch.full(x.shape, math.nan, dtype=x.dtype, device=x.device) for x in ((q, k, v) if backward else ())]
    some += [torch.full(shape, math.nan, dtype=dtype, device=q.device)
             for shape, dtype in ((dout.shape, dout.dtype), (dout.shape[:-1], torch.float32))]  # fmt: skip
    del some


def _together(values: Sequence[Any]) -> list[float]:
    """Numbers on the device, all at once."""
    import torch

    made: list[float] = torch.stack([value.double().reshape(()) for value in values]).tolist()
    return made


def said(error: BaseException) -> str:
    """An exception in some words."""
    return f"{type(error).__name__}: {error}"[:TEXT]


def lost(where: Where) -> bool:
    """Does the GPU not answer this process any more?"""
    if where.device == "cpu":
        return False
    import torch

    try:
        torch.cuda.synchronize()
        torch.zeros(1, device=where.device).add_(1).item()
    except Exception:
        return True
    return False


# ---- one call many times -------------------------------------------------------------------------------------

#: name: dtype, d, causal, what else
REPEATED = {
    "d = 64, causal, grouped heads": dict(dtype="bfloat16", d=64, causal=True),
    "d = 128, causal, grouped heads": dict(dtype="bfloat16", d=128, causal=True),
    "d = 128": dict(dtype="float16", d=128, causal=False),
    "d = 256, causal": dict(dtype="bfloat16", d=256, causal=True),
    "d = 64, causal, softcap": dict(dtype="bfloat16", d=64, causal=True, softcap=5.0),
    "d = 128, causal, pieces done again": dict(dtype="bfloat16", d=128, causal=True, large=400.0),
    "d = 128, in pairs": dict(dtype="bfloat16", d=128, causal=False, T=1280, long=True),
    "d = 128, causal, in pairs": dict(dtype="float16", d=128, causal=True, T=1280, long=True),
    "d = 64, rows of others": dict(dtype="bfloat16", d=64, causal=False, T=1088, long=True),
    "d = 128, causal, rows of others": dict(dtype="bfloat16", d=128, causal=True, T=1152, long=True),
    "d = 64, several sums": dict(dtype="float16", d=64, causal=False, Hq=4),
    "d = 128, in pairs, several sums": dict(dtype="bfloat16", d=128, causal=False, T=1600),
    "d = 64, causal, several sums": dict(dtype="bfloat16", d=64, causal=True, Hq=2, Hkv=2, T=1600),
    "d = 128, causal, several sums": dict(dtype="float16", d=128, causal=True, Hq=4, T=1600),
    "d = 256, causal, several sums": dict(dtype="bfloat16", d=256, causal=True, Hq=4),
}
# Names with it are repeated in these ways alone
SOME_WAYS = {"again": ("forward",), "several": ("deterministic",), "in pairs": ("backward", "deterministic"),
             "others": ("backward", "deterministic")}  # fmt: skip
REPEATS = {"forward": 10_000, "backward": 10_000, "deterministic": 1_000}


def usual(where: Where, dtype: str, d: int, causal: bool, B: int = 2, Hq: int = 8, Hkv: int = 4, T: int = 1088,
          large: float = 1.0, softcap: float | None = None, backward: bool = True, seed: int = 0) -> Made:  # fmt: skip
    """A call of more pieces than multiprocessors; ``large``: one head's queries are multiplied by it."""
    import torch

    generator = torch.Generator(where.device).manual_seed(seed)
    how = dict(generator=generator, device=where.device)
    q, k, v, dout = (torch.randn(B, H, T, d, **how).to(getattr(torch, dtype)) for H in (Hq, Hkv, Hkv, Hq))
    q[:, 1] *= large
    at = torch.arange(T, device=where.device)
    visible = (at[:, None] >= at) if causal else torch.ones(T, T, dtype=torch.bool, device=where.device)
    rows = torch.ones(1, 1, T, dtype=torch.bool, device=where.device)
    clean = dense.Call(q, k, v, visible[None, None], rows, softcap=softcap, dout=dout if backward else None)
    arrays = {"q": q, "k": k, "v": v, "dout": dout}
    return Made(arrays, {"causal": causal, "softcap": softcap} | where.options(), None, clean, None, ~rows.any())


def _bits(a: Any) -> Any:
    import torch

    return a.view(torch.int16 if a.itemsize == 2 else torch.int32)


def repeats(where: Where, name: str, direction: str, times: int) -> Row:
    """A call many times, compared on the device; one number comes back at the end."""
    how = dict(REPEATED[name])
    with planned_as_long() if how.pop("long", False) else contextlib.nullcontext():
        return _repeats(where, how, direction, times)


def _repeats(where: Where, how: dict[str, Any], direction: str, times: int) -> Row:
    import torch

    import rawflash as rf

    made = usual(where, **how, backward=direction != "forward")
    options = made.options
    if direction == "deterministic":
        options["deterministic"] = True
    results = call(made, direction != "forward")
    expected = expected_of(made, results)
    worst = dict(zip(expected, _together(list(ratios(made, results, expected).values())), strict=True))
    q, k, v, dout = (made.arrays[name] for name in ("q", "k", "v", "dout"))
    kernel = served(made, "forward" if direction == "forward" else "backward")
    differ = torch.zeros((), dtype=torch.int64, device=where.device)
    begun = time.perf_counter()
    if direction == "forward":
        out = torch.empty_like(results["out"])
        first = [_bits(results[name]).clone() for name in ("out", "lse")]
        for _ in range(times):
            out.fill_(math.nan)  # a row that is not written shows
            _, lse = rf.attention(q, k, v, out=out, return_lse=True, **options)
            differ += (_bits(out) != first[0]).any() | (_bits(lse) != first[1]).any()
    elif direction == "deterministic":
        first = [_bits(a) for a in rf.attention_backward(dout, q, k, v, results["out"], results["lse"], **options)]
        for _ in range(times):
            again = rf.attention_backward(dout, q, k, v, results["out"], results["lse"], **options)
            others = [(_bits(a) != b).any() for a, b in zip(again, first, strict=True)]
            differ += torch.stack(others).any()
    else:
        bounds = [tuple(a.float() for a in expected[name]) for name in ("dq", "dk", "dv")]
        highest = torch.zeros(3, device=where.device)
        for _ in range(times):
            grads = rf.attention_backward(dout, q, k, v, results["out"], results["lse"], **options)
            found = [((a.float() - exact).abs_() / allowed).amax() for a, (exact, allowed) in
                     zip(grads, bounds, strict=True)]  # fmt: skip
            highest = torch.maximum(highest, torch.stack(found))  # a NaN stays
        for name, value in zip(("dq", "dk", "dv"), highest.tolist(), strict=True):
            worst[name] = value if math.isfinite(value) else math.inf
    count = int(differ.item())
    taken = time.perf_counter() - begun
    failures = [{"what": f"{count} of {times} results have other bits"}] if count else []
    failures += [{"what": f"{name}: {value:.4g} times the error allowed"} for name, value in worst.items()
                 if not value <= 1]  # fmt: skip
    row: Row = {"served": {kernel: times}, "repeats": times, "seconds_of_repeats": round(taken, 2)}
    row |= {} if direction == "backward" else {"other_bits": count}
    return row | {"worst": {name: round(value, 4) for name, value in worst.items()}, "failures": failures}


GRAPHS = {
    "d = 64, causal": dict(dtype="bfloat16", d=64, causal=True),
    "d = 128": dict(dtype="bfloat16", d=128, causal=False),
    "d = 128, causal, float16": dict(dtype="float16", d=128, causal=True),
    "d = 128, causal, deterministic": dict(dtype="bfloat16", d=128, causal=True, deterministic=True),
    "d = 256, causal": dict(dtype="bfloat16", d=256, causal=True),
}
REPLAYS = 20


def graphs(where: Where, name: str, replays: int = REPLAYS) -> Row:
    """Forward and backward pass of one call in one CUDA graph, replayed with other numbers in the same arrays."""
    import torch

    how = dict(GRAPHS[name])
    more = {"deterministic": True} if how.pop("deterministic", False) else {}
    made = usual(where, **how)
    made.options |= more
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(made, True)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        results = call(made, True)
    worst: dict[str, float] = {}
    for n in range(replays):
        fresh = usual(where, **how, seed=1 + n)
        for key, array in made.arrays.items():
            array.copy_(fresh.arrays[key])
        for a in results.values():
            a.fill_(math.nan)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        found = ratios(fresh, results, expected_of(fresh, results))
        for key, value in zip(found, _together(list(found.values())), strict=True):
            worst[key] = max(worst.get(key, 0.0), value)
    failures = [{"what": f"{key}: {value:.4g} times the error allowed"} for key, value in worst.items()
                if not value <= 1]  # fmt: skip
    return {"served": dict(Counter(served(made, way) for way in ("forward", "backward"))), "replays": replays,
            "worst": {key: round(value, 4) for key, value in worst.items()}, "failures": failures}  # fmt: skip


# ---- accuracy ------------------------------------------------------------------------------------------------

FAMILIES = (
    "normal", "later keys x 10", "later keys x 40", "later keys x 1000", "earlier keys x 10", "earlier keys x 40",
    "earlier keys x 1000", "first key x 300", "middle key x 300", "last key x 300", "ramp up to 50",
    "ramp down from 50", "ramp up to 2000", "ramp down from 2000", "first blocks -inf", "first blocks masked",
)  # fmt: skip
LENGTHS = (4096, 65536)
SAMPLED = 256  # rows of each head


def scores(name: str, T: int, d: int, dtype: str, device: str, H: int = 1, seed: int = 0) -> tuple[Any, ...]:
    """q, k and v of a family. The loop goes from the last key that a row sees to the first."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    q, k, v = (torch.randn(1, H, T, d, generator=generator, device=device) for _ in range(3))
    what, _, number = name.rpartition(" ")
    if what.startswith(("later keys", "earlier keys")):
        k[:, :, slice(T // 2, T) if what.startswith("later") else slice(0, T // 2)] *= float(number)
    elif "key x" in what:
        k[:, :, {"first": 0, "middle": T // 2, "last": T - 1}[name.partition(" ")[0]]] *= float(number)
    elif what.startswith("ramp"):
        ramp = torch.linspace(0, float(number), T, device=device)[:, None]
        k *= ramp if "up" in what else ramp.flip(0)
    elif name == "first blocks -inf":  # the last keys, and under a causal mask those before the diagonal of some rows
        q[..., 0] = 1
        k[:, :, T // 2 : T // 2 + T // 16, 0] = k[:, :, -T // 16 :, 0] = -math.inf
    return tuple(a.to(getattr(torch, dtype)) for a in (q, k, v))


def errors(got: Any, exact: Any, allowed: Any) -> Row:
    """Largest error, root of the mean of its squares, both as parts of the largest number, and by the bound."""
    error = (got.double() - exact).abs()
    highest, mean, most, by = _together([exact.abs().amax(), error.square().mean().sqrt(), error.amax(),
                                         dense.ratio(got, exact, allowed)])  # fmt: skip
    highest = highest or 1.0
    return {"largest": most / highest, "rms": mean / highest, "by_bound": round(by, 4)}


@contextlib.contextmanager
def exact_maximum() -> Iterator[None]:
    """Kernels that are made inside follow the maximum in all steps."""
    from rawflash import problem
    from rawflash.backends.cupy_raw.fa2_forward import EXACT_MAXIMUM

    with mock.patch.dict(os.environ, {EXACT_MAXIMUM: "1"}), mock.patch.object(problem, "_MEMO", {}):
        yield


def cudnn(q: Any, k: Any, v: Any, causal: bool, dout: Any = None) -> Any:
    """What cuDNN makes of it, in PyTorch: out, or with ``dout`` the gradients."""
    from bench.cases import Case
    from bench.inputs import Inputs
    from bench.peers import PEERS

    (B, H, T, d), peer = q.shape, PEERS["torch-cudnn"]
    case = Case(direction="forward" if dout is None else "backward", dtype=str(q.dtype).removeprefix("torch."),
                B=B, Hq=H, Hkv=H, Tq=T, Tk=T, d=d, dv=d, causal=causal)  # fmt: skip
    return peer.results(case, peer.prepare(case, Inputs(q, k, v, dout))())


def accuracy(where: Where, dtype: str, d: int, T: int, causal: bool, families: Sequence[str] = FAMILIES) -> Row:
    """Errors of out by family: ours, ours with the maximum followed, cuDNN's; rows are sampled."""
    import torch

    import rawflash as rf

    device, lines, failures = where.device, {}, []
    rows = torch.linspace(0, T - 1, min(SAMPLED, T), device=device).round().long().unique()
    at = torch.arange(T, device=device)
    kernels: Counter[str] = Counter()
    for n, name in enumerate(families):
        masked = name == "first blocks masked"
        if masked and not causal:
            continue
        q, k, v = scores(name, T, d, dtype, device, seed=n)
        options: Row = {"causal": causal} | where.options()
        shift = -(T // 2) if masked else 0  # half of the rows see no key, and the blocks that others see first are cut
        if masked:
            options["q_offset"] = shift
        visible = (rows[:, None] + shift >= at) if causal else torch.ones(len(rows), T, dtype=torch.bool, device=device)
        here = torch.ones(1, 1, len(rows), dtype=torch.bool, device=device)
        expected = dense.reference(dense.Call(q[:, :, rows], k, v, visible[None, None], here))
        ours = partial(rf.attention, q, k, v, **options)
        runs: dict[str, Callable[[], Any]] = {"rawflash": ours}
        if where.device != "cpu":
            runs["followed"] = ours
        if not masked and where.device != "cpu":  # cuDNN has no offset
            runs["cudnn"] = partial(cudnn, q, k, v, causal)
        line: Row = {}
        for who, run in runs.items():
            with exact_maximum() if who == "followed" else contextlib.nullcontext():
                try:
                    out = run()
                    out = out[0] if who == "cudnn" else out
                    line[who] = errors(out[:, :, rows], *expected["out"])
                except Exception as error:
                    line[who] = {"failed": said(error)}
                    if who != "cudnn":
                        failures.append({"family": name, "what": f"{who}: {said(error)}"})
                    if lost(where):
                        raise
        kernels[served(Made({"q": q, "k": k, "v": v}, options, None, None, None, None), "forward")] += 1  # type: ignore
        for who in ("rawflash", "followed"):
            if not line.get(who, {}).get("by_bound", 0.0) <= 1:
                failures.append({"family": name, "what": f"{who}: {line[who]['by_bound']} times the error allowed"})
        for key in ("rms", "largest"):
            line[f"{key}_by_cudnn"] = _by(line, key)
        if not (line["rms_by_cudnn"] or 0) <= BY_CUDNN:
            failures.append({"family": name, "what": f"error {line['rms_by_cudnn']} times that of cuDNN"})
        lines[name] = line
    return {"case": {"dtype": dtype, "d": d, "T": T, "causal": causal, "rows": len(rows)}, "families": lines,
            "served": dict(kernels), "failures": failures}  # fmt: skip


def _by(line: Row, key: str, mine: str = "rawflash") -> float | None:
    """Ours by cuDNN's; None where that has no figure."""
    ours, theirs = (line.get(who, {}).get(key) for who in (mine, "cudnn"))
    if ours is None or theirs is None or not math.isfinite(theirs):
        return None
    if theirs == 0:
        return 1.0 if ours == 0 else math.inf
    return round(ours / theirs, 3)


GRADIENT_DRAWS = 8
GRADIENT_FAMILIES = ("normal", "later keys x 10", "earlier keys x 10", "ramp up to 10")


def gradients(where: Where, dtype: str, d: int, T: int, causal: bool, long: bool = False,
              families: Sequence[str] = GRADIENT_FAMILIES, draws: int = GRADIENT_DRAWS) -> Row:  # fmt: skip
    """Errors of all gradients by family, each side from its own out and lse: ours, cuDNN's, and ours from its out.

    Those of several draws together; what each of them says of ours from cuDNN's out is told beside it, since a ratio
    near 1 may be one draw's chance.
    """
    lines, failures = {}, []
    kernels: Counter[str] = Counter()
    with planned_as_long() if long else contextlib.nullcontext():
        for n, name in enumerate(families):
            found = [_gradients(where, dtype, d, T, causal, name, 100 + n + 1000 * draw, kernels)
                     for draw in range(draws)]  # fmt: skip
            line: Row = {}
            if why := next((one["cudnn_failed"] for one in found if "cudnn_failed" in one), ""):
                line["cudnn_failed"] = why
            for result in ("out", "dq", "dk", "dv"):
                each = [one[result] for one in found]
                whose = [who for who in each[0] if all(who in one for one in each)]
                together: Row = {who: _pooled([one[who] for one in each]) for who in whose}
                line[result] = together
                if "cudnn" in together:
                    for key in ("largest", "rms"):
                        together[f"{key}_by_cudnn"] = _by(together, key)
                if "same_out" in together:
                    key = "rms_by_cudnn_of_the_same_out"
                    together[key] = _by(together, "rms", "same_out")
                    together[f"{key}_by_draw"] = [_by(one, "rms", "same_out") for one in each]
                for key in ("rms_by_cudnn", "rms_by_cudnn_of_the_same_out"):
                    by = together.get(key)
                    if not (by or 0) <= BY_CUDNN:
                        failures.append({"family": name, "what": f"{result}: {key} is {by}"})
                by_bound = together["rawflash"]["by_bound"]
                if not by_bound <= 1:
                    failures.append({"family": name, "what": f"{result}: {by_bound} times the error allowed"})
            lines[name] = line
    return {"case": {"dtype": dtype, "d": d, "T": T, "causal": causal}, "draws": draws, "families": lines,
            "served": dict(kernels), "failures": failures}  # fmt: skip


def _pooled(found: Sequence[Row]) -> Row:
    """:func:`errors` of several draws together."""
    return {
        "largest": max(row["largest"] for row in found),
        "rms": math.sqrt(sum(row["rms"] ** 2 for row in found) / len(found)),
        "by_bound": max(row["by_bound"] for row in found),
    }


def _gradients(where: Where, dtype: str, d: int, T: int, causal: bool, family: str, seed: int,
               kernels: Counter[str]) -> Row:  # fmt: skip
    """:func:`errors` of out and of the gradients of one draw, by who computed them."""
    import torch

    import rawflash as rf

    device = where.device
    at = torch.arange(T, device=device)
    visible = (at[:, None] >= at) if causal else torch.ones(T, T, dtype=torch.bool, device=device)
    rows = torch.ones(1, 1, T, dtype=torch.bool, device=device)
    q, k, v = scores(family, T, d, dtype, device, H=4, seed=seed)
    dout = torch.randn(q.shape, generator=torch.Generator(device).manual_seed(seed + 500), device=device).to(q.dtype)
    clean = dense.Call(q, k, v, visible[None, None], rows, dout=dout)
    arrays = {"q": q, "k": k, "v": v, "dout": dout}
    made = Made(arrays, {"causal": causal} | where.options(), None, clean, None, None)
    kernels[served(made, "backward")] += 1
    results = call(made, True)
    expected = expected_of(made, results)
    theirs: dict[str, Any] = {}
    line: Row = {}
    if where.device != "cpu":
        try:
            found = *cudnn(q, k, v, causal), *cudnn(q, k, v, causal, dout)
            theirs = dict(zip(("out", "dq", "dk", "dv"), found, strict=True))
        except Exception as error:
            line["cudnn_failed"] = said(error)
            if lost(where):
                raise
    # What the backward pass itself adds: ours from the out that theirs is from
    same: dict[str, Any] = {}
    if theirs:
        found = rf.attention_backward(dout, q, k, v, theirs["out"].to(q.dtype), results["lse"], **made.options)
        same = dict(zip(("dq", "dk", "dv"), found, strict=True))
    for result in ("out", "dq", "dk", "dv"):
        of = {"rawflash": results, "cudnn": theirs, "same_out": same}
        line[result] = {who: errors(made_by[result], *expected[result])
                        for who, made_by in of.items() if result in made_by}  # fmt: skip
    return line


REDO_ROUNDS, REDO_CALLS = 7, 5
REDO_HEADS = {4096: 64, 16384: 16}  # by T: enough that launches are hidden


def redo(where: Where, d: int, T: int, causal: bool) -> Row:
    """Microseconds of a call of which no piece is done again, one or almost all, and of the loop that follows the
    maximum."""
    import torch

    import rawflash as rf
    from bench import timing
    from rawflash import problem
    from rawflash.backends.cupy_raw.fa2_forward import EXACT_MAXIMUM

    H, queue, memo = REDO_HEADS[T], timing.TorchQueue(), dict[Any, Any]()

    def followed(*arrays: Any, **options: Any) -> Any:
        with mock.patch.dict(os.environ, {EXACT_MAXIMUM: "1"}), mock.patch.object(problem, "_MEMO", memo):
            return rf.attention(*arrays, **options)

    turns: dict[str, Any] = {}
    with queue:
        normal = scores("normal", T, d, "bfloat16", where.device, H=H)
        one, most = (tuple(a.clone() for a in normal) for _ in range(2))
        one[0][:, 0, T - 1] *= 400
        # The larger the farther from those that the loop meets first; the first rows of a causal call meet all at once
        most[0][..., 0] = 1
        most[1][..., 0] = torch.linspace(0.6 * math.sqrt(d) * T, 0, T, device=where.device)
        for name, function, arrays in (
            ("none", rf.attention, normal), ("one row", rf.attention, one), ("almost all", rf.attention, most),
            ("none, maximum followed", followed, normal), ("almost all, maximum followed", followed, most),
        ):  # fmt: skip
            turns[name] = timing.Queued(queue, [partial(function, *arrays, causal=causal)] * REDO_CALLS)
            turns[name].warm()
    found = {}
    for name, times in timing.alternate(turns, dict.fromkeys(turns, REDO_ROUNDS)).items():
        if isinstance(times, Exception):
            raise times
        found[name] = timing.quantiles(times)
    base = found["none"][1]
    return {"case": {"dtype": "bfloat16", "B": 1, "H": H, "d": d, "T": T, "causal": causal}, "us": found,
            "by_none": {name: round(times[1] / base, 3) for name, times in found.items()}, "failures": []}  # fmt: skip


# ---- jobs ----------------------------------------------------------------------------------------------------


def jobs(parts: Sequence[str], seed: int, sets: int | None = None, shapes: int | None = None) -> list[Job]:
    """What there is to do; what takes longest first."""
    found: list[Job] = []
    if "repeats" in parts:
        for direction, times in REPEATS.items():
            for name in REPEATED:
                if all(direction in ways for word, ways in SOME_WAYS.items() if word in name):
                    found.append(Job(f"repeats/{direction}, {name}", "repeats",
                                     {"name": name, "direction": direction, "times": times}))  # fmt: skip
    if "accuracy" in parts:
        found += [Job(f"accuracy/{dtype}, d = {d}, T = {T}" + ", causal" * causal, "accuracy",
                      {"dtype": dtype, "d": d, "T": T, "causal": causal})
                  for T in reversed(LENGTHS) for dtype in ("bfloat16", "float16") for d in (64, 128)
                  for causal in (False, True)]  # fmt: skip
    if "gradients" in parts:
        found += [Job(f"gradients/{dtype}, d = {d}, T = {T}" + ", causal" * causal, "gradients",
                      {"dtype": dtype, "d": d, "T": T, "causal": causal})
                  for dtype in ("bfloat16", "float16") for d, T in ((64, 2048), (128, 2048), (256, 1088))
                  for causal in (False, True)]  # fmt: skip
        found += [Job("gradients/bfloat16, d = 128, T = 2048, in pairs" + ", causal" * causal, "gradients",
                      {"dtype": "bfloat16", "d": 128, "T": 2048, "causal": causal, "long": True})
                  for causal in (False, True)]  # fmt: skip
    if "graphs" in parts:
        found += [Job(f"graphs/{name}", "graphs", {"name": name}) for name in GRAPHS]
    for part in ("backward", "long", "forward"):
        if part in parts:
            drawn = kinds(part, seed, sets)
            drawn.sort(key=lambda kind: -max(kind.d, kind.dv))
            found += [Job(kind.name, "soak", {"kind": kind, "shapes": shapes or SHAPES[part], "seed": seed,
                                              "oracle": kind.number % ORACLE_EVERY == 0})
                      for kind in drawn]  # fmt: skip
    return found


def alone(parts: Sequence[str]) -> list[Job]:
    """What is timed, and so has the GPU for itself."""
    if "redo" not in parts:
        return []
    return [Job(f"redo/d = {d}, T = {T}" + ", causal" * causal, "redo", {"d": d, "T": T, "causal": causal})
            for d in (64, 128) for T in REDO_HEADS for causal in (False, True)]  # fmt: skip


def prepare(where: Where) -> None:
    """A process that does jobs: small calls, too, go to the kernels of sm_90."""
    import torch

    from rawflash import sm90

    sm90.WGMMA_FEWEST = 0.0
    torch.set_float32_matmul_precision("highest")


def do(where: Where, job: Job) -> Row:
    """The row of a job, whatever happens; "lost" in it: this process cannot use the GPU any more."""
    begun = time.perf_counter()
    try:
        row = globals()[job.function](where, **job.given)
    except Exception as error:
        traceback.print_exc()
        row = {"failures": [{"what": said(error)}]}
    if row["failures"] and lost(where):
        row["lost"] = True
    return {"name": job.name} | row | {"seconds": round(time.perf_counter() - begun, 2)}


class Worker:
    """A process that does one job after the other."""

    def __init__(self, where: Where) -> None:
        context = multiprocessing.get_context("spawn")
        self._where = where
        self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=prepare, initargs=(where,))

    def begin(self, job: Job) -> Future[Row]:
        return self._pool.submit(do, self._where, job)

    def leave(self, wait: bool) -> None:
        """There is no other job."""
        self._pool.shutdown(wait)

    def kill(self) -> None:
        """Whatever it does."""
        processes = list((self._pool._processes or {}).values())
        for process in processes:
            process.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)


def share(where: Where, todo: Sequence[Job], processes: int, end: float, limit: float,
          done: Callable[[Row], None]) -> None:  # fmt: skip
    """Do jobs in processes, or in this one if there are to be none; those not begun at ``end`` are left.

    A process that has lost the GPU, ended, or not ended its job within ``limit`` seconds is replaced.
    """
    waiting = deque(todo)
    if not processes:
        prepare(where)
        while waiting and time.monotonic() < end:
            done(do(where, waiting.popleft()))
        return
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    running: dict[Future[Row], tuple[Worker, Job, float]] = {}
    idle: list[Worker] = []

    def begin(worker: Worker | None) -> None:
        if waiting and time.monotonic() < end:
            job, worker = waiting.popleft(), worker or Worker(where)
            running[worker.begin(job)] = worker, job, time.monotonic()
        elif worker:
            worker.leave(wait=False)
            idle.append(worker)

    for _ in range(processes):
        begin(None)
    while running:
        ended, _ = wait(running, timeout=1, return_when=FIRST_COMPLETED)
        for future in ended:
            worker, job, _ = running.pop(future)
            error = future.exception()  # of the process, not of the job
            row = {"name": job.name, "failures": [{"what": said(error)}]} if error else future.result()
            done(row)
            if error or row.get("lost"):
                worker.kill()
                begin(None)
            else:
                begin(worker)
        for future, (worker, job, begun) in list(running.items()):
            if time.monotonic() - begun > limit and not future.done():
                del running[future]
                worker.kill()
                what = f"no end after {limit:.0f} s: what a deadlock looks like"
                done({"name": job.name, "failures": [{"what": what}], "stuck": True})
                begin(None)
    for worker in idle:  # what comes next may be timed
        worker.leave(wait=True)


# ---- the record ----------------------------------------------------------------------------------------------


def summary(rows: Sequence[Row]) -> Row:
    """For each part: jobs, calls, who served them, the largest ratio of each result, what is covered, failures."""
    found: Row = {}
    for part in PARTS:
        mine = [row for row in rows if row["name"].startswith(part + "/")]
        if not mine:
            continue
        worst: dict[str, float] = {}
        kernels: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for row in mine:
            for name, value in row.get("worst", {}).items():
                value = value[0] if isinstance(value, list) else value
                worst[name] = value if not value <= worst.get(name, -1.0) else worst[name]
            kernels.update(row.get("served", {}))
            counts.update(row.get("counts", {}))
        entry: Row = {"jobs": len(mine), "calls": sum(kernels.values()), "served": dict(kernels.most_common()),
                      "failures": sum(len(row["failures"]) for row in mine),
                      "seconds_of_jobs": round(sum(row.get("seconds", 0.0) for row in mine), 1)}  # fmt: skip
        oracle = [row["oracle"] for row in mine if "oracle" in row]
        entry |= {"worst": worst} if worst else {}
        entry |= {"counts": dict(sorted(counts.items()))} if counts else {}
        if oracle:
            entry["oracle"] = {"calls": len(oracle), "apart": max(x["apart"] for x in oracle),
                               "bound_by_oracle": max(x["bound_by_oracle"] for x in oracle)}  # fmt: skip
        found[part] = entry
    return found


def finite(value: Any) -> Any:
    """Numbers that JSON has not as words."""
    if isinstance(value, dict):
        return {key: finite(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m bench.reliability", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--record", type=Path, metavar="FILE", help="where to write what was found; default: nowhere")
    found.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="only these")
    found.add_argument("--only", nargs="+", metavar="NAME", help="only jobs of these names")
    found.add_argument("--shape", type=int, help="of a job that draws, only this shape")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--sets", type=int, help="sets of constants of a part that draws")
    found.add_argument("--shapes", type=int, help="calls of each set")
    found.add_argument("--seconds", type=float, default=400, help="no job is begun after this time")
    found.add_argument("--limit", type=float, default=150, help="seconds that a job may take")
    found.add_argument("--processes", type=int, default=min(PROCESSES, os.cpu_count() or 1), help="0: in this one")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                       help="cpu: numpy_tiled, for a look at the script itself")  # fmt: skip
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is asked for; the exit status."""
    options = parser().parse_args(arguments)
    where = Where(options.device, "numpy_tiled" if options.device == "cpu" else None)
    todo, last = jobs(options.part, options.seed, options.sets, options.shapes), alone(options.part)
    if options.only:
        todo, last = ([job for job in some if job.name in options.only] for some in (todo, last))
    if options.device == "cpu":  # graphs and times are of a GPU
        todo, last = [job for job in todo if job.part not in ("graphs",)], []
    if options.shape is not None:
        todo = [job for job in todo if job.function == "soak"]
        for job in todo:
            job.given["only"] = options.shape
    if not todo + last:
        print("nothing to do", file=sys.stderr)
        return EXIT_USAGE
    rows: list[Row] = []
    found: Row = {"schema": SCHEMA, "device": "gpu" if options.device == "cuda" else "cpu"}
    found |= record.about(options.device == "cuda")
    found |= {"seed": options.seed, "parts": options.part, "processes": options.processes}
    begun, total = time.monotonic(), len(todo) + len(last)
    print(f"{total} jobs, {options.processes} processes, {found.get('gpu') or found['cpu']}", flush=True)

    def save(**more: Any) -> None:
        if options.record:
            seconds = round(time.monotonic() - begun, 1)
            record.write(options.record, found | finite({"seconds": seconds, "summary": summary(rows), **more,
                                                         "rows": rows}))  # fmt: skip

    def done(row: Row) -> None:
        rows.append(row)
        for failure in row["failures"]:
            print(f"FAILED {row['name']}: {failure}", flush=True)
        if len(rows) % 10 == 0 or row.get("seconds", 0) > 20 or not row["name"].startswith(tuple(SHAPES)):
            taken = f"{time.monotonic() - begun:.0f} s, {row['name']}: {row.get('seconds', 0):.1f} s"
            print(f"[{len(rows)}/{total}] {taken}", flush=True)
            save()

    end = begun + options.seconds
    share(where, todo, options.processes, end, options.limit, done)
    share(where, last, min(options.processes, 1), end, options.limit, done)
    ran = {row["name"] for row in rows}
    missing = [job.name for job in todo + last if job.name not in ran]
    save(**({"not_run": missing} if missing else {}))
    for part, entry in summary(rows).items():
        print(f"{part}: {finite(entry)}", flush=True)
    failures = sum(len(row["failures"]) for row in rows)
    print(f"{failures} failures, {len(missing)} jobs not run, {time.monotonic() - begun:.0f} s", flush=True)
    if any(row.get("stuck") for row in rows):
        sys.stdout.flush()
        os._exit(EXIT_STUCK)  # a process that cannot be ended would hold this one
    return EXIT_FAILED if failures or missing else 0


if __name__ == "__main__":
    sys.exit(main())
