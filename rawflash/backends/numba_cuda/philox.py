"""Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) on the device.

The twin of :mod:`rawflash.philox`, bit for bit.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, int64, types, uint32  # noqa: F401  the simulator looks for `cuda` here

from rawflash import philox as host
from rawflash.backends.numba_cuda.memory import SIMULATED, device

_MULTIPLIER_0, _MULTIPLIER_1, _WEYL_0, _WEYL_1 = host.MULTIPLIER_0, host.MULTIPLIER_1, host.WEYL_0, host.WEYL_1
_ROUNDS = host.ROUNDS

if SIMULATED:

    def product(x: Any, y: Any) -> tuple[int, int]:
        """High and low word of the product of two words."""
        return divmod(int(x) * int(y), 1 << 32)

else:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    @intrinsic
    def product(typing: Any, x: Any, y: Any) -> Any:
        """High and low word of the product of two words, by one instruction; Numba's integers would take two."""

        def code(context, builder, signature, values):
            word = ir.IntType(32)
            kind = ir.FunctionType(ir.IntType(64), [word, word])
            wide = builder.call(ir.InlineAsm(kind, "mul.wide.u32 $0, $1, $2;", "=l,r,r", side_effect=False), values)
            words = builder.trunc(builder.lshr(wide, wide.type(32)), word), builder.trunc(wide, word)
            return context.make_tuple(builder, signature.return_type, words)

        return types.UniTuple(types.uint32, 2)(types.uint32, types.uint32), code


@device
def word_of(x):
    """An integer modulo 2^32."""
    return uint32(x & 0xFFFFFFFF)


@device
def philox(c0, c1, c2, c3, seed):
    """The four words of a counter of four; ``seed`` is an int64 that stands for its 64 bits."""
    key_0, key_1 = word_of(seed), word_of(seed >> 32)
    for _ in range(_ROUNDS):
        high_0, low_0 = product(_MULTIPLIER_0, c0)
        high_1, low_1 = product(_MULTIPLIER_1, c2)
        c0, c1 = uint32(high_1 ^ c1 ^ key_0), uint32(low_1)
        c2, c3 = uint32(high_0 ^ c3 ^ key_1), uint32(low_0)
        key_0, key_1 = word_of(int64(key_0) + _WEYL_0), word_of(int64(key_1) + _WEYL_1)
    return c0, c1, c2, c3


@device
def kept(call, b, h, i, j):
    """Does dropout keep the probability at (b, h, i, j)? Four neighbouring keys share one counter."""
    words = philox(word_of(j >> 2), word_of(i), word_of(h), word_of(b), call.seed)
    n = j & 3
    word = words[0] if n == 0 else words[1] if n == 1 else words[2] if n == 2 else words[3]
    return word >= word_of(call.keep_threshold)
