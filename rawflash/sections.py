"""In which order blocks of keys come in the backward pass of sm_90 (``cupy_raw/cuda/sm90/backward.cuh``): of how many
heads a section is, which have their keys taken in turn, and how many of these come late.

Found from the call alone, so that the same call has the same order, and bits.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

import numpy as np

from rawflash.problem import Problem
from rawflash.sm90 import (
    SECTION_WAVES, WGMMA_HEADS_FEW, WGMMA_PROCESSORS, WGMMA_SLAB, heads_of_section, is_wide, last_end, rows_down,
    rows_that_see,
)  # fmt: skip
from rawflash.tiles import Tiles

SECTION_BYTES = 32 << 20  # of L2, for the heads whose keys are taken in turn
SECTION_STORED, SHORT = 16 << 20, 1024  # the same where the first dQ is stored, in a fixed order up to so many keys
SECTION_LAST = 8 << 20  # the same, in a fixed order, if the last keys come first
SECTION_WIDE = 48 << 20  # the same, in a fixed order, of more columns and more keys than SHORT
SECTION_MOST, SECTION_KEYS = 64 << 20, 32  # so that fewer multiprocessors are idle; blocks of keys, in any call
BLOCK_ROWS = 128  # with as many a block of threads would be busy for as long as it takes to begin and to end
TWO_WAVES = 2.1  # blocks of keys for each multiprocessor that come in two turns, or nearly
# Where dQ has several sums: bytes of these. Blocks of keys for each multiprocessor that one section has at most, if it
# is the only one, under a mask (up to and above so many keys), and bytes of its sums, by whether d or dv is above
# WGMMA_SLAB; where query heads share keys not more than so many. Without a mask so many blocks. Under one, if there are
# other sections, so many (of more than 192 columns where query heads share fewer blocks of keys than KEYS_DOWN); up to
# what part of the least time simpler choices are preferred; how many of 16 blocks of keys are LATE (sm90/backward.cuh):
# half where a section has up to TWO_WAVES; and for how many rows these wait for each other where they begin.
SECTION_SUMS, SUMS_LONG, SUMS_NO_MASK = 96 << 20, 4096, 3.5
SUMS_ALONE = {False: (5.2, 9.5, 120 << 20), True: (3.5, 6.6, 96 << 20)}
SUMS_ALONE_SHARED = 100 << 20
SUMS_WAVES, SUMS_GAIN = (3.0, 2.25), 1.03
LATE, LATE_TURN = (8, 11, 13, 14), 48.0
# In the only section, of 16; of many columns, from so many blocks of keys for each multiprocessor on, so many. In steps
# of a block of rows: from the one in which a block of keys adds to dQ to that in which the next one can, and what it
# costs to begin and to end a block of threads. What part of the time it has to save that another number is late than
# half, for each of 16 blocks of keys, and that fewer are.
LATE_ALONE, LATE_WIDE, TURN_STEPS, BLOCK_STEPS, LATE_GAIN = range(4, 15), (3.5, 11), 1.35, 4.5, (0.00125, 0.01)
# Query heads in turn, where rows go down in a fixed order: so many, but so many blocks of threads for each
# multiprocessor (where blocks of keys are not divided, and where they are), in sections alike.
HEADS_DOWN, TURNS_DOWN = (64, 8), (2.0, 2.5)
# Of more columns so many of these for each multiprocessor, by whether a head has so many blocks of keys; all up to so
# many, and up to so many as many as come in two turns. Of more than 192 columns with more than WGMMA_HEADS_FEW query
# heads of a key head, and so many blocks of keys, L2 does not hold the rows of more than HEADS_DOWN.
TURNS_DOWN_WIDE, KEYS_DOWN, TURNS_WIDE = (1.75, 3.6), 48, (2.6, 4.0)
# In pairs under a mask, all heads, where a head has at least so many blocks of keys and there are more than so many for
# each multiprocessor (one of these), up to so many; of these, from and up to so many, more than half of them, so that
# sections are not alike. Of a head with fewer than so many, from so many for each multiprocessor on, those that come in
# two turns: more are as fast for a while, and slower at the limit of power.
SECTION_PAIRED, SECTION_PAIRED_MOST = ((64, 3.0), (48, 5.5)), 8.0
SECTION_UNLIKE, SECTION_FEW_KEYS = (4.0, 5.2), (32, 6.0)
# Where query heads share keys, half of those that come in more than two turns up to so many, all of others up to so
# many (of so many blocks of keys of a head, up to so many), of more as many as come in two turns; where fewer than
# WGMMA_HEADS_FEW share them, five eighths from and up to so many.
SECTION_SHARED, SECTION_SHARED_LONG, SECTION_FEW_SHARE = (3.6, 6.6), (96, 4.4), (4.0, 4.6)
# Without a mask, of SECTION_KEYS and more, all up to so many. Up to so many blocks of keys of a head (of many columns
# any), where query heads share these, sections have fewer heads, where more than WGMMA_HEADS_FEW do also those that
# come in two turns: L2 holds the rows of all of them.
SECTION_NO_MASK, SHARED_KEYS = 8.0, 12
# Without an order, where query heads share keys under a mask, and those are more than so many blocks: as many heads as
# come in so many turns, or as have so many query heads in all (if more than two share keys), up to so many of these.
SHARED_FEW, SHARED_TURNS, SHARED_HEADS = 8, 4.0, (64, 128)
DETERMINISTIC_MORE = 4  # times as many heads in a fixed order that is not the last keys first


def section_and_late(problem: Problem, tiles: Tiles, heads: int, key_blocks: int) -> tuple[int, int]:
    """How many of the ``heads`` that come in turn a section has, and how many ``key_blocks`` of each are LATE."""
    sums = dict(tiles.constants).get("SUMS", 1)
    if sums > 1:
        return _section_of_sums(problem, tiles, max(heads, 1), key_blocks, sums)
    return _section(problem, tiles, heads, key_blocks), 0


def _section(problem: Problem, tiles: Tiles, heads: int, key_blocks: int) -> int:
    """How many K/V heads have their keys taken in turn, long columns first: as many as L2 can hold; 1: no band. All
    multiprocessors have a block of threads: else the last head's longest ends alone. In calls of up to eight blocks of
    threads for each, or with many keys, more or fewer heads, if fewer multiprocessors are idle in the end.

    Deterministic, blocks of keys of one head wait for each other: so heads are taken in turn without a band, too, and
    more of them where a band has a lower end, or by how many turns they come in (:func:`_section_in_order`). So they
    are where query heads share keys, whose rows come together (:func:`_section_of_shared`).
    """
    band = problem.has_band
    if not (band or problem.deterministic):
        return 1
    measured = _section_in_order if problem.deterministic else _section_of_shared
    some = measured(problem, tiles, heads, key_blocks)
    if some:
        return max(min(some, heads), 1)
    constants = dict(tiles.constants)
    last_first, together = bool(constants.get("LAST_FIRST")), 1 + constants.get("PAIRED", 0)
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


def _section_in_order(problem: Problem, tiles: Tiles, heads: int, key_blocks: int) -> int:
    """The same in a fixed order, where it is known by measuring; else 0.

    Heads that come in two turns are one section, as those of a second one would wait for the longest of the first. All
    of packed sequences without a band; where rows go down, as many as keep every multiprocessor busy, or, of many
    columns and keys, as L2 can hold.
    """
    band, constants = problem.has_band, dict(tiles.constants)
    paired = constants.get("PAIRED", 0)
    if constants.get("TOGETHER"):  # each block of keys counts as often as it has blocks of threads
        key_blocks *= tiles.divided.parts
    waves, two_turns = heads * key_blocks / WGMMA_PROCESSORS, max(int(TWO_WAVES * WGMMA_PROCESSORS) // key_blocks, 1)
    if problem.varlen and not band:
        return heads
    if rows_down(problem) and not tiles.lag:
        wide = is_wide(problem)
        most = max(HEADS_DOWN[wide] // problem.group, 1)
        long = wide and key_blocks >= KEYS_DOWN
        far = long and max(problem.d, problem.dv) > 3 * WGMMA_SLAB and problem.group > WGMMA_HEADS_FEW
        if not (far or wide and problem.varlen):
            turns = TURNS_DOWN_WIDE[long] if wide else TURNS_DOWN[tiles.divided.threads > 0]
            most = max(most, int(turns * WGMMA_PROCESSORS) // key_blocks)
        if wide and waves <= TURNS_WIDE[1] and not problem.varlen:
            most = heads if waves <= TURNS_WIDE[0] else two_turns
        return most if problem.varlen else _alike(heads, most)
    if band and paired and problem.group > 1:
        if TWO_WAVES < waves <= SECTION_SHARED[0]:
            return -(-heads // 2)
        if SECTION_FEW_SHARE[0] < waves <= SECTION_FEW_SHARE[1] and problem.group < WGMMA_HEADS_FEW:
            return -(-5 * heads // 8)
        many, some = SECTION_SHARED_LONG
        return heads if waves <= (some if key_blocks >= many else SECTION_SHARED[1]) else two_turns
    if band:
        many = any(key_blocks >= keys and waves > some for keys, some in SECTION_PAIRED)
        if paired and many and waves <= SECTION_PAIRED_MOST:
            return heads // 2 + 1 if SECTION_UNLIKE[0] < waves <= SECTION_UNLIKE[1] else heads
        few_keys = key_blocks < SECTION_FEW_KEYS[0] and waves > SECTION_FEW_KEYS[1]
        return _alike(heads, two_turns) if paired and few_keys else 0
    many_share = problem.group > WGMMA_HEADS_FEW and key_blocks <= SHARED_KEYS
    at_once = many_share and not (paired or is_wide(problem))
    if not at_once and waves <= TWO_WAVES or paired and key_blocks >= SECTION_KEYS and waves <= SECTION_NO_MASK:
        return heads
    if paired or is_wide(problem) or waves > SECTION_WAVES:
        return 0
    in_two = problem.d <= WGMMA_SLAB and (problem.group == 1 or key_blocks > SHARED_KEYS)
    return _alike(heads, two_turns if in_two else WGMMA_PROCESSORS // key_blocks)


def _section_of_shared(problem: Problem, tiles: Tiles, heads: int, key_blocks: int) -> int:
    """The same without an order, where query heads share keys under a mask, and blocks of keys are not few; else 0."""
    constants, group = dict(tiles.constants), problem.group
    others = problem.varlen or is_wide(problem) or group == 1 or problem.band.lower is not None
    if others or key_blocks <= SHARED_FEW or constants.get("STORES") or tiles.lag and not constants["PAIRED"]:
        return 0
    most = max(int(SHARED_TURNS * WGMMA_PROCESSORS) // key_blocks, SHARED_HEADS[0] // group if group > 2 else 1)
    return _alike(heads, min(most, SHARED_HEADS[1] // group))


def _alike(heads: int, most: int) -> int:
    """How many of the heads a section has, in as few sections as there are of at most so many."""
    return -(-heads // -(-heads // max(most, 1)))


def _section_of_sums(problem: Problem, tiles: Tiles, heads: int, key_blocks: int, sums: int) -> tuple[int, int]:
    """The same where dQ has several sums, and how many blocks of keys of a head are LATE (sm90/backward.cuh).

    All heads, if L2 can hold their sums and blocks of keys are few, or if these are divided under a mask; else without
    a mask as many as that (of many columns as run at once, or twice as many if these are all; of these, and of few
    blocks of keys, fewer where query heads share them). Under a mask so many that few multiprocessors are idle in the
    end, if possible in two turns: half of the blocks of keys are late, so that a long one begins when a short one has
    ended, or more, where they come in more turns. If all heads are in one section, as many are late as take least time,
    turn by turn.
    """
    at_once, constants = WGMMA_PROCESSORS / key_blocks, dict(tiles.constants)
    group, residues = 1 if constants.get("BY_HEAD", 0) else problem.group, constants["RESIDUES"]
    columns, slabs = -(-problem.d // WGMMA_SLAB) * WGMMA_SLAB, -(-max(problem.d, problem.dv) // WGMMA_SLAB)
    many = slabs > 1
    of_head = problem.Tq * group * columns * 4 * sums
    held = max(SECTION_SUMS // of_head, 1)
    if problem.has_band and tiles.divided.threads:
        return heads, 0
    if not problem.has_band:
        waves = 1.0 if is_wide(problem) else SUMS_NO_MASK
        waves = TWO_WAVES if residues == 1 and heads <= TWO_WAVES * at_once else waves
        shared = is_wide(problem) or not many and key_blocks <= SHARED_KEYS
        most = int(at_once * waves) // (problem.group if shared and heads > at_once else 1)
        return _alike(heads, min(held, most)), 0
    *turns, nbytes = SUMS_ALONE[many]
    nbytes = nbytes if group == 1 else min(nbytes, SUMS_ALONE_SHARED)
    if heads <= min(max(nbytes // of_head, 1), at_once * turns[problem.Tk > SUMS_LONG]):
        return heads, _late_alone(problem, tiles, heads, key_blocks, group, residues)
    steps = [rows_that_see(problem, j, tiles.bc) * group + BLOCK_ROWS for j in range(0, problem.Tk, tiles.bc)]
    ends = {}
    waves = SUMS_WAVES[slabs > 3 and problem.group > 1 and key_blocks < KEYS_DOWN]
    for section in range(1, max(min(held, int(at_once * waves)), 1) + 1):
        for n in LATE if section > TWO_WAVES * at_once else LATE[:1]:
            late = key_blocks * n // 16
            order = steps[late:][::-1] + steps[:late]
            turn = LATE_TURN / residues
            ends[section, late] = last_end(order, heads, section, WGMMA_PROCESSORS, turn=turn, in_turn=late)
    best = [x for x, end in ends.items() if end <= SUMS_GAIN * min(ends.values())]
    return min(best, key=lambda x: (x[1] > key_blocks // 2, abs(x[0] - 2 * at_once)))


def _late_alone(problem: Problem, tiles: Tiles, heads: int, key_blocks: int, group: int, residues: int) -> int:
    """How many blocks of keys of a head are late, if all heads are in one section."""
    tried: Iterable[int] = sorted(LATE_ALONE, key=lambda n: abs(n - 8))
    if is_wide(problem) and heads * key_blocks > LATE_WIDE[0] * WGMMA_PROCESSORS:  # L2 does not hold what others read
        tried = LATE_WIDE[1:]
    lengths = [-(-rows_that_see(problem, j, tiles.bc) // tiles.br) * group for j in range(0, problem.Tk, tiles.bc)]
    best, least = 0, math.inf
    for n in tried:
        late, cost = key_blocks * n // 16, 1 + LATE_GAIN[0] * abs(n - 8) + LATE_GAIN[1] * (n < 8)
        order = [steps + BLOCK_STEPS for steps in lengths[late:][::-1] + lengths[:late]]
        if last_end(order, heads, heads, WGMMA_PROCESSORS) * cost < least:  # without waiting
            end = _end_of_turns(lengths, heads, late, group, residues) * cost
            best, least = (late, end) if end < least else (best, least)
    return best


def _end_of_turns(lengths: list[int], heads: int, late: int, group: int, residues: int) -> float:
    """When the last multiprocessor is done with blocks of keys of these lengths, in steps, of which each adds to dQ
    behind those that had their turn before: those that are not late from the first rows that see them on, the last keys
    first; then the ``late`` first ones of each head, from the last rows down, to other sums.

    ``lengths``: under a causal mask; one block of rows has ``group`` steps.
    """
    blocks, rows = len(lengths), max(lengths) // group
    free = np.zeros((2, residues, heads, rows))  # when the next one may add to a block of rows
    ends = [0.0] * WGMMA_PROCESSORS
    for block in [*range(blocks - 1, late - 1, -1), *range(late)]:
        done = np.arange(1, lengths[block] // group + 1) * group
        for head in range(heads):
            is_late = block < late
            turns = free[int(is_late), block % residues, head, rows - len(done) :]
            turns = turns[::-1] if is_late else turns
            begin = ends[0] + BLOCK_STEPS
            # Each step ends one after the one before, or when it has its turn
            times = done + np.maximum(np.maximum.accumulate(turns - done), begin)
            turns[:] = times + TURN_STEPS
            heapq.heapreplace(ends, float(times[-1]) if len(done) else begin)
    return max(ends)
