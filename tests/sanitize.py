"""Run every kernel of cupy_raw under compute-sanitizer, on a GPU, and put what it finds on record.

    python tests/sanitize.py                            # memcheck, racecheck, synccheck, initcheck
    python tests/sanitize.py --tools memcheck racecheck

A run of all tests would take hours: a sanitized kernel is 10 to 100 times slower. Here are small calls instead that
reach every branch of the kernels (:func:`cases`), forward and backward, by both algorithms. Their results are
compared with numpy_tiled, loosely: a tool must not call clean what did not run. First they run without a tool, which
leaves the compiled kernels in the disk cache. The calls are shared out to processes.

CuPy's memory pool would hide overruns, since they end in other memory of the pool: each array here is an allocation
of its own, with a margin behind it.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import gpu_record
import numpy as np
from gpu import ALGORITHMS, on_gpu, to_host
from test_forward import half_visible, make, normal

from rawflash import masks as M
from rawflash.backends.cupy_raw import compile as compiler

# Failures of CUDA's functions are exceptions in CuPy; what memcheck would report beside them are CuPy's questions.
TOOLS = {
    "memcheck": ("--padding", "256", "--report-api-errors", "no"),
    "racecheck": (),
    "synccheck": (),
    "initcheck": (),
}
COMMON = ("--target-processes", "all", "--launch-timeout", "60", "--print-limit", "20")
LIMIT = 120  # seconds of one tool
SHARES = max(1, min(8, (os.cpu_count() or 1) // 2))  # processes at a time
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
RAN = "kernels that ran: "
KERNEL = re.compile(r"__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(")
# Largest difference from numpy_tiled in the same dtype, as part of the largest number of the result
LOOSE = {"float16": 2e-2, "bfloat16": 1e-1, "float32": 1e-4, "float64": 1e-10}


# ---- in a process under a tool -----------------------------------------------------------------------------


def cases():
    """Calls that reach every branch: name -> a `Case` with arrays on the host."""
    Tq, Tk = 33, 47
    odd = dict(Tq=Tq, Tk=Tk, d=20)
    tall = dict(B=1, Hq=4, Hkv=2, Tq=200, Tk=230, d=64)  # several tiles each way
    mask = M.Segments(np.arange(Tq) // 10, np.arange(Tk) // 10) | M.PrefixLM(9) & M.Dense(
        np.random.default_rng(1).random((2, 1, Tq, Tk)) < 0.5
    )
    everything = odd | dict(
        Hq=4, Hkv=2, causal=True, window=(30, None), q_lengths=[Tq, 20], kv_lengths=[Tk, 30], mask=mask,
        bias=normal(4, Tq, Tk), alibi_slopes=np.full(4, 0.02), softcap=8.0, sinks=normal(4), dropout=0.2,
    )  # fmt: skip
    calls = {
        "plain": odd,
        "odd dimensions": dict(Tq=Tq, Tk=Tk, d=7, dv=11),
        "causal, grouped heads": dict(Hq=4, Hkv=2, Tq=Tq, Tk=Tk, d=64, causal=True),
        "rows without keys": dict(Tq=Tk, Tk=Tq, d=20, causal=True),
        "tall": tall,
        "tall, causal": tall | dict(causal=True),
        "tall, window, deterministic": tall | dict(window=(70, 20), deterministic=True),
        "lengths": dict(B=3, **odd, causal=True, q_lengths=[Tq, 5, 0], kv_lengths=[Tk, 0, 30]),
        "offsets": odd | dict(causal=True, q_offset=np.array([-3, 4])),
        "bias": odd | dict(bias=normal(2, 2, Tq, Tk)),
        "bias by row": odd | dict(bias=normal(2, Tq, 1)),
        "bias by key": odd | dict(bias=normal(2, 1, 1, Tk)),
        "bias, one number": odd | dict(bias=normal(1, 1)),
        "sinks, padding": dict(B=3, **odd, q_lengths=[0, Tq, 5], kv_lengths=[7, 0, 0], sinks=normal(2)),
        "alibi by batch": odd | dict(alibi_slopes=np.array([[0.5, 0.01], [0.0, 1.0]])),
        "dropout, softcap": odd | dict(dropout=0.3, seed=2**64 - 1, softcap=5.0),
        "mask": odd | dict(mask=half_visible(2, 2, Tq, Tk)),
        "everything, deterministic": everything | dict(deterministic=True),
        "nothing": dict(Tq=Tq, Tk=0, d=20),
    }
    for dtype in LOOSE:
        calls[f"{dtype}, everything"] = everything | dict(dtype=dtype)
        calls[f"{dtype}, tall"] = tall | dict(dtype=dtype, causal=True)
        calls[f"{dtype}, tall, deterministic"] = tall | dict(dtype=dtype, d=72, deterministic=True)
    made = {name: make(**call) for name, call in calls.items()}
    starts = np.array([0, 13, 13, 31], np.int32), np.array([2, 20, 30, Tk], np.int32)  # rows of no sequence, too
    for dtype in ("float32", "float16"):
        packed = make(lead=(), Hq=4, Hkv=2, **odd, dtype=dtype, causal=True, sinks=normal(4))
        made[f"{dtype}, packed"] = replace(packed, cu_seqlens=starts)
    return made


def compare(name, dtype, got, want):
    """Loosely: rounding is what the tests look at, on a GPU and without a tool."""
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    finite = np.isfinite(want)
    assert (np.isfinite(got) == finite).all(), f"{name}: other numbers are finite"
    most = np.abs(want[finite]).max(initial=1.0)
    error = np.abs(got - want, where=finite, out=np.zeros(want.shape)).max(initial=0.0)
    assert error <= LOOSE[dtype] * most, f"{name}: differs by {error:.2e}, of numbers up to {most:.2e}"


def check(case):
    """Run a call on the GPU every way there is, and compare."""
    dtype, names = case.q.dtype.name, ["out", "lse", *("d" + name for name in case.wrt)]
    out, lse = case.forward(backend="numpy_tiled")
    want = [out, lse, *case.backward(out, lse, backend="numpy_tiled")]
    for algorithm in ALGORITHMS:
        for small_on_device in (False, True):
            gpu = on_gpu(case, small_on_device=small_on_device)
            out, lse = gpu.forward(algorithm=algorithm)
            got = [out, lse, *gpu.backward(out, lse, algorithm=algorithm)]
            for name, a, b in zip(names, got, want, strict=True):
                compare(f"{algorithm}, {name}", dtype, to_host(a), b)


class Noting:
    """A loaded module that notes which of its kernels are launched."""

    def __init__(self, module, file, ran):
        self.module, self.file, self.ran = module, file, ran

    def get_function(self, name):
        function = self.module.get_function(name)

        def launch(*arguments):
            self.ran.add(f"{self.file} {name}")
            return function(*arguments)

        launch.ptr = function.ptr
        return launch


def child(share, shares):
    """Run one share of the calls; the last line tells the kernels that ran."""
    import cupy

    cupy.cuda.runtime.free(0)  # the tool waits for the first call of CUDA, not for ever
    cupy.cuda.set_allocator(None)
    load, ran = compiler.load, set()

    def noting(text, *arguments):
        (file,) = re.findall(r'^#line 1 "(.*\.cu)"$', text, re.MULTILINE)
        return Noting(load(text, *arguments), file, ran)

    compiler.load = noting
    for name, case in list(cases().items())[share::shares]:
        print(name, flush=True)
        check(case)
    cupy.cuda.runtime.deviceSynchronize()
    print(RAN + json.dumps(sorted(ran)))


# ---- tools -------------------------------------------------------------------------------------------------


def sanitizer():
    """Where compute-sanitizer is, and its version."""
    found = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))
    if found is None:
        sys.exit("compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin; it comes with the CUDA toolkit")
    told = subprocess.run([found, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    return found, re.search(r"[Vv]ersion (\S+)", told)[1]


def run(command, limit):
    """Exit status (None: it took too long) and output of a command, which is ended with all that it started."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
    return process.returncode, output


