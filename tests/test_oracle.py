"""The oracle is right: literal numbers, central differences, torch, and the edges of the contract."""

import numpy as np
import pytest
import tolerances
from test_arrays import DLPackOnly

import rawflash as rf
from rawflash import accuracy, oracle

INF = np.inf
GRADIENTS = ("q", "k", "v", "bias", "sinks")


def arrays(q_shape, k_shape, v_shape, seed=0, dtype=np.float64):
    """q, k, v and a dout, standard normal."""
    rng = np.random.default_rng(seed)
    dout_shape = q_shape[:-1] + v_shape[-1:]
    return [rng.standard_normal(shape).astype(dtype) for shape in (q_shape, k_shape, v_shape, dout_shape)]


# ---- literal numbers -------------------------------------------------------------------------------

# scale 1, scores log 1, log 3 and log 4: P = 1/8, 3/8, 4/8
LOG_SCORES = dict(
    q=np.array([[1.0]]), k=np.log([[1.0], [3.0], [4.0]]), v=np.array([[8.0], [16.0], [0.0]]), scale=1.0
)


def test_forward_by_hand():
    out, lse = oracle.attention(**LOG_SCORES, return_lse=True)
    np.testing.assert_allclose(out, [[7.0]], rtol=1e-15)  # 8/8 + 16 * 3/8
    np.testing.assert_allclose(lse, [np.log(8.0)], rtol=1e-15)
    assert out.dtype == lse.dtype == np.float64


def test_backward_by_hand():
    dq, dk, dv = oracle.attention_backward([[2.0]], **LOG_SCORES, o=None, lse=None)
    np.testing.assert_allclose(dv, [[0.25], [0.75], [1.0]], rtol=1e-15)  # P * 2
    # dP = 16, 32, 0; gamma = 2 * 7 = 14; dS = P * (dP - 14) = 1/4, 27/4, -7
    np.testing.assert_allclose(dk, [[0.25], [6.75], [-7.0]], rtol=1e-14)
    np.testing.assert_allclose(dq, [[6.75 * np.log(3) - 7 * np.log(4)]], rtol=1e-14)


def test_gradient_through_lse_by_hand():
    dq, dk, dv = oracle.attention_backward([[0.0]], **LOG_SCORES, o=None, lse=None, dlse=[8.0])
    np.testing.assert_allclose(dk, [[1.0], [3.0], [4.0]], rtol=1e-15)  # 8 P
    assert not dv.any()


def test_sink_by_hand():
    """A sink of log 8 doubles the denominator."""
    sink = dict(sinks=np.log([8.0]))
    out, lse = oracle.attention(**LOG_SCORES, **sink, return_lse=True)
    np.testing.assert_allclose(out, [[3.5]], rtol=1e-15)
    np.testing.assert_allclose(lse, [np.log(16.0)], rtol=1e-15)
    (dsinks,) = oracle.attention_backward(
        [[2.0]], **LOG_SCORES, **sink, o=None, lse=None, dlse=[1.0], wrt=("sinks",)
    )
    np.testing.assert_allclose(dsinks, [0.5 * (1.0 - 7.0)], rtol=1e-14)  # P_sink * (dlse - gamma)


def test_softcap_bias_and_alibi_by_hand():
    """Order of operations: cap, then bias, then ALiBi, then masking."""
    zero = np.zeros((1, 1))
    k = np.array([[0.0], [1e9]])
    _, lse = oracle.attention(np.ones((1, 1)), k, np.zeros((2, 1)), scale=1.0, softcap=2.0, return_lse=True)
    np.testing.assert_allclose(lse, [np.log(1 + np.exp(2.0))], rtol=1e-15)
    # q_offset = 3 - 1 = 2: distances 2, 1, 0; slope log 2 gives weights 1/4, 1/2, 1
    out = oracle.attention(zero, np.zeros((3, 1)), np.eye(3), alibi_slopes=np.log([2.0]))
    np.testing.assert_allclose(out, [[1 / 7, 2 / 7, 4 / 7]], rtol=1e-15)
    out = oracle.attention(
        zero,
        np.zeros((3, 1)),
        np.eye(3),
        alibi_slopes=np.log([2.0]),
        bias=np.array([[np.log(12.0), -INF, 0.0]]),
        softcap=1.0,  # caps neither the bias nor the slope
    )
    np.testing.assert_allclose(out, [[3 / 4, 0, 1 / 4]], rtol=1e-15)


