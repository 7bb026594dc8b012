"""The forward pass of every kernel, `out` and `lse`, against the float64 oracle (contract, section 6).

Two nets: a table of calls that are awkward on purpose, and problems that Hypothesis draws over all options.
A drawn problem is given to every kernel, so all of them are judged on the same arrays.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, note, settings
from strategies import DTYPES, Case, fill, problems, restride
from tolerances import assert_close, reference

import rawflash as rf
from rawflash import masks as M
from rawflash.backends import BACKENDS

#: Every (backend, algorithm) of this version of the package. GPU backends join by getting a module; what
#: runs here is decided by the row, never by whether the import happens to work: that would be a silent skip.
KERNELS = [
    (name, algorithm)
    for name, row in BACKENDS.items()
    if row.module is not None and row.runs_on == "CPU arrays"
    for algorithm in row.algorithms
]
kernels = pytest.mark.parametrize(("backend", "algorithm"), KERNELS)


def drawn(most):
    """Problems to draw: ten times the profile's number up to ``most``, but no fewer than that number."""
    n = settings().max_examples
    return max(n, min(10 * n, most))


def make(
    B=2,
    Hq=2,
    Hkv=None,
    Tq=17,
    Tk=None,
    d=8,
    dv=None,
    dtype="float32",
    arrays=1,
    size=1.0,
    lead=None,
    **options,
):
    """A call with standard normal arrays, ``size`` times that in q; every gradient that exists is asked for.

    ``arrays`` is the seed of the arrays; an option that is a function makes its array from the generator and
    the dtype.
    """
    rng = np.random.default_rng(arrays)
    Hkv, Tk, dv, lead = Hkv or Hq, Tq if Tk is None else Tk, dv or d, (B,) if lead is None else lead
    kind = DTYPES[dtype]
    options = {name: value(rng, kind) if callable(value) else value for name, value in options.items()}
    lse_dtype = np.float64 if dtype == "float64" else np.float32
    return Case(
        q=(size * rng.standard_normal((*lead, Hq, Tq, d))).astype(kind),
        k=fill(rng, (*lead, Hkv, Tk, d), "normal", kind),
        v=fill(rng, (*lead, Hkv, Tk, dv), "normal", kind),
        dout=fill(rng, (*lead, Hq, Tq, dv), "normal", kind),
        dlse=rng.standard_normal((*lead, Hq, Tq)).astype(lse_dtype),
        options=options,
        wrt=("q", "k", "v", *(name for name in ("bias", "sinks") if name in options)),
    )


