"""FlashAttention-2, backward pass: the launcher of ``fa2_backward.cu`` (in ``cuda``, ``cuda/mma``, ``cuda/sm90``), of
``cuda/sm90/fa2_backward_wide.cu`` and of ``cuda/side_gradients.cu``."""

from __future__ import annotations

from typing import Any

from rawflash.arrays import Target
from rawflash.backends.cupy_raw.launch import (
    SIDE, Launcher, blocks_of, blocks_of_head, divisor, in_turn, launcher, side_gradients, split_inputs,
)  # fmt: skip
from rawflash.backends.cupy_raw.tensor_map import Box
from rawflash.problem import Operands, Problem
from rawflash.sections import section_and_late
from rawflash.tiling import MMA, SPLIT_INPUTS, WGMMA, WGMMA_PROCESSORS, WGMMA_SLAB, Divided, Tiles, is_wide

FILE, FILE_MMA = "fa2_backward.cu", "mma/fa2_backward.cu"
FILE_WGMMA, FILE_WIDE = "sm90/fa2_backward.cu", "sm90/fa2_backward_wide.cu"
PIECE_ROWS, PIECE_COLUMNS = 16, 8  # of dQ's sums in mma/fa2_backward.cu
WGMMA_THREADS = 384  # a warpgroup that copies, two that compute
WARPGROUP = 128  # APART: one more, for dQ
WIDE_THREADS = 512  # one that copies, three that compute
COUNTERS = 64  # a multiple of so many lies before dQ's sums
RECORD_NUMBERS = 160  # of float32 in a record of lse and delta of a block of rows
FINISHED_ROWS = 64  # of dQ, which a warp writes at once
QUARTERS = 4  # of a block of rows, which fa2_backward_finish writes
PATCH_ROWS, PATCH_COLUMNS, WARP = 16, 8, 32  # of dQ in mma/split_backward.cu, each added by a warp


def fa2_backward(problem: Problem, tiles: Tiles, x: Operands, grads: dict[str, Target]) -> None:
    """Write all of every gradient."""
    if tiles.family == SPLIT_INPUTS:
        return _split(problem, tiles, x, grads)
    if tiles.family == WGMMA:
        return _wgmma(problem, tiles, x, grads)
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
    call = _call(kernels, problem, x, grads, delta, dQ, key_blocks)
    if problem.varlen:
        kernels.clear_padding("clear_gradients", max(rows, x.k.shape[1] * x.k.shape[2]), call)
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


