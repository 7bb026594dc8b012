"""Masks: pictures, and proof on grids that predicate, tile classes, block spans and programs agree."""

import ctypes
from itertools import product

import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

import rawflash as rf
from rawflash import masks as M

# ---- pictures: x is visible; q_offset is lower-right (Tk - Tq) unless said otherwise -----------------

IDS = [0, 0, 1, 1]
DIAGONAL = np.eye(4, dtype=bool)

PICTURES = {
    "causal 4x4": (M.Causal(), None, ["x...", "xx..", "xxx.", "xxxx"]),
    "causal 4x6": (M.Causal(), None, ["xxx...", "xxxx..", "xxxxx.", "xxxxxx"]),
    "causal 6x4": (M.Causal(), None, ["....", "....", "x...", "xx..", "xxx.", "xxxx"]),
    "causal 4x6, upper left": (M.Causal(), 0, ["x.....", "xx....", "xxx...", "xxxx.."]),
    "causal 4x4, negative offset": (M.Causal(), -2, ["....", "....", "x...", "xx.."]),
    "window (1, 0) 4x4": (M.SlidingWindow(1, 0), None, ["x...", "xx..", ".xx.", "..xx"]),
    "window (1, 1) 4x6": (M.SlidingWindow(1, 1), None, [".xxx..", "..xxx.", "...xxx", "....xx"]),
    "window (0, 2) 6x4": (M.SlidingWindow(0, 2), None, ["x...", "xx..", "xxx.", ".xxx", "..xx", "...x"]),
    "window (None, 1) 4x4": (M.SlidingWindow(None, 1), None, ["xx..", "xxx.", "xxxx", "xxxx"]),
    "window (0, None) 4x6": (M.SlidingWindow(0, None), 0, ["xxxxxx", ".xxxxx", "..xxxx", "...xxx"]),
    "window (None, None) 4x4": (M.SlidingWindow(None, None), None, ["xxxx", "xxxx", "xxxx", "xxxx"]),
    "prefix 2 4x4": (M.Prefix(2), None, ["xx..", "xx..", "xx..", "xx.."]),
    "prefix LM 3 4x4": (M.PrefixLM(3), None, ["xxx.", "xxx.", "xxx.", "xxxx"]),
    "prefix LM 2 4x6, upper left": (M.PrefixLM(2), 0, ["xx....", "xx....", "xxx...", "xxxx.."]),
    "prefix LM 1 6x4": (M.PrefixLM(1), None, ["x...", "x...", "x...", "xx..", "xxx.", "xxxx"]),
    "segments 4x4": (M.Segments(IDS), None, ["xx..", "xx..", "..xx", "..xx"]),
    "segments 4x6": (M.Segments(IDS, [0, 1, 1, 1, 2, 0]), None, ["x....x", "x....x", ".xxx..", ".xxx.."]),
    "segments 6x4, unsorted": (
        M.Segments([3, 0, 0, 1, 9, 1], [0, 1, 0, 1]),
        None,
        ["....", "x.x.", "x.x.", ".x.x", "....", ".x.x"],
    ),
    "dense 4x4": (M.Dense(DIAGONAL), None, ["x...", ".x..", "..x.", "...x"]),
    "dense, keys only 4x6": (M.Dense(np.array([1, 0, 1, 1, 0, 1], bool)), None, ["x.xx.x"] * 4),
    "dense, rows only 6x4": (
        M.Dense(np.array([[1], [0], [0], [1], [1], [0]], bool)),
        None,
        ["xxxx", "....", "....", "xxxx", "xxxx", "...."],
    ),
    "dense, one element 4x4": (M.Dense(np.array(True)), None, ["xxxx"] * 4),
    "lengths (3, 2) 4x4": (M.Lengths(3, 2), None, ["xx..", "xx..", "xx..", "...."]),
    "lengths (2, 5) 4x6": (M.Lengths(2, 5), None, ["xxxxx.", "xxxxx.", "......", "......"]),
    "lengths (5, 0) 6x4": (M.Lengths(5, 0), None, ["...."] * 6),
    "causal & window 4x4": (M.Causal() & M.SlidingWindow(1, 1), None, ["x...", "xx..", ".xx.", "..xx"]),
    "causal & segments 4x4": (M.Causal() & M.Segments(IDS), None, ["x...", "xx..", "..x.", "..xx"]),
    "segments | window 4x4": (
        M.Segments(IDS) | M.SlidingWindow(0, 1),
        None,
        ["xx..", "xxx.", "..xx", "..xx"],
    ),
    "dense | lengths 4x4": (M.Dense(DIAGONAL) | M.Lengths(1, 3), None, ["xxx.", ".x..", "..x.", "...x"]),
    "(a | b) & c 6x4": (
        (M.Prefix(1) | M.Causal()) & M.Segments([0, 0, 0, 1, 1, 1], [0, 0, 1, 1]),
        None,
        ["x...", "x...", "x...", "....", "..x.", "..xx"],
    ),
    "a | (b & c) 4x4": (M.Prefix(1) | (M.Causal() & M.Segments(IDS)), None, ["x...", "xx..", "x.x.", "x.xx"]),
}


