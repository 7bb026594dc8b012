"""Variants of our GPU kernels beside each other: other tiles, other text.

    python -m bench.variants                # a record of what each idea of the kernels of sm_90 gains: ablations.json
    python -m bench.variants --out FILE     # the same in this file; goes on where it ends
    python -m bench.variants SPEC.json --cases 'forward/bfloat16/d128/T8192*' --peers torch-cudnn --out FILE

SPEC is a list of variants, each with a name and what differs from the code as it is, which is measured too:

* ``tables``: values of :mod:`rawflash.sm90` and :mod:`rawflash.tiling` by name, as Python expressions there; a dict
  changes these keys of the table.
* ``text``: pairs ``[old, new]`` of the kernels' text, headers included. A variant in which nothing was replaced fails.
* ``environment``: variables while its kernels are prepared.
* ``backend``: "cupy_raw" unless it says otherwise.
* ``cases``: patterns of the names of cases that it is for; all cases if there are none.

Cases of any size can be named by ``--usual D T DIRECTION DTYPE CAUSAL`` (with B T = 16384 and H d = 2048). Without
``--cases`` and ``--usual`` they are those that the variants are for.

Results are compared with the dense reference before they are timed. The record is written before each variant and
after each case; what fails has its reason in it.

Exit status: 0; 1 when a variant has no figures, failed or not begun; 2 when the call makes no sense; 3 when the process
had to end (the GPU does not answer, or a variant took too long): call again with the same ``--out``, which goes on
behind that variant.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fnmatch
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

from bench import inputs, measures, record, timing
from bench.cases import Case, select, usual
from bench.peers import PEERS, Call, Ours, Runner
from bench.run import ENDED, EXIT_LOST, EXIT_MISSING, EXIT_USAGE, Watch, free_name, unlike
from rawflash import sm90, tiling

SCHEMA = "rawflash-variants-1"
ABLATIONS = Path(__file__).with_name("ablations.json")
AS_IT_IS = "as it is"
IN_TURN = "all in turn"  # what runs when each has run alone
NOTES = {"medians": "[p20, p50, p80] in microseconds; rates are those of p50"}
ROUNDS = 5  # of an untimed and a timed turn each
LIMIT = 60.0  # seconds in which a variant of a case is compiled and compared, and in which all of a case are timed


class Variant(Ours):
    """Ours, with some things changed while it prepares and while it is called."""

    def __init__(self, name: str, tables: dict[str, str] | None = None, text: list[list[str]] | None = None,
                 environment: dict[str, str] | None = None, backend: str = "cupy_raw",
                 cases: Sequence[str] = ()) -> None:  # fmt: skip
        super().__init__(backend)
        self.name, self.cases = name, cases
        self._tables = {key: eval(value, vars(tiling) | vars(sm90)) for key, value in (tables or {}).items()}
        self._text, self._environment = text or [], environment or {}
        self._memo: dict[Any, Any] = {}
        self._replaced: set[str] = set()
        self._of = ""  # the case in whose kernels that was

    def is_for(self, case: Case) -> bool:
        """Is the case one of its own, or are all?"""
        return not self.cases or any(fnmatch.fnmatchcase(case.name, pattern) for pattern in self.cases)

    def _changed(self, source: Any) -> Any:
        def changed(*arguments: Any) -> str:
            made: str = source(*arguments)
            for old, new in self._text:
                if old in made:
                    self._replaced.add(old)
                    made = made.replace(old, new)
            return made

        return changed

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """In here the code is this variant."""
        from rawflash import problem
        from rawflash.backends.cupy_raw import compile

        with contextlib.ExitStack() as stack:
            for name, value in self._tables.items():
                for module in (sm90, tiling):
                    if name in vars(module):
                        old = getattr(module, name)
                        new = old | value if isinstance(old, dict) else value
                        stack.enter_context(mock.patch.object(module, name, new))
            stack.enter_context(mock.patch.object(compile, "source", self._changed(compile.source)))
            stack.enter_context(mock.patch.object(problem, "_MEMO", self._memo))
            stack.enter_context(mock.patch.dict(os.environ, self._environment))
            yield

    def prepare(self, case: Case, x: inputs.Inputs) -> Call:
        if self._of != case.name:  # of further inputs of one case kernels are there already
            self._replaced, self._of = set(), case.name
        with self.inside():
            call = super().prepare(case, x)
            call()
        if self.missing():
            raise ValueError(f"not in the text of a kernel: {self.missing()[0][:200]!r}")

        def changed() -> Any:
            with self.inside():
                return call()

        return changed

    def missing(self) -> list[str]:
        """What was to be replaced and has not been found in a kernel so far."""
        return [old for old, _ in self._text if old not in self._replaced]

    def plan(self, case: Case, x: inputs.Inputs, **options: Any) -> dict[str, Any]:
        with self.inside():
            return super().plan(case, x, **options)


def measured(setup: measures.Setup, case: Case, runners: list[Runner], done: dict[str, Any], save: Any) -> None:
    """Fill ``done`` with figures of each runner; before each, ``save`` is told that it runs."""
    sets = timing.input_sets(case.input_bytes, setup.cache_bytes)
    xs = [inputs.make(case, seed) for seed in range(sets)]
    ready: dict[str, Any] = {}
    found: measures.Figures = {}
    for runner in runners:
        if "failed" in done.get(runner.name, {}):
            continue
        why = runner.why_not(case) or setup.load(runner)
        if why:
            done[runner.name] = {"failed": why}
            continue
        found[runner.name] = {}
        save(runner.name)
        with Watch(LIMIT):
            ready |= measures._prepared(setup, case, [runner], xs, found)
        save(None)
    save(IN_TURN)
    with Watch(LIMIT):
        turns, rounds = measures._turns(setup, case, ready, found)
        measures._timed(setup, case, turns, dict.fromkeys(rounds, ROUNDS), found, "burst_us")
    for name, figures in found.items():
        if "burst_us" in figures:
            figures |= measures._rates(case, figures)
        done[name] = figures


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m bench.variants", description=__doc__,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    found.add_argument("spec", type=Path, nargs="?", default=ABLATIONS, help="default: ablations.json beside this file")
    found.add_argument("--cases", nargs="*", default=[], metavar="NAME", help="groups, or patterns of case names")
    of_usual = ("D", "T", "DIRECTION", "DTYPE", "CAUSAL")
    found.add_argument("--usual", nargs=5, action="append", default=[], metavar=of_usual)
    found.add_argument("--peers", nargs="*", default=[], choices=tuple(PEERS), metavar="NAME")
    found.add_argument("--out", type=Path, help="the record; default, without a SPEC: a new file in bench/results")
    found.add_argument("--seconds", type=float, default=480, help="no case is begun after this time")
    return found


def chosen(options: argparse.Namespace, variants: Sequence[Variant]) -> list[Case]:
    """Those that are asked for, or that variants are for."""
    names = options.cases
    if not (names or options.usual):
        names = [pattern for variant in variants for pattern in variant.cases]
    cases = list(select(names, "gpu"))
    for d, T, direction, dtype, causal in options.usual:
        cases.append(usual(int(d), int(T), direction=direction, dtype=dtype, causal=causal in ("1", "causal")))
    if not cases:
        raise ValueError("no case is chosen")
    return cases


def gone_on(old: dict[str, Any], found: dict[str, Any]) -> str | None:
    """Take over what a record has; or why it cannot be gone on with."""
    if old.get("schema") != SCHEMA:
        return "no record of this script"
    variants = {one["name"]: one for one in (*old["variants"], *found["variants"])}
    changed = [one["name"] for one in old["variants"] if variants[one["name"]] != one]
    different = unlike(old, found) + [f"another variant {name!r}" for name in changed]
    if different:
        return f"of something else: {'; '.join(different)}"
    found |= {key: old[key] for key in ("date", "commit", "spec", "peers", "rows")} | {"variants": [*variants.values()]}
    if "running" in old:
        case, name = old["running"]
        of_case = next(row for row in found["rows"] if row["name"] == case)
        if name == IN_TURN:
            of_case["failed"] = ENDED
        else:
            of_case["runners"][name] = {"failed": ENDED}
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for; the exit status."""
    options = parser().parse_args(arguments)
    if options.out is None and options.spec != ABLATIONS:
        print("a SPEC of your own needs --out", file=sys.stderr)
        return EXIT_USAGE
    try:
        spec = json.loads(options.spec.read_text())
        variants = [Variant(**one) for one in spec]
        cases = chosen(options, variants)
    except (ValueError, TypeError, OSError) as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    found: dict[str, Any] = {"schema": SCHEMA, "device": "gpu"} | record.about(True)
    found |= {"notes": NOTES, "spec": options.spec.name, "variants": spec, "peers": {}, "rows": []}
    out = options.out or free_name(record.RESULTS / f"ablations-{found['date']}.json")
    if out.exists() and (why_not := gone_on(record.read(out), found)):
        print(f"{out} is {why_not}", file=sys.stderr)
        return EXIT_USAGE
    if out.exists():
        record.write(out, found)  # what had ended a process is noted
    return run(found, cases, [Variant(AS_IT_IS), *variants], [PEERS[name] for name in options.peers], out, options)


