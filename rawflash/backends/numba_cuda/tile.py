"""Tiles in on-chip (shared) memory: how they come from device memory, and who owns what of a row (tile.cuh).

A block has SIDE x SIDE threads. Rows of a tile lie PITCH numbers apart, so that what the threads of a warp read at
once is in different banks.
"""

from __future__ import annotations

from typing import Any

from numba import cuda

from rawflash.backends.numba_cuda import intrinsics
from rawflash.backends.numba_cuda.intrinsics import copier, exchange, get, put
from rawflash.backends.numba_cuda.memory import device
from rawflash.backends.numba_cuda.numbers import LOAD, LOADS, STORES, larger


def threads(c: Any) -> tuple[Any, Any]:
    """``thread_x()``, ``thread_y()``."""
    side = c.SIDE

    @device
    def thread_x() -> int:
        return cuda.threadIdx.x % side

    @device
    def thread_y() -> int:
        return cuda.threadIdx.x // side

    return thread_x, thread_y


class Grouped:
    """N columns over SIDE threads in vectors of WIDTH neighbours, as wide as leaves at most an eighth of them idle."""

    def __init__(self, c: Any, n: int) -> None:
        def padded(width: int) -> int:
            return width * c.SIDE * -(-n // (width * c.SIDE))

        widths = [w for w in (4, 2) if w <= c.VECTOR and 8 * padded(w) <= 9 * padded(1)]
        self.WIDTH = next(iter(widths), 1)
        self.COUNT = padded(self.WIDTH) // c.SIDE
        width, side = self.WIDTH, c.SIDE

        @device
        def at(t: int, n: int) -> int:
            return width * (t + side * (n // width)) + n % width

        self.at = at


def load_tile(c: Any, rows: int, columns: int, pitch: int, to: int) -> Any:
    """``load_tile(on_chip, address, stride, count)``: tile[r][x] = address[r * stride + x] for r < count; 0 below.

    ``to`` is where the tile begins on chip; the stride is in bytes. Columns past ``columns`` are left alone.
    """
    chunk, size, all_threads = c.CHUNK, c.ELEM_BYTES, c.THREADS
    chunks = columns // chunk
    total = rows * chunks
    load = LOAD[c.TYPE]
    if not c.ASYNCHRONOUS:  # what is converted on its way lies in registers

        @device
        def load_converted(on_chip: Any, address: int, stride: int, count: int) -> None:
            for n in range(cuda.threadIdx.x, total, all_threads):
                r = n // chunks
                x = n % chunks * chunk
                for e in range(chunk):
                    number = load(address + r * stride + (x + e) * size) if r < count else 0.0
                    put(on_chip, to + r * pitch + x + e, number)

        return load_converted

    copy = copier(chunk, size)
    step = all_threads // chunks  # rows that the threads copy at a time
    steps = -(-rows // max(step, 1))
    ragged = rows % max(step, 1) != 0

    @device
    def load_columns(on_chip: Any, address: int, stride: int, count: int) -> None:
        """A thread keeps its columns: what it computes of a place is the same for all its rows."""
        first = cuda.threadIdx.x // chunks
        x = cuda.threadIdx.x % chunks * chunk
        place, source = to + first * pitch + x, address + first * stride + x * size
        for n in range(steps):
            exists = first + n * step < count
            if not ragged or first + n * step < rows:
                copy(on_chip, place + n * step * pitch, source + n * step * stride if exists else address, exists)

    @device
    def load_tile(on_chip: Any, address: int, stride: int, count: int) -> None:
        for n in range(cuda.threadIdx.x, total, all_threads):
            r = n // chunks
            x = n % chunks * chunk
            exists = r < count
            copy(on_chip, to + r * pitch + x, address + r * stride + x * size if exists else address, exists)

    return load_tile if all_threads % chunks else load_columns


def load_rows(c: Any, rows: int, columns: int, pitch: int, to: int, row: Any) -> Any:
    """``load_rows(on_chip, call, at, start)``: tile[r] = the row at the address row(call, at, start + r), r < rows.

    ``row`` also says whether that exists; zeros where it does not. Columns past ``columns`` are left alone.
    """
    chunk, size, all_threads, asynchronous = c.CHUNK, c.ELEM_BYTES, c.THREADS, c.ASYNCHRONOUS
    chunks = columns // chunk
    total = rows * chunks
    load = LOAD[c.TYPE]
    copy: Any = copier(chunk, size) if asynchronous else None

    @device
    def load_rows(on_chip: Any, call: Any, at: Any, start: int) -> None:
        for n in range(cuda.threadIdx.x, total, all_threads):
            r = n // chunks
            x = n % chunks * chunk
            address, exists = row(call, at, start + r)
            place = to + r * pitch + x
            if asynchronous:
                copy(on_chip, place, address + x * size if exists else address, exists)
            else:
                for e in range(chunk):
                    put(on_chip, place + e, load(address + (x + e) * size) if exists else 0.0)

    return load_rows


def copies(c: Any) -> tuple[Any, Any]:
    """``commit_copies()`` and ``await_copies()``: nothing where no copy goes on by itself."""
    if c.ASYNCHRONOUS:
        return intrinsics.commit_copies, intrinsics.await_copies

    @device
    def at_once() -> None:
        pass

    return at_once, at_once


def clear_tiles(c: Any) -> Any:
    """``clear_tiles(on_chip)``: zeros in all on-chip memory of the block: what lies past the columns never is a NaN."""
    real, total, all_threads = c.real, c.TILE_BYTES // c.REAL_BYTES, c.THREADS

    @device
    def clear_tiles(on_chip: Any) -> None:
        for n in range(cuda.threadIdx.x, total, all_threads):
            put(on_chip, n, real(0))
        cuda.syncthreads()

    return clear_tiles


def fill(rows: int, columns: int) -> Any:
    """``fill(sum, x)``."""

    @device
    def fill(sum: Any, x: Any) -> None:
        for r in range(rows):
            for n in range(columns):
                sum[r, n] = x

    return fill


def vector_width(c: Any, columns: int) -> int:
    """Neighbouring numbers of a row that a thread moves at once, between registers and device memory."""
    width = Grouped(c, columns).WIDTH
    return width if c.ALIGNED and columns % width == 0 else 1


def reader(type_: str, width: int) -> Any:
    """``read(address, values, r, n)``: so many neighbours to values[r, n] and on."""
    load = LOADS[type_, width]
    if width == 4:

        @device
        def read(address: int, values: Any, r: int, n: int) -> None:
            values[r, n], values[r, n + 1], values[r, n + 2], values[r, n + 3] = load(address)
    elif width == 2:

        @device
        def read(address: int, values: Any, r: int, n: int) -> None:
            values[r, n], values[r, n + 1] = load(address)
    else:

        @device
        def read(address: int, values: Any, r: int, n: int) -> None:
            values[r, n] = load(address)

    return read


def writer(type_: str, width: int) -> Any:
    """``write(address, values, r, n, factor)``: factor * values[r, n], and so many neighbours."""
    store = STORES[type_, width]
    if width == 4:

        @device
        def write(address: int, v: Any, r: int, n: int, factor: Any) -> None:
            store(address, (v[r, n] * factor, v[r, n + 1] * factor, v[r, n + 2] * factor, v[r, n + 3] * factor))
    elif width == 2:

        @device
        def write(address: int, v: Any, r: int, n: int, factor: Any) -> None:
            store(address, (v[r, n] * factor, v[r, n + 1] * factor))
    else:

        @device
        def write(address: int, v: Any, r: int, n: int, factor: Any) -> None:
            store(address, v[r, n] * factor)

    return write


def store_row(c: Any, columns: int) -> Any:
    """``store_row(address, values, r, factor, empty)``: factor * values[r] for the columns that the thread owns.

    0 for a row that is empty, whatever its values are.
    """
    width = vector_width(c, columns)
    if (c.TYPE, width) not in STORES:
        width = 1
    count, at = Grouped(c, columns).COUNT, Grouped(c, columns).at
    size, real, write = c.ELEM_BYTES, c.real, writer(c.TYPE, width)
    thread_x, _ = threads(c)
    vectors = count // width

    @device
    def store_row(address: int, values: Any, r: int, factor: Any, empty: bool) -> None:
        for n in range(vectors):
            x = at(thread_x(), n * width)
            if x < columns:
                if empty:
                    for e in range(width):
                        values[r, n * width + e] = real(0)
                write(address + x * size, values, r, n * width, real(1) if empty else factor)

    return store_row


def read_sums(c: Any, columns: int) -> Any:
    """``read_sums(address, values, r)``: the thread's columns of a row of the workspace; 0 past its end."""
    width, count, at = vector_width(c, columns), Grouped(c, columns).COUNT, Grouped(c, columns).at
    size, real, read = c.REAL_BYTES, c.real, reader(c.REAL_TYPE, width)
    thread_x, _ = threads(c)
    vectors = count // width

    @device
    def read_sums(address: int, values: Any, r: int) -> None:
        for n in range(vectors):
            x = at(thread_x(), n * width)
            if x < columns:
                read(address + x * size, values, r, n * width)
            else:
                for e in range(width):
                    values[r, n * width + e] = real(0)

    return read_sums


def write_sums(c: Any, columns: int) -> Any:
    """``write_sums(address, values, r, factor)``: factor * values[r] for the same columns."""
    width, count, at = vector_width(c, columns), Grouped(c, columns).COUNT, Grouped(c, columns).at
    size, write = c.REAL_BYTES, writer(c.REAL_TYPE, width)
    thread_x, _ = threads(c)
    vectors = count // width

    @device
    def write_sums(address: int, values: Any, r: int, factor: Any) -> None:
        for n in range(vectors):
            x = at(thread_x(), n * width)
            if x < columns:
                write(address + x * size, values, r, n * width, factor)

    return write_sums


def sum_of_lanes(c: Any) -> Any:
    """``sum_of_lanes(x)`` over the SIDE neighbouring threads that share a row."""
    side = c.SIDE

    @device
    def sum_of_lanes(x: Any) -> Any:
        lane = side // 2
        while lane > 0:
            x += exchange(x, lane)
            lane //= 2
        return x

    return sum_of_lanes


def maximum_of_lanes(c: Any) -> Any:
    """``maximum_of_lanes(x)`` over the same threads."""
    side = c.SIDE

    @device
    def maximum_of_lanes(x: Any) -> Any:
        lane = side // 2
        while lane > 0:
            x = larger(x, exchange(x, lane))
            lane //= 2
        return x

    return maximum_of_lanes


def score_tile(c: Any, of: int) -> tuple[Any, Any]:
    """``put_tile(on_chip, values)`` and ``get_tile(on_chip, values)``: a tile of scores that begins at ``of``."""
    rows, columns, side, pitch = c.R, c.C, c.SIDE, c.PITCH_S
    thread_x, thread_y = threads(c)

    @device
    def put_tile(on_chip: Any, values: Any) -> None:
        mine = of + thread_y() * pitch + thread_x()
        for r in range(rows):
            for n in range(columns):
                put(on_chip, mine + r * side * pitch + n * side, values[r, n])

    @device
    def get_tile(on_chip: Any, values: Any) -> None:
        mine = of + thread_y() * pitch + thread_x()
        for r in range(rows):
            for n in range(columns):
                values[r, n] = get(on_chip, mine + r * side * pitch + n * side)

    return put_tile, get_tile
