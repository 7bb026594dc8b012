"""FlashAttention-2, backward pass (Dao 2024, algorithm 2; Chu, Liu and Lin 2026, algorithm 8).

A pre-pass saves delta = rowsum(dO * O) - dlse. Then K/V blocks outside, Q blocks inside: one piece of
work is every n-th K/V block of one key/value head, for all query heads that share it. In place of the
paper's atomics each share of a head adds dQ into a sum of its own, and the sums are added up in a
fixed order afterwards: results do not depend on which thread ran what.

On chip, keys on the lanes: Q, dO (Br rows), K, V, dK, dV (Bc rows), P and dP (Br, NR), dS (Br, Bc).
Read per step: Q_i, dO_i, lse_i, delta_i, dQ_i; written per step: dQ_i. Written once per block: dK_j, dV_j.
"""

from __future__ import annotations

import numpy as np

from rawflash.backends.numba_cpu import microkernel
from rawflash.backends.numba_cpu.backward_panel import add_panel
from rawflash.backends.numba_cpu.gradient import (
    SPARE,
    backward_step_general,
    backward_step_plain,
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
    for_each_variant,
    is_plain,
    run,
    shares_of_a_head,
    sink_gradient,
    view,
)
from rawflash.backends.numba_cpu.microkernel import LONGEST_ROW_SUM, LONGEST_STORED_SUM, NR, claim, columns_of
from rawflash.backends.numba_cpu.tile import aligned, load_rows, padded, rows_of
from rawflash.backends.numba_cpu.visibility import EMPTY, PARTIAL, band_class, program_class, query_range
from rawflash.problem import Operands, Problem
from rawflash.tiles import Tiles


