"""Numbers: how a dtype is read and written, and the functions of the compute dtype (numbers.cuh)."""

from __future__ import annotations

import math
from typing import Any

import numba

from rawflash.backends.numba_cuda import memory
from rawflash.backends.numba_cuda.intrinsics import exp2_approximately
from rawflash.backends.numba_cuda.memory import device

LOAD = {  # of an address: the number, widened
    "FLOAT16": memory.load_float16,
    "BFLOAT16": memory.load_bfloat16,
    "FLOAT32": memory.load_float32,
    "FLOAT64": memory.load_float64,
}
STORE = {  # at an address: the number, rounded to nearest
    "FLOAT16": memory.store_float16,
    "BFLOAT16": memory.store_bfloat16,
    "FLOAT32": memory.store_float32,
    "FLOAT64": memory.store_float64,
}
# The same for neighbours at an address that is a multiple of their bytes, as tuples.
LOADS = {(name, 1): load for name, load in LOAD.items()} | {
    ("FLOAT32", 2): memory.load_float32x2,
    ("FLOAT32", 4): memory.load_float32x4,
    ("FLOAT64", 2): memory.load_float64x2,
}
STORES = {(name, 1): store for name, store in STORE.items()} | {
    ("FLOAT16", 4): memory.store_float16x4,
    ("BFLOAT16", 4): memory.store_bfloat16x4,
    ("FLOAT32", 2): memory.store_float32x2,
    ("FLOAT32", 4): memory.store_float32x4,
    ("FLOAT64", 2): memory.store_float64x2,
}
ADD = {"FLOAT32": memory.atomic_add_float32, "FLOAT64": memory.atomic_add_float64}
LOG2E = numba.float32(1.4426950408889634)  # 1 / ln 2
INFINITE = math.inf


def exponential(c: Any) -> Any:
    """e^x. Scores stay in natural units up to here: a large one times log2(e) could overflow."""
    if c.real is numba.float64:

        @device
        def exponential(x: Any) -> Any:
            return math.exp(x)
    else:

        @device
        def exponential(x: Any) -> Any:
            return exp2_approximately(x * LOG2E)

    return exponential


if memory.SIMULATED:

    def larger(x: Any, y: Any) -> Any:
        """The greater number; the other one where one is NaN."""
        return x if x > y or y != y else y
else:

    @device
    def larger(x: Any, y: Any) -> Any:
        return max(x, y)  # one instruction, which does that
