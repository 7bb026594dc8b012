"""Tensor maps: what sm_90 and later must know of a matrix to copy boxes of it (cuTensorMapEncodeTiled of the driver).

A map holds the address, so it is made for a call; :class:`Launcher` keeps the last ones. Boxes have 64 columns of 16
bits, whose 16-byte pieces the hardware exchanges by the row's number (128-byte swizzle, see cuda/sm90/hopper.cuh).
"""

from __future__ import annotations

import ctypes
from array import array
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from rawflash.backends.cupy_raw import compile
from rawflash.errors import BackendError

WORDS = 16  # of 64 bits, of a map
ALIGNMENT = 64  # bytes, of a map in the argument of a kernel
COLUMNS = 64  # of a box: 128 bytes, as many as the hardware exchanges pieces of
GRANULE = 16  # bytes: what addresses and strides are multiples of
MOST_ROWS = 256  # of a box
LARGEST_STRIDE = 1 << 40  # bytes
LARGEST_EXTENT = 1 << 31  # coordinates are 32-bit integers with a sign
DTYPES = {"float16": 6, "bfloat16": 9}  # CUtensorMapDataType
SWIZZLE_128B, PROMOTE_256B = 3, 3  # CUtensorMapSwizzle, CUtensorMapL2promotion
AXES = 4


@dataclass(frozen=True)
class Box:
    """A matrix of a call that is copied by a map, ``rows`` at a time.

    Attributes
    ----------
    name : str
        Of the matrix in call.cuh: "q", "k", ...
    rows : int
        Of a box.
    """

    name: str
    rows: int


def can(view: np.ndarray) -> bool:
    """Can a map describe this view ``(slots, heads, rows, columns)``?

    Parameters
    ----------
    view : array
        Its address need be right but for a multiple of 16 bytes.
    """
    return (
        view.itemsize == 2
        and view.size > 0
        and view.ctypes.data % GRANULE == 0
        and view.strides[-1] == view.itemsize
        and view.shape[-1] * view.itemsize % GRANULE == 0
        and all(n < LARGEST_EXTENT for n in view.shape)
        and all(
            n == 1 or (0 < stride < LARGEST_STRIDE and stride % GRANULE == 0)
            for n, stride in zip(view.shape[:-1], view.strides[:-1], strict=True)
        )
    )


def geometry(view: np.ndarray, dtype: str, rows: int) -> tuple[Any, ...]:
    """What :func:`encode` takes beside the address: dtype, extents, strides in bytes and rows of a box.

    Extents and strides from the innermost axis on. An axis of length 1 may have any stride; its own may be one that
    the hardware refuses.
    """
    extents = tuple(int(n) for n in view.shape[::-1])
    whole = extents[0] * view.itemsize
    strides = tuple(
        int(stride) if n > 1 else whole for n, stride in zip(extents[1:], view.strides[-2::-1], strict=True)
    )
    return DTYPES[dtype], extents, strides, rows


@cache
def _encode_tiled() -> Any:
    function = compile.driver("cuTensorMapEncodeTiled")
    pointer = ctypes.c_void_p
    function.argtypes = (pointer, ctypes.c_int, ctypes.c_uint32, pointer, pointer, pointer, pointer, pointer,
                         *[ctypes.c_int] * 4)  # fmt: skip
    return function


def encode(address: int, dtype: int, extents: tuple[int, ...], strides: tuple[int, ...], rows: int) -> array[int]:
    """The words of a map.

    Parameters
    ----------
    address : int
        Of element 0, on the device.
    dtype, extents, strides, rows
        See :func:`geometry`.

    Raises
    ------
    BackendError
        The driver refuses it.
    """
    space = ctypes.create_string_buffer(8 * WORDS + ALIGNMENT)
    at = -(-ctypes.addressof(space) // ALIGNMENT) * ALIGNMENT
    found = _encode_tiled()(
        at, dtype, AXES, address,
        (ctypes.c_uint64 * AXES)(*extents),
        (ctypes.c_uint64 * (AXES - 1))(*strides),
        (ctypes.c_uint32 * AXES)(COLUMNS, rows, 1, 1),
        (ctypes.c_uint32 * AXES)(1, 1, 1, 1),
        0, SWIZZLE_128B, PROMOTE_256B, 0,
    )  # fmt: skip
    if found:
        raise BackendError(f"cuTensorMapEncodeTiled gives {found}: extents {extents}, strides {strides}, {rows} rows")
    words = array("q")
    words.frombytes(ctypes.string_at(at, 8 * WORDS))
    return words
