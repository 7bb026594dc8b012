// FlashAttention-2, backward pass, in float32 by tensor cores that take bfloat16 (Dao 2024, algorithm 2), from parts that were split before
// (split_inputs.cu). What products lose, and what sums: split.cuh, split_rows.cuh.
//
// fa2_backward_keys: a block of eight warps owns Bc keys of one key head and runs over the Q blocks of all query heads that share it. Scores lie as S^T
// (keys, rows), of which a warp has 16 keys and, where these are fewer than 16 for each, a part of the rows. A warp that has all rows multiplies P and
// dS, split in registers, with dO and Q as they lie; else they go through on-chip memory, and a warp has a part of the columns of dK and dV, which stay
// in registers. dQ_i += dS K goes to device memory by atomic additions, whose order is the one in which products leave it: a patch is 16 rows and
// all columns, eight of them after the other, and four numbers of these each lane's. fa2_backward_finish brings them into order.
//
// On chip:  parts of K (Bc, d), V (Bc, dv), Q (Br, d), dO (Br, dv), P^T or dS^T (Bc, Br); lse and delta of Br rows, which rows see all keys; in registers S, P, dP, dS (Bc, Br),
// dK (Bc, d), dV (Bc, dv), dQ (Br, d). Read per step: Q_i and dO_i, while the products of dQ and, of dO_i, of dK run.
//
// It starts from delta = rowsum(dO * O) - dlse (side_gradients.cu).

#include "numbers.cuh"
#include "call.cuh"
#include "tile.cuh"
#include "split_rows.cuh"

constexpr int WARPS = THREADS / WARP_SIZE;
constexpr int WARPS_K = BC / 16, WARPS_R = WARPS / WARPS_K;  // warps along keys, and along the rows of S^T or the columns of dK and dV
constexpr int ROWS = BR / WARPS_R, NR = ROWS / 8;            // of a warp: rows of S^T, and pieces of 8
constexpr int WARPS_Q = BR / 16;                             // warps along the rows of dQ
constexpr bool THROUGH_MEMORY = WARPS_R > 1;
// Pairs of pieces of 8 columns: of d, and of d and dv that a warp has of dK, of dV and of dQ
constexpr int PAIRS_D = depth_columns(D) / 16, PAIRS_K = ceil_div(PAIRS_D, WARPS_R), PAIRS_V = ceil_div(depth_columns(DV) / 16, WARPS_R);
constexpr int PAIRS_Q = ceil_div(PAIRS_D, WARPS / WARPS_Q), ND = 2 * PAIRS_D, NK = 2 * PAIRS_K, NV = 2 * PAIRS_V, NQ = 2 * PAIRS_Q;
constexpr int V_AT = tile_bytes(BC, D), Q_AT = V_AT + tile_bytes(BC, DV), O_AT = Q_AT + tile_bytes(BR, D);  // bytes from the start of K
constexpr int S_AT = O_AT + tile_bytes(BR, DV), LSE_AT = S_AT + tile_bytes(BC, BR), DELTA_AT = LSE_AT + BR * 4, WHOLE_AT = DELTA_AT + BR * 4;
constexpr int PIECE_NUMBERS = 16 * 8;
constexpr int FAR = 1 << 30;  // beyond all rows and keys of a call that this kernel takes
// Rows that dK and dV are summed over in registers, as errors of a sum grow with its terms; and rows of a head from which on its end is such an end.
constexpr int LONGEST_SUM = 2048, LEAST_SUM = 512;
static_assert(WARPS_K * WARPS_R == WARPS && ROWS % 32 == 0 && WARPS % WARPS_Q == 0 && BR <= THREADS, "whole pieces");
static_assert(WHOLE_AT + 16 == TILE_BYTES, "the plan's tiles");

