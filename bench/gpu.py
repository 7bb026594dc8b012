"""Time the GPU kernels beside PyTorch and dense CuPy, in one process, and write a record.

    python bench/gpu.py                     # every table, record in bench/results/
    python bench/gpu.py --only peers        # some tables: host_overhead, start, peers, against_dense, doubles and
                                            # numba_peers, numba_against_dense (the others are cupy_raw)
    python bench/gpu.py --tune 128 float32  # blocks by hand for one head dimension: which are fastest

Device time: calls queued between two events, kernels alternating round by round (burst), and each for a while on its
own (sustained); medians. FLOPs: 4 B H T^2 d forward, half of it when causal, 2.5 times that backward.
Results are compared with the peer's before any timing counts.

The record is written anew after every row. A row that fails has its error in it, and the others go on; rows that
``--seconds`` leaves no time for are listed as "not run". The exit status is 1 if there are such rows.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from functools import cache

import cupy
import numpy as np
import torch

import rawflash as rf
from rawflash import tiling
from rawflash.backends import lookup
from rawflash.problem import check

QUEUED = 8
# Largest difference from a peer's result, as a part of its largest number
CLOSE = {"float32": 1e-3, "float16": 4e-3, "bfloat16": 3e-2}
RESULTS = pathlib.Path(__file__).resolve().parent / "results"


def flops(B, H, T, d, causal, backward=False):
    return 4 * B * H * T * T * d * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)


def seconds(call, calls=QUEUED):
    """Device time of one of several queued calls."""
    start, end = (cupy.cuda.Event() for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(start, end) / calls / 1e3


def burst(calls, rounds=9):
    """Medians over rounds in which every call has its turn."""
    for call in calls.values():
        seconds(call, 2)
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call))
    return {name: statistics.median(t) for name, t in times.items()}


def sustained(call, period=1.0):
    """Median of the second half of a while of nothing else."""
    times, end = [], time.perf_counter() + period
    while time.perf_counter() < end:
        times.append(seconds(call))
    return statistics.median(times[len(times) // 2 :])


def inputs(B, H, T, d, dtype):
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (B, H, T, d)
    return [torch.randn(shape, generator=generator, device="cuda", dtype=getattr(torch, dtype)) for _ in range(4)]


def ours(x, causal, backward=False, **options):
    q, k, v, dout = (cupy.from_dlpack(a) for a in x)
    options = dict(causal=causal, **options)
    if not backward:
        return lambda: rf.attention(q, k, v, **options)
    out, lse = rf.attention(q, k, v, return_lse=True, **options)
    return lambda: rf.attention_backward(dout, q, k, v, out, lse, **options)


def efficient(x, causal, backward=False):
    """PyTorch's memory-efficient attention, the fused kernel that it has for float32."""
    q, k, v, dout = x
    scale = 1 / math.sqrt(q.shape[-1])
    forward = torch.ops.aten._scaled_dot_product_efficient_attention
    if not backward:
        return lambda: forward(q, k, v, None, False, 0.0, causal, scale=scale)
    out, lse, seed, offset = forward(q, k, v, None, True, 0.0, causal, scale=scale)
    gradient = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    wanted = [True, True, True, False]
    return lambda: gradient(dout, q, k, v, None, out, lse, seed, offset, 0.0, wanted, causal, scale=scale)


def flash(x, causal, backward=False):
    """PyTorch's FlashAttention-2."""
    q, k, v, dout = x
    scale = 1 / math.sqrt(q.shape[-1])
    forward = torch.ops.aten._scaled_dot_product_flash_attention
    if not backward:
        return lambda: forward(q, k, v, 0.0, causal, scale=scale)
    out, lse, cu_q, cu_k, most_q, most_k, seed, unused, _ = forward(q, k, v, 0.0, causal, scale=scale)
    gradient = torch.ops.aten._scaled_dot_product_flash_attention_backward
    rest = (cu_q, cu_k, most_q, most_k, 0.0, causal, seed, unused)
    return lambda: gradient(dout, q, k, v, out, lse, *rest, scale=scale)


