// FlashAttention-2, forward pass, for few rows of queries against many keys: decoding, in 16 bits.
//
// A block of threads owns a part of the keys of one K/V head and Br rows of the query heads that share it, packed: row r of these is query
// r % Tq of the group's head r / Tq. So K and V are read once, and the time is that of reading them. Its warps take Bc keys in turn, each with
// an O, m and l of its own, which are merged at the end; those of the parts are merged by the block that is the last to end. Both in a fixed
// order, as the online softmax goes on from one step to the next (split over keys: Dao, Haziza, Massa, Sizov, "Flash-Decoding", 2023).
//
// On chip:  K or V, a queue of units of Bc keys for each warp; in registers S = P (Br, Bc), O (Br, dv), m, l; Q (Br, d) where there is room.
// Read per step: K_j and V_j, a step or more ahead. Written once: O and lse, or O, m and l of a part.
//
// A queue is its warp's own, so that no warp waits for another. Rows come 128 bytes at a time, by eight neighbouring lanes: anything else costs
// a third of the rate of memory. They lie in the queue as they are read from it, 16 bytes for each lane, which are operands of tensor-core products without
// further ado, because the numbers of a sum may come in any order: of the 32 numbers that two products sum over d, lane (g, t) takes the eight
// neighbours from 8 t on, of Q and of K; of 64 columns of V the eight neighbours from 8 g on, of the four keys that its operands have. Columns
// 0, 8, ... of the 64 are those of the first product, and so on.

#include "numbers.cuh"
#include "call.cuh"
#include "tile.cuh"
#include "products.cuh"
#include "philox.cuh"
#include "scores.cuh"
#include "softmax.cuh"
#include "mma/halves.cuh"

constexpr int WARPS = THREADS / WARP_SIZE;
constexpr int STEP = 16;            // keys that a warp takes at a time: a product sums over them
constexpr int TURN = WARPS * STEP;  // and all warps
static_assert(BC == STEP, "rows of K or V in a unit");
static_assert(!PACKED, "sequence b is entry b of the arrays");
constexpr int M = BR / 16;          // tensor-core products have 16 rows
constexpr int PIECES_D = ceil_div(D, 32), PIECES_V = ceil_div(DV, 64);  // of 32 numbers of a row of Q or K, of 64 of V
constexpr int SLOTS = most_of(2 * PIECES_D, 4 * PIECES_V);              // of 16 bytes, for each lane: a unit, the rows of K or V of a step
constexpr bool Q_ON_CHIP = M * PIECES_D > 4;  // where O leaves too few registers
constexpr int Q_BYTES = Q_ON_CHIP ? BR * PIECES_D * 32 * (int)sizeof(elem) : 0;
constexpr int UNITS = (TILE_BYTES - Q_BYTES) / (WARPS * WARP_SIZE * SLOTS * VECTOR_BYTES);
static_assert(UNITS >= 2 && TILE_BYTES >= WARPS * M * HALVES * WARP_SIZE * (4 * 16 + 8), "what the queues need, and the end");
static_assert(HALVES == 2 || M == 1, "rows of a product, of which the second eight may not exist");
constexpr int MERGED = 4;  // neighbouring columns that a lane merges
constexpr int MOST_PARTS = 64;
constexpr int EARLY = 16;    // parts whose O is asked for before their weights are known
constexpr long long FEW_STEPS = 16;  // of a warp: of more, the rows of two at once would come too early
constexpr unsigned NONE = ~0u;  // no block of the cache
constexpr bool IN_ONE_BLOCK = PAGE && PAGE % STEP == 0;  // the keys of a step

// Eight neighbouring numbers, two in a word: what a lane copies, and its operands.
struct alignas(VECTOR_BYTES) Piece { unsigned x[4]; };
struct alignas(VECTOR_BYTES) Four { float x[MERGED]; };

__device__ __forceinline__ Four four_of(float4 x) { return {{x.x, x.y, x.z, x.w}}; }

// Where 16 bytes of a row lie in a unit: which they are of the row, K's and V's. Lanes that copy or read at once touch different banks.
__device__ __forceinline__ int key_slot(int r, int x)
{
    return (r / 8 * PIECES_D + x / 4) * WARP_SIZE + ((r % 8 * 4 + x % 4) ^ (x / 4 % 2 * 4));
}

