// What sm_90a has and C++ has no name for: copies by tensor maps, barriers that count bytes, and matrix products of a warpgroup from shared
// memory. Kernels of this folder use these functions; tests/emulator_hopper.hpp has their twins, which run on a CPU.
//
// A warpgroup is four neighbouring warps, the first of them a multiple of four. All its threads call its functions together.

constexpr int WARPGROUP = 128;  // threads

struct alignas(64) TensorMap { unsigned long long word[16]; };  // what the driver encodes (tensor_map.py)

// A kernel's argument: the call, and a map of each matrix that is copied by one.
struct MappedCall {
    Call call;
    TensorMap map[MAPS];
};

// Where rows of a matrix lie in shared memory when a tensor map has copied them, or is to: 64 columns of 16 bits are 128 bytes of a row, its
// eight pieces of 16 bytes exchanged by the row's number; further columns follow behind all the rows. Such a slab begins at a multiple of
// SLAB_ALIGNMENT bytes.
constexpr int SLAB = 64, SLAB_ROW = 128, SLAB_ALIGNMENT = 1024;

// Byte offset of the 16 bytes number `piece` of a row of a slab.
__device__ __forceinline__ int in_slab(int row, int piece) { return row * SLAB_ROW + ((piece ^ (row & 7)) << 4); }

#ifdef BOUNDED
// Of a barrier, then the kernel ends with an error: for debugging. A wait beside compute-sanitizer may be longer than 2^20 of them.
constexpr unsigned MOST_POLLS = 1u << 27;
#endif

#ifndef EMULATED

// ---- barriers in shared memory: of arrivals and of bytes ------------------------------------------------------------------------

typedef unsigned long long Barrier;

// Before its first use: how many arrivals end a phase. Then fence_barriers(), and a barrier of the block.
__device__ __forceinline__ void init_barrier(Barrier* barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// The same barrier by its address in shared memory. What moves this to another one is an addition to that, not the address of another pointer.
struct BarrierAt {
    unsigned address;
    __device__ __forceinline__ BarrierAt operator+(int n) const { return {address + n * (int)sizeof(Barrier)}; }
};
__device__ __forceinline__ unsigned shared_address(BarrierAt barrier) { return barrier.address; }
__device__ __forceinline__ BarrierAt by_address(Barrier* first) { return {shared_address(first)}; }

template <class Place> __device__ __forceinline__ void arrive(Place barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// A warp arrives: what its lanes have read and written comes before. One of them does so for all, whom __syncwarp() puts behind the others; where
// kernels are for debugging each lane does, since racecheck does not see that (the instruction for it is left out where lanes are together).
#ifdef BOUNDED
constexpr int ARRIVALS = 32;
#else
constexpr int ARRIVALS = 1;
#endif
template <class Place> __device__ __forceinline__ void arrive_as_warp(Place barrier, int lane)
{
    __syncwarp();
    if (ARRIVALS > 1 || lane == 0)
        arrive(barrier);
}

// An arrival; the phase does not end before these bytes have come, too.
__device__ __forceinline__ void arrive_expecting(Barrier* barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Has the phase ended that has this parity? Nobody waits. They have 0, 1, 0, ... A barrier that is new is in phase 0, as if one of parity 1 had just ended.
__device__ __forceinline__ bool ended(Barrier* barrier, int parity)
{
    unsigned done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    return done;
}

// Wait for its end.
template <class Place> __device__ __forceinline__ void await(Place barrier, int parity)
{
#ifdef BOUNDED
    asm volatile("{\n.reg .pred p;\n.reg .u32 polls;\nmov.u32 polls, 0;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra done;\nadd.u32 polls, polls, 1;\nsetp.lt.u32 p, polls, %2;\n@p bra again;\ntrap;\ndone:\n}"
                 ::"r"(shared_address(barrier)), "r"(parity), "n"(MOST_POLLS) : "memory");
#else
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}"
                 ::"r"(shared_address(barrier)), "r"(parity) : "memory");
#endif
}

// Barriers of some warps of a block, `id` from 1 to 15: wait for all of `count` threads, or arrive and go on. A warp comes as a whole. The lanes of
// one that awaits do so together, but where a tool looks at each access: then they may have come apart.
__device__ __forceinline__ void come_together()
{
#ifdef BOUNDED
    __syncwarp();
#endif
}

__device__ __forceinline__ void meet(int id, int count)
{
    come_together();
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}

// The same where warps that wait come from different places of the code, which compute-sanitizer takes for a fault of the other form.
__device__ __forceinline__ void meet_from_apart(int id, int count)
{
    come_together();
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}

__device__ __forceinline__ void announce(int id, int count)
{
    come_together();
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory");
}

// ---- registers of a warpgroup: a multiple of 8 from 24 to 240 ---------------------------------------------------------------

template <int COUNT> __device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> __device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// ---- copies that the hardware does on its own: one thread begins them -----------------------------------------------------------

// A box of a matrix: SLAB columns from `column` on, as many rows as the map says, of one head and batch entry. Zeros outside of the matrix,
// which count as bytes too. Coordinates may be negative.
__device__ __forceinline__ void copy_box(void* to, const TensorMap& map, Barrier* barrier, int column, int row, int head, int batch)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
                 ::"r"(shared_address(to)), "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(shared_address(barrier)) : "memory");
}

// Such a box is asked for at L2.
__device__ __forceinline__ void ask_for_box(const TensorMap& map, int column, int row, int head, int batch)
{
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];"
                 ::"l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}

// The same from shared memory; what lies outside of the matrix is not written.
__device__ __forceinline__ void store_box(const TensorMap& map, const void* from, int column, int row, int head, int batch)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
                 ::"l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(shared_address(from)) : "memory");
}

