"""FlashAttention-1, forward pass (Dao et al. 2022, algorithm 1; Chu, Liu and Lin 2026, algorithm 4): fa1_forward.cu.

A block of threads owns one query head. K/V blocks outside, Q blocks inside; O, m and l lie in device memory and are
read and written at every step, O divided by l each time.

On chip: Q (Br, d), K (Bc, d), V (Bc, dv), S = P (Br, Bc); in registers, for one step, O (Br, dv), m, l.
Read per step: Q_i, O_i, m_i, l_i; written per step: O_i, m_i, l_i. K_j and V_j are read once.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, int64

from rawflash.backends.cupy_raw.fa1_forward import fa1_forward  # the launcher, which is the same
from rawflash.backends.numba_cuda import simt, tile
from rawflash.backends.numba_cuda.call import head, row_of, sequence, sums_of
from rawflash.backends.numba_cuda.numbers import INFINITE, LOAD, STORE
from rawflash.backends.numba_cuda.padding import clear_results
from rawflash.backends.numba_cuda.scores import Scores, finish_scores
from rawflash.backends.numba_cuda.softmax import drop, finish_row, softmax_step
from rawflash.backends.numba_cuda.visibility import EMPTY

__all__ = ["fa1_forward", "make_kernels"]


def make_kernels(c: Any) -> dict[str, Any]:
    """The kernels of this file for the constants of a call."""
    return {"fa1_forward": forward(c)} | ({"clear_results": clear_results(c)} if c.PACKED else {})


def forward(c: Any) -> Any:
    real, packed, size, width = c.real, c.PACKED, c.ELEM_BYTES, c.REAL_BYTES
    BR, BC, D, DV, R, C, CV, SIDE, THREADS = c.BR, c.BC, c.D, c.DV, c.R, c.C, c.CV, c.SIDE, c.THREADS
    dropout, load, store = c.DROPOUT, LOAD[c.REAL_TYPE], STORE[c.REAL_TYPE]
    shape_s, shape_o, shape_r, shape_row = (R, C), (R, CV), R, (1, CV)
    K_AT = BR * c.PITCH_D
    V_AT = K_AT + BC * c.PITCH_D
    P_AT = V_AT + BC * c.PITCH_V
    of = Scores(c)
    next_rows, row_range = of.next_rows, of.row_range
    sequence_of, head_of, O_rows = sequence(c), head(c), sums_of(c, DV)
    q_row, k_row, v_row, o_row = (row_of(c, name) for name in ("q", "k", "v", "o"))
    m_of, l_of, lse_of = (row_of(c, name) for name in ("m", "l", "lse"))
    thread_x, thread_y = tile.threads(c)
    clear_tiles, fill_s = tile.clear_tiles(c), tile.fill(R, C)
    load_q = tile.load_tile(c, BR, D, c.PITCH_D, 0)
    load_k = tile.load_tile(c, BC, D, c.PITCH_D, K_AT)
    load_v = tile.load_tile(c, BC, DV, c.PITCH_V, V_AT)
    add_scores = simt.product_nt(c, c.DEPTH_D, 0, c.PITCH_D, K_AT, c.PITCH_D)
    add_output = simt.product_nn(c, BC, DV, P_AT, c.PITCH_S, V_AT, c.PITCH_V)
    put_p, _ = tile.score_tile(c, P_AT)
    finish, step, drop_p, finish_l = finish_scores(c, of, P_AT), softmax_step(c), drop(c, P_AT), finish_row(c)
    sum_of_lanes, store_row = tile.sum_of_lanes(c), tile.store_row(c, DV)
    read_sums, write_sums = tile.read_sums(c, DV), tile.write_sums(c, DV)
    commit_copies, await_copies = tile.copies(c)

    def fa1_forward(call: Any) -> None:
        on_chip = cuda.shared.array(0, real, alignment=16)
        grid = int64(cuda.blockIdx.x)
        s = sequence_of(call, grid // call.Hq)
        at = head_of(call, s, grid % call.Hq)
        O_of = O_rows(call, s.slot, at.h, s.q_start)
        m_rows = m_of(call, s.slot, at.h, s.q_start)
        l_rows = l_of(call, s.slot, at.h, s.q_start)
        clear_tiles(on_chip)

        O = cuda.local.array(shape_o, real)
        S = cuda.local.array(shape_s, real)
        m = cuda.local.array(shape_r, real)
        l = cuda.local.array(shape_r, real)
        alpha = cuda.local.array(shape_r, real)
        before = cuda.local.array(shape_r, real)

        # O = 0, m = -inf, l = 0
        for n in range(cuda.threadIdx.x, s.q_length * DV, THREADS):
            store(O_of + n * width, real(0))
        for i in range(cuda.threadIdx.x, s.q_length, THREADS):
            store(m_rows + i * width, real(-INFINITE))
            store(l_rows + i * width, real(0))

        for j0 in range(0, s.kv_length, BC):
            i_low, i_high = row_range(call, s, j0)
            block = next_rows(call, s, at.h, i_low, i_high, j0)
            i0, kind = block.start, block.kind
            if kind != EMPTY:
                cuda.syncthreads()  # no thread reads K, V or Q of the block before; O, m and l of all rows are written
                # Load K_j, V_j and the first Q_i
                load_k(on_chip, k_row(call, s.slot, at.h_kv, s.k_start + j0), call.k_row * size, s.kv_length - j0)
                load_v(on_chip, v_row(call, s.slot, at.h_kv, s.k_start + j0), call.v_row * size, s.kv_length - j0)
                load_q(on_chip, q_row(call, s.slot, at.h, s.q_start + i0), call.q_row * size, s.q_length - i0)
                commit_copies()
            while kind != EMPTY:
                following = next_rows(call, s, at.h, i0 + BR, i_high, j0)
                # Load O_i, m_i, l_i: each thread its own columns
                for r in range(R):
                    i = i0 + thread_y() + SIDE * r
                    m[r] = -INFINITE
                    before[r] = real(0)
                    if i < s.q_length:
                        m[r] = load(m_rows + i * width)
                        before[r] = load(l_rows + i * width)
                        read_sums(O_of + i * DV * width, O, r)
                    else:
                        for n in range(CV):
                            O[r, n] = real(0)
                await_copies()
                cuda.syncthreads()  # Q_i, and at first K_j and V_j, are there; every thread has read m_i and l_i

                # S = Q K^T
                fill_s(S, real(0))
                add_scores(S, on_chip)
                finish(call, at, S, on_chip, i0, j0, kind)

                # m_new = max(m, rowmax(S)); P = exp(S - m_new); l_new = alpha l + rowsum(P)
                for r in range(R):
                    l[r] = real(0)
                step(S, m, l, alpha)
                put_p(on_chip, S)
                if dropout:
                    drop_p(call, at, on_chip, i0, j0)
                for r in range(R):
                    l[r] = before[r] * alpha[r] + sum_of_lanes(l[r])
                    i = i0 + thread_y() + SIDE * r
                    if thread_x() == 0 and i < s.q_length:
                        store(m_rows + i * width, m[r])
                        store(l_rows + i * width, l[r])
                cuda.syncthreads()  # P is there, and no thread reads Q_i any more
                if following.kind != EMPTY:
                    next_i = s.q_start + following.start
                    load_q(on_chip, q_row(call, s.slot, at.h, next_i), call.q_row * size, s.q_length - following.start)
                commit_copies()

                # O = (l alpha O + P V) / l_new
                for r in range(R):
                    for n in range(CV):
                        O[r, n] *= before[r] * alpha[r]
                add_output(O, on_chip)
                for r in range(R):
                    i = i0 + thread_y() + SIDE * r
                    inverse = real(0) if l[r] == real(0) else real(1) / l[r]
                    if i < s.q_length:
                        write_sums(O_of + i * DV * width, O, r, inverse)
                i0, kind = following.start, following.kind
        cuda.syncthreads()  # m and l of all rows are written

        # out = O with the sink in its denominator, lse = m + log l; padding is 0 and -inf
        row = cuda.local.array(shape_row, real)
        rows_end = s.q_length if packed else call.Tq
        for i in range(int64(thread_y()), rows_end, SIDE):
            factor, total, lse = real(0), real(0), real(-INFINITE)
            for n in range(CV):
                row[0, n] = real(0)
            if i < s.q_length:
                read_sums(O_of + i * DV * width, row, 0)
                l_i = load(l_rows + i * width)
                factor, total, lse = finish_l(call, at, load(m_rows + i * width), l_i)
                factor *= l_i
            store_row(o_row(call, s.slot, at.h, s.q_start + i), row, 0, factor, total == real(0))
            if thread_x() == 0 and call.lse_data != 0:  # somebody asked for it
                store(lse_of(call, s.slot, at.h, s.q_start + i), lse)

    return fa1_forward
