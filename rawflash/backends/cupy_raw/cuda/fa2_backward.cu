// FlashAttention-2, backward pass (Dao 2024, algorithm 2; Chu, Liu and Lin 2026, algorithms 6 and 8).
//
// fa2_backward_keys: a block of threads owns Bc keys of one key head and runs over the Q blocks of all query heads that share it; dK
// and dV stay in registers. dQ_i += dS K goes to device memory by atomic additions, unless DETERMINISTIC.
// On chip:  Q (Br, d), K (Bc, d), V (Bc, dv), dO (Br, dv), P (Br, Bc), dS (Br, Bc); in registers dK (Bc, d), dV (Bc, dv), dQ (Br, d).
//
// fa2_backward_queries, for DETERMINISTIC: a block owns Br rows of a query head and runs over the K/V blocks; dQ stays in registers.
// On chip the same.
//
// Both start from delta = rowsum(dO * O) - dlse (side_gradients.cu).

#include "numbers.cuh"
#include "call.cuh"
#include "tile.cuh"
#include "products.cuh"
#include "philox.cuh"
#include "scores.cuh"
#include "softmax.cuh"
#include "gradient.cuh"
#include "padding.cuh"

constexpr int R = ScoreTile::R, C = ScoreTile::C, CD = QueryTile<D>::C;
typedef KeyTile<D> TileOfK;
typedef KeyTile<DV> TileOfV;