def dense(x, causal):
    """What a user of CuPy writes today."""
    q, k, v, _ = (cupy.from_dlpack(a) for a in x)
    scale = q.dtype.type(1 / math.sqrt(q.shape[-1]))
    hidden = ~cupy.tri(q.shape[2], k.shape[2], dtype=bool)
    minus_infinity = q.dtype.type(-math.inf)

    def call():
        s = cupy.matmul(q, k.swapaxes(-1, -2)) * scale
        if causal:
            s = cupy.where(hidden, minus_infinity, s)
        p = cupy.exp(s - s.max(axis=-1, keepdims=True))
        return cupy.matmul(p / p.sum(axis=-1, keepdims=True), v)

    return call


class Peak(cupy.cuda.MemoryHook):
    """The most bytes that were taken from CuPy's pool at a time, beyond those taken before."""

    name = "Peak"

    def __init__(self):
        self.now = self.most = 0

    def malloc_postprocess(self, **found):
        self.now += found["mem_size"]
        self.most = max(self.most, self.now)

    def free_postprocess(self, **found):
        self.now -= found["mem_size"]


def extra_bytes(call):
    """Most device memory that a call takes beside its inputs and its result."""
    call()
    with Peak() as peak:
        result = call()
        return peak.most - result.nbytes


def compare(ours, theirs):
    """Arrays of both calls, one or several each, are the same but for rounding."""
    ours, theirs = ((x,) if hasattr(x, "shape") else x for x in (ours, theirs))
    for a, b in zip(ours, theirs, strict=False):  # PyTorch's tuples are longer: lse, seeds, the gradient of a bias
        a, b = (torch.from_dlpack(x) for x in (a, b))
        difference = float((a.float() - b.float()).abs().max() / b.float().abs().max())
        assert difference <= CLOSE[str(a.dtype).removeprefix("torch.")], f"results differ by {difference:.1e}"


def by_hand(x, causal, backward, br, bc, **options):
    """Our call with blocks of another size than planned; None where they do not fit."""
    q, k, v, dout = (cupy.from_dlpack(a) for a in x)
    options = dict(causal=causal, **options)
    direction = "backward" if backward else "forward"
    given = {}
    if backward:
        out, lse = rf.attention(q, k, v, return_lse=True, **options)
        given = dict(dout=dout, o=out, lse=lse)
    problem, operands = check(q, k, v, direction=direction, **given, **options)
    kernel, chip = lookup(problem, direction, operands.device)
    planned = tiling.plan_tiles(problem, chip, direction)
    resident = tiling._flash_resident(problem, chip, direction, planned.order, br, bc)
    tiles = replace(planned, br=br, bc=bc, resident=resident)
    if tiles.smem_bytes > chip.on_chip_bytes:
        return None
    operands.memo = {direction: (kernel, tiles)}
    from rawflash import api, arrays

    run = api._backward if backward else api._forward
    arrays.on(operands)
    return lambda: run(problem, operands)


def tune(d, dtype, T=4096, tokens=16384):
    B, H = tokens // T, 2048 // d
    x = inputs(B, H, T, d, dtype)
    sizes = (32, 48, 64, 80, 96, 112, 128, 160, 192)
    for backward, causal in itertools.product((False, True), (False,)):
        rows = []
        for br, bc in itertools.product(sizes, sizes):
            call = by_hand(x, causal, backward, br, bc)
            if call is None or br * d > 128 * 192 or br * bc > 128 * 160:
                continue
            try:
                time_ = burst({"": call}, 3)[""]
            except rf.BackendError as error:  # no kernel has tiles of this size
                print(f"br={br} bc={bc}: {str(error).splitlines()[-1]}", flush=True)
                continue
            rows.append((flops(B, H, T, d, causal, backward) / time_ / 1e12, br, bc))
        for rate, br, bc in sorted(rows, reverse=True)[:14]:
            which = "backward" if backward else "forward"
            print(f"{dtype} d={d} {which} br={br} bc={bc}: {rate:.1f} TFLOP/s", flush=True)


def versions():
    driver = "unknown"
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.split()[0]
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    return {
        "gpu": name, "driver": driver, "rawflash": rf.__version__, "cupy": cupy.__version__, "torch": torch.__version__,
        "numpy": np.__version__, "python": platform.python_version(),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())), "date": datetime.date.today().isoformat(),
    }  # fmt: skip


# ---- rows of the tables --------------------------------------------------------------------------------------


