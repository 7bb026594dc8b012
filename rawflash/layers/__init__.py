"""Layers built on attention: pure functions of arrays with their gradients, for NumPy and CuPy alike.

The code of a layer calls the namespace of its arrays, and :mod:`rawflash` for attention; nothing is
copied between host and device.
"""

from rawflash.layers.caches import cache_size
from rawflash.layers.gpt import (
    GPTBlockSaved,
    gelu,
    gelu_backward,
    gpt_block,
    gpt_block_backward,
    rms_norm,
    rms_norm_backward,
)
from rawflash.layers.mla import MLASaved, append_latent, mla_attention, mla_attention_backward, mla_decode
from rawflash.layers.multi_head import MultiHeadSaved, multi_head_attention, multi_head_attention_backward
from rawflash.layers.rope import rope, rope_backward

__all__ = [
    "GPTBlockSaved",
    "MLASaved",
    "MultiHeadSaved",
    "append_latent",
    "cache_size",
    "gelu",
    "gelu_backward",
    "gpt_block",
    "gpt_block_backward",
    "mla_attention",
    "mla_attention_backward",
    "mla_decode",
    "multi_head_attention",
    "multi_head_attention_backward",
    "rms_norm",
    "rms_norm_backward",
    "rope",
    "rope_backward",
]
