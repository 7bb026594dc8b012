"""What happens to a block of scores between ``Q K^T`` and the softmax, and back again.

On a score, in this order: scale, softcap, bias, ALiBi, mask. A hidden score is *selected* to -inf,
and the gradient of a hidden score is selected to 0: neither is a sum or product with the mask, which a
hidden overflow would turn into NaN. A block whose mask class is FULL runs no mask code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rawflash import philox
from rawflash.backends.numpy_tiled.memory import Memory
from rawflash.masks import FULL, PARTIAL
from rawflash.problem import Operands, Problem


class Block(NamedTuple):
    """Rows ``i0:i1`` and keys ``j0:j1`` of one head, and their mask class."""

    i0: int
    i1: int
    j0: int
    j1: int
    kind: int = PARTIAL


class Tape(NamedTuple):
    """What the way back through a block needs.

    ``seen``: True where the row sees the key, None where all do. ``slope``: the derivative of the
    score with respect to ``q.k``, which is the scale, times ``1 - tanh^2`` under a softcap.
    """

    block: Block
    seen: np.ndarray | None
    slope: np.ndarray | float


@dataclass
class Scores:
    """The score function of query head ``h`` of sequence ``b``.

    ``dbias`` is where the gradient of the bias is added to, if it is asked for.
    """

    problem: Problem
    x: Operands
    memory: Memory
    b: int
    h: int
    dbias: np.ndarray | None = None

    def forward(self, S: np.ndarray, block: Block) -> Tape:
        """Turn ``Q K^T`` into scores, in place."""
        slope: np.ndarray | float = self.problem.scale
        S *= self.problem.scale
        if self.problem.softcap is not None:
            c = self.problem.softcap
            t = np.tanh(S / c)
            slope = self.problem.scale * (1 - t) * (1 + t)
            S[...] = c * t
        bias = self._bias(block)
        if bias is not None:
            S += bias
        if self.x.alibi_slopes is not None:
            i, j = np.arange(block.i0, block.i1)[:, None], np.arange(block.j0, block.j1)
            S -= float(self.x.alibi_slopes[self.b, self.h]) * np.abs(i + self.q_offset - j)
        seen = self._seen(block, bias)
        if seen is not None:
            S[~seen] = -np.inf
        return Tape(block, seen, slope)

    def backward(self, dS: np.ndarray, tape: Tape, *, with_bias: bool = True) -> None:
        """Turn the gradient of the scores into that of ``Q K^T``, in place; add to the bias gradient."""
        hidden = None if tape.seen is None else ~tape.seen
        if hidden is not None:
            dS[hidden] = 0
        if self.dbias is not None and with_bias:
            view = self._of_bias(self.dbias, tape.block)
            summed = tuple(axis for axis in (0, 1) if view.shape[axis] != dS.shape[axis])
            self.memory.add("dbias", dS.sum(axis=summed, keepdims=True) if summed else dS, view)
        dS *= tape.slope
        if hidden is not None:  # the slope of a hidden score may be NaN
            dS[hidden] = 0

    def tangent(self, S: np.ndarray, tape: Tape) -> None:
        """Turn the tangent of ``Q K^T`` into that of the scores, in place.

        A hidden score does not change, nor does one at its softcap, whatever has overflowed.
        """
        S *= tape.slope
        np.copyto(S, 0, where=np.equal(tape.slope, 0))
        if tape.seen is not None:
            S[~tape.seen] = 0

    def tape(self, block: Block, slope: np.ndarray | float) -> Tape:
        """The tape of a block whose scores are gone: what is seen is found out again."""
        return Tape(block, self._seen(block, self._bias(block)), slope)

    def dropped(self, P: np.ndarray, block: Block) -> np.ndarray:
        """Dropout on probabilities, and on their gradient: ``P / (1 - p)`` where kept, 0 elsewhere."""
        p = self.problem.dropout
        if p == 0:
            return P
        i, j = np.arange(block.i0, block.i1)[:, None], np.arange(block.j0, block.j1)
        keep = philox.keep(p, self.problem.seed, self.b, self.h, i, j)
        return np.where(keep, P * (1 / (1 - p)), 0)

    @property
    def q_offset(self) -> int:
        return int(self.x.visibility.q_offset[self.b])

    @property
    def sink(self) -> float:
        """The logit that joins the denominator; -inf for none."""
        return -np.inf if self.x.sinks is None else float(self.x.sinks[self.h])

    def _of_bias(self, array: np.ndarray, block: Block) -> np.ndarray:
        """The block of an array with the axes of the bias, length 1 where it broadcasts."""
        B, H, I, J = array.shape
        rows = slice(block.i0, block.i1) if I > 1 else slice(0, 1)
        keys = slice(block.j0, block.j1) if J > 1 else slice(0, 1)
        return array[self.b if B > 1 else 0, self.h if H > 1 else 0, rows, keys]

    def _bias(self, block: Block) -> np.ndarray | None:
        return None if self.x.bias is None else self.memory.stream("bias", self._of_bias(self.x.bias, block))

    def _seen(self, block: Block, bias: np.ndarray | None) -> np.ndarray | None:
        """True where the row sees the key; None where all rows see all keys."""
        seen = None
        if block.kind != FULL:
            seen = self.x.visibility.visible(self.b, self.h, *block[:4])
            if self.x.visibility.mask is not None:
                self.memory.stream("mask", seen)
        if bias is not None and np.isneginf(bias).any():
            unhidden = np.broadcast_to(~np.isneginf(bias), (block.i1 - block.i0, block.j1 - block.j0))
            seen = unhidden if seen is None else seen & unhidden
        return seen


# ---- row statistics --------------------------------------------------------------------------------


def finite(m: np.ndarray) -> np.ndarray:
    """``m``, or 0 where a row has seen nothing (-inf): what may be subtracted from scores."""
    return np.where(np.isneginf(m), m.dtype.type(0), m)


def exp_minus(S: np.ndarray, m: np.ndarray) -> np.ndarray:
    """``exp(S - m)`` row by row, written over ``S``; ``m`` bounds the row, so it is at most 1.

    In the backward pass ``m`` is lse and S is computed again: for huge scores its rounding error
    alone may exceed lse by more than exp can take.
    """
    S -= finite(m)[:, None]
    np.minimum(S, 0, out=S)
    return np.exp(S, out=S)


def nonzero(l: np.ndarray) -> np.ndarray:
    """``l``, or 1 where a row has seen nothing: what may be divided by."""
    return np.where(l == 0, l.dtype.type(1), l)


def log_sum_exp(m: np.ndarray, l: np.ndarray) -> np.ndarray:
    """``lse = m + log l``; -inf for a row that has seen nothing."""
    return m + np.log(l)


def start(rows: int, sink: float, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Maximum ``m`` and sum ``l`` before the first key: a sink is a key without a value, seen first."""
    m = np.full(rows, sink, dtype)
    return m, np.exp(m - finite(m))
