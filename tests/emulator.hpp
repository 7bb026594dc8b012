// CUDA on a CPU, as much as the kernels of cupy_raw use: a thread is a fiber; a barrier lets the others run.
//
// Unkind where hardware may be: asynchronous copies happen when they are waited for (or, if they never are, when the thread ends), shared
// memory starts as NaN, and the bytes behind it are watched. Order of threads: round robin, forwards or backwards; with emulator_hopper.hpp
// the first thread (or the last) always goes as far as it can.

#include <cmath>
#include <csetjmp>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

#define EMULATED
#define __CUDA_ARCH__ 900
#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Dimensions { unsigned x, y, z; };
static Dimensions threadIdx, blockIdx, blockDim, gridDim;

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

// ---- fibers -------------------------------------------------------------------------------------------------------------

constexpr unsigned MOST_THREADS = 640, LANES = 32;
constexpr size_t STACK = 512 << 10, MOST_SHARED = 256 << 10, WATCHED = 4096;
__attribute__((aligned(1024))) unsigned char on_chip[MOST_SHARED + WATCHED];

struct Copy { void* to; const void* from; int bytes; bool exists; };
enum State { READY, AT_BARRIER, IN_WARP, IN_GROUP, ENDED, WAITING, POLLING };  // the last two: emulator_hopper.hpp
struct Fiber {
    ucontext_t context;  // to begin in; from then on it goes on where it left off, which takes no call of the system
    jmp_buf left;
    bool begun_to_run;
    State state;
    std::vector<Copy> begun;
    std::vector<std::vector<Copy>> groups;
    void* operand[3];  // of a warp's operation
};
static Fiber fibers[MOST_THREADS];
static jmp_buf scheduler;
static unsigned threads, current, at_barrier, in_warp[MOST_THREADS / LANES], in_group[MOST_THREADS / LANES], voices;
static bool diverged;
static void (*body)(void*);
static void* argument;

namespace emulated {
static char message[2000];  // the first error that has words
static bool in_thread;
static bool in_order;  // blocks of threads, backwards too: they wait for others that have smaller numbers

// What emulator_hopper.hpp has to say: at the begin and the end of a block and of a thread; when threads have met; when none can go on.
struct Hooks {
    void (*begin)();
    void (*thread_end)();
    void (*end)();
    void (*met)();
    bool (*stuck)();  // can one go on now?
};
static Hooks hooks;

static void complain(const char* format, ...)
{
    if (message[0])
        return;
    va_list list;
    va_start(list, format);
    int at = snprintf(message, sizeof message, "block %u", blockIdx.x);
    if (in_thread)
        at += snprintf(message + at, sizeof message - at, ", thread %u", current);
    at += snprintf(message + at, sizeof message - at, ": ");
    vsnprintf(message + at, sizeof message - at, format, list);
    va_end(list);
}

// The block ends here.
[[noreturn]] static void stop()
{
    _longjmp(scheduler, 1);
}
}

static void wait(State why)
{
    const unsigned me = current;
    fibers[me].state = why;
    if (!_setjmp(fibers[me].left))
        _longjmp(scheduler, 1);
    current = me;
    threadIdx.x = me;
}

static void perform(const std::vector<Copy>& copies)
{
    for (const Copy& c : copies)
        c.exists ? (void)memcpy(c.to, c.from, c.bytes) : (void)memset(c.to, 0, c.bytes);
}

inline void __syncthreads()
{
    if (++at_barrier < threads) {
        wait(AT_BARRIER);
        return;
    }
    at_barrier = 0;
    if (emulated::hooks.met)
        emulated::hooks.met();
    for (unsigned n = 0; n < threads; n++)
        if (fibers[n].state == AT_BARRIER)
            fibers[n].state = READY;
}

inline int __syncthreads_or(int x)
{
    static int heard;
    if (at_barrier == 0)
        heard = 0;
    heard |= x != 0;
    __syncthreads();
    const int answer = heard;
    __syncthreads();  // all have read it
    return answer;
}

// The last lane that comes does the work of the whole warp.
template <class Work> inline void by_warp(Work work)
{
    const unsigned warp = current / LANES;
    if (++in_warp[warp] < LANES) {
        wait(IN_WARP);
        return;
    }
    in_warp[warp] = 0;
    if (emulated::hooks.met)
        emulated::hooks.met();
    work(fibers + warp * LANES);
    for (unsigned n = warp * LANES; n < (warp + 1) * LANES; n++)
        if (fibers[n].state == IN_WARP)
            fibers[n].state = READY;
}