__device__ __forceinline__ int value_slot(int r, int x)
{
    const int n = r % 2 + r / 8 * 2, t = r % 8 / 2;
    return (n * PIECES_V + x / 8) * WARP_SIZE + t * 8 + (x % 8 ^ 2 * t);
}

// A row of a block: query i of a head; rows that only fill the block up do not exist.
struct Query {
    unsigned h;
    long long i;
    bool exists;
};

// The same, with what scores and results want to know of the head.
struct Row {
    Head at;
    long long i;
    bool exists;
};

// Copies of a unit whose rows have COLUMNS numbers, COUNT times 16 bytes. TOGETHER neighbouring lanes copy neighbours; a lane then goes on ROWS
// rows and TOGETHER pieces at a time. Where its pieces lie depends on the lane in two ways only, in turn: these are its `places`.
template <int COLUMNS, int COUNT> struct Copies {
    static constexpr int TOGETHER = COUNT % 8 == 0 ? 8 : 4, ROWS = WARP_SIZE / TOGETHER;
    int row, piece, places[2];

    template <class Slot> __device__ __forceinline__ Copies(const Slot& slot)
        : row(threadIdx.x % WARP_SIZE / TOGETHER), piece(threadIdx.x % TOGETHER)
    {
#pragma unroll
        for (int n = 0; n < 2; n++)
            places[n] = TOGETHER == 8 ? slot(4 * n + row, piece) : slot(row, 4 * n + piece);
    }

    // from(n, exists): where this lane's first piece of row n + this->row is.
    template <class Slot, class From> __device__ __forceinline__ void begin(Piece* to, const Slot& slot, const From& from) const
    {
#pragma unroll
        for (int n = 0; n < STEP; n += ROWS) {
            bool exists;
            const elem* const source = from(n, exists);
#pragma unroll
            for (int x = 0; x < COUNT; x += TOGETHER) {
                Piece* const target = to + places[TOGETHER == 8 ? n / 4 % 2 : x / 4 % 2] + slot(n / 8 * 8, x / 8 * 8);
                const int column = 8 * (x + piece);
                if constexpr (ALIGNED) {
                    copy_to_shared<VECTOR_BYTES, TOGETHER == 8>(target, source + 8 * x, exists && (COLUMNS == 8 * COUNT || column < COLUMNS));
                } else {
#pragma unroll
                    for (int e = 0; e < 8; e++)
                        ((elem*)target)[e] = exists && column + e < COLUMNS ? source[8 * x + e] : elem(0);
                }
            }
        }
    }
};

// The keys that any row sees but for the mask, from the start of a step.
__device__ __forceinline__ void seen_keys(const Call& call, const Sequence& s, int& j_low, int& j_high)
{
    j_low = 0;
    j_high = s.q_length > 0 ? (int)s.kv_length : 0;
    if constexpr (BAND) {
        j_low = (int)clamp(s.offset + call.band_lower, 0, j_high) / STEP * STEP;
        j_high = (int)clamp(s.q_length + s.offset + call.band_upper, 0, j_high);
    }
}

// Ask for the rows of a step at L2, which sees what others write to them. Half of the lanes for K, half for V.
__device__ __forceinline__ void ask_for_rows(const Call& call, unsigned b, unsigned h_kv, int first, int j_high, unsigned block)
{
    static_assert(WARP_SIZE == 2 * STEP, "a row for each lane");
    constexpr bool WHOLE = ALIGNED && D % 8 == 0 && DV % 8 == 0;  // rows of whole 16 bytes
    const long long j = first + threadIdx.x % STEP;
    if (!WHOLE || j >= j_high || (PAGE && block == NONE))
        return;
    const bool values = threadIdx.x % WARP_SIZE >= STEP;
    const Place place = place_in(call, Sequence{b, b}, j, block);
    ask_for_memory(row_of(values ? call.v : call.k, place.slot, h_kv, place.t), (values ? DV : D) * (int)sizeof(elem));
}

