"""FlashAttention-2, forward pass: the launcher of ``cuda/fa2_forward.cu``."""

from __future__ import annotations

from rawflash.arrays import Target
from rawflash.backends.cupy_raw.launch import blocks_of, launcher
from rawflash.problem import Operands, Problem
from rawflash.tiling import Tiles


def fa2_forward(problem: Problem, tiles: Tiles, x: Operands, out: Target, lse: Target) -> None:
    """Write ``out`` and ``lse``, all of both."""
    kernels = launcher("fa2_forward.cu", problem, tiles, x, {"o": out, "lse": lse})
    blocks = blocks_of(problem.Tq, tiles.br)
    call = kernels.call(problem, x, {"o.data": out.address, "lse.data": lse.address, "blocks": blocks})
    if problem.varlen:
        kernels.run_over("clear_results", x.q.shape[1] * x.q.shape[2], call)
    kernels.run("fa2_forward", blocks * problem.Hq * problem.B, call, tiles.smem_bytes)
