"""Dense attention in float64 with NumPy: the yardstick every kernel is measured against.

Nothing here is tiled or clever, and no code is shared with a backend: one query head of one
sequence at a time, as two-dimensional matrices, written like the papers' equations. Symbols:
``Q K V`` inputs, ``S`` scores, ``P`` probabilities, ``O`` output, ``lse`` the natural logarithm of
the sum of ``exp(S)`` over a row, ``dO dV dP dS dQ dK`` gradients of the loss, ``gamma = rowsum(dO * O)``.

Reading order: `forward_head`, `backward_head` (the mathematics), then `Call` (which arrays, rows
and options belong to a head), then the public functions.

Sources
-------
Dao, Fu, Ermon, Rudra, Re 2022, "FlashAttention" (Appendix B: the gradients);
Dao 2024, "FlashAttention-2" (one row statistic, lse);
Chu, Liu, Lin 2026, "An Introduction to FlashAttention", equations 13-24 (the gradients, derived).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from rawflash.arrays import as_numpy
from rawflash.errors import ProblemError
from rawflash.masks import UNBOUNDED
from rawflash.problem import check, check_forward_only, check_wrt, known, three

__all__ = [
    "attention",
    "attention_backward",
    "attention_jvp",
    "attention_varlen",
    "attention_varlen_backward",
    "central_differences",
]


# ---- the mathematics: one query head of one sequence -----------------------------------------------


def forward_head(x: SimpleNamespace) -> SimpleNamespace:
    """Evaluate one head: scores, probabilities, output and log-sum-exp.

    Parameters
    ----------
    x : SimpleNamespace
        One item of `Call.heads`: float64 ``Q (Tq, d)``, ``K (Tk, d)``, ``V (Tk, dv)``; boolean
        ``visible`` and ``keep``, float64 ``bias`` and ``distance``, all ``(Tq, Tk)``; and the numbers
        ``scale softcap slope sink dropout``. No sink is ``sink = -inf``.

    Returns
    -------
    SimpleNamespace
        ``tanh`` (0 without softcap), ``S``, ``P`` (before dropout), ``Z`` (dropout as a factor: 0 or
        1 / (1 - dropout)), ``O (Tq, dv)``, ``lse (Tq,)`` and ``P_sink (Tq,)``, all float64.
    """
    with np.errstate(all="ignore"):  # a hidden score may overflow: it is selected away
        S = x.scale * (x.Q @ x.K.T)
        tanh = np.zeros_like(S)
        if x.softcap is not None:
            tanh = np.tanh(S / x.softcap)
            S = x.softcap * tanh
        S = S + x.bias
        S = S - x.slope * x.distance  # ALiBi
        S = np.where(x.visible, S, -np.inf)

        m = np.maximum(S.max(axis=1, initial=-np.inf), x.sink)
        m = np.where(m == -np.inf, 0.0, m)  # a row that sees nothing: any finite number does
        exp_S = np.where(x.visible, np.exp(S - m[:, None]), 0.0)
        exp_sink = np.exp(x.sink - m)
        total = exp_S.sum(axis=1) + exp_sink
        lse = m + np.log(total)  # log 0 = -inf: no key and no sink
        P = np.where(x.visible, exp_S / total[:, None], 0.0)
        P_sink = np.where(total == 0, 0.0, exp_sink / total)

        Z = np.where(x.keep, 1.0 / (1.0 - x.dropout), 0.0)
        O = (P * Z) @ x.V  # equation 13
    return SimpleNamespace(tanh=tanh, S=S, P=P, Z=Z, O=O, lse=lse, P_sink=P_sink)


def backward_head(
    x: SimpleNamespace, f: SimpleNamespace, dO: np.ndarray, dlse: np.ndarray
) -> dict[str, np.ndarray]:
    """Gradients of one head.

    Parameters
    ----------
    x : SimpleNamespace
        The head, as in `forward_head`.
    f : SimpleNamespace
        What `forward_head` returned for it.
    dO : (Tq, dv) float64
        Gradient of the loss with respect to ``O``.
    dlse : (Tq,) float64
        Gradient of the loss with respect to ``lse``.

    Returns
    -------
    dict
        ``q (Tq, d)``, ``k (Tk, d)``, ``v (Tk, dv)``, ``bias (Tq, Tk)``, ``sinks ()``, float64.

    Notes
    -----
    Equations of Chu, Liu, Lin. Since d lse_i / d S_ij = P_ij, the gradient that comes in through lse is
    one more term next to gamma. The sink is a key whose score is the logit and whose value is zero, so
    its dP is 0.
    """
    with np.errstate(all="ignore"):  # dO . V of a hidden pair may overflow
        dV = (f.P * f.Z).T @ dO  # (15)
        dP = np.where(x.keep, (dO @ x.V.T) * f.Z, 0.0)  # (17), then dropout
        gamma = (dO * f.O).sum(axis=1)  # (24)
        dS = np.where(x.visible, f.P * (dP - gamma[:, None] + dlse[:, None]), 0.0)  # (21) and dlse
        dsink = (f.P_sink * (dlse - gamma)).sum()
        dQK = np.where(x.visible, dS * (1.0 - f.tanh**2), 0.0)  # through softcap
        dQ = x.scale * (dQK @ x.K)
        dK = x.scale * (dQK.T @ x.Q)
    return {"q": dQ, "k": dK, "v": dV, "bias": dS, "sinks": dsink}


def tangent_head(x: SimpleNamespace, f: SimpleNamespace, t: SimpleNamespace) -> tuple[np.ndarray, np.ndarray]:
    """How the output and the log-sum-exp of one head change.

    Parameters
    ----------
    x : SimpleNamespace
        The head, as in `forward_head`.
    f : SimpleNamespace
        What `forward_head` returned for it.
    t : SimpleNamespace
        Tangents ``Q (Tq, d)``, ``K (Tk, d)`` and ``V (Tk, dv)``, float64.

    Returns
    -------
    (Tq, dv) and (Tq,) float64
        Tangents of ``O`` and ``lse``.

    Notes
    -----
    d P_ij = P_ij (d S_ij - d lse_i), since P = exp(S - lse), and d lse_i = sum over j of P_ij d S_ij.
    """
    with np.errstate(all="ignore"):  # a hidden pair may overflow
        slope = x.scale * (1.0 - f.tanh**2)
        tS = (t.Q @ x.K.T + x.Q @ t.K.T) * slope
        tS = np.where(x.visible & (slope != 0), tS, 0.0)  # at the softcap, a sum of any size changes nothing
        tlse = (f.P * tS).sum(axis=1)
        tP = np.where(x.visible, f.P * (tS - tlse[:, None]), 0.0)
        tO = (tP * f.Z) @ x.V + (f.P * f.Z) @ t.V
    return tO, tlse


def _host(name: str, value: Any) -> Any:
    """An array that only another library can read (DLPack), as NumPy's; anything else as it is."""
    foreign = hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray)
    return as_numpy(name, value) if foreign else value


