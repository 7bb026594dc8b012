// FlashAttention-2, backward pass (Dao 2024, algorithm 2; Chu, Liu and Lin 2026, algorithm 8) for 16-bit inputs of more than 128 columns on
// Hopper.
//
// fa2_backward_keys: a block of threads owns Bc = 64 keys of one key head and runs over the Q blocks of all query heads that share it. No
// warpgroup could hold dK and dV of so many columns, so each of three has products of its own, and hands on what the next one needs:
//   scores   S^T = K Q^T, P = exp(S - lse), dV += P^T dO, with P^T in registers and dV in 128 more of them; P in 32 bits goes to
//   slopes   dP^T = V dO^T, dS = P (dP - delta), dK += dS^T Q, with dS^T in registers; dS^T in 16 bits goes to
//   rows     dQ_i = dS K, added to float32 sums in device memory, in the order in which the registers hold it.
// They run behind each other, up to two steps apart, without a barrier of all; a fourth warpgroup copies (tensor maps): one warp Q and lse,
// one dO and delta. While one exponentiates or adds, others multiply.
// On chip:  K (Bc, d), V (Bc, dv), two or three Q (Br, d) and dO (Br, dv), one or two P^T (Bc, Br) in 32 bits and two dS^T in 16, lse and delta
//           (Br) with Q and dO; barriers; in registers S (Bc, Br), dP (Bc, Br), dK (Bc, d), dV (Bc, dv), dQ (Br, some columns).
// Per step:  read for products K, Q, V and dO along the sums, dO and Q across, dS and K across for each 64 columns of dQ; P and dS written and P
//           read; dQ added to device memory.
//
// DETERMINISTIC: blocks of keys take turns at the sums of a block of rows; two of the copying warpgroup's threads wait for turns and pass them on.
//
// fa2_backward_finish: dQ = scale * those sums, row by row.
//
// What hides keys is a band, and lengths. Rows and keys past the lengths are zeros on chip, so that products with
// them are, too: of such a row, lse is +infinity, hence P = 0; such a key is hidden as the band hides others.
// Both start from delta = rowsum(dO * O) - dlse (side_gradients.cu).
//
// dS comes from P in 32 bits, dV from P in 16. Where these are float16, P is 2^15 times as large in both, so that it is a normal number down to
// 2^-29: as far as P counts.

#define PAIRED 0
constexpr int FUSED = 0, STORES = 0, DIVIDED = 0, TOGETHER = 0, SETS = 1, BY_HEAD = 0;  // see fa2_backward.cu

#include "backward.cuh"

constexpr int SCORES = 1, SLOPES = 2, ROWS_OF_Q = 3, GROUPS = 4;  // warpgroups; 0 copies
constexpr int KEYS_THREADS = GROUPS * WARPGROUP;
constexpr int HANDED = 2;  // of dS, on chip
constexpr bool P_WAITS = STAGES > P_TILES;  // else Q of a step is there only after the P that was read where its own goes
static_assert(BR == SLAB && BC == 64, "one warpgroup's rows of a product, and one slab of them");

// Does S of a step begin while dV of the step before is under way, and dP while dK is? Then P and dS are kept longer, for which sums of 256 columns
// leave no registers.
constexpr bool OVERLAP = TO_D < 256 && TO_V < 256;
// Registers of a thread: beside sums of a warpgroup's own there are S, P and what a loop needs; dQ has the rest. DETERMINISTIC: which rows come next takes
// more, as far as there are any.
__device__ constexpr int registers_with(int columns) { return columns == 256 ? 200 : columns == 192 ? 184 : 160; }
constexpr int SCORES_REGISTERS = registers_with(TO_V) + 8 * DETERMINISTIC;
constexpr int SLOPES_REGISTERS = registers_with(TO_D) + (TO_D < 256 ? 8 * DETERMINISTIC : 0);
constexpr int COPYING_REGISTERS = TO_D + TO_V < 448 ? 40 : 24 + 8 * DETERMINISTIC;
constexpr int REST = 65536 / WARPGROUP - COPYING_REGISTERS - SCORES_REGISTERS - SLOPES_REGISTERS;
constexpr int ROWS_REGISTERS = REST < 240 ? REST : 240;
// Columns of one product: the assembler takes no 256 in a kernel of so many threads.
__device__ constexpr int at_a_time(int columns) { return columns == 256 ? 128 : columns; }
constexpr int PATCH = BR * DQ_COLUMNS, PATCHES = TO_D / DQ_COLUMNS;  // of dQ's sums
static_assert(TO_D % DQ_COLUMNS == 0 && DQ_COLUMNS / 2 + 40 <= ROWS_REGISTERS, "what tiling.py says of dQ's columns");

