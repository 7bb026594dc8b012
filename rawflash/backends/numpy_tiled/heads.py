"""Slow memory, head by head: which rows of which arrays belong together.

Padding is cut off here (``Operands.rows``): a kernel never sees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rawflash.backends.numpy_tiled.memory import Memory
from rawflash.backends.numpy_tiled.scores import Block, Scores
from rawflash.problem import Operands, Problem


@dataclass
class Tangents:
    """How the arrays of a head change: rows of what is read, and of what is written."""

    Q: np.ndarray
    K: np.ndarray
    V: np.ndarray
    O: np.ndarray
    lse: np.ndarray


@dataclass
class Head:
    """One query head of one sequence in slow memory: views of its rows, and its score function.

    ``O`` is what is written in the forward pass, what is read in the backward pass. Arrays that a
    pass has not are None. ``dsinks`` is an array of one element.
    """

    scores: Scores
    Q: np.ndarray
    K: np.ndarray
    V: np.ndarray
    O: np.ndarray
    lse: np.ndarray
    dO: np.ndarray = None  # type: ignore[assignment]
    dlse: np.ndarray | None = None
    dQ: np.ndarray = None  # type: ignore[assignment]
    dsinks: np.ndarray | None = None
    tangents: Tangents = None  # type: ignore[assignment]

    def blocks(self, br: int) -> Iterator[tuple[int, int]]:
        """All query blocks ``(i0, i1)``."""
        return blocks(len(self.Q), br)

    def key_blocks(self, i0: int, i1: int, bc: int) -> Iterator[Block]:
        """The blocks of keys that rows ``i0:i1`` see something of; empty ones are skipped."""
        s = self.scores
        for j0, j1, kind in s.x.visibility.key_blocks(s.b, s.h, i0, i1, bc):
            yield Block(i0, i1, j0, j1, kind)

    def query_blocks(self, j0: int, j1: int, br: int) -> Iterator[Block]:
        """The blocks of rows that see something of keys ``j0:j1``; empty ones are skipped."""
        s = self.scores
        for i0, i1, kind in s.x.visibility.query_blocks(s.b, s.h, j0, j1, br):
            yield Block(i0, i1, j0, j1, kind)

    def block(self, i0: int, i1: int, j0: int, j1: int) -> Block:
        """Any block, empty ones too."""
        s = self.scores
        return Block(i0, i1, j0, j1, s.x.visibility.tile(s.b, s.h, i0, i1, j0, j1))

    def dlse_rows(self, i0: int, i1: int) -> np.ndarray | float:
        """The gradient that comes in through lse, for rows ``i0:i1``."""
        return 0.0 if self.dlse is None else self.scores.memory.load("dlse", self.dlse[i0:i1])

    def add_sink_gradient(self, gamma: np.ndarray, i0: int, i1: int) -> None:
        """``dsink -= sum P_sink gamma``: a sink is a key whose value is zero, so its dP is zero."""
        if self.dsinks is not None:
            lse = self.scores.memory.load("lse", self.lse[i0:i1])
            P_sink = np.where(np.isneginf(lse), 0, np.exp(self.scores.sink - lse))
            self.dsinks -= (P_sink * gamma).sum(dtype=np.float64)


@dataclass
class Group:
    """One key/value head of one sequence and the query heads that share it."""

    K: np.ndarray
    V: np.ndarray
    heads: list[Head]
    dK: np.ndarray = None  # type: ignore[assignment]
    dV: np.ndarray = None  # type: ignore[assignment]


def blocks(length: int, size: int) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` of blocks of ``size``; the last may be shorter."""
    for start in range(0, length, size):
        yield start, min(start + size, length)


def groups(
    problem: Problem, x: Operands, memory: Memory, out: np.ndarray, lse: np.ndarray
) -> Iterator[Group]:
    """Everything of a forward call."""
    for b in range(problem.B):
        for g in range(problem.Hkv):
            K, V = x.rows(x.k, b, g, "k"), x.rows(x.v, b, g, "k")
            heads = [
                Head(
                    Scores(problem, x, memory, b, h), x.rows(x.q, b, h, "q"), K, V,
                    x.rows(out, b, h, "q"), x.rows(lse, b, h, "q"),
                )
                for h in range(g * problem.group, (g + 1) * problem.group)
            ]  # fmt: skip
            yield Group(K, V, heads)


def tangent_groups(
    problem: Problem, x: Operands, memory: Memory, out: np.ndarray, lse: np.ndarray,
    given: dict[str, np.ndarray], tangent_out: np.ndarray, tangent_lse: np.ndarray,
) -> Iterator[Group]:  # fmt: skip
    """Everything of a call in forward mode; ``given``: tangents of q, k and v by name."""
    for group in groups(problem, x, memory, out, lse):
        b, g = group.heads[0].scores.b, group.heads[0].scores.h // problem.group
        K, V = x.rows(given["k"], b, g, "k"), x.rows(given["v"], b, g, "k")
        for head in group.heads:
            Q, O, of_lse = (x.rows(array, b, head.scores.h, "q") for array in (given["q"], tangent_out, tangent_lse))
            head.tangents = Tangents(Q, K, V, O, of_lse)
        yield group


def backward_groups(
    problem: Problem, x: Operands, memory: Memory, grads: dict[str, np.ndarray]
) -> Iterator[Group]:
    """Everything of a backward call."""
    assert x.o is not None and x.lse is not None and x.dout is not None
    for group in groups(problem, x, memory, x.o, x.lse):
        b, g = group.heads[0].scores.b, group.heads[0].scores.h // problem.group
        group.dK, group.dV = x.rows(grads["k"], b, g, "k"), x.rows(grads["v"], b, g, "k")
        for head in group.heads:
            h = head.scores.h
            head.scores.dbias = grads.get("bias")
            head.dO, head.dQ = x.rows(x.dout, b, h, "q"), x.rows(grads["q"], b, h, "q")
            head.dlse = None if x.dlse is None else x.rows(x.dlse, b, h, "q")
            head.dsinks = grads["sinks"][h : h + 1] if "sinks" in grads else None
        yield group