@pytest.mark.parametrize("name", PICTURES)
def test_picture(name):
    mask, offset, rows = PICTURES[name]
    Tq, Tk = len(rows), len(rows[0])
    mask.check((1, 1, Tq, Tk))
    i, j = np.ogrid[:Tq, :Tk]
    seen = mask.visible(0, 0, i, j, Tk - Tq if offset is None else offset)
    assert seen.shape == (Tq, Tk) and seen.dtype == bool
    assert ["".join(".x"[int(x)] for x in row) for row in seen] == rows


@pytest.mark.parametrize("name", PICTURES)
def test_picture_through_attention(name):
    """What a call sees is the picture: the values are unit vectors, so out > 0 where a key is visible."""
    mask, offset, rows = PICTURES[name]
    Tq, Tk = len(rows), len(rows[0])
    out = rf.attention(
        np.zeros((Tq, 1)), np.zeros((Tk, 1)), np.eye(Tk), mask=mask, q_offset=offset, backend="numpy_tiled"
    )
    assert ["".join(".x"[int(p > 0)] for p in row) for row in out] == rows


def test_masks_depend_on_batch_and_head():
    """Per-batch data and a Dense array with all four axes are taken at ``b`` and ``h``."""
    array = np.zeros((2, 3, 1, 4), bool)
    array[0, 1, 0, 2] = array[1, 2, 0, 3] = True
    b, h = np.ogrid[:2, :3]
    np.testing.assert_array_equal(M.Dense(array).visible(b, h, 0, 2, 0), array[:, :, 0, 2])
    np.testing.assert_array_equal(M.Dense(array).visible(b, h, 0, 3, 0), array[:, :, 0, 3])
    assert [M.Prefix([1, 3]).visible(b, 0, 0, 2, 0).item() for b in (0, 1)] == [False, True]
    assert [M.Lengths([1, 2], [4, 4]).visible(b, 0, 1, 0, 0).item() for b in (0, 1)] == [False, True]
    assert [M.Lengths([4, 4], [2, 4]).visible(b, 0, 1, 3, 0).item() for b in (0, 1)] == [False, True]
    segments = M.Segments([[0, 1], [0, 0]])
    assert [segments.visible(b, 0, 0, 1, 0).item() for b in (0, 1)] == [False, True]


def test_visible_broadcasts():
    """The predicate takes any broadcast integer arrays and returns their broadcast shape."""
    everything = np.ogrid[:2, :3, :4, :5]
    for mask in (
        M.Causal(),
        M.Dense(np.ones((4, 1), bool)),
        M.Prefix([1, 2]),
        M.Lengths(2, [3, 4]),
        M.Segments([0] * 4, [0] * 5),
        M.Causal() | M.Prefix(1),
    ):
        assert mask.visible(*everything, 0).shape == (2, 3, 4, 5), mask


# ---- the law, again and element by element: what every mask means ------------------------------------


