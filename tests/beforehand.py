"""Compile what the GPU tests and the sanitizer need where there is no GPU, and save a GPU's minutes for running it.

    python tests/beforehand.py FOLDER                # both; some minutes of each core
    python tests/beforehand.py FOLDER -k packed      # of the tests, those that pytest takes by this

Then, on a machine with a GPU and the same release of NVRTC, ``RAWFLASH_CACHE_DIR=FOLDER pytest -m gpu`` and
``RAWFLASH_CACHE_DIR=FOLDER python tests/sanitize.py`` read it instead of compiling. What is not in the folder is
compiled there, as ever: kernels of numba_cuda, whose key has the versions of many packages in it, and what a test
compiles behind a result that it looks at.

The tests are run on a CuPy made of NumPy whose kernels do nothing (:func:`stand_in`), so results are not compared, and
tests that fail say nothing. What each call would have loaded is compiled.
"""

import argparse
import os
import sys
from array import array
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, redirect_stdout, suppress
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import gpu
import gpu_record
import numpy as np
import pytest
import sanitize
import test_forward
import tolerances
from test_cupy_raw_offline import Device
from test_gpu_arrays import ndarray

from rawflash import arrays, problem
from rawflash.backends.cupy_raw import compile as compiler
from rawflash.backends.cupy_raw import tensor_map
from rawflash.backends.numba_cuda import compile as numba_compiler

TESTS = Path(__file__).resolve().parent
ARCHITECTURE = "sm_90a"
LARGE = "test_more_than_two_to_the_31_elements"  # takes as much memory here as there


class Any:
    """Whatever is asked of a stream, an event, a graph, a pool or a kernel: it can be had, called and entered."""

    ptr = 0

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *arguments, **options):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False

    def __int__(self):
        return 0


class OnDevice(ndarray):
    """CuPy's array, on the host."""

    __module__ = "cupy"
    device = SimpleNamespace(id=0)

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data, device_id=0, memset_async=lambda value, nbytes: None)

    def get(self):
        return np.array(self)


def on_device(host):
    return np.asarray(host).view(OnDevice)


def stand_in():
    """A module "cupy": NumPy's functions, and a device that runs nothing."""
    cupy = ModuleType("cupy")

    def of_numpy(name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(np, name)
        if not callable(found) or isinstance(found, type):
            return found

        def call(*arguments, **options):
            made = found(*arguments, **options)
            return on_device(made) if isinstance(made, np.ndarray) else made

        return call

    chip, anything = Device(ARCHITECTURE).cupy.cuda.Device(0), Any()
    told = {"attributes": chip.attributes, "compute_capability": chip.compute_capability}
    selected = type("Device", (Selected,), told)
    runtime = SimpleNamespace(
        getDevice=lambda: 0, getDeviceCount=lambda: 1, CUDARuntimeError=OSError,
        pointerGetAttributes=lambda address: SimpleNamespace(device=0), deviceSynchronize=lambda: None,
    )  # fmt: skip
    driver = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8, funcSetAttribute=anything)
    stream = SimpleNamespace(ptr=0, is_capturing=lambda: False, synchronize=lambda: None)
    cupy.__getattr__ = of_numpy
    cupy.ndarray, cupy.asnumpy, cupy.random = OnDevice, np.asarray, SimpleNamespace(default_rng=Numbers)
    cupy.cuda = SimpleNamespace(
        is_available=lambda: True, Device=selected, Stream=anything, Event=anything, runtime=runtime,
        get_current_stream=lambda *device: stream, UnownedMemory=lambda address, *more: address,
        MemoryPointer=lambda memory, offset: SimpleNamespace(ptr=memory + offset), driver=driver,
        get_default_memory_pool=anything, get_default_pinned_memory_pool=anything,
    )  # fmt: skip
    return cupy


class Selected(Any):
    """A device, selected or asked."""

    def __init__(self, number=0):
        self.id = number


