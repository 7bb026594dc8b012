// The matrix products on tiles, by the units that the plan chose. Each file defines, in the same names,
//
// ScoreTile, QueryTile<N>, KeyTile<N>: which numbers of a result a thread owns: R x C of them, at row(r), column(c); vectors of WIDTH;
// ROW_LANES, row_lane(): the neighbouring threads that share the rows of a ScoreTile, whole rows if ROW_IN_WARP;
// product_nt, product_nn, product_tn.

#if PIECES
#include "mma/pieces.cuh"
#else
#include "simt.cuh"
#endif

#if SPLIT
#include "mma/split_tiles.cuh"
#else

// The tiles of the forward passes: the products read K_j and V_j where they land.
struct ForwardTiles {  // K/V inside
    real *Q, *K, *V, *P;  // P: none if P_STAYS

    __device__ __forceinline__ ForwardTiles(real* memory) : Q(memory), K(Q + BR * PITCH_D), V(K + BC * PITCH_D), P(V + BC * PITCH_V) {}

    __device__ __forceinline__ void keys_landed() {}
    __device__ __forceinline__ void values_landed() {}
    __device__ __forceinline__ void before_P() {}
    template <int R, int C> __device__ __forceinline__ void add_scores(real (&S)[R][C]) { product_nt<DEPTH_D>(S, Q, PITCH_D, K, PITCH_D); }
    template <int R, int C> __device__ __forceinline__ void add_output(real (&O)[R][C]) { product_nn<BC, DV>(O, P, PITCH_S, V, PITCH_V); }
};

struct ResidentTiles : ForwardTiles {  // K/V outside
    using ForwardTiles::ForwardTiles;
    __device__ __forceinline__ void landed() {}
};

#endif
