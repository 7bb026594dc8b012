"""The suite can fail: broken kernels, each with one classic mistake, that the tolerance must reject.

A tiled attention in forty lines of NumPy, right as it stands, takes the name of a mistake. If one of these
were accepted, a kernel with the same mistake would pass the rest of the suite too.
"""

import importlib.util
import math
import sys

import numpy as np
import pytest
from strategies import DTYPES
from test_forward import make
from tolerances import assert_close, error_ratio

import rawflash as rf
from rawflash import backends

BLOCK = 8


def visible(i, j, offset, causal, window, mistake):
    """The boolean tile of rows ``i`` and keys ``j``."""
    at = i[:, None] + offset
    seen = np.ones((len(i), len(j)), bool)
    if causal:
        seen &= j < at if mistake == "causal off by one" else j <= at
    if window is not None:
        left, right = window
        if mistake == "window off by one":
            left -= 1
        seen &= (j >= at - left) & (j <= at + right)
    return seen


def attention(case, mistake=None):
    """Forward and backward of a four-axis call, tile by tile: {name: array}."""
    q, k, v, dout = (a.astype(np.float64) for a in (case.q, case.k, case.v, case.dout))
    options = case.options
    (B, Hq, Tq, d), Hkv, Tk, dv = q.shape, k.shape[1], k.shape[2], v.shape[3]
    scale = 1.0 if mistake == "no scale" else 1 / math.sqrt(d)
    offset = 0 if mistake == "upper left for lower right" else Tk - Tq
    causal, window = options.get("causal", False), options.get("window")
    p, sinks = options.get("dropout", 0.0), options.get("sinks")
    keep = rf.dropout_mask(p, options.get("seed", 0), (B, Hq, Tq, Tk))
    if mistake == "another dropout mask backward":
        keep_backward = rf.dropout_mask(p, options.get("seed", 0) + 1, (B, Hq, Tq, Tk))
    else:
        keep_backward = keep
    keep_scale = 1.0 if mistake == "no dropout scale" else 1 / (1 - p)
    out, lse = np.zeros((B, Hq, Tq, dv)), np.full((B, Hq, Tq), -np.inf)
    dq, dk, d_v = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dlse = case.dlse.astype(np.float64)
    if mistake == "dlse forgotten":
        dlse = 0 * dlse
    for b, h in np.ndindex(B, Hq):
        kv = h % Hkv if mistake == "head mapping" else h // (Hq // Hkv)
        for i0 in range(0, Tq, BLOCK):
            i = np.arange(i0, min(i0 + BLOCK, Tq))
            O, m, l = np.zeros((len(i), dv)), np.full(len(i), -np.inf), np.zeros(len(i))
            for j0 in range(0, Tk, BLOCK):
                if mistake == "last tile forgotten" and j0 + BLOCK > Tk:
                    continue
                j = np.arange(j0, min(j0 + BLOCK, Tk))
                S = np.where(
                    visible(i, j, offset, causal, window, mistake),
                    scale * q[b, h, i] @ k[b, kv, j].T,
                    -np.inf,
                )
                block_max = S.max(axis=1)
                new = np.maximum(m, block_max)
                # Seed 003: exp and rescaling take the maximum of this block, not the running one.
                shift = block_max if mistake == "block maximum" else new
                shift = np.where(np.isneginf(shift), 0, shift)
                P = np.exp(S - shift[:, None])
                alpha = np.exp(m - shift)
                if mistake == "no rescale of O":
                    l = alpha * l + P.sum(axis=1)
                elif mistake == "no rescale":
                    l = l + P.sum(axis=1)
                else:
                    O, l = alpha[:, None] * O, alpha * l + P.sum(axis=1)
                m = new
                O = O + (P * keep[b, h][np.ix_(i, j)] * keep_scale) @ v[b, kv, j]
            if sinks is not None:
                new = np.maximum(m, sinks[h])
                O *= np.exp(m - new)[:, None]
                l, m = l * np.exp(m - new) + np.exp(sinks[h] - new), new
            safe = np.where(l == 0, 1, l)
            out[b, h, i] = O / safe[:, None]
            with np.errstate(divide="ignore"):
                lse[b, h, i] = np.where(l == 0, -np.inf, m + np.log(l))
    true_lse = lse.copy()
    for b, h in np.ndindex(B, Hq):
        kv = h % Hkv if mistake == "head mapping" else h // (Hq // Hkv)
        i, j = np.arange(Tq), np.arange(Tk)
        seen = visible(i, j, offset, causal, window, mistake)
        S = scale * q[b, h] @ k[b, kv].T
        P = np.where(seen, np.exp(S - true_lse[b, h][:, None]), 0)
        Z = keep_backward[b, h] * keep_scale
        gamma = 0 * dlse[b, h] if mistake == "no gamma" else (dout[b, h] * out[b, h]).sum(axis=1)
        dP = dout[b, h] @ v[b, kv].T
        if mistake != "dropout forgotten in dP":
            dP = dP * Z
        dS = P * (dP - gamma[:, None] + dlse[b, h][:, None])
        dq[b, h] = scale * dS @ k[b, kv]
        to_k = (1.0 if mistake == "no scale in dK" else scale) * dS.T @ q[b, h]
        to_v = (P * Z).T @ dout[b, h]
        if mistake == "last head of a group wins":
            dk[b, kv], d_v[b, kv] = to_k, to_v
        else:
            dk[b, kv] += to_k
            d_v[b, kv] += to_v
    if mistake == "lse in base 2":
        lse = lse / math.log(2)
    if mistake == "sink left out of lse":
        total = np.exp(lse) - np.exp(sinks.astype(np.float64))[None, :, None]
        lse = np.log(total)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": d_v}


