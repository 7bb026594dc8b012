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
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from rawflash.errors import ProblemError, TileError
from rawflash.hardware import HALVES, TENSOR, Chip
from rawflash.problem import Problem

ON_CHIP = "on-chip"
REGISTERS = "registers"
SIMT, SPLIT, DOUBLE = "simt", "split", "double"
PIECES = (SPLIT, DOUBLE)  # families whose products are tensor-core pieces of 16 x 8 numbers (mma/pieces.cuh)
PIECE = 8  # columns of one
PIECES_ROWS = 128  # of a forward block: 16 for each of eight warps, so that a row is one warp's
PIECES_MOST = 64  # keys of a forward block, rows and keys of a backward one: what accumulators leave of the registers
PIECES_LEAST = 32  # rows and keys of a backward block: fewer would leave warps without a piece
DOUBLE_FORWARD = (64, 32, 24, 16)  # keys of forward blocks in which P stays: the first that fits
DOUBLE_WIDEST = 96  # columns of V beside the first of these: with more, registers are spilled
PIECES_BANKS = 32  # bytes by which neighbouring rows of a tile are apart, beyond a multiple of 32 numbers
MMA = "mma"  # family of the fa2 kernels whose products of 16-bit numbers are tensor-core ones (numba_cuda/mma)
MMA_DEPTH = 16  # numbers that such a product sums
MMA_MOST = 128  # head dimension
MMA_COLUMNS = 64  # of a tile, or twice that
MMA_LONGEST = 1 << 30  # rows and keys: they count in 32 bits
MMA_SCALES = (1e-30, 1e30)  # between which scores can be had from unscaled ones by one multiplication in float32
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
WGMMA = "wgmma"  # family of cupy_raw's fa2 kernels of 16-bit numbers on sm_90 (cuda/sm90)
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
# Blocks of threads prepare and finish rows of others while they compute: from so many of them for each multiprocessor
# (by whether there is a fixed order, and a mask: singly; in pairs; and at least where all would be divided by heads
# else) and so many blocks of keys on, and where at least so many rows see one, on average (by the wider of d and dv);
# so many multiprocessors' blocks later and earlier. In a fixed order from more rows on: without this the first one to
# add stores, and there is less to gain.
WGMMA_FUSED = {(False, False): (0.0, 0.0, 0.5), (False, True): (4.0, 1.9, 0.0),
               (True, False): (4.0, 0.0, 0.0), (True, True): (4.0, 0.4, 1.2)}  # fmt: skip
