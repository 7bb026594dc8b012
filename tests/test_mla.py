"""Latent attention against dense matrices written like its equations, and decoding from the cache against it."""

import math

import numpy as np
import pytest
from gpu import to_cupy, to_host
from hypothesis import given
from hypothesis import strategies as st

import rawflash as rf
from rawflash.layers import (
    MLASaved,
    append_latent,
    cache_size,
    mla,
    mla_attention,
    mla_attention_backward,
    mla_decode,
    multi_head_attention,
)

SLOW = dict(backend="numpy_tiled")  # nothing to compile
B, T, D, H, R, M, DN, P, DV = 2, 7, 5, 3, 4, 6, 4, 2, 5  # all that may differ does


def make(rng, D=D, H=H, r=R, m=M, d_nope=DN, p=P, dv=DV, dtype=np.float64):
    """Weights whose products are near one, so that the softmax is neither flat nor a maximum."""
    shapes = {
        "w_dq": (D, r), "w_uq": (r, H * d_nope), "w_qr": (r, H * p), "w_dkv": (D, m),
        "w_kr": (D, p), "w_uk": (m, H * d_nope), "w_uv": (m, H * dv), "w_o": (H * dv, D),
    }  # fmt: skip
    return {name: (rng.standard_normal(s) / math.sqrt(max(s[0], 1))).astype(dtype) for name, s in shapes.items()}


def turn(x, positions, base=10000.0, convention="half", back=False):
    """The rotation as a product of complex numbers, x (T, p)."""
    half = x.shape[1] // 2
    angle = np.outer(positions, base ** (-np.arange(half) / max(half, 1)))
    pairs = (slice(half), slice(half, None)) if convention == "half" else (slice(0, None, 2), slice(1, None, 2))
    turned = (x[:, pairs[0]] + 1j * x[:, pairs[1]]) * np.exp(-1j * angle if back else 1j * angle)
    out = np.empty_like(x)
    out[:, pairs[0]], out[:, pairs[1]] = turned.real, turned.imag
    return out


def of_batch(options, b):
    """Options of sequence b alone."""
    return {name: [value[b]] if name.endswith("_lengths") else value for name, value in options.items()}


def dense(x, w, H, positions=None, base=10000.0, convention="half", dout=None, **options):
    """Latent attention of x (B, T, D) and, with ``dout``, its gradients: a sequence, a head, a matrix at a time."""
    options = {name: value for name, value in options.items() if name != "backend"}
    heads = {n: np.hsplit(w[n], H) for n in ("w_uq", "w_qr", "w_uk", "w_uv")} | {"w_o": np.vsplit(w["w_o"], H)}
    d_nope = heads["w_uq"][0].shape[1]
    positions = np.broadcast_to(np.arange(x.shape[1]) if positions is None else positions, x.shape[:2])
    out, dx = np.zeros_like(x), np.zeros_like(x)
    grads = {name: np.zeros_like(weight) for name, weight in w.items()}
    grad_heads = {n: np.hsplit(grads[n], H) for n in ("w_uq", "w_qr", "w_uk", "w_uv")}  # views
    grad_heads["w_o"] = np.vsplit(grads["w_o"], H)
    for b, X in enumerate(x):
        turned = dict(positions=positions[b], base=base, convention=convention)
        how = of_batch(options, b)
        C, Z, KR = X @ w["w_dq"], X @ w["w_dkv"], turn(X @ w["w_kr"], **turned)
        dC, dZ, dKR = np.zeros_like(C), np.zeros_like(Z), np.zeros_like(KR)
        for h in range(H):
            uq, qr, uk, uv, wo = (heads[n][h] for n in ("w_uq", "w_qr", "w_uk", "w_uv", "w_o"))
            Q = np.hstack([C @ uq, turn(C @ qr, **turned)])[None, None]
            K, V = np.hstack([Z @ uk, KR])[None, None], (Z @ uv)[None, None]
            O, lse = rf.oracle.attention(Q, K, V, return_lse=True, **how)
            out[b] += O[0, 0] @ wo
            if dout is None:
                continue
            dO = dout[b] @ wo.T
            dQ, dK, dV = rf.oracle.attention_backward(dO[None, None], Q, K, V, O, lse, **how)
            dQ, dK, dV = dQ[0, 0], dK[0, 0], dV[0, 0]
            dQR = turn(dQ[:, d_nope:], **turned, back=True)
            g = {n: grad_heads[n][h] for n in grad_heads}
            g["w_o"] += O[0, 0].T @ dout[b]
            g["w_uq"] += C.T @ dQ[:, :d_nope]
            g["w_qr"] += C.T @ dQR
            g["w_uk"] += Z.T @ dK[:, :d_nope]
            g["w_uv"] += Z.T @ dV
            dC += dQ[:, :d_nope] @ uq.T + dQR @ qr.T
            dZ += dK[:, :d_nope] @ uk.T + dV @ uv.T
            dKR += turn(dK[:, d_nope:], **turned, back=True)
        grads["w_dq"] += X.T @ dC
        grads["w_dkv"] += X.T @ dZ
        grads["w_kr"] += X.T @ dKR
        dx[b] = dC @ w["w_dq"].T + dZ @ w["w_dkv"].T + dKR @ w["w_kr"].T
    return out if dout is None else (out, dx, grads)


