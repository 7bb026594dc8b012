"""Who is measured: our backends, and the peers beside them.

A runner prepares a case: what it returns is called without arguments, and does one forward pass, or one backward pass
whose forward results are there, all of its kernels. No library is imported before it is asked for.

Backward passes of PyTorch are its operators rather than autograd, so that nothing but their kernels is timed.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from bench.cases import ITEMSIZE, Case
from bench.inputs import Inputs

Call = Callable[[], Any]
DENSE_MOST = 40 << 30  # bytes of scores
HALVES = ("float16", "bfloat16")


class Runner:
    """Who runs cases.

    Attributes
    ----------
    name : str
    device : {"gpu", "cpu"}
    queue : {"torch", "cupy", "wall", "cpu"}
        How its calls are timed, see :mod:`bench.timing`.
    captures : bool
        Can its calls be part of a CUDA graph?
    dtypes : tuple of str
    heads : bool
        Does it take fewer heads of K and V than of Q?
    packs : bool
        Does it take packed sequences?
    directions : tuple of str
    """

    name = ""
    device = "gpu"
    queue = "torch"
    captures = True
    dtypes: tuple[str, ...] = HALVES
    heads = True
    packs = False
    directions: tuple[str, ...] = ("forward", "backward")

    def version(self) -> str:
        """Version of the library, which is imported; an exception where it cannot be."""
        import torch

        if self.device == "gpu" and not torch.cuda.is_available():
            raise ImportError("torch sees no GPU")
        return torch.__version__

    def why_not(self, case: Case) -> str | None:
        """Why it does not take a case; None where it may."""
        if case.device != self.device:
            return f"runs on a {self.device.upper()}"
        if case.dtype not in self.dtypes:
            return f"takes {', '.join(self.dtypes)}"
        if case.direction not in self.directions:
            return f"no {case.direction} here"
        if case.Hq != case.Hkv and not self.heads:
            return "needs as many heads of K and V as of Q"
        if case.packed and not self.packs:
            return "takes no packed sequences here"
        return None

    def prepare(self, case: Case, x: Inputs) -> Call:
        """What does one pass."""
        raise NotImplementedError

    def results(self, case: Case, result: Any) -> Sequence[Any]:
        """Arrays of a pass, as in ``inputs.NAMES``, ``(B, H, T, d)``."""
        return (result,) if hasattr(result, "shape") else result


# ---- ours ----------------------------------------------------------------------------------------------------


class Ours(Runner):
    """A backend and an algorithm of rawflash; ``deterministic``: backward passes in a fixed order."""

    dtypes = tuple(ITEMSIZE)
    packs = True
    directions = ("forward", "backward", "decode")

    def __init__(self, backend: str, algorithm: str = "fa2", deterministic: bool = False) -> None:
        self.backend, self.algorithm, self.deterministic = backend, algorithm, deterministic
        self.name = " ".join([backend, *[algorithm] * (algorithm != "fa2"), *["deterministic"] * deterministic])
        self.device = "cpu" if backend in ("numba_cpu", "numpy_tiled") else "gpu"
        self.queue = "cpu" if self.device == "cpu" else "cupy"
        self.sram: int | None = None

    def within(self, sram: int | None) -> Ours:
        """The same with another M; None: what the device has."""
        other = copy.copy(self)
        other.sram = sram
        return other

    def version(self) -> str:
        import rawflash

        return rawflash.__version__

    def options(self, case: Case) -> dict[str, Any]:
        options: dict[str, Any] = {"backend": self.backend, "sram": self.sram}
        if case.direction != "decode":
            options |= {"algorithm": self.algorithm, "causal": case.causal}
        return options

    def arrays(self, x: Inputs) -> Inputs:
        """The arrays that go in: NumPy's, on a GPU CuPy's, of the same memory."""
        if self.device == "cpu":
            from rawflash.arrays import as_numpy

            def taken(a: Any) -> Any:
                return as_numpy("an input", a)
        else:
            import cupy

            taken = cupy.from_dlpack
        q, k, v, dout, starts = (a if a is None else taken(a) for a in (x.q, x.k, x.v, x.dout, x.starts))
        return Inputs(q, k, v, dout, tuple(taken(a) for a in x.blocks), starts)

    def prepare(self, case: Case, x: Inputs) -> Call:
        import rawflash as rf

        x, options = self.arrays(x), self.options(case)
        backward = options | ({"deterministic": True} if self.deterministic else {})
        if case.packed:
            packed = (x.q[0], x.k[0], x.v[0])
            starts = dict(cu_seqlens_q=x.starts, cu_seqlens_k=x.starts)
            if case.direction == "forward":
                return lambda: rf.attention_varlen(*packed, **starts, **options)
            out, lse = rf.attention_varlen(*packed, **starts, return_lse=True, **options)
            return lambda: rf.attention_varlen_backward(x.dout[0], *packed, out, lse, **starts, **backward)
        if case.direction == "backward":
            out, lse = rf.attention(x.q, x.k, x.v, return_lse=True, **options)
            return lambda: rf.attention_backward(x.dout, x.q, x.k, x.v, out, lse, **backward)
        if case.direction == "forward" or self.device == "cpu":
            return lambda: rf.attention(x.q, x.k, x.v, **options)
        import cupy

        lengths = cupy.full(case.B, case.Tk, "int32")
        k, v, *table = x.blocks or (x.k, x.v)
        return lambda: rf.attention_decode(x.q, k, v, lengths, *table, **options)

    def results(self, case: Case, result: Any) -> Sequence[Any]:
        results = super().results(case, result)
        if case.packed:
            results = [a[None] for a in results]
        if self.device == "cpu":
            return results
        import torch

        return [torch.from_dlpack(a) for a in results]

    def plan(self, case: Case, x: Inputs, **options: Any) -> dict[str, Any]:
        """Kernel and tiles that a call has."""
        import rawflash as rf

        x, options = self.arrays(x), self.options(case) | options
        direction = "backward" if case.direction == "backward" else "forward"
        options |= {"deterministic": True} if self.deterministic and direction == "backward" else {}
        k, v, *table = x.blocks or (x.k, x.v)
        if case.direction == "decode":
            lengths = [case.Tk] * case.B
            options |= {"kv_lengths": lengths} | ({"block_table": table[0]} if table else {})
        q = x.q
        if case.packed:
            q, k, v = (a[0] for a in (q, k, v))
            options |= {"cu_seqlens_q": x.starts, "cu_seqlens_k": x.starts}
        plan = rf.explain(q, k, v, direction, **options)
        tiles = plan.tiles
        return {
            "kernel": plan.kernel,
            "tiles": {
                "br": tiles.br, "bc": tiles.bc, "smem": tiles.smem_bytes, "family": tiles.family, "parts": tiles.parts,
            },
        }  # fmt: skip


# ---- PyTorch -------------------------------------------------------------------------------------------------


def _scale(x: Inputs) -> float:
    return 1 / math.sqrt(x.q.shape[-1])


def _by_tokens(dout: Any) -> Any:
    """The same gradient, in memory as PyTorch's kernels want it, (B, T, H, d): else each call copies it."""
    return dout.transpose(1, 2).contiguous().transpose(1, 2)