WGMMA_FUSED_KEYS, WGMMA_FUSED_LAG = 4, 1.0
WGMMA_FUSED_ROWS, WGMMA_FUSED_IN_ORDER = {64: 256, 128: 448}, {64: 1 << 30, 128: 768}
WGMMA_FUSED_STAGES = 2
NO_SUMS = {"SUMS": 1, "RESIDUES": 1, "DIAGONAL": 0}
# Blocks of threads that the last blocks of keys are divided among, at most, and what one more costs, in steps.
WGMMA_DIVIDED_MOST, WGMMA_DIVIDED_COST = 8, 6.0
# All blocks of keys, where they are few: among so many at most, and of the time without it so much at most. With more
# query heads than so many of a key head it takes more parts than reckoned for what they read to be in L2.
WGMMA_HEADS_MOST, WGMMA_HEADS_GAIN, WGMMA_HEADS_FEW = 16, 0.9, 4
# Query heads of a key head from which on, under a mask, the same rows of all of them come together: singly; where
# otherwise there would be pairs. Where rows or keys are more than so many.
WGMMA_TOGETHER, WGMMA_TOGETHER_ROWS = {0: 4, 1: 8}, 512
# In a fixed order such rows go down, from more than so many on; with fewer blocks of keys for each multiprocessor than
# so many, no pairs.
WGMMA_DOWN_ROWS, WGMMA_DOWN_WAVES = 256, 1.6
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
# of these where blocks of rows are fewer than for the other kernel. No pairs up to so many (of a head with fewer blocks
# of keys than WGMMA_SUMS_USUAL, or more). Twice as many where rows have so many blocks, and some blocks of keys are
# divided in two and others in four or more.
WGMMA_SUMS_ROWS, WGMMA_SUMS_WAVES, WGMMA_SUMS_SINGLY, WGMMA_SUMS_UNLIKE = (12.0, 10.0), (2.1, 1.65), (0.5, 0.25), 64
# DIAGONAL: up to so many for each multiprocessor (of a head with fewer blocks of keys than WGMMA_SUMS_USUAL; than so
# many; or more). In rows, what it costs to begin and to end a block of threads, to share a block of keys, and each of
# the sums that are added up in the end. About so many lengths of parts are tried.
WGMMA_DIAGONAL, WGMMA_DIAGONAL_KEYS = (0.85, 1.3, 1.5), 32
WGMMA_DIAGONAL_COST, WGMMA_DIAGONAL_TRIED = (128.0, 192.0, 64.0), 64
# Of rows that see a block of keys, on average: from so many on two blocks of threads go through them together; in a
# fixed order wherever they can. Of an odd number of blocks of keys the last one is beside one that does not exist: from
# so many on (by whether there is a fixed order, and a mask). In a fixed order without a mask, up to so many for each
# multiprocessor, only if pairs come in as many turns.
WGMMA_PAIRED_ROWS, WGMMA_PAIRED_ROOM = 2048, 2.1
WGMMA_PAIRED_ODD = {(False, False): 20, (False, True): 34, (True, False): 9, (True, True): 17}
# The first one of a causal band stores its dQ, so that no sums are cleared: up to so many rows and keys (by the wider
# of d and dv), where there are so many heads for each multiprocessor; and from so many rows on others prepare some, in
# a fixed order under a mask, too.
WGMMA_STORED, WGMMA_STORED_HEADS, WGMMA_FUSED_STORED = {64: 1024, 128: 1536}, 0.72, {64: 256, 128: 1 << 30}
# Pieces of work of the last sections of heads, whose end is simulated; of the whole time what less of it has to be.
SIMULATED_PIECES, SECTION_GAIN = 1024, 0.02
SECTION_WAVES = 8  # pieces for each multiprocessor, in calls of which a section may have more heads
WGMMA_WIDE = 64  # Br and Bc where d or dv is above those of WGMMA_BACKWARD
WGMMA_WIDE_STAGES = ((3, 2), (3, 1), (2, 2), (2, 1))  # of Q and dO, and of P, on chip: the first that fit
WGMMA_WIDE_DQ = 64  # columns of dQ that one product has
SPLIT_INPUTS = "split inputs"  # family of cupy_raw's float32 kernels of fa2 that read parts which were split before
SPLIT_PARTS = 3  # bfloat16 numbers of a float32 one
SPLIT_LEAST = 512  # rows, and keys that a row sees: with fewer, splitting the inputs costs more than it gains
SPLIT_COLUMNS = 128  # head dimension
SPLIT_FORWARD = {64: (128, 64), 128: (128, 64)}  # (Br, Bc)
SPLIT_BACKWARD = {64: (64, 128), 128: (64, 64)}
SPLIT_BACKWARD_OF = {"sm_100": {64: (128, 64)}}  # as the assembler spills registers there; 8 % slower on sm_90
SPLIT_THREADS = 256  # of a block
FEW = "few rows"  # family of numba_cpu's fa2 forward pass for few queries: one at a time, not one on each lane
FEW_QUERIES = 8  # of a head; from 12 to 16 on, lanes full of queries are faster
FEW_KEYS = 16  # rows of K or V that it may copy, to have whole vectors
FEW_BLOCK = 512  # keys of a block, at most
FEW_SCORES = 4096  # of all rows: a block has fewer keys, down to a quarter of that, where they would be more
FEW_PART = 1024  # keys that a part of them has at least
FEW_PIECES = 128  # parts of all K/V heads together: enough for threads to end together
FEW_MMA = "few rows, mma"  # family of cupy_raw's fa2 forward pass for few queries in 16 bits (cuda/fa2_few_rows.cu)
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
IJ, JI, PRODUCTS, RESIDENT, STREAMED = "ij", "ji", "products", "resident", "streamed"
_LOOPS = {
    IJ: "Q blocks outside, K/V blocks inside",
    JI: "K/V blocks outside, Q blocks inside",
    PRODUCTS: "one matrix product after the other",
    RESIDENT: "blocks of rows, K and V on chip",
    STREAMED: "blocks of rows, K and V streamed",
    "": "",
}


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


