"""Closed forms for what every algorithm loads, stores and computes.

One call moves elements between slow memory and the on-chip memory of M elements. With
T_r = T / Br and T_c = T / Bc blocks, no mask and d = dv, one head moves

====================  ==================================================  ==================================
algorithm             elements                                            Chu, Liu, Lin 2026
====================  ==================================================  ==================================
standard forward      4 T^2 + O(T^2 d^2 / M)                              (30)
standard backward     7 T^2 (and T^2 to compute P again)                  after (32)
rowwise               O(T d) if M holds K and V, else O(T^3 d / M)        algorithm 1, (39); 5, (70)
fa2 forward           2 T_r T_c |J| d + 2 T d                             (45), (50): O(T^2 d^2 / M)
fa1 forward           3 T_r T_c |I| d + 2 T d                             algorithm 4
fa2 backward, ji      3 T_r T_c |I| d + O(T d)                            algorithm 8
fa2 backward, ij      4 T_r T_c |J| d + O(T d)                            algorithm 6
fa1 backward          5 T_r T_c |I| d + O(T d)                            algorithm 7
====================  ==================================================  ==================================

The slides compare the two backward orders at one inner index, 4 T_r |J| d (one j, all i) against
3 T_c |I| d (one i, all j). Over all of them these are 4 T_r T d and 3 T_c T d, and the number of outer
blocks, T_r of the one and T_c of the other, is the same for the same M.

numpy_tiled counts what it really moves; ``tests/test_traffic.py`` holds that its counts equal these
forms exactly, with masks and ragged last blocks too, because the forms are sums over the visited
pairs of blocks (:class:`Visits`), which are themselves closed forms for bands.

Row statistics (m, l, lse, dlse, gamma: one number a row) are kept apart from matrices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rawflash.masks import EMPTY, FULL, Visibility
from rawflash.problem import Problem
from rawflash.tiles import FEW, FEW_MMA, IJ, JI, RESIDENT, WGMMA, Tiles
from rawflash.tiling import key_ranges, parts_of

ROW_STATISTICS = ("m", "l", "lse", "dlse", "gamma")
Counts = tuple[tuple[str, int], ...]


def _counts(counts: Mapping[str, int]) -> Counts:
    return tuple((name, int(n)) for name, n in sorted(counts.items()) if n)


@dataclass(frozen=True)
class Traffic:
    """Elements moved by one call, by the name of the array, and its arithmetic.

    Attributes
    ----------
    loads, stores : tuple of (str, int)
        Matrices: slow memory to chip, chip to slow memory.
    row_loads, row_stores : tuple of (str, int)
        Row statistics.
    flops : int
        0 in a record of counts: memory does not see arithmetic.

    Examples
    --------
    >>> t = Traffic.of({"Q": 8, "lse": 2}, {"O": 8})
    >>> t.elements, t.load("Q"), dict(t.row_loads)
    (16, 8, {'lse': 2})
    """

    loads: Counts = ()
    stores: Counts = ()
    row_loads: Counts = ()
    row_stores: Counts = ()
    flops: int = field(default=0, compare=False)

    @classmethod
    def of(cls, loads: Mapping[str, int], stores: Mapping[str, int], flops: int = 0) -> Traffic:
        """From counts by name, row statistics among them."""
        parts = (loads, stores)
        matrices = [{n: c for n, c in part.items() if n not in ROW_STATISTICS} for part in parts]
        rows = [{n: c for n, c in part.items() if n in ROW_STATISTICS} for part in parts]
        counts = [_counts(part) for part in (*matrices, *rows)]
        return cls(counts[0], counts[1], counts[2], counts[3], int(flops))

    def load(self, name: str) -> int:
        """Elements of one array loaded."""
        return dict(self.loads + self.row_loads).get(name, 0)

    def store(self, name: str) -> int:
        """Elements of one array stored."""
        return dict(self.stores + self.row_stores).get(name, 0)

    @property
    def loaded(self) -> int:
        """Elements of matrices loaded."""
        return sum(n for _, n in self.loads)

    @property
    def stored(self) -> int:
        """Elements of matrices stored."""
        return sum(n for _, n in self.stores)

    @property
    def elements(self) -> int:
        """Elements of matrices moved either way: what the papers count."""
        return self.loaded + self.stored

    @property
    def row_elements(self) -> int:
        """Elements of row statistics moved either way."""
        return sum(n for _, n in self.row_loads + self.row_stores)

    def __str__(self) -> str:
        names = list(dict.fromkeys(n for n, _ in self.loads + self.stores + self.row_loads + self.row_stores))
        lines = [f"{'array':<8} {'loads':>14} {'stores':>14}"]
        lines += [f"{name:<8} {self.load(name):>14} {self.store(name):>14}" for name in names]
        lines.append(f"{'matrices':<8} {self.loaded:>14} {self.stored:>14}")
        if self.flops:
            per_element = self.flops / max(self.elements, 1)
            lines.append(f"{self.flops} floating-point operations, {per_element:.1f} an element moved")
        return "\n".join(lines)


@dataclass(frozen=True)
class Visits:
    """Sums over the pairs of blocks (I, J) that a kernel visits, over all query heads.

    Attributes
    ----------
    pairs, q_rows, k_rows, cells : int
        Sums of 1, ``|I|``, ``|J|``, ``|I| |J|``; without a mask ``T_r T_c``, ``T_c Tq``,
        ``T_r Tk`` and ``Tq Tk`` a head.
    masked : int
        Cells of the visited pairs that a ``mask=`` has to be read for.
    q, k : int
        Rows of Q of all query heads, and of K of all *query* heads.
    """

    pairs: int
    q_rows: int
    k_rows: int
    cells: int
    masked: int
    q: int
    k: int


def visits(
    problem: Problem, br: int, bc: int, visibility: Visibility | None = None, *, dense: bool = False
) -> Visits:
    """Which pairs of ``br`` rows and ``bc`` keys are visited.

    Parameters
    ----------
    problem : Problem
    br, bc : int
    visibility : Visibility, optional
        That of the call (``Operands.visibility``). Without it: full lengths, lower-right alignment and
        no ``mask=``. Without a ``mask=`` its arrays may have one entry, which then stands for every sequence.
    dense : bool
        Empty pairs are visited too (the standard algorithm).

    Notes
    -----
    A ``mask=`` costs O(B Hq T_r T_c). Without one sequences that are alike are counted once, in a time
    that grows with the logarithm of their blocks.
    """
    total = np.zeros(7, dtype=object)  # ints of Python: the sums of long sequences need more than 64 bits
    if visibility is None or visibility.mask is None:
        band = problem.band if visibility is None else visibility.band
        lower, upper = (None, None) if dense else (band.lower, band.upper)
        for (q_length, k_length, offset), times in sequences(problem, visibility).items():
            sums = _band(q_length, k_length, offset, br, bc, lower, upper)
            total += np.array(sums, dtype=object) * times * problem.Hq
    else:
        for b in range(problem.B):
            for h in range(problem.Hq):
                total += np.array(_pairs(visibility, b, h, br, bc, dense))
    return Visits(*(int(n) for n in total))


def sequences(problem: Problem, visibility: Visibility | None = None) -> Counter[tuple[int, int, int]]:
    """How many sequences of the call have which query length, key length and offset.

    Parameters
    ----------
    problem : Problem
    visibility : Visibility, optional
        As :func:`visits` takes it.
    """
    if visibility is None:
        return Counter({(problem.Tq, problem.Tk, problem.Tk - problem.Tq): problem.B})
    per_sequence = (visibility.q_lengths, visibility.kv_lengths, visibility.q_offset)
    found = Counter(zip(*(array.tolist() for array in per_sequence), strict=True))
    each = problem.B // max(found.total(), 1)  # what one entry stands for
    return Counter({case: times * each for case, times in found.items()})


def _band(
    q_length: int, k_length: int, offset: int, br: int, bc: int, lower: int | None, upper: int | None
) -> tuple[int, ...]:
    """The sums of one head under ``lower <= j - (i + offset) <= upper``."""
    pairs = q_rows = k_rows = cells = 0
    whole, rest = divmod(q_length, br)
    for count, rows, i0 in ((whole, br, 0), (1, rest, whole * br)):
        first = None if lower is None else i0 + offset + lower  # first and last key that the first block sees
        last = None if upper is None else i0 + rows - 1 + offset + upper
        blocks, keys = _swept(count if rows else 0, br, first, last, k_length, bc)
        pairs, q_rows = pairs + blocks, q_rows + blocks * rows
        k_rows, cells = k_rows + keys, cells + keys * rows
    return pairs, q_rows, k_rows, cells, 0, q_length, k_length


def _swept(count: int, step: int, first: int | None, last: int | None, length: int, bc: int) -> tuple[int, int]:
    """Blocks of ``bc`` keys, and keys in them, that a range of keys needs while it moves on ``count`` times.

    The range is ``first + t step <= j <= last + t step`` at step t; None is unbounded. There are ``length`` keys.
    """
    if length == 0 or (first is not None and last is not None and first > last):
        return 0, 0

    def when(bound: int | None, key: int) -> int:
        """The first step at which a bound of the range is at ``key`` or beyond."""
        return 0 if bound is None else min(max(-((bound - key) // step), 0), count)

    def floors(bound: int | None, begin: int, end: int) -> int:
        """The number of a bound's block, summed over some steps."""
        return 0 if bound is None else _floors(end - begin, step, bound + begin * step, bc)

    ends = (length - 1) // bc  # the last block, which may be ragged
    begin = when(last, 0)
    end = count if first is None else max(when(first, length), begin)  # from then on the range is past the keys
    reach = min(when(last, ends * bc), end)  # from then on it reaches into the last block
    enter = end if first is None else max(when(first, 0), begin)  # from then on it leaves blocks behind
    inner = floors(last, begin, reach) + reach - begin
    behind = floors(first, enter, end)
    blocks = inner + (end - reach) * (ends + 1) - behind
    keys = inner * bc + (end - reach) * length - behind * bc
    return blocks, keys


