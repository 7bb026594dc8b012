"""FlashAttention-2 on tensor cores: factors in 16 bits, sums in float32 (mma.sync.m16n8k16, from sm_80 on).

The kernels of this folder stand in for those of the same names in fa2_forward.py and fa2_backward.py where the plan's
family is "mma" (:func:`rawflash.tiling.family_of`). Both take what those take, and give what those give.
"""

from __future__ import annotations

from typing import Any

from rawflash.tiling import MMA

FORWARD, BACKWARD = "fa2_forward", "fa2_backward_keys"
FORWARD_WARPS = 4  # each has BR / 4 rows
WARP_KEYS = 16  # of a warp in the backward pass


def threads_of(name: str, values: dict[str, Any]) -> int | None:
    """Threads of a block of the kernel of this name; None where it is not one of these."""
    if values.get("FAMILY") != MMA or name not in (FORWARD, BACKWARD):
        return None
    return 32 * (FORWARD_WARPS if name == FORWARD else values["BC"] // WARP_KEYS)
