"""Element-wise arithmetic of the CPU kernels: exp, tiles in and out of user memory, Philox.

Everything here is meant to be called inside the loops of an njit kernel and to vanish there: LLVM inlines it
and vectorises the loop. No fast-math flag is set anywhere. `nnan` and `ninf` would let LLVM assume away the
-inf of masked scores and the NaN that must reach the output; `reassoc` would cancel the rounding trick in
`exp` (and, with it, give results off by several per cent); `contract` is not needed because the fused
products are explicit.

User memory is reached by byte address and element strides, never as an array object, so one compiled kernel
serves every layout. The four storage types are told apart at run time by a code.
"""

from __future__ import annotations

import math
from decimal import Decimal

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic, overload
from numpy.polynomial import Chebyshev, Polynomial

from rawflash.backends.numba_cpu.microkernel import OPTIONS

__all__ = [
    "BFLOAT16",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "exp",
    "load_i64",
    "load_scalar",
    "load_tile",
    "load_u8",
    "philox4",
    "store_scalar",
    "store_tile",
]

FLOAT32, FLOAT64, FLOAT16, BFLOAT16 = range(4)  # storage codes

_helper = njit(**OPTIONS)
_element_wise = njit(**OPTIONS, forceinline=True)  # a call left in a loop would keep it from vectorising


# ------------------------------------------------------------------------------------------------------------
# Bits and fused products


@intrinsic
def fused(typingctx, x, y, z):
    """x * y + z, rounded once where the processor has FMA; vectorisable."""
    if not (isinstance(x, types.Float) and x == y == z):
        raise TypingError(f"fused needs three floats of one type, got {x}, {y}, {z}")

    def codegen(context, builder, signature, args):
        scalar = args[0].type
        name = f"llvm.fmuladd.f{signature.return_type.bitwidth}"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(scalar, [scalar] * 3), name)
        return builder.call(function, args)

    return x(x, x, x), codegen


@intrinsic
def bits(typingctx, x):
    """The bits of a float32 or float64 as an unsigned integer of its size."""
    integer = {types.float32: types.uint32, types.float64: types.uint64}[x]

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return integer(x), codegen


@intrinsic
def from_bits(typingctx, i):
    """The float32 or float64 that has these bits (uint32 or uint64)."""
    real = {types.uint32: types.float32, types.uint64: types.float64}[i]

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return real(i), codegen


# ------------------------------------------------------------------------------------------------------------
# exp


def _exp_coefficients(degree: int) -> list[float]:
    """c[2:] of a polynomial 1 + r + c2 r^2 + ... close to exp(r) for abs(r) <= log(2)/2.

    The tail g(r) = (exp(r) - 1 - r)/r^2 is interpolated at Chebyshev points. Summed as its Taylor series it
    has no cancellation, and the first two coefficients stay exact, so the polynomial is best where exp(r) is
    near 1.
    """

    def tail(r):
        return sum(r**j / math.factorial(j + 2) for j in range(24))

    half = math.log(2) / 2
    fit = Chebyshev.interpolate(tail, degree - 2, domain=[-half, half])
    return list(fit.convert(kind=Polynomial).coef)


def _split_ln2(high_bits: int) -> tuple[float, float]:
    """log(2) as a float of `high_bits` bits, whose products with any n of `exp` are exact, and the rest."""
    ln2 = Decimal(2).ln()
    high = math.floor(ln2 * 2**high_bits) / 2**high_bits
    return high, float(ln2 - Decimal(high))


