// The one argument of every kernel: addresses, strides, sizes and numbers of a call. launch.py fills it, word by word, in this
// order; every field is a multiple of eight bytes.

struct Matrix {  // q, k, v, o, dout, dq, dk, dv: element (b, h, t, x) is data[b * batch + h * head + t * row + x]
    elem* data;
    long long batch, head, row;
};

struct Statistic {  // lse, dlse, delta, m, l: one number for each row of q
    real* data;
    long long batch, head, row;
};

struct Pairs {  // bias: a number for each (b, h, i, j); strides in elements, 0 along axes that broadcast
    const void* data;
    long long b, h, i, j;
};

struct Table {  // integers, one for each sequence (cu_seqlens: and one more); bytes is 4, 8, or 0 where there is no table
    const void* data;
    long long bytes;
};

struct Call {
    Matrix q, k, v, o, dout, dq, dk, dv;
    Statistic lse, dlse, delta, m, l;
    real* sums;  // real workspace (slots, Hq, rows of q, d or dv): O of fa1, of each further part of fa2, dQ of the backward passes;
                 // sm90 forward: of parts of pieces, as the registers have them; backward: behind dQ's, records (PAIRED), shares of dK and dV (DIVIDED)
    Pairs bias;
    real* dbias;  // contiguous, of the extents below
    long long bias_b, bias_h, bias_i, bias_j;
    const void* slopes;
    long long slopes_b, slopes_h;
    const void* sinks;
    long long sinks_h;
    double* dsinks;
    unsigned* counters;  // zeros before, and, but for a backward pass, after. Few rows: of the parts of keys that are done; sm90: of pieces, and of
                         // blocks at their end; or of warps whose part of a piece is there; backward: see fa2_backward.cu
    unsigned* again;     // sm90: the list of pieces that are to be done again, an entry for each warp of each
    Table cu_seqlens_q, cu_seqlens_k, q_lengths, kv_lengths, q_offset;
    Table block_table;               // (B, table_row) blocks of a paged cache that has cache_blocks
    long long table_row, cache_blocks;
    long long mask[MASK_WORDS];  // of a mask object, see masks.py
    long long offset, offset_given;  // where there is no table q_offset
    long long B, Hq, Hkv, Tq, Tk;    // packed sequences: Tq and Tk are the longest
    long long rows_q, rows_k;        // of the arrays; packed sequences: all of them together
    long long blocks;                // blocks of rows, or keys, that the grid has for each head; of packed sequences, if they are in one line (in_line), of all
    long long parts, part_keys;      // fa2 forward: how many blocks of threads share the keys of a block of rows, keys of each; sm90 backward,
                                     // DIVIDED: how many share the rows of one of the last blocks of keys; DIAGONAL: at most, of any
    long long section;               // sm90: query heads that are gone through together
    long long ahead, behind;         // sm90 backward: how many blocks of threads later, or before, those are whose rows one prepares, or finishes
    long long by_section, by_heads, by_last_heads, by_key_heads;  // there, for divided(): a section's blocks, its heads, those of the last; Hkv
    long long group, at_once;        // there: query heads of a key head; blocks of threads that run at once
    long long whole, halved, share;  // there, DIVIDED: blocks of keys of one block of threads each, then of two; numbers from dQ's sums to shares, behind
                                     // records. LATE: halved blocks of keys of a head come later. DIAGONAL: how many parts go up; blocks of keys of a level
    long long band_lower, band_upper;
    long long keep_threshold, seed;
    double scale, softcap, keep_scale;
    float scale_log2, unused;  // scale * log2(e), rounded: where it lies instructions take it from, without a register
};
static_assert(sizeof(Call) == 8 * CALL_WORDS, "launch.py and call.cuh disagree on the fields of a call");

// n / divisor for n < 2^31, by an inverse from the host (launch.py, `divisor`): a division takes thirty instructions, one behind the other.
__device__ __forceinline__ unsigned divided(unsigned n, long long divisor)
{
    return __umulhi(2 * n, (unsigned)divisor) >> (unsigned)(divisor >> 32);
}

// One sequence of the batch, as far as it is not padding. Tables on the device are not to be trusted: all is clamped to the arrays.
struct Sequence {
    long long b, slot;  // slot: which batch entry of the arrays it lies in
    long long q_start, k_start, q_length, kv_length;
    long long offset;  // position of query row 0 on the key axis
};

__device__ __forceinline__ long long entry(const Table& table, long long b, long long otherwise)
{
    if (table.bytes == 8)
        return ((const long long*)table.data)[b];
    if (table.bytes == 4)
        return ((const int*)table.data)[b];
    return otherwise;
}

