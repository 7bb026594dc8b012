// FlashAttention-2, forward pass of 16-bit numbers on sm_90 (Dao 2024, algorithm 1, with the means of FlashAttention-3: Shah et al. 2024).
//
// A block of threads takes piece after piece: Br rows of one query head. Its first warpgroup has one thread that begins copies; each of the others
// owns 64 of the rows. Q blocks outside, K/V blocks inside, from the last keys to the first; O, m and l stay in registers and are written once.
//
// On chip:  Q (Br, d), Q_BUFFERS of them; K (Bc, d) and V (Bc, dv), STAGES of each; O (Br, dv) on its way out, which where there is no room for it
// (OWN_O is 0) leaves from registers; the barriers and what pieces are. In registers S, P (64, Bc) and O (64, dv) of a warpgroup, m, l; Q (64, d) too
// where there is room (Q_STAYS): then products read half as much of shared memory, or two thirds.
// Read per step: K_j and V_j, up to STAGES steps ahead. Written once: O_i, lse_i.
//
// A step begins S_j = Q K_j^T and O += P_{j-1} V_{j-1}, waits for the first, and takes the exponentials of S_j while the second runs. Where TURNS
// says so, warpgroups begin their products in turn, so that one has products under way while another takes exponentials.
//
// The maximum. P = exp(S - m) may be above 1, up to 2^16 in float16 and far more in bfloat16, which has the exponents of float32: with STATIC_MAXIMUM,
// m is the maximum of the first blocks, those up to the last key of the first row, by which each row has seen a key if it sees any; it then stays.
// That is the same O / l. Where it is not (l of 2^64 or more; something is not finite, as O is where a P of float16 was not), the piece is done again
// by steps whose every score is at most the maximum and whose numbers overflow only if the result does. Without it, m follows from a distance: the
// way of float16, where one key with most of the weight (an attention sink) would have all pieces done again.
//
// BALANCED: blocks of threads end together. Whole pieces would leave many of them idle in the end, so of the last pieces all blocks of keys are put
// in one line and shared out evenly. Each takes, in this order, the end of a piece that another has begun, whole pieces, and the begin of one more.
// O, m and l of an end go to device memory, and to who has begun the piece: that is done last, when the others have long been there.

#include "numbers.cuh"
#include "call.cuh"
#include "tile.cuh"
#include "products.cuh"
#include "philox.cuh"
#include "scores.cuh"
#include "softmax.cuh"
#include "padding.cuh"
#include "sm90/hopper.cuh"
#include "sm90/tanh.cuh"

constexpr int ROWS = 64;  // of a warpgroup
constexpr int CONSUMERS = BR / ROWS, WARP_SIZE = 32, WARPS = 4 * CONSUMERS;
constexpr bool BESIDE = CONSUMERS < 4;  // exponentials beside the warpgroup's own products; beside those of four there are others' anyhow
constexpr int ALL_THREADS = WARPGROUP * (1 + CONSUMERS), WARP_ROWS = 16;
constexpr int SLABS_D = ceil_div(D, SLAB), SLABS_V = ceil_div(DV, SLAB);
constexpr int Q_BYTES = BR * SLABS_D * SLAB_ROW, K_BYTES = BC * SLABS_D * SLAB_ROW;
constexpr int V_BYTES = BC * SLABS_V * SLAB_ROW, O_BYTES = BR * SLABS_V * SLAB_ROW;
constexpr int AT_K = Q_BUFFERS * Q_BYTES, AT_V = AT_K + STAGES * K_BYTES, AT_O = AT_V + STAGES * V_BYTES;
constexpr int AT_REST = AT_O + OWN_O * O_BYTES;
static_assert(BR % ROWS == 0 && BC % 16 == 0 && K_BYTES % SLAB_ALIGNMENT == 0, "rows of products, slabs");
static_assert(!(BALANCED && (DYNAMIC || BAND || RAGGED || PACKED)), "pieces are alike");
static_assert(BC / 4 <= 32, "a bit for each column of a thread");
constexpr float MOST_SHIFT = 16777216.0f;  // 2^24 powers of two: up to there m, multiplied by the scale, is rounded by 1/2 at most
// Columns of O: the fewest that there is a product for.
constexpr int WIDTH = DV <= 16 ? 16 : DV <= 32 ? 32 : DV <= 64 ? 64 : DV <= 80 ? 80 : DV <= 96 ? 96 : DV <= 128 ? 128 : DV <= 160 ? 160 :
                      DV <= 192 ? 192 : 256;
constexpr float MOST_SUM = 18446744073709551616.0f;  // 2^64
constexpr float GROWTH = 8.0f, MOST_LAG = 256.0f;    // of a maximum, in powers of two, that is let pass: P is up to 2^8 then
constexpr int FAR = 1 << 30;                         // farther than any key
constexpr int FIRST_TURN = 1, FIRST_OWN = 8;         // barriers: of the turns, of a warpgroup
constexpr unsigned NONE = ~0u;
constexpr int FOR_ANOTHER = -1;                      // the block of threads that has the last keys of the piece
constexpr int SUMS = WIDTH / 8;                      // vectors of O of a thread; one more has its l and m
constexpr float LN2 = 0.6931471805599453f;
// Blocks of keys of a piece, as they are gone through: 0 is that of the last keys.
struct Share { int from, to; };

// Which blocks of keys some rows see.
struct alignas(16) Steps {
    int before, count;  // those of the piece that come before, and are not seen; those that are, or some of
    int exact, plain;   // those at the beginning that give the maximum, some of them to be masked; then those that all rows see all of
};

// A piece of work, for the warpgroups: what it is, and which blocks of keys in which order. Numbers of keys are relative to the sequence.
struct alignas(16) Piece {
    unsigned number;       // NONE: there are no more
    int batch, head, row;  // where row 0 of the block lies in the arrays
    int k_head, k_row;     // where key 0 lies
    int rows, stored;      // rows of the block that are the sequence's, and that are written
    int blocks;            // of keys
    int others;            // blocks of threads that have further blocks of keys of it, or FOR_ANOTHER
    Steps steps[EVERY_OWN ? CONSUMERS : 1];  // of ROWS each, or of all
    int start;             // first key of the first block
    int keys;              // end of the sequence
    int lower, upper;      // row r sees the keys lower + r <= j < upper + r
    float slope;
    long long position;    // of row 0 on the key axis
};

