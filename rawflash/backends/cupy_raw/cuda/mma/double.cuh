// Products of float64 by the tensor cores that take it: nothing is lost, each sum is one of fused multiply-adds.
//
// PITCH_D, PITCH_V and PITCH_S are 4 or 12 modulo 16: the reads below then hit different banks.

static_assert(TYPE == FLOAT64, "no other dtype");

constexpr int DEPTH = 8;

struct FactorA { double x[4]; };  // rows g and g + 8 at depth t, then at depth t + 4
struct FactorB { double x[2]; };  // column g at depths t and t + 4

struct AlongRows {  // X[first + g][k + ...]
    static __device__ __forceinline__ double read(const double* X, int pitch, int first, int k, int depth)
    {
        return X[(first + lane_g()) * pitch + k + lane_t() + depth];
    }
};
typedef AlongRows AlongRowsAsDown;
struct DownColumns {  // X[k + ...][first + g]
    static __device__ __forceinline__ double read(const double* X, int pitch, int first, int k, int depth)
    {
        return X[(k + lane_t() + depth) * pitch + first + lane_g()];
    }
};

// Of eight rows, or columns' depths, in the order of ScoreTile's columns if P_STAYS: 0, 6, 1, 7, 2, 4, 3, 5. Then the lanes (g, t) of two neighbours
// 2 t and 2 t + 1 hold depths t and 4 + (t ^ 2), and the four rows that are read at once are different modulo 4, as banks want it.
struct AlongTurnedRows {
    static __device__ __forceinline__ double read(const double* X, int pitch, int first, int k, int depth)
    {
        const int g = lane_g();
        return X[(first + (g % 2 ? 4 + (g / 2 ^ 2) : g / 2)) * pitch + k + lane_t() + depth];
    }
};
struct DownTurnedColumns {
    static __device__ __forceinline__ double read(const double* X, int pitch, int first, int k, int depth)
    {
        return X[(k + (depth ? depth + (lane_t() ^ 2) : lane_t())) * pitch + first + lane_g()];
    }
};

template <class Read> __device__ __forceinline__ FactorA factor_a(const double* A, int pitch, int first, int k)
{
    FactorA a;
#pragma unroll
    for (int n = 0; n < 4; n++)
        a.x[n] = Read::read(A, pitch, first + n % 2 * 8, k, n / 2 * 4);
    return a;
}

// What gives eight columns of B, from `column` on among those of the warp, at depth k.
template <class Read> struct WholeB {
    const double* tile;
    int pitch, first_column;
    __device__ __forceinline__ FactorB operator()(int column, int k) const
    {
        return {{Read::read(tile, pitch, first_column + column, k, 0), Read::read(tile, pitch, first_column + column, k, 4)}};
    }
};

// sum += a b for ABREAST pieces from the n-th of row m on.
template <class Layout, int ABREAST>
__device__ __forceinline__ void add_products(
    double (&sum)[Layout::R][Layout::C], const FactorA& a, const FactorB (&b)[ABREAST], int m, int n)
{
#pragma unroll
    for (int x = 0; x < ABREAST; x++) {
        double(&upper)[Layout::C] = sum[2 * m], (&lower)[Layout::C] = sum[2 * m + 1];
        const int c = 2 * (n + x);
        multiply_float64(upper[c], upper[c + 1], lower[c], lower[c + 1], a.x, b[x].x);
    }
}
