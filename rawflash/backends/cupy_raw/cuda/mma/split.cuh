// Products of float32 by tensor cores that take bfloat16.
//
// Nothing is lost to the narrow inputs of tensor cores: a float32 is the sum of three bfloat16 (8 bits of significand each), exactly, so
// x y is nine products of parts, of which the six largest are computed; the others together are below 2^-21 |x y|, about 2^-25 on average
// and of either sign. Each
// 16 products are summed by the tensor core, smallest parts first, and then added to the accumulator by an ordinary addition: tensor
// cores cut sums off where float32 additions round (Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022, do
// that for TF32; parts in bfloat16: Henry, Tang and Heinecke, 2019).
// An infinity becomes NaN: its second part is infinity - infinity. Below 2^-110 the last parts underflow, which shows where the other factor is
// above 2^100.
// PITCH_D and PITCH_V are 8 modulo 32, PITCH_S 4 or 12 modulo 16: the reads below then hit different banks, but for A in product_tn,
// which all pieces of a row share.

static_assert(TYPE == FLOAT32, "splits are of float32");

constexpr int PARTS = 3;
constexpr int DEPTH = 16;

// Two numbers as three pairs of bfloat16, the larger parts first. The first part is cut off, so that no finite number becomes infinite; what
// then remains has 16 bits, which the second part rounds, and the third part is exact.
__device__ __forceinline__ void split(float x, float y, unsigned (&parts)[PARTS])
{
#pragma unroll
    for (int n = 0; n < PARTS; n++) {
        parts[n] = n == 0 ? bfloat16_pair_toward_zero(x, y) : bfloat16_pair(x, y);
        if (n + 1 < PARTS) {
            x -= __uint_as_float(parts[n] << 16);
            y -= __uint_as_float(parts[n] & 0xFFFF0000u);
        }
    }
}

// Sixteen rows of A or eight columns of B, split: for each part, the registers that a tensor-core product takes.
struct FactorA { unsigned part[PARTS][4]; };
struct FactorB { unsigned part[PARTS][2]; };

// What a lane needs of A and B at depth k, four numbers of each row or column. The sixteen depths may come in any order, the same in
// A and B: along rows of a tile in pairs of neighbours (2 t, 2 t + 1, 2 t + 8, 2 t + 9), down its columns every fourth (t, t + 4, ...).
struct AlongRows {  // X[first + g][k + ...]
    static __device__ __forceinline__ void read(float (&x)[4], const float* X, int pitch, int first, int k)
    {
        const float* const at = X + (first + lane_g()) * pitch + k + 2 * lane_t();
        const Vector<2> low = vector<2>(at), high = vector<2>(at + 8);
        x[0] = low.x[0], x[1] = low.x[1], x[2] = high.x[0], x[3] = high.x[1];
    }
};
struct AlongRowsAsDown {  // the same numbers in the order of DownColumns
    static __device__ __forceinline__ void read(float (&x)[4], const float* X, int pitch, int first, int k)
    {
        const float* const at = X + (first + lane_g()) * pitch + k + lane_t();
#pragma unroll
        for (int n = 0; n < 4; n++)
            x[n] = at[4 * n];
    }
};
struct DownColumns {  // X[k + ...][first + g]
    static __device__ __forceinline__ void read(float (&x)[4], const float* X, int pitch, int first, int k)
    {
        const float* const at = X + (k + lane_t()) * pitch + first + lane_g();
#pragma unroll
        for (int n = 0; n < 4; n++)
            x[n] = at[4 * n * pitch];
    }
};

template <class Read> __device__ __forceinline__ FactorA factor_a(const float* A, int pitch, int first, int k)
{
    FactorA parts;
#pragma unroll
    for (int half = 0; half < 2; half++) {  // rows g and g + 8
        float x[4];
        unsigned pair[PARTS];
        Read::read(x, A, pitch, first + 8 * half, k);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            split(x[2 * n], x[2 * n + 1], pair);
#pragma unroll
            for (int p = 0; p < PARTS; p++)
                parts.part[p][half + 2 * n] = pair[p];
        }
    }
    return parts;
}

template <class Read> __device__ __forceinline__ FactorB factor_b(const float* B, int pitch, int first, int k)
{
    FactorB parts;
    float x[4];
    unsigned pair[PARTS];
    Read::read(x, B, pitch, first, k);
#pragma unroll
    for (int n = 0; n < 2; n++) {
        split(x[2 * n], x[2 * n + 1], pair);
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            parts.part[p][n] = pair[p];
    }
    return parts;
}

// What gives eight columns of B, from `column` on among those of the warp, at depth k: here a float32 tile, split each time that it is read.
template <class Read> struct WholeB {
    const float* tile;
    int pitch, first_column;
    __device__ __forceinline__ FactorB operator()(int column, int k) const
    {
        return factor_b<Read>(tile, pitch, first_column + column, k);
    }
};

// sum += a b for ABREAST pieces from the n-th of row m on.
template <class Layout, int ABREAST>
__device__ __forceinline__ void add_products(
    float (&sum)[Layout::R][Layout::C], const FactorA& a, const FactorB (&b)[ABREAST], int m, int n)
{
    float c[ABREAST][4] = {};
#pragma unroll
    for (int order = PARTS - 1; order >= 0; order--)  // parts p of A and order - p of B: the smallest products first
#pragma unroll
        for (int p = 0; p <= order; p++)
#pragma unroll
            for (int x = 0; x < ABREAST; x++)
                multiply_bfloat16(c[x], a.part[p], b[x].part[order - p]);
#pragma unroll
    for (int x = 0; x < ABREAST; x++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            sum[2 * m + e / 2][2 * (n + x) + e % 2] += c[x][e];
}
