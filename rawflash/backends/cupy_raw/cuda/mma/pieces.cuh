// The three matrix products on tiles by tensor cores (mma.sync, sm_80 and later), and who owns which number of their results.
//
// A block has eight warps. In the result (ROWS, COLUMNS) of a product, they stand in a grid of WARPS_Y x WARPS_X; each owns MT x NT pieces of
// 16 x 8 numbers, of which lane (g, t) = (lane / 4, lane % 4) holds rows g and g + 8, columns 2 t and 2 t + 1.
//
// What a piece is multiplied from differs with the dtype: split.cuh (float32), double.cuh (float64). Each defines DEPTH, the products that one
// step sums; FactorA, FactorB, what a lane needs of sixteen rows of A and of eight columns of B at one step; AlongRows, AlongRowsAsDown,
// DownColumns, how it reads them; factor_a; WholeB; and add_products.

constexpr int WARPS = THREADS / 32;

__device__ __forceinline__ int lane_g() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int lane_t() { return threadIdx.x % 4; }

template <int ROWS, int COLUMNS> struct Pieces {
    static_assert(ROWS % 16 == 0, "a tile has a multiple of 16 rows");
    static constexpr int WARPS_Y = ROWS % 128 == 0 ? 8 : ROWS % 64 == 0 ? 4 : ROWS % 32 == 0 ? 2 : 1, WARPS_X = WARPS / WARPS_Y;
    static constexpr int MT = ROWS / 16 / WARPS_Y, NT = ceil_div(COLUMNS, 8 * WARPS_X);
    static constexpr int R = 2 * MT, C = 2 * NT, WIDTH = 2;
    static constexpr bool ROW_IN_WARP = WARPS_X == 1;
    static __device__ __forceinline__ int first_row() { return threadIdx.x / 32 / WARPS_X * MT * 16; }
    static __device__ __forceinline__ int first_column() { return threadIdx.x / 32 % WARPS_X * NT * 8; }
    static __device__ __forceinline__ int row(int r) { return first_row() + lane_g() + 8 * r; }
    static __device__ __forceinline__ int column(int c) { return first_column() + 8 * (c / 2) + 2 * lane_t() + c % 2; }
};

#if P_STAYS
struct ScoreTile : Pieces<BR, BC> {  // the keys of eight columns in another order: then P is a factor of P V where it lies
    static __device__ __forceinline__ int column(int c) { return first_column() + 8 * (c / 2) + (c % 2 ? 4 + (lane_t() ^ 2) : lane_t()); }
};
#else
typedef Pieces<BR, BC> ScoreTile;                               // S, P, dP, dS
#endif
template <int N> struct QueryTile : Pieces<BR, N> {};           // O, dQ: rows as in a tile of scores
template <int N> struct KeyTile : Pieces<BC, N> {};             // dK, dV

constexpr int ROW_LANES = 4;  // neighbouring threads that share the rows of a tile of scores
__device__ __forceinline__ int row_lane() { return lane_t(); }

#if SPLIT
#include "split.cuh"
#else
#include "double.cuh"
#endif

// sum += A B over K for the pieces of Layout. Some pieces of a row side by side: a tensor-core product waits for the one before it in its sum.
template <class Layout, class ReadA, int K, class B>
__device__ __forceinline__ void product(real (&sum)[Layout::R][Layout::C], const real* A, int pitch_A, B factor_b)
{
    constexpr int ABREAST = Layout::NT % 8 == 0 ? 8 : Layout::NT % 4 == 0 ? 4 : Layout::NT % 3 == 0 ? 3 : Layout::NT % 2 == 0 ? 2 : 1;
    constexpr int STEPS = ABREAST == 8 ? 1 : 2;
    const int first_row = Layout::first_row();
#pragma unroll STEPS
    for (int k = 0; k < K; k += DEPTH) {
        FactorA a[Layout::MT];
#pragma unroll
        for (int m = 0; m < Layout::MT; m++)
            a[m] = factor_a<ReadA>(A, pitch_A, first_row + 16 * m, k);
#pragma unroll
        for (int n = 0; n < Layout::NT; n += ABREAST) {
            FactorB b[ABREAST];
#pragma unroll
            for (int x = 0; x < ABREAST; x++)
                b[x] = factor_b(8 * (n + x), k);
#pragma unroll
            for (int m = 0; m < Layout::MT; m++)
                add_products<Layout, ABREAST>(sum, a[m], b, m, n);
        }
    }
}

#if P_STAYS
typedef AlongTurnedRows AlongKeys;
#else
typedef AlongRows AlongKeys;
#endif

// C[r][c] += sum_k A[row r][k] B[row c][k], a tile of scores. K is a multiple of DEPTH: the tiles hold zeros past the data.
template <int K, int R, int C>
__device__ __forceinline__ void product_nt(real (&sum)[R][C], const real* A, int pitch_A, const real* B, int pitch_B)
{
    product<ScoreTile, AlongRows, K>(sum, A, pitch_A, WholeB<AlongKeys>{B, pitch_B, ScoreTile::first_column()});
}

// C[r][c] += sum_k A[row r][k] B[k][column c], a tile of rows of Q.
template <int K, int COLUMNS, int R, int C>
__device__ __forceinline__ void product_nn(real (&sum)[R][C], const real* A, int pitch_A, const real* B, int pitch_B)
{
    product<QueryTile<COLUMNS>, AlongRowsAsDown, K>(
        sum, A, pitch_A, WholeB<DownColumns>{B, pitch_B, QueryTile<COLUMNS>::first_column()});
}

#if P_STAYS
// C[r][c] += sum_k A[r][k] B[k][column c], where A is the thread's part of a tile of scores.
template <int COLUMNS, int R, int C>
__device__ __forceinline__ void product_of_scores(real (&sum)[R][C], const real (&A)[ScoreTile::R][ScoreTile::C], const real* B, int pitch_B)
{
    typedef QueryTile<COLUMNS> Layout;
    static_assert(ScoreTile::ROW_IN_WARP && Layout::ROW_IN_WARP, "a warp has whole rows of both");
    constexpr int ABREAST = Layout::NT % 8 == 0 ? 8 : Layout::NT % 4 == 0 ? 4 : Layout::NT % 3 == 0 ? 3 : Layout::NT % 2 == 0 ? 2 : 1;
    const WholeB<DownTurnedColumns> factor_b = {B, pitch_B, 0};
#pragma unroll
    for (int k = 0; k < BC; k += DEPTH)
#pragma unroll
        for (int n = 0; n < Layout::NT; n += ABREAST) {
            FactorB b[ABREAST];
#pragma unroll
            for (int x = 0; x < ABREAST; x++)
                b[x] = factor_b(8 * (n + x), k);
#pragma unroll
            for (int m = 0; m < Layout::MT; m++) {
                const FactorA a = {{A[2 * m][k / 4], A[2 * m + 1][k / 4], A[2 * m][k / 4 + 1], A[2 * m + 1][k / 4 + 1]}};
                add_products<Layout, ABREAST>(sum, a, b, m, n);
            }
        }
}
#endif

// C[r][c] += sum_k A[k][column r] B[k][column c], a tile of rows of K.
template <int K, int ROWS, int COLUMNS, int R, int C>
__device__ __forceinline__ void product_tn(real (&sum)[R][C], const real* A, int pitch_A, const real* B, int pitch_B)
{
    static_assert(ROWS == BC, "rows of K");
    product<KeyTile<COLUMNS>, DownColumns, K>(sum, A, pitch_A, WholeB<DownColumns>{B, pitch_B, KeyTile<COLUMNS>::first_column()});
}
