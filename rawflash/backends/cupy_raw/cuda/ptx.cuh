// Every instruction that C++ has no name for. Kernels use these functions; tests/emulator.hpp has their twins in C++, to run kernels on
// a CPU.

#ifndef EMULATED

__device__ __forceinline__ float half_to_float(unsigned short x)
{
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
    return wide;
}

__device__ __forceinline__ unsigned short float_to_half(float x)
{
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
}

// 2^x, to 2 units in the last place; a result below the smallest normal number is 0.
__device__ __forceinline__ float exp2_approximately(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The logarithm to base 2 of a normal number, to 2^-22: of itself, between 1/2 and 2 of 1.
__device__ __forceinline__ float log2_approximately(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x, to 1 unit in the last place; of more than 2^126 it is 0.
__device__ __forceinline__ float reciprocal_approximately(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Copies of 4, 8 or 16 bytes into shared memory that the hardware does on its own (sm_80 and later); zeros where the source does not exist.
// LINE: the other lanes of the warp copy the rest of the 128 bytes, which L2 had better ask for at once.
template <int BYTES, bool LINE = false> __device__ __forceinline__ void copy_to_shared(void* to, const void* from, bool exists)
{
#if __CUDA_ARCH__ >= 800
    const unsigned shared = (unsigned)__cvta_generic_to_shared(to);
    const int bytes = exists ? BYTES : 0;
    if constexpr (BYTES == 16 && LINE)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes) : "memory");
    else if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(from), "n"(BYTES), "r"(bytes) : "memory");
#endif
}

// The copies that this thread has begun since the last time become a group.
__device__ __forceinline__ void commit_group()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most PENDING of this thread's last groups are under way.
template <int PENDING> __device__ __forceinline__ void await_groups()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// The same number, which the compiler then keeps in a register instead of reading the argument of the kernel again and again.
__device__ __forceinline__ long long in_register(long long x)
{
    asm("" : "+l"(x));
    return x;
}

// The same number, of which the compiler does not know that: what is computed from it is not kept in registers for as long.
__device__ __forceinline__ unsigned once_more(unsigned x)
{
    asm volatile("" : "+r"(x));
    return x;
}

// The same address in device memory, which is computed here, and not where it is needed.
template <class T> __device__ __forceinline__ T* computed_here(T* x)
{
    unsigned long long address = __cvta_generic_to_global(x);
    asm volatile("" : "+l"(address));
    return (T*)__cvta_global_to_generic(address);
}

// ---- grids one behind the other (sm_90 and later): load() in compile.py ------------------------------------------------------------

// The grid behind this one may take the room that this one's blocks leave, once all of them have come here.
__device__ __forceinline__ void let_next_grid_begin()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The grids before this one are at their end, and what they wrote is seen.
__device__ __forceinline__ void await_grids_before()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Ask for memory at L2, which is as good as the memory: what others write is seen there. Address and number of bytes are multiples of 16.
__device__ __forceinline__ void ask_for_memory(const void* from, int bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes) : "memory");
#endif
}

// 16 bytes of memory, or zeros. They may be on their way yet: of a load that is not in one piece the compiler moves words, and waits for them.
__device__ __forceinline__ uint4 load_if(const void* from, bool exists)
{
    uint4 x = {0, 0, 0, 0};
    asm volatile("{\n\t.reg .pred exists;\n\tsetp.ne.s32 exists, %5, 0;\n\t@exists ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
                 : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w) : "l"(from), "r"((int)exists) : "memory");
    return x;
}

// The first and the last four bytes of a number of 4 or 8, past L1; of one that has none, zeros. They may be on their way yet: no branch that ends
// with a conversion waits for them.
__device__ __forceinline__ uint2 load_words(const void* from, int bytes)
{
    uint2 x = {0, 0};
    asm volatile("{\n\t.reg .pred exists;\n\tsetp.ne.s32 exists, %4, 0;\n\t"
                 "@exists ld.global.cg.u32 %0, [%2];\n\t@exists ld.global.cg.u32 %1, [%3];\n\t}"
                 : "+r"(x.x), "+r"(x.y) : "l"(from), "l"((const char*)from + (bytes == 8 ? 4 : 0)), "r"(bytes) : "memory");
    return x;
}

