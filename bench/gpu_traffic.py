"""Memory traffic of the GPU kernels, counted by the hardware, beside what traffic.py predicts.

    python bench/gpu_traffic.py [--out FILE] [--seconds N]

One row for each algorithm, direction, T and on-chip memory M (``sram=``): time, prediction, and bytes counted at three
borders: of the multiprocessors ("sm", which is the one that the closed forms count), of L2 on the side of the
multiprocessors ("l2"), of L2 on the side of DRAM ("dram").

Times are taken first, in a process of their own; Nsight Compute (``ncu``) then counts, T by T and pass by pass,
again in processes of their own. ncu runs a kernel several times over, the caches empty at each start. Every process
has a time limit, and the record is written after each: without ncu, or without the right to read counters, it still
has times and predictions, and says what is missing. The exit status is 1 if anything is.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import glob
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
H, D, TOKENS = 16, 64, 32768  # B T is the same for all T; float32
LENGTHS = (4096, 1024, 8192)
SRAM = (24 << 10, 48 << 10, 64 << 10, 96 << 10, 227 << 10)
PASSES = tuple(itertools.product(("fa2", "fa1"), ("forward", "backward")))
LIMIT = 90  # seconds of one process under ncu
# The last kernel of a call; by their order ncu's rows are told apart.
LAST = {("fa1", "forward"): "fa1_forward", ("fa1", "backward"): "fa1_backward",
        ("fa2", "forward"): "fa2_forward", ("fa2", "backward"): "fa2_backward_finish"}  # fmt: skip
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


# ---- in a process on the GPU --------------------------------------------------------------------------------


def call_of(algorithm, direction, T):
    """The call, as a function of sram; and its plan."""
    import cupy
    import numpy as np

    import rawflash as rf

    generator = cupy.random.default_rng(0)
    q, k, v, dout = (generator.standard_normal((TOKENS // T, H, T, D), dtype=np.float32) for _ in range(4))
    out, lse = rf.attention(q, k, v, return_lse=True)

    def run(sram):
        if direction == "forward":
            return rf.attention(q, k, v, algorithm=algorithm, sram=sram)
        return rf.attention_backward(dout, q, k, v, out, lse, algorithm=algorithm, sram=sram)

    return run, lambda sram: rf.explain(q, k, v, direction, algorithm=algorithm, sram=sram)


def time_calls():
    """A line "ROW {...}" for each row, with its time and prediction; sram that changes no tile is left out."""
    import cupy

    import rawflash as rf

    gpu = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print("ABOUT " + json.dumps({"gpu": gpu, "rawflash": rf.__version__, "cupy": cupy.__version__}), flush=True)
    for T, (algorithm, direction) in itertools.product(LENGTHS, PASSES):
        run, plan_of = call_of(algorithm, direction, T)
        seen = set()
        for sram in SRAM:
            try:
                plan = plan_of(sram)
            except rf.TileError as error:
                print(f"no tiles: {error}", flush=True)
                continue
            tiles = plan.tiles
            if (tiles.br, tiles.bc, tiles.family) in seen:
                continue
            seen.add((tiles.br, tiles.bc, tiles.family))
            times = []  # in milliseconds; the first one compiles, so it does not count
            while len(times) < 3 or len(times) < 6 and sum(times[1:]) < 1000:
                start, end = (cupy.cuda.Event() for _ in range(2))
                start.record()
                run(sram)
                end.record()
                end.synchronize()
                times.append(cupy.cuda.get_elapsed_time(start, end))
            row = {
                "algorithm": algorithm, "direction": direction, "T": T, "sram": sram, "br": tiles.br, "bc": tiles.bc,
                "family": tiles.family, "smem_bytes": tiles.smem_bytes, "ms": round(statistics.median(times[1:]), 4),
                "predicted_bytes": 4 * (plan.traffic.elements + plan.traffic.row_elements),
            }  # fmt: skip
            print("ROW " + json.dumps(row), flush=True)


def count_calls(seconds, algorithm, direction, T, srams):
    """The same calls, each once between profiler marks, for ncu; which tells what it counted when this process ends."""
    import cupy

    end = time.monotonic() + seconds
    run, _ = call_of(algorithm, direction, T)
    for sram in srams:
        if time.monotonic() > end:
            sys.exit(f"stopped before sram = {sram}: {seconds:.0f} s are over")
        cupy.cuda.get_current_stream().synchronize()
        cupy.cuda.profiler.start()
        run(sram)
        cupy.cuda.get_current_stream().synchronize()
        cupy.cuda.profiler.stop()


# ---- processes ----------------------------------------------------------------------------------------------


def run_limited(command, seconds, output):
    """Exit status of a command (None: it took too long, and was ended with all that it started)."""
    with open(output, "w") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
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


def ncu_command(ncu, log):
    metrics = sorted({metric for names, _ in METRICS.values() for metric in names})
    return [
        ncu, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log), "--profile-from-start", "off",
        "--clock-control", "none", "--metrics", ",".join(metrics), sys.executable, __file__,
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
    if row["sm_bytes"] is not None:
        row["sm_over_predicted"] = round(row["sm_bytes"] / row["predicted_bytes"], 4)


def table(rows):
    """The rows to read: a line each, in megabytes and milliseconds."""
    lines = ["| pass | T | M, KiB | Br x Bc | ms | predicted MB | SM MB | / predicted | L2 MB | DRAM MB |"]
    lines.append("|" + " --- |" * (lines[0].count("|") - 1))
    for row in sorted(rows, key=lambda row: [row[name] for name in ("direction", "algorithm", "T", "sram")]):
        counted = [row.get(f"{border}_bytes") for border in BORDERS]
        sm, l2, dram = ("-" if n is None else f"{n / 1e6:.0f}" for n in counted)
        cells = (
            f"{row['algorithm']} {row['direction']}", row["T"], row["sram"] >> 10, f"{row['br']} x {row['bc']}",
            f"{row['ms']:.3f}", f"{row['predicted_bytes'] / 1e6:.0f}", sm, row.get("sm_over_predicted", "-"), l2, dram,
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / f"gpu-traffic-{datetime.date.today()}.json")
    parser.add_argument("--seconds", type=float, default=480, help="for everything")
    parser.add_argument("--time", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--count", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.time:
        time_calls()
    elif args.count:
        seconds, algorithm, direction, T, *srams = args.count
        count_calls(float(seconds), algorithm, direction, int(T), map(int, srams))
    else:
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(1 if measure(Path(folder), args.out, time.monotonic() + args.seconds) else 0)


def measure(folder, out, end):
    """Write the record, again after every process; return what is missing in it."""
    log, ncu, missing, silent = folder / "log", find_ncu(), [], 0
    record = {"date": datetime.date.today().isoformat(), "H": H, "d": D, "tokens": TOKENS, "dtype": "float32"}
    record |= {"ncu": ncu, "missing": missing, "rows": []}

    def write():
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")

    def lack(what, text):
        """Note what is missing, with the end of what a process said."""
        missing.append({"what": what, "said": text[-1500:]})
        print(f"MISSING: {what}\n{text[-3000:]}", flush=True)

    status = run_limited([sys.executable, __file__, "--time"], 0.4 * (end - time.monotonic()), log)
    told = log.read_text()
    facts = {tag: [json.loads(found) for found in re.findall(f"^{tag} (.*}})$", told, re.MULTILINE)] for tag in TAGS}
    record |= next(iter(facts["ABOUT"]), {}) | {"rows": facts["ROW"]}
    rows = record["rows"]
    if status != 0:
        lack("times took too long" if status is None else f"times ended with {status}", told)
    write()
    print(f"{len(rows)} rows timed", flush=True)
    if ncu is None:
        lack("ncu is neither on PATH nor where it is usually installed", "")
        write()
    for T, (algorithm, direction) in itertools.product(LENGTHS, PASSES) if ncu else ():
        here = [row for row in rows if (row["algorithm"], row["direction"], row["T"]) == (algorithm, direction, T)]
        what, left = f"counts of {algorithm} {direction}, T = {T}", end - time.monotonic()
        if not here:
            continue
        if left < 10 or silent == 2:
            lack(f"{what}: {'no time left' if left < 10 else 'not tried'}", "")
            continue
        start, counted, limit = time.monotonic(), folder / f"{algorithm}-{direction}-{T}.csv", min(LIMIT, left)
        arguments = [0.7 * limit, algorithm, direction, T, *(row["sram"] for row in here)]
        status = run_limited([*ncu_command(ncu, counted), "--count", *map(str, arguments)], limit, log)
        text = counted.read_text() if counted.exists() else ""
        kernels, said = kernels_of(text)
        calls = calls_of(kernels, LAST[algorithm, direction])
        for row, call in zip(here, calls, strict=False):
            add_counts(row, call)
        if status != 0 or len(calls) != len(here) or any(None in row.values() for row in here):
            why = f"took more than {limit:.0f} s" if status is None else f"ended with {status}"
            lack(f"{what}: {len(calls)} of {len(here)} calls, ncu {why}", "\n".join([*said, log.read_text()]))
        silent = 0 if kernels else silent + 1  # where ncu has no right to read counters it never has
        print(f"{what}: {time.monotonic() - start:.1f} s", flush=True)
        write()
    write()
    print(table(rows), f"wrote {out}; missing: {len(missing)}", sep="\n")
    return missing


if __name__ == "__main__":
    main()
