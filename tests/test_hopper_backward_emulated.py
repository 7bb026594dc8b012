"""The backward kernels of sm_90 against the oracle, on the CPU (-m emulated): copies, barriers, warpgroups and all."""

import re
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace

import emulator
import numpy as np
import pytest
from strategies import restride
from test_cupy_raw_emulated import on_device
from test_forward import make, normal
from tolerances import assert_close

import rawflash as rf
from rawflash import sections, sm90, tiling
from rawflash.backends.cupy_raw import compile, fa2_backward, launch
from rawflash.hardware import chip, kernels_on
from rawflash.problem import Problem
from rawflash.tiles import Divided, Tiles

pytestmark = pytest.mark.emulated
FILE = "sm90/fa2_backward.cu"

# d and dv lie in 64 or 128 columns on chip, rows come 128 or 64 at a time, keys 128; a warpgroup has 64 of them.
CALLS = {
    "one row, one key": dict(Tq=1, Tk=1, d=64),
    "one tile": dict(Tq=64, Tk=128, d=128),
    "one tile, d = 64": dict(Tq=128, Tk=128, d=64),
    "one more": dict(Tq=65, Tk=129, d=128),
    "one more, d = 64": dict(Tq=129, Tk=129, d=64),
    "one less": dict(Tq=127, Tk=127, d=128),
    "many steps, keys for one warpgroup": dict(B=1, Tq=330, Tk=64, d=64),
    "many steps, d = 64": dict(B=1, Hq=1, Tq=900, Tk=40, d=64),
    "many steps": dict(B=1, Hq=1, Tq=450, Tk=40, d=128),
    "few columns": dict(Tq=70, Tk=90, d=8, dv=24),
    "columns of two slabs": dict(Tq=70, Tk=90, d=72, dv=120),
    "d < dv": dict(Tq=100, Tk=140, d=64, dv=128, causal=True),
    "d > dv": dict(Tq=100, Tk=140, d=128, dv=40, causal=True),
    "causal": dict(Tq=150, Tk=300, d=64, causal=True),
    "causal, d = 128": dict(Tq=300, Tk=150, d=128, causal=True),
    "causal, heads in turn": dict(B=2, Hq=3, Hkv=1, Tq=140, Tk=260, d=64, causal=True),
    "rows without keys": dict(Tq=200, Tk=10, d=128, causal=True),
    "rows without keys, sinks": dict(Tq=200, Tk=10, d=64, causal=True, sinks=normal(2)),
    "nothing visible": dict(Tq=90, d=64, causal=True, q_offset=-1000),
    "everything visible": dict(Tq=90, d=64, causal=True, q_offset=1000),
    "offsets": dict(B=3, Tq=100, Tk=140, d=64, causal=True, q_offset=np.array([-70, 3, 90])),
    "window": dict(B=1, Tq=300, d=64, window=(70, 20)),
    "window, d = 128": dict(B=1, Tq=300, d=128, window=(20, None)),
    "window of one key": dict(B=1, Tq=200, d=128, window=(0, 0)),
    "groups": dict(B=2, Hq=6, Hkv=2, Tq=90, Tk=150, d=128),
    "one key head": dict(B=1, Hq=5, Hkv=1, Tq=70, d=64, causal=True),
    "one key head, no mask": dict(B=1, Hq=3, Hkv=1, Tq=200, Tk=70, d=64),
    "one key head, d = 64": dict(B=1, Hq=3, Hkv=1, Tq=300, d=64, causal=True),
    "lengths": dict(B=3, Tq=150, Tk=200, d=64, q_lengths=[150, 20, 0], kv_lengths=[130, 200, 64]),
    "lengths, d = 128": dict(B=3, Tq=150, Tk=200, d=128, q_lengths=[70, 150, 128], kv_lengths=[0, 1, 199]),
    "lengths, causal": dict(
        B=3, Tq=150, Tk=200, d=96, q_lengths=[100, 20, 149], kv_lengths=[130, 200, 90], causal=True),
    "sinks": dict(B=2, Tq=70, d=64, sinks=lambda rng, dtype: np.array([-np.inf, 0.5], np.float32)),
    "a huge sink": dict(Tq=70, d=64, sinks=lambda rng, dtype: np.array([90.0, -90.0], dtype)),
    "scale": dict(Tq=70, d=64, scale=1.5),
    "scores of thousands": dict(Tq=100, Tk=140, d=128, size=500.0, causal=True),
    "six axes": dict(lead=(2, 1, 2), Tq=50, d=64),
    "softcap": dict(Tq=150, Tk=140, d=64, softcap=2.0),
    "softcap, d = 128": dict(B=1, Tq=150, Tk=300, d=128, softcap=1.5, causal=True),
    "softcap, d < dv": dict(B=1, Tq=130, Tk=70, d=40, dv=128, softcap=2.0, window=(60, 30)),
    "alibi": dict(B=1, Hq=4, Hkv=2, Tq=300, Tk=280, d=64, alibi_slopes=np.array([0.5, 0.1, 0.02, -0.01])),
    "alibi, d = 128": dict(
        B=2, Hq=2, Tq=150, Tk=200, d=128, causal=True, alibi_slopes=np.array([[0.5, 0.01], [0.0, 1.0]])),
    "softcap, alibi": dict(
        B=3, Hq=2, Hkv=1, Tq=150, Tk=200, d=128, softcap=3.0, alibi_slopes=np.array([0.3, 0.05]), window=(90, 70),
        q_lengths=[150, 20, 0], kv_lengths=[130, 200, 64]),
    "softcap, alibi, offsets, d = 64": dict(
        B=2, Hq=2, Tq=140, Tk=150, d=64, softcap=3.0, alibi_slopes=np.array([0.3, 0.05]), causal=True,
        q_offset=np.array([-40, 70])),
    # exp2 of what a key that does not exist would have as a score is infinite
    "alibi, later keys first": dict(B=1, Hq=2, Tq=100, Tk=201, d=64, alibi_slopes=np.array([-3.3, -0.1])),
    "alibi, later keys first, d = 128": dict(B=1, Hq=2, Tq=100, Tk=201, d=128, alibi_slopes=np.array([-3.3, -0.1])),
    "alibi, later keys first, lengths": dict(
        B=1, Hq=2, Tq=100, Tk=300, d=64, kv_lengths=[201], alibi_slopes=np.array([-3.3, -0.1])),
}  # fmt: skip
PACKED = {
    "packed": dict(Tq=200, Tk=300, d=64, cu=([3, 80, 80, 199], [0, 130, 150, 290]), causal=True),
    "packed, d = 128": dict(Tq=200, Tk=300, d=128, cu=([0, 64, 100, 200], [10, 138, 140, 300])),
    "packed, keys that no row sees": dict(
        Tq=150, Tk=250, d=128, cu=([0, 100, 150], [0, 128, 250]), window=(10, 10), q_offset=np.array([20, 20])),
    "packed, window, sinks": dict(
        Hq=4, Hkv=2, Tq=210, Tk=190, d=64, cu=([0, 1, 130, 210], [0, 60, 188, 188]), window=(50, 9), sinks=normal(4)),
    "packed, offsets": dict(
        Tq=90, Tk=120, d=40, cu=([0, 50, 90], [0, 60, 110]), causal=True, q_offset=np.array([5, -9])),
    "packed, behind padding": dict(
        Hq=2, Hkv=1, Tq=420, Tk=560, d=128, cu=([130, 150, 200, 330, 330, 400], [260, 300, 300, 420, 540, 541])),
    "packed, behind padding, causal": dict(
        Tq=420, Tk=430, d=64, cu=([260, 262, 390, 390, 415], [140, 270, 271, 400, 420]), causal=True),
    "packed, softcap, alibi": dict(
        Hq=4, Hkv=2, Tq=210, Tk=190, d=128, cu=([0, 1, 130, 210], [0, 60, 188, 188]), causal=True, softcap=3.0,
        alibi_slopes=np.array([0.3, 0.05, 0.0, 1.0])),
}  # fmt: skip
DTYPES = ("bfloat16", "float16")


def prepared(options, dtype):
    """The case, with NaN wherever nothing may be read."""
    options = dict(options)
    cu, size = options.pop("cu", None), options.pop("size_of_dout", 1)
    case = make(dtype=dtype, lead=() if cu else options.pop("lead", None), **options)
    case.cu_seqlens = cu
    case.dout *= case.dout.dtype.type(size)
    lengths = [case.options.get(name) for name in ("q_lengths", "kv_lengths")]
    for names, n in ((("q", "dout", "dlse"), 0), (("k", "v"), 1)):
        for name in names:
            array = getattr(case, name)
            rows = array if name == "dlse" else array.swapaxes(-1, -2)
            if cu:
                rows[..., : cu[n][0]] = rows[..., cu[n][-1] :] = np.nan
            elif lengths[n]:
                for b, length in enumerate(lengths[n]):
                    rows[b, ..., length:] = np.nan
    return case


@pytest.fixture(autouse=True)
def undivided(monkeypatch):
    """Calls here have few blocks of keys, and are to have what many have, but for those that say otherwise."""
    monkeypatch.setattr(sm90, "_divided_by_heads", lambda *_: Divided())
    monkeypatch.setattr(sm90, "WGMMA_TOGETHER", {0: 1 << 30, 1: 1 << 30})
    monkeypatch.setattr(sm90, "WGMMA_SUMS", {256: (0.0, 0.0)})
    monkeypatch.setattr(sm90, "WGMMA_DOWN_ROWS", 512)
    monkeypatch.setattr(sm90, "_order_gains", lambda *_: False)


@pytest.fixture(params=[False, True], ids=["forwards", "backwards"])
def device(request, monkeypatch):
    emulator.install(monkeypatch, backwards=request.param)


@pytest.fixture
def device_by_name(request, monkeypatch):
    emulator.install(monkeypatch, backwards=len(request.node.name) % 2 == 1)


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """How often the kernels of sm_90 were launched."""
    calls = []
    run = launch.Launcher.run

    def counted(self, kernel, *arguments, **more):
        if kernel == "fa2_backward_keys" and arguments[3:]:  # others have as many threads as any kernel
            calls.append(kernel)
        return run(self, kernel, *arguments, **more)

    monkeypatch.setattr(launch.Launcher, "run", counted)
    return calls


def check(case, reference, small_on_device=False):
    moved = on_device(case, small_on_device)
    gradients = moved.backward(*moved.forward())
    for name, gradient in zip(case.wrt, gradients, strict=True):
        assert type(gradient) is emulator.ndarray
        assert_close("d" + name, np.asarray(gradient), reference)


@pytest.mark.parametrize("name", [*CALLS, *PACKED])
def test_calls(name, device_by_name, taken):
    """Either dtype, tables on the host or on the device, in turn."""
    n = [*CALLS, *PACKED].index(name)
    case = prepared((CALLS | PACKED)[name], DTYPES[n % 2])
    check(case, case.reference(), small_on_device=n % 4 < 2)
    assert taken == ["fa2_backward_keys"]


@pytest.fixture(autouse=True)
def many_heads(monkeypatch):
    """Calls are planned as if they had many heads."""
    monkeypatch.setattr(sm90, "WGMMA_STORED_HEADS", 0.0)


@pytest.fixture
def cleared(monkeypatch):
    """Short causal calls are as long ones: sums of dQ are cleared, and all blocks of keys add to them."""
    monkeypatch.setattr(sm90, "WGMMA_STORED", {64: 0, 128: 0})


