// The three matrix products on tiles by multiply-adds, and who owns which number of their results.
//
// In a tile of scores, thread (y, x) owns rows y + 16 r and columns x + 16 c: the 16 threads of a row are half a warp, so that a row's
// maximum and sum are a few shuffles. PITCH is an odd number of vectors: vectors of neighbouring rows are in different banks.

// N rows or columns over 16 threads, one at a time: the n-th of thread t.
template <int N> struct Spread {
    static_assert(N % SIDE == 0, "a tile has a multiple of 16 rows");
    static constexpr int COUNT = N / SIDE;
    static __device__ __forceinline__ int at(int t, int n) { return t + SIDE * n; }
};

struct ScoreTile {  // S, P, dP, dS (BR, BC)
    static constexpr int R = Spread<BR>::COUNT, C = Spread<BC>::COUNT;
    static constexpr bool ROW_IN_WARP = true;
    static __device__ __forceinline__ int row(int r) { return Spread<BR>::at(thread_y(), r); }
    static __device__ __forceinline__ int column(int c) { return Spread<BC>::at(thread_x(), c); }
};

template <int N> struct QueryTile : RowColumns<N> {  // O, dQ (BR, N): rows as in a tile of scores
    static constexpr int R = ScoreTile::R;
};

template <int N> struct KeyTile : RowColumns<N> {  // dK, dV (BC, N)
    static constexpr int R = Grouped<BC>::COUNT;
    static __device__ __forceinline__ int row(int r) { return Grouped<BC>::at(thread_y(), r); }
};

constexpr int ROW_LANES = SIDE;  // neighbouring threads that share the rows of a tile of scores
__device__ __forceinline__ int row_lane() { return thread_x(); }

static_assert(PITCH_D >= Grouped<D>::padded(Grouped<D>::WIDTH) && PITCH_V >= Grouped<DV>::padded(Grouped<DV>::WIDTH) &&
              PITCH_S >= Grouped<BC>::padded(Grouped<BC>::WIDTH), "a row of a tile holds all that threads touch");

constexpr int STEPS = TYPE == FLOAT64 ? 1 : 2;  // of a product, unrolled: what the registers leave room for

// ---- products: C += A B for the numbers that a thread owns -------------------------------------------------------------

// C[r][c] += sum_k A[row r][k] B[row c][k]: rows and columns spread. K is a multiple of VECTOR: the tiles hold zeros past the data.
template <int K, int R, int C>
__device__ __forceinline__ void product_nt(real (&sum)[R][C], const real* A, int pitch_A, const real* B, int pitch_B)
{
    A += thread_y() * pitch_A;
    B += thread_x() * pitch_B;
#pragma unroll STEPS
    for (int k = 0; k < K; k += VECTOR) {
        Vector<VECTOR> a[R], b[C];
#pragma unroll
        for (int r = 0; r < R; r++)
            a[r] = vector<VECTOR>(A + r * SIDE * pitch_A + k);
#pragma unroll
        for (int c = 0; c < C; c++)
            b[c] = vector<VECTOR>(B + c * SIDE * pitch_B + k);
#pragma unroll
        for (int n = 0; n < VECTOR; n++)
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int c = 0; c < C; c++)
                    sum[r][c] = multiply_add(a[r].x[n], b[c].x[n], sum[r][c]);
    }
}

// C[r][c] += sum_k A[row r][k] B[k][column c]: rows spread, columns grouped.
template <int K, int COLUMNS, int R, int C>
__device__ __forceinline__ void product_nn(real (&sum)[R][C], const real* A, int pitch_A, const real* B, int pitch_B)
{
    constexpr int WIDTH = Grouped<COLUMNS>::WIDTH;
    A += thread_y() * pitch_A;
    B += thread_x() * WIDTH;
#pragma unroll STEPS
    for (int k = 0; k < K; k += VECTOR) {
        Vector<VECTOR> a[R];
#pragma unroll
        for (int r = 0; r < R; r++)
            a[r] = vector<VECTOR>(A + r * SIDE * pitch_A + k);
#pragma unroll
        for (int n = 0; n < VECTOR; n++) {
            Vector<WIDTH> b[C / WIDTH];
#pragma unroll
            for (int c = 0; c < C / WIDTH; c++)
                b[c] = vector<WIDTH>(B + (k + n) * pitch_B + c * SIDE * WIDTH);
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int c = 0; c < C; c++)
                    sum[r][c] = multiply_add(a[r].x[n], b[c / WIDTH].x[c % WIDTH], sum[r][c]);
        }
    }
}

// C[r][c] += sum_k A[k][column r] B[k][column c]: both grouped.
template <int K, int ROWS, int COLUMNS, int R, int C>
__device__ __forceinline__ void product_tn(real (&sum)[R][C], const real* A, int pitch_A, const real* B, int pitch_B)
{
    constexpr int HEIGHT = Grouped<ROWS>::WIDTH, WIDTH = Grouped<COLUMNS>::WIDTH;
    A += thread_y() * HEIGHT;
    B += thread_x() * WIDTH;
#pragma unroll STEPS
    for (int k = 0; k < K; k++) {
        Vector<HEIGHT> a[R / HEIGHT];
        Vector<WIDTH> b[C / WIDTH];
#pragma unroll
        for (int r = 0; r < R / HEIGHT; r++)
            a[r] = vector<HEIGHT>(A + k * pitch_A + r * SIDE * HEIGHT);
#pragma unroll
        for (int c = 0; c < C / WIDTH; c++)
            b[c] = vector<WIDTH>(B + k * pitch_B + c * SIDE * WIDTH);
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int c = 0; c < C; c++)
                sum[r][c] = multiply_add(a[r / HEIGHT].x[r % HEIGHT], b[c / WIDTH].x[c % WIDTH], sum[r][c]);
    }
}
