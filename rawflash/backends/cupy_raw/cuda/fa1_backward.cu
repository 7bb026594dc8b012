// FlashAttention-1, backward pass (Dao et al. 2022, algorithm 4; Chu, Liu and Lin 2026, algorithm 7).
//
// A block of threads owns one key head and the query heads that share it. K/V blocks outside, Q blocks inside; dQ lies in device memory
// and is read and written at every step; gamma = rowsum(dO * O) is computed at every step. No atomics: two runs give the same bits.
//
// On chip:  Q (Br, d), K (Bc, d), V (Bc, dv), dO (Br, dv), P (Br, Bc), dS (Br, Bc); in registers dK (Bc, d), dV (Bc, dv) and, for one
// step, dQ (Br, d).
// Read per step: Q_i, dO_i, O_i, lse_i, dQ_i; written per step: dQ_i. K_j and V_j are read once, dK_j and dV_j written once.

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

// delta = gamma - dlse of the rows that the thread owns: dO from its tile, O from device memory. Also into device memory, where the code
// of options looks it up.
__device__ __forceinline__ void compute_delta(const Call& call, const Head& at, const real* dO, long long i0, real (&delta)[R])
{
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int y = ScoreTile::row(r);
        const long long i = i0 + y;
        real gamma = real(0);
        if (i < at.s.q_length) {
            const elem* const O = row_of(call.o, at.s.slot, at.h, at.s.q_start + i);
            for (int x = row_lane(); x < DV; x += ROW_LANES)
                gamma = multiply_add(dO[y * PITCH_V + x], widen<TYPE>(O[x]), gamma);
            if (DLSE && row_lane() == 0)
                gamma -= *row_of(call.dlse, at.s.slot, at.h, at.s.q_start + i);
        }
        delta[r] = sum_of_lanes<ROW_LANES>(gamma);
        if (i < at.s.q_length && row_lane() == 0)
            *row_of(call.delta, at.s.slot, at.h, at.s.q_start + i) = delta[r];
    }
    __syncwarp();  // the threads of a row read the delta that one of them wrote
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fa1_backward(const __grid_constant__ Call call)
{
    extern __shared__ __align__(VECTOR_BYTES) unsigned char on_chip[];
    BackwardTiles tiles((real*)on_chip);

    const Sequence s = sequence(call, blockIdx.x / call.Hkv);
    const long long h_kv = blockIdx.x % call.Hkv, group = call.Hq / call.Hkv, h_end = (h_kv + 1) * group;
    const long long keys_end = PACKED ? s.kv_length : call.Tk, rows_end = PACKED ? s.q_length : call.Tq;
    clear_tiles(tiles.Q);

    // dQ = 0
    for (long long h = h_kv * group; h < h_end; h++)
        for (long long n = threadIdx.x; n < rows_end * D; n += THREADS)
            sums_of(call, s.slot, h, s.q_start, D)[n] = real(0);

    for (long long j0 = 0; j0 < keys_end; j0 += BC) {
        // Load K_j, V_j; dK_j = dV_j = 0
        real dK[TileOfK::R][TileOfK::C], dV[TileOfV::R][TileOfV::C];
        fill(dK, real(0));
        fill(dV, real(0));
        __syncthreads();  // no thread reads the tiles of the block before; all dQ are written
        if (j0 < s.kv_length) {
            load_tile<BC, D, PITCH_D>(tiles.K, row_of(call.k, s.slot, h_kv, s.k_start + j0), call.k.row, s.kv_length - j0);
            load_tile<BC, DV, PITCH_V>(tiles.V, row_of(call.v, s.slot, h_kv, s.k_start + j0), call.v.row, s.kv_length - j0);
            commit_copies();
        }
        long long i_low, i_high;
        row_range(call, s, j0, i_low, i_high);
        for (Step step = next_step(call, s, h_kv * group, h_end, i_low, i_low, i_high, j0); step.kind != EMPTY;
             step = next_step(call, s, step.h, h_end, step.i0 + BR, i_low, i_high, j0)) {
            const Head at = head(call, s, step.h);
            const long long i0 = step.i0, i = s.q_start + i0, count = s.q_length - i0;
            // Load Q_i, dO_i, lse_i
            load_tile<BR, D, PITCH_D>(tiles.Q, row_of(call.q, s.slot, at.h, i), call.q.row, count);
            load_tile<BR, DV, PITCH_V>(tiles.dO, row_of(call.dout, s.slot, at.h, i), call.dout.row, count);
            commit_copies();
            real lse[R], delta[R];
            load_lse(call, at, i0, lse);
            await_copies<0>();
            __syncthreads();  // the tiles are there
            compute_delta(call, at, tiles.dO, i0, delta);

            // S = Q K^T, dP = dO V^T; P = exp(S - lse), dS = P (dP - delta)
            real S[R][C], dP[R][C];
            tiles.products(S, dP);
            put_score_gradients<true>(call, at, S, dP, lse, delta, tiles.P, tiles.dS, i0, j0, step.kind);
            __syncthreads();  // P and dS are there

            // dV += P^T dO, dK += dS^T Q
            product_tn<BR, BC, DV>(dV, tiles.P, PITCH_S, tiles.dO, PITCH_V);
            product_tn<BR, BC, D>(dK, tiles.dS, PITCH_S, tiles.Q, PITCH_D);

            // dQ_i += dS K, in device memory
            real dQ[R][CD];
            fill(dQ, real(0));
            product_nn<BC, D>(dQ, tiles.dS, PITCH_S, tiles.K, PITCH_D);
#pragma unroll
            for (int r = 0; r < R; r++) {
                const int y = ScoreTile::row(r);
                real* const sum = sums_of(call, s.slot, at.h, i + y, D);
#pragma unroll
                for (int c = 0; c < CD; c++) {
                    const int x = QueryTile<D>::column(c);
                    if (y < count && x < D)
                        sum[x] += dQ[r][c];  // always by the same thread
                }
            }
            __syncthreads();  // no thread reads Q_i, dO_i, P and dS any more
        }
        await_copies<0>();
        // Write dK_j, dV_j
        store_keys<D>(call, call.dk, s, h_kv, j0, dK, real(call.scale));
        store_keys<DV>(call, call.dv, s, h_kv, j0, dV, real(1));
    }

    __syncthreads();  // all dQ are written, also where there are no keys

    // dQ = scale * its sum, in the dtype of q; padding is 0
    typedef RowColumns<D> Row;
    for (long long h = h_kv * group; h < h_end; h++)
        for (long long i = thread_y(); i < rows_end; i += SIDE) {
            const real* const sum = sums_of(call, s.slot, h, s.q_start + i, D);
            real dQ[Row::C];
#pragma unroll
            for (int c = 0; c < Row::C; c++) {
                const int x = Row::column(c);
                dQ[c] = x < D ? sum[x] : real(0);
            }
            store_row<Row, D>(row_of(call.dq, s.slot, h, s.q_start + i), dQ, real(call.scale), i >= s.q_length);
        }
}
