"""Vector code for one panel: what softmax does to scores while they lie in the L1 cache.

A panel is rows of NR numbers, one after the other (microkernel.py). In the forward kernels the NR lanes are queries
and the rows keys, so that the maximum and the sum of softmax need no reduction across a vector; they stay in registers
from the first row to the last. Written as LLVM IR, because LLVM would otherwise load and store them at every row.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from rawflash.backends.numba_cpu.microkernel import LONGEST_SUM, OPTIONS, SHAPE, _element_pointer
from rawflash.backends.numba_cpu.numerics import _exp_coefficients

__all__ = ["LOG2_E", "LOWEST", "Vectors", "exponents", "scale_and_add_panel", "scale_panel", "softmax_panel"]

LOG2_E = 1 / math.log(2)
_MANTISSA = {4: 23, 8: 52}
_BIAS = {4: 127, 8: 1023}
# float64 has to keep the subnormal numbers, which sums of products with large ones reach: 2^n is made 2^64 times as
# large and the product with it made smaller again. Of float32 they may vanish (rawflash.accuracy).
_SPARE = {4: 0, 8: 64}
LOWEST = {size: -float(_BIAS[size] + spare) for size, spare in _SPARE.items()}  # 2 to the power of that is 0
_LOWEST_4, _LOWEST_8 = LOWEST.values()
# 2^r for abs(r) <= 1/2 by powers of r. float32: the least largest relative error, 9e-8, of those that are 1 at r = 0
# (Lawson's weighted least squares); with rounding 2.1e-7. float64: the series of `numerics.exp`.
_LN2 = math.log(2)
_POWER_OF_TWO = {
    4: (1.0, 0.69314698, 0.24022242, 0.05550734, 0.00967151, 0.00132647),
    8: (1.0, _LN2, *(c * _LN2 ** (j + 2) for j, c in enumerate(_exp_coefficients(11)))),
}


@njit(**OPTIONS)
def exponents(factor, S):
    """What `softmax_panel` must know of exp(factor x), factor > 0, in the dtype of S: log2(e) factor, and the x below
    which it is 0."""
    real = S.dtype.type
    return real(factor * LOG2_E), real((_LOWEST_4 if S.itemsize == 4 else _LOWEST_8) / (factor * LOG2_E))


class Vectors:
    """Emits IR for vectors of one dtype: an operation a method, a panel row at a time."""

    def __init__(self, context, builder, array_type):
        self.context, self.builder = context, builder
        self.scalar = context.get_data_type(array_type.dtype)
        self.size = context.get_abi_sizeof(self.scalar)
        self.lanes = SHAPE.vector_bytes // self.size
        self.kind = ir.VectorType(self.scalar, self.lanes)
        self.words = ir.VectorType(ir.IntType(8 * self.size), self.lanes)
        self.index = context.get_value_type(types.intp)

    def constant(self, x):
        """x in every lane."""
        return ir.Constant(self.kind, [float(np.float32(x)) if self.size == 4 else float(x)] * self.lanes)

    def spread(self, x):
        """A scalar value in every lane."""
        first = self.builder.insert_element(ir.Constant(self.kind, ir.Undefined), x, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), None))

    def pointers(self, array_type, array, offset):
        """Pointers to the vectors of the panel row that begins at an offset."""
        first = _element_pointer(self.context, self.builder, array_type, array, offset)
        steps = [self.builder.gep(first, [self.index(v * self.lanes)]) for v in range(SHAPE.vectors)]
        return [self.builder.bitcast(p, self.kind.as_pointer()) for p in steps]

    def load(self, pointers):
        return [self.builder.load(p, align=self.size) for p in pointers]

    def store(self, values, pointers):
        for value, pointer in zip(values, pointers, strict=True):
            self.builder.store(value, pointer, align=self.size)

    def fma(self, x, y, z):
        """x y + z, rounded once where the processor has FMA."""
        kind, name = ir.FunctionType(self.kind, [self.kind] * 3), f"llvm.fmuladd.v{self.lanes}f{8 * self.size}"
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, [x, y, z])

    def greater(self, x, y):
        """The greater number of each lane; y where one is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", x, y), x, y)

    def exp2(self, x, factor, lowest):
        """2^(x factor), for x factor <= 0; exactly 0 from x = lowest down. NaN gives NaN.

        The product is not rounded: n is its integer part, and what is left of it is taken with a fused product. Pairs
        of terms of the polynomial are added by powers of r^2: a third fewer steps one after the other.
        """
        builder, mantissa, bias = self.builder, _MANTISSA[self.size], _BIAS[self.size]
        x, factor = self.greater(self.spread(lowest), x), self.spread(factor)
        # Adding `magic` leaves n in the last bits of the sum, biased as an exponent is: one shift makes 2^n.
        spare = _SPARE[self.size]
        magic = self.constant(1.5 * 2.0**mantissa + bias + spare)
        t = self.fma(x, factor, magic)
        r = self.fma(x, factor, builder.fneg(builder.fsub(t, magic)))
        c = [self.constant(x) for x in _POWER_OF_TWO[self.size]]
        pairs = [self.fma(odd, r, even) for even, odd in zip(c[::2], c[1::2], strict=True)]
        r2, p = builder.fmul(r, r), pairs[-1]
        for pair in reversed(pairs[:-1]):
            p = self.fma(p, r2, pair)
        shift = ir.Constant(self.words, [mantissa] * self.lanes)
        result = builder.fmul(p, builder.bitcast(builder.shl(builder.bitcast(t, self.words), shift), self.kind))
        return builder.fmul(result, self.constant(2.0**-spare)) if spare else result

    def rows(self, count, carried, body):
        """A loop over rows: ``body(row, values) -> values`` on vectors that stay in registers; gives the last ones."""
        builder = self.builder
        before = builder.block
        loop, after = builder.append_basic_block("rows"), builder.append_basic_block("after_rows")
        builder.cbranch(builder.icmp_signed(">", count, self.index(0)), loop, after)
        builder.position_at_end(loop)
        row = builder.phi(self.index)
        values = [builder.phi(self.kind) for _ in carried]
        changed = body(row, values)
        following = builder.add(row, self.index(1))
        row.add_incoming(self.index(0), before)
        row.add_incoming(following, builder.block)
        for phi, first, later in zip(values, carried, changed, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, builder.block)
        end = builder.block
        builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
        builder.position_at_end(after)
        results = [builder.phi(self.kind) for _ in carried]
        for phi, first, later in zip(results, carried, changed, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, end)
        return results


