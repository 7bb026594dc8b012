"""Tables and plots of the pages, from the records.

    python -m bench.report            # PAGES and docs/benchmarks/*.svg; plots need matplotlib
    python -m bench.report --check    # exit status 1 where they are not what the records make; needs no matplotlib

A table stands between ``<!-- bench:begin NAME -->`` and ``<!-- bench:end -->``. Of a case the newest row counts that
has figures of ours; a table is of one device, the one of the newest record, or that of the folder of `bench/results`
whose name it has at its end. What no record has rows for stays as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import record, reliability, variants
from bench.cases import GRID, GROUPS
from bench.peers import PEERS
from bench.run import SCHEMA, has_figures, says_more

PAGES = ("README.md", "docs/benchmarks.md", "docs/kernels/sm90.md")
PLOTS = Path("docs/benchmarks")
BLOCK = re.compile(r"(<!-- bench:begin(?: (?P<name>[\w-]+))? -->\n).*?(<!-- bench:end -->)", re.DOTALL)
README = (
    "forward/bfloat16/d128/T4096", "forward/bfloat16/d128/T4096/causal", "backward/bfloat16/d128/T4096/causal",
    "forward/float32/d64/T4096", "forward/float32/d128/T4096", "backward/float32/d128/T4096",
    "decode/bfloat16/d128/T8192/B16H32/Hkv8", "decode/bfloat16/d64/T8192/B16H32/Hkv8",
)  # fmt: skip
Row = dict[str, Any]
Made = tuple[str, list[Row]]  # a table, and the rows that it is of
BEFORE = ", before"
OTHERS = ("h100",)  # folders of other GPUs' records
UNITS = {"tflops": "TFLOP/s", "tbytes": "TB/s"}


@dataclass
class Results:
    """Rows of one device, by the name of the case, and the records that they are from."""

    device: str = ""
    rows: dict[str, Row] = field(default_factory=dict)
    sources: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    before: dict[str, Row] = field(default_factory=dict)  # earlier rows, of runners of ours that the cases' rows lack

    def replace(self, row: Row, source: tuple[str, dict[str, Any]]) -> None:
        """Take a row in place of the one of its case; what of ours it lacks stays, as that of a row of before."""
        case = row["name"]
        for old, of in ((self.rows.get(case), case), (self.before.pop(case, None), case + BEFORE)):
            lacking = mine(old).keys() - row["runners"].keys() if old else ()
            if old and lacking and case not in self.before:
                runners = {name: one | {"earlier": True} for name, one in old["runners"].items() if name in lacking}
                self.before[case] = old | {"name": case + BEFORE, "runners": runners}
                self.sources[case + BEFORE] = self.sources[of]
        self.rows[case], self.sources[case] = row, source

    def runners(self, row: Row) -> dict[str, dict[str, Any]]:
        """Figures of a row, and of ours those that it lacks, which are marked "earlier"."""
        before: Row = self.before.get(row["name"], {})
        return dict(row["runners"] | before.get("runners", {}))

    def and_before(self, rows: Sequence[Row]) -> list[Row]:
        """Rows, and those of before that their tables show."""
        return [*rows, *(self.before[row["name"]] for row in rows if row["name"] in self.before)]

    def of(self, names: Iterable[str]) -> list[Row]:
        """Rows of cases, where there are."""
        return [self.rows[name] for name in names if name in self.rows]


def load(folder: Path = record.RESULTS) -> dict[str, Results]:
    """For GPU and CPU, the rows of the device that was measured last; those of a folder of another device's.

    Of one case the last row, unless one before it says more of the same code: figures of newer code beside some peers
    are worth more than those of older code beside all.
    """
    found = {"gpu": _of_one_device(folder, "gpu"), "cpu": _of_one_device(folder, "cpu")}
    found |= {name: _of_one_device(folder, "gpu", f"{name}/") for name in OTHERS}
    found["reliability"] = _newest(folder, reliability.SCHEMA)
    found["ablations"] = _newest(folder, variants.SCHEMA, variants.ABLATIONS.name)
    return found


def _of_one_device(folder: Path, kind: str, within: str = "") -> Results:
    results, records = Results(), []
    for path in sorted((folder / within).glob("*.json")):
        made = record.read(path)
        if (made.get("schema"), made.get("device")) == (SCHEMA, kind):
            records.append((made["date"], within + path.name, made))
    records.sort(key=lambda entry: entry[:2])
    results.device = _device(records[-1][2]) if records else ""
    for _, name, made in records:
        if _device(made) != results.device:
            continue
        for row in made["rows"]:
            old = results.rows.get(row["name"])
            other_code = old is not None and code_of(made) != code_of(results.sources[row["name"]][1])
            if old is None or says_more(row, old) or (other_code and ratio(row)):
                results.replace(row, (name, made))
    return results


def _newest(folder: Path, schema: str, spec: str | None = None) -> Results:
    """The newest row of each job of ``bench.reliability``, or case of ``bench.variants``; all are of the code and the
    device of the newest record."""
    results = Results()
    records = [(path.name, record.read(path)) for path in sorted(folder.glob("*.json"))]
    some = [(name, made) for name, made in records
            if (made.get("schema"), made.get("spec")) == (schema, spec) and made["device"] == "gpu"]  # fmt: skip
    some.sort(key=lambda entry: (entry[1]["date"], entry[0]))
    for name, made in some:
        last = some[-1][1]
        if (_device(made), code_of(made)) == (_device(last), code_of(last)):
            results.device = _device(made)
            for row in made["rows"]:
                results.rows[row["name"]] = row
                results.sources[row["name"]] = name, made
    return results


def code_of(made: dict[str, Any]) -> str | None:
    """Of which state of the package a record is."""
    return made.get("source_sha256")


def _device(made: dict[str, Any]) -> str:
    return str(made["gpu"] if made["device"] == "gpu" else made["cpu"])


# ---- figures of a row ----------------------------------------------------------------------------------------


def mine(row: Row) -> dict[str, dict[str, Any]]:
    """Figures of ours, by backend and algorithm."""
    return {name: figures for name, figures in row["runners"].items() if name not in PEERS}


def theirs(row: Row) -> dict[str, dict[str, Any]]:
    """Figures of peers."""
    return {name: figures for name, figures in row["runners"].items() if name in PEERS}


def best(some: dict[str, dict[str, Any]], key: str = "burst_us") -> tuple[str, float] | None:
    """Who is fastest, and the median in microseconds; None where nobody has one."""
    timed = {name: figures[key][1] for name, figures in some.items() if key in figures}
    return min(timed.items(), key=lambda entry: entry[1]) if timed else None


def ratio(row: Row, key: str = "burst_us") -> float | None:
    """Time of the best peer by that of our best: above 1 we are faster."""
    a, b = best(mine(row), key), best(theirs(row), key)
    return b[1] / a[1] if a and b else None


def speed(figures: dict[str, Any], when: str = "burst") -> float | None:
    """TFLOP/s or TB/s."""
    return next((figures[f"{when}_{unit}"] for unit in UNITS if f"{when}_{unit}" in figures), None)


def number(x: float | None) -> str:
    """Three digits that count."""
    if x is None:
        return ""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def size(n: float) -> str:
    """Bytes with a unit."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n >= limit:
            return f"{number(n / limit)} {unit}"
    return f"{n:.0f}"


