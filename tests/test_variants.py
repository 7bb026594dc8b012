"""Every variant of bench/ablations.json, without a GPU: it differs from the code as it is, compiles, and is right."""

import json
import re
from dataclasses import replace

import emulator
import kept
import numpy as np
import pytest
from strategies import DTYPES
from test_cupy_raw_emulated import on_device
from test_cupy_raw_offline import Array, Device
from test_forward import make
from tolerances import assert_close

import rawflash as rf
from bench.cases import CASES, select
from bench.peers import Ours
from bench.variants import ABLATIONS, AS_IT_IS, Variant
from rawflash import hardware, sm90
from rawflash.backends.cupy_raw import compile as compiler

SPEC = {one["name"]: one for one in json.loads(ABLATIONS.read_text())}
LONG = 4096  # rows above which other blocks are planned, and pieces shared
each_variant = pytest.mark.parametrize("name", SPEC)


def call_of(case):
    """A case's pass, for a device that is not there."""
    q, k, v = (Array((case.B, heads, case.Tq, case.d), DTYPES[case.dtype]) for heads in (case.Hq, case.Hkv, case.Hkv))
    if case.direction == "forward":
        return lambda: rf.attention(q, k, v, causal=case.causal)
    lse = Array(q.shape[:-1], np.float32)
    return lambda: rf.attention_backward(q, q, k, v, q, lse, causal=case.causal)


def texts_of(variant, case):
    """Texts of the kernels that are the pass's own."""
    device = Device("sm_90a")
    with device.current(), variant.inside():
        call_of(case)()
    return [program.text for program in device.programs if program.file != "side_gradients.cu"]


def test_names_and_cases():
    assert len(SPEC) == len(json.loads(ABLATIONS.read_text())) and AS_IT_IS not in SPEC
    for one in SPEC.values():
        cases = select(one["cases"])
        assert {case.direction for case in cases} <= {"forward", "backward"}
        assert all((case.dtype, case.measure, case.Tq) == ("bfloat16", "time", case.Tk) for case in cases)


@each_variant
def test_differs_in_each_of_its_cases(name):
    for case in select(SPEC[name]["cases"]):
        variant = Variant(**SPEC[name])
        changed, texts = texts_of(variant, case), texts_of(Variant(AS_IT_IS), case)
        assert variant.missing() == []
        assert changed != texts


def test_text_is_looked_for_in_the_kernels_of_each_case(monkeypatch):
    """d = 64 has no Q in registers."""
    monkeypatch.setattr(Ours, "prepare", lambda self, case, x: call_of(case))
    variant = Variant(**SPEC["Q from shared memory"])
    with Device("sm_90a").current():
        for _ in range(2):  # two sets of inputs: kernels are made once
            variant.prepare(CASES["forward/bfloat16/d128/T8192"], None)
        with pytest.raises(ValueError, match="not in the text of a kernel: 'constexpr int Q_STAYS = 1;'"):
            variant.prepare(CASES["forward/bfloat16/d64/T8192"], None)


@pytest.mark.slow
@each_variant
def test_compiles_without_spills(name):
    pytest.importorskip("cupy")
    texts = {text for case in select(SPEC[name]["cases"]) for text in texts_of(Variant(**SPEC[name]), case)}
    for text in texts:
        _, log = kept.compile_log(text, "sm_90a")
        used = compiler.usage(log)
        assert used and all(max(x["spill_stores"], x["spill_loads"]) == 0 for x in used.values())
        assert not re.findall(r"C75\d\d.*", log)  # products that are serialised


@pytest.mark.emulated
@each_variant
def test_results_stay_right(name, monkeypatch):
    """A short call of each kind that is among its cases, by the kernels on the CPU."""
    kinds = {(case.direction, case.d, case.causal, case.Tk > LONG) for case in select(SPEC[name]["cases"])}
    for direction, d, causal, long in sorted(kinds):
        with monkeypatch.context() as patch:
            emulator.install(patch, backwards=len(name) % 2 == 1)
            patch.setattr(hardware, "_gpu", lambda device: replace(hardware.CHIPS["sm_90"], processors=2))
            patch.setattr(sm90, "WGMMA_FEWEST", 0.0)
            variant = Variant(**SPEC[name])
            if long:
                table = sm90.WGMMA_FORWARD
                rows = tuple(shape for shape in table[128] if shape.most > LONG)
                patch.setattr(sm90, "WGMMA_FORWARD", table | {128: rows})
                patch.setattr(sm90, "WGMMA_BALANCED_LEAST", 1)
                patch.setattr(sm90, "WGMMA_BALANCED_COST", -1.0)
            case = make(B=1, Hq=2, Tq=400, d=d, dtype="bfloat16", causal=causal)
            moved, reference = on_device(case), case.reference()
            with variant.inside():
                results = dict(zip(("out", "lse"), moved.forward(), strict=True))
                if direction == "backward":
                    gradients = moved.backward(*results.values())
                    results |= {"d" + name: x for name, x in zip(case.wrt, gradients, strict=True)}
            assert variant.missing() == []
            for what, result in results.items():
                assert_close(what, np.asarray(result), reference)
