"""The kernels of cupy_raw on a CPU: their text compiled as C++ (emulator.hpp), behind a CuPy made of NumPy.

A call goes all the way: check, plan, launcher, text, launch. Only NVRTC, the driver and the device are replaced.
"""

import ctypes
import hashlib
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import numpy as np

from rawflash import arrays, hardware, problem
from rawflash.backends.cupy_raw import compile

HERE = Path(__file__).parent
FOLDER = Path(tempfile.gettempdir(), "rawflash-emulator")
STALE = 0xFF  # every byte of fresh device memory: NaN in all floating dtypes


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
        self.run.argtypes = (*[ctypes.c_void_p] * 2, ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t, ctypes.c_bool)

    def __call__(self, blocks, threads, words, shared_bytes=0):
        found = self.run(self.kernel, words.buffer_info()[0], blocks, threads, shared_bytes, self.backwards)
        what = {1: "threads wait for threads that will not come", 2: "memory behind the tiles was written"}
        assert found == 0, f"{self.name}: {what[found]}"


class Module:
    def __init__(self, text, backwards):
        self.library, self.backwards = ctypes.CDLL(str(library(text))), backwards

    def get_function(self, name):
        return Function(self.library, name, self.backwards)


LAUNCH = """
static void (*kernel_of_launch)(const Call);
extern "C" int emulate(
    void (*kernel)(const Call), void* call, unsigned blocks, unsigned threads, size_t shared, bool backwards)
{
    kernel_of_launch = kernel;
    argument = call;
    body = [](void* x) { kernel_of_launch(*(const Call*)x); };
    return run_blocks(blocks, threads, shared, backwards);
}
"""


def library(text):
    """The shared library of a kernel text; kept between runs of the suite."""
    compiler = shutil.which("g++")
    assert compiler, "the emulator needs g++"
    source = f'{(HERE / "emulator.hpp").read_text()}\n#line 1 "kernel"\n{text}\n{LAUNCH}'
    key = hashlib.sha256(source.encode()).hexdigest()[:32]
    made = FOLDER / f"{key}.so"
    if not made.exists():
        FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            here = Path(folder, "kernel.cpp")
            here.write_text(source)
            options = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-w", "-ffp-contract=off"]
            done = subprocess.run(
                [compiler, *options, str(here), "-o", f"{folder}/kernel.so"], capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr[:4000]
            Path(folder, "kernel.so").replace(made)
    return made


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


def to_device(array):
    """The array at its own address: device memory is the host's."""
    return np.asarray(array).view(ndarray)