def close(a, b, bound=1e-12):
    """Within ``bound`` of the largest element: sums cancel, and their errors are of the size of their terms."""
    np.testing.assert_allclose(a, b, rtol=0, atol=bound * max(1.0, np.abs(b).max(initial=0.0)))


# ---- forward and backward


OPTIONS = {
    "plain": dict(),
    "causal": dict(causal=True),
    "interleaved": dict(causal=True, convention="interleaved", base=100.0),
    "positions": dict(positions=np.array([[3, 1, 4, 1, 5, 9, 2], [0, 1, 2, 3, 4, 5, 60000]])),
    "window, softcap, scale": dict(window=(3, 1), softcap=2.0, scale=0.9),
    "padding": dict(causal=True, q_lengths=[7, 4], kv_lengths=[7, 4]),
    "rows without keys": dict(causal=True, q_offset=-2),
}


@pytest.mark.parametrize("how", OPTIONS.values(), ids=OPTIONS)
def test_forward_and_gradients_are_the_dense_ones(how, rng):
    w, x, dout = make(rng), *rng.standard_normal((2, B, T, D))
    expected, dx, grads = dense(x, w, H, dout=dout, **how)
    out, saved = mla_attention(x, w, H, return_saved=True, **how, **SLOW)
    close(out, expected)
    for kept in (saved, None):
        got_dx, got = mla_attention_backward(dout, x, w, H, saved=kept, **how, **SLOW)
        close(got_dx, dx)
        assert list(got) == list(w)
        for name in w:
            assert got[name].dtype == w[name].dtype
            close(got[name], grads[name])


def test_gradients_are_central_differences(rng):
    """Truncation step^2 |f'''| / 6 is about 1e-10 times a sum of some numbers near one; rounding 1e-16 |f| / 1e-5."""
    w, x, dout = make(rng), *rng.standard_normal((2, B, T, D))
    how = dict(causal=True, positions=[0, 2, 3, 5, 8, 9, 10], base=50.0, **SLOW)
    dx, grads = mla_attention_backward(dout, x, w, H, **how)

    def loss(x, w):
        return float((mla_attention(x, w, H, **how) * dout).sum())

    np.testing.assert_allclose(dx, rf.oracle.central_differences(lambda x: loss(x, w), x), rtol=0, atol=1e-8)
    for name in w:
        differences = rf.oracle.central_differences(lambda v, name=name: loss(x, w | {name: v}), w[name])
        np.testing.assert_allclose(grads[name], differences, rtol=0, atol=1e-8, err_msg=name)


