// Scores: from a product q.k to what enters the softmax, and which tiles and keys are visible at all.
//
// Order, as everywhere: s = scale q.k, softcap, + bias, + ALiBi, mask. Options that a call does not have are not in its text.

constexpr bool PLAIN = !SOFTCAP && !BIAS && !ALIBI;

struct Head {  // one query head of one sequence
    Sequence s;
    long long h, h_kv;
    real scale, slope;
};

__device__ __forceinline__ Head head(const Call& call, const Sequence& s, long long h, long long h_kv)
{
    Head at;
    at.s = s;
    at.h = h;
    at.h_kv = h_kv;
    at.scale = real(call.scale);
    at.slope = 0;
    if constexpr (ALIBI)
        at.slope = widen<SLOPE_TYPE>(((const Storage<SLOPE_TYPE>::stored*)call.slopes)[s.b * call.slopes_b + h * call.slopes_h]);
    return at;
}

__device__ __forceinline__ Head head(const Call& call, const Sequence& s, long long h)
{
    return head(call, s, h, (unsigned)h / ((unsigned)call.Hq / (unsigned)call.Hkv));  // in line, while a division of 64 bits is a call
}

// Class of the rectangle of rows [i0, i0 + ROWS) and keys [j0, j0 + KEYS); one that reaches into padding is at most PARTIAL.
template <int ROWS = BR, int KEYS = BC>
__device__ __forceinline__ int tile_kind(const Call& call, const Head& at, long long i0, long long j0)
{
    const long long i1 = least(i0 + ROWS, at.s.q_length), j1 = least(j0 + KEYS, at.s.kv_length);
    int kind = i1 - i0 == ROWS && j1 - j0 == KEYS ? FULL : PARTIAL;
    if constexpr (BAND) {
        const int band = band_tile(call.band_lower, call.band_upper, i0, i1, j0, j1, at.s.offset);
        kind = band < kind ? band : kind;
    }
    if constexpr (PAGE) {  // some of its blocks may be outside the cache
        bool outside = false;
        if (kind == FULL)
            for (long long j = j0 + threadIdx.x; j < j1; j += THREADS)
                outside |= !place_of(call, at.s, j).exists;
        if (kind == FULL && __syncthreads_or(outside))
            kind = PARTIAL;
    }
#if HAS_MASK
    if (kind != EMPTY) {
        const int mask = mask_tile(call.mask, at.s.b, at.h, i0, i1, j0, j1, at.s.offset);
        kind = mask < kind ? mask : kind;
    }
#endif
    return kind;
}

struct Block {  // a block of rows or keys and the class of the tile that it makes
    long long start;
    int kind;  // EMPTY: there is none left
};

// The first block of keys from j0 on, before j_end, that some of the rows [i0, i0 + BR) sees.
__device__ __forceinline__ Block next_keys(const Call& call, const Head& at, long long i0, long long j0, long long j_end)
{
    for (; j0 < j_end; j0 += BC) {
        const int kind = tile_kind(call, at, i0, j0);
        if (kind != EMPTY)
            return {j0, kind};
    }
    return {j_end, EMPTY};
}

// The first block of rows from i0 on, before i_end, that sees some of the keys [j0, j0 + BC).
__device__ __forceinline__ Block next_rows(const Call& call, const Head& at, long long i0, long long i_end, long long j0)
{
    for (; i0 < i_end; i0 += BR) {
        const int kind = tile_kind(call, at, i0, j0);
        if (kind != EMPTY)
            return {i0, kind};
    }
    return {i_end, EMPTY};
}

// The keys that the band leaves to the rows [i0, i0 + ROWS): from the start of a block of KEYS.
template <int ROWS = BR, int KEYS = BC>
__device__ __forceinline__ void key_range(const Call& call, const Sequence& s, long long i0, long long& j_low, long long& j_high)
{
    j_low = 0;
    j_high = i0 < s.q_length ? s.kv_length : 0;
    if constexpr (BAND) {
        const long long i1 = least(i0 + ROWS, s.q_length);
        j_low = clamp(i0 + s.offset + call.band_lower, 0, j_high) / KEYS * KEYS;
        j_high = clamp(i1 + s.offset + call.band_upper, 0, j_high);
    }
}

// The rows to which the band shows the keys [j0, j0 + BC): from the start of a block.
__device__ __forceinline__ void row_range(const Call& call, const Sequence& s, long long j0, long long& i_low, long long& i_high)
{
    i_low = 0;
    i_high = j0 < s.kv_length ? s.q_length : 0;
    if constexpr (BAND) {
        const long long j1 = least(j0 + BC, s.kv_length);
        i_low = clamp(j0 - s.offset - call.band_upper, 0, i_high) / BR * BR;
        i_high = clamp(j1 - s.offset - call.band_lower, 0, i_high);
    }
}

