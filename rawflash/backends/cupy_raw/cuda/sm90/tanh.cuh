// The hyperbolic tangent beside products of warpgroups, for softcap.

// tanh(x) = x + TANH_3 x^3 + ... + TANH_9 x^9 up to TANH_NEAR, to 2e-7 of it
constexpr float TANH_NEAR = 0.6f, TANH_3 = -0.333326221f, TANH_5 = 0.133135423f, TANH_7 = -0.0522322804f, TANH_9 = 0.0156423785f;

// Without a branch: near 0 by a polynomial, else by the exponential function.
__device__ __forceinline__ float branchless_tanh(float y)
{
    const float size = fabsf(y), square = y * y;
    const float far = 1.0f - 2.0f * reciprocal_approximately(1.0f + exp2_approximately(2.0f * LOG2E * size));
    float near = fmaf(square, TANH_9, TANH_7);
    near = fmaf(square, near, TANH_5);
    near = fmaf(square, near, TANH_3);
    near = fmaf(size * square, near, size);
    return copysignf(size < TANH_NEAR ? near : far, y);
}
