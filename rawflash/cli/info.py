"""``rawflash info``: what is installed here, and what is missing."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rawflash import arrays, hardware
from rawflash._version import __version__
from rawflash.backends import BACKENDS, lookup, why_not
from rawflash.cli import compiling
from rawflash.cli.common import DONE, wrap
from rawflash.cli.places import gpu_name, takes_gpu_arrays
from rawflash.errors import BackendError, RawflashError
from rawflash.plan import size_text
from rawflash.problem import DIRECTIONS, Problem

_PACKAGES = (
    "numpy", "numba", "llvmlite", "rich", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "numba-cuda", "torch",
    "jax",
)  # fmt: skip


def command(options: argparse.Namespace) -> int:
    """Print versions, devices and backends; the exit code."""
    if options.compile:
        reason = why_not_loaded("numba_cpu")("fa2")
        if reason is not None:
            raise BackendError(reason)
        start = time.perf_counter()
        made = compiling.compile_all()
        text = f"compiled {made} kernels in {time.perf_counter() - start:.0f} s" if made else "all in the cache"
        wrap("numba_cpu    ", f"{text}\n")
    print(f"{'rawflash':<12} {__version__}")
    interpreter = f"{platform.python_implementation()}, {platform.system()}"
    print(f"{'Python':<12} {platform.python_version()} ({interpreter})")
    for name in _PACKAGES:
        try:
            print(f"{name:<12} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{name:<12} not installed")

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"\n{'CPU':<12} {_cpu_name()}, {cores} logical cores for this process")
    for line in _gpu_lines():
        wrap(f"{'GPU':<12} ", line)
    with contextlib.suppress(Exception):  # no CuPy, or a broken one, which the line above says
        wrap(f"{'CUDA':<12} ", _cuda_text(arrays.require_cupy()))

    print("\nbackends")
    for name, row in BACKENDS.items():
        reason = next((text for text in map(why_not_loaded(name), row.algorithms) if text), None)
        if reason is None:
            chip = hardware.chip_of(name)
            share = f"block of threads on {chip.name}" if takes_gpu_arrays(name) else "core"
            reason = f"loads: {', '.join(row.algorithms)}; M = {size_text(chip.on_chip_bytes)} a {share}"
            if name == "numba_cpu":
                reason += f", {thread_count(name)} threads (NUMBA_NUM_THREADS sets them)"
        else:
            reason = "does not load: " + reason.removeprefix(f"backend {name!r} ")
        wrap(f"  {name:<11}  ", reason)

    print("\ncompiled code")
    folders = sorted({path for algorithm in ("fa1", "fa2") for path in compiling.cache_folders(algorithm)})
    if folders:
        wrap("  numba_cpu    ", "kept in " + ", ".join(folders) + " (NUMBA_CACHE_DIR moves it)")
    else:
        wrap("  numba_cpu    ", "none: the backend does not load")
    from rawflash.backends.cupy_raw.compile import cache_folder

    kept = cache_folder()
    folder = "not kept: there is no home folder" if kept is None else f"kept in {kept}"
    wrap("  cupy_raw     ", f"{folder} (RAWFLASH_CACHE_DIR {'names one' if kept is None else 'moves it'})")
    return DONE


def why_not_loaded(name: str, d: int = 1) -> Callable[[str], str | None]:
    """A function from an algorithm to the reason why the backend cannot load it for this head dimension, or None."""

    def reason(algorithm: str) -> str | None:
        problem = Problem(backend=name, algorithm=algorithm, d=d, dv=d)
        text = why_not(name, problem)
        if text is None:
            try:
                for direction in DIRECTIONS:
                    lookup(problem, direction)
                if name == "cupy_raw":
                    _nvrtc_version()
            except (RawflashError, RuntimeError) as error:  # Numba: no folder for its cache
                text = str(error)
        return text

    return reason


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu_lines() -> list[str]:
    """What CuPy sees, a line for each GPU; where it sees none, why. Never raises."""
    missing = hardware.why_no_gpu()
    if missing is None:
        try:
            cupy = arrays.require_cupy()
            return [_gpu_text(cupy, device) for device in range(cupy.cuda.runtime.getDeviceCount())]
        except Exception as error:  # a driver in trouble, whatever CUDA calls it
            missing = f"CuPy cannot ask for a GPU: {error}"
    listed = gpu_names()
    return [f"none: {missing}" + f"; the driver lists {', '.join(listed)}" * bool(listed)]


def _gpu_text(cupy: Any, device: int) -> str:
    try:
        chip = hardware.chip_of("cupy_raw", device)
        known = f"{chip.name}, {size_text(chip.on_chip_bytes)} on chip a block, {chip.processors} multiprocessors"
    except BackendError as error:  # older than the table
        known = str(error)
    return f"{device}: {gpu_name(cupy, device)}, {known}"


def _cuda_text(cupy: Any) -> str:
    """Versions of the driver and of NVRTC, or what is missing. Never raises."""
    try:
        number = int(cupy.cuda.runtime.driverGetVersion())  # 13020 is 13.2; 0: there is none
        driver = f"driver for CUDA {number // 1000}.{number % 1000 // 10}" if number else "no driver"
    except Exception as error:
        driver = f"no driver: {error}"
    try:
        return driver + ", NVRTC {}.{}".format(*_nvrtc_version())
    except Exception as error:
        return f"{driver}, no NVRTC: {error}"


def _nvrtc_version() -> tuple[int, int]:
    from rawflash.backends.cupy_raw.compile import nvrtc_version

    return nvrtc_version()


def gpu_names() -> list[str]:
    """Models that the NVIDIA driver lists on Linux; no GPU library is loaded."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                if line.startswith("Model"):
                    names.append(line.partition(":")[2].strip())
    return names


def thread_count(backend: str) -> int:
    """Threads that a backend computes with."""
    if backend != "numba_cpu":
        return 1
    import numba

    return int(numba.get_num_threads())
