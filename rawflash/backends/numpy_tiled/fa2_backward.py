"""FlashAttention-2, backward: Dao 2024, algorithm 2; Chu, Liu, Lin 2026, algorithms 6 and 8.

A first pass stores gamma = rowsum(dO * O), one number a row. Then K/V blocks outside, Q blocks inside
(order "ji"). On chip, eight blocks: Q, K, V, P and then dS in its place, dO, dQ, dK, dV. Each inner
step loads Q and dO and adds dQ to slow memory (float32 atomics on a GPU); dK and dV stay and are
stored once.

With Q outside (order "ij", algorithm 6) an inner step loads K and V and adds dK and dV to slow
memory: 4 |J| d elements a step instead of 3 |I| d, the slides' 4 Tr |J| d against 3 Tc |I| d.

``deterministic``: nothing is added to slow memory. One pass with K/V outside computes dK and dV, one
with Q outside computes dQ, and both compute P and dP.
"""

import numpy as np

from rawflash.backends.numpy_tiled.heads import backward_groups, blocks
from rawflash.backends.numpy_tiled.memory import Memory, product
from rawflash.backends.numpy_tiled.scores import exp_minus
from rawflash.tiles import IJ, JI


@np.errstate(all="ignore")
def fa2_backward(problem, tiles, x, grads, *, memory=None, order=None):
    """Write ``grads``; ``memory`` counts; ``order`` "ij" or "ji" is that of the tiles when left out."""
    memory = memory or Memory.of(problem, tiles)
    for group in backward_groups(problem, x, memory, grads):
        if problem.deterministic:
            _keys_outside(group, tiles.br, tiles.bc, memory, with_dQ=False)
            # Br and Bc change places: the outer block is the tall one in both passes
            _queries_outside(group, tiles.bc, tiles.br, memory, with_dK_dV=False)
        elif (order or tiles.order or JI) == IJ:
            _queries_outside(group, tiles.br, tiles.bc, memory)
        else:
            _keys_outside(group, tiles.br, tiles.bc, memory)


def _gamma(head, Br, memory):
    """gamma = rowsum(dO * O) - dlse for every row, stored."""
    gamma_ = np.zeros(len(head.Q), memory.dtype)
    for i0, i1 in head.blocks(Br):
        O = memory.load("O", head.O[i0:i1])
        dO = memory.load("dO", head.dO[i0:i1])
        gamma = (dO * O).sum(axis=1) - head.dlse_rows(i0, i1)
        head.add_sink_gradient(gamma, i0, i1)
        memory.store("gamma", gamma, gamma_[i0:i1])
    memory.free()
    return gamma_


def _keys_outside(group, Br, Bc, memory, *, with_dQ=True):
    """Algorithm 8, (j, i) version."""
    gamma_ = [_gamma(head, Br, memory) for head in group.heads]
    dQ_ = [memory.workspace(head.dQ) for head in group.heads]
    for j0, j1 in blocks(len(group.K), Bc):
        K = memory.load("K", group.K[j0:j1])
        V = memory.load("V", group.V[j0:j1])
        dK = memory.sums("dK", K.shape)
        dV = memory.sums("dV", V.shape)
        for n, head in enumerate(group.heads):
            for block in head.query_blocks(j0, j1, Br):
                rows = slice(block.i0, block.i1)
                Q = memory.load("Q", head.Q[rows])
                dO = memory.load("dO", head.dO[rows])
                lse = memory.load("lse", head.lse[rows])
                gamma = memory.load("gamma", gamma_[n][rows])

                # P = exp(Q K^T - lse)
                S = memory.alloc("P or dS", (len(Q), len(K)))
                np.matmul(Q, K.T, out=S)
                tape = head.scores.forward(S, block)
                P = exp_minus(S, lse)

                # dV += P^T dO
                dV += product(head.scores.dropped(P, block).T, dO)

                # dS = P * (dP - gamma) with dP = dO V^T, over P
                dP = head.scores.dropped(dO @ V.T, block)
                dS = np.multiply(P, dP - gamma[:, None], out=P)
                head.scores.backward(dS, tape)

                # dK += dS^T Q
                dK += product(dS.T, Q)

                # dQ += dS K, in slow memory
                if with_dQ:
                    dQ = memory.alloc("dQ", Q.shape)
                    dQ[...] = product(dS, K)
                    memory.add("dQ", dQ, dQ_[n][rows])
        memory.store("dK", dK, group.dK[j0:j1])
        memory.store("dV", dV, group.dV[j0:j1])
    memory.free()
    if with_dQ:
        for n, head in enumerate(group.heads):
            memory.round("dQ", dQ_[n], head.dQ)


def _queries_outside(group, Br, Bc, memory, *, with_dK_dV=True):
    """Algorithm 6, (i, j) version."""
    dK_, dV_ = memory.workspace(group.dK), memory.workspace(group.dV)
    for head in group.heads:
        for i0, i1 in head.blocks(Br):
            # gamma = rowsum(dO * O) - dlse; Q over O
            O = memory.load("O", head.O[i0:i1], into="Q or O")
            dO = memory.load("dO", head.dO[i0:i1])
            gamma = (dO * O).sum(axis=1) - head.dlse_rows(i0, i1)
            Q = memory.load("Q", head.Q[i0:i1], into="Q or O")
            lse = memory.load("lse", head.lse[i0:i1])
            dQ = memory.sums("dQ", Q.shape)
            if with_dK_dV:
                head.add_sink_gradient(gamma, i0, i1)

            for block in head.key_blocks(i0, i1, Bc):
                keys = slice(block.j0, block.j1)
                K = memory.load("K", head.K[keys])
                V = memory.load("V", head.V[keys])

                # P = exp(Q K^T - lse)
                S = memory.alloc("P or dS", (len(Q), len(K)))
                np.matmul(Q, K.T, out=S)
                tape = head.scores.forward(S, block)
                P = exp_minus(S, lse)

                # dV += P^T dO, in slow memory
                if with_dK_dV:
                    dV = memory.alloc("dV", V.shape)
                    dV[...] = product(head.scores.dropped(P, block).T, dO)
                    memory.add("dV", dV, dV_[keys])

                # dS = P * (dP - gamma) with dP = dO V^T, over P
                dP = head.scores.dropped(dO @ V.T, block)
                dS = np.multiply(P, dP - gamma[:, None], out=P)
                head.scores.backward(dS, tape, with_bias=with_dK_dV)

                # dK += dS^T Q, in slow memory
                if with_dK_dV:
                    dK = memory.alloc("dK", K.shape)
                    dK[...] = product(dS.T, Q)
                    memory.add("dK", dK, dK_[keys])

                # dQ += dS K
                dQ += product(dS, K)
            memory.store("dQ", dQ, head.dQ[i0:i1])
        memory.free()
    if with_dK_dV:
        memory.round("dK", dK_, group.dK)
        memory.round("dV", dV_, group.dV)
