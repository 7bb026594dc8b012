"""What a call would do, without doing it: kernel, tiles, bytes, traffic, and why not another backend.

:func:`plan` works from a :class:`~rawflash.problem.Problem` alone, so it plans for any chip of the
table in :mod:`rawflash.hardware`, present or not. :func:`explain` is the same for a call with arrays.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np

from rawflash import tiling
from rawflash.backends import BACKENDS, why_not
from rawflash.errors import BackendError, ProblemError, TileError
from rawflash.hardware import Chip, chip_of
from rawflash.masks import Visibility
from rawflash.problem import DIRECTIONS, Options, Problem, check, check_forward_only, forward_mode, known
from rawflash.tiles import Tiles
from rawflash.traffic import Traffic, sequences, traffic

WIDTH = 80
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Plan:
    """What one call would run; ``str()`` of it is a page to read.

    Attributes
    ----------
    problem : Problem
        The call, without its arrays.
    direction : {"forward", "backward", "jvp"}
    chip : Chip
        What was planned for.
    tiles : Tiles
        Block sizes, and the resident tiles with their bytes.
    traffic : Traffic
        Predicted: elements loaded and stored, floating-point operations.
    dense_bytes : int
        Bytes of one T x T matrix for all heads in the compute dtype, which a dense formula stores.
    copied : tuple of str
        Arguments that the call would copy, because a kernel could not read them where they are; "out" if
        it cannot be written where it is.
    unavailable : str or None
        Why this backend cannot run the call here; None when it can.
    refused : tuple of (str, str)
        Every other backend, and why it does not take this call.

    Examples
    --------
    >>> from rawflash.hardware import chip
    >>> p = plan(Problem(Tq=4096, Tk=4096, d=64, dv=64, backend="cupy_raw"), "forward", chip("sm_90"))
    >>> p.kernel, p.tiles.br, p.tiles.bc, p.dense_bytes
    ('cupy_raw.fa2_forward', 224, 64, 67108864)
    """

    problem: Problem
    direction: str
    chip: Chip
    tiles: Tiles
    traffic: Traffic
    dense_bytes: int
    copied: tuple[str, ...] = ()
    unavailable: str | None = None
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def kernel(self) -> str:
        """Backend and function, as ``backend.algorithm_direction``."""
        return f"{self.problem.backend}.{self.problem.algorithm}_{self.direction}"

    def __str__(self) -> str:
        moved = self.traffic
        dense = "standard attention stores" if self.problem.algorithm == "standard" else "never stored"
        total = f"{moved.loaded:,} elements loaded, {moved.stored:,} stored"
        total += f", {moved.row_elements:,} of row statistics"
        work = f"{moved.flops:,} floating-point operations"
        work += f", {moved.flops / max(moved.elements, 1):.1f} an element moved"
        lines = [
            f"kernel   {self.kernel}",
            *_hang("         ", f"not here: {self.unavailable}" if self.unavailable else "runs here"),
            *_hang("problem  ", _problem_text(self.problem)),
            f"dense    T x T is {size_text(self.dense_bytes)}, {dense}",
            *_hang("copied   ", self._copied_text()),
            "",
            f"tiles for {self.chip.name}, M = {size_text(self.tiles.on_chip_bytes or 0)}",
            str(self.tiles),
            "",
            "traffic between slow memory and the chip, predicted, in elements",
            *(line for line in str(moved).splitlines() if "floating-point" not in line),
            *_hang("", total),
            *_hang("", work),
            "",
            "other backends",
        ]
        for name, reason in self.refused:
            lines += _hang(f"  {name:<11}  ", reason)
        return "\n".join(lines)

    def _copied_text(self) -> str:
        if not self.copied:
            return "no argument"
        return (
            ", ".join(self.copied)
            + ": a paged cache is gathered, the last axis is not contiguous, the axes cannot be viewed as asked, "
            "elements are misaligned, or out shares memory with what is read"
        )


def explain(
    q: Any,
    k: Any,
    v: Any,
    direction: str = "forward",
    *,
    wrt: tuple[str, ...] | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    block_table: Any = None,
    **options: Unpack[Options],
) -> Plan:
    """What a call with these arrays would run. Nothing is compiled, run or written.

    Parameters
    ----------
    q, k, v : array
        As in :func:`rawflash.attention`.
    direction : {"forward", "backward", "jvp"}
        :func:`rawflash.attention`, :func:`rawflash.attention_backward` or :func:`rawflash.attention_jvp`.
    wrt : sequence of str, optional
        The gradients that the backward call would be asked for.
    cu_seqlens_q, cu_seqlens_k : int array (B + 1,), optional
        Both, for the varlen functions.
    block_table : int array (B, max_blocks), optional
        For :func:`rawflash.attention_decode` with a paged cache.
    **options
        See :class:`rawflash.Options`.

    Returns
    -------
    Plan
        Printable: kernel, tiles, bytes, traffic, copies, and why other backends were refused.

    Raises
    ------
    ProblemError
        The call would be refused.
    BackendError
        The backend asked for cannot take these arrays.
    TileError
        No legal tile fits the on-chip memory.

    Examples
    --------
    >>> import numpy as np, rawflash as rf
    >>> q = k = v = np.zeros((2, 256, 32), np.float32)
    >>> p = rf.explain(q, k, v, causal=True, backend="numpy_tiled", sram=32768)
    >>> p.kernel, p.tiles.br, p.tiles.bc
    ('numpy_tiled.fa2_forward', 64, 32)
    """
    _check_direction(direction)
    if direction == "backward":
        check_forward_only(options)
    if direction == "jvp":
        options = forward_mode(q, options)  # type: ignore[assignment, arg-type]
    if direction != "forward" and block_table is not None:
        raise ProblemError(f"block_table is not accepted with direction={direction!r}; expected None")
    if direction == "jvp" and (cu_seqlens_q is not None or cu_seqlens_k is not None):
        raise ProblemError("cu_seqlens_q and cu_seqlens_k are not accepted with direction='jvp'; expected None")
    problem, x = check(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, decode=block_table is not None,
        block_table=block_table, wrt=wrt, **known(options)
    )  # fmt: skip
    reason = why_not(problem.backend, problem, direction) if direction == "jvp" else None
    if reason is not None:
        raise BackendError(f"backend {problem.backend!r} {reason}")
    visibility = x.visibility
    if "mask" in x.addresses:  # its values are on the device: planned as if every key were visible
        visibility = replace(visibility, mask=None)
    copied = (*x.copied, *(("out",) if x.out is not None and x.target is None else ()))
    return plan(problem, direction, device=x.device, visibility=visibility, wrt=x.wrt, copied=copied)


def plan(
    problem: Problem,
    direction: str = "forward",
    chip: Chip | None = None,
    *,
    device: int | None = None,
    visibility: Visibility | None = None,
    wrt: tuple[str, ...] = ("q", "k", "v"),
    copied: tuple[str, ...] = (),
) -> Plan:
    """A :class:`Plan` from a problem, without arrays.

    Parameters
    ----------
    problem : Problem
    direction : {"forward", "backward", "jvp"}
    chip : Chip, optional
        Any row of the table; None asks the backend's own device.
    device : int, optional
        Which GPU is asked; None: the current one.
    visibility : Visibility, optional
        Lengths, offsets and mask of the call; without it lengths are full and a mask is not looked at.
        Without a mask its arrays may have one entry, which then stands for every sequence.
    wrt : tuple of str
        Gradients asked for.
    copied : tuple of str
        Arguments that the call copies.

    Raises
    ------
    BackendError
        ``chip`` is None and the backend has no device here.
    TileError
        No legal tile fits the on-chip memory.
    """
    _check_direction(direction)
    if chip is None:
        chip = chip_of(problem.backend, device)
    tiles = tiling.plan_tiles(problem, chip, direction)
    pairs = sum(rows * keys * times for (rows, keys, _), times in sequences(problem, visibility).items())
    moved = traffic(problem, tiles, direction, visibility=visibility, wrt=wrt)
    return Plan(
        problem=problem,
        direction=direction,
        chip=chip,
        tiles=tiles,
        traffic=moved,
        dense_bytes=pairs * problem.Hq * np.dtype(problem.compute_dtype).itemsize,
        copied=copied,
        unavailable=why_not(problem.backend, problem, direction),
        refused=tuple(
            (name, _refusal(name, problem, direction, device)) for name in BACKENDS if name != problem.backend
        ),
    )


def size_text(n: float) -> str:
    """Bytes with a unit: ``size_text(3 << 20)`` is "3.0 MiB"."""
    unit = 0
    while n >= 1024 and unit < len(_UNITS) - 1:
        n, unit = n / 1024, unit + 1
    return f"{n:.0f} bytes" if unit == 0 else f"{n:.1f} {_UNITS[unit]}"


def _check_direction(direction: str) -> None:
    if direction not in (*DIRECTIONS, "jvp"):
        raise ProblemError(f"direction is {direction!r}; expected 'forward', 'backward' or 'jvp'")


def _refusal(name: str, problem: Problem, direction: str, device: int | None) -> str:
    """Why a backend other than the problem's does not take the call."""
    chosen, row = BACKENDS[problem.backend], BACKENDS[name]
    reason = why_not(name, problem, direction)
    if reason is not None:
        return reason
    if row.runs_on != chosen.runs_on:
        return f"takes {row.runs_on}; this call has {chosen.runs_on}"
    try:
        tiling.plan_tiles(replace(problem, backend=name), chip_of(name, device), direction)
    except (TileError, BackendError) as error:
        return f"has no tiles for this call: {error}"
    return f"could run this call; ask for it by backend={name!r}"


