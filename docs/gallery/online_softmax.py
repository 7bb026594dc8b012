"""One row of attention, tile by tile: the maximum m, the sum l and the output O of FlashAttention-2.

    python docs/gallery/online_softmax.py          # print the numbers of the page
    python docs/gallery/make.py online_softmax     # draw its picture
"""

import numpy as np

import rawflash as rf

KEYS, BLOCK, D, DV = 64, 8, 16, 3


def problem():
    """One query, and keys and values, in float64."""
    rng = np.random.default_rng(14393)
    return 1.5 * rng.standard_normal((1, D)), rng.standard_normal((KEYS, D)), rng.standard_normal((KEYS, DV))


def evolution(q, k, v):
    """The inner loop of the forward pass for one row; yields its state after every tile."""
    m, l, O = -np.inf, 0.0, np.zeros(DV)
    for j in range(0, KEYS, BLOCK):
        S = k[j : j + BLOCK] @ q[0] / np.sqrt(D)
        m_new = max(m, S.max())  # the maximum so far, not that of the tile
        alpha = np.exp(m - m_new)  # what l and O so far are to be multiplied by: at most 1
        P = np.exp(S - m_new)
        l = alpha * l + P.sum()
        O = alpha * O + P @ v[j : j + BLOCK]
        m = m_new
        yield S, m, alpha, l, O


def data():
    """All that the page and the picture show, by name."""
    q, k, v = problem()
    S, m, alpha, l, O = (np.array(state) for state in zip(*evolution(q, k, v), strict=True))
    mean = O / l[:, None]
    out, lse = rf.attention(q, k, v, return_lse=True, backend="numpy_tiled")
    # After every tile, O / l and m + ln l are attention over the keys so far and its log-sum-exp.
    stops = range(BLOCK, KEYS + 1, BLOCK)
    so_far = [rf.attention(q, k[:j], v[:j], return_lse=True, backend="numpy_tiled") for j in stops]
    apart = [max(abs(o[0] - mean[n]).max(), abs(L[0] - m[n] - np.log(l[n]))) for n, (o, L) in enumerate(so_far)]
    return {
        "S": S, "m": m, "alpha": alpha, "l": l, "mean": mean, "lse": m + np.log(l),
        "out": out[0], "final lse": lse[0], "within 1e-12": max(apart) < 1e-12,
    }  # fmt: skip


def report(data):
    """Print one line a tile."""
    print("tile  its max       m   alpha       l     lse  |O/l - out|")
    for n, S in enumerate(data["S"]):
        row = [S.max(), *(data[name][n] for name in ("m", "alpha", "l", "lse"))]
        error = abs(data["mean"][n] - data["out"]).max()
        print(f"{n:>4}  " + " ".join(f"{x:7.3f}" for x in row) + f"  {error:11.3f}")
    print(f"rf.attention: lse {data['final lse']:.3f}")
    print(f"every line is attention over the keys so far, within 1e-12: {data['within 1e-12']}")


def picture(data, plt):
    """Scores and m; l and alpha; O / l, over the keys seen so far."""
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(4.8, 6.2), sharex=True, layout="constrained")
    edges = np.arange(0, KEYS + 1, BLOCK)
    for panel in (top, middle, bottom):
        panel.set_xticks(edges)
        panel.grid(axis="x", color="#dddddd")
    top.plot(np.arange(KEYS) + 0.5, data["S"].ravel(), ".", color="#888888", label="score of a key")
    top.stairs(data["m"], edges, baseline=None, color="#d55e00", linewidth=2, label="m, the maximum so far")
    top.plot(edges[1:], data["lse"], "o--", color="#0072b2", label="lse = m + ln ℓ")
    top.set_ylim(data["S"].min() - 4.5, data["lse"].max() + 0.7)
    top.legend(loc="lower center", ncols=2)
    top.set_title("scores and m")

    middle.bar(edges[:-1] + BLOCK / 2, data["alpha"], BLOCK * 0.7, color="#f0c66e")
    middle.set_ylabel("alpha")
    middle.set_ylim(0, 1.1)
    right = middle.twinx()
    right.plot(edges[1:], data["l"], "o-", color="#0072b2")
    right.set_ylim(0, 1.1 * data["l"].max())
    right.set_ylabel("ℓ")
    middle.set_title("alpha (bars) rescales what came before; ℓ (line)")

    for x, colour in enumerate(("#0072b2", "#d55e00", "#009e73")):
        bottom.plot(edges[1:], data["mean"][:, x], "o-", color=colour)
        bottom.axhline(data["out"][x], color=colour, linestyle="--", linewidth=1)
        bottom.annotate(f"O[{x}]", (KEYS, data["out"][x]), (5, -3), textcoords="offset points", color=colour)
    bottom.set_title("O / ℓ after each tile; dashed: the result")
    bottom.set_xlabel("keys seen")
    bottom.set_xlim(0, KEYS)
    return figure


if __name__ == "__main__":
    report(data())
