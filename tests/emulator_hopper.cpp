// Tensor maps, barriers that count bytes and products of warpgroups, for emulator_hopper.hpp; behind emulator.cpp.
//
// Whatever the hardware does on its own is done here at the latest moment that it may be: a copy when no thread can go on and one waits at
// its barrier, products when they are waited for, stores of device memory when somebody waits for them or the block ends. From their begin to their end
// the memory and the sums that they write are NaN, and what they read must stay as it was. A copy in shared memory, `visible`, is what
// products and stores see of it: ordinary stores come there by fence_shared() and a barrier. All that breaks a rule ends the launch with a
// message. Copies land in the order of their begin, in blocks that run backwards in the opposite one. A block of a cluster ends as early as it can:
// then nothing may come to it, nor be on its way from it.
//
// Not seen: fence_shared() forgotten by one thread where others have it, if it wrote otherwise than by store_matrices; registers that are
// read too early (they are NaN).

#include <deque>
#include <memory>

namespace emulated {

constexpr unsigned GROUP = 128, FIRST_ADDRESS = 1024, SLAB_BYTES = 128, NAMED = 16, MOST_SUMS = 8, MOST_FACTORS = 32;
constexpr unsigned POOL = 65536, MOST_REGISTERS = 255, MOST_IDLE = 1000;
constexpr unsigned char POISON = 0xFF;
constexpr unsigned POISONED_SUM = 0x7FC0DEADu;  // a NaN
constexpr uint64_t BARRIER_MARK = 0xBA221E5Eull << 32, MAP_MARK = 0x3A9D15C0ull;

bool bfloat16;
unsigned bounds[2], blocks_of_cluster = 1;
static size_t shared_bytes;
static bool last_first;
static unsigned char visible_of[MOST_BLOCKS][MOST_SHARED], *visible = visible_of[0], *visible_there = visible_of[1];
static bool fence_somewhere, fence_there;

#define STOP(...) do { emulated::complain(__VA_ARGS__); emulated::stop(); } while (0)

// ---- what a map says (emulator.py packs it) ---------------------------------------------------------------------------------

struct Map {
    char* data;
    uint64_t dtype;
    int64_t extent[4], stride[4];  // in bytes, of axis 1, 2, 3: stride[1], ...; stride[0] is that of an element
    int64_t rows;
};

static Map decoded(const TensorMap& map)
{
    const uint64_t* word = (const uint64_t*)&map;
    if ((size_t)word % 64)
        STOP("a tensor map is not at a multiple of 64 bytes");
    if (word[10] != MAP_MARK)
        STOP("this is no tensor map");
    Map m{(char*)word[0], word[1], {}, {2, (int64_t)word[6], (int64_t)word[7], (int64_t)word[8]}, (int64_t)word[9]};
    for (unsigned n = 0; n < 4; n++)
        m.extent[n] = word[2 + n];
    return m;
}

// ---- threads ----------------------------------------------------------------------------------------------------------------

struct Place { int c[4]; };  // of a box: column, row, head, batch

struct Store {  // or an addition
    bool is_box;
    Map map;
    Place place;
    float* to;
    unsigned from, bytes;
    bool adds;
    std::vector<unsigned char> seen;  // what it is to read
};
struct StoreGroup { std::vector<Store> stores; bool read; };

struct Sum {
    float* where;
    int count, under_way;
    bool is_known;  // seen is what it was at the last fence_products, or what products have left
    float value[128], seen[128];
};
struct Factor { const unsigned* where; bool is_known; unsigned seen[4]; };

enum Reason { NOTHING, PHASE, NAMED_BARRIER, REGISTERS, PRODUCTS, STORES };
struct Thread {
    Reason reason;
    unsigned id;      // of a barrier
    long wanted;      // parity, registers, groups
    bool has_fenced;  // its ordinary stores, since the last barrier
    std::vector<Store> stores;
    std::deque<StoreGroup> store_groups;
    int registers;
    bool fence_of_products;
    unsigned issued, committed, groups, settled;
    unsigned next_sum, next_factor;
    Sum sums[MOST_SUMS];
    Factor factors[MOST_FACTORS];
};
static Thread all_of[MOST_BLOCKS][MOST_THREADS], *all = all_of[0], *all_there = all_of[1];
inline Thread& me() { return all[current]; }

static unsigned idle;

static void wake(unsigned n) { fibers[n].state = READY, all[n].reason = NOTHING, idle = 0; }

static void wait_for(Reason reason, unsigned id, long wanted)
{
    me().reason = reason, me().id = id, me().wanted = wanted;
    wait(WAITING);
}

// ---- shared memory --------------------------------------------------------------------------------------------------------------

// Where store_matrices of a warp has written since all its lanes were at fence_shared, and the lanes that were there since.
static std::vector<unsigned> unfenced[MOST_THREADS / LANES], unfenced_there[MOST_THREADS / LANES];
static unsigned fenced_lanes[MOST_THREADS / LANES], fenced_there[MOST_THREADS / LANES];

// All stores to shared memory until now are visible to what the hardware does on its own.
static void publish()
{
    if (!fence_somewhere)
        return;
    memcpy(visible, on_chip, shared_bytes);
    for (unsigned warp = 0; warp < threads / LANES; warp++) {
        if (fenced_lanes[warp] == ~0u)
            unfenced[warp].clear();
        for (const unsigned at : unfenced[warp])
            for (unsigned n = 0; n < 16; n++)
                visible[at + n] = ~on_chip[at + n];
    }
    for (unsigned n = 0; n < threads; n++)
        all[n].has_fenced = false;
    fence_somewhere = false;
}

static void publish_mine()
{
    if (me().has_fenced)
        publish();
}

// So are, to copies to the other block that this thread begins, those before a barrier that it has passed, whoever made them, if it was at
// fence_shared() since.
static void publish_to_me(unsigned at, unsigned bytes)
{
    if (!me().has_fenced)
        return;
    memcpy(visible + at, on_chip + at, bytes);
    for (std::vector<unsigned>& x : unfenced)
        x.erase(std::remove_if(x.begin(), x.end(), [=](unsigned row) { return at <= row && row < at + bytes; }), x.end());
}

static unsigned offset_of(const void* x, unsigned bytes, const char* what)
{
    const size_t at = (const unsigned char*)x - on_chip;
    if (at >= shared_bytes || at + bytes > shared_bytes)
        STOP("%s is not in shared memory (byte %zd of %zu, %u bytes)", what, (ptrdiff_t)at, shared_bytes, bytes);
    return at;
}

// 128-byte swizzle: bits 4 to 6 of an address in shared memory are exchanged by bits 7 to 9.
inline unsigned swizzled(unsigned at) { return at ^ ((at >> 7 & 7) << 4); }
static_assert(FIRST_ADDRESS % ATOM == 0, "so offsets may stand for addresses");

static void check_visible(unsigned at, unsigned bytes, const char* what)
{
    if (memcmp(on_chip + at, visible + at, bytes))
        STOP("%s has ordinary stores without fence_shared() and a barrier since (from byte %u of shared memory on)", what, at);
}

// ---- barriers in shared memory ----------------------------------------------------------------------------------------------------

struct Phases {
    unsigned offset, owner;
    bool fenced;
    int count, missing, under_way;  // arrivals; copies
    long phase, bytes;              // expected, and not landed
};
static std::vector<Phases> barriers, barriers_there;

static Phases& phases_of(const Barrier* barrier)
{
    const unsigned at = offset_of(barrier, sizeof(Barrier), "a barrier");
    const uint64_t word = *barrier;
    if (at % 8)
        STOP("the barrier at byte %u is not at a multiple of 8", at);
    if (word >> 32 != BARRIER_MARK >> 32 || (unsigned)word >= barriers.size() || barriers[(unsigned)word].offset != at)
        STOP("the barrier at byte %u is not initialised, or was written over", at);
    Phases& x = barriers[(unsigned)word];
    if (!x.fenced)
        STOP("the barrier at byte %u is used before fence_barriers() by the thread that initialised it", at);
    return x;
}

static bool has_ended(const Phases& x, int parity) { return (x.phase & 1) != parity; }

static void end_phase_if_it_can(Phases& x)
{
    if (x.missing || x.bytes)
        return;
    if (x.under_way) {
        complain("a phase of the barrier at byte %u ends while %d copies are under way that it did not expect", x.offset, x.under_way);
        return;
    }
    x.phase++, x.missing = x.count;
    publish();
    for (unsigned n = 0; n < threads; n++)
        if (all[n].reason == PHASE && all[n].id == &x - barriers.data() && has_ended(x, all[n].wanted))
            wake(n);
}

static void count_arrival(Phases& x)
{
    if (x.missing == 0)
        STOP("more arrivals than %d in a phase of the barrier at byte %u", x.count, x.offset);
    x.missing--;
    end_phase_if_it_can(x);
    if (message[0])
        stop();
}

// ---- copies into shared memory ------------------------------------------------------------------------------------------------------

struct Transfer {
    bool is_box;
    Map map;
    Place place;
    const void* from;
    unsigned to, bytes, barrier;
    bool is_from_there = false;  // from shared memory of the other block of the cluster, at this byte, where it is to read this
    unsigned at = 0;
    std::vector<unsigned char> seen = {};
};
static std::deque<Transfer> transfers, transfers_there;

static bool inside(const Map& m, const Place& p, int column, int row)
{
    return 0 <= column && column < m.extent[0] && 0 <= row && row < m.extent[1] && 0 <= p.c[2] && p.c[2] < m.extent[2] && 0 <= p.c[3] &&
           p.c[3] < m.extent[3];
}

// Each number of a box that exists: its place in device memory and in shared memory.
template <class Work> static void over_box(const Map& m, const Place& p, unsigned at, Work work)
{
    for (int r = 0; r < m.rows; r++)
        for (int c = 0; c < 64; c++)
            if (inside(m, p, p.c[0] + c, p.c[1] + r))
                work(m.data + 2 * (int64_t)(p.c[0] + c) + m.stride[1] * (p.c[1] + r) + m.stride[2] * p.c[2] + m.stride[3] * p.c[3],
                     swizzled(at + r * SLAB_BYTES + 2 * c));
}

static void begin(Transfer x)
{
    for (const Transfer& other : transfers)
        if (x.to < other.to + other.bytes && other.to < x.to + x.bytes)
            STOP("a copy to byte %u of shared memory begins while another into its place is under way", x.to);
    check_visible(x.to, x.bytes, "what a copy writes over");
    memset(on_chip + x.to, POISON, x.bytes);
    memset(visible + x.to, POISON, x.bytes);
    barriers[x.barrier].under_way++;
    transfers.push_back(std::move(x));
}

// A copy whose barrier somebody waits at; false: there is none.
static bool land()
{
    static std::vector<bool> awaited;
    awaited.assign(barriers.size(), false);
    for (unsigned n = 0; n < threads; n++)
        if (all[n].reason == PHASE)
            awaited[all[n].id] = true;
    size_t found = 0;
    const size_t count = transfers.size();
    while (found < count && !awaited[transfers[last_first ? count - 1 - found : found].barrier])
        found++;
    if (found == count)
        return false;
    found = last_first ? count - 1 - found : found;
    const Transfer x = transfers[found];
    transfers.erase(transfers.begin() + found);
    for (unsigned n = 0; n < x.bytes; n++)
        if (on_chip[x.to + n] != POISON) {
            complain("byte %u of shared memory was written while a copy to it was under way", x.to + n);
            return true;
        }
    if (x.is_box) {
        memset(on_chip + x.to, 0, x.bytes);
        over_box(x.map, x.place, x.to, [](const char* from, unsigned to) { memcpy(on_chip + to, from, 2); });
    } else if (x.is_from_there) {
        if (memcmp(x.seen.data(), chip_there + x.at, x.bytes)) {
            complain("shared memory from byte %u on was written before its copy to this block of the cluster had read it", x.at);
            return true;
        }
        memcpy(on_chip + x.to, x.seen.data(), x.bytes);
    } else
        memcpy(on_chip + x.to, x.from, x.bytes);
    memcpy(visible + x.to, on_chip + x.to, x.bytes);
    Phases& barrier = barriers[x.barrier];
    barrier.under_way--;
    barrier.bytes -= x.bytes;
    end_phase_if_it_can(barrier);
    return true;
}

// ---- stores of shared memory to device memory -------------------------------------------------------------------------------------------

static std::vector<Store> late, late_there;  // of threads that have ended

static void begin(Store x)
{
    publish_mine();
    check_visible(x.from, x.bytes, "what is stored");
    x.seen.assign(on_chip + x.from, on_chip + x.from + x.bytes);
    me().stores.push_back(std::move(x));
}

static void read(StoreGroup& group)
{
    if (!group.read)
        for (const Store& x : group.stores)
            if (memcmp(x.seen.data(), on_chip + x.from, x.bytes))
                STOP("shared memory from byte %u on was written before the store of it had read it", x.from);
    group.read = true;
}

// Others run before: they may write too early what is still to be read.
static void let_others_run() { wait_for(STORES, 0, 0); }

static void finish(const Store& x)
{
    if (x.is_box)
        over_box(x.map, x.place, x.from, [&x](char* to, unsigned from) { memcpy(to, x.seen.data() + (from - x.from), 2); });
    else
        for (unsigned n = 0; n < x.bytes / 4; n++)
            x.to[n] = ((const float*)x.seen.data())[n] + (x.adds ? x.to[n] : 0.0f);
}

// ---- products -------------------------------------------------------------------------------------------------------------------------

struct Product {
    int n;
    bool a_transposed, b_transposed, a_in_registers, adds;
    int minus_from;  // -1, or the first of three rows of B that it subtracts: of the others only what is not finite matters
    unsigned long long a, b;
    unsigned issued, settled;
    unsigned short A[64 * 16], B[16 * 256];
    unsigned char sum[GROUP];
    const unsigned* where[GROUP];
    unsigned factor[GROUP][4];
};
struct Warpgroup {
    std::deque<std::unique_ptr<Product>> products;  // that some thread has not settled
    unsigned first, done, groups;                   // numbers: of the first of these, of the first not yet computed; groups that all have committed
    std::vector<unsigned> ends, commits;            // by group: number of the product behind its last; threads that committed it
};
static Warpgroup warpgroups_of[MOST_BLOCKS][MOST_THREADS / GROUP], *warpgroups = warpgroups_of[0], *warpgroups_there = warpgroups_of[1];
inline Warpgroup& my_group() { return warpgroups[current / GROUP]; }

// comes: a copy to there is under way, and it does not matter which of both a product sees.
static const unsigned char* piece_of_factor(unsigned address, const char* what, bool comes = false)
{
    const unsigned at = swizzled(address) - FIRST_ADDRESS;
    if (address < FIRST_ADDRESS || at + 16 > shared_bytes)
        STOP("factor %s is outside of shared memory: address %u, %zu bytes from %u", what, address, shared_bytes, FIRST_ADDRESS);
    if (!comes)
        check_visible(at, 16, what[0] == 'A' ? "factor A of a product" : "factor B of a product");
    return on_chip + at;
}

static bool is_coming(unsigned at)
{
    for (const Transfer& x : transfers)
        if (x.to <= at && at < x.to + x.bytes)
            return true;
    return false;
}

static bool is_finite(unsigned short x) { return bfloat16_to_float(x) - bfloat16_to_float(x) == 0.0f; }

// The 16-bit numbers of a factor: to[r * along_r + k * along_k] is that of row r (of A, column of B) and depth k.
static void read_factor(unsigned long long x, bool transposed, int rows, const char* what, unsigned short* to, int along_r, int along_k,
                        int minus_from = -1)
{
    const unsigned start = (x & 0x3FFF) << 4, leading = (x >> 16 & 0x3FFF) << 4, stride = (x >> 32 & 0x3FFF) << 4;
    if (x >> 62 != 1 || x >> 49 & 7 || x & ~(0xC000000000000000ull | 0x3FFFull << 32 | 0x3FFFull << 16 | 0x3FFFull))
        STOP("the descriptor of factor %s, %016llx, is not one of a slab", what, x);
    if (start >> 7 & 7)
        STOP("factor %s begins in row %u of eight of its slab (address %u): a slab is misaligned, or a step is wrong", what, start >> 7 & 7, start);
    if (start % 32)
        STOP("factor %s begins at address %u, no multiple of 32 bytes", what, start);
    if (stride != ATOM)
        STOP("rows of eight of factor %s are %u bytes apart", what, stride);
    unsigned short eight[8];
    if (!transposed) {
        for (int r = 0; r < rows; r++)
            for (int piece = 0; piece < 2; piece++) {
                memcpy(eight, piece_of_factor(start + r / 8 * stride + r % 8 * SLAB_BYTES + 16 * piece, what), 16);
                for (int n = 0; n < 8; n++)
                    to[r * along_r + (8 * piece + n) * along_k] = eight[n];
            }
        return;
    }
    if (rows > 64 && leading % ATOM)
        STOP("slabs of factor %s are %u bytes apart", what, leading);
    if (start % SLAB_BYTES + 2 * (rows < 64 ? rows : 64) > SLAB_BYTES)
        STOP("factor %s begins %u bytes into a row of its slab, too far for %d columns", what, start % SLAB_BYTES, rows);
    for (int k = 0; k < 16; k++)
        for (int r = 0; r < rows; r += 8) {
            const bool matters = minus_from < 0 || (k >= minus_from && k < minus_from + 3);
            const unsigned address = start + r / 64 * leading + k / 8 * stride + k % 8 * SLAB_BYTES + r % 64 * 2;
            const bool comes = !matters && is_coming(swizzled(address) - FIRST_ADDRESS);
            memcpy(eight, piece_of_factor(address, what, comes), 16);
            if (comes)
                memset(eight, 0, 16);
            for (int n = 0; n < 8; n++)
                to[(r + n) * along_r + k * along_k] = matters || !is_finite(eight[n]) ? eight[n] : 0;
        }
}

static void read_factors(const Product& x, unsigned short* A, unsigned short* B)
{
    if (!x.a_in_registers)
        read_factor(x.a, x.a_transposed, 64, "A", A, 16, 1);
    read_factor(x.b, x.b_transposed, x.n, "B", B, 1, x.n, x.minus_from);
}

inline float wide(unsigned x, const Product& product) { return bfloat16 || product.minus_from >= 0 ? bfloat16_to_float(x) : float16_to_float(x); }

static void sum_products(const float* A, const float* B, int n, double* sum)
{
    for (int k = 0; k < 16; k++) {
        const double a = A[k];
        for (int c = 0; c < n; c++)
            sum[c] += a * B[k * n + c];
    }
}

static void compute(Product& x, Thread* thread)
{
    static unsigned short A16[64 * 16], B16[16 * 256];
    read_factors(x, A16, B16);
    if ((!x.a_in_registers && memcmp(A16, x.A, sizeof A16)) || memcmp(B16, x.B, 16 * x.n * 2))
        STOP("a factor in shared memory changed while its product was under way");
    static float A[64 * 16], B[16 * 256];
    for (int n = 0; n < 16 * x.n; n++)
        B[n] = wide(B16[n], x);
    if (x.a_in_registers)
        for (unsigned n = 0; n < GROUP; n++)
            for (unsigned r = 0; r < 4; r++)
                for (unsigned half = 0; half < 2; half++)
                    A[(n / 32 * 16 + n % 32 / 4 + 8 * (r % 2)) * 16 + 2 * (n % 4) + 8 * (r / 2) + half] = wide(x.factor[n][r] >> 16 * half & 0xFFFF, x);
    else
        for (int n = 0; n < 64 * 16; n++)
            A[n] = wide(A16[n], x);
    if (x.minus_from >= 0)
        for (int n = 0; n < 64 * 16; n++)
            if (A[n] != (n % 16 >= x.minus_from && n % 16 < x.minus_from + 3 ? -1.0f : 0.0f))
                STOP("row %d of the factor that subtracts has %g for row %d", n / 16, A[n], n % 16);
    for (int r = 0; r < 64; r++) {
        double sum[256] = {};
        sum_products(A + 16 * r, B, x.n, sum);
        const int first = r / 16 * 32 + r % 8 * 4, upper = r % 16 / 8;
        for (int t = 0; t < 4; t++) {
            float* value = thread[first + t].sums[x.sum[first + t]].value;
            for (int n = 0; n < x.n / 4; n++) {
                const int c = n / 2 * 8 + 2 * t + n % 2, at = n / 2 * 4 + 2 * upper + n % 2;
                value[at] = (float)((x.adds ? (double)value[at] : 0.0) + sum[c]);
            }
        }
    }
}

static unsigned sum_of(float* where, int count, bool adds)
{
    Thread& my = me();
    unsigned found = MOST_SUMS;
    for (unsigned n = 0; n < MOST_SUMS; n++) {
        Sum& x = my.sums[n];
        if (x.count == 0)
            continue;
        if (x.where == where && x.count == count)
            found = n;
        else if (x.under_way && x.where < where + count && where < x.where + x.count)
            STOP("sums overlap others of a product under way");
    }
    if (found == MOST_SUMS) {
        for (unsigned tries = 0; my.sums[my.next_sum % MOST_SUMS].under_way; tries++, my.next_sum++)
            if (tries == MOST_SUMS)
                STOP("products into more than %u arrays of sums are under way", MOST_SUMS);
        found = my.next_sum++ % MOST_SUMS;
        my.sums[found].where = where, my.sums[found].count = count;
        my.sums[found].under_way = 0, my.sums[found].is_known = false;
    }
    Sum& x = my.sums[found];
    if (x.under_way == 0) {
        if (x.is_known && memcmp(x.seen, where, 4 * count))
            STOP("sums were written after fence_products(), and a product into them begins");
        memcpy(x.value, where, 4 * count);
        for (int n = 0; n < count; n++)
            memcpy(where + n, &POISONED_SUM, 4);
    }
    x.under_way++;
    return found;
}

static void note_factor(const unsigned* a)
{
    Thread& my = me();
    for (Factor& x : my.factors)
        if (x.where == a) {
            if (x.is_known && memcmp(x.seen, a, sizeof x.seen))
                STOP("a factor in registers was written after fence_products(), and a product of it begins");
            return;
        }
    my.factors[my.next_factor++ % MOST_FACTORS] = {a, false, {}};
}

static void check_untouched(const Sum& x)
{
    for (int n = 0; n < x.count; n++)
        if (memcmp(x.where + n, &POISONED_SUM, 4))
            STOP("sum %d of %d was written while products into it were under way", n, x.count);
}

void multiply(float* sum, int n, const unsigned* registers, unsigned long long a, bool a_transposed, unsigned long long b, bool b_transposed, bool adds,
              int minus_from)
{
    Thread& my = me();
    Warpgroup& group = my_group();
    if (current / GROUP * GROUP + GROUP > threads)
        STOP("a product in a warpgroup that is not whole");
    if (!my.fence_of_products)
        STOP("a product before the first fence_products()");
    const unsigned number = my.issued++;
    if (number == group.first + group.products.size()) {
        publish_mine();
        auto made = std::make_unique<Product>();
        made->n = n, made->a = a, made->b = b, made->a_transposed = a_transposed, made->b_transposed = b_transposed;
        made->a_in_registers = registers != nullptr, made->adds = adds, made->minus_from = minus_from, made->issued = made->settled = 0;
        read_factors(*made, made->A, made->B);
        group.products.push_back(std::move(made));
    }
    Product& x = *group.products[number - group.first];
    if (x.n != n || x.a != a || x.b != b || x.a_transposed != a_transposed || x.b_transposed != b_transposed || x.adds != adds || x.minus_from != minus_from ||
        x.a_in_registers != (registers != nullptr))
        STOP("threads of a warpgroup disagree on their product number %u: N %d and %d, factor A %016llx and %016llx, B %016llx and %016llx, adds %d and %d",
             number, x.n, n, x.a, a, x.b, b, x.adds, adds);
    const unsigned lane = current % GROUP;
    x.issued++;
    x.sum[lane] = sum_of(sum, n / 2, adds);
    x.where[lane] = registers;
    if (registers) {
        note_factor(registers);
        memcpy(x.factor[lane], registers, sizeof x.factor[lane]);
    }
}

static void fence_of_products()
{
    Thread& my = me();
    my.fence_of_products = true;
    for (Sum& x : my.sums)
        if (x.count && x.under_way == 0)
            memcpy(x.seen, x.where, 4 * x.count), x.is_known = true;
    for (Factor& x : my.factors)
        if (x.where)
            memcpy(x.seen, x.where, sizeof x.seen), x.is_known = true;
}

static void commit_of_products()
{
    Thread& my = me();
    Warpgroup& group = my_group();
    const unsigned number = my.groups++;
    my.committed = my.issued;
    if (number == group.ends.size())
        group.ends.push_back(my.issued), group.commits.push_back(0);
    if (group.ends[number] != my.issued)
        STOP("threads of a warpgroup disagree on their group %u of products: %u and %u products until its end", number, group.ends[number], my.issued);
    if (++group.commits[number] < GROUP)
        return;
    group.groups++;
    for (unsigned n = current / GROUP * GROUP; n < current / GROUP * GROUP + GROUP; n++)
        if (all[n].reason == PRODUCTS && all[n].wanted <= group.groups)
            wake(n);
}

void await_products(unsigned pending)
{
    Thread& my = me();
    Warpgroup& group = my_group();
    if (my.issued != my.committed)
        STOP("commit_products() is missing: %u products without it at await_products()", my.issued - my.committed);
    const unsigned wanted = my.groups > pending ? my.groups - pending : 0;
    if (wanted == 0)
        return;
    if (group.groups < wanted)
        wait_for(PRODUCTS, 0, wanted);
    const unsigned end = group.ends[wanted - 1];
    for (; group.done < end; group.done++)
        compute(*group.products[group.done - group.first], all + current / GROUP * GROUP);
    for (; my.settled < end; my.settled++) {
        Product& x = *group.products[my.settled - group.first];
        const unsigned lane = current % GROUP;
        if (x.where[lane] && memcmp(x.where[lane], x.factor[lane], sizeof x.factor[lane]))
            STOP("a factor in registers changed while its product was under way");
        Sum& sum = my.sums[x.sum[lane]];
        x.settled++;
        if (--sum.under_way == 0) {
            check_untouched(sum);
            memcpy(sum.where, sum.value, 4 * sum.count);
            memcpy(sum.seen, sum.value, 4 * sum.count), sum.is_known = true;
        }
    }
    while (!group.products.empty() && group.products.front()->settled == GROUP)
        group.products.pop_front(), group.first++;
}

// ---- named barriers -------------------------------------------------------------------------------------------------------------------

struct Meeting { int count, come; bool has[MOST_THREADS]; };
static Meeting meetings_of[MOST_BLOCKS][NAMED], *meetings = meetings_of[0], *meetings_there = meetings_of[1];

static void come(int id, int count, bool waits)
{
    if (id < 1 || id >= (int)NAMED)
        STOP("there is no named barrier %d", id);
    if (count <= 0 || count % LANES || count > (int)((threads + LANES - 1) / LANES * LANES))
        STOP("named barrier %d of %d threads, in a block of %u", id, count, threads);
    Meeting& x = meetings[id];
    if (x.come && x.count != count)
        STOP("threads disagree on named barrier %d: %d and %d threads", id, x.count, count);
    if (x.has[current])
        STOP("a second arrival at named barrier %d before it has ended", id);
    x.count = count, x.has[current] = true;
    if (++x.come < count) {
        if (waits)
            wait_for(NAMED_BARRIER, id, count);
        return;
    }
    for (unsigned n = 0; n < threads; n++)
        if (x.has[n] != x.has[n / LANES * LANES])
            STOP("a part of warp %u came to named barrier %d, which takes whole warps", n / LANES, id);
    x = {};
    publish();
    for (unsigned n = 0; n < threads; n++)
        if (all[n].reason == NAMED_BARRIER && all[n].id == (unsigned)id)
            wake(n);
}

// ---- registers ----------------------------------------------------------------------------------------------------------------------------

static int spare, spare_there;  // registers

void change_registers(int count, bool more)
{
    Thread& my = me();
    if (count % 8 || count < 24 || count > 240)
        STOP("%d registers: no multiple of 8 from 24 to 240", count);
    if (bounds[1] == 0)
        STOP("registers are exchanged in a kernel whose __launch_bounds__ do not say threads and blocks: the assembler would ignore it");
    if (more ? count < my.registers : count > my.registers)
        STOP("a thread of %d registers %s %d", my.registers, more ? "takes" : "gives all but", count);
    const int change = count - my.registers;
    if (change > spare)
        wait_for(REGISTERS, 0, change);
    else
        spare -= change;
    my.registers = count;
    for (unsigned n = 0; n < threads; n++)
        if (all[n].reason == REGISTERS && all[n].wanted <= spare) {
            spare -= all[n].wanted;
            wake(n);
        }
}

// ---- a block --------------------------------------------------------------------------------------------------------------------------------

// The other block of the cluster takes the place of this one.
static void exchange()
{
    std::swap(visible, visible_there), std::swap(fence_somewhere, fence_there);
    std::swap(all, all_there);
    std::swap(unfenced, unfenced_there), std::swap(fenced_lanes, fenced_there);
    std::swap(barriers, barriers_there), std::swap(transfers, transfers_there), std::swap(late, late_there);
    std::swap(warpgroups, warpgroups_there);
    std::swap(meetings, meetings_there), std::swap(spare, spare_there);
}

static void begin_block()
{
    memset(visible, POISON, shared_bytes);
    fence_somewhere = false, idle = 0, spare = 0;
    barriers.clear(), transfers.clear(), late.clear();
    for (unsigned n = 0; n < NAMED; n++)
        meetings[n] = {};
    for (unsigned n = 0; n < MOST_THREADS / GROUP; n++)
        warpgroups[n] = {};
    for (std::vector<unsigned>& x : unfenced)
        x.clear();
    const unsigned each = POOL / ((bounds[1] ? bounds[0] * bounds[1] : threads)) / 8 * 8;
    for (unsigned n = 0; n < threads; n++) {
        Thread& x = all[n];
        x.reason = NOTHING, x.has_fenced = x.fence_of_products = false;
        x.stores.clear(), x.store_groups.clear();
        x.registers = each < MOST_REGISTERS ? each : MOST_REGISTERS;
        x.issued = x.committed = x.groups = x.settled = x.next_sum = x.next_factor = 0;
        for (Sum& sum : x.sums)
            sum.count = sum.under_way = 0;
        for (Factor& factor : x.factors)
            factor.where = nullptr;
    }
}

static void end_thread()
{
    Thread& my = me();
    if (my.settled != my.issued)
        STOP("ends with products under way");
    if (!my.stores.empty())
        STOP("ends with stores that commit_stores() has not seen");
    for (StoreGroup& group : my.store_groups) {
        if (!group.read)
            STOP("ends before its stores have read shared memory: await_stores_read() or await_stores() is missing");
        for (Store& x : group.stores) {
            if (in_turn && !x.is_box)
                STOP("ends before what it added is in device memory, and turns were passed on: await_stores<0>() is missing");
            late.push_back(std::move(x));
        }
    }
    my.store_groups.clear();
}

static void end_block()
{
    if (!transfers.empty())
        complain("the block ends while %zu copies into its shared memory are under way", transfers.size());
    for (const Transfer& x : transfers_there)
        if (x.is_from_there)
            complain("the block ends while a copy from byte %u of its shared memory to the other of its cluster is under way", x.at);
    for (const Store& x : late)
        finish(x);
    for (const Phases& x : barriers)
        if (x.bytes)
            complain("the barrier at byte %u ends %ld bytes %s", x.offset, labs(x.bytes), x.bytes > 0 ? "short of those expected" : "beyond those expected");
    for (unsigned n = 0; n < threads; n++)
        if (all[n].registers != all[n / GROUP * GROUP].registers)
            complain("threads %u and %u of a warpgroup end with %d and %d registers", n / GROUP * GROUP, n, all[n / GROUP * GROUP].registers,
                     all[n].registers);
}

static int describe(unsigned n, char* to, size_t most)
{
    const Thread& x = all[n];
    const Phases* b = x.reason == PHASE ? &barriers[x.id] : nullptr;
    switch (fibers[n].state == WAITING || fibers[n].state == POLLING ? x.reason : NOTHING) {
    case PHASE:
        return snprintf(to, most, "awaits the barrier at byte %u, parity %ld (in phase %ld, %d of %d arrivals and %ld bytes missing)", b->offset, x.wanted,
                        b->phase, b->missing, b->count, b->bytes);
    case NAMED_BARRIER:
        return snprintf(to, most, "at named barrier %u (%d of %d threads are there)", x.id, meetings[x.id].come, meetings[x.id].count);
    case REGISTERS:
        return snprintf(to, most, "takes %ld registers more (%d are spare)", x.wanted, spare);
    case PRODUCTS:
        return snprintf(to, most, "awaits group %ld of products, which others of its warpgroup have not committed", x.wanted - 1);
    default:
        return snprintf(to, most, "%s", fibers[n].state == AT_BARRIER ? "at __syncthreads" : fibers[n].state == AT_CLUSTER ? "at cluster_meets" : fibers[n].state == IN_WARP ? "in an operation of its warp" : fibers[n].state == IN_GROUP ? "waiting for the other warps of its group" :
                        fibers[n].state == ENDED ? "has ended" : "polls");
    }
}

static bool let_read()
{
    bool any = false;
    for (unsigned n = 0; n < threads; n++)
        if (all[n].reason == STORES)
            wake(n), any = true;
    return any;
}

// Of a cluster, the block that runs whenever it can: far ahead of the other, whose stores are read only when nothing else can happen.
static unsigned favoured() { return last_first ? cluster - 1 : 0; }

// By itself, or by what happens only when no thread can.
static bool can_go_on()
{
    for (;;) {
        for (unsigned n = 0; n < threads; n++)
            if (fibers[n].state == READY)
                return true;
        if (rank == favoured() && let_read())
            continue;
        if (!land() || message[0])
            return false;
        idle = 0;
        for (unsigned n = 0; n < threads; n++)
            if (fibers[n].state == POLLING)
                fibers[n].state = READY;
    }
}

static bool let_poll()
{
    bool any = false;
    for (unsigned n = 0; n < threads; n++)
        if (fibers[n].state == POLLING)
            fibers[n].state = READY, any = true;
    return any;
}

// Of each block of the cluster, until it is true of one.
static bool of_a_block(bool (*work)())
{
    for (unsigned n = 0; n < cluster; n++) {
        go_to_block(favoured() ^ n);
        if (work())
            return true;
        if (message[0])
            return false;
    }
    return false;
}

static bool stuck()
{
    if (of_a_block(can_go_on))
        return true;
    if (message[0])
        return false;
    if (cluster > 1 && of_a_block(let_read))
        return true;
    if (idle++ < MOST_IDLE && of_a_block(let_poll))
        return true;
    char text[1500], one[300], next[300];
    int at = 0;
    for (unsigned both = 0; both < cluster; both++) {
        go_to_block(both);
        if (cluster > 1)
            at += snprintf(text + at, sizeof text - at, "\nblock %u", blockIdx.x);
        for (unsigned n = 0, first = 0; n < threads && at < (both + 1 < cluster ? 550 : 1100); n++) {
            describe(n, one, sizeof one);
            if (n + 1 < threads && (describe(n + 1, next, sizeof next), !strcmp(one, next)))
                continue;
            at += first == n ? snprintf(text + at, sizeof text - at, "\nthread %u %s", n, one)
                             : snprintf(text + at, sizeof text - at, "\nthreads %u to %u %s", first, n, one);
            first = n + 1;
        }
    }
    complain("deadlock: %s", text);
    return false;
}

}  // namespace emulated

