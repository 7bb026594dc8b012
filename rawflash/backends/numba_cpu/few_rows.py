"""FlashAttention-2, forward pass, for few rows of queries against many keys: decoding.

The general kernel (:mod:`fa2_forward`) puts queries on the lanes, of which a call with T_q = 1 has one. Here the
keys are on the lanes, K and V are read straight from the user's memory, each row once for all rows of the query
heads that share it, and the time is that of reading them.

One piece of work is a part of the keys of one K/V head. A part leaves ``m``, ``l`` and ``O`` of each row in a
workspace; whoever finishes the last part of a head merges them all, in order, so no result depends on timing:
``m = max m_p``, ``l = sum l_p exp(m_p - m)``, ``O = sum O_p exp(m_p - m)`` (split over keys: Dao, Haziza, Massa,
Sizov, "Flash-Decoding", 2023; the merge is that of the online softmax, Dao 2024, section 3.1).

On chip, with R rows: Q (R, d), O (R, dv), S = P (R, Bc), and a few rows of K or V where the dimension is not a
multiple of the lanes. Read per step: K_j, V_j. Written once per part: O and m, l, or out and lse.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from rawflash.backends.numba_cpu.launch import compiled, describe, for_each_dtype, is_plain, run, view
from rawflash.backends.numba_cpu.microkernel import SHAPE, claim, target_features
from rawflash.backends.numba_cpu.numerics import (
    address_of,
    bfloat16_to_float32,
    exp,
    float16_to_float32,
    float32_to_bfloat16,
    float32_to_float16,
    read,
    write,
)
from rawflash.backends.numba_cpu.tile import aligned, apply_dropout, finish_scores, padded, rows_of
from rawflash.backends.numba_cpu.visibility import EMPTY, PARTIAL, band_class, key_range, program_class
from rawflash.problem import Operands, Problem
from rawflash.tiles import Tiles

#: How elements of a storage type are read: the halves as their bits, told apart by sign.
ELEMENTS = {"float32": np.float32, "float64": np.float64, "float16": np.int16, "bfloat16": np.uint16}
_VECTOR_BYTES = SHAPE.vector_bytes
_LINE = 64  # bytes of a cache line
_IN_ORDER = 8  # rows up to which memory is what counts, not arithmetic
_AHEAD = 8192  # bytes of rows of K or V between the one that is read and the one that is asked for meanwhile
_LEAST_SUMS = 8  # vectors that are summed at once: what hides the latency of FMA

_helper = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


# ------------------------------------------------------------------------------------------------------------
# Products of a few rows with a few keys


def _sums(lanes: int) -> int:
    """(row, key) pairs whose dot products are computed at once."""
    return max(_LEAST_SUMS, lanes)


class _Vectors:
    """Vectors of one storage type as the compute dtype, in LLVM IR."""

    def __init__(self, context, builder, element):
        self.builder, self.element = builder, element
        self.real = ir.DoubleType() if element == types.float64 else ir.FloatType()
        self.size = 8 if element == types.float64 else 4
        self.lanes = _VECTOR_BYTES // self.size
        self.type = ir.VectorType(self.real, self.lanes)
        self.stored_size = element.bitwidth // 8
        # fmuladd, not fma: on a processor without FMA the latter is a call into libm for each lane.
        name = f"llvm.fmuladd.v{self.lanes}f{8 * self.size}"
        self._fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(self.type, [self.type] * 3), name)

    def fma(self, x, y, z):
        return self.builder.call(self._fma, [x, y, z])

    def load(self, address):
        return self.builder.load(self.builder.inttoptr(address, self.type.as_pointer()), align=self.size)

    def store(self, value, address):
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=self.size)

    def broadcast(self, address):
        builder = self.builder
        scalar = builder.load(builder.inttoptr(address, self.real.as_pointer()), align=self.size)
        first = builder.insert_element(ir.Constant(self.type, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
        return self.shuffle(first, first, [0] * self.lanes)

    def shuffle(self, x, y, lanes):
        return self.builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))

    def load_stored(self, address):
        """Numbers as they are stored in the user's memory, converted as `numerics` does."""
        if self.element in (types.float32, types.float64):
            return self.load(address)
        builder = self.builder
        half, word = (ir.VectorType(ir.IntType(bits), self.lanes) for bits in (16, 32))

        def constant(value, kind=word):
            return ir.Constant(kind, [value] * self.lanes)

        stored = builder.load(builder.inttoptr(address, half.as_pointer()), align=2)
        if self.element == types.int16 and "+f16c" in target_features().split(","):
            return builder.fpext(builder.bitcast(stored, ir.VectorType(ir.HalfType(), self.lanes)), self.type)
        bits = builder.zext(stored, word)
        if self.element == types.uint16:  # bfloat16
            return builder.bitcast(builder.shl(bits, constant(16)), self.type)
        magnitude = builder.and_(bits, constant(0x7FFF))
        sign = builder.shl(builder.and_(bits, constant(0x8000)), constant(16))
        rebias = ir.Constant(self.type, [2.0 ** (127 - 15)] * self.lanes)
        finite = builder.fmul(builder.bitcast(builder.shl(magnitude, constant(13)), self.type), rebias)
        special = builder.icmp_unsigned(">=", magnitude, constant(0x7C00))
        special = builder.select(special, constant(0x7F800000), constant(0))
        return builder.bitcast(builder.or_(builder.or_(builder.bitcast(finite, word), special), sign), self.type)

    def ask_for(self, row, at):
        """Prefetch what lies `at` bytes from a row's start on: at every vector of it, asks for each line once."""
        builder = self.builder
        first = builder.icmp_unsigned("<", builder.and_(at, at.type(_LINE - 1)), at.type(self.lanes * self.stored_size))
        with builder.if_then(first):
            _emit_prefetch(builder, builder.add(row, at))

    def sums_of_lanes(self, vectors):
        """One vector whose lane n is the sum of the lanes of vectors[n]; there are as many vectors as lanes.

        Two vectors become one half as long a number of times: each level adds the halves of what is left of a sum.
        """
        lanes, in_register = self.lanes, 16 // self.size  # shuffles are cheap inside 16 bytes
        level = [([n] * lanes, vector) for n, vector in enumerate(vectors)]
        length = lanes  # of what is left of a sum
        while length > 1:
            chunk, half, following = max(in_register, length), length // 2, []
            for (of_x, x), (of_y, y) in zip(level[::2], level[1::2], strict=True):
                first: list[int] = []
                owners: list[int] = []
                for start in range(0, lanes, chunk):
                    for offset, of in ((0, of_x), (lanes, of_y)):
                        for segment in range(start, start + chunk, length):
                            first += range(offset + segment, offset + segment + half)
                            owners += of[segment : segment + half]
                second = [lane + half for lane in first]
                total = self.builder.fadd(self.shuffle(x, y, first), self.shuffle(x, y, second))
                following.append((owners, total))
            level, length = following, half
        owners, total = level[0]
        return self.shuffle(total, total, [owners.index(n) for n in range(lanes)])


