"""docs/check.py on small sites: what it must find, and what it must not."""

import importlib.util
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "docs" / "check.py"
spec = importlib.util.spec_from_file_location("check", SOURCE)
check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check)

GOOD = {
    "index.html": '<link rel="stylesheet" href="_static/a.css"><a href="sub/b.html#there">b</a><a href="#here">x</a>'
                  '<p id="here">'
                  '<a href="https://example.org/">away</a><link rel="canonical" href="https://example.org/index.html">',
    "sub/b.html": '<h1 id="there">b</h1><a href="../index.html">up</a><img src="../a%20b.svg">',
    "_static/a.css": "p { background: url(data:image/png;base64,AA) }",
    "a b.svg": "<svg/>",
}  # fmt: skip


def site(folder, **changed):
    for name, text in (GOOD | changed).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return check.problems(folder)


def test_a_good_site(tmp_path):
    assert site(tmp_path) == []


@pytest.mark.parametrize("name, text, word", [
    ("sub/b.html", '<h1 id="elsewhere">', "no such anchor"),
    ("index.html", '<a href="gone.html">', "not there"),
    ("index.html", '<a href="#gone">', "no such anchor"),
    ("index.html", '<img src="gone.svg">', "not there"),
    ("index.html", '<script src="https://example.org/x.js"></script>', "loads https"),
    ("index.html", '<link rel="stylesheet" href="//example.org/x.css">', "loads //example"),
    ("_static/a.css", "@import url(https://example.org/x.css);", "another host"),
    ("_static/a.css", "p { background: url('//example.org/x.png') }", "another host"),
])  # fmt: skip
def test_what_it_finds(name, text, word, tmp_path):
    found = site(tmp_path, **{name: text})
    assert len(found) == 1 and word in found[0]


def test_its_exit_status(tmp_path, capsys):
    site(tmp_path)
    assert check.main(str(tmp_path)) == 0
    (tmp_path / "sub/b.html").unlink()
    assert check.main(str(tmp_path)) == 1 and "sub/b.html" in capsys.readouterr().out


def test_a_site_without_pages_is_a_problem(tmp_path):
    assert check.main(str(tmp_path)) == check.main(str(tmp_path / "gone")) == 1
