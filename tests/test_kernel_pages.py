"""docs/kernels and docs/reading.md: pictures are those of the plans, and the files that a page names are there."""

import re
import runpy
from pathlib import Path

import pytest

import rawflash as rf

ROOT = Path(rf.__file__).resolve().parents[1]
DOCS = ROOT / "docs"
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the pages are in a checkout only")


def test_pictures_are_those_that_the_script_draws(capsys):
    draw = runpy.run_path(str(DOCS / "kernels" / "draw.py"))
    assert not draw["main"](check=True), capsys.readouterr().out
    assert {path.stem for path in (DOCS / "kernels").glob("*.svg")} == set(draw["PICTURES"])
    pages = "".join(path.read_text() for path in (DOCS / "kernels").glob("*.md"))
    assert all(f"({name}.svg)" in pages for name in draw["PICTURES"])


#: Below which folder the files of a section of reading.md are.
FOLDERS = {
    "The mathematics": "", "From a call to a kernel": "", "numpy_tiled": "backends/numpy_tiled",
    "numba_cpu": "backends/numba_cpu", "numba_cuda": "backends/numba_cuda", "cupy_raw": "backends/cupy_raw/cuda",
}  # fmt: skip


def test_files_of_the_reading_order_exist():
    sections = re.split(r"^## ", (DOCS / "reading.md").read_text(), flags=re.MULTILINE)[1:]
    named = set()
    for section in sections:
        folder = FOLDERS.get(section.splitlines()[0].split(":")[0])
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
            for name in re.findall(r"`([\w./]+)`", row):
                path = (ROOT / "rawflash" / folder / name).resolve()
                assert path.is_file(), name
                named.add(path)
    kernels = {path for path in (ROOT / "rawflash" / "backends" / "cupy_raw" / "cuda").glob("*.cu")}
    kernels |= set((ROOT / "rawflash" / "backends" / "numpy_tiled").glob("*ward.py"))
    assert {path.name for path in kernels - named} <= {"side_gradients.cu"}  # its twin in numba_cuda is named