// bytes / 4 neighbouring float32 of shared memory are added to those in device memory. Both at multiples of 16 bytes, as many as 16 n.
__device__ __forceinline__ void add_bulk(float* to, const void* from, int bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 ::"l"(__cvta_generic_to_global(to)), "r"(shared_address(from)), "r"(bytes) : "memory");
}

// Or are stored there.
__device__ __forceinline__ void store_bulk(float* to, const void* from, int bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(__cvta_generic_to_global(to)), "r"(shared_address(from)), "r"(bytes) : "memory");
}

// bytes / 16 vectors of device memory come to shared memory, and count at the barrier.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, Barrier* barrier, int bytes)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

// The stores and additions that this thread began become a group; wait until at most PENDING groups have not read their source yet, or are
// not done yet.
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void await_stores_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
template <int PENDING> __device__ __forceinline__ void await_stores() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory"); }

// Thread blocks that take turns at something in device memory: wait until so many have passed on, and pass on. Of the thread's own stores and
// additions above, those that have been awaited come before.
__device__ __forceinline__ bool turn_has_come(const unsigned* turns, unsigned count)
{
    unsigned now;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(__cvta_generic_to_global(turns)) : "memory");
    return now >= count;
}

__device__ __forceinline__ void await_turn(const unsigned* turns, unsigned count)
{
#ifdef BOUNDED
    unsigned polls = 0;
#endif
    do {
#ifdef BOUNDED
        if (++polls == MOST_POLLS)
            __trap();
#endif
    } while (!turn_has_come(turns, count));
}

__device__ __forceinline__ void pass_turn(unsigned* turns)
{
    asm volatile("fence.proxy.async.global;\nred.release.gpu.global.add.u32 [%0], 1;" ::"l"(__cvta_generic_to_global(turns)) : "memory");
}

// What others wrote to device memory by ordinary stores, and this thread has seen, is seen by its copies.
__device__ __forceinline__ void fence_device() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// What this thread wrote to shared memory by ordinary stores becomes visible to products and copies, after a barrier; and what others wrote before a
// barrier that this thread has passed, to copies that it begins.
__device__ __forceinline__ void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// ---- clusters: blocks of threads that run together and reach each other's shared memory --------------------------------------------

__device__ __forceinline__ unsigned rank_in_cluster()
{
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of all of them, those that have not ended.
__device__ __forceinline__ void cluster_meets() { asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"); }

// Where the block of threads of that rank has this place of its own.
template <class Place> __device__ __forceinline__ unsigned address_there(Place place, unsigned rank)
{
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(place)), "r"(rank));
    return there;
}

// An arrival at its barrier. Products and copies that this thread has awaited come before; its ordinary stores need not.
template <class Place> __device__ __forceinline__ void arrive_there(Place barrier, unsigned rank)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_there(barrier, rank)) : "memory");
}

// bytes / 16 vectors of this block's shared memory come to its, and count at its barrier.
__device__ __forceinline__ void copy_there(void* to, const void* from, Barrier* barrier, int bytes, unsigned rank)
{
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(address_there(to, rank)), "r"(shared_address(from)), "r"(bytes), "r"(address_there(barrier, rank)) : "memory");
}

// ---- matrix products of a warpgroup -----------------------------------------------------------------------------------------------

// A factor in shared memory: the address of its first row, at a multiple of SLAB_ALIGNMENT but for whole rows of eight and steps of 32 bytes.
// Rows of its slabs run along the sum (a factor X of X Y^T), or across (`transposed`: Y of X Y); then `slab_bytes` are from one slab to the next.
__device__ __forceinline__ unsigned long long factor(const void* first, int slab_bytes = 16)
{
    return (1ull << 62) | ((unsigned long long)(8 * SLAB_ROW >> 4) << 32) | ((unsigned long long)(slab_bytes >> 4) << 16) |
           ((shared_address(first) >> 4) & 0x3FFF);
}

// The same, some bytes further: the address is in the lower half, which it does not leave.
__device__ __forceinline__ unsigned long long moved(unsigned long long factor, int bytes)
{
    return (factor & 0xFFFFFFFF00000000ull) | ((unsigned)factor + (bytes >> 4));
}

// The lower half of a factor, whose upper half is the same for all; `steps` are of 16 bytes. For factors that move, as in rings of stages: the
// assembler keeps whole ones that stay where they are, but sets an upper half that it knows again in front of each product (58 of the 510 instructions
// of a step of the backward pass). One that it does not know, as to it grids may have several axes, it keeps. How many copies of it are made between
// products all the same depends on which factors share one: UPPER_HALVES says which each kind of factor has, by trial.
#ifndef UPPER_HALVES
#define UPPER_HALVES {0, 1, 1, 2, 2}
#endif
enum { FIRST_FACTOR, SECOND_FACTOR, BESIDE_REGISTERS, ACROSS_BESIDE_REGISTERS, ROWS_TO_SUBTRACT };
template <int FACTOR> __device__ __forceinline__ unsigned unknown_one()
{
    constexpr int WHICH[] = UPPER_HALVES;
    return WHICH[FACTOR] == 0 ? gridDim.y : WHICH[FACTOR] == 1 ? gridDim.z : WHICH[FACTOR] == 2 ? blockDim.y : blockDim.z;
}

