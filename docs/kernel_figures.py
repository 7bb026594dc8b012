"""Figures of kernels, for the pages of kernels/: plans, what the assembler says, and speeds beside the best peer's.

The examples of those pages import it. The assembler's figures are in tests/kernel_resources.json, which a test compares
with what NVRTC makes of the sources; speeds are in bench/results.
"""

import json
import re
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import geometric_mean

from rawflash.hardware import chip, kernels_on
from rawflash.problem import Problem
from rawflash.tiling import plan_tiles

ROOT = Path(__file__).resolve().parents[1]
GPU = {
    "grid": "gpu-2026-11-24-night.json",
    "decode": "gpu-2026-11-25-words-decode.json",
    "decode, float": "gpu-2026-11-24-night.json",
    # The night's has no numba_cuda, whose kernels are as they were
    "numba, grid": "gpu-2026-11-24-later-grid.json",
    "numba, float": "gpu-2026-11-24-later-decode-float.json",
    "mma": "mma-2026-11-24.json",  # bench.variants: kernels of mma.sync where the plan has those of Hopper
    "grid before": "gpu-2026-11-22-grid.json",  # when cupy_raw had multiply-adds in 16 bits
    "shared heads before": "gpu-2026-11-22-gqa-half-sweep.json",  # as well
    "float before": "gpu-2026-11-22-decode-float.json",  # when float32 was split as it was read
}
OURS = "cupy_raw", "numba_cuda"
DENSE = "dense-cupy", "torch-math"  # references, not peers


PROCESSORS = 132  # multiprocessors of an H200, which is an sm_90


def plan(backend, arch, direction, *, d, Tq=4096, Tk=None, B=4, H=16, Hkv=None, **options):
    """The tiles of a call on a chip of the table; "cpu": one with an L2 cache of 512 KiB a core."""
    sizes = dict(B=B, Hq=H, Hkv=Hkv or H, Tq=Tq, Tk=Tk or Tq, d=d, dv=d)
    options = {"scale": d**-0.5} | options
    row = replace(chip("cpu"), on_chip_bytes=512 << 10) if arch == "cpu" else kernels_on(backend, chip(arch))
    if arch == "sm_90":
        row = replace(row, processors=PROCESSORS)
    return plan_tiles(Problem(**sizes, backend=backend, **options), row, direction)


def blocks(backend, arches=("sm_80", "sm_86", "sm_90"), dimensions=(64, 128), **options):
    """Print the blocks and the families of forward and backward plans."""
    for arch in arches:
        for d in dimensions:
            plans = [plan(backend, arch, direction, d=d, **options) for direction in ("forward", "backward")]
            print(arch, f"d = {d:<3}", ", ".join(f"{tiles.br} x {tiles.bc} {tiles.family}" for tiles in plans))


def expanded(patterns):
    """Names, with braces as in a shell: "d{64,128}" is d64 and d128."""
    for pattern in patterns:
        parts = re.split(r"\{(.*?)\}", pattern)
        yield from map("".join, product(*(part.split(",") if n % 2 else [part] for n, part in enumerate(parts))))


@cache
def read(path):
    """A record as it is on disk."""
    return json.loads((ROOT / path).read_text())


def usage(arch, *builds):
    """Registers a thread, bytes spilled and bytes of shared memory of the kernels that hold tiles.

    A build is as in the record: "fa2_forward float32 d=64 plain" is forward, float32, d = dv = 64, no options. Braces
    stand for several (`expanded`).
    """
    builds = list(expanded(builds))
    record = read("tests/kernel_resources.json")
    columns = record["columns"]
    width = max(map(len, builds)) + 2
    lines = [f"{arch:<{width}}{'kernel':<20}{'registers':>10}{'spilled':>9}{'shared':>9}"]
    for build in builds:
        for name, numbers in record["kernels"].items():
            if not name.startswith(f"{arch} {build}: "):
                continue
            use = dict(zip(columns, numbers, strict=True))
            file, kernel = name.rpartition(": ")[2].split()
            if use["dynamic_shared"] and file != "side_gradients.cu":
                spilled, shared = use["spill_stores"] + use["spill_loads"], use["dynamic_shared"]
                lines.append(f"{build:<{width}}{kernel:<20}{use['registers']:>10}{spilled:>9}{shared:>9}")
    print("\n".join(lines))


def row(record, case):
    """What a record of GPU says of a case, by runner."""
    return next(row for row in read(f"bench/results/{GPU[record]}")["rows"] if row["name"] == case)["runners"]


def ceiling(record, what, unit="tflops"):
    """What the record measured of a plain product or copy, in burst."""
    return read(f"bench/results/{GPU[record]}")["ceilings"][what][f"burst_{unit}"]


def best_peer(runners, unit):
    """The fastest of the others, and its rate."""
    rates = {name: got[unit] for name, got in runners.items() if name.split()[0] not in (*OURS, *DENSE) and unit in got}
    name = max(rates, key=rates.get, default="")
    return name, rates.get(name)


def speeds(record, *cases, ours="cupy_raw", unit="tflops", beside=None):
    """Burst rates of ours and of the best peer in the same process, and ours by the peer's: above 1 we are faster.

    Braces stand for several cases (`expanded`). beside: a peer's name, in place of the best one.
    """
    cases = list(expanded(cases))
    name = {"tflops": "TFLOP/s", "tbytes": "TB/s"}[unit]
    width = max(map(len, cases)) + 2
    lines = [f"{name:<{width}}{'family':<16}{'ours':>6}  {'peer' if beside else 'best peer':<22}{'ratio':>5}"]
    for case in cases:
        runners = row(record, case)
        mine, family = runners[ours][f"burst_{unit}"], runners[ours]["tiles"]["family"]
        peer, rate = (beside, runners[beside][f"burst_{unit}"]) if beside else best_peer(runners, f"burst_{unit}")
        digits = 1 if unit == "tflops" else 2
        its = f"{peer} {rate:.{digits}f}" if peer else "none"
        ratio = f"{mine / rate:.2f}" if peer else ""
        lines.append(f"{case:<{width}}{family:<16}{mine:>6.{digits}f}  {its:<22}{ratio:>5}".rstrip())
    print("\n".join(lines))


def ratios(record, prefix, ours, peer):
    """The geometric mean, the least and the largest of all ratios of speed of cases whose names begin so."""
    rows = [row["runners"] for row in read(f"bench/results/{GPU[record]}")["rows"] if row["name"].startswith(prefix)]
    found = [runners[peer]["burst_us"][1] / runners[ours]["burst_us"][1] for runners in rows]
    return f"{geometric_mean(found):.2f} ({min(found):.2f} to {max(found):.2f}) over {len(found)} cases"
