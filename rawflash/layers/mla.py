"""Multi-head latent attention: keys and values are projections of one narrow latent, which is all that is cached.

Of each token decoding keeps ``m`` numbers of the latent and ``p`` of a key that all heads share, whatever
the number of heads. The manual's page on latent attention derives it, and why decoding never needs the keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Unpack

from rawflash.api import append_kv, attention, attention_backward, attention_decode
from rawflash.errors import ProblemError
from rawflash.layers.checks import check_count, check_positions, check_shape, namespace
from rawflash.layers.multi_head import merged, rows, split
from rawflash.layers.rope import rope, rope_backward
from rawflash.problem import Options

WEIGHTS = ("w_dq", "w_uq", "w_qr", "w_dkv", "w_kr", "w_uk", "w_uv", "w_o")
_OWN = {"layout": "heads are views of products", "out": "it is multiplied by w_o", "return_lse": "see return_saved"}


class MLASaved(NamedTuple):
    """What the forward pass keeps for :func:`mla_attention_backward`; ``...`` are the leading axes of x.

    Attributes
    ----------
    c_q : array (..., T, r)
        The latent of the queries, ``x W_DQ``.
    z : array (..., T, m)
        The latent of keys and values, ``x W_DKV``.
    q, k : array (..., T, H, d_nope + p)
    v, o : array (..., T, H, dv)
    lse : array (..., H, T)
    """

    c_q: Any
    z: Any
    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any


def mla_attention(
    x: Any, params: Mapping[str, Any], num_heads: int, *, positions: Any = None, base: float = 10000.0,
    convention: str = "half", return_saved: bool = False, **options: Unpack[Options],
) -> Any:  # fmt: skip
    """Multi-head latent attention with decoupled rotary embedding.

    Parameters
    ----------
    x : array (..., T, D)
        Hidden states, NumPy or CuPy, float16, float32 or float64.
    params : mapping of str to array
        The weights by name, of the dtype of ``x``; ``H`` heads:

        ======== ================ ====================================================
        w_dq     (D, r)           down to the latent of the queries
        w_uq     (r, H * d_nope)  up to the queries that carry no position
        w_qr     (r, H * p)       to the queries that are rotated; p is even
        w_dkv    (D, m)           down to the latent Z of keys and values
        w_kr     (D, p)           to the rotated key, one for all heads
        w_uk     (m, H * d_nope)  up to the keys that carry no position
        w_uv     (m, H * dv)      up to the values
        w_o      (H * dv, D)      from the heads to the output
        ======== ================ ====================================================
    num_heads : int
        ``H``.
    positions : int array (T,) or (..., T), optional
        Left out, ``0, ..., T - 1``.
    base, convention
        Of the rotation, see :func:`rawflash.layers.rope`.
    return_saved : bool
        Also return what the backward pass would compute again.
    **options
        Of :func:`rawflash.attention` (``causal=True``, ``kv_lengths=``, ``backend=``, ...), without
        ``layout``, ``out`` and ``return_lse``. ``scale`` left out is ``1 / sqrt(d_nope + p)``.

    Returns
    -------
    out : array (..., T, D)
    saved : MLASaved
        With ``return_saved=True``.

    Raises
    ------
    ProblemError
        A weight is missing, or of a shape or dtype that does not go with the others.

    See Also
    --------
    mla_decode : the same for new tokens, from the cache.

    Notes
    -----
    With R the rotation and h the head::

        C = x W_DQ              Z = x W_DKV
        Q_h = [C W_UQ_h,  R(C W_QR_h)]
        K_h = [Z W_UK_h,  R(x W_KR)]
        V_h = Z W_UV_h
        out = [O_1, ..., O_H] W_O,   O_h = softmax(Q_h K_h^T / sqrt(d_nope + p)) V_h

    References
    ----------
    DeepSeek-AI, "DeepSeek-V2: A strong, economical, and efficient mixture-of-experts language model",
    section 2.1, 2024 (which also normalises C and Z).

    Examples
    --------
    >>> import numpy as np
    >>> from rawflash.layers import mla_attention
    >>> D, H, r, m, d, p = 16, 4, 8, 6, 4, 2
    >>> shapes = {"w_dq": (D, r), "w_uq": (r, H * d), "w_qr": (r, H * p), "w_dkv": (D, m), "w_kr": (D, p),
    ...           "w_uk": (m, H * d), "w_uv": (m, H * d), "w_o": (H * d, D)}
    >>> rng = np.random.default_rng(0)
    >>> params = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    >>> mla_attention(rng.standard_normal((2, 10, D)), params, H, causal=True).shape
    (2, 10, 16)
    """
    _check_options(options)
    xp, n = _check("x", x, params, num_heads)
    positions = _positions(xp, positions, x)
    c_q, z = _times(x, params["w_dq"]), _times(x, params["w_dkv"])
    q = xp.concatenate(_queries(c_q, params, n.H, positions, base, convention), axis=-1)
    k_n = split(z, params["w_uk"], n.H)
    k_r = rope(_times(x, params["w_kr"]), positions, base, convention)[..., None, :]  # one for all heads
    k = xp.concatenate([k_n, xp.broadcast_to(k_r, (*k_n.shape[:-1], n.p))], axis=-1)
    v = split(z, params["w_uv"], n.H)
    kept: dict[str, Any] = {**options, "layout": "bthd", "return_lse": True}
    o, lse = attention(q, k, v, **kept)
    out = _times(merged(o), params["w_o"])
    return (out, MLASaved(c_q, z, q, k, v, o, lse)) if return_saved else out


def mla_attention_backward(
    dout: Any, x: Any, params: Mapping[str, Any], num_heads: int, *, saved: MLASaved | None = None,
    wrt: Sequence[str] = (), positions: Any = None, base: float = 10000.0, convention: str = "half",
    **options: Unpack[Options],
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of :func:`mla_attention` with respect to ``x`` and every weight.

    Parameters
    ----------
    dout : array (..., T, D)
        Gradient of the loss with respect to ``out``.
    x, params, num_heads, positions, base, convention, **options
        Those of the forward call.
    saved : MLASaved, optional
        What the forward call gave with ``return_saved=True``; computed again if left out.
    wrt : sequence of {"bias", "sinks"}
        Options whose gradients are wanted too.

    Returns
    -------
    dx : array (..., T, D)
    dparams : dict of str to array
        One gradient per weight, of its name, shape and dtype.
    dbias, dsinks : array
        Those that ``wrt`` names, in its order.

    Notes
    -----
    With ``dQ, dK, dV`` of :func:`rawflash.attention_backward` for ``dO = dout W_O^T``, all heads side by
    side, ``n`` and ``r`` their parts without and with rotation, and R^T the rotation back::

        dW_O = O^T dout
        dW_UQ = C^T dQ_n     dW_QR = C^T R^T(dQ_r)     dC = dQ_n W_UQ^T + R^T(dQ_r) W_QR^T
        dW_UK = Z^T dK_n     dW_UV = Z^T dV            dZ = dK_n W_UK^T + dV W_UV^T
        dW_DQ = x^T dC       dW_DKV = x^T dZ           dW_KR = x^T G,   G = R^T(sum of dK_r over the heads)
        dx = dC W_DQ^T + dZ W_DKV^T + G W_KR^T

    Each is the rule for a product: Y = A W gives dA = dY W^T and dW = A^T dY (Chu, Liu and Lin 2026,
    equations 81-84). Rows of x that ``q_lengths`` and ``kv_lengths`` name as padding are multiplied by
    zero here, so they have to be finite.

    Examples
    --------
    >>> import numpy as np
    >>> from rawflash.layers import mla_attention, mla_attention_backward
    >>> D, H, r, m, d, p = 16, 4, 8, 6, 4, 2
    >>> shapes = {"w_dq": (D, r), "w_uq": (r, H * d), "w_qr": (r, H * p), "w_dkv": (D, m), "w_kr": (D, p),
    ...           "w_uk": (m, H * d), "w_uv": (m, H * d), "w_o": (H * d, D)}
    >>> rng = np.random.default_rng(0)
    >>> params = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    >>> x = rng.standard_normal((2, 10, D))
    >>> out, saved = mla_attention(x, params, H, causal=True, return_saved=True)
    >>> dx, dparams = mla_attention_backward(out, x, params, H, saved=saved, causal=True)
    >>> dx.shape, sorted(dparams) == sorted(params)
    ((2, 10, 16), True)
    """
    _check_options(options)
    xp, n = _check("x", x, params, num_heads)
    namespace(x=x, dout=dout)
    check_shape("dout", dout, x.shape, "the shape of x")
    positions = _positions(xp, positions, x)
    if saved is None:
        turn: dict[str, Any] = dict(positions=positions, base=base, convention=convention)
        _, saved = mla_attention(x, params, num_heads, return_saved=True, **turn, **options)
    elif not isinstance(saved, MLASaved):
        raise ProblemError(f"saved is a {type(saved).__name__}; expected what return_saved=True returned")
    c_q, z, q, k, v, o, lse = saved
    heads = (*x.shape[:-1], n.H)
    sizes = {"c_q": (*x.shape[:-1], None), "z": (*x.shape[:-1], n.m), "q": (*heads, n.d_nope + n.p),
             "k": (*heads, n.d_nope + n.p), "v": (*heads, n.dv), "o": (*heads, n.dv)}  # fmt: skip
    for name, shape in sizes.items():
        check_shape(f"saved.{name}", getattr(saved, name), shape, "what return_saved=True returned for this call")
    grads: dict[str, Any] = {}

    def back(a: Any, name: str, dy: Any) -> Any:
        """Back through ``y = a params[name]``: keep the gradient of the weight, return that of ``a``."""
        grads[name] = rows(a).T @ rows(dy)
        return _times(dy, params[name].T)

    do = back(merged(o), "w_o", dout).reshape(o.shape)
    kept: dict[str, Any] = {**options, "layout": "bthd", "wrt": ("q", "k", "v", *wrt)}
    dq, dk, dv, *more = attention_backward(do, q, k, v, o, lse, **kept)
    dq_n, dk_n = merged(dq[..., : n.d_nope]), merged(dk[..., : n.d_nope])
    dq_r = merged(rope_backward(dq[..., n.d_nope :], positions[..., None], base, convention))
    wide = xp.float64 if x.dtype == xp.float64 else xp.float32
    dk_r = dk[..., n.d_nope :].sum(axis=-2, dtype=wide).astype(x.dtype, copy=False)  # over the heads, which share it
    dk_r = rope_backward(dk_r, positions, base, convention)

    dc_q = back(c_q, "w_uq", dq_n) + back(c_q, "w_qr", dq_r)
    dz = back(z, "w_uk", dk_n) + back(z, "w_uv", merged(dv))
    dx = back(x, "w_dq", dc_q) + back(x, "w_dkv", dz) + back(x, "w_kr", dk_r)
    return dx, {name: grads[name] for name in WEIGHTS}, *more


