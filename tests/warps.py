"""Tensor-core kernels of numba_cuda on a CPU, as plain Python, behind a CuPy made of NumPy (emulator.py).

For a process of its own, as simulator.py, which has no warps. Here a thread is a greenlet, warps run ahead of each
other at random, and what a warp does together needs all its lanes. An asynchronous copy spoils its target at once and
lands when its thread waits, so that a barrier or a wait too few is a NaN.
"""

import ctypes
import math
import random
from collections import namedtuple
from importlib import import_module
from types import SimpleNamespace

import emulator
import greenlet
import ml_dtypes
import numpy as np
from numba import config
from numba.cuda.simulator import kernel as simulated

from rawflash.backends.numba_cuda import call, compile, intrinsics, mma

LANE = np.arange(32)
G, T = LANE >> 2, LANE & 3  # of a lane: row and pair of columns of an 8 x 8 matrix
KIND = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
MODULES = ("tile", "padding", "side_gradients", "softmax", "fa2_forward", "fa2_backward")
MMA_MODULES = ("tile", "forward", "backward")
ORDER = random.Random(0)
AHEAD = 0.4  # share of the warps that go on
POISON = 0xFF  # every byte: NaN in both 16-bit formats, and in float32
now = SimpleNamespace(thread=None)
launched = []  # names and families of what ran


class Thread:
    def __init__(self, block, tid):
        self.block, self.tid, self.lane = block, tid, tid & 31
        self.waits = self.given = self.got = None
        self.copies = []


def together(kind, given=None):
    """Wait until all lanes of the warp, or all threads for "block", are here; what this one gets."""
    me = now.thread
    me.waits, me.given = kind, given
    me.block.main.switch()
    return me.got


class Block:
    def __init__(self, kernel, words, threads, shared, index):
        self.index = index
        self.memory = np.full(shared, POISON, np.uint8)
        self.threads = [Thread(self, tid) for tid in range(threads)]
        self.lets = [greenlet.greenlet(lambda: kernel(words)) for _ in self.threads]

    def run(self):
        self.main = greenlet.getcurrent()
        warps = [self.threads[n : n + 32] for n in range(0, len(self.threads), 32)]
        ready = warps
        while True:
            chosen = [warp for warp in ready if ORDER.random() < AHEAD] or ready[-1:]
            ready = [warp for warp in ready if warp not in chosen]
            for warp in chosen:
                for thread in warp:
                    now.thread, thread.waits = thread, None
                    self.lets[thread.tid].switch()
                kinds = {"dead" if self.lets[thread.tid].dead else thread.waits for thread in warp}
                assert len(kinds) == 1, f"lanes of a warp wait for different things: {kinds}"
                kind = kinds.pop()
                if kind not in ("block", "dead"):
                    collective(kind, warp, self.memory)
                    ready = [*ready, warp]
            if not ready:
                live = [warp for warp in warps if not self.lets[warp[0].tid].dead]
                if not live:
                    return
                assert len(live) == len(warps), "threads wait for threads that will not come"
                ready = warps


def collective(kind, lanes, memory):
    """What the lanes of a warp do together."""
    given = [thread.given for thread in lanes]
    got = [None] * 32
    if kind == "any":
        got = [int(any(x > y for x, y in given))] * 32
    elif kind == "shuffle":
        got = [given[n ^ given[n][1]][0] for n in range(32)]
    elif kind.startswith("ldmatrix"):
        found = np.zeros((32, 4), np.uint32)
        for m in range(4):
            rows = given[8 * m : 8 * m + 8]
            assert all(at % 16 == 0 and at + 16 <= len(memory) for at in rows), rows
            assert len({at >> 4 & 7 for at in rows}) == 8, "two rows in the same banks"
            matrix = np.array([memory[at : at + 16].view(np.uint16) for at in rows])
            matrix = matrix.T if kind == "ldmatrix transposed" else matrix
            found[:, m] = np.ascontiguousarray(matrix).view(np.uint32)[G, T]
        got = [tuple(row) for row in found.tolist()]
    elif kind in KIND:
        halves = np.array([x[:6] for x in given], np.uint32).view(KIND[kind]).astype(np.float64).reshape(32, 6, 2)
        c = np.array([x[6:] for x in given], np.float64)
        A, B, C = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        for e in range(2):
            for r in range(4):
                A[G + 8 * (r & 1), 2 * T + e + 8 * (r >> 1)] = halves[:, r, e]
            for r in range(2):
                B[2 * T + e + 8 * r, G] = halves[:, 4 + r, e]
                C[G + 8 * r, 2 * T + e] = c[:, 2 * r + e]
        with np.errstate(invalid="ignore", over="ignore"):
            C = (C + A @ B).astype(np.float32)
        of_lanes = np.stack([C[G, 2 * T], C[G, 2 * T + 1], C[G + 8, 2 * T], C[G + 8, 2 * T + 1]], 1)
        got = [tuple(x) for x in of_lanes.tolist()]
    else:
        assert kind == "warp", kind
    for thread, x in zip(lanes, got, strict=True):
        thread.got = x


