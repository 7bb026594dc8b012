"""`rawflash.layers`: every layer against its equations written out with the oracle, its gradients against central
differences, the laws that it keeps, what it refuses, and that it speaks to its arrays through their library only.
"""

import inspect
import operator
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from gpu import to_cupy, to_host
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES

import rawflash as rf
from rawflash import layers
from rawflash.layers import checks

TILED = {"backend": "numpy_tiled"}
WEIGHTS = ("wq", "wk", "wv", "wo")
CONVENTIONS = ("half", "interleaved")


def close(a, b, bound=1e-12):
    """float64 results of the same thing: apart by ``bound`` of the largest element, or of one."""
    assert a.shape == b.shape and a.dtype == b.dtype
    np.testing.assert_allclose(a, b, rtol=0, atol=bound * max(1.0, np.abs(b).max(initial=0)))


def check_gradients(f, arrays, gradients):
    """Every gradient of ``f(**arrays)`` with f's random weights, by central differences."""
    assert set(gradients) == set(arrays)
    for name, gradient in gradients.items():
        numeric = rf.oracle.central_differences(lambda a, name=name: f(**(arrays | {name: a})), arrays[name])
        close(gradient, numeric, 1e-8)


# ---- rotary embedding ------------------------------------------------------------------------------


def rotated(x, positions, base, convention):
    """RoPE as multiplication of complex numbers."""
    d = x.shape[-1]
    turn = np.exp(1j * np.asarray(positions)[..., None] / base ** (np.arange(d // 2) * 2 / d))
    if convention == "half":
        z = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)
    z = (x[..., ::2] + 1j * x[..., 1::2]) * turn
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


conventions = pytest.mark.parametrize("convention", CONVENTIONS)


@conventions
def test_rope_is_a_product_of_complex_numbers(convention, rng):
    x = rng.standard_normal((2, 3, 7, 6))
    some = np.arange(7), rng.integers(-50, 5000, (2, 1, 7)), rng.integers(0, 9, 7, np.uint8), [4] * 7
    for positions in some:
        for base in (10000.0, 7):
            out = layers.rope(x, positions, base, convention)
            close(out, rotated(x, positions, base, convention))


@conventions
def test_rope_gradient(convention, rng):
    x, dout = rng.standard_normal((2, 2, 5, 6))
    positions = [3, 1, 4, 1, 5]

    def f(x):
        return (dout * layers.rope(x, positions, 100.0, convention)).sum()

    check_gradients(f, {"x": x}, {"x": layers.rope_backward(dout, positions, 100.0, convention)})


@given(
    st.integers(0, 2**32), st.integers(-(10**6), 10**6), st.integers(1, 6), st.integers(1, 9),
    st.sampled_from(CONVENTIONS),
)  # fmt: skip
def test_scores_do_not_change_when_all_positions_shift(seed, shift, half, T, convention):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, T, 2 * half))
    at_q, at_k = rng.integers(0, 1000, (2, T))

    def scores(by):
        return (
            layers.rope(q, at_q + by, convention=convention) @ layers.rope(k, at_k + by, convention=convention).T
        )

    # An angle of 1e6 radians is known to 2**-53 * 1e6, about 1e-10.
    np.testing.assert_allclose(scores(shift), scores(0), rtol=0, atol=4e-10 * 2 * half)


@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from(CONVENTIONS))
def test_rope_turns_and_does_not_stretch(seed, half, convention):
    rng = np.random.default_rng(seed)
    x, positions = rng.standard_normal((3, 4, 2 * half)), rng.integers(0, 10**6, (3, 4))
    out = layers.rope(x, positions, convention=convention)
    close(np.linalg.norm(out, axis=-1), np.linalg.norm(x, axis=-1), 1e-14)
    close(layers.rope_backward(out, positions, convention=convention), x, 1e-14)
    np.testing.assert_array_equal(layers.rope(x, np.zeros((3, 4), int), convention=convention), x)


def test_the_conventions_differ_by_the_order_of_features(rng):
    x = rng.standard_normal((5, 8))
    order = np.arange(8).reshape(2, 4).T.ravel()  # 0 4 1 5 2 6 3 7: pairs beside each other
    half = layers.rope(x, range(5), convention="half")
    np.testing.assert_array_equal(layers.rope(x[:, order], range(5), convention="interleaved"), half[:, order])
    assert np.abs(layers.rope(x, range(5), convention="interleaved") - half).max() > 0.1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rope_far_out_is_as_exact_as_near(dtype, rng):
    """Angles in float32 would be wrong by 0.1 at a position of a million."""
    x = rng.standard_normal((4, 8)).astype(dtype)
    positions = 10**6 + np.arange(4)
    out = layers.rope(x, positions)
    assert out.dtype == x.dtype
    exact = rotated(x.astype(np.float64), positions, 10000.0, "half")
    np.testing.assert_allclose(out, exact, rtol=0, atol=4 * np.finfo(dtype).eps * np.abs(exact).max())


