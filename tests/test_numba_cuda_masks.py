"""The device functions of numba_cuda that need no GPU to be proved: visibility, dropout, loads and stores.

Numba decides when it is imported whether kernels run on its simulator, so what is said here is found out by this
file run as a program in a process of its own (`checks`): ``simulator``, ``compile`` (for sm_90a, no GPU needed), or
``gpu``, which is ``simulator`` on hardware. It prints what is wrong as JSON, name by name.
"""

import ctypes
import json
import os
import random
import subprocess
import sys
import threading
import time
import traceback
from collections import namedtuple
from functools import partial
from itertools import cycle, product
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from test_masks_cuda import CASES, allowed, rectangles_of
from test_philox import KNOWN

import rawflash as rf
from rawflash import masks as M
from rawflash import philox as host_philox

FIRST = 3  # word of the call at which the mask begins
THREADS = 7  # of the blocks that share a scan; the simulator runs each as a thread
SAMPLE = 8  # of the rectangles, where not all are looked at in the simulator
SEEDS = (1, 2**32 - 1, 2**63, 0x123456789ABCDEF0)

# Wrong on purpose, one function each: name -> (which case notices, function, what stands in its place, which is
# given the right one first).
WRONG = {
    "bounds swapped": ("causal 4x4", "band_visible", lambda right, lower, upper, *rest: right(upper, lower, *rest)),
    "always batch 0": ("prefix of each", "per_batch", lambda right, address, count, b: right(address, count, 0)),
    "a full tile that is not": ("prefix of each", "below", lambda right, x0, x1, limit: right(x0, x1 - 1, limit)),
    "an empty tile that is not": ("segments 4x4", "equal_ids", lambda right, rows, keys: 0),
    "ids of the next": ("segments 4x6", "int_at", lambda right, address, index: right(address, index ^ 1)),
    "bytes other than one": ("bytes", "byte_at", lambda _, address, at: memory.ldg_uint8(address + at) == 1),
}


def all_cases():
    yield from CASES.items()
    raw = np.array([0, 1, 2, 128, 255, 0], np.uint8).view(bool)
    yield "bytes", (M.Dense(raw), (1, 1, 4, 6), (0,))
    yield "program of a user's", (Composed(), (1, 1, 4, 6), (1,))


class Composed(M.Mask):
    """A user's mask that says what it is as a program alone; its words for CUDA text are others."""

    same = M.Causal() & M.Prefix(3)

    def visible(self, *args):
        return self.same.visible(*args)

    def tile(self, *args):
        return self.same.tile(*args)

    def program(self):
        return self.same.program()

    def words(self):
        return [7]


# ---- what pytest runs ------------------------------------------------------------------------------------


