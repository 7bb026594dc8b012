"""Block sizes from the on-chip memory M: the one place that plans tiles."""

from __future__ import annotations

from dataclasses import dataclass

from rawflash.hardware import Chip
from rawflash.problem import Problem


@dataclass(frozen=True)
class Tiles:
    br: int
    bc: int


def plan_tiles(problem: Problem, chip: Chip, direction: str) -> Tiles:
    return Tiles(64, 64)