def _exp_for(real, word, mantissa_bits: int, bias: int, degree: int):
    """The body of `exp` for one format; `word` is the unsigned integer of its size."""
    # Adding `magic` leaves an integer n in the last bits of the sum, biased as an exponent is: one shift
    # makes 2^n.
    magic = real(1.5 * 2.0**mantissa_bits + bias)
    highest = real(magic + real(bias))  # n = bias, the largest finite power
    # Near the smallest normal number of float64, 2^n is made 2^spare times as large, and the result smaller again.
    spare = 64 if real is np.float64 else 0
    near = real((8 - bias) * math.log(2))
    magic_near, less = real(magic + spare), real(2.0**-spare)
    lowest = real(-(bias + spare) * math.log(2))  # n + spare = -bias: the shift makes an exact zero
    log2_e = real(1 / math.log(2))
    ln2_high, ln2_low = map(real, _split_ln2(mantissa_bits - bias.bit_length() - 2))
    one = real(1)
    coefficients = tuple(map(real, reversed(_exp_coefficients(degree))))
    leading, others = coefficients[0], (*coefficients[1:], one, one)
    shift = word(mantissa_bits)

    def exp_of_format(x):
        x = lowest if x < lowest else x  # noqa: FURB136 - unlike max, this lets NaN pass
        base, factor = magic, one
        if spare and x < near:
            base, factor = magic_near, less
        t = fused(x, log2_e, base)
        # Beyond, the polynomial alone carries the overflow to inf.
        t = highest if t > highest else t  # noqa: FURB136 - one instruction, which min is not
        n = t - base
        r = fused(n, -ln2_low, fused(n, -ln2_high, x))
        p = leading
        for c in others:
            p = fused(p, r, c)
        result = p * from_bits(word(bits(t) << shift))
        return result * factor if spare else result

    return exp_of_format


_EXP = {
    types.float32: _exp_for(np.float32, np.uint32, mantissa_bits=23, bias=127, degree=6),
    types.float64: _exp_for(np.float64, np.uint64, mantissa_bits=52, bias=1023, degree=11),
}


def exp(x):
    """e to the power x, for a float32 or float64 inside njit code; a loop over it vectorises.

    Relative error below 1.5e-7 in float32 and 3e-16 in float64. NaN gives NaN, +inf and overflow give inf,
    -inf gives 0. In float32, results below the smallest normal number may come out as 0. In the last log(2)/2 before
    overflow the error grows to 7e-6 and 1e-12: attention takes exp of x <= 0, where that price buys three
    instructions.
    """
    return np.exp(x)


@overload(exp, jit_options={**OPTIONS, "forceinline": True})
def _exp_overload(x):
    return _EXP.get(x)


# ------------------------------------------------------------------------------------------------------------
# Elements in memory
#
# A base address is turned into a pointer and indexed by getelementptr: the vectoriser follows that, but not
# an address computed as an integer. Workspaces are reached the same way, which leaves out the wrap-around
# test for negative indices that NumPy semantics put into every access.


def _element(context, builder, address, i, element):
    """Pointer to element i of the array of `element` (a Numba type) at an address, and its alignment."""
    data_type = context.get_data_type(element)
    base = builder.inttoptr(address, data_type.as_pointer())
    return builder.gep(base, [i]), context.get_abi_sizeof(data_type)


@intrinsic
def read(typingctx, address, i, dtype):
    """Element i of the array of `dtype` (a NumPy scalar type or dtype) at a byte address."""
    element = dtype.dtype

    def codegen(context, builder, signature, args):
        pointer, size = _element(context, builder, args[0], args[1], element)
        return builder.load(pointer, align=size)

    return element(types.int64, types.int64, dtype), codegen


@intrinsic
def write(typingctx, address, i, value):
    """Store `value` as element i of the array of its type at a byte address."""

    def codegen(context, builder, signature, args):
        pointer, size = _element(context, builder, args[0], args[1], value)
        builder.store(args[2], pointer, align=size)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, value), codegen


@intrinsic
def address_of(typingctx, array, i):
    """Byte address of array[i], for a 1-D array."""

    def codegen(context, builder, signature, args):
        data = context.make_array(array)(context, builder, args[0]).data
        return builder.ptrtoint(builder.gep(data, [args[1]]), args[1].type)

    return types.int64(array, types.int64), codegen


@intrinsic
def stack_block(typingctx, dtype):
    """Byte address of _BLOCK x _PANEL elements of `dtype` on the stack of the calling function."""

    def codegen(context, builder, signature, args):
        block = ir.ArrayType(context.get_data_type(dtype.dtype), _BLOCK * _PANEL)
        return builder.ptrtoint(cgutils.alloca_once(builder, block), context.get_value_type(types.int64))

    return types.int64(dtype), codegen


# ------------------------------------------------------------------------------------------------------------
# Storage types: how stored bits become a number, and back
#
# Half precision is converted by integer operations: they vectorise on any processor and need no library.

