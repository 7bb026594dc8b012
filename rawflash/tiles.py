"""What a plan says: block sizes, what is on chip, and the names of loops, of places and of families of kernels.

``tiling.py`` makes plans, and ``sm90.py`` those of the kernels for sm_90.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

ON_CHIP = "on-chip"
REGISTERS = "registers"
SIMT, SPLIT, DOUBLE = "simt", "split", "double"
MMA = "mma"  # family of the fa2 kernels whose products of 16-bit numbers are tensor-core ones (numba_cuda/mma)
WGMMA = "wgmma"  # family of cupy_raw's fa2 kernels of 16-bit numbers on sm_90 (cuda/sm90)
SPLIT_INPUTS = "split inputs"  # family of cupy_raw's float32 kernels of fa2 that read parts which were split before
FEW = "few rows"  # family of numba_cpu's fa2 forward pass for few queries: one at a time, not one on each lane
FEW_MMA = "few rows, mma"  # family of cupy_raw's fa2 forward pass for few queries in 16 bits (cuda/fa2_few_rows.cu)
IJ, JI, PRODUCTS, RESIDENT, STREAMED = "ij", "ji", "products", "resident", "streamed"
_LOOPS = {
    IJ: "Q blocks outside, K/V blocks inside",
    JI: "K/V blocks outside, Q blocks inside",
    PRODUCTS: "one matrix product after the other",
    RESIDENT: "blocks of rows, K and V on chip",
    STREAMED: "blocks of rows, K and V streamed",
    "": "",
}


@dataclass(frozen=True)
class Tile:
    """One resident tile: ``rows x cols`` elements of ``itemsize`` bytes, on chip or in registers."""

    name: str
    rows: int
    cols: int
    itemsize: int
    where: str = ON_CHIP

    @property
    def elements(self) -> int:
        """``rows * cols``."""
        return self.rows * self.cols

    @property
    def bytes(self) -> int:
        """Bytes that the tile occupies."""
        return self.elements * self.itemsize


class Divided(NamedTuple):
    """The last blocks of keys of a backward pass, each of which several blocks of threads have some rows of."""

    halved: int = 0  # blocks of keys that two of them share
    others: int = 0  # and those behind these
    parts: int = 1  # how many share each of the latter, at most where there is a level
    level: int = 0  # blocks of keys: of the last ones so many of a head have one part, those before them two, and so on
    up: int = 0  # there, parts that go up
    keys: int = 0  # blocks of keys of a head

    @property
    def threads(self) -> int:
        """Blocks of threads that all of these have."""
        if self.level:
            return self.others // self.keys * sum(max(self.keys - n * self.level, 0) for n in range(self.parts))
        return 2 * self.halved + self.parts * self.others

    @property
    def more(self) -> int:
        """More blocks of threads than blocks of keys."""
        return self.threads - self.halved - self.others


@dataclass(frozen=True)
class Tiles:
    """The block sizes of one kernel and what they put on chip.

    Attributes
    ----------
    br, bc : int
        Rows of a Q block (``|I|``) and of a K/V block (``|J|``).
    resident : tuple of Tile
        What is on chip at once in the inner loop.
    chip : str
        Name of the chip planned for.
    on_chip_bytes : int or None
        M in bytes; None: no bound (tiles written by hand).
    order : str
        The loops: "ij" (Q outside), "ji" (K/V outside), "products", "resident" or "streamed".
    panel : int
        Only "products": whole rows of scores that the softmax takes at a time.
    family : str
        Of the kernels that the plan is for, see :class:`rawflash.hardware.Chip`. "split": float32 products on
        tensor cores, as sums of products of bfloat16 parts; "split inputs": the same, the inputs split
        once by a kernel of its own; "mma", "wgmma": 16-bit products there, sums in float32;
        "few rows": see :mod:`rawflash.backends.numba_cpu.few_rows`.
    parts, part_keys : int
        Only the fa2 forward pass, on a GPU that would else be idle in parts or of the family "few rows": how many
        thread blocks (pieces of work) share the keys of a block of rows, and how many keys each takes (the last
        one the rest).
    threads : int
        Of a block; 0: as many as its family always has.
    grid : int
        Thread blocks, of kernels whose blocks take one piece of work after the other; else 0.
    constants : tuple of (str, int)
        What the text of such a kernel takes as given beside the block sizes.
    lag : int
        Only the backward pass of "wgmma": blocks of threads that come at least between one that prepares rows and the
        first that reads them, or the last that adds to their dQ and the one that finishes it; 0: kernels of their own
        do that.
    parts_bytes : int
        Device memory for parts of pieces of work that these blocks share, so that they end together; 0: they do not.
    divided : Divided
        Only the backward pass of "wgmma": the last blocks of keys, each of which has several blocks of threads.
    in_order : bool
        Only there: dQ is added up in a fixed order, though none was asked for, as that is faster.

    Examples
    --------
    >>> from rawflash.hardware import chip
    >>> from rawflash.problem import Problem
    >>> from rawflash.tiling import plan_tiles
    >>> print(plan_tiles(Problem(Tq=4096, Tk=4096, d=64, dv=64, sram=65536), chip("cpu"), "forward"))
    Br = 64, Bc = 64: Q blocks outside, K/V blocks inside
      Q        64 x 64   x 4 bytes =   16384  on-chip
      O        64 x 64   x 4 bytes =   16384  on-chip
      K or V   64 x 64   x 4 bytes =   16384  on-chip
      S        64 x 64   x 4 bytes =   16384  on-chip
      65536 of M = 65536 bytes of cpu
    """

    br: int
    bc: int
    resident: tuple[Tile, ...] = ()
    chip: str = ""
    on_chip_bytes: int | None = None
    order: str = ""
    panel: int = 0
    family: str = ""
    parts: int = 1
    part_keys: int = 0
    threads: int = 0
    grid: int = 0
    constants: tuple[tuple[str, int], ...] = ()
    lag: int = 0
    parts_bytes: int = 0
    divided: Divided = Divided()
    in_order: bool = False

    @cached_property
    def smem_bytes(self) -> int:
        """Bytes of the tiles that lie in on-chip (shared) memory."""
        return sum(tile.bytes for tile in self.resident if tile.where == ON_CHIP)

    @property
    def elements(self) -> int:
        """Elements of all resident tiles."""
        return sum(tile.elements for tile in self.resident)

    def __str__(self) -> str:
        lines = [f"Br = {self.br}, Bc = {self.bc}: {_LOOPS[self.order]}".rstrip(": ")]
        width = max((len(tile.name) for tile in self.resident), default=0)
        for tile in self.resident:
            shape = f"{tile.rows} x {tile.cols}"
            lines.append(
                f"  {tile.name:<{width}}   {shape:<9} x {tile.itemsize} bytes = {tile.bytes:>7}  {tile.where}"
            )
        if self.family == SPLIT:
            lines.append("  float32 products on tensor cores, by six products of bfloat16 parts")
        if self.family == SPLIT_INPUTS:
            lines.append("  float32 products: six of bfloat16 parts on tensor cores, split once before")
        if self.family in (MMA, WGMMA) and any(tile.where == REGISTERS for tile in self.resident):
            lines.append("  products of 16-bit numbers on tensor cores; P and dS in 16, sums in 32 bits")
        if self.family == FEW:
            lines.append("  one row of K or V read for all query heads that share it")
        if self.family == FEW_MMA:
            lines.append(f"  one row of K or V read for {self.br} rows of query heads that share it, on tensor cores")
        if self.family == WGMMA:
            lines.append("  products by warpgroups (wgmma), copies by tensor maps")
        if self.parts > 1:
            lines.append(f"  keys in up to {self.parts} parts of {self.part_keys}, merged by their m and l")
        if self.parts_bytes:
            lines.append(f"  the last pieces of work shared by {self.grid} blocks of threads, {self.parts_bytes} bytes")
        if self.in_order:
            lines.append("  dQ added up in a fixed order, which is faster here")
        if self.lag:
            lines.append("  delta of later rows and dQ of earlier ones by two warps beside the products")
        if self.divided.threads:
            last = self.divided.halved + self.divided.others
            which = "last " * bool(self.lag) + str(last)
            by = "rows" if self.lag or self.divided.level else "query heads"
            lines.append(f"  the {which} blocks of keys by {self.divided.threads} blocks of threads, by {by}")
        if self.panel:
            lines.append(f"  softmax by panels of {self.panel} whole rows of scores")
        if self.on_chip_bytes is not None:
            lines.append(f"  {self.smem_bytes} of M = {self.on_chip_bytes} bytes of {self.chip}")
        return "\n".join(lines)


def padded(n: int, granule: int) -> int:
    """``n``, rounded up to a multiple of the granule."""
    return -(-n // granule) * granule
