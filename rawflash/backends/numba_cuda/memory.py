"""Device memory by address: loads, stores and additions, of numbers and of vectors of them.

An address is an int64 in bytes, and a number lies at a multiple of its size, a vector at a multiple of its own.
The two 16-bit types are float32 in arithmetic: a load widens, a store rounds to the nearest, ties to even.

``ldg_*`` loads what no thread writes while the kernel runs: such a load may be repeated or leave a loop.

Under Numba's simulator (``NUMBA_ENABLE_CUDASIM=1``) the same names are Python functions on host memory.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
from numba import config, cuda, types

SIMULATED = bool(config.ENABLE_CUDASIM)

# Every device function is inlined: a call would keep its arguments, and the tuple of a call's words, in memory.
device = cuda.jit(device=True) if SIMULATED else cuda.jit(device=True, forceinline=True)

if SIMULATED:
    _STORAGE: dict[str, Any] = {
        "uint8": ctypes.c_uint8,
        "uint16": ctypes.c_uint16,
        "uint32": ctypes.c_uint32,
        "int32": ctypes.c_int32,
        "int64": ctypes.c_int64,
        "float16": ctypes.c_uint16,
        "bfloat16": ctypes.c_uint16,
        "float32": ctypes.c_float,
        "float64": ctypes.c_double,
    }
    _one_at_a_time = threading.Lock()

    def _number_of(kind, stored):
        if kind == "float16":
            return np.float32(np.uint16(stored).view(np.float16))
        if kind == "bfloat16":
            return np.uint32(stored << 16).view(np.float32)
        return getattr(np, kind)(stored) if kind.startswith("float") else stored

    def _stored_as(kind, x):
        if kind == "float16":
            with np.errstate(over="ignore"):
                return int(np.float16(np.float32(x)).view(np.uint16))
        if kind == "bfloat16":
            bits = int(np.float32(x).view(np.uint32))
            return bits >> 16 | 0x40 if bits & 0x7FFFFFFF > 0x7F800000 else bits + 0x7FFF + (bits >> 16 & 1) >> 16
        return float(x) if kind.startswith("float") else int(x)

    def _place(kind, width, address):
        storage = _STORAGE[kind]
        if address % (ctypes.sizeof(storage) * width):
            raise ValueError(f"{kind}x{width} at address {address}: not aligned")
        return (storage * width).from_address(int(address))

    def _loads(kind, width=1):
        def load(address):
            numbers = tuple(_number_of(kind, stored) for stored in _place(kind, width, address))
            return numbers if width > 1 else numbers[0]

        return load, load

    def _store(kind, width=1):
        def store(address, x):
            place = _place(kind, width, address)
            for n, number in enumerate(x if width > 1 else (x,)):
                place[n] = _stored_as(kind, number)

        return store

    def _atomic_add(kind, width=1):
        def add(address, x):
            place = _place(kind, width, address)
            with _one_at_a_time:
                for n, number in enumerate(x if width > 1 else (x,)):
                    place[n] = _stored_as(kind, _number_of(kind, place[n]) + getattr(np, kind)(number))

        return add

else:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    _SHORT, _INT = ir.IntType(16), ir.IntType(32)
    _GLOBAL = 1  # address space
    # kind -> what lies in memory, and the type of a number in a kernel
    _TYPES: dict[str, Any] = {
        "uint8": (ir.IntType(8), types.uint8),
        "uint16": (_SHORT, types.uint16),
        "uint32": (_INT, types.uint32),
        "int32": (_INT, types.int32),
        "int64": (ir.IntType(64), types.int64),
        "float16": (_SHORT, types.float32),
        "bfloat16": (_SHORT, types.float32),
        "float32": (ir.FloatType(), types.float32),
        "float64": (ir.DoubleType(), types.float64),
    }
    _BYTES = {"uint8": 1, "uint16": 2, "float16": 2, "bfloat16": 2, "int64": 8, "float64": 8}

    def _decode(builder, kind, stored):
        if kind == "float16":
            return builder.fpext(builder.bitcast(stored, ir.HalfType()), ir.FloatType())
        if kind == "bfloat16":
            return builder.bitcast(builder.shl(builder.zext(stored, _INT), _INT(16)), ir.FloatType())
        return stored

    def _encode(builder, kind, x):
        if kind == "float16":
            return builder.bitcast(builder.fptrunc(x, ir.HalfType()), _SHORT)
        if kind == "bfloat16":  # in integers: sm_75 has no instruction for it
            bits = builder.bitcast(x, _INT)
            high = builder.lshr(bits, _INT(16))
            up = builder.add(_INT(0x7FFF), builder.and_(high, _INT(1)))
            rounded = builder.lshr(builder.add(bits, up), _INT(16))
            # by bits: under fastmath a comparison of x with itself may be taken for granted
            nan = builder.icmp_unsigned(">", builder.and_(bits, _INT(0x7FFFFFFF)), _INT(0x7F800000))
            return builder.trunc(builder.select(nan, builder.or_(high, _INT(0x40)), rounded), _SHORT)
        return x

    def _pointer(builder, kind, width, address):
        """Pointer to the number or vector, and its size. Vectors of 16-bit numbers move as words of two."""
        storage, size = _TYPES[kind][0], _BYTES.get(kind, 4) * width
        if width > 1:
            storage = ir.VectorType(_INT, width // 2) if storage == _SHORT else ir.VectorType(storage, width)
        return builder.inttoptr(address, ir.PointerType(storage, _GLOBAL)), size

    def _number(kind, width):
        return _TYPES[kind][1] if width == 1 else types.UniTuple(_TYPES[kind][1], width)

    def _load(kind, width, fixed):
        @intrinsic
        def load(typing, address):
            def code(context, builder, signature, values):
                pointer, size = _pointer(builder, kind, width, values[0])
                read = builder.load(pointer)
                read.align = size
                if fixed:
                    read.set_metadata("invariant.load", builder.module.add_metadata([]))
                if width == 1:
                    return _decode(builder, kind, read)
                stored = [builder.extract_element(read, _INT(n)) for n in range(read.type.count)]
                if _TYPES[kind][0] == _SHORT:
                    halves = [builder.lshr(word, _INT(shift)) for word in stored for shift in (0, 16)]
                    stored = [builder.trunc(half, _SHORT) for half in halves]
                numbers = [_decode(builder, kind, x) for x in stored]
                return context.make_tuple(builder, signature.return_type, numbers)

            return _number(kind, width)(types.int64), code

        return load

    def _loads(kind, width=1):
        return _load(kind, width, False), _load(kind, width, True)

    def _store(kind, width=1):
        @intrinsic
        def store(typing, address, x):
            def code(context, builder, signature, values):
                pointer, size = _pointer(builder, kind, width, values[0])
                whole = values[1]
                if width == 1:
                    whole = _encode(builder, kind, whole)
                else:
                    stored = [_encode(builder, kind, builder.extract_value(whole, n)) for n in range(width)]
                    if _TYPES[kind][0] == _SHORT:
                        words = [builder.zext(x, _INT) for x in stored]
                        pairs = zip(words[::2], words[1::2])
                        stored = [builder.or_(low, builder.shl(high, _INT(16))) for low, high in pairs]
                    whole = ir.Constant(pointer.type.pointee, ir.Undefined)
                    for n, number in enumerate(stored):
                        whole = builder.insert_element(whole, number, _INT(n))
                builder.store(whole, pointer).align = size
                return context.get_dummy_value()

            return types.void(types.int64, _number(kind, width)), code

        return store

    def _atomic_add(kind, width=1):
        name, letter = {"float32": ("f32", "f"), "float64": ("f64", "d")}[kind]
        operand = "$1" if width == 1 else "{" + ", ".join(f"${n + 1}" for n in range(width)) + "}"
        text = f"red.global.add{'' if width == 1 else f'.v{width}'}.{name} [$0], {operand};"

        @intrinsic
        def add(typing, address, x):
            def code(context, builder, signature, values):
                scalar = _TYPES[kind][0]
                kinds = ir.FunctionType(ir.VoidType(), [values[0].type] + [scalar] * width)
                constraints = ",".join(["l"] + [letter] * width + ["~{memory}"])
                numbers = [builder.extract_value(values[1], n) for n in range(width)] if width > 1 else [values[1]]
                builder.call(ir.InlineAsm(kinds, text, constraints, side_effect=True), [values[0], *numbers])
                return context.get_dummy_value()

            return types.void(types.int64, _number(kind, width)), code

        return add


load_uint8, ldg_uint8 = _loads("uint8")
load_uint16, ldg_uint16 = _loads("uint16")
load_int32, ldg_int32 = _loads("int32")
load_int64, ldg_int64 = _loads("int64")
load_float16, ldg_float16 = _loads("float16")
load_bfloat16, ldg_bfloat16 = _loads("bfloat16")
load_float32, ldg_float32 = _loads("float32")
load_float64, ldg_float64 = _loads("float64")

# vectors as tuples, most of them of 16 bytes, which is the widest access there is
load_uint32x4, ldg_uint32x4 = _loads("uint32", 4)
load_float16x4, ldg_float16x4 = _loads("float16", 4)
load_float16x8, ldg_float16x8 = _loads("float16", 8)
load_bfloat16x4, ldg_bfloat16x4 = _loads("bfloat16", 4)
load_bfloat16x8, ldg_bfloat16x8 = _loads("bfloat16", 8)
load_float32x2, ldg_float32x2 = _loads("float32", 2)
load_float32x4, ldg_float32x4 = _loads("float32", 4)
load_float64x2, ldg_float64x2 = _loads("float64", 2)

store_uint8 = _store("uint8")
store_uint16 = _store("uint16")
store_int32 = _store("int32")
store_int64 = _store("int64")
store_float16 = _store("float16")
store_bfloat16 = _store("bfloat16")
store_float32 = _store("float32")
store_float64 = _store("float64")

store_uint32x4 = _store("uint32", 4)
store_float16x4 = _store("float16", 4)
store_float16x8 = _store("float16", 8)
store_bfloat16x4 = _store("bfloat16", 4)
store_bfloat16x8 = _store("bfloat16", 8)
store_float32x2 = _store("float32", 2)
store_float32x4 = _store("float32", 4)
store_float64x2 = _store("float64", 2)

# additions whose result nobody asks for
atomic_add_float32 = _atomic_add("float32")
atomic_add_float64 = _atomic_add("float64")
atomic_add_float32x2 = _atomic_add("float32", 2)  # the vectors: sm_90 and later
atomic_add_float32x4 = _atomic_add("float32", 4)
