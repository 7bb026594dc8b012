"""FlashAttention-1, forward pass: the launcher of ``cuda/fa1_forward.cu``."""

from __future__ import annotations

from rawflash.arrays import Target
from rawflash.backends.cupy_raw.launch import launcher
from rawflash.problem import Operands, Problem
from rawflash.tiling import Tiles


def fa1_forward(problem: Problem, tiles: Tiles, x: Operands, out: Target, lse: Target) -> None:
    """Write ``out`` and ``lse``, all of both."""
    kernels = launcher("fa1_forward.cu", problem, tiles, x, {"o": out, "lse": lse})
    rows = x.q.shape[0] * x.q.shape[1] * x.q.shape[2]
    # O, m and l in device memory
    O, m, l = (kernels.workspace(rows * width) for width in (problem.dv, 1, 1))
    call = kernels.call(problem, x, {
        "o.data": out.address, "lse.data": lse.address, "sums": O.data.ptr, "m.data": m.data.ptr, "l.data": l.data.ptr,
    })  # fmt: skip
    if problem.varlen:
        kernels.clear_padding("clear_results", rows, call)
    kernels.run("fa1_forward", problem.Hq * problem.B, call, tiles.smem_bytes)