def caption(results: Results, rows: Sequence[Row], links: str | None = None) -> str:
    """Device, dates, driver, versions, commits, records; of ``links``, the folder of a page, they are links."""
    sources = dict(results.sources[row["name"]] for row in rows)
    facts: dict[str, dict[str, None]] = {}  # what is said, each once: all that differ where records do
    for made in sources.values():
        peers = {"PyTorch": "torch", "FlashAttention-4": "flash-attn-4", "JAX": "jax", "CuPy": "cupy",
                 "numba-cuda": "numba-cuda", "Numba": "numba", "NVRTC": "nvrtc", "Python": "python"}  # fmt: skip
        if made["device"] == "cpu":
            peers = {"PyTorch": "torch", "Numba": "numba", "NumPy": "numpy", "Python": "python"}
        found = {"": made["date"], "driver": made.get("driver"), "commit": made["commit"]}
        found |= {label: made["versions"].get(key) for label, key in peers.items()}
        found["CPUs"] = None if made.get("driver") else made["cpus"]
        for label, value in found.items():
            if value:
                facts.setdefault(label, {})[str(value)] = None
    said = [f"{label} {' and '.join(values)}".strip() for label, values in facts.items()]
    names = [f"`bench/results/{name}`" if links is None else f"[{name}]({links}{name})" for name in sources]
    return f"{results.device}, {', '.join(said)}; {', '.join(names)}."


# ---- tables --------------------------------------------------------------------------------------------------