// ---- the twins ----------------------------------------------------------------------------------------------------------------------------

unsigned address_of_shared(const void* x) { return emulated::offset_of(x, 1, "an address") + emulated::FIRST_ADDRESS; }

void init_barrier(Barrier* barrier, int arrivals)
{
    using namespace emulated;
    const unsigned at = offset_of(barrier, sizeof(Barrier), "a barrier");
    if (at % 8)
        STOP("the barrier at byte %u is not at a multiple of 8", at);
    if (arrivals < 1 || arrivals >= 1 << 20)
        STOP("a barrier of %d arrivals", arrivals);
    for (const Phases& x : barriers)
        if (x.offset == at)
            STOP("the barrier at byte %u is initialised twice", at);
    *barrier = BARRIER_MARK | barriers.size();
    memcpy(visible + at, barrier, sizeof(Barrier));
    barriers.push_back({at, current, false, arrivals, arrivals, 0, 0, 0});
}

void fence_barriers()
{
    for (emulated::Phases& x : emulated::barriers)
        if (x.owner == current)
            x.fenced = true;
}

void arrive(Barrier* barrier) { emulated::count_arrival(emulated::phases_of(barrier)); }

void arrive_expecting(Barrier* barrier, int bytes)
{
    using namespace emulated;
    Phases& x = phases_of(barrier);
    if (bytes < 0 || x.bytes + bytes >= 1 << 20)
        STOP("the barrier at byte %u is to expect %ld bytes", x.offset, x.bytes + bytes);
    x.bytes += bytes;
    count_arrival(x);
}

