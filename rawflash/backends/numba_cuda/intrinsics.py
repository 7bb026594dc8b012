"""Every instruction that Numba has no name for, in one place; beside each the twin that Numba's simulator runs.

Addresses of device memory are int64 (memory.py reads and writes there). On-chip memory is one shared array of
the compute dtype, and a place in it is an index.

Those at the end are for the kernels in mma/, whose on-chip memory is bytes at uint32 addresses: instructions of whole
warps on tensor cores, which the simulator has no twin of (tests/warps.py has).
"""

from __future__ import annotations

import ctypes
import inspect
import math
import struct
import threading
from typing import Any

from numba import config, cuda, types
from numba.cuda.extending import intrinsic

from rawflash.backends.numba_cuda.memory import device

SIMULATED = bool(config.ENABLE_CUDASIM)
WARP = 0xFFFFFFFF

if SIMULATED:

    def get(on_chip: Any, i: int) -> Any:
        """The number at place i."""
        return on_chip[i]

    def put(on_chip: Any, i: int, x: Any) -> None:
        on_chip[i] = x

    def vector2(on_chip: Any, i: int) -> Any:
        """Two neighbours, by one load."""
        return on_chip[i], on_chip[i + 1]

    def vector4(on_chip: Any, i: int) -> Any:
        return on_chip[i], on_chip[i + 1], on_chip[i + 2], on_chip[i + 3]

    def as_double(bits: int) -> float:
        """The float64 of these bits."""
        return struct.unpack("d", struct.pack("q", bits))[0]

    def exp2_approximately(x: float) -> float:
        return math.inf if x >= 128 else 0.0 if x < -126 else 2.0**x

    def copier(count: int, size: int) -> Any:
        """Copies of ``count`` numbers of ``size`` bytes from device memory to place i; zeros where there are none."""
        kind = {4: ctypes.c_float, 8: ctypes.c_double}[size]

        def copy_to_shared(on_chip: Any, i: int, address: int, exists: bool) -> None:
            for n in range(count):
                on_chip[i + n] = kind.from_address(int(address) + n * size).value if exists else 0.0

        return copy_to_shared

    def commit_copies() -> None:
        """The copies that this thread has begun since the last time become a group."""

    def await_copies() -> None:
        """Wait for all groups of this thread."""

    def exchange(x: Any, lane: int) -> Any:
        """What the thread whose number differs in the bit ``lane`` holds; all threads of a block call together."""
        me: Any = threading.current_thread()  # the simulator's, one for each of CUDA
        shown = me._manager.__dict__.setdefault("shown", {})
        shown[me.threadIdx.x] = x
        me.syncthreads()
        got = shown[me.threadIdx.x ^ lane]
        me.syncthreads()
        return got

    def sync_warp() -> None:
        me: Any = threading.current_thread()
        me.syncthreads()

