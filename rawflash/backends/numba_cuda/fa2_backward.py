"""FlashAttention-2, backward pass (Dao 2024, algorithm 2; Chu, Liu and Lin 2026, algorithms 6 and 8): fa2_backward.cu.

fa2_backward_keys: a block of threads owns Bc keys of one key head and runs over the Q blocks of all query heads that
share it; dK and dV stay in registers. dQ_i += dS K goes to device memory by atomic additions, unless DETERMINISTIC.
On chip: Q (Br, d), K (Bc, d), V (Bc, dv), dO (Br, dv), P (Br, Bc), dS (Br, Bc); in registers dK (Bc, d), dV (Bc, dv),
dQ (Br, d).

fa2_backward_queries, for DETERMINISTIC: a block owns Br rows of a query head and runs over the K/V blocks; dQ stays in
registers. On chip the same.

Both start from delta = rowsum(dO * O) - dlse. Products of 16-bit numbers on tensor cores are in mma/backward.py, which
has the first; the plan says which of the two it is for.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, int64

from rawflash.backends.cupy_raw.fa2_backward import fa2_backward  # the launcher, which is the same
from rawflash.backends.numba_cuda import gradient, simt, tile
from rawflash.backends.numba_cuda.call import head, row_of, sequence, sums_of
from rawflash.backends.numba_cuda.intrinsics import as_double
from rawflash.backends.numba_cuda.memory import device
from rawflash.backends.numba_cuda.numbers import ADD
from rawflash.backends.numba_cuda.padding import clear_gradients
from rawflash.backends.numba_cuda.scores import Scores
from rawflash.backends.numba_cuda.visibility import EMPTY
from rawflash.tiling import MMA

__all__ = ["fa2_backward", "make_kernels"]


def make_kernels(c: Any) -> dict[str, Any]:
    """The kernels of this file for the constants of a call."""
    if c.FAMILY == MMA:
        from rawflash.backends.numba_cuda.mma.backward import keys as tensor_keys

        kernels = {"fa2_backward_keys": tensor_keys(c)}
    else:
        kernels = {"fa2_backward_keys": keys(c)}
    kernels |= {"fa2_backward_queries": queries(c)} if c.DETERMINISTIC else {"fa2_backward_finish": finish(c)}
    return kernels | ({"clear_gradients": clear_gradients(c)} if c.PACKED else {})


def add_row(c: Any, columns: int) -> Any:
    """``add_row(address, values, r)``: add the thread's columns of a row to device memory."""
    grouped, size, add = tile.Grouped(c, columns), c.REAL_BYTES, ADD[c.REAL_TYPE]
    count, at = grouped.COUNT, grouped.at
    thread_x, _ = tile.threads(c)

    @device
    def add_row(address: int, values: Any, r: int) -> None:
        for n in range(count):
            x = at(thread_x(), n)
            if x < columns:
                add(address + x * size, values[r, n])

    return add_row