struct LowerHalf {
    unsigned bits;
    __device__ __forceinline__ LowerHalf operator+(int steps) const { return {bits + steps}; }
    template <int FACTOR> __device__ __forceinline__ unsigned long long whole() const
    {
        unsigned long long x;
        asm("mov.b64 %0, {%1, %2};" : "=l"(x) : "r"(bits), "r"(((1 << 30) | (8 * SLAB_ROW >> 4)) - 1 + unknown_one<FACTOR>()));
        return x;
    }
};
// In a cluster an address says which block of threads it is of, above the 18 bits that a factor has room for.
template <bool CLUSTER = false> __device__ __forceinline__ LowerHalf lower_half(const void* first, int slab_bytes = 16)
{
    return {((shared_address(first) & (CLUSTER ? 0x3FFFF : ~0u)) >> 4) + (slab_bytes >> 4 << 16)};
}
__device__ __forceinline__ LowerHalf moved(LowerHalf factor, int bytes) { return {factor.bits + (bytes >> 4)}; }

// Before the first product, and after registers of a product were written by other code; what follows the last of some; wait until at most
// PENDING such groups are under way. Sums and factors in registers are not to be touched meanwhile.
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void await_products()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Nothing moves the use of these registers across this place.
template <int COUNT> __device__ __forceinline__ void pin(float (&x)[COUNT])
{
#pragma unroll
    for (int n = 0; n < COUNT; n++)
        asm volatile("" : "+f"(x[n])::"memory");
}

// sum += A B for 64 x N sums of 16 products; sum = A B unless `adds`. Lane (g, t) = (lane / 4, lane % 4) of warp w holds of the sums n = 0, 1, ...
// row 16 w + g + 8 (n / 2 % 2), column 8 (n / 4) + 2 t + n % 2; of a factor A in registers two numbers in each: rows g, g + 8, g, g + 8 at depths
// 2 t, 2 t, 2 t + 8, 2 t + 8 and their neighbours, so that sums 8 k to 8 k + 7, two in a word, are the factor of the k-th 16 columns.
template <int N> struct Products;

// Both factors in shared memory.
template <int N, bool TRANSPOSED_A = false, bool TRANSPOSED_B = false>
__device__ __forceinline__ void multiply_ss(float (&sum)[N / 2], unsigned long long a, unsigned long long b, bool adds)
{
    Products<N>::template ss<TRANSPOSED_A, TRANSPOSED_B>(sum, a, b, adds);
}

template <int N, bool TRANSPOSED_A = false, bool TRANSPOSED_B = false>
__device__ __forceinline__ void multiply_ss(float (&sum)[N / 2], LowerHalf a, LowerHalf b, bool adds)
{
    multiply_ss<N, TRANSPOSED_A, TRANSPOSED_B>(sum, a.whole<FIRST_FACTOR>(), b.whole<SECOND_FACTOR>(), adds);
}

// A in registers.
template <int N, bool TRANSPOSED_B = false>
__device__ __forceinline__ void multiply_rs(float (&sum)[N / 2], const unsigned (&a)[4], unsigned long long b, bool adds)
{
    Products<N>::template rs<TRANSPOSED_B>(sum, a, b, adds);
}

template <int N, bool TRANSPOSED_B = false>
__device__ __forceinline__ void multiply_rs(float (&sum)[N / 2], const unsigned (&a)[4], LowerHalf b, bool adds)
{
    multiply_rs<N, TRANSPOSED_B>(sum, a, b.whole<TRANSPOSED_B ? ACROSS_BESIDE_REGISTERS : BESIDE_REGISTERS>(), adds);
}

// sum = -x: a factor of -1 for three of 16 rows, `first` and those behind it, and 0 for the others; these rows, in bfloat16 whatever the matrices are
// of, add up to x. What the zeros meet may change meanwhile, but has to be finite.
__device__ __forceinline__ void begin_with_minus(float (&x)[32], const unsigned (&minus)[4], LowerHalf slab, int /*first*/)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                 "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 "
                 "}, {%32, %33, %34, %35}, %36, 0, 1, 1, 1;"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]), "=f"(x[4]), "=f"(x[5]), "=f"(x[6]), "=f"(x[7]),
                   "=f"(x[8]), "=f"(x[9]), "=f"(x[10]), "=f"(x[11]), "=f"(x[12]), "=f"(x[13]), "=f"(x[14]), "=f"(x[15]),
                   "=f"(x[16]), "=f"(x[17]), "=f"(x[18]), "=f"(x[19]), "=f"(x[20]), "=f"(x[21]), "=f"(x[22]), "=f"(x[23]),
                   "=f"(x[24]), "=f"(x[25]), "=f"(x[26]), "=f"(x[27]), "=f"(x[28]), "=f"(x[29]), "=f"(x[30]), "=f"(x[31])
                 : "r"(minus[0]), "r"(minus[1]), "r"(minus[2]), "r"(minus[3]), "l"(slab.whole<ROWS_TO_SUBTRACT>()));
}

#if TYPE == BFLOAT16
#define RAWFLASH_HALF "bf16"
#else
#define RAWFLASH_HALF "f16"
#endif

template <> struct Products<16> {
    template <bool TA, bool TB> static __device__ __forceinline__ void ss(float (&x)[8], unsigned long long a, unsigned long long b, int adds)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\nwgmma.mma_async.sync.aligned.m64n16k16.f32." RAWFLASH_HALF "." RAWFLASH_HALF " {"
                     "%0, %1, %2, %3, %4, %5, %6, %7 "
                     "}, %8, %9, p, 1, 1, %11, %12;\n}"
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7])
                     : "l"(a), "l"(b), "r"(adds), "n"((int)TA), "n"((int)TB));
    }
    template <bool TB> static __device__ __forceinline__ void rs(float (&x)[8], const unsigned (&a)[4], unsigned long long b, int adds)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\nwgmma.mma_async.sync.aligned.m64n16k16.f32." RAWFLASH_HALF "." RAWFLASH_HALF " {"
                     "%0, %1, %2, %3, %4, %5, %6, %7 "
                     "}, {%8, %9, %10, %11}, %12, p, 1, 1, %14;\n}"
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "n"((int)TB));
    }
};

