"""`attention_decode` and `append_kv` on a CPU: a cache is the call without one, however it is cut into blocks.

All that lies in a cache and is no key of a sequence is NaN here, and what of a block table is not used names no block.
"""

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from strategies import DTYPES, Decode, decode_problems, fill, restride
from test_forward import drawn
from tolerances import assert_close

import rawflash as rf

BACKENDS = ("numba_cpu", "numpy_tiled")


def backends_for(case):
    """numba_cpu has kernels of its own for each dtype, which take long to compile: one is enough here."""
    return BACKENDS if case.q.dtype.name == "float32" else BACKENDS[1:]


def assert_results_close(results, reference):
    for name, result in zip(("out", "lse"), results, strict=True):
        assert_close(name, result, reference)


# ---- against the oracle ------------------------------------------------------------------------------


@settings(max_examples=drawn(40))
@given(decode_problems())
def test_drawn_problems(case):
    reference, lengths = case.reference(), case.kv_lengths.copy()
    for backend in backends_for(case):
        note(backend)
        out, lse = case.forward(backend=backend)
        assert out.dtype == case.q.dtype and out.flags.writeable
        assert_results_close((out, lse), reference)
    np.testing.assert_array_equal(case.kv_lengths, lengths)


@given(decode_problems(pages=(1, 2, 3, 5, 17), dtypes=("float32",)))
def test_bits_do_not_depend_on_the_blocks(case):
    """Any order of the blocks, and no blocks at all."""
    for backend in BACKENDS:
        first = case.forward(backend=backend)
        again = [case.forward(order, backend=backend) for order in (1, 2)]
        again.append(Decode(**vars(case) | {"page": 0, "spare": 0}).forward(backend=backend))
        for results in again:
            for a, b in zip(results, first, strict=True):
                np.testing.assert_array_equal(a, b)


def make(B=2, Hq=4, Hkv=2, Tq=1, lengths=(9, 4), d=8, dv=5, page=4, dtype="float32", layout="bhtd", **options):
    """A call with standard normal arrays."""
    rng, kind, Tk = np.random.default_rng(1), DTYPES[dtype], max(lengths, default=0)
    q, k, v = (fill(rng, shape, "normal", kind) for shape in ((B, Hq, Tq, d), (B, Hkv, Tk, d), (B, Hkv, Tk, dv)))
    return Decode(q, k, v, np.array(lengths, np.int64), options, page, 1, layout)


EDGES = {
    "no sequences": dict(B=0, lengths=()),
    "no queries": dict(Tq=0),
    "no keys": dict(lengths=(0, 0)),
    "no keys, sinks": dict(lengths=(0, 0), sinks=np.arange(4, dtype=np.float32)),
    "no keys in one": dict(lengths=(0, 7), causal=True),
    "more queries than keys, causal": dict(Tq=6, lengths=(2, 9), causal=True),
    "a block for each key": dict(page=1),
    "blocks of all keys": dict(page=9),
    "full blocks": dict(lengths=(8, 4)),
}


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("name", EDGES)
def test_edges(name, paged):
    case = make(**EDGES[name])
    case.page *= paged
    for spare in (0, 1):
        case.spare = spare
        for backend in BACKENDS:
            assert_results_close(case.forward(backend=backend), case.reference())


def test_sequences_may_share_blocks(rng):
    """A prefix that several sequences have in common is there once; two caches may also be one."""
    q, pool = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 2, 1, 8), (5, 2, 4, 8)))
    table = np.array([[3, 1], [3, 0], [3, -1]])
    lengths = np.array([7, 6, 4])
    keys = np.stack([np.concatenate(pool[[3, n]], axis=1) for n in (1, 0, 0)])
    out, lse = rf.attention_decode(q, pool, pool, lengths, table, return_lse=True)
    reference = Decode(q, keys, keys, lengths, {}).reference()
    assert_results_close((out, lse), reference)


