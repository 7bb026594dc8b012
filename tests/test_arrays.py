"""Array kinds: what comes in as NumPy, PyTorch, a buffer or DLPack goes out as the same, with equal numbers.

Kinds are made into views before any backend sees them, so most tests run one backend, numpy_tiled, which
compiles nothing; where memory itself reaches the kernel (strides, byte order, ``out``) they run both.
"""

import array
import importlib.util

import ml_dtypes
import numpy as np
import pytest

import rawflash as rf
from rawflash import arrays

try:
    import torch
except ImportError:  # optional: what these tests say of PyTorch is then not checked
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")

TORCH = {name: getattr(torch, name, None) for name in ("float16", "bfloat16", "float32", "float64")}
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
B, HQ, HKV, TQ, TK, D, DV = 2, 4, 2, 9, 11, 8, 6


class DLPackOnly:
    """An array of a library that rawflash has never heard of: it speaks DLPack and nothing else."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def call(dtype="float32", layout="bhtd"):
    """q, k, v and dout as NumPy arrays."""
    rng = np.random.default_rng(7)
    shapes = ((B, HQ, TQ, D), (B, HKV, TK, D), (B, HKV, TK, DV), (B, HQ, TQ, DV))
    made = [rng.standard_normal(shape).astype(NUMPY[dtype]) for shape in shapes]
    return [np.ascontiguousarray(a.swapaxes(1, 2)) for a in made] if layout == "bthd" else made


def to_torch(a):
    """The same numbers in a tensor, by way of float64, which holds all of them."""
    return torch.tensor(a.astype(np.float64)).to(TORCH[a.dtype.name])


def to_numpy(x):
    """A tensor's bits as a NumPy array."""
    assert isinstance(x, torch.Tensor)
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def same_bits(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


OPTIONS = dict(causal=True, window=(5, None), softcap=8.0)


@needs_torch
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
@pytest.mark.parametrize("dtype", TORCH)
def test_torch_in_torch_out(dtype, layout):
    """Forward, lse and all gradients: tensors of the right dtype, bit for bit what NumPy arrays give."""
    numpy_call = call(dtype, layout)
    q, k, v, dout = numpy_call
    rng = np.random.default_rng(1)
    bias, sinks = (rng.standard_normal(shape).astype(NUMPY[dtype]) for shape in ((HQ, 1, TK), (HQ,)))
    statistic = np.float64 if dtype == "float64" else np.float32
    dlse = rng.standard_normal((B, HQ, TQ)).astype(statistic)
    options = OPTIONS | dict(layout=layout, backend="numpy_tiled", deterministic=True)
    wrt = ("q", "k", "v", "bias", "sinks")
    out, lse = rf.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True, **options)
    grads = rf.attention_backward(
        dout, q, k, v, out, lse, bias=bias, sinks=sinks, dlse=dlse, wrt=wrt, **options
    )
    assert lse.dtype == statistic

    tq, tk, tv, tdout, tbias, tsinks = (to_torch(a) for a in (*numpy_call, bias, sinks))
    tout, tlse = rf.attention(tq, tk, tv, bias=tbias, sinks=tsinks, return_lse=True, **options)
    tgrads = rf.attention_backward(
        tdout, tq, tk, tv, tout, tlse, bias=tbias, sinks=tsinks, dlse=torch.tensor(dlse), wrt=wrt, **options
    )
    assert tout.dtype == TORCH[dtype] and tlse.dtype == (
        torch.float64 if dtype == "float64" else torch.float32
    )
    same_bits(to_numpy(tout), out)
    same_bits(to_numpy(tlse), lse)
    for tgrad, grad, argument in zip(tgrads, grads, (q, k, v, bias, sinks), strict=True):
        same_bits(to_numpy(tgrad), grad)
        assert grad.dtype == argument.dtype and grad.shape == argument.shape


