"""The teaching backend keeps the contract: every algorithm, forward and backward, over the options."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import problems, varlen_problems
from tolerances import assert_close, assert_gradients_close, reference, reference_varlen

import rawflash as rf
from rawflash.errors import TileError

ALGORITHMS = ("standard", "rowwise", "fa1", "fa2")
B, HQ, HKV, TQ, TK, D, DV = 2, 4, 2, 37, 41, 16, 11
INF, NAN = np.inf, np.nan
SRAM = {2: 8000, 4: 8000, 8: 16000}  # bytes by item size: several blocks each way


def arrays(dtype=np.float64, seed=3, Tq=TQ, Tk=TK):
    rng = np.random.default_rng(seed)
    shapes = ((B, HQ, Tq, D), (B, HKV, Tk, D), (B, HKV, Tk, DV), (B, HQ, Tq, DV))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def check(algorithm, q, k, v, dout, *, wrt=("q", "k", "v"), dlse=None, **options):
    """Forward and backward against the oracle, by the contract's bound."""
    ref = reference(q, k, v, dout, dlse=dlse, wrt=wrt, **options)
    run = options | {"algorithm": algorithm, "backend": "numpy_tiled", "sram": SRAM[q.dtype.itemsize]}
    out, lse = rf.attention(q, k, v, return_lse=True, **run)
    assert out.dtype == q.dtype
    assert_close("out", out, ref)
    assert_close("lse", lse, ref)
    grads = rf.attention_backward(dout, q, k, v, out, lse, dlse=dlse, wrt=wrt, **run)
    assert_gradients_close(grads, ref, wrt)
    return out, lse, grads


def options_by_name():
    rng = np.random.default_rng(5)
    bias = rng.standard_normal((B, HQ, TQ, TK))
    hiding = np.where(rng.random(bias.shape) < 0.3, -INF, bias)
    segments = rf.masks.Segments(rng.integers(0, 3, TQ), rng.integers(0, 3, TK))
    everything = ("q", "k", "v", "bias", "sinks")
    return {
        "plain": {},
        "causal": {"causal": True},
        "upper left": {"causal": True, "q_offset": 0},
        "rows before every key": {"causal": True, "q_offset": -20},
        "window": {"window": (9, 3), "q_offset": np.array([-3, 12])},
        "mask array": {"mask": rng.random((B, 1, TQ, TK)) < 0.4},
        "mask object": {"mask": segments | rf.masks.Prefix(5), "causal": True},
        "lengths": {"q_lengths": [30, 0], "kv_lengths": [0, 33]},
        "bias": {"bias": hiding, "wrt": everything[:4]},
        "bias of a row": {"bias": bias[:1, :, :, :1], "wrt": ("bias", "q")},
        "bias of a key": {"bias": hiding[:, :1, :1, :], "wrt": ("bias", "k")},
        "alibi": {"alibi_slopes": [0.1, 0.2, 0.4, 0.8]},
        "softcap": {"softcap": 1.5, "causal": True},
        "sinks": {"sinks": rng.standard_normal(HQ), "wrt": everything[:3] + ("sinks",)},
        "sinks alone": {"sinks": rng.standard_normal(HQ), "kv_lengths": [0, 41], "wrt": ("sinks",)},
        "dropout": {"dropout": 0.3, "seed": 2**40 + 1},
        "scale": {"scale": -0.7},
        "dlse": {"dlse": rng.standard_normal((B, HQ, TQ))},
        "deterministic": {"deterministic": True, "causal": True},
        "everything": {
            "causal": True, "window": (30, None), "mask": rng.random((TQ, TK)) < 0.9, "bias": hiding,
            "alibi_slopes": rng.random((B, HQ)), "softcap": 2.0, "sinks": rng.standard_normal(HQ), "dropout": 0.2,
            "seed": 9, "kv_lengths": [41, 20], "q_lengths": [37, 11], "dlse": rng.standard_normal((B, HQ, TQ)),
            "wrt": everything, "deterministic": True,
        },
    }  # fmt: skip


