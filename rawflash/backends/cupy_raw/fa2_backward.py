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
from rawflash.tiling import (
    MMA, SECTION_WAVES, SPLIT_INPUTS, WGMMA, WGMMA_PROCESSORS, WGMMA_SLAB, Divided, Tiles, heads_of_section, is_wide,
    last_end, rows_down, rows_that_see,
)  # fmt: skip

FILE, FILE_MMA = "fa2_backward.cu", "mma/fa2_backward.cu"
FILE_WGMMA, FILE_WIDE = "sm90/fa2_backward.cu", "sm90/fa2_backward_wide.cu"
PIECE_ROWS, PIECE_COLUMNS = 16, 8  # of dQ's sums in mma/fa2_backward.cu
WGMMA_THREADS = 384  # a warpgroup that copies, two that compute
WARPGROUP = 128  # APART: one more, for dQ
WIDE_THREADS = 512  # one that copies, three that compute
SECTION_BYTES = 32 << 20  # of L2, for the heads whose keys are taken in turn
SECTION_STORED, SHORT = 16 << 20, 1024  # the same where the first dQ is stored, in a fixed order up to so many keys
SECTION_LAST = 8 << 20  # the same, in a fixed order, if the last keys come first
SECTION_WIDE = 48 << 20  # the same, in a fixed order, of more columns and more keys than SHORT
SECTION_MOST, SECTION_KEYS = 64 << 20, 32  # so that fewer multiprocessors are idle; blocks of keys, in any call
BLOCK_ROWS = 128  # with as many a block of threads would be busy for as long as it takes to begin and to end
# Where dQ has several sums: bytes of these; blocks of keys for each multiprocessor that one section has at most, if it
# is the only one, and if there are others; up to what part of the least time simpler choices are preferred; how many of
# 16 blocks of keys are LATE (sm90/backward.cuh), half where a section has up to so many for each multiprocessor; and
# for how many rows these wait for each other where they begin.
SECTION_SUMS, SUMS_WAVES, SUMS_GAIN, LATE, TWO_WAVES = 96 << 20, (3.5, 3.0), 1.03, (8, 11, 13, 14), 2.1
LATE_TURN = 48.0
COUNTERS = 64  # a multiple of so many lies before dQ's sums
RECORD_NUMBERS = 160  # of float32 in a record of lse and delta of a block of rows
FINISHED_ROWS = 64  # of dQ, which a warp writes at once
QUARTERS = 4  # of a block of rows, which fa2_backward_finish writes
# Query heads in turn, where rows go down in a fixed order: so many, but so many blocks of keys for each multiprocessor;
# of more columns so many, or all, if these have so many rows.
HEADS_DOWN, TURNS_DOWN, ROWS_DOWN = (64, 8), 2, 1 << 16
# In pairs, all heads, from and up to so many blocks of keys for each multiprocessor; of these, from and up to so many,
# more than half of them, so that sections are not alike.
SECTION_PAIRED, SECTION_UNLIKE = (3.0, 6.0), (4.0, 5.2)
DETERMINISTIC_MORE = 4  # times as many heads in a fixed order that is not the last keys first
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
    if sums > 1:
        section, late = _section_of_sums(problem, tiles, key_blocks, sums)
    else:
        section, late = _section(problem, tiles, key_blocks), 0
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


