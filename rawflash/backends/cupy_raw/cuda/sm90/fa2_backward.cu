// FlashAttention-2, backward pass (Dao 2024, algorithm 2; Chu, Liu and Lin 2026, algorithm 8) for 16-bit inputs on Hopper.
//
// fa2_backward_keys: a block of threads owns Bc = 128 keys of one key head and runs over the Q blocks of all query heads that share it.
// One warpgroup copies (tensor maps), two compute: each of these owns 64 of the keys, with dK and dV in registers. Everything is transposed,
// S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are factors of dV += P^T dO and dK += dS^T Q where they are, in registers; so is V, as much
// of it as there is room for. dS^T goes to shared memory as well, as a factor of dQ_i = dS K, in which both warpgroups' keys have a share. dQ_i is
// added to float32 sums in device memory, in the order in which the registers hold it. APART: a fourth warpgroup computes dQ_i and adds it from its
// registers, and the two others never wait for each other. Otherwise these two compute it, half each, and leave it in shared memory for one thread
// to add; dK, and with 64 rows half of dV, is under way meanwhile. PAIRED: two blocks of threads with neighbouring keys of a head are a cluster and
// go through the same rows, 128 after 128. Each computes dQ of 64 of these, whose sum goes over the keys of both, so that half as much is added: of
// the other 64, which it has first, its dS goes to the other one's shared memory, and is there by the time that one needs it. Where a mask hides keys,
// its band has no lower end, and both go through the rows that see a key of either. Of an odd number of blocks of keys, or of rows, one more is
// zeros. DIVIDED: the last blocks of keys have several blocks of threads, each for some of the rows, or, where there are few, all of them, each for
// some of the query heads (backward.cuh). TOGETHER: the same rows of all query heads that a block of threads has come one after the other.
// On chip:  K (Bc, d), V (Bc, dv), STAGES of Q (Br, d) and dO (Br, dv), two dS (Bc, Br) in 16 bits; dQ (Br, d) or none; lse and delta (Br), barriers;
//           in registers S (Bc, Br), dP (Bc, 64), dK (Bc, d), dV (Bc, dv), dQ (Br, d), of V (Bc, 16 V_HELD), of K (16 K_HELD, d).
//           PAIRED: K of the other block of threads (Bc, d), dS of both; dS to be sent lies where half of dQ comes; no columns of V that are in
//           registers; delta in rows of a slab (8, 64).
//           FUSED: 64 columns of O and dO (Br, 64) of rows to be prepared, sums of dQ (64, 64) to be finished, and which rows these are. A band:
//           which rows see a lane's keys, where V was that is in registers, or, APART, in a place of its own.
// In device memory: sums of dQ; counters, 0 before: of heads' blocks of threads that have prepared and that have added (FUSED), and of those that have
//           stored (STORES), of blocks of rows (DETERMINISTIC), of shares that are there (DIVIDED); shares of dK and dV (DIVIDED); records
//           of lse and delta (PAIRED).
//
// fa2_backward_finish: dQ = scale * those sums, row by row. FUSED: for the last heads only; of the others it is the work of a warp of later blocks of
// threads, and what row_deltas does (side_gradients.cu), that of a warp of earlier ones. PAIRED: that warp writes records of lse and delta, and of the
// first heads fa2_backward_rows does.
//
// What hides keys is a band, and lengths. Rows and keys past the lengths are zeros on chip, so that products with
// them are, too: of such a row, lse is +infinity, hence P = 0; such a key is hidden as a band hides others. Without a band, and in pairs, its zeros are
// enough, with an exponent of -infinity in float16: its P, which is 1 at most (ALiBi alone is its score), meets zeros of dP and of K.
// Both start from delta = rowsum(dO * O) - dlse (side_gradients.cu).

// Fewest copies of upper halves between products: none or nearly none
#define IN_TWO (TOGETHER && (BR == 64 || DETERMINISTIC && !BAND) || BR == 128 && !BAND && !DIVIDED)
#define UPPER_HALVES \
    {0, 1, PAIRED && BAND || IN_TWO || SETS > 1 && !BAND ? 2 : 1, !PAIRED && !IN_TWO && (BR == 128 || BAND && !STORES && (FUSED || !DETERMINISTIC)) ? 1 : 2, BAND ? 2 : 1}
#include "backward.cuh"

constexpr int COMPUTING = 2, KEYS = BC / COMPUTING;  // warpgroups, and the keys of each
constexpr int KEYS_THREADS = (1 + COMPUTING + APART) * WARPGROUP;
constexpr int STAGES = BR == 64 && !FUSED ? 3 : 2, S_STAGES = 2;  // of Q and dO on chip; of dS
constexpr bool TURNS_APART = DETERMINISTIC && (BAND || SETS > 1) && !FUSED && !APART;  // threads that do nothing else wait for turns and pass them on
constexpr int COPYING = PAIRED ? 1 : FUSED || TURNS_APART ? 32 : 64;     // threads that copy
constexpr int ADDS = COPYING == 64 ? 64 : 32;                     // a thread behind these, which may add to dQ's sums
constexpr int PART = 64, PARTS = BR / PART;                       // rows that dP has at a time
static_assert(KEYS == 64 && BR % SLAB == 0, "what products can do");

// Exponents are cut at 0. In float16 dS of keys that do not exist may be infinite, so that theirs are -infinity, where nothing hides them. BY_SIGN: by
// the sign of an operand, without an instruction; for a mask, FUSED and 64 rows, the assembler would spill for it.
constexpr bool HAS_BOUNDS = TYPE == FLOAT16 && (!BAND || PAIRED), BY_SIGN = !HAS_BOUNDS && !(BR == 64 && BAND && FUSED && !PAIRED);

// Steps of SUM columns of dP = V dO^T whose factor V is in registers, not in shared memory, which is what bounds this kernel: as many as there is
// room for. LIMITS_ON_CHIP: what hides keys of a lane is in shared memory, as few blocks of rows need it; where no product reads that slab of V any
// more, there.
constexpr bool FEW_LEFT = ALIBI && BR == 64 && (LOWER || HAS_BOUNDS);  // registers
constexpr int V_HELD = SOFTCAP ? 0 : FEW_LEFT ? 2 : APART ? !BAND && BY_SIGN ? 2 : STORES || FUSED && FIRST_STORES ? 1 : 3 : BR == 128 ? TO_V / SUM : 4;
constexpr bool LIMITS_ON_CHIP = BAND && !PAIRED && (BR == 64 || APART) && !SOFTCAP && !FEW_LEFT;
constexpr bool ROWS_FIRST = BR == 64;  // lse is read before S is there, delta before the first of it is needed: faster there, slower elsewhere
// dP begins with -delta instead of 0: APART, where warpgroups do not wait for each other, so that its rows are read before products begin, not behind
// them; PAIRED it is a product of 16 more (begin_with_minus), whose rows copies bring, so that nobody reads them.
constexpr bool DELTA_FIRST = APART || PAIRED;
constexpr unsigned NO_ROW = 0x7FFFFF00u;  // behind all rows, by more than a block has
constexpr bool SKIPS = BAND && BR == 64 && !PAIRED;  // products between rows and keys none of which they see
constexpr int K_HELD = 5;  // the same of K^T, where a warpgroup computes dQ^T = K^T dS^T
static_assert(V_HELD <= TO_V / SUM && (!LIMITS_ON_CHIP || APART || V_HELD >= SLAB / SUM), "a slab");

// Who computes which part of dQ_i, 64 rows each: half of the columns, or half of the rows; or all of it, from the warpgroup's own keys.
constexpr bool BY_COLUMNS = BR == 64 && TO_D == 128, BY_ROWS = BR == 128 && TO_D == 64, BY_KEYS = !BY_COLUMNS && !BY_ROWS;
constexpr int DQ_COLUMNS = BY_COLUMNS ? TO_D / 2 : TO_D;
static_assert(!BY_KEYS || BR == 64, "all rows");
static_assert(SETS == (DETERMINISTIC && BY_KEYS ? COMPUTING : 1) && !(BY_KEYS && (FUSED || STORES)), "sums of each, whose order is fixed");
constexpr int PATCH = 64 * DQ_COLUMNS;          // numbers of it
constexpr int PATCHES = BR * TO_D / PATCH;      // in a block of rows
static_assert(!APART || BY_ROWS, "a warpgroup of its own computes dQ");
static_assert(!DIVIDED || (FUSED || ROUND) && !BAND || TOGETHER, "the last blocks of keys have as many rows as others");
static_assert(!FIRST_STORES || DETERMINISTIC, "turns");
static_assert(!TOGETHER || !FUSED && !STORES, "others wait for no head");
static_assert(!ROWS_FIRST || !APART, "rows are read once");
static_assert(PLAIN || !FUSED && !STORES, "scores by Scores, of rows one block after the other");
static_assert(!STORES || BAND && !DETERMINISTIC && !PACKED && (BY_COLUMNS || BY_ROWS), "the last keys that rows see come first");

