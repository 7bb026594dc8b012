// FlashAttention-2, backward pass, in 16 bits on tensor cores (Dao 2024, algorithm 2; Chu, Liu and Lin 2026, algorithms 6 and 8).
//
// fa2_backward_keys: a block of threads owns Bc keys of one key head and runs over the Q blocks of all query heads that share it. A warp owns
// sixteen keys (SIXTEENS = 1) or 32 and computes S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T lie in its registers as operands of
// dV += P^T dO and dK += dS^T Q; dS alone passes through on-chip memory, for dQ_i += dS K, in which warps stand in another grid.
// Two or four warps may share keys (SHARING), each with its part of Br in S and dP. With COLUMN_PARTS = 1 each of two has sums over its half of Br,
// which are added in the end; else each has its part of the columns of dK and dV, as registers are not enough for more, and P^T passes through
// on-chip memory too. What products read from there is least where a warp has 32 keys and 32 rows.
// dQ_i is added at the end of its step, behind a barrier; or, with two tiles for dS (S_STAGES = 2), behind that of the next step.
// Where Q and dO are there once only and P passes through memory, Q of the next step is loaded as soon as dK is done, and dO as soon as dV is:
// it may land while S is computed.
// On chip: K (Bc, d), V (Bc, dv), once or twice dS^T (Bc, Br), with COLUMN_PARTS = 2 P^T (Bc, Br), and once or twice, for this step and the
// next, Q (Br, d), dO (Br, dv), lse, delta (Br); in registers P (Br, Bc), dK (Bc, d), dV (Bc, dv), dQ (Br, d).
//
// dQ_i goes to device memory by atomic additions, unless DETERMINISTIC. Its sums lie there as the lanes of a warp hold them ("pieces" of
// 16 x 8 numbers), so that an addition of 16 bytes a lane is one of 512 neighbouring bytes; fa2_backward_finish makes rows of them.
//
// fa2_backward_queries, for DETERMINISTIC: the same with the roles exchanged. A block owns Bc rows of a query head and runs over the K/V blocks
// of Br keys; S and dP lie in registers as operands of dQ += dS K.
//
// All start from delta = rowsum(dO * O) - dlse (side_gradients.cu).

#include "numbers.cuh"
#include "call.cuh"
#include "tile.cuh"
#include "products.cuh"
#include "philox.cuh"
#include "scores.cuh"
#include "softmax.cuh"
#include "gradient.cuh"
#include "padding.cuh"
#include "halves.cuh"

constexpr int WARPS = THREADS / WARP_SIZE;
constexpr int OWN = 16 * SIXTEENS;  // own rows of a warp: keys, or rows of fa2_backward_queries
constexpr int SHARING = WARPS * OWN / BC;  // warps that share them
constexpr bool BY_COLUMNS = COLUMN_PARTS > 1, BY_ROWS = SHARING == 2 && COLUMN_PARTS == 1;  // what each has of the sums
constexpr int COLUMNS_D = line_columns(D), COLUMNS_V = line_columns(DV), COLUMNS_S = line_columns(BR);

// Where the tiles begin, in bytes. OWN: K, V, or Q, dO of fa2_backward_queries; PASSING: Q, dO, or K, V, for one step or two.
constexpr int OWN_V = BC * COLUMNS_D * 2, PASSING = OWN_V + BC * COLUMNS_V * 2;
constexpr int PASSING_V = BR * COLUMNS_D * 2, STAGE = PASSING_V + BR * COLUMNS_V * 2;
constexpr int FACTOR = BC * COLUMNS_S * 2, FACTORS = (BY_COLUMNS + S_STAGES) * FACTOR;  // dS^T, and before it P^T where it is there
constexpr int STATISTICS = 2 * BR * (int)sizeof(float);                 // lse, delta of a step
constexpr int STAGES = (TILE_BYTES - PASSING - FACTORS) / (STAGE + STATISTICS);
constexpr int FACTORS_AT = PASSING + STAGES * STAGE, DS_AT = FACTORS_AT + BY_COLUMNS * FACTOR, STATISTICS_AT = FACTORS_AT + FACTORS;
constexpr int ROWS_AT = STATISTICS_AT + STAGES * STATISTICS, ROWS_BYTES = 112;
static_assert(ROWS_AT + ROWS_BYTES == TILE_BYTES && (STAGES == 1 || STAGES == 2), "the plan's tiles");
static_assert(WARPS * OWN == BC * SHARING && SHARING <= 4 && (SHARING & (SHARING - 1)) == 0 && BR % (16 * SHARING) == 0, "whole pieces");
static_assert(COLUMN_PARTS == SHARING || (COLUMN_PARTS == 1 && SHARING <= 2), "each has its part of all sums");
static_assert(THREADS >= 2 * BR, "a thread has one number of lse or delta");

constexpr bool LATE = S_STAGES == 2 && !DETERMINISTIC;  // dQ is added a step later, and one barrier a step is enough
static_assert(S_STAGES == 1 || STAGES == 2, "they take turns as Q and dO do");
constexpr bool EARLY = STAGES == 1 && BY_COLUMNS;  // Q of the next step is loaded before dO

constexpr int FAR = 1 << 30;  // beyond all rows and keys of a call that these kernels take
constexpr unsigned TILE_ALIGNMENT = 1024;

// Scores without options become powers of two in one multiply-add. Others are in natural units, and the difference to lse comes first: a large
// one times log2(e) could overflow.
constexpr bool IN_SUMS = PLAIN && !DROPOUT;
constexpr bool POWERS = IN_SUMS && SCALE_LATER;

// A warp's part of the columns of dK, dV or fa2_backward_queries' dQ: pieces of sixteen.
template <int N> struct Part {
    static constexpr int COUNT = ceil_div(depth_columns(N) / 16, COLUMN_PARTS), COLUMNS = COLUMN_PARTS == 1 ? 0 : 16 * COUNT;
};

__device__ constexpr int least_of(int x, int y) { return x < y ? x : y; }

// A warp's part of Br in S and dP, and how many of those rows are there at once: fewer where it has to be found out what they see, if sums
// leave few registers or options make the code long. Tiles of which all is seen have code of their own.
constexpr int NOTHING = 0, BY_BAND = 1, BY_LOOKING = 2, HIDING = HAS_MASK || !IN_SUMS ? BY_LOOKING : BY_BAND;  // how it is found out
constexpr bool WIDE_SUMS = SIXTEENS * (Part<D>::COUNT + Part<DV>::COUNT) > 8 && (D > 64 || DV > 64);
constexpr int WARP_PART = BR / SHARING, MOST = least_of(WARP_PART, 64 / SIXTEENS);
constexpr int PARTLY = least_of(MOST, HIDING == BY_LOOKING ? 16 : WIDE_SUMS ? 32 / SIXTEENS : 64);
constexpr int UNROLLED = 2;
constexpr bool DURING_S = EARLY && IN_SUMS && WARP_PART == MOST;  // dO lands while S is computed, where all is seen

constexpr bool PASSES_DS = BY_COLUMNS || !DETERMINISTIC;  // through on-chip memory
constexpr bool PUT_FIRST = SIXTEENS == 1 || BY_COLUMNS;     // before the product whose factor it is; else after, which takes more registers

__device__ __forceinline__ int own_warp() { return threadIdx.x / WARP_SIZE / SHARING; }
__device__ __forceinline__ int part_of_warp() { return SHARING == 1 ? 0 : threadIdx.x / WARP_SIZE % SHARING; }