@dataclass(frozen=True)
class Tile:
    """One resident tile: ``rows x cols`` elements of ``itemsize`` bytes, on chip or in registers."""

    name: str
    rows: int
    cols: int
    itemsize: int
    where: str = ON_CHIP

    @property
    def elements(self) -> int:
        """``rows * cols``."""
        return self.rows * self.cols

    @property
    def bytes(self) -> int:
        """Bytes that the tile occupies."""
        return self.elements * self.itemsize


class Divided(NamedTuple):
    """The last blocks of keys of a backward pass, each of which several blocks of threads have some rows of."""

    halved: int = 0  # blocks of keys that two of them share
    others: int = 0  # and those behind these
    parts: int = 1  # how many share each of the latter, at most where there is a level
    level: int = 0  # blocks of keys: of the last ones so many of a head have one part, those before them two, and so on
    up: int = 0  # there, parts that go up
    keys: int = 0  # blocks of keys of a head

    @property
    def threads(self) -> int:
        """Blocks of threads that all of these have."""
        if self.level:
            return self.others // self.keys * sum(max(self.keys - n * self.level, 0) for n in range(self.parts))
        return 2 * self.halved + self.parts * self.others

    @property
    def more(self) -> int:
        """More blocks of threads than blocks of keys."""
        return self.threads - self.halved - self.others


