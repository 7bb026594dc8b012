// Rows of bfloat16 parts, as mma/split_inputs.cu leaves them in a workspace, and products of three-part tiles.
//
// A number is the sum of PARTS parts (split.cuh). A row of N numbers lies as its first parts, its second, its third; each of them is filled up with
// zeros to whole pieces of 16 bytes, so that copies are 16 bytes wide whatever the arrays are. The data of matrix q, k, v or dout of a
// kernel's Call is then the first row of such a workspace; its strides are not used. In shared memory a tile is PARTS tiles of halves.cuh, one
// behind the other.
//
// Sums: tensor cores cut off where float32 additions round, at the last bit of what they add to. The five products with a second or third part are
// below 2^-7 of the result: they have a sum of their own, in which what is cut off does not count however long it is. The sum of the products of
// first parts ends after STEPS_ADDED tensor-core products, and sums are added by ordinary additions.

#include "halves.cuh"
#include "split.cuh"

constexpr int STEPS_ADDED = 4;

__device__ constexpr int part_columns(int n) { return (n + CHUNK_HALVES - 1) / CHUNK_HALVES * CHUNK_HALVES; }  // of one part of a row
__device__ constexpr int row_bytes(int n) { return PARTS * part_columns(n) * 2; }
__device__ constexpr int part_bytes(int rows, int n) { return rows * line_columns(n) * 2; }  // of one part of a tile
__device__ constexpr int tile_bytes(int rows, int n) { return PARTS * part_bytes(rows, n); }

// Which row of a matrix, all heads one behind the other, has number t of a head. 32 bits are enough: a row takes 48 bytes at least.
__device__ __forceinline__ unsigned row_number(long long heads, long long rows, long long slot, long long h, long long t)
{
    return (unsigned)((slot * heads + h) * rows + t);
}

// Begin to copy ROWS rows of N numbers from the row of that number on, `count` of which exist; the others become zeros. WHOLE: they all exist.
template <int ROWS, int N, bool WHOLE>
__device__ __forceinline__ void load_parts(unsigned tile, const Matrix& matrix, unsigned first, int count = ROWS)
{
    constexpr int COLUMNS = line_columns(N), PART = part_columns(N);
    static_assert(ROWS % ROWS_AT_ONCE == 0, "all threads copy as many rows");
    const unsigned thread = once_more(threadIdx.x);  // between copies that takes no registers
    const int row = copied_row(thread), column = CHUNK_HALVES * copied_chunk(thread);
    const unsigned char* const source = (const unsigned char*)matrix.data + (unsigned long long)(first + row) * row_bytes(N) + column * 2;
    const unsigned target = tile + chunk_at<COLUMNS>(row, copied_chunk(thread));
#pragma unroll
    for (int n = 0; n < ROWS; n += ROWS_AT_ONCE) {
        const bool exists = WHOLE || n + row < count;
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int x = 0; x < COLUMNS; x += LINE_HALVES) {
                const unsigned to = target + p * part_bytes(ROWS, N) + n * (COLUMNS * 2) + x * 2;
                const unsigned char* const from = source + n * row_bytes(N) + p * (PART * 2) + x * 2;
                if (WHOLE && x + LINE_HALVES <= PART)
                    copy_chunk(to, from);
                else
                    copy_chunk_if(to, from, exists && (x + LINE_HALVES <= PART || x + column < PART));
            }
    }
}

// All parts of a piece of 16 x 16 numbers of a tile of ROWS rows of N numbers.
template <int ROWS, int N> __device__ __forceinline__ void read_parts(unsigned (&words)[PARTS][4], unsigned at, int y, int x)
{
#pragma unroll
    for (int p = 0; p < PARTS; p++)
        load_matrices(words[p], piece_at<line_columns(N)>(at, y, x) + p * part_bytes(ROWS, N));
}

template <int ROWS, int N> __device__ __forceinline__ void read_parts_transposed(unsigned (&words)[PARTS][4], unsigned at, int y, int x)
{
#pragma unroll
    for (int p = 0; p < PARTS; p++)
        load_matrices_transposed(words[p], piece_at<line_columns(N)>(at, y, x) + p * part_bytes(ROWS, N));
}

// The six products of parts for 16 x 8 N sums: large and small are where those of the first parts and the others are summed. Pieces of 8 columns
// abreast, as a product waits for the one before it in its sum; a pair of them has one B.
template <int N>
__device__ __forceinline__ void multiply_parts(
    float (&large)[N][4], float (&small)[N][4], const unsigned (&A)[PARTS][4], const unsigned (&B)[N / 2][PARTS][4])
{
#pragma unroll
    for (int order = PARTS - 1; order >= 0; order--)
#pragma unroll
        for (int p = 0; p <= order; p++)
#pragma unroll
            for (int n = 0; n < N; n++) {
                const unsigned(&four)[4] = B[n / 2][order - p];
                const unsigned two[2] = {four[n % 2 * 2], four[n % 2 * 2 + 1]};
                multiply_bfloat16(order == 0 ? large[n] : small[n], A[p], two);
            }
}

// Pairs of neighbours in a row of results as the words of A for products with them: X[0] has eight columns, X[1] the next eight.
__device__ __forceinline__ void split_piece(unsigned (&words)[PARTS][4], const float (&left)[4], const float (&right)[4])
{
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float(&X)[4] = e < 2 ? left : right;
        unsigned pair[PARTS];
        split(X[e % 2 * 2], X[e % 2 * 2 + 1], pair);
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            words[p][e] = pair[p];
    }
}

template <int N> __device__ __forceinline__ void clear(float (&X)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            X[n][e] = 0;
}

