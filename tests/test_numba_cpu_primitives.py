"""On-chip primitives of the numba_cpu backend: products, exp, tiles in and out of memory, Philox."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest

numba = pytest.importorskip("numba")
ml_dtypes = pytest.importorskip("ml_dtypes")

from rawflash.backends.numba_cpu import microkernel, numerics, panel, tile

COMPUTE = [np.float32, np.float64]
STORAGE = {
    numerics.FLOAT32: np.float32,
    numerics.FLOAT64: np.float64,
    numerics.FLOAT16: np.float16,
    numerics.BFLOAT16: ml_dtypes.bfloat16,
}


# Helpers of kernels have no Python entry point of their own: these are kernels of one statement.


@numba.njit
def gemm(A, a, a_row, a_col, B, b, C, c, m, k, accumulate):
    microkernel.gemm(A, a, a_row, a_col, B, b, C, c, m, k, accumulate)


@numba.njit
def gemm_scores(A, a, a_row, B, b, C, c, m, k):
    microkernel.gemm_scores(A, a, a_row, B, b, C, c, m, k)


@numba.njit
def aligned(n, zero):
    return tile.aligned(n, zero)


@numba.njit
def softmax_of(S, rows, m, l, alpha, scale):
    factor, lowest = panel.exponents(scale, S)
    return panel.softmax_panel(S, 0, rows, m, l, alpha, 1, factor, lowest)


@numba.njit
def exp_of(x, y):
    for i in range(x.size):
        y[i] = numerics.exp(x[i])


@numba.njit
def load_tile(dst, off, dst_row, dst_col, address, code, src_row, rows, cols, factor):
    numerics.load_tile(dst, off, dst_row, dst_col, address, code, src_row, rows, cols, factor)


@numba.njit
def store_tile(address, code, dst_row, src, off, src_row, src_col, rows, cols):
    numerics.store_tile(address, code, dst_row, src, off, src_row, src_col, rows, cols)


@numba.njit
def scalars(bytes_at, i64_at, element_at, code, target_at, value):
    numerics.store_scalar(target_at, code, value)
    return (numerics.load_u8(bytes_at), numerics.load_i64(i64_at), numerics.load_scalar(element_at, code))


@numba.njit
def philox(seed_lo, seed_hi, first, c1, c2, c3, out):
    for i in range(out.shape[0]):
        words = numerics.philox4(seed_lo, seed_hi, first + i, c1, c2, c3)
        for j in range(4):
            out[i, j] = words[j]


@numba.njit(nogil=True)
def claim_until(counter, i, end, taken):
    count = 0
    while True:
        item = microkernel.claim(counter, i)
        if item >= end:
            return count
        taken[item] += 1
        count += 1


def same_bits(got, expected):
    """Equal element by element, signs of zero included, any NaN matching any NaN."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype
    word = f"u{got.dtype.itemsize}"
    nan = np.isnan(expected.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float64)), nan)
    np.testing.assert_array_equal(got.view(word)[~nan], expected.view(word)[~nan])


# ------------------------------------------------------------------------------------------------------------
# Products


@pytest.mark.parametrize(
    ("features", "shape"),
    [
        ("+avx2,+avx512f,+fma", (8, {4: 32, 8: 16})),
        ("+avx,+avx2,-avx512f", (6, {4: 16, 8: 8})),
        ("+sse2,-avx2", (4, {4: 8, 8: 4})),
        ("", (4, {4: 8, 8: 4})),
    ],
)
def test_register_tile_of_a_processor(features, shape):
    tile = microkernel.register_tile(features)
    assert (tile.rows, {np.dtype(t).itemsize: tile.columns(t) for t in COMPUTE}) == shape


SIZES = [(1, 1), (2, 16), (5, 3), (6, 2), (7, 31), (8, 32), (9, 33), (13, 17), (16, 48), (64, 0), (0, 4), (24, 64),
         (25, 100)]  # fmt: skip


