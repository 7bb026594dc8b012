// FlashAttention-1, forward pass (Dao et al. 2022, algorithm 1; Chu, Liu and Lin 2026, algorithm 4).
//
// A block of threads owns one query head. K/V blocks outside, Q blocks inside; O, m and l lie in device memory and are read and
// written at every step, O divided by l each time.
//
// On chip:  Q (Br, d), K (Bc, d), V (Bc, dv), S = P (Br, Bc); in registers, for one step, O (Br, dv), m, l.
// Read per step: Q_i, O_i, m_i, l_i; written per step: O_i, m_i, l_i. K_j and V_j are read once.

#include "numbers.cuh"
#include "call.cuh"
#include "tile.cuh"
#include "products.cuh"
#include "philox.cuh"
#include "scores.cuh"
#include "softmax.cuh"
#include "padding.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fa1_forward(const __grid_constant__ Call call)
{
    extern __shared__ __align__(VECTOR_BYTES) unsigned char on_chip[];
    ResidentTiles tiles((real*)on_chip);
    constexpr int R = ScoreTile::R, C = ScoreTile::C, CV = QueryTile<DV>::C;
    static_assert(ScoreTile::ROW_IN_WARP, "the softmax takes whole rows");
    static_assert(!SPLIT || BC <= BR, "K_j lands where Q_i lies later");

    const Sequence s = sequence(call, blockIdx.x / call.Hq);
    const Head at = head(call, s, blockIdx.x % call.Hq);
    const elem* const queries = row_of(call.q, s.slot, at.h, s.q_start);
    const elem* const keys = row_of(call.k, s.slot, at.h_kv, s.k_start);
    const elem* const values = row_of(call.v, s.slot, at.h_kv, s.k_start);
    real* const O_rows = sums_of(call, s.slot, at.h, s.q_start, DV);
    real* const m_rows = row_of(call.m, s.slot, at.h, s.q_start);
    real* const l_rows = row_of(call.l, s.slot, at.h, s.q_start);
    clear_tiles(tiles.Q);

    // O = 0, m = -inf, l = 0
    for (long long n = threadIdx.x; n < s.q_length * DV; n += THREADS)
        O_rows[n] = real(0);
    for (long long i = threadIdx.x; i < s.q_length; i += THREADS)
        m_rows[i] = -INFINITE, l_rows[i] = real(0);

    for (long long j0 = 0; j0 < s.kv_length; j0 += BC) {
        long long i_low, i_high;
        row_range(call, s, j0, i_low, i_high);
        Block tile = next_rows(call, at, i_low, i_high, j0);
        if (tile.kind == EMPTY)
            continue;
        __syncthreads();  // no thread reads K, V or Q of the block before; O, m and l of all rows are written
        // Load K_j and V_j, then the first Q_i
        load_tile<BC, D, PITCH_D>(tiles.K, keys + j0 * call.k.row, call.k.row, s.kv_length - j0);
        load_tile<BC, DV, PITCH_V>(tiles.V, values + j0 * call.v.row, call.v.row, s.kv_length - j0);
        commit_copies();
        await_copies<0>();
        __syncthreads();  // K_j and V_j are there
        tiles.landed();
        load_tile<BR, D, PITCH_D>(tiles.Q, queries + tile.start * call.q.row, call.q.row, s.q_length - tile.start);
        commit_copies();
        while (tile.kind != EMPTY) {
            const long long i0 = tile.start;
            const Block next = next_rows(call, at, i0 + BR, i_high, j0);
            // Load O_i, m_i, l_i: each thread its own columns
            real O[R][CV], m[R], l[R], alpha[R], before[R];
#pragma unroll
            for (int r = 0; r < R; r++) {
                const long long i = i0 + ScoreTile::row(r);
                const bool exists = i < s.q_length;
                m[r] = exists ? m_rows[i] : -INFINITE;
                before[r] = exists ? l_rows[i] : real(0);
                if (exists) {
                    read_sums<QueryTile<DV>, DV>(O_rows + i * DV, O[r]);
                } else {
#pragma unroll
                    for (int c = 0; c < CV; c++)
                        O[r][c] = real(0);
                }
            }
            await_copies<0>();
            __syncthreads();  // Q_i is there; every thread has read m_i and l_i

            // S = Q K^T
            real S[R][C];
            fill(S, real(0));
            tiles.add_scores(S);
            finish_scores(call, at, S, tiles.P, i0, j0, tile.kind);

            // m_new = max(m, rowmax(S)); P = exp(S - m_new); l_new = alpha l + rowsum(P)
#pragma unroll
            for (int r = 0; r < R; r++)
                l[r] = real(0);
            softmax_step(S, m, l, alpha);
            put_tile(tiles.P, S);
            if constexpr (DROPOUT)
                drop(call, at, tiles.P, i0, j0);
#pragma unroll
            for (int r = 0; r < R; r++) {
                l[r] = before[r] * alpha[r] + sum_of_lanes<ROW_LANES>(l[r]);
                const long long i = i0 + ScoreTile::row(r);
                if (row_lane() == 0 && i < s.q_length)
                    m_rows[i] = m[r], l_rows[i] = l[r];
            }
            __syncthreads();  // P is there, and no thread reads Q_i any more
            if (next.kind != EMPTY)
                load_tile<BR, D, PITCH_D>(tiles.Q, queries + next.start * call.q.row, call.q.row, s.q_length - next.start);
            commit_copies();

            // O = (l alpha O + P V) / l_new
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int c = 0; c < CV; c++)
                    O[r][c] *= before[r] * alpha[r];
            tiles.add_output(O);
#pragma unroll
            for (int r = 0; r < R; r++) {
                const long long i = i0 + ScoreTile::row(r);
                const real inverse = l[r] == real(0) ? real(0) : real(1) / l[r];
                if (i < s.q_length)
                    write_sums<QueryTile<DV>, DV>(O_rows + i * DV, O[r], inverse);
            }
            tile = next;
        }
    }
    __syncthreads();  // m and l of all rows are written

    // out = O with the sink in its denominator, lse = m + log l; padding is 0 and -inf
    typedef RowColumns<DV> Row;
    const long long rows_end = PACKED ? s.q_length : call.Tq;
    for (long long i = thread_y(); i < rows_end; i += SIDE) {
        real factor = real(0), lse = -INFINITE, l = real(0), O[Row::C] = {};
        if (i < s.q_length) {
            l = l_rows[i];
            read_sums<Row, DV>(O_rows + i * DV, O);
            factor = l_rows[i] * finish_row(call, at, m_rows[i], l, lse);
        }
        store_row<Row, DV>(row_of(call.o, s.slot, at.h, s.q_start + i), O, factor, l == real(0));
        if (thread_x() == 0)
            store_lse(call, s.slot, at.h, s.q_start + i, lse);
    }
}
