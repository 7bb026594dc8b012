// FlashAttention-2, forward pass, in 16 bits on tensor cores (Dao 2024, algorithm 1).
//
// A block of four warps owns Br rows of one query head, a warp Br / 4 of them as pieces of 16 rows. Q blocks outside (one thread block each),
// K/V blocks inside, from the last to the first: that of the padding and, under a causal mask, of the diagonal is then the first. Two thread
// blocks share a multiprocessor: one computes while the other waits.
//
// On chip:  Q (Br, d), where O (Br, dv) is put before it is written, K (Bc, d), V (Bc, dv); in registers S (Br, Bc), P, which are operands of
// P V as they lie there, O (Br, dv), m, l. Read per step: K_j and V_j, each while the other's product runs. Written once: O_i, lse_i.
//
// Where that would leave multiprocessors idle, keys are shared out as in cuda/fa2_forward.cu.

#include "numbers.cuh"
#include "call.cuh"
#include "tile.cuh"
#include "halves.cuh"

constexpr int WARPS = THREADS / WARP_SIZE;
constexpr int MT = BR / (16 * WARPS);  // pieces of 16 rows of a warp
constexpr int NS = BC / 8, NO = depth_columns(DV) / 8;  // pieces of 8 columns, of S and of O
constexpr int ROWS = 2 * MT;  // that a lane holds numbers of: lane_g() + 8 r of the warp's
constexpr int COLUMNS_D = line_columns(D), COLUMNS_V = line_columns(DV);
constexpr int O_COLUMNS = most_of(COLUMNS_D, COLUMNS_V);
constexpr int K_AT = BR * O_COLUMNS * 2, V_AT = K_AT + BC * COLUMNS_D * 2;  // bytes from the start of Q
constexpr bool KEEP_Q = MT == 1 && D <= 128;  // in registers, where there are enough
constexpr int STEPS = __CUDA_ARCH__ >= 1000 ? 4 : 16;  // of Q K^T that are unrolled: from sm_100 on more are spilled
constexpr int FAR = 1 << 30;  // beyond all rows and keys of a call that this kernel takes; twice that is still in 32 bits
static_assert(BR == 16 * WARPS * MT && BC % 32 == 0, "whole pieces");
static_assert(V_AT + BC * COLUMNS_V * 2 == TILE_BYTES, "the plan's tiles");

// A tile of scores in registers: S[m][n][e] is row 8 (2 m + e / 2) + lane_g() of the warp's, column 8 n + 2 lane_t() + e % 2.
struct ScoreTile {
    static constexpr int R = ROWS, C = 2 * NS;
    static __device__ __forceinline__ int row(int r, unsigned thread = threadIdx.x)
    {
        return (int)(thread / WARP_SIZE * (16 * MT) + thread % WARP_SIZE / 4) + 8 * r;
    }
    static __device__ __forceinline__ int column(int c) { return c / 2 * 8 + 2 * lane_t() + c % 2; }
};
constexpr int ROW_LANES = 4;

#include "philox.cuh"
#include "scores.cuh"
#include "softmax.cuh"
#include "padding.cuh"
#include "parts.cuh"

// Scores without options stay products q.k, and what makes them powers of two is multiplied to them where a sum is formed anyway. Others are
// in natural units, and the difference comes first: a large one times log2(e) could overflow.
constexpr bool PRODUCTS = PLAIN && SCALE_LATER;
constexpr float MOST_SHIFT = 16777216.0f;  // 2^24 powers of two: up to there m, multiplied by the scale, is rounded by 1/2
constexpr float GROWTH = 8;  // powers of two by which P may exceed 1 before m follows
constexpr float MOST_SUM = 18446744073709551616.0f;  // 2^64
constexpr float LN2 = 0.6931471805599453f;

// bfloat16 has the exponents of float32, so that P may be far above 1: m is the maximum of the first blocks, up to the last key of the first row, by
// which each row has seen a key if it sees any, and then stays. Where O and l do not come out as numbers that this may be said of, the rows are done
// again, as without it.
#ifndef STAYS
#define STAYS 1
#endif
constexpr bool STATIC_MAXIMUM = STAYS && TYPE == BFLOAT16 && PRODUCTS && !SINKS && !HAS_MASK && !PAGE && !DROPOUT;