// The nth of COUNT neighbouring pieces of columns, the first of which is `first`, a multiple of 16 COUNT.
template <int COUNT, int COLUMNS> __device__ __forceinline__ unsigned column_piece(unsigned at, int y, int first, int n)
{
    if constexpr ((COUNT & (COUNT - 1)) == 0)  // then no sum of chunks carries, and what depends on `first` leaves the loop
        return piece_at<COLUMNS>(piece_at<COLUMNS>(at, 0, first), y, 16 * n);
    else
        return piece_at<COLUMNS>(at, y, first + 16 * n);
}

// ---- products of a warp ----------------------------------------------------------------------------------------------------------

template <int M, int COUNT> __device__ __forceinline__ void clear(float (&X)[M][COUNT][4])
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < COUNT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                X[m][n][e] = 0;
}

// X = A B^T over N columns: the own rows of A, ROWS of B. `a`, `b`: where the first of them are.
template <int N, int ROWS> __device__ __forceinline__ void row_products(float (&X)[SIXTEENS][ROWS / 8][4], unsigned a, unsigned b)
{
    clear(X);
#pragma unroll
    for (int k = 0; k < depth_columns(N); k += 16) {
        unsigned A[SIXTEENS][4];
#pragma unroll
        for (int m = 0; m < SIXTEENS; m++)
            read_piece<line_columns(N)>(A[m], a, 16 * m, k);
#pragma unroll
        for (int n = 0; n < ROWS / 16; n++) {
            unsigned B[4];
            read_piece<line_columns(N)>(B, b, 16 * n, k);
#pragma unroll
            for (int m = 0; m < SIXTEENS; m++)
                multiply_both(X[m][2 * n], X[m][2 * n + 1], A[m], B);
        }
    }
}

// X += A B: A as pieces of its sixteen columns s, B the sixteen rows s of a tile, the warp's part of its N columns. `b`: where the first rows are.
template <int N>
__device__ __forceinline__ void add_product(
    float (&X)[SIXTEENS][2 * Part<N>::COUNT][4], const unsigned (&A)[SIXTEENS][4], unsigned b, int s)
{
    constexpr int COUNT = Part<N>::COUNT;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        unsigned B[4];
        load_matrices_transposed(B, column_piece<COUNT, line_columns(N)>(b, 16 * s, part_of_warp() * Part<N>::COLUMNS, n));
#pragma unroll
        for (int m = 0; m < SIXTEENS; m++)
            multiply_both(X[m][2 * n], X[m][2 * n + 1], A[m], B);
    }
}

// The sixteen columns s of numbers as pieces of an operand.
template <int COUNT> __device__ __forceinline__ void operand_of(unsigned (&A)[SIXTEENS][4], const float (&X)[SIXTEENS][COUNT][4], int s)
{
#pragma unroll
    for (int m = 0; m < SIXTEENS; m++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            A[m][e] = pair_of(X[m][2 * s + e / 2][e % 2 * 2], X[m][2 * s + e / 2][e % 2 * 2 + 1]);
}

// They go to the warp's own rows of a tile; `x`, a multiple of 8 COUNT, is the column of the first.
template <int COUNT> __device__ __forceinline__ void put_operand(unsigned tile, int x, int s, const unsigned (&A)[SIXTEENS][4])
{
    const unsigned at = (tile + chunk_at<COLUMNS_S>(OWN * own_warp() + lane_g(), 0) + 4 * lane_t()) ^ (2 * x);
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int half = 0; half < 2 * SIXTEENS; half++)
            store_shared((at ^ (2 * s + n) * 16) + half * 8 * (COLUMNS_S * 2), A[half / 2][n * 2 + half % 2]);
}

// ---- P and dS of a warp ------------------------------------------------------------------------------------------------------------

// lse or delta where the own rows are keys: of the rows 8 n + 2 lane_t() and the next; and where they are rows of Q.
struct PassingRows {
    const float* first;  // that of n = 0
    __device__ __forceinline__ float2 pair(int n, int) const { return *reinterpret_cast<const float2*>(first + 8 * n); }
};
struct OwnRows {
    float x[2 * SIXTEENS];
    __device__ __forceinline__ float2 pair(int, int half) const { return make_float2(x[half], x[half]); }
};

// Which passing rows see, or are seen by, the lane's own rows (lane_g() and that plus 8, ...): from `first` on, before `end`, both plus 8 for the
// second of them, and so on; before `count`. `own`: of the own rows from the lane's first on so many exist. Passing rows are counted from the
// lane's first of the tile.
struct Seen {
    int first, end, count, own;

    // Is there nothing at 8 n + e % 2 of half e / 2 of the mth sixteen own rows?
    __device__ __forceinline__ bool hides(int m, int n, int e) const
    {
        const int half = 2 * m + e / 2, at = 8 * n + e % 2;
        int low = -FAR, high = count;
        if constexpr (BAND) {
            low = first + 8 * half;
            const int band_end = end + 8 * half;
            high = band_end < high ? band_end : high;
        }
        return at < low || at >= high || 8 * half >= own;
    }
};

// The same by a bit for each.
struct Looked {
    unsigned hidden[SIXTEENS];
    __device__ __forceinline__ bool hides(int m, int n, int e) const { return (hidden[m] >> (4 * n + e) & 1) != 0; }
};

__device__ __forceinline__ int narrow_far(long long x) { return (int)clamp(x, -FAR, FAR); }

// S - lse, which P is the power of.
template <int COUNT, class Rows> __device__ __forceinline__ void subtract_lse(float (&S)[SIXTEENS][COUNT][4], float scale, const Rows& lse)
{
#pragma unroll
    for (int n = 0; n < COUNT; n++)
#pragma unroll
        for (int half = 0; half < 2 * SIXTEENS; half++) {
            const float2 l = lse.pair(n, half);
            float(&x)[4] = S[half / 2][n];
            x[half % 2 * 2] = multiply_add(x[half % 2 * 2], scale, -l.x);
            x[half % 2 * 2 + 1] = multiply_add(x[half % 2 * 2 + 1], scale, -l.y);
        }
}

