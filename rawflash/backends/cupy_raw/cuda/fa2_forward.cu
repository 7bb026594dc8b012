// FlashAttention-2, forward pass (Dao 2024, algorithm 1; Chu, Liu and Lin 2026, algorithm 3).
//
// A block of threads owns Br rows of one query head. Q blocks outside (one thread block each), K/V blocks inside; O, m and l stay
// in registers and are written once.
//
// On chip:  Q (Br, d), K (Bc, d), V (Bc, dv), S = P (Br, Bc); in registers O (Br, dv), m, l.
// Read per step: K_j and V_j, each while the other's product runs. Written once: O_i, lse_i.
//
// P_STAYS (float64 without options): P is a factor of P V where it lies, and not on chip.
//
// Where that would leave multiprocessors idle, the keys of a block of rows are shared out: each part of them has a thread block of its own, which
// writes its O, m and l as they are, and fa2_forward_merge goes on as the online softmax does from one step to the next.

#include "numbers.cuh"
#include "call.cuh"
#include "tile.cuh"
#include "products.cuh"
#include "philox.cuh"
#include "scores.cuh"
#include "softmax.cuh"
#include "padding.cuh"
#include "parts.cuh"
#include "merge.cuh"

// The rows of K or V from key j0 on; `first` is where that of key 0 lies, if the cache is not paged.
template <int COLUMNS, int PITCH>
__device__ __forceinline__ void load_keys(
    real* tile, const Call& call, const Matrix& matrix, const elem* first, const Head& at, long long j0)
{
    const long long count = at.s.kv_length - j0;
    if constexpr (PAGE) {
        load_rows<BC, COLUMNS, PITCH>(tile, [&](int r, int x, bool& exists) -> const elem* {
            const Place place = r < count ? place_of(call, at.s, j0 + r) : Place{0, 0, false};
            exists = place.exists;
            return row_of(matrix, place.slot, at.h_kv, place.t) + (exists ? x : 0);
        });
    } else {
        load_tile<BC, COLUMNS, PITCH>(tile, first + j0 * matrix.row, matrix.row, count);
    }
}

