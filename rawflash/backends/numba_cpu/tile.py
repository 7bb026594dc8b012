"""The phases of one tile that the kernels share.

A tile pairs query rows ``i0 : i0 + n_i`` of head ``h`` in batch ``b`` with keys ``j0 : j0 + n_j``. Its
scores are a 1-D workspace addressed as ``S[outer * ld + lane]``: the forward kernels put the queries
on the lanes (row maxima and sums need no reduction across a vector), the backward kernels and that of
few rows the keys.
"""

from __future__ import annotations

import math
import numpy as np
from numba import njit

from rawflash.backends.numba_cpu.launch import ABSENT
from rawflash.backends.numba_cpu.microkernel import OPTIONS, columns_of
from rawflash.backends.numba_cpu.numerics import address_of, load_scalar, load_tile, philox4
from rawflash.backends.numba_cpu.visibility import FULL, hide
from rawflash.philox import WORDS

_LINE = 64  # bytes of a cache line
#: In arguments, in place of literals, of which each would be a signature of its own, and compiled again.
NONE, UNIT = np.int64(0), np.int64(1)
_helper = njit(**OPTIONS)


@_helper
def padded(extent, granule):
    """``extent`` rounded up to a multiple of ``granule``."""
    return -(-extent // granule) * granule


@_helper
def aligned(n, zero):
    """n zeros of the type of ``zero`` that begin at a cache line: a vector of 64 bytes would else lie in two."""
    spare = _LINE // np.empty(0, type(zero)).itemsize
    whole = np.zeros(n + spare, type(zero))
    first = -(address_of(whole, 0) // whole.itemsize) % spare
    return whole[first : first + n]


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
def hide_band(call, S, b, i, rows, j_low, j_high):
    """-inf over what the band hides of a panel of scores: rows ``i : i + rows`` on its lanes, keys from ``j_low``."""
    offset, width = call.q_offset[b], columns_of(S)
    lower, upper = call.size.band_lower, call.size.band_upper
    # Keys from `first` up to `stop` are seen by all rows, most of a panel.
    first, stop = i + rows - 1 + offset + lower, i + offset + upper + 1
    if first <= j_low and j_high <= stop:
        return
    for j in range(j_low, j_high):
        if first <= j < stop:
            continue
        distance = j - (i + offset)  # of row i; one less a lane
        row = S[(j - j_low) * width : (j - j_low) * width + width]
        for x in range(width):
            row[x] = row[x] if lower <= distance - x <= upper else -np.inf


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
def finish_rows(m, l, n_i, unit, sink, has_sink, lse, factor):
    """End of a row: the log-sum-exp, sink included, and the factor that normalises the row of O.

    ``lse = unit m + log l``; a row that saw no key gets -inf, or the sink, and factor 0.
    """
    for r in range(n_i):
        top, total, scale = unit * float(m[r]), float(l[r]), 1.0
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
