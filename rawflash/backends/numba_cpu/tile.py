"""The phases of one tile that the four kernels share.

A tile pairs query rows ``i0 : i0 + n_i`` of head ``h`` in batch ``b`` with keys ``j0 : j0 + n_j``. Its
scores are a 1-D workspace addressed as ``S[outer * ld + lane]``: the forward kernels put the queries
on the lanes (row maxima and sums need no reduction across a vector), the backward kernels the keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from rawflash.backends.numba_cpu.launch import ABSENT
from rawflash.backends.numba_cpu.microkernel import MR, SHAPE, gemm, longest_score_sum
from rawflash.backends.numba_cpu.numerics import exp, load_scalar, load_tile, philox4, store_tile
from rawflash.backends.numba_cpu.visibility import FULL, hide, query_range
from rawflash.philox import WORDS

_ROW_BYTES = SHAPE.vectors * SHAPE.vector_bytes  # of one row of a register tile
_helper = njit(nogil=True, error_model="numpy")


@_helper
def padded(extent, granule):
    """``extent`` rounded up to a multiple of ``granule``."""
    return -(-extent // granule) * granule


@_helper
def lanes_of(rows, itemsize):
    """Lanes between two rows of a score tile: padded for `gemm`, and one vector more.

    A power of two would put a column of the tile into few sets of the L1 cache.
    """
    columns = _ROW_BYTES // itemsize
    return padded(rows, columns) + columns


@_helper
def lanes_in_band(call, b, i0, n_i, j0, n_j, itemsize):
    """Queries on the lanes: those ``[first, stop)`` that the band lets see any of keys ``j0 : j0 + n_j``.

    Both are rounded to whole register tiles: `gemm` adds to all lanes of one, so all of them must be masked.
    """
    columns = _ROW_BYTES // itemsize
    low, high = query_range(call, b, j0, j0 + n_j)
    first = max(0, min(low - i0, n_i)) // columns * columns
    return first, min(padded(max(0, high - i0), columns), n_i)


@_helper
def rows_of(view, start, b, h, row):
    """Byte address of row ``row`` of head ``h`` in sequence ``b``."""
    return view.address + (b * view.batch + h * view.head + (start + row) * view.row) * view.itemsize


@_helper
def load_rows(dst, dst_row, dst_col, view, start, b, h, row, rows, width, factor):
    """Load ``rows`` rows into on-chip memory: dst[r * dst_row + x * dst_col] = factor * element (r, x)."""
    address = rows_of(view, start, b, h, row)
    load_tile(dst, 0, dst_row, dst_col, address, view.code, view.row, rows, width, factor)


@_helper
def _add_bias(call, S, ld, b, h, i0, n_i, j0, n_j, lanes_are_queries):
    bias = call.bias
    base = bias.address + b * bias.b + h * bias.h + i0 * bias.i + j0 * bias.j
    outers, lanes = (n_j, n_i) if lanes_are_queries else (n_i, n_j)
    per_outer, per_lane = (bias.j, bias.i) if lanes_are_queries else (bias.i, bias.j)
    lowest = S.dtype.type(-np.inf)
    for outer in range(outers):
        row = S[outer * ld : outer * ld + lanes]
        address = base + outer * per_outer
        for x in range(lanes):
            value = S.dtype.type(load_scalar(address + x * per_lane, bias.code))
            row[x] = value if value == lowest else row[x] + value  # -inf hides: selected, as a score may be +inf


@_helper
def _add_alibi(S, ld, slope, distance, n_i, n_j, lanes_are_queries):
    """S -= slope * abs(i + q_offset - j); ``distance`` is that of the tile's corner."""
    outers, lanes = (n_j, n_i) if lanes_are_queries else (n_i, n_j)
    sign = 1 if lanes_are_queries else -1  # how i + q_offset - j moves with the lane
    for outer in range(outers):
        row = S[outer * ld : outer * ld + lanes]
        start = distance - sign * outer
        for x in range(lanes):
            row[x] -= S.dtype.type(slope * abs(start + sign * x))


@_helper
def _cap_scores(S, ld, outers, lanes, cap, derivative):
    """S becomes cap * tanh(S / cap); ``derivative``, unless empty, gets 1 - tanh^2."""
    one = S.dtype.type(1)
    for outer in range(outers):
        row = S[outer * ld : outer * ld + lanes]
        for x in range(lanes):
            t = S.dtype.type(math.tanh(row[x] / cap))
            row[x] = cap * t
            if len(derivative) > 0:
                derivative[outer * ld + x] = (one - t) * (one + t)


