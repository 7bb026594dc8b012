"""Row-wise attention, forward: Chu, Liu, Lin 2026, algorithm 1 and equations 36-39.

No T x T matrix is stored, but whole rows of scores are on chip, ``|I| x T`` elements. If M holds K
and V as well, they are loaded once, O(T d) accesses ("resident"). Else ``|I|`` is at most M / T, and K
and V stream past each block of rows, O(T^3 d / M) accesses ("streamed"): few rows, many passes.
On chip: Q, O, S and either K and V or one block of K or V.
"""

import numpy as np

from rawflash.backends.numpy_tiled.heads import groups
from rawflash.backends.numpy_tiled.memory import Memory, product
from rawflash.backends.numpy_tiled.scores import exp_minus, finite, log_sum_exp, nonzero
from rawflash.tiles import RESIDENT


@np.errstate(all="ignore")
def rowwise_forward(problem, tiles, x, out, lse, *, memory=None):
    """Write ``out`` and ``lse``; ``memory`` counts, see the package docstring."""
    memory = memory or Memory.of(problem, tiles)
    resident = tiles.order == RESIDENT
    for group in groups(problem, x, memory, out, lse):
        memory.free()
        if resident:
            K_all = memory.load("K", group.K)
            V_all = memory.load("V", group.V)
        for head in group.heads:
            sink = head.scores.sink
            for i0, i1 in head.blocks(tiles.br):
                Q = memory.load("Q", head.Q[i0:i1])
                O = memory.sums("O", (i1 - i0, problem.dv))
                S = memory.alloc("S", (i1 - i0, len(group.K)))
                S[...] = -np.inf
                seen_blocks = list(head.key_blocks(i0, i1, tiles.bc))

                # S = Q K^T, whole rows
                for block in seen_blocks:
                    j = slice(block.j0, block.j1)
                    K = K_all[j] if resident else memory.load("K", head.K[j], into="K or V")
                    np.matmul(Q, K.T, out=S[:, j])
                    head.scores.forward(S[:, j], block)

                # P = softmax(S), over S
                m = S.max(axis=1, initial=sink)
                P = exp_minus(S, m)
                l = P.sum(axis=1) + np.exp(sink - finite(m))
                P /= nonzero(l)[:, None]

                # O = P V
                for block in seen_blocks:
                    j = slice(block.j0, block.j1)
                    V = V_all[j] if resident else memory.load("V", head.V[j], into="K or V")
                    O += product(head.scores.dropped(P[:, j], block), V)
                memory.store("O", O, head.O[i0:i1])
                memory.store("lse", log_sum_exp(m, l), head.lse[i0:i1])