# ---- multi-head attention --------------------------------------------------------------------------


def columns(w, heads):
    """One weight for each head."""
    return np.split(w, heads, axis=1)


def case(rng, B=2, T=5, Tk=None, Hq=4, Hkv=2, d=4, dv=3, D=6, Dc=5, Do=7):
    """Arguments of a call; of cross-attention if there is a Tk."""
    Dc = D if Tk is None else Dc
    shapes = {"wq": (D, Hq * d), "wk": (Dc, Hkv * d), "wv": (Dc, Hkv * dv), "wo": (Hq * dv, Do)}
    args = {"x": rng.standard_normal((B, T, D))} if Tk is None else {
        "x": rng.standard_normal((B, T, D)), "context": rng.standard_normal((B, Tk, Dc))
    }  # fmt: skip
    return args | {name: rng.standard_normal(shape) / np.sqrt(shape[0]) for name, shape in shapes.items()}


def oracle_attention(x, wq, wk, wv, wo, Hq, Hkv, context=None, rope=None, dout=None, **options):
    """The equations of the docstring, head by head, with the oracle; gradients if there is a dout."""
    C = x if context is None else context
    settings = dict(base=10000.0, convention="half") | (rope or {})
    at_q = settings.pop("positions", np.arange(x.shape[-2]))
    at_k = settings.pop("context_positions", np.arange(C.shape[-2]) if context is not None else at_q)

    def turn(heads, positions, direction=1):
        if rope is None:
            return heads
        return [rotated(head, direction * np.asarray(positions), **settings) for head in heads]

    q = np.stack(turn([x @ w for w in columns(wq, Hq)], at_q), axis=1)
    k = np.stack(turn([C @ w for w in columns(wk, Hkv)], at_k), axis=1)
    v = np.stack([C @ w for w in columns(wv, Hkv)], axis=1)
    o, lse = rf.oracle.attention(q, k, v, return_lse=True, **options)
    out = sum(o[:, h] @ w for h, w in enumerate(np.split(wo, Hq)))
    if dout is None:
        return out

    do = np.stack([dout @ w.T for w in np.split(wo, Hq)], axis=1)
    dq, dk, dv = rf.oracle.attention_backward(do, q, k, v, o, lse, **options)
    dq = turn(dq.transpose(1, 0, 2, 3), at_q, -1)
    dk = turn(dk.transpose(1, 0, 2, 3), at_k, -1)
    dv = dv.transpose(1, 0, 2, 3)
    dx = sum(g @ w.T for g, w in zip(dq, columns(wq, Hq), strict=True))
    dC = sum(g @ w.T for gs, ws in ((dk, wk), (dv, wv)) for g, w in zip(gs, columns(ws, Hkv), strict=True))

    def of_weight(inputs, gradients):
        return np.concatenate([np.einsum("btd,btn->dn", inputs, g) for g in gradients], axis=1)

    dwo = np.concatenate([np.einsum("btd,btn->dn", o[:, h], dout) for h in range(Hq)])
    inputs = (dx + dC,) if context is None else (dx, dC)
    return out, (*inputs, of_weight(x, dq), of_weight(C, dk), of_weight(C, dv), dwo)


OPTIONS = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1), "softcap": 3.0},
    "upper left": {"causal": True, "q_offset": 0},
    "lengths": {"q_lengths": [4, 2], "kv_lengths": [3, 4]},
    "dropout": {"dropout": 0.3, "seed": 7, "scale": 0.4},
}
ROPES = {
    "no rope": None,
    "rope": {},
    "settings": {"base": 50.0, "convention": "interleaved", "positions": [7, 2, 9, 4, 4]},
}


def names(args):
    return [name for name in ("x", "context", *WEIGHTS) if name in args]