@_helper
def finish_scores(call, S, ld, kind, by_band, b, h, i0, n_i, j0, n_j, lanes_are_queries, seen, cap):
    """From ``q.k`` to what softmax sees: scale, softcap, bias, ALiBi, masking, in this order.

    ``kind`` is the tile's class, ``by_band`` whether the band cuts through it; ``cap`` receives the
    derivative of the softcap unless it is empty.
    """
    outers, lanes = (n_j, n_i) if lanes_are_queries else (n_i, n_j)
    scale = S.dtype.type(call.real.scale)
    for outer in range(outers):
        row = S[outer * ld : outer * ld + lanes]
        for x in range(lanes):
            row[x] *= scale
    if call.real.softcap > 0:
        _cap_scores(S, ld, outers, lanes, S.dtype.type(call.real.softcap), cap)
    if call.bias.code != ABSENT:
        _add_bias(call, S, ld, b, h, i0, n_i, j0, n_j, lanes_are_queries)
    if call.slopes.shape[0] > 0:
        _add_alibi(S, ld, call.slopes[b, h], i0 + call.q_offset[b] - j0, n_i, n_j, lanes_are_queries)
    if kind != FULL:
        hide(call, S, ld, seen, b, h, i0, n_i, j0, n_j, lanes_are_queries, by_band, call.size.program_depth > 0)


