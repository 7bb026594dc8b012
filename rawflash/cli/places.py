"""Where a backend computes: on the CPU, or on CuPy's current GPU."""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

from rawflash import arrays
from rawflash.backends import BACKENDS, GPU_ARRAYS, why_not
from rawflash.errors import BackendError
from rawflash.problem import Problem

TIMED_RUNS, TIMED_SECONDS = 5, 0.5  # best of as many runs as fit


class Cpu:
    """Where a backend computes: arrays there and back, waiting, and what a call allocates. Here the CPU."""

    name = ""

    def put(self, array: Any) -> Any:
        """A NumPy array as one that the backend takes."""
        return array

    def get(self, array: Any) -> Any:
        """A result as a NumPy array."""
        return array

    def wait(self) -> None:
        """Return when all that was asked for is done."""

    @contextlib.contextmanager
    def allocations(self) -> Iterator[Callable[[], int]]:
        """Gives a function: the most bytes that were allocated at once inside the block so far."""
        tracemalloc.start()
        try:
            yield lambda: tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


class Gpu(Cpu):
    """CuPy's current GPU."""

    def __init__(self) -> None:
        self.cupy = arrays.require_cupy()
        self.name = gpu_name(self.cupy, self.cupy.cuda.runtime.getDevice())

    def put(self, array: Any) -> Any:
        return self.cupy.asarray(array)

    def get(self, array: Any) -> Any:
        return self.cupy.asnumpy(array)

    def wait(self) -> None:
        self.cupy.cuda.get_current_stream().synchronize()

    @contextlib.contextmanager
    def allocations(self) -> Iterator[Callable[[], int]]:
        class Hook(self.cupy.cuda.MemoryHook):  # type: ignore[name-defined]
            name = "rawflash"
            now = most = 0

            def malloc_postprocess(self, **block: int) -> None:
                self.now += block["mem_size"]
                self.most = max(self.most, self.now)

            def free_postprocess(self, **block: int) -> None:
                self.now -= block["mem_size"]

        hook = Hook()
        with hook:
            yield lambda: hook.most


def takes_gpu_arrays(backend: str) -> bool:
    """Is it a backend for arrays of an NVIDIA GPU?"""
    return BACKENDS[backend].runs_on == GPU_ARRAYS


def place_of(backend: str | None, algorithm: str = "fa2") -> Cpu:
    """Where a backend computes; None: the CPU, as there are NumPy arrays.

    Raises
    ------
    BackendError
        It takes GPU arrays, and cannot run here.
    """
    if backend is None or not takes_gpu_arrays(backend):
        return Cpu()
    reason = why_not(backend, Problem(algorithm=algorithm))
    if reason is not None:
        raise BackendError(f"backend {backend!r} {reason}")
    return Gpu()


def best_seconds(call: Callable[[], Any], place: Cpu) -> float:
    """The shortest of a few runs, each from nothing under way to its results being there."""
    times: list[float] = []
    while len(times) < TIMED_RUNS and sum(times) < TIMED_SECONDS:
        place.wait()
        start = time.perf_counter()
        call()
        place.wait()
        times.append(time.perf_counter() - start)
    return min(times)


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, in text."""
    return f"{seconds * 1e3:.1f}" if seconds >= 1e-2 else f"{seconds * 1e3:.3f}"


def gpu_name(cupy: Any, device: int) -> str:
    """The model of a GPU, by its number."""
    name = cupy.cuda.runtime.getDeviceProperties(device)["name"]
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)
