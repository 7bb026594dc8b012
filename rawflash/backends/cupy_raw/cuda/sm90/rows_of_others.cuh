// Rows of other blocks of threads, which a warp of fa2_backward.cu prepares before those need them, or finishes after them; and records of rows.
// fa2_backward.cu includes it behind its constants.

// Rows have to be prepared (delta, and zeros where their dQ is added to) before the first block of keys sees them, and finished (dQ in 16 bits) after
// the last. FUSED: while it computes, a block of threads prepares rows of one that comes `ahead` later in the grid, and finishes rows of one that
// came `behind` before it; kernels do it for the first and the last ones. Counters of each key head say how many blocks of threads have prepared
// their rows, and how many have added all they have to dQ. Nobody waits for a block of threads that comes later.

// Blocks of rows that a block of threads prepares or finishes, of each query head that shares its keys; h and block: which one is next, of so many
// that are left. It lies on chip, as few registers are left.
struct Share {
    unsigned head;
    int b, h, block, from, to, left;
};

// Of a head's blocks of rows, how many are for the blocks of keys before this one: as many for each, or fewer where fewer rows see them.
__device__ __forceinline__ int rows_before(const Call& call, unsigned block)
{
    const int rows = (int)blocks_of_head(call);
    float rest = (float)((unsigned)call.blocks - block) / (float)(unsigned)call.blocks;
    if (BAND && call.band_lower <= -call.Tk)
        rest *= rest;
    return rows - (int)((float)rows * rest);
}

__device__ __forceinline__ void find_share(const Call& call, unsigned index, volatile Share& share)
{
    const KeyBlock place = key_block(call, index);
    share.head = place.head;
    const unsigned b = divided(place.head, call.by_key_heads);
    share.b = (int)b;
    share.h = (int)(place.head - b * (unsigned)call.Hkv) * (int)call.group;
    share.block = share.from = rows_before(call, place.block);
    share.to = rows_before(call, place.block + 1);
    share.left = (share.to - share.from) * (int)call.group;
}

__device__ __forceinline__ void next_block(volatile Share& share)
{
    share.left = share.left - 1;
    share.block = share.block + 1;
    if (share.block == share.to)
        share.block = share.from, share.h = share.h + 1;
}

__device__ __forceinline__ unsigned* prepared(const Call& call, unsigned head) { return call.counters + head; }
__device__ __forceinline__ unsigned* added(const Call& call, unsigned head) { return call.counters + call.B * call.Hkv + head; }

__device__ __forceinline__ void await_prepared(const Call& call, const Work& work)
{
    const unsigned head = work.b * (unsigned)call.Hkv + work.h, blocks = (unsigned)call.blocks;
    if (head * blocks >= (unsigned)call.ahead)  // whole heads are ahead
        await_turn(prepared(call, head), blocks);
}

// ---- records of lse and delta --------------------------------------------------------------------------------------------------------

// PAIRED: what copies bring of 64 rows beside Q and dO. It is written once a row; records lie before shares of dK and dV, the last ones first. delta is in
// three numbers of bfloat16, which have 8 of its 24 bits each and add up to it exactly, in rows of a slab; lse is in units of exp2. A row that sees
// nothing has P = 0, and one that does not exist. Zeros of begin_with_minus meet delta of other rows, so that it has to be finite: what overflowed is the
// largest number, and where delta is NaN it is 0 and lse is NaN, and with it all that the row has a share in.
constexpr int NUMBER_PARTS = 3, RECORD_PARTS = NUMBER_PARTS * SLAB_ROW, RECORD_LSE = SLAB * 4, RECORD_BYTES = RECORD_PARTS + RECORD_LSE;
static_assert(RECORD_BYTES == 4 * 160, "RECORD_NUMBERS of fa2_backward.py");
__device__ __forceinline__ unsigned char* record_of_block(const Call& call, long long block)
{
    static_assert(!PAIRED || BR == SLAB, "one record");
    return (unsigned char*)(call.sums + call.share) - (unsigned long long)((unsigned)block + 1) * RECORD_BYTES;
}

