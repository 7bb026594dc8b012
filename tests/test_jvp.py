"""`attention_jvp`: against the oracle, central differences of it, and the pullback, whose transpose it is."""

import numpy as np
import pytest
from hypothesis import given, settings
from strategies import VIEWS, problems, restride
from test_forward import make, normal
from tolerances import assert_close

import rawflash as rf
from rawflash import masks as M
from rawflash.accuracy import UNDERFLOW, UNIT_ROUNDOFF
from rawflash.backends import BACKENDS
from rawflash.backends.numpy_tiled.fa2_jvp import fa2_jvp
from rawflash.backends.numpy_tiled.memory import Memory
from rawflash.backends.numpy_tiled.scores import Scores
from rawflash.oracle import Call, forward_head
from rawflash.problem import check_jvp
from rawflash.tiling import plan_tiles
from rawflash.traffic import traffic

TILED = dict(algorithms=("fa2",), exclude=("dlse", "deterministic"), backend="numpy_tiled")
FACTOR = 8  # of the unit roundoff, and of how many roundings a number has behind it


def tangents_of(case, view="contiguous"):
    """One for each of q, k and v."""
    rng = np.random.default_rng(case.how.get("seed", 0) + 1)
    return tuple(
        restride(rng.standard_normal(x.shape).astype(x.dtype), view) for x in (case.q, case.k, case.v)
    )


def bounds(case, tangents):
    """What may be wrong of ``(dout, dlse)``: by sums of magnitudes, as each product and sum is rounded."""
    wide = "float64" if case.q.dtype == np.float64 else "float32"
    compute, tiny = UNIT_ROUNDOFF[wide], UNDERFLOW[wide]
    call = Call(case.q, case.k, case.v, **case.options)
    tQ, tK, tV = (call.four_axes(x).astype(np.float64) for x in tangents)
    of_out, of_lse = call.zeros("out"), call.zeros("lse")
    for x in call.heads():
        f = forward_head(x)
        sizes = abs(x.scale) * (abs(tQ[x.rows]) @ abs(x.K).T + abs(x.Q) @ abs(tK[x.keys]).T)
        sizes = np.where(x.visible, sizes, 0)
        scores = abs(x.scale) * (abs(x.Q) @ abs(x.K).T) + np.where(x.visible, abs(x.bias), 0) + x.slope * x.distance
        highest = np.where(x.visible, scores, 0).max(axis=1, initial=0)
        roundings = FACTOR * compute * (x.Q.shape[1] + x.K.shape[0] + 8 + highest)
        changes = (f.P * sizes).sum(axis=1)
        PZ, V, changed_V = f.P * f.Z, abs(x.V), abs(tV[x.keys])
        of_lse[x.rows] = roundings * changes + tiny * sizes.sum(axis=1)
        of_out[x.rows] = roundings[:, None] * (PZ @ changed_V + (PZ * sizes) @ V + changes[:, None] * (PZ @ V))
        of_out[x.rows] += tiny * (f.Z @ changed_V + (f.Z * (sizes + changes[:, None])) @ V)  # P that underflows
    return call.restore("out", of_out), call.restore("lse", of_lse)


def check_against_oracle(case, view="contiguous"):
    tangents = tangents_of(case, view)
    primals = case.q, case.k, case.v
    found, changes = rf.attention_jvp(primals, tangents, return_lse=True, **case.options)
    _, expected = rf.oracle.attention_jvp(primals, tangents, return_lse=True, **case.options)
    reference = case.reference()
    for name, got in zip(("out", "lse"), found, strict=True):
        assert_close(name, got, reference)
    for got, want, bound in zip(changes, expected, bounds(case, tangents), strict=True):
        rounding = UNIT_ROUNDOFF[got.dtype.name]
        off = abs(got.astype(np.float64) - want)
        assert got.shape == want.shape and (
            off <= bound * (1 + rounding) + rounding * abs(want) + UNDERFLOW[got.dtype.name]
        ).all(), off.max()
    assert changes[0].dtype == case.q.dtype
    assert changes[1].dtype == (np.float64 if case.q.dtype == np.float64 else np.float32)


