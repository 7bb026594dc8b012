"""FlashAttention-2, forward pass (Dao 2024, algorithm 1; Chu, Liu and Lin 2026, algorithm 3): fa2_forward.cu in Python.

A block of threads owns Br rows of one query head. Q blocks outside (one thread block each), K/V blocks inside; O, m
and l stay in registers and are written once.

On chip: Q (Br, d), K (Bc, d), V (Bc, dv), S = P (Br, Bc); in registers O (Br, dv), m, l.
Read per step: K_j and V_j, each while the other's product runs. Written once: O_i, lse_i.

Where that would leave multiprocessors idle, the keys of a block of rows are shared out, see fa2_forward.cu.
Products of 16-bit numbers on tensor cores are in mma/forward.py; the plan says which of the two it is for.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, int64

from rawflash.backends.cupy_raw.fa2_forward import fa2_forward  # the launcher, which is the same
from rawflash.backends.numba_cuda import simt, tile
from rawflash.backends.numba_cuda.call import clamp, head, least, place_of, row_of, sequence, sums_of
from rawflash.backends.numba_cuda.memory import device
from rawflash.backends.numba_cuda.numbers import INFINITE, LOAD, STORE, exponential, larger
from rawflash.backends.numba_cuda.padding import clear_results
from rawflash.backends.numba_cuda.scores import Scores, finish_scores
from rawflash.backends.numba_cuda.softmax import drop, finish_row, softmax_step
from rawflash.backends.numba_cuda.visibility import EMPTY
from rawflash.tiling import MMA

__all__ = ["fa2_forward", "make_kernels"]


def make_kernels(c: Any) -> dict[str, Any]:
    """The kernels of this file for the constants of a call."""
    if c.FAMILY == MMA:
        from rawflash.backends.numba_cuda.mma.forward import forward as tensor_forward

        kernels = {"fa2_forward": tensor_forward(c)}
    else:
        kernels = {"fa2_forward": forward(c), "fa2_forward_merge": merge(c)}
    return kernels | ({"clear_results": clear_results(c)} if c.PACKED else {})


@device
def parts_of(call: Any, j_low: int, j_high: int) -> int:
    """Into how many parts the keys from j_low to j_high are divided, at least one. The last takes what is left."""
    if call.parts == 1:
        return int64(1)
    return clamp((j_high - j_low + call.part_keys - 1) // call.part_keys, 1, call.parts)


@device
def rows_of_part(c_packed: bool, call: Any) -> int:
    return (1 if c_packed else call.B) * call.Hq * call.rows_q


def places_of_part(c: Any) -> tuple[Any, Any, Any]:
    """``sums_of_part``, ``m_of_part``, ``l_of_part`` of (call, at, part, i): addresses. O of the first part lies in the
    output itself, if that has numbers as wide."""
    packed, first_in_output = bool(c.PACKED), c.ELEM_BYTES == c.REAL_BYTES
    o_row, m_of, l_of, sums = row_of(c, "o"), row_of(c, "m"), row_of(c, "l"), sums_of(c, c.DV)
    width, size = c.DV * c.REAL_BYTES, c.REAL_BYTES
    workspaces_from = 1 if first_in_output else 0

    @device
    def sums_of_part(call: Any, at: Any, part: int, i: int) -> int:
        if first_in_output:
            if part == 0:
                return o_row(call, at.slot, at.h, at.q_start + i)
        place = sums(call, at.slot, at.h, at.q_start + i)
        return place + (part - workspaces_from) * rows_of_part(packed, call) * width

    @device
    def m_of_part(call: Any, at: Any, part: int, i: int) -> int:
        return m_of(call, at.slot, at.h, at.q_start + i) + part * rows_of_part(packed, call) * size

    @device
    def l_of_part(call: Any, at: Any, part: int, i: int) -> int:
        return l_of(call, at.slot, at.h, at.q_start + i) + part * rows_of_part(packed, call) * size

    return sums_of_part, m_of_part, l_of_part


def load_keys(c: Any, name: str, columns: int, pitch: int, to: int) -> Any:
    """``load_keys(on_chip, call, at, keys, stride, j0)``: the rows of K or V from key j0 on.

    Not paged, key 0 is at ``keys`` and the others follow.
    """
    row, place_of_key, load_tile = row_of(c, name), place_of(c), tile.load_tile(c, c.BC, columns, pitch, to)

    @device
    def row_of_key(call: Any, at: Any, j: int) -> Any:
        slot, t, exists = int64(0), int64(0), False
        if j < at.kv_length:  # the table has no more
            slot, t, exists = place_of_key(call, at, j)
        return row(call, slot, at.h_kv, t), exists

    load_rows, paged = tile.load_rows(c, c.BC, columns, pitch, to, row_of_key), c.PAGE

    @device
    def load_keys(on_chip: Any, call: Any, at: Any, keys: int, stride: int, j0: int) -> None:
        if paged:
            load_rows(on_chip, call, at, j0)
        else:
            load_tile(on_chip, keys + j0 * stride, stride, at.kv_length - j0)

    return load_keys


def forward(c: Any) -> Any:
    real, packed = c.real, c.PACKED
    BR, BC, D, DV, R, C, CV, SIDE = c.BR, c.BC, c.D, c.DV, c.R, c.C, c.CV, c.SIDE
    size, dropout, store = c.ELEM_BYTES, c.DROPOUT, STORE[c.REAL_TYPE]
    shape_s, shape_o, shape_r = (R, C), (R, CV), R
    K_AT = BR * c.PITCH_D
    V_AT = K_AT + BC * c.PITCH_D
    P_AT = V_AT + BC * c.PITCH_V
    of = Scores(c)
    next_keys, key_range = of.next_keys, of.key_range
    sequence_of, head_of = sequence(c), head(c)
    q_row, k_row, v_row, o_row, lse_of = (row_of(c, name) for name in ("q", "k", "v", "o", "lse"))
    thread_x, thread_y = tile.threads(c)
    clear_tiles, fill_o, fill_s = tile.clear_tiles(c), tile.fill(R, CV), tile.fill(R, C)
    load_q = tile.load_tile(c, BR, D, c.PITCH_D, 0)
    load_k, load_v = load_keys(c, "k", D, c.PITCH_D, K_AT), load_keys(c, "v", DV, c.PITCH_V, V_AT)
    add_scores = simt.product_nt(c, c.DEPTH_D, 0, c.PITCH_D, K_AT, c.PITCH_D)
    add_output = simt.product_nn(c, BC, DV, P_AT, c.PITCH_S, V_AT, c.PITCH_V)
    put_p, _ = tile.score_tile(c, P_AT)
    finish, step, drop_p, finish_l = finish_scores(c, of, P_AT), softmax_step(c), drop(c, P_AT), finish_row(c)
    sum_of_lanes, store_row, write_sums = tile.sum_of_lanes(c), tile.store_row(c, DV), tile.write_sums(c, DV)
    sums_of_part, m_of_part, l_of_part = places_of_part(c)
    commit_copies, await_copies = tile.copies(c)

    def fa2_forward(call: Any) -> None:
        on_chip = cuda.shared.array(0, real, alignment=16)
        # The last blocks first: under a causal mask they have the most keys. All of one head, so that its K and V
        # stay in L2; but of a grid so small that keys are shared out, first the last blocks of all heads.
        grid = int64(cuda.blockIdx.x)
        block, part, bh = grid % call.blocks, int64(0), grid // call.blocks
        if call.parts > 1:
            heads = call.B * call.Hq
            block, part, bh = grid // heads // call.parts, grid // heads % call.parts, grid % heads
        block = call.blocks - 1 - block
        s = sequence_of(call, bh // call.Hq)
        at = head_of(call, s, bh % call.Hq)
        i0 = block * BR
        rows_end = s.q_length if packed else call.Tq  # packed: the rows behind a sequence are another's
        if i0 >= rows_end:
            return

        O = cuda.local.array(shape_o, real)
        S = cuda.local.array(shape_s, real)
        m = cuda.local.array(shape_r, real)
        l = cuda.local.array(shape_r, real)
        alpha = cuda.local.array(shape_r, real)
        fill_o(O, real(0))
        for r in range(R):
            m[r] = -INFINITE
            l[r] = real(0)

        keys, values = k_row(call, s.slot, at.h_kv, s.k_start), v_row(call, s.slot, at.h_kv, s.k_start)
        k_stride, v_stride = call.k_row * size, call.v_row * size
        j_low, j_high = key_range(call, s, i0)
        parts = parts_of(call, j_low, j_high)
        if part >= parts:
            return
        j_low += part * call.part_keys
        if part < parts - 1:
            j_high = j_low + call.part_keys
        block_of_keys = next_keys(call, s, at.h, i0, j_low, j_high)
        j0, kind = block_of_keys.start, block_of_keys.kind

        # Load Q_i and the first K_j
        if kind != EMPTY:
            clear_tiles(on_chip)
            load_q(on_chip, q_row(call, s.slot, at.h, s.q_start + i0), call.q_row * size, s.q_length - i0)
            load_k(on_chip, call, at, keys, k_stride, j0)
            commit_copies()
        while kind != EMPTY:
            following = next_keys(call, s, at.h, i0, j0 + BC, j_high)
            await_copies()
            cuda.syncthreads()  # Q_i and K_j are there, and no thread reads V of the step before
            load_v(on_chip, call, at, values, v_stride, j0)
            commit_copies()

            # S = Q K^T
            fill_s(S, real(0))
            add_scores(S, on_chip)
            finish(call, at, S, on_chip, i0, j0, kind)

            # m_new = max(m, rowmax(S)); P = exp(S - m_new); l = alpha l + rowsum(P)
            step(S, m, l, alpha)
            put_p(on_chip, S)
            if dropout:
                drop_p(call, at, on_chip, i0, j0)
            await_copies()
            cuda.syncthreads()  # V_j and P are there, and no thread reads K_j any more
            if following.kind != EMPTY:
                load_k(on_chip, call, at, keys, k_stride, following.start)
            commit_copies()

            # O = alpha O + P V
            for r in range(R):
                for n in range(CV):
                    O[r, n] *= alpha[r]
            add_output(O, on_chip)
            j0, kind = following.start, following.kind

        # O = O / l, lse = m + log l; padding is 0 and -inf
        for r in range(R):
            i = i0 + thread_y() + SIDE * r
            total = sum_of_lanes(l[r])
            if parts > 1:  # fa2_forward_merge does the rest
                if i < s.q_length:
                    write_sums(sums_of_part(call, at, part, i), O, r, real(1))
                    if thread_x() == 0:
                        store(m_of_part(call, at, part, i), m[r])
                        store(l_of_part(call, at, part, i), total)
            elif i < rows_end:
                factor, lse = real(0), real(-INFINITE)
                empty = i >= s.q_length or total == real(0)
                if i < s.q_length:
                    factor, _, lse = finish_l(call, at, m[r], total)
                store_row(o_row(call, s.slot, at.h, s.q_start + i), O, r, factor, empty)
                if thread_x() == 0 and call.lse_data != 0:  # somebody asked for it
                    store(lse_of(call, s.slot, at.h, s.q_start + i), lse)

    return fa2_forward


def merge(c: Any) -> Any:
    """O, m and l of all parts -> O = O / l, lse. The grid is that of the forward kernel with one part."""
    real, packed, BR, DV, CV, SIDE = c.real, c.PACKED, c.BR, c.DV, c.CV, c.SIDE
    load, store, exp = LOAD[c.REAL_TYPE], STORE[c.REAL_TYPE], exponential(c)
    of, sequence_of, head_of, o_row, lse_of = Scores(c), sequence(c), head(c), row_of(c, "o"), row_of(c, "lse")
    key_range, thread_x, thread_y = of.key_range, *tile.threads(c)
    read_sums, store_row, finish_l = tile.read_sums(c, DV), tile.store_row(c, DV), finish_row(c)
    sums_of_part, m_of_part, l_of_part = places_of_part(c)
    shape_o = (1, CV)

    def fa2_forward_merge(call: Any) -> None:
        grid = int64(cuda.blockIdx.x)
        i0, bh = grid % call.blocks * BR, grid // call.blocks
        s = sequence_of(call, bh // call.Hq)
        at = head_of(call, s, bh % call.Hq)
        rows_end = least(s.q_length if packed else call.Tq, i0 + BR)
        j_low, j_high = key_range(call, s, i0)
        parts = parts_of(call, j_low, j_high)
        if parts == 1:
            return
        O = cuda.local.array(shape_o, real)
        more = cuda.local.array(shape_o, real)
        for i in range(i0 + thread_y(), rows_end, SIDE):
            m, l, factor, lse = real(-INFINITE), real(0), real(0), real(-INFINITE)
            for n in range(CV):
                O[0, n] = real(0)
            if i < s.q_length:
                for part in range(parts):
                    m = larger(m, load(m_of_part(call, at, part, i)))
                shift = real(0) if m == -INFINITE else m
                for part in range(parts):
                    weight = exp(load(m_of_part(call, at, part, i)) - shift)
                    read_sums(sums_of_part(call, at, part, i), more, 0)
                    l += weight * load(l_of_part(call, at, part, i))
                    for n in range(CV):
                        O[0, n] += weight * more[0, n]
                factor, l, lse = finish_l(call, at, m, l)
            store_row(o_row(call, s.slot, at.h, s.q_start + i), O, 0, factor, i >= s.q_length or l == real(0))
            if thread_x() == 0 and call.lse_data != 0:
                store(lse_of(call, s.slot, at.h, s.q_start + i), lse)

    return fa2_forward_merge
