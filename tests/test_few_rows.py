"""The kernels of numba_cpu for few rows of queries (rawflash/backends/numba_cpu/few_rows.py).

Every test asks which kernel ran, so that none passes by what the general one computes.
"""

from unittest import mock

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from strategies import DTYPES, problems, restride, varlen_problems
from test_forward import check_forward, drawn, half_hidden, half_visible, make, normal

import rawflash as rf
from rawflash import masks as M
from rawflash import tiling
from rawflash.backends.numba_cpu import few_rows as module
from rawflash.hardware import chip
from rawflash.problem import Problem
from rawflash.tiles import FEW
from rawflash.tiling import FEW_BLOCK, FEW_PART, FEW_QUERIES, plan_tiles
from rawflash.traffic import traffic

RUN = dict(backend="numba_cpu", algorithm="fa2")
dtypes = pytest.mark.parametrize("dtype", DTYPES)


class Ran(list):
    """While it is entered: names of the kernels for few rows that were run."""

    def __enter__(self):
        def run(kernel, *arguments):
            self.append(kernel.__name__)
            return real(kernel, *arguments)

        real = module.run
        self.patch = mock.patch.object(module, "run", run)
        self.patch.start()
        return self

    def __exit__(self, *error):
        self.patch.stop()


def check(case, kind):
    """Hold a call against the oracle; ``kind``, "plain" or "general", of the kernel that must have run."""
    with Ran() as ran:
        results = check_forward(case, case.reference(), **RUN)
    assert ran == [f"fa2_few_rows_{case.q.dtype.name}_{kind}"]
    return results


@pytest.mark.parametrize("element", [np.float32, np.uint16])
@pytest.mark.parametrize("tile", [module.score_tile, module.value_tile])
def test_what_follows_is_asked_for_where_rows_are_read_in_order(tile, element):
    """No result depends on it, only time: so the machine code is looked at."""

    def found(one_by_one):
        def call(x):
            tile(2, one_by_one, element, x, x, x, x, x, x, x, x, x, x)

        compiled = numba.njit("void(int64)")(call)
        return sum("prefetch" in line for text in compiled.inspect_asm().values() for line in text.splitlines())

    assert found(1) and not found(0)


