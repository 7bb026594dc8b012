"""The one argument of every kernel, as in cupy_raw's call.cuh: a named tuple of 64-bit words that launch.py fills.

Numba passes its fields as parameters one behind the other, which in memory is the record. A function here that
takes a kernel's constants (:class:`rawflash.backends.cupy_raw.launch.Constants`) is a template: it makes the device
function for them.
"""

from __future__ import annotations

from collections import namedtuple
from functools import cache
from typing import Any

from rawflash.backends.cupy_raw.launch import FIELDS, MASK_WORDS
from rawflash.backends.numba_cuda.intrinsics import as_double
from rawflash.backends.numba_cuda.memory import device, load_int32, load_int64
from rawflash.backends.numba_cuda.numbers import LOAD
from rawflash.problem import FARTHEST

EXTENTS = ("bias_b", "bias_h", "bias_i", "bias_j")  # beside the strides bias.b and so on
NAMES = tuple(f"{name}_extent" if name in EXTENTS else name.replace(".", "_") for name in FIELDS)
FIRST_MASK_WORD = NAMES.index("mask_0")
WORDS = tuple(n for n in range(len(NAMES)) if not 0 <= n - FIRST_MASK_WORD < MASK_WORDS)  # all but the mask's

# One sequence of the batch, as far as it is not padding. slot: which batch entry of the arrays it lies in;
# offset: position of query row 0 on the key axis.
Sequence = namedtuple("Sequence", "b slot q_start k_start q_length kv_length offset")
Head = namedtuple("Head", "b slot q_start k_start q_length kv_length offset h h_kv scale slope")
Place = namedtuple("Place", "slot t exists")


@cache  # one class for Numba, which compiles device functions for each
def call_type(mask_words: int) -> Any:
    """The named tuple of a kernel whose mask has so many words: they come last."""
    return namedtuple("Call", [NAMES[n] for n in WORDS] + [f"mask_{n}" for n in range(mask_words)])


def words_of(mask_words: int) -> list[int]:
    """Which words of the record these are, in order."""
    return [*WORDS, *range(FIRST_MASK_WORD, FIRST_MASK_WORD + mask_words)]


@device
def least(x: int, y: int) -> int:
    return x if x < y else y


@device
def most(x: int, y: int) -> int:
    return x if x > y else y


@device
def clamp(x: int, low: int, high: int) -> int:
    return least(most(x, low), high)


@device
def entry(data: int, bytes_: int, b: int, otherwise: int) -> int:
    """Entry b of a table of integers, or ``otherwise`` where there is no table."""
    if bytes_ == 8:
        return load_int64(data + 8 * b)
    if bytes_ == 4:
        return load_int32(data + 4 * b)
    return otherwise


def sequence(c: Any) -> Any:
    """``sequence(call, b)``. Tables on the device are not to be trusted: all is clamped to the arrays."""
    packed = c.PACKED

    @device
    def sequence(call: Any, b: int) -> Any:
        if packed:
            slot = 0
            q_start = clamp(entry(call.cu_seqlens_q_data, call.cu_seqlens_q_bytes, b, 0), 0, call.rows_q)
            k_start = clamp(entry(call.cu_seqlens_k_data, call.cu_seqlens_k_bytes, b, 0), 0, call.rows_k)
            q_end = entry(call.cu_seqlens_q_data, call.cu_seqlens_q_bytes, b + 1, 0)
            k_end = entry(call.cu_seqlens_k_data, call.cu_seqlens_k_bytes, b + 1, 0)
            q_length = clamp(q_end, q_start, call.rows_q) - q_start
            kv_length = clamp(k_end, k_start, call.rows_k) - k_start
        else:
            slot = b
            q_start = 0
            k_start = 0
            q_length = clamp(entry(call.q_lengths_data, call.q_lengths_bytes, b, call.Tq), 0, call.Tq)
            kv_length = clamp(entry(call.kv_lengths_data, call.kv_lengths_bytes, b, call.Tk), 0, call.Tk)
        given = call.offset if call.offset_given else kv_length - q_length
        offset = clamp(entry(call.q_offset_data, call.q_offset_bytes, b, given), -FARTHEST, FARTHEST)
        return Sequence(b, slot, q_start, k_start, q_length, kv_length, offset)

    return sequence


def rows_in_line(size: int) -> Any:
    """``rows_in_line(call, place)``: of blocks of ``size`` rows of packed sequences in one line, as in call.cuh.

    Returns whose block has the place, and the number of the block; a negative one is nobody's, as is one behind the
    last.
    """

    @device
    def begin(call: Any, b: int) -> int:
        return clamp(entry(call.cu_seqlens_q_data, call.cu_seqlens_q_bytes, b, 0), 0, call.rows_q) // size + b

    @device
    def rows_in_line(call: Any, place: int) -> Any:
        b, left = 0, call.B
        while left > 1:  # the last of these many that begins there or before
            half = left // 2
            if begin(call, b + half) <= place:
                b += half
                left -= half
            else:
                left = half
        return b, place - begin(call, b)

    return rows_in_line


def head(c: Any) -> Any:
    """``head(call, s, h)``: one query head of a sequence."""
    real, alibi, load, size = c.real, c.ALIBI, LOAD[c.SLOPE_TYPE], c.SLOPE_BYTES

    @device
    def head(call: Any, s: Any, h: int) -> Any:
        scale = real(as_double(call.scale))
        slope = real(0)
        if alibi:
            slope = real(load(call.slopes + (s.b * call.slopes_b + h * call.slopes_h) * size))
        return Head(s.b, s.slot, s.q_start, s.k_start, s.q_length, s.kv_length, s.offset,
                    h, h // (call.Hq // call.Hkv), scale, slope)  # fmt: skip

    return head


def place_of(c: Any) -> Any:
    """``place_of(call, s, j)``: where key j of a sequence lies in a paged cache: PAGE keys a block, the table names it.

    A block outside the cache is not looked at, and ``exists`` is False: such a key is hidden.
    """
    page = c.PAGE

    @device
    def place_of(call: Any, s: Any, j: int) -> Any:
        block = entry(call.block_table_data, call.block_table_bytes, s.b * call.table_row + j // page, 0)
        exists = 0 <= block and block < call.cache_blocks
        return Place(block if exists else 0, j % page, exists)

    return place_of


def row_of(c: Any, name: str) -> Any:
    """``row_of(call, slot, h, t)``: the address of a row of a matrix, or of a number of a statistic."""
    statistic = name in ("lse", "dlse", "delta", "m", "l")
    size = c.REAL_BYTES if statistic else c.ELEM_BYTES
    data, batch, head_, row = (NAMES.index(f"{name}_{part}") for part in ("data", "batch", "head", "row"))

    @device
    def row_of(call: Any, slot: int, h: int, t: int) -> int:
        return call[data] + (slot * call[batch] + h * call[head_] + t * call[row]) * size

    return row_of


def sums_of(c: Any, width: int) -> Any:
    """``sums_of(call, slot, h, t)``: the address of row t of a head in the workspace; so many numbers to a row."""
    size = c.REAL_BYTES * width

    @device
    def sums_of(call: Any, slot: int, h: int, t: int) -> int:
        return call.sums + ((slot * call.Hq + h) * call.rows_q + t) * size

    return sums_of