// O = alpha O: after the first steps the maximum moves seldom.
template <int R, int C> __device__ __forceinline__ void rescale(real (&O)[R][C], const real (&alpha)[R])
{
    bool moves = false;
#pragma unroll
    for (int r = 0; r < R; r++)
        moves = moves || alpha[r] != real(1);
    if (__any_sync(WARP, moves)) {
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int c = 0; c < C; c++)
                O[r][c] *= alpha[r];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fa2_forward(const __grid_constant__ Call call)
{
    extern __shared__ __align__(VECTOR_BYTES) unsigned char on_chip[];
    ForwardTiles tiles((real*)on_chip);
    constexpr int R = ScoreTile::R, C = ScoreTile::C, CV = QueryTile<DV>::C;
    static_assert(ScoreTile::ROW_IN_WARP, "the softmax takes whole rows");

    const Work work = work_of(call, blockIdx.x);
    const int part = work.part;
    const Sequence s = sequence(call, work.b);
    const Head at = head(call, s, work.h);
    const long long i0 = work.block * BR;
    const long long rows_end = PACKED ? s.q_length : call.Tq;  // packed: the rows behind a sequence are another's
    if (i0 >= rows_end)
        return;

    real O[R][CV], m[R], l[R], alpha[R];
    fill(O, real(0));
#pragma unroll
    for (int r = 0; r < R; r++)
        m[r] = -INFINITE, l[r] = real(0);

    const elem* const keys = row_of(call.k, s.slot, at.h_kv, s.k_start);
    const elem* const values = row_of(call.v, s.slot, at.h_kv, s.k_start);
    long long j_low, j_high;
    key_range(call, s, i0, j_low, j_high);
    const int parts = parts_of(call, j_low, j_high);
    if (part >= parts)
        return;
    j_low += part * call.part_keys;
    if (part < parts - 1)
        j_high = j_low + call.part_keys;
    Block tile = next_keys(call, at, i0, j_low, j_high);

    // Load Q_i and the first K_j
    if (tile.kind != EMPTY) {
        clear_tiles(tiles.Q);
        load_tile<BR, D, PITCH_D>(tiles.Q, row_of(call.q, s.slot, at.h, s.q_start + i0), call.q.row, s.q_length - i0);
        load_keys<D, PITCH_D>(tiles.K, call, call.k, keys, at, tile.start);
        commit_copies();
    }
#if P_STAYS
    static_assert(IN_REGISTERS, "P has no tile");
    const real power = IN_POWERS ? at.scale * LOG2E_DOUBLE : real(0);
    // Of 65536 / power, nearly: errors of m below it are about 1/16, as powers of two. A difference of upper words is one of logarithms
    const unsigned far = IN_POWERS ? upper_word(65536.0) + upper_word(1.0) - upper_word(power) : 0;
#endif
    while (tile.kind != EMPTY) {
        const Block next = next_keys(call, at, i0, tile.start + BC, j_high);
        await_copies<0>();
        __syncthreads();  // Q_i and K_j are there, and no thread reads V of the step before
        tiles.keys_landed();
        load_keys<DV, PITCH_V>(tiles.V, call, call.v, values, at, tile.start);
        commit_copies();

        // S = Q K^T
        real S[R][C];
        fill(S, real(0));
        tiles.add_scores(S);
        tiles.before_P();
        finish_scores<!IN_POWERS>(call, at, S, tiles.P, i0, tile.start, tile.kind);

        // m_new = max(m, rowmax(S)); P = exp(S - m_new); l = alpha l + rowsum(P)
#if P_STAYS
        if constexpr (IN_POWERS)
            softmax_step_of_products(S, m, l, alpha, power, far);
        else
            softmax_step(S, m, l, alpha);
#else
        softmax_step(S, m, l, alpha);
        put_tile(tiles.P, S);
        if constexpr (DROPOUT)
            drop(call, at, tiles.P, i0, tile.start);
#endif
        await_copies<0>();
        __syncthreads();  // V_j and P are there, and no thread reads K_j any more
        tiles.values_landed();
        if (next.kind != EMPTY)
            load_keys<D, PITCH_D>(tiles.K, call, call.k, keys, at, next.start);
        commit_copies();

        // O = alpha O + P V
        rescale(O, alpha);
#if P_STAYS
        product_of_scores<DV>(O, S, tiles.V, PITCH_V);
#else
        tiles.add_output(O);
#endif
        tile = next;
    }
    if constexpr (IN_POWERS)
#pragma unroll
        for (int r = 0; r < R; r++)
            m[r] *= at.scale;

    // O = O / l, lse = m + log l; padding is 0 and -inf
#pragma unroll
    for (int r = 0; r < R; r++) {
        const long long i = i0 + ScoreTile::row(r);
        real total = sum_of_lanes<ROW_LANES>(l[r]);
        if (parts > 1) {  // fa2_forward_merge does the rest
            if (i < s.q_length) {
                write_sums<QueryTile<DV>, DV>(sums_of_part(call, at, part, i), O[r], real(1));
                if (row_lane() == 0) {
                    *of_part(call, call.m, at, part, i) = m[r];
                    *of_part(call, call.l, at, part, i) = total;
                }
            }
            continue;
        }
        real factor = real(0), lse = -INFINITE;
        if (i < s.q_length)
            factor = finish_row(call, at, m[r], total, lse);
        const bool empty = i >= s.q_length || total == real(0);
        if (i < rows_end) {
            store_row<QueryTile<DV>, DV>(row_of(call.o, s.slot, at.h, s.q_start + i), O[r], factor, empty);
            if (row_lane() == 0)
                store_lse(call, s.slot, at.h, s.q_start + i, lse);
        }
    }
}
