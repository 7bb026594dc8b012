"""FlashAttention-1, backward: Dao et al. 2022, algorithm 4; Chu, Liu, Lin 2026, algorithm 7.

K/V blocks outside, Q blocks inside. On chip, eight blocks: O and then Q in its place, K, V, P and then dS in
its place, dO, dQ, dK, dV. dQ lives in slow memory: each inner step loads O, dO, Q, dQ and stores dQ,
and computes gamma again. dK and dV stay and are stored once.

The paper keeps m and l for each row and sets P = exp(S - m) / l. A call hands over lse alone, and
m := lse, l := 1 is such a pair.
"""

import numpy as np

from rawflash.backends.numpy_tiled.heads import backward_groups, blocks
from rawflash.backends.numpy_tiled.memory import Memory, product
from rawflash.backends.numpy_tiled.scores import exp_minus


@np.errstate(all="ignore")
def fa1_backward(problem, tiles, x, grads, *, memory=None):
    """Write ``grads``; ``memory`` counts, see the package docstring."""
    memory = memory or Memory.of(problem, tiles)
    for group in backward_groups(problem, x, memory, grads):
        dQ_ = [memory.workspace(head.dQ) for head in group.heads]
        for j0, j1 in blocks(len(group.K), tiles.bc):
            K = memory.load("K", group.K[j0:j1])
            V = memory.load("V", group.V[j0:j1])
            dK = memory.sums("dK", K.shape)
            dV = memory.sums("dV", V.shape)
            for n, head in enumerate(group.heads):
                for block in head.query_blocks(j0, j1, tiles.br):
                    rows = slice(block.i0, block.i1)

                    # gamma = rowsum(dO * O) - dlse; Q over O
                    O = memory.load("O", head.O[rows], into="Q or O")
                    dO = memory.load("dO", head.dO[rows])
                    gamma = (dO * O).sum(axis=1) - head.dlse_rows(block.i0, block.i1)
                    Q = memory.load("Q", head.Q[rows], into="Q or O")

                    # P = exp(Q K^T - lse)
                    S = memory.alloc("P or dS", (len(Q), len(K)))
                    np.matmul(Q, K.T, out=S)
                    tape = head.scores.forward(S, block)
                    P = exp_minus(S, memory.load("lse", head.lse[rows]))

                    # dV += P^T dO
                    dV += product(head.scores.dropped(P, block).T, dO)

                    # dS = P * (dP - gamma) with dP = dO V^T, over P
                    dP = head.scores.dropped(dO @ V.T, block)
                    dS = np.multiply(P, dP - gamma[:, None], out=P)
                    head.scores.backward(dS, tape)

                    # dQ += dS K, in slow memory
                    dQ = memory.load("dQ", dQ_[n][rows])
                    dQ += product(dS, K)
                    memory.store("dQ", dQ, dQ_[n][rows])

                    # dK += dS^T Q
                    dK += product(dS.T, Q)
            memory.store("dK", dK, group.dK[j0:j1])
            memory.store("dV", dV, group.dV[j0:j1])
        memory.free()
        for n, head in enumerate(group.heads):
            memory.round("dQ", dQ_[n], head.dQ)
            _sink_gradient(tiles, head, memory)


def _sink_gradient(tiles, head, memory):
    """The sinks need every row once, and the loop above meets a row once for each block of keys it sees."""
    for i0, i1 in head.blocks(tiles.br) if head.dsinks is not None else ():
        O = memory.load("O", head.O[i0:i1], into="Q or O")
        dO = memory.load("dO", head.dO[i0:i1])
        head.add_sink_gradient((dO * O).sum(axis=1) - head.dlse_rows(i0, i1), i0, i1)