// Among how many parts the turns of these keys go round, at least one. The lengths decide, which only the device may know.
__device__ __forceinline__ int parts_of(const Call& call, int j_low, int j_high)
{
    const unsigned turns = (unsigned)(most(j_high - j_low, 0) + TURN - 1) / TURN, least_turns = (unsigned)call.part_keys / TURN;
    if (turns >= least_turns * (unsigned)call.parts)  // which needs no division
        return (int)call.parts;
    return (int)most(turns / least_turns, 1);
}

__device__ __forceinline__ long long rows_of_part(const Call& call) { return call.B * call.Hq * call.Tq; }

__device__ __forceinline__ float* sums_of_part(const Call& call, const Head& at, int part, long long i)
{
    return sums_of(call, at.s.slot, at.h, i, DV) + part * rows_of_part(call) * DV;
}

__device__ __forceinline__ float* of_part(const Call& call, const Statistic& statistic, const Head& at, int part, long long i)
{
    return row_of(statistic, at.s.slot, at.h, i) + part * rows_of_part(call);
}

// to[column ...] = factor * four of DV numbers, or zeros.
__device__ __forceinline__ void store_four(elem* to, int column, const Four& sums, float factor, bool empty)
{
    struct alignas(ALIGNED ? MERGED * sizeof(elem) : sizeof(elem)) Chunk { elem x[MERGED]; } chunk;
#pragma unroll
    for (int n = 0; n < MERGED; n++)
        chunk.x[n] = narrow<TYPE>(empty ? 0.0f : sums.x[n] * factor);
    if constexpr (ALIGNED) {
        if (column < DV)
            *reinterpret_cast<Chunk*>(to + column) = chunk;
    } else {
#pragma unroll
        for (int n = 0; n < MERGED; n++)
            if (column + n < DV)
                to[column + n] = chunk.x[n];
    }
}

// O, m and l of a row complete, four columns of them: out and lse.
__device__ __forceinline__ void finish_four(
    const Call& call, const Head& at, long long i, int column, const Four& sums, float m, float l, bool writes_lse)
{
    float factor = 0, lse = -INFINITE;
    if (i < at.s.q_length)
        factor = finish_row(call, at, m, l, lse);
    if constexpr (DROPOUT)
        factor *= float(call.keep_scale);
    store_four(row_of(call.o, at.s.slot, at.h, i), column, sums, factor, i >= at.s.q_length || l == 0);
    if (writes_lse)
        store_lse(call, at.s.slot, at.h, i, lse);
}

