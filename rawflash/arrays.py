"""Array kinds: what came in as NumPy, CuPy, Numba, PyTorch, JAX or a plain buffer goes out as the same.

CPU backends see NumPy views of the arrays. GPU backends see NumPy arrays too, but of metadata only
(:func:`device_view`): shape, strides and dtype are those of the device array and the address is made up,
so that one validator serves both. The true addresses travel beside them (:class:`Source`).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rawflash.errors import BackendError, ProblemError
from rawflash.masks import arrays_of

if TYPE_CHECKING:
    from rawflash.problem import Operands, Problem

# Root module of an array's type -> kind. Anything else speaks DLPack, CUDA's array interface or the buffer protocol.
_KINDS = {"numpy": "numpy", "torch": "torch", "jax": "jax", "jaxlib": "jax", "cupy": "cupy", "numba": "numba"}
GPU_KINDS = ("cupy", "numba")


@lru_cache(maxsize=256)
def _kind_of_type(cls: type) -> str:
    roots = (base.__module__.partition(".")[0] for base in cls.__mro__)
    return next((_KINDS[root] for root in roots if root in _KINDS), "numpy")


def kind_of(array: Any) -> str:
    """Name of the library that made ``array``: its results go back to that library."""
    return _kind_of_type(type(array))  # type: ignore[arg-type]  # mypy does not hash classes


def on_gpu(array: Any) -> bool:
    """True for arrays in device memory (they carry ``__cuda_array_interface__`` or say so by DLPack)."""
    kind = kind_of(array)
    if kind in GPU_KINDS:
        return True
    if kind == "torch":
        return bool(array.is_cuda)
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[0]) == 2  # kDLCUDA
    return hasattr(array, "__cuda_array_interface__")


def result_kind(array: Any) -> str:
    """The kind of results for ``array``: for a library that rawflash has never heard of NumPy or CuPy."""
    kind = kind_of(array)
    return "cupy" if kind == "numpy" and on_gpu(array) else kind


def bfloat16() -> np.dtype:
    """NumPy's bfloat16, which the ml_dtypes package registers."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise BackendError("bfloat16 arrays need the ml_dtypes package: pip install ml_dtypes") from error
    return np.dtype(ml_dtypes.bfloat16)


@lru_cache(maxsize=256)
def name_of(dtype: np.dtype) -> str:
    """``dtype.name``, which NumPy puts together anew each time."""
    return dtype.name


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
        return array if isinstance(array, DeviceView) else np.asarray(array)
    kind = kind_of(array)
    if kind == "torch":
        _check_no_grad(name, array)
        import torch

        if array.device.type != "cpu" or array.layout != torch.strided:
            raise ProblemError(f"{name} is a {array.layout} tensor on {array.device}; expected a dense one on the CPU")
    try:
        if kind == "torch":
            half = array.dtype == torch.bfloat16
            return array.view(torch.int16).numpy().view(bfloat16()) if half else array.numpy()
        if kind == "jax":
            return np.asarray(array)
        if hasattr(array, "__dlpack__"):
            return np.from_dlpack(array)
        return np.asarray(memoryview(array))
    except (TypeError, ValueError, RuntimeError, BufferError) as error:  # each library refuses in its own way
        raise ProblemError(
            f"{name} is a {type(array).__name__} that NumPy cannot look at ({error}); expected an array "
            "(NumPy, CuPy, Numba, PyTorch, JAX, DLPack or the buffer protocol)"
        ) from error


def _check_no_grad(name: str, tensor: Any) -> None:
    if tensor.requires_grad:
        raise ProblemError(
            f"{name} requires grad; rawflash does not record PyTorch's autograd, so pass {name}.detach()"
        )


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


def is_plain(array: np.ndarray) -> bool:
    """Can a kernel read the elements where they are: native byte order, aligned, whole strides?"""
    if not array.dtype.isnative:
        return False
    return not array.size or (array.flags.aligned and not any(s % array.itemsize for s in array.strides))