def sees(mask, b, h, i, j, offset):
    """Does row ``i`` see key ``j``? Written from the docstrings, in plain Python; the twin of ``visible``."""
    if isinstance(mask, M.And):
        return sees(mask.left, b, h, i, j, offset) and sees(mask.right, b, h, i, j, offset)
    if isinstance(mask, M.Or):
        return sees(mask.left, b, h, i, j, offset) or sees(mask.right, b, h, i, j, offset)
    if isinstance(mask, M.Band):
        distance = j - i - offset
        return (mask.lower is None or distance >= mask.lower) and (
            mask.upper is None or distance <= mask.upper
        )

    def at(array, position=None):  # the entry of batch b, if there are several
        entry = array[b if len(array) > 1 else 0]
        return entry if position is None else entry[position]

    if isinstance(mask, M.Prefix):
        return j < at(mask.length)
    if isinstance(mask, M.Lengths):
        return i < at(mask.q_lengths) and j < at(mask.kv_lengths)
    if isinstance(mask, M.Segments):
        return at(mask.q_ids, i) == at(mask.kv_ids, j)
    assert isinstance(mask, M.Dense)
    return mask.array[
        tuple(0 if size == 1 else at for size, at in zip(mask.array.shape, (b, h, i, j), strict=True))
    ]


def truth(visibility, shape):
    """The whole of what a call sees, ``(B, Hq, Tq, Tk)``, by `sees`."""
    B, H, Tq, Tk = shape
    seen = np.zeros(shape, bool)
    for b, h in product(range(B), range(H)):
        offset = int(visibility.q_offset[b])
        for i, j in product(
            range(min(Tq, visibility.q_lengths[b])), range(min(Tk, visibility.kv_lengths[b]))
        ):
            seen[b, h, i, j] = sees(visibility.band, b, h, i, j, offset) and (
                visibility.mask is None or sees(visibility.mask, b, h, i, j, offset)
            )
    return seen


def check_blocks(blocks, seen, length, step, tile):
    """Blocks of one strip: aligned, in order, clipped, none empty, and together all that is visible.

    ``seen`` is the strip with the blocked axis last.
    """
    covered = np.zeros(seen.shape[-1], bool)
    previous = -1
    for start, stop, kind in blocks:
        assert start % step == 0 and start > previous, "blocks start on multiples, in order, each once"
        assert stop == min(start + step, length), "the end is clipped to the length"
        assert kind in (M.PARTIAL, M.FULL), "an empty block is left out"
        assert kind == tile(start, stop), "the class is that of the clipped block"
        if kind == M.FULL:
            assert seen[:, start:stop].all(), "a full block is visible everywhere"
        covered[start:stop] = True
        previous = start
    assert not seen[:, ~covered].any(), "every visible element is in a block"


def check_visibility(visibility, shape, br, bc, exact=False):
    """Predicate, tile classes and spans of one call against `truth`. ``exact``: no cautious PARTIAL."""
    B, H, Tq, Tk = shape
    seen = truth(visibility, shape)
    for b, h in product(range(B), range(H)):
        q_length, kv_length = int(visibility.q_lengths[b]), int(visibility.kv_lengths[b])
        np.testing.assert_array_equal(visibility.visible(b, h, 0, Tq, 0, Tk), seen[b, h])
        for i0, j0 in product(range(0, Tq, br), range(0, Tk, bc)):
            i1, j1 = min(i0 + br, Tq), min(j0 + bc, Tk)
            block, kind = seen[b, h, i0:i1, j0:j1], visibility.tile(b, h, i0, i1, j0, j1)
            np.testing.assert_array_equal(visibility.visible(b, h, i0, i1, j0, j1), block)
            assert kind in (M.EMPTY, M.PARTIAL, M.FULL)
            assert kind != M.EMPTY or not block.any(), "EMPTY, but something is visible"
            assert kind != M.FULL or block.all(), "FULL, but something is hidden"
            if exact:
                assert kind == (M.FULL if block.all() else M.PARTIAL if block.any() else M.EMPTY)
        for i0 in range(0, Tq, br):
            i1 = min(i0 + br, Tq)
            inside = min(i1, q_length)  # rows that exist: the class speaks of those
            check_blocks(
                list(visibility.key_blocks(b, h, i0, i1, bc)),
                seen[b, h, i0:inside],
                kv_length,
                bc,
                lambda j0, j1, i0=i0, i1=inside, b=b, h=h: visibility.tile(b, h, i0, i1, j0, j1),
            )
        for j0 in range(0, Tk, bc):
            j1 = min(j0 + bc, Tk)
            inside = min(j1, kv_length)
            check_blocks(
                list(visibility.query_blocks(b, h, j0, j1, br)),
                seen[b, h, :, j0:inside].T,
                q_length,
                br,
                lambda i0, i1, j0=j0, j1=inside, b=b, h=h: visibility.tile(b, h, i0, i1, j0, j1),
            )


