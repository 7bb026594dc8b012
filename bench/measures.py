"""What is asked of a case, one function for each: time, memory, sweep, start and overhead.

Each returns what a row says of every runner: figures, or under ``why_not`` why it does not take the case, or under
``failed`` what went wrong. Results are compared with a dense reference before any timing counts.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bench import inputs, timing
from bench.cases import Case
from bench.peers import PEERS, Ours, Runner
from bench.record import ROOT

Figures = dict[str, dict[str, Any]]
TEXT = 600  # characters of a reason
GPU_SRAM = tuple(n << 10 for n in (24, 32, 48, 64, 96, 128, 160, 192, 227))  # M of a sweep, bytes
CPU_SRAM = tuple(2**n for n in range(16, 21))


class DeviceLost(RuntimeError):
    """The GPU does not answer any more: nothing else can be measured in this process."""

    def __init__(self, cause: str, found: Figures) -> None:
        super().__init__(cause, found)
        self.cause, self.found = cause, found


class WrongResult(ArithmeticError):
    """A result is not that of the reference."""


def text(error: BaseException) -> str:
    """An exception in some words."""
    return f"{type(error).__name__}: {error}"[:TEXT]


class Setup:
    """What all cases of a run share: queues, and who could be loaded."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.versions: dict[str, str] = {}  # of a peer, or why it is not there
        self._missing: dict[str, str] = {}
        torch = inputs.torch_or_none()
        if torch is not None:
            torch.set_float32_matmul_precision("highest")
        if device == "cpu" and torch is not None:
            import numba

            torch.set_num_threads(numba.get_num_threads())

    @cached_property
    def queues(self) -> dict[str, Any]:
        return {"cupy": timing.CupyQueue(), "torch": timing.TorchQueue()} if self.device == "gpu" else {}

    @cached_property
    def cache_bytes(self) -> int:
        """L2 of the GPU."""
        import cupy

        return int(cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["l2CacheSize"])

    def queue(self, runner: Runner) -> contextlib.AbstractContextManager[Any]:
        """Where a runner's calls go."""
        return self.queues.get(runner.queue, contextlib.nullcontext())

    def load(self, runner: Runner) -> str | None:
        """Import a runner's library; why that fails, or None."""
        if runner.name not in self.versions and runner.name not in self._missing:
            try:
                self.versions[runner.name] = runner.version()
            except Exception as error:  # a library may fail in any way when it is imported
                self._missing[runner.name] = text(error)
        return self._missing.get(runner.name)

    @property
    def peers(self) -> dict[str, str]:
        """Version of each peer that was asked for, or why it could not be loaded."""
        found = self.versions | {name: f"not loaded: {why}" for name, why in self._missing.items()}
        return {name: found[name] for name in PEERS if name in found}

    def synchronize(self) -> None:
        if self.device == "gpu":
            import torch

            torch.cuda.synchronize()

    def check(self, found: Figures) -> None:
        """After a failure: does the GPU still answer?"""
        for last in (False, True):  # the first launch after a failure may report that failure once more
            try:
                self.synchronize()
                if self.device == "gpu":
                    inputs.probe()
                return
            except Exception as error:
                if last:
                    raise DeviceLost(text(error), found) from error

    def clear(self) -> None:
        """Between cases: give memory back."""
        gc.collect()
        if self.device == "gpu":
            import cupy
            import torch

            from rawflash import arrays

            self.synchronize()
            arrays._captured.clear()  # what graphs referred to: those of the case are gone
            cupy.get_default_memory_pool().free_all_blocks()
            torch.cuda.empty_cache()

    def turn(self, runner: Runner, calls: list[timing.Call], count: int) -> timing.Turn:
        """A turn without a graph."""
        some = [calls[n % len(calls)] for n in range(count)]
        if runner.queue == "cpu":
            return timing.Called(calls[0])
        if runner.queue == "wall":
            return timing.Walled(runner.wait, some)  # type: ignore[attr-defined]
        return timing.Queued(self.queues[runner.queue], some)

    def graph(self, runner: Runner, calls: list[timing.Call], count: int) -> tuple[timing.Turn, str | None]:
        """A turn of a CUDA graph where the calls can be captured, else in a queue, and why."""
        some = [calls[n % len(calls)] for n in range(count)]
        try:
            return timing.Replayed(self.queues[runner.queue], some), None
        except Exception as error:
            self.check({})
            self.queues[runner.queue] = type(self.queues[runner.queue])()  # the stream of a capture that failed
            return self.turn(runner, calls, count), text(error)


