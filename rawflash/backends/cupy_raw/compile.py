"""From a typed preamble and a ``.cu`` file to kernels that can be launched: NVRTC, a disk cache, CuPy modules.

``source`` -> ``cubin`` -> ``load``. The first two need no GPU and no driver, so every kernel is compiled and its
registers are counted (``compile_log``, ``usage``) on machines without one. CuPy is imported where it is used.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import posixpath
import re
import secrets
import struct
import threading
from array import array
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from rawflash.errors import BackendError

CUDA = Path(__file__).parent / "cuda"

# Nothing here changes arithmetic: whether a kernel flushes denormals or takes approximate functions stands in its
# own text. No -default-device either: the text says what is __device__, and other compilers read it the same way.
OPTIONS = ("--std=c++17",)

CACHE_FORMAT = 1  # part of every key: a change to what a cache file holds starts a new set of files
CHECKSUM_BYTES = hashlib.sha256().digest_size  # a cache file is the SHA-256 of the cubin, then the cubin
LOG_LINES = 40  # of a failed compile that go into the error

INSTALL = 'CUDA kernels need CuPy and NVRTC: pip install "rawflash[cuda13]" (or "rawflash[cuda12]" on CUDA 12)'

# Kernels that use wgmma, setmaxnreg or tcgen05 need the architecture's own instruction set, the "a" suffix
ARCH_SPECIFIC = ("90", "100")
AWAITING = "await_grids_before();"  # what all kernels of a text do that may begin early
EARLY_FROM = 90  # sm_90 and later can

_INCLUDE = re.compile(r'[ \t]*#[ \t]*include[ \t]*"([^"]+)"')
_ERROR = re.compile(r"\b(?:error|fatal)\b")
# "Used ... registers" comes right after the spills of a kernel; the functions that it calls have no such line
_PTXAS = re.compile(
    r"Function properties for (?P<kernel>\S+)\s+"
    r"[^\n]*?(?P<stack>\d+) bytes stack frame, (?P<spill_stores>\d+) bytes spill stores, "
    r"(?P<spill_loads>\d+) bytes spill loads\s+"
    r"[^\n]*?Used (?P<registers>\d+) registers(?:[^\n]*?(?P<shared>\d+) bytes smem)?"
)

_modules: dict[tuple[int, str], Any] = {}
_loading: dict[tuple[int, str], threading.Lock] = {}


# ---- text


def source(name: str, preamble: str) -> str:
    """The text of one kernel: a preamble, then a file with our own headers in place.

    NVRTC then needs no include path. ``#include <...>`` stays; a header of ours is put in where it is first
    included, conditional or not, and once only. Errors name the file and line of the original, or "preamble".

    Parameters
    ----------
    name : str
        A file under :data:`CUDA`, such as ``"fa2_forward.cu"`` or ``"mma/fa2_forward.cu"``.
    preamble : str
        What the file takes as given: constants, types, functions. It may include headers too.

    Returns
    -------
    str

    Raises
    ------
    BackendError
        A header is neither beside the file that includes it nor under :data:`CUDA`.
    """
    included = {name}
    parts = (("preamble", preamble), (name, (CUDA / name).read_text(encoding="utf-8")))
    return "\n".join(line for label, text in parts for line in _inlined(label, text, included)) + "\n"


def _inlined(label: str, text: str, included: set[str]) -> Iterator[str]:
    """The lines of a file, headers inside; ``included`` grows by their names, which are paths under CUDA."""
    yield f'#line 1 "{label}"'
    for number, line in enumerate(text.split("\n"), 1):
        found = _INCLUDE.match(line)
        if found is None:
            yield line
            continue
        beside = posixpath.normpath(posixpath.join(posixpath.dirname(label), found[1]))
        header = next((path for path in (beside, found[1]) if (CUDA / path).is_file()), None)
        if header is None:
            raise BackendError(f"{label}({number}): no file {found[1]!r} under {CUDA}")
        if header not in included:
            included.add(header)
            yield from _inlined(header, (CUDA / header).read_text(encoding="utf-8"), included)
        yield f'#line {number + 1} "{label}"'


# ---- compiler


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise BackendError(f"{INSTALL}; {error}") from error
    return cupy


def _nvrtc() -> Any:
    """CuPy's own NVRTC binding, with the library loaded: wherever CuPy is it is, at the version CuPy works with.

    cuda.bindings would be one more package to require, and to keep on the same CUDA.
    """
    nvrtc = _cupy().cuda.nvrtc
    try:
        nvrtc.getVersion()  # the library loads at the first call
    except (AssertionError, ImportError, OSError, RuntimeError) as error:
        raise BackendError(f"{INSTALL}; {error}") from error
    return nvrtc


def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of NVRTC; loads it.

    Returns
    -------
    tuple of int

    Raises
    ------
    BackendError
        CuPy or NVRTC is missing; the message says what to install.
    """
    major, minor = _nvrtc().getVersion()
    return major, minor