// Blocks of keys have to be looked for where masks may leave some out.
constexpr bool SEARCHED = HAS_MASK || PAGE;

struct Step {  // a block of keys: its first one, counted from the first of all, and its class
    int j, kind;
};

// Which keys a lane's row r sees: from first + 8 r on, before end + 8 r (of the band) and before keys. All counted from the first key of all.
struct Seen {
    int first, end, keys;
};

__device__ __forceinline__ int narrowed(long long x) { return (int)clamp(x, -FAR, FAR); }

// ---- S ------------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void read_q(unsigned (&A)[MT][4], unsigned q_at, int s)
{
#pragma unroll
    for (int m = 0; m < MT; m++)
        read_piece<COLUMNS_D>(A[m], q_at, 16 * m, 16 * s);
}

// S = Q K^T
template <int KEPT>
__device__ __forceinline__ void products(float (&S)[MT][NS][4], const unsigned (&Q)[KEPT][MT][4], unsigned q_at, unsigned k_at)
{
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                S[m][n][e] = 0;
#pragma unroll STEPS
    for (int s = 0; s < depth_columns(D) / 16; s++) {
        unsigned A[MT][4];
        if constexpr (KEEP_Q) {
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    A[m][e] = Q[s][m][e];
        } else {
            read_q(A, q_at, s);
        }
#pragma unroll
        for (int n = 0; n < NS; n += 2) {
            unsigned B[4];
            read_piece<COLUMNS_D>(B, k_at, 8 * n, 16 * s);
#pragma unroll
            for (int m = 0; m < MT; m++)
                multiply_both(S[m][n], S[m][n + 1], A[m], B);
        }
    }
}

// f(m, n, e, r, x) for each number of a tile in registers: its row 8 r of the lane's and its column x, but for 2 lane_t().
template <class F> __device__ __forceinline__ void for_each_number(F f)
{
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                f(m, n, e, 2 * m + e / 2, 8 * n + e % 2);
}

// Bits for the numbers of a tile in registers, bit 4 (n % 8) + e of word (m, n / 8). They are found in a loop that stays one: its code is long, and
// would be there once for each number if they were used where they are found.
constexpr int ABREAST = 4;  // pieces, so that one does not wait for the other
constexpr int BIT_WORDS = NS / 8 > 0 ? NS / 8 : 1, BIT_PIECES = NS / BIT_WORDS;

template <class F> __device__ __forceinline__ void find_bits(unsigned (&bits)[MT][BIT_WORDS], F of_piece)
{
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int w = 0; w < BIT_WORDS; w++) {
            unsigned word = 0;
#pragma unroll ABREAST
            for (int n = 0; n < BIT_PIECES; n++)
                word |= of_piece(m, BIT_PIECES * w + n) << 4 * n;
            bits[m][w] = word;
        }
}

__device__ __forceinline__ bool bit(const unsigned (&bits)[MT][BIT_WORDS], int m, int n, int e)
{
    return bits[m][n / BIT_PIECES] >> (4 * (n % BIT_PIECES) + e) & 1;
}

// tanh(x). Near 0 a difference would lose what is left of x.
__device__ __forceinline__ float tangent(float x)
{
    constexpr float NEAR = 0.25f;
    const float far = 1.0f - 2.0f * reciprocal_approximately(exp2_approximately(x * (2.0f * LOG2E)) + 1.0f), square = x * x;
    const float near = x + x * square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315)));
    return fabsf(x) < NEAR ? near : far;
}

// Numbers of the bias are read all at once, which is faster, or where that takes too many registers one behind the other.
constexpr bool BIAS_IN_TURN = MT > 1 || HAS_MASK || SOFTCAP || ALIBI || depth_columns(most_of(D, DV)) > 128;