PROBLEM = dict(B=1, Hq=4, Hkv=2, Tq=20, Tk=29, d=8, dv=5)
EVERYTHING = dict(causal=True, window=(13, 4), dropout=0.3, sinks=np.array([0.5, -1, 2, 0.0], np.float32))
# The mistake, the options that bring it to light, and the results that must be rejected.
MISTAKES = {
    "no rescale": ({}, {"out", "lse"}),
    "no rescale of O": ({}, {"out"}),
    "block maximum": ({}, {"out", "lse"}),
    "window off by one": (dict(window=(6, 3)), {"out", "lse", "dq", "dk", "dv"}),
    "causal off by one": (dict(causal=True), {"out", "lse", "dq", "dk", "dv"}),
    "upper left for lower right": (dict(causal=True), {"out", "lse", "dq", "dk", "dv"}),
    "last tile forgotten": ({}, {"out", "lse"}),
    "no scale": ({}, {"out", "lse", "dq", "dk", "dv"}),
    "no scale in dK": ({}, {"dk"}),
    "no gamma": ({}, {"dq", "dk"}),
    "dlse forgotten": ({}, {"dq", "dk"}),
    "no dropout scale": (dict(dropout=0.3), {"out", "dv"}),
    "another dropout mask backward": (dict(dropout=0.3), {"dq", "dk", "dv"}),
    "dropout forgotten in dP": (dict(dropout=0.3), {"dq", "dk"}),
    "head mapping": ({}, {"out", "lse", "dq", "dk", "dv"}),
    "last head of a group wins": ({}, {"dk", "dv"}),
    "lse in base 2": ({}, {"lse"}),
    "sink left out of lse": (dict(sinks=np.array([0.5, -1, 2, 0.0], np.float32)), {"lse"}),
}


def in_dtype(results, dtype):
    statistic = np.float64 if dtype == "float64" else np.float32
    return {name: a.astype(statistic if name == "lse" else DTYPES[dtype]) for name, a in results.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, EVERYTHING, dict(causal=True), dict(dropout=0.3)])