Maker = Callable[[Results], Made]


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; columns without a word in any line are left out."""
    kept = [list(line) for line in lines]
    columns = [n for n in range(len(head)) if n == 0 or any(line[n] for line in kept)]
    made = ["| " + " | ".join(line[n] for n in columns) + " |" for line in ([*head], *kept)]
    return "\n".join([made[0], "|" + " --- |" * len(columns), *made[1:]])


EARLIER = " (earlier code)"


def earlier(results: Results, rows: Sequence[Row], than: Iterable[str] | None = None) -> dict[str, str]:
    """What to say of a row that is of older code than the newest record of the device, or of those of cases."""
    records = [results.sources[case] for case in (results.sources if than is None else than)]
    last = max(((record["date"], name) for name, record in records), default=None)
    newest = {code_of(record) for name, record in records if (record["date"], name) == last}
    made = {row["name"]: results.sources[row["name"]][1] for row in rows}
    return {case: "" if code_of(record) in newest else EARLIER for case, record in made.items()}


def problem(row: Row) -> str:
    """A case in words."""
    c = row["case"]
    heads = f"H = {c['Hq']}" + (f", Hkv = {c['Hkv']}" if c["Hkv"] != c["Hq"] else "")
    rows = "" if c["Tq"] == c["Tk"] or c["direction"] == "decode" else f"{c['Tq']} x "
    columns = f"d = {c['d']}" + (f" / {c['dv']}" if c.get("dv", c["d"]) != c["d"] else "")
    words = [f"B = {c['B']}, {heads}, T = {rows}{c['Tk']}, {columns}"]
    packed = c.get("packed", ())
    if packed:
        alike = len(set(packed)) == 1
        words = [f"{len(packed)} of {packed[0] if alike else f'{min(packed)} to {max(packed)}'}, {heads}, {columns}"]
    words += ["causal"] * c["causal"] + [f"blocks of {c['page']}"] * bool(c["page"])
    return ", ".join(words)


def speeds(results: Results, names: Iterable[str]) -> Made:
    """Each runner's speed, burst and sustained, and the ratio to the best peer."""
    rows = [row for row in results.of(names) if row["runners"]]
    runners = list(dict.fromkeys(name for row in results.and_before(rows) for name in mine(row)))
    runners += [name for name in PEERS if any("burst_us" in theirs(row).get(name, {}) for row in rows)]
    lines, old = [], earlier(results, rows)
    for row in rows:
        c = row["case"]
        cells = []
        for name in runners:
            figures = results.runners(row).get(name, {})
            burst, steady = speed(figures), speed(figures, "sustained")
            if c["device"] == "cpu":
                burst = burst and burst * 1e3
            text = number(burst) + (f" / {number(steady)}" if steady else "")
            cached = figures.get("in_cache_tbytes")
            text += f" ({number(cached)} in L2)" if cached else ""
            text = "failed" if "failed" in figures else text
            cells.append(text + EARLIER * ("earlier" in figures))
        ratios = " / ".join(f"{x:.2f}" for x in (ratio(row), ratio(row, "sustained_us")) if x)
        lines.append([f"{c['direction']}, {c['dtype']}", problem(row) + old[row["name"]], *cells, ratios])
    return table(["pass", "problem", *runners, "ratio to the best peer"], lines), results.and_before(rows)


def speeds_of(group: str, direction: str | None = None) -> Maker:
    """The table of a group."""
    names = [name for name in GROUPS[group] if direction is None or name.startswith(direction)]
    return lambda results: speeds(results, names)


def readme(results: Results) -> Made:
    """Chosen cases: ours, the best peer, the ratio."""
    rows = [row for row in results.of(README) if has_figures(row)]
    lines, old = [], earlier(results, rows)
    for row in rows:
        (a, _), peer = best(mine(row)) or ("", 0), best(theirs(row))
        unit = UNITS["tbytes" if row["case"]["direction"] == "decode" else "tflops"]
        lines.append([
            f"{row['case']['direction']}, {row['case']['dtype']}", problem(row) + old[row["name"]],
            f"{number(speed(mine(row)[a]))} {unit} ({a})",
            f"{number(speed(theirs(row)[peer[0]]))} ({peer[0]})" if peer else "",
            f"{ratio(row):.2f}" if peer else "",
        ])  # fmt: skip
    return table(["pass", "problem", "rawflash", "best peer", "ratio"], lines), rows


def dense(results: Results) -> Made:
    """Milliseconds and extra memory, beside a dense formula."""
    rows = [row for row in results.of(GROUPS["dense"]) if has_figures(row)]
    runners = list(dict.fromkeys(name for row in results.and_before(rows) for name in row["runners"]))
    lines = []
    for row in rows:
        cells = []
        for name in runners:
            figures = results.runners(row).get(name, {})
            text = f"{number(figures['burst_us'][1] / 1e3)} ms" if "burst_us" in figures else ""
            text += f", {size(figures['extra_bytes'])}" if "extra_bytes" in figures else ""
            cells.append(text + EARLIER * ("earlier" in figures))
        lines.append([f"{row['case']['direction']}, {row['case']['dtype']}", problem(row), *cells])
    return table(["pass", "problem", *runners], lines), results.and_before(rows)


