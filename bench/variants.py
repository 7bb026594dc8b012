"""Variants of our GPU kernels beside each other: other tiles, other text. A notebook of experiments, not a record.

    python -m bench.variants SPEC.json --cases 'forward/bfloat16/d128/T8192*' --peers torch-cudnn --out FILE

SPEC is a list of variants, each with a name and what differs from the code as it is, which is measured too:

* ``tables``: values of :mod:`rawflash.tiling` by name, as Python expressions there; a dict changes these keys of the
  table.
* ``text``: pairs ``[old, new]`` of the kernels' text, headers included. A variant in which nothing was replaced fails.
* ``environment``: variables while its kernels are prepared.
* ``backend``: "cupy_raw" unless it says otherwise.

Results are compared with the dense reference before they are timed. A variant that ends the process is noted in the
file: the same command again goes on behind it, until it exits with 0. Cases of any size can be named by
``--usual D T DIRECTION DTYPE CAUSAL`` (with B T = 16384 and H d = 2048).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from bench import inputs, measures, record, timing
from bench.cases import Case, select, usual
from bench.peers import PEERS, Call, Ours, Runner
from bench.run import Watch
from rawflash import tiling

EXIT_LOST = 3
ROUNDS = 5  # of an untimed and a timed turn each
LIMIT = 60.0  # seconds of a variant of a case


class Variant(Ours):
    """Ours, with some things changed while it prepares and while it is called."""

    def __init__(self, name: str, tables: dict[str, str] | None = None, text: list[list[str]] | None = None,
                 environment: dict[str, str] | None = None, backend: str = "cupy_raw") -> None:  # fmt: skip
        super().__init__(backend)
        self.name = name
        self._tables = {key: eval(value, dict(vars(tiling))) for key, value in (tables or {}).items()}
        self._text, self._environment = text or [], environment or {}
        self._memo: dict[Any, Any] = {}
        self._replaced: set[str] = set()

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
    def _inside(self) -> Iterator[None]:
        from rawflash import problem
        from rawflash.backends.cupy_raw import compile

        with contextlib.ExitStack() as stack:
            for name, value in self._tables.items():
                old = getattr(tiling, name)
                stack.enter_context(mock.patch.object(tiling, name, old | value if isinstance(old, dict) else value))
            stack.enter_context(mock.patch.object(compile, "source", self._changed(compile.source)))
            stack.enter_context(mock.patch.object(problem, "_MEMO", self._memo))
            stack.enter_context(mock.patch.dict(os.environ, self._environment))
            yield

    def prepare(self, case: Case, x: inputs.Inputs) -> Call:
        with self._inside():
            call = super().prepare(case, x)
            call()
        missing = [old for old, _ in self._text if old not in self._replaced]
        if missing:
            raise ValueError(f"not in the text of a kernel: {missing[0][:200]!r}")

        def inside() -> Any:
            with self._inside():
                return call()

        return inside

    def plan(self, case: Case, x: inputs.Inputs, **options: Any) -> dict[str, Any]:
        with self._inside():
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
    turns, rounds = measures._turns(setup, case, ready, found)
    measures._timed(setup, case, turns, dict.fromkeys(rounds, ROUNDS), found, "burst_us")
    for name, figures in found.items():
        if "burst_us" in figures:
            figures |= measures._rates(case, figures)
        done[name] = figures


def main() -> int:
    found = argparse.ArgumentParser(prog="python -m bench.variants", description=__doc__,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    found.add_argument("spec", type=Path)
    found.add_argument("--cases", nargs="*", default=[], metavar="NAME")
    of_usual = ("D", "T", "DIRECTION", "DTYPE", "CAUSAL")
    found.add_argument("--usual", nargs=5, action="append", default=[], metavar=of_usual)
    found.add_argument("--peers", nargs="*", default=[], choices=tuple(PEERS), metavar="NAME")
    found.add_argument("--out", type=Path, required=True)
    found.add_argument("--seconds", type=float, default=300, help="no case is begun after this time")
    options = found.parse_args()
    cases = list(select(options.cases, "gpu")) if options.cases else []
    for d, T, direction, dtype, causal in options.usual:
        cases.append(usual(int(d), int(T), direction=direction, dtype=dtype, causal=causal in ("1", "causal")))
    variants: list[Runner] = [Variant("as it is"), *(Variant(**one) for one in json.loads(options.spec.read_text()))]
    runners = variants + [PEERS[name] for name in options.peers]
    results: dict[str, Any] = record.read(options.out) if options.out.exists() else {"rows": {}}
    running = results.pop("running", None)
    if running:
        results["rows"].setdefault(running[0], {})[running[1]] = {"failed": "ended the process"}
    setup, begun = measures.Setup("gpu"), time.monotonic()
    for case in cases:
        done = results["rows"].setdefault(case.name, {})
        if all(runner.name in done for runner in runners):
            continue
        if time.monotonic() - begun > options.seconds:
            print("the time is over")
            break

        def save(name: str | None, case: Case = case) -> None:
            results["running"] = name and [case.name, name]
            record.write(options.out, results)

        try:
            measured(setup, case, runners, done, save)
        except measures.DeviceLost as error:
            print(f"{case.name}: the GPU does not answer any more: {error.cause}", flush=True)
            os._exit(EXIT_LOST)
        save(None)
        setup.clear()
        print(case.name, flush=True)
        for name, figures in done.items():
            rate = figures.get("burst_tflops") or figures.get("burst_tbytes")
            text = f"{rate:9.4g}  {figures['burst_us'][1]:10.1f} us" if rate else figures.get("failed", "?")[:150]
            print(f"    {name:<40} {text}  {figures.get('tiles', '')}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
