// Packed sequences leave rows that none of them owns: those get 0 and -inf before the pass, which then writes the others.

#if PACKED
extern "C" __global__ void __launch_bounds__(THREADS) clear_results(const __grid_constant__ Call call)
{
    clear_matrix<DV>(call.o, 1, call.Hq, call.rows_q);
    for (long long n = (long long)blockIdx.x * THREADS + threadIdx.x; n < call.Hq * call.rows_q; n += (long long)gridDim.x * THREADS)
        store_lse(call, 0, n / call.rows_q, n % call.rows_q, -INFINITE);
}

extern "C" __global__ void __launch_bounds__(THREADS) clear_gradients(const __grid_constant__ Call call)
{
    clear_matrix<D>(call.dq, 1, call.Hq, call.rows_q);
    clear_matrix<D>(call.dk, 1, call.Hkv, call.rows_k);
    clear_matrix<DV>(call.dv, 1, call.Hkv, call.rows_k);
}
#endif