@pytest.mark.parametrize("kind", [list, tuple, np.uint8, np.int16, np.int32, np.uint64])
def test_lengths_and_tables_of_any_integers(kind):
    case = make()
    k_cache, v_cache, table = case.caches()
    table = np.maximum(table, 0) % len(k_cache)
    made = [x.tolist() if kind in (list, tuple) else x.astype(kind) for x in (case.kv_lengths, table)]
    out = rf.attention_decode(case.q, k_cache, v_cache, kind(made[0]) if kind is tuple else made[0], made[1])
    np.testing.assert_array_equal(out, case.forward()[0])


def test_explain_says_that_blocks_are_gathered():
    case = make()
    k_cache, v_cache, table = case.caches()
    made = rf.explain(case.q, k_cache, v_cache, kv_lengths=case.kv_lengths, block_table=table)
    assert made.copied == ("k_cache", "v_cache") and "a paged cache is gathered" in str(made)
    assert (made.problem.page, made.problem.Tk) == (0, 9)  # what a kernel sees
    contiguous = Decode(**vars(case) | {"page": 0}).caches()[:2]
    assert rf.explain(case.q, *contiguous, kv_lengths=case.kv_lengths).copied == ()


# ---- append ------------------------------------------------------------------------------------------


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@st.composite
def appends(draw, **sizes):
    """``(case, new, before)``: a `Decode`, keys and values that end its sequences, and their lengths without those."""
    case = draw(decode_problems(max_rows=0, **sizes))
    Tn = draw(st.integers(0, int(case.kv_lengths.min(initial=5))))
    return case, case.newest(Tn), case.kv_lengths - Tn


@given(appends(max_length=20))
def test_an_append_is_the_cache_with_more_keys(drawn):
    """Bit for bit, with NaN in all other rows and in blocks of nobody."""
    case, new, before = drawn
    *caches, table = case.caches(filled=before)
    lengths = before.copy()
    assert rf.append_kv(*caches, *new, lengths, table, layout=case.layout) is None
    assert all(same_bits(a, b) for a, b in zip(caches, case.caches()[:2], strict=True))
    np.testing.assert_array_equal(lengths, before)


@pytest.mark.parametrize("view", ["transposed", "sliced", "strided_last", "reversed", "fortran"])
@pytest.mark.parametrize("paged", [True, False])
def test_caches_of_any_strides(view, paged, rng):
    """Only those elements are written: what lies between them is NaN, and stays that."""
    case = make(page=4 * paged, lengths=(7, 5), dtype="float64")
    *caches, table = case.caches(filled=[4, 2])
    new = case.newest(3)
    caches = [restride(cache, view) for cache in caches]
    homes = [cache if cache.base is None else cache.base for cache in caches]
    nans = [np.isnan(home).sum() for home in homes]
    rf.append_kv(*caches, *(restride(x, view) for x in new), [4, 2], table)
    for cache, home, before, expected, x in zip(caches, homes, nans, case.caches()[:2], new, strict=True):
        assert same_bits(cache.copy(), expected)
        assert np.isnan(home).sum() == before - x.size


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors(dtype):
    torch = pytest.importorskip("torch")

    def tensor(array):
        bits = array.view(f"i{array.itemsize}") if dtype == "bfloat16" else array
        made = torch.from_numpy(bits)
        return made.view(torch.bfloat16) if dtype == "bfloat16" else made

    case = make(dtype=dtype, lengths=(6, 6))
    *caches, table = case.caches(filled=[4, 4])
    new = map(tensor, case.newest(2))
    tensors = list(map(tensor, caches))
    rf.append_kv(*tensors, *new, torch.tensor([4, 4]), torch.tensor(table))
    assert all(same_bits(a, b) for a, b in zip(caches, case.caches()[:2], strict=True))
    run = dict(causal=True, backend="numpy_tiled")
    out = rf.attention_decode(tensor(case.q), *tensors, torch.tensor([6, 6]), torch.tensor(table), **run)
    assert isinstance(out, torch.Tensor)
    np.testing.assert_array_equal(out.double().numpy(), case.forward(**run)[0].astype(np.float64))


