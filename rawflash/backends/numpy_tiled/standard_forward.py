"""Standard attention, forward: Chu, Liu, Lin 2026, equations 25-30; Dao et al. 2022, algorithm 0.

Three operations, one after the other, each reading its operands from slow memory and writing its
result back: S is stored, S loaded, P stored, P loaded, 4 T^2 elements in all. Matrix products go by tiles
(on chip: two factors and the result), the softmax by panels of whole rows of S. No block is skipped, whatever
the mask.
"""

import numpy as np

from rawflash.backends.numpy_tiled.heads import blocks, groups
from rawflash.backends.numpy_tiled.memory import Memory, product
from rawflash.backends.numpy_tiled.scores import Block, exp_minus, finite, log_sum_exp, nonzero


@np.errstate(all="ignore")
def standard_forward(problem, tiles, x, out, lse, *, memory=None):
    """Write ``out`` and ``lse``; ``memory`` counts, see the package docstring."""
    memory = memory or Memory.of(problem, tiles)
    for group in groups(problem, x, memory, out, lse):
        for head in group.heads:
            _head(problem, tiles, head, memory)


def _head(problem, tiles, head, memory):
    T_q, T_k = len(head.Q), len(head.K)
    S_ = np.zeros((T_q, T_k), memory.dtype)  # T x T, in slow memory
    P_ = np.zeros((T_q, T_k), memory.dtype)

    # S = Q K^T
    for i0, i1 in head.blocks(tiles.br):
        Q = memory.load("Q", head.Q[i0:i1])
        for j0, j1 in blocks(T_k, tiles.bc):
            K = memory.load("K", head.K[j0:j1])
            S = memory.alloc("S", (len(Q), len(K)))
            np.matmul(Q, K.T, out=S)
            head.scores.forward(S, head.block(i0, i1, j0, j1))
            memory.store("S", S, S_[i0:i1, j0:j1])
    memory.free()

    # P = softmax(S), over S
    for i0, i1 in head.blocks(tiles.panel):
        S = memory.load("S", S_[i0:i1])
        m = S.max(axis=1, initial=head.scores.sink)
        P = exp_minus(S, m)
        l = P.sum(axis=1) + np.exp(head.scores.sink - finite(m))
        P /= nonzero(l)[:, None]
        memory.store("P", P, P_[i0:i1])
        memory.store("lse", log_sum_exp(m, l), head.lse[i0:i1])
    memory.free()

    # O = P V
    for i0, i1 in head.blocks(tiles.br):
        O = memory.sums("O", (i1 - i0, problem.dv))
        for j0, j1 in blocks(T_k, tiles.bc):
            P = memory.load("P", P_[i0:i1, j0:j1])
            V = memory.load("V", head.V[j0:j1])
            O += product(head.scores.dropped(P, Block(i0, i1, j0, j1)), V)
        memory.store("O", O, head.O[i0:i1])
    memory.free()