OPTIONS = options_by_name()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(algorithm, name):
    check(algorithm, *arrays(), **OPTIONS[name])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_dtypes(algorithm, dtype):
    check(algorithm, *arrays(dtype), causal=True, softcap=3.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("Tq", "Tk"), [(1, 41), (37, 1), (0, 5), (5, 0), (0, 0)])
def test_short_and_empty(algorithm, Tq, Tk):
    check(algorithm, *arrays(Tq=Tq, Tk=Tk), sinks=np.zeros(HQ), wrt=("q", "k", "v", "sinks"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_varlen(algorithm):
    rng = np.random.default_rng(1)
    cu_q, cu_k = [1, 20, 20, 37], [0, 7, 19, 40]
    q, k, v, dout = (rng.standard_normal((H, T, 8)) for H, T in ((HQ, TQ), (HKV, TK), (HKV, TK), (HQ, TQ)))
    options = {"causal": True, "dropout": 0.1, "sinks": np.ones(HQ), "alibi_slopes": [0.1, 0.2, 0.3, 0.4]}
    ref = reference_varlen(q, k, v, cu_q, cu_k, dout, **options)
    q[:, :1] = k[:, 40:] = v[:, 40:] = dout[:, :1] = NAN  # outside every sequence
    run = options | {"algorithm": algorithm, "backend": "numpy_tiled", "sram": 8000}
    out, lse = rf.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **run)
    assert_close("out", out, ref)
    assert_close("lse", lse, ref)
    assert_gradients_close(rf.attention_varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, **run), ref)


@given(
    st.one_of(
        problems(backend="numpy_tiled", dtypes=("float32", "float64")),
        varlen_problems(backend="numpy_tiled", dtypes=("float32", "float64")),
    ),
    st.sampled_from((3000, 20000)),
)
def test_any_call(case, sram):
    try:
        out, lse = case.forward(sram=sram)
        grads = case.backward(out, lse, sram=sram)
    except TileError as error:
        assert error.needed > sram
        return
    ref = case.reference()
    assert_close("out", out, ref)
    assert_close("lse", lse, ref)
    assert_gradients_close(grads, ref, case.wrt)


