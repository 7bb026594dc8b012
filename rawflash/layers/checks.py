"""What every layer asks of its arguments: arrays of one library and one dtype, shapes, plain numbers.

A wrong argument is a :class:`rawflash.ProblemError` that names it, as for :func:`rawflash.attention`.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

from rawflash import arrays
from rawflash.errors import ProblemError

DTYPES = ("float16", "float32", "float64")  # not bfloat16, of which NumPy's products are float32


def _library(name: str, array: Any) -> str:
    """ "numpy" or "cupy"; any other array has operators of its own, which a layer does not speak."""
    kind = arrays.kind_of(array)
    if kind == "cupy" or (isinstance(array, np.ndarray) and not isinstance(array, (np.ma.MaskedArray, np.matrix))):
        return kind
    cls = type(array)
    shown = cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__.partition('.')[0]} {cls.__name__}"
    raise ProblemError(f"{name} is a {shown}; expected a NumPy or CuPy array")


def namespace(**named: Any) -> ModuleType:
    """The module that the arrays belong to, NumPy or CuPy, after checking that they go together.

    Parameters
    ----------
    **named : array
        Arrays of one library and one dtype, float16, float32 or float64, by the names that an error calls them.

    Returns
    -------
    module
        ``numpy`` or ``cupy``.

    Raises
    ------
    ProblemError
        One is no NumPy or CuPy array (one of PyTorch, say), is of another dtype, or is unlike the first.

    Examples
    --------
    >>> import numpy as np
    >>> namespace(x=np.ones(3), w=np.ones(3)) is np
    True
    >>> namespace(x=np.ones(3), w=np.ones(3, np.float32))
    Traceback (most recent call last):
        ...
    rawflash.errors.ProblemError: w has dtype float32; expected float64 to match x
    """
    kinds = {name: _library(name, array) for name, array in named.items()}
    first = next(iter(named))
    for name, array in named.items():
        if kinds[name] != kinds[first]:
            raise ProblemError(f"{name} is a {kinds[name]} array and {first} a {kinds[first]} array; expected one kind")
        if array.dtype.name not in DTYPES:
            raise ProblemError(f"{name} has dtype {array.dtype}; expected {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
        if array.dtype != named[first].dtype:
            raise ProblemError(f"{name} has dtype {array.dtype}; expected {named[first].dtype} to match {first}")
    return arrays.require_cupy() if kinds[first] == "cupy" else np


def check_shape(name: str, array: Any, shape: tuple[int | None, ...], rule: str) -> None:
    """Raise unless ``array`` has this shape; None stands for any length, ``rule`` for the shape in letters.

    Examples
    --------
    >>> import numpy as np
    >>> check_shape("wo", np.ones((4, 3)), (8, None), "(Hq*dv, D)")
    Traceback (most recent call last):
        ...
    rawflash.errors.ProblemError: wo has shape (4, 3); expected (Hq*dv, D) = (8, *)
    """
    fits = array.ndim == len(shape) and all(n in (None, have) for n, have in zip(shape, array.shape, strict=True))
    if not fits:
        shown = ", ".join("*" if n is None else str(n) for n in shape) + ("," if len(shape) == 1 else "")
        raise ProblemError(f"{name} has shape {array.shape}; expected {rule} = ({shown})")


def check_count(name: str, value: Any) -> int:
    """A number of heads and the like: an int of at least 1."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ProblemError(f"{name} is {value!r}; expected an int >= 1")
    return int(value)


def check_positive(name: str, value: Any) -> float:
    """A finite number above zero."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ProblemError(f"{name} is {value!r}; expected a number > 0")
    if not (math.isfinite(value) and value > 0):
        raise ProblemError(f"{name} is {value!r}; expected a finite number > 0")
    return float(value)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of the names."""
    if not isinstance(value, str) or value not in choices:
        raise ProblemError(f"{name} is {value!r}; expected one of " + ", ".join(repr(choice) for choice in choices))
    return value


def check_positions(xp: ModuleType, name: str, positions: Any, shape: tuple[int, ...], rule: str) -> Any:
    """Integers that broadcast to ``shape``, as an array of ``xp``; what is on the host is copied to a GPU."""
    if isinstance(positions, (bool, int, np.generic, str)) or positions is None:
        raise ProblemError(f"{name} is {positions!r}; expected an int array, {rule}")
    if isinstance(positions, (list, tuple, range)):
        try:
            positions = np.asarray(positions, None if len(positions) else np.int64)
        except (TypeError, ValueError):  # a ragged list
            raise ProblemError(f"{name} is {positions!r}; expected an int array, {rule}") from None
    elif _library(name, positions) == "cupy" and xp is np:
        raise ProblemError(f"{name} is a cupy array beside numpy arrays; expected one kind")
    array = xp.asarray(positions)
    if array.dtype.kind not in "iu":
        raise ProblemError(f"{name} has dtype {array.dtype}; expected integers")
    fits = array.ndim <= len(shape) and all(
        have in (1, want) for have, want in zip(reversed(array.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ProblemError(f"{name} has shape {array.shape}; expected {rule}, which broadcasts to {shape}")
    return array
