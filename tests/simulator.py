"""The kernels of numba_cuda on a CPU, in Numba's own simulator, behind a CuPy made of NumPy (emulator.py).

For a process of its own: NUMBA_ENABLE_CUDASIM=1 must be set before Numba is imported. Blocks have 4 x 4 threads there,
as each of them is a thread of Python.
"""

import sys

import emulator
from numba import config, cuda
from numba.cuda.simulator import kernelapi

from rawflash import hardware
from rawflash.backends.numba_cuda import compile
from rawflash.backends.numba_cuda.call import call_type, words_of

SIDE = 4
ROWS = 16  # of the tallest tile


class Function:
    ptr = 0

    def __init__(self, kernel, index, names):
        self.kernel, self.index, self.names = cuda.jit(kernel), index, names

    def __call__(self, blocks, threads, words, shared_bytes=0):
        self.kernel[blocks, SIDE * SIDE, 0, shared_bytes](self.names(*(words[n] for n in self.index)))


class Module:
    def __init__(self, file, values, mask, mask_words, arch):
        self.file, self.values, self.mask, self.mask_words = file, values, mask, mask_words

    def get_function(self, name):
        file = __import__(f"rawflash.backends.numba_cuda.{self.file}", fromlist=["make_kernels"])
        kernel = file.make_kernels(compile.complete(self.values, self.mask, SIDE))[name]
        return Function(kernel, words_of(self.mask_words), call_type(self.mask_words))


def install(monkeypatch):
    """Make calls with backend="numba_cuda" run here."""
    assert config.ENABLE_CUDASIM
    emulator.install(monkeypatch)
    monkeypatch.setattr(compile, "load", Module)
    monkeypatch.setattr(hardware, "SIMT_MOST_ROWS", ROWS)
    monkeypatch.setattr(hardware, "HALVES", "simt")  # the simulator has no warps: test_numba_cuda_mma.py has
    whole = kernelapi.FakeCUDAShared.array
    monkeypatch.setattr(kernelapi.FakeCUDAShared, "array",
                        lambda self, shape, dtype, alignment: whole(self, shape, dtype))  # fmt: skip
    sys.setswitchinterval(1e-4)
