// What the backward passes of this folder share: which work a block of threads has, where the sums of dQ lie, rings of stages, and the ways
// between registers, slabs and matrices. fa2_backward.cu and fa2_backward_wide.cu include it.

#include "numbers.cuh"
#include "call.cuh"
#include "tile.cuh"
#include "padding.cuh"
#include "hopper.cuh"
#include "tanh.cuh"

constexpr int WARP_LANES = 32, WARPS = WARPGROUP / WARP_LANES;  // of a warpgroup
constexpr int TO_D = ceil_div(D, SLAB) * SLAB, TO_V = ceil_div(DV, SLAB) * SLAB;
constexpr int SUM = 16;          // products that a matrix product of a warpgroup sums
constexpr int LANE_NUMBERS = 4;  // neighbouring numbers of a lane in a patch of dQ's sums
constexpr int MAP_Q = 0, MAP_K = 1, MAP_V = 2, MAP_DO = 3, MAP_O = 4, MAP_DQ = 5;
static_assert(ALIGNED && D % 8 == 0 && DV % 8 == 0, "what copies can do");

// Which keys of which head, and the rows that see some of them: of every query head, from i_low (the start of a block) on, before i_high.
struct Work {
    int b, h, j0;               // sequence, key head, first key
    int slot, q_start, k_start;  // where row 0 and key 0 lie
    int q_length, kv_length;
    int i_low, i_high, steps;
    int first_head, heads;  // of how many query heads
    int stride;             // EITHER_WAY: from the rows of all heads to the next ones
    int begin, own;         // ROUND: the rows of the first step; those from which on nobody has come round
    int from, to, parts;    // ROUND: the rows that blocks of threads of all blocks of keys have, each one of so many parts
    int behind;             // DIAGONAL: rows from the first ones of a block of keys to those of this part, or, if it goes down, of the next one
    int sums;               // SUMS: the sequence whose sums would be these if there were one for each, one behind the other
    int late;               // the first of the blocks of keys that come the last one first; DIAGONAL: how many have that part
    long long offset;
};

// SUMS: dQ has so many sums, which fa2_backward_finish adds up, so that blocks of keys that run at once do not wait for each other where they begin: the last
// ones come first, each begins at the first rows that see its keys under a causal mask, and goes up; the next one comes to these rows right behind it.
// ONE_HEAD: a block of threads has one query head; else the same rows of all that share keys come one after the other, under a mask. BY_HEAD: each of these
// has blocks of threads of its own, in the order in which those of as many key heads come, whose shares of dK and dV are added up (DIVIDED).
// ROUND, without a mask: then to the rows before those, whose dQ has other sums. Under a mask with an upper end, where long blocks of keys would end
// alone, one of two, with TOGETHER in fa2_backward.cu. LATE: `halved` long ones of each head come behind the short ones, the first keys first, go down
// from the last rows, and add to other sums. DIAGONAL, where they are few: the rows of each, from the first that sees its keys on, come in up to `parts`
// parts of as many rows as `halved` blocks of keys have keys, each with a block of threads and sums of its own; the last part has what is left. The first
// `whole` parts of all come as above. Those behind them come behind these, the longest first, when short ones end; they go down, the first keys first.
// RESIDUES: neighbouring blocks of keys have different sums, so that it may take longer from one turn to the next than from one step to the next.
constexpr bool ROUND = SUMS > 1 && !BAND, LATE = SUMS > 1 && BAND && !DIAGONAL, EITHER_WAY = TOGETHER || LATE || DIAGONAL;
static_assert(SUMS == 1 || DETERMINISTIC && LAST_FIRST && FIRST_STORES && !PACKED && !(BAND && PAIRED), "turns");

// Which block of keys a block of threads has, and which share of its rows, of how many.
struct Part {
    unsigned block;
    int number, count;
};