__device__ __forceinline__ Sequence sequence(const Call& call, long long b)
{
    Sequence s;
    s.b = b;
    if constexpr (PACKED) {
        s.slot = 0;
        s.q_start = clamp(entry(call.cu_seqlens_q, b, 0), 0, call.rows_q);
        s.k_start = clamp(entry(call.cu_seqlens_k, b, 0), 0, call.rows_k);
        s.q_length = clamp(entry(call.cu_seqlens_q, b + 1, 0), s.q_start, call.rows_q) - s.q_start;
        s.kv_length = clamp(entry(call.cu_seqlens_k, b + 1, 0), s.k_start, call.rows_k) - s.k_start;
    } else {
        s.slot = b;
        s.q_start = s.k_start = 0;
        s.q_length = clamp(entry(call.q_lengths, b, call.Tq), 0, call.Tq);
        s.kv_length = clamp(entry(call.kv_lengths, b, call.Tk), 0, call.Tk);
    }
    const long long given = call.offset_given ? call.offset : s.kv_length - s.q_length;
    s.offset = clamp(entry(call.q_offset, b, given), -FARTHEST, FARTHEST);
    return s;
}

// PACKED: blocks of ROWS rows, or keys, of all sequences in one line, in which sequence b begins at start / ROWS + b: those before it have at most as
// many. Which sequence has a place of it, and the how many-th of its blocks? Places before its first block, with negative numbers, or behind its last are
// nobody's.
struct InLine {
    int b, block;
};

template <int ROWS> __device__ __forceinline__ InLine in_line(const Call& call, const Table& cu_seqlens, long long rows, int place)
{
    const auto begin = [&](int b) { return (int)((unsigned long long)clamp(entry(cu_seqlens, b, 0), 0, rows) / ROWS) + b; };
    int b = 0;
#pragma unroll 1
    for (int left = (int)call.B; left > 1;) {  // the last of these many that begins there or before
        const int half = left / 2;
        const bool later = begin(b + half) <= place;
        b += later ? half : 0;
        left = later ? left - half : half;
    }
    return {b, place - begin(b)};
}

// The same of arrays that are not packed, asked for now and looked at later: what tables say, as it lies in memory, none of it waiting for the other.
// Not from L1, where it would stay: others may be writing the tables.
struct Asked {
    uint2 q_length, kv_length, offset;
};

__device__ __forceinline__ Asked ask_for_sequence(const Call& call, long long b)
{
    auto words = [&](const Table& table) { return load_words((const char*)table.data + b * table.bytes, (int)table.bytes); };
    return {words(call.q_lengths), words(call.kv_lengths), words(call.q_offset)};
}

__device__ __forceinline__ Sequence sequence(const Call& call, long long b, const Asked& asked)
{
    auto number = [](const Table& table, uint2 words, long long otherwise) {
        const long long wide = (long long)((unsigned long long)words.y << 32 | words.x);
        return table.bytes == 8 ? wide : table.bytes == 4 ? (int)words.x : otherwise;
    };
    const long long q_length = clamp(number(call.q_lengths, asked.q_length, call.Tq), 0, call.Tq);
    const long long kv_length = clamp(number(call.kv_lengths, asked.kv_length, call.Tk), 0, call.Tk);
    const long long given = call.offset_given ? call.offset : kv_length - q_length;
    return {b, b, 0, 0, q_length, kv_length, clamp(number(call.q_offset, asked.offset, given), -FARTHEST, FARTHEST)};
}

// Where key j of a sequence lies. A paged cache (PAGE keys a block) has it in a block that the table names; a block outside the cache is
// not looked at, and `exists` is false: such a key is hidden.
struct Place {
    long long slot, t;
    bool exists;
};

constexpr unsigned long long PER_BLOCK = PAGE ? PAGE : 1;
template <int bytes> struct Entry { typedef long long type; };
template <> struct Entry<4> { typedef int type; };
typedef Entry<TABLE_BYTES>::type table_entry;

// What the table says of key j of sequence b, and where that is.
__device__ __forceinline__ table_entry block_of(const Call& call, long long b, long long j)
{
    return PAGE ? *((const table_entry*)call.block_table.data + b * call.table_row + (unsigned long long)j / PER_BLOCK) : 0;
}

__device__ __forceinline__ Place place_in(const Call& call, const Sequence& s, long long j, long long block)
{
    if constexpr (PAGE == 0)
        return {s.slot, s.k_start + j, true};
    const bool exists = 0 <= block && block < call.cache_blocks;
    return {exists ? block : 0, (long long)((unsigned long long)j % PER_BLOCK), exists};
}

__device__ __forceinline__ Place place_of(const Call& call, const Sequence& s, long long j)
{
    return place_in(call, s, j, block_of(call, s.b, j));
}

__device__ __forceinline__ elem* row_of(const Matrix& matrix, long long slot, long long h, long long t)
{
    return matrix.data + slot * matrix.batch + h * matrix.head + t * matrix.row;
}

__device__ __forceinline__ real* row_of(const Statistic& statistic, long long slot, long long h, long long t)
{
    return statistic.data + slot * statistic.batch + h * statistic.head + t * statistic.row;
}

// Row t of a head in the workspace `sums`, whose rows have `width` numbers.
__device__ __forceinline__ real* sums_of(const Call& call, long long slot, long long h, long long t, int width)
{
    return call.sums + ((slot * call.Hq + h) * call.rows_q + t) * width;
}

__device__ __forceinline__ void store_lse(const Call& call, long long slot, long long h, long long t, real lse)
{
    if (call.lse.data)  // somebody asked for it
        *row_of(call.lse, slot, h, t) = lse;
}
