"""The one validator: every call of the public functions is checked here, once.

:func:`check` turns the arguments of a call into two records:

* :class:`Problem`: what is asked, as numbers and names only; frozen and hashable, so that
  it can be the key of a cache of specialised kernels and be printed to explain a call;
* :class:`Operands`: the arrays, as views in one canonical form that every backend reads.

Nothing is allocated, compiled or written before both exist.
"""

from __future__ import annotations

import copy
import difflib
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypedDict

import numpy as np

from rawflash import arrays, masks
from rawflash.errors import ProblemError

DTYPES = ("float16", "bfloat16", "float32", "float64")
ALGORITHMS = ("standard", "rowwise", "fa1", "fa2")
BACKENDS = ("cupy_raw", "numba_cuda", "numba_cpu", "numpy_tiled")
LAYOUTS = ("bhtd", "bthd")
DIRECTIONS = ("forward", "backward")
GRADIENTS = ("q", "k", "v", "bias", "sinks")
FARTHEST = 2**61  # of a q_offset: positions and bands then stay within 64 bits


class Options(TypedDict, total=False):
    """The keyword options that every attention function takes.

    ``B`` batch, ``Hq`` query heads, ``Tq``/``Tk`` query and key lengths, ``i``/``j`` query row
    and key. On a score, in this order: ``s = scale * q.k``, softcap, ``+ bias``, ``+ alibi``,
    masking, softmax, dropout.

    Attributes
    ----------
    mask : array of bool, or Mask
        Broadcastable to ``(B, Hq, Tq, Tk)``, True = attend; or a :mod:`rawflash.masks` object.
    causal : bool
        Key ``j`` is visible to query ``i`` iff ``j <= i + q_offset``.
    window : (left, right)
        Each an int >= 0 or None: ``i + q_offset - left <= j <= i + q_offset + right``.
    q_offset : int or int array (B,)
        Position of query row 0 on the key axis. None: ``kv_length_b - q_length_b``, the
        lower-right alignment; 0 is the upper-left one.
    q_lengths, kv_lengths : int array (B,)
        Rows and keys past them are padding: never read, results 0 (lse -inf).
    bias : float array
        Broadcastable to ``(B, Hq, Tq, Tk)``, dtype of ``q`` or float32; ``-inf`` hides the key.
    alibi_slopes : float array (Hq,) or (B, Hq)
        Adds ``-slope * abs(i + q_offset - j)``.
    softcap : float
        ``c > 0``: scores become ``c * tanh(scores / c)``. It and ``scale`` must be numbers that float32 holds
        (float64 in a float64 call), not smaller than its smallest normal one.
    sinks : float array (Hq,)
        Logits that join the softmax's denominator and no value; dtype of ``q`` or float32.
    dropout, seed : float, int
        Probability of dropping, ``0 <= dropout < 1``; ``0 <= seed < 2**64``.
    scale : float
        None: ``1 / sqrt(d)``.
    layout : str
        "bhtd" or "bthd", for q, k, v, out and their gradients.
    algorithm : str
        "standard", "rowwise", "fa1" or "fa2".
    backend : str
        "cupy_raw", "numba_cuda", "numba_cpu" or "numpy_tiled"; None picks by the arrays.
    deterministic : bool
        True: two runs give the same bits.
    out : array
        Where the forward result is written.
    return_lse : bool
        Also return the log-sum-exp (natural logarithm).
    sram : int
        On-chip bytes per block that tiles may use; None asks the device.
    """

    mask: Any
    causal: bool
    window: tuple[int | None, int | None] | None
    q_offset: Any
    q_lengths: Any
    kv_lengths: Any
    bias: Any
    alibi_slopes: Any
    softcap: float | None
    sinks: Any
    dropout: float
    seed: int
    scale: float | None
    layout: str
    algorithm: str
    backend: str | None
    deterministic: bool
    out: Any
    return_lse: bool
    sram: int | None


_NAMES = frozenset(Options.__annotations__)
FORWARD_ONLY = ("out", "return_lse")
# Arguments that lie where q does (k_cache, of append_kv), and those that may also be host arrays or lists beside
# arrays on a GPU.
_DEVICE = ("q", "k", "v", "k_cache", "v_cache", "k_new", "v_new",
           "dout", "o", "lse", "dlse", "out", "mask", "bias", "sinks")  # fmt: skip
_HOST_TOO = ("alibi_slopes", "q_lengths", "kv_lengths", "q_offset", "cu_seqlens_q", "cu_seqlens_k", "block_table")
_NOT_VARLEN = ("mask", "bias", "q_lengths", "kv_lengths")
_NOT_DECODE = ("mask", "bias", "q_lengths", "dropout")


@dataclass(frozen=True)
class Problem:
    """What one call asks for, without its arrays.

    ``Tq`` and ``Tk`` are the longest sequence when ``varlen``. Presence flags and structure
    stand for arrays: ``mask`` is the structure of the mask object, ``bias`` the four axis
    lengths of the bias (1 where it broadcasts). ``page`` is how many keys a block of a paged
    cache holds; 0: K and V are not paged. ``boxes``: tensor maps (:mod:`rawflash.backends.cupy_raw.tensor_map`) can
    describe q, k, v, and whatever else of such matrices was given; of arrays that are not on a GPU it is not asked.
    """

    B: int = 1
    Hq: int = 1
    Hkv: int = 1
    Tq: int = 1
    Tk: int = 1
    d: int = 1
    dv: int = 1
    dtype: str = "float32"
    scale: float = 1.0
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    mask: str | None = None
    ragged: bool = False
    varlen: bool = False
    bias: tuple[int, int, int, int] | None = None
    alibi: bool = False
    softcap: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    seed: int = 0
    layout: str = "bhtd"
    algorithm: str = "fa2"
    backend: str = "numba_cpu"
    deterministic: bool = False
    sram: int | None = None
    page: int = 0
    boxes: bool = True

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.Hq // self.Hkv

    @property
    def compute_dtype(self) -> str:
        """What products accumulate in: float32, or float64 for float64 input."""
        return "float64" if self.dtype == "float64" else "float32"

    @cached_property  # planning asks for it at each block of keys
    def band(self) -> masks.Band:
        """``causal`` and ``window`` as one band."""
        left, right = self.window if self.window is not None else (None, None)
        band = masks.SlidingWindow(left, right)
        combined = band & masks.Causal() if self.causal else band
        assert isinstance(combined, masks.Band)  # two bands are one band
        return combined

    @property
    def has_band(self) -> bool:
        """Does a band hide keys?"""
        return not (self.band.lower is self.band.upper is None)


