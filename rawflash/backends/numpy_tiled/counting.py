"""One call with its loads and stores counted: the data path of :mod:`rawflash.api`, a Memory in hand."""

from __future__ import annotations

from typing import Any, NamedTuple

from rawflash.arrays import Result
from rawflash.backends import lookup
from rawflash.backends.numpy_tiled.memory import Memory
from rawflash.problem import Operands, Problem
from rawflash.tiles import Tiles
from rawflash.tiling import plan_tiles


class Counted(NamedTuple):
    """The tiles of a call, the memory that counted it, and its results by name."""

    tiles: Tiles
    memory: Memory
    results: dict[str, Any]


def counted(problem: Problem, x: Operands, direction: str, *, tiles: Tiles | None = None) -> Counted:
    """Run a numpy_tiled kernel and count what crosses the border of on-chip memory.

    Parameters
    ----------
    problem, x : Problem, Operands
        As :func:`rawflash.problem.check` returned them.
    direction : {"forward", "backward"}
    tiles : Tiles, optional
        Other tiles than the planned ones, and the loop order that they were planned for.

    Returns
    -------
    Counted
        ``results`` holds "out" and "lse", or the gradients by the names in ``x.wrt``.
    """
    kernel, chip = lookup(problem, direction)
    tiles = tiles or plan_tiles(problem, chip, direction)
    memory, result = Memory.of(problem, tiles), Result(problem, x)
    names = ("out", "lse") if direction == "forward" else tuple(dict.fromkeys(("q", "k", "v", *x.wrt)))
    targets = {name: result.canonical(name) for name in names}
    if direction == "forward":
        kernel(problem, tiles, x, targets["out"], targets["lse"], memory=memory)
    else:
        kernel(problem, tiles, x, targets, memory=memory)
    return Counted(tiles, memory, {name: result.give(name) for name in names})
