"""The record of the last run on a GPU, ``gpu_record.json``, and whether it speaks of today's kernels.

``pytest -m gpu`` writes it (see conftest.py) and ``python tests/sanitize.py`` its entry "sanitizer". ``python
tests/gpu_record.py`` says whether the kernel sources are still the ones that ran; it needs Python and nothing else.

``pytest -m gpu --gpu-part 1/3`` runs a third of the tests, for a GPU that is there for minutes, and keeps the result in
the entry "parts". When all parts of the same tests have passed on the same kernels, they become the record.
"""

import argparse
import datetime
import hashlib
import json
import platform
import re
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
SAME = ("kernels_sha256", "tests_sha256", "drawn_problems")  # what all parts of one run have alike
OUTCOMES = ("passed", "skipped")


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
    if parts := record.get("parts"):
        fresh = all(part.get("kernels_sha256") == digest() for part in parts.values())
        lines.append(f"{'' if fresh else 'STALE: '}parts {', '.join(parts)} of an unfinished GPU run on record "
                     f"are of {'these' if fresh else 'other'} kernel sources")  # fmt: skip
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
        number, of = config.option.gpu_part or (1, 1)
        tests = counts(terminalreporter.stats, modules=number == 1)
        record |= {"drawn_problems": SHARDS * PROBLEMS_A_SHARD, "tests": tests}
        if config.option.gpu_part:
            record = joined(read(), number, of, record | of_which(terminalreporter.stats))
        if "sanitizer" in read():
            record["sanitizer"] = read()["sanitizer"]
        write(record)
    terminalreporter.write_line(f"no GPU record: {reason}" if reason else f"wrote {RECORD}")


def counts(stats, modules):
    """Tests passed and skipped in each file, and if asked whole modules skipped, which are so in each part of a run."""
    found = Counter((report.nodeid.partition("::")[0], outcome)
                    for outcome in OUTCOMES for report in stats.get(outcome, ())
                    if modules or "::" in report.nodeid)  # fmt: skip
    files = sorted({file for file, _ in found})
    return {file: {outcome: found[file, outcome] for outcome in OUTCOMES} for file in files}


# ---- a run in parts ----------------------------------------------------------------------------------------


def part_named(text):
    """``--gpu-part N/OF`` as two numbers; what this raises is a UsageError of pytest that names the option."""
    found = re.fullmatch("([1-9][0-9]*)/([1-9][0-9]*)", text)
    if not found or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not N/OF with 1 <= N <= OF, such as 1/3")
    return int(found[1]), int(found[2])


def take_part(config, items):
    """Keep every OF-th test, from the N-th on: slow neighbours go to different parts."""
    number, of = config.option.gpu_part
    tests = hashlib.sha256("\n".join(item.nodeid for item in items).encode()).hexdigest()
    taken = items[number - 1 :: of]
    for item in taken:  # a test's properties are in its report, which reaches the process that writes the record
        item.user_properties.append(("tests_sha256", tests))
    config.hook.pytest_deselected(items=[item for n, item in enumerate(items) if n % of != number - 1])
    items[:] = taken


def of_which(stats):
    """The digest of all tests of which the part was taken: parts of different tests may leave some out."""
    properties = (pair for reports in stats.values() for report in reports
                  for pair in getattr(report, "user_properties", ()))  # fmt: skip
    return {"tests_sha256": next(value for name, value in properties if name == "tests_sha256")}


def joined(record, number, of, entry):
    """The record with this part of a run in it; where no other part is missing, the record of the whole run."""
    parts = record.get("parts", {}) | {f"{number}/{of}": entry}
    names = sorted((name for name in parts if name.endswith(f"/{of}")), key=lambda name: int(name.partition("/")[0]))
    parts = {name: parts[name] for name in names if all(parts[name].get(key) == entry[key] for key in SAME)}
    if len(parts) < of:
        return record | {"parts": parts}
    found = [part["tests"] for part in parts.values()]
    files = sorted({file for tests in found for file in tests})
    tests = {file: {outcome: sum(tests.get(file, {}).get(outcome, 0) for tests in found) for outcome in OUTCOMES}
             for file in files}  # fmt: skip
    # What a part has unlike the last one, say another day or driver, stays with its name.
    unlike = {name: {key: part[key] for key in part if key != "tests" and part[key] != entry.get(key)}
              for name, part in parts.items()}  # fmt: skip
    whole = entry | {"tests": tests, "from_parts": unlike}
    del whole["tests_sha256"]
    return whole


if __name__ == "__main__":
    print(verdict())