__device__ __forceinline__ bool visible(const Call& call, const Head& at, long long i, long long j)
{
    bool seen = i < at.s.q_length && j < at.s.kv_length;
    if constexpr (PAGE)
        seen = seen && place_of(call, at.s, j).exists;
    if constexpr (BAND)
        seen = seen && band_visible(call.band_lower, call.band_upper, i, j, at.s.offset);
#if HAS_MASK
    if (seen)
        seen = mask_visible(call.mask, at.s.b, at.h, i, j, at.s.offset);
#endif
    return seen;
}

// The score of a visible pair. `slope` is set to d(score)/d(s), which softcap makes differ from 1.
__device__ __forceinline__ real score(const Call& call, const Head& at, real product, long long i, long long j, real& slope)
{
    slope = real(1);
    if constexpr (PLAIN)
        return product * at.scale;
    real s = product * at.scale;
    if constexpr (SOFTCAP) {
        const real t = hyperbolic_tangent(s / real(call.softcap));
        s = real(call.softcap) * t;
        slope = real(1) - t * t;
    }
    if constexpr (BIAS) {
        const real bias = widen<BIAS_TYPE>(((const Storage<BIAS_TYPE>::stored*)call.bias.data)[
            at.s.b * call.bias.b + at.h * call.bias.h + i * call.bias.i + j * call.bias.j]);
        if (bias == -INFINITE)  // hides the key, whatever its score is
            return -INFINITE;
        s += bias;
    }
    if constexpr (ALIBI) {
        const long long distance = i + at.s.offset - j;
        s -= at.slope * real(distance < 0 ? -distance : distance);
    }
    return s;
}

// ---- a tile of scores, between the registers and on-chip memory ----------------------------------------------------------

template <int R, int C> __device__ __forceinline__ void put_tile(real* tile, const real (&values)[R][C])
{
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int c = 0; c < C; c++)
            tile[ScoreTile::row(r) * PITCH_S + ScoreTile::column(c)] = values[r][c];
}

template <int R, int C> __device__ __forceinline__ void get_tile(const real* tile, real (&values)[R][C])
{
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int c = 0; c < C; c++)
            values[r][c] = tile[ScoreTile::row(r) * PITCH_S + ScoreTile::column(c)];
}

// f(n, i, j) for each number of a tile that the thread owns: n is its place in the tile. A loop that stays one: the code of options is
// long, and would be there once for each number if they were in registers.
template <class F> __device__ __forceinline__ void for_each_score(long long i0, long long j0, F f)
{
    constexpr int C = ScoreTile::C;
#pragma unroll 2
    for (int n = 0; n < ScoreTile::R * C; n++) {
        const int y = ScoreTile::row(n / C), x = ScoreTile::column(n % C);
        f(y * PITCH_S + x, i0 + y, j0 + x);
    }
}

// The keys that a row sees but for the mask: those of the band within the lengths, counted from j0 and clamped to a tile.
struct Span {
    int first, end;
};

__device__ __forceinline__ Span keys_of_row(const Call& call, const Head& at, long long i, long long j0)
{
    long long first = 0, end = i < at.s.q_length ? at.s.kv_length : 0;
    if constexpr (BAND) {
        first = i + at.s.offset + call.band_lower;
        end = least(end, i + at.s.offset + call.band_upper + 1);
    }
    return {(int)clamp(first - j0, 0, BC), (int)clamp(end - j0, 0, BC)};
}

// Scores without options stay in registers. Others are finished in on-chip memory, in a loop.
constexpr bool IN_REGISTERS = PLAIN && !HAS_MASK && !PAGE;

// S = Q K^T as products in the thread's registers: S -> scores, or products still, hidden ones -inf. `tile` is a place to work in.
template <bool SCALED = true, int R, int C>
__device__ __forceinline__ void finish_scores(
    const Call& call, const Head& at, real (&S)[R][C], real* tile, long long i0, long long j0, int kind)
{
    if (PLAIN && (IN_REGISTERS || kind == FULL)) {
        if constexpr (SCALED) {
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int c = 0; c < C; c++)
                    S[r][c] *= at.scale;
        }
        if (kind == FULL)
            return;
#pragma unroll
        for (int r = 0; r < R; r++) {
            const Span seen = keys_of_row(call, at, i0 + ScoreTile::row(r), j0);
#pragma unroll
            for (int c = 0; c < C; c++) {
                const int x = ScoreTile::column(c);
                if (x < seen.first || x >= seen.end)
                    S[r][c] = -INFINITE;
            }
        }
        return;
    }
    put_tile(tile, S);
    for_each_score(i0, j0, [&](int n, long long i, long long j) {
        real unused;
        tile[n] = kind == FULL || visible(call, at, i, j) ? score(call, at, tile[n], i, j, unused) : -INFINITE;
    });
    get_tile(tile, S);
}
