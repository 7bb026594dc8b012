"""Row-wise attention, backward: Chu, Liu, Lin 2026, algorithm 5 and equations 58-70.

Whole rows of P and dP are on chip, ``2 |I| x T`` elements. If M holds K, V, dK and dV as well, they
cross once, O(T d) accesses ("resident"). Else ``|I|`` is at most M / (2 T), K and V stream past each
block of rows, and dK and dV are added to in slow memory, O(T^3 d / M) accesses ("streamed"). On chip:
O and then Q in its place, dO, dQ, P and then dS in its place, dP (under a softcap its slope too), and
either K, V, dK, dV or one block of K or V and one of dK or dV.
"""

import numpy as np

from rawflash.backends.numpy_tiled.heads import backward_groups
from rawflash.backends.numpy_tiled.memory import Memory, product
from rawflash.backends.numpy_tiled.scores import exp_minus
from rawflash.tiles import RESIDENT


@np.errstate(all="ignore")
def rowwise_backward(problem, tiles, x, grads, *, memory=None):
    """Write ``grads``; ``memory`` counts, see the package docstring."""
    memory = memory or Memory.of(problem, tiles)
    resident = tiles.order == RESIDENT
    for group in backward_groups(problem, x, memory, grads):
        memory.free()
        if resident:
            K_all, V_all = memory.load("K", group.K), memory.load("V", group.V)
            dK_all, dV_all = memory.sums("dK", group.K.shape), memory.sums("dV", group.V.shape)
        else:
            dK_, dV_ = memory.workspace(group.dK), memory.workspace(group.dV)

        for head in group.heads:
            for i0, i1 in head.blocks(tiles.br):
                # gamma = rowsum(dO * O) - dlse; Q over O
                O = memory.load("O", head.O[i0:i1], into="Q or O")
                dO = memory.load("dO", head.dO[i0:i1])
                gamma = (dO * O).sum(axis=1) - head.dlse_rows(i0, i1)
                head.add_sink_gradient(gamma, i0, i1)
                Q = memory.load("Q", head.Q[i0:i1], into="Q or O")
                lse = memory.load("lse", head.lse[i0:i1])
                dQ = memory.sums("dQ", Q.shape)

                P = memory.alloc("P or dS", (i1 - i0, len(group.K)))
                dP = memory.alloc("dP", P.shape)
                slope = memory.alloc("slope", P.shape) if problem.softcap else None
                tapes = []

                # P = exp(Q K^T - lse), whole rows
                for block in head.key_blocks(i0, i1, tiles.bc):
                    j = slice(block.j0, block.j1)
                    K = K_all[j] if resident else memory.load("K", head.K[j], into="K or V")
                    np.matmul(Q, K.T, out=P[:, j])
                    tape = head.scores.forward(P[:, j], block)
                    exp_minus(P[:, j], lse)
                    if slope is not None:
                        slope[:, j] = tape.slope
                        tape = tape._replace(slope=slope[:, j])
                    tapes.append(tape)

                # dV += P^T dO; dP = dO V^T, whole rows
                for tape in tapes:
                    j = slice(tape.block.j0, tape.block.j1)
                    V = V_all[j] if resident else memory.load("V", head.V[j], into="K or V")
                    P_dropped = head.scores.dropped(P[:, j], tape.block)
                    if resident:
                        dV_all[j] += product(P_dropped.T, dO)
                    else:
                        dV = memory.alloc("dK or dV", V.shape)
                        dV[...] = product(P_dropped.T, dO)
                        memory.add("dV", dV, dV_[j])
                    dP[:, j] = head.scores.dropped(dO @ V.T, tape.block)

                # dS = P * (dP - gamma), over P
                dP -= gamma[:, None]
                dS = np.multiply(P, dP, out=P)

                # dQ = dS K; dK += dS^T Q
                for tape in tapes:
                    j = slice(tape.block.j0, tape.block.j1)
                    head.scores.backward(dS[:, j], tape)
                    K = K_all[j] if resident else memory.load("K", head.K[j], into="K or V")
                    dQ += product(dS[:, j], K)
                    if resident:
                        dK_all[j] += product(dS[:, j].T, Q)
                    else:
                        dK = memory.alloc("dK or dV", K.shape)
                        dK[...] = product(dS[:, j].T, Q)
                        memory.add("dK", dK, dK_[j])
                memory.store("dQ", dQ, head.dQ[i0:i1])

        if resident:
            memory.store("dK", dK_all, group.dK)
            memory.store("dV", dV_all, group.dV)
        else:
            memory.round("dK", dK_, group.dK)
            memory.round("dV", dV_, group.dV)