def _floors(n: int, a: int, b: int, m: int) -> int:
    """The sum of ``(a t + b) // m`` for t = 0 .. n - 1, by the steps of Euclid's algorithm."""
    total = 0
    while n > 0:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        n, b = divmod(a * n + b, m)  # the points below the line, counted along the other axis
        a, m = m, a
    return total


def _pairs(visibility: Visibility, b: int, h: int, br: int, bc: int, dense: bool) -> tuple[int, ...]:
    """The sums of one head under any mask, block by block."""
    q_length, k_length = int(visibility.q_lengths[b]), int(visibility.kv_lengths[b])
    pairs = q_rows = k_rows = cells = masked = 0
    for i0 in range(0, q_length, br):
        i1 = min(i0 + br, q_length)
        for j0 in range(0, k_length, bc):
            j1 = min(j0 + bc, k_length)
            kind = visibility.tile(b, h, i0, i1, j0, j1)
            if kind != EMPTY or dense:
                pairs, q_rows, k_rows = pairs + 1, q_rows + i1 - i0, k_rows + j1 - j0
                cells += (i1 - i0) * (j1 - j0)
                masked += (i1 - i0) * (j1 - j0) if kind != FULL else 0
    return pairs, q_rows, k_rows, cells, masked, q_length, k_length


