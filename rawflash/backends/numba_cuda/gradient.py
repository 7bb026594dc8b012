"""One tile of the backward pass: where its factors lie, P again from S and lse, and dS (gradient.cuh)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rawflash.backends.numba_cuda import simt, tile
from rawflash.backends.numba_cuda.call import row_of
from rawflash.backends.numba_cuda.intrinsics import as_double, get, put
from rawflash.backends.numba_cuda.memory import device
from rawflash.backends.numba_cuda.numbers import INFINITE, LOAD, exponential
from rawflash.backends.numba_cuda.philox import kept
from rawflash.backends.numba_cuda.scores import Scores, Step
from rawflash.backends.numba_cuda.visibility import EMPTY, FULL


def places(c: Any) -> SimpleNamespace:
    """Where the tiles of all backward kernels begin, in on-chip memory."""
    Q = 0
    K = Q + c.BR * c.PITCH_D
    V = K + c.BC * c.PITCH_D
    dO = V + c.BC * c.PITCH_V
    P = dO + c.BR * c.PITCH_V
    return SimpleNamespace(Q=Q, K=K, V=V, dO=dO, P=P, dS=P + c.BR * c.PITCH_S)


def products(c: Any) -> Any:
    """``products(S, dP, on_chip)``: S = Q K^T, dP = dO V^T."""
    at, real = places(c), c.real
    fill = tile.fill(c.R, c.C)
    add_scores = simt.product_nt(c, c.DEPTH_D, at.Q, c.PITCH_D, at.K, c.PITCH_D)
    add_gradients = simt.product_nt(c, c.DEPTH_V, at.dO, c.PITCH_V, at.V, c.PITCH_V)

    @device
    def products(S: Any, dP: Any, on_chip: Any) -> None:
        fill(S, real(0))
        fill(dP, real(0))
        add_scores(S, on_chip)
        add_gradients(dP, on_chip)

    return products


def load_statistic(c: Any, name: str) -> Any:
    """``load_statistic(call, at, i0, into)``: lse, or delta = rowsum(dO * O) - dlse, of the thread's rows."""
    R, side, real, load, place = c.R, c.SIDE, c.real, LOAD[c.REAL_TYPE], row_of(c, name)
    _, thread_y = tile.threads(c)

    @device
    def load_statistic(call: Any, at: Any, i0: int, into: Any) -> None:
        for r in range(R):
            i = i0 + thread_y() + side * r
            into[r] = load(place(call, at.slot, at.h, at.q_start + i)) if i < at.q_length else real(0)

    return load_statistic


def score_gradient(c: Any, sloped: bool) -> Any:
    """``score_gradient(x, slope, dP, lse, delta, keep)`` -> P, dS.

    P = exp(S - lse), dropped out as in the forward pass, which is what dV needs; dS = P (dP - delta), times
    softcap's slope if ``sloped``: what dQ and dK need.
    """
    real, exp = c.real, exponential(c)

    @device
    def score_gradient(x: Any, slope: Any, dP: Any, lse: Any, delta: Any, keep: Any) -> Any:
        above = x - lse
        P = exp(real(0) if above > real(0) else above)  # P <= 1, whatever was rounded; NaN stays NaN
        gradient = real(0) if keep == real(0) else dP * keep
        dS = P * (gradient - delta)
        if sloped:
            dS *= slope
        return P * keep, dS

    return score_gradient