def keys(c: Any) -> Any:
    real, packed, deterministic, size = c.real, c.PACKED, c.DETERMINISTIC, c.ELEM_BYTES
    BR, BC, D, DV, R, C, CD, SIDE = c.BR, c.BC, c.D, c.DV, c.R, c.C, c.CD, c.SIDE
    rows_k = tile.Grouped(c, BC).COUNT
    shape_s, shape_q, shape_k, shape_v = (R, C), (R, CD), (rows_k, CD), (rows_k, c.CV)
    of, place = Scores(c), gradient.places(c)
    row_range, next_step = of.row_range, gradient.next_step(c, of)
    sequence_of, head_of, sums = sequence(c), head(c), sums_of(c, D)
    q_row, k_row, v_row, do_row = (row_of(c, name) for name in ("q", "k", "v", "dout"))
    _, thread_y = tile.threads(c)
    clear_tiles, fill_k, fill_v = tile.clear_tiles(c), tile.fill(rows_k, CD), tile.fill(rows_k, c.CV)
    fill_q = tile.fill(R, CD)
    load_q, load_k = (tile.load_tile(c, n, D, c.PITCH_D, to) for n, to in ((BR, place.Q), (BC, place.K)))
    load_do, load_v = (tile.load_tile(c, n, DV, c.PITCH_V, to) for n, to in ((BR, place.dO), (BC, place.V)))
    load_lse, load_delta = gradient.load_statistic(c, "lse"), gradient.load_statistic(c, "delta")
    products, put_gradients = gradient.products(c), gradient.put_score_gradients(c, of, True)
    add_dv = simt.product_tn(c, BR, BC, DV, place.P, c.PITCH_S, place.dO, c.PITCH_V)
    add_dk = simt.product_tn(c, BR, BC, D, place.dS, c.PITCH_S, place.Q, c.PITCH_D)
    add_dq = simt.product_nn(c, BC, D, place.dS, c.PITCH_S, place.K, c.PITCH_D)
    add_to_row = add_row(c, D)
    store_dk, store_dv = gradient.store_keys(c, "dk", D), gradient.store_keys(c, "dv", DV)
    commit_copies, await_copies = tile.copies(c)

    def fa2_backward_keys(call: Any) -> None:
        on_chip = cuda.shared.array(0, real, alignment=16)
        grid = int64(cuda.blockIdx.x)
        block, bh = grid % call.blocks, grid // call.blocks
        s = sequence_of(call, bh // call.Hkv)
        h_kv, group = bh % call.Hkv, call.Hq // call.Hkv
        h_end = (h_kv + 1) * group
        j0 = block * BC
        if j0 >= (s.kv_length if packed else call.Tk):
            return

        dK = cuda.local.array(shape_k, real)
        dV = cuda.local.array(shape_v, real)
        S = cuda.local.array(shape_s, real)
        dP = cuda.local.array(shape_s, real)
        dQ = cuda.local.array(shape_q, real)
        lse = cuda.local.array(R, real)
        delta = cuda.local.array(R, real)
        fill_k(dK, real(0))
        fill_v(dV, real(0))
        i_low, i_high = row_range(call, s, j0)
        step = next_step(call, s, h_kv * group, h_end, i_low, i_low, i_high, j0)
        h, i0, kind = step.h, step.i0, step.kind
        q_stride, do_stride = call.q_row * size, call.dout_row * size

        # Load K_j, V_j and the first Q_i, dO_i
        if kind != EMPTY:
            clear_tiles(on_chip)
            load_k(on_chip, k_row(call, s.slot, h_kv, s.k_start + j0), call.k_row * size, s.kv_length - j0)
            load_v(on_chip, v_row(call, s.slot, h_kv, s.k_start + j0), call.v_row * size, s.kv_length - j0)
            load_q(on_chip, q_row(call, s.slot, h, s.q_start + i0), q_stride, s.q_length - i0)
            load_do(on_chip, do_row(call, s.slot, h, s.q_start + i0), do_stride, s.q_length - i0)
            commit_copies()
        while kind != EMPTY:
            at = head_of(call, s, h)
            following = next_step(call, s, h, h_end, i0 + BR, i_low, i_high, j0)
            next_i, next_count = s.q_start + following.i0, s.q_length - following.i0
            load_lse(call, at, i0, lse)
            load_delta(call, at, i0, delta)
            await_copies()
            cuda.syncthreads()  # Q_i and dO_i are there; no thread reads P and dS of the step before

            # S = Q K^T, dP = dO V^T; P = exp(S - lse), dS = P (dP - delta)
            products(S, dP, on_chip)
            put_gradients(call, at, S, dP, lse, delta, on_chip, i0, j0, kind)
            cuda.syncthreads()  # P and dS are there

            # dV += P^T dO
            add_dv(dV, on_chip)
            cuda.syncthreads()  # no thread reads dO_i any more
            if following.kind != EMPTY:
                load_do(on_chip, do_row(call, s.slot, following.h, next_i), do_stride, next_count)
            commit_copies()

            # dK += dS^T Q
            add_dk(dK, on_chip)
            cuda.syncthreads()  # no thread reads Q_i any more
            if following.kind != EMPTY:
                load_q(on_chip, q_row(call, s.slot, following.h, next_i), q_stride, next_count)
            commit_copies()

            # dQ_i += dS K
            if not deterministic:
                fill_q(dQ, real(0))
                add_dq(dQ, on_chip)
                for r in range(R):
                    i = i0 + thread_y() + SIDE * r
                    if i < s.q_length:
                        add_to_row(sums(call, s.slot, h, s.q_start + i), dQ, r)
            h, i0, kind = following.h, following.i0, following.kind

        # Write dK_j, dV_j
        store_dk(call, s, h_kv, j0, dK, real(as_double(call.scale)))
        store_dv(call, s, h_kv, j0, dV, real(1))

    return fa2_backward_keys


def queries(c: Any) -> Any:
    real, packed, size = c.real, c.PACKED, c.ELEM_BYTES
    BR, BC, D, DV, R, C, CD, SIDE = c.BR, c.BC, c.D, c.DV, c.R, c.C, c.CD, c.SIDE
    shape_s, shape_q = (R, C), (R, CD)
    of, place = Scores(c), gradient.places(c)
    key_range, next_keys = of.key_range, of.next_keys
    sequence_of, head_of = sequence(c), head(c)
    q_row, k_row, v_row, do_row, dq_row = (row_of(c, name) for name in ("q", "k", "v", "dout", "dq"))
    _, thread_y = tile.threads(c)
    clear_tiles, fill_q, store_row = tile.clear_tiles(c), tile.fill(R, CD), tile.store_row(c, D)
    load_q, load_k = (tile.load_tile(c, n, D, c.PITCH_D, to) for n, to in ((BR, place.Q), (BC, place.K)))
    load_do, load_v = (tile.load_tile(c, n, DV, c.PITCH_V, to) for n, to in ((BR, place.dO), (BC, place.V)))
    load_lse, load_delta = gradient.load_statistic(c, "lse"), gradient.load_statistic(c, "delta")
    products, put_gradients = gradient.products(c), gradient.put_score_gradients(c, of, True)
    add_dq = simt.product_nn(c, BC, D, place.dS, c.PITCH_S, place.K, c.PITCH_D)
    commit_copies, await_copies = tile.copies(c)

    def fa2_backward_queries(call: Any) -> None:
        on_chip = cuda.shared.array(0, real, alignment=16)
        grid = int64(cuda.blockIdx.x)
        block, bh = call.blocks - 1 - grid % call.blocks, grid // call.blocks
        s = sequence_of(call, bh // call.Hq)
        at = head_of(call, s, bh % call.Hq)
        i0 = block * BR
        rows_end = s.q_length if packed else call.Tq
        if i0 >= rows_end:
            return

        dQ = cuda.local.array(shape_q, real)
        S = cuda.local.array(shape_s, real)
        dP = cuda.local.array(shape_s, real)
        lse = cuda.local.array(R, real)
        delta = cuda.local.array(R, real)
        fill_q(dQ, real(0))
        load_lse(call, at, i0, lse)
        load_delta(call, at, i0, delta)
        keys, values = k_row(call, s.slot, at.h_kv, s.k_start), v_row(call, s.slot, at.h_kv, s.k_start)
        k_stride, v_stride = call.k_row * size, call.v_row * size
        j_low, j_high = key_range(call, s, i0)
        first = next_keys(call, s, at.h, i0, j_low, j_high)
        j0, kind = first.start, first.kind

        # Load Q_i, dO_i and the first K_j, V_j
        if kind != EMPTY:
            clear_tiles(on_chip)
            load_q(on_chip, q_row(call, s.slot, at.h, s.q_start + i0), call.q_row * size, s.q_length - i0)
            load_do(on_chip, do_row(call, s.slot, at.h, s.q_start + i0), call.dout_row * size, s.q_length - i0)
            load_k(on_chip, keys + j0 * k_stride, k_stride, s.kv_length - j0)
            load_v(on_chip, values + j0 * v_stride, v_stride, s.kv_length - j0)
            commit_copies()
        while kind != EMPTY:
            following = next_keys(call, s, at.h, i0, j0 + BC, j_high)
            await_copies()
            cuda.syncthreads()  # K_j and V_j are there, and at first Q_i and dO_i

            # S = Q K^T, dP = dO V^T; dS = P (dP - delta)
            products(S, dP, on_chip)
            put_gradients(call, at, S, dP, lse, delta, on_chip, i0, j0, kind)
            cuda.syncthreads()  # dS is there, and no thread reads V_j any more
            if following.kind != EMPTY:
                load_v(on_chip, values + following.start * v_stride, v_stride, s.kv_length - following.start)

            # dQ += dS K
            add_dq(dQ, on_chip)
            cuda.syncthreads()  # no thread reads K_j any more
            if following.kind != EMPTY:
                load_k(on_chip, keys + following.start * k_stride, k_stride, s.kv_length - following.start)
            commit_copies()
            j0, kind = following.start, following.kind

        # Write dQ_i
        for r in range(R):
            i = i0 + thread_y() + SIDE * r
            if i < rows_end:
                place_of_row = dq_row(call, s.slot, at.h, s.q_start + i)
                store_row(place_of_row, dQ, r, real(as_double(call.scale)), i >= s.q_length)

    return fa2_backward_queries


def finish(c: Any) -> Any:
    """dQ = scale * the sum that the atomic additions made, in the dtype of q. Rows of padding hold 0."""
    real, packed, D, SIDE, size = c.real, c.PACKED, c.D, c.SIDE, c.REAL_BYTES
    dq_row, read_sums, store_row = row_of(c, "dq"), tile.read_sums(c, D), tile.store_row(c, D)
    _, thread_y = tile.threads(c)
    shape_q = (1, c.CD)

    def fa2_backward_finish(call: Any) -> None:
        dQ = cuda.local.array(shape_q, real)
        rows = (1 if packed else call.B) * call.Hq * call.rows_q
        for row in range(int64(cuda.blockIdx.x) * SIDE + thread_y(), rows, int64(cuda.gridDim.x) * SIDE):
            read_sums(call.sums + row * D * size, dQ, 0)
            t, h = row % call.rows_q, row // call.rows_q
            store_row(dq_row(call, h // call.Hq, h % call.Hq, t), dQ, 0, real(as_double(call.scale)), False)

    return fa2_backward_finish
