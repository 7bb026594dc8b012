"""One pair of blocks of the backward pass: eight tiles, five products, and what lies between them.

The keys are on the lanes of scores, so that lse and delta are one number a row. The product of a block of queries and
one of keys goes by panels of NR keys: S and dP of a panel lie in the L1 cache when P and dS are made of them.

Everything on chip is one array, ``Work.x``, and the tiles are where they begin in it. Q, dO (Br rows), K, V, dK, dV (Bc
rows) lie as each product wants them: *rows* for the factor that is taken a number at a time, *panels* (rows of NR
numbers, microkernel.py) for the one that is taken a vector at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from rawflash.backends.numba_cpu.backward_panel import gradient_panel, panel_to_rows, row_sums, rows_to_panel
from rawflash.backends.numba_cpu.microkernel import LONGEST_ROW_SUM, MR, OPTIONS, columns_of, gemm, gemm_scores
from rawflash.backends.numba_cpu.numerics import store_tile
from rawflash.backends.numba_cpu.tile import aligned, apply_dropout, finish_scores, load_rows, padded, rows_of
from rawflash.backends.numba_cpu.visibility import FULL, PARTIAL, band_class, key_range, query_range

SPARE = MR  # rows that a product may write beyond those asked for
_helper = njit(**OPTIONS)


class Work(NamedTuple):
    """On-chip memory of one thread in the backward pass. Q and dO are held once for each kind of use, K three times."""

    x: np.ndarray
    seen: np.ndarray  # scratch of the mask program
    Q: int  # (br, ldd), rows
    dO: int  # (br, ldv), rows
    Q_panels: int  # (br, NR) for each NR of d
    dO_panels: int  # (br, NR) for each NR of dv
    K_panels: int  # (bc, NR) for each NR of d
    KT: int  # (d, NR) for each NR of bc
    VT: int  # (dv, NR) for each NR of bc
    P: int  # (br, NR): S, then P
    dP: int  # (br, NR)
    O: int  # (br, ldv), rows, zeros beyond dv: only where gamma is not at hand
    dS: int  # (br, ldc), rows
    Z: int  # (br, NR): dropout's factors, then the dropped P; only with dropout
    cap: int  # (br, NR): derivative of the softcap; only with one
    dK: int  # (bc, NR) for each NR of d
    dV: int  # (bc, NR) for each NR of dv
    before: int  # dK and dV of what was summed until some rows ago; only where there are many
    ldd: int
    ldv: int
    ldc: int
    rows: int  # of a panel of Q or dO
    keys: int  # of a panel of K, dK or dV


@_helper
def make_work(call, zero):
    """Zeroed on-chip memory with room for what `gemm` touches; ``zero`` has the compute dtype."""
    size = call.size
    columns = columns_of(np.empty(0, type(zero)))
    ldd, ldv, ldc = padded(size.d, columns), padded(size.dv, columns), padded(size.bc, columns) + columns
    rows, keys = size.br + SPARE, padded(size.bc, columns) + SPARE
    score = rows * columns
    Q = 0
    dO = Q + rows * ldd
    Q_panels = dO + rows * ldv
    dO_panels = Q_panels + rows * ldd
    K_panels = dO_panels + rows * ldv
    KT = K_panels + keys * ldd
    VT = KT + keys * size.d
    P = VT + keys * size.dv
    P = padded(P, columns)
    dP = P + score
    O = dP + score
    dS = O + rows * ldv
    Z = dS + padded(rows * ldc, columns)
    cap = Z + (score if call.real.keep_scale != 1.0 else 0)
    dK = cap + (score if call.real.softcap > 0 else 0)
    dV = dK + keys * ldd
    before = dV + keys * ldv
    long = size.Tq * (size.Hq // size.Hkv) > LONGEST_ROW_SUM
    x = aligned(before + (before - dK if long else 0), zero)
    seen = np.zeros((size.program_depth, columns), np.uint8)
    return Work(
        x, seen, Q, dO, Q_panels, dO_panels, K_panels, KT, VT, P, dP, O, dS, Z, cap, dK, dV, before,
        ldd, ldv, ldc, rows, keys,
    )  # fmt: skip


@_helper
def set_aside(x, at, n, to):
    """Add n sums to those from ``to`` on, and begin them anew: so errors grow with their parts, not with the whole."""
    part = x[at : at + n]
    x[to : to + n] += part
    part[:] = 0


@_helper
def set_keys_aside(w):
    """dK and dV of the rows so far."""
    set_aside(w.x, w.dK, w.before - w.dK, w.before)


@_helper
def _rows_to_panels(x, source, ld, target, panel_rows, rows, width):
    """Rows ``ld`` apart as panels of ``panel_rows`` rows."""
    columns = columns_of(x)
    for c in range(0, width, columns):
        rows_to_panel(x, source + c, ld, target + c * panel_rows, rows)


@_helper
def load_keys(call, w, b, h, j0, n_j):
    """Load K (as panels and transposed) and V (transposed); dK = dV = 0."""
    x, start, one = w.x, call.k_starts[b], w.x.dtype.type(1)
    d, dv, columns = call.size.d, call.size.dv, columns_of(w.x)
    rows = x[w.dK :]  # K by rows, on the way to its panels
    load_rows(rows, w.ldd, 1, call.k, start, b, h, j0, n_j, d, one)
    _rows_to_panels(x, w.dK, w.ldd, w.K_panels, w.keys, n_j, d)
    for p in range(0, n_j, columns):
        n = min(columns, n_j - p)
        load_rows(x[w.KT + p * d :], 1, columns, call.k, start, b, h, j0 + p, n, d, one)
        load_rows(x[w.VT + p * dv :], 1, columns, call.v, start, b, h, j0 + p, n, dv, one)
    rows[:] = 0


@_helper
def load_queries(call, w, dout, b, h, i0, n_i):
    """Load Q and dO, as rows and as panels."""
    start, d, dv, one = call.q_starts[b], call.size.d, call.size.dv, w.x.dtype.type(1)
    load_rows(w.x[w.Q :], w.ldd, 1, call.q, start, b, h, i0, n_i, d, one)
    load_rows(w.x[w.dO :], w.ldv, 1, dout, start, b, h, i0, n_i, dv, one)
    _rows_to_panels(w.x, w.Q, w.ldd, w.Q_panels, w.rows, n_i, d)
    _rows_to_panels(w.x, w.dO, w.ldv, w.dO_panels, w.rows, n_i, dv)


@_helper
def gamma_rows(call, x, dO, O, ld, o, dlse, first, delta, at, b, h, i0, n_i):
    """delta = rowsum(dO * O) - dlse for rows ``i0 : i0 + n_i``; dO is on chip, O is loaded here, ``ld`` apart both.

    ``dlse`` begins at ``first``, ``delta`` at ``at``.
    """
    load_rows(x[O:], ld, 1, o, call.q_starts[b], b, h, i0, n_i, call.size.dv, x.dtype.type(1))
    row_sums(x, dO, O, ld, n_i, ld, delta, at)
    for r in range(n_i):
        delta[at + r] -= dlse[first + r]


@_helper
def _multiply(x, X, X_row, Y, Y_row, n_i, n_j):
    """X *= Y on a panel of keys; 0 where Y is 0."""
    zero = x.dtype.type(0)
    for r in range(n_i):
        left, right = x[X + r * X_row : X + r * X_row + n_j], x[Y + r * Y_row : Y + r * Y_row + n_j]
        for c in range(n_j):
            left[c] = zero if right[c] == zero else left[c] * right[c]


@_helper
def _add_bias_gradient(x, dS, ld, dbias, strides, b, h, i0, n_i, j0, n_j):
    """dbias += dS, summed over the axes along which the bias was broadcast (stride 0)."""
    base = b * strides[0] + h * strides[1] + i0 * strides[2] + j0 * strides[3]
    for r in range(n_i):
        row = x[dS + r * ld : dS + r * ld + n_j]
        at = base + r * strides[2]
        if strides[3] == 0:
            total = 0.0
            for c in range(n_j):
                total += float(row[c])
            dbias[at] += total
        else:
            target = dbias[at : at + n_j]
            for c in range(n_j):
                target[c] += row[c]


@_helper
def _hide_band(call, x, S, b, i0, n_i, j0, n_j):
    """-inf over the scores of a panel of keys that the band hides."""
    columns, hidden = columns_of(x), x.dtype.type(-np.inf)
    for r in range(n_i):
        distance = j0 - (i0 + r + call.q_offset[b])
        row = x[S + r * columns : S + r * columns + n_j]
        for c in range(n_j):
            row[c] = row[c] if call.size.band_lower <= distance + c <= call.size.band_upper else hidden


@_helper
def _clear(x, at, ld, rows):
    """Zeros over rows of NR numbers, ``ld`` apart."""
    for r in range(rows):
        x[at + r * ld : at + r * ld + columns_of(x)] = 0


def _make_step(plain: bool):
    """A backward step, with or without code for the options that touch a score."""

    def step(
        call, w, kind, by_band, b, h, i0, n_i, j0, n_j, lse, delta, first, dQ, dQ_at, dQ_rows, dbias, dbias_strides
    ):
        """One pair of blocks with everything on chip but dQ: adds to dK and dV, and adds dS K to dQ.

        ``lse`` and ``delta`` of row i0 are at ``first``; dQ of row i0 is at ``dQ_at``, in panels of ``dQ_rows`` rows.
        """
        x, d, dv, columns = w.x, call.size.d, call.size.dv, columns_of(w.x)
        ldd, ldv, ldc, rows, keys = w.ldd, w.ldv, w.ldc, w.rows, w.keys
        factor = x.dtype.type(call.real.scale if plain else 1.0)
        for p in range(0, n_j, columns):
            n, j = min(columns, n_j - p), j0 + p
            # Only the rows that the band lets see some of the panel's keys; dS of others, and of what is beyond, is 0.
            low, high, cut = 0, n_i, False
            if by_band:
                low, high = query_range(call, b, j, j + n)
                low, high = min(max(low - i0, 0), n_i), min(high - i0, n_i)
                cut = band_class(call, i0 + low, i0 + high, j, j + n, call.q_offset[b]) == PARTIAL
                _clear(x, w.dS + p, ldc, low)
            m, i = high - low, i0 + low
            _clear(x, w.dS + max(high, 0) * ldc + p, ldc, padded(n_i, 2) + 2 - max(high, 0))
            if m <= 0:
                continue
            Q, P, dP, dS = w.Q + low * ldd, w.P + low * columns, w.dP + low * columns, w.dS + low * ldc + p
            # S = Q K^T, dP = dO V^T, P = exp(S - lse), dS = P * (dP - gamma + dlse)
            gemm_scores(x, Q, ldd, x, w.KT + p * d, x, P, m, d)
            gemm(x, w.dO + low * ldv, ldv, 1, x, w.VT + p * dv, x, dP, m, dv, False)
            dropped = P
            if plain:
                if cut:
                    _hide_band(call, x, P, b, i, m, j, n)
            else:
                S, cap = x[P:], x[w.cap + low * columns : w.dK]
                kind_here = PARTIAL if cut or (kind != FULL and call.size.program_depth > 0) else FULL
                finish_scores(call, S, columns, kind_here, cut, b, h, i, m, j, n, False, w.seen, cap)
                if call.real.keep_scale != 1.0:
                    dropped = w.Z + low * columns
                    Z = x[dropped : dropped + m * columns]
                    Z[:] = 1
                    apply_dropout(call, Z, columns, b, h, i, m, j, n, False)
                    _multiply(x, dP, columns, dropped, columns, m, n)
            gradient_panel(x, P, dP, m, dS, ldc, lse, delta, first + low, factor)
            if not plain:
                if call.real.keep_scale != 1.0:
                    _multiply(x, dropped, columns, P, columns, m, n)
                if len(dbias) > 0:
                    _add_bias_gradient(x, dS, ldc, dbias, dbias_strides, b, h, i, m, j, n)
                if call.real.softcap > 0:
                    _multiply(x, dS, ldc, w.cap + low * columns, columns, m, n)
            # dV += P^T dO, dK += dS^T Q
            for c in range(0, dv, columns):
                panel = w.dO_panels + c * rows + low * columns
                gemm(x, dropped, 1, columns, x, panel, x, w.dV + c * keys + p * columns, n, m, True)
            for c in range(0, d, columns):
                panel = w.Q_panels + c * rows + low * columns
                gemm(x, dS, 1, ldc, x, panel, x, w.dK + c * keys + p * columns, n, m, True)
        # dQ += dS K; where the band cuts, some rows at a time, and only the keys that they see
        height = columns if by_band else n_i
        for c in range(0, d, columns):
            for r in range(0, n_i, height):
                m, low, high = min(height, n_i - r), 0, n_j
                if by_band:
                    low, high = key_range(call, b, i0 + r, i0 + r + m)
                    low, high = max(low - j0, 0), min(high - j0, n_j)
                if low < high:
                    panel, target = w.K_panels + c * keys + low * columns, dQ_at + c * dQ_rows + r * columns
                    gemm(x, w.dS + r * ldc + low, ldc, 1, x, panel, dQ, target, m, high - low, True)

    step.__name__ = step.__qualname__ = f"backward_step_{'plain' if plain else 'general'}"
    return _helper(step)


# Each by a name of this module: a kernel that closed over one would have another key in the disk cache every time.
backward_step_plain, backward_step_general = _make_step(True), _make_step(False)


@_helper
def store_panels(address, view, x, at, panel_rows, rows, width, factor, y, scratch):
    """Store ``factor`` times the first rows of panels of ``panel_rows`` rows, in the dtype of the call.

    By way of whole rows in y, from ``scratch`` on.
    """
    columns = columns_of(x)
    ld = padded(width, columns)
    for c in range(0, width, columns):
        panel_to_rows(x, at + c * panel_rows, y, scratch + c, ld, rows, x.dtype.type(factor))
    store_tile(address, view.code, view.row, y, scratch, ld, 1, rows, width)


@_helper
def store_keys(call, w, dk, dv, b, h, j0, n_j):
    """Store dK (times scale) and dV of one block, in the dtype of the call; K and V are overwritten."""
    if len(w.x) > w.before:
        w.x[w.dK : w.before] += w.x[w.before :]
    start, scratch = call.k_starts[b], w.K_panels
    address = rows_of(dk, start, b, h, j0)
    store_panels(address, dk, w.x, w.dK, w.keys, n_j, call.size.d, call.real.scale, w.x, scratch)
    address = rows_of(dv, start, b, h, j0)
    store_panels(address, dv, w.x, w.dV, w.keys, n_j, call.size.dv, 1.0, w.x, scratch)
