"""The public functions: the data path from arrays to a launch, written out.

Every function here is the same four stops: check the call, look up the kernel, plan the
tiles, launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from rawflash import arrays, philox
from rawflash.backends import lookup
from rawflash.errors import ProblemError
from rawflash.masks import Mask
from rawflash.problem import (
    FORWARD_ONLY,
    Operands,
    Options,
    Problem,
    check,
    check_append,
    check_dropout,
    check_jvp,
    check_parts,
    known,
    with_seed,
)
from rawflash.tiles import Tiles
from rawflash.tiling import plan_tiles

_NO_ARRAYS = (type(None), bool, int, float, str, list, tuple, np.generic, Mask)  # what options may be else


def attention(q: Any, k: Any, v: Any, **options: Unpack[Options]) -> Any:
    """Exact attention, ``softmax(scale * Q K^T) V``, without storing the T x T matrix.

    Parameters
    ----------
    q : array (..., Hq, Tq, d)
        Queries; two axes are one head, three ``(H, T, d)``, more than four: leading axes are
        the batch. float16, bfloat16, float32 or float64.
    k : array (..., Hkv, Tk, d)
        Keys; ``Hq`` is a multiple of ``Hkv`` (grouped-query attention).
    v : array (..., Hkv, Tk, dv)
        Values.
    **options
        See :class:`rawflash.Options`: masks, bias, dropout, algorithm, backend and the rest.

    Returns
    -------
    out : array (..., Hq, Tq, dv)
        Of the kind and dtype that came in. A row that sees no key is 0.
    lse : array (..., Hq, Tq)
        With ``return_lse=True``: the natural logarithm of the sum of exponentials of each
        row's scores, float32 (float64 for float64); -inf for a row that sees no key.

    Raises
    ------
    ProblemError
        The call is wrong; the message names the argument and the rule.
    BackendError
        The backend is not available here.
    TileError
        No legal tile fits the on-chip memory.

    See Also
    --------
    attention_backward : the gradients.

    References
    ----------
    Dao, Fu, Ermon, Rudra, Re, "FlashAttention", NeurIPS 2022, algorithm 1; Dao,
    "FlashAttention-2", ICLR 2024, algorithm 1.

    Examples
    --------
    >>> import numpy as np, rawflash as rf
    >>> q = k = v = np.eye(4, dtype=np.float32)
    >>> rf.attention(q, k, v, causal=True)[0]
    array([1., 0., 0., 0.], dtype=float32)
    """
    problem, x = check(q, k, v, **known(options))
    return _forward(problem, x)


def attention_backward(
    dout: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *,
    dlse: Any = None, wrt: Sequence[str] = ("q", "k", "v"), **options: Unpack[Options],
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of attention, recomputing the probabilities tile by tile.

    Parameters
    ----------
    dout : array, shape of out
        Gradient of the loss with respect to ``out``.
    q, k, v : array
        As in :func:`attention`.
    o, lse : array
        What ``attention(..., return_lse=True)`` returned for the same arguments.
    dlse : array, shape of lse, optional
        Gradient of the loss with respect to ``lse``.
    wrt : sequence of {"q", "k", "v", "bias", "sinks"}
        The gradients wanted, in order.
    **options
        Those of the forward call, without ``out`` and ``return_lse``.

    Returns
    -------
    tuple of array
        One gradient per name in ``wrt``, of the shape and dtype of that argument. The
        gradient of a broadcast bias is summed over the broadcast axes.

    Notes
    -----
    With gamma = rowsum(dO * O): dV = P^T dO, dP = dO V^T, dS = P * (dP - gamma + dlse),
    dQ = scale dS K, dK = scale dS^T Q (Chu, Liu and Lin 2026, equations 13-24 and 71-77).

    Examples
    --------
    >>> import numpy as np, rawflash as rf
    >>> q = k = v = np.eye(4)
    >>> o, lse = rf.attention(q, k, v, return_lse=True)
    >>> dq, dk, dv = rf.attention_backward(np.ones_like(o), q, k, v, o, lse)
    >>> np.allclose(dv.sum(), 16)  # every row of P sums to one
    True
    """
    problem, x = check(
        q, k, v, dout=dout, o=o, lse=lse, dlse=dlse, wrt=wrt, direction="backward", **known(options)
    )
    return _backward(problem, x)


