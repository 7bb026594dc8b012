// Numbers: what is stored (elem and the types of bias, slopes and sinks), what is computed with (real).
//
// The preamble says which: TYPE (of q, k, v, out), BIAS_TYPE, SLOPE_TYPE, SINK_TYPE, each one of the four codes.

#include "ptx.cuh"

#define FLOAT16 0
#define BFLOAT16 1
#define FLOAT32 2
#define FLOAT64 3

template <int type> struct Storage;  // how a type lies in memory
template <> struct Storage<FLOAT16> { typedef unsigned short stored; };
template <> struct Storage<BFLOAT16> { typedef unsigned short stored; };
template <> struct Storage<FLOAT32> { typedef float stored; };
template <> struct Storage<FLOAT64> { typedef double stored; };

typedef Storage<TYPE>::stored elem;
typedef Storage<TYPE == FLOAT64 ? FLOAT64 : FLOAT32>::stored real;

#define INFINITE real(__longlong_as_double(0x7FF0000000000000ll))
constexpr int VECTOR_BYTES = 16;
constexpr int VECTOR = VECTOR_BYTES / sizeof(real);  // numbers in one vector of on-chip memory

template <int type> __device__ __forceinline__ real widen(typename Storage<type>::stored x)
{
    if constexpr (type == FLOAT16) {
        return half_to_float(x);
    } else if constexpr (type == BFLOAT16) {
        return __uint_as_float((unsigned)x << 16);
    } else {
        return real(x);
    }
}

// Round to nearest, ties to even. Two roundings (float64 to float32 to 16 bits) never happen: 16-bit calls compute in float32.
template <int type> __device__ __forceinline__ typename Storage<type>::stored narrow(real x)
{
    if constexpr (type == FLOAT16) {
        return float_to_half((float)x);
    } else if constexpr (type == BFLOAT16) {
        unsigned bits = __float_as_uint((float)x);
        if ((bits & 0x7FFFFFFFu) > 0x7F800000u)  // a NaN stays one when its low half is cut off
            return (unsigned short)(bits >> 16 | 0x40u);
        return (unsigned short)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
    } else {
        return typename Storage<type>::stored(x);
    }
}

constexpr float LOG2E = 1.4426950408889634f;  // 1 / ln 2

// e^x. Scores stay in natural units up to here: a large one times log2(e) could overflow.
__device__ __forceinline__ float exponential(float x) { return exp2_approximately(x * LOG2E); }

constexpr double LOG2E_DOUBLE = 1.4426950408889634074;

__device__ __forceinline__ unsigned upper_word(double x) { return (unsigned)((unsigned long long)__double_as_longlong(x) >> 32); }

// 2^y: 2^n 2^f with f from -1/2 to 1/2, 2^f by a minimax polynomial, relative error 2.1e-16; n into the exponent. Below 2^-1021, where numbers are
// no longer normal, 0.
__device__ __forceinline__ double power_of_two(double y)
{
    constexpr double ROUNDS = 0x1.8p52;  // added, it leaves an integer in the lowest bits
    constexpr double POLYNOMIAL[] = {0x1.e3991e644e6abp-28, 0x1.b6740fc28f781p-24, 0x1.62c157ee59177p-20, 0x1.ffcb55e82f22cp-17,
                                     0x1.4309126056718p-13, 0x1.5d87fe9cc5d6fp-10, 0x1.3b2ab6fbde0f7p-7, 0x1.c6b08d703d48ap-5,
                                     0x1.ebfbdff82c3b9p-3, 0x1.62e42fefa3a17p-1, 1.0};
    const double rounded = y + ROUNDS, f = y - (rounded - ROUNDS);
    double power = POLYNOMIAL[0];
#pragma unroll
    for (int n = 1; n < (int)(sizeof(POLYNOMIAL) / sizeof(double)); n++)
        power = fma(power, f, POLYNOMIAL[n]);
    unsigned long long bits = (unsigned long long)__double_as_longlong(power) + ((unsigned long long)__double_as_longlong(rounded) << 52);
    // Beyond +-1021, without a comparison in double precision: by the upper half
    constexpr unsigned SIGN = 0x80000000u, MOST = 0x408FE800u, UPPER_INFINITE = 0x7FF00000u;
    const unsigned upper = upper_word(y), size = upper & ~SIGN;
    if (size >= MOST)
        bits = size > UPPER_INFINITE ? 0x7FF8000000000000ull : upper & SIGN ? 0ull : 0x7FF0000000000000ull;
    return __longlong_as_double((long long)bits);
}

// Double-precision arithmetic is as dear as products on tensor cores, and exp() takes 20 of its instructions, this 14.
__device__ __forceinline__ double exponential(double x) { return power_of_two(x * LOG2E_DOUBLE); }

__device__ __forceinline__ real logarithm(float x) { return logf(x); }
__device__ __forceinline__ real logarithm(double x) { return log(x); }
__device__ __forceinline__ float hyperbolic_tangent(float x) { return tanhf(x); }
__device__ __forceinline__ double hyperbolic_tangent(double x) { return tanh(x); }
__device__ __forceinline__ float larger(float x, float y) { return fmaxf(x, y); }
__device__ __forceinline__ double larger(double x, double y) { return fmax(x, y); }
__device__ __forceinline__ float multiply_add(float x, float y, float z) { return fmaf(x, y, z); }
__device__ __forceinline__ double multiply_add(double x, double y, double z) { return fma(x, y, z); }

__device__ __forceinline__ long long least(long long x, long long y) { return x < y ? x : y; }
__device__ __forceinline__ long long most(long long x, long long y) { return x > y ? x : y; }
__device__ __forceinline__ long long clamp(long long x, long long low, long long high) { return least(most(x, low), high); }
