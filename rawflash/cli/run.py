"""``rawflash run``: attention on the arrays of a file."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import stat
import tempfile
import textwrap
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rawflash import api
from rawflash.cli.common import DONE, InputError, options_given
from rawflash.cli.places import TIMED_RUNS, Cpu, best_seconds, milliseconds, place_of
from rawflash.problem import Problem, check

REQUIRED = ("q", "k", "v")
OPTIONAL = (
    "dout", "dlse", "mask", "bias", "sinks", "alibi_slopes", "q_lengths", "kv_lengths", "q_offset",
    "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip
# What goes to the GPU. The others may stay on the host, where their values are checked.
_LARGE = (*REQUIRED, "dout", "dlse", "mask", "bias", "sinks")


def command(options: argparse.Namespace) -> int:
    """Attention on the arrays of a file, into another; the exit code."""
    target = Path(os.path.realpath(options.output))
    _check_target(target, options.force)
    given = _read_arrays(Path(options.input))
    call = options_given(options)
    if "q_offset" in given and "q_offset" in call:
        raise InputError("q_offset is in the file and among the flags; expected it in one place")
    if "dlse" in given and "dout" not in given:
        raise InputError("dlse is given without dout; expected both (dout may be zeros)")
    if ("cu_seqlens_q" in given) != ("cu_seqlens_k" in given):
        raise InputError("one of cu_seqlens_q and cu_seqlens_k is given; expected both or neither")
    if "q_offset" in given and given["q_offset"].ndim == 0:
        call["q_offset"] = given.pop("q_offset").item()
    wrt = ("q", "k", "v", *(name for name in ("bias", "sinks") if name in given))
    place = place_of(call.get("backend"), call.get("algorithm", "fa2"))
    given |= {name: _put(place, name, given[name]) for name in _LARGE if name in given}
    q, k, v = (given.pop(name) for name in REQUIRED)
    dout, dlse = given.pop("dout", None), given.pop("dlse", None)
    call |= given

    def forward_call() -> tuple[Problem, dict[str, Any]]:
        problem, x = check(q, k, v, return_lse=True, **call)
        return problem, dict(zip(("out", "lse"), api._forward(problem, x), strict=True))

    def backward_call() -> dict[str, Any]:
        problem, x = check(
            q, k, v, dout=dout, o=results["out"], lse=results["lse"], dlse=dlse, wrt=wrt, direction="backward", **call
        )
        return {"d" + name: gradient for name, gradient in zip(wrt, api._backward(problem, x), strict=True)}

    problem, results = forward_call()
    calls: dict[str, Callable[[], Any]] = {"forward": forward_call}
    if dout is not None:
        results |= backward_call()
        calls["backward"] = backward_call
    _write_arrays(target, {name: place.get(array) for name, array in results.items()}, options.force)
    where = f" on {place.name}" if place.name else ""
    print(f"wrote {options.output}, computed by {problem.backend} {problem.algorithm}{where}:")
    for name, array in results.items():
        print(f"  {name:<7} {array.dtype} {array.shape}")
    if options.time:
        times = {name: milliseconds(best_seconds(one, place)) for name, one in calls.items()}
        print(f"best of up to {TIMED_RUNS} more runs: " + ", ".join(f"{name} {ms} ms" for name, ms in times.items()))
    return DONE


def _put(place: Cpu, name: str, array: np.ndarray) -> Any:
    try:
        return place.put(array)
    except (TypeError, ValueError) as error:  # CuPy, of text for example
        raise InputError(f"{name} cannot go to the GPU: {error}") from None


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file; refuses names that mean nothing and dtypes that a file cannot keep."""
    if not path.is_file():
        raise InputError(f"{path}: {'is no file' if path.exists() else 'there is no such file'}")
    try:
        with path.open("rb") as stream:  # not by NumPy, which leaves open what turns out to be no archive
            if not zipfile.is_zipfile(stream):
                raise InputError(f"{path}: not an .npz file")
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as file:
                _check_names(path, file.files)
                given = {name: file[name] for name in file.files}
    except (InputError, MemoryError):
        raise
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except Exception as error:  # whatever the readers of archives, of compressed data and of headers think of
        reason = textwrap.shorten(str(error), 200) or type(error).__name__
        raise InputError(f"{path}: not a readable .npz file: {reason}") from None
    for name in REQUIRED:
        if name not in given:
            raise InputError(f"{path}: there is no array {name!r}; expected q, k and v")
    for name, array in given.items():
        if not isinstance(array, np.ndarray):
            raise InputError(f"{path}: {name!r} is not an array")
        if array.dtype.kind == "V":
            raise InputError(
                f"{path}: {name} has dtype {array.dtype.str}: raw bytes. "
                "An .npz file does not keep bfloat16; "
                f"save it as float32 instead, {name}.astype('float32')"
            )
    return given


def _check_names(path: Path, names: Sequence[str]) -> None:
    known = (*REQUIRED, *OPTIONAL)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "expected names out of " + ", ".join(known)
            raise InputError(f"{path}: unknown array {name!r}; {hint}")


def _check_target(target: Path, force: bool) -> None:
    if not target.parent.is_dir():
        raise InputError(f"{target.parent}: there is no such folder")
    if target.exists() or target.is_symlink():
        if not stat.S_ISREG(target.stat().st_mode):
            raise InputError(f"{target}: not a regular file; will not replace it")
        if not force:
            raise InputError(f"{target}: exists; --force overwrites it")


def _write_arrays(target: Path, results: dict[str, np.ndarray], force: bool) -> None:
    """Write a whole file or none: a temporary file beside the target takes its place at the end."""
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, allow_pickle=False, **results)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        _check_target(target, force)  # it may have come into being meanwhile
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