// Where things are on chip, in bytes.
constexpr int Q_BYTES = BR * TO_D * 2, DO_BYTES = BR * TO_V * 2, P_BYTES = BC * BR * 4, TILE = BC * BR * 2;  // of one of them; of dS
constexpr int AT_K = 0, AT_V = AT_K + BC * TO_D * 2, AT_Q = AT_V + BC * TO_V * 2, AT_DO = AT_Q + STAGES * Q_BYTES;
constexpr int AT_P = AT_DO + STAGES * DO_BYTES, AT_DS = AT_P + P_TILES * P_BYTES, AT_LSE = AT_DS + HANDED * TILE;
constexpr int AT_DELTA = AT_LSE + STAGES * BR * 4, AT_BARRIERS = AT_DELTA + STAGES * BR * 4;
constexpr int K_THERE = 0, V_THERE = 1, Q_THERE = 2, O_THERE = Q_THERE + STAGES, Q_READ = O_THERE + STAGES, O_READ = Q_READ + STAGES;
constexpr int P_THERE = O_READ + STAGES, P_READ = P_THERE + P_TILES, TURN = P_READ + P_TILES, ADDED = TURN + 1;
constexpr int BARRIERS = TURN + 2 * DETERMINISTIC;
static_assert(AT_BARRIERS + BARRIERS * 8 == TILE_BYTES, "tiling.py and this file disagree on what is on chip");

// Named barriers: of all that compute, of the two with Q and dO, of one of these; dS is there, or read, each of two.
constexpr int ALL_MEET = 1, BOTH_MEET = 2, ONE_MEETS = 3, DS_THERE = 5, DS_READ = DS_THERE + HANDED;
constexpr int COMPUTING = (GROUPS - 1) * WARPGROUP, BOTH = 2 * WARPGROUP;  // threads

constexpr int P_POWER = TYPE == FLOAT16 ? 15 : 0;  // P on chip is 2^P_POWER times as large
constexpr float P_LESS = 1.0f / (1 << P_POWER);

// Which rows a step has: those from i0 on, of query head h. DOWN (backward.cuh): blocks of keys take turns, and have fewer rows the later they come. So
// that none is ahead of those before it, and waits for them, the same rows of all heads come one after the other. So they do where some are LATE.
struct Rows {
    int h, i0;
};

__device__ __forceinline__ Rows first_of_all(const Call& call, const Work& work) { return {work.h * (int)call.group, first_rows(work)}; }

__device__ __forceinline__ Rows rows_after(const Call& call, const Work& work, Rows x)
{
    if constexpr (LATE && ONE_HEAD)
        return {x.h, x.i0 + work.stride};
    if constexpr (DOWN || LATE) {
        const int first = work.h * (int)call.group;
        return x.h + 1 < first + (int)call.group ? Rows{x.h + 1, x.i0} : Rows{first, LATE ? x.i0 + work.stride : x.i0 - BR};
    }
    if ((x.i0 += BR) >= work.i_high)
        x.i0 = work.i_low, x.h += !ROUND;
    if constexpr (ROUND)
        x.h += x.i0 == first_rows(work);
    return x;
}

// ---- the warps that copy ---------------------------------------------------------------------------------------------------