@settings(max_examples=60)
@given(case=problems(**TILED))
def test_drawn_problems(case):
    check_against_oracle(case)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_tangents_of_any_strides(layout, view):
    case = make(Tq=9, Tk=13, d=6, causal=True, dtype="float64")
    if layout == "bthd":
        case.options["layout"] = layout
        case.q, case.k, case.v = (x.swapaxes(1, 2) for x in (case.q, case.k, case.v))
    tangents = tangents_of(case, view)
    options = case.options | dict(return_lse=True)
    plain = [np.array(x) for x in tangents]
    for got, want in zip(rf.attention_jvp((case.q, case.k, case.v), tangents, **options),
                         rf.attention_jvp((case.q, case.k, case.v), plain, **options), strict=True):  # fmt: skip
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)  # products sum in an order that strides decide


@settings(max_examples=30)
@given(case=problems(dtypes=("float64",), values=("normal",), **TILED))
def test_the_pullback_is_the_transpose(case):
    """<dout, J t> + <dlse, J t> = <J^T (dout, dlse), t>, by two programs that share no line of mathematics."""
    tangents, options = tangents_of(case), case.options
    (out, lse), (tout, tlse) = rf.attention_jvp((case.q, case.k, case.v), tangents, return_lse=True, **options)
    dlse = np.random.default_rng(3).standard_normal(lse.shape)
    grads = rf.attention_backward(case.dout, case.q, case.k, case.v, out, lse, dlse=dlse, **options)
    dout = np.nan_to_num(case.dout, nan=0.0)  # of padding
    left = (dout * tout).sum() + (dlse * tlse).sum()
    parts = [grad * t for grad, t in zip(grads, tangents, strict=True)]
    sizes = sum(abs(part).sum() for part in parts) + abs(dout * tout).sum() + abs(dlse * tlse).sum()
    assert abs(left - sum(part.sum() for part in parts)) <= 1e-11 * (1 + sizes)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scores_at_their_softcap_do_not_change(dtype):
    """Tangents of q and k of any size: what they give overflows, times a slope that is 0."""
    huge = {"float32": 1e20, "float64": 1e160}[dtype]
    q, k = np.full((2, 1, 1, 2, 4), huge, dtype)
    v, tv = np.random.default_rng(0).standard_normal((2, 1, 1, 2, 3)).astype(dtype)
    options = dict(softcap=5.0, return_lse=True)
    _, expected = rf.attention_jvp((q, k, v), (None, None, tv), **options)
    assert (expected[1] == 0).all()
    for module in rf, rf.oracle:
        _, changes = module.attention_jvp((q, k, v), (q, k, tv), **options)
        for got, want in zip(changes, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)


EVERYTHING = dict(
    Hq=4, Hkv=2, Tq=11, Tk=14, d=5, dv=3, dtype="float64", causal=True, window=(9, None), q_lengths=[11, 6],
    kv_lengths=[14, 9], softcap=2.0, alibi_slopes=np.full(4, 0.1), sinks=normal(4), dropout=0.2, seed=3,
    bias=normal(4, 11, 14), mask=M.PrefixLM(4) | M.Causal(),
)  # fmt: skip


@pytest.mark.parametrize("what", [0, 1, 2, None])
def test_central_differences(what):
    """Of the oracle's forward pass, along one of the tangents, or all."""
    case = make(**EVERYTHING)
    tangents = tuple(t if what in (n, None) else None for n, t in enumerate(tangents_of(case)))
    primals, step = (case.q, case.k, case.v), 1e-5

    def at(s):
        moved = [x if t is None else x + s * t for x, t in zip(primals, tangents, strict=True)]
        return rf.oracle.attention(*moved, return_lse=True, **case.options)

    _, changes = rf.attention_jvp(primals, tangents, return_lse=True, **case.options)
    _, of_oracle = rf.oracle.attention_jvp(primals, tangents, return_lse=True, **case.options)
    for got, other, above, below in zip(changes, of_oracle, at(step), at(-step), strict=True):
        with np.errstate(invalid="ignore"):  # -inf - -inf of padding
            want = np.nan_to_num((above - below) / (2 * step), nan=0.0)
        np.testing.assert_allclose(got, want, atol=1e-8)
        np.testing.assert_allclose(other, want, atol=1e-8)
    if what in (2, None):  # the output is linear in v
        out, change = rf.attention_jvp(primals, (None, None, case.v), **case.options)
        np.testing.assert_allclose(out, change, atol=1e-14)


