"""The command line: every command and every exit code. numpy_tiled where possible, which compiles nothing."""

import dataclasses
import importlib
import os
import re
import signal
import subprocess
import sys
import time
import types
import zipfile

import numpy as np
import pytest
import test_gpu_arrays

import rawflash as rf
from rawflash import arrays, hardware
from rawflash.accuracy import error_ratio, reference
from rawflash.cli import common, compiling, demo, info, main, places, run
from rawflash.problem import DIRECTIONS

SMALL = ["demo", "--tokens", "48", "--heads", "2", "--dim", "8", "--backends", "numpy_tiled"]
TILED = ["--backend", "numpy_tiled"]


def save(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


@pytest.fixture
def qkv(rng):
    return dict(zip("qkv", rng.standard_normal((3, 1, 2, 24, 8)).astype(np.float32), strict=True))


@pytest.fixture
def files(tmp_path, qkv):
    """(input, output) with q, k and v in the input."""
    return save(tmp_path / "in.npz", **qkv), str(tmp_path / "out.npz")


device = test_gpu_arrays.device  # a GPU made of NumPy


class MemoryHook:
    """CuPy's: told of what is allocated and freed while it is active."""

    active = []

    def __enter__(self):
        self.active.append(self)

    def __exit__(self, *exception):
        self.active.remove(self)


@pytest.fixture
def gpus(device, monkeypatch):
    """A CuPy that sees these GPUs, by compute capability and bytes a block; the first computes, in NumPy."""
    seen = [("90", 227 * 1024), ("60", 96 * 1024), ("121", 99 * 1024)]
    cupy = arrays.require_cupy()

    def attributes(number):
        return {"MaxSharedMemoryPerBlockOptin": seen[number][1], "MultiProcessorCount": 100 + number}

    cupy.cuda.runtime = types.SimpleNamespace(
        getDevice=lambda: 0, getDeviceCount=lambda: len(seen), driverGetVersion=lambda: 13020,
        getDeviceProperties=lambda number: {"name": b"NVIDIA Thing %d" % number},
    )  # fmt: skip
    cupy.cuda.is_available = lambda: True
    cupy.cuda.Device = lambda n: types.SimpleNamespace(compute_capability=seen[n][0], attributes=attributes(n))
    cupy.cuda.nvrtc = types.SimpleNamespace(getVersion=lambda: (13, 1))
    cupy.cuda.MemoryHook = MemoryHook
    waits = []
    here = types.SimpleNamespace(ptr=0, synchronize=lambda: waits.append(1))
    cupy.cuda.get_current_stream = lambda device=-1: here
    cupy.asnumpy = lambda array: np.array(array, subok=False)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr("rawflash.problem._MEMO", {})
    hardware._gpu.cache_clear()
    yield types.SimpleNamespace(seen=seen, waits=waits, looked_up=device, cupy=cupy)
    hardware._gpu.cache_clear()


def refused(capsys, arguments, *words):
    """The command ends with 2, one line on stderr that holds ``words``, and no traceback."""
    assert main(arguments) == common.BAD_INPUT
    out, err = capsys.readouterr()
    assert err.startswith("rawflash: ") and "Traceback" not in err and out == ""
    assert err.count("\n") == 1, err
    for word in words:
        assert word in err, err


# ---- demo


def test_demo(capsys):
    assert main(SMALL) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80 and "\x1b" not in out + err
    assert "48 of 4,708 bytes of alice.txt" in out
    for algorithm in ("standard", "rowwise", "fa1", "fa2"):
        rows = [line.split() for line in lines if line.startswith(f"numpy_tiled {algorithm} ")]
        assert [row[3] for row in rows] == ["fwd", "bwd"] * 2
        assert all(row[-1] == "ok" for row in rows[:2])
        for _, _, _, _, loads, loads_counted, stores, stores_counted in rows[2:]:
            assert loads == loads_counted and stores == stores_counted
    assert lines[-1].startswith("Read: all agree")
    assert "counting loads and stores" in err


def test_demo_on_a_text_shorter_than_asked(capsys, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes(b"One byte is enough. \xff\x00")
    assert main([*SMALL, str(path)]) == 0
    assert "22 of 22 bytes" in capsys.readouterr().out
    path.write_bytes(b"x")
    assert main([*SMALL, str(path)]) == 0


def test_demo_says_which_backends_are_missing(capsys, monkeypatch, no_gpu):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert main(SMALL[:-2]) == 0
    out = capsys.readouterr().out
    assert "not run: numba_cpu: needs numba, which is not installed; pip install numba" in out
    assert "not run: cupy_raw: needs cupy, which is not installed" in out
    assert out.splitlines()[-1].startswith("Read: all agree") and "asked for" not in out


def test_demo_without_a_backend_that_was_asked_for_is_no_success(capsys, no_gpu):
    assert main([*SMALL[:-1], "numpy_tiled,cupy_raw,numba_cuda"]) == common.DISAGREES
    out = " ".join(capsys.readouterr().out.split())
    assert "not run: cupy_raw: needs cupy, which is not installed" in out
    assert "not run: numba_cuda: needs " in out
    assert "Read: all agree" in out and "DISAGREES" not in out
    assert out.endswith("Read: not run, though --backends asked for it: cupy_raw, numba_cuda.")


def test_demo_without_any_backend_is_no_success(capsys, no_gpu):
    assert main([*SMALL[:-1], "cupy_raw"]) == common.DISAGREES
    out = capsys.readouterr().out
    assert "Read: no kernel was checked" in out and "all agree" not in out and "GFLOP" not in out
    assert "DISAGREES" not in out and "wrong" not in out
    assert out.endswith("Read: not run, though --backends asked for it: cupy_raw.\n")


def test_demo_of_heads_that_a_backend_does_not_have(capsys, gpus):
    """No kernel is wrong then: the backend is not run, and says why."""
    flags = ["--tokens", "4", "--dim", "257", "--backends", "numpy_tiled,cupy_raw"]
    assert main([*SMALL[:-2], *flags]) == common.DISAGREES
    out = capsys.readouterr().out
    assert "not run: cupy_raw: has head dimensions up to 256; d is 257" in out and "DISAGREES" not in out


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_demo_finds_a_wrong_kernel(capsys, monkeypatch, direction):
    name = f"fa2_{direction}"
    module = importlib.import_module(f"rawflash.backends.numpy_tiled.{name}")
    right = getattr(module, name)

    def wrong(problem, tiles, x, *results, **keywords):
        right(problem, tiles, x, *results, **keywords)
        target = results[0] if direction == "forward" else results[0]["k"]
        target[..., 0, 0] += 1e-3

    monkeypatch.setattr(module, name, wrong)
    assert main(SMALL) == common.DISAGREES
    out = capsys.readouterr().out
    assert f"DISAGREES: numpy_tiled fa2 {direction}: {'out' if direction == 'forward' else 'dk'} is" in out
    assert "WRONG" in out and out.splitlines()[-1].startswith("Read: each DISAGREES")
    assert "DISAGREES: numpy_tiled fa1" not in out


def test_demo_finds_a_nan(capsys, monkeypatch):
    module = importlib.import_module("rawflash.backends.numpy_tiled.fa1_forward")

    def nan(problem, tiles, x, out, lse, **keywords):
        out[...] = np.nan

    monkeypatch.setattr(module, "fa1_forward", nan)
    assert main(SMALL) == common.DISAGREES
    assert "out is inf times" in capsys.readouterr().out


def test_demo_finds_wrong_counts(capsys, monkeypatch):
    from rawflash.backends.numpy_tiled.memory import Memory

    load = Memory.load

    def twice(self, name, array, **keywords):
        self.loads[name] += name == "K"
        return load(self, name, array, **keywords)

    monkeypatch.setattr(Memory, "load", twice)
    assert main(SMALL) == common.DISAGREES
    assert "counted loads and stores are not the predicted ones" in " ".join(capsys.readouterr().out.split())


def test_demo_reports_a_kernel_that_raises(capsys, monkeypatch):
    module = importlib.import_module("rawflash.backends.numpy_tiled.rowwise_backward")

    def fails(*arguments, **keywords):
        raise rf.TileError("too large", needed=2, available=1)

    monkeypatch.setattr(module, "rowwise_backward", fails)
    assert main(SMALL) == common.DISAGREES
    out = capsys.readouterr().out
    assert "FAILED" in out and "numpy_tiled rowwise backward: failed: too large" in out


def test_demo_bad_input(capsys, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b"")
    refused(capsys, ["demo", str(empty)], "empty")
    refused(capsys, ["demo", str(tmp_path / "none.txt")], "none.txt", "No such file")
    refused(capsys, ["demo", str(tmp_path)], "directory")
    refused(capsys, [*SMALL, "--seed", "-1"], "--seed")
    refused(capsys, [*SMALL, "--heads", str(2**62)], "--heads", "--dim", "2**63 - 1 bytes")
    for flags in (["--tokens", "0"], ["--backends", "torch"], ["--heads", "x"]):
        assert main(["demo", *flags]) == common.BAD_INPUT
        assert flags[0] in capsys.readouterr().err


def test_no_arguments_are_the_demo(monkeypatch):
    seen = []
    monkeypatch.setattr(demo, "command", lambda options: seen.append(options.text) or 0)
    assert main([]) == 0 and seen == [None]
    monkeypatch.setattr(sys, "argv", ["rawflash"])
    assert main() == 0 and len(seen) == 2


def test_demo_on_a_gpu(capsys, gpus):
    assert main([*SMALL[:-1], "cupy_raw"]) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines() if line.startswith("cupy_raw ")]
    assert [row[1:4:2] for row in rows] == [[a, way] for a in ("fa1", "fa2") for way in ("fwd", "bwd")] * 2
    assert all(row[-1] == "ok" for row in rows[:4]) and all("-" in row for row in rows[4:])
    assert {(a, d) for a, d, _ in gpus.looked_up} == {(a, d) for a in ("fa1", "fa2") for d in DIRECTIONS}
    assert gpus.waits and max(map(len, out.splitlines())) <= 80
    out = " ".join(out.split())
    assert "227.0 KiB of cupy_raw" in out and "for cupy_raw the same of CuPy's" in out
    assert "until its results are there" in out and "compiling what is not cached" in err


def test_gpu_allocations_are_counted_at_their_peak(gpus):
    def allocate(n):
        MemoryHook.active[0].malloc_postprocess(device_id=0, size=n - 1, mem_size=n, mem_ptr=0, pmem_id=0)

    with places.Gpu().allocations() as most:
        allocate(512)
        allocate(1024)
        MemoryHook.active[0].free_postprocess(device_id=0, mem_size=1024, mem_ptr=0, pmem_id=0)
        allocate(512)
        assert most() == 1536
    assert not MemoryHook.active


def test_demo_without_a_compiler_does_not_run_the_backend(capsys, gpus):
    gpus.cupy.cuda.nvrtc.getVersion = lambda: (_ for _ in ()).throw(RuntimeError("no libnvrtc"))
    assert main([*SMALL[:-1], "numpy_tiled,cupy_raw"]) == common.DISAGREES
    assert "not run: cupy_raw: CUDA kernels need CuPy and NVRTC" in capsys.readouterr().out


@pytest.mark.slow
def test_demo_with_compiled_kernels(tmp_path):
    """The parts that only numba_cpu has: compiling in processes of their own, threads."""
    command = [sys.executable, "-m", "rawflash", "demo", "--tokens", "64", "--heads", "2", "--dim", "8"]
    done = subprocess.run([*command, "--backends", "numba_cpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("numba_cpu ")]
    kernels = [(algorithm, way) for algorithm in ("fa1", "fa2") for way in ("fwd", "bwd")]
    assert [(row[1], row[3]) for row in rows] == kernels * 2  # one line in each table
    assert "compiling, first time only" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


# ---- run


def test_run_forward(capsys, files, qkv):
    assert main(["run", files[0], "-o", files[1], "--causal", *TILED]) == 0
    with np.load(files[1]) as results:
        assert set(results.files) == {"out", "lse"}
        expected = reference(**qkv, causal=True)
        for name in results.files:
            assert error_ratio(name, results[name], expected) <= 1
    assert "out     float32 (1, 2, 24, 8)" in capsys.readouterr().out


def test_run_passes_every_option_on(files, qkv):
    flags = "--window 5,none --q-offset 2 --softcap 20 --dropout 0.25 --seed 3 --scale 0.5"
    flags += " --algorithm fa1 --deterministic"
    assert main(["run", files[0], "-o", files[1], *flags.split(), *TILED, "--sram", "4096"]) == 0
    options = dict(window=(5, None), q_offset=2, softcap=20.0, dropout=0.25, seed=3, scale=0.5)
    with np.load(files[1]) as results:
        assert error_ratio("out", results["out"], reference(**qkv, **options)) <= 1


def test_run_on_a_gpu(capsys, tmp_path, gpus, qkv, rng):
    dout = rng.standard_normal((1, 2, 24, 8)).astype(np.float32)
    side = dict(bias=rng.standard_normal((24, 24)).astype(np.float32), mask=rng.random((24, 24)) < 0.8)
    path = save(tmp_path / "in.npz", **qkv, **side, dout=dout)
    assert main(["run", path, "-o", str(tmp_path / "out.npz"), "--causal", "--backend", "cupy_raw", "--time"]) == 0
    assert gpus.looked_up == [("fa2", "forward", 0), ("fa2", "backward", 0)]
    wrt = ("q", "k", "v", "bias")
    expected = reference(**qkv, dout=dout, wrt=wrt, causal=True, **side)
    with np.load(tmp_path / "out.npz") as results:
        assert set(results.files) == {"out", "lse", *("d" + name for name in wrt)}
        for name in results.files:
            assert type(results[name]) is np.ndarray and error_ratio(name, results[name], expected) <= 1, name
    out = capsys.readouterr().out
    assert "computed by cupy_raw fa2 on NVIDIA Thing 0:" in out and "dbias   float32 (24, 24)" in out
    assert "best of up to 5 more runs: forward " in out and " ms, backward " in out and gpus.waits


def test_run_on_a_gpu_leaves_small_arrays_on_the_host(capsys, tmp_path, gpus, qkv):
    """So that their values are checked."""
    arguments = ["-o", str(tmp_path / "out.npz"), "--backend", "cupy_raw"]
    for change, words in (
        (dict(kv_lengths=np.array([25])), ["kv_lengths is [25]"]),
        (dict(q=np.zeros((1, 2, 24, 8), np.int32)), ["q has dtype int32"]),
        (dict(mask=np.zeros((24, 24), np.float32)), ["mask has dtype float32"]),
    ):
        refused(capsys, ["run", save(tmp_path / "in.npz", **qkv | change), *arguments], *words)
    gpus.cupy.asarray = lambda array: (_ for _ in ()).throw(ValueError("Unsupported dtype <U1"))
    refused(capsys, ["run", save(tmp_path / "in.npz", **qkv), *arguments], "q cannot go to the GPU", "Unsupported")
    assert os.listdir(tmp_path) == ["in.npz"]


def test_run_time_on_the_cpu(capsys, files):
    assert main(["run", files[0], "-o", files[1], "--time", *TILED]) == 0
    assert "more runs: forward " in capsys.readouterr().out.splitlines()[-1]


def test_run_without_memory(capsys, monkeypatch, files):
    def fails(*arguments):
        raise MemoryError("Unable to allocate 7 TiB")

    monkeypatch.setattr(run.api, "_forward", fails)
    refused(capsys, ["run", files[0], "-o", files[1], *TILED], "out of memory: Unable to allocate 7 TiB")
    assert not os.path.exists(files[1])


@pytest.mark.parametrize("algorithm", ["fa2", "standard"])
def test_run_needs_the_gpu_that_was_asked_for(capsys, no_gpu, files, algorithm):
    flags = ["--backend", "cupy_raw", "--algorithm", algorithm]
    why = "needs cupy, which is not installed" if algorithm == "fa2" else "has no algorithm 'standard'"
    refused(capsys, ["run", files[0], "-o", files[1], *flags], f"backend 'cupy_raw' {why}")
    assert not os.path.exists(files[1])


def test_run_gradients_and_array_options(tmp_path, qkv, rng):
    side = dict(
        bias=rng.standard_normal((24, 24)).astype(np.float32), sinks=np.ones(2, np.float32),
        mask=rng.random((24, 24)) < 0.8, alibi_slopes=np.array([0.5, 0.25]), kv_lengths=np.array([20]),
        q_lengths=np.array([22]), q_offset=np.array(1),
    )  # fmt: skip
    dout = rng.standard_normal((1, 2, 24, 8)).astype(np.float32)
    dlse = rng.standard_normal((1, 2, 24)).astype(np.float32)
    path = save(tmp_path / "in.npz", **qkv, **side, dout=dout, dlse=dlse)
    target = tmp_path / "gradients"  # the name is kept as it is
    assert main(["run", path, "--output", str(target), *TILED]) == 0
    side["q_offset"] = 1
    wrt = ("q", "k", "v", "bias", "sinks")
    expected = reference(**qkv, dout=dout, dlse=dlse, wrt=wrt, **side)
    with np.load(target) as results:
        assert set(results.files) == {"out", "lse", *("d" + name for name in wrt)}
        for name in results.files:
            assert error_ratio(name, results[name], expected) <= 1, name


def test_run_varlen(tmp_path, rng):
    q, k, v = rng.standard_normal((3, 2, 24, 8)).astype(np.float32)
    cu = np.array([0, 10, 24])
    path = save(tmp_path / "in.npz", q=q, k=k, v=v, dout=q, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert main(["run", path, "-o", str(tmp_path / "out.npz"), "--causal", *TILED]) == 0
    expected = reference(q, k, v, q, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    with np.load(tmp_path / "out.npz") as results:
        for name in ("out", "lse", "dq", "dk", "dv"):
            assert error_ratio(name, results[name], expected) <= 1


def test_run_layout_and_dtypes(tmp_path, rng):
    for dtype in (np.float16, np.float64):
        q, k, v = rng.standard_normal((3, 1, 24, 2, 8)).astype(dtype)
        path = save(tmp_path / "in.npz", q=q, k=k, v=v)
        arguments = ["run", path, "-o", str(tmp_path / "out.npz"), "--force", "--layout", "bthd", *TILED]
        assert main(arguments) == 0
        with np.load(tmp_path / "out.npz") as results:
            assert results["out"].dtype == dtype and results["out"].shape == q.shape
            assert error_ratio("out", results["out"], reference(q, k, v, layout="bthd")) <= 1


def test_run_does_not_overwrite(capsys, files):
    arguments = ["run", files[0], "-o", files[1], *TILED]
    with open(files[1], "wb") as file:
        file.write(b"precious")
    refused(capsys, arguments, "out.npz", "--force")
    with open(files[1], "rb") as file:
        assert file.read() == b"precious"
    assert main([*arguments, "--force"]) == 0
    with np.load(files[1]) as results:
        assert "out" in results.files


def test_run_may_replace_its_own_input_by_force(files, qkv):
    assert main(["run", files[0], "-o", files[0], "--force", *TILED]) == 0
    with np.load(files[0]) as results:
        assert error_ratio("out", results["out"], reference(**qkv)) <= 1


@pytest.mark.parametrize("stop", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("existing", [None, b"old"])
def test_run_writes_whole_files_or_none(capsys, monkeypatch, files, tmp_path, stop, existing):
    if existing is not None:
        (tmp_path / "out.npz").write_bytes(existing)
    before = sorted(os.listdir(tmp_path))

    def half(file, **arrays):
        file.write(b"PK half a file")
        raise stop

    monkeypatch.setattr(np, "savez", half)
    code = main(["run", files[0], "-o", files[1], "--force", *TILED])
    assert code == (common.BAD_INPUT if isinstance(stop, OSError) else common.INTERRUPTED)
    assert sorted(os.listdir(tmp_path)) == before
    if existing is not None:
        assert (tmp_path / "out.npz").read_bytes() == existing
    assert "Traceback" not in capsys.readouterr().err


def test_run_output_that_appears_meanwhile_is_kept(capsys, monkeypatch, files, tmp_path):
    savez = np.savez

    def slow(file, **arrays):
        savez(file, **arrays)
        (tmp_path / "out.npz").write_bytes(b"other")

    monkeypatch.setattr(np, "savez", slow)
    refused(capsys, ["run", files[0], "-o", files[1], *TILED], "--force")
    assert (tmp_path / "out.npz").read_bytes() == b"other"
    assert sorted(os.listdir(tmp_path)) == ["in.npz", "out.npz"]


@pytest.mark.skipif(os.name != "posix", reason="file modes and links are POSIX's")
def test_run_output_is_an_ordinary_file(files, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.npz").symlink_to(tmp_path / "sub" / "real.npz")
    assert main(["run", files[0], "-o", str(tmp_path / "sub" / "real.npz"), *TILED]) == 0
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "sub" / "real.npz").stat().st_mode & 0o777 == 0o666 & ~mask
    assert main(["run", files[0], "-o", str(tmp_path / "link.npz"), "--force", *TILED]) == 0
    assert (tmp_path / "link.npz").is_symlink()  # the file it points to was replaced


def test_run_refuses_targets_that_are_no_files(capsys, files, tmp_path):
    refused(capsys, ["run", files[0], "-o", str(tmp_path), "--force"], "not a regular file")
    refused(capsys, ["run", files[0], "-o", str(tmp_path / "no" / "out.npz")], "no such folder")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(q=None), ["no array 'q'"]),
        (dict(quarry=np.zeros(3)), ["unknown array 'quarry'"]),
        (dict(biases=np.zeros(3)), ["did you mean 'bias'?"]),
        (dict(k=np.zeros((1, 2, 24, 9), np.float32)), ["k has shape (1, 2, 24, 9)", "to match q"]),
        (dict(k=np.zeros((1, 2, 24, 8))), ["k has dtype float64"]),
        (dict(q=np.zeros((1, 2, 24, 8), np.int32)), ["q", "int32"]),
        (dict(q=np.zeros((1, 2, 24, 8), "V2")), ["bfloat16", "float32"]),
        (dict(q=np.array(["text"])), ["q"]),
        (dict(q=np.array([{}], dtype=object)), ["allow_pickle"]),
        (dict(mask=np.zeros((24, 24), np.float32)), ["mask"]),
        (dict(q_lengths=np.array([25])), ["q_lengths"]),
        (dict(dlse=np.zeros((1, 2, 24), np.float32)), ["dlse", "dout"]),
        (dict(dout=np.zeros((1, 2, 23, 8), np.float32)), ["dout has shape"]),
        (dict(cu_seqlens_q=np.array([0, 24])), ["cu_seqlens"]),
    ],
)
def test_run_bad_arrays(capsys, tmp_path, qkv, change, words):
    given = {name: array for name, array in (qkv | change).items() if array is not None}
    arguments = ["run", save(tmp_path / "in.npz", **given), "-o", str(tmp_path / "out.npz"), *TILED]
    refused(capsys, arguments, *words)
    assert os.listdir(tmp_path) == ["in.npz"]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--dropout", "1.5"], "dropout"),
        (["--softcap", "-1"], "softcap"),
        (["--seed", "-1"], "seed"),
        (["--scale", "nan"], "scale"),
        (["--window=-1,0"], "window"),
        (["--sram", "16"], "sram"),
        (["--backend", "numba_cpu", "--algorithm", "standard"], "numpy_tiled has it"),
    ],
)
def test_run_bad_options(capsys, files, flags, word):
    refused(capsys, ["run", files[0], "-o", files[1], *flags], word)
    assert not os.path.exists(files[1])


@pytest.mark.parametrize("flags", ["--window 3", "--window a,b", "--layout bdht", "--sram 64K", "--x"])
def test_run_flags_that_cannot_be_read(capsys, files, flags):
    assert main(["run", files[0], "-o", files[1], *flags.split()]) == common.BAD_INPUT
    assert "usage:" in capsys.readouterr().err


def test_run_files_that_are_no_npz(capsys, tmp_path, qkv):
    target = str(tmp_path / "out.npz")
    text, single, broken = tmp_path / "text.npz", tmp_path / "one.npy", tmp_path / "broken.npz"
    text.write_text("hello")
    np.save(single, np.zeros(3))
    save(broken, **qkv)
    broken.write_bytes(broken.read_bytes()[:-30])
    for path in (text, single, broken):
        refused(capsys, ["run", str(path), "-o", target], "not an .npz file")
    refused(capsys, ["run", str(tmp_path / "none.npz"), "-o", target], "no such file")
    whole = save(tmp_path / "bits.npz", **qkv)
    data = bytearray((tmp_path / "bits.npz").read_bytes())
    data[200] ^= 0xFF  # inside the first array: its checksum fails
    (tmp_path / "bits.npz").write_bytes(data)
    refused(capsys, ["run", whole, "-o", target, *TILED], "bits.npz")


def compressed(path, qkv):
    np.savez_compressed(path, **qkv)
    return bytearray(path.read_bytes())


def flipped(path, qkv):
    data = compressed(path, qkv)
    data[60] ^= 0xFF  # among the compressed numbers
    path.write_bytes(data)


def in_every_header(path, qkv, at, change):
    """Change a byte of the archive's first member, where the member and the table of contents describe it."""
    data = compressed(path, qkv)
    for place in (at, data.index(b"PK\1\2") + at + 2):
        data[place] = change(data[place])
    path.write_bytes(data)


def encrypted(path, qkv):
    in_every_header(path, qkv, 6, lambda flags: flags | 1)


def of_a_method_of_tomorrow(path, qkv):
    in_every_header(path, qkv, 8, lambda method: 99)


def member(path, text):
    """An archive whose q is this header and no numbers."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("q.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)


def unclosed(path, qkv):
    member(path, b"{'descr':'<f4','fortran_order':False,'shape':(1,8)")


def too_long(path, qkv):
    member(path, b"{'descr':'<f4','fortran_order':False,'shape':(1,8)}" + b" " * 20_000)


def deep(path, qkv):
    member(path, b"{'descr':'<f4','fortran_order':False,'shape':(" + b"-" * 5000 + b"8,)}")


def without_numbers(path, qkv):
    member(path, b"{'descr':'<f4','fortran_order':False,'shape':(1,8)}")


DAMAGES = (flipped, encrypted, of_a_method_of_tomorrow, unclosed, too_long, deep, without_numbers)


@pytest.mark.parametrize("damage", DAMAGES, ids=[damage.__name__ for damage in DAMAGES])
def test_run_damaged_archives(capsys, tmp_path, qkv, damage):
    path = tmp_path / "in.npz"
    damage(path, qkv)
    refused(capsys, ["run", str(path), "-o", str(tmp_path / "out.npz"), *TILED], f"{path}: not a readable .npz file: ")
    assert os.listdir(tmp_path) == ["in.npz"]


def test_run_any_damage_is_bad_input(tmp_path, rng):
    """Whatever byte is wrong, an archive is read or refused in words."""
    path = tmp_path / "in.npz"
    for save_as in (np.savez, np.savez_compressed):
        save_as(path, **{name: rng.standard_normal((2, 3)).astype(np.float32) for name in "qkv"})
        whole = path.read_bytes()
        refusals = 0
        for place in rng.choice(len(whole), 150, replace=False):
            data = bytearray(whole)
            data[place] ^= 1 << int(rng.integers(8))
            path.write_bytes(data)
            try:
                run._read_arrays(path)
            except common.InputError as error:
                refusals += 1
                assert str(path) in str(error) and "\n" not in str(error)
            except MemoryError:  # a shape that was made larger; it says how much
                pass
        assert refusals > 20


def test_run_an_archive_that_the_system_cannot_read(capsys, monkeypatch, files):
    def fails(*arguments, **options):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(np, "load", fails)
    refused(capsys, ["run", files[0], "-o", files[1]], f"{files[0]}: Input/output error")


def test_run_q_offset_in_one_place(capsys, tmp_path, qkv):
    path = save(tmp_path / "in.npz", **qkv, q_offset=np.array(3))
    refused(capsys, ["run", path, "-o", str(tmp_path / "out.npz"), "--q-offset", "3"], "q_offset")


# ---- explain and info


@pytest.mark.parametrize("arch", ["cpu", *hardware.CHIPS])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_explain_every_arch(capsys, arch, direction):
    flags = ["--arch", arch, "--direction", direction, "--dtype", "bfloat16", "--causal"]
    assert main(["explain", "--shape", "2,8,2,512,1024,64", *flags]) == 0
    out = capsys.readouterr().out
    assert f"fa2_{direction}" in out and f"tiles for {arch}, M = " in out
    assert "Hq = 8, Hkv = 2, Tq = 512, Tk = 1024, d = 64, dv = 64" in " ".join(out.split())
    assert "bfloat16" in out and "causal" in out and "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_explain_options(capsys):
    flags = "--dv 32 --window 64,none --q-offset 3 --layout bthd --algorithm rowwise --sram 65536 --softcap 9"
    assert main(["explain", "--shape", "1,2,2,256,512,64", *flags.split()]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "numpy_tiled.rowwise_forward",
        "dv = 32",
        "window = (64, None)",
        "layout = bthd",
        "sram = 65536",
    ):
        assert words in out
    assert main(["explain", "--shape", "1,2,2,64,64,8", "--arch", "sm_90", "--backend", "numba_cuda"]) == 0
    assert "numba_cuda.fa2_forward" in capsys.readouterr().out
    assert main(["explain", "--shape", "0,2,2,0,0,8"]) == 0


def test_explain_plans_the_kernels_of_cupy_raw(capsys, gpus):
    """A chip by name is planned for as that chip would be if it were here, for a grid that fills it."""
    shape = ["explain", "--shape", "8,64,64,4096,4096,64"]
    for row in hardware.CHIPS.values():
        gpus.seen[0] = row.name.removeprefix("sm_"), row.on_chip_bytes
        hardware._gpu.cache_clear()
        here = hardware.chip_of("cupy_raw")
        assert hardware.kernels_on("cupy_raw", row) == dataclasses.replace(here, processors=None)
        assert main([*shape, "--arch", row.name]) == 0
        by_name = capsys.readouterr().out
        assert main([*shape, "--backend", "cupy_raw"]) == 0  # the device that is here
        assert capsys.readouterr().out == by_name and f"tiles for {row.name}, M = " in by_name
        assert "runs here" in by_name


def test_explain_a_huge_shape_takes_no_memory(capsys):
    shape = "64,128,8,1000000,1000000,128"
    assert main(["explain", "--shape", shape, "--arch", "sm_90", "--dtype", "float16"]) == 0
    assert "TiB" in capsys.readouterr().out


def test_explain_names_the_kernel_of_an_architecture(capsys):
    """Its stand-ins for arrays, of one row's memory, do not keep the warpgroups' kernel of sm_90 away."""
    for d, direction in ((128, "forward"), (64, "backward")):
        shape = ["explain", "--shape", f"2,16,16,4096,4096,{d}", "--direction", direction, "--dtype", "bfloat16"]
        assert main([*shape, "--arch", "sm_90"]) == 0
        of_hopper = capsys.readouterr().out
        assert main([*shape, "--arch", "sm_80"]) == 0
        assert "warpgroup" in of_hopper and "warpgroup" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        ["--arch", "sm_90", "--causal"],
        ["--arch", "sm_90", "--direction", "backward", "--window", "9,5", "--q-offset", "3"],
        [*TILED, "--causal", "--algorithm", "standard"],
        ["--direction", "backward", "--deterministic", "--layout", "bthd"],
    ],
)
def test_explain_a_large_batch_is_counted_once(capsys, flags):
    """B times the traffic of one sequence, at once and without memory for each."""
    batch, out = 10**9, {}
    for size in (1, batch):
        assert main(["explain", "--shape", f"{size},8,8,64,64,64", *flags]) == 0
        out[size] = capsys.readouterr().out
    rows = {size: re.findall(r"^(\w+) +(\d+) +(\d+)$", text, re.MULTILINE) for size, text in out.items()}
    assert len(rows[1]) > 4
    assert rows[batch] == [(name, *(str(int(n) * batch) for n in counts)) for name, *counts in rows[1]]
    assert f"B = {batch}" in out[batch]


def test_explain_long_sequences_are_not_walked_through(capsys):
    """Every number is exact, past 64 bits too."""
    T = 10**16
    assert main(["explain", "--shape", f"1,2,2,{T},{T},4", "--arch", "sm_90", "--causal"]) == 0
    out = capsys.readouterr().out
    loads = {name: int(n) for name, n in re.findall(r"^(\w+) +(\d+) +0$", out, re.MULTILINE)}
    (br, bc) = map(int, *re.findall(r"^Br = (\d+), Bc = (\d+)", out, re.MULTILINE))
    assert T % br == br % bc == 0
    assert loads["Q"] == 2 * T * 4
    assert loads["K"] == loads["V"] == 2 * 4 * br * (T // br) * (T // br + 1) // 2  # block t sees (t + 1) br keys


@pytest.mark.parametrize(
    ("shape", "flags", "array"),
    [
        ("1,1,1,4611686018427387904,4,64", [], "q"),
        ("1,1,1,4,4611686018427387904,64", [], "k"),
        ("1,1,1,9223372036854775808,1,1", [], "q"),
        ("9223372036854775808,1,1,1,1,1", ["--arch", "sm_90", "--causal"], "q"),
        ("0,1,1,9223372036854775808,1,1", [], "q"),
        (f"1,1,1,1,1,{10**1000}", [], "q"),
        ("1,1,1,4,1000000000,1", ["--dv", "4000000000"], "v"),
        ("1,1,1,1000000000,4,1", ["--dv", "4000000000"], "out"),
    ],
)
def test_explain_sizes_that_no_array_has(capsys, shape, flags, array):
    refused(capsys, ["explain", "--shape", shape, *flags], "--shape", f": {array} ", "2**63 - 1 bytes")


def test_explain_needs_a_gpu_or_a_name(capsys, no_gpu):
    refused(capsys, ["explain", "--shape", "1,1,1,64,64,64", "--backend", "cupy_raw"], "no device here", "sm_90")


def test_explain_bad_input(capsys):
    shape = ["explain", "--shape"]
    refused(capsys, [*shape, "1,8,3,64,64,64"], "8 heads", "3")
    refused(capsys, [*shape, "1,8,8,64,64,0"], "head dimension of 0")
    refused(capsys, [*shape, "1,1,1,64,64,64", "--arch", "sm_90", "--sram", "100"], "no legal tiles", "100")
    refused(capsys, [*shape, "1,1,1,64,64,64", "--arch", "sm_90", *TILED], "numpy_tiled", "sm_90")
    refused(capsys, [*shape, "1,1,1,64,64,64", "--arch", "cpu", "--backend", "cupy_raw"], "cupy_raw", "cpu")
    for arguments in (["1,2,3"], ["a,b,c,d,e,f"], ["1,1,1,1,1,-1"], ["1,1,1,1,1,1", "--arch", "sm_99"]):
        assert main([*shape, *arguments]) == common.BAD_INPUT
        assert "usage:" in capsys.readouterr().err
    assert main(["explain"]) == common.BAD_INPUT


def test_info(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert rf.__version__ in out and np.__version__ in out
    for backend in ("numba_cpu", "numpy_tiled", "cupy_raw", "numba_cuda"):
        assert backend in out
    assert re.search(r"[KM]iB a core", " ".join(out.split()))
    assert "threads" in out and "kept in" in out and "does not load" in out


def test_info_compiles_when_asked(capsys, monkeypatch):
    monkeypatch.setattr(compiling, "compile_all", lambda: 7)
    assert main(["info"]) == 0 and "compiled 7" not in capsys.readouterr().out
    assert main(["info", "--compile"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("numba_cpu    compiled 7 kernels in 0 s\n") and "backends" in out
    monkeypatch.setattr(compiling, "compile_all", lambda: 0)
    assert main(["info", "--compile"]) == 0 and capsys.readouterr().out.startswith("numba_cpu    all in the cache\n")
    monkeypatch.setattr(info, "why_not_loaded", lambda name: lambda algorithm: "no numba here")
    assert main(["info", "--compile"]) != 0 and "no numba here" in capsys.readouterr().err


def test_compiled_kernels_are_loaded_by_later_processes():
    """All of them: what a kernel closes over must be the same in every process, or none ever finds it."""
    code = (
        "from rawflash.cli.compiling import compile_all; made = compile_all(); "
        "from rawflash.backends.numba_cpu.launch import KERNELS; "
        "print(made, len(KERNELS), [name for name, kernel in KERNELS.items() if not kernel.signatures])"
    )
    command = [sys.executable, "-c", code]
    said = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(" ", 2) for _ in range(2)]
    assert int(said[1][1]) > 20 and said[0][2].strip() == said[1][2].strip() == "[]"
    assert int(said[1][0]) == 0, f"compiled again: {said[1][0]} kernels"


def test_info_on_gpus(capsys, monkeypatch, tmp_path, gpus):
    monkeypatch.setenv("RAWFLASH_CACHE_DIR", str(tmp_path))
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    text = " ".join(" ".join(lines).split())
    assert all(len(line) <= 80 or os.sep in line for line in lines)  # a path is not broken
    for words in (
        "GPU 0: NVIDIA Thing 0, sm_90, 227.0 KiB on chip a block, 100 multiprocessors",
        "GPU 1: NVIDIA Thing 1, the GPU is sm_60; expected sm_75 or newer",
        "GPU 2: NVIDIA Thing 2, sm_121, 99.0 KiB on chip a block, 102 multiprocessors",
        "CUDA driver for CUDA 13.2, NVRTC 13.1",
        "cupy_raw loads: fa1, fa2; M = 227.0 KiB a block of threads on sm_90",
        f"cupy_raw kept in {tmp_path} (RAWFLASH_CACHE_DIR moves it)",
    ):
        assert words in text, words


def test_info_without_a_compiler(capsys, gpus):
    gpus.cupy.cuda.nvrtc.getVersion = lambda: (_ for _ in ()).throw(RuntimeError("no libnvrtc"))
    gpus.cupy.cuda.runtime.driverGetVersion = lambda: 0
    assert main(["info"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "CUDA no driver, no NVRTC: CUDA kernels need CuPy and NVRTC" in text
    assert "cupy_raw does not load: CUDA kernels need CuPy and NVRTC" in text and "no libnvrtc" in text


def test_info_without_cupy(capsys, monkeypatch, no_gpu):
    monkeypatch.setattr(info, "gpu_names", lambda: ["NVIDIA Thing"])
    monkeypatch.delenv("RAWFLASH_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert main(["info"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "GPU none: CuPy cannot be imported" in text and "; the driver lists NVIDIA Thing " in text
    assert "cupy_raw does not load: needs cupy, which is not installed" in text
    assert "CUDA " not in text.partition("backends")[0]
    assert "cupy_raw not kept: there is no home folder (RAWFLASH_CACHE_DIR names one)" in text


BROKEN_CUPY = {"import": "raise ImportError('no libcuda')", "own": "raise AttributeError('torn')", "empty": "cuda = 0"}


@pytest.mark.parametrize("text", BROKEN_CUPY.values(), ids=BROKEN_CUPY)
def test_info_with_a_broken_cupy(tmp_path, text):
    (tmp_path / "cupy.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), os.path.dirname(os.path.dirname(rf.__file__))])
    command = [sys.executable, "-m", "rawflash", "info"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0 and "Traceback" not in done.stderr
    for words in ("GPU          none: CuPy cannot ", "cupy_raw     does not load: has no device here: CuPy "):
        assert words in done.stdout


def test_info_without_numba(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in [name for name in sys.modules if name.startswith("rawflash.backends.numba_cpu.")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "does not load: needs numba, which is not installed; pip install numba" in " ".join(out.split())


# ---- the whole program


def test_help_and_version(capsys):
    assert main(["--version"]) == 0
    assert rf.__version__ in capsys.readouterr().out
    for command in ([], ["demo"], ["run"], ["explain"], ["info"]):
        assert main([*command, "--help"]) == 0
        assert "usage: rawflash" in capsys.readouterr().out
    assert main(["bogus"]) == common.BAD_INPUT


def test_importing_the_command_line_is_light():
    code = "import sys, rawflash.cli; assert not {'rich', 'numba', 'cupy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["info"], 0),
        (SMALL, 0),
        (["explain", "--shape", "1,1,1,64,64,8"], 0),
        (["explain", "--shape", "1,8,3,64,64,8"], common.BAD_INPUT),
        (["bogus"], common.BAD_INPUT),
        (["--help"], 0),
    ],
)
def test_a_closed_stream_changes_nothing_else(capsys, monkeypatch, stream, arguments, code):
    """What Python makes of ``>&-`` and ``2>&-`` is None."""
    assert main(arguments) == code
    whole = capsys.readouterr()
    with monkeypatch.context() as closed:
        closed.setattr(sys, stream, None)
        assert main(arguments) == code
        assert getattr(sys, stream) is None
    rest = capsys.readouterr()
    for name in ("out", "err"):
        written = getattr(rest, name)
        assert bool(written) == (stream != f"std{name}" and bool(getattr(whole, name))), written


@pytest.mark.skipif(os.name != "posix", reason="a POSIX shell closes them")
def test_closed_streams_of_a_process(files):
    command = ["run", files[0], "-o", files[1], *TILED]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-m", "rawflash", *command], capture_output=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    with np.load(files[1]) as results:
        assert set(results.files) == {"out", "lse"}


WITH_COMPILERS = """
import time
from rawflash.cli.compiling import compiling_ahead
with compiling_ahead(["fa1"], 8) as processes:
    print(*(process.pid for process in processes), flush=True)
    time.sleep(60)
"""


def running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads Linux's /proc")
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_compilers_go_with_their_parent(tmp_path, end):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}  # empty: there is much to compile
    command = [sys.executable, "-c", WITH_COMPILERS]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        time.sleep(2)
        assert len(pids) == 2 and all(map(running, pids))
    finally:
        parent.send_signal(end)
        parent.communicate()
    give_up = time.monotonic() + 10
    while any(map(running, pids)) and time.monotonic() < give_up:
        time.sleep(0.05)
    left = [pid for pid in pids if running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.mark.skipif(os.name != "posix", reason="signals and pipes are POSIX's")
def test_a_reader_that_goes_away_and_ctrl_c_end_quietly():
    command = [sys.executable, "-m", "rawflash"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*command, "explain", "--shape", "1,1,1,64,64,8"], stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert done.returncode == common.BROKEN_PIPE and done.stderr == b""

    demo = subprocess.Popen(
        [*command, "demo", "--tokens", "512", "--backends", "numpy_tiled"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # a shell's background job starts with SIGINT ignored, and its children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert demo.stderr.readline().startswith("[1/")  # it works by now
    time.sleep(0.2)
    demo.send_signal(signal.SIGINT)
    out, err = demo.communicate(timeout=60)
    assert demo.returncode == common.INTERRUPTED and "Traceback" not in out + err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")
def test_bad_input_where_nothing_can_be_said(tmp_path):
    """The exit status says it."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "rawflash", "run", str(tmp_path / "nobody.npz"), "-o", str(tmp_path / "x.npz")]
        assert subprocess.run(command, stderr=full).returncode == 2


def test_an_input_that_is_a_folder(capsys, tmp_path):
    assert main(["run", str(tmp_path), "-o", str(tmp_path / "x.npz")]) == 2
    assert "is no file" in capsys.readouterr().err
