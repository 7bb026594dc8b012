// Tiles of 16-bit numbers in shared memory, and what the lanes of a warp hold of them for tensor-core products.
//
// The rows of a tile have a multiple of 64 numbers: those of the matrix, then zeros as far as products read. Chunk x of row y, 16 bytes, lies
// at chunk x ^ (y & 7) of the row: the eight rows of an 8 x 8 matrix are in different banks. Tiles begin at multiples of 1 KiB, which
// 8 rows are at least; places in them are 32-bit addresses of shared memory (shared_address).
//
// A kernel that includes this says how many THREADS its blocks have.

constexpr int WARP_SIZE = 32;
constexpr int CHUNK_HALVES = 8;  // numbers in 16 bytes
constexpr int LINE_HALVES = 64, LINE_CHUNKS = 8;  // in 128 bytes, which eight neighbouring lanes copy
constexpr int LINE_BYTES = 128;
constexpr int ROWS_AT_ONCE = THREADS / LINE_CHUNKS;  // that all threads copy
static_assert(ROWS_AT_ONCE % 8 == 0, "a thread's chunks lie at one place of their lines");

__device__ constexpr int line_columns(int n) { return (n + LINE_HALVES - 1) / LINE_HALVES * LINE_HALVES; }  // of a tile for n columns
__device__ constexpr int depth_columns(int n) { return (n + 15) / 16 * 16; }                               // that products read

__device__ __forceinline__ int lane_g() { return threadIdx.x % WARP_SIZE / 4; }
__device__ __forceinline__ int lane_t() { return threadIdx.x % 4; }

// Two numbers of TYPE in a word, x in the low half.
__device__ __forceinline__ unsigned pair_of(float x, float y)
{
    if constexpr (TYPE == BFLOAT16)
        return bfloat16_pair(x, y);
    else
        return float16_pair(x, y);
}

// c += a b for 16 x 8 sums of 16 products of TYPE: multiply_bfloat16 in ptx.cuh says which lane holds what.
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2])
{
    if constexpr (TYPE == BFLOAT16)
        multiply_bfloat16(c, a, b);
    else
        multiply_float16(c, a, b);
}

// The same for 16 x 16 sums: both halves of what piece() read of B.
__device__ __forceinline__ void multiply_both(float (&c0)[4], float (&c1)[4], const unsigned (&a)[4], const unsigned (&b)[4])
{
    const unsigned left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
    multiply(c0, a, left);
    multiply(c1, a, right);
}

// ---- pieces of 16 x 16 numbers -----------------------------------------------------------------------------------------------

// Bytes from the start of a tile, whose rows have COLUMNS numbers, to a chunk.
template <int COLUMNS> __device__ __forceinline__ int chunk_at(int y, int x)
{
    return y * (COLUMNS * 2) + ((x ^ (y & 7)) << 4);
}

// To the row that this lane gives to ldmatrix: the rows of a piece are rows of A, or (transposed) depths of B.
template <int COLUMNS> __device__ __forceinline__ int lane_rows(unsigned thread = threadIdx.x)
{
    const int lane = (int)(thread % WARP_SIZE);
    return chunk_at<COLUMNS>(lane & 15, lane >> 4);
}

// The same where the rows of a piece are columns of B, or (transposed) depths of A.
template <int COLUMNS> __device__ __forceinline__ int lane_columns(unsigned thread = threadIdx.x)
{
    const int lane = (int)(thread % WARP_SIZE);
    return chunk_at<COLUMNS>((lane & 7) + (lane >> 4 << 3), lane >> 3 & 1);
}

// The piece of rows y, ... and columns x, ..., multiples of 16; `at` is the tile's address and one of the two above.
template <int COLUMNS> __device__ __forceinline__ unsigned piece_at(unsigned at, int y, int x)
{
    return (at ^ (x / 16 % 4 * 32)) + y * (COLUMNS * 2) + x / LINE_HALVES * LINE_BYTES;
}

template <int COLUMNS> __device__ __forceinline__ void read_piece(unsigned (&words)[4], unsigned at, int y, int x)
{
    load_matrices(words, piece_at<COLUMNS>(at, y, x));
}

template <int COLUMNS> __device__ __forceinline__ void read_piece_transposed(unsigned (&words)[4], unsigned at, int y, int x)
{
    load_matrices_transposed(words, piece_at<COLUMNS>(at, y, x));
}

// ---- between device memory and tiles ------------------------------------------------------------------------------------------

// The first row and the chunk of each line that this thread copies; it goes on ROWS_AT_ONCE rows at a time.
__device__ __forceinline__ int copied_row(unsigned thread = threadIdx.x) { return (int)(thread / LINE_CHUNKS); }
__device__ __forceinline__ int copied_chunk(unsigned thread = threadIdx.x) { return (int)(thread % LINE_CHUNKS); }

