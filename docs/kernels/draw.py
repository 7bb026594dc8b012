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
    "P": RED, "dS": RED, "O": VIOLET, "dQ": BLUE, "dK": ORANGE, "dV": GREEN,
}  # fmt: skip
KIB = 1024
REGISTER_FILE = 256 * KIB  # bytes of registers of a multiprocessor, from sm_75 on


class Picture:
    """Shapes and text on white, in units of which a line has WIDTH."""

    def __init__(self, height):
        self.height, self.parts = height, []

    def box(self, x, y, w, h, fill="white", stroke="#444", width=1):
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" stroke="{stroke}" stroke-width="{width:g}"/>'
        )

    def line(self, x, y, to_x, to_y, arrow=False, stroke="#444", width=1.2):
        end = ' marker-end="url(#head)"' if arrow else ""
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{stroke}" stroke-width="{width:g}"{end}/>'
        )

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
    """Tiles as parts of the room that there is; those too narrow for their name stand below it."""
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
    if narrow:
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
        "A number: when. Each is one", "mma.sync of 16 x 8 x 16.", "White: not computed; together", "below 2^-21 of |x y|, about",
        "2^-25 on average.", "The six add up in fresh", "registers; then one ordinary", "addition to the accumulator.",
    )):  # fmt: skip
        picture.text(208, y + 36 + 18 * n, line, 13, fill="#333")
    return picture.svg("A float32 in three bfloat16 parts, and the six products of parts that are computed")


#: Parts of A and of B, in the order of add_products in split.cuh.
ORDER = [(p, order - p) for order in (2, 1, 0) for p in range(order + 1)]


PICTURES = {
    "split-memory": lambda: memory(plan("cupy_raw", "sm_90", "forward", d=128), "float32 forward, d = 128, sm_90"),
    "split-parts": split_parts,
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