STORED = {
    "causal": dict(B=1, Hq=2, Tq=300, Tk=300, d=64, causal=True),
    "causal, d = 128": dict(B=2, Hq=1, Tq=300, Tk=300, d=128, causal=True),
    "one block of keys": dict(B=1, Hq=3, Tq=100, Tk=100, d=64, causal=True),
    "one row": dict(B=2, Hq=2, Tq=1, Tk=400, d=128, causal=True),
    "as long as can be": dict(B=1, Hq=1, Tq=512, Tk=512, d=128, causal=True),
    "whole blocks": dict(B=1, Hq=1, Tq=512, Tk=512, d=64, causal=True),
    "groups": dict(B=1, Hq=4, Hkv=2, Tq=200, Tk=260, d=64, causal=True),
    "groups, d = 128": dict(B=1, Hq=3, Hkv=1, Tq=130, Tk=257, d=128, causal=True),
    "more rows than keys": dict(B=1, Hq=2, Tq=500, Tk=140, d=64, causal=True),
    "more rows than keys, d = 128": dict(B=1, Hq=2, Tq=500, Tk=140, d=128, causal=True),
    "keys that no row sees": dict(B=1, Hq=2, Tq=128, Tk=500, d=64, causal=True, q_offset=100),
    "keys that no row sees, d = 128": dict(B=1, Hq=2, Tq=64, Tk=500, d=128, causal=True, q_offset=100),
    "keys that no row sees, part of a block": dict(B=1, Hq=2, Tq=100, Tk=500, d=128, causal=True, q_offset=100),
    "rows that see no key": dict(B=1, Hq=2, Tq=300, Tk=300, d=64, causal=True, q_offset=-170),
    "nothing is seen": dict(B=1, Hq=2, Tq=100, Tk=300, d=128, causal=True, q_offset=-400),
    "another offset each": dict(
        B=4, Hq=1, Tq=150, Tk=300, d=128, causal=True, q_offset=np.array([-400, -60, 150, 1000])),
    "right of the window": dict(B=1, Hq=2, Tq=300, Tk=300, d=64, window=(None, 70)),
    "sinks": dict(B=1, Hq=2, Tq=200, Tk=200, d=64, causal=True, sinks=normal(2)),
}  # fmt: skip


@pytest.fixture
def zeros(monkeypatch):
    """The constants of each plan, and how many bytes its launcher clears."""
    found = []
    whole, fill = fa2_backward._wgmma, emulator.Memory.memset_async

    def noted(problem, tiles, x, grads):
        def filling(memory, value, nbytes):
            found.append((dict(tiles.constants), nbytes))
            fill(memory, value, nbytes)

        with monkeypatch.context() as patch:
            patch.setattr(emulator.Memory, "memset_async", filling)
            whole(problem, tiles, x, grads)

    monkeypatch.setattr(fa2_backward, "_wgmma", noted)
    return found


@pytest.mark.parametrize("others", [False, True], ids=["", "rows of others"])
@pytest.mark.parametrize("name", STORED)
def test_the_first_dQ_is_stored(name, others, device_by_name, taken, zeros, request):
    """Nothing is cleared but counters, where some block of keys comes to all rows."""
    if others:
        request.getfixturevalue("fused")
    case = prepared(STORED[name], DTYPES[list(STORED).index(name) % 2])
    check(case, case.reference())
    assert taken == ["fa2_backward_keys"]
    ((constants, nbytes),) = zeros
    assert constants["STORES"] == 1 and constants["FUSED"] == (others and name != "sinks")
    misses_rows = "q_offset" in case.options or case.q.shape[2] > case.k.shape[2]
    assert (nbytes == 256) != misses_rows


@pytest.mark.parametrize("others", [False, True], ids=["", "rows of others"])
@pytest.mark.parametrize("name", ["causal", "causal, d = 128", "groups, d = 128", "rows that see no key"])
def test_short_calls_whose_sums_are_cleared(name, others, device_by_name, cleared, taken, zeros, request):
    if others:
        request.getfixturevalue("fused")
    case = prepared(STORED[name], "bfloat16")
    check(case, case.reference())
    assert taken and zeros[0][0]["STORES"] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["causal", "lengths, d = 128", "packed"])
def test_orders_of_threads(name, dtype, device, taken):
    case = prepared((CALLS | PACKED)[name], dtype)
    check(case, case.reference())
    assert taken


@pytest.mark.parametrize("name", [
    "one tile, d = 64", "many steps", "d < dv", "causal", "causal, d = 128", "causal, heads in turn", "offsets",
    "window", "window, d = 128", "window of one key", "groups", "lengths", "lengths, causal", "nothing visible",
    "packed", "packed, window, sinks", "packed, offsets",
    "softcap", "softcap, d < dv", "softcap, d = 128", "softcap, alibi", "softcap, alibi, offsets, d = 64",
    "alibi", "alibi, d = 128", "packed, softcap, alibi",
])  # fmt: skip
def test_deterministic(name, monkeypatch, taken, zeros):
    """Blocks of threads add to dQ in turn, those with the first keys first: a wrong turn would be waited for. The first
    one stores, so that nothing is cleared but counters, where some block of keys comes to all rows."""
    emulator.install(monkeypatch, backwards=False)
    options = (CALLS | PACKED)[name] | {"deterministic": True}
    case = prepared(options, DTYPES[len(name) % 2])
    check(case, case.reference())
    assert taken == ["fa2_backward_keys"]
    least = 4 * 64 * 64  # bytes of the sums of a block of rows
    may_miss_rows = (
        "packed" in name or case.options.keys() & {"q_offset", "q_lengths"}
        or case.q.shape[2] > case.k.shape[2] and case.options.keys() & {"causal", "window"}
    )
    assert (zeros[0][1] >= least) == bool(may_miss_rows)


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_dtypes_of_slopes(kind, broken, device_by_name, taken, monkeypatch):
    """On the device they stay what they are, or have 32 bits."""
    case = prepared(dict(B=1, Hq=2, Tq=70, d=64, alibi_slopes=np.array([0.5, 0.1], kind)), "bfloat16")
    if broken:
        other = "FLOAT32" if kind is np.float64 else "FLOAT64"
        old = "widen<SLOPE_TYPE>(((const Storage<SLOPE_TYPE>"
        break_backward(monkeypatch, old, old.replace("SLOPE_TYPE", other))
    with pytest.raises(AssertionError) if broken else nullcontext():
        check(case, case.reference(), small_on_device=True)
    assert taken


@pytest.mark.parametrize("view", ["transposed", "sliced", "broadcast", "fortran"])
def test_strides(view, device_by_name, taken):
    check_strides(view, taken)


