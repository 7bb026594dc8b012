"""The table of chips: on-chip bytes per block, row granule, kernel family."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
    """

    name: str
    on_chip_bytes: int
    granule: int


def _l2_bytes() -> int:
    """Bytes of one core's L2 cache, as Linux tells it; 512 KiB where it does not."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(text.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 512 * 1024


def chip_of(backend: str) -> Chip:
    """The chip that a backend runs on here."""
    return Chip("cpu", _l2_bytes() // 4, 16)
