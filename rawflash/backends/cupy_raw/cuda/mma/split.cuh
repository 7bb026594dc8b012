// The three matrix products on float32 tiles by tensor cores (mma.sync, sm_80 and later), and who owns which number of their results.
//
// Nothing is lost to the narrow inputs of tensor cores: a float32 is the sum of three bfloat16 (8 bits of significand each), exactly, so
// x y is nine products of parts, of which the six largest are computed; the others together are below 2^-21 |x y|, about 2^-25 on average
// and of either sign. Each
// 16 products are summed by the tensor core, smallest parts first, and then added to the accumulator by an ordinary addition: tensor
// cores cut sums off where float32 additions round (Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022, do
// that for TF32; parts in bfloat16: Henry, Tang and Heinecke, 2019).
// An infinity becomes NaN: its second part is infinity - infinity. Below 2^-110 the last parts underflow, which shows where the other factor is
// above 2^100.
//
// A block has eight warps. In the result (ROWS, COLUMNS) of a product, they stand in a grid of WARPS_Y x WARPS_X; each owns MT x NT pieces of
// 16 x 8 numbers, of which lane (g, t) = (lane / 4, lane % 4) holds rows g and g + 8, columns 2 t and 2 t + 1.
// PITCH_D and PITCH_V are 8 or 24 modulo 32, PITCH_S an odd number of vectors: the reads below then hit different banks, but for A in
// product_tn, which all pieces of a row share.

static_assert(TYPE == FLOAT32, "splits are of float32");

constexpr int WARPS = THREADS / 32;
constexpr int PARTS = 3;
constexpr int DEPTH = 16;  // of one tensor-core product: 16 x 8 numbers of 16 products each

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

typedef Pieces<BR, BC> ScoreTile;                               // S, P, dP, dS
template <int N> struct QueryTile : Pieces<BR, N> {};           // O, dQ: rows as in a tile of scores
template <int N> struct KeyTile : Pieces<BC, N> {};             // dK, dV