def run(found: dict[str, Any], cases: list[Case], variants: list[Variant], peers: list[Runner], out: Path,
        options: argparse.Namespace) -> int:  # fmt: skip
    """Fill a record."""
    print(f"{len(cases)} cases, {found['gpu']}, record {out}", flush=True)
    rows = {row["name"]: row for row in found["rows"]}
    setup, begun = measures.Setup("gpu"), time.monotonic()
    for case in cases:
        runners = [variant for variant in variants if variant.is_for(case)] + peers
        row = rows.get(case.name) or {"name": case.name, "case": asdict(case), "runners": {}}
        done = row["runners"]
        if row.get("failed") == ENDED or all(runner.name in done for runner in runners):
            continue
        if time.monotonic() - begun > options.seconds:
            print(f"{options.seconds:.0f} s are over", flush=True)
            break
        rows[case.name] = row

        def save(name: str | None, case: Case = case) -> None:
            found["rows"], found["peers"] = list(rows.values()), found["peers"] | setup.peers
            found.pop("running", None)
            record.write(out, found | ({"running": [case.name, name]} if name else {}))

        since = time.monotonic()
        try:
            measured(setup, case, runners, done, save)
        except measures.DeviceLost as error:
            done |= {name: figures for name, figures in error.found.items() if "failed" in figures}
            save(None)
            print(f"{case.name}: the GPU does not answer any more: {error.cause}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(EXIT_LOST)  # tearing the libraries down could hang
        row |= {"seconds": round(time.monotonic() - since, 1), "date": datetime.date.today().isoformat()}
        save(None)
        setup.clear()
        print(case.name, flush=True)
        for name, figures in done.items():
            rate = figures.get("burst_tflops") or figures.get("burst_tbytes")
            text = f"{rate:9.4g}  {figures['burst_us'][1]:10.1f} us" if rate else figures.get("failed", "?")[:150]
            print(f"    {name:<50} {text}  {figures.get('tiles', '')}", flush=True)
    missing = [
        f"{case.name}: {variant.name}" for case in cases for variant in variants if variant.is_for(case)
        and "burst_us" not in rows.get(case.name, {}).get("runners", {}).get(variant.name, {})
    ]  # fmt: skip
    print(f"wrote {out}; without figures: {len(missing)}", *missing, sep="\n  ")
    return EXIT_MISSING if missing else 0


if __name__ == "__main__":
    sys.exit(main())
