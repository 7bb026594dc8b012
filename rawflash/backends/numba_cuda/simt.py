"""The three matrix products on tiles by multiply-adds, and who owns which number of their results (simt.cuh).

In a tile of scores, thread (y, x) owns rows y + SIDE r and columns x + SIDE c. The vectors of neighbouring rows are
in different banks.
"""

from __future__ import annotations

from typing import Any

from numba import cuda

from rawflash.backends.numba_cuda.intrinsics import get, vector2, vector4
from rawflash.backends.numba_cuda.memory import device
from rawflash.backends.numba_cuda.tile import Grouped, threads


def vector(width: int) -> Any:
    """``read(into, r, first, on_chip, i)``: so many neighbours, by one load, to into[r, first] and on."""

    @device
    def read1(into: Any, r: int, first: int, on_chip: Any, i: int) -> None:
        into[r, first] = get(on_chip, i)

    @device
    def read2(into: Any, r: int, first: int, on_chip: Any, i: int) -> None:
        into[r, first], into[r, first + 1] = vector2(on_chip, i)

    @device
    def read4(into: Any, r: int, first: int, on_chip: Any, i: int) -> None:
        into[r, first], into[r, first + 1], into[r, first + 2], into[r, first + 3] = vector4(on_chip, i)

    return {1: read1, 2: read2, 4: read4}[width]


def product_nt(c: Any, depth: int, A: int, pitch_A: int, B: int, pitch_B: int) -> Any:
    """``product_nt(sum, on_chip)``: sum[r][c] += sum_k A[row r][k] B[row c][k]: rows and columns spread.

    A and B are where the tiles begin. The depth is a multiple of VECTOR: the tiles hold zeros past the data.
    """
    R, C, V, side, real = c.R, c.C, c.VECTOR, c.SIDE, c.real
    read = vector(V)
    thread_x, thread_y = threads(c)
    shape_a, shape_b = (R, V), (C, V)

    @device
    def product_nt(sum: Any, on_chip: Any) -> None:
        rows = A + thread_y() * pitch_A
        columns = B + thread_x() * pitch_B
        a = cuda.local.array(shape_a, real)
        b = cuda.local.array(shape_b, real)
        for k in range(0, depth, V):
            for r in range(R):
                read(a, r, 0, on_chip, rows + r * side * pitch_A + k)
            for n in range(C):
                read(b, n, 0, on_chip, columns + n * side * pitch_B + k)
            for v in range(V):
                for r in range(R):
                    for n in range(C):
                        sum[r, n] += a[r, v] * b[n, v]

    return product_nt


def product_nn(c: Any, depth: int, width: int, A: int, pitch_A: int, B: int, pitch_B: int) -> Any:
    """``product_nn(sum, on_chip)``: sum[r][c] += sum_k A[row r][k] B[k][column c]: rows spread, columns grouped."""
    R, V, side, real = c.R, c.VECTOR, c.SIDE, c.real
    grouped = Grouped(c, width)
    C, W = grouped.COUNT, grouped.WIDTH
    read, read_b = vector(V), vector(W)
    thread_x, thread_y = threads(c)
    shape_a, shape_b, vectors = (R, V), (1, C), C // W

    @device
    def product_nn(sum: Any, on_chip: Any) -> None:
        rows = A + thread_y() * pitch_A
        columns = B + thread_x() * W
        a = cuda.local.array(shape_a, real)
        b = cuda.local.array(shape_b, real)
        for k in range(0, depth, V):
            for r in range(R):
                read(a, r, 0, on_chip, rows + r * side * pitch_A + k)
            for v in range(V):
                for n in range(vectors):
                    read_b(b, 0, n * W, on_chip, columns + (k + v) * pitch_B + n * side * W)
                for r in range(R):
                    for n in range(C):
                        sum[r, n] += a[r, v] * b[0, n]

    return product_nn


def product_tn(c: Any, depth: int, height: int, width: int, A: int, pitch_A: int, B: int, pitch_B: int) -> Any:
    """``product_tn(sum, on_chip)``: sum[r][c] += sum_k A[k][column r] B[k][column c]: both grouped."""
    tall, wide = Grouped(c, height), Grouped(c, width)
    R, H, C, W, side, real = tall.COUNT, tall.WIDTH, wide.COUNT, wide.WIDTH, c.SIDE, c.real
    read_a, read_b = vector(H), vector(W)
    thread_x, thread_y = threads(c)
    shape_a, shape_b, vectors_a, vectors_b = (1, R), (1, C), R // H, C // W

    @device
    def product_tn(sum: Any, on_chip: Any) -> None:
        rows = A + thread_y() * H
        columns = B + thread_x() * W
        a = cuda.local.array(shape_a, real)
        b = cuda.local.array(shape_b, real)
        for k in range(depth):
            for r in range(vectors_a):
                read_a(a, 0, r * H, on_chip, rows + k * pitch_A + r * side * H)
            for n in range(vectors_b):
                read_b(b, 0, n * W, on_chip, columns + k * pitch_B + n * side * W)
            for r in range(R):
                for n in range(C):
                    sum[r, n] += a[0, r] * b[0, n]

    return product_tn
