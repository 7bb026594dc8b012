"""The table of backends, and the one look-up from a problem to its kernel.

A backend is a folder with the same four files, ``fa1_forward``, ``fa1_backward``,
``fa2_forward`` and ``fa2_backward`` (numpy_tiled also ``standard_*`` and ``rowwise_*``), each
holding one function of the file's name:

* forward: ``kernel(problem, tiles, operands, out, lse)``;
* backward: ``kernel(problem, tiles, operands, grads)``, ``grads`` a dict by name.

The module of a backend is imported when it is first asked for, not before.
"""

from __future__ import annotations

import importlib
import importlib.util
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
    module : str or None
        Where its kernels are; None: not in this version of rawflash.
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
    """

    module: str | None
    algorithms: tuple[str, ...]
    runs_on: str
    needs: str
    instead: str
    largest_head: int | None = None


GPU_ARRAYS = "NVIDIA GPU arrays"
ON_CPU = "use 'numba_cpu' or 'numpy_tiled' on CPU arrays"
CUPY = 'pip install "rawflash[cuda13]", or rawflash[cuda12] for an older driver'

BACKENDS = {
    "numba_cpu": Backend("rawflash.backends.numba_cpu", ("fa1", "fa2"), "CPU arrays", "numba", "pip install numba"),
    "numpy_tiled": Backend(
        "rawflash.backends.numpy_tiled",
        ("standard", "rowwise", "fa1", "fa2"),
        "CPU arrays",
        "numpy",
        "pip install numpy",
    ),
    "cupy_raw": Backend("rawflash.backends.cupy_raw", ("fa1", "fa2"), GPU_ARRAYS, "cupy", CUPY, 256),
    "numba_cuda": Backend(None, ("fa1", "fa2"), GPU_ARRAYS, "numba_cuda", ON_CPU),
}


def unavailable(name: str, why: str) -> BackendError:
    """The error for a backend that cannot take a call."""
    row = BACKENDS[name]
    if row.module is None:
        return BackendError(
            f"backend {name!r} takes {row.runs_on} and is not in this version of rawflash: {why}; {row.instead}"
        )
    return BackendError(f"backend {name!r} takes {row.runs_on}: {why}; pass {row.runs_on}, or another backend=")


def lookup(problem: Problem, direction: str, device: int | None = None) -> tuple[Callable[..., None], Chip]:
    """The kernel for a problem and the chip that it runs on.

    Parameters
    ----------
    problem : Problem
    direction : {"forward", "backward"}
    device : int, optional
        The GPU that the arrays are on; None: the current one.

    Raises
    ------
    BackendError
        The backend cannot load, or has no such algorithm; the message says who has it.
    """
    row = BACKENDS[problem.backend]
    if row.module is None:
        raise unavailable(problem.backend, "it has no kernels yet")
    if problem.algorithm not in row.algorithms:
        having = {n: other for n, other in BACKENDS.items() if problem.algorithm in other.algorithms and other.module}
        raise BackendError(
            f"backend {problem.backend!r} has no algorithm {problem.algorithm!r}; {', '.join(having)} has it, "
            f"for {', '.join({other.runs_on for other in having.values()})}"
        )
    if row.largest_head is not None and max(problem.d, problem.dv) > row.largest_head:
        raise BackendError(
            f"backend {problem.backend!r} has head dimensions up to {row.largest_head}; d is {problem.d}, "
            f"dv is {problem.dv}; numba_cpu and numpy_tiled have no limit, for CPU arrays"
        )
    name = f"{problem.algorithm}_{direction}"
    try:
        module = importlib.import_module(f"{row.module}.{name}")
    except ImportError as error:
        raise BackendError(f"backend {problem.backend!r} cannot load: {error}; {row.instead}") from error
    return getattr(module, name), chip_of(problem.backend, device)


def why_not(name: str, algorithm: str = "fa2") -> str | None:
    """Why a backend cannot run an algorithm here, or None when it can; loads no kernel.

    Parameters
    ----------
    name : str
        A key of :data:`BACKENDS`.
    algorithm : str
    """
    row = BACKENDS[name]
    if row.module is None:
        return str(unavailable(name, "it has no kernels yet"))
    if algorithm not in row.algorithms:
        return f"it has no algorithm {algorithm!r}, only {', '.join(row.algorithms)}"
    if importlib.util.find_spec(row.needs) is None:
        return f"{row.needs} is not installed; {row.instead}"
    return why_no_gpu() if row.runs_on == GPU_ARRAYS else None