// Add a row of the thread's columns to device memory, vectors at once where the hardware can (sm_90 and later).
__device__ __forceinline__ void add_row(real* to, const real (&values)[CD])
{
    constexpr int WIDTH = QueryTile<D>::WIDTH;
#pragma unroll
    for (int c = 0; c < CD; c += WIDTH) {
        const int x = QueryTile<D>::column(c);
#if __CUDA_ARCH__ >= 900
        if constexpr (TYPE != FLOAT64 && WIDTH == 4 && D % 4 == 0) {
            if (x < D)
                atomicAdd(reinterpret_cast<float4*>(to + x), make_float4(values[c], values[c + 1], values[c + 2], values[c + 3]));
            continue;
        }
        if constexpr (TYPE != FLOAT64 && WIDTH == 2 && D % 2 == 0) {
            if (x < D)
                atomicAdd(reinterpret_cast<float2*>(to + x), make_float2(values[c], values[c + 1]));
            continue;
        }
#endif
#pragma unroll
        for (int e = 0; e < WIDTH; e++)
            if (x + e < D)
                atomicAdd(to + x + e, values[c + e]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fa2_backward_keys(const __grid_constant__ Call call)
{
    extern __shared__ __align__(VECTOR_BYTES) unsigned char on_chip[];
    BackwardTiles tiles((real*)on_chip);

    const long long block = blockIdx.x % call.blocks, bh = blockIdx.x / call.blocks;
    const Sequence s = sequence(call, bh / call.Hkv);
    const long long h_kv = bh % call.Hkv, group = call.Hq / call.Hkv, h_end = (h_kv + 1) * group;
    const long long j0 = block * BC;
    if (j0 >= (PACKED ? s.kv_length : call.Tk))
        return;

    real dK[TileOfK::R][TileOfK::C], dV[TileOfV::R][TileOfV::C];
    fill(dK, real(0));
    fill(dV, real(0));
    long long i_low, i_high;
    row_range(call, s, j0, i_low, i_high);
    Step step = next_step(call, s, h_kv * group, h_end, i_low, i_low, i_high, j0);

    // Load K_j, V_j and the first Q_i, dO_i
    if (step.kind != EMPTY) {
        clear_tiles(tiles.Q);
        const elem* const keys = row_of(call.k, s.slot, h_kv, s.k_start + j0);
        const elem* const values = row_of(call.v, s.slot, h_kv, s.k_start + j0);
        load_tile<BC, D, PITCH_D>(tiles.K, keys, call.k.row, s.kv_length - j0);
        load_tile<BC, DV, PITCH_V>(tiles.V, values, call.v.row, s.kv_length - j0);
        const long long i = s.q_start + step.i0, count = s.q_length - step.i0;
        load_tile<BR, D, PITCH_D>(tiles.Q, row_of(call.q, s.slot, step.h, i), call.q.row, count);
        load_tile<BR, DV, PITCH_V>(tiles.dO, row_of(call.dout, s.slot, step.h, i), call.dout.row, count);
        commit_copies();
    }
    while (step.kind != EMPTY) {
        const Head at = head(call, s, step.h);
        const long long i0 = step.i0;
        const Step next = next_step(call, s, step.h, h_end, i0 + BR, i_low, i_high, j0);
        const long long next_i = s.q_start + next.i0, next_count = s.q_length - next.i0;
        real lse[R], delta[R];
        load_lse(call, at, i0, lse);
        load_delta(call, at, i0, delta);
        await_copies<0>();
        __syncthreads();  // Q_i and dO_i are there; no thread reads P and dS of the step before

        // S = Q K^T, dP = dO V^T; P = exp(S - lse), dS = P (dP - delta)
        real S[R][C], dP[R][C];
        tiles.products(S, dP);
        put_score_gradients<true>(call, at, S, dP, lse, delta, tiles.P, tiles.dS, i0, j0, step.kind);
        __syncthreads();  // P and dS are there

        // dV += P^T dO
        product_tn<BR, BC, DV>(dV, tiles.P, PITCH_S, tiles.dO, PITCH_V);
        __syncthreads();  // no thread reads dO_i any more
        if (next.kind != EMPTY)
            load_tile<BR, DV, PITCH_V>(tiles.dO, row_of(call.dout, s.slot, next.h, next_i), call.dout.row, next_count);
        commit_copies();

        // dK += dS^T Q
        product_tn<BR, BC, D>(dK, tiles.dS, PITCH_S, tiles.Q, PITCH_D);
        __syncthreads();  // no thread reads Q_i any more
        if (next.kind != EMPTY)
            load_tile<BR, D, PITCH_D>(tiles.Q, row_of(call.q, s.slot, next.h, next_i), call.q.row, next_count);
        commit_copies();

        // dQ_i += dS K
        if constexpr (!DETERMINISTIC) {
            real dQ[R][CD];
            fill(dQ, real(0));
            product_nn<BC, D>(dQ, tiles.dS, PITCH_S, tiles.K, PITCH_D);
#pragma unroll
            for (int r = 0; r < R; r++) {
                const long long i = i0 + ScoreTile::row(r);
                if (i < s.q_length)
                    add_row(sums_of(call, s.slot, at.h, s.q_start + i, D), dQ[r]);
            }
        }
        step = next;
    }

    // Write dK_j, dV_j
    store_keys<D>(call, call.dk, s, h_kv, j0, dK, real(call.scale));
    store_keys<DV>(call, call.dv, s, h_kv, j0, dV, real(1));
}

#if DETERMINISTIC
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fa2_backward_queries(const __grid_constant__ Call call)
{
    extern __shared__ __align__(VECTOR_BYTES) unsigned char on_chip[];
    BackwardTiles tiles((real*)on_chip);

    const long long block = call.blocks - 1 - blockIdx.x % call.blocks, bh = blockIdx.x / call.blocks;
    const Sequence s = sequence(call, bh / call.Hq);
    const Head at = head(call, s, bh % call.Hq);
    const long long i0 = block * BR;
    const long long rows_end = PACKED ? s.q_length : call.Tq;
    if (i0 >= rows_end)
        return;

    real dQ[R][CD], lse[R], delta[R];
    fill(dQ, real(0));
    load_lse(call, at, i0, lse);
    load_delta(call, at, i0, delta);
    const elem* const keys = row_of(call.k, s.slot, at.h_kv, s.k_start);
    const elem* const values = row_of(call.v, s.slot, at.h_kv, s.k_start);
    long long j_low, j_high;
    key_range(call, s, i0, j_low, j_high);
    Block tile = next_keys(call, at, i0, j_low, j_high);

    // Load Q_i, dO_i and the first K_j, V_j
    if (tile.kind != EMPTY) {
        clear_tiles(tiles.Q);
        load_tile<BR, D, PITCH_D>(tiles.Q, row_of(call.q, s.slot, at.h, s.q_start + i0), call.q.row, s.q_length - i0);
        load_tile<BR, DV, PITCH_V>(tiles.dO, row_of(call.dout, s.slot, at.h, s.q_start + i0), call.dout.row, s.q_length - i0);
        load_tile<BC, D, PITCH_D>(tiles.K, keys + tile.start * call.k.row, call.k.row, s.kv_length - tile.start);
        load_tile<BC, DV, PITCH_V>(tiles.V, values + tile.start * call.v.row, call.v.row, s.kv_length - tile.start);
        commit_copies();
    }
    while (tile.kind != EMPTY) {
        const Block next = next_keys(call, at, i0, tile.start + BC, j_high);
        await_copies<0>();
        __syncthreads();  // K_j and V_j are there, and at first Q_i and dO_i

        // S = Q K^T, dP = dO V^T; dS = P (dP - delta)
        real S[R][C], dP[R][C];
        tiles.products(S, dP);
        put_score_gradients<true>(call, at, S, dP, lse, delta, tiles.P, tiles.dS, i0, tile.start, tile.kind);
        __syncthreads();  // dS is there, and no thread reads V_j any more
        if (next.kind != EMPTY)
            load_tile<BC, DV, PITCH_V>(tiles.V, values + next.start * call.v.row, call.v.row, s.kv_length - next.start);

        // dQ += dS K
        product_nn<BC, D>(dQ, tiles.dS, PITCH_S, tiles.K, PITCH_D);
        __syncthreads();  // no thread reads K_j any more
        if (next.kind != EMPTY)
            load_tile<BC, D, PITCH_D>(tiles.K, keys + next.start * call.k.row, call.k.row, s.kv_length - next.start);
        commit_copies();
        tile = next;
    }

    // Write dQ_i
#pragma unroll
    for (int r = 0; r < R; r++) {
        const long long i = i0 + ScoreTile::row(r);
        if (i < rows_end)
            store_row<QueryTile<D>, D>(row_of(call.dq, s.slot, at.h, s.q_start + i), dQ[r], real(call.scale), i >= s.q_length);
    }
}

#else

// dQ = scale * the sum that the atomic additions made, in the dtype of q. Rows of padding hold 0.
extern "C" __global__ void __launch_bounds__(THREADS) fa2_backward_finish(const __grid_constant__ Call call)
{
    typedef RowColumns<D> Row;
    const long long rows = (PACKED ? 1 : call.B) * call.Hq * call.rows_q;
    for (long long row = (long long)blockIdx.x * SIDE + thread_y(); row < rows; row += (long long)gridDim.x * SIDE) {
        const real* const sum = call.sums + row * D;
        real dQ[Row::C];
#pragma unroll
        for (int c = 0; c < Row::C; c++) {
            const int x = Row::column(c);
            dQ[c] = x < D ? sum[x] : real(0);
        }
        const long long t = row % call.rows_q, head = row / call.rows_q;
        store_row<Row, D>(row_of(call.dq, head / call.Hq, head % call.Hq, t), dQ, real(call.scale), false);
    }
}
#endif
