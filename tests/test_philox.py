"""The dropout generator: published vectors, a pure-Python twin, and what a mask must be."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rawflash as rf
from rawflash import philox

try:
    import torch
except ImportError:  # optional: what these tests say of PyTorch is then not checked
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")

# kat_vectors of Random123, the reference implementation by the authors of Philox: philox4x32, 10 rounds.
KNOWN = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_twin(key, counter):
    """Philox4x32-10 for one counter in Python's integers, from the paper (SC 2011, section 3)."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def kept_twin(p, seed, b, h, i, j):
    """The contract's sentence, for one element."""
    word = philox_twin((seed % 2**32, seed // 2**32), (j // 4, i, h, b))[j % 4]
    return word >= math.floor(p * 2**32)


def mask_twin(p, seed, shape):
    mask = np.zeros(shape, bool)
    for index in np.ndindex(shape):
        mask[index] = kept_twin(p, seed, *index)
    return mask


@pytest.mark.parametrize("key, counter, words", KNOWN)
def test_known_answers(key, counter, words):
    assert philox_twin(key, counter) == words, "the twin itself"
    result = philox.philox4x32(key[0] + (key[1] << 32), *counter)
    assert tuple(int(word) for word in result) == words
    assert all(word.dtype == np.uint32 for word in result)


def test_known_answers_in_one_array():
    """Counters broadcast, and the words keep the broadcast shape."""
    counters = np.array([KNOWN[0][1], KNOWN[1][1], KNOWN[2][1]], np.int64)
    for n, (key, _, words) in enumerate(KNOWN):
        result = philox.philox4x32(key[0] + (key[1] << 32), *counters.T[:, :, None])
        assert [word.shape for word in result] == [(3, 1)] * 4
        assert tuple(int(word[n, 0]) for word in result) == words
    assert [word.shape for word in philox.philox4x32(0, np.arange(3)[:, None], np.arange(4), 0, 0)] == [
        (3, 4)
    ] * 4


seeds = st.integers(0, 2**64 - 1) | st.sampled_from((0, 2**32 - 1, 2**32, 2**63, 2**64 - 1))
words = st.integers(0, 2**32 - 1)


@given(seeds, st.tuples(words, words, words, words))
def test_words_equal_twin(seed, counter):
    assert tuple(int(w) for w in philox.philox4x32(seed, *counter)) == philox_twin(
        (seed % 2**32, seed >> 32), counter
    )


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**32 + 7, 2**63, 2**64 - 1])
@pytest.mark.parametrize(
    "shape, p", [((1, 1, 1, 1), 0.5), ((2, 3, 4, 9), 0.3), ((1, 2, 5, 4), 0.9), ((3, 1, 2, 7), 0.01)]
)
def test_mask_equals_twin(seed, shape, p):
    mask = rf.dropout_mask(p, seed, shape)
    assert mask.dtype == bool and mask.shape == shape
    np.testing.assert_array_equal(mask, mask_twin(p, seed, shape))


@given(
    seeds, st.floats(0, 1, exclude_max=True), st.tuples(*[st.integers(0, 6)] * 4), st.integers(0, 2**32 - 1)
)
def test_keep_equals_mask(seed, p, shape, pick):
    """``keep`` at any positions is the mask at those positions; slices of a larger mask are smaller masks."""
    mask = rf.dropout_mask(p, seed, shape)
    np.testing.assert_array_equal(philox.keep(p, seed, *np.ogrid[tuple(slice(n) for n in shape)]), mask)
    if mask.size:
        rng = np.random.default_rng(pick)
        b, h, i, j = (rng.integers(0, n, 5) for n in shape)
        np.testing.assert_array_equal(philox.keep(p, seed, b, h, i, j), mask[b, h, i, j])
    small = tuple(n // 2 for n in shape)
    np.testing.assert_array_equal(rf.dropout_mask(p, seed, small), mask[tuple(slice(n) for n in small)])


def test_keep_far_away():
    """Positions of long sequences: beyond 2**16, and up to what a 32-bit counter word holds."""
    for j in (65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**33 + 5):
        for i in (0, 2**31, 2**32 - 1):
            assert philox.keep(0.5, 99, 1, 2, i, j) == kept_twin(0.5, 99, 1, 2, i, j)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.25, 0.5, 1 / 3, 0.9, 1 - 2**-33])
