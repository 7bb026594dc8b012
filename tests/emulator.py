"""The kernels of cupy_raw on a CPU: their text compiled as C++ (emulator.hpp), behind a CuPy made of NumPy.

A call goes all the way: check, plan, launcher, text, launch. Only NVRTC, the driver and the device are replaced.
Kernels that take tensor maps get emulator_hopper.hpp too, and maps of its own kind (:func:`encode`). What all texts
share (emulator.cpp, emulator_hopper.cpp) is compiled once.
"""

import ctypes
import re
import shutil
import subprocess
import sys
import tempfile
import types
from array import array
from pathlib import Path

import numpy as np
from kept import kept

from rawflash import arrays, hardware, problem
from rawflash.backends.cupy_raw import compile, tensor_map

HERE = Path(__file__).parent
FOLDER = Path(tempfile.gettempdir(), "rawflash-emulator")
STALE = 0xFF  # every byte of fresh device memory: NaN in all floating dtypes
MOST_SHARED = 227 << 10  # bytes, of a block
MAP = 0x3A9D15C0  # MAP_MARK of emulator_hopper.hpp


class ndarray(np.ndarray):
    """CuPy's array, on the host."""

    __module__ = "cupy"

    def __new__(cls, shape, dtype=float, memptr=None, strides=None):
        if memptr is None:
            made = np.empty(shape, dtype)
            made.view(np.uint8).reshape(-1)[...] = STALE if made.size else 0
            return made.view(cls)
        face = {"version": 3, "shape": shape, "strides": strides, "data": (memptr.ptr, False)}
        face["typestr"] = f"|V{np.dtype(dtype).itemsize}"
        return np.asarray(types.SimpleNamespace(__array_interface__=face)).view(dtype).view(cls)

    @property
    def data(self):
        return Memory(self.ctypes.data)


class Memory:
    device_id = 0

    def __init__(self, ptr):
        self.ptr = ptr

    def __add__(self, offset):
        return Memory(self.ptr + offset)

    def memset_async(self, value, nbytes):
        ctypes.memset(self.ptr, value, nbytes)


class Function:
    """A kernel, called as a loaded one."""

    ptr = 0

    def __init__(self, library, name, backwards):
        self.kernel, self.name, self.backwards = ctypes.cast(library[name], ctypes.c_void_p), name, backwards
        self.run = library.emulate
        number = ctypes.c_size_t
        self.run.argtypes = (*[ctypes.c_void_p] * 2, number, ctypes.c_uint, ctypes.c_uint, number, ctypes.c_bool)
        self.message = library.message_of_launch
        self.message.restype = ctypes.c_char_p

    def __call__(self, blocks, threads, words, shared_bytes=0):
        assert shared_bytes <= MOST_SHARED, f"{self.name}: {shared_bytes} bytes of shared memory"
        address, count = words.buffer_info()
        found = self.run(self.kernel, address, count * words.itemsize, blocks, threads, shared_bytes, self.backwards)
        what = {1: "threads wait for threads that will not come", 2: "memory behind the tiles was written"}
        assert found == 0, f"{self.name}: {what.get(found) or self.message().decode()}"


class Module:
    def __init__(self, text, backwards):
        self.library, self.backwards = ctypes.CDLL(str(library(text))), backwards

    def get_function(self, name):
        return Function(self.library, name, self.backwards)


LAUNCH = """
static void (*kernel_of_launch)(const Call);
extern "C" const char* message_of_launch() { return emulated::message; }
extern "C" int emulate(
    void (*kernel)(const Call), void* call, size_t, unsigned blocks, unsigned threads, size_t shared, bool backwards)
{
    kernel_of_launch = kernel;
    emulated::argument = call;
    emulated::body = [](void* x) { kernel_of_launch(*(const Call*)x); };
    return emulated::run_blocks(blocks, threads, shared, backwards);
}
"""

# The same of a text whose kernels take maps, or a call alone; KERNELS has them all, their __launch_bounds__, and how
# many blocks a cluster has: 1, times what __cluster_dims__ say.
LAUNCH_MAPPED = """
#undef __cluster_dims__
#define __cluster_dims__(x, y, z) * (x) * (y) * (z)
%s
static struct { void* kernel; bool mapped; unsigned bounds[2], cluster; } const KERNELS[] = {%s};
static void* kernel_of_launch;
extern "C" const char* message_of_launch() { return emulated::message; }
extern "C" int emulate(
    void* kernel, void* call, size_t bytes, unsigned blocks, unsigned threads, size_t shared, bool backwards)
{
    static MappedCall aligned;
    memcpy(&aligned, call, bytes < sizeof aligned ? bytes : sizeof aligned);
    emulated::argument = &aligned, kernel_of_launch = kernel;
    emulated::bfloat16 = TYPE == BFLOAT16;
    emulated::in_order = %d;
#if DETERMINISTIC
    emulated::in_turn = true;
#else
    emulated::in_turn = false;
#endif
    for (const auto& x : KERNELS) {
        if (x.kernel != kernel)
            continue;
        if (bytes != sizeof aligned && x.mapped) {
            snprintf(emulated::message, 100, "its argument has %%zu bytes, not %%zu", sizeof aligned, bytes);
            return 3;
        }
        memcpy(emulated::bounds, x.bounds, sizeof x.bounds);
        emulated::blocks_of_cluster = x.cluster;
        if (x.mapped)
            emulated::body = [](void* x) { ((void (*)(const MappedCall))kernel_of_launch)(*(const MappedCall*)x); };
        else
            emulated::body = [](void* x) { ((void (*)(const Call))kernel_of_launch)(((const MappedCall*)x)->call); };
        return emulated::run_mapped_blocks(blocks, threads, shared, backwards);
    }
    snprintf(emulated::message, 100, "emulator.py has not found this kernel in its text");
    return 3;
}
"""
# Kernels whose blocks wait for blocks of smaller numbers
IN_ORDER = re.compile(r"constexpr int (BALANCED|FUSED|STORES) = 1;|#define DETERMINISTIC 1")
KERNEL = re.compile(
    r"__global__\s+void\s+(?:__launch_bounds__\(([^()]*)\)\s+)?(?:(CLUSTER|__cluster_dims__\([^()]*\))\s+)?"
    r"(\w+)\(const (__grid_constant__ )?(Mapped)?Call "
)


