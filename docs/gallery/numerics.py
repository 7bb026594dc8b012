"""Errors of float16, bfloat16 and float32 against the float64 oracle.

    python docs/gallery/numerics.py              # measure, and print the numbers
    python docs/gallery/numerics.py --record     # measure, and write numerics.json, which the page shows
    python docs/gallery/make.py numerics         # draw the picture of that record

The last digits of a sum depend on the order in which a machine's BLAS adds, so the page shows a record.
"""

import json
import sys
from pathlib import Path

import numpy as np

import rawflash as rf
from rawflash.accuracy import error_ratio, reference, unit_roundoff

RECORD = Path(__file__).with_name("numerics.json")
DTYPES = ("float16", "bfloat16", "float32")
ROWS, D = 32, 64
KEYS = (64, 256, 1024, 4096, 16384)  # with scores of unit variance
SCALES = (0.25, 1, 4, 16, 64)  # of the scores, with 1024 keys
LARGEST = (-160, -120, -105, -100, -95, -90, -80, -60, -30, 0, 30, 60, 80, 85, 90, 120, 160)  # without a maximum


def typed(dtype, *arrays):
    """Arrays rounded to a dtype by name; bfloat16 is of the package ml_dtypes."""
    if dtype == "bfloat16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    return [array.astype(dtype) for array in arrays]


def inputs(dtype, keys, scale=1.0):
    """A query block, keys and values, and a gradient; the score's standard deviation is ``scale``."""
    rng = np.random.default_rng(keys)
    q, dout = rng.standard_normal((2, ROWS, D))
    k, v = rng.standard_normal((2, keys, D))
    return typed(dtype, scale * q, k, v, dout)


def dense(q, k, v, stored):
    """The formula with products in float32 that stores S and P in ``stored``, as standard attention does."""
    Q, K, V = (array.astype(np.float32) for array in (q, k, v))
    S = (Q @ K.T / np.float32(np.sqrt(D))).astype(stored).astype(np.float32)
    P = np.exp(S - S.max(axis=1, keepdims=True))
    P = (P / P.sum(axis=1, keepdims=True)).astype(stored).astype(np.float32)
    return (P @ V).astype(q.dtype)


def largest_errors(dtype, keys, scale=1.0):
    """Largest errors of out, tiled and dense, and the largest that is allowed; largest score and largest out."""
    q, k, v, _ = inputs(dtype, keys, scale)
    exact = reference(q, k, v, dtype=dtype)
    tiled = rf.attention(q, k, v, backend="numpy_tiled", sram=2**16)
    found = {
        "tiled": tiled.astype(np.float64) - exact.oracle["out"],
        "dense": dense(q, k, v, q.dtype).astype(np.float64) - exact.oracle["out"],
        "allowed": exact.allowed["out"],
        "score": q.astype(np.float64) @ k.astype(np.float64).T / np.sqrt(D),
        "out": exact.oracle["out"],
    }
    return {name: float(abs(x).max()) for name, x in found.items()}


def ratios(dtype, keys=256):
    """Error over allowed error, of the output, lse and the three gradients; good up to 1."""
    q, k, v, dout = inputs(dtype, keys)
    call = {"backend": "numpy_tiled", "sram": 2**16}
    out, lse = rf.attention(q, k, v, return_lse=True, **call)
    exact = reference(q, k, v, dout, out=out, lse=lse, dtype=dtype)
    found = out, lse, *rf.attention_backward(dout, q, k, v, out, lse, **call)
    return {n: error_ratio(n, x, exact) for n, x in zip(("out", "lse", "dq", "dk", "dv"), found, strict=True)}


def without_maximum(largest):
    """Errors in float32, tiled and by the formula without a maximum; scores from ``largest - 20`` to ``largest``.

    A number that is added to all scores changes nothing in a softmax.
    """
    q = np.ones((1, 1), np.float32)
    k = np.linspace(largest - 20, largest, 256, dtype=np.float32)[:, None]
    v = np.random.default_rng(0).standard_normal((256, 1), dtype=np.float32)
    exact = rf.oracle.attention(q, k, v)
    with np.errstate(all="ignore"):  # exp overflows, or all of it is 0
        P = np.exp(q @ k.T)
        bare = (P @ v) / P.sum(axis=1, keepdims=True)
    out = rf.attention(q, k, v, backend="numpy_tiled", sram=2**16)
    return [float(abs(x - exact).max()) for x in (out, bare)]