def has_own_memory(array: np.ndarray) -> bool:
    """Is no byte that of two elements? Axes so interleaved that their strides do not tell count as overlapping."""
    reach = array.itemsize  # bytes that the axes of smaller strides span
    for stride, n in sorted((abs(stride), n) for stride, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < reach:
            return array.size == 0
        reach += (n - 1) * stride
    return True


def can_merge(array: np.ndarray, axes: int) -> bool:
    """Can the first ``axes`` axes be seen as one, without a copy?"""
    if array.size == 0:
        return True
    kept = [(n, stride) for n, stride in zip(array.shape[:axes], array.strides, strict=False) if n > 1]
    return all(kept[i][1] == kept[i + 1][0] * kept[i + 1][1] for i in range(len(kept) - 1))


def is_canonical(array: np.ndarray) -> bool:
    """Can a kernel take the array as it is: plain, last axis contiguous, leading axes one batch axis?"""
    return (
        is_plain(array)
        and (array.shape[-1] <= 1 or array.strides[-1] == array.itemsize or not array.size)
        and can_merge(array, array.ndim - 3)
    )


def heads_first(array: np.ndarray, layout: str) -> np.ndarray:
    """The canonical form ``(B, H, T, width)`` of a user's array; a view if :func:`is_canonical`."""
    if array.ndim == 2:
        return array[None, None]
    if layout == "bthd":
        array = array.swapaxes(-3, -2)
    if array.ndim == 4:
        return array
    return array.reshape(math.prod(array.shape[:-3]), *array.shape[-3:])


# ---- device arrays ---------------------------------------------------------------------------------

# What tells one device array from another but for its address: kind, shape, strides, dtype, device,
# address modulo 16 and whether it is read-only; strides and dtype as its library gives them. Hashable.
Signature = tuple[str, tuple[int, ...], Any, Any, int, int, bool]
_ALIGNMENT = 16  # bytes; the widest load of a kernel
_UNMAPPED = 4096  # where made-up addresses begin


@cache
def require_cupy() -> Any:
    """The CuPy module, which everything on a GPU is made with.

    Raises
    ------
    BackendError
        It is not installed.
    """
    try:
        import cupy
    except ImportError as error:
        raise BackendError(f"GPU arrays need CuPy: {error}; pip install cupy-cuda13x or cupy-cuda12x") from error
    return cupy


def read_cupy(array: Any) -> tuple[int, Signature]:
    """Address and signature of a CuPy array."""
    data = array.data
    address = data.ptr
    return address, (
        "cupy", array.shape, array.strides, array.dtype, data.device_id, address % _ALIGNMENT, False
    )  # fmt: skip


class Source:
    """Where the arrays of one call lie. On the CPU: nothing but the kind of the result.

    Attributes
    ----------
    kind : str
        Library that the results belong to.
    array_type : type or None
        The type of CuPy's arrays, if it is that library: :func:`read_cupy` is then all that is to do for each.
    addresses : dict of int
        Of each argument that is a device array, or of the copy that stands for it.
    signatures : dict of Signature
        Of the same arguments as they were given.
    device : int or None
        The CUDA device; None: the CPU.
    originals : mapping
        The arguments themselves.
    views : mapping of ndarray
        Metadata of the small integer arrays on the device: contiguous, int32 or int64.
    copied : tuple of str
        Arguments that had to be copied.
    keep : tuple
        Those copies.
    borrowed : tuple
        Arrays of libraries that do not order their memory by the call's stream.
    waits : tuple of int
        Streams whose work the call's stream has to wait for.
    """

    # What most calls leave empty is not made anew for each.
    device: int | None = None
    originals: Mapping[str, Any] = MappingProxyType({})
    views: Mapping[str, np.ndarray] = MappingProxyType({})
    copied: tuple[str, ...] = ()
    keep: tuple[Any, ...] = ()
    borrowed: tuple[Any, ...] = ()
    waits: tuple[int, ...] = ()

    def __init__(self, q: Any) -> None:
        self.kind = result_kind(q)
        self.array_type = type(q) if kind_of(q) == "cupy" else None
        self.addresses: dict[str, int] = {}
        self.signatures: dict[str, Signature] = {}

    def read(self, name: str, array: Any) -> Signature | None:
        """Note an array that is on a GPU, of any kind; None for anything else.

        This runs for every argument of every call, so it only looks.
        """
        kind = kind_of(array)
        if kind == "cupy":
            address, signature = read_cupy(array)
        elif not on_gpu(array):
            return None
        elif kind == "torch":
            _check_no_grad(name, array)
            if array.is_neg():
                raise ProblemError(f"{name} is negated lazily; expected its elements in memory: {name}.resolve_neg()")
            try:
                address = array.data_ptr()
                signature = (
                    kind, array.shape, array.stride(), array.dtype, array.get_device(), address % _ALIGNMENT, False
                )  # fmt: skip
            except RuntimeError:  # sparse tensors have no strides
                raise ProblemError(f"{name} is a {array.layout} tensor; expected a dense one") from None
        elif kind != "jax" and hasattr(array, "__cuda_array_interface__"):
            face = array.__cuda_array_interface__
            if face.get("mask") is not None:
                raise ProblemError(f"{name} is a masked array; expected a plain array, with its mask as mask=")
            address, read_only = face["data"]
            signature = (
                kind, tuple(face["shape"]), face.get("strides"), face["typestr"],
                device_of(address), address % _ALIGNMENT, read_only,
            )  # fmt: skip
            if face.get("stream") is not None:
                self.waits += (int(face["stream"]),)
        else:
            imported = require_cupy().from_dlpack(array)  # CuPy's current stream now waits for the producer
            self.borrowed += (imported,)
            if self.kind not in ("cupy", "jax"):
                self.waits += (stream("cupy"),)
            address, made = imported.data.ptr, Source(imported).read(name, imported)
            signature = (kind, *made[1:])  # type: ignore[index]
        if kind != self.kind:
            self.borrowed += (array,)
            if kind in _OWN_STREAM:
                self.waits += (stream(kind, signature[4]),)
        self.addresses[name] = address
        self.signatures[name] = signature
        return signature

    def locate(self, name: str, array: Any) -> None:
        """:meth:`read` a GPU array whose device must be that of the others."""
        self.read(name, array)
        device = self.signatures[name][4]
        if self.device not in (None, device):
            raise ProblemError(
                f"{name} is on GPU {device} and others on GPU {self.device}; expected all arrays on one device"
            )
        self.device = device

    def view(self, name: str) -> np.ndarray:
        """The metadata of a device array that was read."""
        kind, shape, strides, dtype, _, offset, read_only = self.signatures[name]
        if kind == "torch":
            dtype = _numpy_dtype(name, dtype)
            strides = tuple(stride * dtype.itemsize for stride in strides)
        return device_view(tuple(shape), strides, np.dtype(dtype), offset, read_only)

    def copy(self, name: str, array: np.ndarray, dtype: Any = None) -> np.ndarray:
        """A contiguous copy in native byte order, made where the argument lies."""
        self.copied += (name,)
        wanted = array.dtype.newbyteorder("=") if dtype is None else np.dtype(dtype)
        if name not in self.addresses:
            return np.array(array, dtype=wanted, order="C", copy=True)
        with on(self):
            made = _elements(array, self.addresses[name], self.device, is_plain(array)).copy(order="C")
            made = made.view(array.dtype.newbyteorder("=")).reshape(array.shape).astype(wanted, copy=False)
        self.keep += (made,)
        self.addresses[name] = made.data.ptr
        return device_view(array.shape, None, wanted)

    def integers(self, name: str, array: np.ndarray) -> None:
        """Note an integer array on the device for kernels to read: contiguous, int32 or int64."""
        wide = array.dtype in (np.int32, np.int64)
        if not (wide and is_plain(array) and array.flags.c_contiguous):
            array = self.copy(name, array, None if wide else np.int64)
        self.views = {**self.views, name: array}

    def give(self, array: Any) -> Any:
        """A result of NumPy, or of CuPy on a GPU, as an array of the call's kind."""
        return from_numpy(array, self.kind) if self.device is None else from_cupy(array, self.kind)

    def cupy(self, name: str, array: Any) -> Any:
        """A CuPy view of a device array of any kind; no copy."""
        self.locate(name, array)
        return _over(self.view(name), self.addresses[name], self.device)


# Kinds whose work goes to a stream that only the library knows; others use CuPy's current one.
_OWN_STREAM = ("cupy", "torch", "numba")


def device_view(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: np.dtype, offset: int = 0, read_only: bool = False
) -> np.ndarray:
    """A NumPy array that has the metadata of a device array, and no memory: it must never be read.

    Views of it (axes swapped, merged, added) say how the device array may be seen. Its address is
    unmapped and only right modulo 16, for the alignment.
    """
    typestr = f"|V{dtype.itemsize}"  # not every dtype has a name of its own in the protocol
    face = {"version": 3, "shape": shape, "strides": strides, "typestr": typestr}
    return np.asarray(_Interface(face | {"data": (_UNMAPPED + offset, read_only)})).view(dtype, DeviceView)


class DeviceView(np.ndarray):
    """What :func:`device_view` makes. It can be shown, and arithmetic with it is an error, not a crash."""

    def __repr__(self) -> str:
        return f"DeviceView(shape={self.shape}, strides={self.strides}, dtype={self.dtype})"

    __str__ = __repr__

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        raise TypeError(f"numpy.{ufunc.__name__} of an array whose elements are on a GPU: {self!r}")


class _Interface:
    def __init__(self, face: dict[str, Any]) -> None:
        self.__array_interface__ = face


def _numpy_dtype(name: str, dtype: Any) -> np.dtype:
    """NumPy's name for a dtype of PyTorch."""
    word = str(dtype).removeprefix("torch.")
    try:
        return bfloat16() if word == "bfloat16" else np.dtype(word)
    except TypeError:
        raise ProblemError(f"{name} has dtype {dtype}, which NumPy does not have") from None


def _torch_dtype(dtype: np.dtype) -> Any:
    """PyTorch's name for a dtype of NumPy."""
    import torch

    return getattr(torch, dtype.name)


def device_of(address: int) -> int:
    """The device that an address belongs to; 0 without CuPy, where no kernel runs anyway."""
    try:
        import cupy
    except ImportError:
        return 0
    try:
        return int(cupy.cuda.runtime.pointerGetAttributes(address).device)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise BackendError(f"CUDA does not know the device of address {address:#x}: {error}") from error


def _over(view: np.ndarray, address: int, device: int | None) -> Any:
    """A CuPy array over existing device memory, with the metadata of ``view``; it owns nothing."""
    cupy = require_cupy()
    memory = cupy.cuda.UnownedMemory(address, max(view.nbytes, 1), None, device)
    return cupy.ndarray(view.shape, view.dtype, cupy.cuda.MemoryPointer(memory, 0), view.strides)


def _elements(view: np.ndarray, address: int, device: int | None, whole: bool) -> Any:
    """Device memory as a CuPy array of unsigned integers, to be moved without a change of value.

    ``whole``: one integer an element. Otherwise one byte, on an additional last axis in native order,
    which misaligned elements and those of the other byte order need.
    """
    if whole:
        return _over(view.view(f"u{view.itemsize}"), address, device)
    octets = device_view((*view.shape, view.itemsize), (*view.strides, 1), np.dtype("u1"))
    made = _over(octets, address, device)
    return made if view.dtype.isnative else made[..., ::-1]


def from_cupy(array: Any, kind: str) -> Any:
    """A CuPy result as an array of ``kind``, in the same memory."""
    if kind == "torch":
        import torch

        return torch.from_dlpack(array)
    if kind == "jax":
        import jax.dlpack

        return jax.dlpack.from_dlpack(array)
    if kind == "numba":
        from numba import cuda

        return cuda.as_cuda_array(array, sync=False)
    return array


def stream(kind: str, device: int | None = None) -> int:
    """Address of the stream that a library's work goes to now."""
    if kind == "torch":
        import torch

        return int(torch.cuda.current_stream(device).cuda_stream)
    if kind == "numba":
        return 0
    return int(require_cupy().cuda.get_current_stream(-1 if device is None else device).ptr)


_HERE: AbstractContextManager[None] = nullcontext()


def on(call: Source | Operands) -> AbstractContextManager[None]:
    """Makes the call's device and stream CuPy's current ones: launches, copies and workspaces go there."""
    return _HERE if is_here(call) else _switched(call)


def is_here(call: Source | Operands) -> bool:
    """Are the call's device and stream CuPy's current ones already, with nothing to wait for?"""
    device = call.device
    if device is None:
        return True
    if call.waits or call.borrowed or device != require_cupy().cuda.runtime.getDevice():
        return False
    # JAX names no stream: what came in by DLPack is ordered with CuPy's own.
    return call.kind not in ("torch", "numba") or stream(call.kind, device) == stream("cupy")


@contextmanager
def _switched(call: Source | Operands) -> Iterator[None]:
    cuda = require_cupy().cuda
    with cuda.Device(call.device):
        ours = _cupy_stream(stream(call.kind, call.device))
        with ours:
            for address in dict.fromkeys(call.waits):
                if address != ours.ptr:
                    ours.wait_event(_cupy_stream(address).record())
            yield
            if call.borrowed:
                hold(call.borrowed)


class _Stream(NamedTuple):
    """A stream of another library, as CuPy imports it."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def _cupy_stream(address: int) -> Any:
    """The CuPy stream at an address; 0 and 1 are both the default stream, see CUDA's array interface."""
    cuda = require_cupy().cuda
    if cuda.get_current_stream().ptr == address:
        return cuda.get_current_stream()
    return cuda.Stream.null if address in (0, 1) else cuda.Stream.from_external(_Stream(address))


_held: deque[tuple[Any, Sequence[Any]]] = deque()
_held_lock = threading.Lock()


def hold(borrowed: Sequence[Any]) -> None:
    """Keep arrays until the current stream is past this point.

    Their memory could otherwise be given away while a kernel still reads it: by their libraries, or by CuPy's
    pool on the stream that they were made on. None of those waits for this stream.
    """
    event = require_cupy().cuda.Event(disable_timing=True)
    event.record()
    with _held_lock:
        while _held and _held[0][0].done:
            _held.popleft()
        _held.append((event, borrowed))


_captured: list[Any] = []  # what CUDA graphs refer to
_DEFAULT_STREAMS = (0, 1)  # cannot be captured


def capturing() -> bool:
    """Is CuPy's current stream being captured into a CUDA graph?"""
    stream = require_cupy().cuda.get_current_stream()
    return stream.ptr not in _DEFAULT_STREAMS and bool(stream.is_capturing())


def keep_for_graph(*memory: Any) -> None:
    """Memory that a call makes for itself: a CUDA graph uses it again at every replay, so it is never given back."""
    if capturing():
        _captured.extend(memory)


# ---- results ----------------------------------------------------------------------------------------


_READ_BY_KERNELS = ("q_lengths", "kv_lengths", "q_offset", "cu_seqlens_q", "cu_seqlens_k", "block_table")


def overlaps_input(x: Operands) -> bool:
    """Does the memory of ``out`` overlap an input, so that a kernel must not write there yet?

    On a GPU only where ``x.target`` says how ``out`` lies; else it is written after the kernel in any case.
    """
    v = x.visibility
    if x.device is None:
        inputs = (x.q, x.k, x.v, x.bias, x.sinks, x.alibi_slopes, x.q_starts, x.k_starts, v.q_offset, v.q_lengths,
                  v.kv_lengths, *(arrays_of(v.mask) or ()))  # fmt: skip
        out = as_numpy("out", x.out)
        return any(np.may_share_memory(out, other) for other in inputs if other is not None)
    assert x.target is not None
    # The extents are the same for every call of the memo's entry, the addresses are not.
    extents = x.memo.get("extents")
    if extents is None:
        views = {"out": x.target, "q": x.q, "k": x.k, "v": x.v, "bias": x.bias, "sinks": x.sinks}
        views |= {name: x.views[name] for name in _READ_BY_KERNELS if name in x.addresses}
        if "alibi_slopes" in x.addresses:
            views["alibi_slopes"] = x.alibi_slopes
        if "mask" in x.addresses:
            views["mask"] = v.mask.array  # type: ignore[union-attr]
        extents = x.memo["extents"] = {name: _extent(view) for name, view in views.items() if view is not None}
    low, high = (x.addresses["out"] + end for end in extents["out"])
    return any(
        max(x.addresses[name] + first, low) < min(x.addresses[name] + last, high)
        for name, (first, last) in extents.items()
        if name != "out"
    )


def may_share_memory(one: Any, other: Any) -> bool:
    """Do two arrays of the caller's, of any kinds, lie on one device with bounds that overlap?"""
    (device, low, high), (other_device, first, last) = _bounds(one), _bounds(other)
    return device == other_device and max(low, first) < min(high, last)


def _bounds(array: Any) -> tuple[int | None, int, int]:
    """The device of an array (None: the CPU), and the addresses of its first byte and behind its last."""
    source = Source(array)
    signature = source.read("array", array)
    if signature is None:
        host = as_numpy("array", array)
        low, high = _extent(host)
        return None, host.ctypes.data + low, host.ctypes.data + high
    low, high = _extent(source.view("array"))
    return signature[4], source.addresses["array"] + low, source.addresses["array"] + high


def _extent(array: np.ndarray) -> tuple[int, int]:
    """First and last byte of the elements, counted from element 0; the last is exclusive."""
    if array.size == 0:
        return 0, 0
    reach = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    return sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach) + array.itemsize


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
        x = self.operands
        if name == "out" and x.target is not None:
            x.target[...] = 0
            return x.target
        shape, dtype = allocation(self.problem, x, name)
        array = self._arrays[name] = np.full(shape, -np.inf, dtype) if name == "lse" else np.zeros(shape, dtype)
        return canonical_result(x, name, array)

    def launched(self) -> None:
        """Nothing is left to do on a CPU."""

    def give(self, name: str) -> Any:
        """The finished result, of the kind, shape and dtype that the caller expects."""
        x = self.operands
        if name == "out" and x.out is not None:
            if x.target is None:
                as_numpy("out", x.out)[...] = self._arrays[name]
            return x.out
        array = self._arrays[name]
        if name in _ACCUMULATED:
            with np.errstate(all="ignore"):
                array = array.astype(getattr(x, name).dtype).reshape(x.user_shapes[name])
        return from_numpy(array, x.kind)