// dS is on chip with the rows of Q, each warpgroup's keys in a slab of their own; otherwise dS^T, with the keys'.
constexpr bool DS_BY_ROWS = BR == 64;
// Of the products for dV and for dK, those that begin before dQ_i's, and before it is handed on: so that there are some beside the wait for the other
// warpgroup's dS, and beside the stores of dQ_i. PAIRED, under a mask, with comparisons: that wait is longer.
constexpr int DV_FIRST = BR == 64 && !(PAIRED && BAND) ? PART / SUM / 2 : PART / SUM, DK_FIRST = BR == 64 ? BR / SUM : BR / SUM * 3 / 4;

// FUSED, on chip for two warps: a slab of O and of dO; a patch of dQ's sums, which in 16 bits begins a little before it.
constexpr int PREPARED_BYTES = 2 * BR * SLAB_ROW, FINISHED_BEFORE = SLAB_ALIGNMENT;

// PAIRED: three rows of a slab for each stage, the others are 0. Of the 16 rows of a product the second eight, which meet zeros, are those of K.
constexpr int DELTA_BYTES = PAIRED ? 8 * SLAB_ROW : STAGES * BR * 4;

// Where things are on chip, in bytes.
constexpr int AT_K = PAIRED * DELTA_BYTES, AT_V = AT_K + BC * TO_D * 2;
constexpr int AT_K_THERE = AT_V + BC * (TO_V - PAIRED * SLAB) * 2;  // PAIRED: K of the other block of threads; the first slab of V is not kept
constexpr int AT_Q = AT_K_THERE + PAIRED * BC * TO_D * 2, AT_DO = AT_Q + STAGES * BR * TO_D * 2;
constexpr int AT_DS = AT_DO + STAGES * BR * TO_V * 2, AT_DQ = AT_DS + S_STAGES * BC * BR * 2;
constexpr int AT_DS_CAME = AT_DS + BC * BR * 2, AT_DS_SENT = AT_DQ;  // PAIRED: from the other block of threads, for it
constexpr int AT_PREPARED = AT_DQ + (APART ? 0 : COMPUTING * PATCH * 4);
constexpr int AT_FINISHED = AT_PREPARED + (FUSED && !PAIRED) * PREPARED_BYTES;  // PAIRED: one warp prepares, then finishes, in one place
constexpr int AT_LSE = AT_FINISHED + FUSED * (FINISHED_BEFORE + PATCH * 4), AT_LSE_END = AT_LSE + STAGES * BR * 4;
constexpr int AT_DELTA = PAIRED ? 0 : AT_LSE_END, AT_LIMITS = AT_LSE_END + !PAIRED * DELTA_BYTES;
constexpr int LIMITS = BAND && APART ? COMPUTING * WARPGROUP * VECTOR_BYTES : 0;
constexpr int AT_SHARES = AT_LIMITS + LIMITS, AT_BARRIERS = AT_SHARES + FUSED * 64;
constexpr int K_THERE = 0, V_THERE = 1, Q_THERE = 2, O_THERE = Q_THERE + STAGES, READ = O_THERE + STAGES;
constexpr int DQ_THERE = READ + STAGES, DQ_READ = DQ_THERE + COMPUTING;  // of each warpgroup's part
constexpr int DS_THERE = DQ_THERE, DS_READ = DQ_READ;                    // APART: of each place, instead
constexpr int FUSED_THERE = DQ_READ + COMPUTING;
// PAIRED: dS is ready to be sent, has come there; has come from there (before the first one K, too), its place is free there.
constexpr int DS_READY = FUSED_THERE + 2 * FUSED, DS_SENT = DS_READY + 1, DS_CAME = DS_READY + 2, DS_FREE = DS_READY + 3;
constexpr int TURN = DS_READY + 4 * PAIRED, ADDED = TURN + 1, BARRIERS = TURN + 2 * TURNS_APART;
static_assert(!PAIRED || FUSED && !STORES && BY_COLUMNS && V_HELD == SLAB / SUM, "the first slab of V is in registers");
static_assert(S_STAGES <= COMPUTING, "barriers of either kind");
static_assert(AT_BARRIERS + BARRIERS * 8 == TILE_BYTES, "tiling.py and this file disagree on what is on chip");

constexpr int ALL_MEET = 1, WARPGROUP_MEETS = 2, ALL_ADDED = 4;  // named barriers: of all that compute, one of each warpgroup; dQ has all
// Preparing and finishing takes more registers than copying; with 64 rows the warpgroups that compute can spare none.
constexpr int COPYING_REGISTERS = FUSED && APART ? 32 : 24, ADDING_REGISTERS = FUSED ? 80 : 88, COMPUTING_REGISTERS = APART ? 200 : 240;
static_assert(COPYING_REGISTERS + APART * ADDING_REGISTERS + COMPUTING * COMPUTING_REGISTERS <= 512, "what a multiprocessor has for 128 threads");

__device__ __forceinline__ int next_rows(const Work& work, int nth, int i0)
{
    if constexpr (EITHER_WAY) {
        const int next = !ONE_HEAD && nth + 1 < work.heads ? i0 : i0 + work.stride;
        return ROUND && next >= work.i_high ? work.i_low : next;
    }
    if constexpr (DOWN)
        return i0 > work.i_low ? i0 - BR : first_rows(work);
    return i0 + BR < work.i_high ? i0 + BR : work.i_low;
}

// The head of the next step, of those it has; its rows are those from i0 on.
__device__ __forceinline__ int next_head(const Work& work, int nth, int i0)
{
    if constexpr (ONE_HEAD)
        return 0;
    if constexpr (TOGETHER)
        return nth + 1 < work.heads ? nth + 1 : 0;
    return nth + (i0 == first_rows(work));
}

#include "rows_of_others.cuh"

// ---- sums that nobody clears ---------------------------------------------------------------------------------------------------------
//
// STORES, in short calls whose band has no lower end: of the blocks of keys that a block of rows sees, the last one comes first, in the grid and at
// these rows, with which it begins. It stores its dQ, and the others add to that. A counter of each head says how many blocks of threads have stored
// all they have to, in this order. Nobody waits for a block of threads that comes later.

__device__ __forceinline__ unsigned* stored(const Call& call, const Work& work, int h)
{
    return call.counters + (unsigned)call.B * ((FUSED ? 2 : 0) * (unsigned)call.Hkv) + work.b * (unsigned)call.Hq + h;
}

// The last block of keys that has rows to run over (work_of).
__device__ __forceinline__ int last_with_rows(const Call& call, const Work& work)
{
    const long long last = work.q_length % BR ? call.Tk - 1 : work.offset + call.band_upper + work.q_length - 1;
    return (int)clamp(last, 0, call.Tk - 1) / BC;
}

// Where the rows end whose dQ this block of threads stores: where those of the next one begin.
__device__ __forceinline__ int stored_to(const Call& call, const Work& work)
{
    if (work.j0 / BC == last_with_rows(call, work))
        return work.q_length;
    return (int)clamp(work.j0 + BC - work.offset - call.band_upper, 0, work.q_length) / BR * BR;
}

// The phase of dS's barriers in which a step is, when so many are left.
__device__ __forceinline__ int dS_parity(const Work& work, int steps) { return (work.steps - steps) / S_STAGES & 1; }

// ---- the warps that copy ---------------------------------------------------------------------------------------------------

// Where delta of a stage has its rows.
__device__ __forceinline__ int rows_of_delta(int stage) { return 4 * stage; }

// PAIRED: delta and lse of a block of rows.
__device__ __forceinline__ void copy_record(const unsigned char* record, unsigned char* on_chip, int stage, Barrier* barrier)
{
    unsigned char* const rows = on_chip + AT_DELTA + rows_of_delta(stage) * SLAB_ROW;
    if (stage == 0) {
        copy_bulk(rows, record, barrier, RECORD_PARTS);
    } else {  // in rows 4 to 6 of a slab halves of rows are where they are not in rows 0 to 2
#pragma unroll
        for (int n = 0; n < 2 * NUMBER_PARTS; n++)
            copy_bulk(rows + (n ^ 1) * (SLAB_ROW / 2), record + n * (SLAB_ROW / 2), barrier, SLAB_ROW / 2);
    }
    copy_bulk(on_chip + AT_LSE + stage * BR * 4, record + RECORD_PARTS, barrier, RECORD_LSE);
}

