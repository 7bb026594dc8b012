"""FlashAttention-1, forward: Dao et al. 2022, algorithm 1; Chu, Liu, Lin 2026, algorithm 4.

K/V blocks outside, Q blocks inside. On chip: K, V, Q or O, S. O, m and l live in slow memory: each
inner step loads Q, O, m, l and stores O, m, l, with O normalised over the keys seen so far. Query
heads that share K and V share the loaded blocks.
"""

import numpy as np

from rawflash.backends.numpy_tiled.heads import blocks, groups
from rawflash.backends.numpy_tiled.memory import Memory, product
from rawflash.backends.numpy_tiled.scores import exp_minus, finite, log_sum_exp, nonzero, start


@np.errstate(all="ignore")
def fa1_forward(problem, tiles, x, out, lse, *, memory=None):
    """Write ``out`` and ``lse``; ``memory`` counts, see the package docstring."""
    memory = memory or Memory.of(problem, tiles)
    for group in groups(problem, x, memory, out, lse):
        # O, m, l in slow memory: O = 0, m = -inf, l = 0 (with a sink: m = sink, l = 1)
        O_ = [memory.workspace(head.O) for head in group.heads]
        starts = [start(len(head.Q), head.scores.sink, memory.dtype) for head in group.heads]
        m_, l_ = zip(*starts, strict=True)

        for j0, j1 in blocks(len(group.K), tiles.bc):
            K = memory.load("K", group.K[j0:j1])
            V = memory.load("V", group.V[j0:j1])
            for n, head in enumerate(group.heads):
                for block in head.query_blocks(j0, j1, tiles.br):
                    rows = slice(block.i0, block.i1)
                    Q = memory.load("Q", head.Q[rows], into="Q or O")
                    m = memory.load("m", m_[n][rows])
                    l = memory.load("l", l_[n][rows])

                    # S = Q K^T
                    S = memory.alloc("S", (len(Q), len(K)))
                    np.matmul(Q, K.T, out=S)
                    head.scores.forward(S, block)

                    # P = exp(S - m) with the maximum so far, over S
                    m_new = np.maximum(m, S.max(axis=1))
                    rescale = np.exp(m - finite(m_new))
                    P = exp_minus(S, m_new)
                    l_new = rescale * l + P.sum(axis=1)

                    # O = diag(l_new)^-1 (diag(l rescale) O + P V); O over Q
                    O = memory.load("O", O_[n][rows], into="Q or O")
                    O *= (l * rescale)[:, None]
                    O += product(head.scores.dropped(P, block), V)
                    O /= nonzero(l_new)[:, None]
                    memory.store("O", O, O_[n][rows])
                    memory.store("m", m_new, m_[n][rows])
                    memory.store("l", l_new, l_[n][rows])

        for n, head in enumerate(group.heads):
            memory.round("O", O_[n], head.O)
            memory.store("lse", log_sum_exp(memory.load("m", m_[n]), memory.load("l", l_[n])), head.lse)