static void check_parity(int parity)
{
    if (parity & ~1)
        STOP("a phase has parity 0 or 1, not %d", parity);
}

bool ended(Barrier* barrier, int parity)
{
    using namespace emulated;
    check_parity(parity);
    const Phases& x = phases_of(barrier);
    if (has_ended(x, parity))
        return true;
    me().reason = PHASE, me().id = &x - barriers.data(), me().wanted = parity;
    wait(POLLING);
    me().reason = NOTHING;
    return has_ended(phases_of(barrier), parity);
}

void await(Barrier* barrier, int parity)
{
    using namespace emulated;
    check_parity(parity);
    const Phases& x = phases_of(barrier);
    if (!has_ended(x, parity))
        wait_for(PHASE, &x - barriers.data(), parity);
}

void meet(int id, int count) { emulated::come(id, count, true); }
void announce(int id, int count) { emulated::come(id, count, false); }

void copy_box(void* to, const TensorMap& map, Barrier* barrier, int column, int row, int head, int batch)
{
    using namespace emulated;
    const Map m = decoded(map);
    Transfer x{true, m, {{column, row, head, batch}}, nullptr, 0, (unsigned)m.rows * SLAB_BYTES};
    x.to = offset_of(to, x.bytes, "a box");
    x.barrier = &phases_of(barrier) - barriers.data();
    if (x.to % ATOM)
        STOP("a box is copied to byte %u of shared memory, no multiple of %u", x.to, ATOM);
    publish_mine();
    begin(x);
}

