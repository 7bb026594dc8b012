"""`attention_decode` and `append_kv` on a GPU: ``pytest -m gpu``. The caches and the bounds of test_decode.py."""

import numpy as np
import pytest
from gpu import KINDS, append_and_decode, to_cupy, to_host, to_kind
from hypothesis import given, settings
from strategies import DTYPES, decode_problems, restride
from test_decode import ENTRIES, check_entries, make, same_bits
from test_gpu import poison_pool
from tolerances import assert_close

import rawflash as rf

pytestmark = pytest.mark.gpu
BACKENDS = ("cupy_raw", "numba_cuda")
backends = pytest.mark.parametrize("backend", BACKENDS)


def check(case, n=0, kind="cupy", small_on_device=False, **options):
    """Append the last ``n`` keys and decode: every element against the oracle, every bit of the caches."""
    *results, k_cache, v_cache = append_and_decode(case, n, kind, small_on_device, **options)
    reference = case.reference()
    for name, result in zip(("out", "lse"), results, strict=True):
        assert type(result) is type(k_cache)
        assert_close(name, to_host(result), reference)
    for cache, want in zip((k_cache, v_cache), case.caches(order=2)[:2], strict=True):
        assert same_bits(to_host(cache), want)
    return [to_host(result) for result in results]


# ---- against the oracle


@pytest.mark.parametrize("n", range(2))
@settings(max_examples=10)
@given(case=decode_problems())
def test_drawn_problems(n, case):
    check(case, n if case.kv_lengths.min(initial=1) else 0, small_on_device=case.how["seed"] % 2 == 1)


CALLS = {
    "a query": dict(d=64, dv=64),
    "a query, one key head": dict(Hkv=1, d=128, dv=128),
    "some queries": dict(Tq=3, d=64, dv=64, causal=True),
    "as many queries as the keys": dict(Tq=40, lengths=(40, 600, 40), causal=True, window=(30, None)),
    "odd dimensions": dict(Tq=2, d=7, dv=11, causal=True),
    "options": dict(
        Tq=2, d=40, dv=24, window=(900, 0), softcap=5.0, alibi_slopes=np.linspace(0, 0.1, 8),
        sinks=np.linspace(-1, 2, 8).astype(np.float32)),
}  # fmt: skip


def call(name, page, dtype):
    sizes = dict(B=3, Hq=8, lengths=(2100, 31, 600)) | CALLS[name]
    return make(**sizes, page=page, dtype=dtype, layout="bthd" if page % 2 else "bhtd")


