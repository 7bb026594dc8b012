"""Draw the pictures of these pages, or check that they are what this script draws.

    python docs/kernels/draw.py [--check]

Sizes of tiles come from the plans (rawflash.tiling), so a picture is of the code beside it.
"""

import sys
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from kernel_figures import plan  # noqa: E402

WIDTH = 480  # of all pictures: shown at 350, the smallest text has 9.5 pixels
FONT = 'font-family="DejaVu Sans, Helvetica, Arial, sans-serif"'
BLUE, ORANGE, GREEN, RED, GREY, VIOLET = "#bcd7ee", "#fbd7ae", "#c5e5c2", "#f3bcbc", "#e3e3e3", "#d9cdec"
COLOURS = {
    "Q": BLUE, "Q or K": BLUE, "K": ORANGE, "K or S": ORANGE, "K or V": ORANGE, "V": GREEN, "dO": VIOLET, "S": RED,
    "P": RED, "S, P": RED, "dP": RED, "dS": RED, "O": VIOLET, "dQ": BLUE, "dK": ORANGE, "dV": GREEN,
}  # fmt: skip
KIB = 1024
REGISTER_FILE = 256 * KIB  # bytes of registers of a multiprocessor, from sm_75 on


class Picture:
    """Shapes and text on white, in units of which a line has WIDTH."""

    def __init__(self, height):
        self.height, self.parts = height, []

    def box(self, x, y, w, h, fill="white", stroke="#444", width=1):
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" stroke="{stroke}" '
            f'stroke-width="{width:g}"/>'
        )

    def line(self, x, y, to_x, to_y, arrow=False, stroke="#444", width=1.2):
        end = ' marker-end="url(#head)"' if arrow else ""
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{stroke}" stroke-width="{width:g}"{end}/>'
        )

    def shade(self, *points):
        corners = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polygon points="{corners}" fill="#efefef"/>')

    def text(self, x, y, text, size=14, anchor="start", weight="normal", fill="#111"):
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" font-weight="{weight}" '
            f'fill="{fill}">{escape(text)}</text>'
        )

    def svg(self, title):
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#444"/></marker></defs>'
        )
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:g}" width="{WIDTH}" '
            f'height="{self.height:g}" {FONT} role="img">',
            f"<title>{escape(title)}</title>", head,
            f'<rect width="{WIDTH}" height="{self.height:g}" fill="white"/>', *self.parts, "</svg>", "",
        ])  # fmt: skip


def bar(picture, y, title, tiles, room):
    """Tiles as parts of the room that there is; names of narrow ones stand behind all, if they can."""
    left, whole = 10, WIDTH - 20
    total = sum(tile.bytes for tile in tiles)
    picture.text(left, y, f"{title}: {total / KIB:g} of {room / KIB:g} KiB", 13, weight="bold")
    picture.box(left, y + 7, whole, 30, "#f7f7f7")
    x, narrow = left, []
    for tile in tiles:
        w = whole * tile.bytes / room
        picture.box(x, y + 7, w, 30, COLOURS.get(tile.name, GREY))
        if w > 9 * len(tile.name) + 4:
            picture.text(x + w / 2, y + 27, tile.name, 14, "middle")
        else:
            narrow.append(tile.name)
        x += w
    if narrow and x < left + 0.9 * whole:
        picture.text(x + 4, y + 27, ", ".join(narrow), 13)


def memory(tiles, of):
    """Shared memory and accumulators of a block of threads."""
    picture = Picture(118)
    on_chip = [tile for tile in tiles.resident if tile.where == "on-chip"]
    registers = [tile for tile in tiles.resident if tile.where == "registers"]
    bar(picture, 18, f"Shared memory, {tiles.br} rows, {tiles.bc} keys", on_chip, tiles.on_chip_bytes)
    bar(picture, 74, "Accumulators in registers", registers, REGISTER_FILE)
    return picture.svg(f"What a block of threads keeps on chip: {of}")


