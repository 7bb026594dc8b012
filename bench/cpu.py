"""Time numba_cpu beside PyTorch's CPU attention, A and B alternating in one process, and write a record.

    python bench/cpu.py --json FILE                # every group; needs pip install 'rawflash[bench]'
    python bench/cpu.py --only float32             # some: float32, float64, bfloat16, decode, memory, start, sweep

float32, float64, bfloat16: forward and backward, causal and not, over lengths and head dimensions. decode: one query a
head, as bytes of K and V a second beside those of a copy and of a sum. memory: resident memory of a long call beyond
its inputs. sweep: time over M, which tiles come from. start: from the import to the results in a new process, with an
empty cache of kernels and with a full one.

Milliseconds are quantiles; a ratio is PyTorch's median by ours: above 1 we are faster. FLOPs: 4 H T^2 d forward, half
of it when causal, 2.5 times that backward. Results are compared with PyTorch's before any timing counts. A large
product (torch.mm) before and after says how fast the machine was at the time.

The record is written anew after every row. A row that fails has its error in it, and the others go on; rows that
``--seconds`` leaves no time for are listed as "not run". The exit status is 1 if there are such rows.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

import rawflash as rf
from rawflash.backends.numba_cpu import microkernel

BOTH = (False, True)
DIRECTIONS = ("forward", "backward")
# Largest difference from PyTorch's result, as a part of its largest number
CLOSE = {"float32": 2e-5, "float64": 1e-12, "bfloat16": 3e-2}
CELL_SECONDS = 1.5  # of alternating, about
FEWEST = 5
MOST = 25
PAUSE = 0.01  # before every timed call: OpenMP's threads spin some milliseconds after a call of PyTorch's
SRAM = tuple(2**n for n in range(16, 21))  # M of the sweep, bytes
DECODE = (8, 32768, 128)  # heads, keys, head dimension
MM = 2048

sdpa = torch.nn.functional.scaled_dot_product_attention


def quantiles(seconds: list[float]) -> dict[str, float]:
    """p20, p50 and p80 in milliseconds."""
    return {f"p{p}": round(float(np.percentile(seconds, p)) * 1e3, 3) for p in (20, 50, 80)}


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    time.sleep(PAUSE)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median_rate(amount: float, call: Callable[[], Any], calls: int = 7) -> float:
    """What a call does by the median of its time, in thousands of millions a second."""
    call()
    return round(amount / statistics.median(timed(call) for _ in range(calls)) / 1e9, 1)


def alternate(ours: Callable[[], Any], theirs: Callable[[], Any], most: int) -> dict[str, Any]:
    """Time two functions in turn, as often as their time allows. Both have been called before."""
    times = [(timed(ours), timed(theirs))]
    rounds = max(min(FEWEST, most), min(most, int(CELL_SECONDS / (sum(times[0]) + 2 * PAUSE))))
    times += [(timed(ours), timed(theirs)) for _ in range(rounds - 1)]
    a, b = (quantiles(list(taken)) for taken in zip(*times, strict=True))
    return {"rounds": rounds, "rawflash_ms": a, "torch_ms": b, "ratio": round(b["p50"] / a["p50"], 3)}


def compare(name: str, ours: torch.Tensor, theirs: torch.Tensor, dtype: str) -> None:
    """Stop here if a result is not PyTorch's."""
    largest = theirs.abs().max().item()
    difference = (ours - theirs).abs().max().item() / largest
    assert difference < CLOSE[dtype], f"{name} differs by {difference:.1e} of its largest number"


def random(*shape: int, dtype: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=getattr(torch, dtype))