def order(results: Results) -> Made:
    """Speed without a fixed order and in one, and what its time is by that without."""
    ways = ("cupy_raw", "cupy_raw deterministic")
    costs: dict[str, list[float]] = {"burst": [], "sustained": []}
    times = tuple(f"{when}_us" for when in costs)
    rows = [row for row in results.of(GROUPS["order"])
            if all(time in row["runners"].get(way, {}) for way in ways for time in times)]  # fmt: skip
    lines, old = [], earlier(results, rows)
    for row in rows:
        without, ordered = (row["runners"][way] for way in ways)
        cells = [" / ".join(number(speed(figures, when)) for when in costs) for figures in (without, ordered)]
        for time, found in zip(times, costs.values(), strict=True):
            found.append(ordered[time][1] / without[time][1])
        by = " / ".join(f"{found[-1]:.2f}" for found in costs.values())
        lines.append([problem(row) + old[row["name"]], *cells, by])
    means = " / ".join(f"{math.prod(found) ** (1 / len(rows)):.3f}" for found in costs.values() if rows)
    most = " / ".join(f"{max(found):.2f}" for found in costs.values() if rows)
    head = ["problem", *ways, "time by that without an order"]
    return f"{table(head, lines)}\n\nOf {len(rows)}: geometric mean {means}, at most {most}.", rows


def memory(group: str) -> Maker:
    """Extra memory."""

    def made(results: Results) -> Made:
        rows = [row for row in results.of(GROUPS[group]) if has_figures(row)]
        runners = list(dict.fromkeys(name for row in rows for name in row["runners"]))
        lines = [
            [f"{row['case']['direction']}, {row['case']['dtype']}", problem(row), *(
                size(row["runners"][name]["extra_bytes"]) if "extra_bytes" in row["runners"].get(name, {}) else ""
                for name in runners
            )]
            for row in rows
        ]  # fmt: skip
        return table(["pass", "problem", *runners], lines), rows

    return made


def sweep(group: str) -> Maker:
    """Tiles that are planned, the best ones of the sweep, and how far they are apart."""

    def made(results: Results) -> Made:
        rows, lines = [row for row in results.of(GROUPS[group]) if has_figures(row)], []
        for row in rows:
            for name, figures in mine(row).items():
                first = min((p for p in figures["points"] if "burst_us" in p), key=lambda p: p["burst_us"][1])
                sizes = [f"{tiles['br']} x {tiles['bc']}" for tiles in (figures["tiles"], first["tiles"])]
                lines.append([f"{row['case']['direction']}, {row['case']['dtype']}", problem(row), name, *sizes,
                              f"{figures['best_by_planned']:.2f}"])  # fmt: skip
        return table(["pass", "problem", "backend", "planned", "best", "time of the best by planned"], lines), rows

    return made


def start(group: str) -> Maker:
    """Seconds of the first calls of a process, without and with a cache of kernels.

    Cold ones only of records that emptied all caches.
    """

    def made(results: Results) -> Made:
        rows = [row for row in results.of(GROUPS[group]) if has_figures(row)]
        keys = ("import_s", "forward_s", "backward_s")
        lines = [
            [row["case"]["dtype"], which, *(f"{figures[which][key]:.2f}" for key in keys)]
            for row in rows for figures in mine(row).values() for which in ("cold", "warm")
            if which == "warm" or "caches" in figures or row["case"]["device"] == "cpu"
        ]  # fmt: skip
        return table(["dtype", "cache of kernels", "import, s", "first forward, s", "first backward, s"], lines), rows

    return made


def overhead(results: Results) -> Made:
    """Host time of a warm call."""
    rows = [row for row in results.of(GROUPS["overhead"]) if has_figures(row)]
    lines = [[row["case"]["what"], number(next(iter(mine(row).values()))["host_us"])] for row in rows]
    return table(["call", "host time, microseconds"], lines), rows


def ceilings(results: Results) -> Made:
    """Of all records; each has measured its own."""
    records = {record: (case, made["ceilings"]) for case, (record, made) in results.sources.items() if made["ceilings"]}
    rows = results.of(case for case, _ in records.values())
    if not records:
        return "", []
    if all("cpu" in found for _, found in records.values()):
        lines = [[key, str(value)] for _, found in records.values() for key, value in found["cpu"].items()]
        return table(["what", "figure"], lines), rows
    keys = ("burst_tflops", "sustained_tflops", "burst_tbytes")
    lines = [
        [what, *(str(figures.get(key, "")) for key in keys), f"`{record}`"]
        for record, (_, found) in records.items() for what, figures in found.items() if "failed" not in figures
    ]  # fmt: skip
    return table(["what", "burst, TFLOP/s", "sustained, TFLOP/s", "TB/s", "record"], sorted(lines)), rows


# ---- reliability and accuracy --------------------------------------------------------------------------------