#if PACKED && DETERMINISTIC
// The starts of rows, then those of keys, as 64-bit numbers that never fall, in the arrays: where starts fall there would be no place in line for blocks
// of keys that others wait for. By a block of threads each; each thread has some of them, one behind the other.
extern "C" __global__ void __launch_bounds__(THREADS) rising_starts(const __grid_constant__ Call call)
{
    extern __shared__ __align__(SLAB_ALIGNMENT) unsigned char on_chip[];
    long long* const most_of = (long long*)on_chip;  // each thread has seen
    const bool of_keys = blockIdx.x > 0;
    const Table table = of_keys ? call.cu_seqlens_k : call.cu_seqlens_q;
    const long long count = call.B + 1, rows = of_keys ? call.rows_k : call.rows_q;
    const long long each = (count + THREADS - 1) / THREADS, from = least(threadIdx.x * each, count), to = least(from + each, count);
    const auto rise = [&](long long& most, long long start) { most = clamp(start, most, rows); };
    long long* const rising = (long long*)call.sums + of_keys * count;
    long long most = 0;
    for (long long b = from; b < to; b++)
        rise(most, entry(table, b, 0));
    most_of[threadIdx.x] = most;
    __syncthreads();
    most = 0;
    for (unsigned before = 0; before < threadIdx.x; before++)
        rise(most, most_of[before]);
    for (long long b = from; b < to; b++) {
        rise(most, entry(table, b, 0));
        rising[b] = most;
    }
}
#endif

// ---- scores that are no multiples of products: softcap, ALiBi ----------------------------------------------------------------------

constexpr bool PLAIN = !SOFTCAP && !ALIBI;

// A score in powers of two from a product, and what a gradient of it is multiplied by.
struct Score {
    float twos, slope;
};

// `distance`: from a key to where a row lies on the key axis.
struct Scores {
    float unit, cap, per_key;

    __device__ __forceinline__ explicit Scores(const Call& call)
        : unit(SOFTCAP ? (float)(call.scale / call.softcap) : call.scale_log2), cap((float)call.softcap * LOG2E), per_key(0.0f)
    {
    }

    // Rows are those of this head from now on
    __device__ __forceinline__ void begin_head(const Call& call, int b, int h)
    {
        if constexpr (ALIBI)
            per_key = LOG2E * widen<SLOPE_TYPE>(((const Storage<SLOPE_TYPE>::stored*)call.slopes)[b * call.slopes_b + h * call.slopes_h]);
    }

    __device__ __forceinline__ Score of(float product, float distance) const
    {
        const float x = product * unit, t = SOFTCAP ? branchless_tanh(x) : 0.0f;
        const float twos = SOFTCAP ? t * cap : x;
        return {ALIBI ? fmaf(-per_key, fabsf(distance), twos) : twos, 1.0f - t * t};
    }
};

constexpr unsigned NOBODYS = (1u << 30) / BC;  // where no sequence has keys

// Which block of keys of which key head of all a block of threads has.
struct KeyBlock {
    unsigned head, block, late, nth;  // nth: BY_HEAD, of those query heads that share it
};