def check_strides(view, taken, d=64):
    """Those that maps can describe go by maps; the others go another way, or are copied."""
    case = make(B=2, Hq=2, Tq=100, Tk=70, d=d, dtype="bfloat16", causal=True)
    for name in ("q", "k", "v", "dout"):
        setattr(case, name, restride(getattr(case, name), view))
    check(case, case.reference())
    assert bool(taken) == (view in ("transposed", "fortran"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout(dtype, device_by_name, taken):
    case = make(B=2, Hq=4, Hkv=2, Tq=100, Tk=150, d=64, dv=128, dtype=dtype, layout="bthd", causal=True)
    for name in ("q", "k", "v", "dout"):
        setattr(case, name, np.ascontiguousarray(getattr(case, name).swapaxes(1, 2)))
    check(case, case.reference())
    assert taken


SCORES = {"": {}, "softcap": dict(softcap=3.0), "alibi": dict(alibi_slopes=np.array([0.1]))}


@pytest.mark.parametrize("scores", SCORES)
def test_a_row_that_sees_a_nan_is_nan(scores, device_by_name, taken):
    check_rows_that_see_a_nan(taken, **SCORES[scores])


@pytest.mark.parametrize("scores", ["softcap", "alibi"])
def test_rows_that_see_a_nan_and_are_numbers_are_caught(scores, device_by_name, monkeypatch):
    break_backward(monkeypatch, "least_or_nan(score.twos", "fminf(score.twos")
    with pytest.raises(AssertionError):
        check_rows_that_see_a_nan([1], **SCORES[scores])


def check_rows_that_see_a_nan(taken, d=64, dtype="bfloat16", **more):
    """Of causal rows, with a NaN in a key that the last of them see; others may be, if they share a tile with it."""
    case = on_device(make(B=1, Hq=1, Tq=150, d=d, dtype=dtype, causal=True, **more))
    case.dlse = None
    clean = [np.asarray(g).astype(np.float64) for g in case.backward(*case.forward())]
    case.k[..., 140, 5] = np.nan
    dq, dk, dv = (np.asarray(g).astype(np.float64) for g in case.backward(*case.forward()))
    assert np.isnan(dq[..., 140:, :]).all()
    np.testing.assert_allclose(dq[..., :128, :], clean[0][..., :128, :], rtol=1e-2, atol=1e-3)
    assert np.isnan(dk[..., :141, :]).all() and np.isnan(dv[..., :141, :]).all()
    assert taken


def overflowing(d=64, T=150):
    """A key whose dP overflows in all rows that do not see it; those that do have dO = 0."""
    case = make(B=1, Hq=2, Tq=T, d=d, dtype="bfloat16", causal=True)
    case.v[..., 139, :] = 3e38
    case.dout[..., :139, :] *= np.asarray(10, case.dout.dtype)
    case.dout[..., 139:, :] = 0
    case.dlse = None
    return case


def test_what_overflows_is_hidden_where_it_is_not_seen(device_by_name, taken):
    check_what_overflows(taken)


def check_what_overflows(taken, d=64, T=150):
    moved = on_device(overflowing(d, T))
    for gradient in moved.backward(*moved.forward()):
        assert np.isfinite(np.asarray(gradient).astype(np.float64)).all()
    assert taken


def one_large_key(d, dtype, **more):
    """out is v, so that dQ and dK are 0; but delta, 2^16 d, is outside of float16, and exp(-lse) of float32."""
    case = make(**dict(Tq=3, Tk=1) | more, d=d, dtype=dtype)
    case.q[:], case.k[:], case.v[:], case.dout[:], case.dlse[:] = 128, -1, 256, 256, 0
    return case


LARGE_KEYS = {
    "": {}, "softcap": dict(Tq=128, Tk=200, softcap=3.0),
    "alibi": dict(Tq=128, Tk=200, alibi_slopes=np.array([-2.0, -1.0])),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", LARGE_KEYS)
def test_keys_that_do_not_exist_have_no_share(name, d, dtype, device_by_name, taken):
    check_a_large_key(d, dtype, **LARGE_KEYS[name])
    assert taken


def check_a_large_key(d, dtype, **more):
    moved = on_device(one_large_key(d, dtype, **more))
    dq, dk = (np.asarray(gradient).astype(np.float64) for gradient in moved.backward(*moved.forward())[:2])
    assert not dq.any() and not dk.any()


@pytest.mark.parametrize("name, dtype, old, new", [
    ("", "float16", "y < left ? 0.0f : -INFINITE", "0.0f"),
    ("", "bfloat16", "-fabsf(power)", "power"),
    ("softcap", "float16", "HAS_BOUNDS ? most[e / 2 % 2] : 0.0f", "0.0f"),
    ("alibi", "float16", "HAS_BOUNDS ? most[e / 2 % 2] : 0.0f", "0.0f"),
])  # fmt: skip
@pytest.mark.parametrize("d", [64, 128])
def test_keys_that_do_not_exist_are_missed(d, name, dtype, old, new, device_by_name, monkeypatch):
    break_backward(monkeypatch, old, new)
    with pytest.raises(AssertionError):
        check_a_large_key(d, dtype, **LARGE_KEYS[name])


def check_small_scores(d, causal):
    """Scores are 0, so that exp(-lse) is 1 for a key that does not exist; it is seen by all rows, if by any."""
    case = one_large_key(d, "float16", **(dict(causal=True, q_offset=1000) if causal else {}))
    case.q[:] = 0
    moved = on_device(case)
    dq = np.asarray(moved.backward(*moved.forward())[0]).astype(np.float64)
    assert not dq.any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_keys_that_do_not_exist_are_hidden(d, causal, device_by_name, taken):
    check_small_scores(d, causal)
    assert taken


@pytest.mark.parametrize("causal, old, new", [
    (False, "y < left ? 0.0f : -INFINITE", "0.0f"), (True, "y < left && low < q_length", "low < q_length"),
])  # fmt: skip
@pytest.mark.parametrize("d", [64, 128])
def test_keys_that_do_not_exist_and_are_seen_are_caught(d, causal, old, new, device_by_name, monkeypatch):
    break_backward(monkeypatch, old, new)
    with pytest.raises(AssertionError):
        check_small_scores(d, causal)


def check_a_key_that_no_row_sees(d, value, key=300, **more):
    """What lies there is nobody's, though rows that do not exist would see some."""
    case = make(**dict(B=1, Hq=2, Tq=150, Tk=400, d=d, dtype="bfloat16", causal=True, q_offset=0) | more)
    case.v[..., key, :] = value
    moved = on_device(case)
    dq, dk, dv = (np.asarray(x).astype(np.float64) for x in moved.backward(*moved.forward())[:3])
    assert np.isfinite(dq).all() and np.isfinite(dk).all() and np.isfinite(dv).all()
    assert not dk[..., key, :].any() and not dv[..., key, :].any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("d", [64, 128])
def test_a_key_that_no_row_sees(d, value, device_by_name, taken):
    check_a_key_that_no_row_sees(d, value)
    assert taken


@pytest.mark.parametrize("d", [64, 128])
def test_a_key_that_no_row_sees_and_has_a_gradient_is_caught(d, device_by_name, monkeypatch):
    break_backward(monkeypatch, "y < left && low < q_length", "y < left")
    with pytest.raises(AssertionError):
        check_a_key_that_no_row_sees(d, np.nan)


def test_two_calls_do_not_add_up(device_by_name):
    check_two_calls()


def check_two_calls(d=64):
    """The sums of dQ begin at 0 each time."""
    case = make(B=1, Hq=1, Tq=70, d=d, dtype="float16")
    reference, moved = case.reference(), on_device(case)
    out, lse = moved.forward()
    for _ in range(2):
        for name, gradient in zip(case.wrt, moved.backward(out, lse), strict=True):
            assert_close("d" + name, np.asarray(gradient), reference)


def test_sections_of_heads(monkeypatch, device_by_name, taken):
    check_sections(monkeypatch, taken, Tk=300, d=64, nbytes=1 << 19)


def check_sections(monkeypatch, taken, Tk, d, nbytes):
    """More heads than L2 can hold: the last section has fewer of them."""
    case = make(B=3, Hq=2, Tq=40, Tk=Tk, d=d, dtype="bfloat16", causal=True)
    for name in ("SECTION_BYTES", "SECTION_STORED"):
        monkeypatch.setattr(sections, name, nbytes)
    for module in (fa2_backward, sections):  # a section has a block of threads for each
        monkeypatch.setattr(module, "WGMMA_PROCESSORS", 1)
    found, section = [], sections._section
    monkeypatch.setattr(sections, "_section", lambda *of: found.append(section(*of)) or found[-1])
    check(case, case.reference())
    assert taken and 1 < found[0] < 6 and 6 % found[0]


@pytest.mark.parametrize("options", [
    dict(dropout=0.1), dict(sram=1 << 17),
    dict(mask=rf.masks.PrefixLM(5)), dict(bias=np.zeros((20, 20), np.float32)), dict(scale=-0.5), dict(algorithm="fa1"),
    dict(d=20),
], ids=lambda options: next(iter(options)))  # fmt: skip
def test_other_calls_go_another_way(options, device_by_name, taken):
    case = make(B=1, Tq=20, dtype="bfloat16", **{"d": 64} | options)
    case.wrt = ("q", "k", "v")
    check(case, case.reference())
    assert not taken


# ---- rows that blocks of threads of other rows prepare and finish ----------------------------------------------

FUSED = {
    "plain": dict(B=1, Hq=5, Tq=330, Tk=330, d=64),
    "plain, d = 128": dict(B=2, Hq=2, Tq=200, Tk=300, d=128),
    "causal": dict(B=1, Hq=7, Tq=400, Tk=400, d=64, causal=True),
    "causal, d = 128": dict(B=5, Hq=1, Tq=260, Tk=260, d=128, causal=True),
    "groups": dict(B=2, Hq=6, Hkv=2, Tq=200, Tk=260, d=64),
    "groups, d = 128": dict(B=4, Hq=2, Hkv=1, Tq=130, Tk=140, d=128, causal=True),
    "window": dict(B=1, Hq=5, Tq=300, Tk=300, d=128, window=(50, 10)),
    "offsets": dict(B=4, Hq=1, Tq=200, Tk=260, d=64, causal=True, q_offset=np.array([-90, 0, 60, 300])),
    "more rows than keys": dict(B=1, Hq=5, Tq=600, Tk=100, d=128),
    "rows without keys": dict(B=1, Hq=5, Tq=300, Tk=70, d=64, causal=True),
    "other columns": dict(B=1, Hq=5, Tq=200, Tk=200, d=72, dv=40),
    "no row sees a key": dict(B=1, Hq=5, Tq=256, Tk=256, d=64, causal=True, q_offset=-5000),
    "no row sees a key, d = 128": dict(B=1, Hq=5, Tq=256, Tk=256, d=128, causal=True, q_offset=-5000),
    "few columns": dict(B=1, Hq=5, Tq=200, Tk=200, d=32, dv=8, causal=True),
    "d > dv": dict(B=1, Hq=5, Tq=140, Tk=200, d=128, dv=64),
}


@pytest.fixture
def fused(monkeypatch):
    """Small problems, too; rows of a head are prepared by blocks of threads of the second head before it."""
    monkeypatch.setattr(sm90, "WGMMA_FUSED", defaultdict(lambda: (0, 0)))
    monkeypatch.setattr(sm90, "WGMMA_FUSED_GAIN", (np.inf,) * 3)
    monkeypatch.setattr(sm90, "WGMMA_FUSED_KEYS", 1)
    monkeypatch.setattr(sm90, "WGMMA_FUSED_LAG", 0.0)
    monkeypatch.setattr(sm90, "WGMMA_FUSED_ROWS", {64: 0, 128: 0})
    monkeypatch.setattr(sm90, "WGMMA_FUSED_IN_ORDER", {64: 0, 128: 0})
    monkeypatch.setattr(sm90, "WGMMA_FUSED_STORED", {64: 0, 128: 0})
    monkeypatch.setattr(sm90, "WGMMA_DOWN_WAVES", 0.0)
    monkeypatch.setattr(sections, "_section_in_order", lambda *_: 0)  # else one section, and nobody is before others


@pytest.fixture
def heads(monkeypatch):
    """Query heads whose rows kernels of their own prepare, and finish, of each call."""
    found = {"row_deltas": [], "fa2_backward_finish": []}
    run = launch.Launcher.run

    def counted(self, kernel, blocks, *arguments, **more):
        if kernel in found:
            rows = launch.DELTA_ROWS if kernel == "row_deltas" else 64 if self.problem.d > 64 else 128
            each = fa2_backward.QUARTERS if kernel == "fa2_backward_finish" else 1
            found[kernel].append(blocks / each / launch.blocks_of(self.problem.Tq, rows))
        return run(self, kernel, blocks, *arguments, **more)

    monkeypatch.setattr(launch.Launcher, "run", counted)
    return found


@pytest.mark.parametrize("name", FUSED)
def test_rows_prepared_and_finished_by_others(name, device_by_name, fused, heads, taken):
    case = prepared(FUSED[name], DTYPES[list(FUSED).index(name) % 2])
    check(case, case.reference())
    group = case.q.shape[1] // case.k.shape[1]
    assert taken and all(found == [2 * group] for found in heads.values())


@pytest.mark.parametrize("name", ["causal", "groups, d = 128"])
def test_orders_of_threads_where_others_prepare_and_finish(name, device, fused, taken):
    case = prepared(FUSED[name], "bfloat16")
    check(case, case.reference())
    assert taken


@pytest.fixture
def divided(monkeypatch, fused):
    """The last five blocks of keys have more than one block of threads each, the first two of these two."""
    run, launched = launch.Launcher.run, []
    monkeypatch.setattr(sm90, "WGMMA_FUSED_LAG", 5.5 / sm90.WGMMA_PROCESSORS)
    monkeypatch.setattr(sm90, "_divided", lambda *_: Divided(2, 3, 3))

    def noted(self, kernel, blocks, *arguments, **more):
        if kernel == "fa2_backward_keys":
            problem = self.problem
            launched.append(blocks - problem.B * problem.Hkv * launch.blocks_of(problem.Tk, 128))
        return run(self, kernel, blocks, *arguments, **more)

    monkeypatch.setattr(launch.Launcher, "run", noted)
    return launched


ALL_DIVIDED = {
    "plain": dict(B=1, Hq=2, Tq=700, Tk=300, d=64),
    "groups": dict(B=1, Hq=3, Hkv=1, Tq=640, Tk=260, d=64),
    "plain, d = 128": dict(B=2, Hq=1, Tq=330, Tk=260, d=128),
    "groups, d = 128": dict(B=1, Hq=4, Hkv=2, Tq=350, Tk=200, d=128),
}


@pytest.mark.parametrize("name", [
    "plain", "plain, d = 128", "groups", "more rows than keys", "other columns", "d > dv"])  # fmt: skip
def test_divided_blocks_of_keys(name, device_by_name, divided, taken):
    case = prepared(FUSED[name], DTYPES[list(FUSED).index(name) % 2])
    check(case, case.reference())
    assert taken and divided == [8]


def test_counters_of_divided_blocks_of_keys_are_not_in_sums(device_by_name, divided, taken):
    """Those of heads fill what counters are rounded up to."""
    heads = fa2_backward.COUNTERS // 2
    case = prepared(dict(B=1, Hq=heads, Hkv=heads, Tq=300, Tk=70, d=64), "bfloat16")
    check(case, case.reference())
    assert taken and divided == [8]


@pytest.mark.parametrize("name", ["plain", "groups", "plain, d = 128", "groups, d = 128"])
@pytest.mark.parametrize("parts", [3, 5])
def test_all_blocks_of_keys_are_divided_by_rows(parts, name, device_by_name, divided, taken, monkeypatch):
    """As they are where they are few."""
    monkeypatch.setattr(sm90, "WGMMA_FUSED_LAG", 1.0)
    monkeypatch.setattr(sm90, "_divided", lambda blocks, *_: Divided(0, blocks, parts))
    case = prepared(ALL_DIVIDED[name], "bfloat16")
    check(case, case.reference())
    blocks = case.q.shape[0] * case.k.shape[1] * launch.blocks_of(case.k.shape[2], 128)
    assert taken and divided == [blocks * (parts - 1)]


@pytest.mark.parametrize("name", ["plain", "groups"])
def test_orders_of_threads_where_blocks_of_keys_are_divided(name, device, divided, taken):
    case = prepared(FUSED[name], "bfloat16")
    check(case, case.reference())
    assert taken


@pytest.fixture
def by_heads(monkeypatch):
    """All blocks of keys have three or four blocks of threads each, of which four run at once."""
    def some(problem, processors, br, bc):
        parts = 4 if problem.group == 2 else 3
        return Divided(0, problem.B * problem.Hkv * launch.blocks_of(problem.Tk, bc), parts)

    monkeypatch.setattr(sm90, "_divided_by_heads", some)
    for module in (fa2_backward, sections):
        monkeypatch.setattr(module, "WGMMA_PROCESSORS", 4)


BY_HEADS = {
    "plain": dict(B=2, Hq=2, Tq=400, Tk=200, d=64),
    "plain, d = 128": dict(B=1, Hq=2, Tq=330, Tk=200, d=128),
    "groups": dict(B=2, Hq=5, Hkv=1, Tq=200, Tk=150, d=64),
    "groups, d = 128": dict(B=1, Hq=8, Hkv=2, Tq=190, Tk=150, d=128),
    "groups, and rows": dict(B=1, Hq=4, Hkv=2, Tq=400, Tk=200, d=128),
    "causal": dict(B=1, Hq=4, Hkv=1, Tq=300, Tk=300, d=64, causal=True),
    "causal, d = 128": dict(B=1, Hq=4, Hkv=1, Tq=300, Tk=300, d=128, causal=True),
    "window": dict(B=1, Hq=4, Hkv=2, Tq=300, d=64, window=(70, 20)),
    "fewer rows than parts": dict(B=1, Hq=1, Tq=100, Tk=300, d=128, causal=True),
    "fewer rows than parts, d = 64": dict(B=1, Hq=2, Hkv=1, Tq=100, Tk=300, d=64, causal=True),
    "nothing visible": dict(B=1, Hq=2, Hkv=1, Tq=90, d=64, causal=True, q_offset=-1000),
    "lengths": dict(B=3, Hq=2, Hkv=1, Tq=150, Tk=200, d=64, q_lengths=[150, 20, 0], kv_lengths=[130, 200, 64]),
    "packed": dict(Hq=4, Hkv=2, Tq=300, Tk=350, d=128, cu=([3, 120, 120, 290], [2, 150, 170, 330]), causal=True),
    "d < dv": dict(B=1, Hq=3, Hkv=1, Tq=150, Tk=140, d=64, dv=128, causal=True),
    "causal, alibi": dict(
        B=1, Hq=4, Hkv=1, Tq=300, Tk=300, d=64, causal=True, alibi_slopes=np.array([0.5, 0.1, 0.02, -0.01])),
    "groups, softcap, alibi": dict(
        B=1, Hq=8, Hkv=2, Tq=190, Tk=150, d=128, softcap=3.0, alibi_slopes=np.geomspace(0.5, 0.004, 8)),
    "as many as counters": dict(B=1, Hq=fa2_backward.COUNTERS // 2, Tq=40, Tk=200, d=64),
    "deterministic": dict(B=1, Hq=4, Hkv=1, Tq=300, Tk=300, d=64, causal=True, deterministic=True),
    "deterministic, d = 128": dict(B=1, Hq=3, Hkv=1, Tq=200, Tk=300, d=128, deterministic=True),
    "deterministic, groups": dict(B=2, Hq=5, Hkv=1, Tq=300, Tk=280, d=64, deterministic=True),
    "deterministic, groups, d < dv": dict(B=1, Hq=8, Hkv=2, Tq=190, Tk=300, d=64, dv=128, deterministic=True),
    "deterministic, rows": dict(B=2, Hq=1, Tq=400, Tk=300, d=128, window=(150, 0), deterministic=True),
    "deterministic, packed": dict(
        Hq=4, Hkv=2, Tq=300, Tk=350, d=128, cu=([3, 120, 120, 290], [2, 150, 170, 330]), causal=True,
        deterministic=True),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BY_HEADS)
def test_blocks_of_keys_that_are_divided_by_heads(name, dtype, device, by_heads, taken, zeros):
    case = prepared(BY_HEADS[name], dtype)
    check(case, case.reference())
    assert taken == ["fa2_backward_keys"] and zeros[0][0]["DIVIDED"] == 1 and zeros[0][0]["FUSED"] == 0


@pytest.mark.parametrize("name", ["causal", "window"])
def test_blocks_of_keys_under_a_band_are_not_divided(name, device_by_name, divided, taken):
    case = prepared(FUSED[name], "bfloat16")
    check(case, case.reference())
    assert divided == [0]


@pytest.mark.parametrize("name", FUSED)
def test_deterministic_where_others_prepare_and_finish(name, monkeypatch, fused, taken, zeros):
    emulator.install(monkeypatch, backwards=False)
    case = prepared(FUSED[name] | {"deterministic": True}, DTYPES[list(FUSED).index(name) % 2])
    check(case, case.reference())
    constants = zeros[0][0]
    assert taken == ["fa2_backward_keys"] and constants["FUSED"] == (case.q.shape[-1] <= 64 or constants["PAIRED"])


@pytest.mark.parametrize("view", ["transposed", "sliced", "fortran"])
def test_strides_where_others_prepare_and_finish(view, device_by_name, fused, heads):
    case = make(B=1, Hq=4, Tq=150, Tk=200, d=64, dtype="bfloat16")
    reference = case.reference()
    for name in ("q", "k", "v", "dout"):
        setattr(case, name, restride(getattr(case, name), view))
    check(case, reference)
    assert len(heads["row_deltas"]) == 1


@pytest.mark.parametrize("more", [
    dict(q_lengths=[100, 150]), dict(sinks=normal(4)), dict(dv=128), dict(d=256),
], ids=lambda more: next(iter(more)))  # fmt: skip
def test_calls_whose_rows_have_kernels_of_their_own(more, device_by_name, fused, heads, taken):
    case = make(**dict(B=2, Hq=4, Tq=150, Tk=200, d=64, dtype="bfloat16") | more)
    check(case, case.reference())
    assert heads["row_deltas"] == [8]


# ---- clusters of two blocks of threads, which have dQ of half of the rows each -------------------------------------

@pytest.fixture
def paired(monkeypatch, fused):
    monkeypatch.setattr(sm90, "WGMMA_PAIRED_ROWS", 0)
    monkeypatch.setattr(sm90, "WGMMA_PAIRED_ODD", defaultdict(int))


@pytest.mark.parametrize("parts", [3, 6])
@pytest.mark.parametrize("shape", [dict(Hq=2, Tq=800, Tk=500), dict(Hq=3, Hkv=1, Tq=780, Tk=300)])
def test_all_pairs_are_divided_by_rows(parts, shape, device_by_name, divided, paired, taken, monkeypatch):
    """As they are where they are few."""
    monkeypatch.setattr(sm90, "WGMMA_FUSED_LAG", 1.0)
    monkeypatch.setattr(sm90, "_divided", lambda blocks, *_: Divided(0, blocks, parts))
    case = prepared(dict(B=1, d=128) | shape, "bfloat16")
    check(case, case.reference())
    blocks = case.k.shape[1] * 4
    assert taken and divided == [blocks * parts - case.k.shape[1] * launch.blocks_of(case.k.shape[2], 128)]


PAIRED = {
    "two steps": dict(B=1, Hq=1, Tq=128, Tk=256),
    "four clusters": dict(B=2, Hq=1, Tq=256, Tk=512),
    "heads": dict(B=1, Hq=5, Tq=256, Tk=256),
    "groups": dict(B=2, Hq=4, Hkv=2, Tq=128, Tk=256),
    "more rows than keys": dict(B=1, Hq=3, Hkv=1, Tq=384, Tk=256),
    "rows and keys that do not exist": dict(B=1, Hq=2, Tq=100, Tk=220),
    "an odd block of keys": dict(B=1, Hq=2, Tq=256, Tk=300),
    "an odd block of rows": dict(B=2, Hq=2, Tq=192, Tk=256),
    "odd blocks of both": dict(B=2, Hq=4, Hkv=2, Tq=300, Tk=384),
    "causal": dict(B=1, Hq=2, Tq=512, Tk=512, causal=True),
    "causal, an odd block of keys": dict(B=1, Hq=2, Tq=384, Tk=384, causal=True),
    "causal, an odd block of rows": dict(B=2, Hq=1, Tq=320, Tk=256, causal=True),
    "causal, odd blocks of both": dict(B=2, Hq=4, Hkv=2, Tq=300, Tk=384, causal=True),
    "causal, an odd block of keys, offsets": dict(
        B=4, Hq=1, Tq=256, Tk=384, causal=True, q_offset=np.array([-170, 64, 300, 1000])),
    "causal, keys that do not exist": dict(B=1, Hq=2, Tq=300, Tk=500, causal=True),
    "causal, keys that do not exist, an odd block": dict(B=1, Hq=2, Tq=330, Tk=330, causal=True),
    "causal, keys that do not exist, offsets": dict(
        B=4, Hq=1, Tq=256, Tk=300, causal=True, q_offset=np.array([-170, 0, 60, 1000])),
    "causal, fewer rows": dict(B=2, Hq=1, Tq=128, Tk=512, causal=True),
    "causal, more rows": dict(B=1, Hq=1, Tq=512, Tk=256, causal=True),
    "causal, rows that do not exist": dict(B=1, Hq=1, Tq=360, Tk=256, causal=True),
    "causal, groups": dict(B=2, Hq=6, Hkv=2, Tq=256, Tk=256, causal=True),
    "causal, nothing visible": dict(B=1, Hq=1, Tq=256, Tk=256, causal=True, q_offset=-1000),
    "causal, everything visible": dict(B=1, Hq=1, Tq=256, Tk=256, causal=True, q_offset=1000),
    "causal, offsets": dict(B=4, Hq=1, Tq=256, Tk=256, causal=True, q_offset=np.array([-170, -64, 3, 90])),
    "a window without a lower end": dict(B=1, Hq=2, Tq=256, Tk=256, window=(None, 37)),
}
PAIRED = {name: options | {"d": 128} for name, options in PAIRED.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PAIRED)
def test_pairs_of_blocks(name, dtype, device, paired, taken, zeros):
    case = prepared(PAIRED[name], dtype)
    check(case, case.reference())
    assert taken == ["fa2_backward_keys"] and zeros[0][0]["PAIRED"] == 1


@pytest.mark.parametrize("name", PAIRED)
def test_deterministic_pairs_of_blocks(name, monkeypatch, paired, taken, zeros):
    emulator.install(monkeypatch, backwards=False)
    case = prepared(PAIRED[name] | {"deterministic": True}, DTYPES[len(name) % 2])
    check(case, case.reference())
    assert taken == ["fa2_backward_keys"] and zeros[0][0]["PAIRED"] == 1


@pytest.mark.parametrize("name", ["dout", "dlse"])
def test_pairs_of_blocks_and_a_row_of_nan(name, device_by_name, paired, taken, zeros):
    """What a NaN of a row makes of delta stays in that row: zeros of a product meet delta of others."""
    check_a_row_of_nan(zeros, name)


def check_a_row_of_nan(zeros, name):
    case = prepared(PAIRED["two steps"], "bfloat16")
    (case.dlse if name == "dlse" else case.dout[..., 3])[..., 70] = np.nan
    moved = on_device(case, False)
    dq, dk, dv = (np.asarray(x).astype(np.float32) for x in moved.backward(*moved.forward())[:3])
    assert zeros[0][0]["PAIRED"] == 1
    assert np.isnan(dq[..., 70, :]).all() and np.isfinite(np.delete(dq, 70, axis=-2)).all()
    assert np.isnan(dk).all() and np.isnan(dv[..., 3]).all()


def test_pairs_of_blocks_and_delta_that_overflows(device_by_name, paired, taken, zeros):
    """P is what it is, and so is dV."""
    case = prepared(PAIRED["two steps"], "bfloat16")
    case.v[:], case.dout[..., 70, :] = 1e20, 1e20
    moved = on_device(case, False)
    dq, dk, dv = (np.asarray(x).astype(np.float32) for x in moved.backward(*moved.forward())[:3])
    assert zeros[0][0]["PAIRED"] == 1
    assert np.isfinite(dv).all() and np.isfinite(np.delete(dq, 70, axis=-2)).all()


def test_what_overflows_is_hidden_in_pairs(device_by_name, paired, taken, zeros):
    check_what_overflows(taken, 128, 256)
    assert zeros[0][0]["PAIRED"] == 1


KEYS_THAT_DO_NOT_EXIST = {  # a whole block, or part of one; under the mask, rows see keys behind the last one
    "a block": dict(Tk=128), "some": dict(Tk=200),
    "causal, a block": dict(Tk=128, causal=True, q_offset=1000),
    "causal, some": dict(Tk=200, causal=True, q_offset=1000),
}


@pytest.mark.parametrize("name", KEYS_THAT_DO_NOT_EXIST)
def test_keys_of_pairs_that_do_not_exist_have_no_share(name, device_by_name, paired, taken, zeros):
    check_a_large_key(128, "float16", Tq=128, **KEYS_THAT_DO_NOT_EXIST[name])
    assert taken and zeros[0][0]["PAIRED"] == 1


@pytest.mark.parametrize("name", KEYS_THAT_DO_NOT_EXIST)
def test_keys_of_pairs_that_do_not_exist_and_have_a_share_are_caught(name, device_by_name, paired, zeros, monkeypatch):
    break_backward(monkeypatch, "0.0f : -INFINITE", "0.0f : 0.0f")
    with pytest.raises(AssertionError):
        check_a_large_key(128, "float16", Tq=128, **KEYS_THAT_DO_NOT_EXIST[name])
    assert zeros[0][0]["PAIRED"] == 1


def test_a_key_that_no_row_sees_in_pairs(device_by_name, paired, taken, zeros):
    check_a_key_that_no_row_sees(128, np.nan, 330, Tq=300, Tk=512)
    assert taken and zeros[0][0]["PAIRED"] == 1


def test_a_key_that_no_row_sees_in_pairs_and_has_a_gradient_is_caught(device_by_name, paired, monkeypatch):
    break_backward(monkeypatch, "if constexpr (PAIRED && BAND) {  // keys that", "if constexpr (false) {  // keys that")
    with pytest.raises(AssertionError):
        check_a_key_that_no_row_sees(128, np.nan, 330, Tq=300, Tk=512)


def test_pairs_of_blocks_without_dlse(device_by_name, paired, taken, zeros):
    case = prepared(PAIRED["heads"], "bfloat16")
    case.dlse = None
    check(case, case.reference())
    assert taken and zeros[0][0]["PAIRED"] == 1


@pytest.mark.parametrize("more", [
    dict(window=(70, 0)), dict(d=64), dict(dv=64),
], ids=lambda more: next(iter(more)))  # fmt: skip
def test_calls_without_pairs(more, device_by_name, paired, taken, zeros):
    case = prepared(PAIRED["two steps"] | more, "bfloat16")
    check(case, case.reference())
    assert taken and zeros[0][0]["FUSED"] == 1 and zeros[0][0]["PAIRED"] == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, Tk, lag", [
    (8, 512, 132), (130, 512, 132), (264, 512, 132), (64, 1024, 20), (5, 300, 1), (33, 16384, 132), (7, 2048, 16),
    (40, 640, 11),
])  # fmt: skip
def test_schedule(causal, heads, Tk, lag):
    """Each row is prepared and finished once; before those that need it, and behind, with the lag between."""
    problem = Problem(B=1, Hq=heads, Hkv=heads, Tq=Tk, Tk=Tk, d=64, dv=64, dtype="bfloat16", causal=causal)
    blocks = -(-Tk // 128)
    schedule = fa2_backward._schedule(problem, Tiles(128, 128, lag=lag), Divided(), blocks)
    section, ahead, behind = schedule["section"], schedule["ahead"], schedule["behind"]

    def place(index):  # key_block in sm90/backward.cuh
        first = index // (section * blocks) * section
        count = min(heads - first, section)
        rest = index - first * blocks
        return first + rest % count, rest // count

    total = heads * blocks
    assert sorted(map(place, range(total))) == [(head, n) for head in range(heads) for n in range(blocks)]
    assert ahead % blocks == behind % blocks == 0
    done = [place(index + ahead) for index in range(total - ahead)]
    assert sorted(done) == [(head, n) for head in range(ahead // blocks, heads) for n in range(blocks)]
    done = [place(index - behind) for index in range(behind, total)]
    assert sorted(done) == [(head, n) for head in range(heads - behind // blocks) for n in range(blocks)]
    of_head = {}
    for index in range(total):
        of_head.setdefault(place(index)[0], []).append(index)
    for index in range(total - ahead):
        assert index + lag <= min(of_head[place(index + ahead)[0]])
    for index in range(behind, total):
        assert index - lag >= max(of_head[place(index - behind)[0]])


def test_a_schedule_is_found_once(device_by_name, monkeypatch, taken):
    """For calls that are alike: it takes longer than a launch."""
    moved = on_device(make(B=1, Hq=2, Tq=150, d=64, dtype="bfloat16", causal=True))
    out, lse = moved.forward()
    found, section = [], sections._section
    monkeypatch.setattr(sections, "_section", lambda *of: found.append(section(*of)) or found[-1])
    for _ in range(3):
        moved.backward(out, lse)
    assert len(found) == 1 and len(taken) == 3


@pytest.mark.parametrize("options, section", [
    (dict(Hq=24, T=1024), 24),  # usual: 21, and 3 at last
    (dict(Hq=12, T=2048), 12), (dict(Hq=32, T=2048), 8), (dict(Hq=5, T=8192), 5), (dict(B=4, Hq=16, T=4096), 4),
    (dict(B=16, Hq=16, T=1024), 10), (dict(B=10, Hq=16, T=1536), 7), (dict(Hq=64, T=512), 32),
    (dict(Hq=128, T=512), 21),
    (dict(Hq=24, T=1024, d=64), 24),
    (dict(Hq=12, T=1024, d=256), 12), (dict(Hq=24, T=1024, causal=False), 1),
    (dict(Hq=8, T=4096, deterministic=True), 8), (dict(B=4, Hq=16, T=4096, deterministic=True), 8),
    (dict(B=8, Hq=16, T=2048, deterministic=True), 16), (dict(B=32, Hq=16, T=512, deterministic=True), 10),
    (dict(B=32, Hq=16, T=512, causal=False, deterministic=True), 21),
    (dict(B=8, Hq=8, T=2048, d=256, causal=False, deterministic=True), 8),
    (dict(B=2, Hq=8, T=8192, d=256, deterministic=True), 2), (dict(B=32, Hq=8, T=512, d=256, deterministic=True), 21),
    (dict(Hq=8, T=4096, d=256, deterministic=True), 8),
    (dict(Hq=8, T=4096, d=256, causal=False, deterministic=True), 4),
    # Grouped, in a fixed order: so many query heads
    (dict(B=8, Hq=32, Hkv=8, T=2048, deterministic=True), 17), (dict(Hq=32, Hkv=8, T=2048, deterministic=True), 8),
    (dict(B=8, Hq=32, Hkv=2, T=2048, d=64, deterministic=True), 16),
    (dict(Hq=96, Hkv=1, T=2048, deterministic=True), 1),
    (dict(B=8, Hq=32, Hkv=8, T=2048, d=256, deterministic=True), 7),
    (dict(B=4, Hq=32, Hkv=8, T=4096, d=256, deterministic=True), 7),
    (dict(Hq=32, Hkv=8, T=2048, d=256, deterministic=True), 8),
    (dict(Hq=10, T=8192, deterministic=True), 6), (dict(Hq=16, T=8192, deterministic=True), 16),
    (dict(Hq=12, T=8192, deterministic=True), 12), (dict(Hq=5, T=16384, deterministic=True), 3),
    (dict(B=8, Hq=32, Hkv=2, T=2048, d=256, deterministic=True), 8),
])  # fmt: skip
def test_sections_by_when_they_end(options, section, monkeypatch):
    """In small calls, or such with many keys, of so many heads that the last section has not too few."""
    monkeypatch.undo()  # many_heads
    how = dict(B=1, d=128, causal=True) | options
    T, d = how.pop("T"), how.pop("d")
    how.setdefault("Hkv", how["Hq"])
    problem = Problem(**how, Tq=T, Tk=T, d=d, dv=d, dtype="bfloat16", backend="cupy_raw")
    tiles = tiling.plan_tiles(problem, replace(kernels_on("cupy_raw", chip("sm_90")), processors=132), "backward")
    assert sections._section(problem, tiles, problem.B * problem.Hkv, -(-T // tiles.bc)) == section


def test_divisors():
    """``divided`` of call.cuh is a division, for all that it is for."""
    rng = np.random.default_rng(0)
    for n in [*range(1, 300), 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 1, *map(int, rng.integers(1, 2**31, 300))]:
        divisor = launch.divisor(n)
        factor, shift = divisor & 0xFFFFFFFF, divisor >> 32
        assert 0 <= shift < 32
        last = (2**31 - 1) // n * n
        for x in {0, n - 1, n, min(n + 1, 2**31 - 1), last - 1, last, 2**31 - 1, *map(int, rng.integers(0, 2**31, 9))}:
            assert (2 * x * factor >> 32) >> shift == x // n


# ---- the tests can fail ---------------------------------------------------------------------------------------

def check_caught(which, old, new, cases, monkeypatch, taken):
    """The kernel with this change in its text is found to be wrong in one of the cases; as it is, not."""
    case = prepared(cases[which], "bfloat16")
    break_backward(monkeypatch, old, new)
    with pytest.raises(AssertionError) if old else nullcontext():
        check(case, case.reference())
    assert taken


BROKEN_DIVIDED = {
    "": ("plain", "", ""),
    "all rows are the first part's, too": ("plain", "part.number + 1 < part.count ? blocks", "false ? blocks"),
    "each part has all rows before": (
        "plain, d = 128", "blocks * part.number / part.count * ROWS, 0)", "0, 0)"),
    "the first part is what is written": ("plain", "m < part.count; m++)", "m < 1; m++)"),
    "shares are added to one's own": ("plain, d = 128", "dV[n] = 0.0f;\n    const auto add", ";\n    const auto add"),
    "no part writes dK and dV": ("plain", "if (*others != part.count - 1)", "if (true)"),
    "shares lie in one place": ("plain, d = 128", "shares + part.number * VECTORS", "shares"),
    "parts are not counted": (
        "plain", "= count_and_see((unsigned*)call.sums", "= 0 * count_and_see((unsigned*)call.sums"),
    "all parts are the first": ("plain, d = 128", "(int)((index - first) % parts), (int)parts", "0, (int)parts"),
}  # fmt: skip
BROKEN_STORED = {
    "": ("causal", "", ""),
    "nothing is stored": (
        "causal, d = 128", "if (stores)\n                store_bulk", "if (false)\n                store_bulk"),
    "keys that no row sees come where zeros are": (
        "keys that no row sees, d = 128", "{  // their copies are to end before others are where they come\n"
        "        await(barriers + K_THERE, 0);\n        await(barriers + V_THERE, 0);", "{"),
    "nothing is stored, d = 64": (
        "causal", "if (stores)\n                    *sums", "if (false)\n                    *sums"),
    "too much is stored": (
        "causal, d = 128", "if (stores)\n                store_bulk", "if (true)\n                store_bulk"),
    "too much is stored, d = 64": ("causal", "if (stores)", "if (true)"),
    "it is said before all is stored": (
        "causal, d = 128", "await_stores<0>();\n    unsigned* const blocks", "unsigned* const blocks"),
    "nobody says so": ("causal, d = 128", "pass_turn(blocks);", ""),
    "who has nothing to store says nothing": (
        "keys that no row sees, part of a block", "if (STORES && i0 == first_rows(work) && i0 >= to_be_stored)",
        "if (false)"),
    "the last keys that rows see are others": (
        "keys that no row sees, d = 128", "work.q_length % BR ? call.Tk - 1 :", "true ? call.Tk - 1 :"),
    "rows are not in whole blocks": (
        "rows that see no key", "work.q_length % BR ? call.Tk - 1 :", "false ? call.Tk - 1 :"),
    "heads share a counter": ("groups, d = 128", "work.b * (unsigned)call.Hq + h;", "work.b * (unsigned)call.Hq;"),
    "heads share a counter, d = 64": (
        "groups", "pass_stored(call, work, h);\n        meet",
        "pass_stored(call, work, work.first_head);\n        meet"),
}  # fmt: skip


BROKEN_BY_HEADS = {
    "": ("causal", "", ""),
    "parts begin with the first head": ("groups, d = 128", "work.first_head += from;", "work.first_head += 0;"),
    "parts begin with the first head, d = 64": ("groups", "work.first_head += from;", "work.first_head += 0;"),
    "slopes are those of the first heads": (
        "causal, alibi", "begin_head(call, work.b, work.first_head",
        "begin_head(call, work.b, work.h * (int)call.group"),
    "slopes are those of the first heads, d = 128": (
        "groups, softcap, alibi", "begin_head(call, work.b, work.first_head",
        "begin_head(call, work.b, work.h * (int)call.group"),
    "a part has as many heads as others": (
        "groups", "work.heads * (head + 1) / of_heads - from", "work.heads / of_heads"),
    "rows are all parts'": ("groups, and rows", "row + 1 < of_rows ?", "false ?"),
    "parts begin with the first rows": ("plain", "work.i_low = low + blocks * row / of_rows * BR;", ""),
    "parts of rows are parts of heads": ("groups, and rows", "row = part.number % of_rows;", "row = 0;"),
    "those that go down begin with the first rows": ("causal, d = 128", "|| EITHER_WAY && work.stride < 0", ""),
    "dQ stays in its rows": (
        "groups", "block_at(call, work, h, i0);\n        const unsigned turn",
        "block_at(call, work, h, 0);\n        const unsigned turn"),
    "dQ stays in its rows, d = 128": (
        "groups, d = 128", "first_head + nth, i0) + (PAIRED", "first_head + nth, first_rows(work)) + (PAIRED"),
    "rows go on before all heads have had them": (
        "groups, d = 128", "!ONE_HEAD && nth + 1 < work.heads ? i0 :", "false ? i0 :"),
    "heads go on past the last": (
        "groups, d = 128", "? nth + 1 : 0;", "? nth + 1 : nth + 1;"),
    "shares are counted where turns are": (
        "deterministic", "(unsigned*)call.sums - 1 - counted", "call.counters + counted"),
    "keys without a step have no share": (
        "fewer rows than parts", "if (part.count == 1)\n        return true;",
        "if (part.count == 1 || work_of(call).steps == 0)\n        return true;"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_BY_HEADS)
def test_broken_kernels_that_divide_by_heads_are_caught(name, device_by_name, by_heads, taken, monkeypatch):
    check_caught(*BROKEN_BY_HEADS[name], BY_HEADS, monkeypatch, taken)


# Where a block of threads waits: the thread that adds, one of the warpgroup APART, whose others wait for it, or one
# that does nothing else
TURN = "if (DETERMINISTIC && !TURNS_APART && !has_turn) {\n            await_turn(turns(call, block), turn);"
TURN_APART = "if (DETERMINISTIC && warp == 1 && lane == 0)\n            await_turn(turns(call, block), turn);"
TURN_ALONE = "await_turn(turns(call, block), turn_at(call, work, i0));"
SPOILED = f"""for (int late = 0; late < 50; late++)
            __nanosleep(1);
        {TURN_ALONE}
        if (turn_at(call, work, i0) == 0)
            *sums_of_block(call, block) = INFINITE;"""
# Rows of groups that go down, the same ones of all heads
DOWN = {
    "groups down": dict(B=1, Hq=4, Hkv=2, Tq=280, Tk=300, d=64, causal=True),
    "groups down, d = 128": dict(B=1, Hq=4, Hkv=2, Tq=200, Tk=300, d=128, causal=True),
    "groups down, softcap": dict(B=1, Hq=4, Hkv=2, Tq=150, Tk=300, d=64, causal=True, softcap=2.0),
    "groups down, alibi": dict(
        B=1, Hq=4, Hkv=2, Tq=150, Tk=200, d=128, causal=True, alibi_slopes=np.array([0.5, 0.1, 0.02, -0.01])),
    "groups down, more rows than keys": dict(B=2, Hq=3, Hkv=1, Tq=300, Tk=140, d=64, causal=True),
    "groups down, lengths": dict(
        B=3, Hq=2, Hkv=1, Tq=150, Tk=260, d=128, causal=True, q_lengths=[150, 20, 0], kv_lengths=[130, 260, 64]),
    "groups down, packed": dict(
        Hq=4, Hkv=2, Tq=300, Tk=350, d=128, cu=([3, 120, 120, 290], [2, 150, 170, 330]), causal=True),
    "groups down, packed, softcap": dict(
        Hq=4, Hkv=2, Tq=210, Tk=250, d=64, cu=([0, 60, 70, 210], [0, 40, 60, 250]), causal=True, softcap=2.0),
}  # fmt: skip
IN_ORDER = {
    "down": (dict(B=2, Hq=2, Tq=300, d=64, window=(130, 0)), ""),
    "by heads": (BY_HEADS["deterministic"], "by_heads"),
    "by heads, d = 128": (BY_HEADS["deterministic, d = 128"], "by_heads"),
    "rows": (BY_HEADS["deterministic, rows"], "by_heads"),
    "packed": (BY_HEADS["deterministic, packed"], "by_heads"),
    "lengths": (BY_HEADS["lengths"], ""),
    "rows of others": (dict(B=1, Hq=5, Tq=300, Tk=430, d=64, causal=True), "fused"),
    "rows of others, rows without keys": (dict(B=1, Hq=5, Tq=310, Tk=140, d=64, causal=True), "fused"),
    "pairs": (PAIRED["four clusters"], "paired"),
    "pairs, causal": (PAIRED["causal"], "paired"),
    "pairs, odd blocks of both": (PAIRED["odd blocks of both"], "paired"),
    "pairs, causal, odd blocks of both": (PAIRED["causal, odd blocks of both"], "paired"),
    "pairs, causal, rows that do not exist": (dict(B=1, Hq=1, Tq=360, Tk=512, d=128, causal=True), "paired"),
    "pairs, causal, nothing visible": (PAIRED["causal, nothing visible"], "paired"),
    "last keys first": (dict(B=1, Hq=2, Tq=300, Tk=430, d=64, causal=True), ""),
    "last keys first, d = 128": (dict(B=2, Hq=1, Tq=260, Tk=310, d=128, causal=True), ""),
    "d < dv": (dict(B=1, Hq=2, Tq=150, Tk=290, d=64, dv=128), ""),
    "longest first behind": (dict(B=2, Hq=2, Tq=500, Tk=500, d=64, causal=True), "late"),
    "longest first behind, d = 128": (dict(B=1, Hq=2, Tq=400, Tk=450, d=128, causal=True), "late"),
    "longest first behind, in the last head": (dict(B=1, Hq=3, Tq=400, Tk=500, d=64, causal=True), "late_in_last_head"),
    "longest first behind, pairs": (dict(B=1, Hq=2, Tq=768, Tk=1024, d=128, causal=True), "late_in_pairs"),
    "longest first behind, more rows than keys": (dict(B=1, Hq=2, Tq=600, Tk=450, d=128, causal=True), "late"),
    "longest first behind, by heads": (dict(B=1, Hq=4, Hkv=1, Tq=450, Tk=500, d=64, causal=True), "by_heads"),
    "longest first behind, packed": (dict(
        Hq=2, Tq=600, Tk=900, d=128, cu=([0, 120, 120, 590], [2, 250, 370, 900]), causal=True), "late"),
    "longest first behind, lengths": (
        dict(B=3, Hq=1, Tq=350, Tk=500, d=64, causal=True, q_lengths=[350, 129, 0], kv_lengths=[260, 500, 77]), "late"),
    "longest first behind, offsets": (
        dict(B=3, Hq=1, Tq=300, Tk=500, d=128, causal=True, q_offset=np.array([-100, 20, 700])), "late"),
    "softcap": (dict(B=1, Hq=2, Tq=200, Tk=290, d=64, softcap=2.0), ""),
    "softcap, last keys first": (dict(B=1, Hq=2, Tq=200, Tk=290, d=64, causal=True, softcap=2.0), ""),
} | {name: (options, "down") for name, options in DOWN.items()}


@pytest.fixture
def late(monkeypatch):
    """More blocks of threads than run at once."""
    for module in (fa2_backward, sections):
        monkeypatch.setattr(module, "WGMMA_PROCESSORS", 2)
    monkeypatch.setattr(sm90, "_divided_by_heads", lambda *_: Divided())


@pytest.fixture
def down(monkeypatch):
    """Short calls, too."""
    monkeypatch.setattr(sm90, "WGMMA_DOWN_ROWS", 0)


@pytest.fixture
def late_in_last_head(late, monkeypatch):
    """And a section for each head."""
    for name in ("SECTION_LAST", "SECTION_MOST", "SECTION_BYTES"):
        monkeypatch.setattr(sections, name, 1)
    monkeypatch.setattr(sections, "_section_in_order", lambda *_: 0)


@pytest.fixture
def late_in_pairs(late_in_last_head, paired):
    pass


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", IN_ORDER)
def test_each_block_of_keys_adds_in_its_turn(name, early, monkeypatch, taken, request):
    """Not before: its number is then exactly that of those that have added to the rows."""
    options, how = IN_ORDER[name]
    if how:
        request.getfixturevalue(how)
    waits = {TURN: "DETERMINISTIC && !TURNS_APART", TURN_APART: "DETERMINISTIC && warp == 1 && lane == 0"}
    waits[TURN_ALONE] = "true"
    check_turns(options, early and "nothing" not in name, waits, FILE, monkeypatch, taken)


def check_turns(options, early, waits, file, monkeypatch, taken):
    """By what waits for a turn, the condition on the thread that does: instead, a look at whether exactly so many have
    added; ``early``: one fewer, which is caught."""
    emulator.install(monkeypatch, backwards=False)
    case = prepared(options | {"deterministic": True}, "bfloat16")
    whole = compile.source
    assert all(whole(file, "").count(wait) == 1 for wait in waits)

    def broken(name, preamble):
        text = whole(name, preamble)
        if name == file:
            for wait, thread in waits.items():
                (turn,) = re.findall(r"await_turn\(turns\(call, block\), (.*)\);", wait)
                turn += early * f" - ({turn} > 0)"
                wrong = f"if ({thread} && *turns(call, block) != {turn}) *sums_of_block(call, block) = INFINITE;"
                text = text.replace(wait, wrong + "{" * (wait.count("{") - wait.count("}")))
        return text

    monkeypatch.setattr(compile, "source", broken)
    with pytest.raises(AssertionError) if early else nullcontext():
        check(case, case.reference())
    assert taken


@pytest.mark.parametrize("name", DOWN)
def test_rows_of_groups_go_down(name, monkeypatch, down, taken, zeros):
    """A wrong turn would be waited for."""
    emulator.install(monkeypatch, backwards=False)
    case = prepared(DOWN[name] | {"deterministic": True}, DTYPES[list(DOWN).index(name) % 2])
    check(case, case.reference())
    constants = zeros[0][0]
    assert taken == ["fa2_backward_keys"] and constants["TOGETHER"] and not constants["LAST_FIRST"]


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("name", [
    "last keys first, d = 128", "d < dv, causal", "packed", "rows", "softcap, last keys first", "groups down, softcap",
    "groups down, alibi",
])  # fmt: skip
def test_who_adds_waits_for_its_turn(name, waits, device_by_name, taken, monkeypatch, request):
    """Before the turn is told, what the first one stores is spoiled: it is stored after that."""
    wider = dict(B=1, Hq=2, Tq=150, Tk=290, d=64, dv=128, causal=True)
    if name in DOWN:
        request.getfixturevalue("down")
    case = prepared((wider if name == "d < dv, causal" else IN_ORDER[name][0]) | {"deterministic": True}, "bfloat16")
    break_backward(monkeypatch, TURN_ALONE, SPOILED)
    wait = "await(barriers + TURN, parity);"
    break_backward(monkeypatch, wait, wait if waits else ";")
    with nullcontext() if waits else pytest.raises(AssertionError):
        check(case, case.reference())
    assert taken


BROKEN_IN_ORDER = {
    "": ("last keys first", "", ""),
    "nobody stores": ("last keys first", "FIRST_STORES && turn == 0", "false"),
    "nobody stores, d = 128": ("last keys first, d = 128", "FIRST_STORES && turn == 0", "false"),
    "nobody stores, rows of others": ("rows of others", "FIRST_STORES && turn == 0", "false"),
    "nobody stores, pairs": ("pairs, causal", "FIRST_STORES && turn == 0", "false"),
    "all store, rows of others": ("rows of others", "FIRST_STORES && turn == 0", "true"),
    "all store, pairs": ("pairs", "FIRST_STORES && turn == 0", "true"),
    "all store": ("last keys first", "FIRST_STORES && turn == 0", "true"),
    "all store, d = 128": ("last keys first, d = 128", "FIRST_STORES && turn == 0", "true"),
    "warpgroups add to the same sums": (
        "d < dv", "(BY_KEYS && SETS == 1 ? 0 : n * PATCH)", "(BY_KEYS ? 0 : n * PATCH)"),
    "warpgroups add to the same sums, softcap": (
        "softcap, last keys first", "(BY_KEYS && SETS == 1 ? 0 : n * PATCH)", "(BY_KEYS ? 0 : n * PATCH)"),
    "nobody stores, softcap": ("softcap", "FIRST_STORES && turn == 0", "false"),
    "all store, softcap": ("softcap, last keys first", "FIRST_STORES && turn == 0", "true"),
    "nobody stores, groups": ("groups down", "FIRST_STORES && turn == 0", "false"),
    "all store, groups, softcap": ("groups down, softcap", "FIRST_STORES && turn == 0", "true"),
    "nobody says that a block of threads has added": (
        "rows of others", "if (FUSED && speaks_for_all())", "if (false)"),
    "turns are as if all came the last one first": (
        "longest first behind", "(unsigned)(mine >= work.late ? last - mine", "(unsigned)(true ? last - mine"),
    "turns are as if all came the last one first, pairs": (
        "longest first behind, pairs", "(unsigned)(mine >= work.late ? last - mine", "(unsigned)(true ? last - mine"),
    "turns are as if all came the last one first, by heads": (
        "longest first behind, by heads", "(unsigned)(mine >= work.late ? last - mine",
        "(unsigned)(true ? last - mine"),
    "the last section of packed sequences is in two halves": (
        "longest first behind, packed", "DETERMINISTIC && !PACKED && SUMS == 1", "DETERMINISTIC && SUMS == 1"),
    "those before are counted that have no such rows": (
        "longest first behind", "(last < work.late ? 0 : last + 1 - work.late)", "(last + 1 - work.late)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_IN_ORDER)
def test_broken_kernels_in_order_are_caught(name, monkeypatch, taken, request):
    which, old, new = BROKEN_IN_ORDER[name]
    options, how = IN_ORDER[which]
    if how:
        request.getfixturevalue(how)
    emulator.install(monkeypatch, backwards=False)
    check_caught(which, old, new, {which: options | {"deterministic": True}}, monkeypatch, taken)


@pytest.mark.parametrize("name", BROKEN_DIVIDED)
def test_broken_kernels_that_divide_are_caught(name, device_by_name, divided, taken, monkeypatch):
    which, old, new = BROKEN_DIVIDED[name]
    check_caught(which, old, new, FUSED, monkeypatch, taken)


@pytest.mark.parametrize("name", BROKEN_STORED)
def test_broken_kernels_that_store_are_caught(name, device_by_name, taken, monkeypatch):
    check_caught(*BROKEN_STORED[name], STORED, monkeypatch, taken)


UNBOUNDED = (
    "least_or_nan(score.twos - of_row(rows_lse, lse, e), HAS_BOUNDS ? most[e / 2 % 2] : 0.0f)",
    "score.twos - of_row(rows_lse, lse, e)",
)
BROKEN = {
    "": ("causal", "", ""),
    "the band is a row wide of the mark": ("causal", "low = (int)clamp(j - call", "low = (int)clamp(j - 1 - call"),
    "a row sees a key that comes behind it": ("causal", "(int)before < -row", "(int)before < -1 - row"),
    "a row sees a key that comes behind it, d = 128": (
        "causal, d = 128", "(int)before < -row", "(int)before < -1 - row"),
    "a window's lower end is a row wide of the mark": (
        "window, d = 128", "before + row >= (n", "before + row > (n"),
    "rows that a window hides are taken for plain": (
        "window, d = 128", "(steps > 0 && i0 >= plain_from && i0 + BR <= plain_to)", "(steps > 0 && i0 >= plain_from)"),
    "all tiles are taken for plain": ("causal", "step(S, true);", "step(S, false);"),
    "limits are written before V is read": (
        "causal, d = 128", "meet(WARPGROUP_MEETS + mine, WARPGROUP);  // V is read", ""),
    "what hides keys is another lane's": (
        "causal, d = 128", "first_key * SLAB_ROW)) + threadIdx.x % WARPGROUP;", "first_key * SLAB_ROW));"),
    "what hides keys is the other warpgroup's": (
        "causal", "AT_LIMITS + mine * (LIMITS / 2)", "AT_LIMITS"),
    "keys that no row sees have the dS of others": (
        "causal, d = 128", "store_across(tile_mine, n, zeros);", ""),
    "keys that no row sees are left out of dQ": ("causal, d = 128", "pass_on(dQ);\n                tell();", "tell();"),
    "too few keys that no row sees": ("causal, d = 128", "(i0 + BR <= seen_from ||", "(i0 <= seen_from ||"),
    "too many rows past those that see": ("window, d = 128", "|| i0 >= seen_to)", "|| i0 + BR >= seen_to)"),
    "rows that follow, and keys that no row sees": (
        "packed, keys that no row sees", "if (hides && SKIPS && !rows_end && (", "if (hides && SKIPS && ("),
    "keys that follow are left": ("lengths", "if (keys_follow && left < BC)", "if (false)"),
    "rows that follow are left": ("packed", "rows_end = !PAIRED && rows_follow &&", "rows_end = false &&"),
    "rows that follow are cleared too late": ("packed", "fence_shared();\n                all_meet();", "all_meet();"),
    "dS is not fenced": (
        "one tile", "fence_shared();\n            if constexpr (APART) {", "if constexpr (APART) {"),
    "dS is not fenced, d = 64": (
        "one tile, d = 64", "fence_shared();\n            if constexpr (APART) {", "if constexpr (APART) {"),
    "dS is not waited for": ("one more", "all_meet();  // dS is there", "// dS is there"),
    "dS is not waited for, d = 64": (
        "one more, d = 64", "await(barriers + DS_THERE + stage, dS_parity(work, steps));", ""),
    "Q is given back early": ("many steps", "await_products<0>();  // the rest of dV, and dK\n", ""),
    "Q is given back early, d = 64": ("many steps, d = 64", "await_products<0>();  // dV and dK, whose", "// whose"),
    "dP is read early": ("one tile", "await_products<0>();  // dP\n", "\n"),
    "dQ is read early": ("one tile", "await_products<1>();  // dQ", "await_products<2>();"),
    "dQ is read early, d = 64": (
        "one tile, d = 64", "await_products<0>();\n            if (patch", "if (patch"),
    "delta is left out": ("one tile", "DELTA_FIRST ? -delta[n] : delta[n];", "0.0f;"),
    "delta is left out, d = 64": ("one tile, d = 64", "DELTA_FIRST ? -delta[n] : delta[n];", "0.0f;"),
    "delta is another row's": ("one tile, d = 64", "set_dP(r + 1);", "set_dP(r);"),
    "nobody waits for dO and delta": (
        "many steps, d = 64", "await(barriers + O_THERE + stage, at.parity);\n                set_dP", "set_dP"),
    "dP begins with what it was": ("one tile, d = 64", "set_dP(0);", ""),
    "lse is in other units": ("one tile", "lse[n] * LOG2E;", "lse[n];"),
    "slopes are those of the first sequence": (
        "alibi, d = 128", "begin_head(call, work.b,", "begin_head(call, 0,"),
    "dS is not less where scores are capped": ("softcap", "x[n] *= slopes[0], x[n + 1] *= slopes[1];", ";"),
    "dV is less where scores are capped": (
        "softcap", "= pair(x[n], x[n + 1])", "= pair(x[n] * slopes[0], x[n + 1] * slopes[1])"),
    "P may be above 1": ("alibi, later keys first", *UNBOUNDED),
    "P may be above 1, d = 128": ("alibi, later keys first, d = 128", *UNBOUNDED),
    "P may be above 1, lengths": ("alibi, later keys first, lengths", *UNBOUNDED),
    "heads of a group share a block of sums": (
        "groups", "return block_at(call, work, work.first_head + nth,",
        "return block_at(call, work, work.first_head,"),
    "heads of a group share a block of sums, d = 64": (
        "one key head, no mask", "block = block_at(call, work, h,", "block = block_at(call, work, 0,"),
    "patches are added to the same sums": (
        "one tile, d = 64", "to + patch * (PATCH / LANE_NUMBERS) + (n", "to + (n"),
    "K^T is that of another warp": ("one tile, d = 64", "+ AT_K + place_across()", "+ AT_K + (place_across() ^ 32)"),
    "K^T is the same 16 keys'": (
        "one tile, d = 64", "+ AT_K + place_across() + n * ROW_STEP", "+ AT_K + place_across()"),
    "K^T is read before the rest of K is cleared": (
        "packed", "await(barriers + DS_THERE + work.steps % S_STAGES, dS_parity(work, work.steps));", ""),
    "dQ is not fenced": (
        "one tile", "fence_shared();\n            if (TURNS_APART && n == 0)", "if (TURNS_APART && n == 0)"),
    "dQ is added before it is there": ("one tile", "await(barriers + DQ_THERE + n, parity);", ""),
    "both halves of dQ are told of as the first": (
        "one tile", "arrive_as_warp(barriers + DQ_THERE + mine", "arrive_as_warp(barriers + DQ_THERE"),
    "the rest of dV is left out": ("one tile", "begin_dV(PARTS - 1, DV_FIRST, PART / SUM);", ""),
    "dQ is given back before it was read": ("many steps", "await_stores_read<0>();\n        arrive(", "arrive("),
    "a sequence begins a place later": (
        "packed, behind padding", "begin(b + half) <= place;", "begin(b + half) < place;"),
    "places before the first sequence are its own": (
        "packed, behind padding", "place.block < 0 ? NOBODYS", "false ? NOBODYS"),
    "padding behind the sequences is left": (
        "packed", "return {first, sequences, rows - sequences};", "return {first, sequences, first};"),
    "sequences share a block of sums": ("packed", "q_start / BR + b;", "q_start / BR;"),
    "sums of rows and of columns are mixed up": (
        "one tile, d = 64", "on_chip + patch * 64 * SLAB_ROW + place", "on_chip + place"),
    "dK is not scaled": ("one tile, d = 64", "dK[8 * n + 2 * e] * scale", "dK[8 * n + 2 * e]"),
}  # fmt: skip


def break_backward(monkeypatch, old, new):
    """Change the backward kernel alone: the forward pass that comes before it stays right."""
    whole = compile.source
    assert old in whole(FILE, "")
    monkeypatch.setattr(
        compile,
        "source",
        lambda name, preamble: whole(name, preamble).replace(old, new) if name == FILE else whole(name, preamble),
    )


BROKEN_FUSED = {
    "": ("causal", "", ""),
    "sums are not cleared": ("plain", "sums[x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);", ""),
    "O is taken for dO": ("plain, d = 128", "load_shared(at + PREPARED_BYTES / 2)", "load_shared(at)"),
    "O and dO are awaited by nobody": ("plain, d = 128", "await(barrier, PAIRED ? slab : parity);", ""),
    "delta begins anew with each slab": (
        "plain, d = 128", "slab < SLABS; slab++, parity ^= 1)", "slab < SLABS; slab++, parity ^= 1, gamma[0] = 0)"),
    "dlse is left out": ("plain", "gamma[r] -= *row_of(call.dlse", "gamma[r] -= 0.0f * *row_of(call.dlse"),
    "rows are left out": (
        "plain", "share.to = rows_before(call, place.block + 1);",
        "share.to = rows_before(call, place.block + 1) - 1;"),
    "the next head of a group is not taken": (
        "groups", "share.block = share.from, share.h = share.h + 1;", "share.block = share.from;"),
    "nobody says that rows are prepared": ("plain", "pass_turn(prepared(call, share.head));", ";"),
    "nobody says that rows are prepared which see no key": (
        "no row sees a key", "pass_turn(prepared(call, share.head));", ";"),
    "nobody says that rows are prepared which see no key, d = 128": (
        "no row sees a key, d = 128", "pass_turn(prepared(call, share.head));", ";"),
    "it is said before all is added": (
        "plain, d = 128", "await_stores<0>();\n        pass_turn(added", "pass_turn(added"),
    "sums are awaited by nobody": ("plain", "await(barrier, parity);\n            unsigned from", "unsigned from"),
    "dQ is not scaled": ("plain", "pair(__uint_as_float(x) * scale,", "pair(__uint_as_float(x),"),
    "dQ is not fenced": (
        "plain", "fence_shared();\n            __syncwarp();\n            if (lane == 0) {\n                store_box",
        "__syncwarp();\n            if (lane == 0) {\n                store_box"),
    "dQ's place is taken before it is read": (
        "plain", "await_stores_read<0>();\n                arrive_expecting(barrier, PATCH",
        "arrive_expecting(barrier, PATCH"),
    "patches are columns where they are rows": ("plain", "BY_COLUMNS ? patch * SLAB : 0, share", "patch * SLAB, share"),
}  # fmt: skip


BROKEN_PAIRED = {
    "": ("", ""),
    "the other block may not have begun": ("cluster_meets();", "__syncthreads();"),
    "the other's dS is not waited for": (
        "if constexpr (PAIRED)\n                await(barriers + DS_CAME, at.parity);", ""),
    "dS is sent before it is there": ("await(barriers + DS_READY, parity);", ""),
    "dS is sent where it is still read": ("            await(barriers + DS_FREE, parity ^ 1);\n", ""),
    "dS is not fenced": (
        "await(barriers + DS_READY, parity);\n        fence_shared();", "await(barriers + DS_READY, parity);"),
    "dS is fenced before it is there": (
        "await(barriers + DS_READY, parity);\n        fence_shared();",
        "fence_shared();\n        await(barriers + DS_READY, parity);"),
    "own dS is not fenced": ("fence_shared();\n            if constexpr (APART) {", "if constexpr (APART) {"),
    "dQ comes where dS is still sent from": (
        "else if (mine == 0)\n                    await(barriers + DS_SENT, at.parity);", ""),
    "dQ comes where the other half of dS is not": ("else if (mine == 0)", "else if (mine == 1)"),
    "nobody says that dS was sent": ("arrive_there(barriers + DS_SENT, there);", ";"),
    "it is said before dS was sent": ("await(barriers + DS_CAME, parity);\n        arrive_there", "arrive_there"),
    "dS comes where dQ is still added from": (
        "await(barriers + DQ_READ + !given, at.parity ^ 1);",
        "if (!given) await(barriers + DQ_READ + 1, at.parity ^ 1);"),
    "dQ comes where dQ is still added from": (
        "await(barriers + DQ_READ + !given, at.parity ^ 1);", "if (given) await(barriers + DQ_READ, at.parity ^ 1);"),
    "dS is given back while it is read": (
        "await_products<1>();  // dQ\n            if (PAIRED &&", "if (PAIRED &&"),
    "dS is given back to a block that has ended": ("lane == 0 && steps > 1)", "lane == 0)"),
    "Q is given back early": (
        "await_products<1>();\n                arrive_as_warp(barriers + READ + stage, lane);",
        "arrive_as_warp(barriers + READ + stage, lane);"),
    "the other's dS is not expected": ("BC * TO_D * 2 + BC * BR * 2);", "BC * TO_D * 2);"),
    "the other's keys are one's own": ("work.j0 ^ BC, work.h", "work.j0, work.h"),
    "the other's dS meets one's own keys": (
        "moved(K_there_across, (n - BC / SUM) * ROW_STEP)", "moved(K_across, (n - BC / SUM) * ROW_STEP)"),
    "own rows come first": ("rank_in_cluster() == (steps & 1)", "rank_in_cluster() != (steps & 1)"),
    "dQ is added to the other's": ("(PAIRED ? rank_in_cluster() : 0);", "(PAIRED ? rank_in_cluster() ^ 1 : 0);"),
    "dK comes where K is still read": (
        "else\n            all_meet();\n    } else {", "else\n            ;\n    } else {"),
    "delta has one part alone, thrice": ("rest -= __uint_as_float(bits & 0xFFFF0000u);", ""),
    "delta is the other stage's": (
        "minus_one(minus, rows_of_delta(stage));", "minus_one(minus, rows_of_delta(!stage));"),
    "halves of rows are as in the first stage": ("copy_bulk(rows + (n ^ 1) *", "copy_bulk(rows + n *"),
    "lse is in other units": ("lse * LOG2E;", "lse;"),
    "lse is the other stage's": (
        "on_chip + AT_LSE + stage * BR * 4, record", "on_chip + AT_LSE + !stage * BR * 4, record"),
    "lse and delta are not expected": ("BR * TO_V * 2 + PAIRED * RECORD_BYTES", "BR * TO_V * 2"),
    "records of other rows": ("h, 0) + i0 / BR), on_chip,", "h, 0) + (i0 / BR ^ 1)), on_chip,"),
    "rows that nobody writes are left": (
        "((uint4*)(on_chip + AT_DELTA))[threadIdx.x - WARPGROUP] = make_uint4(0, 0, 0, 0);", ""),
}  # fmt: skip


BROKEN_PAIRED_CAUSAL = {
    "": ("causal", "", ""),
    "rows see one key less": ("causal", "limit.x = first_seen + first_key", "limit.x = first_seen + 1 + first_key"),
    "rows see one key more": ("causal", "limit.x = first_seen + first_key", "limit.x = first_seen - 1 + first_key"),
    "the mask is that of the other rows": (
        "causal", "(rank_in_cluster() != given) * BR - 2", "(rank_in_cluster() == given) * BR - 2"),
    "rows are taken for plain": ("causal", "plain = first_seen + BC - 1;", "plain = first_seen;"),
    "rows are taken for plain, offsets": ("causal, offsets", "plain = first_seen + BC - 1;", "plain = first_seen + 1;"),
    "each block begins with its own rows": ("causal", "work.j0 / KEYS * KEYS - s.offset", "work.j0 - s.offset"),
    "rows begin anywhere": ("causal, offsets", "work.i_high) / ROWS * ROWS;", "work.i_high) / BR * BR;"),
    "no key is before the first row": ("causal, everything visible", "-BC, q_length) : 0;", "0, q_length) : 0;"),
    "blocks of rows are not even": (
        "causal, odd blocks of both", "(call.Tq + ROWS - 1) / ROWS << PAIRED", "(call.Tq + BR - 1) / BR"),
    "records of rows that do not exist are the next head's": (
        "causal, odd blocks of both", "+ 2 * BR - 1) / (2 * BR) * 2;", "+ BR - 1) / BR;"),
    "a block of rows has one step": (
        "causal, odd blocks of both", "work.i_low + STEP_ROWS - 1) / STEP_ROWS * (1 << PAIRED)",
        "work.i_low + BR - 1) / BR"),
    "nobody has rows, and K is copied": (
        "causal, nothing visible", "    if (work.steps == 0)\n        return;\n    arrive_expecting",
        "    arrive_expecting"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_PAIRED_CAUSAL)
def test_broken_kernels_in_pairs_under_a_mask_are_caught(name, device_by_name, paired, taken, monkeypatch):
    check_caught(*BROKEN_PAIRED_CAUSAL[name], PAIRED, monkeypatch, taken)


def test_a_row_of_nan_that_is_not_kept_apart_is_caught(device_by_name, paired, zeros, monkeypatch):
    break_backward(monkeypatch, "const bool is_nan = delta != delta;", "const bool is_nan = false;")
    with pytest.raises(AssertionError):
        check_a_row_of_nan(zeros, "dlse")


@pytest.mark.parametrize("name", BROKEN_PAIRED)
def test_broken_kernels_in_pairs_are_caught(name, paired, taken, monkeypatch):
    """Forwards: then the first block of a cluster may be far ahead of those threads of the second that compute."""
    emulator.install(monkeypatch)
    old, new = BROKEN_PAIRED[name]
    check_caught("four clusters", old, new, PAIRED, monkeypatch, taken)


@pytest.mark.parametrize("name", BROKEN_FUSED)
def test_broken_kernels_that_prepare_and_finish_are_caught(name, device_by_name, fused, taken, monkeypatch):
    check_caught(*BROKEN_FUSED[name], FUSED, monkeypatch, taken)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_are_caught(name, device_by_name, taken, monkeypatch):
    check_caught(*BROKEN[name], CALLS | PACKED, monkeypatch, taken)


@pytest.mark.parametrize("old", ["", "await(barriers + DS_READ + 1 % S_STAGES, (taken - 1) / S_STAGES & 1);"])
def test_K_is_not_overwritten_while_dQ_is_computed_from_it(old, device_by_name, taken, monkeypatch):
    """By a warpgroup that is slow."""
    there = "await(barriers + DS_THERE + stage, dS_parity(work, steps));"
    break_backward(monkeypatch, there, there + " for (int n = 0; n < 1000; n++) __syncwarp();")
    break_backward(monkeypatch, old, old and ";")
    case = prepared(CALLS["one tile, d = 64"], "bfloat16")
    with pytest.raises(AssertionError) if old else nullcontext():
        check(case, case.reference())
    assert taken


def test_a_kernel_that_does_not_hide_dS_is_caught(device_by_name, monkeypatch):
    behind = "of_row(rows_delta, delta, n);\n                "  # where dS is computed
    break_backward(monkeypatch, behind + "if (hides)", behind + "if (false)")
    with pytest.raises(AssertionError):
        test_what_overflows_is_hidden_where_it_is_not_seen(None, [1])


def test_pairs_that_do_not_hide_dS_are_caught(device_by_name, paired, zeros, monkeypatch):
    behind = "of_row(rows_delta, delta, n);\n                "
    break_backward(monkeypatch, behind + "if (hides)", behind + "if (false)")
    with pytest.raises(AssertionError):
        test_what_overflows_is_hidden_in_pairs(None, None, [1], zeros)
