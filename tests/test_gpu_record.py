"""The record of GPU runs: which runs of pytest write it, what is in it, and when it is stale."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import gpu_record
import pytest

# As conftest.py and test_gpu.py are here, but for a folder of its own and a GPU that is not there.
CONFTEST = """
import pathlib
import sys

sys.path.append({tests!r})
import gpu_record

gpu_record.TESTS = pathlib.Path(__file__).parent
gpu_record.RECORD = gpu_record.TESTS / "gpu_record.json"
gpu_record.where = lambda: {{"gpu": "a GPU", "kernels_sha256": gpu_record.digest()}}


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    gpu_record.after_pytest(terminalreporter, exitstatus, config)
"""
TESTS = """
import os
import pytest

SHARDS, PROBLEMS_A_SHARD = 3, 7

@pytest.mark.gpu
@pytest.mark.parametrize("n", range(4))
def test_on_a_gpu(n):
    assert n < 9 - int(os.environ.get("FAIL", 0))

@pytest.mark.gpu
def test_that_is_skipped():
    pytest.skip("here")

def test_without_a_gpu():
    pass
"""


@pytest.fixture
def run(tmp_path):
    """Runs pytest on a small suite, with these arguments; gives the record that it leaves, or None."""
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "conftest.py").write_text(CONFTEST.format(tests=str(gpu_record.TESTS)))
    (folder / "test_gpu.py").write_text(TESTS)
    (tmp_path / "setup.cfg").write_text("[tool:pytest]\ntestpaths = tests\naddopts = -m 'not gpu'\nmarkers = gpu\n")

    def run(*arguments, **environment):
        record = folder / "gpu_record.json"
        command = [sys.executable, "-m", "pytest", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, timeout=120
        )
        assert (f"wrote {record}" in done.stdout) == record.exists(), done.stdout + done.stderr
        return json.loads(record.read_text()) if record.exists() else None

    run.folder = folder
    return run


def test_a_whole_run_is_recorded(run):
    sanitizer = {"memcheck": {"errors": 0}}
    (run.folder / "gpu_record.json").write_text(json.dumps({"gpu": "before", "sanitizer": sanitizer}))
    assert run("-m", "gpu", "-n", "2") == {
        "gpu": "a GPU",
        "kernels_sha256": gpu_record.digest(),
        "drawn_problems": 21,
        "tests": {"tests/test_gpu.py": {"passed": 4, "skipped": 1}},
        "sanitizer": sanitizer,
    }


def test_other_runs_are_not(run):
    assert run() is None
    assert run("-m", "gpu", "-k", "on_a_gpu") is None
    assert run("-m", "gpu", FAIL="6") is None


def test_a_whole_run_leaves_nothing_out(pytestconfig):
    names = vars(pytestconfig.option).keys()
    assert set(gpu_record.NARROWING) - {"lf", "stepwise"} <= names  # those two are of plugins that may be off

    def why_not(*args, **option):
        invocation = SimpleNamespace(dir=gpu_record.ROOT)
        config = SimpleNamespace(option=SimpleNamespace(**option), args=args, invocation_params=invocation)
        return gpu_record.why_not(config, 0)

    for args in (["tests", "rawflash", "README.md"], ["tests"], ["."], [str(gpu_record.TESTS)]):
        assert why_not(*args, **dict.fromkeys(names)) is None
    for args in (["rawflash"], ["tests/test_gpu.py"], ["tests/test_gpu.py::test_kinds"]):
        assert "not all" in why_not(*args)
    for name in gpu_record.NARROWING:
        assert name in why_not("tests", **{name: ["something"]})


def test_verdicts(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_record, "RECORD", tmp_path / "gpu_record.json")
    fresh, stale = {"kernels_sha256": gpu_record.digest()}, {"kernels_sha256": "0"}
    assert gpu_record.verdict() == "no GPU run on record\nno sanitizer run on record"
    gpu_record.write(fresh | {"sanitizer": stale})
    assert [line.partition(" ")[0] for line in gpu_record.verdict().splitlines()] == ["the", "STALE:"]
    gpu_record.write({"sanitizer": fresh})
    assert [line.partition(" ")[0] for line in gpu_record.verdict().splitlines()] == ["no", "the"]
    gpu_record.RECORD.write_text("no JSON")
    assert gpu_record.read() == {}


def test_the_digest_is_of_names_and_texts(tmp_path):
    folder = tmp_path / gpu_record.KERNELS[0]
    folder.mkdir(parents=True)
    digests = [gpu_record.digest(tmp_path)]
    for name, text in (("a.cu", ""), ("a.cu", "x"), ("b.cuh", "x"), ("c.py", ""), ("c.py", "y")):
        (folder / name).write_text(text)
        digests.append(gpu_record.digest(tmp_path))
    (folder / "b.cuh").rename(folder / "d.cuh")
    digests.append(gpu_record.digest(tmp_path))
    assert len(set(digests)) == 7
    (folder / "notes.txt").write_text("")
    assert gpu_record.digest(tmp_path) == digests[-1]
