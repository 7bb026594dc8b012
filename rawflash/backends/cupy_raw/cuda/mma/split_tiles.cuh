// The tiles of the forward passes, for products of split.cuh. Every warp reads all of K_j and V_j, so that splitting them once,
// when they have landed, is a fraction of the work.

// B as a tile that was split once: pairs of neighbours along the depth, PITCH of them from row to row, PART from part to part. The depths
// in the order of AlongRows.
template <bool DOWN_COLUMNS, int PITCH, int PART> struct SplitB {
    const unsigned* mine;  // the lane's first pair
    __device__ __forceinline__ SplitB(const unsigned* tile, int first_column)
        : mine(tile + (DOWN_COLUMNS ? lane_t() * PITCH + first_column + lane_g() : (first_column + lane_g()) * PITCH + lane_t()))
    {
    }
    __device__ __forceinline__ FactorB operator()(int column, int k) const
    {
        const unsigned* const at = mine + (DOWN_COLUMNS ? k / 2 * PITCH : k / 2);
        FactorB parts;
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int n = 0; n < 2; n++)
                parts.part[p][n] = at[p * PART + (DOWN_COLUMNS ? 4 * n * PITCH + column : column * PITCH + 4 * n)];
        return parts;
    }
};

// K_j and V_j as parts, and the products with them.
struct SplitBlock {
    static constexpr int PART_K = BC * PITCH_D / 2, PART_V = BC / 2 * PITCH_V;  // pairs of one part
    float *Q, *K, *V, *P;  // K, V: where they land
    unsigned *parts_K, *parts_V;

    __device__ __forceinline__ void split_keys()
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
    }

    __device__ __forceinline__ void split_values()
    {
        for (int n = threadIdx.x; n < BC / 2 * DV; n += THREADS) {
            const int row = n / DV, x = n % DV;
            store_parts(parts_V + row * PITCH_V + x, PART_V, V[2 * row * PITCH_V + x], V[(2 * row + 1) * PITCH_V + x]);
        }
    }

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

// K/V inside: K_j and V_j land at one place, one after the other, and are split at each step. P takes the place of K's parts.
struct ForwardTiles : SplitBlock {
    static constexpr int K_OR_P = most_of(PARTS * PART_K, BR * PITCH_S);

    __device__ __forceinline__ ForwardTiles(float* memory)
    {
        Q = memory;
        P = Q + BR * PITCH_D;
        parts_K = (unsigned*)P;
        parts_V = parts_K + K_OR_P;
        K = V = (float*)(parts_V + PARTS * PART_V);
    }

    __device__ __forceinline__ void keys_landed()
    {
        split_keys();
        __syncthreads();  // K_j is split, and where it landed is free
    }

    __device__ __forceinline__ void values_landed()
    {
        split_values();
        __syncthreads();  // V_j is split, and where it landed is free
    }

    __device__ __forceinline__ void before_P() { __syncthreads(); }  // no thread reads K's parts any more
};

// K/V outside: they are split once for all rows of Q, and land where Q and P come later.
struct ResidentTiles : SplitBlock {
    static constexpr int P_OR_V = most_of(BR * PITCH_S, BC * PITCH_V);

    __device__ __forceinline__ ResidentTiles(float* memory)
    {
        Q = K = memory;
        P = V = Q + BR * PITCH_D;
        parts_K = (unsigned*)(P + P_OR_V);
        parts_V = parts_K + PARTS * PART_K;
    }

    __device__ __forceinline__ void landed()
    {
        split_keys();
        split_values();
        __syncthreads();  // K_j and V_j are split, and where they landed is free
    }
};