def runners(case: Case, backends: Iterable[str] | None = None, peers: Iterable[str] | None = None) -> list[Runner]:
    """Ours and peers of a case; of those named only."""
    chosen = [name for name in case.backends if backends is None or name in backends]
    orders = (False, True) if case.deterministic else (False,)
    ours: list[Runner] = [Ours(*how) for how in itertools.product(chosen, case.algorithms, orders)]
    return ours + [PEERS[name] for name in case.peers if peers is None or name in peers]


def _refusals(setup: Setup, case: Case, some: list[Runner]) -> tuple[Figures, list[Runner]]:
    found: Figures = {}
    for runner in some:
        reason = runner.why_not(case) or setup.load(runner)
        found[runner.name] = {"why_not": reason} if reason else {}
    return found, [runner for runner in some if not found[runner.name]]


@contextlib.contextmanager
def _noting(setup: Setup, found: Figures, name: str) -> Iterator[None]:
    """A failure is noted, and the others go on."""
    try:
        yield
    except DeviceLost as error:
        raise DeviceLost(error.cause, found | {name: {"failed": error.cause}}) from error
    except Exception as error:
        found[name] = {key: value for key, value in found[name].items() if key in ("kernel", "tiles", "error")}
        found[name]["failed"] = text(error)
        setup.check(found)


def _rates(case: Case, figures: dict[str, Any]) -> dict[str, float]:
    """TFLOP/s, or TB/s of K and V, by the medians."""
    work, unit = (case.cache_bytes, "tbytes") if case.bound_by_memory else (case.flops, "tflops")
    return {
        key.removesuffix("us") + unit: float(f"{work / figures[key][1] / 1e6:.6g}")
        for key in ("burst_us", "sustained_us", "in_cache_us") if key in figures and figures[key][1] > 0
    }  # fmt: skip


# ---- time ----------------------------------------------------------------------------------------------------


def _count(case: Case, runner: Runner, results: Any, expected: Any, found: Figures) -> None:
    """Note the error of results; raise where they are wrong, so that no time of theirs is measured."""
    errors = inputs.errors(case, results, expected)
    found[runner.name]["error"] = {name: float(f"{error:.2e}") for name, error in errors.items()}
    wrong = inputs.wrong(case, errors, inputs.CLOSE if isinstance(runner, Ours) else inputs.PEERS_CLOSE)
    if wrong:
        raise WrongResult(wrong)


def _prepared(setup: Setup, case: Case, some: list[Runner], xs: list[inputs.Inputs],
              found: Figures) -> dict[str, tuple[Runner, list[timing.Call], int]]:  # fmt: skip
    """Runners whose results are right, their calls, and the bytes of a result."""
    expected, ready = inputs.reference(case, xs[0]), {}
    for runner in some:
        with _noting(setup, found, runner.name):
            if isinstance(runner, Ours):
                with contextlib.suppress(Exception):  # the call itself says what is wrong
                    found[runner.name] |= runner.plan(case, xs[0])
            with setup.queue(runner):
                calls = [runner.prepare(case, x) for x in xs]
                raw = calls[0]()
            setup.synchronize()
            results = runner.results(case, raw)
            setup.synchronize()
            _count(case, runner, results, expected, found)
            ready[runner.name] = runner, calls, inputs.nbytes(results)
            del raw, results
    if case.extra:
        for name, (runner, _, _) in ready.items():
            try:
                found[name]["extra_bytes"] = extra_bytes(setup, runner, case, xs[0])
            except Exception as error:  # it has times all the same
                setup.check(found)
                found[name]["no_extra_bytes"] = text(error)
    return ready


