"""What all commands share: exit codes, wrong input, options of a call, text that is wrapped."""

from __future__ import annotations

import argparse
import math
import textwrap
from typing import Any

from rawflash.plan import WIDTH

DONE, DISAGREES, BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141
MOST_BYTES = 2**63 - 1  # of an array

SCALARS = (  # options of a call that are flags
    "causal", "window", "q_offset", "softcap", "dropout", "seed", "scale", "layout", "algorithm", "backend",
    "deterministic", "sram",
)  # fmt: skip


class InputError(Exception):
    """Input that cannot be used; the message says why."""


def options_given(options: argparse.Namespace) -> dict[str, Any]:
    """Those of :class:`rawflash.Options` that are among the flags."""
    return {name: getattr(options, name) for name in SCALARS if hasattr(options, name)}


def check_bytes(flags: str, itemsize: int, **shapes: tuple[int, ...]) -> None:
    """Refuse arrays that cannot be; the size of an empty one must be within the bounds too, as NumPy has it."""
    for name, shape in shapes.items():
        if math.prod(max(size, 1) for size in shape) * itemsize > MOST_BYTES:
            raise InputError(f"{flags}: {name} would have more than 2**63 - 1 bytes, the most of an array")


def wrap(first: str, text: str) -> None:
    """Print text wrapped at WIDTH, its later lines indented as far as the first."""
    indent = " " * len(first)
    print(textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ))  # fmt: skip
