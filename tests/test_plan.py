"""rawflash.explain: the plan of a call, without running it."""

import subprocess
import sys
import types
from dataclasses import replace

import numpy as np
import pytest

import rawflash as rf
from rawflash import api, hardware, tiling, traffic
from rawflash.backends import lookup, why_not
from rawflash.plan import Plan, plan, size_text
from rawflash.problem import Problem, check

ALL = [("numba_cpu", "fa1"), ("numba_cpu", "fa2")]
ALL += [("numpy_tiled", algorithm) for algorithm in ("standard", "rowwise", "fa1", "fa2")]


def arrays_of(*shape, dtype=np.float32):
    return np.zeros((3, *shape), dtype)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("backend", "algorithm"), ALL)
def test_plan_is_what_the_call_would_use(backend, algorithm, direction):
    q, k, v = arrays_of(2, 4, 200, 32)
    options = dict(backend=backend, algorithm=algorithm, causal=True)
    made = rf.explain(q, k, v, direction, **options)
    problem, x = check(q, k, v, **options)
    tiles = tiling.plan_tiles(problem, hardware.chip_of(backend), direction)
    assert made.problem == problem and made.tiles == tiles
    assert made.traffic == traffic.traffic(problem, tiles, direction, visibility=x.visibility)
    assert made.kernel == f"{backend}.{algorithm}_{direction}"
    assert made.dense_bytes == 2 * 4 * 200 * 200 * 4
    assert made.unavailable is None and made.copied == ()
    assert {name for name, _ in made.refused} == {"numba_cpu", "numpy_tiled", "cupy_raw", "numba_cuda"} - {
        backend
    }


def test_plan_is_frozen_and_equal_to_itself():
    q, k, v = arrays_of(1, 64, 16)
    made = rf.explain(q, k, v)
    assert made == rf.explain(q, k, v) and hash(made) == hash(rf.explain(q, k, v))
    with pytest.raises(AttributeError):
        made.direction = "backward"


@pytest.mark.parametrize("name", list(hardware.CHIPS))
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_chip_without_arrays(name, direction, dtype):
    sizes = dict(B=2, Hq=8, Hkv=2, Tq=1024, Tk=2048, d=64, dv=64)
    problem = Problem(**sizes, dtype=dtype, causal=True, backend="cupy_raw")
    chip = hardware.chip(name)
    made = plan(problem, direction, chip)
    assert isinstance(made, Plan)
    assert 0 < made.tiles.smem_bytes <= chip.on_chip_bytes
    text = str(made)
    assert f"tiles for {name}" in text and "not here" in text
    assert max(map(len, text.splitlines())) <= 80
    for tile in made.tiles.resident:
        assert f"  {tile.name} " in text


def test_text_names_every_option():
    q, k, v = arrays_of(2, 4, 64, 16)
    text = str(
        rf.explain(
            q, k, v, window=(3, None), mask=np.ones((64, 64), bool), bias=np.zeros((64, 64), np.float32),
            alibi_slopes=np.ones(4), softcap=30.0, sinks=np.zeros(4, np.float32), dropout=0.25, seed=7,
            kv_lengths=[64, 1], deterministic=True, sram=65536, scale=0.5,
        )
    )  # fmt: skip
    flat = " ".join(text.split())
    words = ["window = (3, None)", "mask =", "bias (1, 1, 64, 64)", "ALiBi", "softcap = 30", "sinks"]
    words += ["dropout = 0.25", "seed = 7", "lengths per sequence", "deterministic", "sram = 65536 bytes"]
    for word in (*words, "scale = 0.5", "float32"):
        assert word in flat, word
    assert "None that" not in text


def test_copies_are_told():
    q, k, v = arrays_of(1, 64, 32)
    made = rf.explain(q[..., ::-1], k, v[..., ::2], backend="numpy_tiled")
    assert made.copied == ("q", "v")
    assert "copied   q, v" in str(made)


def test_a_copy_into_out_is_told():
    q, k, v = arrays_of(1, 64, 32)
    run = dict(backend="numpy_tiled")
    assert rf.explain(q, k, v, out=np.zeros_like(q), **run).copied == ()
    assert rf.explain(q, k, v, out=np.zeros((1, 64, 64), q.dtype)[..., ::2], **run).copied == ("out",)
    assert "copied   out: " in str(rf.explain(q, k, v, out=q, **run))


def test_layout_is_a_view():
    q, k, v = arrays_of(2, 64, 4, 32)
    made = rf.explain(q, k, v, layout="bthd")
    assert made.copied == () and made.problem.Tq == 64 and made.problem.Hq == 4


