"""Device arrays for tests: host cases moved to a GPU with their strides, results moved back."""

import ctypes
import os
from dataclasses import replace

import numpy as np

import rawflash as rf

try:
    from numpy.lib.array_utils import byte_bounds
except ImportError:  # NumPy 1
    from numpy import byte_bounds

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take the GPU from all other processes

KINDS = ("cupy", "torch", "jax", "numba")
ALGORITHMS = ("fa1", "fa2")
_DEVICE_OPTIONS = ("bias", "sinks")
_EITHER = ("alibi_slopes", "q_lengths", "kv_lengths", "q_offset")


def to_cupy(array):
    """A CuPy array of the same elements at the same distances; what lies between them comes along."""
    import cupy

    low, high = byte_bounds(array) if array.size else (array.ctypes.data, array.ctypes.data)
    octets = np.zeros(max(high - low, 1), np.uint8)
    ctypes.memmove(octets.ctypes.data, low, high - low)
    memory = cupy.asarray(octets).data + (array.ctypes.data - low)
    return cupy.ndarray(array.shape, array.dtype, memory, array.strides)


def to_kind(array, kind):
    """A device array of a library; CuPy's keeps the strides."""
    if kind == "cupy":
        return to_cupy(array)
    if kind == "torch":
        import torch

        if array.dtype.name == "bfloat16":
            return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).cuda().view(torch.bfloat16)
        return torch.from_numpy(np.ascontiguousarray(array)).cuda()
    if kind == "jax":
        import jax

        return jax.device_put(np.ascontiguousarray(array), jax.devices("gpu")[0])
    from numba import cuda

    return cuda.to_device(np.ascontiguousarray(array))


def to_host(array):
    """A NumPy array of the elements of a device array of any kind."""
    kind = type(array).__module__.partition(".")[0]
    if kind == "torch":
        import torch

        array = array.detach().cpu()
        if array.dtype == torch.bfloat16:
            import ml_dtypes

            return array.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return array.numpy()
    if kind == "numba":
        return array.copy_to_host()
    if kind == "cupy":
        whole = array.copy(order="C") if array.dtype.name != "bfloat16" else array
        return whole.view(f"u{array.itemsize}").get().view(array.dtype) if array.ndim else array.get()
    return np.asarray(array)


def on_gpu(case, kind="cupy", small_on_device=False):
    """The case with device arrays; lengths, offsets and slopes too, if ``small_on_device``."""
    options = dict(case.options)
    for name in _DEVICE_OPTIONS:
        if options.get(name) is not None:
            options[name] = to_kind(options[name], kind)
    if isinstance(options.get("mask"), np.ndarray):
        options["mask"] = to_kind(options["mask"], kind)
    cu_seqlens = case.cu_seqlens
    if small_on_device:
        for name in _EITHER:
            value = options.get(name)
            if isinstance(value, (list, np.ndarray)):
                options[name] = to_kind(np.asarray(value, None if len(value) else getattr(value, "dtype", int)), kind)
        if cu_seqlens is not None:
            cu_seqlens = tuple(to_kind(np.asarray(n), kind) for n in cu_seqlens)
    moved = {name: to_kind(getattr(case, name), kind) for name in ("q", "k", "v", "dout")}
    dlse = None if case.dlse is None else to_kind(case.dlse, kind)
    return replace(case, **moved, dlse=dlse, options=options, cu_seqlens=cu_seqlens)


def used_entries(table, needed):
    """A block table on the GPU of which only the needed entries were ever written: initcheck sees who reads others."""
    import cupy

    made = cupy.empty(table.shape, table.dtype)
    for row, entries, n in zip(made, table, needed, strict=True):
        row[:n] = cupy.asarray(entries[:n])
    return made


def append_and_decode(case, n=0, kind="cupy", small_on_device=False, **options):
    """``(out, lse, k_cache, v_cache)`` of a `Decode`, the last ``n`` keys of each sequence appended first."""
    *caches, table = case.caches(order=2, filled=case.kv_lengths - n)
    before, lengths = case.kv_lengths - n, case.kv_lengths
    if small_on_device:
        before, lengths = to_kind(before, kind), to_kind(lengths, kind)
        if table is not None:
            table = used_entries(table, -(-case.kv_lengths // case.page)) if kind == "cupy" else to_kind(table, kind)
    caches = [to_kind(cache, kind) for cache in caches]
    if n:
        rf.append_kv(*caches, *(to_kind(x, kind) for x in case.newest(n)), before, table, layout=case.layout)
    options = case.options | options | {"layout": case.layout, "return_lse": True}
    options |= {name: to_kind(options[name], kind) for name in _DEVICE_OPTIONS if name in options}
    return *rf.attention_decode(to_kind(case.turned(case.q), kind), *caches, lengths, table, **options), *caches