def bind(shape, mask=None, band=None, offset=None, q_lengths=None, kv_lengths=None):
    """A `Visibility` as the validator makes it."""
    B, _, Tq, Tk = shape

    def per_batch(value, default):
        return np.broadcast_to(np.asarray(default if value is None else value, np.int64), (B,))

    q_lengths, kv_lengths = per_batch(q_lengths, Tq), per_batch(kv_lengths, Tk)
    return M.Visibility(
        M.Band(None, None) if band is None else band,
        mask,
        kv_lengths - q_lengths if offset is None else per_batch(offset, 0),
        q_lengths,
        kv_lengths,
    )


BANDS = [
    M.Band(None, None),
    M.Causal(),
    M.SlidingWindow(0, 0),
    M.SlidingWindow(1, 0),
    M.SlidingWindow(2, 1),
    M.SlidingWindow(None, 2),
    M.SlidingWindow(1, None),
    M.Causal() & M.SlidingWindow(1, 3),
]
TILES = [(1, 1), (2, 3), (3, 2), (4, 4), (1, 5), (5, 1), (7, 8)]


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_grid_of_bands(band):
    """One band inside the lengths: the tile classes are exact, for every small size, offset and tile."""
    for Tq, Tk in product((0, 1, 3, 4, 6), repeat=2):
        for offset, (br, bc) in product((None, 0, -2, 1, -7, 9), TILES[:5]):
            check_visibility(
                bind((1, 1, Tq, Tk), band=band, offset=offset), (1, 1, Tq, Tk), br, bc, exact=True
            )


@pytest.mark.parametrize("band", BANDS[:5], ids=str)
def test_grid_of_lengths(band):
    """Lengths cut rows and keys; a tile that reaches into padding is never FULL."""
    for q_length, kv_length, (br, bc), offset in product((0, 1, 3, 5), (0, 2, 4, 6), TILES, (None, -1)):
        visibility = bind((1, 1, 5, 6), band=band, offset=offset, q_lengths=q_length, kv_lengths=kv_length)
        check_visibility(visibility, (1, 1, 5, 6), br, bc)


@pytest.mark.parametrize("name", PICTURES)
def test_grid_of_masks(name):
    """Every mask of the pictures, alone and under a causal window, for all tile sizes and offsets."""
    mask, offset, rows = PICTURES[name]
    shape = (1, 1, len(rows), len(rows[0]))
    for band, (br, bc) in product((None, M.SlidingWindow(2, 0)), TILES):
        check_visibility(bind(shape, mask, band, offset), shape, br, bc)
        check_visibility(bind(shape, mask, band, offset, q_lengths=3, kv_lengths=3), shape, br, bc)


SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(0, 9), st.integers(0, 9))


@st.composite
def bound_masks(draw):
    """A random composed mask, its call's shape, a `Visibility` and a tile size."""
    shape = B, _, Tq, Tk = draw(SHAPES)
    mask = draw(strategies.masks(*shape))
    per_batch = [
        st.lists(st.integers(low, high), min_size=B, max_size=B)
        for low, high in ((-10, 10), (0, Tq), (0, Tk))
    ]
    offset, q_lengths, kv_lengths = (draw(st.none() | entries) for entries in per_batch)
    band = draw(st.sampled_from(BANDS))
    return mask, shape, bind(shape, mask, band, offset, q_lengths, kv_lengths), draw(strategies.tile_sizes(8))


@given(bound_masks())
def test_random_masks(drawn):
    """Predicate, tile classes and spans agree for any composition, any lengths and offsets."""
    mask, shape, visibility, (br, bc) = drawn
    mask.check(shape)
    check_visibility(visibility, shape, br, bc)


