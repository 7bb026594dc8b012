"""The CUDA C++ text of masks says what their Python says, proved on grids by a host compiler: no GPU.

Every text is compiled together in one library, each in a namespace of its own. What CUDA adds to C++ is
defined first: a block is its threads run one after the other, see `BLOCK`.
"""

import ctypes
import random
import shutil
import subprocess
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_masks import BANDS, PICTURES

import rawflash as rf
from rawflash import masks as M

FOLDER = Path(M.__file__).parent / "backends" / "cupy_raw" / "cuda"
HEADER = (FOLDER / "visibility.cuh").read_text()

# A block of threads without threads. One that meets a barrier or an exchange leaves its argument there, and
# what it does from there on does not count. When all have, what the meeting gives is known, and all start
# again from the beginning, to get one meeting farther. Threads that meet elsewhere, or not at all while
# others wait, would hang: -1. Threads that end with different classes: -2.
BLOCK = """
#include <cstddef>
#include <vector>

#define __device__
#define __forceinline__ inline

static struct { unsigned x; } threadIdx, blockDim;

template <class T> static T __ldg(const T* address) { return *address; }

struct Meeting { int what; bool known; bool any; std::vector<long long> values; };
static std::vector<Meeting> meetings;
static std::size_t met;
static bool waits, hangs;

static const Meeting& meet(int what, long long value)
{
    if (waits) return meetings.back();  // any numbers will do
    if (met == meetings.size()) meetings.push_back({what, false, false, std::vector<long long>(blockDim.x)});
    Meeting& meeting = meetings[met++];
    hangs |= meeting.what != what;
    if (!meeting.known) {
        meeting.values[threadIdx.x] = value;
        meeting.any |= value != 0;
        waits = true;
    }
    return meeting;
}

static int __syncthreads_or(int predicate)
{
    return meet(0, predicate).any;
}

static long long __shfl_xor_sync(unsigned lanes, long long value, int step)
{
    hangs |= lanes != 0xffffffffu || step < 1 || step > 31 || blockDim.x % 32;
    return hangs ? 0 : meet(step, value).values[threadIdx.x ^ unsigned(step)];
}

template <class Tile> static int block(Tile tile)
{
    meetings.clear();
    for (;;) {
        std::vector<int> classes;
        hangs = false;
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) {
            met = 0;
            waits = false;
            const int kind = tile();
            if (!waits) classes.push_back(kind);
        }
        hangs |= !classes.empty() && classes.size() < blockDim.x;
        if (hangs) return -1;
        if (classes.empty()) {
            meetings.back().known = true;
            continue;
        }
        for (int kind : classes) if (kind != classes[0]) return -2;
        return classes[0];
    }
}
"""

# One header and one text, and the two functions that a test calls.
ENTRY = """
#undef RAWFLASH_VISIBILITY_CUH
namespace entry_{n} {{
{header}
{text}
}}

extern "C" void visible_{n}(const long long* w, const long long* shape, long long offset, unsigned char* seen)
{{
    for (long long b = 0; b < shape[0]; ++b)
        for (long long h = 0; h < shape[1]; ++h)
            for (long long i = 0; i < shape[2]; ++i)
                for (long long j = 0; j < shape[3]; ++j)
                    *seen++ = entry_{n}::mask_visible(w, b, h, i, j, offset);
}}

extern "C" void tiles_{n}(const long long* w, long long b, long long h, long long count, const long long* r,
                          long long offset, int threads, int* classes)
{{
    blockDim.x = threads;
    for (long long n = 0; n < count; ++n, r += 4)
        classes[n] = block([&] {{ return entry_{n}::mask_tile(w, b, h, r[0], r[1], r[2], r[3], offset); }});
}}
"""

# ---- the masks -----------------------------------------------------------------------------------------

FAR = 2**61  # of an offset: problem.FARTHEST
OFFSETS = (0, 1, -2, -7, 9, FAR, -FAR)
SHAPE = B, H, TQ, TK = 2, 2, 4, 5