def traffic(
    problem: Problem,
    tiles: Tiles,
    direction: str,
    *,
    order: str | None = None,
    visibility: Visibility | None = None,
    dlse: bool = False,
    wrt: tuple[str, ...] = ("q", "k", "v"),
) -> Traffic:
    """What one call moves and computes.

    Parameters
    ----------
    problem : Problem
    tiles : Tiles
        As :func:`rawflash.tiling.plan_tiles` returned them.
    direction : {"forward", "backward", "jvp"}
    order : {"ij", "ji"}, optional
        Of the fa2 backward pass; that of ``tiles`` when left out.
    visibility : Visibility, optional
        That of the call; without it, lengths are full and a ``mask=`` is not looked at.
    dlse : bool
        A gradient comes in through lse.
    wrt : tuple of str
        Gradients asked for.

    Returns
    -------
    Traffic
        Equal to what numpy_tiled counts.

    Examples
    --------
    >>> from rawflash.tiling import Tiles
    >>> problem = Problem(Tq=1024, Tk=1024, d=64, dv=64)
    >>> t = traffic(problem, Tiles(128, 64), "forward")
    >>> t.load("K") == 1024 // 128 * 1024 * 64  # T_r |J| T_c d
    True
    """
    dense = problem.algorithm == "standard"
    visited = visits(problem, tiles.br, tiles.bc, visibility, dense=dense)
    call = _Call(problem, tiles, visited, dlse, "sinks" in wrt, *_part_rows(problem, tiles, visibility))
    bias, masked = _bias_elements(problem, visited), visited.masked
    dbias = bias if "bias" in wrt else 0
    in_passes = problem.deterministic and tiles.family != WGMMA  # whose blocks take turns at dQ, in one
    if (problem.algorithm, direction) == ("fa2", "backward") and in_passes:
        swapped = visits(problem, tiles.bc, tiles.br, visibility)
        bias, masked = bias + _bias_elements(problem, swapped), masked + swapped.masked
        _fa2_backward_deterministic(call, swapped)
    elif (problem.algorithm, direction) == ("fa2", "backward"):
        (_fa2_backward_ij if (order or tiles.order or JI) == IJ else _fa2_backward_ji)(call)
    else:
        _FORMS[problem.algorithm, direction](call)
    if (problem.algorithm, direction) == ("standard", "backward"):  # once for P, once for dS
        bias, masked = 2 * bias, 2 * masked
    call.loads["bias"] += bias
    call.loads["mask"] += masked
    if direction == "backward":
        call.stores["dbias"] += dbias
    return Traffic.of(call.loads, call.stores, call.flops)