// Heads come in sections whose matrices L2 can hold; of a section the first keys first, which most rows see if it is causal. LAST_FIRST: the last keys.
// DETERMINISTIC, too, but these have few rows, and multiprocessors would be idle in the end: so of the last section the last half of the blocks comes
// first, up from the shortest, then the first half, down from the longest. Not where all blocks of threads run at once, and would wait. LATE: so many as
// the host says, of all sections. PACKED: blocks are those of all sequences in one line; one that is nobody's is behind the last of any sequence.
constexpr bool IN_HALVES = LAST_FIRST && DETERMINISTIC && !PACKED && SUMS == 1;
__device__ __forceinline__ KeyBlock key_block(const Call& call, unsigned index)
{
    const unsigned heads = (unsigned)(PACKED ? call.Hkv : call.B * (BY_HEAD ? call.Hq : call.Hkv)), blocks = (unsigned)call.blocks, section = (unsigned)call.section;
    const unsigned first = divided(index, call.by_section) * section, rest = (index - first * blocks) >> PAIRED;
    const bool is_last = heads - first <= section;
    const unsigned nth = divided(rest, is_last ? call.by_last_heads : call.by_heads), head = first + rest - nth * (is_last ? heads - first : section);
    const unsigned count = blocks >> PAIRED, late = LATE ? (unsigned)call.halved : IN_HALVES && is_last && gridDim.x > call.at_once ? count / 2 : 0;
    const unsigned block = !LAST_FIRST ? nth : nth < count - late ? count - 1 - nth : nth - (count - late);
    if constexpr (PACKED) {
        const InLine place = in_line<BC>(call, call.cu_seqlens_k, call.rows_k, (int)block);
        return {(unsigned)place.b * (unsigned)call.Hkv + head, place.block < 0 ? NOBODYS : (unsigned)place.block, late, 0};
    }
    const unsigned of_group = BY_HEAD ? (unsigned)call.group : 1;
    return {head / of_group, PAIRED ? 2 * block + index % 2 : block, late, head % of_group};  // a cluster has two neighbouring ones
}

// DIVIDED: the last blocks of keys, with which most multiprocessors would be idle, have several blocks of threads, each for some of their rows: two,
// or `parts` behind these. TOGETHER, where blocks of keys are too few to begin with: all of them have `parts`, each for some of the query heads;
// where these are more than query heads, each for some of the rows of one. BY_HEAD, blocks of keys count once for each query head. DIAGONAL: first parts that
// go up, those of the last keys first; of those that go down first all that others follow, and then the last ones, which are shorter, the longest first.
__device__ __forceinline__ Part part_of(const Call& call, unsigned index)
{
    if constexpr (DIAGONAL) {
        const unsigned heads = (unsigned)call.section, parts = (unsigned)call.parts, level = (unsigned)call.halved;
        const unsigned up = (unsigned)call.whole, down = parts - up, before = (parts - 1) * level, top = (unsigned)call.blocks - before;
        unsigned n = divided(index, call.by_heads);
        const unsigned head = index - n * heads;
        const auto part = [&](unsigned from_last, unsigned number, unsigned count) -> Part { return {from_last * heads + head, (int)number, (int)count}; };
        for (unsigned last = 0; last < parts; last++) {  // the last part that blocks of keys of a level have
            const unsigned keys = last == parts - 1 ? top : level, each = last < up ? last + 1 : up;
            if (n < keys * each)
                return part(last * level + n / each, n % each, last + 1);
            n -= keys * each;
        }
        for (unsigned last = parts - 1; last > up; last--) {
            const unsigned keys = last == parts - 1 ? top : level, each = last - up;
            if (n < keys * each)
                return part(last * level + keys - 1 - n / each, up + n % each, last + 1);
            n -= keys * each;
        }
        // Last parts, of one block of keys of each level after the other; of most parts there may be more, or fewer
        const unsigned more = top > level ? top - level : 0, longer = top < level ? level - top : 0;
        if (n < more)
            return part(before + top - 1 - n, parts - 1, parts);
        n -= more;
        const bool is_longer = n < longer * (down - 1);
        const unsigned of = is_longer ? down - 1 : down;
        n -= is_longer ? 0 : longer * (down - 1);
        const unsigned last = up + n % of;
        return part(last * level + (is_longer ? level : level - longer) - 1 - n / of, last, last + 1);
    } else if constexpr (DIVIDED && !BY_HEAD) {
        // PAIRED: of clusters, each of which has two of these
        const unsigned whole = (unsigned)call.whole >> PAIRED, halved = (unsigned)call.halved >> PAIRED, rank = PAIRED ? index % 2 : 0;
        index >>= PAIRED;
        if (index >= whole) {
            const bool is_half = index < whole + 2 * halved;
            const unsigned first = is_half ? whole : whole + 2 * halved, parts = is_half ? 2 : (unsigned)call.parts;
            return {(whole + (is_half ? 0 : halved) + (index - first) / parts << PAIRED) + rank, (int)((index - first) % parts), (int)parts};
        }
        index = (index << PAIRED) + rank;
    }
    return {index, 0, 1};
}