def who_sees_whom(Tq, Tk, **options):
    """Which keys each row sees, as a picture: values are unit vectors, so out > 0 where visible."""
    out = oracle.attention(np.zeros((Tq, 1)), np.zeros((Tk, 1)), np.eye(Tk), **options)
    return ["".join(".x"[int(p > 0)] for p in row) for row in out]


@pytest.mark.parametrize(
    "shape, options, picture",
    [
        ((3, 3), dict(causal=True), ["x..", "xx.", "xxx"]),
        ((2, 4), dict(causal=True), ["xxx.", "xxxx"]),  # lower-right
        ((2, 4), dict(causal=True, q_offset=0), ["x...", "xx.."]),  # upper-left
        ((4, 2), dict(causal=True), ["..", "..", "x.", "xx"]),
        ((3, 3), dict(causal=True, q_offset=-1), ["...", "x..", "xx."]),
        ((4, 4), dict(window=(1, 0)), ["x...", "xx..", ".xx.", "..xx"]),
        ((4, 4), dict(window=(1, 1)), ["xx..", "xxx.", ".xxx", "..xx"]),
        ((4, 4), dict(window=(1, 1), causal=True), ["x...", "xx..", ".xx.", "..xx"]),
        ((4, 4), dict(window=(None, 1)), ["xx..", "xxx.", "xxxx", "xxxx"]),
        ((4, 4), dict(window=(0, None), q_offset=1), [".xxx", "..xx", "...x", "...."]),
        ((3, 4), dict(q_lengths=[2], kv_lengths=[3], causal=True), ["xx..", "xxx.", "...."]),  # offset 3 - 2
        ((2, 2), dict(mask=np.array([[True, False]])), ["x.", "x."]),
        ((2, 2), dict(mask=np.array([[True], [False]])), ["xx", ".."]),
        ((2, 3), dict(bias=np.array([-INF, 0.0, -1e30])), [".x.", ".x."]),
        ((1, 2), dict(bias=np.array([-1e30, -1e30])), ["xx"]),  # very low is not hidden
    ],
)
def test_visibility_pictures(shape, options, picture):
    assert who_sees_whom(*shape, **options) == picture


# ---- central differences ---------------------------------------------------------------------------

CASES = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window=(2, 1), q_offset=1),
    "softcap": dict(softcap=1.5, scale=1.0),
    "alibi": dict(alibi_slopes=np.array([0.3, 0.7, 0.1, 0.5]), causal=True),
    "alibi_batch": dict(alibi_slopes=np.array([[0.3, 0.7, 0.1, 0.5], [1.0, -0.2, 0.0, 0.4]])),
    "lengths": dict(q_lengths=[3, 0], kv_lengths=[5, 2], causal=True),
    "mask": dict(mask=np.arange(2 * 4 * 4 * 5).reshape(2, 4, 4, 5) % 3 != 0),
    "empty_rows": dict(causal=True, q_offset=-2),
    "offsets": dict(causal=True, q_offset=np.array([-1, 2])),
    "dropout": dict(dropout=0.4, seed=2**40 + 7),
    "everything": dict(
        causal=True,
        window=(3, None),
        softcap=2.0,
        alibi_slopes=np.array([0.3, 0.7, 0.1, 0.5]),
        dropout=0.3,
        seed=5,
        q_lengths=[4, 3],
        kv_lengths=[4, 5],
        scale=0.7,
        mask=np.arange(20).reshape(4, 5) % 7 != 3,
    ),
}