def _row_of(vectors, first, row):
    """Where a row of the panel that begins at `first` begins."""
    width = SHAPE.vectors * vectors.lanes
    return vectors.builder.add(first, vectors.builder.mul(row, vectors.index(width)))


@intrinsic
def softmax_panel(typingctx, S, at, rows, m, l, alpha, lane, factor, lowest):
    """Online softmax of a panel of scores: S becomes P = 2^(factor (S - m)), factor > 0.

    Rows ``[0, rows)`` of the panel at ``at``; ``m``, ``l`` and ``alpha`` hold the running maximum of S, the running sum
    of P and, on return, the multiplier 2^(factor (m_old - m)) for what was accumulated before, of lanes
    ``lane : lane + NR`` (Dao 2024, algorithm 1, lines 9-10). ``lowest`` is the S - m whose P is 0. Returns whether any
    multiplier is not 1.
    A lane that has seen nothing has m = -inf and l = 0; a NaN is left to P and l.
    """
    scalar = S.dtype
    signature = types.boolean(S, types.intp, types.intp, m, l, alpha, types.intp, scalar, scalar)

    def codegen(context, builder, signature, args):
        S, at, rows, m, l, alpha, lane, factor, lowest = args
        v = Vectors(context, builder, signature.args[0])
        m_at, l_at, alpha_at = (
            v.pointers(signature.args[n], array, lane) for n, array in ((3, m), (4, l), (5, alpha))
        )

        def raise_by(row, values):
            scores = v.load(v.pointers(signature.args[0], S, _row_of(v, at, row)))
            return [v.greater(s, x) for s, x in zip(scores, values)]

        before = v.load(m_at)
        top = v.rows(rows, before, raise_by)
        v.store(top, m_at)
        none, zero = v.constant(-math.inf), v.constant(0.0)
        # A row that has seen nothing: exp(-inf - 0) = 0.
        shift = [builder.select(builder.fcmp_ordered("==", x, none), zero, x) for x in top]
        multiplier = [v.exp2(builder.fsub(x, y), factor, lowest) for x, y in zip(before, shift)]
        # +inf stays +inf: its rows are NaN already
        multiplier = [
            builder.select(builder.fcmp_ordered("==", x, y), v.constant(1.0), f)
            for x, y, f in zip(before, top, multiplier)
        ]
        v.store(multiplier, alpha_at)

        def exponentiate(row, sums):
            pointers = v.pointers(signature.args[0], S, _row_of(v, at, row))
            P = [v.exp2(builder.fsub(s, x), factor, lowest) for s, x in zip(v.load(pointers), shift)]
            v.store(P, pointers)
            return [builder.fadd(total, p) for total, p in zip(sums, P)]

        def sum_some(part, sums):
            first = builder.mul(part, v.index(LONGEST_SUM))
            left = builder.sub(rows, first)
            count = builder.select(builder.icmp_signed("<", left, v.index(LONGEST_SUM)), left, v.index(LONGEST_SUM))
            some = v.rows(count, [zero] * SHAPE.vectors, lambda row, x: exponentiate(builder.add(first, row), x))
            return [builder.fadd(x, y) for x, y in zip(sums, some)]

        # What was summed before comes last: errors of a long sum then grow with the length of its parts, not its own.
        parts = builder.sdiv(builder.add(rows, v.index(LONGEST_SUM - 1)), v.index(LONGEST_SUM))
        sums = v.rows(parts, [zero] * SHAPE.vectors, sum_some)
        v.store([v.fma(x, f, total) for x, f, total in zip(v.load(l_at), multiplier, sums)], l_at)
        changed = [builder.fcmp_unordered("!=", f, v.constant(1.0)) for f in multiplier]
        some = changed[0]
        for other in changed[1:]:
            some = builder.or_(some, other)
        flags = builder.bitcast(some, ir.IntType(v.lanes))
        return builder.zext(builder.icmp_unsigned("!=", flags, flags.type(0)), context.get_value_type(types.boolean))

    return signature, codegen