def test_gradients_of_bias_and_sinks_come_behind(rng):
    w, x, dout = make(rng), *rng.standard_normal((2, B, T, D))
    options = dict(bias=rng.standard_normal((H, T, T)), sinks=rng.standard_normal(H), **SLOW)
    *_, dbias, dsinks = mla_attention_backward(dout, x, w, H, wrt=("bias", "sinks"), **options)
    for name, gradient in (("bias", dbias), ("sinks", dsinks)):
        differences = rf.oracle.central_differences(
            lambda v, name=name: float((mla_attention(x, w, H, **options | {name: v}) * dout).sum()), options[name]
        )
        np.testing.assert_allclose(gradient, differences, rtol=0, atol=1e-8, err_msg=name)


def test_any_leading_axes(rng):
    w, x, dout = make(rng), *rng.standard_normal((2, 2, 3, T, D))
    out = mla_attention(x, w, H, causal=True, **SLOW)
    dx, grads = mla_attention_backward(dout, x, w, H, causal=True, **SLOW)
    total = {name: 0 for name in w}
    for index in np.ndindex(2, 3):
        close(out[index], mla_attention(x[index], w, H, causal=True, **SLOW))
        one_dx, one = mla_attention_backward(dout[index], x[index], w, H, causal=True, **SLOW)
        close(dx[index], one_dx)
        total = {name: total[name] + one[name] for name in w}
    for name in w:
        close(grads[name], total[name])


def test_full_rank_without_rotation_is_multi_head_attention(rng):
    """With identities for the way down and nothing rotated (p = 0), the ways up are the projections of heads."""
    w, x = make(rng, D=12, r=12, m=12, p=0), rng.standard_normal((B, T, 12))
    w["w_dq"] = w["w_dkv"] = np.eye(12)
    expected = multi_head_attention(x, w["w_uq"], w["w_uk"], w["w_uv"], w["w_o"], H, causal=True, **SLOW)
    close(mla_attention(x, w, H, causal=True, **SLOW), expected)


def test_distance_is_all_that_rotation_shows(rng):
    """All positions moved by one number: the same scores. Stretched: others."""
    w, x = make(rng), rng.standard_normal((B, T, D))
    here = mla_attention(x, w, H, causal=True, **SLOW)
    close(mla_attention(x, w, H, positions=np.arange(T) + 1000, causal=True, **SLOW), here, 1e-11)
    assert np.abs(mla_attention(x, w, H, positions=2 * np.arange(T), causal=True, **SLOW) - here).max() > 1e-3


def test_default_backend_and_float32(rng):
    """float32 to its rounding: the largest error of the dense formula on rounded arguments is a few 1e-7."""
    w, x, dout = make(rng), *rng.standard_normal((2, B, T, D))
    out, dx, grads = dense(x, w, H, dout=dout, causal=True)
    low = {name: weight.astype(np.float32) for name, weight in w.items()}
    x, dout = x.astype(np.float32), dout.astype(np.float32)
    got = mla_attention(x, low, H, causal=True)
    got_dx, got_grads = mla_attention_backward(dout, x, low, H, causal=True)
    assert got.dtype == got_dx.dtype == np.float32
    close(got, out, 5e-6)
    close(got_dx, dx, 5e-6)
    for name in w:
        assert got_grads[name].dtype == np.float32
        close(got_grads[name], grads[name], 5e-6)


# ---- decoding


def filled(x, w, Tmax, lengths=None, **how):
    """The cache after a prompt; what was not written is NaN."""
    width = w["w_dkv"].shape[1] + w["w_kr"].shape[1]
    cache = np.full((x.shape[0], Tmax, width), np.nan)
    append_latent(cache, x, w, np.zeros(x.shape[0], int) if lengths is None else lengths, **how)
    return cache


