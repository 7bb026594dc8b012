"""Dense attention in float64, its gradients, and the errors that the contract allows, in PyTorch: all heads at once.

What :mod:`rawflash.accuracy` computes with NumPy for one head after the other, for the runs that need it thousands of
times: on a GPU a call of some hundred rows takes milliseconds. Written on its own, from the formulas there; no bound is
wider (what that adds for exponentials that underflow, 2**-126 and its like, is left out here but for sinks, whose
gradient may be as small as that).
``bench.reliability`` compares the two on some of its calls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rawflash.accuracy import MULTIPLES, ORDERS, UNDERFLOW, UNIT_ROUNDOFF

FORWARD = ("out", "lse")


@dataclass
class Call:
    """A call whose rows and keys are told apart by masks.

    Attributes
    ----------
    q, k, v, dout : Tensor
        ``(B, H, T, d)`` in the call's dtype, finite also where there is padding; dout None: forward only.
    visible : Tensor
        bool, ``(B or 1, 1, Tq, Tk)``.
    rows : Tensor
        bool, ``(B or 1, 1, Tq)``: False where a row is padding.
    distance, slopes : Tensor
        Of ALiBi, to be multiplied and taken off the scores; None without.
    sinks : Tensor
        ``(Hq,)`` or None.
    dlse : Tensor
        ``(B, Hq, Tq)`` or None.
    scale : float
        None: 1 / sqrt(d).
    """

    q: Any
    k: Any
    v: Any
    visible: Any
    rows: Any
    dout: Any = None
    dlse: Any = None
    distance: Any = None
    slopes: Any = None
    sinks: Any = None
    softcap: float | None = None
    scale: float | None = None

    def names(self) -> tuple[str, ...]:
        """Results: out, lse, gradients of what is there."""
        if self.dout is None:
            return FORWARD
        return (*FORWARD, "dq", "dk", "dv") + (("dsinks",) if self.sinks is not None else ())

    def dtypes(self) -> dict[str, Any]:
        """Of each result."""
        import torch

        found = dict.fromkeys(self.names(), self.q.dtype)
        found["lse"] = torch.float32
        if self.sinks is not None and "dsinks" in found:
            found["dsinks"] = self.sinks.dtype
        return found


def _named(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def reference(x: Call, given: tuple[Any, Any] | None = None) -> dict[str, tuple[Any, Any]]:
    """For each result, what it is in float64 and the largest error allowed, element by element.

    ``given`` are out and lse that the backward call starts from, ``(B, H, T, ...)``: then gradients of ``E`` do, too.
    One evaluation more than :mod:`rawflash.accuracy` has takes its products from tensor cores, where there are some:
    these add in float32 but round towards zero, as 16-bit kernels cannot help.
    """
    import torch

    exact, size, largest, flushed = _exact(x)
    dtypes, name = x.dtypes(), _named(x.q.dtype)
    E: dict[str, Any] = {}
    orders = (*MULTIPLES, 1.0) if x.q.is_cuda and x.q.shape[2] and x.k.shape[2] else MULTIPLES
    for order, multiple in enumerate(orders):
        for result, made in _baseline(x, order, multiple, given).items():
            error = (made.to(dtypes[result]).double() - exact[result]).abs()
            error = torch.where(error.isfinite(), error, 0.0).amax() if error.numel() else error.new_zeros(())
            E[result] = torch.maximum(E[result], error) if order else error
    found = {}
    for result in x.names():
        eps = UNIT_ROUNDOFF["float32" if result == "lse" else name]
        highest = torch.where(exact[result].isfinite(), exact[result], 0.0).abs()
        highest = highest.amax() if highest.numel() else highest.new_zeros(())
        allowed = 2.0 * E[result] + eps * highest + UNDERFLOW[_named(dtypes[result])]
        if result == "dsinks":
            allowed = allowed + UNDERFLOW["float32"] * flushed
        found[result] = exact[result], allowed + 2.0 * UNIT_ROUNDOFF["float32"] * (1.0 + largest) * size[result]
    return found


def ratio(got: Any, exact: Any, allowed: Any) -> Any:
    """Largest ratio of error to allowed error, on the device; infinite where a NaN or an infinity is out of place."""
    import torch

    if got.shape != exact.shape:
        raise ValueError(f"shape {tuple(got.shape)}; expected {tuple(exact.shape)}")
    if not got.numel():
        return exact.new_zeros(())
    wide = got.double()
    equal = (wide == exact) | (wide.isinf() & (wide == exact.to(got.dtype).double()))
    found = torch.where(equal, 0.0, (wide - exact).abs() / allowed)
    return torch.where(found.isfinite(), found, math.inf).amax()


def _wide(x: Call, dtype: Any) -> tuple[Any, ...]:
    """q, k, v of each query head, and dout, dlse, sinks (-inf: none), bias by ALiBi, scale."""
    group = x.q.shape[1] // x.k.shape[1]
    q, k, v = x.q.to(dtype), *(a.to(dtype).repeat_interleave(group, 1) for a in (x.k, x.v))
    dout = None if x.dout is None else x.dout.to(dtype)
    dlse = q.new_zeros(q.shape[:3]) if x.dlse is None else x.dlse.to(dtype)
    sinks = q.new_full(q.shape[1:2], -math.inf) if x.sinks is None else x.sinks.to(dtype)
    alibi = None if x.slopes is None else x.slopes.to(dtype) * x.distance.to(dtype)
    scale = 1 / math.sqrt(q.shape[-1]) if x.scale is None else x.scale
    return q, k, v, dout, dlse, sinks[:, None], alibi, scale


def _scores(x: Call, S: Any, alibi: Any) -> tuple[Any, Any]:
    """Softcap, ALiBi, selection; and the tangent."""
    import torch

    tanh = None
    if x.softcap is not None:
        tanh = torch.tanh(S / x.softcap)
        S = x.softcap * tanh
    if alibi is not None:
        S = S - alibi
    return torch.where(x.visible, S, -math.inf), tanh


def _softmax(x: Call, S: Any, sinks: Any) -> tuple[Any, Any, Any]:
    """exp(S - m), the denominator, lse; rows of padding have 0, 0 and -inf."""
    import torch

    highest = S.amax(-1) if S.shape[-1] else S.new_full(S.shape[:-1], -math.inf)
    m = torch.maximum(highest, sinks)
    m = torch.where(m == -math.inf, 0.0, m)
    E = torch.where(x.visible, torch.exp(S - m[..., None]), 0.0)
    total = torch.where(x.rows, E.sum(-1) + torch.exp(sinks - m), 0.0)
    return E, total, m + torch.log(total)


def _over_group(x: Call, a: Any) -> Any:
    """Gradients of the query heads that share a key head, added."""
    heads = x.k.shape[1]
    return a.unflatten(1, (heads, a.shape[1] // heads)).sum(2)


def _divided(a: Any, total: Any) -> Any:
    import torch

    return torch.where(total == 0, 0.0, a / total)


def _exact(x: Call) -> tuple[dict[str, Any], dict[str, Any], Any, Any]:
    """Results in float64; the same with every factor's absolute value and sums for differences; the largest score; of
    the second, the gradient of sinks with every probability 1, as those below float32's may come out as 0."""
    import torch

    q, k, v, dout, dlse, sinks, alibi, scale = _wide(x, torch.float64)
    S, tanh = _scores(x, scale * (q @ k.mT), alibi)
    E, total, lse = _softmax(x, S, sinks)
    P = torch.where(x.visible, _divided(E, total[..., None]), 0.0)
    O, above = P @ v, P @ v.abs()
    scores = torch.where(S.isfinite(), S, 0.0).abs()
    largest = scores.amax() if scores.numel() else scores.new_zeros(())
    exact, size = {"out": O, "lse": lse}, {"out": above, "lse": torch.ones_like(lse)}
    del E, scores, S
    if dout is None:
        return exact, size, largest, None
    P_sink = torch.where(total == 0, 0.0, torch.exp(sinks - lse))
    flushed = None
    for found, do, dl, o, values, queries, keys, sign in (
        (exact, dout, dlse, O, v, q, k, -1.0),
        (size, dout.abs(), dlse.abs(), above, v.abs(), q.abs(), k.abs(), 1.0),
    ):
        gamma = (do * o).sum(-1)
        dS = torch.where(x.visible, P * (do @ values.mT + sign * gamma[..., None] + dl[..., None]), 0.0)
        if tanh is not None:
            dS = dS * (1.0 + sign * tanh**2)
        found["dq"] = scale * (dS @ keys)
        found["dk"] = _over_group(x, scale * (dS.mT @ queries))
        found["dv"] = _over_group(x, P.mT @ do)
        if x.sinks is not None:
            found["dsinks"] = (P_sink * (dl + sign * gamma)).sum((0, 2))
            flushed = (dl + sign * gamma).abs().sum((0, 2))
    return exact, size, largest, flushed