def _problem_text(problem: Problem) -> str:
    """Shapes, dtype and the options that are not the default, in words."""
    p = problem
    sizes = (
        f"B = {p.B}, Hq = {p.Hq}, Hkv = {p.Hkv}, Tq = {p.Tq}, Tk = {p.Tk}, d = {p.d}, dv = {p.dv}, {p.dtype}"
    )
    words = [sizes, f"scale = {p.scale:.6g}"]
    words += ["causal"] * p.causal
    words += [f"window = {p.window}"] * (p.window is not None)
    words += [f"mask = {p.mask}"] * (p.mask is not None)
    words += ["lengths per sequence"] * p.ragged
    words += ["cu_seqlens (Tq, Tk: the longest)"] * p.varlen
    words += [f"bias {p.bias}"] * (p.bias is not None)
    words += ["ALiBi"] * p.alibi
    words += [f"softcap = {p.softcap:g}" if p.softcap is not None else ""] * (p.softcap is not None)
    words += ["sinks"] * p.sinks
    words += [f"dropout = {p.dropout:g}, seed = {p.seed}"] * (p.dropout > 0)
    words += [f"layout = {p.layout}"] * (p.layout != "bhtd")
    words += ["deterministic"] * p.deterministic
    words += [f"sram = {p.sram} bytes"] * (p.sram is not None)
    return ", ".join(words)


def _hang(first: str, text: str) -> list[str]:
    """Text wrapped at WIDTH, its later lines indented as far as the first."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_long_words=False
    ) or [first.rstrip()]
