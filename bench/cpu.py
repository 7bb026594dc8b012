"""Times numba_cpu beside PyTorch's CPU attention, A and B alternating in one process, and its extra memory.

``python bench/cpu.py [--json FILE] [--repeats N] [--memory-length T]``; needs ``pip install 'rawflash[bench]'``.
Results are compared with PyTorch's before any timing counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

import rawflash as rf

SHAPE = (1, 8, 1024, 64)


def quantiles(seconds: list[float]) -> dict[str, float]:
    """p20, p50 and p80 in milliseconds."""
    return {f"p{p}": round(float(np.percentile(seconds, p)) * 1e3, 3) for p in (20, 50, 80)}


def alternate(ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Time two functions in turn, after a warm-up of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_ in range(repeats + 2):
        for function, taken in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            function()
            if round_ >= 2:
                taken.append(time.perf_counter() - start)
    a, b = quantiles(times[0]), quantiles(times[1])
    return {"rawflash_ms": a, "torch_ms": b, "speedup": round(b["p50"] / a["p50"], 2)}


def compare(causal: bool, repeats: int) -> list[dict[str, Any]]:
    """Forward and backward at (B H, T, d) = (8, 1024, 64), float32."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal(SHAPE, dtype=np.float32) for _ in range(4))
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention

    out, lse = rf.attention(q, k, v, causal=causal, return_lse=True)
    assert np.abs(out - sdpa(*tensors, is_causal=causal).numpy()).max() < 1e-5
    forward = alternate(
        lambda: rf.attention(q, k, v, causal=causal), lambda: sdpa(*tensors, is_causal=causal), repeats
    )
    leaves = [x.clone().requires_grad_() for x in tensors]
    y, t_dout = sdpa(*leaves, is_causal=causal), torch.from_numpy(dout)
    theirs = torch.autograd.grad(y, leaves, t_dout, retain_graph=True)
    ours = rf.attention_backward(dout, q, k, v, out, lse, causal=causal)
    assert all(np.abs(a - b.numpy()).max() < 1e-4 for a, b in zip(ours, theirs, strict=True))
    backward = alternate(
        lambda: rf.attention_backward(dout, q, k, v, out, lse, causal=causal),
        lambda: torch.autograd.grad(y, leaves, t_dout, retain_graph=True),
        repeats,
    )
    pairs = (("forward", forward), ("backward", backward))
    return [{"direction": name, "causal": causal, "shape": SHAPE, "dtype": "float32", **r} for name, r in pairs]


def resident_megabytes() -> float:
    """Resident memory of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


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
        "T": length, "d": 64, "causal": True, "extra_megabytes": round(peak - before, 1),
        "dense_megabytes": round(length * length * 4 / 1e6), "forward_s": round(middle - start, 2),
        "backward_s": round(end - middle, 2),
    }  # fmt: skip


def main() -> None:
    """Print one record as JSON, and write it to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the record to this file as well")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--memory-length", type=int, default=65536, help="0 leaves the memory run out")
    arguments = parser.parse_args()
    torch.set_num_threads(numba.get_num_threads())
    # Memory first: what earlier calls freed would be used again and not be seen to grow.
    memory = extra_memory(arguments.memory_length) if arguments.memory_length else None
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": {"cpu": platform.processor() or platform.machine(), "threads": numba.get_num_threads()},
        "versions": {"rawflash": rf.__version__, "numba": numba.__version__, "numpy": np.__version__,
                     "torch": torch.__version__, "python": platform.python_version()},
        "isa": torch.backends.cpu.get_cpu_capability(),
        "cells": compare(False, arguments.repeats) + compare(True, arguments.repeats),
    }  # fmt: skip
    if memory is not None:
        record["memory"] = memory
    text = json.dumps(record, indent=2)
    print(text)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
