"""One block of a GPT: attention and a small network, each behind a norm and beside a residual."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple, Unpack

from rawflash.errors import ProblemError
from rawflash.layers.checks import check_positive, check_shape, namespace
from rawflash.layers.multi_head import (
    ROPE,
    MultiHeadSaved,
    multi_head_attention,
    multi_head_attention_backward,
    rows,
)
from rawflash.problem import Options, known

PARAMS = ("norm1", "wq", "wk", "wv", "wo", "norm2", "w1", "w2")
EPS = 1e-6
_SLOPE = math.sqrt(2 / math.pi)
_CUBE = 0.044715
_FLAT = 20.0  # beyond, tanh is 1 to the last bit of float64, and cubes may overflow


def rms_norm(x: Any, gain: Any, eps: float = EPS) -> Any:
    """Divide each row by its root mean square.

    Parameters
    ----------
    x : array (..., D)
        NumPy or CuPy floats.
    gain : array (D,)
        Of the dtype of ``x``.
    eps : float
        Added to the mean square, which may be zero.

    Returns
    -------
    array (..., D)

    Notes
    -----
    ``out = gain * x / sqrt(mean(x^2) + eps)``, computed in float32 (float64 for float64).

    References
    ----------
    Zhang, Sennrich, "Root mean square layer normalization", 2019.

    Examples
    --------
    >>> import numpy as np
    >>> from rawflash.layers import rms_norm
    >>> rms_norm(np.array([3.0, -3.0]), np.ones(2)).round(3)
    array([ 1., -1.])
    """
    namespace(x=x, gain=gain)
    wide, r = _root_mean_square(x, gain, eps)
    return (wide * r * gain).astype(x.dtype, copy=False)


def rms_norm_backward(dout: Any, x: Any, gain: Any, eps: float = EPS) -> tuple[Any, Any]:
    """Gradients of :func:`rms_norm`.

    Parameters
    ----------
    dout : array (..., D)
        Gradient of the loss with respect to the result.
    x, gain, eps
        Those of the forward call.

    Returns
    -------
    dx : array (..., D)
    dgain : array (D,)

    Notes
    -----
    With ``r = 1 / sqrt(mean(x^2) + eps)`` and ``n = x r``: ``dgain`` is the sum of ``dout * n`` over all
    rows, ``dx = r (dout * gain - n * mean(dout * gain * n))``.

    Examples
    --------
    >>> import numpy as np
    >>> from rawflash.layers import rms_norm_backward
    >>> dx, dgain = rms_norm_backward(np.array([1.0, 1.0]), np.array([2.0, -2.0]), np.ones(2))
    >>> dx.round(3), dgain.round(3)
    (array([0.5, 0.5]), array([ 1., -1.]))
    """
    xp = namespace(x=x, gain=gain, dout=dout)
    check_shape("dout", dout, x.shape, "the shape of x")
    wide, r = _root_mean_square(x, gain, eps)
    n = wide * r
    dgain = (dout * n).reshape(-1, *gain.shape).sum(axis=0, dtype=xp.float64)  # of as many terms as there are rows
    dn = dout * gain
    dx = r * (dn - n * (dn * n).mean(axis=-1, keepdims=True))
    return dx.astype(x.dtype, copy=False), dgain.astype(x.dtype, copy=False)


def _root_mean_square(x: Any, gain: Any, eps: float) -> tuple[Any, Any]:
    """``x`` in the dtype to compute in, and one over the root of each row's mean square."""
    xp = namespace(x=x)
    eps = check_positive("eps", eps)
    if x.ndim < 1 or x.shape[-1] == 0:
        raise ProblemError(f"x has shape {x.shape}; expected (..., D) with D >= 1")
    check_shape("gain", gain, x.shape[-1:], "(D,)")
    wide = _wide(xp, x)
    return wide, 1 / xp.sqrt((wide * wide).mean(axis=-1, keepdims=True) + eps)


def _wide(xp: ModuleType, x: Any) -> Any:
    """``x`` in the dtype to compute in: float32, or float64 for float64."""
    return x.astype(xp.float64 if x.dtype == xp.float64 else xp.float32, copy=False)


def gelu(x: Any) -> Any:
    """Gaussian error linear unit in its tanh form.

    Parameters
    ----------
    x : array
        NumPy or CuPy floats of any shape.

    Returns
    -------
    array
        Shape and dtype of ``x``.

    Notes
    -----
    ``x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))``.

    References
    ----------
    Hendrycks, Gimpel, "Gaussian error linear units", 2016.

    Examples
    --------
    >>> import numpy as np
    >>> from rawflash.layers import gelu
    >>> gelu(np.array([-3.0, 0.0, 3.0])).round(3)
    array([-0.004,  0.   ,  2.996])
    """
    xp = namespace(x=x)
    wide = _wide(xp, x)
    near = xp.clip(wide, -_FLAT, _FLAT)
    out = 0.5 * wide * (1 + xp.tanh(_SLOPE * (near + _CUBE * (near * near * near))))
    return out.astype(x.dtype, copy=False)


