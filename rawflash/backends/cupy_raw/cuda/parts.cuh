// What a thread block of a fa2 forward pass does: a block of rows of one head, or a part of its keys, where these are shared out.

struct Work {
    long long block, b, h;
    int part;
};

// The last blocks first: under a causal mask they have the most keys. All of one head, so that its K and V stay in L2; but of a grid so
// small that keys are shared out, first the last blocks of all heads. A grid counts in 32 bits, which are divided in line.
__device__ __forceinline__ Work work_of(const Call& call, unsigned place)
{
    const unsigned blocks = (unsigned)call.blocks;
    unsigned block = place % blocks, bh = place / blocks, part = 0;
    if (call.parts > 1) {
        const unsigned heads = (unsigned)(call.B * call.Hq), parts = (unsigned)call.parts;
        block = place / heads / parts;
        part = place / heads % parts;
        bh = place % heads;
    }
    const unsigned Hq = (unsigned)call.Hq;
    return {blocks - 1 - block, bh / Hq, bh % Hq, (int)part};
}

// Into how many parts the keys from j_low to j_high are divided, at least one. The last takes what is left.
__device__ __forceinline__ int parts_of(const Call& call, long long j_low, long long j_high)
{
    if (call.parts == 1)
        return 1;
    const unsigned keys = (unsigned)clamp(j_high - j_low, 0, 0x7FFFFFFF), part_keys = (unsigned)call.part_keys;
    return (int)clamp((keys + part_keys - 1) / part_keys, 1, call.parts);
}

// Where the O of a part lies: the first one's in the output itself, if that has numbers as wide.
constexpr bool FIRST_IN_OUTPUT = sizeof(elem) == sizeof(real);

__device__ __forceinline__ long long rows_of_part(const Call& call) { return (PACKED ? 1 : call.B) * call.Hq * call.rows_q; }

__device__ __forceinline__ real* sums_of_part(const Call& call, const Head& at, int part, long long i)
{
    if (FIRST_IN_OUTPUT && part == 0)
        return (real*)row_of(call.o, at.s.slot, at.h, at.s.q_start + i);
    return sums_of(call, at.s.slot, at.h, at.s.q_start + i, DV) + (part - FIRST_IN_OUTPUT) * rows_of_part(call) * DV;
}

__device__ __forceinline__ real* of_part(const Call& call, const Statistic& statistic, const Head& at, int part, long long i)
{
    return row_of(statistic, at.s.slot, at.h, at.s.q_start + i) + part * rows_of_part(call);
}
