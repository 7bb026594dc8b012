"""The calls of sanitize.py and how it reads compute-sanitizer, without either the tool or a GPU."""

import json
import os
import re
import sys
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import gpu
import gpu_record
import numpy as np
import pytest
import sanitize
from strategies import Decode
from test_cupy_raw_offline import Array, Device

from rawflash import arrays, sections, sm90
from rawflash.backends.cupy_raw import compile as compiler
from rawflash.backends.cupy_raw import launch

SUMMARIES = {
    "========= ERROR SUMMARY: 0 errors": 0,
    "========= ERROR SUMMARY: 1 error": 1,
    "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)": 0,
    "========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)": 3,
}
CALLS = ["plain", "mask"]
RAN = sanitize.RAN + json.dumps({"kernels": ["a.cu f", "a.cu g"], "calls": CALLS, "failed": []}) + "\n"


@pytest.fixture
def plans(monkeypatch):
    """`plan_for` changes them."""
    for name, value in sanitize.AS_THEY_ARE.items():
        monkeypatch.setattr(sm90, name, value)
    monkeypatch.setattr(sections, "_section_in_order", sanitize.IN_ORDER)


def test_the_calls_reach_every_kernel_both_ways_of_every_switch(monkeypatch, plans):
    monkeypatch.setattr(gpu, "to_kind", lambda array, kind: Array(array.shape, array.dtype))
    device = Device("sm_90a")
    with device.current():
        for name, case in sanitize.cases().items():
            sanitize.plan_for(name)
            if case.options.get("backend") == "numba_cuda":
                continue
            if isinstance(case, Decode):
                gpu.append_and_decode(case, 2)
                continue
            for algorithm, on_device in product(sanitize.algorithms_of(name), {False, case.cu_seqlens is not None}):
                moved = gpu.on_gpu(case, small_on_device=on_device)
                moved.backward(*moved.forward(algorithm=algorithm), algorithm=algorithm)
    files = {path.relative_to(compiler.CUDA).as_posix() for path in compiler.CUDA.rglob("*.cu")}
    kernels = {name for path in compiler.CUDA.rglob("*.cu*") for name in sanitize.KERNEL.findall(path.read_text())}
    assert {program.file for program in device.programs} == files
    assert {name for program in device.programs for name in program.launched} == kernels
    switches = {}
    for program in device.programs:
        head = program.text[: program.text.index("constexpr")]
        for name, value in re.findall(r"^#define (\w+) ([01])$", head, re.MULTILINE):
            switches.setdefault(name, set()).add(value)
    assert len(switches) > 10 and all(values == {"0", "1"} for values in switches.values()), switches


@pytest.mark.parametrize("name", sanitize.halves())
def test_calls_of_16_bits_go_where_their_names_say(name, monkeypatch, plans):
    """On sm_90: to kernels of warpgroups, but for those of the backward pass that have none."""
    sanitize.plan_for(name)
    monkeypatch.setattr(gpu, "to_kind", lambda array, kind: Array(array.shape, array.dtype))
    device, case = Device("sm_90a"), sanitize.halves()[name]
    with device.current():
        moved = gpu.on_gpu(case)
        moved.backward(*moved.forward())
    forward, backward, *_ = (program.file for program in device.programs)
    ours = name.startswith("warpgroups")
    assert forward == ("sm90" if ours else "mma") + "/fa2_forward.cu"
    wide = name.startswith("warpgroups, wide")
    assert backward == ("sm90" if ours else "mma") + f"/fa2_backward{'_wide' if wide else ''}.cu"
    text = device.programs[1].text
    assert ("constexpr int FUSED = 1;" in text) == name.startswith("warpgroups, rows of others")
    kinds = (("constexpr int", "= 1;"), ("#define", "1"))
    words = {"PAIRED": "pairs", "DIAGONAL": "parts", "BY_HEAD": "each head"}
    if "several sums" in name and not wide:
        for switch, word in words.items():
            assert any(f"{kind} {switch} {one}\n" in text for kind, one in kinds) == (word in name)
        alike = ("divided", "parts", "each head")
        assert ("constexpr int DIVIDED = 1;" in text) == any(word in name for word in alike)
    assert ("constexpr int SUMS = 1;" not in text) == ("several sums" in name) or not ours


@pytest.fixture
def fills(monkeypatch, plans):
    """What the backward pass of a call fills, and with what: a function of the call's name."""
    def of(name):
        sanitize.plan_for(name)
        with Device("sm_90a").current():
            moved = gpu.on_gpu(sanitize.cases()[name])
            result = moved.forward()
            filled.clear()
            moved.backward(*result)
        return filled

    def noting(array, *arguments):
        make(array, *arguments)
        array.data.memset_async = lambda value, nbytes: filled.append((value, nbytes))

    filled, make = [], Array.__init__
    monkeypatch.setattr(gpu, "to_kind", lambda array, kind: Array(array.shape, array.dtype))
    monkeypatch.setattr(Array, "__init__", noting)
    return of