@pytest.mark.parametrize("page", [0, 16, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_calls(name, dtype, page):
    poison_pool()
    check(call(name, page, dtype), 2, small_on_device=page == 16)


@pytest.mark.parametrize("name, dtype, page", [
    ("a query", "bfloat16", 16), ("some queries", "float16", 0),
    ("odd dimensions", "float32", 16), ("options", "float64", 5),
])  # fmt: skip
def test_calls_of_numba_cuda(name, dtype, page):
    for small_on_device in (False, True):
        check(call(name, page, dtype), 2, small_on_device=small_on_device, backend="numba_cuda")


@backends
def test_bits_do_not_depend_on_the_blocks(backend):
    case = call("a query", 16, "float16")
    results = []
    for order in range(4):
        *caches, table = case.caches(order)
        arrays = [to_cupy(case.turned(x)) for x in (case.q, *caches)]
        for blocks in (table, to_cupy(table)):
            made = rf.attention_decode(*arrays, case.kv_lengths, blocks, return_lse=True, backend=backend)
            results.append([to_host(x) for x in made])
    for result in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(result, results[0], strict=True))


@backends
def test_blocks_outside_of_the_cache_are_not_read(backend):
    """Where only the GPU knows the table: the keys of such a block are hidden."""
    case = make(B=3, Hq=4, Tq=2, lengths=(40, 33, 17), page=8, d=24, dv=16)
    *caches, blocks = case.caches()
    mask = np.ones((3, 1, 1, 40), bool)
    outside = ((0, 1, -1), (0, 3, len(caches[0])), (1, 4, 2**31 - 1), (2, 0, -(2**31)), (2, 1, 10**6), (2, 2, -5))
    for b, n, entry in outside:
        blocks[b, n] = entry
        mask[b, :, :, 8 * n : 8 * n + 8] = False
    reference = case.reference(mask=mask)
    arrays = map(to_cupy, (case.q, *caches, case.kv_lengths, blocks))
    out, lse = rf.attention_decode(*arrays, return_lse=True, backend=backend)
    assert_close("out", to_host(out), reference)
    assert_close("lse", to_host(lse), reference)
    assert not to_host(out)[2].any() and np.isneginf(to_host(lse)[2]).all()


@backends
@pytest.mark.parametrize("page", [0, 8])
def test_lengths_end_with_the_cache(page, backend):
    """On the GPU they are what the caches have room for, and not less than 0."""
    case = make(B=3, lengths=(24, 24, 0), page=page)
    case.spare = 0
    *caches, blocks = case.caches()
    lengths = to_cupy(np.array([2**40, 25, -3]))
    table = () if blocks is None else (to_cupy(blocks),)
    out, lse = rf.attention_decode(
        *map(to_cupy, (case.q, *caches)), lengths, *table, return_lse=True, backend=backend
    )
    assert_close("out", to_host(out), case.reference())
    assert_close("lse", to_host(lse), case.reference())
    assert to_host(lengths).tolist() == [2**40, 25, -3]


# ---- appends


@pytest.mark.parametrize("kind", ["cupy", "torch"])
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("width", [np.int32, np.int64])
@pytest.mark.parametrize("name", ENTRIES)
def test_appends_with_tables_on_the_device(name, width, paged, kind):
    for dtype in DTYPES:
        check_entries(name, width, paged, dtype, lambda a: to_kind(a.copy(), kind), to_host)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", ["contiguous", "transposed", "sliced", "strided_last", "reversed"])
@pytest.mark.parametrize("d, dv", [(32, 16), (5, 24)])
def test_appends_of_any_strides(d, dv, view, dtype):
    case = make(d=d, dv=dv, dtype=dtype, lengths=(13, 9), Tq=0)
    *caches, blocks = case.caches(filled=[6, 2])
    caches, new = ([to_cupy(restride(x, view)) for x in both] for both in (caches, case.newest(7)))
    assert rf.append_kv(*caches, *new, [6, 2], blocks) is None
    for cache, want in zip(caches, case.caches()[:2], strict=True):
        assert same_bits(to_host(cache), want)


def test_a_long_append():
    """A grid that strides."""
    for page in (0, 48):
        check(make(Hkv=4, lengths=(5000, 4900), page=page, d=64, dv=48, dtype="bfloat16", causal=True), 4800)


def test_an_append_that_raises_writes_nothing():
    case = make(lengths=(9, 4))
    caches = [to_cupy(cache) for cache in case.caches()[:2]]
    new = [to_cupy(x) for x in case.newest(2)]
    for lengths, table in (([11, 2], [[0, 1, 2], [3, 0, 0]]), ([7, 2], [[0, 5, 2], [3, 0, 0]])):
        with pytest.raises(rf.ProblemError):
            rf.append_kv(*caches, *new, lengths, table)
    for cache, want in zip(caches, case.caches()[:2], strict=True):
        assert same_bits(to_host(cache), want)


# ---- kinds, streams, graphs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kinds(kind, dtype):
    if kind == "numba" and dtype == "bfloat16":
        pytest.skip("Numba's device arrays have no bfloat16")
    for page in (0, 4):
        case = make(dtype=dtype, page=page, causal=True)
        case.kv_lengths = case.kv_lengths.astype(np.int32)  # JAX has no others
        for small_on_device in (False, True):
            check(case, 0 if kind == "jax" else 2, kind, small_on_device)
    if kind == "jax":
        with pytest.raises(rf.ProblemError, match="k_cache is a JAX array; expected one that can be written to"):
            append_and_decode(case, 2, kind)


def test_other_streams():
    """Appends and decodes go where the library's work goes: what comes before them takes 0.1 s."""
    import cupy
    import torch

    case = make(B=2, Hq=4, lengths=(300, 40), page=16, d=64, dv=64, causal=True)
    reference = case.reference()
    before, after, table = case.kv_lengths - 1, case.kv_lengths, case.caches()[2]
    for kind in ("torch", "cupy"):
        arrays = [to_kind(x, kind) for x in (case.q, *case.caches(filled=before)[:2], *case.newest(1))]
        small = [to_kind(x, kind) for x in (before, after, table)]
        torch.cuda.synchronize()

        def run(q, k_cache, v_cache, k, v, before, after, table):
            rf.append_kv(k_cache, v_cache, k * 2 - k, v * 2 - v, before, table)
            return rf.attention_decode(q, k_cache, v_cache, after, table, causal=True)

        if kind == "torch":
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000_000)
                out = run(*arrays, *small)
        else:
            stream = cupy.cuda.Stream(non_blocking=True)
            delay = torch.cuda.ExternalStream(stream.ptr)
            with stream:
                with torch.cuda.stream(delay):
                    torch.cuda._sleep(200_000_000)
                out = run(*arrays, *small)
        stream.synchronize()
        assert_close("out", to_host(out), reference)


