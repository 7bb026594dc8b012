"""Run an algorithm of numpy_tiled with M elements on chip, and count what crosses their border.

The examples of these pages import it. It is the data path of ``rawflash.attention`` and
``attention_backward`` (check, look up, plan, launch) with a :class:`Memory` handed to the kernel.
"""

from dataclasses import dataclass

import numpy as np

import rawflash as rf
from rawflash.backends import lookup
from rawflash.backends.numpy_tiled.counting import counted
from rawflash.backends.numpy_tiled.memory import Memory
from rawflash.problem import check
from rawflash.tiles import Tiles
from rawflash.tiling import plan_tiles
from rawflash.traffic import Traffic, traffic


@dataclass
class Count:
    """One call: its tiles, what was counted and predicted, and its largest error."""

    tiles: Tiles
    memory: Memory  # peak, and the counts by array; print it
    counted: Traffic
    predicted: Traffic
    error: float  # largest distance from the float64 oracle, over the output or the gradients


def count(algorithm, direction, M, *, T=256, d=16, order=None, blocks=None, **options):
    """Attention of one float32 head of T rows: forward, or backward, with M elements on chip."""
    Q, K, V, dO = np.random.default_rng(0).standard_normal((4, T, d), dtype=np.float32)
    options |= {"algorithm": algorithm, "backend": "numpy_tiled", "sram": 4 * M}  # sram counts bytes
    exact = rf.oracle.attention(Q, K, V, return_lse=True, **options)
    given = {}
    if direction == "backward":
        O, lse = (array.astype(np.float32) for array in exact)
        given = {"dout": dO, "o": O, "lse": lse}
        exact = rf.oracle.attention_backward(dO, Q, K, V, O, lse, **options)

    problem, x = check(Q, K, V, **given, direction=direction, **options)
    tiles = plan_tiles(problem, lookup(problem, direction)[1], direction, order=order, blocks=blocks)
    tiles, memory, results = counted(problem, x, direction, tiles=tiles)
    found = results.values()

    error = max(float(abs(one - other).max()) for one, other in zip(found, exact, strict=True))
    predicted = traffic(problem, tiles, direction, visibility=x.visibility)
    return Count(tiles, memory, memory.traffic(), predicted, error)