@needs_torch
def test_torch_options():
    """Masks, lengths, offsets, slopes and cu_seqlens may be tensors too."""
    q, k, v, _ = call()
    mask = np.random.default_rng(0).random((HQ, TQ, TK)) < 0.6
    host = dict(
        mask=mask,
        q_lengths=np.array([9, 3]),
        kv_lengths=np.array([0, 11], np.int32),
        q_offset=np.array([1, -2]),
        alibi_slopes=np.full((B, HQ), 0.25, np.float32),
    )
    want = rf.attention(q, k, v, backend="numpy_tiled", **host)
    got = rf.attention(
        *(torch.tensor(a) for a in (q, k, v)),
        backend="numpy_tiled",
        **{name: torch.tensor(value) for name, value in host.items()},
    )
    same_bits(to_numpy(got), want)
    cu_q, cu_k = np.array([0, 4, 9], np.int32), np.array([0, 11, 11], np.int32)
    want = rf.attention_varlen(q[0], k[0], v[0], cu_q, cu_k, backend="numpy_tiled")
    got = rf.attention_varlen(
        *(torch.tensor(a[0]) for a in (q, k, v)),
        torch.tensor(cu_q),
        torch.tensor(cu_k),
        backend="numpy_tiled",
    )
    same_bits(to_numpy(got), want)


@needs_torch
def test_torch_other_functions():
    q, k, v, dout = (torch.tensor(a) for a in call())
    (out, lse), pullback = rf.attention_vjp(q, k, v, return_lse=True, wrt=("v", "q"), backend="numpy_tiled")
    grads = pullback(dout, torch.zeros_like(lse))
    assert [g.shape for g in grads] == [v.shape, q.shape]
    assert all(isinstance(x, torch.Tensor) for x in (out, lse, *grads))
    merged, total = rf.merge_attention([out, out], [lse, lse])
    assert isinstance(merged, torch.Tensor) and isinstance(total, torch.Tensor)
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(total, lse + np.log(np.float32(2)))


@needs_torch
def test_torch_strides_are_honoured():
    """A transposed and a strided tensor: a view or a copy, but the same numbers."""
    q, k, v, _ = call()
    want = rf.attention(q, k, v, backend="numpy_tiled")
    transposed = torch.tensor(np.ascontiguousarray(q.swapaxes(1, 2))).transpose(1, 2)
    assert not transposed.is_contiguous()
    wide = torch.zeros(B, HKV, TK, 2 * D)[..., ::2]
    wide[...] = torch.tensor(k)
    same_bits(to_numpy(rf.attention(transposed, wide, torch.tensor(v), backend="numpy_tiled")), want)


@needs_torch
def test_the_result_is_of_the_kind_of_q():
    """Libraries may be mixed on one device."""
    q, k, v, _ = call()
    assert isinstance(rf.attention(q, torch.tensor(k), torch.tensor(v), backend="numpy_tiled"), np.ndarray)
    assert isinstance(rf.attention(torch.tensor(q), k, v, backend="numpy_tiled"), torch.Tensor)


@needs_torch
def test_subclasses_keep_their_library():
    class MyTensor(torch.Tensor):
        pass

    q, k, v, _ = call()
    parameter = torch.nn.Parameter(torch.tensor(q), requires_grad=False)
    for mine in (parameter, torch.tensor(q).as_subclass(MyTensor)):
        assert isinstance(
            rf.attention(mine, torch.tensor(k), torch.tensor(v), backend="numpy_tiled"), torch.Tensor
        )


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_subclasses_of_ndarray_are_arrays():
    """Their arithmetic is their own: what a kernel sees is the plain array."""
    q, k, v = (a[0, 0] for a in call()[:3])
    want = rf.attention(q, k, v, backend="numpy_tiled")
    got = rf.attention(*(a.view(np.matrix) for a in (q, k, v)), backend="numpy_tiled")
    np.testing.assert_array_equal(np.asarray(got), want)


