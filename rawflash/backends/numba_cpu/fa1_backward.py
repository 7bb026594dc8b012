"""FlashAttention-1, backward pass (Dao et al. 2022, algorithm 4; Chu, Liu and Lin 2026, algorithm 7).

One piece of work is one key/value head: K/V blocks of Bc keys outside, blocks of Br query rows inside.
rowsum(dO * O) is computed anew at every step, so O is read each time; dQ lives in main memory and is
read and written at every step. The row statistic is the pair m := lse, l := 1, for which
P = exp(S - m) / l is the same.

On chip, keys on the lanes: Q, dO, O (Br rows), K, V, dK, dV (Bc rows), P and dP (Br, NR), dS (Br, Bc).
Read per step: Q_i, O_i, dO_i, dQ_i, m_i; written per step: dQ_i. Written once per block: dK_j, dV_j.
"""

from __future__ import annotations

import numpy as np

from rawflash.backends.numba_cpu.gradient import (
    SPARE,
    backward_step_general,
    gamma_rows,
    load_keys,
    load_queries,
    make_work,
    set_aside,
    set_keys_aside,
    store_keys,
    store_panels,
)
from rawflash.backends.numba_cpu.launch import (
    bias_gradient_target,
    compiled,
    contiguous_statistic,
    describe,
    for_each_dtype,
    run,
    sink_gradient,
    view,
)
from rawflash.backends.numba_cpu.microkernel import LONGEST_ROW_SUM, LONGEST_STORED_SUM, claim, columns_of
from rawflash.backends.numba_cpu.tile import aligned, rows_of
from rawflash.backends.numba_cpu.visibility import EMPTY, PARTIAL, band_class, program_class, query_range
from rawflash.problem import Operands, Problem
from rawflash.tiles import Tiles


def _make_kernel(stamp: str, dtype: str):
    @compiled(f"fa1_backward_{dtype}")
    def kernel(counter, worker, call, heads_per_piece, dout, o, lse, dlse, dq, dk, dv, dbias, dbias_strides):
        stamp  # noqa: B018  (part of the cache key, see launch.for_each_dtype)
        size = call.size
        one = lse.dtype.type(1)
        br, bc, group, columns = size.br, size.bc, size.Hq // size.Hkv, columns_of(lse)
        w = make_work(call, one)
        lses, dlses = lse.reshape(-1), dlse.reshape(-1)
        m, gamma = np.zeros(br, lse.dtype), np.zeros(br, lse.dtype)
        # Main memory of the query heads of a group: dQ, in panels
        dq_rows = size.Tq + SPARE
        whole = group * dq_rows * w.ldd
        # Of many keys, what was summed until some keys ago follows
        dQ = aligned(whole * (2 if size.Tk > LONGEST_STORED_SUM else 1), one)
        classes = np.zeros(size.program_depth, np.int64)
        while True:
            piece = claim(counter, 0)
            if piece >= size.B * size.Hkv // heads_per_piece:
                break
            for head in range(piece * heads_per_piece, (piece + 1) * heads_per_piece):
                b, hkv = head // size.Hkv, head % size.Hkv
                offset = call.q_offset[b]
                dQ[:] = 0
                keys = 0  # that are in dQ
                for j0 in range(0, call.kv_lengths[b], bc):
                    n_j = min(bc, call.kv_lengths[b] - j0)
                    if keys + n_j > LONGEST_STORED_SUM:
                        set_aside(dQ, 0, whole, whole)
                        keys = 0
                    keys += n_j
                    # Load K_j, V_j; dK_j = dV_j = 0
                    load_keys(call, w, b, hkv, j0, n_j)
                    rows = 0  # that are in dK and dV
                    i_low, i_high = query_range(call, b, j0, j0 + n_j)
                    for h in range(hkv * group, (hkv + 1) * group):
                        statistics = ((b if lse.shape[0] > 1 else 0) * size.Hq + h) * lse.shape[2] + call.q_starts[b]
                        for i0 in range(i_low, i_high, br):
                            n_i = min(br, i_high - i0)
                            band = band_class(call, i0, i0 + n_i, j0, j0 + n_j, offset)
                            kind = band
                            if size.program_depth > 0:
                                inside = program_class(call, classes, b, h, i0, i0 + n_i, j0, j0 + n_j, offset)
                                kind = min(kind, inside)
                            if kind == EMPTY:
                                continue
                            if rows + n_i > LONGEST_ROW_SUM:
                                set_keys_aside(w)
                                rows = 0
                            rows += n_i
                            # Load Q_i, dO_i, O_i, m_i; gamma = rowsum(dO * O)
                            load_queries(call, w, dout, b, h, i0, n_i)
                            gamma_rows(
                                call, w.x, w.dO, w.O, w.ldv, o, dlses, statistics + i0, gamma, 0, b, h, i0, n_i
                            )
                            for r in range(n_i):
                                m[r] = lses[statistics + i0 + r]
                            # Load dQ_i; dQ_i += dS K; store dQ_i
                            backward_step_general(
                                call, w, kind, band == PARTIAL, b, h, i0, n_i, j0, n_j, m, gamma, 0,
                                dQ, (h - hkv * group) * dq_rows * w.ldd + i0 * columns, dq_rows, dbias, dbias_strides,
                            )  # fmt: skip
                    # Store dK_j, dV_j
                    store_keys(call, w, dk, dv, b, hkv, j0, n_j)
                if len(dQ) > whole:
                    dQ[:whole] += dQ[whole:]
                for h in range(hkv * group, (hkv + 1) * group):
                    for i0 in range(0, call.q_lengths[b], br):
                        n_i = min(br, call.q_lengths[b] - i0)
                        address = rows_of(dq, call.q_starts[b], b, h, i0)
                        at = (h - hkv * group) * dq_rows * w.ldd + i0 * columns
                        store_panels(address, dq, dQ, at, dq_rows, n_i, size.d, call.real.scale, w.x, w.Q)

    return kernel


_kernels = for_each_dtype(_make_kernel)


def fa1_backward(problem: Problem, tiles: Tiles, x: Operands, grads: dict[str, np.ndarray]) -> None:
    """Write the gradients (canonical form) for the rows and keys that exist."""
    call, keep = describe(problem, tiles, x)
    lse, dlse = contiguous_statistic(problem, x.lse, x), contiguous_statistic(problem, x.dlse, x)
    if "sinks" in grads:
        grads["sinks"] += sink_gradient(problem, x, lse, dlse)
    dbias, strides, alone = bias_gradient_target(problem, grads.get("bias"), lse.dtype)
    heads = problem.B * problem.Hkv
    heads_per_piece = max(heads, 1) if alone else 1
    run(
        _kernels[problem.compute_dtype], heads // heads_per_piece,
        call, heads_per_piece, view(x.dout), view(x.o), lse, dlse,
        view(grads["q"]), view(grads["k"]), view(grads["v"]), dbias, strides,
    )  # fmt: skip
    del keep
