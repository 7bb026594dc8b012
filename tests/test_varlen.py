"""`attention_varlen`: sequences behind each other are the loop over them, and padding between is nothing."""

import numpy as np
import pytest
from hypothesis import given, note, settings
from strategies import fill, varlen_problems
from test_backward import check_backward
from test_forward import KERNELS, drawn, kernels

import rawflash as rf


@settings(max_examples=drawn(100))
@given(varlen_problems())
def test_drawn_problems(case):
    reference = case.reference()
    for backend, algorithm in KERNELS:
        note(f"{backend} {algorithm}")
        check_backward(case, reference, backend=backend, algorithm=algorithm)


@kernels
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(causal=True),
        dict(window=(4, 1), alibi_slopes=np.array([0.1, 0.2, 0.3, 0.4])),
        dict(causal=True, q_offset=np.array([2, -3, 0, 1]), softcap=3.0, sinks=np.array([0.1, -2, 3, 0.5])),
    ],
    ids=["plain", "causal", "window", "offset"],
)
def test_varlen_is_the_loop_over_the_sequences(options, layout, backend, algorithm, rng):
    """float64, so that the two ways agree to rounding: here 1e-13 of numbers near one."""
    Hq, Hkv, d, dv = 4, 2, 8, 6
    lengths_q, lengths_k = [17, 1, 0, 35], [20, 33, 5, 16]
    cu_q, cu_k = (
        np.cumsum([2, *lengths]) for lengths in (lengths_q, lengths_k)
    )  # two rows of padding in front
    total_q, total_k = cu_q[-1] + 3, cu_k[-1] + 1
    q, k, v, dout = (
        fill(rng, shape, "normal")
        for shape in ((Hq, total_q, d), (Hkv, total_k, d), (Hkv, total_k, dv), (Hq, total_q, dv))
    )
    dlse = rng.standard_normal((Hq, total_q))
    common = options | dict(backend=backend, algorithm=algorithm)
    wrt = ("q", "k", "v", "sinks") if "sinks" in options else ("q", "k", "v")

    def turned(*arrays):
        return tuple(np.ascontiguousarray(a.swapaxes(0, 1)) if layout == "bthd" else a for a in arrays)

    out, lse = rf.attention_varlen(*turned(q, k, v), cu_q, cu_k, return_lse=True, layout=layout, **common)
    grads = rf.attention_varlen_backward(
        *turned(dout, q, k, v), out, lse, cu_q, cu_k, dlse=dlse, wrt=wrt, layout=layout, **common
    )
    (out,) = turned(out)
    grads = dict(zip(wrt, (*turned(*grads[:3]), *grads[3:]), strict=True))

    expected = {"out": np.zeros_like(out), "lse": np.full(lse.shape, -np.inf), "sinks": np.zeros(Hq)}
    expected |= {"q": np.zeros_like(q), "k": np.zeros_like(k), "v": np.zeros_like(v)}
    for b in range(len(lengths_q)):
        i, j = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        alone = common | ({"q_offset": int(options["q_offset"][b])} if "q_offset" in options else {})
        o, l = rf.attention(q[:, i], k[:, j], v[:, j], return_lse=True, **alone)
        g = rf.attention_backward(
            dout[:, i], q[:, i], k[:, j], v[:, j], o, l, dlse=dlse[:, i], wrt=wrt, **alone
        )
        expected["out"][:, i], expected["lse"][:, i] = o, l
        expected["q"][:, i], expected["k"][:, j], expected["v"][:, j] = g[:3]
        if "sinks" in options:
            expected["sinks"] += g[3]
    for name, got in {"out": out, "lse": lse, **grads}.items():
        np.testing.assert_allclose(got, expected[name], rtol=1e-11, atol=1e-13, err_msg=name)
    # Padding is exact.
    for rows in (slice(0, cu_q[0]), slice(cu_q[-1], None)):
        assert not out[:, rows].any() and not grads["q"][:, rows].any() and np.isneginf(lse[:, rows]).all()


@kernels
def test_dropout_counts_inside_the_sequence(backend, algorithm):
    """With equal scores and V one-hot, out shows the mask: that of sequence b at its own i and j."""
    p, seed, Hq, n_q, n_k = 0.4, 77, 2, [5, 19], [18, 7]
    cu_q, cu_k = np.cumsum([0, *n_q]), np.cumsum([0, *n_k])
    q, k = np.zeros((Hq, cu_q[-1], 4)), np.zeros((1, cu_k[-1], 4))
    v = np.concatenate([np.eye(n, max(n_k)) for n in n_k])[None]
    out = rf.attention_varlen(q, k, v, cu_q, cu_k, dropout=p, seed=seed, backend=backend, algorithm=algorithm)
    mask = rf.dropout_mask(p, seed, (2, Hq, max(n_q), max(n_k)))
    for b in range(2):
        shown = out[:, cu_q[b] : cu_q[b + 1], : n_k[b]] != 0
        np.testing.assert_array_equal(shown, mask[b, :, : n_q[b], : n_k[b]])


@kernels
def test_one_sequence_is_attention(backend, algorithm, rng):
    q, k, v = (rng.standard_normal((2, 21, 8)).astype(np.float32) for _ in range(3))
    common = dict(causal=True, backend=backend, algorithm=algorithm, return_lse=True)
    for a, b in zip(
        rf.attention_varlen(q, k, v, [0, 21], [0, 21], **common), rf.attention(q, k, v, **common), strict=True
    ):
        np.testing.assert_array_equal(a, b)
