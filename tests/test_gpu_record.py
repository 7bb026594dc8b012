"""The record of GPU runs: which runs of pytest write it, what is in it, and when it is stale."""

import argparse
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import gpu_record
import pytest

# conftest.py as it is, but for a folder of its own and a GPU that is not there.
CONFTEST = f"""
import sys

sys.path += [{str(gpu_record.TESTS)!r}, {str(gpu_record.ROOT)!r}]
{(gpu_record.TESTS / "conftest.py").read_text()}
gpu_record.TESTS = Path(__file__).parent
gpu_record.RECORD = gpu_record.TESTS / "gpu_record.json"
gpu_record.where = lambda: dict(gpu=os.environ.get("GPU", "a GPU"), kernels_sha256=gpu_record.digest())
"""
TESTS = """
import os
import pytest

SHARDS, PROBLEMS_A_SHARD = 3, 7

def test_without_a_gpu():
    pass

@pytest.mark.gpu
@pytest.mark.parametrize("n", range(int(os.environ.get("TESTS", 4))))
def test_on_a_gpu(n):
    assert n < 9 - int(os.environ.get("FAIL", 0))

@pytest.mark.gpu
def test_that_is_skipped():
    pytest.skip("here")
"""
NUMBA = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("n", range(3))
def test_slow(n):
    pass
"""
MODULE = """
import pytest

pytest.skip("all of it", allow_module_level=True)
"""


@pytest.fixture
def run(tmp_path):
    """Runs pytest on a small suite, with these arguments; gives the record that it leaves, or None."""
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_gpu.py").write_text(TESTS)
    (tmp_path / "setup.cfg").write_text("[tool:pytest]\ntestpaths = tests\naddopts = -m 'not gpu'\nmarkers = gpu\n")

    def run(*arguments, status=None, **environment):
        record = folder / "gpu_record.json"
        if record.exists():
            os.utime(record, (0, 0))
        command = [sys.executable, "-m", "pytest", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, timeout=120
        )
        written = record.exists() and record.stat().st_mtime > 0
        run.output = done.stdout + done.stderr
        assert (f"wrote {record}" in done.stdout) == written, run.output
        assert status in (None, done.returncode), run.output
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


def test_parts_are_all_tests_once(run):
    (run.folder / "test_gpu_numba.py").write_text(NUMBA)

    def collected(*arguments):
        run("-m", "gpu", "--collect-only", "-q", *arguments)
        return [line.partition("::")[2] for line in run.output.splitlines() if line.startswith("tests/")]

    tests = collected()
    parts = [collected("--gpu-part", f"{n}/3") for n in (1, 2, 3)]
    assert parts == [tests[0::3], tests[1::3], tests[2::3]]
    assert [part[0] for part in parts] == [f"test_slow[{n}]" for n in range(3)]
    assert sorted(sum(parts, [])) == sorted(tests) and len(set(tests)) == len(tests) == 8
    assert collected("--gpu-part=2/3") == parts[1]


def test_a_part_has_a_number_up_to_theirs(run):
    assert gpu_record.part_named("1/1") == (1, 1) and gpu_record.part_named("10/12") == (10, 12)
    for wrong in ("0/3", "4/3", "1/0", "-1/3", "01/3", "1", "1/3/3", "1.0/3", "", "one/3", "1/3\n", "\u0661/3"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not N/OF with 1 <= N <= OF"):
            gpu_record.part_named(wrong)
    run("-m", "gpu", "--gpu-part", "4/3", status=pytest.ExitCode.USAGE_ERROR)
    assert "argument --gpu-part: '4/3' is not N/OF with 1 <= N <= OF" in run.output
    assert run("--gpu-part", "1/3", status=pytest.ExitCode.USAGE_ERROR) is None
    assert "--gpu-part is for -m gpu" in run.output


def test_parts_of_several_processes(run):
    """None of these writes what it has seen itself."""
    whole = run("-m", "gpu", TESTS="6")
    for n in (1, 2, 3):
        record = run("-m", "gpu", "-n", "2", "--gpu-part", f"{n}/3", TESTS="6")
    assert record == whole | {"from_parts": {f"{n}/3": {} for n in (1, 2, 3)}}


def test_parts_become_a_record(run):
    (run.folder / "test_gpu_numba.py").write_text(NUMBA)
    (run.folder / "test_skipped.py").write_text(MODULE)  # by each part
    whole = run("-m", "gpu")
    assert sum(sum(file.values()) for file in whole["tests"].values()) == 9
    before = {"gpu": "before", "kernels_sha256": "0", "sanitizer": {"memcheck": {"errors": 0}}}  # stays until then
    (run.folder / "gpu_record.json").write_text(json.dumps(before))
    third = run("-m", "gpu", "--gpu-part", "3/3", GPU="another GPU")
    entry = third["parts"].pop("3/3")
    assert third == before | {"parts": {}}
    assert entry.pop("tests_sha256")
    assert entry == {
        "gpu": "another GPU",
        "kernels_sha256": gpu_record.digest(),
        "drawn_problems": 21,
        "tests": {f"tests/{file}.py": {"passed": 1, "skipped": 0} for file in ("test_gpu", "test_gpu_numba")},
    }
    failed = run("-m", "gpu", "--gpu-part", "1/3", FAIL="9")
    assert failed["parts"].keys() == {"3/3"} and "exit status 1" in run.output
    narrowed = run("-m", "gpu", "--gpu-part", "1/3", "-k", "slow")
    assert narrowed["parts"].keys() == {"3/3"} and "left out by keyword" in run.output
    assert list(run("-m", "gpu", "--gpu-part", "1/3", "-n", "2")["parts"]) == ["1/3", "3/3"]
    from_parts = {"1/3": {}, "2/3": {}, "3/3": {"gpu": "another GPU"}}
    joined = whole | {"from_parts": from_parts, "sanitizer": before["sanitizer"]}
    assert run("-m", "gpu", "--gpu-part", "2/3") == joined


def test_parts_of_other_runs_are_dropped(run):
    def parts(*arguments, **environment):
        return list(run("-m", "gpu", *arguments, **environment).get("parts", ()))

    assert parts("--gpu-part", "1/3") == ["1/3"]
    assert parts("--gpu-part", "3/3", TESTS="5") == ["3/3"]  # other tests
    assert parts("--gpu-part", "4/4", TESTS="5") == ["4/4"]  # another number of parts
    assert parts(TESTS="5") == []

    entry = dict.fromkeys(gpu_record.SAME, "1") | {"tests": {}}
    record = {"parts": {f"{n}/12": entry for n in range(2, 12)}}
    assert list(gpu_record.joined(record, 12, 12, entry)["parts"]) == [f"{n}/12" for n in range(2, 13)]
    for key in gpu_record.SAME:
        record["parts"]["11/12"] = entry | {key: "0"}
        assert list(gpu_record.joined(record, 1, 12, entry)["parts"]) == [f"{n}/12" for n in range(1, 11)]


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
    for parts, line in (
        ({"1/3": fresh, "3/3": fresh}, "parts 1/3, 3/3 of an unfinished GPU run on record are of these kernel sources"),
        ({"2/3": stale}, "STALE: parts 2/3 of an unfinished GPU run on record are of other kernel sources"),
    ):
        gpu_record.write({"parts": parts})
        assert gpu_record.verdict() == f"no GPU run on record\nno sanitizer run on record\n{line}"
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
