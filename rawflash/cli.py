"""The command line: ``rawflash`` or ``python -m rawflash``.

``demo`` (also with no arguments) runs every algorithm and backend of this machine on a text and
checks each against the oracle; ``run`` computes attention on the arrays of a file, on the GPU where
it is asked to; ``explain`` prints a plan for any chip of the table; ``info`` says what is installed
here and what is missing.

Exit codes: 0 done; 1 a kernel disagrees with the oracle or with the predicted traffic, or a backend that
``--backends`` names cannot run; 2 bad input; 130 interrupted; 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib.metadata
import importlib.resources
import importlib.util
import math
import os
import platform
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from rawflash import accuracy, api, arrays, hardware
from rawflash._version import __version__
from rawflash.backends import BACKENDS, GPU_ARRAYS, lookup, why_not
from rawflash.errors import BackendError, RawflashError, TileError
from rawflash.plan import WIDTH, plan, size_text
from rawflash.problem import DIRECTIONS, ALGORITHMS, DTYPES, LAYOUTS, Operands, Problem, check
from rawflash.tiling import Tiles, plan_tiles
from rawflash.traffic import Traffic, traffic

DONE, DISAGREES, BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141

# ---- the parser ------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments without the program's name; those of the process when left out.

    Returns
    -------
    int
        See the module's docstring.
    """
    with _streams():
        return _main(list(sys.argv[1:] if argv is None else argv))


@contextlib.contextmanager
def _streams() -> Iterator[None]:
    """In here a standard stream that was closed from the start, None in Python, takes what is written to it."""
    with contextlib.ExitStack() as stack:
        redirections = (sys.stdout, contextlib.redirect_stdout), (sys.stderr, contextlib.redirect_stderr)
        for stream, redirect in redirections:
            if stream is None:
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(redirect(nowhere))
        yield


def _main(arguments: list[str]) -> int:
    try:
        options = _parser().parse_args(arguments or ["demo"])
        code: int = options.command(options)
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse: --help, --version or a wrong flag
        return stop.code if isinstance(stop.code, int) else DONE
    except (RawflashError, _InputError) as error:
        return _complain(str(error))
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # what is still buffered goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        return _complain(f"{name}{error.strerror or error}")
    except MemoryError as error:  # NumPy's, or CuPy's of the GPU: both say how much was asked for
        return _complain(f"out of memory: {error}".rstrip(": "))


class _InputError(Exception):
    """Input that cannot be used; the message says why."""


def _complain(message: str) -> int:
    print(f"rawflash: {message}", file=sys.stderr)
    return BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rawflash",
        description="Exact attention and its gradients by FlashAttention-1 and -2. No command: demo.",
    )
    parser.add_argument("--version", action="version", version=f"rawflash {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="run and check every kernel of this machine on a text")
    demo.add_argument(
        "text", nargs="?", metavar="TEXT", help="a file to read; left out: a text in the package"
    )
    demo.add_argument(
        "--tokens", type=_positive, default=1024, help="bytes of the text to attend over (default 1024)"
    )
    demo.add_argument("--heads", type=_positive, default=4, help="heads (default 4)")
    demo.add_argument("--dim", type=_positive, default=64, help="head dimension (default 64)")
    demo.add_argument("--seed", type=int, default=0, help="seed of the projections (default 0)")
    demo.add_argument("--backends", type=_names, default=None, metavar="A,B", help="only these backends")
    demo.set_defaults(command=_demo)

    run = commands.add_parser(
        "run",
        help="attention on the arrays of an .npz file",
        description="Reads q, k, v and, where present, "
        + ", ".join(_OPTIONAL)
        + " from IN; writes out and lse "
        "and, if dout is there, dq, dk, dv (dbias, dsinks). float16, float32 and float64; an .npz file does "
        "not keep bfloat16. With --backend cupy_raw the arrays go to the GPU and the results come back.",
    )
    run.add_argument("input", metavar="IN.npz")
    run.add_argument("-o", "--output", required=True, metavar="OUT.npz")
    run.add_argument("--force", action="store_true", help="overwrite OUT.npz")
    run.add_argument("--time", action="store_true", help=f"then time it: the best of up to {TIMED_RUNS} more runs")
    _add_options(run)
    run.set_defaults(command=_run)

    explain = commands.add_parser("explain", help="kernel, tiles, bytes and traffic of a call, for any chip")
    explain.add_argument("--shape", required=True, type=_shape, metavar="B,Hq,Hkv,Tq,Tk,d")
    explain.add_argument("--dv", type=_positive, help="head dimension of v (default d)")
    explain.add_argument("--dtype", choices=DTYPES, default="float32")
    explain.add_argument("--direction", choices=DIRECTIONS, default="forward")
    explain.add_argument(
        "--arch", choices=("cpu", *hardware.CHIPS), metavar="ARCH",
        help=f"cpu, {', '.join(hardware.CHIPS)}; left out: the CPU, or for a GPU backend the GPU of this machine",
    )  # fmt: skip
    _add_options(explain)
    explain.set_defaults(command=_explain)

    info = commands.add_parser("info", help="versions, devices, backends: what is here, what to install")
    info.add_argument(
        "--compile", action="store_true",
        help="first compile every kernel of numba_cpu into its cache on disk, so that no later call waits",
    )  # fmt: skip
    info.set_defaults(command=_info)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    """The scalar options of :class:`rawflash.Options`, under their own names; absent unless given."""
    group = parser.add_argument_group("options of the call")
    absent = argparse.SUPPRESS
    group.add_argument("--causal", action="store_true", default=absent)
    group.add_argument(
        "--window", type=_window, default=absent, metavar="L,R", help="each an int >= 0 or none"
    )
    group.add_argument(
        "--q-offset", type=int, default=absent, metavar="N", help="key position of query row 0"
    )
    group.add_argument("--softcap", type=float, default=absent, metavar="C")
    group.add_argument("--dropout", type=float, default=absent, metavar="P")
    group.add_argument("--seed", type=int, default=absent, metavar="N", help="of the dropout")
    group.add_argument("--scale", type=float, default=absent, help="default 1 / sqrt(d)")
    group.add_argument("--layout", choices=LAYOUTS, default=absent)
    group.add_argument("--algorithm", choices=ALGORITHMS, default=absent)
    group.add_argument("--backend", choices=tuple(BACKENDS), default=absent)
    group.add_argument("--deterministic", action="store_true", default=absent)
    group.add_argument(
        "--sram", type=int, default=absent, metavar="BYTES", help="on-chip bytes that tiles may use"
    )


_SCALARS = (
    "causal", "window", "q_offset", "softcap", "dropout", "seed", "scale", "layout", "algorithm", "backend",
    "deterministic", "sram",
)  # fmt: skip


def _options_given(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in _SCALARS if hasattr(options, name)}


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an int >= 1")
    return value


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in BACKENDS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(BACKENDS)}")
    return names


