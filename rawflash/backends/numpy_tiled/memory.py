"""A machine with two levels of memory: slow memory of any size, and M elements on chip.

A kernel computes on tiles only. A tile comes on chip by :meth:`Memory.load` or :meth:`Memory.alloc`
and goes back by :meth:`Memory.store` or :meth:`Memory.add`; the machine counts the elements that
cross, by the name of the array, and refuses a tile that does not fit. Three things are not charged
to M, as in the papers' analysis:

* row statistics, one number per row (``m``, ``l``, ``lse``, ``gamma``): they live in registers;
* an element of a product on its way into the tile that it updates;
* what is streamed past the scores element by element (bias, mask).

All of them are counted when they cross. An element counts as one whatever its width: tiles of sums
(:meth:`Memory.sums`) are float64 in every call, which is more than M in bytes would have room for.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from rawflash.errors import TileError
from rawflash.problem import Problem
from rawflash.tiles import Tiles
from rawflash.traffic import Traffic


class Memory:
    """On-chip memory of ``capacity`` elements, and the counts of what crossed its border.

    Parameters
    ----------
    capacity : int or None
        M in elements; None: no bound.
    dtype : dtype_like
        The compute dtype, which tiles are converted to.

    Attributes
    ----------
    loads, stores : Counter
        Elements moved on chip and off it, by the name of the array.
    resident : dict of str to int
        Elements on chip now, by the name of their place.
    peak : int
        The most elements that were on chip at once.

    Examples
    --------
    >>> memory = Memory(6)
    >>> Q = memory.load("Q", np.ones((2, 2)))
    >>> memory.loads["Q"], memory.peak
    (4, 4)
    >>> S = memory.alloc("S", (2, 2))
    Traceback (most recent call last):
    rawflash.errors.TileError: tile S of 2 x 2 elements does not fit: 4 of M = 6 are taken (Q 4)
    """

    def __init__(self, capacity: int | None = None, dtype: npt.DTypeLike = np.float32) -> None:
        self.capacity = capacity
        self.dtype = np.dtype(dtype)
        self.loads: Counter[str] = Counter()
        self.stores: Counter[str] = Counter()
        self.resident: dict[str, int] = {}
        self.peak = 0

    @classmethod
    def of(cls, problem: Problem, tiles: Tiles) -> Memory:
        """The memory that ``tiles`` were planned for."""
        dtype = np.dtype(problem.compute_dtype)
        return cls(None if tiles.on_chip_bytes is None else tiles.on_chip_bytes // dtype.itemsize, dtype)

    # ---- tiles on chip ---------------------------------------------------------------------------

    def alloc(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A tile of zeros. It takes the place of the tile that was called ``name`` before."""
        size = int(np.prod(shape))
        others = {other: elements for other, elements in self.resident.items() if other != name}
        taken = sum(others.values())
        if self.capacity is not None and taken + size > self.capacity:
            held = ", ".join(f"{other} {elements}" for other, elements in others.items())
            raise TileError(
                f"tile {name} of {' x '.join(map(str, shape))} elements does not fit: "
                f"{taken} of M = {self.capacity} are taken ({held})",
                needed=(taken + size) * self.dtype.itemsize,
                available=self.capacity * self.dtype.itemsize,
            )
        self.resident = others | {name: size}
        self.peak = max(self.peak, taken + size)
        return np.zeros(shape, self.dtype)

    def sums(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A tile of zeros to add to, step after step: of float64, so that errors do not grow with the steps."""
        return self.alloc(name, shape).astype(np.float64)

    def load(self, name: str, array: np.ndarray, *, into: str | None = None) -> np.ndarray:
        """A copy of a block of slow memory on chip.

        Parameters
        ----------
        name : str
            The array that the block belongs to.
        array : ndarray
            The block: a view of slow memory. One axis: row statistics, not charged to M.
        into : str, optional
            The place it takes, over the tile that is there; ``name`` when left out.
        """
        self.loads[name] += array.size
        tile = np.zeros(array.shape, self.dtype) if array.ndim == 1 else self.alloc(into or name, array.shape)
        tile[...] = array
        return tile

    def free(self, *names: str) -> None:
        """Give up tiles; all of them when none is named."""
        for name in names or tuple(self.resident):
            self.resident.pop(name, None)

    # ---- slow memory -----------------------------------------------------------------------------

    def store(self, name: str, tile: np.ndarray, array: np.ndarray) -> None:
        """Write a tile to a block of slow memory, rounded to the dtype of ``array``."""
        self.stores[name] += array.size
        array[...] = tile

    def add(self, name: str, tile: np.ndarray, array: np.ndarray) -> None:
        """Add a tile to a block of slow memory, as float32 atomics do: one store and no load."""
        self.stores[name] += array.size
        array += tile

    def stream(self, name: str, array: np.ndarray) -> np.ndarray:
        """Read elements where they are used, without keeping them on chip."""
        self.loads[name] += array.size
        return array.astype(self.dtype)

    def workspace(self, result: np.ndarray) -> np.ndarray:
        """Slow memory to accumulate a result in: itself, or zeros in the compute dtype if it is narrower."""
        return result if result.dtype == self.dtype else np.zeros(result.shape, self.dtype)

    def round(self, name: str, workspace: np.ndarray, result: np.ndarray) -> None:
        """Round a :meth:`workspace` into its result: one load and one store, or nothing if they are one."""
        if workspace is not result:
            self.store(name, self.stream(name, workspace), result)

    # ---- the result of counting ------------------------------------------------------------------

    def traffic(self) -> Traffic:
        """The counts as the record that :func:`rawflash.traffic.traffic` predicts."""
        return Traffic.of(self.loads, self.stores)

    def __str__(self) -> str:
        bound = "no bound" if self.capacity is None else f"M = {self.capacity}"
        return f"peak {self.peak} elements on chip, {bound}\n{self.traffic()}"


def product(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """``A @ B``, summed in float64.

    For sums over rows or keys. A BLAS library may add thousands of float32 terms one after the other,
    which is off by as many roundings; which of them does so, and when, differs from machine to machine.
    """
    return np.matmul(A, B, dtype=np.float64)
