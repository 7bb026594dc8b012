"""``rawflash demo``: every algorithm and backend of this machine on a text, checked against the oracle and timed."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.resources
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rawflash import accuracy, api, hardware
from rawflash.backends import BACKENDS, lookup
from rawflash.cli.common import DISAGREES, DONE, InputError, check_bytes
from rawflash.cli.compiling import compiling_ahead, finish_compiling
from rawflash.cli.info import thread_count, why_not_loaded
from rawflash.cli.places import TIMED_RUNS, Cpu, best_seconds, milliseconds, place_of, takes_gpu_arrays
from rawflash.errors import RawflashError, TileError
from rawflash.plan import WIDTH, size_text
from rawflash.problem import DIRECTIONS, Operands, Problem, check
from rawflash.tiles import Tiles
from rawflash.tiling import plan_tiles
from rawflash.traffic import Traffic, traffic

DEMO_SRAM = 64 * hardware.KIB  # M of numpy_tiled in the demo: small, so that a short text has many tiles
TILED_TOKENS = 512  # numpy_tiled runs at the speed of Python, so it gets no more of the text
EMBEDDING = 64  # width of a byte's embedding
PROJECTIONS = 4  # of it: q, k, v and dout
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


def command(options: argparse.Namespace) -> int:
    """Check and time every kernel of this machine on a text; the exit code."""
    if options.text is None:
        name = "alice.txt"
        source = importlib.resources.files("rawflash").joinpath("data", name).read_bytes()
    else:
        source, name = Path(options.text).read_bytes(), options.text
    text = source[: options.tokens]
    if not text:
        raise InputError(f"{name}: an empty text; expected at least one byte")
    if options.seed < 0:
        raise InputError(f"--seed is {options.seed}; expected an int >= 0")
    flags = f"--heads {options.heads} --dim {options.dim}"
    check_bytes(flags, np.dtype(float).itemsize, projections=(PROJECTIONS, EMBEDDING, options.heads, options.dim))
    inputs = _embed(text, options.heads, options.dim, options.seed)
    asked = [b for b in ("numpy_tiled", *BACKENDS) if options.backends is None or b in options.backends]
    absent: dict[str, str] = {}
    present = []
    for backend in dict.fromkeys(asked):
        reasons = map(why_not_loaded(backend, options.dim), BACKENDS[backend].algorithms)
        reason = next((reason for reason in reasons if reason), None)
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
    with _Progress(steps) as progress, compiling_ahead(compiled, options.dim) as compilers:
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
        compile_text = finish_compiling(compilers, start) if compiled else None
        for backend, algorithm in present:
            if backend != "numpy_tiled":
                work = "compiling what is not cached" if takes_gpu_arrays(backend) else "loading its compiled code"
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
        place, options = place_of(backend, algorithm), _demo_options(backend, algorithm, case.q)
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


def _ratios(direction: str, results: tuple[Any, ...], place: Cpu, case: _Case) -> dict[str, float]:
    """Errors by name, in units of the allowed error."""
    named = zip(RESULTS[direction], results, strict=True)
    return {name: accuracy.error_ratio(name, place.get(array), case.reference) for name, array in named}


def _measured(
    line: _Line, problem: Problem, x: Operands, place: Cpu, call: Callable[[], Any]
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
        line.extra += thread_count(line.backend) * tiles.smem_bytes
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
    place, options = place_of(backend, algorithm), _demo_options(backend, algorithm, case.q)
    q, k, v, dout = (place.put(array) for array in (case.q, case.k, case.v, case.dout))
    out, lse = api.attention(q, k, v, return_lse=True, **options)
    calls = {
        "forward": lambda: api.attention(q, k, v, return_lse=True, **options),
        "backward": lambda: api.attention_backward(dout, q, k, v, out, lse, **options),
    }
    for line in lines:
        line.seconds = best_seconds(calls[line.direction], place)


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
            *name, milliseconds(line.seconds), f"{line.flops / max(line.seconds, 1e-9) / 1e9:.2f}",
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
    on_gpu = [backend for backend in sorted(present) if takes_gpu_arrays(backend)]
    until = "; on a GPU from the call until its results are there" if on_gpu else ""
    _note("time: ", f"best of up to {TIMED_RUNS} runs of the public function, without compiling{until}.")
    _note(
        "GFLOP/s: ", "arithmetic on the pairs that the causal mask lets through, the same for every kernel."
    )
    extra = "peak of NumPy's allocations during the call (tracemalloc), less its results"
    if "numba_cpu" in present:
        threads = thread_count("numba_cpu")
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