def _turns(setup: Setup, case: Case, ready: dict[str, tuple[Runner, list[timing.Call], int]],
           found: Figures) -> tuple[dict[str, timing.Turn], dict[str, int]]:  # fmt: skip
    """A turn of each, and the rounds in which it takes part."""
    turns: dict[str, timing.Turn] = {}
    rounds: dict[str, int] = {}
    for name, (runner, calls, result_bytes) in ready.items():
        with _noting(setup, found, name):
            first = setup.turn(runner, calls, 1)
            first.warm()
            taken = first.seconds()
            if runner.queue == "cpu":
                turns[name] = first
                rounds[name] = timing.rounds_of(
                    taken + timing.PAUSE / 2, timing.CPU_BUDGET, timing.CPU_FEWEST, timing.CPU_MOST
                )  # half of the pause: there is one before two turns
                continue
            batch = timing.WALL_BATCH if runner.queue == "wall" else timing.BATCH
            count = timing.calls_of(taken, len(calls), result_bytes, batch)
            turn, why = setup.turn(runner, calls, count), None
            if runner.captures and runner.queue != "wall" and taken < timing.CAPTURED:
                turn, why = setup.graph(runner, calls, count)
            turns[name], rounds[name] = turn, timing.rounds_of(taken * turn.calls)
            found[name] |= {"how": turn.how, "calls": turn.calls} | ({"not_captured": why} if why else {})
    if case.device == "cpu":  # turn by turn to the end
        rounds = dict.fromkeys(rounds, min(rounds.values(), default=0))
    return turns, rounds


def _timed(setup: Setup, case: Case, turns: dict[str, timing.Turn], rounds: dict[str, int], found: Figures,
           key: str) -> None:  # fmt: skip
    taken = timing.alternate(turns, rounds).items()
    for name, times in sorted(taken, key=lambda entry: isinstance(entry[1], Exception)):  # what failed comes last
        with _noting(setup, found, name):
            if isinstance(times, Exception):
                raise times
            found[name] |= {key: timing.quantiles(times), key.replace("_us", "_rounds"): len(times)}


def time_of(setup: Setup, case: Case, some: list[Runner]) -> Figures:
    """Burst and, on a GPU, sustained; of a cache that fits into L2 also with one set of inputs."""
    found, takers = _refusals(setup, case, some)
    if not any(isinstance(runner, Ours) for runner in takers):
        return found
    sets = timing.input_sets(case.input_bytes, setup.cache_bytes) if setup.device == "gpu" else 1
    xs = [inputs.make(case, seed) for seed in range(sets)]
    setup.synchronize()
    ready = _prepared(setup, case, takers, xs, found)
    turns, rounds = _turns(setup, case, ready, found)
    _timed(setup, case, turns, rounds, found, "burst_us")
    if setup.device == "gpu":
        for name, turn in turns.items():
            if "burst_us" in found[name]:
                with _noting(setup, found, name):
                    found[name]["sustained_us"] = timing.quantiles(timing.sustained(turn))
        if case.bound_by_memory and case.cache_bytes < setup.cache_bytes:
            one = {name: (runner, calls[:1], size) for name, (runner, calls, size) in ready.items()
                   if "burst_us" in found[name]}  # fmt: skip
            notes: Figures = {name: {} for name in one}
            again, rounds = _turns(setup, case, one, notes)
            _timed(setup, case, again, rounds, notes, "in_cache_us")
            for name, figures in notes.items():
                found[name] |= {key: figures[key] for key in ("in_cache_us", "in_cache_rounds") if key in figures}
    for figures in found.values():
        if "burst_us" in figures:
            figures |= {"sets": sets} | _rates(case, figures)
    return found


# ---- memory --------------------------------------------------------------------------------------------------


