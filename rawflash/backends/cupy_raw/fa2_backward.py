"""FlashAttention-2, backward pass: the launcher of ``cuda/fa2_backward.cu`` and ``cuda/side_gradients.cu``."""

from __future__ import annotations

from rawflash.arrays import Target
from rawflash.backends.cupy_raw.launch import SIDE, blocks_of, launcher, side_gradients
from rawflash.problem import Operands, Problem
from rawflash.tiling import Tiles


def fa2_backward(problem: Problem, tiles: Tiles, x: Operands, grads: dict[str, Target]) -> None:
    """Write all of every gradient."""
    kernels = launcher("fa2_backward.cu", problem, tiles, x, {"d" + name: grads[name] for name in ("q", "k", "v")})
    rows = x.q.shape[0] * x.q.shape[1] * x.q.shape[2]
    # delta = rowsum(dO * O) - dlse
    delta = side_gradients(problem, tiles, x, grads)
    dQ = None if problem.deterministic else kernels.workspace(rows * problem.d, zero=True)
    key_blocks, query_blocks = blocks_of(problem.Tk, tiles.bc), blocks_of(problem.Tq, tiles.br)
    call = kernels.call(problem, x, {
        "dq.data": grads["q"].address, "dk.data": grads["k"].address, "dv.data": grads["v"].address,
        "delta.data": delta.data.ptr, "sums": 0 if dQ is None else dQ.data.ptr, "blocks": key_blocks,
    })  # fmt: skip
    if problem.varlen:
        kernels.run_over("clear_gradients", max(rows, x.k.shape[1] * x.k.shape[2]), call)
    kernels.run("fa2_backward_keys", key_blocks * problem.Hkv * problem.B, call, tiles.smem_bytes)
    if problem.deterministic:
        kernels.run("fa2_backward_queries", query_blocks * problem.Hq * problem.B,
                    kernels.call(problem, x, {"blocks": query_blocks}, call), tiles.smem_bytes)  # fmt: skip
    else:
        kernels.run_over("fa2_backward_finish", rows, call, threads_each=SIDE)