__device__ __forceinline__ void copy_all(const MappedCall& argument, const Work& work, unsigned char* on_chip, Barrier* barriers)
{
    const Call& call = argument.call;
    const int thread = threadIdx.x;
    const long long slot = (unsigned)work.slot;  // whose upper half takes no register then
    if constexpr (FUSED)
        await_prepared(call, work);
    if constexpr (PAIRED)
        fence_device();
    Ring<STAGES> to;
    int nth = 0, i0 = first_rows(work);
    for (int steps = work.steps; steps > 0; steps--) {
        const int h = work.first_head + nth;
        Barrier *const q_there = barriers + Q_THERE + to.stage, *const o_there = barriers + O_THERE + to.stage;
        await(barriers + READ + to.stage, to.parity ^ 1);
        // PAIRED: of 128 rows first those whose dQ the other block of threads computes, then those whose dQ this one does
        if constexpr (PAIRED)
            i0 += (rank_in_cluster() == (steps & 1)) * BR;
        if (thread == 0) {
            arrive_expecting(q_there, BR * TO_D * 2);
            copy_slabs<BR, TO_D>(on_chip + AT_Q + to.stage * BR * TO_D * 2, argument.map[MAP_Q], q_there, work.q_start + i0, h, work.slot);
            arrive_expecting(o_there, BR * TO_V * 2 + PAIRED * RECORD_BYTES);
            copy_slabs<BR, TO_V>(on_chip + AT_DO + to.stage * BR * TO_V * 2, argument.map[MAP_DO], o_there, work.q_start + i0, h, work.slot);
            if constexpr (PAIRED)
                copy_record(record_of_block(call, first_block(call, work.b, h, 0) + i0 / BR), on_chip, to.stage, o_there);
        }

        // lse in units of exp2, and delta. A row that sees nothing has P = 0, and one that does not exist. All rows of a thread are asked for before
        // any is awaited, but where places take the registers for it.
        constexpr int LOADS = PACKED || TURNS_APART && DOWN ? 1 : BR / COPYING;
#pragma unroll
        for (int from = 0; from < (PAIRED ? 0 : BR); from += LOADS * COPYING) {
            float lse[LOADS], delta[LOADS];
#pragma unroll
            for (int n = 0; n < LOADS; n++) {
                const int i = i0 + from + n * COPYING + thread;
                lse[n] = -INFINITE, delta[n] = 0.0f;
                if (i < work.q_length) {
                    lse[n] = *row_of(call.lse, slot, h, work.q_start + i);
                    delta[n] = *row_of(call.delta, slot, h, work.q_start + i);
                }
            }
#pragma unroll
            for (int n = 0; n < LOADS; n++) {
                const int at = to.stage * BR + from + n * COPYING + thread;
                ((float*)(on_chip + AT_LSE))[at] = lse[n] == -INFINITE ? INFINITE : lse[n] * LOG2E;
                ((float*)(on_chip + AT_DELTA))[at] = DELTA_FIRST ? -delta[n] : delta[n];
            }
        }
        if constexpr (!PAIRED)
            arrive(o_there);

        to.next();
        if (PAIRED && steps % 2 == 0) {
            i0 &= ~BR;
            continue;
        }
        i0 = next_rows(work, nth, PAIRED ? i0 | BR : i0);
        nth = next_head(work, nth, i0);
    }
}

// PAIRED: a thread copies K of the other block of threads, and sends dS of those rows whose dQ that one computes. When that has come, half of dQ may be
// stored where it was. What comes from there finds a free place: the one before has been read. Before a block of threads ends it has seen all arrivals
// from the other one, which makes none after that.
__device__ __forceinline__ void exchange(const MappedCall& argument, const Work& work, unsigned char* on_chip, Barrier* barriers)
{
    if (work.steps == 0)
        return;
    arrive_expecting(barriers + DS_CAME, BC * TO_D * 2 + BC * BR * 2);
    copy_slabs<BC, TO_D>(on_chip + AT_K_THERE, argument.map[MAP_K], barriers + DS_CAME, work.j0 ^ BC, work.h, work.slot);
    const unsigned there = rank_in_cluster() ^ 1;
    int parity = 0;
#pragma unroll 1
    for (int steps = work.steps; steps > 0; steps -= 2, parity ^= 1) {
        if (steps < work.steps) {
            arrive_expecting(barriers + DS_CAME, BC * BR * 2);
            await(barriers + DS_FREE, parity ^ 1);
        }
        await(barriers + DS_READY, parity);
        fence_shared();
        copy_there(on_chip + AT_DS_CAME, on_chip + AT_DS_SENT, barriers + DS_CAME, BC * BR * 2, there);
        await(barriers + DS_CAME, parity);
        arrive_there(barriers + DS_SENT, there);
    }
}

template <class Step> __device__ __forceinline__ void each_block_of_rows(const Call& call, const Work& work, Step step)
{
    int nth = 0, i0 = first_rows(work);
#pragma unroll 1
    for (int steps = work.steps; steps > 0; steps--) {
        step(steps, i0, block_at(call, work, work.first_head + nth, i0));
        i0 = next_rows(work, nth, i0);
        nth = next_head(work, nth, i0);
    }
}

// ---- the thread that adds -----------------------------------------------------------------------------------------------------

// STORES: this block of threads has stored what it has to; what it adds to has been stored.
__device__ __forceinline__ void pass_stored(const Call& call, const Work& work, int h)
{
    await_stores<0>();
    unsigned* const blocks = stored(call, work, h);
    await_turn(blocks, (unsigned)(last_with_rows(call, work) - work.j0 / BC));
    pass_turn(blocks);  // whose fence lets this thread's additions see what others stored
}

// Step by step the dQ_i of each warpgroup to the sums in device memory. This thread's fence lets the copies see what lanes have stored: so these need
// none each. DETERMINISTIC: in the order of the grid (key_block). A block of threads waits for those alone that began before it. Of the next turn it
// finds out while the engine adds; TURNS_APART: another thread does.
__device__ __forceinline__ void add_all(const Call& call, const Work& work, const unsigned char* on_chip, Barrier* barriers)
{
    int nth = 0, i0 = first_rows(work), parity = 0;
    if constexpr (FUSED) {
        await_prepared(call, work);
        fence_device();
    }
    const int to_be_stored = STORES ? stored_to(call, work) : 0;
    const auto block_of_rows = [&]() -> long long {
        return block_at(call, work, work.first_head + nth, i0) + (PAIRED ? rank_in_cluster() : 0);
    };
    long long block = block_of_rows();
    unsigned turn = DETERMINISTIC ? turn_at(call, work, i0) : 1;
    bool has_turn = false;
#pragma unroll 1
    for (int steps = work.steps; steps > 0; steps -= 1 + PAIRED, parity ^= 1) {
        const int h = work.first_head + nth;
        const bool stores = STORES ? i0 < to_be_stored : FIRST_STORES && turn == 0;
        if (STORES && i0 == first_rows(work) && i0 >= to_be_stored)  // of these rows nothing
            pass_stored(call, work, h);
        if (DETERMINISTIC && !TURNS_APART && !has_turn) {
            await_turn(turns(call, block), turn);
            fence_device();  // elsewhere pass_turn's
        }
        float* const sums = sums_of_block(call, block);
#pragma unroll
        for (int n = 0; n < COMPUTING; n++) {
            await(barriers + DQ_THERE + n, parity);
            fence_shared();
            if (TURNS_APART && n == 0) {
                await(barriers + TURN, parity);
                fence_device();
            }
            float* const to = sums + (BY_KEYS && SETS == 1 ? 0 : n * PATCH);
            if (stores)
                store_bulk(to, on_chip + AT_DQ + n * PATCH * 4, PATCH * 4);
            else
                add_bulk(to, on_chip + AT_DQ + n * PATCH * 4, PATCH * 4);
            commit_stores();
            if (PAIRED && n == 0) {  // for where it lies both warpgroups wait
                await_stores_read<0>();
                arrive(barriers + DQ_READ);
            }
        }
        if constexpr (!PAIRED) {
            await_stores_read<1>();
            arrive(barriers + DQ_READ);
        }
        await_stores_read<0>();
        arrive(barriers + DQ_READ + 1);
        if (STORES && i0 < to_be_stored && i0 + BR >= to_be_stored)
            pass_stored(call, work, h);
        if constexpr (PAIRED)
            i0 += BR;
        i0 = next_rows(work, nth, i0);
        nth = next_head(work, nth, i0);
        const long long before = block;
        block = block_of_rows();
        if constexpr (TURNS_APART) {
            turn = turn_at(call, work, i0);
            await_stores<0>();
            arrive(barriers + ADDED);
        } else if constexpr (DETERMINISTIC) {
            turn = turn_at(call, work, i0);
            has_turn = steps > 1 + PAIRED && turn_has_come(turns(call, block), turn);
            await_stores<0>();
            pass_turn(turns(call, before));
        }
    }
    if constexpr (FUSED) {
        await_stores<0>();
        pass_turn(added(call, work.b * (unsigned)call.Hkv + work.h));
    }
}

