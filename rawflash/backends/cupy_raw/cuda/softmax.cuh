// The online softmax of one tile (Dao 2024, algorithm 1, lines 9 and 10), in registers.

// m, l, alpha: of the rows that the thread owns. m is the same in all threads of a row; l is the thread's own part
// of the sum. On return S holds P = exp(S - m), m and l are updated, and alpha = exp(m_before - m).
template <int R, int C>
__device__ __forceinline__ void softmax_step(real (&S)[R][C], real (&m)[R], real (&l)[R], real (&alpha)[R])
{
#pragma unroll
    for (int r = 0; r < R; r++) {
        real highest = S[r][0];
#pragma unroll
        for (int c = 1; c < C; c++)
            highest = larger(highest, S[r][c]);
        highest = larger(m[r], maximum_of_lanes<ROW_LANES>(highest));
        const real shift = highest == -INFINITE ? real(0) : highest;  // a row that has seen no key: exp(-inf - 0) is 0
        alpha[r] = exponential(m[r] - shift);
        m[r] = highest;
        real total = 0;
#pragma unroll
        for (int c = 0; c < C; c++) {
            S[r][c] = exponential(S[r][c] - shift);
            total += S[r][c];
        }
        l[r] = l[r] * alpha[r] + total;
    }
}

// P -> Z P in on-chip memory: dropout keeps a probability, divided by the probability of being kept, or makes it 0.
__device__ __forceinline__ void drop(const Call& call, const Head& at, real* P, long long i0, long long j0)
{
    for_each_score(i0, j0, [&](int n, long long i, long long j) {
        P[n] = kept(call, at.s.b, at.h, i, j) ? P[n] * real(call.keep_scale) : real(0);
    });
}

// The sink joins the denominator. m and l are the row's; l is made complete. Returned are the factor that is still to be multiplied to O,
// which is the sum of exp(S - m) V, and lse. A row that saw nothing has l = 0 and lse -inf.
__device__ __forceinline__ real finish_row(const Call& call, const Head& at, real m, real& l, real& lse)
{
    real before = real(1);
    if constexpr (SINKS) {
        const real sink = widen<SINK_TYPE>(((const Storage<SINK_TYPE>::stored*)call.sinks)[at.h * call.sinks_h]);
        const real highest = larger(m, sink);
        const real shift = highest == -INFINITE ? real(0) : highest;
        before = exponential(m - shift);
        l = l * before + exponential(sink - shift);
        m = highest;
    }
    lse = l == real(0) ? -INFINITE : m + logarithm(l);
    return before / l;
}
