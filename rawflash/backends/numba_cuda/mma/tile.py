"""Tiles of 16-bit numbers in on-chip memory, and the rows that the lanes of a warp give to ldmatrix.

A tile's rows have 64 or 128 numbers, of which the first D are the matrix's, and those up to a multiple of 16 zeros.
Chunk x of row y, 16 bytes, lies at chunk x ^ (y & 7): the eight rows of an 8 x 8 matrix are in different banks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from numba import cuda, float32, int32, int64, uint16, uint32

from rawflash.backends.numba_cuda.call import Head
from rawflash.backends.numba_cuda.intrinsics import (as_double, copy16, copy16_if, mma_bf16, mma_f16, pack_bf16,
                                                     pack_f16, quotient, shared_load4, shared_store)  # fmt: skip
from rawflash.backends.numba_cuda.memory import device, ldg_uint16, store_uint16, store_uint32x4
from rawflash.tiling import MMA_DEPTH, mma_pitch

FAR = 1 << 30  # beyond all rows and keys of a call that these kernels take
ELEMENT = 2  # bytes
CHUNK = 8  # elements of 16 bytes


def shape(c: Any) -> SimpleNamespace:
    """Of the rows of a tile: bytes, chunks, the columns that take part in products, and whether that is all of them."""
    columns = mma_pitch(c.D)
    width = -(-c.D // MMA_DEPTH) * MMA_DEPTH
    return SimpleNamespace(ROW=columns * ELEMENT, CHUNKS=columns // CHUNK, COLUMNS=columns, WIDTH=width,
                           WHOLE=c.D == columns)  # fmt: skip


def products(c: Any) -> tuple[Any, Any]:
    """The product of a warp and the packing of two numbers, for the dtype of the call."""
    return (mma_bf16, pack_bf16) if c.TYPE == "BFLOAT16" else (mma_f16, pack_f16)


@device
def narrow(x: int) -> int:
    """An int32, where more than FAR is as good as FAR."""
    return int32(min(max(x, int64(-FAR)), int64(FAR)))


@device
def head_of(call: Any, s: Any, h: int) -> Any:
    """``head`` in call.py without ALiBi."""
    return Head(s.b, s.slot, s.q_start, s.k_start, s.q_length, s.kv_length, s.offset,
                h, quotient(h, quotient(call.Hq, call.Hkv)), float32(as_double(call.scale)), float32(0))  # fmt: skip


@device
def lane_rows(lane: int, row_bytes: int) -> int:
    """Where this lane's row of a 16 x 16 piece begins: as rows of A, or transposed as columns of B."""
    return int32((lane & 15) * row_bytes + (((lane >> 4) ^ (lane & 7)) << 4))


@device
def lane_columns(lane: int, row_bytes: int) -> int:
    """The same where the rows are the columns of B, or transposed the rows of A."""
    return int32(((lane & 7) + ((lane >> 4) << 3)) * row_bytes + ((((lane >> 3) & 1) ^ (lane & 7)) << 4))


def load_tile(c: Any, rows: int, threads: int) -> tuple[Any, Any]:
    """``load_tile(to, address, stride, count, columns)`` and ``load_whole(to, address, stride, columns)``.

    Each thread copies one chunk of some rows, evenly spaced; ``to`` and ``address`` are those of its first. From there
    on ``count`` rows of the tile exist, and the others become zeros, and of each row ``columns``. All rows exist for
    ``load_whole``.
    """
    of = shape(c)
    row_bytes, whole = of.ROW, of.WHOLE
    step = threads // of.CHUNKS
    times = rows // step

    @device
    def load_tile(to: int, address: int, stride: int, count: int, columns: int) -> None:
        if not whole and columns <= 0:
            count = int32(0)
        for n in range(times):
            exists = n * step < count
            copy16_if(uint32(to + n * (step * row_bytes)), address + (n * step * stride if exists else 0),
                      uint32(16 if exists else 0))  # fmt: skip

    @device
    def load_whole(to: int, address: int, stride: int, columns: int) -> None:
        if whole:
            for n in range(times):
                copy16(uint32(to + n * (step * row_bytes)), address + n * step * stride)
        else:
            load_tile(to, address, stride, int32(FAR), columns)

    @device
    def load_elements(to: int, address: int, stride: int, count: int, columns: int) -> None:
        n = int32(0)
        while n < times:  # a loop that stays one
            for e in range(4):
                word = uint32(0)
                if n * step < count:
                    source = address + int64(n * step) * stride + 4 * e
                    if 2 * e < columns:
                        word = uint32(ldg_uint16(source))
                    if 2 * e + 1 < columns:
                        word = uint32(word | (uint32(ldg_uint16(source + 2)) << 16))
                shared_store(uint32(to + n * (step * row_bytes) + 4 * e), word)
            n = int32(n + 1)

    @device
    def load_all_elements(to: int, address: int, stride: int, columns: int) -> None:
        load_elements(to, address, stride, int32(FAR), columns)

    return (load_tile, load_whole) if c.ALIGNED else (load_elements, load_all_elements)


def store_rows(c: Any, pieces: int) -> Any:
    """``store_rows(X, factor, own, address, stride, full, exist, lane)``: the rows of a warp, 16 for each piece.

    They go through its own rows of on-chip memory, at ``own``, to have whole chunks. ``factor[r]`` is that of row
    8 r + lane / 4. Rows from ``full`` on and those whose factor is 0 are 0, those from ``exist`` on are not the call's.
    """
    of = shape(c)
    row_bytes, chunks, NO, D, aligned = of.ROW, of.CHUNKS, of.WIDTH // 8, c.D, c.ALIGNED
    rows = 32 // chunks  # that a warp stores at once
    times = pieces * 16 // rows
    _, pack = products(c)

    @device
    def store_rows(X: Any, factor: Any, own: int, address: int, stride: int, full: int, exist: int, lane: int) -> None:
        g = int32(lane >> 2)
        for i in range(pieces):
            for half in range(2):
                y = int32(i * 16 + half * 8 + g)
                empty = y >= full or factor[2 * i + half] == float32(0)
                for n in range(NO):
                    at = (i * NO + n) * 4 + half * 2
                    x0, x1 = X[at] * factor[2 * i + half], X[at + 1] * factor[2 * i + half]
                    if empty:  # whatever its values are
                        x0, x1 = float32(0), float32(0)
                    shared_store(uint32(own + y * row_bytes + ((n ^ g) << 4) + (lane & 3) * 4), pack(x0, x1))
        cuda.syncwarp()
        y0, x = int32(lane // chunks), int32(lane % chunks)
        for n in range(times):
            y = int32(n * rows + y0)
            if y < exist and 8 * x < D:
                words = shared_load4(uint32(own + y * row_bytes + ((x ^ (y & 7)) << 4)))
                target = address + y * stride + x * 16
                if aligned:
                    store_uint32x4(target, words)
                else:
                    for e in range(4):
                        if 8 * x + 2 * e < D:
                            store_uint16(target + 4 * e, uint16(words[e] & 0xFFFF))
                        if 8 * x + 2 * e + 1 < D:
                            store_uint16(target + 4 * e + 2, uint16(words[e] >> 16))

    return store_rows