# ---- edges -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_padding_is_never_read(algorithm):
    q, k, v, dout = arrays()
    lengths = {"q_lengths": [30, 0], "kv_lengths": [17, 33]}
    bias = np.zeros((B, 1, TQ, TK))
    clean = check(algorithm, q, k, v, dout, bias=bias, **lengths)
    for b in range(B):
        for array in (q, dout, bias):
            array[b, :, lengths["q_lengths"][b] :] = NAN
        for array in (k, v, bias.swapaxes(2, 3)):
            array[b, :, lengths["kv_lengths"][b] :] = NAN
    run = {"algorithm": algorithm, "backend": "numpy_tiled", "sram": SRAM[8], "bias": bias} | lengths
    out, lse = rf.attention(q, k, v, return_lse=True, **run)
    grads = rf.attention_backward(dout, q, k, v, out, lse, **run)
    for dirty, expected in zip((out, lse, *grads), (*clean[:2], *clean[2]), strict=True):
        np.testing.assert_array_equal(dirty, expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("hide", ["mask", "bias"])
def test_a_hidden_key_may_overflow(algorithm, hide):
    """Its score and its dout . v are infinite in float32; nobody sees it."""
    q, k, v, dout = arrays(np.float32)
    k[:, :, 7], v[:, :, 7], q[:, :, 3], dout[:, :, 3] = 1e30, 1e30, 1e30, 1e30
    q[:, :, 4:], dout[:, :, 4:] = np.abs(q[:, :, 4:]), np.abs(dout[:, :, 4:])
    seen = np.ones(TK, bool)
    seen[7] = False
    options = {"mask": seen} if hide == "mask" else {"bias": np.where(seen, 0, -INF).astype(np.float32)[None]}
    run = options | {"algorithm": algorithm, "backend": "numpy_tiled", "sram": 8000, "softcap": 5.0}
    out, lse = rf.attention(q, k, v, return_lse=True, **run)
    dq, dk, dv = rf.attention_backward(dout, q, k, v, out, lse, **run)
    rows = np.arange(TQ) != 3
    assert np.isfinite(out).all() and np.isfinite(lse).all() and np.isfinite(dq[:, :, rows]).all()
    assert not dk[:, :, 7].any() and not dv[:, :, 7].any()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rows_that_see_nothing(algorithm):
    q, k, v, dout = arrays()
    mask = np.ones((TQ, TK), bool)
    mask[5] = False
    mask[:, 30:] = False
    out, lse, (dq, dk, dv) = check(algorithm, q, k, v, dout, mask=mask, dlse=np.ones((B, HQ, TQ)))
    assert not out[:, :, 5].any() and np.isneginf(lse[:, :, 5]).all() and not dq[:, :, 5].any()
    assert not dk[:, :, 30:].any() and not dv[:, :, 30:].any()
    sinks = np.arange(HQ, dtype=float)
    out, lse, _ = check(
        algorithm, q, k, v, dout, mask=mask, sinks=sinks, wrt=("q", "sinks"), dlse=np.ones((B, HQ, TQ))
    )
    np.testing.assert_array_equal(lse[:, :, 5], np.broadcast_to(sinks, (B, HQ)))
    assert not out[:, :, 5].any()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nan_stays_in_the_rows_that_see_it(algorithm):
    q, k, v, _ = arrays()
    q[:, :, 4, 2] = NAN
    out, lse = rf.attention(
        q, k, v, return_lse=True, algorithm=algorithm, backend="numpy_tiled", sram=SRAM[8]
    )
    rows = np.arange(TQ) == 4
    assert np.isnan(out[:, :, rows]).all() and np.isnan(lse[:, :, rows]).all()
    assert np.isfinite(out[:, :, ~rows]).all() and np.isfinite(lse[:, :, ~rows]).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_large_scores_do_not_overflow(algorithm):
    q, k, v, dout = arrays(np.float32)
    check(algorithm, 20 * q, 20 * k, v, dout, causal=True)
    run = {"algorithm": algorithm, "backend": "numpy_tiled", "sram": 8000}
    q, k = 1e15 * q, 1e15 * k  # a score's rounding error alone is larger than exp can take
    out, lse = rf.attention(q, k, v, return_lse=True, **run)
    dq, dk, dv = rf.attention_backward(dout, q, k, v, out, lse, **run)
    assert all(np.isfinite(array).all() for array in (out, lse, dv))
    assert not np.isnan(dq).any() and not np.isnan(dk).any()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_grouped_heads_of_a_narrow_dtype_are_rounded_once(algorithm):
    """dK and dV of a group are summed in float32: 64 heads of float16 would show otherwise."""
    rng = np.random.default_rng(2)
    q, dout = (rng.standard_normal((64, 9, 4)).astype(np.float16) for _ in range(2))
    k, v = (rng.standard_normal((1, 9, 4)).astype(np.float16) for _ in range(2))
    run = {"algorithm": algorithm, "backend": "numpy_tiled", "sram": 1000}
    out, lse = rf.attention(q, k, v, return_lse=True, **run)
    narrow = rf.attention_backward(dout, q, k, v, out, lse, **run)
    wide = [a.astype(np.float32) for a in (dout, q, k, v, out)]
    for gradient, expected in zip(narrow, rf.attention_backward(*wide, lse, **run), strict=True):
        np.testing.assert_array_max_ulp(gradient, expected.astype(np.float16), 1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_block_size_does_not_matter(algorithm):
    q, k, v, dout = arrays()
    results = []
    for sram in (5000, 12345, 10**7):
        run = {"algorithm": algorithm, "backend": "numpy_tiled", "sram": sram, "dropout": 0.4, "seed": 5}
        out, lse = rf.attention(q, k, v, return_lse=True, **run)
        results.append((out, lse, *rf.attention_backward(dout, q, k, v, out, lse, **run)))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)
