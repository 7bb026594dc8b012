"""Measure cases, ours beside the peers, and write a record.

    python -m bench.run --list                                # groups and names
    python -m bench.run --quick                               # a handful of cases on the CPU; needs no GPU
    python -m bench.run --cases grid decode                   # groups
    python -m bench.run --cases 'backward/*/d128/*' --peers fa4 torch-cudnn
    python -m bench.run --cases grid --resume FILE            # what FILE has no figures for yet
    python -m bench.run --cases grid --warm 8                 # what compiles for long does so first, in 8 processes

The record is written after every case. A runner or a case that fails has its reason in it, and the others go on.

Exit status: 0; 1 when a case has no figures of ours; 2 when the call makes no sense; 3 when the process had to end
(the GPU does not answer, or a case took longer than ``--limit``): call again with ``--resume``, which goes on behind
the case that did it.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import inputs, measures, record
from bench.cases import CASES, GROUPS, SLOW_TO_COMPILE, Case, select
from bench.peers import PEERS
from rawflash.backends import BACKENDS

SCHEMA = "rawflash-bench-1"
GPU_GROUPS = ("grid", "decode", "float32", "float64", "dense", "numba", "overhead")
CPU_GROUPS = ("cpu", "cpu-decode", "cpu-start", "cpu-memory", "cpu-sweep")
NOTES = {
    "jax": "its stream cannot be asked for: timed by the wall clock over many queued calls, launches included",
    "medians": "[p20, p50, p80] in microseconds; rates are those of p50",
}
SAME = ("device", "source_sha256", "gpu", "driver", "versions")  # of two runs that share a record; on a CPU also which
FIGURES = {"burst_us", "extra_bytes", "best_by_planned", "warm", "host_us"}  # of which every measure has one
ENDED = "ended its process"
EXIT_MISSING, EXIT_USAGE, EXIT_LOST = 1, 2, 3


def has_figures(row: dict[str, Any]) -> bool:
    """Has every runner of ours figures? What refuses a case does not count."""
    ours = [figures for name, figures in row["runners"].items() if name not in PEERS and "why_not" not in figures]
    complete = all("failed" not in figures and figures.keys() & FIGURES for figures in ours)
    return bool(ours) and complete and "failed" not in row


def unlike(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """In which respects two records are not of the same code and machine."""
    keys = SAME if new["device"] == "gpu" else (*SAME, "cpu")
    return [f"{key}: {old.get(key)} is now {new.get(key)}" for key in keys if old.get(key) != new.get(key)]


def left(cases: Sequence[Case], old: dict[str, Any], again: bool = False, backends: list[str] | None = None,
         peers: list[str] | None = None) -> list[Case]:  # fmt: skip
    """Cases of which a record lacks our figures or somebody who was asked for; ``again``: also those that have ended
    their process."""
    rows = {row["name"]: row for row in old["rows"]}

    def done(case: Case) -> bool:
        row = rows.get(case.name, {})
        if row.get("failed") == ENDED or "ended" in row:
            return not again
        asked = {runner.name for runner in measures.runners(case, backends, peers)}
        return bool(row) and has_figures(row) and asked <= row["runners"].keys()

    return [case for case in cases if not done(case)]


def says_more(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Has a row figures of as many runners as another, or more? One of ours alone does not take the peers' place."""

    def timed(row: dict[str, Any]) -> tuple[bool, int]:
        return has_figures(row), sum(bool(figures.keys() & FIGURES) for figures in row["runners"].values())

    return timed(row) >= timed(other)