// ---- the warpgroups that compute --------------------------------------------------------------------------------------------------

// The factor of begin_with_minus: -1 for three of 16 rows from `first` on, a multiple of 4, and 0 for the others. A lane has, in two words, two
// neighbouring rows of each eight. It is found each time, as there is no register for it.
__device__ __forceinline__ void minus_one(unsigned (&x)[4], int first)
{
    const unsigned thread = once_more(threadIdx.x);
    const unsigned word = (int)(thread / 2 % 2) == first / 4 % 2 ? thread % 2 ? 0xBF80u : 0xBF80BF80u : 0u;
#pragma unroll
    for (int e = 0; e < 4; e++)
        x[e] = first / 8 == e / 2 ? word : 0u;
}

// store_factor, in reverse.
template <int ROWS> __device__ __forceinline__ void load_factor(unsigned (&factor)[4], const unsigned char* slabs, int row, int n)
{
    const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES % WARPS;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const int piece = 2 * n + e / 2;
        factor[e] = *(const unsigned*)(slabs + piece / 8 * ROWS * SLAB_ROW + in_slab(row + 16 * warp + lane / 4 + 8 * (e % 2), piece % 8) +
                                       4 * (lane % 4));
    }
}

// Where a lane stores its part of 16 rows of dS in a slab of its warpgroup's keys; and those, of the n-th 16.
__device__ __forceinline__ unsigned place_across()
{
    const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES % WARPS, matrix = lane / 8;
    return in_slab(matrix / 2 * 8 + lane % 8, 2 * warp + matrix % 2);
}

__device__ __forceinline__ void store_across(unsigned char* place, int n, const unsigned (&factor)[4])
{
    store_matrices<true>(place + n * ROW_STEP, factor[0], factor[1], factor[2], factor[3]);
}

__device__ __forceinline__ void all_meet()
{
    if constexpr (BAND && !PAIRED)
        meet_from_apart(ALL_MEET, COMPUTING * WARPGROUP);
    else
        meet(ALL_MEET, COMPUTING * WARPGROUP);
}

// The warpgroup that computes dQ_i where it is APART: 64 rows after 64, each added as soon as it is there. It computes dQ_i^T = K^T dS_i^T, a warp 16
// columns, so that of the factor that stays, K^T, it holds as much as it has registers for. In the sums 16 rows come behind 16, of all warps.
// DETERMINISTIC: a thread of one warp awaits the turn, while dS comes; one of another passes it on when all have added.
__device__ __forceinline__ void add_apart(const Call& call, const Work& work, const unsigned char* on_chip, Barrier* barriers)
{
    const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES % WARPS;
    const LowerHalf keys_across = lower_half(on_chip, BC * SLAB_ROW), K_across = moved(keys_across, AT_K), dS_across = moved(keys_across, AT_DS);
    const auto speaks_for_all = [&]() -> bool {
        meet(ALL_ADDED, WARPGROUP);
        return threadIdx.x % WARPGROUP == 0;
    };
    const auto pass_all_stored = [&](int h) {
        if (speaks_for_all())
            pass_stored(call, work, h);
        meet(ALL_ADDED, WARPGROUP);
    };
    unsigned K_mine[K_HELD][4];
    if (work.steps > 0) {
        await(barriers + K_THERE, 0);
        await(barriers + DS_THERE + work.steps % S_STAGES, dS_parity(work, work.steps));  // keys that do not exist have been cleared
#pragma unroll
        for (int n = 0; n < K_HELD; n++)
            load_matrices_transposed(K_mine[n], shared_address(on_chip) + AT_K + place_across() + n * ROW_STEP);
    }
    int nth = 0, i0 = first_rows(work);
    const int to_be_stored = STORES ? stored_to(call, work) : 0;
#pragma unroll 1
    for (int steps = work.steps; steps > 0; steps--) {
        const int stage = steps % S_STAGES, h = work.first_head + nth;
        const long long block = block_at(call, work, h, i0);
        const unsigned turn = DETERMINISTIC ? turn_at(call, work, i0) : 1;
        const bool stores = STORES ? i0 < to_be_stored : FIRST_STORES && turn == 0;
        if (STORES && i0 == first_rows(work) && i0 >= to_be_stored)
            pass_all_stored(h);
        if (DETERMINISTIC && warp == 1 && lane == 0)
            await_turn(turns(call, block), turn);
        await(barriers + DS_THERE + stage, dS_parity(work, steps));
        float4* const to = (float4*)sums_of_block(call, block) + warp * 2 * WARP_LANES + lane;
#pragma unroll
        for (int patch = 0; patch < PATCHES; patch++) {
            float dQ[64 / 2];
            fence_products();
#pragma unroll
            for (int n = 0; n < BC / SUM; n++) {
                const LowerHalf dS = moved(dS_across, patch * BC * SLAB_ROW + n * ROW_STEP) + stage * (BC * BR * 2 >> 4);
                if (n < K_HELD)
                    multiply_rs<64, true>(dQ, K_mine[n < K_HELD ? n : 0], dS, n > 0);
                else
                    multiply_ss<64, true, true>(dQ, moved(K_across, n * ROW_STEP), dS, n > 0);
            }
            commit_products();
            await_products<0>();
            if (patch + 1 == PATCHES)
                arrive_as_warp(barriers + DS_READ + stage, lane);
            if (DETERMINISTIC && patch == 0)
                meet(ALL_ADDED, WARPGROUP);  // it is this one's turn
#pragma unroll
            for (int n = 0; n < 64 / 8; n++) {
                const float4 numbers = make_float4(dQ[4 * n], dQ[4 * n + 1], dQ[4 * n + 2], dQ[4 * n + 3]);
                float4* const sums = to + patch * (PATCH / LANE_NUMBERS) + (n / 2 * 2 * WARPS + n % 2) * WARP_LANES;
                if (stores)
                    *sums = numbers;
                else
                    atomicAdd(sums, numbers);
            }
        }
        if (STORES && i0 < to_be_stored && i0 + BR >= to_be_stored)
            pass_all_stored(h);
        if (DETERMINISTIC && speaks_for_all())
            pass_turn(turns(call, block));
        i0 = next_rows(work, nth, i0);
        nth = next_head(work, nth, i0);
    }
    if (FUSED && speaks_for_all()) {
        if (work.steps == 0)  // nobody else has waited for the rows that are finished then
            await_prepared(call, work);
        pass_turn(added(call, work.b * (unsigned)call.Hkv + work.h));
    }
}

// DIVIDED: leave a share of dK and dV in device memory, in the order of the registers. Who comes last has the sums of all then, in the order of rows.
__device__ __forceinline__ bool has_all_sums(const Call& call, unsigned char* on_chip, float (&dK)[TO_D / 2], float (&dV)[TO_V / 2])
{
    constexpr int MEMBERS = COMPUTING * WARPGROUP, VECTORS = MEMBERS * (TO_D + TO_V) / 2 / LANE_NUMBERS;
    const unsigned index = once_more(blockIdx.x), thread = once_more(threadIdx.x) - WARPGROUP;  // registers are few while products run
    Part part = part_of(call, index);
    // Where those of a block of keys begin; PAIRED: first those of one of a cluster's two, then those of the other
    unsigned counted = part.block - (unsigned)call.whole, first = index - (unsigned)call.whole - part.number;
    if constexpr (BY_HEAD || DIAGONAL) {  // with room for as many as a long one has
        const KeyBlock place = key_block(call, part.block);
        const int heads = BY_HEAD ? (int)call.group : 1;
        counted = place.head * (unsigned)call.blocks + place.block, first = counted * heads * (DIAGONAL ? (unsigned)call.parts : 1);
        part.number += (int)place.nth * part.count, part.count *= heads;
    }
    if (part.count == 1)
        return true;
    if constexpr (PAIRED)
        first = (first - part.number & ~1u) + index % 2 * part.count;
    float4* const shares = (float4*)(call.sums + call.share) + (long long)first * VECTORS + thread;
    float4* const mine = shares + part.number * VECTORS;
#pragma unroll
    for (int n = 0; n < TO_D / 8; n++)
        mine[n * MEMBERS] = make_float4(dK[4 * n], dK[4 * n + 1], dK[4 * n + 2], dK[4 * n + 3]);
#pragma unroll
    for (int n = 0; n < TO_V / 8; n++)
        mine[(TO_D / 8 + n) * MEMBERS] = make_float4(dV[4 * n], dV[4 * n + 1], dV[4 * n + 2], dV[4 * n + 3]);
    unsigned* const others = (unsigned*)(on_chip + AT_LSE);  // nobody reads that any more
    all_meet();
    if (thread == 0)  // the last ones of all counters
        *others = count_and_see((unsigned*)call.sums - 1 - counted, part.count - 1);
    all_meet();
    if (*others != part.count - 1)
        return false;
#pragma unroll
    for (int n = 0; n < TO_D / 2; n++)
        dK[n] = 0.0f;
#pragma unroll
    for (int n = 0; n < TO_V / 2; n++)
        dV[n] = 0.0f;
    const auto add = [](float (&sum)[4], float4 x) { sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w; };
#pragma unroll 1
    for (int m = 0; m < part.count; m++) {
        const float4* const from = shares + m * VECTORS;
#pragma unroll
        for (int n = 0; n < TO_D / 8; n++)
            add((float (&)[4])dK[4 * n], __ldcg(from + n * MEMBERS));
#pragma unroll
        for (int n = 0; n < TO_V / 8; n++)
            add((float (&)[4])dV[4 * n], __ldcg(from + (TO_D / 8 + n) * MEMBERS));
    }
    return true;
}

