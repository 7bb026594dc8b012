"""Figures of the records in bench/results, for the examples of these pages.

A speed is a median of the burst measurement (see benchmarks.md), in TFLOP/s, or TB/s for decoding.
"""

import json
from fnmatch import fnmatchcase
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"


def read(name):
    """The record of that name, as it is in the file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def number(x):
    """Three digits, as in the tables of benchmarks.md."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


class Record:
    """A record of ``python -m bench.run``: speeds by case and runner."""

    def __init__(self, name):
        self.made = read(name)
        self.speeds = {}
        for row in self.made["rows"]:
            runners = row.get("runners", {}).items()
            found = {who: f.get("burst_tflops") or f.get("burst_tbytes") for who, f in runners}
            if any(found.values()):
                self.speeds[row["name"]] = {who: speed for who, speed in found.items() if speed}

    def table(self, cases, runners):
        """Print a line for each case; a dash where a runner was not measured."""
        widths = [max(len(case) for case in cases), *(max(len(who), 6) for who in runners)]
        lines = [["", *runners]]
        for case in cases:
            lines.append([case, *(number(self.speeds[case][w]) if w in self.speeds[case] else "-" for w in runners)])
        for first, *cells in lines:
            columns = zip(cells, widths[1:], strict=True)
            print(f"{first:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in columns), sep="  ")

    def span(self, runner, *patterns):
        """The lowest and the highest speed of a runner over the cases that a pattern fits."""
        found = [s[runner] for case, s in self.speeds.items() if runner in s and _fits(case, patterns)]
        return f"{number(min(found))} to {number(max(found))}"

    def ratios(self, ours, theirs, *patterns):
        """The lowest and the highest speed of ours by that of theirs: above 1 ours is faster."""
        some = [s for case, s in self.speeds.items() if {ours, theirs} <= {*s} and _fits(case, patterns)]
        found = [s[ours] / s[theirs] for s in some]
        return f"{min(found):.2f} to {max(found):.2f} over {len(found)} cases"


def _fits(case, patterns):
    return any(fnmatchcase(case, pattern) for pattern in patterns)