def _wgmma(problem: Problem, tiles: Tiles, x: Operands, grads: dict[str, Target]) -> None:
    """The same by the kernels of sm_90: dQ's sums lie in blocks of whole tiles."""
    constants = dict(tiles.constants)
    boxes = [Box("q", tiles.br), Box("k", tiles.bc), Box("v", tiles.bc), Box("dout", tiles.br)]
    if tiles.lag:
        boxes += [Box("o", tiles.br), Box("dq", FINISHED_ROWS)]
    heads, rows = x.q.shape[0] * x.q.shape[1], x.q.shape[2]
    columns, to_v = (blocks_of(n, WGMMA_SLAB) * WGMMA_SLAB for n in (problem.d, problem.dv))
    written = {"d" + name: grads[name] for name in ("q", "k", "v")}
    file, threads = (FILE_WIDE, WIDE_THREADS) if is_wide(problem) else (FILE_WGMMA, WGMMA_THREADS)
    threads += WARPGROUP * constants.get("APART", 0)
    paired = constants.get("PAIRED", 0)
    together = 1 + paired  # as many blocks of keys go through as many blocks of rows; those that do not exist are zeros
    key_blocks = blocks_of_head(problem, x, "k", tiles.bc * together) * together
    query_blocks = blocks_of_head(problem, x, "q", tiles.br * together, whole=True) * together
    blocks, all_keys = heads * query_blocks, _heads_in_turn(problem, tiles) * key_blocks
    divided, by_head = tiles.divided, constants.get("BY_HEAD", 0)
    if problem.varlen and divided.others:  # all of them, by their heads
        divided = divided._replace(others=all_keys)
    numbers, sums = tiles.br * columns * constants.get("SETS", 1), constants["SUMS"]
    schedule = x.memo.get("schedule")
    if schedule is None:
        schedule = x.memo["schedule"] = _schedule(problem, tiles, divided, key_blocks)
        schedule["share"] = blocks * (numbers * sums + RECORD_NUMBERS * paired)
    kernels = launcher(file, problem, tiles, x, written, boxes, **schedule)
    # Query heads whose rows kernels of their own prepare, and finish
    of_head = 1 if by_head else problem.group
    first, last = (schedule[name] // key_blocks * of_head for name in ("ahead", "behind"))
    if problem.varlen:  # all rows of these
        first = last = problem.Hq
    delta = side_gradients(problem, tiles, x, grads, first)
    # Before the sums what is counted: if deterministic, whose turn it is at each block of them; with a lag, for each
    # key head the blocks of threads that have prepared rows, and those that have added all of theirs; where the first
    # one stores its dQ, for each head those that have; where blocks of keys are divided, last, for each the shares that
    # are there. Behind the sums, in pairs, a record of lse and delta for each block of rows, and these shares of dK and
    # dV.
    stores = constants.get("STORES", 0)
    counters = problem.B * (2 * problem.Hkv * bool(tiles.lag) + problem.Hq * stores)
    counters += blocks * sums * problem.deterministic
    shared = all_keys // problem.group if by_head else divided.halved + divided.others
    counters += shared
    counters = blocks_of(counters, COUNTERS) * COUNTERS
    shares = all_keys * divided.parts if by_head or divided.level else divided.threads  # room for the most that one has
    dQ = kernels.workspace(counters + schedule["share"] + shares * tiles.bc * (columns + to_v))
    first_stores = stores or constants.get("FIRST_STORES", 0)
    cleared = query_blocks * first if tiles.lag and not first_stores else blocks
    if sums > 1 or first_stores and _all_see_keys(problem, x):  # several: those are not read that nobody has added to
        cleared = 0
    dQ.data.memset_async(0, 4 * (counters + numbers * cleared))
    call = _call(kernels, problem, x, grads, delta, dQ, key_blocks, counters)
    if problem.deterministic and x.addresses.keys() & {"cu_seqlens_q", "cu_seqlens_k"}:
        starts = kernels.workspace(2 * 2 * (problem.B + 1))  # 64 bits each; it lives until all kernels are launched
        call = _rising(kernels, problem, x, call, starts.data.ptr)
    if paired:
        kernels.run("fa2_backward_rows", query_blocks * first, call)
    if problem.varlen:
        kernels.clear_padding("clear_gradients", max(heads * rows, x.k.shape[1] * x.k.shape[2]), call)
    kernels.run("fa2_backward_keys", all_keys + divided.more, call, tiles.smem_bytes, threads)
    kernels.run("fa2_backward_finish", query_blocks * last * QUARTERS, call, tiles.br * columns * 2)


def _heads_in_turn(problem: Problem, tiles: Tiles) -> int:
    """Whose blocks of keys come in sections; BY_HEAD (sm90/backward.cuh) they do once for each query head."""
    return in_turn(problem, problem.Hq if dict(tiles.constants).get("BY_HEAD", 0) else problem.Hkv)


def _schedule(problem: Problem, tiles: Tiles, divided: Divided, key_blocks: int) -> dict[str, int]:
    """In which order blocks of threads come, and how far ahead and behind they work, in whole sections of heads: as
    many as there are of them where they do not, as kernels of their own then do it for all."""
    heads, sums = _heads_in_turn(problem, tiles), dict(tiles.constants).get("SUMS", 1)
    section, late = section_and_late(problem, tiles, heads, key_blocks)
    ahead = behind = total = key_blocks * heads
    if tiles.lag and sums == 1:
        at_once = section * key_blocks
        ahead = min(at_once * (1 + blocks_of(tiles.lag, at_once)), total)
        behind = total - (total - ahead) // at_once * at_once
    divisors = {"section": section * key_blocks, "heads": section, "last_heads": heads % section or section,
                "key_heads": problem.Hkv}  # fmt: skip
    words = {"section": section, "ahead": ahead, "behind": behind, "group": problem.group, "at_once": WGMMA_PROCESSORS}
    halved, others, parts, level, up, _ = divided
    words |= {"whole": up if level else key_blocks * heads - halved - others, "parts": parts}
    words["halved"] = level or halved if divided.threads else late
    return words | {f"by_{name}": divisor(n) for name, n in divisors.items()}


def _rising(kernels: Launcher, problem: Problem, x: Operands, call: Any, starts: int) -> Any:
    """The words of a call in a fixed order whose starts are on the device, where nobody has looked at them: made to
    never fall, since blocks of threads wait for others that would have no place in line. ``starts``: the
    address of these."""
    kernels.run("rising_starts", 2, kernels.call(problem, x, {"sums": starts}, call), 8 * kernels.threads)
    return kernels.call(problem, x, {
        "cu_seqlens_q.data": starts, "cu_seqlens_k.data": starts + 8 * (problem.B + 1),
        "cu_seqlens_q.bytes": 8, "cu_seqlens_k.bytes": 8,
    }, call)  # fmt: skip


def _all_see_keys(problem: Problem, x: Operands) -> bool:
    """Is it known that every row sees a key?"""
    return not (problem.ragged or problem.varlen or problem.has_band and (x.offset_given or problem.Tq > problem.Tk))


def _call(kernels: Launcher, problem: Problem, x: Operands, grads: dict[str, Target], delta: Any, dQ: Any, blocks: int,
          counters: int = 0) -> Any:  # fmt: skip
    """The words of a call; before dQ's sums there are so many counters."""
    return kernels.call(problem, x, {
        "dq.data": grads["q"].address, "dk.data": grads["k"].address, "dv.data": grads["v"].address,
        "delta.data": delta.data.ptr, "sums": 0 if dQ is None else dQ.data.ptr + 4 * counters, "blocks": blocks,
        "counters": dQ.data.ptr if counters else 0,
    })  # fmt: skip


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
        kernels.clear_padding("clear_gradients", max(slots * heads * rows, x.k.shape[1] * x.k.shape[2]), call)
    kernels.run("fa2_backward_keys", key_blocks * problem.Hkv * problem.B, call, tiles.smem_bytes)
    found = problem.B * problem.Hq * blocks_of(problem.Tq, PATCH_ROWS) * columns
    kernels.run_over("fa2_backward_finish", found, call, threads_each=WARP)