class Numbers:
    """A generator of zeros: what numbers there are decides no text."""

    def __init__(self, seed):
        pass

    def standard_normal(self, shape, dtype=np.float64):
        return on_device(np.zeros(shape, dtype))


def empty(case):
    """As many results as there are, of which nobody looks at the numbers."""
    out = np.zeros((*case.q.shape[:-1], case.v.shape[-1]), case.q.dtype)
    return [out] * (2 + len(case.wrt))


def texts(narrowed=()):
    """What the tests and the sanitizer's calls would compile: triples for ``compile.cubin``."""
    loaded = {}

    def load(text, arch, options=()):
        loaded[text, arch, options] = None
        return Any()

    def to_kind(array, kind):
        if kind != "cupy":
            pytest.skip("the same kernels")
        return on_device(array)

    def nothing(*arguments, **options):  # no Mock, which keeps what it is called with
        return None

    def many(B=1, **options):
        return test_forward.make(B=B, **options), nothing_allowed

    nothing_allowed = tolerances.Reference({}, {}, {})
    with ExitStack() as stack:  # before pytest imports the tests, which take these by name
        for patch in (
            mock.patch.dict(sys.modules, cupy=stand_in()),
            mock.patch.object(arrays, "require_cupy", lambda: sys.modules["cupy"]),
            mock.patch.object(arrays, "device_of", lambda address: 0),
            mock.patch.object(compiler, "load", load),
            mock.patch.object(compiler, "arch_of", lambda device: ARCHITECTURE),
            mock.patch.object(numba_compiler, "load", Any()),
            mock.patch.object(tensor_map, "encode", lambda *geometry: array("q", bytes(8 * tensor_map.WORDS))),
            mock.patch.multiple(gpu, to_cupy=on_device, to_kind=to_kind, to_host=np.asarray),
            mock.patch.multiple(tolerances, assert_close=nothing, reference=lambda *a, **k: nothing_allowed),
            mock.patch.object(test_forward, "make_many", many),
            mock.patch.multiple(np.testing, assert_array_equal=nothing, assert_allclose=nothing),
            mock.patch.object(gpu_record, "after_pytest", nothing),  # nothing ran on a GPU
        ):
            stack.enter_context(patch)
        files = sorted(path for path in TESTS.glob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8"))
        said = stack.enter_context(redirect_stdout(StringIO()))  # who failed
        ended = pytest.main(["-q", "-m", "gpu", "--tb=no", "-p", "no:cacheprovider",
                             "-W", "ignore::pytest.PytestAssertRewriteWarning",
                             f"--deselect=tests/test_gpu.py::{LARGE}", *narrowed, *map(str, files)])  # fmt: skip
        if ended not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise RuntimeError(f"the tests could not be run: {said.getvalue()[-2000:]}")
        if not narrowed:
            stack.enter_context(mock.patch.dict(os.environ, RAWFLASH_BOUNDED="1"))
            stack.enter_context(mock.patch.multiple(
                sanitize, compare=nothing, expected=empty, to_cupy=on_device, to_host=np.asarray))  # fmt: skip
            for name, case in sanitize.cases().items():
                sanitize.plan_for(name)
                with mock.patch.object(problem, "_MEMO", {}), suppress(AssertionError):
                    sanitize.check(case, sanitize.algorithms_of(name))
    return list(loaded)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for RAWFLASH_CACHE_DIR")
    parser.add_argument("-k", dest="expression", help="only of these tests, and none of the sanitizer's calls")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    found = texts(["-k", options.expression] if options.expression else [])
    os.environ["RAWFLASH_CACHE_DIR"] = str(options.folder.absolute())
    failed = 0
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(compiler.cubin, *triple) for triple in found]:
            failed += done.exception() is not None
    print(f"{len(found)} programs for {ARCHITECTURE}, {failed} of them failed, in {options.folder}")
    return int(failed > 0 or not found)


if __name__ == "__main__":
    sys.exit(main())
