// What both backward passes share beside dQ, dK and dV. No atomics anywhere here: two runs give the same bits.
//
// row_deltas:    delta = rowsum(dO * O) - dlse, one number for each row.
// sink_gradient: dsinks[h] = sum over b, i of P_sink (dlse - gamma), P_sink = exp(sink - lse). A block owns one head.
// bias_gradient: dbias = dS, summed over the axes along which bias broadcasts. A block owns a tile of bias (all rows or all keys where
//                it broadcasts over them) and computes S and dP again for everything that shares it.
// On chip (bias_gradient):  Q (Br, d), K (Bc, d), V (Bc, dv), dO (Br, dv), P (Br, Bc), dS (Br, Bc).

#include "numbers.cuh"
#include "call.cuh"
#include "tile.cuh"
#include "products.cuh"
#include "philox.cuh"
#include "scores.cuh"
#include "softmax.cuh"
#include "gradient.cuh"

// Neighbouring threads that read a row at once, up to a warp; rows that each of them asks for before the first is there.
__device__ constexpr int lanes_of(int pieces) { return pieces <= 1 ? 1 : 2 * lanes_of((pieces + 1) / 2); }
constexpr int DELTA_LANES = DV < 32 * CHUNK ? lanes_of((DV + CHUNK - 1) / CHUNK) : 32, AT_ONCE = THREADS / DELTA_LANES;
constexpr int DELTAS = 2 * AT_ONCE < DELTA_ROWS ? 2 : (DELTA_ROWS + AT_ONCE - 1) / AT_ONCE;

extern "C" __global__ void __launch_bounds__(THREADS) row_deltas(const __grid_constant__ Call call)
{
    struct alignas(CHUNK * sizeof(elem)) Chunk { elem x[CHUNK]; };
    const unsigned bh = blockIdx.x / (unsigned)call.blocks, h = bh % (unsigned)call.Hq;
    long long b = bh / (unsigned)call.Hq, block = blockIdx.x % (unsigned)call.blocks;
    if constexpr (PACKED) {
        const InLine place = in_line<DELTA_ROWS>(call, call.cu_seqlens_q, call.rows_q, (int)block);
        if (place.block < 0)
            return;
        b = place.b, block = place.block;
    }
    const Sequence s = sequence(call, b);
    const int lane = threadIdx.x % DELTA_LANES, y = threadIdx.x / DELTA_LANES;
    const long long i0 = block * DELTA_ROWS, rows = least(s.q_length - i0, DELTA_ROWS);
    const elem* const O = row_of(call.o, s.slot, h, s.q_start + i0);
    const elem* const dO = row_of(call.dout, s.slot, h, s.q_start + i0);
#pragma unroll 1
    for (int first = y; first - y < rows; first += DELTAS * AT_ONCE) {
        real gamma[DELTAS] = {};
        for (int x = lane * CHUNK; x < DV; x += DELTA_LANES * CHUNK) {
            Chunk a[DELTAS] = {}, b[DELTAS] = {};
#pragma unroll
            for (int n = 0; n < DELTAS; n++)
                if (first + n * AT_ONCE < rows) {
                    a[n] = *reinterpret_cast<const Chunk*>(dO + (first + n * AT_ONCE) * call.dout.row + x);
                    b[n] = *reinterpret_cast<const Chunk*>(O + (first + n * AT_ONCE) * call.o.row + x);
                }
#pragma unroll
            for (int n = 0; n < DELTAS; n++)
#pragma unroll
                for (int e = 0; e < CHUNK; e++)
                    gamma[n] = multiply_add(widen<TYPE>(a[n].x[e]), widen<TYPE>(b[n].x[e]), gamma[n]);
        }
#pragma unroll
        for (int n = 0; n < DELTAS; n++) {
            gamma[n] = sum_of_lanes<DELTA_LANES>(gamma[n]);
            const long long i = s.q_start + i0 + first + n * AT_ONCE;
            if (first + n * AT_ONCE < rows && lane == 0) {
                if constexpr (DLSE)
                    gamma[n] -= *row_of(call.dlse, s.slot, h, i);
                *row_of(call.delta, s.slot, h, i) = gamma[n];
            }
        }
    }
}

#if SINKS
extern "C" __global__ void __launch_bounds__(THREADS) sink_gradient(const __grid_constant__ Call call)
{
    extern __shared__ __align__(VECTOR_BYTES) unsigned char on_chip[];
    double* const part = (double*)on_chip;
    const long long h = blockIdx.x;
    const real sink = widen<SINK_TYPE>(((const Storage<SINK_TYPE>::stored*)call.sinks)[h * call.sinks_h]);
    double sum = 0;
    for (long long b = 0; b < call.B && sink != -INFINITE; b++) {
        const Sequence s = sequence(call, b);
        for (long long i = threadIdx.x; i < s.q_length; i += THREADS) {
            const real above = sink - *row_of(call.lse, s.slot, h, s.q_start + i);
            const real P = exponential(above > real(0) ? real(0) : above);
            sum -= (double)P * (double)*row_of(call.delta, s.slot, h, s.q_start + i);
        }
    }
    part[threadIdx.x] = sum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();  // the sums of the round before are there
        if ((int)threadIdx.x < half)
            part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0)
        call.dsinks[h] = part[0];
}
#endif

