"""Calls with GPU arrays, up to the kernel: no GPU is needed, and what is not memory must not be read.

:class:`Interface`, :class:`CuPy` and :class:`Torch` are arrays of three kinds whose address is mapped
nowhere: whatever reads an element of them ends the process. The check of a call with them must say what
the check of the same call with NumPy arrays says. Further down a small CuPy made of NumPy takes the place
of the device, its memory the host's, so that copies, results and ``merge_attention`` run as well.

``python tests/test_gpu_arrays.py`` prints what a warm call costs on the host, by part.
"""

import dataclasses
import enum
import gc
import itertools
import sys
import threading
import time
import types
import weakref

import ml_dtypes
import numpy as np
import pytest

import rawflash as rf
from rawflash import api, arrays, hardware, problem
from rawflash import masks as M
from rawflash.backends import lookup, why_not
from rawflash.hardware import Chip
from rawflash.problem import Problem, check

B, HQ, HKV, TQ, TK, D, DV = 2, 4, 2, 5, 7, 16, 8
DEVICE_STRIDE = 1 << 44  # addresses of device n start at (n + 1) * this
_next = itertools.count(1)


def new_address(device=0, offset=0):
    return (device + 1) * DEVICE_STRIDE + (next(_next) << 24) + offset


class Interface:
    """An array that speaks CUDA's array interface; ``like`` gives shape, strides and dtype."""

    def __init__(self, like, device=0, offset=None, read_only=False, **more):
        offset = like.ctypes.data % 16 if offset is None else offset
        self.shape, self.strides, self.dtype = like.shape, like.strides, like.dtype
        self.address, self.device_number = new_address(device, offset), device
        self.__cuda_array_interface__ = {
            "shape": like.shape,
            "strides": like.strides,
            "typestr": like.dtype.str,
            "data": (self.address, read_only),
            "version": 3,
            **more,
        }


class CuPy:
    """As much of a CuPy array as the check looks at."""

    __module__ = "cupy"

    def __init__(self, like, device=0, offset=None):
        offset = like.ctypes.data % 16 if offset is None else offset
        self.shape, self.strides, self.dtype = like.shape, like.strides, like.dtype
        self.address = new_address(device, offset)
        self.data = types.SimpleNamespace(ptr=self.address, device_id=device)


class TorchDtype:
    """PyTorch's dtypes are known by their names here, so PyTorch need not be installed."""

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"torch.{self.name}"


TORCH_DTYPES = {}