// What the counter was; then it is one more, or 0 after `most`. Whoever sees this count sees all that was written before it: by this thread,
// and by those that waited at a barrier with it.
__device__ __forceinline__ unsigned count_and_see(unsigned* counter, unsigned most)
{
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(__cvta_generic_to_global(counter)), "r"(most) : "memory");
    return before;
}

// Wait for the other warps of a group of WARPS neighbouring ones; the first of a block is a multiple of that.
template <int WARPS> __device__ __forceinline__ void sync_group()
{
    asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.x / (32 * WARPS)), "n"(32 * WARPS) : "memory");
}

// Where something in shared memory lies there, in 32 bits; the functions below take such addresses.
__device__ __forceinline__ unsigned shared_address(const void* x) { return (unsigned)__cvta_generic_to_shared(x); }

__device__ __forceinline__ void store_shared(unsigned to, unsigned x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }

__device__ __forceinline__ void store_shared(unsigned to, const unsigned (&x)[4])
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

__device__ __forceinline__ uint4 load_shared(unsigned from)
{
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
    return x;
}

#if __CUDA_ARCH__ >= 800

// Copies as above of 16 bytes of a line that the other lanes of the warp copy the rest of.
__device__ __forceinline__ void copy_chunk(unsigned to, const void* from)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_chunk_if(unsigned to, const void* from, bool exists)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

// Four 8 x 8 matrices of 16-bit numbers, by a whole warp: lanes 8 n to 8 n + 7 give the addresses of the rows of the nth. Of each matrix lane
// (g, t) gets numbers 2 t and 2 t + 1 of row g, as operands of products have them; or, transposed, of column g.
__device__ __forceinline__ void load_matrices(unsigned (&x)[4], unsigned from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(unsigned (&x)[4], unsigned from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
}

// The smaller number; NaN where one is.
__device__ __forceinline__ float least_or_nan(float x, float y)
{
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(y));
    return least;
}

// Two bfloat16 in one register, x in the low half: rounded to nearest, or cut off.
__device__ __forceinline__ unsigned bfloat16_pair(float x, float y)
{
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}

__device__ __forceinline__ unsigned bfloat16_pair_toward_zero(float x, float y)
{
    unsigned pair;
    asm("cvt.rz.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}

// c += a b for 16 x 8 sums of 16 products of bfloat16, by a whole warp. Lane (g, t) = (lane / 4, lane % 4) holds
// a: rows g, g + 8, g, g + 8 at depths 2 t, 2 t, 2 t + 8, 2 t + 8 and their neighbours; b: column g at depths 2 t and 2 t + 8 and their
// neighbours; c: row g, columns 2 t and 2 t + 1, then row g + 8.
__device__ __forceinline__ void multiply_bfloat16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same of float16.
__device__ __forceinline__ unsigned float16_pair(float x, float y)
{
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}

__device__ __forceinline__ void multiply_float16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#if __CUDA_ARCH__ < 900

// c += a b for 8 x 8 sums of 4 products. Lane (g, t) holds row g of a and column g of b at depth t; of c row g, columns 2 t and 2 t + 1.
__device__ __forceinline__ void multiply_float64_by_four(double& c0, double& c1, double a, double b)
{
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};" : "+d"(c0), "+d"(c1) : "d"(a), "d"(b));
}

#endif

// c += a b for 16 x 8 sums of 8 products of float64, by a whole warp. Lane (g, t) holds a: rows g, g + 8 at depth t, then at depth t + 4;
// b: column g at depths t and t + 4; c: row g, columns 2 t and 2 t + 1, then row g + 8.
__device__ __forceinline__ void multiply_float64(
    double& c0, double& c1, double& c2, double& c3, const double (&a)[4], const double (&b)[2])
{
#if __CUDA_ARCH__ >= 900
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+d"(c0), "+d"(c1), "+d"(c2), "+d"(c3)
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
#pragma unroll
    for (int half = 0; half < 2; half++) {
        multiply_float64_by_four(c0, c1, a[2 * half], b[half]);
        multiply_float64_by_four(c2, c3, a[2 * half + 1], b[half]);
    }
#endif
}

#endif
#endif