@pytest.mark.parametrize("backend", ["numpy_tiled", None])
def test_decoding_token_by_token_is_prefill(backend, rng):
    w, x = make(rng), rng.standard_normal((B, T, D))
    whole = mla_attention(x, w, H, causal=True, **SLOW)
    cache, lengths = np.full((B, T + 2, M + P), np.nan), np.zeros(B, np.int64)
    for t in range(T):
        append_latent(cache, x[:, t : t + 1], w, lengths)
        np.testing.assert_array_equal(lengths, t)  # is the caller's to count
        lengths = lengths + 1
        close(mla_decode(x[:, t : t + 1], w, cache, lengths, H, backend=backend), whole[:, t : t + 1])
    assert np.isnan(cache[:, T:]).all() and not np.isnan(cache[:, :T]).any()


def test_sequences_of_different_lengths(rng):
    """Each sequence's new tokens are at its own positions and see its own keys: the others' values change nothing."""
    w, x = make(rng), rng.standard_normal((3, 9, D))
    lengths, new = np.array([6, 0, 3]), 2
    cache = np.full((3, 11, M + P), np.nan)
    for b, n in enumerate(lengths):
        append_latent(cache[b : b + 1], x[b : b + 1, :n], w, [0])
    now = np.stack([x[b, n : n + new] for b, n in enumerate(lengths)])
    append_latent(cache, now, w, lengths)
    out = mla_decode(now, w, cache, lengths + new, H, causal=True, **SLOW)
    for b, n in enumerate(lengths):
        close(out[b], mla_attention(x[b, : n + new], w, H, causal=True, **SLOW)[n:])