// S as products -> scores of a tile whose first pair is (i0, j0); the lane's first one is (i, j0 + left). Rows before `rows` and columns before
// `keys`, counted from there, exist; for the others something else of the bias is read that does.
__device__ __forceinline__ void find_scores(
    const Call& call, const Head& at, float (&S)[MT][NS][4], long long i0, long long j0, long long i, int left, int rows, int keys)
{
    typedef Storage<BIAS_TYPE>::stored bias_type;
    const float scale = SOFTCAP ? at.scale / float(call.softcap) : at.scale, cap = float(call.softcap);
    constexpr int BIAS_ROWS = BIAS_OVER_ROWS ? 1 : ROWS;
    const bias_type* bias[BIAS_ROWS];
    float distance[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (BIAS && r < BIAS_ROWS)
            bias[r] = (const bias_type*)call.bias.data + (at.s.b * call.bias.b + at.h * call.bias.h + (BIAS_OVER_KEYS ? 0 : j0 + left) * call.bias.j) +
                      (BIAS_OVER_ROWS ? 0 : 8 * r < rows ? i + 8 * r : i0) * call.bias.i;
        if constexpr (ALIBI)
            distance[r] = float(i + 8 * r + at.s.offset - j0 - left);
    }
#pragma unroll
    for (int n = 0; n < NS; n++)
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const int x = 8 * n + side;
            float more[BIAS_ROWS] = {};
            if constexpr (BIAS) {
#pragma unroll
                for (int r = 0; r < BIAS_ROWS; r++) {
                    if constexpr (BIAS_OVER_KEYS) {
                        more[r] = widen<BIAS_TYPE>(*bias[r]);
                    } else if constexpr (BIAS_IN_TURN) {
                        if (x < keys)
                            more[r] = widen<BIAS_TYPE>(*bias[r]);
                        bias[r] += (side ? 7 : 1) * call.bias.j;
                    } else {
                        more[r] = widen<BIAS_TYPE>(bias[r][(x < keys ? x : -left) * call.bias.j]);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float& s = S[r / 2][n][r % 2 * 2 + side];
                s *= scale;
                if constexpr (SOFTCAP)
                    s = cap * tangent(s);
                if constexpr (BIAS) {
                    const float y = more[BIAS_OVER_ROWS ? 0 : r];
                    s = y == -INFINITE ? -INFINITE : s + y;  // it hides the key, whatever its score is
                }
                if constexpr (ALIBI)
                    s -= at.slope * fabsf(distance[r] - float(x));
            }
        }
}

// Which rows of which head a thread block has. Where registers are scarce, that is found out in each step.
constexpr bool SCARCE = BIAS || (HAS_MASK && depth_columns(most_of(D, DV)) > 128);

struct Rows {
    Head at;
    long long i0;
};

__device__ __forceinline__ Rows rows_of(const Call& call, const Rows& known)
{
    if constexpr (!SCARCE)
        return known;
    const Work work = work_of(call, once_more(blockIdx.x));
    return {head(call, sequence(call, work.b), work.h), work.block * BR};
}

// S as products -> scores, hidden ones -inf. j0 is the first key of the block.
__device__ __forceinline__ void finish_scores(
    const Call& call, const Rows& known, float (&S)[MT][NS][4], const Seen& seen, const Step& step, long long j0)
{
    const Rows mine = rows_of(call, known);
    const Head& at = mine.at;
    const long long i0 = mine.i0;
    const unsigned thread = once_more(threadIdx.x);
    const int left = step.j + 2 * (int)(thread % 4), keys = seen.keys - left;  // seen from the lane's first column
    const long long i = i0 + ScoreTile::row(0, thread), j = j0 + 2 * (thread % 4);
    const int rows = narrowed(at.s.q_length - i);
    if constexpr (!PRODUCTS)
        find_scores(call, at, S, i0, j0, i, 2 * (int)(thread % 4), rows, keys);
    if (step.kind == FULL)
        return;
    for_each_number([&](int m, int n, int e, int r, int x) {
        bool hidden = x >= keys;
        if constexpr (BAND)
            hidden |= x < seen.first - left + 8 * r || x >= seen.end - left + 8 * r;
        if (hidden)
            S[m][n][e] = -INFINITE;
    });
    if constexpr (SEARCHED) {
        unsigned bits[MT][BIT_WORDS];
        find_bits(bits, [&](int m, int n) {
            unsigned four = 0;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int y = 16 * m + e / 2 * 8, x = 8 * n + e % 2;
                bool shown = y < rows && x < keys;
                if constexpr (PAGE)
                    shown = shown && place_of(call, at.s, j + x).exists;
#if HAS_MASK
                if (shown)
                    shown = mask_visible(call.mask, at.s.b, at.h, i + y, j + x, at.s.offset);
#endif
                four |= (unsigned)shown << e;
            }
            return four;
        });
        for_each_number([&](int m, int n, int e, int, int) {
            if (!bit(bits, m, n, e))
                S[m][n][e] = -INFINITE;
        });
    }
}

