"""FlashAttention-2, forward pass (Dao 2024, algorithm 1; Chu, Liu and Lin 2026, algorithm 3).

One piece of work is a block of Br query rows of one head; K/V blocks of Bc keys stream past it.

On chip, queries on the lanes: Q^T (d, Br), O^T (dv, Br), K or V (Bc, max(d, dv)), S^T = P^T (Bc, Br).
Read per step: K_j, V_j. Written once per block: O_i and lse_i.
"""

from __future__ import annotations

import numpy as np

from rawflash.backends.numba_cpu.few_rows import few_rows
from rawflash.backends.numba_cpu.launch import compiled, describe, for_each_dtype, run, view
from rawflash.backends.numba_cpu.microkernel import MR, claim, gemm, longest_score_sum
from rawflash.backends.numba_cpu.numerics import store_tile
from rawflash.backends.numba_cpu.tile import (
    apply_dropout,
    finish_rows,
    finish_scores,
    lanes_in_band,
    lanes_of,
    load_rows,
    padded,
    rows_of,
    scale_lanes,
    softmax_step,
)
from rawflash.backends.numba_cpu.visibility import EMPTY, PARTIAL, band_class, key_range, program_class
from rawflash.problem import Operands, Problem
from rawflash.tiling import FEW, Tiles


def _make_kernel(stamp: str, dtype: str):
    @compiled(f"fa2_forward_{dtype}")
    def kernel(counter, worker, call, out, lse):
        stamp  # noqa: B018  (part of the cache key, see launch.for_each_dtype)
        size = call.size
        real = lse.dtype.type
        one, zero = real(1), real(0)
        br, bc, d, dv, group = size.br, size.bc, size.d, size.dv, size.Hq // size.Hkv
        ld = lanes_of(br, lse.itemsize)
        Q = np.zeros(padded(d, MR) * ld, lse.dtype)
        O = np.zeros(padded(dv, MR) * ld, lse.dtype)
        KV = np.zeros(padded(bc, MR) * (max(d, dv) + MR), lse.dtype)
        S = np.zeros(padded(bc, MR) * ld, lse.dtype)
        m, l = np.zeros(ld, lse.dtype), np.zeros(ld, lse.dtype)
        alpha, shift = np.zeros(ld, lse.dtype), np.zeros(ld, lse.dtype)
        seen = np.zeros((size.program_depth, br), np.uint8)
        classes = np.zeros(size.program_depth, np.int64)
        no_cap = np.zeros(0, lse.dtype)
        blocks = -(-size.Tq // br)

        while True:
            piece = claim(counter, 0)
            if piece >= blocks * size.B * size.Hq:
                break
            # The last block of a causal head has most keys: start with it, so that threads end together.
            block, head = blocks - 1 - piece // (size.B * size.Hq), piece % (size.B * size.Hq)
            b, h = head // size.Hq, head % size.Hq
            i0 = block * br
            n_i = min(br, call.q_lengths[b] - i0)
            if n_i <= 0:
                continue
            # Load Q_i; O_i = 0, l = 0, m = -inf
            load_rows(Q, 1, ld, call.q, call.q_starts[b], b, h, i0, n_i, d, one)
            O[:] = zero
            m[:] = -np.inf
            l[:] = zero
            j_low, j_high = key_range(call, b, i0, i0 + n_i)
            for j0 in range(j_low, j_high, bc):
                n_j = min(bc, j_high - j0)
                # Only the lanes that the band lets see this block take part.
                first, stop = lanes_in_band(call, b, i0, n_i, j0, n_j, lse.itemsize)
                n, i = stop - first, i0 + first
                if n <= 0:
                    continue
                band = band_class(call, i, i + n, j0, j0 + n_j, call.q_offset[b])
                kind = band
                if size.program_depth > 0:
                    kind = min(kind, program_class(call, classes, b, h, i, i + n, j0, j0 + n_j, call.q_offset[b]))
                if kind == EMPTY:
                    continue
                # S = Q K^T
                load_rows(KV, d, 1, call.k, call.k_starts[b], b, h // group, j0, n_j, d, one)
                gemm(KV, 0, d, 1, Q, first, ld, S, first, ld, n_j, n, d, False, longest_score_sum(S))
                finish_scores(
                    call, S[first:], ld, kind, band == PARTIAL, b, h, i, n, j0, n_j, True, seen, no_cap
                )
                # P = exp(S - m), l = alpha l + rowsum(P)
                if softmax_step(S[first:], ld, n, n_j, m[first:], l[first:], alpha, shift):
                    scale_lanes(O[first:], ld, dv, n, alpha)
                if call.real.keep_scale != 1.0:
                    apply_dropout(call, S[first:], ld, b, h, i, n, j0, n_j, True)
                # O = alpha O + P V
                load_rows(KV, dv, 1, call.v, call.k_starts[b], b, h // group, j0, n_j, dv, one)
                gemm(KV, 0, 1, dv, S, first, ld, O, first, ld, dv, n, n_j, True)
            # O_i / l, lse_i = m + log l
            has_sink = len(call.sinks) > 0
            start = call.q_starts[b] + i0
            row = lse[b if lse.shape[0] > 1 else 0, h, start : start + n_i]
            finish_rows(m, l, n_i, call.sinks[h] if has_sink else 0.0, has_sink, row, alpha)
            scale_lanes(O, ld, dv, n_i, alpha)
            address = rows_of(out, call.q_starts[b], b, h, i0)
            store_tile(address, out.code, out.row, O, 0, 1, ld, n_i, dv)

    return kernel


_kernels = for_each_dtype(_make_kernel)


def fa2_forward(problem: Problem, tiles: Tiles, x: Operands, out: np.ndarray, lse: np.ndarray) -> None:
    """Write ``out`` and ``lse`` (canonical form) for the rows that exist."""
    if tiles.family == FEW:
        few_rows(problem, tiles, x, out, lse)
        return
    call, keep = describe(problem, tiles, x)
    blocks = -(-problem.Tq // tiles.br)
    run(_kernels[problem.compute_dtype], blocks * problem.B * problem.Hq, call, view(out), lse)
    del keep
