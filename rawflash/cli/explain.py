"""``rawflash explain``: a plan for any chip of the table."""

from __future__ import annotations

import argparse
import dataclasses

import numpy as np

from rawflash import hardware
from rawflash.backends import BACKENDS
from rawflash.cli.common import DONE, check_bytes, options_given
from rawflash.cli.places import takes_gpu_arrays
from rawflash.errors import BackendError
from rawflash.plan import plan
from rawflash.problem import check


def command(options: argparse.Namespace) -> int:
    """Print the plan of a call of a shape; the exit code."""
    batch, heads_q, heads_kv, rows_q, rows_k, d = options.shape
    dv = d if options.dv is None else options.dv
    call = options_given(options)
    layout, backend = call.get("layout", "bhtd"), call.pop("backend", None)
    arch = options.arch
    if backend is None and arch in hardware.CHIPS:
        backend = "cupy_raw"
    if backend is not None and arch is not None and takes_gpu_arrays(backend) != (arch != "cpu"):
        runs_on = BACKENDS[backend].runs_on
        raise BackendError(f"backend {backend!r} takes {runs_on}; it does not run on {arch!r} (--arch)")

    stand_in = "float16" if options.dtype == "bfloat16" else options.dtype
    shape = ",".join(map(str, options.shape)) + f" --dv {dv}" * (options.dv is not None)
    check_bytes(
        f"--shape {shape}", np.dtype(stand_in).itemsize, q=(batch, heads_q, rows_q, d), k=(batch, heads_kv, rows_k, d),
        v=(batch, heads_kv, rows_k, dv), out=(batch, heads_q, rows_q, dv),
    )  # fmt: skip
    # Arrays of one row's memory, so that the one validator sees the call; a plan needs no values. All sequences
    # are alike, so that it sees one of them.
    q, k, v = (
        _shapeless(stand_in, heads, rows, width, layout)
        for heads, rows, width in ((heads_q, rows_q, d), (heads_kv, rows_k, d), (heads_kv, rows_k, dv))
    )
    problem, x = check(q, k, v, **call)
    problem = dataclasses.replace(problem, B=batch, dtype=options.dtype, backend=backend or problem.backend)
    chip = hardware.kernels_on(problem.backend, hardware.CHIPS[arch]) if arch in hardware.CHIPS else None
    print(plan(problem, options.direction, chip, visibility=x.visibility))
    return DONE


def _shapeless(dtype: str, heads: int, rows: int, width: int, layout: str) -> np.ndarray:
    """An array of any shape, of one sequence, that occupies one row."""
    row = np.zeros(max(width, 1), dtype)
    shape = (1, heads, rows, width) if layout == "bhtd" else (1, rows, heads, width)
    return np.lib.stride_tricks.as_strided(row, shape, (0, 0, 0, row.itemsize), writeable=False)