// A tile of scores in registers, transposed: S[n][e] is key 8 (e / 2) + lane_g() of the warp's, row 8 n + 2 lane_t() + e % 2 of the warp's.
struct ScoreTile {
    static constexpr int R = 2 * NR, C = 2;
    static __device__ __forceinline__ int row(int r) { return r / 2 * 8 + 2 * lane_t() + r % 2; }
    static __device__ __forceinline__ int column(int c) { return threadIdx.x / WARP_SIZE % WARPS_K * 16 + lane_g() + 8 * c; }
};
constexpr int ROW_LANES = 4;

#include "philox.cuh"
#include "scores.cuh"
#include "padding.cuh"

static_assert(PLAIN && !DROPOUT && !HAS_MASK && !PAGE && !DETERMINISTIC, "other calls are those of cuda/fa2_backward.cu");

// As in split_forward.cu
constexpr bool PRODUCTS = SCALE_LATER;

__device__ __forceinline__ int narrowed(long long x) { return (int)clamp(x, -FAR, FAR); }

// What a block of threads owns: keys from j0 on, and the rows that the band shows them, from i_low to i_high.
struct Owned {
    Sequence s;
    long long h_kv, j0, i_low, i_high;
};

__device__ __forceinline__ Owned owned_by(const Call& call, unsigned index)
{
    const unsigned blocks = (unsigned)call.blocks, Hkv = (unsigned)call.Hkv, bh = index / blocks;
    Owned own = {sequence(call, bh / Hkv), bh % Hkv, (long long)(index % blocks) * BC};
    row_range(call, own.s, own.j0, own.i_low, own.i_high);
    return own;
}

// P of a hidden key is -0: what is seen has no sign. `row` is the lane's first one, from i_low on. What the lane's keys are seen by is found once more:
// most tiles do not need it.
__device__ __forceinline__ void hide(const Call& call, float (&P)[NR][4], int row)
{
    const Owned own = owned_by(call, once_more(blockIdx.x));
    const int warp = (int)once_more(threadIdx.x) / WARP_SIZE, key = warp % WARPS_K * 16 + (int)(once_more(threadIdx.x) % WARP_SIZE) / 4;
    const int rows = narrowed(own.s.q_length - own.i_low) - row, keys = narrowed(own.s.kv_length - own.j0) - key;
    const long long distance = own.j0 + key - own.i_low - row - own.s.offset;
    const int first = BAND ? narrowed(distance - call.band_upper) : 0, end = BAND ? narrowed(distance - call.band_lower + 1) : 0;
#pragma unroll
    for (int n = 0; n < NR; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int x = 8 * n + e % 2, c = e / 2 * 8;
            if (x >= rows || c >= keys || (BAND && (x < first + c || x >= end + c)))
                P[n][e] = -0.0f;
        }
}

__device__ __forceinline__ bool is_hidden(float P) { return (int)__float_as_uint(P) < 0; }

// The first patch of a head's rows from i on, i a multiple of 16. A head has call.parts; of packed sequences each begins with a patch of its own.
__device__ __forceinline__ unsigned patch_number(const Call& call, const Sequence& s, long long h, long long i)
{
    return row_number(call.Hq, call.parts, s.slot, h, (PACKED ? s.q_start / 16 + s.b : 0) + i / 16);
}

__device__ __forceinline__ float* patch_of(const Call& call, unsigned number) { return call.sums + (unsigned long long)number * (ND * PIECE_NUMBERS); }