// Barriers by address where that leaves nearly no copies of upper halves between products, and elsewhere not, where it makes some.
__device__ __forceinline__ auto barriers_by(Barrier* first)
{
    if constexpr (PAIRED)
        return by_address(first);
    else
        return first;
}

__device__ __forceinline__ void compute_all(const Call& call, const Work& work, unsigned char* on_chip, Barrier* first_barrier)
{
    const auto barriers = barriers_by(first_barrier);
    const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES % WARPS;
    const int mine = __shfl_sync(WARP, (int)(threadIdx.x / WARPGROUP) - 1, 0), first_key = mine * KEYS;
    float dK[TO_D / 2], dV[TO_V / 2];
#pragma unroll
    for (int n = 0; n < TO_D / 2; n++)
        dK[n] = 0.0f;
#pragma unroll
    for (int n = 0; n < TO_V / 2; n++)
        dV[n] = 0.0f;

    if (work.steps > 0) {
        // A number of the call leaves a register to others, but with 64 rows and divided blocks of keys the assembler spills for it
        const float scale = BR == 64 && DIVIDED ? (float)(call.scale * (double)LOG2E) : call.scale_log2;
        const int q_length = work.q_length, left = (int)least(work.kv_length - work.j0, BC);  // keys of the block
        // Of the lane's two keys: the rows that see them, none if the key does not exist; where a band has no lower end, these are all from the first on.
        // Without a band and in pairs, the most that an exponent may be there, in float16, where dS may be infinite. Between the warpgroup's keys and
        // rows that are `seen`, some are visible, and all that exist with rows that are `plain`.
        unsigned first[2], count[2];
        float most[2];
        int seen_from = 0, seen_to = q_length, plain_from = 0, plain_to = q_length + BR;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int y = first_key + 16 * warp + lane / 4 + 8 * e;
            most[e] = y < left ? 0.0f : -INFINITE;
            if constexpr (BAND && !PAIRED) {
                const long long j = work.j0 + y - work.offset;
                const int low = (int)clamp(j - call.band_upper, 0, q_length), high = (int)clamp(j - call.band_lower + 1, 0, q_length);
                first[e] = (LOWER || y < left && low < q_length ? low : NO_ROW) - 2 * (lane % 4), count[e] = y < left ? high - low : 0;
            }
        }
        // PAIRED, where a band has no lower end: the row from which on the block's first key is seen; the next one is a row later
        const int first_seen = BAND && PAIRED ? (int)clamp(work.j0 - work.offset - call.band_upper, -BC, q_length) : 0;
        if constexpr (BAND && !PAIRED) {
            const long long j = work.j0 + first_key - work.offset;
            seen_from = (int)clamp(j - call.band_upper, 0, q_length);
            seen_to = (int)clamp(j + KEYS - call.band_lower, 0, q_length);
            plain_from = (int)clamp(j + KEYS - 1 - call.band_upper, 0, q_length + BR);
            plain_to = first_key + KEYS <= left ? (int)clamp(j - call.band_lower + 1, 0, q_length + BR) : 0;
        }
        // Copies read what follows the rows of a sequence if there is something
        const bool rows_follow = work.q_start + q_length < call.rows_q, keys_follow = work.k_start + work.kv_length < call.rows_k;
        // Where the lane stores its part of dQ and of the first 16 rows of dS. To the compiler they are other numbers in each step: it keeps them, in a
        // register each, and does not compute them anew.
        unsigned at_dQ = AT_DQ + VECTOR_BYTES * (mine * (PATCH / LANE_NUMBERS) + warp * (DQ_COLUMNS / 8) * WARP_LANES + lane);
        unsigned at_dS = AT_DS + mine * BR * SLAB_ROW + (DS_BY_ROWS ? place_across() : 0);

        // Of all matrices on chip; where they are read across, rows of a slab decide where the next slab is
        const LowerHalf chip = lower_half<PAIRED>(on_chip), keys_across = lower_half<PAIRED>(on_chip, BC * SLAB_ROW);
        const LowerHalf rows_across = lower_half<PAIRED>(on_chip, BR * SLAB_ROW);
        const LowerHalf K = moved(chip, AT_K + first_key * SLAB_ROW), V = moved(chip, AT_V + (first_key - PAIRED * BC) * SLAB_ROW);
        const LowerHalf K_across = moved(keys_across, AT_K + (BY_COLUMNS ? mine * BC * SLAB_ROW : BY_KEYS ? first_key * SLAB_ROW : 0));
        const LowerHalf K_there_across = moved(K_across, AT_K_THERE - AT_K);
        const LowerHalf Q = moved(chip, AT_Q), Q_across = moved(rows_across, AT_Q), dO = moved(chip, AT_DO), dO_across = moved(rows_across, AT_DO);
        const LowerHalf dS_rows = moved(chip, AT_DS + (BY_KEYS ? mine * BR * SLAB_ROW : 0));
        const LowerHalf delta_across = moved(chip, AT_DELTA), dS_across = moved(keys_across, AT_DS + (BY_ROWS ? mine * BC * SLAB_ROW : 0));

        Scores scores(call);
        Ring<STAGES> at;
        int nth = 0, i0 = first_rows(work), steps = work.steps, taken = 0;
        const auto next_step = [&]() {
            if constexpr (PAIRED) {
                at.parity ^= steps & 1;
                steps--;
                return;
            }
            at.next();
            i0 = next_rows(work, nth, i0);
            nth = next_head(work, nth, i0);
            steps--, taken++;
        };

        await(barriers + K_THERE, 0);
        await(barriers + V_THERE, 0);
        if (keys_follow && left < BC) {
            clear_rows<BC, TO_D, COMPUTING * WARPGROUP>(on_chip + AT_K, left, threadIdx.x - WARPGROUP);
            clear_rows<BC, TO_V, COMPUTING * WARPGROUP>(on_chip + AT_V, left, threadIdx.x - WARPGROUP);
            fence_shared();
            all_meet();
        }

        unsigned V_mine[V_HELD > 0 ? V_HELD : 1][4];
#pragma unroll
        for (int n = 0; n < V_HELD; n++)
            load_factor<BC>(V_mine[n], on_chip + (PAIRED ? AT_DS : AT_V), first_key, n);
        uint4* const limits = (uint4*)(on_chip + (APART ? AT_LIMITS + mine * (LIMITS / 2) : AT_V + first_key * SLAB_ROW)) + threadIdx.x % WARPGROUP;
        if constexpr (LIMITS_ON_CHIP && !APART || PAIRED)
            meet(WARPGROUP_MEETS + mine, WARPGROUP);  // V is read
        if constexpr (LIMITS_ON_CHIP) {
            *limits = make_uint4(first[0], first[1], count[0], count[1]);
        }

        // hides: may something be hidden between its rows and the warpgroup's keys?
        // S^T = K Q^T
        const auto begin_S = [&](float (&S)[BR / 2], int of_q) __attribute__((always_inline)) {
            fence_products();
#pragma unroll
            for (int n = 0; n < TO_D / SUM; n++)
                multiply_ss<BR>(S, moved(K, column_step<BC>(n)), moved(Q, column_step<BR>(n)) + of_q, n > 0);
            commit_products();
        };
        // given: PAIRED, is it the step whose dQ the other block of threads computes?
        const auto step = [&](float (&S)[BR / 2], const bool hides, const bool given = false) __attribute__((always_inline)) {
            const bool rows_end = !PAIRED && rows_follow && i0 + BR > q_length;
            unsigned char* const tile = on_chip + AT_DS + steps % S_STAGES * (BC * BR * 2);
            if constexpr (DS_BY_ROWS)
                at_dS = once_more(at_dS);
            unsigned char* const tile_mine = on_chip + at_dS + (PAIRED ? given * (AT_DS_SENT - AT_DS) : steps % S_STAGES * (BC * BR * 2));
            const int stage = PAIRED ? !given : at.stage;
            const int of_q = stage * (BR * TO_D * 2 >> 4), of_o = stage * (BR * TO_V * 2 >> 4);
            const int of_s = PAIRED ? 0 : steps % S_STAGES * (BC * BR * 2 >> 4);

            // dQ_i = dS K
            const auto begin_dQ = [&](float (&dQ)[DQ_COLUMNS / 2]) __attribute__((always_inline)) {
                fence_products();
#pragma unroll
                for (int n = 0; n < (PAIRED ? 2 * BC : BY_KEYS ? KEYS : BC) / SUM; n++)
                    if (PAIRED && n >= BC / SUM)
                        multiply_ss<DQ_COLUMNS, false, true>(dQ, moved(dS_rows, column_step<BR>(n)), moved(K_there_across, (n - BC / SUM) * ROW_STEP), true);
                    else if constexpr (DS_BY_ROWS)
                        multiply_ss<DQ_COLUMNS, false, true>(dQ, moved(dS_rows, column_step<BR>(n)) + of_s, moved(K_across, n * ROW_STEP), n > 0);
                    else
                        multiply_ss<DQ_COLUMNS, true, true>(dQ, moved(dS_across, n * ROW_STEP) + of_s, moved(K_across, n * ROW_STEP), n > 0);
                commit_products();
            };
            const auto pass_on = [&](const float (&dQ)[DQ_COLUMNS / 2]) __attribute__((always_inline)) {
                if constexpr (!PAIRED)
                    await(barriers + DQ_READ + mine, (taken & 1) ^ 1);  // that of the step before is on its way
                else if (mine == 0)
                    await(barriers + DS_SENT, at.parity);  // where this part of dQ comes
                if constexpr (DS_BY_ROWS)
                    at_dQ = once_more(at_dQ);
                float4* const passed = (float4*)(on_chip + at_dQ);
#pragma unroll
                for (int n = 0; n < DQ_COLUMNS / 8; n++)
                    passed[n * WARP_LANES] = make_float4(dQ[4 * n], dQ[4 * n + 1], dQ[4 * n + 2], dQ[4 * n + 3]);
            };
            const auto tell = [&]() __attribute__((always_inline)) { arrive_as_warp(barriers + DQ_THERE + mine, lane); };

            // No row of them sees a key of this warpgroup, which has a share in their dQ nevertheless
            if (hides && SKIPS && !rows_end && (i0 + BR <= seen_from || i0 >= seen_to)) {
                // Not to be read, but nobody may give back what is still on its way
                await(barriers + Q_THERE + at.stage, at.parity);
                await(barriers + O_THERE + at.stage, at.parity);
                const unsigned zeros[4] = {};
#pragma unroll
                for (int n = 0; n < BR / SUM; n++)
                    store_across(tile_mine, n, zeros);
                fence_shared();
                all_meet();
                float dQ[DQ_COLUMNS / 2];
                begin_dQ(dQ);
                await_products<0>();
                pass_on(dQ);
                tell();
                arrive_as_warp(barriers + READ + at.stage, lane);
                next_step();
                return;
            }

            scores.begin_head(call, work.b, work.first_head + nth);
            float dP[PART / 2];
            const auto set_dP = [&](int r) __attribute__((always_inline)) {
                const float2* const minus_delta = (const float2*)(on_chip + AT_DELTA) + stage * (BR / 2) + r * (PART / 2) + lane % 4;
#pragma unroll
                for (int n = 0; n < PART / 8; n++) {
                    const float2 x = minus_delta[4 * n];
                    dP[4 * n] = dP[4 * n + 2] = x.x, dP[4 * n + 1] = dP[4 * n + 3] = x.y;
                }
                pin(dP);  // here, and not while products are under way: the assembler would wait for them
            };

            if (!PAIRED || given)
                await(barriers + Q_THERE + stage, at.parity);
            if constexpr (APART) {
                await(barriers + O_THERE + stage, at.parity);
                set_dP(0);
            }
            if (rows_end) {
                clear_rows<BR, TO_D, COMPUTING * WARPGROUP>(on_chip + AT_Q + stage * BR * TO_D * 2, q_length - i0, threadIdx.x - WARPGROUP);
                fence_shared();
                all_meet();
            }
            if (!PAIRED || given)
                begin_S(S, of_q);

            // dP^T = V dO^T, or V dO^T - delta, 64 rows at a time
            [[maybe_unused]] unsigned minus[4];
            const auto begin_dP = [&](int r) {
                if constexpr (PAIRED)
                    minus_one(minus, rows_of_delta(stage));
                fence_products();
                if constexpr (PAIRED)
                    begin_with_minus(dP, minus, delta_across, rows_of_delta(stage));
#pragma unroll
                for (int n = 0; n < TO_V / SUM; n++) {
                    const LowerHalf rows = moved(dO, r * PART * SLAB_ROW + column_step<BR>(n)) + of_o;
                    if (n < V_HELD)
                        multiply_rs<PART>(dP, V_mine[n < V_HELD ? n : 0], rows, DELTA_FIRST || n > 0);
                    else
                        multiply_ss<PART>(dP, moved(V, column_step<BC>(n)), rows, DELTA_FIRST || n > 0);
                }
                commit_products();
            };
            if constexpr (!APART)
                await(barriers + O_THERE + stage, at.parity);
            if (rows_end) {
                clear_rows<BR, TO_V, COMPUTING * WARPGROUP>(on_chip + AT_DO + stage * BR * TO_V * 2, q_length - i0, threadIdx.x - WARPGROUP);
                fence_shared();
                all_meet();
            }
            begin_dP(0);
            float2 rows_lse[PART / 8], rows_delta[PART / 8];
            const auto read_rows = [](float2 (&rows)[PART / 8], const float2* from) __attribute__((always_inline)) {
#pragma unroll
                for (int n = 0; n < PART / 8; n++)
                    rows[n] = from[4 * n];
            };
            if constexpr (ROWS_FIRST) {
                read_rows(rows_lse, (const float2*)(on_chip + AT_LSE) + stage * (BR / 2) + lane % 4);
                pin((float(&)[PART / 4])rows_lse);
            }
            await_products<1>();  // S

            if constexpr (APART)
                await(barriers + DS_READ + steps % S_STAGES, (taken / S_STAGES & 1) ^ 1);  // that of the step before the last
            unsigned P[BR / SUM][4], dS[BR / SUM][4];
            const auto begin_dK = [&](int from, int to) __attribute__((always_inline)) {
#pragma unroll
                for (int n = from; n < to; n++)
                    multiply_rs<TO_D, true>(dK, dS[n], moved(Q_across, n * ROW_STEP) + of_q, true);
                commit_products();
            };
            const auto begin_dV = [&](int r, int from, int to) __attribute__((always_inline)) {
#pragma unroll
                for (int n = from; n < to; n++)
                    multiply_rs<TO_V, true>(dV, P[r * (PART / SUM) + n], moved(dO_across, r * PART * SLAB_ROW + n * ROW_STEP) + of_o, true);
            };
#pragma unroll
            for (int r = 0; r < PARTS; r++) {
                const float2* const lse = (const float2*)(on_chip + AT_LSE) + stage * (BR / 2) + r * (PART / 2) + lane % 4;
                const float2* const delta = (const float2*)(on_chip + AT_DELTA) + stage * (BR / 2) + r * (PART / 2) + lane % 4;
                // Of the row of a lane's n-th number
                const auto of_row = [](const float2 (&rows)[PART / 8], const float2* from, int n) __attribute__((always_inline)) {
                    if constexpr (ROWS_FIRST)
                        return n % 2 ? rows[n / 4].y : rows[n / 4].x;
                    else
                        return n % 2 ? from[n / 4 * 4].y : from[n / 4 * 4].x;
                };
                // Column 8 (n / 4) + n % 2 after the lane's first is the row, counted from i0; PAIRED: from the first of this step
                const auto hidden = [&](int n, const uint4 limit) __attribute__((always_inline)) -> bool {
                    if constexpr (PAIRED)
                        return 8 * (n / 4) + n % 2 - 8 * (n / 2 % 2) < (int)limit.x;
                    const int row = r * PART + 8 * (n / 4) + n % 2;
                    const unsigned before = i0 - (n / 2 % 2 ? limit.y : limit.x);  // rows from the first that sees the key to the lane's first
                    return LOWER ? before + row >= (n / 2 % 2 ? limit.w : limit.z) : (int)before < -row;
                };
                const auto hide = [&](float (&x)[PART / 2], const uint4 limit) {
#pragma unroll
                    for (int n = 0; n < PART / 2; n++)
                        if (hidden(n, limit))
                            x[n] = 0.0f;
                };
                // P = exp(S - lse), at most 1 whatever was rounded, NaN stays NaN. dS = P (dP - delta). Without a branch between them, most
                // exponentials are taken as dS is computed. S - lse is above 0 by what was rounded alone: then -|S - lse| is as near, and the sign
                // belongs to the exponential's operand, where the smaller of two numbers is an instruction. In bfloat16 P of keys that do not
                // exist is at most 1, too: dS, which is finite, then meets zeros of K.
                float unit[1] = {scale};
                if (!hides)
                    pin(unit);  // another number to the compiler, which would take exponentials before this place
                float x[PART / 2];
                uint4 limit = make_uint4(0, 0, 0, 0);
                if (hides && PAIRED)  // of the first row of this lane, how many before its first key sees one
                    limit.x = first_seen + first_key + 16 * warp + lane / 4 - i0 - (rank_in_cluster() != given) * BR - 2 * (lane % 4);
                else if (hides)
                    limit = LIMITS_ON_CHIP ? *limits : make_uint4(first[0], first[1], count[0], count[1]);
                if constexpr (PLAIN) {
#pragma unroll
                    for (int n = 0; n < PART / 2; n++) {
                        const float power = fmaf(S[r * (PART / 2) + n], unit[0], -of_row(rows_lse, lse, n));
                        x[n] = exp2_approximately(BY_SIGN ? -fabsf(power) : least_or_nan(power, HAS_BOUNDS ? most[n / 2 % 2] : 0.0f));
                    }
                    if (hides)
                        hide(x, limit);
#pragma unroll
                    for (int n = 0; n < PART / SUM; n++)
                        to_factor(P[r * (PART / SUM) + n], x, n);
                } else {  // two numbers after two, so that few factors of dS are kept
                    const float distance = ALIBI ? (float)(i0 + r * PART + 2 * (lane % 4) + work.offset - work.j0 - first_key - 16 * warp - lane / 4) : 0.0f;
#pragma unroll
                    for (int n = 0; n < PART / 2; n += 2) {
                        float slopes[2];
#pragma unroll
                        for (int e = n; e < n + 2; e++) {
                            const Score score = scores.of(S[r * (PART / 2) + e], distance + (8 * (e / 4) + e % 2 - 8 * (e / 2 % 2)));
                            x[e] = exp2_approximately(least_or_nan(score.twos - of_row(rows_lse, lse, e), HAS_BOUNDS ? most[e / 2 % 2] : 0.0f));
                            if (hides && hidden(e, limit))
                                x[e] = 0.0f;
                            slopes[e - n] = score.slope;
                        }
                        P[r * (PART / SUM) + n / 8][n % 8 / 2] = pair(x[n], x[n + 1]);
                        if constexpr (SOFTCAP)
                            x[n] *= slopes[0], x[n + 1] *= slopes[1];
                    }
                }
                // Where dS is to be, nobody reads any more: the engine dQ of this warpgroup, products of the other one dS, of the rows before
                if constexpr (PAIRED)
                    await(barriers + DQ_READ + !given, at.parity ^ 1);
                await_products<0>();  // dP
                if constexpr (ROWS_FIRST && !DELTA_FIRST)
                    read_rows(rows_delta, delta);
                if (PAIRED && hides)
                    limit.x = once_more(limit.x);  // to be compared again: no registers for what was found
#pragma unroll
                for (int n = 0; n < PART / 2; n++)
                    x[n] *= DELTA_FIRST ? dP[n] : dP[n] - of_row(rows_delta, delta, n);
                if (hides)
                    hide(x, limit);
#pragma unroll
                for (int n = 0; n < PART / SUM; n++) {
                    const int row = r * (PART / SUM) + n;
                    to_factor(dS[row], x, n);
                    if constexpr (DS_BY_ROWS)
                        store_across(tile_mine, row, dS[row]);
                    else
                        store_factor<BC>(tile, first_key, row, dS[row]);
                }

                if (APART && r + 1 < PARTS)
                    set_dP(r + 1);

                // dV += P^T dO; APART: and dK += dS^T Q
                fence_products();
                begin_dV(r, 0, PAIRED && given ? PART / SUM : DV_FIRST);
                if (PAIRED && given) {
                    commit_products();
                    begin_dK(0, BR / SUM);
                } else if constexpr (APART)
                    begin_dK(r * (PART / SUM), (r + 1) * (PART / SUM));
                else
                    commit_products();
                if (r + 1 < PARTS)
                    begin_dP(r + 1);
            }
            if (PAIRED && given) {
                arrive_as_warp(barriers + DS_READY, lane);
                await(barriers + Q_THERE + 1, at.parity);
                begin_S(S, BR * TO_D * 2 >> 4);  // of the other rows, behind dV and dK
                await_products<1>();
                arrive_as_warp(barriers + READ + stage, lane);
                next_step();
                return;
            }
            fence_shared();
            if constexpr (APART) {
                arrive_as_warp(barriers + DS_THERE + steps % S_STAGES, lane);
                await_products<0>();  // dV and dK, whose factors P and dS are in registers
                arrive_as_warp(barriers + READ + stage, lane);
                next_step();
                return;
            }
            all_meet();  // dS is there; no thread reads that of the step before the last any more

            float dQ[DQ_COLUMNS / 2];
            if constexpr (PAIRED)
                await(barriers + DS_CAME, at.parity);
            begin_dQ(dQ);

            // The rest of dV, dK += dS^T Q, and dQ_i is handed on
            begin_dV(PARTS - 1, DV_FIRST, PART / SUM);
            begin_dK(0, DK_FIRST);
            await_products<1>();  // dQ
            if (PAIRED && lane == 0 && steps > 1)  // what has come is read; nothing comes after the last one
                arrive_there(barriers + DS_FREE, rank_in_cluster() ^ 1);
            pass_on(dQ);
            if constexpr (DK_FIRST < BR / SUM) {
                fence_products();
                begin_dK(DK_FIRST, BR / SUM);
            }
            tell();
            await_products<0>();  // the rest of dV, and dK
            arrive_as_warp(barriers + READ + stage, lane);
            next_step();
        };
        // Loops of their own: where nothing is hidden no branch stands between exponentials and products then
        if constexpr (BAND && PAIRED) {
            while (steps > 0) {
                const int high = work.i_high, plain = first_seen + BC - 1;
                for (i0 = work.i_low; i0 < high && i0 < plain; i0 += 2 * BR) {
                    float S[BR / 2];
                    step(S, true, true);
                    step(S, true, false);
                }
                for (; i0 < high; i0 += 2 * BR) {
                    float S[BR / 2];
                    step(S, false, true);
                    step(S, false, false);
                }
            }
        } else if constexpr (BAND) {
            while (steps > 0) {
                while (steps > 0 && (i0 < plain_from || i0 + BR > plain_to)) {
                    float S[BR / 2];
                    step(S, true);
                }
                while (steps > 0 && i0 >= plain_from && i0 + BR <= plain_to) {
                    float S[BR / 2];
                    step(S, false);
                }
            }
        } else if constexpr (PAIRED) {
            while (steps > 0) {
                float S[BR / 2];
                step(S, false, true);
                step(S, false, false);
            }
        } else {
            while (steps > 0) {
                float S[BR / 2];
                step(S, false);
            }
        }
        // No thread reads K and V any more
        if constexpr (APART)
            await(barriers + DS_READ + 1 % S_STAGES, (taken - 1) / S_STAGES & 1);
        else
            all_meet();
    } else {  // their copies are to end before others are where they come
        await(barriers + K_THERE, 0);
        await(barriers + V_THERE, 0);
    }

    if constexpr (DIVIDED)
        if (!has_all_sums(call, on_chip, dK, dV))
            return;

    // Write dK_j, dV_j, by way of where K and V were. Keys of padding have 0.
    const float scale = (float)call.scale;
