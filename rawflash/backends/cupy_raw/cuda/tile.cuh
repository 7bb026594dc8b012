// Tiles in on-chip (shared) memory: how they come from device memory, and how a block of 16 x 16 threads shares out rows.
//
// Rows of a tile lie PITCH numbers apart, so that what the threads of a warp read at once is in different banks.

constexpr int SIDE = 16;
constexpr int BLOCKS = 1;  // of a multiprocessor, as tiles are planned. Unsaid, the compiler saves registers, at the cost of the order of products
constexpr unsigned WARP = 0xFFFFFFFFu;

__device__ __forceinline__ int thread_x() { return threadIdx.x % SIDE; }
__device__ __forceinline__ int thread_y() { return threadIdx.x / SIDE; }

__device__ constexpr int ceil_div(int n, int by) { return (n + by - 1) / by; }
__device__ constexpr int most_of(int x, int y) { return x > y ? x : y; }

// N columns over 16 threads in vectors of WIDTH neighbours, as wide as leaves at most an eighth of the threads' work idle.
template <int N> struct Grouped {
    static __device__ constexpr int padded(int width) { return width * SIDE * ceil_div(N, width * SIDE); }
    static __device__ constexpr bool good(int width) { return width <= VECTOR && 8 * padded(width) <= 9 * padded(1); }
    static constexpr int WIDTH = good(4) ? 4 : good(2) ? 2 : 1;
    static constexpr int COUNT = padded(WIDTH) / SIDE;
    static __device__ __forceinline__ int at(int t, int n) { return WIDTH * (t + SIDE * (n / WIDTH)) + n % WIDTH; }
};

// The columns of one row of N numbers that a thread owns, where each row has 16 threads.
template <int N> struct RowColumns {
    static constexpr int C = Grouped<N>::COUNT, WIDTH = Grouped<N>::WIDTH;
    static __device__ __forceinline__ int column(int c) { return Grouped<N>::at(thread_x(), c); }
};

template <int WIDTH> struct alignas(WIDTH * sizeof(real)) Vector { real x[WIDTH]; };

template <int WIDTH> __device__ __forceinline__ Vector<WIDTH> vector(const real* address)
{
    return *reinterpret_cast<const Vector<WIDTH>*>(address);
}

template <int R, int C> __device__ __forceinline__ void fill(real (&sum)[R][C], real x)
{
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int c = 0; c < C; c++)
            sum[r][c] = x;
}

// ---- between device memory and tiles ----------------------------------------------------------------------------------------

// Copies into shared memory that the hardware does on its own (sm_80 and later): float32 and float64, which need no conversion.
#if __CUDA_ARCH__ >= 800
constexpr bool ASYNCHRONOUS = sizeof(elem) == sizeof(real);
#else
constexpr bool ASYNCHRONOUS = false;
#endif
constexpr int CHUNK = ALIGNED ? VECTOR_BYTES / sizeof(elem) : 1;  // elements that one thread copies at a time

__device__ __forceinline__ void commit_copies()
{
    if constexpr (ASYNCHRONOUS)
        commit_group();
}

// Wait until at most PENDING of this thread's last committed groups are under way.
template <int PENDING> __device__ __forceinline__ void await_copies()
{
    if constexpr (ASYNCHRONOUS)
        await_groups<PENDING>();
}

// tile[r][x] = *at(r, x, exists) for x < COLUMNS; zeros for a row that does not exist. Columns past COLUMNS are left alone.
template <int ROWS, int COLUMNS, int PITCH, class At> __device__ __forceinline__ void load_rows(real* tile, const At& at)
{
    constexpr int CHUNKS = COLUMNS / CHUNK;
    static_assert(CHUNKS * CHUNK == COLUMNS, "vectors of whole rows");
    constexpr int AT_ONCE = ASYNCHRONOUS ? 4 : 1;  // what is converted on its way lies in registers
#pragma unroll AT_ONCE
    for (int n = threadIdx.x; n < ROWS * CHUNKS; n += THREADS) {
        const int r = n / CHUNKS, x = n % CHUNKS * CHUNK;
        bool exists;
        const elem* source = at(r, x, exists);
        real* target = tile + r * PITCH + x;
        if constexpr (ASYNCHRONOUS) {
            copy_to_shared<CHUNK * sizeof(elem)>(target, source, exists);
        } else {
            struct alignas(CHUNK * sizeof(elem)) Chunk { elem x[CHUNK]; } chunk;
            if (exists)
                chunk = *reinterpret_cast<const Chunk*>(source);
#pragma unroll
            for (int e = 0; e < CHUNK; e++)
                target[e] = exists ? widen<TYPE>(chunk.x[e]) : real(0);
        }
    }
}