def peer(d, T, causal, backward, dtype="float32", backend="cupy_raw"):
    """float32 beside PyTorch's memory-efficient attention, others beside its FlashAttention-2."""
    B, H = 16384 // T, 2048 // d
    x = inputs(B, H, T, d, dtype)
    theirs = efficient if dtype == "float32" else flash
    calls = {"rawflash": ours(x, causal, backward, backend=backend), "torch": theirs(x, causal, backward)}
    compare(calls["rawflash"](), calls["torch"]())
    work = flops(B, H, T, d, causal, backward) / 1e12
    times = burst(calls)
    steady = {name: sustained(call, 0.5) for name, call in calls.items()}
    row = {"backend": backend, "dtype": dtype, "d": d, "T": T, "causal": causal, "backward": backward}
    row |= {f"{name}_burst": round(work / t, 1) for name, t in times.items()}
    row |= {f"{name}_sustained": round(work / t, 1) for name, t in steady.items()}
    return row | {"ratio": round(times["torch"] / times["rawflash"], 3)}


def against_dense(B, H, T, d, causal, backend="cupy_raw"):
    x = inputs(B, H, T, d, "float32")
    calls = {name: ours(x, causal, algorithm=name, backend=backend) for name in ("fa2", "fa1")}
    calls["dense"] = dense(x, causal)
    for name in ("fa2", "fa1"):
        compare(calls[name](), calls["dense"]())
    times = burst(calls, 5)
    row = {"backend": backend, "shape": (B, H, T, d), "causal": causal}
    row |= {f"{name}_ms": round(t * 1e3, 3) for name, t in times.items()}
    extra = {name: extra_bytes(call) for name, call in calls.items()}
    row |= {f"{name}_extra_bytes": n for name, n in extra.items()}
    for name in ("fa2", "fa1"):
        row[f"{name}_times"] = round(times["dense"] / times[name], 2)
        row[f"{name}_extra_share"] = round(extra[name] / extra["dense"], 5)
    return row


@cache
def plain_rate():
    """The card's plain float64 rate: a chain of fused multiply-adds in every thread."""
    source = """extern "C" __global__ void chain(double* x) {
        double a[8]; for (int i = 0; i < 8; i++) a[i] = x[threadIdx.x] + i;
        for (int n = 0; n < 4096; n++) for (int i = 0; i < 8; i++) a[i] = fma(a[i], 0.999, 0.001);
        double s = 0; for (int i = 0; i < 8; i++) s += a[i]; x[threadIdx.x] = s; }"""
    chain, space = cupy.RawKernel(source, "chain"), cupy.zeros(256)
    blocks = 132 * 8 * 4
    return blocks * 256 * 4096 * 8 * 2 / burst({"": lambda: chain((blocks,), (256,), (space,))})[""] / 1e12


def doubles(d, T, causal, backward):
    """float64 as a share of the plain rate."""
    B, H = 8192 // T, 2048 // d
    x = inputs(B, H, T, d, "float64")
    time_ = burst({"": ours(x, causal, backward)}, 5)[""]
    found = flops(B, H, T, d, causal, backward) / time_ / 1e12
    return {"d": d, "T": T, "causal": causal, "backward": backward, "tflops": round(found, 2),
            "plain_rate": round(plain_rate(), 1), "share": round(found / plain_rate(), 3)}  # fmt: skip


def graphs(calls, times=QUEUED):
    """CUDA graphs of several calls each, by the name of the library; how to replay one, and its stream's events.

    What a call takes on the host is more than many of these take on the device.
    """
    made = {}
    for name, call in calls.items():
        if name.startswith("rawflash"):
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                call()
                stream.synchronize()
                stream.begin_capture()
                kept = [call() for _ in range(times)]
                graph = stream.end_capture()
            made[name] = stream, lambda graph=graph, stream=stream, kept=kept: graph.launch(stream)
        else:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                call()
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    kept = [call() for _ in range(times)]

            def replay(graph=graph, stream=stream, kept=kept):
                with torch.cuda.stream(stream):
                    graph.replay()

            made[name] = cupy.cuda.ExternalStream(stream.cuda_stream), replay
    return made


def replayed(calls, rounds=15, times=QUEUED):
    """Medians of the device time of one call, in graphs that have their turn in every round."""
    made, found = graphs(calls, times), {name: [] for name in calls}
    for n in range(rounds + 2):
        for name, (stream, replay) in made.items():
            start, end = (cupy.cuda.Event() for _ in range(2))
            start.record(stream)
            replay()
            end.record(stream)
            end.synchronize()
            if n >= 2:
                found[name].append(cupy.cuda.get_elapsed_time(start, end) / times / 1e3)
    return {name: statistics.median(t) for name, t in found.items()}


