// Threads of a block as fibers, for emulator.hpp: a barrier lets the others run.
//
// Of a cluster two blocks run: the first (or the last) whenever it can, else the other. What a block has lies where the names say while its threads
// run, and elsewhere while those of the other do: exchange_blocks().
//
// Unkind where hardware may be: asynchronous copies happen when they are waited for (or, if they never are, when the thread ends), shared
// memory starts as NaN, and the bytes behind it are watched. Order of threads: round robin, forwards or backwards; with emulator_hopper.cpp
// the first thread (or the last) always goes as far as it can.

#include <algorithm>
#include <csetjmp>
#include <cstdarg>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

constexpr unsigned MOST_THREADS = 640, MOST_BLOCKS = 2, LANES = 32;
constexpr size_t STACK = 512 << 10;

Dimensions threadIdx, blockIdx, blockDim, gridDim;
unsigned char on_chip[MOST_SHARED + WATCHED];

struct Copy { void* to; const void* from; int bytes; bool exists; };
enum State { READY, AT_BARRIER, IN_WARP, IN_GROUP, AT_CLUSTER, ENDED, WAITING, POLLING };  // the last two: emulator_hopper.cpp
struct Fiber {
    ucontext_t context;  // to begin in; from then on it goes on where it left off, which takes no call of the system
    jmp_buf left;
    bool begun_to_run;
    State state;
    std::vector<Copy> begun;
    std::vector<std::vector<Copy>> groups;
    const void* operation;  // of its warp, in which it is or was last
    void* operand[3];       // of that
};
static Fiber of_cluster[MOST_BLOCKS][MOST_THREADS], *fibers = of_cluster[0], *fibers_there = of_cluster[1];
static jmp_buf scheduler;
static unsigned threads, current, cluster, rank, at_cluster;  // blocks of a cluster; which of them runs
static size_t bytes_on_chip;
static struct Block {
    unsigned number, ended, at_barrier, in_warp[MOST_THREADS / LANES], in_group[MOST_THREADS / LANES];
    int heard;
} block, block_there;
static bool has_visited;  // a thread, the other block, so that others there may go on
static unsigned char chip_there[MOST_SHARED + WATCHED];