template <int N> __device__ __forceinline__ void add(float (&X)[N][4], const float (&Y)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            X[n][e] += Y[n][e];
}

// The same address, but not before a sum is there: ptxas would read ahead more than there are registers for. `zero` is 0, which it does not know.
__device__ __forceinline__ unsigned after(float sum, unsigned at, unsigned zero) { return at + (__float_as_uint(sum) & zero); }

// S = A B^T for 16 rows of A and the first 8 N rows of B, all of which have WIDTH numbers. The tiles have ROWS_A and ROWS_B rows; a_at and b_at are
// their addresses with lane_rows() and lane_columns(), from these rows on.
template <int ROWS_A, int ROWS_B, int WIDTH, int N>
__device__ __forceinline__ void multiply_rows(float (&S)[N][4], unsigned a_at, unsigned b_at, unsigned zero)
{
    constexpr int STEPS = depth_columns(WIDTH) / 16, ABREAST = 4, GROUPS = N / ABREAST;
    static_assert(N % ABREAST == 0, "whole pieces");
    float large[GROUPS][ABREAST][4], small[GROUPS][ABREAST][4], more[GROUPS][ABREAST][4];
#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
        clear(large[n]);
        clear(small[n]);
    }
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        unsigned A[PARTS][4];
        read_parts<ROWS_A, WIDTH>(A, a_at, 0, 16 * s);
#pragma unroll
        for (int n = 0; n < GROUPS; n++) {
            unsigned B[ABREAST / 2][PARTS][4];
#pragma unroll
            for (int x = 0; x < ABREAST / 2; x++)
                read_parts<ROWS_B, WIDTH>(B[x], b_at, 8 * ABREAST * n + 16 * x, 16 * s);
            if (s > 0 && s % STEPS_ADDED == 0)
                clear(more[n]);
            multiply_parts<ABREAST>(s < STEPS_ADDED ? large[n] : more[n], small[n], A, B);
            if (s >= STEPS_ADDED && (s % STEPS_ADDED == STEPS_ADDED - 1 || s == STEPS - 1))
                add(large[n], more[n]);
            if (n == 0) {
                a_at = after(small[0][0][0], a_at, zero);
                b_at = after(small[0][0][0], b_at, zero);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            S[n][e] = large[n / ABREAST][n % ABREAST][e] + small[n / ABREAST][n % ABREAST][e];
}

// sum += A B for 16 rows of A, as they were split, and the first N pieces of columns of B. B has rows of COLUMNS numbers, the depths, in a tile of ROWS
// rows; `at` is its address with lane_rows(), from the first depth on.
template <int ROWS, int COLUMNS, int STEPS, int N>
__device__ __forceinline__ void accumulate(float (&sum)[N][4], const unsigned (&A)[STEPS][PARTS][4], unsigned at, unsigned zero)
{
    constexpr int ABREAST = 2;  // with more, ptxas runs out of registers
    static_assert(N % ABREAST == 0 && STEPS <= STEPS_ADDED, "whole pieces, and one addition");
#pragma unroll
    for (int n = 0; n < N; n += ABREAST) {
        float large[ABREAST][4], small[ABREAST][4];
        clear(large);
        clear(small);
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            unsigned B[ABREAST / 2][PARTS][4];
#pragma unroll
            for (int x = 0; x < ABREAST / 2; x++)
                read_parts_transposed<ROWS, COLUMNS>(B[x], at, 16 * s, 8 * n + 16 * x);
            multiply_parts<ABREAST>(large, small, A[s], B);
            if (s == STEPS - 2)
                at = after(small[0][0], at, zero);
        }
#pragma unroll
        for (int x = 0; x < ABREAST; x++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                sum[n + x][e] += large[x][e] + small[x][e];
    }
}

// sum += A B for 16 rows of A and N pieces of columns of B, over STEPS tensor-core products: read_a(words, s, later) and read_b(words, s, x, later)
// give the parts of A and of the x-th pair of pieces of B; `later` is 0, to be added to their addresses.
template <int STEPS, int N, class ReadA, class ReadB>
__device__ __forceinline__ void add_product(float (&sum)[N][4], const ReadA& read_a, const ReadB& read_b, unsigned zero)
{
    constexpr int ABREAST = N % 4 == 0 ? 4 : 2;
    float large[N / ABREAST][ABREAST][4], small[N / ABREAST][ABREAST][4];
    unsigned later = 0;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        unsigned A[PARTS][4];
        read_a(A, s, later);
#pragma unroll
        for (int n = 0; n < N / ABREAST; n++) {
            unsigned B[ABREAST / 2][PARTS][4];
#pragma unroll
            for (int x = 0; x < ABREAST / 2; x++)
                read_b(B[x], s, n * (ABREAST / 2) + x, later);
            if (s == 0)
                clear(small[n]);
            if (s % STEPS_ADDED == 0)
                clear(large[n]);
            multiply_parts<ABREAST>(large[n], small[n], A, B);
            const bool last = s == STEPS - 1;
            if (last || s % STEPS_ADDED == STEPS_ADDED - 1)
#pragma unroll
                for (int x = 0; x < ABREAST; x++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sum[ABREAST * n + x][e] += last ? large[n][x][e] + small[n][x][e] : large[n][x][e];
            if (n == 0 && !last)
                later = after(small[0][0][0], 0, zero);
        }
    }
}

// Columns x and x + 1 of a row of N numbers, x even.
template <int N> __device__ __forceinline__ void store_pair(float* row, int x, float left, float right)
{
    if (ALIGNED) {
        if (x < N)
            *reinterpret_cast<float2*>(row + x) = make_float2(left, right);
    } else {
        if (x < N)
            row[x] = left;
        if (x + 1 < N)
            row[x + 1] = right;
    }
}
