"""FlashAttention-2, forward pass: the launcher of ``fa2_forward.cu`` (in ``cuda``, ``cuda/mma``, ``cuda/sm90``) and
``fa2_few_rows.cu``."""

from __future__ import annotations

import os
from dataclasses import replace

from rawflash.arrays import Target
from rawflash.backends.cupy_raw.launch import blocks_of, blocks_of_head, in_turn, launcher, split_inputs
from rawflash.backends.cupy_raw.tensor_map import Box
from rawflash.problem import Operands, Problem
from rawflash.tiling import (
    FEW_MMA, FEW_MMA_LEAST, MMA, SECTION_WAVES, SPLIT_INPUTS, WGMMA, WGMMA_PROCESSORS, WGMMA_ROWS, Tiles,
    heads_of_section, keys_seen, wgmma_section,
)  # fmt: skip

MERGED_ROWS = 16  # of a thread block of mma/fa2_forward.cu's merge
# In the environment: "1", the maximum of a row is followed; "0", that of the first keys stays; else as planned
EXACT_MAXIMUM = "RAWFLASH_EXACT_MAXIMUM"
WARP_ROWS = 16  # of the output, that a warp of sm90/fa2_forward.cu stores
THREADS_OF_GROUP, WARPS_OF_GROUP = 128, 4
FLOAT_BYTES = 4
PIECE_KEYS = 64  # a piece of work of sm90/fa2_forward.cu begins and ends in the time that as many keys take


def fa2_forward(problem: Problem, tiles: Tiles, x: Operands, out: Target, lse: Target) -> None:
    """Write ``out`` and ``lse``, all of both."""
    if tiles.family == FEW_MMA:
        return _few_rows(problem, tiles, x, out, lse)
    if tiles.family == WGMMA:
        return _warpgroups(problem, tiles, x, out, lse)
    blocks, parts = blocks_of(problem.Tq, tiles.br), tiles.parts
    halves = tiles.family == MMA and problem.backend == "cupy_raw"
    split = tiles.family == SPLIT_INPUTS
    file = "mma/fa2_forward.cu" if halves else "mma/split_forward.cu" if split else "fa2_forward.cu"
    kernels = x.memo.get(file) or launcher(
        file, problem, tiles, x, {"o": out, "lse": lse}, blocks=blocks, parts=parts, part_keys=tiles.part_keys
    )
    values = {"o.data": out.address, "lse.data": lse.address}
    if parts > 1:
        # O, m and l of every part; O of the first lies in the output where that has numbers as wide
        rows = x.q.shape[0] * x.q.shape[1] * x.q.shape[2]
        kept = parts - (problem.dtype == problem.compute_dtype)
        O, m, l = (kernels.workspace(rows * n) for n in (kept * problem.dv, parts, parts))
        values |= {"sums": O.data.ptr, "m.data": m.data.ptr, "l.data": l.data.ptr}
    if split:
        inputs, words = split_inputs(problem, tiles, x)
        values |= words
    call = kernels.call(problem, x, values)
    if problem.varlen:
        kernels.clear_padding("clear_results", x.q.shape[1] * x.q.shape[2], call)
    kernels.run("fa2_forward", blocks * parts * problem.Hq * problem.B, call, tiles.smem_bytes)
    if parts > 1:
        merging = blocks_of(problem.Tq, MERGED_ROWS) if halves else blocks
        kernels.run("fa2_forward_merge", merging * problem.Hq * problem.B, call)


def _few_rows(problem: Problem, tiles: Tiles, x: Operands, out: Target, lse: Target) -> None:
    rows, parts = problem.B * problem.Hq * problem.Tq, tiles.parts
    blocks = blocks_of(problem.group * problem.Tq, tiles.br)
    kernels = x.memo.get("fa2_few_rows.cu") or launcher(
        "fa2_few_rows.cu", problem, tiles, x, {"o": out, "lse": lse}, blocks=blocks, parts=parts,
        part_keys=FEW_MMA_LEAST,
    )  # fmt: skip
    values = {"o.data": out.address, "lse.data": lse.address}
    if parts > 1:  # O, m and l of every part
        O, m, l = (kernels.workspace(rows * n * parts) for n in (problem.dv, 1, 1))
        values |= {"sums": O.data.ptr, "m.data": m.data.ptr, "l.data": l.data.ptr}
        values["counters"] = kernels.counters(blocks * problem.Hkv * problem.B)
    call = kernels.call(problem, x, values)
    kernels.run("fa2_few_rows", blocks * parts * problem.Hkv * problem.B, call, tiles.smem_bytes)


def _section(problem: Problem, tiles: Tiles) -> int:
    """How many K/V heads have their pieces of work in turn, longest first: as many as L2 can hold. In calls of up to
    eight pieces for each multiprocessor up to twice as many, if fewer of these are idle in the end."""
    of_head = problem.Tk * (problem.d + problem.dv) * 2  # bytes of K and V
    heads = in_turn(problem, problem.Hkv)
    usual = min(max(wgmma_section(problem.Tk) // of_head, 1), heads)
    rows = range(0, problem.Tq, tiles.br)
    if problem.varlen or heads * problem.group * len(rows) > SECTION_WAVES * WGMMA_PROCESSORS:
        return usual
    lengths = tuple(keys_seen(problem, i, tiles.br) + PIECE_KEYS for i in reversed(rows) for _ in range(problem.group))
    return heads_of_section(lengths, lengths, heads, usual, min(2 * usual, heads), WGMMA_PROCESSORS)


def _warpgroups(problem: Problem, tiles: Tiles, x: Operands, out: Target, lse: Target) -> None:
    blocks, heads = blocks_of_head(problem, x, "q", tiles.br), in_turn(problem, problem.Hq)
    groups = tiles.br // WGMMA_ROWS
    kernels = x.memo.get("sm90/fa2_forward.cu")
    if kernels is None:
        boxes = (Box("q", tiles.br), Box("k", tiles.bc), Box("v", tiles.bc), Box("o", WARP_ROWS))
        asked = {"0": 1, "1": 0}.get(os.environ.get(EXACT_MAXIMUM, ""), dict(tiles.constants)["STATIC_MAXIMUM"])
        planned = replace(tiles, constants=(*tiles.constants, ("STATIC_MAXIMUM", asked)))
        kernels = launcher(
            "sm90/fa2_forward.cu", problem, planned, x, {"o": out, "lse": lse}, boxes, blocks=blocks,
            section=_section(problem, tiles) * problem.group,
        )  # fmt: skip
    values = {"o.data": out.address, "lse.data": lse.address}
    if dict(tiles.constants)["DYNAMIC"]:
        values["counters"] = kernels.counters(2)
    if tiles.parts_bytes:  # O, m and l of parts of pieces, and how many warps have written theirs
        parts = kernels.workspace(tiles.parts_bytes // FLOAT_BYTES)
        values["sums"] = parts.data.ptr
        values["counters"] = kernels.counters(tiles.grid)
    again = kernels.workspace(blocks * heads * groups * WARPS_OF_GROUP)  # pieces to be done again
    values["again"] = again.data.ptr
    call = kernels.call(problem, x, values)
    if problem.varlen:
        kernels.clear_padding("clear_results", x.q.shape[1] * x.q.shape[2], call)
    kernels.run("fa2_forward", tiles.grid, call, tiles.smem_bytes, THREADS_OF_GROUP * (groups + 1))