@cache
def copy_rate():
    """Bytes per second of a copy on the device, read and written."""
    x, y = (cupy.zeros(1 << 28, np.float32) for _ in range(2))
    return 2 * x.nbytes / burst({"": lambda: cupy.copyto(y, x)})[""]


def decode(B, Hq, Hkv, T, d, dtype="bfloat16"):
    """One query a sequence over caches, contiguous and paged, beside PyTorch's cuDNN and FlashAttention-2.

    Caches that fit into L2 stay there from call to call, for all alike.
    """
    functional, backends = torch.nn.functional.scaled_dot_product_attention, torch.nn.attention.SDPBackend
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v = (
        torch.randn((B, h, t, d), generator=generator, device="cuda", dtype=getattr(torch, dtype))
        for h, t in ((Hq, 1), (Hkv, T), (Hkv, T))
    )
    lengths = cupy.full(B, T, np.int32)
    mine = [cupy.from_dlpack(a) for a in (q, k, v)]
    calls = {"rawflash": lambda: rf.attention_decode(*mine, lengths)}
    for page in (16, 64):
        order = torch.randperm(B * T // page, generator=generator, device="cuda")
        table = cupy.from_dlpack(order.argsort().reshape(B, T // page))
        # Block `order[n]` of the pool holds what is block n of the sequences, one behind the other
        pools = [
            cupy.from_dlpack(a.unflatten(2, (T // page, page)).transpose(1, 2).reshape(-1, Hkv, page, d)[order])
            for a in (k, v)
        ]
        calls[f"rawflash, blocks of {page}"] = (
            lambda pools=pools, table=table: rf.attention_decode(mine[0], *pools, lengths, table)
        )

    def theirs(backend):
        with torch.nn.attention.sdpa_kernel(backend):
            return functional(q, k, v, enable_gqa=Hq != Hkv)

    calls["cuDNN"] = lambda: theirs(backends.CUDNN_ATTENTION)
    calls["FlashAttention-2"] = lambda: theirs(backends.FLASH_ATTENTION)
    for name, call in calls.items():
        if name != "cuDNN":
            compare(call(), calls["cuDNN"]())
    times = replayed(calls)
    moved = k.nbytes + v.nbytes
    row = {"dtype": dtype, "B": B, "Hq": Hq, "Hkv": Hkv, "T": T, "d": d, "cache_bytes": moved}
    row |= {f"{name}, us": round(t * 1e6, 2) for name, t in times.items()}
    row |= {f"{name}, TB/s": round(moved / t / 1e12, 3) for name, t in times.items()}
    return row | {
        "ratio": round(times["cuDNN"] / times["rawflash"], 3),
        "of_copy": round(moved / times["rawflash"] / copy_rate(), 3),
        "paged": [round(times["rawflash"] / times[f"rawflash, blocks of {page}"], 3) for page in (16, 64)],
    }


def host_overhead(name):
    """Host time of a warm call: as many as fit the queue, the device doing next to nothing."""
    q = cupy.zeros((1, 1, 16, 16), np.float32)
    t = torch.zeros((1, 1, 16, 16), device="cuda")
    out, lse = rf.attention(q, q, q, return_lse=True)
    call = {
        "attention": lambda: rf.attention(q, q, q, causal=True),
        "attention, lse": lambda: rf.attention(q, q, q, return_lse=True),
        "attention, torch": lambda: rf.attention(t, t, t, causal=True),
        "attention, numba_cuda": lambda: rf.attention(q, q, q, causal=True, backend="numba_cuda"),
        "attention_backward": lambda: rf.attention_backward(q, q, q, q, out, lse),
    }[name]
    call()
    best = math.inf
    for _ in range(20):
        cupy.cuda.get_current_stream().synchronize()
        start = time.perf_counter()
        for _ in range(200):
            call()
        best = min(best, (time.perf_counter() - start) / 200)
    return {"call": name, "microseconds": round(best * 1e6, 2)}


START = """
import json, sys, time
import cupy
import rawflash as rf
from rawflash.backends.cupy_raw import compile

x = cupy.zeros((1, 2, 300, 64), sys.argv[1])
cupy.cuda.get_current_stream().synchronize()
load, loads = compile.load, []

def timed(what):
    start = time.perf_counter()
    result = what()
    cupy.cuda.get_current_stream().synchronize()
    return result, round(time.perf_counter() - start, 4)

def loading(*arguments):
    module, seconds = timed(lambda: load(*arguments))
    loads.append(round(seconds * 1e3, 2))
    return module

compile.load = loading
(out, lse), forward = timed(lambda: rf.attention(x, x, x, causal=True, return_lse=True))
_, backward = timed(lambda: rf.attention_backward(x, x, x, x, out, lse, causal=True))
print(json.dumps({"forward_s": forward, "backward_s": backward, "loads_ms": loads}))
"""


def start(dtype):
    """The first call of a process on an empty cache of kernels, and of the next process."""
    row = {"dtype": dtype}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "later"):
            done = subprocess.run([sys.executable, "-c", START, dtype], env=os.environ | {"RAWFLASH_CACHE_DIR": folder},
                                  capture_output=True, text=True, check=True)  # fmt: skip
            row[name] = json.loads(done.stdout)
    return row


# Sizes that the project has set itself bounds for come first.
SIZES = ((64, 2048), (128, 4096), (64, 4096), (128, 2048), (64, 8192), (128, 8192))
BOTH = (False, True)
TABLES = {  # name: what makes a row, and its arguments row by row
    "host_overhead": (
        host_overhead, [("attention",), ("attention, lse",), ("attention, torch",), ("attention_backward",),
                        ("attention, numba_cuda",)]
    ),
    "decode": (decode, [
        (16, 32, 8, 8192, 128), (1, 32, 8, 8192, 128), (1, 32, 8, 131072, 128), (64, 32, 8, 8192, 128),
        (16, 32, 32, 8192, 128), (16, 32, 8, 8192, 64), (16, 32, 8, 8192, 128, "float16"),
    ]),
    "start": (start, [("float16",), ("float32",), ("float64",)]),
    "peers": (peer, [(*size, *how) for size in SIZES for how in itertools.product(BOTH, BOTH)]),
    "against_dense": (
        against_dense, [(*shape, causal) for shape in ((4, 16, 4096, 128), (1, 8, 2048, 64)) for causal in BOTH]
    ),
    "numba_peers": (peer, [
        *((d, T, causal, False, "float32", "numba_cuda") for d, T in ((64, 4096), (128, 4096)) for causal in BOTH),
        *((d, T, *how, "bfloat16", "numba_cuda") for d in (128, 64) for T in (4096, 8192)
          for how in itertools.product(BOTH, BOTH)),
    ]),
    "numba_against_dense": (against_dense, [(4, 16, 4096, 128, causal, "numba_cuda") for causal in BOTH]),
    "doubles": (doubles, [(d, 4096, *how) for d in (64, 128) for how in itertools.product(BOTH, BOTH)]),
}  # fmt: skip


def tables(names, out, seconds):
    """Fill the tables and write the record after every row; how many rows have no figures."""
    end, missing = time.monotonic() + seconds, 0
    record = {"versions": versions()}
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        make, rows = TABLES[name]
        record[name] = []
        for arguments in rows:
            start = time.monotonic()
            if start > end:
                row = {"arguments": arguments, "not run": f"{seconds} s are over"}
            else:
                try:
                    row = make(*arguments)
                except Exception as error:
                    row = {"arguments": arguments, "error": f"{type(error).__name__}: {error}"}
                    traceback.print_exc()
            missing += "arguments" in row
            record[name].append(row)
            print(name, row, f"{time.monotonic() - start:.1f} s", flush=True)
            out.write_text(json.dumps(record, indent=1) + "\n")
    return missing


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", nargs=2, metavar=("d", "dtype"))
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / f"gpu-{datetime.date.today()}.json")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--seconds", type=float, default=480, help="no row is begun after this time")
    args = parser.parse_args()
    if args.tune:
        tune(int(args.tune[0]), args.tune[1])
        return
    missing = tables(args.only, args.out, args.seconds)
    print(f"wrote {args.out}; rows without figures: {missing}")
    sys.exit(missing > 0)


if __name__ == "__main__":
    main()