__device__ __forceinline__ Work work_of(const Call& call)
{
    Work work;
    const Part part = part_of(call, blockIdx.x);
    const KeyBlock place = key_block(call, part.block);
    work.j0 = (int)place.block * BC, work.late = (int)place.late;
    work.b = (int)divided(place.head, call.by_key_heads);
    work.h = (int)place.head - work.b * (int)call.Hkv;
    const Sequence s = sequence(call, work.b);
    work.slot = (int)s.slot, work.q_start = (int)s.q_start, work.k_start = (int)s.k_start;
    work.q_length = (int)(FUSED ? call.Tq : s.q_length), work.kv_length = (int)(FUSED ? call.Tk : s.kv_length), work.offset = s.offset;
    constexpr int KEYS = BC << PAIRED;
    work.i_low = 0, work.i_high = FUSED || work.j0 < work.kv_length ? work.q_length : 0;
    if constexpr (BAND) {
        const long long j1 = least(work.j0 + BC, s.kv_length);
        // PAIRED: 128 rows after 128, from those on that see the first key of both blocks
        constexpr int ROWS = BR << PAIRED;
        work.i_low = (int)clamp(work.j0 / KEYS * KEYS - s.offset - call.band_upper, 0, work.i_high) / ROWS * ROWS;
        work.i_high = (int)clamp(j1 - s.offset - call.band_lower, 0, work.i_high);
    }
    work.first_head = work.h * (int)call.group + (BY_HEAD ? (int)place.nth : 0), work.heads = BY_HEAD ? 1 : (int)call.group;
    if constexpr (DIVIDED && !BAND && !TOGETHER) {
        constexpr int ROWS = BR << PAIRED;
        const int blocks = (work.i_high + ROWS - 1) / ROWS;
        work.i_low = __shfl_sync(WARP, blocks * part.number / part.count * ROWS, 0);  // to the compiler the same in all lanes: no register of each
        work.i_high = __shfl_sync(WARP, part.number + 1 < part.count ? blocks * (part.number + 1) / part.count * ROWS : work.i_high, 0);
    } else if constexpr (DIAGONAL) {
        const bool is_down = part.number >= (int)call.whole;
        const int each = (int)call.halved * BC, which = part.number + is_down;
        work.stride = is_down ? -BR : BR;
        work.behind = which * each, work.late = which < (int)call.parts ? (int)call.blocks - which * (int)call.halved : 0;
        work.i_low += part.number * each;
        work.i_high = part.number + 1 < part.count && work.i_low + each < work.i_high ? work.i_low + each : work.i_high;
    } else if constexpr (TOGETHER && !LATE) {
        const int of_heads = part.count < work.heads ? part.count : work.heads, of_rows = part.count / of_heads;
        const int head = part.number / of_rows, from = work.heads * head / of_heads, row = part.number % of_rows;
        work.heads = work.heads * (head + 1) / of_heads - from, work.first_head += from;
        const int low = work.i_low, blocks = work.i_high > low ? (work.i_high - low + BR - 1) / BR : 0;
        work.i_low = low + blocks * row / of_rows * BR;
        work.i_high = row + 1 < of_rows ? low + blocks * (row + 1) / of_rows * BR : work.i_high;
        work.stride = (DETERMINISTIC ? !LAST_FIRST : BAND && blockIdx.x / (unsigned)call.at_once % 2 == 0) ? -BR : BR;
    }
    constexpr int STEP_ROWS = BR << PAIRED;
    const int which = DIAGONAL ? part.number : LATE ? work.j0 / BC < work.late : 0;
    if constexpr (SUMS > 1)
        work.sums = work.b + (which * RESIDUES + work.j0 / KEYS % RESIDUES) * (int)call.B;
    if constexpr (LATE)
        work.stride = which > 0 ? -BR : BR;
    if constexpr (ROUND) {
        const bool are_alike = DIVIDED && (TOGETHER || call.whole == 0 && call.halved == 0);  // all blocks of keys are divided in the same way
        work.from = are_alike ? work.i_low : 0, work.to = are_alike ? work.i_high : work.q_length;
        work.parts = !are_alike ? 1 : TOGETHER ? part.count / least(part.count, (int)call.group) : part.count;
        const int last = (work.to - 1 - work.from) / STEP_ROWS * STEP_ROWS, first = work.j0 / KEYS * KEYS / work.parts / STEP_ROWS * STEP_ROWS;
        work.own = work.from + (first < last ? first : last);
        work.begin = work.own >= work.i_low && work.own < work.i_high ? work.own : work.i_low;
    }
    work.steps = work.i_high > work.i_low ? (work.i_high - work.i_low + STEP_ROWS - 1) / STEP_ROWS * (1 << PAIRED) * work.heads : 0;
    return work;
}

