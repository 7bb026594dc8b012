"""Stand-ins for ``rawflash.attention_decode`` and ``rawflash.append_kv`` until they exist: delete this file then.

They gather a paged cache and know no errors but the end of the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rawflash.api import attention
from rawflash.errors import ProblemError
from rawflash.layers.checks import namespace


def attention_decode(
    q: Any, k_cache: Any, v_cache: Any, kv_lengths: Any, block_table: Any = None, **options: Any
) -> Any:
    """Attention over the first ``kv_lengths`` keys of a cache (B, Tmax, Hkv, d); ``layout`` is "bthd"."""
    if block_table is not None:
        k_cache, v_cache = (_gather(cache, block_table, kv_lengths) for cache in (k_cache, v_cache))
    return attention(q, k_cache, v_cache, kv_lengths=kv_lengths, **options)


def append_kv(
    k_cache: Any, v_cache: Any, k_new: Any, v_new: Any, kv_lengths: Any, block_table: Any = None,
    layout: str = "bthd",
) -> None:  # fmt: skip
    """Write new keys and values behind the first ``kv_lengths`` ones."""
    xp = namespace(k_cache=k_cache, k_new=k_new)
    block = k_cache.shape[1]
    capacity = block if block_table is None else block * np.shape(block_table)[1]
    T, lengths = k_new.shape[1], xp.asarray(kv_lengths)
    if (lengths < 0).any() or (lengths + T > capacity).any():
        raise ProblemError(f"kv_lengths is {lengths.tolist()}; expected entries between 0 and {capacity - T}")
    j = lengths[:, None] + xp.arange(T)
    b = xp.arange(len(lengths))[:, None]
    where = (b, j) if block_table is None else (xp.asarray(block_table)[b, j // block], j % block)
    for cache, new in ((k_cache, k_new), (v_cache, v_new)):
        cache[where] = new


def _gather(cache: Any, block_table: Any, kv_lengths: Any) -> Any:
    """A paged cache (num_blocks, block, Hkv, d) as a contiguous one, (B, max_blocks * block, Hkv, d)."""
    xp = namespace(cache=cache)
    table, block = xp.asarray(block_table), cache.shape[1]
    used = xp.arange(table.shape[1]) * block < xp.asarray(kv_lengths)[:, None]
    return cache[xp.where(used, table, 0)].reshape(len(table), -1, *cache.shape[2:])