@dataclass(eq=False)
class Operands:
    """The arrays of one call in canonical form: NumPy views, head axis before rows.

    On a GPU the views are metadata only (see :mod:`rawflash.arrays`): an argument that is named in
    ``addresses`` must not be read here, element 0 of its view is at that address. Arguments that are
    not named there (masks, lengths, slopes given on the host) are ordinary NumPy arrays.

    ``q (S, Hq, Tq, d)``, ``k (S, Hkv, Tk, d)``, ``v (S, Hkv, Tk, dv)``; likewise ``dout`` and
    ``o`` (as ``out``), ``lse`` and ``dlse (S, Hq, Tq)``. ``S`` is ``B``, or 1 for varlen, where all
    sequences lie behind each other on the row axis from ``q_starts[b]`` and ``k_starts[b]``.
    Use :meth:`rows` to take one head of one sequence.

    Of a paged cache on a GPU, ``k (blocks, Hkv, page, d)`` and ``v (blocks, Hkv, page, dv)`` are all blocks; key
    ``j`` of sequence ``b`` is row ``j % page`` of block ``block_table[b, j // page]``. On a CPU it is gathered.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    visibility: masks.Visibility
    q_starts: np.ndarray
    k_starts: np.ndarray
    packed: bool
    kind: str
    user_shapes: dict[str, tuple[int, ...]]
    layout: str
    dout: np.ndarray | None = None
    o: np.ndarray | None = None
    lse: np.ndarray | None = None
    dlse: np.ndarray | None = None
    bias: np.ndarray | None = None  # four axes, length 1 where it broadcasts
    alibi_slopes: np.ndarray | None = None  # float64 (B, Hq)
    sinks: np.ndarray | None = None  # (Hq,)
    out: Any = None  # the user's array
    target: np.ndarray | None = None  # ``out`` in canonical form, where a kernel can write straight into it
    out_overlaps: bool = False  # ``out`` shares memory with an input, which is lost when the call returns
    return_lse: bool = False
    wrt: tuple[str, ...] = ("q", "k", "v")
    block_table: np.ndarray | None = None  # int (B, blocks of a sequence), on a GPU only
    offset_given: bool = False  # False: q_offset is kv_length - q_length of each sequence
    copied: list[str] = field(default_factory=list)  # arguments that a kernel could not read where they are
    # What was prepared for calls that differ in addresses only. Taken: "forward", "backward", "extents" and the
    # names of results; backends use the names of their files.
    memo: dict[str, Any] = field(default_factory=dict)
    # On a GPU:
    device: int | None = None
    addresses: dict[str, int] = field(default_factory=dict)  # of every argument that is a device array
    views: Mapping[str, np.ndarray] = field(default_factory=dict)  # metadata of lengths, offsets, cu_seqlens there
    keep: tuple[Any, ...] = ()  # copies, alive for the call
    borrowed: tuple[Any, ...] = ()  # see arrays.Source
    waits: tuple[int, ...] = ()

    def rows(self, array: np.ndarray, b: int, h: int, side: str) -> np.ndarray:
        """Rows of sequence ``b``, head ``h``: a view ``(T, ...)`` without the padding.

        ``side`` is "q" for arrays with query rows, "k" for arrays with key rows.
        """
        if side == "q":
            start, length = self.q_starts[b], self.visibility.q_lengths[b]
        else:
            start, length = self.k_starts[b], self.visibility.kv_lengths[b]
        return array[0 if self.packed else b, h, start : start + length]


@dataclass(eq=False)
class Append:
    """The arrays of one call of ``append_kv``: views with the head axis before the rows, of metadata on a GPU.

    ``k_cache (blocks, Hkv, page, d)``, ``v_cache (blocks, Hkv, page, dv)``: a contiguous cache has one block a
    sequence. ``k_new (B, Hkv, Tn, d)``, ``v_new (B, Hkv, Tn, dv)``.
    """

    k_cache: np.ndarray
    v_cache: np.ndarray
    k_new: np.ndarray
    v_new: np.ndarray
    kv_lengths: np.ndarray  # (B,)
    block_table: np.ndarray | None = None  # (B, max_blocks)
    home: tuple[np.ndarray, np.ndarray] | None = None  # block and row (B, Tn) of each new key; None: only the GPU knows
    device: int | None = None
    memo: dict[str, Any] = field(default_factory=dict)  # as in Operands


def _fail(name: str, value: object, rule: str) -> ProblemError:
    return ProblemError(f"{name} is {value!r}; expected {rule}")


def _integer(name: str, value: Any, low: int, high: int | None, rule: str) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise _fail(name, value, rule)
    if value < low or (high is not None and value >= high):
        raise _fail(name, value, rule)
    return int(value)


def _real(name: str, value: Any, rule: str) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise _fail(name, value, rule)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _fail(name, value, rule)
    return number


def _check_held(name: str, number: float | None, dtype: str) -> None:
    """Kernels compute with this number in float32, or in float64 in a float64 call."""
    compute = "float64" if dtype == "float64" else "float32"
    low, high = float(np.finfo(compute).tiny), float(np.finfo(compute).max)
    if number and not low <= abs(number) <= high:
        raise _fail(name, number, f"a size between {low:.3g} and {high:.3g}, which {compute} can hold")


def _probability(name: str, value: Any) -> float:
    p = _real(name, value, "a number p with 0 <= p < 1")
    if not 0 <= p < 1:
        raise _fail(name, value, "a number p with 0 <= p < 1")
    return p


def _seed(value: Any) -> int:
    return _integer("seed", value, 0, 2**64, "an int with 0 <= seed < 2**64")


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise _fail(name, value, "True or False")
    return bool(value)


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise _fail(name, value, "one of " + ", ".join(repr(c) for c in choices))
    return value


def _host_array(name: str, value: Any, rule: str) -> np.ndarray:
    """A small array that may also be passed as a list."""
    if value is None or isinstance(value, (bool, int, float, np.generic)):
        raise _fail(name, value, rule)
    if not isinstance(value, (list, tuple)):
        return arrays.as_numpy(name, value)
    try:
        return np.asarray(value) if len(value) else np.zeros(0, np.int64)  # which would be float64 to NumPy
    except ValueError:
        raise _fail(name, value, rule) from None


def _per_batch(name: str, value: Any, batch: int) -> np.ndarray:
    """An int array (B,) from a host array or a list."""
    array = _host_array(name, value, f"integers of shape (B,) = ({batch},)")
    _check_integers(name, array, (batch,))
    if _beyond(array, -FARTHEST, FARTHEST):
        raise ProblemError(f"{name} is {array.tolist()}; expected entries between -2**61 and 2**61")
    return np.ascontiguousarray(array, dtype=np.int64)


def _beyond(integers: np.ndarray, low: int, high: int) -> bool:
    """Is an entry not between the two?"""
    entries = integers.tolist()  # a few: NumPy takes longer, most of all where other data has driven it from the caches
    return bool(entries) and (min(entries) < low or max(entries) > high)


def _check_integers(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    if array.dtype.kind not in "iu":
        raise ProblemError(f"{name} has dtype {array.dtype}; expected integers")
    if array.shape != shape:
        raise ProblemError(f"{name} has shape {array.shape}; expected (B,) = {_shown(shape)}")


def _lengths(source: arrays.Source, name: str, value: Any, batch: int, longest: int) -> np.ndarray:
    """Lengths (B,); on a GPU, where their values are not known here, the longest that they may be."""
    if value is None or _on_device(source, name, value, (batch,)):
        return np.full(batch, longest, np.int64)
    lengths = _per_batch(name, value, batch)
    if _beyond(lengths, 0, longest):
        raise ProblemError(f"{name} is {lengths.tolist()}; expected every entry between 0 and {longest}")
    return lengths


def _cu_seqlens(source: arrays.Source, name: str, value: Any, total: int, of: str) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths (B,) of the sequences; on a GPU the bounds 0 and ``total``."""
    array = _host_array(name, value, "integers of shape (B + 1,)")
    if array.dtype.kind not in "iu":
        raise ProblemError(f"{name} has dtype {array.dtype}; expected integers")
    if array.ndim != 1 or len(array) < 1:
        raise ProblemError(f"{name} has shape {array.shape}; expected (B + 1,)")
    batch = len(array) - 1
    if _on_device(source, name, array, (batch + 1,)):
        return np.zeros(batch, np.int64), np.full(batch, total, np.int64)
    offsets = np.ascontiguousarray(array, dtype=np.int64)
    if (np.diff(offsets) < 0).any():
        raise ProblemError(f"{name} is {offsets.tolist()}; expected a sequence that never falls")
    if offsets[0] < 0 or offsets[-1] > total:
        raise ProblemError(f"{name} is {offsets.tolist()}; expected values between 0 and {total}, the rows of {of}")
    return offsets[:-1], np.diff(offsets)