#if BIAS
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) bias_gradient(const __grid_constant__ Call call)
{
    extern __shared__ __align__(VECTOR_BYTES) unsigned char on_chip[];
    BackwardTiles tiles((real*)on_chip);
    constexpr int R = ScoreTile::R, C = ScoreTile::C;

    // Which tile of bias, and which b, h, rows and keys have a share in it
    const long long tiles_i = BIAS_OVER_ROWS ? 1 : (call.Tq + BR - 1) / BR, tiles_j = BIAS_OVER_KEYS ? 1 : (call.Tk + BC - 1) / BC;
    long long n = blockIdx.x;
    const long long tile_j = n % tiles_j, tile_i = (n /= tiles_j) % tiles_i, bias_h = (n /= tiles_i) % call.bias_h, bias_b = n / call.bias_h;
    const long long b_low = call.bias_b == 1 ? 0 : bias_b, b_high = call.bias_b == 1 ? call.B : bias_b + 1;
    const long long h_low = call.bias_h == 1 ? 0 : bias_h, h_high = call.bias_h == 1 ? call.Hq : bias_h + 1;
    const long long i_low = BIAS_OVER_ROWS ? 0 : tile_i * BR, i_high = BIAS_OVER_ROWS ? call.Tq : least(i_low + BR, call.Tq);
    const long long j_low = BIAS_OVER_KEYS ? 0 : tile_j * BC, j_high = BIAS_OVER_KEYS ? call.Tk : least(j_low + BC, call.Tk);

    real sum[R][C];
    fill(sum, real(0));
    clear_tiles(tiles.Q);
    for (long long b = b_low; b < b_high; b++) {
        const Sequence s = sequence(call, b);
        for (long long h = h_low; h < h_high; h++) {
            const Head at = head(call, s, h);
            for (long long i0 = i_low; i0 < least(i_high, s.q_length); i0 += BR) {
                real lse[R], delta[R];
                load_lse(call, at, i0, lse);
                load_delta(call, at, i0, delta);
                load_tile<BR, D, PITCH_D>(tiles.Q, row_of(call.q, s.slot, h, s.q_start + i0), call.q.row, s.q_length - i0);
                load_tile<BR, DV, PITCH_V>(tiles.dO, row_of(call.dout, s.slot, h, s.q_start + i0), call.dout.row, s.q_length - i0);
                commit_copies();
                const long long j_end = least(j_high, s.kv_length);
                for (Block tile = next_keys(call, at, i0, j_low, j_end); tile.kind != EMPTY;
                     tile = next_keys(call, at, i0, tile.start + BC, j_end)) {
                    const long long j0 = tile.start;
                    load_tile<BC, D, PITCH_D>(tiles.K, row_of(call.k, s.slot, at.h_kv, s.k_start + j0), call.k.row, s.kv_length - j0);
                    load_tile<BC, DV, PITCH_V>(tiles.V, row_of(call.v, s.slot, at.h_kv, s.k_start + j0), call.v.row, s.kv_length - j0);
                    commit_copies();
                    await_copies<0>();
                    __syncthreads();  // the tiles are there
                    real S[R][C], dP[R][C];
                    tiles.products(S, dP);
                    put_score_gradients<false>(call, at, S, dP, lse, delta, tiles.P, tiles.dS, i0, j0, tile.kind);
                    get_tile(tiles.dS, dP);
#pragma unroll
                    for (int r = 0; r < R; r++)
#pragma unroll
                        for (int c = 0; c < C; c++)
                            sum[r][c] += dP[r][c];
                    __syncthreads();  // no thread reads the tiles any more
                }
                await_copies<0>();
                __syncthreads();  // also where no tile was seen: Q_i and dO_i may be overwritten
            }
        }
    }

    // Sum over the broadcast axes of the tile: each thread takes a row or a column of it, in on-chip memory
    real* const target = call.dbias + (bias_b * call.bias_h + bias_h) * call.bias_i * call.bias_j;
    put_tile(tiles.dS, sum);
    __syncthreads();  // the whole tile is there
    if constexpr (BIAS_OVER_KEYS) {
        for (int y = threadIdx.x; y < BR; y += THREADS)
            for (int x = 1; x < BC; x++)
                tiles.dS[y * PITCH_S] += tiles.dS[y * PITCH_S + x];
        __syncthreads();  // the first column holds the sums of the rows
    }
    constexpr int WIDTH = BIAS_OVER_KEYS ? 1 : BC, HEIGHT = BIAS_OVER_ROWS ? 1 : BR;
    if constexpr (BIAS_OVER_ROWS) {
        for (int x = threadIdx.x; x < WIDTH; x += THREADS)
            for (int y = 1; y < BR; y++)
                tiles.dS[x] += tiles.dS[y * PITCH_S + x];
        __syncthreads();  // the first row holds the sums of the columns
    }
    for (int n = threadIdx.x; n < HEIGHT * WIDTH; n += THREADS) {
        const int y = n / WIDTH, x = n % WIDTH;
        if ((BIAS_OVER_ROWS || i_low + y < i_high) && (BIAS_OVER_KEYS || j_low + x < j_high))
            target[(BIAS_OVER_ROWS ? 0 : i_low + y) * call.bias_j + (BIAS_OVER_KEYS ? 0 : j_low + x)] = tiles.dS[y * PITCH_S + x];
    }
}
#endif
