"""The tensor-core kernels of numba_cuda against the oracle, lane by lane on a CPU (warps.py).

Asked for with ``NUMBA_ENABLE_CUDASIM=1 python -m pytest -m simulated``, as test_numba_cuda_simulated.py. What this
cannot see are speed and how accurate the hardware's instructions are.
"""

import os
from dataclasses import replace

import numpy as np
import pytest

if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
    pytest.skip("kernels are simulated with NUMBA_ENABLE_CUDASIM=1 only", allow_module_level=True)

import emulator
import warps
from test_cupy_raw_emulated import on_device
from test_forward import make, normal
from tolerances import assert_close

pytestmark = pytest.mark.simulated
KIB = 1024
BLOCKS = 50 * KIB  # of sram: blocks of 64 rows and keys in the backward pass, one at a time
CASES = {
    "d = 64": dict(Tq=20, d=64),
    "padded columns": dict(Tq=33, d=40, causal=True),
    "one dimension, not aligned": dict(Tq=5, d=1),
    "not aligned": dict(Tq=20, d=17, causal=True),
    "grouped heads": dict(Hq=4, Hkv=2, Tq=19, d=16, causal=True),
    "rows without keys, sinks": dict(Hq=2, Tq=37, Tk=5, d=16, causal=True, sinks=normal(2)),
    "sinks, one huge": dict(Hq=2, Tq=20, d=8, sinks=lambda rng, dtype: np.array([90.0, -np.inf], dtype)),
    "offsets per batch": dict(B=2, Tq=20, d=16, causal=True, q_offset=np.array([-3, 4])),
    "nothing visible": dict(Tq=20, d=16, causal=True, q_offset=-1000),
    "window": dict(Tq=40, d=16, window=(3, 2)),
    "window past the keys": dict(Tq=40, Tk=9, d=16, window=(2, 2)),
    "lengths": dict(B=3, Tq=20, Tk=35, d=16, q_lengths=[20, 3, 17], kv_lengths=[1, 35, 0]),
    "no keys, sinks": dict(Hq=2, Tq=5, Tk=0, d=16, sinks=normal(2)),
    "many blocks, causal": dict(Tq=150, Tk=140, d=16, causal=True, sram=BLOCKS),
    "many blocks, window": dict(Tq=140, Tk=150, d=24, window=(60, 10), sram=BLOCKS),
    "d = 128": dict(Tq=70, Tk=80, d=128, causal=True, sram=80 * KIB),
    "d = 128, two stages": dict(Tq=70, Tk=40, d=128, window=(30, 0)),
    "large scores": dict(Tq=40, Tk=150, d=16, size=30.0, scale=1.5),
}
FORWARD = {
    "Q in registers": dict(Tq=70, Tk=80, d=16, causal=True, sram=16 * KIB),
    "Q in registers, d = 128": dict(Tq=20, Tk=80, d=104, sram=40 * KIB),
    "rising scores": dict(Tq=40, Tk=300, d=16, size=30.0, causal=True, sram=32 * KIB),
}


@pytest.fixture(autouse=True, scope="module")
def device():
    with pytest.MonkeyPatch.context() as monkeypatch:
        warps.install(monkeypatch)
        yield


def check(host, backward=True):
    reference, case = host.reference(), on_device(host, False)
    warps.launched.clear()
    out, lse = case.forward(backend="numba_cuda", algorithm="fa2")
    results, kernels = {"out": out, "lse": lse}, ["fa2_forward"]
    if backward:
        gradients = case.backward(out, lse, backend="numba_cuda", algorithm="fa2")
        results |= {"d" + name: g for name, g in zip(case.wrt, gradients, strict=True)}
        kernels += ["fa2_backward_keys"] if host.k.shape[-2] else []
    for name, result in results.items():
        assert type(result) is emulator.ndarray
        assert_close(name, np.asarray(result), reference)
    assert {(name, "mma") for name in kernels} <= set(warps.launched)


def dtype_of(n):
    return ("bfloat16", "float16")[n % 2]


@pytest.mark.parametrize("name", CASES)
def test_both_passes(name):
    check(make(**({"B": 1, "Hq": 1, "dtype": dtype_of(list(CASES).index(name))} | CASES[name])))


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name):
    check(make(B=1, Hq=1, dtype=dtype_of(list(FORWARD).index(name)), **FORWARD[name]), backward=False)


def test_a_nan_stays_one_under_a_huge_sink():
    case = make(B=1, Hq=1, Tq=17, d=16, dtype="float16", sinks=np.array([200.0], np.float32))
    case.v[..., 3, :] = np.nan
    out, _ = on_device(case).forward(backend="numba_cuda")
    assert np.isnan(np.asarray(out).astype(np.float32)).all()


@pytest.mark.parametrize("d", [16, 9])
def test_packed_sequences(d):
    case = make(lead=(), Hq=2, Hkv=1, Tq=23, Tk=21, d=d, dtype=dtype_of(d), causal=True, sinks=np.zeros(2, np.float32))
    case.cu_seqlens = ([1, 12, 20], [0, 9, 9])
    check(case)


def apart(array, more):
    """The same numbers, heads between the rows, and ``more`` unused ones behind each row."""
    *lead, heads, rows, d = array.shape
    whole = np.zeros((*lead, rows, heads, d + more), array.dtype)
    view = whole[..., :d].swapaxes(-2, -3)
    view[...] = array
    return view


@pytest.mark.parametrize("more", [0, 8, 1])  # 1: rows do not begin at multiples of 16 bytes
def test_strides(more):
    case = make(B=1, Hq=2, Hkv=1, Tq=19, Tk=21, d=16, dtype=dtype_of(more), causal=True)
    check(replace(case, **{name: apart(getattr(case, name), more) for name in ("q", "k", "v", "dout")}))
