"""The compiled twin of :mod:`rawflash.masks`: tile classes and the masking of one tile.

A score tile is a 1-D workspace addressed as ``S[outer * ld + lane]``. The forward kernels put the
query rows on the lanes, the backward kernels the keys; ``lanes_are_queries`` says which.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rawflash import masks
from rawflash.backends.numba_cpu.microkernel import OPTIONS
from rawflash.backends.numba_cpu.numerics import load_i64, load_u8

EMPTY, PARTIAL, FULL = masks.EMPTY, masks.PARTIAL, masks.FULL
_BAND, _PREFIX, _LENGTHS, _SEGMENTS = masks.OP_BAND, masks.OP_PREFIX, masks.OP_LENGTHS, masks.OP_SEGMENTS
_DENSE, _AND, _OR = masks.OP_DENSE, masks.OP_AND, masks.OP_OR
_WORD = 8  # bytes of an int64

_helper = njit(**OPTIONS)


@_helper
def _class_of(step, b, h, i0, i1, j0, j1, offset):
    """Tile class of one instruction that pushes a boolean."""
    code = step[0]
    if code == _BAND:
        nearest, farthest = j0 - (i1 - 1 + offset), j1 - 1 - (i0 + offset)
        if farthest < step[1] or nearest > step[2]:
            return EMPTY
        return FULL if step[1] <= nearest and farthest <= step[2] else PARTIAL
    if code == _PREFIX:
        length = load_i64(step[2] + (b % step[1]) * _WORD)
        return FULL if j1 <= length else (PARTIAL if j0 < length else EMPTY)
    if code == _LENGTHS:
        q_length = load_i64(step[3] + (b % step[1]) * _WORD)
        kv_length = load_i64(step[4] + (b % step[2]) * _WORD)
        if i0 >= q_length or j0 >= kv_length:
            return EMPTY
        return FULL if i1 <= q_length and j1 <= kv_length else PARTIAL
    if code == _SEGMENTS:
        rows, keys = step[3] + b * step[1] * _WORD, step[4] + b * step[2] * _WORD
        row_low = row_high = load_i64(rows + i0 * _WORD)
        for i in range(i0, i1):
            id_ = load_i64(rows + i * _WORD)
            row_low, row_high = min(row_low, id_), max(row_high, id_)
        key_low = key_high = load_i64(keys + j0 * _WORD)
        for j in range(j0, j1):
            id_ = load_i64(keys + j * _WORD)
            key_low, key_high = min(key_low, id_), max(key_high, id_)
        if row_low > key_high or key_low > row_high:
            return EMPTY
        return FULL if row_low == row_high and key_low == key_high and row_low == key_low else PARTIAL
    # _DENSE
    base = step[5] + b * step[1] + h * step[2]
    seen = 0
    for i in range(i0, i1):
        for j in range(j0, j1):
            seen += load_u8(base + i * step[3] + j * step[4]) != 0  # any other byte is True
    if seen == 0:
        return EMPTY
    return FULL if seen == (i1 - i0) * (j1 - j0) else PARTIAL


@_helper
def band_class(call, i0, i1, j0, j1, offset):
    """Tile class of the band alone."""
    lower, upper = call.size.band_lower, call.size.band_upper
    nearest, farthest = j0 - (i1 - 1 + offset), j1 - 1 - (i0 + offset)
    if farthest < lower or nearest > upper:
        return EMPTY
    return FULL if lower <= nearest and farthest <= upper else PARTIAL


@_helper
def program_class(call, classes, b, h, i0, i1, j0, j1, offset):
    """Tile class of the mask program; ``classes`` is scratch of ``program_depth`` int64."""
    top = 0
    for n in range(call.program.shape[0]):
        step = call.program[n]
        code = step[0]
        if code == _AND:
            classes[top - 2] = min(classes[top - 2], classes[top - 1])
            top -= 1
        elif code == _OR:
            classes[top - 2] = max(classes[top - 2], classes[top - 1])
            top -= 1
        else:
            classes[top] = _class_of(step, b, h, i0, i1, j0, j1, offset)
            top += 1
    return classes[0]


@_helper
def key_range(call, b, i0, i1):
    """Keys ``[j_low, j_high)`` outside which rows ``i0:i1`` see nothing, from lengths and band."""
    offset, length = call.q_offset[b], call.kv_lengths[b]
    low = i0 + offset + call.size.band_lower
    high = i1 - 1 + offset + call.size.band_upper + 1
    return max(0, min(low, length)), max(0, min(high, length))


@_helper
def query_range(call, b, j0, j1):
    """Rows ``[i_low, i_high)`` outside which no query sees keys ``j0:j1``."""
    offset, length = call.q_offset[b], call.q_lengths[b]
    low = j0 - offset - call.size.band_upper
    high = j1 - 1 - offset - call.size.band_lower + 1
    return max(0, min(low, length)), max(0, min(high, length))


@_helper
def _visible_row(step, row, b, h, i, j, di, dj, offset):
    """row[x] = does query i + x di see key j + x dj, by one instruction that pushes a boolean?"""
    code = step[0]
    n = len(row)
    if code == _BAND:
        for x in range(n):
            distance = (j + x * dj) - (i + x * di + offset)
            row[x] = step[1] <= distance and distance <= step[2]
    elif code == _PREFIX:
        length = load_i64(step[2] + (b % step[1]) * _WORD)
        for x in range(n):
            row[x] = j + x * dj < length
    elif code == _LENGTHS:
        q_length = load_i64(step[3] + (b % step[1]) * _WORD)
        kv_length = load_i64(step[4] + (b % step[2]) * _WORD)
        for x in range(n):
            row[x] = i + x * di < q_length and j + x * dj < kv_length
    elif code == _SEGMENTS:
        rows, keys = step[3] + b * step[1] * _WORD, step[4] + b * step[2] * _WORD
        for x in range(n):
            row[x] = load_i64(rows + (i + x * di) * _WORD) == load_i64(keys + (j + x * dj) * _WORD)
    else:
        base = step[5] + b * step[1] + h * step[2] + i * step[3] + j * step[4]
        stride = di * step[3] + dj * step[4]
        for x in range(n):
            row[x] = load_u8(base + x * stride) != 0


@_helper
def hide(call, S, ld, seen, b, h, i0, n_i, j0, n_j, lanes_are_queries, by_band, by_program):
    """Write -inf over the scores of keys that a query does not see.

    ``S`` holds rows ``i0 : i0 + n_i`` against keys ``j0 : j0 + n_j``; ``seen`` is uint8 scratch
    ``(program_depth, lanes)``. ``by_band`` and ``by_program`` say what the tile is partial by.
    """
    outers, lanes = (n_j, n_i) if lanes_are_queries else (n_i, n_j)
    offset = call.q_offset[b]
    hidden = -np.inf
    for outer in range(outers):
        row = S[outer * ld : outer * ld + lanes]
        i = i0 if lanes_are_queries else i0 + outer
        j = j0 + outer if lanes_are_queries else j0
        if by_band:
            # Visible lanes are an interval: lower <= distance <= upper, distance moving by one a lane.
            distance = j - (i + offset)
            if lanes_are_queries:
                first, last = distance - call.size.band_upper, distance - call.size.band_lower
            else:
                first, last = call.size.band_lower - distance, call.size.band_upper - distance
            first, stop = max(0, min(first, lanes)), max(0, min(last + 1, lanes))
            for x in range(first):
                row[x] = hidden
            tail = row[stop:]
            for x in range(len(tail)):
                tail[x] = hidden
        if by_program:
            di, dj = (1, 0) if lanes_are_queries else (0, 1)
            top = 0
            for n in range(call.program.shape[0]):
                step = call.program[n]
                if step[0] == _AND or step[0] == _OR:
                    left, right = seen[top - 2, :lanes], seen[top - 1, :lanes]
                    if step[0] == _AND:
                        for x in range(lanes):
                            left[x] &= right[x]
                    else:
                        for x in range(lanes):
                            left[x] |= right[x]
                    top -= 1
                else:
                    _visible_row(step, seen[top, :lanes], b, h, i, j, di, dj, offset)
                    top += 1
            visible = seen[0, :lanes]
            for x in range(lanes):
                row[x] = row[x] if visible[x] else hidden
