"""Visibility on the device: what :mod:`rawflash.masks` says, for a whole thread block.

The twin of cupy_raw's ``visibility.cuh`` and of the text that a mask has there. The call's own band (causal,
window) is two functions that kernels call: `band_visible`, `band_tile`. The rest is what masks are put
together from: :func:`make_mask` turns a mask's ``program`` into two device functions. Its structure is in
closures, its data in the words of the call, so that one compiled kernel serves every mask of one structure.

``*_tile`` functions give the class of the rectangle of rows ``i0 <= i < i1`` and keys ``j0 <= j < j1``, never
an empty one. They may hold barriers and exchanges between threads: all threads of the block call them together,
with the same arguments, and get the same answer. Blocks are one-dimensional, of whole warps.

Only rows and keys inside the lengths may be asked about: a mask's arrays have no others.

Integers have 64 bits: bounds reach +-2^62 (masks.UNBOUNDED), offsets +-2^61, so that the difference of a key and
a row plus its offset stays within them, and no bound is ever added to anything.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, int32

from rawflash import masks
from rawflash.backends.numba_cuda.memory import SIMULATED, device, ldg_int64, ldg_uint8
from rawflash.errors import BackendError

EMPTY, PARTIAL, FULL = masks.EMPTY, masks.PARTIAL, masks.FULL  # And is the least in this order, Or the greatest
_WORD = 8  # bytes of an int64
_LANES = 32

# ---- the band: lower <= j - (i + offset) <= upper -----------------------------------------------------


@device
def band_visible(lower, upper, i, j, offset):
    distance = j - (i + offset)
    return (lower <= distance) & (distance <= upper)


@device
def band_tile(lower, upper, i0, i1, j0, j1, offset):
    nearest = j0 - (i1 - 1 + offset)  # smallest and largest distance inside the rectangle
    farthest = j1 - 1 - (i0 + offset)
    if farthest < lower or nearest > upper:
        return EMPTY
    return FULL if lower <= nearest and farthest <= upper else PARTIAL


# ---- the arrays of a mask, by address ------------------------------------------------------------------


@device
def int_at(address, index):
    return ldg_int64(address + index * _WORD)


@device
def byte_at(address, offset):  # any byte but 0 is True
    return ldg_uint8(address + offset) != 0


@device
def per_batch(address, count, b):
    """The entry of batch b in an array of ``count`` integers: one for all, or one each."""
    return int_at(address, 0 if count == 1 else b)


# ---- tile classes ----------------------------------------------------------------------------------------


@device
def below(x0, x1, limit):
    """Class of x0 <= x < x1, where x < limit is visible."""
    return FULL if x1 <= limit else PARTIAL if x0 < limit else EMPTY


def scan_of(visible):
    """A function that gives the class of a rectangle by looking at it, exact.

    Its elements, row after row, are dealt to the threads in turn. A thread goes on by blockDim.x elements in
    steps of rows and of keys: a division per element would cost more than the look.
    """

    @device
    def scan(call, b, h, i0, i1, j0, j1, offset):
        width = j1 - j0
        down, across = cuda.blockDim.x // width, cuda.blockDim.x % width
        i, j = i0 + cuda.threadIdx.x // width, j0 + cuda.threadIdx.x % width
        seen, hidden = False, False
        while i < i1 and not (seen and hidden):
            if visible(call, b, h, i, j, offset):
                seen = True
            else:
                hidden = True
            i += down
            j += across
            if j >= j1:
                j -= width
                i += 1
        if not cuda.syncthreads_or(int32(seen)):
            return EMPTY
        return PARTIAL if cuda.syncthreads_or(int32(hidden)) else FULL

    return scan


def _range_by_warp(address, start, count):
    """Each warp finds it for itself, which needs no barrier and no shared memory.

    The lanes share the integers, then exchange what they found.
    """
    lane = cuda.threadIdx.x % _LANES
    low = high = int_at(address, start + (lane if lane < count else 0))
    for n in range(lane + _LANES, count, _LANES):
        value = int_at(address, start + n)
        low, high = min(low, value), max(high, value)
    step = _LANES // 2
    while step > 0:  # afterwards all lanes hold the same
        low = min(low, cuda.shfl_xor_sync(0xFFFFFFFF, low, step))
        high = max(high, cuda.shfl_xor_sync(0xFFFFFFFF, high, step))
        step //= 2
    return low, high


def _range_by_thread(address, start, count):
    """For the simulator, which has no exchange between lanes."""
    found = [int_at(address, start + n) for n in range(count)]
    return min(found), max(found)


# Smallest and largest of the `count` > 0 integers from `start`.
range_of = device(_range_by_thread if SIMULATED else _range_by_warp)


@device
def equal_ids(rows, keys):
    """Class of rows and keys, each the range of their ids, that see each other where the ids are equal."""
    if rows[0] > keys[1] or keys[0] > rows[1]:
        return EMPTY
    return FULL if rows[0] == rows[1] and keys[0] == keys[1] else PARTIAL  # not apart: one id is the other


# ---- masks -----------------------------------------------------------------------------------------------
# One function for each operation code of a mask's program, which makes `visible` and `tile` of one mask. A mask
# that reads data is told at which words of the call its own begin: operands, then addresses.


def _band(w):
    lower, upper = w, w + 1

    @device
    def visible(call, b, h, i, j, offset):
        return band_visible(call[lower], call[upper], i, j, offset)

    @device
    def tile(call, b, h, i0, i1, j0, j1, offset):
        return band_tile(call[lower], call[upper], i0, i1, j0, j1, offset)

    return visible, tile


def _prefix(w):
    count, lengths = w, w + 1

    @device
    def visible(call, b, h, i, j, offset):
        return j < per_batch(call[lengths], call[count], b)

    @device
    def tile(call, b, h, i0, i1, j0, j1, offset):
        return below(j0, j1, per_batch(call[lengths], call[count], b))

    return visible, tile


def _lengths(w):
    q_count, kv_count, q_lengths, kv_lengths = range(w, w + 4)

    @device
    def visible(call, b, h, i, j, offset):
        return (i < per_batch(call[q_lengths], call[q_count], b)) & (j < per_batch(call[kv_lengths], call[kv_count], b))

    @device
    def tile(call, b, h, i0, i1, j0, j1, offset):
        rows = below(i0, i1, per_batch(call[q_lengths], call[q_count], b))
        return min(rows, below(j0, j1, per_batch(call[kv_lengths], call[kv_count], b)))

    return visible, tile


def _segments(w):
    q_stride, kv_stride, q_ids, kv_ids = range(w, w + 4)

    @device
    def visible(call, b, h, i, j, offset):
        return int_at(call[q_ids], b * call[q_stride] + i) == int_at(call[kv_ids], b * call[kv_stride] + j)

    @device
    def tile(call, b, h, i0, i1, j0, j1, offset):
        rows = range_of(call[q_ids], b * call[q_stride] + i0, i1 - i0)
        keys = range_of(call[kv_ids], b * call[kv_stride] + j0, j1 - j0)
        return equal_ids(rows, keys)

    return visible, tile


def _dense(w):
    of_b, of_h, of_i, of_j, array = range(w, w + 5)

    @device
    def visible(call, b, h, i, j, offset):
        return byte_at(call[array], b * call[of_b] + h * call[of_h] + i * call[of_i] + j * call[of_j])

    scan = scan_of(visible)

    @device
    def tile(call, b, h, i0, i1, j0, j1, offset):
        # Along a broadcast axis, whose stride is 0, one row or key speaks for all.
        i_end = i1 if call[of_i] != 0 else i0 + 1
        j_end = j1 if call[of_j] != 0 else j0 + 1
        return scan(call, b, h, i0, i_end, j0, j_end, offset)

    return visible, tile


def _and(left, right):
    (left_visible, left_tile), (right_visible, right_tile) = left, right

    @device
    def visible(call, b, h, i, j, offset):
        # & rather than `and`: no branch around loads, which then may leave the loop over scores.
        return left_visible(call, b, h, i, j, offset) & right_visible(call, b, h, i, j, offset)

    @device
    def tile(call, b, h, i0, i1, j0, j1, offset):
        kind = left_tile(call, b, h, i0, i1, j0, j1, offset)
        if kind == EMPTY:  # decided, by all threads alike
            return EMPTY
        return min(kind, right_tile(call, b, h, i0, i1, j0, j1, offset))

    return visible, tile


def _or(left, right):
    (left_visible, left_tile), (right_visible, right_tile) = left, right

    @device
    def visible(call, b, h, i, j, offset):
        return left_visible(call, b, h, i, j, offset) | right_visible(call, b, h, i, j, offset)  # no branch, as in _and

    @device
    def tile(call, b, h, i0, i1, j0, j1, offset):
        kind = left_tile(call, b, h, i0, i1, j0, j1, offset)
        if kind == FULL:
            return FULL
        return max(kind, right_tile(call, b, h, i0, i1, j0, j1, offset))

    return visible, tile


# code -> how to make it, and how many words it has
_LEAVES = {
    masks.OP_BAND: (_band, 2),
    masks.OP_PREFIX: (_prefix, 2),
    masks.OP_LENGTHS: (_lengths, 4),
    masks.OP_SEGMENTS: (_segments, 4),
    masks.OP_DENSE: (_dense, 5),
}
_PAIRS = {masks.OP_AND: _and, masks.OP_OR: _or}


def structure(mask: masks.Mask | None) -> tuple[int, ...]:
    """What of a mask is compiled: the operation codes of its program; of None there are none.

    Raises
    ------
    BackendError
        The mask has no program, or one with a code that is not known here.
    """
    if mask is None:
        return ()
    codes = tuple(step.code for step in mask.program())
    unknown = set(codes) - set(_LEAVES) - set(_PAIRS)
    if unknown:
        raise BackendError(
            f"mask {mask.kind} has operation codes {sorted(unknown)}, which backend 'numba_cuda' does not know; "
            "use backend='numpy_tiled'"
        )
    return codes


def words(mask: masks.Mask | None) -> list[int | np.ndarray]:
    """The data of a mask, one 64-bit word each, an array standing for its address.

    Those of the program, as this backend runs it: a mask's own ``words`` may say otherwise, for its CUDA text.
    """
    return [] if mask is None else masks.Mask.words(mask)


def make_mask(mask: masks.Mask, first: int) -> tuple[Any, Any]:
    """The device functions of a mask.

    Parameters
    ----------
    mask : Mask
        Anything with a ``program``; only its :func:`structure` matters.
    first : int
        Where in the call the mask's :func:`words` begin.

    Returns
    -------
    mask_visible, mask_tile
        ``mask_visible(call, b, h, i, j, offset)``, a bool, and
        ``mask_tile(call, b, h, i0, i1, j0, j1, offset)``, a class; ``call`` is a tuple of int64. Masks of one
        structure get the same two functions.
    """
    return _compose(structure(mask), first)


@cache
def _compose(codes, first):
    stack: list[tuple[Any, Any]] = []
    for code in codes:
        if code in _PAIRS:
            right, left = stack.pop(), stack.pop()
            stack.append(_PAIRS[code](left, right))
        else:
            make, count = _LEAVES[code]
            stack.append(make(first))
            first += count
    (both,) = stack
    return both
