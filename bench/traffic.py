"""Memory traffic of the GPU kernels, counted by the hardware, beside what the closed forms and numpy_tiled say.

    python -m bench.traffic                       # on a GPU with Nsight Compute (ncu): measure, write a record
    python -m bench.traffic --numpy               # anywhere: add numpy_tiled's counts to the newest record
    python -m bench.traffic --report [--check]    # docs/figures/traffic.md and .svg from the newest record

:func:`points` are the calls: sweeps over on-chip memory M (``sram=``), over T and over d in which tiles are M/(4d) and
M/(6d) rows tall to the row, for which the multiply-add kernels ("simt") are launched with tiles up to the largest M;
and the tiles that calls have by themselves, of both families. All is float32: its copies into shared memory go past L1,
so that no cache stands between M and what is counted. Bytes are counted at three borders: of the multiprocessors ("sm",
which is the one that the closed forms count), of L2 on the side of the multiprocessors ("l2"), of L2 on the side of
DRAM ("dram"); kernel by kernel, so that the two passes of the deterministic backward pass, K/V outside and Q outside,
come apart.

Kernels are compiled first, by many processes; then times are taken, in a process of their own; ncu then counts, pass by
pass, again in processes of their own. ncu runs a kernel several times over, the caches empty at each start. Every
process has a time limit, and the record is written after each: without ncu, or without the right to read counters, it
still has times and predictions, and says what is missing. The exit status is 1 if anything is.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import glob
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.record import RESULTS, ROOT, about, write
from rawflash.backends import lookup
from rawflash.hardware import Chip, chip, chip_of, kernels_on
from rawflash.problem import Problem, check
from rawflash.tiles import SIMT, Tiles
from rawflash.tiling import pitches, plan_tiles
from rawflash.traffic import Traffic, traffic, visits

FIGURES = ROOT / "docs" / "figures"
HEADS = 132  # FA1 has one thread block a head, the H200 132 multiprocessors
KIB = 1024
LIMIT = 90  # seconds of one process under ncu
COMPILERS = 14  # processes
SECTOR = 32  # bytes
SM = "l1tex__m_{}.sum"
METRICS = {  # name in a row: metrics that are added up, and the bytes of their unit
    "sm_read": ((SM.format("xbar2l1tex_read_sectors_mem_lg_op_ld"),), SECTOR),
    "sm_write": ((SM.format("l1tex2xbar_write_sectors_mem_lg_op_st"),), SECTOR),
    "sm_add": ((SM.format("l1tex2xbar_write_sectors_mem_global_op_red"),
                SM.format("l1tex2xbar_write_sectors_mem_global_op_atom")), SECTOR),
    "l2_read": (("lts__t_sectors_srcunit_tex_op_read.sum",), SECTOR),
    "l2_write": (("lts__t_sectors_srcunit_tex_op_write.sum",), SECTOR),
    "l2_add": (("lts__t_sectors_srcunit_tex_op_red.sum",), SECTOR),
    "dram_read": (("dram__bytes_read.sum",), 1),
    "dram_write": (("dram__bytes_write.sum",), 1),
}  # fmt: skip
TAGS = ("ABOUT", "ROW")  # of lines that one process tells another
BORDERS = ("sm", "l2", "dram")
PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}  # of units, should ncu scale them


# ---- points -------------------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """Which kernels a call runs; by the last of them ncu's rows are told apart."""

    algorithm: str
    direction: str
    deterministic: bool
    last: str

    def __str__(self) -> str:
        return f"{self.algorithm.upper()} {self.direction}{', two passes' * self.deterministic}"


PASSES = (
    Pass("fa2", "forward", False, "fa2_forward"),
    Pass("fa1", "forward", False, "fa1_forward"),
    Pass("fa2", "backward", False, "fa2_backward_finish"),
    Pass("fa2", "backward", True, "fa2_backward_queries"),
    Pass("fa1", "backward", False, "fa1_backward"),
)


class Point(NamedTuple):
    """One call: its pass, its sizes, M in bytes, and whether it has the tiles that multiply-adds would have."""

    run: Pass
    T: int
    d: int
    sram: int
    simt: bool


