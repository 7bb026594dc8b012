"""How a gradient flows through attention: dO to dV, dP, dS, dQ and dK, and to a sink and a bias.

    python docs/gallery/gradient_flow.py          # print the numbers of the page
    python docs/gallery/make.py gradient_flow     # draw its picture
"""

import numpy as np

import rawflash as rf

T, D, BACK, STEPS, RATE = 16, 16, 3, 60, 0.5
CALL = {"backend": "numpy_tiled", "causal": True, "sram": 2**12}


def problem():
    """Queries, keys, values, and targets: row i is to copy the value of three keys before it."""
    Q, K, V = np.random.default_rng(2).standard_normal((3, T, D))
    target = V[np.maximum(np.arange(T) - BACK, 0)]
    return Q, K, V, target


def loss(Q, K, V, target, **options):
    """Half the squared distance of the output from the targets, in float64."""
    return 0.5 * ((rf.oracle.attention(Q, K, V, causal=True, **options) - target) ** 2).sum()


def by_hand(Q, K, V, target):
    """The equations, each with its number in Chu, Liu and Lin 2026."""
    scale = 1 / np.sqrt(D)
    visible = np.tril(np.ones((T, T), bool))
    S = np.where(visible, scale * Q @ K.T, -np.inf)  # (7)
    P = np.exp(S - S.max(axis=1, keepdims=True))
    P /= P.sum(axis=1, keepdims=True)  # (8)
    O = P @ V  # (9)

    dO = O - target  # of this loss
    dV = P.T @ dO  # (15)
    dP = dO @ V.T  # (17)
    gamma = (dO * O).sum(axis=1)  # (24): the mean of dP under P, without P
    dS = P * (dP - gamma[:, None])  # (21)
    dQ = scale * dS @ K  # (76)
    dK = scale * dS.T @ Q  # (77)
    return {"P": P, "dP": np.where(visible, dP, 0), "gamma": gamma, "dS": dS, "dO": dO, "dV": dV, "dQ": dQ, "dK": dK}


def descend(Q, K, V, target):
    """P and the loss after some steps of gradient descent on Q and K alone."""
    for _ in range(STEPS):
        found = by_hand(Q, K, V, target)
        Q, K = Q - RATE * found["dQ"], K - RATE * found["dK"]
    return by_hand(Q, K, V, target)["P"], loss(Q, K, V, target)


def data():
    """All that the page and the picture show, by name."""
    inputs = problem()
    later, loss_later = descend(*inputs)
    return by_hand(*inputs) | {"later": later, "loss": [loss(*inputs), loss_later]}


def check_gradients():
    """Largest distances per gradient: the equations from central differences, rawflash from the equations."""
    Q, K, V, target = problem()
    found = by_hand(Q, K, V, target)
    O, lse = rf.attention(Q, K, V, return_lse=True, **CALL)
    ours = rf.attention_backward(O - target, Q, K, V, O, lse, **CALL)
    slopes = (
        rf.oracle.central_differences(lambda x: loss(x, K, V, target), Q),
        rf.oracle.central_differences(lambda x: loss(Q, x, V, target), K),
        rf.oracle.central_differences(lambda x: loss(Q, K, x, target), V),
    )
    rows = zip(("dQ", "dK", "dV"), slopes, ours, strict=True)
    return {n: (float(abs(found[n] - s).max()), float(abs(found[n] - o).max())) for n, s, o in rows}


def check_options():
    """The same for a bias for each distance, with a sink: their gradients, from central differences."""
    Q, K, V, target = problem()
    far = np.arange(T)[:, None] - np.arange(T)  # how far the key lies before the row
    weights, sink = np.linspace(0.5, -0.5, T), np.array([0.7])

    def of(weights, sink):
        return loss(Q, K, V, target, bias=weights[np.maximum(far, 0)], sinks=sink)

    options = CALL | {"bias": weights[np.maximum(far, 0)], "sinks": sink}
    O, lse = rf.attention(Q, K, V, return_lse=True, **options)
    dbias, dsinks = rf.attention_backward(O - target, Q, K, V, O, lse, wrt=("bias", "sinks"), **options)
    dweights = np.array([np.trace(dbias, -n) for n in range(T)])  # a distance is a diagonal
    slopes = (
        rf.oracle.central_differences(lambda x: of(x, sink), weights),
        rf.oracle.central_differences(lambda x: of(weights, x), sink),
    )
    return dweights, dsinks, [float(abs(a - b).max()) for a, b in zip((dweights, dsinks), slopes, strict=True)]


def report(data):
    """Print one row, key by key."""
    i = 9
    print(f"row {i}; its target is the value of key {i - BACK}; gamma = {data['gamma'][i]:.3f}")
    print("key        P       dP  dP - gamma       dS  P later")
    for j in range(i + 1):
        P, dP, dS, later = (data[name][i, j] for name in ("P", "dP", "dS", "later"))
        print(f"{j:>3}  {P:7.3f}  {dP:7.3f}  {dP - data['gamma'][i]:10.3f}  {dS:7.3f}  {later:7.3f}")
    P, dS, later = (abs(data[name][i].sum()) for name in ("P", "dS", "later"))
    print(f"sum  {P:7.3f} {'':20} {dS:8.3f}  {later:7.3f}")
    print(f"loss {data['loss'][0]:.2f}, after {STEPS} steps {data['loss'][1]:.2f}")


def picture(data, plt):
    """Heat maps of P, dP, dS and of P after some steps."""
    figure, panels = plt.subplots(2, 2, figsize=(4.8, 4.6), layout="compressed")
    hidden = ~np.tril(np.ones((T, T), bool))
    names = {"P": "P", "dP": "dP = dO Vᵀ", "dS": "dS = P (dP - gamma)", "later": f"P after {STEPS} steps"}
    for panel, (name, title) in zip(panels.flat, names.items(), strict=True):
        values = np.ma.masked_array(data[name], hidden)
        limit = abs(values).max()
        signed = name in ("dP", "dS")
        colours = {"cmap": "PuOr" if signed else "Blues", "vmin": -limit if signed else 0, "vmax": limit}
        drawn = panel.imshow(values, interpolation="none", **colours)
        rows = np.arange(BACK, T)
        panel.plot(rows - BACK, rows, "s", markersize=6.5, markerfacecolor="none", markeredgecolor="#222222")
        figure.colorbar(drawn, ax=panel, fraction=0.046, pad=0.04, ticks=plt.MaxNLocator(4))
        panel.set_title(title)
        panel.set_xticks([0, 5, 10, 15])
        panel.set_yticks([0, 5, 10, 15], [0, 5, 10, 15] if panel in panels[:, 0] else [""] * 4)
    panels[1, 0].set_xlabel("key")
    panels[1, 0].set_ylabel("query row")
    return figure


if __name__ == "__main__":
    report(data())
    print("from central differences, rawflash from the equations:", check_gradients())
    print("bias and sink, from central differences:", check_options()[2])
