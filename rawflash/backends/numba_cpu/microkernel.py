"""Matrix products on on-chip tiles, and the shared work counter.

On chip means here: a 1-D NumPy workspace small enough for the caches of one core. Every product of attention
(S^T = K Q^T, O^T += V^T P^T, and the five of the backward pass) goes through `gemm`, which walks C in MR x NR
register tiles; one LLVM-IR intrinsic holds a whole register tile in vector registers for the length of k.

The tile shape depends on the processor only. It is decided once, when this module is imported, from the same
description of the processor that Numba compiles for (`NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES` included).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

__all__ = ["MR", "NR", "OPTIONS", "SHAPE", "RegisterTile", "claim", "columns_of", "gemm", "gemm_scores", "padded"]


#: For functions that kernels call and Python does not: no GIL, no error paths of divisions in loops, and no wrappers,
#: which take a third of the time to compile.
OPTIONS: dict = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


@dataclass(frozen=True)
class RegisterTile:
    """Rows and vectors of C that the micro-kernel keeps in registers.

    `rows * vectors` accumulators, `vectors` registers of B and one broadcast of A must fit in the register
    file (32 registers with AVX-512, else 16), and at least eight accumulators are needed to hide the latency
    of FMA.
    """

    vector_bytes: int
    rows: int
    vectors: int

    def columns(self, dtype) -> int:
        """Columns of C in one register tile for elements of `dtype`."""
        return self.vectors * self.vector_bytes // np.dtype(dtype).itemsize


def register_tile(features: str) -> RegisterTile:
    """The register tile for a comma-separated LLVM feature string such as ``"+avx2,+fma"``."""
    enabled = set(features.split(","))
    if "+avx512f" in enabled:
        return RegisterTile(vector_bytes=64, rows=8, vectors=2)
    if "+avx2" in enabled:
        return RegisterTile(vector_bytes=32, rows=6, vectors=2)
    return RegisterTile(vector_bytes=16, rows=4, vectors=2)


def target_features() -> str:
    """The features Numba compiles for; a processor set by name only counts as having none."""
    if config.CPU_NAME or config.CPU_FEATURES is not None:
        return config.CPU_FEATURES or ""
    return get_host_cpu_features()


SHAPE = register_tile(target_features())
MR = SHAPE.rows
NR = {np.dtype(t): SHAPE.columns(t) for t in (np.float32, np.float64)}
# Products added one after the other before the sum is added to C: as many as is fast. In float32 an error of a score
# is multiplied by everything that softmax makes of it, so those sums are kept short: two chains of half as many rows,
# which cost half the additions to C that short sums of one chain would.
LONGEST_SUM, LONGEST_SCORE_SUM = 64, 16
SCORE_CHAINS = 2
# Rows or keys that are summed before what they give is added to what others gave: on chip, and in main memory, where
# to add takes longer.
LONGEST_ROW_SUM, LONGEST_STORED_SUM = 1024, 4096
SCORE_ROWS = MR // SCORE_CHAINS
_ROW_BYTES = SHAPE.vectors * SHAPE.vector_bytes  # of one row of a register tile, whatever the element


def padded(extent: int, granule: int) -> int:
    """`extent` rounded up to a multiple of `granule`."""
    return -(-extent // granule) * granule


@njit(**OPTIONS, inline="always")
def columns_of(array):
    """NR for the dtype of an array."""
    return _ROW_BYTES // array.itemsize


def _element_pointer(context, builder, array_type, array, offset):
    """Pointer to element `offset` of a 1-D array: no bounds check, no wrap-around of negative indices."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [offset])


def _broadcast(builder, scalar, vector):
    """`scalar` in every lane."""
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None)
    return builder.shuffle_vector(first, first, lanes)