def _by_rows(a: Any) -> Any:
    """Packed sequences as PyTorch's kernels and FlashAttention-4 have them, (rows, H, d)."""
    return a[0].transpose(0, 1).contiguous()


class TorchFlash(Runner):
    """FlashAttention-2."""

    name = "torch-flash"
    packs = True
    directions = ("forward", "backward", "decode")
    backend = "FLASH_ATTENTION"

    def prepare(self, case: Case, x: Inputs) -> Call:
        if case.direction == "decode":
            return self._decode(case, x)
        return self._packed(case, x) if case.packed else self._passes(case, x)

    def _decode(self, case: Case, x: Inputs) -> Call:
        """The public function, which PyTorch's operators have heads and splits of keys from."""
        import torch

        backend = getattr(torch.nn.attention.SDPBackend, self.backend)

        def call() -> Any:
            with torch.nn.attention.sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(x.q, x.k, x.v, enable_gqa=case.Hq != case.Hkv)

        return call

    def _passes(self, case: Case, x: Inputs) -> Call:
        import torch

        forward, scale = torch.ops.aten._scaled_dot_product_flash_attention, _scale(x)
        if case.direction == "forward":
            return lambda: forward(x.q, x.k, x.v, 0.0, case.causal, scale=scale)
        out, lse, cu_q, cu_k, most_q, most_k, seed, unused, _ = forward(x.q, x.k, x.v, 0.0, case.causal, scale=scale)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
        rest = (cu_q, cu_k, most_q, most_k, 0.0, case.causal, seed, unused)
        dout = _by_tokens(x.dout)
        return lambda: backward(dout, x.q, x.k, x.v, out, lse, *rest, scale=scale)

    def _packed(self, case: Case, x: Inputs) -> Call:
        import torch

        q, k, v, *dout = (_by_rows(a) for a in (x.q, x.k, x.v, x.dout) if a is not None)
        forward, most = torch.ops.aten._flash_attention_forward, max(case.packed)
        starts, scale = (x.starts, x.starts, most, most, 0.0, case.causal), _scale(x)
        if case.direction == "forward":
            return lambda: forward(q, k, v, *starts, False, scale=scale)
        out, lse, seed, unused, _ = forward(q, k, v, *starts, False, scale=scale)
        backward = torch.ops.aten._flash_attention_backward
        return lambda: backward(*dout, q, k, v, out, lse, *starts, seed, unused, scale=scale)

    def results(self, case: Case, result: Any) -> Sequence[Any]:
        """Tuples of operators go on: lse, seeds, the gradient of a bias."""
        results = super().results(case, result)[: 3 if case.direction == "backward" else 1]
        return [a.transpose(0, 1)[None] for a in results] if case.packed else results