def test_lengths_and_masks_change_traffic_and_dense_bytes():
    q, k, v = arrays_of(2, 1, 256, 16)
    options = dict(backend="numpy_tiled", sram=8192)
    whole = rf.explain(q, k, v, **options)
    half = rf.explain(q, k, v, q_lengths=[256, 0], kv_lengths=[256, 0], **options)
    causal = rf.explain(q, k, v, causal=True, **options)
    assert half.dense_bytes * 2 == whole.dense_bytes
    assert half.traffic.elements * 2 == whole.traffic.elements
    assert causal.traffic.elements < whole.traffic.elements and causal.dense_bytes == whole.dense_bytes


def test_varlen_and_wrt():
    q, k, v = np.zeros((3, 2, 60, 8), np.float32)
    made = rf.explain(q, k, v, cu_seqlens_q=[0, 20, 60], cu_seqlens_k=[0, 20, 60])
    assert made.dense_bytes == 2 * (20**2 + 40**2) * 4
    bias = np.zeros((60, 60), np.float32)
    made = rf.explain(q, k, v, "backward", bias=bias, wrt=("q", "k", "v", "bias"), backend="numpy_tiled")
    assert made.traffic.store("dbias") > 0


def test_traffic_falls_with_more_memory():
    q, k, v = arrays_of(1, 2048, 64)
    moved = [rf.explain(q, k, v, sram=n << 10).traffic.elements for n in (32, 64, 128)]
    assert moved == sorted(moved, reverse=True)


def test_empty_arrays():
    q, k, v = arrays_of(2, 3, 0, 8)
    assert "0 bytes" in str(rf.explain(q, k, v))


def test_reasons_of_the_others():
    q, k, v = arrays_of(1, 64, 16)
    refused = dict(rf.explain(q, k, v, algorithm="standard").refused)
    assert "has no algorithm 'standard'" in refused["numba_cpu"]
    assert "has no algorithm 'standard'" in refused["cupy_raw"]
    assert "could run this call" in dict(rf.explain(q, k, v).refused)["numpy_tiled"]
    gpu = plan(Problem(Tq=64, Tk=64, d=64, dv=64, backend="cupy_raw"), "forward", hardware.chip("sm_90"))
    assert "takes CPU arrays" in dict(gpu.refused)["numba_cpu"]


def test_missing_numba_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    q, k, v = arrays_of(1, 64, 16)
    made = rf.explain(q, k, v, backend="numba_cpu")
    assert "needs numba, which is not installed" in made.unavailable and "not here" in str(made)


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (rf.ProblemError, dict(direction="sideways")),
        (rf.ProblemError, dict(direction="backward", return_lse=True)),
        (rf.ProblemError, dict(window=(-1, 0))),
        (rf.ProblemError, dict(casual=True)),
        (rf.BackendError, dict(backend="cupy_raw")),
        (rf.TileError, dict(sram=64)),
    ],
)
def test_a_call_that_would_be_refused(error, options):
    q, k, v = arrays_of(1, 64, 16)
    with pytest.raises(error):
        rf.explain(q, k, v, **options)


def test_a_gpu_backend_without_a_chip():
    with pytest.raises(rf.BackendError, match="name a chip"):
        plan(Problem(backend="cupy_raw"))


@pytest.fixture
def a_gpu(monkeypatch):
    """A CuPy that sees a GPU."""
    cuda = types.SimpleNamespace(is_available=lambda: True, runtime=types.SimpleNamespace(getDevice=lambda: 0))
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(hardware, "_gpu", lambda device: hardware.CHIPS["sm_90"])


@pytest.mark.parametrize("sizes", [dict(d=512, dv=64), dict(d=64, dv=257), dict(d=256, dv=256)])
def test_plan_refuses_what_the_call_refuses(a_gpu, sizes):
    problem = Problem(Tq=64, Tk=64, **sizes, backend="cupy_raw")
    made = plan(problem, "forward", hardware.chip("sm_90"))
    reason = why_not("cupy_raw", problem)
    assert made.unavailable == reason
    assert (reason is None) == (max(sizes.values()) <= 256)
    if reason is not None:
        assert f"has head dimensions up to 256; d is {problem.d}, dv is {problem.dv}" in reason
        assert "not here" in str(made)
        with pytest.raises(rf.BackendError, match="up to 256") as refusal:
            lookup(problem, "forward")
        assert str(refusal.value) == f"backend 'cupy_raw' {reason}"
    other = dict(plan(replace(problem, backend="numba_cpu"), "forward").refused)["cupy_raw"]
    assert other == (reason or "takes NVIDIA GPU arrays; this call has CPU arrays")


@pytest.mark.parametrize(("name", "needs"), [("numba_cpu", "numba"), ("cupy_raw", "cupy")])
def test_lookup_says_what_plan_says_is_missing(monkeypatch, name, needs):
    monkeypatch.setitem(sys.modules, needs, None)
    problem = Problem(backend=name)
    with pytest.raises(rf.BackendError) as refusal:
        lookup(problem, "forward")
    assert str(refusal.value) == f"backend {name!r} {why_not(name, problem)}"
    assert f"needs {needs}, which is not installed; pip install " in str(refusal.value)