def _block_table(source: arrays.Source, value: Any, batch: int, page: int, like: str = "q") -> np.ndarray:
    """The block table (B, max_blocks) of a paged cache whose blocks have ``page`` rows."""
    if page < 1:
        raise ProblemError("k_cache has blocks of 0 rows; expected at least 1 with block_table")
    array = _host_array("block_table", value, f"integers of shape (B, max_blocks) = ({batch}, *)")
    if array.size == 0 and isinstance(value, (list, tuple)):
        # Rows without entries are floats to NumPy, and no rows are one axis
        array = array.astype(np.int64) if array.ndim > 1 else np.zeros((0, 0), np.int64)
    if array.dtype.kind not in "iu":
        raise ProblemError(f"block_table has dtype {array.dtype}; expected integers")
    _expect("block_table", array.shape, (batch, None), f"to match {like}")
    if _on_device(source, "block_table", array, array.shape):
        return source.views["block_table"]
    return np.ascontiguousarray(array, dtype=np.int64)


def _check_blocks(source: arrays.Source, table: np.ndarray, lengths: np.ndarray, blocks: int, page: int) -> None:
    """Check the blocks that a table on the host says are used, where their number is known here."""
    if "block_table" in source.addresses or "kv_lengths" in source.addresses:
        return
    used = np.arange(table.shape[1]) * page < lengths[:, None]
    wrong = used & ((table < 0) | (table >= blocks))
    if wrong.any():
        b, n = (int(index[0]) for index in np.nonzero(wrong))
        raise ProblemError(
            f"block_table has {int(table[b, n])} at ({b}, {n}), which kv_lengths says is used; "
            f"expected a block between 0 and {blocks - 1}"
        )


def _gathered(blocks: np.ndarray, table: Any, lengths: np.ndarray) -> np.ndarray:
    """Keys or values ``(B, Hkv, longest, width)`` of a paged cache, copied out of its ``blocks (n, Hkv, page, width)``.

    Only the rows that ``lengths`` says are used are read, and only those are written.
    """
    _, heads, page, width = blocks.shape
    made = np.empty((len(lengths), heads, int(lengths.max(initial=0)), width), blocks.dtype.newbyteorder("="))
    for rows, entries, length in zip(made, table, lengths.tolist(), strict=True):
        whole = length // page
        inside = rows[:, : whole * page].reshape(heads, whole, page, width)
        inside.swapaxes(0, 1)[...] = blocks[entries[:whole]]
        if length % page:
            rows[:, whole * page : length] = blocks[entries[whole], :, : length % page]
    return made


def _on_device(source: arrays.Source, name: str, value: Any, shape: tuple[int, ...]) -> bool:
    """Is this an integer array on a GPU? Its values stay there, unchecked; kernels clamp them."""
    if name not in source.addresses:
        return False
    _check_integers(name, value, shape)
    source.integers(name, value)
    return True


def _shown(shape: tuple[int | None, ...]) -> str:
    inner = ", ".join("*" if size is None else str(size) for size in shape)
    return f"({inner},)" if len(shape) == 1 else f"({inner})"


def _expect(name: str, shape: tuple[int, ...], wanted: tuple[int | None, ...], why: str) -> None:
    if len(shape) != len(wanted) or any(w is not None and s != w for s, w in zip(shape, wanted, strict=True)):
        raise ProblemError(f"{name} has shape {shape}; expected {_shown(wanted)} {why}")


class _Canonical:
    """Reads arguments of one call into canonical views; what a kernel could not read is copied."""

    def __init__(self, source: arrays.Source, layout: str, dims: int, lead: tuple[int, ...]) -> None:
        self.source, self.layout, self.dims, self.lead = source, layout, dims, lead
        self.unread: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # copies that have no rows yet, and of what

    def user_shape(self, heads: int | None, rows: int | None, width: int | None) -> tuple[int | None, ...]:
        """The shape that an argument must have in the user's layout."""
        if self.dims == 2:
            return (rows, width)
        tail = (heads, rows, width) if self.layout == "bhtd" else (rows, heads, width)
        return (*self.lead, *tail)

    def take(self, name: str, array: np.ndarray) -> np.ndarray:
        """View ``(S, H, T, width)``; one copy if there is none, for :meth:`read` to fill."""
        if not arrays.is_canonical(array):
            array = self.copy(name, array)
        return arrays.heads_first(array, self.layout)

    def copy(self, name: str, array: np.ndarray) -> np.ndarray:
        """A copy: on a GPU of all, on a CPU of the rows that :meth:`read` is told of."""
        if self.source.device is not None:
            return self.source.copy(name, array)
        self.source.copied += (name,)
        made = np.zeros(array.shape, array.dtype.newbyteorder("="))
        self.unread[name] = made, array
        return made

    def read(self, starts: np.ndarray, lengths: np.ndarray, *names: str, packed: bool) -> None:
        """Fill the copies of these arguments: rows of their sequences, not what pads them, which may be unmapped."""
        ends = starts + lengths
        if packed:  # one sequence after the other
            starts, ends = starts[:1], ends[-1:]
        for made, array in (self.unread.pop(name) for name in names if name in self.unread):
            heads_come_first = self.layout == "bhtd" or array.ndim < self.dims  # lse has no layout
            heads = (slice(None),) if heads_come_first and self.dims > 2 else ()
            for at, start, end in zip(np.ndindex(*self.lead), starts.tolist(), ends.tolist(), strict=False):
                rows = (*at, *heads, slice(start, end))
                made[rows] = array[rows]


def _called(name: str, decode: Any) -> str:
    """The name that the caller knows an argument by."""
    return f"{name}_cache" if decode and name in ("k", "v") else name


def _numpy_float(name: str, value: Any) -> np.ndarray:
    return _float(name, arrays.as_numpy(name, value))


def _float(name: str, array: Any) -> Any:
    if arrays.name_of(array.dtype) not in DTYPES:
        raise ProblemError(f"{name} has dtype {array.dtype}; expected one of {', '.join(DTYPES)}")
    return array


def _check_same_device(named: Mapping[str, Any], gpu: bool, first: str = "q") -> None:
    """Check that all arrays are where the ``first`` is: on the GPU or not."""
    for name in (*_DEVICE, *_HOST_TOO):
        value = named.get(name)
        if value is None or isinstance(value, (int, float, list, tuple, masks.Mask)):
            continue
        there = arrays.on_gpu(value)
        if there != gpu and (there or name in _DEVICE):
            here, other = ("GPU", "CPU") if gpu else ("CPU", "GPU")
            raise ProblemError(
                f"{name} is a {other} array and {first} a {here} array; expected all arrays on one device"
            )


