"""From a problem to the preamble of its kernels, and from the arrays of a call to the one argument that they take.

A kernel file is compiled for one :class:`~rawflash.problem.Problem`, as far as its text depends on it
(:func:`preamble`). Sizes, strides and addresses are data: the words of a ``Call`` (call.cuh), most of which stay the
same from call to call. :class:`Launcher` keeps them, and puts in the addresses.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rawflash import masks, philox
from rawflash.arrays import Target, capturing, hold, keep_for_graph
from rawflash.backends.cupy_raw import compile, tensor_map
from rawflash.errors import BackendError
from rawflash.hardware import chip_of
from rawflash.problem import FARTHEST, Operands, Problem
from rawflash.tiling import (DOUBLE, FEW_MMA, MMA, MMA_DEPTH, PIECES, SIMT, SPLIT, Tiles, pitches, plan_tiles,
                             scale_later)  # fmt: skip

try:
    from numpy.lib.array_utils import byte_bounds
except ImportError:  # NumPy 1
    from numpy import byte_bounds  # type: ignore[attr-defined,no-redef]

THREADS = 256  # of a block, unless the plan says how many
WARP = 32
SIDE = 16  # threads of a row, in kernels that take rows one by one
DELTA_ROWS = 64  # of a block of row_deltas
CLEARING = 512  # blocks of a grid that clears padding of packed sequences, of which most calls have none
VECTOR_BYTES = 16
DEPTHS = {SPLIT: 16, DOUBLE: 8}  # products that a tensor core sums at a time (DEPTH in mma/)
MOST_STRIDING = 4096  # blocks of a grid that strides
LARGEST_GRID = 2**31 - 1
BOUNDED = "RAWFLASH_BOUNDED"  # see preamble
MOST_MAPS = 64  # sets of tensor maps that a launcher keeps, by the addresses of the call
SPLIT_ROWS = 64  # of a thread block of mma/split_inputs.cu
SPLIT_CHUNK, SPLIT_CHUNK_BYTES = 8, 48  # numbers of a row, and bytes that their parts take
SPARE = 256  # sets of counters that are made at a time: a graph of a model has a call for each layer
# Constants that the text of a kernel is chosen by; the others are numbers in it.
SWITCHES = ("PIECES", "SPLIT", "P_STAYS", "TYPE", "BIAS_TYPE", "SLOPE_TYPE", "SINK_TYPE", "ALIGNED", "PACKED", "BAND",
            "BIAS", "BIAS_OVER_ROWS", "BIAS_OVER_KEYS", "ALIBI", "SOFTCAP", "SINKS", "DROPOUT", "DLSE",
            "DETERMINISTIC", "PAIRED")  # fmt: skip
MASK_WORDS = 96  # operands and addresses of a mask object that a call has room for
TYPES = {"float16": "FLOAT16", "bfloat16": "BFLOAT16", "float32": "FLOAT32", "float64": "FLOAT64"}


def _fields() -> list[str]:
    """The words of ``Call`` in call.cuh, in order."""
    matrices = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")
    statistics = ("lse", "dlse", "delta", "m", "l")
    words = [f"{name}.{part}" for name in (*matrices, *statistics) for part in ("data", "batch", "head", "row")]
    words += ["sums", *(f"bias.{part}" for part in ("data", "b", "h", "i", "j"))]
    words += ["dbias", "bias_b", "bias_h", "bias_i", "bias_j", "slopes", "slopes_b", "slopes_h", "sinks", "sinks_h"]
    words += ["dsinks", "counters", "again"]
    tables = ("cu_seqlens_q", "cu_seqlens_k", "q_lengths", "kv_lengths", "q_offset")
    words += [f"{name}.{part}" for name in tables for part in ("data", "bytes")]
    words += ["block_table.data", "block_table.bytes", "table_row", "cache_blocks"]
    words += [f"mask.{n}" for n in range(MASK_WORDS)]
    words += ["offset", "offset_given", "B", "Hq", "Hkv", "Tq", "Tk", "rows_q", "rows_k", "blocks"]
    words += ["parts", "part_keys", "section", "ahead", "behind"]
    words += ["by_section", "by_heads", "by_last_heads", "by_key_heads", "group", "at_once"]
    words += ["whole", "halved", "share"]
    words += ["band_lower", "band_upper", "keep_threshold", "seed", "scale", "softcap", "keep_scale", "scale_log2"]
    return words


def divisor(n: int) -> int:
    """What divides by ``n`` in a kernel (``divided`` in call.cuh), 1 <= n < 2^31: a factor of 32 bits, and a shift.

    For m = ceil(2^(31 + s) / n) and 2^s >= n, floor(x m / 2^(31 + s)) is floor(x / n) where x < 2^31, since m n is
    less than n, hence at most 2^s, too large.
    """
    shift = (n - 1).bit_length()
    return shift << 32 | -(-(1 << 31 + shift) // n)


FIELDS = _fields()
_WORD = {name: n for n, name in enumerate(FIELDS)}
_SEED = _WORD["seed"]
_ADDRESS = {"alibi_slopes": "slopes", "sinks": "sinks"}  # arguments whose address is not in a word "name.data"
_ELSEWHERE = ("out", "mask")  # arguments whose address comes another way


def _double(x: float) -> int:
    """The bits of a float64 as an integer."""
    return struct.unpack("q", struct.pack("d", x))[0]


def _float(x: float) -> int:
    """The bits of a float32 as those of an integer that come first."""
    return int(struct.unpack("q", struct.pack("f4x", x))[0])


def constants(problem: Problem, tiles: Tiles, *, aligned: bool, side_dtypes: dict[str, str],
              dlse: bool = False, table_bytes: int = 8, maps: int = 0) -> dict[str, Any]:  # fmt: skip
    """What the text of a kernel depends on, but for the mask: switches, types and numbers by name.

    Parameters
    ----------
    problem : Problem
    tiles : Tiles
    aligned : bool
        All rows of all matrices start at multiples of 16 bytes, and have whole vectors of 16 bytes.
    side_dtypes : dict of str to str
        dtype names of "bias", "alibi_slopes" and "sinks", for those that the call has.
    dlse : bool
        The backward pass was given dlse.
    table_bytes : int
        Of an entry of the block table.
    maps : int
        Tensor maps behind the words of a call.
    """
    item = np.dtype(problem.compute_dtype).itemsize
    depth = DEPTHS.get(tiles.family, VECTOR_BYTES // item)
    to_d, to_dv, to_bc = pitches(problem, tiles.family, tiles.bc)
    bias = problem.bias
    return {
        "PIECES": int(tiles.family in PIECES),
        "SPLIT": int(tiles.family == SPLIT),
        "TYPE": TYPES[problem.dtype],
        "BIAS_TYPE": TYPES[side_dtypes.get("bias", "float32")],
        "SLOPE_TYPE": TYPES[side_dtypes.get("alibi_slopes", "float64")],
        "SINK_TYPE": TYPES[side_dtypes.get("sinks", "float32")],
        "ALIGNED": int(aligned),
        "PACKED": int(problem.varlen),
        "BAND": int(problem.has_band),
        "BIAS": int(bias is not None),
        "BIAS_OVER_ROWS": int(bias is not None and bias[2] == 1),
        "BIAS_OVER_KEYS": int(bias is not None and bias[3] == 1),
        "ALIBI": int(problem.alibi),
        "SOFTCAP": int(problem.softcap is not None),
        "SINKS": int(problem.sinks),
        "DROPOUT": int(problem.dropout > 0),
        "DLSE": int(dlse),
        "DETERMINISTIC": int(problem.deterministic),
    } | {
        "BR": tiles.br,
        "BC": tiles.bc,
        "THREADS": tiles.threads or THREADS,
        "DELTA_ROWS": DELTA_ROWS,
        "D": problem.d,
        "DV": problem.dv,
        "PAGE": problem.page,
        "TABLE_BYTES": table_bytes,
        "HALVES": 1 if tiles.family == FEW_MMA and problem.group * problem.Tq <= MMA_DEPTH // 2 else 2,
        "SCALE_LATER": int(scale_later(problem)),
        "P_STAYS": 0,
        "DEPTH_D": blocks_of(problem.d, depth) * depth,
        "DEPTH_V": blocks_of(problem.dv, depth) * depth,
        "PITCH_D": to_d,
        "PITCH_V": to_dv,
        "PITCH_S": to_bc,
        "TILE_BYTES": tiles.smem_bytes,
        "CALL_WORDS": len(FIELDS),
        "MAPS": maps,
        "MASK_WORDS": MASK_WORDS,
    } | dict(tiles.constants)


def preamble(problem: Problem, tiles: Tiles, *, mask: Any = None, **more: Any) -> str:
    """What the ``.cu`` files take as given: the :func:`constants`, and the text of the mask.

    In the environment, RAWFLASH_BOUNDED=1 makes kernels that wait for copies give up after a while, with an error,
    instead of waiting for ever: for debugging.
    """
    lines = ["#define BOUNDED"] if os.environ.get(BOUNDED) == "1" else []
    for name, value in constants(problem, tiles, **more).items():
        lines.append(f"#define {name} {value}" if name in SWITCHES else f"constexpr int {name} = {value};")
    lines += [f"constexpr long long FARTHEST = {FARTHEST}ll;", '#include "visibility.cuh"', masks.cuda_text(mask)]
    return "\n".join(lines) + "\n"


class Uploads:
    """Device copies of arrays of the host, for calls on any stream; they live as long as this."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.uploaded: tuple[int, Any] | None = None  # on which stream, and when that was done

    def add(self, values: np.ndarray) -> int:
        """Copy an array, at the same strides; the address of the copy."""
        import cupy

        low, high = byte_bounds(values)
        octets = np.zeros(max(high - low, 1), np.uint8)
        if values.size:
            ctypes.memmove(octets.ctypes.data, low, high - low)
        copy = cupy.asarray(octets)
        event = cupy.cuda.Event(disable_timing=True)
        event.record()
        self.kept.append(copy)
        self.uploaded = cupy.cuda.get_current_stream().ptr, event
        return int(copy.data.ptr + values.ctypes.data - low)

    def used(self) -> None:
        """A kernel is about to read them: on another stream than theirs it waits for them, and they outlive it.

        Not in a capture, which may not wait for what is outside of it: the call before it has been waited for.
        """
        if self.uploaded is None:
            return
        import cupy

        keep_for_graph(self)
        stream, event = self.uploaded
        here = cupy.cuda.get_current_stream()
        if stream != here.ptr and not capturing():
            here.wait_event(event)
            hold(self.kept)