@dataclass(frozen=True)
class Tiles:
    """The block sizes of one kernel and what they put on chip.

    Attributes
    ----------
    br, bc : int
        Rows of a Q block (``|I|``) and of a K/V block (``|J|``).
    resident : tuple of Tile
        What is on chip at once in the inner loop.
    chip : str
        Name of the chip planned for.
    on_chip_bytes : int or None
        M in bytes; None: no bound (tiles written by hand).
    order : str
        The loops: "ij" (Q outside), "ji" (K/V outside), "products", "resident" or "streamed".
    panel : int
        Only "products": whole rows of scores that the softmax takes at a time.
    family : str
        Of the kernels that the plan is for, see :class:`rawflash.hardware.Chip`. "split": float32 products on
        tensor cores, as sums of products of bfloat16 parts; "split inputs": the same, the inputs split
        once by a kernel of its own; "mma", "wgmma": 16-bit products there, sums in float32;
        "few rows": see :mod:`rawflash.backends.numba_cpu.few_rows`.
    parts, part_keys : int
        Only the fa2 forward pass, on a GPU that would else be idle in parts or of the family "few rows": how many
        thread blocks (pieces of work) share the keys of a block of rows, and how many keys each takes (the last
        one the rest).
    threads : int
        Of a block; 0: as many as its family always has.
    grid : int
        Thread blocks, of kernels whose blocks take one piece of work after the other; else 0.
    constants : tuple of (str, int)
        What the text of such a kernel takes as given beside the block sizes.
    lag : int
        Only the backward pass of "wgmma": blocks of threads that come at least between one that prepares rows and the
        first that reads them, or the last that adds to their dQ and the one that finishes it; 0: kernels of their own
        do that.
    parts_bytes : int
        Device memory for parts of pieces of work that these blocks share, so that they end together; 0: they do not.
    divided : Divided
        Only the backward pass of "wgmma": the last blocks of keys, each of which has several blocks of threads.

    Examples
    --------
    >>> from rawflash.hardware import chip
    >>> print(plan_tiles(Problem(Tq=4096, Tk=4096, d=64, dv=64, sram=65536), chip("cpu"), "forward"))
    Br = 64, Bc = 64: Q blocks outside, K/V blocks inside
      Q        64 x 64   x 4 bytes =   16384  on-chip
      O        64 x 64   x 4 bytes =   16384  on-chip
      K or V   64 x 64   x 4 bytes =   16384  on-chip
      S        64 x 64   x 4 bytes =   16384  on-chip
      65536 of M = 65536 bytes of cpu
    """

    br: int
    bc: int
    resident: tuple[Tile, ...] = ()
    chip: str = ""
    on_chip_bytes: int | None = None
    order: str = ""
    panel: int = 0
    family: str = ""
    parts: int = 1
    part_keys: int = 0
    threads: int = 0
    grid: int = 0
    constants: tuple[tuple[str, int], ...] = ()
    lag: int = 0
    parts_bytes: int = 0
    divided: Divided = Divided()

    @cached_property
    def smem_bytes(self) -> int:
        """Bytes of the tiles that lie in on-chip (shared) memory."""
        return sum(tile.bytes for tile in self.resident if tile.where == ON_CHIP)

    @property
    def elements(self) -> int:
        """Elements of all resident tiles."""
        return sum(tile.elements for tile in self.resident)

    def __str__(self) -> str:
        lines = [f"Br = {self.br}, Bc = {self.bc}: {_LOOPS[self.order]}".rstrip(": ")]
        width = max((len(tile.name) for tile in self.resident), default=0)
        for tile in self.resident:
            shape = f"{tile.rows} x {tile.cols}"
            lines.append(
                f"  {tile.name:<{width}}   {shape:<9} x {tile.itemsize} bytes = {tile.bytes:>7}  {tile.where}"
            )
        if self.family == SPLIT:
            lines.append("  float32 products on tensor cores, by six products of bfloat16 parts")
        if self.family == SPLIT_INPUTS:
            lines.append("  float32 products: six of bfloat16 parts on tensor cores, split once before")
        if self.family in (MMA, WGMMA) and any(tile.where == REGISTERS for tile in self.resident):
            lines.append("  products of 16-bit numbers on tensor cores; P and dS in 16, sums in 32 bits")
        if self.family == FEW:
            lines.append("  one row of K or V read for all query heads that share it")
        if self.family == FEW_MMA:
            lines.append(f"  one row of K or V read for {self.br} rows of query heads that share it, on tensor cores")
        if self.family == WGMMA:
            lines.append("  products by warpgroups (wgmma), copies by tensor maps")
        if self.parts > 1:
            lines.append(f"  keys in up to {self.parts} parts of {self.part_keys}, merged by their m and l")
        if self.parts_bytes:
            lines.append(f"  the last pieces of work shared by {self.grid} blocks of threads, {self.parts_bytes} bytes")
        if self.lag:
            lines.append("  delta of later rows and dQ of earlier ones by two warps beside the products")
        if self.divided.threads:
            last = self.divided.halved + self.divided.others
            which = "last " * bool(self.lag) + str(last)
            by = "rows" if self.lag or self.divided.level else "query heads"
            lines.append(f"  the {which} blocks of keys by {self.divided.threads} blocks of threads, by {by}")
        if self.panel:
            lines.append(f"  softmax by panels of {self.panel} whole rows of scores")
        if self.on_chip_bytes is not None:
            lines.append(f"  {self.smem_bytes} of M = {self.on_chip_bytes} bytes of {self.chip}")
        return "\n".join(lines)