def shared(prefix, limit):
    """Run all calls, each process under ``prefix``: exit statuses and outputs."""
    commands = [[*prefix, sys.executable, __file__, "--child", str(n), str(SHARES)] for n in range(SHARES)]
    with ThreadPoolExecutor(SHARES) as pool:
        return list(pool.map(lambda command: run(command, limit), commands))


def outcome(name, results, tool=True):
    """Errors that a tool told (None: it did not finish) and the kernels that ran; shows what went wrong."""
    errors, kernels = [], set()
    for status, output in results:
        ran = re.search(f"^{RAN}(.*)$", output, re.MULTILINE)
        told = [int(one or other) for one, other in SUMMARY.findall(output)]
        done = status == 0 and ran is not None and bool(told) == tool
        errors.append(sum(told) if done else None)
        if done:
            kernels |= set(json.loads(ran[1]))
        if not done or any(told):
            why = "errors" if done else f"took more than {LIMIT} s" if status is None else f"ended with {status}"
            print(f"---- {name}: {why}", output[-6000:], sep="\n")
    return None if None in errors else sum(errors), sorted(kernels)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--child", nargs=2, type=int, metavar=("SHARE", "SHARES"), help="run calls, without a tool")
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    path, version = sanitizer()
    errors, kernels = outcome("without a tool", shared([], None), tool=False)
    if errors is None:
        sys.exit("the calls fail without a tool")
    names = {name for file in compiler.CUDA.rglob("*.cu*") for name in KERNEL.findall(file.read_text())}
    print(f"{len(kernels)} kernels; not run: {', '.join(names - {kernel.split()[1] for kernel in kernels}) or 'none'}")
    found = {}
    for tool in arguments.tools:
        start = time.monotonic()
        errors, kernels = outcome(tool, shared([path, "--tool", tool, *COMMON, *TOOLS[tool]], LIMIT))
        print(f"{tool}: ERROR SUMMARY: {errors} errors, {time.monotonic() - start:.0f} s", flush=True)
        if errors is not None:
            found[tool] = {"errors": errors, "kernels": kernels}
    record, digest = gpu_record.read(), gpu_record.digest()
    before = record.get("sanitizer", {})
    kept = {tool: before[tool] for tool in TOOLS if tool in before and tool not in arguments.tools}
    if before.get("kernels_sha256") != digest:
        kept = {}
    about = {"date": datetime.date.today().isoformat(), "version": version, "kernels_sha256": digest}
    gpu_record.write(record | {"sanitizer": about | kept | found})
    if len(found) < len(arguments.tools) or any(entry["errors"] for entry in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
