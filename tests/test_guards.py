"""What a kernel must not touch, read or let through: guard bands, poisoned padding, hidden keys, NaN.

Comparisons are of bits unless a test says otherwise: what is not read cannot change even the last one.
"""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, note
from strategies import DTYPES, problems, varlen_problems
from test_forward import KERNELS, half_hidden, half_visible, kernels, make, normal
from test_properties import all_of

import rawflash as rf

POISONS = [np.nan, np.inf, -np.inf]


def equal(a, b, names=None):
    for name in names or a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


# ---- around the arrays ------------------------------------------------------------------------------


def surrounded(array, gap):
    """A copy in the middle of NaN, ``gap`` elements on every side and between rows: (view, its home)."""
    home = np.full([n + 2 * gap for n in array.shape], np.nan, array.dtype)
    view = home[tuple(slice(gap, gap + n) for n in array.shape)]
    view[...] = array
    return view, home


def is_intact(home, view):
    """Nothing but the view differs from NaN."""
    inside = np.zeros(home.shape, bool)
    start = (view.ctypes.data - home.ctypes.data) // home.itemsize
    first = np.unravel_index(start, home.shape)
    inside[tuple(slice(f, f + n) for f, n in zip(first, view.shape, strict=True))] = True
    return np.isnan(home[~inside].astype(np.float64)).all()


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (2, 3, 17, 8), (2, 3, 33, 5), (1, 3, 16, 16), (1, 3, 130, 3)]
)
def test_the_surroundings_of_out_stay_intact(shape, dtype, backend, algorithm):
    B, H, T, dv = shape
    case = make(
        B=B,
        Hq=H,
        Tq=T,
        dv=dv,
        d=7,
        dtype=dtype,
        backend=backend,
        algorithm=algorithm,
        sram=32768,
        kv_lengths=[T // 2] * B,
        q_lengths=[T] * B,
    )
    expected = case.forward()[0]
    out, home = surrounded(np.full_like(expected, np.nan), gap=3)
    assert case.forward(out=out)[0] is out
    np.testing.assert_array_equal(out, expected)
    assert is_intact(home, out)


@kernels
@pytest.mark.parametrize("step", [2, 3])
def test_the_gaps_of_a_strided_out_stay_intact(step, backend, algorithm):
    case = make(Tq=35, dv=6, backend=backend, algorithm=algorithm)
    expected = case.forward()[0]
    for axis in range(4):
        shape = list(expected.shape)
        shape[axis] *= step
        home = np.full(shape, np.nan, expected.dtype)
        inside = tuple(slice(None, None, step if a == axis else None) for a in range(4))
        case.forward(out=home[inside])
        np.testing.assert_array_equal(home[inside], expected)
        assert np.isnan(home).sum() == home.size - expected.size


@kernels
def test_out_may_be_written_backwards_and_over_an_input(backend, algorithm):
    case = make(Tq=35, backend=backend, algorithm=algorithm)
    expected = case.forward()[0]
    home = np.full_like(expected, np.nan)
    case.forward(out=home[:, :, ::-1])
    np.testing.assert_array_equal(home[:, :, ::-1], expected)
    for name in "qkv":
        array = getattr(case, name).copy()
        arrays = {"q": case.q, "k": case.k, "v": case.v} | {name: array}
        rf.attention(**arrays, out=array, **case.options)
        np.testing.assert_array_equal(array, expected, err_msg=f"out is {name}")


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_surroundings_of_the_inputs_are_not_read(dtype, backend, algorithm):
    T = 37
    case = make(
        B=2,
        Hq=4,
        Hkv=2,
        Tq=T,
        d=9,
        dv=5,
        dtype=dtype,
        causal=True,
        backend=backend,
        algorithm=algorithm,
        bias=normal(2, 4, T, T),
        sinks=normal(4),
        deterministic=True,
    )
    out, lse = case.forward()
    plain = {"out": out, "lse": lse} | dict(zip(case.wrt, case.backward(out, lse), strict=True))
    homes = []
    for name in ("q", "k", "v", "dout", "dlse"):
        view, home = surrounded(getattr(case, name), gap=2)
        setattr(case, name, view)
        homes.append((name, view, home))
    for name in ("bias", "sinks"):
        case.options[name], home = surrounded(case.options[name], gap=2)
        homes.append((name, case.options[name], home))
    (o, home_o), (l, home_l) = surrounded(out, gap=2), surrounded(lse, gap=2)
    homes += [("o", o, home_o), ("lse", l, home_l)]
    again, lse_again = case.forward()
    equal({"out": again, "lse": lse_again} | dict(zip(case.wrt, case.backward(o, l), strict=True)), plain)
    for name, view, home in homes:
        assert is_intact(home, view), f"{name} was written to"


def roots(case):
    """The memory behind every array of a call, by address: what a kernel could write to."""
    arrays = [case.q, case.k, case.v, case.dout, case.dlse, *case.options.values()]
    for array in arrays:
        if isinstance(array, np.ndarray):
            while isinstance(array.base, np.ndarray):
                array = array.base
            yield array


@given(problems() | varlen_problems())
def test_inputs_are_not_modified(case):
    before = [(array, array.tobytes()) for array in roots(case)]
    for backend, algorithm in KERNELS:
        note(f"{backend} {algorithm}")
        out, lse = case.forward(backend=backend, algorithm=algorithm)
        results = (out.tobytes(), lse.tobytes())
        case.backward(out, lse, backend=backend, algorithm=algorithm)
        assert (out.tobytes(), lse.tobytes()) == results, "the backward pass wrote to o or lse"
        for array, content in before:
            assert array.tobytes() == content


@kernels
def test_read_only_inputs_are_fine(backend, algorithm):
    case = make(Tq=20, bias=normal(20, 20), backend=backend, algorithm=algorithm)
    out, lse = case.forward()
    expected = all_of(case)
    for array in (case.q, case.k, case.v, case.dout, case.dlse, case.options["bias"], out, lse):
        array.flags.writeable = False
    equal(all_of(case), expected)
    case.backward(out, lse)


# ---- padding ----------------------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", POISONS)
def test_padding_is_never_read(poison, dtype, backend, algorithm):
    B, H, Tq, Tk = 3, 2, 35, 50
    n, m = [35, 0, 17], [50, 20, 33]
    case = make(
        B=B,
        Hq=H,
        Tq=Tq,
        Tk=Tk,
        dtype=dtype,
        causal=True,
        q_lengths=n,
        kv_lengths=m,
        window=(30, None),
        bias=half_hidden(B, H, Tq, Tk),
        mask=half_visible(B, H, Tq, Tk),
        sinks=normal(H),
        dropout=0.2,
        softcap=4.0,
        deterministic=True,
        sram=32768,
        backend=backend,
        algorithm=algorithm,
    )
    out, lse = case.forward()
    clean = {"out": out, "lse": lse} | dict(zip(case.wrt, case.backward(out, lse), strict=True))
    mask, bias = case.options["mask"], case.options["bias"]
    o, l = out.copy(), lse.copy()
    for b in range(B):
        for array in (case.q, case.dout, o, l, case.dlse):
            array[b, :, n[b] :] = poison
        for array in (case.k, case.v):
            array[b, :, m[b] :] = poison
        bias[b, :, n[b] :] = bias[b, :, :, m[b] :] = poison
        mask[b, :, n[b] :] = mask[b, :, :, m[b] :] = True
    out, lse = case.forward()
    gradients = case.backward(o, l)
    equal({"out": out, "lse": lse} | dict(zip(case.wrt, gradients, strict=True)), clean)
    for b in range(B):
        assert not out[b, :, n[b] :].any() and np.isneginf(lse[b, :, n[b] :]).all()
        for gradient, size in zip(gradients, (n[b], m[b], m[b]), strict=False):
            assert not gradient[b, :, size:].any()
        dbias = gradients[case.wrt.index("bias")][b]
        assert not dbias[:, n[b] :].any() and not dbias[:, :, m[b] :].any()


#: Arrays whose first page is rows of a sequence and whose others are padding that no process may read, as any view.
UNMAPPED = """
import ctypes, mmap, sys
import numpy as np
import rawflash as rf

PAGE, WIDTH, PAGES = mmap.PAGESIZE, 16, 4
ROWS = PAGE // (4 * WIDTH)
protect = ctypes.CDLL(None, use_errno=True).mprotect
homes = []

def guarded(width):
    rows = PAGES * PAGE // (4 * width)
    homes.append(mmap.mmap(-1, PAGES * PAGE))
    array = np.frombuffer(homes[-1], np.float32).reshape(rows, width)
    used = PAGE // (4 * width)
    array[:used] = np.random.default_rng(len(homes)).standard_normal((used, width))
    address = ctypes.c_void_p(array.ctypes.data + PAGE)
    assert protect(address, ctypes.c_size_t((PAGES - 1) * PAGE), 0) == 0
    return array

VIEWS = {
    "contiguous": lambda x: x,
    "reversed": lambda x: x[..., ::-1],
    "byte order": lambda x: x.view(x.dtype.newbyteorder()),
}
view = VIEWS[sys.argv[1]]

def compare(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

q, k, v, dout = (view(guarded(WIDTH)) for _ in range(4))
if sys.argv[1] == "byte order":  # numbers, not bytes, are what is compared: small ones either way
    for x in (q, k, v, dout):
        x[:ROWS] = x.view(x.dtype.newbyteorder())[:ROWS]
T = len(q)
for kernel in sys.argv[2:]:
    print(kernel, flush=True)
    backend, algorithm = kernel.split(".")
    how = dict(backend=backend, algorithm=algorithm)
    short = [np.array(x[:ROWS], np.float32) for x in (q, k, v, dout)]
    out, lse = rf.attention(*short[:3], return_lse=True, **how)
    wanted = out, lse, *rf.attention_backward(short[3], *short[:3], out, lse, **how)

    def rows_of(results):
        return [x.reshape(T, *x.shape[-1:])[:ROWS] if x.size > T else x.reshape(T)[:ROWS] for x in results]

    for lead, layout in (((), "bhtd"), ((1, 1), "bhtd"), ((1,), "bthd"), ((1, 1, 1), "bhtd")):
        def shaped(x):
            return x[:, None].reshape(1, T, 1, WIDTH) if layout == "bthd" else x.reshape(*lead, T, WIDTH)
        given = [shaped(x) for x in (q, k, v, dout)]
        options = dict(q_lengths=[ROWS], kv_lengths=[ROWS], layout=layout, **how)
        out, lse = rf.attention(*given[:3], return_lse=True, **options)
        padded_lse = view(guarded(1))[:T, 0].reshape(lse.shape)
        padded_lse[..., :ROWS] = lse[..., :ROWS]
        padded_out = shaped(view(guarded(WIDTH)))
        rows = (0, slice(ROWS)) if layout == "bthd" else (..., slice(ROWS), slice(None))
        padded_out[rows] = out[rows]
        grads = rf.attention_backward(given[3], *given[:3], padded_out, padded_lse, **options)
        compare(rows_of((out, lse, *grads)), wanted)

    packed = [x[None] for x in (q, k, v, dout)]
    starts = [0, ROWS // 2, ROWS]
    rf.attention_varlen(*packed[:3], starts, starts, **how)
    if algorithm == "fa2":
        caches = [x.reshape(1, 1, T, WIDTH) for x in (k, v)]
        one = rf.attention_decode(np.array(q[:1], np.float32)[None, None], *caches, kv_lengths=[ROWS], backend=backend)
        blocks = [x.reshape(T // 8, 1, 8, WIDTH) for x in (k, v)]
        table = np.arange(T // 8)[None]
        paged = rf.attention_decode(np.array(q[:1], np.float32)[None, None], *blocks, kv_lengths=[ROWS],
                                    block_table=table, backend=backend)
        compare([one], [paged])
print("read nothing else")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="pages are protected by Linux's mprotect")
@pytest.mark.parametrize("view", ["contiguous", "reversed", "byte order"])
def test_padding_may_be_unmapped(view):
    """In a process of its own, as it would end there. Views that no kernel reads are copied, but for padding."""
    command = [sys.executable, "-c", UNMAPPED, view, *(".".join(kernel) for kernel in KERNELS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "read nothing else" in done.stdout, (
        done.returncode, done.stdout[-300:], done.stderr[-2000:],
    )  # fmt: skip


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", POISONS)
def test_padding_between_sequences_is_never_read(poison, dtype, backend, algorithm):
    case = make(
        lead=(),
        Hq=4,
        Hkv=2,
        Tq=60,
        Tk=70,
        dtype=dtype,
        causal=True,
        sinks=normal(4),
        dropout=0.1,
        deterministic=True,
        backend=backend,
        algorithm=algorithm,
    )
    cu_q, cu_k = np.array([5, 25, 25, 48]), np.array([3, 20, 31, 66])
    case.cu_seqlens = (cu_q, cu_k)
    out, lse = case.forward()
    clean = {"out": out, "lse": lse} | dict(zip(case.wrt, case.backward(out, lse), strict=True))
    o, l = out.copy(), lse.copy()
    for array in (case.q, case.dout, o, l, case.dlse):
        array[:, :5] = array[:, 48:] = poison
    for array in (case.k, case.v):
        array[:, :3] = array[:, 66:] = poison
    out, lse = case.forward()
    equal({"out": out, "lse": lse} | dict(zip(case.wrt, case.backward(o, l), strict=True)), clean)


# ---- keys that a row does not see ---------------------------------------------------------------------

HIDDEN = [3, 16, 17, 40]  # in the middle of a tile, at both sides of its edge, in the last one


def hiding(T, dtype):
    """Options that hide the keys HIDDEN from every row (or bias them away), by name."""
    keep = np.ones(T, bool)
    keep[HIDDEN] = False
    bias = np.where(keep, 0, -np.inf).astype(dtype)
    return {
        "mask": dict(mask=keep),
        "bias": dict(bias=bias),
        "full mask": dict(mask=np.tile(keep, (2, 2, T, 1))),
        "full bias": dict(bias=np.tile(bias, (2, 2, T, 1))),
    }


@kernels
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "extra",
    [{}, dict(softcap=3.0), dict(dropout=0.3), dict(causal=True, window=(25, None))],
    ids=["plain", "softcap", "dropout", "band"],
)
@pytest.mark.parametrize("how", ["mask", "bias", "full mask", "full bias"])
def test_hidden_keys_of_any_finite_size_do_not_matter(how, extra, dtype, backend, algorithm):
    """Scores and dO.V of the hidden keys overflow to inf: 0 * inf would be NaN, so zeros must be selected."""
    T = 41
    options = hiding(T, DTYPES[dtype])[how] | extra
    case = make(
        Tq=T, dtype=dtype, deterministic=True, sram=32768, backend=backend, algorithm=algorithm, **options
    )
    case.q[:, :, 0] *= 9  # a row whose score with a hidden key overflows
    case.dout *= 9
    clean = all_of(case)
    huge = float(np.finfo(dtype).max)  # any two products of one sign overflow, but for float16
    signs = np.where(np.arange(8) % 2, 1, -1)
    for j in HIDDEN:
        case.k[:, :, j] = huge * np.sign(case.q[:, :, 0].astype(np.float64))
        case.v[:, :, j] = huge * signs
    poisoned = all_of(case)
    equal(poisoned, clean)
    for name in ("dk", "dv"):
        np.testing.assert_array_equal(poisoned[name][:, :, HIDDEN], 0)


@kernels
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "options", [dict(causal=True, q_offset=0), dict(window=(8, 2), q_offset=0)], ids=["causal", "window"]
)
def test_huge_keys_do_not_reach_the_rows_that_cannot_see_them(options, dtype, backend, algorithm):
    T, j = 41, 20
    case = make(Tq=T, dtype=dtype, deterministic=True, backend=backend, algorithm=algorithm, **options)
    clean = all_of(case)
    case.k[:, :, j] = case.v[:, :, j] = np.finfo(dtype).max
    poisoned = all_of(case)
    rows = np.arange(T)
    blind = rows < j if "causal" in options else (rows + 2 < j) | (rows - 8 > j)
    for name in ("out", "lse", "dq"):
        np.testing.assert_array_equal(poisoned[name][:, :, blind], clean[name][:, :, blind], err_msg=name)


@kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(causal=True),
        dict(window=(3, 3)),
        dict(softcap=2.0),
        dict(mask=np.arange(37) % 3 > 0),
        dict(sinks=np.zeros(2, np.float32)),
        dict(kv_lengths=[30, 19]),
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_nan_that_a_row_sees_makes_that_row_nan(where, options, dtype, backend, algorithm):
    """NaN in a row of q or in a key: NaN in exactly the rows that see it, never a plausible number.

    A NaN in v may reach rows that do not see it (the contract promises that for finite values only), so
    for v the other rows are not looked at.
    """
    T, spot = 37, 17
    case = make(Tq=T, dtype=dtype, backend=backend, algorithm=algorithm, **options)
    plain = make(Tq=T, dtype=dtype, backend=backend, algorithm=algorithm, **options).forward()
    getattr(case, where)[1, 1, spot, 2] = np.nan
    out, lse = case.forward()
    seen = (
        rf.oracle.attention(
            np.zeros((2, 2, T, 1)), np.zeros((2, 2, T, 1)), np.tile(np.eye(T), (2, 2, 1, 1)), **case.options
        )[1, 1]
        > 0
    )
    sees = np.arange(T) == spot if where == "q" else seen[:, spot]
    sees &= seen.any(axis=1)
    assert sees.any() or not seen[:, spot].any()
    assert np.isnan(out[1, 1, sees].astype(np.float64)).any(axis=-1).all(), (
        "a NaN that a row saw was swallowed"
    )
    if where == "v":
        assert not np.isnan(lse).any()
    else:
        assert np.isnan(lse[1, 1, sees]).all()
        np.testing.assert_array_equal(out[1, 1, ~sees], plain[0][1, 1, ~sees])
        np.testing.assert_array_equal(lse[1, 1, ~sees], plain[1][1, 1, ~sees])
    for other in [(0, 0), (0, 1), (1, 0)]:
        np.testing.assert_array_equal(out[other], plain[0][other])


@kernels
def test_a_nan_does_not_vanish_on_the_way_back(backend, algorithm):
    T = 37
    case = make(Tq=T, causal=True, q_offset=0, backend=backend, algorithm=algorithm)
    out, lse = case.forward()
    case.dout[0, 0, 20, 3] = np.nan
    dq, dk, dv = case.backward(out, lse)
    assert np.isnan(dq[0, 0, 20]).all()
    assert np.isnan(dk[0, 0, :21]).all() and np.isnan(dv[0, 0, :21, 3]).all()
    for gradient in (dq, dk, dv):
        assert np.isfinite(gradient[1]).all() and np.isfinite(gradient[0, 1]).all()


# ---- workspaces -------------------------------------------------------------------------------------


def litter():
    """Fill freed memory of every size with NaN: a workspace that is read before it is written gets NaN."""
    for _ in range(3):
        trash = [np.full(size, np.nan) for size in [2**n for n in range(1, 18)] + list(range(8, 4096, 24))]
        trash += [np.full(size, np.nan, np.float32) for size in range(16, 20_000, 208)]
        del trash


@kernels
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("sram", [None, 32768])
def test_dirty_memory_does_not_matter(sram, dtype, backend, algorithm):
    case = make(
        B=2,
        Hq=4,
        Hkv=2,
        Tq=51,
        Tk=77,
        d=11,
        dv=5,
        dtype=dtype,
        causal=True,
        sinks=normal(4),
        dropout=0.2,
        bias=half_hidden(1, 4, 51, 77),
        softcap=9.0,
        q_lengths=[51, 30],
        kv_lengths=[50, 77],
        sram=sram,
        deterministic=True,
        backend=backend,
        algorithm=algorithm,
    )
    first = all_of(case)
    assert all(np.isfinite(array[~np.isneginf(array)].astype(np.float64)).all() for array in first.values())
    for _ in range(2):
        litter()
        equal(all_of(case), first)


@kernels
def test_calls_do_not_leave_state_behind(backend, algorithm):
    """A bigger call, and one full of NaN, in between: the same bits before and after."""
    small = make(Tq=19, dropout=0.2, backend=backend, algorithm=algorithm, deterministic=True)
    big = make(Tq=140, d=24, causal=True, backend=backend, algorithm=algorithm)
    first = all_of(small)
    all_of(big)
    big.q[:] = big.v[:] = np.nan
    all_of(big)
    equal(all_of(small), first)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@kernels
def test_the_callers_error_state_is_not_that_of_kernels(dtype, backend, algorithm):
    """Probabilities that underflow, a gradient of the bias beyond float16."""
    case = make(
        dtype=dtype,
        Tq=20,
        Tk=30,
        causal=True,
        softcap=50.0,
        sinks=lambda rng, dtype: np.array([-200.0, 3.0], dtype),
        bias=lambda rng, dtype: np.zeros((1, 20, 1), dtype),
        backend=backend,
        algorithm=algorithm,
    )
    case.q[:, :, 3] *= 100
    if dtype == "float16":
        case.dout[:] = 60000
        case.v[...] = np.abs(case.v) * 100
    expected = all_of(case)
    with np.errstate(all="raise"):
        equal(all_of(case), expected)


def test_merge_in_any_error_state():
    outs, lses = np.ones((2, 1, 1), np.float32), np.array([[3e38], [-3e38]], np.float32)
    with np.errstate(all="raise"):
        merged, lse = rf.merge_attention(list(outs), list(lses))
    assert merged == 1 and lse == lses[0]