template <int COUNT, class Hidden>
__device__ __forceinline__ void hide(float (&S)[SIXTEENS][COUNT][4], float (&dP)[SIXTEENS][COUNT][4], const Hidden& of)
{
#pragma unroll
    for (int m = 0; m < SIXTEENS; m++)
#pragma unroll
        for (int n = 0; n < COUNT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (of.hides(m, n, e)) {
                    S[m][n][e] = -INFINITE;
                    dP[m][n][e] = 0;  // it may have overflown
                }
}

// P = exp(S - lse), for the sixteen passing rows s.
template <int COUNT> __device__ __forceinline__ void probabilities(float (&S)[SIXTEENS][COUNT][4], int s)
{
#pragma unroll
    for (int n = 2 * s; n < 2 * s + 2; n++)
#pragma unroll
        for (int m = 0; m < SIXTEENS; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float above = least_or_nan(S[m][n][e], 0);  // P <= 1, whatever was rounded; NaN stays NaN
                S[m][n][e] = POWERS ? exp2_approximately(above) : exponential(above);
            }
}

// dP -> dS = P (dP - delta), for the same.
template <int COUNT, class Rows>
__device__ __forceinline__ void gradients_of_scores(
    float (&dP)[SIXTEENS][COUNT][4], const float (&P)[SIXTEENS][COUNT][4], const Rows& delta, int s)
{
#pragma unroll
    for (int n = 2 * s; n < 2 * s + 2; n++)
#pragma unroll
        for (int half = 0; half < 2 * SIXTEENS; half++) {
            const float2 d = delta.pair(n, half);
            float(&x)[4] = dP[half / 2][n];
            const float(&p)[4] = P[half / 2][n];
            x[half % 2 * 2] = p[half % 2 * 2] * (x[half % 2 * 2] - d.x);
            x[half % 2 * 2 + 1] = p[half % 2 * 2 + 1] * (x[half % 2 * 2 + 1] - d.y);
        }
}

// lse as subtract_lse() takes it. A row that does not exist or sees no key has P = 0 by an lse of inf.
__device__ __forceinline__ float shift_of(float lse)
{
    if (lse == -INFINITE)
        return INFINITE;
    return POWERS ? lse * LOG2E : lse;
}

// A tile as a warp sees it. Own and passing rows are keys and rows of Q, or the other way round.
struct Tile {
    int kind, m;            // m: the block of passing rows
    long long own, passing;  // the lane's first own row, and the first of all passing rows
    unsigned own_d, own_v, passing_d, passing_v;  // where the warp's own rows of K and V (Q and dO) are, and the passing ones of the others
    float scale;
    unsigned P, dS;  // where they pass through on-chip memory
    unsigned thread;
};

__device__ __forceinline__ unsigned word_of(uint4 words, int n) { return n == 0 ? words.x : n == 1 ? words.y : n == 2 ? words.z : words.w; }

// What dropout keeps of COUNT pieces where the own rows are keys, bit 4 n + e for each number; j and i: those of n = e = 0. Four lanes own the
// four neighbouring keys that share a counter: each asks for one in four of their rows, and they exchange the words.
template <int COUNT> __device__ __forceinline__ unsigned kept_of_keys(const Call& call, const Head& at, long long j, long long i)
{
    static_assert(4 * COUNT <= 32, "a bit for each");
    const int mine = lane_g() % 4;
    const unsigned threshold = (unsigned)call.keep_threshold;
    unsigned keeps = 0;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        const uint4 words = philox((unsigned)((j + mine / 2 * 8) / 4), (unsigned)(i + 8 * n + mine % 2), (unsigned)at.h, (unsigned)at.s.b,
            (unsigned long long)call.seed);
#pragma unroll
        for (int distance = 0; distance < 4; distance++) {
            const int other = mine ^ distance;
            const unsigned given = word_of(words, other);
            const unsigned word = distance == 0 ? given : __shfl_xor_sync(WARP, given, 4 * distance);
            keeps |= (unsigned)(word >= threshold) << (4 * n + other);
        }
    }
    return keeps;
}

