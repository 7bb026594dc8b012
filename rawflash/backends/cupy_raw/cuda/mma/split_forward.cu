// FlashAttention-2, forward pass, in float32 by tensor cores that take bfloat16 (Dao 2024, algorithm 1), from parts that were split before
// (split_inputs.cu). What products lose, and what sums: split.cuh, split_rows.cuh.
//
// A block of eight warps owns Br rows of one query head, a warp 16 of them. Q blocks outside (one thread block each), K/V blocks inside, from the last
// to the first: that of the padding and, under a causal mask, of the diagonal is then the first. P is split in registers, where it lies as products
// with V take it.
//
// On chip:  parts of Q (Br, d), K (Bc, d), V (Bc, dv); in registers S (Br, Bc), P, O (Br, dv), m, l. Read per step: parts of K_j and V_j, each while
// the other's product runs. Written once: O_i, lse_i.
//
// Where that would leave multiprocessors idle, keys are shared out as in cuda/fa2_forward.cu.

#include "numbers.cuh"
#include "call.cuh"
#include "tile.cuh"
#include "split_rows.cuh"

constexpr int WARPS = THREADS / WARP_SIZE;
constexpr int NS = BC / 8, NO = depth_columns(DV) / 8;  // pieces of 8 columns, of S and of O
constexpr int K_AT = tile_bytes(BR, D), V_AT = K_AT + tile_bytes(BC, D), WHOLE_AT = V_AT + tile_bytes(BC, DV);  // bytes from the start of Q
constexpr int FAR = 1 << 30;  // beyond all rows and keys of a call that this kernel takes
static_assert(BR == 16 * WARPS && BC % 32 == 0, "whole pieces");

// A tile of scores in registers: S[n][e] is row 8 (e / 2) + lane_g() of the warp's, column 8 n + 2 lane_t() + e % 2.
struct ScoreTile {
    static constexpr int R = 2, C = 2 * NS;
    static __device__ __forceinline__ int row(int r) { return threadIdx.x / WARP_SIZE * 16 + lane_g() + 8 * r; }
    static __device__ __forceinline__ int column(int c) { return c / 2 * 8 + 2 * lane_t() + c % 2; }
};
constexpr int ROW_LANES = 4;

#include "philox.cuh"
#include "scores.cuh"
#include "softmax.cuh"
#include "padding.cuh"
#include "parts.cuh"
#include "merge.cuh"

static_assert(PLAIN && !DROPOUT && !HAS_MASK && !PAGE, "other calls are those of cuda/fa2_forward.cu");

// Scores stay products q.k where what makes them powers of two can be multiplied to them with the subtraction of m. Others are in natural units, and
// the difference comes first: a large one times log2(e) could overflow.
constexpr bool PRODUCTS = SCALE_LATER;
constexpr float MOST_SHIFT = 16777216.0f;  // 2^24 powers of two: up to there m, multiplied by the scale, is rounded by 1/2
constexpr float GROWTH = 8;  // powers of two by which P may exceed 1 before m follows
constexpr float LN2 = 0.6931471805599453f;

// How many keys there are, and where the last block begins; the keys that all rows see, from first to end, and those that the block's first row sees by
// the band: each row one key more than the one before. All counted from the first key of all. They lie in on-chip memory, where they take no registers.
struct Whole {
    int keys, last, first, end, band_first, band_end, unused[2];
};
static_assert(WHOLE_AT + sizeof(Whole) == TILE_BYTES, "the plan's tiles");

__device__ __forceinline__ int narrowed(long long x) { return (int)clamp(x, -FAR, FAR); }