// ---- P ------------------------------------------------------------------------------------------------------------------------

// Are O and l what they are by the maximum of all scores?
__device__ __forceinline__ bool is_good(const float (&O)[MT][NO][4], const float (&m)[ROWS], const float (&l)[ROWS], const Seen& seen)
{
    bool good = true;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float finite[2] = {};
#pragma unroll
        for (int n = 0; n < NO; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                finite[e] = multiply_add(O[r / 2][n][r % 2 * 2 + e], 0.0f, finite[e]);
        const bool sees = seen.first + 8 * r < least(seen.end + 8 * r, seen.keys);
        good &= (l[r] < MOST_SUM) & (finite[0] + finite[1] == 0.0f) & (m[r] == -INFINITE ? !sees : fabsf(m[r]) < MOST_SHIFT);
    }
    return good;
}

// S becomes P = exp(S - m); O, m and l follow. m moves only when some row's maximum is far above it, as O and l are relative to any m, and what
// is written of them is a quotient. It is the same in the lanes of a row, l is the lane's own part of the sum. Of PRODUCTS m is scaled, to a
// power of two: what rounding it makes of it is one more m.
__device__ __forceinline__ void softmax_step(float (&S)[MT][NS][4], float (&O)[MT][NO][4], float (&m)[ROWS], float (&l)[ROWS], float power, bool moves)
{
    bool far = false;
    if (moves) {
    float top[ROWS];
    bool grows = false;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float highest = -INFINITE;
#pragma unroll
        for (int n = 0; n < NS; n++)
            highest = larger(highest, larger(S[r / 2][n][r % 2 * 2], S[r / 2][n][r % 2 * 2 + 1]));
        top[r] = PRODUCTS ? highest * power : highest;
        grows |= PRODUCTS ? top[r] - m[r] > GROWTH : (top[r] - m[r]) * power > GROWTH;  // NaN while nothing was seen: no
    }
    if (__any_sync(WARP, grows)) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float highest = larger(m[r], maximum_of_lanes<ROW_LANES>(top[r]));
            const float change = m[r] - (highest == -INFINITE ? 0.0f : highest);
            const float alpha = exp2_approximately(PRODUCTS ? change : change * power);
            m[r] = highest;
            l[r] *= alpha;
#pragma unroll
            for (int n = 0; n < NO; n++) {
                O[r / 2][n][r % 2 * 2] *= alpha;
                O[r / 2][n][r % 2 * 2 + 1] *= alpha;
            }
        }
    }
    // m is rounded, and in a fused product a score is not: far from 0 they could lie whole powers of two apart. There scores are rounded as m was,
    // and what is left of them when m has been taken away is small.
    bool beyond = false;
    if constexpr (PRODUCTS) {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            beyond |= fabsf(m[r]) >= MOST_SHIFT && m[r] != -INFINITE;
    }
    far = PRODUCTS && __any_sync(WARP, beyond);
    if (far) {
        const float whole = reciprocal_approximately(__uint_as_float(once_more(__float_as_uint(power))));
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int n = 0; n < NS; n++)
#pragma unroll
                for (int e = r % 2 * 2; e < r % 2 * 2 + 2; e++) {
                    float& s = S[r / 2][n][e];
                    s = m[r] == -INFINITE ? s : (__fmul_rn(s, power) - m[r]) * whole;
                }
    }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float shift = far | (m[r] == -INFINITE) ? 0.0f : m[r];  // a row that has seen no key: 2^(-inf - 0) is 0
#pragma unroll
        for (int n = 0; n < NS; n++)
#pragma unroll
            for (int e = r % 2 * 2; e < r % 2 * 2 + 2; e++) {
                float& s = S[r / 2][n][e];
                s = exp2_approximately(PRODUCTS ? multiply_add(s, power, -shift) : (s - shift) * power);
                l[r] += s;
            }
    }
}

