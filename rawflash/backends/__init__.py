"""The table of backends, and the one look-up from a problem to its kernel.

A backend is a folder with the same four files, ``fa1_forward``, ``fa1_backward``,
``fa2_forward`` and ``fa2_backward`` (numpy_tiled also ``standard_*`` and ``rowwise_*``), each
holding one function of the file's name:

* forward: ``kernel(problem, tiles, operands, out, lse)``;
* backward: ``kernel(problem, tiles, operands, grads)``, ``grads`` a dict by name.

Forward mode (:func:`rawflash.attention_jvp`) is a file more, ``fa2_jvp``, where a backend has it.

The module of a backend is imported when it is first asked for, not before.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass

from rawflash.errors import BackendError
from rawflash.hardware import Chip, chip_of, why_no_gpu
from rawflash.problem import Problem


@dataclass(frozen=True)
class Backend:
    """One row of :data:`BACKENDS`.

    Attributes
    ----------
    module : str
        Where its kernels are.
    algorithms : tuple of str
        What it has.
    runs_on : str
        The arrays it takes, in words.
    needs : str
        The library that it imports.
    instead : str
        What to do when it is not there.
    largest_head : int or None
        Largest d and dv; None: any.
    forward_mode : tuple of str
        Algorithms that it has a ``jvp`` of.
    """

    module: str
    algorithms: tuple[str, ...]
    runs_on: str
    needs: str
    instead: str
    largest_head: int | None = None
    forward_mode: tuple[str, ...] = ()


GPU_ARRAYS = "NVIDIA GPU arrays"
CUPY = 'pip install "rawflash[cuda13]", or rawflash[cuda12] for an older driver'

BACKENDS = {
    "numba_cpu": Backend("rawflash.backends.numba_cpu", ("fa1", "fa2"), "CPU arrays", "numba", "pip install numba"),
    "numpy_tiled": Backend(
        "rawflash.backends.numpy_tiled",
        ("standard", "rowwise", "fa1", "fa2"),
        "CPU arrays",
        "numpy",
        "pip install numpy",
        forward_mode=("fa2",),
    ),
    "cupy_raw": Backend("rawflash.backends.cupy_raw", ("fa1", "fa2"), GPU_ARRAYS, "cupy", CUPY, 256),
    "numba_cuda": Backend("rawflash.backends.numba_cuda", ("fa1", "fa2"), GPU_ARRAYS, "numba_cuda", CUPY, 256),
}


SMALLEST = Problem()  # fa2 and a head dimension of 1: what refuses it refuses everything


def unavailable(name: str, why: str) -> BackendError:
    """The error for a backend that cannot take a call."""
    row = BACKENDS[name]
    return BackendError(f"backend {name!r} takes {row.runs_on}: {why}; pass {row.runs_on}, or another backend=")


def lookup(problem: Problem, direction: str, device: int | None = None) -> tuple[Callable[..., None], Chip]:
    """The kernel for a problem and the chip that it runs on.

    Parameters
    ----------
    problem : Problem
    direction : {"forward", "backward", "jvp"}
    device : int, optional
        The GPU that the arrays are on; None: the current one.

    Raises
    ------
    BackendError
        The backend cannot run the problem, see :func:`why_not`, or cannot load.
    """
    reason = why_not(problem.backend, problem, direction)
    row = BACKENDS[problem.backend]
    if reason is not None:
        raise BackendError(f"backend {problem.backend!r} {reason}")
    name = f"{problem.algorithm}_{direction}"
    try:
        module = importlib.import_module(f"{row.module}.{name}")
    except ImportError as error:
        raise BackendError(f"backend {problem.backend!r} cannot load: {error}; {row.instead}") from error
    return getattr(module, name), chip_of(problem.backend, device)


def why_not(name: str, problem: Problem = SMALLEST, direction: str = "forward") -> str | None:
    """Why a backend cannot run a problem here, or None when it can; loads no kernel.

    Parameters
    ----------
    name : str
        A key of :data:`BACKENDS`; the problem's own backend is not looked at.
    problem : Problem
        Its algorithm and head dimensions count.
    direction : {"forward", "backward", "jvp"}

    Returns
    -------
    str or None
        What completes the sentence "backend ...".
    """
    row = BACKENDS[name]
    if direction == "jvp" and problem.algorithm not in row.forward_mode:
        forward = [f"{n} for {other.runs_on} ({', '.join(other.forward_mode)})"
                   for n, other in BACKENDS.items() if other.forward_mode]  # fmt: skip
        return f"has no forward mode of algorithm {problem.algorithm!r}; these have one: {', '.join(forward)}"
    if problem.algorithm not in row.algorithms:
        having = {n: other for n, other in BACKENDS.items() if problem.algorithm in other.algorithms}
        return (
            f"has no algorithm {problem.algorithm!r}; {', '.join(having)} has it, "
            f"for {', '.join({other.runs_on for other in having.values()})}"
        )
    if problem.page and problem.algorithm != "fa2":
        return f"has paged caches for algorithm 'fa2'; algorithm is {problem.algorithm!r}"
    if row.largest_head is not None and max(problem.d, problem.dv) > row.largest_head:
        return (
            f"has head dimensions up to {row.largest_head}; d is {problem.d}, dv is {problem.dv}; "
            "numba_cpu and numpy_tiled have no limit, for CPU arrays"
        )
    if not _installed(row.needs):
        return f"needs {row.needs}, which is not installed; {row.instead}"
    missing = why_no_gpu() if row.runs_on == GPU_ARRAYS else None
    return None if missing is None else f"has no device here: {missing}"


def _installed(package: str) -> bool:
    if package in sys.modules:  # it says what there is, at once
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None
