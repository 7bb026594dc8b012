"""Draw the pictures of the gallery, or check that they are those of their data.

    python docs/gallery/make.py [--check] [NAME ...]

A picture's metadata holds the SHA-256 of the data that it was drawn from, rounded to five digits. --check computes
the data again and compares, which needs no matplotlib.
"""

import argparse
import hashlib
import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
NAMES = "online_softmax", "mask_tiles", "gradient_flow", "numerics", "train_through_lse"
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "rawflash",  # the ids in the file are the same each time
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 10,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.markersize": 4,
    "axes.axisbelow": True,
}


def lines(data, name=""):
    """The data as lines of text: dicts and lists by their keys and indices, numbers with five digits."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from lines(value, f"{name}/{key}")
    elif data is None or isinstance(data, str):
        yield f"{name} {data}"
    elif isinstance(data, list | tuple):
        for n, value in enumerate(data):
            yield from lines(value, f"{name}/{n}")
    else:
        array = np.asarray(data, dtype=np.float64)
        array = np.where(abs(array) < 1e-12, 0.0, array)  # what is 0 but for rounding
        yield f"{name} {array.shape} " + " ".join(f"{x:.4e}" for x in array.ravel())


def digest(data):
    """SHA-256 of the data, rounded, so that the last bits of another machine's sums make no difference."""
    return hashlib.sha256("\n".join(lines(data)).encode()).hexdigest()


def module(name):
    """A script of the gallery, imported."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    return importlib.import_module(name)


def digest_in(path):
    """The digest that a picture carries; None without one."""
    found = re.search(r"sha256 of its data: ([0-9a-f]{64})", path.read_text())
    return found and found[1]


def draw(name):
    """Write the picture of one page."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    script = module(name)
    data = script.data()
    with matplotlib.rc_context(STYLE):
        figure = script.picture(data, plt)
        about = {
            "Title": (script.__doc__ or name).splitlines()[0],
            "Description": f"docs/gallery/{name}.py; sha256 of its data: {digest(data)}",
            "Date": None,
            "Creator": None,
        }
        figure.savefig(HERE / f"{name}.svg", metadata=about)
        plt.close(figure)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Draw the pictures of the gallery.")
    parser.add_argument("--check", action="store_true", help="draw nothing; exit with 1 if a picture is stale")
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], metavar="NAME", help="all if none is given")
    options = parser.parse_args(arguments)
    stale = []
    for name in options.names or NAMES:
        if not options.check:
            draw(name)
        elif digest_in(HERE / f"{name}.svg") != digest(module(name).data()):
            stale.append(name)
    if stale:
        print("stale, draw again with docs/gallery/make.py:", *stale)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
