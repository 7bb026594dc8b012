"""Scores: from a product q.k to what enters the softmax, and which tiles and keys are visible at all (scores.cuh).

Order, as everywhere: s = scale q.k, softcap, + bias, + ALiBi, mask. Options that a call does not have are not in its
code: Numba leaves out the branches of a constant that is False.
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

from numba import int64

from rawflash.backends.numba_cuda.call import clamp, least, place_of
from rawflash.backends.numba_cuda.intrinsics import as_double, get, put
from rawflash.backends.numba_cuda.memory import device
from rawflash.backends.numba_cuda.numbers import INFINITE, LOAD
from rawflash.backends.numba_cuda.tile import score_tile, threads
from rawflash.backends.numba_cuda.visibility import EMPTY, FULL, PARTIAL, band_tile, band_visible, make_mask

Block = namedtuple("Block", "start kind")  # a block of rows or keys, the class of the tile; EMPTY: none is left
Step = namedtuple("Step", "h i0 kind")  # a block of rows of one of the query heads that share a key head


class Scores:
    """The device functions of this file, for the constants of a kernel."""

    def __init__(self, c: Any) -> None:
        self.plain = not (c.SOFTCAP or c.BIAS or c.ALIBI)
        self.in_registers = self.plain and not (c.HAS_MASK or c.PAGE)
        functions: tuple[Any, Any] = make_mask(c.mask, c.FIRST_MASK) if c.HAS_MASK else (None, None)
        self.mask_visible, self.mask_tile = functions
        self.tile_kind = tile_kind(c, self)
        self.next_keys, self.next_rows = next_keys(c, self), next_rows(c, self)
        self.key_range, self.row_range = key_range(c), row_range(c)
        self.visible, self.score = visible(c, self), score(c)
        self.keys_of_row = keys_of_row(c)


def tile_kind(c: Any, of: Scores) -> Any:
    """Class of rows [i0, i0 + BR) and keys [j0, j0 + BC); one that reaches into padding is at most PARTIAL."""
    BR, BC, banded, paged, masked, mask_tile = c.BR, c.BC, c.BAND, c.PAGE, c.HAS_MASK, of.mask_tile

    @device
    def tile_kind(call: Any, at: Any, h: int, i0: int, j0: int) -> int:
        i1 = least(i0 + BR, at.q_length)
        j1 = least(j0 + BC, at.kv_length)
        kind = FULL if i1 - i0 == BR and j1 - j0 == BC else PARTIAL
        if banded:
            kind = least(kind, band_tile(call.band_lower, call.band_upper, i0, i1, j0, j1, at.offset))
        if paged:  # some of its blocks may be outside the cache
            kind = least(kind, PARTIAL)
        if masked:
            if kind != EMPTY:
                kind = least(kind, mask_tile(call, at.b, h, i0, i1, j0, j1, at.offset))
        return int64(kind)

    return tile_kind


def next_keys(c: Any, of: Scores) -> Any:
    """``next_keys(call, at, h, i0, j0, j_end)``: the first block of keys that some of the rows [i0, i0 + BR) sees."""
    BC, tile_kind = c.BC, of.tile_kind

    @device
    def next_keys(call: Any, at: Any, h: int, i0: int, j0: int, j_end: int) -> Any:
        kind = int64(EMPTY)
        while j0 < j_end:
            kind = tile_kind(call, at, h, i0, j0)
            if kind != EMPTY:
                break
            j0 += BC
        return Block(int64(j0), kind)

    return next_keys


def next_rows(c: Any, of: Scores) -> Any:
    """``next_rows(call, at, h, i0, i_end, j0)``: the first block of rows that sees some of the keys [j0, j0 + BC)."""
    BR, tile_kind = c.BR, of.tile_kind

    @device
    def next_rows(call: Any, at: Any, h: int, i0: int, i_end: int, j0: int) -> Any:
        kind = int64(EMPTY)
        while i0 < i_end:
            kind = tile_kind(call, at, h, i0, j0)
            if kind != EMPTY:
                break
            i0 += BR
        return Block(int64(i0), kind)

    return next_rows


def key_range(c: Any) -> Any:
    """``key_range(call, s, i0)``: the keys that the band leaves to rows [i0, i0 + BR), from the start of a block."""
    BR, BC, banded = c.BR, c.BC, c.BAND

    @device
    def key_range(call: Any, s: Any, i0: int) -> Any:
        low, high = int64(0), int64(s.kv_length if i0 < s.q_length else 0)
        if banded:
            i1 = least(i0 + BR, s.q_length)
            low = clamp(i0 + s.offset + call.band_lower, 0, high) // BC * BC
            high = clamp(i1 + s.offset + call.band_upper, 0, high)
        return low, high

    return key_range


def row_range(c: Any) -> Any:
    """``row_range(call, s, j0)``: the rows to which the band shows keys [j0, j0 + BC), from the start of a block."""
    BR, BC, banded = c.BR, c.BC, c.BAND

    @device
    def row_range(call: Any, s: Any, j0: int) -> Any:
        low, high = int64(0), int64(s.q_length if j0 < s.kv_length else 0)
        if banded:
            j1 = least(j0 + BC, s.kv_length)
            low = clamp(j0 - s.offset - call.band_upper, 0, high) // BR * BR
            high = clamp(j1 - s.offset - call.band_lower, 0, high)
        return low, high

    return row_range


def visible(c: Any, of: Scores) -> Any:
    banded, paged, masked, mask_visible = c.BAND, c.PAGE, c.HAS_MASK, of.mask_visible
    place = place_of(c)

    @device
    def visible(call: Any, at: Any, i: int, j: int) -> bool:
        seen = i < at.q_length and j < at.kv_length
        if paged:
            seen = seen and place(call, at, j).exists
        if banded:
            seen = seen and band_visible(call.band_lower, call.band_upper, i, j, at.offset)
        if masked:
            if seen:
                seen = mask_visible(call, at.b, at.h, i, j, at.offset)
        return seen

    return visible


def score(c: Any) -> Any:
    """``score(call, at, product, i, j)`` of a visible pair, and d(score)/d(s), which softcap makes differ from 1."""
    real, softcap, biased, alibi = c.real, c.SOFTCAP, c.BIAS, c.ALIBI
    load_bias, size = LOAD[c.BIAS_TYPE], c.BIAS_BYTES

    @device
    def score(call: Any, at: Any, product: Any, i: int, j: int) -> Any:
        s = product * at.scale
        slope = real(1)
        if softcap:
            cap = real(as_double(call.softcap))
            t = real(math.tanh(s / cap))
            s = cap * t
            slope = real(1) - t * t
        if biased:
            bias = real(load_bias(
                call.bias_data + (at.b * call.bias_b + at.h * call.bias_h + i * call.bias_i + j * call.bias_j) * size
            ))  # fmt: skip
            s = bias if bias == -INFINITE else s + bias  # -inf hides the key, whatever its score is
        if alibi:
            distance = i + at.offset - j
            s -= at.slope * real(-distance if distance < 0 else distance)
        return s, slope

    return score


def keys_of_row(c: Any) -> Any:
    """``keys_of_row(call, at, i, j0)``: what a row sees but for the mask, counted from j0 and clamped to a tile."""
    BC, banded = c.BC, c.BAND

    @device
    def keys_of_row(call: Any, at: Any, i: int, j0: int) -> Any:
        first, end = int64(0), int64(at.kv_length if i < at.q_length else 0)
        if banded:
            first = i + at.offset + call.band_lower
            end = least(end, i + at.offset + call.band_upper + 1)
        return clamp(first - j0, 0, BC), clamp(end - j0, 0, BC)

    return keys_of_row


def finish_scores(c: Any, of: Scores, place: int) -> Any:
    """``finish_scores(call, at, S, on_chip, i0, j0, kind)``: S = Q K^T -> scores, hidden ones -inf.

    Scores without options stay in registers. Others are finished on chip, at ``place``, in a loop that stays one:
    the code of options is long.
    """
    R, C, side, pitch, real = c.R, c.C, c.SIDE, c.PITCH_S, c.real
    plain, in_registers = of.plain, of.in_registers
    keys_of_row, visible, score = of.keys_of_row, of.visible, of.score
    put_tile, get_tile = score_tile(c, place)
    thread_x, thread_y = threads(c)
    hidden = real(-INFINITE) if c.SIMULATED else -INFINITE

    @device
    def in_tile(call: Any, at: Any, S: Any, on_chip: Any, i0: int, j0: int, kind: int) -> None:
        put_tile(on_chip, S)
        n = 0
        while n < R * C:
            y = thread_y() + side * (n // C)
            x = thread_x() + side * (n % C)
            s = real(hidden)
            if kind == FULL or visible(call, at, i0 + y, j0 + x):
                s, _ = score(call, at, get(on_chip, place + y * pitch + x), i0 + y, j0 + x)
            put(on_chip, place + y * pitch + x, s)
            n += 1
        get_tile(on_chip, S)

    @device
    def finish_scores(call: Any, at: Any, S: Any, on_chip: Any, i0: int, j0: int, kind: int) -> None:
        if plain:
            if in_registers or kind == FULL:
                for r in range(R):
                    for n in range(C):
                        S[r, n] *= at.scale
                if kind != FULL:
                    for r in range(R):
                        first, end = keys_of_row(call, at, i0 + thread_y() + side * r, j0)
                        for n in range(C):
                            x = thread_x() + side * n
                            if x < first or x >= end:
                                S[r, n] = real(hidden)
            else:
                in_tile(call, at, S, on_chip, i0, j0, kind)
        else:
            in_tile(call, at, S, on_chip, i0, j0, kind)

    return finish_scores