template <> struct Products<32> {
    template <bool TA, bool TB> static __device__ __forceinline__ void ss(float (&x)[16], unsigned long long a, unsigned long long b, int adds)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32." RAWFLASH_HALF "." RAWFLASH_HALF " {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15 "
                     "}, %16, %17, p, 1, 1, %19, %20;\n}"
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
                       "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15])
                     : "l"(a), "l"(b), "r"(adds), "n"((int)TA), "n"((int)TB));
    }
    template <bool TB> static __device__ __forceinline__ void rs(float (&x)[16], const unsigned (&a)[4], unsigned long long b, int adds)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32." RAWFLASH_HALF "." RAWFLASH_HALF " {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15 "
                     "}, {%16, %17, %18, %19}, %20, p, 1, 1, %22;\n}"
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
                       "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "n"((int)TB));
    }
};

template <> struct Products<64> {
    template <bool TA, bool TB> static __device__ __forceinline__ void ss(float (&x)[32], unsigned long long a, unsigned long long b, int adds)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." RAWFLASH_HALF "." RAWFLASH_HALF " {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                     "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 "
                     "}, %32, %33, p, 1, 1, %35, %36;\n}"
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
                       "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]),
                       "+f"(x[16]), "+f"(x[17]), "+f"(x[18]), "+f"(x[19]), "+f"(x[20]), "+f"(x[21]), "+f"(x[22]), "+f"(x[23]),
                       "+f"(x[24]), "+f"(x[25]), "+f"(x[26]), "+f"(x[27]), "+f"(x[28]), "+f"(x[29]), "+f"(x[30]), "+f"(x[31])
                     : "l"(a), "l"(b), "r"(adds), "n"((int)TA), "n"((int)TB));
    }
    template <bool TB> static __device__ __forceinline__ void rs(float (&x)[32], const unsigned (&a)[4], unsigned long long b, int adds)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." RAWFLASH_HALF "." RAWFLASH_HALF " {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                     "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 "
                     "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
                       "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]),
                       "+f"(x[16]), "+f"(x[17]), "+f"(x[18]), "+f"(x[19]), "+f"(x[20]), "+f"(x[21]), "+f"(x[22]), "+f"(x[23]),
                       "+f"(x[24]), "+f"(x[25]), "+f"(x[26]), "+f"(x[27]), "+f"(x[28]), "+f"(x[29]), "+f"(x[30]), "+f"(x[31])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "n"((int)TB));
    }
};

template <> struct Products<80> {
    template <bool TA, bool TB> static __device__ __forceinline__ void ss(float (&x)[40], unsigned long long a, unsigned long long b, int adds)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\nwgmma.mma_async.sync.aligned.m64n80k16.f32." RAWFLASH_HALF "." RAWFLASH_HALF " {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                     "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39 "
                     "}, %40, %41, p, 1, 1, %43, %44;\n}"
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
                       "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]),
                       "+f"(x[16]), "+f"(x[17]), "+f"(x[18]), "+f"(x[19]), "+f"(x[20]), "+f"(x[21]), "+f"(x[22]), "+f"(x[23]),
                       "+f"(x[24]), "+f"(x[25]), "+f"(x[26]), "+f"(x[27]), "+f"(x[28]), "+f"(x[29]), "+f"(x[30]), "+f"(x[31]),
                       "+f"(x[32]), "+f"(x[33]), "+f"(x[34]), "+f"(x[35]), "+f"(x[36]), "+f"(x[37]), "+f"(x[38]), "+f"(x[39])
                     : "l"(a), "l"(b), "r"(adds), "n"((int)TA), "n"((int)TB));
    }
    template <bool TB> static __device__ __forceinline__ void rs(float (&x)[40], const unsigned (&a)[4], unsigned long long b, int adds)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %45, 0;\nwgmma.mma_async.sync.aligned.m64n80k16.f32." RAWFLASH_HALF "." RAWFLASH_HALF " {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                     "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39 "
                     "}, {%40, %41, %42, %43}, %44, p, 1, 1, %46;\n}"
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
                       "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]),
                       "+f"(x[16]), "+f"(x[17]), "+f"(x[18]), "+f"(x[19]), "+f"(x[20]), "+f"(x[21]), "+f"(x[22]), "+f"(x[23]),
                       "+f"(x[24]), "+f"(x[25]), "+f"(x[26]), "+f"(x[27]), "+f"(x[28]), "+f"(x[29]), "+f"(x[30]), "+f"(x[31]),
                       "+f"(x[32]), "+f"(x[33]), "+f"(x[34]), "+f"(x[35]), "+f"(x[36]), "+f"(x[37]), "+f"(x[38]), "+f"(x[39])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "n"((int)TB));
    }
};