__device__ __forceinline__ void store_record(unsigned char* record, int row, float lse, float delta)
{
    const unsigned column = once_more((unsigned)row);  // places are found here, not kept in registers: those that prepare have few
    constexpr float MOST = 3.402823466e38f;
    const bool is_nan = delta != delta;
    float rest = is_nan ? 0.0f : fminf(fmaxf(delta, -MOST), MOST);
#pragma unroll
    for (int part = 0; part < NUMBER_PARTS; part++) {
        const unsigned bits = __float_as_uint(rest);
        *(unsigned short*)(record + in_slab(part, column / 8) + column % 8 * 2) = (unsigned short)(bits >> 16);
        rest -= __uint_as_float(bits & 0xFFFF0000u);
    }
    ((float*)(record + RECORD_PARTS))[column] = is_nan ? delta : lse == -INFINITE ? INFINITE : lse * LOG2E;
}

// ---- the warps that prepare and finish -----------------------------------------------------------------------------------------------

// Of two numbers of TYPE in a word, the second.
__device__ __forceinline__ float upper_half(unsigned x)
{
    return TYPE == BFLOAT16 ? __uint_as_float(x & 0xFFFF0000u) : widen<TYPE>((unsigned short)(x >> 16));
}

// By a warp: zeros, and delta, for the rows of a share. A slab of O and dO at a time.
__device__ __forceinline__ void prepare_rows(const MappedCall& argument, unsigned index, unsigned char* on_chip, Barrier* barrier)
{
    constexpr int SLABS = TO_V / SLAB, LANE_ROWS = BR / WARP_LANES;
    const Call& call = argument.call;
    unsigned char* const place = on_chip + AT_PREPARED;
    volatile Share& share = ((Share*)(on_chip + AT_SHARES))[0];
    const int lane = threadIdx.x % WARP_LANES;
    const auto lane_again = [&]() -> int { return PAIRED ? once_more(threadIdx.x) % WARP_LANES : lane; };  // PAIRED: no register for it
    if (lane == 0)
        find_share(call, index, share);
    __syncwarp();
    int parity = 0;
#pragma unroll 1
    while (share.left > 0) {
        float gamma[LANE_ROWS] = {};
#pragma unroll 1
        for (int slab = 0; slab < SLABS; slab++, parity ^= 1) {
            const int h = share.h, b = share.b, block = share.block;
            if (lane == 0) {
                arrive_expecting(barrier, PREPARED_BYTES);
                copy_box(place, argument.map[MAP_O], barrier, slab * SLAB, block * BR, h, b);
                copy_box(place + PREPARED_BYTES / 2, argument.map[MAP_DO], barrier, slab * SLAB, block * BR, h, b);
            }
            constexpr int VECTORS = BR * TO_D / LANE_NUMBERS / SLABS;
            float4* const sums = (float4*)sums_of_block(call, first_block(call, b, h, 0) + block) + slab * VECTORS + lane_again();
#pragma unroll 4
            for (int x = 0; x < (STORES || FIRST_STORES ? 0 : VECTORS); x += WARP_LANES)
                sums[x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            await(barrier, PAIRED ? slab : parity);  // PAIRED: of two slabs
            // Each lane some rows, of which it reads other columns than its neighbours: those are in other banks
            const unsigned thread = once_more(threadIdx.x), turned = thread % 8 * VECTOR_BYTES;
            const unsigned from = shared_address(place) + thread % WARP_LANES * SLAB_ROW;
#pragma unroll 1
            for (int x = 0; x < SLAB_ROW; x += VECTOR_BYTES)
#pragma unroll
                for (int r = 0; r < LANE_ROWS; r++) {
                    if (PAIRED && FIRST_STORES && r > 0)
                        __syncwarp();  // one row's numbers after the other's: no registers for both
                    const unsigned at = from + r * WARP_LANES * SLAB_ROW + (x ^ turned);
                    const uint4 o = load_shared(at), d = load_shared(at + PREPARED_BYTES / 2);
                    const unsigned O[4] = {o.x, o.y, o.z, o.w}, dO[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        gamma[r] = fmaf(widen<TYPE>((unsigned short)O[e]), widen<TYPE>((unsigned short)dO[e]), gamma[r]);
                        gamma[r] = fmaf(upper_half(O[e]), upper_half(dO[e]), gamma[r]);
                    }
                }
            __syncwarp();
        }
#pragma unroll
        for (int r = 0; r < LANE_ROWS; r++) {
            const int row = r * WARP_LANES + lane_again(), i = share.block * BR + row;
            const bool exists = i < (int)call.Tq;
            if (DLSE && exists)
                gamma[r] -= *row_of(call.dlse, share.b, share.h, i);
            if constexpr (PAIRED) {
                const unsigned blocks = (once_more((unsigned)call.Tq) + 2 * BR - 1) / (2 * BR) * 2;
                store_record(record_of_block(call, (share.b * (unsigned)call.Hq + share.h) * blocks + share.block), row,
                             exists ? *row_of(call.lse, share.b, share.h, i) : -INFINITE, exists ? gamma[r] : 0.0f);
                __syncwarp();  // one row after the other, as registers are few
            } else if (exists) {
                *row_of(call.delta, share.b, share.h, i) = gamma[r];
            }
        }
        __syncwarp();
        if (lane == 0)
            next_block(share);
        __syncwarp();
    }
    __syncwarp();
    if (lane == 0)
        pass_turn(prepared(call, share.head));
}

// By a warp: dQ of the rows of a share, 64 rows of a slab's columns at a time. In 16 bits they begin a little before where they were: what lies there
// has been read.
__device__ __forceinline__ void finish_rows(const MappedCall& argument, unsigned index, unsigned char* on_chip, Barrier* barrier)
{
    const Call& call = argument.call;
    unsigned char *const place = on_chip + AT_FINISHED, *const sums = place + FINISHED_BEFORE;
    volatile Share& share = ((Share*)(on_chip + AT_SHARES))[1];
    const int lane = threadIdx.x % WARP_LANES;
    if (lane == 0) {
        find_share(call, index, share);
        if (share.from < share.to)
            await_turn(added(call, share.head), (unsigned)call.blocks);
        fence_device();
    }
    __syncwarp();
    const float scale = (float)call.scale;
    int parity = 0;
#pragma unroll 1
    while (share.left > 0) {
#pragma unroll 1
        for (int patch = 0; patch < PATCHES; patch++, parity ^= 1) {
            if (lane == 0) {
                await_stores_read<0>();
                arrive_expecting(barrier, PATCH * 4);
                copy_bulk(sums, sums_of_block(call, first_block(call, share.b, share.h, 0) + share.block) + patch * PATCH, barrier, PATCH * 4);
            }
            await(barrier, parity);
            unsigned from = shared_address(sums) + lane * VECTOR_BYTES;
#pragma unroll 1
            for (int row = APART ? lane / 16 * 8 + lane % 8 : lane % 16; row < 64; row += 16)
#pragma unroll
                for (int x = APART ? lane / 8 % 2 : lane / 16; x < SLAB / 8; x += 2, from += 2 * WARP_LANES * VECTOR_BYTES) {
                    const uint4 left = load_shared(from), right = load_shared(from + WARP_LANES * VECTOR_BYTES);
                    const auto scaled = [&](unsigned x, unsigned y) { return pair(__uint_as_float(x) * scale, __uint_as_float(y) * scale); };
                    const unsigned words[4] = {scaled(left.x, left.y), scaled(left.z, left.w), scaled(right.x, right.y), scaled(right.z, right.w)};
                    __syncwarp();  // all have read
                    store_matrices<APART>(place + in_slab(row, x), words[0], words[1], words[2], words[3]);
                }
            fence_shared();
            __syncwarp();
            if (lane == 0) {
                store_box(argument.map[MAP_DQ], place, BY_COLUMNS ? patch * SLAB : 0, share.block * BR + (BY_COLUMNS ? 0 : patch * 64), share.h, share.b);
                commit_stores();
            }
        }
        __syncwarp();
        if (lane == 0)
            next_block(share);
        __syncwarp();
    }
    if (lane == 0)
        await_stores_read<0>();  // shared memory is given back
}