def _of_part(results: Results, part: str) -> list[Row]:
    """In the order of their names, numbers as numbers."""
    names = [name for name in results.rows if name.startswith(part + "/")]
    names.sort(key=lambda name: re.sub(r"\d+", lambda digits: digits[0].zfill(9), name))
    return results.of(names)


def _worst(worst: dict[str, Any]) -> str:
    """The result whose error is largest by what is allowed."""
    values = {name: float(x[0] if isinstance(x, list) else x) for name, x in worst.items()}
    name = max(values, key=lambda name: values[name], default="")
    return f"{values[name]:.2f} ({name})" if name else ""


def proofs(results: Results) -> Made:
    """Calls that were held against the bound or against one another."""
    lines, rows = [], []
    parts = {"forward": "forward", "backward": "backward", "long": "backward, planned as long calls are"}
    for part, name in parts.items():
        mine = _of_part(results, part)
        rows += mine
        for entry in reliability.summary(mine).values():
            ours = sum(count for kernel, count in entry["served"].items() if kernel.endswith(", wgmma"))
            what = f"{name}, random shapes in {entry['jobs']} sets of constants"
            lines.append([what, f"{entry['calls']:,}", f"{ours:,}", str(entry["failures"]), "",
                          _worst(entry.get("worst", {}))])  # fmt: skip
    for part in ("repeats", "graphs"):
        for row in _of_part(results, part):
            rows.append(row)
            times = row.get("repeats", row.get("replays", 0))
            ours = any(kernel.endswith(", wgmma") for kernel in row.get("served", {}))
            what = row["name"].partition("/")[2] if part == "repeats" else f"graph, {row['name'].partition('/')[2]}"
            lines.append([what, f"{times:,}", f"{times:,}" if ours else "0", str(len(row["failures"])),
                          str(row.get("other_bits", "")), _worst(row.get("worst", {}))])  # fmt: skip
    head = ["what", "calls", "by kernels of sm_90", "failed", "other bits", "largest error by what is allowed"]
    return table(head, lines), rows


def accuracy(results: Results) -> Made:
    """Largest errors of the output by family of scores, over all lengths and head dimensions."""
    rows, lines = _of_part(results, "accuracy"), []
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        for family, line in row.get("families", {}).items():
            found.setdefault((family, row["case"]["dtype"]), []).append(line)
    for family, dtype in sorted(found, key=lambda key: (reliability.FAMILIES.index(key[0]), key[1])):
        some = found[family, dtype]
        cells = []
        for who in ("rawflash", "followed", "cudnn"):
            errors = [float(line[who]["largest"]) for line in some if "largest" in line.get(who, {})]
            cells.append(f"{max(errors):.1e}" if errors else "")
        for key in ("rms_by_cudnn", "largest_by_cudnn"):
            by = [float(line[key]) for line in some if line.get(key) is not None]
            cells.append(f"{max(by):.2f}" if by else "")
        bound = max(float(line["rawflash"].get("by_bound", "inf")) for line in some)
        lines.append([f"{family}, {dtype}", *cells, f"{bound:.2f}"])
    head = ["scores", "rawflash", "maximum followed", "cuDNN", "rms by cuDNN's, at most", "largest by cuDNN's, at most",
            "by what is allowed, at most"]  # fmt: skip
    return table(head, lines), rows


def gradients(results: Results) -> Made:
    """Errors of gradients as multiples of cuDNN's, lowest and highest."""
    rows, lines = _of_part(results, "gradients"), []
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        some = found.setdefault((row["case"]["dtype"], row["case"]["d"]), [])
        some += row.get("families", {}).values()
    for (dtype, d), some in sorted(found.items()):
        cells = []
        for name in ("dq", "dk", "dv"):
            for key in ("rms_by_cudnn", "largest_by_cudnn"):
                by = [float(line[name][key]) for line in some if line[name].get(key) is not None]
                cells.append(f"{min(by):.2f} to {max(by):.2f}" if by else "")
        bound = max(float(line[name]["rawflash"]["by_bound"]) for line in some for name in ("dq", "dk", "dv"))
        lines.append([f"{dtype}, d = {d}", *cells, f"{bound:.2f}"])
    head = ["", *(f"{name}, {what}" for name in ("dq", "dk", "dv") for what in ("rms", "largest")),
            "largest by what is allowed"]  # fmt: skip
    return table(head, lines), rows


def redone(results: Results) -> Made:
    """Time of calls of which pieces are done again."""
    rows = _of_part(results, "redo")
    names = list(dict.fromkeys(name for row in rows for name in row.get("us", {})))
    lines = []
    for row in rows:
        c, cells = row["case"], []
        for name in names:
            times = row["us"].get(name)
            by = f" ({row['by_none'][name]:.2f})" if name != names[0] and times else ""
            cells.append(f"{number(times[1] / 1e3)} ms{by}" if times else "")
        lines.append([f"H = {c['H']}, T = {c['T']}, d = {c['d']}" + ", causal" * c["causal"], *cells])
    return table(["problem", *names], lines), rows