template <> struct Products<96> {
    template <bool TA, bool TB> static __device__ __forceinline__ void ss(float (&x)[48], unsigned long long a, unsigned long long b, int adds)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\nwgmma.mma_async.sync.aligned.m64n96k16.f32." RAWFLASH_HALF "." RAWFLASH_HALF " {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                     "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
                     "%40, %41, %42, %43, %44, %45, %46, %47 "
                     "}, %48, %49, p, 1, 1, %51, %52;\n}"
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
                       "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]),
                       "+f"(x[16]), "+f"(x[17]), "+f"(x[18]), "+f"(x[19]), "+f"(x[20]), "+f"(x[21]), "+f"(x[22]), "+f"(x[23]),
                       "+f"(x[24]), "+f"(x[25]), "+f"(x[26]), "+f"(x[27]), "+f"(x[28]), "+f"(x[29]), "+f"(x[30]), "+f"(x[31]),
                       "+f"(x[32]), "+f"(x[33]), "+f"(x[34]), "+f"(x[35]), "+f"(x[36]), "+f"(x[37]), "+f"(x[38]), "+f"(x[39]),
                       "+f"(x[40]), "+f"(x[41]), "+f"(x[42]), "+f"(x[43]), "+f"(x[44]), "+f"(x[45]), "+f"(x[46]), "+f"(x[47])
                     : "l"(a), "l"(b), "r"(adds), "n"((int)TA), "n"((int)TB));
    }
    template <bool TB> static __device__ __forceinline__ void rs(float (&x)[48], const unsigned (&a)[4], unsigned long long b, int adds)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %53, 0;\nwgmma.mma_async.sync.aligned.m64n96k16.f32." RAWFLASH_HALF "." RAWFLASH_HALF " {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                     "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
                     "%40, %41, %42, %43, %44, %45, %46, %47 "
                     "}, {%48, %49, %50, %51}, %52, p, 1, 1, %54;\n}"
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
                       "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]),
                       "+f"(x[16]), "+f"(x[17]), "+f"(x[18]), "+f"(x[19]), "+f"(x[20]), "+f"(x[21]), "+f"(x[22]), "+f"(x[23]),
                       "+f"(x[24]), "+f"(x[25]), "+f"(x[26]), "+f"(x[27]), "+f"(x[28]), "+f"(x[29]), "+f"(x[30]), "+f"(x[31]),
                       "+f"(x[32]), "+f"(x[33]), "+f"(x[34]), "+f"(x[35]), "+f"(x[36]), "+f"(x[37]), "+f"(x[38]), "+f"(x[39]),
                       "+f"(x[40]), "+f"(x[41]), "+f"(x[42]), "+f"(x[43]), "+f"(x[44]), "+f"(x[45]), "+f"(x[46]), "+f"(x[47])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "n"((int)TB));
    }
};

template <> struct Products<128> {
    template <bool TA, bool TB> static __device__ __forceinline__ void ss(float (&x)[64], unsigned long long a, unsigned long long b, int adds)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." RAWFLASH_HALF "." RAWFLASH_HALF " {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                     "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
                     "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
                     "%60, %61, %62, %63 "
                     "}, %64, %65, p, 1, 1, %67, %68;\n}"
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
                       "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]),
                       "+f"(x[16]), "+f"(x[17]), "+f"(x[18]), "+f"(x[19]), "+f"(x[20]), "+f"(x[21]), "+f"(x[22]), "+f"(x[23]),
                       "+f"(x[24]), "+f"(x[25]), "+f"(x[26]), "+f"(x[27]), "+f"(x[28]), "+f"(x[29]), "+f"(x[30]), "+f"(x[31]),
                       "+f"(x[32]), "+f"(x[33]), "+f"(x[34]), "+f"(x[35]), "+f"(x[36]), "+f"(x[37]), "+f"(x[38]), "+f"(x[39]),
                       "+f"(x[40]), "+f"(x[41]), "+f"(x[42]), "+f"(x[43]), "+f"(x[44]), "+f"(x[45]), "+f"(x[46]), "+f"(x[47]),
                       "+f"(x[48]), "+f"(x[49]), "+f"(x[50]), "+f"(x[51]), "+f"(x[52]), "+f"(x[53]), "+f"(x[54]), "+f"(x[55]),
                       "+f"(x[56]), "+f"(x[57]), "+f"(x[58]), "+f"(x[59]), "+f"(x[60]), "+f"(x[61]), "+f"(x[62]), "+f"(x[63])
                     : "l"(a), "l"(b), "r"(adds), "n"((int)TA), "n"((int)TB));
    }
    template <bool TB> static __device__ __forceinline__ void rs(float (&x)[64], const unsigned (&a)[4], unsigned long long b, int adds)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." RAWFLASH_HALF "." RAWFLASH_HALF " {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                     "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
                     "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
                     "%60, %61, %62, %63 "
                     "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
                       "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]),
                       "+f"(x[16]), "+f"(x[17]), "+f"(x[18]), "+f"(x[19]), "+f"(x[20]), "+f"(x[21]), "+f"(x[22]), "+f"(x[23]),
                       "+f"(x[24]), "+f"(x[25]), "+f"(x[26]), "+f"(x[27]), "+f"(x[28]), "+f"(x[29]), "+f"(x[30]), "+f"(x[31]),
                       "+f"(x[32]), "+f"(x[33]), "+f"(x[34]), "+f"(x[35]), "+f"(x[36]), "+f"(x[37]), "+f"(x[38]), "+f"(x[39]),
                       "+f"(x[40]), "+f"(x[41]), "+f"(x[42]), "+f"(x[43]), "+f"(x[44]), "+f"(x[45]), "+f"(x[46]), "+f"(x[47]),
                       "+f"(x[48]), "+f"(x[49]), "+f"(x[50]), "+f"(x[51]), "+f"(x[52]), "+f"(x[53]), "+f"(x[54]), "+f"(x[55]),
                       "+f"(x[56]), "+f"(x[57]), "+f"(x[58]), "+f"(x[59]), "+f"(x[60]), "+f"(x[61]), "+f"(x[62]), "+f"(x[63])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "n"((int)TB));
    }
};