// P -> Z P but for the factor of what is kept, which O gets in the end. Two lanes share the four keys of a counter: each makes the numbers of one of
// their two rows.
__device__ __forceinline__ void drop(const Call& call, const Rows& known, float (&P)[MT][NS][4], long long j0)
{
    const Rows mine = rows_of(call, known);
    const Head& at = mine.at;
    const long long i0 = mine.i0;
    const int odd = lane_t() % 2;
    const unsigned threshold = (unsigned)call.keep_threshold, first = (unsigned)(j0 / 4) + lane_t() / 2, row = (unsigned)i0 + ScoreTile::row(odd);
    unsigned bits[MT][BIT_WORDS];
    find_bits(bits, [&](int m, int n) {
        const uint4 words = philox(first + 2 * n, row + 16 * m, (unsigned)at.h, (unsigned)at.s.b, (unsigned long long)call.seed);
        return (unsigned)(words.x >= threshold) | (unsigned)(words.y >= threshold) << 1 | (unsigned)(words.z >= threshold) << 2 |
               (unsigned)(words.w >= threshold) << 3;
    });
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int w = 0; w < BIT_WORDS; w++) {
            const unsigned mine = bits[m][w], other = __shfl_xor_sync(WARP, mine, 1);
            const unsigned upper = (odd ? other : mine) >> 2 * odd, lower = (odd ? mine : other) >> 2 * odd;
            bits[m][w] = (upper & 0x33333333u) | (lower & 0x33333333u) << 2;
        }
    for_each_number([&](int m, int n, int e, int, int) {
        if (!bit(bits, m, n, e))
            P[m][n][e] = 0;
    });
}