def test_single_masks_know_their_tiles():
    """The promise of skipped work: masks that are not compositions say EMPTY and FULL where they can."""
    apart = M.Segments([0] * 4 + [5] * 4)
    assert [apart.tile(0, 0, i, i + 4, j, j + 4, 0) for i, j in ((0, 0), (0, 4), (4, 0), (4, 4))] == [
        M.FULL,
        M.EMPTY,
        M.EMPTY,
        M.FULL,
    ]
    assert apart.tile(0, 0, 2, 6, 0, 4, 0) == M.PARTIAL
    assert [M.Prefix(4).tile(0, 0, 0, 2, j, j + 2, 0) for j in (2, 3, 4)] == [M.FULL, M.PARTIAL, M.EMPTY]
    assert [M.Lengths(4, 4).tile(0, 0, i, i + 2, 0, 4, 0) for i in (2, 3, 4)] == [M.FULL, M.PARTIAL, M.EMPTY]
    dense = M.Dense(np.kron(np.array([[1, 0], [0, 1]], bool), np.ones((2, 2), bool)))
    assert [dense.tile(0, 0, i, i + 2, 0, 2, 0) for i in (0, 1, 2)] == [M.FULL, M.PARTIAL, M.EMPTY]
    assert (M.Causal() & M.Prefix(2)).tile(0, 0, 0, 2, 4, 6, 0) == M.EMPTY
    assert (M.Causal() | M.Prefix(2)).tile(0, 0, 0, 2, 0, 2, 0) == M.FULL


# ---- programs ----------------------------------------------------------------------------------------


def interpret(program, b, h, i, j, offset):
    """Run a mask program for one element the way a compiled backend does: integers and addresses only."""
    stack = []
    for step in program:
        x, arrays = step.operands, step.arrays
        if step.code == M.OP_BAND:
            stack.append(x[0] <= j - (i + offset) <= x[1])
        elif step.code == M.OP_PREFIX:
            stack.append(j < arrays[0][b % x[0]])
        elif step.code == M.OP_LENGTHS:
            stack.append(i < arrays[0][b % x[0]] and j < arrays[1][b % x[1]])
        elif step.code == M.OP_SEGMENTS:
            stack.append(arrays[0].ravel()[b * x[0] + i] == arrays[1].ravel()[b * x[1] + j])
        elif step.code == M.OP_DENSE:
            address = arrays[0].ctypes.data + b * x[0] + h * x[1] + i * x[2] + j * x[3]  # strides in bytes
            stack.append(ctypes.c_uint8.from_address(address).value != 0)
        else:
            right, left = stack.pop(), stack.pop()
            stack.append(left and right if step.code == M.OP_AND else left or right)
    (result,) = stack
    return bool(result)


def check_program(mask, shape, offsets):
    program = mask.program()
    for step in program:
        assert all(isinstance(x, int) and -(2**63) <= x < 2**63 for x in step.operands)
        assert all(a.dtype in (np.int64, np.bool_) for a in step.arrays)
    for b, h, i, j in np.ndindex(shape):
        want = sees(mask, b, h, i, j, offsets[b])
        assert interpret(program, b, h, i, j, offsets[b]) == bool(want)


@given(SHAPES, st.data())
def test_program_equals_predicate(shape, data):
    mask = data.draw(strategies.masks(*shape))
    offsets = data.draw(st.lists(st.integers(-9, 9), min_size=shape[0], max_size=shape[0]))
    check_program(mask, shape, offsets)


@pytest.mark.parametrize("name", PICTURES)
def test_program_of_picture(name):
    mask, offset, rows = PICTURES[name]
    Tq, Tk = len(rows), len(rows[0])
    check_program(mask, (1, 1, Tq, Tk), [Tk - Tq if offset is None else offset])


def test_program_of_strided_dense():
    """A Dense mask over a view keeps the view's strides, negative ones too."""
    home = np.random.default_rng(0).random((2, 3, 9, 14)) < 0.5
    check_program(M.Dense(home[:, ::2, ::-2, 1::3]), (2, 2, 5, 5), [0, 0])
    check_program(M.Dense(home[0].T[:, :, :1]), (1, 14, 9, 1), [0])


@given(SHAPES, st.data())
def test_programs_stay_inside_64_bits(shape, data):
    """However wide a window is, its program fits the integers of compiled code."""
    side = st.none() | st.integers(0, 2**70)
    mask = M.SlidingWindow(data.draw(side), data.draw(side))
    check_program(mask, shape, [0] * shape[0])


def test_kind_tells_structure_not_data():
    """``kind`` is part of the key of compiled kernels: it tells structure, not data."""

    def make(n, ids):
        return (M.Prefix(n) | M.Causal()) & M.Segments(ids)

    assert make(1, [0, 1]).kind == make(2, [5, 5]).kind == "((Prefix | Causal) & Segments)"
    assert (M.Prefix(1) & M.Causal() | M.Segments([0])).kind != make(1, [0]).kind
    assert M.Dense(np.ones((1, 1), bool)).kind == "Dense"


