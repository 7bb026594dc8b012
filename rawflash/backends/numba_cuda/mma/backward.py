"""FlashAttention-2 on tensor cores, backward pass (Dao 2024, algorithm 2): fa2_backward_keys.

A block of threads owns Bc keys of one key head, a warp 16 of them, and runs over the Q blocks of all query heads that
share it. A warp computes S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T lie in its registers as factors of
dV += P^T dO and dK += dS^T Q; dS alone passes through on-chip memory, for dQ_i += dS K.

On chip: K (Bc, d), V (Bc, d), dS^T (Bc, Br), and once or twice, for this step and the next, Q (Br, d), dO (Br, d), lse,
delta (Br); in registers P (Br, Bc), dK (Bc, d), dV (Bc, d), dQ (Br, d).
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, int32, int64, uint32

from rawflash.backends.numba_cuda.call import clamp, row_of, sequence, sums_of
from rawflash.backends.numba_cuda.intrinsics import (as_double, await_copies, commit_copies, exp2_approximately,
                                                     ldmatrix, ldmatrix_transposed, least_or_nan, multiply_add,
                                                     quotient, shared_base, shared_load2f, shared_store,
                                                     shared_store1f)  # fmt: skip
from rawflash.backends.numba_cuda.memory import atomic_add_float32, atomic_add_float32x2, device, load_float32
from rawflash.backends.numba_cuda.mma import WARP_KEYS, tile
from rawflash.backends.numba_cuda.mma.tile import FAR, lane_columns, lane_rows, narrow
from rawflash.backends.numba_cuda.numbers import INFINITE, LOG2E
from rawflash.backends.numba_cuda.scores import row_range

HIDDEN = float32(-INFINITE)
WARP_COLUMNS = 32  # of dQ


def add_pair(c: Any) -> Any:
    """``add_pair(address, x, y, column)``: to two neighbours of dQ, the first in this column."""
    D, pairs = c.D, c.D % 2 == 0
    vectors, whole = pairs and c.VECTOR_ADDS, c.D % WARP_COLUMNS == 0

    @device
    def add_pair(address: int, x: Any, y: Any, column: int) -> None:
        if whole or column < D:
            if vectors:
                atomic_add_float32x2(address, (x, y))
            else:
                atomic_add_float32(address, x)
                if pairs or column + 1 < D:
                    atomic_add_float32(address + 4, y)

    return add_pair


def keys(c: Any) -> Any:
    BM, BN, D, banded, packed, size = c.BR, c.BC, c.D, c.BAND, c.PACKED, c.ELEM_BYTES
    of = tile.shape(c)
    row_bytes, chunks = of.ROW, of.CHUNKS
    warps = BN // WARP_KEYS
    threads, across = 32 * warps, of.COLUMNS // WARP_COLUMNS  # dQ: warps side by side
    QR = BM * across // warps  # dQ: rows of a warp
    QM = QR // 16
    ds_bytes = BM * 2
    KS, NS, NO, MS, TS = of.WIDTH // 16, BM // 8, of.WIDTH // 8, BM // 16, BN // 16
    BM_LOG = BM.bit_length() - 1
    S_SIZE, O_SIZE, H_SIZE, Q_SIZE, A_SIZE = NS * 4, NO * 4, MS * 4, QM * 16, QM * 4
    # Where the tiles begin; Q, dO and the statistics are there for one step or for two
    V_AT, Q_AT, once = BN * row_bytes, 2 * BN * row_bytes, BM * (2 * row_bytes + 8)
    stages = (c.TILE_BYTES - Q_AT - BN * ds_bytes) // once
    STAGE, STATS = (BM * row_bytes, BM * 8) if stages == 2 else (0, 0)  # bytes from one step to the next
    DO_AT = Q_AT + stages * BM * row_bytes
    DS_AT = DO_AT + stages * BM * row_bytes
    STAT_AT = DS_AT + BN * ds_bytes
    assert STAT_AT + stages * BM * 8 == c.TILE_BYTES and stages in (1, 2)
    assert BM in (64, 128) and threads >= 2 * BM and QM in (1, 2, 4)
    mma, pack = tile.products(c)
    load_k, _ = tile.load_tile(c, BN, threads)
    load_q, _ = tile.load_tile(c, BM, threads)
    store, add_two = tile.store_rows(c, 1), add_pair(c)
    sequence_of, rows_of, sums = sequence(c), row_range(c), sums_of(c, D)
    q_row, k_row, v_row, do_row, dk_row, dv_row, lse_of, delta_of = (
        row_of(c, name) for name in ("q", "k", "v", "dout", "dk", "dv", "lse", "delta")
    )

    @device
    def scores(S: Any, aa: int, ba: int) -> None:
        """S = A B^T over d: the warp's 16 rows of A, all BM of B."""
        for n in range(S_SIZE):
            S[n] = float32(0)
        for s in range(KS):
            a0, a1, a2, a3 = ldmatrix(uint32((aa ^ ((s & 3) * 32)) + (s >> 2) * 128))
            for n in range(NS // 2):
                b0, b1, b2, b3 = ldmatrix(uint32((ba ^ ((s & 3) * 32)) + n * 16 * row_bytes + (s >> 2) * 128))
                at = 8 * n
                S[at], S[at + 1], S[at + 2], S[at + 3] = mma(
                    a0, a1, a2, a3, b0, b1, S[at], S[at + 1], S[at + 2], S[at + 3])
                S[at + 4], S[at + 5], S[at + 6], S[at + 7] = mma(
                    a0, a1, a2, a3, b2, b3, S[at + 4], S[at + 5], S[at + 6], S[at + 7])

    @device
    def hide(S: Any, first: int, end: int, keys: int, value: Any) -> None:
        """``value`` for rows that do not see the lane's keys: before ``first``, from ``end`` on (both of its first
        key), relative to the lane's first row; ``keys`` of the lane's keys exist."""
        for half in range(2):
            low, high = int32(-FAR), int32(FAR)
            if banded:
                low, high = int32(first + half * 8), int32(end + half * 8)
            if half * 8 >= keys:
                high = int32(-FAR)
            for n in range(NS):
                for e in range(2):
                    if int32(8 * n + e) < low or int32(8 * n + e) >= high:
                        S[4 * n + half * 2 + e] = value

    @device
    def pack_all(H: Any, S: Any) -> None:
        """H[4 s + e] are columns 16 s to 16 s + 15, as a factor."""
        for n in range(H_SIZE):
            H[n] = pack(S[2 * n], S[2 * n + 1])

    @device
    def add_product(X: Any, H: Any, ba: int) -> None:
        """X += H B: the warp's 16 x BM numbers, BM x d ones on chip."""
        for s in range(MS):
            a = 4 * s
            for n in range(NO // 2):
                b0, b1, b2, b3 = ldmatrix_transposed(
                    uint32((ba ^ ((n & 3) * 32)) + s * 16 * row_bytes + (n >> 2) * 128)
                )
                at = 8 * n
                X[at], X[at + 1], X[at + 2], X[at + 3] = mma(
                    H[a], H[a + 1], H[a + 2], H[a + 3], b0, b1, X[at], X[at + 1], X[at + 2], X[at + 3])
                X[at + 4], X[at + 5], X[at + 6], X[at + 7] = mma(
                    H[a], H[a + 1], H[a + 2], H[a + 3], b2, b3, X[at + 4], X[at + 5], X[at + 6], X[at + 7])

    @device
    def query_product(X: Any, A: Any, da: int, ka: int) -> None:
        """X = dS K: QR rows, 32 columns."""
        for n in range(Q_SIZE):
            X[n] = float32(0)
        for s in range(TS):
            for i in range(QM):
                A[4 * i], A[4 * i + 1], A[4 * i + 2], A[4 * i + 3] = ldmatrix_transposed(
                    uint32((da ^ (i * 32)) + s * 16 * ds_bytes)
                )
            for n in range(2):
                b0, b1, b2, b3 = ldmatrix_transposed(uint32((ka ^ (n * 32)) + s * 16 * row_bytes))
                for i in range(QM):
                    at, a = (i * 4 + 2 * n) * 4, 4 * i
                    X[at], X[at + 1], X[at + 2], X[at + 3] = mma(
                        A[a], A[a + 1], A[a + 2], A[a + 3], b0, b1, X[at], X[at + 1], X[at + 2], X[at + 3])
                    X[at + 4], X[at + 5], X[at + 6], X[at + 7] = mma(
                        A[a], A[a + 1], A[a + 2], A[a + 3], b2, b3, X[at + 4], X[at + 5], X[at + 6], X[at + 7])

    @device
    def statistic(call: Any, s: Any, h: int, i0: int, tid: int) -> Any:
        """A thread's number of the step's lse, in powers of two, or delta. A row that does not exist or sees no key has
        P = 0 by an lse of inf."""
        x = float32(0)
        if tid < BM:
            x = -HIDDEN
            if i0 + tid < s.q_length:
                x = load_float32(lse_of(call, s.slot, h, s.q_start + i0 + tid)) * LOG2E
                if x == HIDDEN:
                    x = -HIDDEN
        elif tid < 2 * BM:
            if i0 + tid - BM < s.q_length:
                x = load_float32(delta_of(call, s.slot, h, s.q_start + i0 + tid - BM))
        return x

    def fa2_backward_keys(call: Any) -> None:
        grid = int64(cuda.blockIdx.x)
        bh = quotient(grid, call.blocks)
        b, group = quotient(bh, call.Hkv), quotient(call.Hq, call.Hkv)
        s = sequence_of(call, b)
        h_kv = bh - b * call.Hkv
        h_first = h_kv * group
        j0 = (grid - bh * call.blocks) * BN
        keys_end = s.kv_length if packed else call.Tk
        if j0 >= keys_end:
            return
        scale = float32(as_double(call.scale)) * LOG2E
        tid = int32(cuda.threadIdx.x)
        warp, lane = int32(tid >> 5), int32(tid & 31)
        g, t = int32(lane >> 2), int32(lane & 3)

        # Blocks of rows from i_low on: `steps` of each head are to be seen, and those from `whole` to `whole_end` see
        # all keys. In 32 bits: which rows see the lane's first key.
        i_low, i_high = rows_of(call, s, j0)
        steps = int32((int32(max(i_high - i_low, int64(0))) + BM - 1) >> BM_LOG)
        count = int32(int32(group) * steps)
        whole, whole_end = int32(0), steps
        first, end, keys = int32(-FAR), int32(FAR), narrow(s.kv_length - j0 - warp * WARP_KEYS - g)
        if banded:
            low, high = j0 - s.offset - call.band_upper - i_low, j0 - s.offset - call.band_lower + 1 - i_low
            whole = int32((narrow(clamp(low + (BN - 1), 0, FAR)) + BM - 1) >> BM_LOG)
            if s.q_length - i_low > high:
                whole_end = int32(narrow(clamp(high, 0, FAR)) >> BM_LOG)
            first, end = narrow(low + warp * WARP_KEYS + g), narrow(high + warp * WARP_KEYS + g)
        if j0 + BN > s.kv_length:
            whole_end = int32(0)

        # What this thread copies, and the rows that its lane gives to ldmatrix
        base = int32(shared_base())
        row, chunk = int32(tid // chunks), int32(tid % chunks)
        columns = int32(D - chunk * 8)
        to = int32(base + row * row_bytes + ((chunk ^ (row & 7)) << 4))
        q_stride, do_stride = call.q_row * size, call.dout_row * size
        q_place = q_row(call, s.slot, h_first, s.q_start + i_low + row) + chunk * 16
        do_place = do_row(call, s.slot, h_first, s.q_start + i_low + row) + chunk * 16
        q_head, do_head = call.q_head * size, call.dout_head * size
        rows_left = narrow(s.q_length - i_low)
        ka = int32(base + warp * (WARP_KEYS * row_bytes) + lane_rows(lane, row_bytes))
        va = int32(ka + V_AT)
        # dQ: this warp's rows from QR wm and columns from 32 wn on
        wn, wm = int32(warp % across), int32(warp // across)
        ds_chunk = int32(wm * (QR // 8))
        da = int32(base + DS_AT + ((lane & 7) + ((lane >> 4) << 3)) * ds_bytes + (ds_chunk >> 3) * 128
                   + ((((lane >> 3) & 1) ^ (lane & 7) ^ (ds_chunk & 7)) << 4))  # fmt: skip
        kt = int32(base + (lane & 15) * row_bytes + (wn >> 1) * 128
                   + (((lane >> 4) ^ (lane & 7) ^ ((wn & 1) * 4)) << 4))  # fmt: skip
        ds_to = int32(base + DS_AT + (warp * WARP_KEYS + g) * ds_bytes + t * 4)
        dq_row, dq_column = int32(wm * QR + g), int32(wn * WARP_COLUMNS + 2 * t)
        dq_place = sums(call, s.slot, h_first, s.q_start + i_low + dq_row) + dq_column * 4
        dq_head = call.rows_q * (D * 4)

        S = cuda.local.array(S_SIZE, float32)
        P = cuda.local.array(S_SIZE, float32)
        H = cuda.local.array(H_SIZE, uint32)
        A = cuda.local.array(A_SIZE, uint32)
        X = cuda.local.array(Q_SIZE, float32)
        dK = cuda.local.array(O_SIZE, float32)
        dV = cuda.local.array(O_SIZE, float32)
        factor = cuda.local.array(2, float32)
        for n in range(O_SIZE):
            dK[n] = float32(0)
            dV[n] = float32(0)

        # Load K_j, V_j and the first Q_i, dO_i
        m, h = int32(0), int32(0)
        if count > 0:
            left = narrow(s.kv_length - j0 - row)
            load_k(to, k_row(call, s.slot, h_kv, s.k_start + j0 + row) + chunk * 16, call.k_row * size, left, columns)
            load_k(int32(to + V_AT), v_row(call, s.slot, h_kv, s.k_start + j0 + row) + chunk * 16, call.v_row * size,
                   left, columns)  # fmt: skip
            left = int32(rows_left - row)
            load_q(int32(to + Q_AT), q_place, q_stride, left, columns)
            load_q(int32(to + DO_AT), do_place, do_stride, left, columns)
            if tid < 2 * BM:
                shared_store1f(uint32(base + STAT_AT + tid * 4), statistic(call, s, h_first, i_low, tid))
        commit_copies()
        for step in range(count):
            stage, stats = int32((step & 1) * STAGE), int32((step & 1) * STATS)
            next_m, next_h = int32(m + 1), h
            if next_m == steps:
                next_m, next_h = int32(0), int32(h + 1)
            next_i = int64(next_m * BM)
            left = int32(rows_left - next_m * BM - row)
            await_copies()
            cuda.syncthreads()  # Q_i and dO_i are there; no thread reads those and dS of the step before
            if stages == 2:
                if step + 1 < count:
                    load_q(int32(to + Q_AT + (STAGE - stage)), q_place + next_h * q_head + next_i * q_stride, q_stride,
                           left, columns)  # fmt: skip
                    load_q(int32(to + DO_AT + (STAGE - stage)), do_place + next_h * do_head + next_i * do_stride,
                           do_stride, left, columns)  # fmt: skip
                commit_copies()
            qs, dos = int32(base + Q_AT + stage), int32(base + DO_AT + stage)
            stat_at = int32(base + STAT_AT + stats + t * 8)

            # S = Q K^T, P = exp(S - lse)
            scores(P, ka, int32(qs + lane_columns(lane, row_bytes)))
            partial = m < whole or m >= whole_end
            hidden = int32(m * BM + 2 * t)
            if partial:
                hide(P, int32(first - hidden), int32(end - hidden), keys, HIDDEN)
            for n in range(NS):
                l0, l1 = shared_load2f(uint32(stat_at + n * 32))
                for half in range(2):
                    p = 4 * n + 2 * half  # P <= 1, whatever was rounded; NaN stays NaN
                    P[p] = exp2_approximately(least_or_nan(multiply_add(P[p], scale, -l0), float32(0)))
                    P[p + 1] = exp2_approximately(least_or_nan(multiply_add(P[p + 1], scale, -l1), float32(0)))
            pack_all(H, P)

            # dP = dO V^T, dV += P^T dO; dS = P (dP - delta)
            scores(S, va, int32(dos + lane_columns(lane, row_bytes)))
            add_product(dV, H, int32(dos + lane_rows(lane, row_bytes)))
            if partial:  # dP of a hidden key may have overflown
                hide(S, int32(first - hidden), int32(end - hidden), keys, float32(0))
            for n in range(NS):
                d0, d1 = shared_load2f(uint32(stat_at + BM * 4 + n * 32))
                for half in range(2):
                    p = 4 * n + 2 * half
                    S[p] = P[p] * (S[p] - d0)
                    S[p + 1] = P[p + 1] * (S[p + 1] - d1)
            pack_all(H, S)
            for n in range(NS):
                for half in range(2):
                    shared_store(uint32(ds_to + half * 8 * ds_bytes + (n >> 3) * 128 + (((n & 7) ^ g) << 4)),
                                 H[2 * n + half])  # fmt: skip

            # dK += dS^T Q
            add_product(dK, H, int32(qs + lane_rows(lane, row_bytes)))
            cuda.syncthreads()  # dS is there, and no thread reads Q_i and dO_i any more
            if step + 1 < count:
                if stages == 1:
                    load_q(int32(to + Q_AT), q_place + next_h * q_head + next_i * q_stride, q_stride, left, columns)
                    load_q(int32(to + DO_AT), do_place + next_h * do_head + next_i * do_stride, do_stride, left,
                           columns)  # fmt: skip
                if tid < 2 * BM:
                    shared_store1f(uint32(base + STAT_AT + (STATS - stats) + tid * 4),
                                   statistic(call, s, h_first + next_h, i_low + next_i, tid))  # fmt: skip
            if stages == 1:
                commit_copies()

            # dQ_i += dS K
            query_product(X, A, da, kt)
            into = dq_place + h * dq_head + int64(m * BM) * (D * 4)
            left = int32(rows_left - m * BM - dq_row)
            for i in range(QM):
                for half in range(2):
                    if i * 16 + half * 8 < left:
                        for n in range(4):
                            x = (i * 4 + n) * 4 + half * 2
                            add_two(into + ((i * 16 + half * 8) * D + n * 8) * 4, X[x], X[x + 1],
                                    int32(dq_column + n * 8))  # fmt: skip
            m, h = next_m, next_h
        await_copies()
        cuda.syncthreads()  # no thread reads K_j and V_j any more

        # Write dK_j, dV_j
        own = int32(base + warp * (WARP_KEYS * row_bytes))
        j0 += warp * WARP_KEYS
        full, exist = narrow(s.kv_length - j0), narrow(keys_end - j0)
        for half in range(2):
            factor[half] = float32(as_double(call.scale))
        store(dK, factor, own, dk_row(call, s.slot, h_kv, s.k_start + j0), call.dk_row * size, full, exist, lane)
        for half in range(2):
            factor[half] = float32(1)
        store(dV, factor, int32(own + V_AT), dv_row(call, s.slot, h_kv, s.k_start + j0), call.dv_row * size, full,
              exist, lane)  # fmt: skip

    return fa2_backward_keys
