"""FlashAttention-2, forward: Dao 2024, algorithm 1; Chu, Liu, Lin 2026, algorithm 3.

Q blocks outside, K/V blocks inside. On chip: Q, O, K or V, S. Each inner step loads one block of K
and one of V; O stays and is stored once, with ``lse = m + log l``. Nothing of size T x T ever leaves.
"""

import numpy as np

from rawflash.backends.numpy_tiled.heads import groups
from rawflash.backends.numpy_tiled.memory import Memory, product
from rawflash.backends.numpy_tiled.scores import exp_minus, finite, log_sum_exp, nonzero, start


@np.errstate(all="ignore")
def fa2_forward(problem, tiles, x, out, lse, *, memory=None):
    """Write ``out`` and ``lse``; ``memory`` counts, see the package docstring."""
    memory = memory or Memory.of(problem, tiles)
    for group in groups(problem, x, memory, out, lse):
        for head in group.heads:
            for i0, i1 in head.blocks(tiles.br):
                Q = memory.load("Q", head.Q[i0:i1])
                O = memory.sums("O", (i1 - i0, problem.dv))
                m, l = start(i1 - i0, head.scores.sink, memory.dtype)

                for block in head.key_blocks(i0, i1, tiles.bc):
                    # S = Q K^T
                    K = memory.load("K", head.K[block.j0 : block.j1], into="K or V")
                    S = memory.alloc("S", (len(Q), len(K)))
                    np.matmul(Q, K.T, out=S)
                    head.scores.forward(S, block)

                    # P = exp(S - m) with the maximum so far, over S
                    m_new = np.maximum(m, S.max(axis=1))
                    rescale = np.exp(m - finite(m_new))
                    P = exp_minus(S, m_new)
                    l = rescale * l + P.sum(axis=1, dtype=np.float64)
                    m = m_new

                    # O = diag(rescale) O + P V; V over K
                    V = memory.load("V", head.V[block.j0 : block.j1], into="K or V")
                    O *= rescale[:, None]
                    O += product(head.scores.dropped(P, block), V)

                # O = diag(l)^-1 O
                O /= nonzero(l)[:, None]
                memory.store("O", O, head.O[i0:i1])
                memory.store("lse", log_sum_exp(m, l), head.lse[i0:i1])