def _product_of(rows_of_tile, scores):
    """The intrinsic for register tiles of so many rows; `scores`: for `gemm_scores`."""

    @intrinsic
    def product(typingctx, A, a, a_row, a_col, B, b, C, c, k, accumulate):
        """One register tile: C[c + r NR + x] = (accumulate ? itself : 0) + sum_{t<k} A[...] B[...].

        Arguments as for `gemm`; for scores a_col counts as 1.
        """
        stride = types.intp
        signature = types.void(A, stride, stride, stride, B, stride, C, stride, stride, types.boolean)

        def codegen(context, builder, signature, args):
            A, a, a_row, a_col, B, b, C, c, k, accumulate = args
            A_type, B_type, C_type = (signature.args[i] for i in (0, 4, 6))
            scalar = context.get_data_type(C_type.dtype)
            size = context.get_abi_sizeof(scalar)
            lanes = SHAPE.vector_bytes // size
            vector = ir.VectorType(scalar, lanes)
            index = a.type
            a_col = index(1) if scores else a_col
            width = SHAPE.vectors * lanes
            chains = SCORE_CHAINS if scores else 1
            longest = SCORE_CHAINS * LONGEST_SCORE_SUM if scores else LONGEST_SUM
            # fmuladd, not fma: on a processor without FMA the latter is a call into libm for each lane.
            name = f"llvm.fmuladd.v{lanes}f{8 * size}"
            fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), name)

            def shifted(pointer, *offsets):
                for offset in offsets:
                    pointer = builder.gep(pointer, [offset])
                return pointer

            def vector_pointer(pointer, v):
                return builder.bitcast(shifted(pointer, index(v * lanes)), vector.as_pointer())

            def times(r, stride):
                return builder.mul(index(r), stride)

            rows, vectors = range(rows_of_tile), range(SHAPE.vectors)
            A_rows = [
                _element_pointer(context, builder, A_type, A, builder.add(a, times(r, a_row))) for r in rows
            ]
            B_base = _element_pointer(context, builder, B_type, B, b)
            C_base = _element_pointer(context, builder, C_type, C, c)
            C_tile = [vector_pointer(shifted(C_base, index(r * width)), v) for r in rows for v in vectors]

            zero = vector(None)

            def rank_1_update(t, sums):
                """A row of B in registers, one broadcast of A for each row of the tile."""
                B_row = shifted(B_base, builder.mul(t, index(width)))
                B_t = [builder.load(vector_pointer(B_row, v), align=size) for v in vectors]
                column = builder.mul(t, a_col)
                A_t = [builder.load(shifted(A_row, column)) for A_row in A_rows]
                A_t = [_broadcast(builder, value, vector) for value in A_t]
                products = [(A_t[r], B_t[v]) for r in rows for v in vectors]
                if sums is None:
                    return [builder.fmul(*factors) for factors in products]
                return [builder.call(fma, [*factors, total]) for factors, total in zip(products, sums)]

            entry = builder.block
            names = ("part", "whole", "rest", "step", "end", "add", "write", "done")
            part, whole, rest, step, end, add, write, done = map(builder.append_basic_block, names)
            builder.branch(part)

            # A part: products that are added one after the other, from `first` up to `stop`. A whole one of scores is
            # in chains, written out; what is left over of scores is added in parts of the length of a chain.
            builder.position_at_end(part)
            first, adding = builder.phi(index), builder.phi(accumulate.type)
            whole_stop = builder.add(first, index(longest))
            rest_stop = builder.add(first, index(longest // chains))
            is_whole = builder.icmp_signed("<=", whole_stop, k) if scores else ir.Constant(ir.IntType(1), 0)
            builder.cbranch(is_whole, whole, rest)

            builder.position_at_end(whole)
            of_chains: list = [None] * chains
            for n in range(longest if scores else 0):
                of_chains[n % chains] = rank_1_update(builder.add(first, index(n)), of_chains[n % chains])
            of_whole = of_chains[0] or [zero for _ in C_tile]
            for chain in of_chains[1:]:
                of_whole = [builder.fadd(x, y) for x, y in zip(of_whole, chain)]
            builder.branch(end)

            builder.position_at_end(rest)
            last = builder.select(builder.icmp_signed("<", rest_stop, k), rest_stop, k)
            builder.cbranch(builder.icmp_signed(">", last, first), step, end)

            builder.position_at_end(step)
            t = builder.phi(index)
            sums = [builder.phi(vector) for _ in C_tile]
            updated = rank_1_update(t, sums)
            following = builder.add(t, index(1))
            builder.cbranch(builder.icmp_signed("<", following, last), step, end)
            for phi, before, later in [(t, first, following), *((x, zero, new) for x, new in zip(sums, updated))]:
                phi.add_incoming(before, rest)
                phi.add_incoming(later, step)

            builder.position_at_end(end)
            stop = builder.phi(index)
            for before, value in ((whole, whole_stop), (rest, rest_stop), (step, rest_stop)):
                stop.add_incoming(value, before)
            products_of_part = [builder.phi(vector) for _ in C_tile]
            for phi, at_once, one_by_one in zip(products_of_part, of_whole, updated):
                phi.add_incoming(at_once, whole)
                phi.add_incoming(zero, rest)
                phi.add_incoming(one_by_one, step)
            builder.cbranch(cgutils.as_bool_bit(builder, adding), add, write)

            # C is read only when asked for: it may be fresh memory that holds NaN. It is added at the end, so that
            # the rounding error of a long sum grows with the length of its parts, not with its own.
            builder.position_at_end(add)
            added = [builder.fadd(builder.load(p, align=size), total) for p, total in zip(C_tile, products_of_part)]
            builder.branch(write)

            builder.position_at_end(write)
            written = [builder.phi(vector) for _ in C_tile]
            for phi, alone, together in zip(written, products_of_part, added):
                phi.add_incoming(alone, end)
                phi.add_incoming(together, add)
            for phi, pointer in zip(written, C_tile):  # all phis of a block stand before its first store
                builder.store(phi, pointer, align=size)
            builder.cbranch(builder.icmp_signed("<", stop, k), part, done)
            for phi, before, later in ((first, index(0), stop), (adding, accumulate, accumulate.type(1))):
                phi.add_incoming(before, entry)
                phi.add_incoming(later, write)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return signature, codegen

    return product


SHORT = 4  # rows of a lower register tile, for what tiles of MR rows leave over
_tall, _short = _product_of(MR, False), _product_of(SHORT, False)
_scores = _product_of(SCORE_ROWS, True)


@njit(**OPTIONS)
def gemm(A, a, a_row, a_col, B, b, C, c, m, k, accumulate):
    """One panel of C: C[c + r NR + x] = (accumulate ? itself : 0) + sum_t A[a + r a_row + t a_col] B[b + t NR + x].

    r < m, x < NR, t < k, on 1-D arrays of one dtype (float32 or float64). B and C are panels: rows of NR numbers,
    one after the other. A may be strided in both directions, which is how a caller asks for its transpose. At most
    LONGEST_SUM products are added one after the other, then those sums. k = 0 fills C with zeros, or leaves it as it
    is when accumulating.

    Padding: with M = m rounded up to a multiple of MR, some of A's rows r < M and C's rows r < M are touched (A read,
    C written, and read when accumulating). Callers guarantee that these are inside the buffers and, in C, free to be
    overwritten. Nothing outside is touched, and nothing is rounded up along k. What the padding of A holds, NaN
    included, only ever reaches the padding of C. No alignment is needed; C must not overlap A or B.
    """
    columns = columns_of(C)
    r = 0
    while r < m:
        if _takes_tall(m - r):
            _tall(A, a + r * a_row, a_row, a_col, B, b, C, c + r * columns, k, accumulate)
            r += MR
        else:
            _short(A, a + r * a_row, a_row, a_col, B, b, C, c + r * columns, k, accumulate)
            r += SHORT


@njit(**OPTIONS)
def gemm_scores(A, a, a_row, B, b, C, c, m, k):
    """`gemm` for scores: A's rows are contiguous, C is overwritten, and sums are short (LONGEST_SCORE_SUM)."""
    for r in range(0, m, SCORE_ROWS):
        _scores(A, a + r * a_row, a_row, 1, B, b, C, c + r * columns_of(C), k, False)


@njit(**OPTIONS, inline="always")
def _takes_tall(rest):
    """Whether a tile of MR rows is next: so that the rows of all tiles exceed those asked for by as few as can be."""
    return rest > 2 * SHORT or MR - 2 < rest <= MR


@intrinsic
def claim(typingctx, counter, i):
    """Atomically add 1 to counter[i] (1-D int64) and return what it held: the next piece of work to do."""
    signature = types.int64(counter, types.intp)

    def codegen(context, builder, signature, args):
        pointer = _element_pointer(context, builder, signature.args[0], *args)
        # Relaxed: the counter hands out indices and publishes no other memory; joining the threads does that.
        return builder.atomic_rmw("add", pointer, ir.IntType(64)(1), "monotonic")

    return signature, codegen