// All Q_i, or all dO_i, one after the other, and `number(h, i)` of each row; by a warp. Numbers are read while there is no room for them yet.
template <int COLUMNS, class Number>
__device__ __forceinline__ void copy_rows(
    const Call& call, const TensorMap& map, const Work& work, unsigned char* to, float* numbers, Barrier* there, Barrier* read, Number number)
{
    const int lane = threadIdx.x % WARP_LANES;
    Ring<STAGES> at;
    Rows rows = first_of_all(call, work);
    for (int steps = work.steps; steps > 0; steps--) {
        const int h = rows.h, i0 = rows.i0;
        float x[BR / WARP_LANES];
#pragma unroll
        for (int n = 0; n < BR / WARP_LANES; n++)
            x[n] = number(h, i0 + lane + n * WARP_LANES);
        await(read + at.stage, at.parity ^ 1);
        if (lane == 0) {
            arrive_expecting(there + at.stage, BR * COLUMNS * 2);
            copy_slabs<BR, COLUMNS>(to + at.stage * (BR * COLUMNS * 2), map, there + at.stage, work.q_start + i0, h, work.slot);
        }
#pragma unroll
        for (int n = 0; n < BR / WARP_LANES; n++)
            numbers[at.stage * BR + lane + n * WARP_LANES] = x[n];
        arrive(there + at.stage);
        at.next();
        rows = rows_after(call, work, rows);
    }
}

__device__ __forceinline__ void copy_all(const MappedCall& argument, const Work& work, unsigned char* on_chip, Barrier* barriers)
{
    const Call& call = argument.call;
    if (threadIdx.x < WARP_LANES) {
        if (threadIdx.x == 0) {
            arrive_expecting(barriers + K_THERE, BC * TO_D * 2);
            copy_slabs<BC, TO_D>(on_chip + AT_K, argument.map[MAP_K], barriers + K_THERE, work.k_start + work.j0, work.h, work.slot);
        }
        // lse in units of exp2. A row that sees nothing has P = 0, and one that does not exist.
        copy_rows<TO_D>(call, argument.map[MAP_Q], work, on_chip + AT_Q, (float*)(on_chip + AT_LSE), barriers + Q_THERE, barriers + Q_READ,
                        [&](int h, int i) {
                            const float lse = i < work.q_length ? *row_of(call.lse, work.slot, h, work.q_start + i) : -INFINITE;
                            return lse == -INFINITE ? INFINITE : lse * LOG2E - P_POWER;
                        });
    } else {
        if (threadIdx.x == WARP_LANES) {
            arrive_expecting(barriers + V_THERE, BC * TO_V * 2);
            copy_slabs<BC, TO_V>(on_chip + AT_V, argument.map[MAP_V], barriers + V_THERE, work.k_start + work.j0, work.h, work.slot);
        }
        copy_rows<TO_V>(call, argument.map[MAP_DO], work, on_chip + AT_DO, (float*)(on_chip + AT_DELTA), barriers + O_THERE, barriers + O_READ,
                        [&](int h, int i) { return i < work.q_length ? P_LESS * *row_of(call.delta, work.slot, h, work.q_start + i) : 0.0f; });
    }
}

// ---- what the warpgroups that compute have in common ---------------------------------------------------------------------------------

// Of a lane's two keys the rows that see them, none if the key does not exist. All rows from plain_from on, before plain_to, see all keys of
// the block, or do not exist.
struct Seen {
    int first[2], count[2], plain_from, plain_to;

