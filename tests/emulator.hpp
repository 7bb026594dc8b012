// CUDA on a CPU, as much as the kernels of cupy_raw use: what their text sees of it. What is behind it is in emulator.cpp, which is compiled
// once and not with every text.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define EMULATED
#define __CUDA_ARCH__ 900
#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)

#pragma GCC visibility push(hidden)  // each library has its own

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Dimensions { unsigned x, y, z; };
extern Dimensions threadIdx, blockIdx, blockDim, gridDim;

template <class To, class From> inline To bits(From x)
{
    To y;
    static_assert(sizeof x == sizeof y, "the same size");
    memcpy(&y, &x, sizeof y);
    return y;
}
inline float __uint_as_float(unsigned x) { return bits<float>(x); }
inline unsigned __float_as_uint(float x) { return bits<unsigned>(x); }
inline double __longlong_as_double(long long x) { return bits<double>(x); }
inline long long __double_as_longlong(double x) { return bits<long long>(x); }
inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((uint64_t)x * y >> 32); }
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
inline long long in_register(long long x) { return x; }
inline unsigned once_more(unsigned x) { return x; }
template <class T> inline T* computed_here(T* x) { return x; }
inline unsigned count_and_see(unsigned* p, unsigned most) { const unsigned x = *p; *p = x >= most ? 0 : x + 1; return x; }
template <class T, class X> inline T atomicAdd(T* p, X x) { const T old = *p; *p += x; return old; }
inline float2 atomicAdd(float2* p, float2 x) { const float2 old = *p; p->x += x.x, p->y += x.y; return old; }
inline float4 atomicAdd(float4* p, float4 x) { const float4 old = *p; p->x += x.x, p->y += x.y, p->z += x.z, p->w += x.w; return old; }
template <class T, class X> inline T atomicExch(T* p, X x) { const T old = *p; *p = x; return old; }
template <class T, class X, class Y> inline T atomicCAS(T* p, X is, Y x) { const T old = *p; if (old == (T)is) *p = x; return old; }
template <class T, class X> inline T atomicMax(T* p, X x) { const T old = *p; if (old < (T)x) *p = x; return old; }
inline void __threadfence() {}
inline void __threadfence_block() {}

// ---- threads, see emulator.cpp ----------------------------------------------------------------------------------------------------

constexpr size_t MOST_SHARED = 256 << 10, WATCHED = 4096;
extern __attribute__((aligned(1024))) unsigned char on_chip[MOST_SHARED + WATCHED];

namespace emulated {
extern char message[2000];  // the first error that has words
extern bool in_order;       // blocks of threads, backwards too: they wait for others that have smaller numbers
extern bool in_turn;        // what is added to device memory by copies: a turn is passed on when it is there
extern void (*body)(void*);
extern void* argument;

int run_blocks(unsigned blocks, unsigned count, size_t shared, bool backwards, unsigned cluster = 1);
void complain(const char* format, ...);
[[noreturn]] void stop();  // the block ends here
void shuffle(const void* x, void* answer, size_t bytes, int lane, bool exchanges);
void sync_group(unsigned warps);
void meet_cluster();
void begin_copy(void* to, const void* from, int bytes, bool exists);
void await_groups(size_t pending);
void matrices_of_warp(unsigned (&x)[4], unsigned from, bool transposed);
void multiply_halves(float (&widened)(unsigned), float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]);
}

void __syncthreads();
int __syncthreads_or(int x);
void __syncwarp(unsigned lanes = ~0u);
unsigned __ballot_sync(unsigned lanes, bool x);
inline bool __all_sync(unsigned lanes, bool x) { return __ballot_sync(lanes, x) == ~0u; }
inline bool __any_sync(unsigned lanes, bool x) { return __ballot_sync(lanes, x) != 0; }
void __trap();
void __nanosleep(unsigned);  // others run meanwhile

template <class T> inline T __shfl_xor_sync(unsigned, T x, int mask)
{
    T answer;
    emulated::shuffle(&x, &answer, sizeof x, mask, true);
    return answer;
}