// All blocks of keys of the pieces that are shared, as the blocks of threads take them.
struct Line {
    unsigned whole;       // pieces before it, which are not shared
    unsigned each, more;  // blocks of keys of a share; of the first `more` shares, one more
    unsigned at, end;     // this block of threads: what is left of its share
};

// Where there is one place for Q, is the next piece described while it is taken? Shared pieces leave no register for it.
constexpr bool EARLY = Q_BUFFERS == 1 && !BALANCED;
constexpr unsigned DESCRIBED = EARLY ? 2 : Q_BUFFERS;

struct Rest {
    Barrier full_Q[Q_BUFFERS], empty_Q[Q_BUFFERS], full_K[STAGES], empty_K[STAGES], full_V[STAGES], empty_V[STAGES];
    Barrier settled;  // no warp has anything to add to the list of pieces to be done again
    Barrier parts;    // what others have of the last piece is there
    Piece piece[DESCRIBED];
    unsigned first_again, last_again;  // its first entry, and the piece that was added last
    Line line;
    float pin[CONSUMERS * WARPGROUP];
};
static_assert(AT_REST + sizeof(Rest) <= TILE_BYTES, "what the plan says");

__device__ __forceinline__ int within(int x, int most) { return x < 0 ? 0 : x < most ? x : most; }

__device__ __forceinline__ unsigned pieces_of(const Call& call) { return (unsigned)(call.blocks * (PACKED ? 1 : call.B) * call.Hq); }

// The rows from `from` to before `to`, of which row r sees the keys lower + r <= j < upper + r. `first` is the number of the piece's first block;
// `none`, how many that has, are before what sees nothing.
__device__ __forceinline__ Steps steps_of(int lower, int upper, int keys, int from, int to, int first, int none)
{
    // The keys from low to high; the first row's last one is before `seen`, the last row's first one is at `whole`
    int low = 0, high = from < to ? keys : 0, seen = high, whole = 0;
    if constexpr (BAND) {
        low = within(lower + from, high);
        whole = within(lower + to - 1, high);
        seen = within(upper + from, high);
        high = within(upper + to - 1, high);
    }
    if (low >= high)
        return {none, 0, 0, 0};
    const int end = low / BC, begin = (high - 1) / BC, gives = seen > 0 ? (seen - 1) / BC : 0;
    const int exact = begin - (gives > end ? gives : end) + 1;
    const int plain = begin - exact + 1 - (whole + BC - 1) / BC;  // blocks that begin after `whole`
    return {first - begin, begin - end + 1, exact, plain > 0 ? plain : 0};
}

// The block of threads, as shares are counted: who waits for another one has begun later.
__device__ __forceinline__ unsigned place_in_line() { return BALANCED ? gridDim.x - 1 - blockIdx.x : blockIdx.x; }

__device__ __forceinline__ unsigned key_blocks(const Call& call) { return (unsigned)(call.Tk + BC - 1) / BC; }

// Of the pieces, two for each block of threads at most are shared.
__device__ __forceinline__ Line line_of(const Call& call)
{
    const unsigned pieces = pieces_of(call), times = pieces / gridDim.x, whole = times < 2 ? 0 : (times - 1) * gridDim.x;
    const unsigned all = (pieces - whole) * key_blocks(call), each = all / gridDim.x, more = all % gridDim.x, who = place_in_line();
    const unsigned begin = who * each + (who < more ? who : more);
    return {whole, each, more, begin, begin + each + (who < more)};
}

// What the next lines need is read again: few registers are left to the warpgroup that copies.
__device__ __forceinline__ void forget() { asm volatile("" ::: "memory"); }

// Longest first: under a causal mask the last rows have the most keys; of as many heads as leave their K and V in L2. PACKED: one sequence after the
// other. Where all are alike, the blocks of one head after the other. Returned: has the piece rows that are to be written?
__device__ __forceinline__ bool describe(volatile Piece& piece, const Call& call, unsigned number, const Share& share)
{
    const unsigned blocks = (unsigned)call.blocks, heads = (unsigned)call.Hq;
    unsigned block, bh;
    if constexpr (DYNAMIC) {
        const unsigned section = (unsigned)call.section;
        const unsigned first = number / (section * blocks) * section, left = number % (section * blocks);
        const unsigned others = (PACKED ? 1 : (unsigned)call.B) * heads - first, width = section < others ? section : others;
        block = blocks - 1 - left / width;
        bh = first + left % width;
    } else {
        block = number % blocks;
        bh = number / blocks;
    }
    unsigned b = bh / heads, h = bh % heads;
    if constexpr (PACKED) {
        const InLine place = in_line<BR>(call, call.cu_seqlens_q, call.rows_q, (int)block);
        if (place.block < 0)
            return false;
        b = (unsigned)place.b, h = bh, block = (unsigned)place.block;
    }
    const int i0 = (int)block * BR;
    int q_start = 0, length = (int)call.Tq, rows_end = length;
    if constexpr (PACKED) {
        q_start = (int)clamp(entry(call.cu_seqlens_q, b, 0), 0, call.rows_q);
        length = rows_end = (int)clamp(entry(call.cu_seqlens_q, b + 1, 0), q_start, call.rows_q) - q_start;
    } else if (RAGGED) {
        length = (int)clamp(entry(call.q_lengths, b, length), 0, length);
    }
    if (i0 >= rows_end)
        return false;
    piece.number = number;
    piece.batch = PACKED ? 0 : (int)b;
    piece.head = (int)h;
    piece.k_head = (int)(h / (heads / (unsigned)call.Hkv));
    piece.row = q_start + i0;
    piece.rows = length - i0 < BR ? length - i0 : BR;
    piece.stored = rows_end - i0 < BR ? rows_end - i0 : BR;
    if constexpr (ALIBI)
        piece.slope = widen<SLOPE_TYPE>(((const Storage<SLOPE_TYPE>::stored*)call.slopes)[b * call.slopes_b + h * call.slopes_h]);
    forget();
    int k_start = 0, keys = (int)call.Tk;
    if constexpr (PACKED) {
        k_start = (int)clamp(entry(call.cu_seqlens_k, b, 0), 0, call.rows_k);
        keys = (int)clamp(entry(call.cu_seqlens_k, b + 1, 0), k_start, call.rows_k) - k_start;
    } else if (RAGGED) {
        keys = (int)clamp(entry(call.kv_lengths, b, keys), 0, keys);
    }
    piece.k_row = k_start;
    piece.keys = keys;

    int lower = 0, upper = 0;
    if constexpr (BAND || ALIBI) {
        const long long given = call.offset_given ? call.offset : keys - length;
        const long long position = i0 + clamp(entry(call.q_offset, b, given), -FARTHEST, FARTHEST);
        piece.position = position;
        if constexpr (BAND) {
            piece.lower = lower = (int)clamp(position + call.band_lower, -FAR, FAR);
            piece.upper = upper = (int)clamp(position + call.band_upper + 1, -FAR, FAR);
        }
    }
    forget();
    const int rows = piece.rows;
    int low = 0, high = rows > 0 ? keys : 0;  // the keys that some row sees
    if constexpr (BAND)
        low = within(lower, high), high = within(upper + rows - 1, high);
    const int last = (high - 1) / BC, blocks_of_keys = low < high ? last - low / BC + 1 : 0;
    piece.start = (last - (BALANCED ? share.from : 0)) * BC;
    piece.blocks = BALANCED ? share.to - share.from : blocks_of_keys;
    if constexpr (BALANCED && EVERY_OWN) {
#pragma unroll
        for (int x = 0; x < CONSUMERS; x++) {
            const int count = x * ROWS < rows ? share.to - share.from : 0;
            volatile Steps& place = piece.steps[x];
            place.before = share.to - share.from - count, place.count = count, place.exact = count > 0, place.plain = count - 1;
        }
    } else if constexpr (BAND || EVERY_OWN) {
#pragma unroll
        for (int x = 0; x < (EVERY_OWN ? CONSUMERS : 1); x++) {
            const int from = x * ROWS, to = EVERY_OWN && from + ROWS < rows ? from + ROWS : rows;
            const Steps steps = steps_of(lower, upper, keys, from, to, last, blocks_of_keys);
            volatile Steps& place = piece.steps[x];
            place.before = steps.before, place.count = steps.count, place.exact = steps.exact, place.plain = steps.plain;
        }
    }
    return true;
}