def check_gradients(
    inputs, options, dout, dlse, forward=oracle.attention, backward=oracle.attention_backward, extra=()
):
    """Every gradient against central differences of <dout, out> + <dlse, lse>.

    With step h the differences are off by about h^2 |f'''| / 6 + 2^-53 |f| / h; f''' is bounded by a few
    hundred for these sizes, so h = 1e-5 gives 1e-8.
    """

    def call(**changed):
        given = inputs | changed
        return forward(
            given["q"],
            given["k"],
            given["v"],
            *extra,
            return_lse=True,
            **options,
            **{name: given[name] for name in ("bias", "sinks") if name in given},
        )

    def loss(name):
        def f(x):
            out, lse = call(**{name: x})
            return (dout * out).sum() + (dlse * np.where(np.isfinite(lse), lse, 0.0)).sum()

        return f

    rest = {name: inputs[name] for name in ("bias", "sinks") if name in inputs}
    gradients = backward(
        dout,
        inputs["q"],
        inputs["k"],
        inputs["v"],
        None,
        None,
        *extra,
        dlse=dlse,
        wrt=tuple(inputs),
        **rest,
        **options,
    )
    for name, gradient in zip(inputs, gradients, strict=True):
        assert gradient.shape == inputs[name].shape and gradient.dtype == np.float64
        numeric = oracle.central_differences(loss(name), inputs[name], step=1e-5)
        np.testing.assert_allclose(gradient, numeric, atol=1e-8, rtol=1e-7, err_msg=name)


@pytest.mark.parametrize("name, layout", [*((name, "bhtd") for name in CASES), ("everything", "bthd")])
def test_gradients_match_central_differences(name, layout):
    q, k, v, dout = arrays((2, 4, 4, 3), (2, 2, 5, 3), (2, 2, 5, 2), seed=1)
    rng = np.random.default_rng(2)
    dlse = rng.standard_normal((2, 4, 4))
    inputs = dict(q=q, k=k, v=v, bias=rng.standard_normal((1, 4, 1, 5)), sinks=rng.standard_normal(4))
    if layout == "bthd":
        inputs |= {n: inputs[n].swapaxes(1, 2).copy() for n in "qkv"}
        dout = dout.swapaxes(1, 2)
    check_gradients(inputs, dict(CASES[name], layout=layout), dout, dlse)


@pytest.mark.parametrize(
    "bias_shape", [(), (5,), (4, 1), (1, 1, 5), (4, 4, 5), (2, 1, 1, 1), (2, 4, 4, 5), (1, 4, 4, 1)]
)
def test_bias_gradient_is_summed_over_broadcast_axes(bias_shape):
    q, k, v, dout = arrays((2, 4, 4, 3), (2, 2, 5, 3), (2, 2, 5, 2), seed=3)
    bias = np.random.default_rng(4).standard_normal(bias_shape)
    dlse = np.ones((2, 4, 4))
    check_gradients(dict(q=q[..., :1], k=k[..., :1], v=v, bias=bias), dict(causal=True), dout, dlse)


@pytest.mark.parametrize(
    "lead, hq, hkv", [((), None, None), ((), 2, 1), ((1,), 3, 3), ((2, 1), 2, 1), ((1, 2, 1), 2, 2)]
)
def test_gradients_for_every_number_of_axes(lead, hq, hkv):
    heads_q, heads_kv = ((), ()) if hq is None else ((hq,), (hkv,))
    q, k, v, dout = arrays(
        (*lead, *heads_q, 3, 2), (*lead, *heads_kv, 4, 2), (*lead, *heads_kv, 4, 3), seed=5
    )
    dlse = np.random.default_rng(6).standard_normal((*lead, *heads_q, 3))
    out, lse = oracle.attention(q, k, v, return_lse=True)
    assert out.shape == dout.shape and lse.shape == dlse.shape
    check_gradients(dict(q=q, k=k, v=v), dict(causal=True), dout, dlse)


@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(causal=True, q_offset=[0, 1, -1]),
        dict(dropout=0.5, seed=3),
        dict(window=(1, 1), softcap=2.0, alibi_slopes=np.array([[0.1, 0.2]] * 3)),
    ],
)
def test_varlen_gradients(options, layout):
    q, k, v, dout = arrays((2, 7, 2), (1, 8, 2), (1, 8, 3), seed=7)
    if layout == "bthd":
        q, k, v, dout = (a.swapaxes(0, 1).copy() for a in (q, k, v, dout))
    dlse = np.random.default_rng(8).standard_normal((2, 7))
    inputs = dict(q=q, k=k, v=v, sinks=np.array([0.3, -0.4]))
    check_gradients(
        inputs,
        dict(options, layout=layout),
        dout,
        dlse,
        oracle.attention_varlen,
        oracle.attention_varlen_backward,
        extra=([1, 3, 3, 6], [0, 4, 6, 7]),
    )