// S as products -> scores, hidden ones -inf. j is the first key of the block.
__device__ __forceinline__ void finish_scores(float (&S)[NS][4], float scale, const Whole& whole, int j)
{
    if constexpr (!PRODUCTS)
#pragma unroll
        for (int n = 0; n < NS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                S[n][e] *= scale;
    if (whole.first <= j && j + BC <= whole.end)
        return;
    // Seen from the lane's first row and column
    const unsigned thread = once_more(threadIdx.x);
    const int row = (int)(thread / WARP_SIZE * 16 + thread % WARP_SIZE / 4), column = (int)(thread % 4) * 2;
    const int keys = whole.keys - j - column, first = BAND ? whole.band_first + row - j - column : 0, end = BAND ? whole.band_end + row - j - column : 0;
#pragma unroll
    for (int n = 0; n < NS; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int x = 8 * n + e % 2, r = e / 2 * 8;
            if (x >= keys || (BAND && (x < first + r || x >= end + r)))
                S[n][e] = -INFINITE;
        }
}

// S becomes P = exp(S - m); O, m and l follow. m moves only when some row's maximum is far above it, as O and l are relative to any m, and what
// is written of them is a quotient. It is the same in the lanes of a row, l is the lane's own part of the sum. Of PRODUCTS m is scaled, to a
// power of two; is that of any row of the warp `far` away?
__device__ __forceinline__ void softmax_step(float (&S)[NS][4], float (&O)[NO][4], float (&m)[2], float (&l)[2], float power, bool& far)
{
    float top[2];
    bool grows = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float highest = -INFINITE;
#pragma unroll
        for (int n = 0; n < NS; n++)
            highest = larger(highest, larger(S[n][2 * r], S[n][2 * r + 1]));
        top[r] = PRODUCTS ? highest * power : highest;
        grows |= PRODUCTS ? top[r] - m[r] > GROWTH : (top[r] - m[r]) * power > GROWTH;  // NaN while nothing was seen: no
    }
    if (__any_sync(WARP, grows)) {
        bool beyond = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float highest = larger(m[r], maximum_of_lanes<ROW_LANES>(top[r]));
            const float change = m[r] - (highest == -INFINITE ? 0.0f : highest);
            const float alpha = exp2_approximately(PRODUCTS ? change : change * power);
            m[r] = highest;
            beyond |= PRODUCTS && fabsf(highest) >= MOST_SHIFT && highest != -INFINITE;
            l[r] *= alpha;
#pragma unroll
            for (int n = 0; n < NO; n++) {
                O[n][2 * r] *= alpha;
                O[n][2 * r + 1] *= alpha;
            }
        }
        far = __any_sync(WARP, beyond);
    }
    const float factor = PRODUCTS && far ? 1.0f : power;
    if (PRODUCTS && far) {  // m is rounded, and in a fused product a score is not: they could lie whole powers of two apart
#pragma unroll
        for (int n = 0; n < NS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                S[n][e] = __fmul_rn(S[n][e], power);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float shift = m[r] == -INFINITE ? 0.0f : m[r];  // a row that has seen no key: 2^(-inf - 0) is 0
        float total = 0;
#pragma unroll
        for (int n = 0; n < NS; n++)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; e++) {
                float& s = S[n][e];
                s = exp2_approximately(PRODUCTS ? multiply_add(s, factor, -shift) : (s - shift) * power);
                total += s;
            }
        l[r] += total;
    }
}

// O += P V
__device__ __forceinline__ void add_output(float (&O)[NO][4], const float (&P)[NS][4], unsigned v_at, unsigned zero)
{
    constexpr int STEPS = NS / 2;
    unsigned A[STEPS][PARTS][4];
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        split_piece(A[s], P[2 * s], P[2 * s + 1]);
    accumulate<BC, DV>(O, A, v_at, zero);
}

// What a block of threads does: a block of rows from i0 on, or the part-th of the parts of its keys, from j_low to j_high. There is nothing to do
// where rows_end is not above i0, or part not below parts.
struct Owned {
    Head at;
    long long i0, rows_end, j_low, j_high;
    int part, parts;
};

