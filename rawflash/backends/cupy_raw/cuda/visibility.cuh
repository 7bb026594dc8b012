// Visibility on the device: what rawflash/masks.py says, for a whole thread block.
//
// The call's own band (causal, window) is two functions that kernels call: band_visible, band_tile.
// The rest is what the text of a mask uses (masks.cuda_text), which defines mask_visible and mask_tile.
//
// *_tile functions give the class of the rectangle of rows i0 <= i < i1 and keys j0 <= j < j1, never an
// empty one. They may hold barriers and exchanges between threads: all threads of the block call them
// together, with the same arguments, and get the same answer. Blocks are one-dimensional, of whole warps.
//
// Only rows and keys inside the lengths may be asked about: a mask's arrays have no others.
//
// Integers have 64 bits: bounds reach +-2^62 (masks.UNBOUNDED), offsets +-2^61, so that the difference
// of a key and a row plus its offset stays within them, and no bound is ever added to anything.

#ifndef RAWFLASH_VISIBILITY_CUH
#define RAWFLASH_VISIBILITY_CUH

constexpr int EMPTY = 0, PARTIAL = 1, FULL = 2;  // the order in which And is the least, Or the greatest

// ---- the band: lower <= j - (i + offset) <= upper -----------------------------------------------------

__device__ __forceinline__ bool band_visible(
    long long lower, long long upper, long long i, long long j, long long offset)
{
    const long long distance = j - (i + offset);
    return lower <= distance && distance <= upper;
}

__device__ __forceinline__ int band_tile(
    long long lower, long long upper, long long i0, long long i1, long long j0, long long j1, long long offset)
{
    const long long nearest = j0 - (i1 - 1 + offset);  // smallest and largest distance inside the rectangle
    const long long farthest = j1 - 1 - (i0 + offset);
    if (farthest < lower || nearest > upper) return EMPTY;
    return lower <= nearest && farthest <= upper ? FULL : PARTIAL;
}

// ---- the arrays of a mask, by address ------------------------------------------------------------------
// No kernel writes them, and __ldg says so: a load that does not change may leave the loop over scores.

__device__ __forceinline__ long long int_at(long long address, long long index)
{
    return __ldg(reinterpret_cast<const long long*>(address) + index);
}

__device__ __forceinline__ bool byte_at(long long address, long long offset)  // any byte but 0 is True
{
    return __ldg(reinterpret_cast<const unsigned char*>(address) + offset) != 0;
}

// The entry of batch b in an array of `count` integers: one for all, or one each.
__device__ __forceinline__ long long per_batch(long long address, long long count, long long b)
{
    return int_at(address, count == 1 ? 0 : b);
}

// ---- tile classes ----------------------------------------------------------------------------------------

// Class of x0 <= x < x1, where x < limit is visible.
__device__ __forceinline__ int below(long long x0, long long x1, long long limit)
{
    return x1 <= limit ? FULL : x0 < limit ? PARTIAL : EMPTY;
}

// And, Or. `right` is a function, called only where `left` does not decide; all threads decide alike.
template <class Right>
__device__ __forceinline__ int tile_and(int left, Right right)
{
    if (left == EMPTY) return EMPTY;
    const int other = right();
    return left < other ? left : other;
}

template <class Right>
__device__ __forceinline__ int tile_or(int left, Right right)
{
    if (left == FULL) return FULL;
    const int other = right();
    return left > other ? left : other;
}

// Class of a rectangle by looking at it, exact. Its elements, row after row, are dealt to the threads in
// turn. A thread goes on by blockDim.x elements in steps of rows and of keys: a division per element would
// cost more than the look.
template <class Visible>
__device__ __forceinline__ int scan(long long i0, long long i1, long long j0, long long j1, Visible visible)
{
    const long long width = j1 - j0;
    const long long down = blockDim.x / width, across = blockDim.x % width;
    long long i = i0 + threadIdx.x / width, j = j0 + threadIdx.x % width;
    bool seen = false, hidden = false;
    constexpr int abreast = 4;  // looks that do not wait for one another
    while (i < i1 && !(seen && hidden)) {
        for (int n = 0; n < abreast; n++) {
            const bool inside = i < i1, shown = inside && visible(i, j);
            seen |= shown;
            hidden |= inside && !shown;
            i += down;
            j += across;
            if (j >= j1) {
                j -= width;
                ++i;
            }
        }
    }
    if (!__syncthreads_or(seen)) return EMPTY;
    return __syncthreads_or(hidden) ? PARTIAL : FULL;
}

struct Range {
    long long low, high;
};

// Smallest and largest of the `count` > 0 integers from `start`. Each warp finds them for itself, which
// needs no barrier and no shared memory; the lanes share the integers, then exchange what they found.
__device__ __forceinline__ Range range_of(long long address, long long start, long long count)
{
    constexpr int lanes = 32;
    const int lane = threadIdx.x % lanes;
    Range range;
    range.low = range.high = int_at(address, start + (lane < count ? lane : 0));
    for (long long n = lane + lanes; n < count; n += lanes) {
        const long long value = int_at(address, start + n);
        if (value < range.low) range.low = value;
        if (value > range.high) range.high = value;
    }
    for (int step = lanes / 2; step > 0; step /= 2) {  // afterwards all lanes hold the same
        const long long low = __shfl_xor_sync(0xffffffffu, range.low, step);
        const long long high = __shfl_xor_sync(0xffffffffu, range.high, step);
        if (low < range.low) range.low = low;
        if (high > range.high) range.high = high;
    }
    return range;
}

// Class of rows and keys that see each other where their ids are equal.
__device__ __forceinline__ int equal_ids(Range rows, Range keys)
{
    if (rows.low > keys.high || keys.low > rows.high) return EMPTY;
    return rows.low == rows.high && keys.low == keys.high ? FULL : PARTIAL;  // not apart: one id is the other
}

#endif