// dQ += dS K for the 16 rows and the columns of this warp; `patch` is that of the rows
__device__ __forceinline__ void add_queries(float* patch, unsigned base, unsigned zero)
{
    const unsigned thread = once_more(threadIdx.x);
    const int warp = (int)(thread / WARP_SIZE), pair = warp / WARPS_Q * PAIRS_Q;
    const unsigned s_at = piece_at<line_columns(BR)>(base + S_AT + lane_columns<line_columns(BR)>(thread), 0, warp % WARPS_Q * 16);
    const unsigned k_at = base + lane_rows<line_columns(D)>(thread);
    float dQ[NQ][4];
    clear(dQ);
    add_product<BC / 16>(
        dQ, [&](unsigned(&A)[PARTS][4], int s, unsigned later) { read_parts_transposed<BC, BR>(A, s_at + later, 16 * s, 0); },
        [&](unsigned(&B)[PARTS][4], int s, int x, unsigned later) {
            read_parts_transposed<BC, D>(B, piece_at<line_columns(D)>(k_at, 0, 16 * (pair + x)) + later, 16 * s, 0);
        },
        zero);
    float* const to = patch + 2 * pair * PIECE_NUMBERS + thread % WARP_SIZE * 4;
#pragma unroll
    for (int n = 0; n < NQ; n++) {
        if (PAIRS_Q * (WARPS / WARPS_Q) != PAIRS_D && 2 * pair + n >= ND)  // there are no such columns, nor is there room
            continue;
#if __CUDA_ARCH__ >= 900
        atomicAdd(reinterpret_cast<float4*>(to + n * PIECE_NUMBERS), make_float4(dQ[n][0], dQ[n][1], dQ[n][2], dQ[n][3]));
#else
#pragma unroll
        for (int e = 0; e < 4; e++)
            atomicAdd(to + n * PIECE_NUMBERS + e, dQ[n][e]);
#endif
    }
}

// The parts of P^T or dS^T, as the words of A, into on-chip memory.
__device__ __forceinline__ void put_scores(const unsigned (&words)[NR / 2][PARTS][4], unsigned base)
{
    const unsigned thread = once_more(threadIdx.x);
    const int warp = (int)(thread / WARP_SIZE), key = warp % WARPS_K * 16 + (int)(thread % WARP_SIZE / 4), row = warp / WARPS_K * ROWS;
    const unsigned at = base + S_AT + chunk_at<line_columns(BR)>(key, row / CHUNK_HALVES) + thread % 4 * 4;
#pragma unroll
    for (int s = 0; s < NR / 2; s++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const unsigned to = (at ^ (2 * s + e / 2) << 4) + e % 2 * (8 * line_columns(BR) * 2);
#pragma unroll
            for (int p = 0; p < PARTS; p++)
                store_shared(to + p * part_bytes(BC, BR), words[s][p][e]);
        }
}

// Write the gradient of the warp's keys or values, or add to it if there is `more` of it. Rows of padding are 0.
template <int COLUMNS, int N>
__device__ __forceinline__ void store_keys(
    const Call& call, const Matrix& matrix, const Sequence& s, long long h_kv, long long j0, const float (&X)[N][4], float factor, bool more)
{
    const long long keys_end = PACKED ? s.kv_length : call.Tk;
    const int first = THROUGH_MEMORY ? threadIdx.x / WARP_SIZE / WARPS_K * (8 * N) : 0;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const long long j = j0 + ScoreTile::column(c);
        if (j >= keys_end)
            continue;
        float* const to = row_of(matrix, s.slot, h_kv, s.k_start + j);
        const bool empty = j >= s.kv_length;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int x = first + 8 * n + 2 * lane_t();
            const float left = empty ? 0.0f : X[n][2 * c] * factor, right = empty ? 0.0f : X[n][2 * c + 1] * factor;
            if (!more) {
                store_pair<COLUMNS>(to, x, left, right);
            } else {  // nobody else's, but a sum that is read takes registers
                if (x < COLUMNS)
                    atomicAdd(to + x, left);
                if (x + 1 < COLUMNS)
                    atomicAdd(to + x + 1, right);
            }
        }
    }
}