@cache
def _compiler() -> str:
    """What tells one NVRTC from the next in cache keys.

    Wheels tell their version, patch release included, in less time than the 100 MB of the library take to load. CuPy
    looks for NVRTC in wheels first, and in those of CUDA 13 whatever it was built for; so all of them count. Where
    there is none, NVRTC itself is asked.
    """
    found = []
    for wheel in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{wheel} {metadata.version(wheel)}")
    return ", ".join(found) or "{}.{}".format(*nvrtc_version())


def _compile(text: str, arch: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    """Cubin and log, straight from NVRTC."""
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture={arch}", *OPTIONS, *options))
        # CuPy drops the last byte, taking it for the end of a string. It is the high byte of an alignment, so zero
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)
    except RuntimeError as error:  # NVRTCError is one
        lines = nvrtc.getProgramLog(program).rstrip().splitlines()
        first = next((n for n, line in enumerate(lines) if _ERROR.search(line)), 0)  # warnings may come before
        shown = lines[first : first + LOG_LINES]
        if rest := len(lines) - first - len(shown):
            shown.append(f"... and {rest} more lines")
        version = "{}.{}".format(*nvrtc_version())
        message = f"NVRTC {version} cannot compile for {arch} with options {options}: {error}"
        raise BackendError("\n".join([message, *shown])) from error
    finally:
        nvrtc.destroyProgram(program)