// The first row of each step: up the blocks of rows of one head after the other. DETERMINISTIC: blocks of keys take turns at dQ. LAST_FIRST: each begins
// at rows of its own, which hardly another has first. Under other bands they go down: under a causal one the last rows are those that all see, so they
// begin one right behind the other. Without a mask either way is as good, but for ROUND.
// TOGETHER, under a mask: heads would come at as many paces as blocks of keys have rows, and what they read and add to would not be in L2. Blocks of
// threads that begin together go down, from the last rows, which all have. Those that begin as these end, the longest of them where the shortest of
// these was, go up: all are then at the same row again.
constexpr bool DOWN = DETERMINISTIC && BAND && !LAST_FIRST;
static_assert(!PAIRED || !DOWN, "pairs go up");
__device__ __forceinline__ int first_rows(const Work& work)
{
    if constexpr (ROUND)
        return work.begin;
    return DOWN || EITHER_WAY && work.stride < 0 ? work.i_low + (work.i_high - 1 - work.i_low) / BR * BR : work.i_low;
}

// The sums of dQ lie in blocks of BR rows and TO_D columns; a sequence begins a new one. How many a head has (PAIRED: an even number), and where those
// of one begin.
__device__ __forceinline__ long long blocks_of_head(const Call& call)
{
    constexpr int ROWS = BR << PAIRED;
    return PACKED ? call.rows_q / BR + call.B : (call.Tq + ROWS - 1) / ROWS << PAIRED;
}

__device__ __forceinline__ long long first_block(const Call& call, long long b, long long h, long long q_start)
{
    if constexpr (PACKED)  // sequences before have at most as many
        return h * blocks_of_head(call) + q_start / BR + b;
    return (b * call.Hq + h) * blocks_of_head(call);
}

// Which block of rows, of which query head, the n-th of all is.
struct RowBlock {
    long long b, h, block;
};

__device__ __forceinline__ RowBlock row_block(const Call& call, long long n)
{
    const long long blocks = blocks_of_head(call), block = n % blocks, bh = n / blocks;
    if constexpr (PACKED) {
        const InLine place = in_line<BR>(call, call.cu_seqlens_q, call.rows_q, (int)block);
        return {place.b, bh, place.block};
    }
    return {bh / call.Hq, bh % call.Hq, block};
}

// SETS: of warpgroups that add to all of a block of rows, each has its own.
__device__ __forceinline__ float* sums_of_block(const Call& call, long long block) { return call.sums + block * (SETS * BR * TO_D); }

// LAST_FIRST: the last block of keys, or pair of them, that begins at the block of rows that i0 is in, or before it.
__device__ __forceinline__ int last_keys(const Call& call, const Work& work, int i0)
{
    constexpr int ROWS = BR << PAIRED, KEYS = BC << PAIRED;
    const int rows = i0 / ROWS * ROWS, end = ROUND ? (rows - work.from + ROWS) * work.parts : rows + ROWS;
    const bool is_last = ROUND ? rows + ROWS >= work.to : end > work.q_length;
    const long long last_key = is_last ? work.kv_length - 1 : end - 1 + (ROUND ? 0 : work.offset + call.band_upper);
    return (int)clamp(last_key, 0, work.kv_length - 1) / KEYS;
}

