"""Device-memory traffic of the GPU kernels, counted by the hardware, beside what traffic.py predicts.

    python bench/gpu_traffic.py [--out FILE]

Runs itself under Nsight Compute (``ncu``). One row for each algorithm, direction and on-chip memory M (``sram=``):
bytes between the SMs and L2 (which is what the closed forms count: the chip's border), bytes between L2 and DRAM,
time, prediction.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import json
import pathlib
import shutil
import subprocess
import sys

SHAPE = (2, 16, 4096, 64)  # B, H, T, d; float32
SRAM = (24 << 10, 48 << 10, 96 << 10, 160 << 10, 227 << 10)
METRICS = {
    "l2_read": "lts__t_sectors_srcunit_tex_op_read.sum",
    "l2_write": "lts__t_sectors_srcunit_tex_op_write.sum",
    "l2_atomic": "lts__t_sectors_srcunit_tex_op_red.sum",
    "dram_read": "dram__bytes_read.sum",
    "dram_write": "dram__bytes_write.sum",
    "ns": "gpu__time_duration.sum",
}
SECTOR = 32  # bytes


def calls():
    for algorithm in ("fa1", "fa2"):
        for direction in ("forward", "backward"):
            for sram in SRAM:
                yield algorithm, direction, sram


def child():
    import cupy
    import numpy as np

    import rawflash as rf

    generator = cupy.random.default_rng(0)
    q, k, v, dout = (generator.standard_normal(SHAPE, dtype=np.float32) for _ in range(4))
    out, lse = rf.attention(q, k, v, return_lse=True)
    for algorithm, direction, sram in calls():
        options = dict(algorithm=algorithm, sram=sram)
        plan = rf.explain(q, k, v, direction, **options)

        def run(options=options, direction=direction):
            if direction == "forward":
                return rf.attention(q, k, v, **options)
            return rf.attention_backward(dout, q, k, v, out, lse, **options)

        run()  # compiles
        cupy.cuda.get_current_stream().synchronize()
        start, end = (cupy.cuda.Event() for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        row = {
            "algorithm": algorithm, "direction": direction, "sram": sram, "br": plan.tiles.br, "bc": plan.tiles.bc,
            "family": plan.tiles.family, "ms": cupy.cuda.get_elapsed_time(start, end),
            "predicted_bytes": 4 * (plan.traffic.elements + plan.traffic.row_elements),
        }  # fmt: skip
        print("ROW " + json.dumps(row), flush=True)


def profiled():
    """The same calls, each once between profiler marks, for ncu."""
    import cupy
    import numpy as np

    import rawflash as rf

    generator = cupy.random.default_rng(0)
    q, k, v, dout = (generator.standard_normal(SHAPE, dtype=np.float32) for _ in range(4))
    out, lse = rf.attention(q, k, v, return_lse=True)
    cupy.cuda.get_current_stream().synchronize()
    for algorithm, direction, sram in calls():
        options = dict(algorithm=algorithm, sram=sram)
        cupy.cuda.profiler.start()
        if direction == "forward":
            rf.attention(q, k, v, **options)
        else:
            rf.attention_backward(dout, q, k, v, out, lse, **options)
        cupy.cuda.get_current_stream().synchronize()
        cupy.cuda.profiler.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("child", "profiled"))
    parser.add_argument("--out", default=f"bench/results/gpu-traffic-{datetime.date.today()}.json")
    args = parser.parse_args()
    if args.mode:
        {"child": child, "profiled": profiled}[args.mode]()
        return
    text = subprocess.run([sys.executable, __file__, "--mode", "child"], capture_output=True, text=True, check=True)
    rows = [json.loads(line[4:]) for line in text.stdout.splitlines() if line.startswith("ROW ")]
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    metrics = ",".join(METRICS.values())
    command = [ncu, "--csv", "--profile-from-start", "off", "--clock-control", "none", "--metrics", metrics]
    found = subprocess.run([*command, sys.executable, __file__, "--mode", "profiled"], capture_output=True, text=True)
    lines = found.stdout.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith('"ID"'))
    kernels: dict[str, dict] = {}
    for line in csv.DictReader(io.StringIO("\n".join(lines[first:]))):
        kernel = kernels.setdefault(line["ID"], {"name": line["Kernel Name"].partition("(")[0]})
        kernel[line["Metric Name"]] = (float(line["Metric Value"].replace(",", "")), line["Metric Unit"])
    scale = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
    groups: list[list[dict]] = []
    ends = {"fa1_forward", "fa2_forward", "fa1_backward", "fa2_backward_finish"}  # the last kernel of a call
    group: list[dict] = []
    for kernel in kernels.values():
        if not kernel["name"].startswith(("fa", "row_deltas")):
            continue
        group.append(kernel)
        if kernel["name"] in ends:
            groups.append(group)
            group = []
    for row, group in zip(rows, groups, strict=True):
        for name, metric in METRICS.items():
            if name.startswith("l2"):
                row[name] = sum(k[metric][0] for k in group) * SECTOR
            elif name.startswith("dram"):
                row[name] = sum(k[metric][0] * scale[k[metric][1]] for k in group)
        moved = row["l2_read"] + row["l2_write"] + row["l2_atomic"]
        row["l2_over_predicted"] = round(moved / row["predicted_bytes"], 3)
        print(row, flush=True)
    pathlib.Path(args.out).write_text(json.dumps({"shape": SHAPE, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