def test_other_buffers():
    """Anything that speaks the buffer protocol and lets itself be written to."""
    memory = bytearray(2 * 3 * 4 * 8)
    cache = memoryview(memory).cast("d", (2, 1, 3, 4))
    new = np.arange(1.0, 9).reshape(2, 1, 1, 4)
    rf.append_kv(cache, cache, new, new, [0, 2])
    expected = np.zeros((2, 1, 3, 4))
    expected[0, :, 0], expected[1, :, 2] = new[0, :, 0], new[1, :, 0]
    np.testing.assert_array_equal(np.asarray(cache), expected)
    with pytest.raises(rf.ProblemError, match="k_cache is read-only"):
        rf.append_kv(memoryview(bytes(memory)).cast("d", (2, 1, 3, 4)), cache, new, new, [0, 0])


ENTRIES = {
    "all fit": ([3, 0], [[4, 1, 2], [0, 5, 3]]),
    "just outside": ([-1, 3, 10, 3], [[0, 4, 3], [1, -1, 4], [4, 3, 2], [5, 6, 4]]),
    "to the end": ([9, 9], [[4, 1, 2], [0, 5, 3]]),
    "past the end": ([10, 11], [[4, 1, 2], [0, 5, 3]]),
    "far past the end": ([2**31 - 1, 12], [[4, 1, 2], [0, 5, 3]]),
    "before the start": ([-1, -(2**31)], [[4, 1, 2], [0, 5, 3]]),
    "blocks outside": ([3, 7], [[6, -1, 2], [0, 2**31 - 1, 3]]),
}  # lengths and tables that only a GPU knows