_F32_INFINITY = np.uint32(0x7F800000)
_F32_MAGNITUDE = np.uint32(0x7FFFFFFF)
_F16_INFINITY = np.uint32(0x7C00)
_F16_QUIET_NAN = np.uint32(0x7E00)
_F16_MAGNITUDE = np.uint32(0x7FFF)
_F16_SIGN = np.uint32(0x8000)
_BF16_QUIET = np.uint32(0x0040)

_F16_REBIAS = np.float32(2.0 ** (127 - 15))  # from the exponent bias of float16 to that of float32
_F16_REBIAS_BITS = np.uint32((127 - 15) << 23)
_F16_MIN_NORMAL = np.uint32((127 - 14) << 23)  # 2^-14 as float32 bits
_F16_OVERFLOW = np.uint32((127 + 16) << 23)  # 2^16 as float32 bits
_HALF = np.float32(0.5)  # its last place, 2^-24, is the float16 subnormal unit
_HALF_BITS = np.uint32(126 << 23)


@_element_wise
def float16_to_float32(h):
    """The float32 equal to float16 bits `h` (uint16). Exact; NaN keeps its payload."""
    magnitude = np.uint32(np.uint32(h) & _F16_MAGNITUDE)
    sign = np.uint32(np.uint32(h) & _F16_SIGN) << np.uint32(16)
    # As float32 bits the magnitude is too small by the difference of the biases; the product also normalises
    # subnormals.
    finite = bits(from_bits(np.uint32(magnitude << np.uint32(13))) * _F16_REBIAS)
    special = _F32_INFINITY if magnitude >= _F16_INFINITY else np.uint32(0)
    return from_bits(np.uint32(finite | special | sign))


@_element_wise
def bfloat16_to_float32(h):
    """The float32 equal to bfloat16 bits `h` (uint16). Exact."""
    return from_bits(np.uint32(np.uint32(h) << np.uint32(16)))


@_element_wise
def float32_to_float16(x):
    """float16 bits (uint16) of x, to nearest even; from 65520 on inf, NaN a quiet NaN."""
    word = bits(np.float32(x))
    magnitude = np.uint32(word & _F32_MAGNITUDE)
    sign = np.uint32(word >> np.uint32(16)) & _F16_SIGN
    last = np.uint32(magnitude >> np.uint32(13)) & np.uint32(1)  # kept bit: breaks ties towards even
    normal = np.uint32(magnitude - _F16_REBIAS_BITS + np.uint32(0xFFF) + last) >> np.uint32(13)
    subnormal = np.uint32(bits(from_bits(magnitude) + _HALF) - _HALF_BITS)  # the sum rounds as float16 would
    half = subnormal if magnitude < _F16_MIN_NORMAL else np.uint32(normal)
    half = _F16_INFINITY if magnitude >= _F16_OVERFLOW else half
    half = _F16_QUIET_NAN if magnitude > _F32_INFINITY else half
    return np.uint16(half | sign)


@_element_wise
def float32_to_bfloat16(x):
    """bfloat16 bits (uint16) of x, to nearest even; NaN stays NaN."""
    word = bits(np.float32(x))
    top = np.uint32(word >> np.uint32(16))
    last = np.uint32(top & np.uint32(1))
    rounded = np.uint32(np.uint32(word + np.uint32(0x7FFF) + last) >> np.uint32(16))
    is_nan = np.uint32(word & _F32_MAGNITUDE) > _F32_INFINITY
    return np.uint16(np.uint32(top | _BF16_QUIET) if is_nan else rounded)


# ------------------------------------------------------------------------------------------------------------
# Tiles
#
# A row is converted where it lies contiguous in both places: one short loop for each storage type. Any other
# layout goes through a block on the stack, of _BLOCK rows and _PANEL columns, so that conversion stays
# vectorised and the strided side is walked in groups of _BLOCK neighbours.

_BLOCK = 8
_PANEL = 64


def _named(function, name):
    """Compile a closure under a name of its own.

    Kernels are cached on disk one by one, and Numba tells closures of one name apart only by a number that it
    counts anew in each process. Loaded side by side, two kernels that were compiled in different processes would
    share the first closure of a number: a float16 row stored as bfloat16. Names of their own keep them apart.
    """
    function.__name__ = function.__qualname__ = name
    return _helper(function)


def _row_loader(name, dtype, decode):
    def load_row(target, source, n, factor):
        for x in range(n):
            write(target, x, type(factor)(factor * decode(read(source, x, dtype))))

    return _named(load_row, f"load_row_{name}")