def grouped_width(n: int, itemsize: int) -> int:
    """How many neighbouring numbers a thread of a "simt" kernel owns in a row of ``n`` (``Grouped`` in tile.cuh).

    As many as a vector has, unless that would leave more than an eighth of the threads' work idle.
    """
    widths = [w for w in (4, 2) if w <= SIMT_VECTOR_BYTES // itemsize]
    return next((w for w in widths if 8 * _padded(n, w * SIMT_SIDE) <= 9 * _padded(n, SIMT_SIDE)), 1)


def pitch(n: int, itemsize: int) -> int:
    """Numbers between two rows of a "simt" tile of ``n`` columns: what threads touch, as an odd number of vectors."""
    vector = SIMT_VECTOR_BYTES // itemsize
    vectors = -(-_padded(n, grouped_width(n, itemsize) * SIMT_SIDE) // vector)
    return (vectors | 1) * vector


def pieces_pitch(n: int, itemsize: int) -> int:
    """Numbers between two rows of a tile of ``n`` columns whose products are tensor-core pieces (mma/pieces.cuh)."""
    return _padded(n, 32) + PIECES_BANKS // itemsize


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
        and 0 < min(problem.Tq, problem.Tk) <= max(problem.Tq, problem.Tk) < MMA_LONGEST
        and MMA_SCALES[0] < problem.scale < MMA_SCALES[1]
        and MMA_SCALES[0] < problem.scale / (problem.softcap or 1.0) < MMA_SCALES[1]
        and (problem.softcap or 1.0) < MMA_SCALES[1]
        and all(option is None for option in options)
        and not (problem.page or problem.dropout)
    )


def is_wide(problem: Problem) -> bool:
    """Are these columns for cuda/sm90/fa2_backward_wide.cu?"""
    return max(problem.d, problem.dv) > max(WGMMA_BACKWARD)


def _wgmma_backward(problem: Problem, chip: Chip) -> Tiles:
    """The blocks of cuda/sm90/fa2_backward.cu, or of fa2_backward_wide.cu; they fit."""
    d, dv = _padded(problem.d, WGMMA_SLAB), _padded(problem.dv, WGMMA_SLAB)
    if is_wide(problem):
        found = (_wgmma_wide(problem, chip, d, dv, *stages) for stages in WGMMA_WIDE_STAGES)
        return next(tiles for tiles in found if tiles)
    processors = chip.processors or WGMMA_PROCESSORS
    alone = _wgmma_keys(problem, chip, d, dv, 0)
    if not _can_be_fused(problem):
        return alone
    fused = _wgmma_keys(problem, chip, d, dv, max(int(WGMMA_FUSED_LAG * processors), 1))
    paired, band = dict(fused.constants)["PAIRED"], problem.has_band
    blocks = problem.B * problem.Hkv * -(-problem.Tk // fused.bc)
    *least, divided = WGMMA_FUSED[problem.deterministic, band]
    few = blocks < max(least[paired], divided if alone.divided.threads else 0) * processors
    # In a fixed order it takes longer from one turn to the next than a step of 64 rows, unless in pairs; where rows can
    # go down it does not
    slow = problem.deterministic and fused.br < WGMMA_BACKWARD_APART and not paired
    few_keys = _has_few_keys(problem, fused.bc)
    singly = WGMMA_SUMS_SINGLY[not few_keys]
    slow |= dict(alone.constants)["SUMS"] > 1 and (band or not paired or blocks <= singly * processors)
    slow |= rows_down(problem) and blocks < WGMMA_DOWN_WAVES * processors
    slow |= few_keys and _has_sums(problem, processors, fused.bc) and _are_apart(problem, alone.divided)
    # Of an odd number one more, which there is no room for, unless the last ones are divided, of many
    padded = problem.B * problem.Hkv * _padded(-(-problem.Tk // fused.bc), 2)
    no_room = -(-padded // processors) > -(-blocks // processors)
    no_room &= not fused.divided.threads or blocks <= WGMMA_PAIRED_ROOM * processors
    slow |= problem.deterministic and bool(paired and not band) and no_room
    slow |= _together(problem, paired) and not (problem.deterministic and paired)
    return alone if few or slow or fused.smem_bytes > chip.on_chip_bytes else fused


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
    paired = int(
        fused and d == dv == 2 * WGMMA_SLAB
        and (problem.deterministic or _rows_of_keys(problem, bc) >= WGMMA_PAIRED_ROWS)
        and (key_blocks % 2 == 0 or key_blocks >= WGMMA_PAIRED_ODD[problem.deterministic, band])
        and problem.band.lower is None
    )  # fmt: skip
    query_blocks, key_blocks = (_padded(n, 1 + paired) for n in (query_blocks, key_blocks))
    processors = chip.processors or WGMMA_PROCESSORS
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
    cost = sum(rows * group / n + WGMMA_DIVIDED_COST for n in (2 * bool(halved), parts * bool(others)) if n)
    return Divided(halved, others, parts) if last and parts > 1 and cost < rows * group else Divided()


def _divided_by_heads(problem: Problem, processors: int, br: int, bc: int) -> Divided:
    """All blocks of keys, where they are too few, into as many parts each as take least time: by query heads, and where
    that is not enough each head by rows."""
    blocks, group = problem.B * problem.Hkv * -(-problem.Tk // bc), problem.group
    lower, upper = problem.band.bounds()
    longest = -(-min(problem.Tq, upper - lower + bc) // br)
    average = _rows_of_keys(problem, bc) / br * group
    uneven = average <= 0.8 * longest * group  # then long blocks of threads come first

    def steps(parts: int) -> float:
        most = -(-group // parts) * longest if parts < group else -(-longest // (parts // group))
        if uneven and group <= WGMMA_HEADS_FEW:  # who is free takes the next one
            more = (WGMMA_DIVIDED_COST - 2 + parts) * (parts > 1) * WGMMA_ROWS / br
            turns = blocks * parts / processors
        else:  # who has a long one first has a short one then: two turns together are two of the average
            more = (WGMMA_DIVIDED_COST + parts / 2) * (parts > 1)
            turns = -(-blocks * parts // (processors << uneven)) << uneven
        return max(turns * (average / parts + more), most + more)

    # In a fixed order the last keys begin with rows of their own, for which nobody waits: so rows are not divided
    rows = 1 if problem.deterministic and _has_upper_end(problem) else longest
    most = max(min(WGMMA_HEADS_MOST, group * rows) if blocks < 2 * processors else 1, 1)
    alike = not problem.has_band and problem.Tq <= 2 * problem.Tk
    if problem.deterministic and br == WGMMA_BACKWARD_APART and alike:  # many blocks of keys meet at few rows then
        most = min(most, max(WGMMA_HEADS_FEW, group))
    parts = min((n for n in range(1, most + 1) if n < group or n % group == 0), key=steps)
    return Divided(0, blocks, parts) if steps(parts) < WGMMA_HEADS_GAIN * steps(1) else Divided()


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
    return not (short or far) and (not band or _has_upper_end(problem))


def _is_by_head(problem: Problem, processors: int, bc: int) -> bool:
    """Do query heads that share keys have blocks of threads of their own then (BY_HEAD there), as there are few?"""
    blocks = problem.B * problem.Hkv * -(-problem.Tk // bc)
    columns, group, is_long = max(problem.d, problem.dv), problem.group, problem.Tk >= WGMMA_DIAGONAL_KEYS * bc
    far = WGMMA_SUMS_GROUP[columns > WGMMA_SLAB] < group <= WGMMA_HEADS_FEW  # else they may come together
    few_keys = _has_few_keys(problem, bc) and WGMMA_HEADS_FEW < group and columns > WGMMA_SLAB
    fewer = [most for heads, most in WGMMA_SUMS_HEADS[columns > WGMMA_SLAB].items() if group > heads]
    waves = min([WGMMA_SUMS_BY_HEAD[2 if few_keys else is_long], *fewer])
    few = blocks <= (processors if far and is_long else processors // 2) and blocks * group <= waves * processors
    return few and (blocks * group > processors // 2 or far) and problem.has_band and group > 1 and not is_wide(problem)


def _has_few_keys(problem: Problem, bc: int) -> bool:
    """Has a head fewer blocks of keys than WGMMA_SUMS_USUAL?"""
    return -(-problem.Tk // bc) < WGMMA_SUMS_USUAL


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
    rows, columns = _padded(problem.Tq, max(WGMMA_BACKWARD.values())), _padded(problem.d, WGMMA_SLAB)
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
        more = (band or problem.group == 1 and waves <= WGMMA_DIAGONAL[-1]) and rows >= WGMMA_SUMS_ROWS[False] * waves
    steps *= 1 + paired
    residues = 1 if steps >= 2 or not more or parts > WGMMA_HEADS_FEW else 2 if steps > 0.5 else 4
    if not (band or are_alike) and divided.halved and divided.parts >= WGMMA_HEADS_FEW and rows >= WGMMA_SUMS_UNLIKE:
        residues *= 2
    if parts * residues * _bytes_of_sums(problem) > WGMMA_SUMS_BYTES:
        residues = 1
    return {"SUMS": parts * residues, "RESIDUES": residues, "DIAGONAL": int(divided.level > 0)}


def _levels(problem: Problem, processors: int, bc: int) -> Divided:
    """How such blocks of keys are divided under a mask (DIAGONAL in cuda/sm90/backward.cuh): into parts of as many rows
    each, and so many of these going up, as take least time."""
    keys, heads = -(-problem.Tk // bc), problem.B * problem.Hkv
    if heads * keys > WGMMA_DIAGONAL[(keys >= WGMMA_SUMS_USUAL) + (keys >= WGMMA_DIAGONAL_KEYS)] * processors:
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


def _together(problem: Problem, paired: int = 0) -> bool:
    """Does a block of threads of cuda/sm90/fa2_backward.cu go through the same rows of all query heads before the next
    ones? Under a mask it would be at another head than the others, and what all read and add to not be in L2."""
    heads = WGMMA_TOGETHER[paired or problem.varlen]
    return problem.has_band and _is_long(problem) and problem.group >= heads


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
        and _padded(problem.d, WGMMA_SLAB) >= _padded(problem.dv, WGMMA_SLAB)
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
    return (
        not (problem.ragged or problem.varlen or problem.sinks or problem.alibi or problem.softcap is not None)
        and _padded(problem.dv, WGMMA_SLAB) <= _padded(problem.d, WGMMA_SLAB)
        and blocks >= WGMMA_FUSED_KEYS
        and _rows_of_keys(problem, WGMMA_BACKWARD_KEYS) >= rows
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
    return _padded(d, MMA_COLUMNS)


def _padded(n: int, granule: int) -> int:
    return -(-n // granule) * granule


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
    if blocks is None and order is None and wgmma_takes(problem, chip, direction):
        planned = _wgmma_forward(problem, chip)
        if planned is not None:
            return planned
    if blocks is None and order in (None, JI) and wgmma_takes_backward(problem, chip, direction):
        return _wgmma_backward(problem, chip)
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
    part_keys = max(_padded(-(-problem.Tk // max(most, 1)), bc), bc)
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
    columns = max(_padded(d, 32), _padded(dv, 64))

    def resident(units: int) -> tuple[Tile, ...]:
        return (
            Tile("K or V", units * turn, columns, 2),
            Tile("Q", br, _padded(d, 32), 2, REGISTERS if br * _padded(d, 32) <= FEW_MMA_REGISTERS else ON_CHIP),
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


def _wgmma_forward(problem: Problem, chip: Chip) -> Tiles | None:
    """The first row of the table that fits: Q twice and O on its own, if there is room, so that pieces overlap."""
    limit, processors = chip.on_chip_bytes, chip.processors or WGMMA_PROCESSORS
    to_d, to_dv = (_padded(n, WGMMA_SLAB) for n in (problem.d, problem.dv))
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
