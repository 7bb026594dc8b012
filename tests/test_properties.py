"""Laws that hold whatever the right answer is: relations between two calls of one kernel. No oracle decides.

Everything is float64, where two ways of computing a number differ by rounding only. `same` allows what
contract section 6 allows each of the two calls (1e-12 A), so the bound comes from the arrays, not from taste.
Laws about bits say so. Every law is tried on every kernel.
"""

import numpy as np
import pytest
from hypothesis import assume, given, note
from strategies import problems
from test_forward import KERNELS, half_visible, kernels, make, normal
from tolerances import allowed_error

import rawflash as rf
from rawflash import masks as M

OPTIONAL_GRADIENTS = ("bias", "sinks")


def all_of(case, **options):
    """Every result of a call, by the names of the oracle's reference."""
    out, lse = case.forward(**options)
    gradients = case.backward(out, lse, **options)
    return {"out": out, "lse": lse} | {"d" + name: g for name, g in zip(case.wrt, gradients, strict=True)}


def same(a, b, reference, names=None):
    """Two results of the same thing: apart by at most the allowed errors of both."""
    for name in names or a:
        allowed = 2 * allowed_error(name, reference)
        with np.errstate(invalid="ignore"):
            far = ~(np.abs(a[name] - b[name]) <= allowed) & (a[name] != b[name])
        assert not far.any(), (
            f"{name} differs by {np.abs(a[name] - b[name])[far].max()}; allowed {allowed.min()}"
        )


def doubles(**more):
    """Drawn float64 calls with four axes and every gradient that exists."""

    def complete(case):
        sides = [name for name in OPTIONAL_GRADIENTS if name in case.options]
        case.options |= {name: case.options[name].astype(np.float64) for name in sides}  # it may be float32
        case.wrt = ("q", "k", "v", *sides)
        return case

    fixed = dict(
        dtypes=("float64",), dims=(4,), views=("contiguous", "sliced"), values=("normal", "integers")
    )
    return problems(**(fixed | more)).map(complete)


def float64(**options):
    return make(dtype="float64", **options)


# ---- how it is computed does not matter ------------------------------------------------------------


@given(doubles(exclude=("sram",), max_head_dim=8))
def test_tile_sizes_do_not_matter(case):
    reference = case.reference()
    for backend, algorithm in KERNELS:
        note(f"{backend} {algorithm}")
        options = dict(backend=backend, algorithm=algorithm)
        whole = all_of(case, **options)
        for sram in (1 << 14, 1 << 15, 1 << 18):
            same(all_of(case, sram=sram, **options), whole, reference)


@kernels
def test_many_tile_sizes(backend, algorithm):
    case = float64(
        B=1,
        Tq=101,
        Tk=117,
        d=5,
        dv=9,
        causal=True,
        sinks=normal(2),
        dropout=0.2,
        seed=3,
        bias=normal(101, 117),
        backend=backend,
        algorithm=algorithm,
    )
    reference, whole = case.reference(), all_of(case)
    plans = set()
    for sram in range(16384, 200_000, 12_345):
        plans.add(str(rf.explain(case.q, case.k, case.v, **case.options | {"sram": sram}).tiles))
        same(all_of(case, sram=sram), whole, reference)
    assert len(plans) >= 5, "the law was tried on one plan only"


@given(doubles(exclude=("deterministic",)))
def test_calls_repeat_bit_for_bit(case):
    for backend, algorithm in KERNELS:
        note(f"{backend} {algorithm}")
        options = dict(backend=backend, algorithm=algorithm)
        first, second = all_of(case, **options), all_of(case, **options)
        third, fourth = (all_of(case, deterministic=True, **options) for _ in range(2))
        for name in first:
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)
            np.testing.assert_array_equal(third[name], fourth[name], err_msg=name)


@kernels
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_large_calls_repeat_bit_for_bit(dtype, backend, algorithm):
    """Large enough for several threads and several pieces of work each."""
    case = make(
        B=2,
        Hq=4,
        Hkv=2,
        Tq=150,
        d=16,
        dtype=dtype,
        bias=normal(1, 150),
        deterministic=True,
        sram=32768,
        backend=backend,
        algorithm=algorithm,
    )
    first = all_of(case)
    for _ in range(5):
        for name, array in all_of(case).items():
            np.testing.assert_array_equal(array, first[name], err_msg=name)