LATE = """
extern "C" __global__ void late(const char* from, char* to, long long bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");  // what comes next may begin
#endif
    const long long start = clock64();
    while (clock64() - start < 40000) {}
    for (long long n = blockIdx.x * blockDim.x + threadIdx.x; n < bytes; n += gridDim.x * blockDim.x) to[n] = from[n];
}
"""


@pytest.mark.parametrize("last", ["k", "lengths", "table"])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("page", [0, 16])
def test_a_decode_right_behind_what_writes_its_inputs(page, captured, last):
    """It begins while the kernel before it still waits to write the last of its inputs, and awaits that."""
    import cupy

    B, Hq, Hkv, T, d, steps = 3, 8, 4, 4096, 64, 12
    rng = np.random.default_rng(7)
    blocks = B * T // 16
    shape = (blocks, Hkv, 16, d) if page else (B, Hkv, T, d)

    def inputs(n):
        shapes = {"q": (B, Hq, 1, d), "k": shape, "v": shape}
        made = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
        made["lengths"] = np.array([T, 1 + 777 * n, 3000 - n], np.int32)
        if page:
            made["table"] = rng.permutation(blocks).reshape(B, -1).astype(np.int32)
        return {name: to_cupy(x) for name, x in made.items()}

    sources = [inputs(n) for n in range(3)]
    here = {name: x.copy() for name, x in sources[0].items()}
    order = sorted(here, key=lambda name: name == last)

    late = cupy.RawKernel(LATE, "late")

    def step(n):
        for name in order[:-1]:
            here[name][...] = sources[n % 3][name]
        source, target = sources[n % 3][order[-1]], here[order[-1]]
        late((32,), (256,), (source, target, np.int64(source.nbytes)))
        return rf.attention_decode(here["q"], here["k"], here["v"], here["lengths"], here.get("table"), return_lse=True)

    want = []
    for n in range(3):
        for name in order:
            here[name][...] = sources[n][name]
        cupy.cuda.Device().synchronize()
        want.append([to_host(x) for x in step(n)])
        cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        if captured:
            stream.begin_capture()
            made = [step(n) for n in range(steps)]
            graph = stream.end_capture()
            for _ in range(3):
                graph.launch()
        else:
            made = [step(n) for n in range(steps)]
        stream.synchronize()
    for n, results in enumerate(made):
        for got, reference in zip(results, want[n % 3], strict=True):
            assert same_bits(to_host(got), reference), f"step {n}"


def steps_of(case, kind):
    """Causal attention key by key: the row of q, k and v that each step is given."""
    return [[to_kind(np.ascontiguousarray(x[:, :, t : t + 1]), kind) for x in (case.q, case.k, case.v)]
            for t in range(case.q.shape[2])]  # fmt: skip