@pytest.mark.parametrize("Tk", [None, 6], ids=["self", "cross"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_multi_head_attention_is_its_equations(rope, options, Tk, rng):
    args = case(rng, Tk=Tk)
    if Tk and rope:
        rope = rope | {"context_positions": [0, 1, 1, 2, 3, 11]}
    dout = rng.standard_normal((2, 5, 7))
    expected, gradients = oracle_attention(**args, Hq=4, Hkv=2, rope=rope, dout=dout, **options)
    call = dict(num_heads=4, num_kv_heads=2, rope=rope, **options, **TILED)
    out, saved = layers.multi_head_attention(**args, **call, return_saved=True)
    close(out, expected)
    np.testing.assert_array_equal(out, layers.multi_head_attention(**args, **call))
    results = layers.multi_head_attention_backward(dout, **args, **call, saved=saved)
    again = layers.multi_head_attention_backward(dout, **args, **call)  # what was not saved is computed again
    for result, recomputed, gradient in zip(results, again, gradients, strict=True):
        close(result, gradient)
        np.testing.assert_array_equal(result, recomputed)


@given(
    st.tuples(*[st.integers(1, 3)] * 4), st.sampled_from([(1, 1), (2, 1), (2, 2), (6, 3), (3, 1)]), st.integers(0, 9),
    st.none() | st.integers(1, 9), st.booleans(), st.booleans(), st.integers(0, 2**32),
)  # fmt: skip
def test_multi_head_attention_of_any_shape(sizes, heads, T, Tk, causal, with_rope, seed):
    (B, half, dv, D), (Hq, Hkv), rng = sizes, heads, np.random.default_rng(seed)
    args = case(rng, B=B, T=T, Tk=Tk, Hq=Hq, Hkv=Hkv, d=2 * half, dv=dv, D=D, Dc=4, Do=3)
    dout = rng.standard_normal((B, T, 3))
    rope = {} if with_rope else None
    expected, gradients = oracle_attention(**args, Hq=Hq, Hkv=Hkv, rope=rope, dout=dout, causal=causal)
    call = dict(num_heads=Hq, num_kv_heads=Hkv, rope=rope, causal=causal, **TILED)
    close(layers.multi_head_attention(**args, **call), expected)
    for result, gradient in zip(
        layers.multi_head_attention_backward(dout, **args, **call), gradients, strict=True
    ):
        close(result, gradient)


@pytest.mark.parametrize("Tk", [None, 4], ids=["self", "cross"])
def test_gradients_of_multi_head_attention(Tk, rng):
    args = case(rng, T=3, Tk=Tk, Hq=2, Hkv=1, D=4, Do=3)
    args["sinks"], args["bias"] = rng.standard_normal(2), rng.standard_normal((2, 1, Tk or 3))
    dout = rng.standard_normal((2, 3, 3))
    call = dict(num_heads=2, num_kv_heads=1, rope={}, causal=True, **TILED)

    def f(**args):
        return (dout * layers.multi_head_attention(**args, **call)).sum()

    gradients = layers.multi_head_attention_backward(dout, **args, **call, wrt=("sinks", "bias"))
    check_gradients(f, args, dict(zip([*names(args), "sinks", "bias"], gradients, strict=True)))


def test_one_sequence_and_more_batch_axes(rng):
    args = case(rng, B=6)
    call = dict(num_heads=4, num_kv_heads=2, rope={}, causal=True, **TILED)
    whole = layers.multi_head_attention(**args, **call)
    x = args.pop("x")
    close(layers.multi_head_attention(x.reshape(2, 3, 5, 6), **args, **call), whole.reshape(2, 3, 5, 7))
    for b in range(6):
        close(layers.multi_head_attention(x[b], **args, **call), whole[b])


def test_attention_to_itself_is_self_attention(rng):
    args, dout = case(rng), rng.standard_normal((2, 5, 7))
    call = dict(num_heads=4, num_kv_heads=2, rope={}, window=(1, 2), **TILED)
    close(
        layers.multi_head_attention(**args, **call, context=args["x"]), layers.multi_head_attention(**args, **call)
    )
    dx, dcontext, *cross = layers.multi_head_attention_backward(dout, **args, **call, context=args["x"])
    both, *same = layers.multi_head_attention_backward(dout, **args, **call)
    close(dx + dcontext, both)
    for a, b in zip(cross, same, strict=True):
        close(a, b)


def test_grouped_heads_are_repeated_heads(rng):
    args = case(rng)
    grouped = layers.multi_head_attention(**args, num_heads=4, num_kv_heads=2, rope={}, **TILED)
    for name in ("wk", "wv"):
        args[name] = np.concatenate([w for w in columns(args[name], 2) for _ in range(2)], axis=1)
    close(layers.multi_head_attention(**args, num_heads=4, rope={}, **TILED), grouped)


def test_shifted_positions_change_nothing(rng):
    args = case(rng)
    call = dict(num_heads=4, num_kv_heads=2, causal=True, **TILED)
    near = layers.multi_head_attention(**args, **call, rope={})
    far = layers.multi_head_attention(**args, **call, rope={"positions": np.array([[100], [5000]]) + np.arange(5)})
    close(far, near, 1e-11)  # angles of 5,000 radians are known to 1e-12
    assert np.abs(layers.multi_head_attention(**args, **call) - near).max() > 0.01


def test_later_rows_do_not_matter_to_causal_attention(rng):
    args = case(rng)
    call = dict(num_heads=4, num_kv_heads=2, rope={}, causal=True, **TILED)
    whole = layers.multi_head_attention(**args, **call)
    args["x"] = args["x"].copy()
    args["x"][:, 3:] = rng.standard_normal((2, 2, 6))
    changed = layers.multi_head_attention(**args, **call)
    close(changed[:, :3], whole[:, :3])
    assert np.abs(changed - whole).max() > 0.01


def test_heads_are_views_of_the_products(rng):
    args = case(rng)
    _, saved = layers.multi_head_attention(**args, num_heads=4, num_kv_heads=2, return_saved=True, **TILED)
    for name, array in zip("qkv", saved, strict=False):
        assert array.base is not None and array.base.shape == (10, args[f"w{name}"].shape[1])
    assert saved.q.shape == (2, 5, 4, 4) and saved.v.shape == (2, 5, 2, 3) and saved.lse.shape == (2, 4, 5)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_narrow_dtypes_stay_what_they_are(dtype, rng):
    args = {name: array.astype(dtype) for name, array in case(rng).items()}
    dout = rng.standard_normal((2, 5, 7)).astype(dtype)
    wide = {name: array.astype(np.float64) for name, array in args.items()}
    expected, gradients = oracle_attention(**wide, Hq=4, Hkv=2, rope={}, dout=dout.astype(np.float64))
    call = dict(num_heads=4, num_kv_heads=2, rope={}, **TILED)
    results = layers.multi_head_attention_backward(dout, **args, **call)
    for result, exact in zip(
        (layers.multi_head_attention(**args, **call), *results), (expected, *gradients), strict=True
    ):
        assert result.dtype == dtype
        # Four roundings to the dtype lie between an input and a gradient, each of numbers near the largest.
        np.testing.assert_allclose(result, exact, rtol=0, atol=8 * np.finfo(dtype).eps * np.abs(exact).max())


# ---- norm, GELU, block -----------------------------------------------------------------------------


def test_rms_norm(rng):
    x, dout = rng.standard_normal((2, 2, 3, 5))
    gain = rng.standard_normal(5)
    close(layers.rms_norm(x, gain, 0.1), gain * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 0.1))
    gradients = dict(zip(("x", "gain"), layers.rms_norm_backward(dout, x, gain, 0.1), strict=True))
    check_gradients(
        lambda x, gain: (dout * layers.rms_norm(x, gain, 0.1)).sum(), {"x": x, "gain": gain}, gradients
    )


@given(st.integers(0, 2**32), st.integers(1, 9), st.floats(0.1, 1e3))
def test_rms_norm_does_not_see_the_scale(seed, D, factor):
    x = np.random.default_rng(seed).standard_normal((3, D)) + 2
    gain = np.ones(D)
    close(layers.rms_norm(factor * x, gain, 1e-30), layers.rms_norm(x, gain, 1e-30), 1e-14)
    dx, _ = layers.rms_norm_backward(np.ones_like(x), x, gain, 1e-30)
    close((dx * x).sum(axis=-1), np.zeros(3), 1e-13)  # so its gradient is orthogonal to x


def test_gelu(rng):
    x, dout = 2 * rng.standard_normal((2, 40))
    close(layers.gelu(x), x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))
    check_gradients(lambda x: (dout * layers.gelu(x)).sum(), {"x": x}, {"x": layers.gelu_backward(dout, x)})


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gelu_of_numbers_whose_cube_overflows(dtype):
    most = np.finfo(dtype).max
    x = np.array([-most, -1e30, 1e30, most, np.nan], dtype)
    with np.errstate(all="raise"):
        out, slope = layers.gelu(x), layers.gelu_backward(np.ones_like(x), x)
    np.testing.assert_array_equal(out, [0, 0, *x[2:]])
    np.testing.assert_array_equal(slope, [0, 0, 1, 1, np.nan])
    assert out.dtype == slope.dtype == dtype