@given(doubles())
def test_vjp_is_attention_and_its_backward(case):
    for backend, algorithm in KERNELS:
        note(f"{backend} {algorithm}")
        options = case.options | dict(backend=backend, algorithm=algorithm)
        expected = all_of(case, **options)
        out, pullback = rf.attention_vjp(case.q, case.k, case.v, wrt=case.wrt, **options)
        (again, lse), _ = rf.attention_vjp(case.q, case.k, case.v, return_lse=True, **options)
        gradients = pullback(case.dout, dlse=case.dlse)
        np.testing.assert_array_equal(out, expected["out"])
        np.testing.assert_array_equal(again, out)
        np.testing.assert_array_equal(lse, expected["lse"])
        for name, gradient in zip(case.wrt, gradients, strict=True):
            np.testing.assert_array_equal(gradient, expected["d" + name], err_msg=name)


@given(doubles(exclude=("layout",)))
def test_layout_is_a_transposition(case):
    for backend, algorithm in KERNELS:
        note(f"{backend} {algorithm}")
        options = dict(backend=backend, algorithm=algorithm)
        expected = all_of(case, **options)
        arrays = {name: getattr(case, name) for name in ("q", "k", "v", "dout")}
        for name, array in arrays.items():
            setattr(case, name, array.swapaxes(1, 2))  # the same memory, seen as "bthd"
        turned = all_of(case, layout="bthd", **options)
        for name, array in arrays.items():
            setattr(case, name, array)
        for name, array in turned.items():
            array = array.swapaxes(1, 2) if name in ("out", "dq", "dk", "dv") else array
            np.testing.assert_array_equal(array, expected[name], err_msg=name)


# ---- symmetries of attention -----------------------------------------------------------------------

POSITIONAL = (
    "causal",
    "window",
    "q_offset",
    "kv_lengths",
    "mask",
    "alibi_slopes",
    "dropout",
    "layout",
    "bias",
)


@given(doubles(exclude=POSITIONAL))
def test_permuting_the_keys_permutes_their_gradients(case):
    rng = np.random.default_rng(case.how["seed"])
    (B, Hq, Tq, _), Tk = case.q.shape, case.k.shape[2]
    case.options |= {"bias": rng.standard_normal((B, Hq, Tq, Tk)), "mask": rng.random((B, Hq, Tq, Tk)) < 0.7}
    case.wrt += ("bias",) if "bias" not in case.wrt else ()
    order = rng.permutation(Tk)
    reference = case.reference()
    for backend, algorithm in KERNELS:
        note(f"{backend} {algorithm}")
        options = dict(backend=backend, algorithm=algorithm)
        plain = all_of(case, **options)
        k, v = case.k, case.v
        case.k, case.v = k[:, :, order], v[:, :, order]
        moved = all_of(
            case, bias=case.options["bias"][..., order], mask=case.options["mask"][..., order], **options
        )
        case.k, case.v = k, v
        for name in ("dk", "dv"):
            plain_in_order = plain[name][:, :, order]
            moved[name] = moved[name][:, :, np.argsort(order)]
            assert plain_in_order.shape == moved[name].shape
        moved["dbias"] = moved["dbias"][..., np.argsort(order)]
        same(moved, plain, reference)


@given(doubles(exclude=("bias", "sinks")))
def test_shifting_a_row_of_scores_shifts_lse_only(case):
    """softmax(s + c) = softmax(s). A bias per row is such a shift; it comes after the softcap."""
    rng = np.random.default_rng(case.how["seed"])
    bthd = case.options.get("layout") == "bthd"
    B, Hq, Tq = (case.q.swapaxes(1, 2) if bthd else case.q).shape[:3]
    shift = rng.uniform(-9, 9, (B, Hq, Tq, 1))
    for backend, algorithm in KERNELS:
        note(f"{backend} {algorithm}")
        options = dict(backend=backend, algorithm=algorithm)
        plain = all_of(case, **options)
        shifted = all_of(case, bias=shift, **options)
        shifted["lse"] = shifted["lse"] - shift[..., 0]
        same(shifted, plain, case.reference(bias=shift))


@given(doubles(exclude=("dropout", "sinks")))
def test_values_of_one_give_one(case):
    """out is a mean: of ones it is one, in rows that see a key, and zero in the others."""
    case.v = np.ones_like(case.v)
    for backend, algorithm in KERNELS:
        note(f"{backend} {algorithm}")
        out, lse = case.forward(backend=backend, algorithm=algorithm)
        out = out.swapaxes(1, 2) if case.options.get("layout") == "bthd" else out
        np.testing.assert_allclose(out[~np.isneginf(lse)], 1, rtol=1e-12)
        np.testing.assert_array_equal(out[np.isneginf(lse)], 0)


