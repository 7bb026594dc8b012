"""The online softmax of one tile (Dao 2024, algorithm 1, lines 9 and 10), in registers (softmax.cuh)."""

from __future__ import annotations

import math
from typing import Any

from rawflash.backends.numba_cuda.intrinsics import as_double, get, put
from rawflash.backends.numba_cuda.memory import device
from rawflash.backends.numba_cuda.numbers import INFINITE, LOAD, exponential, larger
from rawflash.backends.numba_cuda.philox import kept
from rawflash.backends.numba_cuda.tile import maximum_of_lanes, threads


def softmax_step(c: Any) -> Any:
    """``softmax_step(S, m, l, alpha)``: S becomes P = exp(S - m), m and l are updated, alpha = exp(m_before - m).

    m is the same in all threads of a row; l is the thread's own part of the sum.
    """
    R, C, real = c.R, c.C, c.real
    exp, maximum = exponential(c), maximum_of_lanes(c)

    @device
    def softmax_step(S: Any, m: Any, l: Any, alpha: Any) -> None:
        for r in range(R):
            highest = S[r, 0]
            for n in range(1, C):
                highest = larger(highest, S[r, n])
            highest = larger(m[r], maximum(highest))
            shift = real(0) if highest == -INFINITE else highest  # a row that has seen no key: exp(-inf - 0) is 0
            alpha[r] = exp(m[r] - shift)
            m[r] = highest
            total = real(0)
            for n in range(C):
                S[r, n] = exp(S[r, n] - shift)
                total += S[r, n]
            l[r] = l[r] * alpha[r] + total

    return softmax_step


def drop(c: Any, place: int) -> Any:
    """``drop(call, at, on_chip, i0, j0)``: P -> Z P: what is kept is divided by the probability of that, the rest 0."""
    R, C, side, pitch, real = c.R, c.C, c.SIDE, c.PITCH_S, c.real
    thread_x, thread_y = threads(c)

    @device
    def drop(call: Any, at: Any, on_chip: Any, i0: int, j0: int) -> None:
        keep_scale = real(as_double(call.keep_scale))
        n = 0
        while n < R * C:
            y = thread_y() + side * (n // C)
            x = thread_x() + side * (n % C)
            mine = place + y * pitch + x
            keep = kept(call, at.b, at.h, i0 + y, j0 + x)
            put(on_chip, mine, get(on_chip, mine) * keep_scale if keep else real(0))
            n += 1

    return drop


def finish_row(c: Any) -> Any:
    """``finish_row(call, at, m, l)`` -> factor, l, lse: the sink joins the denominator.

    m and l are the row's; ``factor`` is still to be multiplied to O, the sum of exp(S - m) V. A row that saw nothing
    has l = 0 and lse -inf.
    """
    real, sinks, load, size, exp = c.real, c.SINKS, LOAD[c.SINK_TYPE], c.SINK_BYTES, exponential(c)

    @device
    def finish_row(call: Any, at: Any, m: Any, l: Any) -> Any:
        before = real(1)
        if sinks:
            sink = real(load(call.sinks + at.h * call.sinks_h * size))
            highest = larger(m, sink)
            shift = real(0) if highest == -INFINITE else highest
            before = exp(m - shift)
            l = l * before + exp(sink - shift)
            m = highest
        if l == real(0):
            return real(0), l, real(-INFINITE)
        return before / l, l, real(m + math.log(l))

    return finish_row