def paged(cache, block, rng):
    """The same cache in blocks anywhere in a pool, and the table."""
    sequences, Tmax, width = cache.shape
    count = -(-Tmax // block)
    table = rng.permutation(sequences * count + 2)[: sequences * count].reshape(sequences, count)
    pool = np.full((sequences * count + 2, block, width), np.nan)
    padded = np.full((sequences, count * block, width), np.nan)
    padded[:, :Tmax] = cache
    pool[table] = padded.reshape(sequences, count, block, width)
    return pool, table


def test_paged_cache_is_the_contiguous_one(rng):
    w, x = make(rng), rng.standard_normal((B, 5, D))
    pool, table = paged(np.full((B, 10, M + P), np.nan), 4, rng)
    append_latent(pool, x, w, [0, 0], block_table=table)
    now, lengths = rng.standard_normal((B, 2, D)), np.array([5, 3])
    append_latent(pool, now, w, lengths, block_table=table)
    cache = filled(x, w, 10)
    append_latent(cache, now, w, lengths)
    expected = mla_decode(now, w, cache, lengths + 2, H, causal=True, **SLOW)
    unused = table.copy()
    unused[:, 2] = 10**6  # past the last block that is used
    got = mla_decode(now, w, pool, lengths + 2, H, block_table=unused, causal=True, **SLOW)
    close(got, expected)


def test_values_are_a_view_of_the_keys(monkeypatch, rng):
    """One head, m + p wide, m of them the values, all in the cache's memory: that is what absorption is for."""
    w, x, seen = make(rng), rng.standard_normal((B, T, D)), []
    cache = filled(x, w, T + 1)

    def spy(q, k_cache, v_cache, kv_lengths, **options):
        seen.extend((k_cache, v_cache))
        assert q.shape == (B, 1, H, M + P) and k_cache.shape == (B, T + 1, 1, M + P) and v_cache.shape[-1] == M
        return decode(q, k_cache, v_cache, kv_lengths, **options)

    decode = mla.attention_decode
    monkeypatch.setattr(mla, "attention_decode", spy)
    mla_decode(x[:, -1:], w, cache, [T, T], H, **SLOW)
    assert len(seen) == 2
    for array in seen:
        assert array.ctypes.data == cache.ctypes.data and np.shares_memory(array, cache)


@st.composite
def decoding(draw):
    """Sizes, and how a sequence is cut into a prompt and steps."""
    size = st.integers(1, 5)
    sizes = dict(D=draw(size), H=draw(size), r=draw(size), m=draw(size), d_nope=draw(size), dv=draw(size))
    sizes["p"] = 2 * draw(st.integers(1, 3))
    steps = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    how = dict(convention=draw(st.sampled_from(["half", "interleaved"])), base=draw(st.sampled_from([10.0, 1e4])))
    options = draw(st.sampled_from([{}, dict(softcap=1.5), dict(scale=0.3), dict(window=(2, 0))]))
    return sizes, draw(st.integers(1, 3)), steps, how, options, draw(st.integers(0, 2**32 - 1))


@given(decoding())
def test_any_cut_into_steps_is_the_whole(drawn):
    """absorbed = unabsorbed, in steps = at once, and both are the dense formula."""
    sizes, batch, steps, how, options, seed = drawn
    rng = np.random.default_rng(seed)
    w, x = make(rng, **sizes), rng.standard_normal((batch, sum(steps), sizes["D"]))
    expected = dense(x, w, sizes["H"], causal=True, **how, **options)
    close(mla_attention(x, w, sizes["H"], causal=True, **how, **options, **SLOW), expected)
    cache, done = np.full((batch, sum(steps), sizes["m"] + sizes["p"]), np.nan), 0
    for n in steps:
        now = slice(done, done + n)
        append_latent(cache, x[:, now], w, [done] * batch, **how)
        done += n
        got = mla_decode(x[:, now], w, cache, [done] * batch, sizes["H"], causal=True, **how, **options, **SLOW)
        close(got, expected[:, now])


@given(decoding(), st.integers(-1000, 1000))
def test_gradients_of_any_shape(drawn, shift):
    """Against the dense ones; with the positions moved, the same but for the rounding of larger angles."""
    sizes, batch, steps, how, options, seed = drawn
    rng = np.random.default_rng(seed)
    w, (x, dout) = make(rng, **sizes), rng.standard_normal((2, batch, sum(steps), sizes["D"]))
    _, dx, grads = dense(x, w, sizes["H"], dout=dout, causal=True, **how, **options)
    for positions, bound in ((None, 1e-12), (np.arange(sum(steps)) + shift, 1e-11)):
        got_dx, got = mla_attention_backward(
            dout, x, w, sizes["H"], positions=positions, causal=True, **how, **options, **SLOW
        )
        close(got_dx, dx, bound)
        for name in w:
            close(got[name], grads[name], bound)


def test_no_sequences_and_no_tokens(rng):
    w = make(rng)
    for shape in ((0, T, D), (B, 0, D)):
        x = np.zeros(shape)
        assert mla_attention(x, w, H, **SLOW).shape == shape
        dx, grads = mla_attention_backward(x, x, w, H, **SLOW)
        assert dx.shape == shape and not any(g.any() for g in grads.values())
        cache = np.full((shape[0], 3, M + P), np.nan)
        append_latent(cache, x, w, np.zeros(shape[0], int))
        assert mla_decode(x, w, cache, np.full(shape[0], shape[1] % T), H, **SLOW).shape == shape


# ---- bad input


def call(name, rng, **changes):
    """A good call of each function with arguments replaced; a weight by its name, None: left out."""
    w, x = make(rng), rng.standard_normal((B, T, D))
    for weight in [n for n in changes if n.startswith("w_")]:
        w[weight] = changes.pop(weight)
        if w[weight] is None:
            del w[weight]
    cache = np.zeros((B, T, M + P))
    functions = {
        "attention": (mla_attention, dict(x=x, params=w, num_heads=H)),
        "backward": (mla_attention_backward, dict(dout=x, x=x, params=w, num_heads=H)),
        "append": (append_latent, dict(latent_cache=cache, x_new=x[:, :2], params=w, kv_lengths=[0, 5])),
        "decode": (mla_decode, dict(x_new=x[:, :1], params=w, latent_cache=cache, kv_lengths=[7, 2], num_heads=H)),
    }
    function, arguments = functions[name]
    return function(**arguments | changes)


BAD = [
    ("attention", dict(w_uk=None), "params has no 'w_uk'; expected the weights w_dq, w_uq"),
    ("attention", dict(w_k=np.ones((D, 2))), "params has 'w_k'; expected the weights w_dq"),
    ("attention", dict(params=[1]), "params is a list; expected a dict of the weights"),
    ("attention", dict(x=np.ones(D)), r"x has shape \(5,\); expected \(\.\.\., T, D\)"),
    ("attention", dict(x=np.ones((B, T, D), np.float32)), "w_dq has dtype float64; expected float32 to match x"),
    ("attention", dict(x=[[1.0]]), "x is a list; expected a NumPy or CuPy array"),
    ("attention", dict(num_heads=0), "num_heads is 0; expected an int >= 1"),
    ("attention", dict(num_heads=5), r"w_uq has shape \(4, 12\); .* that num_heads = 5 divides"),
    ("attention", dict(w_uv=np.ones((M, 16))), r"w_uv has shape \(6, 16\); .* that num_heads = 3 divides"),
    ("attention", dict(w_dq=np.ones((D + 1, R))), r"w_dq has shape \(6, 4\); expected \(D, r\) = \(5, \*\)"),
    ("attention", dict(w_dkv=np.ones(D)), r"w_dkv has shape \(5,\); expected \(D, m\) = \(5, \*\)"),
    ("attention", dict(w_uq=np.ones((R + 1, 12))), r"w_uq has shape \(5, 12\); expected \(r, H\*d_nope\) = \(4, \*\)"),
    ("attention", dict(w_qr=np.ones((R, 5))), r"w_qr has shape \(4, 5\); expected \(r, H\*p\) = \(4, 6\)"),
    ("attention", dict(w_uk=np.ones((M, 9))), r"w_uk has shape \(6, 9\); expected \(m, H\*d_nope\) = \(6, 12\)"),
    ("attention", dict(w_o=np.ones((15, 4))), r"w_o has shape \(15, 4\); expected \(H\*dv, D\) = \(15, 5\)"),
    ("attention", dict(w_kr=np.ones((D, 3))), r"w_kr has shape \(5, 3\); expected \(D, p\) with an even p"),
    ("attention", dict(positions=[0, 1]), r"positions has shape \(2,\); expected \(T,\) or the leading axes of x"),
    ("attention", dict(layout="bhtd"), "layout is 'bhtd'; expected not to be passed to a layer"),
    ("attention", dict(causl=True), "unknown option 'causl'; did you mean 'causal'"),
    ("attention", dict(base=-1), "base is -1; expected a finite number > 0"),
    ("backward", dict(dout=np.ones((B, T, 6))), r"dout has shape \(2, 7, 6\); expected the shape of x = \(2, 7, 5\)"),
    ("backward", dict(saved=()), "saved is a tuple; expected what return_saved=True returned"),
    ("backward", dict(return_lse=True), "return_lse is True; expected not to be passed"),
    ("append", dict(x_new=np.ones((2, D))), r"x_new has shape \(2, 5\); expected \(B, T, D\)"),
    ("append", dict(w_kr=None), "params has no 'w_kr'"),
    ("append", dict(latent_cache=np.ones((B, T, M))), r"latent_cache has shape \(2, 7, 6\); .*m\+p\) = \(2, \*, 8\)"),
    ("append", dict(latent_cache=np.ones((B, T, M + P), "f4")), "latent_cache has dtype float32; expected float64"),
    ("append", dict(kv_lengths=[0, 6]), "kv_lengths"),  # past the end
    ("append", dict(kv_lengths=[0, -1]), "kv_lengths"),
    ("append", dict(kv_lengths=[0, 1, 2]), r"kv_lengths has shape \(3,\); expected \(B,\)"),
    ("append", dict(kv_lengths=3), r"kv_lengths is 3; expected an int array, \(B,\)"),
    ("decode", dict(x_new=np.ones((1, 2, 2, D))), r"x_new has shape \(1, 2, 2, 5\); expected \(B, T, D\)"),
    ("decode", dict(latent_cache=np.ones((3, T, M + P))), r"latent_cache has shape .* = \(2, \*, 8\)"),
    ("decode", dict(latent_cache=np.ones((9, 4, M)), block_table=np.zeros((2, 2), int)),
     r"latent_cache has shape \(9, 4, 6\); expected \(num_blocks, block, m\+p\) = \(\*, \*, 8\)"),
    ("decode", dict(kv_lengths=[8, 1]), "kv_lengths"),
    ("decode", dict(kv_lengths=[1.0, 1.0]), "kv_lengths has dtype float64; expected integers"),
    ("decode", dict(out=np.ones((B, 1, D))), "(?s)out is .*; expected not to be passed to a layer"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), BAD, ids=range(len(BAD)))
def test_bad_input_is_named(name, changes, message, rng):
    call(name, rng)  # as it is, the call is good
    with pytest.raises(rf.ProblemError, match=message):
        call(name, rng, **dict(changes))


def test_an_append_that_raises_writes_nothing(rng):
    w, x = make(rng), rng.standard_normal((B, 2, D))
    cache = np.zeros((B, 4, M + P))
    with pytest.raises(rf.ProblemError):
        append_latent(cache, x, w, [0, 3])
    assert not cache.any()


# ---- sizes of caches


def test_cache_size_is_that_of_the_arrays(rng):
    w, x = make(rng), rng.standard_normal((B, T, D))
    _, saved = mla_attention(x, w, H, return_saved=True, **SLOW)
    latent = filled(x, w, T)
    assert B * cache_size("mla", T, m=M, p=P) == latent.size
    assert B * cache_size("mla", T, m=M, p=P, dtype=np.float64) == latent.nbytes
    assert B * cache_size("mha", T, heads=H, d=DN + P, dv=DV) == saved.k.size + saved.v.size
    k = v = np.zeros((1, 4, 10, 8), np.float16)  # (B, Hkv, Tmax, d)
    assert cache_size("gqa", 10, kv_heads=4, d=8, dtype="float16") == k.nbytes + v.nbytes
    assert cache_size("gqa", 10, kv_heads=4, d=8) == cache_size("mha", 10, heads=4, d=8) == 2 * 10 * 4 * 8
    assert cache_size("mla", 10, m=4, p=2, layers=3, dtype="bfloat16") == 3 * 10 * 6 * 2
    assert isinstance(saved, MLASaved)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(kind="mqa", T=1), "kind is 'mqa'; expected one of 'mha', 'gqa', 'mla'"),
        (dict(kind="mha", T=1, d=8), "heads is None; expected an int >= 0, which 'mha' has"),
        (dict(kind="gqa", T=1, d=8, kv_heads=2, heads=8), "heads is 8; expected None, 'gqa' has kv_heads and d"),
        (dict(kind="mla", T=1, m=8, p=2, dv=2), "dv is 2; expected None, 'mla' has m and p"),
        (dict(kind="mla", T=-1, m=8, p=2), "T is -1; expected an int >= 0"),
        (dict(kind="mla", T=1.5, m=8, p=2), "T is 1.5; expected an int >= 0"),
        (dict(kind="mla", T=1, m=8, p=2, layers=-1), "layers is -1; expected an int >= 0"),
        (dict(kind="mla", T=1, m=8, p=2, dtype="int8"), "dtype is 'int8'; expected one of float16, bfloat16"),
        (dict(kind="mla", T=1, m=8, p=2, dtype=3), "dtype is 3; expected one of float16"),
    ],
)
def test_cache_size_names_bad_input(arguments, message):
    with pytest.raises(rf.ProblemError, match=message):
        cache_size(**arguments)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("how", OPTIONS.values(), ids=OPTIONS)