def test_gelu_in_float16_does_not_overflow_inside():
    x = np.array([-60000.0, -300.0, 300.0, 60000.0], np.float16)
    np.testing.assert_array_equal(layers.gelu(x), [0, 0, 300, 60000])
    np.testing.assert_array_equal(layers.gelu_backward(np.ones_like(x), x), [0, 0, 1, 1])


def block(rng, D=4, Hq=2, Hkv=1, d=4, F=6):
    shapes = {"wq": (D, Hq * d), "wk": (D, Hkv * d), "wv": (D, Hkv * d), "wo": (Hq * d, D), "w1": (D, F), "w2": (F, D)}
    params = {name: rng.standard_normal(shape) / np.sqrt(shape[0]) for name, shape in shapes.items()}
    return params | {"norm1": rng.standard_normal(D), "norm2": rng.standard_normal(D)}


def oracle_block(x, p, Hq, Hkv, rope, eps, **options):
    def norm(x, gain):
        return gain * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)

    h = x + oracle_attention(
        norm(x, p["norm1"]), *(p[name] for name in WEIGHTS), Hq, Hkv, rope=rope, **options
    )
    u = norm(h, p["norm2"]) @ p["w1"]
    return h + (u / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))) @ p["w2"]


@pytest.mark.parametrize(
    "more", [{}, {"rope": None, "causal": False, "eps": 0.1}, {"window": (1, None)}], ids=["", "plain", "window"]
)
def test_gpt_block(more, rng):
    x, dout = rng.standard_normal((2, 2, 3, 4))
    params = block(rng)
    expected = oracle_block(x, params, 2, 1, **({"rope": {}, "eps": 1e-6, "causal": True} | more))
    out, saved = layers.gpt_block(x, params, 2, 1, return_saved=True, **more, **TILED)
    close(out, expected)
    np.testing.assert_array_equal(layers.gpt_block(x, params, 2, 1, **more, **TILED), out)

    dx, gradients = layers.gpt_block_backward(dout, x, params, 2, 1, saved=saved, **more, **TILED)
    again, recomputed = layers.gpt_block_backward(dout, x, params, 2, 1, **more, **TILED)
    np.testing.assert_array_equal(dx, again)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, recomputed[name])

    def f(x, **params):
        return (dout * layers.gpt_block(x, params, 2, 1, **more, **TILED)).sum()

    check_gradients(f, {"x": x, **params}, {"x": dx, **gradients})