_ACCUMULATED = ("bias", "sinks")


def allocation(problem: Problem, x: Operands, name: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the array that is allocated for a result."""
    if name == "bias":
        assert x.bias is not None
        return x.bias.shape, np.dtype(problem.compute_dtype)
    if name == "sinks":
        return (problem.Hq,), np.dtype(np.float64)
    return x.user_shapes[name], np.dtype(problem.compute_dtype) if name == "lse" else x.q.dtype


def canonical_result(x: Operands, name: str, array: np.ndarray) -> np.ndarray:
    """The view of a freshly allocated result that a kernel writes to."""
    if name in _ACCUMULATED:
        return array
    return array.reshape(x.q.shape[:3]) if name == "lse" else heads_first(array, x.layout)


class Target(NamedTuple):
    """What a GPU kernel writes to: an address (0: it need not), and the canonical metadata of the array there."""

    address: int
    view: np.ndarray


class DeviceResult:
    """:class:`Result` on a GPU: of the kind that came in, on the call's device.

    Nothing is filled in: a kernel writes every element, padding too (0, and -inf for ``lse``). An ``lse`` that
    nobody asked for is not made.
    """

    __slots__ = ("_arrays", "operands", "problem")

    def __init__(self, problem: Problem, operands: Operands) -> None:
        self.problem, self.operands = problem, operands
        self._arrays: dict[str, Any] = {}

    def canonical(self, name: str) -> Target:
        """Allocate the result ``name`` ("out", "lse" or an argument) and return what a kernel writes to."""
        x = self.operands
        prepared = x.memo.get(name)
        if prepared is None:
            shape, dtype = allocation(self.problem, x, name)
            view = canonical_result(x, name, device_view(shape, None, dtype))
            made = _torch_dtype(dtype) if x.kind == "torch" else dtype
            prepared = x.memo[name] = shape, made, view, Target(0, view)
        shape, dtype, view, not_written = prepared
        if name == "lse" and not x.return_lse:
            return not_written
        if name == "out" and x.target is not None:
            return Target(x.addresses["out"], x.target)
        if x.kind == "torch":
            import torch

            array = self._arrays[name] = torch.empty(shape, dtype=dtype, device=x.device)
            return Target(array.data_ptr(), view)
        array = self._arrays[name] = require_cupy().ndarray(shape, dtype)
        return Target(array.data.ptr, view)

    def launched(self) -> None:
        """The kernel is on its way: temporary results and copies must outlive a graph that it is part of."""
        keep_for_graph(self._arrays, self.operands.keep)

    def give(self, name: str) -> Any:
        """The finished result, of the kind, shape and dtype that the caller expects."""
        x = self.operands
        if name == "out" and x.out is not None:
            if x.target is None:
                self._copy_to_out()
            return x.out
        array = self._arrays[name]
        if name in _ACCUMULATED:
            dtype, shape = getattr(x, name).dtype, x.user_shapes[name]
            if x.kind == "torch":
                return array.to(_torch_dtype(dtype)).reshape(shape)
            array = array.astype(dtype, copy=False).reshape(shape)
        return array if x.kind in ("cupy", "torch") else from_cupy(array, x.kind)

    def _copy_to_out(self) -> None:
        x = self.operands
        source = Source(x.out)
        source.locate("out", x.out)
        view, made = source.view("out"), self._arrays["out"]
        address, whole = made.data_ptr() if x.kind == "torch" else made.data.ptr, is_plain(view)
        home = _elements(view, source.addresses["out"], x.device, whole)
        home[...] = _elements(device_view(view.shape, None, x.q.dtype), address, x.device, whole)


def result(problem: Problem, operands: Operands) -> Result | DeviceResult:
    """The results of a call, where its arrays are."""
    return Result(problem, operands) if operands.device is None else DeviceResult(problem, operands)
