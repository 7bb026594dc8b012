"""bench.reliability where there is no GPU: drawing, the reference, failures and the exit status, tables."""

import json
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from bench import draws, record, reliability, report
from rawflash import sm90, tiling
from rawflash.hardware import chip, kernels_on
from rawflash.problem import Problem

CPU = draws.Where("cpu", "numpy_tiled")
SMALL = {"long": (9, 20), "short": (3, 9), "few": (1, 3)}


@pytest.fixture
def small(monkeypatch):
    """Sizes for NumPy's loops."""
    pytest.importorskip("torch")
    monkeypatch.setattr(sm90, "WGMMA_FEWEST", sm90.WGMMA_FEWEST)  # which a run here sets
    monkeypatch.setattr(draws, "ROWS", SMALL)
    monkeypatch.setattr(draws, "LONGEST_KEYS", 24)


@pytest.mark.parametrize("part", ["forward", "backward", "long"])
def test_drawn_calls_are_those_of_the_seed(part):
    some = [draws.draw(kind, n, 5).words() for kind in draws.kinds(part, 5) for n in range(2)]
    assert some == [draws.draw(kind, n, 5).words() for kind in draws.kinds(part, 5) for n in range(2)]
    assert some != [draws.draw(kind, n, 6).words() for kind in draws.kinds(part, 6) for n in range(2)]
    assert len(set(some)) == len(some)


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_everything_is_drawn(part):
    """All that is asked for, in 2,000 calls of kernels of sm_90."""
    calls = [draws.draw(kind, n, 0) for kind in draws.kinds(part, 0) for n in range(reliability.SHAPES[part])]
    found = {name for x in calls for name in draws.traits(x)}
    both = {"bfloat16", "float16", "causal", "window", "q_offset", "lengths", "packed", "sinks", "grouped heads",
            "one key head", "d != dv", "above 128 columns", "T = 1", "Tq != Tk", "T % 128 = 64", "(B, T, H, d)",
            "rows apart", "NaN in padding", "tables on the GPU", "softcap", "ALiBi",
            "more than 132 blocks of 128 rows"}  # fmt: skip
    assert found == both | ({"dlse", "deterministic"} if part == "backward" else set())
    row = replace(kernels_on("cupy_raw", chip("sm_90")), processors=132)
    families = [tiling.plan_tiles(problem_of(x), row, part).family for x in calls[::10]]
    assert families.count("wgmma") / len(families) * len(calls) > 2000


def test_pairs_are_drawn():
    """Of calls that are planned as long ones all have rows of others, but for narrow ones in a fixed order; more than
    half of those with 128 columns are pairs, under a mask and without one, in a fixed order and in any. Outside only
    those in a fixed order are."""
    row = replace(kernels_on("cupy_raw", chip("sm_90")), processors=132)
    calls = [draws.draw(kind, n, 0) for kind in draws.kinds("long", 0) for n in range(reliability.SHAPES["long"])]

    def plans():
        bands = {"none": {}, "causal": {"causal": True}, "right": {"window": (None, 5)}}
        problems = [replace(problem_of(x), **bands[x.kind.band]) for x in calls]
        return [dict(tiling.plan_tiles(x, row, "backward").constants) for x in problems]

    with reliability.planned_as_long():
        found = plans()
    for x, constants in zip(calls, found, strict=True):
        single = x.kind.deterministic and x.kind.d > 64 and not constants["PAIRED"]
        assert constants["FUSED"] != single
    pairs = [x for x, constants in zip(calls, found, strict=True) if constants["PAIRED"]]
    assert len(pairs) > sum(x.kind.d > 64 for x in calls) / 2
    masks = sum(x.kind.band != "none" for x in pairs)
    assert masks > 100 and len(pairs) - masks > 50
    assert 50 < sum(x.kind.deterministic for x in pairs) < len(pairs) - 50
    outside = zip(calls, plans(), strict=True)
    assert not any(constants.get("PAIRED") for x, constants in outside if not x.kind.deterministic)


