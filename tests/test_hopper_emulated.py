"""The twins of sm90/hopper.cuh on the CPU (-m emulated): each against NumPy, and each mistake that they are to find.

``python tests/test_hopper_emulated.py`` compiles every kernel here for sm_90a, where NVRTC is: to be sure that the
emulator is not asked what no GPU would take.
"""

from array import array

import emulator
import ml_dtypes
import numpy as np
import pytest

import rawflash as rf
from rawflash import sm90
from rawflash.backends.cupy_raw import compile, fa2_forward, tensor_map

pytestmark = pytest.mark.emulated
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
NUMBERS, ADDRESSES = 8, 8  # words of the call of these kernels
SLAB_ALIGNMENT = 1024
WIDTHS = (16, 64, 96, 128, 256)

PREAMBLE = """
#define FLOAT16 0
#define BFLOAT16 1
#define TYPE {type}
constexpr int MAPS = {maps};
struct Call {{ void* data[8]; long long number[8]; }};
"""
KERNEL = """
extern "C" __global__ void __launch_bounds__({threads}, 1) kernel(const __grid_constant__ MappedCall call)
{{
    extern __shared__ __align__(1024) unsigned char on_chip[];
    Barrier* const barrier = (Barrier*)(on_chip + {at});
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    {body}
}}
"""
# Two barriers of one arrival
BARRIERS = """
    if (thread == 0) {
        init_barrier(barrier, 1);
        init_barrier(barrier + 1, 1);
        fence_barriers();
    }
    __syncthreads();
"""


class Kernel:
    """A kernel of these tests: the text inside of it, and what it is launched with."""

    def __init__(self, body, threads=128, shared=8192, maps=1, dtype="bfloat16"):
        self.threads, self.shared, self.dtype, self.maps = threads, shared, dtype, maps
        preamble = PREAMBLE.format(type=dtype.upper(), maps=maps)
        code = KERNEL.format(threads=threads, at=shared - 64, body=body)
        self.text = compile.source("sm90/hopper.cuh", preamble) + code

    def __call__(self, *arrays, boxes=(), numbers=(), backwards=False, blocks=1):
        """Launch it; ``boxes`` are (matrix of four axes, rows of a box)."""
        function = emulator.Module(self.text, backwards).get_function("kernel")
        addresses = [x.ctypes.data for x in arrays]
        words = array("q", [*addresses, *[0] * (ADDRESSES - len(arrays)), *numbers, *[0] * (NUMBERS - len(numbers))])
        for matrix, rows in boxes:
            assert tensor_map.can(matrix)
            words += emulator.encode(matrix.ctypes.data, *tensor_map.geometry(matrix, self.dtype, rows))
        words += array("q", [0] * (tensor_map.WORDS * (self.maps - len(boxes))))
        function(blocks, self.threads, words, self.shared)


def drawn(shape, dtype="bfloat16", seed=0):
    """Small whole numbers, whose products have exact sums in float32; at a multiple of 16 bytes."""
    values = np.random.default_rng(seed).integers(-8, 9, shape)
    return at_granule(values.astype(np.float32).astype(DTYPES[dtype]))


def at_granule(values):
    space = np.empty(values.nbytes + tensor_map.GRANULE, np.uint8)
    first = -space.ctypes.data % tensor_map.GRANULE
    made = space[first : first + values.nbytes].view(values.dtype).reshape(values.shape)
    made[...] = values
    return made


def slab(rows):
    """Rows of 64 numbers as they lie in shared memory."""
    made = np.empty_like(rows)
    pieces, out = rows.reshape(len(rows), 8, 8), made.reshape(len(rows), 8, 8)
    for r in range(len(rows)):
        for piece in range(8):
            out[r, piece ^ r % 8] = pieces[r, piece]
    return made


# ---- copies


COPY = BARRIERS + """
    if (thread == 0) {
        arrive_expecting(barrier, BYTES);
        const long long* const at = call.call.number;
        copy_box(on_chip, call.map[0], barrier, at[0], at[1], at[2], at[3]);
    }
    await(barrier, 0);
    for (int n = thread; n < BYTES / 2; n += blockDim.x)
        ((unsigned short*)call.call.data[0])[n] = ((unsigned short*)on_chip)[n];
"""