#pragma unroll
    for (int n = 0; n < TO_D / SUM; n++) {
        unsigned x[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
            x[e] = pair(dK[8 * n + 2 * e] * scale, dK[8 * n + 2 * e + 1] * scale);
        store_factor<BC>(on_chip + AT_K, first_key, n, x);
    }
#pragma unroll
    for (int n = 0; n < TO_V / SUM; n++) {
        unsigned x[4];
        to_factor(x, dV, n);
        store_factor<BC>(on_chip + (PAIRED ? AT_K_THERE : AT_V), first_key, n, x);
    }
    meet(WARPGROUP_MEETS + mine, WARPGROUP);
    const int j = work.j0 + first_key, exist = (int)(PACKED ? work.kv_length : call.Tk) - j;
    int full = work.kv_length - j;
    if constexpr (PAIRED && BAND) {  // keys that no row sees: rows that do not exist may, and where V is NaN, their dS is
        const Sequence s = sequence(call, once_more((unsigned)work.slot));
        full = (int)least(full, call.Tq + s.offset + call.band_upper - j);
    }
    elem* const dk = row_of(call.dk, work.slot, work.h, work.k_start + j);
    elem* const dv = row_of(call.dv, work.slot, work.h, work.k_start + j);
    store_rows<BC, TO_D, D, WARPGROUP, KEYS>(dk, call.dk.row, on_chip + AT_K, first_key, exist, full);
    store_rows<BC, TO_V, DV, WARPGROUP, KEYS>(dv, call.dv.row, on_chip + (PAIRED ? AT_K_THERE : AT_V), first_key, exist, full);
}

