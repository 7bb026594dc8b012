"""The benchmark suite, where there is no GPU: cases, timing, comparison, records, tables; one case to the end."""

import contextlib
import json
import math
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

import rawflash as rf
from bench import cases, inputs, measures, peers, record, report, run, timing, variants
from bench.cases import CASES, GROUPS, Case, select

TINY = Case(device="cpu", dtype="float32", B=1, Hq=2, Hkv=1, Tq=24, Tk=24, d=8, dv=8, causal=True,
            backends=("numba_cpu",), peers=("torch-cpu",))  # fmt: skip


# ---- cases ---------------------------------------------------------------------------------------------------


def test_names_say_what_a_case_is():
    assert "forward/bfloat16/d128/T4096/causal" in GROUPS["grid"]
    assert all(CASES[name].name == name for name in CASES)
    for name in GROUPS["grid"]:
        case = CASES[name]
        assert case.B * case.Tq == 16384 and case.Hq * case.d == 2048 and case.Hq == case.Hkv


def test_grid_is_complete():
    """Sizes, masks and directions that the figures to beat are of."""
    sizes = [(d, T) for d in (64, 128) for T in (512, 1024, 2048, 4096, 8192, 16384)] + [(256, 2048), (256, 8192)]
    wanted = {
        f"{direction}/bfloat16/d{d}/T{T}{mask}"
        for d, T in sizes for mask in ("", "/causal") for direction in ("forward", "backward")
    }  # fmt: skip
    assert set(GROUPS["grid"]) == wanted
    for name in wanted:
        assert {"torch-flash", "torch-cudnn", "fa4"} <= set(CASES[name].peers)


def test_groups_and_patterns():
    wanted = {"grid", "grid-fp16", "gqa", "float32", "float64", "dense", "decode", "numba", "overhead", "start",
              "sweep", "memory", "ragged", "packed", "order", "few", "cpu", "cpu-decode", "cpu-start", "cpu-memory",
              "cpu-sweep", "quick"}  # fmt: skip
    assert wanted == set(GROUPS) and all(GROUPS.values())
    assert all(CASES[name].device == "cpu" for group in GROUPS for name in GROUPS[group]
               if group.startswith("cpu") or group == "quick")  # fmt: skip
    found = select(["grid", "forward/*"], "gpu")
    assert len(found) == len({case.name for case in found})
    with pytest.raises(ValueError, match="no group and no case"):
        select(["nothing"])
    for case in CASES.values():
        assert set(case.peers) <= set(peers.PEERS) and case.measure in measures.MEASURES
        assert "numba_cuda" in case.backends or "numba" not in [g for g, names in GROUPS.items() if case.name in names]


def test_the_order_of_additions_to_dQ_is_measured_both_ways():
    """Of the grid, of head dimensions with kernels of their own, and of query heads that share keys."""
    cases = [CASES[name] for name in GROUPS["order"]]
    assert all(case.direction == "backward" and case.name.endswith("/deterministic") for case in cases)
    grid = {CASES[name] for name in GROUPS["grid"] if name.startswith("backward")}
    assert {case.name for case in grid} < {case.name.removesuffix("/deterministic") for case in cases}
    assert {(case.d, case.dv) for case in cases} == {(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)}
    assert {case.Hq // case.Hkv for case in cases} == {1, 4, 32}
    assert [runner.name for runner in measures.runners(cases[0])] == ["cupy_raw", "cupy_raw deterministic"]
    assert [runner.name for runner in measures.runners(replace(cases[0], deterministic=False))] == ["cupy_raw"]


def test_a_runner_asks_for_an_order_backward_alone(monkeypatch):
    case = replace(TINY, direction="backward", deterministic=True)
    asked = []
    monkeypatch.setattr(rf, "attention_backward", lambda *_, **options: asked.append(options.get("deterministic")))
    for runner in measures.runners(case, peers=()):
        x = inputs.make(case)
        runner.prepare(case, x)()  # of which the forward pass is rf.attention's, which has no such option
        assert runner.plan(case, x)["kernel"].startswith("numba_cpu")
    assert asked == [None, True]


def test_floating_point_operations():
    case = CASES["forward/bfloat16/d128/T4096"]
    assert case.flops == 4 * 4 * 16 * 4096**2 * 128
    assert replace(case, causal=True).flops == case.flops / 2
    assert replace(case, direction="backward").flops == 2.5 * case.flops
    assert replace(case, dv=64).flops == 0.75 * case.flops
    packed = CASES["backward/bfloat16/d128/T16384/packed8x2048"]
    assert packed.flops == CASES["backward/bfloat16/d128/T2048"].flops  # eight of these
    assert sum(CASES["forward/bfloat16/d64/T16384/packed11of64to4096"].packed) == 16384
    cache = CASES["decode/bfloat16/d128/T8192/B16H32/Hkv8"]
    assert cache.bound_by_memory and cache.cache_bytes == 2 * 16 * 8 * 8192 * 128 * 2


# ---- timing --------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Fake:
    """A turn that takes the times given, the last of them for ever."""

    calls, how = 1, "fake"

    def __init__(self, name, log, times, clock=None):
        self.name, self.log, self.times, self.clock = name, log, list(times), clock or Clock()

    def warm(self):
        self.log.append(f"warm {self.name}")

    def seconds(self):
        self.log.append(f"time {self.name}")
        taken = self.times.pop(0) if len(self.times) > 1 else self.times[0]
        if isinstance(taken, Exception):
            raise taken
        self.clock.now += taken
        return taken


def test_every_timed_turn_comes_after_an_untimed_one_of_its_own():
    log = []
    turns = {name: Fake(name, log, [1.0, 2.0]) for name in "ab"}
    found = timing.alternate(turns, {"a": 2, "b": 1})
    assert found == {"a": [1.0, 2.0], "b": [1.0]}
    assert log[::2] == [entry.replace("time", "warm") for entry in log[1::2]]
    assert sorted(log[1:4:2]) == ["time a", "time b"] and log[5:] == ["time a"]


def test_a_turn_on_a_cpu_is_warm(monkeypatch):
    log = []
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: log.append(seconds))
    times = timing.alternate({"": timing.Called(lambda: log.append("call"), pause=0.5)}, {"": 2})[""]
    assert log == [0.5, "call", "call"] * 2 and len(times) == 2


