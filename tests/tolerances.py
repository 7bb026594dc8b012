"""Assertions on accuracy. The bound itself (contract, section 6) is computed in `rawflash.accuracy`."""

import numpy as np

from rawflash.accuracy import Reference, allowed_error, error_ratio, errors, reference

__all__ = [
    "Reference",
    "allowed_error",
    "assert_close",
    "assert_gradients_close",
    "error_ratio",
    "errors",
    "reference",
    "reference_varlen",
]


def reference_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, dout=None, **kwargs):
    """`reference` with the arguments in the order of `rawflash.attention_varlen`."""
    return reference(q, k, v, dout, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **kwargs)


def assert_close(name, actual, reference):
    """Fail unless every element of ``actual`` is within the allowed error of the oracle.

    ``name`` is "out", "lse", "dq", "dk", "dv", "dbias" or "dsinks"; ``actual`` a host array; ``reference``
    what `reference` returned. The message names the worst element.
    """
    actual = np.asarray(actual)
    error, allowed = errors(name, actual, reference), allowed_error(name, reference)
    bad = (error > 0) & ~(error <= allowed)
    if not bad.any():
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.nan_to_num(np.where(bad, error / allowed, 0.0), nan=np.inf)
    worst = tuple(int(i) for i in np.unravel_index(np.argmax(ratio), ratio.shape))
    raise AssertionError(
        f"{name}{list(worst)} is {float(actual[worst])!r}; "
        f"the oracle says {float(reference.oracle[name][worst])!r}: error {error[worst]:.3e}, "
        f"allowed {allowed[worst]:.3e}, ratio {ratio[worst]:.3g}; "
        f"{int(bad.sum())} of {bad.size} elements are out of bounds"
    )


def assert_gradients_close(actual, reference, wrt=("q", "k", "v")):
    """`assert_close` for the tuple that ``attention_backward`` returned for ``wrt``."""
    for name, gradient in zip(wrt, actual, strict=True):
        assert_close("d" + name, gradient, reference)