@backends
@pytest.mark.parametrize("page", [0, 4])
def test_a_graph_is_a_step(page, backend):
    """Captured once, replayed for each key: it appends, counts and decodes by lengths that change on the GPU."""
    import cupy

    T = 12
    case = make(Hq=4, Tq=T, lengths=(T, T), page=page, causal=True, d=64, dv=64)
    reference = case.reference()
    *caches, table = case.caches(filled=[0, 0])
    caches = [to_cupy(cache) for cache in caches]
    table = None if table is None else to_cupy(table)
    steps = steps_of(case, "cupy")
    q, k, v = (x.copy() for x in steps[0])
    lengths = cupy.zeros(2, np.int32)

    def step():
        rf.append_kv(*caches, k, v, lengths, table)
        cupy.add(lengths, 1, out=lengths)
        return rf.attention_decode(q, *caches, lengths, table, return_lse=True, backend=backend)

    stream = cupy.cuda.Stream(non_blocking=True)
    stream.wait_event(cupy.cuda.get_current_stream().record())
    with stream:
        step()  # compiled, and the stream's part of the memory pool gets its blocks
        lengths.fill(0)
        stream.synchronize()
        stream.begin_capture()
        results = step()
        graph = stream.end_capture()
        made = []
        for step_given in steps:
            for here, there in zip((q, k, v), step_given, strict=True):
                here[...] = there
            for result in results:
                result.fill(np.nan)
            graph.launch()
            made.append([result.copy() for result in results])
        stream.synchronize()
    for name, parts in zip(("out", "lse"), zip(*made, strict=True), strict=True):
        assert_close(name, np.concatenate([to_host(part) for part in parts], axis=2), reference)
    assert to_host(lengths).tolist() == [T, T]
    for cache, want in zip(caches, case.caches()[:2], strict=True):
        assert same_bits(to_host(cache), want)


def test_a_graph_of_torch():
    import torch

    T = 7
    case = make(Hq=4, Tq=T, lengths=(T, T), page=4, causal=True, dtype="bfloat16", d=64, dv=64)
    reference = case.reference()
    caches = [to_kind(cache, "torch") for cache in case.caches(filled=[0, 0])[:2]]
    table = to_kind(case.caches()[2], "torch")
    steps = steps_of(case, "torch")
    q, k, v = (x.clone() for x in steps[0])
    lengths = torch.zeros(2, dtype=torch.int64, device="cuda")

    def step():
        rf.append_kv(*caches, k, v, lengths, table)
        lengths.add_(1)
        return rf.attention_decode(q, *caches, lengths, table, return_lse=True)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        lengths.zero_()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    made = []
    for step_given in steps:
        for here, there in zip((q, k, v), step_given, strict=True):
            here.copy_(there)
        graph.replay()
        made.append([to_host(result) for result in results])
    for name, parts in zip(("out", "lse"), zip(*made, strict=True), strict=True):
        assert_close(name, np.concatenate(parts, axis=2), reference)
    for cache, want in zip(caches, case.caches()[:2], strict=True):
        assert same_bits(to_host(cache), want)


def test_a_graph_with_tables_of_the_host():
    """They were copied to the GPU by the call before the capture, and stay there for the graph."""
    import cupy

    from rawflash import problem

    case = make(lengths=(9, 4))
    *caches, table = (x if x.dtype.kind == "i" else to_cupy(x) for x in case.caches(filled=[8, 3]))
    new = [to_cupy(x) for x in case.newest(1)]
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.wait_event(cupy.cuda.get_current_stream().record())
    with stream:
        rf.append_kv(*caches, *new, [8, 3], table)
        stream.synchronize()
        stream.begin_capture()
        rf.append_kv(*caches, *new, [8, 3], table)
        graph = stream.end_capture()
        problem._MEMO.clear()
        others = [cupy.full(n, 3, np.int64) for n in (2, 6, 8) for _ in range(8)]
        for cache in caches:
            cache.fill(np.nan)
        graph.launch()
        stream.synchronize()
    assert all(bool((other == 3).all()) for other in others)
    for cache, want in zip(caches, case.caches()[:2], strict=True):
        got = to_host(cache)
        written = ~np.isnan(got)
        assert written.any(axis=-1).sum() == 2 * case.k.shape[1] and np.array_equal(got[written], want[written])
