"""Tiles of the kernels in ``backends/cupy_raw/cuda/sm90``: which calls are theirs, how large blocks are, and how the
work is shared out among blocks of threads, forward and backward.

The tables are measured (``bench/notes/sm90.md``). ``sections.py`` says in which order blocks of keys come backward.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from rawflash.hardware import TENSOR, Chip
from rawflash.problem import Problem
from rawflash.tiles import IJ, JI, REGISTERS, WGMMA, Divided, Tile, Tiles, padded

# Of the 16-bit kernels of other chips, too
MMA_LONGEST = 1 << 30  # rows and keys: they count in 32 bits
MMA_SCALES = (1e-30, 1e30)  # between which scores can be had from unscaled ones by one multiplication in float32

WGMMA_CHIP = "sm_90"  # code for sm_90a runs on no other
WGMMA_LEAST = 16  # rows: fewer, or as many, are the few-rows kernel's
WGMMA_MOST = 256  # head dimension
WGMMA_LONGEST = 1 << 30  # rows and keys, so that their numbers have 32 bits
WGMMA_PIECES = 1 << 27  # pieces of work: each warp of each has a number
WGMMA_SCALES = (1e-20, 1e20)
WGMMA_SLAB = 64  # columns of 16 bits that lie together, see sm90/hopper.cuh
WGMMA_ROWS = 64  # of a warpgroup
WGMMA_REST = 2688  # bytes: barriers, what pieces of work are
WGMMA_PROCESSORS = 132  # of a device that was not asked
# Pieces of work for each multiprocessor, forward; with fewer, cuda/mma is faster, which shares keys out.
WGMMA_FEWEST = 0.4
WGMMA_BALANCED_LEAST = 16  # blocks of keys of a piece that blocks of threads may share
WGMMA_BALANCED_COST = 8.0  # what that costs, in blocks of keys
WGMMA_PART_REST = 8  # numbers of a row of a part beside its sums
WGMMA_BALANCED_MOST = 1 << 30  # blocks of keys of all shared pieces, so that their numbers have 32 bits
# Bytes of K and V that stay in L2, of a section of heads whose pieces come longest first. In calls of few keys the
# first pieces of a section read them from device memory and the others compute: small sections have both at once.
WGMMA_SECTION, WGMMA_SECTION_SHORT, WGMMA_SHORT = 32 << 20, 8 << 20, 1024
WGMMA_BACKWARD = {64: 128, 128: 64}  # Br, by the wider of d and dv
WGMMA_BACKWARD_KEYS = 128  # Bc
WGMMA_BACKWARD_APART = 128  # Br where a warpgroup of its own computes dQ and adds it
WGMMA_BACKWARD_MOST = 256  # head dimension
WGMMA_BACKWARD_STAGES, WGMMA_BACKWARD_S = {64: 3, 128: 2}, 2  # blocks of Q and dO on chip at once, by Br, and of dS
# Blocks of threads prepare and finish rows of others while they compute: under a mask from so many of them for each
# multiprocessor on (by whether there is a fixed order: singly; in pairs); without one where it takes at most so many
# times as many steps as else (singly; in pairs, which are faster; in these in a fixed order), of which each of those
# among which the last blocks of keys are divided by rows costs so many more. From so many blocks of keys on, and where
# at least so many rows see one, on average (by the wider of d and dv); so many multiprocessors' blocks later and
# earlier. In a fixed order from more rows on (without a mask, of whole blocks): without this the first one to add
# stores, and there is less to gain.
WGMMA_FUSED = {False: (4.0, 1.9), True: (4.0, 0.4)}
WGMMA_FUSED_GAIN, WGMMA_SHARE_COST = (1.0, 1.1, 1.19), 0.5
WGMMA_FUSED_KEYS, WGMMA_FUSED_LAG = 4, 1.0
WGMMA_FUSED_ROWS, WGMMA_FUSED_IN_ORDER = {64: 256, 128: 448}, {64: math.inf, 128: 768}
WGMMA_FUSED_STAGES = 2
NO_SUMS = {"SUMS": 1, "RESIDUES": 1, "DIAGONAL": 0}
# Blocks of threads that the last blocks of keys are divided among, at most, and what one more costs, in steps.
WGMMA_DIVIDED_MOST, WGMMA_DIVIDED_COST = 8, 6.0
# All blocks of keys, where they are few: among so many at most, and of the time without it so much at most. In a fixed
# order without a mask up to so many (twice as many where up to so many query heads share keys), or as there are query
# heads of a key head; and of the time that it takes to divide the last ones by rows instead so much at most. Where
# query heads share keys under a mask, when all are done is simulated: what a block of threads costs, and more where it
# shares a block of keys, in steps; how much longer parts of unlike numbers of heads take (as parts that were not timed
# are tried, too, more is asked of them where heads can be divided evenly); how many heads a part has at most in a fixed
# order, if that gains. There any gain is enough.
WGMMA_HEADS_MOST, WGMMA_HEADS_GAIN, WGMMA_HEADS_FEW, WGMMA_HEADS_ROWS = 16, 0.9, 4, 1.12
WGMMA_HEADS_COST, WGMMA_HEADS_UNEVEN, WGMMA_HEADS_IN_ORDER = (4.0, 3.0), (1.05, 1.15), 4
# Query heads of a key head from which on, under a mask, the same rows of all of them come together, if not in pairs (by
# whether sequences are packed). Where rows or keys are more than so many.
WGMMA_TOGETHER, WGMMA_TOGETHER_ROWS = {False: 4, True: 8}, 512
# In a fixed order such rows go down, from more than so many on; with fewer blocks of keys for each multiprocessor than
# so many, or where from and up to so many query heads share them from and up to so many, no pairs.
WGMMA_DOWN_ROWS, WGMMA_DOWN_WAVES, WGMMA_DOWN_SINGLY = 256, 1.6, (3, 5, (2.0, 2.75), (3.9, 4.9))
# Several sums of dQ in a fixed order: up to so many blocks of keys for each multiprocessor (by the wider of d and dv;
# whether there is a mask); with at most so many times as many rows as keys, or keys as rows; up to so many bytes of all
# of them (of many columns under a mask only these count where query heads share so many blocks of keys); and under a
# mask with at most so many query heads of a key head (by whether there are more than 64 columns), or BY_HEAD up to so
# many blocks for each multiprocessor (by whether a head has as many as below; of more than 64 columns with more than
# WGMMA_HEADS_FEW query heads of a key head and fewer blocks of keys than WGMMA_SUMS_USUAL), with more than so many
# query heads of a key head at most so many (by whether there are more than 64 columns).
WGMMA_SUMS: dict[int, tuple[float, float]] = {64: (32.0, 12.0), 128: (4.0, 3.0), 256: (8.0, 12.0)}
WGMMA_SUMS_UNEVEN, WGMMA_SUMS_BYTES, WGMMA_SUMS_WIDE = 8.0, 1 << 30, 16
WGMMA_SUMS_GROUP, WGMMA_SUMS_BY_HEAD = {False: 4, True: 2}, (3.0, 4.0, 1.3)
WGMMA_SUMS_HEADS = {False: {16: 2.0}, True: {8: 3.2, 16: 2.0}}
# Short calls, in which turns take less than from one block of keys to the next, or there are sections whose rows L2
# holds, gain less than sums cost. Under a mask: with fewer blocks of keys of a head than so many, but for so many (of
# two query heads of a key head, and else) where there are at most so many for each multiprocessor, or, of one, from
# below on up to so many; with up to so many, where there would be from and up to so many for each multiprocessor.
WGMMA_SUMS_KEYS, WGMMA_SUMS_PARTS, WGMMA_SUMS_FEW, WGMMA_SUMS_LATE = 8, (4, 6), 0.25, 3.0
WGMMA_SUMS_USUAL, WGMMA_SUMS_ONCE = 12, (0.85, 1.0)
# As many query heads as WGMMA_HEADS_FEW: only those that are DIAGONAL, and from and up to so many.
WGMMA_SUMS_FULL = (1.8, 2.0)
# Without one: pairs of numbers of blocks of keys of a head, and for each multiprocessor, at most so many of the first
# and more than so many of the second (by the wider of d and dv); of many columns, not more than two turns.
WGMMA_SUMS_SHORT = {64: ((5, 2.1), (23, 8.0)), 128: ((1, 0.0), (11, 1.0)), 256: ((8, 1.0),)}
# Pairs instead, where two query heads share keys, from so many blocks of keys of a head on, and for each
# multiprocessor.
WGMMA_SUMS_PAIRS = (24, 2.7)
# Without a mask, where blocks of keys are divided by the query heads that share them, up to so many bytes. Of more, if
# there are so many for each multiprocessor, they are divided by rows instead, if any; else there is one sum, or pairs
# with two, of a head with as many blocks of keys as WGMMA_SUMS_USUAL.
WGMMA_SUMS_TOGETHER = (0.3, 46 << 20)
# Different ones of neighbouring blocks of keys: where there are so many blocks of rows for each of those for each
# multiprocessor (in cuda/sm90/fa2_backward.cu; fa2_backward_wide.cu); of many columns not where sections of two for
# each multiprocessor (so many, which the last one may exceed) are more than two and have fewer on average, nor in two
# of these where blocks of rows are fewer than for the other kernel. Twice as many where rows have so many blocks, and
# some blocks of keys are divided in two and others in four or more.
WGMMA_SUMS_ROWS, WGMMA_SUMS_WAVES, WGMMA_SUMS_UNLIKE = (12.0, 10.0), (2.1, 1.65), 64
# DIAGONAL: up to so many for each multiprocessor (of a head with fewer blocks of keys than WGMMA_SUMS_USUAL; than so
# many; or more). In rows, what it costs to begin and to end a block of threads, to share a block of keys, and each of
# the sums that are added up in the end. About so many lengths of parts are tried.
WGMMA_DIAGONAL, WGMMA_DIAGONAL_KEYS = (0.85, 1.3, 1.5), 32
WGMMA_DIAGONAL_COST, WGMMA_DIAGONAL_TRIED = (128.0, 192.0, 64.0), 64
# A fixed order where none is asked for (by the wider of d and dv): with so many query heads of a key head or more, up
# to so many blocks of keys for each multiprocessor; above 192 columns with so many query heads, too, where so many
# times as many turns as needed are begun, up to so many. Of fewer columns with so many query heads, from and up to so
# many blocks of keys, in more than one turn, but not from and up to so many. Without a mask up to 192 columns from and
# up to so many blocks of keys, if there is one sum; of fewer columns from so many on where so many times as many turns
# as needed are begun, up to so many. With at most so many times as many rows as keys, or keys as rows.
WGMMA_ORDER_WIDE: dict[int, dict[int, float]] = {
    192: {4: math.inf, 2: 1.5}, 256: {8: 8.0, 5: 6.0, 2: 1.8}
}  # fmt: skip
WGMMA_ORDER_ROOM, WGMMA_ORDER_KEYS = (3, 1.05, 6.0), (16, 256)
WGMMA_ORDER_SHORT, WGMMA_ORDER_DIVIDED, WGMMA_ORDER_UNEVEN = (3, 3, 9, 1.9, 2.0), (16, 1.3, 4.0), 2.0
# Of rows that see a block of keys, on average: from so many on two blocks of threads go through them together; in a
# fixed order wherever they can. Of an odd number of blocks of keys the last one is beside one that does not exist: from
# so many on (by whether there is a fixed order, and a mask). In a fixed order without a mask from so many on, up to so
# many for each multiprocessor (of one query head of a key head; of more).
WGMMA_PAIRED_ROWS, WGMMA_PAIRED_ODD_FEW = 2048, (7, 3.0, 7.0)
WGMMA_PAIRED_ODD = {(False, False): 20, (False, True): 34, (True, False): 9, (True, True): 17}
# The first one of a causal band stores its dQ, so that no sums are cleared: up to so many rows and keys (by the wider
# of d and dv), where there are so many heads for each multiprocessor; and from so many rows on others prepare some, in
# a fixed order under a mask, too.
WGMMA_STORED, WGMMA_STORED_HEADS, WGMMA_FUSED_STORED = {64: 1024, 128: 1536}, 0.72, {64: 256, 128: math.inf}
# Pieces of work of the last sections of heads, whose end is simulated; of the whole time what less of it has to be.
SIMULATED_PIECES, SECTION_GAIN = 1024, 0.02
SECTION_WAVES = 8  # pieces for each multiprocessor, in calls of which a section may have more heads
WGMMA_WIDE = 64  # Br and Bc where d or dv is above those of WGMMA_BACKWARD
WGMMA_WIDE_STAGES = ((3, 2), (3, 1), (2, 2), (2, 1))  # of Q and dO, and of P, on chip: the first that fit
WGMMA_WIDE_DQ = 64  # columns of dQ that one product has


@dataclass(frozen=True)
class WarpgroupForward:
    """How the forward kernel of sm_90 is laid out.

    Attributes
    ----------
    br, bc : int
        64 rows for each warpgroup that multiplies.
    turns : bool
        These begin their products in turn.
    stages : int
        K and V that are on chip at once.
    least, most : int
        Rows of a head below and above which the next row of the table is faster.
    band : bool
        So it is but for a band (causal, a window) of whole sequences, or packed ones.
    own : bool
        Each warpgroup goes through those blocks of keys only that its rows see. Not with turns, of which all have to
        take as many.
    q_stays : bool
        Q of a piece of work is in registers.
    """

    br: int
    bc: int
    turns: bool = True
    stages: int = 2
    least: int = 0
    most: int = WGMMA_LONGEST
    band: bool = False
    own: bool = False
    q_stays: bool = False


# By columns of the wider of K and V, in slabs: the first that fits, or for softcap and ALiBi the last, which leaves
# them registers
WGMMA_FORWARD = {
    64: (WarpgroupForward(256, 64, turns=False, stages=8, least=193, own=True), WarpgroupForward(128, 128)),
    128: (
        WarpgroupForward(192, 64, turns=False, stages=4, least=193, most=8192, band=True, own=True),
        WarpgroupForward(128, 128, most=2048),
        WarpgroupForward(128, 128, q_stays=True),
        WarpgroupForward(128, 96),
    ),
    192: (WarpgroupForward(128, 128), WarpgroupForward(128, 96)),
    256: (WarpgroupForward(128, 64, most=2048), WarpgroupForward(128, 80), WarpgroupForward(128, 64)),
}
# Of a thread that copies, and of one that multiplies, by warpgroups
WGMMA_REGISTERS = {2: (24, 240), 3: (32, 160), 4: (32, 112)}


def wgmma_takes(problem: Problem, chip: Chip, direction: str) -> bool:
    """Is this a problem for the kernels of cupy_raw/cuda/sm90? What hides keys may be a band and lengths."""
    d, dv = problem.d, problem.dv
    return (
        (chip.family, chip.name, direction) == (TENSOR, WGMMA_CHIP, "forward")
        and problem.algorithm == "fa2"
        and problem.dtype in ("float16", "bfloat16")
        and d % 8 == dv % 8 == 0
        and max(d, dv) <= WGMMA_MOST
        and problem.boxes
        and not (problem.page or problem.dropout)
        and problem.bias is None
        and problem.mask is None
        and problem.sram is None
        and problem.Tq > WGMMA_LEAST
        and problem.Tk > 0
        and max(problem.Tq, problem.Tk) < WGMMA_LONGEST
        and problem.B * problem.Hq * -(-problem.Tq // (2 * WGMMA_ROWS)) < WGMMA_PIECES
        and WGMMA_SCALES[0] < problem.scale < WGMMA_SCALES[1]
        and WGMMA_SCALES[0] < problem.scale / (problem.softcap or 1.0) < WGMMA_SCALES[1]
        and problem.B * problem.Hq * -(-problem.Tq // (2 * WGMMA_ROWS)) >= WGMMA_FEWEST * (chip.processors or 0)
    )


def wgmma_takes_backward(problem: Problem, chip: Chip, direction: str) -> bool:
    """Is this a backward pass for cuda/sm90? What hides keys may be a band and lengths, not a mask."""
    options = (problem.bias, problem.mask, problem.sram)
    return (
        (chip.family, problem.algorithm, direction) == (TENSOR, "fa2", "backward")
        and chip.name == WGMMA_CHIP
        and problem.boxes
        and problem.dtype in ("float16", "bfloat16")
        and all(0 < n <= WGMMA_BACKWARD_MOST and n % 8 == 0 for n in (problem.d, problem.dv))
        and 0 < min(problem.B, problem.Tq, problem.Tk) <= max(problem.Tq, problem.Tk) < MMA_LONGEST
        and MMA_SCALES[0] < problem.scale < MMA_SCALES[1]
        and MMA_SCALES[0] < problem.scale / (problem.softcap or 1.0) < MMA_SCALES[1]
        and (problem.softcap or 1.0) < MMA_SCALES[1]
        and all(option is None for option in options)
        and not (problem.page or problem.dropout)
    )


def wgmma_forward(problem: Problem, chip: Chip) -> Tiles | None:
    """The first row of the table that fits: Q twice and O on its own, if there is room, so that pieces overlap."""
    limit, processors = chip.on_chip_bytes, chip.processors or WGMMA_PROCESSORS
    to_d, to_dv = (padded(n, WGMMA_SLAB) for n in (problem.d, problem.dv))
    lower, upper = problem.band.lower, problem.band.upper
    lengths = problem.varlen or problem.ragged
    uneven = lower is not None or upper is not None or lengths  # pieces of work
    shapes = WGMMA_FORWARD[max(to_d, to_dv)]
    for shape in shapes[-1:] if problem.softcap is not None or problem.alibi else shapes:
        br, bc = shape.br, shape.bc
        groups = br // WGMMA_ROWS
        # The longest of packed sequences may be far longer than most, or their number of rows if it is not known here
        most = WGMMA_LONGEST if shape.band and problem.varlen else shape.most
        if not shape.least <= problem.Tq <= most or (shape.band and (lower is upper is None or problem.ragged)):
            continue
        for buffers, own in ((2, True), (2, False), (1, True), (1, False)):
            resident = [
                Tile("Q", buffers * br, to_d, 2),
                Tile("K", shape.stages * bc, to_d, 2),
                Tile("V", shape.stages * bc, to_dv, 2),
                *([Tile("O", br, to_dv, 2)] if own else []),
                Tile("barriers", 1, WGMMA_REST, 1),
                *([Tile("Q", br, to_d, 2, REGISTERS)] if shape.q_stays else []),
                Tile("S", br, bc, 4, REGISTERS),
                Tile("P", br, bc, 2, REGISTERS),
                Tile("O", br, problem.dv, 4, REGISTERS),
            ]
            pieces = -(-problem.Tq // br) * problem.B * problem.Hq
            worked = problem.softcap is not None or problem.alibi  # scores that take many registers
            balanced = not uneven and not worked and _is_shared(pieces, -(-problem.Tk // bc), processors)
            constants = {
                "Q_BUFFERS": buffers, "STAGES": shape.stages, "OWN_O": int(own), "TURNS": int(shape.turns),
                "EVERY_OWN": int(shape.own), "Q_STAYS": int(shape.q_stays), "BALANCED": int(balanced),
                "STATIC_MAXIMUM": int(problem.dtype == "bfloat16"), "DYNAMIC": int(uneven),
                "LOWER": int(lower is not None), "RAGGED": int(problem.ragged),
                "PRODUCER_REGISTERS": WGMMA_REGISTERS[groups][0], "CONSUMER_REGISTERS": WGMMA_REGISTERS[groups][1],
            }  # fmt: skip
            tiles = Tiles(
                br, bc, tuple(resident), chip.name, limit, IJ, family=WGMMA,
                grid=processors if balanced else min(processors, pieces), constants=tuple(constants.items()),
                parts_bytes=processors * br * (to_dv + WGMMA_PART_REST) * 4 if balanced else 0,
            )  # fmt: skip
            if tiles.smem_bytes <= limit:
                return tiles
    return None


def _is_shared(pieces: int, key_blocks: int, processors: int) -> bool:
    """Are the last of these pieces, which are alike, to be shared by blocks of threads, one for each multiprocessor?

    If the time that these would else be idle in the end is more than sharing costs.
    """
    return (
        key_blocks >= WGMMA_BALANCED_LEAST
        and -pieces % processors / processors * key_blocks > WGMMA_BALANCED_COST
        and 2 * processors * key_blocks < WGMMA_BALANCED_MOST
    )


def wgmma_section(keys: int) -> int:
    """Bytes of K and V of the heads whose pieces of work come longest first in the forward kernel of sm_90."""
    return WGMMA_SECTION_SHORT if keys <= WGMMA_SHORT else WGMMA_SECTION


def is_wide(problem: Problem) -> bool:
    """Are these columns for cuda/sm90/fa2_backward_wide.cu?"""
    return max(problem.d, problem.dv) > max(WGMMA_BACKWARD)


def wgmma_backward(problem: Problem, chip: Chip) -> Tiles:
    """The blocks of cuda/sm90/fa2_backward.cu, or of fa2_backward_wide.cu; they fit."""
    processors = chip.processors or WGMMA_PROCESSORS
    if not problem.deterministic and _order_gains(problem, processors):
        return replace(wgmma_backward(replace(problem, deterministic=True), chip), in_order=True)
    d, dv = padded(problem.d, WGMMA_SLAB), padded(problem.dv, WGMMA_SLAB)
    if is_wide(problem):
        found = (_wgmma_wide(problem, chip, d, dv, *stages) for stages in WGMMA_WIDE_STAGES)
        return next(tiles for tiles in found if tiles)
    alone = _wgmma_keys(problem, chip, d, dv, 0)
    if not _can_be_fused(problem):
        return alone
    fused = _wgmma_keys(problem, chip, d, dv, max(int(WGMMA_FUSED_LAG * processors), 1))
    fits = fused.smem_bytes <= chip.on_chip_bytes
    return fused if fits and _fused_is_faster(problem, fused, alone, processors) else alone


def _fused_is_faster(problem: Problem, fused: Tiles, alone: Tiles, processors: int) -> bool:
    """Where blocks of threads prepare and finish rows of others, than with kernels of their own for that?"""
    paired = dict(fused.constants)["PAIRED"]
    if problem.deterministic and fused.br < WGMMA_BACKWARD_APART and not paired:
        return False  # from one turn to the next it takes longer than a step of so few rows
    if not problem.has_band:
        gain = WGMMA_FUSED_GAIN[paired * (1 + problem.deterministic)]
        most = gain * _steps_without_mask(problem, alone, processors)
        return _steps_without_mask(problem, fused, processors) <= most
    if dict(alone.constants)["SUMS"] > 1 or _together(problem) and not paired:
        return False
    waves = problem.B * problem.Hkv * -(-problem.Tk // fused.bc) / processors
    if waves < WGMMA_FUSED[problem.deterministic][paired]:
        return False
    least, most, *turns = WGMMA_DOWN_SINGLY
    singly = least <= problem.group <= most and any(low < waves <= high for low, high in turns)
    return not (rows_down(problem) and (waves < WGMMA_DOWN_WAVES or singly))


def _order_gains(problem: Problem, processors: int) -> bool:
    """Is the kernel faster in a fixed order, though none is asked for?

    Under a mask the same rows of query heads that share keys come together then, of many columns, too, and L2 holds
    them; and the first of few blocks of keys that comes to some rows of dQ stores it. Without a mask heads come in
    turn, so that L2 holds their rows; and the last blocks of keys can be divided where V has more columns than K.
    """
    bc = WGMMA_WIDE if is_wide(problem) else WGMMA_BACKWARD_KEYS
    keys, group = -(-problem.Tk // bc), problem.group
    waves = problem.B * problem.Hkv * keys / processors
    if problem.varlen or problem.ragged or not 1 / WGMMA_ORDER_UNEVEN <= problem.Tq / problem.Tk <= WGMMA_ORDER_UNEVEN:
        return False
    if not problem.has_band and is_wide(problem):
        shortest, longest = WGMMA_ORDER_KEYS
        gains = max(problem.d, problem.dv) <= 3 * WGMMA_SLAB and shortest <= keys <= longest
        gains &= problem.softcap is None and not problem.alibi
        return gains and not _has_sums(replace(problem, deterministic=True), processors, bc)
    if not problem.has_band:
        few, least, most = WGMMA_ORDER_DIVIDED
        gains = _is_by_keys(problem) and problem.softcap is None and keys >= few
        gains &= 1 < waves <= most and math.ceil(waves) >= least * waves
        gains = gains and _has_sums(replace(problem, deterministic=True), processors, bc)  # else they are not divided
        return gains and not _divided_by_heads(problem, processors, WGMMA_BACKWARD[128], bc).threads
    if group == 1 or not _has_upper_end(problem):
        return False
    if is_wide(problem):
        table = next(table for columns, table in WGMMA_ORDER_WIDE.items() if max(problem.d, problem.dv) <= columns)
        share, least, most = WGMMA_ORDER_ROOM
        has_room = max(problem.d, problem.dv) > 3 * WGMMA_SLAB and group >= share and least * waves <= math.ceil(waves)
        return waves <= max(next(some for heads, some in table.items() if group >= heads), most * has_room)
    heads, least, most, *two_turns = WGMMA_ORDER_SHORT
    in_two = two_turns[0] < waves <= two_turns[1]  # who is in the second one waits for the first
    short = least <= keys <= most and problem.Tq <= problem.Tk  # and all rows see keys
    return group >= heads and short and waves > 1 and not (in_two or _is_by_keys(problem))


def _wgmma_keys(problem: Problem, chip: Chip, d: int, dv: int, lag: int) -> Tiles:
    """Those of fa2_backward.cu; with a lag rows are prepared and finished there."""
    br, bc, fused = WGMMA_BACKWARD[max(d, dv)], WGMMA_BACKWARD_KEYS, lag > 0
    if problem.softcap is not None:  # which takes many registers
        br = min(WGMMA_BACKWARD.values())
    stages = WGMMA_FUSED_STAGES if fused else WGMMA_BACKWARD_STAGES[br]
    apart = br == WGMMA_BACKWARD_APART
    band = problem.has_band
    limits = apart and band  # what hides keys of a thread
    query_blocks, key_blocks = -(-problem.Tq // br), -(-problem.Tk // bc)
    processors, least_odd = chip.processors or WGMMA_PROCESSORS, WGMMA_PAIRED_ODD[problem.deterministic, band]
    least, *most = WGMMA_PAIRED_ODD_FEW
    few = problem.B * problem.Hkv * key_blocks <= most[problem.group > 1] * processors
    if problem.deterministic and few and not band:
        least_odd = min(least, least_odd)
    paired = int(
        fused and d == dv == 2 * WGMMA_SLAB
        and (problem.deterministic or _rows_of_keys(problem, bc) >= WGMMA_PAIRED_ROWS)
        and (key_blocks % 2 == 0 or key_blocks >= least_odd)
        and problem.band.lower is None
    )  # fmt: skip
    query_blocks, key_blocks = (padded(n, 1 + paired) for n in (query_blocks, key_blocks))
    divided = Divided() if fused else _divided_by_heads(problem, processors, br, bc)
    has_sums = not (fused and (band or apart)) and _has_sums(problem, processors, bc)
    if has_sums and _are_apart(problem, divided):
        has_sums = problem.B * problem.Hkv * key_blocks >= WGMMA_SUMS_TOGETHER[0] * processors
        divided = Divided() if has_sums else divided
    by_head = has_sums and _is_by_head(problem, processors, bc)
    of = replace(problem, Hkv=problem.Hq) if by_head else problem  # each query head as if it had keys of its own
    if has_sums and band:
        divided = _levels(of, processors, bc)
    down = not (fused or has_sums) and rows_down(problem)
    together = not fused and (divided.threads > 0 or _together(problem) or down or has_sums and band)
    if not (band or together) and (fused or has_sums):
        divided = _divided(problem.B * problem.Hkv * key_blocks, query_blocks, problem.group, processors, 1 + paired)
        if fused and divided.halved + divided.others > lag:  # whose rows others finish while they compute
            divided = Divided()
    stores = _stores(problem) and not (paired or together)
    first_stores = problem.deterministic and (not fused or paired or apart and band)  # else no registers for it
    last_first = stores or problem.deterministic and _has_upper_end(problem) and not down or has_sums
    sums = _sums(of, processors, br, bc, divided, paired) if has_sums else NO_SUMS
    by_keys = _is_by_keys(problem)  # each half of them has dQ of its own
    turns_apart = problem.deterministic and (band or by_keys) and not (fused or apart)
    resident = (
        *((Tile("delta", 8, WGMMA_SLAB, 2),) if paired else ()),  # in three parts of 16 bits: rows of a slab
        Tile("K", bc, d, 2),
        Tile("V", bc, dv - WGMMA_SLAB * paired, 2),
        *((Tile("K there", bc, d, 2),) if paired else ()),
        Tile("Q", stages * br, d, 2),
        Tile("dO", stages * br, dv, 2),
        Tile("dS", WGMMA_BACKWARD_S * bc, br, 2),
        *(() if apart else (Tile("dQ", 2 * br if by_keys else br, d, 4),)),
        *((Tile("O, dO ahead", 2 * br, WGMMA_SLAB, 2),) if fused and not paired else ()),
        *((Tile("dQ behind", 68, WGMMA_SLAB, 4),) if fused else ()),
        Tile("lse", stages * br, 1, 4),
        *(() if paired else (Tile("delta", stages * br, 1, 4),)),
        *((Tile("limits", 2 * bc, 4, 4),) if limits else ()),
        *((Tile("shares", 2, 8, 4),) if fused else ()),
        Tile("barriers", 6 + 3 * stages + 2 * (fused + turns_apart) + 4 * paired, 1, 8),
        Tile("S, P", bc, br, 4, REGISTERS),
        Tile("dP", bc, WGMMA_SLAB, 4, REGISTERS),
        Tile("dQ", WGMMA_ROWS if apart else br, d, 4, REGISTERS),
        Tile("dK", bc, d, 4, REGISTERS),
        Tile("dV", bc, dv, 4, REGISTERS),
    )
    return Tiles(br, bc, resident, chip.name, chip.on_chip_bytes, JI, family=WGMMA, lag=lag, divided=divided,
                 constants=(("FUSED", int(fused)), ("APART", int(apart)), ("STORES", int(stores)),
                            ("DIVIDED", int(divided.threads > 0 or by_head)), ("TOGETHER", int(together)),
                            ("PAIRED", paired),
                            ("LAST_FIRST", int(last_first)), ("FIRST_STORES", int(first_stores)), *sums.items(),
                            ("SETS", _sets_of_sums(problem)), ("BY_HEAD", int(by_head)),
                            ("ONE_HEAD", int(by_head or _is_one_head(problem, has_sums))),
                            ("LOWER", int(problem.band.lower is not None))))  # fmt: skip


def _wgmma_wide(problem: Problem, chip: Chip, d: int, dv: int, stages: int, handed: int) -> Tiles | None:
    """The same with so many blocks of Q and dO, and of P, on chip, if they fit."""
    br = bc = WGMMA_WIDE
    in_order = problem.deterministic
    resident = (
        Tile("K", bc, d, 2),
        Tile("V", bc, dv, 2),
        Tile("Q", stages * br, d, 2),
        Tile("dO", stages * br, dv, 2),
        Tile("P", handed * bc, br, 4),
        Tile("dS", WGMMA_BACKWARD_S * bc, br, 2),
        Tile("lse", stages * br, 1, 4),
        Tile("delta", stages * br, 1, 4),
        Tile("barriers", 2 + 4 * stages + 2 * handed + 2 * in_order, 1, 8),
        Tile("S, P", bc, br, 4, REGISTERS),
        Tile("dP, dS", bc, br, 4, REGISTERS),
        Tile("dQ", br, WGMMA_WIDE_DQ, 4, REGISTERS),
        Tile("dK", bc, d, 4, REGISTERS),
        Tile("dV", bc, dv, 4, REGISTERS),
    )
    processors = chip.processors or WGMMA_PROCESSORS
    has_sums = _has_sums(problem, processors, bc)
    sums = _sums(problem, processors, br, bc, Divided(), 0) if has_sums else NO_SUMS
    last_first = in_order and _has_upper_end(problem) and not rows_down(problem) or has_sums
    constants = {"STAGES": stages, "P_TILES": handed, "DQ_COLUMNS": WGMMA_WIDE_DQ, "FIRST_STORES": int(in_order),
                 "LAST_FIRST": int(last_first), **sums, "ONE_HEAD": int(_is_one_head(problem, has_sums))}  # fmt: skip
    tiles = Tiles(
        br, bc, resident, chip.name, chip.on_chip_bytes, JI, family=WGMMA, constants=tuple(constants.items())
    )  # fmt: skip
    return tiles if tiles.smem_bytes <= (chip.on_chip_bytes or 0) else None


def _divided(blocks: int, rows: int, group: int, processors: int, together: int = 1) -> Divided:
    """How the last blocks of keys are divided, which would have less than a block of threads for each multiprocessor.

    As many as there is room for get two each, what is left (or all, if there are few) more. Each has ``rows`` blocks of
    rows of each of ``group`` heads. ``together``: as many blocks of keys are divided in the same way, between as many
    blocks of rows.
    """
    processors = max(processors - processors % together, together)
    last, half = blocks % processors, processors // 2 // together * together
    halved = half if last > half else 0
    others = last - halved
    parts = min(processors // others if others else 1, WGMMA_DIVIDED_MOST, rows // together)
    divided = Divided(halved, others, parts)
    return divided if last and parts > 1 and _steps_of_divided(divided, rows, group) < rows * group else Divided()


def _steps_of_divided(divided: Divided, rows: int, group: int) -> float:
    """How long these blocks of keys take."""
    shares = (2 * bool(divided.halved), divided.parts * bool(divided.others))
    return sum(rows * group / n + WGMMA_DIVIDED_COST for n in shares if n)


def _steps_without_mask(problem: Problem, tiles: Tiles, processors: int) -> float:
    """When the last multiprocessor is done with blocks of keys of which each row sees all: in blocks of WGMMA_ROWS."""
    constants, divided, group = dict(tiles.constants), tiles.divided, problem.group
    together = 1 + constants["PAIRED"]
    processors -= processors % together
    rows, each = -(-problem.Tq // (together * tiles.br)), together * tiles.br / WGMMA_ROWS
    blocks = problem.B * problem.Hkv * padded(-(-problem.Tk // tiles.bc), together)
    begin, share = WGMMA_DIVIDED_COST, WGMMA_SHARE_COST
    if constants["TOGETHER"]:  # all of them are divided, by query heads, and then by rows
        longest = -(-group // min(divided.parts, group)) * -(-rows // max(divided.parts // group, 1))
        return -(-blocks * divided.parts // processors) * (longest * each + begin)
    whole = -(-(blocks - divided.halved - divided.others) // processors) * (rows * group * each + begin)
    shares = (2 * bool(divided.halved), divided.parts * bool(divided.others))
    return whole + sum(-(-rows // n) * group * each + begin + share * n for n in shares if n)


def _divided_by_heads(problem: Problem, processors: int, br: int, bc: int) -> Divided:
    """All blocks of keys, where they are too few, into as many parts each as take least time: by query heads, and where
    that is not enough each head by rows."""
    heads, keys, group = problem.B * problem.Hkv, -(-problem.Tk // bc), problem.group
    if not 0 < heads * keys < 2 * processors:
        return Divided()
    rows = tuple(-(-rows_that_see(problem, j, bc) // br) for j in range(0, problem.Tk, bc))
    longest, average = max(rows), _rows_of_keys(problem, bc) / br * group
    uneven = problem.has_band and average <= 0.8 * longest * group  # then long blocks of threads come first
    # In a fixed order the last keys begin with rows of their own, for which nobody waits: so rows are not divided
    most = group * (1 if problem.deterministic and _has_upper_end(problem) else longest)
    most = max(min(WGMMA_HEADS_MOST, most), 1)
    alike = not problem.has_band and problem.Tq <= 2 * problem.Tk
    if problem.deterministic and br == WGMMA_BACKWARD_APART and alike:  # many blocks of keys meet at few rows then
        few = WGMMA_HEADS_FEW * (1 + (group > 1))  # to several sums
        most = min(most, max(group, few))
    if uneven and group > 1:
        least = -(-group // WGMMA_HEADS_IN_ORDER) if problem.deterministic else 1
        parts = _parts_done_first(rows, heads, group, br // WGMMA_ROWS, least, most, processors)
        return Divided(0, heads * keys, parts) if parts > 1 else Divided()

    # In a fixed order without a mask, of several sums, the last ones can be divided by rows instead
    by_rows = problem.deterministic and group > 1 and not problem.has_band and 2 * heads * keys > processors
    by_rows = by_rows and _has_sums(problem, processors, bc)

    def steps(parts: int) -> float:
        """When the last multiprocessor is done."""
        most_of_one, each = -(-group // min(parts, group)) * -(-longest // max(parts // group, 1)), average / parts
        if uneven:  # who is free takes the next one
            more = (WGMMA_DIVIDED_COST - 2 + parts) * (parts > 1) * WGMMA_ROWS / br
            turns = heads * keys * parts / processors
        else:
            more = (WGMMA_DIVIDED_COST + parts / 2) * (parts > 1)
            turns = -(-heads * keys * parts // processors)
            at_once = not problem.deterministic and heads * keys <= processors
            if by_rows or at_once:  # one has the long ones
                each = most_of_one
        return max(turns * (each + more), most_of_one + more)

    parts = min(_numbers_of_parts(group, most), key=steps)
    without = WGMMA_HEADS_GAIN * steps(1)
    others = _divided(heads * keys, longest, group, processors)
    if by_rows and others.threads:
        whole = (heads * keys - others.halved - others.others) / processors * longest * group
        without = min(without, WGMMA_HEADS_ROWS * (whole + _steps_of_divided(others, longest, group)))
    return Divided(0, heads * keys, parts) if steps(parts) < without else Divided()


def _numbers_of_parts(group: int, most: int) -> list[int]:
    """Of so many query heads at most so many: each has some of these, or some rows of one."""
    return [n for n in range(1, most + 1) if n < group or n % group == 0]


@lru_cache(1024)
def _parts_done_first(
    rows: tuple[int, ...], heads: int, group: int, each: int, least: int, most: int, processors: int
) -> int:
    """Into how many parts blocks of keys are divided, which have so many blocks of ``rows`` of ``group`` query heads,
    of so many steps ``each``: the number with which the last multiprocessor is done first; ``least``, if that gains."""
    begin, share = WGMMA_HEADS_COST
    can_be_divided = any(group % n == 0 for n in range(2, group))

    def end(parts: int) -> float:
        of_heads, of_rows, more = min(parts, group), max(parts // group, 1), begin + share * (parts > 1)
        some = [group * (n + 1) // of_heads - group * n // of_heads for n in range(of_heads)]
        lengths = [(n * (r + 1) // of_rows - n * r // of_rows) * each * heads_of_part + more
                   for n in rows for heads_of_part in some for r in range(of_rows)]  # fmt: skip
        # Parts of more heads fall behind those of fewer, whose rows L2 then does not hold for them
        behind = WGMMA_HEADS_UNEVEN[can_be_divided] if group % of_heads else 1.0
        return last_end(lengths, heads, heads, processors) * behind

    every = _numbers_of_parts(group, most)
    best = min((n for n in every if n >= min(least, every[-1])), key=end)
    return best if end(best) < end(1) else min(every, key=end)


def _has_sums(problem: Problem, processors: int, bc: int) -> bool:
    """In a fixed order, does dQ have several sums, so that the blocks of keys of few heads, many of which run at once,
    need not wait for each other (SUMS in cuda/sm90/backward.cuh)?"""
    blocks, columns, band = -(-problem.Tk // bc), max(problem.d, problem.dv), problem.has_band
    # Under a mask other columns than 128 have no pairs
    width = problem.d if band and not is_wide(problem) else columns
    most = next(most for most_columns, most in WGMMA_SUMS.items() if width <= most_columns)[band]
    if most > 0 and band and is_wide(problem) and problem.group > 1 and blocks >= WGMMA_SUMS_WIDE:
        most = math.inf
    few = problem.B * problem.Hkv * blocks <= most * processors and 2 * _bytes_of_sums(problem) <= WGMMA_SUMS_BYTES
    uneven = not 1 / WGMMA_SUMS_UNEVEN <= problem.Tq / problem.Tk <= WGMMA_SUMS_UNEVEN
    if not (problem.deterministic and few) or problem.varlen or uneven:
        return False
    by_head = _is_by_head(problem, processors, bc)
    waves = problem.B * (problem.Hq if by_head else problem.Hkv) * blocks / processors
    if band:
        parts = problem.group <= WGMMA_HEADS_FEW and blocks >= WGMMA_SUMS_PARTS[problem.group != 2]
        late = problem.group == 1 and blocks >= WGMMA_SUMS_PARTS[True] and not is_wide(problem)
        late &= WGMMA_SUMS_ONCE[1] < waves <= WGMMA_SUMS_LATE
        short = blocks < WGMMA_SUMS_KEYS and not (parts and waves <= WGMMA_SUMS_FEW or late)
        once = WGMMA_SUMS_ONCE[0] < waves <= WGMMA_SUMS_ONCE[1]
        short |= once and blocks < WGMMA_SUMS_USUAL and not is_wide(problem)
    else:
        limits = next(limits for most_columns, limits in WGMMA_SUMS_SHORT.items() if columns <= most_columns)
        short = any(blocks <= keys and waves > some for keys, some in limits)
        short &= not is_wide(problem) or waves <= WGMMA_SUMS_WAVES[0]
    # With more query heads than so many of a key head those before the last keys are far from others' rows, not in L2
    far = band and problem.group > WGMMA_SUMS_GROUP[columns > WGMMA_SLAB] and not by_head
    keys, some = WGMMA_SUMS_PAIRS
    paired = problem.group > 1 and not by_head and WGMMA_SLAB < width <= bc
    far |= band and paired and blocks >= keys and waves > some
    many = waves > _most_of_levels(blocks)  # else they are DIAGONAL
    many &= not WGMMA_SUMS_FULL[0] < waves <= WGMMA_SUMS_FULL[1]
    far |= band and problem.group == WGMMA_HEADS_FEW and not by_head and many
    return not (short or far) and (not band or _has_upper_end(problem))


def _is_by_head(problem: Problem, processors: int, bc: int) -> bool:
    """Do query heads that share keys have blocks of threads of their own then (BY_HEAD there), as there are few?"""
    blocks = problem.B * problem.Hkv * -(-problem.Tk // bc)
    columns, group, is_long = max(problem.d, problem.dv), problem.group, problem.Tk >= WGMMA_DIAGONAL_KEYS * bc
    far = WGMMA_SUMS_GROUP[columns > WGMMA_SLAB] < group <= WGMMA_HEADS_FEW  # else they may come together
    few_keys = -(-problem.Tk // bc) < WGMMA_SUMS_USUAL and WGMMA_HEADS_FEW < group and columns > WGMMA_SLAB
    fewer = [most for heads, most in WGMMA_SUMS_HEADS[columns > WGMMA_SLAB].items() if group > heads]
    waves = min([WGMMA_SUMS_BY_HEAD[2 if few_keys else is_long], *fewer])
    few = blocks <= (processors if far and is_long else processors // 2) and blocks * group <= waves * processors
    return few and (blocks * group > processors // 2 or far) and problem.has_band and group > 1 and not is_wide(problem)


def _are_apart(problem: Problem, divided: Divided) -> bool:
    """Where blocks of keys are divided by query heads, whose rows come together: do those of several sums, each of
    which begins at rows of its own, have more of them between them than L2 holds?"""
    by_heads = divided.threads > 0 and problem.group > 1 and not problem.has_band
    return by_heads and 2 * _bytes_of_sums(problem) > WGMMA_SUMS_TOGETHER[1]


def _is_one_head(problem: Problem, has_sums: bool) -> bool:
    """Does each block of keys have the rows of one query head, where those of all would come together else?"""
    return has_sums and problem.has_band and problem.group == 1


def _bytes_of_sums(problem: Problem) -> int:
    """Of one of them, in blocks of the most rows that these have."""
    rows, columns = padded(problem.Tq, max(WGMMA_BACKWARD.values())), padded(problem.d, WGMMA_SLAB)
    return problem.B * problem.Hq * rows * columns * 4 * _sets_of_sums(problem)


def _is_by_keys(problem: Problem) -> bool:
    """Does each warpgroup of cuda/sm90/fa2_backward.cu compute dQ of all 64 rows and columns, from its own keys?"""
    few = problem.d <= WGMMA_SLAB and not is_wide(problem)
    return few and (problem.softcap is not None or problem.dv > WGMMA_SLAB)


def _sets_of_sums(problem: Problem) -> int:
    """Each of these has sums of its own in a fixed order, so that neither waits for the other."""
    return 1 + int(problem.deterministic and _is_by_keys(problem))


def _sums(
    problem: Problem, processors: int, br: int, bc: int, divided: Divided, paired: int
) -> dict[str, int]:
    """How many: of neighbouring blocks of keys different ones, if the next one comes to some rows a single step behind
    this one, in which it may not yet have its turn, and if calls are long enough for what more sums cost."""
    rows, blocks, band = -(-problem.Tq // br), problem.B * problem.Hkv * -(-problem.Tk // bc), problem.has_band
    waves, are_alike, wide = blocks / processors, divided.others >= blocks, is_wide(problem)
    of_rows = divided.parts // min(divided.parts, problem.group) if are_alike else 1
    of_heads = problem.group if band else 1  # whose rows come together
    parts, steps = (divided.parts, bc / br * of_heads) if band and are_alike else (2, bc / br / of_rows * of_heads)
    if wide:
        more = rows >= WGMMA_SUMS_ROWS[True] * (min(waves, 2.0) if band else waves)
        turns = -(-waves // WGMMA_SUMS_WAVES[0])
        more &= not (band and turns > 2 and waves < WGMMA_SUMS_WAVES[1] * turns)
        more &= not (band and turns == 2 and rows < WGMMA_SUMS_ROWS[False] * waves)
    else:
        few = are_alike and br == WGMMA_BACKWARD_APART and 2 * blocks <= processors
        more = band or few and problem.group <= WGMMA_HEADS_FEW or problem.group == 1 and waves <= WGMMA_DIAGONAL[-1]
        more = more and rows >= WGMMA_SUMS_ROWS[False] * waves
    steps *= 1 + paired
    several = 2 if steps > 0.5 or problem.group > 1 else 4
    residues = 1 if steps >= 2 or not more or parts > WGMMA_HEADS_FEW else several
    if not (band or are_alike) and divided.halved and divided.parts >= WGMMA_HEADS_FEW and rows >= WGMMA_SUMS_UNLIKE:
        residues *= 2
    if parts * residues * _bytes_of_sums(problem) > WGMMA_SUMS_BYTES:
        residues = 1
    return {"SUMS": parts * residues, "RESIDUES": residues, "DIAGONAL": int(divided.level > 0)}


def _levels(problem: Problem, processors: int, bc: int) -> Divided:
    """How such blocks of keys are divided under a mask (DIAGONAL in cuda/sm90/backward.cuh): into parts of as many rows
    each, and so many of these going up, as take least time."""
    keys, heads = -(-problem.Tk // bc), problem.B * problem.Hkv
    if heads * keys > _most_of_levels(keys) * processors:
        return Divided()
    long, held = min(-(-problem.Tq // bc), keys), WGMMA_SUMS_BYTES // _bytes_of_sums(problem)
    rows = [rows_that_see(problem, j * bc, bc) for j in range(keys - 1, -1, -1)]
    begin, share, sums = WGMMA_DIAGONAL_COST

    def lengths(way: Divided) -> list[float]:
        """Of blocks of threads of one head, in rows, in their order (part_of there)."""
        up, down, last = [], [], []
        whole = way.level * bc * problem.group
        for n, of_all in enumerate(rows):  # those that see the last keys first
            before = min(n // way.level, way.parts - 1)
            each = begin + share * (before > 0)
            left = max(of_all * problem.group - before * whole, 0)
            *first, end = [whole + each] * before + [left + each]
            up += [*first, end][: way.up]
            if before >= way.up:
                down += first[way.up :]
                last.append(end)
        return up + down + sorted(last, reverse=True)

    fewest = -(-long // max(min(held, WGMMA_DIVIDED_MOST), 2))
    best, least = Divided(), math.inf
    for level in range(fewest, min(max(fewest, 3 * long // 4) + 1, long), -(-long // WGMMA_DIAGONAL_TRIED)):
        parts = -(-long // level)
        for up in range(parts, 0, -1):
            way = Divided(0, heads * keys, parts, level, up, keys)
            some, rest = lengths(way), sums * parts
            if max(max(some), sum(some) * heads / processors) + rest < least:  # it may be done sooner
                end = last_end(some, heads, heads, processors) + rest
                best, least = (way, end) if end < least else (best, least)
    return best


def _most_of_levels(keys: int) -> float:
    """Up to how many blocks of keys for each multiprocessor they are divided so, where a head has so many."""
    return WGMMA_DIAGONAL[(keys >= WGMMA_SUMS_USUAL) + (keys >= WGMMA_DIAGONAL_KEYS)]


def _together(problem: Problem) -> bool:
    """Does a block of threads of cuda/sm90/fa2_backward.cu go through the same rows of all query heads before the next
    ones? Under a mask it would be at another head than the others, and what all read and add to not be in L2."""
    return problem.has_band and _is_long(problem) and problem.group >= WGMMA_TOGETHER[problem.varlen]


def rows_down(problem: Problem) -> bool:
    """In a fixed order, do blocks of keys of query heads that share them come with the first keys first, from the last
    rows down, the same ones of all heads? Begun with the last keys, those with fewer rows would come to the next head
    sooner than those before them, and wait there."""
    grouped = problem.deterministic and problem.group > 1 and _has_upper_end(problem)
    return grouped and (max(problem.Tq, problem.Tk) > WGMMA_DOWN_ROWS or is_wide(problem))


def _is_long(problem: Problem) -> bool:
    """Is it worth while that the same rows of all query heads come together?"""
    return max(problem.Tq, problem.Tk) > WGMMA_TOGETHER_ROWS


def _has_upper_end(problem: Problem) -> bool:
    """Does the band hide later keys, and no earlier ones?"""
    return problem.band.lower is None and problem.band.upper is not None


def _stores(problem: Problem) -> bool:
    """Does the first block of keys of cuda/sm90/fa2_backward.cu that comes to some rows store its dQ? It is the last
    one that these see: so short ones come first, and with few heads long ones would end alone."""
    columns = max(problem.d, problem.dv)
    return (
        _has_upper_end(problem)
        and padded(problem.d, WGMMA_SLAB) >= padded(problem.dv, WGMMA_SLAB)
        and not (problem.ragged or problem.varlen or problem.deterministic)
        and not (problem.alibi or problem.softcap is not None)
        and problem.B * problem.Hkv >= WGMMA_STORED_HEADS * WGMMA_PROCESSORS
        and max(problem.Tq, problem.Tk) <= next(rows for width, rows in WGMMA_STORED.items() if columns <= width)
    )


def _can_be_fused(problem: Problem) -> bool:
    """Can blocks of threads of cuda/sm90/fa2_backward.cu prepare and finish rows of others while they compute?"""
    columns, blocks = max(problem.d, problem.dv), -(-problem.Tk // WGMMA_BACKWARD_KEYS)
    least = WGMMA_FUSED_IN_ORDER if problem.deterministic else WGMMA_FUSED_ROWS
    if _stores(problem) or problem.deterministic and problem.has_band and columns <= WGMMA_SLAB:
        least = WGMMA_FUSED_STORED
    rows = next(rows for width, rows in least.items() if columns <= width)
    seen = _rows_of_keys(problem, WGMMA_BACKWARD_KEYS)
    if problem.deterministic and not problem.has_band:
        seen = padded(problem.Tq, WGMMA_BACKWARD_KEYS)
    return (
        not (problem.ragged or problem.varlen or problem.sinks or problem.alibi or problem.softcap is not None)
        and padded(problem.dv, WGMMA_SLAB) <= padded(problem.d, WGMMA_SLAB)
        and blocks >= WGMMA_FUSED_KEYS
        and seen >= rows
    )


def _rows_of_keys(problem: Problem, bc: int) -> float:
    """How many rows see some of a block of keys, on average, if the last row is at the last key."""
    blocks = -(-problem.Tk // bc)
    some = range(0, problem.Tk, bc * max(blocks // 64, 1))
    return sum(rows_that_see(problem, j, bc) for j in some) / len(some)


def rows_that_see(problem: Problem, j: int, bc: int) -> int:
    """How many rows see some of ``bc`` keys from ``j`` on, if the last row is at the last key."""
    lower, upper = problem.band.bounds()
    offset = problem.Tk - problem.Tq
    first, end = j - offset - upper, j + bc - offset - lower
    return max(min(end, problem.Tq) - max(first, 0), 0)


def keys_seen(problem: Problem, i: int, br: int) -> int:
    """How many keys some of ``br`` rows from ``i`` on see, if the last row is at the last key."""
    lower, upper = problem.band.bounds()
    offset = problem.Tk - problem.Tq
    first, end = i + offset + lower, i + br + offset + upper
    return max(min(end, problem.Tk) - max(first, 0), 0)


def last_end(
    lengths: Sequence[float], heads: int, section: int, processors: int, last: Sequence[float] | None = None,
    turn: float = 0.0, in_turn: int = 0,
) -> float:
    """When the last multiprocessor is done with pieces of work, of which each head has some of these lengths.

    Heads come in sections, of whose pieces those of the first length come first, of all its heads; in the last one
    those of the first of ``last``. Who is done takes the next one. The last ``in_turn`` pieces of a head begin at the
    same rows of dQ: each at least a ``turn`` behind the one before.
    """
    ends = [0.0] * processors
    for first in range(0, heads, section):
        of_section = last if last and heads - first <= section else lengths
        turns = [0.0] * min(section, heads - first)
        for n, length in enumerate(of_section):
            for head, earliest in enumerate(turns):
                begin = ends[0]
                if n >= len(of_section) - in_turn:
                    begin = max(begin, earliest)
                    turns[head] = begin + turn
                heapq.heapreplace(ends, begin + length)
    return max(ends)


@lru_cache(1024)
def heads_of_section(
    lengths: tuple[float, ...], last: tuple[float, ...], heads: int, usual: int, most: int, processors: int
) -> int:
    """How many heads a section has, so that few multiprocessors are idle in the end: ``usual``, or up to ``most``.

    ``lengths``, ``last``: see `last_end`.

    Pieces of uneven lengths end together if many are left when the long ones have begun, but of sections of
    several heads the last one may have few. Whole sections at the begin make no difference, and are left out where
    pieces are many.
    """
    if len(set(lengths)) == 1:
        return usual

    def idle(section: int) -> float:
        """By how much later than if nobody were idle."""
        enough = max(SIMULATED_PIECES // len(lengths), 1)
        some = heads - max(heads - enough, 0) // section * section
        return last_end(lengths, some, section, processors, last) - some * sum(lengths) / processors

    tried = {2 * usual} | {-(-heads // sections) for sections in range(1, 2 * heads // usual + 1)}
    some = (n for n in tried if usual <= 2 * n and n <= most)
    best = min(some, key=lambda n: (idle(n), abs(n - usual)), default=usual)
    gain = idle(usual) - idle(best)
    return best if gain > SECTION_GAIN * sum(lengths) * heads / processors else usual