# ---- in place of the instructions ------------------------------------------------------------------------


def packer(kind):
    def pack(low, high):
        with np.errstate(over="ignore", invalid="ignore"):
            return int(np.array([low, high], np.float32).astype(KIND[kind]).view(np.uint32)[0])

    return pack


def copy16_if(to, address, size):
    memory = now.thread.block.memory
    assert to % 16 == 0 and (size == 0 or address % 16 == 0) and to + 16 <= len(memory), (to, address)
    memory[to : to + 16] = POISON
    now.thread.copies.append((to, address, size))


def await_copies():
    for to, address, size in now.thread.copies:
        data = ctypes.string_at(int(address), 16) if size else bytes(16)
        now.thread.block.memory[to : to + 16] = np.frombuffer(data, np.uint8)
    now.thread.copies.clear()


def words_at(at, count, kind):
    assert at % (4 * count) == 0 and at + 4 * count <= len(now.thread.block.memory), at
    return now.thread.block.memory[at : at + 4 * count].view(kind)


def store(kind):
    def store(at, x):
        words_at(at, 1, kind)[0] = x

    return store


def greater(x, y):
    return y if x != x else x if y != y else max(x, y)


INSTRUCTIONS = {
    "mma_bf16": lambda *x: together("bf16", x),
    "mma_f16": lambda *x: together("f16", x),
    "ldmatrix": lambda at: together("ldmatrix", at),
    "ldmatrix_transposed": lambda at: together("ldmatrix transposed", at),
    "pack_bf16": packer("bf16"),
    "pack_f16": packer("f16"),
    "multiply_add": lambda x, y, z: x * y + z,
    "greater": greater,
    "least_or_nan": lambda x, y: math.nan if x != x or y != y else min(x, y),
    "any_greater": lambda x, y: together("any", (x, y)),
    "copy16": lambda to, address: copy16_if(to, address, 16),
    "copy16_if": copy16_if,
    "shared_store": store(np.uint32),
    "shared_load4": lambda at: tuple(words_at(at, 4, np.uint32).tolist()),
    "shared_load2f": lambda at: tuple(words_at(at, 2, np.float32).tolist()),
    "shared_store1f": store(np.float32),
    "quotient": lambda x, y: x // y,
    "shared_base": lambda: 0,
}
# names that are there under the simulator too, but not for warps
OTHERS = {
    "commit_copies": lambda: None,
    "await_copies": await_copies,
    "exchange": lambda x, lane: together("shuffle", (x, lane)),
    "sync_warp": lambda: together("warp"),
}
NUMBERS = {"int32": int, "int64": int, "uint16": int, "uint32": lambda x: int(x) & 0xFFFFFFFF, "float32": float,
           "HIDDEN": -math.inf}  # fmt: skip
Index = namedtuple("Index", "x")


class Cuda:
    """In place of numba.cuda."""

    threadIdx = property(lambda self: Index(now.thread.tid))
    blockIdx = property(lambda self: Index(now.thread.block.index[0]))
    gridDim = property(lambda self: Index(now.thread.block.index[1]))
    local = SimpleNamespace(
        array=lambda shape, kind: [math.nan] * shape if isinstance(shape, int) else np.full(shape, np.nan)
    )
    shared = SimpleNamespace(
        array=lambda shape, kind, alignment: now.thread.block.memory.view(np.dtype(str(kind))),
    )

    def syncthreads(self):
        together("block")

    def syncwarp(self):
        together("warp")


class Function:
    ptr = 0

    def __init__(self, kernel, module, name):
        self.kernel, self.threads = kernel, module.threads_of(name)
        self.index, self.names = call.words_of(module.mask_words), call.call_type(module.mask_words)
        self.ran = name, module.values["FAMILY"]

    def __call__(self, blocks, threads, words, shared_bytes=0):
        words = self.names(*(words[n] for n in self.index))
        launched.append(self.ran)
        for n in range(blocks):
            Block(self.kernel, words, self.threads, shared_bytes, (n, blocks)).run()


class Module(compile.Module):
    def get_function(self, name):
        file = import_module(f"rawflash.backends.numba_cuda.{self.file}")
        return Function(file.make_kernels(compile.complete(self.values, self.mask))[name], self, name)


def install(monkeypatch):
    """Make calls with backend="numba_cuda" run here."""
    assert config.ENABLE_CUDASIM
    emulator.install(monkeypatch)
    monkeypatch.setattr(compile, "load", Module)
    monkeypatch.setattr(simulated.FakeCUDAKernel, "__call__", lambda self, *x: self.fn(*x))
    for name, twin in INSTRUCTIONS.items():
        monkeypatch.setattr(intrinsics, name, twin, raising=False)
    modules = [import_module(f"rawflash.backends.numba_cuda.{name}") for name in MODULES]
    own = [import_module(f"{mma.__name__}.{name}") for name in MMA_MODULES]
    for module in (*modules, *own):
        twins = OTHERS | {"cuda": Cuda()} | (NUMBERS if module in own else {})
        for name, twin in twins.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, twin)