# ---- what is refused -------------------------------------------------------------------------------


def torch_tensor():
    return type("Tensor", (), {"__module__": "torch"})()


def wrong(message, call):
    return pytest.param(call, message, id=message[:40])


def mha(backward=False, **changed):
    args = case(np.random.default_rng(0)) | changed
    heads = {"num_heads": 4, "num_kv_heads": 2} | {n: args.pop(n) for n in list(args) if n.startswith("num_")}
    if backward:
        return layers.multi_head_attention_backward(args.pop("dout", np.ones((2, 5, 7))), **args, **heads)
    return layers.multi_head_attention(**args, **heads)


X, ONE = np.ones((3, 4)), np.ones(4)


def gpt(backward=False, **changed):
    params = {name: np.ones((4, 4)) for name in ("wq", "wk", "wv", "wo", "w1", "w2")}
    params |= {"norm1": ONE, "norm2": ONE} | changed.pop("params", {})
    params = {name: array for name, array in params.items() if array is not None}
    if backward:
        return layers.gpt_block_backward(changed.pop("dout", X), X, params, 2, **changed)
    return layers.gpt_block(changed.pop("x", X), params, 2, **changed)


WRONG = [
    wrong("x is a torch Tensor; expected a NumPy or CuPy array", lambda: layers.rope(torch_tensor(), [0])),
    wrong("x is a list; expected a NumPy or CuPy array", lambda: layers.rope([[1.0, 2.0]], [0])),
    wrong("x is a numpy MaskedArray; expected a NumPy", lambda: layers.rope(np.ma.ones((3, 4)), range(3))),
    wrong("x has dtype int64; expected float16, float32 or", lambda: layers.rope(np.ones((3, 4), int), range(3))),
    wrong("x has dtype bfloat16; expected float16, float32 or", lambda: layers.gelu(np.ones(3, DTYPES["bfloat16"]))),
    wrong("x has shape (3, 5); expected (..., T, d) with an even d", lambda: layers.rope(np.ones((3, 5)), range(3))),
    wrong("dout has shape (4,); expected (..., T, d)", lambda: layers.rope_backward(ONE, range(3))),
    wrong("positions has shape (2,); expected", lambda: layers.rope(X, [0, 1])),
    wrong("positions has shape (2, 3); expected", lambda: layers.rope(X, np.zeros((2, 3), int))),
    wrong("positions has dtype float64; expected integers", lambda: layers.rope(X, np.zeros(3))),
    wrong("positions has dtype bool; expected integers", lambda: layers.rope(X, [True] * 3)),
    wrong("positions is 3; expected an int array", lambda: layers.rope(X, 3)),
    wrong("positions is None; expected an int array", lambda: layers.rope(X, None)),
    wrong("positions is [[1], [2, 3]]; expected an int array", lambda: layers.rope(X, [[1], [2, 3]])),
    wrong("positions is a torch Tensor; expected", lambda: layers.rope(X, torch_tensor())),
    wrong("base is 0; expected a finite number > 0", lambda: layers.rope(X, range(3), 0)),
    wrong("base is inf; expected a finite number > 0", lambda: layers.rope(X, range(3), float("inf"))),
    wrong("base is 'e'; expected a number > 0", lambda: layers.rope(X, range(3), "e")),
    wrong("convention is 'gpt'; expected one of 'half', 'inter", lambda: layers.rope(X, range(3), convention="gpt")),
    wrong("wq is a torch Tensor; expected", lambda: mha(wq=torch_tensor())),
    wrong("wo has dtype float32; expected float64 to match x", lambda: mha(wo=np.ones((12, 7), np.float32))),
    wrong("dout has dtype float32; expected float64", lambda: mha(backward=True, dout=np.ones((2, 5, 7), "f"))),
    wrong("dout has shape (2, 5, 6); expected (..., T, Do) = (2, 5, 7)",
          lambda: mha(backward=True, dout=np.ones((2, 5, 6)))),
    wrong("x has shape (4,); expected (..., T, D)", lambda: mha(x=ONE)),
    wrong("wq has shape (5, 16); expected (D, Hq*d) = (6, *)", lambda: mha(wq=np.ones((5, 16)))),
    wrong("wq has shape (6, 15); expected a number of columns", lambda: mha(wq=np.ones((6, 15)))),
    wrong("wk has shape (6, 9); expected (Dc, Hkv*d) = (6, 8)", lambda: mha(wk=np.ones((6, 9)))),
    wrong("wv has shape (6, 5); expected a number of columns", lambda: mha(wv=np.ones((6, 5)))),
    wrong("wv has shape (6,); expected (Dc, Hkv*dv) = (6, *)", lambda: mha(wv=np.ones(6))),
    wrong("wo has shape (11, 7); expected (Hq*dv, Do) = (12, *)", lambda: mha(wo=np.ones((11, 7)))),
    wrong("context has shape (3, 5, 6); expected (..., Tk, Dc) = (2, *, *)", lambda: mha(context=np.ones((3, 5, 6)))),
    wrong("num_heads is 0; expected an int >= 1", lambda: mha(num_heads=0)),
    wrong("num_heads is True; expected an int >= 1", lambda: mha(num_heads=True)),
    wrong("num_kv_heads is 3; expected a divisor of num_heads = 4", lambda: mha(num_kv_heads=3)),
    wrong("rope is ['theta']; expected None or a mapping", lambda: mha(rope={"theta": 1})),
    wrong("rope is True; expected None or a mapping", lambda: mha(rope=True)),
    wrong("rope has context_positions; expected", lambda: mha(rope={"context_positions": [0] * 5})),
    wrong("positions has shape (4,); expected", lambda: mha(rope={"positions": [0] * 4})),
    wrong("wq has shape (6, 12), heads of 3; expected an even number",
          lambda: mha(wq=np.ones((6, 12)), wk=np.ones((6, 6)), rope={})),
    wrong("layout is 'bhtd'; expected not to be passed", lambda: mha(layout="bhtd")),
    wrong("return_lse is True; expected not to be passed", lambda: mha(return_lse=True)),
    wrong("saved is a tuple; expected what return_saved=True", lambda: mha(backward=True, saved=())),
    wrong("window is -1; expected", lambda: mha(window=-1)),
    wrong("gain has shape (3,); expected (D,) = (4,)", lambda: layers.rms_norm(X, np.ones(3))),
    wrong("x has shape (3, 0); expected", lambda: layers.rms_norm(np.ones((3, 0)), np.ones(0))),
    wrong("eps is -1; expected a finite number > 0", lambda: layers.rms_norm(X, ONE, -1)),
    wrong("dout has shape (4,); expected the shape of x = (3, 4)", lambda: layers.rms_norm_backward(ONE, X, ONE)),
    wrong("dout has shape (4,); expected the shape of x = (3, 4)", lambda: layers.gelu_backward(ONE, X)),
    wrong("params is list; expected a mapping with the keys norm1", lambda: layers.gpt_block(X, [], 2)),
    wrong("params is ['norm1', 'norm2', 'w1', 'wk'", lambda: gpt(params={"w2": None})),
    wrong("w2 has shape (3, 4); expected (F, D) = (4, 4)", lambda: gpt(params={"w2": np.ones((3, 4))})),
    wrong("wo has shape (4, 3); expected (Hq*dv, D) = (*, 4)", lambda: gpt(params={"wo": np.ones((4, 3))})),
    wrong("w1 has dtype float32; expected float64 to match x", lambda: gpt(params={"w1": np.ones((4, 4), "f")})),
    wrong("dout has shape (4,); expected the shape of x = (3, 4)", lambda: gpt(backward=True, dout=ONE)),
    wrong("saved is a tuple; expected what return_saved=True", lambda: gpt(backward=True, saved=())),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_a_wrong_call_names_the_argument(call, message):
    with pytest.raises(rf.ProblemError) as error:
        call()
    assert message in str(error.value)


@pytest.mark.parametrize("name", [name for name in layers.__all__ if name[0].islower()])
def test_docstrings_are_contracts(name):
    """numpydoc sections: what goes in, what comes out, and an example that the doctest run executes."""
    text = inspect.getdoc(getattr(layers, name))
    for section in ("Parameters\n---", "Returns\n---", "Examples\n---", ">>> "):
        assert section in text, section
    for parameter in inspect.signature(getattr(layers, name)).parameters:
        assert parameter in text, parameter


# ---- arrays of another library ---------------------------------------------------------------------


class Device:
    """An array on a device that does not exist: NumPy can neither read it nor compute with it."""

    __module__ = "cupy"
    __array_ufunc__ = None

    def __init__(self, array):
        self.host = array

    def __array__(self, *_):
        raise TypeError("an implicit copy to the host")

    def __getattr__(self, name):
        if name.startswith("__"):  # the protocols by which NumPy would look inside
            raise AttributeError(name)
        if name in ("shape", "dtype", "ndim", "size", "itemsize"):
            return getattr(self.host, name)
        return wrapped(getattr(self.host, name))

    @property
    def T(self):
        return Device(self.host.T)

    def __getitem__(self, index):
        return Device(self.host[index])

    def __setitem__(self, index, value):
        self.host[index] = unwrapped(value)


def unwrapped(value):
    assert not isinstance(value, np.ndarray), "a host array in a computation on the device"
    return value.host if isinstance(value, Device) else value


def wrapped(function):
    def call(*args, **options):
        out = function(*map(unwrapped, args), **{name: unwrapped(value) for name, value in options.items()})
        return Device(out) if isinstance(out, (np.ndarray, np.generic)) else out

    return call


for name in ("add", "sub", "mul", "truediv", "matmul", "pow"):
    function = getattr(operator, f"__{name}__")
    setattr(Device, f"__{name}__", wrapped(function))
    setattr(Device, f"__r{name}__", wrapped(lambda a, b, function=function: function(b, a)))
Device.__neg__ = wrapped(operator.neg)


class Library:
    """Its namespace: NumPy's functions of device arrays. Only asarray takes one from the host, and counts."""

    float32, float64 = np.float32, np.float64

    def __init__(self):
        self.copies = 0

    def __getattr__(self, name):
        return wrapped(getattr(np, name))

    def asarray(self, array):
        if isinstance(array, Device):
            return array
        self.copies += 1
        return Device(np.asarray(array))


def on_device(value):
    if isinstance(value, dict):
        return {name: on_device(array) for name, array in value.items()}
    return Device(value) if isinstance(value, np.ndarray) else value


def device_calls(rng):
    """Functions of a move to a device, each of which calls a layer."""
    args, dout = case(rng, Tk=6), rng.standard_normal((2, 5, 7))
    own, params, x = case(rng), block(rng), rng.standard_normal((2, 2, 3, 4))
    heads = dict(num_heads=4, num_kv_heads=2, rope={"positions": np.arange(5)}, causal=True)
    return {
        "rope": lambda to: [layers.rope(to(x[0]), to(np.arange(3))), layers.rope_backward(to(x[1]), range(3))],
        "cross": lambda to: layers.multi_head_attention_backward(to(dout), **to(args), **heads),
        "self": lambda to: layers.multi_head_attention_backward(to(dout), **to(own), **heads),
        "forward": lambda to: [layers.multi_head_attention(**to(own), **heads)],
        "block": lambda to: [layers.gpt_block(to(x[0]), to(params), 2, 1)],
        "block backward": lambda to: flat(layers.gpt_block_backward(to(x[1]), to(x[0]), to(params), 2, 1)),
    }


def flat(result):
    dx, gradients = result
    return [dx, *gradients.values()]


CALLS = ("rope", "cross", "self", "forward", "block", "block backward")


@pytest.mark.parametrize("name", CALLS)
def test_a_layer_stays_on_the_device(name, rng):
    """Every operation goes through the namespace or a device array, with no host array in it."""
    call = device_calls(rng)[name]
    expected = call(lambda value: value)
    library = Library()

    def elsewhere(function):
        def run(*args, **options):
            host = [a.host for a in args]
            result = function(*host, **options)
            return tuple(map(Device, result))

        return run

    replaced = {name: elsewhere(getattr(rf, name)) for name in ("attention", "attention_backward")}
    with (
        mock.patch.multiple("rawflash.layers.multi_head", **replaced),
        mock.patch.object(
            checks, "arrays", SimpleNamespace(kind_of=rf.arrays.kind_of, require_cupy=lambda: library)
        ),
    ):
        results = call(on_device)
    assert (library.copies == 0) == name.startswith("block")  # the others are given positions of the host
    assert len(results) == len(expected)
    for result, host in zip(results, expected, strict=True):
        assert type(result) is Device
        close(result.host, host)


def test_the_check_of_the_device_can_fail():
    a = Device(np.ones(3))
    for wrong_call in (
        lambda: np.asarray(a),
        lambda: np.exp(a),
        lambda: a * np.ones(3),
        lambda: np.ones(3) * a,
        lambda: Library().exp(np.ones(3)),
    ):
        with pytest.raises((TypeError, AssertionError)):
            wrong_call()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CALLS)