def append_latent(
    latent_cache: Any, x_new: Any, params: Mapping[str, Any], kv_lengths: Any, *, block_table: Any = None,
    positions: Any = None, base: float = 10000.0, convention: str = "half",
) -> None:  # fmt: skip
    """Write what :func:`mla_decode` needs of new tokens into the latent cache, in place.

    Parameters
    ----------
    latent_cache : array (B, Tmax, m + p)
        Of each token ``[x W_DKV, R(x W_KR)]``. With ``block_table``: ``(num_blocks, block, m + p)``.
    x_new : array (B, T, D)
        The new tokens' hidden states: a whole prompt, or one token.
    params : mapping of str to array
        As in :func:`mla_attention`; ``w_dkv (D, m)`` and ``w_kr (D, p)`` are used.
    kv_lengths : int array (B,)
        Tokens in the cache *before* the call; not modified.
    block_table : int array (B, max_blocks), optional
        As in :func:`rawflash.attention_decode`.
    positions : int array (B, T), optional
        Left out, ``kv_lengths[b] + 0, ..., kv_lengths[b] + T - 1``.
    base, convention
        Of the rotation, as in the calls of :func:`mla_decode`.

    Returns
    -------
    None

    Raises
    ------
    ProblemError
        Shapes that do not go together, or tokens past the end of the cache.

    Notes
    -----
    The latent cache is a cache of one head, whose values Z are its first m columns and whose rotated
    keys the rest, so this is :func:`rawflash.append_kv` of two views of it.

    Examples
    --------
    >>> import numpy as np
    >>> from rawflash.layers import append_latent
    >>> params = {"w_dkv": np.eye(4, 3), "w_kr": np.ones((4, 2))}
    >>> cache = np.zeros((1, 8, 3 + 2))
    >>> append_latent(cache, np.array([[[1.0, 2.0, 3.0, 4.0]]]), params, [0])
    >>> cache[0, 0]  # the latent, then a key that position 0 does not turn
    array([ 1.,  2.,  3., 10., 10.])
    """
    weights = {name: _weight(params, name) for name in ("w_dkv", "w_kr")}
    xp = namespace(x_new=x_new, latent_cache=latent_cache, **weights)
    _check_down("x_new", x_new, weights)
    m, p = (weights[name].shape[1] for name in ("w_dkv", "w_kr"))
    _check_cache(latent_cache, x_new, m + p, block_table)
    positions = _new_positions(xp, positions, x_new, kv_lengths, 0)
    z = split(x_new, weights["w_dkv"], 1)
    k_r = rope(split(x_new, weights["w_kr"], 1), positions[..., None], base, convention)
    cache = latent_cache[:, :, None]
    append_kv(cache[..., m:], cache[..., :m], k_r, z, kv_lengths, block_table=block_table, layout="bthd")