// How many of the blocks of threads that come next in the line have so many blocks of keys.
__device__ __forceinline__ int others_of(const Line& line, unsigned blocks)
{
    int others = 0;
    for (unsigned who = place_in_line() + 1; blocks > 0; who++, others++) {
        const unsigned share = line.each + (who < line.more);
        blocks -= share < blocks ? share : blocks;
    }
    return others;
}

__device__ __forceinline__ unsigned draw(unsigned* counter) { return atomicAdd(counter, 1u); }

// One thread: begins all copies of all pieces. EARLY: the next piece is described, its Q asked for at L2 and its first K copied while the place for Q
// is taken. A description has one of two places, and its own is free when Q of the piece before could be copied.
__device__ __forceinline__ void produce(const MappedCall& argument, unsigned char* on_chip, Rest& rest)
{
    const Call& call = argument.call;
    Line& line = rest.line;
    const unsigned count = BALANCED ? line.whole : pieces_of(call);
    unsigned given = 0, n = 0;  // pieces, and blocks of keys, so far
    bool again = false;         // those of the list
    for (unsigned number = place_in_line(), next;; number = next) {
        const unsigned slot = given % Q_BUFFERS, parity = (given / Q_BUFFERS & 1) ^ 1;
        if constexpr (!EARLY)
            await(&rest.empty_Q[slot], parity);
        const auto await_place = [&]() {
            if constexpr (EARLY)
                await(&rest.empty_Q[slot], parity);
        };
        Piece& piece = rest.piece[given % DESCRIBED];
        if (again ? number == NONE : number >= count && (!BALANCED || line.at == line.end)) {
            piece.number = NONE;
            await_place();
            arrive(&rest.full_Q[slot]);
            given++;
            if (again)
                break;
            await(&rest.settled, 0);
            again = true;
            next = rest.first_again;
            continue;
        }
        Share share = {};
        if constexpr (BALANCED)
            share.to = key_blocks(call), piece.others = 0;
        if (again) {
            next = call.again[number], number /= WARPS;
        } else if (BALANCED && number >= count) {
            next = number;
            const unsigned of_piece = share.to, at = line.at, left = line.end - at;
            number = count + at / of_piece;
            share.from = at % of_piece;
            share.to = share.from + left < of_piece ? share.from + left : of_piece;
            line.at = at + share.to - share.from;
            piece.others = share.from > 0 ? FOR_ANOTHER : others_of(line, of_piece - share.to);
        } else {
            next = gridDim.x + number;
        }
        // Who draws the next piece before this one is nearly done may find itself with a long one that others have the time for
        const auto draw_next = [&]() {
            if (DYNAMIC && !again)
                next = gridDim.x + draw(call.counters);
        };
        if (!describe(piece, call, number, share)) {
            draw_next();
            continue;
        }
        given++;
        const int blocks = piece.blocks, batch = piece.batch, k_head = piece.k_head;
        if (blocks == 0) {
            draw_next();
            await_place();
            arrive(&rest.full_Q[slot]);
            continue;
        }
        int k_row = piece.k_row + piece.start;
        const auto copy_keys = [&](int j) {
            const unsigned stage = (n + j) % STAGES;
            await(&rest.empty_K[stage], ((n + j) / STAGES & 1) ^ 1);
            arrive_expecting(&rest.full_K[stage], K_BYTES);
#pragma unroll
            for (int x = 0; x < SLABS_D; x++)
                copy_box(on_chip + AT_K + stage * K_BYTES + x * BC * SLAB_ROW, argument.map[1], &rest.full_K[stage], x * SLAB, k_row, k_head, batch);
        };
        if constexpr (EARLY) {
#pragma unroll
            for (int x = 0; x < SLABS_D; x++)
                ask_for_box(argument.map[0], x * SLAB, piece.row, piece.head, batch);
            copy_keys(0);
        }
        await_place();
        arrive_expecting(&rest.full_Q[slot], Q_BYTES);
#pragma unroll
        for (int x = 0; x < SLABS_D; x++)
            copy_box(on_chip + slot * Q_BYTES + x * BR * SLAB_ROW, argument.map[0], &rest.full_Q[slot], x * SLAB, piece.row, piece.head, batch);
#pragma unroll 1
        for (int j = 0; j <= blocks; j++, k_row -= BC) {
            if (j < blocks && (!EARLY || j > 0))
                copy_keys(j);
            if (j == blocks - 1)
                draw_next();  // it is there when the last V is copied
            if (j > 0) {
                const unsigned stage = (n + j - 1) % STAGES;
                await(&rest.empty_V[stage], ((n + j - 1) / STAGES & 1) ^ 1);
                arrive_expecting(&rest.full_V[stage], V_BYTES);
#pragma unroll
                for (int x = 0; x < SLABS_V; x++)
                    copy_box(on_chip + AT_V + stage * V_BYTES + x * BC * SLAB_ROW, argument.map[2], &rest.full_V[stage], x * SLAB, k_row + BC,
                             k_head, batch);
            }
        }
        n += blocks;
        if (BALANCED && piece.others > 0) {
#pragma unroll 1
            for (unsigned* word = call.counters + place_in_line() + piece.others; word != call.counters + place_in_line(); word--) {
                await_turn(word, WARPS);
                *word = 0;
            }
            arrive(&rest.parts);
        }
    }
    if constexpr (DYNAMIC)
        if (count_and_see(call.counters + 1, gridDim.x - 1) == gridDim.x - 1)  // the last block of threads leaves both as zeros
            call.counters[0] = 0;
}