def test_who_comes_before_a_turn_is_drawn():
    log = []
    timing.alternate({name: Fake(name, log, [1.0] * 40) for name in "abc"}, dict.fromkeys("abc", 40))
    order = [entry.removeprefix("time ") for entry in log[1::2]]
    assert all(sorted(order[n : n + 3]) == [*"abc"] for n in range(0, 120, 3))
    between = {*zip(order[2::3], order[3::3], strict=False)}  # rounds
    assert between >= {("a", "b"), ("b", "a"), ("b", "c"), ("c", "b"), ("a", "a")}
    again = []
    timing.alternate({name: Fake(name, again, [1.0] * 40) for name in "abc"}, dict.fromkeys("abc", 40))
    assert again == log


def test_a_turn_that_fails_is_out():
    found = timing.alternate({"a": Fake("a", [], [1.0, ValueError("no")]), "b": Fake("b", [], [1.0])}, {"a": 4, "b": 4})
    assert isinstance(found["a"], ValueError) and found["b"] == [1.0] * 4


def test_sustained_is_the_second_half_of_a_period():
    clock = Clock()
    assert timing.sustained(Fake("a", [], [4.0, 3.0, 1.0], clock), 9.0, clock) == [1.0, 1.0]
    assert timing.sustained(Fake("a", [], [4.0], clock), 1.0, clock) == [4.0]


@pytest.mark.parametrize("seconds", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.18])
def test_a_call_costs_about_the_same_whatever_it_takes(seconds):
    calls = timing.calls_of(seconds)
    rounds = timing.rounds_of(seconds * calls)
    assert 1 <= calls <= timing.MOST_CALLS and timing.FEWEST <= rounds <= timing.MOST
    # prepared, tried twice, in turns, and sustained
    assert seconds * (3 + 2 * calls * rounds) + max(timing.PERIOD + seconds * calls, 2 * seconds) < 2.0