// O += P V
__device__ __forceinline__ void add_output(float (&O)[MT][NO][4], const float (&P)[MT][NS][4], unsigned v_at)
{
#pragma unroll
    for (int s = 0; s < NS / 2; s++) {
        unsigned A[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                A[m][e] = pair_of(P[m][2 * s + e / 2][e % 2 * 2], P[m][2 * s + e / 2][e % 2 * 2 + 1]);
#pragma unroll
        for (int n = 0; n < NO; n += 2) {
            unsigned B[4];
            read_piece_transposed<COLUMNS_V>(B, v_at, 16 * s, 8 * n);
#pragma unroll
            for (int m = 0; m < MT; m++)
                multiply_both(O[m][n], O[m][n + 1], A[m], B);
        }
    }
}

// ---- K and V --------------------------------------------------------------------------------------------------------------------

// Begin to copy a block of keys, of which `count` exist. `first` is where this thread's chunk of its first row of the block is, if the cache is not
// paged; j0 the block's first key.
template <int N, bool WHOLE>
__device__ __forceinline__ void load_keys(
    unsigned tile, const Call& call, const Matrix& matrix, const elem* first, const Head& at, long long j0, int count)
{
    if constexpr (PAGE) {
        load_halves<BC, N, false>(tile, [&](int n, bool& exists) {
            const int row = n + copied_row();
            const Place place = row < count ? place_of(call, at.s, j0 + row) : Place{0, 0, false};
            exists = place.exists;
            return row_of(matrix, place.slot, at.h_kv, place.t) + CHUNK_HALVES * copied_chunk();
        });
    } else {
        load_halves<BC, N, WHOLE>(tile, [&](int n, bool& exists) {
            exists = WHOLE || n + copied_row() < count;
            return first + (exists ? n * matrix.row : 0);
        });
    }
}

// ---- O ------------------------------------------------------------------------------------------------------------------------

// O = O / l, lse = m + log l; padding is 0 and -inf. Or O, m and l of a part, as they are. Where the rows are is found once more: it would
// else take registers for the whole loop.
__device__ __forceinline__ void store_results(const Call& call, float (&O)[MT][NO][4], const float (&m)[ROWS], const float (&l)[ROWS], unsigned base)
{
    const unsigned thread = once_more(threadIdx.x), t = thread % 4;
    const Work work = work_of(call, once_more(blockIdx.x));
    const Sequence s = sequence(call, work.b);
    const Head at = head(call, s, work.h);
    const long long i0 = work.block * BR, rows_end = PACKED ? s.q_length : call.Tq;
    long long j_low, j_high;
    key_range(call, s, i0, j_low, j_high);
    const int parts = parts_of(call, j_low, j_high);
    float factor[ROWS];
    bool empty[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const long long i = i0 + ScoreTile::row(r, thread);
        float total = sum_of_lanes<ROW_LANES>(l[r]);
        const float highest = PRODUCTS ? m[r] * LN2 : m[r];
        if (parts > 1) {  // fa2_forward_merge does the rest
            if (i < s.q_length) {
                float* const to = sums_of_part(call, at, work.part, i);
#pragma unroll
                for (int n = 0; n < NO; n++) {
                    const int x = 8 * n + 2 * t;
                    const float pair[2] = {O[r / 2][n][r % 2 * 2], O[r / 2][n][r % 2 * 2 + 1]};
                    if (DV % 2 == 0) {
                        if (x < DV)
                            *reinterpret_cast<float2*>(to + x) = make_float2(pair[0], pair[1]);
                    } else {
                        if (x < DV)
                            to[x] = pair[0];
                        if (x + 1 < DV)
                            to[x + 1] = pair[1];
                    }
                }
                if (t == 0) {
                    *of_part(call, call.m, at, work.part, i) = highest;
                    *of_part(call, call.l, at, work.part, i) = total;
                }
            }
            continue;
        }
        float lse = -INFINITE;
        factor[r] = i < s.q_length ? finish_row(call, at, highest, total, lse) : 0.0f;
        if constexpr (DROPOUT)
            factor[r] *= float(call.keep_scale);
        empty[r] = i >= s.q_length || total == 0;
        if (t == 0 && i < rows_end)
            store_lse(call, s.slot, at.h, s.q_start + i, lse);
    }
    if (parts > 1)
        return;
    __syncthreads();  // no thread reads Q, or K where rows of V are wider
    const int warp_row = (int)(thread / WARP_SIZE) * (16 * MT), exist = narrowed(rows_end - i0) - warp_row;
    elem* const to = row_of(call.o, s.slot, at.h, s.q_start + i0 + warp_row);
    store_rows<MT, DV>(O, factor, empty, base + warp_row * (COLUMNS_V * 2), [&](int y) { return y < exist ? to + y * call.o.row : nullptr; });
}

enum Outcome { GOOD, BAD, NOTHING };

__device__ __forceinline__ Outcome attend(
    const Call& call, unsigned base, bool moving, float (&O)[MT][NO][4], float (&m)[ROWS], float (&l)[ROWS])
{
    const Work work = work_of(call, once_more(blockIdx.x));
    const Sequence s = sequence(call, work.b);
    const Head at = head(call, s, work.h);
    const long long i0 = work.block * BR;
    const long long rows_end = PACKED ? s.q_length : call.Tq;  // packed: the rows behind a sequence are another's
    if (i0 >= rows_end)
        return NOTHING;
    long long j_low, j_high;
    key_range(call, s, i0, j_low, j_high);
    const int parts = parts_of(call, j_low, j_high);
    if (work.part >= parts)
        return NOTHING;
    j_low += work.part * call.part_keys;
    if (work.part < parts - 1)
        j_high = j_low + call.part_keys;

    // In 32 bits from j_low on: the keys that all rows see, and those that the lane's first row sees
    const int keys = narrowed(s.kv_length - j_low), rows = narrowed(s.q_length - i0), lane_row = ScoreTile::row(0);
    int whole = 0, whole_end = keys;
    Seen seen = {-FAR, FAR, keys};
    if constexpr (BAND) {
        const long long lower = i0 + s.offset + call.band_lower - j_low, upper = i0 + s.offset + call.band_upper + 1 - j_low;
        whole = narrowed(lower + least(BR, rows) - 1);
        whole_end = (int)least(keys, narrowed(upper));
        seen.first = narrowed(lower + lane_row);
        seen.end = narrowed(upper + lane_row);
    }
    auto step_at = [&](int j) { return Step{j, j < 0 ? EMPTY : whole <= j && j + BC <= whole_end ? FULL : PARTIAL}; };
    auto step_from = [&](long long j) {
        const Block block = next_keys(call, at, i0, j, j_high);
        return Step{(int)(block.start - j_low), block.kind};
    };
    Step step = SEARCHED ? step_from(j_low) : step_at((int)((j_high - j_low + BC - 1) / BC - 1) * BC);

    auto q_at = [&](unsigned thread) { return base + thread / WARP_SIZE * (16 * MT * COLUMNS_D * 2) + lane_rows<COLUMNS_D>(thread); };
    const elem* keys_from = row_of(call.k, s.slot, at.h_kv, s.k_start + j_low + step.j + copied_row()) + CHUNK_HALVES * copied_chunk();
    const elem* values_from = row_of(call.v, s.slot, at.h_kv, s.k_start + j_low + step.j + copied_row()) + CHUNK_HALVES * copied_chunk();

    unsigned Q[KEEP_Q ? depth_columns(D) / 16 : 1][MT][4];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        m[r] = -INFINITE, l[r] = 0;
#pragma unroll
    for (int x = 0; x < MT; x++)
#pragma unroll
        for (int n = 0; n < NO; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                O[x][n][e] = 0;
    const float power = PRODUCTS ? at.scale * LOG2E : LOG2E;

    // Load Q_i and the first K_j and V_j. Only these may reach behind the last key, where blocks are not searched
    if (step.kind != EMPTY) {
        const elem* const source = row_of(call.q, s.slot, at.h, s.q_start + i0) + CHUNK_HALVES * copied_chunk();
        load_halves<BR, D, false>(base, [&](int n, bool& exists) {
            const int row = n + copied_row();
            exists = row < rows;
            return source + (exists ? row * call.q.row : 0);
        });
        if constexpr (KEEP_Q)
            commit_group();
        load_keys<D, false>(base + K_AT, call, call.k, keys_from, at, j_low + step.j, keys - step.j);
        load_keys<DV, false>(base + V_AT, call, call.v, values_from, at, j_low + step.j, keys - step.j);
        commit_group();
        if constexpr (KEEP_Q) {
            await_groups<1>();
            __syncthreads();  // Q_i is there
#pragma unroll
            for (int x = 0; x < depth_columns(D) / 16; x++)
                read_q(Q[x], q_at(threadIdx.x), x);
        }
    }
    for (bool first = true; step.kind != EMPTY; first = false) {
        const long long j0 = j_low + step.j;
        await_groups<0>();
        __syncthreads();  // Q_i and K_j are there, and no thread reads V of the step before
        if (!first)
            load_keys<DV, !SEARCHED>(base + V_AT, call, call.v, values_from, at, j0, keys - step.j);
        commit_group();

        // S = Q K^T. Addresses of operands are not to take registers beyond the product
        float S[MT][NS][4];
        const unsigned thread = once_more(threadIdx.x);
        products(S, Q, q_at(thread), base + K_AT + lane_columns<COLUMNS_D>(thread));
        finish_scores(call, {at, i0}, S, seen, step, j0);
        const Step next = SEARCHED ? step_from(j0 + BC) : step_at(step.j - BC);
        await_groups<0>();
        __syncthreads();  // V_j is there, and no thread reads K_j any more
        const int moved = SEARCHED ? next.j - step.j : -BC;
        keys_from += moved * call.k.row;
        values_from += moved * call.v.row;
        if (next.kind != EMPTY)
            load_keys<D, !SEARCHED>(base + K_AT, call, call.k, keys_from, at, j_low + next.j, keys - next.j);
        commit_group();

        // m_new = max(m, rowmax(S)); P = exp(S - m_new); l = alpha l + rowsum(P); O = alpha O + P V
        softmax_step(S, O, m, l, power, moving || step.j + BC >= whole_end);
        if constexpr (DROPOUT)
            drop(call, {at, i0}, S, j0);
        add_output(O, S, base + V_AT + lane_rows<COLUMNS_V>(once_more(threadIdx.x)));
        step = next;
    }
    await_groups<0>();
    if constexpr (!STATIC_MAXIMUM)
        return GOOD;
    return moving || !__syncthreads_or(!is_good(O, m, l, seen)) ? GOOD : BAD;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) fa2_forward(const __grid_constant__ Call call)
{
    extern __shared__ __align__(LINE_BYTES) unsigned char on_chip[];
    const unsigned base = shared_address(on_chip);
    float O[MT][NO][4], m[ROWS], l[ROWS];
    Outcome outcome = BAD;
#pragma unroll 1
    for (bool moving = !STATIC_MAXIMUM; outcome == BAD; moving = true)
        outcome = attend(call, base, moving, O, m, l);
    if (outcome == GOOD)
        store_results(call, O, m, l, base);
}


// O, m and l of all parts -> O = O / l, lse. A thread block has 16 rows, each of which eight neighbouring lanes merge, four columns at a time.
constexpr int MERGED_ROWS = 16, MERGED = 4, MERGING = 8;

extern "C" __global__ void __launch_bounds__(THREADS, 4) fa2_forward_merge(const __grid_constant__ Call call)
{
    static_assert(BR % MERGED_ROWS == 0 && THREADS == MERGED_ROWS * MERGING, "all rows of a thread block are of one block of rows");
    const unsigned blocks = (unsigned)((call.Tq + MERGED_ROWS - 1) / MERGED_ROWS), bh = blockIdx.x / blocks, Hq = (unsigned)call.Hq;
    const Sequence s = sequence(call, bh / Hq);
    const Head at = head(call, s, bh % Hq);
    const long long i = (long long)(blockIdx.x % blocks) * MERGED_ROWS + threadIdx.x / MERGING;
    if (i >= (PACKED ? s.q_length : call.Tq))
        return;
    long long j_low, j_high;
    key_range(call, s, i / BR * BR, j_low, j_high);
    const int parts = parts_of(call, j_low, j_high);
    if (parts == 1)
        return;
    constexpr int N = ceil_div(DV, MERGED * MERGING);
    const int column = threadIdx.x % MERGING * MERGED;
    float m = -INFINITE, l = 0, factor = 0, lse = -INFINITE, O[N][MERGED] = {};
    if (i < s.q_length) {
#pragma unroll 4
        for (int part = 0; part < parts; part++)
            m = larger(m, *of_part(call, call.m, at, part, i));
        const float shift = m == -INFINITE ? 0.0f : m;
#pragma unroll 2
        for (int part = 0; part < parts; part++) {
            const float weight = exponential(*of_part(call, call.m, at, part, i) - shift);
            const float* const from = sums_of_part(call, at, part, i) + column;
            l += weight * *of_part(call, call.l, at, part, i);
#pragma unroll
            for (int n = 0; n < N; n++) {
                const int x = n * MERGED * MERGING;
                float more[MERGED] = {};
                if (DV % MERGED == 0) {
                    if (column + x < DV) {
                        const float4 four = *reinterpret_cast<const float4*>(from + x);
                        more[0] = four.x, more[1] = four.y, more[2] = four.z, more[3] = four.w;
                    }
                } else {
#pragma unroll
                    for (int e = 0; e < MERGED; e++)
                        if (column + x + e < DV)
                            more[e] = from[x + e];
                }
#pragma unroll
                for (int e = 0; e < MERGED; e++)
                    O[n][e] += weight * more[e];
            }
        }
        factor = finish_row(call, at, m, l, lse);
        if constexpr (DROPOUT)
            factor *= float(call.keep_scale);
    }
    const bool empty = i >= s.q_length || l == 0;
    elem* const to = row_of(call.o, s.slot, at.h, s.q_start + i) + column;
    struct alignas(ALIGNED ? MERGED * sizeof(elem) : sizeof(elem)) Chunk { elem x[MERGED]; };
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int x = n * MERGED * MERGING;
        Chunk chunk;
#pragma unroll
        for (int e = 0; e < MERGED; e++)
            chunk.x[e] = narrow<TYPE>(empty ? 0.0f : O[n][e] * factor);
        if (ALIGNED) {
            if (column + x < DV)
                *reinterpret_cast<Chunk*>(to + x) = chunk;
        } else {
#pragma unroll
            for (int e = 0; e < MERGED; e++)
                if (column + x + e < DV)
                    to[x + e] = chunk.x[e];
        }
    }
    if (threadIdx.x % MERGING == 0)
        store_lse(call, s.slot, at.h, s.q_start + i, lse);
}