__device__ __forceinline__ unsigned word_of(float x, float y)
{
    if constexpr (TYPE == BFLOAT16)
        return bfloat16_pair(x, y);
    else
        return float16_pair(x, y);
}

// How the exponentials of a step are taken. m is FIXED; or LAGGING: it moves when the sum of a thread's P says that one of these is large, by powers of
// two, which takes no maximum of the scores; or MOVING with their maximum; or CAREFULLY: nothing overflows that is not infinite, at one operation more
// for each score.
enum Way { FIXED, LAGGING, MOVING, CAREFULLY };

// What a warpgroup has of a piece. Lane (g, t) = (lane / 4, lane % 4) of a warp has rows g and g + 8 of its 16, of these columns 2 t and 2 t + 1 of
// every eight; see hopper.cuh.
struct Consumer {
    const MappedCall& argument;
    const Call& call;
    unsigned char* const on_chip;
    Rest& rest;
    const int group, warp, lane;  // warpgroup, warp of it
    int part;                     // which ROWS of a piece it has
    unsigned n;                   // blocks of keys so far
    unsigned long long next_K, next_V;  // what the next step multiplies
    bool there_K, there_V;              // is that known?
    int own, behind;              // of a piece: blocks that its rows see any of, and those behind them
    float O[WIDTH / 2], S[BC / 2], m[2], l[2];
    unsigned P[BC / 16][4], Q[Q_STAYS ? ceil_div(D, 16) : 1][4];
    float unit[2];  // unless PLAIN: of a product in scores, or in caps; the cap

    __device__ __forceinline__ Consumer(const MappedCall& argument, unsigned char* on_chip, Rest& rest)
        : argument(argument), call(argument.call), on_chip(on_chip), rest(rest), group(__shfl_sync(WARP, threadIdx.x / WARPGROUP, 0) - 1),
          warp(__shfl_sync(WARP, threadIdx.x / WARP_SIZE % 4, 0)), lane(threadIdx.x % WARP_SIZE), n(0)
    {
        if constexpr (!PLAIN) {
            unit[0] = SOFTCAP ? (float)(call.scale / call.softcap) : (float)call.scale;
            unit[1] = (float)call.softcap;
            pin(unit);  // in registers, not computed again and again
        }
    }

    // Of a score in powers of two. Beside products an instruction that reads three registers takes a fifth longer than one of two, so this is not to be
    // one of the thread's own.
    __device__ __forceinline__ float in_twos() const { return PLAIN ? call.scale_log2 : LOG2E; }

    __device__ __forceinline__ bool leads() const { return threadIdx.x % WARPGROUP == 0; }
    __device__ __forceinline__ int first_row() const { return part * ROWS + warp * WARP_ROWS; }

    // Where a mask hides more from some rows than from others, these are taken in turn: so warpgroups have as much to do.
    __device__ __forceinline__ void take_part(unsigned given) { part = EVERY_OWN && given % 2 ? CONSUMERS - 1 - group : group; }

    // Q of the piece to registers
    __device__ __forceinline__ void load_queries(unsigned slot)
    {
        const unsigned char* const rows = on_chip + slot * Q_BYTES + 4 * (lane % 4);
#pragma unroll
        for (int s = 0; s < ceil_div(D, 16); s++)
#pragma unroll
            for (int x = 0; x < 4; x++)
                Q[s][x] = *(const unsigned*)(rows + s / 4 * BR * SLAB_ROW + in_slab(first_row() + lane / 4 + x % 2 * 8, s % 4 * 2 + x / 2));
    }

    __device__ __forceinline__ unsigned long long factor_K(unsigned stage) const { return moved(factor(on_chip + AT_K), stage * K_BYTES); }
    __device__ __forceinline__ unsigned long long factor_V(unsigned stage) const
    {
        return moved(factor(on_chip + AT_V, BC * SLAB_ROW), stage * V_BYTES);
    }

    // S = Q K^T, begun
    __device__ __forceinline__ void begin_scores(unsigned slot, unsigned long long k)
    {
        const unsigned long long q = moved(factor(on_chip), slot * Q_BYTES + part * ROWS * SLAB_ROW);
        fence_products();
#pragma unroll
        for (int s = 0; s < ceil_div(D, 16); s++) {
            const unsigned long long columns = moved(k, s / 4 * BC * SLAB_ROW + s % 4 * 32);
            if constexpr (Q_STAYS)
                multiply_rs<BC>(S, Q[s], columns, s > 0);
            else
                multiply_ss<BC>(S, moved(q, s / 4 * BR * SLAB_ROW + s % 4 * 32), columns, s > 0);
        }
        commit_products();
    }

    // O += P V, begun
    __device__ __forceinline__ void begin_output(unsigned long long v)
    {
        fence_products();
#pragma unroll
        for (int s = 0; s < BC / 16; s++)
            multiply_rs<WIDTH, true>(O, P[s], moved(v, s * 16 * SLAB_ROW), true);
        commit_products();
    }

    // Of a thread's columns, which are 0, 1, 8, 9, 16, ..., those below `end`: bits.
    static __device__ __forceinline__ unsigned columns_before(int end)
    {
        const int left = end & 7, count = within((end >> 3) * 2 + (left < 2 ? left : 2), BC / 4);
        return count == 0 ? 0 : ~0u >> (32 - count);
    }

