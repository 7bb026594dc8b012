"""FlashAttention-2, backward pass: the launcher of ``cuda/fa2_backward.cu`` or ``cuda/mma/fa2_backward.cu``, and of
``cuda/side_gradients.cu``."""

from __future__ import annotations

from rawflash.arrays import Target
from rawflash.backends.cupy_raw.launch import SIDE, blocks_of, launcher, side_gradients
from rawflash.problem import Operands, Problem
from rawflash.tiling import MMA, Tiles

FILE, FILE_MMA = "fa2_backward.cu", "mma/fa2_backward.cu"
PIECE_ROWS, PIECE_COLUMNS = 16, 8  # of dQ's sums in mma/fa2_backward.cu


def fa2_backward(problem: Problem, tiles: Tiles, x: Operands, grads: dict[str, Target]) -> None:
    """Write all of every gradient."""
    pieces = tiles.family == MMA and problem.backend == "cupy_raw"
    kernels = launcher(
        FILE_MMA if pieces else FILE, problem, tiles, x, {"d" + name: grads[name] for name in ("q", "k", "v")}
    )
    rows = x.q.shape[0] * x.q.shape[1] * x.q.shape[2]
    # delta = rowsum(dO * O) - dlse
    delta = side_gradients(problem, tiles, x, grads)
    numbers = _numbers_of_pieces(problem, x) if pieces else rows * problem.d
    dQ = None if problem.deterministic else kernels.workspace(numbers, zero=True)
    key_blocks = blocks_of(problem.Tk, tiles.bc)
    query_blocks = blocks_of(problem.Tq, tiles.bc if pieces and problem.deterministic else tiles.br)
    call = kernels.call(problem, x, {
        "dq.data": grads["q"].address, "dk.data": grads["k"].address, "dv.data": grads["v"].address,
        "delta.data": delta.data.ptr, "sums": 0 if dQ is None else dQ.data.ptr, "blocks": key_blocks,
    })  # fmt: skip
    if problem.varlen:
        kernels.run_over("clear_gradients", max(rows, x.k.shape[1] * x.k.shape[2]), call)
    kernels.run("fa2_backward_keys", key_blocks * problem.Hkv * problem.B, call, tiles.smem_bytes)
    by_query = kernels.call(problem, x, {"blocks": query_blocks}, call)
    if problem.deterministic:
        kernels.run("fa2_backward_queries", query_blocks * problem.Hq * problem.B, by_query, tiles.smem_bytes)
    elif pieces:
        kernels.run("fa2_backward_finish", query_blocks * problem.Hq * problem.B, by_query)
    else:
        kernels.run_over("fa2_backward_finish", rows, call, threads_each=SIDE)


def _numbers_of_pieces(problem: Problem, x: Operands) -> int:
    """Of dQ's sums (``pieces_of``): sixteen rows each, with packed sequences each from a multiple of sixteen on."""
    slots, heads, rows = x.q.shape[:3]
    each = rows // PIECE_ROWS + problem.B + 1 if problem.varlen else blocks_of(rows, PIECE_ROWS)
    return slots * heads * each * PIECE_ROWS * blocks_of(problem.d, PIECE_COLUMNS) * PIECE_COLUMNS