def random_masks():
    """Masks whose data depends on batch and head, broadcast along every axis, and compositions."""
    rng = np.random.default_rng(20220527)

    def seen(*shape, p=0.5):
        return rng.random(shape) < p

    def ids(*shape):
        return rng.integers(-1, 2, shape) * 2**40

    yield from (("prefix of each", M.Prefix([3, 9])), ("prefix LM of each", M.PrefixLM([4, 1])))
    for q, kv in product((2, [3, 9]), (3, [5, 0])):
        yield f"lengths {q} {kv}", M.Lengths(q, kv)
    for q, kv in product(((TQ,), (1, TQ), (B, TQ)), ((TK,), (B, TK))):
        yield f"segments {q} {kv}", M.Segments(ids(*q), ids(*kv))
    yield "segments, sorted", M.Segments(np.sort(ids(B, TQ)), np.sort(ids(B, TK)))
    yield "segments, one row of each batch", M.Segments(ids(B, 1).repeat(TQ, 1), ids(TK))
    for broadcast in product((False, True), repeat=4):
        shape = [1 if one else size for one, size in zip(broadcast, SHAPE, strict=True)]
        yield f"dense {shape}", M.Dense(seen(*shape))
    for p in (0.1, 0.9):
        yield f"dense, {p} visible", M.Dense(seen(*SHAPE, p=p))
    home = seen(2 * B, 3 * H, 2 * TQ, 3 * TK)
    yield "dense, reversed", M.Dense(seen(*SHAPE)[::-1, ::-1, ::-1, ::-1])
    yield "dense, transposed", M.Dense(seen(*SHAPE[::-1]).T)
    yield "dense, sliced", M.Dense(home[1::2, 2::3, -1::-2, 1::3])
    yield "dense, stride 0", M.Dense(np.broadcast_to(seen(1, TK), (TQ, TK)))

    leaves = {  # each hides about half, so that either side of & and | decides now and then
        "band": M.SlidingWindow(1, 1),
        "prefix": M.Prefix([1, 4]),
        "segments": M.Segments(np.sort(ids(B, TQ)), np.sort(ids(TK))),
        "dense": M.Dense(seen(B, H, TQ, 1)),
    }
    for (a, left), (b, right) in product(leaves.items(), repeat=2):
        yield f"{a} & {b}", left & right
        yield f"{a} | {b}", left | right
    for (a, x), (b, y), (c, z) in combinations(leaves.items(), 3):
        yield f"({a} | {b}) & {c}", (x | y) & z
        yield f"{a} | ({b} & {c})", x | (y & z)
        yield f"{c} & ({b} | {a}) & {c}", z & (y | x) & z


