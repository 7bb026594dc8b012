"""From Python to machine code: Numba makes PTX of a kernel, nvJitLink machine code, which is kept on disk.

The files are those of cupy_raw's cache (:mod:`rawflash.backends.cupy_raw.compile`). A kernel is launched by the
driver, past Numba: its parameters are the words of a call (call.py), one behind the other.
"""

from __future__ import annotations

import re
import threading
from array import array
from functools import cache
from hashlib import sha256
from importlib import import_module, metadata
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba

from rawflash.backends.cupy_raw import compile as cubins
from rawflash.backends.cupy_raw.launch import SIDE, THREADS, VECTOR_BYTES
from rawflash.backends.numba_cuda import mma
from rawflash.errors import BackendError
from rawflash.tiling import SIMT

BYTES = {"FLOAT16": 2, "BFLOAT16": 2, "FLOAT32": 4, "FLOAT64": 8}
PACKAGES = ("numba", "numba-cuda", "llvmlite", "cuda-core", "cuda-bindings", "nvidia-nvvm", "nvidia-nvjitlink",
            "nvidia-nvjitlink-cu12", "nvidia-cuda-nvcc-cu12")  # fmt: skip
INSTALL = 'pip install "rawflash[cuda13]", or rawflash[cuda12] for an older driver'
_LOCK = threading.Lock()
_functions: dict[tuple[int, str], Any] = {}


def complete(
    values: dict[str, Any], mask: Any, side: int = SIDE, capability: tuple[Any, ...] = (8, 0)
) -> SimpleNamespace:
    """The constants of a kernel with what follows from them; ``side``: of the block of threads."""
    from rawflash.backends.numba_cuda.call import WORDS
    from rawflash.backends.numba_cuda.intrinsics import SIMULATED
    from rawflash.backends.numba_cuda.tile import Grouped

    c = SimpleNamespace(**({"FAMILY": SIMT} | values))
    c.VECTOR_ADDS = capability >= (9, 0)  # atomic additions of vectors
    double = c.TYPE == "FLOAT64"
    c.real, c.REAL_TYPE = (numba.float64, "FLOAT64") if double else (numba.float32, "FLOAT32")
    c.REAL_BYTES, c.ELEM_BYTES = BYTES[c.REAL_TYPE], BYTES[c.TYPE]
    c.BIAS_BYTES, c.SLOPE_BYTES, c.SINK_BYTES = (BYTES[t] for t in (c.BIAS_TYPE, c.SLOPE_TYPE, c.SINK_TYPE))
    c.VECTOR = VECTOR_BYTES // c.REAL_BYTES
    # Copies that the hardware does on its own: of float32 and float64, which need no conversion
    c.ASYNCHRONOUS = capability >= (8, 0) and c.ELEM_BYTES == c.REAL_BYTES
    c.CHUNK = VECTOR_BYTES // c.ELEM_BYTES if c.ALIGNED else 1  # elements that one thread copies at a time
    c.SIDE, c.THREADS, c.SIMULATED = side, side * side, SIMULATED
    c.R, c.C = c.BR // side, c.BC // side
    c.CV, c.CD = Grouped(c, c.DV).COUNT, Grouped(c, c.D).COUNT
    c.HAS_MASK, c.mask, c.FIRST_MASK = mask is not None, mask, len(WORDS)
    return c


@cache
def _sources() -> str:
    """A hash of all that decides what a kernel becomes, but for its constants: these files, and who compiles them."""
    here = Path(__file__).parent
    others = (here.parents[1] / name for name in ("masks.py", "philox.py", "problem.py", "tiling.py"))
    files = (*sorted(here.rglob("*.py")), here.parent / "cupy_raw" / "launch.py", *others)
    texts = [path.read_bytes() for path in files]
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(package)
    return sha256(b"\0".join([*texts, repr(versions).encode()])).hexdigest()


def ptx_of(kernel: Any, mask_words: int, capability: tuple[Any, ...], threads: int) -> str:
    """PTX of a kernel by its own name, compiled for blocks of so many threads."""
    from numba import cuda, types
    from numba.cuda import dispatcher

    from rawflash.backends.numba_cuda.call import call_type

    record = call_type(mask_words)
    signature = types.void(types.NamedUniTuple(types.int64, len(record._fields), record))
    # Device functions ask the current device what to compile for, also where there is none. Other threads get theirs.
    asked, me = dispatcher.get_current_device, threading.get_ident()
    ours = SimpleNamespace(compute_capability=capability)
    dispatcher.get_current_device = lambda: ours if threading.get_ident() == me else asked()
    try:
        ptx, _ = cuda.compile(kernel, signature, device=False, abi="numba", cc=capability, output="ptx")
    finally:
        dispatcher.get_current_device = asked
    text = ptx.decode() if isinstance(ptx, bytes) else ptx
    entry = re.search(r"\.visible \.entry (\w+)\(.*?\)", text, re.DOTALL)
    assert entry
    # A multiprocessor has registers for so many blocks of the most that a thread can have
    bounds = f"\n.maxntid {threads}, 1, 1\n.minnctapersm {max(256 // threads, 1)}"
    text = text[: entry.end()] + bounds + text[entry.end() :]
    return text.replace(entry[1], kernel.__name__)


