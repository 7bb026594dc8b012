"""FlashAttention-2 on tensor cores, forward pass (Dao 2024, algorithm 1).

A block of threads owns Br rows of one query head, a warp Br / 4 of them, and goes through the blocks of keys from the
last to the first: that of the padding and, under a causal mask, of the diagonal is then the first.

On chip: Q (Br, d), K (Bc, d), V (Bc, d); in registers S (Br, Bc), P, which are the factors of P V as they lie there,
O (Br, d), m, l. Read per step: K_j and V_j, each while the other's product runs. Written once: O_i, lse_i.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, int32, int64, uint32

from rawflash.backends.numba_cuda.call import clamp, least, row_of, sequence
from rawflash.backends.numba_cuda.intrinsics import (any_greater, await_copies, commit_copies, exchange,
                                                     exp2_approximately, greater, ldmatrix, ldmatrix_transposed,
                                                     quotient, shared_base)  # fmt: skip
from rawflash.backends.numba_cuda.memory import device, store_float32
from rawflash.backends.numba_cuda.mma import FORWARD_WARPS, tile
from rawflash.backends.numba_cuda.mma.tile import FAR, head_of, lane_columns, lane_rows, narrow
from rawflash.backends.numba_cuda.numbers import INFINITE, LOG2E
from rawflash.backends.numba_cuda.scores import key_range
from rawflash.backends.numba_cuda.softmax import finish_row

HIDDEN = float32(-INFINITE)
SMALLEST = float32(1.17549435e-38)  # normal number
GROWTH = float32(8)  # powers of two by which P may exceed 1 before m follows


def softmax(c: Any, MT: int, NS: int, NO: int) -> Any:
    """``softmax(S, O, m, l, top, scale)``: S becomes P = 2^(scale (S - m)); O, m and l follow.

    m moves only when a row's maximum is far above it, as O and l are relative to any m; what is stored of them is a
    quotient. ``scale`` is that of a power of two, which is cheaper than one of e, and positive.
    """

    @device
    def softmax(S: Any, O: Any, m: Any, l: Any, top: Any, scale: Any) -> None:
        excess = HIDDEN
        for i in range(MT):
            for half in range(2):
                r = 2 * i + half
                at = i * NS * 4 + half * 2
                highest = m[r]
                for n in range(NS):
                    highest = greater(highest, greater(S[at + 4 * n], S[at + 4 * n + 1]))
                highest = greater(highest, exchange(highest, 1))
                highest = greater(highest, exchange(highest, 2))
                top[r] = highest
                excess = greater(excess, highest - m[r])  # NaN while nothing was seen, which is dropped
        if any_greater(excess * scale, GROWTH):
            for i in range(MT):
                for half in range(2):
                    r = 2 * i + half
                    shift = top[r]
                    if top[r] == HIDDEN:
                        shift = float32(0)
                    alpha = exp2_approximately((m[r] - shift) * scale)
                    m[r] = top[r]
                    l[r] *= alpha
                    for n in range(NO):
                        O[(i * NO + n) * 4 + half * 2] *= alpha
                        O[(i * NO + n) * 4 + half * 2 + 1] *= alpha
        for i in range(MT):
            for half in range(2):
                r = 2 * i + half
                at = i * NS * 4 + half * 2
                shift = m[r]
                if m[r] == HIDDEN:  # a row that has seen no key: 2^(-inf - 0) is 0
                    shift = float32(0)
                for n in range(NS):
                    for e in range(2):
                        # The difference first: of large scores a product would be rounded by more than 1
                        P = exp2_approximately((S[at + 4 * n + e] - shift) * scale)
                        S[at + 4 * n + e] = P
                        l[r] += P

    return softmax


def forward(c: Any) -> Any:
    BR, BC, D, banded, packed, size = c.BR, c.BC, c.D, c.BAND, c.PACKED, c.ELEM_BYTES
    threads, MT = 32 * FORWARD_WARPS, BR // (16 * FORWARD_WARPS)
    of = tile.shape(c)
    row_bytes, chunks = of.ROW, of.CHUNKS
    KS, NS, NO = of.WIDTH // 16, BC // 8, of.WIDTH // 8  # pieces along d of Q K^T; of 8 columns of S and of O
    BC_LOG = BC.bit_length() - 1
    keep_q = MT == 1  # in registers, where there are enough
    S_SIZE, O_SIZE, A_SIZE, Q_SIZE, ROWS = MT * NS * 4, MT * NO * 4, MT * 4, MT * KS * 4 if keep_q else 4, MT * 2
    K_AT, V_AT = BR * row_bytes, (BR + BC) * row_bytes
    assert V_AT + BC * row_bytes == c.TILE_BYTES
    assert BC == 1 << BC_LOG
    mma, pack = tile.products(c)
    load_q, _ = tile.load_tile(c, BR, threads)
    load_last, load_whole = tile.load_tile(c, BC, threads)
    softmax_step, finish_l, store = softmax(c, MT, NS, NO), finish_row(c), tile.store_rows(c, MT)
    sequence_of, keys_of = sequence(c), key_range(c)
    q_row, k_row, v_row, o_row, lse_of = (row_of(c, name) for name in ("q", "k", "v", "o", "lse"))

    @device
    def pieces_of_q(A: Any, first: int, qa: int, s: int) -> None:
        """Columns 16 s to 16 s + 15 of the warp's rows of Q."""
        for i in range(MT):
            a = first + 4 * i
            A[a], A[a + 1], A[a + 2], A[a + 3] = ldmatrix(
                uint32((qa ^ ((s & 3) * 32)) + i * 16 * row_bytes + (s >> 2) * 128)
            )

    @device
    def scores(S: Any, Q: Any, A: Any, qa: int, ka: int) -> None:
        """S = Q K^T."""
        for n in range(S_SIZE):
            S[n] = float32(0)
        for s in range(KS):
            if keep_q:
                for i in range(MT):
                    for e in range(4):
                        A[4 * i + e] = Q[(s * MT + i) * 4 + e]
            else:
                pieces_of_q(A, 0, qa, s)
            for n in range(NS // 2):
                b0, b1, b2, b3 = ldmatrix(uint32((ka ^ ((s & 3) * 32)) + n * 16 * row_bytes + (s >> 2) * 128))
                for i in range(MT):
                    at, a = (i * NS + 2 * n) * 4, 4 * i
                    S[at], S[at + 1], S[at + 2], S[at + 3] = mma(
                        A[a], A[a + 1], A[a + 2], A[a + 3], b0, b1, S[at], S[at + 1], S[at + 2], S[at + 3])
                    S[at + 4], S[at + 5], S[at + 6], S[at + 7] = mma(
                        A[a], A[a + 1], A[a + 2], A[a + 3], b2, b3, S[at + 4], S[at + 5], S[at + 6], S[at + 7])

    @device
    def hide(S: Any, first: int, end: int, keys: int) -> None:
        """-inf for keys that the lane's rows do not see: before ``first``, from ``end`` on (both of its first row), and
        from ``keys`` on; all three relative to the lane's first key."""
        for i in range(MT):
            for half in range(2):
                low, high = int32(-FAR), int32(keys)
                if banded:
                    low = int32(first + i * 16 + half * 8)
                    high = min(high, int32(end + i * 16 + half * 8))
                for n in range(NS):
                    for e in range(2):
                        if int32(8 * n + e) < low or int32(8 * n + e) >= high:
                            S[(i * NS + n) * 4 + half * 2 + e] = HIDDEN

    @device
    def add_output(O: Any, S: Any, A: Any, va: int) -> None:
        """O += P V."""
        for s in range(BC // 16):
            for i in range(MT):
                at = (i * NS + 2 * s) * 4
                for e in range(4):
                    A[4 * i + e] = pack(S[at + 2 * e], S[at + 2 * e + 1])
            for n in range(NO // 2):
                b0, b1, b2, b3 = ldmatrix_transposed(
                    uint32((va ^ ((n & 3) * 32)) + s * 16 * row_bytes + (n >> 2) * 128)
                )
                for i in range(MT):
                    at, a = (i * NO + 2 * n) * 4, 4 * i
                    O[at], O[at + 1], O[at + 2], O[at + 3] = mma(
                        A[a], A[a + 1], A[a + 2], A[a + 3], b0, b1, O[at], O[at + 1], O[at + 2], O[at + 3])
                    O[at + 4], O[at + 5], O[at + 6], O[at + 7] = mma(
                        A[a], A[a + 1], A[a + 2], A[a + 3], b2, b3, O[at + 4], O[at + 5], O[at + 6], O[at + 7])

    def fa2_forward(call: Any) -> None:
        # The last blocks first: under a causal mask they have the most keys
        grid = int64(cuda.blockIdx.x)
        bh = quotient(grid, call.blocks)
        b, block = quotient(bh, call.Hq), call.blocks - 1 - (grid - bh * call.blocks)
        s = sequence_of(call, b)
        at = head_of(call, s, bh - b * call.Hq)
        i0 = block * BR
        rows_end = s.q_length if packed else call.Tq  # packed: the rows behind a sequence are another's
        if i0 >= rows_end:
            return
        tid = int32(cuda.threadIdx.x)
        warp, lane = int32(tid >> 5), int32(tid & 31)
        t, y = int32(lane & 3), int32((tid >> 5) * (MT * 16) + (lane >> 2))  # the lane's first column and row of S

        # Blocks of keys from j_low on, of which `tiles` are to be seen by some row, and those from `whole` to
        # `whole_end` by all rows. In 32 bits: which keys the lane's first row sees.
        j_low, j_high = keys_of(call, s, i0)
        tiles = int32((int32(max(j_high - j_low, int64(0))) + BC - 1) >> BC_LOG)
        whole, whole_end = int32(0), int32(narrow(s.kv_length - j_low) >> BC_LOG)
        first, end, keys = int32(-FAR), int32(FAR), narrow(s.kv_length - j_low)
        if banded:
            lower, upper = i0 + s.offset + call.band_lower - j_low, i0 + s.offset + call.band_upper + 1 - j_low
            last = least(int64(BR), s.q_length - i0) - 1
            whole = int32((narrow(clamp(lower + last, 0, FAR)) + BC - 1) >> BC_LOG)
            whole_end = min(whole_end, int32(narrow(clamp(upper, 0, FAR)) >> BC_LOG))
            first, end = narrow(lower + y), narrow(upper + y)

        # What this thread copies, and the rows that its lane gives to ldmatrix
        base = int32(shared_base())
        row, chunk = int32(tid // chunks), int32(tid % chunks)
        columns = int32(D - chunk * 8)
        to = int32(base + row * row_bytes + ((chunk ^ (row & 7)) << 4))
        k_stride, v_stride = call.k_row * size, call.v_row * size
        j_last = j_low + int64((tiles - 1) * BC) + row
        k_place = k_row(call, s.slot, at.h_kv, s.k_start + j_last) + chunk * 16
        v_place = v_row(call, s.slot, at.h_kv, s.k_start + j_last) + chunk * 16
        qa = int32(base + warp * (MT * 16 * row_bytes) + lane_rows(lane, row_bytes))
        ka = int32(base + K_AT + lane_columns(lane, row_bytes))
        va = int32(base + V_AT + lane_rows(lane, row_bytes))

        O = cuda.local.array(O_SIZE, float32)
        S = cuda.local.array(S_SIZE, float32)
        Q = cuda.local.array(Q_SIZE, uint32)
        A = cuda.local.array(A_SIZE, uint32)
        m = cuda.local.array(ROWS, float32)
        l = cuda.local.array(ROWS, float32)
        top = cuda.local.array(ROWS, float32)
        for n in range(O_SIZE):
            O[n] = float32(0)
        for r in range(ROWS):
            m[r] = HIDDEN
            l[r] = float32(0)
        scale = float32(at.scale * LOG2E)

        # Load Q_i and the last K_j, V_j
        if tiles > 0:
            count = narrow(s.kv_length - j_last)
            load_q(to, q_row(call, s.slot, at.h, s.q_start + i0 + row) + chunk * 16, call.q_row * size,
                   narrow(s.q_length - i0 - row), columns)  # fmt: skip
            load_last(int32(to + K_AT), k_place, k_stride, count, columns)
            load_last(int32(to + V_AT), v_place, v_stride, count, columns)
        commit_copies()
        if keep_q:
            await_copies()
            cuda.syncthreads()  # Q_i is there
            if tiles > 0:
                for n in range(KS):
                    pieces_of_q(Q, n * MT * 4, qa, n)
        for n in range(tiles):
            j = int32(tiles - 1 - n)
            await_copies()
            cuda.syncthreads()  # K_j is there, and no thread reads V of the step before
            if n > 0:
                load_whole(int32(to + V_AT), v_place, v_stride, columns)
            commit_copies()
            v_place -= BC * v_stride

            # S = Q K^T
            scores(S, Q, A, qa, ka)
            if j < whole or j >= whole_end:
                left = int32(j * BC + 2 * t)
                hide(S, int32(first - left), int32(end - left), int32(keys - left))
            await_copies()
            cuda.syncthreads()  # V_j is there, and no thread reads K_j any more
            k_place -= BC * k_stride
            if j > 0:
                load_whole(int32(to + K_AT), k_place, k_stride, columns)
            commit_copies()

            # m_new = max(m, rowmax(S)); P = exp(S - m_new); l = alpha l + rowsum(P); O = alpha O + P V
            softmax_step(S, O, m, l, top, scale)
            add_output(O, S, A, va)
        await_copies()
        cuda.syncthreads()  # also where there was no tile: O goes through the rows of Q

        # O = O / l, lse = m + log l; padding is 0 and -inf
        for r in range(ROWS):
            total = l[r]
            total += exchange(total, 1)
            total += exchange(total, 2)
            highest = m[r] if m[r] == HIDDEN else float32(m[r] * at.scale)
            i = i0 + y + 8 * r
            factor, _, lse = finish_l(call, at, highest, total)
            if factor == float32(0) and total != float32(0):
                factor = SMALLEST  # the row is not empty, what it saw may be a NaN
            m[r] = factor
            if t == 0 and call.lse_data != 0 and i < rows_end:  # somebody asked for it
                store_float32(lse_of(call, s.slot, at.h, s.q_start + i), lse if i < s.q_length else HIDDEN)
        i0 += warp * (MT * 16)
        store(O, m, int32(base + warp * (MT * 16 * row_bytes)), o_row(call, s.slot, at.h, s.q_start + i0),
              call.o_row * size, narrow(s.q_length - i0), narrow(rows_end - i0), lane)  # fmt: skip

    return fa2_forward
