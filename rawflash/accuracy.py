"""How close is close enough? The bound on errors (documentation, "Conventions"), computed for one call.

For ``out``, ``lse`` and every gradient, element by element::

    |x - oracle| <= 2 E + eps max|oracle| + 2 eps32 (1 + max|s|) A

``E`` is the largest error of a *baseline*: the dense formula evaluated in the call's dtype the way any
tiled kernel has to (products accumulated in float32, P and dS rounded to the dtype before they enter a
product, results rounded to the dtype). ``eps`` is the unit roundoff of the call's dtype (for lse: of
lse's own), ``eps32`` that of float32, ``s`` the visible scores (after softcap, bias and ALiBi), and ``A``
the formula with the absolute value of every factor and every difference made a sum: what rounding errors
are proportional to. For lse, ``A`` is 1. float64 calls: ``1e-12 A``, with ``A = 1 + max|s|`` for lse.

So a tolerance is never a decimal that somebody chose: it follows from the arrays and the options.

Details that the formula leaves open, decided here:

- The formula fixes neither the order of its sums nor at which scale P and dS are rounded. ``E`` is the largest error of
  :data:`ORDERS` evaluations, each of them one that the formula allows. One alone is a sample: in a small call it may
  happen to round the right way, and no kernel, however careful, stays within twice an error that luck made small.
  (Measured by tests/one_evaluation.py, NumPy loops and compiled kernels alike: of 16-bit results about one in 300
  exceeds the bound of one evaluation, and one in some thousands if that starts from the very O and lse that the
  backward call was given: the rounding of O, which all gradients of a row share, is most of it.)
- A kernel adds the products of a score in an order of its own. Where products cancel, one order may be lucky, and
  softmax multiplies what that hides.
- Where P and dS are rounded to 16 bits, kernels differ in what they round: P, P times its denominator, P relative to
  the maximum so far, with or without the scale. All are multiples of one another, and rounding is one for every
  multiple between two powers of two. Each order takes another multiple, :data:`MULTIPLES`.
- Below the smallest normal number a dtype has no relative accuracy, so that number (float16: its
  smallest subnormal, since no hardware flushes those) is added to every bound. A probability below float32's
  may come out as 0, so that number times A with every probability 1 is added too.
- An overflow of the baseline says nothing; ``E`` runs over the elements where it is finite.
- An element that overflows the result's dtype is right if it equals the oracle rounded to that dtype.
- bias and sinks may be float32 in a float64 call; their gradients then round to float32, which the bound
  allows element by element.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from rawflash import oracle

__all__ = ["Reference", "allowed_error", "error_ratio", "errors", "reference", "unit_roundoff"]

#: Unit roundoff 2**-p, p the bits of the significand, by dtype name.
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
#: Numbers up to this size may come out as 0.
UNDERFLOW = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
#: The baseline is evaluated in so many orders of summation, see above.
ORDERS = 8
#: In a 16-bit call it then rounds these multiples of P and dS, one for each order.
MULTIPLES = tuple(2.0 ** (i / ORDERS) for i in range(ORDERS))
#: float64 kernels are within this of the oracle, times A.
FLOAT64_BOUND = 1e-12


@dataclass(frozen=True)
class Reference:
    """The oracle's results for one call and the errors allowed, by name.

    The names are "out", "lse" and, for each gradient asked for, "dq", "dk", "dv", "dbias", "dsinks".

    Attributes
    ----------
    oracle : dict of str to float64 ndarray
        In the shape and layout that the call returns.
    allowed : dict of str to float64 ndarray
        Same shapes: the largest absolute error a result may have.
    dtypes : dict of str to str
        Name of the dtype in which the call returns each result.
    """

    oracle: dict[str, np.ndarray]
    allowed: dict[str, np.ndarray]
    dtypes: dict[str, str]


def reference(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    dout: npt.ArrayLike | None = None,
    *,
    out: npt.ArrayLike | None = None,
    lse: npt.ArrayLike | None = None,
    dlse: npt.ArrayLike | None = None,
    wrt: tuple[str, ...] = ("q", "k", "v"),
    dtype: str | None = None,
    evaluations: int = ORDERS,
    cu_seqlens_q: npt.ArrayLike | None = None,
    cu_seqlens_k: npt.ArrayLike | None = None,
    **options: Any,
) -> Reference:
    """Evaluate the oracle and the allowed errors of a call, forward and backward, once.

    Parameters
    ----------
    q, k, v : arrays
        As in `rawflash.attention`, or as in `rawflash.attention_varlen` if ``cu_seqlens_*`` are given.
    dout : array, optional
        Gradient with respect to the output. None: forward only.
    out, lse : array, optional
        What the backward call is given, which ``E`` then starts from; None: each evaluation's own.
    dlse : array, optional
        Gradient with respect to lse.
    wrt : tuple of str
        Gradients: "q", "k", "v", "bias", "sinks".
    dtype : str, optional
        Name of the call's dtype; None means that of ``q``. For arrays widened on their way here, such as
        bfloat16 as float32; a bias or sinks of the dtype of ``q`` then counts as widened too.
    evaluations : int
        ``E`` is the largest error of so many, at most :data:`ORDERS`.
    **options
        As in the call.

    Returns
    -------
    Reference

    Examples
    --------
    >>> import numpy as np
    >>> x = np.ones((2, 4), np.float32)
    >>> r = reference(x, x, x)
    >>> r.oracle["out"].shape, bool((r.allowed["out"] < 1e-5).all())
    ((2, 4), True)
    """
    dtype = np.asarray(q).dtype.name if dtype is None else str(dtype)
    names = ("out", "lse") + (() if dout is None else tuple("d" + name for name in wrt))
    dtypes = {name: dtype for name in names}
    dtypes["lse"] = "float64" if dtype == "float64" else "float32"
    for name in ("bias", "sinks"):
        if "d" + name in names:
            own = np.asarray(options[name]).dtype
            dtypes["d" + name] = dtype if own == np.asarray(q).dtype else own.name

    call = oracle.Call(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)
    dO = None if dout is None else call.four_axes(np.asarray(dout))
    dL = call.zeros("lse") if dlse is None else call.lse_axes(dlse)
    multiples = {"float64": (), "float32": (1.0,) * ORDERS}.get(dtype, MULTIPLES)  # only 16 bits round P at all
    multiples = multiples[:evaluations]
    given_O = None if out is None else call.four_axes(np.asarray(out))
    given_lse = None if lse is None else call.lse_axes(lse)
    exact, size, flushed, *baselines = (
        {name: call.zeros(name.removeprefix("d")) - (np.inf if name == "lse" else 0.0) for name in names}
        for _ in range(3 + len(multiples))
    )
    largest_score = 0.0

    for x in call.heads():
        places = {
            "out": x.rows,
            "lse": x.rows,
            "dq": x.rows,
            "dk": x.keys,
            "dv": x.keys,
            "dbias": x.pairs,
            "dsinks": x.h,
        }
        head_dO = None if dO is None else dO[x.rows].astype(np.float64)
        head_dL = dL[x.rows].astype(np.float64)
        f = oracle.forward_head(x)
        scores = np.abs(f.S[x.visible & np.isfinite(f.S)])
        largest_score = max(largest_score, scores.max(initial=0.0))
        results = [(exact, {"out": f.O, "lse": f.lse}), (size, _absolute_head(x, f, head_dO, head_dL))]
        ones = SimpleNamespace(**vars(f) | {"P": np.ones_like(f.P), "P_sink": np.ones_like(f.P_sink)})
        results.append((flushed, _absolute_head(x, ones, head_dO, head_dL)))
        if head_dO is not None:
            results.append((exact, _named(oracle.backward_head(x, f, head_dO, head_dL))))
        for order, (baseline, multiple) in enumerate(zip(baselines, multiples, strict=True)):
            given = [None if array is None else array[x.rows] for array in (given_O, given_lse)]
            results.append((baseline, _baseline_head(x, head_dO, head_dL, dtype, order, multiple, *given)))
        for collected, head in results:
            for name in names:
                if name in head:
                    if name in ("out", "lse"):  # every row belongs to one head
                        collected[name][places[name]] = head[name]
                    else:  # key heads, sinks: summed over heads and sequences
                        collected[name][places[name]] += head[name]

    exact, size, flushed, *baselines = (
        {name: call.restore(name.removeprefix("d"), a) for name, a in collected.items()}
        for collected in (exact, size, flushed, *baselines)
    )
    allowed = {}
    for name in names:
        # lse is float32 in a 16-bit call, and held to that.
        eps, floor = UNIT_ROUNDOFF[dtypes[name] if name == "lse" else dtype], UNDERFLOW[dtypes[name]]
        if dtype == "float64":
            A = 1.0 + largest_score if name == "lse" else size[name]
            bound = FLOAT64_BOUND * A + floor
            if dtypes[name] != "float64":
                bound = bound + UNIT_ROUNDOFF[dtypes[name]] * np.abs(exact[name])
        else:
            with np.errstate(invalid="ignore"):  # -inf - -inf
                E = max(_largest(_round(baseline[name], dtypes[name]) - exact[name]) for baseline in baselines)
            A = 1.0 if name == "lse" else size[name]
            bound = (
                2.0 * E
                + eps * _largest(exact[name])
                + 2.0 * UNIT_ROUNDOFF["float32"] * (1.0 + largest_score) * A
                + floor
                + UNDERFLOW["float32"] * (0.0 if name == "lse" else flushed[name])
            )
        allowed[name] = np.broadcast_to(bound, exact[name].shape)
    return Reference(exact, allowed, dtypes)


def allowed_error(name: str, reference: Reference) -> np.ndarray:
    """The bound on the errors of one result; see the documentation, "Conventions".

    Parameters
    ----------
    name : str
        "out", "lse", "dq", "dk", "dv", "dbias" or "dsinks".
    reference : Reference

    Returns
    -------
    float64 ndarray
        The largest absolute error allowed, element by element.
    """
    return reference.allowed[name]


def errors(name: str, actual: npt.ArrayLike, reference: Reference) -> np.ndarray:
    """Absolute error of every element.

    Parameters
    ----------
    name : str
        As in `allowed_error`.
    actual : array
        What the call returned; a host array of any floating dtype.
    reference : Reference

    Returns
    -------
    float64 ndarray
        0 where equal, also infinities to infinities of the same sign and NaN to NaN; inf where only one of
        the two is infinite or NaN.

    Raises
    ------
    ValueError
        If ``actual`` has another shape than the oracle.
    """
    expected = reference.oracle[name]
    if np.shape(actual) != expected.shape:
        raise ValueError(f"{name} has shape {np.shape(actual)}; expected {expected.shape}")
    actual = np.asarray(actual).astype(np.float64)
    equal = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    equal |= np.isinf(actual) & (actual == _round(expected, reference.dtypes[name]))  # overflows the dtype
    with np.errstate(invalid="ignore"):
        error = np.abs(actual - expected)
    return np.where(equal, 0.0, np.where(np.isfinite(error), error, np.inf))


def error_ratio(name: str, actual: npt.ArrayLike, reference: Reference) -> float:
    """Largest ratio of error to allowed error; the result is good if it is at most 1.

    Parameters
    ----------
    name, actual, reference
        As in `errors`.

    Returns
    -------
    float
        0 for an empty array; inf where an infinity or a NaN is missing or misplaced.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.ones((2, 4), np.float32)
    >>> r = reference(x, x, x)
    >>> error_ratio("out", x, r), error_ratio("out", x + np.float32(0.1), r) > 1
    (0.0, True)
    """
    error, allowed = errors(name, actual, reference), reference.allowed[name]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error == 0.0, 0.0, error / allowed)
    return float(np.where(np.isnan(ratio), np.inf, ratio).max(initial=0.0))


def unit_roundoff(dtype: npt.DTypeLike) -> float:
    """Largest relative error of rounding to nearest: ``2**-p`` for a significand of p bits."""
    return UNIT_ROUNDOFF[np.dtype(dtype).name]


# ---- the baseline: the dense formula in the call's dtype -------------------------------------------


def _baseline_head(
    x: SimpleNamespace, dO: np.ndarray | None, dlse: np.ndarray, dtype: str, order: int, multiple: float,
    given_O: np.ndarray | None, given_lse: np.ndarray | None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """One head as a kernel would round it: float32 throughout; O and ``multiple`` times P and dS to ``dtype``.

    ``order`` of :data:`ORDERS`: into how many sums those over the head dimensions are parted.

    The backward pass starts, as a kernel does, from the rounded O and the float32 lse, its own or those given.
    Results are not yet rounded: heads that share a key head are added first.
    """

    def rounded(array: np.ndarray) -> np.ndarray:
        return _round(array, dtype, np.float32)

    def in_product(array: np.ndarray) -> np.ndarray:
        return rounded(array) if multiple == 1.0 else rounded(array * f32(multiple)) / f32(multiple)

    def kept(array: np.ndarray) -> np.ndarray:
        return array if keeps_all else array * Z

    def product(A: np.ndarray, B: np.ndarray) -> np.ndarray:
        """``A B^T``, summed over every n-th product, then over those sums."""
        n = order + 1
        total = np.zeros((len(A), len(B)), f32)
        for first in range(n):
            total += A[:, first::n] @ B[:, first::n].T
        return total

    f32 = np.float32
    Q, K, V = (a.astype(f32) for a in (x.Q, x.K, x.V))
    scale, slope, sink, keep_scale = (f32(a) for a in (x.scale, x.slope, x.sink, 1 / (1 - x.dropout)))
    with np.errstate(all="ignore"):
        S = scale * product(Q, K)
        if x.softcap is not None:
            tanh = np.tanh(S / f32(x.softcap))
            S = f32(x.softcap) * tanh
        if x.bias.any() or slope:  # elsewhere there is nothing to add
            S = S + x.bias.astype(f32) - slope * x.distance.astype(f32)
        S = np.where(x.visible, S, f32(-np.inf))
        m = np.maximum(S.max(axis=1, initial=-np.inf), sink)
        m = np.where(m == -np.inf, f32(0), m)
        exp_S = np.where(x.visible, np.exp(S - m[:, None]), f32(0))
        total = exp_S.sum(axis=1) + np.exp(sink - m)
        lse = m + np.log(total)
        keeps_all = x.dropout == 0
        Z = None if keeps_all else np.where(x.keep, keep_scale, f32(0))
        P = np.where(x.visible, exp_S / total[:, None], f32(0))
        O = in_product(kept(P)) @ V
        results = {"out": O, "lse": lse}
        if dO is not None:
            dO, dlse, O = dO.astype(f32), dlse.astype(f32), rounded(O if given_O is None else given_O)
            lse = (lse if given_lse is None else given_lse).astype(f32)
            P = np.where(x.visible, np.exp(S - lse[:, None]), f32(0))
            P_sink = np.where(total == 0, f32(0), np.exp(sink - lse))
            gamma = (dO * O).sum(axis=1)
            dP = product(dO, V)
            if not keeps_all:
                dP = np.where(x.keep, dP * Z, f32(0))
            dS = np.where(x.visible, P * (dP - gamma[:, None] + dlse[:, None]), f32(0))
            dQK = in_product(dS if x.softcap is None else np.where(x.visible, dS * (1 - tanh**2), f32(0)))
            results |= {
                "dq": scale * (dQK @ K),
                "dk": scale * (dQK.T @ Q),
                "dv": in_product(kept(P)).T @ dO,
                "dbias": dS,
                "dsinks": (P_sink * (dlse - gamma)).sum(),
            }
    return results


def _absolute_head(
    x: SimpleNamespace, f: SimpleNamespace, dO: np.ndarray | None, dlse: np.ndarray
) -> dict[str, np.ndarray]:
    """One head with the absolute value of every factor, and sums for differences: A in the bound."""
    magnitude = SimpleNamespace(Q=abs(x.Q), K=abs(x.K), V=abs(x.V))
    with np.errstate(all="ignore"):
        O = (f.P * f.Z) @ magnitude.V
        results = {"out": O, "lse": np.ones_like(f.lse)}
        if dO is not None:
            dO, dlse = abs(dO), abs(dlse)
            gamma = (dO * O).sum(axis=1)
            dP = np.where(x.keep, (dO @ magnitude.V.T) * f.Z, 0.0)
            dS = np.where(x.visible, f.P * (dP + gamma[:, None] + dlse[:, None]), 0.0)
            dQK = np.where(x.visible, dS * (1.0 + f.tanh**2), 0.0) if x.softcap is not None else dS
            results |= {
                "dq": abs(x.scale) * (dQK @ magnitude.K),
                "dk": abs(x.scale) * (dQK.T @ magnitude.Q),
                "dv": (f.P * f.Z).T @ dO,
                "dbias": dS,
                "dsinks": (f.P_sink * (dlse + gamma)).sum(),
            }
    return results


def _named(gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"d" + name: gradient for name, gradient in gradients.items()}


def _largest(array: np.ndarray) -> float:
    """Largest finite absolute value, 0 if there is none."""
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))


def _round(array: npt.ArrayLike, dtype: str, back: npt.DTypeLike = np.float64) -> np.ndarray:
    """Round to the nearest number of the named dtype, ties to even; it comes back in a wider one."""
    array = np.asarray(array)
    with np.errstate(over="ignore", under="ignore"):
        if dtype != "bfloat16":
            return array.astype(dtype).astype(back)
        single = np.array(array, dtype=np.float32, ndmin=1)
        bits = single.view(np.uint32)
        nearest = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))  # ties to even
        nearest = (nearest & np.uint32(0xFFFF0000)).view(np.float32)
        return np.where(np.isfinite(single), nearest, single).reshape(array.shape).astype(back)
