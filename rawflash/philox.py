"""The dropout generator: Philox4x32-10 as a pure function of (seed, b, h, i, j).

Philox is the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random
numbers: as easy as 1, 2, 3" (SC 2011). Because the element at ``(b, h, i, j)`` depends on
nothing but the seed and its own position, the mask is the same for every tile size,
algorithm, backend, layout and device; the twins of this file in other backends are tested
against it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

# Multipliers and Weyl constants of Philox4x32 (Salmon et al., table 2 and section 4).
MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
ROUNDS = 10
WORDS = 4  # 32-bit words that one counter yields: four neighbouring keys j share one call
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(
    seed: int, c0: npt.ArrayLike, c1: npt.ArrayLike, c2: npt.ArrayLike, c3: npt.ArrayLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ten rounds of Philox4x32 with key ``(seed mod 2**32, seed div 2**32)``.

    Parameters
    ----------
    seed : int
        ``0 <= seed < 2**64``.
    c0, c1, c2, c3 : array_like of int
        The four counter words, broadcast against each other; taken modulo 2**32.

    Returns
    -------
    tuple of four ndarray of uint32
        The output words, of the broadcast shape.
    """
    words = [np.asarray(c).astype(np.uint64) & _LOW for c in np.broadcast_arrays(c0, c1, c2, c3)]
    key_0, key_1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(ROUNDS):
        product_0 = words[0] * np.uint64(MULTIPLIER_0)
        product_1 = words[2] * np.uint64(MULTIPLIER_1)
        words = [
            (product_1 >> _HALF) ^ words[1] ^ np.uint64(key_0),
            product_1 & _LOW,
            (product_0 >> _HALF) ^ words[3] ^ np.uint64(key_1),
            product_0 & _LOW,
        ]
        key_0 = (key_0 + WEYL_0) & 0xFFFFFFFF
        key_1 = (key_1 + WEYL_1) & 0xFFFFFFFF
    return (
        words[0].astype(np.uint32),
        words[1].astype(np.uint32),
        words[2].astype(np.uint32),
        words[3].astype(np.uint32),
    )


def threshold(p: float) -> int:
    """The word below which an element is dropped: ``floor(p * 2**32)``."""
    return math.floor(p * 4294967296.0)


def keep(
    p: float, seed: int, b: npt.ArrayLike, h: npt.ArrayLike, i: npt.ArrayLike, j: npt.ArrayLike
) -> np.ndarray:
    """Which probabilities dropout keeps, at any positions.

    Parameters
    ----------
    p : float
        Probability of dropping, ``0 <= p < 1``.
    seed : int
        ``0 <= seed < 2**64``.
    b, h, i, j : array_like of int
        Batch (or sequence), query head, query row and key, broadcast against each other.

    Returns
    -------
    ndarray of bool
        True = kept, of the broadcast shape.
    """
    b, h, i, j = np.broadcast_arrays(b, h, i, j)
    words = philox4x32(seed, j // WORDS, i, h, b)
    return np.choose(j % WORDS, words) >= threshold(p)


def dropout_mask(p: float, seed: int, shape: tuple[int, int, int, int]) -> np.ndarray:
    """The whole mask for a call of shape ``(B, Hq, Tq, Tk)``; True = kept.

    Examples
    --------
    >>> mask = dropout_mask(0.25, 7, (1, 2, 3, 8))
    >>> mask.shape, mask.dtype
    ((1, 2, 3, 8), dtype('bool'))
    """
    size_b, size_h, size_i, size_j = shape
    groups = -(-size_j // WORDS)
    b, h, i, j = np.ogrid[:size_b, :size_h, :size_i, :groups]
    words = np.stack(philox4x32(seed, j, i, h, b), axis=-1)
    kept = (words >= threshold(p)).reshape(size_b, size_h, size_i, groups * WORDS)
    return np.ascontiguousarray(kept[..., :size_j])