def test_varlen_is_dense_attention_of_each_sequence():
    q, k, v, dout = arrays((2, 7, 3), (1, 9, 3), (1, 9, 2), seed=9)
    cu_q, cu_k = [1, 4, 4, 6], [0, 3, 5, 9]
    for a, padding in ((q, [0, 6]), (dout, [0, 6])):
        a[:, padding] = np.nan
    options = dict(causal=True, softcap=3.0)
    out, lse = oracle.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **options)
    dq, dk, dv = oracle.attention_varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, **options)
    for b in range(3):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        part = (q[:, rows], k[:, keys], v[:, keys])
        part_out, part_lse = oracle.attention(*part, return_lse=True, **options)
        np.testing.assert_array_equal(out[:, rows], part_out)
        np.testing.assert_array_equal(lse[:, rows], part_lse)
        for whole, place, piece in zip(
            (dq, dk, dv),
            (rows, keys, keys),
            oracle.attention_backward(dout[:, rows], *part, None, None, **options),
            strict=True,
        ):
            np.testing.assert_array_equal(whole[:, place], piece)
    assert not out[:, [0, 6]].any() and (lse[:, [0, 6]] == -INF).all() and not dq[:, [0, 6]].any()


# ---- the edges: contract, section 4 ----------------------------------------------------------------


def test_empty_rows_are_zero_and_take_no_part():
    q, k, v, dout = arrays((2, 3, 4), (2, 3, 4), (2, 3, 4))
    mask = np.ones((2, 3, 3), bool)
    mask[0, 1] = mask[1, 2] = False
    sinks = np.array([0.5, -0.5])
    dlse = np.array([[1.0, 10.0, 2.0], [3.0, 4.0, 20.0]])
    out, lse = oracle.attention(q, k, v, mask=mask, return_lse=True)
    assert not out[0, 1].any() and lse[0, 1] == -INF and np.isfinite(out).all()
    dq, dk, dv = oracle.attention_backward(dout, q, k, v, out, lse, dlse=dlse, mask=mask)
    assert not dq[0, 1].any() and all(np.isfinite(g).all() for g in (dq, dk, dv))

    out, lse = oracle.attention(q, k, v, mask=mask, sinks=sinks, return_lse=True)
    assert not out[0, 1].any() and lse[0, 1] == 0.5 and lse[1, 2] == -0.5
    (with_dlse,) = oracle.attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, mask=mask, sinks=sinks, wrt=("sinks",)
    )
    dlse[0, 1] = dlse[1, 2] = 0.0
    (without,) = oracle.attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, mask=mask, sinks=sinks, wrt=("sinks",)
    )
    np.testing.assert_allclose(with_dlse - without, [10.0, 20.0], rtol=1e-14)


def test_a_sink_of_minus_infinity_is_no_sink():
    q, k, v, dout = arrays((1, 3, 4), (1, 2, 4), (1, 2, 4))
    options = dict(causal=True)  # row 0 sees nothing
    plain = oracle.attention(q, k, v, return_lse=True, **options)
    for a, b in zip(plain, oracle.attention(q, k, v, return_lse=True, sinks=np.array([-INF]), **options), strict=True):
        np.testing.assert_array_equal(a, b)
    (dsinks,) = oracle.attention_backward(
        dout, q, k, v, None, None, dlse=np.ones((1, 3)), sinks=np.array([-INF]), wrt=("sinks",), **options
    )
    assert dsinks == 0.0