// P and dS for COUNT pieces of eight passing rows, from row `first` of the block on; take(s, P, dS) is called as soon as those of sixteen are there,
// await_other() before the passing rows of dP are read.
template <bool OWN_KEYS, int HIDDEN, int COUNT, class Rows, class SeenFrom, class Await, class Take>
__device__ __forceinline__ void score_gradients(
    const Call& call, const Head& at, const Tile& tile, const SeenFrom& seen_from, int first, const Rows& lse, const Rows& delta,
    const Await& await_other, const Take& take)
{
    constexpr int ROWS = 8 * COUNT;
    const unsigned d = tile.passing_d + lane_columns<COLUMNS_D>(tile.thread) + first * (COLUMNS_D * 2);
    const unsigned dv = tile.passing_v + lane_columns<COLUMNS_V>(tile.thread) + first * (COLUMNS_V * 2);
    const int x = tile.m * BR + first + 2 * lane_t();
    auto passing = [&](int n, int e) { return tile.passing + x + 8 * n + e % 2; };
    auto own = [&](int m, int e) { return tile.own + 16 * m + e / 2 * 8; };
    float P[SIXTEENS][COUNT][4], dS[SIXTEENS][COUNT][4];
    row_products<D, ROWS>(P, tile.own_d, d);
    if constexpr (IN_SUMS) {
        Looked looked = {};
        if constexpr (HIDDEN == BY_LOOKING) {
            static_assert(4 * COUNT <= 32, "a bit for each");
#pragma unroll
            for (int m = 0; m < SIXTEENS; m++)
#pragma unroll
                for (int n = 0; n < COUNT; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (!visible(call, at, OWN_KEYS ? passing(n, e) : own(m, e), OWN_KEYS ? own(m, e) : passing(n, e)))
                            looked.hidden[m] |= 1u << (4 * n + e);
        }
        subtract_lse(P, tile.scale, lse);
        await_other();
        row_products<DV, ROWS>(dS, tile.own_v, dv);
        if constexpr (HIDDEN == BY_LOOKING)
            hide(P, dS, looked);
        else if constexpr (HIDDEN == BY_BAND)
            hide(P, dS, seen_from(tile.m * BR + first + 2 * lane_t()));
#pragma unroll
        for (int s = 0; s < COUNT / 2; s++) {
            probabilities(P, s);
            gradients_of_scores(dS, P, delta, s);
            take(s, P, dS);
        }
    } else {
        row_products<DV, ROWS>(dS, tile.own_v, dv);
#pragma unroll
        for (int m = 0; m < SIXTEENS; m++) {
            unsigned keeps = 0;
            if constexpr (DROPOUT && OWN_KEYS)
                keeps = kept_of_keys<COUNT>(call, at, own(m, 0), tile.passing + x);
#pragma unroll
            for (int n = 0; n < COUNT; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    auto statistic = [&](const Rows& rows) {
                        const float2 pair = rows.pair(n, 2 * m + e / 2);
                        return e % 2 ? pair.y : pair.x;
                    };
                    float p, ds;
                    const long long i = OWN_KEYS ? passing(n, e) : own(m, e), j = OWN_KEYS ? own(m, e) : passing(n, e);
                    visible_gradient<true>(
                        call, at, tile.kind, P[m][n][e], dS[m][n][e], [&] { return statistic(lse); }, [&] { return statistic(delta); },
                        [&] { return OWN_KEYS ? (keeps >> (4 * n + e) & 1) != 0 : kept(call, at.s.b, at.h, i, j); }, i, j, p, ds);
                    P[m][n][e] = p;
                    dS[m][n][e] = ds;
                }
        }
#pragma unroll
        for (int s = 0; s < COUNT / 2; s++)
            take(s, P, dS);
    }
}

// ---- sums of dQ in device memory -----------------------------------------------------------------------------------------------------

constexpr int PIECE = 16 * 8;  // numbers of a piece: sixteen rows of eight columns
constexpr int ROW_PIECES = ceil_div(D, 8);
#if __CUDA_ARCH__ >= 900
constexpr bool VECTOR_ADDS = true;  // lane n holds the numbers 4 n, ...
#else
constexpr bool VECTOR_ADDS = false;  // lane n holds n, 32 + n, ...
#endif

// The first of all sixteen rows of a sequence. Packed ones begin at a multiple of sixteen rows of their own.
__device__ __forceinline__ long long first_sixteen(const Sequence& s) { return PACKED ? s.q_start / 16 + s.b : 0; }

__device__ __forceinline__ long long pieces_of_head(const Call& call)
{
    return (PACKED ? call.rows_q / 16 + call.B + 1 : (call.rows_q + 15) / 16) * ROW_PIECES;
}

// The first piece of the n-th sixteen rows of a head.
__device__ __forceinline__ long long first_piece(const Call& call, long long slot, long long h, long long n)
{
    return (slot * call.Hq + h) * pieces_of_head(call) + n * ROW_PIECES;
}

// x, to where the lane's numbers of a piece are.
__device__ __forceinline__ void add_piece(float* own, const float (&x)[4])
{
#if __CUDA_ARCH__ >= 900
    atomicAdd(reinterpret_cast<float4*>(own), make_float4(x[0], x[1], x[2], x[3]));
#else
#pragma unroll
    for (int e = 0; e < 4; e++)
        atomicAdd(own + WARP_SIZE * e, x[e]);
#endif
}

// The grid of warps in dQ (Br, d): that with the fewest products of the warp that has most, then the fewest operands.
// Br at once, or half of it where a thread would have more than 64 numbers.
constexpr int QUERY_BLOCK = BR * depth_columns(D) > 64 * THREADS && BR % (2 * LINE_HALVES) == 0 ? BR / 2 : BR;
constexpr int QUERY_ROWS = QUERY_BLOCK / 16, QUERY_COLUMNS = depth_columns(D) / 16;  // pieces

__device__ constexpr int cost_of_grid(int across)
{
    const int m = ceil_div(QUERY_ROWS, ceil_div(WARPS, across)), n = ceil_div(QUERY_COLUMNS, across);
    return 64 * m * n + m + n;
}

__device__ constexpr int best_grid()
{
    int found = 1;
    for (int across = 2; across <= WARPS; across *= 2)
        found = cost_of_grid(across) < cost_of_grid(found) ? across : found;
    return found;
}

constexpr int ACROSS = best_grid();
constexpr int QUERY_M = ceil_div(QUERY_ROWS, WARPS / ACROSS), QUERY_N = ceil_div(QUERY_COLUMNS, ACROSS);  // of a warp

// Add dQ = dS K to its sums, as far as there are rows: `left` from the first on.
__device__ __forceinline__ void add_queries(float* sums, unsigned K_j, unsigned dS_i, int left)
{
    const unsigned thread = once_more(threadIdx.x);  // between steps that takes no registers
    const int row = thread / WARP_SIZE / ACROSS * QUERY_M, column = thread / WARP_SIZE % ACROSS * QUERY_N;
    if (row >= QUERY_ROWS || 16 * row >= left || column >= QUERY_COLUMNS)
        return;
    const unsigned dS = dS_i + lane_columns<COLUMNS_S>(thread), K = K_j + lane_rows<COLUMNS_D>(thread);
    float X[QUERY_M][2 * QUERY_N][4];
    clear(X);
#pragma unroll
    for (int s = 0; s < BC / 16; s++) {
        unsigned A[QUERY_M][4];
#pragma unroll
        for (int m = 0; m < QUERY_M; m++)
            load_matrices_transposed(A[m], column_piece<QUERY_M, COLUMNS_S>(dS, 16 * s, 16 * row, m));
#pragma unroll
        for (int n = 0; n < QUERY_N; n++) {
            if (QUERY_COLUMNS % QUERY_N && column + n >= QUERY_COLUMNS)
                break;
            unsigned B[4];
            load_matrices_transposed(B, column_piece<QUERY_N, COLUMNS_D>(K, 16 * s, 16 * column, n));
#pragma unroll
            for (int m = 0; m < QUERY_M; m++)
                multiply_both(X[m][2 * n], X[m][2 * n + 1], A[m], B);
        }
    }
    float* const own = sums + (row * ROW_PIECES + 2 * column) * PIECE + (VECTOR_ADDS ? 4 : 1) * (thread % WARP_SIZE);
    __syncwarp();  // else the compiler does the products of some rows only where there are such, with no other work to wait in
#pragma unroll
    for (int m = 0; m < QUERY_M; m++)
        if (16 * (row + m) < left)
#pragma unroll
            for (int n = 0; n < 2 * QUERY_N; n++)
                if (2 * QUERY_COLUMNS % (2 * QUERY_N) == 0 && D % 16 == 0 || 2 * column + n < ROW_PIECES)
                    add_piece(own + (m * ROW_PIECES + n) * PIECE, X[m][n]);
}

// ---- kernels -------------------------------------------------------------------------------------------------------------------------

struct Walk {  // a step: the m-th block of passing rows, of the h-th head of the group, and the class of the tile
    int m, h, kind;
};

// Where warps have sums over parts of Br: each gives those of the other's sixteen own rows to it, and adds what it gets to its own. Through
// shared memory that nobody reads any more; all threads of the block call it.
template <int N> __device__ __forceinline__ void exchange(float (&X)[SIXTEENS][2 * Part<N>::COUNT][4], unsigned at)
{
    constexpr int COUNT = 2 * Part<N>::COUNT, BYTES = COUNT * WARP_SIZE * 16;
    static_assert(!BY_ROWS || PASSING + WARPS * BYTES <= STATISTICS_AT, "they have room");
    const unsigned warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const bool second = part_of_warp() == 1;
    auto place = [&](unsigned of, int n) { return at + of * BYTES + (n * WARP_SIZE + lane) * 16; };
    __syncthreads();
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        unsigned words[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            words[e] = __float_as_uint(second ? X[0][n][e] : X[SIXTEENS - 1][n][e]);
            X[0][n][e] = second ? X[SIXTEENS - 1][n][e] : X[0][n][e];
        }
        store_shared(place(warp, n), words);
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        const uint4 words = load_shared(place(warp ^ 1, n));
        X[0][n][0] += __uint_as_float(words.x);
        X[0][n][1] += __uint_as_float(words.y);
        X[0][n][2] += __uint_as_float(words.z);
        X[0][n][3] += __uint_as_float(words.w);
    }
}

// Write the own rows of a gradient: from the parts of warps, of columns or, once exchanged, of rows. Through a tile that nobody reads any
// more. `full` of the rows get numbers, the others up to `exist` are padding.
template <int N>
__device__ __forceinline__ void store_own(
    float (&X)[SIXTEENS][2 * Part<N>::COUNT][4], float factor, unsigned base, int tile, elem* to, long long stride, int full, int exist)
{
    constexpr int ROW_BYTES = line_columns(N) * 2, M = BY_ROWS ? 1 : SIXTEENS;  // M sixteens of a warp, or of two
    if constexpr (BY_ROWS)
        exchange<N>(X, base + PASSING);
    const int y = BY_ROWS ? 16 * (threadIdx.x / WARP_SIZE) : OWN * own_warp();
    float factors[2 * M];
    bool empty[2 * M];
#pragma unroll
    for (int half = 0; half < 2 * M; half++) {
        factors[half] = factor;
        empty[half] = y + lane_g() + 8 * half >= full;
    }
    put_rows<line_columns(N)>(
        reinterpret_cast<const float(&)[M][2 * Part<N>::COUNT][4]>(X), factors, empty, base + tile + y * ROW_BYTES,
        part_of_warp() * Part<N>::COLUMNS / CHUNK_HALVES);
    if constexpr (BY_COLUMNS)
        __syncthreads();  // all columns of the rows are there
    else
        __syncwarp();
    constexpr int ROWS = 16 * M / (BY_COLUMNS ? SHARING : 1);
    const int first = y + (BY_COLUMNS ? part_of_warp() * ROWS : 0);
    write_rows<ROWS, N>(base + tile + first * ROW_BYTES, [&](int n) { return first + n < exist ? to + (first + n) * stride : nullptr; });
}

