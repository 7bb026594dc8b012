"""What is in one head is nothing to any other: a NaN or an infinity in its arrays changes no bit of another's results.

Scratch that a thread uses for one head after the other, padding of rows and sums over tiles are where it could.
"""

from dataclasses import replace

import emulator
import numba
import numpy as np
import pytest
from test_cupy_raw_emulated import on_device
from test_forward import KERNELS, kernels, make

import rawflash as rf
from rawflash import hardware, problem, sm90
from rawflash.tiles import FEW_MMA

assert KERNELS


@pytest.fixture
def one_thread():
    """All heads by one thread, one after the other, in the same scratch."""
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)


@kernels
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("d, dv", [(4, 8), (40, 24), (24, 40), (16, 16)])
def test_other_heads_have_the_same_bits(d, dv, rows, dtype, bad, backend, algorithm, one_thread):
    case = make(B=2, Hq=4, Hkv=2, Tq=rows, Tk=45, d=d, dv=dv, dtype=dtype, kv_lengths=[45, 38])
    own = {"q": slice(0, 2), "dout": slice(0, 2), "k": slice(0, 1), "v": slice(0, 1)}  # heads of sequence 0
    for names in (("v",), ("k",), ("q", "k", "v", "dout")):
        changed = {name: getattr(case, name).copy() for name in names}
        for name, array in changed.items():
            array[0, own[name]] = bad
        found = []
        for one in (case, replace(case, **changed)):
            with np.errstate(all="ignore"):
                out, lse = one.forward(backend=backend, algorithm=algorithm)
                found.append((out, lse, *one.backward(out, lse, backend=backend, algorithm=algorithm)))
        for name, clean, beside in zip(("q", "q", "q", "k", "v"), *found, strict=True):
            others = np.ones(clean.shape[:2], bool)
            others[0, own[name]] = False
            np.testing.assert_array_equal(clean[others].tobytes(), beside[others].tobytes())


# ---- GPU kernels, in the emulator ------------------------------------------------------------------------------

EMULATED = {
    "simt": dict(d=20, dv=36, Tq=70, Tk=90, dtype="float16", run=dict(algorithm="fa1")),
    "split": dict(d=40, dv=24, Tq=70, Tk=90, dtype="float32"),
    "double": dict(d=40, dv=24, Tq=70, Tk=90, dtype="float64"),
    "mma": dict(d=36, dv=20, Tq=140, Tk=200, dtype="bfloat16", softcap=5.0),
    "mma, deterministic": dict(d=33, dv=20, Tq=140, Tk=150, dtype="float16", run=dict(deterministic=True)),
    "few rows": dict(d=40, dv=24, Tq=2, Tk=200, dtype="bfloat16"),
    "few rows, other columns": dict(d=24, dv=72, Tq=1, Tk=150, dtype="float16"),
    "warpgroups": dict(d=40, dv=24, Tq=140, Tk=200, dtype="bfloat16"),
    "warpgroups, causal": dict(d=24, dv=40, Tq=140, Tk=200, dtype="float16", causal=True),
    "warpgroups, more columns": dict(d=72, dv=128, Tq=130, Tk=150, dtype="bfloat16", run=dict(deterministic=True)),
    "warpgroups, most columns": dict(d=136, dv=200, Tq=130, Tk=150, dtype="bfloat16"),
}
FAMILIES = {
    "simt": "simt", "split": "split", "double": "double", "mma": "mma", "few rows": FEW_MMA, "warpgroups": "wgmma",
}  # fmt: skip


@pytest.mark.emulated
@pytest.mark.parametrize("names", ["v", "k", "all"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", EMULATED)
def test_other_heads_have_the_same_bits_on_a_gpu(name, bad, names, monkeypatch):
    """Few multiprocessors, so that each has several heads one after the other."""
    shape = dict(EMULATED[name])
    run = shape.pop("run", {})
    emulator.install(monkeypatch)
    monkeypatch.setattr(hardware, "_gpu", lambda device: replace(hardware.CHIPS["sm_90"], processors=2))
    monkeypatch.setattr(problem, "_MEMO", {})
    if name.startswith("warpgroups"):
        monkeypatch.setattr(sm90, "WGMMA_FEWEST", 0.0)
    case = make(B=2, Hq=4, Hkv=2, **shape)
    own = {"q": slice(0, 2), "dout": slice(0, 2), "k": slice(0, 1), "v": slice(0, 1)}  # heads of sequence 0
    changed = {x: getattr(case, x).copy() for x in (own if names == "all" else names)}
    for x, array in changed.items():
        array[0, own[x]] = bad
    found = []
    for one in (case, replace(case, **changed)):
        gpu = on_device(one)
        family = rf.explain(gpu.q, gpu.k, gpu.v, **gpu.options | run).tiles.family
        assert family == FAMILIES[name.partition(",")[0]], family
        out, lse = gpu.forward(**run)
        found.append([np.asarray(x) for x in (out, lse, *gpu.backward(out, lse, **run))])
    for x, clean, beside in zip(("q", "q", "q", "k", "v"), *found, strict=True):
        others = np.ones(clean.shape[:2], bool)
        others[0, own[x]] = False
        np.testing.assert_array_equal(clean[others].tobytes(), beside[others].tobytes())