def _window(text: str) -> tuple[int | None, int | None]:
    try:
        left, right = (None if side.strip().lower() == "none" else int(side) for side in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not L,R with each an int or none") from None
    return left, right


def _shape(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        sizes = ()
    if len(sizes) != 6 or min(sizes) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not B,Hq,Hkv,Tq,Tk,d, six ints >= 0")
    return sizes


# ---- where a backend computes ------------------------------------------------------------------------


class _Cpu:
    """Where a backend computes: arrays there and back, waiting, and what a call allocates. Here the CPU."""

    name = ""

    def put(self, array: Any) -> Any:
        """A NumPy array as one that the backend takes."""
        return array

    def get(self, array: Any) -> Any:
        """A result as a NumPy array."""
        return array

    def wait(self) -> None:
        """Return when all that was asked for is done."""

    @contextlib.contextmanager
    def allocations(self) -> Iterator[Callable[[], int]]:
        """Gives a function: the most bytes that were allocated at once inside the block so far."""
        tracemalloc.start()
        try:
            yield lambda: tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


class _Gpu(_Cpu):
    """CuPy's current GPU."""

    def __init__(self) -> None:
        self.cupy = arrays.require_cupy()
        self.name = _gpu_name(self.cupy, self.cupy.cuda.runtime.getDevice())

    def put(self, array: Any) -> Any:
        return self.cupy.asarray(array)

    def get(self, array: Any) -> Any:
        return self.cupy.asnumpy(array)

    def wait(self) -> None:
        self.cupy.cuda.get_current_stream().synchronize()

    @contextlib.contextmanager
    def allocations(self) -> Iterator[Callable[[], int]]:
        class Hook(self.cupy.cuda.MemoryHook):  # type: ignore[name-defined]
            name = "rawflash"
            now = most = 0

            def malloc_postprocess(self, **block: int) -> None:
                self.now += block["mem_size"]
                self.most = max(self.most, self.now)

            def free_postprocess(self, **block: int) -> None:
                self.now -= block["mem_size"]

        hook = Hook()
        with hook:
            yield lambda: hook.most


def _takes_gpu_arrays(backend: str) -> bool:
    return BACKENDS[backend].runs_on == GPU_ARRAYS


def _place(backend: str | None, algorithm: str = "fa2") -> _Cpu:
    """Where a backend computes; None: the CPU, as there are NumPy arrays.

    Raises
    ------
    BackendError
        It takes GPU arrays, and cannot run here.
    """
    if backend is None or not _takes_gpu_arrays(backend):
        return _Cpu()
    reason = why_not(backend, Problem(algorithm=algorithm))
    if reason is not None:
        raise BackendError(f"backend {backend!r} {reason}")
    return _Gpu()


def _best_seconds(call: Callable[[], Any], place: _Cpu) -> float:
    """The shortest of a few runs, each from nothing under way to its results being there."""
    times: list[float] = []
    while len(times) < TIMED_RUNS and sum(times) < TIMED_SECONDS:
        place.wait()
        start = time.perf_counter()
        call()
        place.wait()
        times.append(time.perf_counter() - start)
    return min(times)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds >= 1e-2 else f"{seconds * 1e3:.3f}"


# ---- run -------------------------------------------------------------------------------------------

_REQUIRED = ("q", "k", "v")
_OPTIONAL = (
    "dout", "dlse", "mask", "bias", "sinks", "alibi_slopes", "q_lengths", "kv_lengths", "q_offset",
    "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip
# What goes to the GPU. The others may stay on the host, where their values are checked.
_LARGE = (*_REQUIRED, "dout", "dlse", "mask", "bias", "sinks")


def _run(options: argparse.Namespace) -> int:
    target = Path(os.path.realpath(options.output))
    _check_target(target, options.force)
    given = _read_arrays(Path(options.input))
    call = _options_given(options)
    if "q_offset" in given and "q_offset" in call:
        raise _InputError("q_offset is in the file and among the flags; expected it in one place")
    if "dlse" in given and "dout" not in given:
        raise _InputError("dlse is given without dout; expected both (dout may be zeros)")
    if ("cu_seqlens_q" in given) != ("cu_seqlens_k" in given):
        raise _InputError("one of cu_seqlens_q and cu_seqlens_k is given; expected both or neither")
    if "q_offset" in given and given["q_offset"].ndim == 0:
        call["q_offset"] = given.pop("q_offset").item()
    wrt = ("q", "k", "v", *(name for name in ("bias", "sinks") if name in given))
    place = _place(call.get("backend"), call.get("algorithm", "fa2"))
    given |= {name: _put(place, name, given[name]) for name in _LARGE if name in given}
    q, k, v = (given.pop(name) for name in _REQUIRED)
    dout, dlse = given.pop("dout", None), given.pop("dlse", None)
    call |= given

    def forward_call() -> tuple[Problem, dict[str, Any]]:
        problem, x = check(q, k, v, return_lse=True, **call)
        return problem, dict(zip(("out", "lse"), api._forward(problem, x), strict=True))

    def backward_call() -> dict[str, Any]:
        problem, x = check(
            q, k, v, dout=dout, o=results["out"], lse=results["lse"], dlse=dlse, wrt=wrt, direction="backward", **call
        )
        return {"d" + name: gradient for name, gradient in zip(wrt, api._backward(problem, x), strict=True)}

    problem, results = forward_call()
    calls: dict[str, Callable[[], Any]] = {"forward": forward_call}
    if dout is not None:
        results |= backward_call()
        calls["backward"] = backward_call
    _write_arrays(target, {name: place.get(array) for name, array in results.items()}, options.force)
    where = f" on {place.name}" if place.name else ""
    print(f"wrote {options.output}, computed by {problem.backend} {problem.algorithm}{where}:")
    for name, array in results.items():
        print(f"  {name:<7} {array.dtype} {array.shape}")
    if options.time:
        times = {name: _milliseconds(_best_seconds(one, place)) for name, one in calls.items()}
        print(f"best of up to {TIMED_RUNS} more runs: " + ", ".join(f"{name} {ms} ms" for name, ms in times.items()))
    return DONE


def _put(place: _Cpu, name: str, array: np.ndarray) -> Any:
    try:
        return place.put(array)
    except (TypeError, ValueError) as error:  # CuPy, of text for example
        raise _InputError(f"{name} cannot go to the GPU: {error}") from None


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file; refuses names that mean nothing and dtypes that a file cannot keep."""
    if not path.is_file():
        raise _InputError(f"{path}: there is no such file")
    try:
        with path.open("rb") as stream:  # not by NumPy, which leaves open what turns out to be no archive
            if not zipfile.is_zipfile(stream):
                raise _InputError(f"{path}: not an .npz file")
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as file:
                _check_names(path, file.files)
                given = {name: file[name] for name in file.files}
    except (_InputError, MemoryError):
        raise
    except OSError as error:
        raise _InputError(f"{path}: {error.strerror or error}") from None
    except Exception as error:  # whatever the readers of archives, of compressed data and of headers think of
        reason = textwrap.shorten(str(error), 200) or type(error).__name__
        raise _InputError(f"{path}: not a readable .npz file: {reason}") from None
    for name in _REQUIRED:
        if name not in given:
            raise _InputError(f"{path}: there is no array {name!r}; expected q, k and v")
    for name, array in given.items():
        if not isinstance(array, np.ndarray):
            raise _InputError(f"{path}: {name!r} is not an array")
        if array.dtype.kind == "V":
            raise _InputError(
                f"{path}: {name} has dtype {array.dtype.str}: raw bytes. "
                "An .npz file does not keep bfloat16; "
                f"save it as float32 instead, {name}.astype('float32')"
            )
    return given


def _check_names(path: Path, names: Sequence[str]) -> None:
    known = (*_REQUIRED, *_OPTIONAL)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "expected names out of " + ", ".join(known)
            raise _InputError(f"{path}: unknown array {name!r}; {hint}")


def _check_target(target: Path, force: bool) -> None:
    if not target.parent.is_dir():
        raise _InputError(f"{target.parent}: there is no such folder")
    if target.exists() or target.is_symlink():
        if not stat.S_ISREG(target.stat().st_mode):
            raise _InputError(f"{target}: not a regular file; will not replace it")
        if not force:
            raise _InputError(f"{target}: exists; --force overwrites it")


def _write_arrays(target: Path, results: dict[str, np.ndarray], force: bool) -> None:
    """Write a whole file or none: a temporary file beside the target takes its place at the end."""
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, allow_pickle=False, **results)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        _check_target(target, force)  # it may have come into being meanwhile
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ---- explain ---------------------------------------------------------------------------------------


MOST_BYTES = 2**63 - 1  # of an array


def _explain(options: argparse.Namespace) -> int:
    batch, heads_q, heads_kv, rows_q, rows_k, d = options.shape
    dv = d if options.dv is None else options.dv
    call = _options_given(options)
    layout, backend = call.get("layout", "bhtd"), call.pop("backend", None)
    arch = options.arch
    if backend is None and arch in hardware.CHIPS:
        backend = "cupy_raw"
    if backend is not None and arch is not None and _takes_gpu_arrays(backend) != (arch != "cpu"):
        runs_on = BACKENDS[backend].runs_on
        raise BackendError(f"backend {backend!r} takes {runs_on}; it does not run on {arch!r} (--arch)")

    stand_in = "float16" if options.dtype == "bfloat16" else options.dtype
    shape = ",".join(map(str, options.shape)) + f" --dv {dv}" * (options.dv is not None)
    _check_bytes(
        f"--shape {shape}", np.dtype(stand_in).itemsize, q=(batch, heads_q, rows_q, d), k=(batch, heads_kv, rows_k, d),
        v=(batch, heads_kv, rows_k, dv), out=(batch, heads_q, rows_q, dv),
    )  # fmt: skip
    # Arrays of one row's memory, so that the one validator sees the call; a plan needs no values. All sequences
    # are alike, so that it sees one of them.
    q, k, v = (
        _shapeless(stand_in, heads, rows, width, layout)
        for heads, rows, width in ((heads_q, rows_q, d), (heads_kv, rows_k, d), (heads_kv, rows_k, dv))
    )
    problem, x = check(q, k, v, **call)
    problem = dataclasses.replace(problem, B=batch, dtype=options.dtype, backend=backend or problem.backend)
    chip = hardware.kernels_on(problem.backend, hardware.CHIPS[arch]) if arch in hardware.CHIPS else None
    print(plan(problem, options.direction, chip, visibility=x.visibility))
    return DONE


def _check_bytes(flags: str, itemsize: int, **shapes: tuple[int, ...]) -> None:
    """Refuse arrays that cannot be; the size of an empty one must be within the bounds too, as NumPy has it."""
    for name, shape in shapes.items():
        if math.prod(max(size, 1) for size in shape) * itemsize > MOST_BYTES:
            raise _InputError(f"{flags}: {name} would have more than 2**63 - 1 bytes, the most of an array")


def _shapeless(dtype: str, heads: int, rows: int, width: int, layout: str) -> np.ndarray:
    """An array of any shape, of one sequence, that occupies one row."""
    row = np.zeros(max(width, 1), dtype)
    shape = (1, heads, rows, width) if layout == "bhtd" else (1, rows, heads, width)
    return np.lib.stride_tricks.as_strided(row, shape, (0, 0, 0, row.itemsize), writeable=False)


# ---- info ------------------------------------------------------------------------------------------

_PACKAGES = (
    "numpy", "numba", "llvmlite", "rich", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "numba-cuda", "torch",
    "jax",
)  # fmt: skip


def _info(options: argparse.Namespace) -> int:
    if options.compile:
        reason = _loads("numba_cpu")("fa2")
        if reason is not None:
            raise BackendError(reason)
        start = time.perf_counter()
        made = compile_all()
        text = f"compiled {made} kernels in {time.perf_counter() - start:.0f} s" if made else "all in the cache"
        _wrap("numba_cpu    ", f"{text}\n")
    print(f"{'rawflash':<12} {__version__}")
    interpreter = f"{platform.python_implementation()}, {platform.system()}"
    print(f"{'Python':<12} {platform.python_version()} ({interpreter})")
    for name in _PACKAGES:
        try:
            print(f"{name:<12} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{name:<12} not installed")

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"\n{'CPU':<12} {_cpu_name()}, {cores} logical cores for this process")
    for line in _gpu_lines():
        _wrap(f"{'GPU':<12} ", line)
    with contextlib.suppress(Exception):  # no CuPy, or a broken one, which the line above says
        _wrap(f"{'CUDA':<12} ", _cuda_text(arrays.require_cupy()))

    print("\nbackends")
    for name, row in BACKENDS.items():
        reason = next((text for text in map(_loads(name), row.algorithms) if text), None)
        if reason is None:
            chip = hardware.chip_of(name)
            share = f"block of threads on {chip.name}" if _takes_gpu_arrays(name) else "core"
            reason = f"loads: {', '.join(row.algorithms)}; M = {size_text(chip.on_chip_bytes)} a {share}"
            if name == "numba_cpu":
                reason += f", {_threads(name)} threads (NUMBA_NUM_THREADS sets them)"
        else:
            reason = "does not load: " + reason.removeprefix(f"backend {name!r} ")
        _wrap(f"  {name:<11}  ", reason)

    print("\ncompiled code")
    folders = sorted({path for algorithm in ("fa1", "fa2") for path in _cache_folders(algorithm)})
    if folders:
        _wrap("  numba_cpu    ", "kept in " + ", ".join(folders) + " (NUMBA_CACHE_DIR moves it)")
    else:
        _wrap("  numba_cpu    ", "none: the backend does not load")
    from rawflash.backends.cupy_raw.compile import cache_folder

    kept = cache_folder()
    folder = "not kept: there is no home folder" if kept is None else f"kept in {kept}"
    _wrap("  cupy_raw     ", f"{folder} (RAWFLASH_CACHE_DIR {'names one' if kept is None else 'moves it'})")
    return DONE


def _loads(name: str, d: int = 1) -> Callable[[str], str | None]:
    """A function from an algorithm to the reason why the backend cannot load it for this head dimension, or None."""

    def reason(algorithm: str) -> str | None:
        problem = Problem(backend=name, algorithm=algorithm, d=d, dv=d)
        text = why_not(name, problem)
        if text is None:
            try:
                for direction in DIRECTIONS:
                    lookup(problem, direction)
                if name == "cupy_raw":
                    _nvrtc_version()
            except (RawflashError, RuntimeError) as error:  # Numba: no folder for its cache
                text = str(error)
        return text

    return reason


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu_lines() -> list[str]:
    """What CuPy sees, a line for each GPU; where it sees none, why. Never raises."""
    missing = hardware.why_no_gpu()
    if missing is None:
        try:
            cupy = arrays.require_cupy()
            return [_gpu_text(cupy, device) for device in range(cupy.cuda.runtime.getDeviceCount())]
        except Exception as error:  # a driver in trouble, whatever CUDA calls it
            missing = f"CuPy cannot ask for a GPU: {error}"
    listed = _gpu_names()
    return [f"none: {missing}" + f"; the driver lists {', '.join(listed)}" * bool(listed)]


def _gpu_text(cupy: Any, device: int) -> str:
    try:
        chip = hardware.chip_of("cupy_raw", device)
        known = f"{chip.name}, {size_text(chip.on_chip_bytes)} on chip a block, {chip.processors} multiprocessors"
    except BackendError as error:  # older than the table
        known = str(error)
    return f"{device}: {_gpu_name(cupy, device)}, {known}"


def _gpu_name(cupy: Any, device: int) -> str:
    name = cupy.cuda.runtime.getDeviceProperties(device)["name"]
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def _cuda_text(cupy: Any) -> str:
    """Versions of the driver and of NVRTC, or what is missing. Never raises."""
    try:
        number = int(cupy.cuda.runtime.driverGetVersion())  # 13020 is 13.2; 0: there is none
        driver = f"driver for CUDA {number // 1000}.{number % 1000 // 10}" if number else "no driver"
    except Exception as error:
        driver = f"no driver: {error}"
    try:
        return driver + ", NVRTC {}.{}".format(*_nvrtc_version())
    except Exception as error:
        return f"{driver}, no NVRTC: {error}"


def _nvrtc_version() -> tuple[int, int]:
    from rawflash.backends.cupy_raw.compile import nvrtc_version

    return nvrtc_version()


def _gpu_names() -> list[str]:
    """Models that the NVIDIA driver lists on Linux; no GPU library is loaded."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                if line.startswith("Model"):
                    names.append(line.partition(":")[2].strip())
    return names


def _compiled_functions(algorithm: str) -> list[Any]:
    """The kernels of a numba_cpu algorithm; none where they do not load."""
    try:
        for direction in DIRECTIONS:
            import_module(f"rawflash.backends.numba_cpu.{algorithm}_{direction}")
        from rawflash.backends.numba_cpu.launch import KERNELS
    except (ImportError, RuntimeError):
        return []
    return [kernel for name, kernel in KERNELS.items() if name.startswith(algorithm)]


def _cache_folders(algorithm: str) -> set[str]:
    return {
        str(function.stats.cache_path)
        for function in _compiled_functions(algorithm)
        if function.stats.cache_path
    }


def _threads(backend: str) -> int:
    if backend != "numba_cpu":
        return 1
    import numba

    return int(numba.get_num_threads())


def _wrap(first: str, text: str) -> None:
    """Print text wrapped at WIDTH, its later lines indented as far as the first."""
    indent = " " * len(first)
    print(textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ))  # fmt: skip


# ---- demo ------------------------------------------------------------------------------------------

DEMO_SRAM = 64 * hardware.KIB  # M of numpy_tiled in the demo: small, so that a short text has many tiles
TILED_TOKENS = 512  # numpy_tiled runs at the speed of Python, so it gets no more of the text
EMBEDDING = 64  # width of a byte's embedding
PROJECTIONS = 4  # of it: q, k, v and dout
TIMED_RUNS, TIMED_SECONDS = 5, 0.5  # best of as many runs as fit
WARM_TOKENS = 32  # one small call compiles every kernel of an algorithm
RESULTS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}


@dataclasses.dataclass
class _Line:
    """One line of the demo's tables: one kernel, one direction."""

    backend: str
    algorithm: str
    direction: str
    tokens: int
    heads: int
    seconds: float = 0.0
    flops: int = 0
    extra: int = 0
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)
    predicted: Traffic | None = None
    counted: Traffic | None = None
    failure: str | None = None

    @property
    def worst(self) -> str:
        return max(self.ratios, key=lambda name: self.ratios[name])

    @property
    def complaint(self) -> str | None:
        """What disagrees, in words; None when nothing does."""
        who = f"{self.backend} {self.algorithm} {self.direction}"
        if self.failure is not None:
            return f"{who}: {self.failure}"
        if not self.ratios[self.worst] <= 1:
            times = f"{self.ratios[self.worst]:.3g} times the allowed error"
            return f"{who}: {self.worst} is {times} from the oracle"
        if self.counted is not None and self.counted != self.predicted:
            return f"{who}: counted loads and stores are not the predicted ones"
        return None