@pytest.mark.parametrize("product", ["scores", "sum", "accumulated sum"])
@pytest.mark.parametrize("layout", ["rows", "transposed", "spread"])
@pytest.mark.parametrize(("m", "k"), SIZES)
@pytest.mark.parametrize("dtype", COMPUTE)
def test_products_of_panels(dtype, m, k, layout, product):
    rng = np.random.default_rng([m, k])
    M, N = microkernel.padded(m, microkernel.MR), microkernel.NR[np.dtype(dtype)]
    a, b, c = 3, 5, 7  # unaligned starts
    a_row, a_col = {"rows": (k + 1, 1), "transposed": (1, M + 2), "spread": (3 * k + 2, 3)}[layout]
    if product == "scores" and a_col != 1:
        pytest.skip("rows of scores are contiguous")

    # Each buffer ends with the last element that the documented padding reaches.
    A = np.full(a + max(M - 1, 0) * a_row + max(k - 1, 0) * a_col + 1, np.nan, dtype)
    B = np.full(b + k * N, np.nan, dtype)
    C = np.full(c + M * N + 4, np.nan, dtype)
    r, x, t = np.arange(m), np.arange(N), np.arange(k)
    A_at, B_at, C_at = a + r[:, None] * a_row + t * a_col, b + t[:, None] * N + x, c + r[:, None] * N + x
    A[A_at], B[B_at] = rng.standard_normal((m, k)), rng.standard_normal((k, N))
    accumulate = product == "accumulated sum"
    if accumulate:
        C[C_at] = rng.standard_normal((m, N))
    before = C.copy()

    if product == "scores":
        gemm_scores(A, a, a_row, B, b, C, c, m, k)
    else:
        gemm(A, a, a_row, a_col, B, b, C, c, m, k, accumulate)

    expected = A[A_at].astype(np.float64) @ B[B_at].astype(np.float64)
    if accumulate:
        expected += before[C_at]
    np.testing.assert_allclose(C[C_at], expected, rtol=0, atol=4 * (k + 1) * np.finfo(dtype).eps)
    touched = np.zeros(C.size, bool)
    touched[c : c + M * N] = True
    np.testing.assert_array_equal(C[~touched], before[~touched])


def test_sums_of_scores_are_short():
    """Equal products round the same way at every step: the longer the sum, the more."""
    k, rng = 64, np.random.default_rng(0)
    errors = []
    for _ in range(50):
        x = rng.uniform(0.5, 1, microkernel.NR[np.dtype(np.float32)]).astype(np.float32)
        A, B = np.full(k * microkernel.MR, x[0]), np.tile(x, k)
        C = np.zeros((2, microkernel.MR * x.size), np.float32)
        gemm_scores(A, 0, k, B, 0, C[0], 0, 1, k)
        gemm(A, 0, k, 1, B, 0, C[1], 0, 1, k, False)
        errors.append(np.abs(C[:, : x.size] - k * np.float64(x[0]) * x).mean(1))
    of_scores, of_sums = np.mean(errors, axis=0)
    assert of_scores < 0.5 * of_sums


def test_aligned_memory_begins_at_a_cache_line():
    for n in (1, 15, 1000):
        for dtype in COMPUTE:
            memory = aligned(n, dtype(1))
            assert memory.shape == (n,) and memory.dtype == dtype and memory.ctypes.data % 64 == 0 and not memory.any()


# ------------------------------------------------------------------------------------------------------------
# Softmax of a panel


def softmax_by_numpy(S, m, l, scale):
    """What softmax_panel is to do, in float64."""
    S, m, l = (np.asarray(x, np.float64) for x in (S, m, l))
    top = np.fmax(m, np.fmax.reduce(S, axis=0, initial=-np.inf))
    shift = np.where(np.isneginf(top), 0, top)
    alpha = np.where(m == top, 1, np.exp(scale * (m - shift)))
    P = np.exp(scale * (S - shift))
    return P, top, alpha * l + P.sum(0), alpha