inline void __syncwarp(unsigned = ~0u) { by_warp([](Fiber*) {}); }

template <class T> inline T __shfl_xor_sync(unsigned, T x, int mask)
{
    T answer;
    fibers[current].operand[0] = &x;
    fibers[current].operand[1] = &answer;
    by_warp([mask](Fiber* lanes) {
        for (unsigned n = 0; n < LANES; n++)
            *(T*)lanes[n].operand[1] = *(T*)lanes[n ^ mask].operand[0];
    });
    return answer;
}

template <class T> inline T __shfl_sync(unsigned, T x, int lane)
{
    T answer;
    fibers[current].operand[0] = &x;
    fibers[current].operand[1] = &answer;
    fibers[current].operand[2] = (void*)(size_t)lane;
    by_warp([](Fiber* lanes) {
        for (unsigned n = 0; n < LANES; n++)
            *(T*)lanes[n].operand[1] = *(T*)lanes[(size_t)lanes[n].operand[2] % LANES].operand[0];
    });
    return answer;
}

inline unsigned __ballot_sync(unsigned, bool x)
{
    unsigned answer;
    fibers[current].operand[0] = &x;
    fibers[current].operand[1] = &answer;
    by_warp([](Fiber* lanes) {
        unsigned all = 0;
        for (unsigned n = 0; n < LANES; n++)
            all |= (unsigned)*(bool*)lanes[n].operand[0] << n;
        for (unsigned n = 0; n < LANES; n++)
            *(unsigned*)lanes[n].operand[1] = all;
    });
    return answer;
}

inline bool __all_sync(unsigned lanes, bool x) { return __ballot_sync(lanes, x) == ~0u; }
inline bool __any_sync(unsigned lanes, bool x) { return __ballot_sync(lanes, x) != 0; }

inline void __trap()
{
    emulated::complain("__trap");
    emulated::stop();
}

// Others run meanwhile.
inline void __nanosleep(unsigned) { wait(emulated::hooks.stuck ? POLLING : READY); }

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
    fibers[current].begun.push_back({to, from, BYTES, exists});
}
inline void commit_group()
{
    fibers[current].groups.push_back(std::move(fibers[current].begun));
    fibers[current].begun.clear();
}
template <int PENDING> inline void await_groups()
{
    auto& groups = fibers[current].groups;
    while (groups.size() > PENDING) {
        perform(groups.front());
        groups.erase(groups.begin());
    }
}

inline void let_next_grid_begin() {}
inline void await_grids_before() {}
inline void ask_for_memory(const void* from, int bytes)  // it must be there
{
    if ((uintptr_t)from % 16 || bytes <= 0 || bytes % 16)
        fprintf(stderr, "%d bytes asked for at %p\n", bytes, from), abort();
    std::vector<char> read(bytes);
    memcpy(read.data(), from, bytes);
}

inline uint4 load_if(const void* from, bool exists)
{
    uint4 x = {0, 0, 0, 0};
    if (exists && (uintptr_t)from % 16)
        fprintf(stderr, "16 bytes loaded from %p\n", from), abort();
    if (exists)
        memcpy(&x, from, 16);
    return x;
}

inline uint2 load_words(const void* from, int bytes)
{
    uint2 x = {0, 0};
    if (bytes != 0)
        memcpy(&x.x, from, 4), memcpy(&x.y, (const char*)from + (bytes == 8 ? 4 : 0), 4);
    return x;
}

template <int WARPS> inline void sync_group()
{
    const unsigned group = current / (WARPS * LANES);
    if (++in_group[group] < WARPS * LANES) {
        wait(IN_GROUP);
        return;
    }
    in_group[group] = 0;
    if (emulated::hooks.met)
        emulated::hooks.met();
    for (unsigned n = group * WARPS * LANES; n < (group + 1) * WARPS * LANES; n++)
        if (fibers[n].state == IN_GROUP)
            fibers[n].state = READY;
}

