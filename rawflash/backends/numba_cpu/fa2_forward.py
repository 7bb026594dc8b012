"""FlashAttention-2, forward pass (Dao 2024, algorithm 1; Chu, Liu and Lin 2026, algorithm 3).

One piece of work is a block of Br query rows of one head; K/V blocks of Bc keys stream past it. Within a pair of blocks
the rows go by panels of NR queries, whose scores stay in the L1 cache from the first product to the second.

On chip, queries on the lanes: Q^T (d, Br) and O^T (dv, Br) in panels, K (Bc, d), V (Bc, dv), S^T = P^T (Bc, NR).
Read per step: K_j, V_j. Written once per block: O_i and lse_i.
"""

from __future__ import annotations

import numpy as np

from rawflash.backends.numba_cpu.few_rows import few_rows
from rawflash.backends.numba_cpu.launch import compiled, describe, for_each_variant, is_plain, run, view
from rawflash.backends.numba_cpu.microkernel import LONGEST_ROW_SUM, MR, claim, columns_of, gemm, gemm_scores
from rawflash.backends.numba_cpu.numerics import store_tile
from rawflash.backends.numba_cpu.panel import exponents, scale_panel, softmax_panel
from rawflash.backends.numba_cpu.tile import (
    NONE,
    UNIT,
    aligned,
    apply_dropout,
    finish_rows,
    finish_scores,
    hide_band,
    load_rows,
    padded,
    rows_of,
)
from rawflash.backends.numba_cpu.visibility import EMPTY, PARTIAL, band_class, key_range, program_class
from rawflash.problem import Operands, Problem
from rawflash.tiles import FEW, Tiles


def _make_kernel(stamp: str, dtype: str, plain: bool):
    @compiled(f"fa2_forward_{'plain' if plain else 'general'}_{dtype}")
    def kernel(counter, worker, call, out, lse):
        stamp  # noqa: B018  (part of the cache key, see launch.for_each_dtype)
        size = call.size
        one, nothing = lse.dtype.type(1), lse.dtype.type(-np.inf)
        br, bc, d, dv, group = size.br, size.bc, size.d, size.dv, size.Hq // size.Hkv
        width = columns_of(lse)
        panels = -(-br // width)
        q_panel, o_panel = d * width, padded(dv, MR) * width
        Q, O = aligned(panels * q_panel, one), aligned(panels * o_panel, one)
        K, V = aligned(padded(bc, MR) * d, one), aligned(padded(bc, MR) * dv + MR, one)
        S = aligned(padded(bc, MR) * width, one)
        m, l, alpha = aligned(panels * width, one), aligned(panels * width, one), aligned(panels * width, one)
        # Of long rows, what was summed until some keys ago: so the error grows with these, not with the row.
        long = size.Tk > LONGEST_ROW_SUM
        O_before, l_before = aligned(panels * o_panel if long else 0, one), aligned(panels * width, one)
        # A plain score is scaled when its exponent is taken; the maximum is then that of scores before.
        factor = call.real.scale if plain else 1.0
        base, lowest = exponents(factor, S)
        if not plain:
            seen = np.zeros((size.program_depth, width), np.uint8)
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
            for p in range(-(-n_i // width)):
                i = i0 + p * width
                rows = min(width, i0 + n_i - i)
                load_rows(Q[p * q_panel :], UNIT, width, call.q, call.q_starts[b], b, h, i, rows, d, one)
            O[:] = 0
            m[:] = nothing
            l[:] = 0
            O_before[:] = 0
            l_before[:] = 0
            j_low, j_high = key_range(call, b, i0, i0 + n_i)
            folded = j_low
            for j0 in range(j_low, j_high, bc):
                j1 = min(j0 + bc, j_high)
                if j1 - folded > LONGEST_ROW_SUM:
                    folded = j0
                    O_before += O
                    l_before += l
                    O[:] = 0
                    l[:] = 0
                # Load K_j, V_j
                load_rows(K, d, UNIT, call.k, call.k_starts[b], b, h // group, j0, j1 - j0, d, one)
                load_rows(V, dv, UNIT, call.v, call.k_starts[b], b, h // group, j0, j1 - j0, dv, one)
                for p in range(-(-n_i // width)):
                    i = i0 + p * width
                    rows = min(width, i0 + n_i - i)
                    # Only the keys that the band lets some of these rows see.
                    low_j, high_j = key_range(call, b, i, i + rows)
                    low_j, high_j = max(low_j, j0), min(high_j, j1)
                    n_j = high_j - low_j
                    if n_j <= 0:
                        continue
                    # S = Q K^T
                    gemm_scores(K, (low_j - j0) * d, d, Q, p * q_panel, S, NONE, n_j, d)
                    if plain:
                        hide_band(call, S, b, i, rows, low_j, high_j)
                    else:
                        band = band_class(call, i, i + rows, low_j, high_j, call.q_offset[b])
                        kind = band
                        if size.program_depth > 0:
                            offset = call.q_offset[b]
                            inside = program_class(call, classes, b, h, i, i + rows, low_j, high_j, offset)
                            kind = min(kind, inside)
                        if kind == EMPTY:
                            continue
                        by_band = band == PARTIAL
                        finish_scores(
                            call, S, width, kind, by_band, b, h, i, rows, low_j, n_j, True, seen, no_cap
                        )
                    # P = exp(S - m), l = alpha l + rowsum(P), O = alpha O
                    if softmax_panel(S, 0, n_j, m, l, alpha, p * width, base, lowest):
                        scale_panel(O, p * o_panel, dv, alpha, p * width)
                        if folded > j_low:
                            scale_panel(O_before, p * o_panel, dv, alpha, p * width)
                            for x in range(p * width, (p + 1) * width):
                                l_before[x] *= alpha[x]
                    if not plain:
                        if call.real.keep_scale != 1.0:
                            apply_dropout(call, S, width, b, h, i, rows, low_j, n_j, True)
                    # O = O + P V
                    gemm(V, (low_j - j0) * dv, UNIT, dv, S, NONE, O, p * o_panel, dv, n_j, True)
            if folded > j_low:
                O += O_before
                l += l_before
            # O_i / l, lse_i = m + log l
            has_sink = len(call.sinks) > 0
            start = call.q_starts[b] + i0
            row = lse[b if lse.shape[0] > 1 else 0, h, start : start + n_i]
            finish_rows(m, l, n_i, factor, call.sinks[h] if has_sink else 0.0, has_sink, row, alpha)
            for p in range(-(-n_i // width)):
                i = i0 + p * width
                rows = min(width, i0 + n_i - i)
                scale_panel(O, p * o_panel, dv, alpha, p * width)
                address = rows_of(out, call.q_starts[b], b, h, i)
                store_tile(address, out.code, out.row, O, p * o_panel, UNIT, width, rows, dv)

    return kernel


_kernels = for_each_variant(_make_kernel)


def fa2_forward(problem: Problem, tiles: Tiles, x: Operands, out: np.ndarray, lse: np.ndarray) -> None:
    """Write ``out`` and ``lse`` (canonical form) for the rows that exist."""
    if tiles.family == FEW:
        few_rows(problem, tiles, x, out, lse)
        return
    call, keep = describe(problem, tiles, x)
    blocks = -(-problem.Tq // tiles.br)
    kernel = _kernels[problem.compute_dtype, is_plain(problem, x)]
    run(kernel, blocks * problem.B * problem.Hq, call, view(out), lse)
    del keep