    // Products -> scores, where these are not multiples of them; keys that a row does not see get -inf.
    template <bool MASKED> __device__ __forceinline__ void finish_scores(const Piece& piece, int j0)
    {
        const int g = lane / 4, t = lane % 4;
        if constexpr (!PLAIN) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float distance = ALIBI ? (float)(piece.position + first_row() + g + 8 * r - j0 - 2 * t) : 0.0f;
#pragma unroll
                for (int x = 2 * r; x < BC / 2; x += x % 2 ? 3 : 1) {
                    float score = S[x] * unit[0];
                    if constexpr (SOFTCAP)
                        score = unit[1] * branchless_tanh(score);
                    if constexpr (ALIBI)
                        score -= piece.slope * fabsf(distance - (x / 4 * 8 + x % 2));
                    S[x] = score;
                }
            }
        }
        if constexpr (MASKED) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int row = first_row() + g + 8 * r, from = j0 + 2 * t;
                int end = piece.keys;
                if constexpr (BAND)
                    end = piece.upper + row < end ? piece.upper + row : end;
                unsigned seen = columns_before(end - from);  // a bit for each column of the thread
                if constexpr (LOWER)
                    seen &= ~columns_before(piece.lower + row - from);
#pragma unroll
                for (int x = 2 * r; x < BC / 2; x += x % 2 ? 3 : 1)
                    if (!(seen >> (x / 4 * 2 + x % 2) & 1))
                        S[x] = -INFINITE;
            }
        }
    }

    // m, l -> those with these scores; S -> P = exp(S - m). Returned: has m changed, of any row of the warp? Then alpha is by how much what was
    // summed so far counts. FIRST: nothing was.
    template <int WAY, bool MASKED, bool FIRST = false> __device__ __forceinline__ bool softmax(float (&alpha)[2])
    {
        const float c = in_twos();
        bool moves = false;
        float highest[2], sums[2];
        if constexpr (WAY == MOVING || WAY == CAREFULLY) {
            bool grows = false;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                highest[r] = S[2 * r];
#pragma unroll
                for (int x = 2 * r; x < BC / 2; x += x % 2 ? 3 : 1)
                    highest[r] = fmaxf(highest[r], S[x]);
                highest[r] = fmaxf(highest[r], __shfl_xor_sync(WARP, highest[r], 1));
                highest[r] = fmaxf(highest[r], __shfl_xor_sync(WARP, highest[r], 2));
                if constexpr (!FIRST) {
                    highest[r] = fmaxf(m[r], highest[r]);
                    grows = grows || (WAY == CAREFULLY ? highest[r] > m[r] : (highest[r] - m[r]) * c > GROWTH);
                }
            }
            if constexpr (!FIRST)
                moves = !__all_sync(WARP, !grows);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float shift = m[r];
            if constexpr (WAY == MOVING || WAY == CAREFULLY) {
                const float now = FIRST || moves ? highest[r] : m[r];
                shift = now == -INFINITE ? 0.0f : now;  // a row that has seen no key: exp(-inf - 0) is 0
                if constexpr (!FIRST) {
                    alpha[r] = moves ? exp2_approximately((m[r] - shift) * c) : 1.0f;
                    l[r] *= alpha[r];
                }
                m[r] = now;
            } else if (MASKED && m[r] == -INFINITE) {
                shift = 0.0f;
            }
            const float shifted = shift * c;
            // Beside a warpgroup's own products exponentials are to be short: no number waits for the sum of all before it
            constexpr int CHAINS = BESIDE ? 4 : 1;
            float sum[CHAINS] = {WAY == LAGGING ? 0.0f : l[r]};
#pragma unroll
            for (int x = 2 * r; x < BC / 2; x += x % 2 ? 3 : 1) {
                S[x] = exp2_approximately(WAY == CAREFULLY ? (S[x] - shift) * c : fmaf(S[x], c, -shifted));
                const int chain = x / 4 % CHAINS;
                sum[chain] = chain > 0 && x / 4 == chain && x % 2 == 0 ? S[x] : sum[chain] + S[x];
            }
#pragma unroll
            for (int y = 1; y < CHAINS; y++)
                sum[0] += sum[y];
            if constexpr (WAY == LAGGING)
                sums[r] = sum[0];
            else
                l[r] = sum[0];
        }
        if constexpr (WAY == LAGGING) {
            moves = !__all_sync(WARP, sums[0] <= MOST_LAG && sums[1] <= MOST_LAG);
            if (moves)
                catch_up(sums, alpha);
#pragma unroll
            for (int r = 0; r < 2; r++)
                l[r] += sums[r];
        }
        return moves;
    }

    // The maximum moves behind the exponentials of a step: m, l, P and its sums are those with the new one.
    __device__ __forceinline__ void catch_up(float (&sums)[2], float (&alpha)[2])
    {
        const float c = in_twos();
        float scale[1] = {c};
        pin(scale);  // its inverse is computed here, not kept
        const float inverse = reciprocal_approximately(scale[0]);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float most = sums[r];  // at least its largest P
            most = fmaxf(most, __shfl_xor_sync(WARP, most, 1));
            most = fmaxf(most, __shfl_xor_sync(WARP, most, 2));
            const float now = most > MOST_LAG ? m[r] + log2_approximately(most) * inverse : m[r];
            // Where P is so large that alpha may come out as 0, l becomes an infinity or NaN: such rows are done again
            alpha[r] = now == m[r] ? 1.0f : most < MOST_SUM ? exp2_approximately(m[r] * c - now * c) : INFINITE;
            m[r] = now;
            l[r] *= alpha[r];
            sums[r] *= alpha[r];
#pragma unroll
            for (int x = 2 * r; x < BC / 2; x += x % 2 ? 3 : 1)
                S[x] *= alpha[r];
        }
    }

    __device__ __forceinline__ void narrow_P()
    {
#pragma unroll
        for (int s = 0; s < BC / 16; s++)
#pragma unroll
            for (int x = 0; x < 4; x++)
                P[s][x] = word_of(S[8 * s + 2 * x], S[8 * s + 2 * x + 1]);
    }

    // What of a piece gives the maximum first: S_j and P_j of the last block of keys.
    template <int WAY> __device__ __forceinline__ void first_step(const Piece& piece, unsigned slot, int j0)
    {
        begin_scores(slot, factor_K(n % STAGES));
#pragma unroll
        for (int x = 0; x < WIDTH / 2; x++)
            O[x] = 0;
        await_products<0>();
        if (leads())
            arrive(&rest.empty_K[n % STAGES]);
        finish_scores<true>(piece, j0);
        float alpha[2];
        softmax<WAY, true, true>(alpha);
        narrow_P();
    }

    // A step but the first: S_j and O += P_{j-1} V_{j-1}. Where the next step's factors are, and whether their copies have ended, is found out before
    // the exponentials: so its products begin right behind them.
    template <int WAY, bool MASKED> __device__ __forceinline__ void step(const Piece& piece, unsigned slot, int j0)
    {
        const unsigned k = n % STAGES, v = (n - 1) % STAGES;
        if (BESIDE || !there_K)
            await(&rest.full_K[k], n / STAGES & 1);
        if constexpr (TURNS)
            meet(FIRST_TURN + group, 2 * WARPGROUP);
        begin_scores(slot, BESIDE ? factor_K(k) : next_K);
        if (BESIDE || !there_V)
            await(&rest.full_V[v], (n - 1) / STAGES & 1);
        begin_output(BESIDE ? factor_V(v) : next_V);
        if constexpr (!BESIDE)  // K by additions: the assembler would compute a function of n again where it is needed
            next_K = moved(next_K, (n + 1) % STAGES ? K_BYTES : -(STAGES - 1) * K_BYTES), next_V = factor_V(k);
        if constexpr (TURNS)
            announce(FIRST_TURN + (group + 1) % CONSUMERS, 2 * WARPGROUP);
        await_products<BESIDE ? 1 : 0>();  // S_j is there, and nobody reads K_j
        if (leads())
            arrive(&rest.empty_K[k]);
        if constexpr (!BESIDE) {
            if (leads())
                arrive(&rest.empty_V[v]);
            there_K = ended(&rest.full_K[(n + 1) % STAGES], (n + 1) / STAGES & 1);
            there_V = ended(&rest.full_V[k], n / STAGES & 1);
        }
        finish_scores<MASKED>(piece, j0);
        float alpha[2];
        const bool moves = softmax<WAY, MASKED>(alpha);
        if constexpr (BESIDE) {
            // The assembler moves arithmetic across a wait, but not what is stored: so the exponentials are taken before it
            *(volatile float*)&rest.pin[threadIdx.x - WARPGROUP] = l[0] + l[1];
            await_products<0>();
            if (leads())
                arrive(&rest.empty_V[v]);
        }
        if (WAY != FIXED && moves) {
#pragma unroll
            for (int x = 0; x < WIDTH / 2; x++)
                O[x] *= alpha[x / 2 % 2];
        }
        narrow_P();
        n++;
    }

    // All steps of a piece: O, m and l of the thread's rows, l the thread's own part.
    template <bool AGAIN> __device__ __forceinline__ void attend(const Piece& piece, unsigned slot)
    {
        constexpr int EXACT = AGAIN ? CAREFULLY : MOVING, PLAINLY = STATIC_MAXIMUM ? FIXED : LAGGING;
#pragma unroll
        for (int r = 0; r < 2; r++)
            m[r] = -INFINITE, l[r] = 0;
        own = __shfl_sync(WARP, piece.blocks, 0);
        int j0 = piece.start, exact = 1, plain = own - 1;
        if constexpr (BAND || EVERY_OWN) {
            const Steps& steps = piece.steps[EVERY_OWN ? part : 0];
            exact = __shfl_sync(WARP, steps.exact, 0), plain = __shfl_sync(WARP, steps.plain, 0);
            if constexpr (EVERY_OWN) {
                const int blocks = own, before = __shfl_sync(WARP, steps.before, 0);
                own = __shfl_sync(WARP, steps.count, 0);
                behind = blocks - before - own;
                pass_over(before);
                j0 -= before * BC;
            }
        }
        if (own == 0)
            return;
        if constexpr (Q_STAYS)
            load_queries(slot);
        await(&rest.full_K[n % STAGES], n / STAGES & 1);
        first_step<EXACT>(piece, slot, j0);
        if constexpr (RAGGED || PACKED)
            clear_values(piece, j0);
        next_V = factor_V(n % STAGES);
        n++;
        next_K = factor_K(n % STAGES);
        there_K = there_V = false;

        if constexpr (AGAIN) {
            for (int j = own - 1; j > 0; j--)
                step<EXACT, true>(piece, slot, j0 -= BC);
        } else {
            if constexpr (BAND)
                for (int j = exact - 1; j > 0; j--)
                    step<EXACT, true>(piece, slot, j0 -= BC);
            for (int j = plain; j > 0; j--)
                step<PLAINLY, false>(piece, slot, j0 -= BC);
            if constexpr (LOWER)
                for (int j = own - exact - plain; j > 0; j--)
                    step<PLAINLY, true>(piece, slot, j0 -= BC);
        }
        const unsigned v = (n - 1) % STAGES;
        await(&rest.full_V[v], (n - 1) / STAGES & 1);
        begin_output(BESIDE ? factor_V(v) : next_V);
    }

    // Blocks of keys that others of the piece see: their copies are awaited, so that a barrier is never more than a phase ahead.
    __device__ __forceinline__ void pass_over(int blocks)
    {
        if (blocks <= 0)
            return;
        if (warp == 0) {
#pragma unroll 1
            for (unsigned x = n; x != n + blocks; x++) {
                const unsigned stage = x % STAGES;
                await(&rest.full_K[stage], x / STAGES & 1);
                await(&rest.full_V[stage], x / STAGES & 1);
                if (lane == 0) {
                    arrive(&rest.empty_K[stage]);
                    arrive(&rest.empty_V[stage]);
                }
            }
        }
        n += blocks;
        meet(FIRST_OWN + group, WARPGROUP);  // the other warps know that, too
    }

    // Where of a part of a piece O, l and m lie in device memory, by the block of threads that has it: vectors of each thread. Which rows a warpgroup
    // has may differ from one block of threads to another.
    __device__ __forceinline__ float4* sums_of(unsigned who) const
    {
        return (float4*)call.sums + (who * (SUMS + 1) * CONSUMERS + part) * WARPGROUP + once_more(threadIdx.x) % WARPGROUP;
    }

    __device__ __forceinline__ void hand_over(unsigned who)
    {
        float4* const place = sums_of(who);
#pragma unroll
        for (int s = 0; s < SUMS; s++)
            place[s * CONSUMERS * WARPGROUP] = float4{O[4 * s], O[4 * s + 1], O[4 * s + 2], O[4 * s + 3]};
        place[SUMS * CONSUMERS * WARPGROUP] = float4{l[0], l[1], m[0], m[1]};
        __syncwarp();
        if (lane == 0)
            count_and_see(call.counters + who, WARPS);
    }

    // O, m and l of more keys.
    __device__ __forceinline__ void merge(unsigned who)
    {
        await(&rest.parts, 0);
        const float4* const place = sums_of(who);
        const float4 last = __ldcg(place + SUMS * CONSUMERS * WARPGROUP);
        const float more[2] = {last.x, last.y}, highest[2] = {last.z, last.w};
        float shift[4], kept[2], added[2];
#pragma unroll
        for (int r = 0; r < 2; r++)
            shift[r] = m[r] * in_twos(), shift[2 + r] = highest[r] * in_twos();
        pin(shift);  // rounded, as in the steps
#pragma unroll
        for (int r = 0; r < 2; r++) {
            m[r] = fmaxf(m[r], highest[r]);
            const float most = fmaxf(shift[r], shift[2 + r]), now = most == -INFINITE ? 0.0f : most;
            kept[r] = exp2_approximately(shift[r] - now), added[r] = exp2_approximately(shift[2 + r] - now);
            l[r] = fmaf(l[r], kept[r], more[r] * added[r]);
        }
#pragma unroll
        for (int s = 0; s < SUMS; s++) {
            if (s % 8 == 0 && s > 0)
                await(&rest.parts, 0);  // which it need not, but the assembler moves no further reads up to here: they take registers
            const float4 x = __ldcg(place + s * CONSUMERS * WARPGROUP);
            const float sums[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int y = 0; y < 4; y++)
                O[4 * s + y] = fmaf(O[4 * s + y], kept[y / 2], sums[y] * added[y / 2]);
        }
    }

    // The rows of the first V that are not the sequence's: 0 times what lies there may be NaN.
    __device__ __forceinline__ void clear_values(const Piece& piece, int j0)
    {
        const int end = piece.keys - j0;
        if (end >= BC)
            return;
        const unsigned stage = n % STAGES;
        await(&rest.full_V[stage], n / STAGES & 1);
        unsigned char* const V = on_chip + AT_V + stage * V_BYTES;
        for (int x = threadIdx.x % WARPGROUP; x < (BC - end) * 8; x += WARPGROUP)
#pragma unroll
            for (int slab = 0; slab < SLABS_V; slab++)
                *(uint4*)(V + slab * BC * SLAB_ROW + end * SLAB_ROW + x * 16) = make_uint4(0, 0, 0, 0);
        fence_shared();
        meet(FIRST_OWN + group, WARPGROUP);
    }

    // O = O / l, lse = m + log l; or, if these rows are to be done again, their piece comes into the list.
    template <bool AGAIN> __device__ __forceinline__ void finish(const Piece& piece, unsigned slot)
    {
        // What is needed of the piece: its place may be another's when Q is released
        const unsigned number = piece.number;
        const int batch = piece.batch, h = piece.head, row = piece.row, rows = piece.rows, stored = piece.stored;
        const int others = BALANCED && !AGAIN ? __shfl_sync(WARP, piece.others, 0) : 0;
        bool sees[2] = {};  // has the row keys of its own, where P of scores of any size may have been taken without a maximum?
        if constexpr (LOWER && !AGAIN)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int x = first_row() + lane / 4 + 8 * r;
                sees[r] = within(piece.lower + x, piece.keys) < within(piece.upper + x, piece.keys);
            }
        arrive_as_warp(&rest.empty_Q[slot], lane);
        await_products<0>();
        if (own && leads())
            arrive(&rest.empty_V[(n - 1) % STAGES]);
        if constexpr (EVERY_OWN)
            pass_over(behind);
        if constexpr (BALANCED && !AGAIN) {
            if (others == FOR_ANOTHER) {
                hand_over(once_more(place_in_line()));
                return;
            }
#pragma unroll 1
            for (int x = 1; x <= others; x++)
                merge(once_more(place_in_line() + x));
        }

        const int g = lane / 4, t = lane % 4, first = first_row();
        float total[2], factor[2], lse[2];
        bool again = false, empty = false;
        Head at = {};
        at.h = h;