// O, m and l of all parts of a row -> O = O / l, lse. By a warp; other blocks have written them, so not from the cache of this multiprocessor.
__device__ __forceinline__ void merge_parts(const Call& call, const Head& at, int parts, long long i)
{
    const Sequence& s = at.s;
    auto read = [&](int part, int column) {
        const float* const from = sums_of_part(call, at, part, i) + column;
        Four O = {};
        if (DV % MERGED == 0) {
            if (i < s.q_length && part < parts && column < DV)
                O = four_of(__ldcg(reinterpret_cast<const float4*>(from)));
        } else {
#pragma unroll
            for (int n = 0; n < MERGED; n++)
                O.x[n] = i < s.q_length && part < parts && column + n < DV ? __ldcg(from + n) : 0.0f;
        }
        return O;
    };
    // A lane for each part: its weight; then a lane for every few columns. All that can be is asked for first, as each answer takes as long
    // as a step.
    const int lane = threadIdx.x % WARP_SIZE;
    float m = -INFINITE, l = 0, weight[MOST_PARTS / WARP_SIZE], sum[MOST_PARTS / WARP_SIZE];
#pragma unroll
    for (int n = 0; n < MOST_PARTS / WARP_SIZE; n++) {
        const int part = n * WARP_SIZE + lane;
        const bool exists = i < s.q_length && part < parts;
        weight[n] = exists ? __ldcg(of_part(call, call.m, at, part, i)) : -INFINITE;
        sum[n] = exists ? __ldcg(of_part(call, call.l, at, part, i)) : 0.0f;
    }
    Four early[EARLY];
#pragma unroll
    for (int part = 0; part < EARLY; part++)
        early[part] = read(part, lane * MERGED);
#pragma unroll
    for (int n = 0; n < MOST_PARTS / WARP_SIZE; n++)
        m = larger(m, weight[n]);
    m = maximum_of_lanes<WARP_SIZE>(m);
    const float shift = m == -INFINITE ? 0.0f : m;
#pragma unroll
    for (int n = 0; n < MOST_PARTS / WARP_SIZE; n++) {
        weight[n] = exponential(weight[n] - shift);
        l += weight[n] * sum[n];
    }
    l = sum_of_lanes<WARP_SIZE>(l);
    for (int first = 0; first < DV; first += WARP_SIZE * MERGED) {
        const int column = first + lane * MERGED;
        Four O = {};
        auto add = [&](int part, const Four& more) {
            const float its = __shfl_sync(WARP, part < WARP_SIZE ? weight[0] : weight[1], part % WARP_SIZE);
#pragma unroll
            for (int n = 0; n < MERGED; n++)
                O.x[n] += its * more.x[n];
        };
        if (first == 0) {
#pragma unroll
            for (int part = 0; part < EARLY; part++)
                add(part, early[part]);
        }
#pragma unroll 8
        for (int part = first == 0 ? EARLY : 0; part < parts; part++)
            add(part, read(part, column));
        finish_four(call, at, i, column, O, m, l, column == 0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) fa2_few_rows(const __grid_constant__ Call call)
{
    extern __shared__ __align__(VECTOR_BYTES) unsigned char on_chip[];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const unsigned row_blocks = (unsigned)call.blocks, most_parts = (unsigned)call.parts, heads = (unsigned)call.Hkv, queries = (unsigned)call.Tq;
    unsigned row_block = 0, bh = blockIdx.x;
    int part = 0;
    if (row_blocks > 1)  // divisions take as long as rows from L2
        row_block = bh % row_blocks, bh /= row_blocks;
    if (most_parts > 1)
        part = (int)(bh % most_parts), bh /= most_parts;
    const unsigned b = bh / heads, h_kv = bh - b * heads;

    // Which keys are a warp's: lengths say it, and of a paged cache the table says where they lie. Kernels before this one may be writing both, and
    // end now: they are read as they are, and believed until rows have been asked for by them.
    let_next_grid_begin();
    const Asked believed = ask_for_sequence(call, b);

    // What does not depend on them is computed while they are on their way. The queue: 16 rows of K, then of V, and so on
    Piece* const queue = (Piece*)on_chip + warp * UNITS * SLOTS * WARP_SIZE;
    const Copies<D, 4 * PIECES_D> of_K(key_slot);
    const Copies<DV, 8 * PIECES_V> of_V(value_slot);
    const long long entry_of_arrays = PAGE ? 0 : b;  // a block of a paged cache adds its own
    const elem* const from_K = computed_here(row_of(call.k, entry_of_arrays, h_kv, of_K.row) + 8 * of_K.piece);
    const elem* const from_V = computed_here(row_of(call.v, entry_of_arrays, h_kv, of_V.row) + 8 * of_V.piece);
    const long long row_K = in_register(call.k.row), row_V = in_register(call.v.row);
    const long long block_K = PAGE ? in_register(call.k.batch) : 0, block_V = PAGE ? in_register(call.v.batch) : 0;
    const table_entry* const table = PAGE ? computed_here((const table_entry*)call.block_table.data + b * call.table_row) : nullptr;
    const unsigned group = (unsigned)call.Hq / heads;
    auto query_of = [&](int n) {
        const unsigned row = row_block * BR + n, of_group = queries == 1 ? row : row / queries;
        const bool exists = row < group * queries;
        return Query{h_kv * group + (exists ? of_group : 0), exists ? row - of_group * queries : 0, exists};
    };
    const elem* from_Q[M][HALVES];
    int of_head[M][HALVES];  // which row of a head it is; those that do not exist come behind all
#pragma unroll
    for (int r = 0; r < M; r++)
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            const Query query = query_of(16 * r + 8 * half + g);
            from_Q[r][half] = computed_here(row_of(call.q, b, query.h, query.i) + 8 * t);
            of_head[r][half] = query.exists ? (int)query.i : (int)call.Tq;
        }

    Sequence s = sequence(call, b, believed);
    auto row_at = [&](int n) {
        const Query query = query_of(n);
        return Row{head(call, s, query.h), query.i, query.exists};
    };
    int j_low, j_high, parts, stride, first_of_warp;
    auto share_out = [&]() {
        seen_keys(call, s, j_low, j_high);
        parts = parts_of(call, j_low, j_high), stride = parts * TURN;
        first_of_warp = j_low + part * TURN + warp * STEP;
    };
    share_out();
    int asked_for = first_of_warp, steps = 0;  // key of the next unit; steps that were asked for
    unsigned exist = 0;                        // a bit for each of them: does its block exist? The last one's is the lowest
    // What the table says, if all keys of a step are in one block: a lane knows it for the n-th of 32 steps, and for that of the next 32, asked for
    // long before, as it waits behind all the rows that are under way.
    auto step_of_lane = [&](int first) { return first + lane * stride; };
    auto look_up = [&](int first) {
        const int j = step_of_lane(first);
        return IN_ONE_BLOCK && j < j_high ? table[(unsigned)j / (unsigned)PER_BLOCK] : table_entry(-1);
    };
    auto known = [&](table_entry found) { return 0 <= found && found < call.cache_blocks ? (unsigned)found : NONE; };
    unsigned block = NONE, now = NONE;
    if (IN_ONE_BLOCK && step_of_lane(asked_for) < j_high)
        now = known(__ldcg(table + (unsigned)step_of_lane(asked_for) / (unsigned)PER_BLOCK));  // past L1, where it would stay
    ask_for_rows(call, b, h_kv, first_of_warp, j_high, __shfl_sync(WARP, now, 0));
    if (call.Tk <= FEW_STEPS * stride)
        ask_for_rows(call, b, h_kv, first_of_warp + stride, j_high, __shfl_sync(WARP, now, 1));

    table_entry next;
    auto ask_for = [&](bool values, int unit) {
        bool there = false;
        if (asked_for < j_high) {
            Piece* const to = queue + unit * SLOTS * WARP_SIZE;
            const elem* first = values ? from_V : from_K;
            const long long its_row = values ? row_V : row_K;
            there = true;
            if constexpr (IN_ONE_BLOCK) {
                if (!values)
                    block = __shfl_sync(WARP, now, steps % WARP_SIZE);
                there = block != NONE;
                first += (there ? block : 0) * (values ? block_V : block_K) + (PAGE == STEP ? 0 : (unsigned)asked_for % PAGE) * its_row;
            } else if (PAGE == 0) {
                first += asked_for * its_row;
            }
            const int left = there ? j_high - asked_for : 0;
            auto from = [&](int row, int piece, int n, bool& exists) {
                exists = n + row < left;
                if constexpr (!PAGE || IN_ONE_BLOCK)
                    return first + n * its_row;
                const long long j = asked_for + n + row;
                const Place place = exists ? place_in(call, {}, j, block_of(call, b, j)) : Place{0, 0, false};
                exists = place.exists;
                return (const elem*)row_of(values ? call.v : call.k, place.slot, h_kv, place.t) + 8 * piece;
            };
            if (values)
                of_V.begin(to, value_slot, [&](int n, bool& exists) { return from(of_V.row, of_V.piece, n, exists); });
            else
                of_K.begin(to, key_slot, [&](int n, bool& exists) { return from(of_K.row, of_K.piece, n, exists); });
        }
        if (values) {
            asked_for += stride;
            steps++;
            if (IN_ONE_BLOCK && steps % WARP_SIZE == 0) {
                now = known(next);
                next = look_up(asked_for + WARP_SIZE * stride);
            }
        } else {
            exist = exist << 1 | there;
        }
        commit_group();
    };
    // It is asked for before K and V: what comes behind them arrives when all of the queue has
    Piece Q[M][HALVES][PIECES_D];
    auto load_Q = [&]() {
#pragma unroll
        for (int r = 0; r < M; r++)
#pragma unroll
            for (int half = 0; half < HALVES; half++)
#pragma unroll
                for (int x = 0; x < PIECES_D; x++) {
                    const elem* const from = from_Q[r][half] + 32 * x;
                    const bool exists = of_head[r][half] < s.q_length;
                    if constexpr (ALIGNED) {
                        const uint4 words = load_if(from, exists && 32 * x + 8 * t < D);
                        Q[r][half][x] = {{words.x, words.y, words.z, words.w}};
                    } else {
                        Q[r][half][x] = {};
#pragma unroll
                        for (int n = 0; n < 8; n++)
                            Q[r][half][x].x[n / 2] |= (exists && 32 * x + 8 * t + n < D ? (unsigned)from[n] : 0u) << 16 * (n % 2);
                    }
                }
    };
    constexpr int BEGUN = UNITS / 2;  // steps whose K is asked for
    await_grids_before();
#pragma unroll 1
    for (;;) {
        // All that was believed is read once more, at one time
        const Asked asked = ask_for_sequence(call, b);
        const table_entry said = look_up(first_of_warp);
        if (part < parts) {
            if (!Q_ON_CHIP || warp == 0)
                load_Q();
            __syncwarp();  // in this order, which the compiler would change
#pragma unroll
            for (int unit = 0; unit < UNITS - 1; unit++)
                ask_for(unit % 2, unit);
        }
        // Whole steps, of the same blocks, are what was wanted even if there are more keys now, or fewer
        unsigned found = known(said);
        const int first = first_of_warp, distance = stride, end = first + (BEGUN - 1) * distance + STEP, high = j_high;
        const long long rows_before = s.q_length;
        s = sequence(call, b, asked);
        share_out();
        const bool same_steps = first == first_of_warp && distance == stride;
        const bool kept = rows_before == s.q_length && same_steps && (high == j_high || (end <= high && end <= j_high)) &&
                          (lane >= BEGUN || found == now);
        if (!same_steps || high != j_high)
            found = known(look_up(first_of_warp));
        now = found, next = look_up(first_of_warp + WARP_SIZE * stride);
        if (__all_sync(WARP, kept))
            break;
        await_groups<0>();
        asked_for = first_of_warp, steps = 0, exist = 0;
    }
    if (part >= parts)
        return;

    Row rows[M][HALVES];
#pragma unroll
    for (int r = 0; r < M; r++)
#pragma unroll
        for (int half = 0; half < HALVES; half++)
            rows[r][half] = row_at(16 * r + 8 * half + g);
    Piece* const Q_tile = (Piece*)(on_chip + TILE_BYTES - Q_BYTES) + lane;
    auto q_slot = [](int r, int half, int x) { return ((r * 2 + half) * PIECES_D + x) * WARP_SIZE; };
    if (Q_ON_CHIP && warp == 0) {
#pragma unroll
        for (int r = 0; r < M; r++)
#pragma unroll
            for (int half = 0; half < HALVES; half++)
#pragma unroll
                for (int x = 0; x < PIECES_D; x++)
                    Q_tile[q_slot(r, half, x)] = Q[r][half][x];
    }

    if constexpr (Q_ON_CHIP)
        __syncthreads();  // Q is there

    float O[M][PIECES_V][8][4], m[M][HALVES], l[M][HALVES];
#pragma unroll
    for (int r = 0; r < M; r++) {
#pragma unroll
        for (int x = 0; x < PIECES_V; x++)
            fill(O[r][x], 0.0f);
#pragma unroll
        for (int half = 0; half < HALVES; half++)
            m[r][half] = -INFINITE, l[r][half] = 0;
    }

    int unit = 0;
    for (int j0 = first_of_warp; j0 < j_high; j0 += stride) {
        // S = Q K^T
        await_groups<UNITS - 2>();
        __syncwarp();  // K_j is there, and no lane reads the unit before any more
        ask_for(UNITS % 2 == 0, unit == 0 ? UNITS - 1 : unit - 1);
        float S[M][2][4];
#pragma unroll
        for (int r = 0; r < M; r++)
            fill(S[r], 0.0f);
#pragma unroll
        for (int x = 0; x < PIECES_D; x++) {
            Piece K[2];
#pragma unroll
            for (int n = 0; n < 2; n++)
                K[n] = queue[unit * SLOTS * WARP_SIZE + key_slot(8 * n + g, 4 * x + t)];
#pragma unroll
            for (int r = 0; r < M; r++) {
                Piece q[2] = {};
#pragma unroll
                for (int half = 0; half < HALVES; half++)
                    q[half] = Q_ON_CHIP ? Q_tile[q_slot(r, half, x)] : Q[r][half][x];
#pragma unroll
                for (int y = 0; y < 4; y += 2)
#pragma unroll
                    for (int n = 0; n < 2; n++)
                        multiply(S[r][n], {q[0].x[y], q[1].x[y], q[0].x[y + 1], q[1].x[y + 1]}, {K[n].x[y], K[n].x[y + 1]});
            }
        }
        unit = unit + 1 == UNITS ? 0 : unit + 1;

        // Scores; hidden ones -inf
        constexpr int AHEAD = (UNITS - 1) / 2;  // units of K that were asked for since
        bool full = !HAS_MASK && j0 + STEP <= j_high;
        if constexpr (BAND)
            full = full && band_tile(call.band_lower, call.band_upper, 0, call.Tq, j0, j0 + STEP, s.offset) == FULL;
        if constexpr (PAGE)
            full = full && IN_ONE_BLOCK && (exist >> AHEAD & 1);
        auto scores = [&](bool sees_all) {
#pragma unroll
            for (int r = 0; r < M; r++)
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    float& x = S[r][n / 4][n % 4];
                    const int half = n % 4 / 2;
                    if (half >= HALVES)  // no such rows: 0, as the products are
                        continue;
                    const int j = j0 + 8 * (n / 4) + 2 * t + n % 2;
                    float unused;
                    if (sees_all || (j < j_high && visible(call, rows[r][half].at, rows[r][half].i, j)))
                        x = score(call, rows[r][half].at, x, rows[r][half].i, j, unused);
                    else
                        x = -INFINITE;
                }
        };
        if (full)
            scores(true);
        else
            scores(false);

        // m_new = max(m, rowmax(S)); P = exp(S - m_new); l = alpha l + rowsum(P)
        float alpha[M][HALVES];
        bool same = true;
#pragma unroll
        for (int r = 0; r < M; r++)
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                float highest = S[r][0][2 * half];
#pragma unroll
                for (int n = 1; n < 4; n++)
                    highest = larger(highest, S[r][n / 2][2 * half + n % 2]);
                highest = larger(m[r][half], maximum_of_lanes<4>(highest));
                const float shift = highest == -INFINITE ? 0.0f : highest;
                alpha[r][half] = exponential(m[r][half] - shift);
                same = same && highest == m[r][half];
                m[r][half] = highest;
                float total = 0;
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    float& x = S[r][n / 2][2 * half + n % 2];
                    x = exponential(x - shift);
                    total += x;
                    if constexpr (DROPOUT)
                        x = kept(call, s.b, rows[r][half].at.h, rows[r][half].i, j0 + 8 * (n / 2) + 2 * t + n % 2) ? x : 0.0f;
                }
                l[r][half] = l[r][half] * alpha[r][half] + total;
            }

        // O = alpha O + P V
        if (!__all_sync(WARP, same)) {
#pragma unroll
            for (int r = 0; r < M; r++)
#pragma unroll
                for (int x = 0; x < PIECES_V; x++)
#pragma unroll
                    for (int n = 0; n < 8; n++)
#pragma unroll
                        for (int c = 0; c < 2 * HALVES; c++)
                            O[r][x][n][c] *= alpha[r][c / 2];
        }
        await_groups<UNITS - 2>();
        __syncwarp();  // V_j is there, and no lane reads K_j any more
        ask_for(UNITS % 2 == 1, unit == 0 ? UNITS - 1 : unit - 1);
        unsigned P[M][4];
