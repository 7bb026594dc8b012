"""Every kernel of cupy_raw against the oracle, without a GPU (-m emulated): emulator.py has barriers, warps and all.

What it cannot see: speed, ptxas, the order in which real threads run (two orders are tried), 16-byte alignment faults.
"""

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, reduce
from operator import or_
from pathlib import Path

import emulator
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from strategies import DTYPES, decode_problems, problems, restride, varlen_problems
from test_decode import ENTRIES, check_entries
from test_decode import make as decode
from test_forward import AWKWARD, awkward, half_hidden, half_visible, make, normal
from test_long_sums import equal_rows
from tolerances import assert_close
from tolerances import reference as reference_of

import rawflash as rf
from rawflash import arrays, hardware, problem, sm90, tiling
from rawflash import masks as M
from rawflash.backends.cupy_raw import append_kv, compile, launch
from rawflash.tiles import SPLIT_INPUTS

pytestmark = pytest.mark.emulated
ALGORITHMS = ("fa1", "fa2")


def on_device(case, small_on_device=False):
    """The case with arrays of the emulator; lengths, offsets and slopes too, if asked."""
    move = emulator.to_device
    options = {n: move(x) if n in ("bias", "sinks", "mask") and isinstance(x, np.ndarray) else x
               for n, x in case.options.items()}  # fmt: skip
    cu_seqlens = case.cu_seqlens
    if small_on_device:
        for name in ("alibi_slopes", "q_lengths", "kv_lengths", "q_offset"):
            if isinstance(options.get(name), (list, np.ndarray)):
                value = options[name]
                options[name] = move(np.asarray(value, None if len(value) else getattr(value, "dtype", int)))
        cu_seqlens = cu_seqlens and tuple(move(np.asarray(n)) for n in cu_seqlens)
    dlse = None if case.dlse is None else move(case.dlse)
    moved = {name: move(getattr(case, name)) for name in ("q", "k", "v", "dout")}
    return replace(case, **moved, dlse=dlse, options=options, cu_seqlens=cu_seqlens)


def check(host, reference, small_on_device=False, backward=True, **options):
    case = on_device(host, small_on_device)
    out, lse = case.forward(**options)
    results = {"out": out, "lse": lse}
    if backward:
        gradients = case.backward(out, lse, **options)
        results |= {"d" + name: g for name, g in zip(case.wrt, gradients, strict=True)}
    for name, result in results.items():
        assert type(result) is emulator.ndarray
        assert_close(name, np.asarray(result), reference)


@pytest.fixture(params=[False, True], ids=["forwards", "backwards"])
def device(request, monkeypatch):
    emulator.install(monkeypatch, backwards=request.param)