void store_box(const TensorMap& map, const void* from, int column, int row, int head, int batch)
{
    using namespace emulated;
    Store x{true, decoded(map), {{column, row, head, batch}}};
    x.bytes = x.map.rows * SLAB_BYTES;
    x.from = offset_of(from, x.bytes, "a box");
    if (x.from % ATOM)
        STOP("a box is stored from byte %u of shared memory, no multiple of %u", x.from, ATOM);
    begin(std::move(x));
}

static void begin_bulk(float* to, const void* from, int bytes, bool adds)
{
    using namespace emulated;
    Store x{false};
    if (bytes <= 0 || bytes % 16 || (size_t)to % 16)
        STOP("%d bytes are stored at or added to address %p: no multiples of 16", bytes, to);
    x.to = to, x.bytes = bytes, x.adds = adds, x.from = offset_of(from, bytes, "what is stored or added");
    if (x.from % 16)
        STOP("numbers at byte %u of shared memory are stored or added: no multiple of 16", x.from);
    begin(std::move(x));
}

void add_bulk(float* to, const void* from, int bytes) { begin_bulk(to, from, bytes, true); }
void store_bulk(float* to, const void* from, int bytes) { begin_bulk(to, from, bytes, false); }

void copy_bulk(void* to, const void* from, Barrier* barrier, int bytes)
{
    using namespace emulated;
    if (bytes <= 0 || bytes % 16 || (size_t)from % 16)
        STOP("%d bytes are copied from address %p: no multiples of 16", bytes, from);
    Transfer x{false, {}, {}, from, offset_of(to, bytes, "a copy"), (unsigned)bytes};
    x.barrier = &phases_of(barrier) - barriers.data();
    if (x.to % 16)
        STOP("a copy to byte %u of shared memory, no multiple of 16", x.to);
    publish_mine();
    begin(x);
}

