"""The GPU backends on a GPU: ``pytest -m gpu``. The calls, the problems and the bounds of the CPU backends.

A drawn problem is run by one algorithm, drawn with it: every problem is a kernel of its own, and compiling it takes
longer than running it.
"""

from collections import defaultdict

import numpy as np
import pytest
from gpu import ALGORITHMS, KINDS, on_gpu, to_cupy, to_host, to_kind
from hypothesis import given, seed, settings
from strategies import DTYPES, problems, varlen_problems
from test_forward import AWKWARD, awkward, make, make_many, normal
from tolerances import assert_close

import rawflash as rf
from rawflash import problem, sections, sm90, tiling
from rawflash.backends.cupy_raw import fa2_backward
from rawflash.tiles import Divided

pytestmark = pytest.mark.gpu
algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)


@pytest.fixture(autouse=True)
def fewest(request, monkeypatch):
    """Small problems reach kernels, too, that large ones have: in every third test. And in every third one backward
    kernels that they do not reach on sm_90."""
    name = request.node.name
    if name.startswith(PLANNED):
        return
    monkeypatch.setattr(problem, "_MEMO", {})
    if len(name) % 3 == 1:
        as_large_ones(monkeypatch)
        monkeypatch.setattr(tiling, "SPLIT_LEAST", 16)
    elif len(name) % 3 == 2:
        monkeypatch.setattr(sm90, "wgmma_takes_backward", lambda *_: False)


def as_large_ones(monkeypatch):
    """One block of threads for each block of keys, in the order of heads."""
    monkeypatch.setattr(sm90, "WGMMA_FEWEST", 0.0)
    monkeypatch.setattr(sm90, "WGMMA_STORED_HEADS", 0.0)
    monkeypatch.setattr(sm90, "WGMMA_TOGETHER", NEVER)
    monkeypatch.setattr(sm90, "WGMMA_SUMS", {256: (0.0, 0.0)})
    monkeypatch.setattr(sm90, "_divided_by_heads", lambda *_: Divided())
    monkeypatch.setattr(sm90, "_order_gains", lambda *_: False)


# Tests that plan for themselves, or are of what is planned
PLANNED = (
    "test_keys_in_parts", "test_rows_of_whole_chunks", "test_the_first_dQ", "test_rows_that_others",
    "test_blocks_of_keys", "test_pairs", "test_a_thousand_calls", "test_many_packed",
    "test_a_call_ends", "test_a_fixed_order",
)  # fmt: skip
NEVER = {0: 1 << 30, 1: 1 << 30}
FUSED_ROWS = ("WGMMA_FUSED_ROWS", "WGMMA_FUSED_IN_ORDER", "WGMMA_FUSED_STORED")
SHARDS = 30  # tests that draw: they are shared out to processes
PROBLEMS_A_SHARD = 40  # 1,200 problems


def check(host, reference, kind="cupy", small_on_device=False, **options):
    """Run a host case on the GPU, forward and backward, and hold every element against the oracle."""
    case = on_gpu(host, kind, small_on_device)
    out, lse = case.forward(**options)
    gradients = case.backward(out, lse, **options)
    assert type(out) is type(case.q) and type(lse) is type(case.q)
    results = {"out": to_host(out), "lse": to_host(lse)}
    results |= {"d" + name: to_host(g) for name, g in zip(case.wrt, gradients, strict=True)}
    for name, result in results.items():
        argument = host.options.get(name[1:]) if name[1:] in host.options else getattr(host, name[1:], None)
        if name not in ("out", "lse"):
            assert result.shape == argument.shape and result.dtype == argument.dtype, name
        assert_close(name, result, reference)
    return results


# ---- against the oracle


@algorithms
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_calls(name, dtype, algorithm):
    case, reference = awkward(name, dtype)
    check(case, reference, algorithm=algorithm, small_on_device=dtype == "float16")


def _draw(strategy, n):
    @seed(n)
    @settings(max_examples=PROBLEMS_A_SHARD, derandomize=False, database=None)
    @given(strategy)
    def test(case):
        check(case, case.reference(), small_on_device=case.how["seed"] % 2 == 1)

    return test


for n in range(SHARDS):
    drawn = varlen_problems(algorithms=ALGORITHMS) if n % 3 == 2 else problems(algorithms=ALGORITHMS)
    globals()[f"test_drawn_problems_{n}"] = _draw(drawn, n)


@pytest.mark.parametrize("T", [1, 127, 129, 1009, 4097])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_long_awkward_lengths(T, d, dtype):
    for causal in (False, True):
        case = make(B=1, Hq=2, Hkv=1, Tq=T, d=d, dtype=dtype, causal=causal)
        check(case, case.reference())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_many_packed_sequences(d, dtype, causal, deterministic, rng):
    """Some are empty; padding in front of them and behind is NaN. Their starts are on the device in float16."""
    lengths_q, lengths_k = rng.integers(0, 300, 50), rng.integers(0, 300, 50)
    lengths_q[[7, 20, 49]] = lengths_k[[7, 30, 31]] = 0
    starts = [np.cumsum([first, *lengths]).astype(np.int32) for first, lengths in ((150, lengths_q), (3, lengths_k))]
    case = make(lead=(), Hq=4, Hkv=2, Tq=starts[0][-1] + 5, Tk=starts[1][-1] + 200, d=d, dtype=dtype, causal=causal)
    for names, of in ((("q", "dout"), starts[0]), (("k", "v"), starts[1])):
        for name in names:
            array = getattr(case, name)
            array[:, : of[0]] = array[:, of[-1] :] = np.nan
    case.cu_seqlens = tuple(starts)
    check(case, case.reference(), small_on_device=dtype == "float16", deterministic=deterministic)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_a_call_ends_whatever_starts_on_the_device_say(d, causal, rng):
    """In a fixed order, in which blocks of keys wait for each other."""
    q, k, v, dout = (to_cupy(rng.standard_normal((4, 4096, d)).astype(np.float16)) for _ in range(4))
    for starts in ([0, 4000, 100, 3000, 50, 4096], [5000, -3, 2000, 2000, 1000, 0], rng.integers(-100, 5000, 600)):
        cu = to_cupy(np.array(starts, np.int32))
        out, lse = rf.attention_varlen(q, k, v, cu, cu, causal=causal, return_lse=True)
        gradients = rf.attention_varlen_backward(dout, q, k, v, out, lse, cu, cu, causal=causal, deterministic=True)
        assert [to_host(x).shape for x in gradients] == [q.shape] * 3