def test_cupy_is_numpy(name, dtype, rng):
    call = device_calls(rng)[name]

    def to(value, move):
        if isinstance(value, dict):
            return {name: to(array, move) for name, array in value.items()}
        if not isinstance(value, np.ndarray):
            return value
        return move(value.astype(dtype) if value.dtype == np.float64 else value)

    import cupy

    results = call(lambda value: to(value, to_cupy))
    for result, host in zip(results, call(lambda value: to(value, lambda array: array)), strict=True):
        assert type(result) is cupy.ndarray and result.dtype == host.dtype
        bound = 1e-12 if dtype == "float64" else 64 * np.finfo(np.float32).eps
        np.testing.assert_allclose(to_host(result), host, rtol=0, atol=bound * max(1.0, np.abs(host).max()))


def test_saved_values_of_another_call_are_refused():
    rng = np.random.default_rng(0)
    x, *weights = rng.standard_normal((5, 8, 8))
    attend, gradient = layers.multi_head_attention, layers.multi_head_attention_backward
    out, saved = attend(x, *weights, num_heads=2, return_saved=True)
    for other, heads in ((x, 4), (x[:5], 2)):
        with pytest.raises(rf.ProblemError, match="saved"):
            gradient(out[: len(other)], other, *weights, num_heads=heads, saved=saved)
    params = dict(zip(("wq", "wk", "wv", "wo"), weights, strict=True))
    params |= {"norm1": np.ones(8), "norm2": np.ones(8), "w1": x, "w2": x}
    out, saved = layers.gpt_block(x, params, 2, return_saved=True)
    with pytest.raises(rf.ProblemError, match="saved"):
        layers.gpt_block_backward(out[:5], x[:5], params, 2, saved=saved)
    with pytest.raises(rf.ProblemError, match="wrt is not an option of gpt_block_backward"):
        layers.gpt_block_backward(out, x, params, 2, saved=saved, wrt=("bias",))