def extra_bytes(setup: Setup, runner: Runner, case: Case, x: inputs.Inputs) -> int:
    """Most device memory that a pass has at a time beside its inputs and results, what the forward one keeps included.

    Once before, so that what a library keeps for all calls is there already.
    """
    with setup.queue(runner):
        runner.prepare(case, x)()
        setup.synchronize()
        if runner.queue == "cupy":
            with _peak() as peak:
                result = runner.prepare(case, x)()
                setup.synchronize()
            return peak.most - inputs.nbytes(runner.results(case, result))
        import torch

        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = runner.prepare(case, x)()
        setup.synchronize()
        return torch.cuda.max_memory_allocated() - before - inputs.nbytes(runner.results(case, result))


def _peak() -> Any:
    """CuPy's hook that knows the most bytes taken from its pool at a time, beyond those taken before."""
    import cupy

    class Peak(cupy.cuda.MemoryHook):
        name = "Peak"

        def __init__(self) -> None:
            self.now = self.most = 0

        def malloc_postprocess(self, **found: Any) -> None:
            self.now += found["mem_size"]
            self.most = max(self.most, self.now)

        def free_postprocess(self, **found: Any) -> None:
            self.now -= found["mem_size"]

    return Peak()


def memory_of(setup: Setup, case: Case, some: list[Runner]) -> Figures:
    """Extra memory; the time is measured elsewhere."""
    found, takers = _refusals(setup, case, some)
    if case.device == "cpu":
        for runner in takers:
            with _noting(setup, found, runner.name):
                found[runner.name] |= _in_new_process(resident_growth, case)
        return found
    x = inputs.make(case)
    expected = inputs.reference(case, x)
    setup.synchronize()
    for runner in takers:
        with _noting(setup, found, runner.name):
            with setup.queue(runner):
                raw = runner.prepare(case, x)()
            setup.synchronize()
            results = runner.results(case, raw)
            setup.synchronize()
            _count(case, runner, results, expected, found)
            del raw, results
            found[runner.name]["extra_bytes"] = extra_bytes(setup, runner, case, x)
        setup.clear()
    return found


def _in_new_process(function: Callable[[Case], dict[str, Any]], case: Case) -> dict[str, Any]:
    """What earlier calls freed would be used again and not be seen to grow."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, case).result()


def _resident_bytes() -> int:
    """Resident memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def resident_growth(case: Case) -> dict[str, Any]:
    """Peak resident memory of one pass of numba_cpu beyond its inputs, and how long it takes."""
    import rawflash as rf

    backward = case.direction == "backward"
    options = dict(causal=case.causal, backend="numba_cpu")

    def run(q: Any, k: Any, v: Any, dout: Any, saved: Any) -> Any:
        if backward:
            return rf.attention_backward(dout, q, k, v, *saved, **options)
        return rf.attention(q, k, v, **options)

    small = np.zeros((1, 8, case.d), case.dtype)
    run(*[small] * 4, rf.attention(small, small, small, return_lse=True, **options))  # compiled before we look
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((case.Hq, case.Tq, case.d)).astype(case.dtype) for _ in range(4))
    saved = rf.attention(q, k, v, return_lse=True, **options) if backward else None
    before = peak = _resident_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, _resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    result = run(q, k, v, dout, saved)
    taken = time.perf_counter() - start
    done.set()
    watcher.join()
    del result
    dense = case.Hq * case.Tq * case.Tk * q.itemsize
    return {"extra_bytes": peak - before, "dense_bytes": dense, "seconds": round(taken, 2)}


# ---- sweep ---------------------------------------------------------------------------------------------------


def sweep_of(setup: Setup, case: Case, some: list[Runner]) -> Figures:
    """Time over M, all M in turn: how far the tiles that are planned are from the best ones."""
    found, takers = _refusals(setup, case, some)
    x = inputs.make(case)
    setup.synchronize()
    for runner in takers:
        if isinstance(runner, Ours):
            with _noting(setup, found, runner.name):
                found[runner.name] |= _sweep(setup, case, runner, x)
    return found