__device__ __forceinline__ Owned owned_by(const Call& call, unsigned index)
{
    const Work work = work_of(call, index);
    Owned own;
    own.at = head(call, sequence(call, work.b), work.h);
    own.i0 = work.block * BR;
    own.rows_end = PACKED ? own.at.s.q_length : call.Tq;  // packed: the rows behind a sequence are another's
    key_range(call, own.at.s, own.i0, own.j_low, own.j_high);
    own.part = work.part;
    own.parts = parts_of(call, own.j_low, own.j_high);
    own.j_low += work.part * call.part_keys;
    if (work.part < own.parts - 1)
        own.j_high = own.j_low + call.part_keys;
    return own;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fa2_forward(const __grid_constant__ Call call)
{
    extern __shared__ __align__(LINE_BYTES) unsigned char on_chip[];
    float O[NO][4], m[2], l[2];
    clear(O);
    m[0] = m[1] = -INFINITE, l[0] = l[1] = 0;
    {
        const Owned own = owned_by(call, blockIdx.x);
        if (own.i0 >= own.rows_end || own.part >= own.parts)
            return;
        const Head& at = own.at;
        const Sequence& s = at.s;
        const long long i0 = own.i0, j_low = own.j_low;

        // In 32 bits from j_low on
        const int blocks = (int)((most(own.j_high - j_low, 0) + BC - 1) / BC), keys = narrowed(s.kv_length - j_low);
        const int rows = narrowed(s.q_length - i0), last = (blocks - 1) * BC;
        Whole* const whole = reinterpret_cast<Whole*>(on_chip + WHOLE_AT);
        if (threadIdx.x == 0) {
            *whole = {keys, last, 0, keys, -FAR, FAR};
            if constexpr (BAND) {
                const long long lower = i0 + s.offset + call.band_lower - j_low, upper = i0 + s.offset + call.band_upper + 1 - j_low;
                *whole = {keys, last, narrowed(lower + least(BR, rows) - 1), (int)least(keys, narrowed(upper)), narrowed(lower), narrowed(upper)};
            }
        }

        const unsigned base = shared_address(on_chip);
        unsigned from = row_number(call.Hkv, call.rows_k, s.slot, at.h_kv, s.k_start + j_low + last);
        const unsigned zero = (unsigned)(call.blocks >> 32);
        const float power = PRODUCTS ? float(call.scale * LOG2E_DOUBLE) : LOG2E;
        bool far = false;

        // Load Q_i and the first K_j and V_j. Only these may reach behind the last key
        if (blocks > 0) {
            load_parts<BR, D, false>(base, call.q, row_number(call.Hq, call.rows_q, s.slot, at.h, s.q_start + i0), rows);
            load_parts<BC, D, false>(base + K_AT, call.k, from, keys - last);
            load_parts<BC, DV, false>(base + V_AT, call.v, from, keys - last);
            commit_group();
        }
#pragma unroll 1
        for (int j = last; j >= 0; j -= BC) {
            await_groups<0>();
            __syncthreads();  // Q_i and K_j are there, and no thread reads V of the step before
            if (j < whole->last)
                load_parts<BC, DV, true>(base + V_AT, call.v, from);
            commit_group();

            // S = Q K^T. Addresses of factors are not to take registers beyond the product
            float S[NS][4];
            const unsigned thread = once_more(threadIdx.x);
            multiply_rows<BR, BC, D>(S, base + thread / WARP_SIZE * (16 * line_columns(D) * 2) + lane_rows<line_columns(D)>(thread),
                                     base + K_AT + lane_columns<line_columns(D)>(thread), zero);
            finish_scores(S, at.scale, *whole, j);
            await_groups<0>();
            __syncthreads();  // V_j is there, and no thread reads K_j any more
            from -= BC;
            if (j > 0)
                load_parts<BC, D, true>(base + K_AT, call.k, from);
            commit_group();

            // m_new = max(m, rowmax(S)); P = exp(S - m_new); l = alpha l + rowsum(P); O = alpha O + P V
            softmax_step(S, O, m, l, power, far);
            add_output(O, S, base + V_AT + lane_rows<line_columns(DV)>(once_more(threadIdx.x)), zero);
        }
    }

    // O = O / l, lse = m + log l; padding is 0 and -inf
    const Owned own = owned_by(call, once_more(blockIdx.x));
    const Head& at = own.at;
    const Sequence& s = at.s;
    const bool merged = own.parts > 1;  // fa2_forward_merge does the rest
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const long long i = own.i0 + ScoreTile::row(r);
        float total = sum_of_lanes<ROW_LANES>(l[r]), factor = 1, lse = -INFINITE;
        const float highest = PRODUCTS ? m[r] * LN2 : m[r];
        if (merged ? i >= s.q_length : i >= own.rows_end)
            continue;
        float* to;
        if (merged) {
            to = sums_of_part(call, at, own.part, i);
            if (lane_t() == 0) {
                *of_part(call, call.m, at, own.part, i) = highest;
                *of_part(call, call.l, at, own.part, i) = total;
            }
        } else {
            to = row_of(call.o, s.slot, at.h, s.q_start + i);
            if (i < s.q_length)
                factor = finish_row(call, at, highest, total, lse);
            if (lane_t() == 0)
                store_lse(call, s.slot, at.h, s.q_start + i, lse);
        }
        const bool empty = !merged && (i >= s.q_length || total == 0);
#pragma unroll
        for (int n = 0; n < NO; n++)
            store_pair<DV>(to, 8 * n + 2 * lane_t(), empty ? 0.0f : O[n][2 * r] * factor, empty ? 0.0f : O[n][2 * r + 1] * factor);
    }
}
