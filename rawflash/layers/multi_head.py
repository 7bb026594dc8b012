"""Multi-head attention: projections to heads, attention, and the projection back; grouped and cross too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, Unpack

from rawflash.api import attention, attention_backward
from rawflash.errors import ProblemError
from rawflash.layers.checks import check_count, check_positions, check_shape, namespace
from rawflash.layers.rope import rope as rotate
from rawflash.layers.rope import rope_backward as rotate_backward
from rawflash.problem import Options

ROPE: Mapping[str, Any] = MappingProxyType({})  # positions 0, 1, ... and the other defaults of rope()
_SETTINGS = ("positions", "context_positions", "base", "convention")
_OWN = {"layout": "heads are views of x @ wq", "out": "it is multiplied by wo", "return_lse": "see return_saved"}


class MultiHeadSaved(NamedTuple):
    """What the backward pass of :func:`multi_head_attention` reads again: attention's arrays, layout "bthd".

    Attributes
    ----------
    q : array (..., T, Hq, d)
        Queries, rotated if there is ``rope``.
    k, v : array (..., Tk, Hkv, d), (..., Tk, Hkv, dv)
        Keys, likewise, and values.
    o : array (..., T, Hq, dv)
        Result of attention, before ``wo``.
    lse : array (..., Hq, T)
        Its log-sum-exp.
    """

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any


def multi_head_attention(
    x: Any, wq: Any, wk: Any, wv: Any, wo: Any, num_heads: int, num_kv_heads: int | None = None, *,
    context: Any = None, rope: Mapping[str, Any] | None = None, return_saved: bool = False,
    **options: Unpack[Options],
) -> Any:  # fmt: skip
    """Multi-head attention over rows of ``x``, or of ``x`` over rows of ``context``.

    ``Hq`` is ``num_heads``, ``Hkv`` is ``num_kv_heads``; ``d`` and ``dv`` follow from the weights.

    Parameters
    ----------
    x : array (..., T, D)
        NumPy or CuPy, float16, float32 or float64; leading axes are the batch.
    wq : array (D, Hq * d)
        To queries; columns ``h d`` to ``(h + 1) d`` are head ``h``.
    wk, wv : array (Dc, Hkv * d), (Dc, Hkv * dv)
        To keys and values; ``Dc`` is the width of ``context``, without one that of ``x``.
    wo : array (Hq * dv, Do)
        Back to the width ``Do`` of the result; ``D`` where there is a residual.
    num_heads, num_kv_heads : int
        ``num_kv_heads`` divides ``num_heads`` and is the same when left out; less is grouped-query
        attention, 1 multi-query attention.
    context : array (..., Tk, Dc), optional
        Where keys and values come from: cross-attention. None: from ``x``, self-attention.
    rope : mapping, optional
        Rotate queries and keys by :func:`rope`: its keywords "positions" (broadcastable to
        ``x.shape[:-1]``; ``0, 1, ...`` when left out), "base" and "convention", and "context_positions"
        for the rows of ``context``. ``{}`` takes every default; None does not rotate.
    return_saved : bool
        Also return what the backward pass needs; without it, that pass computes it again.
    **options
        Those of :func:`rawflash.attention`: ``causal``, ``window``, ``mask``, ``bias``, ``dropout`` ...,
        without ``layout``, ``out`` and ``return_lse``.

    Returns
    -------
    out : array (..., T, Do)
    saved : MultiHeadSaved
        With ``return_saved=True``.

    Raises
    ------
    ProblemError
        The call is wrong; the message names the argument and the rule.

    See Also
    --------
    multi_head_attention_backward : the gradients.

    Notes
    -----
    With ``C`` the context, or ``X``::

        [Q_1 ... Q_Hq] = X Wq,  [K_1 ... K_Hkv] = C Wk,  [V_1 ... V_Hkv] = C Wv
        O_h = softmax(Q_h K_g^T / sqrt(d)) V_g,  g = floor(h Hkv / Hq)
        out = [O_1 ... O_Hq] Wo

    Heads are reshaped views of the products, layout "bthd"; none is copied. Rows that ``q_lengths`` and
    ``kv_lengths`` call padding must be finite here: the gradients of the weights multiply them by zero.

    References
    ----------
    Vaswani et al., "Attention is all you need", 2017; Ainslie et al., "GQA", 2023. In the notation of Chu,
    Liu and Lin 2026, equations 3-4 and 6-10.

    Examples
    --------
    >>> import numpy as np
    >>> from rawflash.layers import multi_head_attention
    >>> x = np.ones((2, 5, 8))
    >>> wq, wk, wv, wo = np.ones((8, 16)), np.ones((8, 8)), np.ones((8, 6)), np.ones((12, 8))
    >>> multi_head_attention(x, wq, wk, wv, wo, num_heads=4, num_kv_heads=2, rope={}, causal=True).shape
    (2, 5, 8)
    """
    call = _check(x, wq, wk, wv, wo, num_heads, num_kv_heads, context, rope, dict(options))
    saved = _attend(call, x, wq, wk, wv, options)
    out = (rows(merged(saved.o)) @ wo).reshape(*x.shape[:-1], wo.shape[1])
    return (out, saved) if return_saved else out


def multi_head_attention_backward(
    dout: Any, x: Any, wq: Any, wk: Any, wv: Any, wo: Any, num_heads: int, num_kv_heads: int | None = None, *,
    context: Any = None, rope: Mapping[str, Any] | None = None, saved: MultiHeadSaved | None = None,
    wrt: Sequence[str] = (), **options: Unpack[Options],
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of :func:`multi_head_attention` with respect to its input and every weight.

    Parameters
    ----------
    dout : array (..., T, Do)
        Gradient of the loss with respect to ``out``.
    x, wq, wk, wv, wo, num_heads, num_kv_heads, context, rope, **options
        Those of the forward call.
    saved : MultiHeadSaved, optional
        What ``multi_head_attention(..., return_saved=True)`` returned for the same arguments.
    wrt : sequence of {"bias", "sinks"}
        Options whose gradients are wanted too.

    Returns
    -------
    tuple of array
        ``(dx, dwq, dwk, dwv, dwo)``, with a context ``(dx, dcontext, dwq, dwk, dwv, dwo)``, each of the
        shape and dtype of its argument; behind them the gradients that ``wrt`` names.

    Notes
    -----
    With dQ, dK, dV from :func:`rawflash.attention_backward` of ``dO = dout Wo^T``, turned back if there is
    ``rope``, and the rows of all sequences below each other (Chu, Liu and Lin 2026, appendix, equation 84)::

        dWo = O^T dout,  dWq = X^T dQ,  dWk = C^T dK,  dWv = C^T dV
        dX = dQ Wq^T,  dC = dK Wk^T + dV Wv^T;  without a context C is X and dX the sum of both

    Examples
    --------
    >>> import numpy as np
    >>> from rawflash.layers import multi_head_attention, multi_head_attention_backward
    >>> x, *weights = np.random.default_rng(0).standard_normal((5, 6, 6))
    >>> out, saved = multi_head_attention(x, *weights, num_heads=2, return_saved=True)
    >>> grads = multi_head_attention_backward(np.ones_like(out), x, *weights, num_heads=2, saved=saved)
    >>> [gradient.shape for gradient in grads]
    [(6, 6), (6, 6), (6, 6), (6, 6), (6, 6)]
    """
    namespace(x=x, dout=dout)
    call = _check(x, wq, wk, wv, wo, num_heads, num_kv_heads, context, rope, dict(options))
    check_shape("dout", dout, (*x.shape[:-1], wo.shape[1]), "(..., T, Do)")
    if saved is None:
        saved = _attend(call, x, wq, wk, wv, options)
    elif not isinstance(saved, MultiHeadSaved):
        raise ProblemError(f"saved is a {type(saved).__name__}; expected what return_saved=True returned")
    q, k, v, o, lse = saved
    heads = num_heads if num_kv_heads is None else num_kv_heads
    for name, array, count in (("q", q, num_heads), ("k", k, heads), ("v", v, heads), ("o", o, num_heads)):
        length = (x if name in "qo" or context is None else context).shape[:-1]
        expected = (*length, count, array.shape[-1])
        check_shape(f"saved.{name}", array, expected, "what return_saved=True returned for this call")
    source = x if context is None else context

    dwo = rows(merged(o)).T @ rows(dout)
    do = (rows(dout) @ wo.T).reshape(o.shape)
    kept: dict[str, Any] = {**options, "layout": "bthd", "wrt": ("q", "k", "v", *wrt)}
    dq, dk, dv, *more = attention_backward(do, q, k, v, o, lse, **kept)
    if call.rope is not None:
        dq = rotate_backward(dq, call.positions, **call.rope)
        dk = rotate_backward(dk, call.context_positions, **call.rope)
    dq, dk, dv = (rows(merged(gradient)) for gradient in (dq, dk, dv))

    dx = (dq @ wq.T).reshape(x.shape)
    dsource = (dk @ wk.T + dv @ wv.T).reshape(source.shape)
    inputs = (dx + dsource,) if context is None else (dx, dsource)
    return *inputs, rows(x).T @ dq, rows(source).T @ dk, rows(source).T @ dv, dwo, *more