def put_score_gradients(c: Any, of: Scores, sloped: bool) -> Any:
    """``put_score_gradients(call, at, S, dP, lse, delta, on_chip, i0, j0, kind)``: P and dS into on-chip memory.

    A hidden key has P = dS = 0 by selection: its dP may have overflown.
    """
    R, C, side, pitch, real, place = c.R, c.C, c.SIDE, c.PITCH_S, c.real, places(c)
    P_AT, DS_AT = place.P, place.dS
    BC, dropout, biased = c.BC, c.DROPOUT, c.BIAS
    simple, in_registers = of.plain and not c.DROPOUT, of.in_registers
    keys_of_row, visible, score = of.keys_of_row, of.visible, of.score
    plain_gradient, any_gradient = score_gradient(c, False), score_gradient(c, sloped)
    put_p, _ = tile.score_tile(c, P_AT)
    put_ds, _ = tile.score_tile(c, DS_AT)
    thread_x, thread_y = tile.threads(c)
    load, lse_of, delta_of = LOAD[c.REAL_TYPE], row_of(c, "lse"), row_of(c, "delta")

    @device
    def in_registers_only(call: Any, at: Any, S: Any, dP: Any, lse: Any, delta: Any, on_chip: Any,
                          i0: int, j0: int, kind: int) -> None:  # fmt: skip
        for r in range(R):
            y = thread_y() + side * r
            first, end = 0, BC
            if kind != FULL:
                first, end = keys_of_row(call, at, i0 + y, j0)
            for n in range(C):
                x = thread_x() + side * n
                P, dS = plain_gradient(S[r, n] * at.scale, real(1), dP[r, n], lse[r], delta[r], real(1))
                hidden = x < first or x >= end
                put(on_chip, P_AT + y * pitch + x, real(0) if hidden else P)
                put(on_chip, DS_AT + y * pitch + x, real(0) if hidden else dS)

    @device
    def in_tile(call: Any, at: Any, S: Any, dP: Any, on_chip: Any, i0: int, j0: int, kind: int) -> None:
        put_p(on_chip, S)
        put_ds(on_chip, dP)
        n = 0
        while n < R * C:  # a loop that stays one
            y = thread_y() + side * (n // C)
            x = thread_x() + side * (n % C)
            mine = y * pitch + x
            P, dS = real(0), real(0)
            if kind == FULL or visible(call, at, i0 + y, j0 + x):
                s, slope = score(call, at, get(on_chip, P_AT + mine), i0 + y, j0 + x)
                if not biased or s != -INFINITE:  # a bias of -inf hides too, also from a row whose lse is -inf
                    keep = real(1)
                    if dropout:
                        keep = real(as_double(call.keep_scale)) if kept(call, at.b, at.h, i0 + y, j0 + x) else real(0)
                    lse = load(lse_of(call, at.slot, at.h, at.q_start + i0 + y))
                    delta = load(delta_of(call, at.slot, at.h, at.q_start + i0 + y))
                    P, dS = any_gradient(s, slope, get(on_chip, DS_AT + mine), lse, delta, keep)
            put(on_chip, P_AT + mine, P)
            put(on_chip, DS_AT + mine, dS)
            n += 1

    @device
    def put_score_gradients(call: Any, at: Any, S: Any, dP: Any, lse: Any, delta: Any, on_chip: Any,
                            i0: int, j0: int, kind: int) -> None:  # fmt: skip
        if simple:
            if in_registers or kind == FULL:
                in_registers_only(call, at, S, dP, lse, delta, on_chip, i0, j0, kind)
            else:
                in_tile(call, at, S, dP, on_chip, i0, j0, kind)
        else:
            in_tile(call, at, S, dP, on_chip, i0, j0, kind)

    return put_score_gradients


def next_step(c: Any, of: Scores) -> Any:
    """``next_step(call, s, h, h_end, i0, i_low, i_high, j0)``: the first step from row i0 of head h on: the rows of one
    head, then the next head of the group."""
    next_rows = of.next_rows

    @device
    def next_step(call: Any, s: Any, h: int, h_end: int, i0: int, i_low: int, i_high: int, j0: int) -> Any:
        found = next_rows(call, s, h, i0, i_high, j0)
        while found.kind == EMPTY and h + 1 < h_end:
            h += 1
            found = next_rows(call, s, h, i_low, i_high, j0)
        return Step(h, found.start, found.kind)

    return next_step


def store_keys(c: Any, name: str, columns: int) -> Any:
    """``store_keys(call, s, h_kv, j0, sum, factor)``: write the gradient of keys or values. Rows of padding are 0."""
    packed, BC, tall = c.PACKED, c.BC, tile.Grouped(c, c.BC)
    count, at, place, store_row = tall.COUNT, tall.at, row_of(c, name), tile.store_row(c, columns)
    _, thread_y = tile.threads(c)

    @device
    def store_keys(call: Any, s: Any, h_kv: int, j0: int, sum: Any, factor: Any) -> None:
        keys_end = s.kv_length if packed else call.Tk
        for r in range(count):
            y = at(thread_y(), r)
            j = j0 + y
            if y < BC and j < keys_end:
                store_row(place(call, s.slot, h_kv, s.k_start + j), sum, r, factor, j >= s.kv_length)

    return store_keys