// The block of dQ's sums that a block of threads adds to at the rows from i0 on of a query head.
__device__ __forceinline__ long long block_at(const Call& call, const Work& work, int h, int i0)
{
    const long long b = SUMS == 1 ? work.b : ROUND && i0 < work.own ? work.sums + RESIDUES * (int)call.B : work.sums;
    return first_block(call, b, h, work.q_start) + i0 / BR;
}

// How many blocks of keys, or pairs of them, come before this one that go through the rows from i0 on (work_of) and add to the same sums. FIRST_STORES:
// who has the first turn stores, so that nothing has to be cleared.
__device__ __forceinline__ unsigned turn_at(const Call& call, const Work& work, int i0)
{
    constexpr int KEYS = BC << PAIRED;
    if constexpr (DIAGONAL) {
        // Blocks of keys that have that part, if any, from these rows on or from rows before them (work_of). Going up, they have these rows in it, and the
        // last keys were first; going down, they had all of theirs before these rows, so that the one behind them was first.
        const long long before = i0 - work.behind;
        const long long last_key = before + BR > work.q_length ? work.kv_length - 1 : before + BR - 1 + work.offset + call.band_upper;
        const int mine = work.j0 / BC, begun = before < 0 ? 0 : (int)(clamp(last_key + BC, 0, work.kv_length + BC - 1) / BC);
        const int end = begun < work.late ? begun : work.late;
        return (unsigned)(work.stride > 0 ? end - 1 - mine : mine - end) / RESIDUES;
    } else if constexpr (LAST_FIRST) {
        const int last = last_keys(call, work, i0), mine = work.j0 / KEYS;
        if constexpr (SUMS > 1) {
            const int all = (work.kv_length - 1) / KEYS;
            return (unsigned)(ROUND && i0 < work.own ? all - mine : LATE && work.stride < 0 ? mine : last - mine) / RESIDUES;
        }
        return (unsigned)(mine >= work.late ? last - mine : (last < work.late ? 0 : last + 1 - work.late) + mine);
    }
    return (unsigned)(work.j0 / KEYS - (BAND ? (int)clamp(i0 + work.offset + call.band_lower, 0, work.j0) / KEYS : 0));
}

// Counts them for a block of rows.
__device__ __forceinline__ unsigned* turns(const Call& call, long long block)
{
    return call.counters + (FUSED ? 2 * call.B * call.Hkv : 0) + block;
}

// Numbers of dQ: of all sums, those that somebody has added to. All are under way before the first is there.
struct SumsOfBlock {
    const float4* from[SUMS];

    __device__ __forceinline__ SumsOfBlock(const Call& call, long long b, long long h, long long q_start, long long block, int numbers)
    {
#pragma unroll
        for (int n = 0; n < SUMS; n++) {
            const long long at = first_block(call, b + n * call.B, h, q_start) + block;
            from[n] = SUMS == 1 || *turns(call, at) > 0 ? (const float4*)(sums_of_block(call, at) + numbers) : nullptr;
        }
    }

    __device__ __forceinline__ float4 operator[](int vector) const
    {
        float4 x[SUMS * SETS];
#pragma unroll
        for (int n = 0; n < SUMS * SETS; n++)
            x[n] = SUMS == 1 || from[n / SETS] != nullptr ? from[n / SETS][vector + n % SETS * (BR * TO_D / 4)] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int n = 1; n < SUMS * SETS; n++)
            x[0].x += x[n].x, x[0].y += x[n].y, x[0].z += x[n].z, x[0].w += x[n].w;
        return x[0];
    }
};

// For each step, in order: `step(steps that are left, first row, block of rows in dQ's sums)`.
template <class Step> __device__ __forceinline__ void each_block_of_rows(const Call& call, const Work& work, Step step);

