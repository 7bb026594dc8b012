"""Every kernel of numba_cuda against the oracle in Numba's simulator, without a GPU.

Asked for with ``NUMBA_ENABLE_CUDASIM=1 python -m pytest -m simulated``, in a process of its own: Numba decides when it
is imported. The simulator has one order of threads and no warps; what it cannot see are speed, alignment and races.
"""

import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
    pytest.skip("kernels are simulated with NUMBA_ENABLE_CUDASIM=1 only", allow_module_level=True)

import emulator
import simulator
from hypothesis import HealthCheck, given, settings
from strategies import DTYPES, problems, varlen_problems
from test_cupy_raw_emulated import check as check_emulated
from test_forward import AWKWARD, awkward, make
from tolerances import assert_close, reference

import rawflash as rf
from rawflash import hardware, problem, tiling
from rawflash.backends.numba_cuda import gradient, scores, softmax, tile

pytestmark = pytest.mark.simulated
ALGORITHMS = ("fa1", "fa2")
NAMES = list(DTYPES)
CHOSEN = (
    "Tq > Tk, causal, sinks",
    "offsets per batch",
    "window",
    "odd dimensions",
    "grouped heads 8:2",
    "no keys, sinks",
    "lengths, causal",
    "a huge sink",
    "mask object",
    "bias by row",
    "bias by key and head",
    "bias with -inf",
    "alibi by batch",
    "softcap",
    "nearly all dropped",
    "six axes",
)
assert set(CHOSEN) <= set(AWKWARD)


@pytest.fixture(autouse=True, scope="module")
def device():
    with pytest.MonkeyPatch.context() as monkeypatch:
        simulator.install(monkeypatch)
        yield


check = partial(check_emulated, backend="numba_cuda")


@pytest.mark.parametrize("name", CHOSEN)
def test_awkward_calls(name):
    """An algorithm and a dtype each, in turn: the code of options is the same in both."""
    n = CHOSEN.index(name)
    case, reference = awkward(name, NAMES[n % len(NAMES)])
    check(case, reference, n % 3 == 0, algorithm=ALGORITHMS[n // 2 % 2], deterministic=n % 4 == 0)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_dtypes(algorithm, dtype):
    case = make(B=1, Hq=2, Hkv=1, Tq=18, Tk=21, d=9, dv=4, dtype=dtype, causal=True)
    check(case, case.reference(), algorithm=algorithm)


def test_packed_sequences():
    case = make(lead=(), Hq=2, Hkv=1, Tq=23, Tk=21, d=8, causal=True, sinks=np.zeros(2, np.float32))
    case.cu_seqlens = ([1, 12, 20], [0, 9, 9])
    check(case, case.reference())


FEW = settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@FEW
@given(problems(algorithms=ALGORITHMS, max_length=17, max_batch=2, max_kv_heads=1, max_group=2, max_head_dim=16))
def test_drawn_problems(case):
    check(case, case.reference(), case.how["seed"] % 2 == 1)


@FEW
@given(varlen_problems(algorithms=ALGORITHMS, max_length=12, max_head_dim=16))
def test_drawn_varlen_problems(case):
    check(case, case.reference(), case.how["seed"] % 2 == 1)


def share_out(monkeypatch):
    monkeypatch.setattr(problem, "_MEMO", {})
    monkeypatch.setattr(hardware, "_gpu", lambda device: replace(hardware.CHIPS["sm_90"], processors=100))
    for name, value in {"PART_STEPS": 1, "PART_START": 0.0, "PART_MERGE": 0.0, "PART_GAIN": 1.0}.items():
        monkeypatch.setattr(tiling, name, value)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_keys_in_parts(dtype, monkeypatch):
    case = make(B=1, Hq=1, Tq=17, Tk=60, d=8, dtype=dtype, causal=True, sinks=np.zeros(1, np.float32))
    reference = case.reference()
    share_out(monkeypatch)
    check(case, reference, backward=False)


def in_blocks(rows, table, lengths, page, count):
    """A cache of ``count`` blocks on the device; NaN where no key is, and in the memory on either side of it."""
    cache = np.full((count + 2, rows.shape[1], page, rows.shape[3]), np.nan, rows.dtype)
    for b, length in enumerate(lengths):
        for j in range(length):
            cache[1 + table[b, j // page], :, j % page] = rows[b, :, j]
    return emulator.to_device(cache)[1:-1]


@pytest.mark.parametrize("dtype, page, Tq, T, options, on_device, parts", [
    ("float32", 1, 1, 9, {}, False, False),
    ("float32", 3, 2, 20, dict(causal=True), True, True),
    ("float64", 3, 16, 20, {}, True, False),
    ("float16", 16, 2, 20, dict(window=(7, 0), softcap=5.0), True, False),
    ("float16", 3, 1, 20, {}, False, True),
])  # fmt: skip
def test_decode_of_paged_caches(dtype, page, Tq, T, options, on_device, parts, monkeypatch):
    """A table on the device may name blocks that do not exist, on both sides of the cache: their keys are hidden."""
    lengths = np.array([0, 7, T], np.int32)
    case = make(B=3, Hq=2, Tq=Tq, Tk=T, d=5, dv=8, dtype=dtype)
    of_each = -(-T // page)
    table = np.random.default_rng(0).permutation(3 * of_each).reshape(3, of_each)
    k, v = (in_blocks(rows, table, lengths, page, 3 * of_each) for rows in (case.k, case.v))
    table[np.arange(of_each) * page >= lengths[:, None]] = -7  # never looked up
    exists = np.ones((3, 1, 1, T), bool)
    if on_device:
        for b, block, entry in ((1, 0, 3 * of_each), (2, T // page // 2, -1)):
            table[b, block] = entry
            exists[b, ..., block * page : (block + 1) * page] = False
    expected = reference(case.q, case.k, case.v, mask=exists, kv_lengths=lengths, **options)
    if on_device:
        table, lengths = emulator.to_device(table.astype(np.int32)), emulator.to_device(lengths)
    if parts:
        share_out(monkeypatch)
    q = emulator.to_device(case.q)
    out, lse = rf.attention_decode(q, k, v, lengths, table, return_lse=True, backend="numba_cuda", **options)
    assert_close("out", np.asarray(out), expected)
    assert_close("lse", np.asarray(lse), expected)


BROKEN = {
    "the greatest score is not sought": (softmax, "maximum_of_lanes", lambda c: lambda x: x - 1e4),
    "a row's sum is one thread's": (tile, "exchange", lambda x, lane: 0 * x),
    "every key is visible": (scores, "visible", lambda c, of: lambda *a: True),
    "all but the first rows are left out": (tile, "read_sums", lambda c, columns: lambda address, values, r: None),
    "dS is P": (gradient, "score_gradient", lambda c, sloped: lambda x, slope, dP, lse, delta, keep: (0 * x, 0 * x)),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_kernels_are_caught(how, monkeypatch):
    module, name, stand_in = BROKEN[how]
    case = make(B=1, Hq=1, Tq=17, Tk=19, d=7, causal=True, bias=np.zeros((17, 19), np.float32))
    reference = case.reference()
    monkeypatch.setattr(problem, "_MEMO", {})
    monkeypatch.setattr(module, name, stand_in)
    with pytest.raises((AssertionError, RuntimeWarning)):  # wrong, or arithmetic that NumPy warns of
        check(case, reference)
