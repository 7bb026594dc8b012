"""Layers built on attention: pure functions of arrays with their gradients, for NumPy and CuPy alike.

The code of a layer calls the namespace of its arrays, and :mod:`rawflash` for attention; nothing is
copied between host and device.
"""

from rawflash.layers.rope import rope, rope_backward

__all__ = [
    "rope",
    "rope_backward",
]
