"""Block sizes from the on-chip memory M: the one place that plans tiles.

M is counted in elements. An algorithm keeps a number of *resident blocks* on chip; giving each of
them M / blocks elements makes the outer block ``floor(M / (blocks D))`` rows tall and the inner one
``min(floor(M / (blocks D)), D)``, with ``D = max(d, dv)`` (Chu, Liu, Lin, equations 43-44 and
78-79). The outer block is the tall one, because all of the inner arrays stream past it once.

=================  ===========  ==========================================  =======  =====
algorithm          outer block  resident blocks                             blocks   order
=================  ===========  ==========================================  =======  =====
fa2 forward        Q            Q, O, K or V, S                             4        ij
fa1 forward        K, V         K, V, Q or O, S                             4        ji
fa2 jvp            Q            those of fa2 forward, each with a tangent   8        ij
fa1, fa2 backward  K, V         Q, K, V, P or dS, dO, dQ, dK, dV            8        ji
fa2 backward       Q            the same eight                              8        ij
standard           Q            Q or O, K or V, S                           3        tiles
rowwise            Q            |I| x T scores; K, V whole if they fit      -        rows
=================  ===========  ==========================================  =======  =====

The formula proposes. The exact byte sum of the named tiles, each with its own item size, decides:
rows are rounded down to the chip's granule, capped at the sequence, and shrunk (the inner block
first: it costs no traffic) until the sum is at most M.

What a plan says is in ``tiles.py``. Those of the kernels for sm_90 are made in ``sm90.py``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from rawflash import sm90
from rawflash.errors import ProblemError, TileError
from rawflash.hardware import HALVES, TENSOR, Chip
from rawflash.problem import Problem
from rawflash.sm90 import (
    MMA_LONGEST, MMA_SCALES, SECTION_WAVES, WGMMA_PROCESSORS, WGMMA_ROWS, WGMMA_SLAB, heads_of_section, is_wide,
    keys_seen, last_end, rows_that_see, wgmma_section,
)  # fmt: skip
from rawflash.tiles import (
    DOUBLE, FEW, FEW_MMA, IJ, JI, MMA, ON_CHIP, PRODUCTS, REGISTERS, RESIDENT, SIMT, SPLIT, SPLIT_INPUTS, STREAMED,
    WGMMA, Divided, Tile, Tiles, padded,
)  # fmt: skip

# Launchers take from here what they need of a plan, wherever it is made
__all__ = [
    "DOUBLE", "FEW", "FEW_MMA", "IJ", "JI", "MMA", "ON_CHIP", "REGISTERS", "SECTION_WAVES", "SIMT", "SPLIT",
    "SPLIT_INPUTS", "WGMMA", "WGMMA_PROCESSORS", "WGMMA_ROWS", "WGMMA_SLAB", "Divided", "Tile", "Tiles",
    "heads_of_section", "is_wide", "keys_seen", "plan_tiles", "wgmma_section",
]  # fmt: skip

PIECES = (SPLIT, DOUBLE)  # families whose products are tensor-core pieces of 16 x 8 numbers (mma/pieces.cuh)
PIECE = 8  # columns of one
PIECES_ROWS = 128  # of a forward block: 16 for each of eight warps, so that a row is one warp's
PIECES_MOST = 64  # keys of a forward block, rows and keys of a backward one: what accumulators leave of the registers
PIECES_LEAST = 32  # rows and keys of a backward block: fewer would leave warps without a piece
DOUBLE_FORWARD = (64, 32, 24, 16)  # keys of forward blocks in which P stays: the first that fits
DOUBLE_WIDEST = 96  # columns of V beside the first of these: with more, registers are spilled
PIECES_BANKS = 32  # bytes by which neighbouring rows of a tile are apart, beyond a multiple of 32 numbers
MMA_DEPTH = 16  # numbers that a product of "mma" sums
MMA_MOST = 128  # head dimension
MMA_COLUMNS = 64  # of a tile, or twice that
# (Br, Bc) and, backward, how many blocks of Q and dO are on chip at once: what is fastest first
MMA_FORWARD = {
    64: ((128, 128), (128, 64), (128, 32), (64, 64), (64, 32)),
    128: ((128, 64), (128, 32), (64, 64), (64, 32)),
}
# The same of cupy_raw, whose widths reach further. Low blocks have more keys: what is on its way hides memory's latency
RAW_FORWARD = {
    64: ((128, 128), (128, 64), (128, 32), (64, 256), (64, 128), (64, 64), (64, 32)),
    128: ((128, 64), (128, 32), (64, 128), (64, 64), (64, 32)),
    192: ((64, 64), (64, 32)),
    256: ((64, 64), (64, 32)),
}
# At most so many where scores are more than products and a band, by one option and by several: what these leave of the
# registers
RAW_WORKED = {64: (128, 64), 128: (64, 64), 192: (64, 64), 256: (64, 64)}
RAW_SEVERAL = {64: (64, 64), 128: (64, 64), 192: (64, 64), 256: (64, 32)}
RAW_THREADS = 128  # of a forward block
RAW_SHARING = 2  # of these share a multiprocessor
RAW_LOW = 64  # rows of one where there are no more, or where taller ones would leave multiprocessors without any
RAW_STEPS = 16  # of taller ones, for each that a device has room for: from there on their keys are shared out instead
LN2 = math.log(2)
RAW_MERGE = 640  # keys that a thread block could go through while parts are merged
MMA_BACKWARD = {64: ((128, 128, 2), (64, 128, 2), (64, 64, 2), (64, 64, 1)), 128: ((64, 128, 2), (64, 64, 1))}
RAW_BACKWARD = {
    64: ((128, 128, 2), (64, 128, 2), (64, 64, 2), (64, 64, 1), (32, 32, 1)),
    128: ((64, 128, 2), (64, 128, 1), (64, 64, 1), (32, 32, 1)),
    192: ((64, 64, 2), (64, 64, 1), (32, 64, 1), (32, 32, 1)),
    256: ((128, 64, 1), (64, 64, 2), (64, 64, 1), (32, 32, 1)),
}
RAW_WIDEST = 256  # head dimension
RAW_SUMS = 128  # columns of dK or dV of 16 keys that a warp has registers for; of more, another one has the second half
RAW_LATE = 2  # blocks of Q and dO on chip, with which dS has two tiles too, and dQ of a step is added in the next one
RAW_TALL = 128  # keys of a block whose warps have 32 each, and half of the rows
RAW_FOUR = ((128, 64, 1),)  # wider than RAW_SUMS: where warps have 32 keys and a quarter of the rows
RAW_FOUR_WARPS = 4
RAW_FEW_KEYS = (64, 64, 2)  # where blocks of 128 keys would leave multiprocessors idle
RAW_FEW_KEYS_COST = 1.15  # of a number of keys in blocks of 64, in those in blocks of 128
RAW_FEW_BLOCKS = 4  # for each multiprocessor: with more, all of them are busy to the end
SPLIT_PARTS = 3  # bfloat16 numbers of a float32 one
SPLIT_LEAST = 512  # rows, and keys that a row sees: with fewer, splitting the inputs costs more than it gains
SPLIT_COLUMNS = 128  # head dimension
SPLIT_FORWARD = {64: (128, 64), 128: (128, 64)}  # (Br, Bc)
SPLIT_BACKWARD = {64: (64, 128), 128: (64, 64)}
SPLIT_BACKWARD_OF = {"sm_100": {64: (128, 64)}}  # as the assembler spills registers there; 8 % slower on sm_90
SPLIT_THREADS = 256  # of a block
FEW_QUERIES = 8  # of a head; from 12 to 16 on, lanes full of queries are faster
FEW_KEYS = 16  # rows of K or V that it may copy, to have whole vectors
FEW_BLOCK = 512  # keys of a block, at most
FEW_SCORES = 4096  # of all rows: a block has fewer keys, down to a quarter of that, where they would be more
FEW_PART = 1024  # keys that a part of them has at least
FEW_PIECES = 128  # parts of all K/V heads together: enough for threads to end together
FEW_MMA_QUERIES = 16  # of a head
FEW_RAW_BACKWARD = 1 << 30  # so that their numbers have 32 bits
FEW_MMA_WARPS = 8  # of a block of threads, of which a multiprocessor has one
FEW_MMA_ROWS = 32  # of a block, where accumulators leave registers for more than one product's
FEW_MMA_WIDE = 128  # head dimension up to which they do
FEW_MMA_STEP = 16  # keys that a warp takes at a time; 32 are slower
FEW_MMA_QUEUE = 64 << 10  # bytes of K and V on their way: more gains nothing where multiprocessors have several blocks
FEW_MMA_QUEUE_ALONE = 128 << 10  # where each has one: as many bytes, or units, as still gain; two have no room
FEW_MMA_UNITS_ALONE = 8
FEW_MMA_UNITS = 3  # of it, at least
FEW_MMA_REGISTERS = 16 * 128  # numbers of Q that a block keeps in registers
FEW_MMA_LEAST = 256  # keys for each part
FEW_MMA_START, FEW_MMA_MERGE = 1.0, 1.5  # what a thread block costs beside its turns, and what merging costs, in turns
PART_STEPS = 4  # blocks of keys that a part of them has at least
PART_MOST = 64  # parts of the keys
PART_START = 1.0  # what a thread block costs beside its steps, and what merging costs, in steps
PART_MERGE = 2.0
PART_GAIN = 1.1  # how many times faster parts have to be
SIMT_SIDE = 16  # "simt" kernels have 16 x 16 threads a block
VECTOR_BLOCKS = 16  # of rows, at least, where blocks on a CPU have more than VECTOR_LEAST_ROWS
VECTOR_LEAST_ROWS = 64
SIMT_VECTOR_BYTES = 16  # of one load from shared memory
STANDARD_BLOCKS = 3  # the two factors and the result of one matrix product
DAO_BACKWARD_BLOCKS = 4  # what Dao et al. 2022 (algorithm 4, line 1) divide M by: overflows, see plan_tiles


def grouped_width(n: int, itemsize: int) -> int:
    """How many neighbouring numbers a thread of a "simt" kernel owns in a row of ``n`` (``Grouped`` in tile.cuh).

    As many as a vector has, unless that would leave more than an eighth of the threads' work idle.
    """
    widths = [w for w in (4, 2) if w <= SIMT_VECTOR_BYTES // itemsize]
    return next((w for w in widths if 8 * padded(n, w * SIMT_SIDE) <= 9 * padded(n, SIMT_SIDE)), 1)


def pitch(n: int, itemsize: int) -> int:
    """Numbers between two rows of a "simt" tile of ``n`` columns: what threads touch, as an odd number of vectors."""
    vector = SIMT_VECTOR_BYTES // itemsize
    vectors = -(-padded(n, grouped_width(n, itemsize) * SIMT_SIDE) // vector)
    return (vectors | 1) * vector


def pieces_pitch(n: int, itemsize: int) -> int:
    """Numbers between two rows of a tile of ``n`` columns whose products are tensor-core pieces (mma/pieces.cuh)."""
    return padded(n, 32) + PIECES_BANKS // itemsize


def pitches(problem: Problem, tiles_family: str, bc: int) -> tuple[int, int, int]:
    """Numbers between two rows of on-chip tiles of a "simt" or pieces family: those of Q and K, V, and the scores."""
    item = np.dtype(problem.compute_dtype).itemsize
    if tiles_family in PIECES:
        return pieces_pitch(problem.d, item), pieces_pitch(problem.dv, item), bc + 4
    return pitch(problem.d, item), pitch(problem.dv, item), pitch(bc, item)


def family_of(problem: Problem, chip: Chip, direction: str) -> str:
    """The family of kernels for a problem on a chip."""
    if chip.family == HALVES:
        return MMA if mma_takes(problem, direction) else SIMT
    if chip.family != TENSOR:
        return chip.family
    if raw_takes(problem):
        return MMA
    return {"float32": SPLIT, "float64": DOUBLE}.get(problem.dtype, SIMT)


def mma_takes(problem: Problem, direction: str) -> bool:
    """Is this a problem for the kernels of numba_cuda/mma? What hides keys may be a band and lengths, not a mask."""
    options = (problem.bias, problem.softcap, problem.mask)
    return (
        problem.algorithm == "fa2"
        and problem.dtype in ("float16", "bfloat16")
        and problem.d == problem.dv <= MMA_MOST
        and not problem.page
        and max(problem.Tq, problem.Tk) < MMA_LONGEST
        and MMA_SCALES[0] < problem.scale < MMA_SCALES[1]
        and all(option is None for option in options)
        and not (problem.alibi or problem.dropout or (direction == "backward" and problem.deterministic))
    )


def raw_takes(problem: Problem) -> bool:
    """Is this a problem for cupy_raw's kernels in cuda/mma? Every option is."""
    return (
        problem.algorithm == "fa2"
        and problem.dtype in ("float16", "bfloat16")
        and max(problem.d, problem.dv) <= RAW_WIDEST
        and 2 * max(problem.Tq, problem.Tk) < MMA_LONGEST
    )