def _part_rows(problem: Problem, tiles: Tiles, visibility: Visibility | None) -> tuple[int, int]:
    """Rows of O that parts of the keys store, where there is more than one; rows of Q of all but the first."""
    stored = again = 0
    if tiles.parts > 1:
        for (Tq, Tk, offset), times in sequences(problem, visibility).items():
            for n, (low, high) in enumerate(key_ranges(problem, tiles.br, tiles.bc, Tq, Tk, offset)):
                parts, rows = parts_of(tiles, low, high), min(tiles.br, Tq - n * tiles.br) * times * problem.Hq
                stored += parts * rows if parts > 1 else 0
                again += (parts - 1) * rows
    return stored, again


def _bias_elements(problem: Problem, v: Visits) -> int:
    """The blocks of the bias, length 1 where it broadcasts."""
    if problem.bias is None:
        return 0
    rows, keys = problem.bias[2] > 1, problem.bias[3] > 1
    return v.cells if rows and keys else v.q_rows if rows else v.k_rows if keys else v.pairs


@dataclass
class _Call:
    """One call while its counts are added up."""

    problem: Problem
    tiles: Tiles
    v: Visits
    dlse: bool
    sinks: bool
    parts: int = 0  # rows of O that parts of the keys store, if their keys are divided
    again: int = 0  # rows of Q that they load once more
    loads: Counter[str] = field(default_factory=Counter)
    stores: Counter[str] = field(default_factory=Counter)
    flops: int = 0

    def load(self, **counts: int) -> None:
        self.loads.update(counts)

    def store(self, **counts: int) -> None:
        self.stores.update(counts)

    @property
    def k(self) -> int:
        """Rows of K of all key/value heads."""
        return self.v.k // self.problem.group

    def round(self, **counts: int) -> None:
        """A result accumulated in slow memory in float32 is rounded to a narrower dtype at the end."""
        if self.problem.dtype != self.problem.compute_dtype:
            self.load(**counts)
            self.store(**counts)

    def gamma(self, rows: int) -> None:
        """gamma = rowsum(dO * O) - dlse of so many rows."""
        dv = self.problem.dv
        self.load(O=rows * dv, dO=rows * dv, dlse=rows if self.dlse else 0)
        self.flops += 2 * rows * dv

    def sink_gradient(self) -> None:
        self.load(lse=self.v.q if self.sinks else 0)

    def forward_flops(self) -> None:
        """2 T^2 d + 3 T^2 + 2 T^2 dv (Chu, Liu, Lin, "Memory Versus Computation")."""
        self.flops += self.v.cells * (2 * self.problem.d + 3 + 2 * self.problem.dv)

    def backward_flops(self) -> None:
        """Five products, two operations each for P = exp(S - lse) and for dS."""
        self.flops += self.v.cells * (6 * self.problem.d + 4 * self.problem.dv + 4)


