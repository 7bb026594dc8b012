"""What beforehand.py compiles is what calls of the GPU tests load."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from strategies import DTYPES
from test_cupy_raw_offline import Array, Device
from test_gpu import WHOLE_ROWS

import rawflash as rf
from rawflash import sm90
from rawflash.backends.cupy_raw import compile as compiler

pytest.importorskip("cupy")
HERE = Path(__file__).parent


def test_a_call_of_a_test_finds_its_kernels(tmp_path, monkeypatch):
    command = [sys.executable, HERE / "beforehand.py", tmp_path, "-k", "test_rows_of_whole_chunks and 96-bfloat16"]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0 and " 0 of them failed" in done.stdout, done.stderr
    shape = WHOLE_ROWS["96"]
    device = Device("sm_90a")
    with device.current():
        monkeypatch.setattr(sm90, "WGMMA_FEWEST", 0.0)
        q, k = (Array((2, 2, shape[length], 96), DTYPES["bfloat16"]) for length in ("Tq", "Tk"))
        rf.attention(q, k, k, causal=True, return_lse=True)
    assert device.programs
    for program in device.programs:
        assert (tmp_path / f"{compiler._key(program.text, program.arch, ())}.cubin").exists()


def test_tests_that_cannot_be_run_are_told_of(tmp_path):
    command = [sys.executable, HERE / "beforehand.py", tmp_path, "-k", "no test has this name"]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode and "the tests could not be run" in done.stderr and not any(tmp_path.iterdir())
