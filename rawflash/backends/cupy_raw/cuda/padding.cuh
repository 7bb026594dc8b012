// Packed sequences leave rows that none of them owns, before the first and behind the last: those get 0 and -inf. The pass writes the others.

#if PACKED
// Those of a head's rows, and of which all others lie behind `first` of them.
struct Padding {
    long long first, sequences, count;
};

__device__ __forceinline__ Padding padding_of(const Call& call, const Table& cu_seqlens, long long rows)
{
    if (call.B == 0)
        return {0, 0, rows};
    const long long first = clamp(entry(cu_seqlens, 0, 0), 0, rows), sequences = clamp(entry(cu_seqlens, call.B, 0), first, rows) - first;
    return {first, sequences, rows - sequences};
}

// For each row of padding of each head `clear(h, row, lane)`, by a warp of the grid.
template <class Clear> __device__ __forceinline__ void over_padding(const Padding& padding, long long heads, const Clear& clear)
{
    constexpr int LANES = 32;
    const long long warps = (long long)gridDim.x * (THREADS / LANES);
    for (long long n = (long long)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES; n < heads * padding.count; n += warps) {
        const long long row = n % padding.count;
        clear(n / padding.count, row < padding.first ? row : row + padding.sequences, (int)threadIdx.x % LANES);
    }
}

template <int COLUMNS> __device__ __forceinline__ void clear_row(elem* row, int lane)
{
    for (int x = lane; x < COLUMNS; x += 32)
        row[x] = narrow<TYPE>(real(0));
}

extern "C" __global__ void __launch_bounds__(THREADS) clear_results(const __grid_constant__ Call call)
{
    over_padding(padding_of(call, call.cu_seqlens_q, call.rows_q), call.Hq, [&](long long h, long long row, int lane) {
        clear_row<DV>(row_of(call.o, 0, h, row), lane);
        if (lane == 0)
            store_lse(call, 0, h, row, -INFINITE);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS) clear_gradients(const __grid_constant__ Call call)
{
    over_padding(padding_of(call, call.cu_seqlens_q, call.rows_q), call.Hq,
                 [&](long long h, long long row, int lane) { clear_row<D>(row_of(call.dq, 0, h, row), lane); });
    over_padding(padding_of(call, call.cu_seqlens_k, call.rows_k), call.Hkv, [&](long long h, long long row, int lane) {
        clear_row<D>(row_of(call.dk, 0, h, row), lane);
        clear_row<DV>(row_of(call.dv, 0, h, row), lane);
    });
}
#endif