    __device__ __forceinline__ Seen(const Call& call, const Work& work)
    {
        const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES % WARPS;
        const int q_length = work.q_length, left = (int)least(work.kv_length - work.j0, BC);
        plain_from = 0, plain_to = BC <= left ? q_length + BR : 0;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int y = 16 * warp + lane / 4 + 8 * e;
            const long long j = work.j0 + y - work.offset;
            first[e] = BAND ? (int)clamp(j - call.band_upper, 0, q_length) : 0;
            count[e] = (BAND ? (int)clamp(j - call.band_lower + 1, 0, q_length) : q_length) - first[e];
            if (y >= left)
                count[e] = 0;
            first[e] -= 2 * (lane % 4);
        }
        if constexpr (BAND) {
            const long long j = work.j0 - work.offset;
            plain_from = (int)clamp(j + BC - 1 - call.band_upper, 0, q_length + BR);
            plain_to = (int)least(plain_to, clamp(j - call.band_lower + 1, 0, q_length + BR));
        }
    }

    // Column 8 (n / 4) + n % 2 after the lane's first is the row, counted from i0
    __device__ __forceinline__ bool is_hidden(int n, int i0) const
    {
        return (unsigned)(i0 - first[n / 2 % 2] + 8 * (n / 4) + n % 2) >= (unsigned)count[n / 2 % 2];
    }

    __device__ __forceinline__ void hide(float (&x)[BR / 2], int i0) const
    {
        if (i0 >= plain_from && i0 + BR <= plain_to)
            return;
#pragma unroll
        for (int n = 0; n < BR / 2; n++)
            if (is_hidden(n, i0))
                x[n] = 0.0f;
    }
};

// Zeros in keys past the last one, which copies read if there is something; by all that compute.
__device__ __forceinline__ void await_keys(const Call& call, const Work& work, unsigned char* on_chip, Barrier* barriers)
{
    const int left = (int)least(work.kv_length - work.j0, BC);
    await(barriers + K_THERE, 0);
    await(barriers + V_THERE, 0);
    if (work.k_start + work.kv_length < call.rows_k && left < BC) {
        clear_rows<BC, TO_D, COMPUTING>(on_chip + AT_K, left, threadIdx.x - WARPGROUP);
        clear_rows<BC, TO_V, COMPUTING>(on_chip + AT_V, left, threadIdx.x - WARPGROUP);
        fence_shared();
        meet_from_apart(ALL_MEET, COMPUTING);
    }
}

// Is this a block of rows in which copies read something behind the last one?
__device__ __forceinline__ bool rows_end(const Call& call, const Work& work, int i0)
{
    return i0 + BR > work.q_length && work.q_start + work.q_length < call.rows_q;
}

// Sums of COLUMNS columns, a product's in one array.
template <int COLUMNS> struct Sums {
    static constexpr int EACH = at_a_time(COLUMNS);
    float part[COLUMNS / EACH][EACH / 2];

    __device__ __forceinline__ void clear()
    {
#pragma unroll
        for (int c = 0; c < COLUMNS / EACH; c++)
#pragma unroll
            for (int n = 0; n < EACH / 2; n++)
                part[c][n] = 0.0f;
    }

    // += X^T Y; X^T in registers, Y in slabs of BR rows.
    __device__ __forceinline__ void add(const unsigned (&x)[BR / SUM][4], LowerHalf y)
    {
        fence_products();
#pragma unroll
        for (int n = 0; n < BR / SUM; n++)
#pragma unroll
            for (int c = 0; c < COLUMNS / EACH; c++)
                multiply_rs<EACH, true>(part[c], x[n], moved(y, c * (EACH / SLAB) * BR * SLAB_ROW + n * ROW_STEP), true);
        commit_products();
    }
};

// Write dK_j or dV_j, by way of where Q or dO were. Keys of padding have 0.
template <int COLUMNS, int WIDTH>
__device__ __forceinline__ void store_keys(
    const Call& call, const Work& work, const Matrix& to, unsigned char* slabs, const Sums<COLUMNS>& sum, float scale, int meeting)
{
    if (work.steps > 0)
        meet_from_apart(BOTH_MEET, BOTH);  // no thread reads Q and dO any more
#pragma unroll
    for (int n = 0; n < COLUMNS / SUM; n++) {
        unsigned x[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            constexpr int EACH = Sums<COLUMNS>::EACH;
            const float* const y = sum.part[n * SUM / EACH] + 8 * (n % (EACH / SUM)) + 2 * e;
            x[e] = pair(y[0] * scale, y[1] * scale);
        }
        store_factor<BC>(slabs, 0, n, x);
    }
    meet(meeting, WARPGROUP);
    const int exist = (int)(PACKED ? work.kv_length : call.Tk) - work.j0, full = work.kv_length - work.j0;
    store_rows<BC, COLUMNS, WIDTH, WARPGROUP, BC>(row_of(to, work.slot, work.h, work.k_start + work.j0), to.row, slabs, 0, exist, full);
}