def _baseline(x: Call, order: int, multiple: float, given: tuple[Any, Any] | None) -> dict[str, Any]:
    """The formula as a kernel rounds it: float32, with O and ``multiple`` times P and dS in the call's dtype.

    ``order`` is into how many sums those over the head dimensions are parted; :data:`ORDERS`: by tensor cores.
    """
    import torch

    q, k, v, dout, dlse, sinks, alibi, scale = _wide(x, torch.float32)

    def rounded(a: Any) -> Any:
        return a.to(x.q.dtype).float()

    def in_product(a: Any) -> Any:
        return rounded(a * multiple) / multiple

    def product(a: Any, b: Any) -> Any:
        if order == ORDERS:
            rows, columns = a.shape[2], b.shape[2]  # of which there may be too few for tensor cores
            full = [torch.nn.functional.pad(c.to(x.q.dtype), (0, 0, 0, -c.shape[2] % 16)).flatten(0, 1) for c in (a, b)]
            made = torch.bmm(full[0], full[1].mT, out_dtype=torch.float32).unflatten(0, a.shape[:2])
            return made[:, :, :rows, :columns]
        n = order + 1
        return sum(a[..., first::n] @ b[..., first::n].mT for first in range(n))

    S, tanh = _scores(x, scale * product(q, k), alibi)
    E, total, lse = _softmax(x, S, sinks)
    P = _divided(E, total[..., None])
    O = in_product(P) @ v
    found = {"out": O, "lse": lse}
    if dout is None:
        return found
    if given is not None:
        O, lse = given[0].float(), given[1]
    finite = torch.where(lse.isfinite(), lse, 0.0)
    P = torch.where(x.visible, torch.exp(S - finite[..., None]), 0.0)
    gamma = (dout * rounded(O)).sum(-1)
    dS = torch.where(x.visible, P * (product(dout, v) - gamma[..., None] + dlse[..., None]), 0.0)
    dQK = in_product(dS if tanh is None else dS * (1 - tanh**2))
    found |= {
        "dq": scale * (dQK @ k),
        "dk": _over_group(x, scale * (dQK.mT @ q)),
        "dv": _over_group(x, in_product(P).mT @ dout),
    }
    if x.sinks is not None:
        P_sink = torch.where(total == 0, 0.0, torch.exp(sinks - finite))
        found["dsinks"] = (P_sink * (dlse - gamma)).sum((0, 2))
    return found
