"""New keys and values into caches on a GPU: the launch of append_kv.cu."""

from __future__ import annotations

from array import array

from rawflash.arrays import Source, keep_for_graph
from rawflash.backends.cupy_raw import compile
from rawflash.backends.cupy_raw.launch import MOST_STRIDING, THREADS, VECTOR_BYTES, Uploads, _aligned, blocks_of
from rawflash.problem import Append

WARP = 32  # threads of a warp, which moves a row
ELEMENTS = {2: "unsigned short", 4: "unsigned int", 8: "unsigned long long", VECTOR_BYTES: "uint4"}
INTEGERS = {4: "int", 8: "long long"}
MATRICES = ("k_cache", "v_cache", "k_new", "v_new")
TABLES = ("kv_lengths", "block_table")
# The words of Call in append_kv.cu.
FIELDS = [f"{name}.{part}" for name in MATRICES for part in ("data", "batch", "head", "row", "column")]
FIELDS += [*TABLES, "table_row", "blocks", "page", "B", "heads", "rows", "d", "dv"]


def append_kv(source: Source, x: Append) -> None:
    """Write the new keys and values of one checked call, on CuPy's current device and stream."""
    launcher = x.memo.get("append_kv")
    if launcher is None:
        launcher = x.memo["append_kv"] = Launcher(source, x)
    launcher(source)


class Launcher:
    """The kernel for calls that differ in addresses only."""

    def __init__(self, source: Source, x: Append) -> None:
        matrices = {name: getattr(x, name) for name in MATRICES}
        tables = {name: getattr(x, name) for name in TABLES if getattr(x, name) is not None}
        item = x.k_cache.itemsize
        rows_are_whole = all(m.shape[-1] <= 1 or m.strides[-1] == item for m in matrices.values())
        unit = VECTOR_BYTES if rows_are_whole and _aligned(matrices.values()) else item
        (blocks, heads, page, _), (sequences, _, rows, _) = x.k_cache.shape, x.k_new.shape
        values = dict(
            table_row=1 if x.block_table is None else x.block_table.shape[1], blocks=blocks, page=page,
            B=sequences, heads=heads, rows=rows,
            d=x.k_new.shape[-1] * item // unit, dv=x.v_new.shape[-1] * item // unit,
        )  # fmt: skip
        for name, matrix in matrices.items():
            strides = (*(stride // unit for stride in matrix.strides[:3]), matrix.strides[3] // item)
            for part, stride in zip(("batch", "head", "row", "column"), strides, strict=True):
                values[f"{name}.{part}"] = stride
        self.uploads = Uploads()
        for name, table in tables.items():
            if name not in source.addresses:
                values[name] = self.uploads.add(table)
        self.words = array("q", [values.get(name, 0) for name in FIELDS])
        # Addresses that change from call to call: the argument's name and its word.
        self.moving = [(name, FIELDS.index(name if name in TABLES else f"{name}.data")) for name in source.addresses]
        self.blocks = min(blocks_of(sequences * rows * heads * WARP, THREADS), MOST_STRIDING)
        if self.blocks:
            text = compile.source("append_kv.cu", preamble(unit, {name: t.itemsize for name, t in tables.items()}))
            assert x.device is not None
            self.kernel = compile.load(text, compile.arch_of(x.device)).get_function("append_kv")

    def __call__(self, source: Source) -> None:
        if not self.blocks:
            return
        words = self.words[:]
        for name, word in self.moving:
            words[word] = source.addresses[name]
        self.uploads.used()
        self.kernel(self.blocks, THREADS, words)
        keep_for_graph(source.keep)


def preamble(unit: int, integers: dict[str, int]) -> str:
    """What append_kv.cu takes as given: how many bytes move at a time, and the bytes of an integer of each table."""
    numbers = {"THREADS": THREADS, "WARP": WARP, "CALL_WORDS": len(FIELDS)}
    types = {"elem": ELEMENTS[unit], "length": INTEGERS[integers["kv_lengths"]]}
    types["entry"] = INTEGERS[integers.get("block_table", 8)]
    lines = [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    return "\n".join([*lines, *(f"typedef {of} {name};" for name, of in types.items())]) + "\n"