// ---- S, P and dV ---------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void compute_scores(const Call& call, const Work& work, unsigned char* on_chip, Barrier* barriers)
{
    const int lane = threadIdx.x % WARP_LANES, y = threadIdx.x % WARPGROUP, warp = y / WARP_LANES;
    Sums<TO_V> dV;
    dV.clear();

    if (work.steps > 0) {
        const float scale = call.scale_log2;
        Scores scores(call);
        const Seen seen(call, work);
        const LowerHalf K = lower_half(on_chip + AT_K), Q = lower_half(on_chip + AT_Q), dO_across = lower_half(on_chip + AT_DO, BR * SLAB_ROW);
        Ring<STAGES> at;
        Rows rows = first_of_all(call, work);
        int last = -1;

        await_keys(call, work, on_chip, barriers);
        for (int steps = work.steps; steps > 0; steps--) {
            const int stage = at.stage, part = steps % P_TILES, i0 = rows.i0;

            const auto dispose = [&]() {
                await_products<OVERLAP ? 1 : 0>();  // dV of the step before
                if (last >= 0)
                    arrive_as_warp(barriers + O_READ + last, lane);
            };

            // S^T = K Q^T
            float S[BR / 2];
            scores.begin_head(call, work.b, rows.h);
            const float distance = ALIBI ? (float)(i0 + 2 * (lane % 4) + work.offset - work.j0 - 16 * warp - lane / 4) : 0.0f;
            await(barriers + Q_THERE + stage, at.parity);
            if (rows_end(call, work, i0)) {
                await(barriers + O_THERE + stage, at.parity);
                clear_rows<BR, TO_D, WARPGROUP>(on_chip + AT_Q + stage * Q_BYTES, work.q_length - i0, y);
                clear_rows<BR, TO_V, WARPGROUP>(on_chip + AT_DO + stage * DO_BYTES, work.q_length - i0, y);
                fence_shared();
                meet_from_apart(BOTH_MEET, BOTH);
            }
            if constexpr (!OVERLAP)
                dispose();
            fence_products();
#pragma unroll
            for (int n = 0; n < TO_D / SUM; n++)
                multiply_ss<BR>(S, moved(K, column_step<BC>(n)), moved(Q, column_step<BR>(n)) + stage * (Q_BYTES >> 4), n > 0);
            commit_products();
            if constexpr (OVERLAP)
                dispose();
            await_products<0>();

            // P = exp(S - lse), at most 1 whatever was rounded; NaN stays NaN
            const float2* const lse = (const float2*)(on_chip + AT_LSE) + stage * (BR / 2) + lane % 4;
            const auto probability = [&](int n, float score) __attribute__((always_inline)) {
                const float minus = n % 2 ? -lse[n / 4 * 4].y : -lse[n / 4 * 4].x;
                return exp2_approximately(least_or_nan(PLAIN ? fmaf(score, scale, minus) : score + minus, (float)P_POWER));
            };
            // The other warpgroup has the same numbers in the same threads
            float4* const tile = (float4*)(on_chip + AT_P + part * P_BYTES) + y;
            const auto await_place = [&]() __attribute__((always_inline)) {
                if (P_WAITS && work.steps - steps >= P_TILES)
                    await(barriers + P_READ + part, ((work.steps - steps) / P_TILES & 1) ^ 1);
            };
            unsigned P[BR / SUM][4];
            if constexpr (PLAIN) {
                float x[BR / 2];
#pragma unroll
                for (int n = 0; n < BR / 2; n++)
                    x[n] = probability(n, S[n]);
                seen.hide(x, i0);
#pragma unroll
                for (int n = 0; n < BR / SUM; n++)
                    to_factor(P[n], x, n);
                await_place();
#pragma unroll
                for (int n = 0; n < BR / 8; n++)
                    tile[n * WARPGROUP] = make_float4(x[4 * n], x[4 * n + 1], x[4 * n + 2], x[4 * n + 3]);
            } else {  // four numbers after four, as registers are few; that of dS has a factor more
                await_place();
#pragma unroll
                for (int n = 0; n < BR / 2; n += 4) {
                    float x[4], slopes[4];
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const Score score = scores.of(S[n + e], distance + (8 * (n / 4) + e % 2 - 8 * (e / 2)));
                        x[e] = seen.is_hidden(n + e, i0) ? 0.0f : probability(n + e, score.twos), slopes[e] = score.slope;
                    }
                    P[n / 8][n % 8 / 2] = pair(x[0], x[1]), P[n / 8][n % 8 / 2 + 1] = pair(x[2], x[3]);
                    tile[n / 4 * WARPGROUP] = make_float4(x[0] * slopes[0], x[1] * slopes[1], x[2] * slopes[2], x[3] * slopes[3]);
                }
            }
            arrive_as_warp(barriers + P_THERE + part, lane);

            // dV += P^T dO
            await(barriers + O_THERE + stage, at.parity);
            dV.add(P, dO_across + stage * (DO_BYTES >> 4));
            arrive_as_warp(barriers + Q_READ + stage, lane);  // and lse

            last = stage;
            at.next();
            rows = rows_after(call, work, rows);
        }
        await_products<0>();  // dV
    }
    store_keys<TO_V, DV>(call, work, call.dv, on_chip + AT_DO, dV, P_LESS, ONE_MEETS);
}

