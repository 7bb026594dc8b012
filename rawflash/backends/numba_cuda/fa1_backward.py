"""FlashAttention-1, backward pass (Dao et al. 2022, algorithm 4; Chu, Liu and Lin 2026, algorithm 7): fa1_backward.cu.

A block of threads owns one key head and the query heads that share it. K/V blocks outside, Q blocks inside; dQ lies
in device memory and is read and written at every step; gamma = rowsum(dO * O) is computed at every step. No atomics:
two runs give the same bits.

On chip: Q (Br, d), K (Bc, d), V (Bc, dv), dO (Br, dv), P (Br, Bc), dS (Br, Bc); in registers dK (Bc, d), dV (Bc, dv)
and, for one step, dQ (Br, d).
Read per step: Q_i, dO_i, O_i, lse_i, dQ_i; written per step: dQ_i. K_j and V_j are read once, dK_j and dV_j written
once.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, int64

from rawflash.backends.cupy_raw.fa1_backward import fa1_backward  # the launcher, which is the same
from rawflash.backends.numba_cuda import gradient, simt, tile
from rawflash.backends.numba_cuda.call import head, row_of, sequence, sums_of
from rawflash.backends.numba_cuda.intrinsics import as_double, get, sync_warp
from rawflash.backends.numba_cuda.memory import device
from rawflash.backends.numba_cuda.numbers import LOAD, STORE
from rawflash.backends.numba_cuda.padding import clear_gradients
from rawflash.backends.numba_cuda.scores import Scores
from rawflash.backends.numba_cuda.visibility import EMPTY

__all__ = ["fa1_backward", "make_kernels"]


def make_kernels(c: Any) -> dict[str, Any]:
    """The kernels of this file for the constants of a call."""
    return {"fa1_backward": backward(c)} | ({"clear_gradients": clear_gradients(c)} if c.PACKED else {})


def compute_delta(c: Any) -> Any:
    """``compute_delta(call, at, on_chip, i0, delta)``: gamma - dlse of the rows that the thread owns.

    dO comes from its tile, O from device memory. Also into device memory, where the code of options looks it up.
    """
    R, SIDE, DV, pitch, size, real, dlse_given = c.R, c.SIDE, c.DV, c.PITCH_V, c.ELEM_BYTES, c.real, c.DLSE
    dO, load, load_real, store = gradient.places(c).dO, LOAD[c.TYPE], LOAD[c.REAL_TYPE], STORE[c.REAL_TYPE]
    o_row, dlse_of, delta_of, sum_of_lanes = row_of(c, "o"), row_of(c, "dlse"), row_of(c, "delta"), tile.sum_of_lanes(c)
    thread_x, thread_y = tile.threads(c)

    @device
    def compute_delta(call: Any, at: Any, on_chip: Any, i0: int, delta: Any) -> None:
        for r in range(R):
            y = thread_y() + SIDE * r
            i = i0 + y
            gamma = real(0)
            if i < at.q_length:
                O = o_row(call, at.slot, at.h, at.q_start + i)
                for x in range(thread_x(), DV, SIDE):
                    gamma += get(on_chip, dO + y * pitch + x) * load(O + x * size)
                if dlse_given:
                    if thread_x() == 0:
                        gamma -= load_real(dlse_of(call, at.slot, at.h, at.q_start + i))
            delta[r] = sum_of_lanes(gamma)
            if i < at.q_length and thread_x() == 0:
                store(delta_of(call, at.slot, at.h, at.q_start + i), delta[r])
        sync_warp()  # the threads of a row read the delta that one of them wrote

    return compute_delta


def backward(c: Any) -> Any:
    real, packed, size, width = c.real, c.PACKED, c.ELEM_BYTES, c.REAL_BYTES
    BR, BC, D, DV, R, C, CD, SIDE, THREADS = c.BR, c.BC, c.D, c.DV, c.R, c.C, c.CD, c.SIDE, c.THREADS
    load, store = LOAD[c.REAL_TYPE], STORE[c.REAL_TYPE]
    rows_k, grouped = tile.Grouped(c, BC).COUNT, tile.Grouped(c, D)
    shape_s, shape_q, shape_k, shape_v, shape_row = (R, C), (R, CD), (rows_k, CD), (rows_k, c.CV), (1, CD)
    of, place, column = Scores(c), gradient.places(c), grouped.at
    row_range, next_step = of.row_range, gradient.next_step(c, of)
    sequence_of, head_of, sums = sequence(c), head(c), sums_of(c, D)
    q_row, k_row, v_row, do_row, dq_row = (row_of(c, name) for name in ("q", "k", "v", "dout", "dq"))
    thread_x, thread_y = tile.threads(c)
    clear_tiles, fill_k, fill_v = tile.clear_tiles(c), tile.fill(rows_k, CD), tile.fill(rows_k, c.CV)
    fill_q, store_row, read_sums = tile.fill(R, CD), tile.store_row(c, D), tile.read_sums(c, D)
    load_q, load_k = (tile.load_tile(c, n, D, c.PITCH_D, to) for n, to in ((BR, place.Q), (BC, place.K)))
    load_do, load_v = (tile.load_tile(c, n, DV, c.PITCH_V, to) for n, to in ((BR, place.dO), (BC, place.V)))
    load_lse, delta_of_rows = gradient.load_statistic(c, "lse"), compute_delta(c)
    products, put_gradients = gradient.products(c), gradient.put_score_gradients(c, of, True)
    add_dv = simt.product_tn(c, BR, BC, DV, place.P, c.PITCH_S, place.dO, c.PITCH_V)
    add_dk = simt.product_tn(c, BR, BC, D, place.dS, c.PITCH_S, place.Q, c.PITCH_D)
    add_dq = simt.product_nn(c, BC, D, place.dS, c.PITCH_S, place.K, c.PITCH_D)
    store_dk, store_dv = gradient.store_keys(c, "dk", D), gradient.store_keys(c, "dv", DV)
    commit_copies, await_copies = tile.copies(c)

    def fa1_backward(call: Any) -> None:
        on_chip = cuda.shared.array(0, real, alignment=16)
        grid = int64(cuda.blockIdx.x)
        s = sequence_of(call, grid // call.Hkv)
        h_kv, group = grid % call.Hkv, call.Hq // call.Hkv
        h_end = (h_kv + 1) * group
        keys_end = s.kv_length if packed else call.Tk
        rows_end = s.q_length if packed else call.Tq
        clear_tiles(on_chip)

        dK = cuda.local.array(shape_k, real)
        dV = cuda.local.array(shape_v, real)
        S = cuda.local.array(shape_s, real)
        dP = cuda.local.array(shape_s, real)
        dQ = cuda.local.array(shape_q, real)
        lse = cuda.local.array(R, real)
        delta = cuda.local.array(R, real)

        # dQ = 0
        for h in range(h_kv * group, h_end):
            of_head = sums(call, s.slot, h, s.q_start)
            for n in range(cuda.threadIdx.x, rows_end * D, THREADS):
                store(of_head + n * width, real(0))

        for j0 in range(0, keys_end, BC):
            # Load K_j, V_j; dK_j = dV_j = 0
            fill_k(dK, real(0))
            fill_v(dV, real(0))
            cuda.syncthreads()  # no thread reads the tiles of the block before; all dQ are written
            if j0 < s.kv_length:
                load_k(on_chip, k_row(call, s.slot, h_kv, s.k_start + j0), call.k_row * size, s.kv_length - j0)
                load_v(on_chip, v_row(call, s.slot, h_kv, s.k_start + j0), call.v_row * size, s.kv_length - j0)
                commit_copies()
            i_low, i_high = row_range(call, s, j0)
            step = next_step(call, s, h_kv * group, h_end, i_low, i_low, i_high, j0)
            while step.kind != EMPTY:
                at = head_of(call, s, step.h)
                i0 = step.i0
                i, count = s.q_start + i0, s.q_length - i0
                # Load Q_i, dO_i, lse_i
                load_q(on_chip, q_row(call, s.slot, at.h, i), call.q_row * size, count)
                load_do(on_chip, do_row(call, s.slot, at.h, i), call.dout_row * size, count)
                commit_copies()
                load_lse(call, at, i0, lse)
                await_copies()
                cuda.syncthreads()  # the tiles are there
                delta_of_rows(call, at, on_chip, i0, delta)

                # S = Q K^T, dP = dO V^T; P = exp(S - lse), dS = P (dP - delta)
                products(S, dP, on_chip)
                put_gradients(call, at, S, dP, lse, delta, on_chip, i0, j0, step.kind)
                cuda.syncthreads()  # P and dS are there

                # dV += P^T dO, dK += dS^T Q
                add_dv(dV, on_chip)
                add_dk(dK, on_chip)

                # dQ_i += dS K, in device memory
                fill_q(dQ, real(0))
                add_dq(dQ, on_chip)
                for r in range(R):
                    y = thread_y() + SIDE * r
                    of_row = sums(call, s.slot, at.h, i + y)
                    for n in range(CD):
                        x = column(thread_x(), n)
                        if y < count and x < D:
                            store(of_row + x * width, load(of_row + x * width) + dQ[r, n])  # always by the same thread
                cuda.syncthreads()  # no thread reads Q_i, dO_i, P and dS any more
                step = next_step(call, s, step.h, h_end, i0 + BR, i_low, i_high, j0)
            await_copies()
            # Write dK_j, dV_j
            store_dk(call, s, h_kv, j0, dK, real(as_double(call.scale)))
            store_dv(call, s, h_kv, j0, dV, real(1))

        cuda.syncthreads()  # all dQ are written, also where there are no keys

        # dQ = scale * its sum, in the dtype of q; padding is 0
        row = cuda.local.array(shape_row, real)
        for h in range(h_kv * group, h_end):
            for i in range(int64(thread_y()), rows_end, SIDE):
                read_sums(sums(call, s.slot, h, s.q_start + i), row, 0)
                place_of_row = dq_row(call, s.slot, h, s.q_start + i)
                store_row(place_of_row, row, 0, real(as_double(call.scale)), i >= s.q_length)

    return fa1_backward