def attention(dtype: str, heads: int, kv_heads: int, T: int, d: int, causal: bool, direction: str,
              most: int) -> dict[str, Any]:  # fmt: skip
    """One cell of the grid. PyTorch tensors go in on both sides, and none is copied."""
    q, dout = (random(1, heads, T, d, dtype=dtype, seed=seed) for seed in (0, 1))
    k, v = (random(1, kv_heads, T, d, dtype=dtype, seed=seed) for seed in (2, 3))
    options: dict[str, Any] = {"is_causal": causal, "enable_gqa": heads != kv_heads}
    flops = 4 * heads * T * T * d * (0.5 if causal else 1.0)
    if direction == "forward":
        compare("out", rf.attention(q, k, v, causal=causal), sdpa(q, k, v, **options), dtype)
        result = alternate(lambda: rf.attention(q, k, v, causal=causal), lambda: sdpa(q, k, v, **options), most)
    else:
        flops *= 2.5
        out, lse = rf.attention(q, k, v, causal=causal, return_lse=True)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        y = sdpa(*leaves, **options)

        def ours() -> Any:
            return rf.attention_backward(dout, q, k, v, out, lse, causal=causal)

        def theirs() -> Any:
            return torch.autograd.grad(y, leaves, dout, retain_graph=True)

        for name, a, b in zip(("dq", "dk", "dv"), ours(), theirs(), strict=True):
            compare(name, a, b, dtype)
        result = alternate(ours, theirs, most)
    rates = {f"{who}_gflops": round(flops / result[f"{who}_ms"]["p50"] / 1e6, 1) for who in ("rawflash", "torch")}
    return result | rates