@pytest.mark.parametrize("options", [
    dict(Hq=16, Hkv=2, Tq=1500, d=256, causal=True), dict(Hq=4, Hkv=2, Tq=900, Tk=1300, d=192, dv=128, causal=True),
    dict(B=9, Hq=16, Hkv=4, Tq=1000, d=128, causal=True), dict(Hq=10, Tq=2000, d=64, dv=128),
], ids=["many columns", "two query heads", "few blocks of keys", "no mask"])  # fmt: skip
def test_a_fixed_order_where_none_is_asked_for(options):
    """As it is faster there: the gradients are right, and the bits are those of a call that asks for it."""
    case = make(**dict(B=1, dtype="bfloat16") | options)
    check(case, case.reference(), small_on_device=True)
    gpu = on_gpu(case)
    tiles = rf.explain(gpu.q, gpu.k, gpu.v, "backward", **gpu.options).tiles
    if tiles.chip == "sm_90":
        assert tiles.in_order
        out, lse = gpu.forward()
        first, *others = (gpu.backward(out, lse, **more) for more in ({}, {}, {"deterministic": True}))
        for other in others:
            assert all(np.array_equal(to_host(a), to_host(b)) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", ["few rows", "a triangle", "options", "padding"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_in_parts(dtype, name):
    """Grids too small for the device: thread blocks share the keys. The bits are the same each time."""
    case = {
        "few rows": make(B=1, Hq=2, Tq=5, Tk=3000, d=64, dtype=dtype),
        "a triangle": make(B=1, Hq=2, Hkv=1, Tq=3000, d=40, dv=24, dtype=dtype, causal=True),
        "options": make(B=2, Hq=2, Tq=33, Tk=2500, d=72, dtype=dtype, causal=True, dropout=0.2, softcap=5.0,
                        sinks=np.array([0.5, -1.0], np.float32), alibi_slopes=np.array([0.01, 0.002])),
        "padding": make(B=2, Hq=2, Tq=300, Tk=2500, d=64, dtype=dtype, causal=True, q_lengths=[300, 7],
                        kv_lengths=[1, 2500]),
    }[name]  # fmt: skip
    poison_pool()
    check(case, case.reference(), small_on_device=dtype == "float16")
    gpu = on_gpu(case)
    assert rf.explain(gpu.q, gpu.k, gpu.v, **gpu.options).tiles.parts > 1
    first, _ = gpu.forward()
    for _ in range(5):
        assert np.array_equal(to_host(gpu.forward()[0]), to_host(first))


# Calls of 16 bits as most are: more rows than few, and rows of whole 16 bytes. Drawn problems seldom have both.
WHOLE_ROWS = {
    "17 rows, one key": dict(Tq=17, Tk=1, d=64),
    "whole blocks": dict(B=1, Tq=384, Tk=512, d=128),
    "whole blocks, d = 64": dict(B=1, Tq=768, Tk=256, d=64),
    "one more than whole blocks": dict(Tq=193, Tk=257, d=64, causal=True),
    "one less": dict(Tq=127, Tk=255, d=128, causal=True),
    "long": dict(B=1, Tq=1100, d=128, causal=True),
    "long, d = 64": dict(B=1, Hq=4, Hkv=2, Tq=1009, Tk=1100, d=64, causal=True),
    "rows without keys": dict(Tq=700, Tk=300, d=64, causal=True, sinks=normal(2)),
    "window": dict(B=1, Tq=1000, d=128, window=(200, 7)),
    "narrow window": dict(B=1, Tq=900, d=64, window=(3, 0)),
    "offsets": dict(B=2, Tq=150, Tk=290, d=128, causal=True, q_offset=np.array([-130, 128])),
    "lengths": dict(B=3, Tq=300, Tk=500, d=128, q_lengths=[300, 0, 40], kv_lengths=[65, 500, 0]),
    "lengths, causal": dict(B=3, Tq=300, Tk=500, d=64, q_lengths=[300, 100, 40], kv_lengths=[7, 400, 256], causal=True),
    "packed": dict(
        Hq=4, Hkv=2, Tq=420, Tk=560, d=64, causal=True, cu=([2, 150, 150, 167, 400], [1, 130, 140, 140, 500])),
    "packed, window": dict(Hq=2, Tq=420, Tk=560, d=128, window=(100, 9), cu=([0, 64, 300, 420], [10, 138, 400, 560])),
    "grouped heads": dict(B=2, Hq=6, Hkv=2, Tq=200, Tk=333, d=128, causal=True),
    "one key head": dict(B=2, Hq=8, Hkv=1, Tq=130, Tk=200, d=64),
    "many heads": dict(B=8, Hq=24, Hkv=8, Tq=140, Tk=150, d=64, causal=True),
    "softcap, alibi": dict(Tq=300, Tk=400, d=128, causal=True, softcap=8.0, alibi_slopes=np.array([0.5, 0.01])),
    "softcap, window, d = 64": dict(B=2, Hq=4, Hkv=2, Tq=333, Tk=400, d=64, window=(100, 20), softcap=5.0),
    "softcap, d = 256": dict(Tq=300, Tk=333, d=256, causal=True, softcap=5.0),
    "alibi, window": dict(
        B=2, Hq=4, Hkv=2, Tq=300, Tk=400, d=128, window=(150, 9),
        alibi_slopes=np.array([0.3, 0.1, 0.03, 0.0], np.float16)),
    "alibi, lengths, d = 64": dict(B=3, Tq=300, Tk=500, d=64, q_lengths=[300, 0, 40], kv_lengths=[65, 500, 7],
                                   alibi_slopes=np.array([[0.5, 0.01], [-0.1, 0.2], [-3.0, 0.0]])),
    "alibi, d = 256": dict(Tq=200, Tk=333, d=256, alibi_slopes=np.array([0.3, 0.02])),
    "packed, softcap, alibi": dict(
        Hq=4, Hkv=2, Tq=420, Tk=560, d=64, causal=True, softcap=8.0, alibi_slopes=np.array([0.5, 0.1, 0.02, 0.0]),
        cu=([2, 150, 150, 167, 400], [1, 130, 140, 140, 500])),
    "scores of thousands": dict(Tq=300, Tk=600, d=128, size=500.0, causal=True),
    "scores of thousands, d = 64": dict(Tq=300, Tk=600, d=64, size=500.0),
    "few columns": dict(Tq=200, Tk=300, d=8, dv=200),
    "96": dict(Tq=333, Tk=444, d=96, causal=True),
    "192, 128": dict(Tq=300, Tk=333, d=192, dv=128, causal=True),
    "192": dict(Tq=200, Tk=333, d=192),
    "256": dict(Tq=200, Tk=333, d=256, causal=True),
}  # fmt: skip


@pytest.mark.parametrize("dtype, large", [("float16", True), ("bfloat16", False)])
@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_rows_of_whole_chunks(name, dtype, large, monkeypatch):
    """sm_90 has kernels of its own for these; here, for as few pieces of work as there are, too, and as of many."""
    monkeypatch.setattr(problem, "_MEMO", {})
    monkeypatch.setattr(sm90, "WGMMA_FEWEST", 0.0)
    if large:
        as_large_ones(monkeypatch)
    options = dict(WHOLE_ROWS[name])
    cu = options.pop("cu", None)
    case = make(dtype=dtype, lead=() if cu else None, **options)
    case.cu_seqlens = cu
    poison_pool()
    check(case, case.reference(), small_on_device=dtype == "float16")
    if not cu:
        gpu = on_gpu(case)
        for direction in ("forward", "backward"):
            tiles = rf.explain(gpu.q, gpu.k, gpu.v, direction, **gpu.options).tiles
            assert (tiles.family == "wgmma") == (tiles.chip == "sm_90")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("d, causal", [(64, True), (64, False), (128, True), (128, False), (256, True)])
def test_a_thousand_calls_give_the_same_bits(d, causal, dtype):
    """More blocks than multiprocessors, and whichever is free takes the next: the forward pass, and the backward pass
    without atomics."""
    heads = dict(Hq=16, Hkv=16, Tq=2048) if d == 128 else dict(Hq=8, Hkv=4, Tq=1100)  # pairs; by heads
    case = on_gpu(make(B=2, d=d, dtype=dtype, causal=causal, **heads))

    def bits(results):
        return [x.view(f"u{x.itemsize}") for x in results]

    out, lse = case.forward()
    first = bits((out, lse, *case.backward(out, lse, deterministic=True)))
    for n in range(1000):
        again = bits(case.forward())
        if n % 2:
            again += bits(case.backward(out, lse, deterministic=True))
        assert all(bool((a == b).all()) for a, b in zip(first, again, strict=False)), n


FUSED = {
    "as planned": dict(Hq=110, Tq=520, d=64),
    "as planned, causal, d = 128": dict(Hq=60, Tq=1030, d=128, causal=True),
    "plain": dict(Hq=60, Tq=400, d=64),
    "plain, d = 128": dict(Hq=60, Tq=330, Tk=400, d=128),
    "causal": dict(Hq=40, Tq=700, d=64, causal=True),
    "groups": dict(B=2, Hq=40, Hkv=10, Tq=400, Tk=300, d=128, causal=True),
    "window": dict(Hq=40, Tq=500, d=128, window=(100, 30)),
    "other columns": dict(Hq=30, Tq=300, d=72, dv=40, q_offset=-90, causal=True),
    "deterministic, d = 128": dict(Hq=60, Tq=330, Tk=400, d=128, deterministic=True),
    "deterministic, causal": dict(B=2, Hq=40, Hkv=20, Tq=500, Tk=300, d=64, causal=True, deterministic=True),
    "deterministic, causal, all rows see keys": dict(
        B=2, Hq=40, Hkv=20, Tq=500, Tk=600, d=64, causal=True, deterministic=True),
    "deterministic, window": dict(Hq=40, Tq=500, d=64, window=(100, 30), deterministic=True),
}


def check_backward_again_and_again(case, reference):
    """Right in each call and each replay of a graph, whatever lay in memory."""
    import cupy

    gpu = on_gpu(case)
    out, lse = gpu.forward()

    def right(gradients):
        for name, gradient in zip(case.wrt, gradients, strict=True):
            assert_close("d" + name, to_host(gradient), reference)

    bits = []
    for _ in range(10):
        poison_pool()
        gradients = gpu.backward(out, lse)
        right(gradients)
        bits.append([to_host(gradient).tobytes() for gradient in gradients])
    assert not case.options.get("deterministic") or all(again == bits[0] for again in bits)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        gpu.backward(out, lse)
        stream.begin_capture()
        results = gpu.backward(out, lse)
        graph = stream.end_capture()
        for _ in range(10):
            for result in results:
                result.fill(np.nan)
            graph.launch()
            stream.synchronize()
            right(results)


IN_ORDER = {
    "no mask": dict(Hq=30, Tq=600, Tk=700, d=128),
    "no mask, d = 64": dict(Hq=30, Tq=700, Tk=600, d=64),
    "causal, all at once": dict(Hq=20, Tq=700, d=128, causal=True),
    "causal": dict(Hq=40, Tq=700, Tk=900, d=128, causal=True),
    "groups": dict(B=2, Hq=40, Hkv=10, Tq=700, Tk=900, d=128, causal=True),
    "groups, d = 64": dict(B=2, Hq=40, Hkv=20, Tq=1000, d=64, causal=True),
    "groups, softcap": dict(B=2, Hq=40, Hkv=20, Tq=700, d=64, causal=True, softcap=8.0),
    "causal, d < dv": dict(Hq=40, Tq=640, d=64, dv=128, causal=True),
    "more rows than keys": dict(Hq=50, Tq=700, Tk=400, d=96, causal=True),
    "offsets": dict(B=3, Hq=20, Tq=500, Tk=600, d=128, causal=True, q_offset=np.array([-170, 3, 900])),
    "lengths": dict(B=3, Hq=20, Tq=500, d=64, causal=True, q_lengths=[500, 0, 40], kv_lengths=[65, 500, 7]),
    "window": dict(Hq=40, Tq=700, d=128, window=(200, 0)),
    "window, d = 64": dict(Hq=40, Tq=900, d=64, window=(300, 100)),
    "softcap": dict(Hq=40, Tq=700, d=128, causal=True, softcap=8.0),
    "softcap, no mask, d = 64": dict(Hq=30, Tq=700, Tk=600, d=64, softcap=8.0),
    "softcap, d = 256": dict(Hq=20, Tq=700, d=256, causal=True, softcap=8.0),
    "no mask, d = 256": dict(Hq=20, Tq=500, Tk=640, d=256),
    "causal, d = 256": dict(B=2, Hq=20, Tq=700, d=256, causal=True),
    "groups, d = 192, dv = 128": dict(B=2, Hq=20, Hkv=5, Tq=500, Tk=700, d=192, dv=128, causal=True),
    "window, lengths, d = 256": dict(
        B=3, Hq=20, Tq=500, d=256, window=(200, 50), q_lengths=[500, 0, 40], kv_lengths=[65, 500, 7]),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", IN_ORDER)
def test_blocks_of_keys_in_a_fixed_order(name, dtype, monkeypatch):
    """Backward on sm_90, deterministic, short: the first one to add stores; causal, the shortest and the longest blocks
    of keys come first, if there are more than run at once. Of grouped heads the same rows come together, downwards."""
    as_large_ones(monkeypatch)
    case, reference = make_many(dtype=dtype, **dict(deterministic=True) | IN_ORDER[name])
    gpu = on_gpu(case)
    tiles = rf.explain(gpu.q, gpu.k, gpu.v, "backward", **gpu.options).tiles
    constants = dict(tiles.constants)
    if tiles.chip == "sm_90":
        assert tiles.family == "wgmma" and not constants.get("FUSED")
        if "TOGETHER" in constants:
            assert constants["TOGETHER"] == name.startswith("groups") == (gpu.q.shape[1] > gpu.k.shape[1])
    check_backward_again_and_again(case, reference)


# Whether blocks of keys are divided, and of those under a mask in which way, on 132 multiprocessors
SEVERAL = {
    "no mask, d = 64": (dict(Hq=20, Tq=1600, Tk=1700, d=64), 1, 0),
    "no mask, divided, d = 64": (dict(B=2, Hq=2, Tq=1900, Tk=2000, d=64), 1, 0),
    "no mask, divided, shared, d = 64": (dict(Hq=4, Hkv=2, Tq=1900, Tk=2000, d=64), 1, 0),
    "no mask, divided, shared, alibi": (dict(
        Hq=3, Hkv=1, Tq=1700, Tk=1849, d=64, alibi_slopes=np.array([0.5, 0.1, 0.0])), 1, 0),
    "no mask, last ones divided, d = 64": (dict(Hq=12, Tq=2048, d=64), 1, 0),
    "no mask, in pairs": (dict(Hq=12, Tq=1536, Tk=1664, d=128), 1, 0),
    "no mask, divided, in pairs": (dict(Hq=3, Tq=2048, d=96), 1, 0),
    "no mask, softcap": (dict(Hq=12, Tq=1536, d=128, softcap=8.0), 1, 0),
    "no mask, groups": (dict(B=2, Hq=16, Hkv=8, Tq=600, Tk=700, d=64), 0, 0),
    "no mask, lengths": (dict(B=3, Hq=6, Tq=700, d=64, q_lengths=[700, 0, 40], kv_lengths=[65, 700, 300]), 0, 0),
    "no mask, d = 256": (dict(Hq=8, Tq=900, Tk=1000, d=256), 0, 0),
    "no mask, groups, d = 192, dv = 128": (dict(B=2, Hq=12, Hkv=6, Tq=500, Tk=700, d=192, dv=128), 0, 0),
    "late, d = 64": (dict(Hq=16, Tq=1600, Tk=1700, d=64, causal=True), 0, 0),
    "late, d = 128": (dict(Hq=16, Tq=1700, Tk=1600, d=128, causal=True), 0, 0),
    "late, d = 256": (dict(B=2, Hq=8, Tq=1000, d=256, causal=True), 0, 0),
    "late, softcap, d = 192, dv = 128": (dict(Hq=12, Tq=700, Tk=900, d=192, dv=128, causal=True, softcap=8.0), 0, 0),
    "two parts, d = 64": (dict(Hq=8, Tq=1700, d=64, causal=True), 1, 1),
    "two parts, d = 128": (dict(Hq=8, Tq=1600, Tk=1700, d=128, causal=True), 1, 1),
    "two parts, offsets": (dict(
        B=3, Hq=3, Tq=1500, Tk=1600, d=128, causal=True, q_offset=np.array([-1000, 3, 900])), 1, 1),
    "two parts, lengths": (dict(
        B=3, Hq=3, Tq=1500, Tk=1600, d=64, causal=True, q_lengths=[1500, 0, 700], kv_lengths=[800, 1600, 77]), 1, 1),
    "parts, d = 64": (dict(Hq=2, Tq=1700, d=64, causal=True), 1, 1),
    "parts, d = 128": (dict(Hq=3, Tq=2000, Tk=1600, d=128, causal=True), 1, 1),
    "parts, alibi": (dict(
        B=2, Hq=2, Tq=1500, Tk=1600, d=64, causal=True, alibi_slopes=np.array([0.5, 0.01])), 1, 1),
    "no mask, d < dv": (dict(Hq=12, Tq=1536, Tk=1500, d=64, dv=128), 1, 0),
    "no mask, short": (dict(Hq=4, Tq=500, Tk=600, d=128), 1, 0),
    "no mask, softcap, d = 64": (dict(Hq=10, Tq=700, Tk=1700, d=64, softcap=8.0), 1, 0),
    "late, groups, d = 64": (dict(Hq=32, Hkv=16, Tq=1600, Tk=1700, d=64, causal=True), 0, 0),
    "late, groups, d = 256": (dict(B=2, Hq=8, Hkv=4, Tq=1000, d=256, causal=True), 0, 0),
    "late, short, d < dv": (dict(B=2, Hq=14, Tq=1030, d=64, dv=128, causal=True), 0, 0),
    "two parts, groups, d = 128": (dict(Hq=16, Hkv=8, Tq=1700, Tk=1600, d=128, causal=True), 1, 1),
    "parts, groups": (dict(Hq=4, Hkv=2, Tq=1700, d=64, causal=True), 1, 1),
    "parts, short, d = 128": (dict(Hq=5, Tq=1030, Tk=1100, d=128, causal=True), 1, 1),
    "by head, d = 64": (dict(Hq=15, Hkv=5, Tq=1500, d=64, causal=True), 0, 0),
    "by head, alibi, d = 128": (dict(
        Hq=9, Hkv=3, Tq=2500, Tk=2600, d=128, causal=True, alibi_slopes=np.linspace(0, 0.5, 9)), 0, 0),
    "by head, parts, d = 128": (dict(Hq=8, Hkv=2, Tq=1700, Tk=1600, d=128, causal=True), 1, 1),
    "by head, parts, lengths": (dict(
        B=3, Hq=4, Hkv=1, Tq=1500, d=64, causal=True, q_lengths=[1500, 0, 700], kv_lengths=[800, 1500, 77]), 1, 1),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", SEVERAL)
def test_blocks_of_keys_of_few_heads_in_a_fixed_order(name, dtype, monkeypatch):
    """Backward on sm_90, deterministic: dQ has several sums, which are added up in the end."""
    options, divided, diagonal = SEVERAL[name]
    monkeypatch.setattr(problem, "_MEMO", {})
    case, reference = make_many(few=3, dtype=dtype, deterministic=True, **options)
    gpu = on_gpu(case)
    tiles = rf.explain(gpu.q, gpu.k, gpu.v, "backward", **gpu.options).tiles
    if tiles.chip == "sm_90":
        constants = dict(tiles.constants)
        assert constants["SUMS"] > 1 and constants["DIAGONAL"] == diagonal and (tiles.divided.threads > 0) == divided
        assert constants.get("PAIRED", 0) == ("pairs" in name)
        assert constants.get("BY_HEAD", 0) == name.startswith("by head")
    check_backward_again_and_again(case, reference)


STORED = {
    "as planned": dict(Hq=150, Tq=512, d=64, causal=True),
    "as planned, d = 128": dict(Hq=150, Tq=512, d=128, causal=True),
    "as planned, groups": dict(B=3, Hq=48, Hkv=24, Tq=300, Tk=400, d=128, causal=True),
    "a thousand rows": dict(Hq=20, Tq=1000, d=64, causal=True),
    "more rows than keys": dict(Hq=12, Tq=1500, Tk=1400, d=128, causal=True),
    "one row": dict(Hq=20, Tq=1, Tk=500, d=64, causal=True),
    "offsets": dict(B=3, Hq=10, Tq=200, Tk=500, d=128, causal=True, q_offset=np.array([-150, 20, 400])),
    "rows of others, offsets": dict(B=3, Hq=10, Tq=200, Tk=500, d=64, causal=True, q_offset=np.array([-150, 20, 400])),
    "rows of others, groups": dict(B=2, Hq=40, Hkv=10, Tq=500, Tk=300, d=128, causal=True),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", STORED)
def test_the_first_dQ_is_stored(name, dtype, monkeypatch):
    """Backward on sm_90, short and causal: what blocks of threads add to has been stored by those before them."""
    as_large_ones(monkeypatch)
    if name.startswith("rows of others"):
        shortest_lag(monkeypatch)
    case, reference = make_many(dtype=dtype, **STORED[name])
    gpu = on_gpu(case)
    tiles = rf.explain(gpu.q, gpu.k, gpu.v, "backward", **gpu.options).tiles
    assert dict(tiles.constants).get("STORES", 0) == (tiles.chip == "sm_90")
    check_backward_again_and_again(case, reference)


def shortest_lag(monkeypatch):
    as_large_ones(monkeypatch)
    always = defaultdict(lambda: (0, 0))
    for name, value in (("WGMMA_FUSED", always), ("WGMMA_FUSED_GAIN", (np.inf,) * 3), ("WGMMA_FUSED_KEYS", 1),
                        ("WGMMA_FUSED_LAG", 0.0), ("WGMMA_DOWN_WAVES", 0.0),
                        *((name, {64: 0, 128: 0}) for name in FUSED_ROWS)):  # fmt: skip
        monkeypatch.setattr(sm90, name, value)
    monkeypatch.setattr(sections, "_section_in_order", lambda *_: 0)  # else one section, and nobody is before others


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FUSED)
def test_rows_that_others_prepare_and_finish(name, dtype, monkeypatch):
    """Backward on sm_90; with the shortest lag, too, so that blocks of threads wait for those that run beside them."""
    if not name.startswith("as planned"):
        shortest_lag(monkeypatch)
    case, reference = make_many(dtype=dtype, **FUSED[name])
    gpu = on_gpu(case)
    tiles = rf.explain(gpu.q, gpu.k, gpu.v, "backward", **gpu.options).tiles
    assert (tiles.lag > 0) == (tiles.chip == "sm_90")
    check_backward_again_and_again(case, reference)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("others, parts", [(3, 3), (1, 8)])
@pytest.mark.parametrize("options", [
    dict(Hq=9, Tq=1100, Tk=700, d=64), dict(B=2, Hq=6, Hkv=3, Tq=700, Tk=500, d=128),
    dict(Hq=7, Tq=900, Tk=330, d=96, dv=40),
])  # fmt: skip
def test_blocks_of_keys_that_are_divided(options, others, parts, dtype, monkeypatch):
    """Backward on sm_90: the last blocks of keys, of which several blocks of threads have some rows each."""
    monkeypatch.setattr(problem, "_MEMO", {})
    shortest_lag(monkeypatch)
    monkeypatch.setattr(sm90, "WGMMA_FUSED_LAG", 5.5 / sm90.WGMMA_PROCESSORS)
    monkeypatch.setattr(sm90, "_divided", lambda *_: Divided(2, others, parts))
    case, reference = make_many(dtype=dtype, **options)
    gpu = on_gpu(case)
    tiles = rf.explain(gpu.q, gpu.k, gpu.v, "backward", **gpu.options).tiles
    assert (tiles.divided.threads > 0) == (tiles.chip == "sm_90")
    check_backward_again_and_again(case, reference)


BY_HEADS = {
    "one key head": dict(Hq=8, Hkv=1, Tq=700, Tk=700, d=128, causal=True),
    "one key head, d = 64": dict(B=2, Hq=5, Hkv=1, Tq=900, Tk=900, d=64, causal=True),
    "no mask": dict(Hq=8, Hkv=2, Tq=500, Tk=600, d=128),
    "no mask, d = 64": dict(B=2, Hq=9, Hkv=3, Tq=600, Tk=330, d=64),
    "rows": dict(Hq=1, Tq=2000, Tk=900, d=128, causal=True),
    "rows, d = 64": dict(Hq=1, Tq=1900, Tk=300, d=64),
    "heads and rows": dict(Hq=2, Hkv=1, Tq=1500, Tk=1500, d=64, causal=True),
    "offsets": dict(B=3, Hq=4, Hkv=1, Tq=300, Tk=500, d=96, causal=True, q_offset=np.array([-150, 20, 400])),
    "lengths": dict(B=3, Hq=6, Hkv=2, Tq=500, d=128, causal=True, q_lengths=[500, 0, 40], kv_lengths=[65, 500, 7]),
    "deterministic": dict(Hq=8, Hkv=1, Tq=700, Tk=700, d=128, causal=True, deterministic=True),
    "deterministic, d = 64": dict(B=2, Hq=6, Hkv=2, Tq=900, Tk=700, d=64, deterministic=True),
    "deterministic, rows": dict(Hq=1, Tq=2500, Tk=1200, d=128, window=(1400, 0), deterministic=True),
    "undivided": dict(B=2, Hq=16, Hkv=4, Tq=500, Tk=640, d=128, causal=True),
    "undivided, d = 64": dict(B=2, Hq=24, Hkv=4, Tq=700, Tk=520, d=64, window=(200, 30)),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", BY_HEADS)
def test_blocks_of_keys_that_are_divided_by_heads(name, dtype, monkeypatch):
    """Backward on sm_90, few blocks of keys, or under a mask more with many query heads: the same rows of all heads
    come together, down and up."""
    monkeypatch.setattr(problem, "_MEMO", {})
    for module in (fa2_backward, sections):
        monkeypatch.setattr(module, "WGMMA_PROCESSORS", 8)
    if name.startswith("undivided"):
        monkeypatch.setattr(sm90, "_divided_by_heads", lambda *_: Divided())
    case, reference = make_many(dtype=dtype, **BY_HEADS[name])
    gpu = on_gpu(case)
    tiles = rf.explain(gpu.q, gpu.k, gpu.v, "backward", **gpu.options).tiles
    assert dict(tiles.constants).get("TOGETHER", 0) == (tiles.chip == "sm_90")
    assert (tiles.divided.threads > 0) == (tiles.chip == "sm_90" and not name.startswith("undivided"))
    check_backward_again_and_again(case, reference)


PAIRED = {
    "one cluster": dict(Hq=2, Tq=128, Tk=256, d=128),
    "plain": dict(Hq=60, Tq=384, Tk=512, d=128),
    "parts of blocks": dict(Hq=40, Tq=370, Tk=500, d=128),
    "groups": dict(B=2, Hq=12, Hkv=4, Tq=256, Tk=768, d=128),
    "other columns": dict(Hq=30, Tq=330, Tk=250, d=96, dv=72),
    "an odd block of keys": dict(Hq=40, Tq=370, Tk=330, d=128),
    "odd blocks of both": dict(B=2, Hq=12, Hkv=4, Tq=300, Tk=640, d=128),
    "divided": dict(Hq=7, Tq=1000, Tk=700, d=128),
    "divided, groups": dict(B=2, Hq=6, Hkv=3, Tq=640, Tk=500, d=128),
    "causal": dict(Hq=40, Tq=512, Tk=512, d=128, causal=True),
    "causal, fewer rows": dict(B=2, Hq=20, Tq=256, Tk=1024, d=128, causal=True),
    "causal, more rows": dict(Hq=40, Tq=1000, Tk=512, d=96, dv=72, causal=True),
    "causal, groups": dict(B=2, Hq=12, Hkv=4, Tq=384, Tk=768, d=128, causal=True),
    "causal, offsets": dict(B=3, Hq=20, Tq=512, Tk=512, d=128, causal=True, q_offset=np.array([-170, 3, 900])),
    "causal, odd blocks of both": dict(B=2, Hq=12, Hkv=4, Tq=580, Tk=640, d=128, causal=True),
    "causal, keys that do not exist": dict(B=3, Hq=20, Tq=500, Tk=500, d=128, causal=True),
    "causal, keys that do not exist, offsets": dict(
        B=3, Hq=20, Tq=500, Tk=610, d=128, causal=True, q_offset=np.array([-170, 3, 900])),
    "a window without a lower end": dict(Hq=30, Tq=640, Tk=512, d=128, window=(None, 37)),
    "deterministic": dict(Hq=60, Tq=384, Tk=512, d=128, deterministic=True),
    "divided, deterministic": dict(Hq=7, Tq=1000, Tk=700, d=128, deterministic=True),
    "deterministic, causal": dict(B=3, Hq=40, Hkv=20, Tq=640, Tk=768, d=128, causal=True, deterministic=True),
    "deterministic, causal, offsets": dict(
        B=3, Hq=20, Tq=500, Tk=512, d=128, causal=True, q_offset=np.array([-170, 3, 900]), deterministic=True),
    "deterministic, odd blocks of both": dict(B=2, Hq=12, Hkv=4, Tq=300, Tk=640, d=128, deterministic=True),
    "deterministic, causal, odd blocks of both": dict(
        B=3, Hq=40, Hkv=20, Tq=820, Tk=820, d=128, causal=True, deterministic=True),
}


def pairs(monkeypatch, name):
    monkeypatch.setattr(problem, "_MEMO", {})
    monkeypatch.setattr(sm90, "WGMMA_PAIRED_ROWS", 0)
    monkeypatch.setattr(sm90, "WGMMA_PAIRED_ODD", defaultdict(int))
    shortest_lag(monkeypatch)
    if name.startswith("divided"):
        monkeypatch.setattr(sm90, "WGMMA_FUSED_LAG", 6.5 / sm90.WGMMA_PROCESSORS)
        monkeypatch.setattr(sm90, "_divided", lambda *_: Divided(2, 4, 3))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", PAIRED)
def test_pairs_of_blocks_of_threads(name, dtype, monkeypatch):
    """Backward on sm_90, d = 128: clusters of two, each of which computes dQ of half of the rows."""
    pairs(monkeypatch, name)
    case, reference = make_many(dtype=dtype, **PAIRED[name])
    gpu = on_gpu(case)
    tiles = rf.explain(gpu.q, gpu.k, gpu.v, "backward", **gpu.options).tiles
    assert dict(tiles.constants).get("PAIRED", 0) == (tiles.chip == "sm_90")
    assert (tiles.divided.threads > 0) == (tiles.chip == "sm_90" and name.startswith("divided"))
    check_backward_again_and_again(case, reference)


def test_pairs_and_a_row_of_nan(monkeypatch):
    """A NaN in dO of one row makes delta of that row NaN, and no other's dQ."""
    pairs(monkeypatch, "plain")
    case = make(dtype="bfloat16", B=1, **PAIRED["plain"])
    case.dout[..., 70, 3] = np.nan
    moved = on_gpu(case)
    tiles = rf.explain(moved.q, moved.k, moved.v, "backward", **moved.options).tiles
    assert dict(tiles.constants).get("PAIRED", 0) == (tiles.chip == "sm_90")
    dq, dk, dv = (to_host(x).astype(np.float32) for x in moved.backward(*moved.forward())[:3])
    assert np.isnan(dq[..., 70, :]).all() and np.isfinite(np.delete(dq, 70, axis=-2)).all()
    assert np.isnan(dk).all() and np.isnan(dv[..., 3]).all()


@pytest.mark.parametrize("T, causal", [
    (2048, False), (4096, False), (8192, False), (4096, True), (8192, True), (4160, False), (4450, True),
])  # fmt: skip
def test_pairs_as_planned(T, causal, monkeypatch):
    """The same gradients as without them, in long calls, whose last blocks of keys are divided without a mask."""
    import cupy

    rng = cupy.random.default_rng(T)
    q, k, v, dout = (rng.standard_normal((1, 40, T, 128), dtype=cupy.float32).astype(cupy.float16) for _ in range(4))
    out, lse = rf.attention(q, k, v, causal=causal, return_lse=True)
    found = {}
    for rows in (sm90.WGMMA_PAIRED_ROWS, T + 1):
        monkeypatch.setattr(problem, "_MEMO", {})
        monkeypatch.setattr(sm90, "WGMMA_PAIRED_ROWS", rows)
        tiles = rf.explain(q, k, v, "backward", causal=causal).tiles
        assert dict(tiles.constants).get("PAIRED", 0) == (tiles.chip == "sm_90" and rows <= T)
        found[rows] = rf.attention_backward(dout, q, k, v, out, lse, causal=causal)
    for one, other in zip(*found.values(), strict=True):
        for n in range(0, T, T // 8):  # under a mask the last gradients are far smaller than the first
            part, beside = (a[:, :, n : n + T // 8].astype(cupy.float32) for a in (one, other))
            assert float(abs(part - beside).max()) <= 2e-3 * float(abs(beside).max())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("d, heads, rows, keys", [
    (64, 5, 600, 2100), (64, 48, 1300, 520), (128, 5, 600, 2100), (128, 40, 1000, 600), (256, 3, 500, 1500),
])  # fmt: skip
def test_pieces_that_blocks_of_threads_share(d, heads, rows, keys, dtype, monkeypatch):
    """Fewer pieces than multiprocessors, and a few times as many: on sm_90 parts of them are merged. The same bits in
    each call and each replay of a graph: of memory that is used again, and of words that are to be zeros again."""
    import cupy

    monkeypatch.setattr(problem, "_MEMO", {})
    for name, value in (("WGMMA_FEWEST", 0.0), ("WGMMA_BALANCED_LEAST", 1), ("WGMMA_BALANCED_COST", -1.0)):
        monkeypatch.setattr(sm90, name, value)
    case = make(B=1, Hq=heads, Tq=rows, Tk=keys, d=d, dtype=dtype, sinks=normal(heads))
    gpu = on_gpu(case)
    poison_pool()
    tiles = rf.explain(gpu.q, gpu.k, gpu.v, **gpu.options).tiles
    assert (tiles.parts_bytes > 0) == (tiles.chip == "sm_90")
    reference = case.reference()
    out, lse = gpu.forward()
    assert_close("out", to_host(out), reference)
    assert_close("lse", to_host(lse), reference)

    def same(results):
        return all(bool((a.view(f"u{a.itemsize}") == b.view(f"u{b.itemsize}")).all())
                   for a, b in zip((out, lse), results, strict=True))  # fmt: skip

    for n in range(300):
        assert same(gpu.forward()), n
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        gpu.forward()
        stream.begin_capture()
        results = gpu.forward()
        graph = stream.end_capture()
        for n in range(100):
            for result in results:
                result.fill(np.nan)
            graph.launch()
            stream.synchronize()
            assert same(results), n


@pytest.mark.parametrize("d, dv", [(256, 256), (192, 128), (8, 256), (250, 1), (96, 96)])
@pytest.mark.parametrize("dtype", DTYPES)
@algorithms
def test_head_dimensions(d, dv, dtype, algorithm):
    case = make(B=1, Hq=2, Tq=150, Tk=170, d=d, dv=dv, dtype=dtype, causal=True)
    check(case, case.reference(), algorithm=algorithm)


def test_head_dimensions_past_the_largest_are_refused():
    case = on_gpu(make(B=1, Tq=4, d=257))
    with pytest.raises(rf.BackendError, match="257"):
        case.forward()


# ---- kinds of arrays


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_kinds(kind, dtype):
    if kind == "jax" and dtype == "float64":
        pytest.skip("JAX has float64 only when it is switched on for the whole process")
    if kind == "numba" and dtype == "bfloat16":
        pytest.skip("Numba's device arrays have no bfloat16")
    case = make(Hq=4, Hkv=2, Tq=37, d=16, causal=True, dtype=dtype, sinks=np.zeros(4, np.float32))
    reference = case.reference()
    for algorithm in ALGORITHMS:
        check(case, reference, kind=kind, algorithm=algorithm)


def test_torch_strides_and_layout():
    import torch

    q, k, v = (torch.randn(2, 33, 3, 16, device="cuda").transpose(1, 2) for _ in range(3))
    out = rf.attention(q, k, v, causal=True)
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    assert (out.double() - want).abs().max() < 1e-5
    again = rf.attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, layout="bthd")
    assert torch.equal(again.transpose(1, 2), out)


def test_other_streams():
    import cupy
    import torch

    x = torch.randn(3, 2, 4, 300, 64, device="cuda")
    want = rf.attention(*x, causal=True)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s: a kernel on another stream would overtake this
        y = x * 2 - x
        out = rf.attention(*y, causal=True)
    stream.synchronize()
    assert torch.equal(out, want)
    ours = cupy.cuda.Stream(non_blocking=True)
    z = cupy.from_dlpack(x)
    with ours:
        out = rf.attention(*z, causal=True)
    ours.synchronize()
    assert np.array_equal(to_host(out), to_host(want))


def test_several_devices():
    """The arrays' device is used, whichever is the current one, and stays the current one."""
    import cupy
    import torch

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    case = make(Tq=100, Tk=900, d=64, kv_lengths=[900, 30])
    here = case.reference()
    for kind in ("cupy", "torch"):
        with cupy.cuda.Device(1), torch.cuda.device(1):
            there = on_gpu(case, kind)
        assert cupy.cuda.runtime.getDevice() == torch.cuda.current_device() == 0
        for algorithm in ALGORITHMS:
            out, lse = there.forward(algorithm=algorithm)
            gradients = there.backward(out, lse, algorithm=algorithm)
            for name, result in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True):
                assert (result.device.id if kind == "cupy" else result.get_device()) == 1
                assert_close(name, to_host(result), here)
        assert cupy.cuda.runtime.getDevice() == torch.cuda.current_device() == 0
        with pytest.raises(rf.ProblemError, match="GPU"):
            rf.attention(to_kind(case.q, kind), there.k, there.v)


# ---- memory


def poison_pool():
    """Fill CuPy's free memory with NaN, so that results and workspaces start as that."""
    import cupy

    blocks = [cupy.full(1 << n, np.nan, np.float32) for n in range(7, 23) for _ in range(4)]
    cupy.cuda.get_current_stream().synchronize()
    del blocks


@algorithms
@pytest.mark.parametrize("name", [
    "lengths", "padding only", "offset far left: nothing visible", "no keys", "one dimension", "many tiles, everything",
])  # fmt: skip
def test_poisoned_results_and_workspaces(name, algorithm):
    case, reference = awkward(name, "float32")
    for deterministic in (False, True):
        poison_pool()
        check(case, reference, algorithm=algorithm, deterministic=deterministic)


@algorithms
def test_nothing_is_written_outside_of_out(algorithm):
    import cupy

    case = make(B=2, Hq=3, Tq=45, d=20, dv=12, causal=True)
    gpu, reference = on_gpu(case), case.reference()
    home = cupy.full((4, 5, 49, 18), 7.0, np.float32)
    window = home[1:3, 1:4, 2:47, 3:15]
    out, _ = gpu.forward(out=window, algorithm=algorithm)
    assert out is window
    assert_close("out", to_host(window), reference)
    window[...] = 7.0
    assert bool((home == 7.0).all())


def test_hidden_memory_is_never_read():
    """NaN between the rows, before and after them, and in padding."""
    from strategies import restride

    case = make(B=2, Hq=2, Tq=50, d=24, q_lengths=[50, 13], kv_lengths=[20, 50])
    case.q[1, :, 13:] = case.dout[1, :, 13:] = np.nan
    case.k[0, :, 20:] = case.v[0, :, 20:] = np.nan
    reference = case.reference()
    for name in ("q", "k", "v", "dout"):
        setattr(case, name, restride(getattr(case, name), "sliced"))
    for algorithm in ALGORITHMS:
        check(case, reference, algorithm=algorithm)


def test_more_than_two_to_the_31_elements():
    import cupy

    T, d = 2**25 + 77, 64  # T d > 2**31
    generator = cupy.random.default_rng(0)
    q, k, v = (generator.standard_normal((T, d), dtype=np.float32).astype(np.float16) for _ in range(3))
    options = dict(window=(100, 0), return_lse=True)
    out, lse = rf.attention(q, k, v, **options)
    dout = v[::-1]
    gradients = rf.attention_backward(dout, q, k, v, out, lse, window=(100, 0), deterministic=True)

    def far(a, b):  # not the bits: tiles begin at other rows
        a, b = a.astype(np.float32), b.astype(np.float32)
        return float(cupy.abs(a - b).max() / cupy.abs(b).max())

    n = 1000
    for rows in (slice(0, n), slice(T - n, T)):  # a row reaches 100 keys back, and a key 100 rows on
        part = [x[rows] for x in (q, k, v)]
        want, want_lse = rf.attention(*part, **options)
        good = slice(101, n - 101) if rows.start else slice(0, n - 101)
        assert far(out[rows][good], want[good]) <= 2e-3 and far(lse[rows][good], want_lse[good]) <= 1e-5
        part_gradients = rf.attention_backward(
            dout[rows], *part, want, want_lse, window=(100, 0), deterministic=True
        )
        good = slice(202, n - 202)
        for a, b in zip(gradients, part_gradients, strict=True):
            assert far(a[rows][good], b[good]) <= 2e-3


# ---- bits


@algorithms
def test_deterministic_calls_give_the_same_bits(algorithm):
    case = on_gpu(make(B=2, Hq=4, Hkv=2, Tq=300, d=64, causal=True, dropout=0.2, bias=np.ones((1, 300), np.float32),
                       sinks=np.zeros(4, np.float32)))  # fmt: skip
    first = None
    for _ in range(20):
        out, lse = case.forward(algorithm=algorithm)
        results = [to_host(x) for x in (out, lse, *case.backward(out, lse, algorithm=algorithm, deterministic=True))]
        first = first or results
        assert all(np.array_equal(a, b) for a, b in zip(first, results, strict=True))


@algorithms
def test_dropout_keeps_what_dropout_mask_says(algorithm):
    """One key, value 1: the output of a row is 0 or 1 / (1 - p)."""
    B, H, Tq, Tk = 2, 3, 40, 50
    q = to_cupy(np.zeros((B, H, Tq, 4), np.float32))
    k = to_cupy(np.zeros((B, H, Tk, 4), np.float32))
    v = to_cupy(np.broadcast_to(np.eye(Tk, dtype=np.float32), (B, H, Tk, Tk)).copy())
    for number in (5, 2**64 - 1):
        out = to_host(rf.attention(q, k, v, dropout=0.25, seed=number, algorithm=algorithm))
        np.testing.assert_array_equal(out > 0, rf.dropout_mask(0.25, number, (B, H, Tq, Tk)))


# ---- CUDA graphs


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("deterministic", [False, True])
@algorithms
def test_graphs_replay_the_same_bits(algorithm, deterministic, dtype):
    import cupy

    case = make(B=2, Hq=16, Hkv=8, Tq=200, Tk=900, d=64, dtype=dtype, causal=True, kv_lengths=[900, 150])
    gpu = on_gpu(case)
    options = dict(algorithm=algorithm, deterministic=deterministic)

    def run():
        out, lse = gpu.forward(algorithm=algorithm)
        return out, lse, *gpu.backward(out, lse, **options)

    want = [to_host(x) for x in run()]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        run()  # the stream's part of the memory pool gets its blocks before the capture
        stream.begin_capture()
        results = run()
        graph = stream.end_capture()
        for result in results:
            result.fill(np.nan)
        graph.launch()
    stream.synchronize()
    exact = len(results) if deterministic or algorithm == "fa1" else 2
    for n, (a, b) in enumerate(zip(results, want, strict=True)):
        if n < exact:
            assert np.array_equal(to_host(a), b)
    # new values in the same arrays: the graph reads them
    with stream:
        gpu.q[...] = gpu.q * 0.5
        graph.launch()
        again, _ = gpu.forward(algorithm=algorithm)
    stream.synchronize()
    assert np.array_equal(to_host(results[0]), to_host(again))


def test_graphs_own_the_memory_of_their_calls():
    """What a captured call allocates for itself is not given to anybody else, also when the caller drops it."""
    import cupy

    gpu = on_gpu(make(B=2, Hq=2, Tq=200, d=64, causal=True))
    out, lse = gpu.forward()
    want = to_host(out)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        rf.attention(gpu.q, gpu.k, gpu.v, causal=True)
        rf.attention_backward(gpu.dout, gpu.q, gpu.k, gpu.v, out, lse, causal=True, wrt=("q",))
        stream.synchronize()
        stream.begin_capture()
        result = rf.attention(gpu.q, gpu.k, gpu.v, causal=True)
        rf.attention_backward(gpu.dout, gpu.q, gpu.k, gpu.v, out, lse, causal=True, wrt=("q",))
        graph = stream.end_capture()
        others = [cupy.full(n, 3.0, np.float32) for n in (lse.size, out.size) for _ in range(8)]
        graph.launch()
    stream.synchronize()
    assert np.array_equal(to_host(result), want)
    assert all(bool((other == 3.0).all()) for other in others)


# ---- errors


def test_numpy_arrays_are_refused():
    case = make(Tq=4)
    with pytest.raises(rf.BackendError, match="cupy_raw.*CPU"):
        case.forward(backend="cupy_raw")


def test_a_call_that_raises_leaves_out_alone():
    import cupy

    case = on_gpu(make(Tq=4, d=8))
    out = cupy.full(case.q.shape, 3.0, np.float32)
    with pytest.raises(rf.ProblemError):
        case.forward(out=out, softcap=-1.0)
    with pytest.raises(rf.TileError):
        case.forward(out=out, sram=64)
    assert bool((out == 3.0).all())


def test_merge_and_dropout_mask_on_the_gpu():
    case = make(B=1, Hq=2, Tq=33, Tk=64, d=16)
    for kind in ("cupy", "torch"):
        gpu = on_gpu(case, kind)
        whole, whole_lse = gpu.forward()
        halves = [
            rf.attention(gpu.q, gpu.k[:, :, s], gpu.v[:, :, s], return_lse=True) for s in (slice(0, 20), slice(20, 64))
        ]
        out, lse = rf.merge_attention(*zip(*halves, strict=True))
        assert type(out) is type(gpu.q)
        np.testing.assert_allclose(to_host(out), to_host(whole), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(to_host(lse), to_host(whole_lse), rtol=1e-5, atol=1e-6)
        mask = rf.dropout_mask(0.5, 3, (1, 2, 3, 9), like=gpu.q)
        assert type(mask) is type(gpu.q)
        np.testing.assert_array_equal(to_host(mask), rf.dropout_mask(0.5, 3, (1, 2, 3, 9)))
        assert to_kind(np.zeros(3), kind) is not None
