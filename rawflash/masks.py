"""Which query sees which key: the one place that owns visibility.

A :class:`Mask` is a predicate over ``(b, h, i, j)``: batch, query head, query row and key.
Masks compose with ``&`` and ``|``. Each knows four things, and ``tests/test_masks.py`` and
``tests/test_masks_cuda.py`` prove on grids that they agree:

* ``visible``: the predicate itself, on broadcast integer arrays;
* ``tile``: whether a rectangle of rows and keys is :data:`EMPTY`, :data:`PARTIAL` or
  :data:`FULL`, so that kernels skip the first and run no mask code on the last;
* ``program``: the same predicate as a short postfix program of integers, which compiled
  backends evaluate (their twins are tested against ``visible``);
* ``cuda_visible``, ``cuda_tile``: the first two as CUDA C++, which :func:`cuda_text` puts
  together. Structure is text, data is an array of 64-bit words (``words``), so that one
  compiled kernel serves every mask of one structure.

:class:`Visibility` binds the masks of one call to its lengths and offsets and turns them
into the spans of blocks that a kernel loops over.

``tile`` may call a rectangle PARTIAL when it is in truth empty or full (a composition of
masks), never the other way round; for one band inside the lengths it is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rawflash.errors import BackendError, ProblemError

EMPTY, PARTIAL, FULL = 0, 1, 2

# Operation codes of a mask program, see Mask.program.
OP_BAND, OP_PREFIX, OP_LENGTHS, OP_SEGMENTS, OP_DENSE, OP_AND, OP_OR = range(7)
UNBOUNDED = 2**62  # stands for "no bound" in the integers of a band


class Mask:
    """A visibility predicate; the base class of every mask.

    A new mask is one class here with ``visible``, ``tile``, ``program``, its CUDA text and
    ``check``, or a composition of the masks below.
    """

    def visible(
        self, b: npt.ArrayLike, h: npt.ArrayLike, i: npt.ArrayLike, j: npt.ArrayLike, q_offset: npt.ArrayLike
    ) -> np.ndarray:
        """Boolean array: does query row ``i`` of head ``h`` in batch ``b`` see key ``j``?

        Parameters
        ----------
        b, h, i, j, q_offset : array_like of int
            Broadcast against each other. ``q_offset`` is the position of query row 0 on the
            key axis for that batch entry.
        """
        raise NotImplementedError

    def tile(self, b: int, h: int, i0: int, i1: int, j0: int, j1: int, q_offset: int) -> int:
        """Class of the non-empty rectangle ``i0 <= i < i1``, ``j0 <= j < j1``.

        PARTIAL is never wrong, only slower than a class that says more.
        """
        return PARTIAL

    def program(self) -> list[Instruction]:
        """The predicate in postfix order: operands push a boolean, AND and OR take two.

        Compiled backends need it; a mask without one runs on numpy_tiled and the oracle.
        """
        raise BackendError(f"mask {self.kind} has no program(), which compiled backends run; use backend='numpy_tiled'")

    def words(self) -> list[int | np.ndarray]:
        """The mask's data, one 64-bit word each: the operands and arrays of ``program`` in order.

        An array stands for the address of its first element. An operand may be a stride of
        that array: memory that is moved keeps its strides.
        """
        words: list[int | np.ndarray] = []
        for step in self.program():
            words += step.operands
            words += step.arrays
        return words

    def cuda_visible(self, w: int) -> str:
        """``visible`` as a C++ expression of type bool.

        Parameters
        ----------
        w : int
            Where this mask's ``words`` begin in the array ``w`` of the expression.

        Returns
        -------
        str
            In the variables ``const long long* w`` and ``long long b, h, i, j, offset``, and
            the functions of ``visibility.cuh``.
        """
        raise self._no_cuda_text()

    def cuda_tile(self, w: int) -> str:
        """``tile`` as a C++ expression of type int; see ``cuda_visible``.

        In the variables ``const long long* w`` and ``long long b, h, i0, i1, j0, j1, offset``.
        All threads of a block evaluate it together, with the same arguments: it may hold
        barriers, and gives all of them the same class.
        """
        raise self._no_cuda_text()

    def _no_cuda_text(self) -> BackendError:
        return BackendError(
            f"mask {self.kind} has no CUDA text, which kernels in CUDA C++ compile; use backend='numpy_tiled'"
        )

    def check(self, shape: tuple[int, int, int, int]) -> None:
        """Raise :class:`ProblemError` unless the mask fits ``(B, Hq, Tq, Tk)``."""

    @property
    def kind(self) -> str:
        """The structure of the mask without its data, for cache keys and printing."""
        return type(self).__name__

    def __and__(self, other: Mask) -> Mask:
        return And(self, _as_mask(other))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, _as_mask(other))


@dataclass(frozen=True)
class Instruction:
    """One step of a mask program.

    ``arrays`` are what the step reads; a backend appends their addresses to ``operands``.
    """

    code: int
    operands: tuple[int, ...] = ()
    arrays: tuple[np.ndarray, ...] = field(default=(), compare=False)


def _as_mask(other: object) -> Mask:
    if not isinstance(other, Mask):
        raise ProblemError(f"masks combine with masks, not with {type(other).__name__}; wrap it in Dense(...)")
    return other


@dataclass(frozen=True)
class Band(Mask):
    """Keys at a bounded distance: ``lower <= j - (i + q_offset) <= upper``; None = unbounded."""

    lower: int | None
    upper: int | None

    def __post_init__(self) -> None:
        for name in ("lower", "upper"):
            bound = getattr(self, name)
            if bound is None:
                continue
            if isinstance(bound, bool) or not isinstance(bound, (int, np.integer)):
                raise ProblemError(f"mask Band has {name} = {bound!r}; expected an int or None")
            # Farther than any position is the same as unbounded, and stays within 64 bits.
            object.__setattr__(self, name, max(-UNBOUNDED, min(int(bound), UNBOUNDED)))

    def bounds(self) -> tuple[int, int]:
        """Both bounds as integers."""
        return (
            -UNBOUNDED if self.lower is None else self.lower,
            UNBOUNDED if self.upper is None else self.upper,
        )

    def visible(
        self, b: npt.ArrayLike, h: npt.ArrayLike, i: npt.ArrayLike, j: npt.ArrayLike, q_offset: npt.ArrayLike
    ) -> np.ndarray:
        lower, upper = self.bounds()
        distance = np.asarray(j) - (np.asarray(i) + np.asarray(q_offset))
        b, h, distance = np.broadcast_arrays(b, h, distance)
        return (lower <= distance) & (distance <= upper)

    def tile(self, b: int, h: int, i0: int, i1: int, j0: int, j1: int, q_offset: int) -> int:
        lower, upper = self.bounds()
        nearest = j0 - (i1 - 1 + q_offset)  # smallest and largest distance inside the rectangle
        farthest = j1 - 1 - (i0 + q_offset)
        if farthest < lower or nearest > upper:
            return EMPTY
        return FULL if lower <= nearest and farthest <= upper else PARTIAL

    def program(self) -> list[Instruction]:
        return [Instruction(OP_BAND, self.bounds())]

    def cuda_visible(self, w: int) -> str:
        return f"band_visible(w[{w}], w[{w + 1}], i, j, offset)"

    def cuda_tile(self, w: int) -> str:
        return f"band_tile(w[{w}], w[{w + 1}], i0, i1, j0, j1, offset)"

    def __and__(self, other: Mask) -> Mask:
        if isinstance(other, Band):  # two bands are one band: tile classes stay exact
            lower, upper = self.bounds()
            other_lower, other_upper = other.bounds()
            lower, upper = max(lower, other_lower), min(upper, other_upper)
            return Band(None if lower == -UNBOUNDED else lower, None if upper == UNBOUNDED else upper)
        return super().__and__(other)


class Causal(Band):
    """Key ``j`` is visible to query ``i`` iff ``j <= i + q_offset``.

    Examples
    --------
    >>> import numpy as np
    >>> i, j = np.ogrid[:3, :4]
    >>> Causal().visible(0, 0, i, j, 1).astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 1, 1, 1]])
    """

    def __init__(self) -> None:
        super().__init__(None, 0)


class SlidingWindow(Band):
    """``i + q_offset - left <= j <= i + q_offset + right``; None leaves a side open."""

    def __init__(self, left: int | None, right: int | None) -> None:
        for name, side in (("left", left), ("right", right)):
            if side is not None and (isinstance(side, bool) or not isinstance(side, (int, np.integer)) or side < 0):
                raise ProblemError(f"window {name} is {side!r}; expected an int >= 0 or None")
        super().__init__(None if left is None else -int(left), None if right is None else int(right))


def _integers(name: str, value: npt.ArrayLike) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:
        raise ProblemError(f"{name} is ragged; expected a rectangular array of integers") from None
    if array.dtype.kind not in "iu":
        raise ProblemError(f"{name} has dtype {array.dtype}; expected integers")
    if array.dtype.kind == "u" and array.max(initial=0) > np.iinfo(np.int64).max:
        raise ProblemError(f"{name} is {array.tolist()}; expected integers below 2**63")
    return np.ascontiguousarray(array, dtype=np.int64)


def _check_rows(name: str, array: np.ndarray, batch: int, length: int) -> None:
    if array.shape not in ((length,), (1, length), (batch, length)):
        raise ProblemError(f"{name} has shape {array.shape}; expected ({length},) or ({batch}, {length})")


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Every query sees the first ``length`` keys: an int, or one int per batch entry."""

    length: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", np.atleast_1d(_integers("prefix", self.length)))

    def check(self, shape: tuple[int, int, int, int]) -> None:
        if self.length.shape not in ((1,), (shape[0],)):
            raise ProblemError(f"mask Prefix has length of shape {self.length.shape}; expected () or ({shape[0]},)")

    def _of(self, b: npt.ArrayLike) -> np.ndarray:
        return self.length[np.asarray(b) % len(self.length)]

    def visible(
        self, b: npt.ArrayLike, h: npt.ArrayLike, i: npt.ArrayLike, j: npt.ArrayLike, q_offset: npt.ArrayLike
    ) -> np.ndarray:
        b, h, i, j, _ = np.broadcast_arrays(b, h, i, j, q_offset)
        return j < self._of(b)

    def tile(self, b: int, h: int, i0: int, i1: int, j0: int, j1: int, q_offset: int) -> int:
        length = self._of(b)
        return FULL if j1 <= length else PARTIAL if j0 < length else EMPTY

    def program(self) -> list[Instruction]:
        return [Instruction(OP_PREFIX, (len(self.length),), (self.length,))]

    def cuda_visible(self, w: int) -> str:
        return f"(j < per_batch(w[{w + 1}], w[{w}], b))"

    def cuda_tile(self, w: int) -> str:
        return f"below(j0, j1, per_batch(w[{w + 1}], w[{w}], b))"


