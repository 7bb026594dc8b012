"""What both backward passes share beside dQ, dK and dV (side_gradients.cu). No atomics: two runs give the same bits.

row_deltas: delta = rowsum(dO * O) - dlse, one number for each row.
sink_gradient: dsinks[h] = sum over b, i of P_sink (dlse - gamma), P_sink = exp(sink - lse). A block owns one head.
bias_gradient: dbias = dS, summed over the axes along which bias broadcasts. A block owns a tile of bias (all rows or
all keys where it broadcasts over them) and computes S and dP again for everything that shares it.
On chip (bias_gradient): Q (Br, d), K (Bc, d), V (Bc, dv), dO (Br, dv), P (Br, Bc), dS (Br, Bc).
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float64, int64

from rawflash.backends.numba_cuda import gradient, tile
from rawflash.backends.numba_cuda.call import head, least, row_of, rows_in_line, sequence
from rawflash.backends.numba_cuda.intrinsics import get, put
from rawflash.backends.numba_cuda.numbers import INFINITE, LOAD, STORE, exponential
from rawflash.backends.numba_cuda.scores import Scores
from rawflash.backends.numba_cuda.visibility import EMPTY


def make_kernels(c: Any) -> dict[str, Any]:
    """The kernels of this file for the constants of a call."""
    kernels = {"row_deltas": row_deltas(c)}
    kernels |= {"sink_gradient": sink_gradient(c)} if c.SINKS else {}
    return kernels | ({"bias_gradient": bias_gradient(c)} if c.BIAS else {})


def row_deltas(c: Any) -> Any:
    real, DV, SIDE, ROWS, size, dlse_given = c.real, c.DV, c.SIDE, c.DELTA_ROWS, c.ELEM_BYTES, c.DLSE
    load, load_real, store = LOAD[c.TYPE], LOAD[c.REAL_TYPE], STORE[c.REAL_TYPE]
    sequence_of, o_row, do_row = sequence(c), row_of(c, "o"), row_of(c, "dout")
    dlse_of, delta_of, sum_of_lanes = row_of(c, "dlse"), row_of(c, "delta"), tile.sum_of_lanes(c)
    thread_x, thread_y = tile.threads(c)
    packed, in_line = c.PACKED, rows_in_line(c.DELTA_ROWS)

    def row_deltas(call: Any) -> None:
        grid = int64(cuda.blockIdx.x)
        bh, block = grid // call.blocks, grid % call.blocks
        b, h = bh // call.Hq, bh % call.Hq
        if packed:
            b, block = in_line(call, block)
        s = sequence_of(call, b)
        for y in range(thread_y(), ROWS, SIDE):
            i = block * ROWS + y
            gamma = real(0)
            if 0 <= i < s.q_length:
                O, dO = o_row(call, s.slot, h, s.q_start + i), do_row(call, s.slot, h, s.q_start + i)
                for x in range(thread_x(), DV, SIDE):
                    gamma += load(dO + x * size) * load(O + x * size)
            gamma = sum_of_lanes(gamma)
            if 0 <= i < s.q_length and thread_x() == 0:
                if dlse_given:
                    gamma -= load_real(dlse_of(call, s.slot, h, s.q_start + i))
                store(delta_of(call, s.slot, h, s.q_start + i), gamma)

    return row_deltas


def sink_gradient(c: Any) -> Any:
    real, THREADS, exp, load_real, store = c.real, c.THREADS, exponential(c), LOAD[c.REAL_TYPE], STORE["FLOAT64"]
    load_sink, sink_size, width = LOAD[c.SINK_TYPE], c.SINK_BYTES, 8
    sequence_of, lse_of, delta_of = sequence(c), row_of(c, "lse"), row_of(c, "delta")

    def sink_gradient(call: Any) -> None:
        part = cuda.shared.array(0, float64, alignment=16)
        h = int64(cuda.blockIdx.x)
        sink = real(load_sink(call.sinks + h * call.sinks_h * sink_size))
        sum = float64(0)
        if sink != -INFINITE:
            for b in range(call.B):
                s = sequence_of(call, b)
                for i in range(int64(cuda.threadIdx.x), s.q_length, THREADS):
                    above = sink - load_real(lse_of(call, s.slot, h, s.q_start + i))
                    P = exp(real(0) if above > real(0) else above)
                    sum -= float64(P) * float64(load_real(delta_of(call, s.slot, h, s.q_start + i)))
        put(part, cuda.threadIdx.x, sum)
        half = THREADS // 2
        while half > 0:
            cuda.syncthreads()  # the sums of the round before are there
            if cuda.threadIdx.x < half:
                put(part, cuda.threadIdx.x, get(part, cuda.threadIdx.x) + get(part, cuda.threadIdx.x + half))
            half //= 2
        if cuda.threadIdx.x == 0:
            store(call.dsinks + h * width, get(part, 0))

    return sink_gradient


def bias_gradient(c: Any) -> Any:
    real, size, width = c.real, c.ELEM_BYTES, c.REAL_BYTES
    BR, BC, D, DV, R, C, THREADS, pitch = c.BR, c.BC, c.D, c.DV, c.R, c.C, c.THREADS, c.PITCH_S
    over_rows, over_keys = bool(c.BIAS_OVER_ROWS), bool(c.BIAS_OVER_KEYS)
    WIDTH, HEIGHT = 1 if over_keys else BC, 1 if over_rows else BR
    shape_s, store = (R, C), STORE[c.REAL_TYPE]
    of, place = Scores(c), gradient.places(c)
    next_keys, DS_AT = of.next_keys, place.dS
    sequence_of, head_of = sequence(c), head(c)
    q_row, k_row, v_row, do_row = (row_of(c, name) for name in ("q", "k", "v", "dout"))
    clear_tiles, fill_s = tile.clear_tiles(c), tile.fill(R, C)
    load_q, load_k = (tile.load_tile(c, n, D, c.PITCH_D, to) for n, to in ((BR, place.Q), (BC, place.K)))
    load_do, load_v = (tile.load_tile(c, n, DV, c.PITCH_V, to) for n, to in ((BR, place.dO), (BC, place.V)))
    load_lse, load_delta = gradient.load_statistic(c, "lse"), gradient.load_statistic(c, "delta")
    products, put_gradients = gradient.products(c), gradient.put_score_gradients(c, of, False)
    put_ds, get_ds = tile.score_tile(c, DS_AT)
    commit_copies, await_copies = tile.copies(c)

    def bias_gradient(call: Any) -> None:
        on_chip = cuda.shared.array(0, real, alignment=16)
        # Which tile of bias, and which b, h, rows and keys have a share in it
        tiles_i = 1 if over_rows else (call.Tq + BR - 1) // BR
        tiles_j = 1 if over_keys else (call.Tk + BC - 1) // BC
        n = int64(cuda.blockIdx.x)
        tile_j, n = n % tiles_j, n // tiles_j
        tile_i, n = n % tiles_i, n // tiles_i
        bias_h, bias_b = n % call.bias_h_extent, n // call.bias_h_extent
        b_low, b_high = (int64(0), call.B) if call.bias_b_extent == 1 else (bias_b, bias_b + 1)
        h_low, h_high = (int64(0), call.Hq) if call.bias_h_extent == 1 else (bias_h, bias_h + 1)
        i_low = int64(0) if over_rows else tile_i * BR
        i_high = call.Tq if over_rows else least(i_low + BR, call.Tq)
        j_low = int64(0) if over_keys else tile_j * BC
        j_high = call.Tk if over_keys else least(j_low + BC, call.Tk)

        sum = cuda.local.array(shape_s, real)
        S = cuda.local.array(shape_s, real)
        dP = cuda.local.array(shape_s, real)
        lse = cuda.local.array(R, real)
        delta = cuda.local.array(R, real)
        fill_s(sum, real(0))
        clear_tiles(on_chip)
        for b in range(b_low, b_high):
            s = sequence_of(call, b)
            for h in range(h_low, h_high):
                at = head_of(call, s, h)
                for i0 in range(i_low, least(i_high, s.q_length), BR):
                    load_lse(call, at, i0, lse)
                    load_delta(call, at, i0, delta)
                    i, count = s.q_start + i0, s.q_length - i0
                    load_q(on_chip, q_row(call, s.slot, h, i), call.q_row * size, count)
                    load_do(on_chip, do_row(call, s.slot, h, i), call.dout_row * size, count)
                    commit_copies()
                    j_end = least(j_high, s.kv_length)
                    block = next_keys(call, s, h, i0, j_low, j_end)
                    while block.kind != EMPTY:
                        j0 = block.start
                        j, keys = s.k_start + j0, s.kv_length - j0
                        load_k(on_chip, k_row(call, s.slot, at.h_kv, j), call.k_row * size, keys)
                        load_v(on_chip, v_row(call, s.slot, at.h_kv, j), call.v_row * size, keys)
                        commit_copies()
                        await_copies()
                        cuda.syncthreads()  # the tiles are there
                        products(S, dP, on_chip)
                        put_gradients(call, at, S, dP, lse, delta, on_chip, i0, j0, block.kind)
                        get_ds(on_chip, dP)
                        for r in range(R):
                            for m in range(C):
                                sum[r, m] += dP[r, m]
                        cuda.syncthreads()  # no thread reads the tiles any more
                        block = next_keys(call, s, h, i0, j0 + BC, j_end)
                    await_copies()
                    cuda.syncthreads()  # also where no tile was seen: Q_i and dO_i may be overwritten

        # Sum over the broadcast axes of the tile: each thread takes a row or a column of it, in on-chip memory
        target = call.dbias + (bias_b * call.bias_h_extent + bias_h) * call.bias_i_extent * call.bias_j_extent * width
        put_ds(on_chip, sum)
        cuda.syncthreads()  # the whole tile is there
        if over_keys:
            for y in range(cuda.threadIdx.x, BR, THREADS):
                total = get(on_chip, DS_AT + y * pitch)
                for x in range(1, BC):
                    total += get(on_chip, DS_AT + y * pitch + x)
                put(on_chip, DS_AT + y * pitch, total)
            cuda.syncthreads()  # the first column holds the sums of the rows
        if over_rows:
            for x in range(cuda.threadIdx.x, WIDTH, THREADS):
                total = get(on_chip, DS_AT + x)
                for y in range(1, BR):
                    total += get(on_chip, DS_AT + y * pitch + x)
                put(on_chip, DS_AT + x, total)
            cuda.syncthreads()  # the first row holds the sums of the columns
        for m in range(cuda.threadIdx.x, HEIGHT * WIDTH, THREADS):
            y, x = m // WIDTH, m % WIDTH
            if (over_rows or i_low + y < i_high) and (over_keys or j_low + x < j_high):
                row = 0 if over_rows else i_low + y
                column = 0 if over_keys else j_low + x
                store(target + (row * call.bias_j_extent + column) * width, get(on_chip, DS_AT + y * pitch + x))

    return bias_gradient
