// The end of a fa2 forward pass whose keys were shared out (parts.cuh), for blocks of 16 x 16 threads.

// O, m and l of all parts -> O = O / l, lse. The grid is that of fa2_forward with one part.
extern "C" __global__ void __launch_bounds__(THREADS) fa2_forward_merge(const __grid_constant__ Call call)
{
    typedef RowColumns<DV> Row;
    const long long i0 = blockIdx.x % call.blocks * BR, bh = blockIdx.x / call.blocks;
    const Sequence s = sequence(call, bh / call.Hq);
    const Head at = head(call, s, bh % call.Hq);
    const long long rows_end = least(PACKED ? s.q_length : call.Tq, i0 + BR);
    long long j_low, j_high;
    key_range(call, s, i0, j_low, j_high);
    const int parts = parts_of(call, j_low, j_high);
    if (parts == 1)
        return;
    for (long long i = i0 + thread_y(); i < rows_end; i += SIDE) {
        real m = -INFINITE, l = 0, factor = 0, lse = -INFINITE, O[Row::C] = {};
        if (i < s.q_length) {
            for (int part = 0; part < parts; part++)
                m = larger(m, *of_part(call, call.m, at, part, i));
            const real shift = m == -INFINITE ? real(0) : m;
            for (int part = 0; part < parts; part++) {
                const real weight = exponential(*of_part(call, call.m, at, part, i) - shift);
                real more[Row::C];
                read_sums<Row, DV>(sums_of_part(call, at, part, i), more);
                l += weight * *of_part(call, call.l, at, part, i);
#pragma unroll
                for (int c = 0; c < Row::C; c++)
                    O[c] += weight * more[c];
            }
            factor = finish_row(call, at, m, l, lse);
        }
        store_row<Row, DV>(row_of(call.o, s.slot, at.h, s.q_start + i), O, factor, i >= s.q_length || l == real(0));
        if (thread_x() == 0)
            store_lse(call, s.slot, at.h, s.q_start + i, lse);
    }
}