def attention_vjp(
    q: Any, k: Any, v: Any, *, wrt: Sequence[str] = ("q", "k", "v"), **options: Unpack[Options]
) -> tuple[Any, Callable[..., tuple[Any, ...]]]:
    """Attention and its pullback, in the manner of ``jax.vjp``.

    Parameters
    ----------
    q, k, v : array
        As in :func:`attention`; they are kept, not copied, until the pullback is dropped.
    wrt : sequence of str
        The gradients that the pullback returns, as in :func:`attention_backward`.
    **options
        See :class:`rawflash.Options`.

    Returns
    -------
    out : array, or (out, lse) with ``return_lse=True``
    pullback : callable
        ``pullback(dout, dlse=None)`` returns one gradient per name in ``wrt``.

    Examples
    --------
    >>> import numpy as np, rawflash as rf
    >>> q = k = v = np.eye(4)
    >>> out, pullback = rf.attention_vjp(q, k, v)
    >>> dq, dk, dv = pullback(np.ones_like(out))
    >>> dv.shape
    (4, 4)
    """
    problem, x = check(q, k, v, wrt=wrt, **known(options))
    given = [value for name, value in options.items() if name != "out" and not isinstance(value, _NO_ARRAYS)]
    given += q, k, v
    # The check has seen what the kernel reads; of what was copied for it the pullback reads the original again
    if x.out_overlaps or (x.out is not None and any(arrays.may_share_memory(x.out, array) for array in given)):
        raise ProblemError("out overlaps an input, which the pullback reads again; expected memory of its own")
    with_lse, x.return_lse = x.return_lse, True
    out, lse = _forward(problem, x)
    kept: dict[str, Any] = {name: value for name, value in options.items() if name not in FORWARD_ONLY}

    def pullback(dout: Any, dlse: Any = None) -> tuple[Any, ...]:
        problem, x = check(
            q, k, v, dout=dout, o=out, lse=lse, dlse=dlse, wrt=wrt, direction="backward", **kept
        )
        return _backward(problem, x)

    return ((out, lse) if with_lse else out), pullback


def attention_jvp(primals: Sequence[Any], tangents: Sequence[Any], **options: Unpack[Options]) -> tuple[Any, Any]:
    """Attention and how it changes with its inputs: forward mode, in the manner of ``jax.jvp``.

    Parameters
    ----------
    primals : (q, k, v)
        As in :func:`attention`; on the CPU.
    tangents : (tq, tk, tv)
        The direction: arrays of the shapes and the dtype of q, k and v; None for one that does not change.
    **options
        See :class:`rawflash.Options`; not ``out``. Bias, sinks and slopes do not change.

    Returns
    -------
    out : array, or (out, lse) with ``return_lse=True``
        What :func:`attention` gives.
    dout : array of the shape and dtype of out, or (dout, dlse)
        The derivative of that along the tangents; 0 for a row that sees no key.

    Raises
    ------
    ProblemError
        The call is wrong; the message names the argument and the rule.
    BackendError
        The backend has no forward mode: ``numpy_tiled`` has one, for CPU arrays, of the algorithm "fa2".
    TileError
        No legal tile fits the on-chip memory.

    Notes
    -----
    With dS = scale (dQ K^T + Q dK^T), times 1 - tanh^2 under a softcap: dlse = rowsum(P * dS) and
    dO = P dV + (P * dS) V - diag(dlse) O, all in one pass that stores nothing of size T x T. It is the transpose of
    :func:`attention_backward`.

    Examples
    --------
    >>> import numpy as np, rawflash as rf
    >>> q = k = v = np.eye(4)
    >>> out, dout = rf.attention_jvp((q, k, v), (None, None, v))
    >>> np.allclose(out, dout)  # linear in v
    True
    """
    problem, x, given = check_jvp(primals, tangents, **known(options))
    kernel, problem, tiles = _prepared(problem, x, "jvp")
    result, change = arrays.result(problem, x), arrays.result(problem, x)
    written = [made.canonical(name) for made in (result, change) for name in ("out", "lse")]
    written[-1][...] = 0  # type: ignore[index]  # padding does not change
    kernel(problem, tiles, x, given, *written)
    if x.return_lse:
        return (result.give("out"), result.give("lse")), (change.give("out"), change.give("lse"))
    return result.give("out"), change.give("out")


def attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **options: Unpack[Options]
) -> Any:
    """Attention over sequences of different lengths that lie behind each other.

    Parameters
    ----------
    q : array (Hq, total_q, d)
        Or ``(total_q, Hq, d)`` with ``layout="bthd"``; k and v likewise.
    k, v : array (Hkv, total_k, d), (Hkv, total_k, dv)
    cu_seqlens_q, cu_seqlens_k : int array (B + 1,)
        Sequence ``b`` is rows ``cu[b]:cu[b + 1]``. Rows outside every sequence are padding.
    **options
        See :class:`rawflash.Options`; not ``mask``, ``bias`` and lengths. Positions, ALiBi, dropout
        and a ``q_offset (B,)`` count inside the sequence.

    Returns
    -------
    out : array (Hq, total_q, dv)
    lse : array (Hq, total_q)
        With ``return_lse=True``.

    Examples
    --------
    >>> import numpy as np, rawflash as rf
    >>> q = k = v = np.ones((1, 5, 2))
    >>> rf.attention_varlen(q, k, v, [0, 2, 5], [0, 2, 5]).shape
    (1, 5, 2)
    """
    problem, x = check(
        q, k, v, varlen=True, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **known(options)
    )
    return _forward(problem, x)


def attention_varlen_backward(
    dout: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *,
    dlse: Any = None, wrt: Sequence[str] = ("q", "k", "v"), **options: Unpack[Options],
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of :func:`attention_varlen`; arguments as in :func:`attention_backward`.

    Returns
    -------
    tuple of array
        One gradient per name in ``wrt``; rows outside every sequence are 0.
    """
    problem, x = check(
        q, k, v, varlen=True, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        dout=dout, o=o, lse=lse, dlse=dlse, wrt=wrt, direction="backward", **known(options),
    )  # fmt: skip
    return _backward(problem, x)


def attention_decode(  # type: ignore[misc]  # kv_lengths is no option of this one
    q: Any, k_cache: Any, v_cache: Any, kv_lengths: Any, block_table: Any = None, **options: Unpack[Options]
) -> Any:
    """Attention of a few new queries over a cache of keys and values.

    Parameters
    ----------
    q : array (B, Hq, Tq, d)
        The newest queries of each sequence; ``(B, Tq, Hq, d)`` with ``layout="bthd"``.
    k_cache : array (B, Hkv, Tmax, d)
        Or ``(B, Tmax, Hkv, d)``. With ``block_table`` the cache is paged: ``(num_blocks, Hkv, block, d)``, or
        ``(num_blocks, block, Hkv, d)``.
    v_cache : array (B, Hkv, Tmax, dv)
        Likewise.
    kv_lengths : int array (B,)
        How many keys of each sequence are valid, those of these queries included. Rows past them are never read.
    block_table : int array (B, max_blocks), optional
        Key ``j`` of sequence ``b`` is row ``j % block`` of block ``block_table[b, j // block]``. Entries past the
        last used block may be anything. An entry that names no block is an error; on a GPU, where nobody
        looks at it before, its keys are not used.
    **options
        See :class:`rawflash.Options`; not ``mask``, ``bias``, ``q_lengths`` and ``dropout``.

    Returns
    -------
    out : array (B, Hq, Tq, dv)
    lse : array (B, Hq, Tq)
        With ``return_lse=True``.

    Raises
    ------
    ProblemError, BackendError, TileError
        As for :func:`attention`.

    See Also
    --------
    append_kv : puts new keys and values into a cache.

    Notes
    -----
    The same as ``attention(q, k, v, kv_lengths=kv_lengths)`` with the caches as ``k`` and ``v``. With ``causal=True``
    the last query stands at the last valid key, see ``q_offset``. Split over the keys and merged by the log-sum-exp
    (Dao, Haziza, Massa, Sizov, "Flash-Decoding", 2023).

    Examples
    --------
    >>> import numpy as np, rawflash as rf
    >>> q, cache = np.ones((1, 1, 1, 2)), np.zeros((1, 1, 8, 2))
    >>> rf.append_kv(cache, cache, q, q, [0])
    >>> rf.attention_decode(q, cache, cache, kv_lengths=[1])
    array([[[[1., 1.]]]])
    """
    problem, x = check(
        q, k_cache, v_cache, decode=True, kv_lengths=kv_lengths, block_table=block_table, **known(options)
    )
    return _forward(problem, x)


def append_kv(
    k_cache: Any, v_cache: Any, k_new: Any, v_new: Any, kv_lengths: Any, block_table: Any = None, layout: str = "bhtd"
) -> None:
    """Write new keys and values behind those that a cache holds, in place.

    Parameters
    ----------
    k_cache : array (B, Hkv, Tmax, d)
        Or ``(B, Tmax, Hkv, d)`` with ``layout="bthd"``. With ``block_table`` the cache is paged:
        ``(num_blocks, Hkv, block, d)``, or ``(num_blocks, block, Hkv, d)``. float16, bfloat16, float32 or float64,
        writable, of any strides. Not a JAX array.
    v_cache : array (B, Hkv, Tmax, dv)
        Likewise; of the kind and dtype of ``k_cache``.
    k_new : array (B, Hkv, Tn, d)
        The keys to add, ``(B, Tn, Hkv, d)`` with ``layout="bthd"``; dtype of ``k_cache``.
    v_new : array (B, Hkv, Tn, dv)
        Their values.
    kv_lengths : int array (B,)
        How many keys of each sequence are in the cache already: those of ``b`` become its keys ``kv_lengths[b]`` to
        ``kv_lengths[b] + Tn - 1``. It is not modified.
    block_table : int array (B, max_blocks), optional
        As in :func:`attention_decode`; entries of blocks that no new key goes to are never looked up.
    layout : {"bhtd", "bthd"}
        Order of the axes of caches and new arrays.

    Raises
    ------
    ProblemError
        The call is wrong, and nothing is written: also if a sequence has no room for the new keys, if an entry of
        ``block_table`` that is needed names no block, or if it leads two new keys to one row.
    BackendError
        The arrays are on a GPU, and CuPy is not installed.

    See Also
    --------
    attention_decode : attention over the cache.

    Notes
    -----
    Where ``kv_lengths`` or ``block_table`` is on a GPU nobody looks at its values before. Keys that would then go
    outside of their sequence or to a block that does not exist are not written, and nothing else is; of keys that
    go to the same row one is written. Nothing waits for the GPU, and a CUDA graph may hold the call.

    Examples
    --------
    >>> import numpy as np, rawflash as rf
    >>> k_cache, v_cache = np.zeros((2, 1, 1, 4, 1))
    >>> rf.append_kv(k_cache, v_cache, np.ones((1, 1, 2, 1)), np.full((1, 1, 2, 1), 5.0), kv_lengths=[1])
    >>> k_cache.ravel(), v_cache.ravel()
    (array([0., 1., 1., 0.]), array([0., 5., 5., 0.]))
    """
    source, x = check_append(k_cache, v_cache, k_new, v_new, kv_lengths, block_table, layout)
    if source.device is None:
        assert x.home is not None
        block, row = x.home
        v_new = x.v_new.copy() if np.may_share_memory(x.v_new, x.k_cache) else x.v_new
        x.k_cache[block, :, row] = x.k_new.swapaxes(1, 2)
        x.v_cache[block, :, row] = v_new.swapaxes(1, 2)
        return
    from rawflash.backends.cupy_raw.append_kv import append_kv as launch

    with arrays.on(source):
        launch(source, x)


def dropout_mask(p: float, seed: int, shape: tuple[int, int, int, int], like: Any = None) -> Any:
    """The dropout mask that every backend applies.

    Parameters
    ----------
    p : float
        Probability of dropping, ``0 <= p < 1``.
    seed : int
        ``0 <= seed < 2**64``.
    shape : (B, Hq, Tq, Tk)
    like : array, optional
        Its kind and device are those of the result; NumPy when left out.

    Returns
    -------
    array of bool, shape (B, Hq, Tq, Tk)
        True = kept: word ``j mod 4`` of Philox4x32-10 at counter ``(j div 4, i, h, b)`` is at
        least ``floor(p * 2**32)``.

    Examples
    --------
    >>> import rawflash as rf
    >>> rf.dropout_mask(0.5, 0, (1, 1, 1, 4))
    array([[[[False,  True,  True,  True]]]])
    """
    checked = check_dropout(p, seed, shape)
    source = arrays.Source(like)
    if not arrays.on_gpu(like):
        return source.give(philox.dropout_mask(*checked))
    source.locate("like", like)
    with arrays.on(source):
        return source.give(arrays.require_cupy().asarray(philox.dropout_mask(*checked)))


def merge_attention(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """Combine attention over disjoint sets of keys into attention over their union.

    Parameters
    ----------
    outs : sequence of array (..., H, T, d)
        Results of calls without dropout and sinks, layout "bhtd".
    lses : sequence of array (..., H, T)
        Their log-sum-exps (natural logarithm).

    Returns
    -------
    out : array (..., H, T, d)
        ``sum_n exp(lse_n - lse) out_n``, dtype of ``outs``.
    lse : array (..., H, T)
        ``log(sum_n exp(lse_n))``; -inf where every part is.

    Notes
    -----
    Each part's call is given its own ``q_offset`` when the whole is causal, windowed or
    ALiBi: ``j`` counts from the start of the part.

    Examples
    --------
    >>> import numpy as np, rawflash as rf
    >>> q = k = v = np.eye(4)
    >>> halves = [rf.attention(q, k[s], v[s], return_lse=True) for s in (slice(0, 2), slice(2, 4))]
    >>> out, lse = rf.merge_attention(*zip(*halves))
    >>> np.allclose(out, rf.attention(q, k, v))
    True
    """
    source, parts, logs = check_parts(outs, lses)
    xp = np if source.device is None else arrays.require_cupy()
    compute = np.dtype(np.float64 if parts[0].dtype == np.float64 else np.float32)
    with arrays.on(source), np.errstate(all="ignore"):
        m = xp.max(xp.stack(logs), axis=0)  # NaN stays NaN
        m = xp.where(m == -np.inf, 0.0, m).astype(compute)
        weights = [xp.exp(log.astype(compute) - m) for log in logs]
        total = sum(weights)
        lse = m + xp.log(total)
        safe = xp.where(total == 0, 1, total)
        # A part that saw no key has weight 0 and out 0; select, so that nothing else of it leaks in.
        merged = xp.zeros(parts[0].shape, compute)
        for weight, part in zip(weights, parts, strict=True):
            merged += xp.where(weight[..., None] == 0, 0, (weight / safe)[..., None] * part.astype(compute))
        return source.give(merged.astype(parts[0].dtype)), source.give(xp.asarray(lse, dtype=compute))


def _prepared(problem: Problem, x: Operands, direction: str) -> tuple[Callable[..., None], Problem, Tiles]:
    """The kernel, the call as it is done, and its tiles: looked up and planned once for calls that share a memo, which
    differ in their seeds."""
    found = x.memo.get(direction)
    if found is None:
        kernel, chip = lookup(problem, direction, x.device)
        found = x.memo[direction] = kernel, plan_tiles(problem, chip, direction)
    kernel, tiles = found
    if tiles.in_order:
        in_order = x.memo.get("in order")
        if in_order is None:
            in_order = x.memo["in order"] = replace(problem, deterministic=True)
        problem = with_seed(in_order, problem.seed)
    return kernel, problem, tiles


def _forward(problem: Problem, x: Operands) -> Any:
    """Look up, plan, launch; give back ``out`` or ``(out, lse)``."""
    kernel, problem, tiles = _prepared(problem, x, "forward")
    with arrays.on(x):
        result = arrays.result(problem, x)
        kernel(problem, tiles, x, result.canonical("out"), result.canonical("lse"))
        result.launched()
        out = result.give("out")
        return (out, result.give("lse")) if x.return_lse else out


def _backward(problem: Problem, x: Operands) -> tuple[Any, ...]:
    """Look up, plan, launch; give back the gradients in the order of ``wrt``."""
    kernel, problem, tiles = _prepared(problem, x, "backward")
    with arrays.on(x):
        result = arrays.result(problem, x)
        names = {"q", "k", "v", *x.wrt}
        kernel(problem, tiles, x, {name: result.canonical(name) for name in sorted(names)})
        result.launched()
        return tuple(result.give(name) for name in x.wrt)