@pytest.mark.parametrize("rows", [2**14, 2**18])
def test_the_gradient_of_a_gain_is_a_sum_over_many_rows(rows):
    """Equal terms, whose rounding errors have one sign; and random ones."""
    rng = np.random.default_rng(0)
    for x, dout in ((np.ones((rows, 2)), np.full((rows, 2), 1 / 3)), abs(rng.standard_normal((2, rows, 4)))):
        x, dout = x.astype(np.float32), dout.astype(np.float32)
        _, found = layers.rms_norm_backward(dout, x, np.ones(x.shape[1], np.float32))
        _, wanted = layers.rms_norm_backward(dout.astype(float), x.astype(float), np.ones(x.shape[1]))
        np.testing.assert_allclose(found, wanted, rtol=3e-7)
        assert found.dtype == np.float32


@pytest.mark.parametrize("options", [dict(context=np.zeros((3, 8))), dict(lse=1), dict(casual=True)])
def test_a_block_takes_options_of_attention_only(options):
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal((8, 8)) for name in ("wq", "wk", "wv", "wo", "w1", "w2")}
    params |= {"norm1": np.ones(8), "norm2": np.ones(8)}
    x = rng.standard_normal((3, 8))
    out, saved = layers.gpt_block(x, params, 2, return_saved=True)
    for call in (lambda: layers.gpt_block(x, params, 2, **options),
                 lambda: layers.gpt_block_backward(out, x, params, 2, **options),
                 lambda: layers.gpt_block_backward(out, x, params, 2, saved=saved, **options)):  # fmt: skip
        with pytest.raises(rf.ProblemError, match=next(iter(options))):
            call()
    wider = params | {"w1": np.zeros((8, 12)), "w2": np.zeros((12, 8))}
    with pytest.raises(rf.ProblemError, match="saved.u"):
        layers.gpt_block_backward(out, x, wider, 2, saved=saved)