def _row_storer(name, encode):
    def store_row(target, source, n, dtype):
        for x in range(n):
            write(target, x, encode(read(source, x, dtype)))

    return _named(store_row, f"store_row_{name}")


_load_row_float32 = _row_loader("float32", np.float32, np.float32)
_load_row_float64 = _row_loader("float64", np.float64, np.float64)
_load_row_float16 = _row_loader("float16", np.uint16, float16_to_float32)
_load_row_bfloat16 = _row_loader("bfloat16", np.uint16, bfloat16_to_float32)

_store_row_float32 = _row_storer("float32", np.float32)
_store_row_float64 = _row_storer("float64", np.float64)
_store_row_float16 = _row_storer("float16", float32_to_float16)
_store_row_bfloat16 = _row_storer("bfloat16", float32_to_bfloat16)


@_helper
def item_bytes(code):
    """Bytes of one element of storage type `code`."""
    if code == FLOAT64:
        return 8
    return 4 if code == FLOAT32 else 2


@_helper
def _load_row(target, source, code, n, factor):
    """Convert n contiguous elements of storage type `code` to contiguous elements of the type of `factor`."""
    if code == FLOAT32:
        _load_row_float32(target, source, n, factor)
    elif code == FLOAT16:
        _load_row_float16(target, source, n, factor)
    elif code == BFLOAT16:
        _load_row_bfloat16(target, source, n, factor)
    else:
        _load_row_float64(target, source, n, factor)


@_helper
def _store_row(target, code, source, n, dtype):
    """Convert n contiguous elements of `dtype` to contiguous elements of storage type `code`."""
    if code == FLOAT32:
        _store_row_float32(target, source, n, dtype)
    elif code == FLOAT16:
        _store_row_float16(target, source, n, dtype)
    elif code == BFLOAT16:
        _store_row_bfloat16(target, source, n, dtype)
    else:
        _store_row_float64(target, source, n, dtype)


@_helper
def _scatter(target, row, col, block, height, width, dtype):
    """target[r row + x col] = block[r, x] for the block on the stack."""
    if height == _BLOCK and row == 1:  # constants for LLVM: unrolled, one store of _BLOCK neighbours
        for x in range(width):
            for r in range(_BLOCK):
                write(target, r + x * col, read(block, r * _PANEL + x, dtype))
    else:
        for x in range(width):
            for r in range(height):
                write(target, r * row + x * col, read(block, r * _PANEL + x, dtype))


@_helper
def _gather(block, source, row, col, height, width, dtype):
    """block[r, x] = source[r row + x col] for the block on the stack."""
    if height == _BLOCK and row == 1:
        for x in range(width):
            for r in range(_BLOCK):
                write(block, r * _PANEL + x, read(source, r + x * col, dtype))
    else:
        for x in range(width):
            for r in range(height):
                write(block, r * _PANEL + x, read(source, r * row + x * col, dtype))


@_helper
def load_tile(dst, off, dst_row, dst_col, address, code, src_row, rows, cols, factor):
    """dst[off + r dst_row + x dst_col] = factor * number(source[r src_row + x]), r < rows, x < cols.

    `dst` is a 1-D workspace of the compute dtype, and `factor` a scalar of it. The source starts at byte
    `address`, has elements of storage type `code`, contiguous along x, and rows `src_row` elements apart.
    Fast when dst_col is 1 (copy) or dst_row is 1 (transposing copy), correct for any strides. Only the rows x
    cols elements are touched.
    """
    size = item_bytes(code)
    block = stack_block(dst.dtype)
    for r in range(0, rows, _BLOCK):
        height = min(_BLOCK, rows - r)
        for x in range(0, cols, _PANEL):
            width = min(_PANEL, cols - x)
            tile = address_of(dst, off + r * dst_row + x * dst_col)
            target, row = (tile, dst_row) if dst_col == 1 else (block, _PANEL)
            for i in range(height):
                source = address + ((r + i) * src_row + x) * size
                _load_row(target + i * row * dst.itemsize, source, code, width, factor)
            if dst_col != 1:
                _scatter(tile, dst_row, dst_col, block, height, width, dst.dtype)