def split_parts():
    """A float32 as three bfloat16, and which of nine products are computed."""
    picture = Picture(410)
    picture.text(10, 20, "A float32 has 24 bits of significand; a bfloat16 has 8.", 14, weight="bold")
    cell, top = 18, 48
    picture.text(10, top + 14, "x")
    for bit in range(24):
        picture.box(38 + bit * cell, top, cell, 20, (BLUE, ORANGE, GREEN)[bit // 8])
    rows = (
        ("x0", 0, BLUE, "cut off (toward zero), so that none overflows"),
        ("x1", 8, ORANGE, "what is left, rounded to 8 bits"),
        ("x2", 16, GREEN, "what is left then: exact"),
    )
    for n, (name, first, colour, what) in enumerate(rows):
        y = top + 38 + 42 * n
        picture.text(10, y + 14, name)
        for bit in range(8):
            picture.box(38 + (first + bit) * cell, y, cell, 20, colour)
        picture.text(38, y + 34, what, 13, fill="#333")
    y = 232
    picture.text(10, y, "x y: six of nine products, the smallest first", 14, weight="bold")
    size = 44
    for n in range(3):
        picture.text(72 + n * size, y + 26, f"y{n}", 14, "middle")
        picture.text(24, y + 62 + n * size, f"x{n}", 14)
        for m in range(3):
            on = n + m <= 2
            picture.box(50 + m * size, y + 34 + n * size, size, size, (RED if on else "white"))
            if on:
                picture.text(72 + m * size, y + 62 + n * size, str(ORDER.index((n, m)) + 1), 15, "middle")
    for n, line in enumerate((
        "A number: when. Each is one", "mma.sync of 16 x 8 x 16.", "White: not computed; together",
        "below 2^-21 of |x y|, about", "2^-25 on average.", "The six add up in fresh",
        "registers; then one ordinary", "addition to the accumulator.",
    )):  # fmt: skip
        picture.text(208, y + 36 + 18 * n, line, 13, fill="#333")
    return picture.svg("A float32 in three bfloat16 parts, and the six products of parts that are computed")


#: Parts of A and of B, in the order of add_products in split.cuh.
ORDER = [(p, order - p) for order in (2, 1, 0) for p in range(order + 1)]


def simt_threads():
    """Which numbers of S and of O one thread of 16 x 16 has."""
    picture, tiles = Picture(330), plan("numba_cuda", "sm_90", "forward", d=64, dtype="bfloat16", softcap=30.0)
    y, x, side, unit = 5, 9, 16, 2.4
    picture.text(10, 20, f"Thread (y, x) = ({y}, {x}) of 16 x 16: numbers of S and of O", 14, weight="bold")

    def grid(left, rows, columns, owned, name):
        top = 58
        picture.text(left, top - 10, name, 13)
        picture.box(left, top, columns * unit, rows * unit, "#f7f7f7")
        for n in range(0, rows, side):
            picture.line(left, top + n * unit, left + columns * unit, top + n * unit, stroke="#bbb", width=0.7)
        for n in range(0, columns, side):
            picture.line(left + n * unit, top, left + n * unit, top + rows * unit, stroke="#bbb", width=0.7)
        for row, column, wide in owned:
            picture.box(left + column * unit, top + row * unit, wide * unit + 1, unit + 1.5, "#c0392b", "#c0392b", 0.5)

    rows = range(y, tiles.br, side)
    grid(10, tiles.br, tiles.bc, [(r, c, 1) for r in rows for c in range(x, tiles.bc, side)],
         f"S: {tiles.br} rows, {tiles.bc} keys")  # fmt: skip
    grid(240, tiles.br, 64, [(r, 4 * x, 4) for r in rows], f"O: {tiles.br} rows, d = 64")
    for n, line in enumerate((
        "S: every 16th row and key, so what neighbouring threads read",
        "at once lies in neighbouring rows of K, in different banks.",
    )):  # fmt: skip
        picture.text(10, 306 + 17 * n, line, 13, fill="#333")
    return picture.svg("The numbers of S and of O that one thread of a simt kernel computes")


def mma_lanes():
    """The lanes of a warp that hold 16 x 16 scores, as sums and as a factor."""
    picture, cell, left, top, mine = Picture(488), 27, 34, 92, 6
    g, t = mine // 4, mine % 4
    picture.text(10, 20, "16 x 16 scores in the registers of a warp: which lane", 14, weight="bold")
    picture.text(left + 4 * cell, 48, "one product", 13, "middle")
    picture.text(left + 12 * cell, 48, "the next one", 13, "middle")
    for n in range(16):
        picture.text(left + (n + 0.5) * cell, top - 8, str(n), 12, "middle", fill="#555")
        picture.text(left - 6, top + (n + 0.65) * cell * 0.78, str(n), 12, "end", fill="#555")
    picture.text(left - 22, top - 24, "row", 12, fill="#555")
    picture.text(left + 16 * cell, top - 24, "key", 12, "end", fill="#555")
    high = cell * 0.78
    for row in range(16):
        for column in range(16):
            lane = row % 8 * 4 + column % 8 // 2
            x, y = left + column * cell, top + row * high
            picture.box(x, y, cell, high, "#f3bcbc" if lane == mine else ("white", "#eef3f8")[column // 8], "#999", 0.7)
            weight = "bold" if lane == mine else "normal"
            picture.text(x + cell / 2, y + high - 6, str(lane), 12, "middle", weight)
    picture.line(left + 8 * cell, top - 4, left + 8 * cell, top + 16 * high + 4, width=2)
    for n, line in enumerate((
        f"Lane {mine} = (g, t) = ({g}, {t}) has rows {g} and {g + 8}, keys {2 * t}, {2 * t + 1}, "
        f"{2 * t + 8}, {2 * t + 9}.",
        "As the factor P of P V the same lane needs the same numbers:",
        "eight float32 become four registers of pairs, and nothing moves.",
    )):  # fmt: skip
        picture.text(10, 449 + 17 * n, line, 13, fill="#333")
    return picture.svg("Which lane of a warp holds which of 16 x 16 scores, as sums and as a factor")


def few_rows_turns():
    """How keys go round the parts and the warps, and how what they sum up comes together."""
    picture = Picture(520)
    colours = (BLUE, ORANGE, GREEN, VIOLET)
    left, whole = 10, WIDTH - 20
    picture.text(left, 20, "Keys: turns of 128 go round the parts (here 4)", 14, weight="bold")
    w = whole / 12
    for n in range(12):
        picture.box(left + n * w, 30, w, 30, colours[n % 4])
        picture.text(left + (n + 0.5) * w, 50, str(n % 4), 14, "middle")
    picture.shade((left + 5 * w, 60), (left + 6 * w, 60), (left + whole, 102), (left, 102))
    picture.text(left, 94, "A turn: 16 keys for each of the 8 warps of a block", 14, weight="bold")
    w = whole / 8
    for n in range(8):
        picture.box(left + n * w, 102, w, 30, ORANGE)
        picture.text(left + (n + 0.5) * w, 122, f"warp {n}", 13, "middle")
    picture.shade((left + 2 * w, 132), (left + 3 * w, 132), (left + whole * 0.66, 184), (left, 184))
    picture.text(left, 174, "A warp's own queue of units", 14, weight="bold")
    w = whole * 0.66 / 3
    for n, (name, colour) in enumerate((("V of step 0", GREEN), ("K of step 1", ORANGE), ("V of step 1", GREEN))):
        picture.box(left + n * w, 184, w, 32, colour)
        picture.text(left + (n + 0.5) * w, 205, name, 13, "middle")
    picture.text(left + whole * 0.66 + 8, 197, "16 rows each;", 13)
    picture.text(left + whole * 0.66 + 8, 214, "three at d = 128", 13)
    for n, line in enumerate(("read now", "on its way", "on its way")):
        picture.text(left + (n + 0.5) * w, 233, line, 13, "middle", fill="#333")
    picture.text(left, 268, "The end", 14, weight="bold")
    for part in range(4):
        y = 282 + 42 * part
        picture.box(left, y, 116, 30, colours[part])
        picture.text(left + 58, y + 20, "8 x (O, m, l)", 13, "middle")
        picture.line(left + 116, y + 15, left + 190, y + 15, arrow=True)
        picture.box(left + 192, y, 92, 30, colours[part])
        picture.text(left + 238, y + 20, "O, m, l", 13, "middle")
        picture.line(left + 284, y + 15, left + 352, 282 + 63 + 15, arrow=True)
    picture.box(left + 354, 282 + 58, 104, 40, "white", width=1.8)
    picture.text(left + 406, 282 + 83, "O, lse", 14, "middle")
    for n, line in enumerate(("warps of a block, through", "shared memory, once")):
        picture.text(left, 468 + 17 * n, line, 13, fill="#333")
    for n, line in enumerate(("parts, through device memory,", "by the block that ends last")):
        picture.text(left + 238, 468 + 17 * n, line, 13, fill="#333")
    picture.text(left, 510, "Both merge in a fixed order: the same bits each time.", 13, fill="#333")
    return picture.svg("How keys go round parts and warps, and how their sums are merged")


def sm90_turns():
    """What two warpgroups and the copies have under way, over the time of a few steps."""
    picture, left, unit, high = Picture(358), 10, 57, 26
    dark, whole = "#c0392b", WIDTH - 20
    picture.text(left, 20, "Three warpgroups of a block, over time", 14, weight="bold")

    def lane(y, title):
        picture.text(left, y - 6, title, 13)
        picture.box(left, y, whole, high, "#f7f7f7", "#bbb")

    def bars(y, start, each, names, colour):
        for n, name in enumerate(names):
            x = left + (start + n * each[0]) * unit
            w = min(each[1] * unit, left + whole - x)
            if w > 0:
                picture.box(x, y, w, high, colour)
                if w > 7 * len(name):
                    picture.text(x + w / 2, y + 18, name, 12, "middle")

    for group, (y, start) in enumerate(((94, 0.0), (208, 1.0))):
        lane(y, f"warpgroup {group + 1}, 64 rows: products, and below exponentials")
        picture.box(left, y + high + 4, whole, high, "#f7f7f7", "#bbb")
        for step in range(4):
            at = start + 2 * step
            bars(y, at, (0, 0.5), [f"S{step}"], BLUE)
            bars(y, at + 0.5, (0, 1.1), [f"P{step - 1} V{step - 1}"] if step else [], GREEN)
            bars(y + high + 4, at + 0.55, (0, 1.0), [f"exp S{step}"], RED)
    for n in range(1, 7):
        x, above, below = left + n * unit, 94 + 2 * high + 6, 208 - 20
        picture.line(x, *((above, x, below) if n % 2 else (below, x, above)), arrow=True, stroke=dark)
    picture.text(left + unit + 7, 171, "turns", 12, fill=dark)
    lane(320, "the warpgroup that copies: K and V, one or two blocks ahead")
    bars(320, 0.1, (2, 0.8), ["K1", "K2", "K3", "K4"], ORANGE)
    bars(320, 1.0, (2, 0.8), ["V0", "V1", "V2", "V3"], GREEN)
    picture.text(left, 46, "Not to scale. Products of one block run beside exponentials of the", 12.5, fill="#333")
    picture.text(left, 63, "next one, and beside those of the other warpgroup.", 12.5, fill="#333")
    return picture.svg("Two warpgroups and the copies: what is under way at one time")


def cpu_panel():
    """The two products of a forward panel on a CPU."""
    picture = Picture(356)
    picture.text(10, 20, "A panel: 16 queries on the lanes of two vectors (AVX2)", 14, weight="bold")

    def tile(x, y, w, h, name, fill, across="", down=""):
        picture.box(x, y, w, h, fill)
        picture.text(x + w / 2, y + h / 2 + 5, name, 15, "middle")
        picture.text(x + w / 2, y - 5, across, 12, "middle", fill="#555")
        picture.text(x - 5, y + h / 2 + 4, down, 12, "end", fill="#555")

    tile(32, 56, 92, 108, "K", ORANGE, "d", "Bc")
    picture.text(132, 116, "x", 16)
    tile(172, 60, 60, 100, "Q^T", BLUE, "16", "d")
    picture.text(242, 116, "=", 16)
    tile(286, 56, 60, 108, "S^T", RED, "16", "Bc")
    for n, line in enumerate(("Bc = 64: 4 KiB,", "which stay in", "the L1 cache; P^T", "overwrites S^T")):
        picture.text(354, 84 + 17 * n, line, 12, fill="#333")
    tile(32, 206, 100, 100, "V^T", GREEN, "Bc", "dv")
    picture.text(138, 260, "x", 16)
    tile(178, 202, 60, 108, "P^T", RED, "16", "Bc")
    picture.text(246, 260, "=", 16)
    tile(286, 206, 60, 100, "+ O^T", VIOLET, "16", "dv")
    picture.box(286, 206, 60, 14, "#a98fd0")
    for n, line in enumerate(("dark: a register", "tile, 6 rows of", "two vectors")):
        picture.text(354, 218 + 17 * n, line, 12, fill="#333")
    for n, line in enumerate((
        "A row of queries is a lane: its maximum and sum need no reduction",
        "across a vector. K and V are on chip once for all panels of a block.",
    )):  # fmt: skip
        picture.text(10, 332 + 17 * n, line, 12.5, fill="#333")
    return picture.svg("The two products of a panel of the forward pass on a CPU")


PICTURES = {
    # with an option that keeps the call with the kernels which split what they read
    "split-memory": lambda: memory(
        plan("cupy_raw", "sm_90", "forward", d=128, softcap=20.0), "float32 forward, d = 128"
    ),
    "split-parts": split_parts,
    "simt-memory": lambda: memory(
        plan("numba_cuda", "sm_90", "forward", d=128, dtype="bfloat16", softcap=30.0),
        "bfloat16 forward by multiply-adds, d = 128",
    ),
    "simt-threads": simt_threads,
    "double-memory": lambda: memory(
        plan("cupy_raw", "sm_90", "forward", d=128, dtype="float64"), "float64 forward, d = 128"
    ),
    "mma-memory": lambda: memory(
        plan("numba_cuda", "sm_90", "backward", d=128, dtype="bfloat16"), "bfloat16 backward, d = 128"
    ),
    "mma-lanes": mma_lanes,
    "few_rows-turns": few_rows_turns,
    "sm90-memory": lambda: memory(
        plan("cupy_raw", "sm_90", "forward", d=128, dtype="bfloat16"), "bfloat16 forward on Hopper, d = 128"
    ),
    "sm90-turns": sm90_turns,
    "cpu-panel": cpu_panel,
}


def main(check):
    stale = []
    for name, draw in PICTURES.items():
        path, svg = HERE / f"{name}.svg", draw()
        if check and (not path.exists() or path.read_text() != svg):
            stale.append(name)
        elif not check:
            path.write_text(svg)
    if stale:
        print("draw them again (docs/kernels/draw.py):", *stale)
    return len(stale) > 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