T_MIDDLE, D_MIDDLE = 1920, 128  # 1920 is a multiple of all of ROWS: no block is ragged
LENGTHS = (960, 1920, 3840)
DIMENSIONS = (64, 128, 256)
ROWS = {"forward": (16, 32, 48, 64, 80, 96), "backward": (16, 32, 48, 64)}
# Resident blocks in shared memory; of the nine of the backward pass, dQ, dK and dV are in registers
BLOCKS = {"forward": 4, "backward": 6}
SRAM_OVER_T = {"forward": 64 * KIB, "backward": 96 * KIB}  # blocks of 32 x 32 at d = 128
# Outer blocks of 64, 32 and 16 rows at d = 64, 128 and 256; in the backward pass inner ones too
SRAM_OVER_D = {"forward": 64 * KIB, "backward": 104 * KIB}
FAMILIES = tuple(n * KIB for n in (24, 48, 64, 96, 227))  # M of calls as they are, d = 64
ITEM = 4  # bytes: float32
SWEEPS = {"M": -1, "T": 2, "d": 2}  # and the exponents of T^2 d^2 / M
VARIABLE = {"M": "sram", "T": "T", "d": "d"}


def points() -> dict[Point, list[str]]:
    """The calls, and the sweeps that each is in: "M", "T", "d", and "family" for tiles as calls have them."""
    found: dict[Point, list[str]] = {}

    def add(sweep: str, run: Pass, T: int, d: int, sram: int) -> None:
        found.setdefault(Point(run, T, d, sram, sweep in SWEEPS), []).append(sweep)

    for run in PASSES:
        way = run.direction
        for rows in ROWS[way]:
            add("M", run, T_MIDDLE, D_MIDDLE, ITEM * BLOCKS[way] * D_MIDDLE * rows)
        for T in LENGTHS:
            add("T", run, T, D_MIDDLE, SRAM_OVER_T[way])
        for d in DIMENSIONS:
            add("d", run, T_MIDDLE, d, SRAM_OVER_D[way])
        for sram in () if run.deterministic else FAMILIES:
            add("family", run, T_MIDDLE, 64, sram)
    return found


def h200() -> Chip:
    """The plan's chip, without asking for a device."""
    return replace(kernels_on("cupy_raw", chip("sm_90")), processors=HEADS)


def planned(point: Point, on: Chip, heads: int = HEADS) -> tuple[Problem, Tiles]:
    """The problem of a point, and its tiles."""
    run = point.run
    problem = Problem(
        Hq=heads, Hkv=heads, Tq=point.T, Tk=point.T, d=point.d, dv=point.d, sram=point.sram,
        algorithm=run.algorithm, deterministic=run.deterministic, backend="cupy_raw",
    )  # fmt: skip
    return problem, plan_tiles(problem, replace(on, family=SIMT) if point.simt else on, run.direction)


def row_of(point: Point, sweeps: list[str], on: Chip) -> dict:
    """What is known of a point before it runs."""
    problem, tiles = planned(point, on)
    run = point.run
    shares = shares_of(problem, tiles, run.direction)
    return {
        "algorithm": run.algorithm, "direction": run.direction, "deterministic": run.deterministic, "T": point.T,
        "d": point.d, "sram": point.sram, "simt": point.simt, "sweeps": sweeps, "br": tiles.br, "bc": tiles.bc,
        "family": tiles.family, "smem_bytes": tiles.smem_bytes, "predicted_bytes": sum(shares.values()),
        "sectors_bytes": in_sectors(problem, tiles, run.direction), "shares": shares,
    }  # fmt: skip


def rows_of(on: Chip) -> list[tuple[Point, dict]]:
    """The rows of all points; where tiles are as calls have them, M that changes none is left out."""
    found, seen = [], set()
    for point, sweeps in points().items():
        row = row_of(point, sweeps, on)
        tiles = (point._replace(sram=0), row["br"], row["bc"], row["family"])
        if sweeps == ["family"] and tiles in seen:
            continue
        seen.add(tiles)
        found.append((point, row))
    return found


# ---- predictions --------------------------------------------------------------------------------------------


def bytes_of(moved: Traffic) -> int:
    """Elements, those of row statistics too, as bytes."""
    return ITEM * (moved.elements + moved.row_elements)


def shares_of(problem: Problem, tiles: Tiles, direction: str) -> dict[str, int]:
    """The closed form in bytes, divided among the kernels of a call.

    row_deltas is gamma; in FA1 the forms have it in the loop. FA2's finishing kernel, which scales dQ, is not in them.
    The pass over Q blocks is charged with O once, as gamma is computed anew in the forms; the kernel reads gamma.
    """
    whole = bytes_of(traffic(problem, tiles, direction))
    if (problem.algorithm, direction) != ("fa2", "backward"):
        return {f"{problem.algorithm}_{direction}": whole}
    v, d = visits(problem, tiles.br, tiles.bc), problem.d
    deltas = ITEM * (2 * v.q * d + v.q)
    if problem.deterministic:  # Q, dO, lse and gamma once for each block of keys; K, V, dK and dV once
        keys = ITEM * ((2 * v.q_rows + 4 * v.k) * d + 2 * v.q_rows)
        return {"row_deltas": deltas, "fa2_backward_keys": keys, "fa2_backward_queries": whole - deltas - keys}
    return {"row_deltas": deltas, "fa2_backward_keys": whole - deltas}