def compile_log(text: str, arch: str, options: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """Compile without the cache, and keep what the assembler says; read it with :func:`usage`.

    Parameters
    ----------
    text, arch, options
        As for :func:`cubin`.

    Returns
    -------
    cubin : bytes
    log : str
        Warnings, advice such as wgmma that had to be serialised, and registers, spills and shared memory.

    Raises
    ------
    BackendError
        As for :func:`cubin`.
    """
    return _compile(text, arch, (*options, "--ptxas-options=-v"))


def usage(log: str) -> dict[str, dict[str, int]]:
    """What each kernel of a verbose log occupies.

    Parameters
    ----------
    log : str
        From :func:`compile_log`.

    Returns
    -------
    dict
        By kernel (its name in the cubin): "registers" of a thread; "spill_stores", "spill_loads" and "stack" in
        bytes of a thread; "shared", the static shared memory of a block in bytes.

    Examples
    --------
    >>> log = '''ptxas info    : Compiling entry function 'copy' for 'sm_90a'
    ... ptxas info    : Function properties for copy
    ... ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
    ... ptxas info    : Used 10 registers, used 1 barriers, 256 bytes smem'''
    >>> usage(log)
    {'copy': {'registers': 10, 'spill_stores': 0, 'spill_loads': 0, 'stack': 0, 'shared': 256}}
    """
    fields = ("registers", "spill_stores", "spill_loads", "stack", "shared")
    return {row["kernel"]: {field: int(row[field] or 0) for field in fields} for row in _PTXAS.finditer(log)}


# ---- disk cache


def cache_folder() -> Path | None:
    """Where cubins are kept: ``$RAWFLASH_CACHE_DIR``, ``$XDG_CACHE_HOME/rawflash`` or ``~/.cache/rawflash``.

    The folder need not exist, and may be deleted at any time.

    Returns
    -------
    pathlib.Path or None
        None: there is no home folder, and nothing is kept.
    """
    if own := os.environ.get("RAWFLASH_CACHE_DIR"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared, "rawflash")
    try:
        return Path.home() / ".cache" / "rawflash"
    except RuntimeError:
        return None


def _key(text: str, arch: str, options: tuple[str, ...]) -> str:
    head = repr((CACHE_FORMAT, _compiler(), arch, OPTIONS, options))  # repr has no raw NUL
    return hashlib.sha256(f"{head}\0{text}".encode()).hexdigest()


def _read(path: Path) -> bytes | None:
    """The cubin in a cache file, or None if it is not there or not whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    checksum, code = content[:CHECKSUM_BYTES], content[CHECKSUM_BYTES:]
    return code if code and hashlib.sha256(code).digest() == checksum else None


def _write(path: Path, code: bytes) -> None:
    """Keep a cubin if that is possible. Other processes see the old file or the new one, never a part of it."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix("." + secrets.token_hex(8))
        try:
            temporary.write_bytes(hashlib.sha256(code).digest() + code)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def cubin(text: str, arch: str, options: tuple[str, ...] = ()) -> bytes:
    """Machine code for one architecture, from the disk cache or from NVRTC.

    A cache that cannot be read or written is no error: the text is compiled each time. Headers in ``#include <...>``
    are not part of the key.

    Parameters
    ----------
    text : str
        From :func:`source`.
    arch : str
        The exact architecture, such as "sm_80" or "sm_90a"; see :func:`arch_of`.
    options : tuple of str
        NVRTC options beyond :data:`OPTIONS`.

    Returns
    -------
    bytes
        An ELF file.

    Raises
    ------
    BackendError
        The text does not compile, with NVRTC's messages; or CuPy or NVRTC is missing.
    """
    folder = cache_folder()
    if folder is None:
        return _compile(text, arch, options)[0]
    path = folder / f"{_key(text, arch, options)}.cubin"
    code = _read(path)
    if code is None:
        code, _ = _compile(text, arch, options)
        _write(path, code)
    return code


# ---- device


@cache
def arch_of(device_id: int) -> str:
    """The architecture that kernels for a device are compiled for.

    Parameters
    ----------
    device_id : int

    Returns
    -------
    str
        "sm_" and the compute capability, with the "a" of :data:`ARCH_SPECIFIC` where kernels need it.
    """
    capability = _cupy().cuda.Device(device_id).compute_capability
    return f"sm_{capability}a" if capability in ARCH_SPECIFIC else f"sm_{capability}"


def load(text: str, arch: str, options: tuple[str, ...] = ()) -> Any:
    """The module of a text on the current device; compiled and loaded once a process and device.

    Its ``get_function(name)`` gives a :class:`Function`. Keep it: it keeps the module, and a call of ``load`` hashes
    the whole text.

    Parameters
    ----------
    text, arch, options
        As for :func:`cubin`.

    Returns
    -------
    Module

    Raises
    ------
    BackendError
        As for :func:`cubin`.
    """
    cupy = _cupy()
    key = (cupy.cuda.runtime.getDevice(), _key(text, arch, options))
    with _loading.setdefault(key, threading.Lock()):  # a lock a key: different kernels compile side by side
        if key not in _modules:
            module = cupy.cuda.Module()
            module.load(cubin(text, arch, options))
            _modules[key] = Module(module, AWAITING in text and int(re.sub(r"\D", "", arch)) >= EARLY_FROM)
    return _modules[key]


class Module:
    """The kernels of a loaded text; ``early``: each of them awaits the grids before it on its own."""

    def __init__(self, module: Any, early: bool = False) -> None:
        self.module, self.early = module, early

    def get_function(self, name: str) -> Function:
        """A kernel by name."""
        return (EarlyFunction if self.early else Function)(self.module.get_function(name))


class Function:
    """A kernel whose one argument is a record of 64-bit words, launched on CuPy's current stream.

    By the driver, past CuPy's own ``Function`` and ``RawKernel``: they look at every argument of every launch, which
    takes as long as the launch itself.
    """

    def __init__(self, function: Any) -> None:
        cuda = _cupy().cuda
        self.function, self.ptr = function, function.ptr  # CuPy's Function keeps the module
        self.launch, self.stream = cuda.driver.launchKernel, cuda.get_current_stream

    def __call__(self, blocks: int, threads: int, words: array[int], shared_bytes: int = 0) -> None:
        # The driver wants the address of the addresses of the arguments; it has copied them when it returns.
        arguments = array("Q", (words.buffer_info()[0],))
        self.launch(self.ptr, blocks, 1, 1, threads, 1, 1, shared_bytes, self.stream().ptr,
                    arguments.buffer_info()[0], 0)  # fmt: skip


class EarlyFunction(Function):
    """The same, of a kernel that may begin while the one before it on the stream ends: it awaits that one on its own.

    CUDA Programming Guide, "Programmatic Dependent Launch". CuPy has no launch with attributes (``cuLaunchKernelEx``).
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self.launch, self.check = driver("cuLaunchKernelEx"), _cupy().cuda.driver.check_status
        self.launch.argtypes = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p

    def __call__(self, blocks: int, threads: int, words: array[int], shared_bytes: int = 0) -> None:
        arguments = array("Q", (words.buffer_info()[0],))
        # CUlaunchConfig: the grid, a block, shared memory, the stream, attributes and how many
        config = struct.pack("7I4xQQI4x", blocks, 1, 1, threads, 1, 1, shared_bytes, self.stream().ptr,
                             _EARLY.buffer_info()[0], 1)  # fmt: skip
        self.check(self.launch(config, self.ptr, arguments.buffer_info()[0], None))


# CUlaunchAttribute: which (CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION), and 64 bytes, of which an int is 1
_EARLY = array("B", struct.pack("i4xi60x", 6, 1))


@cache
def driver(name: str) -> Any:
    """A function of CUDA's driver that CuPy has no name for.

    Raises
    ------
    BackendError
        The driver has none of that name.
    """
    try:
        return getattr(ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1"), name)
    except (OSError, AttributeError) as error:
        raise BackendError(f"the CUDA driver has no {name}: {error}") from error


def allow_shared(function: Any, nbytes: int) -> None:
    """Let a function be launched with up to ``nbytes`` of dynamic shared memory.

    Without it the limit is 48 KiB on every device. Once a function is enough.

    Parameters
    ----------
    function : Function
        From the module that :func:`load` returned.
    nbytes : int
    """
    driver = _cupy().cuda.driver
    driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, nbytes)