#pragma unroll
        for (int r = 0; r < 2; r++)
            total[r] = l[r] + __shfl_xor_sync(WARP, l[r], 1);
#pragma unroll
        for (int r = 0; r < 2; r++)
            total[r] += __shfl_xor_sync(WARP, total[r], 2);
        if constexpr (!AGAIN) {
            float finite[4] = {};
#pragma unroll
            for (int x = 0; x < WIDTH / 2; x++)
                finite[x % 4] = fmaf(O[x], 0.0f, finite[x % 4]);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                // A row without a maximum has seen no key, or none with a finite score, or such with P that came out as 0
                const bool none = m[r] == -INFINITE, good = none ? (total[r] == 0.0f) & !sees[r] : fabsf(m[r] * in_twos()) < MOST_SHIFT;
                const bool bad = !(total[r] < MOST_SUM) | !(finite[2 * r] + finite[2 * r + 1] == 0.0f) | !good;
                again = again | (bad & (own > 0) & (first + g + 8 * r < rows));  // without a branch
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float highest = PLAIN ? m[r] * (float)call.scale : m[r];
            const bool none = first + g + 8 * r >= rows || total[r] == 0.0f;
            empty = empty || none;
            if constexpr (SINKS) {
                float sum = total[r];
                factor[r] = finish_row(call, at, highest, sum, lse[r]);
                if (first + g + 8 * r >= rows)
                    lse[r] = -INFINITE;
            } else {
                factor[r] = reciprocal_approximately(total[r]);
                lse[r] = none ? -INFINITE : fmaf(log2_approximately(total[r]), LN2, highest);
            }
        }
        if (!__all_sync(WARP, !empty)) {
#pragma unroll
            for (int r = 0; r < 2; r++)
                if (first + g + 8 * r >= rows || total[r] == 0.0f) {
                    factor[r] = 0;
#pragma unroll
                    for (int x = 2 * r; x < WIDTH / 2; x += x % 2 ? 3 : 1)
                        O[x] = 0;
                }
        }