class TorchCudnn(TorchFlash):
    """cuDNN in PyTorch."""

    name = "torch-cudnn"
    packs = False
    backend = "CUDNN_ATTENTION"

    def version(self) -> str:
        import torch

        return f"{super().version()}, cuDNN {torch.backends.cudnn.version()}"

    def _passes(self, case: Case, x: Inputs) -> Call:
        import torch

        forward, scale = torch.ops.aten._scaled_dot_product_cudnn_attention, _scale(x)
        if case.direction == "forward":
            return lambda: forward(x.q, x.k, x.v, None, False, 0.0, case.causal, False, scale=scale)
        out, lse, cu_q, cu_k, most_q, most_k, seed, offset, _ = forward(
            x.q, x.k, x.v, None, True, 0.0, case.causal, False, scale=scale
        )
        backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        rest = (seed, offset, None, cu_q, cu_k, most_q, most_k, 0.0, case.causal)
        return lambda: backward(x.dout, x.q, x.k, x.v, out, lse, *rest, scale=scale)


class TorchEfficient(TorchFlash):
    """Memory-efficient attention, the fused one of PyTorch that has float32."""

    name = "torch-efficient"
    packs = False
    dtypes = ("float16", "bfloat16", "float32")
    directions = ("forward", "backward")
    heads = False

    def _passes(self, case: Case, x: Inputs) -> Call:
        import torch

        forward, scale = torch.ops.aten._scaled_dot_product_efficient_attention, _scale(x)
        if case.direction == "forward":
            return lambda: forward(x.q, x.k, x.v, None, False, 0.0, case.causal, scale=scale)
        out, lse, seed, offset = forward(x.q, x.k, x.v, None, True, 0.0, case.causal, scale=scale)
        backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        rest = (seed, offset, 0.0, [True, True, True, False], case.causal)
        dout = _by_tokens(x.dout)
        return lambda: backward(dout, x.q, x.k, x.v, None, out, lse, *rest, scale=scale)


