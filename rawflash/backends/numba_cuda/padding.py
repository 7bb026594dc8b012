"""Packed sequences leave rows that none of them owns: those get 0 and -inf first, the pass writes the others."""

from __future__ import annotations

from typing import Any

from numba import cuda, int64

from rawflash.backends.numba_cuda.call import row_of
from rawflash.backends.numba_cuda.memory import device
from rawflash.backends.numba_cuda.numbers import INFINITE, STORE


def clear_matrix(c: Any, name: str, columns: int) -> Any:
    """``clear_matrix(call, heads, rows)``: zeros in every row of a matrix, by the whole grid."""
    row, store, size, all_threads, real = row_of(c, name), STORE[c.TYPE], c.ELEM_BYTES, c.THREADS, c.real

    @device
    def clear_matrix(call: Any, heads: int, rows: int) -> None:
        first = int64(cuda.blockIdx.x) * all_threads + cuda.threadIdx.x
        for n in range(first, heads * rows * columns, int64(cuda.gridDim.x) * all_threads):
            r = n // columns
            store(row(call, 0, r // rows, r % rows) + n % columns * size, real(0))

    return clear_matrix


def clear_results(c: Any) -> Any:
    clear, lse_of, store, all_threads = clear_matrix(c, "o", c.DV), row_of(c, "lse"), STORE[c.REAL_TYPE], c.THREADS
    real = c.real

    def clear_results(call: Any) -> None:
        clear(call, call.Hq, call.rows_q)
        first = int64(cuda.blockIdx.x) * all_threads + cuda.threadIdx.x
        if call.lse_data != 0:
            for n in range(first, call.Hq * call.rows_q, int64(cuda.gridDim.x) * all_threads):
                store(lse_of(call, 0, n // call.rows_q, n % call.rows_q), real(-INFINITE))

    return clear_results


def clear_gradients(c: Any) -> Any:
    clear_q, clear_k, clear_v = (clear_matrix(c, n, w) for n, w in (("dq", c.D), ("dk", c.D), ("dv", c.DV)))

    def clear_gradients(call: Any) -> None:
        clear_q(call, call.Hq, call.rows_q)
        clear_k(call, call.Hkv, call.rows_k)
        clear_v(call, call.Hkv, call.rows_k)

    return clear_gradients
