"""numba_cuda on a GPU: ``pytest -m gpu``. The calls and the bounds of test_gpu.py, and agreement with cupy_raw.

Compiling a Python kernel takes seconds, so there are fewer problems than for cupy_raw; the option code of both
algorithms is the same.
"""

import numpy as np
import pytest
from gpu import ALGORITHMS, on_gpu, to_host
from hypothesis import given, seed, settings
from strategies import DTYPES, problems, varlen_problems
from test_forward import AWKWARD, awkward, make
from test_gpu import poison_pool
from tolerances import assert_close

import rawflash as rf

pytestmark = pytest.mark.gpu
SHARDS = 30  # tests that draw: they are shared out to processes
PROBLEMS_A_SHARD = 5  # 150 problems, half a minute each
MMA = ("float16", "bfloat16")


def check(host, reference, kind="cupy", small_on_device=False, **options):
    """Run a host case, forward and backward; hold every element against the oracle, and against cupy_raw."""
    case = on_gpu(host, kind, small_on_device)
    results = {}
    for backend in ("numba_cuda", "cupy_raw"):
        out, lse = case.forward(backend=backend, **options)
        gradients = case.backward(out, lse, backend=backend, **options)
        assert type(out) is type(case.q) and type(lse) is type(case.q)
        made = {"out": out, "lse": lse} | {"d" + name: g for name, g in zip(case.wrt, gradients, strict=True)}
        results[backend] = {name: to_host(x) for name, x in made.items()}
        for name, result in results[backend].items():
            assert_close(name, result, reference)
    return results["numba_cuda"]


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_calls(name):
    n = list(AWKWARD).index(name)
    case, reference = awkward(name, list(DTYPES)[n % len(DTYPES)])
    check(case, reference, small_on_device=n % 2 == 0, algorithm=ALGORITHMS[n // 4 % 2])


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_long_awkward_lengths(algorithm, dtype):
    for T in (1, 127, 129, 1009):
        case = make(B=1, Hq=2, Hkv=1, Tq=T, d=64, dtype=dtype, causal=T != 127)
        check(case, case.reference(), algorithm=algorithm)


@pytest.mark.parametrize("dtype", MMA)
@pytest.mark.parametrize("d", [8, 40, 64, 72, 96, 128, 33])
def test_tensor_cores(d, dtype):
    """Bands, offsets, lengths, sinks, packed sequences, grouped heads: what the tensor-core kernels take."""
    calls = [
        make(B=2, Hq=4, Hkv=2, Tq=150, Tk=290, d=d, dtype=dtype, causal=True, sinks=np.array([0.5, -1, 0, -np.inf])
             .astype(np.float32)),
        make(B=2, Hq=2, Tq=260, Tk=200, d=d, dtype=dtype, window=(50, 70), q_lengths=[260, 9], kv_lengths=[1, 200]),
        make(B=3, Hq=1, Tq=70, Tk=300, d=d, dtype=dtype, causal=True, q_offset=np.array([-30, 100, 400])),
        make(B=1, Hq=2, Tq=513, d=d, dtype=dtype),
    ]  # fmt: skip
    packed = make(lead=(), Hq=2, Hkv=1, Tq=333, Tk=411, d=d, dtype=dtype, causal=True)
    packed.cu_seqlens = ([0, 100, 101, 301], [3, 180, 180, 400])
    for n, case in enumerate([*calls, packed]):
        poison_pool()
        check(case, case.reference(), small_on_device=n % 2 == 0)
        gpu = on_gpu(case)
        if case.cu_seqlens is None:
            for direction in ("forward", "backward"):
                how = rf.explain(gpu.q, gpu.k, gpu.v, backend="numba_cuda", direction=direction, **gpu.options)
                assert how.tiles.family == "mma"


@pytest.mark.filterwarnings("ignore:.*Grid size 1 ")
def test_tf32_product():
    """A 16 x 8 times B 8 x 8, of integers, which tf32 holds: exact."""
    from numba import cuda, uint32

    from rawflash.backends.numba_cuda.intrinsics import mma_tf32

    @cuda.jit
    def product(A, B, C):
        g, t = cuda.threadIdx.x >> 2, cuda.threadIdx.x & 3
        a = A[g, t], A[g + 8, t], A[g, t + 4], A[g + 8, t + 4]
        b = B[t, g], B[t + 4, g]
        c = C[g, 2 * t], C[g, 2 * t + 1], C[g + 8, 2 * t], C[g + 8, 2 * t + 1]
        c = mma_tf32(uint32(a[0]), uint32(a[1]), uint32(a[2]), uint32(a[3]), uint32(b[0]), uint32(b[1]), *c)
        C[g, 2 * t], C[g, 2 * t + 1], C[g + 8, 2 * t], C[g + 8, 2 * t + 1] = c

    rng = np.random.default_rng(0)
    A, B, C = (rng.integers(-99, 99, shape).astype(np.float32) for shape in ((16, 8), (8, 8), (16, 8)))
    bits = [cuda.to_device(x.view(np.uint32)) for x in (A, B)]
    result = cuda.to_device(C)
    product[1, 32](*bits, result)
    assert np.array_equal(result.copy_to_host(), A @ B + C)


@pytest.mark.parametrize("kind", ["torch", "jax", "numba"])
def test_kinds(kind):
    case = make(Hq=4, Hkv=2, Tq=37, d=16, causal=True, sinks=np.zeros(4, np.float32))
    check(case, case.reference(), kind=kind)


def test_keys_in_parts():
    case = make(B=1, Hq=2, Tq=5, Tk=3000, d=64)
    poison_pool()
    check(case, case.reference())
    gpu = on_gpu(case)
    assert rf.explain(gpu.q, gpu.k, gpu.v, backend="numba_cuda").tiles.parts > 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_deterministic_calls_give_the_same_bits(algorithm):
    case = on_gpu(make(B=2, Hq=4, Hkv=2, Tq=300, d=64, causal=True, dropout=0.2, bias=np.ones((1, 300), np.float32)))
    first = None
    for _ in range(10):
        options = dict(algorithm=algorithm, backend="numba_cuda")
        out, lse = case.forward(**options)
        results = [to_host(x) for x in (out, lse, *case.backward(out, lse, deterministic=True, **options))]
        first = first or results
        assert all(np.array_equal(a, b) for a, b in zip(first, results, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_replay_the_same_bits(dtype):
    import cupy

    case = make(B=2, Hq=4, Hkv=2, Tq=200, Tk=900, d=64, dtype=dtype, causal=True, kv_lengths=[900, 150])
    gpu = on_gpu(case)

    def run():
        out, lse = gpu.forward(backend="numba_cuda")
        return out, lse, *gpu.backward(out, lse, backend="numba_cuda", deterministic=True)

    want = [to_host(x) for x in run()]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        run()
        stream.begin_capture()
        results = run()
        graph = stream.end_capture()
        graph.launch()
    stream.synchronize()
    for a, b in zip(results, want, strict=True):
        assert np.array_equal(to_host(a), b)


def test_other_streams():
    import torch

    x = torch.randn(3, 2, 4, 300, 64, device="cuda")
    want = rf.attention(*x, causal=True, backend="numba_cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s: a kernel on another stream would overtake this
        y = x * 2 - x
        out = rf.attention(*y, causal=True, backend="numba_cuda")
    stream.synchronize()
    assert torch.equal(out, want)
