"""FlashAttention-1, backward pass (Dao et al. 2022, algorithm 4; Chu, Liu and Lin 2026, algorithm 7).

One piece of work is one key/value head: K/V blocks of Bc keys outside, blocks of Br query rows inside.
rowsum(dO * O) is computed anew at every step, so O is read each time; dQ lives in main memory and is
read and written at every step. The row statistic is the pair m := lse, l := 1, for which
P = exp(S - m) / l is the same.

On chip, keys on the lanes: Q, dO, O or dQ (Br rows), K, V, dK, dV (Bc rows), P and dS (Br, Bc).
Read per step: Q_i, O_i, dO_i, dQ_i, m_i; written per step: dQ_i. Written once per block: dK_j, dV_j.
"""

from __future__ import annotations

import numpy as np

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
from rawflash.backends.numba_cpu.microkernel import claim
from rawflash.backends.numba_cpu.numerics import store_tile
from rawflash.backends.numba_cpu.tile import (
    add_query_gradient,
    backward_step,
    gamma_rows,
    load_keys,
    load_rows,
    make_work,
    rows_of,
    store_keys,
)
from rawflash.backends.numba_cpu.visibility import EMPTY, PARTIAL, band_class, program_class, query_range
from rawflash.problem import Operands, Problem
from rawflash.tiling import Tiles


def _make_kernel(stamp: str, dtype: str):
    @compiled(f"fa1_backward_{dtype}")
    def kernel(counter, worker, call, heads_per_piece, dout, o, lse, dlse, dq, dk, dv, dbias, dbias_strides):
        stamp  # noqa: B018  (part of the cache key, see launch.for_each_dtype)
        size = call.size
        one = lse.dtype.type(1)
        br, bc, d, group = size.br, size.bc, size.d, size.Hq // size.Hkv
        w = make_work(call, one)
        classes = np.zeros(size.program_depth, np.int64)
        O = np.zeros(br * w.ldv, lse.dtype)
        # Main memory of the query heads of a group: dQ
        dQ = np.zeros((group, size.Tq, d), lse.dtype)
        while True:
            piece = claim(counter, 0)
            if piece >= size.B * size.Hkv // heads_per_piece:
                break
            for head in range(piece * heads_per_piece, (piece + 1) * heads_per_piece):
                b, hkv = head // size.Hkv, head % size.Hkv
                slot = b if lse.shape[0] > 1 else 0
                offset = call.q_offset[b]
                dQ[:] = 0
                for j0 in range(0, call.kv_lengths[b], bc):
                    n_j = min(bc, call.kv_lengths[b] - j0)
                    # Load K_j, V_j; dK_j = dV_j = 0
                    load_keys(call, w, b, hkv, j0, n_j, one)
                    i_low, i_high = query_range(call, b, j0, j0 + n_j)
                    for h in range(hkv * group, (hkv + 1) * group):
                        for i0 in range(i_low, i_high, br):
                            n_i = min(br, i_high - i0)
                            band = band_class(call, i0, i0 + n_i, j0, j0 + n_j, offset)
                            kind = band
                            if size.program_depth > 0:
                                inside = program_class(call, classes, b, h, i0, i0 + n_i, j0, j0 + n_j, offset)
                                kind = min(kind, inside)
                            if kind == EMPTY:
                                continue
                            # Load Q_i, dO_i, O_i, m_i; gamma = rowsum(dO * O)
                            at = call.q_starts[b] + i0
                            load_rows(w.Q, w.ldd, 1, call.q, call.q_starts[b], b, h, i0, n_i, d, one)
                            load_rows(w.dO, w.ldv, 1, dout, call.q_starts[b], b, h, i0, n_i, size.dv, one)
                            gamma_rows(call, w.dO, o, dlse[slot, h, at : at + n_i], w.delta, b, h, i0, n_i, w.ldv, O)
                            w.lse[:n_i] = lse[slot, h, at : at + n_i]
                            backward_step(
                                call, w, kind, band == PARTIAL, b, h, i0, n_i, j0, n_j, dbias, dbias_strides
                            )
                            # Load dQ_i; dQ_i += dS K; store dQ_i
                            add_query_gradient(call, w, dQ[h - hkv * group], i0, n_i)
                    # Store dK_j, dV_j
                    store_keys(call, w, dk, dv, b, hkv, j0, n_j)
                for h in range(hkv * group, (hkv + 1) * group):
                    total = dQ[h - hkv * group].reshape(-1)
                    address = rows_of(dq, call.q_starts[b], b, h, 0)
                    store_tile(address, dq.code, dq.row, total, 0, d, 1, call.q_lengths[b], d)

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
