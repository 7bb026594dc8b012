"""Vector code of the backward pass: what happens to scores between their product and the three that use them.

In the backward kernels the NR lanes of a panel are keys and its rows queries: lse and delta are one number a row, and
nothing is reduced across a vector.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rawflash.backends.numba_cpu.microkernel import SHAPE, _element_pointer
from rawflash.backends.numba_cpu.panel import LOG2_E, LOWEST, Vectors, _row_of

__all__ = ["add_panel", "gradient_panel", "panel_to_rows", "row_sums", "rows_to_panel"]

_LOWEST = {size: power / LOG2_E for size, power in LOWEST.items()}  # whose exp is 0


@intrinsic
def gradient_panel(typingctx, x, P, dP, rows, dS, dS_row, lse, delta, first, scale):
    """S becomes P = exp(scale S - lse), and dS = P * (dP - delta), for ``rows`` rows of a panel.

    ``x`` holds the panels of S and of dP, at ``P`` and ``dP``, and gets dS at ``dS``, rows ``dS_row`` apart; ``lse``
    and ``delta`` begin at ``first``. A hidden key, S = -inf, has P = 0 whatever lse is, and where P is 0 so is dS:
    selected, for dP may overflow there. No probability exceeds one, but the rounding error of a huge score may exceed
    lse by more than exp can take. NaN passes.
    """
    offset, scalar = types.intp, x.dtype
    signature = types.void(x, offset, offset, offset, offset, offset, lse, delta, offset, scalar)

    def codegen(context, builder, signature, args):
        x, P, dP, rows, dS, dS_row, lse, delta, first, scale = args
        x_type, lse_type, delta_type = (signature.args[n] for n in (0, 6, 7))
        v = Vectors(context, builder, x_type)
        zero, hidden, factor = v.constant(0.0), v.constant(-math.inf), v.spread(scale)
        log2_e, lowest = ir.Constant(v.scalar, _rounded(v, LOG2_E)), ir.Constant(v.scalar, _rounded(v, _LOWEST[v.size]))

        def of_row(array_type, array, row):
            pointer = _element_pointer(context, builder, array_type, array, builder.add(first, row))
            return v.spread(builder.load(pointer))

        def differentiate(row, values):
            minus_lse, gamma = builder.fneg(of_row(lse_type, lse, row)), of_row(delta_type, delta, row)
            P_at = v.pointers(x_type, x, _row_of(v, P, row))
            dP_at = v.pointers(x_type, x, _row_of(v, dP, row))
            dS_at = v.pointers(x_type, x, builder.add(dS, builder.mul(row, dS_row)))
            p_row, dS_row_ = [], []
            for s, g in zip(v.load(P_at), v.load(dP_at)):
                t = v.fma(s, factor, minus_lse)
                t = builder.select(builder.fcmp_ordered("<", zero, t), zero, t)  # false for NaN, which passes
                p = builder.select(builder.fcmp_ordered("==", s, hidden), zero, v.exp2(t, log2_e, lowest))
                product = builder.fmul(p, builder.fsub(g, gamma))
                p_row.append(p)
                dS_row_.append(builder.select(builder.fcmp_ordered("==", p, zero), zero, product))
            v.store(p_row, P_at)
            v.store(dS_row_, dS_at)
            return []

        v.rows(rows, [], differentiate)
        return context.get_dummy_value()

    return signature, codegen


def _rounded(v, number):
    return float(np.float32(number)) if v.size == 4 else float(number)


@intrinsic
def rows_to_panel(typingctx, x, source, source_row, target, rows):
    """x[target + r NR + c] = x[source + r source_row + c] for r < rows, c < NR."""
    offset = types.intp
    signature = types.void(x, offset, offset, offset, offset)

    def codegen(context, builder, signature, args):
        x, source, source_row, target, rows = args
        v = Vectors(context, builder, signature.args[0])

        def copy(row, values):
            from_ = v.pointers(signature.args[0], x, builder.add(source, builder.mul(row, source_row)))
            v.store(v.load(from_), v.pointers(signature.args[0], x, _row_of(v, target, row)))
            return []

        v.rows(rows, [], copy)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def panel_to_rows(typingctx, x, source, y, target, target_row, rows, factor):
    """y[target + r target_row + c] = factor * x[source + r NR + c] for r < rows, c < NR."""
    offset = types.intp
    signature = types.void(x, offset, y, offset, offset, offset, x.dtype)

    def codegen(context, builder, signature, args):
        x, source, y, target, target_row, rows, factor = args
        v = Vectors(context, builder, signature.args[0])
        by = v.spread(factor)

        def copy(row, values):
            from_ = v.pointers(signature.args[0], x, _row_of(v, source, row))
            to = v.pointers(signature.args[2], y, builder.add(target, builder.mul(row, target_row)))
            v.store([builder.fmul(number, by) for number in v.load(from_)], to)
            return []

        v.rows(rows, [], copy)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def add_panel(typingctx, target, at, source, first, rows):
    """target[at + n] += source[first + n] for n < rows NR."""
    offset = types.intp
    signature = types.void(target, offset, source, offset, offset)

    def codegen(context, builder, signature, args):
        target, at, source, first, rows = args
        v = Vectors(context, builder, signature.args[0])

        def add(row, values):
            pointers = v.pointers(signature.args[0], target, _row_of(v, at, row))
            other = v.pointers(signature.args[2], source, _row_of(v, first, row))
            v.store([builder.fadd(a, b) for a, b in zip(v.load(pointers), v.load(other))], pointers)
            return []

        v.rows(rows, [], add)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def row_sums(typingctx, x, X, Y, row, rows, width, total, first):
    """total[first + r] = sum over c < width of x[X + r row + c] * x[Y + r row + c]; width is a multiple of NR.

    Each lane sums every NR-th product: the sums are short, and so is their error.
    """
    offset = types.intp
    signature = types.void(x, offset, offset, offset, offset, offset, total, offset)

    def codegen(context, builder, signature, args):
        x, X, Y, row, rows, width, total, first = args
        x_type, total_type = signature.args[0], signature.args[6]
        v = Vectors(context, builder, x_type)
        columns = v.index(SHAPE.vectors * v.lanes)
        chunks = builder.sdiv(width, columns)

        def sum_row(r, values):
            begin = builder.mul(r, row)

            def add(chunk, sums):
                at = builder.add(begin, builder.mul(chunk, columns))
                left = v.load(v.pointers(x_type, x, builder.add(X, at)))
                right = v.load(v.pointers(x_type, x, builder.add(Y, at)))
                return [v.fma(a, b, s) for a, b, s in zip(left, right, sums)]

            sums = v.rows(chunks, [v.constant(0.0)] * SHAPE.vectors, add)
            whole = sums[0]
            for other in sums[1:]:
                whole = builder.fadd(whole, other)
            lanes = v.lanes
            while lanes > 1:  # halves, until one lane is left
                lanes //= 2
                half = ir.VectorType(ir.IntType(32), lanes)
                low, high = (
                    builder.shuffle_vector(whole, whole, ir.Constant(half, [start + n for n in range(lanes)]))
                    for start in (0, lanes)
                )
                whole = builder.fadd(low, high)
            sum_ = builder.extract_element(whole, ir.Constant(ir.IntType(32), 0))
            builder.store(sum_, _element_pointer(context, builder, total_type, total, builder.add(first, r)))
            return []

        v.rows(rows, [], sum_row)
        return context.get_dummy_value()

    return signature, codegen