// K and V, before anything else: a block of threads begins with waiting for them, and finds out meanwhile which rows see them, if any do.
__device__ __forceinline__ void copy_keys(const MappedCall& argument, unsigned char* on_chip, Barrier* barriers)
{
    const Call& call = argument.call;
    prefetch_map(argument.map[MAP_K]);
    prefetch_map(argument.map[MAP_V]);
    init_barrier(barriers + K_THERE, 1);
    init_barrier(barriers + V_THERE, 1);
    if constexpr (PAIRED)
        init_barrier(barriers + DS_CAME, 1);
    fence_barriers();
    fence_shared();
    const KeyBlock place = key_block(call, part_of(call, blockIdx.x).block);
    const int b = (int)divided(place.head, call.by_key_heads), h = (int)place.head - b * (int)call.Hkv;
    int slot = b, row = (int)place.block * BC;
    if constexpr (PACKED) {
        const Sequence s = sequence(call, b);
        if (row >= s.kv_length)
            return;
        slot = 0, row += (int)s.k_start;
    }
    arrive_expecting(barriers + K_THERE, BC * TO_D * 2);
    copy_slabs<BC, TO_D>(on_chip + AT_K, argument.map[MAP_K], barriers + K_THERE, row, h, slot);
    arrive_expecting(barriers + V_THERE, BC * TO_V * 2);
    if constexpr (PAIRED) {  // of V what will be in registers, where this warpgroup's dS is to be
        copy_box(on_chip + AT_DS, argument.map[MAP_V], barriers + V_THERE, 0, row, h, slot);
        copy_box(on_chip + AT_V, argument.map[MAP_V], barriers + V_THERE, SLAB, row, h, slot);
    } else {
        copy_slabs<BC, TO_V>(on_chip + AT_V, argument.map[MAP_V], barriers + V_THERE, row, h, slot);
    }
}