def test_rows_that_see_nothing_and_padding_do_not_change():
    case = make(B=2, Tq=5, Tk=3, d=4, causal=True, q_lengths=[5, 2], kv_lengths=[3, 0], dtype="float32")
    tangents = tangents_of(case)
    for array in (case.q, *tangents[:1]):
        array[1, :, 2:] = np.nan  # padding is not read
    (out, lse), (tout, tlse) = rf.attention_jvp((case.q, case.k, case.v), tangents, return_lse=True, **case.options)
    none = np.isneginf(lse)
    assert none.any() and not none.all()
    assert (tlse[none] == 0).all() and (tout[none] == 0).all() and (out[none] == 0).all()
    assert np.isfinite(tlse).all() and np.isfinite(tout).all() and (tlse[~none] != 0).any()


@pytest.mark.parametrize("sram", [1 << 12, 1 << 14, None])
def test_tiles_and_their_tangents_fit_on_chip(sram):
    """Nothing of size T x T, and no more on chip than was planned: half of M for tiles, half for tangents."""
    case = make(Tq=150, Tk=170, d=8, dv=6, dtype="float32", causal=True, sram=sram)
    problem, x, given = check_jvp((case.q, case.k, case.v), tangents_of(case), **case.options)
    tiles = plan_tiles(problem, rf.hardware.chip_of("numpy_tiled", None), "jvp")
    memory = Memory.of(problem, tiles)
    shapes = problem.B, problem.Hq, problem.Tq
    fa2_jvp(problem, tiles, x, given, *(np.zeros(shape, np.float32) for shape in ((*shapes, 6), shapes) * 2),
            memory=memory)  # fmt: skip
    assert memory.peak <= memory.capacity
    assert memory.peak == tiles.elements or sram is None
    assert memory.loads["tK"] == memory.loads["K"] and memory.loads["tQ"] == memory.loads["Q"] == case.q.size
    assert memory.stores["tO"] == memory.stores["O"] == case.q.shape[1] * problem.B * 150 * 6
    predicted = traffic(problem, tiles, "jvp", visibility=x.visibility)
    counted = memory.traffic()
    assert predicted.loads == counted.loads and predicted.stores == counted.stores
    if sram == 1 << 12:
        assert tiles.bc < 32


def test_plans_of_what_has_no_forward_mode():
    problem = rf.problem.Problem(algorithm="fa1", d=8, dv=8, backend="numpy_tiled")
    with pytest.raises(rf.ProblemError, match="fa2"):
        plan_tiles(problem, rf.hardware.chip_of("numpy_tiled", None), "jvp")


@pytest.mark.parametrize("old", ["slope", "hidden"])
def test_broken_tangents_are_caught(old, monkeypatch):
    def broken(self, S, tape):
        S *= self.problem.scale if old == "slope" else tape.slope
        if old != "hidden" and tape.seen is not None:
            S[~tape.seen] = 0

    case = make(**EVERYTHING)
    if old == "hidden":
        case = make(Tq=5, Tk=6, d=4, dtype="float64", mask=np.arange(6) < 5)
        case.k[:, :, -1] = np.inf
    check_against_oracle(case)
    monkeypatch.setattr(Scores, "tangent", broken)
    with pytest.raises(AssertionError):
        check_against_oracle(case)


# ---- bad input ---------------------------------------------------------------------------------------------------


def good():
    case = make(Tq=5, Tk=6, d=4)
    return (case.q, case.k, case.v), tangents_of(case)