template <class T> inline T __shfl_sync(unsigned, T x, int lane)
{
    T answer;
    emulated::shuffle(&x, &answer, sizeof x, lane, false);
    return answer;
}

inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selectors)
{
    const uint64_t both = (uint64_t)y << 32 | x;
    unsigned answer = 0;
    for (unsigned n = 0; n < 4; n++)
        answer |= (unsigned)(both >> 8 * (selectors >> 4 * n & 7) & 0xFF) << 8 * n;
    return answer;
}

// ---- the twins of ptx.cuh -----------------------------------------------------------------------------------------------------

inline float half_to_float(unsigned short x) { return (float)bits<_Float16>(x); }
inline unsigned short float_to_half(float x) { return bits<unsigned short>((_Float16)x); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float exp2_approximately(float x)
{
    const float y = exp2f(x);
    return y < 1.17549435e-38f ? 0.0f : y;
}

inline float least_or_nan(float x, float y) { return x != x || y != y ? NAN : x < y ? x : y; }
inline float log2_approximately(float x) { return log2f(x); }
inline float reciprocal_approximately(float x)
{
    const float y = 1.0f / x;
    return fabsf(y) < 1.17549435e-38f ? 0.0f : y;
}

template <int BYTES, bool LINE = false> inline void copy_to_shared(void* to, const void* from, bool exists)
{
    emulated::begin_copy(to, from, BYTES, exists);
}
void commit_group();
template <int PENDING> inline void await_groups() { emulated::await_groups(PENDING); }

inline void let_next_grid_begin() {}
inline void await_grids_before() {}
void ask_for_memory(const void* from, int bytes);  // it must be there
uint4 load_if(const void* from, bool exists);
uint2 load_words(const void* from, int bytes);

template <int WARPS> inline void sync_group() { emulated::sync_group(WARPS); }

// Addresses of shared memory count from its start; an access that its width does not divide faults on hardware.
inline unsigned shared_address(const void* x) { return (unsigned)((const unsigned char*)x - on_chip); }
void store_shared(unsigned to, unsigned x);
void store_shared(unsigned to, const unsigned (&x)[4]);
uint4 load_shared(unsigned from);
void copy_chunk_if(unsigned to, const void* from, bool exists);
inline void copy_chunk(unsigned to, const void* from) { copy_chunk_if(to, from, true); }
inline void load_matrices(unsigned (&x)[4], unsigned from) { emulated::matrices_of_warp(x, from, false); }
inline void load_matrices_transposed(unsigned (&x)[4], unsigned from) { emulated::matrices_of_warp(x, from, true); }

inline unsigned bfloat16_bits(float x)
{
    const unsigned word = bits<unsigned>(x);
    if ((word & 0x7FFFFFFFu) > 0x7F800000u)
        return word >> 16 | 0x40u;
    return (word + 0x7FFFu + (word >> 16 & 1u)) >> 16;
}
inline unsigned bfloat16_pair(float x, float y) { return bfloat16_bits(x) | bfloat16_bits(y) << 16; }
inline unsigned bfloat16_pair_toward_zero(float x, float y) { return bits<unsigned>(x) >> 16 | (bits<unsigned>(y) & 0xFFFF0000u); }

inline float bfloat16_to_float(unsigned x) { return bits<float>(x << 16); }
inline float float16_to_float(unsigned x) { return half_to_float((unsigned short)x); }
inline unsigned float16_pair(float x, float y) { return float_to_half(x) | (unsigned)float_to_half(y) << 16; }

inline void multiply_bfloat16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { emulated::multiply_halves(bfloat16_to_float, c, a, b); }
inline void multiply_float16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { emulated::multiply_halves(float16_to_float, c, a, b); }

void multiply_float64(double& c0, double& c1, double& c2, double& c3, const double (&a)[4], const double (&b)[2]);

#pragma GCC visibility pop