#if PAIRED
#define CLUSTER __cluster_dims__(2, 1, 1)
#else
#define CLUSTER
#endif

extern "C" __global__ void __launch_bounds__(KEYS_THREADS, 1) CLUSTER fa2_backward_keys(const __grid_constant__ MappedCall argument)
{
    extern __shared__ __align__(SLAB_ALIGNMENT) unsigned char on_chip[];
    Barrier* const barriers = (Barrier*)(on_chip + AT_BARRIERS);
    const Call& call = argument.call;
    if (threadIdx.x == 0) {
        copy_keys(argument, on_chip, barriers);
    } else if (threadIdx.x == WARP_LANES) {
        for (int n = 0; n < MAPS; n++)
            if (n != MAP_K && n != MAP_V)
                prefetch_map(argument.map[n]);
        for (int n = FUSED_THERE; n < DS_READY; n++)
            init_barrier(barriers + n, 1);
        if constexpr (PAIRED) {
            init_barrier(barriers + DS_READY, COMPUTING * WARPS * ARRIVALS);
            init_barrier(barriers + DS_SENT, 1);
            init_barrier(barriers + DS_FREE, COMPUTING * WARPS);
        }
        if constexpr (TURNS_APART) {
            init_barrier(barriers + TURN, 2);
            init_barrier(barriers + ADDED, 1);
        }
        for (int n = 0; n < STAGES; n++) {
            init_barrier(barriers + Q_THERE + n, 1);
            init_barrier(barriers + O_THERE + n, 1 + !PAIRED * COPYING);  // who begins the copy of dO, and those that wrote lse and delta
            init_barrier(barriers + READ + n, COMPUTING * WARPS * ARRIVALS);
        }
        for (int n = 0; n < COMPUTING; n++) {
            init_barrier(barriers + DQ_THERE + n, (APART ? COMPUTING : 1) * WARPS * ARRIVALS);
            init_barrier(barriers + DQ_READ + n, APART ? WARPS * ARRIVALS : 1);
        }
        fence_barriers();
        fence_shared();
    } else if (PAIRED && threadIdx.x >= WARPGROUP && threadIdx.x < WARPGROUP + DELTA_BYTES / VECTOR_BYTES) {  // rows that nobody writes
        ((uint4*)(on_chip + AT_DELTA))[threadIdx.x - WARPGROUP] = make_uint4(0, 0, 0, 0);
        fence_shared();
    }
    const Work work = work_of(call);
    if (PACKED && work.j0 >= work.kv_length)
        return;
    // Barriers are there
    if constexpr (PAIRED)
        cluster_meets();
    else
        __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        give_registers<COPYING_REGISTERS>();
        if (threadIdx.x < COPYING && work.steps > 0)
            copy_all(argument, work, on_chip, barriers);
        else if (!APART && threadIdx.x == ADDS && (FUSED || work.steps > 0))
            add_all(call, work, on_chip, barriers);
        else if (TURNS_APART && threadIdx.x == 2 * WARP_LANES)
            await_turns(call, work, barriers + TURN);
        else if (TURNS_APART && threadIdx.x == 3 * WARP_LANES)
            pass_turns(call, work, barriers + TURN, barriers + ADDED);
        if constexpr (FUSED) {
            // For as many blocks of threads as there are blocks of keys, if there are more
            const unsigned warp = threadIdx.x / WARP_LANES, ahead = blockIdx.x + (unsigned)call.ahead, behind = (unsigned)call.behind;
            const unsigned blocks = (unsigned)(call.B * call.Hkv * call.blocks);
            if constexpr (PAIRED) {
                if (threadIdx.x == 3 * WARP_LANES)
                    exchange(argument, work, on_chip, barriers);
                if (warp != 2)
                    return;
                if (ahead < blocks)
                    prepare_rows(argument, ahead, on_chip, barriers + FUSED_THERE);
                const unsigned index = once_more(blockIdx.x);  // no register for it meanwhile
                if (index >= (unsigned)call.behind && index < (unsigned)(call.B * call.Hkv * call.blocks))
                    finish_rows(argument, index - (unsigned)call.behind, on_chip, barriers + FUSED_THERE + 1);
            } else if (warp == 2 && ahead < blocks) {
                prepare_rows(argument, ahead, on_chip, barriers + FUSED_THERE);
            } else if (warp == 3 && blockIdx.x >= behind && blockIdx.x < blocks) {
                finish_rows(argument, blockIdx.x - behind, on_chip, barriers + FUSED_THERE + 1);
            }
        }
    } else if (APART && threadIdx.x >= (1 + COMPUTING) * WARPGROUP) {
        give_registers<ADDING_REGISTERS>();
        add_apart(call, work, on_chip, barriers);
    } else {
        take_registers<COMPUTING_REGISTERS>();
        compute_all(call, work, on_chip, barriers);
    }
}

#if PAIRED
// Records of the first heads' rows, which no block of threads prepares: their delta is there (side_gradients.cu).
extern "C" __global__ void __launch_bounds__(THREADS) fa2_backward_rows(const __grid_constant__ Call call)
{
    const unsigned blocks = (unsigned)blocks_of_head(call), block = blockIdx.x % blocks, bh = blockIdx.x / blocks, row = threadIdx.x;
    const unsigned b = bh / (unsigned)call.Hq, h = bh % (unsigned)call.Hq;
    const long long i = (long long)block * BR + row;
    if (row >= BR)
        return;
    const bool exists = i < call.Tq;
    store_record(record_of_block(call, first_block(call, b, h, 0) + block), row, exists ? *row_of(call.lse, b, h, i) : -INFINITE,
                 exists ? *row_of(call.delta, b, h, i) : 0.0f);
}
#endif

// dQ = scale * sums, in the dtype of q. The last sums first, of which L2 may have some yet.
extern "C" __global__ void __launch_bounds__(THREADS) fa2_backward_finish(const __grid_constant__ Call call)
{
    extern __shared__ __align__(SLAB_ALIGNMENT) unsigned char on_chip[];
    const unsigned parts = QUARTERS * (unsigned)(blocks_of_head(call) * (PACKED ? 1 : call.B) * call.Hq);
    finish_quarter<PATCHES, PATCH, 64, APART>(call, parts - 1 - blockIdx.x, on_chip, [&](int patch, int n, int row, const unsigned (&x)[4]) {
        if constexpr (APART)
            store_across(on_chip + patch * 64 * SLAB_ROW + place_across(), n, x);
        else
            store_rows_of_factor<BR>(on_chip + (BY_COLUMNS ? patch * BR * SLAB_ROW : 0), row, n, x);
    });
}
