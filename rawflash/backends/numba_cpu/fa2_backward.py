"""FlashAttention-2, backward pass (Dao 2024, algorithm 2; Chu, Liu and Lin 2026, algorithm 8).

A pre-pass saves delta = rowsum(dO * O) - dlse. Then K/V blocks outside, Q blocks inside: one piece of
work is every n-th K/V block of one key/value head, for all query heads that share it. In place of the
paper's atomics each share of a head adds dQ into a sum of its own, and the sums are added up in a
fixed order afterwards: results do not depend on which thread ran what.

On chip, keys on the lanes: Q, dO, dQ (Br rows), K, V, dK, dV (Bc rows), P and dS (Br, Bc).
Read per step: Q_i, dO_i, lse_i, delta_i, dQ_i; written per step: dQ_i. Written once per block: dK_j, dV_j.
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
    shares_of_a_head,
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


def _make_kernels(stamp: str, dtype: str):
    @compiled(f"fa2_backward_gamma_{dtype}")
    def gamma_kernel(counter, worker, call, dout, o, dlse, delta):
        stamp  # noqa: B018  (part of the cache key, see launch.for_each_dtype)
        size = call.size
        one = delta.dtype.type(1)
        dO, O = np.zeros(size.br * size.dv, delta.dtype), np.zeros(size.br * size.dv, delta.dtype)
        while True:
            head = claim(counter, 0)
            if head >= size.B * size.Hq:
                break
            b, h = head // size.Hq, head % size.Hq
            slot = b if delta.shape[0] > 1 else 0
            for i0 in range(0, call.q_lengths[b], size.br):
                n_i = min(size.br, call.q_lengths[b] - i0)
                at = call.q_starts[b] + i0
                load_rows(dO, size.dv, 1, dout, call.q_starts[b], b, h, i0, n_i, size.dv, one)
                gamma_rows(
                    call, dO, o, dlse[slot, h, at : at + n_i], delta[slot, h, at : at + n_i], b, h, i0, n_i, size.dv, O
                )

    @compiled(f"fa2_backward_{dtype}")
    def kernel(
        counter, worker, call, shares, heads_per_piece, dout, lse, delta, dq_sums, dk, dv, dbias, dbias_strides
    ):
        stamp  # noqa: B018
        size = call.size
        one = lse.dtype.type(1)
        br, bc, d, group = size.br, size.bc, size.d, size.Hq // size.Hkv
        w = make_work(call, one)
        classes = np.zeros(size.program_depth, np.int64)
        pieces = size.B * size.Hkv * shares // heads_per_piece
        while True:
            piece = claim(counter, 0)
            if piece >= pieces:
                break
            share = piece % shares
            for head in range(piece // shares * heads_per_piece, (piece // shares + 1) * heads_per_piece):
                b, hkv = head // size.Hkv, head % size.Hkv
                slot = b if lse.shape[0] > 1 else 0
                offset = call.q_offset[b]
                for j0 in range(share * bc, call.kv_lengths[b], shares * bc):
                    n_j = min(bc, call.kv_lengths[b] - j0)
                    # Load K_j, V_j; dK_j = dV_j = 0
                    load_keys(call, w, b, hkv, j0, n_j, one)
                    i_low, i_high = query_range(call, b, j0, j0 + n_j)
                    for h in range(hkv * group, (hkv + 1) * group):
                        dQ = dq_sums[share, b * size.Hq + h]
                        for i0 in range(i_low, i_high, br):
                            n_i = min(br, i_high - i0)
                            band = band_class(call, i0, i0 + n_i, j0, j0 + n_j, offset)
                            kind = band
                            if size.program_depth > 0:
                                inside = program_class(call, classes, b, h, i0, i0 + n_i, j0, j0 + n_j, offset)
                                kind = min(kind, inside)
                            if kind == EMPTY:
                                continue
                            # Load Q_i, dO_i, lse_i, delta_i
                            at = call.q_starts[b] + i0
                            load_rows(w.Q, w.ldd, 1, call.q, call.q_starts[b], b, h, i0, n_i, d, one)
                            load_rows(w.dO, w.ldv, 1, dout, call.q_starts[b], b, h, i0, n_i, size.dv, one)
                            w.lse[:n_i] = lse[slot, h, at : at + n_i]
                            w.delta[:n_i] = delta[slot, h, at : at + n_i]
                            backward_step(
                                call, w, kind, band == PARTIAL, b, h, i0, n_i, j0, n_j, dbias, dbias_strides
                            )
                            # dQ_i += dS K
                            add_query_gradient(call, w, dQ, i0, n_i)
                    # Store dK_j, dV_j
                    store_keys(call, w, dk, dv, b, hkv, j0, n_j)

    @compiled(f"fa2_backward_reduce_{dtype}")
    def reduce_kernel(counter, worker, call, shares, dq_sums, dq):
        stamp  # noqa: B018
        size = call.size
        while True:
            head = claim(counter, 0)
            if head >= size.B * size.Hq:
                break
            b, h = head // size.Hq, head % size.Hq
            n, width = call.q_lengths[b], dq_sums.shape[3]
            total = dq_sums[0, head].reshape(-1)
            for share in range(1, shares):
                other = dq_sums[share, head].reshape(-1)
                for x in range(n * width):
                    total[x] += other[x]
            store_tile(rows_of(dq, call.q_starts[b], b, h, 0), dq.code, dq.row, total, 0, width, 1, n, size.d)

    return gamma_kernel, kernel, reduce_kernel


_kernels = for_each_dtype(_make_kernels)


def fa2_backward(problem: Problem, tiles: Tiles, x: Operands, grads: dict[str, np.ndarray]) -> None:
    """Write the gradients (canonical form) for the rows and keys that exist."""
    call, keep = describe(problem, tiles, x)
    lse, dlse = contiguous_statistic(problem, x.lse, x), contiguous_statistic(problem, x.dlse, x)
    delta = np.zeros_like(lse)
    heads = problem.B * problem.Hq
    gamma_kernel, kernel, reduce_kernel = _kernels[problem.compute_dtype]
    run(gamma_kernel, heads, call, view(x.dout), view(x.o), dlse, delta)
    if "sinks" in grads:
        grads["sinks"] += sink_gradient(problem, x, lse, dlse)
    dbias, strides, alone = bias_gradient_target(problem, grads.get("bias"), lse.dtype)
    shares, heads_per_piece = shares_of_a_head(problem, tiles, alone)
    dq_sums = np.zeros((shares, heads, problem.Tq, problem.d), lse.dtype)
    pieces = problem.B * problem.Hkv * shares // heads_per_piece
    run(
        kernel, pieces, call, shares, heads_per_piece, view(x.dout), lse, delta, dq_sums,
        view(grads["k"]), view(grads["v"]), dbias, strides,
    )  # fmt: skip
    run(reduce_kernel, heads, call, shares, dq_sums, view(grads["q"]))
    del keep