// Addresses of shared memory count from its start; an access that its width does not divide faults on hardware.
inline void divides(unsigned address, unsigned bytes)
{
    if (address % bytes)
        fprintf(stderr, "address %u of shared memory, of %u bytes\n", address, bytes), abort();
}
inline unsigned shared_address(const void* x) { return (unsigned)((const unsigned char*)x - on_chip); }
inline void store_shared(unsigned to, unsigned x) { divides(to, 4), memcpy(on_chip + to, &x, 4); }
inline void store_shared(unsigned to, const unsigned (&x)[4]) { divides(to, 16), memcpy(on_chip + to, x, 16); }
inline uint4 load_shared(unsigned from)
{
    divides(from, 16);
    uint4 x;
    memcpy(&x, on_chip + from, 16);
    return x;
}
inline void copy_chunk_if(unsigned to, const void* from, bool exists) { divides(to, 16), copy_to_shared<16>(on_chip + to, from, exists); }
inline void copy_chunk(unsigned to, const void* from) { copy_chunk_if(to, from, true); }

template <bool TRANSPOSED> inline void matrices_of_warp(unsigned (&x)[4], unsigned from)
{
    divides(from, 16);
    Fiber& me = fibers[current];
    me.operand[0] = x, me.operand[1] = on_chip + from;
    by_warp([](Fiber* lanes) {
        for (unsigned matrix = 0; matrix < 4; matrix++) {
            uint16_t numbers[8][8];
            for (unsigned row = 0; row < 8; row++)
                memcpy(numbers[row], lanes[8 * matrix + row].operand[1], 16);
            for (unsigned n = 0; n < LANES; n++) {
                const unsigned g = n / 4, y = 2 * (n % 4);
                const uint16_t low = TRANSPOSED ? numbers[y][g] : numbers[g][y], high = TRANSPOSED ? numbers[y + 1][g] : numbers[g][y + 1];
                ((unsigned*)lanes[n].operand[0])[matrix] = low | (unsigned)high << 16;
            }
        }
    });
}
inline void load_matrices(unsigned (&x)[4], unsigned from) { matrices_of_warp<false>(x, from); }
inline void load_matrices_transposed(unsigned (&x)[4], unsigned from) { matrices_of_warp<true>(x, from); }

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

// Tensor cores cut sums off.
inline float toward_zero(double x)
{
    const float y = (float)x;
    return std::fabs((double)y) > std::fabs(x) ? std::nextafterf(y, 0) : y;
}

template <float (*widened)(unsigned)>
inline void multiply_halves(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2])
{
    Fiber& me = fibers[current];
    me.operand[0] = c, me.operand[1] = (void*)a, me.operand[2] = (void*)b;
    by_warp([](Fiber* lanes) {
        float A[16][16], B[16][8];
        for (unsigned n = 0; n < LANES; n++) {
            const unsigned g = n / 4, t = n % 4, *x = (unsigned*)lanes[n].operand[1], *y = (unsigned*)lanes[n].operand[2];
            for (unsigned r = 0; r < 4; r++)
                for (unsigned half = 0; half < 2; half++)
                    A[g + 8 * (r % 2)][2 * t + 8 * (r / 2) + half] = widened(half ? x[r] >> 16 : x[r] & 0xFFFFu);
            for (unsigned r = 0; r < 2; r++)
                for (unsigned half = 0; half < 2; half++)
                    B[2 * t + 8 * r + half][g] = widened(half ? y[r] >> 16 : y[r] & 0xFFFFu);
        }
        for (unsigned n = 0; n < LANES; n++) {
            float* c = (float*)lanes[n].operand[0];
            for (unsigned e = 0; e < 4; e++) {
                double sum = c[e];
                for (unsigned k = 0; k < 16; k++)
                    sum += (double)A[n / 4 + 8 * (e / 2)][k] * B[k][2 * (n % 4) + e % 2];
                c[e] = toward_zero(sum);
            }
        }
    });
}

inline void multiply_bfloat16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { multiply_halves<bfloat16_to_float>(c, a, b); }
inline void multiply_float16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { multiply_halves<float16_to_float>(c, a, b); }