def gelu_backward(dout: Any, x: Any) -> Any:
    """Gradient of :func:`gelu`.

    Parameters
    ----------
    dout : array
        Gradient of the loss with respect to ``gelu(x)``.
    x : array
        That of the forward call.

    Returns
    -------
    array
        Shape and dtype of ``x``.

    Notes
    -----
    With ``t`` the tanh: ``dout ((1 + t) / 2 + x / 2 (1 - t^2) sqrt(2 / pi) (1 + 3 * 0.044715 x^2))``.

    Examples
    --------
    >>> import numpy as np
    >>> from rawflash.layers import gelu_backward
    >>> gelu_backward(np.ones(3), np.array([-9.0, 0.0, 9.0])).round(3) + 0.0
    array([0. , 0.5, 1. ])
    """
    xp = namespace(x=x, dout=dout)
    check_shape("dout", dout, x.shape, "the shape of x")
    wide = _wide(xp, x)
    near = xp.clip(wide, -_FLAT, _FLAT)
    square = near * near
    t = xp.tanh(_SLOPE * (near + _CUBE * (square * near)))
    slope = 0.5 * (1 + t) + 0.5 * near * (1 - t * t) * (_SLOPE * (1 + 3 * _CUBE * square))
    return (dout * slope).astype(x.dtype, copy=False)


class GPTBlockSaved(NamedTuple):
    """What the backward pass of :func:`gpt_block` reads again, by the names of its equations.

    Attributes
    ----------
    n1, n2 : array (..., T, D)
        Results of the two norms.
    heads : MultiHeadSaved
        What attention keeps.
    h : array (..., T, D)
        ``x`` and attention's part.
    u, a : array (..., T, F)
        The hidden layer before and after GELU.
    """

    n1: Any
    heads: MultiHeadSaved
    h: Any
    n2: Any
    u: Any
    a: Any


def gpt_block(
    x: Any, params: Mapping[str, Any], num_heads: int, num_kv_heads: int | None = None, *,
    rope: Mapping[str, Any] | None = ROPE, eps: float = EPS, return_saved: bool = False,
    **options: Unpack[Options],
) -> Any:  # fmt: skip
    """A transformer block in the pre-norm form: causal attention, then a network of one hidden layer.

    Parameters
    ----------
    x : array (..., T, D)
        NumPy or CuPy; leading axes are the batch.
    params : mapping of array
        "norm1" and "norm2" ``(D,)``, "wq" ``(D, Hq * d)``, "wk" ``(D, Hkv * d)``, "wv" ``(D, Hkv * dv)``,
        "wo" ``(Hq * dv, D)``, "w1" ``(D, F)`` and "w2" ``(F, D)``, of the dtype of ``x``.
    num_heads, num_kv_heads : int
        As in :func:`multi_head_attention`.
    rope : mapping, optional
        As there; every default of :func:`rope` when left out, None for no rotation.
    eps : float
        Of the norms.
    return_saved : bool
        Also return what the backward pass needs; without it, that pass computes it again.
    **options
        Those of :func:`rawflash.attention`; ``causal`` is True when left out.

    Returns
    -------
    out : array (..., T, D)
    saved : GPTBlockSaved
        With ``return_saved=True``.

    Notes
    -----
    ::

        n1 = rms_norm(x, norm1),  h = x + multi_head_attention(n1, wq, wk, wv, wo)
        n2 = rms_norm(h, norm2),  u = n2 w1,  a = gelu(u)
        out = h + a w2

    Examples
    --------
    >>> import numpy as np
    >>> from rawflash.layers import gpt_block
    >>> D, F = 8, 16
    >>> params = {name: np.ones((D, D)) for name in ("wq", "wk", "wv", "wo")}
    >>> params |= {"norm1": np.ones(D), "norm2": np.ones(D), "w1": np.ones((D, F)), "w2": np.zeros((F, D))}
    >>> gpt_block(np.zeros((2, 5, D)), params, num_heads=2).shape
    (2, 5, 8)
    """
    out, saved = _forward(x, params, num_heads, num_kv_heads, rope, eps, dict(options))
    return (out, saved) if return_saved else out