def statistics(dtype):
    """m, l and alpha of a panel whose lanes begin at 1, the first place being another's."""
    n = 1 + microkernel.NR[np.dtype(dtype)]
    return np.full(n, -np.inf, dtype), np.zeros(n, dtype), np.full(n, 7, dtype)


@pytest.mark.parametrize("dtype", COMPUTE)
@pytest.mark.parametrize("scale", [1.0, 0.125, 3.0])
@pytest.mark.parametrize("rows", [1, 2, 17])
def test_softmax_of_a_panel(rows, scale, dtype):
    S = (np.random.default_rng(rows).standard_normal((rows + 1, microkernel.NR[np.dtype(dtype)])) * 8).astype(dtype)
    m, l, alpha = statistics(dtype)
    S[:, 0] = -np.inf  # a lane that never saw a key
    S[:, 1], m[2], l[2] = -np.inf, 2, 3  # one that sees none of these
    S[1:, 2] = -np.inf
    m[4], l[4] = -50, 1  # one whose maximum rises: on 8 bytes there are just four lanes
    want = softmax_by_numpy(S[:rows], m[1:], l[1:], scale)
    P = S.reshape(-1).copy()
    assert softmax_of(P, rows, m, l, alpha, scale)
    for got, expected in zip((P.reshape(S.shape)[:rows], m[1:], l[1:], alpha[1:]), want, strict=True):
        # S - m rounds, and the rounding error is multiplied by the scale
        np.testing.assert_allclose(got, expected, rtol=(1 + 80 * scale) * np.finfo(dtype).eps, atol=1e-37)
    assert m[0] == -np.inf and l[0] == 0 and alpha[0] == 7 and np.array_equal(P.reshape(S.shape)[rows:], S[rows:])
    assert l[1] == 0 and not P.reshape(S.shape)[:rows, 0].any()


def test_softmax_tells_whether_a_maximum_rose():
    m, l, alpha = statistics(np.float32)
    S = np.zeros(m.size - 1, np.float32)
    assert softmax_of(S.copy(), 1, m, l, alpha, 1.0)
    assert not softmax_of(S.copy(), 1, m, l, alpha, 1.0) and (alpha[1:] == 1).all() and (l[1:] == 2).all()
    S[-1] = 1e-3
    assert softmax_of(S, 1, m, l, alpha, 1.0)


@pytest.mark.parametrize("dtype", COMPUTE)
def test_softmax_of_a_panel_keeps_what_is_no_number(dtype):
    m, l, alpha = statistics(dtype)
    S = np.zeros((3, m.size - 1), dtype)
    S[1, 0], S[2, 1] = np.nan, np.inf
    softmax_of(S.reshape(-1), 3, m, l, alpha, 1.0)
    assert np.isnan(l[1]) and np.isnan(l[2]) and (l[3:] == 3).all() and np.isnan(S[1, 0])


@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 2.2e-7), (np.float64, 4e-16)])
def test_powers_of_two(dtype, bound):
    """P = 2^(S - m), over all that is no 0, and exactly 1 and 0 at the ends."""
    width, low = microkernel.NR[np.dtype(dtype)], {4: -126, 8: -1022}[np.dtype(dtype).itemsize]
    rows = 4096
    S = np.linspace(low, 0, rows * width).astype(dtype)
    m, l, alpha = statistics(dtype)
    m[:] = 0
    P = S.copy()
    softmax_of(P, rows, m, l, alpha, math.log(2))
    assert np.abs(P / np.exp2(S.astype(np.longdouble)) - 1).max() < bound
    assert P[-1] == 1
    P = np.full(width, 2 * low, dtype)
    softmax_of(P, 1, m, l, alpha, 1.0)
    assert not P.any()


