"""Measured figures on the pages come from records, by examples that read them or by ``bench.report``; none is prose."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
PAGES = [page for page in PAGES if "_build" not in page.parts and "figures" not in page.parts]  # made by bench.traffic
NUMBER = r"\d+(?:[.,]\d+)*"
FIGURE = re.compile(
    rf"{NUMBER} ?(?:%|(?:us|µs|ms|ns|min|[TG]B/s|[TG]?FLOP/s)\b)|{NUMBER} times (?:as|the)\b|\b\d+\.\d+ of\b"
)
OURS_TO_CHOOSE = {  # and others' and reckoned ones, by page
    "algorithms/standard.md": ["0.86 µs", "3.74 µs"],  # as a paper reckons
    "benchmarks.md": ["2 ms"],  # how long a call is captured
    "caches.md": ["4 TB/s", "0.27 ms"],  # an example
    "kernels/double.md": ["67 TFLOP/s"],  # NVIDIA's
    "kernels/sm90.md": ["1000 times as", "10 times as"],  # what scores are made of
    "mla.md": ["3.4 times the", "989 TFLOP/s", "4.8 TB/s"],  # counted; NVIDIA's
    "README.md": ["1 %"],  # of the table below it
}


def prose(text):
    """Its lines outside of code, and of what bench.report made."""
    text = re.sub(r"<!-- bench:begin.*?<!-- bench:end -->", "", text, flags=re.S)
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def figures(text):
    return [match.group() for match in FIGURE.finditer(prose(text))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_figures_come_from_records(page):
    name, text = page.relative_to(ROOT).as_posix().removeprefix("docs/"), page.read_text()
    assert [figure for figure in figures(text) if figure not in OURS_TO_CHOOSE.get(name, [])] == []


@pytest.mark.parametrize("line", [
    "4 % slower", "reach 29 to 40 TFLOP/s", "17.6 us for B1", "2 to 3 us", "1.05 to 1.5 times as fast", "4.25 TB/s",
    "0.78 to 0.85 of FlashAttention-4", "196 ms", "1%", "| a | 196 ms |",
])  # fmt: skip
def test_figures_are_found(line):
    assert figures(line)
    assert not figures(f"```text\n{line}\n```\n")
    assert not figures(f"<!-- bench:begin x -->\n{line}\n<!-- bench:end -->\n")


def test_what_is_allowed_is_there():
    for name, allowed in OURS_TO_CHOOSE.items():
        text = (ROOT / ("" if name == "README.md" else "docs") / name).read_text()
        assert set(allowed) <= set(figures(text)), name