def test_padding_is_never_read():
    q, k, v, dout = arrays((2, 2, 4, 3), (2, 2, 5, 3), (2, 2, 5, 3))
    bias = np.zeros((2, 2, 4, 5))
    mask = np.ones((2, 2, 4, 5), bool)
    dlse = np.ones((2, 2, 4))
    options = dict(q_lengths=[3, 0], kv_lengths=[4, 0], sinks=np.array([0.1, 0.2]), dropout=0.2, seed=1)

    def everything():
        given = dict(options, bias=bias, mask=mask)
        return [
            *oracle.attention(q, k, v, return_lse=True, **given),
            *oracle.attention_backward(dout, q, k, v, None, None, dlse=dlse, wrt=GRADIENTS, **given),
        ]

    clean = everything()
    for b, (rows, keys) in enumerate([(3, 4), (0, 0)]):
        q[b, :, rows:] = dout[b, :, rows:] = dlse[b, :, rows:] = bias[b, :, rows:] = np.nan
        k[b, :, keys:] = v[b, :, keys:] = INF
        bias[b, ..., keys:] = -np.nan
        mask[b, ..., keys:] = False
    for a, b in zip(clean, everything(), strict=True):
        np.testing.assert_array_equal(a, b)
    out, lse, dq, dk, dv, dbias, dsinks = clean
    assert not out[1].any() and not out[0, :, 3].any()
    assert (lse[1] == -INF).all() and (lse[0, :, 3] == -INF).all()
    assert not dq[1].any() and not dk[0, :, 4].any() and not dv[1].any() and not dbias[1].any()
    (shorter,) = oracle.attention_backward(
        dout[:1, :, :3],
        q[:1, :, :3],
        k[:1, :, :4],
        v[:1, :, :4],
        None,
        None,
        dlse=dlse[:1, :, :3],
        wrt=("sinks",),
        sinks=options["sinks"],
        dropout=0.2,
        seed=1,
    )
    np.testing.assert_array_equal(dsinks, shorter)  # padded rows give the sink nothing