def _offsets(builder, base, stride, count):
    return [builder.add(base, builder.mul(stride.type(n), stride)) for n in range(count)]


def _emit_prefetch(builder, address):
    pointer, flag = builder.inttoptr(address, ir.IntType(8).as_pointer()), ir.IntType(32)
    function_type = ir.FunctionType(ir.VoidType(), [pointer.type, flag, flag, flag])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    builder.call(function, [pointer, flag(0), flag(3), flag(1)])  # to read, into every cache, data


def _key_rows(builder, base, stride, count, left, zeros):
    """Addresses of rows of K or V; from row `left` on, that of a row of zeros."""
    rows = _offsets(builder, base, stride, count)
    return [builder.select(builder.icmp_signed("<", left.type(n), left), row, zeros) for n, row in enumerate(rows)]


@intrinsic(prefer_literal=True)
def score_tile(typingctx, rows, one_by_one, element, Q, q_row, K, k_row, ahead, left, zeros, steps, S, s_row):
    """S[r, c] = Q[r] . K[c] for `rows` rows and `_sums(lanes) / rows` keys, `steps` vectors long.

    `one_by_one` (1 or 0): keys are read one after the other, in the order of memory, which is how they come fastest
    from there, and what lies `ahead` bytes further is asked for meanwhile; else beside each other, a vector of each
    at a time, which reads Q least often. Byte addresses and strides; S and Q are of the compute dtype, K of
    `element`. Keys from `left` on count as zeros, a row of which lies at `zeros`. Lanes are summed apart, then
    together.
    """
    count = rows.literal_value
    signature = types.void(rows, one_by_one, element, *[types.int64] * 10)

    def codegen(context, builder, signature, args):
        *_, Q, q_row, K, k_row, ahead, left, zeros, steps, S, s_row = args
        vectors = _Vectors(context, builder, signature.args[2].dtype)
        sums = _sums(vectors.lanes)
        keys = sums // count
        beside = 1 if one_by_one.literal_value else keys
        Q_rows = _offsets(builder, Q, q_row, count)
        K_rows = _key_rows(builder, K, k_row, keys, left, zeros)
        index = steps.type
        done: dict[tuple[int, int], Any] = {}  # by row and key
        for first in range(0, keys, beside):
            pairs = [(r, key) for r in range(count) for key in range(first, first + beside)]
            entry = builder.block
            step, end = map(builder.append_basic_block, ("step", "end"))
            builder.branch(step)
            builder.position_at_end(step)
            t = builder.phi(index)
            totals = {pair: builder.phi(vectors.type) for pair in pairs}
            q_at = builder.mul(t, index(_VECTOR_BYTES))
            k_at = builder.mul(t, index(vectors.lanes * vectors.stored_size))
            q = [vectors.load(builder.add(row, q_at)) for row in Q_rows]
            k = [vectors.load_stored(builder.add(row, k_at)) for row in K_rows[first : first + beside]]
            if beside == 1:
                vectors.ask_for(builder.add(K_rows[first], ahead), k_at)
            done |= {(r, key): vectors.fma(q[r], k[key - first], total) for (r, key), total in totals.items()}
            following, last = builder.add(t, index(1)), builder.block
            builder.cbranch(builder.icmp_signed("<", following, steps), step, end)
            t.add_incoming(index(0), entry)
            t.add_incoming(following, last)
            for pair, total in totals.items():
                total.add_incoming(vectors.type(None), entry)
                total.add_incoming(done[pair], last)
            builder.position_at_end(end)
        updated = [done[pair] for pair in sorted(done)]
        S_rows = _offsets(builder, S, s_row, count)
        run = min(vectors.lanes, keys)  # sums of one row that lie side by side
        for first in range(0, sums, vectors.lanes):
            together = vectors.sums_of_lanes(updated[first : first + vectors.lanes])
            for lane in range(0, vectors.lanes, run):
                n = first + lane
                some = vectors.shuffle(together, together, list(range(lane, lane + run)))
                vectors.store(some, builder.add(S_rows[n // keys], index(n % keys * vectors.size)))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def value_tile(typingctx, rows, one_by_one, element, P, p_row, V, v_row, ahead, left, zeros, steps, O, o_row):
    """O[r] += sum_c P[r, c] V[c] for `rows` rows and `_sums(lanes) / rows` keys; arguments as for `score_tile`."""
    count = rows.literal_value
    signature = types.void(rows, one_by_one, element, *[types.int64] * 10)

    def codegen(context, builder, signature, args):
        *_, P, p_row, V, v_row, ahead, left, zeros, steps, O, o_row = args
        vectors = _Vectors(context, builder, signature.args[2].dtype)
        keys = _sums(vectors.lanes) // count
        beside = 1 if one_by_one.literal_value else keys
        index = steps.type
        P_rows = _offsets(builder, P, p_row, count)
        V_rows = _key_rows(builder, V, v_row, keys, left, zeros)
        O_rows = _offsets(builder, O, o_row, count)
        for first in range(0, keys, beside):
            some = range(first, first + beside)
            p = [[vectors.broadcast(builder.add(row, index(key * vectors.size))) for key in some] for row in P_rows]
            with cgutils.for_range(builder, steps) as loop:
                o_at = builder.mul(loop.index, index(_VECTOR_BYTES))
                v_at = builder.mul(loop.index, index(vectors.lanes * vectors.stored_size))
                v = [vectors.load_stored(builder.add(V_rows[key], v_at)) for key in some]
                if beside == 1:
                    vectors.ask_for(builder.add(V_rows[first], ahead), v_at)
                for of_row, row in zip(p, O_rows, strict=True):
                    address = builder.add(row, o_at)
                    total = vectors.load(address)
                    for weight, value in zip(of_row, v, strict=True):
                        total = vectors.fma(weight, value, total)
                    vectors.store(total, address)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at a byte address; any address may be asked for."""

    def codegen(context, builder, signature, args):
        _emit_prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@_helper
def _ask_for(address, row, n, width):
    """Prefetch n rows of `width` bytes."""
    for r in range(n):
        for x in range(0, width, _LINE):
            prefetch(address + r * row + x)


@_helper
def _whole_rows(target, row, source, source_row, n, width, element):
    """Copy n rows of `width` elements to addresses where rows are whole vectors; what is there beyond is zeros."""
    for r in range(n):
        for x in range(width):
            write(target + r * row, x, read(source + r * source_row, x, element))


def _number(stored):
    """An element as it is stored (ELEMENTS), as a number of the compute dtype."""


@overload(_number)
def _number_overload(stored):
    if stored == types.int16:
        return lambda stored: float16_to_float32(stored)
    if stored == types.uint16:
        return lambda stored: bfloat16_to_float32(stored)
    return lambda stored: stored


def _stored(number, element):
    """The inverse of `_number`, rounded to nearest even; `element` is a value of ELEMENTS."""


@overload(_stored)
def _stored_overload(number, element):
    if element.dtype == types.int16:
        return lambda number, element: float32_to_float16(number)
    if element.dtype == types.uint16:
        return lambda number, element: float32_to_bfloat16(number)
    return lambda number, element: number


@_helper
def _load_row(Q, at, source, d, element):
    """Q[at : at + d] from a byte address."""
    target = Q[at : at + d]
    for x in range(d):
        target[x] = _number(read(source, x, element))


@_helper
def _store_row(target, O, at, dv, factor, element):
    """factor * O[at : at + dv] to a byte address."""
    source = O[at : at + dv]
    for x in range(dv):
        write(target, x, _stored(factor * source[x], element))


@_helper
def _scores(Q, ldq, S, ld, R, K, k_row, n_j, d, copies, zeros, element, item):
    """S = Q K^T of R rows with n_j keys; `copies` holds rows of keys that are not whole vectors.

    The first rows bring the keys of a tile from memory; the others find them in the cache. Where there are more than
    `_IN_ORDER` rows, all compute on keys beside each other, and what the next tile needs is asked for meanwhile.
    """
    # Addresses do not keep an array alive: `copies` and `zeros` come as arrays.
    few, nothing = address_of(copies, 0), address_of(zeros, 0)
    lanes = _VECTOR_BYTES // S.itemsize
    sums = max(_LEAST_SUMS, lanes)
    steps = ldq // lanes
    rows_ahead = max(1, _AHEAD // (d * item))
    q_row, s_row, half = ldq * S.itemsize, ld * S.itemsize, sums // 2
    for c in range(0, n_j, sums):
        left = min(n_j - c, sums)
        at, row, following = K + c * k_row, k_row, K + (c + sums) * k_row
        ahead = rows_ahead * k_row
        if steps * lanes != d:
            ahead = row = ldq * item  # what is copied is in the cache
            _whole_rows(few, row, at, k_row, left, d, element)
            at = few
        target = address_of(S, c)
        if R == 1:
            score_tile(1, 1, element, address_of(Q, 0), 0, at, row, ahead, left, nothing, steps, target, 0)
        else:
            for r in range(0, R, 2):
                if R > _IN_ORDER:
                    asked = r * sums // R
                    _ask_for(following + asked * k_row, k_row, min(r + 2, R) * sums // R - asked, d * item)
                q, s = address_of(Q, r * ldq), target + r * s_row
                for key in range(0, sums, half):
                    k, s_at = at + key * row, s + key * S.itemsize
                    if r == 0 and R <= _IN_ORDER:
                        score_tile(2, 1, element, q, q_row, k, row, ahead, left - key, nothing, steps, s_at, s_row)
                    else:
                        score_tile(2, 0, element, q, q_row, k, row, ahead, left - key, nothing, steps, s_at, s_row)


@_helper
def _add_values(P, ld, O, ldo, R, V, v_row, n_j, dv, copies, zeros, element, item):
    """O += P V; arguments as for `_scores`. P is 0 beyond n_j, up to a whole tile."""
    few, nothing = address_of(copies, 0), address_of(zeros, 0)
    lanes = _VECTOR_BYTES // P.itemsize
    sums = max(_LEAST_SUMS, lanes)
    steps = ldo // lanes
    rows_ahead = max(1, _AHEAD // (dv * item))
    p_row, o_row, half = ld * P.itemsize, ldo * P.itemsize, sums // 2
    for c in range(0, n_j, sums):
        left = min(n_j - c, sums)
        at, row, following = V + c * v_row, v_row, V + (c + sums) * v_row
        ahead = rows_ahead * v_row
        if steps * lanes != dv:
            ahead = row = ldo * item
            _whole_rows(few, row, at, v_row, left, dv, element)
            at = few
        source = address_of(P, c)
        if R == 1:
            value_tile(1, 1, element, source, 0, at, row, ahead, left, nothing, steps, address_of(O, 0), 0)
        else:
            for r in range(0, R, 2):
                if R > _IN_ORDER:
                    asked = r * sums // R
                    _ask_for(following + asked * v_row, v_row, min(r + 2, R) * sums // R - asked, dv * item)
                p, o = source + r * p_row, address_of(O, r * ldo)
                for key in range(0, sums, half):
                    p_at, v = p + key * P.itemsize, at + key * row
                    if r == 0 and R <= _IN_ORDER:
                        value_tile(2, 1, element, p_at, p_row, v, row, ahead, left - key, nothing, steps, o, o_row)
                    else:
                        value_tile(2, 0, element, p_at, p_row, v, row, ahead, left - key, nothing, steps, o, o_row)


# ------------------------------------------------------------------------------------------------------------
# Softmax with the keys on the lanes


@_helper
def _hide_by_band(call, S, ld, n_i, j0, n_j, offset):
    """-inf over the keys outside the band of each row; `visibility.hide` without a mask program."""
    for i in range(n_i):
        distance = j0 - (i + offset)
        first = max(0, min(call.size.band_lower - distance, n_j))
        stop = max(0, min(call.size.band_upper - distance + 1, n_j))
        S[i * ld : i * ld + first] = -np.inf
        S[i * ld + stop : i * ld + n_j] = -np.inf


@_helper
def _row_step(row, m, l, fold):
    """Online softmax of one row of whole tiles; it becomes P = exp(S - m). Returns m, l and alpha.

    Lanes are folded in halves, so that maximum and sum vectorise and their order is fixed.
    """
    one, zero = row.dtype.type(1), row.dtype.type(0)
    lowest = row.dtype.type(-np.inf)
    for x in range(len(row)):
        fold[x] = row[x]
    n = len(row)
    while n > 1:
        half = (n + 1) // 2
        low, high = fold[:half], fold[half:n]
        for x in range(len(high)):
            low[x] = low[x] if low[x] > high[x] else high[x]
        n = half
    top = fold[0] if fold[0] > m else m  # NaN is left to P and l
    shift = zero if top == lowest else top  # a row that has seen nothing: exp(-inf - 0) = 0
    alpha = one if top == m else exp(m - shift)
    for x in range(len(row)):
        p = exp(row[x] - shift)
        row[x] = p
        fold[x] = p
    n = len(row)
    while n > 1:
        half = (n + 1) // 2
        low, high = fold[:half], fold[half:n]
        for x in range(len(high)):
            low[x] += high[x]
        n = half
    return top, alpha * l + fold[0], alpha


# ------------------------------------------------------------------------------------------------------------
# Merging


@intrinsic
def finish_part(typingctx, done, i):
    """Atomically add 1 to done[i] (1-D int64) and return what it held.

    Unlike `claim` it orders memory: whoever sees the count of a part sees what the part has written.
    """
    signature = types.int64(done, types.intp)

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [args[1]]), ir.IntType(64)(1), "acq_rel")

    return signature, codegen


@_helper
def _save_part(partial, at, R, O, ldo, dv, m, l):
    """Rows [m, l, O] of one part, from partial[at] on."""
    for r in range(R):
        row = partial[at + r * (dv + 2) : at + (r + 1) * (dv + 2)]
        row[0], row[1] = m[r], l[r]
        for x in range(dv):
            row[2 + x] = O[r * ldo + x]


@_helper
def _merge_parts(partial, at, between, parts, R, O, ldo, dv, m, l):
    """m, l, O of all parts; part p of the head starts at partial[at + p * between]."""
    lowest, zero = O.dtype.type(-np.inf), O.dtype.type(0)
    for r in range(R):
        start = at + r * (dv + 2)
        top = lowest
        for p in range(parts):
            own = partial[start + p * between]
            top = own if own > top else top
        shift = zero if top == lowest else top
        total = zero
        target = O[r * ldo : r * ldo + dv]
        target[:] = zero
        for p in range(parts):
            row = partial[start + p * between : start + p * between + dv + 2]
            factor = exp(row[0] - shift)
            total += factor * row[1]
            source = row[2:]
            for x in range(dv):
                target[x] += factor * source[x]
        m[r], l[r] = top, total


@_helper
def _finish_row(m, l, sink):
    """1 / l and the log-sum-exp of a row, sink included: that is a part with m = sink, l = 1 and O = 0.

    A row that saw no key and has no sink (-inf) gets 0 and -inf.
    """
    top = sink if sink > m else m
    if top == -np.inf and l == 0:
        return 0.0, -np.inf
    scale = 1.0 if m == top else math.exp(m - top)
    total = l * scale + (0.0 if sink == -np.inf else math.exp(sink - top))
    return scale / total, top + math.log(total)


# ------------------------------------------------------------------------------------------------------------
# The kernel


def _make_kernel(stamp: str, storage: str, plain: bool):
    element = ELEMENTS[storage]
    item = np.dtype(element).itemsize

    @compiled(f"fa2_few_rows_{storage}_{'plain' if plain else 'general'}")
    def kernel(counter, worker, call, out, lse, parts, part_keys, done, partial):
        stamp  # noqa: B018  (part of the cache key, see launch.for_each_dtype)
        size = call.size
        real = lse.dtype.type
        one, zero, scale = real(1), real(0), real(call.real.scale)
        bc, d, dv, group = size.bc, size.d, size.dv, size.Hq // size.Hkv
        lanes = _VECTOR_BYTES // lse.itemsize
        sums = max(_LEAST_SUMS, lanes)
        rows = padded(group * size.Tq, 2)
        ld, ldq, ldo = padded(bc, sums), padded(d, lanes), padded(dv, lanes)
        Q, O = aligned(rows * ldq, zero), aligned(rows * ldo, zero)
        S, fold = aligned(rows * ld, zero), aligned(ld, zero)
        zeros = np.zeros(max(ldq, ldo), element)
        # Apart: what a row of K has beyond d is multiplied by zero, which no NaN of V may be
        copies_k, copies_v = np.zeros(sums * ldq, element), np.zeros(sums * ldo, element)
        m, l = np.zeros(rows, lse.dtype), np.zeros(rows, lse.dtype)
        if not plain:
            seen = np.zeros((size.program_depth, bc), np.uint8)
            classes = np.zeros(size.program_depth, np.int64)
            kinds = np.zeros(group, np.int64)
            no_cap = np.zeros(0, lse.dtype)
        between = group * size.Tq * (dv + 2)  # numbers of a part

        while True:
            piece = claim(counter, 0)
            if piece >= size.B * size.Hkv * parts:
                break
            head, part = piece // parts, piece % parts
            b, h = head // size.Hkv, head % size.Hkv
            n_i = call.q_lengths[b]
            if n_i <= 0:
                continue
            low, high = key_range(call, b, 0, n_i)
            low = low // bc * bc
            divided = max(1, min(-(-(high - low) // part_keys), parts))
            if part >= divided:
                continue
            R, offset = group * n_i, call.q_offset[b]
            # Load Q of all heads of the group; O = 0, l = 0, m = -inf
            for g in range(group):
                source = rows_of(call.q, call.q_starts[b], b, h * group + g, 0)
                for i in range(n_i):
                    _load_row(Q, (g * n_i + i) * ldq, source + i * call.q.row * item, d, element)
            Q[R * ldq :] = zero
            O[:] = zero
            m[:] = -np.inf
            l[:] = zero
            K, k_row = rows_of(call.k, call.k_starts[b], b, h, 0), call.k.row * item
            V, v_row = rows_of(call.v, call.k_starts[b], b, h, 0), call.v.row * item
            first = low + part * part_keys
            stop = high if part == divided - 1 else first + part_keys
            for j0 in range(first, stop, bc):
                n_j = min(bc, stop - j0)
                band = band_class(call, 0, n_i, j0, j0 + n_j, offset)
                best = band
                if not plain:
                    kinds[:] = band
                    if size.program_depth > 0 and band != EMPTY:
                        best = EMPTY
                        for g in range(group):
                            kind = program_class(call, classes, b, h * group + g, 0, n_i, j0, j0 + n_j, offset)
                            kinds[g] = min(band, kind)
                            best = max(best, kinds[g])
                if best == EMPTY:
                    continue
                whole = padded(n_j, sums)
                # S = Q K^T
                _scores(Q, ldq, S, ld, R, K + j0 * k_row, k_row, n_j, d, copies_k, zeros, element, item)
                for g in range(group):
                    rows_of_head = S[g * n_i * ld : (g + 1) * n_i * ld]
                    if plain:
                        for x in range(len(rows_of_head)):
                            rows_of_head[x] *= scale
                        if band == PARTIAL:
                            _hide_by_band(call, rows_of_head, ld, n_i, j0, n_j, offset)
                    else:
                        finish_scores(
                            call, rows_of_head, ld, kinds[g], band == PARTIAL, b, h * group + g, 0, n_i, j0, n_j, False,
                            seen, no_cap,
                        )  # fmt: skip
                # P = exp(S - m), l = alpha l + rowsum(P), O = alpha O
                for r in range(R):
                    row = S[r * ld : r * ld + whole]
                    row[n_j:] = -np.inf
                    m[r], l[r], alpha = _row_step(row, m[r], l[r], fold)
                    if alpha != one:
                        O_r = O[r * ldo : (r + 1) * ldo]
                        for x in range(ldo):
                            O_r[x] *= alpha
                if not plain and call.real.keep_scale != 1.0:
                    for g in range(group):
                        P = S[g * n_i * ld : (g + 1) * n_i * ld]
                        apply_dropout(call, P, ld, b, h * group + g, 0, n_i, j0, n_j, False)
                # O += P V
                _add_values(S, ld, O, ldo, R, V + j0 * v_row, v_row, n_j, dv, copies_v, zeros, element, item)
            if divided > 1:
                _save_part(partial, piece * between, R, O, ldo, dv, m, l)
                if finish_part(done, head) < divided - 1:
                    continue
                _merge_parts(partial, head * parts * between, between, divided, R, O, ldo, dv, m, l)
            # O / l, lse = m + log l
            start = call.q_starts[b]
            for g in range(group):
                sink = call.sinks[h * group + g] if len(call.sinks) > 0 else -np.inf
                statistic = lse[b if lse.shape[0] > 1 else 0, h * group + g, start : start + n_i]
                target = rows_of(out, start, b, h * group + g, 0)
                for i in range(n_i):
                    r = g * n_i + i
                    normal, statistic[i] = _finish_row(float(m[r]), float(l[r]), sink)
                    _store_row(target + i * out.row * item, O, r * ldo, dv, real(normal), element)

    return kernel


def _make_kernels(stamp: str, dtype: str):
    """(plain, general) by storage type."""
    storages = [storage for storage in ELEMENTS if (storage == "float64") == (dtype == "float64")]
    return {(storage, plain): _make_kernel(stamp, storage, plain) for storage in storages for plain in (True, False)}


_kernels = {key: kernel for kernels in for_each_dtype(_make_kernels).values() for key, kernel in kernels.items()}


def few_rows(problem: Problem, tiles: Tiles, x: Operands, out: np.ndarray, lse: np.ndarray) -> None:
    """As :func:`fa2_forward`, for tiles of the family "few rows" (:func:`rawflash.tiling.plan_tiles`)."""
    call, keep = describe(problem, tiles, x)
    heads = problem.B * problem.Hkv
    rows = problem.Hq // max(problem.Hkv, 1) * problem.Tq
    saved = heads * tiles.parts * rows * (problem.dv + 2) if tiles.parts > 1 else 0
    partial, done = np.empty(saved, problem.compute_dtype), np.zeros(heads, np.int64)
    kernel = _kernels[problem.dtype, is_plain(problem, x)]
    run(kernel, heads * tiles.parts, call, view(out), lse, tiles.parts, tiles.part_keys, done, partial)
    del keep