def sectors_per_byte(columns: int, pitch: int, itemsize: int, rows: int = 16) -> float:
    """Bytes that 16-byte asynchronous copies of a tile read, for each byte of it.

    The two halves of a 32-byte sector are read together only if they also land in one 32-byte piece of shared memory.
    Where rows are an odd number of 16-byte vectors apart (``pitch`` numbers), every other row is out of step: all its
    sectors are read twice.
    """
    copies = [(r, c) for r in range(rows) for c in range(0, columns * itemsize, 16)]
    pairs = {(r, c // SECTOR, (r * pitch * itemsize + c) // SECTOR) for r, c in copies}
    return len(pairs) * SECTOR / (rows * columns * itemsize)


def in_sectors(problem: Problem, tiles: Tiles, direction: str) -> int:
    """The closed form in bytes, with what is copied into tiles counted by the sectors that the copies read."""
    moved, to_d = traffic(problem, tiles, direction), pitches(problem, tiles.family, tiles.bc)[0]
    copied = sum(moved.load(name) for name in ("Q", "K", "V", "dO"))
    if (problem.algorithm, direction) == ("fa2", "backward"):
        copied -= moved.load("O") // (1 + problem.deterministic)  # dO that row_deltas reads
    return bytes_of(moved) + round((sectors_per_byte(problem.d, to_d, ITEM) - 1) * ITEM * copied)


def count_with_numpy(row: dict) -> int:
    """Bytes that numpy_tiled counts on a row's tiles: one head, times the heads."""
    from rawflash.backends.numpy_tiled.counting import counted

    point = point_of(row)
    _, tiles = planned(point, h200(), 1)
    tiles = replace(tiles, br=row["br"], bc=row["bc"], on_chip_bytes=None, parts=1)  # registers hold a part of them
    x = np.random.default_rng(0).standard_normal((4, point.T, point.d), dtype=np.float32)
    run = point.run
    options = {"algorithm": run.algorithm, "deterministic": run.deterministic, "backend": "numpy_tiled"}
    if run.direction == "backward":
        options |= {"dout": x[3], "o": x[2], "lse": np.full(point.T, math.log(point.T), np.float32)}
    problem, operands = check(*x[:3], direction=run.direction, **options)
    moved = counted(problem, operands, run.direction, tiles=tiles).memory.traffic()
    return row.get("heads", HEADS) * bytes_of(moved)


def point_of(row: dict) -> Point:
    """The point of a row."""
    asked = tuple(row[name] for name in Pass._fields[:3])
    return Point(next(run for run in PASSES if run[:3] == asked), row["T"], row["d"], row["sram"], row["simt"])


# ---- in a process on the GPU --------------------------------------------------------------------------------


def call_of(point: Point, heads: int = HEADS):
    """The call of a point, as a function. Its forward results are made up: bytes do not depend on them."""
    import cupy

    from rawflash import api

    run, shape = point.run, (1, heads, point.T, point.d)
    generator = cupy.random.default_rng(0)
    q, k, v, dout = (generator.standard_normal(shape, dtype=np.float32) for _ in range(4))
    options = {"algorithm": run.algorithm, "sram": point.sram, "deterministic": run.deterministic}
    if run.direction == "backward":
        options |= {"dout": dout, "o": v, "lse": cupy.full(shape[:-1], math.log(point.T) + 1, np.float32)}
    problem, operands = check(q, k, v, direction=run.direction, **options)
    kernel, on = lookup(problem, run.direction, operands.device)
    operands.memo = {run.direction: (kernel, planned(point, on, heads)[1])}

    def call(kept=(q, k, v, dout, options)):
        return (api._forward if run.direction == "forward" else api._backward)(problem, operands)

    return call


def compile_calls(number: int) -> None:
    """Fill the cache with every COMPILERS-th point's kernels, by a call of one head: they do not depend on sizes."""
    import cupy

    for point, _ in rows_of(chip_of("cupy_raw"))[number::COMPILERS]:
        call_of(point._replace(T=T_MIDDLE), 1)()
    cupy.cuda.get_current_stream().synchronize()


def time_calls() -> None:
    """A line "ROW {...}" for each row, with its time and prediction."""
    import cupy

    print("ABOUT " + json.dumps(about(gpu=True)), flush=True)
    for point, row in rows_of(chip_of("cupy_raw")):
        call = call_of(point)
        times = []  # in milliseconds; the first one may compile, so it does not count
        while len(times) < 2 or len(times) < 6 and sum(times[1:]) < 50:
            start, end = (cupy.cuda.Event() for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end))
        print("ROW " + json.dumps(row | {"ms": round(statistics.median(times[1:]), 4)}), flush=True)


def count_calls(calls, seconds: float) -> None:
    """Each of some calls once between profiler marks, for ncu; which tells what it counted when this process ends."""
    import cupy

    end = time.monotonic() + seconds
    for make in calls:
        if time.monotonic() > end:
            sys.exit(f"stopped early: {seconds:.0f} s are over")
        call = make()
        cupy.cuda.get_current_stream().synchronize()
        cupy.cuda.profiler.start()
        call()
        cupy.cuda.get_current_stream().synchronize()
        cupy.cuda.profiler.stop()


COPIES = [(pitch, cached) for cached in (0, 1) for pitch in (256, 272, 288)]
COPIED = 4096 * 64 * 256  # bytes: blocks, rows, bytes of a row
COPIES_TEXT = r"""
extern "C" __global__ void copies(const float4* from, int pitch, int cached)
{
    extern __shared__ __align__(128) unsigned char on_chip[];
    for (int n = threadIdx.x; n < 64 * 16; n += 256) {
        const unsigned to = (unsigned)__cvta_generic_to_shared(on_chip) + n / 16 * pitch + n % 16 * 16;
        const float4* const source = from + (long long)blockIdx.x * 64 * 16 + n;
        if (cached)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(source) : "memory");
        else
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(source) : "memory");
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}
"""


def copies_of(pitch: int, cached: int):
    """Copies of rows of 256 bytes into shared memory, ``pitch`` bytes apart; nothing else."""
    import cupy

    kernel = cupy.RawKernel(COPIES_TEXT, "copies")
    source = cupy.zeros(COPIED // 4, np.float32)
    return lambda: kernel((4096,), (256,), (source, np.int32(pitch), np.int32(cached)), shared_mem=64 * pitch)


# ---- processes ----------------------------------------------------------------------------------------------


def run_limited(command, seconds, output):
    """Exit status of a command (None: it took too long, and was ended with all that it started)."""
    with open(output, "w") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT
        )
        try:
            return process.wait(max(seconds, 1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def find_ncu():
    """Where Nsight Compute's command line is, or None; it need not be on PATH."""
    places = ["/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu", "/usr/local/NVIDIA-Nsight-Compute*/ncu"]
    found = [path for place in places for path in sorted(glob.glob(place), reverse=True)]
    return shutil.which("ncu") or next(iter(found), None)


SELF = (sys.executable, "-m", "bench.traffic")


def ncu_command(ncu, log):
    metrics = sorted({metric for names, _ in METRICS.values() for metric in names})
    return [
        ncu, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log), "--profile-from-start", "off",
        "--clock-control", "none", "--metrics", ",".join(metrics), *SELF,
    ]  # fmt: skip


def kernels_of(text):
    """ncu's table, a dict of numbers for each kernel in the order of launches; what else it said comes as well.

    A row of names, one of units, then one for each kernel. Numbers may have commas in them, or be missing ("n/a").
    """
    lines = text.splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    names, *rows = list(csv.reader(lines[first:])) or [[]]
    units, *rows = [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)] or [{}]
    kernels = []
    for cells in rows:
        kernel = {"name": cells["Kernel Name"].partition("(")[0].split()[-1]}
        for names_, bytes_ in METRICS.values():
            for metric in names_:
                unit = units.get(metric, "").removesuffix("byte").removesuffix("sector")
                try:
                    kernel[metric] = float(cells[metric].replace(",", "")) * PREFIXES[unit] * bytes_
                except (KeyError, ValueError):
                    kernel[metric] = None
        kernels.append(kernel)
    return kernels, [line for line in lines[:first] if line.strip()]


def calls_of(kernels, last):
    """The kernels call by call; each call ends with the one named ``last``."""
    calls, call = [], []
    for kernel in kernels:
        call.append(kernel)
        if kernel["name"] == last:
            calls.append(call)
            call = []
    return calls


def add_counts(row, call):
    """Put the bytes that a call's kernels moved into its row: the sums, and kernel by kernel."""

    def bytes_of(kernels, name):
        numbers = [kernel[metric] for kernel in kernels for metric in METRICS[name][0]]
        return None if None in numbers else round(sum(numbers))

    row["kernels"] = [
        {"name": kernel["name"]} | {name: bytes_of([kernel], name) for name in METRICS} for kernel in call
    ]
    for border in BORDERS:
        parts = [bytes_of(call, name) for name in METRICS if name.startswith(border)]
        row[f"{border}_bytes"] = None if None in parts else sum(parts)


def measure(folder: Path, out: Path, end: float) -> list[dict]:
    """Write the record, again after every process; return what is missing in it."""
    log, ncu, missing, silent = folder / "log", find_ncu(), [], 0
    record = {
        "date": datetime.date.today().isoformat(), "heads": HEADS, "ncu": ncu is not None, "missing": missing,
        "rows": [],
    }  # fmt: skip

    def lack(what, text):
        """Note what is missing, with the end of what a process said."""
        missing.append({"what": what, "said": text[-1500:]})
        print(f"MISSING: {what}\n{text[-3000:]}", flush=True)

    def count(what, last, arguments):
        """The kernels of each call that a process makes under ncu, and what goes with a count that is not complete."""
        start, counted, limit = time.monotonic(), folder / "counted.csv", min(LIMIT, end - time.monotonic())
        counted.unlink(missing_ok=True)
        seconds = str(round(0.7 * limit))
        status = run_limited([*ncu_command(ncu, counted), "--count", seconds, *arguments], limit, log)
        kernels, said = kernels_of(counted.read_text() if counted.exists() else "")
        why = f"took more than {limit:.0f} s" if status is None else f"ended with {status}"
        print(f"{what}: {time.monotonic() - start:.1f} s", flush=True)
        return calls_of(kernels, last), status, "\n".join([f"ncu {why}", *said, log.read_text()])

    start = time.monotonic()
    compilers = [
        subprocess.Popen([*SELF, "--compile", str(n)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
        for n in range(COMPILERS)
    ]
    for process in compilers:  # what one of them leaves out, the process that takes times compiles
        try:
            process.wait(max(min(60, end - time.monotonic()) - (time.monotonic() - start), 1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    print(f"compiled: {time.monotonic() - start:.1f} s", flush=True)
    start = time.monotonic()
    status = run_limited([*SELF, "--time"], 0.4 * (end - start), log)
    told = log.read_text()
    facts = {tag: [json.loads(found) for found in re.findall(f"^{tag} (.*}})$", told, re.MULTILINE)] for tag in TAGS}
    record |= next(iter(facts["ABOUT"]), {}) | {"rows": facts["ROW"]}
    rows = record["rows"]
    if status != 0:
        lack("times took too long" if status is None else f"times ended with {status}", told)
    write(out, record)
    print(f"{len(rows)} rows timed: {time.monotonic() - start:.1f} s", flush=True)
    if ncu is None:
        lack("ncu is neither on PATH nor where it is usually installed", "")
        write(out, record)
        return missing
    for number, run in enumerate(PASSES):
        here = [row for row in rows if point_of(row).run == run]
        left = end - time.monotonic()
        if left < 10 or silent == 2 or not here:
            lack(f"counts of {run}: {'no time left' if left < 10 else 'not tried'}", "")
            continue
        calls, status, said = count(f"counts of {run}", run.last, [str(number), str(len(here))])
        for row, call in zip(here, calls, strict=False):
            add_counts(row, call)
        if status != 0 or len(calls) != len(here) or any(None in row.values() for row in here):
            lack(f"counts of {run}: {len(calls)} of {len(here)} calls", said)
        silent = 0 if calls else silent + 1  # where ncu has no right to read counters it never has
        write(out, record)
    if silent < 2 and end - time.monotonic() > 10:
        calls, status, said = count("copies", "copies", ["copies"])
        record["copies"] = [
            {"pitch": pitch, "cached": bool(cached), "bytes": COPIED, "sm_read": kernel[METRICS["sm_read"][0][0]]}
            for (pitch, cached), (kernel,) in zip(COPIES, calls, strict=False)
        ]
        if status != 0 or len(calls) != len(COPIES):
            lack("copies", said)
    write(out, record)
    print(table(rows), f"wrote {out}; missing: {len(missing)}", sep="\n")
    return missing


# ---- reading a record ---------------------------------------------------------------------------------------

SERIES = {  # what is drawn and fitted: pass, and the kernel if it is one of them
    "FA1 forward": (PASSES[1], None),
    "FA2 forward": (PASSES[0], None),
    "FA1 backward": (PASSES[4], None),
    "FA2 backward": (PASSES[2], None),
    "FA2 backward, K/V outside (dK, dV)": (PASSES[3], "fa2_backward_keys"),
    "FA2 backward, Q outside (dQ)": (PASSES[3], "fa2_backward_queries"),
}


def newest() -> Path:
    """The newest record; names end in a date."""
    return max(RESULTS.glob("*traffic-*.json"), key=lambda path: path.stem[-10:])


def read(path: Path) -> dict:
    """A record. That of 2026-11-21 has sizes once for all rows, other numbers of heads, and no sweeps."""
    record = json.loads(path.read_text())
    for row in record["rows"]:
        if "sweeps" not in row:
            row |= {"d": record["d"], "deterministic": False, "simt": False}
            row["heads"] = record["tokens"] // row["T"] * record["H"]
            row["sweeps"] = ["family"] if row["T"] == 4096 else []
            row["sectors_bytes"] = in_sectors(*planned(point_of(row), h200(), row["heads"]), row["direction"])
    return record


def bytes_at(row: dict, series: str, border: str) -> int | None:
    """Bytes of a series in a row: at a border, or "predicted"; None: not counted."""
    _, kernel = SERIES[series]
    if kernel is None:
        return row.get(f"{border}_bytes")
    if border == "predicted":
        return row["shares"][kernel]
    found = next((k for k in row.get("kernels", ()) if k["name"] == kernel), {})
    parts = [found.get(name) for name in METRICS if name.startswith(border)]
    return None if None in parts else sum(parts)


def exponent(x, y) -> float | None:
    """The slope of log y over log x, by least squares; None where a value is missing or there are too few."""
    if len(set(x)) < 3 or None in y or min(y) <= 0:
        return None
    return float(np.polyfit(np.log(np.array(x, float)), np.log(np.array(y, float)), 1)[0])


def in_sweep(rows, series: str, sweep: str):
    """The rows of a series in a sweep, by what is swept."""
    run, _ = SERIES[series]
    found = [row for row in rows if sweep in row["sweeps"] and point_of(row).run == run]
    return sorted(found, key=lambda row: row[VARIABLE[sweep]])


def fits(rows):
    """Exponents: (sweep, series, its rows, {"predicted", "sm", "l2", "dram": exponent or None})."""
    found = []
    for sweep in SWEEPS:
        for series in SERIES:
            here = in_sweep(rows, series, sweep)
            x = [row[VARIABLE[sweep]] for row in here]
            slopes = {name: exponent(x, [bytes_at(row, series, name) for row in here])
                      for name in ("predicted", *BORDERS)}  # fmt: skip
            if here:
                found.append((sweep, series, here, slopes))
    return found


# ---- the report ---------------------------------------------------------------------------------------------


def _markdown(head, lines) -> str:
    cells = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join("-" if c is None else str(c) for c in line) + " |" for line in cells)


def _aligned(head, lines) -> str:
    """A table in fixed pitch: the first column on the left, the others on the right."""
    cells = [["-" if c is None else str(c) for c in line] for line in (head, *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in cells)


def _megabytes(n) -> str | None:
    return None if n is None else f"{n / 1e6:.0f}"


def same(rows, *names: str) -> list[str]:
    """Those of some sizes that all rows agree on."""
    return [name for name in names if len({row[name] for row in rows}) == 1]


def table(rows) -> str:
    """Rows to read: a line each, in megabytes and milliseconds; T and d where they differ."""
    sizes = [name for name in ("T", "d") if name not in same(rows, "T", "d")]
    head = ["pass", "KiB", *sizes, "Br x Bc", "ms", "form", "numpy", "sectors", "SM", "ratio", "L2", "DRAM"]
    lines = []
    for row in rows:
        ratio = row["sm_bytes"] / row["sectors_bytes"] if row.get("sm_bytes") else None
        lines.append([
            point_of(row).run, row["sram"] // KIB, *(row[name] for name in sizes), f"{row['br']} x {row['bc']}",
            f"{row['ms']:.1f}" if "ms" in row else None,
            *(_megabytes(row.get(f"{name}_bytes")) for name in ("predicted", "counted", "sectors", "sm")),
            None if ratio is None else f"{ratio:.3f}",
            *(_megabytes(row.get(f"{name}_bytes")) for name in ("l2", "dram")),
        ])  # fmt: skip
    return _aligned(head, lines)


def fits_table(rows) -> str:
    """Exponents to read."""
    lines = [
        [series, sweep, ", ".join(str(row[VARIABLE[sweep]] // (KIB if sweep == "M" else 1)) for row in here),
         SWEEPS[sweep], *(None if slopes[name] is None else f"{slopes[name]:.2f}" for name in ("predicted", *BORDERS))]
        for sweep, series, here, slopes in fits(rows)
    ]  # fmt: skip
    return _markdown(["pass", "over", "points (M in KiB)", "theory", "closed form", "SM", "L2", "DRAM"], lines)


def comparisons(rows) -> str:
    """Ratios of bytes: FA1 to FA2, the two loop orders, M/(8d) to M/(4d) at one M."""

    def at(series, M):
        return next((row for row in in_sweep(rows, series, "M") if row["sram"] == M * KIB), None)

    def line(what, one, M, other, M_other):
        pair = ((one, at(one, M)), (other, at(other, M_other)))
        if None in (pair[0][1], pair[1][1]):
            return [what] + [None] * 4
        ratios = []
        for border in ("predicted", *BORDERS):
            top, below = (bytes_at(row, series, border) for series, row in pair)
            ratios.append(f"{top / below:.2f}" if top and below else None)
        return [what, *ratios]

    *whole, keys, queries = SERIES
    lines = [
        line("forward, FA1 / FA2, M = 128 KiB", whole[0], 128, whole[1], 128),
        line("backward, FA1 / FA2, M = 192 KiB", whole[2], 192, whole[3], 192),
        line("backward, K/V outside with dQ added / dK and dV alone, M = 192 KiB", whole[3], 192, keys, 192),
        line("backward, Q outside (dQ) / K/V outside (dK, dV), M = 192 KiB", queries, 192, keys, 192),
        line("FA2 backward: M/(8d) / M/(4d) rows for M = 128 KiB, the second in 166", whole[3], 96, whole[3], 192),
    ]
    return _markdown(["bytes", "closed form", "SM", "L2", "DRAM"], lines)


DRAWN = {
    "predicted": {"linewidth": 1},
    "sm": {"linestyle": "", "marker": "o", "markersize": 4},
    "dram": {"linestyle": "", "marker": "s", "markersize": 4, "markerfacecolor": "none"},
}
TITLES = {"M": "Over M", "T": "Over T", "d": "Over d", "family": "Tiles as calls have them"}


def report(path: Path, record: dict) -> str:
    """The tables of a record, as docs/traffic.md includes them."""
    rows = record["rows"]
    parts = [f"<!-- by python -m bench.traffic --report -->\n{record.get('gpu', 'A GPU')}, {record['date']}, float32, "
             f"`bench/results/{path.name}`; `-`: not counted."]  # fmt: skip
    if record["missing"]:
        parts.append("Missing: " + "; ".join(lack["what"] for lack in record["missing"]) + ".")
    if any(sweep in SWEEPS for row in rows for sweep in row["sweeps"]):
        parts += ["![Traffic over M, T and d, measured and predicted](traffic.svg)",
                  "Exponents, fitted to the bytes of all points:", fits_table(rows),
                  "Ratios of bytes:", comparisons(rows)]  # fmt: skip
    if record.get("copies"):
        lines = [[f"`cp.async.{'ca' if c['cached'] else 'cg'}`", c["pitch"], f"{c['sm_read'] / c['bytes']:.3f}"]
                 for c in record["copies"] if c["sm_read"] is not None]  # fmt: skip
        parts += ["Copies of rows of 256 bytes into shared memory, and nothing else:",
                  _markdown(["instruction", "bytes from row to row", "bytes read for each byte"], lines)]  # fmt: skip
    parts.append(
        "In millions of bytes: the closed form, what numpy_tiled counts on the same tiles, the form in sectors, and "
        "what the hardware counts at the three borders; the ratio is SM to sectors."
    )
    for sweep, title in TITLES.items():
        here = [row for row in rows if sweep in row["sweeps"]]
        if here:
            order = [run[:3] for run in PASSES]
            here.sort(key=lambda r: (order.index((r["algorithm"], r["direction"], r["deterministic"])), r["d"], r["T"],
                                     r["sram"]))  # fmt: skip
            sizes = [f"{name} = {here[0][name]}" for name in same(here, "T", "d")]
            title = ", ".join([title, *sizes, f"{heads_of(here)} heads"])
            parts += [f"```text\n{title}\n\n{table(here)}\n```"]
    return "\n\n".join(parts) + "\n"


def heads_of(rows) -> int:
    """Heads of the batch."""
    return rows[0].get("heads", HEADS)


def draw(record: dict, out: Path) -> None:
    """Bytes over M, T and d: lines are the closed form, dots and squares measured, dashes the slope of T^2 d^2 / M."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    settings = {"svg.fonttype": "none", "svg.hashsalt": "rawflash", "font.size": 9}
    with matplotlib.rc_context(settings):
        figure, axes = plt.subplots(1, 3, figsize=(10.5, 4.6), facecolor="white")
        for panel, (sweep, power) in zip(axes, SWEEPS.items(), strict=True):
            scale, seen = KIB if sweep == "M" else 1, set()
            for number, series in enumerate(SERIES):
                here = in_sweep(record["rows"], series, sweep)
                x = np.array([row[VARIABLE[sweep]] / scale for row in here])
                seen.update(x)
                for border, style in DRAWN.items():
                    y = [bytes_at(row, series, border) for row in here]
                    if here and None not in y:
                        # The two passes are alike: dashes, so that both are seen
                        last = border == "predicted" and number == len(SERIES) - 1
                        dashes = {"linestyle": (0, (4, 4))} if last else {}
                        panel.plot(x, np.array(y) / 1e9, color=f"C{number}", **style, **dashes)
            panel.set(xscale="log", yscale="log", xlabel="M, KiB" if sweep == "M" else sweep)
            panel.set_title(f"{TITLES[sweep]}: exponent {power}")
            ends, top = np.array([min(seen), max(seen)]), panel.get_ylim()[1]
            panel.plot(ends, 0.7 * top * (ends / ends[0 if power < 0 else 1]) ** power, "--", color="0.6")
            ticks = [n for n in sorted(seen) if n not in (144, 160)]  # no room
            panel.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
            panel.minorticks_off()
        axes[0].set_ylabel("gigabytes")
        names = [Line2D([], [], color=f"C{number}", label=series) for number, series in enumerate(SERIES)]
        names += [Line2D([], [], color="0.3", label=label, **DRAWN[border])
                  for border, label in (("predicted", "closed form"), ("sm", "SM"), ("dram", "DRAM"))]  # fmt: skip
        names.append(Line2D([], [], color="0.6", linestyle="--", label="slope of theory"))
        figure.legend(handles=names, loc="lower center", ncols=5, frameon=False)
        figure.tight_layout(rect=(0, 0.1, 1, 1))
        figure.savefig(out, metadata={"Date": None, "Creator": None, "Title": title_of(record)})
        plt.close(figure)


def title_of(record: dict) -> str:
    """What the plot says it is of."""
    return f"rawflash traffic {record['date']}"


def write_report(check_only: bool) -> bool:
    """Tables and plot of the newest record in docs/figures, unless ``check_only``. Were they there already?"""
    path = newest()
    record, page, plot = read(path), FIGURES / "traffic.md", FIGURES / "traffic.svg"
    text = report(path, record)
    there = page.exists() and page.read_text() == text
    if "traffic.svg" in text:
        there = there and plot.exists() and title_of(record) in plot.read_text()
    if not check_only:
        FIGURES.mkdir(exist_ok=True)
        page.write_text(text)
        if "traffic.svg" in text:
            draw(record, plot)
    return there


def add_numpy_counts(path: Path) -> None:
    """numpy_tiled's counts, into the rows of a record."""
    record, known = read(path), {}
    for row in record["rows"]:
        call = tuple(row[name] for name in ("algorithm", "direction", "deterministic", "T", "d", "br", "bc"))
        if call not in known:
            known[call] = count_with_numpy(row)
        row["counted_bytes"] = known[call]
        if row["counted_bytes"] != row["predicted_bytes"]:
            print(f"counted {row['counted_bytes']}, predicted {row['predicted_bytes']}: {call}")
    write(path, record)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.traffic", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / f"traffic-{datetime.date.today()}.json")
    parser.add_argument("--seconds", type=float, default=300, help="for everything")
    parser.add_argument("--numpy", action="store_true", help="add numpy_tiled's counts to the newest record")
    parser.add_argument("--report", action="store_true", help="write docs/figures/traffic.md and traffic.svg")
    parser.add_argument("--check", action="store_true", help="with --report: only say whether they are up to date")
    parser.add_argument("--time", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--count", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.check and not args.report:
        parser.error("--check is for --report")
    if args.time:
        time_calls()
    elif args.compile is not None:
        compile_calls(args.compile)
    elif args.count:
        seconds, which, *most = args.count
        if which == "copies":
            calls = [lambda copy=copy: copies_of(*copy) for copy in COPIES]
        else:  # as many as there are times of
            here = [point for point, _ in rows_of(chip_of("cupy_raw")) if point.run == PASSES[int(which)]]
            calls = [lambda point=point: call_of(point) for point in here[: int(most[0])]]
        count_calls(calls, float(seconds))
    elif args.numpy:
        add_numpy_counts(newest())
    elif args.report:
        there = write_report(args.check)
        sys.exit("docs/figures is not of the newest record" if args.check and not there else 0)
    elif importlib.util.find_spec("cupy") is None:
        parser.error("measuring needs a GPU and CuPy, which is not installed")
    elif args.out.exists():
        parser.error(f"{args.out} is there already; --out names another file")
    else:
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(1 if measure(Path(folder), args.out.resolve(), time.monotonic() + args.seconds) else 0)


if __name__ == "__main__":
    main()
