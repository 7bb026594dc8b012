"""Train through the log-sum-exp: a z-loss, and attention in parts that are merged by it.

    python docs/gallery/train_through_lse.py          # print the numbers of the page
    python docs/gallery/make.py train_through_lse     # draw its picture
"""

import numpy as np

import rawflash as rf

TOKENS, D, STEPS, RATE = 32, 16, 300, 0.02
WEIGHTS_OF_Z = (0.0, 1e-3)
CALL = {"backend": "numpy_tiled", "sram": 2**16}


def problem():
    """Tokens, the token that each should attend to, and the weights to learn."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((TOKENS, D))
    target = rng.permutation(TOKENS)
    return X, target, {name: 0.3 * rng.standard_normal((D, D)) for name in "qk"}


def loss_and_gradients(W, X, target, z):
    """Mean of -ln P[i, target[i]] plus z mean(lse^2); its gradients come back through out and lse."""
    n, V = np.arange(len(X)), np.eye(len(X))  # the values are one-hot, so out is P
    q, k = X @ W["q"], X @ W["k"]
    out, lse = rf.attention(q, k, V, return_lse=True, **CALL)
    seen = out[n, target]
    loss = -np.log(seen).mean() + z * (lse**2).mean()

    dout = np.zeros_like(out)
    dout[n, target] = -1 / (seen * len(X))
    dlse = 2 * z * lse / len(X)
    dq, dk = rf.attention_backward(dout, q, k, V, out, lse, dlse=dlse, wrt=("q", "k"), **CALL)
    return loss, lse, {"q": X.T @ dq, "k": X.T @ dk}


def train(z):
    """Adam; per step the loss without its z part, rms of lse, largest score, and tokens that find their target."""
    X, target, W = problem()
    mean, square = ({name: np.zeros_like(w) for name, w in W.items()} for _ in range(2))
    for step in range(1, STEPS + 1):
        loss, lse, gradients = loss_and_gradients(W, X, target, z)
        S = X @ W["q"] @ (X @ W["k"]).T / np.sqrt(D)  # to look at; attention stores no score
        found = (S.argmax(axis=1) == target).sum()
        yield loss - z * (lse**2).mean(), np.sqrt((lse**2).mean()), S.max(), found
        for name, g in gradients.items():
            mean[name] = 0.9 * mean[name] + 0.1 * g
            square[name] = 0.99 * square[name] + 0.01 * g**2
            unbiased = mean[name] / (1 - 0.9**step), square[name] / (1 - 0.99**step)
            W[name] = W[name] - RATE * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-9)


def merged(q, parts, dout, through_lse=True):
    """Attention over parts of the keys, merged, and its gradients back through the merge."""
    results = [rf.attention(q, k, v, return_lse=True, **CALL) for k, v in parts]
    out, lse = rf.merge_attention(*zip(*results, strict=True))
    dq, dkv = np.zeros_like(q), []
    for (k, v), (o, L) in zip(parts, results, strict=True):
        w = np.exp(L - lse)[:, None]  # out = sum of w o, and w depends on every part's lse
        dL = (w * dout * (o - out)).sum(axis=1) if through_lse else None
        dq_part, dk, dv = rf.attention_backward(w * dout, q, k, v, o, L, dlse=dL, **CALL)
        dq += dq_part
        dkv.append((dk, dv))
    return out, (dq, *(np.concatenate(d) for d in zip(*dkv, strict=True)))


def check_gradient():
    """Largest distance of the gradient with z-loss from central differences."""
    X, target, W = problem()
    X, target = X[:6], np.argsort(target[:6])
    _, _, gradients = loss_and_gradients(W, X, target, 0.1)
    difference = 0.0
    for name in W:
        slope = rf.oracle.central_differences(
            lambda w, name=name: loss_and_gradients(W | {name: w}, X, target, 0.1)[0], W[name]
        )
        difference = max(difference, float(abs(slope - gradients[name]).max()))
    return difference


def check_merge(through_lse=True):
    """Largest distances of the merged output and gradients from those of one call."""
    q, k, v, dout = np.random.default_rng(1).standard_normal((4, TOKENS, D))
    out, pullback = rf.attention_vjp(q, k, v, **CALL)
    expected = out, *pullback(dout)
    found, gradients = merged(q, [(k[:20], v[:20]), (k[20:], v[20:])], dout, through_lse)
    return [float(abs(a - b).max()) for a, b in zip((found, *gradients), expected, strict=True)]


def data():
    """All that the page and the picture show, by name."""
    return {f"z = {z:g}": np.array(list(train(z))) for z in WEIGHTS_OF_Z}


def report(data):
    """Print some steps of each run."""
    print("".join(f"{run:>35}" for run in data))
    print("step" + "      loss  rms lse  largest  found" * len(data))
    for step in (1, 25, 50, 100, 200, STEPS):
        rows = (run[step - 1] for run in data.values())
        print(f"{step:>4}" + "".join(f"{a:10.3f}{b:9.2f}{c:9.2f}{d:7.0f}" for a, b, c, d in rows))


def picture(data, plt):
    """The loss, the root mean square of lse and the largest score, over the steps."""
    figure, panels = plt.subplots(3, 1, figsize=(4.8, 6.0), sharex=True, layout="constrained")
    titles = "loss: mean of -ln P[target]", "root mean square of lse", "largest score"
    steps = np.arange(1, STEPS + 1)
    for n, (panel, title) in enumerate(zip(panels, titles, strict=True)):
        for (name, run), (colour, style) in zip(data.items(), (("#d55e00", "-"), ("#0072b2", "--")), strict=True):
            panel.plot(steps, run[:, n], style, color=colour, linewidth=1.8, label=name)
        panel.set_title(title)
        panel.grid(color="#dddddd")
        panel.set_xlim(0, STEPS)
    panels[0].set_yscale("log")
    panels[0].yaxis.set_major_formatter("{x:g}")
    panels[1].set_ylim(0)
    panels[0].legend(loc="upper right")
    panels[-1].set_xlabel("step")
    return figure


if __name__ == "__main__":
    report(data())
    print("gradient and central differences within 1e-8:", check_gradient() < 1e-8)
    print("merged parts and one call within 1e-12:", max(check_merge()) < 1e-12)