# ---- variants ------------------------------------------------------------------------------------------------


SAID = ("Burst: microseconds of the code as it is, and of each variant its time by that; above 1, what the variant "
        "does without gains.")  # fmt: skip


def ablations(direction: str) -> Maker:
    """Time of variants by that of the code as it is."""

    def cell(row: Row, name: str) -> str:
        time, usual = (row["runners"].get(who, {}).get("burst_us") for who in (name, variants.AS_IT_IS))
        return f"{time[1] / usual[1]:.2f}" if time else "failed" if name in row["runners"] else ""

    def made(results: Results) -> Made:
        rows = [row for row in results.rows.values() if row["case"]["direction"] == direction]
        rows = [row for row in rows if "burst_us" in row["runners"].get(variants.AS_IT_IS, {})]
        rows.sort(key=lambda row: (row["case"]["d"], row["case"]["Tk"], row["case"]["causal"]))
        heads = [f"d = {c['d']}, T = {c['Tk']}" + ", causal" * c["causal"] for c in (row["case"] for row in rows)]
        lines = [[variants.AS_IT_IS, *(number(row["runners"][variants.AS_IT_IS]["burst_us"][1]) for row in rows)]]
        names = dict.fromkeys(one["name"] for _, whole in results.sources.values() for one in whole["variants"])
        lines += [[name, *cells] for name in names if any(cells := [cell(row, name) for row in rows])]
        return f"{table(['', *heads], lines)}\n\n{SAID}", rows

    return made


TABLES: dict[str, tuple[str, Maker]] = {  # name of a block: whose rows, and what makes it; "": the README's
    "": ("gpu", readme),
    "grid-forward": ("gpu", speeds_of("grid", "forward")),
    "grid-backward": ("gpu", speeds_of("grid", "backward")),
    "grid-forward-h100": ("h100", speeds_of("grid", "forward")),
    "grid-backward-h100": ("h100", speeds_of("grid", "backward")),
    "grid-fp16": ("gpu", speeds_of("grid-fp16")),
    "gqa": ("gpu", speeds_of("gqa")),
    "ragged": ("gpu", speeds_of("ragged")),
    "order": ("gpu", order),
    "packed": ("gpu", speeds_of("packed")),
    "few": ("gpu", speeds_of("few")),
    "float32": ("gpu", speeds_of("float32")),
    "float64": ("gpu", speeds_of("float64")),
    "decode": ("gpu", speeds_of("decode")),
    "dense": ("gpu", dense),
    "memory": ("gpu", memory("memory")),
    "sweep": ("gpu", sweep("sweep")),
    "start": ("gpu", start("start")),
    "overhead": ("gpu", overhead),
    "ceilings": ("gpu", ceilings),
    "cpu": ("cpu", speeds_of("cpu")),
    "cpu-decode": ("cpu", speeds_of("cpu-decode")),
    "cpu-memory": ("cpu", memory("cpu-memory")),
    "cpu-sweep": ("cpu", sweep("cpu-sweep")),
    "cpu-start": ("cpu", start("cpu-start")),
    "cpu-ceilings": ("cpu", ceilings),
    "reliability": ("reliability", proofs),
    "accuracy": ("reliability", accuracy),
    "gradients": ("reliability", gradients),
    "redo": ("reliability", redone),
    "ablations-forward": ("ablations", ablations("forward")),
    "ablations-backward": ("ablations", ablations("backward")),
}


def page(text: str, found: dict[str, Results], pictures: dict[str, str]) -> str:
    """A page with its blocks made anew; a block of which there are no rows stays."""

    def block(match: re.Match[str]) -> str:
        name = match["name"] or ""
        if name == "plots":
            made = "\n\n".join(f"![{alt}](benchmarks/{plot}.svg)" for plot, alt in pictures.items())
            return f"{match[1]}\n{made}\n\n{match[3]}" if made else match[0]
        if name not in TABLES:
            raise ValueError(f"no table is named {name!r}")
        device, maker = TABLES[name]
        made, rows = maker(found[device])
        links = None if name else "bench/results/"  # the README is read where the records are
        return f"{match[1]}\n{made}\n\n{caption(found[device], rows, links)}\n\n{match[3]}" if rows else match[0]

    return BLOCK.sub(block, text)


# ---- plots ---------------------------------------------------------------------------------------------------