def launch_of(text):
    """What is put behind a kernel text: the function that launches its kernels."""
    if "MappedCall" not in text:
        return LAUNCH
    names, rows = [], []  # of kernels that the preprocessor may leave out: their addresses are 0 then
    for bounds, cluster, name, constant, mapped in KERNEL.findall(text):
        assert constant or not mapped, f"{name}: a tensor map is read where the argument lies, so __grid_constant__"
        names.append(f'extern "C" void address_of_{name}() __asm__("{name}") __attribute__((weak));')
        rows.append(f"{{(void*)address_of_{name}, {int(bool(mapped))}, {{{bounds}}}, 1 {cluster}}}")
    return LAUNCH_MAPPED % ("\n".join(names), ", ".join(rows), IN_ORDER.search(text) is not None)


def encode(address, dtype, extents, strides, rows):
    """The words of a map, as tensor_map.encode makes them: what emulator_hopper.hpp takes for one.

    What the driver refuses is refused.
    """
    assert address > 0 and address % tensor_map.GRANULE == 0, f"a map of address {address:#x}"
    assert dtype in tensor_map.DTYPES.values(), f"a map of dtype {dtype}"
    assert len(extents) == tensor_map.AXES and all(0 < n <= tensor_map.LARGEST_EXTENT for n in extents), extents
    assert len(strides) == tensor_map.AXES - 1, strides
    assert all(0 < n < tensor_map.LARGEST_STRIDE and n % tensor_map.GRANULE == 0 for n in strides), strides
    assert 0 < rows <= tensor_map.MOST_ROWS, f"a box of {rows} rows"
    words = [address, dtype, *extents, *strides, rows, MAP]
    return array("q", words + [0] * (tensor_map.WORDS - len(words)))


OPTIONS = ("-std=c++17", "-fno-strict-aliasing", "-fPIC", "-w", "-ffp-contract=off")
FAST = ("-O2", "-ftree-vectorize")  # to run
QUICK = ("-Og",)  # to compile


def compiled(source, suffix, *options):
    """What g++ makes of a source, in a file of its own; kept between runs of the suite."""
    compiler = shutil.which("g++")
    assert compiler, "the emulator needs g++"

    def make(path):
        here = path.with_name("source.cpp")
        here.write_text(source)
        command = [compiler, *OPTIONS, *options, str(here), "-o", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]

    return kept(FOLDER, [*OPTIONS, *options, source], suffix, make)


def joined(*names):
    """The text of files, one behind the other."""
    return "\n".join(f'#line 1 "{name}"\n{(HERE / name).read_text()}' for name in names)


def library(text):
    """The shared library of a kernel text."""
    names = ("emulator", "emulator_hopper") if "MappedCall" in text else ("emulator",)
    headers = [f"{name}.hpp" for name in names]
    shared = compiled(joined(*headers, *(f"{name}.cpp" for name in names)), ".o", *FAST, "-c")
    header = compiled(joined(*headers), ".hpp.gch", *QUICK, "-x", "c++-header").with_suffix("")
    parts = ['#line 1 "kernel"', text, '#line 1 "launch"', launch_of(text), ""]
    with_shared = ("-shared", str(shared), "-include", str(header), "-Werror=invalid-pch")
    return compiled("\n".join(parts), ".so", *QUICK, *with_shared)


def install(monkeypatch, backwards=False):
    """Make GPU calls run here: ``module`` "cupy" is NumPy, the device an sm_90 whose kernels are C++."""
    stream = types.SimpleNamespace(ptr=0)

    class Event:
        def __init__(self, **options):
            pass

        def record(self):
            pass

    cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(getDevice=lambda: 0),
        get_current_stream=lambda device=-1: stream,
        UnownedMemory=lambda address, size, owner, device: address,
        MemoryPointer=lambda memory, offset: Memory(memory + offset),
        Event=Event,
        is_available=lambda: True,
    )
    made = types.ModuleType("cupy")
    made.ndarray, made.cuda = ndarray, cuda
    made.asarray = lambda array: np.array(array).view(ndarray)
    made.zeros = lambda shape, dtype=float: np.zeros(shape, dtype).view(ndarray)
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setattr(arrays, "require_cupy", lambda: made)
    monkeypatch.setattr(arrays, "device_of", lambda address: 0)
    monkeypatch.setattr(arrays, "_switched", lambda call: arrays._HERE)
    monkeypatch.setattr(problem, "_MEMO", {})
    row = hardware.CHIPS["sm_90"]
    monkeypatch.setattr(hardware, "_gpu", lambda device: row)
    monkeypatch.setattr(compile, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(compile, "load", lambda text, arch, options=(): Module(text, backwards))
    monkeypatch.setattr(compile, "allow_shared", lambda function, nbytes: None)
    monkeypatch.setattr(tensor_map, "encode", encode)


def to_device(array):
    """The array at its own address: device memory is the host's."""
    return np.asarray(array).view(ndarray)