// The rows that see a block of keys, counted from i_low on: `steps` blocks of Br of each head from h_first up to h_end, of which those from `whole`
// to `whole_end` see all keys; the n-th key is seen from row low + n on, before high + n. q, dout, lse, delta: row i_low of head h_first of these
// arrays, and for the first two how far rows are apart; sums: from call.sums to its pieces, sums_of_head: from there to those of the next head.
// Block-uniform numbers that every step asks for: they lie in on-chip memory, as registers are scarce.
struct Rows {
    const elem *q, *dout;
    const float *lse, *delta;
    long long sums, sums_of_head, q_row, dout_row;
    int h_first, h_end, steps, count, whole, whole_end, low, high, keys;
    float scale;
};
static_assert(sizeof(Rows) <= ROWS_BYTES, "they have room");


struct KeyBlock {
    Sequence s;
    long long h_kv, j0, end;  // end: of the keys that get gradients
};

__device__ __forceinline__ KeyBlock key_block(const Call& call, unsigned block)
{
    const unsigned blocks = (unsigned)call.blocks, bh = block / blocks, b = bh / (unsigned)call.Hkv;
    KeyBlock keys;
    keys.s = sequence(call, b);
    keys.h_kv = bh - b * (unsigned)call.Hkv;
    keys.j0 = (long long)(block - bh * blocks) * BC;
    keys.end = PACKED ? keys.s.kv_length : call.Tk;
    return keys;
}

// dV += P^T dO and dK += dS^T Q for ROWS rows of Q, from row `first` of the block on. dS^T goes to its tile for dQ, and P^T too where two warps
// have parts of the columns of the sums.
template <int ROWS, int HIDDEN, class SeenFrom>
__device__ __forceinline__ void add_rows(
    const Call& call, const Head& at, const Tile& tile, const SeenFrom& seen_from, const float* lse, int first,
    float (&dK)[SIXTEENS][2 * Part<D>::COUNT][4], float (&dV)[SIXTEENS][2 * Part<DV>::COUNT][4])
{
    const PassingRows of_lse = {lse + first + 2 * lane_t()}, of_delta = {of_lse.first + BR};
    const unsigned Q = tile.passing_d + lane_rows<COLUMNS_D>(tile.thread) + first * (COLUMNS_D * 2);
    const unsigned dO = tile.passing_v + lane_rows<COLUMNS_V>(tile.thread) + first * (COLUMNS_V * 2);
    using Numbers = const float (&)[SIXTEENS][ROWS / 8][4];
    auto await_dO = [] {
        if constexpr (DURING_S && HIDDEN == NOTHING) {
            await_groups<0>();
            __syncthreads();  // dO_i is there
        }
    };
    score_gradients<true, HIDDEN, ROWS / 8>(call, at, tile, seen_from, first, of_lse, of_delta, await_dO, [&](int s, Numbers P, Numbers dS) {
        unsigned factor_P[SIXTEENS][4], factor_dS[SIXTEENS][4];
        operand_of(factor_P, P, s);
        operand_of(factor_dS, dS, s);
        add_product<DV>(dV, factor_P, dO, s);
        if constexpr (BY_COLUMNS)
            put_operand<ROWS / 8>(tile.P, first, s, factor_P);
        if constexpr (PASSES_DS && PUT_FIRST)
            put_operand<ROWS / 8>(tile.dS, first, s, factor_dS);
        add_product<D>(dK, factor_dS, Q, s);
        if constexpr (PASSES_DS && !PUT_FIRST)
            put_operand<ROWS / 8>(tile.dS, first, s, factor_dS);
    });
}

// Do the warp's keys see none of PARTLY rows from row `row` on, counted from i_low?
__device__ __forceinline__ bool all_hidden(const Rows& r, unsigned thread, int row)
{
    const int key = OWN * (thread / WARP_SIZE / SHARING);
    bool none = row >= r.count || key >= r.keys;
    if constexpr (BAND)
        none = none || row + PARTLY <= r.low + key || row >= r.high + key + OWN - 1;
    return none;
}

// P and dS of such rows, as far as others read them.
__device__ __forceinline__ void put_zeros(const Tile& tile, int first)
{
    const unsigned zeros[SIXTEENS][4] = {};
#pragma unroll
    for (int s = 0; s < PARTLY / 16; s++) {
        if constexpr (BY_COLUMNS)
            put_operand<PARTLY / 8>(tile.P, first, s, zeros);
        if constexpr (PASSES_DS)
            put_operand<PARTLY / 8>(tile.dS, first, s, zeros);
    }
}