def make_many(B=1, Hq=2, Hkv=None, few=5, **options):
    """A call of many heads and its reference, which takes as long as that of few.

    Each head of keys, with its query heads, has the arrays of one of the few. But gradients of out and lse are a power
    of two times theirs, up or down, and so are therefore, exactly, those of q, k and v: no two heads next to each
    other are the same.
    """
    Hkv = Hkv or Hq
    few, group = min(few, Hkv), Hq // Hkv
    case = make(B=B, Hq=few * group, Hkv=few, **options)
    reference = case.reference()
    heads = np.arange(Hkv)
    turn, of = np.divmod(heads, few)
    factor = np.array([1.0, -2.0, 4.0])[turn % 3]
    of_rows = (of[:, None] * group + np.arange(group)).ravel()  # of query heads
    factor_of_rows = factor.repeat(group)

    def spread(array, of, factor=None):
        found = np.take(array, of, axis=1)  # contiguous, as those of make
        if factor is None:
            return found
        shape = (-1,) + (1,) * (found.ndim - 2)
        return (found.astype(np.float64) * factor.reshape(shape)).astype(array.dtype)

    rows, scaled_rows, scaled = (of_rows,), (of_rows, factor_of_rows), (of, factor)
    ways = {"out": rows, "lse": rows, "dq": scaled_rows, "dk": scaled, "dv": scaled}
    oracle = {name: spread(reference.oracle[name], *way) for name, way in ways.items()}
    allowed = {name: abs(spread(reference.allowed[name], *way)) for name, way in ways.items()}
    arrays = {"q": rows, "k": (of,), "v": (of,), "dout": scaled_rows, "dlse": scaled_rows}
    many = replace(case, **{name: spread(getattr(case, name), *way) for name, way in arrays.items()})
    return many, replace(reference, oracle=oracle, allowed=allowed)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("options", [
    dict(Hq=7, Tq=9, Tk=12, d=8), dict(B=2, Hq=8, Hkv=4, Tq=10, d=8, dv=6, causal=True, q_lengths=[10, 3])
])  # fmt: skip
def test_many_heads_are_as_their_own_reference_says(options, dtype):
    case, made = make_many(few=2, dtype=dtype, **options)
    assert case.q.shape[1] == options["Hq"] and case.k.shape[1] == options.get("Hkv", options["Hq"])
    assert all((case.dout[:, n] != case.dout[:, n + 1]).any() for n in range(options["Hq"] - 1))
    own = case.reference()
    assert made.dtypes == own.dtypes and made.oracle.keys() == own.oracle.keys()
    for name, exact in own.oracle.items():
        np.testing.assert_allclose(made.oracle[name], exact, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_less(made.allowed[name], own.allowed[name] * 1.001 + 1e-12)


def normal(*shape):
    return lambda rng, dtype: rng.standard_normal(shape).astype(dtype)


def half_hidden(*shape):
    """A bias with -inf in about half of its places."""
    return lambda rng, dtype: np.where(rng.random(shape) < 0.5, -np.inf, rng.standard_normal(shape)).astype(
        dtype
    )


def half_visible(*shape):
    return lambda rng, dtype: rng.random(shape) < 0.5


# Tiles of numba_cpu come in 16 rows, so 15, 16, 17, 31, 33 are one less, equal, one more. sram: many tiles.
AWKWARD = {
    "one row": dict(Tq=1),
    "one row, one dimension": dict(Tq=1, d=1),
    "two rows": dict(Tq=2),
    "primes": dict(Tq=13, Tk=29, d=7, dv=11),
    "tile - 1": dict(Tq=15),
    "tile": dict(Tq=16),
    "tile + 1": dict(Tq=17),
    "two tiles - 1, two tiles + 1": dict(Tq=31, Tk=33),
    "Tq < Tk, causal": dict(Tq=5, Tk=37, causal=True),
    "Tq > Tk, causal: rows without keys": dict(Tq=37, Tk=5, causal=True),
    "Tq > Tk, causal, sinks": dict(Tq=37, Tk=5, causal=True, sinks=normal(2)),
    "Tq > Tk, upper left": dict(Tq=37, Tk=5, causal=True, q_offset=0),
    "negative offset": dict(Tq=20, causal=True, q_offset=-7),
    "offset far left: nothing visible": dict(Tq=20, causal=True, q_offset=-1000),
    "offset far right: everything visible": dict(Tq=20, causal=True, q_offset=1000),
    "offsets per batch": dict(Tq=20, causal=True, q_offset=np.array([-3, 4])),
    "window": dict(Tq=40, window=(3, 2)),
    "window of one key": dict(Tq=40, window=(0, 0)),
    "window, open to the left": dict(Tq=40, window=(None, 1)),
    "window and causal": dict(Tq=40, window=(4, 9), causal=True),
    "window past the keys": dict(Tq=40, Tk=9, window=(2, 2)),
    "one dimension": dict(d=1),
    "odd dimensions": dict(d=17, dv=33),
    "d < dv": dict(d=3, dv=20),
    "d > dv": dict(d=20, dv=1),
    "d = 200": dict(B=1, Tq=33, d=200),
    "grouped heads 8:2": dict(B=1, Hq=8, Hkv=2, Tq=19),
    "one key head": dict(B=2, Hq=6, Hkv=1, Tq=19),
    "no batch": dict(B=0),
    "no rows": dict(Tq=0, Tk=5),
    "no keys": dict(Tq=5, Tk=0),
    "no keys, sinks": dict(Tq=5, Tk=0, sinks=normal(2)),
    "no rows, no keys": dict(Tq=0, Tk=0),
    "lengths": dict(B=3, Tq=20, Tk=35, q_lengths=[20, 3, 17], kv_lengths=[1, 35, 16]),
    "padding only": dict(B=3, Tq=20, q_lengths=[0, 20, 5], kv_lengths=[7, 0, 0]),
    "padding only, sinks": dict(B=3, Tq=20, q_lengths=[0, 20, 5], kv_lengths=[7, 0, 0], sinks=normal(2)),
    "lengths, causal": dict(B=3, Tq=20, q_lengths=[20, 9, 4], kv_lengths=[7, 20, 11], causal=True),
    "sinks": dict(Tq=20, sinks=normal(2)),
    "a huge sink": dict(Tq=20, sinks=lambda rng, dtype: np.array([90.0, -90.0], dtype)),
    "no sink: -inf": dict(Tq=20, sinks=lambda rng, dtype: np.array([-np.inf, 0.5], dtype)),
    "mask": dict(Tq=20, mask=half_visible(2, 2, 20, 20)),
    "mask by key": dict(Tq=20, mask=half_visible(20)),
    "empty mask": dict(Tq=20, mask=np.zeros((1, 1, 1, 1), bool)),
    "mask object": dict(Tq=40, mask=M.PrefixLM(5) | M.Segments(np.arange(40) // 7, np.arange(40) // 7)),
    "bias": dict(Tq=20, bias=normal(2, 2, 20, 20)),
    "bias by row": dict(Tq=20, bias=normal(20, 1)),
    "bias by key and head": dict(Tq=20, bias=normal(2, 1, 20)),
    "bias in float32": dict(Tq=20, bias=lambda rng, dtype: normal(1, 2, 20, 20)(rng, np.float32)),
    "bias with -inf": dict(Tq=20, bias=half_hidden(2, 2, 20, 20)),
    "bias all -inf": dict(Tq=20, bias=lambda rng, dtype: np.full((20, 20), -np.inf, dtype)),
    "alibi": dict(Tq=20, Tk=31, alibi_slopes=np.array([0.5, 0.01])),
    "alibi by batch": dict(Tq=20, alibi_slopes=np.array([[0.5, 0.01], [0.0, 1.0]]), causal=True),
    "softcap": dict(Tq=20, size=10.0, softcap=5.0),
    "scale 0": dict(Tq=20, scale=0.0),
    "negative scale": dict(Tq=20, scale=-0.7),
    "dropout": dict(Tq=20, dropout=0.3, seed=5),
    "hardly any dropped": dict(Tq=20, dropout=2e-10),  # none, but all are divided by the chance to be kept
    "nearly all dropped": dict(Tq=20, dropout=0.99, seed=2**64 - 1),
    "many tiles": dict(B=1, Tq=307, Tk=293, d=16, sram=16384),
    "many tiles, causal": dict(B=1, Tq=293, Tk=307, d=16, sram=16384, causal=True),
    "many tiles, window": dict(B=1, Tq=307, d=16, sram=16384, window=(40, 3)),
    "many tiles, rising scores": dict(B=1, Tq=130, d=16, sram=16384, bias=lambda rng, dtype: np.linspace(
        -40, 40, 130).astype(dtype)),
    "many tiles, everything": dict(
        B=2, Hq=4, Hkv=2, Tq=150, Tk=170, d=12, dv=20, sram=32768, causal=True, window=(90, None),
        kv_lengths=[170, 99], q_lengths=[77, 150], bias=normal(2, 1, 150, 170), alibi_slopes=np.full(4, 0.02),
        softcap=8.0, sinks=normal(4), dropout=0.2, mask=half_visible(4, 1, 170)),
    "scores near 1e4": dict(Tq=40, d=16, size=3000.0, sram=16384),
    "six axes": dict(lead=(2, 1, 2), Tq=11),
    "no batch, six axes": dict(lead=(2, 0, 2), Tq=11),
}  # fmt: skip


@cache
def awkward(name, dtype):
    """A call of the table and its reference, made once for all kernels."""
    case = make(dtype=dtype, **AWKWARD[name])
    return case, case.reference()


def check_forward(case, reference, **options):
    """Run a call and hold out and lse against the oracle: dtype, shape and every element."""
    out, lse = case.forward(**options)
    assert out.dtype == case.q.dtype and out.flags.writeable
    assert lse.dtype == (np.float64 if case.q.dtype == np.float64 else np.float32)
    assert_close("out", out, reference)
    assert_close("lse", lse, reference)
    return out, lse


@kernels
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_calls(name, backend, algorithm):
    """In float32; test_backward runs the same calls, forward too, in every dtype."""
    case, reference = awkward(name, "float32")
    check_forward(case, reference, backend=backend, algorithm=algorithm)


@settings(max_examples=drawn(60))
@given(problems())
def test_drawn_problems(case):
    reference = case.reference()
    for backend, algorithm in KERNELS:
        note(f"{backend} {algorithm}")
        check_forward(case, reference, backend=backend, algorithm=algorithm)


@kernels
@pytest.mark.parametrize("view", ["transposed", "sliced", "broadcast", "strided_last", "reversed", "fortran"])
def test_strided_inputs_give_the_bits_of_contiguous_ones(view, backend, algorithm):
    case = make(B=2, Hq=4, Hkv=2, Tq=19, Tk=35, d=8, dv=6, causal=True)
    views = {name: restride(getattr(case, name), view) for name in "qkv"}
    plain = [np.ascontiguousarray(array) for array in views.values()]
    options = dict(causal=True, return_lse=True, backend=backend, algorithm=algorithm)
    for a, b in zip(rf.attention(*views.values(), **options), rf.attention(*plain, **options), strict=True):
        np.testing.assert_array_equal(a, b)


@kernels
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_scores_of_thousands_do_not_overflow(dtype, backend, algorithm):
    """One key per row towers over the others, so softmax is one-hot and the answer is known: its value."""
    T, d = 40, 4
    height = 3e4 if dtype == "float16" else 1e4
    v = np.random.default_rng(0).standard_normal((T, d)).astype(dtype)
    eye = np.zeros((T, T), dtype)
    np.fill_diagonal(eye, 1)
    # A row's only positive score is `height`; the others are 0, and -height below the diagonal.
    k = (eye - np.tril(np.ones_like(eye), -1)).astype(dtype)
    q = np.asarray(height * eye[::-1], dtype)
    out, lse = rf.attention(q, k, v, scale=1.0, return_lse=True, backend=backend, algorithm=algorithm)
    S = q.astype(np.float64) @ k.astype(np.float64).T
    assert abs(S).max() == height
    m = S.max(axis=1)
    P = np.exp(S - m[:, None])
    expected = (P / P.sum(axis=1, keepdims=True)) @ v.astype(np.float64)
    np.testing.assert_allclose(lse, m + np.log(P.sum(axis=1)), rtol=1e-6)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=4 * eps, atol=4 * eps)


@kernels
def test_float64_is_within_1e_12(backend, algorithm):
    """The promise for float64 with nothing of the package between: P and |P| |V| in three lines of NumPy."""
    case = make(Tq=70, Tk=90, d=16, dv=5, dtype="float64", sram=16384)
    out, lse = case.forward(backend=backend, algorithm=algorithm)
    S = case.q @ case.k.swapaxes(-1, -2) / 4
    total = np.log(np.exp(S).sum(axis=-1))
    P = np.exp(S - total[..., None])
    assert (abs(out - P @ case.v) <= 1e-12 * (P @ abs(case.v))).all()
    np.testing.assert_allclose(lse, total, rtol=1e-12)


@kernels
def test_one_key_gives_its_value_exactly(backend, algorithm):
    case = make(Tq=9, Tk=1, dv=3)
    out, lse = case.forward(backend=backend, algorithm=algorithm)
    np.testing.assert_array_equal(out, np.broadcast_to(case.v, out.shape))


@kernels
@pytest.mark.parametrize("sink", [None, 0.75])
@pytest.mark.parametrize(
    "hide",
    [
        dict(causal=True, q_offset=-20),
        dict(window=(0, 0), q_offset=400),
        dict(mask=np.zeros((1, 1), bool)),
        dict(bias=np.full((1, 1), -np.inf, np.float32)),
        dict(kv_lengths=[0, 0]),
        dict(q_lengths=[0, 0]),
        dict(mask=M.Prefix(0)),
    ],
)
def test_rows_that_see_nothing_are_exactly_zero(hide, sink, backend, algorithm):
    case = make(Tq=18, sinks=None if sink is None else np.full(2, sink, np.float32), **hide)
    out, lse = case.forward(backend=backend, algorithm=algorithm)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf if sink is None or "q_lengths" in hide else np.float32(sink))


@kernels
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_out_is_written_and_given_back(layout, backend, algorithm):
    case = make(Tq=18, dv=5)
    q, k, v = (
        a if layout == "bhtd" else np.ascontiguousarray(a.swapaxes(1, 2)) for a in (case.q, case.k, case.v)
    )
    options = dict(layout=layout, backend=backend, algorithm=algorithm)
    expected = rf.attention(q, k, v, **options)
    out = np.full_like(expected, np.nan)
    assert rf.attention(q, k, v, out=out, **options) is out
    np.testing.assert_array_equal(out, expected)


@kernels
def test_probabilities_below_the_smallest_normal_float32_may_vanish(backend, algorithm):
    """Forty of them, each times 3: some processors and fast exponentials flush them to 0, others do not."""
    q, k, v = np.ones((1, 1), np.float32), np.full((41, 1), -90, np.float32), np.full((41, 1), 3.0, np.float32)
    k[0] = v[0] = 0
    options = dict(scale=1.0, return_lse=True)
    expected = reference(q, k, v, scale=1.0)
    out, lse = rf.attention(q, k, v, backend=backend, algorithm=algorithm, **options)
    assert 5e-38 < expected.oracle["out"].item() < 2e-37
    assert_close("out", out, expected)
    assert_close("lse", lse, expected)
    assert expected.allowed["out"].item() < 2e-36


@kernels
@pytest.mark.parametrize("Tq", [1, 20])
def test_probabilities_below_the_smallest_normal_float64_count(Tq, backend, algorithm):
    """exp(-715) and exp(-730), times 1e308: forward for v, backward for dout."""
    options = dict(scale=1.0, backend=backend, algorithm=algorithm)
    q, k, v, dout = np.ones((Tq, 1)), np.zeros((40, 1)), np.zeros((40, 1)), np.full((Tq, 1), 1e300)
    k[7], k[9], v[7], v[9] = -715, -730, 1e308, 1e308
    P = np.exp(k[:, 0]) / np.exp(k[:, 0]).sum()
    assert 0 < P[9] < P[7] < np.finfo(np.float64).tiny
    np.testing.assert_allclose(rf.attention(q, k, v, **options), np.full((Tq, 1), P @ v), rtol=1e-9)
    out, lse = rf.attention(q, k, np.ones_like(v), return_lse=True, **options)
    _, _, dv = rf.attention_backward(dout, q, k, np.ones_like(v), out, lse, **options)
    np.testing.assert_allclose(dv[[7, 9], 0], P[[7, 9]] * Tq * 1e300, rtol=1e-6)