class _Call(NamedTuple):
    """A checked call: where keys and values come from, heads, and how to rotate."""

    source: Any
    heads: int
    kv_heads: int
    rope: dict[str, Any] | None  # base and convention
    positions: Any  # of queries, with an axis of length 1 for the heads
    context_positions: Any  # of keys


def _check(
    x: Any, wq: Any, wk: Any, wv: Any, wo: Any, num_heads: Any, num_kv_heads: Any, context: Any,
    rope: Any, options: dict[str, Any],
) -> _Call:  # fmt: skip
    for name, reason in _OWN.items():
        if name in options:
            raise ProblemError(f"{name} is {options[name]!r}; expected not to be passed to a layer: {reason}")
    given = dict(x=x, wq=wq, wk=wk, wv=wv, wo=wo) | ({} if context is None else {"context": context})
    xp = namespace(**given)
    heads = check_count("num_heads", num_heads)
    kv_heads = heads if num_kv_heads is None else check_count("num_kv_heads", num_kv_heads)
    if heads % kv_heads:
        raise ProblemError(f"num_kv_heads is {kv_heads}; expected a divisor of num_heads = {heads}")
    source = x if context is None else context
    for name, array in (("x", x), ("context", source)):
        if array.ndim < 2:
            raise ProblemError(f"{name} has shape {array.shape}; expected (..., T, D)")
    check_shape("context", source, (*x.shape[:-2], None, None), "(..., Tk, Dc)")
    check_shape("wq", wq, (x.shape[-1], None), "(D, Hq*d)")
    if wq.shape[1] % heads:
        raise ProblemError(f"wq has shape {wq.shape}; expected a number of columns that num_heads = {heads} divides")
    d = wq.shape[1] // heads
    check_shape("wk", wk, (source.shape[-1], kv_heads * d), "(Dc, Hkv*d)")
    check_shape("wv", wv, (source.shape[-1], None), "(Dc, Hkv*dv)")
    if wv.shape[1] % kv_heads:
        raise ProblemError(
            f"wv has shape {wv.shape}; expected a number of columns that num_kv_heads = {kv_heads} divides"
        )
    check_shape("wo", wo, (wv.shape[1] // kv_heads * heads, None), "(Hq*dv, Do)")
    if rope is None:
        return _Call(source, heads, kv_heads, None, None, None)
    if not isinstance(rope, Mapping) or not set(rope) <= set(_SETTINGS):
        shown = sorted(rope) if isinstance(rope, Mapping) else repr(rope)
        raise ProblemError(f"rope is {shown}; expected None or a mapping with keys out of {', '.join(_SETTINGS)}")
    if d % 2:
        raise ProblemError(f"wq has shape {wq.shape}, heads of {d}; expected an even number, which rope turns in pairs")
    if context is None and "context_positions" in rope:
        raise ProblemError("rope has context_positions; expected them with a context only")
    positions = _positions(xp, rope, "positions", x)
    context_positions = positions if context is None else _positions(xp, rope, "context_positions", source)
    settings = {name: rope[name] for name in ("base", "convention") if name in rope}
    return _Call(source, heads, kv_heads, settings, positions, context_positions)


def _positions(xp: ModuleType, rope: Mapping[str, Any], name: str, x: Any) -> Any:
    given = rope.get(name)
    if given is None:
        return xp.arange(x.shape[-2])[:, None]
    return check_positions(xp, name, given, x.shape[:-1], "(T,) or the leading axes of x")[..., None]


def _attend(call: _Call, x: Any, wq: Any, wk: Any, wv: Any, options: Options) -> MultiHeadSaved:
    q = split(x, wq, call.heads)
    k = split(call.source, wk, call.kv_heads)
    v = split(call.source, wv, call.kv_heads)
    if call.rope is not None:
        q = rotate(q, call.positions, **call.rope)
        k = rotate(k, call.context_positions, **call.rope)
    kept: dict[str, Any] = {**options, "layout": "bthd", "return_lse": True}
    return MultiHeadSaved(q, k, v, *attention(q, k, v, **kept))


def rows(x: Any) -> Any:
    """All rows below each other: ``(..., n)`` as a matrix, so that a product is one call of BLAS."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def merged(heads: Any) -> Any:
    """Heads beside each other: ``(..., T, H, d)`` as ``(..., T, H * d)``, a view."""
    return heads.reshape(*heads.shape[:-2], heads.shape[-2] * heads.shape[-1])


def split(x: Any, w: Any, heads: int) -> Any:
    """``x w`` as heads: ``(..., T, H, d)``, a view of the product."""
    return (rows(x) @ w).reshape(*x.shape[:-1], heads, w.shape[1] // heads)