def mla_decode(
    x_new: Any, params: Mapping[str, Any], latent_cache: Any, kv_lengths: Any, num_heads: int, *,
    block_table: Any = None, positions: Any = None, base: float = 10000.0, convention: str = "half", **options: Any,
) -> Any:  # fmt: skip
    """Latent attention of new tokens over the latent cache, without keys and values.

    The up-projections are absorbed: those of the keys into the queries, those of the values into the
    output, so that all heads attend to the cache itself, one key/value head of width ``m + p``. Equal to
    the rows of :func:`mla_attention` over all tokens, to rounding.

    Parameters
    ----------
    x_new : array (B, T, D)
        The newest tokens' hidden states, already appended by :func:`append_latent`; ``T`` is small.
    params : mapping of str to array
        As in :func:`mla_attention`.
    latent_cache : array (B, Tmax, m + p)
        Of each token ``[x W_DKV, R(x W_KR)]``. With ``block_table``: ``(num_blocks, block, m + p)``.
    kv_lengths : int array (B,)
        Tokens in the cache, *including* the new ones.
    num_heads : int
        ``H``.
    block_table : int array (B, max_blocks), optional
        As in :func:`rawflash.attention_decode`.
    positions : int array (B, T), optional
        Left out, those of the last ``T`` tokens: ``kv_lengths[b] - T, ..., kv_lengths[b] - 1``.
    base, convention
        Of the rotation, as in the calls of :func:`append_latent`.
    **options
        Of :func:`rawflash.attention_decode`, without ``layout``, ``out`` and ``return_lse``; ``causal=True``
        where ``T > 1`` new tokens must not see each other's future. ``scale`` left out is
        ``1 / sqrt(d_nope + p)``, as in :func:`mla_attention`.

    Returns
    -------
    array (B, T, D)

    Notes
    -----
    With E the cache's first m columns (Z) and F its last p (the rotated key)::

        Q_h K_h^T = (C W_UQ_h W_UK_h^T) E^T + R(C W_QR_h) F^T
        O_h = P_h V_h = (P_h E) W_UV_h

    The first m columns are both key and value: a view, read twice or, by a kernel that knows, once.

    Examples
    --------
    >>> import numpy as np
    >>> from rawflash.layers import append_latent, mla_attention, mla_decode
    >>> D, H, r, m, d, p = 16, 4, 8, 6, 4, 2
    >>> shapes = {"w_dq": (D, r), "w_uq": (r, H * d), "w_qr": (r, H * p), "w_dkv": (D, m), "w_kr": (D, p),
    ...           "w_uk": (m, H * d), "w_uv": (m, H * d), "w_o": (H * d, D)}
    >>> rng = np.random.default_rng(0)
    >>> params = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    >>> x = rng.standard_normal((2, 10, D))
    >>> cache = np.empty((2, 32, m + p))
    >>> append_latent(cache, x, params, [0, 0])
    >>> last = mla_decode(x[:, 9:], params, cache, [10, 10], H)
    >>> np.allclose(last, mla_attention(x, params, H, causal=True)[:, 9:])
    True
    """
    _check_options(options)
    xp, n = _check("x_new", x_new, params, num_heads)
    namespace(x_new=x_new, latent_cache=latent_cache)
    _check_cache(latent_cache, x_new, n.m + n.p, block_table)
    positions = _new_positions(xp, positions, x_new, kv_lengths, -x_new.shape[1])
    c_q = _times(x_new, params["w_dq"])
    q_n, q_r = _queries(c_q, params, n.H, positions, base, convention)
    w_uk = params["w_uk"].reshape(n.m, n.H, n.d_nope)
    w_uv = params["w_uv"].reshape(n.m, n.H, n.dv)
    q = xp.concatenate([_each_head(q_n, w_uk.transpose(1, 2, 0)), q_r], axis=-1)
    cache = latent_cache[:, :, None]  # one key/value head
    kept: dict[str, Any] = {**options, "layout": "bthd", "block_table": block_table}
    if kept.get("scale") is None:
        kept["scale"] = 1 / math.sqrt(n.d_nope + n.p)  # of the keys that are never made, not of the cache's width
    o = attention_decode(q, cache, cache[..., : n.m], kv_lengths, **kept)
    return _times(merged(_each_head(o, w_uv.swapaxes(0, 1))), params["w_o"])