# Tk = 2500 are three parts, the last one with a ragged block; 1100 are two.
PLAIN = {
    "one row": dict(),
    "two rows": dict(Tq=2),
    "three rows": dict(Tq=3),
    "eight rows, causal": dict(Tq=8, causal=True),
    "a group": dict(Hq=8, Hkv=2),
    "a group of three, five rows, causal": dict(Hq=6, Hkv=2, Tq=5, causal=True),
    "one key head": dict(Hq=7, Hkv=1, Tq=2, causal=True),
    "more rows than keys": dict(Tq=7, Tk=3, causal=True),
    "more rows than keys, sinks": dict(Tq=7, Tk=3, causal=True, sinks=normal(2)),
    "no keys": dict(Tq=3, Tk=0),
    "no keys, sinks": dict(Tq=3, Tk=0, sinks=normal(2)),
    "sinks": dict(Tq=2, sinks=normal(2)),
    "a huge sink": dict(sinks=lambda rng, dtype: np.array([90.0, -90.0], dtype)),
    "window in one part": dict(Tq=3, window=(700, 0)),
    "window across parts": dict(Tq=3, window=(1600, 0)),
    "window of one key": dict(Tq=4, window=(0, 0)),
    "window past the keys": dict(Tq=4, window=(2, 2), q_offset=2600),
    "window, negative offset": dict(Tq=8, window=(3, 2), q_offset=-4),
    "open to the right": dict(Tq=4, window=(0, None), q_offset=1023),
    "nothing visible": dict(Tq=4, causal=True, q_offset=-1000),
    "offsets per batch": dict(Tq=4, causal=True, q_offset=np.array([-2, 1500])),
    "lengths": dict(B=4, Tq=4, q_lengths=[4, 0, 1, 3], kv_lengths=[2500, 9, 0, 1025]),
    "lengths, causal, sinks": dict(
        B=3, Tq=4, q_lengths=[4, 2, 3], kv_lengths=[2, 1024, 0], causal=True, sinks=normal(2)),
    "no batch": dict(B=0),
    "large scores": dict(size=300.0),
    "six axes": dict(lead=(2, 1, 2), Tk=200),
}  # fmt: skip
GENERAL = {
    "scale 0": dict(scale=0.0),
    "negative scale": dict(scale=-0.7),
    "mask": dict(Tq=3, mask=half_visible(2, 2, 3, 2500)),
    "mask by head": dict(Hq=6, Hkv=2, mask=lambda rng, dtype: np.repeat(
        rng.random((6, 20)) < 0.5, 125, axis=1)[:, None]),
    "empty mask": dict(Tq=2, mask=np.zeros((1, 1, 1, 1), bool)),
    "mask object": dict(Tq=5, causal=True, mask=M.PrefixLM(5) | M.Segments(np.arange(5) // 2, np.arange(2500) // 700)),
    "bias": dict(Tq=3, bias=normal(2, 2, 3, 2500)),
    "bias by key": dict(Hq=4, Hkv=2, bias=normal(4, 1, 2500)),
    "bias with -inf": dict(Tq=3, bias=half_hidden(2, 2, 3, 2500)),
    "bias all -inf": dict(Tq=3, bias=lambda rng, dtype: np.full((3, 2500), -np.inf, dtype)),
    "rising scores": dict(bias=lambda rng, dtype: np.linspace(-40, 40, 2500).astype(dtype)),
    "falling scores": dict(bias=lambda rng, dtype: np.linspace(40, -40, 2500).astype(dtype)),
    "alibi": dict(Tq=3, alibi_slopes=np.array([0.5, 0.01])),
    "alibi by batch, causal": dict(Tq=3, alibi_slopes=np.array([[0.5, 0.01], [0.0, 1.0]]), causal=True),
    "softcap": dict(Tq=2, size=10.0, softcap=5.0),
    "dropout": dict(Tq=3, Hq=4, Hkv=2, dropout=0.3, seed=5),
    "everything": dict(
        Hq=6, Hkv=2, Tq=4, causal=True, window=(2100, None), kv_lengths=[2500, 999], q_lengths=[3, 4],
        bias=normal(2, 1, 4, 2500), alibi_slopes=np.full(6, 0.02), softcap=8.0, sinks=normal(6), dropout=0.2,
        mask=half_visible(6, 1, 2500)),
}  # fmt: skip


def dtype_of(name, names):
    """Dtypes take turns: what a dtype changes and what an option changes are different lines."""
    return list(DTYPES)[list(names).index(name) % len(DTYPES)]


@pytest.mark.parametrize("name", PLAIN)
def test_plain_calls(name):
    check(make(**dict(Tq=1, Tk=2500, d=16) | PLAIN[name], dtype=dtype_of(name, PLAIN)), "plain")


@pytest.mark.parametrize("name", GENERAL)
def test_calls_with_options(name):
    check(make(**dict(Tq=1, Tk=2500, d=16) | GENERAL[name], dtype=dtype_of(name, GENERAL)), "general")


@dtypes
@pytest.mark.parametrize("d", [1, 7, 64, 80, 128, 200])
def test_head_dimensions(d, dtype):
    """Whole vectors and not, of K and of V."""
    for Tq, dv in ((1, d), (3, 64), (2, 7)):
        check(make(B=1, Hq=2, Hkv=1, Tq=Tq, Tk=150, d=d, dv=dv, dtype=dtype), "plain")


@dtypes
@pytest.mark.parametrize("Tk", [1, 2, 7, 8, 9, 127, 128, 129, 511, 512, 513, 1023, 1024, 1025, 2048, 2049])
def test_numbers_of_keys(Tk, dtype):
    for Hq, Tq in ((1, 1), (2, 2)):
        check(make(B=1, Hq=Hq, Hkv=1, Tq=Tq, Tk=Tk, d=8, dtype=dtype, causal=True), "plain")


@dtypes
@pytest.mark.parametrize("Tq", range(1, FEW_QUERIES + 1))
def test_numbers_of_queries(Tq, dtype):
    for group in (1, 3):
        check(make(B=2, Hq=2 * group, Hkv=2, Tq=Tq, Tk=1100, d=8, dv=24, dtype=dtype, causal=True), "plain")


def small():
    """As many queries as there are, blocks and parts of 16 keys: for problems that are drawn."""
    return mock.patch.multiple(tiling, FEW_QUERIES=1000, FEW_BLOCK=16, FEW_PART=16)


@settings(max_examples=drawn(100))
@given(problems(algorithms=("fa2",), exclude=("sram",), backend="numba_cpu"))
def test_drawn_problems(case):
    with small(), Ran() as ran:
        check_forward(case, case.reference())
    assert len(ran) == (case.q.size > 0 or 0 in case.q.shape[:-2] and rows_of(case) > 0)


def rows_of(case):
    return case.q.shape[-3 if case.options.get("layout") == "bthd" and case.q.ndim > 2 else -2]


@settings(max_examples=drawn(60))
@given(varlen_problems(algorithms=("fa2",), exclude=("sram",), backend="numba_cpu"))
def test_drawn_varlen_problems(case):
    with small(), Ran() as ran:
        check_forward(case, case.reference())
    assert ran or not max(np.diff(case.cu_seqlens[0]), default=0)


@pytest.mark.parametrize("view", ["transposed", "sliced", "broadcast", "strided_last", "reversed", "fortran"])
def test_strides(view):
    case = make(Hq=4, Hkv=2, Tq=3, Tk=150, d=16, dv=8)
    views = {name: restride(getattr(case, name), view) for name in "qkv"}
    plain = [np.ascontiguousarray(array) for array in views.values()]
    with Ran() as ran:
        for a, b in zip(*(rf.attention(*x, return_lse=True, **RUN) for x in (views.values(), plain)), strict=True):
            np.testing.assert_array_equal(a, b)
    assert len(ran) == 2


@dtypes
def test_bits_depend_on_neither_thread_nor_turn(dtype):
    """Parts are merged in order by whichever thread comes last."""
    cases = [
        make(B=2, Hq=8, Hkv=2, Tq=1, Tk=9000, d=32, dtype=dtype),
        make(B=1, Hq=3, Hkv=1, Tq=5, Tk=20000, d=8, causal=True, dtype=dtype),
    ]
    before = numba.get_num_threads()
    try:
        for case in cases:
            first = None
            for n in [*range(1, numba.config.NUMBA_NUM_THREADS + 1)] * 8:
                numba.set_num_threads(n)
                with Ran() as ran:
                    results = case.forward(**RUN)
                first = first or results
                assert len(ran) == 1
                for a, b in zip(results, first, strict=True):
                    np.testing.assert_array_equal(a, b)
    finally:
        numba.set_num_threads(before)


@dtypes
@pytest.mark.parametrize("heads", [2, 3, 8, 9, 16])
def test_bits_of_a_head_do_not_depend_on_those_that_share_its_keys(heads, dtype):
    """Tiles of one row and of two, and keys one after the other or beside each other, add in the same order."""
    case = make(B=1, Hq=heads, Hkv=1, Tq=1, Tk=100, d=72, dtype=dtype)
    with Ran() as ran:
        together = rf.attention(case.q, case.k, case.v, return_lse=True, **RUN)
        for h in range(heads):
            alone = rf.attention(case.q[:, h : h + 1], case.k, case.v, return_lse=True, **RUN)
            for a, b in zip(alone, together, strict=True):
                np.testing.assert_array_equal(a, b[:, h : h + 1])
    assert len(ran) == 1 + heads


@dtypes
def test_padding_is_not_read(dtype):
    """NaN behind the last key that counts, in the same vectors and the same block."""
    lengths = [1, 13, 1025, 0]
    sizes = dict(B=4, Tk=1200, d=16, dtype=dtype, kv_lengths=lengths)
    for more in (dict(dv=16), dict(Hq=4, dv=16), dict(Hq=4, dv=9, Tq=2, q_lengths=[2, 1, 0, 2])):
        case = make(Hkv=2, **dict(Tq=1) | sizes | more)
        clean, _ = check(case, "plain")
        for b, n in enumerate(lengths):
            case.k[b, :, n:] = case.v[b, :, n:] = np.nan
        np.testing.assert_array_equal(case.forward(**RUN)[0], clean)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_nan_reaches_the_rows_that_see_it(part):
    case = make(B=1, Hq=2, Hkv=1, Tq=2, Tk=2500, d=16, mask=np.ones((2, 1, 2500), bool))
    j = 900 * part + 3
    case.options["mask"][1, 0, j] = False
    case.k[0, 0, j] = np.nan
    with Ran() as ran:
        out, lse = case.forward(**RUN)
    assert ran == ["fa2_few_rows_float32_general"]
    assert np.isnan(out[0, 0]).all() and np.isnan(lse[0, 0]).all()
    assert np.isfinite(out[0, 1]).all() and np.isfinite(lse[0, 1]).all()


@pytest.mark.parametrize("Tq", [1, 2])
def test_an_infinite_value_stays_one(Tq):
    """The last of three keys, where a tile goes on: what is beyond must not be inf * 0."""
    case = make(B=1, Hq=1, Tq=Tq, Tk=3, d=8)
    case.v[0, 0, 2] = np.inf
    with Ran() as ran:
        out, _ = case.forward(**RUN)
    assert len(ran) == 1
    np.testing.assert_array_equal(out, np.inf)


def test_out_is_written_where_it_is():
    case = make(B=2, Hq=4, Hkv=2, Tq=2, Tk=40, d=8)
    expected = rf.attention(case.q, case.k, case.v, **RUN)
    home = np.full((2, 4, 5, 8), 7, np.float32)
    with Ran() as ran:
        rf.attention(case.q, case.k, case.v, out=home[:, :, 1:3], **RUN)
    assert len(ran) == 1
    np.testing.assert_array_equal(home[:, :, 1:3], expected)
    assert (home[:, :, [0, 3, 4]] == 7).all()


# ---- the plan --------------------------------------------------------------------------------------


def planned(**sizes):
    return plan_tiles(Problem(**dict(Hq=8, Hkv=8, Tq=1, Tk=32768, d=128, dv=128) | sizes), chip("cpu"), "forward")


def test_the_plan_chooses():
    assert planned().family == planned(Tq=FEW_QUERIES).family == FEW
    for general in (dict(Tq=FEW_QUERIES + 1), dict(Tq=0), dict(algorithm="fa1"), dict(Hq=4096, d=1024)):
        assert planned(**general).family == "vector"
    sizes = Problem(Tq=1, Tk=4096, d=8, dv=8)
    assert plan_tiles(sizes, chip("cpu"), "backward").family == "vector"
    assert plan_tiles(sizes, chip("sm_90"), "forward").family == "sm90"


def test_parts_of_the_keys():
    tiles = planned()
    assert (tiles.parts, tiles.part_keys) == (16, 2048) and tiles.bc == FEW_BLOCK
    assert planned(Tk=FEW_PART).parts == planned(B=100).parts == planned(Tk=0).parts == 1
    for Tk in (1025, 5000, 100_003):
        tiles = planned(Hq=1, Hkv=1, Tk=Tk)
        assert (tiles.parts - 1) * tiles.part_keys < Tk <= tiles.parts * tiles.part_keys
        assert tiles.part_keys % tiles.bc == 0 and tiles.parts > 1
    assert f"up to {tiles.parts} parts of {tiles.part_keys}" in str(tiles)


def test_blocks_of_many_rows_have_fewer_keys():
    """From all of FEW_BLOCK down to a quarter of it, so that the scores stay close."""
    blocks = [planned(Hq=8 * group).bc for group in (1, 8, 16, 32, 64)]
    assert blocks == [FEW_BLOCK, FEW_BLOCK, FEW_BLOCK // 2, FEW_BLOCK // 4, FEW_BLOCK // 4]


@pytest.mark.parametrize("sram", [1 << 14, 20_000, 1 << 16])
def test_memory_bounds_the_block(sram):
    tiles = planned(d=64, dv=64, Hq=32, sram=sram)
    assert tiles.smem_bytes <= sram
    case = make(B=1, Hq=4, Hkv=1, Tq=2, Tk=300, d=32, sram=sram)
    check(case, "plain")


def test_keys_are_counted_once_for_a_group():
    """Equal to what the kernel reads: K and V once, Q once for each part, O of the parts twice more."""
    p = Problem(B=2, Hq=8, Hkv=2, Tq=3, Tk=5000, d=64, dv=32)
    tiles = plan_tiles(p, chip("cpu"), "forward")
    moved, heads, rows = traffic(p, tiles, "forward"), 4, 48
    assert tiles.parts == 5
    assert (moved.load("K"), moved.load("V")) == (heads * 5000 * 64, heads * 5000 * 32)
    assert moved.load("Q") == 5 * rows * 64
    assert (moved.load("O"), moved.store("O")) == (5 * rows * 32, 6 * rows * 32)


def test_explain_tells():
    case = make(Hq=8, Hkv=2, Tq=1, Tk=5000, d=64)
    text = str(rf.explain(case.q, case.k, case.v, **RUN))
    assert "one row of K or V read for all query heads that share it" in text
    assert "copied   no argument" in text
