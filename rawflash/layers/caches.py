"""How large the caches of decoding are: multi-head, grouped-query and latent attention in one formula each."""

from __future__ import annotations

from typing import Any

import numpy as np

from rawflash.errors import ProblemError
from rawflash.problem import _choice, _integer

_SIZES = {"mha": ("heads", "d"), "gqa": ("kv_heads", "d"), "mla": ("m", "p")}  # what each kind needs
_OPTIONAL = {"mha": ("dv",), "gqa": ("dv",), "mla": ()}
_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}  # NumPy alone does not know bfloat16


def cache_size(
    kind: str, T: int, *, heads: int | None = None, kv_heads: int | None = None, d: int | None = None,
    dv: int | None = None, m: int | None = None, p: int | None = None, layers: int = 1, dtype: Any = None,
) -> int:  # fmt: skip
    """Size of the cache that decoding keeps for one sequence.

    Parameters
    ----------
    kind : {"mha", "gqa", "mla"}
        Multi-head attention, ``T * heads * (d + dv)`` numbers a layer; grouped-query attention
        (multi-query with ``kv_heads=1``), ``T * kv_heads * (d + dv)``; multi-head latent attention,
        ``T * (m + p)``.
    T : int
        Tokens; for a cache of fixed capacity, its ``Tmax``.
    heads, kv_heads : int
        Heads of "mha"; key/value heads of "gqa".
    d, dv : int
        Head dimension of the keys and of the values of "mha" and "gqa"; ``dv`` left out is ``d``.
    m, p : int
        Width of the latent and of the shared rotated key of "mla".
    layers : int
        Layers that keep such a cache.
    dtype : str or dtype, optional
        One of the dtypes that attention takes: the result is then in bytes.

    Returns
    -------
    int
        Numbers; bytes if ``dtype`` is given.

    Raises
    ------
    ProblemError
        A size that ``kind`` needs is missing or not an int >= 0, or one that it does not have is given.

    Notes
    -----
    With dv = d these are the 2 T H d of multi-head attention (Vaswani et al. 2017), the 2 T Hkv d of
    grouped-query attention (Ainslie et al. 2023) and the T (m + p) of latent attention (DeepSeek-AI 2024).

    Examples
    --------
    >>> from rawflash.layers import cache_size
    >>> cache_size("mha", 1000, heads=32, d=128), cache_size("gqa", 1000, kv_heads=8, d=128)
    (8192000, 2048000)
    >>> cache_size("mla", 1000, m=512, p=64, dtype="bfloat16")
    1152000
    """
    _choice("kind", kind, tuple(_SIZES))
    given = {"heads": heads, "kv_heads": kv_heads, "d": d, "dv": dv, "m": m, "p": p}
    needed = _SIZES[kind]
    for name, value in given.items():
        if value is None and name in needed:
            raise ProblemError(f"{name} is None; expected an int >= 0, which {kind!r} has")
        if value is not None and name not in needed + _OPTIONAL[kind]:
            raise ProblemError(f"{name} is {value!r}; expected None, {kind!r} has {' and '.join(needed)}")
    rule = "an int >= 0"
    n = {name: _integer(name, value, 0, None, rule) for name, value in given.items() if value is not None}
    if kind == "mla":
        token = n["m"] + n["p"]
    else:
        token = n[needed[0]] * (n["d"] + n.get("dv", n["d"]))
    numbers = _integer("T", T, 0, None, rule) * token * _integer("layers", layers, 0, None, rule)
    return numbers if dtype is None else numbers * _itemsize(dtype)


def _itemsize(dtype: Any) -> int:
    """Bytes of a number of ``dtype``, a name or what NumPy makes a dtype of."""
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        name = None
    if name not in _BYTES:
        raise ProblemError(f"dtype is {dtype!r}; expected one of {', '.join(_BYTES)}")
    return _BYTES[name]
