"""rawflash: exact attention and its gradients, from one NumPy-style call on any machine.

Importing this package loads NumPy and nothing heavier; a backend is imported when the first
call needs it.
"""

from rawflash import layers, masks, oracle
from rawflash._version import __version__
from rawflash.api import (
    append_kv,
    attention,
    attention_backward,
    attention_decode,
    attention_jvp,
    attention_varlen,
    attention_varlen_backward,
    attention_vjp,
    dropout_mask,
    merge_attention,
)
from rawflash.errors import BackendError, ProblemError, RawflashError, TileError
from rawflash.plan import explain
from rawflash.problem import Options

__all__ = [
    "BackendError",
    "Options",
    "ProblemError",
    "RawflashError",
    "TileError",
    "__version__",
    "append_kv",
    "attention",
    "attention_backward",
    "attention_decode",
    "attention_jvp",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_vjp",
    "dropout_mask",
    "explain",
    "layers",
    "masks",
    "merge_attention",
    "oracle",
]