@_helper
def store_tile(address, code, dst_row, src, off, src_row, src_col, rows, cols):
    """target[r dst_row + x] = stored(src[off + r src_row + x src_col]), r < rows, x < cols.

    The inverse of `load_tile`, without a factor. Rounds to nearest even; beyond the range of float16 lies
    inf. A float64 workspace reaches the half types by way of float32. Fast when src_col is 1 or src_row is 1.
    """
    size = item_bytes(code)
    block = stack_block(src.dtype)
    for r in range(0, rows, _BLOCK):
        height = min(_BLOCK, rows - r)
        for x in range(0, cols, _PANEL):
            width = min(_PANEL, cols - x)
            tile = address_of(src, off + r * src_row + x * src_col)
            source, row = (tile, src_row) if src_col == 1 else (block, _PANEL)
            if src_col != 1:
                _gather(block, tile, src_row, src_col, height, width, src.dtype)
            for i in range(height):
                target = address + ((r + i) * dst_row + x) * size
                _store_row(target, code, source + i * row * src.itemsize, width, src.dtype)


# ------------------------------------------------------------------------------------------------------------
# Single elements


@_helper
def load_scalar(address, code):
    """The element of storage type `code` at byte `address`, as float64."""
    if code == FLOAT32:
        return np.float64(read(address, 0, np.float32))
    if code == FLOAT16:
        return np.float64(float16_to_float32(read(address, 0, np.uint16)))
    if code == BFLOAT16:
        return np.float64(bfloat16_to_float32(read(address, 0, np.uint16)))
    return read(address, 0, np.float64)


@_helper
def store_scalar(address, code, value):
    """Store `value` (float32 or float64) as an element of storage type `code` at byte `address`."""
    if code == FLOAT32:
        write(address, 0, np.float32(value))
    elif code == FLOAT16:
        write(address, 0, float32_to_float16(value))
    elif code == BFLOAT16:
        write(address, 0, float32_to_bfloat16(value))
    else:
        write(address, 0, np.float64(value))


@_helper
def load_u8(address):
    """The byte at `address`, as int64."""
    return np.int64(read(address, 0, np.uint8))


@_helper
def load_i64(address):
    """The int64 at byte `address`."""
    return read(address, 0, np.int64)


# ------------------------------------------------------------------------------------------------------------
# Philox

_PHILOX_M0 = np.uint64(0xD2511F53)
_PHILOX_M1 = np.uint64(0xCD9E8D57)
_PHILOX_W0 = np.uint32(0x9E3779B9)  # from the golden ratio
_PHILOX_W1 = np.uint32(0xBB67AE85)  # from the square root of 3
_WORD = np.uint64(32)


@_element_wise
def _philox_round(k0, k1, c0, c1, c2, c3):
    """One round, and the key of the next."""
    p0 = _PHILOX_M0 * np.uint64(c0)
    p1 = _PHILOX_M1 * np.uint64(c2)
    high0, high1 = np.uint32(p0 >> _WORD), np.uint32(p1 >> _WORD)
    k0_next, k1_next = np.uint32(k0 + _PHILOX_W0), np.uint32(k1 + _PHILOX_W1)
    return (
        k0_next,
        k1_next,
        np.uint32(high1 ^ c1 ^ k0),
        np.uint32(p1),
        np.uint32(high0 ^ c3 ^ k1),
        np.uint32(p0),
    )


@_element_wise
def _five_philox_rounds(k0, k1, c0, c1, c2, c3):
    one = _philox_round
    return one(*one(*one(*one(*one(k0, k1, c0, c1, c2, c3)))))


@_element_wise
def philox4(seed_lo, seed_hi, c0, c1, c2, c3):
    """Four random uint32 of Philox4x32-10: key (seed_lo, seed_hi), counter (c0, c1, c2, c3).

    Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11. Arguments of any integer
    type count modulo 2^32. The rounds are written out, because only then does a caller's loop over one
    counter word vectorise (six times faster). Every intermediate is given its type: Numba would widen uint32
    sums to 64 bits, and mixtures with signed integers to float64.
    """
    key = np.uint32(seed_lo), np.uint32(seed_hi)
    counter = np.uint32(c0), np.uint32(c1), np.uint32(c2), np.uint32(c3)
    state = _five_philox_rounds(*_five_philox_rounds(*key, *counter))
    return state[2], state[3], state[4], state[5]