// ---- dP, dS and dK -------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void compute_slopes(const Call& call, const Work& work, unsigned char* on_chip, Barrier* barriers)
{
    const int lane = threadIdx.x % WARP_LANES, y = threadIdx.x % WARPGROUP;
    Sums<TO_D> dK;
    dK.clear();

    if (work.steps > 0) {
        const Seen seen(call, work);
        const LowerHalf V = lower_half(on_chip + AT_V), dO = lower_half(on_chip + AT_DO), Q_across = lower_half(on_chip + AT_Q, BR * SLAB_ROW);
        Ring<STAGES> at;
        Rows rows = first_of_all(call, work);
        int last = -1;

        await_keys(call, work, on_chip, barriers);
        for (int steps = work.steps; steps > 0; steps--) {
            const int stage = at.stage, part = steps % HANDED, i0 = rows.i0;

            const auto dispose = [&]() {
                await_products<OVERLAP ? 1 : 0>();  // dK of the step before
                if (last >= 0)
                    arrive_as_warp(barriers + Q_READ + last, lane);
            };

            // dP^T = V dO^T
            float dP[BR / 2];
            await(barriers + O_THERE + stage, at.parity);
            if (rows_end(call, work, i0))
                meet_from_apart(BOTH_MEET, BOTH);  // rows that do not exist are cleared
            if constexpr (!OVERLAP)
                dispose();
            fence_products();
#pragma unroll
            for (int n = 0; n < TO_V / SUM; n++)
                multiply_ss<BR>(dP, moved(V, column_step<BC>(n)), moved(dO, column_step<BR>(n)) + stage * (DO_BYTES >> 4), n > 0);
            commit_products();
            if constexpr (OVERLAP)
                dispose();

            const int place = steps % P_TILES;
            await(barriers + P_THERE + place, (work.steps - steps) / P_TILES & 1);
            await_products<0>();  // dP

            // dS = P (dP - delta)
            const float2* const delta = (const float2*)(on_chip + AT_DELTA) + stage * (BR / 2) + lane % 4;
            const float4* const from = (const float4*)(on_chip + AT_P + place * P_BYTES) + y;
            float x[BR / 2];
#pragma unroll
            for (int n = 0; n < BR / 8; n++) {
                const float4 P = from[n * WARPGROUP];
                const float2 minus = delta[4 * n];
                x[4 * n] = P.x * fmaf(dP[4 * n], P_LESS, -minus.x);
                x[4 * n + 1] = P.y * fmaf(dP[4 * n + 1], P_LESS, -minus.y);
                x[4 * n + 2] = P.z * fmaf(dP[4 * n + 2], P_LESS, -minus.x);
                x[4 * n + 3] = P.w * fmaf(dP[4 * n + 3], P_LESS, -minus.y);
            }
            if (P_WAITS && steps > P_TILES)
                arrive_as_warp(barriers + P_READ + place, lane);
            seen.hide(x, i0);
            unsigned dS[BR / SUM][4];
#pragma unroll
            for (int n = 0; n < BR / SUM; n++)
                to_factor(dS[n], x, n);
            if (work.steps - steps >= HANDED)
                meet(DS_READ + part, BOTH);
#pragma unroll
            for (int n = 0; n < BR / SUM; n++)
                store_factor<BC>(on_chip + AT_DS + part * TILE, 0, n, dS[n]);
            fence_shared();
            announce(DS_THERE + part, BOTH);

            // dK += dS^T Q
            await(barriers + Q_THERE + stage, at.parity);
            dK.add(dS, Q_across + stage * (Q_BYTES >> 4));
            arrive_as_warp(barriers + O_READ + stage, lane);  // and delta

            last = stage;
            at.next();
            rows = rows_after(call, work, rows);
        }
        await_products<0>();  // dK
    }
    store_keys<TO_D, D>(call, work, call.dk, on_chip + AT_Q, dK, (float)call.scale, ONE_MEETS + 1);
}

