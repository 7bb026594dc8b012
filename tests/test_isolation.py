"""What is in one head is nothing to any other: a NaN or an infinity in its arrays changes no bit of another's results.

Scratch that a thread uses for one head after the other, padding of rows and sums over tiles are where it could.
"""

from dataclasses import replace

import numba
import numpy as np
import pytest
from test_forward import KERNELS, kernels, make

assert KERNELS


@pytest.fixture
def one_thread():
    """All heads by one thread, one after the other, in the same scratch."""
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)


@kernels
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("d, dv", [(4, 8), (40, 24), (24, 40), (16, 16)])
def test_other_heads_have_the_same_bits(d, dv, rows, dtype, bad, backend, algorithm, one_thread):
    case = make(B=2, Hq=4, Hkv=2, Tq=rows, Tk=45, d=d, dv=dv, dtype=dtype, kv_lengths=[45, 38])
    own = {"q": slice(0, 2), "dout": slice(0, 2), "k": slice(0, 1), "v": slice(0, 1)}  # heads of sequence 0
    for names in (("v",), ("k",), ("q", "k", "v", "dout")):
        changed = {name: getattr(case, name).copy() for name in names}
        for name, array in changed.items():
            array[0, own[name]] = bad
        found = []
        for one in (case, replace(case, **changed)):
            with np.errstate(all="ignore"):
                out, lse = one.forward(backend=backend, algorithm=algorithm)
                found.append((out, lse, *one.backward(out, lse, backend=backend, algorithm=algorithm)))
        for name, clean, beside in zip(("q", "q", "q", "k", "v"), *found, strict=True):
            others = np.ones(clean.shape[:2], bool)
            others[0, own[name]] = False
            np.testing.assert_array_equal(clean[others].tobytes(), beside[others].tobytes())
