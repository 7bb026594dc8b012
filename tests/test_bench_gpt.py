"""bench.gpt: a record of what the example prints."""

import pytest

from bench import gpt, record, report

EXAMPLE = """
import sys
print("options", *sys.argv[1:])
if "--plot" in sys.argv:
    open(sys.argv[sys.argv.index("--plot") + 1], "w").write("a picture")
print("last line")
"""


def test_record(monkeypatch, tmp_path):
    path = tmp_path / "example.py"
    path.write_text(EXAMPLE)
    monkeypatch.setattr(gpt, "EXAMPLE", path)
    assert gpt.main([str(tmp_path / "a.json"), "--plot", str(tmp_path / "loss.svg"), "--steps", "7"]) == 0
    made = record.read(tmp_path / "a.json")
    assert made["schema"] == gpt.SCHEMA and made["source_sha256"] == record.source_digest() and made["date"]
    assert made["train"][0].startswith("options --steps 7 --sample 200 --checkpoint ") and made["train_seconds"] >= 0
    assert made["train"][1:] == ["last line"]
    assert made["compare"] == ["options --compare", "last line"]
    assert (tmp_path / "loss.svg").read_text() == "a picture"
    assert not report.load(tmp_path)["cpu"].rows  # no table is made of it


def test_an_example_that_fails_leaves_no_record(monkeypatch, tmp_path):
    path = tmp_path / "example.py"
    path.write_text("raise SystemExit(3)")
    monkeypatch.setattr(gpt, "EXAMPLE", path)
    with pytest.raises(gpt.subprocess.CalledProcessError):
        gpt.main([str(tmp_path / "a.json")])
    assert not (tmp_path / "a.json").exists()


def test_the_example_is_there():
    assert gpt.EXAMPLE.exists()