template <class Step> __device__ __forceinline__ void each_block_of_rows(const Call& call, const Work& work, Step step)
{
    Rows rows = first_of_all(call, work);
#pragma unroll 1
    for (int steps = work.steps; steps > 0; steps--, rows = rows_after(call, work, rows))
        step(steps, rows.i0, block_at(call, work, rows.h, rows.i0));
}

// ---- dQ ------------------------------------------------------------------------------------------------------------------------------

// Where a lane's numbers of a block of sums begin.
__device__ __forceinline__ int lane_numbers()
{
    const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES % WARPS;
    return (warp * (DQ_COLUMNS / 8) * WARP_LANES + lane) * LANE_NUMBERS;
}

__device__ __forceinline__ void compute_rows(const Call& call, const Work& work, unsigned char* on_chip, Barrier* barriers)
{
    if (work.steps == 0)
        return;
    const LowerHalf K_across = lower_half(on_chip + AT_K, BC * SLAB_ROW), dS_across = lower_half(on_chip + AT_DS, BC * SLAB_ROW);
    int parity = 0;
    await_keys(call, work, on_chip, barriers);
    each_block_of_rows(call, work, [&](int steps, int i0, long long block) {
        float* const sums = sums_of_block(call, block) + lane_numbers();
        const int part = steps % HANDED;
        const bool stores = FIRST_STORES && turn_at(call, work, i0) == 0;
        meet(DS_THERE + part, BOTH);
#pragma unroll
        for (int patch = 0; patch < PATCHES; patch++) {
            // dQ_i = dS K
            float x[DQ_COLUMNS / 2];
            fence_products();
#pragma unroll
            for (int n = 0; n < BC / SUM; n++)
                multiply_ss<DQ_COLUMNS, true, true>(x, moved(dS_across, n * ROW_STEP) + part * (TILE >> 4),
                                                    moved(K_across, patch * (DQ_COLUMNS / SLAB) * BC * SLAB_ROW + n * ROW_STEP), n > 0);
            commit_products();
            await_products<0>();  // x
            if (patch + 1 == PATCHES && steps > HANDED)
                announce(DS_READ + part, BOTH);
            if (DETERMINISTIC && patch == 0)
                await(barriers + TURN, parity);
#pragma unroll
            for (int n = 0; n < DQ_COLUMNS / 8; n++) {
                float4* const to = reinterpret_cast<float4*>(sums + patch * PATCH + n * WARP_LANES * LANE_NUMBERS);
                const float4 numbers = make_float4(x[4 * n], x[4 * n + 1], x[4 * n + 2], x[4 * n + 3]);
                if (stores)
                    *to = numbers;
                else
                    atomicAdd(to, numbers);
            }
        }
        if constexpr (DETERMINISTIC)
            arrive_as_warp(barriers + ADDED, threadIdx.x % WARP_LANES), parity ^= 1;
    });
}