class PrefixLM(Mask):
    """Causal, except that every query sees the first ``prefix`` keys (int, or int array (B,))."""

    def __new__(cls, prefix: npt.ArrayLike) -> Or:  # type: ignore[misc]
        return Or(Prefix(prefix), Causal())  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Lengths(Mask):
    """Rows before ``q_lengths`` see keys before ``kv_lengths`` (ints, or int arrays (B,))."""

    q_lengths: np.ndarray
    kv_lengths: np.ndarray

    def __post_init__(self) -> None:
        for name in ("q_lengths", "kv_lengths"):
            object.__setattr__(self, name, np.atleast_1d(_integers(f"mask Lengths {name}", getattr(self, name))))

    def check(self, shape: tuple[int, int, int, int]) -> None:
        for name in ("q_lengths", "kv_lengths"):
            if getattr(self, name).shape not in ((1,), (shape[0],)):
                raise ProblemError(
                    f"mask Lengths has {name} of shape {getattr(self, name).shape}; expected () or ({shape[0]},)"
                )

    def _of(self, b: npt.ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        b = np.asarray(b)
        return self.q_lengths[b % len(self.q_lengths)], self.kv_lengths[b % len(self.kv_lengths)]

    def visible(
        self, b: npt.ArrayLike, h: npt.ArrayLike, i: npt.ArrayLike, j: npt.ArrayLike, q_offset: npt.ArrayLike
    ) -> np.ndarray:
        b, h, i, j, _ = np.broadcast_arrays(b, h, i, j, q_offset)
        q_length, kv_length = self._of(b)
        return (i < q_length) & (j < kv_length)

    def tile(self, b: int, h: int, i0: int, i1: int, j0: int, j1: int, q_offset: int) -> int:
        q_length, kv_length = self._of(b)
        if i0 >= q_length or j0 >= kv_length:
            return EMPTY
        return FULL if i1 <= q_length and j1 <= kv_length else PARTIAL

    def program(self) -> list[Instruction]:
        counts = (len(self.q_lengths), len(self.kv_lengths))
        return [Instruction(OP_LENGTHS, counts, (self.q_lengths, self.kv_lengths))]

    def cuda_visible(self, w: int) -> str:
        return f"((i < per_batch(w[{w + 2}], w[{w}], b)) & (j < per_batch(w[{w + 3}], w[{w + 1}], b)))"

    def cuda_tile(self, w: int) -> str:
        rows = f"below(i0, i1, per_batch(w[{w + 2}], w[{w}], b))"
        keys = f"below(j0, j1, per_batch(w[{w + 3}], w[{w + 1}], b))"
        return f"tile_and({rows}, [&] {{ return {keys}; }})"


@dataclass(frozen=True, eq=False)
class Segments(Mask):
    """Block-diagonal attention: a query sees the keys whose segment id equals its own.

    Parameters
    ----------
    q_ids : array_like of int, shape (Tq,) or (B, Tq)
    kv_ids : array_like of int, shape (Tk,) or (B, Tk), optional
        ``q_ids`` when left out. Ids need not be sorted.
    """

    q_ids: np.ndarray
    kv_ids: Any = None

    def __post_init__(self) -> None:
        if self.kv_ids is None:
            object.__setattr__(self, "kv_ids", self.q_ids)
        for name in ("q_ids", "kv_ids"):
            array = _integers(f"mask Segments {name}", getattr(self, name))
            if array.ndim not in (1, 2):
                raise ProblemError(f"mask Segments has {name} of shape {array.shape}; expected (T,) or (B, T)")
            object.__setattr__(self, name, np.atleast_2d(array))

    def check(self, shape: tuple[int, int, int, int]) -> None:
        _check_rows("mask Segments q_ids", self.q_ids, shape[0], shape[2])
        _check_rows("mask Segments kv_ids", self.kv_ids, shape[0], shape[3])

    def visible(
        self, b: npt.ArrayLike, h: npt.ArrayLike, i: npt.ArrayLike, j: npt.ArrayLike, q_offset: npt.ArrayLike
    ) -> np.ndarray:
        b, h, i, j, _ = np.broadcast_arrays(b, h, i, j, q_offset)
        return self.q_ids[b % len(self.q_ids), i] == self.kv_ids[b % len(self.kv_ids), j]

    def tile(self, b: int, h: int, i0: int, i1: int, j0: int, j1: int, q_offset: int) -> int:
        rows = self.q_ids[b % len(self.q_ids), i0:i1]
        keys = self.kv_ids[b % len(self.kv_ids), j0:j1]
        if rows.min() > keys.max() or keys.min() > rows.max():
            return EMPTY
        return FULL if rows.min() == rows.max() == keys.min() == keys.max() else PARTIAL

    def program(self) -> list[Instruction]:
        strides = tuple(ids.shape[1] if len(ids) > 1 else 0 for ids in (self.q_ids, self.kv_ids))
        return [Instruction(OP_SEGMENTS, strides, (self.q_ids, self.kv_ids))]

    def cuda_visible(self, w: int) -> str:
        return f"(int_at(w[{w + 2}], b * w[{w}] + i) == int_at(w[{w + 3}], b * w[{w + 1}] + j))"

    def cuda_tile(self, w: int) -> str:
        rows = f"range_of(w[{w + 2}], b * w[{w}] + i0, i1 - i0)"
        keys = f"range_of(w[{w + 3}], b * w[{w + 1}] + j0, j1 - j0)"
        return f"equal_ids({rows}, {keys})"


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A boolean array broadcastable to ``(B, Hq, Tq, Tk)``; True = attend.

    ``array`` is kept with four axes, ``shape`` is that of what was passed.
    """

    array: np.ndarray
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.array, np.ma.MaskedArray):
            raise ProblemError("mask is a masked array; expected a plain one, True = attend")
        try:
            array = np.asarray(self.array)
        except ValueError:
            raise ProblemError("mask is ragged; expected a rectangular boolean array") from None
        if array.dtype != np.bool_:
            raise ProblemError(f"mask has dtype {array.dtype}; expected bool, True = attend (use bias= for scores)")
        if array.ndim > 4:
            raise ProblemError(f"mask has shape {array.shape}; expected at most four axes (B, Hq, Tq, Tk)")
        object.__setattr__(self, "shape", array.shape)
        object.__setattr__(self, "array", array.reshape((1,) * (4 - array.ndim) + array.shape))

    def check(self, shape: tuple[int, int, int, int]) -> None:
        if any(have not in (1, want) for have, want in zip(self.array.shape, shape, strict=True)):
            raise ProblemError(
                f"mask has shape {self.shape}; expected broadcastable to (B, Hq, Tq, Tk) = {shape}"
            )

    def visible(
        self, b: npt.ArrayLike, h: npt.ArrayLike, i: npt.ArrayLike, j: npt.ArrayLike, q_offset: npt.ArrayLike
    ) -> np.ndarray:
        b, h, i, j, _ = np.broadcast_arrays(b, h, i, j, q_offset)
        array = self.array
        size_b, size_h, size_i, size_j = array.shape
        # A broadcast axis has length 1, and index % 1 is 0.
        return array[b % max(size_b, 1), h % max(size_h, 1), i % max(size_i, 1), j % max(size_j, 1)]

    def tile(self, b: int, h: int, i0: int, i1: int, j0: int, j1: int, q_offset: int) -> int:
        array = self.array
        size_b, size_h, size_i, size_j = array.shape
        rows = slice(i0, i1) if size_i > 1 else slice(0, 1)
        keys = slice(j0, j1) if size_j > 1 else slice(0, 1)
        block = array[b % size_b, h % size_h, rows, keys]
        return FULL if block.all() else PARTIAL if block.any() else EMPTY

    def program(self) -> list[Instruction]:
        strides = tuple(
            stride if size > 1 else 0 for stride, size in zip(self.array.strides, self.array.shape, strict=True)
        )
        return [Instruction(OP_DENSE, strides, (self.array,))]

    def cuda_visible(self, w: int) -> str:
        return f"byte_at(w[{w + 4}], b * w[{w}] + h * w[{w + 1}] + i * w[{w + 2}] + j * w[{w + 3}])"

    def cuda_tile(self, w: int) -> str:
        # Along a broadcast axis, whose stride is 0, one row or key speaks for all.
        rows, keys = f"i0, w[{w + 2}] ? i1 : i0 + 1", f"j0, w[{w + 3}] ? j1 : j0 + 1"
        return f"scan({rows}, {keys}, [&](long long i, long long j) {{ return {self.cuda_visible(w)}; }})"


@dataclass(frozen=True, eq=False)
class And(Mask):
    """Visible where both masks are."""

    left: Mask
    right: Mask

    def visible(
        self, b: npt.ArrayLike, h: npt.ArrayLike, i: npt.ArrayLike, j: npt.ArrayLike, q_offset: npt.ArrayLike
    ) -> np.ndarray:
        return self.left.visible(b, h, i, j, q_offset) & self.right.visible(b, h, i, j, q_offset)

    def tile(self, b: int, h: int, i0: int, i1: int, j0: int, j1: int, q_offset: int) -> int:
        left = self.left.tile(b, h, i0, i1, j0, j1, q_offset)
        if left == EMPTY:
            return EMPTY
        return min(left, self.right.tile(b, h, i0, i1, j0, j1, q_offset))

    def program(self) -> list[Instruction]:
        return [*self.left.program(), *self.right.program(), Instruction(OP_AND)]

    def cuda_visible(self, w: int) -> str:
        right = self.right.cuda_visible(w + len(self.left.words()))
        # & rather than &&: no branch around loads, which then may leave the loop over scores.
        return f"({self.left.cuda_visible(w)} & {right})"

    def cuda_tile(self, w: int) -> str:
        right = self.right.cuda_tile(w + len(self.left.words()))
        return f"tile_and({self.left.cuda_tile(w)}, [&] {{ return {right}; }})"

    def check(self, shape: tuple[int, int, int, int]) -> None:
        self.left.check(shape)
        self.right.check(shape)

    @property
    def kind(self) -> str:
        return f"({self.left.kind} & {self.right.kind})"


@dataclass(frozen=True, eq=False)
class Or(Mask):
    """Visible where either mask is."""

    left: Mask
    right: Mask

    def visible(
        self, b: npt.ArrayLike, h: npt.ArrayLike, i: npt.ArrayLike, j: npt.ArrayLike, q_offset: npt.ArrayLike
    ) -> np.ndarray:
        return self.left.visible(b, h, i, j, q_offset) | self.right.visible(b, h, i, j, q_offset)

    def tile(self, b: int, h: int, i0: int, i1: int, j0: int, j1: int, q_offset: int) -> int:
        left = self.left.tile(b, h, i0, i1, j0, j1, q_offset)
        if left == FULL:
            return FULL
        return max(left, self.right.tile(b, h, i0, i1, j0, j1, q_offset))

    def program(self) -> list[Instruction]:
        return [*self.left.program(), *self.right.program(), Instruction(OP_OR)]

    def cuda_visible(self, w: int) -> str:
        right = self.right.cuda_visible(w + len(self.left.words()))
        return f"({self.left.cuda_visible(w)} | {right})"  # no branch, as in And

    def cuda_tile(self, w: int) -> str:
        right = self.right.cuda_tile(w + len(self.left.words()))
        return f"tile_or({self.left.cuda_tile(w)}, [&] {{ return {right}; }})"

    def check(self, shape: tuple[int, int, int, int]) -> None:
        self.left.check(shape)
        self.right.check(shape)

    @property
    def kind(self) -> str:
        return f"({self.left.kind} | {self.right.kind})"


def arrays_of(mask: Mask | None) -> list[np.ndarray] | None:
    """The arrays that a mask reads; None if it has a class from elsewhere, of which nothing is known."""
    if isinstance(mask, (And, Or)):
        left, right = arrays_of(mask.left), arrays_of(mask.right)
        return None if left is None or right is None else left + right
    if mask is None:
        return []
    if type(mask).__module__ != __name__:
        return None
    return [value for value in vars(mask).values() if isinstance(value, np.ndarray)]


def cuda_text(mask: Mask | None) -> str:
    """CUDA C++ text of a mask: the part of a kernel's source that depends on the mask.

    It defines ``HAS_MASK`` as 1 and the functions ``mask_visible`` and ``mask_tile``, whose
    first argument points to the mask's ``words``; for None ``HAS_MASK`` as 0 and no function.
    ``visibility.cuh``, which it includes, says what a kernel may ask of them.

    Raises
    ------
    BackendError
        The mask has no CUDA text.

    Notes
    -----
    Masks of one ``kind`` have one text, so it can be part of a cache key.
    """
    if mask is None:
        return "#define HAS_MASK 0\n"
    return f"""\
#define HAS_MASK 1
#include "visibility.cuh"

__device__ __forceinline__ bool mask_visible(
    const long long* w, long long b, long long h, long long i, long long j, long long offset)
{{
    return {mask.cuda_visible(0)};
}}

__device__ __forceinline__ int mask_tile(
    const long long* w, long long b, long long h,
    long long i0, long long i1, long long j0, long long j1, long long offset)
{{
    return {mask.cuda_tile(0)};
}}
"""


@dataclass(frozen=True, eq=False)
class Visibility:
    """The visibility of one call: its band, its mask, its lengths and its offsets.

    Attributes
    ----------
    band : Band
        What ``causal`` and ``window`` say; kept apart because it bounds the loops.
    mask : Mask or None
        What ``mask`` says.
    q_offset, q_lengths, kv_lengths : ndarray of int64, shape (B,)
        Position of query row 0 on the key axis, and how many rows and keys are not padding.

    Nothing outside the lengths is ever read: every method clips to them first.
    """

    band: Band
    mask: Mask | None
    q_offset: np.ndarray
    q_lengths: np.ndarray
    kv_lengths: np.ndarray

    def predicate(self) -> Mask | None:
        """Band and mask as one mask; None when every key within the lengths is visible."""
        if self.band.lower is None and self.band.upper is None:
            return self.mask
        return self.band if self.mask is None else self.band & self.mask

    def visible(self, b: int, h: int, i0: int, i1: int, j0: int, j1: int) -> np.ndarray:
        """Boolean array (i1 - i0, j1 - j0) of what the rows see inside the lengths."""
        result = np.zeros((i1 - i0, j1 - j0), bool)
        i_end, j_end = min(i1, int(self.q_lengths[b])), min(j1, int(self.kv_lengths[b]))
        if i_end > i0 and j_end > j0:
            i, j = np.arange(i0, i_end)[:, None], np.arange(j0, j_end)[None, :]
            predicate, offset = self.predicate(), self.q_offset[b]
            seen = True if predicate is None else predicate.visible(b, h, i, j, offset)
            result[: i_end - i0, : j_end - j0] = seen
        return result

    def tile(self, b: int, h: int, i0: int, i1: int, j0: int, j1: int) -> int:
        """Class of a rectangle; one that reaches into padding is at most PARTIAL."""
        i_end, j_end = min(i1, int(self.q_lengths[b])), min(j1, int(self.kv_lengths[b]))
        if i_end <= i0 or j_end <= j0:
            return EMPTY
        predicate, offset = self.predicate(), int(self.q_offset[b])
        inside = FULL if predicate is None else predicate.tile(b, h, i0, i_end, j0, j_end, offset)
        return inside if (i_end, j_end) == (i1, j1) else min(inside, PARTIAL)

    def key_blocks(self, b: int, h: int, i0: int, i1: int, bc: int) -> Iterator[tuple[int, int, int]]:
        """The key blocks ``(j0, j1, class)`` of width ``bc`` that rows ``i0:i1`` need.

        Empty blocks are left out; ``j1`` is clipped to the length, and so is the class.
        """
        i1 = min(i1, int(self.q_lengths[b]))
        length = int(self.kv_lengths[b])
        for j0 in range(0, length if i1 > i0 else 0, bc):
            j1 = min(j0 + bc, length)
            kind = self.tile(b, h, i0, i1, j0, j1)
            if kind != EMPTY:
                yield j0, j1, kind

    def query_blocks(self, b: int, h: int, j0: int, j1: int, br: int) -> Iterator[tuple[int, int, int]]:
        """The query blocks ``(i0, i1, class)`` of ``br`` rows that see keys ``j0:j1``."""
        j1 = min(j1, int(self.kv_lengths[b]))
        length = int(self.q_lengths[b])
        for i0 in range(0, length if j1 > j0 else 0, br):
            i1 = min(i0 + br, length)
            kind = self.tile(b, h, i0, i1, j0, j1)
            if kind != EMPTY:
                yield i0, i1, kind