# ---- bad constructions -------------------------------------------------------------------------------

BAD = {
    "negative left": (lambda: M.SlidingWindow(-1, 0), "left"),
    "negative right": (lambda: M.SlidingWindow(0, -3), "right"),
    "float side": (lambda: M.SlidingWindow(1.5, 0), "left"),
    "bool side": (lambda: M.SlidingWindow(0, True), "right"),
    "string side": (lambda: M.SlidingWindow("all", 0), "left"),
    "dense of ints": (lambda: M.Dense(np.ones((2, 2), int)), "mask"),
    "dense of floats": (lambda: M.Dense(np.zeros((2, 2))), "mask"),
    "dense with five axes": (lambda: M.Dense(np.ones((1, 1, 1, 2, 2), bool)), "mask"),
    "float prefix": (lambda: M.Prefix(2.0), "prefix"),
    "bool prefix": (lambda: M.Prefix(True), "prefix"),
    "float prefix LM": (lambda: M.PrefixLM([1.5]), "prefix"),
    "float ids": (lambda: M.Segments(np.zeros(4)), "q_ids"),
    "float key ids": (lambda: M.Segments(np.zeros(4, int), np.zeros(4)), "kv_ids"),
    "ids with three axes": (lambda: M.Segments(np.zeros((1, 1, 4), int)), "q_ids"),
    "float lengths": (lambda: M.Lengths(1.0, 2), "q_lengths"),
    "float key lengths": (lambda: M.Lengths(1, [2.0]), "kv_lengths"),
    "ragged ids": (lambda: M.Segments([[0], [0, 1]]), "q_ids"),
    "and with an array": (lambda: M.Causal() & np.ones((2, 2), bool), "ndarray"),
    "and with an array, not a band": (lambda: M.Prefix(1) & np.ones((2, 2), bool), "ndarray"),
    "or with a bool": (lambda: M.Causal() | True, "bool"),
    "or with None": (lambda: M.Prefix(1) | None, "NoneType"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_construction(name):
    build, names = BAD[name]
    with pytest.raises(rf.ProblemError, match=names) as caught:
        build()
    assert "expected" in str(caught.value) or "masks combine with masks" in str(caught.value)


MISFITS = {
    "dense rows": (M.Dense(np.ones((3, 6), bool)), "mask"),
    "dense heads": (M.Dense(np.ones((1, 3, 1, 1), bool)), "mask"),
    "dense batch": (M.Dense(np.ones((3, 1, 1, 1), bool)), "mask"),
    "dense, no keys": (M.Dense(np.ones((4, 0), bool)), "mask"),
    "prefix of other batch": (M.Prefix([1, 2, 3]), "Prefix"),
    "prefix with two axes": (M.Prefix([[1, 2]]), "Prefix"),
    "lengths of other batch": (M.Lengths([1, 2, 3], 1), "q_lengths"),
    "key lengths of other batch": (M.Lengths(1, [1, 2, 3]), "kv_lengths"),
    "ids of other length": (M.Segments([0] * 5, [0] * 6), "q_ids"),
    "key ids left out, Tk != Tq": (M.Segments([0] * 4), "kv_ids"),
    "ids of other batch": (M.Segments(np.zeros((3, 4), int), [0] * 6), "q_ids"),
}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: m,
        lambda m: M.Causal() & m,
        lambda m: m & M.Causal(),
        lambda m: M.Prefix(1) | m,
        lambda m: m | M.Prefix(1),
    ],
    ids=["alone", "right of &", "left of &", "right of |", "left of |"],
)
@pytest.mark.parametrize("name", MISFITS)
def test_mask_that_does_not_fit(name, wrap):
    """A mask is checked against the call's shape (2, 2, 4, 6) wherever it sits in a composition."""
    mask, names = MISFITS[name]
    with pytest.raises(rf.ProblemError, match=rf"(?s)mask.*{names}|{names}.*expected") as caught:
        rf.attention(np.zeros((2, 2, 4, 1)), np.zeros((2, 2, 6, 1)), np.zeros((2, 2, 6, 1)), mask=wrap(mask))
    assert "expected" in str(caught.value)
