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

__all__ = ["MR", "NR", "SHAPE", "RegisterTile", "claim", "gemm", "longest_score_sum", "padded"]


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
# is multiplied by everything that softmax makes of it, so those sums are kept short.
LONGEST_SUM, LONGEST_FLOAT32_SCORE_SUM = 64, 12
_ROW_BYTES = SHAPE.vectors * SHAPE.vector_bytes  # of one row of a register tile, whatever the element


def padded(extent: int, granule: int) -> int:
    """`extent` rounded up to a multiple of `granule`."""
    return -(-extent // granule) * granule


def _element_pointer(context, builder, array_type, array, offset):
    """Pointer to element `offset` of a 1-D array: no bounds check, no wrap-around of negative indices."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [offset])


def _broadcast(builder, scalar, vector):
    """`scalar` in every lane."""
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None)
    return builder.shuffle_vector(first, first, lanes)


@intrinsic
def register_tile_product(typingctx, A, a, a_row, a_col, B, b, b_row, C, c, c_row, k, accumulate):
    """One MR x NR register tile: C[c + r c_row + x] = (accumulate ? itself : 0) + sum_{t<k} A[...] B[...].

    Arguments as for `gemm`.
    """
    stride = types.intp
    signature = types.void(
        A, stride, stride, stride, B, stride, stride, C, stride, stride, stride, types.boolean
    )

    def codegen(context, builder, signature, args):
        A, a, a_row, a_col, B, b, b_row, C, c, c_row, k, accumulate = args
        A_type, B_type, C_type = (signature.args[i] for i in (0, 4, 7))
        scalar = context.get_data_type(C_type.dtype)
        size = context.get_abi_sizeof(scalar)
        lanes = SHAPE.vector_bytes // size
        vector = ir.VectorType(scalar, lanes)
        index = a.type
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

        rows, vectors = range(SHAPE.rows), range(SHAPE.vectors)
        alone_or_together: list = []
        A_rows = [
            _element_pointer(context, builder, A_type, A, builder.add(a, times(r, a_row))) for r in rows
        ]
        B_base = _element_pointer(context, builder, B_type, B, b)
        C_base = _element_pointer(context, builder, C_type, C, c)
        C_tile = [vector_pointer(shifted(C_base, times(r, c_row)), v) for r in rows for v in vectors]

        entry = builder.block
        step, end, add, write = map(builder.append_basic_block, ("step", "end", "add", "write"))
        builder.cbranch(builder.icmp_signed(">", k, index(0)), step, end)

        # A rank-1 update: a row of B in registers, one broadcast of A for each row of the tile.
        builder.position_at_end(step)
        t = builder.phi(index)
        sums = [builder.phi(vector) for _ in C_tile]
        B_row = shifted(B_base, builder.mul(t, b_row))
        B_t = [builder.load(vector_pointer(B_row, v), align=size) for v in vectors]
        column = builder.mul(t, a_col)
        A_t = [builder.load(shifted(A_row, column)) for A_row in A_rows]
        A_t = [_broadcast(builder, value, vector) for value in A_t]
        products = [(A_t[r], B_t[v]) for r in rows for v in vectors]
        updated = [builder.call(fma, [*factors, total]) for factors, total in zip(products, sums)]
        following = builder.add(t, index(1))
        builder.cbranch(builder.icmp_signed("<", following, k), step, end)
        zero = vector(None)
        for phi, first, later in [(t, index(0), following), *((total, zero, new) for total, new in zip(sums, updated))]:
            phi.add_incoming(first, entry)
            phi.add_incoming(later, step)

        builder.position_at_end(end)
        products_of_k = [builder.phi(vector) for _ in C_tile]
        for phi, last in zip(products_of_k, updated):
            phi.add_incoming(zero, entry)
            phi.add_incoming(last, step)
        builder.cbranch(cgutils.as_bool_bit(builder, accumulate), add, write)

        # C is read only when asked for: it may be fresh memory that holds NaN. It is added at the end, so that the
        # rounding error of a long sum grows with the length of its parts, not with its own.
        builder.position_at_end(add)
        added = [builder.fadd(builder.load(p, align=size), total) for p, total in zip(C_tile, products_of_k)]
        builder.branch(write)

        builder.position_at_end(write)
        for alone, together, pointer in zip(products_of_k, added, C_tile):
            phi = builder.phi(vector)
            phi.add_incoming(alone, end)
            phi.add_incoming(together, add)
            alone_or_together.append((phi, pointer))
        for phi, pointer in alone_or_together:  # all phis of a block stand before its first store
            builder.store(phi, pointer, align=size)
        return context.get_dummy_value()

    return signature, codegen


@njit(nogil=True, error_model="numpy")
def gemm(A, a, a_row, a_col, B, b, b_row, C, c, c_row, m, n, k, accumulate, longest=LONGEST_SUM):
    """C[c + r c_row + x] = (accumulate ? itself : 0) + sum_t A[a + r a_row + t a_col] B[b + t b_row + x].

    r < m, x < n, t < k, on 1-D arrays of one dtype (float32 or float64). A may be strided in both directions,
    which is how a caller asks for its transpose; B and C have contiguous rows. At most `longest` products are
    added one after the other, then those sums. k = 0 fills C with zeros, or
    leaves it as it is when accumulating.

    Padding: with M = m rounded up to a multiple of MR and N = n rounded up to a multiple of NR, all of A's
    rows r < M, B's columns x < N and C's block r < M, x < N are touched (A and B read, C written, and read
    when accumulating). Callers guarantee that these are inside the buffers and, in C, free to be overwritten.
    Nothing outside is touched, and nothing is rounded up along k. What the padding of A and B holds, NaN
    included, only ever reaches the padding of C. No alignment is needed; C must not overlap A or B.
    """
    columns = _ROW_BYTES // C.itemsize
    for x in range(0, n, columns):  # this panel of B stays in L1 while the rows of A stream past it
        for r in range(0, m, MR):
            at = c + r * c_row + x
            for t in range(0, max(k, 1), longest):
                register_tile_product(
                    A, a + r * a_row + t * a_col, a_row, a_col, B, b + t * b_row + x, b_row, C, at, c_row,
                    min(k - t, longest), accumulate or t > 0,
                )  # fmt: skip


@njit(nogil=True, inline="always")
def longest_score_sum(S):
    """What `gemm` shall take for `longest` when it computes scores into S."""
    return LONGEST_FLOAT32_SCORE_SUM if S.itemsize == 4 else LONGEST_SUM


@intrinsic
def claim(typingctx, counter, i):
    """Atomically add 1 to counter[i] (1-D int64) and return what it held: the next piece of work to do."""
    signature = types.int64(counter, types.intp)

    def codegen(context, builder, signature, args):
        pointer = _element_pointer(context, builder, signature.args[0], *args)
        # Relaxed: the counter hands out indices and publishes no other memory; joining the threads does that.
        return builder.atomic_rmw("add", pointer, ir.IntType(64)(1), "monotonic")

    return signature, codegen