@given(doubles(exclude=("sinks", "bias")))
def test_rows_of_dS_sum_to_dlse(case):
    """A shift of a row changes nothing but lse, so dS sums to 0 over a row, and with dlse to that."""
    bthd = case.options.get("layout") == "bthd"
    B, Hq, Tq = (case.q.swapaxes(1, 2) if bthd else case.q).shape[:3]
    Tk = case.k.shape[1 if bthd else 2]
    case.options["bias"], case.wrt = np.zeros((B, Hq, Tq, Tk)), ("bias",)
    reference = case.reference()
    for backend, algorithm in KERNELS:
        note(f"{backend} {algorithm}")
        result = all_of(case, backend=backend, algorithm=algorithm)
        dlse = 0 if case.dlse is None else case.dlse
        expected = np.where(np.isneginf(result["lse"]), 0, dlse)
        allowed = allowed_error("dbias", reference).sum(axis=-1) + 1e-14 * np.abs(dlse)
        assert (np.abs(result["dbias"].sum(axis=-1) - expected) <= allowed).all()


@given(doubles(exclude=("dlse",)))
def test_the_backward_pass_is_linear_in_dout(case):
    rng = np.random.default_rng(case.how["seed"])
    one, other = case.dout, rng.standard_normal(case.dout.shape)
    assume(np.isfinite(one).all())  # padding may be poisoned, and that is not this law
    case.dout = np.abs(one) + 3 * np.abs(other)  # bounds A of each of the three calls
    reference = case.reference()
    for backend, algorithm in KERNELS:
        note(f"{backend} {algorithm}")
        options = dict(backend=backend, algorithm=algorithm)
        out, lse = case.forward(**options)
        results = []
        for dout in (one, other, one - 3 * other):
            case.dout = dout
            results.append(case.backward(out, lse, **options))
        for name, a, b, c in zip(case.wrt, *results, strict=True):
            error = np.abs(c - (a - 3 * b))
            # Positive dO: A is a sum of positive numbers, no smaller than that of each call.
            assert (error <= 8 * allowed_error("d" + name, reference)).all(), name


@kernels
def test_batch_entries_do_not_know_each_other(backend, algorithm):
    B, H, T = 3, 4, 33
    case = float64(
        B=B,
        Hq=H,
        Hkv=2,
        Tq=T,
        causal=True,
        q_offset=np.array([0, -4, 9]),
        kv_lengths=[33, 20, 1],
        q_lengths=[5, 33, 17],
        alibi_slopes=np.random.default_rng(0).random((B, H)),
        sinks=normal(H),
        bias=normal(B, H, T, T),
        mask=half_visible(B, 1, T, T),
        softcap=4.0,
        backend=backend,
        algorithm=algorithm,
    )
    whole, reference = all_of(case), case.reference()
    dsinks = 0
    for b in range(B):
        alone = float64()
        for name in ("q", "k", "v", "dout", "dlse"):
            setattr(alone, name, getattr(case, name)[b : b + 1])
        per_entry = ("q_offset", "kv_lengths", "q_lengths", "alibi_slopes", "bias", "mask")
        alone.options = {n: x[b : b + 1] if n in per_entry else x for n, x in case.options.items()}
        alone.wrt = case.wrt
        results = all_of(alone)
        dsinks = dsinks + results.pop("dsinks")
        part = {name: array[b : b + 1] for name, array in whole.items() if name != "dsinks"}
        same(results, part, alone.reference())
    same({"dsinks": dsinks}, whole, reference, ["dsinks"])