def test_dq_and_no_other_result_is_nan_before_kernels_write_it(monkeypatch, fills):
    monkeypatch.setattr(arrays.DeviceResult, "canonical", sanitize.nan_first)
    name = "warpgroups, rows of others"
    assert [nbytes for value, nbytes in fills(name) if value == 0xFF] == [sanitize.cases()[name].q.nbytes]


@pytest.mark.parametrize("name", ["warpgroups, causal", "warpgroups, causal, d = 128", "warpgroups, sums cleared"])
def test_sums_are_nan_before_the_first_is_stored(name, monkeypatch, fills):
    """And are cleared where they are added to; what is counted is 0 in any case."""
    monkeypatch.setattr(launch.Launcher, "workspace", sanitize.nan_where_stored)
    filled, q = fills(name), sanitize.cases()[name].q
    sums = max(nbytes for _, nbytes in filled)
    assert sums >= q.size * 4
    value = 0 if "cleared" in name else 0xFF
    assert (value, sums) in filled and (255 - value, sums) not in filled
    assert [n for fill, n in filled if fill == 0] == ([sums] if "cleared" in name else [256])


@pytest.mark.parametrize("change", [lambda x: 1.01 * x, lambda x: np.where(x == 3, np.inf, x), lambda x: x - np.nan])
def test_wrong_results_are_caught(change):
    want = np.arange(8, dtype=np.float32)
    sanitize.compare("out", "float32", want * np.float32(1 + 1e-6), want)
    with pytest.raises(AssertionError):
        sanitize.compare("out", "float32", change(want), want)


@pytest.fixture
def few(monkeypatch):
    """As if there were these calls and no other."""
    monkeypatch.setattr(sanitize, "cases", lambda: dict.fromkeys(CALLS))


@pytest.mark.parametrize("summary", SUMMARIES)
def test_summaries(summary, few):
    results = [(0, f"{RAN}{summary}\n"), (0, f"{RAN}========= ERROR SUMMARY: 2 errors\n")]
    assert sanitize.outcome("a tool", results) == {
        "clean": False, "errors": SUMMARIES[summary] + 2, "calls": 2, "not done": [], "kernels": ["a.cu f", "a.cu g"],
    }  # fmt: skip
    assert sanitize.outcome("a tool", results[:1])["clean"] == (SUMMARIES[summary] == 0)


CLEAN = "========= ERROR SUMMARY: 0 errors"
OTHER = RAN.replace('"plain", ', "")  # a process that has run the other call only


@pytest.mark.parametrize("result", [
    (None, RAN + CLEAN), (1, RAN + CLEAN), (0, CLEAN), (0, RAN), (0, OTHER + CLEAN),
    (0, RAN.replace('"calls": ["plain", "mask"], "failed": []', '"calls": ["mask"], "failed": ["plain"]') + CLEAN),
], ids=["killed", "failed", "nothing ran", "no summary", "no time", "wrong results"])  # fmt: skip
def test_a_tool_that_has_not_seen_a_call_finds_nothing_clean(result, few):
    entry = sanitize.outcome("a tool", [(0, OTHER + CLEAN), result])
    assert entry["not done"] == ["plain"] and entry["calls"] == 1 and not entry["clean"]


def test_a_run_goes_on_with_what_is_left(monkeypatch, few):
    """Calls that are done are taken already; errors on record stay errors."""
    taken = []
    monkeypatch.setattr(sanitize, "PROCESSES", 1)
    monkeypatch.setattr(sanitize, "devices", lambda: ["0"])
    monkeypatch.setattr(sanitize, "run", lambda command, *_, **__: taken.extend(os.listdir(command[-2])))
    old = sanitize.outcome("a tool", [(0, OTHER + CLEAN.replace("0 errors", "2 errors"))])
    assert old["not done"] == ["plain"] and sanitize.done_by(old) == {"mask"}
    sanitize.shared(["tool"], 100, sanitize.done_by(old))
    assert taken == ["1"]
    rest = RAN.replace(', "mask"', "").replace('"a.cu f", ', '"a.cu h", ')
    assert sanitize.outcome("a tool", [(0, rest + CLEAN)], before=old) == {
        "clean": False, "errors": 2, "calls": 2, "not done": [], "kernels": ["a.cu f", "a.cu g", "a.cu h"],
    }  # fmt: skip
    clean = sanitize.outcome("a tool", [(0, OTHER + CLEAN)])
    assert sanitize.outcome("a tool", [(0, rest + CLEAN)], before=clean)["clean"]


def test_a_command_that_hangs_is_ended_with_what_it_started():
    sleep = "import time; print('here', flush=True); time.sleep(600)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}])"
    assert sanitize.run([sys.executable, "-c", outer], 5) == (None, "here\n")
    assert sanitize.run([sys.executable, "-c", "print('here')"], 60) == (0, "here\n")


