"""Packed sequences leave rows that none of them owns, before the first and behind the last: those get 0 and -inf. The
pass writes the others."""

from __future__ import annotations

from typing import Any

from numba import cuda, int64

from rawflash.backends.numba_cuda.call import clamp, entry, row_of
from rawflash.backends.numba_cuda.memory import device
from rawflash.backends.numba_cuda.numbers import INFINITE, STORE

WARP = 32


@device
def padding_of(call: Any, data: int, bytes_: int, rows: int) -> Any:
    """Of a head's rows: how many are before the first sequence, in sequences, and in none."""
    if call.B == 0:
        return 0, 0, rows
    first = clamp(entry(data, bytes_, 0, 0), 0, rows)
    sequences = clamp(entry(data, bytes_, call.B, 0), first, rows) - first
    return first, sequences, rows - sequences


def clear_padding(c: Any, names: dict[str, int], lse: bool = False) -> Any:
    """``clear_padding(call, heads, first, sequences, count)``: zeros in matrices that have so many columns, and -inf in
    lse, where `padding_of` says so; a row by each warp of the grid."""
    rows_of = [(row_of(c, name), columns) for name, columns in names.items()]
    (row_a, columns_a), (row_b, columns_b) = rows_of[0], rows_of[-1]
    two, store, size, real, all_threads = len(names) > 1, STORE[c.TYPE], c.ELEM_BYTES, c.real, c.THREADS
    lse_of, store_real, lanes = row_of(c, "lse"), STORE[c.REAL_TYPE], min(WARP, c.THREADS)

    @device
    def clear_padding(call: Any, heads: int, first: int, sequences: int, count: int) -> None:
        begin = (int64(cuda.blockIdx.x) * all_threads + cuda.threadIdx.x) // lanes
        for n in range(begin, heads * count, int64(cuda.gridDim.x) * (all_threads // lanes)):
            h, t = n // count, n % count
            if t >= first:
                t += sequences
            for x in range(cuda.threadIdx.x % lanes, columns_a, lanes):
                store(row_a(call, 0, h, t) + x * size, real(0))
            if two:
                for x in range(cuda.threadIdx.x % lanes, columns_b, lanes):
                    store(row_b(call, 0, h, t) + x * size, real(0))
            if lse and call.lse_data != 0 and cuda.threadIdx.x % lanes == 0:
                store_real(lse_of(call, 0, h, t), real(-INFINITE))

    return clear_padding


def clear_results(c: Any) -> Any:
    clear = clear_padding(c, {"o": c.DV}, lse=True)

    def clear_results(call: Any) -> None:
        first, sequences, count = padding_of(call, call.cu_seqlens_q_data, call.cu_seqlens_q_bytes, call.rows_q)
        clear(call, call.Hq, first, sequences, count)

    return clear_results


def clear_gradients(c: Any) -> Any:
    clear_q, clear_kv = clear_padding(c, {"dq": c.D}), clear_padding(c, {"dk": c.D, "dv": c.DV})

    def clear_gradients(call: Any) -> None:
        first, sequences, count = padding_of(call, call.cu_seqlens_q_data, call.cu_seqlens_q_bytes, call.rows_q)
        clear_q(call, call.Hq, first, sequences, count)
        first, sequences, count = padding_of(call, call.cu_seqlens_k_data, call.cu_seqlens_k_bytes, call.rows_k)
        clear_kv(call, call.Hkv, first, sequences, count)

    return clear_gradients
