"""FlashAttention-1, forward pass (Dao et al. 2022, algorithm 1; Chu, Liu and Lin 2026, algorithm 4).

One piece of work is one head: K/V blocks of Bc keys outside, blocks of Br query rows inside. O, m and l
live in main memory and are read and written at every step, O normalised each time.

On chip, queries on the lanes: Q^T (d, Br), O^T (dv, Br), K and V (Bc, d + dv), S^T = P^T (Bc, Br), all but K and V in
panels of NR queries, of which one at a time is worked on.
Read per step: Q_i, O_i, m_i, l_i; written per step: O_i, m_i, l_i. K_j and V_j are read once.
"""

from __future__ import annotations

import numpy as np

from rawflash.backends.numba_cpu.launch import compiled, describe, for_each_dtype, run, view
from rawflash.backends.numba_cpu.microkernel import MR, claim, columns_of, gemm, gemm_scores
from rawflash.backends.numba_cpu.numerics import store_tile
from rawflash.backends.numba_cpu.panel import exponents, scale_and_add_panel, scale_panel, softmax_panel
from rawflash.backends.numba_cpu.tile import (
    NONE,
    UNIT,
    aligned,
    apply_dropout,
    finish_rows,
    finish_scores,
    load_rows,
    padded,
    rows_of,
)
from rawflash.backends.numba_cpu.visibility import EMPTY, PARTIAL, band_class, program_class, query_range
from rawflash.problem import Operands, Problem
from rawflash.tiles import Tiles


def _make_kernel(stamp: str, dtype: str):
    @compiled(f"fa1_forward_{dtype}")
    def kernel(counter, worker, call, out, lse):
        stamp  # noqa: B018  (part of the cache key, see launch.for_each_dtype)
        size = call.size
        one, nothing = lse.dtype.type(1), lse.dtype.type(-np.inf)
        bc, d, dv, group = size.bc, size.d, size.dv, size.Hq // size.Hkv
        width = columns_of(lse)
        Q, S = aligned(d * width, one), aligned(padded(bc, MR) * width, one)
        K, V = aligned(padded(bc, MR) * d, one), aligned(padded(bc, MR) * dv + MR, one)
        alpha, inverse, P_sum = aligned(width, one), aligned(width, one), aligned(width, one)
        base, lowest = exponents(1.0, S)
        seen = np.zeros((size.program_depth, width), np.uint8)
        classes = np.zeros(size.program_depth, np.int64)
        no_cap = np.zeros(0, lse.dtype)
        # Main memory of one head: O^T, m and l, panel by panel. Blocks of Br rows are whole panels. Every step divides
        # by l, which is float64: rounded each time, it would be the largest error of long rows.
        panels = -(-size.Tq // width)
        o_panel = padded(dv, MR) * width
        PV = aligned(o_panel, one)
        O, m, l = aligned(panels * o_panel, one), aligned(panels * width, one), np.zeros(panels * width)

        while True:
            head = claim(counter, 0)
            if head >= size.B * size.Hq:
                break
            b, h = head // size.Hq, head % size.Hq
            # O = 0, l = 0, m = -inf
            O[:] = 0
            m[:] = nothing
            l[:] = 0
            for j0 in range(0, call.kv_lengths[b], bc):
                n_j = min(bc, call.kv_lengths[b] - j0)
                # Load K_j, V_j
                load_rows(K, d, UNIT, call.k, call.k_starts[b], b, h // group, j0, n_j, d, one)
                load_rows(V, dv, UNIT, call.v, call.k_starts[b], b, h // group, j0, n_j, dv, one)
                i_low, i_high = query_range(call, b, j0, j0 + n_j)
                for p in range(i_low // width, -(-i_high // width)):
                    i = p * width
                    rows = min(width, call.q_lengths[b] - i)
                    band = band_class(call, i, i + rows, j0, j0 + n_j, call.q_offset[b])
                    kind = band
                    if size.program_depth > 0:
                        inside = program_class(call, classes, b, h, i, i + rows, j0, j0 + n_j, call.q_offset[b])
                        kind = min(kind, inside)
                    if kind == EMPTY:
                        continue
                    # Load Q_i; S = Q K^T
                    load_rows(Q, UNIT, width, call.q, call.q_starts[b], b, h, i, rows, d, one)
                    gemm_scores(K, NONE, d, Q, NONE, S, NONE, n_j, d)
                    finish_scores(call, S, width, kind, band == PARTIAL, b, h, i, rows, j0, n_j, True, seen, no_cap)
                    # P = exp(S - m)
                    P_sum[:] = 0
                    softmax_panel(S, 0, n_j, m[i:], P_sum, alpha, 0, base, lowest)
                    if call.real.keep_scale != 1.0:
                        apply_dropout(call, S, width, b, h, i, rows, j0, n_j, True)
                    # l_new = alpha l + rowsum(P), O = (alpha l O + P V) / l_new
                    for r in range(width):
                        before = float(alpha[r]) * l[i + r]
                        l[i + r] = before + float(P_sum[r])
                        over_l = 1.0 / l[i + r] if l[i + r] != 0 else 0.0
                        inverse[r], alpha[r] = over_l, before * over_l
                    scale_panel(S, 0, n_j, inverse, 0)
                    gemm(V, NONE, UNIT, dv, S, NONE, PV, NONE, dv, n_j, False)
                    scale_and_add_panel(O, p * o_panel, dv, alpha, 0, PV)
            for p in range(-(-call.q_lengths[b] // width)):
                i = p * width
                rows = min(width, call.q_lengths[b] - i)
                # lse = m + log l; O is normalised but for the sink
                start = call.q_starts[b] + i
                row = lse[b if lse.shape[0] > 1 else 0, h, start : start + rows]
                has_sink = len(call.sinks) > 0
                finish_rows(m[i:], l[i:], rows, 1.0, call.sinks[h] if has_sink else 0.0, has_sink, row, alpha)
                for r in range(rows):
                    alpha[r] *= l[i + r]
                scale_panel(O, p * o_panel, dv, alpha, 0)
                address = rows_of(out, call.q_starts[b], b, h, i)
                store_tile(address, out.code, out.row, O, p * o_panel, UNIT, width, rows, dv)

    return kernel


_kernels = for_each_dtype(_make_kernel)


def fa1_forward(problem: Problem, tiles: Tiles, x: Operands, out: np.ndarray, lse: np.ndarray) -> None:
    """Write ``out`` and ``lse`` (canonical form) for the rows that exist."""
    call, keep = describe(problem, tiles, x)
    run(_kernels[problem.compute_dtype], problem.B * problem.Hq, call, view(out), lse)
    del keep