def gpt_block_backward(
    dout: Any, x: Any, params: Mapping[str, Any], num_heads: int, num_kv_heads: int | None = None, *,
    rope: Mapping[str, Any] | None = ROPE, eps: float = EPS, saved: GPTBlockSaved | None = None,
    **options: Unpack[Options],
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """Gradients of :func:`gpt_block` with respect to its input and every parameter.

    Parameters
    ----------
    dout : array (..., T, D)
        Gradient of the loss with respect to ``out``.
    x, params, num_heads, num_kv_heads, rope, eps, **options
        Those of the forward call.
    saved : GPTBlockSaved, optional
        What ``gpt_block(..., return_saved=True)`` returned for the same arguments.

    Returns
    -------
    dx : array (..., T, D)
    gradients : dict of array
        By the names in ``params``.

    Notes
    -----
    The forward equations from the last to the first; a residual adds the gradient that passes it by::

        da = dout w2^T,  dw2 = a^T dout,  du = gelu_backward(da, u),  dw1 = n2^T du
        dh = dout + rms_norm_backward(du w1^T, h)
        dx = dh + rms_norm_backward(multi_head_attention_backward(dh, n1), x)

    Examples
    --------
    >>> import numpy as np
    >>> from rawflash.layers import gpt_block, gpt_block_backward
    >>> rng = np.random.default_rng(0)
    >>> params = {name: rng.standard_normal((8, 8)) for name in ("wq", "wk", "wv", "wo", "w1", "w2")}
    >>> params |= {"norm1": np.ones(8), "norm2": np.ones(8)}
    >>> x = rng.standard_normal((5, 8))
    >>> out, saved = gpt_block(x, params, num_heads=2, return_saved=True)
    >>> dx, gradients = gpt_block_backward(np.ones_like(out), x, params, num_heads=2, saved=saved)
    >>> dx.shape, sorted(gradients) == sorted(params)
    ((5, 8), True)
    """
    kept = dict(options)
    if "wrt" in options:
        raise ProblemError("wrt is not an option of gpt_block_backward; expected it in multi_head_attention_backward")
    known(kept)
    if saved is None:
        saved = _forward(x, params, num_heads, num_kv_heads, rope, eps, kept)[1]
    elif not isinstance(saved, GPTBlockSaved):
        raise ProblemError(f"saved is a {type(saved).__name__}; expected what return_saved=True returned")
    p = _check(x, params)
    namespace(x=x, dout=dout)
    check_shape("dout", dout, x.shape, "the shape of x")
    hidden = (*x.shape[:-1], p["w1"].shape[1])
    for name, shape in (("n1", x.shape), ("h", x.shape), ("n2", x.shape), ("u", hidden), ("a", hidden)):
        check_shape(f"saved.{name}", getattr(saved, name), shape, "what return_saved=True returned for this call")
    n1, heads, h, n2, u, a = saved

    dw2 = rows(a).T @ rows(dout)
    du = gelu_backward((rows(dout) @ p["w2"].T).reshape(u.shape), u)
    dw1 = rows(n2).T @ rows(du)
    dh, dnorm2 = rms_norm_backward((rows(du) @ p["w1"].T).reshape(h.shape), h, p["norm2"], eps)
    dh += dout

    dn1, dwq, dwk, dwv, dwo = multi_head_attention_backward(
        dh, n1, p["wq"], p["wk"], p["wv"], p["wo"], num_heads, num_kv_heads,
        rope=rope, saved=heads, **_causal(kept),
    )  # fmt: skip
    dx, dnorm1 = rms_norm_backward(dn1, x, p["norm1"], eps)
    dx += dh
    gradients = (dnorm1, dwq, dwk, dwv, dwo, dnorm2, dw1, dw2)
    return dx, dict(zip(PARAMS, gradients, strict=True))


def _forward(
    x: Any, params: Mapping[str, Any], num_heads: int, num_kv_heads: int | None, rope: Mapping[str, Any] | None,
    eps: float, options: dict[str, Any],
) -> tuple[Any, GPTBlockSaved]:  # fmt: skip
    p = _check(x, params)
    known(options)
    n1 = rms_norm(x, p["norm1"], eps)
    attended, heads = multi_head_attention(
        n1, p["wq"], p["wk"], p["wv"], p["wo"], num_heads, num_kv_heads,
        rope=rope, return_saved=True, **_causal(options),
    )  # fmt: skip
    h = x + attended
    n2 = rms_norm(h, p["norm2"], eps)
    u = (rows(n2) @ p["w1"]).reshape(*x.shape[:-1], p["w1"].shape[1])
    a = gelu(u)
    out = h + (rows(a) @ p["w2"]).reshape(x.shape)
    return out, GPTBlockSaved(n1, heads, h, n2, u, a)


def _check(x: Any, params: Any) -> Mapping[str, Any]:
    if not isinstance(params, Mapping) or set(params) != set(PARAMS):
        shown = sorted(params) if isinstance(params, Mapping) else type(params).__name__
        raise ProblemError(f"params is {shown}; expected a mapping with the keys {', '.join(PARAMS)}")
    namespace(x=x, **params)
    if x.ndim < 2:
        raise ProblemError(f"x has shape {x.shape}; expected (..., T, D)")
    D = x.shape[-1]
    check_shape("norm1", params["norm1"], (D,), "(D,)")
    check_shape("norm2", params["norm2"], (D,), "(D,)")
    check_shape("wo", params["wo"], (None, D), "(Hq*dv, D)")
    check_shape("w1", params["w1"], (D, None), "(D, F)")
    check_shape("w2", params["w2"], (params["w1"].shape[1], D), "(F, D)")
    return params


def _causal(options: dict[str, Any]) -> dict[str, Any]:
    return {"causal": True} | options
