// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the twin of
// rawflash/philox.py, bit for bit.

__device__ __forceinline__ uint4 philox(unsigned c0, unsigned c1, unsigned c2, unsigned c3, unsigned long long seed)
{
    unsigned key_0 = (unsigned)seed, key_1 = (unsigned)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const unsigned low_0 = 0xD2511F53u * c0, high_0 = __umulhi(0xD2511F53u, c0);
        const unsigned low_1 = 0xCD9E8D57u * c2, high_1 = __umulhi(0xCD9E8D57u, c2);
        c0 = high_1 ^ c1 ^ key_0;
        c1 = low_1;
        c2 = high_0 ^ c3 ^ key_1;
        c3 = low_0;
        key_0 += 0x9E3779B9u;
        key_1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}

// Does dropout keep the probability at (b, h, i, j)? Four neighbouring keys share one counter.
__device__ __forceinline__ bool kept(const Call& call, long long b, long long h, long long i, long long j)
{
    const uint4 words = philox((unsigned)(j / 4), (unsigned)i, (unsigned)h, (unsigned)b, (unsigned long long)call.seed);
    const unsigned word = j % 4 == 0 ? words.x : j % 4 == 1 ? words.y : j % 4 == 2 ? words.z : words.w;
    return word >= (unsigned)call.keep_threshold;
}