def _section(problem: Problem, tiles: Tiles, key_blocks: int) -> int:
    """How many K/V heads have their keys taken in turn, long columns first: as many as L2 can hold; 1: no band. All
    multiprocessors have a block of threads: else the last head's longest ends alone. In calls of up to eight blocks of
    threads for each, or with many keys, more or fewer heads, if fewer multiprocessors are idle in the end.

    Deterministic, blocks of keys of one head wait for each other: so heads are taken in turn without a band, too, and
    more of them where a band has a lower end. Those of packed sequences without a band wait least if all heads are
    taken in turn; where rows go down, if as many are as keep every multiprocessor busy. Of batches of many columns as
    many are as L2 can hold, or all if they are few and there is a band; of few heads in pairs under one all or more
    than half.
    """
    band = problem.has_band
    if not (band or problem.deterministic):
        return 1
    constants = dict(tiles.constants)
    last_first, heads = bool(constants.get("LAST_FIRST")), in_turn(problem, problem.Hkv)
    if problem.varlen and not band:
        return max(heads, 1)
    if rows_down(problem) and not tiles.lag:
        most = max(HEADS_DOWN[is_wide(problem)] // problem.group, 1)
        if is_wide(problem):
            most = heads if not problem.varlen and heads * problem.group * problem.Tq <= ROWS_DOWN else most
        else:
            most = max(most, TURNS_DOWN * WGMMA_PROCESSORS // key_blocks)
        return max(min(most, heads), 1)
    together = 1 + constants.get("PAIRED", 0)
    waves = heads * key_blocks / WGMMA_PROCESSORS
    few = SECTION_PAIRED[0] < waves <= SECTION_PAIRED[1] and key_blocks * problem.group >= 2 * SECTION_KEYS
    if band and problem.deterministic and together > 1 and few:
        return heads // 2 + 1 if SECTION_UNLIKE[0] < waves <= SECTION_UNLIKE[1] else heads
    parts = 1 if tiles.lag else tiles.divided.parts  # all blocks of keys have as many blocks of threads
    rows = problem.Tk + problem.group * problem.Tq
    nbytes = rows * (problem.d + problem.dv) * 2 + problem.group * problem.Tq * problem.d * 4
    stores = bool(constants.get("STORES"))
    whole = SECTION_STORED if stores else SECTION_BYTES
    if problem.deterministic:
        if last_first and not tiles.lag:
            whole = SECTION_LAST
        elif band and not last_first:
            whole *= DETERMINISTIC_MORE
        elif problem.Tk <= SHORT and not tiles.lag:
            whole = SECTION_STORED
        if is_wide(problem):
            whole = SECTION_WIDE if problem.Tk > SHORT else SECTION_BYTES
    usual = whole // nbytes
    if is_wide(problem) and problem.deterministic and band and heads * nbytes <= 2 * whole:
        usual = heads
    if not (stores or problem.deterministic):
        usual = max(usual, WGMMA_PROCESSORS // (key_blocks * parts))
    most = min(max(SECTION_MOST // nbytes, usual), heads)
    if tiles.lag:
        usual = min(usual, tiles.lag // key_blocks)
    usual = max(min(usual, heads), 1)
    blocks = heads * key_blocks * parts
    if problem.varlen or stores or (blocks > SECTION_WAVES * WGMMA_PROCESSORS and key_blocks < SECTION_KEYS):
        return usual
    keys = tiles.bc * together
    steps = [rows_that_see(problem, j, keys) * problem.group / parts + BLOCK_ROWS for j in range(0, problem.Tk, keys)]
    late = len(steps) // 2 if problem.deterministic and blocks > WGMMA_PROCESSORS else 0  # key_block, sm90/backward.cuh
    order = steps[::-1] if last_first else steps
    at_last = steps[late:][::-1] + steps[:late] if last_first else steps
    lengths, last = (tuple(n for n in x for _ in range(parts)) for x in (order, at_last))
    return heads_of_section(lengths, last, heads, usual, most, WGMMA_PROCESSORS // together)


def _section_of_sums(problem: Problem, tiles: Tiles, key_blocks: int, sums: int) -> tuple[int, int]:
    """The same where dQ has several sums, and how many blocks of keys of a head are LATE (sm90/backward.cuh).

    All heads, if L2 can hold their sums and blocks of keys are few, or if these are divided under a mask; else without
    a mask as many as that (as run at once, of many columns). Under a mask so many that few multiprocessors are idle in
    the end, if possible in two turns: half of the blocks of keys are late, so that a long one begins when a short one
    has ended, or more, where they come in more turns.
    """
    heads, at_once = max(_heads_in_turn(problem, tiles), 1), WGMMA_PROCESSORS / key_blocks
    constants = dict(tiles.constants)
    group, residues = 1 if constants.get("BY_HEAD", 0) else problem.group, constants["RESIDUES"]
    columns = blocks_of(problem.d, WGMMA_SLAB) * WGMMA_SLAB
    held = max(SECTION_SUMS // (problem.Tq * group * columns * 4 * sums), 1)
    if problem.has_band and tiles.divided.threads:
        return heads, 0
    if not problem.has_band:
        most = max(min(held, int(at_once * (1.0 if is_wide(problem) else SUMS_WAVES[0]))), 1)
        return -(-heads // -(-heads // most)), 0
    one = heads <= min(held, at_once * SUMS_WAVES[0])
    sections = [heads] if one else range(1, max(min(held, int(at_once * SUMS_WAVES[1])), 1) + 1)
    steps = [rows_that_see(problem, j, tiles.bc) * group + BLOCK_ROWS for j in range(0, problem.Tk, tiles.bc)]
    ends = {}
    for section in sections:
        for n in LATE if one or section > TWO_WAVES * at_once else LATE[:1]:
            late = key_blocks * n // 16
            order = steps[late:][::-1] + steps[:late]
            turn = LATE_TURN / residues
            ends[section, late] = last_end(order, heads, section, WGMMA_PROCESSORS, turn=turn, in_turn=late)
    best = [x for x, end in ends.items() if end <= SUMS_GAIN * min(ends.values())]
    return min(best, key=lambda x: (x[1] > key_blocks // 2, abs(x[0] - 2 * at_once)))


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