def _standard_forward(c: _Call) -> None:
    """4 T^2 (equation 30): S stored, S loaded, P stored, P loaded."""
    v, d, dv = c.v, c.problem.d, c.problem.dv
    c.load(Q=v.q * d, K=v.k_rows * d)
    c.store(S=v.cells)
    c.load(S=v.cells)
    c.store(P=v.cells, lse=v.q)
    c.load(P=v.cells, V=v.k_rows * dv)
    c.store(O=v.q * dv)
    c.forward_flops()


def _standard_backward(c: _Call) -> None:
    """7 T^2: load P; store dP; load P, dP, store dS; load dS twice. And P, stored first."""
    v, d, dv = c.v, c.problem.d, c.problem.dv
    slope = v.cells if c.problem.softcap is not None else 0
    c.load(Q=v.q * d, K=v.k_rows * d, lse=v.q)
    c.store(P=v.cells, slope=slope)
    c.load(P=v.cells, dO=v.q_rows * dv)
    c.store(dV=v.k * dv)
    c.load(dO=v.q * dv, V=v.k_rows * dv)
    c.store(dP=v.cells)
    c.gamma(v.q)
    c.sink_gradient()
    c.load(P=v.cells, dP=v.cells, slope=slope)
    c.store(dS=v.cells)
    c.load(dS=v.cells, K=v.k_rows * d)
    c.store(dQ=v.q * d)
    c.load(dS=v.cells, Q=v.q_rows * d)
    c.store(dK=v.k * d)
    c.round(dK=c.k * d, dV=c.k * dv)
    c.backward_flops()


def _rowwise_forward(c: _Call) -> None:
    """O(T d) with K and V on chip (algorithm 1), else T_r T d with T_r = T^2 / M (equation 39)."""
    v, d, dv = c.v, c.problem.d, c.problem.dv
    keys = c.k if c.tiles.order == RESIDENT else v.k_rows
    c.load(Q=v.q * d, K=keys * d, V=keys * dv)
    c.store(O=v.q * dv, lse=v.q)
    c.forward_flops()


def _rowwise_backward(c: _Call) -> None:
    """O(T d) with K, V, dK, dV on chip (algorithm 5), else T_r T d with T_r = 2 T^2 / M (equation 70)."""
    v, d, dv = c.v, c.problem.d, c.problem.dv
    c.gamma(v.q)
    c.sink_gradient()
    c.load(Q=v.q * d, lse=v.q)
    c.store(dQ=v.q * d)
    if c.tiles.order == RESIDENT:
        c.load(K=c.k * d, V=c.k * dv)
        c.store(dK=c.k * d, dV=c.k * dv)
    else:
        c.load(K=2 * v.k_rows * d, V=v.k_rows * dv)
        c.store(dK=v.k_rows * d, dV=v.k_rows * dv)
        c.round(dK=c.k * d, dV=c.k * dv)
    c.backward_flops()


def _fa1_forward(c: _Call) -> None:
    """O(T^2 d^2 / M): an inner step loads Q and O and stores O (algorithm 4)."""
    v, d, dv = c.v, c.problem.d, c.problem.dv
    c.load(K=c.k * d, V=c.k * dv)
    c.load(Q=v.q_rows * d, O=v.q_rows * dv, m=v.q_rows, l=v.q_rows)
    c.store(O=v.q_rows * dv, m=v.q_rows, l=v.q_rows)
    c.load(m=v.q, l=v.q)
    c.store(lse=v.q)
    c.round(O=v.q * dv)
    c.forward_flops()


