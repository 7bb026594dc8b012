"""docs/gallery: what its pages claim, and that each picture was drawn from the data that its script computes."""

import importlib.util
import re
import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import rawflash as rf
from rawflash.masks import EMPTY, FULL

GALLERY = Path(rf.__file__).parents[1] / "docs" / "gallery"
SVG = "{http://www.w3.org/2000/svg}"


def load(name):
    """A script of the gallery, under a name that nothing else has."""
    spec = importlib.util.spec_from_file_location(f"gallery_{name}", GALLERY / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


make = load("make")
SCRIPTS = {name: load(name) for name in make.NAMES}


@pytest.fixture(scope="module")
def data():
    """What every script computes, or reads from its record."""
    return {name: script.data() for name, script in SCRIPTS.items()}


def test_every_page_has_a_script_and_a_picture():
    assert {path.stem for path in GALLERY.glob("*.md")} == {"index", *make.NAMES}
    index = (GALLERY / "index.md").read_text()
    for name in make.NAMES:
        page = (GALLERY / f"{name}.md").read_text()
        assert f"({name}.svg)" in index and f"```{{figure}} {name}.svg\n:alt: " in page
        assert f"{name}.report" in page and f"{{download}}`{name}.py`" in page


@pytest.mark.parametrize("name", make.NAMES)
def test_a_picture_is_of_its_data(name, data):
    assert make.digest_in(GALLERY / f"{name}.svg") == make.digest(data[name]), "draw it again: docs/gallery/make.py"


@pytest.mark.parametrize("name", make.NAMES)
def test_a_picture_can_be_read(name):
    """On white, small enough to load, no letter below 8 units of a picture at most 360 wide, no date."""
    path = GALLERY / f"{name}.svg"
    text, root = path.read_text(), ElementTree.parse(path).getroot()
    assert path.stat().st_size < 120_000 and "<dc:date>" not in text
    assert float(root.get("viewBox").split()[2]) <= 360
    assert "fill: #ffffff" in root.find(f".//{SVG}path").get("style")
    sizes = [float(size) for size in re.findall(r"(?:font-size: |font: )([0-9.]+)px", text)]
    assert len(sizes) == len(root.findall(f".//{SVG}text")) > 0 and min(sizes) >= 8


def test_a_digest_is_of_the_data_to_five_digits():
    one = {"a": np.array([1.0, 2.0, 0.0]), "b": [{"c": None}, 0.1, True]}
    assert make.digest(one) == make.digest({"a": np.array([1 + 1e-9, 2.0, -1e-14]), "b": [{"c": None}, 0.1, True]})
    others = {"a": one["a"] + 1e-3}, {"a": one["a"][:2]}, {"b": [{"c": 0}, 0.1, True]}, {"b": [{"d": None}, 0.1, True]}
    assert len({make.digest(one), *(make.digest(one | other) for other in others)}) == 5


def test_a_stale_picture_is_found(tmp_path, monkeypatch, capsys):
    for name in make.NAMES:
        (tmp_path / f"{name}.svg").write_text((GALLERY / f"{name}.svg").read_text())
    monkeypatch.setattr(make, "HERE", tmp_path)
    monkeypatch.setattr(make, "module", lambda name: SCRIPTS[name])
    assert not make.main(["--check", "online_softmax", "mask_tiles"])
    svg = tmp_path / "mask_tiles.svg"
    svg.write_text(svg.read_text().replace("sha256 of its data: ", "sha256 of its data: 0"))
    assert make.main(["--check", "online_softmax", "mask_tiles"])
    assert capsys.readouterr().out.endswith(": mask_tiles\n")
    svg.write_text("<svg/>")
    assert make.main(["--check", "mask_tiles"])


@pytest.mark.parametrize("name", make.NAMES)
def test_a_picture_draws(name, data):
    """Where matplotlib is; the pictures themselves are in the repository."""
    pytest.importorskip("matplotlib").use("svg")
    import matplotlib.pyplot as plt

    with plt.rc_context(make.STYLE):
        figure = SCRIPTS[name].picture(data[name], plt)
        plt.close(figure)
    assert figure.axes


# ---- what the pages say


def test_online_softmax(data, capsys):
    x = data["online_softmax"]
    script = SCRIPTS["online_softmax"]
    script.report(x)
    assert len(capsys.readouterr().out.splitlines()) == 1 + script.KEYS // script.BLOCK + 2
    assert x["within 1e-12"]
    assert (np.diff(x["m"]) >= 0).all() and (x["alpha"] <= 1).all() and x["alpha"][0] == 0
    assert (np.diff(x["l"]) < 0).any() and (np.diff(x["lse"]) > 0).all()
    rises = np.flatnonzero(np.diff(x["m"]) > 0) + 1
    assert rises.tolist() == [1, 3, 5] and (np.delete(x["alpha"], [0, 1, 3, 5]) == 1).all()
    out, lse = rf.oracle.attention(*script.problem(), return_lse=True)
    np.testing.assert_allclose(x["mean"][-1], out[0], rtol=0, atol=1e-14)
    np.testing.assert_allclose(x["lse"][-1], lse[0], rtol=0, atol=1e-14)


def test_mask_tiles(data, capsys):
    script = SCRIPTS["mask_tiles"]
    script.report(data["mask_tiles"])
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(script.EXAMPLES)
    n = script.TILE
    for name, x in data["mask_tiles"].items():
        mask, rows, q_offset = script.EXAMPLES[name]
        q, k = np.zeros((rows, 1)), np.zeros((script.T, 1))
        P = rf.oracle.attention(q, k, np.eye(script.T), mask=mask, q_offset=q_offset)
        np.testing.assert_array_equal(x["visible"], P > 0, err_msg=name)
        seen = x["visible"].reshape(rows // n, n, -1, n).mean(axis=(1, 3))
        assert (seen[x["kinds"] == EMPTY] == 0).all() and (seen[x["kinds"] == FULL] == 1).all(), name
        visited = (x["kinds"] != EMPTY).sum()
        assert x["moved"] == 2 * visited * n * script.D + 2 * rows * script.D, name


def test_gradient_flow(data, capsys):
    script, x = SCRIPTS["gradient_flow"], data["gradient_flow"]
    script.report(x)
    assert "row 9; its target is the value of key 6" in capsys.readouterr().out
    for from_differences, from_equations in script.check_gradients().values():
        assert from_differences < 1e-8 and from_equations < 1e-12
    dweights, dsinks, distances = script.check_options()
    assert max(distances) < 1e-8 and dsinks.shape == (1,)
    assert dweights.argmin() == script.BACK
    np.testing.assert_allclose(x["dS"].sum(axis=1), 0, atol=1e-12)
    np.testing.assert_allclose(x["gamma"], (x["P"] * x["dP"]).sum(axis=1), atol=1e-12)
    assert x["dP"][9].argmin() == 6 and x["dS"][9].argmax() == x["P"][9].argmax() == 2
    targets = np.maximum(np.arange(script.T) - script.BACK, 0)
    assert (x["later"].argmax(axis=1) == targets).all() and (x["later"].max(axis=1) > 0.9).all()


def test_the_record_of_numerics_is_what_is_measured_here(data):
    """To a factor: the last digits are the machine's. What has no rounding in it is equal."""
    script, record = SCRIPTS["numerics"], data["numerics"]
    for dtype in script.DTYPES:
        for name, n, keys, scale in (("keys", 1, 256, 1), ("scales", 3, 1024, 16)):
            here, there = script.largest_errors(dtype, keys, scale), record[name][dtype][n]
            assert set(here) == set(there)
            for part in here:
                exact = part in ("score", "out")
                assert here[part] == pytest.approx(there[part], rel=1e-9 if exact else 2), (dtype, keys, part)
                assert exact or here[part] > there[part] / 3
    for largest, (with_m, without) in zip(script.LARGEST, record["maximum"], strict=True):
        assert with_m < 1e-6
        assert (without is None) == np.isnan(script.without_maximum(largest)[1]), largest


def test_numerics(data, capsys):
    script, x = SCRIPTS["numerics"], data["numerics"]
    script.report(x)
    script.report_maximum(x)
    rows = len(script.DTYPES) * (len(script.KEYS) + len(script.SCALES) - 1) + len(script.LARGEST)
    assert len(capsys.readouterr().out.splitlines()) == rows + 2
    for dtype in script.DTYPES:
        assert max(script.ratios(dtype).values()) <= 1
        assert all(row["tiled"] < row["allowed"] for row in x["keys"][dtype] + x["scales"][dtype])
        if dtype != "float32":
            tiled = [row["tiled"] for row in x["keys"][dtype]]
            assert all(later < earlier for earlier, later in pairwise(tiled))
            assert x["scales"][dtype][-1]["dense"] > x["scales"][dtype][-1]["allowed"]


def test_train_through_lse(data, capsys):
    script, x = SCRIPTS["train_through_lse"], data["train_through_lse"]
    script.report(x)
    assert "\n 300     0.001    21.86" in capsys.readouterr().out
    free, held = x.values()
    assert free[0].tolist() == held[0].tolist()  # the same start
    assert free[-1, 3] == held[-1, 3] == script.TOKENS  # both find every target
    assert free[-1, 0] < held[-1, 0] < 0.05  # what it costs
    assert held[-1, 1] < 0.5 * free[-1, 1] and held[-1, 2] < 0.5 * free[-1, 2]  # what it gives
    assert (np.diff(free[50:, 1]) > 0).all() and (np.diff(held[100:, 1]) < 0).all()
    assert script.check_gradient() < 1e-8
    assert max(script.check_merge()) < 1e-12
    out, dq, dk, dv = script.check_merge(through_lse=False)
    assert max(out, dv) < 1e-12 and min(dq, dk) > 0.1