def _demo(options: argparse.Namespace) -> int:
    if options.text is None:
        name = "alice.txt"
        source = importlib.resources.files("rawflash").joinpath("data", name).read_bytes()
    else:
        source, name = Path(options.text).read_bytes(), options.text
    text = source[: options.tokens]
    if not text:
        raise _InputError(f"{name}: an empty text; expected at least one byte")
    if options.seed < 0:
        raise _InputError(f"--seed is {options.seed}; expected an int >= 0")
    flags = f"--heads {options.heads} --dim {options.dim}"
    _check_bytes(flags, np.dtype(float).itemsize, projections=(PROJECTIONS, EMBEDDING, options.heads, options.dim))
    inputs = _embed(text, options.heads, options.dim, options.seed)
    asked = [b for b in ("numpy_tiled", *BACKENDS) if options.backends is None or b in options.backends]
    absent: dict[str, str] = {}
    present = []
    for backend in dict.fromkeys(asked):
        reason = next((text for text in map(_loads(backend, options.dim), BACKENDS[backend].algorithms) if text), None)
        if reason is None:
            present += [(backend, algorithm) for algorithm in BACKENDS[backend].algorithms]
        else:
            absent[backend] = reason
    compiled = sorted(algorithm for backend, algorithm in present if backend == "numba_cpu")

    sizes = f"{options.heads} heads, d = {options.dim}, float32"
    _note("", f"Causal attention over {len(text):,} of {len(source):,} bytes of {name}: {sizes}")
    sys.stdout.flush()
    steps = 2 + 2 * len(present)
    start = time.perf_counter()
    results = {}
    with _Progress(steps) as progress, _compiling(compiled, options.dim) as compilers:
        compiling = "numba_cpu: compiling, first time only"
        progress.step("the oracle: dense float64" + f"; {compiling}" * bool(compiled))
        lengths = {_tokens(backend, len(text)) for backend, _ in present}
        cases = {tokens: _Case.of(inputs, tokens) for tokens in lengths}
        for backend, algorithm in present:
            if backend == "numpy_tiled":
                progress.step(f"{backend} {algorithm}: checking, counting loads and stores")
                case = cases[_tokens(backend, len(text))]
                results[backend, algorithm] = _check_kernel(backend, algorithm, case)
        progress.step(compiling if compiled else "nothing to compile")
        compile_text = _finish_compiling(compilers, start) if compiled else None
        for backend, algorithm in present:
            if backend != "numpy_tiled":
                work = "compiling what is not cached" if _takes_gpu_arrays(backend) else "loading its compiled code"
                progress.step(f"{backend} {algorithm}: {work}, checking")
                case = cases[_tokens(backend, len(text))]
                results[backend, algorithm] = _check_kernel(backend, algorithm, case)
        for backend, algorithm in present:
            progress.step(f"{backend} {algorithm}: timing")
            if all(line.failure is None for line in results[backend, algorithm]):
                _time_kernel(results[backend, algorithm], cases[_tokens(backend, len(text))])
    lines = [line for pair in present for line in results[pair]]

    if lines:
        _print_demo(lines, compile_text)
    for backend, reason in absent.items():
        _note(f"not run: {backend}: ", reason.removeprefix(f"backend {backend!r} "))
    complaints = [line.complaint for line in lines if line.complaint is not None]
    for complaint in complaints:
        _note("DISAGREES: ", complaint)
    if complaints:
        print("Read: each DISAGREES above names a kernel that is wrong; do not rely on it here.")
    elif lines:
        print("Read: all agree: every error is at most 1, and counted = predicted.")
    else:
        print("Read: no kernel was checked, as no backend could run.")
    missing = [] if options.backends is None else list(absent)
    if missing:
        _note("Read: ", f"not run, though --backends asked for it: {', '.join(missing)}.")
    return DISAGREES if complaints or missing or not lines else DONE