def test_cupy_is_numpy(how, rng):
    w, x, dout = make(rng), *rng.standard_normal((2, B, T, D))
    out, saved = mla_attention(x, w, H, return_saved=True, **how, **SLOW)
    dx, grads = mla_attention_backward(dout, x, w, H, saved=saved, **how, **SLOW)
    there = {name: to_cupy(weight) for name, weight in w.items()}
    got, kept = mla_attention(to_cupy(x), there, H, return_saved=True, **how)
    close(to_host(got), out)
    got_dx, got_grads = mla_attention_backward(to_cupy(dout), to_cupy(x), there, H, saved=kept, **how)
    close(to_host(got_dx), dx)
    for name in w:
        close(to_host(got_grads[name]), grads[name])


@pytest.mark.gpu
@pytest.mark.parametrize("lengths_there", [False, True])
def test_cupy_decodes_as_numpy(lengths_there, rng):
    w, x = make(rng), rng.standard_normal((B, T, D))
    there, x_there = {name: to_cupy(weight) for name, weight in w.items()}, to_cupy(x)
    whole = mla_attention(x, w, H, causal=True, **SLOW)
    cache = to_cupy(np.full((B, T + 2, M + P), np.nan))
    pool, table = (to_cupy(a) for a in paged(np.full((B, T + 2, M + P), np.nan), 4, rng))
    done = 0
    for n in (4, 1, 2):
        before, after = np.full(B, done), np.full(B, done + n)
        if lengths_there:
            before, after = to_cupy(before), to_cupy(after)
        now = x_there[:, done : done + n]
        append_latent(cache, now, there, before)
        append_latent(pool, now, there, before, block_table=table)
        for place in (dict(latent_cache=cache), dict(latent_cache=pool, block_table=table)):
            got = mla_decode(now, there, kv_lengths=after, num_heads=H, causal=True, **place)
            close(to_host(got), whole[:, done : done + n])
        done += n