unsigned rank_in_cluster() { return rank; }

// Work of this thread in a block of its cluster.
template <class Work> static void in_block(unsigned number, const char* what, Work work)
{
    using namespace emulated;
    if (number >= cluster)
        STOP("%s block %u of a cluster of %u", what, number, cluster);
    const bool is_other = number != rank;
    if (is_other)
        exchange_blocks(), has_visited = true;
    if (block.ended == threads)
        STOP("%s the other block of its cluster, which has ended", what);
    work();
    if (is_other)
        exchange_blocks();
}

void arrive_there(Barrier* barrier, unsigned number)
{
    in_block(number, "arrives in", [=]() { arrive(barrier); });
}

void copy_there(void* to, const void* from, Barrier* barrier, int bytes, unsigned number)
{
    using namespace emulated;
    if (number == rank)
        STOP("copies to its own shared memory");
    if (bytes <= 0 || bytes % 16)
        STOP("%d bytes are copied to the other block of the cluster: no multiple of 16", bytes);
    Transfer x{false, {}, {}, nullptr, offset_of(to, bytes, "a copy"), (unsigned)bytes, 0, true, offset_of(from, bytes, "what is copied")};
    if (x.to % 16 || x.at % 16)
        STOP("a copy from byte %u to byte %u of shared memory, no multiples of 16", x.at, x.to);
    publish_to_me(x.at, x.bytes);
    check_visible(x.at, x.bytes, "what is copied");
    x.seen.assign(on_chip + x.at, on_chip + x.at + x.bytes);
    in_block(number, "copies to", [&]() {
        x.barrier = &phases_of(barrier) - barriers.data();
        begin(std::move(x));
    });
}