def scale_later(problem: Problem) -> bool:
    """May scores be scaled together with their change to powers of two? They are then finite where scores are."""
    return MMA_SCALES[0] < problem.scale <= LN2


def split_takes(problem: Problem, direction: str) -> bool:
    """Is this a problem for cupy_raw's kernels that read parts of float32 numbers, and large enough for them?"""
    options = (problem.bias, problem.softcap, problem.mask, problem.sram)
    lower, upper = problem.band.bounds()
    return (
        problem.algorithm == "fa2"
        and problem.dtype == "float32"
        and max(problem.d, problem.dv) <= SPLIT_COLUMNS
        and SPLIT_LEAST <= min(problem.Tq, problem.Tk, upper - lower + 1)
        and max(problem.Tq, problem.Tk) < MMA_LONGEST
        and all(option is None for option in options)
        and not (problem.page or problem.alibi or problem.dropout)
        and not (direction == "backward" and problem.deterministic)
    )


def mma_pitch(d: int) -> int:
    """Numbers of a row of an "mma" tile: 64 or 128, of which the matrix has ``d``."""
    return padded(d, MMA_COLUMNS)


def item_sizes(problem: Problem, chip: Chip) -> tuple[int, int]:
    """Bytes of an input element on chip, and of an accumulator's element."""
    accumulator = np.dtype(problem.compute_dtype).itemsize
    if chip.family in ("loops", "vector", SIMT, TENSOR, HALVES):
        return accumulator, accumulator  # tiles are converted when they are loaded
    return {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[problem.dtype], accumulator


def plan_tiles(
    problem: Problem, chip: Chip, direction: str, *, order: str | None = None, blocks: int | None = None
) -> Tiles:
    """Turn the on-chip memory M into block sizes.

    Parameters
    ----------
    problem : Problem
        Its ``sram``, when given, is M in bytes; else the chip's.
    chip : Chip
    direction : {"forward", "backward", "jvp"}
    order : {"ij", "ji"}, optional
        The loops of the fa2 backward pass: None and "ji" have K/V outside (algorithm 8 of Chu, Liu,
        Lin), "ij" has Q outside (algorithm 6).
    blocks : int, optional
        Divide M by this number and *skip the check*: ``blocks=DAO_BACKWARD_BLOCKS`` gives the
        ``M / (4d)`` blocks that Dao et al. 2022 state for the backward pass, which overflow M
        (numpy_tiled refuses to run them).

    Returns
    -------
    Tiles

    Raises
    ------
    TileError
        Not even the smallest legal tiles fit M.

    Examples
    --------
    >>> from rawflash.hardware import chip
    >>> tiles = plan_tiles(Problem(Tq=4096, Tk=4096, d=64, dv=64, sram=65536), chip("cpu"), "backward")
    >>> tiles.br, tiles.bc, tiles.smem_bytes <= 65536
    (32, 32, True)
    """
    if direction == "jvp" and problem.algorithm != "fa2":
        raise ProblemError(f"algorithm is {problem.algorithm!r}; expected 'fa2', which alone has forward mode")
    if problem.algorithm == "standard":
        return _standard(problem, chip, direction)
    if problem.algorithm == "rowwise":
        return _rowwise(problem, chip, direction)
    if blocks is None and order is None and sm90.wgmma_takes(problem, chip, direction):
        planned = sm90.wgmma_forward(problem, chip)
        if planned is not None:
            return planned
    if blocks is None and order in (None, JI) and sm90.wgmma_takes_backward(problem, chip, direction):
        return sm90.wgmma_backward(problem, chip)
    tiles = _flash(problem, chip, direction, order, blocks)
    if blocks is None and few_takes(problem, chip, direction):
        return _few(problem, chip, tiles)
    if blocks is None and few_mma_takes(problem, chip, direction):
        tall = problem.group * problem.Tq > MMA_DEPTH and max(problem.d, problem.dv) <= FEW_MMA_WIDE
        plans = [_few_mma(problem, chip, rows) for rows in ((FEW_MMA_ROWS, MMA_DEPTH) if tall else (MMA_DEPTH,))]
        return next((plan for plan in plans if plan), None) or _share_out(problem, chip, tiles)
    return _share_out(problem, chip, tiles) if (problem.algorithm, direction) == ("fa2", "forward") else tiles


def key_ranges(problem: Problem, br: int, bc: int, Tq: int, Tk: int, offset: int) -> list[tuple[int, int]]:
    """The keys that the band leaves to each block of ``br`` rows, from the start of a block.

    ``key_range`` in scores.cuh is the same.
    """
    lower, upper = problem.band.bounds()
    ranges = []
    for i0 in range(0, Tq, br):
        low = min(max(i0 + offset + lower, 0), Tk) // bc * bc
        ranges.append((low, min(max(min(i0 + br, Tq) + offset + upper, 0), Tk)))
    return ranges


def parts_of(tiles: Tiles, low: int, high: int) -> int:
    """Into how many parts a range of keys is divided: ``parts_of`` in fa2_forward.cu and fa2_few_rows.cu."""
    if tiles.family == FEW_MMA:
        return _few_mma_parts(max(high - low, 0), tiles.parts, tiles.bc)[0]
    return 1 if tiles.parts == 1 else min(max(-(-(high - low) // tiles.part_keys), 1), tiles.parts)


def _share_out(problem: Problem, chip: Chip, tiles: Tiles) -> Tiles:
    """Divide the keys among more thread blocks where a grid is so small, or so uneven, that multiprocessors are idle.

    What a number of parts takes is counted in steps: thread blocks, heavy ones first, go to whichever multiprocessor
    is free. Lengths are those of the arrays.
    """
    heads, rows = problem.B * problem.Hq, -(-problem.Tq // tiles.br)
    processors = (chip.processors or 0) * (RAW_SHARING if tiles.family == MMA else 1)
    merge = PART_MERGE if tiles.family != MMA else RAW_MERGE / tiles.bc
    if (chip.family == HALVES and tiles.family == MMA) or not 0 < heads * rows <= 2 * processors:
        return tiles
    ranges = key_ranges(problem, tiles.br, tiles.bc, problem.Tq, problem.Tk, problem.Tk - problem.Tq)
    steps = [max(-(-(high - low) // tiles.bc), 0) for low, high in ranges]

    def takes(part: int) -> float:
        units = [part] * sum(n // part for n in steps) + [n % part for n in steps if n % part]
        free = [0.0] * processors
        for unit in sorted(units * heads, reverse=True):
            heapq.heapreplace(free, free[0] + unit + PART_START)
        return max(free)

    longest = max(steps)
    best, part = takes(max(longest, 1)) / PART_GAIN, 0
    for parts in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, PART_MOST):
        size = -(-longest // parts)
        if size < PART_STEPS:
            break
        cost = takes(size) + merge
        if cost < best:
            best, part = cost, size
    return replace(tiles, parts=-(-longest // part), part_keys=part * tiles.bc) if part else tiles


def few_takes(problem: Problem, chip: Chip, direction: str) -> bool:
    """Is this a forward pass for numba_cpu's kernel of few rows?"""
    return (
        (chip.family, problem.algorithm, direction) == ("vector", "fa2", "forward")
        and 0 < problem.Tq <= FEW_QUERIES
    )


def _few(problem: Problem, chip: Chip, tiles: Tiles) -> Tiles:
    """Blocks and parts of the keys for few rows, where those of a group of heads fit; else the plan that there is.

    They depend on sizes alone, not on the number of threads.
    """
    rows, (item, _) = problem.group * problem.Tq, item_sizes(problem, chip)
    limit = tiles.on_chip_bytes or 0

    def resident(bc: int) -> tuple[Tile, ...]:
        return (
            Tile("Q", rows, problem.d, item),
            Tile("O", rows, problem.dv, item),
            Tile("K or V", FEW_KEYS, max(problem.d, problem.dv), item),
            Tile("S", rows, bc, item),
        )

    keys = min(max(FEW_SCORES // max(rows, 1), FEW_BLOCK // 4), FEW_BLOCK)
    bc = _down(keys, chip.granule, problem.Tk)
    while sum(tile.bytes for tile in resident(bc)) > limit:
        bc -= chip.granule
        if bc == 0:
            return tiles
    most = min(-(-problem.Tk // FEW_PART), -(-FEW_PIECES // max(problem.B * problem.Hkv, 1)))
    part_keys = max(padded(-(-problem.Tk // max(most, 1)), bc), bc)
    return replace(
        tiles, bc=bc, resident=resident(bc), family=FEW, parts=max(-(-problem.Tk // part_keys), 1), part_keys=part_keys
    )


def few_mma_takes(problem: Problem, chip: Chip, direction: str) -> bool:
    """Is this a forward pass for cupy_raw's kernel of few rows in 16 bits?"""
    return (
        (chip.family, problem.algorithm, direction) == (TENSOR, "fa2", "forward")
        and problem.dtype in ("float16", "bfloat16")
        and 0 < problem.Tq <= FEW_MMA_QUERIES
        and problem.Tk <= FEW_RAW_BACKWARD
        and not problem.varlen
    )


def _few_mma(problem: Problem, chip: Chip, br: int) -> Tiles | None:
    """A queue of K and V for each warp, as long as fits, and parts of the keys that fill the device; None: too wide.

    Lengths, which may be known on the device only, decide there how many of the parts there are (``parts_of``).
    """
    limit, d, dv = _available(problem, chip), problem.d, problem.dv
    rows = problem.group * problem.Tq
    bc = FEW_MMA_STEP
    turn = FEW_MMA_WARPS * bc
    columns = max(padded(d, 32), padded(dv, 64))

    def resident(units: int) -> tuple[Tile, ...]:
        return (
            Tile("K or V", units * turn, columns, 2),
            Tile("Q", br, padded(d, 32), 2, REGISTERS if br * padded(d, 32) <= FEW_MMA_REGISTERS else ON_CHIP),
            Tile("S", br, bc, 4, REGISTERS),
            Tile("O", br, dv, 4, REGISTERS),
        )

    fixed = sum(tile.bytes for tile in resident(0) if tile.where == ON_CHIP)
    unit = resident(1)[0].bytes
    merged = FEW_MMA_WARPS * br * (64 + 2 * 4) * 4  # 64 columns of O of all warps, and m and l of a row's four lanes
    pieces = problem.B * problem.Hkv * -(-rows // br)
    turns, processors = -(-problem.Tk // turn), chip.processors or 0
    parts, best = 1, math.inf
    for n in range(1, min(PART_MOST, max(4 * processors // max(pieces, 1), 1), max(turns // 2, 1)) + 1):
        waves = -(-pieces * n // max(processors, 1))
        cost = waves * (-(-turns // n) + FEW_MMA_START) + (FEW_MMA_MERGE if n > 1 else 0)
        if cost < best:
            parts, best = n, cost
    queued = FEW_MMA_QUEUE // unit
    if pieces * parts <= processors:
        queued = max(queued, min(FEW_MMA_QUEUE_ALONE // unit, FEW_MMA_UNITS_ALONE))
    wanted = max(queued, FEW_MMA_UNITS, -(-(merged - fixed) // unit))
    units = min((limit - fixed) // unit, wanted)
    if units < 2 or fixed + units * unit < merged:
        return None
    parts, part_keys = _few_mma_parts(problem.Tk, parts, bc)
    return Tiles(
        br, bc, resident(units), chip.name, limit, IJ, family=FEW_MMA, parts=parts, part_keys=part_keys
    )


def _few_mma_parts(keys: int, parts: int, bc: int) -> tuple[int, int]:
    """Among how many of the parts a number of keys goes round, turn by turn, and how many keys one has at most."""
    turn = FEW_MMA_WARPS * bc
    turns = -(-keys // turn)
    parts = min(max(turns // (FEW_MMA_LEAST // turn), 1), parts)
    return parts, max(-(-turns // parts), 1) * turn


def _available(problem: Problem, chip: Chip) -> int:
    if problem.sram is None:
        return chip.on_chip_bytes
    on_cpu = chip.family in ("loops", "vector")
    return problem.sram if on_cpu else min(problem.sram, chip.on_chip_bytes)  # more would not launch


def _limit(problem: Problem, chip: Chip, direction: str, what: str, needed: int) -> int:
    """M in bytes for tiles that need at least ``needed``; TileError where that is not to be had."""
    available = _available(problem, chip)
    if needed <= available:
        return available
    if problem.sram is None and not chip.hard:
        return needed
    raise TileError(
        f"no legal tiles for {problem.algorithm} {direction} with d = {problem.d}, dv = {problem.dv}: "
        f"{what} need {needed} bytes; M is {available} bytes "
        f"({chip.name if problem.sram is None else 'sram=' + str(problem.sram)})",
        needed=needed,
        available=available,
    )


def _down(rows: int, granule: int, most: int) -> int:
    """Rows rounded down to the granule, at least one granule, at most ``most`` rounded up to it."""
    rows = min(rows, -(-most // granule) * granule)
    return max(rows // granule * granule, granule)


def _shrink(outer: int, inner: int, granule: int, fits: Callable[[int, int], bool]) -> tuple[int, int]:
    """Take rows away until the blocks fit; from the inner block first, which costs no traffic."""
    while not fits(outer, inner):
        if inner > granule:
            inner -= granule
        else:
            outer -= granule
    return outer, inner


def _flash(problem: Problem, chip: Chip, direction: str, order: str | None, blocks: int | None) -> Tiles:
    """Blocks of FlashAttention-1 and -2 (equations 44 and 79)."""
    if order is None:
        order = IJ if problem.algorithm == "fa2" and direction != "backward" else JI
    granule, D = chip.granule, max(problem.d, problem.dv)
    item, _ = item_sizes(problem, chip)
    family = family_of(problem, chip, direction)
    if family == MMA and chip.family == HALVES and order == (IJ if direction == "forward" else JI) and blocks is None:
        return _mma(problem, chip, direction, order)
    if chip.family == HALVES:
        chip, family = replace(chip, family=SIMT), SIMT
    if family == SPLIT and blocks is None and split_takes(problem, direction):
        plan = _split(problem, chip, direction, order)
        if plan is not None:
            return plan
    if family in PIECES:
        return _pieces(problem, chip, direction, order)
    if family == MMA and chip.family == TENSOR and blocks is None:
        return _raw_forward(problem, chip, order) if direction == "forward" else _raw_backward(problem, chip)

    def tiles_of(outer: int, inner: int, limit: int) -> Tiles:
        br, bc = (outer, inner) if order == IJ else (inner, outer)
        resident = _flash_resident(problem, chip, direction, order, br, bc)
        return Tiles(br, bc, resident, chip.name, limit, order, family=family)

    needed = tiles_of(granule, granule, 0).smem_bytes
    limit = _available(problem, chip)
    if blocks is None:
        limit = _limit(problem, chip, direction, f"blocks of {granule} rows", needed)
    # M / (4d) or M / (8d) in elements; in bytes, each of the named blocks with its own item size.
    on_chip = (tile.itemsize for tile in tiles_of(1, 1, 0).resident if tile.where == ON_CHIP)
    row_bytes = D * (item * blocks if blocks else sum(on_chip))
    rows = limit // row_bytes
    T_outer, T_inner = (problem.Tq, problem.Tk) if order == IJ else (problem.Tk, problem.Tq)
    most = chip.most_rows or max(problem.Tq, problem.Tk)
    outer = _down(min(rows, most, _balanced(problem, chip, T_outer)), granule, T_outer)
    inner = _down(min(rows, D, most), granule, T_inner)
    if blocks is None:
        outer, inner = _shrink(outer, inner, granule, lambda o, i: tiles_of(o, i, limit).smem_bytes <= limit)
    return tiles_of(outer, inner, limit)


def _balanced(problem: Problem, chip: Chip, rows: int) -> int:
    """Rows of a block so low that the threads of a CPU share out few heads evenly, M allowing more."""
    if chip.family != "vector" or problem.sram is not None:
        return rows
    heads = max(problem.B * problem.Hq, 1)
    return max(-(-rows * heads // VECTOR_BLOCKS), VECTOR_LEAST_ROWS)


def _pieces(problem: Problem, chip: Chip, direction: str, order: str) -> Tiles:
    """Blocks whose products are tensor-core pieces, as these share out evenly; where none fit, those of "simt"."""
    limit, D, family = _available(problem, chip), max(problem.d, problem.dv), family_of(problem, chip, direction)
    item, _ = item_sizes(problem, chip)

    def tiles_of(br: int, bc: int) -> Tiles:
        resident = _flash_resident(problem, chip, direction, order, br, bc)
        return Tiles(br, bc, resident, chip.name, limit, order, family=family)

    factors = 4 if direction == "forward" else 6
    rows = limit // (factors * item * D)
    if direction == "forward":
        br, bc, least = PIECES_ROWS, _power(min(rows, PIECES_MOST, max(D, PIECES_LEAST))), chip.granule
    else:
        least = PIECES_LEAST
        bc = max(_power(min(rows, PIECES_MOST)), least)
        br = max(_power(min(rows, PIECES_MOST, D)), least)
    while tiles_of(br, bc).smem_bytes > limit and bc > least:
        if direction == "backward":
            bc //= 2
            br = min(br, bc)
        else:
            bc -= PIECE if family == DOUBLE else bc // 2
    tiles = tiles_of(br, bc)
    if tiles.smem_bytes > limit:
        return _flash(problem, replace(chip, family=SIMT), direction, order, None)
    if family == DOUBLE and direction == "forward" and problem.algorithm == "fa2" and not _worked(problem):
        return next((plan for plan in _staying(problem, chip, limit) if plan.smem_bytes <= limit), tiles)
    return tiles


def _worked(problem: Problem) -> bool:
    """Is more done with scores than products, a band and lengths?"""
    options = (problem.bias, problem.softcap, problem.mask)
    return bool(problem.alibi or problem.dropout or problem.page or any(option is not None for option in options))


def _staying(problem: Problem, chip: Chip, limit: int) -> Iterator[Tiles]:
    """Forward blocks of float64 in which P stays in registers."""
    item = np.dtype(problem.compute_dtype).itemsize
    for bc in DOUBLE_FORWARD[problem.dv > DOUBLE_WIDEST :]:
        to_d, to_dv, _ = pitches(problem, DOUBLE, bc)
        resident = (
            Tile("Q", PIECES_ROWS, to_d, item),
            Tile("K", bc, to_d, item),
            Tile("V", bc, to_dv, item),
            Tile("S", PIECES_ROWS, bc, item, REGISTERS),
            Tile("O", PIECES_ROWS, problem.dv, item, REGISTERS),
        )
        yield Tiles(PIECES_ROWS, bc, resident, chip.name, limit, IJ, family=DOUBLE, constants=(("P_STAYS", 1),))


def _mma(problem: Problem, chip: Chip, direction: str, order: str) -> Tiles:
    """The fastest blocks that fit, or where none do, those of "simt".

    Of forward blocks two share a multiprocessor: one computes while the other waits.
    """
    limit, d, columns = _available(problem, chip), problem.d, mma_pitch(problem.d)

    def forward(br: int, bc: int) -> Tiles:
        resident = (
            Tile("Q", br, columns, 2),
            Tile("K", bc, columns, 2),
            Tile("V", bc, columns, 2),
            Tile("S", br, bc, 4, REGISTERS),
            Tile("P", br, bc, 2, REGISTERS),
            Tile("O", br, d, 4, REGISTERS),
        )
        return Tiles(br, bc, resident, chip.name, limit, order, family=MMA)

    def backward(br: int, bc: int, stages: int) -> Tiles:
        resident = (
            Tile("K", bc, columns, 2),
            Tile("V", bc, columns, 2),
            Tile("Q", stages * br, columns, 2),
            Tile("dO", stages * br, columns, 2),
            Tile("dS", bc, br, 2),
            Tile("lse", stages * br, 1, 4),
            Tile("delta", stages * br, 1, 4),
            Tile("P", bc, br, 4, REGISTERS),
            Tile("dQ", br, d, 4, REGISTERS),
            Tile("dK", bc, d, 4, REGISTERS),
            Tile("dV", bc, d, 4, REGISTERS),
        )
        return Tiles(br, bc, resident, chip.name, limit, order, family=MMA)

    if direction == "forward":
        plans = [forward(*shape) for shape in MMA_FORWARD[columns]]
    else:
        plans = [backward(*shape) for shape in MMA_BACKWARD[columns]]
    sharing = direction == "forward" and problem.sram is None
    for room in (limit // 2, limit) if sharing else (limit,):
        for plan in plans:
            if plan.smem_bytes <= room:
                return plan
    return _flash(problem, replace(chip, family=SIMT), direction, order, None)


def _split(problem: Problem, chip: Chip, direction: str, order: str) -> Tiles | None:
    """Blocks of cupy_raw's kernels that read parts of float32 numbers.

    None: the loops are others, or those of the backward pass do not fit; then the forward pass too is for chips with
    less memory.
    """
    limit, to_d, to_dv = _available(problem, chip), mma_pitch(problem.d), mma_pitch(problem.dv)
    if order != (IJ if direction == "forward" else JI):
        return None

    def parts(name: str, rows: int, columns: int) -> Tile:
        return Tile(name, SPLIT_PARTS * rows, columns, 2)

    def tiles_of(br: int, bc: int, *more: Tile) -> Tiles:
        resident = (parts("Q", br, to_d), parts("K", bc, to_d), parts("V", bc, to_dv), *more)
        return Tiles(br, bc, resident, chip.name, limit, order, family=SPLIT_INPUTS, threads=SPLIT_THREADS)

    br, bc = (SPLIT_BACKWARD | SPLIT_BACKWARD_OF.get(chip.name, {}))[max(to_d, to_dv)]
    plan = tiles_of(
        br,
        bc,
        parts("dO", br, to_dv),
        parts("P or dS", bc, br),
        Tile("lse", br, 1, 4),
        Tile("delta", br, 1, 4),
        Tile("whole", 1, 4, 4),
        Tile("P", bc, br, 4, REGISTERS),
        Tile("dQ", br, problem.d, 4, REGISTERS),
        Tile("dK", bc, problem.d, 4, REGISTERS),
        Tile("dV", bc, problem.dv, 4, REGISTERS),
    )
    if plan.smem_bytes > limit:
        return None
    if direction == "backward":
        return plan
    br, bc = SPLIT_FORWARD[max(to_d, to_dv)]
    S, O = Tile("S", br, bc, 4, REGISTERS), Tile("O", br, problem.dv, 4, REGISTERS)
    return tiles_of(br, bc, Tile("whole", 1, 8, 4), S, O)


def _raw_forward(problem: Problem, chip: Chip, order: str) -> Tiles:
    """The fastest blocks of cupy_raw's forward pass that fit, or where none do, those of "simt".

    As in :func:`_mma` two share a multiprocessor. Lower ones are faster where there are few.
    """
    limit, to_d, to_dv = _available(problem, chip), mma_pitch(problem.d), mma_pitch(problem.dv)

    def tiles_of(br: int, bc: int) -> Tiles:
        resident = (
            Tile("Q or O", br, max(to_d, to_dv), 2),
            Tile("K", bc, to_d, 2),
            Tile("V", bc, to_dv, 2),
            Tile("S", br, bc, 4, REGISTERS),
            Tile("P", br, bc, 2, REGISTERS),
            Tile("O", br, problem.dv, 4, REGISTERS),
        )
        return Tiles(br, bc, resident, chip.name, limit, order, family=MMA, threads=RAW_THREADS)

    widest, options = max(to_d, to_dv), (problem.bias, problem.softcap, problem.mask)
    worked = problem.alibi + (problem.dropout > 0) + sum(option is not None for option in options)
    worked = max(worked, int(not scale_later(problem)))
    most = (RAW_SEVERAL if worked > 1 else RAW_WORKED)[widest]
    shapes = [(br, bc) for br, bc in RAW_FORWARD[widest] if not worked or (br <= most[0] and bc <= most[1])]
    if problem.sram is None and chip.processors:
        br, bc = shapes[0]
        blocks = problem.B * problem.Hq * -(-problem.Tq // br)
        steps = blocks * -(-problem.Tk // bc)
        few = blocks <= chip.processors and steps < RAW_STEPS * RAW_SHARING * chip.processors
        shapes.sort(key=lambda shape: (few or problem.Tq <= RAW_LOW) and shape[0] > RAW_LOW)
    plans = [tiles_of(*shape) for shape in shapes]
    for room in (limit // 2, limit) if problem.sram is None else (limit,):
        for plan in plans:
            if plan.smem_bytes <= room:
                return plan
    return _flash(problem, replace(chip, family=SIMT), "forward", order, None)


def _raw_backward(problem: Problem, chip: Chip) -> Tiles:
    """The same of its backward pass. Blocks of 128 keys, or of 64 if then all multiprocessors are done earlier."""
    limit, d, dv = _available(problem, chip), problem.d, problem.dv
    to_d, to_dv = mma_pitch(d), mma_pitch(dv)
    widest = max(to_d, to_dv)
    sharing = -(-widest // RAW_SUMS)  # warps of the same 16 keys

    options = (problem.bias, problem.softcap, problem.mask)
    worked = problem.alibi or problem.dropout or any(option is not None for option in options)

    def plan(br: int, bc: int, stages: int, late: bool = True) -> Tiles:
        late = late and stages == RAW_LATE and not problem.deterministic
        tall = late and not worked and bc == RAW_TALL and sharing == 1
        four = (br, bc, stages) in RAW_FOUR and sharing > 1
        late = tall or late and (2 * widest <= RAW_SUMS or sharing > 1 and not worked)
        sixteens = 2 if tall or four else 1  # of keys of a warp
        parts = max(sixteens * widest // RAW_SUMS, 1) if sharing == 1 else sharing  # of the columns of their dK and dV
        parts = RAW_FOUR_WARPS if four else parts
        resident = (
            Tile("K", bc, to_d, 2),
            Tile("V", bc, to_dv, 2),
            Tile("Q", stages * br, to_d, 2),
            Tile("dO", stages * br, to_dv, 2),
            *((Tile("P", bc, mma_pitch(br), 2),) if parts > 1 else ()),
            Tile("dS", (2 if late else 1) * bc, mma_pitch(br), 2),
            Tile("lse", stages * br, 1, 4),
            Tile("delta", stages * br, 1, 4),
            Tile("rows", 28, 1, 4),  # which of them see the keys, and where they are
            *((Tile("P", bc, br, 4, REGISTERS),) if parts == 1 else ()),
            Tile("dQ", br, d, 4, REGISTERS),
            Tile("dK", bc, d, 4, REGISTERS),
            Tile("dV", bc, dv, 4, REGISTERS),
        )
        threads = 2 * bc * sharing  # a warp for 16 keys, or two for 32
        constants = ("S_STAGES", 2 if late else 1), ("SIXTEENS", sixteens), ("COLUMN_PARTS", parts)
        return Tiles(br, bc, resident, chip.name, limit, JI, family=MMA, threads=threads, constants=constants)

    shapes = [shape for shape in RAW_BACKWARD[widest] if shape not in RAW_FOUR or not (worked or problem.deterministic)]
    tried = (plan(*shape, late) for shape in shapes for late in (True, False))
    plans = [found for found in tried if found.smem_bytes <= limit]
    if not plans:
        return _flash(problem, replace(chip, family=SIMT), "backward", JI, None)
    fewer = plan(*RAW_FEW_KEYS)
    blocks = -(-problem.Tk // plans[0].bc) * problem.B * problem.Hkv
    idle = blocks <= RAW_FEW_BLOCKS * (chip.processors or 0)  # at the end, if not from the beginning
    if idle and plans[0].bc > fewer.bc and fewer.smem_bytes <= limit and problem.sram is None:
        whole, half = (_last_end_of_keys(problem, chip, bc) for bc in (plans[0].bc, fewer.bc))
        if RAW_FEW_KEYS_COST * half < whole:
            return fewer
    return plans[0]


def _last_end_of_keys(problem: Problem, chip: Chip, bc: int) -> float:
    """When the last multiprocessor is done with blocks of ``bc`` keys, each with the rows that the band shows them.

    In pairs of a row and a key.
    """
    heads = problem.B * problem.Hkv
    lengths = [rows_that_see(problem, j, bc) * bc for j in range(0, problem.Tk, bc)]
    return last_end(lengths, heads, max(heads, 1), chip.processors or 1)


def _power(n: int) -> int:
    """The largest power of two that is at most ``n``; at least 1."""
    return 1 << max(n.bit_length() - 1, 0)


def _flash_resident(
    problem: Problem, chip: Chip, direction: str, order: str, br: int, bc: int
) -> tuple[Tile, ...]:
    """The four or eight resident blocks, by name."""
    d, dv = problem.d, problem.dv
    item, accumulator = item_sizes(problem, chip)
    if chip.family in (SIMT, TENSOR):
        family = family_of(problem, chip, direction)
        if family == SPLIT and direction == "forward":
            return _parts_on_chip(problem, order, br, bc, *pitches(problem, family, bc))
        return _factors_on_chip(problem, direction, br, bc, item, *pitches(problem, family, bc))
    if direction in ("forward", "jvp") and order == IJ:
        tiles = (
            Tile("Q", br, d, item),
            Tile("O", br, dv, accumulator),
            Tile("K or V", bc, max(d, dv), item),  # V overwrites K
            Tile("S", br, bc, accumulator),  # P overwrites S
        )
        return tiles if direction == "forward" else (*tiles, *(replace(x, name=f"{x.name}, tangent") for x in tiles))
    if direction == "forward":
        return (
            Tile("K", bc, d, item),
            Tile("V", bc, dv, item),
            Tile("Q or O", br, max(d, dv), accumulator),  # O overwrites Q
            Tile("S", br, bc, accumulator),
        )
    # Where gamma is computed in the loop, Q overwrites O; else O is gone before Q comes.
    shares = problem.algorithm == "fa1" or order == IJ
    return (
        Tile("Q or O" if shares else "Q", br, max(d, dv) if shares else d, item),
        Tile("K", bc, d, item),
        Tile("V", bc, dv, item),
        Tile("P or dS", br, bc, accumulator),
        Tile("dO", br, dv, item),
        Tile("dQ", br, d, accumulator),
        Tile("dK", bc, d, accumulator),
        Tile("dV", bc, dv, accumulator),
    )


def _factors_on_chip(
    problem: Problem, direction: str, br: int, bc: int, item: int, to_d: int, to_dv: int, to_bc: int
) -> tuple[Tile, ...]:
    """Accumulators in registers, factors of the products in shared memory, their rows a pitch apart."""
    d, dv = problem.d, problem.dv
    factors = (Tile("Q", br, to_d, item), Tile("K", bc, to_d, item), Tile("V", bc, to_dv, item))
    if direction == "forward":
        return (*factors, Tile("S", br, to_bc, item), Tile("O", br, dv, item, REGISTERS))
    return (
        *factors,
        Tile("dO", br, to_dv, item),
        Tile("P", br, to_bc, item),
        Tile("dS", br, to_bc, item),
        Tile("dQ", br, d, item, REGISTERS),
        Tile("dK", bc, d, item, REGISTERS),
        Tile("dV", bc, dv, item, REGISTERS),
    )


def _parts_on_chip(
    problem: Problem, order: str, br: int, bc: int, to_d: int, to_dv: int, to_bc: int
) -> tuple[Tile, ...]:
    """K and V as bfloat16 parts, in pairs (``ForwardTiles``, ``ResidentTiles`` in mma/split_tiles.cuh)."""
    pair = 3 * 2 * 2  # bytes of the three parts of two numbers
    Q, K, V = Tile("Q", br, to_d, 4), Tile("K", bc, to_d // 2, pair), Tile("V", bc // 2, to_dv, pair)
    P, O = Tile("S", br, to_bc, 4), Tile("O", br, problem.dv, 4, REGISTERS)
    if order == IJ:  # P overwrites K's parts; and where they land, before they are split
        landing = Tile("K or V", bc, max(to_d, to_dv), 4)
        return (Q, replace(max(K, P, key=lambda tile: tile.bytes), name="K or S"), V, landing, O)
    # They land where Q and P come later
    landing = Tile("V", bc, to_dv, 4)
    return (replace(Q, name="Q or K"), replace(max(P, landing, key=lambda tile: tile.bytes), name="S or V"), K, V, O)


def _standard(problem: Problem, chip: Chip, direction: str) -> Tiles:
    """Matrix products by tiles, softmax by panels of whole rows."""
    granule, D = chip.granule, max(problem.d, problem.dv)
    item, _ = item_sizes(problem, chip)

    def resident(br: int, bc: int) -> tuple[Tile, ...]:
        return (
            Tile("Q or O", br, D, item),
            Tile("K or V", bc, D, item),
            Tile("S", br, bc, item),
        )

    smallest = sum(tile.bytes for tile in resident(granule, granule))
    row = problem.Tk * item if direction == "forward" else 0
    what = f"one row of {problem.Tk} scores" if row > smallest else f"blocks of {granule} rows"
    limit = _limit(problem, chip, direction, what, max(smallest, row))
    M = limit // item
    br = _down(M // (STANDARD_BLOCKS * D), granule, problem.Tq)
    bc = _down(min(M // (STANDARD_BLOCKS * D), D), granule, problem.Tk)
    br, bc = _shrink(br, bc, granule, lambda o, i: sum(tile.bytes for tile in resident(o, i)) <= limit)
    panel = max(1, min(M // max(problem.Tk, 1), problem.Tq))
    return Tiles(br, bc, resident(br, bc), chip.name, limit, PRODUCTS, panel if direction == "forward" else 0)


def _rowwise(problem: Problem, chip: Chip, direction: str) -> Tiles:
    """``|I|`` whole rows of scores on chip; K and V too when M allows (equations 36-39 and 58-70)."""
    d, dv, Tk, D = problem.d, problem.dv, problem.Tk, max(problem.d, problem.dv)
    item, _ = item_sizes(problem, chip)

    def resident(order: str, br: int, bc: int) -> tuple[Tile, ...]:
        scores = [Tile("S", br, Tk, item)]
        if direction == "forward":
            rows = [Tile("Q", br, d, item), Tile("O", br, dv, item)]
            keys = [Tile("K", Tk, d, item), Tile("V", Tk, dv, item)]
            block = [Tile("K or V", bc, D, item)]
        else:
            rows = [Tile("Q or O", br, D, item), Tile("dO", br, dv, item), Tile("dQ", br, d, item)]
            scores = [Tile("P or dS", br, Tk, item), Tile("dP", br, Tk, item)]
            if problem.softcap is not None:
                scores.append(Tile("slope", br, Tk, item))
            keys = [Tile("K", Tk, d, item), Tile("V", Tk, dv, item)]
            keys += [Tile("dK", Tk, d, item), Tile("dV", Tk, dv, item)]
            block = [Tile("K or V", bc, D, item), Tile("dK or dV", bc, D, item)]
        return (*rows, *scores, *(keys if order == RESIDENT else block))

    def bytes_of(order: str, br: int, bc: int) -> int:
        return sum(tile.bytes for tile in resident(order, br, bc))

    granule = chip.granule
    needed = min(bytes_of(RESIDENT, granule, Tk), bytes_of(STREAMED, granule, granule))
    limit = _limit(problem, chip, direction, f"{granule} rows of {Tk} scores", needed)
    order, bc = RESIDENT, max(Tk, 1)
    if bytes_of(RESIDENT, granule, Tk) > limit:
        order, bc = STREAMED, _down(min(limit // item // (4 * D), D), granule, Tk)
        while bytes_of(STREAMED, granule, bc) > limit:
            bc -= granule
    fixed, per_row = bytes_of(order, 0, bc), bytes_of(order, 1, bc) - bytes_of(order, 0, bc)
    br = _down((limit - fixed) // per_row, granule, problem.Tq)
    return Tiles(br, bc, resident(order, br, bc), chip.name, limit, order)