def test_one_entry_of_a_visibility_stands_for_every_sequence():
    q, k, v = arrays_of(1, 2, 48, 8)
    problem, x = check(q, k, v, causal=True, q_offset=3)
    once = plan(problem, visibility=x.visibility)
    often = plan(replace(problem, B=10**9), visibility=x.visibility)
    assert often.traffic.elements == once.traffic.elements * 10**9
    assert often.traffic.flops == once.traffic.flops * 10**9
    assert often.dense_bytes == once.dense_bytes * 10**9
    assert plan(replace(problem, B=0), visibility=x.visibility).traffic.elements == 0


def test_sizes_past_64_bits_are_exact():
    T = 1 << 40
    problem = Problem(B=2, Hq=3, Hkv=3, Tq=T, Tk=T)
    whole = plan(problem)
    assert whole.dense_bytes == 2 * 3 * T * T * 4 and whole.traffic.flops == 2 * 3 * T * T * (2 + 3 + 2)
    br = plan(replace(problem, causal=True)).tiles.br
    visited = traffic.visits(replace(problem, causal=True), br, br)
    assert visited.pairs == 6 * (T // br) * (T // br + 1) // 2 and visited.cells == visited.pairs * br * br


def test_explain_imports_no_compiler():
    code = (
        "import sys, numpy as np, rawflash as rf; x = np.zeros((1, 64, 16), np.float32); "
        "str(rf.explain(x, x, x)); assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_size_text():
    assert [size_text(n) for n in (0, 1023, 1024, 3 << 20, 5 << 30)] == [
        "0 bytes", "1023 bytes", "1.0 KiB", "3.0 MiB", "5.0 GiB",
    ]  # fmt: skip


def test_decoding_has_no_backward_plan():
    caches = np.zeros((4, 1, 16, 8))
    with pytest.raises(rf.ProblemError, match="block_table is not accepted with direction='backward'"):
        rf.explain(np.zeros((1, 1, 1, 8)), caches, caches, direction="backward", block_table=[[0]], kv_lengths=[3])


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_backend_without_tiles_for_a_call_could_not_run_it(direction):
    """numba_cpu has blocks of 16 rows at least, numpy_tiled of one."""
    q, k = np.zeros((1, 3, 16, 45), np.float16), np.zeros((1, 1, 200, 45), np.float16)
    for sram, could in ((4197, False), (400000, True)):
        refused = dict(rf.explain(q, k, k, direction=direction, sram=sram, backend="numpy_tiled").refused)["numba_cpu"]
        words = "could run this call" if could else "has no tiles for this call: no legal tiles for fa2"
        assert refused.startswith(words), refused
        if not could:
            with pytest.raises(rf.TileError):
                rf.attention(q, k, k, sram=sram, backend="numba_cpu")


@pytest.mark.parametrize("in_order", [False, True])
def test_calls_that_share_a_plan_have_their_own_seeds(in_order, monkeypatch, rng):
    """And a fixed order where the plan says so, backward."""
    q, k, v, dout = rng.standard_normal((4, 1, 2, 9, 4))
    seen, kernel_of = [], api.lookup

    def lookup(problem, direction, device):
        kernel, chip = kernel_of(problem, direction, device)
        return lambda problem, *rest: seen.append((problem.seed, problem.deterministic)) or kernel(problem, *rest), chip

    monkeypatch.setattr(api, "lookup", lookup)
    monkeypatch.setattr(api, "plan_tiles", lambda *of: replace(tiling.plan_tiles(*of), in_order=in_order))
    monkeypatch.setattr("rawflash.problem._MEMO", {})
    out, lse = rf.attention(q, k, v, return_lse=True, dropout=0.5, seed=1)
    seen.clear()
    for seed in (1, 2, 2**64 - 1, 1):
        rf.attention_backward(dout, q, k, v, out, lse, dropout=0.5, seed=seed)
    assert seen == [(seed, in_order) for seed in (1, 2, 2**64 - 1, 1)]


@pytest.mark.parametrize("in_order", [False, True])
def test_a_call_is_done_by_the_plan_in_its_memo(in_order, rng):
    """As ``bench/traffic.py`` gives one: a kernel and tiles."""
    q, k, v = rng.standard_normal((3, 1, 2, 40, 4))
    problem, x = check(q, k, v, backend="numpy_tiled")
    kernel, chip = lookup(problem, "forward", None)
    tiles = replace(tiling.plan_tiles(problem, chip, "forward"), br=8, bc=16, in_order=in_order)
    given = []

    def noted(problem, tiles, *rest):
        given.append((problem.deterministic, tiles))
        kernel(problem, tiles, *rest)

    x.memo = {"forward": (noted, tiles)}
    np.testing.assert_allclose(api._forward(problem, x), rf.oracle.attention(q, k, v))
    assert given == [(in_order, tiles)]