# ---- which arrays, rows and options belong to a head -----------------------------------------------


class Call:
    """A call's arrays as ``(B, H, T, d)`` and its options, cut into heads. No mathematics here.

    Padding (rows past ``q_lengths`` and ``kv_lengths``, rows outside ``cu_seqlens``) is cut off before
    anything looks at it. A varlen call is a batch of one array whose sequences are row ranges.

    Parameters are those of `attention`; ``cu_seqlens_q`` and ``cu_seqlens_k`` make it a varlen call.
    ``algorithm, backend, deterministic, sram, out`` say how to compute, not what: they are ignored.
    """

    def __init__(
        self,
        q: npt.ArrayLike,
        k: npt.ArrayLike,
        v: npt.ArrayLike,
        *,
        cu_seqlens_q: npt.ArrayLike | None = None,
        cu_seqlens_k: npt.ArrayLike | None = None,
        varlen: bool | None = None,  # are these needed? None: if they are given
        mask: Any = None,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        q_offset: npt.ArrayLike | None = None,
        q_lengths: npt.ArrayLike | None = None,
        kv_lengths: npt.ArrayLike | None = None,
        bias: npt.ArrayLike | None = None,
        alibi_slopes: npt.ArrayLike | None = None,
        softcap: float | None = None,
        sinks: npt.ArrayLike | None = None,
        dropout: float = 0.0,
        seed: int = 0,
        scale: float | None = None,
        layout: str = "bhtd",
        algorithm: str | None = None,
        backend: str | None = None,
        deterministic: bool | None = None,
        sram: int | None = None,
        out: Any = None,
    ) -> None:
        # The validator and the way to NumPy are shared, the mathematics is not: every public function starts here.
        q, k, v, mask, bias, sinks, alibi_slopes, q_offset, q_lengths, kv_lengths = (
            _host(name, value)
            for name, value in dict(
                q=q, k=k, v=v, mask=mask, bias=bias, sinks=sinks, alibi_slopes=alibi_slopes, q_offset=q_offset,
                q_lengths=q_lengths, kv_lengths=kv_lengths,
            ).items()
        )  # fmt: skip
        cu_seqlens_q, cu_seqlens_k = _host("cu_seqlens_q", cu_seqlens_q), _host("cu_seqlens_k", cu_seqlens_k)
        check(
            q, k, v, varlen=varlen, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, mask=mask, causal=causal,
            window=window, q_offset=q_offset, q_lengths=q_lengths, kv_lengths=kv_lengths, bias=bias,
            alibi_slopes=alibi_slopes, softcap=softcap, sinks=sinks, dropout=dropout, seed=seed, scale=scale,
            layout=layout, backend="numpy_tiled",
        )  # fmt: skip
        self.layout = layout
        self.q_shape, self.k_shape, self.v_shape = np.shape(q), np.shape(k), np.shape(v)
        self.Q, self.K, self.V = (self.four_axes(np.asarray(a)) for a in (q, k, v))
        self.B, self.Hq, self.Tq, self.d = self.Q.shape
        self.Hkv, self.Tk, self.dv = self.V.shape[1:]
        self.full_shape = (self.B, self.Hq, self.Tq, self.Tk)

        if cu_seqlens_q is None:
            lengths = np.broadcast_to(self.Tq if q_lengths is None else np.asarray(q_lengths), (self.B,))
            key_lengths = np.broadcast_to(
                self.Tk if kv_lengths is None else np.asarray(kv_lengths), (self.B,)
            )
            # (array, its rows, its keys)
            self.sequences = [
                (b, slice(0, int(lengths[b])), slice(0, int(key_lengths[b]))) for b in range(self.B)
            ]
        else:
            cu_q, cu_k = (np.asarray(cu).tolist() for cu in (cu_seqlens_q, cu_seqlens_k))
            both = zip(pairwise(cu_q), pairwise(cu_k), strict=True)
            self.sequences = [(0, slice(*rows), slice(*keys)) for rows, keys in both]
        n = len(self.sequences)
        if q_offset is None:  # lower-right alignment
            q_offset = [
                (keys.stop - keys.start) - (rows.stop - rows.start) for _, rows, keys in self.sequences
            ]
        self.q_offset = np.broadcast_to(np.asarray(q_offset, dtype=np.int64), (n,))
        slopes = 0.0 if alibi_slopes is None else np.asarray(alibi_slopes).astype(np.float64)
        self.slopes = np.broadcast_to(slopes, (n, self.Hq))
        self.sinks_shape = () if sinks is None else np.shape(sinks)
        logits = -np.inf if sinks is None else np.asarray(sinks).astype(np.float64)
        self.sinks = np.broadcast_to(logits, (self.Hq,))
        self.bias_shape = () if bias is None else np.shape(bias)
        self.bias = None if bias is None else np.broadcast_to(np.asarray(bias), self.full_shape)
        self.mask = mask
        if mask is not None and not hasattr(mask, "visible"):
            self.mask = np.broadcast_to(np.asarray(mask), self.full_shape)
        self.causal = causal
        # A side farther than any position is as good as the farthest: sums of positions stay within 64 bits
        self.window = window and tuple(None if side is None else min(int(side), UNBOUNDED) for side in window)
        self.softcap, self.dropout, self.seed = softcap, float(dropout), seed
        self.scale = 1.0 / math.sqrt(self.d) if scale is None else float(scale)

    def heads(self) -> Iterator[SimpleNamespace]:
        """Yield every query head of every sequence as the namespace that `forward_head` describes.

        It also holds ``rows`` and ``keys``: where the head lies in the four-axis arrays of q and of k, v;
        ``pairs``: where it lies in a ``(B, Hq, Tq, Tk)`` array; ``h``: its number.
        """
        for b, (array, rows, keys) in enumerate(self.sequences):
            i = np.arange(rows.stop - rows.start)[:, None]  # positions inside the sequence
            j = np.arange(keys.stop - keys.start)[None, :]
            for h in range(self.Hq):
                h_kv = h // (self.Hq // self.Hkv)  # consecutive query heads share a key head
                pairs = (array, h, rows, keys)
                bias = np.zeros(np.broadcast_shapes(i.shape, j.shape))
                if self.bias is not None:
                    bias = self.bias[pairs].astype(np.float64)
                keep = np.ones_like(bias, dtype=bool)
                if self.dropout > 0:
                    from rawflash import philox

                    keep = np.broadcast_to(philox.keep(self.dropout, self.seed, b, h, i, j), bias.shape)
                yield SimpleNamespace(
                    h=h,
                    rows=(array, h, rows),
                    keys=(array, h_kv, keys),
                    pairs=pairs,
                    Q=self.Q[array, h, rows].astype(np.float64),
                    K=self.K[array, h_kv, keys].astype(np.float64),
                    V=self.V[array, h_kv, keys].astype(np.float64),
                    visible=self.visible(b, h, i, j, pairs) & (bias != -np.inf),
                    keep=keep,
                    bias=bias,
                    distance=np.abs(i + self.q_offset[b] - j).astype(np.float64),
                    slope=self.slopes[b, h],
                    sink=self.sinks[h],
                    scale=self.scale,
                    softcap=self.softcap,
                    dropout=self.dropout,
                )

    def visible(self, b: int, h: int, i: np.ndarray, j: np.ndarray, pairs: tuple) -> np.ndarray:
        """Which keys ``j (1, Tk)`` do rows ``i (Tq, 1)`` see? Boolean ``(Tq, Tk)``; all options but bias."""
        offset = self.q_offset[b]
        visible = np.ones(np.broadcast_shapes(i.shape, j.shape), dtype=bool)
        if self.causal:
            visible &= j <= i + offset
        if self.window is not None:
            left, right = self.window
            if left is not None:
                visible &= i + offset - left <= j
            if right is not None:
                visible &= j <= i + offset + right
        if hasattr(self.mask, "visible"):
            visible &= np.asarray(self.mask.visible(np.asarray(b), np.asarray(h), i, j, np.asarray(offset)))
        elif self.mask is not None:
            visible &= self.mask[pairs].astype(bool)
        return visible

    def four_axes(self, array: np.ndarray) -> np.ndarray:
        """View q, k, v, out or a gradient, in the call's layout, as ``(B, H, T, d)``."""
        if self.layout == "bthd" and array.ndim > 2:
            array = array.swapaxes(-3, -2)
        array = array[(None,) * (3 - array.ndim)]
        return array.reshape(math.prod(array.shape[:-3]), *array.shape[-3:])

    def lse_axes(self, lse: npt.ArrayLike) -> np.ndarray:
        """View lse or dlse ``(..., Hq, Tq)`` as ``(B, Hq, Tq)``."""
        return np.asarray(lse).reshape(self.full_shape[:3])

    def zeros(self, name: str) -> np.ndarray:
        """Zeros to collect ``name`` in: "out", "lse", "q", "k", "v", "bias" or "sinks". All axes, float64."""
        return np.zeros(
            {
                "out": (self.B, self.Hq, self.Tq, self.dv),
                "lse": self.full_shape[:3],
                "q": self.Q.shape,
                "k": self.K.shape,
                "v": self.V.shape,
                "bias": self.full_shape,
                "sinks": (self.Hq,),
            }[name]
        )

    def restore(self, name: str, array: np.ndarray) -> np.ndarray:
        """Give a collected array the shape and layout in which the caller passed, or expects, ``name``."""
        if name == "sinks":
            return array.reshape(self.sinks_shape)
        if name == "lse":
            many = len(self.q_shape) > 2  # a two-axis call has no head axis
            leading = self.q_shape[:-3] + (self.Hq,) if many else ()
            return array.reshape(*leading, self.Tq)
        if name == "bias":  # sum over the axes that were broadcast
            shape = (1,) * (4 - len(self.bias_shape)) + self.bias_shape
            axes = tuple(a for a in range(4) if shape[a] == 1)
            return array.sum(axis=axes, keepdims=True).reshape(self.bias_shape)
        shape = {
            "out": self.q_shape[:-1] + (self.dv,),
            "q": self.q_shape,
            "k": self.k_shape,
            "v": self.v_shape,
        }[name]
        if self.layout == "bthd" and len(shape) > 2:
            *batch, T, H, d = shape
            return array.reshape(*batch, H, T, d).swapaxes(-3, -2)
        return array.reshape(shape)