def outcome(what):
    """What ``python this_file what`` found wrong, by name."""
    pytest.importorskip("numba_cuda")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_")}
    paths = [str(Path(rf.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "NUMBA_ENABLE_CUDASIM": str(int(what == "simulator"))}
    command = [sys.executable, "-W", "error::RuntimeWarning", __file__, what]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_simulated_equals_python():
    """Masks on small grids, every element and rectangle; dropout; memory. And that the comparison can fail."""
    assert outcome("simulator") == {}


def test_compiles_for_a_gpu():
    """Masks of every structure and all of memory.py, to machine code for sm_90a: no stack, no call left."""
    assert outcome("compile") == {}


@pytest.mark.gpu
def test_gpu_equals_python():
    """What the simulator ran, on hardware: there the ids of segments are exchanged between lanes."""
    assert outcome("gpu") == {}


# ---- what the program runs: memory -----------------------------------------------------------------------


class Memory:
    """Arrays where kernels find them: copies on a GPU; in the simulator the host's own."""

    def __init__(self, simulated):
        self.simulated, self.kept = simulated, []

    def address(self, array):
        """Of the first element, with the array's strides."""
        if self.simulated:
            self.kept.append(array)
            return array.ctypes.data
        low, high = np.lib.array_utils.byte_bounds(array)
        raw = (ctypes.c_uint8 * (high - low)).from_address(low)
        there = cuda.to_device(np.frombuffer(raw, np.uint8))
        self.kept.append((array, there))
        return there.__cuda_array_interface__["data"][0] + array.ctypes.data - low

    def host(self, array, address):
        """What is now at an address that was that of a contiguous array."""
        if not self.simulated:
            (there,) = [d for a, d in self.kept if a is array]
            array = there.copy_to_host().view(array.dtype).reshape(array.shape)
        return array


# ---- masks -----------------------------------------------------------------------------------------------


def mask_kernels(mask):
    """visible(call, shape, offset, to), tiles(call, b, h, rectangles, count, offset, to), of a mask's structure."""
    codes = visibility.structure(mask)
    if codes not in mask_kernels.made:
        see, classify = visibility.make_mask(mask, FIRST)
        load, store = memory.load_int64, memory.store_int64

        @cuda.jit
        def visible(call, shape, offset, to):
            for b in range(shape[0]):
                for h in range(shape[1]):
                    for i in range(shape[2]):
                        for j in range(shape[3]):
                            store(to, see(call, b, h, i, j, offset))
                            to += 8

        @cuda.jit
        def tiles(call, b, h, rectangles, count, offset, to):
            for n in range(count):
                r = rectangles + 32 * n
                kind = classify(call, b, h, load(r), load(r + 8), load(r + 16), load(r + 24), offset)
                store(to + 8 * (n * cuda.blockDim.x + cuda.threadIdx.x), kind)

        mask_kernels.made[codes] = visible, tiles
    return mask_kernels.made[codes]


mask_kernels.made = {}


def check_mask(mask, shape, offsets, simulated):
    """Predicate and classes against Python's."""
    store = Memory(simulated)
    words = [store.address(word) if isinstance(word, np.ndarray) else int(word) for word in visibility.words(mask)]
    call = (*range(FIRST), *words)
    visible, tiles = mask_kernels(mask)
    all_rectangles = rectangles_of(*shape[2:])
    heads = list(product(range(shape[0]), range(shape[1])))
    draw = random.Random(7)
    for offset in offsets:
        seen = np.full(shape, -1, np.int64)
        to = store.address(seen)
        (partial(run_alone, visible) if simulated else visible[1, 1])(call, shape, offset, to)
        seen = store.host(seen, to)
        np.testing.assert_array_equal(seen, mask.visible(*np.ogrid[tuple(map(slice, shape))], offset))
        for (b, h), threads in product(heads, (1, THREADS) if simulated else (32, 96)):
            rectangles = all_rectangles
            if simulated and threads > 1 and (M.OP_DENSE not in visibility.structure(mask) or (b, h) != heads[-1]):
                continue  # the threads do nothing together, or have done so already
            if simulated and (threads > 1 or (b, h) != heads[-1] or shape[2] > 9):
                rectangles = draw.sample(all_rectangles, min(SAMPLE, len(all_rectangles)))
            classes = np.full((len(rectangles), threads), -1, np.int64)
            to = store.address(classes)
            where = store.address(np.array(rectangles, np.int64))
            run = partial(run_alone, tiles) if simulated and threads == 1 else tiles[1, threads]
            run(call, b, h, where, len(rectangles), offset, to)
            for rectangle, kinds in zip(rectangles, store.host(classes, to).tolist(), strict=True):
                may = allowed(mask, seen[b, h] != 0, b, h, rectangle, offset)
                assert len(set(kinds)) == 1, f"{(b, h)} {rectangle} at {offset}: threads differ, {kinds}"
                assert kinds[0] in may, f"{(b, h)} {rectangle} at {offset}, {threads} threads: {kinds[0]}, not {may}"


def run_alone(kernel, *args):
    """A block of one thread as plain Python: most of the simulator's time goes into its own calls and barriers."""
    here, kind = globals(), type(visibility.band_tile)
    before, call = here["cuda"], kind.__call__
    one = SimpleNamespace(x=0), SimpleNamespace(x=1)
    visibility.cuda = here["cuda"] = SimpleNamespace(threadIdx=one[0], blockDim=one[1], syncthreads_or=bool)
    kind.__call__ = lambda function, *args: function.fn(*args)
    try:
        kernel.fn(*args)
    finally:
        visibility.cuda = here["cuda"] = before
        kind.__call__ = call


def check_wrong(case, function, make):
    """The comparison fails where a function is not what it should be. In the simulator functions are looked up."""
    right = getattr(visibility, function)
    setattr(visibility, function, lambda *args: make(right, *args))
    try:
        check_mask(*dict(all_cases())[case], True)
    except AssertionError:
        return
    finally:
        setattr(visibility, function, right)
    raise AssertionError(f"{case}: nobody noticed")


def check_range_by_warp():
    """The exchange between lanes, which the simulator has not: here 32 threads that wait for each other."""
    lane, slots, together = threading.local(), [0] * 32, threading.Barrier(32, timeout=60)

    def shfl_xor_sync(lanes, value, step):
        assert lanes == 0xFFFFFFFF
        slots[lane.x] = value
        together.wait()
        value = slots[lane.x ^ step]
        together.wait()
        return value

    rng = np.random.default_rng(7)
    drawn = [rng.integers(-(2**62), 2**62, 3 + count) for count in (1, 2, 31, 32, 33, 64, 65, 100)]
    found = [[None] * 32 for _ in drawn]

    def run(x):
        lane.x = x
        for numbers, row in zip(drawn, found, strict=True):
            row[x] = visibility._range_by_warp(numbers.ctypes.data, 3, len(numbers) - 3)

    before = visibility.cuda, visibility.int_at
    visibility.cuda = SimpleNamespace(threadIdx=lane, shfl_xor_sync=shfl_xor_sync)
    visibility.int_at = lambda address, index: memory.ldg_int64(address + 8 * index)
    try:
        threads = [threading.Thread(target=run, args=(x,)) for x in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        visibility.cuda, visibility.int_at = before
    for numbers, row in zip(drawn, found, strict=True):
        assert set(row) == {(numbers[3:].min(), numbers[3:].max())}, len(numbers)


def check_unknown():
    """Masks that this backend cannot run say so; masks of one structure have the same functions."""

    class Odd(M.Mask):
        """Enough for numpy_tiled."""

    class Other(M.Mask):
        """Compiled elsewhere."""

        def program(self):
            return [M.Instruction(99)]

    for mask, text in ((Other(), "Other.*99"), (M.Causal() & Other(), "99"), (Odd(), "Odd.*program")):
        with pytest.raises(rf.BackendError, match=text):
            visibility.make_mask(mask, 0)
    assert visibility.structure(None) == () and visibility.words(None) == []
    assert visibility.make_mask(M.Prefix(1), 4) is visibility.make_mask(M.Prefix([2, 3]), 4)


# ---- dropout ---------------------------------------------------------------------------------------------

Call = namedtuple("Call", ["keep_threshold", "seed"])


def check_philox(simulated):
    philox_words, kept = philox.philox, philox.kept
    load, store, word_of = memory.load_int64, memory.store_int64, philox.word_of

    @cuda.jit
    def words(seed, counters, count, to):
        for n in range(count):
            c = counters + 32 * n
            c0, c1, c2, c3 = word_of(load(c)), word_of(load(c + 8)), word_of(load(c + 16)), word_of(load(c + 24))
            found = philox_words(c0, c1, c2, c3, seed)
            for x in range(4):
                store(to + 8 * (4 * n + x), int64(found[x]))

    @cuda.jit
    def keep(call, places, count, to):
        for n in range(count):
            p = places + 32 * n
            store(to + 8 * n, kept(call, load(p), load(p + 8), load(p + 16), load(p + 24)))

    place = Memory(simulated)
    rng = np.random.default_rng(7)
    drawn = rng.integers(0, 2**32, (8, 4))
    edges = np.array(list(product((0, 2**32 - 1), repeat=4)))
    known = np.array([counter for _, counter, _ in KNOWN])
    counters = np.concatenate([drawn, edges, known])
    seeds = (*SEEDS, *(key[0] + (key[1] << 32) for key, _, _ in KNOWN))
    for seed, p in zip(seeds, cycle((0.25, 0.5, 1 - 2**-33)), strict=False):
        signed = seed if seed < 2**63 else seed - 2**64  # the same 64 bits, as a call has them
        found = np.zeros(counters.shape, np.int64)
        to = place.address(found)
        words[1, 1](signed, place.address(counters), len(counters), to)
        expected = np.stack(host_philox.philox4x32(seed, *counters.T), 1)
        np.testing.assert_array_equal(place.host(found, to), expected)

        places = np.concatenate([counters, np.array(list(product((0, 1), (2,), (3, 2**31), range(9))))])
        kept_here = np.zeros(len(places), np.int64)
        to = place.address(kept_here)
        keep[1, 1](Call(host_philox.threshold(p), signed), place.address(places), len(places), to)
        np.testing.assert_array_equal(place.host(kept_here, to) != 0, host_philox.keep(p, seed, *places.T))


# ---- loads and stores ------------------------------------------------------------------------------------

NUMBERS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}  # others are named as in NumPy
WIDTHS = {
    **dict.fromkeys(("uint8", "uint16", "int32", "int64"), (1,)),
    **{"uint32": (4,), "float16": (1, 4, 8), "bfloat16": (1, 4, 8), "float32": (1, 2, 4), "float64": (1, 2)},
}


def name_of(kind, width):
    return f"{kind}x{width}" if width > 1 else kind


def copying(source_kind, kind, width):
    """Kernels copy(source, count, to), by load_* and by ldg_*."""
    store = getattr(memory, "store_" + name_of(kind, width))
    source_size, size = (width * np.dtype(NUMBERS.get(name, name)).itemsize for name in (source_kind, kind))

    def kernel_with(load):
        @cuda.jit
        def copy(source, count, to):
            for n in range(count):
                store(to + size * n, load(source + source_size * n))

        return copy

    return [kernel_with(getattr(memory, how + name_of(source_kind, width))) for how in ("load_", "ldg_")]


def adding(kind, width):
    """A kernel add(to): each thread its number, to each of the places."""
    add_to = getattr(memory, "atomic_add_" + name_of(kind, width))

    def numbers_1(x):
        return x

    def numbers_2(x):
        return x, x

    def numbers_4(x):
        return x, x, x, x

    numbers = memory.device({1: numbers_1, 2: numbers_2, 4: numbers_4}[width])

    @cuda.jit
    def add(to):
        add_to(to, numbers(float32(cuda.threadIdx.x)))

    return add


COPIES = [(kind, kind, width) for kind, widths in WIDTHS.items() for width in widths]
COPIES += [("float32", kind, width) for kind in NUMBERS for width in (1, 4)]
ADDITIONS = (("float32", 1), ("float32", 2), ("float32", 4), ("float64", 1))


def check_memory(simulated):
    place = Memory(simulated)
    rng = np.random.default_rng(7)
    special = [0.0, -0.0, 1.0, 65504.0, 65519.0, 65520.0, -1e9, 3e38, 3.4e38, np.inf, -np.inf, np.nan]
    special += [1e-7, 6e-8, 1e-40]
    # halfway between two neighbours of 16 bits, and not
    ties = [1 + np.arange(16) / 2**bits for bits in (8, 9, 11, 12)]
    floats = np.concatenate([special, *ties, rng.standard_normal(17) * 1e3]).astype(np.float32)
    for source_kind, kind, width in COPIES:
        source_number, number = (np.dtype(NUMBERS.get(name, name)) for name in (source_kind, kind))
        if number.kind in "iu":
            limits = np.iinfo(number)
            source = aligned(rng.integers(limits.min, limits.max, 96, number, endpoint=True))
        else:
            with np.errstate(over="ignore"):
                source = aligned(floats.astype(source_number))
        with np.errstate(over="ignore"):
            expected = source.astype(number)
        for copy in copying(source_kind, kind, width):
            to = aligned(np.zeros(len(source), number))
            at = place.address(to)
            copy[1, 1](place.address(source), len(source) // width, at)
            exact = number if number.kind in "iu" else np.float64
            np.testing.assert_array_equal(place.host(to, at).astype(exact), expected.astype(exact))
    for kind, width in ADDITIONS:
        to = aligned(np.zeros(4, kind))
        at = place.address(to)
        adding(kind, width)[1, 8](at)
        np.testing.assert_array_equal(place.host(to, at), [28.0] * width + [0.0] * (4 - width))


def aligned(array):
    """A copy of an array at a multiple of 16 bytes."""
    room = np.zeros(array.nbytes + 16, np.uint8)
    start = -room.ctypes.data % 16
    copy = room[start : start + array.nbytes].view(array.dtype)
    copy[...] = array
    return copy


# ---- compiling for a GPU that is not there ---------------------------------------------------------------


def machine_code(kernel, *kinds):
    """PTX, and what the assembler says."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    ptx, _ = cuda.compile(
        kernel.py_func, types.void(*kinds), device=False, abi="numba", cc=(9, 0, "a"), output="ptx"
    )
    ptx = ptx if isinstance(ptx, bytes) else ptx.encode()
    linker = Linker(ObjectCode.from_ptx(ptx), options=LinkerOptions(arch="sm_90a", ptxas_options=["-v"]))
    linker.link("cubin")
    return ptx.decode(), linker.get_info_log()


def check_kernel(kernel, *kinds, holds=()):
    ptx, log = machine_code(kernel, *kinds)
    assert "0 bytes stack frame, 0 bytes spill stores" in log and "call" not in ptx.replace("Call", ""), log
    for text in holds:
        assert text in ptx, text


def every_structure():
    """All leaves and pairs in one."""
    ids = np.zeros(2, np.int64)
    return (M.Causal() | M.Prefix(1)) & M.Segments(ids) & M.Lengths(1, 1) | M.Dense(np.ones((2, 2), bool))


def check_compiled_masks():
    mask = every_structure()
    call = types.UniTuple(types.int64, FIRST + len(visibility.words(mask)))
    see, classify = visibility.make_mask(mask, FIRST)
    store = memory.store_int64

    @cuda.jit
    def visible(call, i, j, offset, to):
        store(to, see(call, 0, 1, i, j, offset) + visibility.band_visible(call[0], call[1], i, j, offset))

    @cuda.jit
    def tiles(call, i0, i1, offset, to):
        kind = visibility.band_tile(call[0], call[1], i0, i1, 0, 64, offset)
        store(to, classify(call, 0, 1, i0, i1, 0, 64, offset) + kind)

    check_kernel(visible, call, *[types.int64] * 4, holds=["ld.global.nc.u64", "ld.global.nc.u8"])
    check_kernel(tiles, call, *[types.int64] * 4, holds=["bar.red.or.pred", "shfl.sync.bfly.b32"])


def check_compiled_philox():
    kept, store = philox.kept, memory.store_int64

    @cuda.jit
    def keep(call, b, h, i, j, to):
        store(to, kept(call, b, h, i, j))

    call = types.NamedUniTuple(types.int64, len(Call._fields), Call)
    check_kernel(keep, call, *[types.int64] * 5, holds=["mul.wide.u32"])


def check_compiled_memory():
    vectors = {"uint32x4": "v4.u32", "float32x4": "v4.f32", "float64x2": "v2.f64", "float16x8": "v4.u32"}
    for source_kind, kind, width in COPIES:
        vector = vectors.get(name_of(kind, width)) if source_kind == kind else None
        for copy, load in zip(copying(source_kind, kind, width), ("ld.global.", "ld.global.nc."), strict=True):
            holds = [load] if vector is None else [load + vector, f"st.global.{vector}"]
            check_kernel(copy, *[types.int64] * 3, holds=holds)
    for kind, width in ADDITIONS:
        check_kernel(adding(kind, width), types.int64, holds=["red.global.add."])


# ---- the program -----------------------------------------------------------------------------------------


def checks(what):
    """name -> a function that raises where something is wrong"""
    if what == "compile":
        yield "masks", check_compiled_masks
        yield "philox", check_compiled_philox
        yield "memory", check_compiled_memory
        yield "unknown", check_unknown
        return
    simulated = what == "simulator"
    yield "philox", partial(check_philox, simulated)
    yield "memory", partial(check_memory, simulated)
    for name, case in all_cases():
        yield name, partial(check_mask, *case, simulated)
    if simulated:
        yield "range by warp", check_range_by_warp
        for name, wrong in WRONG.items():
            yield f"wrong: {name}", partial(check_wrong, *wrong)


if __name__ == "__main__":
    from numba import config, cuda, float32, int64, types

    from rawflash.backends.numba_cuda import memory, philox, visibility

    assert bool(config.ENABLE_CUDASIM) == (sys.argv[1] == "simulator")
    sys.setswitchinterval(1e-4)  # the simulator's threads wait by polling
    if sys.argv[1] == "compile":
        from numba.cuda import dispatcher

        dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=(9, 0, "a"))
    failures = {}
    for name, check in checks(sys.argv[1]):
        start = time.perf_counter()
        try:
            check()
        except Exception:
            failures[name] = traceback.format_exc()[-2000:]
        if os.environ.get("RAWFLASH_TIMES"):
            print(f"{time.perf_counter() - start:7.2f} s  {name}", file=sys.stderr)
    print(json.dumps(failures))
