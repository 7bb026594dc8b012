// The twins of cuda/sm90/hopper.cuh, for emulator.hpp: copies by tensor maps, barriers that count bytes, products of a warpgroup. What is behind
// them is in emulator_hopper.cpp.

#pragma GCC visibility push(hidden)

struct TensorMap;
typedef unsigned long long Barrier;

namespace emulated {
constexpr unsigned ATOM = 1024;

extern bool bfloat16;       // or float16: what products multiply
extern unsigned bounds[2];  // of __launch_bounds__: threads, blocks of a multiprocessor
extern unsigned blocks_of_cluster;  // of __cluster_dims__

int run_mapped_blocks(unsigned blocks, unsigned count, size_t shared, bool backwards);
void change_registers(int count, bool more);
void await_stores_read(size_t pending);
void await_stores(size_t pending);
void await_products(unsigned pending);
void multiply(float* sum, int n, const unsigned* registers, unsigned long long a, bool a_transposed, unsigned long long b, bool b_transposed, bool adds, int minus_from = -1);
void store_matrices(void* row, const unsigned (&x)[4], bool transposed);
}

unsigned address_of_shared(const void* x);

inline Barrier* by_address(Barrier* first) { return first; }

void init_barrier(Barrier* barrier, int arrivals);
void fence_barriers();
void arrive(Barrier* barrier);
void arrive_expecting(Barrier* barrier, int bytes);
bool ended(Barrier* barrier, int parity);
void await(Barrier* barrier, int parity);
constexpr int ARRIVALS = 1;
void arrive_as_warp(Barrier* barrier, int lane);

void meet(int id, int count);
inline void meet_from_apart(int id, int count) { meet(id, count); }
void announce(int id, int count);

template <int COUNT> inline void take_registers() { emulated::change_registers(COUNT, true); }
template <int COUNT> inline void give_registers() { emulated::change_registers(COUNT, false); }

inline void ask_for_box(const TensorMap&, int, int, int, int) {}
void prefetch_map(const TensorMap& map);
void copy_box(void* to, const TensorMap& map, Barrier* barrier, int column, int row, int head, int batch);
void copy_bulk(void* to, const void* from, Barrier* barrier, int bytes);
void store_box(const TensorMap& map, const void* from, int column, int row, int head, int batch);
void store_bulk(float* to, const void* from, int bytes);
void add_bulk(float* to, const void* from, int bytes);
void commit_stores();
template <int PENDING> inline void await_stores_read() { emulated::await_stores_read(PENDING); }
template <int PENDING> inline void await_stores() { emulated::await_stores(PENDING); }

unsigned rank_in_cluster();
inline void cluster_meets() { emulated::meet_cluster(); }
void arrive_there(Barrier* barrier, unsigned rank);
void copy_there(void* to, const void* from, Barrier* barrier, int bytes, unsigned rank);

bool turn_has_come(const unsigned* turns, unsigned count);
void await_turn(const unsigned* turns, unsigned count);
void pass_turn(unsigned* turns);

inline void fence_device() {}
void fence_shared();

inline unsigned long long factor(const void* first, int slab_bytes = 16)
{
    return 1ull << 62 | (uint64_t)(emulated::ATOM >> 4) << 32 | (uint64_t)(slab_bytes >> 4) << 16 | (address_of_shared(first) >> 4 & 0x3FFF);
}
inline unsigned long long moved(unsigned long long factor, int bytes) { return factor + (bytes >> 4); }
struct LowerHalf {
    unsigned bits;
    LowerHalf operator+(int steps) const { return {bits + steps}; }
    operator unsigned long long() const { return (uint64_t)(1 << 30 | emulated::ATOM >> 4) << 32 | bits; }
};
template <bool CLUSTER = false> inline LowerHalf lower_half(const void* first, int slab_bytes = 16) { return {(unsigned)factor(first, slab_bytes)}; }
inline LowerHalf moved(LowerHalf factor, int bytes) { return {factor.bits + (bytes >> 4)}; }

void fence_products();
void commit_products();
template <int PENDING> inline void await_products() { emulated::await_products(PENDING); }
template <int COUNT> inline void pin(float (&)[COUNT]) {}

template <int N> constexpr bool IS_WIDTH = N == 16 || N == 32 || N == 64 || N == 80 || N == 96 || N == 128 || N == 160 || N == 192 || N == 256;

template <int N, bool TRANSPOSED_A = false, bool TRANSPOSED_B = false>
inline void multiply_ss(float (&sum)[N / 2], unsigned long long a, unsigned long long b, bool adds)
{
    static_assert(IS_WIDTH<N>, "hopper.cuh has no products of this width");
    emulated::multiply(sum, N, nullptr, a, TRANSPOSED_A, b, TRANSPOSED_B, adds);
}

template <int N, bool TRANSPOSED_B = false>
inline void multiply_rs(float (&sum)[N / 2], const unsigned (&a)[4], unsigned long long b, bool adds)
{
    static_assert(IS_WIDTH<N>, "hopper.cuh has no products of this width");
    emulated::multiply(sum, N, a, 0, false, b, TRANSPOSED_B, adds);
}

inline void begin_with_minus(float (&sum)[32], const unsigned (&minus)[4], unsigned long long slab, int first)
{
    emulated::multiply(sum, 64, minus, 0, false, slab, true, false, first);
}

template <bool TRANSPOSED> inline void store_matrices(void* row, unsigned x0, unsigned x1, unsigned x2, unsigned x3)
{
    const unsigned x[4] = {x0, x1, x2, x3};
    emulated::store_matrices(row, x, TRANSPOSED);
}

#pragma GCC visibility pop