class Torch:
    """As much of a PyTorch tensor on a GPU as the check looks at."""

    __module__ = "torch"
    is_cuda, requires_grad = True, False

    def __init__(self, like, device=0, offset=None):
        offset = like.ctypes.data % 16 if offset is None else offset
        self.shape, self._strides = like.shape, tuple(s // like.itemsize for s in like.strides)
        self.dtype = TORCH_DTYPES.setdefault(like.dtype.name, TorchDtype(like.dtype.name))
        self.address, self.device_number = new_address(device, offset), device

    def is_neg(self):
        return False

    def stride(self):
        return self._strides

    def data_ptr(self):
        return self.address

    def get_device(self):
        return self.device_number


KINDS = [Interface, CuPy, Torch]
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """An empty memo, and a driver that knows the device of an address."""
    monkeypatch.setattr(problem, "_MEMO", {})
    monkeypatch.setattr(arrays, "device_of", lambda address: address // DEVICE_STRIDE - 1)


def arr(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def strided(*shape, dtype=np.float32):
    """Rows of a wider array: the last axis is contiguous, nothing else is."""
    return np.zeros((*shape[:-1], 2 * shape[-1]), dtype)[..., : shape[-1]]


def tokens(*shape, dtype=np.float32):
    """A (B, T, H, d) array seen as (B, H, T, d)."""
    return np.zeros((*shape[:-3], shape[-2], shape[-3], shape[-1]), dtype).swapaxes(-3, -2)


def forward(lead=(B,), dtype=np.float32, make=arr, **options):
    shapes = dict(q=(HQ, TQ, D), k=(HKV, TK, D), v=(HKV, TK, DV))
    return {name: make(*lead, *shape, dtype=dtype) for name, shape in shapes.items()} | options


def backward(lead=(B,), dtype=np.float32, make=arr, **options):
    statistic = np.float64 if dtype == np.float64 else np.float32
    call = forward(lead, dtype, make, **options)
    call |= {name: make(*lead, HQ, TQ, DV, dtype=dtype) for name in ("dout", "o")}
    call |= {name: arr(*lead, HQ, TQ, dtype=statistic) for name in ("lse", "dlse")}
    return call | dict(direction="backward")


def varlen(**options):
    call = dict(q=arr(HQ, 9, D), k=arr(HKV, 11, D), v=arr(HKV, 11, DV), cu_seqlens_q=[0, 4, 9], cu_seqlens_k=[0, 5, 11])
    return call | dict(varlen=True) | options


SEGMENTS = M.Segments(np.zeros((1, TQ), int), np.zeros((B, TK), int))
CALLS = {
    "plain": forward(),
    "float16": forward(dtype=np.float16),
    "float64": forward(dtype=np.float64),
    "causal": forward(causal=True, window=(3, None)),
    "one head": {n: a[0, 0] for n, a in forward().items()},
    "no batch": forward(()),
    "five axes": forward((3, B)),
    "six axes": forward((1, 3, B)),
    "rows of wider arrays": forward(make=strided),
    "tokens first in memory": forward(make=tokens),
    "bthd": dict(q=arr(B, TQ, HQ, D), k=arr(B, TK, HKV, D), v=arr(B, TK, HKV, DV), layout="bthd"),
    "bthd, five axes": dict(q=arr(3, B, TQ, HQ, D), k=arr(3, B, TK, HKV, D), v=arr(3, B, TK, HKV, DV), layout="bthd"),
    "reversed rows": {n: a[:, :, ::-1] for n, a in forward().items()},
    "broadcast batch": forward() | dict(k=np.broadcast_to(arr(1, HKV, TK, D), (B, HKV, TK, D))),
    "no batch entries": forward((0,)),
    "no queries": forward() | dict(q=arr(B, HQ, 0, D)),
    "no keys": forward() | dict(k=arr(B, HKV, 0, D), v=arr(B, HKV, 0, DV)),
    "lengths": forward(q_lengths=[5, 2], kv_lengths=np.array([7, 0]), q_offset=[1, -3]),
    "offset": forward(q_offset=2),
    "bias": forward(bias=arr(HQ, 1, TK)),
    "bias of rows": forward(dtype=np.float16, bias=arr(B, 1, TQ, 1)),
    "bias, broadcast by strides": forward(bias=np.broadcast_to(arr(TQ, 1), (B, HQ, TQ, TK))),
    "alibi": forward(alibi_slopes=[1.0, 0.5, 0.25, 0.125], softcap=3.0),
    "alibi (B, Hq)": forward(alibi_slopes=np.ones((B, HQ), np.float32)),
    "sinks": forward(sinks=arr(HQ), dropout=0.5, seed=7),
    "boolean mask": forward(mask=np.ones((B, 1, TQ, TK), bool)),
    "mask object": forward(mask=SEGMENTS & M.PrefixLM([3, 4])),
    "out": forward(out=arr(B, HQ, TQ, DV), return_lse=True),
    "out of wider rows": forward(out=strided(B, HQ, TQ, DV)),
    "options": forward(scale=0.5, deterministic=True, algorithm="fa1", sram=65536),
    "numpy options": forward(causal=np.True_, scale=np.float32(0.5), seed=np.int64(3), window=[np.int32(1), None]),
    "varlen": varlen(),
    "varlen, bthd": varlen(layout="bthd") | dict(q=arr(9, HQ, D), k=arr(11, HKV, D), v=arr(11, HKV, DV)),
    "varlen, offsets": varlen(q_offset=np.array([1, 2]), causal=True, alibi_slopes=np.ones(HQ)),
    "backward": backward(),
    "backward, six axes": backward((1, 3, B)),
    "backward, strided": backward(make=tokens),
    "backward of all": backward(bias=arr(TQ, TK), sinks=arr(HQ), wrt=["sinks", "q", "bias"]),
    "backward, float64": backward(dtype=np.float64),
}
EITHER = ("alibi_slopes", "q_lengths", "kv_lengths", "q_offset", "cu_seqlens_q", "cu_seqlens_k")


def on_device(call, kind, either=False):
    """The call with its arrays on the device; ``either``: those too that may be on the host."""

    def move(name, value):
        if either and name in EITHER and isinstance(value, (list, np.ndarray)):
            return kind(np.asarray(value))
        moves = isinstance(value, np.ndarray) and name not in EITHER
        return kind(value) if moves else value

    return {name: move(name, value) for name, value in call.items()}


def host_result(call):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problem, "_MEMO", {})  # how many device calls are kept is counted
        made, x = check(**call, backend="numba_cpu")
    return dataclasses.replace(made, backend="cupy_raw", boxes=problem._have_boxes(x)), x


MATRICES = ("q", "k", "v", "dout", "o", "lse", "dlse", "bias", "sinks", "target")


def assert_same(gpu, cpu, but=()):
    """Two results of ``check`` say the same but for memory."""
    (gpu_problem, x), (cpu_problem, y) = gpu, cpu
    assert gpu_problem == cpu_problem
    for name in MATRICES:
        a, b = getattr(x, name), getattr(y, name)
        assert (a is None) == (b is None), name
        if a is not None and name not in but:
            assert (a.shape, a.strides, a.dtype) == (b.shape, b.strides, b.dtype), name
    for name in ("packed", "layout", "user_shapes", "return_lse", "wrt", "copied", "offset_given"):
        assert getattr(x, name) == getattr(y, name), name
    for name in ("q_starts", "k_starts"):
        np.testing.assert_array_equal(getattr(x, name), getattr(y, name))


@kinds
@pytest.mark.parametrize("name", CALLS)
def test_same_as_on_the_host(name, kind):
    """Every shape, stride, dtype, option and host value is what NumPy arrays give; addresses are the arrays'."""
    host, call = CALLS[name], on_device(CALLS[name], kind)
    gpu, cpu = check(**call), host_result(host)
    assert_same(gpu, cpu)
    x, y = gpu[1], cpu[1]
    assert x.device == 0 and x.kind == ("torch" if kind is Torch else "cupy") and x.out is call.get("out")
    assert x.addresses == {n: a.address for n, a in call.items() if isinstance(a, kind)}
    for name in ("q_offset", "q_lengths", "kv_lengths"):
        np.testing.assert_array_equal(getattr(x.visibility, name), getattr(y.visibility, name))
    if y.alibi_slopes is not None:
        np.testing.assert_array_equal(x.alibi_slopes, y.alibi_slopes)
    if "mask" in x.addresses:
        assert x.visibility.mask.array.strides == y.visibility.mask.array.strides
        with pytest.raises(TypeError, match="on a GPU"):
            x.visibility.mask.tile(0, 0, 0, 1, 0, 1, 0)
    assert "DeviceView(" in repr(x), "can be shown"
    for name in MATRICES:
        array = getattr(x, name)
        if name in x.addresses and array.size:
            assert array.ctypes.data % 16 == x.addresses[name] % 16


@kinds
@pytest.mark.parametrize("name", CALLS)
def test_the_same_call_again(name, kind):
    """A second call is a hit: the same problem and memo, its own addresses, and nothing of the first call's arrays."""
    first, second = (on_device(CALLS[name], kind) for _ in range(2))
    problem_1, x = check(**first)
    assert len(problem._MEMO) == 1
    problem_2, y = check(**second)
    assert len(problem._MEMO) == 1 and problem_2 == problem_1 and y.memo is x.memo and y is not x
    assert y.addresses == {n: a.address for n, a in second.items() if isinstance(a, kind)}
    assert y.out is second.get("out")
    per_call = ("addresses", "out", "keep", "borrowed", "waits")
    for field in dataclasses.fields(y):
        if field.name not in per_call:
            assert getattr(y, field.name) is getattr(x, field.name), field.name
    kept = repr([vars(entry[1]).keys() for entry in problem._MEMO.values()])
    assert not any(f"'{field}'" in kept for field in per_call)


# On the host those are kept that have no arrays beside q, k, v, dout, o, lse, dlse and lengths, nor NumPy's numbers.
KEPT_ON_HOST = {
    "plain", "float16", "float64", "causal", "one head", "no batch", "five axes", "six axes", "rows of wider arrays",
    "tokens first in memory", "bthd", "bthd, five axes", "reversed rows", "broadcast batch", "no batch entries",
    "no queries", "no keys", "lengths", "offset", "options", "backward", "backward, six axes", "backward, strided",
    "backward, float64",
}  # fmt: skip


def elsewhere(call):
    """The call with its matrices in other memory, of the same strides."""

    def move(name, array):
        if name not in ("q", "k", "v", "dout", "o", "lse", "dlse", "out"):
            return array
        low, high = arrays._extent(array)
        return np.ndarray(array.shape, array.dtype, bytearray(high - low), -low, array.strides)

    return {name: move(name, value) for name, value in call.items()}


def same(a, b):
    if isinstance(a, M.Visibility):
        return all(same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    if not isinstance(a, np.ndarray):
        return a == b if not isinstance(a, M.Mask) else a is b or repr(a) == repr(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.strides == b.strides and np.array_equal(a, b)


def checked_anew(call):
    """What ``check`` says of a call is what it says where it remembers nothing, but for the memo."""
    made, x = check(**call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problem, "_MEMO", {})
        fresh, y = check(**call)
    assert made == fresh
    for field in dataclasses.fields(x):
        if field.name != "memo":
            assert same(getattr(x, field.name), getattr(y, field.name)), field.name
    for matrix in ("q", "k", "v", "dout", "o", "lse", "dlse"):
        array = getattr(x, matrix)
        if array is not None and array.size:
            assert array.ctypes.data == getattr(y, matrix).ctypes.data or matrix in x.copied
    return x


@pytest.mark.parametrize("name", CALLS)
def test_a_call_like_an_earlier_one_on_the_host(name):
    """What is remembered is what a new check finds; the matrices are those of the call."""
    memo = check(**elsewhere(CALLS[name]))[1].memo
    x = checked_anew(elsewhere(CALLS[name]))
    assert len(problem._MEMO) == (name in KEPT_ON_HOST) and (x.memo is memo) == (name in KEPT_ON_HOST)


def test_matrices_on_the_host_are_told_apart():
    """By shape, dtype, strides and alignment; what has to be copied is, each time."""
    def view(array, at, *strides):
        raw = np.ones(4 * array.nbytes, np.uint8)
        return np.ndarray(array.shape, array.dtype, raw[at:], 0, strides or array.strides)

    plain = CALLS["plain"]["k"]
    size = plain.itemsize
    wide = np.multiply(plain.strides, 2)
    made = [
        view(plain, 0), view(plain, 8), view(plain, 0, *wide[:3], size), view(plain, 0, *wide), view(plain, 1),
        view(plain.view(np.int32), 0).view(">f4"), view(plain, 0)[:, :, ::-1],
    ]  # fmt: skip
    for k in [*made, *made]:
        checked_anew(CALLS["plain"] | dict(k=k))
    copied = [bool(check(**CALLS["plain"] | dict(k=k))[1].copied) for k in made]
    assert copied == [False, False, False, True, True, True, False] and len(problem._MEMO) == 3
    with pytest.raises(rf.ProblemError, match="k has dtype float64"):
        check(**CALLS["plain"] | dict(k=plain.astype(np.float64)))
    with pytest.raises(rf.ProblemError, match="v has shape"):
        check(**CALLS["plain"] | dict(k=arr(B, HKV, TK + 1, D)))


def test_lengths_and_seeds_are_those_of_the_call():
    """A decoding has other lengths at each step, a training other seeds: both are looked at, and nothing else is."""
    def step(q_lengths, kv_lengths, q_offset, seed=1):
        options = dict(q_lengths=q_lengths, kv_lengths=kv_lengths, q_offset=q_offset)
        return check(**forward(dropout=0.5, seed=seed, **options))

    first, x = step([5, 2], [7, 0], [1, -3])
    again, y = step([1, 0], [2, 6], [0, 9], seed=2)
    assert y.memo is x.memo and (first.seed, again.seed) == (1, 2)
    assert dataclasses.replace(again, seed=1) == first
    for made, wanted in ((x, ([5, 2], [7, 0], [1, -3])), (y, ([1, 0], [2, 6], [0, 9]))):
        v = made.visibility
        assert (v.q_lengths.tolist(), v.kv_lengths.tolist(), v.q_offset.tolist()) == wanted
    ends = check(**forward(dropout=0.5, kv_lengths=[7, 3]))[1], check(**forward(dropout=0.5, kv_lengths=[2, 1]))[1]
    assert ends[0].memo is ends[1].memo is not x.memo
    assert [made.visibility.q_offset.tolist() for made in ends] == [[2, -2], [-3, -4]]
    assert len(problem._MEMO) == 2
    for wrong in (([6, 2], [7, 0], [0, 0]), ([5, 2], [8, 0], [0, 0]), ([5, 2], [7, -1], [0, 0]),
                  ([5, 2], [7], [0, 0]), ([5, 2], [7.0, 0.0], [0, 0]), ([5, 2], [7, 0], [0.0, 0.0]),
                  ([5, 2], [7, 0], [0, 1 << 62])):  # fmt: skip
        with pytest.raises(rf.ProblemError) as known:
            step(*wrong)
        problem._MEMO.clear()
        with pytest.raises(rf.ProblemError) as new:
            step(*wrong)
        assert str(known.value) == str(new.value)
        step([5, 2], [7, 0], [1, -3])
    for seed in (-1, True, 0.5):
        with pytest.raises(rf.ProblemError, match="seed"):
            step([5, 2], [7, 0], [1, -3], seed)
    with pytest.raises(rf.ProblemError, match="kv_lengths is a GPU array"):
        step([5, 2], CuPy(np.array([7, 0])), [1, -3])


def test_what_is_no_plain_number_or_word_is_not_remembered_on_the_host():
    """Of tuples, too: numbers of a class of its own, which hold more than a key could tell."""
    class Width(enum.IntEnum):
        SHORT, LONG = 1, 4

    class Of(str, enum.Enum):
        Q, K = "q", "k"

    for width in Width:
        assert check(**forward(window=(width, 0)))[0].window == (int(width), 0)
    for name in Of:
        assert check(**backward(wrt=(name,)))[1].wrt == (name.value,)
    for wrong in (dict(window=(object(), 0)), dict(window=(1, 0.5)), dict(window=([1], 0))):
        with pytest.raises(rf.ProblemError, match="window"):
            check(**forward(**wrong))
    assert not problem._MEMO
    for width in (1, 4):
        for window in ((width, 0), [width, 0]):
            assert check(**forward(window=window))[0].window == (width, 0)
    offsets = [check(**forward(q_offset=n))[1] for n in (3, 5, -2)]
    assert [x.visibility.q_offset.tolist() for x in offsets] == [[3] * B, [5] * B, [-2] * B]
    assert len(problem._MEMO) == 5 and offsets[0].memo is offsets[2].memo
    for wrong in (True, 0.5, 1 << 62):
        with pytest.raises(rf.ProblemError, match="q_offset"):
            check(**forward(q_offset=wrong))


def test_arrays_of_an_earlier_call_are_given_back():
    call = backward(kv_lengths=np.array([7, 3]))
    held = [weakref.ref(value) for value in call.values() if isinstance(value, np.ndarray)]
    check(**call)
    assert len(problem._MEMO) == 1 and len(held) == 8
    del call
    gc.collect()
    assert not any(ref() is not None for ref in held)


@kinds
@pytest.mark.parametrize("name", ["lengths", "alibi (B, Hq)", "varlen", "varlen, offsets"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_values_on_the_device(name, kind, dtype):
    """Lengths, offsets and cu_seqlens there: bounds here, the addresses say where the values are."""
    host = {
        n: np.asarray(a).astype(dtype) if n in EITHER and n != "alibi_slopes" else a for n, a in CALLS[name].items()
    }
    call = on_device(host, kind, either=True)
    made, x = check(**call)
    assert x.addresses == {n: a.address for n, a in call.items() if isinstance(a, kind)}
    given = [n for n in EITHER if n in host and n != "alibi_slopes"]
    assert set(x.views) == set(given) and all(x.views[n].dtype == dtype for n in given)
    assert all(x.views[n].shape == host[n].shape for n in given)
    rows_q, rows_k = x.q.shape[2], x.k.shape[2]
    assert (made.Tq, made.Tk, made.B) == (rows_q, rows_k, B)
    assert x.visibility.q_lengths.tolist() == [rows_q] * B and x.visibility.kv_lengths.tolist() == [rows_k] * B
    assert x.q_starts.tolist() == x.k_starts.tolist() == [0] * B
    assert made.ragged == (name == "lengths") and x.offset_given == ("q_offset" in host)
    if "alibi_slopes" in host:
        assert x.alibi_slopes.shape == (B, HQ) and x.alibi_slopes.dtype == host["alibi_slopes"].dtype
    again = check(**on_device(host, kind, either=True))[1]
    assert again.memo is x.memo and again.addresses != x.addresses


def test_one_of_two_on_the_device():
    call = varlen() | dict(cu_seqlens_q=CuPy(np.array([0, 4, 9])), causal=True)
    made, x = check(**on_device(call, CuPy))
    assert (made.Tq, made.Tk) == (9, 6) and set(x.views) == {"cu_seqlens_q"} and not x.offset_given
    assert x.visibility.kv_lengths.tolist() == [5, 6]


@pytest.mark.parametrize("kind", [CuPy, Torch])
def test_bfloat16(kind):
    for call in (forward(dtype=ml_dtypes.bfloat16), backward(dtype=ml_dtypes.bfloat16)):
        assert_same(check(**on_device(call, kind)), host_result(call))


def test_no_strides_is_c_order():
    """The interface may leave strides out."""
    call = {name: Interface(a) for name, a in forward().items()}
    for a in call.values():
        a.__cuda_array_interface__["strides"] = None
    assert_same(check(**call), host_result(forward()))


def test_null_pointer_of_an_empty_array(monkeypatch):
    monkeypatch.setattr(arrays, "device_of", lambda address: 0)
    call = on_device(CALLS["no keys"], Interface)
    for name in "kv":
        call[name].__cuda_array_interface__["data"] = (0, False)
    assert check(**call)[1].addresses["k"] == 0


# ---- calls that are wrong --------------------------------------------------------------------------------

BAD = {
    "shape of k": dict(k=arr(B, HKV, TK, D + 1)),
    "axes of k": dict(k=arr(HKV, TK, D)),
    "dtype of k": dict(k=arr(B, HKV, TK, D, dtype=np.float16)),
    "integers": dict(q=arr(B, HQ, TQ, D, dtype=np.int32)),
    "heads": dict(q=arr(B, 3, TQ, D)),
    "no axes": dict(q=arr(D), k=arr(D), v=arr(DV)),
    "no head dimension": dict(q=arr(B, HQ, TQ, 0), k=arr(B, HKV, TK, 0)),
    "mask of scores": dict(mask=arr(TQ, TK)),
    "shape of mask": dict(mask=np.ones((TQ, TK + 1), bool)),
    "axes of mask": dict(mask=np.ones((1, 1, 1, TQ, TK), bool)),
    "mask object": dict(mask=M.Segments(np.zeros(TQ + 1, int))),
    "shape of bias": dict(bias=arr(TQ, TK + 1)),
    "dtype of bias": dict(bias=arr(TQ, TK, dtype=np.float16)),
    "shape of sinks": dict(sinks=arr(HKV)),
    "dtype of sinks": dict(sinks=arr(HQ, dtype=np.float64)),
    "shape of out": dict(out=arr(B, HQ, TQ, D)),
    "dtype of out": dict(out=arr(B, HQ, TQ, DV, dtype=np.float16)),
    "lengths too long": dict(kv_lengths=[7, 8]),
    "lengths of floats": dict(kv_lengths=[7.0, 7.0]),
    "lengths, shape": dict(q_lengths=np.array([5])),
    "offset": dict(q_offset=1.5),
    "offset, bool": dict(q_offset=True),
    "slopes, shape": dict(alibi_slopes=[1.0]),
    "slopes, dtype": dict(alibi_slopes=np.array([1, 2, 3, 4])),
    "causal": dict(causal=1),
    "causal, None": dict(causal=None),
    "return_lse": dict(return_lse=1.0),
    "window": dict(window=(True, None)),
    "window of three": dict(window=(1, 2, 3)),
    "softcap": dict(softcap=0),
    "scale": dict(scale=True),
    "dropout": dict(dropout=1.0),
    "seed": dict(seed=-1),
    "seed, bool": dict(seed=True),
    "layout": dict(layout="thbd"),
    "algorithm": dict(algorithm="fa3"),
    "backend": dict(backend="cuda"),
    "sram": dict(sram=0),
    "deterministic": dict(deterministic="yes"),
    "unknown option": dict(caussal=True),
    "wrt": dict(wrt=("q", "o")),
    "wrt without bias": dict(wrt=("bias",)),
    "direction": dict(direction="sideways"),
    "backward with out": backward() | dict(out=arr(B, HQ, TQ, DV)),
    "backward, shape of dout": backward() | dict(dout=arr(B, HQ, TQ, D)),
    "backward, dtype of lse": backward() | dict(lse=arr(B, HQ, TQ, dtype=np.float64)),
    "varlen, mask": varlen(mask=np.ones((TQ, TK), bool)),
    "varlen, falling": varlen(cu_seqlens_q=[0, 5, 4]),
    "varlen, too long": varlen(cu_seqlens_k=[0, 5, 12]),
    "varlen, another B": varlen(cu_seqlens_k=np.array([0, 11])),
    "varlen, half": varlen(cu_seqlens_k=None),
}


def message(call):
    with pytest.raises(rf.ProblemError) as caught:
        check(**call)
    return str(caught.value)


@kinds
@pytest.mark.parametrize("warm", [False, True], ids=["", "after a good call"])
@pytest.mark.parametrize("name", BAD)
def test_bad_calls_say_the_same(name, warm, kind):
    """The message is that of the call with NumPy arrays, and errors are not remembered."""
    call = forward() | BAD[name]
    if warm:
        check(**on_device(forward(), kind))
        check(**on_device(forward(causal=True, return_lse=True, window=(1, None), scale=1.0), kind))
    entries = len(problem._MEMO)
    for _ in range(2):
        assert message(on_device(call, kind)) == message(call)
    assert len(problem._MEMO) == entries


@kinds
@pytest.mark.parametrize("name", ["q_lengths", "kv_lengths", "q_offset", "cu_seqlens_q", "alibi_slopes"])
def test_shape_and_dtype_are_checked_on_the_device(name, kind):
    good = varlen() if name == "cu_seqlens_q" else forward()
    for value in (np.zeros((2, 2), np.int32), np.zeros(2, bool), np.zeros(3, "c8")):
        assert message(on_device(good | {name: kind(value)}, kind)) == message(good | {name: value})


@kinds
@pytest.mark.parametrize("name", ["k", "v", "dout", "o", "lse", "dlse"])
def test_host_array_beside_device_arrays(name, kind):
    call = on_device(backward(), kind) | {name: backward()[name]}
    assert f"{name} is a CPU array and q a GPU array" in message(call)


@kinds
@pytest.mark.parametrize(
    "extra",
    [
        dict(bias=arr(TQ, TK)),
        dict(sinks=arr(HQ)),
        dict(mask=np.ones((TQ, TK), bool)),
        dict(out=arr(B, HQ, TQ, DV)),
    ],
)
def test_host_option_beside_device_arrays(extra, kind):
    call = on_device(forward(), kind) | extra
    assert f"{next(iter(extra))} is a CPU array and q a GPU array" in message(call)


@kinds
@pytest.mark.parametrize("name", ["k", "dlse", "bias", "mask", "kv_lengths", "alibi_slopes"])
def test_devices_do_not_mix(name, kind):
    call = backward(
        bias=arr(TQ, TK), mask=np.ones((TQ, TK), bool), kv_lengths=np.array([1, 2]), alibi_slopes=np.ones(HQ)
    )
    moved = on_device(call, kind, either=True)
    assert check(**moved)[1].device == 0
    other = moved | {name: kind(call[name], device=1)}
    assert message(other) == f"{name} is on GPU 1 and q on GPU 0; expected all arrays on one device"
    everywhere = {n: kind(a, device=1) if isinstance(a, np.ndarray) else a for n, a in call.items()}
    assert check(**everywhere)[1].device == 1, "one device is in the key"


def test_masked_read_only_and_recording_arrays(monkeypatch):
    monkeypatch.setattr(arrays, "stream", lambda kind, device=None: 0)
    call = on_device(forward(), Interface)
    with pytest.raises(rf.ProblemError, match="k is a masked array"):
        check(**call | dict(k=Interface(arr(B, HKV, TK, D), mask=object())))
    out = arr(B, HQ, TQ, DV)
    assert check(**call, out=Interface(out))[1].target is not None
    with pytest.raises(rf.ProblemError, match="out is read-only"):
        check(**call, out=Interface(out, read_only=True))
    assert check(**call | dict(k=Interface(arr(B, HKV, TK, D), read_only=True)))
    call = on_device(forward(), Torch)
    call["v"].requires_grad = True
    with pytest.raises(rf.ProblemError, match=r"v requires grad.*v\.detach"):
        check(**call)
    call = on_device(forward(), Torch)
    call["q"].is_neg = lambda: True
    with pytest.raises(rf.ProblemError, match=r"q\.resolve_neg"):
        check(**call)
    call = on_device(forward(), Torch)
    with pytest.raises(rf.ProblemError, match="out is a CuPy; expected the kind"):
        check(**call, out=CuPy(out))


# ---- the memo ----------------------------------------------------------------------------------------------


def entries_after(*calls):
    """How many entries the calls make, all on CuPy arrays of one shape."""
    for options in calls:
        check(**on_device(forward() | options, CuPy))
    return len(problem._MEMO)


@pytest.mark.parametrize(
    "one, other",
    [
        (dict(causal=True), dict(causal=np.True_)),
        (dict(scale=1), dict(scale=1.0)),
        (dict(window=(1, None)), dict(window=(2, None))),
        (dict(kv_lengths=[1, 2]), dict(kv_lengths=[1, 3])),
        (dict(kv_lengths=[1, 2]), dict(kv_lengths=(1, 2))),
        (dict(kv_lengths=np.array([1, 2])), dict(kv_lengths=np.array([2, 1]))),
        (dict(kv_lengths=np.array([1, 2])), dict(kv_lengths=np.array([1, 2], np.int32))),
        (dict(alibi_slopes=[[1.0] * HQ] * B), dict(alibi_slopes=[[1.0] * HQ, [2.0] * HQ])),
        (dict(mask=M.Causal()), dict(mask=M.SlidingWindow(1, 1))),
        (dict(mask=M.Prefix(2)), dict(mask=M.Prefix(3))),
        (dict(mask=M.Prefix(2) & M.Prefix(3)), dict(mask=M.Prefix(2) | M.Prefix(3))),
        (dict(dropout=0.5), dict(dropout=0.25)),
        (dict(bias=arr(TQ, TK)), dict(bias=arr(TQ, 1))),
        (dict(q=arr(B, HQ, TQ, D)), dict(q=strided(B, HQ, TQ, D))),
        (dict(), dict(return_lse=True)),
    ],
)
def test_what_differs_has_its_own_entry(one, other):
    assert entries_after(one, other) == 2
    assert entries_after(one, other) == 2, "and is found again"


@pytest.mark.parametrize(
    "make",
    [
        lambda: dict(kv_lengths=[3, 4]),
        lambda: dict(kv_lengths=np.array([3, 4])),
        lambda: dict(alibi_slopes=np.ones((B, HQ))),
        lambda: dict(mask=M.Segments(np.arange(TQ), np.arange(TK))),
        lambda: dict(mask=M.PrefixLM(2) & M.SlidingWindow(4, None)),
        lambda: dict(mask=M.Dense(np.ones((TQ, TK), bool))),
    ],
)
def test_equal_content_is_one_entry(make):
    assert entries_after(make(), make(), make()) == 1


@pytest.mark.parametrize("name", ["kv_lengths", "q_offset"])
@pytest.mark.parametrize("make", [list, np.array], ids=["list", "array"])
def test_what_is_remembered_does_not_change(name, make):
    """The caller's own list or array may change after a call: both contents keep their own answers."""
    value = make([1, 2])

    def seen():
        visibility = check(**on_device(forward(), CuPy), **{name: value})[1].visibility
        return getattr(visibility, name).tolist()

    assert seen() == [1, 2]
    value[0] = 4
    assert seen() == [4, 2]
    value[0] = 1
    assert seen() == [1, 2] and len(problem._MEMO) == 2


def test_masks_are_taken_as_they_are_at_the_call():
    ids = np.zeros(TK, np.int64)
    mask = M.Segments(np.zeros(TQ, np.int64), ids)

    def first_id(mask):
        return int(check(**on_device(forward(), CuPy), mask=mask)[1].visibility.mask.kv_ids[0, 0])

    assert first_id(mask) == 0
    ids[0] = 9
    assert first_id(mask) == 9
    assert first_id(M.Segments(np.zeros(TQ, int), np.zeros(TK, int))) == 0


def test_what_cannot_be_a_key_is_not_kept(monkeypatch):
    class Mine(M.Causal):  # could hold anything, and look at anything
        pass

    assert entries_after(dict(mask=Mine())) == 0
    monkeypatch.setattr(problem, "MEMO_BYTES", 31)
    assert entries_after(dict(alibi_slopes=np.ones(HQ))) == 0, "too large to be compared at each call"
    x, y = (check(**on_device(forward(mask=Mine()), CuPy))[1] for _ in range(2))
    assert x.memo == y.memo == {} and x.memo is not y.memo


def test_alignment_is_in_the_key():
    """Kernels load 16 bytes at once where they may."""
    call = on_device(forward(), CuPy)
    for offset, entries in ((0, 1), (16, 1), (4, 2), (8, 3), (4, 3)):
        x = check(**call | dict(q=CuPy(arr(B, HQ, TQ, D), offset=offset)))[1]
        assert len(problem._MEMO) == entries and x.q.ctypes.data % 16 == offset % 16


def test_seed_makes_no_entry():
    for seed in (0, 1, 2**64 - 1, np.int64(5)):
        made, x = check(**on_device(forward(), CuPy), dropout=0.5, seed=seed)
        assert made.seed == seed and len(problem._MEMO) == 1
    assert check(**on_device(forward(), CuPy), dropout=0.5)[0].seed == 0 and len(problem._MEMO) == 1


def test_the_memo_is_bounded(monkeypatch):
    monkeypatch.setattr(problem, "MEMO_ENTRIES", 4)
    for n in range(20):
        check(**on_device(forward(), CuPy), scale=float(n))
        assert len(problem._MEMO) <= 4
    x = check(**on_device(forward(), CuPy), scale=19.0)[1]
    assert check(**on_device(forward(), CuPy), scale=19.0)[1].memo is x.memo, "the oldest goes first"


def test_threads(monkeypatch):
    monkeypatch.setattr(problem, "MEMO_ENTRIES", 8)
    errors = []

    def work(start):
        try:
            for n in range(200):
                scale = float((start + n) % 16)
                assert check(**on_device(forward(), CuPy), scale=scale)[0].scale == scale
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(4 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(problem._MEMO) <= 8


def test_overlapping_out_has_its_own_memo():
    """Where ``out`` must not be written to yet, what was prepared for it does not apply."""
    call = on_device(forward(), CuPy)
    out = CuPy(arr(B, HQ, TQ, DV))
    x = check(**call, out=out)[1]
    assert x.target is not None
    for name, size in (("q", 4 * B * HQ * TQ * D), ("v", 4 * B * HKV * TK * DV)):
        for at, inside in ((0, True), (size, False), (size - 16, True), (-16 * 1000, False), (-16, True)):
            out = CuPy(arr(B, HQ, TQ, DV))
            out.data.ptr = call[name].address + at
            y = check(**call, out=out)[1]
            assert (y.target is None) == inside and (y.memo is x.memo) == (not inside)
            assert y.addresses["out"] == out.data.ptr


@kinds
def test_arrays_of_the_device_that_share_memory(kind, monkeypatch):
    home = arr(4, 6)
    one, other = kind(home[:2]), kind(home[2:])
    base = one.data.ptr if kind is CuPy else one.address
    for rows, shares in ((0, True), (1, True), (2, False), (-1, True), (-2, False)):
        address = base + rows * home.strides[0]
        if kind is CuPy:
            other.data.ptr = address
        elif kind is Interface:
            other.__cuda_array_interface__["data"] = address, False
        else:
            other.address = address
        assert arrays.may_share_memory(one, other) == arrays.may_share_memory(other, one) == shares
    assert not arrays.may_share_memory(one, home)
    elsewhere = kind(home[:2], device=1)
    if kind is CuPy:
        elsewhere.data.ptr = base
    elif kind is Torch:
        elsewhere.address = base
    assert not arrays.may_share_memory(one, elsewhere)
    nothing = kind(home[1:1])  # inside of what it shares no byte with
    if kind is CuPy:
        nothing.data.ptr = base + 8
    elif kind is Interface:
        nothing.__cuda_array_interface__["data"] = base + 8, False
    else:
        nothing.address = base + 8
    assert not arrays.may_share_memory(one, nothing) and not arrays.may_share_memory(nothing, one)


def test_warm_check_is_cheap():
    """Loose: a busy machine must pass; ``python tests/test_gpu_arrays.py`` measures."""
    call = on_device(forward(), CuPy)
    assert best(lambda: check(**call, causal=True)) < 60e-6


def best(function, number=100, repeats=50):
    """Seconds a call, of the best of several rounds."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(number):
            function()
        times.append((time.process_time() - start) / number)
    return min(times)


# ---- pieces --------------------------------------------------------------------------------------------------


def test_can_merge_is_what_numpy_does():
    """No copy by ``can_merge`` iff NumPy's reshape makes a view."""
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(3000):
        shape = tuple(int(n) for n in rng.integers(1, 4, rng.integers(3, 7)))
        home = np.zeros([2 * n for n in shape], np.int8)
        array = home[tuple(slice(None, None, rng.choice([1, -1, 2])) for _ in shape)][tuple(map(slice, shape))]
        array = np.zeros(shape, np.int8) if rng.random() < 0.3 else array
        array = array.transpose(rng.permutation(len(shape))) if rng.random() < 0.5 else array
        if rng.random() < 0.3:
            array = np.broadcast_to(array[:1], (3, *array.shape[1:]))
        axes = array.ndim - 3
        merged = array.reshape(-1, *array.shape[axes:])
        view = np.may_share_memory(merged, array)
        assert arrays.can_merge(array, axes) == view, (array.shape, array.strides)
        seen.add(view)
    assert seen == {True, False}


def test_device_view_has_no_memory():
    view = arrays.device_view((3, 0, 2), None, np.dtype(np.float16))
    assert view.shape == (3, 0, 2)
    view = arrays.device_view((2, 3), (-12, 4), np.dtype(np.float32), 12, True)
    assert view.strides == (-12, 4) and view.ctypes.data == 4096 + 12 and not view.flags.writeable
    assert arrays.device_view((4,), None, arrays.bfloat16()).dtype.name == "bfloat16"
    assert not arrays.device_view((4,), None, np.dtype(np.float32), 2).flags.aligned


@pytest.mark.parametrize(
    "capability, row",
    [(75, "sm_75"), (80, "sm_80"), (87, "sm_86"), (89, "sm_89"), (90, "sm_90"), (103, "sm_100"), (121, "sm_120")],
)
def test_the_row_of_a_device(capability, row):
    chip = hardware._row(capability, 100 << 10, 66)
    assert chip == dataclasses.replace(
        hardware.CHIPS[row], name=f"sm_{capability}", on_chip_bytes=100 << 10, processors=66
    )


def test_a_device_older_than_the_table():
    with pytest.raises(rf.BackendError, match="sm_70; expected sm_75 or newer"):
        hardware._row(70, 96 << 10, 80)


@pytest.mark.parametrize("algorithm", ["standard", "rowwise"])
def test_algorithms_of_the_host_only(algorithm):
    with pytest.raises(rf.BackendError, match="numpy_tiled has it, for CPU arrays"):
        rf.attention(**on_device(forward(), CuPy), algorithm=algorithm)
    with pytest.raises(rf.BackendError, match="numpy_tiled has it, for CPU arrays"):
        lookup(Problem(backend="cupy_raw", algorithm=algorithm), "forward")


def test_without_cupy(monkeypatch):
    """What is missing is named, by every function."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    arrays.require_cupy.cache_clear()
    gpu = {name: Interface(a) for name, a in forward().items()}
    assert "cupy" in why_not("cupy_raw")
    for call in (
        lambda: rf.attention(**gpu),
        lambda: rf.merge_attention([gpu["q"]], [Interface(arr(B, HQ, TQ))]),
        lambda: rf.dropout_mask(0.5, 1, (1, 1, 1, 4), like=gpu["q"]),
        lambda: rf.append_kv(gpu["k"], gpu["v"], gpu["k"], gpu["v"], [0] * B),
        lambda: hardware.chip_of("cupy_raw"),
    ):
        with pytest.raises(rf.BackendError, match="(?i)cupy"):
            call()


# ---- caches ------------------------------------------------------------------------------------------------

BLOCK, BLOCKS = 4, 6
TABLE = np.array([[0, 5, 2], [3, 1, 4]])


def caches(layout="bhtd", paged=True, **changed):
    """What append_kv takes; there is room for 12 keys."""
    shape = (BLOCKS, HKV, BLOCK) if paged else (B, HKV, 12)
    made = dict(k_cache=arr(*shape, D), v_cache=arr(*shape, DV), k_new=arr(B, HKV, 2, D), v_new=arr(B, HKV, 2, DV))
    if layout == "bthd":
        made = {name: np.ascontiguousarray(a.swapaxes(1, 2)) for name, a in made.items()}
    return made | dict(kv_lengths=[3, 9], block_table=TABLE if paged else None, layout=layout) | changed


def cache_on_device(call, kind, either=()):
    """The matrices there; ``either``: these tables too."""
    return {n: kind(np.asarray(a)) if n in either or isinstance(a, np.ndarray) and n != "block_table" else a
            for n, a in call.items()}  # fmt: skip


@kinds
@pytest.mark.parametrize("either", [(), ("kv_lengths",), ("kv_lengths", "block_table"), ("block_table",)])
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_an_append_is_the_same_as_on_the_host(layout, either, kind):
    """Views, and host tables in copies; the addresses are each call's own, and a table on the device is not read."""
    host = caches(layout)
    first, second = (cache_on_device(host, kind, either) for _ in range(2))
    (source, x), (again, y), (_, z) = (problem.check_append(**call) for call in (first, second, host))
    assert y is x and len(problem._MEMO) == 1 and x.device == source.device == again.device == 0 and z.device is None
    assert again.addresses == {n: a.address for n, a in second.items() if isinstance(a, kind)} != source.addresses
    for name in ("k_cache", "v_cache", "k_new", "v_new"):
        a, b = getattr(x, name), getattr(z, name)
        assert (a.shape, a.strides, a.dtype) == (b.shape, b.strides, b.dtype)
    for name, value in (("kv_lengths", [3, 9]), ("block_table", TABLE)):
        if name in either:
            assert isinstance(getattr(x, name), arrays.DeviceView)
        else:
            np.testing.assert_array_equal(getattr(x, name), value)
    assert (x.home is None) == bool(either)


def test_tables_of_the_host_are_in_the_key():
    call = cache_on_device(caches(block_table=TABLE.copy()), CuPy)
    made = [problem.check_append(**call | dict(kv_lengths=lengths))[1] for lengths in ([3, 9], [3, 8], [3, 9])]
    assert made[0] is made[2] is not made[1] and len(problem._MEMO) == 2
    call["block_table"][0, 0] = 9
    np.testing.assert_array_equal(made[0].block_table, TABLE)
    with pytest.raises(rf.ProblemError, match=r"block_table has 9 at \(0, 0\)"):
        problem.check_append(**call)


@kinds
def test_a_decode_call_on_the_device(kind):
    """A paged cache stays as it is there; what its table names is known only if it and the lengths are on the host."""
    made = caches()
    q, k, v = (kind(a) for a in (arr(B, HQ, 1, D), made["k_cache"], made["v_cache"]))
    for lengths, table in (([3, 12], TABLE), (kind(np.array([3, 12])), TABLE), ([3, 12], kind(TABLE))):
        found, x = check(q, k, v, decode=True, kv_lengths=lengths, block_table=table)
        assert (found.page, found.Tk, found.B) == (BLOCK, 12, B) and x.k.shape == (BLOCKS, HKV, BLOCK, D)
        assert x.copied == [] and x.block_table.shape == TABLE.shape
        assert x.visibility.kv_lengths.tolist() == ([3, 12] if isinstance(lengths, list) else [12, 12])
    wrong = np.where(TABLE == 4, 6, TABLE)
    check(q, k, v, decode=True, kv_lengths=kind(np.array([3, 12])), block_table=wrong)
    check(q, k, v, decode=True, kv_lengths=[3, 8], block_table=wrong)
    with pytest.raises(rf.ProblemError, match=r"block_table has 6 at \(1, 2\), .* a block between 0 and 5"):
        check(q, k, v, decode=True, kv_lengths=[3, 9], block_table=wrong)


HOST = caches()
WRONG_PLACES = {
    "v_cache on the host": (dict(v_cache=HOST["v_cache"]), "v_cache is a CPU array and k_cache a GPU array"),
    "k_new on the host": (dict(k_new=HOST["k_new"]), "k_new is a CPU array and k_cache a GPU array"),
    "k_cache on the host": (dict(k_cache=HOST["k_cache"]), "v_cache is a GPU array and k_cache a CPU array"),
    "v_new on another": (dict(v_new=CuPy(HOST["v_new"], 1)), "v_new is on GPU 1 and k_cache on GPU 0"),
    "lengths on another": (dict(kv_lengths=CuPy(np.array([3, 9]), 1)), "kv_lengths is on GPU 1 and k_cache on GPU 0"),
    "table on another": (dict(block_table=CuPy(TABLE, 1)), "block_table is on GPU 1 and k_cache on GPU 0"),
    "caches of two kinds": (
        dict(v_cache=Torch(HOST["v_cache"])),
        "v_cache is a Torch; expected the kind of array that"),
    "read-only": (dict(k_cache=Interface(HOST["k_cache"], read_only=True)), "k_cache is read-only"),
    "overlapping": (dict(k_cache=CuPy(np.broadcast_to(arr(D), HOST["k_cache"].shape))), "k_cache has strides"),
    "misaligned": (dict(k_cache=CuPy(HOST["k_cache"], offset=2)), "k_cache is misaligned or of the other byte order"),
    "byte-swapped": (cache_on_device({n: a.astype(">f4") if n[1] == "_" else a for n, a in HOST.items()}, Interface),
                     "k_cache is misaligned or of the other byte order"),
    "past the end": (dict(kv_lengths=[3, 11]), r"kv_lengths is \[3, 11\]; .* n \+ 2 <= 12"),
    "shape of lengths": (
        dict(kv_lengths=CuPy(np.zeros(3, int))),
        r"kv_lengths has shape \(3,\); expected \(B,\) = \(2,\)"),
    "floats": (dict(kv_lengths=CuPy(np.zeros(2))), "kv_lengths has dtype float64; expected integers"),
    "shape of table": (
        dict(block_table=CuPy(TABLE[:1])),
        r"block_table has shape \(1, 3\); expected \(2, \*\) to match k_new"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_PLACES)
def test_wrong_appends(name, monkeypatch):
    Recorder(monkeypatch)
    changed, message = WRONG_PLACES[name]
    with pytest.raises(rf.ProblemError, match=message):
        rf.append_kv(**cache_on_device(HOST, CuPy) | changed)
    assert not problem._MEMO


def test_caches_of_a_decode_call_are_named_as_such():
    """k and v are k_cache and v_cache there."""
    q = arr(B, HQ, 1, D)
    for here, there, words in ((CuPy, np.asarray, "CPU array and q a GPU"),
                               (np.asarray, CuPy, "GPU array and q a CPU")):  # fmt: skip
        for name in ("k_cache", "v_cache"):
            call = {n: (there if n == name else here)(HOST[n]) for n in ("k_cache", "v_cache")}
            with pytest.raises(rf.ProblemError, match=f"^{name} is a {words} array"):
                rf.attention_decode(here(q), **call, kv_lengths=[1, 1], block_table=TABLE)
    with pytest.raises(rf.ProblemError, match="^v_cache is on GPU 1 and q on GPU 0"):
        rf.attention_decode(CuPy(q), CuPy(HOST["k_cache"]), CuPy(HOST["v_cache"], 1), [1, 1], TABLE)
    with pytest.raises(rf.ProblemError, match="^block_table is a GPU array and q a CPU array"):
        rf.attention_decode(q, HOST["k_cache"], HOST["v_cache"], [1, 1], CuPy(TABLE))


class JaxOnHost:
    """As much of a JAX array on a CPU as is looked at."""

    __module__ = "jaxlib"

    def __init__(self, a):
        self.a = a

    def __array__(self, dtype=None, copy=None):
        return self.a

    def __dlpack_device__(self):
        return 1, 0


def test_jax_caches_are_refused(monkeypatch):
    """New keys may be JAX's."""
    for name in ("k_cache", "v_cache"):
        with pytest.raises(rf.ProblemError, match=f"{name} is a JAX array; expected one that can be written to"):
            rf.append_kv(**HOST | {name: JaxOnHost(HOST[name])})
    cache = HOST["k_cache"].copy(), HOST["v_cache"].copy()
    new = [JaxOnHost(HOST[name] + 1) for name in ("k_new", "v_new")]
    rf.append_kv(*cache, *new, [3, 9], TABLE)
    assert all((a == 1).sum() == n.a.size for a, n in zip(cache, new, strict=True))
    Recorder(monkeypatch)
    with pytest.raises(rf.ProblemError, match="k_cache is a JAX array"):
        rf.append_kv(**cache_on_device(HOST, Jax))


# ---- a device made of NumPy --------------------------------------------------------------------------------


def over(view, address):
    """The host memory at an address, with the metadata of ``view``."""
    face = {"version": 3, "shape": view.shape, "strides": view.strides, "data": (address, False)}
    face["typestr"] = f"|V{view.itemsize}"
    return np.asarray(types.SimpleNamespace(__array_interface__=face)).view(view.dtype)


class ndarray(np.ndarray):
    """CuPy's array, on the host."""

    __module__ = "cupy"

    def __new__(cls, shape, dtype=float, memptr=None, strides=None):
        if memptr is None:
            return np.full(shape, 77, dtype).view(cls)  # as full of rubbish as any fresh memory
        like = np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides, subok=False)
        return over(like, memptr.ptr).view(cls)

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data, device_id=0)


@pytest.fixture
def device(monkeypatch):
    """A module "cupy" whose device is the host; the kernels of cupy_raw are NumPy's."""
    here = types.SimpleNamespace(ptr=0)
    cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(getDevice=lambda: 0),
        get_current_stream=lambda device=-1: here,
        UnownedMemory=lambda address, size, owner, device: address,
        MemoryPointer=lambda memory, offset: types.SimpleNamespace(ptr=memory + offset),
    )
    made = types.SimpleNamespace(ndarray=ndarray, cuda=cuda)
    for name in ("asarray", "stack", "max", "where", "exp", "log", "zeros"):
        setattr(made, name, lambda *a, f=getattr(np, name), **options: np.asarray(f(*a, **options)).view(ndarray))
    monkeypatch.setattr(arrays, "require_cupy", lambda: made)
    monkeypatch.setattr(arrays, "device_of", lambda address: 0)
    monkeypatch.setattr(arrays, "_switched", lambda call: arrays._HERE)  # it has one stream
    looked_up = []

    def find(problem, direction, device):
        if device is None:  # what the kernels call
            return lookup(problem, direction)
        looked_up.append((problem.algorithm, direction, device))
        return forward_kernel if direction == "forward" else backward_kernel, Chip("sm_90", 227 << 10, 16, "simt")

    monkeypatch.setattr(api, "lookup", find)
    return looked_up


def operands(problem, x):
    """What the CPU functions take, read from the addresses."""
    call = {name: over(getattr(x, name), x.addresses[name]) for name in "qkv"}
    call |= {n: over(getattr(x, n), x.addresses[n]) for n in ("bias", "sinks") if getattr(x, n) is not None}
    call |= {n: over(view, x.addresses[n]) for n, view in x.views.items()}
    if "mask" in x.addresses:
        call["mask"] = over(x.visibility.mask.array, x.addresses["mask"])
    if "alibi_slopes" in x.addresses:
        call["alibi_slopes"] = over(x.alibi_slopes, x.addresses["alibi_slopes"])
    return call | dict(causal=problem.causal, scale=problem.scale, backend="numpy_tiled")


def forward_kernel(problem, tiles, x, out, lse):
    result = rf.attention(**operands(problem, x), return_lse=True)
    for target, value in zip((out, lse), result, strict=True):
        assert (target.address == 0) == (target is lse and not x.return_lse)
        if target.address:
            over(target.view, target.address)[...] = value


def backward_kernel(problem, tiles, x, grads):
    names = ("dout", "o", "lse", "dlse")
    given = {n: over(getattr(x, n), x.addresses[n]) for n in names if getattr(x, n) is not None}
    result = rf.attention_backward(**given, **operands(problem, x), wrt=tuple(grads))
    for target, value in zip(grads.values(), result, strict=True):
        over(target.view, target.address)[...] = value.reshape(target.view.shape)


def normal(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def upload(a):
    """The same strides and alignment, on the device made of NumPy."""
    return a.view(ndarray)


class Foreign:
    """A library with the interface and nothing else, on the device made of NumPy."""

    def __init__(self, a):
        self.a = a
        self.__cuda_array_interface__ = dict(
            shape=a.shape, strides=a.strides, typestr=a.dtype.str, data=(a.ctypes.data, False), version=3
        )


def numbers(x):
    assert type(x) is ndarray
    return np.asarray(x)


def run_both(call, wrt=("q", "k", "v"), move=upload):
    """Forward and backward on the host and on the device."""

    def run(move, **backend):
        moved = {n: move(a) if isinstance(a, np.ndarray) else a for n, a in call.items()} | backend
        out, lse = rf.attention(**moved, return_lse=True)
        dout, dlse = move(np.ones(out.shape, out.dtype)), move(np.ones(lse.shape, lse.dtype))
        o, moved_lse = (move(np.ascontiguousarray(np.asarray(a))) for a in (out, lse))
        return out, lse, *rf.attention_backward(dout, o=o, lse=moved_lse, dlse=dlse, wrt=wrt, **moved)

    for got, want in zip(run(move), run(lambda a: a, backend="numpy_tiled"), strict=True):
        got = numbers(got)
        assert got.dtype == want.dtype and got.shape == want.shape
        np.testing.assert_array_equal(got, want)


END_TO_END = {
    "plain": dict(),
    "float16": dict(dtype=np.float16),
    "five axes": dict(lead=(2, 3)),
    "one head": dict(lead=None),
    "bias and sinks": dict(bias=normal(HQ, 1, TK), sinks=normal(HQ), wrt=("bias", "q", "sinks")),
    "float16 bias and sinks": dict(
        dtype=np.float16, bias=normal(TK, dtype=np.float16), sinks=normal(HQ, dtype=np.float16), wrt=("bias", "sinks")
    ),
    "mask": dict(mask=normal(B, 1, TQ, TK) < 0.5),
    "lengths": dict(kv_lengths=np.array([3, 7], np.int32), q_lengths=np.array([5, 0]), causal=True),
}


@pytest.mark.parametrize("name", END_TO_END)
def test_from_arrays_to_results(name, device):
    """Results have the values, shapes and dtypes of NumPy arrays; kernels are looked up once a kind of call."""
    options = dict(END_TO_END[name])
    wrt, lead, dtype = options.pop("wrt", ("q", "k", "v")), options.pop("lead", (B,)), options.pop("dtype", np.float32)
    call = forward(lead or (), dtype, normal)
    call = {n: a[0] if lead is None else a for n, a in call.items()} | options
    for _ in range(3):
        run_both(call, wrt)
    assert sorted(device) == [("fa2", "backward", 0), ("fa2", "forward", 0)]


COPIES = {
    "strided last": lambda a: np.repeat(a, 2, -1)[..., ::2],
    "reversed last": lambda a: np.ascontiguousarray(a[..., ::-1])[..., ::-1],
    "fortran": np.asfortranarray,
    "misaligned": lambda a: np.frombuffer(b"\0" * 65 + a.tobytes(), np.uint8)[65:].view(a.dtype).reshape(a.shape),
    "byte-swapped": lambda a: a.astype(a.dtype.newbyteorder()),
    "leading axes apart": lambda a: np.ascontiguousarray(a.swapaxes(0, 1)).swapaxes(0, 1),
}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("how", COPIES)
def test_copies(how, dtype, device):
    """Memory that a kernel cannot read is copied once, on the device, and named; such a call is not remembered."""
    call = forward((2, 3), dtype, normal)
    shapes = dict(bias=(TQ, TK), sinks=(HQ,))
    call |= {n: normal(*shape, dtype=dtype if dtype != np.float64 else dtype) for n, shape in shapes.items()}
    changed = {n: COPIES[how](a) if a.ndim > 2 or how != "leading axes apart" else a for n, a in call.items()}
    if how == "byte-swapped":  # no such CuPy array exists, but the interface can say so
        moved = {n: Foreign(a) for n, a in changed.items()}
        want = rf.attention(**call, backend="numpy_tiled")
        np.testing.assert_array_equal(numbers(rf.attention(**moved)), want)
        assert check(**moved)[1].copied == ["q", "k", "v", "bias", "sinks"]
        return
    run_both(changed)
    problem._MEMO.clear()
    call |= backward((2, 3), dtype, normal)
    changed |= {n: COPIES[how](call[n]) if call[n].ndim > 4 else call[n] for n in ("dout", "o", "lse", "dlse")}
    _, x = check(**{n: upload(a) for n, a in changed.items()}, direction="backward")
    assert not problem._MEMO and {"q", "k", "v", "dout"} <= set(x.copied) and len(set(x.copied)) == len(x.copied)
    assert [a.ctypes.data for a in x.keep] == [x.addresses[n] for n in x.copied]
    for n in x.copied:
        np.testing.assert_array_equal(over(getattr(x, n), x.addresses[n]).reshape(call[n].shape), call[n])


def test_small_arrays_are_made_readable(device):
    """Kernels read lengths as int32 or int64 without strides, slopes as float32 or float64."""
    call = {n: upload(a) for n, a in forward().items()}
    lengths = np.array([3, 9, 4, 9])
    for value, dtype, copied in (
        (lengths[::2], np.int64, True),
        (lengths[::2].astype(np.uint8), np.int64, True),
        (lengths[::2].astype(np.int32), np.int32, False),
    ):
        _, x = check(**call, kv_lengths=upload(value))
        assert x.views["kv_lengths"].dtype == dtype and ("kv_lengths" in x.copied) == copied
        assert over(x.views["kv_lengths"], x.addresses["kv_lengths"]).tolist() == [3, 4]
    for dtype, kept in ((np.float16, np.float32), (ml_dtypes.bfloat16, np.float32), (np.float64, np.float64)):
        _, x = check(**call, alibi_slopes=upload(np.arange(HQ).astype(dtype)))
        assert x.alibi_slopes.dtype == kept and x.alibi_slopes.strides[0] == 0
        assert over(x.alibi_slopes, x.addresses["alibi_slopes"])[1].tolist() == [0, 1, 2, 3]


OUTS = {
    "contiguous": lambda shape: np.full(shape, 7, np.float32),
    "heads swapped": lambda shape: np.full((shape[0], shape[2], shape[1], shape[3]), 7, np.float32).swapaxes(1, 2),
    "strided last": lambda shape: np.full((*shape[:-1], 2 * shape[-1]), 7, np.float32)[..., ::2],
    "reversed": lambda shape: np.full(shape, 7, np.float32)[:, :, ::-1, ::-1],
    "misaligned": lambda shape: np.zeros(4 * np.prod(shape) + 1, np.uint8)[1:].view(np.float32).reshape(shape),
    "byte-swapped": lambda shape: np.full(shape, 7, ">f4"),
}


@pytest.mark.parametrize("memory", OUTS)
def test_out(memory, device):
    call = forward(make=normal)
    want = rf.attention(**call, backend="numpy_tiled")
    home = OUTS[memory](want.shape)
    move = Foreign if memory == "byte-swapped" else upload
    out = move(home)
    for _ in range(2):
        home[...] = 7
        assert rf.attention(**{n: move(a) for n, a in call.items()}, out=out) is out
        np.testing.assert_array_equal(home, want)


@pytest.mark.parametrize("which", "qkv")
def test_out_may_be_an_input(which, device):
    call = {name: normal(2, TK, TK) for name in "qkv"}
    want = rf.attention(**call, backend="numpy_tiled")
    moved = {n: upload(a.copy()) for n, a in call.items()}
    rf.attention(**moved, out=upload(np.zeros_like(want)))
    assert rf.attention(**moved, out=moved[which]) is moved[which]
    np.testing.assert_array_equal(numbers(moved[which]), want)


def test_small_arrays_of_an_append_are_made_readable(device):
    """New keys too, where a kernel could not read them; such a call is not remembered."""
    lengths = np.array([3, 0, 9, 0])
    moved = {n: upload(a) if isinstance(a, np.ndarray) else a for n, a in caches().items()}
    for changed, copied in (
        (dict(kv_lengths=upload(lengths[::2])), ("kv_lengths",)),
        (dict(kv_lengths=upload(np.array([3, 9], np.uint8)), block_table=upload(TABLE.T.copy().T)),
         ("block_table", "kv_lengths")),
        (dict(k_new=Foreign((caches()["k_new"] + 5).astype(">f4"))), ("k_new",)),
        (dict(kv_lengths=upload(np.array([3, 9], np.int32))), ()),
    ):  # fmt: skip
        source, x = problem.check_append(**moved | changed)
        assert source.copied == copied and len(problem._MEMO) == (not copied)
        for name in copied:
            want = {"kv_lengths": [3, 9], "block_table": TABLE}.get(name, 5)
            assert (over(getattr(x, name), source.addresses[name]) == want).all()


def test_results_are_fresh(device):
    moved = {n: upload(a) for n, a in forward(make=normal).items()}
    first, second = (rf.attention(**moved, return_lse=True) for _ in range(2))
    for a, b in itertools.combinations((*first, *second), 2):
        assert not np.may_share_memory(a, b)


def test_vjp_and_varlen(device):
    call = forward(make=normal)
    (out, lse), pullback = rf.attention_vjp(**{n: upload(a) for n, a in call.items()}, return_lse=True)
    want, wanted_pullback = rf.attention_vjp(**call, backend="numpy_tiled")
    np.testing.assert_array_equal(numbers(out), want)
    for got, grad in zip(pullback(upload(np.ones_like(want))), wanted_pullback(np.ones_like(want)), strict=True):
        np.testing.assert_array_equal(numbers(got), grad)
    seen = []

    def kernel(problem, tiles, x, out, lse):
        seen.append((out.view.shape, lse.view.shape, problem.varlen))

    api.lookup = lambda problem, direction, device: (kernel, Chip("sm_90", 227 << 10, 16, "simt"))
    q, k, v = (upload(a) for a in (arr(HQ, 9, D), arr(HKV, 11, D), arr(HKV, 11, DV)))
    assert rf.attention_varlen(q, k, v, [0, 4, 9], upload(np.array([0, 5, 11]))).shape == (HQ, 9, DV)
    assert seen == [((1, HQ, 9, DV), (1, HQ, 9), True)]


@pytest.mark.parametrize("move", [upload, Foreign])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_merge_attention(dtype, move, device):
    q, k, v = (normal(2, TK, D, dtype=dtype) for _ in range(3))
    parts = [
        rf.attention(q, k[:, s], v[:, s], return_lse=True, backend="numpy_tiled")
        for s in (slice(0, 3), slice(3, 3), slice(3, None))
    ]
    outs, lses = zip(*parts, strict=True)
    want = rf.merge_attention(outs, lses)
    got = rf.merge_attention([move(np.asarray(a)) for a in outs], [move(np.asarray(a)) for a in lses])
    for a, b in zip(got, want, strict=True):
        a = numbers(a)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    with pytest.raises(rf.ProblemError, match="lses has"):
        rf.merge_attention([move(np.asarray(a)) for a in outs], lses)


def test_dropout_mask_like_a_device_array(device):
    shape = (1, 2, 3, 5)
    got = rf.dropout_mask(0.5, 3, shape, like=upload(arr(2)))
    np.testing.assert_array_equal(numbers(got), rf.dropout_mask(0.5, 3, shape))


def test_explain(device, monkeypatch):
    """The plan of a call on the device, for its chip; a mask there is not looked at."""
    from rawflash import plan

    monkeypatch.setattr(plan, "chip_of", lambda backend, device: Chip("sm_90", 227 << 10, 16, "simt"))
    call = on_device(forward(), CuPy)
    made = rf.explain(**call, mask=CuPy(np.ones((TQ, TK), bool)), kv_lengths=CuPy(np.array([1, 2])))
    assert made.kernel == "cupy_raw.fa2_forward" and made.copied == () and made.traffic.loaded > 0
    assert "CPU arrays" in dict(made.refused)["numpy_tiled"] and "cupy_raw.fa2_forward" in str(made)
    made = rf.explain(**on_device(CALLS["mask object"], CuPy), direction="backward")
    assert made.kernel == "cupy_raw.fa2_backward"


class Recorder:
    """CuPy's streams and devices, as a list of what was asked of them."""

    def __init__(self, monkeypatch):
        self.log, recorder = [], self

        class Stream:
            def __init__(self, ptr):
                self.ptr = ptr

            @classmethod
            def from_external(cls, other):
                return cls(other.__cuda_stream__()[1])

            def __enter__(self):
                recorder.log.append(("stream", self.ptr))
                self.before, recorder.current = recorder.current, self

            def __exit__(self, *_):
                recorder.current = self.before

            def record(self):
                return self.ptr

            def wait_event(self, event):
                recorder.log.append(("wait", self.ptr, event))

        class Device:
            def __init__(self, number):
                self.number = number

            def __enter__(self):
                recorder.log.append(("device", self.number))

            def __exit__(self, *_):
                pass

        class Event:
            done = False

            def __init__(self, **_):
                pass

            def record(self):
                recorder.log.append(("event", recorder.current.ptr))

        Stream.null = self.current = Stream(0)
        cuda = types.SimpleNamespace(
            Stream=Stream, Device=Device, Event=Event, get_current_stream=lambda device=-1: self.current,
            runtime=types.SimpleNamespace(getDevice=lambda: 0),
        )  # fmt: skip
        torch = types.SimpleNamespace(
            cuda=types.SimpleNamespace(current_stream=lambda device: types.SimpleNamespace(cuda_stream=self.of_torch))
        )
        self.of_torch, self.Event, self.Stream = 0, Event, Stream
        cupy = types.SimpleNamespace(cuda=cuda, from_dlpack=lambda speaker: CuPy(speaker.a))
        monkeypatch.setattr(arrays, "require_cupy", lambda: cupy)
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setattr(arrays, "_held", type(arrays._held)())

    def of(self, **call):
        self.log.clear()
        with arrays.on(check(**call)[1]):
            self.log.append("work")
        return self.log


def test_streams(monkeypatch):
    """Work goes to the stream of q's library; arrays of others are waited for, and kept until it is done."""
    recorder = Recorder(monkeypatch)
    cupy, torch = on_device(forward(), CuPy), on_device(forward(), Torch)
    assert recorder.of(**cupy) == ["work"] == recorder.of(**torch), "nothing to change"
    recorder.of_torch = 32
    assert recorder.of(**cupy) == ["work"]
    assert recorder.of(**torch) == [("device", 0), ("stream", 32), "work"]
    on_one = {name: CuPy(a, device=1) for name, a in forward().items()}
    assert recorder.of(**on_one)[::2] == [("device", 1), "work"]
    mixed = cupy | dict(k=Torch(arr(B, HKV, TK, D)))
    for _ in range(2):
        assert recorder.of(**mixed) == [("device", 0), ("stream", 0), ("wait", 0, 32), "work", ("event", 0)]
    assert len(arrays._held) == 2 and mixed["k"] in arrays._held[0][1]
    recorder.Event.done = True
    recorder.of(**mixed)
    assert len(arrays._held) == 1, "those that the device is done with go"
    producer = Interface(arr(B, HKV, TK, D), stream=7)
    assert ("wait", 0, 7) in recorder.of(**cupy | dict(k=producer))


class Speaker:
    """An array on a GPU that speaks DLPack and nothing else."""

    def __init__(self, a):
        self.a = a

    def __dlpack_device__(self):
        return 2, 0


class Jax(Speaker):
    __module__ = "jaxlib"


@pytest.mark.parametrize("kind", [Speaker, Jax])
def test_dlpack(kind, monkeypatch):
    """Imported by CuPy, which waits for the producer; kept until the device is done with it."""
    recorder = Recorder(monkeypatch)
    for _ in range(2):
        call = on_device(forward(causal=True), kind)
        made, x = check(**call)
        assert_same((made, x), host_result(forward(causal=True)))
        assert x.kind == ("jax" if kind is Jax else "cupy") and len(problem._MEMO) == 1
        assert recorder.of(**call) == [("device", 0), ("stream", 0), "work", ("event", 0)]
    if kind is Jax:
        with pytest.raises(rf.ProblemError, match="out is given with JAX arrays"):
            check(**call, out=kind(arr(B, HQ, TQ, DV)))
    recorder.of_torch = 32
    mixed = on_device(forward(), Torch) | dict(v=kind(arr(B, HKV, TK, DV)))
    assert recorder.of(**mixed)[:3] == [("device", 0), ("stream", 32), ("wait", 32, 0)]


def test_results_are_of_the_kind_of_q(device, monkeypatch):
    """PyTorch allocates its own results; CuPy allocates the others', and their library takes them over."""
    torch = types.SimpleNamespace(
        float32="torch.float32", float16="torch.float16",
        empty=lambda shape, dtype, device: Torch(np.zeros(shape, dtype.removeprefix("torch.")), device),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "jax", types.ModuleType("jax"))
    jax = types.SimpleNamespace(from_dlpack=lambda a: ("jax", a))
    monkeypatch.setitem(sys.modules, "jax.dlpack", jax)
    sys.modules["jax"].dlpack = jax
    numba = types.ModuleType("numba")
    numba.cuda = types.SimpleNamespace(as_cuda_array=lambda a, sync: ("numba", sync, a))
    monkeypatch.setitem(sys.modules, "numba", numba)
    found, x = check(**on_device(forward(dtype=np.float16, sinks=arr(HQ, dtype=np.float32)), Torch))
    result = arrays.result(found, x)
    target = result.canonical("out")
    out = result.give("out")
    assert out.address == target.address and str(out.dtype) == "torch.float16" and out.shape == (B, HQ, TQ, DV)
    assert target.view.shape == (B, HQ, TQ, DV) and target.view.dtype == np.float16
    assert str(TORCH_DTYPES["float32"]) == "torch.float32"
    for kind in ("jax", "numba"):
        found, x = check(**on_device(forward(return_lse=True), CuPy))
        x.kind = kind
        result = arrays.result(found, x)
        target = result.canonical("lse")
        *words, made = result.give("lse")
        assert words == (["jax"] if kind == "jax" else ["numba", False])
        assert made.data.ptr == target.address and made.shape == (B, HQ, TQ)


if __name__ == "__main__":
    arrays.device_of = lambda address: 0
    fake = types.SimpleNamespace(ndarray=lambda shape, dtype, made=CuPy(arr(1)): made, cuda=types.SimpleNamespace(
        runtime=types.SimpleNamespace(getDevice=lambda: 0), get_current_stream=lambda: types.SimpleNamespace(ptr=0)))
    arrays.require_cupy = lambda: fake
    api.lookup = lambda *_: (lambda *_: None, Chip("sm_90", 227 << 10, 16, "simt"))
    call = on_device(forward(), CuPy)
    found, x = check(**call, causal=True)
    for text, function in (
        ("check, causal", lambda: check(**call, causal=True)),
        ("kernel and tiles", lambda: api._prepared(found, x, "forward")),
        ("device and stream", lambda: arrays.on(x)),
        ("all but the launch", lambda: rf.attention(**call, causal=True)),
        ("a call not seen before", lambda: (problem._MEMO.clear(), check(**call, causal=True))),
    ):
        print(f"{text:<24}{1e6 * best(function):6.1f} us")
