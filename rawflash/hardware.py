"""The table of chips: on-chip bytes per block, row granule, kernel family."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rawflash.errors import BackendError, ProblemError

KIB = 1024
VECTOR_ROWS = 16  # tiles of numba_cpu come in multiples of this
VECTOR_MOST_ROWS = 256  # and are no taller: a taller tile gains nothing
SIMT_MOST_ROWS = 96  # of a tile of cupy_raw: taller ones run out of registers
TENSOR, HALVES = "tensor", "halves"  # families of a chip, see Chip
MMA_ROWS = 16  # rows of one tensor-core product (m16n8k16)


@dataclass(frozen=True)
class Chip:
    """What :func:`rawflash.tiling.plan_tiles` must know of the hardware.

    Attributes
    ----------
    name : str
        "cpu" or an architecture such as "sm_90".
    on_chip_bytes : int
        M in bytes: what the tiles of one block (one core on a CPU) may occupy.
    granule : int
        Rows of a tile come in multiples of this.
    family : str
        The kernels written for it: "loops" and "vector" compute on tiles converted to the compute
        dtype (CPU); "simt" too (any GPU), with accumulators in registers; "tensor" is "simt" with the products
        of float32 and float64 on tensor cores; "halves" is "simt" with those of fa2's 16-bit inputs there, see
        :func:`rawflash.tiling.mma_takes`; "mma" and "sm90" keep inputs in the call's dtype and accumulate wider.
    most_rows : int or None
        No tile is taller; None: no bound.
    hard : bool
        True: M is a limit of the device, more does not launch. False: M is advice (a cache), so a
        head dimension too large for it makes M larger instead of failing. An M that a caller gives
        by ``sram=`` is always a limit.
    processors : int or None
        Streaming multiprocessors, of a device that was asked.

    Examples
    --------
    >>> chip("sm_90").on_chip_bytes
    232448
    """

    name: str
    on_chip_bytes: int
    granule: int
    family: str = "loops"
    most_rows: int | None = None
    hard: bool = True
    processors: int | None = None


# Shared memory that one block may opt in to: the SM's, less 1 KiB that the system keeps (CUDA C++
# Programming Guide, technical specifications per compute capability).
CHIPS = {
    row.name: row
    for row in (
        Chip("sm_75", 64 * KIB, MMA_ROWS, "simt"),
        Chip("sm_80", 163 * KIB, MMA_ROWS, "mma"),
        Chip("sm_86", 99 * KIB, MMA_ROWS, "mma"),
        Chip("sm_89", 99 * KIB, MMA_ROWS, "mma"),
        Chip("sm_90", 227 * KIB, MMA_ROWS, "sm90"),
        Chip("sm_100", 227 * KIB, MMA_ROWS, "mma"),
        Chip("sm_120", 99 * KIB, MMA_ROWS, "mma"),
    )
}


@cache
def _l2_bytes() -> int:
    """Bytes of one core's L2 cache, as Linux tells it; 512 KiB where it does not."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(text.removesuffix("K")) * KIB
    except (OSError, ValueError):
        return 512 * KIB


def chip_of(backend: str, device: int | None = None) -> Chip:
    """The chip that a backend runs on here.

    On a CPU, M is one core's L2 cache.

    Parameters
    ----------
    backend : str
    device : int, optional
        Which GPU; None: the current one.

    Raises
    ------
    BackendError
        A GPU backend, and there is no GPU.
    """
    on_chip = _l2_bytes()
    if backend == "numpy_tiled":
        return Chip("cpu", on_chip, 1, "loops", hard=False)
    if backend == "numba_cpu":
        return Chip("cpu", on_chip, VECTOR_ROWS, "vector", VECTOR_MOST_ROWS, hard=False)
    missing = why_no_gpu()
    if missing is not None:
        raise BackendError(
            f"backend {backend!r} has no device here: {missing}; name a chip instead: {', '.join(CHIPS)}"
        )
    import cupy

    return kernels_on(backend, _gpu(cupy.cuda.runtime.getDevice() if device is None else device))


def kernels_on(backend: str, row: Chip) -> Chip:
    """A GPU of the table with the family of kernels that a backend has for it."""
    if backend not in ("cupy_raw", "numba_cuda"):
        return row
    more = TENSOR if backend == "cupy_raw" else HALVES
    return replace(row, family="simt" if row.family == "simt" else more, most_rows=SIMT_MOST_ROWS)


@cache
def _gpu(device: int) -> Chip:
    """What CUDA says of a device, on the row of the table that fits it."""
    import cupy

    asked = cupy.cuda.Device(device)
    numbers: dict[str, Any] = asked.attributes
    return _row(int(asked.compute_capability), numbers["MaxSharedMemoryPerBlockOptin"], numbers["MultiProcessorCount"])


def _row(capability: int, on_chip_bytes: int, processors: int) -> Chip:
    """The newest row that is not newer than the device, with the device's own numbers.

    Code for one chip runs on the later ones; within a major version what differs is mostly the
    shared memory, which the device tells (sm_87 is sm_86 with more of it).
    """
    older = [row for row in CHIPS.values() if int(row.name.removeprefix("sm_")) <= capability]
    if not older:
        raise BackendError(f"the GPU is sm_{capability}; expected {next(iter(CHIPS))} or newer")
    return replace(older[-1], name=f"sm_{capability}", on_chip_bytes=on_chip_bytes, processors=processors)


def why_no_gpu() -> str | None:
    """Why no GPU can be used here, or None when one can; never raises."""
    try:
        import cupy

        return None if cupy.cuda.is_available() else "CuPy finds no NVIDIA GPU"
    except ImportError as error:
        return f"CuPy cannot be imported: {error}"
    except Exception as error:  # a driver that is broken, too old or in use: whatever CUDA calls it
        return f"CuPy cannot ask for a GPU: {error}"


def chip(name: str) -> Chip:
    """A row of the table by name, for planning without the device: "cpu" or e.g. "sm_90".

    Raises
    ------
    ProblemError
        There is no such row.
    """
    if name == "cpu":
        return chip_of("numba_cpu")
    if name not in CHIPS:
        raise ProblemError(f"arch is {name!r}; expected one of 'cpu', " + ", ".join(repr(n) for n in CHIPS))
    return CHIPS[name]
