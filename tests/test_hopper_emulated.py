"""The twins of sm90/hopper.cuh on the CPU (-m emulated): each against NumPy, and each mistake that they are to find.

``python tests/test_hopper_emulated.py`` compiles every kernel here for sm_90a, where NVRTC is: to be sure that the
emulator is not asked what no GPU would take.
"""

import re
import sys
from array import array

import emulator
import ml_dtypes
import numpy as np
import pytest

from rawflash.backends.cupy_raw import compile, tensor_map

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
extern "C" __global__ void __launch_bounds__({threads}) kernel(const __grid_constant__ MappedCall call)
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
        copy_box(on_chip, call.map[0], barrier, call.call.number[0], call.call.number[1], call.call.number[2], call.call.number[3]);
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
    """sums (64, n) = A B, depth by steps of 16; A in registers comes from device memory as the text says that it lies."""
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
        ((float*)call.call.data[0])[(16 * warp + lane / 4 + 8 * (n / 2 % 2)) * {n} + 8 * (n / 4) + 2 * (lane % 4) + n % 2] = sum[n];
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


def main():
    """Every kernel of this file, compiled for sm_90a."""
    for text in dict.fromkeys(TEXTS):
        compile.compile_log(text, "sm_90a")
    print(f"{len(set(TEXTS))} kernels")


if __name__ == "__main__":
    sys.exit(main())
