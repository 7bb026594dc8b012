"""Sums of very many terms in float32, where rounding errors have one sign: equal terms, all rows or all keys alike.

A sum of n of them, one after the other, may be wrong by n / 2 roundings; contract section 6 allows a few, whatever
the length.
"""

import numpy as np
import pytest
from test_forward import kernels
from tolerances import assert_close, reference

import rawflash as rf


def few_scores(Tq, Tk, d, rng):
    """Two scores only."""
    k = np.where(rng.random((Tk, 1)) < 0.5, 0, -2) * np.ones(d)
    return np.full((Tq, d), 1 / d), k, rng.random((Tk, d)), rng.random((Tq, d))


def values_like_keys(Tq, Tk, d, rng):
    """The gradient of q is a sum over keys with as few different terms."""
    q, k, _, _ = few_scores(Tq, Tk, d, rng)
    return q, k, k, np.full((Tq, d), 0.1)


def equal_rows(Tq, Tk, d, rng):
    """Gradients of k and v are sums over rows of one term."""
    v = np.where(np.arange(Tk) % 2, 0.1, -0.1)[:, None] * np.ones(d)
    return np.full((Tq, d), 1 / d), np.zeros((Tk, d)), v, np.full((Tq, d), 0.1)


@kernels
@pytest.mark.parametrize(("made", "Tq", "Tk", "d"), [
    (few_scores, 1, 30000, 16), (few_scores, 16, 3000, 4), (few_scores, 16, 12000, 8),
    (values_like_keys, 16, 12000, 64), (equal_rows, 3000, 16, 4), (equal_rows, 12000, 16, 16),
])  # fmt: skip
def test_errors_do_not_grow_with_the_length(made, Tq, Tk, d, backend, algorithm):
    rng = np.random.default_rng(0)
    q, k, v, dout = (x.astype(np.float32)[None, None] for x in made(Tq, Tk, d, rng))
    how = dict(scale=1.0)
    want = reference(q, k, v, dout, **how)
    out, lse = rf.attention(q, k, v, return_lse=True, backend=backend, algorithm=algorithm, **how)
    grads = rf.attention_backward(dout, q, k, v, out, lse, backend=backend, algorithm=algorithm, **how)
    for name, found in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True):
        assert_close(name, found, want)


@kernels
def test_gradients_of_keys_that_many_heads_share(backend, algorithm):
    """The rows of all query heads of a group are one sum."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (x.astype(np.float32)[None, None] for x in equal_rows(3000, 16, 4, rng))
    q, dout = (np.repeat(x, 8, axis=1) for x in (q, dout))
    want = reference(q, k, v, dout, scale=1.0)
    out, lse = rf.attention(q, k, v, scale=1.0, return_lse=True, backend=backend, algorithm=algorithm)
    grads = rf.attention_backward(dout, q, k, v, out, lse, scale=1.0, backend=backend, algorithm=algorithm)
    for name, found in zip(("dq", "dk", "dv"), grads, strict=True):
        assert_close(name, found, want)


@pytest.mark.parametrize("algorithm", ["rowwise", "fa1", "fa2"])
def test_products_of_numpy_tiled_do_not_hang_on_the_order_of_a_blas(algorithm):
    """One column: most BLAS libraries add all rows of a block one after the other there, in float32."""
    q, k, v, dout = (x.astype(np.float32)[None, None] for x in equal_rows(12000, 16, 1, np.random.default_rng(0)))
    want = reference(q, k, v, dout, scale=1.0)
    how = dict(scale=1.0, backend="numpy_tiled", algorithm=algorithm, sram=1 << 20)  # blocks of thousands of rows
    out, lse = rf.attention(q, k, v, return_lse=True, **how)
    grads = rf.attention_backward(dout, q, k, v, out, lse, **how)
    for name, found in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True):
        assert_close(name, found, want)