// Begin to copy ROWS rows of N numbers. from(n, exists): where row copied_row() + n has number CHUNK_HALVES * copied_chunk(); rows that do not
// exist become zeros, but their address is to be one of the array's. WHOLE: they all exist.
template <int ROWS, int N, bool WHOLE, class From> __device__ __forceinline__ void load_halves(unsigned tile, const From& from)
{
    constexpr int COLUMNS = line_columns(N);
    static_assert(ROWS % ROWS_AT_ONCE == 0, "all threads copy as many rows");
    const unsigned thread = once_more(threadIdx.x);  // between copies that takes no registers
    const int column = CHUNK_HALVES * copied_chunk(thread);
    const unsigned target = tile + chunk_at<COLUMNS>(copied_row(thread), copied_chunk(thread));
    if constexpr (ALIGNED) {
#pragma unroll
        for (int n = 0; n < ROWS; n += ROWS_AT_ONCE) {
            bool exists = true;
            const elem* const source = from(n, exists);
#pragma unroll
            for (int x = 0; x < COLUMNS; x += LINE_HALVES) {
                const unsigned to = target + n * (COLUMNS * 2) + x * 2;
                if (WHOLE && x + LINE_HALVES <= N)
                    copy_chunk(to, source + x);
                else if (x + LINE_HALVES <= N)
                    copy_chunk_if(to, source + x, exists);
                else
                    copy_chunk_if(to, source + x, exists && x + column < N);
            }
        }
    } else {
#pragma unroll 1
        for (int n = 0; n < ROWS; n += ROWS_AT_ONCE) {
            bool exists = true;
            const elem* const source = from(n, exists);
#pragma unroll 1
            for (int x = 0; x < COLUMNS; x += LINE_HALVES) {
                unsigned words[4] = {};
#pragma unroll
                for (int e = 0; e < CHUNK_HALVES; e++)
                    if (exists && x + column + e < N)
                        words[e / 2] |= (unsigned)source[x + e] << 16 * (e % 2);
                store_shared(target + n * (COLUMNS * 2) + x * 2, words);
            }
        }
    }
}

// Write eight numbers of a row that has N of them, from `column` on.
template <int N> __device__ __forceinline__ void store_chunk(elem* row, int column, uint4 words)
{
    if constexpr (ALIGNED) {
        *reinterpret_cast<uint4*>(row + column) = words;
    } else {
        const unsigned word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int e = 0; e < CHUNK_HALVES; e++)
            if (column + e < N)
                row[column + e] = (elem)(word[e / 2] >> 16 * (e % 2));
    }
}

// X[m][n][e] are the numbers of 16-row piece m, columns 8 (chunk + n), ..., that this lane holds of results of products. They go to rows of
// shared memory, at `own`, of COLUMNS numbers, as X times factor[r] for row y = 8 r + lane_g(); as zeros where `empty` says so, whatever the
// values are.
template <int COLUMNS, int M, int CHUNKS>
__device__ __forceinline__ void put_rows(
    const float (&X)[M][CHUNKS][4], const float (&factor)[2 * M], const bool (&empty)[2 * M], unsigned own, int chunk)
{
#pragma unroll
    for (int r = 0; r < 2 * M; r++)
#pragma unroll
        for (int n = 0; n < CHUNKS; n++) {
            float x = X[r / 2][n][r % 2 * 2] * factor[r], y = X[r / 2][n][r % 2 * 2 + 1] * factor[r];
            if (empty[r])
                x = y = 0;
            store_shared(own + chunk_at<COLUMNS>(8 * r + lane_g(), chunk + n) + 4 * lane_t(), pair_of(x, y));
        }
}

// Rows of N numbers from shared memory to to(y), by a warp, in whole lines; nullptr: there is no such row.
template <int ROWS, int N, class To> __device__ __forceinline__ void write_rows(unsigned own, const To& to)
{
    constexpr int COLUMNS = line_columns(N);
    constexpr int STEP_ROWS = WARP_SIZE / LINE_CHUNKS;
    const unsigned thread = once_more(threadIdx.x);
    const int row = (int)(thread % WARP_SIZE) / LINE_CHUNKS, chunk = copied_chunk(thread);
#pragma unroll 4
    for (int n = 0; n < ROWS; n += STEP_ROWS) {
        elem* const target = to(n + row);
        if (target == nullptr)
            continue;
#pragma unroll
        for (int x = 0; x < COLUMNS / CHUNK_HALVES; x += LINE_CHUNKS) {
            const int column = (x + chunk) * CHUNK_HALVES;
            if (column >= N)
                continue;
            const uint4 words = load_shared(own + chunk_at<COLUMNS>(n + row, x + chunk));
            store_chunk<N>(target, column, words);
        }
    }
}

// Both, through the warp's own rows of line_columns(N) numbers.
template <int M, int N, class To>
__device__ __forceinline__ void store_rows(
    float (&X)[M][depth_columns(N) / 8][4], const float (&factor)[2 * M], const bool (&empty)[2 * M], unsigned own, const To& to)
{
    put_rows<line_columns(N)>(X, factor, empty, own, 0);
    __syncwarp();
    write_rows<16 * M, N>(own, to);
}
