"""The kernels of numba_cpu, compiled into their cache on disk before they are called."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np

from rawflash import api, arrays
from rawflash.errors import BackendError
from rawflash.problem import DIRECTIONS, DTYPES

WARM_TOKENS = 32  # one small call compiles every kernel of an algorithm


def compiled_functions(algorithm: str) -> list[Any]:
    """The kernels of a numba_cpu algorithm; none where they do not load."""
    try:
        for direction in DIRECTIONS:
            import_module(f"rawflash.backends.numba_cpu.{algorithm}_{direction}")
        from rawflash.backends.numba_cpu.launch import KERNELS
    except (ImportError, RuntimeError):
        return []
    return [kernel for name, kernel in KERNELS.items() if name.startswith(algorithm)]


def cache_folders(algorithm: str) -> set[str]:
    """Where the compiled kernels of a numba_cpu algorithm are kept."""
    return {
        str(function.stats.cache_path)
        for function in compiled_functions(algorithm)
        if function.stats.cache_path
    }


def _small_call(
    options: dict[str, Any], d: int, directions: Sequence[str] = DIRECTIONS, shape: tuple[int, int] = (1, WARM_TOKENS),
    dtype: Any = np.float32,
) -> None:  # fmt: skip
    """Calls on few heads and tokens, which compile the kernels of an algorithm for a dtype."""
    x = np.zeros((1, *shape, d), dtype)
    if "forward" in directions:
        api.attention(x, x, x, **options)
    if "backward" in directions:
        api.attention_backward(x, x, x, x, x, np.zeros(x.shape[:3], x.dtype), **options)


def compile_all() -> int:
    """Compile every kernel of numba_cpu into the cache on disk; how many were not there."""
    dtypes = [np.dtype(name) for name in DTYPES if name != "bfloat16"]
    with contextlib.suppress(BackendError):
        dtypes.append(arrays.bfloat16())
    for algorithm, options, dtype in product(("fa1", "fa2"), ({}, {"softcap": 1.0}), dtypes):
        # With and without the options that touch scores; in fa2 few rows have kernels of their own, one a dtype.
        call = {"backend": "numba_cpu", "algorithm": algorithm, **options}
        _small_call(call, 8, ("forward",), (1, 1), dtype)
        if dtype.itemsize > 2:
            _small_call(call, 8, DIRECTIONS, (1, WARM_TOKENS), dtype)
    return _compiled(("fa1", "fa2"))


def _compiled(algorithms: Sequence[str]) -> int:
    """How many functions of these algorithms this process compiled, the cache on disk not having them."""
    functions = (function for algorithm in algorithms for function in compiled_functions(algorithm))
    return sum(sum(function.stats.cache_misses.values()) for function in functions)


def compile_ahead(algorithms: Sequence[str], direction: str, d: int) -> int:
    """Compile the numba_cpu kernels of some algorithms for float32 into the cache on disk.

    Parameters
    ----------
    algorithms : sequence of {"fa1", "fa2"}
        In one process, because the second then compiles only what it does not share with the first.
    direction : {"forward", "backward"}
        The two share little: each has a process of its own.
    d : int
        Head dimension of the call that is made to compile them.

    Returns
    -------
    int
        Functions compiled; 0 when all were in the cache.
    """
    for algorithm in algorithms:
        _small_call({"causal": True, "backend": "numba_cpu", "algorithm": algorithm}, d, (direction,))
    return _compiled(algorithms)


def end_with_parent() -> None:
    """Let this process end when its standard input does: a pipe that its parent holds open as long as it lives."""

    def watch() -> None:
        os.read(0, 1)  # not sys.stdin, whose lock would be held at exit
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def compiling_ahead(algorithms: Sequence[str], d: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of their own that fill the cache, while this one works on something else.

    They end with this one, however it ends. One that fails is no harm: the demo then compiles itself.
    """
    processes: list[subprocess.Popen[str]] = []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    watched, held = os.pipe()
    for direction in DIRECTIONS if algorithms else ():
        call = f"compile_ahead({tuple(algorithms)!r}, {direction!r}, {d})"
        code = f"from rawflash.cli.compiling import compile_ahead, end_with_parent; end_with_parent(); print({call})"
        with contextlib.suppress(OSError):
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=watched, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env=environment, start_new_session=True,
            )  # fmt: skip
            processes.append(process)
    try:
        yield processes
    finally:
        os.close(held)
        os.close(watched)
        for process in processes:
            process.terminate()  # nothing to end when it is done
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def finish_compiling(processes: list[subprocess.Popen[str]], start: float) -> str:
    """Wait for the compilers; a sentence on what they did."""
    outputs = [process.communicate()[0].strip() for process in processes]
    if outputs and set(outputs) == {"0"}:
        return "numba_cpu: its compiled code was in the cache on disk"
    seconds = time.perf_counter() - start
    return f"numba_cpu: compiled in {seconds:.0f} s, first time only; 'rawflash info' says where it is kept"
