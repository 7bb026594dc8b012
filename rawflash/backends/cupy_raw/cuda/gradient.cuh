// One tile of the backward pass: where its factors lie, P again from S and lse, and dS.

// The tiles of all backward kernels, in on-chip memory.
struct BackwardTiles {
    real *Q, *K, *V, *dO, *P, *dS;

    __device__ __forceinline__ BackwardTiles(real* memory)
        : Q(memory), K(Q + BR * PITCH_D), V(K + BC * PITCH_D), dO(V + BC * PITCH_V), P(dO + BR * PITCH_V), dS(P + BR * PITCH_S)
    {
    }

    // S = Q K^T, dP = dO V^T
    template <int R, int C> __device__ __forceinline__ void products(real (&S)[R][C], real (&dP)[R][C])
    {
        fill(S, real(0));
        fill(dP, real(0));
        product_nt<DEPTH_D>(S, Q, PITCH_D, K, PITCH_D);
        product_nt<DEPTH_V>(dP, dO, PITCH_V, V, PITCH_V);
    }
};

// lse of a row, and delta = rowsum(dO * O) - dlse.
__device__ __forceinline__ real row_lse(const Call& call, const Head& at, long long i)
{
    return *row_of(call.lse, at.s.slot, at.h, at.s.q_start + i);
}

__device__ __forceinline__ real row_delta(const Call& call, const Head& at, long long i)
{
    return *row_of(call.delta, at.s.slot, at.h, at.s.q_start + i);
}

// Both for the rows that the thread owns.
template <int R>
__device__ __forceinline__ void load_lse(const Call& call, const Head& at, long long i0, real (&lse)[R])
{
#pragma unroll
    for (int r = 0; r < R; r++) {
        const long long i = i0 + ScoreTile::row(r);
        lse[r] = i < at.s.q_length ? row_lse(call, at, i) : real(0);
    }
}

template <int R>
__device__ __forceinline__ void load_delta(const Call& call, const Head& at, long long i0, real (&delta)[R])
{
#pragma unroll
    for (int r = 0; r < R; r++) {
        const long long i = i0 + ScoreTile::row(r);
        delta[r] = i < at.s.q_length ? row_delta(call, at, i) : real(0);
    }
}

// P = exp(S - lse), dropped out as in the forward pass, which is what dV needs; dS = P (dP - delta), times softcap's slope if SLOPED:
// what dQ and dK need. Both into on-chip memory. A hidden key has P = dS = 0 by selection: its dP may have overflown.
template <bool SLOPED>
__device__ __forceinline__ void score_gradient(
    const Call& call, const Head& at, real x, real slope, real dP, real lse, real delta, real keep, real& P, real& dS)
{
    const real above = x - lse;
    P = exponential(above > real(0) ? real(0) : above);  // P <= 1, whatever was rounded; NaN stays NaN
    const real gradient = keep == real(0) ? real(0) : dP * keep;
    dS = P * (gradient - delta);
    if constexpr (SLOPED)
        dS *= slope;
    P *= keep;
}

// The same from a product q.k and where it stands, for any option; `lse` and `delta` give those of row i and `is_kept` what dropout does, if
// they are needed.
template <bool SLOPED, class Lse, class Delta, class Kept>
__device__ __forceinline__ void visible_gradient(
    const Call& call, const Head& at, int kind, real product, real dP, const Lse& lse, const Delta& delta, const Kept& is_kept, long long i,
    long long j, real& P, real& dS)
{
    P = dS = real(0);
    if (kind == FULL || visible(call, at, i, j)) {
        real slope;
        const real x = score(call, at, product, i, j, slope);
        if (!BIAS || x != -INFINITE) {  // a bias of -inf hides too, also from a row whose lse is -inf
            real keep = real(1);
            if constexpr (DROPOUT)
                keep = is_kept() ? real(call.keep_scale) : real(0);
            score_gradient<SLOPED>(call, at, x, slope, dP, lse(), delta(), keep, P, dS);
        }
    }
}

template <bool SLOPED, int R, int C>
__device__ __forceinline__ void put_score_gradients(
    const Call& call, const Head& at, const real (&S)[R][C], const real (&dP)[R][C], const real (&lse)[R], const real (&delta)[R],
    real* tile_P, real* tile_dS, long long i0, long long j0, int kind)
{
    if (PLAIN && !DROPOUT && (IN_REGISTERS || kind == FULL)) {
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int y = ScoreTile::row(r);
            Span seen = {0, BC};
            if (kind != FULL)
                seen = keys_of_row(call, at, i0 + y, j0);
#pragma unroll
            for (int c = 0; c < C; c++) {
                const int x = ScoreTile::column(c);
                real P, dS;
                score_gradient<false>(call, at, S[r][c] * at.scale, real(1), dP[r][c], lse[r], delta[r], real(1), P, dS);
                const bool hidden = x < seen.first || x >= seen.end;
                tile_P[y * PITCH_S + x] = hidden ? real(0) : P;
                tile_dS[y * PITCH_S + x] = hidden ? real(0) : dS;
            }
        }
        return;
    }
    put_tile(tile_P, S);
    put_tile(tile_dS, dP);
    for_each_score(i0, j0, [&](int n, long long i, long long j) {
        real P, dS;
        visible_gradient<SLOPED>(
            call, at, kind, tile_P[n], tile_dS[n], [&] { return row_lse(call, at, i); }, [&] { return row_delta(call, at, i); },
            [&] { return kept(call, at.s.b, at.h, i, j); }, i, j, P, dS);
        tile_P[n] = P;
        tile_dS[n] = dS;
    });
}

struct Step {  // a block of rows of one of the query heads that share a key head
    long long h, i0;
    int kind;
};

// The first step from row i0 of head h on: the rows of one head, then the next head of the group.
__device__ __forceinline__ Step next_step(
    const Call& call, const Sequence& s, long long h, long long h_end, long long i0, long long i_low, long long i_high, long long j0)
{
    for (; h < h_end; h++, i0 = i_low) {
        const Block block = next_rows(call, head(call, s, h), i0, i_high, j0);
        if (block.kind != EMPTY)
            return {h, block.start, block.kind};
    }
    return {h_end, i_high, EMPTY};
}

// Write the gradient of keys or values. Rows of padding are 0.
template <int COLUMNS, int R, int C>
__device__ __forceinline__ void store_keys(
    const Call& call, const Matrix& matrix, const Sequence& s, long long h_kv, long long j0, const real (&sum)[R][C], real factor)
{
    const long long keys_end = PACKED ? s.kv_length : call.Tk;
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int y = KeyTile<COLUMNS>::row(r);
        const long long j = j0 + y;
        if (y < BC && j < keys_end)
            store_row<KeyTile<COLUMNS>, COLUMNS>(row_of(matrix, s.slot, h_kv, s.k_start + j), sum[r], factor, j >= s.kv_length);
    }
}