def copying(rows, dtype="bfloat16"):
    return Kernel(COPY.replace("BYTES", str(128 * rows)), shared=128 * rows + 64 + -128 * rows % 64, dtype=dtype)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    "extents, rows, at",
    [
        ((2, 3, 64, 64), 64, (0, 0, 1, 1)),
        ((1, 1, 100, 128), 64, (64, 64, 0, 0)),  # rows end inside the box
        ((2, 2, 40, 72), 16, (64, 32, 1, 0)),  # columns too
        ((2, 2, 40, 72), 16, (0, -5, 1, 1)),
        ((2, 2, 40, 72), 8, (-8, 38, 0, 1)),
        ((1, 2, 40, 64), 8, (0, 0, 2, 0)),  # no such head: zeros
        ((1, 2, 40, 64), 8, (0, 0, 0, -1)),
        ((1, 1, 300, 64), 256, (0, 44, 0, 0)),
    ],
)
def test_copies_of_boxes(extents, rows, at, backwards):
    source = drawn(extents)
    result = np.empty((rows, 64), source.dtype)
    copying(rows)(result, boxes=[(source, rows)], numbers=at, backwards=backwards)
    column, row, head, batch = at
    expected = np.zeros((rows, 64), source.dtype)
    B, H, T, D = extents
    for r in range(rows):
        for c in range(64):
            if 0 <= batch < B and 0 <= head < H and 0 <= row + r < T and 0 <= column + c < D:
                expected[r, c] = source[batch, head, row + r, column + c]
    assert np.array_equal(result, slab(expected))


def test_copies_of_strided_views():
    whole = drawn((2, 90, 3, 80))
    view = whole.transpose(0, 2, 1, 3)[:, 1:, 10:80:2, 8:72]
    result = np.empty((32, 64), whole.dtype)
    copying(32)(result, boxes=[(view, 32)], numbers=(0, 2, 1, 1))
    assert np.array_equal(result, slab(view[1, 1, 2:34]))


# ---- products