// tile[r][x] = from[r * stride + x] for r < count; 0 for count <= r < ROWS.
template <int ROWS, int COLUMNS, int PITCH>
__device__ __forceinline__ void load_tile(real* tile, const elem* from, long long stride, long long count)
{
    load_rows<ROWS, COLUMNS, PITCH>(tile, [&](int r, int x, bool& exists) {
        exists = r < count;
        return exists ? from + r * stride + x : from;
    });
}

// Zeros in all on-chip memory of the block: what lies past the columns of a tile then never is a NaN.
__device__ __forceinline__ void clear_tiles(real* memory)
{
    for (int n = threadIdx.x; n < TILE_BYTES / (int)sizeof(real); n += THREADS)
        memory[n] = real(0);
    __syncthreads();
}

// to[x] = factor * values for the columns of Layout that a thread owns in a row of COLUMNS numbers; 0 for a row that is
// empty, whatever its values are.
template <class Layout, int COLUMNS>
__device__ __forceinline__ void store_row(elem* to, const real (&values)[Layout::C], real factor, bool empty)
{
    constexpr int WIDTH = Layout::WIDTH;
    struct alignas(ALIGNED ? WIDTH * sizeof(elem) : sizeof(elem)) Chunk { elem x[WIDTH]; };
#pragma unroll
    for (int c = 0; c < Layout::C; c += WIDTH) {
        const int x = Layout::column(c);
        Chunk chunk;
#pragma unroll
        for (int e = 0; e < WIDTH; e++)
            chunk.x[e] = narrow<TYPE>(empty ? real(0) : values[c + e] * factor);
        if (ALIGNED && COLUMNS % WIDTH == 0) {
            if (x < COLUMNS)
                *reinterpret_cast<Chunk*>(to + x) = chunk;
        } else {
#pragma unroll
            for (int e = 0; e < WIDTH; e++)
                if (x + e < COLUMNS)
                    to[x + e] = chunk.x[e];
        }
    }
}

// The columns of Layout that a thread owns in a row of COLUMNS sums; 0 past the row's end.
template <class Layout, int COLUMNS> __device__ __forceinline__ void read_sums(const real* from, real (&values)[Layout::C])
{
    constexpr int WIDTH = ALIGNED && COLUMNS % Layout::WIDTH == 0 ? Layout::WIDTH : 1;
#pragma unroll
    for (int c = 0; c < Layout::C; c += WIDTH) {
        const int x = Layout::column(c);
        const Vector<WIDTH> chunk = x < COLUMNS ? vector<WIDTH>(from + x) : Vector<WIDTH>{};
#pragma unroll
        for (int e = 0; e < WIDTH; e++)
            values[c + e] = chunk.x[e];
    }
}

// to[x] = factor * values for the same columns.
template <class Layout, int COLUMNS> __device__ __forceinline__ void write_sums(real* to, const real (&values)[Layout::C], real factor)
{
    constexpr int WIDTH = ALIGNED && COLUMNS % Layout::WIDTH == 0 ? Layout::WIDTH : 1;
#pragma unroll
    for (int c = 0; c < Layout::C; c += WIDTH) {
        const int x = Layout::column(c);
        Vector<WIDTH> chunk;
#pragma unroll
        for (int e = 0; e < WIDTH; e++)
            chunk.x[e] = values[c + e] * factor;
        if (x < COLUMNS)
            *reinterpret_cast<Vector<WIDTH>*>(to + x) = chunk;
    }
}

// The sum over the N neighbouring threads, N a power of two; the largest.
template <int N> __device__ __forceinline__ real sum_of_lanes(real x)
{
#pragma unroll
    for (int lane = N / 2; lane > 0; lane /= 2)
        x += __shfl_xor_sync(WARP, x, lane);
    return x;
}

template <int N> __device__ __forceinline__ real maximum_of_lanes(real x)
{
#pragma unroll
    for (int lane = N / 2; lane > 0; lane /= 2)
        x = larger(x, __shfl_xor_sync(WARP, x, lane));
    return x;
}