def _sweep(setup: Setup, case: Case, ours: Ours, x: inputs.Inputs) -> dict[str, Any]:
    expected = inputs.reference(case, x)
    points: dict[str, dict[str, Any]] = {}
    runs: dict[str, tuple[Runner, list[timing.Call], int]] = {}
    seen: dict[str, str] = {}
    for sram in (None, *(GPU_SRAM if case.device == "gpu" else CPU_SRAM)):
        name, within = "planned" if sram is None else str(sram), ours.within(sram)
        points[name] = {"sram": sram}
        with _noting(setup, points, name):
            plan = within.plan(case, x)
            points[name] = {"sram": sram} | plan
            same = seen.setdefault(json.dumps(plan, sort_keys=True), name)
            if same != name:
                points[name]["same_as"] = same
                continue
            with setup.queue(within):
                call = within.prepare(case, x)
                raw = call()
            setup.synchronize()
            results = within.results(case, raw)
            setup.synchronize()
            _count(case, within, results, expected, {within.name: points[name]})
            runs[name] = within, [call], inputs.nbytes(results)
    turns, rounds = _turns(setup, case, runs, points)
    _timed(setup, case, turns, rounds, points, "burst_us")
    for point in points.values():
        if "same_as" in point and "burst_us" in points[point["same_as"]]:
            point["burst_us"] = points[point["same_as"]]["burst_us"]
        if "burst_us" in point:
            point |= _rates(case, point)
    timed = [point["burst_us"][1] for point in points.values() if "burst_us" in point]
    if "burst_us" not in points["planned"]:
        raise RuntimeError(points["planned"].get("failed", "the planned tiles have no time"))
    planned = points["planned"]
    return {key: planned[key] for key in ("kernel", "tiles", "burst_us")} | {
        "best_by_planned": round(min(timed) / planned["burst_us"][1], 3), "points": list(points.values()),
    }  # fmt: skip


# ---- start and overhead --------------------------------------------------------------------------------------


GPU_START = """
import json, sys, time
began = time.perf_counter()
import cupy, numpy
import rawflash as rf
from rawflash.backends.cupy_raw import compile
if sys.argv[1] == "bfloat16":
    import ml_dtypes
dtype = ml_dtypes.bfloat16 if sys.argv[1] == "bfloat16" else sys.argv[1]
x = cupy.zeros((1, 2, 300, 64), numpy.dtype(dtype))
cupy.cuda.get_current_stream().synchronize()
imported = time.perf_counter()
load, loads = compile.load, []

def timed(what):
    start = time.perf_counter()
    result = what()
    cupy.cuda.get_current_stream().synchronize()
    return result, round(time.perf_counter() - start, 4)

def loading(*arguments):
    module, seconds = timed(lambda: load(*arguments))
    loads.append(round(seconds * 1e3, 2))
    return module

compile.load = loading
(out, lse), forward = timed(lambda: rf.attention(x, x, x, causal=True, return_lse=True))
_, backward = timed(lambda: rf.attention_backward(x, x, x, x, out, lse, causal=True))
print(json.dumps({"import_s": round(imported - began, 3), "forward_s": forward, "backward_s": backward,
                  "loads_ms": loads}))
"""

CPU_START = """
import json, sys, time
began = time.perf_counter()
import numpy as np
import rawflash as rf
x = np.ones((1, 2, 300, 64), sys.argv[1])
imported = time.perf_counter()
out, lse = rf.attention(x, x, x, causal=True, return_lse=True)
forward = time.perf_counter()
rf.attention_backward(x, x, x, x, out, lse, causal=True)
backward = time.perf_counter()
times = {"import_s": imported - began, "forward_s": forward - imported, "backward_s": backward - forward}
print(json.dumps({name: round(s, 2) for name, s in (times | {"total_s": backward - began}).items()}))
"""