template <> struct Products<160> {
    template <bool TA, bool TB> static __device__ __forceinline__ void ss(float (&x)[80], unsigned long long a, unsigned long long b, int adds)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %82, 0;\nwgmma.mma_async.sync.aligned.m64n160k16.f32." RAWFLASH_HALF "." RAWFLASH_HALF " {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                     "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
                     "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
                     "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79 "
                     "}, %80, %81, p, 1, 1, %83, %84;\n}"
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
                       "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]),
                       "+f"(x[16]), "+f"(x[17]), "+f"(x[18]), "+f"(x[19]), "+f"(x[20]), "+f"(x[21]), "+f"(x[22]), "+f"(x[23]),
                       "+f"(x[24]), "+f"(x[25]), "+f"(x[26]), "+f"(x[27]), "+f"(x[28]), "+f"(x[29]), "+f"(x[30]), "+f"(x[31]),
                       "+f"(x[32]), "+f"(x[33]), "+f"(x[34]), "+f"(x[35]), "+f"(x[36]), "+f"(x[37]), "+f"(x[38]), "+f"(x[39]),
                       "+f"(x[40]), "+f"(x[41]), "+f"(x[42]), "+f"(x[43]), "+f"(x[44]), "+f"(x[45]), "+f"(x[46]), "+f"(x[47]),
                       "+f"(x[48]), "+f"(x[49]), "+f"(x[50]), "+f"(x[51]), "+f"(x[52]), "+f"(x[53]), "+f"(x[54]), "+f"(x[55]),
                       "+f"(x[56]), "+f"(x[57]), "+f"(x[58]), "+f"(x[59]), "+f"(x[60]), "+f"(x[61]), "+f"(x[62]), "+f"(x[63]),
                       "+f"(x[64]), "+f"(x[65]), "+f"(x[66]), "+f"(x[67]), "+f"(x[68]), "+f"(x[69]), "+f"(x[70]), "+f"(x[71]),
                       "+f"(x[72]), "+f"(x[73]), "+f"(x[74]), "+f"(x[75]), "+f"(x[76]), "+f"(x[77]), "+f"(x[78]), "+f"(x[79])
                     : "l"(a), "l"(b), "r"(adds), "n"((int)TA), "n"((int)TB));
    }
    template <bool TB> static __device__ __forceinline__ void rs(float (&x)[80], const unsigned (&a)[4], unsigned long long b, int adds)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %85, 0;\nwgmma.mma_async.sync.aligned.m64n160k16.f32." RAWFLASH_HALF "." RAWFLASH_HALF " {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                     "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
                     "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
                     "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79 "
                     "}, {%80, %81, %82, %83}, %84, p, 1, 1, %86;\n}"
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
                       "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]),
                       "+f"(x[16]), "+f"(x[17]), "+f"(x[18]), "+f"(x[19]), "+f"(x[20]), "+f"(x[21]), "+f"(x[22]), "+f"(x[23]),
                       "+f"(x[24]), "+f"(x[25]), "+f"(x[26]), "+f"(x[27]), "+f"(x[28]), "+f"(x[29]), "+f"(x[30]), "+f"(x[31]),
                       "+f"(x[32]), "+f"(x[33]), "+f"(x[34]), "+f"(x[35]), "+f"(x[36]), "+f"(x[37]), "+f"(x[38]), "+f"(x[39]),
                       "+f"(x[40]), "+f"(x[41]), "+f"(x[42]), "+f"(x[43]), "+f"(x[44]), "+f"(x[45]), "+f"(x[46]), "+f"(x[47]),
                       "+f"(x[48]), "+f"(x[49]), "+f"(x[50]), "+f"(x[51]), "+f"(x[52]), "+f"(x[53]), "+f"(x[54]), "+f"(x[55]),
                       "+f"(x[56]), "+f"(x[57]), "+f"(x[58]), "+f"(x[59]), "+f"(x[60]), "+f"(x[61]), "+f"(x[62]), "+f"(x[63]),
                       "+f"(x[64]), "+f"(x[65]), "+f"(x[66]), "+f"(x[67]), "+f"(x[68]), "+f"(x[69]), "+f"(x[70]), "+f"(x[71]),
                       "+f"(x[72]), "+f"(x[73]), "+f"(x[74]), "+f"(x[75]), "+f"(x[76]), "+f"(x[77]), "+f"(x[78]), "+f"(x[79])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "n"((int)TB));
    }
};

