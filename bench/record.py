"""What every record under ``results/`` says of the machine and the code that it is of, and how it is written.

    python -m bench.record FILE...    # names the commit of records that were made where git does not know this code

A commit is named only if the package has the record's digest there.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("numpy", "numba", "llvmlite", "numba-cuda", "torch", "triton", "jax", "flash-attn-4", "nvidia-cutlass-dsl")


def _output(*command: str) -> str:
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT).stdout.strip()
    return ""


def source_digest() -> str:
    """SHA-256 over the names and texts of the package: the code that a record is of, where there is no git too."""
    found = hashlib.sha256()
    paths = (p for p in (ROOT / "rawflash").rglob("*") if p.suffix in (".py", ".cu", ".cuh"))
    for path in sorted(paths):
        found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def commit() -> str:
    """The commit of the package's files, or "unknown" where git has others."""
    changed = _output("git", "status", "--porcelain", "--", "rawflash")
    return "unknown" if changed else _output("git", "rev-parse", "--short=12", "HEAD") or "unknown"


def _cpu() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def about(gpu: bool) -> dict[str, Any]:
    """Date, code, processor, versions; with ``gpu`` also the GPU, its driver and NVRTC."""
    import rawflash

    versions = {"python": platform.python_version(), "rawflash": rawflash.__version__}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "source_sha256": source_digest(),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
    if gpu:
        import cupy

        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        record["gpu"] = properties["name"].decode()
        record["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        versions["cupy"] = cupy.__version__
        versions["nvrtc"] = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    return record | {"versions": versions}


def write(path: Path, record: dict[str, Any]) -> None:
    """The old record or the new one is there at any time, whatever ends this process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(record, indent=1) + "\n")
    new.replace(path)


def read(path: Path) -> dict[str, Any]:
    """A record."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def main(paths: list[str]) -> int:
    """Name the commit in records of the code that is here; 1 if one of them is of other code."""
    here, digest, others = commit(), source_digest(), 0
    for path in map(Path, paths):
        record = read(path)
        if here == "unknown" or record["source_sha256"] != digest:
            print(f"{path} is not of commit {here}")
            others += 1
        else:
            write(path, record | {"commit": here})
    return int(others > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
