"""Which tiles each mask skips, and what that saves in traffic.

    python docs/gallery/mask_tiles.py          # print the numbers of the page
    python docs/gallery/make.py mask_tiles     # draw its picture
"""

import numpy as np

import rawflash as rf
from rawflash.masks import EMPTY, FULL, PARTIAL, Causal, Dense, Lengths, PrefixLM, Segments, SlidingWindow

T, D, TILE = 192, 16, 16
CALL = {"backend": "numpy_tiled", "sram": 4 * 4 * D * TILE}  # four tiles of 16 x 16 float32: Br = Bc = 16
DOCUMENTS = np.repeat(np.arange(5), (40, 64, 20, 48, 20))  # lengths


def blocks_of_a_pattern():
    """Blocks of 16 x 16, chosen at random, and the diagonal; as a boolean array of elements."""
    chosen = np.random.default_rng(0).random((T // TILE, T // TILE)) < 0.2
    return np.kron(chosen | np.eye(T // TILE, dtype=bool), np.ones((TILE, TILE), bool))


def scattered():
    """One element in ten, at random: as sparse, but nowhere empty."""
    return np.random.default_rng(0).random((T, T)) < 0.1


# Name: the mask, and the rows of queries, which are the last of the T positions unless q_offset says otherwise.
EXAMPLES = {
    "no mask": (None, T, None),
    "causal": (Causal(), T, None),
    "causal, last 64 rows": (Causal(), 64, None),
    "causal, q_offset = -64": (Causal(), T, -64),
    "window (40, 0)": (SlidingWindow(40, 0), T, None),
    "window or first 16": (SlidingWindow(40, 0) | Causal() & Dense(np.arange(T) < 16), T, None),
    "prefix of 72": (PrefixLM(72), T, None),
    "documents, causal": (Segments(DOCUMENTS) & Causal(), T, None),
    "lengths 150, 120": (Lengths(150, 120), T, None),
    "array: blocks": (Dense(blocks_of_a_pattern()), T, None),
    "array: one in ten": (Dense(scattered()), T, None),
}


def classes(mask, rows, q_offset):
    """The class of every tile, and the elements that are visible."""
    offset = T - rows if q_offset is None else q_offset
    i, j = np.ogrid[:rows, :T]
    if mask is None:
        return np.full((rows // TILE, T // TILE), FULL), np.ones((rows, T), bool)
    starts = [(i0, j0) for i0 in range(0, rows, TILE) for j0 in range(0, T, TILE)]
    kinds = [mask.tile(0, 0, i0, i0 + TILE, j0, j0 + TILE, offset) for i0, j0 in starts]
    return np.reshape(kinds, (rows // TILE, T // TILE)), mask.visible(0, 0, i, j, offset)


def moved(mask, rows, q_offset):
    """The plan of the call: its tiles, and the elements that it loads and stores."""
    q, k, v = np.zeros((rows, D), np.float32), *np.zeros((2, T, D), np.float32)
    plan = rf.explain(q, k, v, mask=mask, q_offset=q_offset, **CALL)
    assert (plan.tiles.br, plan.tiles.bc) == (TILE, TILE)
    return plan.traffic


def data():
    """Per example: classes of tiles, visible elements, and elements of Q, K, V and O moved with it and without."""
    found = {}
    for name, (mask, rows, q_offset) in EXAMPLES.items():
        kinds, visible = classes(mask, rows, q_offset)
        with_mask, without = moved(mask, rows, q_offset), moved(None, rows, q_offset)
        found[name] = {
            "kinds": kinds, "visible": visible,
            "moved": with_mask.elements - with_mask.load("mask"), "without": without.elements,
        }  # fmt: skip
    return found


def report(data):
    """Print the counts of tiles, the share of elements that are visible, and the share of the traffic."""
    print(f"{'':<24} full  partial  empty   visible  visited   moved")
    for name, x in data.items():
        full, partial, empty = ((x["kinds"] == kind).sum() for kind in (FULL, PARTIAL, EMPTY))
        visited = (full + partial) / x["kinds"].size
        print(
            f"{name:<24} {full:>4} {partial:>8} {empty:>6} {x['visible'].mean():>9.1%} {visited:>8.1%} "
            f"{x['moved'] / x['without']:>7.1%}"
        )


def picture(data, plt):
    """A grid of tiles for each mask: full, partial with its visible elements, empty."""
    figure, panels = plt.subplots(4, 3, figsize=(4.8, 7.4), layout="constrained")
    colours = np.array([[245, 245, 245], [255, 222, 150], [213, 94, 0], [0, 114, 178]], np.uint8)
    for panel, (name, x) in zip(panels.flat, data.items(), strict=False):
        large = np.kron(x["kinds"], np.ones((TILE, TILE), int))
        shade = np.where(large == FULL, 3, large + (large == PARTIAL) * x["visible"])
        rows = len(shade)
        panel.imshow(colours[shade], interpolation="none", extent=(0, T, rows, 0))
        panel.set_ylim(T, 0)
        for line in range(0, T + 1, TILE):
            panel.plot([line, line], [0, rows], color="white", linewidth=0.5)
        for line in range(0, rows + 1, TILE):
            panel.plot([0, T], [line, line], color="white", linewidth=0.5)
        panel.set_title(name.replace(", ", ",\n", 1) if len(name) > 18 else name, fontsize=8.5)
        panel.axis("off")
    legend = panels.flat[len(data)]
    legend.axis("off")
    for n, text in enumerate(("full", "partial, seen", "partial, hidden", "empty: skipped")):
        legend.add_patch(plt.Rectangle((0, 0.8 - 0.22 * n), 0.14, 0.14, fc=colours[3 - n] / 255, ec="#888888"))
        legend.text(0.2, 0.83 - 0.22 * n, text, fontsize=8.5)
    return figure


if __name__ == "__main__":
    report(data())