def put(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """A case has one row: the newest, unless the older says more, which then notes that the case ended a process."""
    for n, old in enumerate(rows):
        if old["name"] == row["name"]:
            if says_more(row, old):
                rows[n] = row
            elif row.get("failed") == ENDED:
                old["ended"] = row["date"]
            return
    rows.append(row)


def measure(setup: measures.Setup, case: Case, backends: list[str] | None = None,
            peers: list[str] | None = None) -> dict[str, Any]:  # fmt: skip
    """The row of a case. A GPU that is lost is in the row's ``lost``."""
    row: dict[str, Any] = {"name": case.name, "case": asdict(case)}
    begun = time.monotonic()
    try:
        row["runners"] = measures.MEASURES[case.measure](setup, case, measures.runners(case, backends, peers))
    except measures.DeviceLost as error:
        row |= {"runners": error.found, "failed": ENDED, "lost": error.cause}
    except Exception as error:
        traceback.print_exc()
        row |= {"runners": {}, "failed": measures.text(error)}
    return row | {"seconds": round(time.monotonic() - begun, 1), "date": datetime.date.today().isoformat()}


def line(row: dict[str, Any]) -> str:
    """A row in one line."""
    words = [f"{row['name']}:"]
    for name, figures in row["runners"].items():
        rate = next((f"{figures[key]:.4g} {unit}" for key, unit in (
            ("burst_tflops", "TFLOP/s"), ("burst_tbytes", "TB/s"), ("extra_bytes", "bytes"), ("host_us", "us"),
            ("best_by_planned", "of planned")) if key in figures), None)  # fmt: skip
        reason = figures.get("failed") or figures.get("why_not") or ("warm" in figures and str(figures["warm"])) or "?"
        words.append(f"{name} {rate or '[' + reason[:90] + ']'},")
    if "failed" in row:
        words.append(f"FAILED: {row['failed'][:200]},")
    return " ".join(words).rstrip(",")


def free_name(path: Path) -> Path:
    """A name that no record has yet."""
    n, free = 1, path
    while free.exists():
        n, free = n + 1, path.with_stem(f"{path.stem}-{n + 1}")
    return free


class Watch:
    """Ends the process when a case takes too long: a kernel that never ends cannot be stopped in any other way."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def __enter__(self) -> None:
        self._timer = threading.Timer(self._limit, self._end)
        self._timer.daemon = True
        self._timer.start()

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        print(f"no end after {self._limit:.0f} s; --resume goes on behind this case", file=sys.stderr, flush=True)
        os._exit(EXIT_LOST)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m bench.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--cases", nargs="+", metavar="NAME", help="groups, or patterns of case names")
    found.add_argument("--device", choices=("gpu", "cpu"), help="default: that of the first case")
    found.add_argument("--backends", nargs="+", metavar="NAME", choices=tuple(BACKENDS), help="of ours, only these")
    found.add_argument("--peers", nargs="*", choices=tuple(PEERS), metavar="NAME", help="only these; none: nobody")
    found.add_argument("--list", action="store_true", help="name groups, or the cases chosen, and stop")
    found.add_argument("--quick", action="store_true", help="a handful of cases on the CPU")
    found.add_argument("--seconds", type=float, default=600, help="no case is begun after this time")
    found.add_argument("--limit", type=float, default=240, help="seconds after which a case ends the process")
    found.add_argument("--out", type=Path, help="the record; default: a new file in bench/results")
    found.add_argument("--resume", type=Path, metavar="FILE", help="a record to go on with, if it is there")
    found.add_argument("--mixed", action="store_true", help="resume a record of other code, versions or machine")
    found.add_argument("--again", action="store_true", help="also cases that have ended their process")
    found.add_argument("--warm", type=int, default=0, metavar="PROCESSES",
                       help=f"first fill the disk caches of {', '.join(SLOW_TO_COMPILE)}, so many at a time")
    found.add_argument("--no-ceilings", action="store_true", help="do not measure products and copies")
    return found


def chosen(options: argparse.Namespace) -> list[Case]:
    """Cases of one device."""
    usual = CPU_GROUPS if options.device == "cpu" else GPU_GROUPS
    names = options.cases or (("quick",) if options.quick else usual)
    cases = select(names, "cpu" if options.quick else options.device)
    if not cases:
        raise ValueError("no case is chosen")
    return [case for case in cases if case.device == cases[0].device]


def listing(options: argparse.Namespace) -> str:
    """Groups with the number of their cases, or the cases that are chosen."""
    if options.cases or options.quick:
        return "\n".join(case.name for case in chosen(options))
    return "\n".join(f"{group:<11}{len(names):>4}  {CASES[names[0]].name} ..." for group, names in GROUPS.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for; the exit status."""
    options = parser().parse_args(arguments)
    try:
        if options.list:
            print(listing(options))
            return 0
        # What compiles for long comes last: if the time is over, little is missing
        cases = sorted(chosen(options), key=lambda case: bool({*SLOW_TO_COMPILE} & {*case.peers}))
    except ValueError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    device = cases[0].device
    found: dict[str, Any] = {"schema": SCHEMA, "device": device} | record.about(device == "gpu")
    found |= {"notes": NOTES, "peers": {}, "ceilings": {}, "rows": []}
    out = options.out or options.resume
    if out is None:
        folder = Path(tempfile.gettempdir()) if options.quick else record.RESULTS
        out = free_name(folder / f"bench-{device}-{datetime.date.today()}.json")
    if options.resume and options.resume.exists():
        try:
            old = record.read(options.resume)
        except ValueError as error:
            print(f"{options.resume}: {error}", file=sys.stderr)
            return EXIT_USAGE
        if not isinstance(old, dict) or old.get("schema") != SCHEMA:
            print(f"{options.resume} is no record of this script", file=sys.stderr)
            return EXIT_USAGE
        different = unlike(old, found)
        if different and not options.mixed:
            print(f"{options.resume} is of something else: {'; '.join(different)}", file=sys.stderr)
            return EXIT_USAGE
        if "running" in old:  # the case that ended the process
            name = old.pop("running")
            put(old["rows"], {"name": name, "case": asdict(CASES[name]) if name in CASES else {}, "runners": {},
                              "failed": ENDED, "seconds": 0.0, "date": found["date"]})  # fmt: skip
        todo = left(cases, old, options.again, options.backends, options.peers)
        found |= {key: old[key] for key in ("date", "commit", "peers", "ceilings", "rows")}
        if different:
            found["mixed"] = old.get("mixed", []) + different
    else:
        todo = cases
    if out.exists() and out != options.resume:
        print(f"{out} is there already; --resume goes on with it", file=sys.stderr)
        return EXIT_USAGE
    return run(found, cases, list(todo), out, options)


def compile_first(case: Case, name: str) -> str:
    """Compile what a peer has for a case, in a process of its own: the measuring one then finds it on disk."""
    try:
        runner = PEERS[name]
        if runner.why_not(case) is None:
            runner.version()
            runner.prepare(case, inputs.make(case))()
        return ""
    except Exception as error:  # the measuring process will meet it again, and note it
        return f"{case.name} {name}: {measures.text(error)[:200]}"


def warm(cases: Sequence[Case], peers: list[str] | None, processes: int, seconds: float) -> None:
    """Fill the disk caches of peers that are slow to compile."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir(), "rawflash-bench-jax")))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    jobs = [(case, name) for case in cases for name in case.peers
            if name in SLOW_TO_COMPILE and (peers is None or name in peers)]  # fmt: skip
    begun = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        waiting = [pool.submit(compile_first, *job) for job in jobs]
        try:
            for future in as_completed(waiting, timeout=seconds):
                if future.result():
                    print("not compiled:", future.result(), flush=True)
        except TimeoutError:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(pool._processes.values()):
                process.kill()
    print(f"{len(jobs)} calls of peers compiled first: {time.monotonic() - begun:.0f} s", flush=True)


def run(found: dict[str, Any], cases: list[Case], todo: list[Case], out: Path, options: argparse.Namespace) -> int:
    """Fill a record."""
    begun = time.monotonic()
    print(f"{len(todo)} of {len(cases)} cases, {found.get('gpu') or found['cpu']}, record {out}", flush=True)
    if options.warm:
        warm(todo, options.peers, options.warm, options.seconds / 2)
    setup = measures.Setup(found["device"])
    if not options.no_ceilings and todo and not options.quick:
        with Watch(options.limit):
            found["ceilings"] |= measures.ceilings(setup, todo, found["ceilings"])
        print("ceilings:", found["ceilings"], flush=True)
    first = time.monotonic()
    for n, case in enumerate(todo):
        if time.monotonic() - begun > options.seconds:
            print(f"{options.seconds:.0f} s are over: {len(todo) - n} cases are not begun", flush=True)
            break
        found["running"] = case.name
        record.write(out, found)
        with Watch(options.limit):
            row = measure(setup, case, options.backends, options.peers)
            put(found["rows"], row)
            found["peers"] |= setup.peers
            lost = "lost" in row
            if not lost:
                del found["running"]
            record.write(out, found)
            try:
                if not lost:
                    setup.clear()
            except Exception:
                lost = True
        ahead = (time.monotonic() - first) / (n + 1) * (len(todo) - n - 1)
        print(f"[{n + 1}/{len(todo)}] {line(row)}; {row['seconds']} s, {ahead:.0f} s to go", flush=True)
        if lost:
            print("the GPU does not answer any more; --resume goes on behind this case", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(EXIT_LOST)  # tearing the libraries down could hang
    for name, version in found["peers"].items():
        if version.startswith("not loaded"):
            print(f"{name}: {version}")
    figures = {row["name"] for row in found["rows"] if has_figures(row)}
    missing = [case.name for case in cases if case.name not in figures]
    print(f"wrote {out}; cases without figures of ours: {len(missing)}", *missing[:20], sep="\n  ")
    return EXIT_MISSING if missing else 0


if __name__ == "__main__":
    sys.exit(main())