def test_claim_gives_each_item_once():
    items, threads = 200_000, 4
    counter = np.array([-1, 0, -1], np.int64)
    taken = np.zeros(items, np.int64)
    claim_until(np.zeros(1, np.int64), 0, 0, taken)  # compiled before the race
    counts = [0] * threads
    start = threading.Barrier(threads)

    def work(i):
        start.wait()
        counts[i] = claim_until(counter, 1, items, taken)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert (taken == 1).all()
    assert sum(counts) == items
    assert counter.tolist() == [-1, items + threads, -1]  # each thread claims once in vain


# ------------------------------------------------------------------------------------------------------------
# exp


@pytest.mark.parametrize(
    ("dtype", "low", "high", "bound"), [(np.float32, -87, 88, 1.5e-7), (np.float64, -708, 709, 3e-16)]
)
def test_exp_accuracy(dtype, low, high, bound):
    x = np.concatenate(
        [np.linspace(low, high, 400_001), np.linspace(-1, 1, 100_001), np.geomspace(-1e-30, -1, 999)]
    )
    x = x.astype(dtype)
    y = np.empty_like(x)
    exp_of(x, y)
    exact = np.exp(x.astype(np.longdouble))
    assert np.max(np.abs(y - exact) / exact) < bound


@pytest.mark.parametrize(("dtype", "overflow"), [(np.float32, 88.7228), (np.float64, 709.7827)])
def test_exp_at_the_ends(dtype, overflow):
    x = np.array([-np.inf, -1e30, -2000, 0.0, -0.0, 2000, 1e30, np.inf, np.nan, overflow], dtype)
    y = np.empty_like(x)
    exp_of(x, y)
    np.testing.assert_array_equal(y[:-1], np.array([0, 0, 0, 1, 1, np.inf, np.inf, np.inf, np.nan], dtype))
    np.testing.assert_allclose(y[-1], np.exp(x[-1]), rtol=1e-5)
    falling = -np.linspace(80, 800, 20_001).astype(dtype)  # through the subnormal numbers down to zero
    y = np.empty_like(falling)
    exp_of(falling, y)
    assert (y >= 0).all() and (np.diff(y) <= 0).all() and y[-1] == 0


def test_exp_of_float64_keeps_subnormal_numbers():
    """Their own rounding beside that of larger ones."""
    x = -np.linspace(700, 750, 100_001)
    y = np.empty_like(x)
    exp_of(x, y)
    exact = np.exp(x)
    assert (exact[y == 0] < 2.0**-1074).all() and (0 < exact).sum() > 90_000
    np.testing.assert_allclose(y, exact, rtol=4e-16, atol=2.0**-1074)


@pytest.mark.parametrize("dtype", COMPUTE)
def test_exp_is_vectorised(dtype):
    y = np.empty(8, dtype)
    exp_of(np.zeros(8, dtype), y)
    array = numba.typeof(y)
    lanes = "<2 x", "<4 x", "<8 x", "<16 x"
    ir = exp_of.inspect_llvm((array, array))
    assert any(f"@llvm.fmuladd.v{width[1:-2]}f{8 * y.itemsize}" in ir for width in lanes)


# ------------------------------------------------------------------------------------------------------------
# Tiles


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("code", [numerics.FLOAT16, numerics.BFLOAT16])
def test_load_of_every_half(code, compute):
    source = np.arange(65536, dtype=np.uint16).view(STORAGE[code])
    got = np.empty(65536, compute)
    load_tile(got, 0, 256, 1, source.ctypes.data, code, 256, 256, 256, compute(1))
    with np.errstate(invalid="ignore"):  # signalling NaN among the patterns
        same_bits(got, source.astype(np.float32).astype(compute))


