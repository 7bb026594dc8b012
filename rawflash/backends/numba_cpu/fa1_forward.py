"""FlashAttention-1, forward pass (Dao et al. 2022, algorithm 1; Chu, Liu and Lin 2026, algorithm 4).

One piece of work is one head: K/V blocks of Bc keys outside, blocks of Br query rows inside. O, m and l
live in main memory and are read and written at every step, O normalised each time.

On chip, queries on the lanes: Q^T (d, Br), O^T (dv, Br), K and V (Bc, d + dv), S^T = P^T (Bc, Br).
Read per step: Q_i, O_i, m_i, l_i; written per step: O_i, m_i, l_i. K_j and V_j are read once.
"""

from __future__ import annotations

import numpy as np

from rawflash.backends.numba_cpu.launch import compiled, describe, for_each_dtype, run, view
from rawflash.backends.numba_cpu.microkernel import MR, claim, gemm, longest_score_sum
from rawflash.backends.numba_cpu.numerics import store_tile
from rawflash.backends.numba_cpu.tile import (
    apply_dropout,
    finish_rows,
    finish_scores,
    lanes_of,
    load_rows,
    padded,
    rows_of,
    scale_lanes,
    softmax_step,
)
from rawflash.backends.numba_cpu.visibility import EMPTY, PARTIAL, band_class, program_class, query_range
from rawflash.problem import Operands, Problem
from rawflash.tiling import Tiles


def _make_kernel(stamp: str, dtype: str):
    @compiled(f"fa1_forward_{dtype}")
    def kernel(counter, worker, call, out, lse):
        stamp  # noqa: B018  (part of the cache key, see launch.for_each_dtype)
        size = call.size
        real = lse.dtype.type
        one, zero = real(1), real(0)
        br, bc, d, dv, group = size.br, size.bc, size.d, size.dv, size.Hq // size.Hkv
        ld = lanes_of(br, lse.itemsize)
        Q = np.zeros(padded(d, MR) * ld, lse.dtype)
        K = np.zeros(padded(bc, MR) * (d + MR), lse.dtype)
        V = np.zeros(padded(bc, MR) * (dv + MR), lse.dtype)
        S = np.zeros(padded(bc, MR) * ld, lse.dtype)
        alpha, shift = np.zeros(ld, lse.dtype), np.zeros(ld, lse.dtype)
        before, inverse = np.zeros(ld, lse.dtype), np.zeros(ld, lse.dtype)
        seen = np.zeros((size.program_depth, br), np.uint8)
        classes = np.zeros(size.program_depth, np.int64)
        no_cap = np.zeros(0, lse.dtype)
        # Main memory of one head: O^T, m and l, block by block.
        blocks = -(-size.Tq // br)
        O = np.zeros((blocks, padded(dv, MR) * ld), lse.dtype)
        m, l = np.zeros((blocks, ld), lse.dtype), np.zeros((blocks, ld), lse.dtype)

        while True:
            head = claim(counter, 0)
            if head >= size.B * size.Hq:
                break
            b, h = head // size.Hq, head % size.Hq
            # O = 0, l = 0, m = -inf
            O[:] = zero
            m[:] = -np.inf
            l[:] = zero
            for j0 in range(0, call.kv_lengths[b], bc):
                n_j = min(bc, call.kv_lengths[b] - j0)
                # Load K_j, V_j
                load_rows(K, d, 1, call.k, call.k_starts[b], b, h // group, j0, n_j, d, one)
                load_rows(V, dv, 1, call.v, call.k_starts[b], b, h // group, j0, n_j, dv, one)
                i_low, i_high = query_range(call, b, j0, j0 + n_j)
                for block in range(i_low // br, -(-i_high // br)):
                    i0 = block * br
                    n_i = min(br, call.q_lengths[b] - i0)
                    band = band_class(call, i0, i0 + n_i, j0, j0 + n_j, call.q_offset[b])
                    kind = band
                    if size.program_depth > 0:
                        inside = program_class(call, classes, b, h, i0, i0 + n_i, j0, j0 + n_j, call.q_offset[b])
                        kind = min(kind, inside)
                    if kind == EMPTY:
                        continue
                    # Load Q_i; S = Q K^T
                    load_rows(Q, 1, ld, call.q, call.q_starts[b], b, h, i0, n_i, d, one)
                    gemm(K, 0, d, 1, Q, 0, ld, S, 0, ld, n_j, n_i, d, False, longest_score_sum(S))
                    finish_scores(call, S, ld, kind, band == PARTIAL, b, h, i0, n_i, j0, n_j, True, seen, no_cap)
                    # P = exp(S - m), l_new = alpha l + rowsum(P)
                    before[:n_i] = l[block, :n_i]
                    softmax_step(S, ld, n_i, n_j, m[block], l[block], alpha, shift)
                    if call.real.keep_scale != 1.0:
                        apply_dropout(call, S, ld, b, h, i0, n_i, j0, n_j, True)
                    # O = (l alpha O + P V) / l_new
                    for r in range(n_i):
                        inverse[r] = one / l[block, r] if l[block, r] != zero else zero
                        alpha[r] *= before[r] * inverse[r]
                    scale_lanes(O[block], ld, dv, n_i, alpha)
                    scale_lanes(S, ld, n_j, n_i, inverse)
                    gemm(V, 0, 1, dv, S, 0, ld, O[block], 0, ld, dv, n_i, n_j, True)
            for block in range(-(-call.q_lengths[b] // br)):
                i0 = block * br
                n_i = min(br, call.q_lengths[b] - i0)
                # lse = m + log l; O is normalised but for the sink
                start = call.q_starts[b] + i0
                row = lse[b if lse.shape[0] > 1 else 0, h, start : start + n_i]
                has_sink = len(call.sinks) > 0
                finish_rows(m[block], l[block], n_i, call.sinks[h] if has_sink else 0.0, has_sink, row, alpha)
                for r in range(n_i):
                    alpha[r] *= l[block, r]
                scale_lanes(O[block], ld, dv, n_i, alpha)
                address = rows_of(out, call.q_starts[b], b, h, i0)
                store_tile(address, out.code, out.row, O[block], 0, 1, ld, n_i, dv)

    return kernel


_kernels = for_each_dtype(_make_kernel)


def fa1_forward(problem: Problem, tiles: Tiles, x: Operands, out: np.ndarray, lse: np.ndarray) -> None:
    """Write ``out`` and ``lse`` (canonical form) for the rows that exist."""
    call, keep = describe(problem, tiles, x)
    run(_kernels[problem.compute_dtype], problem.B * problem.Hq, call, view(out), lse)
    del keep