// ---- kernels ---------------------------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(KEYS_THREADS, 1) fa2_backward_keys(const __grid_constant__ MappedCall argument)
{
    extern __shared__ __align__(SLAB_ALIGNMENT) unsigned char on_chip[];
    Barrier* const barriers = (Barrier*)(on_chip + AT_BARRIERS);
    const Call& call = argument.call;
    const Work work = work_of(call);
    if (work.j0 >= (PACKED ? work.kv_length : call.Tk))
        return;
    if (threadIdx.x == 0) {
        for (int n = 0; n < MAPS; n++)
            prefetch_map(argument.map[n]);
        init_barrier(barriers + K_THERE, 1);
        init_barrier(barriers + V_THERE, 1);
        for (int n = 0; n < STAGES; n++) {
            init_barrier(barriers + Q_THERE + n, 1 + WARP_LANES);  // who begins the copy, and all lanes with their numbers
            init_barrier(barriers + O_THERE + n, 1 + WARP_LANES);
            init_barrier(barriers + Q_READ + n, BOTH / WARP_LANES * ARRIVALS);
            init_barrier(barriers + O_READ + n, BOTH / WARP_LANES * ARRIVALS);
        }
        for (int n = 0; n < P_TILES; n++) {
            init_barrier(barriers + P_THERE + n, WARPS * ARRIVALS);
            init_barrier(barriers + P_READ + n, WARPS * ARRIVALS);
        }
        if constexpr (DETERMINISTIC) {
            init_barrier(barriers + TURN, 2);
            init_barrier(barriers + ADDED, WARPS * ARRIVALS);
        }
        fence_barriers();
    }
    __syncthreads();  // barriers are there
    const int group = __shfl_sync(WARP, (int)(threadIdx.x / WARPGROUP), 0);
    if (group == SCORES) {
        take_registers<SCORES_REGISTERS>();
        compute_scores(call, work, on_chip, barriers);
    } else if (group == SLOPES) {
        take_registers<SLOPES_REGISTERS>();
        compute_slopes(call, work, on_chip, barriers);
    } else if (group == ROWS_OF_Q) {
        if constexpr (ROWS_REGISTERS > 65536 / KEYS_THREADS)
            take_registers<ROWS_REGISTERS>();
        else
            give_registers<ROWS_REGISTERS>();
        compute_rows(call, work, on_chip, barriers);
    } else {
        give_registers<COPYING_REGISTERS>();
        if (threadIdx.x < 2 * WARP_LANES && work.steps > 0)
            copy_all(argument, work, on_chip, barriers);
        else if (DETERMINISTIC && threadIdx.x == 2 * WARP_LANES)
            await_turns(call, work, barriers + TURN);
        else if (DETERMINISTIC && threadIdx.x == 3 * WARP_LANES)
            pass_turns(call, work, barriers + TURN, barriers + ADDED);
    }
}

// dQ = scale * sums, in the dtype of q. Rows of padding hold 0.
extern "C" __global__ void __launch_bounds__(THREADS) fa2_backward_finish(const __grid_constant__ Call call)
{
    extern __shared__ __align__(SLAB_ALIGNMENT) unsigned char on_chip[];
    finish_quarter<PATCHES, PATCH, BR, false>(call, blockIdx.x, on_chip, [&](int patch, int n, int row, const unsigned (&x)[4]) {
        store_rows_of_factor<BR>(on_chip + patch * (DQ_COLUMNS / SLAB) * BR * SLAB_ROW, row, n, x);
    });
}