#: Calls of test_forward's table that between them switch on everything that a kernel's text can hold.
CHOSEN = (
    "two tiles - 1, two tiles + 1",
    "Tq > Tk, causal, sinks",
    "offsets per batch",
    "window",
    "odd dimensions",
    "grouped heads 8:2",
    "no keys, sinks",
    "lengths, causal",
    "a huge sink",
    "mask object",
    "bias by row",
    "bias by key and head",
    "bias with -inf",
    "alibi by batch",
    "softcap",
    "nearly all dropped",
    "many tiles, causal",
    "many tiles, everything",
    "scores near 1e4",
    "six axes",
)
assert set(CHOSEN) <= set(AWKWARD)
names = list(DTYPES)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", CHOSEN)
def test_awkward_calls(name, algorithm, device_by_name):
    """A dtype each, in turn; float32 most often, whose products on tensor cores are those with the most to them."""
    n = CHOSEN.index(name) + ALGORITHMS.index(algorithm)
    dtype = "float32" if n % 2 == 0 else names[n // 2 % len(names)]
    case, reference = awkward(name, dtype)
    check(case, reference, algorithm=algorithm, small_on_device=n % 3 == 0, deterministic=n % 4 == 0)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's files")
def test_stacks_go_back(device):
    """A process that kept them could not be forked on a machine of less memory than their sum."""

    def size():
        return int(re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

    before = size()
    for d in (16, 24, 32):  # each its own library
        case = on_device(make(B=1, Hq=1, Tq=20, d=d))
        case.backward(*case.forward())
    assert size() - before < 100_000


@pytest.fixture
def device_by_name(request, monkeypatch):
    emulator.install(monkeypatch, backwards=len(request.node.name) % 2 == 1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_orders_of_threads(device, dtype, deterministic):
    # d: deterministic kernels of sm_90 in 16 bits take turns, and rely on the order of blocks of threads
    d = 160 if deterministic and dtype == "bfloat16" else 40
    case = make(B=1, Hq=2, Hkv=1, Tq=70, Tk=150, d=d, dv=24, dtype=dtype, causal=True)
    check(case, case.reference(), deterministic=deterministic)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_sequences_without_keys(device, algorithm, deterministic):
    """dQ is 0 there, and in rows that no sequence owns, whatever the memory held."""
    case = make(B=1, Hq=2, Tq=20, Tk=0, d=64)
    check(case, case.reference(), algorithm=algorithm, deterministic=deterministic)
    for cu_k, total_k in (([0, 0, 9], 9), ([0, 0, 0], 0)):
        x = make(lead=(), Hq=2, Tq=23, Tk=total_k, d=64)
        x.cu_seqlens = ([1, 12, 20], cu_k)
        check(x, x.reference(), algorithm=algorithm, deterministic=deterministic)


def test_a_mask_of_too_many_parts_is_refused_before_anything_is_compiled(device, monkeypatch):
    case = on_device(make(B=1, Hq=1, Tq=20, d=16))
    case.options["mask"] = reduce(or_, (M.SlidingWindow(n, n) for n in range(60)))
    monkeypatch.setattr(compile, "load", lambda *a, **more: pytest.fail("a kernel was compiled"))
    with pytest.raises(rf.BackendError, match=r"mask .* has \d+ numbers and arrays.* has room for 96"):
        case.forward()


@pytest.mark.parametrize("name", ["q_lengths", "kv_lengths", "q_offset", "alibi_slopes", "mask"])
def test_out_may_overlap_what_is_no_matrix(device, name):
    """These too are read while ``out`` is written."""
    values = {
        "q_lengths": np.array([3, 17]), "kv_lengths": np.array([2, 20]), "q_offset": np.array([1, -3]),
        "alibi_slopes": np.array([[0.5], [0.25]]), "mask": np.tri(20, dtype=bool),
    }[name]  # fmt: skip
    case = on_device(make(B=2, Hq=1, Tq=20, d=16, causal=True))
    out = emulator.to_device(np.zeros_like(case.q))
    inside = out.reshape(-1).view(values.dtype)[: values.size].reshape(values.shape)
    inside[...] = values
    case.options[name] = emulator.to_device(values)
    want, _ = case.forward()
    case.options |= {name: inside, "out": out}
    case.forward()
    np.testing.assert_array_equal(out, want)


def test_tables_of_the_host_are_waited_for_and_kept_by_other_streams(device, monkeypatch):
    """Lengths are copied to the device once, on the stream of the first call."""
    import cupy  # the emulator's

    done = []

    class Stream:
        def __init__(self, ptr):
            self.ptr = ptr

        def is_capturing(self):
            return False

        def wait_event(self, event):
            done.append(("waits", self.ptr, event))

    here = Stream(7)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda device=-1: here)
    monkeypatch.setattr(launch, "hold", lambda kept: done.append(("holds", here.ptr, kept)))
    case = on_device(make(B=2, Hq=1, Tq=20, d=16, kv_lengths=[5, 20]))
    case.forward()
    case.forward()
    assert not done
    here = Stream(8)
    case.forward()
    (waits, on, event), (holds, held_on, kept) = done
    assert (waits, on, holds, held_on) == ("waits", 8, "holds", 8)
    assert isinstance(event, cupy.cuda.Event) and len(kept) == 1


@pytest.mark.parametrize("name", ["bias", "key", "sink", "far below"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_near_the_largest_float32(device_by_name, name, dtype):
    """Where log2(e) times a score would overflow; lse says what became of it, out is compared with numpy_tiled."""
    largest = float(np.finfo(np.float32).max)
    options = {
        "bias": dict(bias=np.full((20, 20), -largest, np.float32)),  # a mask that is finite
        "key": dict(bias=np.where(np.arange(20) == 3, np.float32(0.8 * largest), np.float32(0))),
        "sink": dict(sinks=np.array([0.8 * largest, -largest], np.float32)),
        "far below": dict(bias=np.full(20, -0.8 * largest, np.float32)),
    }[name]
    case = make(B=1, Hq=2, Tq=20, d=16, dtype=dtype, **options)
    case.wrt = ("q", "k", "v")
    want, want_lse = case.forward(backend="numpy_tiled")
    gradients = case.backward(want, want_lse, backend="numpy_tiled")
    moved = on_device(case)
    out, lse = moved.forward()
    for a, b in zip((out, lse, *moved.backward(out, lse)), (want, want_lse, *gradients), strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=2e-2 if dtype == "bfloat16" else 1e-5, atol=1e-2 * np.abs(b).max())


@pytest.mark.parametrize("chip, dtype, size, T", [
    ("sm_90", "float32", 1e5, 512), ("sm_90", "float32", 1e10, 512), ("sm_90", "float16", 6e4, 70),
    ("sm_80", "float16", 6e4, 140), ("sm_80", "bfloat16", 1e5, 140), ("sm_80", "bfloat16", 1e10, 140),
])  # fmt: skip
def test_scores_beyond_what_float32_tells_apart(chip, dtype, size, T, device, monkeypatch):
    """Scores of 1e9 to 1e20: as powers of two, m is rounded by more than P may exceed 1."""
    monkeypatch.setattr(hardware, "_gpu", lambda device: replace(hardware.CHIPS[chip], processors=2))
    case = make(B=1, Hq=1, Tq=T, d=64, dtype=dtype)
    rng = np.random.default_rng(0)
    for array, most in ((case.q, size), (case.k, size), (case.v, 1)):
        array[:] = most * rng.random(array.shape)
    case.q[:, :, 1::4] *= -1  # their scores are far below 0
    case.q[:, :, 2::4] = 0  # and these are not far from it, in the same warp
    for causal in (False, True):
        reference = case.reference(causal=causal)
        out, lse = on_device(case).forward(causal=causal)
        assert_close("out", np.asarray(out), reference)
        assert_close("lse", np.asarray(lse), reference)


def test_a_bias_of_minus_infinity_hides_what_overflows(device_by_name):
    case = make(B=1, Hq=1, Tq=20, d=16, bias=np.where(np.arange(20) == 5, -np.inf, 0).astype(np.float32))
    case.q[...] = 10 * np.abs(case.q) + 1
    clean = case.reference()
    case.k[:, :, 5] = 3e38
    moved = on_device(case)
    for algorithm in ALGORITHMS:
        out, lse = moved.forward(algorithm=algorithm)
        assert_close("out", np.asarray(out), clean)
        for name, g in zip(case.wrt, moved.backward(out, lse, algorithm=algorithm), strict=True):
            assert np.isfinite(np.asarray(g)).all(), name


@pytest.fixture(scope="module")
def device_of_module():
    with pytest.MonkeyPatch.context() as monkeypatch:
        emulator.install(monkeypatch)
        yield


FEW = settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@FEW
@given(problems(algorithms=ALGORITHMS))
def test_drawn_problems(device_of_module, case):
    check(case, case.reference(), small_on_device=case.how["seed"] % 2 == 1)


@FEW
@given(varlen_problems(algorithms=ALGORITHMS))
def test_drawn_varlen_problems(device_of_module, case):
    check(case, case.reference(), small_on_device=case.how["seed"] % 2 == 1)


# ---- keys shared out -------------------------------------------------------------------------------------------


def no_warpgroups(monkeypatch):
    """As on GPUs other than sm_90, which has kernels of its own for most calls of 16 bits: see test_hopper_*.py."""
    monkeypatch.setattr(problem, "_MEMO", {})
    monkeypatch.setattr(sm90, "WGMMA_CHIP", "none")


def share_out(monkeypatch):
    """A device that shares the keys of every problem out, a block of them to each part; how often parts were merged."""
    no_warpgroups(monkeypatch)
    monkeypatch.setattr(hardware, "_gpu", lambda device: replace(hardware.CHIPS["sm_90"], processors=1000))
    values = {"PART_STEPS": 1, "PART_START": 0.0, "PART_MERGE": 0.0, "RAW_MERGE": 0.0, "PART_GAIN": 1.0}
    for name, value in values.items():
        monkeypatch.setattr(tiling, name, value)
    merged = []
    run = launch.Launcher.run

    def counted(self, kernel, *arguments):
        merged.extend([kernel] * (kernel == "fa2_forward_merge"))
        return run(self, kernel, *arguments)

    monkeypatch.setattr(launch.Launcher, "run", counted)
    return merged


@pytest.mark.parametrize("name", CHOSEN)
def test_awkward_calls_in_parts(name, device_by_name, monkeypatch):
    n = CHOSEN.index(name)
    case, reference = awkward(name, names[n % len(names)])
    merged = share_out(monkeypatch)
    check(case, reference, small_on_device=n % 2 == 0, backward=False)
    if name.startswith("many tiles"):
        assert merged


@pytest.mark.parametrize("dtype", names)
@pytest.mark.parametrize("aligned", [True, False])
def test_long_calls_in_parts(dtype, aligned, device_by_name, monkeypatch):
    """Rows in padding, rows whose last part sees nothing, rows that see no key at all; an out of any alignment."""
    case = make(B=2, Hq=2, Hkv=1, Tq=150, Tk=400, d=24, dv=24 if aligned else 23, dtype=dtype, causal=True,
                q_lengths=[150, 60], kv_lengths=[400, 30], sinks=np.array([0.5, -np.inf], np.float32))  # fmt: skip
    reference = case.reference()
    room = emulator.to_device(np.full((2, 2, 150, 32), 7, case.q.dtype))
    out = room[..., :24] if aligned else room[..., 1:24]
    merged = share_out(monkeypatch)
    case.options["out"] = out
    check(case, reference, backward=False)
    assert merged
    assert (np.asarray(room).astype(np.float64) == 7).sum() == room.size - out.size


@FEW
@given(case=problems(algorithms=("fa2",)) | varlen_problems(algorithms=("fa2",)))
def test_drawn_problems_in_parts(device_of_module, case):
    reference = case.reference()
    with pytest.MonkeyPatch.context() as monkeypatch:
        share_out(monkeypatch)
        check(case, reference, backward=False)


@pytest.mark.parametrize("old, new", [
    ("exponential(*of_part(call, call.m, at, part, i) - shift)", "real(1)"),
    ("if (part < parts - 1)", "if (part < parts)"),
    ("j_low += part * call.part_keys", "j_low += 0"),
    ("+ part * rows_of_part(call);", "+ 0 * rows_of_part(call);"),
])  # fmt: skip
def test_broken_parts_are_caught(old, new, device_by_name, monkeypatch):
    # Planned for six blocks of keys, a part each; with this offset the band reaches into seven.
    case = make(B=1, Hq=2, Tq=128, Tk=256, d=24, window=(63, 0), q_offset=94)
    reference = case.reference()
    whole = compile.source
    assert old in whole("fa2_forward.cu", "")
    merged = share_out(monkeypatch)
    check(case, reference, backward=False)
    assert merged
    monkeypatch.setattr(problem, "_MEMO", {})
    monkeypatch.setattr(compile, "source", lambda name, preamble: whole(name, preamble).replace(old, new))
    with pytest.raises(AssertionError):
        check(case, reference, backward=False)


# ---- many rows of 16 bits --------------------------------------------------------------------------------------

HALVES = "mma/fa2_forward.cu"
HALF_DTYPES = ("float16", "bfloat16")
HALF_DRAWN = dict(dtypes=HALF_DTYPES, algorithms=("fa2",))


def all_rows(monkeypatch):
    """Few rows are the kernel's too."""
    no_warpgroups(monkeypatch)
    monkeypatch.setattr(tiling, "few_mma_takes", lambda *of: False)


@pytest.fixture
def many_rows(monkeypatch):
    """Which files were compiled."""
    all_rows(monkeypatch)
    return noted_files(monkeypatch)


def noted_files(monkeypatch):
    files, whole = [], compile.source
    monkeypatch.setattr(compile, "source", lambda name, preamble: files.append(name) or whole(name, preamble))
    return files


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_calls_of_16_bits(name, device_by_name, many_rows, monkeypatch):
    """All of them: every second one in parts."""
    n = list(AWKWARD).index(name)
    case, reference = awkward(name, HALF_DTYPES[n // 2 % 2])
    if n % 2:
        share_out(monkeypatch)
    check(case, reference, small_on_device=n % 3 == 0, backward=False)
    assert set(many_rows) <= {HALVES}


WIDTHS = [(8, 8), (40, 72), (72, 40), (96, 96), (128, 128), (192, 128), (64, 256), (256, 64), (256, 256), (20, 33)]


@pytest.mark.parametrize("d, dv", WIDTHS)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_widths_of_16_bits(d, dv, dtype, device_by_name, many_rows):
    case = make(B=2, Hq=2, Hkv=1, Tq=150, Tk=200, d=d, dv=dv, dtype=dtype, causal=True, kv_lengths=[200, 130],
                q_lengths=[150, 60])  # fmt: skip
    check(case, case.reference(), backward=False)
    assert many_rows == [HALVES]


@pytest.mark.parametrize("view", ["sliced", "transposed", "reversed"])
def test_rows_of_16_bits_anywhere(view, device_by_name, many_rows):
    """Rows that do not start at multiples of 16 bytes go by their elements, and nothing beside them changes."""
    case = make(B=1, Hq=2, Tq=70, Tk=90, d=24, dtype="float16")
    reference = case.reference()
    for name in ("q", "k", "v"):
        setattr(case, name, restride(getattr(case, name), view))
    room = emulator.to_device(np.full((1, 2, 70, 32), 7, case.q.dtype))
    case.options["out"] = room[..., 1:25]
    check(case, reference, backward=False)
    assert (np.asarray(room).astype(np.float64) == 7).sum() == room.size - 70 * 2 * 24


@pytest.mark.parametrize("d, kib, file", [
    (64, 48, HALVES), (64, 32, HALVES), (64, 24, HALVES), (64, 16, HALVES), (64, 15, "fa2_forward.cu"),
    (128, 64, HALVES), (128, 48, HALVES), (128, 32, HALVES), (128, 31, "fa2_forward.cu"),
    (256, 99, HALVES), (256, 64, HALVES), (256, 63, "fa2_forward.cu"),
])  # fmt: skip
def test_blocks_of_16_bits_of_any_memory(d, kib, file, device_by_name, many_rows):
    """Every shape of a block, and the kernel of multiply-adds where none fits."""
    case = make(B=1, Hq=1, Tq=130, Tk=150, d=d, dtype="bfloat16", window=(100, 3))
    check(case, case.reference(), backward=False, sram=kib << 10)
    assert many_rows == [file]


@pytest.mark.parametrize("name, options", {
    "softcap": dict(softcap=2.0, causal=True),
    "alibi": dict(alibi_slopes=[0.5, 0.01], window=(80, 20)),
    "bias": dict(bias=normal(2, 2, 140, 150), q_lengths=[140, 77]),
    "bias by row": dict(bias=normal(2, 1, 140, 1)),
    "bias by key": dict(bias=normal(1, 2, 1, 150), kv_lengths=[150, 65]),
    "mask": dict(mask=M.SlidingWindow(9, 9) | M.Prefix(40), causal=True),
    "dropout": dict(dropout=0.4, seed=11, sinks=np.array([0.5, -np.inf], np.float32)),
    "a scale that only scores can have": dict(scale=-0.8),
    "everything": dict(softcap=3.0, alibi_slopes=[0.5, 0.01], bias=normal(1, 2, 140, 150), dropout=0.2, seed=3,
                       mask=M.SlidingWindow(60, 9), causal=True, q_offset=[3, -5]),
}.items())  # fmt: skip
@pytest.mark.parametrize("d", [64, 128])
def test_options_of_16_bits(name, options, d, device_by_name, many_rows, monkeypatch):
    dtype = HALF_DTYPES[(len(name) + d // 64) % 2]
    case = make(B=2, Hq=2, Hkv=1, Tq=140, Tk=150, d=d, dtype=dtype, **options)
    reference = case.reference()
    check(case, reference, backward=False)
    share_out(monkeypatch)
    check(case, reference, backward=False)
    assert set(many_rows) == {HALVES}


def test_maxima_that_grow_in_16_bits(device_by_name, many_rows):
    """By less than what is followed lazily, and by more; some rows of a warp only."""
    case = make(B=1, Hq=1, Tq=64, Tk=640, d=64, dtype="float16")
    case.k *= np.linspace(0.25, 8, 640, dtype=np.float16)[::-1, None]
    case.q[:, :, ::3] *= 4
    check(case, case.reference(), backward=False)


@FEW
@given(case=problems(**HALF_DRAWN) | varlen_problems(**HALF_DRAWN))
def test_drawn_problems_of_16_bits(device_of_module, case):
    reference = case.reference()
    with pytest.MonkeyPatch.context() as monkeypatch:
        all_rows(monkeypatch)
        if case.how["seed"] % 2:
            share_out(monkeypatch)
        check(case, reference, small_on_device=case.how["seed"] % 3 == 1, backward=False)


HALVES_BROKEN = {
    "O is not rescaled": ("O[r / 2][n][r % 2 * 2] *= alpha;", ";"),
    "m is not followed": ("if (__any_sync(WARP, grows))", "if (grows)"),
    "V is not awaited": ("await_groups<0>();\n        __syncthreads();  // V_j", "__syncthreads();  // V_j"),
    "the band is one key wide of the mark": ("call.band_upper + 1 - j_low", "call.band_upper + 2 - j_low"),
    "keys behind the last are seen": ("bool hidden = x >= keys;", "bool hidden = false;"),
    "pieces are not where they are read": ("(at ^ (x / 16 % 4 * 32))", "(at + x / 16 % 4 * 32)"),
    "a warp stays away from a barrier": (
        "__syncthreads();  // V_j is there", "if (threadIdx.x >= 32) __syncthreads();  // V_j is there"),
    "rows are loaded behind the tile": ("n < ROWS; n += ROWS_AT_ONCE", "n < ROWS + 32; n += ROWS_AT_ONCE"),
}  # fmt: skip


@pytest.mark.parametrize("how", HALVES_BROKEN)
def test_broken_kernels_of_16_bits_are_caught(how, device_by_name, many_rows, monkeypatch):
    old, new = HALVES_BROKEN[how]
    whole = compile.source
    case = make(B=1, Hq=1, Tq=140, Tk=210, d=24, dtype="float16", window=(60, 3))
    case.k *= np.linspace(0.25, 8, 210, dtype=np.float16)[::-1, None]
    reference = case.reference()
    check(case, reference, backward=False)
    assert many_rows == [HALVES] and old in whole(HALVES, "")
    emulator.install(monkeypatch, backwards=True)
    monkeypatch.setattr(compile, "source", lambda name, preamble: whole(name, preamble).replace(old, new))
    with pytest.raises(AssertionError):
        check(case, reference, backward=False)


@pytest.mark.parametrize("old, new", [
    ("exponential(*of_part(call, call.m, at, part, i) - shift)", "1.0f"),
    ("if (work.part < parts - 1)", "if (work.part < parts)"),
    ("j_low += work.part * call.part_keys", "j_low += 0"),
    ("+ part * rows_of_part(call);", "+ 0 * rows_of_part(call);"),
    ("PRODUCTS ? m[r] * LN2 : m[r]", "m[r]"),
])  # fmt: skip
def test_broken_parts_of_16_bits_are_caught(old, new, device_by_name, many_rows, monkeypatch):
    # Planned for three blocks of 256 keys, a part each; with this offset the band reaches into four.
    case = make(B=1, Hq=2, Tq=64, Tk=1024, d=24, dtype="float16", window=(511, 0), q_offset=766)
    case.q *= 3
    reference = case.reference()
    whole = compile.source
    merged = share_out(monkeypatch)
    check(case, reference, backward=False)
    assert merged and many_rows == [HALVES] and old in whole(HALVES, "")
    monkeypatch.setattr(problem, "_MEMO", {})
    monkeypatch.setattr(compile, "source", lambda name, preamble: whole(name, preamble).replace(old, new))
    with pytest.raises(AssertionError):
        check(case, reference, backward=False)


# ---- gradients of 16 bits on tensor cores ------------------------------------------------------------------------

TWO_TILES = dict(B=2, Hq=2, Hkv=1, Tq=70, Tk=140)
GRADIENTS = {
    "plain": TWO_TILES | dict(d=64),
    "causal": TWO_TILES | dict(d=128, causal=True),
    "causal, more rows than keys": dict(B=1, Hq=1, Tq=200, Tk=70, d=64, causal=True),
    "heads": dict(B=2, Hq=6, Hkv=2, Tq=40, Tk=50, d=24),
    "offsets": TWO_TILES | dict(d=40, causal=True, q_offset=np.array([-31, 77])),
    "window": TWO_TILES | dict(d=64, window=(60, 10), q_offset=np.array([-31, 77])),
    "lengths": TWO_TILES | dict(d=72, dv=96, causal=True, q_lengths=[70, 33], kv_lengths=[20, 140]),
    "widths of 8": TWO_TILES | dict(d=8, dv=200),
    "unaligned": TWO_TILES | dict(d=33, dv=7, causal=True),
    "wide": dict(B=1, Hq=2, Hkv=1, Tq=80, Tk=150, d=256, causal=True),
    "wide, unaligned": dict(B=1, Hq=2, Hkv=1, Tq=80, Tk=70, d=131, dv=250),
    "a third of two warps": dict(B=1, Hq=1, Tq=40, Tk=70, d=144, dv=176),
    "one number": dict(B=1, Hq=1, Tq=70, d=1, causal=True),
    "bias": TWO_TILES | dict(d=64, bias=half_hidden(2, 70, 140)),
    "bias by key": TWO_TILES | dict(d=24, bias=normal(2, 1, 1, 140), q_lengths=[70, 33]),
    "mask": TWO_TILES | dict(d=64, mask=half_visible(2, 2, 70, 140)),
    "mask object": TWO_TILES | dict(d=64, mask=M.Segments(np.arange(70) // 64, np.arange(140) // 128), causal=True),
    "softcap": TWO_TILES | dict(d=128, softcap=2.0),
    "alibi": TWO_TILES | dict(d=64, alibi_slopes=np.array([0.5, 0.1])),
    "dropout": TWO_TILES | dict(d=64, dropout=0.3, seed=2**64 - 5),
    "sinks": TWO_TILES | dict(d=64, sinks=normal(2), causal=True, q_offset=-20),
    "a large scale": TWO_TILES | dict(d=16, scale=1.5),
    "a negative scale": TWO_TILES | dict(d=64, scale=-0.3, causal=True),
    "everything": TWO_TILES | dict(
        d=40, dv=72, causal=True, window=(90, None), q_lengths=[70, 20], kv_lengths=[140, 30],
        mask=half_visible(2, 2, 70, 140), bias=normal(2, 70, 140), alibi_slopes=np.full(2, 0.02), softcap=8.0,
        sinks=normal(2), dropout=0.2),
    "everything, wide": dict(
        B=1, Hq=2, Hkv=1, Tq=70, Tk=90, d=200, dv=144, causal=True, mask=M.PrefixLM(9) | M.SlidingWindow(20, 0),
        bias=normal(2, 70, 90), softcap=8.0, dropout=0.2),
}  # fmt: skip


def raw_plans(monkeypatch, *shape):
    """Tiles of the 16-bit backward pass: rows, keys, stages; none: as planned."""
    no_warpgroups(monkeypatch)
    if shape:
        monkeypatch.setattr(tiling, "RAW_BACKWARD", dict.fromkeys(tiling.RAW_BACKWARD, (shape,)))


def check_gradients(host, reference, monkeypatch, **options):
    """Of the kernels of mma/fa2_backward.cu, from numpy_tiled's out and lse; those are returned."""
    files, source = [], compile.source
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "source", lambda name, text: files.append(name) or source(name, text))
        out, lse = (emulator.to_device(x) for x in host.forward(backend="numpy_tiled"))
        case = on_device(host, options.pop("small_on_device", False))
        gradients = case.backward(out, lse, **options)
    assert "mma/fa2_backward.cu" in files
    for name, gradient in zip(case.wrt, gradients, strict=True):
        assert_close("d" + name, np.asarray(gradient), reference)
    return gradients


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_halves(name, device_by_name, monkeypatch):
    """As planned and in small tiles, of which there are then many; one or two of Q and dO on chip."""
    n = list(GRADIENTS).index(name)
    case = make(dtype=HALF_DTYPES[n % 2], **GRADIENTS[name])
    reference = case.reference()
    for shape in ((), ((32, 32, 1), (64, 64, 1), (64, 64, 2))[n % 3]):
        raw_plans(monkeypatch, *shape)
        check_gradients(case, reference, monkeypatch, small_on_device=n % 3 == 0)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_halves_without_atomics(name, device_by_name, monkeypatch):
    """A pass for dK and dV and one for dQ; the same bits when it is done again."""
    n = list(GRADIENTS).index(name)
    case = make(dtype=HALF_DTYPES[(n + 1) % 2], **GRADIENTS[name])
    reference, results = case.reference(), []
    for _ in range(2):
        raw_plans(monkeypatch, *((), (32, 32, 1), (64, 64, 1))[n % 3])
        results.append(check_gradients(case, reference, monkeypatch, deterministic=True))
    for one, other in zip(*results, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize(
    ("shape", "d"),
    [((128, 128, 2), 40), ((64, 128, 2), 40), ((64, 64, 1), 40), ((32, 32, 1), 40), ((128, 64, 1), 144),
     ((64, 64, 2), 144)],
)  # fmt: skip
def test_orders_of_threads_of_halves(device, shape, d, monkeypatch):
    case = make(B=1, Hq=2, Hkv=1, Tq=100 if d == 40 else 210, Tk=140, d=d, dtype="float16", causal=True)
    raw_plans(monkeypatch, *shape)
    check_gradients(case, case.reference(), monkeypatch)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [24, 160])
def test_packed_sequences_of_halves(device, d, deterministic, monkeypatch):
    """Sequences of no rows or no keys, rows of none, and such as share sixteen rows of the arrays."""
    case = make(lead=(), Hq=2, Hkv=1, Tq=90, Tk=110, d=d, dtype="bfloat16", causal=True, sinks=normal(2))
    case.cu_seqlens = ([2, 13, 13, 20, 70, 71, 80], [1, 10, 20, 20, 70, 100, 101])
    raw_plans(monkeypatch, 32, 32, 1)
    check_gradients(case, case.reference(), monkeypatch, deterministic=deterministic)


def test_gradients_of_halves_are_given_where_memory_was_nan(device, monkeypatch):
    """Padding in the middle of a tile is not read, and its gradients are 0; a NaN that is seen stays in its rows."""
    case = make(B=1, Hq=1, Tq=40, Tk=50, d=24, dtype="float16", q_lengths=[30], kv_lengths=[41])
    case.q[:, :, 30:], case.dout[:, :, 30:], case.k[:, :, 41:], case.v[:, :, 41:] = (np.nan,) * 4
    case.dlse[:, :, 30:] = np.nan
    raw_plans(monkeypatch)
    reference = case.reference()
    for gradient, rows in zip(check_gradients(case, reference, monkeypatch), (30, 41, 41), strict=True):
        assert np.isfinite(gradient).all() and not np.asarray(gradient)[:, :, rows:].any()
    causal = make(B=1, Hq=1, Tq=40, d=24, dtype="float16", causal=True)
    out, lse = (emulator.to_device(x) for x in causal.forward(backend="numpy_tiled"))
    causal.dout[:, :, 20] = np.nan
    dq = np.asarray(on_device(causal).backward(out, lse)[0])
    assert (np.isnan(dq).any(axis=(0, 1, 3)) == (np.arange(40) == 20)).all()


BROKEN_HALVES = {
    "lse is that of the step before": ("(statistics + stage * (2 * BR) +", "(statistics +"),
    "dS lies one key on": ("own_warp() + lane_g(), 0)", "own_warp() + (lane_g() ^ 1), 0)"),
    "P is not hidden": ("S[m][n][e] = -INFINITE;", ";"),
    "two warps put P at one place": ("(tile.P, first, s, factor_P)", "(tile.P, 0, s, factor_P)"),
    "rows come before they have landed": (
        "            await_groups<DURING_S>();\n            finish_statistics(r,", "            finish_statistics(r,"),
    "the band is one row wide of the mark": ("- call.band_upper - i_low,", "- call.band_upper - i_low - 1,"),
    "pieces of two heads are one": ("head * r.sums_of_head", "0 * r.sums_of_head"),
    "two columns of dQ are exchanged": ("X[2 * t] = half ? x[t].z : x[t].x", "X[2 * t] = half ? x[t].w : x[t].y"),
    "two warps sum the same columns": ("part_of_warp() * Part<N>::COLUMNS, n)", "0, n)"),
    "a pair's sums are not added": ("X[0][n][0] += __uint_as_float(words.x);", ""),
    "a pair's sums are one": ("load_shared(place(warp ^ 1, n))", "load_shared(place(warp, n))"),
    "dQ has dS of this step": ("tiles + DS_AT + (stage ^ 1) * FACTOR", "tiles + DS_AT + stage * FACTOR"),
    "dQ has the place of this step": ("(first ? r.steps : step.m) - 1", "step.m"),
    "dQ of the last step is left out": ("more || (LATE && begun)", "more"),
    "a pair's rows are one's, twice": ("(part_of_warp() ^ n) * WARP_PART", "part_of_warp() * WARP_PART"),
    "four have the rows of two": ("n < SHARING;", "n < 2;"),
    "four have dO before it has landed": (
        "            await_groups<0>();\n            __syncthreads();  // dO_i is there\n", ""),
    "four have half of dQ": ("n < BR; n += QUERY_BLOCK", "n < QUERY_BLOCK; n += QUERY_BLOCK"),
    "delta is left out": ("(x[half % 2 * 2] - d.x)", "(x[half % 2 * 2])"),
    "a head of the group is left out": ("r.h_end = h_first + group;", "r.h_end = h_first + group - 1;"),
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN_HALVES)
def test_broken_gradients_of_halves_are_caught(how, device_by_name, monkeypatch):
    old, new = BROKEN_HALVES[how]
    four = how.startswith("four")
    d = 200 if four else 136 if how.startswith("two warps") else 72 if how.endswith("twice") else 40
    rows, keys = (260, 90) if four else (100, 100)
    case = make(B=1, Hq=2, Hkv=1, Tq=rows, Tk=keys, d=d, dtype="float16", causal=not four)
    case.v[:, :, 80] = 30  # a dP that is large, where it is hidden too
    reference, whole = case.reference(), compile.source
    raw_plans(monkeypatch, 32, 32, 1)
    check_gradients(case, reference, monkeypatch)
    tall = how.startswith(("a pair", "dQ"))
    wide = (128, 64, 1) if four else (64, 64, 1)
    raw_plans(monkeypatch, *((64, 128, 2) if tall else (64, 64, 2) if d == 40 else wide))
    assert old in whole("mma/fa2_backward.cu", "")
    monkeypatch.setattr(compile, "source", lambda name, preamble: whole(name, preamble).replace(old, new))
    emulator.install(monkeypatch, backwards=True)
    with pytest.raises(AssertionError):
        check_gradients(case, reference, monkeypatch)


@FEW
@given(
    case=problems(algorithms=("fa2",), dtypes=HALF_DTYPES, max_head_dim=40)
    | varlen_problems(algorithms=("fa2",), dtypes=HALF_DTYPES)
)
def test_drawn_gradients_of_halves(device_of_module, case):
    with pytest.MonkeyPatch.context() as monkeypatch:
        raw_plans(monkeypatch, *((64, 128, 2) if case.how["seed"] % 3 == 0 else (32, 32, 1)))
        check(case, case.reference(), small_on_device=case.how["seed"] % 2 == 1)


# ---- float64 without options: P stays in registers ------------------------------------------------------------

DOUBLES = {
    "blocks of 64 keys": dict(B=1, Hq=2, Hkv=1, Tq=150, Tk=210, d=64, dv=40, causal=True),
    "of 32": dict(B=2, Hq=1, Tq=40, Tk=100, d=128, window=(20, 9), kv_lengths=[70, 100]),
    "of 24": dict(B=1, Hq=1, Tq=20, Tk=70, d=136, dv=129, causal=True),
    "all before": dict(B=1, Hq=1, Tq=140, Tk=70, d=24, dv=33, q_offset=-60, causal=True, sinks=normal(1)),
    "scale": dict(B=1, Hq=1, Tq=30, Tk=90, d=16, scale=3.0),
}


def double(name, factor=1.0):
    case = make(dtype="float64", **DOUBLES[name])
    case.q *= factor
    return case


@pytest.mark.parametrize("factor", [1, 1e100, 1e-160])
@pytest.mark.parametrize("name", DOUBLES)
def test_doubles(name, factor, device_by_name):
    """Also of scores so large that their maximum has to be exact."""
    case = double(name, factor)
    check_doubles(case, case.reference())


def check_doubles(case, reference):
    texts, source = [], compile.source
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "source", lambda name, text: texts.append(text) or source(name, text))
        out, lse = on_device(case).forward()
    assert "#define P_STAYS 1\n" in texts[0]
    assert_close("out", np.asarray(out), reference)
    assert_close("lse", np.asarray(lse), reference)


def test_doubles_of_negative_scores(device):
    case = double("blocks of 64 keys")
    case.q[:], case.k[:] = -40 * abs(case.q), abs(case.k)
    check_doubles(case, case.reference())


def test_nan_and_infinite_doubles_stay_in_their_rows(device):
    case = double("blocks of 64 keys")
    case.q[:, :, 20], case.q[:, :, 21] = np.nan, np.inf
    out = np.asarray(on_device(case).forward()[0])
    assert (np.isnan(out).any(axis=(0, 1, 3)) == np.isin(np.arange(150), (20, 21))).all()


BROKEN_DOUBLES = {
    "keys are hidden in their order in memory": ("4 + (lane_t() ^ 2) : lane_t())", "4 + lane_t() : lane_t())"),
    "V has that order": ("depth + (lane_t() ^ 2)", "depth + lane_t()"),
    "K has it": ("4 + (g / 2 ^ 2)", "4 + g / 2"),
    "V is not awaited": ("await_copies<0>();\n        __syncthreads();  // V_j", "__syncthreads();  // V_j"),
    "the maximum is the least": ("high < 0 ? low : (unsigned)high", "(unsigned)high"),
    "large maxima are cut": ("(word & ~SIGN) >= far", "false"),
    "O is not rescaled": ("O[r][c] *= alpha[r]", "O[r][c] *= 1"),
    "lse has a product": ("m[r] *= at.scale;", ";"),
}


@pytest.mark.parametrize("how", BROKEN_DOUBLES)
def test_broken_doubles_are_caught(how, device, monkeypatch):
    old, new = BROKEN_DOUBLES[how]
    case = double("blocks of 64 keys", 1e100 if how.startswith("large") else 1)
    if how == "the maximum is the least":
        case.q[:], case.k[:] = -40 * abs(case.q), abs(case.k)
    reference, whole = case.reference(), compile.source
    assert old in whole("fa2_forward.cu", '#define PIECES 1\n#define SPLIT 0\n#include "mma/pieces.cuh"')
    monkeypatch.setattr(compile, "source", lambda name, preamble: whole(name, preamble).replace(old, new))
    with pytest.raises(AssertionError):
        check_doubles(case, reference)


# ---- few rows of 16 bits ---------------------------------------------------------------------------------------

FEW_ROWS = {
    "one query": dict(B=1, Hq=4, Hkv=2, Tq=1, Tk=900, d=64),
    "causal, lengths": dict(B=2, Hq=6, Hkv=2, Tq=3, Tk=700, d=40, dv=72, causal=True, kv_lengths=[700, 300],
                            q_lengths=[3, 2], sinks=np.linspace(-1, 1, 6, dtype=np.float32)),
    "window": dict(B=1, Hq=4, Hkv=4, Tq=2, Tk=900, d=20, dv=33, window=(600, 0), q_offset=[850]),
    "more rows than a product": dict(B=1, Hq=8, Hkv=1, Tq=5, Tk=600, d=128, softcap=3.0),
    "wide": dict(B=1, Hq=2, Hkv=1, Tq=9, Tk=600, d=256, alibi_slopes=[0.5, 0.01]),
    "everything": dict(B=1, Hq=2, Hkv=1, Tq=4, Tk=600, d=32, mask=M.Prefix(550),
                       bias=np.ones((1, 2, 4, 600), np.float16),
                       dropout=0.3, seed=5),
}  # fmt: skip


def processors(monkeypatch, number):
    monkeypatch.setattr(problem, "_MEMO", {})
    monkeypatch.setattr(hardware, "_gpu", lambda device: replace(hardware.CHIPS["sm_90"], processors=number))


@pytest.mark.parametrize("number", [1, 132])
@pytest.mark.parametrize("name", FEW_ROWS)
def test_few_rows(name, number, device_by_name, monkeypatch):
    """One part of the keys for each head, or as many as there are; the counters of the parts are zeros again."""
    case = make(dtype="float16", **FEW_ROWS[name])
    processors(monkeypatch, number)
    asked = []
    counters = launch.Launcher.counters

    def noted(self, count):
        address = counters(self, count)
        asked.append((self, address))
        return address

    monkeypatch.setattr(launch.Launcher, "counters", noted)
    check(case, case.reference(), small_on_device=name == "one query", backward=False)
    assert bool(asked) == (number > 1)
    for launcher, _ in asked:
        assert launcher.counts and not any(np.asarray(zeros).any() for zeros in launcher.counts.values())


@pytest.mark.parametrize("old, new", [
    ("weight[n] = exponential(weight[n] - shift);", "weight[n] = 1;"),
    ("j_low + part * TURN + warp * STEP", "j_low + warp * STEP"),
    ("O[r][x][n][c] *= alpha[r][c / 2];", ";"),
    ("const float weight = exponential(of_warp.x - shift);", "const float weight = 1;"),
    ("exists = n + row < left;", "exists = true;"),
    ("const int n = r % 2 + r / 8 * 2,", "const int n = r % 2,"),
])  # fmt: skip
def test_broken_few_rows_are_caught(old, new, device_by_name, monkeypatch):
    case = make(dtype="float16", B=1, Hq=4, Hkv=2, Tq=2, Tk=650, d=64, kv_lengths=[645])
    case.q[...] *= 4  # maxima that grow, in parts that weigh differently
    case.k[:, :, 645:] = case.v[:, :, 645:] = np.nan
    reference = case.reference()
    whole = compile.source
    assert old in whole("fa2_few_rows.cu", "")
    processors(monkeypatch, 132)
    check(case, reference, backward=False)
    monkeypatch.setattr(problem, "_MEMO", {})
    monkeypatch.setattr(compile, "source", lambda name, preamble: whole(name, preamble).replace(old, new))
    with pytest.raises(AssertionError):
        check(case, reference, backward=False)


def test_counters_are_of_a_stream_and_of_a_graph(device_by_name, monkeypatch):
    """Launches side by side do not count each other's parts: two streams, and two calls in graphs."""
    case = make(dtype="float16", B=1, Hq=2, Tq=1, Tk=600, d=16)
    processors(monkeypatch, 132)
    used = []
    counters = launch.Launcher.counters
    monkeypatch.setattr(launch.Launcher, "counters", lambda self, count: used.append(counters(self, count)) or used[-1])
    stream = arrays.require_cupy().cuda.get_current_stream()
    monkeypatch.setattr(launch, "SPARE", 4)
    check(case, case.reference(), backward=False)
    check(case, case.reference(), backward=False)
    monkeypatch.setattr(stream, "ptr", 77)
    monkeypatch.setattr(stream, "is_capturing", lambda: False, raising=False)
    check(case, case.reference(), backward=False)
    monkeypatch.setattr(stream, "is_capturing", lambda: True)
    for _ in range(6):  # the last ones have sets of their own
        check(case, case.reference(), backward=False)
    assert used[0] == used[1] and len(set(used)) == len(used) - 1


def test_later_graphs_find_spare_counters(device_by_name, monkeypatch):
    """A graph that has to clear counters has a node more for each call; one after a plain call has none."""
    case = make(dtype="float16", B=1, Hq=2, Tq=1, Tk=600, d=16)
    processors(monkeypatch, 132)
    monkeypatch.setattr(launch, "SPARE", 8)
    cupy = arrays.require_cupy()
    stream, zeros, cleared, capturing = cupy.cuda.get_current_stream(), cupy.zeros, [], False
    monkeypatch.setattr(stream, "ptr", 77)  # the default stream cannot be captured
    monkeypatch.setattr(stream, "is_capturing", lambda: capturing, raising=False)
    monkeypatch.setattr(cupy, "zeros", lambda *args: cleared.append(capturing) or zeros(*args))
    for _ in range(3):
        capturing = False
        check(case, case.reference(), backward=False)
        capturing = True
        for _ in range(4):
            check(case, case.reference(), backward=False)
    assert cleared and not any(cleared)


# ---- float32 from parts that were split before -----------------------------------------------------------------


@pytest.fixture
def ran(device_by_name, monkeypatch):
    """The kernels that calls ran; those that read parts take problems of any size."""
    return split_all(monkeypatch)


def split_all(monkeypatch):
    monkeypatch.setattr(problem, "_MEMO", {})
    monkeypatch.setattr(tiling, "SPLIT_LEAST", 0)
    names = []
    run = launch.Launcher.run
    monkeypatch.setattr(launch.Launcher, "run", lambda self, name, *more: names.append(name) or run(self, name, *more))
    return names


#: Calls that none of the kernels before them has: one row, no rows, no keys, nothing visible, everything in padding.
SPLIT_CHOSEN = (
    *CHOSEN, "one row, one dimension", "no rows", "no keys", "offset far left: nothing visible", "window past the keys",
    "d < dv", "padding only, sinks", "no sink: -inf",
)  # fmt: skip
assert set(SPLIT_CHOSEN) <= set(AWKWARD)
#: Options that keep a call with the kernels of before.
STAY = ("mask", "bias", "alibi_slopes", "softcap", "dropout", "sram")


@pytest.mark.parametrize("name", SPLIT_CHOSEN)
def test_awkward_calls_in_parts_of_numbers(name, ran):
    case, reference = awkward(name, "float32")
    n = SPLIT_CHOSEN.index(name)
    check(case, reference, small_on_device=n % 2 == 0)
    split = not (set(STAY) & case.options.keys() or "algorithm" in case.options)
    assert ran.count("split_inputs") == (2 if split else 0)


SPLIT_LONG = {
    "d = 64": dict(Tq=260, Tk=200, d=64),
    "d = 128, causal": dict(Tq=140, Tk=330, d=128, causal=True),
    "grouped heads, lengths": dict(B=2, Hq=4, Hkv=2, Tq=150, Tk=200, d=24, dv=40, causal=True, q_lengths=[150, 60],
                                   kv_lengths=[200, 30]),
    "odd dimensions, window, sinks": dict(Hq=2, Hkv=1, Tq=170, Tk=190, d=17, dv=33, window=(70, 5),
                                          sinks=np.array([0.5, -1], np.float32)),
    "pairs that warps do not share evenly": dict(Tq=70, Tk=90, d=80, dv=112),
    "one piece of a value": dict(Tq=70, Tk=150, d=128, dv=3, causal=True),
    "rows far from keys": dict(Tq=300, Tk=90, d=16, causal=True, q_offset=-100),
    "a scale of its own": dict(Tq=70, Tk=90, d=16, scale=1.5),
    "a scale below 0": dict(Tq=70, Tk=90, d=16, scale=-0.5),
    "layout": dict(B=2, Hq=2, Tq=70, Tk=70, d=32, layout="bthd"),
}  # fmt: skip


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("name", SPLIT_LONG)
def test_long_calls_in_parts_of_numbers(name, aligned, ran):
    """Blocks of many kinds, in arrays of any alignment; padding is NaN."""
    how = {"B": 1, "Hq": 1} | SPLIT_LONG[name]
    layout = how.pop("layout", "bhtd")
    case = make(**how)
    if layout == "bthd":
        case = replace(case, options=case.options | {"layout": layout},
                       **{x: getattr(case, x).transpose(0, 2, 1, 3) for x in ("q", "k", "v", "dout")})  # fmt: skip
    for x, lengths in (("q", "q_lengths"), ("dout", "q_lengths"), ("k", "kv_lengths"), ("v", "kv_lengths")):
        for b, length in enumerate(case.options.get(lengths, ())):
            getattr(case, x)[b, :, length:] = np.nan
    reference = case.reference()
    if not aligned:
        for x in ("q", "k", "v", "dout"):
            old = getattr(case, x)
            room = np.full((*old.shape[:-1], old.shape[-1] + 1), np.nan, np.float32)
            room[..., 1:] = old
            setattr(case, x, room[..., 1:])
    check(case, reference)
    assert ran.count("split_inputs") == 2


@pytest.mark.parametrize("name", ["d = 64", "grouped heads, lengths", "odd dimensions, window, sinks"])
@pytest.mark.parametrize("Tq", [None, 2500])
def test_tall_blocks_in_parts_of_numbers(name, Tq, ran, monkeypatch):
    """Those of the backward pass on sm_100: 128 rows and 64 keys, whose P and dS go through on-chip memory."""
    monkeypatch.setattr(hardware, "_gpu", lambda device: replace(hardware.CHIPS["sm_100"], processors=2))
    case = make(**{"B": 1, "Hq": 1} | SPLIT_LONG[name] | ({} if Tq is None else {"Tq": Tq}))
    x = on_device(case)
    plan = rf.explain(x.q, x.k, x.v, "backward", **x.options).tiles
    assert (plan.family, plan.br, plan.bc) == (SPLIT_INPUTS, 128, 64)
    check(case, case.reference())
    assert ran.count("split_inputs") == 2


@pytest.mark.parametrize("Hq, Tq, causal", [
    (1, 5000, False), (3, 2048, False), (2, 2112, False), (4, 600, True), (5, 70, False),
])  # fmt: skip
def test_gradients_of_many_rows_in_parts_of_numbers(Hq, Tq, causal, ran):
    """Sums of 2,048 rows, or of a head, are added where dk and dv lie: an end of both, of one, of none but the last."""
    case = make(B=1, Hq=Hq, Hkv=1, Tq=Tq, Tk=70, d=16, causal=causal)
    check(case, case.reference())
    assert ran.count("split_inputs") == 2


def test_errors_of_gradients_do_not_grow_with_the_rows(ran):
    rng = np.random.default_rng(0)
    q, k, v, dout = (x.astype(np.float32)[None, None] for x in equal_rows(30000, 16, 16, rng))
    want = reference_of(q, k, v, dout, scale=1.0)
    moved = [emulator.to_device(x) for x in (q, k, v, dout)]
    out, lse = rf.attention(*moved[:3], scale=1.0, return_lse=True)
    grads = rf.attention_backward(moved[3], *moved[:3], out, lse, scale=1.0)
    for name, found in zip(("dq", "dk", "dv"), grads, strict=True):
        assert_close(name, np.asarray(found), want)
    assert ran.count("split_inputs") == 2


@FEW
@given(case=problems(dtypes=("float32",), algorithms=("fa2",), exclude=STAY)
       | varlen_problems(dtypes=("float32",), algorithms=("fa2",), exclude=STAY))  # fmt: skip
def test_drawn_problems_in_parts_of_numbers(device_of_module, case):
    reference = case.reference()
    with pytest.MonkeyPatch.context() as monkeypatch:
        split_all(monkeypatch)
        check(case, reference, small_on_device=case.how["seed"] % 2 == 1)


def test_a_row_of_nan_stays_one_row_of_dq_in_parts_of_numbers(ran):
    """Few columns: warps that have none of dQ's add nothing to what is behind its sums."""
    for d in (8, 16, 24):
        case = make(B=1, Hq=1, Tq=70, Tk=90, d=d)
        case.q[0, 0, 5] = np.nan
        moved = on_device(case)
        dq = np.asarray(moved.backward(*moved.forward())[0])
        assert np.flatnonzero(np.isnan(dq[0, 0]).any(axis=-1)).tolist() == [5]
    assert ran.count("split_inputs") == 6


def test_padding_of_dq_is_zero_whatever_keys_hold_in_parts_of_numbers(ran):
    case = make(B=1, Hq=1, Tq=70, Tk=90, d=32, q_lengths=[60])
    case.k[0, 0, 5] = np.nan
    moved = on_device(case)
    dq = np.asarray(moved.backward(*moved.forward())[0])
    assert np.isnan(dq[0, 0, :60]).all() and (dq[0, 0, 60:] == 0).all()
    assert ran.count("split_inputs") == 2


def test_packed_sequences_in_parts_of_numbers(ran):
    """Sequences that begin anywhere, one without rows, one without keys; rows that none of them owns are NaN."""
    case = make(lead=(), Hq=2, Hkv=1, Tq=190, Tk=170, d=24, causal=True)
    case.cu_seqlens = ([3, 20, 20, 95, 180], [1, 40, 60, 60, 165])
    for x, starts in (("q", 0), ("dout", 0), ("k", 1), ("v", 1)):
        array, owned = getattr(case, x), case.cu_seqlens[starts]
        array[:, : owned[0]] = array[:, owned[-1] :] = np.nan
    check(case, case.reference())
    assert ran.count("split_inputs") == 2


def test_keys_shared_out_in_parts_of_numbers(device_by_name, monkeypatch):
    case = make(B=2, Hq=2, Hkv=1, Tq=150, Tk=400, d=24, causal=True, q_lengths=[150, 60], kv_lengths=[400, 30],
                sinks=np.array([0.5, -np.inf], np.float32))  # fmt: skip
    reference = case.reference()
    ran, merged = split_all(monkeypatch), share_out(monkeypatch)
    check(case, reference, backward=False)
    assert merged and "split_inputs" in ran


@pytest.mark.parametrize("of", ["normal", "of one sign", "large scores", "one large number in each row"])
@pytest.mark.parametrize("d", [64, 128])
def test_sums_of_parts_are_as_exact_as_others(d, of, ran):
    """Tensor cores cut off: where all products have one sign, or scores are large, it would show."""
    case = make(B=1, Hq=1, Tq=130, Tk=260, d=d)
    if of == "of one sign":
        for x in (case.q, case.k, case.v, case.dout):
            x[...] = np.abs(x) + 0.5
    elif of == "large scores":
        case.q[...] *= 30
    elif of == "one large number in each row":
        case.v[..., 3] *= 2**20
        case.k[..., 5] *= 2**-20
        case.q[..., 5] *= 2**20
    check(case, case.reference())
    assert ran.count("split_inputs") == 2


# Barriers whose absence shows only if warps are far apart, which fibers are not, are not here.
SPLIT_BROKEN = {
    "the third parts are left out": ("int order = PARTS - 1; order >= 0;", "int order = PARTS - 2; order >= 0;"),
    "two parts are exchanged": ("(&four)[4] = B[n / 2][order - p];", "(&four)[4] = B[n / 2][p];"),
    "the tail of a row is another's": ("x + e < N ? source[e] : 0.0f", "source[e]"),
    "padding is read": ("const bool exists = WHOLE || n + row < count;", "const bool exists = true;"),
    "O does not follow m": ("O[n][2 * r] *= alpha;", ";"),
    "V is not awaited": ("await_groups<0>();\n            __syncthreads();  // V_j is", "__syncthreads();  // V_j is"),
    "the band of S is one key wide of the mark": ("call.band_upper + 1 - j_low", "call.band_upper + 2 - j_low"),
    "tiles of the diagonal hide nothing": (
        "if (!full)\n                    hide(", "if (false)\n                    hide("),
    "a row sees a key more": ("first + c || x >= end + c", "first + c - 1 || x >= end + c"),
    "the second head's rows are the first's": ("from += (unsigned)call.rows_q - r;", "from -= r;"),
    "the second head's patches are the first's": ("patch += (unsigned)call.parts - r / 16;", "patch -= r / 16;"),
    "lse is not awaited": (
        "await_groups<0>();\n                __syncthreads();  // Q_i and dO_i", "__syncthreads();  // Q_i and dO_i"),
    "columns of dK are the other warp's": ("threadIdx.x / WARP_SIZE / WARPS_K * (8 * N) : 0;", "0 : 0;"),
    "dQ of the other columns": ("pair = warp / WARPS_Q * PAIRS_Q;", "pair = 0;"),
}  # fmt: skip


@pytest.mark.parametrize("how", SPLIT_BROKEN)
def test_broken_kernels_of_parts_are_caught(how, ran, monkeypatch):
    old, new = SPLIT_BROKEN[how]
    whole, found = compile.source, []

    def broken(name, preamble):
        text = whole(name, preamble)
        if "split_" in name:
            found.append(old in text)
            text = text.replace(old, new)
        return text

    cases = [make(B=1, Hq=2, Hkv=1, Tq=200, Tk=200, d=d, causal=True, q_lengths=[190]) for d in (24, 66)]
    for case in cases:
        case.q[...] *= 4  # maxima that grow
        case.q[:, :, 190:] = case.dout[:, :, 190:] = np.nan
    references = [case.reference() for case in cases]
    monkeypatch.setattr(compile, "source", broken)
    caught = False
    for case, reference in zip(cases, references, strict=True):
        emulator.install(monkeypatch, backwards=True)
        split_all(monkeypatch)
        try:
            check(case, reference)
        except AssertionError:
            caught = True
    assert any(found), "the kernel has changed: this test must follow"
    assert caught


# ---- caches ----------------------------------------------------------------------------------------------------


def decode_on_device(case, tables_on_device, **options):
    """``(out, lse)`` of a `Decode` with its arrays on the device."""
    move = emulator.to_device
    *caches, blocks = case.caches(order=1)
    lengths = case.kv_lengths
    if tables_on_device:
        lengths, blocks = move(lengths), blocks if blocks is None else move(blocks)
    more = {name: move(x) if name == "sinks" else x for name, x in case.options.items()} | options
    results = rf.attention_decode(
        move(case.turned(case.q)), *map(move, caches), lengths, blocks, return_lse=True, layout=case.layout, **more
    )
    assert all(type(result) is emulator.ndarray for result in results)
    return [np.asarray(result) for result in results]


GUESS = "sequence(call, b, believed);"
WRONG = {  # what lengths and tables were when kernels that write them had not ended
    "shorter": (GUESS, GUESS + "s.kv_length = s.kv_length / 3; s.offset = s.kv_length - s.q_length;"),
    "longer": (GUESS, GUESS + "s.kv_length = call.Tk; s.offset = s.kv_length - s.q_length;"),
    "one less": (GUESS, GUESS + "s.kv_length = most(s.kv_length - 1, 0); s.offset = s.kv_length - s.q_length;"),
    "none": (GUESS, GUESS + "s.kv_length = 0; s.offset = -s.q_length;"),
    "fewer rows": (GUESS, GUESS + "s.q_length -= 1;"),
    "other blocks": ("now = known(__ldcg(", "now = 1 ^ known(__ldcg("),
    "no blocks": ("now = known(__ldcg(", "now = NONE | known(__ldcg("),
}


def check_decode(case, reference):
    for name, result in zip(("out", "lse"), decode_on_device(case, True), strict=True):
        assert_close(name, np.asarray(result), reference)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("page", [0, 16])
def test_guesses_of_few_rows_may_be_wrong(page, name, device_by_name, monkeypatch):
    old, new = WRONG[name]
    if page == 0 and "blocks" in name:
        pytest.skip("no table")
    case = decode(B=3, Hq=4, Hkv=2, Tq=2, lengths=(645, 300, 7), page=page, d=64, dv=64, dtype="float16", causal=True)
    reference, whole = case.reference(), compile.source
    assert old in whole("fa2_few_rows.cu", "")
    changes = [(old, new)]

    def changed(name, preamble):
        text = whole(name, preamble)
        for one, other in changes:
            text = text.replace(one, other)
        return text

    monkeypatch.setattr(compile, "source", changed)
    for number in (1, 132):
        processors(monkeypatch, number)
        check_decode(case, reference)
    looked_at = "if (__all_sync(WARP, kept))"
    assert looked_at in whole("fa2_few_rows.cu", "")
    changes.append((looked_at, "if (true)"))
    processors(monkeypatch, 132)
    with pytest.raises(AssertionError):
        check_decode(case, reference)


FEWER = GUESS + "s.kv_length -= %d; s.offset = s.kv_length - s.q_length;"
SECOND_BLOCK = ("now = known(__ldcg(", "now = (lane == 1) ^ known(__ldcg(")
KEPT = {  # conditions that what was asked for is wanted: a guess and a call where no other one tells; processors
    "first == first_of_warp": ((GUESS, FEWER % 16), dict(lengths=(645, 300), causal=True, window=(200, 0)), 1),
    "distance == stride": (WRONG["shorter"], dict(lengths=(645, 300), d=16, dv=128), 132),  # others tell of long queues
    "end <= high": ((GUESS, FEWER % 8), dict(lengths=(512, 384, 256)), 1),  # a last step that was not a whole one
    "end <= j_high": (WRONG["longer"], dict(lengths=(645, 300, 7)), 1),
    "rows_before == s.q_length": (WRONG["fewer rows"], dict(lengths=(645, 300, 7)), 1),
    "found == now": (SECOND_BLOCK, dict(lengths=(645, 300, 7), page=16), 1),
}


@pytest.mark.parametrize("condition", KEPT)
def test_each_condition_finds_guesses_of_few_rows_wrong(condition, device_by_name, monkeypatch):
    (old, new), call, number = KEPT[condition]
    case = decode(**dict(B=len(call["lengths"]), Tq=2, page=0, d=64, dv=64, dtype="float16") | call)
    reference, whole = case.reference(), compile.source
    text = whole("fa2_few_rows.cu", "")
    assert text.count(old) == text.count(condition) == 1
    for kept in (condition, "true"):
        changed = partial(lambda kept, *of: whole(*of).replace(old, new).replace(condition, kept), kept)
        monkeypatch.setattr(compile, "source", changed)
        processors(monkeypatch, number)
        results = decode_on_device(case, True)
        with pytest.raises(AssertionError) if kept == "true" else nullcontext():
            for name, result in zip(("out", "lse"), results, strict=True):
                assert_close(name, result, reference)


@FEW
@given(decode_problems(dtypes=("float32", "float64", "float16")))
def test_drawn_decode_problems(device_of_module, case):
    for name, result in zip(("out", "lse"), decode_on_device(case, case.how["seed"] % 2 == 1), strict=True):
        assert_close(name, result, case.reference())


@pytest.mark.parametrize("tables", ["device", "host"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_decoding_from_blocks(dtype, tables, device_by_name):
    case = decode(B=3, Hq=4, Tq=3, lengths=(70, 0, 33), page=16, dtype=dtype, causal=True, d=24, dv=16)
    for name, result in zip(("out", "lse"), decode_on_device(case, tables == "device"), strict=True):
        assert_close(name, result, case.reference())


@pytest.mark.parametrize("old, new", [
    ("", ""),
    ("stride = parts * TURN;", "stride = (int)most_parts * TURN;"),
])  # fmt: skip
@pytest.mark.parametrize("page", [16, 48])
def test_caches_used_in_part(page, old, new, device_by_name, monkeypatch):
    """A sequence whose keys make fewer parts than its cache has room for; and that broken kernels are caught."""
    case = decode(lengths=(1900, 645), dtype="float16", d=64, dv=64, page=page)
    processors(monkeypatch, 132)
    whole = compile.source
    assert old in whole("fa2_few_rows.cu", "")
    monkeypatch.setattr(compile, "source", lambda name, preamble: whole(name, preamble).replace(old, new))
    out, lse = decode_on_device(case, True)
    reference = case.reference()
    with pytest.raises(AssertionError) if old else nullcontext():
        assert_close("out", out, reference)
        assert_close("lse", lse, reference)


@pytest.mark.parametrize("tables", ["device", "host"])
@pytest.mark.parametrize("page", [16, 48])
def test_many_rows_of_16_bits_from_blocks(page, tables, device_by_name, many_rows, monkeypatch):
    case = decode(B=2, Hq=4, Tq=33, lengths=(300, 70), page=page, dtype="bfloat16", causal=True, d=64, dv=40)
    for parts in (False, True):
        if parts:
            share_out(monkeypatch)
        for name, result in zip(("out", "lse"), decode_on_device(case, tables == "device"), strict=True):
            assert_close(name, result, case.reference())
    assert set(many_rows) == {HALVES}


@pytest.mark.parametrize("dtype, Tq, longest", [("float32", 2, 40), ("float16", 2, 40), ("float16", 130, 280)])
def test_blocks_outside_the_cache_are_not_read(dtype, Tq, longest, device_by_name):
    """Where only the device knows the table: the keys of such a block are hidden, and lengths end with the table."""
    case = decode(B=3, Hq=4, Tq=Tq, lengths=(longest, 33, 17), page=8, dtype=dtype, d=24, dv=16)
    move, (*caches, blocks) = emulator.to_device, case.caches()
    mask = np.ones((3, 1, 1, longest), bool)
    outside = ((0, 1, -1), (0, 3, len(caches[0])), (1, 4, 2**31 - 1), (2, 0, -(2**31)), (2, 1, 10**6), (2, 2, -5))
    for b, n, entry in outside:
        blocks[b, n] = entry
        mask[b, :, :, 8 * n : 8 * n + 8] = False
    reference = case.reference(mask=mask)
    out, lse = rf.attention_decode(*map(move, (case.q, *caches, case.kv_lengths, blocks)), return_lse=True)
    assert_close("out", np.asarray(out), reference)
    assert_close("lse", np.asarray(lse), reference)
    assert not np.asarray(out)[2].any() and np.isneginf(np.asarray(lse)[2]).all()


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("width", [np.int32, np.int64])
@pytest.mark.parametrize("name", ENTRIES)
def test_appends_with_tables_on_the_device(name, width, paged, device_by_name):
    dtype = names[list(ENTRIES).index(name) % len(names)]
    check_entries(name, width, paged, dtype, lambda a: emulator.to_device(a.copy()), np.asarray)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", ["contiguous", "transposed", "sliced", "strided_last", "reversed"])
@pytest.mark.parametrize("d, dv", [(32, 16), (5, 24)])
def test_appends_of_any_strides(d, dv, view, dtype, device_by_name):
    """Rows of whole 16 bytes are moved so; any others by their elements. Tables of the host."""
    case = decode(d=d, dv=dv, dtype=dtype, lengths=(13, 9), Tq=0)
    *caches, blocks = case.caches(filled=[6, 2])
    caches, new = ([emulator.to_device(restride(x, view)) for x in both] for both in (caches, case.newest(7)))
    for _ in range(2):
        rf.append_kv(*caches, *new, [6, 2], blocks)
    assert len(problem._MEMO) == 1
    for cache, want in zip(caches, case.caches()[:2], strict=True):
        assert np.asarray(cache).tobytes() == want.tobytes()


@pytest.mark.parametrize("Tn", [0, 300])
@pytest.mark.parametrize("B", [0, 2])
def test_appends_of_nothing_and_of_much(B, Tn, device_by_name, monkeypatch):
    """More rows than the grid has warps, each of which then takes several."""
    monkeypatch.setattr(append_kv, "MOST_STRIDING", 3)
    case = decode(B=B, lengths=(350,) * B, page=50)
    *caches, blocks = case.caches(filled=[350 - Tn] * B)
    rf.append_kv(*map(emulator.to_device, (*caches, *case.newest(Tn))), [350 - Tn] * B, blocks)
    for cache, want in zip(caches, case.caches()[:2], strict=True):
        assert cache.tobytes() == want.tobytes()


@pytest.mark.parametrize("old, new", [
    ("kept < -t", "false"),
    ("kept >= capacity - t", "kept + t > capacity"),
    ("block < 0", "false"),
    ("block >= call.blocks", "block > call.blocks"),
    ("b * call.table_row + j / call.page", "b + j / call.page"),
    ("h, j % call.page);\n        elem* const V", "h, j);\n        elem* const V"),
    ("x < call.d + call.dv", "x < call.d + call.dv - 1"),
])  # fmt: skip
def test_broken_appends_are_caught(old, new, device_by_name, monkeypatch):
    whole = compile.source
    assert old in whole("append_kv.cu", "")
    monkeypatch.setattr(compile, "source", lambda name, preamble: whole(name, preamble).replace(old, new))
    with pytest.raises(AssertionError):
        for name in ("all fit", "just outside"):  # a kernel without checks stays in these arrays
            test_appends_with_tables_on_the_device(name, np.int32, True, None)


# ---- the tests can fail ---------------------------------------------------------------------------------------

AWAIT_V = "await_copies<0>();\n        __syncthreads();  // V_j and P"
BROKEN = {
    "O is not rescaled": ("O[r][c] *= alpha[r];", "O[r][c] *= real(1);"),
    "V is not awaited": (AWAIT_V, "__syncthreads();  // V_j and P"),
    "copies are left uncommitted": ("commit_copies();\n    }\n    while (tile.kind", "}\n    while (tile.kind"),
    "K_j is overwritten while it is read": (AWAIT_V, "await_copies<0>();  //"),
    "the band is one key wide of the mark": ("+ call.band_upper + 1", "+ call.band_upper + 2"),
    "the third part is left out": ("order = PARTS - 1", "order = PARTS - 2"),
    "two lanes are exchanged": ("{ return threadIdx.x % 4; }", "{ return threadIdx.x % 4 ^ 1; }"),
    "a thread stays away from a barrier": (
        "        __syncthreads();  // V_j and P", "        if (threadIdx.x != 5) __syncthreads();  // V_j and P"),
    "a tile is many rows too long": ("n < ROWS * CHUNKS", "n < (ROWS + 90) * CHUNKS"),
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_broken_kernels_are_caught(how, device_by_name, monkeypatch):
    old, new = BROKEN[how]
    whole = compile.source

    def broken(name, preamble):
        text = whole(name, preamble)
        if name == "fa2_forward.cu":
            assert old in text, "the kernel has changed: this test must follow"
            text = text.replace(old, new)
        return text

    case = make(B=1, Hq=1, Tq=140, Tk=150, d=24, causal=True)
    reference = case.reference()
    case = on_device(case)
    out, _ = case.forward()
    assert_close("out", np.asarray(out), reference)
    emulator.install(monkeypatch, backwards=True)
    monkeypatch.setattr(compile, "source", broken)
    with pytest.raises(AssertionError):
        out, _ = case.forward()
        assert_close("out", np.asarray(out), reference)
