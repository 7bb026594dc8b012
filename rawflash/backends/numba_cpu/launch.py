"""What a kernel reads, and the threads that run it.

A kernel is an ``@njit(nogil=True)`` function that takes pieces of work from a shared counter until
none is left. Several Python threads run it side by side: nothing is compiled for a threading layer,
concurrent callers are safe, and a piece of work gives the same bits on whichever thread it lands.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np

from rawflash import masks, philox
from rawflash.arrays import name_of
from rawflash.backends.numba_cpu import numerics
from rawflash.problem import Operands, Problem
from rawflash.tiles import Tiles

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, and its kernels are nothing but compiled code")

STORAGE = {
    "float32": numerics.FLOAT32,
    "float64": numerics.FLOAT64,
    "float16": numerics.FLOAT16,
    "bfloat16": numerics.BFLOAT16,
}
ABSENT = -1  # storage code of an operand that was not passed


class View(NamedTuple):
    """A user array by address: element (b, h, t, x) lies ``b * batch + h * head + t * row + x`` elements on."""

    address: int
    code: int
    itemsize: int
    batch: int
    head: int
    row: int


class Scores(NamedTuple):
    """An array over (b, h, i, j) by address and *byte* strides, 0 along axes that broadcast."""

    address: int
    code: int
    b: int
    h: int
    i: int
    j: int


class Sizes(NamedTuple):
    """Extents and integer options of a call."""

    B: int
    Hq: int
    Hkv: int
    Tq: int
    Tk: int
    d: int
    dv: int
    br: int
    bc: int
    band_lower: int
    band_upper: int
    keep_threshold: int  # dropout keeps words >= this; 0 = no dropout
    seed_low: int
    seed_high: int
    program_depth: int  # booleans that the mask program holds at once; 0 = no program


class Reals(NamedTuple):
    """Real options of a call."""

    scale: float
    softcap: float  # 0 = none
    keep_scale: float  # 1 / (1 - dropout)


class Call(NamedTuple):
    """Everything that the kernels read beside q, k, v; see :func:`describe`."""

    size: Sizes
    real: Reals
    q: View
    k: View
    v: View
    bias: Scores
    slopes: np.ndarray  # float64 (B, Hq); (0, 0) when there is no ALiBi
    sinks: np.ndarray  # float64 (Hq,); (0,) when there are none
    q_starts: np.ndarray
    k_starts: np.ndarray
    q_offset: np.ndarray
    q_lengths: np.ndarray
    kv_lengths: np.ndarray
    program: np.ndarray  # int64 (instructions, columns), the mask in postfix order


def view(array: np.ndarray | None) -> View:
    """A canonical array ``(S, H, T, width)`` by address; with S = 1 the batch index is ignored."""
    assert array is not None  # the validator has seen to dout and o
    batch, head, row, _ = (stride // array.itemsize for stride in array.strides)
    slots = array.shape[0]
    return View(
        array.ctypes.data, STORAGE[name_of(array.dtype)], array.itemsize, batch if slots > 1 else 0, head, row
    )


def _scores(array: np.ndarray | None) -> Scores:
    if array is None:
        return Scores(0, ABSENT, 0, 0, 0, 0)
    strides = (s if n > 1 else 0 for s, n in zip(array.strides, array.shape, strict=True))
    return Scores(array.ctypes.data, STORAGE[name_of(array.dtype)], *strides)


PROGRAM_COLUMNS = 8


def _program(mask: masks.Mask | None) -> tuple[np.ndarray, int, list[np.ndarray]]:
    """The mask as rows ``[code, operands..., addresses...]``, its stack depth, and the arrays to keep alive."""
    if mask is None:
        return np.zeros((0, PROGRAM_COLUMNS), np.int64), 0, []
    rows: list[list[int]] = []
    keep: list[np.ndarray] = []
    depth = deepest = 0
    for step in mask.program():
        row = [step.code, *step.operands, *(array.ctypes.data for array in step.arrays)]
        rows.append(row + [0] * (PROGRAM_COLUMNS - len(row)))
        keep.extend(step.arrays)
        depth += -1 if step.code in (masks.OP_AND, masks.OP_OR) else 1
        deepest = max(deepest, depth)
    return np.array(rows, np.int64), deepest, keep


def describe(problem: Problem, tiles: Tiles, x: Operands) -> tuple[Call, list[np.ndarray]]:
    """The record that kernels read, and arrays that must outlive the launch."""
    program, depth, keep = _program(x.visibility.mask)
    lower, upper = x.visibility.band.bounds()
    size = Sizes(
        problem.B, problem.Hq, problem.Hkv, problem.Tq, problem.Tk, problem.d, problem.dv, tiles.br, tiles.bc,
        lower, upper, philox.threshold(problem.dropout), problem.seed & 0xFFFFFFFF, problem.seed >> 32, depth,
    )  # fmt: skip
    call = Call(
        size=size,
        real=Reals(problem.scale, problem.softcap or 0.0, 1.0 / (1.0 - problem.dropout)),
        q=view(x.q), k=view(x.k), v=view(x.v),
        bias=_scores(x.bias),
        slopes=np.zeros((0, 0)) if x.alibi_slopes is None else x.alibi_slopes.copy(),
        sinks=np.zeros(0) if x.sinks is None else x.sinks.astype(np.float64),
        # Copies: a read-only array of the user's would be another type to Numba, and compile all again.
        q_starts=x.q_starts.copy(), k_starts=x.k_starts.copy(), q_offset=x.visibility.q_offset.copy(),
        q_lengths=x.visibility.q_lengths.copy(), kv_lengths=x.visibility.kv_lengths.copy(),
        program=program,
    )  # fmt: skip
    return call, keep


_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()
#: A thread holds one while it runs a kernel: calls from many Python threads share the cores, and never crowd them.
_cores = threading.Semaphore(max(1, numba.config.NUMBA_NUM_THREADS))


def _threads() -> ThreadPoolExecutor:
    global _pool
    from concurrent.futures import ThreadPoolExecutor  # refused where the first call comes as Python ends

    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(1, numba.config.NUMBA_NUM_THREADS), "rawflash")
        return _pool


def _forget_pool() -> None:
    """A forked child has the pool's object but none of its threads, and of what they hold it gets nothing back."""
    global _pool, _pool_lock, _cores
    _pool, _pool_lock = None, threading.Lock()
    _cores = threading.Semaphore(max(1, numba.config.NUMBA_NUM_THREADS))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def run(kernel: Callable[..., None], pieces: int, *arguments: Any) -> None:
    """Run ``kernel(counter, worker, *arguments)`` on as many threads as Numba may use.

    Each thread claims pieces ``0 .. pieces - 1`` from ``counter[0]`` until none is left. ``worker``
    numbers the threads from 0. Of all calls together no more threads run than NUMBA_NUM_THREADS: the caller's waits for
    a core, the others find one free or leave their share to it.
    """
    workers = min(numba.get_num_threads(), pieces)
    if workers <= 0:
        return
    cores, counter = _cores, np.zeros(1, np.int64)

    def help_out(n: int) -> None:
        if cores.acquire(blocking=False):
            try:
                kernel(counter, n, *arguments)
            finally:
                cores.release()

    others = []
    with suppress(RuntimeError):  # no thread can be had, as when Python is about to end: the caller does it all
        for n in range(1, workers):
            others.append(_threads().submit(help_out, n))
    try:
        with cores:
            kernel(counter, 0, *arguments)
    finally:
        for other in others:
            if not other.cancel():  # a busy pool never started it, and nothing is left to do
                other.result()