void commit_stores()
{
    emulated::Thread& my = emulated::me();
    my.store_groups.push_back({std::move(my.stores), false});
    my.stores.clear();
}

void emulated::await_stores_read(size_t pending)
{
    auto& groups = emulated::me().store_groups;
    emulated::let_others_run();
    for (size_t n = 0; n + pending < groups.size(); n++)
        emulated::read(groups[n]);
}

void emulated::await_stores(size_t pending)
{
    auto& groups = emulated::me().store_groups;
    emulated::let_others_run();
    while (groups.size() > pending) {
        emulated::read(groups.front());
        for (const emulated::Store& x : groups.front().stores)
            emulated::finish(x);
        groups.pop_front();
    }
}

void arrive_as_warp(Barrier* barrier, int lane)
{
    __syncwarp();
    if (lane == 0)
        arrive(barrier);
}

// Blocks of threads run one after the other: for whom one waits has run, or never will
bool turn_has_come(const unsigned* turns, unsigned count) { return *turns == count; }
void await_turn(const unsigned* turns, unsigned count)
{
    if (*turns != count)
        STOP("waits for turn %u, and this is turn %u", count, *turns);
}
void pass_turn(unsigned* turns)
{
    if (!emulated::me().stores.empty() || !emulated::me().store_groups.empty())
        STOP("passes a turn on before await_stores<0>()");
    ++*turns;
}