@pytest.mark.parametrize("code", [numerics.FLOAT16, numerics.BFLOAT16])
def test_store_rounds_to_nearest_even(code):
    storage = STORAGE[code]
    rng = np.random.default_rng(0)
    every = np.arange(65536, dtype=np.uint16).view(storage).astype(np.float32)
    patterns = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    near = (rng.standard_normal(100_000) * 2.0 ** rng.integers(-30, 18, 100_000)).astype(np.float32)
    finite = np.sort(every[np.isfinite(every)])
    ties = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    around = [np.nextafter(ties, np.float32(s)) for s in (-np.inf, np.inf)]
    special = np.array(
        [0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 65536, 3.4e38, 2**-24, 2**-25, 1e-45]
    )
    values = np.concatenate([every, patterns, near, ties, *around, special.astype(np.float32)])
    got = np.empty(values.size, storage)
    store_tile(got.ctypes.data, code, 0, values, 0, 0, 1, 1, values.size)
    with np.errstate(over="ignore", invalid="ignore"):
        same_bits(got, values.astype(storage))


SIZES = [(0, 3), (3, 0), (1, 1), (7, 5), (8, 8), (24, 31), (27, 33), (9, 130)]


def strides_for(layout, rows, cols):
    return {"copy": (cols + 3, 1), "transposed": (1, rows + 2), "spread": (2, 2 * rows + 5)}[layout]


@pytest.mark.parametrize("layout", ["copy", "transposed", "spread"])
@pytest.mark.parametrize("code", STORAGE)
@pytest.mark.parametrize("compute", COMPUTE)
def test_tiles_with_strides(compute, code, layout):
    rng = np.random.default_rng(code)
    for rows, cols in SIZES:
        row, col = strides_for(layout, rows, cols)
        at = 6 + np.arange(rows)[:, None] * row + np.arange(cols) * col
        size = at.max(initial=0) + 9
        memory = rng.standard_normal((rows + 2, cols + 5)).astype(STORAGE[code])
        inner = memory[1:, 2:]

        tile = np.full(size, 99, compute)
        args = inner.ctypes.data, code, memory.shape[1], rows, cols, compute(0.7)
        load_tile(tile, 6, row, col, *args)
        expected = np.full(size, 99, compute)
        number = inner[:rows, :cols].astype(np.float64 if code == numerics.FLOAT64 else compute)
        expected[at] = compute(0.7) * number
        np.testing.assert_array_equal(tile, expected)

        source = rng.standard_normal(size).astype(compute)
        expected = memory.copy()
        narrow = source[at] if code == numerics.FLOAT64 else source[at].astype(np.float32)
        expected[1:, 2:][:rows, :cols] = narrow.astype(STORAGE[code])
        store_tile(inner.ctypes.data, code, memory.shape[1], source, 6, row, col, rows, cols)
        same_bits(memory, expected)


def test_load_with_rows_in_reverse():
    source = np.arange(60, dtype=np.float32).reshape(10, 6)
    tile = np.zeros(60, np.float32)
    load_tile(tile, 0, 1, 10, source[-1:].ctypes.data, numerics.FLOAT32, -6, 10, 6, np.float32(1))
    np.testing.assert_array_equal(tile.reshape(6, 10), source[::-1].T)


@pytest.mark.parametrize("code", STORAGE)
def test_scalars(code):
    raw, whole = np.array([0, 200], np.uint8), np.array([-(2**40)], np.int64)
    source, target = np.array([1.25], STORAGE[code]), np.zeros(3, STORAGE[code])
    addresses = raw[1:].ctypes.data, whole.ctypes.data, source.ctypes.data
    assert scalars(*addresses, code, target[1:].ctypes.data, -2.5) == (200, -(2**40), 1.25)
    assert target.tolist() == [0, -2.5, 0]


# ------------------------------------------------------------------------------------------------------------
# Philox


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(key, counter, words):
    """The published vectors of Random123, alone and as the first of a vectorised run of counters."""
    expected = [int(word, 16) for word in words.split()]
    one, many = np.empty((1, 4), np.uint32), np.empty((37, 4), np.uint32)
    philox(*key, *counter, one)
    philox(*key, *counter, many)
    assert one[0].tolist() == expected
    assert many[0].tolist() == expected
    philox(*key, (counter[0] + 36) % 2**32, *counter[1:], one)
    assert many[36].tolist() == one[0].tolist()