class _Sizes(NamedTuple):
    """Heads, the widths of a head's parts, and the latent's."""

    H: int
    d_nope: int
    p: int
    dv: int
    m: int


def _times(a: Any, w: Any) -> Any:
    """``a w`` for ``a (..., n)``, as one product of matrices."""
    return (rows(a) @ w).reshape(*a.shape[:-1], w.shape[1])


def _each_head(a: Any, w: Any) -> Any:
    """``a_h w_h`` of every head for ``a (B, T, H, n)`` and ``w (H, n, k)``; a weight is read once for the batch."""
    heads_first = a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]).swapaxes(0, 1)
    return (heads_first @ w).swapaxes(0, 1).reshape(*a.shape[:3], w.shape[2])


def _queries(
    c_q: Any, params: Mapping[str, Any], heads: int, positions: Any, base: float, convention: str
) -> tuple[Any, Any]:
    """The queries' parts without and with rotation, ``(..., T, H, d_nope)`` and ``(..., T, H, p)``."""
    q_r = split(c_q, params["w_qr"], heads)
    return split(c_q, params["w_uq"], heads), rope(q_r, positions[..., None], base, convention)


def _weight(params: Mapping[str, Any], name: str) -> Any:
    if not isinstance(params, Mapping):
        raise ProblemError(f"params is a {type(params).__name__}; expected a dict of the weights {', '.join(WEIGHTS)}")
    if name not in params:
        raise ProblemError(f"params has no {name!r}; expected the weights {', '.join(WEIGHTS)}")
    return params[name]