def _make_passes(stamp: str, dtype: str):
    """What goes before the kernel and after it: the same whatever the options."""

    @compiled(f"fa2_backward_gamma_{dtype}")
    def gamma_kernel(counter, worker, call, dout, o, dlse, delta):
        stamp  # noqa: B018  (part of the cache key, see launch.for_each_dtype)
        size = call.size
        one = delta.dtype.type(1)
        statistics, dlses = delta.reshape(-1), dlse.reshape(-1)
        columns = columns_of(delta)
        width = padded(size.dv, columns)
        x = aligned(2 * size.br * width, one)
        O = size.br * width
        blocks = -(-size.Tq // size.br)
        while True:
            piece = claim(counter, 0)
            if piece >= size.B * size.Hq * blocks:
                break
            head, i0 = piece // blocks, piece % blocks * size.br
            b, h = head // size.Hq, head % size.Hq
            n_i = min(size.br, call.q_lengths[b] - i0)
            if n_i <= 0:
                continue
            start = call.q_starts[b]
            at = ((b if delta.shape[0] > 1 else 0) * size.Hq + h) * delta.shape[2] + start + i0
            load_rows(x, width, 1, dout, start, b, h, i0, n_i, size.dv, one)
            gamma_rows(call, x, 0, O, width, o, dlses, at, statistics, at, b, h, i0, n_i)

    @compiled(f"fa2_backward_reduce_{dtype}")
    def reduce_kernel(counter, worker, call, sums, dq_rows, dq_sums, dq):
        stamp  # noqa: B018
        size = call.size
        columns = columns_of(dq_sums)
        blocks = -(-size.Tq // size.br)
        width = padded(size.d, columns)
        rows = aligned(size.br * width, dq_sums.dtype.type(0))
        while True:
            piece = claim(counter, 0)
            if piece >= size.B * size.Hq * blocks:
                break
            head, i0 = piece // blocks, piece % blocks * size.br
            b, h = head // size.Hq, head % size.Hq
            n_i = min(size.br, call.q_lengths[b] - i0)
            if n_i <= 0:
                continue
            for c in range(0, size.d, columns):
                at = head * dq_rows * width + c * dq_rows + i0 * columns
                for n in range(1, sums):
                    other = n * size.B * size.Hq * dq_rows * width + at
                    add_panel(dq_sums, at, dq_sums, other, n_i)
            address = rows_of(dq, call.q_starts[b], b, h, i0)
            at = head * dq_rows * width + i0 * columns
            store_panels(address, dq, dq_sums, at, dq_rows, n_i, size.d, call.real.scale, rows, 0)

    return gamma_kernel, reduce_kernel


def _make_kernel(stamp: str, dtype: str, plain: bool):
    @compiled(f"fa2_backward_{'plain' if plain else 'general'}_{dtype}")
    def kernel(
        counter, worker, call, shares, heads_per_piece, dout, lse, delta, dq_rows, dq_sums, dk, dv, dbias, dbias_strides
    ):
        stamp  # noqa: B018
        size = call.size
        br, bc, group = size.br, size.bc, size.Hq // size.Hkv
        w = make_work(call, lse.dtype.type(1))
        lses, deltas = lse.reshape(-1), delta.reshape(-1)
        if not plain:
            classes = np.zeros(size.program_depth, np.int64)
        pieces = size.B * size.Hkv * shares // heads_per_piece
        while True:
            piece = claim(counter, 0)
            if piece >= pieces:
                break
            share = piece % shares
            for head in range(piece // shares * heads_per_piece, (piece // shares + 1) * heads_per_piece):
                b, hkv = head // size.Hkv, head % size.Hkv
                offset = call.q_offset[b]
                blocks = -(-call.kv_lengths[b] // bc)
                keys = 0  # that are in dQ
                for turn in range(-(-blocks // shares)):
                    # Every other turn backwards: a causal block is less work than the one before it.
                    block = turn * shares + (shares - 1 - share if turn % 2 else share)
                    if block >= blocks:
                        continue
                    j0 = block * bc
                    n_j = min(bc, call.kv_lengths[b] - j0)
                    if keys + n_j > LONGEST_STORED_SUM:
                        keys, n = 0, group * dq_rows * w.ldd
                        at = (share * size.B * size.Hq + b * size.Hq + hkv * group) * dq_rows * w.ldd
                        set_aside(dq_sums, at, n, at + shares * size.B * size.Hq * dq_rows * w.ldd)
                    keys += n_j
                    # Load K_j, V_j; dK_j = dV_j = 0
                    load_keys(call, w, b, hkv, j0, n_j)
                    rows = 0  # that are in dK and dV
                    i_low, i_high = query_range(call, b, j0, j0 + n_j)
                    for h in range(hkv * group, (hkv + 1) * group):
                        dq_head = (share * size.B * size.Hq + b * size.Hq + h) * dq_rows * w.ldd
                        statistics = ((b if lse.shape[0] > 1 else 0) * size.Hq + h) * lse.shape[2] + call.q_starts[b]
                        for i0 in range(i_low, i_high, br):
                            n_i = min(br, i_high - i0)
                            band = band_class(call, i0, i0 + n_i, j0, j0 + n_j, offset)
                            kind = band
                            if not plain:
                                if size.program_depth > 0:
                                    inside = program_class(call, classes, b, h, i0, i0 + n_i, j0, j0 + n_j, offset)
                                    kind = min(kind, inside)
                            if kind == EMPTY:
                                continue
                            if rows + n_i > LONGEST_ROW_SUM:
                                set_keys_aside(w)
                                rows = 0
                            rows += n_i
                            # Load Q_i, dO_i
                            load_queries(call, w, dout, b, h, i0, n_i)
                            # dQ_i += dS K
                            first, dq_at = statistics + i0, dq_head + i0 * columns_of(lse)
                            if plain:
                                backward_step_plain(
                                    call, w, kind, band == PARTIAL, b, h, i0, n_i, j0, n_j, lses, deltas, first,
                                    dq_sums, dq_at, dq_rows, dbias, dbias_strides,
                                )  # fmt: skip
                            else:
                                backward_step_general(
                                    call, w, kind, band == PARTIAL, b, h, i0, n_i, j0, n_j, lses, deltas, first,
                                    dq_sums, dq_at, dq_rows, dbias, dbias_strides,
                                )  # fmt: skip
                    # Store dK_j, dV_j
                    store_keys(call, w, dk, dv, b, hkv, j0, n_j)

    return kernel


_passes = for_each_dtype(_make_passes)
_kernels = for_each_variant(_make_kernel)


def fa2_backward(problem: Problem, tiles: Tiles, x: Operands, grads: dict[str, np.ndarray]) -> None:
    """Write the gradients (canonical form) for the rows and keys that exist."""
    call, keep = describe(problem, tiles, x)
    lse, dlse = contiguous_statistic(problem, x.lse, x), contiguous_statistic(problem, x.dlse, x)
    delta = np.zeros_like(lse)
    heads = problem.B * problem.Hq
    gamma_kernel, reduce_kernel = _passes[problem.compute_dtype]
    kernel = _kernels[problem.compute_dtype, is_plain(problem, x)]
    blocks = heads * -(-problem.Tq // tiles.br)
    run(gamma_kernel, blocks, call, view(x.dout), view(x.o), dlse, delta)
    if "sinks" in grads:
        grads["sinks"] += sink_gradient(problem, x, lse, dlse)
    dbias, strides, alone = bias_gradient_target(problem, grads.get("bias"), lse.dtype)
    shares, heads_per_piece = shares_of_a_head(problem, tiles, alone)
    dq_rows = problem.Tq + SPARE
    # Where a share has many keys, what was summed until some keys ago is in another sum
    keys = -(-problem.Tk // (shares * tiles.bc)) * tiles.bc
    sums = shares * (2 if keys > LONGEST_STORED_SUM else 1)
    dq_sums = np.zeros(sums * heads * dq_rows * microkernel.padded(problem.d, NR[lse.dtype]), lse.dtype)
    pieces = problem.B * problem.Hkv * shares // heads_per_piece
    run(
        kernel, pieces, call, shares, heads_per_piece, view(x.dout), lse, delta, dq_rows, dq_sums,
        view(grads["k"]), view(grads["v"]), dbias, strides,
    )  # fmt: skip
    run(reduce_kernel, blocks, call, sums, dq_rows, dq_sums, view(grads["q"]))
    del keep