def start_of(setup: Setup, case: Case, some: list[Runner]) -> Figures:
    """Import and first results of two new processes with one cache of kernels, empty at first."""
    found, takers = _refusals(setup, case, some)
    program = GPU_START if case.device == "gpu" else CPU_START
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    for runner in takers:
        with _noting(setup, found, runner.name), tempfile.TemporaryDirectory() as cache:
            # NVRTC keeps what it compiled where CUDA does
            environment = os.environ | {"RAWFLASH_CACHE_DIR": cache, "NUMBA_CACHE_DIR": cache, "CUDA_CACHE_PATH": cache,
                                        "PYTHONPATH": path}  # fmt: skip
            for which in ("cold", "warm"):
                done = subprocess.run([sys.executable, "-c", program, case.dtype], env=environment, capture_output=True,
                                      text=True, timeout=300)  # fmt: skip
                if done.returncode:
                    raise RuntimeError(done.stderr[-TEXT:])
                found[runner.name][which] = json.loads(done.stdout.splitlines()[-1])
            found[runner.name]["caches"] = "own, NVRTC's too"
    return found


def overhead_of(setup: Setup, case: Case, some: list[Runner]) -> Figures:
    """Host time of a warm call: as many as fit the queue, the device doing next to nothing. The least of 20 times."""
    import cupy
    import torch

    import rawflash as rf

    found, takers = _refusals(setup, case, some)
    q = cupy.zeros((1, 1, 16, 16), np.float32)
    t = torch.zeros((1, 1, 16, 16), device="cuda")
    out, lse = rf.attention(q, q, q, return_lse=True)
    call = {
        "attention": lambda: rf.attention(q, q, q, causal=True),
        "attention-lse": lambda: rf.attention(q, q, q, return_lse=True),
        "attention-torch": lambda: rf.attention(t, t, t, causal=True),
        "attention-numba_cuda": lambda: rf.attention(q, q, q, causal=True, backend="numba_cuda"),
        "attention_backward": lambda: rf.attention_backward(q, q, q, q, out, lse),
    }[case.what]
    for runner in takers:
        with _noting(setup, found, runner.name):
            call()
            best = float("inf")
            for _ in range(20):
                setup.synchronize()
                begun = time.perf_counter()
                for _ in range(200):
                    call()
                best = min(best, (time.perf_counter() - begun) / 200)
            found[runner.name]["host_us"] = round(best * 1e6, 2)
    return found


MEASURES: dict[str, Callable[[Setup, Case, list[Runner]], Figures]] = {
    "time": time_of, "memory": memory_of, "sweep": sweep_of, "start": start_of, "overhead": overhead_of,
}  # fmt: skip


# ---- ceilings ------------------------------------------------------------------------------------------------


def ceilings(setup: Setup, cases: Iterable[Case], known: Iterable[str] = ()) -> dict[str, Any]:
    """What these cases are compared with: products, copies, and for float64 the plain rate; not those that are known.

    They are what simple work reaches on this card, at its power limit: a kernel whose numbers take less power, or that
    reads and hardly writes, can exceed them a little.
    """
    found: dict[str, Any] = {}

    def note(name: str, figure: Callable[[], Any]) -> None:
        if name in known:
            return
        try:
            found[name] = figure()
        except Exception as error:
            setup.check({})
            found[name] = {"failed": text(error)}

    cases = list(cases)
    if setup.device == "cpu":
        note("cpu", _cpu_ceilings)
        return found
    dtypes = {case.dtype for case in cases if case.measure in ("time", "sweep") and not case.bound_by_memory}
    for dtype in sorted(dtypes):
        note(f"{dtype} matmul", lambda dtype=dtype: _matmul(setup, dtype))
    if "float64" in dtypes:
        note("float64 plain", lambda: _plain_float64(setup))
    note("copy", lambda: _copy(setup))
    setup.clear()
    return found