# ---- the public functions --------------------------------------------------------------------------


def attention(
    q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike, *, return_lse: bool = False, **options: Any
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Exact attention, dense, in float64.

    Parameters
    ----------
    q : (..., Hq, Tq, d) array
        Queries, any floating dtype; converted to float64. Two axes: one head; three: ``(H, T, d)``;
        four: ``(B, H, T, d)``; more: the leading axes together are the batch.
    k, v : (..., Hkv, Tk, d) and (..., Hkv, Tk, dv) arrays
        Keys and values. ``Hq`` is a multiple of ``Hkv``.
    return_lse : bool
        Also return the log-sum-exp.
    **options
        Every option of `rawflash.attention`. Those that say how to compute (algorithm, backend,
        deterministic, sram, out) are ignored; ``out`` is not written.

    Returns
    -------
    out : (..., Hq, Tq, dv) float64 ndarray
        In the layout of q. A row that sees no key, and padding, is 0.
    lse : (..., Hq, Tq) float64 ndarray
        Natural logarithm of the softmax denominator, sink included, without dropout. -inf where a row
        sees neither a key nor a sink, and in padding. Only with ``return_lse=True``.

    Notes
    -----
    S = scale Q K^T, softcap, + bias, + alibi, masking by selection; P = exp(S - lse); O = P V.

    Examples
    --------
    Two equal scores share the row; the value is the mean:

    >>> import numpy as np
    >>> attention(np.zeros((1, 4)), np.zeros((2, 4)), np.array([[1.0], [3.0]]))
    array([[2.]])
    """
    return _forward(Call(q, k, v, **known(options)), return_lse)


def attention_backward(
    dout: npt.ArrayLike,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    o: Any,
    lse: Any,
    *,
    dlse: npt.ArrayLike | None = None,
    wrt: tuple[str, ...] = ("q", "k", "v"),
    **options: Any,
) -> tuple[np.ndarray, ...]:
    """Gradients of exact attention, dense, in float64.

    Parameters
    ----------
    dout : array, shape of out
        Gradient of the loss with respect to the output.
    q, k, v : arrays
        As in `attention`.
    o, lse : arrays
        What the forward pass returned. Accepted and **ignored**: both are recomputed in float64, so
        that the yardstick does not inherit the rounding of the kernel under test. May be None.
    dlse : (..., Hq, Tq) array, optional
        Gradient of the loss with respect to lse; None means 0.
    wrt : tuple of str
        Which gradients, in which order: "q", "k", "v", "bias", "sinks".
    **options
        As in the forward call.

    Returns
    -------
    tuple of float64 ndarray
        In the order of ``wrt``, each with the shape and layout of its argument; those of bias and sinks
        are summed over the axes that were broadcast.

    Notes
    -----
    dV = P^T dO; dP = dO V^T; gamma = rowsum(dO * O); dS = P * (dP - gamma + dlse); dQ = scale dS K;
    dK = scale dS^T Q (Chu, Liu, Lin 2026, equations 13-24). dsinks = sum over rows of
    P_sink * (dlse - gamma). A hidden pair has dS = 0 by selection.

    Examples
    --------
    With two equal scores, each value gets half of dout:

    >>> import numpy as np
    >>> q, k, v = np.zeros((1, 4)), np.zeros((2, 4)), np.array([[1.0], [3.0]])
    >>> attention_backward(np.array([[1.0]]), q, k, v, None, None, wrt=("v",))
    (array([[0.5],
           [0.5]]),)
    """
    check_forward_only(options)
    return _backward(Call(q, k, v, **known(options)), dout, dlse, wrt)


def attention_jvp(
    primals: tuple[Any, Any, Any], tangents: tuple[Any, Any, Any], *, return_lse: bool = False, **options: Any
) -> tuple[Any, Any]:
    """Exact attention and how it changes with q, k and v, dense, in float64.

    Parameters
    ----------
    primals : (q, k, v)
        As in `attention`.
    tangents : (tq, tk, tv)
        Arrays of their shapes; None for one that does not change.
    return_lse : bool
        Also return the log-sum-exp and how it changes.
    **options
        As in `attention`.

    Returns
    -------
    out, dout : float64 ndarray
        Or ``(out, lse), (dout, dlse)``. A row that sees no key, and padding, does not change.

    Examples
    --------
    Two equal scores; the first key moves towards the query:

    >>> import numpy as np
    >>> q, k, v = np.ones((1, 1)), np.zeros((2, 1)), np.array([[1.0], [3.0]])
    >>> attention_jvp((q, k, v), (None, np.array([[1.0], [0.0]]), None))[1]
    array([[-0.5]])
    """
    call = Call(*three("primals", primals), **known(options))
    arrays = dict(Q=call.Q, K=call.K, V=call.V)
    given = {}
    for n, ((name, array), tangent) in enumerate(zip(arrays.items(), three("tangents", tangents), strict=True)):
        given[name] = np.zeros(array.shape)
        if tangent is not None:
            value = np.asarray(_host(f"tangents[{n}]", tangent))
            if (of_head := call.four_axes(value)).shape != array.shape:
                raise ProblemError(f"tangents[{n}] has shape {value.shape}; expected that of {name.lower()}")
            given[name] = of_head.astype(np.float64)
    out, lse, tout, tlse = (call.zeros(name) for name in ("out", "lse", "out", "lse"))
    lse -= np.inf
    for x in call.heads():
        f = forward_head(x)
        t = SimpleNamespace(Q=given["Q"][x.rows], K=given["K"][x.keys], V=given["V"][x.keys])
        out[x.rows], lse[x.rows] = f.O, f.lse
        tout[x.rows], tlse[x.rows] = tangent_head(x, f, t)
    out, tout = (call.restore("out", array) for array in (out, tout))
    lse, tlse = (call.restore("lse", array) for array in (lse, tlse))
    return ((out, lse), (tout, tlse)) if return_lse else (out, tout)


def attention_varlen(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    cu_seqlens_q: npt.ArrayLike,
    cu_seqlens_k: npt.ArrayLike,
    *,
    return_lse: bool = False,
    **options: Any,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Exact attention over concatenated sequences, dense, in float64.

    Parameters
    ----------
    q : (Hq, total_q, d) array
        With ``layout="bthd"``: ``(total_q, Hq, d)``.
    k, v : (Hkv, total_k, d) and (Hkv, total_k, dv) arrays
    cu_seqlens_q, cu_seqlens_k : (B + 1,) int
        Sequence b is the rows ``cu[b]:cu[b + 1]``. Rows outside every sequence are padding.
    return_lse : bool
        Also return the log-sum-exp.
    **options
        As in `attention`, without mask, bias and lengths. Positions count inside a sequence; for
        dropout, b is the sequence.

    Returns
    -------
    out : (Hq, total_q, dv) float64 ndarray
        0 in padding. With ``layout="bthd"``: ``(total_q, Hq, dv)``.
    lse : (Hq, total_q) float64 ndarray
        Natural logarithm; -inf in padding. Only with ``return_lse=True``.

    Examples
    --------
    Two sequences of one key each, and a row of padding:

    >>> import numpy as np
    >>> v = np.array([[[1.0], [3.0], [9.0]]])
    >>> attention_varlen(np.zeros((1, 3, 4)), np.zeros((1, 3, 4)), v, [0, 1, 2], [0, 1, 2])
    array([[[1.],
            [3.],
            [0.]]])
    """
    call = Call(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, varlen=True, **known(options))
    return _forward(call, return_lse)


def attention_varlen_backward(
    dout: npt.ArrayLike,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    o: Any,
    lse: Any,
    cu_seqlens_q: npt.ArrayLike,
    cu_seqlens_k: npt.ArrayLike,
    *,
    dlse: npt.ArrayLike | None = None,
    wrt: tuple[str, ...] = ("q", "k", "v"),
    **options: Any,
) -> tuple[np.ndarray, ...]:
    """Gradients of `attention_varlen`, dense, in float64.

    Parameters
    ----------
    dout : (Hq, total_q, dv) array
        Gradient of the loss with respect to the output.
    q, k, v, cu_seqlens_q, cu_seqlens_k
        As in `attention_varlen`.
    o, lse : arrays
        Accepted and **ignored**, as in `attention_backward`.
    dlse : (Hq, total_q) array, optional
        Gradient of the loss with respect to lse; None means 0.
    wrt : tuple of str
        Which gradients, in which order: "q", "k", "v", "sinks".
    **options
        As in the forward call.

    Returns
    -------
    tuple of float64 ndarray
        In the order of ``wrt``, each with the shape and layout of its argument; 0 in padding.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.ones((1, 3, 2))
    >>> dv, = attention_varlen_backward(x, x, x, x, None, None, [0, 1, 2], [0, 1, 2], wrt=("v",))
    >>> dv[0, :, 0]
    array([1., 1., 0.])
    """
    check_forward_only(options)
    call = Call(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, varlen=True, **known(options))
    return _backward(call, dout, dlse, wrt)


def _forward(call: Call, return_lse: bool) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    out, lse = call.zeros("out"), call.zeros("lse") - np.inf
    for x in call.heads():
        f = forward_head(x)
        out[x.rows], lse[x.rows] = f.O, f.lse
    out, lse = call.restore("out", out), call.restore("lse", lse)
    return (out, lse) if return_lse else out


def _backward(
    call: Call, dout: npt.ArrayLike, dlse: npt.ArrayLike | None, wrt: tuple[str, ...]
) -> tuple[np.ndarray, ...]:
    wrt = check_wrt(wrt, call.bias is not None, bool(call.sinks_shape))
    dout, dlse = np.asarray(_host("dout", dout)), _host("dlse", dlse)
    expected = {"dout": call.q_shape[:-1] + (call.dv,), "dlse": np.shape(call.restore("lse", call.zeros("lse")))}
    for name, value in (("dout", dout), ("dlse", dlse)):
        if value is not None and np.shape(value) != expected[name]:
            raise ProblemError(f"{name} has shape {np.shape(value)}; expected {expected[name]}")
    douts = call.four_axes(dout)
    dlses = call.zeros("lse") if dlse is None else call.lse_axes(dlse)
    grads = {name: call.zeros(name) for name in wrt}
    for x in call.heads():
        dO, dlse_row = douts[x.rows].astype(np.float64), dlses[x.rows].astype(np.float64)
        head = backward_head(x, forward_head(x), dO, dlse_row)
        place = {"q": x.rows, "k": x.keys, "v": x.keys, "bias": x.pairs, "sinks": x.h}
        for name in wrt:
            grads[name][place[name]] += head[name]  # heads that share a key head add up
    return tuple(call.restore(name, grads[name]) for name in wrt)


def central_differences(f: Callable[[np.ndarray], float], x: npt.ArrayLike, step: float = 1e-5) -> np.ndarray:
    """Gradient of a scalar function by central differences.

    Parameters
    ----------
    f : callable
        Takes a float64 array of the shape of ``x``, returns a number.
    x : array
        Where; converted to float64, not modified.
    step : float
        Half the distance of the two evaluations. The error is about ``step**2 |f'''| / 6`` from
        truncation plus ``2**-53 |f| / step`` from rounding.

    Returns
    -------
    float64 ndarray
        Shape of ``x``.

    Examples
    --------
    >>> import numpy as np
    >>> central_differences(lambda x: (x**2).sum(), np.array([1.0, -2.0])).round(6)
    array([ 2., -4.])
    """
    x = np.array(x, dtype=np.float64)
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        here = x[index]
        x[index] = here + step
        above = f(x.copy())
        x[index] = here - step
        below = f(x.copy())
        x[index] = here
        gradient[index] = (above - below) / (2 * step)
    return gradient
