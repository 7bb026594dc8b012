"""FlashAttention-2 in forward mode: how O and lse change as Q, K and V do.

The forward pass (Dao 2024, algorithm 1), each of whose tiles has a tangent beside it. With dS the tangent of the
scores, that of ``lse = log sum exp(S)`` is the mean of dS under P, and that of ``O = P V``

    ``dO = P dV + (P * dS) V - diag(dlse) O``,  ``dlse = rowsum(P * dS)``

so two sums more follow the maximum as O and l do, in the same pass over K and V. The tangents of a pass are
written ``tQ``, ``tS``, ... here, as ``dQ`` is a gradient elsewhere. On chip: Q, O, K or V, S, and a tangent of each.
"""

import numpy as np

from rawflash.backends.numpy_tiled.heads import tangent_groups
from rawflash.backends.numpy_tiled.memory import Memory, product
from rawflash.backends.numpy_tiled.scores import exp_minus, finite, log_sum_exp, nonzero, start


@np.errstate(all="ignore")
def fa2_jvp(problem, tiles, x, given, out, lse, tangent_out, tangent_lse, *, memory=None):
    """Write ``out``, ``lse`` and their tangents; ``given`` holds those of q, k and v by name."""
    memory = memory or Memory.of(problem, tiles)
    for group in tangent_groups(problem, x, memory, out, lse, given, tangent_out, tangent_lse):
        for head in group.heads:
            t = head.tangents
            for i0, i1 in head.blocks(tiles.br):
                Q, tQ = memory.load("Q", head.Q[i0:i1]), memory.load("tQ", t.Q[i0:i1])
                O, tO = memory.sums("O", (i1 - i0, problem.dv)), memory.sums("tO", (i1 - i0, problem.dv))
                m, l = start(i1 - i0, head.scores.sink, memory.dtype)
                change = np.zeros_like(l)  # rowsum(exp(S - m) * tS)

                for block in head.key_blocks(i0, i1, tiles.bc):
                    # S = Q K^T, tS = tQ K^T + Q tK^T
                    K = memory.load("K", head.K[block.j0 : block.j1], into="K or V")
                    tK = memory.load("tK", t.K[block.j0 : block.j1], into="tK or tV")
                    S, tS = memory.alloc("S", (len(Q), len(K))), memory.alloc("tS", (len(Q), len(K)))
                    np.matmul(Q, K.T, out=S)
                    np.matmul(tQ, K.T, out=tS)
                    tS += Q @ tK.T
                    head.scores.tangent(tS, head.scores.forward(S, block))

                    # P = exp(S - m) with the maximum so far, over S
                    m_new = np.maximum(m, S.max(axis=1))
                    rescale = np.exp(m - finite(m_new))
                    P = exp_minus(S, m_new)
                    l = rescale * l + P.sum(axis=1, dtype=np.float64)
                    change = rescale * change + (P * tS).sum(axis=1, dtype=np.float64)
                    m = m_new

                    # O = diag(rescale) O + P V, tO = diag(rescale) tO + P tV + (P * tS) V; V over K
                    V = memory.load("V", head.V[block.j0 : block.j1], into="K or V")
                    tV = memory.load("tV", t.V[block.j0 : block.j1], into="tK or tV")
                    kept = head.scores.dropped(P, block)
                    O *= rescale[:, None]
                    O += product(kept, V)
                    tO *= rescale[:, None]
                    tO += product(kept, tV)
                    tO += product(kept * tS, V)

                # O = diag(l)^-1 O, tlse = change / l, tO = diag(l)^-1 tO - diag(tlse) O
                O /= nonzero(l)[:, None]
                change /= nonzero(l)
                tO /= nonzero(l)[:, None]
                tO -= change[:, None] * O
                memory.store("O", O, head.O[i0:i1])
                memory.store("lse", log_sum_exp(m, l), head.lse[i0:i1])
                memory.store("tO", tO, t.O[i0:i1])
                memory.store("tlse", change, t.lse[i0:i1])
