"""Rotary position embedding: each pair of features turns by an angle that grows with the position.

A score of two rotated vectors depends on their distance only, so positions need not be learned.
"""

from __future__ import annotations

from typing import Any

from rawflash.errors import ProblemError
from rawflash.layers.checks import check_choice, check_positions, check_positive, namespace

CONVENTIONS = ("half", "interleaved")


def rope(x: Any, positions: Any, base: float = 10000.0, convention: str = "half") -> Any:
    """Rotate the pairs of features of ``x`` by angles proportional to the position.

    Parameters
    ----------
    x : array (..., T, d)
        NumPy or CuPy, float16, float32 or float64; ``d`` is even.
    positions : int array (T,)
        Or any shape that broadcasts to ``x.shape[:-1]``: ``(B, 1, T)`` for an offset of each sequence,
        ``(T, 1)`` for ``x (B, T, H, d)``. A list or a host array is copied to the device of ``x``.
    base : float
        Pair ``i`` turns by ``base**(-2 i / d)`` radians from one position to the next.
    convention : {"half", "interleaved"}
        Which features are pair ``i``: "half": ``x[..., i]`` and ``x[..., d/2 + i]`` (GPT-NeoX, LLaMA as
        commonly distributed); "interleaved": ``x[..., 2 i]`` and ``x[..., 2 i + 1]`` (the paper, GPT-J).
        Weights that were trained with one give nonsense with the other.

    Returns
    -------
    array (..., T, d)
        Shape and dtype of ``x``.

    Notes
    -----
    With ``theta = position * base**(-2 i / d)``, of pair ``(a, b)``::

        a' = a cos(theta) - b sin(theta)
        b' = a sin(theta) + b cos(theta)

    Angles are computed in float64, where positions of millions lose nothing, products in float32 (float64
    for float64).

    References
    ----------
    Su, Lu, Pan, Murtadha, Wen, Liu, "RoFormer: Enhanced transformer with rotary position embedding",
    equation 34, 2021.

    Examples
    --------
    >>> import numpy as np
    >>> from rawflash.layers import rope
    >>> x = np.array([[1.0, 0.0], [1.0, 0.0]])
    >>> rope(x, [0, 1]).round(3)
    array([[1.   , 0.   ],
           [0.54 , 0.841]])

    Scores see the distance only:

    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 8))
    >>> np.allclose(rope(q, [3]) @ rope(k, [1]).T, rope(q, [103]) @ rope(k, [101]).T)
    True
    """
    return _rotate("x", x, positions, base, convention, +1)


def rope_backward(dout: Any, positions: Any, base: float = 10000.0, convention: str = "half") -> Any:
    """Gradient of :func:`rope` with respect to ``x``: the rotation by the opposite angle.

    Parameters
    ----------
    dout : array (..., T, d)
        Gradient of the loss with respect to ``rope(x, positions, base, convention)``.
    positions, base, convention
        Those of the forward call.

    Returns
    -------
    array (..., T, d)
        Gradient with respect to ``x``. The rotation is orthogonal and linear, so its transpose, which a
        gradient is multiplied by, is its inverse.

    Examples
    --------
    >>> import numpy as np
    >>> from rawflash.layers import rope, rope_backward
    >>> x = np.random.default_rng(0).standard_normal((5, 4))
    >>> np.allclose(rope_backward(rope(x, range(5)), range(5)), x)
    True
    """
    return _rotate("dout", dout, positions, base, convention, -1)


def _rotate(name: str, x: Any, positions: Any, base: float, convention: str, direction: int) -> Any:
    xp = namespace(**{name: x})
    if x.ndim < 2 or x.shape[-1] % 2:
        raise ProblemError(f"{name} has shape {x.shape}; expected (..., T, d) with an even d")
    d = x.shape[-1]
    base = check_positive("base", base)
    convention = check_choice("convention", convention, CONVENTIONS)
    positions = check_positions(xp, "positions", positions, x.shape[:-1], "(T,) or the leading axes of x")
    compute = xp.float64 if x.dtype == xp.float64 else xp.float32
    theta = positions[..., None] * base ** (-xp.arange(0, d, 2, dtype=xp.float64) / d)
    cos, sin = xp.cos(theta).astype(compute), (direction * xp.sin(theta)).astype(compute)

    out = xp.empty(x.shape, x.dtype)
    first, second = (slice(d // 2), slice(d // 2, d)) if convention == "half" else (slice(0, d, 2), slice(1, d, 2))
    a, b = x[..., first], x[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out