@_helper
def apply_dropout(call, P, ld, b, h, i0, n_i, j0, n_j, lanes_are_queries):
    """P becomes P / (1 - dropout) where Philox keeps it and 0 where not."""
    low, high, least = call.size.seed_low, call.size.seed_high, call.size.keep_threshold
    scale = P.dtype.type(call.real.keep_scale)
    zero = P.dtype.type(0)
    for r in range(n_i):
        for group in range(j0 // WORDS, (j0 + n_j - 1) // WORDS + 1):
            words = philox4(low, high, group, i0 + r, h, b)
            for w in range(WORDS):
                c = group * WORDS + w - j0
                if 0 <= c < n_j:
                    at = c * ld + r if lanes_are_queries else r * ld + c
                    P[at] = P[at] * scale if words[w] >= least else zero


@_helper
def _raise_maximum(S, ld, n_i, n_j, m):
    """m[r] = max(m[r], S[:, r]); NaN is left to P and l. Four keys at a time: m is loaded and stored less."""
    c = 0
    while c + 4 <= n_j:
        row0, row1 = S[c * ld : c * ld + n_i], S[(c + 1) * ld : (c + 1) * ld + n_i]
        row2, row3 = S[(c + 2) * ld : (c + 2) * ld + n_i], S[(c + 3) * ld : (c + 3) * ld + n_i]
        for r in range(n_i):
            x = row0[r] if row0[r] > row1[r] else row1[r]
            y = row2[r] if row2[r] > row3[r] else row3[r]
            x = x if x > y else y
            m[r] = x if x > m[r] else m[r]
        c += 4
    while c < n_j:
        row0 = S[c * ld : c * ld + n_i]
        for r in range(n_i):
            m[r] = row0[r] if row0[r] > m[r] else m[r]
        c += 1


@_helper
def softmax_step(S, ld, n_i, n_j, m, l, alpha, shift):
    """Online softmax of a tile with queries on the lanes; S becomes P = exp(S - m).

    Updates the running maximum ``m`` and sum ``l`` of each row and sets ``alpha = exp(m_old - m)``, the
    factor for what was accumulated before (Dao 2024, algorithm 1, lines 9-10); ``shift`` is scratch.
    Returns whether any factor differs from one.
    """
    one, zero = S.dtype.type(1), S.dtype.type(0)
    lowest = S.dtype.type(-np.inf)
    for r in range(n_i):
        alpha[r] = m[r]
    _raise_maximum(S, ld, n_i, n_j, m)
    changed = False
    for r in range(n_i):
        shift[r] = zero if m[r] == lowest else m[r]  # a row that has seen nothing: exp(-inf - 0) = 0
        factor = one if alpha[r] == m[r] else exp(alpha[r] - shift[r])
        changed |= factor != one
        alpha[r] = factor
        l[r] *= factor
    for c in range(n_j):
        row = S[c * ld : c * ld + n_i]
        for r in range(n_i):
            p = exp(row[r] - shift[r])
            row[r] = p
            l[r] += p
    return changed


@_helper
def scale_lanes(O, ld, rows, n_i, factor):
    """O[x, r] *= factor[r] on a tile with queries on the lanes; a row that is 0 stays 0."""
    for x in range(rows):
        row = O[x * ld : x * ld + n_i]
        for r in range(n_i):
            row[r] *= factor[r]


@_helper
def finish_rows(m, l, n_i, sink, has_sink, lse, factor):
    """End of a row: the log-sum-exp, sink included, and the factor that normalises the row of O.

    ``lse = m + log l``; a row that saw no key gets -inf, or the sink, and factor 0.
    """
    for r in range(n_i):
        top, total, scale = float(m[r]), float(l[r]), 1.0
        if has_sink and not (top == -np.inf and sink == -np.inf):
            highest = sink if sink > top else top
            scale = 1.0 if top == highest else math.exp(top - highest)
            total = total * scale + math.exp(sink - highest)
            top = highest
        if total == 0.0:
            factor[r] = 0
            lse[r] = -np.inf
        else:
            factor[r] = scale / total
            lse[r] = top + math.log(total)


@_helper
def gamma_rows(call, dO, o, dlse, delta, b, h, i0, n_i, ldv, O):
    """delta = rowsum(dO * O) - dlse for rows ``i0 : i0 + n_i``; dO is on chip, O is loaded here."""
    load_rows(O, ldv, 1, o, call.q_starts[b], b, h, i0, n_i, call.size.dv, O.dtype.type(1))
    for r in range(n_i):
        at = r * ldv
        total = 0.0
        for x in range(call.size.dv):
            total += float(dO[at + x]) * float(O[at + x])
        delta[r] = total - dlse[r]


@_helper
def probabilities(S, ld, n_i, n_j, lse):
    """S becomes P = exp(S - lse), keys on the lanes; a hidden key has P = 0 whatever lse is.

    No probability exceeds one, but the rounding error of a huge score may exceed lse by more than exp can take.
    """
    lowest, zero = S.dtype.type(-np.inf), S.dtype.type(0)
    for r in range(n_i):
        row = S[r * ld : r * ld + n_j]
        shift = lse[r]
        for c in range(n_j):
            t = row[c] - shift
            t = zero if t > zero else t  # false for NaN, which passes
            row[c] = zero if row[c] == lowest else exp(t)


@_helper
def score_gradients(P, dP, ld, n_i, n_j, delta):
    """dP becomes dS = P * (dP - delta); selected, so that a hidden key whose dP overflows stays 0."""
    zero = P.dtype.type(0)
    for r in range(n_i):
        p, row = P[r * ld : r * ld + n_j], dP[r * ld : r * ld + n_j]
        g = delta[r]
        for c in range(n_j):
            row[c] = zero if p[c] == zero else p[c] * (row[c] - g)


@_helper
def multiply(X, Y, ld, n_i, n_j):
    """X *= Y on a tile with keys on the lanes; 0 where Y is 0."""
    zero = X.dtype.type(0)
    for r in range(n_i):
        x, y = X[r * ld : r * ld + n_j], Y[r * ld : r * ld + n_j]
        for c in range(n_j):
            x[c] = zero if y[c] == zero else x[c] * y[c]


@_helper
def add_bias_gradient(dS, ld, dbias, strides, b, h, i0, n_i, j0, n_j):
    """dbias += dS, summed over the axes along which the bias was broadcast (stride 0)."""
    base = b * strides[0] + h * strides[1] + i0 * strides[2] + j0 * strides[3]
    for r in range(n_i):
        row = dS[r * ld : r * ld + n_j]
        at = base + r * strides[2]
        if strides[3] == 0:
            total = 0.0
            for c in range(n_j):
                total += float(row[c])
            dbias[at] += total
        else:
            target = dbias[at : at + n_j]
            for c in range(n_j):
                target[c] += row[c]


class Work(NamedTuple):
    """On-chip memory of one thread in the backward pass: the eight tiles of the derivation and what they need.

    Rows are ``ldd``, ``ldv`` or ``ldc`` elements apart. K and V are held once for each product that needs them.
    """

    Q: np.ndarray  # (br, ldd)
    dO: np.ndarray  # (br, ldv)
    K: np.ndarray  # (bc, ldd)
    KT: np.ndarray  # (d, ldc)
    VT: np.ndarray  # (dv, ldc)
    P: np.ndarray  # (br, ldc): S, then P
    dS: np.ndarray  # (br, ldc): dP, then dS
    Z: np.ndarray  # (br, ldc): dropout's factors, then the dropped P; empty without dropout
    cap: np.ndarray  # (br, ldc): derivative of the softcap; empty without one
    dQ: np.ndarray  # (br, ldd)
    dK: np.ndarray  # (bc, ldd)
    dV: np.ndarray  # (bc, ldv)
    seen: np.ndarray
    lse: np.ndarray
    delta: np.ndarray
    ldd: int
    ldv: int
    ldc: int


@_helper
def make_work(call, zero):
    """Zeroed on-chip memory, padded as `gemm` asks; ``zero`` has the compute dtype."""
    real, size = type(zero), call.size
    columns = _ROW_BYTES // np.empty(0, real).itemsize
    ldd, ldv = padded(size.d, columns), padded(size.dv, columns)
    ldc = lanes_of(size.bc, np.empty(0, real).itemsize)
    br, bc = padded(size.br, MR), padded(size.bc, MR)
    score = br * ldc
    return Work(
        np.zeros(br * ldd, real), np.zeros(br * ldv, real),
        np.zeros(bc * ldd, real), np.zeros(padded(size.d, MR) * ldc, real), np.zeros(padded(size.dv, MR) * ldc, real),
        np.zeros(score, real), np.zeros(score, real),
        np.zeros(score if call.real.keep_scale != 1.0 else 0, real),
        np.zeros(score if call.real.softcap > 0 else 0, real),
        np.zeros(br * ldd, real), np.zeros(bc * ldd, real), np.zeros(bc * ldv, real),
        np.zeros((size.program_depth, max(size.br, size.bc)), np.uint8),
        np.zeros(size.br, real), np.zeros(size.br, real),
        ldd, ldv, ldc,
    )


@_helper
def load_keys(call, w, b, h, j0, n_j, one):
    """Load K (twice: by rows and transposed) and V (transposed); clear dK and dV."""
    start = call.k_starts[b]
    load_rows(w.K, w.ldd, 1, call.k, start, b, h, j0, n_j, call.size.d, one)
    load_rows(w.KT, 1, w.ldc, call.k, start, b, h, j0, n_j, call.size.d, one)
    load_rows(w.VT, 1, w.ldc, call.v, start, b, h, j0, n_j, call.size.dv, one)
    w.dK[:] = 0
    w.dV[:] = 0


@_helper
def backward_step(call, w, kind, by_band, b, h, i0, n_i, j0, n_j, dbias, dbias_strides):
    """One pair of blocks with everything on chip: adds to dK and dV, and leaves the pair's share in dQ."""
    ldd, ldv, ldc, d, dv = w.ldd, w.ldv, w.ldc, call.size.d, call.size.dv
    # S = Q K^T, P = exp(S - lse)
    gemm(w.Q, 0, ldd, 1, w.KT, 0, ldc, w.P, 0, ldc, n_i, n_j, d, False, longest_score_sum(w.P))
    finish_scores(call, w.P, ldc, kind, by_band, b, h, i0, n_i, j0, n_j, False, w.seen, w.cap)
    probabilities(w.P, ldc, n_i, n_j, w.lse)
    # dP = dO V^T
    gemm(w.dO, 0, ldv, 1, w.VT, 0, ldc, w.dS, 0, ldc, n_i, n_j, dv, False)
    if call.real.keep_scale != 1.0:
        w.Z[:] = 1
        apply_dropout(call, w.Z, ldc, b, h, i0, n_i, j0, n_j, False)
        multiply(w.dS, w.Z, ldc, n_i, n_j)
        multiply(w.Z, w.P, ldc, n_i, n_j)
        # dV += P^T dO
        gemm(w.Z, 0, 1, ldc, w.dO, 0, ldv, w.dV, 0, ldv, n_j, dv, n_i, True)
    else:
        gemm(w.P, 0, 1, ldc, w.dO, 0, ldv, w.dV, 0, ldv, n_j, dv, n_i, True)
    # dS = P * (dP - gamma + dlse)
    score_gradients(w.P, w.dS, ldc, n_i, n_j, w.delta)
    if len(dbias) > 0:
        add_bias_gradient(w.dS, ldc, dbias, dbias_strides, b, h, i0, n_i, j0, n_j)
    if call.real.softcap > 0:
        multiply(w.dS, w.cap, ldc, n_i, n_j)
    # dK += dS^T Q, dQ = dS K
    gemm(w.dS, 0, 1, ldc, w.Q, 0, ldd, w.dK, 0, ldd, n_j, d, n_i, True)
    gemm(w.dS, 0, ldc, 1, w.K, 0, ldd, w.dQ, 0, ldd, n_i, d, n_j, False)


@_helper
def add_query_gradient(call, w, dQ, i0, n_i):
    """dQ_i += scale * (the pair's share that `backward_step` left)."""
    scale = w.dQ.dtype.type(call.real.scale)
    for r in range(n_i):
        target, source = dQ[i0 + r], w.dQ[r * w.ldd : r * w.ldd + call.size.d]
        for x in range(call.size.d):
            target[x] += scale * source[x]


@_helper
def store_keys(call, w, dk, dv, b, h, j0, n_j):
    """Store dK (times scale) and dV of one block, in the dtype of the call."""
    scale = w.dK.dtype.type(call.real.scale)
    for at in range(len(w.dK)):
        w.dK[at] *= scale
    start = call.k_starts[b]
    store_tile(rows_of(dk, start, b, h, j0), dk.code, dk.row, w.dK, 0, w.ldd, 1, n_j, call.size.d)
    store_tile(rows_of(dv, start, b, h, j0), dv.code, dv.row, w.dV, 0, w.ldv, 1, n_j, call.size.dv)