def _rate(turn: timing.Turn, amount: float, unit: str) -> dict[str, float]:
    """Of a turn by itself, in units of 1e12 a second."""
    turn.warm()
    rounds = {"": timing.rounds_of(turn.seconds() * turn.calls)}
    times = timing.alternate({"": turn}, rounds)[""]
    if isinstance(times, Exception):
        raise times
    steady = timing.sustained(turn)
    return {f"burst_{unit}": round(amount / statistics.median(times) / 1e12, 3),
            f"sustained_{unit}": round(amount / statistics.median(steady) / 1e12, 3)}  # fmt: skip


def _matmul(setup: Setup, dtype: str, n: int = 8192) -> dict[str, float]:
    import torch

    n = n // 2 if dtype == "float64" else n
    a, b = (torch.randn((n, n), device="cuda", dtype=getattr(torch, dtype)) for _ in range(2))
    c = torch.empty_like(a)
    setup.synchronize()
    turn = timing.Queued(setup.queues["torch"], [lambda: torch.mm(a, b, out=c)] * 4)
    return {"n": n} | _rate(turn, 2 * n**3, "tflops")


def _copy(setup: Setup) -> dict[str, float]:
    """Read and written."""
    import torch

    a = torch.zeros(1 << 28, device="cuda")
    b = torch.empty_like(a)
    setup.synchronize()
    return _rate(timing.Queued(setup.queues["torch"], [lambda: b.copy_(a)] * 4), 2 * a.nbytes, "tbytes")


def _plain_float64(setup: Setup) -> dict[str, float]:
    """The card's plain float64 rate: a chain of fused multiply-adds in every thread."""
    import cupy

    source = """extern "C" __global__ void chain(double* x) {
        double a[8]; for (int i = 0; i < 8; i++) a[i] = x[threadIdx.x] + i;
        for (int n = 0; n < 4096; n++) for (int i = 0; i < 8; i++) a[i] = fma(a[i], 0.999, 0.001);
        double s = 0; for (int i = 0; i < 8; i++) s += a[i]; x[threadIdx.x] = s; }"""
    chain, space = cupy.RawKernel(source, "chain"), cupy.zeros(256)
    setup.synchronize()
    blocks = cupy.cuda.Device().attributes["MultiProcessorCount"] * 8 * 4
    turn = timing.Queued(setup.queues["cupy"], [lambda: chain((blocks,), (256,), (space,))] * 4)
    return _rate(turn, blocks * 256 * 4096 * 8 * 2, "tflops")


def _cpu_ceilings(n: int = 2048, size: int = 1 << 28) -> dict[str, Any]:
    """A large float32 product, a copy by all threads (read and written) and a sum; what they ran on."""
    import numba

    from rawflash.backends.numba_cpu import microkernel

    def rate(amount: float, call: timing.Call) -> float:
        times = timing.alternate({"": timing.Called(call)}, {"": 7})[""]
        if isinstance(times, Exception):
            raise times
        return round(amount / statistics.median(times) / 1e9, 1)

    threads = numba.get_num_threads()
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    parts = [np.array_split(x, threads) for x in (target, source)]
    found: dict[str, Any] = {"threads": threads, "rawflash_tile": str(microkernel.SHAPE),
                             "load": round(os.getloadavg()[0], 2)}  # fmt: skip
    with ThreadPoolExecutor(threads) as pool:
        found["copy_gbytes"] = rate(2 * size, lambda: list(pool.map(np.copyto, *parts)))
    torch = inputs.torch_or_none()
    if torch is None:
        a, b = np.random.default_rng(0).standard_normal((2, n, n), dtype=np.float32)
        return found | {"matmul": f"numpy {n}", "matmul_gflops": rate(2 * n**3, lambda: a @ b)}
    a, b = torch.randn(2, n, n)
    numbers = torch.ones(size // 4)
    build = torch.__config__.show().splitlines()
    return found | {
        "sum_gbytes": rate(size, numbers.sum), "matmul": f"torch {n}",
        "matmul_gflops": rate(2 * n**3, lambda: torch.mm(a, b)), "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "blas": [line.strip(" -") for line in build if "Math Kernel Library" in line or "MKL-DNN" in line],
    }  # fmt: skip