// Begin to copy the rows of a step: Q and the rows' statistics, or dO. `first` is the number of the first, `count` how many exist.
__device__ __forceinline__ void load_queries(const Call& call, unsigned char* on_chip, unsigned first, int count)
{
    load_parts<BR, D, false>(shared_address(on_chip) + Q_AT, call.q, first, count);
    const unsigned y = once_more(threadIdx.x);
    if (y < BR) {
        const bool exists = (int)y < count;
        const unsigned n = exists ? first + y : first;
        copy_to_shared<4>(on_chip + LSE_AT + 4 * y, call.m.data + n, exists);
        copy_to_shared<4>(on_chip + DELTA_AT + 4 * y, call.delta.data + n, exists);
    }
    commit_group();
}

__device__ __forceinline__ void load_output(const Call& call, unsigned base, unsigned first, int count)
{
    load_parts<BR, DV, false>(base + O_AT, call.dout, first, count);
    commit_group();
}

// Where a warp's part of a tile is, of 16 keys or of ROWS rows.
template <int N> __device__ __forceinline__ unsigned keys_of_warp(unsigned tile, unsigned thread)
{
    return tile + thread / WARP_SIZE % WARPS_K * (16 * line_columns(N) * 2);
}

template <int N> __device__ __forceinline__ unsigned rows_of_warp(unsigned tile, unsigned thread)
{
    return tile + thread / WARP_SIZE / WARPS_K * (ROWS * line_columns(N) * 2);
}

// S^T = A B^T, where A are K or V and B are Q or dO
template <int N> __device__ __forceinline__ void multiply_keys(float (&S)[NR][4], unsigned keys, unsigned rows, unsigned zero)
{
    const unsigned thread = once_more(threadIdx.x);  // addresses of factors are not to take registers beyond the product
    multiply_rows<BC, BR, N>(
        S, keys_of_warp<N>(keys, thread) + lane_rows<line_columns(N)>(thread), rows_of_warp<N>(rows, thread) + lane_columns<line_columns(N)>(thread),
        zero);
}

// sum += A B for P^T or dS^T as A, from registers or on-chip memory, and dO or Q as B
template <int COLUMNS, int N>
__device__ __forceinline__ void add_rows(float (&sum)[N][4], const unsigned (&words)[NR / 2][PARTS][4], unsigned base, unsigned rows, unsigned zero)
{
    const unsigned thread = once_more(threadIdx.x);
    const unsigned b_at = rows + lane_rows<line_columns(COLUMNS)>(thread);
    if constexpr (THROUGH_MEMORY) {
        const unsigned a_at = keys_of_warp<BR>(base + S_AT, thread) + lane_rows<line_columns(BR)>(thread);
        const int pair = (int)(thread / WARP_SIZE) / WARPS_K * (N / 2);
        add_product<BR / 16>(
            sum, [&](unsigned(&A)[PARTS][4], int s, unsigned later) { read_parts<BC, BR>(A, a_at + later, 0, 16 * s); },
            [&](unsigned(&B)[PARTS][4], int s, int x, unsigned later) {
                read_parts_transposed<BR, COLUMNS>(B, piece_at<line_columns(COLUMNS)>(b_at, 0, 16 * (pair + x)) + later, 16 * s, 0);
            },
            zero);
    } else {
        accumulate<BR, COLUMNS>(sum, words, b_at, zero);
    }
}

