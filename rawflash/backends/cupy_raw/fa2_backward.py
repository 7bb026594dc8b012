"""FlashAttention-2, backward pass: the launcher of the kernels in ``cuda`` and ``cuda/mma``."""

from __future__ import annotations

from rawflash.arrays import Target
from rawflash.backends.cupy_raw.launch import SIDE, blocks_of, launcher, side_gradients, split_inputs
from rawflash.problem import Operands, Problem
from rawflash.tiling import SPLIT_INPUTS, Tiles

PATCH_ROWS, PATCH_COLUMNS, WARP = 16, 8, 32  # of dQ in mma/split_backward.cu, each added by a warp


def fa2_backward(problem: Problem, tiles: Tiles, x: Operands, grads: dict[str, Target]) -> None:
    """Write all of every gradient."""
    if tiles.family == SPLIT_INPUTS:
        return _split(problem, tiles, x, grads)
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


def _split(problem: Problem, tiles: Tiles, x: Operands, grads: dict[str, Target]) -> None:
    kernels = launcher(
        "mma/split_backward.cu", problem, tiles, x, {"d" + name: grads[name] for name in ("q", "k", "v")}
    )
    slots, heads, rows, d = x.q.shape
    delta = side_gradients(problem, tiles, x, grads)
    # dQ in patches of 16 rows and 8 columns; of packed sequences each begins with a patch of its own
    patches = rows // PATCH_ROWS + problem.B if problem.varlen else blocks_of(rows, PATCH_ROWS)
    columns = blocks_of(d, 2 * PATCH_COLUMNS) * 2
    dQ = kernels.workspace(slots * heads * patches * columns * PATCH_ROWS * PATCH_COLUMNS, zero=True)
    inputs, words = split_inputs(problem, tiles, x)
    key_blocks = blocks_of(problem.Tk, tiles.bc)
    call = kernels.call(problem, x, words | {
        "dq.data": grads["q"].address, "dk.data": grads["k"].address, "dv.data": grads["v"].address,
        "delta.data": delta.data.ptr, "sums": dQ.data.ptr, "blocks": key_blocks,
        "parts": patches,
    })  # fmt: skip
    if problem.varlen:
        kernels.run_over("clear_gradients", max(slots * heads * rows, x.k.shape[1] * x.k.shape[2]), call)
    kernels.run("fa2_backward_keys", key_blocks * problem.Hkv * problem.B, call, tiles.smem_bytes)
    found = problem.B * problem.Hq * blocks_of(problem.Tq, PATCH_ROWS) * columns
    kernels.run_over("fa2_backward_finish", found, call, threads_each=WARP)
