"""`merge_attention`: any split of the keys is the whole, forward and, through lse, backward."""

import numpy as np
import pytest
from test_forward import kernels

import rawflash as rf


def split_case(rng, **options):
    """float64: the split and the whole then agree to rounding, about 1e-14 of numbers near one."""
    q, k, v, dout = (rng.standard_normal((2, H, T, 8)) for H, T in ((4, 19), (2, 50), (2, 50), (4, 19)))
    return q, k, v, dout, options


SPLITS = {
    "halves": (0, 25, 50),
    "uneven": (0, 1, 17, 50),
    "with empty parts": (0, 0, 30, 30, 50),
    "whole": (0, 50),
}
OPTIONS = {
    "plain": dict(),
    "causal": dict(causal=True),
    "causal: parts without keys": dict(causal=True, q_offset=-5),
    "window": dict(window=(9, 2)),
    "alibi": dict(alibi_slopes=np.array([0.1, 0.2, 0.0, 1.0])),
    "softcap": dict(softcap=2.0),
}


def parts_of(options, cuts, Tq=19, Tk=50):
    """(keys, options) of each part: j counts from the start of the part, so each has an offset of its own."""
    offset = options.get("q_offset", Tk - Tq)
    for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
        yield slice(start, stop), options | {"q_offset": offset - start}


@kernels
@pytest.mark.parametrize("cuts", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_split_and_merge_is_the_whole(options, cuts, backend, algorithm, rng):
    q, k, v, dout, options = split_case(rng, **options, backend=backend, algorithm=algorithm)
    whole, whole_lse = rf.attention(q, k, v, return_lse=True, **options)
    parts = list(parts_of(options, cuts))
    results = [rf.attention(q, k[:, :, s], v[:, :, s], return_lse=True, **o) for s, o in parts]
    out, lse = rf.merge_attention(*zip(*results, strict=True))
    np.testing.assert_allclose(out, whole, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-12)

    # Backward by hand: out = sum_n w_n out_n with w_n = exp(lse_n - lse), lse = log sum_n exp(lse_n).
    dlse = np.random.default_rng(1).standard_normal(lse.shape)
    dq, dk, dv = rf.attention_backward(dout, q, k, v, whole, whole_lse, dlse=dlse, **options)
    total = np.zeros_like(dq)
    for (s, o), (part, part_lse) in zip(parts, results, strict=True):
        w = np.where(np.isneginf(part_lse), 0, np.exp(part_lse - np.where(np.isneginf(lse), 0, lse)))
        part_dlse = w * (dlse + (dout * (part - out)).sum(axis=-1))
        g = rf.attention_backward(
            w[..., None] * dout, q, k[:, :, s], v[:, :, s], part, part_lse, dlse=part_dlse, **o
        )
        total += g[0]
        np.testing.assert_allclose(g[1], dk[:, :, s], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(g[2], dv[:, :, s], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(total, dq, rtol=1e-10, atol=1e-12)


def test_parts_that_saw_nothing_leave_no_trace(rng):
    out, lse = rng.standard_normal((2, 3, 4)), rng.standard_normal((2, 3))
    nothing = np.zeros_like(out), np.full_like(lse, -np.inf)
    merged, merged_lse = rf.merge_attention([nothing[0], out, nothing[0]], [nothing[1], lse, nothing[1]])
    np.testing.assert_allclose(merged, out, rtol=1e-15)
    np.testing.assert_allclose(merged_lse, lse, rtol=1e-15)
    empty, empty_lse = rf.merge_attention([nothing[0]] * 2, [nothing[1]] * 2)
    np.testing.assert_array_equal(empty, 0)
    np.testing.assert_array_equal(empty_lse, -np.inf)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_huge_lse_does_not_overflow(dtype):
    """exp(1e4) is inf: the merge has to subtract the maximum, and of equal halves it is the mean."""
    out = [np.full((1, 2, 1), x, dtype) for x in (1, 3)]
    lse = [np.full((1, 2), 1e4, np.float64 if dtype == "float64" else np.float32)] * 2
    merged, merged_lse = rf.merge_attention(out, lse)
    assert merged.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(merged, 2)
    np.testing.assert_allclose(merged_lse, 1e4 + np.log(2), rtol=1e-7)


def test_order_of_the_parts_does_not_matter(rng):
    outs, lses = list(rng.standard_normal((4, 2, 3, 5))), list(rng.standard_normal((4, 2, 3)))
    a, b = rf.merge_attention(outs, lses), rf.merge_attention(outs[::-1], lses[::-1])
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-14, atol=1e-15)
    pair = rf.merge_attention(outs[:2], lses[:2]), rf.merge_attention(outs[2:], lses[2:])
    for x, y in zip(a, rf.merge_attention(*zip(*pair, strict=True)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-14, atol=1e-15)