def _embed(text: bytes, heads: int, d: int, seed: int) -> tuple[np.ndarray, ...]:
    """q, k, v and dout ``(1, heads, T, d)``: bytes embedded with their positions, projected four ways.

    ``dout`` is a projection of the byte that follows.
    """
    rng = np.random.default_rng(seed)
    symbols = np.frombuffer(text, np.uint8)
    position = np.arange(len(symbols))[:, None] / 10000 ** (2 * np.arange(EMBEDDING // 2) / EMBEDDING)
    X = rng.standard_normal((256, EMBEDDING))[symbols] + np.hstack([np.sin(position), np.cos(position)])
    projections = rng.standard_normal((PROJECTIONS, EMBEDDING, heads * d)) / np.sqrt(EMBEDDING)

    def project(rows: np.ndarray, W: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray((rows @ W).reshape(len(rows), heads, d).swapaxes(0, 1)[None], np.float32)

    sources = (X, X, X, np.roll(X, -1, axis=0))
    return tuple(project(rows, W) for rows, W in zip(sources, projections, strict=True))


def _tokens(backend: str, tokens: int) -> int:
    return min(tokens, TILED_TOKENS) if backend == "numpy_tiled" else tokens


@dataclasses.dataclass
class _Case:
    """The arrays of a prefix of the text, and what the oracle says to them."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    reference: accuracy.Reference

    @classmethod
    def of(cls, inputs: tuple[np.ndarray, ...], tokens: int) -> _Case:
        q, k, v, dout = (array[:, :, :tokens] for array in inputs)
        return cls(q, k, v, dout, accuracy.reference(q, k, v, dout, causal=True))


def _demo_options(backend: str, algorithm: str, q: np.ndarray) -> dict[str, Any]:
    """The options of a call in the demo: numpy_tiled gets DEMO_SRAM if that holds its tiles."""
    options: dict[str, Any] = {"causal": True, "backend": backend, "algorithm": algorithm}
    if backend == "numpy_tiled":
        problem, _ = check(q, q, q, sram=DEMO_SRAM, **options)
        with contextlib.suppress(TileError):
            for direction in DIRECTIONS:
                plan_tiles(problem, lookup(problem, direction)[1], direction)
            options["sram"] = DEMO_SRAM
    return options


def _check_kernel(backend: str, algorithm: str, case: _Case) -> list[_Line]:
    """Forward and backward once: errors, extra memory and, by numpy_tiled, counts."""
    _, heads, tokens, _ = case.q.shape
    lines = [_Line(backend, algorithm, direction, tokens, heads) for direction in DIRECTIONS]
    forward, backward = lines
    line = forward
    try:
        place, options = _place(backend, algorithm), _demo_options(backend, algorithm, case.q)
        q, k, v, dout = (place.put(array) for array in (case.q, case.k, case.v, case.dout))
        problem, x = check(q, k, v, return_lse=True, **options)
        forward.flops, forward.predicted, (out, lse) = _measured(
            forward, problem, x, place, lambda: api._forward(problem, x)
        )
        forward.ratios = _ratios("forward", (out, lse), place, case)

        line = backward
        problem, x = check(q, k, v, dout=dout, o=out, lse=lse, direction="backward", **options)
        backward.flops, backward.predicted, grads = _measured(
            backward, problem, x, place, lambda: api._backward(problem, x)
        )
        backward.ratios = _ratios("backward", grads, place, case)
        if backend == "numpy_tiled":
            for line in lines:
                line.counted = _count(line.direction, case, out, lse, options)
    except RawflashError as error:
        line.failure = f"failed: {error}"
        backward.failure = backward.failure or "not run"
    return lines


def _ratios(direction: str, results: tuple[Any, ...], place: _Cpu, case: _Case) -> dict[str, float]:
    """Errors by name, in units of the allowed error."""
    named = zip(RESULTS[direction], results, strict=True)
    return {name: accuracy.error_ratio(name, place.get(array), case.reference) for name, array in named}


def _measured(
    line: _Line, problem: Problem, x: Operands, place: _Cpu, call: Callable[[], Any]
) -> tuple[int, Traffic, tuple[Any, ...]]:
    """Run a call and note what it allocates; its arithmetic on visible pairs, its predicted traffic, its results."""
    _, chip = lookup(problem, line.direction)
    tiles = plan_tiles(problem, chip, line.direction)
    if line.backend != "numpy_tiled":
        call()  # so that what is measured below is not the loading of compiled code
    with place.allocations() as most:
        results = call()
        line.extra = max(0, most() - sum(array.nbytes for array in results))
    if line.backend == "numba_cpu":  # allocated inside compiled code, where tracemalloc does not see it
        line.extra += _threads(line.backend) * tiles.smem_bytes
    predicted = traffic(problem, tiles, line.direction, visibility=x.visibility)
    fewest = dataclasses.replace(problem, algorithm="fa2", deterministic=False)
    useful = traffic(fewest, Tiles(1, 1), line.direction, visibility=x.visibility)
    return useful.flops, predicted, results


def _count(direction: str, case: _Case, out: np.ndarray, lse: np.ndarray, options: dict[str, Any]) -> Traffic:
    """Loads and stores of one numpy_tiled kernel, as its memory counts them."""
    from rawflash.backends.numpy_tiled.counting import counted

    given: dict[str, Any] = {} if direction == "forward" else {"dout": case.dout, "o": out, "lse": lse}
    problem, x = check(case.q, case.k, case.v, direction=direction, **given, **options)
    return counted(problem, x, direction).memory.traffic()


def _time_kernel(lines: list[_Line], case: _Case) -> None:
    """Time the public functions: the best of a few runs, nothing compiled any more."""
    backend, algorithm = lines[0].backend, lines[0].algorithm
    place, options = _place(backend, algorithm), _demo_options(backend, algorithm, case.q)
    q, k, v, dout = (place.put(array) for array in (case.q, case.k, case.v, case.dout))
    out, lse = api.attention(q, k, v, return_lse=True, **options)
    calls = {
        "forward": lambda: api.attention(q, k, v, return_lse=True, **options),
        "backward": lambda: api.attention_backward(dout, q, k, v, out, lse, **options),
    }
    for line in lines:
        line.seconds = _best_seconds(calls[line.direction], place)


def _small_call(
    options: dict[str, Any], d: int, directions: Sequence[str] = DIRECTIONS, shape: tuple[int, int] = (1, WARM_TOKENS),
    dtype: Any = np.float32,
) -> None:  # fmt: skip
    """Calls on few heads and tokens, which compile the kernels of an algorithm for a dtype."""
    x = np.zeros((1, *shape, d), dtype)
    if "forward" in directions:
        api.attention(x, x, x, **options)
    if "backward" in directions:
        api.attention_backward(x, x, x, x, x, np.zeros(x.shape[:3], x.dtype), **options)


def compile_all() -> int:
    """Compile every kernel of numba_cpu into the cache on disk; how many were not there."""
    dtypes = [np.dtype(name) for name in DTYPES if name != "bfloat16"]
    with contextlib.suppress(BackendError):
        dtypes.append(arrays.bfloat16())
    for algorithm, options, dtype in product(("fa1", "fa2"), ({}, {"softcap": 1.0}), dtypes):
        # With and without the options that touch scores; in fa2 few rows have kernels of their own, one a dtype.
        call = {"backend": "numba_cpu", "algorithm": algorithm, **options}
        _small_call(call, 8, ("forward",), (1, 1), dtype)
        if dtype.itemsize > 2:
            _small_call(call, 8, DIRECTIONS, (1, WARM_TOKENS), dtype)
    return _compiled(("fa1", "fa2"))


def _compiled(algorithms: Sequence[str]) -> int:
    """How many functions of these algorithms this process compiled, the cache on disk not having them."""
    functions = (function for algorithm in algorithms for function in _compiled_functions(algorithm))
    return sum(sum(function.stats.cache_misses.values()) for function in functions)


def compile_ahead(algorithms: Sequence[str], direction: str, d: int) -> int:
    """Compile the numba_cpu kernels of some algorithms for float32 into the cache on disk.

    Parameters
    ----------
    algorithms : sequence of {"fa1", "fa2"}
        In one process, because the second then compiles only what it does not share with the first.
    direction : {"forward", "backward"}
        The two share little: each has a process of its own.
    d : int
        Head dimension of the call that is made to compile them.

    Returns
    -------
    int
        Functions compiled; 0 when all were in the cache.
    """
    for algorithm in algorithms:
        _small_call({"causal": True, "backend": "numba_cpu", "algorithm": algorithm}, d, (direction,))
    return _compiled(algorithms)


def end_with_parent() -> None:
    """Let this process end when its standard input does: a pipe that its parent holds open as long as it lives."""

    def watch() -> None:
        os.read(0, 1)  # not sys.stdin, whose lock would be held at exit
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _compiling(algorithms: Sequence[str], d: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of their own that fill the cache, while this one works on something else.

    They end with this one, however it ends. One that fails is no harm: the demo then compiles itself.
    """
    processes: list[subprocess.Popen[str]] = []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    watched, held = os.pipe()
    for direction in DIRECTIONS if algorithms else ():
        call = f"compile_ahead({tuple(algorithms)!r}, {direction!r}, {d})"
        code = f"from rawflash.cli import compile_ahead, end_with_parent; end_with_parent(); print({call})"
        with contextlib.suppress(OSError):
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=watched, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env=environment, start_new_session=True,
            )  # fmt: skip
            processes.append(process)
    try:
        yield processes
    finally:
        os.close(held)
        os.close(watched)
        for process in processes:
            process.terminate()  # nothing to end when it is done
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _finish_compiling(processes: list[subprocess.Popen[str]], start: float) -> str:
    """Wait for the compilers; a sentence on what they did."""
    outputs = [process.communicate()[0].strip() for process in processes]
    if outputs and set(outputs) == {"0"}:
        return "numba_cpu: its compiled code was in the cache on disk"
    seconds = time.perf_counter() - start
    return f"numba_cpu: compiled in {seconds:.0f} s, first time only; 'rawflash info' says where it is kept"


class _Progress:
    """Progress on stderr: a bar on a terminal, a line for each step elsewhere."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0
        self.bar: Any = None

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (
                BarColumn(12),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
            )
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self.bar.start()
            self.task = self.bar.add_task("", total=self.steps)
        return self

    def step(self, text: str) -> None:
        """Begin the next step."""
        if self.bar is None:
            print(f"[{self.done + 1}/{self.steps}] {text}", file=sys.stderr, flush=True)
        else:
            self.bar.update(self.task, completed=self.done, description=text)
        self.done += 1

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def _print_demo(lines: list[_Line], compile_text: str | None) -> None:
    kernel = ("backend", "algorithm", ">T", "pass")
    speed = _table(*kernel, ">time\nms", ">GFLOP\n/s", ">extra\nMiB", ">dense\nMiB", ">worst\nerror", "")
    moved = _table(*kernel, ">loads\npredicted", ">\ncounted", ">stores\npredicted", ">\ncounted")
    for line in lines:
        name = (
            line.backend,
            line.algorithm,
            str(line.tokens),
            {"forward": "fwd", "backward": "bwd"}[line.direction],
        )
        dense = f"{4 * line.heads * line.tokens**2 / 2**20:.2f}"
        if line.failure is not None or line.predicted is None:
            speed.add_row(*name, "", "", "", dense, "", "FAILED")
            continue
        speed.add_row(
            *name, _milliseconds(line.seconds), f"{line.flops / max(line.seconds, 1e-9) / 1e9:.2f}",
            f"{line.extra / 2**20:.2f}", dense, f"{line.ratios[line.worst]:.2f} {line.worst:>3}",
            "ok" if line.complaint is None else "WRONG",
        )  # fmt: skip
        loaded, stored = _number(line.predicted.loaded), _number(line.predicted.stored)
        counts = line.counted
        moved.add_row(
            *name, loaded, "-" if counts is None else _number(counts.loaded),
            stored, "-" if counts is None else _number(counts.stored),
        )  # fmt: skip
    _show(speed)
    _show(moved)
    present = {line.backend for line in lines}
    on_gpu = [backend for backend in sorted(present) if _takes_gpu_arrays(backend)]
    until = "; on a GPU from the call until its results are there" if on_gpu else ""
    _note("time: ", f"best of up to {TIMED_RUNS} runs of the public function, without compiling{until}.")
    _note(
        "GFLOP/s: ", "arithmetic on the pairs that the causal mask lets through, the same for every kernel."
    )
    extra = "peak of NumPy's allocations during the call (tracemalloc), less its results"
    if "numba_cpu" in present:
        threads = _threads("numba_cpu")
        extra += f"; for numba_cpu plus the planned tiles of {threads} thread{'s' * (threads > 1)}"
    if on_gpu:
        extra += f"; for {', '.join(on_gpu)} the same of CuPy's"
    _note("extra: ", extra + ". dense: one float32 T x T matrix for all heads.")
    if any(line.backend == "numpy_tiled" and line.tokens == TILED_TOKENS for line in lines):
        _note(
            "T: ",
            f"numpy_tiled runs at the speed of Python, so it gets at most {TILED_TOKENS} bytes of the text.",
        )
    _note("worst error: ", "from the oracle, in units of the allowed error: 1 is the most allowed.")
    chips = [f"{size_text(DEMO_SRAM)} of numpy_tiled (fixed, to show many tiles)"] * (
        "numpy_tiled" in present
    )
    if "numba_cpu" in present:
        on_chip = hardware.chip_of("numba_cpu").on_chip_bytes
        chips.append(f"{size_text(on_chip)} of numba_cpu (a core's L2)")
    for backend in on_gpu:
        on_chip = hardware.chip_of(backend).on_chip_bytes
        chips.append(f"{size_text(on_chip)} of {backend} (shared memory of a block of threads)")
    if chips:
        _note(
            "loads, stores: ", f"elements, predicted for M = {', '.join(chips)}; numpy_tiled counts them too."
        )
    if compile_text is not None:
        _note("", compile_text + ".")


def _number(n: int) -> str:
    """A count in at most 11 characters."""
    return f"{n:,}" if n < 10**9 else f"{n:.5g}"


def _note(first: str, text: str) -> None:
    """Print text wrapped at WIDTH, its later lines indented a little."""
    print(textwrap.fill(first + text, WIDTH, subsequent_indent="    ", break_long_words=False))


def _table(*headings: str) -> Any:
    """A table without rulers at the side; ``>`` before a heading aligns its column right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(
            heading.lstrip(">"), justify="right" if heading.startswith(">") else "left", no_wrap=True
        )
    return table


def _show(table: Any) -> None:
    """Print a table; no colour codes unless stdout is a terminal."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False)
    with console.capture() as capture:
        console.print(table)
    print(capture.get())