template <> struct Products<192> {
    template <bool TA, bool TB> static __device__ __forceinline__ void ss(float (&x)[96], unsigned long long a, unsigned long long b, int adds)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\nwgmma.mma_async.sync.aligned.m64n192k16.f32." RAWFLASH_HALF "." RAWFLASH_HALF " {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                     "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
                     "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
                     "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                     "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95 "
                     "}, %96, %97, p, 1, 1, %99, %100;\n}"
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
                       "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]),
                       "+f"(x[16]), "+f"(x[17]), "+f"(x[18]), "+f"(x[19]), "+f"(x[20]), "+f"(x[21]), "+f"(x[22]), "+f"(x[23]),
                       "+f"(x[24]), "+f"(x[25]), "+f"(x[26]), "+f"(x[27]), "+f"(x[28]), "+f"(x[29]), "+f"(x[30]), "+f"(x[31]),
                       "+f"(x[32]), "+f"(x[33]), "+f"(x[34]), "+f"(x[35]), "+f"(x[36]), "+f"(x[37]), "+f"(x[38]), "+f"(x[39]),
                       "+f"(x[40]), "+f"(x[41]), "+f"(x[42]), "+f"(x[43]), "+f"(x[44]), "+f"(x[45]), "+f"(x[46]), "+f"(x[47]),
                       "+f"(x[48]), "+f"(x[49]), "+f"(x[50]), "+f"(x[51]), "+f"(x[52]), "+f"(x[53]), "+f"(x[54]), "+f"(x[55]),
                       "+f"(x[56]), "+f"(x[57]), "+f"(x[58]), "+f"(x[59]), "+f"(x[60]), "+f"(x[61]), "+f"(x[62]), "+f"(x[63]),
                       "+f"(x[64]), "+f"(x[65]), "+f"(x[66]), "+f"(x[67]), "+f"(x[68]), "+f"(x[69]), "+f"(x[70]), "+f"(x[71]),
                       "+f"(x[72]), "+f"(x[73]), "+f"(x[74]), "+f"(x[75]), "+f"(x[76]), "+f"(x[77]), "+f"(x[78]), "+f"(x[79]),
                       "+f"(x[80]), "+f"(x[81]), "+f"(x[82]), "+f"(x[83]), "+f"(x[84]), "+f"(x[85]), "+f"(x[86]), "+f"(x[87]),
                       "+f"(x[88]), "+f"(x[89]), "+f"(x[90]), "+f"(x[91]), "+f"(x[92]), "+f"(x[93]), "+f"(x[94]), "+f"(x[95])
                     : "l"(a), "l"(b), "r"(adds), "n"((int)TA), "n"((int)TB));
    }
    template <bool TB> static __device__ __forceinline__ void rs(float (&x)[96], const unsigned (&a)[4], unsigned long long b, int adds)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %101, 0;\nwgmma.mma_async.sync.aligned.m64n192k16.f32." RAWFLASH_HALF "." RAWFLASH_HALF " {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                     "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
                     "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
                     "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                     "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95 "
                     "}, {%96, %97, %98, %99}, %100, p, 1, 1, %102;\n}"
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
                       "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]),
                       "+f"(x[16]), "+f"(x[17]), "+f"(x[18]), "+f"(x[19]), "+f"(x[20]), "+f"(x[21]), "+f"(x[22]), "+f"(x[23]),
                       "+f"(x[24]), "+f"(x[25]), "+f"(x[26]), "+f"(x[27]), "+f"(x[28]), "+f"(x[29]), "+f"(x[30]), "+f"(x[31]),
                       "+f"(x[32]), "+f"(x[33]), "+f"(x[34]), "+f"(x[35]), "+f"(x[36]), "+f"(x[37]), "+f"(x[38]), "+f"(x[39]),
                       "+f"(x[40]), "+f"(x[41]), "+f"(x[42]), "+f"(x[43]), "+f"(x[44]), "+f"(x[45]), "+f"(x[46]), "+f"(x[47]),
                       "+f"(x[48]), "+f"(x[49]), "+f"(x[50]), "+f"(x[51]), "+f"(x[52]), "+f"(x[53]), "+f"(x[54]), "+f"(x[55]),
                       "+f"(x[56]), "+f"(x[57]), "+f"(x[58]), "+f"(x[59]), "+f"(x[60]), "+f"(x[61]), "+f"(x[62]), "+f"(x[63]),
                       "+f"(x[64]), "+f"(x[65]), "+f"(x[66]), "+f"(x[67]), "+f"(x[68]), "+f"(x[69]), "+f"(x[70]), "+f"(x[71]),
                       "+f"(x[72]), "+f"(x[73]), "+f"(x[74]), "+f"(x[75]), "+f"(x[76]), "+f"(x[77]), "+f"(x[78]), "+f"(x[79]),
                       "+f"(x[80]), "+f"(x[81]), "+f"(x[82]), "+f"(x[83]), "+f"(x[84]), "+f"(x[85]), "+f"(x[86]), "+f"(x[87]),
                       "+f"(x[88]), "+f"(x[89]), "+f"(x[90]), "+f"(x[91]), "+f"(x[92]), "+f"(x[93]), "+f"(x[94]), "+f"(x[95])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "n"((int)TB));
    }
};