def check_entries(name, width, paged, dtype, move, host):
    """An append there: what fits is written, and nothing else, in the caches, between their rows and around them."""
    lengths, blocks = ENTRIES[name]
    if width is np.int64:  # near the limits of the sums that a kernel could make of them
        lengths = [x if abs(x) < 2**30 else (2**63 - 1) * (1 if x > 0 else -1) for x in lengths]
    B, (count, rows) = len(lengths), (6, 4) if paged else (len(lengths), 12)
    expected = [np.full((9, 4, 15, w), np.nan, DTYPES[dtype]) for w in (20, 8)]
    homes = [move(home) for home in expected]
    caches = [home[1 : 1 + count, 1:3, 2 : 2 + rows, 3:-1] for home in homes]
    new = [fill(np.random.default_rng(1), (B, 2, 3, n), "normal", DTYPES[dtype]) for n in (16, 4)]
    expected = [home.copy() for home in expected]
    for home, x in zip(expected, new, strict=True):
        for b, t in np.ndindex(B, 3):
            j = lengths[b] + t
            if 0 <= j < 12:
                block, row = (blocks[b][j // 4], j % 4) if paged else (b, j)
                if 0 <= block < count:
                    home[1 + block, 1:3, 2 + row, 3:-1] = x[b, :, t]
    tables = [move(np.array(x, width)) for x in ((lengths, blocks) if paged else (lengths,))]
    rf.append_kv(*caches, *map(move, new), *tables)
    for home, want in zip(homes, expected, strict=True):
        assert same_bits(host(home), want)
    assert host(tables[0]).tolist() == lengths
    fit = {"all fit": 6, "to the end": 6, "past the end": 3, "far past the end": 0, "before the start": 2}
    assert name not in fit or sum((~np.isnan(home)).any(-1).sum() for home in expected) == 4 * fit[name]  # K, V


# ---- laws --------------------------------------------------------------------------------------------

GENERATION = {
    "plain": dict(),
    "window": dict(window=(4, None)),
    "alibi, softcap": dict(alibi_slopes=np.array([0.5, 0.1, 0.01, 0.0]), softcap=3.0),
    "sinks": dict(sinks=np.array([0.5, -1.0, 2.0, -np.inf], np.float32)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
@pytest.mark.parametrize("page", [0, 3, 16])
@pytest.mark.parametrize("name", GENERATION)
def test_steps_are_the_whole(name, page, layout, backend):
    """Key by key, or some at a time, from caches of different lengths: each step is some rows of causal attention."""
    start, steps = np.array([0, 3]), (5, 1, 1, 1, 4, 1)
    total = start + sum(steps)
    options, dtype = GENERATION[name] | dict(causal=True), "float32" if backend == "numba_cpu" else "float64"
    case = make(Tq=sum(steps), lengths=total, page=page, layout=layout, dtype=dtype, **options)
    *caches, table = case.caches(filled=start)
    lengths, made = start.copy(), []
    for n in steps:
        q = case.turned(case.q[:, :, lengths[0] : lengths[0] + n])
        new = Decode(**vars(case) | {"kv_lengths": lengths + n}).newest(n)
        rf.append_kv(*caches, *new, lengths, table, layout=layout)
        lengths += n
        run = dict(layout=layout, backend=backend, return_lse=True)
        made.append(rf.attention_decode(q, *caches, lengths, table, **options, **run))
    outs, lses = zip(*made, strict=True)
    out, lse = np.concatenate(outs, axis=2 if layout == "bhtd" else 1), np.concatenate(lses, axis=2)
    assert_results_close((out, lse), case.reference())
    assert all(same_bits(a, b) for a, b in zip(caches, case.caches()[:2], strict=True))


@given(appends(dtypes=("float32", "float64"), max_length=40), st.integers(1, 3))
def test_append_then_decode_is_attention_over_all_keys(drawn, rows):
    case, new, before = drawn
    *caches, table = case.caches(filled=before)
    rf.append_kv(*caches, *new, before, table, layout=case.layout)
    case.q = fill(np.random.default_rng(5), (*case.q.shape[:2], rows, case.q.shape[3]), "normal", case.q.dtype)
    case.options.pop("q_offset", None)
    reference = case.reference()
    for backend in backends_for(case):
        options = case.options | dict(return_lse=True, layout=case.layout, backend=backend)
        q = case.turned(case.q)
        assert_results_close(rf.attention_decode(q, *caches, case.kv_lengths, table, **options), reference)


# ---- errors ------------------------------------------------------------------------------------------


def arguments(paged, **changed):
    """What both functions take: B = 2, Hq = 4, Hkv = 2, d = 8, dv = 5; room for 12 keys, of which 9 and 4 are there."""
    one, head = np.ones, (4, 2, 4) if paged else (2, 2, 12)
    made = dict(
        q=one((2, 4, 1, 8)), k_cache=np.zeros((*head, 8)), v_cache=np.zeros((*head, 5)),
        k_new=one((2, 2, 3, 8)), v_new=one((2, 2, 3, 5)),
        kv_lengths=[9, 4], block_table=[[0, 1, 2], [3, -1, -1]] if paged else None,
    )  # fmt: skip
    return made | {name: value(made[name]) if callable(value) else value for name, value in changed.items()}


def both(**changed):
    return changed, ("attention_decode", "append_kv")


def decoding(**changed):
    return changed, ("attention_decode",)


def appending(**changed):
    return changed, ("append_kv",)


def read_only(array):
    array.flags.writeable = False
    return array


def restrided(axis, stride):
    """The same array with another stride, in bytes, along an axis; still writable."""
    return lambda a: np.lib.stride_tricks.as_strided(
        a, a.shape, [stride if n == axis else old for n, old in enumerate(a.strides)]
    )


Z = np.zeros
WRONG = {
    "three axes": (True, both(k_cache=Z((4, 2, 8))), r"k_cache has shape \(4, 2, 8\); expected (four|4) axes"),
    "d": (True, decoding(k_cache=Z((4, 2, 4, 7))), r"k_cache has shape \(4, 2, 4, 7\); expected \(4, \*, \*, 8\)"),
    "d of new": (True, appending(k_new=Z((2, 2, 3, 7))), r"k_new has shape \(2, 2, 3, 7\); expected \(\*, 2, \*, 8\)"),
    "dv of new": (True, appending(v_new=Z((2, 2, 3, 4))), r"v_new has shape \(2, 2, 3, 4\); expected \(2, 2, 3, 5\)"),
    "blocks": (
        True, both(v_cache=Z((3, 2, 4, 5))),
        r"v_cache has shape \(3, 2, 4, 5\); expected \(4, .*to match k_cache"),
    "rows of a block": (
        True, both(v_cache=Z((4, 2, 3, 5))),
        r"v_cache has shape \(4, 2, 3, 5\); expected \(4, 2, 4, \*\)"),
    "heads": (False, both(v_cache=Z((2, 1, 12, 5))), r"v_cache has shape \(2, 1, 12, 5\); expected \(2, 2, 12, \*\)"),
    "query heads": (True, decoding(q=Z((2, 3, 1, 8))), "q has 3 heads and k_cache has 2; expected q's to be"),
    "sequences": (False, decoding(k_cache=Z((3, 2, 12, 8))), r"k_cache has shape \(3, .*; expected \(2, .* to match q"),
    "new sequences": (
        False, appending(k_new=Z((3, 2, 3, 8))),
        r"k_new has shape \(3, .*; expected \(2, .* to match k_cache"),
    "layout": (False, both(layout="bhdt"), "layout is 'bhdt'; expected one of 'bhtd', 'bthd'"),
    "layout of new": (False, appending(layout="bthd"), r"k_new has shape \(2, 2, 3, 8\); expected \(2, \*, 12, 8\)"),
    "dtype": (
        False, both(v_cache=Z((2, 2, 12, 5), "f4")),
        "v_cache has dtype float32; expected float64 to match (q|k_cache)"),
    "dtype of new": (
        False, appending(k_new=Z((2, 2, 3, 8), "f4")),
        "k_new has dtype float32; expected float64 to match"),
    "integers": (False, both(k_cache=Z((2, 2, 12, 8), int)), "k_cache has dtype int64; expected one of float16, "),
    "empty blocks": (
        True, both(k_cache=Z((4, 2, 0, 8)), v_cache=Z((4, 2, 0, 5))),
        "k_cache has blocks of 0 rows; expected at"),
    "three axes of q": (
        False, decoding(q=Z((4, 1, 8))),
        r"q has shape \(4, 1, 8\); expected \(B, Hq, Tq, d\) with caches"),
    "a list": (False, appending(v_new=[1.0]), "v_new is a list that NumPy cannot look at"),
    "table is short": (
        True, both(block_table=[[0, 1, 2]]),
        r"block_table has shape \(1, 3\); expected \(2, \*\) to match (q|k_new)"),
    "table is flat": (True, both(block_table=[0, 1]), r"block_table has shape \(2,\); expected \(2, \*\)"),
    "table of floats": (True, both(block_table=Z((2, 3))), "block_table has dtype float64; expected integers"),
    "table is ragged": (True, both(block_table=[[0, 1, 2], [3]]), "block_table is .*; expected integers of shape"),
    "entry below": (True, decoding(block_table=[[0, 1, 2], [-1, 0, 0]]),
                    r"block_table has -1 at \(1, 0\), which kv_lengths says is used; expected a block between 0 and 3"),
    "entry above": (True, decoding(block_table=[[0, 1, 4], [3, 0, 0]]), r"block_table has 4 at \(0, 2\)"),
    "append to entry below": (
        True, appending(block_table=[[0, 1, 2], [3, -1, 0]]),
        r"block_table has -1 at \(1, 1\), where kv_lengths says that keys are appended; expected .* between 0 and 3"),
    "append to entry above": (True, appending(block_table=[[0, 1, 4], [3, 2, 0]]), r"block_table has 4 at \(0, 2\)"),
    "append twice to a block": (True, appending(kv_lengths=[9, 5], block_table=[[0, 1, 2], [3, 2, 0]]),
                                "block_table leads to row 1 of block 2 more than once"),
    "a sequence has a block twice": (
        True, appending(kv_lengths=[0, 0], k_new=Z((2, 2, 8, 8)), v_new=Z((2, 2, 8, 5)), block_table=[[0, 0], [1, 2]]),
        "block_table leads to row 0 of block 0 more than once"),
    "lengths past the end": (
        False, decoding(kv_lengths=[13, 4]),
        r"kv_lengths is \[13, 4\]; expected every .* 0 and 12"),
    "lengths past the table": (
        True, decoding(kv_lengths=[9, 13]),
        r"kv_lengths is \[9, 13\]; expected every .* 0 and 12"),
    "append past the end": (
        False, appending(kv_lengths=[9, 10]),
        r"kv_lengths is \[9, 10\]; .* n \+ 3 <= 12: 3 keys are app"),
    "append past the table": (True, appending(kv_lengths=[10, 4]), r"kv_lengths is \[10, 4\]; .* n \+ 3 <= 12"),
    "more than a cache": (False, appending(k_new=Z((2, 2, 13, 8)), v_new=Z((2, 2, 13, 5)), kv_lengths=[0, 0]),
                          r"kv_lengths is \[0, 0\]; .* n \+ 13 <= 12"),
    "lengths below": (True, both(kv_lengths=[9, -1]), r"kv_lengths is \[9, -1\]; expected"),
    "lengths are short": (True, both(kv_lengths=[9]), r"kv_lengths has shape \(1,\); expected \(B,\) = \(2,\)"),
    "lengths of floats": (True, both(kv_lengths=[9.0, 4.0]), "kv_lengths has dtype float64; expected integers"),
    "one length": (True, both(kv_lengths=9), "kv_lengths is 9; expected integers of shape"),
    "no lengths": (True, appending(kv_lengths=None), "kv_lengths is None; expected integers of shape"),
    "read-only keys": (True, appending(k_cache=read_only), "k_cache is read-only; expected a writable array"),
    "read-only values": (False, appending(v_cache=read_only), "v_cache is read-only; expected a writable array"),
    "one row for all": (
        False, appending(v_cache=restrided(2, 0)),
        "v_cache has strides .*; expected each of its elements"),
    "rows that overlap": (
        False, appending(k_cache=restrided(2, 56)),
        "k_cache has strides .* 56, 8.*; expected each of its elements"),
    "mask": (
        True, decoding(mask=np.ones((1, 12), bool)),
        "mask is not an option of attention_decode; expected it in a call"),
    "bias": (True, decoding(bias=Z((1, 12))), "bias is not an option of attention_decode"),
    "q_lengths": (True, decoding(q_lengths=[1, 1]), "q_lengths is not an option of attention_decode"),
    "dropout": (True, decoding(dropout=0.1), "dropout is not an option of attention_decode"),
    "unknown": (True, decoding(casual=True), "unknown option 'casual'; did you mean 'causal'"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["mask", "bias", "q_lengths"])
def test_options_that_are_not_there_are_not_refused(name):
    case = make()
    np.testing.assert_array_equal(case.forward(**{name: None}, dropout=0.0, seed=0)[0], case.forward()[0])


@pytest.mark.parametrize(("name", "function"), [(name, f) for name, (_, (_, fs), _) in WRONG.items() for f in fs])
def test_wrong_calls(name, function):
    """Argument, value and rule are named, and nothing is written."""
    paged, (changed, _), message = WRONG[name]
    made = arguments(paged, **changed)
    for key in ("q",) if function == "append_kv" else ("k_new", "v_new"):
        del made[key]
    with pytest.raises(rf.ProblemError, match=f"^{message}"):
        getattr(rf, function)(**made)
    for key in ("k_cache", "v_cache"):
        assert not made[key].any()


def test_lengths_are_asked_for():
    case = make()
    with pytest.raises(rf.ProblemError, match="kv_lengths is None"):
        rf.attention_decode(case.q, *case.caches()[:2], None)


def test_a_table_without_blocks():
    q, cache = np.ones((2, 1, 1, 4)), np.ones((3, 1, 8, 4))
    assert not rf.attention_decode(q, cache, cache, [0, 0], [[], []]).any()


def test_new_values_that_lie_in_the_key_cache():
    cache = np.arange(8.0).reshape(1, 1, 8, 1)
    k_cache, v_cache = cache.copy(), np.zeros((1, 1, 8, 1))
    rf.append_kv(k_cache, v_cache, cache[:, :, 4:6], k_cache[:, :, 2:4], [2])
    assert k_cache[0, 0, 2:4, 0].tolist() == [4, 5] and v_cache[0, 0, 2:4, 0].tolist() == [2, 3]


def test_no_sequences_and_no_dropout():
    caches = np.zeros((4, 1, 16, 8))
    assert rf.attention_decode(np.zeros((0, 1, 1, 8)), caches, caches, [], block_table=[]).shape == (0, 1, 1, 8)
    out = rf.attention_decode(np.zeros((4, 1, 1, 8)), caches, caches, [3] * 4, dropout=np.float64(0))
    assert out.shape == (4, 1, 1, 8)