def problem_of(x):
    """As the checker would make it, for what decides on the kernel; all shapes are enough work."""
    k, sequences = x.kind, 1 if x.cu_seqlens is None else len(x.cu_seqlens[0]) - 1
    longest = [max(np.diff(cu)) for cu in x.cu_seqlens] if x.cu_seqlens and not x.on_device else (x.Tq, x.Tk)
    heads = 132 * -(-x.Hkv // 132)
    return Problem(B=x.B * sequences, Hq=heads * x.group, Hkv=heads, Tq=int(longest[0]), Tk=int(longest[1]), d=k.d,
                   dv=k.dv, dtype=k.dtype, backend="cupy_raw", softcap=x.options.get("softcap"), alibi=k.alibi,
                   varlen=k.packed, ragged=k.lengths, deterministic=k.deterministic, sinks=bool(k.sinks),
                   scale=x.options.get("scale", k.d**-0.5))  # fmt: skip


@pytest.mark.parametrize("part", ["forward", "backward", "long"])
def test_right_results_are_so_by_both_references(small, part):
    for kind in draws.kinds(part, 1, 8):
        kind = replace(kind, d=8, dv=16)
        row = reliability.soak(CPU, kind, 2, 1, oracle=True)
        assert row["failures"] == [] and row["shapes"] == 2
        assert row["oracle"]["apart"] < reliability.APART and 0.9 < row["oracle"]["bound_by_oracle"] < 1.2
        assert all(0 <= ratio <= 1 for ratio, _ in row["worst"].values())


@pytest.mark.parametrize("wrong", ["more", "nan", "dtype"])
def test_a_wrong_result_is_a_failure(small, monkeypatch, wrong, tmp_path, capsys):
    right = reliability.call

    def call(made, backward):
        found = right(made, backward)
        if wrong == "dtype":
            return found | {"out": found["out"].float()}
        found["lse"][..., 0] += 0.1 if wrong == "more" else float("nan")
        return found

    monkeypatch.setattr(reliability, "call", call)
    monkeypatch.setattr(reliability, "kinds", lambda *given: [
        replace(kind, d=8, dv=8, packed=False, lengths=False, band="none") for kind in draws.kinds(*given)
    ])  # fmt: skip
    path = tmp_path / "found.json"
    given = ["--device", "cpu", "--processes", "0", "--part", "forward", "--sets", "1", "--shapes", "2"]
    assert reliability.main([*given, "--record", str(path)]) == reliability.EXIT_FAILED
    made = record.read(path)
    failures = made["rows"][0]["failures"]
    assert made["summary"]["forward"]["failures"] == len(failures) and "FAILED forward/0" in capsys.readouterr().out
    assert {failure["shape"] for failure in failures} == {0, 1} and all("call" in failure for failure in failures)
    monkeypatch.setattr(reliability, "call", right)
    assert reliability.main([*given, "--shape", "1"]) == 0


def test_other_bits_are_counted(small, monkeypatch):
    import rawflash as rf

    monkeypatch.setitem(reliability.REPEATED, "tiny", dict(dtype="bfloat16", d=8, causal=True))
    usual, attention, calls = reliability.usual, rf.attention, []
    monkeypatch.setattr(reliability, "usual", lambda *a, **how: usual(*a, **how, B=1, Hq=2, Hkv=1, T=9))
    for way in reliability.REPEATS:
        assert reliability.repeats(CPU, "tiny", way, 2)["failures"] == []

    def now_and_then(*arrays, **options):
        found = attention(*arrays, **options)
        calls.append(1)
        if len(calls) == 3:
            found[1].mul_(1.001)
        return found

    monkeypatch.setattr(rf, "attention", now_and_then)
    row = reliability.repeats(CPU, "tiny", "forward", 4)
    assert row["other_bits"] == 1 and row["failures"]


def test_families_of_scores(small):
    row = reliability.accuracy(CPU, "bfloat16", 16, 64, True)
    assert row["failures"] == [] and set(row["families"]) == set(reliability.FAMILIES)
    row = reliability.gradients(CPU, "float16", 16, 24, False)
    assert row["failures"] == [] and set(row["families"]) == set(reliability.GRADIENT_FAMILIES)


def test_draws_of_gradients_are_pooled(monkeypatch):
    """Of two draws the errors together, and of ours from cuDNN's out what each says."""
    said = iter([(3.0, 4.0, 4.0), (4.0, 3.0, 6.0)])  # ours, cuDNN's, ours from cuDNN's out

    def one(*_):
        numbers = dict(zip(("rawflash", "cudnn", "same_out"), next(said), strict=True))
        by = {who: {"largest": rms + 1, "rms": rms, "by_bound": rms / 10} for who, rms in numbers.items()}
        return {"out": {who: by[who] for who in ("rawflash", "cudnn")}, "dq": by, "dk": by, "dv": by}

    monkeypatch.setattr(reliability, "_gradients", one)
    row = reliability.gradients(CPU, "float16", 16, 24, False, families=["normal"], draws=2)
    dq = row["families"]["normal"]["dq"]
    assert dq["rawflash"] == {"largest": 5.0, "rms": 12.5**0.5, "by_bound": 0.4} and row["draws"] == 2
    assert dq["rms_by_cudnn"] == 1.0 and dq["largest_by_cudnn"] == 1.0
    assert dq["rms_by_cudnn_of_the_same_out"] == round(26**0.5 / 12.5**0.5, 3)
    assert dq["rms_by_cudnn_of_the_same_out_by_draw"] == [1.0, 2.0]
    assert "rms_by_cudnn_of_the_same_out" not in row["families"]["normal"]["out"]
    assert [f["what"] for f in row["failures"]] == []
    said = iter([(1.6, 1.0, 1.0)])
    row = reliability.gradients(CPU, "float16", 16, 24, False, families=["normal"], draws=1)
    assert [f["what"] for f in row["failures"]] == [f"{n}: rms_by_cudnn is 1.6" for n in ("out", "dq", "dk", "dv")]


def test_jobs_that_are_not_run_are_no_success(small, tmp_path):
    path = tmp_path / "found.json"
    given = ["--device", "cpu", "--processes", "0", "--part", "forward", "--sets", "1", "--record", str(path)]
    assert reliability.main([*given, "--seconds", "-1"]) == reliability.EXIT_FAILED
    assert record.read(path)["not_run"] == ["forward/0"]
    assert reliability.main(["--only", "nothing"]) == reliability.EXIT_USAGE


def test_processes_that_are_lost_are_replaced(monkeypatch):
    """A process that ended, one that lost the GPU, one that does not end its job: the other jobs are done."""
    made = []

    class Worker:
        def __init__(self, where):
            made.append([])

        def begin(self, job):
            made[-1].append(job.name)
            future = Future()
            if job.name == "ended":
                future.set_exception(OSError("gone"))
            elif job.name != "stuck":
                future.set_result({"name": job.name, "failures": []} | ({"lost": True} if job.name == "lost" else {}))
            return future

        def kill(self):
            made[-1].append("killed")

        def leave(self, wait):
            made[-1].append("left")

    monkeypatch.setattr(reliability, "Worker", Worker)
    rows, jobs = [], [reliability.Job(name, "soak") for name in ("a", "ended", "lost", "b", "stuck", "c")]
    reliability.share(CPU, jobs, 1, 1e30, 0.1, rows.append)
    assert [row["name"] for row in rows] == ["a", "ended", "lost", "b", "stuck", "c"]
    assert [len(row["failures"]) for row in rows] == [0, 1, 0, 0, 1, 0] and rows[4]["stuck"]
    assert made == [["a", "ended", "killed"], ["lost", "killed"], ["b", "stuck", "killed"], ["c", "left", "left"]]


def test_tables(tmp_path):
    soaked = {"served": {"cupy_raw.fa2_forward, wgmma": 30, "cupy_raw.fa2_forward, mma": 2},
              "worst": {"out": [0.5, 3], "lse": [0.25, 1]}, "failures": [], "counts": {}, "seconds": 1.0}  # fmt: skip
    error = {"largest": 1e-3, "rms": 1e-4, "by_bound": 0.4}
    line = {"rawflash": error, "followed": error, "cudnn": error | {"largest": 5e-4}, "rms_by_cudnn": 1.25,
            "largest_by_cudnn": 2.0}
    by = {"rawflash": error, "cudnn": error, "rms_by_cudnn": 0.9, "largest_by_cudnn": 1.1}
    case = {"dtype": "bfloat16", "d": 64, "T": 4096, "causal": True}
    rows = [
        {"name": "forward/0"} | soaked, {"name": "forward/1"} | soaked,
        {"name": "repeats/forward, d = 64", "repeats": 10000, "other_bits": 0} | soaked,
        {"name": "accuracy/a", "case": case, "families": {"normal": line}, "failures": []},
        {"name": "gradients/a", "case": case, "families": {"normal": {n: by for n in ("out", "dq", "dk", "dv")}},
         "failures": []},
        {"name": "redo/a", "case": case | {"H": 16}, "us": {"none": [1, 1000, 2], "almost all": [1, 2500, 3]},
         "by_none": {"none": 1.0, "almost all": 2.5}, "failures": []},
    ]  # fmt: skip
    made = {"schema": reliability.SCHEMA, "device": "gpu", "gpu": "NVIDIA H200", "date": "2026-01-02", "driver": "580",
            "commit": "0" * 12, "source_sha256": "0", "versions": {"torch": "2.11"}, "rows": rows}  # fmt: skip
    folder = tmp_path / "results"
    record.write(folder / "a.json", made)
    record.write(folder / "b.json", made | {"date": "2026-01-03", "rows": rows[:1]})  # a part again
    record.write(folder / "c.json", made | {"date": "2026-01-01", "source_sha256": "1"})  # of other code
    results = report.load(folder)["reliability"]
    assert results.sources["forward/0"][0] == "b.json" and results.sources["forward/1"][0] == "a.json"
    texts = {name: maker(results)[0] for name, (whose, maker) in report.TABLES.items() if whose == "reliability"}
    assert "| forward, random shapes in 2 sets of constants | 64 | 60 | 0 |  | 0.50 (out) |" in texts["reliability"]
    assert "| forward, d = 64 | 10,000 | 10,000 | 0 | 0 |" in texts["reliability"]
    assert "| normal, bfloat16 | 1.0e-03 | 1.0e-03 | 5.0e-04 | 1.25 | 2.00 | 0.40 |" in texts["accuracy"]
    assert "| bfloat16, d = 64 | 0.90 to 0.90 | 1.10 to 1.10 |" in texts["gradients"]
    assert "| H = 16, T = 4096, d = 64, causal | 1.00 ms | 2.50 ms (2.50) |" in texts["redo"]
    page = "\n".join(f"<!-- bench:begin {name} -->\nnone\n<!-- bench:end -->" for name in texts)
    assert "b.json" in report.page(page, {"gpu": results, "cpu": results, "reliability": results}, {})
    assert json.dumps(reliability.finite({"a": [float("inf"), 1.0]})) == '{"a": ["inf", 1.0]}'