void fence_shared()
{
    emulated::me().has_fenced = emulated::fence_somewhere = true;
    emulated::fenced_lanes[current / LANES] |= 1u << current % LANES;
}
void prefetch_map(const TensorMap& map) { emulated::decoded(map); }

void fence_products() { emulated::fence_of_products(); }
void commit_products() { emulated::commit_of_products(); }

void emulated::store_matrices(void* row, const unsigned (&x)[4], bool transposed)
{
    if (offset_of(row, 16, "a row of a matrix") % 16)
        STOP("a row of a matrix is stored at byte %u, no multiple of 16", offset_of(row, 16, ""));
    fibers[current].operand[0] = row, fibers[current].operand[1] = (void*)x;
    by_warp([transposed](Fiber* lanes) {
        const unsigned warp = (lanes - fibers) / LANES;
        fenced_lanes[warp] = 0;
        for (unsigned n = 0; n < LANES; n++)
            unfenced[warp].push_back((unsigned char*)lanes[n].operand[0] - on_chip);
        for (unsigned matrix = 0; matrix < 4; matrix++)
            for (unsigned n = 0; n < LANES; n++)
                for (unsigned half = 0; half < 2; half++) {
                    const unsigned r = transposed ? 2 * (n % 4) + half : n / 4, c = transposed ? n / 4 : 2 * (n % 4) + half;
                    const unsigned short number = ((const unsigned*)lanes[n].operand[1])[matrix] >> 16 * half;
                    memcpy((char*)lanes[8 * matrix + r].operand[0] + 2 * c, &number, 2);
                }
    });
}

int emulated::run_mapped_blocks(unsigned blocks, unsigned count, size_t shared, bool backwards)
{
    shared_bytes = shared, last_first = backwards;
    transfers_there.clear();  // of a launch that an error ended
    hooks = {begin_block, end_thread, end_block, publish, stuck, exchange};
    if (blocks_of_cluster < 1 || blocks_of_cluster > MOST_BLOCKS || blocks % blocks_of_cluster) {
        snprintf(message, sizeof message, "%u blocks are launched in clusters of %u", blocks, blocks_of_cluster);
        return 3;
    }
    if (bounds[0] && count > bounds[0]) {
        snprintf(message, sizeof message, "%u threads are launched, __launch_bounds__ has %u", count, bounds[0]);
        return 3;
    }
    return run_blocks(blocks, count, shared, backwards, blocks_of_cluster);
}