def test_masked_arrays_are_refused():
    """Their mask would be dropped without a word."""
    q, k, v = (a[0, 0] for a in call()[:3])
    with pytest.raises(rf.ProblemError, match="k is a masked array; expected .*mask="):
        rf.attention(q, k.view(np.ma.MaskedArray), v, backend="numpy_tiled")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dlpack_only(dtype):
    q, k, v, dout = call(dtype)
    out, lse = rf.attention(q, k, v, return_lse=True, backend="numpy_tiled")
    got, got_lse = rf.attention(*map(DLPackOnly, (q, k, v)), return_lse=True, backend="numpy_tiled")
    same_bits(got, out)
    same_bits(got_lse, lse)
    wrapped = map(DLPackOnly, (dout, q, k, v, out, lse))
    for grad, want in zip(
        rf.attention_backward(*wrapped, backend="numpy_tiled"),
        rf.attention_backward(dout, q, k, v, out, lse, backend="numpy_tiled"),
        strict=True,
    ):
        same_bits(grad, want)


def test_dlpack_on_a_gpu_is_a_gpu_array(no_gpu):
    class OnGpu(DLPackOnly):
        def __dlpack_device__(self):
            return (2, 0)

    q, k, v, _ = call()
    with pytest.raises(rf.ProblemError, match="k is a GPU array"):
        rf.attention(q, OnGpu(k), v)
    with pytest.raises(rf.BackendError):
        rf.attention(OnGpu(q), OnGpu(k), OnGpu(v))


@pytest.mark.parametrize("code", "fd")
def test_buffers(code):
    """``array.array`` is one flat buffer; a memoryview gives it its axes."""
    dtype = "float32" if code == "f" else "float64"
    plain = [a[0, 0] for a in call(dtype)[:3]]
    views = [memoryview(array.array(code, a.ravel().tolist())).cast("B").cast(code, a.shape) for a in plain]
    same_bits(rf.attention(*views, backend="numpy_tiled"), rf.attention(*plain, backend="numpy_tiled"))
    with pytest.raises(rf.ProblemError, match="q has shape"):
        rf.attention(array.array(code, [1.0, 2.0]), *views[1:])


def test_buffers_for_options():
    q, k, v, _ = call()
    lengths = array.array("q", [4, 11])
    slopes = array.array("d", [0.5, 0.25, 0.0, 1.0])
    got = rf.attention(
        q,
        k,
        v,
        kv_lengths=lengths,
        alibi_slopes=slopes,
        sinks=array.array("f", [0.0] * HQ),
        backend="numpy_tiled",
    )
    want = rf.attention(
        q,
        k,
        v,
        kv_lengths=[4, 11],
        alibi_slopes=np.array(slopes),
        sinks=np.zeros(HQ, np.float32),
        backend="numpy_tiled",
    )
    same_bits(got, want)
    out = array.array("f", [7.0] * TQ * DV)
    target = memoryview(out).cast("B").cast("f", (TQ, DV))
    assert rf.attention(q[0, 0], k[0, 0], v[0, 0], out=target, backend="numpy_tiled") is target
    same_bits(
        np.array(out, np.float32).reshape(TQ, DV),
        rf.attention(q[0, 0], k[0, 0], v[0, 0], backend="numpy_tiled"),
    )


@pytest.mark.parametrize("order", "<>")
def test_byte_order(order, cpu_backend):
    """Arrays of the other byte order, in every argument, are read as what they say."""
    q, k, v, dout = call()
    rng = np.random.default_rng(3)
    bias, sinks, dlse = (rng.standard_normal(s).astype(np.float32) for s in ((TQ, TK), (HQ,), (B, HQ, TQ)))
    slopes, lengths = rng.random(HQ).astype(np.float32), np.array([11, 4])
    wrt = ("q", "k", "v", "bias", "sinks")

    def run(swap):
        options = dict(
            bias=swap(bias),
            sinks=swap(sinks),
            alibi_slopes=swap(slopes),
            kv_lengths=swap(lengths),
            q_offset=swap(np.array([2, 0])),
            backend=cpu_backend,
            deterministic=True,
        )
        inputs = [swap(a) for a in (q, k, v)]
        out, lse = rf.attention(*inputs, return_lse=True, **options)
        return (
            out,
            lse,
            *rf.attention_backward(
                swap(dout), *inputs, swap(out), swap(lse), dlse=swap(dlse), wrt=wrt, **options
            ),
        )

    for got, want in zip(run(lambda a: a.astype(a.dtype.newbyteorder(order))), run(lambda a: a), strict=True):
        np.testing.assert_array_equal(got, want)