#pragma unroll
        for (int r = 0; r < M; r++)
#pragma unroll
            for (int n = 0; n < 4; n++)
                P[r][n] = pair_of(S[r][n / 2][n % 2 * 2], S[r][n / 2][n % 2 * 2 + 1]);
#pragma unroll
        for (int x = 0; x < PIECES_V; x++) {
            Piece V[4];
#pragma unroll
            for (int n = 0; n < 4; n++)
                V[n] = queue[unit * SLOTS * WARP_SIZE + value_slot(2 * t + n % 2 + 8 * (n / 2), 8 * x + g)];
#pragma unroll
            for (int n = 0; n < 8; n++) {  // column 64 x + 8 g + n of two keys each in a word
                const unsigned halves = n % 2 ? 0x7632 : 0x5410;
                const unsigned b[2] = {__byte_perm(V[0].x[n / 2], V[1].x[n / 2], halves), __byte_perm(V[2].x[n / 2], V[3].x[n / 2], halves)};
#pragma unroll
                for (int r = 0; r < M; r++)
                    multiply(O[r][x][n], P[r], b);
            }
        }
        unit = unit + 1 == UNITS ? 0 : unit + 1;
    }
    await_groups<0>();

    // O, m and l of all warps, merged: as many columns at a time as there is room for, of which a warp takes four from every lane
    constexpr int ROWS = M * HALVES, AT_ONCE = WARPS * ROWS * WARP_SIZE * (PIECES_V * 4 * 16 + 8) <= TILE_BYTES ? PIECES_V : 1;
    Four* const sums = (Four*)on_chip + lane;
    float2* const statistics = (float2*)(on_chip + WARPS * ROWS * AT_ONCE * 4 * WARP_SIZE * sizeof(Four)) + lane;