#: Every kernel that has been loaded, by name: where its code is kept and whether it was compiled can be asked.
KERNELS: dict[str, Any] = {}


def compiled(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Compile a kernel on its first call; keep the machine code on disk where a folder can be written.

    ``name`` tells the kernel of one compute dtype from that of the other. Each then has a cache file of its own
    with one signature in it, so processes that compile both at once do not write over each other's entries.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        function.__name__ = function.__qualname__ = name
        options = {"nogil": True, "error_model": "numpy"}
        try:
            KERNELS[name] = numba.njit(**options, cache=True)(function)
        except RuntimeError:  # no folder for the cache: compile in every process
            KERNELS[name] = numba.njit(**options)(function)
        return KERNELS[name]

    return decorate


def for_each_dtype(make: Callable[[str, str], Any]) -> dict[str, Any]:
    """``make(stamp, dtype)`` for both compute dtypes; ``stamp`` is a digest of the sources.

    Numba's disk cache looks at the file of a kernel but not at the files of the functions it
    calls; kernels close over the stamp, which puts it into their cache key.
    """
    stamp = _source_stamp()
    return {dtype: make(stamp, dtype) for dtype in ("float32", "float64")}


def for_each_variant(make: Callable[[str, str, bool], Any]) -> dict[tuple[str, bool], Any]:
    """``make(stamp, dtype, plain)`` for both compute dtypes, with and without code for the options of `is_plain`.

    Options are most of a kernel, and so of the time that it takes to compile: calls without them do not wait for it.
    """
    stamp = _source_stamp()
    return {(dtype, plain): make(stamp, dtype, plain) for dtype in ("float32", "float64") for plain in (True, False)}


def is_plain(problem: Problem, x: Operands) -> bool:
    """No option touches a score: masking by band and lengths alone, and a scale that is a factor of exponents."""
    touched = problem.softcap or x.bias is not None or x.alibi_slopes is not None or problem.dropout
    return not touched and x.visibility.mask is None and PLAIN_SCALES[0] < problem.scale < PLAIN_SCALES[1]


PLAIN_SCALES = 1e-20, 1e20  # the maximum of scores is that of scaled ones, and no constant of exp overflows


def _source_stamp() -> str:
    """A digest of this folder's sources and the register tile."""
    digest = hashlib.sha256(repr((numba.__version__, _register_tile())).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _register_tile() -> Any:
    from rawflash.backends.numba_cpu import microkernel

    return microkernel.SHAPE


def contiguous_statistic(problem: Problem, statistic: np.ndarray | None, x: Operands) -> np.ndarray:
    """lse or dlse as a contiguous writable array (S, Hq, Tq) of the compute dtype; zeros when it was not passed."""
    if statistic is None:
        return np.zeros(x.q.shape[:3], problem.compute_dtype)
    return np.require(statistic, problem.compute_dtype, ["C", "A", "W"])


@np.errstate(all="ignore")
def sink_gradient(problem: Problem, x: Operands, lse: np.ndarray, dlse: np.ndarray) -> np.ndarray:
    """dsinks (Hq,) = sum over rows of P_sink * (dlse - gamma), with P_sink = exp(sink - lse).

    A sink adds to the denominator and to no value, so its dP is 0 (Chu, Liu and Lin 2026, eq. 21).
    """
    assert x.sinks is not None and x.dout is not None and x.o is not None
    sinks = x.sinks.astype(np.float64)
    total = np.zeros(problem.Hq)
    for b in range(problem.B):
        slot = 0 if x.packed else b
        rows = slice(x.q_starts[b], x.q_starts[b] + x.visibility.q_lengths[b])
        for h, sink in enumerate(sinks):
            if sink == -np.inf:  # no sink; a row without keys would give inf - inf
                continue
            weight = np.exp(sink - lse[slot, h, rows].astype(np.float64))
            dO, O = (x.rows(array, b, h, "q").astype(problem.compute_dtype) for array in (x.dout, x.o))
            gamma = np.einsum("ix,ix->i", dO, O, dtype=np.float64)
            total[h] += np.dot(weight, dlse[slot, h, rows] - gamma)
    return total


def bias_gradient_target(
    problem: Problem, dbias: np.ndarray | None, dtype: np.dtype
) -> tuple[np.ndarray, tuple[int, int, int, int], str]:
    """The bias gradient as a flat array and its element strides, 0 along broadcast axes.

    The third value says what must stay on one thread: "" when no two (head, key block) pieces share
    an element, "heads" when the bias is broadcast over batch or heads, "keys" when over keys too.
    """
    if dbias is None:
        return np.zeros(0, dtype), (0, 0, 0, 0), ""
    assert dbias.flags.c_contiguous
    over_b, over_h, over_i, over_j = (
        s // dbias.itemsize if n > 1 else 0 for s, n in zip(dbias.strides, dbias.shape, strict=True)
    )
    extents = (problem.B, problem.Hq, problem.Tq, problem.Tk)
    shared = [extent > 1 and n == 1 for extent, n in zip(extents, dbias.shape, strict=True)]
    alone = "keys" if shared[3] else "heads" if shared[0] or shared[1] else ""
    return dbias.reshape(-1), (over_b, over_h, over_i, over_j), alone


def shares_of_a_head(problem: Problem, tiles: Tiles, alone: str) -> tuple[int, int]:
    """How many shares the K/V blocks of a head are dealt into, and how many heads make one piece of work.

    One share a head when there are heads enough for every thread; each further share costs another sum
    of the size of dQ.
    """
    heads = problem.B * problem.Hkv
    blocks = max(1, -(-problem.Tk // tiles.bc))
    threads = numba.get_num_threads()
    if alone == "keys":
        return 1, max(heads, 1)
    if alone == "heads":
        return min(threads, blocks), max(heads, 1)
    if heads >= 2 * threads or heads % threads == 0:
        return 1, 1
    return min(threads, blocks), 1