// X += A B for the rows of the other warps that share own rows, which have put A into a tile.
template <int N> __device__ __forceinline__ void add_others(float (&X)[SIXTEENS][2 * Part<N>::COUNT][4], unsigned factors, unsigned b)
{
    const unsigned own = factors + OWN * own_warp() * (COLUMNS_S * 2) + lane_rows<COLUMNS_S>();
#pragma unroll
    for (int n = 1; n < SHARING; n++) {
        const int other = (part_of_warp() ^ n) * WARP_PART;
#pragma unroll
        for (int s = 0; s < WARP_PART / 16; s++) {
            unsigned A[SIXTEENS][4];
#pragma unroll
            for (int m = 0; m < SIXTEENS; m++)
                read_piece<COLUMNS_S>(A[m], piece_at<COLUMNS_S>(own, 0, other), 16 * m, 16 * s);
            add_product<N>(X, A, b + lane_rows<line_columns(N)>() + other * (line_columns(N) * 2), s);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fa2_backward_keys(const __grid_constant__ Call call)
{
    extern __shared__ __align__(TILE_ALIGNMENT) unsigned char on_chip[];
    const unsigned base = shared_address(on_chip);

    const KeyBlock keys = key_block(call, blockIdx.x);
    const Sequence& s = keys.s;
    const long long h_kv = keys.h_kv, j0 = keys.j0;
    const int group = (unsigned)call.Hq / (unsigned)call.Hkv, h_first = (int)h_kv * group;
    if (j0 >= keys.end)
        return;

    long long i_low, i_high;
    row_range(call, s, j0, i_low, i_high);
    Rows first_rows;
    {
        Rows& r = first_rows;
        r.q = row_of(call.q, s.slot, h_first, s.q_start + i_low);
        r.dout = row_of(call.dout, s.slot, h_first, s.q_start + i_low);
        r.lse = row_of(call.lse, s.slot, h_first, s.q_start + i_low);
        r.delta = row_of(call.delta, s.slot, h_first, s.q_start + i_low);
        r.q_row = call.q.row;
        r.dout_row = call.dout.row;
        r.sums = first_piece(call, s.slot, h_first, first_sixteen(s) + i_low / 16) * PIECE;
        r.scale = POWERS ? float(call.scale) * LOG2E : float(call.scale);
        r.sums_of_head = pieces_of_head(call) * PIECE;
        r.h_first = h_first;
        r.h_end = h_first + group;
        r.steps = (int)((most(i_high - i_low, 0) + BR - 1) / BR);
        r.count = narrow_far(s.q_length - i_low);
        r.whole = r.low = 0;
        r.whole_end = r.steps;
        r.high = FAR;
        r.keys = narrow_far(s.kv_length - j0);
        if constexpr (BAND) {
            const long long low = j0 - s.offset - call.band_upper - i_low, high = j0 - s.offset - call.band_lower + 1 - i_low;
            r.whole = (narrow_far(low + BC - 1) + BR - 1) / BR;
            if (r.count > high)
                r.whole_end = (int)clamp(high, 0, FAR) / BR;
            r.low = narrow_far(low);
            r.high = narrow_far(high);
        }
        if (r.count / BR < r.whole_end)  // rows of padding see nothing
            r.whole_end = r.count / BR;
        if (r.keys < BC)
            r.whole_end = 0;
    }
    Rows* const kept_rows = (Rows*)(on_chip + ROWS_AT);
    if (threadIdx.x == 0)
        *kept_rows = first_rows;

    // The first step from here on
    auto step_from = [&](const Rows& r, int m, int h) -> Walk {
#if HAS_MASK
        for (; h < r.h_end; h++, m = 0)
            for (; m < r.steps; m++) {
                const int kind = tile_kind(call, head(call, s, h, h_kv), i_low + (long long)m * BR, j0);
                if (kind != EMPTY)
                    return {m, h, kind};
            }
        return {0, r.h_end, EMPTY};
#else
        if (m >= r.steps) {
            m = 0;
            h = r.steps > 0 ? h + 1 : r.h_end;
        }
        return {m, h, PARTIAL};  // kind_of says more
#endif
    };
    auto kind_of = [&](const Rows& r, const Walk& to) { return HAS_MASK ? to.kind : to.m >= r.whole && to.m < r.whole_end ? FULL : PARTIAL; };
    auto next_of = [](const elem*& rows, long long further) {
        const elem* const now = rows;
        rows += further;
        return now;
    };
    auto load_Q = [&](const Rows& r, unsigned tile, const Walk& to) {
        const unsigned thread = once_more(threadIdx.x), head = to.h - r.h_first, row = to.m * BR + copied_row(thread);
        const long long q_row = r.q_row;
        const elem* q = r.q + (head * call.q.head + row * q_row + CHUNK_HALVES * copied_chunk(thread));
        const int left = r.count - (int)row;
        if ((to.m + 1) * BR <= r.count)
            load_halves<BR, D, true>(tile, [&](int, bool&) { return next_of(q, ROWS_AT_ONCE * q_row); });
        else
            load_halves<BR, D, false>(tile, [&](int n, bool& exists) { return (exists = n < left) ? q + n * q_row : r.q; });
    };
    auto load_dO = [&](const Rows& r, unsigned tile, const Walk& to) {
        const unsigned thread = once_more(threadIdx.x), head = to.h - r.h_first, row = to.m * BR + copied_row(thread);
        const long long dout_row = r.dout_row;
        const elem* dout = r.dout + (head * call.dout.head + row * dout_row + CHUNK_HALVES * copied_chunk(thread));
        const int left = r.count - (int)row;
        if ((to.m + 1) * BR <= r.count)
            load_halves<BR, DV, true>(tile + PASSING_V, [&](int, bool&) { return next_of(dout, ROWS_AT_ONCE * dout_row); });
        else
            load_halves<BR, DV, false>(tile + PASSING_V, [&](int n, bool& exists) { return (exists = n < left) ? dout + n * dout_row : r.dout; });
    };
    // lse and delta are copied as they are; once it is there, lse is made what subtract_lse() takes
    float* const statistics = (float*)(on_chip + STATISTICS_AT);
    auto load_statistics = [&](const Rows& r, const Walk& to, int stage) {
        const unsigned thread = once_more(threadIdx.x);
        if (thread < 2 * BR) {
            const unsigned row = to.m * BR + thread % BR, head = to.h - r.h_first;
            const bool exists = (int)row < r.count, has_lse = thread < BR;
            const float* from = has_lse ? r.lse : r.delta;
            if (exists)
                from += has_lse ? head * call.lse.head + row * call.lse.row : head * call.delta.head + row * call.delta.row;
            copy_to_shared<4>(statistics + stage * (2 * BR) + thread, from, exists);
        }
    };
    auto finish_statistics = [&](const Rows& r, const Walk& of, int stage) {
        if (threadIdx.x < BR) {
            float& lse = statistics[stage * (2 * BR) + threadIdx.x];
            lse = of.m * BR + (int)threadIdx.x < r.count ? shift_of(lse) : INFINITE;
        }
    };

    float dK[SIXTEENS][2 * Part<D>::COUNT][4], dV[SIXTEENS][2 * Part<DV>::COUNT][4];
    clear(dK);
    clear(dV);
    Walk step = step_from(first_rows, 0, h_first);
    const bool any = step.h < first_rows.h_end;

    // Load K_j, V_j and the first Q_i, dO_i
    if (any) {
        const long long j_copied = s.k_start + j0 + copied_row();
        const int left = narrow_far(s.kv_length - j0 - copied_row());
        const elem* const K = row_of(call.k, s.slot, h_kv, j_copied) + CHUNK_HALVES * copied_chunk();
        const elem* const V = row_of(call.v, s.slot, h_kv, j_copied) + CHUNK_HALVES * copied_chunk();
        load_halves<BC, D, false>(base, [&](int n, bool& exists) { return (exists = n < left) ? K + n * call.k.row : call.k.data; });
        load_halves<BC, DV, false>(base + OWN_V, [&](int n, bool& exists) { return (exists = n < left) ? V + n * call.v.row : call.v.data; });
        load_Q(first_rows, base + PASSING, step);
        load_statistics(first_rows, step, 0);
        if constexpr (DURING_S)
            commit_group();
        load_dO(first_rows, base + PASSING, step);
        commit_group();
        await_groups<DURING_S>();
        finish_statistics(first_rows, step, 0);
    }
    auto add_dQ = [&](const Rows& r, unsigned tiles, unsigned dS_i, int m, int h) {
        const unsigned head = h - r.h_first, sixteens = m * (BR / 16);
        float* const sums = call.sums + (r.sums + head * r.sums_of_head + (long long)sixteens * (ROW_PIECES * PIECE));
#pragma unroll 1
        for (int n = 0; n < BR; n += QUERY_BLOCK)
            add_queries(sums + n / 16 * (ROW_PIECES * PIECE), tiles, piece_at<COLUMNS_S>(dS_i, 0, n), r.count - m * BR - n);
    };
    Walk before = step;  // where steps skip blocks; else it is found anew, and takes no registers
    bool begun = false;
    int stage = 0;
    for (bool more = any; more || (LATE && begun);) {
        const unsigned tiles = once_more(base);
        const int next_stage = STAGES == 2 ? stage ^ 1 : 0;
        __syncthreads();  // Q_i and, but for DURING_S, dO_i are there; no thread reads those of the step before, and its dS
        const Rows& r = *kept_rows;
        const Walk found = HAS_MASK ? step_from(r, step.m + 1, step.h) : step;
        auto next_step = [&]() -> Walk {  // found anew each time where that is easy: between, it takes no registers
            if constexpr (HAS_MASK)
                return found;
            return step_from(r, (int)once_more(step.m) + 1, step.h);
        };
        auto load_next = [&](bool Q, bool dO) {
            const Walk next = next_step();
            const unsigned to = tiles + PASSING + next_stage * STAGE;
            if (more && next.h < r.h_end) {
                if (Q) {
                    load_Q(r, to, next);
                    load_statistics(r, next, next_stage);
                }
                if (dO)
                    load_dO(r, to, next);
                commit_group();
            }
        };
        if constexpr (STAGES == 2)
            load_next(true, true);
        if constexpr (LATE) {
            if (begun) {
                const bool first = step.m == 0;
                add_dQ(r, tiles, tiles + DS_AT + (stage ^ 1) * FACTOR, HAS_MASK ? before.m : (first ? r.steps : step.m) - 1,
                    HAS_MASK ? before.h : step.h - (first ? 1 : 0));
            }
            if (!more)
                break;
            begun = true;
        }

        // S^T = K Q^T, dP^T = V dO^T; P = exp(S - lse), dS = P (dP - delta)
        // dV += P^T dO, dK += dS^T Q
        const Head at = head(call, s, step.h, h_kv);
        auto seen_from = [&](int x) {
            const int first_key = OWN * own_warp() + lane_g();
            return Seen{r.low + first_key - x, r.high + first_key - x, r.count - x, r.keys - first_key};
        };
        auto tile = [&]() -> Tile {  // made when it is needed: until then it takes no registers
            const unsigned now = once_more(tiles), thread = once_more(threadIdx.x), Q_i = now + PASSING + stage * STAGE;
            const unsigned own_rows = OWN * (thread / WARP_SIZE / SHARING);
            const unsigned own_K = now + own_rows * (COLUMNS_D * 2) + lane_rows<COLUMNS_D>(thread);
            const unsigned own_V = now + OWN_V + own_rows * (COLUMNS_V * 2) + lane_rows<COLUMNS_V>(thread);
            return {kind_of(r, step), step.m, j0 + OWN * own_warp() + lane_g(), i_low, own_K, own_V, Q_i, Q_i + PASSING_V, r.scale,
                now + FACTORS_AT, now + DS_AT + (LATE ? stage * FACTOR : 0), thread};
        };
        const float* const lse = statistics + stage * (2 * BR);
        const int first = part_of_warp() * WARP_PART;
        if (IN_SUMS && kind_of(r, step) == FULL) {
#pragma unroll UNROLLED
            for (int n = 0; n < WARP_PART; n += MOST)
                add_rows<MOST, NOTHING>(call, at, tile(), seen_from, lse, first + n, dK, dV);
        } else {
            if constexpr (DURING_S) {
                await_groups<0>();
                __syncthreads();  // dO_i is there
            }
#pragma unroll 1
            for (int n = 0; n < WARP_PART; n += PARTLY) {
                const Tile now = tile();
                if (HIDING == BY_BAND && all_hidden(r, now.thread, step.m * BR + first + n))
                    put_zeros(now, first + n);
                else
                    add_rows<PARTLY, HIDING>(call, at, now, seen_from, lse, first + n, dK, dV);
            }
        }
        if constexpr (BY_COLUMNS) {
            if constexpr (LATE || DETERMINISTIC || EARLY)
                sync_group<SHARING>();  // P and dS of the other warps are there
            else
                __syncthreads();  // and those of all
            const Tile now = tile();
            add_others<D>(dK, now.dS, now.passing_d);
            if constexpr (EARLY) {
                __syncthreads();  // no thread reads Q_i, lse and delta any more
                load_next(true, false);
            }
            add_others<DV>(dV, now.P, now.passing_v);
        }
        if constexpr (STAGES == 1 || (!BY_COLUMNS && !LATE && !DETERMINISTIC))
            __syncthreads();  // dS is there, and no thread reads Q_i and dO_i any more
        if constexpr (STAGES == 1)
            load_next(!EARLY, true);

        // dQ_i += dS K
        if constexpr (!DETERMINISTIC && !LATE) {
            add_dQ(r, tiles, tiles + DS_AT, step.m, step.h);
        }
        if constexpr (HAS_MASK)
            before = step;
        step = next_step();
        more = step.h < r.h_end;
        if (more) {
            await_groups<DURING_S>();
            finish_statistics(r, step, next_stage);
        }
        stage = next_stage;
    }
    __syncthreads();  // no thread reads K_j and V_j any more

    // Write dK_j, dV_j
    const KeyBlock own = key_block(call, once_more(blockIdx.x));
    const int full = narrow_far(own.s.kv_length - own.j0), exist = narrow_far(own.end - own.j0);
    const long long row = own.s.k_start + own.j0;
    store_own<D>(dK, float(call.scale), base, 0, row_of(call.dk, own.s.slot, own.h_kv, row), call.dk.row, full, exist);
    store_own<DV>(dV, 1, base, OWN_V, row_of(call.dv, own.s.slot, own.h_kv, row), call.dv.row, full, exist);
}

#if DETERMINISTIC
// dQ += dS K for KEYS keys, from key `first` of the block on; dS goes to its tile where two warps have parts of the columns of the sums.
template <int KEYS, int HIDDEN, class SeenFrom>
__device__ __forceinline__ void add_keys(
    const Call& call, const Head& at, const Tile& tile, const SeenFrom& seen_from, const OwnRows& lse, const OwnRows& delta,
    int first, float (&dQ)[SIXTEENS][2 * Part<D>::COUNT][4])
{
    const unsigned K = tile.passing_d + lane_rows<COLUMNS_D>(tile.thread) + first * (COLUMNS_D * 2);
    using Numbers = const float (&)[SIXTEENS][KEYS / 8][4];
    auto nothing_to_await = [] {};
    score_gradients<false, HIDDEN, KEYS / 8>(call, at, tile, seen_from, first, lse, delta, nothing_to_await, [&](int s, Numbers, Numbers dS) {
        unsigned factor[SIXTEENS][4];
        operand_of(factor, dS, s);
        add_product<D>(dQ, factor, K, s);
        if constexpr (BY_COLUMNS)
            put_operand<KEYS / 8>(tile.dS, first, s, factor);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fa2_backward_queries(const __grid_constant__ Call call)
{
    extern __shared__ __align__(TILE_ALIGNMENT) unsigned char on_chip[];
    const unsigned base = shared_address(on_chip);

    const unsigned blocks = (unsigned)call.blocks, bh = blockIdx.x / blocks, b = bh / (unsigned)call.Hq;
    const Sequence s = sequence(call, b);
    const Head at = head(call, s, bh - b * (unsigned)call.Hq, (bh - b * (unsigned)call.Hq) / ((unsigned)call.Hq / (unsigned)call.Hkv));
    const long long i0 = (long long)(blocks - 1 - (blockIdx.x - bh * blocks)) * BC;
    const long long rows_end = PACKED ? s.q_length : call.Tq;
    if (i0 >= rows_end)
        return;

    // Blocks of keys, counted from j_low on, as those of rows in fa2_backward_keys
    long long j_low, j_high;
    key_range<BC, BR>(call, s, i0, j_low, j_high);
    const int steps = (int)((most(j_high - j_low, 0) + BR - 1) / BR), keys = narrow_far(s.kv_length - j_low);
    int whole = 0, whole_end = keys / BR;
    const int y = OWN * own_warp() + lane_g();
    Seen seen = {0, 0, keys, narrow_far(s.q_length - i0 - y)};  // from key j_low on
    if constexpr (BAND) {
        const long long low = i0 + s.offset + call.band_lower - j_low, high = i0 + s.offset + call.band_upper + 1 - j_low;
        whole = (narrow_far(low + BC - 1) + BR - 1) / BR;
        whole_end = (int)clamp(high, 0, keys) / BR;
        seen.first = narrow_far(low + y);
        seen.end = narrow_far(high + y);
    }
    if (i0 + BC > s.q_length)
        whole_end = 0;

    // The first step from here on; steps are at an end at m = steps
    auto step_from = [&](int m) -> Walk {
#if HAS_MASK
        for (; m < steps; m++) {
            const int kind = tile_kind<BC, BR>(call, at, i0, j_low + (long long)m * BR);
            if (kind != EMPTY)
                return {m, 0, kind};
        }
        return {steps, 0, EMPTY};
#else
        return {m, 0, m >= whole && m < whole_end ? FULL : PARTIAL};
#endif
    };
    const long long j_copied = s.k_start + j_low + copied_row();
    const elem* const K = row_of(call.k, s.slot, at.h_kv, j_copied) + CHUNK_HALVES * copied_chunk();
    const elem* const V = row_of(call.v, s.slot, at.h_kv, j_copied) + CHUNK_HALVES * copied_chunk();
    auto load_keys = [&](unsigned tile, int m) {
        const long long j = (long long)m * BR;
        const int left = keys - m * BR - copied_row();
        const elem *const k = K + j * call.k.row, *const v = V + j * call.v.row;
        load_halves<BR, D, false>(tile, [&](int n, bool& exists) { return (exists = n < left) ? k + n * call.k.row : call.k.data; });
        load_halves<BR, DV, false>(tile + PASSING_V, [&](int n, bool& exists) { return (exists = n < left) ? v + n * call.v.row : call.v.data; });
    };

    float dQ[SIXTEENS][2 * Part<D>::COUNT][4];
    clear(dQ);
    OwnRows lse, delta;
#pragma unroll
    for (int half = 0; half < 2 * SIXTEENS; half++) {
        const long long i = i0 + y + 8 * half;
        lse.x[half] = i < s.q_length ? shift_of(row_lse(call, at, i)) : INFINITE;
        delta.x[half] = i < s.q_length ? row_delta(call, at, i) : 0;
    }
    Walk step = step_from(0);

    // Load Q_i, dO_i and the first K_j, V_j
    if (step.m < steps) {
        const long long i_copied = s.q_start + i0 + copied_row();
        const int left = narrow_far(s.q_length - i0 - copied_row());
        const elem* const Q = row_of(call.q, s.slot, at.h, i_copied) + CHUNK_HALVES * copied_chunk();
        const elem* const dO = row_of(call.dout, s.slot, at.h, i_copied) + CHUNK_HALVES * copied_chunk();
        load_halves<BC, D, false>(base, [&](int n, bool& exists) { return (exists = n < left) ? Q + n * call.q.row : call.q.data; });
        load_halves<BC, DV, false>(
            base + OWN_V, [&](int n, bool& exists) { return (exists = n < left) ? dO + n * call.dout.row : call.dout.data; });
        load_keys(base + PASSING, step.m);
    }
    commit_group();
    const unsigned own_Q = base + OWN * own_warp() * (COLUMNS_D * 2) + lane_rows<COLUMNS_D>();
    const unsigned own_dO = base + OWN_V + OWN * own_warp() * (COLUMNS_V * 2) + lane_rows<COLUMNS_V>();
    const float scale = POWERS ? float(call.scale) * LOG2E : float(call.scale);

    int stage = 0;
    while (step.m < steps) {
        const Walk next = step_from(step.m + 1);
        const unsigned K_j = base + PASSING + stage * STAGE, V_j = K_j + PASSING_V;
        const int next_stage = STAGES == 2 ? stage ^ 1 : 0;
        await_groups<0>();
        __syncthreads();  // K_j and V_j are there; no thread reads those of the step before, and its dS
        if constexpr (STAGES == 2) {
            if (next.m < steps)
                load_keys(base + PASSING + next_stage * STAGE, next.m);
            commit_group();
        }

        // S = Q K^T, dP = dO V^T; P = exp(S - lse), dS = P (dP - delta)
        // dQ += dS K
        auto seen_from = [&](int x) { return Seen{seen.first - x, seen.end - x, seen.count - x, seen.own}; };
        const Tile tile = {step.kind, step.m, i0 + y, j_low, own_Q, own_dO, K_j, V_j, scale, 0, base + DS_AT, threadIdx.x};
        const int first = part_of_warp() * WARP_PART;
        if (IN_SUMS && tile.kind == FULL) {
#pragma unroll 1
            for (int n = 0; n < WARP_PART; n += MOST)
                add_keys<MOST, NOTHING>(call, at, tile, seen_from, lse, delta, first + n, dQ);
        } else {
#pragma unroll 1
            for (int n = 0; n < WARP_PART; n += PARTLY)
                add_keys<PARTLY, HIDING>(call, at, tile, seen_from, lse, delta, first + n, dQ);
        }
        if constexpr (BY_COLUMNS) {
            sync_group<SHARING>();  // dS of the other warps is there
            add_others<D>(dQ, base + DS_AT, K_j);
        }
        if constexpr (STAGES == 1) {
            __syncthreads();  // no thread reads K_j and V_j any more
            if (next.m < steps)
                load_keys(base + PASSING, next.m);
            commit_group();
        }
        step = next;
        stage = next_stage;
    }
    await_groups<0>();
    __syncthreads();  // no thread reads Q_i any more

    // Write dQ_i
    store_own<D>(
        dQ, float(call.scale), base, 0, row_of(call.dq, s.slot, at.h, s.q_start + i0), call.dq.row, narrow_far(s.q_length - i0),
        narrow_far(rows_end - i0));
}

#else

// dQ = scale * the sums, in the dtype of q, for blocks of Br rows. Rows of padding are 0. A thread has eight columns of two rows: those of four
// lanes' numbers of a piece.
extern "C" __global__ void __launch_bounds__(THREADS) fa2_backward_finish(const __grid_constant__ Call call)
{
    const unsigned blocks = (unsigned)call.blocks, bh = blockIdx.x / blocks, b = bh / (unsigned)call.Hq;
    const Sequence s = sequence(call, b);
    const long long h = bh - b * (unsigned)call.Hq, i0 = (long long)(blockIdx.x - bh * blocks) * BR;
    const int left = narrow_far((PACKED ? s.q_length : call.Tq) - i0), full = narrow_far(s.q_length - i0);
    const float* const sums = call.sums + first_piece(call, s.slot, h, first_sixteen(s) + i0 / 16) * PIECE;
    const float scale = float(call.scale);
    for (int n = threadIdx.x; n < BR / 2 * ROW_PIECES; n += THREADS) {
        const int piece = n % ROW_PIECES, row = n / ROW_PIECES / 8 * 16 + n / ROW_PIECES % 8;
        if (row >= left)
            continue;
        const float* const from = sums + (row / 16 * ROW_PIECES + piece) * PIECE;
        float4 x[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
            x[e] = *reinterpret_cast<const float4*>(from + (VECTOR_ADDS ? 4 * (4 * (row % 8) + e) : WARP_SIZE * e + 4 * (row % 8)));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = row + 8 * half;
            if (i >= left)
                continue;
            float X[8];
            if constexpr (VECTOR_ADDS) {
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    X[2 * t] = half ? x[t].z : x[t].x;
                    X[2 * t + 1] = half ? x[t].w : x[t].y;
                }
            } else {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float4 lanes = x[2 * half + e];
                    X[e] = lanes.x, X[2 + e] = lanes.y, X[4 + e] = lanes.z, X[6 + e] = lanes.w;
                }
            }
#pragma unroll
            for (int c = 0; c < 8; c++)
                X[c] = i < full ? X[c] * scale : 0;
            store_chunk<D>(row_of(call.dq, s.slot, h, s.q_start + i0 + i), 8 * piece,
                make_uint4(pair_of(X[0], X[1]), pair_of(X[2], X[3]), pair_of(X[4], X[5]), pair_of(X[6], X[7])));
        }
    }
}
#endif
