"""Packed sequences: what is launched for them where lengths are on the device, and which rows are cleared."""

import ctypes
import weakref

import emulator
import numpy as np
import pytest
from test_cupy_raw_emulated import on_device
from test_forward import make

from rawflash import problem, sm90
from rawflash.backends.cupy_raw import launch
from rawflash.backends.cupy_raw.fa2_backward import QUARTERS
from rawflash.tiles import Divided

pytestmark = pytest.mark.emulated


@pytest.fixture
def launched(monkeypatch):
    """(kernel, blocks of threads) of each launch, none of which runs."""
    emulator.install(monkeypatch)
    found = []
    monkeypatch.setattr(launch.Launcher, "run", lambda self, kernel, blocks, *_: found.append((kernel, blocks)))
    return found


def packed(lengths, small_on_device, **options):
    case = make(lead=(), Hq=4, Hkv=2, Tq=sum(lengths), **options)
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    case.cu_seqlens = starts, starts
    return on_device(case, small_on_device)


def of_main_kernels(launched, lengths, small_on_device, **options):
    """Blocks of threads of a forward and a backward call, by kernel."""
    launched.clear()
    problem._MEMO.clear()
    case = packed(lengths, small_on_device, **options)
    case.backward(*case.forward())
    return {kernel: blocks for kernel, blocks in launched if not kernel.startswith("clear_")}


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_launched_does_not_grow_with_sequences(launched, monkeypatch, d, causal):
    """A sequence more is one block more at most, of each size, and head; not as many as the longest could have. Where
    the lengths are known it is the same: kernels find out themselves."""
    monkeypatch.setattr(sm90, "_divided_by_heads", lambda *_: Divided())
    how = dict(dtype="bfloat16", d=d, causal=causal)
    one, many = (of_main_kernels(launched, lengths, True, **how) for lengths in ([2048], [128] * 16))
    assert one.keys() == many.keys() == {"fa2_forward", "row_deltas", "fa2_backward_keys", "fa2_backward_finish"}
    assert many.pop("fa2_forward") <= sm90.WGMMA_PROCESSORS  # these take one piece after the other
    for kernel, blocks in many.items():
        each = QUARTERS if kernel == "fa2_backward_finish" else 1
        assert blocks <= one[kernel] + 15 * 4 * each, kernel
    assert many["fa2_backward_keys"] == 2 * (2048 // (64 if d == 256 else 128) + 16)
    known = of_main_kernels(launched, [128] * 16, False, **how)
    assert known.pop("fa2_forward") <= sm90.WGMMA_PROCESSORS and known == many


def test_the_list_of_pieces_to_be_done_again_is_as_long_as_the_line(launched, monkeypatch):
    """It has an entry for each warp of each place, not of each block that a sequence could have."""
    sizes = []
    workspace = launch.Launcher.workspace

    def kept(self, count, zero=False):
        sizes.append(count)
        return workspace(self, count, zero)

    monkeypatch.setattr(launch.Launcher, "workspace", kept)
    packed([128] * 16, True, dtype="bfloat16", d=128).forward()
    assert sizes == [(2048 // 128 + 16) * 4 * 8]


@pytest.mark.parametrize("B", [0, 1, 3])
def test_kernels_that_clear_write_padding_alone(monkeypatch, B):
    """In the emulator memory begins as what was there before: it stays where sequences lie."""
    emulator.install(monkeypatch)
    run = launch.Launcher.run
    monkeypatch.setattr(launch.Launcher, "run", lambda self, kernel, *how: (
        run(self, kernel, *how) if kernel.startswith("clear_") else None))  # fmt: skip
    case = make(lead=(), Hq=2, Hkv=1, Tq=314, dtype="float32", d=40)
    starts = np.array([5, 200, 200, 305][: B + 1], np.int32)
    case.cu_seqlens = starts, starts
    case = on_device(case, B % 2 == 1)
    out, lse = case.forward()
    gradients = case.backward(out, lse)
    inside = np.zeros(314, bool)
    inside[starts[0] : starts[-1]] = True
    stale = np.asarray(emulator.ndarray(1, np.float32)).view(np.int32)
    for array in (out, *gradients):
        rows = np.asarray(array)
        assert (rows[:, ~inside] == 0).all()
        assert (rows[:, inside].view(np.int32) == stale).all()
    assert (np.asarray(lse)[:, ~inside] == -np.inf).all()
    assert (np.asarray(lse)[:, inside].view(np.int32) == stale).all()


def test_the_line_ends_with_the_last_sequence_where_starts_are_known(launched):
    """In arrays of more rows than are used, neither blocks of threads nor shares of dK and dV are for all of these."""
    case = make(lead=(), Hq=4, Hkv=1, Tq=8192, dtype="bfloat16", d=128)
    case.cu_seqlens = (np.array([0, 512]),) * 2
    case = on_device(case)
    case.backward(*case.forward())
    found = dict(launched)
    assert found["row_deltas"] == 4 * (512 // 64 + 1) and found["fa2_backward_keys"] <= 16 * (512 // 128 + 1)


@pytest.mark.parametrize("small_on_device", [False, True])
def test_in_a_fixed_order_as_much_is_launched(launched, monkeypatch, small_on_device):
    """And, where starts are on the device, a kernel that makes them rise: others wait for each block of keys."""
    monkeypatch.setattr(sm90, "_divided_by_heads", lambda *_: Divided())
    lengths, how = [128] * 16, dict(dtype="bfloat16", d=128)
    found = of_main_kernels(launched, lengths, small_on_device, **how)
    del found["fa2_forward"]
    case = packed(lengths, small_on_device, **how)
    results = case.forward()
    launched.clear()
    case.backward(*results, deterministic=True)
    in_order = {kernel: blocks for kernel, blocks in launched if not kernel.startswith("clear_")}
    assert in_order == found | ({"rising_starts": 2} if small_on_device else {})


FALLEN = {
    "as they should be": [0, 100, 100, 330],
    "one falls": [0, 300, 40, 330],
    "all fall": [330, 200, 100, 0],
    "outside": [-7, 5000, 128, 2**40],
    "many": list(np.random.default_rng(3).integers(-50, 400, 600)),
}


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("name", FALLEN)
def test_starts_are_made_to_rise(monkeypatch, name, dtype):
    """Kernels find starts that never fall, so that a call in a fixed order ends, whatever tables on a device say."""
    emulator.install(monkeypatch)
    run, workspace, found, alive = launch.Launcher.run, launch.Launcher.workspace, {}, {}

    def made(self, *how):
        array = workspace(self, *how)
        alive[array.data.ptr] = weakref.ref(array)
        return array

    def running(self, kernel, blocks, words, *how):
        run(self, kernel, blocks, words, *how)
        if kernel == "rising_starts":
            at, count = words[launch._WORD["sums"]], len(given)
            found["written"] = [at, 8, at + 8 * count, 8]
            both = np.ctypeslib.as_array((ctypes.c_int64 * (2 * count)).from_address(at))
            found["starts"] = both.reshape(2, count).copy()
        elif kernel == "fa2_backward_keys":
            parts = (f"cu_seqlens_{of}.{part}" for of in "qk" for part in ("data", "bytes"))
            found["read"] = [words[launch._WORD[part]] for part in parts]
        if "written" in found:  # nobody else may have its memory before the last kernel is launched
            assert alive[found["written"][0]]() is not None, kernel

    monkeypatch.setattr(launch.Launcher, "run", running)
    monkeypatch.setattr(launch.Launcher, "workspace", made)
    case = make(lead=(), Hq=2, Hkv=1, Tq=330, Tk=290, dtype="bfloat16", d=64)
    limits = np.iinfo(dtype)
    given = np.clip(np.array(FALLEN[name]), limits.min, limits.max).astype(dtype)
    case.cu_seqlens = given, given
    case = on_device(case, True)
    case.backward(*case.forward(), deterministic=True)
    for starts, rows in zip(found["starts"], (330, 290), strict=True):
        assert (starts == np.maximum.accumulate(np.clip(given.astype(np.int64), 0, rows))).all()
    assert found["read"] == found["written"]
