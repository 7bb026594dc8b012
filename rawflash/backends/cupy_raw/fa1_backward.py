"""FlashAttention-1, backward pass: the launcher of ``cuda/fa1_backward.cu`` and ``cuda/side_gradients.cu``."""

from __future__ import annotations

from rawflash.arrays import Target
from rawflash.backends.cupy_raw.launch import launcher, side_gradients
from rawflash.problem import Operands, Problem
from rawflash.tiling import Tiles


def fa1_backward(problem: Problem, tiles: Tiles, x: Operands, grads: dict[str, Target]) -> None:
    """Write all of every gradient."""
    kernels = launcher("fa1_backward.cu", problem, tiles, x, {"d" + name: grads[name] for name in ("q", "k", "v")})
    rows = x.q.shape[0] * x.q.shape[1] * x.q.shape[2]
    delta = side_gradients(problem, tiles, x, grads)
    dQ = kernels.workspace(rows * problem.d)
    call = kernels.call(problem, x, {
        "dq.data": grads["q"].address, "dk.data": grads["k"].address, "dv.data": grads["v"].address,
        "delta.data": delta.data.ptr, "sums": dQ.data.ptr,
    })  # fmt: skip
    if problem.varlen:
        kernels.clear_padding("clear_gradients", max(rows, x.k.shape[1] * x.k.shape[2]), call)
    kernels.run("fa1_backward", problem.Hkv * problem.B, call, tiles.smem_bytes)
