"""The record of the last run on a GPU, ``gpu_record.json``, and whether it speaks of today's kernels.

``pytest -m gpu`` writes it (see conftest.py) and ``python tests/sanitize.py`` its entry "sanitizer". ``python
tests/gpu_record.py`` says whether the kernel sources are still the ones that ran; it needs Python and nothing else.
"""

import datetime
import hashlib
import json
import platform
import subprocess
import warnings
from collections import Counter
from contextlib import suppress
from importlib import metadata
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
RECORD = TESTS / "gpu_record.json"
KERNELS = ("rawflash/backends/cupy_raw", "rawflash/backends/numba_cuda")
SOURCES = (".cu", ".cuh", ".py")
PACKAGES = ("numpy", "ml_dtypes", "cuda-toolkit", "numba", "numba-cuda", "torch", "jax")
# Options of pytest by which a run leaves tests out, by their names in ``config.option``
NARROWING = ("keyword", "deselect", "ignore", "ignore_glob", "lf", "stepwise", "collectonly")


def digest(root=ROOT):
    """SHA-256 over the names and the texts of all kernels of the GPU backends and their launchers."""
    found = hashlib.sha256()
    for path in sorted(p for folder in KERNELS for p in (root / folder).rglob("*") if p.suffix in SOURCES):
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def read():
    """The record as a dict; empty where there is none, or none that can be read."""
    with suppress(OSError, ValueError):
        record = json.loads(RECORD.read_text())
        return record if isinstance(record, dict) else {}
    return {}


def write(record):
    """The old record or the new one is there at any time, whatever ends this process."""
    new = RECORD.with_suffix(".new")
    new.write_text(json.dumps(record, indent=1) + "\n")
    new.replace(RECORD)


def verdict():
    """Do the record and its part "sanitizer" speak of these kernel sources? A line for each."""
    record, lines = read(), []
    for name, entry, again in (
        ("GPU run", record, "pytest -m gpu"),
        ("sanitizer run", record.get("sanitizer", {}), "python tests/sanitize.py"),
    ):
        recorded = entry.get("kernels_sha256")
        if recorded is None:
            lines.append(f"no {name} on record")
        elif recorded == digest():
            lines.append(f"the {name} on record is of these kernel sources")
        else:
            lines.append(f"STALE: the {name} on record is of other kernel sources; run '{again}' on a GPU")
    return "\n".join(lines)


# ---- what ran, and where -----------------------------------------------------------------------------------


def where():
    """The GPU, its driver, the libraries, the day and the kernel sources."""
    import cupy

    import rawflash
    from rawflash.backends.cupy_raw import compile as compiler

    versions = {"rawflash": rawflash.__version__, "python": platform.python_version()}
    versions |= {"cupy": cupy.__version__, "nvrtc": compiler._compiler()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "gpus": cupy.cuda.runtime.getDeviceCount(),
        "driver": driver(),
        "versions": versions,
        "kernels_sha256": digest(),
    }


def driver():
    """Version of the driver; CUDA itself tells only which CUDA it is for."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError, IndexError):
        return subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.split()[0]
    return "unknown"


def why_not(config, exitstatus):
    """Why a run of pytest is no proof of all tests that need a GPU; None: it is one."""
    narrowed = [name for name in NARROWING if getattr(config.option, name, None)]
    if narrowed:
        return f"tests were left out by {', '.join(narrowed)}"
    if not any((config.invocation_params.dir / arg).resolve() in (TESTS, ROOT) for arg in config.args):
        return "not all of tests/ was run"
    return None if exitstatus == 0 else f"exit status {int(exitstatus)}"


def after_pytest(terminalreporter, exitstatus, config):
    """Write the record of a whole and clean ``pytest -m gpu``; say so, or why not. Nothing for other runs."""
    if config.option.markexpr != "gpu":
        return
    reason = why_not(config, exitstatus)
    if reason is None:
        from test_gpu import PROBLEMS_A_SHARD, SHARDS

        with warnings.catch_warnings(action="ignore"):  # an error by setup.cfg, and the record would be lost
            record = where()
        record |= {"drawn_problems": SHARDS * PROBLEMS_A_SHARD, "tests": counts(terminalreporter.stats)}
        if "sanitizer" in read():
            record["sanitizer"] = read()["sanitizer"]
        write(record)
    terminalreporter.write_line(f"no GPU record: {reason}" if reason else f"wrote {RECORD}")


def counts(stats):
    """Tests passed and skipped in each file, from the reports by outcome."""
    found = Counter((report.nodeid.partition("::")[0], outcome)
                    for outcome in ("passed", "skipped") for report in stats.get(outcome, ()))  # fmt: skip
    files = sorted({file for file, _ in found})
    return {file: {outcome: found[file, outcome] for outcome in ("passed", "skipped")} for file in files}


if __name__ == "__main__":
    print(verdict())