def large_masks(Tq, Tk):
    """Areas of a dozen or more rows and keys, cut by rectangles of fewer and of more elements than threads."""
    rng = np.random.default_rng(7)
    areas = (rng.random((2, Tq // 14 + 1, Tk // 20 + 1)) < 0.5).repeat(14, 1).repeat(20, 2)
    dense = M.Dense(areas[:, :Tq, :Tk])
    segments = M.Segments(np.arange(Tq) // 15, np.arange(Tk) // 40)
    yield from (("large segments", segments), ("large dense", dense))
    yield from (("large dense & segments", dense & segments), ("large segments | dense", segments | dense))


def cases():
    """name -> (mask, shape, offsets)"""
    bands = (*BANDS, M.Band(2, -1), M.Band(-3, -2), M.Band(-(2**70), 2**70))
    for band in (*bands, M.Band(-FAR - 2, -FAR + 1), M.Band(FAR - 1, FAR + 2)):
        yield str(band), (band, (1, 1, 5, 6), OFFSETS)
    for name, (mask, offset, rows) in PICTURES.items():
        yield name, (mask, (1, 1, len(rows), len(rows[0])), OFFSETS if offset is None else (*OFFSETS, offset))
    for name, mask in random_masks():
        yield name, (mask, SHAPE, (0, -1))
    for name, mask in large_masks(41, 77):
        yield name, (mask, (1, 2, 41, 77), (0,))


# Only a band has an offset: for other masks the first is enough.
CASES = {
    name: (mask, shape, offsets if any(band in mask.kind for band in ("Band", "Causal", "Window")) else offsets[:1])
    for name, (mask, shape, offsets) in cases()
}

# Wrong on purpose, one place each: name -> (which case notices, header or text, what to replace, by what).
WRONG = {
    "bounds swapped": ("causal 4x4", "text", "w[0], w[1]", "w[1], w[0]"),
    "one key more": ("prefix of each", "text", "j < ", "j <= "),
    "always batch 0": ("prefix of each", "header", "count == 1 ? 0 : b", "0"),
    "words of the left again": ("prefix LM of each", "text", "w[2], w[3]", "w[0], w[1]"),
    "a full tile that is not": ("causal 4x4", "header", "farthest <= upper ?", "nearest <= upper ?"),
    "a full tile called partial": ("causal 4x4", "header", "(i1 - 1 + offset)", "(i1 + offset)"),
    "left decides alone": ("prefix & band", "header", "return left < other ? left : other;", "return left;"),
    "elements skipped": ("dense [2, 2, 4, 5]", "header", "j -= width", "j = j0"),
    "steps of one thread": ("dense [2, 2, 4, 5]", "header", "blockDim.x % width", "1 % width"),
    "each thread for itself": ("dense [2, 2, 4, 5]", "header", "__syncthreads_or(seen)", "seen"),
    "not all reach the barrier": (
        "dense [2, 2, 4, 5]",
        "header",
        "while (i < i1",
        "if (i >= i1) return EMPTY;\n    while (i < i1",
    ),
    "lanes that never meet": ("large segments", "header", "step > 0", "step > 1"),
    "ids skipped": ("large segments", "header", "n = lane + lanes", "n = lane + blockDim.x"),
}


# ---- compiling -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The functions of a case by its name; those of `WRONG` by theirs."""
    compiler = shutil.which("g++")
    assert compiler, "these tests compile the CUDA text of masks as C++: install g++"
    entries = {}  # (header, text) -> number: masks of one structure share one
    names = {}
    for name, (mask, _, _) in CASES.items():
        names[name] = entries.setdefault((HEADER, M.cuda_text(mask)), len(entries))
    for name, (case, where, old, new) in WRONG.items():
        source = {"header": HEADER, "text": M.cuda_text(CASES[case][0])}
        assert old in source[where], name
        source[where] = source[where].replace(old, new)
        names[name] = entries.setdefault((source["header"], source["text"]), len(entries))

    folder = tmp_path_factory.mktemp("masks")
    bodies = [ENTRY.format(n=n, header=header, text=text) for (header, text), n in entries.items()]
    (folder / "masks.cpp").write_text(BLOCK + "".join(bodies))
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{FOLDER}"]
    # What is unused here a kernel uses; a text that is wrong on purpose may have useless code.
    command += ["-Wno-unused", "masks.cpp", "-o", "masks.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = ctypes.CDLL(str(folder / "masks.so"))
    return {
        name: SimpleNamespace(visible=getattr(built, f"visible_{n}"), tiles=getattr(built, f"tiles_{n}"))
        for name, n in names.items()
    }


def pack(mask):
    """A mask's words as a backend passes them; the mask keeps its arrays alive."""
    words = [word.ctypes.data if isinstance(word, np.ndarray) else word for word in mask.words()]
    return np.array(words, np.int64)


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


def visible(functions, mask, shape, offset):
    """(B, H, Tq, Tk) of what the text's ``mask_visible`` says."""
    words, seen = pack(mask), np.full(shape, 2, np.uint8)
    functions.visible(pointer(words), pointer(np.array(shape, np.int64)), ctypes.c_longlong(offset), pointer(seen))
    return seen


def tiles(functions, mask, b, h, rectangles, offset, threads):
    """What the text's ``mask_tile`` says of each ``i0, i1, j0, j1``, by a block of so many threads."""
    words, classes = pack(mask), np.full(len(rectangles), -3, np.intc)
    rectangles = np.ascontiguousarray(rectangles, np.int64)
    b, h, count, offset = (ctypes.c_longlong(x) for x in (b, h, len(rectangles), offset))
    functions.tiles(pointer(words), b, h, count, pointer(rectangles), offset, threads, pointer(classes))
    return classes


# ---- the law ---------------------------------------------------------------------------------------------


def rectangles_of(Tq, Tk):
    """All ``i0, i1, j0, j1`` of a small grid, some of a large one."""
    rows, keys = (list(combinations(range(length + 1), 2)) for length in (Tq, Tk))
    if len(rows) * len(keys) < 1000:
        return [(*i, *j) for i, j in product(rows, keys)]
    rng = random.Random(7)
    return [(*rng.choice(rows), *rng.choice(keys)) for _ in range(100)] + [(0, Tq, 0, Tk), (3, 4, 0, Tk), (0, Tq, 5, 6)]


def allowed(mask, seen, b, h, rectangle, offset):
    """The classes that a text may give: as sharp as Python's or sharper, and never wrong."""
    i0, i1, j0, j1 = rectangle
    block = seen[i0:i1, j0:j1]
    truth = M.FULL if block.all() else M.PARTIAL if block.any() else M.EMPTY
    python = mask.tile(b, h, i0, i1, j0, j1, offset)
    assert python in (M.PARTIAL, truth)
    return {python, truth}


def check(functions, mask, shape, offsets):
    """Predicate and tile classes of a text against Python's."""
    rectangles = rectangles_of(*shape[2:])
    # Ids are exchanged within whole warps; a scan shares elements among any number of threads.
    blocks = (1, 3, 64) if "Segments" not in mask.kind else (32,) if max(shape) < 32 else (32, 96)
    for offset in offsets:
        seen = visible(functions, mask, shape, offset)
        np.testing.assert_array_equal(seen, mask.visible(*np.ogrid[tuple(map(slice, shape))], offset))
        for b, h in product(range(shape[0]), range(shape[1])):
            may = [allowed(mask, seen[b, h], b, h, rectangle, offset) for rectangle in rectangles]
            for threads in blocks:
                classes = tiles(functions, mask, b, h, rectangles, offset, threads).tolist()
                for rectangle, kind, kinds in zip(rectangles, classes, may, strict=True):
                    assert kind in kinds, f"{(b, h)} {rectangle} at {offset}, {threads} threads: {kind}, not {kinds}"


@pytest.mark.parametrize("name", CASES)
def test_text_equals_python(library, name):
    """Every element, and every rectangle of small grids, by blocks of several sizes."""
    check(library[name], *CASES[name])


@pytest.mark.parametrize("name", WRONG)
def test_wrong_text_is_caught(library, name):
    """The comparison can fail: each of these differs from Python somewhere."""
    with pytest.raises(AssertionError):
        check(library[name], *CASES[WRONG[name][0]])


# ---- text and words --------------------------------------------------------------------------------------


def test_words_are_operands_then_arrays():
    prefix, causal = M.Prefix([4, 5]), M.Causal()
    lengths, segments = M.Lengths(3, [1, 2]), M.Segments([0, 1], [[0, 1, 1]] * 2)
    dense = M.Dense(np.ones((2, 2, 4, 5), bool)[:, :1])
    layouts = {
        prefix: [2, prefix.length],
        causal: [-M.UNBOUNDED, 0],
        lengths: [1, 2, lengths.q_lengths, lengths.kv_lengths],
        segments: [0, 3, segments.q_ids, segments.kv_ids],
        dense: [40, 0, 5, 1, dense.array],
        (prefix | causal) & lengths: [
            *(2, prefix.length),
            *(-M.UNBOUNDED, 0),
            *(1, 2, lengths.q_lengths, lengths.kv_lengths),
        ],
    }
    for mask, layout in layouts.items():
        words = mask.words()
        assert len(words) == len(layout)
        for word, expected in zip(words, layout, strict=True):
            assert word is expected if isinstance(expected, np.ndarray) else word == expected


def test_text_tells_structure_not_data():
    """One kind, one text: it can be part of the key of a compiled kernel."""
    texts = {}
    for name, (mask, _, _) in CASES.items():
        assert texts.setdefault(mask.kind, M.cuda_text(mask)) == M.cuda_text(mask), name
    assert M.cuda_text(None) == "#define HAS_MASK 0\n"


def test_no_header_but_our_own():
    """NVRTC is given no folder of system headers."""
    assert "#include" not in HEADER
    lines = M.cuda_text(M.Causal()).splitlines()
    assert [line for line in lines if "#include" in line] == ['#include "visibility.cuh"']


def test_bytes_other_than_one_are_true(library):
    raw = np.array([0, 1, 2, 128, 255, 0], np.uint8)
    mask = M.Dense(raw.view(bool))
    seen = visible(library["dense, keys only 4x6"], mask, (1, 1, 4, 6), 0)
    np.testing.assert_array_equal(seen, np.broadcast_to(raw != 0, (1, 1, 4, 6)))


class Odd(M.Mask):
    """A user's mask, enough for numpy_tiled."""

    def visible(self, b, h, i, j, q_offset):
        return np.broadcast_arrays(b, h, i, np.asarray(j) % 2 == 1)[-1]

    def tile(self, b, h, i0, i1, j0, j1, q_offset):
        return M.PARTIAL


@pytest.mark.parametrize("mask", [Odd(), M.Causal() & Odd(), Odd() | M.Prefix(1)], ids=lambda mask: mask.kind)
def test_mask_without_text(mask):
    with pytest.raises(rf.BackendError, match="Odd.*numpy_tiled"):
        M.cuda_text(mask)


def test_text_compiles_for_a_gpu():
    """NVRTC takes every text as it stands, without a header but ours."""
    pytest.importorskip("cupy")
    from cupy_backends.cuda.libs import nvrtc

    source = '#include "visibility.cuh"\n'
    for n, text in enumerate(sorted({M.cuda_text(mask) for mask, _, _ in CASES.values()})):
        source += f"""
namespace entry_{n} {{
{text}
}}
extern "C" __global__ void kernel_{n}(const long long* __restrict__ w, bool* seen, int* kind)
{{
    seen[threadIdx.x] = entry_{n}::mask_visible(w, 1, 2, threadIdx.x, 4, 5);
    kind[threadIdx.x] = entry_{n}::mask_tile(w, 1, 2, 0, 64, 64, 128, 5);
}}
"""
    program = nvrtc.createProgram(source, "masks.cu", [HEADER.encode()], [b"visibility.cuh"])
    try:
        nvrtc.compileProgram(program, ["-arch=sm_80", "-std=c++17"])
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    assert b"kernel_0" in nvrtc.getCUBIN(program)
    assert "warning" not in nvrtc.getProgramLog(program)