def test_kept_fraction(p):
    """Of n elements n (1 - p) are kept, within five standard deviations; overall and in every row."""
    mask = rf.dropout_mask(p, 2**40 + 11, (2, 4, 64, 128))
    for axes in (None, (0, 1, 2), (0, 1, 3), (2, 3)):
        n = mask.size if axes is None else math.prod(mask.shape[a] for a in axes)
        deviation = 5 * math.sqrt(p * (1 - p) / n) + 1 / n
        assert np.abs(mask.mean(axis=axes) - (1 - p)).max() <= deviation


def test_probability_zero_keeps_everything():
    for seed in (0, 2**64 - 1):
        assert rf.dropout_mask(0, seed, (3, 2, 17, 33)).all()
        assert rf.dropout_mask(2.0**-33, seed, (1, 1, 8, 8)).all(), "floor(p * 2**32) is 0"


def test_threshold():
    """``floor(dropout * 2**32)``, exact at both ends."""
    assert philox.threshold(0.0) == 0
    assert philox.threshold(0.5) == 2**31
    assert philox.threshold(2.0**-32) == 1
    assert philox.threshold(math.nextafter(2.0**-32, 0)) == 0
    assert philox.threshold(math.nextafter(1.0, 0)) == 2**32 - 1


def test_kept_iff_word_is_at_least_the_threshold():
    """Equality keeps: with p = word / 2**32 the element is kept, with the next p it is dropped."""
    for j in range(8):
        word = philox_twin((17, 0), (j // 4, 2, 1, 0))[j % 4]
        for p, kept in ((word / 2**32, True), ((word + 1) / 2**32, False)):
            assert rf.dropout_mask(p, 17, (1, 2, 3, 8))[0, 1, 2, j] == kept
            assert philox.keep(p, 17, 0, 1, 2, j) == kept


def test_seeds_and_positions_matter():
    """Each half of the seed and each index changes the mask."""
    base = rf.dropout_mask(0.5, 5, (2, 2, 8, 32))
    for other in (6, 5 + 2**32, 5 + 2**63):
        assert (rf.dropout_mask(0.5, other, base.shape) != base).mean() > 0.3
    for axis in range(4):
        first, second = np.split(base, 2, axis=axis)
        assert (first != second).mean() > 0.3


@pytest.mark.parametrize("shape", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 4), (1, 1, 4, 0), (0, 0, 0, 0)])
def test_shapes_with_zeros(shape):
    mask = rf.dropout_mask(0.5, 3, shape)
    assert mask.shape == shape and mask.dtype == bool


def test_shape_may_be_any_sequence_of_ints():
    want = rf.dropout_mask(0.5, 3, (1, 2, 3, 4))
    for shape in ([1, 2, 3, 4], np.array([1, 2, 3, 4])):
        np.testing.assert_array_equal(rf.dropout_mask(0.5, 3, shape), want)


@needs_torch
def test_kind_of_like():
    assert isinstance(rf.dropout_mask(0.5, 3, (1, 1, 2, 4)), np.ndarray)
    assert isinstance(rf.dropout_mask(0.5, 3, (1, 1, 2, 4), like=np.zeros(2)), np.ndarray)
    mask = rf.dropout_mask(0.5, 3, (1, 1, 2, 4), like=torch.zeros(2))
    assert isinstance(mask, torch.Tensor) and mask.dtype == torch.bool
    np.testing.assert_array_equal(mask.numpy(), rf.dropout_mask(0.5, 3, (1, 1, 2, 4)))


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_attention_applies_this_mask(cpu_backend, algorithm):
    """With equal scores and unit values the output shows the mask: 0, or 1 / (Tk (1 - p)) where kept."""
    shape = B, H, Tq, Tk = 2, 3, 5, 21
    q, k = np.zeros((B, H, Tq, 2), np.float32), np.zeros((B, H, Tk, 2), np.float32)
    v = np.broadcast_to(np.eye(Tk, dtype=np.float32), (B, H, Tk, Tk))
    seed = 2**63 + 12345
    out = rf.attention(q, k, v, dropout=0.4, seed=seed, backend=cpu_backend, algorithm=algorithm)
    np.testing.assert_allclose(out, mask_twin(0.4, seed, shape) / (Tk * 0.6), rtol=1e-6)