def linked(ptx: str, arch: str) -> tuple[bytes, str]:
    """Machine code of PTX, and what ptxas said of it."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=LinkerOptions(arch=arch, ptxas_options=["-v"]))
    return bytes(linker.link("cubin").code), linker.get_info_log()


def capability_of(arch: str) -> tuple[Any, ...]:
    """``sm_90a`` -> (9, 0, "a")."""
    number = re.fullmatch(r"sm_(\d+)(\d)(a?)", arch)
    assert number
    return (int(number[1]), int(number[2]), *([number[3]] if number[3] else []))


class Function:
    """A loaded kernel, called as those of cupy_raw: ``blocks, threads, words, shared_bytes``.

    How many threads a block has it knows better than who calls.
    """

    def __init__(self, function: Any, mask_words: int, threads: int) -> None:
        import cupy

        from rawflash.backends.numba_cuda.call import words_of

        self.function, self.ptr, self.cuda, self.threads = function, function.ptr, cupy.cuda, threads
        index = words_of(mask_words)
        self.taken, self.size = itemgetter(*index), array("Q", (8 * len(index),))

    def __call__(self, blocks: int, threads: int, words: array[int], shared_bytes: int = 0) -> None:
        taken = array("q", self.taken(words))
        # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END
        extra = array("Q", (1, taken.buffer_info()[0], 2, self.size.buffer_info()[0], 0))
        stream = self.cuda.get_current_stream().ptr
        self.cuda.driver.launchKernel(
            self.ptr, blocks, 1, 1, self.threads, 1, 1, shared_bytes, stream, 0, extra.buffer_info()[0]
        )


class Module:
    """The kernels of one file for one set of constants; each is compiled when it is asked for."""

    def __init__(self, file: str, values: dict[str, Any], mask: Any, mask_words: int, arch: str) -> None:
        self.file, self.values, self.mask, self.mask_words, self.arch = file, values, mask, mask_words, arch

    def key_of(self, name: str) -> str:
        """All that decides the machine code of a kernel, hashed."""
        from rawflash.backends.numba_cuda.visibility import structure

        about = (self.file, name, self.values, structure(self.mask), self.mask_words, self.arch, _sources())
        return sha256(repr(about).encode()).hexdigest()

    def threads_of(self, name: str) -> int:
        """Threads of a block of a kernel."""
        return mma.threads_of(name, self.values) or THREADS

    def code_of(self, name: str) -> bytes:
        """Machine code of a kernel, from the cache on disk where it is."""
        folder = cubins.cache_folder()
        path = None if folder is None else folder / f"{self.key_of(name)}.cubin"
        code = None if path is None else cubins._read(path)
        if code is None:
            try:
                code = self.compiled(name)[0]
            except BackendError:
                raise
            except Exception as error:  # Numba, NVVM, nvJitLink and what looks for their libraries each have their own
                what = f"{name} for {self.arch}: {type(error).__name__}: {error}"
                raise BackendError(f"backend 'numba_cuda' cannot compile {what}; {INSTALL}") from error
            if path is not None:
                cubins._write(path, code)
        return code

    def compiled(self, name: str) -> tuple[bytes, str]:
        """Machine code of a kernel, and what ptxas said of it."""
        with _LOCK:  # Numba compiles one at a time
            file = import_module(f"rawflash.backends.numba_cuda.{self.file}")
            capability = capability_of(self.arch)
            kernel = file.make_kernels(complete(self.values, self.mask, capability=capability))[name]
            ptx = ptx_of(kernel, self.mask_words, capability, self.threads_of(name))
        return linked(ptx, self.arch)

    def get_function(self, name: str) -> Function:
        """A kernel by name on the current device; loaded once a process and device."""
        import cupy

        key = cupy.cuda.runtime.getDevice(), self.key_of(name)
        if key not in _functions:
            module = cupy.cuda.Module()
            module.load(self.code_of(name))
            _functions[key] = module.get_function(name)
        return Function(_functions[key], self.mask_words, self.threads_of(name))


def load(file: str, values: dict[str, Any], mask: Any, mask_words: int, arch: str) -> Module:
    """The kernels of a file."""
    return Module(file, values, mask, mask_words, arch)