class Launcher:
    """The kernels of one file for calls that differ in addresses and seed only.

    Parameters
    ----------
    file : str
        Under ``cuda/``.
    problem, tiles, x
        Of the first of these calls.
    written : dict of str to Target
        What the kernels write, by the name of its matrix or statistic in call.cuh.
    fixed : dict of str to int
        Further words that are the same for all calls.
    boxes : sequence of tensor_map.Box
        Matrices that the kernels copy by tensor maps: ``map[n]`` of their argument is the n-th.

    Notes
    -----
    The kernels hold everything else that decides their text; a launcher is kept in ``x.memo``.
    """

    def __init__(
        self, file: str, problem: Problem, tiles: Tiles, x: Operands, written: dict[str, Any], fixed: dict[str, int],
        boxes: Sequence[tensor_map.Box] = (),
    ) -> None:  # fmt: skip
        self.problem, self.threads = problem, tiles.threads or THREADS
        matrices = {name: getattr(x, name) for name in ("q", "k", "v", "o", "dout") if getattr(x, name) is not None}
        statistics = {name: getattr(x, name) for name in ("lse", "dlse") if getattr(x, name) is not None}
        for name, target in written.items():
            (statistics if name == "lse" else matrices)[name] = target.view
        side = {"bias": x.bias, "alibi_slopes": x.alibi_slopes, "sinks": x.sinks}
        dtypes = {name: array.dtype.name for name, array in side.items() if array is not None}
        words = mask_words(problem, x.visibility.mask)
        if len(words) > MASK_WORDS:
            raise BackendError(
                f"mask {problem.mask} has {len(words)} numbers and arrays; backend {problem.backend!r} has room for "
                f"{MASK_WORDS}: combine its parts into one boolean array"
            )
        assert x.device is not None
        found = dict(aligned=_aligned(matrices.values()), side_dtypes=dtypes, dlse=x.dlse is not None, maps=len(boxes))
        if x.block_table is not None:
            found["table_bytes"] = x.block_table.itemsize
        self.module = load(file, problem, tiles, x.visibility.mask, len(words), x.device, **found)
        self.functions: dict[str, Any] = {}
        self.uploads = Uploads()
        self.counts: dict[tuple[int, int], Any] = {}  # by stream and thread
        self.spare: dict[tuple[int, int], list[Any]] = {}
        self.template = np.zeros(len(FIELDS), np.int64)
        # Addresses that change from call to call: the argument's name and its word.
        arguments = [name for name in x.addresses if name not in _ELSEWHERE]
        self.moving = [(name, _WORD[_ADDRESS.get(name, f"{name}.data")]) for name in arguments]
        self._put(**fixed)
        self._describe(problem, x, matrices, statistics)
        self._mask(x, words)
        self.words = array("q", self.template.tobytes())  # its items are set in a fifth of the time of NumPy's
        self.boxes = [
            (_WORD[f"{box.name}.data"], tensor_map.geometry(matrices[box.name], problem.dtype, box.rows))
            for box in boxes
        ]
        self.maps: dict[tuple[int, ...], array[int]] = {}

    def _put(self, **values: int) -> None:
        for name, value in values.items():
            self.template[_WORD[name]] = value

    def _describe(
        self, problem: Problem, x: Operands, matrices: dict[str, np.ndarray], statistics: dict[str, np.ndarray]
    ) -> None:
        """Fill in the words that are the same for all calls of this launcher."""
        rows_q, rows_k = x.q.shape[2], x.k.shape[2]
        for name in ("delta", "m", "l"):  # workspaces
            for part, stride in zip(("batch", "head", "row"), (problem.Hq * rows_q, rows_q, 1), strict=True):
                self.template[_WORD[f"{name}.{part}"]] = stride
        for name, view in (matrices | statistics).items():
            strides = [stride // view.itemsize for stride in view.strides[:3]]
            for part, stride in zip(("batch", "head", "row"), strides, strict=True):
                self.template[_WORD[f"{name}.{part}"]] = stride
        lower, upper = problem.band.bounds()
        self._put(
            B=problem.B, Hq=problem.Hq, Hkv=problem.Hkv, Tq=problem.Tq, Tk=problem.Tk, rows_q=rows_q, rows_k=rows_k,
            band_lower=lower, band_upper=upper, keep_threshold=philox.threshold(problem.dropout),
            scale=_double(problem.scale), softcap=_double(problem.softcap or 0.0),
            keep_scale=_double(1.0 / (1.0 - problem.dropout)), scale_log2=_float(problem.scale * math.log2(math.e)),
        )  # fmt: skip
        if x.bias is not None:
            strides = [s // x.bias.itemsize if n > 1 else 0 for s, n in zip(x.bias.strides, x.bias.shape, strict=True)]
            for axis, stride, extent in zip("bhij", strides, x.bias.shape, strict=True):
                self.template[_WORD[f"bias.{axis}"]] = stride
                self.template[_WORD[f"bias_{axis}"]] = extent
        if x.sinks is not None:
            self._put(sinks_h=x.sinks.strides[0] // x.sinks.itemsize)
        if x.alibi_slopes is not None:
            slopes = x.alibi_slopes
            over_b = slopes.strides[0] // slopes.itemsize if slopes.ndim == 2 and slopes.shape[0] > 1 else 0
            self._put(slopes_b=over_b, slopes_h=slopes.strides[-1] // slopes.itemsize)
            if "alibi_slopes" not in x.addresses:
                self._put(slopes=self.uploads.add(slopes))
        self._tables(problem, x)

    def _tables(self, problem: Problem, x: Operands) -> None:
        """Lengths, offsets and starts: on the device already, uploaded, or not needed."""
        for name in ("cu_seqlens_q", "cu_seqlens_k", "q_lengths", "kv_lengths", "q_offset", "block_table"):
            if name in x.addresses:
                self.template[_WORD[f"{name}.bytes"]] = x.views[name].itemsize
        if x.block_table is not None:
            self._put(table_row=x.block_table.shape[1], cache_blocks=x.k.shape[0])
            if "block_table" not in x.addresses:
                self._table("block_table", x.block_table)
        v = x.visibility
        if problem.varlen:
            for name, starts, lengths in (
                ("cu_seqlens_q", x.q_starts, v.q_lengths),
                ("cu_seqlens_k", x.k_starts, v.kv_lengths),
            ):
                if name not in x.addresses:
                    self._table(name, np.append(starts, starts[-1:] + lengths[-1:]))
        else:
            for name, lengths, longest in (
                ("q_lengths", v.q_lengths, problem.Tq),
                ("kv_lengths", v.kv_lengths, problem.Tk),
            ):
                if name not in x.addresses and (lengths != longest).any():
                    self._table(name, lengths)
        if "q_offset" not in x.addresses and x.offset_given:
            if (v.q_offset == v.q_offset[:1]).all():
                self._put(offset_given=1, offset=int(v.q_offset[0]) if len(v.q_offset) else 0)
            else:
                self._table("q_offset", v.q_offset)

    def _table(self, name: str, values: np.ndarray) -> None:
        self.template[_WORD[f"{name}.data"]] = self.uploads.add(values)
        self.template[_WORD[f"{name}.bytes"]] = values.itemsize

    def _mask(self, x: Operands, words: list[int | np.ndarray]) -> None:
        """The words of the mask; its arrays are on the device already (a boolean array) or uploaded."""
        for n, word in enumerate(words):
            if isinstance(word, np.ndarray) and "mask" in x.addresses:
                self.moving.append(("mask", _WORD[f"mask.{n}"]))
            else:
                value = self.uploads.add(word) if isinstance(word, np.ndarray) else int(word)
                self.template[_WORD[f"mask.{n}"]] = value

    def call(
        self, problem: Problem, x: Operands, values: dict[str, int], words: array[int] | None = None
    ) -> array[int]:
        """The words of one call: the template (or ``words``) with this call's addresses and ``values`` by field."""
        if words is None:
            words = self.words[:]
            addresses = x.addresses
            for name, word in self.moving:
                words[word] = addresses[name]
            self.uploads.used()
            words[_SEED] = problem.seed if problem.seed < 2**63 else problem.seed - 2**64  # the same 64 bits
        else:
            words = words[: len(FIELDS)]
        for name, value in values.items():
            words[_WORD[name]] = value
        if self.boxes:
            words += self._maps(words)
        return words

    def _maps(self, words: array[int]) -> array[int]:
        """What follows the words of a call: its tensor maps, the first at a multiple of their alignment."""
        addresses = tuple([words[word] for word, _ in self.boxes])
        made = self.maps.get(addresses)
        if made is None:
            made = array("q", bytes(-8 * len(FIELDS) % tensor_map.ALIGNMENT))
            for address, (_, geometry) in zip(addresses, self.boxes, strict=True):
                made += tensor_map.encode(address, *geometry)
            if len(self.maps) >= MOST_MAPS:
                self.maps.clear()
            self.maps[addresses] = made
        return made

    def counters(self, count: int) -> int:
        """Address of ``count`` 32-bit zeros, which the kernels leave as zeros; calls side by side have their own."""
        import cupy

        # Each thread has a default stream of its own that all of them call by the same name.
        stream = cupy.cuda.get_current_stream().ptr, threading.get_ident()
        if capturing():  # a graph may run beside calls and other graphs; without a spare set it clears its own
            spare = self.spare.get(stream)
            made = spare.pop() if spare else cupy.zeros(count, np.uint32)
            keep_for_graph(made)
            return int(made.data.ptr)
        # Cleared in the order of the stream that uses them; more when graphs took most, so that the next one finds some
        if stream not in self.counts or len(self.spare[stream]) < SPARE // 2:
            first, *more = cupy.zeros((SPARE, count), np.uint32)
            self.counts.setdefault(stream, first)
            self.spare.setdefault(stream, []).extend(more)
        return int(self.counts[stream].data.ptr)

    def workspace(self, count: int, zero: bool = False) -> Any:
        """``count`` numbers of the compute dtype from CuPy's pool, in the order of its current stream."""
        import cupy

        made = cupy.ndarray((max(count, 1),), self.problem.compute_dtype)
        keep_for_graph(made)
        if zero:
            made.data.memset_async(0, made.nbytes)
        return made

    def run(self, kernel: str, blocks: int, words: array[int], smem_bytes: int = 0, threads: int = 0) -> None:
        """Launch a kernel of the file on CuPy's current stream; ``blocks`` of threads (0: as many as the plan says each
        has), none is fine."""
        function = self.functions.get(kernel)
        if function is None:
            function = self.module.get_function(kernel)
            if smem_bytes:
                compile.allow_shared(function, smem_bytes)
            self.functions[kernel] = function  # now other threads may launch it
        if blocks > LARGEST_GRID:
            raise BackendError(f"{blocks} blocks of threads; one launch has at most {LARGEST_GRID}: split the batch")
        if blocks:
            function(blocks, threads or self.threads, words, smem_bytes)

    def run_over(
        self, kernel: str, items: int, words: array[int], threads_each: int = 1, most: int = MOST_STRIDING
    ) -> None:
        """Launch a kernel whose grid, of ``most`` blocks, strides over ``items``, each of which takes some threads."""
        self.run(kernel, min(blocks_of(items * threads_each, self.threads), most), words)

    def clear_padding(self, kernel: str, rows: int, words: array[int]) -> None:
        """Launch the kernel that writes rows which no packed sequence owns, of so many of all heads."""
        self.run_over(kernel, rows, words, WARP, CLEARING)


def mask_words(problem: Problem, mask: Any) -> list[int | np.ndarray]:
    """What the kernels read of a mask object: numbers and arrays, as its text or, in Python, its program has them."""
    if mask is None:
        return []
    if problem.backend == "numba_cuda":
        from rawflash.backends.numba_cuda import visibility

        return visibility.words(mask)
    return mask.words()


def load(
    file: str, problem: Problem, tiles: Tiles, mask: Any, mask_words: int, device: int, **found: Any
) -> Any:
    """The kernels of a file, in the language of the problem's backend."""
    if problem.backend == "numba_cuda":
        from rawflash.backends.numba_cuda import compile as python

        values = constants(problem, tiles, **found) | {"FAMILY": tiles.family}
        return python.load(file.removesuffix(".cu"), values, mask, mask_words, compile.arch_of(device))
    text = preamble(problem, tiles, mask=mask, **found)
    return compile.load(compile.source(file, text), compile.arch_of(device))


def launcher(
    file: str, problem: Problem, tiles: Tiles, x: Operands, written: dict[str, Target],
    boxes: Sequence[tensor_map.Box] = (), **fixed: int,
) -> Launcher:  # fmt: skip
    """The launcher of a kernel file for this call: the one that an earlier call like it made, or a new one."""
    made = x.memo.get(file)
    if made is None:
        made = x.memo[file] = Launcher(file, problem, tiles, x, written, fixed, boxes)
    return made


def side_gradients(
    problem: Problem, tiles: Tiles, x: Operands, grads: dict[str, Target], heads: int | None = None
) -> Any:
    """Write the gradients of sinks and bias, if asked for; return delta, which all backward kernels read.

    ``heads``: of so many query heads of all; the others' are for the kernel that reads them.
    """
    if tiles.family == MMA and problem.backend == "cupy_raw":  # their tiles hold numbers of the compute dtype
        tiles = _side_tiles(problem, x)
    kernels = launcher("side_gradients.cu", problem, tiles, x, {})
    delta = kernels.workspace(x.q.shape[0] * x.q.shape[1] * x.q.shape[2])
    blocks = blocks_of_head(problem, x, "q", DELTA_ROWS)
    values = {"delta.data": delta.data.ptr, "blocks": blocks}
    if "sinks" in grads:
        values["dsinks"] = grads["sinks"].address
    if "bias" in grads:
        values["dbias"] = grads["bias"].address
    call = kernels.call(problem, x, values)
    kernels.run("row_deltas", blocks * (in_turn(problem, problem.Hq) if heads is None else heads), call)
    if "sinks" in grads:
        kernels.run("sink_gradient", problem.Hq, call, kernels.threads * 8)  # a float64 each
    if "bias" in grads:
        b, h, i, j = grads["bias"].view.shape
        tiles_of_bias = (1 if i == 1 else blocks_of(i, tiles.br)) * (1 if j == 1 else blocks_of(j, tiles.bc))
        kernels.run("bias_gradient", b * h * tiles_of_bias, call, tiles.smem_bytes)
    return delta


def _side_tiles(problem: Problem, x: Operands) -> Tiles:
    """Those of the "simt" kernels, planned once for calls like this."""
    made = x.memo.get("side tiles")
    if made is None:
        chip = replace(chip_of(problem.backend, x.device), family=SIMT)
        made = x.memo["side tiles"] = plan_tiles(problem, chip, "backward")
    return made


def split_inputs(problem: Problem, tiles: Tiles, x: Operands) -> tuple[Any, dict[str, int]]:
    """Split q, k, v and, of a backward pass, dout into bfloat16 parts (``mma/split_inputs.cu``), lse beside them.

    Returns the workspace that holds them, and the words by which kernels that read split_rows.cuh's rows find them.
    """
    kernels = x.memo.get("mma/split_inputs.cu") or launcher("mma/split_inputs.cu", problem, tiles, x, {})
    matrices = {name: getattr(x, name) for name in ("q", "k", "v", "dout") if getattr(x, name) is not None}
    item, starts, total = np.dtype(problem.compute_dtype).itemsize, {}, 0
    for name, view in matrices.items():
        starts[name] = total
        slots, heads, rows, columns = view.shape
        total += slots * heads * rows * blocks_of(columns, SPLIT_CHUNK) * SPLIT_CHUNK_BYTES
    if x.dout is not None:
        starts["m"] = total
        total += math.prod(x.dout.shape[:3]) * item
    made = kernels.workspace(total // item)
    words = {f"{name}.data": made.data.ptr + start for name, start in starts.items()}
    blocks = {name: problem.B * (problem.Hkv * blocks_of(problem.Tk, SPLIT_ROWS) if name in ("k", "v")
                                 else problem.Hq * blocks_of(problem.Tq, SPLIT_ROWS)) for name in matrices}  # fmt: skip
    call = kernels.call(problem, x, {"sums": made.data.ptr, "m.data": words.get("m.data", 0)})
    kernels.run("split_inputs", sum(blocks.values()), call)
    return made, words


def blocks_of(rows: int, size: int) -> int:
    """Blocks of ``size`` rows that cover ``rows``."""
    return -(-rows // size)


def in_turn(problem: Problem, heads: int) -> int:
    """Heads that come one behind the other: of all batch entries, but for packed sequences, which are in one line."""
    return heads if problem.varlen else problem.B * heads


def blocks_of_head(problem: Problem, x: Operands, name: str, size: int, whole: bool = False) -> int:
    """Blocks of ``size`` of the rows of q, or k, that a head has. Packed sequences are in one line, where each begins a
    new block (``in_line`` in call.cuh): as many as that takes at most, which is known where lengths are not. It ends
    with the last sequence, or, where starts are on the device, or if ``whole``, with the array."""
    if not problem.varlen:
        return blocks_of(problem.Tq if name == "q" else problem.Tk, size)
    v = x.visibility
    rows, starts, lengths = (x.q, x.q_starts, v.q_lengths) if name == "q" else (x.k, x.k_starts, v.kv_lengths)
    if len(starts) == 0:
        return 0
    on_device = f"cu_seqlens_{name}" in x.addresses
    return (rows.shape[2] if whole or on_device else int(starts[-1] + lengths[-1])) // size + problem.B


def _aligned(matrices: Iterable[np.ndarray]) -> bool:
    """Do all rows start at multiples of 16 bytes and end there?"""
    return all(
        m.ctypes.data % VECTOR_BYTES == 0
        and m.shape[-1] * m.itemsize % VECTOR_BYTES == 0
        and all(n <= 1 or stride % VECTOR_BYTES == 0 for n, stride in zip(m.shape[:-1], m.strides, strict=False))
        for m in matrices
    )