constexpr int ROW_LANES = 4;  // neighbouring threads that share the rows of a tile of scores
__device__ __forceinline__ int row_lane() { return lane_t(); }

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
struct PartsOfA { unsigned part[PARTS][4]; };
struct PartsOfB { unsigned part[PARTS][2]; };

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
struct AlongRowsByFour {  // the same numbers in the order of DownColumns
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

template <class Read> __device__ __forceinline__ PartsOfA parts_of_a(const float* A, int pitch, int first, int k)
{
    PartsOfA parts;
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

template <class Read> __device__ __forceinline__ PartsOfB parts_of_b(const float* B, int pitch, int first, int k)
{
    PartsOfB parts;
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

// What gives the parts of eight columns of B, from `column` on among those of the warp, at depth k: a float32 tile, split each time that it
// is read...
template <class Read> struct WholeB {
    const float* tile;
    int pitch, first_column;
    __device__ __forceinline__ PartsOfB operator()(int column, int k) const
    {
        return parts_of_b<Read>(tile, pitch, first_column + column, k);
    }
};

// ... or a tile that was split once: pairs of neighbours along the depth, PITCH of them from row to row, PART from part to part. The depths
// in the order of AlongRows.
template <bool DOWN_COLUMNS, int PITCH, int PART> struct SplitB {
    const unsigned* mine;  // the lane's first pair
    __device__ __forceinline__ SplitB(const unsigned* tile, int first_column)
        : mine(tile + (DOWN_COLUMNS ? lane_t() * PITCH + first_column + lane_g() : (first_column + lane_g()) * PITCH + lane_t()))
    {
    }
    __device__ __forceinline__ PartsOfB operator()(int column, int k) const
    {
        const unsigned* const at = mine + (DOWN_COLUMNS ? k / 2 * PITCH : k / 2);
        PartsOfB parts;
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int n = 0; n < 2; n++)
                parts.part[p][n] = at[p * PART + (DOWN_COLUMNS ? 4 * n * PITCH + column : column * PITCH + 4 * n)];
        return parts;
    }
};

// sum += A B over K for the pieces of Layout. Some pieces of a row side by side: a tensor-core product waits for the one before it in its sum.
template <class Layout, class ReadA, int K, class B>
__device__ __forceinline__ void product(float (&sum)[Layout::R][Layout::C], const float* A, int pitch_A, B parts_of_b_at)
{
    constexpr int ABREAST = Layout::NT % 8 == 0 ? 8 : Layout::NT % 4 == 0 ? 4 : Layout::NT % 3 == 0 ? 3 : Layout::NT % 2 == 0 ? 2 : 1;
    constexpr int STEPS = ABREAST == 8 ? 1 : 2;
    const int first_row = Layout::first_row();
#pragma unroll STEPS
    for (int k = 0; k < K; k += DEPTH) {
        PartsOfA a[Layout::MT];
#pragma unroll
        for (int m = 0; m < Layout::MT; m++)
            a[m] = parts_of_a<ReadA>(A, pitch_A, first_row + 16 * m, k);
#pragma unroll
        for (int n = 0; n < Layout::NT; n += ABREAST) {
            PartsOfB b[ABREAST];
#pragma unroll
            for (int x = 0; x < ABREAST; x++)
                b[x] = parts_of_b_at(8 * (n + x), k);
#pragma unroll
            for (int m = 0; m < Layout::MT; m++) {
                float c[ABREAST][4] = {};
#pragma unroll
                for (int order = PARTS - 1; order >= 0; order--)  // parts p of A and order - p of B: the smallest products first
#pragma unroll
                    for (int p = 0; p <= order; p++)
#pragma unroll
                        for (int x = 0; x < ABREAST; x++)
                            multiply_bfloat16(c[x], a[m].part[p], b[x].part[order - p]);
#pragma unroll
                for (int x = 0; x < ABREAST; x++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sum[2 * m + e / 2][2 * (n + x) + e % 2] += c[x][e];
            }
        }
    }
}

// C[r][c] += sum_k A[row r][k] B[row c][k], a tile of scores. K is a multiple of DEPTH: the tiles hold zeros past the data.
template <int K, int R, int C>
__device__ __forceinline__ void product_nt(float (&sum)[R][C], const float* A, int pitch_A, const float* B, int pitch_B)
{
    product<ScoreTile, AlongRows, K>(sum, A, pitch_A, WholeB<AlongRows>{B, pitch_B, ScoreTile::first_column()});
}

// C[r][c] += sum_k A[row r][k] B[k][column c], a tile of rows of Q.
template <int K, int COLUMNS, int R, int C>
__device__ __forceinline__ void product_nn(float (&sum)[R][C], const float* A, int pitch_A, const float* B, int pitch_B)
{
    product<QueryTile<COLUMNS>, AlongRowsByFour, K>(
        sum, A, pitch_A, WholeB<DownColumns>{B, pitch_B, QueryTile<COLUMNS>::first_column()});
}

// C[r][c] += sum_k A[k][column r] B[k][column c], a tile of rows of K.
template <int K, int ROWS, int COLUMNS, int R, int C>
__device__ __forceinline__ void product_tn(float (&sum)[R][C], const float* A, int pitch_A, const float* B, int pitch_B)
{
    static_assert(ROWS == BC, "rows of K");
    product<KeyTile<COLUMNS>, DownColumns, K>(sum, A, pitch_A, WholeB<DownColumns>{B, pitch_B, KeyTile<COLUMNS>::first_column()});
}

// The tiles of the forward pass with K/V inside. Every warp reads all of K_j and V_j, so that splitting them once, when they have landed,
// is a fraction of the work. P takes the place of K's parts.
struct ForwardTiles {
    static constexpr int PART_K = BC * PITCH_D / 2, PART_V = BC / 2 * PITCH_V;  // pairs of one part
    static constexpr int K_OR_P = most_of(PARTS * PART_K, BR * PITCH_S);
    float *Q, *K, *V, *P;  // K, V: where they land, one after the other
    unsigned *parts_K, *parts_V;

    __device__ __forceinline__ ForwardTiles(float* memory)
        : Q(memory), K(memory + BR * PITCH_D + K_OR_P + PARTS * PART_V), V(K), P(memory + BR * PITCH_D), parts_K((unsigned*)P),
          parts_V((unsigned*)P + K_OR_P)
    {
    }

    __device__ __forceinline__ void keys_landed()
    {
        constexpr int PAIRS = DEPTH_D / 2;
        for (int n = threadIdx.x; n < BC * PAIRS; n += THREADS) {
            const int row = n / PAIRS, x = n % PAIRS;
            Vector<2> pair = vector<2>(K + row * PITCH_D + 2 * x);
            if (2 * x >= D)  // past the data lies what landed before
                pair.x[0] = 0;
            if (2 * x + 1 >= D)
                pair.x[1] = 0;
            store_parts(parts_K + row * (PITCH_D / 2) + x, PART_K, pair.x[0], pair.x[1]);
        }
        __syncthreads();  // K_j is split, and where it landed is free
    }

    __device__ __forceinline__ void values_landed()
    {
        for (int n = threadIdx.x; n < BC / 2 * DV; n += THREADS) {
            const int row = n / DV, x = n % DV;
            store_parts(parts_V + row * PITCH_V + x, PART_V, V[2 * row * PITCH_V + x], V[(2 * row + 1) * PITCH_V + x]);
        }
        __syncthreads();  // V_j is split, and where it landed is free
    }

    __device__ __forceinline__ void before_P() { __syncthreads(); }  // no thread reads K's parts any more

    template <int R, int C> __device__ __forceinline__ void add_scores(float (&S)[R][C])
    {
        product<ScoreTile, AlongRows, DEPTH_D>(S, Q, PITCH_D, SplitB<false, PITCH_D / 2, PART_K>(parts_K, ScoreTile::first_column()));
    }

    template <int R, int C> __device__ __forceinline__ void add_output(float (&O)[R][C])
    {
        product<QueryTile<DV>, AlongRows, BC>(O, P, PITCH_S, SplitB<true, PITCH_V, PART_V>(parts_V, QueryTile<DV>::first_column()));
    }

    static __device__ __forceinline__ void store_parts(unsigned* to, int part, float x, float y)
    {
        unsigned pair[PARTS];
        split(x, y, pair);
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            to[p * part] = pair[p];
    }
};
