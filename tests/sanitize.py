"""Run every kernel of cupy_raw under compute-sanitizer, on a GPU, and put what it finds on record.

    python tests/sanitize.py                            # memcheck, racecheck, synccheck, initcheck
    python tests/sanitize.py --tools memcheck racecheck
    python tests/sanitize.py --tools racecheck --resume # the calls that a run before this one left, of the same kernels
    python tests/sanitize.py --logs FOLDER              # keeps all that the tools say, a file for each

A run of all tests would take hours: a sanitized kernel is 10 to 100 times slower. Here are small calls instead that
reach every branch of the kernels (:func:`cases`), forward and backward, by both algorithms. Their results are
compared with numpy_tiled, loosely: a tool must not call clean what did not run. First they run without a tool, which
leaves the compiled kernels in the disk cache. Processes take the calls one by one until all are done, or until time
is over; the record is written after each tool, and a tool is clean when it found nothing in *all* calls.

CuPy's memory pool would hide overruns, since they end in other memory of the pool: each array here is an allocation
of its own, with a margin behind it.
"""

import argparse
import datetime
import glob
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest import mock

import gpu_record
import numpy as np
from gpu import _EITHER, ALGORITHMS, append_and_decode, on_gpu, to_cupy, to_host
from strategies import Decode
from test_decode import make as decode
from test_forward import half_visible, make, normal

from rawflash import masks as M
from rawflash import arrays, hardware, sections, sm90, tiling
from rawflash.backends.cupy_raw import compile as compiler
from rawflash.backends.cupy_raw.launch import Launcher
from rawflash.tiles import Divided

# Failures of CUDA's functions are exceptions in CuPy; what memcheck would report beside them are CuPy's questions.
TOOLS = {
    "memcheck": ("--padding", "256", "--report-api-errors", "no"),
    "synccheck": (),
    "initcheck": (),
    "racecheck": (),  # the slowest: has what time the others leave
}
# Python alone is looked at, not what it may start. A kernel with an error is ended, and the calls after it go on.
COMMON = ("--target-processes", "application-only", "--launch-timeout", "60", "--print-limit", "20",
          "--destroy-on-device-error", "kernel")  # fmt: skip