def test_the_shared_key_of_many_heads_in_float16(rng):
    """Its gradient is a sum over heads, and no less accurate than those of other weights."""
    H, d, p, dv, m = 128, 4, 4, 4, 8
    x, w = rng.standard_normal((2, 9, D)), make(rng, H=1, m=m, d_nope=d, p=p, dv=dv)
    for name in ("w_uq", "w_qr", "w_uk", "w_uv"):  # all heads alike: errors of one sign
        w[name] = np.tile(w[name], (1, H))
    w["w_o"] = np.tile(w["w_o"], (H, 1)) / H
    half = x.astype(np.float16), {name: array.astype(np.float16) for name, array in w.items()}
    wide = half[0].astype(float), {name: array.astype(float) for name, array in half[1].items()}
    _, found = mla_attention_backward(half[0], *half, H, causal=True)
    _, wanted = mla_attention_backward(wide[0], *wide, H, causal=True)
    error = {name: abs(found[name] - wanted[name]).max() / abs(wanted[name]).max() for name in ("w_kr", "w_dkv")}
    assert error["w_kr"] < 3e-3 and found["w_kr"].dtype == np.float16, error


def test_what_was_saved_is_of_this_call(rng):
    x, w = rng.standard_normal((2, 5, D)), make(rng)
    out, saved = mla_attention(x, w, H, return_saved=True)
    _, other = mla_attention(x[:, :-1], w, H, return_saved=True)
    with pytest.raises(rf.ProblemError, match="saved.c_q"):
        mla_attention_backward(out, x, w, H, saved=other)
    with pytest.raises(rf.ProblemError, match="saved.v"):
        mla_attention_backward(out, x, w, H, saved=saved._replace(v=saved.v[..., :1]))