__device__ __forceinline__ void split_scores(unsigned (&words)[NR / 2][PARTS][4], const float (&S)[NR][4])
{
#pragma unroll
    for (int n = 0; n < NR / 2; n++)
        split_piece(words[n], S[2 * n], S[2 * n + 1]);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fa2_backward_keys(const __grid_constant__ Call call)
{
    extern __shared__ __align__(LINE_BYTES) unsigned char on_chip[];
    const unsigned base = shared_address(on_chip);
    {
        const Owned own = owned_by(call, blockIdx.x);
        const Sequence& s = own.s;
        const long long j0 = own.j0, i_low = own.i_low;
        if (j0 >= (PACKED ? s.kv_length : call.Tk))
            return;

        // In 32 bits from i_low on: the rows that see some key, and those that see all
        const int rows = narrowed(own.i_high - i_low), keys = narrowed(s.kv_length - j0);
        int whole = 0, whole_end = keys >= BC ? rows : -FAR;
        if constexpr (BAND) {
            const long long distance = j0 - i_low - s.offset;
            whole = narrowed(distance + BC - 1 - call.band_upper);
            whole_end = (int)least(whole_end, narrowed(distance - call.band_lower + 1));
        }
        int* const whole_rows = reinterpret_cast<int*>(on_chip + WHOLE_AT);  // where they take no registers
        if (threadIdx.x == 0)
            whole_rows[0] = whole, whole_rows[1] = whole_end;
        const unsigned zero = (unsigned)(call.blocks >> 32);
        const float power = PRODUCTS ? float(call.scale * LOG2E_DOUBLE) : float(call.scale);

        // Heads that are left with this one; of a step the number of its first row and of its first patch, and its first row
        int heads = (unsigned)call.Hq / (unsigned)call.Hkv, r = 0;
        const long long h = own.h_kv * heads;
        unsigned from = row_number(call.Hq, call.rows_q, s.slot, h, s.q_start + i_low), patch = patch_number(call, s, h, i_low);
        if (rows <= 0)
            heads = 0;

        // Load K_j, V_j and the first Q_i, dO_i
        if (heads > 0) {
            const unsigned first = row_number(call.Hkv, call.rows_k, s.slot, own.h_kv, s.k_start + j0);
            load_parts<BC, D, false>(base, call.k, first, keys);
            load_parts<BC, DV, false>(base + V_AT, call.v, first, keys);
            load_queries(call, on_chip, from, rows);
            load_output(call, base, from, rows);
        }
#pragma unroll 1
        for (;;) {
            float dK[NK][4], dV[NV][4];
            clear(dK);
            clear(dV);
#pragma unroll 1
            while (heads > 0) {
                const int before = r;
                await_groups<0>();
                __syncthreads();  // Q_i and dO_i are there, at first K_j and V_j; no thread reads dS of the step before
                const bool full = whole_rows[0] <= r && r + BR <= whole_rows[1];

                // S^T = K Q^T, P = exp(S - lse)
                float P[NR][4], dS[NR][4];
                multiply_keys<D>(P, base, base + Q_AT, zero);
                const unsigned thread = once_more(threadIdx.x);
                const int row = thread / WARP_SIZE / WARPS_K * ROWS + thread % 4 * 2;  // the lane's first of the step
#pragma unroll
                for (int n = 0; n < NR; n++) {
                    const float2 two = *reinterpret_cast<const float2*>(on_chip + LSE_AT + 4 * (row + 8 * n));
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const float lse = e % 2 ? two.y : two.x;
                        const float above = PRODUCTS ? multiply_add(P[n][e], power, -lse * LOG2E) : P[n][e] * power - lse;
                        const float limited = above > 0 ? 0.0f : above;  // P <= 1, whatever was rounded; NaN stays NaN
                        P[n][e] = PRODUCTS ? exp2_approximately(limited) : exponential(limited);
                    }
                }
                if (!full)
                    hide(call, P, r + row);
                unsigned words[NR / 2][PARTS][4];
                if constexpr (THROUGH_MEMORY) {
                    split_scores(words, P);
                    put_scores(words, base);
                    __syncthreads();  // P is there
                }

                // dP^T = V dO^T, dS = P (dP - delta)
                multiply_keys<DV>(dS, base + V_AT, base + O_AT, zero);
#pragma unroll
                for (int n = 0; n < NR; n++) {
                    const float2 two = *reinterpret_cast<const float2*>(on_chip + DELTA_AT + 4 * (row + 8 * n));
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        dS[n][e] = P[n][e] * (dS[n][e] - (e % 2 ? two.y : two.x));
                }
                if (!full) {  // by selection: dP of a hidden key may have overflown
#pragma unroll
                    for (int n = 0; n < NR; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            if (is_hidden(P[n][e]))
                                dS[n][e] = 0;
                }

                // dV += P^T dO
                if constexpr (!THROUGH_MEMORY)
                    split_scores(words, P);
                add_rows<DV>(dV, words, base, base + O_AT, zero);
                const unsigned patch_before = patch;
                r += BR;
                from += BR;
                patch += BR / 16;
                if (r >= rows) {
                    heads--;
                    from += (unsigned)call.rows_q - r;
                    patch += (unsigned)call.parts - r / 16;
                    r = 0;
                }
                __syncthreads();  // no thread reads P and dO_i any more
                if (heads > 0)
                    load_output(call, base, from, rows - r);

                // dK += dS^T Q
                split_scores(words, dS);
                put_scores(words, base);
                if constexpr (THROUGH_MEMORY)
                    __syncthreads();  // dS is there
                add_rows<D>(dK, words, base, base + Q_AT, zero);
                __syncthreads();  // dS is there, and no thread reads Q_i any more
                if (heads > 0)
                    load_queries(call, on_chip, from, rows - r);

                // dQ_i += dS K
                const int patch_of_warp = once_more(threadIdx.x) / WARP_SIZE % WARPS_Q;
                if (before + 16 * patch_of_warp < rows)
                    add_queries(patch_of(call, patch_before + patch_of_warp), base, zero);
                if (r % LONGEST_SUM == 0 && rows >= LEAST_SUM)
                    break;
            }

            // Write dK_j, dV_j, or what these rows add to them
            const Owned again = owned_by(call, once_more(blockIdx.x));
            const int all = (int)((unsigned)call.Hq / once_more((unsigned)call.Hkv));
            const bool first = rows < LEAST_SUM || (rows > LONGEST_SUM ? heads == all && r == LONGEST_SUM : heads == all - 1);
            store_keys<D>(call, call.dk, again.s, again.h_kv, again.j0, dK, float(call.scale), !first);
            store_keys<DV>(call, call.dv, again.s, again.h_kv, again.j0, dV, 1.0f, !first);
            if (heads == 0)
                break;
        }
    }
}

// dQ = scale * the sum that the atomic additions made. A warp has a patch at a time. Rows of padding hold 0.
extern "C" __global__ void __launch_bounds__(THREADS) fa2_backward_finish(const __grid_constant__ Call call)
{
    const long long each = (call.Tq + 15) / 16, patches = call.B * call.Hq * each * ND;
    for (long long n = (long long)blockIdx.x * WARPS + threadIdx.x / WARP_SIZE; n < patches; n += (long long)gridDim.x * WARPS) {
        const unsigned piece = (unsigned)(n % ND), rest = (unsigned)(n / ND);
        const unsigned bh = rest / (unsigned)each, h = bh % (unsigned)call.Hq;
        const long long i0 = (long long)(rest % (unsigned)each) * 16;
        const Sequence s = sequence(call, bh / (unsigned)call.Hq);
        const long long rows_end = PACKED ? s.q_length : call.Tq;
        if (i0 >= rows_end)
            continue;
        const float4 four = *reinterpret_cast<const float4*>(patch_of(call, patch_number(call, s, h, i0)) + piece * PIECE_NUMBERS + threadIdx.x % WARP_SIZE * 4);
        const float numbers[4] = {four.x, four.y, four.z, four.w}, scale = float(call.scale);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const long long i = i0 + lane_g() + 8 * r;
            const bool empty = i >= s.q_length;  // its sums may be NaN: 0 times what such a key holds
            const float x = empty ? 0.0f : numbers[2 * r] * scale, y = empty ? 0.0f : numbers[2 * r + 1] * scale;
            if (i < rows_end)
                store_pair<D>(row_of(call.dq, s.slot, h, s.q_start + i), 8 * piece + 2 * lane_t(), x, y);
        }
    }
}
