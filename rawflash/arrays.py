"""Array kinds: what came in as NumPy, PyTorch, JAX or a plain buffer goes out as the same.

Backends that run on the CPU see NumPy views only. This module makes those views without a
copy where the last axis is contiguous, and turns results back into the kind that came in.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from rawflash.errors import BackendError, ProblemError

if TYPE_CHECKING:
    from rawflash.problem import Operands, Problem

# Root module of an array's type -> kind. Anything else speaks DLPack or the buffer protocol.
_KINDS = {"numpy": "numpy", "torch": "torch", "jax": "jax", "jaxlib": "jax", "cupy": "cupy", "numba": "numba"}
GPU_KINDS = ("cupy", "numba")


def kind_of(array: Any) -> str:
    """Name of the library that made ``array``: its results go back to that library."""
    roots = (cls.__module__.partition(".")[0] for cls in type(array).__mro__)
    return next((_KINDS[root] for root in roots if root in _KINDS), "numpy")


def on_gpu(array: Any) -> bool:
    """True for arrays in device memory (they carry ``__cuda_array_interface__`` or say so by DLPack)."""
    if kind_of(array) in GPU_KINDS:
        return True
    if kind_of(array) == "torch":
        return bool(array.is_cuda)
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[0]) == 2  # kDLCUDA
    return hasattr(array, "__cuda_array_interface__")


def bfloat16() -> np.dtype:
    """NumPy's bfloat16, which the ml_dtypes package registers."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise BackendError("bfloat16 arrays need the ml_dtypes package: pip install ml_dtypes") from error
    return np.dtype(ml_dtypes.bfloat16)


def as_numpy(name: str, array: Any) -> np.ndarray:
    """A NumPy view of a CPU array of any kind; no copy.

    Raises
    ------
    ProblemError
        ``array`` is no array at all, or records gradients.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise ProblemError(f"{name} is a masked array; expected a plain array, with its mask as mask=")
    if isinstance(array, np.ndarray):
        return np.asarray(array)
    kind = kind_of(array)
    if kind == "torch":
        if array.requires_grad:
            raise ProblemError(
                f"{name} requires grad; rawflash does not record PyTorch's autograd, so pass {name}.detach()"
            )
        import torch

        if array.device.type != "cpu" or array.layout != torch.strided:
            raise ProblemError(f"{name} is a {array.layout} tensor on {array.device}; expected a dense one on the CPU")
        if array.dtype == torch.bfloat16:
            return array.view(torch.int16).numpy().view(bfloat16())
        return array.numpy()
    if kind == "jax":
        return np.asarray(array)
    if hasattr(array, "__dlpack__"):
        return np.from_dlpack(array)
    try:
        return np.asarray(memoryview(array))
    except TypeError:
        raise ProblemError(
            f"{name} is a {type(array).__name__}; expected an array "
            "(NumPy, CuPy, Numba, PyTorch, JAX, DLPack or the buffer protocol)"
        ) from None


def from_numpy(array: np.ndarray, kind: str) -> Any:
    """A NumPy result as an array of ``kind``; shares memory where the library can."""
    if kind == "torch":
        import torch

        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    if kind == "jax":
        import jax.numpy

        return jax.numpy.asarray(array)
    return array


def heads_first(array: np.ndarray, layout: str) -> np.ndarray:
    """The canonical form ``(B, H, T, width)`` of a user's array; a view wherever NumPy can make one."""
    if array.ndim == 2:
        return array[None, None]
    if layout == "bthd":
        array = array.swapaxes(-3, -2)
    if array.ndim == 4:
        return array
    return array.reshape(math.prod(array.shape[:-3]), *array.shape[-3:])


class Result:
    """The arrays that one call writes, allocated in the user's shape, seen in canonical form.

    Every array starts at the value of padding: 0, and -inf for ``lse``. So a kernel writes only
    the rows and keys that exist. Gradients of ``bias`` and ``sinks`` are accumulators in at least
    float32 and take the argument's dtype when they are given back.
    """

    def __init__(self, problem: Problem, operands: Operands) -> None:
        self.problem, self.operands = problem, operands
        self._arrays: dict[str, np.ndarray] = {}

    def canonical(self, name: str) -> np.ndarray:
        """Allocate the result ``name`` ("out", "lse" or an argument) and return what a kernel writes to."""
        x, problem = self.operands, self.problem
        if name == "bias":
            assert x.bias is not None
            self._arrays[name] = np.zeros(x.bias.shape, problem.compute_dtype)
            return self._arrays[name]
        if name == "sinks":
            self._arrays[name] = np.zeros(problem.Hq, np.float64)
            return self._arrays[name]
        if name == "lse":
            self._arrays[name] = np.full(x.user_shapes[name], -np.inf, problem.compute_dtype)
            return self._arrays[name].reshape(x.q.shape[:3])
        array = self._writable_out() if name == "out" else None
        if array is None:
            array = np.zeros(x.user_shapes[name], x.q.dtype)
        self._arrays[name] = array
        return heads_first(array, x.layout)

    def _writable_out(self) -> np.ndarray | None:
        """The user's ``out``, zeroed, if a kernel can write straight into it."""
        x = self.operands
        if x.out is None:
            return None
        array = as_numpy("out", x.out)
        inputs = (x.q, x.k, x.v, x.bias, x.sinks)
        direct = (
            array.dtype.isnative
            and (array.shape[-1] <= 1 or array.strides[-1] == array.itemsize)
            and (not array.size or np.may_share_memory(heads_first(array, x.layout), array))
            and not any(np.may_share_memory(array, other) for other in inputs if other is not None)
        )
        if not direct:
            return None
        array[...] = 0
        return array

    def give(self, name: str) -> Any:
        """The finished result, of the kind, shape and dtype that the caller expects."""
        x, array = self.operands, self._arrays[name]
        if name == "out" and x.out is not None:
            target = as_numpy("out", x.out)
            if target is not array:
                target[...] = array
            return x.out
        if name == "bias":
            assert x.bias is not None
            array = array.astype(x.bias.dtype).reshape(x.user_shapes["bias"])
        elif name == "sinks":
            assert x.sinks is not None
            array = array.astype(x.sinks.dtype)
        return from_numpy(array, x.kind)