@intrinsic
def scale_panel(typingctx, O, at, rows, factor, lane):
    """O[at + r NR + x] *= factor[lane + x] for r < rows."""
    signature = types.void(O, types.intp, types.intp, factor, types.intp)

    def codegen(context, builder, signature, args):
        O, at, rows, factor, lane = args
        v = Vectors(context, builder, signature.args[0])
        by = v.load(v.pointers(signature.args[3], factor, lane))

        def scale(row, values):
            pointers = v.pointers(signature.args[0], O, _row_of(v, at, row))
            v.store([builder.fmul(x, f) for x, f in zip(v.load(pointers), by)], pointers)
            return []

        v.rows(rows, [], scale)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def scale_and_add_panel(typingctx, O, at, rows, factor, lane, more):
    """O[at + r NR + x] = O[at + r NR + x] factor[lane + x] + more[r NR + x] for r < rows, rounded once."""
    signature = types.void(O, types.intp, types.intp, factor, types.intp, more)

    def codegen(context, builder, signature, args):
        O, at, rows, factor, lane, more = args
        v = Vectors(context, builder, signature.args[0])
        by = v.load(v.pointers(signature.args[3], factor, lane))

        def scale_and_add(row, values):
            pointers = v.pointers(signature.args[0], O, _row_of(v, at, row))
            added = v.load(v.pointers(signature.args[5], more, _row_of(v, v.index(0), row)))
            v.store([v.fma(x, f, y) for x, f, y in zip(v.load(pointers), by, added)], pointers)
            return []

        v.rows(rows, [], scale_and_add)
        return context.get_dummy_value()

    return signature, codegen
