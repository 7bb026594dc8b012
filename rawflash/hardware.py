"""The table of chips: on-chip bytes per block, row granule, kernel family."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rawflash.errors import BackendError, ProblemError

KIB = 1024
VECTOR_ROWS = 16  # tiles of numba_cpu come in multiples of this
VECTOR_MOST_ROWS = 512  # and are no taller: a longer tile gains nothing and starves the other threads
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
        dtype (CPU); "simt", "mma" and "sm90" keep inputs in the call's dtype and accumulate wider.
    most_rows : int or None
        No tile is taller; None: no bound.
    hard : bool
        True: M is a limit of the device, more does not launch. False: M is advice (a cache), so a
        head dimension too large for it makes M larger instead of failing. An M that a caller gives
        by ``sram=`` is always a limit.

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


def chip_of(backend: str) -> Chip:
    """The chip that a backend runs on here.

    On a CPU, M is a quarter of one core's L2: the rest is for what streams past the tiles.

    Raises
    ------
    BackendError
        A GPU backend: it asks its own device.
    """
    on_chip = _l2_bytes() // 4
    if backend == "numpy_tiled":
        return Chip("cpu", on_chip, 1, "loops", hard=False)
    if backend == "numba_cpu":
        return Chip("cpu", on_chip, VECTOR_ROWS, "vector", VECTOR_MOST_ROWS, hard=False)
    raise BackendError(f"backend {backend!r} has no device here; name a chip instead: {', '.join(CHIPS)}")


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