def product(n, where="ss", a_transposed=False, b_transposed=False, dtype="bfloat16", depth=64):
    """Sums (64, n) = A B. Both factors come by maps, A that is to be in registers from device memory."""
    a_slabs, b_slabs = (1, -(-n // 64)) if a_transposed else (depth // 64, -(-n // 64))
    a_rows = depth if a_transposed else 64
    b_rows, b_slabs = (depth, b_slabs) if b_transposed else (n, depth // 64)
    a_bytes, b_bytes = a_slabs * a_rows * 128, b_slabs * b_rows * 128
    a_step = "16 * 128 * k" if a_transposed else f"k / 4 * {a_rows * 128} + k % 4 * 32"
    b_step = "16 * 128 * k" if b_transposed else f"k / 4 * {b_rows * 128} + k % 4 * 32"
    flags = f"{int(a_transposed)}, {int(b_transposed)}" if where == "ss" else f"{int(b_transposed)}"
    multiply = f"multiply_{where}<{n}, {flags}>(sum, {'moved(a, ' + a_step + ')' if where == 'ss' else 'fragment[k]'}"
    body = f"""
    {BARRIERS}
    if (thread == 0) {{
        arrive_expecting(barrier, {a_bytes + b_bytes});
        for (int n = 0; n < {a_slabs}; n++)
            copy_box(on_chip + n * {a_rows * 128}, call.map[0], barrier, 64 * n, 0, 0, 0);
        for (int n = 0; n < {b_slabs}; n++)
            copy_box(on_chip + {a_bytes} + n * {b_rows * 128}, call.map[1], barrier, 64 * n, 0, 0, 0);
    }}
    unsigned fragment[{depth // 16}][4];
    for (int k = 0; k < {depth // 16}; k++)
        for (int r = 0; r < 4; r++)
            fragment[k][r] = *(const unsigned*)((const unsigned short*)call.call.data[1] +
                (16 * warp + lane / 4 + 8 * (r % 2)) * {depth} + 16 * k + 2 * (lane % 4) + 8 * (r / 2));
    float sum[{n // 2}];
    await(barrier, 0);
    const unsigned long long a = factor(on_chip, {a_rows * 128}), b = factor(on_chip + {a_bytes}, {b_rows * 128});
    fence_products();
#pragma unroll
    for (int k = 0; k < {depth // 16}; k++)
        {multiply}, moved(b, {b_step}), k > 0);
    commit_products();
    await_products<0>();
    pin(sum);
    for (int n = 0; n < {n // 2}; n++)
        ((float*)call.call.data[0])[
            (16 * warp + lane / 4 + 8 * (n / 2 % 2)) * {n} + 8 * (n / 4) + 2 * (lane % 4) + n % 2] = sum[n];
    """
    return Kernel(body, shared=a_bytes + b_bytes + 64, maps=2, dtype=dtype), a_rows, b_rows


PRODUCTS = [
    *[(n, "ss", False, False, "bfloat16", 64) for n in WIDTHS],
    *[(n, "ss", False, True, "float16", 64) for n in WIDTHS],
    *[(n, "rs", False, True, "bfloat16", 64) for n in WIDTHS],
    *[(n, "rs", False, False, "float16", 64) for n in WIDTHS],
    (64, "ss", True, True, "bfloat16", 128),
    (128, "ss", True, False, "float16", 64),
    (32, "ss", False, False, "bfloat16", 128),
    (80, "ss", False, True, "bfloat16", 128),
    (160, "rs", False, True, "bfloat16", 128),
    (192, "ss", True, True, "bfloat16", 64),
]


@pytest.mark.parametrize("n, where, a_transposed, b_transposed, dtype, depth", PRODUCTS)
def test_products(n, where, a_transposed, b_transposed, dtype, depth):
    kernel, a_rows, b_rows = product(n, where, a_transposed, b_transposed, dtype, depth)
    A, B = drawn((64, depth), dtype, n), drawn((depth, n), dtype, n + 1)
    a, b = at_granule(A.T if a_transposed else A), at_granule(B if b_transposed else B.T)
    result = np.full((64, n), np.nan, np.float32)
    kernel(result, A, boxes=[(a[None, None], a_rows), (b[None, None], b_rows)], backwards=n % 32 == 0)
    assert np.array_equal(result, A.astype(np.float32) @ B.astype(np.float32))


# ---- stores and additions


STORE = """
    const unsigned short* const source = (const unsigned short*)call.call.data[0];
    for (int k = 0; k < 4; k++) {
        unsigned x[4];
        for (int n = 0; n < 4; n++)
            x[n] = *(const unsigned*)(
                source + (16 * warp + lane / 4 + 8 * (n % 2)) * 64 + 16 * k + 8 * (n / 2) + 2 * (lane % 4));
        const int lower = lane / 8 % 2, right = lane / 16;
        const int row = TRANSPOSED ? 16 * k + 8 * right + lane % 8 : 16 * warp + 8 * lower + lane % 8;
        const int piece = TRANSPOSED ? 2 * warp + lower : 2 * k + right;
        store_matrices<TRANSPOSED>(on_chip + in_slab(row, piece), x[0], x[1], x[2], x[3]);
    }
    fence_shared();
    __syncthreads();
    if (thread == 0) {
        for (int part = 0; part < 64 / ROWS; part++)
            store_box(call.map[0], on_chip + part * ROWS * 128, call.call.number[0], call.call.number[1] + part * ROWS,
                      call.call.number[2], call.call.number[3]);
        commit_stores();
        await_stores_read<0>();
    }
"""


def storing(transposed, rows, change=("", "")):
    body = STORE.replace("TRANSPOSED", str(transposed).lower()).replace("ROWS", str(rows))
    assert change[0] in body
    return Kernel(body.replace(*change), shared=64 * 128 + 64)


@pytest.mark.parametrize("transposed, rows, extents, at", [
    (False, 64, (1, 1, 64, 64), (0, 0, 0, 0)),
    (True, 64, (1, 1, 64, 64), (0, 0, 0, 0)),
    (False, 16, (2, 3, 100, 128), (64, 64, 2, 1)),
    (True, 8, (2, 3, 30, 72), (64, -20, 1, 0)),
    (False, 32, (1, 2, 70, 40), (-16, 10, 1, 0)),
    (False, 32, (1, 2, 70, 40), (0, 10, 2, 0)),
])  # fmt: skip
def test_stores_of_boxes(transposed, rows, extents, at):
    source = drawn((64, 64))
    result = at_granule(np.full(extents, 77, source.dtype))
    storing(transposed, rows)(source, boxes=[(result, rows)], numbers=at)
    column, row, head, batch = at
    expected = np.full(extents, 77, source.dtype)
    B, H, T, D = extents
    for r, c in np.ndindex(64, 64):
        if batch < B and head < H and 0 <= row + r < T and 0 <= column + c < D:
            expected[batch, head, row + r, column + c] = source[c, r] if transposed else source[r, c]
    assert np.array_equal(result, expected)


ADD = """
    float* const numbers = (float*)on_chip;
    for (int pass = 0; pass < 3; pass++) {
        float* const mine = numbers + pass % 2 * 256;
        if (thread == 0)
            await_stores_read<1>();
        __syncthreads();
        for (int n = thread; n < 256; n += blockDim.x)
            mine[n] = n + 1000 * pass;
        fence_shared();
        __syncthreads();
        if (thread == 0) {
            add_bulk((float*)call.call.data[0] + 4 * pass, mine, 1024);
            commit_stores();
        }
    }
    if (thread == 0)
        await_stores<0>();
"""


@pytest.mark.parametrize("last", ["await_stores<0>", "await_stores_read<0>"])
def test_additions(last):
    result = at_granule(np.ones(300, np.float32))
    Kernel(ADD.replace("await_stores<0>", last), shared=2048 + 64)(result)
    expected = np.ones(300, np.float32)
    for n in range(3):
        expected[4 * n : 4 * n + 256] += np.arange(256) + 1000 * n
    assert np.array_equal(result, expected)


BULK = BARRIERS + """
    if (thread == 0) {
        arrive_expecting(barrier, 2000);
        copy_bulk(on_chip + 16, (float*)call.call.data[0] + 4, barrier, 1600);
        copy_bulk(on_chip + 1616, (float*)call.call.data[0] + 404, barrier, 400);
    }
    await(barrier, 0);
    for (int n = thread; n < 500; n += blockDim.x)
        ((float*)call.call.data[1])[n] = ((float*)(on_chip + 16))[n];
"""


def test_bulk_copies():
    source, result = at_granule(np.arange(512, dtype=np.float32)), np.zeros(500, np.float32)
    Kernel(BULK, shared=2048 + 64)(source, result)
    assert np.array_equal(result, source[4:504])


# ---- clusters: each of two blocks sends its numbers, plus 1, to the other


PAIR = """
    if (thread == 0) {
        init_barrier(barrier, 1);
        init_barrier(barrier + 1, 1);
        fence_barriers();
        arrive_expecting(barrier, 1024);
    }
    __syncthreads();
    cluster_meets();
    const unsigned other = rank_in_cluster() ^ 1;
    const unsigned* const from = (const unsigned*)call.call.data[0] + 256 * blockIdx.x;
    unsigned* const to = (unsigned*)call.call.data[1] + 256 * blockIdx.x;
    unsigned *const sent = (unsigned*)on_chip, *const came = sent + 256;
    for (int n = thread; n < 256; n += 128)
        sent[n] = from[n] + 1;
    fence_shared();
    __syncthreads();
    if (thread == 0)
        copy_there(came, sent, barrier, 1024, other);
    await(barrier, 0);
    for (int n = thread; n < 256; n += 128)
        to[n] = came[n];
    __syncthreads();
    if (thread == 0)
        arrive_there(barrier + 1, other);  // its numbers have come: it may write there, or end
    await(barrier + 1, 0);
    sent[thread] = 0;
"""


def pair(body, cluster="__cluster_dims__(2, 1, 1)"):
    kernel = Kernel(body)
    kernel.text = kernel.text.replace("1) kernel(", f"1) {cluster} kernel(")
    return kernel


def run_pair(body, backwards=False, blocks=6, **more):
    kernel = pair(body, **more)
    source = np.random.default_rng(0).integers(0, 1000, (6, 256), np.uint32)
    result = np.zeros_like(source)
    kernel(source, result, backwards=backwards, blocks=blocks)
    return np.array_equal(result, source[[1, 0, 3, 2, 5, 4]] + 1)


@pytest.mark.parametrize("backwards", [False, True])
def test_pairs(backwards):
    assert run_pair(PAIR, backwards)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("old, new, said", [
    ("cluster_meets();", "", "not initialised"),
    ("fence_shared();", "", "what is copied has ordinary stores without fence_shared"),
    ("await(barrier + 1, 0);\n    sent[thread] = 0;", "", "ends while a copy from byte 0 of its shared memory"),
    (
        "await(barrier + 1, 0);\n    sent[thread] = 0;", "sent[thread] = 0;\n    await(barrier + 1, 0);",
        "before its copy to this block of the cluster had read it"),
    ("other);  // its", "other), arrive_there(barrier, other);  // its", "has ended|more arrivals"),
    ("arrive_expecting(barrier, 1024);", "arrive_expecting(barrier, 2048);", "deadlock.*block.*block"),
    ("arrive_expecting(barrier, 1024);", "arrive(barrier);", "ends while 1 copies into its shared memory"),
    ("barrier + 1, other);", "barrier + 1, 2);", "block 2 of a cluster of 2"),
    ("barrier, 1024, other);", "barrier, 1024, other ^ 1);", "its own shared memory"),
    ("barrier, 1024, other);", "barrier, 1000, other);", "no multiple of 16"),
    ("copy_there(came, sent", "copy_there(came + 1, sent", "no multiples of 16"),
])  # fmt: skip
def test_mistakes_of_pairs(old, new, said, backwards):
    assert old in PAIR
    with pytest.raises(AssertionError, match=f"(?s){said}"):
        run_pair(PAIR.replace(old, new), backwards)


def test_launches_of_parts_of_clusters():
    with pytest.raises(AssertionError, match="5 blocks are launched in clusters of 2"):
        run_pair(PAIR, blocks=5)


def test_blocks_without_a_cluster():
    with pytest.raises(AssertionError, match="block 1 of a cluster of 1"):
        run_pair(PAIR, cluster="")


# ---- all together: a warpgroup that copies, two that multiply, two stages, and an exchange of registers


TILES, STAGE = 5, 8192
PIPELINE = """
    Barrier *const full = barrier, *const empty = barrier + 2, *const q = barrier + 4;
    if (thread == 0) {
        for (int s = 0; s < 2; s++) {
            init_barrier(full + s, 1);
            init_barrier(empty + s, 2);
        }
        init_barrier(q, 1);
        fence_barriers();
        prefetch_map(call.map[0]);
    }
    __syncthreads();
    if (warp / 4 == 0) {
        give_registers<24>();
        if (thread == 0) {
            arrive_expecting(q, 2 * STAGE);
            copy_box(on_chip + 2 * STAGE, call.map[0], q, 0, 0, 0, 0);
            copy_box(on_chip + 3 * STAGE, call.map[0], q, 0, 64, 0, 0);
            for (int n = 0; n < TILES; n++) {
                const int s = n % 2;
                AWAIT_EMPTY
                arrive_expecting(full + s, STAGE);
                copy_box(on_chip + s * STAGE, call.map[1], full + s, 0, 64 * n, 0, 0);
            }
        }
    } else {
        take_registers<240>();
        const int group = warp / 4 - 1;
        float sum[32];
        const unsigned long long a = factor(on_chip + (2 + group) * STAGE);
        await(q, 0);
        if (group == 1)
            announce(1, 256);
        for (int n = 0; n < TILES; n++) {
            const int s = n % 2;
            const unsigned long long b = factor(on_chip + s * STAGE, STAGE);
            await(full + s, n / 2 % 2);
            meet(1 + group, 256);
            fence_products();
            for (int k = 0; k < 4; k++)
                multiply_ss<64, false, true>(sum, moved(a, 32 * k), moved(b, 2048 * k), n + k > 0);
            commit_products();
            announce(2 - group, 256);
            await_products<0>();
            if (thread % 128 == 0)
                arrive(empty + s);
        }
        if (group == 0)
            meet(1, 256);
        for (int n = 0; n < 32; n++)
            ((float*)call.call.data[0])[(64 * group + 16 * (warp % 4) + lane / 4 + 8 * (n / 2 % 2)) * 64 +
                8 * (n / 4) + 2 * (lane % 4) + n % 2] = sum[n];
    }
"""
AWAIT = "await(empty + s, n / 2 % 2 ^ 1);"
POLL = "while (!ended(empty + s, n / 2 % 2 ^ 1)) {}"


def pipeline(changes=(), empty=AWAIT):
    body = PIPELINE.replace("AWAIT_EMPTY", empty)
    for old, new in changes:
        assert old in body, old
        body = body.replace(old, new)
    body = body.replace("STAGE", str(STAGE)).replace("TILES", str(TILES))
    return Kernel(body, threads=384, shared=4 * STAGE + 64, maps=2)


def run_pipeline(kernel, backwards):
    A, B = drawn((128, 64)), drawn((TILES * 64, 64), seed=1)
    result = np.full((128, 64), np.nan, np.float32)
    kernel(result, boxes=[(A[None, None], 64), (B[None, None], 64)], backwards=backwards)
    expected = sum(A.astype(np.float32) @ B[64 * n : 64 * n + 64].astype(np.float32) for n in range(TILES))
    return result, expected


@pytest.mark.parametrize("empty", [AWAIT, POLL], ids=["awaits", "polls"])
@pytest.mark.parametrize("backwards", [False, True])
def test_pipeline(empty, backwards):
    result, expected = run_pipeline(pipeline(empty=empty), backwards)
    assert np.array_equal(result, expected)


#: What is wrong: (what stands there, what is put for it), and what is said.
BROKEN = {
    "bytes not expected": (
        "arrive_expecting(full + s, STAGE);", "arrive(full + s);", "beyond those expected|deadlock|did not expect"),
    "too few bytes": (
        "arrive_expecting(full + s, STAGE);",
        "arrive_expecting(full + s, STAGE / 2);", "deadlock.*-4096 bytes missing"),
    "too many bytes": (
        "arrive_expecting(full + s, STAGE);", "arrive_expecting(full + s, STAGE + 16);", "deadlock.*16 bytes missing"),
    "expected after the copy by an arrival too many": (
        "arrive_expecting(q, 2 * STAGE);",
        "arrive_expecting(q, STAGE); arrive_expecting(q, STAGE);", "more arrivals than 1"),
    "parity": (
        AWAIT,
        "await(empty + s, n / 2 % 2);",
        "deadlock.*thread 0 awaits the barrier at byte .*parity 0.*2 of 2 arrivals"),
    "no such parity": (AWAIT, "await(empty + s, n / 2 ^ 1);", "parity 0 or 1, not 3"),
    "stage never free": ("arrive(empty + s);", ";", "deadlock.*thread 0 awaits"),
    "one of two arrivals": ("if (thread % 128 == 0)\n", "if (thread == 128)\n", "deadlock.*1 of 2 arrivals"),
    "no fence of barriers": ("fence_barriers();", "", "before fence_barriers"),
    "no barrier": ("init_barrier(q, 1);", "", "not initialised"),
    "stage not awaited": (AWAIT, "", "changed while its product|another into its place|more arrivals"),
    "no fence of products": ("fence_products();", "", "before the first fence_products"),
    "no commit": ("commit_products();", "", r"commit_products\(\) is missing: 4"),
    "sums written too early": (
        "announce(2 - group, 256);", "announce(2 - group, 256); sum[3] = 0;", "sum 3 of 32 was written while"),
    "sums written after the fence": (
        "fence_products();", "fence_products(); if (n == 2) sum[3] *= 3.0f;", r"written after fence_products\(\)"),
    "slab of a factor": (
        "factor(on_chip + (2 + group) * STAGE)",
        "factor(on_chip + (2 + group) * STAGE + 512)", "begins in row 4 of eight"),
    "step of a factor": ("moved(a, 32 * k)", "moved(a, 16 * k)", "no multiple of 32"),
    "factor outside": ("moved(a, 32 * k)", "moved(a, 65536)", "factor A is outside of shared memory"),
    "slabs of a factor": ("moved(b, 2048 * k)", "moved(b, 2048 * k + 64)", "64 bytes into a row"),
    "place of a box": ("copy_box(on_chip + s * STAGE,", "copy_box(on_chip + s * STAGE + 128,", "no multiple of 1024"),
    "warpgroup not as one": (
        "moved(a, 32 * k)", "moved(a, 32 * (k ^ (warp % 4 == 3)))", "threads of a warpgroup disagree"),
    "a warp without products": (
        "fence_products();", "if (warp % 4 == 3) break;\nfence_products();", "deadlock|end of|disagree|under way"),
    "registers not given": ("give_registers<24>();", "", "deadlock.*takes 72 registers more"),
    "registers of one warp": (
        "give_registers<24>();", "if (warp) give_registers<24>();", "deadlock.*takes 72 registers more"),
    "registers upside down": (
        "give_registers<24>();", "give_registers<200>();", "a thread of 168 registers gives all but 200"),
    "so many registers": ("take_registers<240>();", "take_registers<248>();", "no multiple of 8 from 24 to 240"),
    "named barrier of few": (
        "meet(1 + group, 256);", "meet(1 + group, 128);", "disagree on named barrier|second arrival"),
    "second arrival": ("announce(1, 256);", "announce(1, 256), announce(1, 256);", "second arrival at named barrier 1"),
    "order of warpgroups": ("if (group == 1)\n", "if (group == 2)\n", "deadlock.*at named barrier 1"),
    "one lane": ("announce(2 - group, 256);", "if (lane == 0) announce(2 - group, 256);", "deadlock.*at named barrier"),
    "barrier written over": (
        "await(q, 0);", "await(q, 0); empty[0] = 0;", "not initialised, or was written over"),
    "copies that nobody awaits": (
        "prefetch_map(call.map[0]);",
        "arrive_expecting(q, STAGE); copy_box(on_chip, call.map[0], q, 0, 0, 0, 0);",
        "more arrivals|ends while|another into its place"),
    "map of nothing": (
        "prefetch_map(call.map[0]);", "prefetch_map(*(const TensorMap*)&call);", "this is no tensor map"),
}  # fmt: skip


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_pipelines(name, backwards):
    old, new, said = BROKEN[name]
    with pytest.raises(AssertionError, match=f"(?s){said}"):
        run_pipeline(pipeline([(old, new)]), backwards)


def test_sums_read_too_early():
    """Are not numbers."""
    after = "await_products<0>();\n            if (thread % 128 == 0)"
    early = pipeline([(after, "float seen = 0; for (int i = 0; i < 32; i++) seen += sum[i];\n" + after),
                      ("sum[n];", "sum[n] + last;"), ("float sum[32];", "float sum[32], last = 0;"),
                      ("arrive(empty + s);", "arrive(empty + s); last = seen;")])  # fmt: skip
    result, expected = run_pipeline(early, False)
    assert np.isnan(result[0]).all() and not np.array_equal(result, expected)


@pytest.mark.parametrize("old, new, said", [
    ("commit_products();", "commit_products(); fragment[1][2] ^= 1;", "a factor in registers changed"),
    ("fence_products();", "fence_products(); fragment[1][2] ^= 1;", r"written after fence_products\(\)"),
    ("commit_products();", "commit_products(); on_chip[thread] ^= 1;", "without fence_shared|shared memory changed"),
])  # fmt: skip
def test_factors_that_change(old, new, said):
    kernel, a_rows, b_rows = product(16, "rs", False, False)
    first = kernel.text.index("fence_products();", kernel.text.index("kernel("))
    last = kernel.text.index("pin(sum);", first)
    again = kernel.text[first:last]
    assert old in again
    kernel.text = kernel.text[:last] + again.replace(old, new) + kernel.text[last:]
    kernel.text = kernel.text.replace("on_chip[thread]", "on_chip[8192 + thread]")
    A, B = drawn((64, 64)), drawn((16, 64))
    with pytest.raises(AssertionError, match=said):
        kernel(np.empty((64, 16), np.float32), A, boxes=[(A[None, None], a_rows), (B[None, None], b_rows)])


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("old, new, said", [
    ("fence_shared();", "", "without fence_shared"),
    ("fence_shared();", "if (warp != 2) fence_shared();", "without fence_shared"),
    ("fence_shared();", "if (thread != 77) fence_shared();", "without fence_shared"),
    ("__syncthreads();", "if (warp == 3) __syncwarp();", "without fence_shared|before the store of it had read it"),
    ("commit_stores();", "", "that commit_stores"),
    ("await_stores_read<0>();", "", "await_stores.* is missing"),
    ("commit_stores();", "commit_stores(); on_chip[77] ^= 1;", "before the store of it had read it"),
    ("on_chip + part * 16 * 128", "on_chip + 512", "no multiple of 1024"),
    ("in_slab(row, piece)", "in_slab(row, piece) + 8", "no multiple of 16"),
])  # fmt: skip
def test_broken_stores(old, new, said, backwards):
    if backwards and old == "__syncthreads();":
        pytest.skip("the thread that stores comes last")
    source, result = drawn((64, 64)), drawn((1, 1, 64, 64))
    with pytest.raises(AssertionError, match=said):
        storing(False, 16, (old, new))(source, boxes=[(result, 16)], backwards=backwards)


@pytest.mark.parametrize("old, new, said", [
    ("await_stores_read<1>();", "", "before the store of it had read it|without fence_shared"),
    ("mine, 1024)", "mine + 1, 1024)", "no multiple of 16"),
    ("4 * pass, mine", "3 * pass, mine", "no multiples of 16"),
    ("await_stores<0>();", "await_stores<1>();", "is missing"),
    ("1024);", "1024 * 1024);", "not in shared memory"),
])  # fmt: skip
def test_broken_additions(old, new, said):
    assert old in ADD
    with pytest.raises(AssertionError, match=said):
        Kernel(ADD.replace(old, new), shared=2048 + 64)(at_granule(np.ones(300, np.float32)))


@pytest.mark.parametrize("body, said", [
    (COPY.replace("await(barrier, 0);", "return;"), "ends while 1 copies"),
    (COPY.replace("await(", "if (thread == 0) on_chip[5] = 0; await("), "byte 5 of .* was written"),
    ("on_chip[1000] = 0; __syncthreads();" + COPY, "what a copy writes over has ordinary stores .*from byte 0"),
    (COPY.replace("barrier, BYTES);", "barrier, BYTES - 16);"), "deadlock.*-16 bytes"),
    (COPY.replace("arrive_expecting(barrier, BYTES);", ""), "deadlock.*1 of 1 arrivals and -1024 bytes"),
    (COPY.replace("await(barrier, 0);", "while (!ended(barrier, 0)) __nanosleep(9); await(barrier, 1);"), "deadlock"),
    (COPY.replace("await(barrier, 0);", "while (!ended(barrier + 1, 0)) ended(barrier, 1);"), "deadlock"),
    ("__trap();", "__trap"),
    ("if (thread == 0) init_barrier(barrier, 1), init_barrier(barrier, 1);", "initialised twice"),
    ("meet(16, 128);", "no named barrier 16"),
    ("meet(3, 100);", "named barrier 3 of 100 threads"),
    ("if (warp == 1) meet(3, 64);", "deadlock"),
    ("meet(3, 128 + 32);", "of 160 threads, in a block of 128"),
    ("if (lane == 9) __any_sync(~0u, true); else __syncwarp();", "lane (9|0) of its warp is in another operation"),
])  # fmt: skip
def test_other_mistakes(body, said):
    source, result = drawn((1, 1, 8, 64)), np.empty((8, 64), np.float16)
    with pytest.raises(AssertionError, match=f"(?s){said}"):
        Kernel(body.replace("BYTES", "1024"))(result, boxes=[(source, 8)])


def test_registers_need_both_bounds():
    """Without the number of blocks ptxas ignores the exchange (C7508)."""
    kernel = pipeline()
    kernel.text = kernel.text.replace("__launch_bounds__(384, 1)", "__launch_bounds__(384)")
    with pytest.raises(AssertionError, match="the assembler would ignore it"):
        run_pipeline(kernel, False)


def test_more_threads_than_the_bounds():
    kernel = pipeline()
    kernel.text = kernel.text.replace("__launch_bounds__(384, 1)", "__launch_bounds__(256, 1)")
    with pytest.raises(AssertionError, match="384 threads are launched"):
        run_pipeline(kernel, False)


def test_maps_are_grid_constants():
    kernel = pipeline()
    kernel.text = kernel.text.replace("const __grid_constant__ MappedCall", "const MappedCall")
    with pytest.raises(AssertionError, match="__grid_constant__"):
        run_pipeline(kernel, False)


PROBE = """
extern "C" __global__ void __launch_bounds__(THREADS) probe(const __grid_constant__ MappedCall call)
{
    extern __shared__ __align__(1024) unsigned char on_chip[];
    Barrier* const barrier = (Barrier*)(on_chip + 8192);
    if (threadIdx.x == 0) {
        init_barrier(barrier, 1);
        fence_barriers();
        arrive_expecting(barrier, 8192);
        copy_box(on_chip, call.map[0], barrier, 0, 64, 1, 1);
        await(barrier, 0);
        store_box(call.map[1], on_chip, 0, 64, 1, 1);
        commit_stores();
        await_stores<0>();
    }
}
"""


def test_maps_of_a_call(monkeypatch):
    """From the launcher, whose words they follow; beside a kernel that takes the call alone."""
    emulator.install(monkeypatch)
    monkeypatch.setattr(sm90, "WGMMA_CHIP", "none")  # sm_90's own kernel takes maps itself
    made, source, launcher = [], compile.source, fa2_forward.launcher

    def launcher_of_maps(*args, **fixed):
        made.append(launcher(*args, boxes=(tensor_map.Box("q", 64), tensor_map.Box("o", 64)), **fixed))
        run = made[0].run
        made[0].run = lambda name, blocks, words, nbytes=0: [run(name, blocks, words, nbytes), made.append(words)]
        return made[0]

    monkeypatch.setattr(fa2_forward, "launcher", launcher_of_maps)
    monkeypatch.setattr(
        compile, "source", lambda name, text: source("sm90/hopper.cuh", source(name, text)) + PROBE
    )
    values = np.random.default_rng(0).normal(size=(3, 2, 2, 100, 64)).astype(np.float16)
    q, k, v = (emulator.to_device(at_granule(x)) for x in values)
    out = rf.attention(q, k, v)
    assert np.allclose(out, rf.oracle.attention(*values), atol=2e-3)
    launcher, words = made
    type(launcher).run(launcher, "probe", 1, words, 8192 + 64)
    assert np.array_equal(out[1, 1, 64:], q[1, 1, 64:])
    assert not np.array_equal(out[1, 1, 63], q[1, 1, 63])


@pytest.mark.parametrize("change", [
    {"address": 8}, {"dtype": 7}, {"rows": 257}, {"rows": 0}, {"extents": (64, 0, 1, 1)}, {"strides": (24, 1024, 1024)},
    {"strides": (0, 1024, 1024)}, {"extents": (64, 2, 1)},
])  # fmt: skip
def test_maps_that_the_driver_refuses(change):
    good = dict(address=1 << 20, dtype=9, extents=(64, 2, 1, 1), strides=(128, 1024, 1024), rows=8)
    emulator.encode(**good)
    with pytest.raises(AssertionError):
        emulator.encode(**good | change)


def kernels():
    """Those of this file that are right."""
    for rows in (8, 64, 256):
        yield copying(rows)
    for case in PRODUCTS:
        yield product(*case)[0]
    for transposed in (False, True):
        yield storing(transposed, 16)
    yield Kernel(ADD)
    yield Kernel(ADD.replace("await_stores<0>", "await_stores_read<0>"))
    yield Kernel(BULK)
    yield pair(PAIR)
    for empty in (AWAIT, POLL):
        yield pipeline(empty=empty)


def main():
    """Every kernel of this file that is right, compiled for sm_90a."""
    for kernel in kernels():
        cubin, log = compile.compile_log(kernel.text, "sm_90a")
        used = compile.usage(log)["kernel"]
        notes = [line for line in log.splitlines() if "warning" in line.lower() or "C75" in line]
        print(len(cubin), used, *notes)
        assert not used["spill_stores"]


if __name__ == "__main__":
    main()
