// The matrix products on tiles, by the units that the plan chose. Each file defines, in the same names,
//
// ScoreTile, QueryTile<N>, KeyTile<N>: which numbers of a result a thread owns: R x C of them, at row(r), column(c); vectors of WIDTH;
// ROW_LANES, row_lane(): the neighbouring threads that share the rows of a ScoreTile, whole rows if ROW_IN_WARP;
// product_nt, product_nn, product_tn; ForwardTiles: the forward pass's tiles and its two products.

#if SPLIT
#include "mma/split.cuh"
#else
#include "simt.cuh"
#endif