inline void multiply_float64(double& c0, double& c1, double& c2, double& c3, const double (&a)[4], const double (&b)[2])
{
    double c[4] = {c0, c1, c2, c3};
    Fiber& me = fibers[current];
    me.operand[0] = c, me.operand[1] = (void*)a, me.operand[2] = (void*)b;
    by_warp([](Fiber* lanes) {
        double A[16][8], B[8][8];
        for (unsigned n = 0; n < LANES; n++) {
            const double *x = (double*)lanes[n].operand[1], *y = (double*)lanes[n].operand[2];
            for (unsigned e = 0; e < 4; e++)
                A[n / 4 + 8 * (e % 2)][n % 4 + 4 * (e / 2)] = x[e];
            for (unsigned e = 0; e < 2; e++)
                B[n % 4 + 4 * e][n / 4] = y[e];
        }
        for (unsigned n = 0; n < LANES; n++) {
            double* c = (double*)lanes[n].operand[0];
            for (unsigned e = 0; e < 4; e++)
                for (unsigned k = 0; k < 8; k++)
                    c[e] = fma(A[n / 4 + 8 * (e / 2)][k], B[k][2 * (n % 4) + e % 2], c[e]);
        }
    });
    c0 = c[0], c1 = c[1], c2 = c[2], c3 = c[3];
}

// ---- a launch -------------------------------------------------------------------------------------------------------------

static void thread_main()
{
    body(argument);
    if (emulated::hooks.thread_end)
        emulated::hooks.thread_end();
    perform(fibers[current].begun);
    for (const auto& group : fibers[current].groups)
        perform(group);
    fibers[current].state = ENDED;
    _longjmp(scheduler, 1);
}

// Run a fiber until it waits or ends.
__attribute__((noinline)) static void go_on(Fiber& fiber)
{
    if (_setjmp(scheduler))
        return;
    if (fiber.begun_to_run)
        _longjmp(fiber.left, 1);
    fiber.begun_to_run = true;
    setcontext(&fiber.context);
}

// Mapped for one launch: every kernel is a library of its own, and a process that kept the stacks of them all
// could not be forked where their sum passes the machine's memory.
struct Stacks {
    static constexpr size_t BYTES = STACK * MOST_THREADS;
    char* const first = (char*)mmap(nullptr, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ~Stacks() { munmap(first, BYTES); }
};

// 0: all threads of all blocks came to their end. 1: threads wait for threads that will not come. 2: memory behind the tiles was written.
// 3: the message says what.
static int run_blocks(unsigned blocks, unsigned count, size_t shared, bool backwards)
{
    using emulated::hooks, emulated::message;
    const Stacks stacks;
    message[0] = 0;
    threads = count;
    gridDim = {blocks, 1, 1}, blockDim = {count, 1, 1};
    for (unsigned block = 0; block < blocks; block++) {
        blockIdx = {backwards && !emulated::in_order ? blocks - 1 - block : block, 0, 0};
        memset(on_chip, 0xFF, shared);
        memset(on_chip + shared, 0x5A, WATCHED);
        at_barrier = 0;
        memset(in_warp, 0, sizeof in_warp);
        memset(in_group, 0, sizeof in_group);
        for (unsigned n = 0; n < count; n++) {
            fibers[n].state = READY, fibers[n].begun_to_run = false;
            fibers[n].begun.clear(), fibers[n].groups.clear();
            getcontext(&fibers[n].context);
            fibers[n].context.uc_stack.ss_sp = stacks.first + n * STACK, fibers[n].context.uc_stack.ss_size = STACK;
            makecontext(&fibers[n].context, thread_main, 0);
        }
        if (hooks.begin)
            hooks.begin();
        for (unsigned ended = 0; ended < count;) {
            bool any = false;
            for (unsigned x = 0; x < count; x++) {
                const unsigned n = backwards ? count - 1 - x : x;
                if (fibers[n].state != READY)
                    continue;
                any = true;
                current = n, threadIdx = {n, 0, 0};
                emulated::in_thread = true;
                go_on(fibers[n]);
                emulated::in_thread = false;
                if (message[0])
                    return 3;
                ended += fibers[n].state == ENDED;
                if (hooks.stuck)  // unfair: always the first one that can go on
                    break;
            }
            if (!any && ended < count && !(hooks.stuck && hooks.stuck()))
                return message[0] ? 3 : 1;
        }
        if (hooks.end)
            hooks.end();
        if (message[0])
            return 3;
        for (size_t n = 0; n < WATCHED; n++)
            if (on_chip[shared + n] != 0x5A)
                return 2;
    }
    return 0;
}