def misaligned(a):
    return np.frombuffer(b"\0" * 65 + a.tobytes(), np.uint8)[65:].view(a.dtype).reshape(a.shape)


@pytest.mark.parametrize(
    "change",
    [
        misaligned,
        np.asfortranarray,
        lambda a: np.repeat(a, 2, -1)[..., ::2],
        lambda a: np.ascontiguousarray(a[..., ::-1])[..., ::-1],
    ],
    ids=["misaligned", "fortran", "strided last", "reversed last"],
)
def test_strides_of_every_argument(change, cpu_backend):
    """Not only q, k and v: bias, mask, sinks, slopes, dout, o, lse and dlse may lie anyhow in memory."""
    q, k, v, dout = call()
    rng = np.random.default_rng(4)
    bias, sinks, dlse = (
        rng.standard_normal(s).astype(np.float32) for s in ((HQ, TQ, TK), (HQ,), (B, HQ, TQ))
    )
    mask, slopes = rng.random((B, 1, TQ, TK)) < 0.7, rng.random((B, HQ)).astype(np.float32)

    def run(change):
        options = dict(
            bias=change(bias),
            sinks=change(sinks),
            mask=change(mask),
            alibi_slopes=change(slopes),
            backend=cpu_backend,
            deterministic=True,
        )
        inputs = [change(a) for a in (q, k, v)]
        out, lse = rf.attention(*inputs, return_lse=True, **options)
        return (
            out,
            lse,
            *rf.attention_backward(
                change(dout),
                *inputs,
                change(out),
                change(lse),
                dlse=change(dlse),
                wrt=("q", "k", "v", "bias", "sinks"),
                **options,
            ),
        )

    for got, want in zip(run(change), run(lambda a: a), strict=True):
        np.testing.assert_array_equal(got, want)


# ---- out= ---------------------------------------------------------------------------------------------

OUTS = {
    "contiguous": lambda shape, dtype: np.full(shape, np.nan, dtype),
    "transposed": lambda shape, dtype: np.full(shape[::-1], np.nan, dtype).T,
    "heads swapped": lambda shape, dtype: np.full(
        (shape[0], shape[2], shape[1], shape[3]), np.nan, dtype
    ).swapaxes(1, 2),
    "sliced": lambda shape, dtype: np.full([2 * n for n in shape], np.nan, dtype)[
        tuple(slice(n) for n in shape)
    ],
    "strided last": lambda shape, dtype: np.full((*shape[:-1], 2 * shape[-1]), np.nan, dtype)[..., ::2],
    "reversed": lambda shape, dtype: np.full(shape, np.nan, dtype)[:, :, ::-1, ::-1],
    "byte-swapped": lambda shape, dtype: np.full(shape, np.nan, np.dtype(dtype).newbyteorder()),
}


@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
@pytest.mark.parametrize("memory", OUTS)
def test_out(memory, layout, cpu_backend):
    """``out`` is returned, holds the result, and nothing around it is written."""
    q, k, v, _ = call(layout=layout)
    # A row that sees nothing, and padding: what is not computed must be written all the same.
    options = dict(layout=layout, backend=cpu_backend, causal=True, q_offset=-1, q_lengths=[9, 3])
    want, want_lse = rf.attention(q, k, v, return_lse=True, **options)
    out = OUTS[memory](want.shape, np.float32)
    home = out if out.base is None else out.base
    result = rf.attention(q, k, v, out=out, **options)
    assert result is out
    np.testing.assert_array_equal(out, want)
    assert np.isnan(home).sum() == home.size - out.size, "what is not out stays as it was"
    result, lse = rf.attention(q, k, v, out=out, return_lse=True, **options)
    assert result is out
    np.testing.assert_array_equal(lse, want_lse)