// Turns take as long as steps, so two threads of warps that have nothing else to do wait for one and pass another on, while dQ of the next step is
// computed; `turn` and `added` are between them and who adds. The next turn does not begin before the end of this one has been seen.
__device__ __forceinline__ void await_turns(const Call& call, const Work& work, Barrier* turn)
{
    int parity = 0;
    each_block_of_rows(call, work, [&](int steps, int i0, long long block) {
        await_turn(turns(call, block), turn_at(call, work, i0));
        if (steps < work.steps)
            await(turn, parity ^ 1);  // the one before
        arrive(turn);
        parity ^= 1;
    });
}

__device__ __forceinline__ void pass_turns(const Call& call, const Work& work, Barrier* turn, Barrier* added)
{
    int parity = 0;
    if (work.steps > 0)
        arrive(turn);
    each_block_of_rows(call, work, [&](int steps, int, long long block) {
        await(added, parity);
        if (steps > 1)
            arrive(turn);
        pass_turn(turns(call, block));
        parity ^= 1;
    });
}

// Which stage is next, and the parity of the phase that its barriers are in.
template <int STAGES> struct Ring {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void next()
    {
        if (++stage == STAGES)
            stage = 0, parity ^= 1;
    }
};

// All slabs of a box.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void copy_slabs(unsigned char* to, const TensorMap& map, Barrier* barrier, int row, int h, int slot)
{
#pragma unroll
    for (int x = 0; x < COLUMNS; x += SLAB)
        copy_box(to + x / SLAB * ROWS * SLAB_ROW, map, barrier, x, row, h, slot);
}

__device__ __forceinline__ unsigned pair(float x, float y) { return TYPE == BFLOAT16 ? bfloat16_pair(x, y) : float16_pair(x, y); }

// The sums 8 n to 8 n + 7 in 16 bits: the factor of 16 columns.
template <int COUNT> __device__ __forceinline__ void to_factor(unsigned (&factor)[4], const float (&sum)[COUNT], int n)
{
#pragma unroll
    for (int e = 0; e < 4; e++)
        factor[e] = pair(sum[8 * n + 2 * e], sum[8 * n + 2 * e + 1]);
}

// Such a factor of 16 rows from `row` on to shared memory, into 16 columns of slabs of ROWS rows; of the warpgroup's 64 rows from there on.
template <int ROWS> __device__ __forceinline__ void store_rows_of_factor(unsigned char* slabs, int row, int n, const unsigned (&factor)[4])
{
    const int lane = threadIdx.x % WARP_LANES, piece = 2 * n + lane / 16;
    store_matrices<false>(slabs + piece / 8 * ROWS * SLAB_ROW + in_slab(row + lane % 16, piece % 8), factor[0], factor[1], factor[2], factor[3]);
}

template <int ROWS> __device__ __forceinline__ void store_factor(unsigned char* slabs, int row, int n, const unsigned (&factor)[4])
{
    store_rows_of_factor<ROWS>(slabs, row + 16 * (threadIdx.x / WARP_LANES % WARPS), n, factor);
}

// Zeros in rows [from, ROWS) of slabs; by some threads, of whom this is number `y`.
template <int ROWS, int COLUMNS, int MEMBERS> __device__ __forceinline__ void clear_rows(unsigned char* slabs, int from, int y)
{
    constexpr int VECTORS = SLAB_ROW / VECTOR_BYTES;
#pragma unroll 1
    for (int n = y; n < (ROWS - from) * VECTORS * (COLUMNS / SLAB); n += MEMBERS) {
        const int slab = n / ((ROWS - from) * VECTORS), at = from * VECTORS + n % ((ROWS - from) * VECTORS);
        ((uint4*)(slabs + slab * ROWS * SLAB_ROW))[at] = make_uint4(0, 0, 0, 0);
    }
}

