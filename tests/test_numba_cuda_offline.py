"""Kernels of numba_cuda, compiled without a GPU: registers, spills, and the instructions that are expected.

A kernel goes the way that it goes on a GPU, from the plan of a problem to machine code, for sm_80 and sm_90a. In a
process without Numba's simulator; each kernel takes seconds.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import kept
import pytest

from rawflash import masks
from rawflash.hardware import CHIPS, kernels_on
from rawflash.problem import Problem
from rawflash.tiling import plan_tiles

pytest.importorskip("numba_cuda")
if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    pytest.skip("the simulator compiles nothing", allow_module_level=True)
launch = pytest.importorskip("rawflash.backends.cupy_raw.launch")
compiler = pytest.importorskip("rawflash.backends.numba_cuda.compile", exc_type=Exception)

MAIN = {"fa1_forward": "fa1_forward", "fa1_backward": "fa1_backward", "fa2_forward": "fa2_forward",
        "fa2_backward": "fa2_backward_keys"}  # fmt: skip
PRODUCT = {"float32": "FFMA", "float64": "DFMA", "mma": "HMMA"}
EVERYTHING = dict(causal=True, bias=(1, 1, 4096, 4096), alibi=True, softcap=5.0, sinks=True, dropout=0.1)
# file, architecture, dtype, d, options
COMMON = [
    *((file, arch, "float32", 64, {}) for file in MAIN for arch in ("sm_80", "sm_90a")),
    *((file, "sm_90a", "float64", 64, {}) for file in ("fa1_forward", "fa2_forward")),
    ("fa1_forward", "sm_90a", "float16", 64, {}),
    ("fa1_backward", "sm_90a", "bfloat16", 64, {}),
    ("fa2_forward", "sm_90a", "float32", 128, dict(causal=True)),
    *(("fa2_forward", "sm_90a", dtype, 64, dict(page=16)) for dtype in ("float16", "float32")),
    ("fa2_backward", "sm_90a", "float32", 128, {}),
]
MMA = [
    *((file, arch, dtype, d, dict(causal=causal)) for file in ("fa2_forward", "fa2_backward")
      for arch, dtype, d, causal in (
          ("sm_80", "float16", 64, True), ("sm_80", "bfloat16", 128, False),
          ("sm_90a", "bfloat16", 64, False), ("sm_90a", "bfloat16", 128, True), ("sm_90a", "float16", 128, False))),
]  # fmt: skip


def compiled(file, arch, dtype, d, options, name=None):
    """What ptxas says of a kernel (registers, bytes of stack and of spilled stores), how many instructions it has of
    each kind, and its plan."""
    problem = Problem(Hq=8, Hkv=8, Tq=4096, Tk=4096, d=d, dv=d, dtype=dtype, algorithm=file[:3], backend="numba_cuda",
                      **options)  # fmt: skip
    chip = kernels_on("numba_cuda", CHIPS[arch.removesuffix("a")])
    tiles = plan_tiles(problem, chip, file.removeprefix(file[:4]))
    values = launch.constants(problem, tiles, aligned=True, side_dtypes={}) | {"FAMILY": tiles.family}
    code, log = kept.compiled(compiler.Module(file, values, None, 0, arch), name or MAIN[file])
    used = re.search(r"Used (\d+) registers", log)
    spilled = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
    return int(used[1]), int(spilled[1]), int(spilled[2]), instructions(code), tiles


def instructions(code):
    """Of machine code, by their first word; empty where there is no disassembler, which CI has."""
    places = [shutil.which("nvdisasm"), *(Path(p, "nvidia/cu13/bin/nvdisasm") for p in sys.path)]
    tool = next((str(p) for p in places if p and Path(p).exists()), None)
    if tool is None:
        assert "CI" not in os.environ, "no nvdisasm: the checks of instructions would all be left out"
        return Counter()
    file = Path(os.environ["PYTEST_TMP"], f"{os.getpid()}.cubin")
    file.write_bytes(code)
    text = subprocess.run([tool, "-c", str(file)], capture_output=True, text=True, check=True).stdout
    return Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9]+)", text))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))


def shown(row):
    file, arch, dtype, d, options = row
    return "-".join([file, arch, dtype, str(d), *options])


@pytest.mark.parametrize("row", COMMON, ids=shown)
def test_common_kernels_stay_in_registers(row):
    registers, stack, spilled, found, tiles = compiled(*row)
    assert tiles.family == "simt" and registers <= 255 and max(stack, spilled) <= SPILLED.get(row[:2], 0)
    if found:
        assert stack or not found["LDL"] and not found["STL"]
        product = PRODUCT["float64" if row[2] == "float64" else "float32"]
        assert found[product] >= 100  # the products are unrolled, and are what the kernel consists of


#: Bytes of stack of common kernels that are not free of it: this can only get better.
SPILLED = {("fa1_forward", "sm_80"): 68, ("fa1_backward", "sm_80"): 264, ("fa1_backward", "sm_90a"): 52}

#: Bytes that a tensor-core kernel may spill: on sm_90a none.
SPILLS = {"sm_80": 160, "sm_90a": 0}


@pytest.mark.parametrize("row", MMA, ids=shown)
def test_tensor_core_kernels(row):
    file, arch, _, d, _ = row
    registers, _, spilled, found, tiles = compiled(*row)
    assert tiles.family == "mma" and registers <= 255 and spilled <= SPILLS[arch]
    if found:
        # Two products forward, five backward, by each warp, each of 16 x 8 x 16 numbers.
        values = {"FAMILY": tiles.family, "BR": tiles.br, "BC": tiles.bc, "D": d}
        threads = compiler.Module(file, values, None, 0, "").threads_of(MAIN[file])
        products = 2 if file == "fa2_forward" else 5
        least = products * tiles.br * tiles.bc * (64 if d <= 64 else 128) // (16 * 8 * 16) // (threads // 32)
        assert found["HMMA"] == least
        assert found["LDSM"] and not found["FFMA"] > 400


@pytest.mark.parametrize("file, name", [
    ("fa2_forward", None), ("fa1_backward", None), ("fa2_forward", "fa2_forward_merge"),
    ("side_gradients", "bias_gradient"), ("side_gradients", "sink_gradient"),
])  # fmt: skip
def test_every_option_at_once_compiles(file, name):
    where = "fa2_backward" if file == "side_gradients" else file
    problem = Problem(Hq=8, Hkv=4, Tq=4096, Tk=4096, d=40, dv=24, dtype="bfloat16", algorithm=where[:3],
                      backend="numba_cuda", **EVERYTHING)  # fmt: skip
    tiles = plan_tiles(problem, kernels_on("numba_cuda", CHIPS["sm_90"]), where.removeprefix(where[:4]))
    assert tiles.family == "simt"
    values = launch.constants(problem, tiles, aligned=False, side_dtypes={"bias": "float16"}, dlse=True)
    module = compiler.Module(file, values | {"FAMILY": tiles.family}, None, 0, "sm_90a")
    code, _ = kept.compiled(module, name or MAIN[where])
    assert code.startswith(b"\x7fELF")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_copies_go_through_registers_before_sm_80(dtype):
    registers, _, _, found, tiles = compiled("fa2_forward", "sm_75", dtype, 64, {})
    assert tiles.family == "simt" and registers <= 255 and not found["LDGSTS"]


def test_keys_of_kernels():
    """Of masks the program counts, not the CUDA text; of the words their layout."""

    class Other(masks.Prefix):  # another program under the same text
        def program(self):
            return masks.Causal().program()

    def key(mask, words=0):
        return compiler.Module("fa2_forward", {"FAMILY": "simt"}, mask, words, "sm_90a").key_of("fa2_forward")

    assert len({key(None), key(masks.Prefix(3)), key(Other(3)), key(masks.Causal()), key(masks.Causal(), 1)}) == 4
    assert key(masks.Prefix(3)) == key(masks.Prefix(5)) and key(Other(3)) == key(masks.Causal())


def test_products_of_every_kind():
    """The intrinsics of tensor cores become the instructions that they name."""
    from numba import cuda, float32, types

    from rawflash.backends.numba_cuda import intrinsics

    def made(product):
        def kernel(x, y):
            a, c = x[cuda.threadIdx.x], y[cuda.threadIdx.x]
            y[cuda.threadIdx.x] = product(a, a, a, a, a, a, c, c, c, c)[0]

        arrays = types.Array(types.uint32, 1, "C"), types.Array(float32, 1, "C")
        return cuda.compile(kernel, types.void(*arrays), device=False, abi="numba", cc=(8, 0), output="ptx")[0]

    for kind, k in (("bf16", 16), ("f16", 16), ("tf32", 8)):
        name = f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32"
        assert name in made(getattr(intrinsics, f"mma_{kind}"))


@pytest.mark.parametrize("name", ["fa2_backward_queries", "clear_gradients"])
def test_kernels_of_switches(name):
    options = dict(deterministic=True) if name == "fa2_backward_queries" else dict(varlen=True)
    registers, _, _, found, _ = compiled("fa2_backward", "sm_90a", "float32", 64, options, name)
    assert registers <= 255 and not found["LDL"]