@pytest.mark.parametrize("how", ["mask", "bias", "causal"])
def test_a_hidden_key_has_no_influence(how):
    """Even if its score or its dout . v overflows float64."""
    q, k, v, dout = arrays((3, 4), (3, 4), (3, 4), seed=11)
    hidden = np.array([[0, 0, 1]] * 3, bool)
    options = {
        "mask": dict(mask=~hidden),
        "bias": dict(bias=np.where(hidden, -INF, 0.0)),
        "causal": dict(causal=True, q_offset=-1),
    }[how]

    options = {"bias": np.zeros((3, 3))} | options

    def everything():
        return [
            *oracle.attention(q, k, v, return_lse=True, softcap=5.0, **options),
            *oracle.attention_backward(
                dout, q, k, v, None, None, softcap=5.0, wrt=("q", "k", "v", "bias"), **options
            ),
        ]

    clean = everything()
    assert not clean[3][2].any() and not clean[4][2].any()
    q *= 1e3
    dout *= 1e3
    clean = everything()
    k[2], v[2] = 1e307, -1e307
    for a, b in zip(clean, everything(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_nan_makes_the_rows_that_see_it_nan():
    q, k, v, _ = arrays((3, 4), (3, 4), (3, 4))
    q[0] = np.nan
    out, lse = oracle.attention(q, k, v, return_lse=True, causal=True)
    assert np.isnan(out[0]).all() and np.isnan(lse[0]) and np.isfinite(out[1:]).all()
    q[0], k[1, 0] = 0.0, np.nan
    out, lse = oracle.attention(q, k, v, return_lse=True, causal=True)
    assert np.isfinite(out[0]).all() and np.isnan(out[1:]).all() and np.isnan(lse[1:]).all()
    k[1, 0], v[1] = 0.0, np.nan
    out, lse = oracle.attention(
        q, k, v, return_lse=True, mask=np.array([[1, 0, 1]], bool) | np.eye(3, dtype=bool)
    )
    assert np.isnan(out[1]).all() and np.isfinite(lse).all()


def test_huge_scores_do_not_overflow():
    q, k, v, dout = arrays((3, 4), (5, 4), (5, 2))
    results = [
        *oracle.attention(q * 1e150, k * 1e150, v, return_lse=True),
        *oracle.attention_backward(dout, q * 1e150, k * 1e150, v, None, None),
    ]
    assert all(np.isfinite(a).all() for a in results)


@pytest.mark.parametrize("B, Tq, Tk", [(0, 2, 3), (2, 0, 3), (2, 3, 0), (0, 0, 0)])
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_zero_size_axes(B, Tq, Tk, layout):
    shapes = [(B, 4, Tq, 3), (B, 2, Tk, 3), (B, 2, Tk, 5)]
    if layout == "bthd":
        shapes = [(B, T, H, d) for B, H, T, d in shapes]
    q, k, v, dout = arrays(*shapes)
    options = dict(layout=layout, causal=True, bias=np.zeros((B, 1, Tq, Tk)), sinks=np.zeros(4))
    out, lse = oracle.attention(q, k, v, return_lse=True, **options)
    assert out.shape == dout.shape and lse.shape == (B, 4, Tq) and not out.any() and (lse == 0).all()
    gradients = oracle.attention_backward(dout, q, k, v, out, lse, wrt=GRADIENTS, **options)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape, (B, 1, Tq, Tk), (4,)]
    assert not any(g.any() for g in gradients)


def test_dropout_is_the_contract_mask():
    philox = pytest.importorskip("rawflash.philox")
    keep = philox.dropout_mask(0.3, 77, (2, 3, 4, 6))
    q, k = np.zeros((2, 3, 4, 1)), np.zeros((2, 3, 6, 1))
    v = np.broadcast_to(np.eye(6), (2, 3, 6, 6))
    out, lse = oracle.attention(q, k, v, dropout=0.3, seed=77, return_lse=True)
    np.testing.assert_allclose(out, keep / 6 / 0.7, rtol=1e-15)
    np.testing.assert_allclose(lse, np.log(6.0), rtol=1e-15)  # without dropout
    out = oracle.attention_varlen(
        np.zeros((3, 8, 1)),
        np.zeros((3, 12, 1)),
        np.tile(np.eye(6), (3, 2, 1)),
        [0, 4, 8],
        [0, 6, 12],
        dropout=0.3,
        seed=77,
    )
    np.testing.assert_allclose(out.reshape(3, 2, 4, 6).swapaxes(0, 1), keep / 6 / 0.7, rtol=1e-15)


def test_mask_objects_agree_with_options():
    masks = pytest.importorskip("rawflash.masks")
    q, k, v, _ = arrays((2, 2, 4, 3), (2, 2, 5, 3), (2, 2, 5, 3))
    for offset in (None, 0, [1, -1]):
        np.testing.assert_array_equal(
            oracle.attention(q, k, v, mask=masks.Causal(), q_offset=offset),
            oracle.attention(q, k, v, causal=True, q_offset=offset),
        )


def test_out_and_choices_of_kernel_are_ignored():
    q, k, v, _ = arrays((3, 4), (3, 4), (3, 4))
    out = np.full((3, 4), 7.0)
    same = oracle.attention(
        q, k, v, out=out, algorithm="fa1", backend="numba_cpu", deterministic=True, sram=1000
    )
    np.testing.assert_array_equal(same, oracle.attention(q, k, v))
    assert (out == 7.0).all()


def test_low_precision_inputs_are_widened_not_rounded():
    q, k, v, _ = arrays((3, 4), (3, 4), (3, 4), dtype=np.float16)
    wide = oracle.attention(*(a.astype(np.float64) for a in (q, k, v)))
    np.testing.assert_array_equal(oracle.attention(q, k, v), wide)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    narrow = [a.astype(ml_dtypes.bfloat16) for a in (q, k, v)]
    np.testing.assert_array_equal(
        oracle.attention(*narrow), oracle.attention(*(a.astype(np.float64) for a in narrow))
    )


# ---- torch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_agrees_with_torch(causal, heads):
    torch = pytest.importorskip("torch")
    q, k, v, dout = arrays((2, heads[0], 7, 8), (2, heads[1], 7, 8), (2, heads[1], 7, 6), seed=12)
    leaves = [torch.tensor(a, requires_grad=True) for a in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=causal, enable_gqa=True
        )
    expected.backward(torch.tensor(dout))
    np.testing.assert_allclose(
        oracle.attention(q, k, v, causal=causal), expected.detach().numpy(), atol=1e-14
    )
    grads = oracle.attention_backward(dout, q, k, v, None, None, causal=causal)
    for gradient, leaf in zip(grads, leaves, strict=True):
        np.testing.assert_allclose(gradient, leaf.grad.numpy(), atol=1e-13)


def test_bias_gradient_agrees_with_torch():
    torch = pytest.importorskip("torch")
    q, k, v, dout = arrays((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8), seed=13)
    bias = np.random.default_rng(14).standard_normal((3, 5, 6))
    leaf = torch.tensor(bias, requires_grad=True)
    out = torch.nn.functional.scaled_dot_product_attention(*map(torch.tensor, (q, k, v)), attn_mask=leaf)
    out.backward(torch.tensor(dout))
    (dbias,) = oracle.attention_backward(dout, q, k, v, None, None, bias=bias, wrt=("bias",))
    np.testing.assert_allclose(dbias, leaf.grad.numpy(), atol=1e-14)


# ---- the bounds: they pass a good result and fail a bad one ----------------------------------------

BOUND_CASES = {
    name: CASES[name] for name in ("plain", "causal", "softcap", "lengths", "empty_rows", "everything")
}


def blockwise(q, k, v, dtype, block=3, running=True):
    """One head of online softmax by blocks of keys; ``running=False`` rescales by the block maximum."""
    q, k, v = (a.astype(np.float32) for a in (q, k, v))
    m, l = np.full(len(q), -INF, np.float32), np.zeros(len(q), np.float32)
    O = np.zeros((len(q), v.shape[1]), np.float32)
    for j in range(0, len(k), block):
        S = q @ k[j : j + block].T * np.float32(q.shape[1] ** -0.5)
        new = np.maximum(m, S.max(axis=1)) if running else S.max(axis=1)
        P = np.exp(S - new[:, None])
        rescale = np.exp(m - new) if running else np.ones_like(m)
        l = l * rescale + P.sum(axis=1)
        O = O * rescale[:, None] + P.astype(dtype).astype(np.float32) @ v[j : j + block]
        m = new
    return (O / l[:, None]).astype(dtype), m + np.log(l)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_bound_passes_online_softmax_and_fails_a_wrong_rescale(dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v, _ = (a.astype(dtype) for a in arrays((32, 16), (40, 16), (40, 8), seed=15))
    reference = tolerances.reference(q, k, v)
    out, lse = blockwise(q, k, v, dtype)
    tolerances.assert_close("out", out, reference)
    tolerances.assert_close("lse", lse, reference)
    out, lse = blockwise(q, k, v, dtype, running=False)
    assert tolerances.error_ratio("out", out, reference) > 5
    with pytest.raises(AssertionError, match=r"out\[\d+, \d\] is .*; the oracle says .* ratio"):
        tolerances.assert_close("out", out, reference)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", BOUND_CASES)
def test_bounds_hold_for_the_rounded_oracle_and_reject_small_mistakes(name, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v, dout = (a.astype(dtype) for a in arrays((2, 4, 4, 8), (2, 2, 5, 8), (2, 2, 5, 6), seed=16))
    rng = np.random.default_rng(17)
    dlse = rng.standard_normal((2, 4, 4)).astype(np.float32)
    options = dict(
        CASES[name],
        bias=rng.standard_normal((4, 5)).astype(dtype),
        sinks=np.linspace(-1, 1, 4, dtype=np.float32),
    )
    reference = tolerances.reference(q, k, v, dout, dlse=dlse, wrt=GRADIENTS, **options)
    for result, oracles in reference.oracle.items():
        exact = (
            oracles.astype(reference.dtypes[result])
            if reference.dtypes[result] != "bfloat16"
            else oracles.astype(dtype)
        )
        assert np.asarray(exact).shape == reference.allowed[result].shape
        tolerances.assert_close(result, exact, reference)
        assert tolerances.error_ratio(result, exact, reference) <= 1
        assert tolerances.error_ratio(result, exact.astype(np.float64) * 1.2, reference) > 1
        nan = exact.copy()
        nan.flat[-1] = np.nan
        assert tolerances.error_ratio(result, nan, reference) == INF
    grads = oracle.attention_backward(dout, q, k, v, None, None, dlse=dlse, wrt=GRADIENTS, **options)
    tolerances.assert_gradients_close(grads, reference, GRADIENTS)


def test_bound_of_a_varlen_call():
    q, k, v, dout = arrays((2, 7, 4), (1, 9, 4), (1, 9, 4), dtype=np.float32)
    cu = ([1, 4, 6], [0, 3, 8])
    reference = tolerances.reference_varlen(q, k, v, *cu, dout, causal=True)
    out, lse = oracle.attention_varlen(q, k, v, *cu, causal=True, return_lse=True)
    tolerances.assert_close("out", out.astype(np.float32), reference)
    tolerances.assert_close("lse", lse.astype(np.float32), reference)
    tolerances.assert_gradients_close(
        oracle.attention_varlen_backward(dout, q, k, v, out, lse, *cu, causal=True), reference
    )
    assert tolerances.error_ratio("lse", np.where(np.isfinite(lse), lse, 0.0), reference) == INF


def test_exact_zeros_infinities_and_overflow():
    x = np.zeros((3, 4))
    reference = tolerances.reference(x, x, x)
    assert tolerances.error_ratio("out", x, reference) == 0.0
    assert tolerances.error_ratio("out", x + 1e-300, reference) > 1
    v = np.full((3, 4), 6e4, np.float16)
    small = np.zeros((3, 4), np.float16)
    reference = tolerances.reference(small, small, v, v, dropout=0.5, seed=1)
    exact = reference.oracle["out"]
    assert (exact > 65520).any()
    with np.errstate(over="ignore"):
        assert tolerances.error_ratio("out", exact.astype(np.float16), reference) <= 1
    assert np.isfinite(reference.allowed["out"]).all()


def test_rounding_to_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(18).standard_normal(1000).astype(np.float32) * np.float32(1e3)
    x[:5] = [np.nan, INF, -INF, 0.0, 1 + 2.0**-8]  # the last is a tie
    np.testing.assert_array_equal(
        accuracy._round(x, "bfloat16"), x.astype(ml_dtypes.bfloat16).astype(np.float64)
    )


def test_arrays_of_other_libraries():
    q, k, v, dout = arrays((3, 4), (5, 4), (5, 4), seed=19)
    bias, mask, lengths = np.arange(15.0).reshape(3, 5), np.tri(3, 5, 1, dtype=bool), dict(kv_lengths=np.array([4]))
    options = dict(bias=bias, mask=mask, **lengths)
    expected = oracle.attention(q, k, v, **options)
    for name, value in options.items():
        given = options | {name: DLPackOnly(value)}
        np.testing.assert_array_equal(oracle.attention(q, k, v, **given), expected)
    wrapped = [DLPackOnly(a) for a in (dout, q, k, v)]
    expected = oracle.attention_backward(dout, q, k, v, None, None)
    for have, want in zip(oracle.attention_backward(*wrapped, None, None), expected, strict=True):
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize(
    "replaced, words",
    [
        (dict(wrt=("x",)), "wrt is"),
        (dict(wrt=("bias",)), "expected bias= to be passed"),
        (dict(dout=np.ones((3, 3, 4))), "dout has shape"),
        (dict(dlse=np.ones((4, 3))), "dlse has shape"),
    ],
)
def test_bad_gradients_are_refused(replaced, words):
    q, k, v, dout = arrays((2, 3, 4), (2, 5, 4), (2, 5, 4), seed=19)
    good = dict(dout=dout, q=q, k=k, v=v, o=None, lse=None)
    oracle.attention_backward(**good)
    with pytest.raises(ValueError, match=words):
        oracle.attention_backward(**good | replaced)


@pytest.mark.parametrize("options", [
    dict(q_offset=-2**61, window=(2**63 - 1, None)), dict(window=(None, 2**63 - 1)), dict(window=(2**63, 0)),
])  # fmt: skip
def test_windows_wider_than_64_bits(options):
    """Everything within the side is visible: nothing wraps around."""
    x = np.eye(3)
    out = oracle.attention(x, x, x, **options)
    np.testing.assert_allclose(out, rf.attention(x, x, x, **options), atol=1e-15)
    np.testing.assert_allclose(out.sum(), 3)


def test_wrong_options_are_refused_as_everywhere():
    x = np.eye(3)
    with pytest.raises(rf.ProblemError, match="unknown option 'casual'; did you mean 'causal'"):
        oracle.attention(x, x, x, casual=True)
    with pytest.raises(rf.ProblemError, match="return_lse is not an option of the backward functions"):
        oracle.attention_backward(x, x, x, x, None, None, return_lse=True)


def test_packed_sequences_need_their_starts():
    x = np.ones((2, 3, 4))
    with pytest.raises(rf.ProblemError, match="cu_seqlens_q"):
        rf.oracle.attention_varlen(x, x, x, None, None)
    with pytest.raises(rf.ProblemError, match="cu_seqlens_q"):
        rf.oracle.attention_varlen_backward(x, x, x, x, None, None, None, None)