// Byte offset of the n-th 16 columns of a factor that is not transposed, in slabs of ROWS rows.
template <int ROWS> __device__ constexpr int column_step(int n) { return n / 4 * ROWS * SLAB_ROW + n % 4 * 32; }
constexpr int ROW_STEP = SUM * SLAB_ROW;  // the same of one that is

// COUNT rows of slabs in shared memory, from `first` on, to rows of a matrix, those that exist; zeros past `full`. By MEMBERS threads, each of which
// has all its loads under way at once.
template <int ROWS, int COLUMNS, int WIDTH, int MEMBERS, int COUNT>
__device__ __forceinline__ void store_rows(elem* to, long long stride, const unsigned char* slabs, int first, int exist, int full)
{
    constexpr int VECTORS = WIDTH / 8;
#pragma unroll
    for (int from = 0; from < COUNT * VECTORS; from += MEMBERS) {
        const int n = from + threadIdx.x % MEMBERS, y = n / VECTORS, piece = n % VECTORS;
        if (y < exist && (COUNT * VECTORS % MEMBERS == 0 || y < COUNT)) {
            uint4 x = *(const uint4*)(slabs + piece / 8 * ROWS * SLAB_ROW + in_slab(first + y, piece % 8));
            if (y >= full)
                x = make_uint4(0, 0, 0, 0);
            *(uint4*)(to + y * stride + 8 * piece) = x;
        }
    }
}

// dQ = scale * sums of 16 rows of each 64 of a block of rows, a quarter of it, so that few blocks of rows have many blocks of threads; the number of this
// one. Each warp has 16 rows and columns after the other; `store(patch, n, ...)` puts those of the n-th 16 columns of its quarter of a patch (ACROSS: of
// the n-th 16 rows of the warp's own) into slabs. Rows of padding hold 0.
constexpr int QUARTERS = 4;
template <int PATCHES, int PATCH, int PATCH_ROWS, bool ACROSS, class Store>
__device__ __forceinline__ void finish_quarter(const Call& call, unsigned number, unsigned char* on_chip, Store store)
{
    const RowBlock place = row_block(call, number / QUARTERS);
    const int which = (int)(number % QUARTERS), lane = threadIdx.x % WARP_LANES;
    const Sequence s = sequence(call, place.b);
    const long long i0 = place.block * BR, rows_end = PACKED ? s.q_length : call.Tq;
    if (PACKED && place.block < 0 || i0 >= rows_end)
        return;
    const float scale = (float)call.scale;
    constexpr int COLUMNS = PATCH / PATCH_ROWS;
    static_assert(COLUMNS / SUM == QUARTERS && PATCH_ROWS == QUARTERS * 16, "a quarter of a patch has as many parts");
#pragma unroll
    for (int part = threadIdx.x / WARP_LANES; part < PATCHES * QUARTERS; part += THREADS / WARP_LANES) {
        const int patch = part / QUARTERS, other = part % QUARTERS, warp = ACROSS ? other : which, n = ACROSS ? which : other;
        const SumsOfBlock sums(call, place.b, place.h, s.q_start, place.block,
                               patch * PATCH + (warp * (ACROSS ? 2 : COLUMNS / 8) * WARP_LANES + lane) * LANE_NUMBERS);
        unsigned x[4];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float4 y = sums[((ACROSS ? 2 * WARPS : 2) * n + e) * WARP_LANES];
            x[2 * e] = pair(y.x * scale, y.y * scale);
            x[2 * e + 1] = pair(y.z * scale, y.w * scale);
        }
        store(patch, n, 16 * which, x);
    }
    __syncthreads();  // the rows are there
    elem* const to = row_of(call.dq, s.slot, place.h, s.q_start + i0);
#pragma unroll
    for (int row = 16 * which; row < BR; row += PATCH_ROWS)
        store_rows<BR, TO_D, D, THREADS, 16>(to + row * call.dq.row, call.dq.row, on_chip, row, (int)(rows_end - i0) - row, (int)(s.q_length - i0) - row);
}