@kernels
def test_heads_do_not_know_each_other(backend, algorithm):
    Hq, Hkv, T = 6, 2, 19
    slopes = np.linspace(0, 1, Hq)
    case = float64(
        B=2,
        Hq=Hq,
        Hkv=Hkv,
        Tq=T,
        alibi_slopes=slopes,
        sinks=normal(Hq),
        bias=normal(1, Hq, 1, T),
        backend=backend,
        algorithm=algorithm,
    )
    whole = all_of(case)
    for h in range(Hkv):  # a key head and the query heads that share it: consecutive ones
        heads = slice(h * Hq // Hkv, (h + 1) * Hq // Hkv)
        alone = float64()
        alone.q, alone.dout, alone.dlse = case.q[:, heads], case.dout[:, heads], case.dlse[:, heads]
        alone.k, alone.v, alone.wrt = case.k[:, h : h + 1], case.v[:, h : h + 1], case.wrt
        alone.options = case.options | {
            "alibi_slopes": slopes[heads],
            "sinks": case.options["sinks"][heads],
            "bias": case.options["bias"][:, heads],
        }
        part = {n: whole[n][:, heads] for n in ("out", "lse", "dq", "dbias")}
        part |= {
            "dk": whole["dk"][:, h : h + 1],
            "dv": whole["dv"][:, h : h + 1],
            "dsinks": whole["dsinks"][heads],
        }
        same(all_of(alone), part, alone.reference())


@kernels
def test_grouped_heads_are_repeated_heads(backend, algorithm):
    case = float64(
        B=2, Hq=6, Hkv=2, Tq=19, causal=True, dropout=0.2, seed=4, backend=backend, algorithm=algorithm
    )
    grouped, reference = all_of(case), case.reference()
    case.k, case.v = case.k.repeat(3, axis=1), case.v.repeat(3, axis=1)
    repeated = all_of(case)
    for name in ("dk", "dv"):
        repeated[name] = repeated[name].reshape(2, 2, 3, 19, 8).sum(axis=2)
    same(repeated, grouped, reference)


@kernels
@pytest.mark.parametrize("n", [1, 13, 16, 17])
def test_the_start_of_a_causal_sequence_does_not_know_the_rest(n, backend, algorithm):
    case = float64(Tq=40, causal=True, q_offset=0, dropout=0.1, seed=9, backend=backend, algorithm=algorithm)
    case.dout[:, :, n:] = case.dlse[:, :, n:] = 0  # so the rest sends no gradient back either
    whole = all_of(case)
    for name in ("q", "k", "v", "dout", "dlse"):
        setattr(case, name, getattr(case, name)[:, :, :n])
    start = all_of(case)
    same(start, {name: array[:, :, :n] for name, array in whole.items()}, case.reference())
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(whole[name][:, :, n:], 0)


# ---- options said in two ways ----------------------------------------------------------------------

i, j = np.arange(23)[:, None], np.arange(37)[None, :]
OFFSET = 37 - 23
EQUIVALENT = {
    "causal = mask": (dict(causal=True), dict(mask=j <= i + OFFSET)),
    "causal = mask object": (dict(causal=True), dict(mask=M.Causal())),
    "causal = window": (dict(causal=True), dict(window=(None, 0))),
    "causal, upper left = mask": (dict(causal=True, q_offset=0), dict(mask=j <= i)),
    "window = mask": (dict(window=(5, 3)), dict(mask=(j >= i + OFFSET - 5) & (j <= i + OFFSET + 3))),
    "window = mask object": (dict(window=(5, 3)), dict(mask=M.SlidingWindow(5, 3))),
    "window and causal = window": (dict(window=(5, 3), causal=True), dict(window=(5, 0))),
    "wide window = nothing": (dict(window=(99, 99)), dict()),
    "window, offset = mask": (dict(window=(4, None), q_offset=3), dict(mask=j >= i + 3 - 4)),
    "mask = bias": (dict(mask=(i + j) % 3 > 0), dict(bias=np.where((i + j) % 3 > 0, 0.0, -np.inf))),
    "mask object = its array": (
        dict(mask=M.PrefixLM(4) | M.Segments(np.arange(23) // 5, np.arange(37) // 9)),
        dict(mask=((j < 4) | (j <= i + OFFSET)) | (i // 5 == j // 9))),
    "alibi = bias": (
        dict(alibi_slopes=np.array([0.25, 0.5])),
        dict(bias=-np.array([0.25, 0.5])[:, None, None] * abs(i + OFFSET - j))),
    "alibi with offset = bias": (
        dict(alibi_slopes=np.array([0.25, 0.5]), q_offset=-2),
        dict(bias=-np.array([0.25, 0.5])[:, None, None] * abs(i - 2 - j))),
    "lengths = mask": (dict(kv_lengths=[20, 37], q_offset=0), dict(mask=j[None, None] < np.array([20, 37])[
        :, None, None, None])),
    "lengths and causal = mask": (
        dict(kv_lengths=[20, 37], causal=True),
        dict(mask=(j < np.array([20, 37])[:, None, None, None])
             & (j <= i + np.array([20 - 23, OFFSET])[:, None, None, None]))),
    "scale None = 1 / sqrt(d)": (dict(), dict(scale=8**-0.5)),
    "very large softcap = none": (dict(), dict(softcap=1e9)),
    "sink of -inf = none": (dict(), dict(sinks=np.full(2, -np.inf))),
    "no dropout = none": (dict(), dict(dropout=0.0, seed=12)),
    "bias of zero = none": (dict(), dict(bias=np.zeros((1, 1)))),
    "bias broadcast = written out": (
        dict(bias=np.linspace(-1, 1, 37)), dict(bias=np.tile(np.linspace(-1, 1, 37), (2, 2, 23, 1)))),
}  # fmt: skip


@kernels
@pytest.mark.parametrize(("one", "other"), EQUIVALENT.values(), ids=EQUIVALENT)
def test_two_ways_to_say_the_same(one, other, backend, algorithm):
    a, b = float64(Tq=23, Tk=37, **one), float64(Tq=23, Tk=37, **other)
    a.wrt = b.wrt = ("q", "k", "v")
    options = dict(backend=backend, algorithm=algorithm)
    same(all_of(a, **options), all_of(b, **options), a.reference())


@kernels
def test_scale_is_a_factor_of_q(backend, algorithm):
    options = dict(backend=backend, algorithm=algorithm)
    a, b = float64(Tq=23, Tk=37, scale=0.75, **options), float64(Tq=23, Tk=37, scale=1.0, **options)
    b.q = 0.75 * b.q
    left, right = all_of(a), all_of(b)
    right["dq"] = 0.75 * right["dq"]
    same(left, right, a.reference())


@kernels
def test_lengths_are_slices(backend, algorithm):
    case = float64(
        B=2,
        Tq=23,
        Tk=37,
        q_lengths=[7, 23],
        kv_lengths=[20, 1],
        causal=True,
        backend=backend,
        algorithm=algorithm,
    )
    whole = all_of(case)
    for b, (n, m) in enumerate([(7, 20), (23, 1)]):
        alone = float64(causal=True, backend=backend, algorithm=algorithm)
        alone.q, alone.dout, alone.dlse = (getattr(case, x)[b : b + 1, :, :n] for x in ("q", "dout", "dlse"))
        alone.k, alone.v = case.k[b : b + 1, :, :m], case.v[b : b + 1, :, :m]
        part = {name: whole[name][b : b + 1, :, :n] for name in ("out", "lse", "dq")}
        part |= {name: whole[name][b : b + 1, :, :m] for name in ("dk", "dv")}
        same(all_of(alone), part, alone.reference())
        for name, size in dict(out=n, dq=n, dk=m, dv=m).items():
            np.testing.assert_array_equal(whole[name][b, :, size:], 0)
        assert np.isneginf(whole["lse"][b, :, n:]).all()


# ---- dropout ---------------------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("sram", [None, 32768])
@pytest.mark.parametrize(("p", "seed"), [(0.5, 0), (0.1, 2**64 - 1), (0.9, 12345678901)])
def test_dropout_is_the_published_mask(p, seed, sram, dtype, backend, algorithm):
    """With V = 1 column by column, out is P itself, and with dO = 1 likewise dV: what is 0 was dropped."""
    B, Hq, Tq, Tk = 2, 4, 21, 50
    q, k = np.zeros((B, Hq, Tq, 8), dtype), np.zeros((B, 2, Tk, 8), dtype)
    v = np.broadcast_to(np.eye(Tk, dtype=dtype), (B, 2, Tk, Tk))
    options = dict(dropout=p, seed=seed, sram=sram, backend=backend, algorithm=algorithm)
    out, lse = rf.attention(q, k, v, return_lse=True, **options)
    mask = rf.dropout_mask(p, seed, (B, Hq, Tq, Tk))
    np.testing.assert_array_equal(out != 0, mask)
    np.testing.assert_allclose(out[mask], 1 / (1 - p) / Tk, rtol=2 * float(np.finfo(dtype).eps))
    np.testing.assert_allclose(lse, np.log(Tk), rtol=1e-6)  # lse is that without dropout

    # Backward: dV[j, x] = sum over rows and heads of a group; one row of one head at a time shows the mask.
    for h, row in [(0, 0), (1, 20), (3, 16)]:
        dout = np.zeros_like(out)
        dout[:, h, row] = 1
        (dv,) = rf.attention_backward(dout, q, k, v, out, lse, wrt=("v",), **options)
        np.testing.assert_array_equal(dv[:, h // 2, :, 0] != 0, mask[:, h, row])
        np.testing.assert_array_equal(dv[:, 1 - h // 2], 0)


@kernels
def test_dropout_keeps_about_as_much_as_it_says(backend, algorithm):
    """Mean of out over rows with V = 1: the sum of n independent draws, within five standard deviations."""
    n, p = 200, 0.3
    q = np.zeros((n, 4))
    out = rf.attention(q, q, np.ones((n, 1)), dropout=p, seed=5, backend=backend, algorithm=algorithm)
    assert abs(out.mean() - 1) < 5 * np.sqrt(p / (1 - p)) / n
    assert out.std() > 0