@needs_torch
@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("memory", ["contiguous", "transposed", "sliced", "strided last"])
def test_torch_out(memory, dtype):
    q, k, v = (to_torch(a) for a in call(dtype)[:3])
    want = rf.attention(q, k, v, backend="numpy_tiled")
    shape = tuple(want.shape)
    out = {
        "contiguous": lambda: torch.full(shape, torch.nan),
        "transposed": lambda: torch.full(shape[::-1], torch.nan).permute(3, 2, 1, 0),
        "sliced": lambda: torch.full((B, HQ, 2 * TQ, DV), torch.nan)[:, :, ::2],
        "strided last": lambda: torch.full((B, HQ, TQ, 2 * DV), torch.nan)[..., ::2],
    }[memory]()
    out = (
        out.to(TORCH[dtype])
        if memory == "contiguous"
        else torch.empty_strided(shape, out.stride(), dtype=TORCH[dtype]).fill_(torch.nan)
    )
    assert rf.attention(q, k, v, out=out, backend="numpy_tiled") is out
    same_bits(to_numpy(out), to_numpy(want))


@pytest.mark.parametrize("which", ["q", "k", "v", "part of q", "bias", "same buffer, shifted"])
def test_out_may_overlap_an_input(which, cpu_backend):
    """``out`` that is an input, or shares memory with it: the result is that of separate arrays."""
    rng = np.random.default_rng(5)
    home = rng.standard_normal((3, 2, TK, TK)).astype(np.float32)
    q, k, v = (a.copy() for a in home)
    bias = rng.standard_normal((2, TK, TK)).astype(np.float32)
    want = rf.attention(q, k, v, bias=bias, backend=cpu_backend)
    buffer = np.zeros(q.size + 5, np.float32)
    if which == "part of q":
        wide = np.zeros((2, TK, 2 * TK), np.float32)
        wide[..., ::2] = q
        q, out = wide[..., ::2], wide[..., :TK]
    elif which == "same buffer, shifted":
        buffer[: q.size] = q.ravel()
        q, out = buffer[: q.size].reshape(q.shape), buffer[5:].reshape(q.shape)
    else:
        out = {"q": q, "k": k, "v": v, "bias": bias}[which]
    assert rf.attention(q, k, v, bias=bias, out=out, backend=cpu_backend) is out
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize(
    "name", ["mask", "mask object", "alibi_slopes", "q_lengths", "kv_lengths", "q_offset", "cu_seqlens"]
)
def test_out_may_overlap_what_is_no_matrix(name, cpu_backend):
    """These too are read while ``out`` is written."""
    q, k, v = (np.random.default_rng(6).standard_normal((3, 2, 2, 8, 8)))
    out = np.zeros_like(q)
    words, flags = out.reshape(-1).view(np.int64), out.reshape(-1).view(bool)

    def inside(values, home):
        view = home[: np.size(values)].reshape(np.shape(values))
        view[...] = values
        return view

    run, options = rf.attention, {
        "mask": lambda: dict(mask=inside(np.tri(8, dtype=bool), flags)),
        "mask object": lambda: dict(mask=rf.masks.Segments(inside(np.arange(8) // 3, words), np.arange(8) // 3)),
        "alibi_slopes": lambda: dict(alibi_slopes=inside([[0.5, 1.0], [0.25, 2.0]], out.reshape(-1))),
        "q_lengths": lambda: dict(q_lengths=inside([3, 8], words)),
        "kv_lengths": lambda: dict(kv_lengths=inside([2, 7], words)),
        "q_offset": lambda: dict(causal=True, q_offset=inside([1, -3], words)),
        "cu_seqlens": lambda: dict(cu_seqlens_q=inside([0, 3, 8], words), cu_seqlens_k=np.array([0, 4, 8])),
    }[name]  # fmt: skip
    if name == "cu_seqlens":
        run, q, k, v, out = rf.attention_varlen, q[0], k[0], v[0], out[0]
    made = options()
    apart = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in made.items()}
    if name == "mask object":
        apart = dict(mask=rf.masks.Segments(np.arange(8) // 3, np.arange(8) // 3))
    want = run(q, k, v, backend=cpu_backend, **apart)
    assert run(q, k, v, backend=cpu_backend, out=out, **made) is out
    np.testing.assert_array_equal(out, want)


def test_out_of_dlpack_only_is_written_or_refused():
    """A producer that does not say its memory is writable is refused; nothing is lost silently."""
    q, k, v, _ = call()
    want = rf.attention(q, k, v, backend="numpy_tiled")
    home = np.zeros_like(want)
    out = DLPackOnly(home)
    try:
        assert rf.attention(q, k, v, out=out, backend="numpy_tiled") is out
    except rf.ProblemError as error:
        assert "out" in str(error) and not home.any()
    else:
        np.testing.assert_array_equal(home, want)


@pytest.mark.parametrize("shape", [(0, HQ, TQ, D), (B, HQ, 0, D)])
def test_empty_out(shape):
    q = np.zeros(shape, np.float32)
    out = np.zeros(shape, np.float32)
    assert rf.attention(q, q, q, out=out) is out


# ---- results ------------------------------------------------------------------------------------------


def test_results_are_fresh_and_writable(cpu_backend):
    """No result shares memory with an argument or with another result."""
    q, k, v, dout = call()
    out, lse = rf.attention(q, k, v, return_lse=True, backend=cpu_backend)
    grads = rf.attention_backward(dout, q, k, v, out, lse, backend=cpu_backend)
    results = [out, lse, *grads]
    for n, result in enumerate(results):
        assert result.flags.writeable
        for other in (q, k, v, dout, *results[:n]):
            assert not np.may_share_memory(result, other)


def test_inputs_are_not_changed():
    inputs = call()
    before = [a.tobytes() for a in inputs]
    for a in inputs:
        a.flags.writeable = False
    q, k, v, dout = inputs
    out, lse = rf.attention(q, k, v, return_lse=True, causal=True, backend="numpy_tiled")
    rf.attention_backward(dout, q, k, v, out, lse, causal=True, backend="numpy_tiled")
    assert [a.tobytes() for a in inputs] == before


def test_kind_of():
    assert arrays.kind_of(np.zeros(1)) == "numpy"
    assert arrays.kind_of(memoryview(b"")) == "numpy"
    assert not arrays.on_gpu(np.zeros(1))
    if torch is not None:
        assert arrays.kind_of(torch.zeros(1)) == "torch" and not arrays.on_gpu(torch.zeros(1))


def test_as_numpy_makes_views():
    """No copy for any kind."""
    host = np.arange(6.0)
    assert arrays.as_numpy("q", host) is host
    assert np.shares_memory(arrays.as_numpy("q", DLPackOnly(host)), host)
    assert np.shares_memory(arrays.as_numpy("q", memoryview(host)), host)
    for dtype in TORCH.values() if torch is not None else ():
        tensor = torch.zeros(3, dtype=dtype)
        arrays.as_numpy("q", tensor)[1] = 2
        assert tensor.tolist() == [0, 2, 0]


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
def test_jax_in_jax_out():
    import jax
    import jax.numpy as jnp

    q, k, v, dout = call()
    want, want_lse = rf.attention(q, k, v, return_lse=True, backend="numpy_tiled")
    jq, jk, jv, jdout = (jnp.asarray(a) for a in (q, k, v, dout))
    out, lse = rf.attention(jq, jk, jv, return_lse=True, backend="numpy_tiled")
    assert isinstance(out, jax.Array) and isinstance(lse, jax.Array)
    np.testing.assert_array_equal(np.asarray(out), want)
    np.testing.assert_array_equal(np.asarray(lse), want_lse)
    grads = rf.attention_backward(jdout, jq, jk, jv, out, lse, backend="numpy_tiled")
    assert all(isinstance(grad, jax.Array) for grad in grads)
    with pytest.raises(rf.ProblemError, match="out"):
        rf.attention(jq, jk, jv, out=jnp.zeros(want.shape, want.dtype))