def _check_options(options: Mapping[str, Any]) -> None:
    for name, reason in _OWN.items():
        if name in options:
            raise ProblemError(f"{name} is {options[name]!r}; expected not to be passed to a layer: {reason}")


def _check_down(name: str, x: Any, weights: Mapping[str, Any]) -> None:
    """Check x and the down-projections among ``weights``."""
    if x.ndim < 2:
        raise ProblemError(f"{name} has shape {x.shape}; expected (..., T, D)")
    for weight, rule in (("w_dq", "(D, r)"), ("w_dkv", "(D, m)"), ("w_kr", "(D, p)")):
        if weight in weights:
            check_shape(weight, weights[weight], (x.shape[-1], None), rule)
    p = weights["w_kr"].shape[1]
    if p % 2:
        raise ProblemError(f"w_kr has shape {weights['w_kr'].shape}; expected (D, p) with an even p")


def _check(name: str, x: Any, params: Mapping[str, Any], num_heads: Any) -> tuple[ModuleType, _Sizes]:
    """The arrays' namespace, and the sizes that the weights' shapes say."""
    weights = {weight: _weight(params, weight) for weight in WEIGHTS}
    for weight in params:
        if weight not in WEIGHTS:
            raise ProblemError(f"params has {weight!r}; expected the weights {', '.join(WEIGHTS)}")
    xp = namespace(**{name: x}, **weights)
    H = check_count("num_heads", num_heads)
    _check_down(name, x, weights)
    D, (r, m, p) = x.shape[-1], (weights[weight].shape[1] for weight in ("w_dq", "w_dkv", "w_kr"))

    def head(weight: str, rows: int, rule: str) -> int:
        """Width of a head of an up-projection."""
        check_shape(weight, weights[weight], (rows, None), rule)
        shape = weights[weight].shape
        if shape[1] % H:
            raise ProblemError(f"{weight} has shape {shape}; expected a number of columns that num_heads = {H} divides")
        return int(shape[1]) // H

    d_nope, dv = head("w_uq", r, "(r, H*d_nope)"), head("w_uv", m, "(m, H*dv)")
    check_shape("w_qr", weights["w_qr"], (r, H * p), "(r, H*p)")
    check_shape("w_uk", weights["w_uk"], (m, H * d_nope), "(m, H*d_nope)")
    check_shape("w_o", weights["w_o"], (H * dv, D), "(H*dv, D)")
    return xp, _Sizes(H, d_nope, p, dv, m)


def _check_cache(cache: Any, x_new: Any, width: int, block_table: Any) -> None:
    if x_new.ndim != 3:
        raise ProblemError(f"x_new has shape {x_new.shape}; expected (B, T, D)")
    if block_table is None:
        check_shape("latent_cache", cache, (x_new.shape[0], None, width), "(B, Tmax, m+p)")
    else:
        check_shape("latent_cache", cache, (None, None, width), "(num_blocks, block, m+p)")


def _positions(xp: ModuleType, positions: Any, x: Any) -> Any:
    """Positions of the rows of x, as given or from 0."""
    given = range(x.shape[-2]) if positions is None else positions
    return check_positions(xp, "positions", given, x.shape[:-1], "(T,) or the leading axes of x")


def _new_positions(xp: ModuleType, positions: Any, x_new: Any, kv_lengths: Any, shift: int) -> Any:
    """Positions of new tokens, as given or from ``kv_lengths + shift``; the lengths themselves stay where they are."""
    lengths = check_positions(xp, "kv_lengths", kv_lengths, x_new.shape[:1], "(B,)")
    if positions is None:
        positions = lengths.astype(xp.int64)[:, None] + xp.arange(shift, shift + x_new.shape[1])
    return _positions(xp, positions, x_new)
