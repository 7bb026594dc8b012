"""bench/traffic.py without a GPU: its points, predictions, ncu's table, fits, and the report of a record."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from bench import traffic as bench  # noqa: E402

RECORD = bench.RESULTS / "gpu-traffic-2026-11-21.json"


@pytest.fixture(scope="module")
def rows():
    return [row for _, row in bench.rows_of(bench.h200())]


@pytest.fixture
def measured(rows):
    """A record as an H200 would give one if it moved 1.5 times what the forms say, a hundredth of it to DRAM."""
    made = []
    for row in rows:
        kernels = [{"name": name} | dict.fromkeys(bench.METRICS, 0) | {"sm_read": 3 * n // 2, "dram_read": n // 100}
                   for name, n in row["shares"].items()]  # fmt: skip
        sums = {f"{b}_bytes": sum(k[m] for k in kernels for m in k if m.startswith(b)) for b in bench.BORDERS}
        made.append(row | sums | {"kernels": kernels, "ms": 1.0})
    return {"date": "2027-01-01", "gpu": "H200", "missing": [], "rows": json.loads(json.dumps(made))}


# ---- points --------------------------------------------------------------------------------------------------


def test_tiles_follow_M(rows):
    """The outer block has M/(4d) or M/(6d) rows, and so has the inner one: both loop orders are seen."""
    for row in rows:
        M, most = row["sram"] // bench.ITEM, bench.BLOCKS[row["direction"]] * row["d"]
        if row["simt"]:
            outer = row["br"] if (row["algorithm"], row["direction"]) == ("fa2", "forward") else row["bc"]
            assert M // most // 16 * 16 == outer
            assert row["family"] == "simt" and row["smem_bytes"] <= row["sram"]
            assert row["T"] % row["br"] == row["T"] % row["bc"] == 0
            assert row["br"] == row["bc"] or row["direction"] == "forward"
    assert Counter(sweep for row in rows for sweep in row["sweeps"]) == {"M": 24, "T": 15, "d": 15, "family": 16}


def test_points_say_enough_for_fits(rows):
    """The forms themselves have exponents within 0.05 of T^2 d^2 / M at these points."""
    found = bench.fits(rows)
    assert {(sweep, series) for sweep, series, _, _ in found} == {(s, p) for s in bench.SWEEPS for p in bench.SERIES}
    for sweep, _, _, slopes in found:
        assert slopes["predicted"] == pytest.approx(bench.SWEEPS[sweep], abs=0.05)
        assert slopes["sm"] is slopes["dram"] is None  # not measured


def test_rows_know_their_points():
    for point, row in bench.rows_of(bench.h200()):
        assert bench.point_of(json.loads(json.dumps(row))) == point


# ---- predictions ---------------------------------------------------------------------------------------------


def test_shares_by_hand(rows):
    """Steps of the deterministic backward pass: two matrices in either loop; three with dQ added."""
    matrix = bench.HEADS * 1920 * 128 * bench.ITEM
    row = bench.HEADS * 1920 * bench.ITEM
    at = {r["deterministic"]: r for r in rows if (r["algorithm"], r["direction"], r["sram"]) ==
          ("fa2", "backward", 192 * bench.KIB) and r["d"] == 128}  # fmt: skip
    two, one = at[True]["shares"], at[False]["shares"]
    assert two["fa2_backward_keys"] == (2 * 30 + 4) * matrix + 2 * 30 * row
    assert two["fa2_backward_queries"] == (2 * 30 + 4) * matrix + row  # Q, dO, O; dQ
    assert one["fa2_backward_keys"] == (3 * 30 + 4) * matrix + 2 * 30 * row
    assert one["row_deltas"] == two["row_deltas"] == 2 * matrix + row
    assert all(sum(r["shares"].values()) == r["predicted_bytes"] for r in rows)


def test_numpy_tiled_counts_what_is_predicted(rows):
    for row in rows:
        if row["T"] < 1000:
            assert bench.count_with_numpy(row) == row["predicted_bytes"]


def test_copies_read_sectors_twice_where_rows_are_out_of_step():
    assert bench.sectors_per_byte(64, 68, 4) == bench.sectors_per_byte(128, 132, 4) == 1.5
    assert bench.sectors_per_byte(64, 72, 4) == bench.sectors_per_byte(64, 64, 4) == 1.0
    assert bench.sectors_per_byte(64, 66, 8) == 1.5


def test_what_was_counted_is_what_copies_read():
    """K, V and Q of FA2's forward pass, with 1.5 bytes read for each: to the byte of what the H200 counted."""
    found = 0
    for row in bench.read(RECORD)["rows"]:
        if (row["algorithm"], row["direction"], row["family"]) == ("fa2", "forward", "simt"):
            matrix = row["heads"] * row["T"] * 64 * 4
            blocks = -(-row["T"] // row["br"])
            assert row["kernels"][0]["sm_read"] == (2 * blocks + 1) * matrix * 3 // 2
            found += 1
        assert 0.96 < row["sm_bytes"] / row["sectors_bytes"] < 1.08
    assert found == 6


# ---- counters ------------------------------------------------------------------------------------------------


def test_ncu_table():
    """Names, units, kernels; numbers with commas, scaled or missing; what is said before it."""
    read, dram = "l1tex__m_xbar2l1tex_read_sectors_mem_lg_op_ld.sum", "dram__bytes_read.sum"
    text = "\n".join([
        "==PROF== Connected", '"ID","Kernel Name","' + read + '","' + dram + '"', '"","","sector","Kbyte"',
        '"0","row_deltas","1,000","2"', '"1","void fa2_forward(Call)","n/a","3.5"', "==PROF== Disconnected",
    ])  # fmt: skip
    kernels, said = bench.kernels_of(text)
    assert [kernel["name"] for kernel in kernels] == ["row_deltas", "fa2_forward"]
    assert kernels[0][read] == 32000 and kernels[0][dram] == 2000
    assert kernels[1][read] is None and kernels[1][dram] == 3500
    assert said == ["==PROF== Connected"]
    assert bench.kernels_of("") == ([], [])


def test_counts_of_a_call():
    names = ("row_deltas", "fa2_backward_keys", "fa2_backward_queries")
    kernels = [{"name": name} | {m: 1.0 for ms, _ in bench.METRICS.values() for m in ms} for name in names * 2]
    calls = bench.calls_of(kernels, "fa2_backward_queries")
    assert [len(call) for call in calls] == [3, 3]
    row = {}
    bench.add_counts(row, calls[0])
    assert (row["sm_bytes"], row["l2_bytes"], row["dram_bytes"]) == (12, 9, 6)  # sm_add has two metrics
    assert [kernel["sm_add"] for kernel in row["kernels"]] == [2, 2, 2]
    calls[1][0]["dram__bytes_read.sum"] = None
    bench.add_counts(row, calls[1])
    assert row["dram_bytes"] is None and row["sm_bytes"] == 12


def test_metrics_are_asked_for_once():
    command = bench.ncu_command("ncu", "log")
    asked = command[command.index("--metrics") + 1].split(",")
    assert len(asked) == len(set(asked)) == sum(len(names) for names, _ in bench.METRICS.values())


class Machine:
    """Processes as on a machine with a GPU: times, and ncu's table with a sector for each kernel's every metric."""

    def __init__(self, rows, silent=()):
        self.rows, self.silent, self.limits = rows, silent, []

    def __call__(self, command, seconds, output):
        self.limits.append(seconds)
        output.write_text("")
        if "--time" in command:
            lines = ["ABOUT " + json.dumps({"date": "2027-01-01", "gpu": "H200"})]
            output.write_text("\n".join(lines + ["ROW " + json.dumps(row | {"ms": 1.0}) for row in self.rows]) + "\n")
            return 0
        which = command[command.index("--count") + 2]
        if which in self.silent:
            return 1
        metrics = command[command.index("--metrics") + 1].split(",")
        if which == "copies":
            names = ["copies"] * len(bench.COPIES)
        else:
            run = bench.PASSES[int(which)]
            here = [row for row in self.rows if bench.point_of(row).run == run]
            assert command[-1] == str(len(here))
            names = [name for row in here for name in dict.fromkeys([*row["shares"], run.last])]
        lines = [["ID", "Kernel Name", *metrics], ["", "", *[""] * len(metrics)]]
        lines += [[str(n), name + "(Call)", *["1"] * len(metrics)] for n, name in enumerate(names)]
        text = "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)
        Path(command[command.index("--log-file") + 1]).write_text("==PROF== Connected\n" + text + "\n")
        return 0


def run_measure(rows, tmp_path, monkeypatch, **machine):
    machine = Machine(rows, **machine)
    monkeypatch.setattr(bench, "run_limited", machine)
    monkeypatch.setattr(bench, "find_ncu", lambda: "ncu")
    monkeypatch.setattr(bench, "COMPILERS", 0)
    out = tmp_path / "results" / "traffic-2027-01-01.json"
    missing = bench.measure(tmp_path, out, time.monotonic() + 300)
    assert max(machine.limits) <= 300
    return missing, json.loads(out.read_text())


def test_measure(rows, tmp_path, monkeypatch):
    missing, record = run_measure(rows, tmp_path, monkeypatch)
    assert missing == record["missing"] == []
    assert len(record["rows"]) == len(rows) and record["gpu"] == "H200"
    for row in record["rows"]:
        assert row["sm_bytes"] == 4 * bench.SECTOR * len(row["kernels"])
        assert row["kernels"][-1]["name"] == bench.point_of(row).run.last
    assert [(c["pitch"], c["sm_read"]) for c in record["copies"]][:3] == [(256, 32), (272, 32), (288, 32)]
    assert bench.report(Path("x.json"), record)


def test_measure_says_what_is_missing(rows, tmp_path, monkeypatch):
    missing, record = run_measure(rows, tmp_path, monkeypatch, silent=("1", "copies"))
    assert [lack["what"] for lack in missing] == ["counts of FA1 forward: 0 of 15 calls", "copies"]
    assert "Missing: counts of FA1 forward" in bench.report(Path("x.json"), record)


# ---- fits and reports ----------------------------------------------------------------------------------------


def test_exponent():
    x = [1, 2, 4, 8]
    assert bench.exponent(x, [3 * n**-1.5 for n in x]) == pytest.approx(-1.5)
    assert bench.exponent(x, [5.0] * 4) == pytest.approx(0)
    assert bench.exponent(x, [1, 2, None, 4]) is None
    assert bench.exponent([1, 2, 2], [1, 2, 2]) is None


def test_report(measured):
    for _, _, _, slopes in bench.fits(measured["rows"]):
        assert slopes["sm"] == pytest.approx(slopes["predicted"], abs=1e-6)
        assert slopes["dram"] == pytest.approx(slopes["predicted"], abs=1e-3)
    text = bench.report(Path("traffic-2027-01-01.json"), measured)
    assert "| FA2 forward | M | 32, 64, 96, 128, 160, 192 | -1 | -0.98 | -0.98 | - | -0.98 |" in text
    assert "| forward, FA1 / FA2, M = 128 KiB | 1.50 | 1.50 | - | 1.50 |" in text
    assert "traffic.svg" in text
    del measured["rows"][3]["sm_bytes"]  # not counted
    assert "| FA2 forward | M | 32, 64, 96, 128, 160, 192 | -1 | -0.98 | - | - | -0.98 |" in bench.report(
        Path("x.json"), measured
    )


def test_plot(measured, tmp_path):
    pytest.importorskip("matplotlib")
    texts = []
    for name in ("one.svg", "two.svg"):
        bench.draw(measured, tmp_path / name)
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]  # the same bytes from the same record
    assert bench.title_of(measured) in texts[0] and "<text" in texts[0]
    assert len(texts[0]) < 100_000


def test_page_is_of_the_newest_record():
    assert bench.write_report(check_only=True), "python -m bench.traffic --report"


def test_a_check_writes_nothing(measured, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    for day, name in (("2026-12-31", "gpu-traffic"), ("2027-01-01", "traffic")):
        (tmp_path / f"{name}-{day}.json").write_text(json.dumps(measured))
    assert bench.newest().name == "traffic-2027-01-01.json"
    assert not bench.write_report(check_only=True) and not (tmp_path / "figures").exists()
    assert not bench.write_report(check_only=False)
    assert bench.write_report(check_only=True)
    measured["rows"][0]["ms"] = 2.0
    (tmp_path / "traffic-2027-01-01.json").write_text(json.dumps(measured))
    assert not bench.write_report(check_only=True)


@pytest.mark.parametrize("flags", [["--check"], ["--out", "made.json"]])
def test_commands_that_would_write_over_a_record(flags, tmp_path):
    (tmp_path / "made.json").write_text("{}")
    command = [sys.executable, "-m", "bench.traffic", *flags]
    root = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 2 and done.stderr and (tmp_path / "made.json").read_text() == "{}"