else:
    from llvmlite import ir

    _FLOAT, _DOUBLE, _INT, _LONG = ir.FloatType(), ir.DoubleType(), ir.IntType(32), ir.IntType(64)

    def _assembly(result: Any, arguments: list[Any], text: str, constraints: str, effect: bool = True) -> Any:
        return ir.InlineAsm(ir.FunctionType(result, arguments), text, constraints, side_effect=effect)

    def _place(context: Any, builder: Any, array_type: Any, array: Any, i: Any) -> Any:
        """The pointer to a place in a shared array."""
        return builder.gep(context.make_array(array_type)(context, builder, array).data, [i])

    @intrinsic
    def get(typing: Any, on_chip: Any, i: Any) -> Any:
        """The number at place i; an index of Numba's would be asked whether it counts from the end."""

        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.load(_place(context, builder, signature.args[0], *values))

        return on_chip.dtype(on_chip, types.int64), code

    @intrinsic
    def put(typing: Any, on_chip: Any, i: Any, x: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            builder.store(values[2], _place(context, builder, signature.args[0], *values[:2]))
            return context.get_dummy_value()

        return types.void(on_chip, types.int64, on_chip.dtype), code

    def _vector(width: int) -> Any:
        @intrinsic
        def vector(typing: Any, on_chip: Any, i: Any) -> Any:
            def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                place = _place(context, builder, signature.args[0], *values)
                number = place.type.pointee
                read = builder.load(builder.bitcast(place, ir.VectorType(number, width).as_pointer()))
                read.align = width * (4 if number == _FLOAT else 8)
                numbers = [builder.extract_element(read, _INT(n)) for n in range(width)]
                return context.make_tuple(builder, signature.return_type, numbers)

            return types.UniTuple(on_chip.dtype, width)(on_chip, types.int64), code

        return vector

    vector2, vector4 = _vector(2), _vector(4)

    @intrinsic
    def as_double(typing: Any, bits: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.bitcast(values[0], _DOUBLE)

        return types.float64(types.int64), code

    @intrinsic
    def exp2_approximately(typing: Any, x: Any) -> Any:
        """2^x, to 2 units in the last place; a result below the smallest normal number is 0."""

        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.call(_assembly(_FLOAT, [_FLOAT], "ex2.approx.ftz.f32 $0, $1;", "=f,f", False), values)

        return types.float32(types.float32), code

    def copier(count: int, size: int) -> Any:
        """The same, by the hardware on its own."""
        cache = "cg" if count * size == 16 else "ca"
        text = f"cp.async.{cache}.shared.global [$0], [$1], {count * size}, $2;"

        @intrinsic
        def copy_to_shared(typing: Any, on_chip: Any, i: Any, address: Any, exists: Any) -> Any:
            def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                place = _place(context, builder, signature.args[0], *values[:2])
                shared = builder.ptrtoint(builder.addrspacecast(place, ir.PointerType(place.type.pointee, 3)), _INT)
                many = builder.select(values[3], _INT(count * size), _INT(0))
                copy = _assembly(ir.VoidType(), [_INT, _LONG, _INT], text, "r,l,r,~{memory}")
                builder.call(copy, [shared, values[2], many])
                return context.get_dummy_value()

            return types.void(on_chip, types.int64, types.int64, types.boolean), code

        return copy_to_shared

    def _statement(text: str) -> Any:
        @intrinsic
        def statement(typing: Any) -> Any:
            def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                builder.call(_assembly(ir.VoidType(), [], text, "~{memory}"), [])
                return context.get_dummy_value()

            return types.void(), code

        return statement

    commit_copies = _statement("cp.async.commit_group;")
    await_copies = _statement("cp.async.wait_group 0;")

    @device
    def exchange(x: Any, lane: int) -> Any:
        return cuda.shfl_xor_sync(WARP, x, lane)

    @device
    def sync_warp() -> None:
        cuda.syncwarp()

    # ---- for mma/ ----------------------------------------------------------------------------------------

    # by letter of a constraint: what it is to LLVM and to Numba
    _LETTERS = {"r": (_INT, types.uint32), "l": (_LONG, types.int64), "f": (_FLOAT, types.float32)}

    def _instruction(text: str, results: str, operands: str, doc: str, effect: bool = False) -> Any:
        """An instruction whose results, then operands, are $0, $1, ...; ``effect``: it is to stay where it stands."""
        given = [_LETTERS[letter] for letter in operands]
        made = [_LETTERS[letter] for letter in results]
        constraints = ",".join([f"={letter}" for letter in results] + [*operands] + ["~{memory}"] * effect)
        low: Any = ir.LiteralStructType([kind for kind, _ in made])
        result = types.UniTuple(made[0][1], len(made)) if made else types.void
        if len(made) == 1:
            low, result = made[0]
        elif not made:
            low = ir.VoidType()

        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            value = builder.call(_assembly(low, [kind for kind, _ in given], text, constraints, effect), values)
            if not made:
                return context.get_dummy_value()
            if len(made) == 1:
                return value
            parts = [builder.extract_value(value, n) for n in range(len(made))]
            return context.make_tuple(builder, signature.return_type, parts)

        def instruction(typing: Any, *arguments: Any) -> Any:
            return result(*[kind for _, kind in given]), code

        # Numba binds the arguments by their names
        names = ["typing", *(f"x{n}" for n in range(len(operands)))]
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        instruction.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        instruction.__doc__ = doc
        return intrinsic(instruction)

    def _mma(kind: str, k: int = 16) -> Any:
        shape = f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32"
        text = shape + " {$0,$1,$2,$3},{$4,$5,$6,$7},{$8,$9},{$10,$11,$12,$13};"
        return _instruction(text, "ffff", "rrrrrrffff", f"A B + C of a warp: A 16 x {k}, B {k} x 8 ({kind}), C f32.")

    mma_bf16, mma_f16 = _mma("bf16"), _mma("f16")
    # No kernel of this package's uses it: float32 is never rounded to tf32 unasked. For kernels of a reader's own.
    mma_tf32 = _mma("tf32", 8)
    _LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4{}.shared.b16 {{$0,$1,$2,$3}},[$4];"
    ldmatrix = _instruction(
        _LDMATRIX.format(""), "rrrr", "r", "Four 8 x 8 matrices; lanes 8n to 8n + 7 give the rows of the nth.", True
    )
    ldmatrix_transposed = _instruction(_LDMATRIX.format(".trans"), "rrrr", "r", "The same, each transposed.", True)
    pack_bf16 = _instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", "r", "ff", "Two numbers, the first in the low half.")
    pack_f16 = _instruction("cvt.rn.f16x2.f32 $0, $2, $1;", "r", "ff", "Two numbers, the first in the low half.")
    multiply_add = _instruction("fma.rn.f32 $0, $1, $2, $3;", "f", "fff", "x y + z.")
    greater = _instruction("max.f32 $0, $1, $2;", "f", "ff", "The greater number; the other one where one is NaN.")
    least_or_nan = _instruction("min.NaN.f32 $0, $1, $2;", "f", "ff", "The smaller number; NaN where one is NaN.")
    any_greater = _instruction(
        "{ .reg .pred p; setp.gt.f32 p, $1, $2; vote.sync.any.pred p, p, -1; selp.b32 $0, 1, 0, p; }",
        "r", "ff", "1 if x > y in some lane of the warp, else 0.", True,
    )  # fmt: skip
    copy16 = _instruction(
        "cp.async.cg.shared.global.L2::128B [$0], [$1], 16;", "", "rl", "Begin to copy 16 bytes of device memory.", True
    )
    copy16_if = _instruction(
        "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", "", "rlr", "Of $2 bytes; zeros for the rest.", True
    )
    shared_store = _instruction("st.shared.b32 [$0], $1;", "", "rr", "Four bytes.", True)
    shared_load4 = _instruction("ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];", "rrrr", "r", "16 bytes.", True)
    shared_load2f = _instruction("ld.shared.v2.f32 {$0,$1}, [$2];", "ff", "r", "Two numbers.", True)
    shared_store1f = _instruction("st.shared.f32 [$0], $1;", "", "rf", "A number.", True)

    @intrinsic
    def quotient(typing: Any, x: Any, y: Any) -> Any:
        """x / y of numbers that are not negative: in line, while the quotient of 64 bits is a call, which costs the
        kernel its uniform registers."""

        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.zext(builder.udiv(*(builder.trunc(x, _INT) for x in values)), _LONG)

        return types.int64(types.int64, types.int64), code

    @intrinsic
    def shared_base(typing: Any) -> Any:
        """The address of the block's on-chip memory, a multiple of 128."""

        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            name = "rawflash_on_chip"
            memory = builder.module.globals.get(name)
            if memory is None:
                memory = ir.GlobalVariable(builder.module, ir.ArrayType(ir.IntType(8), 0), name, addrspace=3)
                memory.linkage, memory.align = "external", 128
            return builder.ptrtoint(memory, _INT)

        return types.uint32(), code