namespace emulated {
char message[2000];
bool in_order, in_turn;
void (*body)(void*);
void* argument;
static bool in_thread;

// What emulator_hopper.cpp has to say: at the begin and the end of a block and of a thread; when threads have met; when none can go on.
struct Hooks {
    void (*begin)();
    void (*thread_end)();
    void (*end)();
    void (*met)();
    bool (*stuck)();  // can one go on now?
    void (*exchange)();  // of what the blocks of a cluster have
};
static Hooks hooks;

void complain(const char* format, ...)
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

void stop()
{
    _longjmp(scheduler, 1);
}

// The block of the cluster that runs is the other one from now on; a thread that does this is still one of its own block.
static void exchange_blocks()
{
    std::swap_ranges(on_chip, on_chip + bytes_on_chip, chip_there);
    std::swap(fibers, fibers_there);
    std::swap(block, block_there);
    rank ^= 1;
    if (hooks.exchange)
        hooks.exchange();
}

static void go_to_block(unsigned number)
{
    if (rank != number)
        exchange_blocks();
    blockIdx.x = block.number;
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

void __syncthreads()
{
    if (++block.at_barrier < threads) {
        wait(AT_BARRIER);
        return;
    }
    block.at_barrier = 0;
    if (emulated::hooks.met)
        emulated::hooks.met();
    for (unsigned n = 0; n < threads; n++)
        if (fibers[n].state == AT_BARRIER)
            fibers[n].state = READY;
}

int __syncthreads_or(int x)
{
    if (block.at_barrier == 0)
        block.heard = 0;
    block.heard |= x != 0;
    __syncthreads();
    const int answer = block.heard;
    __syncthreads();  // all have read it
    return answer;
}

// A thread that has ended is waited for, too, as by __syncthreads().
void emulated::meet_cluster()
{
    if (++at_cluster < cluster * threads) {
        wait(AT_CLUSTER);
        return;
    }
    at_cluster = 0;
    for (unsigned both = 0; both < cluster; both++) {
        if (hooks.met)
            hooks.met();
        for (unsigned n = 0; n < threads; n++)
            if (fibers[n].state == AT_CLUSTER)
                fibers[n].state = READY;
        if (cluster > 1)
            exchange_blocks();
    }
    has_visited = cluster > 1;
}

// The last lane that comes does the work of the whole warp; all must have come for the same.
template <class Work> static void by_warp(Work work)
{
    static char operation;  // its address stands for it
    const unsigned warp = current / LANES;
    fibers[current].operation = &operation;
    if (++block.in_warp[warp] < LANES) {
        wait(IN_WARP);
        return;
    }
    block.in_warp[warp] = 0;
    for (unsigned n = warp * LANES; n < (warp + 1) * LANES; n++)
        if (fibers[n].operation != &operation) {
            emulated::complain("lane %u of its warp is in another operation", n % LANES);
            emulated::stop();
        }
    if (emulated::hooks.met)
        emulated::hooks.met();
    work(fibers + warp * LANES);
    for (unsigned n = warp * LANES; n < (warp + 1) * LANES; n++)
        if (fibers[n].state == IN_WARP)
            fibers[n].state = READY;
}

void __syncwarp(unsigned) { by_warp([](Fiber*) {}); }

void emulated::shuffle(const void* x, void* answer, size_t bytes, int lane, bool exchanges)
{
    Fiber& me = fibers[current];
    me.operand[0] = (void*)x, me.operand[1] = answer;
    me.operand[2] = (void*)(size_t)(exchanges ? current % LANES ^ lane : lane);
    by_warp([bytes](Fiber* lanes) {
        for (unsigned n = 0; n < LANES; n++)
            memcpy(lanes[n].operand[1], lanes[(size_t)lanes[n].operand[2] % LANES].operand[0], bytes);
    });
}

unsigned __ballot_sync(unsigned, bool x)
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

void __trap()
{
    emulated::complain("__trap");
    emulated::stop();
}

void __nanosleep(unsigned) { wait(emulated::hooks.stuck ? POLLING : READY); }

// ---- copies and matrices ------------------------------------------------------------------------------------------------------------

void emulated::begin_copy(void* to, const void* from, int bytes, bool exists) { fibers[current].begun.push_back({to, from, bytes, exists}); }
void commit_group()
{
    fibers[current].groups.push_back(std::move(fibers[current].begun));
    fibers[current].begun.clear();
}
void emulated::await_groups(size_t pending)
{
    auto& groups = fibers[current].groups;
    while (groups.size() > pending) {
        perform(groups.front());
        groups.erase(groups.begin());
    }
}

void ask_for_memory(const void* from, int bytes)
{
    if ((uintptr_t)from % 16 || bytes <= 0 || bytes % 16)
        fprintf(stderr, "%d bytes asked for at %p\n", bytes, from), abort();
    std::vector<char> read(bytes);
    memcpy(read.data(), from, bytes);
}

uint4 load_if(const void* from, bool exists)
{
    uint4 x = {0, 0, 0, 0};
    if (exists && (uintptr_t)from % 16)
        fprintf(stderr, "16 bytes loaded from %p\n", from), abort();
    if (exists)
        memcpy(&x, from, 16);
    return x;
}

uint2 load_words(const void* from, int bytes)
{
    uint2 x = {0, 0};
    if (bytes != 0)
        memcpy(&x.x, from, 4), memcpy(&x.y, (const char*)from + (bytes == 8 ? 4 : 0), 4);
    return x;
}

void emulated::sync_group(unsigned warps)
{
    const unsigned group = current / (warps * LANES);
    if (++block.in_group[group] < warps * LANES) {
        wait(IN_GROUP);
        return;
    }
    block.in_group[group] = 0;
    if (emulated::hooks.met)
        emulated::hooks.met();
    for (unsigned n = group * warps * LANES; n < (group + 1) * warps * LANES; n++)
        if (fibers[n].state == IN_GROUP)
            fibers[n].state = READY;
}

static void divides(unsigned address, unsigned bytes)
{
    if (address % bytes)
        fprintf(stderr, "address %u of shared memory, of %u bytes\n", address, bytes), abort();
}
void store_shared(unsigned to, unsigned x) { divides(to, 4), memcpy(on_chip + to, &x, 4); }
void store_shared(unsigned to, const unsigned (&x)[4]) { divides(to, 16), memcpy(on_chip + to, x, 16); }
uint4 load_shared(unsigned from)
{
    divides(from, 16);
    uint4 x;
    memcpy(&x, on_chip + from, 16);
    return x;
}
void copy_chunk_if(unsigned to, const void* from, bool exists) { divides(to, 16), emulated::begin_copy(on_chip + to, from, 16, exists); }

void emulated::matrices_of_warp(unsigned (&x)[4], unsigned from, bool transposed)
{
    divides(from, 16);
    Fiber& me = fibers[current];
    me.operand[0] = x, me.operand[1] = on_chip + from;
    by_warp([transposed](Fiber* lanes) {
        for (unsigned matrix = 0; matrix < 4; matrix++) {
            uint16_t numbers[8][8];
            for (unsigned row = 0; row < 8; row++)
                memcpy(numbers[row], lanes[8 * matrix + row].operand[1], 16);
            for (unsigned n = 0; n < LANES; n++) {
                const unsigned g = n / 4, y = 2 * (n % 4);
                const uint16_t low = transposed ? numbers[y][g] : numbers[g][y], high = transposed ? numbers[y + 1][g] : numbers[g][y + 1];
                ((unsigned*)lanes[n].operand[0])[matrix] = low | (unsigned)high << 16;
            }
        }
    });
}

// Tensor cores cut sums off.
static float toward_zero(double x)
{
    const float y = (float)x;
    return std::fabs((double)y) > std::fabs(x) ? std::nextafterf(y, 0) : y;
}

void emulated::multiply_halves(float (&widened)(unsigned), float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2])
{
    Fiber& me = fibers[current];
    me.operand[0] = c, me.operand[1] = (void*)a, me.operand[2] = (void*)b;
    by_warp([&widened](Fiber* lanes) {
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

void multiply_float64(double& c0, double& c1, double& c2, double& c3, const double (&a)[4], const double (&b)[2])
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
    emulated::body(emulated::argument);
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
    static constexpr size_t BYTES = STACK * MOST_THREADS;  // of a block
    const size_t all = BYTES * cluster;
    char* const first = (char*)mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ~Stacks() { munmap(first, all); }
};

static void begin_block(unsigned number, size_t shared, char* stacks)
{
    blockIdx = {number, 0, 0};
    memset(on_chip, 0xFF, shared);
    memset(on_chip + shared, 0x5A, WATCHED);
    block = {number};
    for (unsigned n = 0; n < threads; n++) {
        fibers[n].state = READY, fibers[n].begun_to_run = false;
        fibers[n].begun.clear(), fibers[n].groups.clear();
        getcontext(&fibers[n].context);
        fibers[n].context.uc_stack.ss_sp = stacks + n * STACK, fibers[n].context.uc_stack.ss_size = STACK;
        makecontext(&fibers[n].context, thread_main, 0);
    }
    if (emulated::hooks.begin)
        emulated::hooks.begin();
}

// 0: all threads of all blocks came to their end. 1: threads wait for threads that will not come. 2: memory behind the tiles was written.
// 3: the message says what.
int emulated::run_blocks(unsigned blocks, unsigned count, size_t shared, bool backwards, unsigned of_cluster)
{
    cluster = of_cluster, threads = count, bytes_on_chip = shared + WATCHED, rank = 0, has_visited = false;
    const Stacks stacks;
    message[0] = 0;
    gridDim = {blocks, 1, 1}, blockDim = {count, 1, 1};
    for (unsigned first = 0; first < blocks; first += cluster) {
        at_cluster = 0;
        for (unsigned n = cluster; n-- > 0;) {
            go_to_block(n);
            begin_block((backwards && !emulated::in_order ? blocks - cluster - first : first) + n, shared, stacks.first + n * Stacks::BYTES);
        }
        go_to_block(backwards ? cluster - 1 : 0);
        for (unsigned ended = 0; ended < cluster;) {
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
                block.ended += fibers[n].state == ENDED;
                if (hooks.stuck)  // unfair: always the first one that can go on
                    break;
            }
            if (any && block.ended == count) {
                if (hooks.end)
                    hooks.end();
                if (message[0])
                    return 3;
                for (size_t n = 0; n < WATCHED; n++)
                    if (on_chip[shared + n] != 0x5A)
                        return 2;
                ended++;
            }
            if (has_visited)
                has_visited = false, go_to_block(backwards ? cluster - 1 : 0);
            else if (!any && !(hooks.stuck && hooks.stuck()))
                return message[0] ? 3 : 1;
        }
    }
    return 0;
}