def _curves(results: Results, direction: str) -> dict[str, Any]:
    """For each head dimension and mask: speed over T of everyone, and the ratio to the best peer.

    A curve is of one state of the code, the newest of its direction; points of earlier ones, "before" and "ratio
    before", stand beside it.
    """
    found: dict[str, Any] = {}
    rows = results.of(name for name in GROUPS["grid"] if name.startswith(f"{direction}/bfloat16/"))
    old = earlier(results, rows, [row["name"] for row in rows])
    for d in sorted({size[0] for size in GRID}):
        for causal in (False, True):
            panel: dict[str, Any] = {"speed": {}, "ratio": [], "before": {}, "ratio before": []}
            panel_rows = [row for row in rows if (row["case"]["d"], row["case"]["causal"]) == (d, causal)]
            for row in sorted(panel_rows, key=lambda row: row["case"]["Tk"]):
                T, now = row["case"]["Tk"], not old[row["name"]]
                for name, figures in row["runners"].items():
                    value = speed(figures)
                    if value is not None:
                        panel["speed" if now else "before"].setdefault(name, []).append([T, value])
                if ratio(row):
                    panel["ratio" if now else "ratio before"].append([T, round(ratio(row) or 0, 4)])
            if panel["speed"]:
                found[f"d = {d}, {'causal' if causal else 'full'}"] = panel
    return found


def plots(found: dict[str, Results]) -> dict[str, tuple[str, str, Any]]:
    """Name of a plot: which kind it is, what it shows in words, and its data. Only those that have data."""
    gpu = found["gpu"]
    made: dict[str, tuple[str, str, Any]] = {}
    for direction in ("forward", "backward"):
        panels = _curves(gpu, direction)
        if panels:
            drawn = [n for n in GROUPS["grid"] if n.startswith(f"{direction}/") and n in gpu.sources]
            tops = (gpu.sources[n][1]["ceilings"].get("bfloat16 matmul", {}).get("burst_tflops") for n in drawn)
            top = next((t for t in tops if t), None)
            title = f"Speed of the {direction} pass against T, bfloat16, {gpu.device}"
            made[f"{direction}-bfloat16"] = "speed", title, {"panels": panels, "top": top}
    ratios = {
        direction: {
            name: [panel["ratio"], panel["ratio before"]]
            for name, panel in _curves(gpu, direction).items()
            if panel["ratio"]
        }
        for direction in ("forward", "backward")
    }
    if any(ratios.values()):
        made["ratio-bfloat16"] = "ratio", f"Speed as a multiple of the best peer's, bfloat16, {gpu.device}", ratios
    held: dict[str, dict[str, list[list[float]]]] = {}
    for row in gpu.of(GROUPS["memory"]):
        for name, figures in row["runners"].items():
            if "extra_bytes" in figures:
                curves = held.setdefault(row["case"]["direction"], {})
                curves.setdefault(name, []).append([row["case"]["Tk"], figures["extra_bytes"]])
    if held:
        made["memory"] = "memory", f"Extra memory against T, 8 heads, d = 64, float16, causal, {gpu.device}", held
    for kind in ("gpu", "cpu"):
        swept = {}
        for row in found[kind].of(GROUPS["sweep" if kind == "gpu" else "cpu-sweep"]):
            for figures in mine(row).values():
                timed = [p for p in figures.get("points", ()) if "burst_us" in p]
                points = [[p["sram"], p["burst_us"][1]] for p in timed if p["sram"]]
                if points:
                    label = f"{row['case']['direction']}, {row['case']['dtype']}, {problem(row)}"
                    swept[label] = [[m, round(us / figures["burst_us"][1], 4)] for m, us in points]
        if swept:
            title = f"Time over M, as a multiple of that of the planned tiles, {found[kind].device}"
            made[f"{kind}-sweep"] = "sweep", title, swept
    return made


def digest(data: Any) -> str:
    """What a plot was drawn from."""
    return "data sha256 " + hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


COLOURS = dict(zip(
    ("cupy_raw", "numba_cuda", "torch-flash", "torch-cudnn", "torch-efficient", "torch-math", "flex", "fa4",
     "jax-cudnn", "jax-xla", "dense-cupy"),
    ("#d62728", "#ff7f0e", "#1f77b4", "#2ca02c", "#9467bd", "#7f7f7f", "#8c564b", "#000000", "#17becf", "#bcbd22",
     "#aaaaaa"), strict=True,
))  # fmt: skip