#pragma unroll
        for (int x = 0; x < WIDTH / 2; x++)
            O[x] *= factor[x / 2 % 2];
        if (!AGAIN && !__all_sync(WARP, !again)) {
            if (lane == 0 && atomicExch(&rest.last_again, number) != number) {
                const unsigned entry = number * WARPS + group * 4 + warp;
                call.again[entry] = atomicExch(&rest.first_again, entry);
            }
            return;
        }
        if (t == 0 && call.lse.data) {
            float* const place = row_of(call.lse, batch, h, row + first + g);
            if (first + g < stored)
                place[0] = lse[0];
            if (first + g + 8 < stored)
                place[8 * call.lse.row] = lse[1];
        }

        if constexpr (!OWN_O) {
            store_output(batch, h, row, stored);
            return;
        }
        // To shared memory, where copies find it
        unsigned char* const tile = on_chip + AT_O + (group - part) * ROWS * SLAB_ROW;
        if (lane == 0)
            await_stores_read<0>();
        __syncwarp();
#pragma unroll
        for (int s = 0; s < WIDTH / 16; s++) {
            const int slab = s / 4, piece_of_row = s % 4 * 2 + lane / 16;
            store_matrices<false>(tile + slab * BR * SLAB_ROW + first * SLAB_ROW + in_slab(lane % 16, piece_of_row), word_of(O[8 * s], O[8 * s + 1]),
                                  word_of(O[8 * s + 2], O[8 * s + 3]), word_of(O[8 * s + 4], O[8 * s + 5]), word_of(O[8 * s + 6], O[8 * s + 7]));
        }
        fence_shared();
        __syncwarp();
        if (PACKED ? first + WARP_ROWS <= stored : first < stored) {
            if (lane == 0) {
#pragma unroll
                for (int slab = 0; slab < SLABS_V; slab++)
                    store_box(argument.map[3], tile + slab * BR * SLAB_ROW + first * SLAB_ROW, slab * SLAB, row + first, h, batch);
                commit_stores();
            }
        } else {  // a box would reach into the next sequence
            for (int x = lane; x < WARP_ROWS * (DV / 8); x += WARP_SIZE) {
                const int i = x / (DV / 8), of_row = x % (DV / 8);
                if (first + i < stored)
                    *(uint4*)(row_of(call.o, batch, h, row + first + i) + 8 * of_row) =
                        *(const uint4*)(tile + of_row / 8 * BR * SLAB_ROW + first * SLAB_ROW + in_slab(i, of_row % 8));
            }
        }
    }

    // O from registers: of every 16 columns two lanes have eight each, of which they exchange halves, so that a row's part is 32 bytes.
    __device__ __forceinline__ void store_output(int batch, int h, int row, int stored)
    {
        const int g = lane / 4, t = lane % 4, odd = t % 2;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int i = first_row() + g + 8 * r;
            elem* const place = row_of(call.o, batch, h, row + i) + 8 * odd + t / 2 * 4;
#pragma unroll
            for (int s = 0; s < WIDTH / 16; s++) {
                const unsigned left = word_of(O[8 * s + 2 * r], O[8 * s + 2 * r + 1]), right = word_of(O[8 * s + 2 * r + 4], O[8 * s + 2 * r + 5]);
                const unsigned other = __shfl_xor_sync(WARP, odd ? left : right, 1);
                if (i < stored && (WIDTH == DV || 16 * s + 8 * odd < DV))
                    *(uint2*)(place + 16 * s) = odd ? make_uint2(other, right) : make_uint2(left, other);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) fa2_forward(const __grid_constant__ MappedCall argument)
{
    extern __shared__ __align__(SLAB_ALIGNMENT) unsigned char on_chip[];
    Rest& rest = *(Rest*)(on_chip + AT_REST);
    if (threadIdx.x == 0) {
        for (int x = 0; x < Q_BUFFERS; x++) {
            init_barrier(&rest.full_Q[x], 1);
            init_barrier(&rest.empty_Q[x], WARPS * ARRIVALS);
        }
        for (int x = 0; x < STAGES; x++) {
            init_barrier(&rest.full_K[x], 1), init_barrier(&rest.full_V[x], 1);
            init_barrier(&rest.empty_K[x], CONSUMERS), init_barrier(&rest.empty_V[x], CONSUMERS);
        }
        init_barrier(&rest.settled, WARPS);
        init_barrier(&rest.parts, 1);
        rest.first_again = rest.last_again = NONE;
        fence_barriers();
    }
    if (BALANCED && threadIdx.x == WARP_SIZE)
        rest.line = line_of(argument.call);
    __syncthreads();  // the barriers are there
    if (threadIdx.x < WARPGROUP) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0)
            produce(argument, on_chip, rest);
        return;
    }
    take_registers<CONSUMER_REGISTERS>();
    Consumer consumer(argument, on_chip, rest);
    if (TURNS && consumer.group == CONSUMERS - 1)
        announce(FIRST_TURN, 2 * WARPGROUP);
    unsigned given = 0;
    for (;; given++) {
        const unsigned slot = given % Q_BUFFERS;
        await(&rest.full_Q[slot], given / Q_BUFFERS & 1);
        if (rest.piece[given % DESCRIBED].number == NONE)
            break;
        consumer.take_part(given);
        consumer.attend<false>(rest.piece[once_more(given) % DESCRIBED], slot);
        consumer.finish<false>(rest.piece[once_more(given) % DESCRIBED], slot);
    }
    // What was stored is there before it is stored again
    __syncwarp();
    if (consumer.lane == 0) {
        await_stores<0>();
        arrive(&rest.settled);
    }
    arrive_as_warp(&rest.empty_Q[given % Q_BUFFERS], consumer.lane);
    for (given++;; given++) {
        const unsigned slot = given % Q_BUFFERS;
        await(&rest.full_Q[slot], given / Q_BUFFERS & 1);
        if (rest.piece[given % DESCRIBED].number == NONE)
            break;
        consumer.take_part(given);
        consumer.attend<true>(rest.piece[once_more(given) % DESCRIBED], slot);
        consumer.finish<true>(rest.piece[once_more(given) % DESCRIBED], slot);
    }
    if (consumer.lane == 0)
        await_stores_read<0>();  // shared memory is given back
}
