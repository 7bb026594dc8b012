"""Every gradient of every kernel against the float64 oracle (contract, section 6).

dq, dk, dv, dbias, dsinks, each with a gradient that comes in through lse, on the calls of test_forward.
"""

import numpy as np
import pytest
from hypothesis import given, note, settings
from strategies import DTYPES, problems, restride
from test_forward import AWKWARD, KERNELS, awkward, check_forward, drawn, kernels, make
from tolerances import assert_gradients_close

import rawflash as rf
from rawflash.oracle import central_differences


def check_backward(case, reference, **options):
    """Run a call forward and backward; hold everything against the oracle. Returns the gradients."""
    gradients = case.backward(*check_forward(case, reference, **options), **options)
    assert len(gradients) == len(case.wrt)
    for name, gradient in zip(case.wrt, gradients, strict=True):
        argument = case.options[name] if name in case.options else getattr(case, name)
        assert gradient.shape == argument.shape and gradient.dtype == argument.dtype, name
    assert_gradients_close(gradients, reference, case.wrt)
    return gradients


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_calls(name, dtype, backend, algorithm):
    case, reference = awkward(name, dtype)
    check_backward(case, reference, backend=backend, algorithm=algorithm)


@settings(max_examples=drawn(300))
@given(problems())
def test_drawn_problems(case):
    reference = case.reference()
    for backend, algorithm in KERNELS:
        note(f"{backend} {algorithm}")
        check_backward(case, reference, backend=backend, algorithm=algorithm)


@settings(max_examples=drawn(100))
@given(problems(exclude=("bias", "sinks", "dlse")))
def test_drawn_problems_with_every_gradient(case):
    """`problems` draws a bias, sinks and dlse now and then; here is every one of them in every call."""
    rng = np.random.default_rng(case.how["seed"])
    bthd = case.options.get("layout") == "bthd" and case.q.ndim > 2
    shape = case.q.swapaxes(-3, -2).shape[:-1] if bthd else case.q.shape[:-1]
    heads = shape[-2] if case.q.ndim > 2 else 1
    Tk = case.k.shape[-3 if bthd else -2]
    side = case.q.dtype if rng.random() < 0.5 else np.dtype(np.float32)
    case.options |= {
        "bias": rng.standard_normal((heads, shape[-1], Tk)).astype(side),
        "sinks": rng.standard_normal(heads).astype(side),
    }
    case.dlse = rng.standard_normal(shape).astype(np.float64 if case.q.dtype == np.float64 else np.float32)
    case.wrt = ("q", "k", "v", "bias", "sinks")
    reference = case.reference()
    for backend, algorithm in KERNELS:
        note(f"{backend} {algorithm}")
        check_backward(case, reference, backend=backend, algorithm=algorithm)


@kernels
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(causal=True, softcap=1.5, dropout=0.4),
        dict(
            window=(2, 1), alibi_slopes=np.array([0.3, 0.7]), kv_lengths=[5, 2], q_lengths=[3, 4], scale=0.8
        ),
    ],
    ids=["plain", "softcap", "lengths"],
)
def test_gradients_are_central_differences_of_the_kernel_itself(options, backend, algorithm):
    """No oracle: float64 makes the kernel's own forward pass differentiable by subtraction."""
    B, H, Tq, Tk, d = 2, 2, 4, 5, 3
    rng = np.random.default_rng(3)
    normal = rng.standard_normal
    x = {
        "q": normal((B, H, Tq, d)),
        "k": normal((B, 1, Tk, d)),
        "v": normal((B, 1, Tk, 2)),
        "bias": normal((H, 1, Tk)),
        "sinks": normal(H),
    }
    dout, dlse = normal((B, H, Tq, 2)), normal((B, H, Tq))
    fixed = options | dict(backend=backend, algorithm=algorithm)

    def run(**changed):
        return rf.attention(**(x | changed), **fixed, return_lse=True)

    def loss(**changed):
        out, lse = run(**changed)
        return (out * dout).sum() + (np.where(np.isinf(lse), 0, lse) * dlse).sum()

    names = tuple(x)
    given = {name: value for name, value in x.items() if name in ("bias", "sinks")}
    gradients = rf.attention_backward(
        dout, x["q"], x["k"], x["v"], *run(), dlse=dlse, wrt=names, **given, **fixed
    )
    for name, gradient in zip(names, gradients, strict=True):
        difference = central_differences(lambda value, name=name: loss(**{name: value}), x[name])
        # Step 1e-5: truncation step^2 |f'''| / 6 and rounding 2^-53 |f| / step are both near 1e-10.
        np.testing.assert_allclose(gradient, difference, rtol=1e-7, atol=1e-8, err_msg=name)


@kernels
@pytest.mark.parametrize("view", ["transposed", "sliced", "broadcast", "strided_last", "reversed", "fortran"])
def test_strided_inputs_give_the_bits_of_contiguous_ones(view, backend, algorithm):
    case = make(B=2, Hq=4, Hkv=2, Tq=19, Tk=35, d=8, dv=6, causal=True)
    options = dict(causal=True, backend=backend, algorithm=algorithm, deterministic=True)
    q, k, v, dout = (restride(getattr(case, name), view) for name in ("q", "k", "v", "dout"))
    o, lse = rf.attention(q, k, v, return_lse=True, **options)
    strided = rf.attention_backward(
        dout,
        q,
        k,
        v,
        restride(o, view if view != "broadcast" else "sliced"),
        restride(lse, "fortran"),
        dlse=restride(case.dlse, "sliced"),
        **options,
    )
    plain = rf.attention_backward(
        *(np.ascontiguousarray(a) for a in (dout, q, k, v, o, lse)), dlse=case.dlse, **options
    )
    for a, b in zip(strided, plain, strict=True):
        np.testing.assert_array_equal(a, b)


@kernels
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing_have_no_gradient(sinks, backend, algorithm):
    """Rows 0-6 see no key: zeros exactly, not small numbers; only dsinks receives their dlse."""
    options = dict(causal=True, q_offset=-7, backend=backend, algorithm=algorithm)
    if sinks:
        options["sinks"] = np.array([0.5, -1.0], np.float32)
    case = make(Tq=20, **options)
    case.dlse[:, :, 7:] = 0
    case.dout[:, :, 7:] = 0  # so nothing but the empty rows has anything to say
    out, lse = case.forward()
    gradients = dict(zip(case.wrt, case.backward(out, lse), strict=True))
    for name in "qkv":
        np.testing.assert_array_equal(gradients[name], 0)
    if sinks:
        np.testing.assert_allclose(gradients["sinks"], case.dlse.sum(axis=(0, 2)), rtol=1e-5)


@kernels
def test_wrt_names_the_gradients_and_their_order(backend, algorithm):
    case = make(
        Tq=18,
        bias=np.ones((2, 18, 18), np.float32),
        sinks=np.zeros(2, np.float32),
        backend=backend,
        algorithm=algorithm,
        deterministic=True,
    )
    out, lse = case.forward()
    everything = dict(zip(case.wrt, case.backward(out, lse), strict=True))
    for wrt in [("q",), ("sinks",), ("bias",), ("v", "q"), ("sinks", "k", "bias"), ()]:
        gradients = case.backward(out, lse, wrt=wrt)
        assert len(gradients) == len(wrt)
        for name, gradient in zip(wrt, gradients, strict=True):
            np.testing.assert_array_equal(gradient, everything[name], err_msg=f"{name} of {wrt}")