def test_each_call_is_run_once_by_one_of_the_processes(monkeypatch):
    """Under the tool, with a port of its own, on each GPU in turn; a process takes no call after its time."""
    monkeypatch.setattr(sanitize, "PROCESSES", 2)
    monkeypatch.setattr(sanitize, "devices", lambda: ["3", "5"])
    monkeypatch.setattr(sanitize, "run", lambda command, limit, **environment: (command, (limit, environment)))
    (first, (_, on)), (second, (limit, on_other)) = sanitize.shared(["tool"], 100)
    assert first[0] == "tool" and first[first.index("--port") + 1] != second[second.index("--port") + 1]
    assert first[-3:] == second[-3:] and first[-3] == "--child" and float(first[-1]) < limit == 100
    assert [x["CUDA_VISIBLE_DEVICES"] for x in (on, on_other)] == ["3", "5"]
    assert sanitize.shared([], 100)[0][0][:2] == [sys.executable, sanitize.__file__]


def test_what_a_process_says_at_its_end(monkeypatch, tmp_path, capsys, plans):
    """Calls that other processes have are left alone, a failure does not stop the others, nor is one begun late."""
    broken = []

    def synchronize():
        if broken:
            raise RuntimeError("an illegal memory access was encountered")

    runtime = SimpleNamespace(free=lambda pointer: None, deviceSynchronize=synchronize, CUDARuntimeError=RuntimeError)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, set_allocator=lambda allocator: None))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(compiler, "load", lambda text: SimpleNamespace(get_function=SimpleNamespace))

    def check(case, algorithms):
        assert case != "wrong" and algorithms == gpu.ALGORITHMS
        broken.extend([case] * (case == "deadly"))
        compiler.load('#line 1 "a.cu"\n')

    monkeypatch.setattr(sanitize, "check", check)
    names = ("taken", "wrong", "right", "deadly", "after")
    monkeypatch.setattr(sanitize, "cases", lambda: dict(zip(names, names, strict=True)))

    def ran(seconds):
        sanitize.child(tmp_path, seconds)
        return json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix(sanitize.RAN))

    assert ran(-1) == {"kernels": [], "calls": [], "failed": []}
    (tmp_path / "0").touch()
    assert ran(60) == {"kernels": [], "calls": ["right"], "failed": ["wrong", "deadly"]}
    broken.clear()
    assert ran(60) == {"kernels": [], "calls": ["after"], "failed": []}


def test_what_goes_on_record(monkeypatch, tmp_path, few):
    """Tools that were not asked for keep their entry, unless it is of other kernels; if a tool dies the others stay."""
    monkeypatch.setattr(gpu_record, "RECORD", tmp_path / "gpu_record.json")
    monkeypatch.setattr(sanitize, "sanitizer", lambda: ("compute-sanitizer", "2025.3"))
    errors, asked = {"memcheck": 0, "racecheck": 2, "synccheck": 0}, set()

    def shared(prefix, limit, done=()):
        asked.clear()
        asked.update(done)
        tool = prefix[2] if prefix else None
        return [(0, RAN + (f"========= ERROR SUMMARY: {errors[tool]} errors" if tool else ""))]

    def record(*tools):
        logs = tmp_path / "logs"
        monkeypatch.setattr(sys, "argv", ["sanitize.py", "--logs", str(logs), "--tools", *tools])
        failure = KeyError if "initcheck" in tools else SystemExit if {"racecheck", "--resume"} & {*tools} else None
        with pytest.raises(failure) if failure else nullcontext():
            sanitize.main()
        entry = gpu_record.read()["sanitizer"]
        assert entry["kernels_sha256"] == gpu_record.digest() and entry["version"] == "2025.3"
        assert "SUMMARY" in (logs / f"sanitizer-{tools[0]}.log").read_text()
        return {tool: entry[tool]["errors"] for tool in sanitize.TOOLS if tool in entry}

    monkeypatch.setattr(sanitize, "shared", shared)
    gpu_record.write({"gpu": "a GPU", "sanitizer": {"kernels_sha256": "other", "initcheck": {"errors": 5}}})
    assert record("memcheck", "racecheck") == {"memcheck": 0, "racecheck": 2}
    assert record("synccheck") == {"memcheck": 0, "racecheck": 2, "synccheck": 0}
    monkeypatch.setattr(sanitize, "cases", lambda: {"new": None} | dict.fromkeys(CALLS))
    assert record("memcheck", "--resume") == {"memcheck": 0, "racecheck": 2, "synccheck": 0}
    assert not asked and gpu_record.read()["sanitizer"]["memcheck"]["not done"] == ["new"]  # of other calls
    assert record("memcheck", "--resume") == {"memcheck": 0, "racecheck": 2, "synccheck": 0} and asked == {*CALLS}
    assert record("racecheck", "initcheck") == {"memcheck": 0, "racecheck": 2, "synccheck": 0}
    assert gpu_record.read()["gpu"] == "a GPU"


def test_the_tool_is_found_off_the_path(monkeypatch, tmp_path):
    (tmp_path / "cuda-13.0" / "bin").mkdir(parents=True)
    tool = tmp_path / "cuda-13.0" / "bin" / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho 'NVIDIA (R) Compute Sanitizer'\necho 'Version 2025.3.1.0 (build 36400806)'\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sanitize, "PLACES", (str(tmp_path / "cuda*" / "bin"),))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitize.sanitizer() == (str(tool), "2025.3.1.0")
    monkeypatch.setattr(sanitize, "PLACES", ())
    with pytest.raises(SystemExit, match="neither"):
        sanitize.sanitizer()