def _fa2_forward(c: _Call) -> None:
    """O(T^2 d^2 / M): an inner step loads K and V (algorithm 3, equation 50). O of parts of the keys is merged.

    Kernels for few rows load them once for the query heads that share them (where these see the same blocks).
    """
    v, d, dv = c.v, c.problem.d, c.problem.dv
    k_rows = v.k_rows // c.problem.group if c.tiles.family in (FEW, FEW_MMA) else v.k_rows
    if c.tiles.family == FEW_MMA:  # more rows than a tile has take another block of threads, which reads them again
        k_rows *= -(-c.problem.group * c.problem.Tq // c.tiles.br)
    c.load(Q=(v.q + c.again) * d, K=k_rows * d, V=k_rows * dv, O=c.parts * dv, m=c.parts, l=c.parts)
    c.store(O=(v.q + c.parts) * dv, m=c.parts, l=c.parts, lse=v.q)
    c.forward_flops()


def _fa2_jvp(c: _Call) -> None:
    """That of the forward pass, and as much for the tangents."""
    v, d, dv = c.v, c.problem.d, c.problem.dv
    c.load(Q=v.q * d, K=v.k_rows * d, V=v.k_rows * dv, tQ=v.q * d, tK=v.k_rows * d, tV=v.k_rows * dv)
    c.store(O=v.q * dv, lse=v.q, tO=v.q * dv, tlse=v.q)
    c.forward_flops()
    c.flops += v.cells * (4 * d + 4 * dv + 4)  # tQ K^T + Q tK^T; P tV + (P * tS) V; rowsum(P * tS)


def _fa1_backward(c: _Call) -> None:
    """O(T^2 d^2 / M): an inner step loads Q, O, dO, dQ and stores dQ (algorithm 7)."""
    v, d, dv = c.v, c.problem.d, c.problem.dv
    c.load(K=c.k * d, V=c.k * dv)
    c.gamma(v.q_rows)
    c.load(Q=v.q_rows * d, lse=v.q_rows, dQ=v.q_rows * d)
    c.store(dQ=v.q_rows * d, dK=c.k * d, dV=c.k * dv)
    c.round(dQ=v.q * d)
    if c.sinks:
        c.gamma(v.q)
        c.sink_gradient()
    c.backward_flops()


def _fa2_backward_ji(c: _Call, *, with_dQ: bool = True) -> None:
    """3 T_c |I| d (algorithm 8): an inner step loads Q and dO and adds dQ."""
    v, d, dv = c.v, c.problem.d, c.problem.dv
    c.gamma(v.q)
    c.sink_gradient()
    c.store(gamma=v.q)
    c.load(K=c.k * d, V=c.k * dv)
    c.load(Q=v.q_rows * d, dO=v.q_rows * dv, lse=v.q_rows, gamma=v.q_rows)
    c.store(dK=c.k * d, dV=c.k * dv)
    if with_dQ:
        c.store(dQ=v.q_rows * d)
        c.round(dQ=v.q * d)
    c.backward_flops()


def _fa2_backward_ij(c: _Call, *, with_dK_dV: bool = True) -> None:
    """4 T_r |J| d (algorithm 6): an inner step loads K and V and adds dK and dV."""
    v, d, dv = c.v, c.problem.d, c.problem.dv
    c.gamma(v.q)
    c.load(Q=v.q * d, lse=v.q, K=v.k_rows * d, V=v.k_rows * dv)
    c.store(dQ=v.q * d)
    if with_dK_dV:
        c.sink_gradient()
        c.store(dK=v.k_rows * d, dV=v.k_rows * dv)
        c.round(dK=c.k * d, dV=c.k * dv)
    c.backward_flops()


def _fa2_backward_deterministic(c: _Call, swapped: Visits) -> None:
    """2 T_c |I| d for dK and dV, then 2 T_r |J| d for dQ; P and dP are computed twice."""
    _fa2_backward_ji(c, with_dQ=False)
    first, c.v = c.v, swapped
    _fa2_backward_ij(c, with_dK_dV=False)
    c.v = first
    # dQ is not computed in the first pass, dK and dV not in the second
    d, dv = c.problem.d, c.problem.dv
    c.flops -= first.cells * 2 * d + swapped.cells * (2 * d + 2 * dv)


_FORMS = {
    ("standard", "forward"): _standard_forward,
    ("standard", "backward"): _standard_backward,
    ("rowwise", "forward"): _rowwise_forward,
    ("rowwise", "backward"): _rowwise_backward,
    ("fa1", "forward"): _fa1_forward,
    ("fa1", "backward"): _fa1_backward,
    ("fa2", "forward"): _fa2_forward,
    ("fa2", "jvp"): _fa2_jvp,
}
