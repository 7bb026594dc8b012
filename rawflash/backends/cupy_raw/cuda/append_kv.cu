// New keys and values into a cache, in place.
//
// A warp owns one row of K and the same row of V: one head, one new position of a sequence. Neighbouring lanes move neighbouring elements.
// Nothing is on chip. Read per row: the length of its sequence, the number of its block, K_new, V_new. Written: that row of the caches, and
// nothing where there is no such row; lengths and blocks are not to be trusted.
//
// The preamble says what is moved at a time (elem: an integer or a vector, whatever numbers it holds), and which integers
// the lengths and the blocks are (length, entry).

struct Matrix {  // element (b, h, t, x) is data[b * batch + h * head + t * row + x * column]
    elem* data;
    long long batch, head, row, column;
};

struct Call {
    Matrix k_cache, v_cache, k_new, v_new;
    const length* kv_lengths;
    const entry* block_table;          // (B, table_row); none: sequence b has block b
    long long table_row, blocks, page;  // the caches are so many blocks of so many rows
    long long B, heads, rows;
    long long d, dv;  // in elem
};
static_assert(sizeof(Call) == 8 * CALL_WORDS, "append_kv.py and this file disagree on the fields of a call");

__device__ __forceinline__ elem* row_of(const Matrix& matrix, long long b, long long h, long long t)
{
    return matrix.data + b * matrix.batch + h * matrix.head + t * matrix.row;
}

extern "C" __global__ void __launch_bounds__(THREADS) append_kv(const __grid_constant__ Call call)
{
    const int lane = threadIdx.x % WARP;
    const long long warps = (long long)gridDim.x * (THREADS / WARP);
    for (long long n = (long long)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP; n < call.B * call.rows * call.heads; n += warps) {
        const long long h = n % call.heads, t = n / call.heads % call.rows, b = n / call.heads / call.rows;

        // Where the row goes: position j of the sequence
        const long long kept = call.kv_lengths[b], capacity = call.table_row * call.page;
        if (kept < -t || kept >= capacity - t)  // so that no sum overflows
            continue;
        const long long j = kept + t;
        const long long block = call.block_table ? (long long)call.block_table[b * call.table_row + j / call.page] : b;
        if (block < 0 || block >= call.blocks)
            continue;

        elem* const K = row_of(call.k_cache, block, h, j % call.page);
        elem* const V = row_of(call.v_cache, block, h, j % call.page);
        const elem* const K_new = row_of(call.k_new, b, h, t);
        const elem* const V_new = row_of(call.v_new, b, h, t);
        for (long long x = lane; x < call.d + call.dv; x += WARP) {
            const long long y = x - call.d;
            if (y < 0)
                K[x * call.k_cache.column] = K_new[x * call.k_new.column];
            else
                V[y * call.v_cache.column] = V_new[y * call.v_new.column];
        }
    }
}
