"""Standard attention, backward: Chu, Liu, Lin 2026, equations 31-32 and the count of 7 T^2.

The T x T matrices P, dP and dS lie in slow memory: load P; store dP; load P and dP, store dS; load
dS twice. The slides take P from the forward pass; here the call hands over lse alone, so P is
computed again and stored first: the T^2 that the slides count in the forward pass. With a softcap
its slope is one more T x T matrix, stored with P and loaded for dS. On chip: two factors and the
result of a product.
"""

import numpy as np

from rawflash.backends.numpy_tiled.heads import backward_groups, blocks
from rawflash.backends.numpy_tiled.memory import Memory, product
from rawflash.backends.numpy_tiled.scores import Block, exp_minus


@np.errstate(all="ignore")
def standard_backward(problem, tiles, x, grads, *, memory=None):
    """Write ``grads``; ``memory`` counts, see the package docstring."""
    memory = memory or Memory.of(problem, tiles)
    for group in backward_groups(problem, x, memory, grads):
        dK_, dV_ = memory.workspace(group.dK), memory.workspace(group.dV)
        for head in group.heads:
            _head(problem, tiles, head, dK_, dV_, memory)
        memory.round("dK", dK_, group.dK)
        memory.round("dV", dV_, group.dV)


def _head(problem, tiles, head, dK_, dV_, memory):
    shape = len(head.Q), len(head.K)
    P_, dP_, dS_ = (np.zeros(shape, memory.dtype) for _ in range(3))  # T x T, in slow memory
    slope_ = np.zeros(shape, memory.dtype) if problem.softcap else None
    key_blocks = list(blocks(len(head.K), tiles.bc))

    # P = exp(Q K^T - lse)
    for i0, i1 in head.blocks(tiles.br):
        Q = memory.load("Q", head.Q[i0:i1])
        lse = memory.load("lse", head.lse[i0:i1])
        for j0, j1 in key_blocks:
            K = memory.load("K", head.K[j0:j1])
            P = memory.alloc("P", (len(Q), len(K)))
            np.matmul(Q, K.T, out=P)
            tape = head.scores.forward(P, head.block(i0, i1, j0, j1))
            memory.store("P", exp_minus(P, lse), P_[i0:i1, j0:j1])
            if slope_ is not None:
                memory.store("slope", tape.slope, slope_[i0:i1, j0:j1])
    memory.free()

    # dV = P^T dO
    for j0, j1 in key_blocks:
        dV = memory.sums("dV", (j1 - j0, problem.dv))
        for i0, i1 in head.blocks(tiles.br):
            P = memory.load("P", P_[i0:i1, j0:j1])
            dO = memory.load("dO", head.dO[i0:i1])
            dV += product(head.scores.dropped(P, Block(i0, i1, j0, j1)).T, dO)
        memory.add("dV", dV, dV_[j0:j1])
    memory.free()

    # dP = dO V^T
    for i0, i1 in head.blocks(tiles.br):
        dO = memory.load("dO", head.dO[i0:i1])
        for j0, j1 in key_blocks:
            V = memory.load("V", head.V[j0:j1])
            dP = memory.alloc("dP", (len(dO), len(V)))
            np.matmul(dO, V.T, out=dP)
            dP = head.scores.dropped(dP, Block(i0, i1, j0, j1))
            memory.store("dP", dP, dP_[i0:i1, j0:j1])
    memory.free()

    # gamma = rowsum(dO * O) - dlse; dS = P * (dP - gamma), over P
    for i0, i1 in head.blocks(tiles.br):
        O, dO = memory.load("O", head.O[i0:i1]), memory.load("dO", head.dO[i0:i1])
        gamma = (dO * O).sum(axis=1) - head.dlse_rows(i0, i1)
        head.add_sink_gradient(gamma, i0, i1)
        memory.free()
        for j0, j1 in key_blocks:
            P = memory.load("P", P_[i0:i1, j0:j1])
            dP = memory.load("dP", dP_[i0:i1, j0:j1])
            slope = problem.scale if slope_ is None else memory.load("slope", slope_[i0:i1, j0:j1])
            dS = np.multiply(P, dP - gamma[:, None], out=P)
            head.scores.backward(dS, head.scores.tape(head.block(i0, i1, j0, j1), slope))
            memory.store("dS", dS, dS_[i0:i1, j0:j1])
        memory.free()

    # dQ = dS K
    for i0, i1 in head.blocks(tiles.br):
        dQ = memory.sums("dQ", (i1 - i0, problem.d))
        for j0, j1 in key_blocks:
            dS = memory.load("dS", dS_[i0:i1, j0:j1])
            K = memory.load("K", head.K[j0:j1])
            dQ += product(dS, K)
        memory.store("dQ", dQ, head.dQ[i0:i1])
    memory.free()

    # dK = dS^T Q
    for j0, j1 in key_blocks:
        dK = memory.sums("dK", (j1 - j0, problem.d))
        for i0, i1 in head.blocks(tiles.br):
            dS = memory.load("dS", dS_[i0:i1, j0:j1])
            Q = memory.load("Q", head.Q[i0:i1])
            dK += product(dS.T, Q)
        memory.add("dK", dK, dK_[j0:j1])
    memory.free()