def test_the_right_one_is_accepted(options, dtype):
    case = make(dtype=dtype, **PROBLEM, **options)
    case.wrt = ("q", "k", "v")
    reference = case.reference()
    for name, array in in_dtype(attention(case), dtype).items():
        assert_close(name, array, reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_rejected(mistake, dtype):
    options, wrong = MISTAKES[mistake]
    case = make(dtype=dtype, **PROBLEM, **options)
    case.wrt = ("q", "k", "v")
    reference = case.reference()
    for name, array in in_dtype(attention(case, mistake), dtype).items():
        if name in wrong:
            assert error_ratio(name, array, reference) > 1, f"{name} is wrong and was accepted"
            with pytest.raises(AssertionError, match=name):
                assert_close(name, array, reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("spoil", [np.nan, np.inf, "another element"])
def test_one_wrong_element_is_rejected(spoil, name, dtype):
    """Not an average: one element of one row, anywhere, is enough."""
    case = make(dtype=dtype, **PROBLEM)
    reference = case.reference()
    array = in_dtype(attention(case), dtype)[name]
    flat = array.reshape(-1)
    flat[17] = flat[np.abs(flat - flat[17]).argmax()] if spoil == "another element" else spoil
    assert error_ratio(name, array, reference) > 1


# ---- the loop in circulation ------------------------------------------------------------------------


def from_scratch(Q, K, V, block, running):
    """The loop of seed 003, "FlashAttention from Scratch", float64; ``running`` corrects its one mistake."""
    T, d = Q.shape
    out = np.zeros_like(Q)
    for i in range(0, T, block):
        Qi = Q[i : i + block]
        O, l, m = np.zeros_like(Qi), np.zeros((len(Qi), 1)), np.full((len(Qi), 1), -np.inf)
        for j in range(0, T, block):
            S = Qi @ K[j : j + block].T / math.sqrt(d)
            mj = S.max(axis=1, keepdims=True)
            if running:
                mj = np.maximum(m, mj)
            P = np.exp(S - mj)
            scale_prev = np.exp(m - mj)
            l = l * scale_prev + P.sum(axis=1, keepdims=True)
            O = O * scale_prev + P @ V[j : j + block]
            m = np.maximum(m, mj)
        out[i : i + block] = O / l
    return out


def test_the_loop_of_seed_003_and_its_correction():
    """T = 256, d = 64, block 64: off by about 0.365, as large as the output; 6e-16 once corrected."""
    rng = np.random.default_rng(0)
    Q, K, V = (rng.standard_normal((256, 64)) for _ in range(3))
    oracle = rf.oracle.attention(Q, K, V)
    broken = np.abs(from_scratch(Q, K, V, 64, running=False) - oracle).max()
    correct = np.abs(from_scratch(Q, K, V, 64, running=True) - oracle).max()
    assert broken == pytest.approx(0.365, rel=0.1)
    assert correct < 1.2e-15
    one_block = np.abs(from_scratch(Q, K, V, 256, running=False) - oracle).max()
    assert one_block < 1.2e-15, "with one block the mistake is invisible: tests need several tiles"


# ---- a backend that is not there --------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["numba_cpu", "numpy_tiled"])
def test_a_backend_that_cannot_load_is_an_error(backend, monkeypatch):
    """Asked for by name, with its library missing: BackendError that says why, never another answer."""
    module = backends.BACKENDS[backend].module
    for name in list(sys.modules):
        if name == module or name.startswith(module + "."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)  # what Python leaves behind for a module that is not there
    x = np.ones((3, 2), np.float32)
    with pytest.raises(rf.BackendError, match=backend):
        rf.attention(x, x, x, backend=backend)
    with pytest.raises(rf.BackendError, match=backend):
        rf.attention_backward(x, x, x, x, x, np.ones(3, np.float32), backend=backend)


@pytest.mark.parametrize("backend", [name for name, row in backends.BACKENDS.items() if row.module is None])
def test_a_backend_without_kernels_is_an_error(backend):
    x = np.ones((3, 2), np.float32)
    with pytest.raises(rf.BackendError, match=backend):
        rf.attention(x, x, x, backend=backend)


@pytest.mark.parametrize(
    "backend", [name for name, row in backends.BACKENDS.items() if row.module is not None]
)
def test_a_backend_of_the_table_is_there(backend):
    """The suite's list of kernels comes from this table: a row that does not load must fail here."""
    row = backends.BACKENDS[backend]
    assert importlib.util.find_spec(row.module) is not None
    for algorithm in row.algorithms:
        for direction in ("forward", "backward"):
            module = importlib.import_module(f"{row.module}.{algorithm}_{direction}")
            assert callable(getattr(module, f"{algorithm}_{direction}"))


def test_an_algorithm_that_a_backend_has_not_is_an_error():
    x = np.ones((3, 2), np.float32)
    with pytest.raises(rf.BackendError, match="numpy_tiled"):
        rf.attention(x, x, x, backend="numba_cpu", algorithm="rowwise")
