"""The calls of sanitize.py and how it reads compute-sanitizer, without either the tool or a GPU."""

import re
import sys
from contextlib import nullcontext

import gpu
import gpu_record
import numpy as np
import pytest
import sanitize
from test_cupy_raw_offline import Array, Device

from rawflash.backends.cupy_raw import compile as compiler

SUMMARIES = {
    "========= ERROR SUMMARY: 0 errors": 0,
    "========= ERROR SUMMARY: 1 error": 1,
    "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)": 0,
    "========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)": 3,
}
RAN = sanitize.RAN + '["a.cu f", "a.cu g"]\n'


def test_the_calls_reach_every_kernel_both_ways_of_every_switch(monkeypatch):
    monkeypatch.setattr(gpu, "to_kind", lambda array, kind: Array(array.shape, array.dtype))
    device = Device("sm_90a")
    with device.current():
        for case in sanitize.cases().values():
            for algorithm in gpu.ALGORITHMS:
                moved = gpu.on_gpu(case)
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


@pytest.mark.parametrize("change", [lambda x: 1.01 * x, lambda x: np.where(x == 3, np.inf, x), lambda x: x - np.nan])
def test_wrong_results_are_caught(change):
    want = np.arange(8, dtype=np.float32)
    sanitize.compare("out", "float32", want * np.float32(1 + 1e-6), want)
    with pytest.raises(AssertionError):
        sanitize.compare("out", "float32", change(want), want)


@pytest.mark.parametrize("summary", SUMMARIES)
def test_summaries(summary):
    results = [(0, f"{RAN}{summary}\n"), (0, f"{RAN}========= ERROR SUMMARY: 2 errors\n")]
    assert sanitize.outcome("a tool", results) == (SUMMARIES[summary] + 2, ["a.cu f", "a.cu g"])


@pytest.mark.parametrize("result", [
    (None, RAN + "========= ERROR SUMMARY: 0 errors"), (1, RAN + "========= ERROR SUMMARY: 0 errors"),
    (0, "========= ERROR SUMMARY: 0 errors"), (0, RAN),
], ids=["killed", "failed", "nothing ran", "no summary"])  # fmt: skip
def test_a_tool_that_does_not_finish_finds_nothing_clean(result):
    assert sanitize.outcome("a tool", [(0, RAN + "========= ERROR SUMMARY: 0 errors"), result])[0] is None


def test_a_command_that_hangs_is_ended_with_what_it_started():
    sleep = "import time; print('here', flush=True); time.sleep(600)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}])"
    assert sanitize.run([sys.executable, "-c", outer], 5) == (None, "here\n")
    assert sanitize.run([sys.executable, "-c", "print('here')"], 60) == (0, "here\n")


def test_what_goes_on_record(monkeypatch, tmp_path):
    """Tools that were not asked for keep their entry, unless it is of other kernels."""
    monkeypatch.setattr(gpu_record, "RECORD", tmp_path / "gpu_record.json")
    monkeypatch.setattr(sanitize, "sanitizer", lambda: ("compute-sanitizer", "2025.3"))
    errors = {"memcheck": 0, "racecheck": 2, "synccheck": 0, "initcheck": 0}

    def shared(prefix, limit):
        tool = prefix[2] if prefix else None
        return [(0, RAN + (f"========= ERROR SUMMARY: {errors[tool]} errors" if tool else ""))]

    def record(*tools):
        monkeypatch.setattr(sys, "argv", ["sanitize.py", "--tools", *tools])
        with pytest.raises(SystemExit) if "racecheck" in tools else nullcontext():
            sanitize.main()
        entry = gpu_record.read()["sanitizer"]
        assert entry["kernels_sha256"] == gpu_record.digest() and entry["version"] == "2025.3"
        return {tool: entry[tool]["errors"] for tool in sanitize.TOOLS if tool in entry}

    monkeypatch.setattr(sanitize, "shared", shared)
    gpu_record.write({"gpu": "a GPU", "sanitizer": {"kernels_sha256": "other", "initcheck": {"errors": 5}}})
    assert record("memcheck", "racecheck") == {"memcheck": 0, "racecheck": 2}
    assert record("synccheck") == {"memcheck": 0, "racecheck": 2, "synccheck": 0}
    assert gpu_record.read()["gpu"] == "a GPU"