def test_calls_of_a_turn():
    assert timing.calls_of(1e-5) == timing.MOST_CALLS
    assert timing.calls_of(1e-3) == 4 and timing.calls_of(1e-3, sets=3) == 6
    assert timing.calls_of(0.18, sets=8) == 1
    assert timing.calls_of(1e-5, result_bytes=timing.MOST_BYTES // 2) == 2


def test_sets_of_inputs_exceed_the_cache_twice():
    for size in (1, 10, 49, 50, 99, 100, 101, 1000):
        sets = timing.input_sets(size, 50)
        assert 1 <= sets <= timing.MOST_SETS and (sets * size > 100 or sets == timing.MOST_SETS)
        assert sets == 1 or (sets - 1) * size <= 100


def test_quantiles():
    assert timing.quantiles([n * 1e-6 for n in range(101)]) == [20.0, 50.0, 80.0]


class Event:
    def __init__(self, log, clock):
        self.log, self.clock = log, clock

    def record(self, stream):
        self.log.append("event")
        self.at = self.clock()

    def synchronize(self):
        self.log.append("wait")

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


class Library:
    """What timing asks of torch.cuda and of cupy.cuda."""

    def __init__(self):
        self.log, self.clock, self.inside = [], Clock(), []
        self.nvtx = None

    def Event(self, enable_timing=False):
        return Event(self.log, self.clock)

    @staticmethod
    def get_elapsed_time(start, end):
        return start.elapsed_time(end)

    def CUDAGraph(self):
        return self

    @contextlib.contextmanager
    def stream(self, stream):
        self.inside.append(stream)
        try:
            yield
        finally:
            self.inside.pop()

    def capture_begin(self, capture_error_mode):
        self.log.append("begin")

    def capture_end(self):
        self.log.append("end")

    def replay(self):
        self.log.append("replay")
        self.clock.now += 6.0

    def launch(self, stream):
        self.replay()


class Stream:
    def __init__(self, library):
        self.library = library

    def __enter__(self):
        self.library.inside.append(self)

    def __exit__(self, *error):
        self.library.inside.pop()

    def synchronize(self):
        self.library.log.append("wait")

    def begin_capture(self):
        self.library.log.append("begin")

    def end_capture(self):
        self.library.log.append("end")
        return self.library


def queue_of(kind):
    library = Library()
    queue = object.__new__(kind)
    queue._cuda, queue.stream, queue._inside = library, Stream(library), []
    return library, queue


@pytest.mark.parametrize("kind", [timing.CupyQueue, timing.TorchQueue])
def test_graphs_and_queues(kind):
    library, queue = queue_of(kind)

    def call():
        assert library.inside, "on no stream"
        library.log.append("call")
        library.clock.now += 1.0

    turn = timing.Replayed(queue, [call] * 3)
    assert library.log == ["call", "wait", "begin", *["call"] * 3, "end"]
    library.log.clear()
    turn.warm()
    assert turn.seconds() == 2.0 and turn.calls == 3
    assert library.log == ["replay", "event", "replay", "event", "wait"]
    library.log.clear()
    turn = timing.Queued(queue, [call] * 2)
    turn.warm()
    assert turn.seconds() == 1.0 and library.log == [*["call"] * 2, "event", *["call"] * 2, "event", "wait"]

    def broken():
        library.log.append("call")
        raise ValueError("no")

    calls = iter([lambda: None, broken])
    library.log.clear()
    with pytest.raises(ValueError):
        timing.Replayed(queue, [lambda: next(calls)()])
    assert library.log[-1] == "end" and not library.inside  # a capture that fails is ended


# ---- what has to come out ------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_reference_is_the_oracle(causal, monkeypatch):
    monkeypatch.setattr(inputs, "ROWS", 7)
    for direction in ("forward", "backward"):
        case = replace(TINY, direction=direction, causal=causal, Hq=6, Hkv=3, B=2)
        x = inputs.make(case)
        q, k, v = (inputs._wide(case, a) for a in (x.q, x.k, x.v))
        out, lse = rf.oracle.attention(q, k, v, causal=causal, return_lse=True)
        results = [out]
        if direction == "backward":
            dout = inputs._wide(case, x.dout)
            results = rf.oracle.attention_backward(dout, q, k, v, out, lse, causal=causal)
        errors = inputs.errors(case, results, inputs.reference(case, x))
        assert max(errors.values()) < 1e-12 and list(errors) == list(inputs.NAMES[direction])


PACKED = replace(TINY, Hq=4, Hkv=2, packed=(3, 1, 20))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_packed_sequences(direction, causal, monkeypatch):
    """Each is by itself, and what ours makes of them is right."""
    monkeypatch.setattr(inputs, "ROWS", 7)
    case = replace(PACKED, direction=direction, causal=causal)
    x = inputs.make(case)
    assert [int(n) for n in x.starts] == [0, 3, 4, 24] and case.name.endswith("packed3of1to20" + "/causal" * causal)
    q, k, v = (inputs._wide(case, a)[0] for a in (x.q, x.k, x.v))
    starts, how = ([0, 3, 4, 24],) * 2, dict(causal=causal)
    out, lse = rf.oracle.attention_varlen(q, k, v, *starts, return_lse=True, **how)
    results = [out]
    if direction == "backward":
        dout = inputs._wide(case, x.dout)[0]
        results = rf.oracle.attention_varlen_backward(dout, q, k, v, out, lse, *starts, **how)
    expected = inputs.reference(case, x)
    assert max(inputs.errors(case, [a[None] for a in results], expected).values()) < 1e-12
    ours = peers.Ours("numba_cpu")
    errors = inputs.errors(case, ours.results(case, ours.prepare(case, x)()), expected)
    assert inputs.wrong(case, errors) is None
    assert ours.plan(case, x)["kernel"] == f"numba_cpu.fa2_{direction}"
    assert inputs.wrong(case, inputs.errors(replace(case, packed=()), [a[None] for a in results],
                                            inputs.reference(replace(case, packed=()), x)))  # fmt: skip


def test_who_takes_packed_sequences():
    case = CASES["forward/bfloat16/d128/T16384/packed8x2048"]
    assert {name for name, peer in peers.PEERS.items() if peer.why_not(case) is None} == {"torch-flash", "fa4"}


def test_packed_sequences_fit_the_operators_of_pytorch():
    torch = pytest.importorskip("torch")
    runner = peers.PEERS["torch-flash"]
    for direction in ("forward", "backward"):
        case = Case(direction=direction, Hq=4, Hkv=2, Tq=128, Tk=128, packed=(28, 100))
        q, k = (torch.empty(1, H, 128, 64, device="meta", dtype=torch.bfloat16) for H in (4, 2))
        starts = torch.empty(3, device="meta", dtype=torch.int32)
        results = runner.results(case, runner.prepare(case, inputs.Inputs(q, k, k, q, starts=starts))())
        assert [a.shape for a in results] == [a.shape for a in (q, k, k)][: len(inputs.NAMES[direction])]


def test_reference_in_pytorch():
    """What GPU cases are compared with, here on the CPU."""
    torch = pytest.importorskip("torch")
    q, k, v, dout = (torch.randn(40, 8, generator=torch.Generator().manual_seed(n)) for n in range(4))
    for causal in (False, True):
        for last in (None, dout):
            found = inputs.head(q, k, v, last, causal)
            wanted = inputs.head(*(a if a is None else a.double().numpy() for a in (q, k, v, last)), causal)
            for a, b in zip(found, wanted, strict=True):
                assert abs(a.numpy() - b).max() < 1e-5


@pytest.mark.parametrize("peer", ["torch-flash", "torch-cudnn", "torch-efficient"])
def test_operators_of_pytorch_take_what_they_are_given(peer):
    """On tensors without memory: the arguments fit the operators of this version."""
    torch = pytest.importorskip("torch")
    runner = peers.PEERS[peer]
    for direction in ("forward", "backward"):
        for Hkv in (4, 2) if runner.heads else (4,):
            case = Case(direction=direction, B=2, Hq=4, Hkv=Hkv, Tq=128, Tk=128, causal=True)
            q, k = (torch.empty(2, H, 128, 64, device="meta", dtype=torch.bfloat16) for H in (4, Hkv))
            results = runner.results(case, runner.prepare(case, inputs.Inputs(q, k, k, q))())
            assert [a.shape for a in results] == [a.shape for a in (q, k, k)][: len(inputs.NAMES[direction])]


def test_wrong_results_are_caught():
    case = replace(TINY, direction="backward")
    x = inputs.make(case)
    expected = inputs.reference(case, x)
    right = [inputs._wide(case, a) for a in peers.Ours("numba_cpu").prepare(case, x)()]
    assert inputs.wrong(case, inputs.errors(case, right, expected)) is None
    for n, name in enumerate(("dq", "dk", "dv")):
        for value in (1.0, math.nan):
            broken = [a.copy() for a in right]
            broken[n][0, 0, 5, 3] += value
            assert name in inputs.wrong(case, inputs.errors(case, broken, expected))
    with pytest.raises(ValueError, match="shape"):
        inputs.errors(case, [a[..., 1:] for a in right], expected)


# ---- a case to the end ---------------------------------------------------------------------------------------


class Wrong(peers.Ours):
    def prepare(self, case, x):
        call = super().prepare(case, x)
        return lambda: call() * 1.01


def test_a_wrong_result_has_an_error_and_no_times():
    wrong = Wrong("numba_cpu")
    wrong.name = "wrong"
    found = measures.time_of(measures.Setup("cpu"), TINY, [wrong, peers.Ours("numba_cpu")])
    assert found["wrong"]["error"]["out"] > 1e-3 and "WrongResult" in found["wrong"]["failed"]
    assert "burst_us" not in found["wrong"] and found["numba_cpu"]["burst_us"][1] > 0


class HostQueue:
    """A queue of calls that are done at once."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def mark(self):
        return time.perf_counter()

    def between(self, start, end):
        return end - start

    def capture(self, calls):
        return lambda: [call() for call in calls]


class HostSetup(measures.Setup):
    """A GPU that is this CPU."""

    queues = {"cupy": HostQueue(), "torch": HostQueue()}
    cache_bytes = 4000

    def synchronize(self):
        pass

    def clear(self):
        pass


class OnHost(peers.Ours):
    """cupy_raw that is numba_cpu."""

    def options(self, case):
        return super().options(case) | {"backend": "numba_cpu"}

    def arrays(self, x):
        return x

    def prepare(self, case, x):
        options = self.options(case)
        if case.direction == "decode":
            return lambda: rf.attention(x.q, x.k, x.v, **options)
        return super().prepare(case, x)

    def results(self, case, result):
        return peers.Runner.results(self, case, result)


class Failing(peers.Runner):
    name, queue, dtypes = "torch-flash", "torch", ("float32",)
    directions = ("forward", "backward", "decode")

    def version(self):
        return "1"

    def prepare(self, case, x):
        raise RuntimeError("no kernel")


@pytest.fixture
def on_host(monkeypatch):
    """GPU cases run on this CPU: their flow, not their kernels."""
    make, wide = inputs.make, inputs._wide

    def as_cpu(case):
        return replace(case, device="cpu", page=0)

    monkeypatch.setattr(inputs, "make", lambda case, seed=0: make(as_cpu(case), seed))
    monkeypatch.setattr(inputs, "_wide", lambda case, array: wide(as_cpu(case), array))
    monkeypatch.setattr(inputs, "probe", lambda: None)
    monkeypatch.setattr(measures, "extra_bytes", lambda *_: 123)
    monkeypatch.setattr(measures, "GPU_SRAM", (1024, 1 << 16, 1 << 18))
    monkeypatch.setattr(timing, "PERIOD", 0.01)
    monkeypatch.setattr(timing, "BUDGET", 0.01)
    monkeypatch.setattr(timing, "CAPTURED", 60.0)  # how a call is timed shall not hang on the load of this machine
    monkeypatch.setattr(timing, "ROTATED", 60.0)
    return HostSetup("gpu")


def test_flow_of_gpu_cases(on_host):
    ours = OnHost("cupy_raw")
    for direction in ("forward", "backward", "decode"):
        case = replace(TINY, device="gpu", direction=direction, extra=True, causal=direction != "decode")
        case = replace(case, Tq=1) if direction == "decode" else case
        found = measures.time_of(on_host, case, [ours, Failing()])
        figures = found["cupy_raw"]
        assert figures["burst_us"][1] > 0 and figures["sustained_us"][1] > 0 and figures["extra_bytes"] == 123
        rates = ("burst_tbytes", "sustained_tbytes") if direction == "decode" else ("burst_tflops", "sustained_tflops")
        assert all(figures[rate] > 0 for rate in rates)
        assert figures["how"] == "graph" and figures["calls"] % figures["sets"] == 0 and figures["sets"] > 1
        assert figures["tiles"]["br"] > 0
        assert figures["kernel"].endswith("backward" if direction == "backward" else "forward")
        assert ("in_cache_us" in figures) == (direction == "decode")
        assert found["torch-flash"] == {"failed": "RuntimeError: no kernel"}
    case = replace(TINY, device="gpu", measure="memory")
    assert measures.memory_of(on_host, case, [ours])["cupy_raw"]["extra_bytes"] == 123
    case = replace(TINY, device="gpu", measure="sweep", Tq=64, Tk=64)
    swept = measures.sweep_of(on_host, case, [ours])["cupy_raw"]
    assert 0 < swept["best_by_planned"] <= 1 and len(swept["points"]) == 4


def test_a_lost_gpu_ends_the_row_but_keeps_what_was_found(on_host, monkeypatch):
    def gone():
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(HostSetup, "check", measures.Setup.check)
    failing = Failing()
    failing.prepare = lambda case, x: monkeypatch.setattr(on_host, "synchronize", gone) or gone()
    case = replace(TINY, device="gpu", backends=())
    monkeypatch.setattr(measures, "runners", lambda *_: [OnHost("cupy_raw"), failing])
    row = run.measure(on_host, case)
    assert row["failed"] == run.ENDED and "illegal" in row["lost"]
    assert row["runners"]["cupy_raw"]["error"]["out"] < 1e-5 and not run.has_figures(row)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(cases.CASES, TINY.name, TINY)
    monkeypatch.setitem(cases.GROUPS, "quick", (TINY.name,))


def test_quick_to_the_end(tiny, tmp_path, capsys):
    out = tmp_path / "record.json"
    assert run.main(["--quick", "--out", str(out)]) == 0
    made = record.read(out)
    assert made["schema"] == run.SCHEMA and made["device"] == "cpu" and "running" not in made
    (row,) = made["rows"]
    figures = row["runners"]["numba_cpu"]
    assert row["name"] == TINY.name and row["case"]["Tq"] == 24 and figures["kernel"] == "numba_cpu.fa2_forward"
    assert figures["burst_us"][0] <= figures["burst_us"][1] <= figures["burst_us"][2]
    assert figures["error"]["out"] < 1e-5 and figures["tiles"]["br"] > 0
    torch = inputs.torch_or_none()
    assert ("torch-cpu" in made["peers"]) and ("burst_us" in row["runners"]["torch-cpu"]) == (torch is not None)
    assert "s to go" in capsys.readouterr().out
    assert run.main(["--quick", "--out", str(out)]) == run.EXIT_USAGE  # what is there is not written over
    before = out.read_text()
    assert run.main(["--quick", "--resume", str(out)]) == 0 and "0 of 1 cases" in capsys.readouterr().out
    assert out.read_text() == before
    out.write_text(json.dumps(made | {"source_sha256": "another"}))
    assert run.main(["--quick", "--resume", str(out)]) == run.EXIT_USAGE
    assert "source_sha256" in capsys.readouterr().err
    assert run.main(["--quick", "--resume", str(out), "--mixed"]) == 0


def test_quick_without_torch(tiny, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)  # import torch: ImportError
    out = tmp_path / "record.json"
    assert run.main(["--quick", "--out", str(out)]) == 0
    made = record.read(out)
    assert "not loaded" in made["peers"]["torch-cpu"] and "burst_us" in made["rows"][0]["runners"]["numba_cpu"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ours_has_arrays_of_numpy_on_a_cpu(dtype):
    """Of the memory that peers have as tensors."""
    case = replace(TINY, dtype=dtype)
    x = inputs.make(case)
    taken = peers.Ours("numba_cpu").arrays(x)
    for name in "qkv":
        given, array = getattr(x, name), getattr(taken, name)
        address = given.ctypes.data if isinstance(given, np.ndarray) else given.data_ptr()  # there may be no PyTorch
        assert type(array) is np.ndarray and array.dtype.name == dtype and array.ctypes.data == address


def test_nothing_of_ours_is_a_failure(tiny, tmp_path):
    assert run.main(["--quick", "--backends", "numpy_tiled", "--out", str(tmp_path / "r.json")]) == run.EXIT_MISSING
    assert run.main(["--cases", "nothing"]) == run.EXIT_USAGE
    assert run.main(["--quick", "--seconds", "-1", "--out", str(tmp_path / "s.json")]) == run.EXIT_MISSING


def test_resume_steps_over_what_ended_the_process(tiny, tmp_path):
    out = tmp_path / "record.json"
    assert run.main(["--quick", "--seconds", "-1", "--out", str(out)]) == run.EXIT_MISSING
    made = {"schema": run.SCHEMA, "device": "cpu"} | record.about(False) | {"peers": {}, "ceilings": {}, "rows": []}
    record.write(out, made | {"running": TINY.name})
    assert run.main(["--quick", "--resume", str(out)]) == run.EXIT_MISSING
    record.write(out, made | {"running": TINY.name})
    assert run.main(["--quick", "--resume", str(out), "--again"]) == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "rawflash-'])
def test_what_is_no_record_is_not_resumed(text, tmp_path, capsys):
    out = tmp_path / "record.json"
    out.write_text(text)
    assert run.main(["--quick", "--resume", str(out)]) == run.EXIT_USAGE
    assert str(out) in capsys.readouterr().err and out.read_text() == text


def test_rows_of_a_resumed_record():
    good = {"name": "a", "runners": {"cupy_raw": {"burst_us": [1, 1, 1]}, "fa4": {"failed": "no"}}}
    bad = {"name": "a", "runners": {"cupy_raw": {"failed": "no"}}}
    refused = {"name": "a", "runners": {"numba_cuda": {"why_not": "no"}, "cupy_raw": {"burst_us": [1, 1, 1]}}}
    assert run.has_figures(good) and run.has_figures(refused) and not run.has_figures(bad)
    rows = [good]
    run.put(rows, bad)
    assert rows == [good]
    run.put(rows, refused)
    assert rows == [refused]
    both = {"name": "a", "runners": refused["runners"] | {"torch-flash": {"burst_us": [1, 1, 1]}}}
    run.put(rows, both)
    run.put(rows, refused)  # newer, and says less
    assert rows == [both]
    ours = {"name": TINY.name, "runners": {"numba_cpu": {"burst_us": [1, 1, 1]}}}
    case = replace(TINY, peers=("torch-cpu",))
    assert case.backends == ("numba_cpu",) and run.left([case], {"rows": [ours]}) == [case]
    assert run.left([case], {"rows": [ours]}, peers=[]) == []
    run.put(rows, {"name": "a", "runners": {}, "failed": run.ENDED, "date": "2026-01-01"})
    assert rows == [both | {"ended": "2026-01-01"}]  # its figures stay; what was asked for besides is not tried again
    ours |= {"ended": "2026-01-01"}
    assert run.left([case], {"rows": [ours]}) == [] and run.left([case], {"rows": [ours]}, again=True) == [case]
    ended = {"name": TINY.name, "runners": {}, "failed": run.ENDED}
    assert run.left([TINY], {"rows": [ended]}) == [] and run.left([TINY], {"rows": [ended]}, again=True) == [TINY]


# ---- variants ------------------------------------------------------------------------------------------------


class VariantOnHost(variants.Variant, OnHost):
    """A variant of what has no kernel's text."""


FULL = replace(TINY, device="gpu", causal=False, backends=(), peers=())
BACK = replace(FULL, direction="backward", causal=True)
SMALL = {"name": "small tiles", "tables": {"WGMMA_LEAST": "WGMMA_LEAST + 1"}, "cases": ["*ward/float32/d8/*"]}
ONE_PASS = {"name": "one pass", "environment": {"RAWFLASH_NOTHING": "1"}, "cases": [BACK.name]}
NO_TEXT = {"name": "no text", "text": [["what no kernel has", ""]], "cases": [FULL.name]}


@pytest.fixture
def spec(on_host, monkeypatch, tmp_path):
    """Writes the variants that are measured without being named; their cases run here."""
    about, path = record.about, tmp_path / "spec.json"
    monkeypatch.setattr(record, "about", lambda gpu: about(False) | {"gpu": "none", "driver": "1"})
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(variants, "Variant", VariantOnHost)
    monkeypatch.setattr(variants, "ABLATIONS", path)
    monkeypatch.setattr(measures, "Setup", lambda device: on_host)
    for case in (FULL, BACK):
        monkeypatch.setitem(cases.CASES, case.name, case)
    return lambda *some: path.write_text(json.dumps(some))


def runners_of(made):
    return {row["name"]: list(row["runners"]) for row in made["rows"]}


def test_variants_to_the_end(spec, tmp_path, capsys):
    spec(SMALL, ONE_PASS)
    assert variants.main([]) == 0
    (out,) = (tmp_path / "results").iterdir()
    made = record.read(out)
    assert made["schema"] == variants.SCHEMA and made["device"] == "gpu" and made["gpu"] == "none"
    assert made["spec"] == "spec.json" and made["variants"] == [SMALL, ONE_PASS] and "running" not in made
    both = [variants.AS_IT_IS, "small tiles"]
    assert runners_of(made) == {FULL.name: both, BACK.name: [*both, "one pass"]}
    for row in made["rows"]:
        assert row["case"]["d"] == 8 and row["seconds"] > 0 and row["date"]
        for figures in row["runners"].values():
            assert figures["burst_us"][0] <= figures["burst_us"][1] and figures["burst_rounds"] == variants.ROUNDS
            assert max(figures["error"].values()) < 1e-5 and figures["burst_tflops"] > 0
    before = out.read_text()
    assert variants.main(["--out", str(out)]) == 0 and out.read_text() == before  # nothing is left
    assert variants.main([]) == 0 and len(list((tmp_path / "results").iterdir())) == 2
    assert "without figures: 0" in capsys.readouterr().out


def test_variants_of_ones_own(spec, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cases, "TOKENS", 32)
    monkeypatch.setattr(cases, "WIDTH", 16)
    own, out = tmp_path / "own.json", tmp_path / "out.json"
    own.write_text(json.dumps([{"name": "all cases", "tables": {"LN2": "LN2"}}]))
    assert variants.main([str(own), "--cases", FULL.name]) == run.EXIT_USAGE  # no record among those of the pages
    assert variants.main([str(own), "--out", str(out)]) == run.EXIT_USAGE  # no case
    assert variants.main([str(own), "--cases", "nothing", "--out", str(out)]) == run.EXIT_USAGE
    capsys.readouterr()
    assert not out.exists()
    assert variants.main([str(own), "--cases", FULL.name, "--out", str(out)]) == 0
    assert variants.main([str(own), "--usual", "8", "16", "forward", "float32", "1", "--out", str(out)]) == 0
    both = [variants.AS_IT_IS, "all cases"]
    assert runners_of(record.read(out)) == {FULL.name: both, "forward/float32/d8/T16/causal": both}


def test_variants_without_figures_are_a_failure(spec, tmp_path, capsys):
    out = tmp_path / "out.json"
    spec(SMALL, NO_TEXT)
    assert variants.main(["--out", str(out), "--seconds", "-1"]) == run.EXIT_MISSING
    assert "without figures: 5" in capsys.readouterr().out and not out.exists()
    assert variants.main(["--out", str(out)]) == run.EXIT_MISSING
    assert f"without figures: 1\n  {FULL.name}: no text" in capsys.readouterr().out
    figures = {row["name"]: row["runners"] for row in record.read(out)["rows"]}[FULL.name]
    assert "not in the text of a kernel" in figures["no text"]["failed"] and "burst_us" in figures["small tiles"]


def test_variants_go_on(spec, tmp_path, capsys):
    """Behind what ended the process; with more variants; not with others of the same name, or other code."""
    out = tmp_path / "out.json"
    spec(SMALL)
    assert variants.main(["--cases", BACK.name, "--out", str(out)]) == 0
    made = record.read(out)
    case = {"name": FULL.name, "case": vars(FULL), "runners": {}}
    record.write(out, made | {"rows": [*made["rows"], case], "running": [FULL.name, "small tiles"]})
    spec(SMALL, ONE_PASS)
    assert variants.main(["--out", str(out)]) == run.EXIT_MISSING
    made = record.read(out)
    figures = {row["name"]: row["runners"] for row in made["rows"]}
    assert figures[FULL.name]["small tiles"] == {"failed": run.ENDED} and "running" not in made
    assert "burst_us" in figures[FULL.name][variants.AS_IT_IS] and "burst_us" in figures[BACK.name]["one pass"]
    assert made["variants"] == [SMALL, ONE_PASS]
    spec(SMALL | {"tables": {}})
    assert variants.main(["--out", str(out)]) == run.EXIT_USAGE
    spec(SMALL, ONE_PASS)
    for key, value in (("source_sha256", "another"), ("schema", run.SCHEMA)):
        record.write(out, made | {key: value})
        assert variants.main(["--out", str(out)]) == run.EXIT_USAGE
    said = capsys.readouterr().err
    assert "another variant 'small tiles'" in said and "source_sha256" in said and "no record of this script" in said


def test_variants_that_hang_in_turn_are_left(spec, tmp_path):
    out = tmp_path / "out.json"
    spec(SMALL)
    assert variants.main(["--cases", BACK.name, "--out", str(out)]) == 0
    made = record.read(out)
    case = {"name": FULL.name, "case": vars(FULL), "runners": {}}
    record.write(out, made | {"rows": [*made["rows"], case], "running": [FULL.name, variants.IN_TURN]})
    for _ in range(2):
        assert variants.main(["--out", str(out)]) == run.EXIT_MISSING
        row = next(row for row in record.read(out)["rows"] if row["name"] == FULL.name)
        assert row["failed"] == run.ENDED and not row["runners"]


@pytest.mark.parametrize("text", ["", "{}", '[{"nobody": 1}]', "[1]"])
def test_a_spec_that_is_none(text, tmp_path, capsys):
    path = tmp_path / "spec.json"
    path.write_text(text)
    assert variants.main([str(path), "--out", str(tmp_path / "out.json")]) == run.EXIT_USAGE
    assert variants.main([str(tmp_path / "nobody.json"), "--out", str(tmp_path / "out.json")]) == run.EXIT_USAGE
    assert capsys.readouterr().err


def test_variants_and_a_lost_gpu(spec, on_host, tmp_path, monkeypatch):
    """The process ends with 3, and the next one goes on behind the variant that did it."""

    class Ended(BaseException):
        pass

    def ended(status):
        raise Ended(status)

    def gone():
        raise RuntimeError("an illegal memory access was encountered")

    def prepare(self, case, x):
        if self.name == "small tiles":
            monkeypatch.setattr(on_host, "synchronize", gone)
            gone()
        return OnHost.prepare(self, case, x)

    out = tmp_path / "out.json"
    spec(SMALL, ONE_PASS)
    monkeypatch.setattr(variants.os, "_exit", ended)
    with monkeypatch.context() as broken:
        broken.setattr(VariantOnHost, "prepare", prepare)
        with pytest.raises(Ended, match=str(run.EXIT_LOST)):
            variants.main(["--cases", BACK.name, "--out", str(out)])
    monkeypatch.setattr(on_host, "synchronize", lambda: None)
    assert variants.main(["--cases", BACK.name, "--out", str(out)]) == run.EXIT_MISSING
    ((_, figures),) = ((row["name"], row["runners"]) for row in record.read(out)["rows"])
    assert "illegal" in figures["small tiles"]["failed"] and "burst_us" in figures["one pass"]


# ---- pages ---------------------------------------------------------------------------------------------------


def figures_of(case, us):
    how = {"burst_us": [us, us, us], "sustained_us": [2 * us] * 3, "error": {"out": 1e-3}}
    return how | measures._rates(case, how)


def synthetic(folder, gpu="NVIDIA H200", date="2026-01-02", factor=1.0, names=None):
    """A record of a run that never was: all GPU groups."""
    rows = []
    for name in names or [name for group, names in GROUPS.items() if "cpu" not in group and group != "quick"
                          for name in names]:  # fmt: skip
        case = CASES[name]
        some, runners = measures.runners(case), {}
        for n, runner in enumerate(some):
            us = factor * (n + 1) * max(case.flops / 5e8, case.cache_bytes / 4e6)
            us *= 1 + 500 / case.Tk
            runners[runner.name] = figures_of(case, us)
            if case.measure == "memory":
                runners[runner.name] = {"extra_bytes": n * case.Tk ** (2 if n > 1 else 1) * 8}
            if case.extra:
                runners[runner.name]["extra_bytes"] = n * 10**6
            if case.measure == "overhead":
                runners[runner.name] = {"host_us": 12.3}
            if case.measure == "start":
                times = {"import_s": 1, "forward_s": 2, "backward_s": 3}
                runners[runner.name] = {"cold": times, "warm": times}
            if case.measure == "sweep":
                points = [{"sram": m, "tiles": {"br": 64, "bc": 32}, "burst_us": [us * m / 2**16] * 3}
                          for m in (2**15, 2**16, 2**17)]  # fmt: skip
                runners[runner.name] |= {"best_by_planned": 0.5, "tiles": {"br": 64, "bc": 64}, "points": points}
        rows.append({"name": name, "case": {**vars(case)}, "runners": runners, "date": date})
    made = {"schema": run.SCHEMA, "device": "gpu", "date": date, "commit": "0" * 12, "source_sha256": "0",
            "cpu": "x", "cpus": 16, "gpu": gpu, "driver": "580", "versions": {"python": "3.12", "torch": "2.11"},
            "peers": {}, "rows": rows,
            "ceilings": {"bfloat16 matmul": {"burst_tflops": 780.0, "sustained_tflops": 650.0},
                         "copy": {"burst_tbytes": 4.2, "sustained_tbytes": 4.1}}}  # fmt: skip
    path = folder / f"bench-{date}-{gpu.split()[-1]}.json"
    record.write(path, json.loads(json.dumps(made)))
    return path


@pytest.fixture
def root(tmp_path):
    """A copy of the pages, and one record."""
    for name in report.PAGES:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text((record.ROOT / name).read_text())
    (tmp_path / "bench" / "results").mkdir(parents=True)
    return tmp_path


def drawn(root):
    """Stand-ins of the plots: what the check looks at."""
    for name, (_, _, data) in report.plots(report.load(root / "bench" / "results")).items():
        path = root / report.PLOTS / f"{name}.svg"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<svg>{report.digest(data)}</svg>")


def test_pages_are_what_records_make(root, monkeypatch, capsys):
    names = GROUPS["grid"] + GROUPS["decode"][:3] + GROUPS["dense"] + GROUPS["sweep"] + GROUPS["memory"]
    names += GROUPS["start"] + GROUPS["overhead"]
    before = (root / "docs" / "benchmarks.md").read_text()

    def of_cpu(page):
        return page.split("<!-- bench:begin cpu -->")[1].split("<!-- bench:end -->")[0]

    assert report.main(["--check"], root) == 0  # without records pages are left alone
    path = synthetic(root / "bench" / "results", names=names)
    assert report.main(["--check"], root) == 1
    monkeypatch.setattr(report, "draw", lambda *_: None)
    assert report.main([], root) == 0
    drawn(root)
    assert report.main(["--check"], root) == 0
    readme = (root / "README.md").read_text()
    assert "| pass | problem | rawflash | best peer | ratio |" in readme and "NVIDIA H200" in readme
    page = (root / "docs" / "benchmarks.md").read_text()
    assert path.name in page and "![Speed of the forward pass" in page
    assert "| 3.00 / 3.00 |" in page and " / " in page.split("forward, bfloat16")[1].split("|")[2]  # burst / sustained
    assert of_cpu(page) == of_cpu(before)  # what was not measured stays
    (root / "README.md").write_text(readme.replace("| 2.00 |", "| 3.00 |", 1))
    assert report.main(["--check"], root) == 1 and "README.md is not" in capsys.readouterr().out
    (root / "README.md").write_text(readme)
    made = record.read(path)
    made["rows"][0]["runners"]["cupy_raw"]["burst_tflops"] = 1.0
    record.write(path, made)
    assert report.main(["--check"], root) == 1 and "forward-bfloat16.svg" in capsys.readouterr().out


def ablated(folder, date="2026-01-02", factor=1.5, **more):
    """A record of variants: of each case the code as it is, and one of them; another has failed in one."""
    names = ("forward/bfloat16/d128/T8192", "forward/bfloat16/d64/T1024/causal", "backward/bfloat16/d128/T8192")
    rows = []
    for name in names:
        runners = {variants.AS_IT_IS: {"burst_us": [90, 100, 110]}, "no turns": {"burst_us": [1, 100 * factor, 200]}}
        rows.append({"name": name, "case": {**vars(CASES[name])}, "runners": runners, "date": date})
    rows[1]["runners"] = {variants.AS_IT_IS: {"burst_us": [8, 9, 10]}, "one Q": {"failed": "no"}}
    made = {"schema": variants.SCHEMA, "device": "gpu", "date": date, "commit": "0" * 12, "source_sha256": "0",
            "cpu": "x", "cpus": 16, "gpu": "NVIDIA H200", "driver": "580", "versions": {"python": "3.12"},
            "spec": variants.ABLATIONS.name, "variants": [{"name": "one Q"}, {"name": "no turns"}], "peers": {},
            "rows": rows}  # fmt: skip
    record.write(folder / f"ablations-{date}.json", json.loads(json.dumps(made | more)))


def test_tables_of_variants(root):
    """Of the newest record of all ablations; a page without one stays as it is."""
    page, folder = root / "docs" / "kernels" / "sm90.md", root / "bench" / "results"
    before = page.read_text()
    assert before.count("<!-- bench:begin ablations-") == 2
    ablated(folder, date="2026-01-05", spec="own.json")
    assert report.main(["--check"], root) == 0  # no record of theirs
    ablated(folder, factor=7.0, source_sha256="1")
    ablated(folder, date="2026-01-03")
    assert report.main(["--check"], root) == 1
    assert report.main([], root) == 0 and report.main(["--check"], root) == 0
    forward, backward = (
        page.read_text().split(f"<!-- bench:begin ablations-{direction} -->\n")[1].split("<!-- bench:end -->")[0]
        for direction in ("forward", "backward")
    )
    table = forward.strip().split("\n\n")[0].splitlines()
    assert table[0] == "|  | d = 64, T = 1024, causal | d = 128, T = 8192 |"
    assert table[2:] == ["| as it is | 9.00 | 100 |", "| one Q | failed |  |", "| no turns |  | 1.50 |"]
    assert report.SAID in forward and "NVIDIA H200, 2026-01-03, driver 580, commit 000000000000" in forward
    assert "`bench/results/ablations-2026-01-03.json`" in forward
    assert "| no turns | 1.50 |" in backward and "one Q" not in backward
    page.write_text(page.read_text().replace("| 1.50 |", "| 1.51 |", 1))
    assert report.main(["--check"], root) == 1


def test_what_a_fixed_order_costs(root):
    """Its time by that without one, of each call, of all, and at most."""
    folder = root / "bench" / "results"
    path = synthetic(folder, names=GROUPS["order"][:3])
    rows = record.read(path)
    for n, row in enumerate(rows["rows"]):
        without, ordered = row["runners"].values()
        for key, cost in (("burst_us", 1 + n / 10), ("sustained_us", 1.5)):
            ordered[key] = [cost * x for x in without[key]]
    record.write(path, rows)
    made, of = report.TABLES["order"][1](report.load(folder)["gpu"])
    lines = made.splitlines()
    assert len(of) == 3
    assert lines[0] == "| problem | cupy_raw | cupy_raw deterministic | time by that without an order |"
    assert [line.split("|")[-2].strip() for line in lines[2:5]] == ["1.00 / 1.50", "1.10 / 1.50", "1.20 / 1.50"]
    assert lines[2].startswith("| B = 32, H = 32, T = 512, d = 64 |")
    assert lines[-1] == f"Of 3: geometric mean {1.32 ** (1 / 3):.3f} / 1.500, at most 1.20 / 1.50."
    rows["rows"][1]["runners"]["cupy_raw deterministic"] = {"failed": "no"}
    rows["rows"][2]["runners"].pop("cupy_raw deterministic")
    record.write(path, rows)
    made, of = report.TABLES["order"][1](report.load(folder)["gpu"])
    assert len(of) == 1 and made.endswith("Of 1: geometric mean 1.000 / 1.500, at most 1.00 / 1.50.")
    assert "192 / 128" in report.problem({"case": vars(CASES["backward/bfloat16/d192v128/T2048/B8H16/deterministic"])})


def test_newest_row_of_one_device(root):
    folder, name = root / "bench" / "results", "forward/bfloat16/d128/T4096"
    synthetic(folder, date="2026-01-02", names=GROUPS["grid"])
    synthetic(folder, date="2026-01-03", factor=2.0, names=[name])
    found = report.load(folder)["gpu"]
    assert len(found.rows) == len(GROUPS["grid"]) and found.rows[name]["date"] == "2026-01-03"
    synthetic(folder, gpu="NVIDIA B200", date="2026-01-04", names=[name])
    found = report.load(folder)["gpu"]
    assert found.device == "NVIDIA B200" and list(found.rows) == [name]


def test_another_device_has_a_folder_and_tables_of_its_own(root):
    """It takes nothing from the tables of others, however new it is."""
    folder, name = root / "bench" / "results", "forward/bfloat16/d128/T4096"
    synthetic(folder, date="2026-01-02", names=[name])
    (folder / "h100").mkdir()
    synthetic(folder / "h100", gpu="NVIDIA H100", date="2026-01-04", factor=2.0, names=[name])
    found = report.load(folder)
    assert found["gpu"].device != found["h100"].device == "NVIDIA H100"
    assert found["h100"].rows[name]["date"] == "2026-01-04" and found["gpu"].rows[name]["date"] == "2026-01-02"
    blocks = ("grid-forward", "grid-forward-h100")
    page = "".join(f"<!-- bench:begin {block} -->\n<!-- bench:end -->\n" for block in blocks)
    first, second = report.page(page, found, {}).split("<!-- bench:begin grid-forward-h100 -->")
    assert "NVIDIA H100" in second and "`bench/results/h100/bench-2026-01-04-H100.json`" in second
    assert "H100" not in first and "`bench/results/bench-2026-01-02" in first


def test_newer_code_beside_fewer_peers_takes_the_place_of_older(root):
    """Of one state of the code the row that says more stays; of newer code any that has a ratio. Tables tell them."""
    folder, (name, other) = root / "bench" / "results", ("forward/bfloat16/d128/T4096", "forward/bfloat16/d64/T4096")
    longer = name.replace("4096", "8192")
    synthetic(folder, date="2026-01-02", names=[name, other, longer])

    def again(source, date, peers):
        path = synthetic(folder, date=date, names=[name])
        made = record.read(path)
        (row,) = made["rows"]
        row["runners"] = {who: row["runners"][who] for who in ("cupy_raw", "numba_cuda", *peers)}
        record.write(path, made | {"source_sha256": source})
        return report.load(folder)["gpu"]

    assert again("0", "2026-01-03", ["fa4"]).rows[name]["date"] == "2026-01-02"  # says less of the same code
    assert again("1", "2026-01-04", []).rows[name]["date"] == "2026-01-02"  # beside nobody
    found = again("1", "2026-01-05", ["fa4"])
    assert found.rows[name]["date"] == "2026-01-05"
    old = report.earlier(found, found.of([name, other]))
    assert old == {name: "", other: report.EARLIER}
    text, _ = report.speeds(found, [name, other])
    assert [report.EARLIER in line for line in text.splitlines()[2:]] == [False, True]
    text, _ = report.speeds(found, [other])  # a table with nothing newer in it
    assert report.EARLIER in text
    panels = report.plots(report.load(folder))["forward-bfloat16"][2]["panels"]
    (panel,) = panels.values()  # a curve is of one state of the code
    assert list(panels) == ["d = 128, full"]
    for key in ("speed", "before"):
        assert {T for points in panel[key].values() for T, _ in points} == {4096 if key == "speed" else 8192}
    assert [T for T, _ in panel["ratio"]] == [4096] and [T for T, _ in panel["ratio before"]] == [8192]
    path = synthetic(folder, date="2026-01-06", names=[name.replace("forward", "backward")])
    record.write(path, record.read(path) | {"source_sha256": "2"})
    plots = report.plots(report.load(folder))  # newer code in the other direction takes no curve away
    assert plots["forward-bfloat16"][2]["panels"] == panels and plots["backward-bfloat16"]


def test_backends_that_a_newer_row_lacks_are_shown_from_before(root):
    """A run of one backend takes no other's figures away; they are marked, told of in the caption, and of no ratio."""
    folder, name = root / "bench" / "results", "forward/bfloat16/d128/T4096"
    dates = "2026-01-02", "2026-01-03", "2026-01-04"
    for n, date in enumerate(dates):
        path = synthetic(folder, date=date, names=[name])
        made = record.read(path)
        runners = made["rows"][0]["runners"]
        if n == 0:
            runners["numba_cuda"] |= {"burst_us": [1, 1, 1], "burst_tflops": 4321.0}
        else:
            del runners["numba_cuda"]
        record.write(path, made | {"source_sha256": str(n), "commit": str(n) * 12})
    found = report.load(folder)["gpu"]
    assert found.rows[name]["date"] == dates[-1] and "numba_cuda" not in found.rows[name]["runners"]
    text, rows = report.speeds(found, [name])
    head, _, line = (x.split(" | ") for x in text.splitlines())
    assert line[head.index("numba_cuda")].startswith("4321") and line[head.index("numba_cuda")].endswith(report.EARLIER)
    assert report.EARLIER not in line[head.index("cupy_raw")]
    assert report.ratio(found.rows[name]) == float(line[-1].rstrip(" |").split(" / ")[0]) < 10
    said = report.caption(found, rows)
    assert "0" * 12 in said and "1" * 12 not in said and "2" * 12 in said


def test_a_table_of_milliseconds_shows_backends_from_before_too(root):
    folder, name = root / "bench" / "results", GROUPS["dense"][0]
    for date in ("2026-01-02", "2026-01-03"):
        path = synthetic(folder, date=date, names=[name])
        made = record.read(path)
        if date.endswith("3"):
            del made["rows"][0]["runners"]["numba_cuda"]
        record.write(path, made | {"source_sha256": date})
    text, rows = report.dense(report.load(folder)["gpu"])
    head, _, line = (x.strip("| ").split(" | ") for x in text.splitlines())
    at = head.index
    assert line[at("numba_cuda")].endswith(report.EARLIER) and report.EARLIER not in line[at("cupy_raw")]
    assert len(rows) == 2


def test_ratio_is_of_the_best_of_each():
    row = {"runners": {"cupy_raw": {"burst_us": [9, 10, 11]}, "numba_cuda": {"burst_us": [1, 4, 5]},
                       "fa4": {"burst_us": [1, 2, 3]}, "torch-cudnn": {"burst_us": [1, 3, 3]}}}  # fmt: skip
    assert report.ratio(row) == 0.5


def test_pages_are_in_step_with_the_records():
    """python -m bench.report --check"""
    assert report.main(["--check"]) == 0