#pragma unroll
    for (int first = 0; first < PIECES_V; first += AT_ONCE) {
        __syncthreads();  // nobody reads the queues, or the columns before, any more
#pragma unroll
        for (int n = 0; n < ROWS; n++) {
            const int r = n / HALVES, half = n % HALVES;
#pragma unroll
            for (int c = 0; c < 4 * AT_ONCE; c++) {  // columns 16 t + 4 (c % 4) ... of 64
                Four some;
#pragma unroll
                for (int x = 0; x < MERGED; x++)
                    some.x[x] = O[r][first + c / 4][4 * (c % 2) + x][2 * half + c % 4 / 2];
                sums[((warp * ROWS + n) * 4 * AT_ONCE + c) * WARP_SIZE] = some;
            }
            if (first == 0)
                statistics[(warp * ROWS + n) * WARP_SIZE] = make_float2(m[r][half], sum_of_lanes<4>(l[r][half]));
        }
        __syncthreads();  // O, m and l of all warps are there
#pragma unroll 1
        for (int some = warp; some < ROWS * 4 * AT_ONCE; some += WARPS) {
            const int n = some / (4 * AT_ONCE), c = some % (4 * AT_ONCE), column = 64 * (first + c / 4) + 16 * t + MERGED * (c % 4);
            const Row its = row_at(16 * (n / HALVES) + 8 * (n % HALVES) + g);
            if (!its.exists)
                continue;
            float highest = -INFINITE, total = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                highest = larger(highest, statistics[(w * ROWS + n) * WARP_SIZE].x);
            const float shift = highest == -INFINITE ? 0.0f : highest;
            Four merged = {};
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const float2 of_warp = statistics[(w * ROWS + n) * WARP_SIZE];
                const float weight = exponential(of_warp.x - shift);
                const Four more = sums[((w * ROWS + n) * 4 * AT_ONCE + c) * WARP_SIZE];
                total += weight * of_warp.y;
#pragma unroll
                for (int x = 0; x < MERGED; x++)
                    merged.x[x] += weight * more.x[x];
            }
            const bool first_of_row = column == 0;
            if (parts == 1) {
                finish_four(call, its.at, its.i, column, merged, highest, total, first_of_row);
            } else if (its.i < s.q_length) {  // merge_parts does the rest
                float* const to = sums_of_part(call, its.at, part, its.i);
#pragma unroll
                for (int x = 0; x < MERGED; x++)
                    if (column + x < DV)
                        to[column + x] = merged.x[x];
                if (first_of_row) {
                    *of_part(call, call.m, its.at, part, its.i) = highest;
                    *of_part(call, call.l, its.at, part, its.i) = total;
                }
            }
        }
    }

    // The block that is the last of its keys' to end merges the parts, and leaves the counter at zero
    if (parts == 1)
        return;
    __syncthreads();  // O, m and l of this part are written before they are counted
    bool* const last = (bool*)on_chip;
    if (threadIdx.x == 0)
        *last = count_and_see(call.counters + bh * row_blocks + row_block, parts - 1) == parts - 1;
    __syncthreads();
    if (!*last)
        return;
#pragma unroll 1
    for (int n = warp; n < BR; n += WARPS) {
        const Row its = row_at(n);
        if (its.exists)
            merge_parts(call, its.at, parts, its.i);
    }
}
