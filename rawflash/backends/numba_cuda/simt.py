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


def turns(c: Any, depth: int) -> int:
    """Steps of a product that one round of its loop takes: the reads of one go on beside the sums of another."""
    return 2 if c.REAL_BYTES == 4 and depth % (2 * c.VECTOR) == 0 else 1


def product_nt(c: Any, depth: int, A: int, pitch_A: int, B: int, pitch_B: int) -> Any:
    """``product_nt(sum, on_chip)``: sum[r][c] += sum_k A[row r][k] B[row c][k]: rows and columns spread.

    A and B are where the tiles begin. The depth is a multiple of VECTOR: the tiles hold zeros past the data.
    """
    R, C, V, side, real = c.R, c.C, c.VECTOR, c.SIDE, c.real
    read, twice = vector(V), turns(c, depth) == 2
    thread_x, thread_y = threads(c)
    shape_a, shape_b, step = (R, V), (C, V), V * turns(c, depth)

    @device
    def turn(sum: Any, on_chip: Any, rows: int, columns: int) -> None:
        a = cuda.local.array(shape_a, real)
        b = cuda.local.array(shape_b, real)
        for r in range(R):
            read(a, r, 0, on_chip, rows + r * side * pitch_A)
        for n in range(C):
            read(b, n, 0, on_chip, columns + n * side * pitch_B)
        for v in range(V):
            for r in range(R):
                for n in range(C):
                    sum[r, n] += a[r, v] * b[n, v]

    @device
    def product_nt(sum: Any, on_chip: Any) -> None:
        rows = A + thread_y() * pitch_A
        columns = B + thread_x() * pitch_B
        for k in range(0, depth, step):
            turn(sum, on_chip, rows + k, columns + k)
            if twice:
                turn(sum, on_chip, rows + k + V, columns + k + V)

    return product_nt


def product_nn(c: Any, depth: int, width: int, A: int, pitch_A: int, B: int, pitch_B: int) -> Any:
    """``product_nn(sum, on_chip)``: sum[r][c] += sum_k A[row r][k] B[k][column c]: rows spread, columns grouped."""
    R, V, side, real = c.R, c.VECTOR, c.SIDE, c.real
    grouped = Grouped(c, width)
    C, W = grouped.COUNT, grouped.WIDTH
    read, read_b, twice = vector(V), vector(W), turns(c, depth) == 2
    thread_x, thread_y = threads(c)
    shape_a, shape_b, vectors, step = (R, V), (1, C), C // W, V * turns(c, depth)

    @device
    def turn(sum: Any, on_chip: Any, rows: int, columns: int) -> None:
        a = cuda.local.array(shape_a, real)
        b = cuda.local.array(shape_b, real)
        for r in range(R):
            read(a, r, 0, on_chip, rows + r * side * pitch_A)
        for v in range(V):
            for n in range(vectors):
                read_b(b, 0, n * W, on_chip, columns + v * pitch_B + n * side * W)
            for r in range(R):
                for n in range(C):
                    sum[r, n] += a[r, v] * b[0, n]

    @device
    def product_nn(sum: Any, on_chip: Any) -> None:
        rows = A + thread_y() * pitch_A
        columns = B + thread_x() * W
        for k in range(0, depth, step):
            turn(sum, on_chip, rows + k, columns + k * pitch_B)
            if twice:
                turn(sum, on_chip, rows + k + V, columns + (k + V) * pitch_B)

    return product_nn


def product_tn(c: Any, depth: int, height: int, width: int, A: int, pitch_A: int, B: int, pitch_B: int) -> Any:
    """``product_tn(sum, on_chip)``: sum[r][c] += sum_k A[k][column r] B[k][column c]: both grouped."""
    tall, wide = Grouped(c, height), Grouped(c, width)
    R, H, C, W, side, real = tall.COUNT, tall.WIDTH, wide.COUNT, wide.WIDTH, c.SIDE, c.real
    read_a, read_b = vector(H), vector(W)
    thread_x, thread_y = threads(c)
    shape_a, shape_b, vectors_a, vectors_b = (1, R), (1, C), R // H, C // W
    twice, step = turns(c, depth) == 2, turns(c, depth)

    @device
    def turn(sum: Any, on_chip: Any, rows: int, columns: int) -> None:
        a = cuda.local.array(shape_a, real)
        b = cuda.local.array(shape_b, real)
        for r in range(vectors_a):
            read_a(a, 0, r * H, on_chip, rows + r * side * H)
        for n in range(vectors_b):
            read_b(b, 0, n * W, on_chip, columns + n * side * W)
        for r in range(R):
            for n in range(C):
                sum[r, n] += a[0, r] * b[0, n]

    @device
    def product_tn(sum: Any, on_chip: Any) -> None:
        rows = A + thread_y() * H
        columns = B + thread_x() * W
        for k in range(0, depth, step):
            turn(sum, on_chip, rows + k * pitch_A, columns + k * pitch_B)
            if twice:
                turn(sum, on_chip, rows + (k + 1) * pitch_A, columns + (k + 1) * pitch_B)

    return product_tn