PORT, PORTS = 49152, 20  # where the tool's processes talk to each other: some ports for each pair
LIMIT = 400  # seconds of one tool, then its processes are ended
BEGIN, BEGIN_SLOW = 0.7, 0.5  # no call is begun after this part of the limit; of a process that is ended none counts
PROCESSES = max(1, min(20, (os.cpu_count() or 1) * 3 // 4))
# In each process: one thread for what runs on the host, and kernels that tools can follow (see sm90/hopper.cuh)
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RAWFLASH_BOUNDED": "1"}
PLACES = ("/usr/local/cuda*/bin", "/usr/local/cuda*/compute-sanitizer", "/opt/nvidia/*/bin",
          *(os.path.join(path, "nvidia/*/bin") for path in sys.path))  # fmt: skip
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
RAN = "what ran: "
PYTHON = ("tall, causal", "lengths", "bias by row", "mask", "everything, deterministic", "long", "float16, tall",
          "bfloat16, tall", "float64, tall", "float16, packed",
          "decode, blocks")  # calls of numba_cuda, which takes seconds a kernel
KERNEL = re.compile(r"__global__ void (?:__launch_bounds__\([^)]*\) )?(?:CLUSTER )?(\w+)\(")
# Largest difference from numpy_tiled in the same dtype, as part of the largest number of the result
LOOSE = {"float16": 2e-2, "bfloat16": 1e-1, "float32": 1e-4, "float64": 1e-10}


# ---- in a process under a tool -----------------------------------------------------------------------------


def cases():
    """Calls that reach every branch: name -> a `Case` or a `Decode` with arrays on the host."""
    Tq, Tk = 33, 47
    odd = dict(Tq=Tq, Tk=Tk, d=20)
    tall = dict(B=1, Hq=4, Hkv=2, Tq=200, Tk=230, d=64)  # several tiles each way
    mask = M.Segments(np.arange(Tq) // 10, np.arange(Tk) // 10) | M.PrefixLM(9) & M.Dense(
        np.random.default_rng(1).random((2, 1, Tq, Tk)) < 0.5
    )
    everything = odd | dict(
        Hq=4, Hkv=2, causal=True, window=(30, None), q_lengths=[Tq, 20], kv_lengths=[Tk, 30], mask=mask,
        bias=normal(4, Tq, Tk), alibi_slopes=np.full(4, 0.02), softcap=8.0, sinks=normal(4), dropout=0.2,
    )  # fmt: skip
    calls = {
        "plain": odd,
        "odd dimensions": dict(Tq=Tq, Tk=Tk, d=7, dv=11),
        "causal, grouped heads": dict(Hq=4, Hkv=2, Tq=Tq, Tk=Tk, d=64, causal=True),
        "rows without keys": dict(Tq=Tk, Tk=Tq, d=20, causal=True),
        "tall": tall,
        "tall, causal": tall | dict(causal=True),
        "long": dict(Hq=4, Hkv=2, Tq=Tq, Tk=1500, d=64, causal=True, sinks=normal(4)),  # keys in parts
        "tall, window, deterministic": tall | dict(window=(70, 20), deterministic=True),
        "lengths": dict(B=3, **odd, causal=True, q_lengths=[Tq, 5, 0], kv_lengths=[Tk, 0, 30]),
        "offsets": odd | dict(causal=True, q_offset=np.array([-3, 4])),
        "bias": odd | dict(bias=normal(2, 2, Tq, Tk)),
        "bias by row": odd | dict(bias=normal(2, Tq, 1)),
        "bias by key": odd | dict(bias=normal(2, 1, 1, Tk)),
        "bias, one number": odd | dict(bias=normal(1, 1)),
        "sinks, padding": dict(B=3, **odd, q_lengths=[0, Tq, 5], kv_lengths=[7, 0, 0], sinks=normal(2)),
        "alibi by batch": odd | dict(alibi_slopes=np.array([[0.5, 0.01], [0.0, 1.0]])),
        "dropout, softcap": odd | dict(dropout=0.3, seed=2**64 - 1, softcap=5.0),
        "mask": odd | dict(mask=half_visible(2, 2, Tq, Tk)),
        "everything, deterministic": everything | dict(deterministic=True),
        "nothing": dict(Tq=Tq, Tk=0, d=20),
    }
    for dtype in LOOSE:
        calls[f"{dtype}, everything"] = everything | dict(dtype=dtype)
        calls[f"{dtype}, tall"] = tall | dict(dtype=dtype, causal=True)
        calls[f"{dtype}, tall, deterministic"] = tall | dict(dtype=dtype, d=72, deterministic=True)
    # Tensor cores in 16 bits: more columns than a warp sums, rows that are no whole vectors, whole tiles under a mask
    wide = tall | dict(d=200, dv=136, dtype="float16", causal=True)
    calls["float16, wide"] = wide
    calls["float16, wide, deterministic"] = wide | dict(deterministic=True)
    calls["bfloat16, odd dimensions"] = tall | dict(d=7, dv=131, dtype="bfloat16", window=(70, 20))
    segments = M.Segments(np.arange(200) // 150, np.arange(230) // 150)
    calls["bfloat16, segments"] = tall | dict(dtype="bfloat16", mask=segments)
    calls["bfloat16, segments, deterministic"] = calls["bfloat16, segments"] | dict(deterministic=True)
    made = {name: make(**call) for name, call in calls.items()}
    starts = np.array([0, 13, 13, 31], np.int32), np.array([2, 20, 30, Tk], np.int32)  # rows of no sequence, too
    for dtype in ("float32", "float16"):
        packed = make(lead=(), Hq=4, Hkv=2, **odd, dtype=dtype, causal=True, sinks=normal(4))
        made[f"{dtype}, packed"] = replace(packed, cu_seqlens=starts)
    wide = dict(B=1, Hq=2, Hkv=1, Tq=70, Tk=150, d=256, dv=192, causal=True)
    made["float16, widest"] = make(**wide, dtype="float16")
    made["bfloat16, long"] = make(**calls["long"], dtype="bfloat16")
    few = dict(Hq=8, B=3, d=64, dv=64, lengths=(300, 31, 150), causal=True)
    made["decode"] = decode(**few, page=0, dtype="bfloat16")
    made["decode, blocks"] = decode(**few, Tq=3, page=16, dtype="float16")
    made["many rows, blocks"] = decode(**few, Tq=20, page=16, dtype="float16")
    made["decode, odd dimensions"] = decode(Tq=2, lengths=(9, 2), d=7)
    large = dict(B=1, Hq=2, Hkv=1, Tq=530, Tk=600)  # float32, whose parts are split before
    made["split inputs"] = make(**large, d=64)
    made["split inputs, causal, lengths"] = make(**large, d=72, dv=40, causal=True, q_lengths=[520], kv_lengths=[599])
    made["split inputs, window, d = 128"] = make(**large, d=128, window=(500, 40), sinks=normal(2))
    packed = make(lead=(), **large | dict(B=None), d=64, causal=True)
    made["split inputs, packed"] = replace(packed, cu_seqlens=([2, 500, 520], [1, 590, 600]))
    made |= halves()
    for name in PYTHON:
        made[f"numba_cuda, {name}"] = replace(made[name], options=made[name].options | {"backend": "numba_cuda"})
    return made


AS_THEY_ARE = {name: getattr(sm90, name) for name in (
    "WGMMA_FEWEST", "WGMMA_FUSED", "WGMMA_FUSED_GAIN", "WGMMA_FUSED_KEYS", "WGMMA_FUSED_LAG", "WGMMA_FUSED_ROWS",
    "WGMMA_FUSED_IN_ORDER", "WGMMA_FUSED_STORED", "WGMMA_PAIRED_ROWS", "WGMMA_PAIRED_ODD", "WGMMA_STORED",
    "WGMMA_STORED_HEADS", "WGMMA_TOGETHER", "WGMMA_SUMS", "WGMMA_SUMS_KEYS", "WGMMA_SUMS_ONCE", "WGMMA_SUMS_SHORT",
    "WGMMA_SUMS_ROWS", "WGMMA_SUMS_GROUP", "_divided", "_divided_by_heads", "_levels",
    "_is_by_head", "_order_gains",
)}  # fmt: skip

IN_ORDER = sections._section_in_order


def plan_for(name):
    """Let sm_90's own kernels have the calls that are named for them: else such small ones go to cuda/mma. And let
    blocks of threads prepare and finish rows of others where a name says so, and clear dQ's sums as in long calls."""
    changed = {"_order_gains": lambda *_: False}
    if name.startswith("warpgroups"):
        changed |= {"WGMMA_FEWEST": 0.0, "WGMMA_STORED_HEADS": 0.0, "WGMMA_FUSED_KEYS": 1 << 30}
    if "by heads" not in name:  # which such small ones are else
        changed |= {"_divided_by_heads": lambda *_: Divided(), "WGMMA_TOGETHER": {0: 1 << 30, 1: 1 << 30}}
    if "sums cleared" in name:
        changed["WGMMA_STORED"] = {64: 0, 128: 0}
    if name.startswith("warpgroups, rows of others"):
        changed |= {"WGMMA_FUSED": defaultdict(lambda: (0, 0)), "WGMMA_FUSED_GAIN": (math.inf,) * 3,
                    "WGMMA_FUSED_KEYS": 1, "WGMMA_FUSED_LAG": 0.0, "WGMMA_FUSED_ROWS": {64: 0, 128: 0},
                    "WGMMA_FUSED_IN_ORDER": {64: 0, 128: 0}, "WGMMA_FUSED_STORED": {64: 0, 128: 0}}  # fmt: skip
    if "several sums" not in name:
        changed["WGMMA_SUMS"] = {256: (0.0, 0.0)}
    else:
        changed |= {"WGMMA_SUMS_KEYS": 0, "WGMMA_SUMS_ONCE": (0.0, 0.0), "WGMMA_SUMS_SHORT": {256: ()},
                    "WGMMA_SUMS_GROUP": {False: math.inf, True: math.inf},
                    "WGMMA_SUMS_ROWS": (0.0 if "residues" in name else math.inf,) * 2,
                    "_is_by_head": lambda *_: "each head" in name}  # fmt: skip
        changed["_levels"] = lambda p, *_: next((x for word, x in ways(p).items() if word in name), None)
    paired = "pairs" in name
    if "divided" in name:
        changed |= {"WGMMA_FUSED_LAG": (5.5 + paired) / sm90.WGMMA_PROCESSORS,
                    "_divided": lambda *_: Divided(2, 3 + paired, 3)}  # fmt: skip
    if paired:
        changed |= {"WGMMA_PAIRED_ROWS": 0, "WGMMA_PAIRED_ODD": defaultdict(int)}
    for table, value in (AS_THEY_ARE | changed).items():  # not `name`, which functions there ask for later
        setattr(sm90, table, value)
    # Of one section nobody would prepare rows of others
    sections._section_in_order = (lambda *_: 0) if name.startswith("warpgroups, rows of others") else IN_ORDER


def ways(problem):
    """Under a mask, how blocks of keys are divided where dQ has several sums."""
    heads, blocks = problem.B * problem.Hkv, -(-problem.Tk // 128)
    return {"late": Divided(), "two parts": Divided(0, heads * blocks, 2, 2, 1, blocks),
            "three parts": Divided(0, heads * blocks, 3, 1, 1, blocks)}  # fmt: skip


def halves():
    """Calls of 16 bits, of several blocks each way: those of sm_90's own kernels, and such as cuda/mma has there."""
    Tq, Tk = 300, 420
    tall = dict(B=1, Hq=4, Hkv=2, Tq=Tq, Tk=Tk)
    calls = {
        "warpgroups": tall | dict(d=64, dtype="bfloat16"),
        "warpgroups, causal": tall | dict(d=64, dtype="float16", causal=True, sinks=normal(4)),
        "warpgroups, causal, d = 128": tall | dict(d=128, dtype="bfloat16", causal=True),
        "warpgroups, window, dv = 96": tall | dict(d=128, dv=96, dtype="float16", window=(130, 7)),
        "warpgroups, lengths": tall | dict(B=2, Hq=2, d=64, dtype="bfloat16", causal=True, q_lengths=[Tq, 70],
                                           kv_lengths=[129, Tk]),
        "warpgroups, lengths, d = 128": tall | dict(B=3, Hq=2, d=128, dtype="float16", q_lengths=[Tq, 0, 40],
                                                    kv_lengths=[65, Tk, 0]),
        "warpgroups, softcap, alibi": tall | dict(d=128, dtype="bfloat16", causal=True, softcap=8.0,
                                                  alibi_slopes=np.array([0.5, 0.1, 0.02, 0.0])),
        "warpgroups, softcap, deterministic": tall | dict(
            d=64, dtype="float16", causal=True, softcap=8.0, deterministic=True),
        "warpgroups, wide, softcap, alibi": tall | dict(
            d=256, dtype="float16", softcap=8.0, alibi_slopes=np.array([0.5, 0.1, 0.02, 0.0])),
        "warpgroups, wide": tall | dict(Hq=2, d=192, dv=128, dtype="bfloat16", causal=True),
        "warpgroups, wide, deterministic": tall | dict(Hq=2, d=192, dv=128, dtype="float16", deterministic=True),
        "warpgroups, wide, causal, deterministic": tall | dict(
            d=256, dtype="bfloat16", causal=True, deterministic=True),
        "warpgroups, rows of others": tall | dict(Hq=5, Hkv=5, d=64, dtype="bfloat16", causal=True),
        "warpgroups, sums cleared": tall | dict(d=64, dtype="bfloat16", causal=True),
        "warpgroups, sums cleared, d = 128": tall | dict(d=128, dtype="float16", causal=True),
        "warpgroups, rows of others, sums cleared": tall | dict(Hq=5, Hkv=5, d=64, dtype="float16", causal=True),
        "warpgroups, rows of others, d = 128": tall | dict(B=2, Hq=6, Hkv=3, d=128, dtype="float16"),
        "warpgroups, by heads": tall | dict(Hkv=1, d=64, dtype="float16", causal=True),
        "warpgroups, by heads, d = 128": tall | dict(Hkv=1, d=128, dtype="bfloat16", causal=True),
        "warpgroups, by heads, and by rows": tall | dict(Hq=1, Hkv=1, d=128, dtype="float16"),
        "warpgroups, rows of others, divided": tall | dict(Hq=5, Hkv=5, d=64, dtype="bfloat16"),
        "warpgroups, rows of others, divided, d = 128": tall | dict(B=2, Hq=6, Hkv=3, d=128, dtype="float16"),
        "warpgroups, rows of others, pairs": tall | dict(Hq=5, Hkv=5, Tq=370, Tk=500, d=128, dtype="float16"),
        "warpgroups, rows of others, pairs, divided": tall | dict(
            B=2, Hq=6, Hkv=3, Tq=370, Tk=500, d=128, dtype="bfloat16"),
        "warpgroups, rows of others, pairs, causal": tall | dict(
            B=2, Hq=6, Hkv=3, Tq=384, Tk=512, d=128, dtype="bfloat16", causal=True),
        "warpgroups, rows of others, pairs, odd": tall | dict(
            B=2, Hq=3, Hkv=3, Tq=300, Tk=330, d=128, dtype="float16", causal=True),
        "mma, bias": tall | dict(d=64, dtype="bfloat16", causal=True, bias=normal(4, Tq, Tk)),
        "mma, mask": tall | dict(d=128, dtype="float16", mask=half_visible(1, 1, Tq, Tk)),
        "mma, d = 256": tall | dict(Hq=2, d=256, dtype="bfloat16", causal=True, bias=normal(2, 1, Tk)),
        "warpgroups, deterministic": tall | dict(d=64, dtype="bfloat16", causal=True, deterministic=True),
        "warpgroups, deterministic, d = 128": tall | dict(B=2, Hq=2, d=128, dtype="float16", deterministic=True,
                                                          kv_lengths=[Tk, 129]),
        "warpgroups, rows of others, deterministic": tall | dict(
            Hq=6, Hkv=6, d=64, dtype="float16", causal=True, deterministic=True),
        "warpgroups, causal, deterministic, d = 128": tall | dict(
            d=128, dtype="float16", causal=True, deterministic=True),
        "warpgroups, rows of others, pairs, deterministic": tall | dict(
            B=2, Hq=3, Hkv=3, Tq=384, Tk=512, d=128, dtype="bfloat16", causal=True, deterministic=True),
        "warpgroups, rows of others, pairs, odd, deterministic": tall | dict(
            B=2, Hq=4, Hkv=2, Tq=300, Tk=630, d=128, dtype="bfloat16", deterministic=True),
        "warpgroups, by heads, deterministic": tall | dict(
            Hkv=1, d=128, dtype="bfloat16", causal=True, deterministic=True),
        "mma, deterministic": tall | dict(
            d=128, dtype="bfloat16", causal=True, bias=normal(4, 1, Tk), deterministic=True),
        "warpgroups, several sums": tall | dict(d=64, dtype="bfloat16", deterministic=True),
        "warpgroups, several sums, residues, divided": tall | dict(
            Hq=2, d=64, dtype="float16", deterministic=True, kv_lengths=[400]),
        "warpgroups, several sums, late": tall | dict(Hq=2, d=128, dtype="bfloat16", causal=True, deterministic=True),
        "warpgroups, several sums, two parts": tall | dict(
            Hq=2, d=64, dtype="float16", causal=True, deterministic=True),
        "warpgroups, several sums, two parts, d = 128": tall | dict(
            Hq=2, d=128, dtype="float16", causal=True, deterministic=True),
        "warpgroups, several sums, three parts": tall | dict(
            Hq=2, d=64, dtype="bfloat16", causal=True, deterministic=True),
        "warpgroups, several sums, d < dv": tall | dict(Hq=2, d=64, dv=128, dtype="bfloat16", deterministic=True),
        "warpgroups, several sums, late, groups": tall | dict(d=64, dtype="float16", causal=True, deterministic=True),
        "warpgroups, several sums, late, each head": tall | dict(
            d=64, dtype="bfloat16", causal=True, deterministic=True),
        "warpgroups, several sums, two parts, each head, d = 128": tall | dict(
            d=128, dtype="bfloat16", causal=True, deterministic=True),
        "warpgroups, wide, several sums, late, groups": tall | dict(
            d=192, dv=128, dtype="bfloat16", causal=True, deterministic=True),
        "warpgroups, rows of others, pairs, several sums": tall | dict(
            Hq=2, d=128, dtype="bfloat16", deterministic=True),
        "warpgroups, wide, several sums, residues": tall | dict(
            d=192, dv=128, dtype="bfloat16", deterministic=True),
        "warpgroups, wide, several sums, late": tall | dict(
            Hq=2, d=256, dtype="float16", causal=True, deterministic=True),
    }  # fmt: skip
    made = {name: make(**call) for name, call in calls.items()}
    again = make(B=1, Hq=2, Tq=200, Tk=Tk, d=64, dtype="bfloat16")
    again.q[:, 0] = 1  # the last keys give the maximum that is not followed; this one, met later, is far above
    again.k[:, :, 30, :] = 40
    made["warpgroups, pieces done again"] = again
    starts = np.array([2, 150, 150, 167, 290], np.int32), np.array([1, 130, 140, 140, 400], np.int32)
    for d, dtype in ((64, "bfloat16"), (128, "float16")):
        packed = dict(lead=(), Hq=4, Hkv=2, Tq=Tq, Tk=Tk, d=d, dtype=dtype, causal=True)
        made[f"warpgroups, packed, d = {d}"] = replace(make(**packed), cu_seqlens=starts)
        in_order = make(**packed, deterministic=True)
        made[f"warpgroups, packed, d = {d}, deterministic"] = replace(in_order, cu_seqlens=starts)
    return made


def compare(name, dtype, got, want):
    """Loosely: rounding is what the tests look at, on a GPU and without a tool."""
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    finite = np.isfinite(want)
    assert (np.isfinite(got) == finite).all(), f"{name}: other numbers are finite"
    most = np.abs(want[finite]).max(initial=1.0)
    error = np.abs(got[finite] - want[finite]).max(initial=0.0)
    assert error <= LOOSE[dtype] * most, f"{name}: differs by {error:.2e}, of numbers up to {most:.2e}"


def check_decode(case):
    """Append two keys to each sequence and decode, with tables on the host and on the GPU; compare."""
    want, cached = case.forward(backend="numpy_tiled"), case.caches(order=2)[:2]
    made = [append_and_decode(case, 2, small_on_device=small_on_device) for small_on_device in (False, True)]
    for *results, k_cache, v_cache in made:
        for name, a, b in zip(("out", "lse"), results, want, strict=True):
            compare(f"decode, {name}", case.q.dtype.name, to_host(a), b)
        for a, b in zip((k_cache, v_cache), cached, strict=True):
            assert to_host(a).tobytes() == b.tobytes(), "the cache is not what was appended"


def nan_first(result, name, canonical=arrays.DeviceResult.canonical):
    """`DeviceResult.canonical`; dq is all NaN then. Tensor maps may write it, which initcheck does not see; what they
    leave out is seen when results are compared."""
    target = canonical(result, name)
    if name == "q":
        made = result._arrays[name]
        made.data.memset_async(0xFF, made.nbytes)
    return target


def nan_where_stored(launcher, count, zero=False, workspace=Launcher.workspace):
    """`Launcher.workspace`; where dQ's sums are, all NaN if the first is stored, by copies, which initcheck does not
    see. What none of them writes makes NaN of results, which are compared."""
    made = workspace(launcher, count, zero)
    constants = dict(tiling.plan_tiles(launcher.problem, hardware.chip_of("cupy_raw"), "backward").constants)
    stored = constants.get("STORES") or constants.get("FIRST_STORES")
    p = launcher.problem
    if stored and count >= p.Hq * p.Tq * p.d and launcher.problem.algorithm == "fa2" and not zero:
        made.data.memset_async(0xFF, made.nbytes)
    return made


def expected(case):
    """out, lse and the gradients, by the loops in NumPy."""
    out, lse = case.forward(backend="numpy_tiled")
    return [out, lse, *case.backward(out, lse, backend="numpy_tiled")]


def algorithms_of(name):
    """fa1 does not run calls for kernels of warpgroups, as it has none: its own, which take longest, have others."""
    return ("fa2",) if name.startswith("warpgroups") else ALGORITHMS


def check(case, algorithms):
    """Run a call on the GPU every way there is, and compare."""
    if isinstance(case, Decode):
        return check_decode(case)
    dtype, names = case.q.dtype.name, ["out", "lse", *("d" + name for name in case.wrt)]
    want = expected(case)
    has_small = case.cu_seqlens is not None or not case.options.keys().isdisjoint(_EITHER)
    for algorithm in algorithms:
        for small_on_device in (False, True) if has_small else (False,):
            gpu = on_gpu(case, small_on_device=small_on_device)
            place = to_cupy(np.full(want[0].shape, np.nan, case.q.dtype))  # initcheck misses tensor maps
            out, lse = gpu.forward(algorithm=algorithm, out=place)
            with (
                mock.patch.object(arrays.DeviceResult, "canonical", nan_first),
                mock.patch.object(Launcher, "workspace", nan_where_stored),
            ):
                got = [out, lse, *gpu.backward(out, lse, algorithm=algorithm)]
            for name, a, b in zip(names, got, want, strict=True):
                compare(f"{algorithm}, {name}", dtype, to_host(a), b)


class Noting:
    """A loaded module that notes which of its kernels are launched."""

    def __init__(self, module, file, ran):
        self.module, self.file, self.ran = module, file, ran

    def get_function(self, name):
        function = self.module.get_function(name)

        def launch(*arguments):
            self.ran.add(f"{self.file} {name}")
            return function(*arguments)

        launch.ptr = function.ptr
        return launch


def usable():
    """Can this process still use the GPU? After some errors it never can."""
    import cupy

    try:
        cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError:
        return False
    return True


def in_order():
    """The calls as they begin: those of warpgroups first, whose kernels change most; then those of numba_cuda, which
    take longest."""
    first = ("warpgroups", "numba_cuda")
    return sorted(cases().items(), key=lambda call: [not call[0].startswith(name) for name in first])


def child(folder, seconds):
    """Run calls that no other process has taken, by a file in the folder; the last line tells what ran."""
    import cupy

    from rawflash.backends.numba_cuda import compile as python

    cupy.cuda.runtime.free(0)  # the tool waits for the first call of CUDA, not for ever
    cupy.cuda.set_allocator(None)
    load, ran, end = compiler.load, {"kernels": set(), "calls": [], "failed": []}, time.monotonic() + seconds

    def noting(text, *arguments):
        (file,) = re.findall(r'^#line 1 "(.*\.cu)"$', text, re.MULTILINE)
        return Noting(load(text, *arguments), file, ran["kernels"])

    compiler.load = noting
    python_load = python.load
    python.load = lambda file, *arguments: Noting(
        python_load(file, *arguments), f"numba_cuda/{file}.py", ran["kernels"]
    )
    for n, (name, case) in enumerate(in_order()):
        if time.monotonic() > end:
            break
        try:
            Path(folder, str(n)).touch(exist_ok=False)
        except FileExistsError:
            continue
        print(name, flush=True)
        plan_for(name)
        try:
            check(case, algorithms_of(name))
            cupy.cuda.runtime.deviceSynchronize()
            ran["calls"].append(name)
        except Exception:
            ran["failed"].append(name)
            traceback.print_exc(file=sys.stdout)
            if not usable():  # no call would run here any more: the others are left to other processes
                break
    print(RAN + json.dumps(ran | {"kernels": sorted(ran["kernels"])}), flush=True)


# ---- tools -------------------------------------------------------------------------------------------------


def sanitizer():
    """Where compute-sanitizer is, and its version."""
    places = [place for pattern in PLACES for place in sorted(glob.glob(pattern), reverse=True)]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *places]))
    if found is None:
        sys.exit(f"compute-sanitizer is neither on PATH nor in {', '.join(PLACES[:3])}; it comes with the CUDA toolkit")
    told = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60).stdout
    version = re.search(r"[Vv]ersion (\S+)", told)
    return found, version[1] if version else "unknown"