def copy_rate(size: int) -> float:
    """GB/s read and written by a copy, each thread copying its part."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    threads = numba.get_num_threads()
    parts = [np.array_split(x, threads) for x in (target, source)]
    with ThreadPoolExecutor(threads) as pool:
        return median_rate(2 * size, lambda: list(pool.map(np.copyto, *parts)))


def decode(dtype: str, most: int) -> dict[str, Any]:
    """One query a head over a long cache of keys: K and V are read once, and that is the work."""
    heads, length, d = DECODE
    q = random(1, heads, 1, d, dtype=dtype, seed=0)
    k, v = (random(1, heads, length, d, dtype=dtype, seed=seed) for seed in (1, 2))
    compare("out", rf.attention(q, k, v), sdpa(q, k, v), dtype)
    result = alternate(lambda: rf.attention(q, k, v), lambda: sdpa(q, k, v), most)
    size = k.nbytes + v.nbytes
    rates = {f"{who}_gbytes": round(size / result[f"{who}_ms"]["p50"] / 1e6, 1) for who in ("rawflash", "torch")}
    numbers = torch.ones(size // 4)
    return result | rates | {
        "copy_gbytes": copy_rate(size), "sum_gbytes": median_rate(size, numbers.sum),
        "heads": heads, "T": length, "d": d,
    }  # fmt: skip


def resident_megabytes() -> float:
    """Resident memory of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def extra_memory(length: int) -> dict[str, Any]:
    """Peak resident memory beyond the inputs, results included, of one causal head, d = 64, float32."""
    small = np.zeros((1, 8, 64), np.float32)
    out, lse = rf.attention(small, small, small, causal=True, return_lse=True)
    rf.attention_backward(small, small, small, small, out, lse, causal=True)  # compiled before we look
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, length, 64), dtype=np.float32) for _ in range(4))
    before, peak, done = resident_megabytes(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, resident_megabytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    out, lse = rf.attention(q, k, v, causal=True, return_lse=True)
    middle = time.perf_counter()
    rf.attention_backward(dout, q, k, v, out, lse, causal=True)
    end = time.perf_counter()
    done.set()
    watcher.join()
    return {
        "d": 64, "causal": True, "extra_megabytes": round(peak - before, 1),
        "dense_megabytes": round(length * length * 4 / 1e6), "forward_s": round(middle - start, 2),
        "backward_s": round(end - middle, 2),
    }  # fmt: skip


def memory(T: int, most: int) -> dict[str, Any]:
    """In a new process: what earlier calls freed would be used again and not be seen to grow."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(extra_memory, T).result()


def sweep(T: int, d: int, causal: bool, direction: str, most: int) -> dict[str, Any]:
    """Time over M, float32, 4 heads, all M in turn: how far the tiles of M = L2 are from the best ones."""
    q, k, v, dout = (random(1, 4, T, d, dtype="float32", seed=seed).numpy() for seed in range(4))
    out, lse = rf.attention(q, k, v, causal=causal, return_lse=True)

    def call(sram: int | None) -> Any:
        if direction == "forward":
            return rf.attention(q, k, v, causal=causal, sram=sram)
        return rf.attention_backward(dout, q, k, v, out, lse, causal=causal, sram=sram)

    taken: dict[int | None, list[float]] = {sram: [] for sram in (None, *SRAM)}
    for _ in range(min(most, 9)):
        for sram, times in taken.items():
            times.append(timed(lambda sram=sram: call(sram)))
    planned = {sram: rf.explain(q, k, v, direction, causal=causal, sram=sram).tiles for sram in taken}
    medians = {sram: statistics.median(times) for sram, times in taken.items()}
    best = min(medians.values())
    return {
        "best_by_planned": round(best / medians[None], 3),
        "tiles": {f"M = {sram or 'L2'}: {tiles.br} x {tiles.bc}": f"{medians[sram] * 1e3:.2f} ms"
                  for sram, tiles in planned.items()},
    }  # fmt: skip


START = """
import json, time
began = time.perf_counter()
import numpy as np
import rawflash as rf
x = np.ones((1, 2, 300, 64), np.float32)
imported = time.perf_counter()
out, lse = rf.attention(x, x, x, causal=True, return_lse=True)
forward = time.perf_counter()
rf.attention_backward(x, x, x, x, out, lse, causal=True)
backward = time.perf_counter()
times = {"import_s": imported - began, "forward_s": forward - imported, "backward_s": backward - forward}
print(json.dumps({name: round(s, 2) for name, s in (times | {"total_s": backward - began}).items()}))
"""


def start(most: int) -> dict[str, Any]:
    """Import and first results, float32, in two new processes with one cache of kernels, empty at first."""
    result = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NUMBA_CACHE_DIR": cache}
        path = [str(Path(rf.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        for which in ("cold", "warm"):
            command = [sys.executable, "-c", START]
            run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            result[which] = json.loads(run.stdout)
    return result


def grid(dtype: str, heads_of: dict[int, int], dimensions: tuple[int, ...], groups: int = 1) -> list[dict[str, Any]]:
    """Arguments of attention for every cell; ``heads_of`` has the heads for each length."""
    return [
        {"dtype": dtype, "heads": heads, "kv_heads": heads // groups, "T": T, "d": d, "causal": causal,
         "direction": direction}
        for (T, heads), d, causal, direction in itertools.product(heads_of.items(), dimensions, BOTH, DIRECTIONS)
    ]  # fmt: skip


GROUPS: dict[str, tuple[Callable[..., dict[str, Any]], list[dict[str, Any]]]] = {
    "float32": (
        attention,
        grid("float32", {256: 32, 512: 16, 1024: 8, 2048: 4, 4096: 2, 8192: 2}, (32, 64, 80, 128))
        + grid("float32", {512: 8, 2048: 8}, (64, 128), groups=4),
    ),
    "float64": (attention, grid("float64", {512: 8, 2048: 2}, (64, 128))),
    "bfloat16": (attention, grid("bfloat16", {512: 8, 2048: 2}, (64, 128))),
    "decode": (decode, [{"dtype": "float32"}, {"dtype": "bfloat16"}]),
    "memory": (memory, [{"T": 65536}]),
    "start": (start, [{}]),
    "sweep": (sweep, [
        {"T": T, "d": d, "causal": causal, "direction": direction}
        for (T, d, causal), direction in itertools.product(
            ((1024, 32, False), (1024, 64, False), (1024, 64, True), (2048, 128, False)), DIRECTIONS)
    ]),
}


def machine() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    cpu = platform.machine()
    with open("/proc/cpuinfo") as lines:
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    build = torch.__config__.show()
    blas = re.findall(r"BLAS_INFO=\w+|.*Math Kernel Library Version \S+|MKL-DNN v\S+", build)
    return {
        "date": datetime.date.today().isoformat(), "cpu": cpu, "threads": numba.get_num_threads(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "rawflash_tile": str(microkernel.SHAPE), "blas": [text.strip(" -") for text in blas],
        "versions": {"rawflash": rf.__version__, "numba": numba.__version__, "numpy": np.__version__,
                     "torch": torch.__version__, "python": platform.python_version()},
    }  # fmt: skip


def peak() -> dict[str, float]:
    """GFLOP/s of a large float32 product in PyTorch, and the load of the machine (jobs, over the last minute)."""
    a, b = (random(MM, MM, dtype="float32", seed=seed) for seed in (0, 1))
    load = round(os.getloadavg()[0], 2)
    return {f"mm_{MM}_gflops": median_rate(2 * MM**3, lambda: torch.mm(a, b)), "load": load}


def summary(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Geometric mean and minimum of the ratios of each group and direction."""
    lines = []
    for group, direction in itertools.product(GROUPS, (*DIRECTIONS, None)):
        rows = [row for row in record.get(group, ()) if "ratio" in row and row.get("direction") == direction]
        if rows:
            ratios, least = [row["ratio"] for row in rows], min(rows, key=lambda row: row["ratio"])
            where = {name: least[name] for name in ("dtype", "heads", "kv_heads", "T", "d", "causal") if name in least}
            lines.append({
                "group": group, "direction": direction or "forward", "cells": len(rows),
                "geometric_mean": round(statistics.geometric_mean(ratios), 3), "minimum": min(ratios), "at": where,
            })  # fmt: skip
    return lines


def line(arguments: dict[str, Any], row: dict[str, Any]) -> str:
    """A row in one line: what it is of, and the medians."""
    words = [str(value) if isinstance(value, str) else f"{name} {value}" for name, value in arguments.items()]
    for name, value in row.items():
        if name not in arguments:
            words.append(f"{name} {value['p50'] if name.endswith('_ms') else value}")
    return ", ".join(words)


def main() -> None:
    """Fill the groups and write the record after every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="NAME")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    parser.add_argument("--repeats", type=int, default=MOST, help="at most so many alternations a cell")
    parser.add_argument("--seconds", type=float, default=900, help="no row is begun after this time")
    chosen = parser.parse_args()
    end, missing = time.monotonic() + chosen.seconds, 0
    torch.set_num_threads(numba.get_num_threads())
    record: dict[str, Any] = machine()

    def write() -> None:
        if chosen.json:
            chosen.json.parent.mkdir(parents=True, exist_ok=True)
            chosen.json.write_text(json.dumps(record, indent=1) + "\n")

    record["peak"] = {"before": peak()}
    print(json.dumps(record, indent=1), flush=True)
    for group in chosen.only:
        make, rows = GROUPS[group]
        record[group] = []
        for arguments in rows:
            begun = time.monotonic()
            if begun > end:
                row: dict[str, Any] = {"not run": f"{chosen.seconds} s are over"}
            else:
                try:
                    row = make(**arguments, most=chosen.repeats)
                except Exception as error:
                    row = {"error": f"{type(error).__name__}: {error}"}
                    traceback.print_exc()
            missing += "not run" in row or "error" in row
            record[group].append(arguments | row)
            print(line(arguments, row), f"{time.monotonic() - begun:.1f} s", sep=", ", flush=True)
            write()
    record["peak"]["after"] = peak()
    record["summary"] = summary(record)
    write()
    print("peak", record["peak"])
    for found in record["summary"]:
        print(*(f"{name} {value}" for name, value in found.items()), sep=", ")
    print("rows without figures:", missing)
    sys.exit(missing > 0)


if __name__ == "__main__":
    main()