class Autograd(Runner):
    """A function of PyTorch whose backward pass is autograd's."""

    captures = False

    def attend(self, case: Case, x: Inputs) -> Callable[..., Any]:
        """From q, k and v to the output."""
        raise NotImplementedError

    def prepare(self, case: Case, x: Inputs) -> Call:
        import torch

        attend = self.attend(case, x)
        if case.direction != "backward":
            return lambda: attend(x.q, x.k, x.v)
        leaves = [a.detach().requires_grad_() for a in (x.q, x.k, x.v)]
        out = attend(*leaves)
        return lambda: torch.autograd.grad(out, leaves, x.dout, retain_graph=True)


class TorchMath(Autograd):
    """The dense formula in PyTorch."""

    name = "torch-math"
    dtypes = tuple(ITEMSIZE)

    def why_not(self, case: Case) -> str | None:
        return super().why_not(case) or _too_large(case)

    def attend(self, case: Case, x: Inputs) -> Callable[..., Any]:
        import torch

        function, gqa = torch.ops.aten._scaled_dot_product_attention_math, case.Hq != case.Hkv
        return lambda q, k, v: function(q, k, v, None, 0.0, case.causal, scale=_scale(x), enable_gqa=gqa)[0]


class Flex(Autograd):
    """FlexAttention, compiled for each case."""

    name = "flex"
    dtypes = ("float16", "bfloat16", "float32")
    _compiled: tuple[str, Any] = ("", None)

    def attend(self, case: Case, x: Inputs) -> Callable[..., Any]:
        import torch
        import torch._functorch.config
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if self._compiled[0] != case.name:  # what an earlier case compiled would make this one's sizes dynamic
            torch._dynamo.reset()
            torch._functorch.config.donated_buffer = False  # the backward pass is run more than once
            self._compiled = case.name, torch.compile(flex_attention, dynamic=False)
        compiled, mask = self._compiled[1], None
        if case.causal:
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, case.Tq, case.Tk, device=x.q.device.type)
        return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=case.Hq != case.Hkv)


class TorchCpu(Autograd):
    """PyTorch's attention on the CPU."""

    name = "torch-cpu"
    device = queue = "cpu"
    dtypes = ("float32", "float64", "bfloat16", "float16")
    directions = ("forward", "backward", "decode")

    def attend(self, case: Case, x: Inputs) -> Callable[..., Any]:
        import torch

        function = torch.nn.functional.scaled_dot_product_attention
        return lambda q, k, v: function(q, k, v, is_causal=case.causal, enable_gqa=case.Hq != case.Hkv)


# ---- others --------------------------------------------------------------------------------------------------


class FlashAttention4(Runner):
    """flash_attn.cute; its layout is (B, T, H, d), and it has no split over keys on sm_90: no decoding."""

    name = "fa4"
    packs = True

    def version(self) -> str:
        import flash_attn.cute.interface  # noqa: F401

        super().version()
        return metadata.version("flash-attn-4")

    def prepare(self, case: Case, x: Inputs) -> Call:
        from flash_attn.cute import interface

        if case.packed:
            q, k, v, *gradient = (_by_rows(a) for a in (x.q, x.k, x.v, x.dout) if a is not None)
            most = dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(case.packed))
            how = dict(causal=case.causal) | most | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), x.starts)
            if case.direction == "forward":
                return lambda: interface.flash_attn_varlen_func(q, k, v, **how)
            out, lse = interface.flash_attn_varlen_func(q, k, v, return_lse=True, **how)
            return lambda: interface._flash_attn_bwd(q, k, v, out, *gradient, lse, **how)
        q, k, v = (a.transpose(1, 2).contiguous() for a in (x.q, x.k, x.v))
        if case.direction == "forward":
            return lambda: interface.flash_attn_func(q, k, v, causal=case.causal)
        dout = x.dout.transpose(1, 2).contiguous()
        out, lse = interface.flash_attn_func(q, k, v, causal=case.causal, return_lse=True)
        return lambda: interface._flash_attn_bwd(q, k, v, out, dout, lse, causal=case.causal)

    def results(self, case: Case, result: Any) -> Sequence[Any]:
        results = result[:3] if case.direction == "backward" else result[:1]
        return [a.transpose(0, 1)[None] if case.packed else a.transpose(1, 2) for a in results]