template <> struct Products<256> {
    template <bool TA, bool TB> static __device__ __forceinline__ void ss(float (&x)[128], unsigned long long a, unsigned long long b, int adds)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32." RAWFLASH_HALF "." RAWFLASH_HALF " {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                     "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
                     "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
                     "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                     "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, "
                     "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, "
                     "%120, %121, %122, %123, %124, %125, %126, %127 "
                     "}, %128, %129, p, 1, 1, %131, %132;\n}"
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
                       "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]),
                       "+f"(x[16]), "+f"(x[17]), "+f"(x[18]), "+f"(x[19]), "+f"(x[20]), "+f"(x[21]), "+f"(x[22]), "+f"(x[23]),
                       "+f"(x[24]), "+f"(x[25]), "+f"(x[26]), "+f"(x[27]), "+f"(x[28]), "+f"(x[29]), "+f"(x[30]), "+f"(x[31]),
                       "+f"(x[32]), "+f"(x[33]), "+f"(x[34]), "+f"(x[35]), "+f"(x[36]), "+f"(x[37]), "+f"(x[38]), "+f"(x[39]),
                       "+f"(x[40]), "+f"(x[41]), "+f"(x[42]), "+f"(x[43]), "+f"(x[44]), "+f"(x[45]), "+f"(x[46]), "+f"(x[47]),
                       "+f"(x[48]), "+f"(x[49]), "+f"(x[50]), "+f"(x[51]), "+f"(x[52]), "+f"(x[53]), "+f"(x[54]), "+f"(x[55]),
                       "+f"(x[56]), "+f"(x[57]), "+f"(x[58]), "+f"(x[59]), "+f"(x[60]), "+f"(x[61]), "+f"(x[62]), "+f"(x[63]),
                       "+f"(x[64]), "+f"(x[65]), "+f"(x[66]), "+f"(x[67]), "+f"(x[68]), "+f"(x[69]), "+f"(x[70]), "+f"(x[71]),
                       "+f"(x[72]), "+f"(x[73]), "+f"(x[74]), "+f"(x[75]), "+f"(x[76]), "+f"(x[77]), "+f"(x[78]), "+f"(x[79]),
                       "+f"(x[80]), "+f"(x[81]), "+f"(x[82]), "+f"(x[83]), "+f"(x[84]), "+f"(x[85]), "+f"(x[86]), "+f"(x[87]),
                       "+f"(x[88]), "+f"(x[89]), "+f"(x[90]), "+f"(x[91]), "+f"(x[92]), "+f"(x[93]), "+f"(x[94]), "+f"(x[95]),
                       "+f"(x[96]), "+f"(x[97]), "+f"(x[98]), "+f"(x[99]), "+f"(x[100]), "+f"(x[101]), "+f"(x[102]), "+f"(x[103]),
                       "+f"(x[104]), "+f"(x[105]), "+f"(x[106]), "+f"(x[107]), "+f"(x[108]), "+f"(x[109]), "+f"(x[110]), "+f"(x[111]),
                       "+f"(x[112]), "+f"(x[113]), "+f"(x[114]), "+f"(x[115]), "+f"(x[116]), "+f"(x[117]), "+f"(x[118]), "+f"(x[119]),
                       "+f"(x[120]), "+f"(x[121]), "+f"(x[122]), "+f"(x[123]), "+f"(x[124]), "+f"(x[125]), "+f"(x[126]), "+f"(x[127])
                     : "l"(a), "l"(b), "r"(adds), "n"((int)TA), "n"((int)TB));
    }
    template <bool TB> static __device__ __forceinline__ void rs(float (&x)[128], const unsigned (&a)[4], unsigned long long b, int adds)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32." RAWFLASH_HALF "." RAWFLASH_HALF " {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                     "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
                     "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
                     "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                     "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, "
                     "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, "
                     "%120, %121, %122, %123, %124, %125, %126, %127 "
                     "}, {%128, %129, %130, %131}, %132, p, 1, 1, %134;\n}"
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
                       "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]),
                       "+f"(x[16]), "+f"(x[17]), "+f"(x[18]), "+f"(x[19]), "+f"(x[20]), "+f"(x[21]), "+f"(x[22]), "+f"(x[23]),
                       "+f"(x[24]), "+f"(x[25]), "+f"(x[26]), "+f"(x[27]), "+f"(x[28]), "+f"(x[29]), "+f"(x[30]), "+f"(x[31]),
                       "+f"(x[32]), "+f"(x[33]), "+f"(x[34]), "+f"(x[35]), "+f"(x[36]), "+f"(x[37]), "+f"(x[38]), "+f"(x[39]),
                       "+f"(x[40]), "+f"(x[41]), "+f"(x[42]), "+f"(x[43]), "+f"(x[44]), "+f"(x[45]), "+f"(x[46]), "+f"(x[47]),
                       "+f"(x[48]), "+f"(x[49]), "+f"(x[50]), "+f"(x[51]), "+f"(x[52]), "+f"(x[53]), "+f"(x[54]), "+f"(x[55]),
                       "+f"(x[56]), "+f"(x[57]), "+f"(x[58]), "+f"(x[59]), "+f"(x[60]), "+f"(x[61]), "+f"(x[62]), "+f"(x[63]),
                       "+f"(x[64]), "+f"(x[65]), "+f"(x[66]), "+f"(x[67]), "+f"(x[68]), "+f"(x[69]), "+f"(x[70]), "+f"(x[71]),
                       "+f"(x[72]), "+f"(x[73]), "+f"(x[74]), "+f"(x[75]), "+f"(x[76]), "+f"(x[77]), "+f"(x[78]), "+f"(x[79]),
                       "+f"(x[80]), "+f"(x[81]), "+f"(x[82]), "+f"(x[83]), "+f"(x[84]), "+f"(x[85]), "+f"(x[86]), "+f"(x[87]),
                       "+f"(x[88]), "+f"(x[89]), "+f"(x[90]), "+f"(x[91]), "+f"(x[92]), "+f"(x[93]), "+f"(x[94]), "+f"(x[95]),
                       "+f"(x[96]), "+f"(x[97]), "+f"(x[98]), "+f"(x[99]), "+f"(x[100]), "+f"(x[101]), "+f"(x[102]), "+f"(x[103]),
                       "+f"(x[104]), "+f"(x[105]), "+f"(x[106]), "+f"(x[107]), "+f"(x[108]), "+f"(x[109]), "+f"(x[110]), "+f"(x[111]),
                       "+f"(x[112]), "+f"(x[113]), "+f"(x[114]), "+f"(x[115]), "+f"(x[116]), "+f"(x[117]), "+f"(x[118]), "+f"(x[119]),
                       "+f"(x[120]), "+f"(x[121]), "+f"(x[122]), "+f"(x[123]), "+f"(x[124]), "+f"(x[125]), "+f"(x[126]), "+f"(x[127])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "n"((int)TB));
    }
};

// Four 8 x 8 matrices of 16 bits from registers to shared memory: lane n gives the address of row n % 8 of matrix n / 8, and holds of each
// matrix row n / 4, columns 2 (n % 4) and the next; TRANSPOSED: column n / 4, rows 2 (n % 4) and the next.
template <bool TRANSPOSED> __device__ __forceinline__ void store_matrices(void* row, unsigned x0, unsigned x1, unsigned x2, unsigned x3)
{
    if constexpr (TRANSPOSED)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(shared_address(row)), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(shared_address(row)), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}

#endif
