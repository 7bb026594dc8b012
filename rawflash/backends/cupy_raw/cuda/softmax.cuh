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

#if PIECES && !SPLIT
// Where scores are products and a band alone, products of float64 stay what they are up to their exponential, where one multiply-add scales and
// subtracts.
constexpr bool IN_POWERS = P_STAYS && SCALE_LATER;

// The same for products: `power` is the factor that makes powers of two of them, `far` the upper word of a size from which on m is exact. Below, it
// is a product with its lower word cut off: found without arithmetic in double precision, and P is at most 2^(1/16).
template <int R, int C>
__device__ __forceinline__ void softmax_step_of_products(
    real (&S)[R][C], real (&m)[R], real (&l)[R], real (&alpha)[R], real power, unsigned far)
{
    constexpr unsigned SIGN = 0x80000000u, UPPER_LOWEST = 0xFFF00000u;  // that of -inf
#pragma unroll
    for (int r = 0; r < R; r++) {
        // Upper words, as integers, grow with what is not negative, and shrink with what is
        int high = (int)upper_word(m[r]);
        unsigned low = (unsigned)high;
#pragma unroll
        for (int c = 0; c < C; c++) {
            const unsigned word = upper_word(S[r][c]);
            high = (int)word > high ? (int)word : high;
            low = word < low ? word : low;
        }
#pragma unroll
        for (int lane = ROW_LANES / 2; lane > 0; lane /= 2) {
            const int other_high = __shfl_xor_sync(WARP, high, lane);
            const unsigned other_low = __shfl_xor_sync(WARP, low, lane);
            high = other_high > high ? other_high : high;
            low = other_low < low ? other_low : low;
        }
        const unsigned word = high < 0 ? low : (unsigned)high;
        real highest = __longlong_as_double((long long)((unsigned long long)word << 32));
        const bool exact = __any_sync(WARP, (word & ~SIGN) >= far && word != UPPER_LOWEST);
        if (exact) {
            highest = S[r][0];
#pragma unroll
            for (int c = 1; c < C; c++)
                highest = larger(highest, S[r][c]);
            highest = larger(m[r], maximum_of_lanes<ROW_LANES>(highest));
        }
        const real shift = highest == -INFINITE ? real(0) : highest;
        real minus = -shift * power;
        if (exact) {  // what minus was rounded by may be large
            minus = 0;
#pragma unroll
            for (int c = 0; c < C; c++)
                S[r][c] -= shift;
        }
        alpha[r] = power_of_two((m[r] - shift) * power);  // 1 where m stays
        m[r] = highest;
        real total = 0;
#pragma unroll
        for (int c = 0; c < C; c++) {
            S[r][c] = power_of_two(multiply_add(S[r][c], power, minus));
            total += S[r][c];
        }
        l[r] = l[r] * alpha[r] + total;
    }
}
#else
constexpr bool IN_POWERS = false;
#endif

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