def known(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options themselves, once every name is known to be one."""
    if not options.keys() <= _NAMES:
        name = next(name for name in options if name not in _NAMES)
        names = Options.__annotations__
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(names)}"
        raise ProblemError(f"unknown option {name!r}; {hint}")
    return options


def check_forward_only(options: Mapping[str, Any]) -> None:
    """Refuse the options that only the forward functions have."""
    for name in FORWARD_ONLY:
        if name in options:
            raise ProblemError(f"{name} is not an option of the backward functions; expected it in the forward call")


def three(name: str, value: Any) -> Sequence[Any]:
    """What stands for q, k and v each."""
    if not isinstance(value, (tuple, list)) or len(value) != 3:
        raise ProblemError(f"{name} is a {type(value).__name__}; expected a tuple of three: those of q, k and v")
    return value


def check_jvp(primals: Any, tangents: Any, **options: Any) -> tuple[Problem, Operands, dict[str, np.ndarray]]:
    """:func:`check` for forward mode; the tangents of CPU arrays come in canonical form, by name."""
    q, k, v = three("primals", primals)
    moved = three("tangents", tangents)
    problem, x = check(q, k, v, **forward_mode(q, options))
    return problem, x, _tangents(x, problem.dtype, moved) if x.device is None else {}


def forward_mode(q: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Options of :func:`rawflash.attention_jvp`, checked, its default backend among them."""
    if options.get("out") is not None:
        raise ProblemError("out is not an option of attention_jvp; expected it in a call of attention")
    if options.get("backend") is None and not arrays.on_gpu(q):
        return options | {"backend": "numpy_tiled"}  # which alone has forward mode
    return options


def _tangents(x: Operands, dtype: str, given: Sequence[Any]) -> dict[str, np.ndarray]:
    """Tangents of q, k and v in canonical form; None is one of zeros."""
    taken = {}
    for n, (name, value) in enumerate(zip("qkv", given, strict=True)):
        called, like = f"tangents[{n}]", getattr(x, name)
        if value is None:
            taken[name] = np.zeros(like.shape, like.dtype)
            continue
        if arrays.on_gpu(value):
            raise ProblemError(f"{called} is a GPU array and q a CPU array; expected all arrays on one device")
        array = arrays.as_numpy(called, value)
        _expect(called, array.shape, x.user_shapes[name], f"to match {name}")
        if arrays.name_of(array.dtype) != dtype:
            raise ProblemError(f"{called} has dtype {array.dtype}; expected {dtype} to match {name}")
        plain = array if arrays.is_canonical(array) else np.ascontiguousarray(array)
        taken[name] = arrays.heads_first(plain, x.layout)
    return taken


def check(q: Any, k: Any, v: Any, **arguments: Any) -> tuple[Problem, Operands]:
    """Check a call and bring its arguments into canonical form.

    Parameters
    ----------
    q, k, v : array
        As the public functions take them.
    varlen : bool, optional
        Whether it is a varlen call; None: whether it has ``cu_seqlens``.
    cu_seqlens_q, cu_seqlens_k : int array (B + 1,), optional
        Given for varlen calls, both or neither.
    decode : bool, optional
        It is a call with caches: k and v are called k_cache and v_cache, and some options are not accepted.
    block_table : int array (B, max_blocks), optional
        The caches are paged.
    dout, o, lse, dlse : array, optional
        What the backward functions take.
    wrt : sequence of str, optional
        Gradients asked for, in order.
    direction : {"forward", "backward"}
        Which function was called: it decides which options are legal.
    **arguments
        The others, and those of :class:`Options`.

    Returns
    -------
    problem : Problem
    operands : Operands

    Raises
    ------
    ProblemError
        Naming the argument, its value and the rule.
    """
    given = {"q": q, "k": k, "v": v, **arguments}
    return _check_on_gpu(given) if arrays.on_gpu(q) else _check_on_cpu(given)


def _check(
    source: arrays.Source,
    /,
    q: Any,
    k: Any,
    v: Any,
    *,
    varlen: bool | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    decode: bool = False,
    block_table: Any = None,
    dout: Any = None,
    o: Any = None,
    lse: Any = None,
    dlse: Any = None,
    wrt: Any = None,
    direction: str = "forward",
    **options: Any,
) -> tuple[Problem, Operands]:
    """:func:`check` with the device arrays replaced by their metadata."""
    known(options)
    _choice("direction", direction, DIRECTIONS)
    backward = direction == "backward"
    if varlen is None:
        varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    if backward:
        check_forward_only(options)
    for name, value in options.items():
        if varlen and name in _NOT_VARLEN and value is not None:
            raise ProblemError(f"{name} is not accepted with cu_seqlens; expected None")
        number = type(value) in (int, float) or isinstance(value, np.number)
        if decode and name in _NOT_DECODE and value is not None and not (number and value == 0):
            raise ProblemError(f"{name} is not an option of attention_decode; expected it in a call of attention")
    if decode and options.get("kv_lengths") is None:
        raise ProblemError("kv_lengths is None; expected how many keys of each sequence are valid, integers (B,)")
    k_name, v_name = (_called(name, decode) for name in ("k", "v"))

    def option(name: str, default: Any = None) -> Any:
        return options.get(name, default)

    # Choices and numbers: no array is touched yet.
    layout = _choice("layout", option("layout", "bhtd"), LAYOUTS)
    algorithm = _choice("algorithm", option("algorithm", "fa2"), ALGORITHMS)
    backend = option("backend")
    if backend is not None:
        _choice("backend", backend, BACKENDS)
    causal = _flag("causal", option("causal", False))
    deterministic = _flag("deterministic", option("deterministic", False))
    return_lse = _flag("return_lse", option("return_lse", False))
    window = _window(option("window"))
    softcap = option("softcap")
    if softcap is not None:
        softcap = _real("softcap", softcap, "a finite number > 0, or None")
        if softcap <= 0:
            raise _fail("softcap", softcap, "a finite number > 0, or None")
    dropout = _probability("dropout", option("dropout", 0.0))
    seed = _seed(option("seed", 0))
    scale = option("scale")
    if scale is not None:
        scale = _real("scale", scale, "a finite number, or None for 1 / sqrt(d)")
    sram = option("sram")
    if sram is not None:
        sram = _integer("sram", sram, 1, None, "a positive int (bytes), or None")

    # q, k, v: one device, one dtype, matching shapes.
    if source.device is None:
        _check_same_device(options | {k_name: k, v_name: v} | dict(
            dout=dout, o=o, lse=lse, dlse=dlse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            block_table=block_table,
        ), gpu=False)  # fmt: skip
    gpu = source.device is not None
    if backend is None:
        backend = "cupy_raw" if gpu else "numba_cpu" if algorithm in ("fa1", "fa2") else "numpy_tiled"
    if gpu != (backend in ("cupy_raw", "numba_cuda")):
        raise _wrong_device(backend, "q", "GPU" if gpu else "CPU")
    q_user, k_user, v_user = (_numpy_float(n, a) for n, a in (("q", q), (k_name, k), (v_name, v)))
    dtype = arrays.name_of(q_user.dtype)
    _check_held("softcap", softcap, dtype)
    _check_held("scale", scale, dtype)
    for name, array in ((k_name, k_user), (v_name, v_user)):
        if arrays.name_of(array.dtype) != dtype:
            raise ProblemError(f"{name} has dtype {array.dtype}; expected {dtype} to match q")

    dims = q_user.ndim
    if varlen and dims != 3:
        wanted = "(Hq, total_q, d)" if layout == "bhtd" else "(total_q, Hq, d)"
        raise ProblemError(f"q has shape {q_user.shape}; expected {wanted} with cu_seqlens")
    if dims < 2:
        raise ProblemError(f"q has shape {q_user.shape}; expected at least two axes (Tq, d)")
    if decode and dims != 4:
        wanted = "(B, Hq, Tq, d)" if layout == "bhtd" else "(B, Tq, Hq, d)"
        raise ProblemError(f"q has shape {q_user.shape}; expected {wanted} with caches")
    lead = q_user.shape[:-3] if dims > 3 else ()
    form = _Canonical(source, layout, dims, lead)
    for name, array in ((k_name, k_user), (v_name, v_user)):
        if array.ndim != dims:
            raise ProblemError(
                f"{name} has shape {array.shape}; expected {dims} axes to match q of shape {q_user.shape}"
            )
    # All blocks of a paged cache lie where else the sequences do.
    of_keys = form if block_table is None else _Canonical(source, layout, dims, k_user.shape[:1])
    _expect(k_name, k_user.shape, of_keys.user_shape(None, None, q_user.shape[-1]), "to match q")
    _expect(v_name, v_user.shape, of_keys.user_shape(None, None, None),
            "to match q" if block_table is None else f"to match {k_name}")  # fmt: skip
    q4 = form.take("q", q_user)
    if block_table is None or gpu:
        k4, v4 = of_keys.take("k", k_user), of_keys.take("v", v_user)
    else:  # copied out of their blocks below
        k4, v4 = (arrays.heads_first(array, layout) for array in (k_user, v_user))
    (slots, heads_q, rows_q, d), (blocks, heads_kv, rows_k, _), dv = q4.shape, k4.shape, v4.shape[-1]
    if d < 1 or dv < 1:
        raise ProblemError(f"{'q' if d < 1 else v_name} has a head dimension of 0; expected at least 1")
    _expect(v_name, v_user.shape, of_keys.user_shape(heads_kv, rows_k, None), f"to match {k_name}")
    if heads_kv < 1 or heads_q < 1 or heads_q % heads_kv:
        raise ProblemError(
            f"q has {heads_q} heads and {k_name} has {heads_kv}; expected q's to be a positive multiple of {k_name}'s"
        )
    page, table = 0, None
    if block_table is not None:
        page = rows_k
        table = _block_table(source, block_table, slots, page)
        rows_k = table.shape[1] * page

    # Lengths and offsets.
    if varlen:
        q_starts, q_lengths = _cu_seqlens(source, "cu_seqlens_q", cu_seqlens_q, rows_q, "q")
        k_starts, kv_lengths = _cu_seqlens(source, "cu_seqlens_k", cu_seqlens_k, rows_k, "k")
        batch = len(q_lengths)
        if len(kv_lengths) != batch:
            raise ProblemError(
                f"cu_seqlens_k has shape ({len(kv_lengths) + 1},); expected ({batch + 1},) to match cu_seqlens_q"
            )
        longest_q, longest_k = int(q_lengths.max(initial=0)), int(kv_lengths.max(initial=0))
    else:
        batch, longest_q, longest_k = slots, rows_q, rows_k
        q_starts = k_starts = np.zeros(batch, np.int64)
        q_lengths = _lengths(source, "q_lengths", option("q_lengths"), batch, rows_q)
        kv_lengths = _lengths(source, "kv_lengths", option("kv_lengths"), batch, rows_k)
    form.read(q_starts, q_lengths, "q", packed=varlen)
    of_keys.read(k_starts, kv_lengths, "k", "v", packed=varlen)
    if table is not None:
        _check_blocks(source, table, kv_lengths, blocks, page)
        if not gpu:
            longest_k = int(kv_lengths.max(initial=0))  # of the copy that is made below
    offset_given = option("q_offset") is not None
    if _on_device(source, "q_offset", option("q_offset"), (batch,)):
        q_offset = np.zeros(batch, np.int64)
    else:
        q_offset = _q_offset(option("q_offset"), batch, q_lengths, kv_lengths)

    # Arrays beside q, k, v.
    shape = (batch, heads_q, longest_q, longest_k)
    mask = _mask(option("mask"), shape)
    if mask is not None and backend != "numpy_tiled":
        mask.program()  # a mask that compiled backends cannot run is refused before any work
        if gpu:
            masks.cuda_text(mask)
    bias, bias_shape = _bias(source, option("bias"), shape, dtype)
    slopes = _alibi(source, option("alibi_slopes"), batch, heads_q)
    sinks = _sinks(source, option("sinks"), heads_q, dtype)
    wrt = check_wrt(wrt, bias is not None, sinks is not None)
    out_shape = tuple(int(n) for n in form.user_shape(heads_q, rows_q, dv))  # type: ignore[arg-type]
    lse_shape = (rows_q,) if dims == 2 else (heads_q, rows_q) if dims == 3 else (*lead, heads_q, rows_q)
    target = None
    if option("out") is not None:
        target = _check_out(source, option("out"), out_shape, dtype, layout)
    if page and not gpu:  # a copy, so that what computes there need not know of blocks
        k4, v4 = (_gathered(array, table, kv_lengths) for array in (k4, v4))
        source.copied += (k_name, v_name)
        page, table = 0, None

    problem = Problem(
        B=batch, Hq=heads_q, Hkv=heads_kv, Tq=longest_q, Tk=longest_k, d=d, dv=dv, dtype=dtype,
        scale=1.0 / math.sqrt(d) if scale is None else scale,
        causal=causal, window=window, mask=None if mask is None else mask.kind,
        ragged=option("q_lengths") is not None or option("kv_lengths") is not None,
        varlen=varlen, bias=None if bias is None else bias.shape, alibi=slopes is not None,
        softcap=softcap, sinks=sinks is not None, dropout=dropout, seed=seed, layout=layout,
        algorithm=algorithm, backend=backend, deterministic=deterministic, sram=sram, page=page,
    )  # fmt: skip
    operands = Operands(
        q=q4, k=k4, v=v4,
        visibility=masks.Visibility(problem.band, mask, q_offset, q_lengths, kv_lengths),
        q_starts=np.ascontiguousarray(q_starts), k_starts=np.ascontiguousarray(k_starts),
        packed=varlen, kind=source.kind, layout=layout,
        user_shapes={"q": q_user.shape, "k": k_user.shape, "v": v_user.shape, "out": out_shape, "lse": lse_shape},
        bias=bias, alibi_slopes=slopes, sinks=sinks,
        out=option("out"), target=target, return_lse=return_lse, wrt=wrt, block_table=table,
        offset_given=offset_given,
        device=source.device, addresses=source.addresses, views=source.views, borrowed=source.borrowed,
        waits=source.waits,
    )  # fmt: skip
    if bias_shape is not None:
        operands.user_shapes["bias"] = bias_shape
    if sinks is not None:
        operands.user_shapes["sinks"] = sinks.shape
    if backward:
        _gradients(operands, form, dout=dout, o=o, lse=lse, dlse=dlse, dtype=dtype)
    operands.copied, operands.keep = list(source.copied), source.keep
    if gpu:
        problem = replace(problem, boxes=_have_boxes(operands))
    elif operands.out is not None:
        operands.out_overlaps = arrays.overlaps_input(operands)
        if operands.out_overlaps or masks.arrays_of(mask) is None:  # a mask from elsewhere may raise half-way
            operands.target = None
    return problem, operands


def _have_boxes(x: Operands) -> bool:
    """:attr:`Problem.boxes`: strides and alignment of the matrices, which are part of a memo's key."""
    from rawflash.backends.cupy_raw.tensor_map import can

    given = (x.q, x.k, x.v, x.dout, x.o, x.target)
    return x.v.shape[-1] % 8 == 0 and all(can(array) for array in given if array is not None)


# ---- calls like earlier ones ---------------------------------------------------------------------------

# By what a call is: a problem and a template of operands, or what an append_kv does.
_MEMO: dict[tuple[Any, ...], Any] = {}
_MEMO_LOCK = threading.Lock()
MEMO_ENTRIES = 1024
_PLAIN = frozenset((bool, int, float, str, type(None)))


def _remember(key: tuple[Any, ...], found: Any) -> None:
    with _MEMO_LOCK:
        while len(_MEMO) >= MEMO_ENTRIES:
            del _MEMO[next(iter(_MEMO))]
        _MEMO[key] = found


def _template(x: Operands, *per_call: str) -> type[Operands]:
    """What is the same for all calls like this one is a class: an instance then holds what is its own, and is made at
    once."""
    return type("Operands", (Operands,), {name: value for name, value in vars(x).items() if name not in per_call})


def with_seed(problem: Problem, seed: int) -> Problem:
    """The same call with this seed."""
    return problem if problem.seed == seed else replace(problem, seed=seed)


# ---- on a CPU

_MATRICES, _STATISTICS = ("q", "k", "v", "dout", "o"), ("lse", "dlse")
_LENGTHS = ("q_lengths", "kv_lengths", "q_offset")


def _check_on_cpu(given: dict[str, Any]) -> tuple[Problem, Operands]:
    """:func:`check` for host arrays, remembering what it found: Python is most of what a short call takes.

    Calls that differ in nothing but where NumPy's arrays lie, their lengths and the seed share one problem and one
    ``memo``; the lengths, which grow from step to step of a decoding, are looked at each time. A call with other arrays
    beside these, or with a copy, is not kept.
    """
    key = _key_on_cpu(given)
    found = None if key is None else _MEMO.get(key)
    if found is None:
        problem, x = _check(arrays.Source(given["q"]), **given)
        if key is not None and not x.copied:
            _remember(key, (problem, _template(x, *_MATRICES, *_STATISTICS, "visibility"), x.visibility.band))
        return problem, x
    problem, template, band = found
    problem, x = with_seed(problem, _seed(given.get("seed", 0))), template.__new__(template)
    for name in _MATRICES:
        array = given.get(name)
        setattr(x, name, None if array is None else arrays.heads_first(array, problem.layout))
    for name in _STATISTICS:
        array = given.get(name)
        setattr(x, name, None if array is None else array.reshape(x.q.shape[:3]))
    q_lengths = _lengths(_HOST, "q_lengths", given.get("q_lengths"), problem.B, problem.Tq)
    kv_lengths = _lengths(_HOST, "kv_lengths", given.get("kv_lengths"), problem.B, problem.Tk)
    q_offset = _q_offset(given.get("q_offset"), problem.B, q_lengths, kv_lengths)
    x.visibility = masks.Visibility(band, None, q_offset, q_lengths, kv_lengths)
    return problem, x


_HOST = arrays.Source(np.zeros(0))  # which has no array on a GPU


def _key_on_cpu(given: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """All that a check reads of the arguments but lengths and ``seed``; None: there is more to know of one."""
    parts: list[Any] = []
    for name, value in given.items():
        cls = type(value)
        if cls is np.ndarray and name in _MATRICES + _STATISTICS:
            parts += name, value.shape, value.strides, value.dtype, value.flags.num
        elif name in _LENGTHS and cls in (np.ndarray, tuple, list, int):
            parts += name, cls
        elif cls in _PLAIN:
            if name != "seed":
                parts += name, cls, value
        elif name in ("window", "wrt") and cls in (tuple, list) and _PLAIN.issuperset(map(type, value)):
            parts += name, _content(value)
        else:
            return None
    return tuple(parts)


# ---- on a GPU

MEMO_BYTES = 1 << 16  # of one host array in a key
_PER_CALL = ("out", "addresses", "keep", "borrowed", "waits")


def _check_on_gpu(given: dict[str, Any]) -> tuple[Problem, Operands]:
    """:func:`check` for device arrays, remembering what it found.

    Calls that differ in nothing but addresses (and the seed) share one problem, one template of
    operands and one ``memo``. The key is what the check reads: of a device array its signature, of
    anything on the host type and content. A call with something else, or with a copy, is not kept.
    """
    source = arrays.Source(given["q"])
    key = _key(source, given)
    seed = _seed(given.get("seed", 0))
    found = None if key is None else _MEMO.get(key)
    if found is None:
        problem, x = _check_new_on_gpu(source, given, frozen=key is not None)
        if key is not None and not x.copied:
            _remember(key, (problem, _template(x, *_PER_CALL)))
    else:
        problem, template = found
        problem, x = with_seed(problem, seed), template.__new__(template)
        x.addresses = source.addresses
        x.out, x.keep, x.borrowed, x.waits = given.get("out"), source.keep, source.borrowed, source.waits
    if x.target is not None and arrays.overlaps_input(x):
        x.target, x.memo, x.out_overlaps = None, {}, True
    return problem, x


def _check_new_on_gpu(source: arrays.Source, given: dict[str, Any], frozen: bool) -> tuple[Problem, Operands]:
    """Check a call with device arrays; ``frozen``: what it holds of the host's must never change."""
    problem, x = _check(source, **_metadata(source, given, "q", frozen))
    x.out = given.get("out")
    return problem, x


def _key(source: arrays.Source, given: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """All that a check reads of the arguments but ``seed``, which may change at every step of a training.

    None: there is more to know of one. Notes the device arrays in ``source``.
    """
    addresses, of_cupy = source.addresses, source.array_type
    parts: list[Any] = []
    known_content = True
    for name, value in given.items():
        cls = type(value)
        if cls is of_cupy:
            addresses[name], content = arrays.read_cupy(value)
            parts += name, content
        elif name == "seed":
            continue
        elif cls in _PLAIN:
            parts += name, cls, value
        else:
            content = _content(value) if cls is tuple or cls is list else source.read(name, value) or _content(value)
            if content is None:
                known_content = False
            parts += name, content
    return tuple(parts) if known_content else None


def _metadata(source: arrays.Source, given: dict[str, Any], first: str, frozen: bool) -> dict[str, Any]:
    """The arguments with metadata for device arrays, which must be where the ``first`` is.

    ``frozen``: with copies of the arrays on the host.
    """
    decode = given.get("decode")
    _check_same_device({_called(name, decode): value for name, value in given.items()}, gpu=True, first=first)
    for name in [name for name in source.addresses if name not in source.signatures]:
        source.read(name, given[name])
    source.device, source.originals = source.signatures[first][4], given
    for name, (*_, device, _, _) in source.signatures.items():
        if device != source.device:
            raise ProblemError(
                f"{_called(name, decode)} is on GPU {device} and {first} on GPU {source.device}; "
                "expected all arrays on one device"
            )
    metadata = dict(given)
    for name in (*_DEVICE, *_HOST_TOO):
        if name in source.addresses:
            metadata[name] = source.view(name)
        elif frozen and isinstance(given.get(name), (np.ndarray, masks.Mask)):
            metadata[name] = copy.deepcopy(given[name])
    return metadata


def _content(value: Any) -> Any:
    """Type and content of an argument on the host, hashable; None if that is not all there is to know."""
    cls = type(value)
    if cls in _PLAIN:
        return cls, value
    if cls is list or cls is tuple:
        types = tuple(map(type, value))
        if _PLAIN.issuperset(types):
            return cls, types, tuple(value)
        parts = tuple(map(_content, value))
        return None if None in parts else (cls, parts)
    if isinstance(value, masks.Mask) and cls.__module__ == masks.__name__:
        parts = tuple((name, _content(field)) for name, field in vars(value).items())
        return None if any(content is None for _, content in parts) else (cls, parts)
    if isinstance(value, np.generic) or (
        isinstance(value, np.ndarray) and value.nbytes <= MEMO_BYTES and not value.dtype.hasobject
    ):
        return cls, value.shape, value.dtype, value.tobytes()
    return None


def _window(window: Any) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    rule = "None or a pair (left, right), each an int >= 0 or None"
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise _fail("window", window, rule)
    for side in window:
        if side is not None and (
            isinstance(side, (bool, np.bool_)) or not isinstance(side, (int, np.integer)) or side < 0
        ):
            raise _fail("window", window, rule)
    left, right = (None if side is None else int(side) for side in window)
    return left, right


def _q_offset(value: Any, batch: int, q_lengths: np.ndarray, kv_lengths: np.ndarray) -> np.ndarray:
    if value is None:
        return kv_lengths - q_lengths
    if isinstance(value, (int, np.integer)):
        offset = _integer("q_offset", value, -FARTHEST, FARTHEST + 1, "an int between -2**61 and 2**61")
        return np.full(batch, offset, np.int64)
    if isinstance(value, float):
        raise _fail("q_offset", value, "an int or an int array (B,)")
    return _per_batch("q_offset", value, batch)


def _mask(value: Any, shape: tuple[int, int, int, int]) -> masks.Mask | None:
    if value is None:
        return None
    mask = value if isinstance(value, masks.Mask) else masks.Dense(arrays.as_numpy("mask", value))
    if isinstance(mask, masks.Dense) and isinstance(value, arrays.DeviceView):
        object.__setattr__(mask, "array", mask.array.view(arrays.DeviceView))  # it must not pass for a real one
    mask.check(shape)
    return mask


def _check_side_dtype(name: str, array: np.ndarray, dtype: str) -> None:
    if arrays.name_of(array.dtype) not in (dtype, "float32"):
        wanted = dtype if dtype == "float32" else f"{dtype} or float32"
        raise ProblemError(f"{name} has dtype {array.dtype}; expected {wanted} to go with q")


def _bias(
    source: arrays.Source, value: Any, shape: tuple[int, int, int, int], dtype: str
) -> tuple[np.ndarray | None, tuple[int, ...] | None]:
    if value is None:
        return None, None
    array = arrays.as_numpy("bias", value)
    _check_side_dtype("bias", array, dtype)
    fits = array.ndim <= 4 and all(
        have in (1, want) for have, want in zip(reversed(array.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ProblemError(f"bias has shape {array.shape}; expected broadcastable to (B, Hq, Tq, Tk) = {shape}")
    plain = array if arrays.is_plain(array) else source.copy("bias", array)
    return plain.reshape((1,) * (4 - array.ndim) + array.shape), array.shape


def _alibi(source: arrays.Source, value: Any, batch: int, heads: int) -> np.ndarray | None:
    """Slopes (B, Hq): float64; on a GPU float32 or float64, of any strides."""
    if value is None:
        return None
    array = _host_array("alibi_slopes", value, f"floats of shape ({heads},) or ({batch}, {heads})")
    if array.dtype.kind != "f" and arrays.name_of(array.dtype) != "bfloat16":
        raise ProblemError(f"alibi_slopes has dtype {array.dtype}; expected floats")
    if array.shape not in ((heads,), (batch, heads)):
        raise ProblemError(f"alibi_slopes has shape {array.shape}; expected ({heads},) or ({batch}, {heads})")
    if "alibi_slopes" not in source.addresses:
        return np.ascontiguousarray(np.broadcast_to(array, (batch, heads)), dtype=np.float64)
    wide = array.dtype in (np.float32, np.float64)
    if not (wide and arrays.is_plain(array)):
        array = source.copy("alibi_slopes", array, None if wide else np.float32)
    return np.broadcast_to(array, (batch, heads), subok=True)


def _sinks(source: arrays.Source, value: Any, heads: int, dtype: str) -> np.ndarray | None:
    if value is None:
        return None
    array = arrays.as_numpy("sinks", value)
    _check_side_dtype("sinks", array, dtype)
    if array.shape != (heads,):
        raise ProblemError(f"sinks has shape {array.shape}; expected (Hq,) = ({heads},)")
    if "sinks" in source.addresses and not (arrays.is_plain(array) and array.flags.c_contiguous):
        return source.copy("sinks", array)
    return array


def check_wrt(value: Any, has_bias: bool, has_sinks: bool) -> tuple[str, ...]:
    """Check ``wrt`` and give it back as a tuple; None means the default."""
    if value is None:
        return ("q", "k", "v")
    rule = "a sequence of names out of " + ", ".join(repr(name) for name in GRADIENTS)
    if isinstance(value, str) or not isinstance(value, (tuple, list)):
        raise _fail("wrt", value, rule)
    for name in value:
        if not isinstance(name, str) or name not in GRADIENTS:
            raise _fail("wrt", value, rule)
        if (name == "bias" and not has_bias) or (name == "sinks" and not has_sinks):
            raise ProblemError(f"wrt is {tuple(value)!r}; expected {name}= to be passed when its gradient is asked for")
    if len(set(value)) != len(value):
        raise _fail("wrt", value, "each name once")
    return tuple(value)


def _check_out(
    source: arrays.Source, out: Any, shape: tuple[int, ...], dtype: str, layout: str
) -> np.ndarray | None:
    """Check ``out``; its canonical form if a kernel can write to it where it is."""
    array, given = arrays.as_numpy("out", out), source.originals.get("out", out)
    if source.kind == "jax":
        raise ProblemError("out is given with JAX arrays, which cannot be written to; expected None")
    if arrays.result_kind(given) != source.kind:
        raise ProblemError(f"out is a {type(given).__name__}; expected the kind of array that q is")
    if array.shape != shape:
        raise ProblemError(f"out has shape {array.shape}; expected {shape}")
    if arrays.name_of(array.dtype) != dtype:
        raise ProblemError(f"out has dtype {array.dtype}; expected {dtype} to match q")
    if not array.flags.writeable:
        raise ProblemError("out is read-only; expected a writable array")
    if not arrays.has_own_memory(array):
        raise ProblemError(f"out has strides {array.strides}; expected each of its elements to have its own memory")
    return arrays.heads_first(array, layout) if arrays.is_canonical(array) else None


def _gradients(
    operands: Operands, form: _Canonical, *, dout: Any, o: Any, lse: Any, dlse: Any, dtype: str
) -> None:
    """Check dout, o, lse and dlse and add them to the operands."""
    shape = operands.user_shapes["out"]
    for name, value in (("dout", dout), ("o", o)):
        array = _numpy_float(name, value)
        if arrays.name_of(array.dtype) != dtype:
            raise ProblemError(f"{name} has dtype {array.dtype}; expected {dtype} to match q")
        _expect(name, array.shape, shape, "as out")
        setattr(operands, name, form.take(name, array))
    statistic = "float64" if dtype == "float64" else "float32"
    for name, value in (("lse", lse), ("dlse", dlse)):
        if value is None and name == "dlse":
            continue
        array = _numpy_float(name, value)
        if arrays.name_of(array.dtype) != statistic:
            raise ProblemError(f"{name} has dtype {array.dtype}; expected {statistic} for {dtype} arrays")
        _expect(name, array.shape, operands.user_shapes["lse"], "as lse")
        if not (arrays.is_plain(array) and arrays.can_merge(array, array.ndim - 2)):
            array = form.copy(name, array)
        setattr(operands, name, array.reshape(operands.q.shape[:3]))
    lengths = operands.visibility.q_lengths
    form.read(operands.q_starts, lengths, "dout", "o", "lse", "dlse", packed=operands.packed)


def _wrong_device(backend: str, name: str, device: str) -> Exception:
    from rawflash.backends import unavailable

    return unavailable(backend, f"{name} is a {device} array")


def check_parts(outs: Any, lses: Any) -> tuple[arrays.Source, list[Any], list[Any]]:
    """Check the arguments of ``merge_attention``: outs (..., H, T, d) and lses (..., H, T).

    Returns where they lie, and both as arrays of NumPy, or of CuPy for arrays on a GPU.
    """
    for name, value in (("outs", outs), ("lses", lses)):
        if not isinstance(value, (list, tuple)):
            raise ProblemError(f"{name} is a {type(value).__name__}; expected a list or tuple of arrays")
    if len(outs) == 0 or len(outs) != len(lses):
        raise ProblemError(f"outs has {len(outs)} entries and lses {len(lses)}; expected as many, at least one")
    source, gpu = arrays.Source(outs[0]), arrays.on_gpu(outs[0])

    def read(name: str, part: Any) -> Any:
        if arrays.on_gpu(part) != gpu:
            raise ProblemError(f"{name} has arrays on the GPU and on the CPU; expected all arrays on one device")
        if not gpu:
            return _numpy_float(name, part)
        return _float(name, source.cupy(name, part))

    parts = [read("outs", part) for part in outs]
    logs = [read("lses", part) for part in lses]
    for part, log in zip(parts, logs, strict=True):
        if part.ndim < 1:
            raise ProblemError(f"outs has an entry of shape {part.shape}; expected (..., H, T, d)")
        if part.shape != parts[0].shape or part.dtype != parts[0].dtype:
            raise ProblemError(
                f"outs has an entry {part.dtype} {part.shape}; expected {parts[0].dtype} {parts[0].shape}"
            )
        if log.shape != part.shape[:-1]:
            raise ProblemError(f"lses has an entry of shape {log.shape}; expected {part.shape[:-1]} to match outs")
    return source, parts, logs


def check_dropout(p: Any, seed: Any, shape: Any) -> tuple[float, int, tuple[int, int, int, int]]:
    """Check the arguments of ``dropout_mask``."""
    rule = "four ints (B, Hq, Tq, Tk), each >= 0"
    try:
        given = tuple(shape)
    except TypeError:  # a number, an array without axes
        given = ()
    if len(given) != 4:
        raise _fail("shape", shape, rule)
    sizes = tuple(_integer("shape", n, 0, None, rule) for n in given)
    if math.prod(sizes) >= FARTHEST:
        raise _fail("shape", shape, "fewer than 2**61 elements")
    return _probability("p", p), _seed(seed), (sizes[0], sizes[1], sizes[2], sizes[3])


def check_append(
    k_cache: Any, v_cache: Any, k_new: Any, v_new: Any, kv_lengths: Any, block_table: Any, layout: Any
) -> tuple[arrays.Source, Append]:
    """Check the arguments of ``append_kv``.

    Returns where they lie and what is to be written where. On a GPU calls that differ in addresses only share that.
    """
    source = arrays.Source(k_cache)
    given = dict(
        k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new, kv_lengths=kv_lengths, block_table=block_table,
        layout=layout,
    )  # fmt: skip
    if not arrays.on_gpu(k_cache):
        _check_same_device(given, gpu=False, first="k_cache")
        return source, _check_append(source, **given)
    key = _key(source, given)
    x = None if key is None else _MEMO.get(key)
    if x is None:
        x = _check_append(source, **_metadata(source, given, "k_cache", frozen=key is not None))
        if key is not None and not source.copied:
            _remember(key, x)
    source.device = x.device
    return source, x


def _check_append(source: arrays.Source, *, layout: Any, kv_lengths: Any, block_table: Any, **matrices: Any) -> Append:
    """:func:`check_append` with the device arrays replaced by their metadata."""
    _choice("layout", layout, LAYOUTS)
    given: dict[str, Any] = {}
    for name, value in matrices.items():
        array = given[name] = _numpy_float(name, value)
        if arrays.name_of(array.dtype) != arrays.name_of(given["k_cache"].dtype):
            raise ProblemError(f"{name} has dtype {array.dtype}; expected {given['k_cache'].dtype} to match k_cache")
    names = "BHTd" if layout == "bhtd" else "BTHd"

    def shape(**sizes: int) -> tuple[int | None, ...]:
        return tuple(sizes.get(axis) for axis in names)

    def sizes_of(name: str, *axes: str) -> dict[str, int]:
        return {axis: given[name].shape[names.index(axis)] for axis in axes}

    if given["k_cache"].ndim != 4:
        raise ProblemError(f"k_cache has shape {given['k_cache'].shape}; expected four axes")
    _expect("v_cache", given["v_cache"].shape, shape(**sizes_of("k_cache", "B", "H", "T")), "to match k_cache")
    batch = sizes_of("k_cache", "B") if block_table is None else {}
    _expect("k_new", given["k_new"].shape, shape(**batch, **sizes_of("k_cache", "H", "d")), "to match k_cache")
    _expect("v_new", given["v_new"].shape, shape(**sizes_of("k_new", "B", "H", "T"), **sizes_of("v_cache", "d")),
            "to match k_new and v_cache")  # fmt: skip
    for name in ("k_cache", "v_cache"):
        _check_cache(source, name, matrices[name], given[name])
    if source.device is not None:
        for name in ("k_new", "v_new"):
            if not arrays.is_plain(given[name]):
                given[name] = source.copy(name, given[name])
    views: dict[str, Any] = {name: arrays.heads_first(array, layout) for name, array in given.items()}
    x = Append(**views, kv_lengths=kv_lengths)
    x.device, (blocks, _, page, _), (sequences, _, rows, _) = source.device, x.k_cache.shape, x.k_new.shape
    capacity = page
    if block_table is not None:
        x.block_table = _block_table(source, block_table, sequences, page, "k_new")
        capacity = page * x.block_table.shape[1]
    if _on_device(source, "kv_lengths", kv_lengths, (sequences,)):
        x.kv_lengths = source.views["kv_lengths"]
        return x
    x.kv_lengths = lengths = _per_batch("kv_lengths", kv_lengths, sequences)
    if _beyond(lengths, 0, capacity - rows):
        raise ProblemError(
            f"kv_lengths is {lengths.tolist()}; expected entries n with 0 <= n and n + {rows} <= {capacity}: "
            f"{rows} keys are appended and a sequence has room for {capacity}"
        )
    if "block_table" not in source.addresses:
        x.home = _home(x.block_table, lengths, rows, blocks, page)
    return x


def _check_cache(source: arrays.Source, name: str, value: Any, array: np.ndarray) -> None:
    """Check that new keys can be written to a cache where it is."""
    given = source.originals.get(name, value)
    if arrays.kind_of(given) == "jax":
        raise ProblemError(f"{name} is a JAX array; expected one that can be written to")
    if arrays.result_kind(given) != source.kind:
        raise ProblemError(f"{name} is a {type(given).__name__}; expected the kind of array that k_cache is")
    if not array.flags.writeable:
        raise ProblemError(f"{name} is read-only; expected a writable array")
    if not arrays.has_own_memory(array):
        raise ProblemError(f"{name} has strides {array.strides}; expected each of its elements to have its own memory")
    if source.device is not None and not arrays.is_plain(array):
        raise ProblemError(f"{name} is misaligned or of the other byte order; expected an array that kernels can write")


def _home(
    table: np.ndarray | None, lengths: np.ndarray, rows: int, blocks: int, page: int
) -> tuple[np.ndarray, np.ndarray]:
    """Block and row (B, Tn) of each new key, each its own."""
    positions = lengths[:, None] + np.arange(rows)
    if table is None:
        return np.broadcast_to(np.arange(len(lengths))[:, None], positions.shape), positions
    block, row = np.take_along_axis(table, positions // page, axis=1), positions % page
    wrong = (block < 0) | (block >= blocks)
    if wrong.any():
        b, t = (int(index[0]) for index in np.nonzero(wrong))
        n = int(positions[b, t]) // page
        raise ProblemError(
            f"block_table has {int(table[b, n])} at ({b}, {n}), where kv_lengths says that keys are appended; "
            f"expected a block between 0 and {blocks - 1}"
        )
    places, times = np.unique(block * page + row, return_counts=True)
    if (times > 1).any():
        block_of_two, row_of_two = divmod(int(places[times > 1][0]), page)
        raise ProblemError(
            f"block_table leads to row {row_of_two} of block {block_of_two} more than once; "
            "expected a row of its own for each appended key"
        )
    return block, row
