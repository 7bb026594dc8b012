// The matrices of a float32 call as bfloat16 parts, once, for mma/split_forward.cu and mma/split_backward.cu to read.
//
// The workspace `sums` has Q, K, V and, in a backward pass, dO one behind the other, each of them whole heads of whole rows (split_rows.cuh). A block
// of threads owns ROWS rows of one head of one matrix, a thread eight numbers of a row at a time. Padding is not read, and its rows are not written:
// the kernels do not read them. In a backward pass lse comes beside Q, as workspace m: there it is found by the numbers of rows, whatever its strides are.
// Read: each number once; written: its parts, once.

#include "numbers.cuh"
#include "call.cuh"
#include "tile.cuh"
#include "split_rows.cuh"

constexpr int ROWS = 64;  // of a block of threads

template <int N>
__device__ __forceinline__ void split_rows(unsigned char* to, const elem* from, long long stride, long long count)
{
    constexpr int CHUNKS = part_columns(N) / CHUNK_HALVES;
#pragma unroll 2
    for (int n = threadIdx.x; n < ROWS * CHUNKS; n += THREADS) {
        const int row = n / CHUNKS, x = n % CHUNKS * CHUNK_HALVES;
        if (row >= count)
            continue;
        const elem* const source = from + row * stride + x;
        float numbers[CHUNK_HALVES];
        if constexpr (ALIGNED) {
#pragma unroll
            for (int e = 0; e < CHUNK_HALVES; e += VECTOR) {
                const Vector<VECTOR> four = x + e < N ? vector<VECTOR>(source + e) : Vector<VECTOR>{};
#pragma unroll
                for (int i = 0; i < VECTOR; i++)
                    numbers[e + i] = four.x[i];
            }
        } else {
#pragma unroll
            for (int e = 0; e < CHUNK_HALVES; e++)
                numbers[e] = x + e < N ? source[e] : 0.0f;
        }
        unsigned words[CHUNK_HALVES / 2][PARTS];
#pragma unroll
        for (int e = 0; e < CHUNK_HALVES / 2; e++)
            split(numbers[2 * e], numbers[2 * e + 1], words[e]);
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            *reinterpret_cast<uint4*>(to + (long long)row * row_bytes(N) + p * (part_columns(N) * 2) + x * 2) =
                make_uint4(words[0][p], words[1][p], words[2][p], words[3][p]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) split_inputs(const __grid_constant__ Call call)
{
    const long long slots = PACKED ? 1 : call.B;
    const long long q_rows = slots * call.Hq * call.rows_q, k_rows = slots * call.Hkv * call.rows_k;
    const unsigned q_each = (unsigned)((call.Tq + ROWS - 1) / ROWS), k_each = (unsigned)((call.Tk + ROWS - 1) / ROWS);
    const unsigned q_blocks = q_each * (unsigned)(call.B * call.Hq), k_blocks = k_each * (unsigned)(call.B * call.Hkv);

    // Which of Q, K, V, dO, and where its parts begin
    unsigned block = blockIdx.x;
    unsigned char* to = (unsigned char*)call.sums;
    const bool is_q = block < q_blocks;
    const bool is_k = !is_q && block - q_blocks < k_blocks, is_v = !is_q && !is_k && block - q_blocks - k_blocks < k_blocks;
    if (!is_q) {
        block -= q_blocks;
        to += q_rows * row_bytes(D);
    }
    if (!is_q && !is_k) {
        block -= k_blocks;
        to += k_rows * row_bytes(D);
    }
    if (!is_q && !is_k && !is_v) {
        block -= k_blocks;
        to += k_rows * row_bytes(DV);
    }
    const bool of_keys = is_k || is_v;
    const unsigned each = of_keys ? k_each : q_each, heads = (unsigned)(of_keys ? call.Hkv : call.Hq);
    const unsigned bh = block / each, h = bh % heads;
    const long long t0 = (long long)(block % each) * ROWS;

    const Sequence s = sequence(call, bh / heads);
    const long long count = (of_keys ? s.kv_length : s.q_length) - t0, t = (of_keys ? s.k_start : s.q_start) + t0;
    if (count <= 0)
        return;
    if (call.m.data && is_q)
        for (long long n = threadIdx.x; n < ROWS && n < count; n += THREADS)
            *row_of(call.m, s.slot, h, t + n) = *row_of(call.lse, s.slot, h, t + n);
    const Matrix& matrix = is_q ? call.q : is_k ? call.k : is_v ? call.v : call.dout;
    const long long row = (s.slot * heads + h) * (of_keys ? call.rows_k : call.rows_q) + t;
    const elem* const from = row_of(matrix, s.slot, h, t);
    if (is_q || is_k)
        split_rows<D>(to + row * row_bytes(D), from, matrix.row, count);
    else
        split_rows<DV>(to + row * row_bytes(DV), from, matrix.row, count);
}