class Jax(Runner):
    """jax.nn.dot_product_attention, jitted; its layout is (B, T, H, d). JAX's stream is its own."""

    queue = "wall"
    captures = False

    def __init__(self, implementation: str) -> None:
        self.implementation, self.name = implementation, f"jax-{implementation}"

    def version(self) -> str:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else three quarters of the memory are its own
        import jax

        if self.device == "gpu" and jax.default_backend() != "gpu":
            raise ImportError(f"jax runs on {jax.default_backend()}")
        return jax.__version__

    def why_not(self, case: Case) -> str | None:
        return super().why_not(case) or (_too_large(case) if self.implementation == "xla" else None)

    def prepare(self, case: Case, x: Inputs) -> Call:
        import jax

        q, k, v, *dout = (
            jax.dlpack.from_dlpack(a.transpose(1, 2).contiguous()) for a in (x.q, x.k, x.v, x.dout) if a is not None
        )

        def attend(q: Any, k: Any, v: Any) -> Any:
            return jax.nn.dot_product_attention(q, k, v, is_causal=case.causal, implementation=self.implementation)

        if case.direction == "forward":
            forward = jax.jit(attend)
            return lambda: forward(q, k, v)
        _, pullback = jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v))(q, k, v)
        backward = jax.jit(lambda pullback, dout: pullback(dout))
        return lambda: backward(pullback, *dout)

    def wait(self, result: Any) -> Any:
        """Until a result is there."""
        import jax

        return jax.block_until_ready(result)

    def results(self, case: Case, result: Any) -> Sequence[Any]:
        import torch

        return [torch.from_dlpack(a).transpose(1, 2) for a in super().results(case, self.wait(result))]


class DenseCupy(Runner):
    """What a user of CuPy writes today."""

    name = "dense-cupy"
    queue = "cupy"
    captures = False
    dtypes = ("float16", "float32", "float64")
    heads = False

    def version(self) -> str:
        import cupy

        return cupy.__version__

    def why_not(self, case: Case) -> str | None:
        return super().why_not(case) or _too_large(case)

    def prepare(self, case: Case, x: Inputs) -> Call:
        import cupy

        q, k, v, dout = (a if a is None else cupy.from_dlpack(a) for a in (x.q, x.k, x.v, x.dout))
        scale = q.dtype.type(_scale(x))
        hidden = ~cupy.tri(case.Tq, case.Tk, dtype=bool) if case.causal else None
        minus_infinity = q.dtype.type(-math.inf)

        def weights() -> Any:
            s = cupy.matmul(q, k.swapaxes(-1, -2)) * scale
            if hidden is not None:
                s = cupy.where(hidden, minus_infinity, s)
            p = cupy.exp(s - s.max(axis=-1, keepdims=True))
            return p / p.sum(axis=-1, keepdims=True)

        if case.direction == "forward":
            return lambda: cupy.matmul(weights(), v)
        p = weights()

        def gradients() -> Any:
            dp = cupy.matmul(dout, v.swapaxes(-1, -2))
            ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * scale
            return cupy.matmul(ds, k), cupy.matmul(ds.swapaxes(-1, -2), q), cupy.matmul(p.swapaxes(-1, -2), dout)

        return gradients

    def results(self, case: Case, result: Any) -> Sequence[Any]:
        import torch

        return [torch.from_dlpack(a) for a in super().results(case, result)]


def _too_large(case: Case) -> str | None:
    """A dense formula has some T x T matrices at once."""
    scores = 6 * case.B * case.Hq * case.Tq * case.Tk * ITEMSIZE[case.dtype]
    return f"would take about {scores / 1e9:.0f} GB" if scores > DENSE_MOST else None


PEERS: dict[str, Runner] = {
    peer.name: peer
    for peer in (
        TorchFlash(), TorchCudnn(), TorchEfficient(), TorchMath(), Flex(), FlashAttention4(), Jax("cudnn"), Jax("xla"),
        DenseCupy(), TorchCpu(),
    )
}  # fmt: skip