BAD = {
    "primals are an array": (lambda p, t: (p[0], t), "primals is a ndarray; expected a tuple of three"),
    "two tangents": (lambda p, t: (p, t[:2]), "tangents is a tuple; expected a tuple of three"),
    "a tangent of another shape": (lambda p, t: (p, (t[0][:, :, :2], *t[1:])), "tangents.0. has shape"),
    "a tangent of another dtype": (lambda p, t: (p, (t[0], t[1].astype(np.float64), t[2])),
                                   "tangents.1. has dtype float64; expected float32"),
    "a tangent is a list": (lambda p, t: (p, (*t[:2], [1.0])), "tangents.2. is"),
    "k does not go with q": (lambda p, t: ((p[0], p[1][..., :3], p[2]), t), "k has shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    change, message = BAD[name]
    with pytest.raises(rf.ProblemError, match=message):
        rf.attention_jvp(*change(*good()))


def test_options_that_it_has_not():
    primals, tangents = good()
    with pytest.raises(rf.ProblemError, match="out is not an option of attention_jvp"):
        rf.attention_jvp(primals, tangents, out=np.zeros_like(primals[0]))
    with pytest.raises(rf.ProblemError, match="tangents.0. is a int"):  # before it is planned
        rf.attention_jvp(primals, (1, 2, 3), sram=1)
    with pytest.raises(rf.ProblemError, match="casual"):
        rf.attention_jvp(primals, tangents, casual=True)


@pytest.mark.parametrize("options", [dict(backend="numba_cpu"), dict(algorithm="fa1"), dict(algorithm="standard")])
def test_who_has_forward_mode(options):
    with pytest.raises(rf.BackendError, match="numpy_tiled for CPU arrays"):
        rf.attention_jvp(*good(), **options)
    assert [name for name, row in BACKENDS.items() if row.forward_mode] == ["numpy_tiled"]


def test_bad_tangents_of_the_oracle():
    primals, tangents = good()
    with pytest.raises(rf.ProblemError, match="tangents is a tuple; expected a tuple of three"):
        rf.oracle.attention_jvp(primals, tangents[:2])
    with pytest.raises(rf.ProblemError, match="tangents.1. has shape"):
        rf.oracle.attention_jvp(primals, (tangents[0], tangents[1][:, :, :1], tangents[2]))


# ---- the plan --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [dict(causal=True), dict(mask=M.PrefixLM(5)), dict(kv_lengths=[9, 20])])
def test_explain_says_what_runs(options):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 2, 20, 8)) for _ in range(3))
    made = rf.explain(q, k, v, "jvp", sram=16384, **options)
    assert made.kernel == "numpy_tiled.fa2_jvp" and made.unavailable is None
    problem, x, tangents = check_jvp((q, k, v), (q, k, v), sram=16384, **options)
    tiles = plan_tiles(problem, rf.hardware.chip_of("numpy_tiled", None), "jvp")
    assert made.tiles == tiles and made.traffic == traffic(problem, tiles, "jvp", visibility=x.visibility)
    assert all("forward mode" in why for _, why in made.refused) and "Q, tangent" in str(made)


@pytest.mark.parametrize("options, error, text", [
    (dict(backend="numba_cpu"), rf.BackendError, "has no forward mode of algorithm 'fa2'; these have one: numpy_tiled"),
    (dict(algorithm="fa1"), rf.BackendError, "has no forward mode of algorithm 'fa1'"),
    (dict(out=np.zeros((2, 5, 4))), rf.ProblemError, "out is not an option of attention_jvp"),
    (dict(cu_seqlens_q=[0, 5], cu_seqlens_k=[0, 5]), rf.ProblemError, "cu_seqlens_q and cu_seqlens_k are not accepted"),
    (dict(block_table=np.zeros((1, 1), np.int32)), rf.ProblemError, "block_table is not accepted with direction='jvp'"),
    (dict(window=-2), rf.ProblemError, "window"),
])  # fmt: skip
def test_explain_refuses_what_is_refused(options, error, text):
    x = np.zeros((2, 5, 4))
    with pytest.raises(error, match=text):
        rf.explain(x, x, x, "jvp", **options)