def devices():
    """All GPUs that may be used."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given:
        return given.split(",")
    if shutil.which("nvidia-smi") is None:
        return ["0"]
    told = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    return [str(n) for n in range(told.count("GPU "))] or ["0"]


def run(command, limit, **environment):
    """Exit status (None: it took too long) and output of a command, which is ended with all that it started.

    The output goes through a file: something that outlives its end may hold a pipe open.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | ENVIRONMENT | environment,
        )  # fmt: skip
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
        output.seek(0)
        return status, output.read().decode(errors="replace")


def shared(prefix, limit, done=()):
    """Run all calls that are not ``done``, each process under ``prefix``: exit statuses and outputs."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(PROCESSES) as pool:
        for n, (name, _) in enumerate(in_order()):
            if name in done:
                Path(folder, str(n)).touch()  # as if another process had it
        begin = BEGIN_SLOW if "racecheck" in prefix else BEGIN
        work = [sys.executable, __file__, "--child", folder, str(begin * limit)]
        gpus = devices()

        def under(n):
            port = ["--port", str(PORT + PORTS * n), "--max-connections", str(PORTS)] if prefix else []
            return run([*prefix, *port, *work], limit, CUDA_VISIBLE_DEVICES=gpus[n % len(gpus)])

        return list(pool.map(under, range(PROCESSES)))


def outcome(name, results, tool=True, before=None):
    """What goes on record of a tool: errors that it told, and the calls and kernels that ran; shows what went wrong.

    Calls count where their process came to its end and the tool told how many errors there were. "not done" are the
    others, and those with results that are wrong. "clean": there are none of these, and no errors. ``before``: what is
    on record, to which this is added.
    """
    before = before or {"errors": 0, "kernels": [], "calls": 0, "not done": [*cases()]}
    errors, kernels, calls = before["errors"], set(before["kernels"]), done_by(before)
    for status, output in results:
        ran = re.search(f"^{RAN}(.*)$", output, re.MULTILINE)
        told = [int(one or other) for one, other in SUMMARY.findall(output)]
        done, failed = status == 0 and ran is not None and bool(told) == tool, False
        errors += sum(told)
        if done:
            found = json.loads(ran[1])
            calls, kernels, failed = calls | set(found["calls"]), kernels | set(found["kernels"]), found["failed"]
        if not done or failed or any(told):
            why = "errors" if done else "took too long" if status is None else f"ended with {status}"
            print(f"---- {name}: {why}", output[-6000:], sep="\n", flush=True)
    left = [call for call in cases() if call not in calls]
    return {"clean": not errors and not left, "errors": errors, "calls": len(calls), "not done": left,
            "kernels": sorted(kernels)}  # fmt: skip


def done_by(entry):
    """The calls that a tool on record has done; none, if there were other calls then."""
    calls = {*cases()}
    same = len(calls) == entry["calls"] + len(entry["not done"]) and calls >= {*entry["not done"]}
    return calls - {*entry["not done"]} if same else set()


def keep(logs, name, results):
    """All that the processes of a tool said, in a file of their own."""
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"sanitizer-{name}.log").write_text("".join(f"---- {status}\n{output}" for status, output in results))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--seconds", type=float, default=540, help="for everything; a tool gets its share of the rest")
    parser.add_argument("--resume", action="store_true", help="do not run what is on record of these kernels again")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep all that the tools say")
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "SECONDS"), help="run calls, without a tool")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], float(arguments.child[1]))
        return
    end = time.monotonic() + arguments.seconds
    path, version = sanitizer()
    results = shared([], 0.4 * arguments.seconds)
    keep(arguments.logs, "none", results)
    bare = outcome("without a tool", results, tool=False)
    kernels = {kernel.split()[1] for kernel in bare["kernels"]}
    names = {name for file in compiler.CUDA.rglob("*.cu*") for name in KERNEL.findall(file.read_text())}
    print(f"{path} {version}; {bare['calls']} calls, {len(kernels)} kernels; not run: {names - kernels or 'none'}; "
          f"without a tool these fail: {bare['not done'] or 'none'}", flush=True)  # fmt: skip
    if not bare["calls"]:
        sys.exit("no call runs without a tool")
    digest, before = gpu_record.digest(), gpu_record.read().get("sanitizer", {})
    about = {"date": datetime.date.today().isoformat(), "version": version, "kernels_sha256": digest}
    same = before.get("kernels_sha256") == digest
    entries = {tool: before[tool] for tool in TOOLS if same and tool in before and tool not in arguments.tools}
    for n, tool in enumerate(arguments.tools):
        start = time.monotonic()
        limit = max(10.0, min(LIMIT, (end - start) / (len(arguments.tools) - n)))
        old = before.get(tool) if same and arguments.resume else None
        results = shared([path, "--tool", tool, *COMMON, *TOOLS[tool]], limit, done_by(old) if old else ())
        keep(arguments.logs, tool, results)
        entries[tool] = entry = outcome(tool, results, before=old)
        print(f"{tool}: ERROR SUMMARY: {entry['errors']} errors in {entry['calls']} calls, not done: "
              f"{entry['not done'] or 'none'}; {time.monotonic() - start:.0f} s", flush=True)  # fmt: skip
        gpu_record.write(gpu_record.read() | {"sanitizer": about | entries})
    if not all(entries[tool]["clean"] for tool in arguments.tools):
        sys.exit(1)


if __name__ == "__main__":
    main()