def draw(path: Path, kind: str, title: str, data: Any) -> None:
    """An SVG with its text as text, the same for the same data."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style = {"svg.fonttype": "none", "svg.hashsalt": "rawflash", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3,
             "figure.facecolor": "white", "savefig.facecolor": "white", "axes.spines.top": False,
             "axes.spines.right": False, "lines.markersize": 4}  # fmt: skip
    with pyplot.rc_context(style):
        figure = {"speed": _speed, "ratio": _ratio, "memory": _memory, "sweep": _sweep}[kind](pyplot, data)
        figure.suptitle(title, fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None, "Description": digest(data)})
        pyplot.close(figure)
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", path.read_text())  # hundredths of a point are not seen
    path.write_text("\n".join(line.strip() for line in text.splitlines()) + "\n")


def _lengths(axes: Any, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_ylabel(label)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0f}")


def _legend(figure: Any) -> None:
    """One legend below all panels."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        entries |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    where = dict(loc="outside lower center", ncols=min(len(entries), 4), frameon=False)
    figure.legend(entries.values(), entries.keys(), **where)


HOLLOW = {"linestyle": "", "marker": "o", "markerfacecolor": "white", "label": "hollow: earlier code"}


def _speed(pyplot: Any, data: Any) -> Any:
    rows = -(-len(data["panels"]) // 2)
    figure, grid = pyplot.subplots(rows, 2, figsize=(8, 2.6 * rows + 0.8), layout="constrained", squeeze=False)
    panels = data["panels"]
    for axes, (name, panel) in zip(grid.flat, panels.items(), strict=False):
        for runner, points in panel["speed"].items():
            ours = runner not in PEERS
            axes.plot(*zip(*points, strict=True), marker="o", label=runner, color=COLOURS.get(runner),
                      linewidth=2 if ours else 1, zorder=3 if ours else 2)  # fmt: skip
        for runner, points in panel["before"].items():
            axes.plot(*zip(*points, strict=True), color=COLOURS.get(runner), **HOLLOW)
        if data["top"]:
            axes.axhline(data["top"], color="black", linestyle=":", linewidth=1, label="matrix product, 8192")
        axes.set_title(name, fontsize=9)
        axes.set_ylim(bottom=0)
        _lengths(axes, "TFLOP/s")
    _legend(figure)
    return figure


def _ratio(pyplot: Any, data: Any) -> Any:
    figure, grid = pyplot.subplots(1, 2, figsize=(8, 3.6), layout="constrained", sharey=True)
    for axes, (direction, curves) in zip(grid, data.items(), strict=True):
        for n, (name, (points, before)) in enumerate(curves.items()):
            axes.plot(*zip(*points, strict=True), marker="o", label=name, color=f"C{n // 2}",
                      linestyle="--" if "causal" in name else "-")  # fmt: skip
            if before:
                axes.plot(*zip(*before, strict=True), color=f"C{n // 2}", **HOLLOW)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(direction, fontsize=9)
        axes.set_ylim(bottom=0)
        _lengths(axes, "best peer's time by ours")
    _legend(figure)
    return figure


def _memory(pyplot: Any, data: Any) -> Any:
    figure, grid = pyplot.subplots(1, len(data), figsize=(8, 3.6), layout="constrained", sharey=True, squeeze=False)
    for axes, (direction, curves) in zip(grid.flat, data.items(), strict=True):
        for runner, points in curves.items():
            lengths, held = zip(*points, strict=True)
            axes.plot(lengths, [n / 1e6 for n in held], marker="o", label=runner, color=COLOURS.get(runner))
        axes.set_title(direction, fontsize=9)
        axes.set_yscale("symlog", linthresh=0.01)
        _lengths(axes, "MB beside inputs and results")
    _legend(figure)
    return figure


def _sweep(pyplot: Any, data: Any) -> Any:
    figure, axes = pyplot.subplots(figsize=(8, 4.6), layout="constrained")
    for n, (name, points) in enumerate(data.items()):
        axes.plot([m / 1024 for m, _ in points], [t for _, t in points], marker="o", label=name, color=f"C{n % 10}",
                  linestyle="--" if name.startswith("backward") else "-")  # fmt: skip
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xlabel("M, KiB")
    _lengths(axes, "time by that of the planned tiles")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


# ---- the script ----------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None, root: Path = record.ROOT) -> int:
    """Write pages and plots, or check them; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a file is not as made")
    options = parser.parse_args(arguments)
    found = load(root / "bench" / "results")
    pictures = plots(found)
    old = []
    for name, (kind, title, data) in pictures.items():
        path = root / PLOTS / f"{name}.svg"
        if not path.exists() or digest(data) not in path.read_text():
            old.append(path)
            if not options.check:
                draw(path, kind, title, data)
    for name in PAGES:
        path = root / name
        text = path.read_text()
        made = page(text, found, {plot: title for plot, (_, title, _) in pictures.items()})
        if made != text:
            old.append(path)
            if not options.check:
                path.write_text(made)
    for path in old:
        print(f"{path.relative_to(root)} {'is not what the records make' if options.check else 'written'}")
    return int(options.check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