def measure():
    """Everything that the record holds; some seconds."""
    return {
        "keys": {dtype: [largest_errors(dtype, n) for n in KEYS] for dtype in DTYPES},
        "scales": {dtype: [largest_errors(dtype, 1024, s) for s in SCALES] for dtype in DTYPES},
        "maximum": [[None if np.isnan(x) else x for x in without_maximum(s)] for s in LARGEST],
        "unit roundoff": {dtype: unit_roundoff(*[x.dtype for x in typed(dtype, np.ones(1))]) for dtype in DTYPES},
    }


def data():
    """The record's results; the page and the picture show nothing else."""
    return json.loads(RECORD.read_text())["results"]


def report(data):
    """Print the errors by the number of keys, and by the scale of the scores."""
    print("dtype     keys  scale  largest score    tiled    dense  allowed")
    for dtype in DTYPES:
        rows = [(n, 1, row) for n, row in zip(KEYS, data["keys"][dtype], strict=True)]
        rows += [(1024, s, row) for s, row in zip(SCALES, data["scales"][dtype], strict=True) if s != 1]
        for n, s, row in rows:
            errors = "  ".join(f"{row[name]:.1e}" for name in ("tiled", "dense", "allowed"))
            print(f"{dtype:<8} {n:>5} {s:>6} {row['score']:>14.1f}  {errors}")


def report_maximum(data):
    """Print the errors with and without the running maximum."""
    print("largest score    with m  without")
    for score, (tiled, bare) in zip(LARGEST, data["maximum"], strict=True):
        print(f"{score:>13}  {tiled:8.1e}  " + ("    NaN" if bare is None else f"{bare:.1e}"))


def picture(data, plt):
    """Errors over the keys, over the scale of the scores, and without the maximum."""
    figure, panels = plt.subplots(3, 1, figsize=(4.8, 8.4), layout="constrained")
    colours = {"float16": "#d55e00", "bfloat16": "#0072b2", "float32": "#009e73"}
    for panel, name, x in ((panels[0], "keys", KEYS), (panels[1], "scales", SCALES)):
        for dtype, colour in colours.items():
            tiled, formula, allowed = ([row[n] for row in data[name][dtype]] for n in ("tiled", "dense", "allowed"))
            panel.plot(x, tiled, "o-", color=colour, label=dtype if panel is panels[1] else None)
            panel.plot(x, formula, "s--", color=colour, markerfacecolor="white", linewidth=1)
            panel.plot(x, allowed, ":", color=colour)
        panel.set_xscale("log")
        panel.set_xticks(x, [f"{n:g}" for n in x])
        panel.minorticks_off()
    panels[0].set_xlabel("keys; scores of unit variance")
    panels[1].set_xlabel("scale of the scores; 1024 keys")
    for style, name, face in (("o-", "tiled", None), ("s--", "dense, stored", "white"), (":", "allowed", None)):
        panels[1].plot([], [], style, color="#555555", markerfacecolor=face, label=name)
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    with_m, bare = np.array(data["maximum"], dtype=float).T  # None becomes NaN, which is not drawn
    panels[2].plot(LARGEST, with_m, "o-", color="#009e73", label="running maximum")
    panels[2].plot(LARGEST, bare, "s--", color="#cc79a7", label="no maximum")
    for x, text, side in ((LARGEST[0], "0 / 0", "left"), (LARGEST[-1], "inf / inf", "right")):
        panels[2].text(x, 1e-4, text, ha=side)
    panels[2].set_xlabel("largest of scores that span 20; float32")
    panels[2].legend(loc="upper right")
    for panel in panels:
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(lambda y, _: f"{y:.0e}".replace("e-0", "e-"))
        panel.grid(color="#dddddd")
        panel.set_ylabel("largest error of out")
    return figure


def main():
    results = measure()
    if "--record" in sys.argv[1:]:
        sys.path.insert(0, str(Path(__file__).parents[2]))
        from bench.record import about, write

        write(RECORD, {"about": about(gpu=False), "results": results})
    report(results)
    report_maximum(results)


if __name__ == "__main__":
    main()
