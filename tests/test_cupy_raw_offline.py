"""Every CUDA C++ kernel, compiled without a GPU for the GPUs there are: registers, spills, shared memory, instructions.

A call goes the way it goes on a GPU, from the public function to the launch, on a CuPy that has no device
(:class:`Device`): so the tiles, the preamble and the choice of the files are those of a real call. What it would
have loaded is compiled, and what the assembler says is compared with ``kernel_resources.json``: exactly if NVRTC is
the one that the table was made with.

What is compiled (:func:`cases`); all of every option, dtype and architecture would take an hour:

* on every architecture: plain float32 calls, d = 64, of the four passes and of append_kv;
* on sm_90a the common calls: every dtype, d = 64 and 128, plain (fa1, fa2) and causal (fa2);
* on sm_90a: every dtype with every option at once, and deterministic; packed sequences; other head dimensions;
* on sm_75 and sm_80: other dtypes, and every option at once;
* of the forward pass of 16 bits: d = 64 on every architecture from sm_80 on; every width of a tile; each option;
* on sm_80 and later: gradients of 16 bits, plain and causal, d = 64 and 128, and wide ones; on sm_90a with softcap
  and ALiBi, too.

The static assertions of the float32 and float64 kernels are compiled for every kind of head dimension, without
the kernels.

``python tests/test_cupy_raw_offline.py --write`` makes the table anew. A kernel that spills in a common call stands
in `SPILLS`, with the bytes that it may spill at most.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from array import array
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from importlib import metadata
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import kept
import numpy as np
import pytest
from strategies import DTYPES

import rawflash as rf
from rawflash import arrays, hardware, problem
from rawflash import masks as M
from rawflash.backends.cupy_raw import append_kv, launch, tensor_map
from rawflash.backends.cupy_raw import compile as compiler

TABLE = Path(__file__).with_name("kernel_resources.json")
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")
KERNELS = ("fa1_forward", "fa1_backward", "fa2_forward", "fa2_backward")
FA2 = KERNELS[2:]
APPEND = "append_kv"
DECODE = "decode"  # one query over T keys; in 16 bits fa2_few_rows.cu
COMMON = ("plain", "causal", "paged", "few heads")
USED = ("registers", "stack", "spill_stores", "spill_loads", "shared")  # of compile.usage
LAUNCHED = ("threads", "dynamic_shared")  # 0, 0: the call does not launch this kernel of the file
COLUMNS = (*USED, *LAUNCHED)
REGISTERS = 65536  # of a multiprocessor, on every architecture here
UNASKED_SHARED = 48 * 1024  # dynamic shared memory that a launch has without asking

# Kernels that spill on sm_80 and later, in common calls or on tensor cores: "row of the table": (bytes that a thread
# stores, and loads). This can only get better.
SPILLS: dict[str, tuple[int, int]] = {
    "sm_90a fa1_backward float64 d=64 plain: fa1_backward.cu fa1_backward": (48, 56),
}


# ---- a device that is not there ----------------------------------------------------------------------------


class Array:
    """As much of a CuPy array as a call looks at; its memory is nowhere."""

    __module__ = "cupy"

    def __init__(self, shape, dtype=np.float32):
        like = np.empty(shape, dtype)  # never touched, so it costs no memory
        self.shape, self.strides, self.dtype, self.nbytes = like.shape, like.strides, like.dtype, like.nbytes
        self.data = SimpleNamespace(ptr=1 << 44, device_id=0, memset_async=lambda value, nbytes: None)

    def astype(self, dtype, copy=True):
        return self

    def reshape(self, *shape):
        return self


class Function:
    """A kernel; a launch leaves its threads and its dynamic shared memory in `launched`."""

    def __init__(self, name, launched):
        self.name, self.launched, self.ptr, self.allowed = name, launched, self, UNASKED_SHARED

    def __call__(self, blocks, threads, words, shared_bytes=0):
        assert blocks >= 1
        assert shared_bytes <= self.allowed, f"{self.name} is launched with more shared memory than it asked for"
        self.launched[self.name] = threads, shared_bytes


class Program(NamedTuple):
    """A text that a call would have compiled and loaded, and the kernels of it that it launched."""

    file: str
    text: str
    arch: str
    launched: dict

    def get_function(self, name):
        return Function(name, self.launched)


class Device:
    """A GPU as CuPy shows it, of an architecture; what is loaded on it is kept in `programs`."""

    def __init__(self, arch):
        chip = hardware.CHIPS[arch.removesuffix("a")]
        attributes = {"MaxSharedMemoryPerBlockOptin": chip.on_chip_bytes, "MultiProcessorCount": 132}
        capability = chip.name.removeprefix("sm_")
        self.programs = []
        self.cupy = SimpleNamespace(
            ndarray=Array,
            asarray=lambda host: Array(host.shape, host.dtype),
            zeros=lambda shape, dtype: [Array(shape[1:], dtype)] * shape[0],
            cuda=SimpleNamespace(
                is_available=lambda: True,
                Device=lambda number: SimpleNamespace(compute_capability=capability, attributes=attributes),
                Event=lambda **options: SimpleNamespace(record=lambda: None),
                get_current_stream=lambda: SimpleNamespace(ptr=0, is_capturing=lambda: False),
                runtime=SimpleNamespace(getDevice=lambda: 0),
                driver=SimpleNamespace(
                    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
                    funcSetAttribute=lambda function, attribute, nbytes: setattr(function, "allowed", nbytes),
                ),
            ),
        )

    def load(self, text, arch):
        (file,) = re.findall(r'^#line 1 "(.*\.cu)"$', text, re.MULTILINE)
        self.programs.append(Program(file, text, arch, {}))
        return self.programs[-1]

    @contextmanager
    def current(self):
        """In here calls run on this device."""
        remembered = (arrays.require_cupy, hardware._gpu, compiler.arch_of)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "cupy", self.cupy)
            patch.setattr(compiler, "load", self.load)
            patch.setattr(problem, "_MEMO", {})
            patch.setattr(tensor_map, "encode", lambda *geometry: array("q", bytes(8 * tensor_map.WORDS)))
            try:
                for function in remembered:
                    function.cache_clear()
                yield
            finally:
                for function in remembered:
                    function.cache_clear()


# ---- calls -------------------------------------------------------------------------------------------------

B, HQ, HKV, T = 2, 4, 2, 1024
IDS = np.arange(T) // 100
STARTS = np.array([0, T // 3, T], np.int32)
OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "everything": dict(
        window=(700, 3), softcap=20.0, alibi_slopes=[0.5, 0.25, 0.1, 0.0], dropout=0.1,
        mask=M.Segments(IDS, IDS) | M.PrefixLM(9) & M.Dense(np.ones((1, HQ, 1, T), bool)),
    ),  # and arrays: bias, sinks, dlse
    "packed": dict(causal=True),
    "softcap": dict(softcap=20.0),
    "alibi": dict(causal=True, alibi_slopes=[0.5, 0.25, 0.1, 0.0]),
    "alibi, no mask": dict(alibi_slopes=[0.5, 0.25, 0.1, 0.0]),  # sm_90, backward: float16 has a number more at hand
    "alibi, window": dict(window=(300, 200), alibi_slopes=[0.5, 0.25, 0.1, 0.0]),  # and here rows see no later key
    "alibi, window, deterministic": dict(
        window=(300, 200), alibi_slopes=[0.5, 0.25, 0.1, 0.0], deterministic=True),
    "dropout": dict(dropout=0.1),
    "mask, dropout": dict(mask=M.Segments(IDS, IDS), dropout=0.1),
    "bias, dropout": dict(dropout=0.1),  # and the bias
    "mask": dict(mask=M.Segments(IDS, IDS)),
    "bias": {},  # and an array for it
    "M given": dict(sram=64 << 10),  # in 16 bits no call for the kernels of sm_90
    "causal, M given": dict(causal=True, sram=hardware.CHIPS["sm_90"].on_chip_bytes),
    "few heads": {},  # in 16 bits blocks of other heights
    "short": {},  # sm_90, backward: else what is before and behind fa2_backward_keys is done there
    "causal, many heads": dict(causal=True),  # and if there is a mask only here
    "causal, longer, many heads": dict(causal=True),  # 2,048 rows: the first dQ is not stored
    "causal, long, many heads": dict(causal=True),  # 4,096; d = 128: in pairs
    "long, many heads": {},  # and the last blocks of keys are divided
    "deterministic": dict(deterministic=True),
    "paged": {},  # decode: caches in blocks of 16
    "17 rows": {},  # decode: of queries that share a head of keys, more than one product has
}  # fmt: skip


class Case(NamedTuple):
    """One forward or backward call, or an append to a cache."""

    arch: str
    kernel: str
    dtype: str
    d: int
    options: str

    def __str__(self):
        return f"{self.arch} {self.kernel} {self.dtype} d={self.d} {self.options}"

    @property
    def common(self):
        return self.options in COMMON and self.d in (64, 128) and self.arch != "sm_75"


def cases():
    def on(arch, kernels, dtypes, dimensions, options):
        return [Case(*case) for case in product((arch,), kernels, dtypes, dimensions, options)]

    found = [case for arch in ARCHITECTURES for case in on(arch, (*KERNELS, APPEND), ["float32"], [64], ["plain"])]
    found += on("sm_90a", [APPEND], DTYPES, [20], ["plain"])
    found += on("sm_90a", KERNELS, DTYPES, [64, 128], ["plain"])
    found += on("sm_90a", FA2, DTYPES, [64, 128], ["causal"])
    found += on("sm_90a", FA2, DTYPES, [64], ["everything"])
    found += on("sm_90a", KERNELS[:2], ["float32"], [64], ["everything"])
    found += on("sm_90a", KERNELS, ["float32"], [64], ["packed"]) + on("sm_90a", FA2, ["float16"], [128], ["packed"])
    found += on("sm_90a", ["fa2_backward"], DTYPES, [64], ["deterministic"])
    found += on("sm_90a", FA2, ["float32"], [32, 80, 256], ["plain"])
    # at d = 20, rows of float16 do not start at multiples of 16 bytes
    found += on("sm_90a", FA2, ["float16"], [20, 32], ["plain"]) + on("sm_90a", FA2, ["float64"], [32], ["plain"])
    for arch in ARCHITECTURES[1:]:
        found += on(arch, [DECODE], ["bfloat16"], [128], ["plain", "paged"])
    found += on("sm_90a", [DECODE], ["float16"], [20, 64, 128, 256], ["plain", "paged", "17 rows"])
    found += on("sm_90a", [DECODE], ["float32"], [64], ["paged"])
    for arch in ARCHITECTURES[1:]:
        found += on(arch, ["fa2_forward"], ["bfloat16"], [64], ["plain", "causal"])
    found += on("sm_80", ["fa2_forward"], ["bfloat16", "float16"], [64, 128], ["plain", "causal"])
    found += on("sm_90a", ["fa2_forward"], ["float16"], [96, 192, 256], ["causal"])
    found += on("sm_80", ["fa2_forward"], ["float16"], [64, 128], ["few heads"])
    found += on("sm_90a", ["fa2_forward"], ["float16"], [64, 128], ["few heads"])
    found += on("sm_90a", ["fa2_forward"], ["bfloat16"], [64, 128], ["softcap", "alibi", "dropout", "mask", "bias"])
    several = ["mask", "bias", "mask, dropout", "bias, dropout", "everything"]
    found += on("sm_90a", ["fa2_forward"], ["bfloat16"], [64, 128, 192, 256], several)
    found += on("sm_80", ["fa2_forward"], ["bfloat16"], [64, 128, 192, 256], ["softcap", "alibi", "dropout", *several])
    for arch in ARCHITECTURES[1:]:
        found += on(arch, ["fa2_forward"], ["bfloat16"], [64, 128], ["few heads"])
    for arch in ARCHITECTURES[1:]:
        found += on(arch, ["fa2_backward"], ["bfloat16"], [64, 128], ["plain", "causal"])
        found += on(arch, ["fa2_backward"], ["float16"], [256], ["plain"])
    found += on("sm_90a", ["fa2_backward"], ["bfloat16"], [128], ["packed", "everything", "deterministic"])
    found += on("sm_90a", ["fa2_backward"], ["bfloat16"], [192, 256], ["plain", "causal"])
    found += on("sm_90a", ["fa2_backward"], ["bfloat16"], [256], ["causal, M given"])
    found += on("sm_90a", ["fa2_backward"], ["float16"], [256], ["causal", "packed"])
    found += on("sm_80", ["fa2_backward"], ["bfloat16"], [64, 128], ["few heads"])
    found += on("sm_90a", ["fa2_backward"], ["bfloat16"], [64, 128], ["few heads"])
    found += on("sm_90a", ["fa2_backward"], ["bfloat16", "float16"], [64, 128], ["short", "causal, many heads"])
    found += on("sm_90a", ["fa2_backward"], ["bfloat16"], [64, 128], ["long, many heads"])
    scores = ["softcap", "alibi", "alibi, window", "alibi, window, deterministic"]
    found += on("sm_90a", ["fa2_backward"], ["bfloat16", "float16"], [64, 128, 256], scores)
    found += on("sm_90a", ["fa2_backward"], ["float16"], [128], ["alibi, no mask"])
    longer = ["causal, longer, many heads", "causal, long, many heads"]
    found += on("sm_90a", ["fa2_backward"], ["bfloat16"], [128], longer)
    for arch in ("sm_75", "sm_80"):
        found += on(arch, FA2, ["float16", "float64"], [128], ["plain"])
        found += on(arch, FA2, ["float32"], [64], ["everything"])
    # where a plain call is one of split inputs; on sm_90a others are above
    found += on("sm_100a", FA2, ["float32"], [64], ["everything"])
    return list(dict.fromkeys(found))


CASES = cases()
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def programs(case):
    """What a call would load, by way of the public functions."""
    dtype, packed = DTYPES[case.dtype], case.options == "packed"
    statistic = np.float64 if case.dtype == "float64" else np.float32
    halves = case.kernel in FA2 and case.dtype in ("float16", "bfloat16")
    times = 1 if case.options == "few heads" else 32 if "many heads" in case.options else 16
    lead = () if packed else (times * B,) if halves else (B,)
    many = 4 if packed and halves else 1  # as many blocks as sm_90's own kernels are for
    lengths = {"long,": 4 * T, "longer": 2 * T, "short": 3 * T // 8}
    length = next((n for name, n in lengths.items() if name in case.options), T)
    q, k, v = (Array((*lead, many * heads, length, case.d), dtype) for heads in (HQ, HKV, HKV))
    options = dict(OPTIONS[case.options])
    if case.kernel in KERNELS:
        options["algorithm"] = case.kernel.partition("_")[0]
    starts = dict(cu_seqlens_q=STARTS, cu_seqlens_k=STARTS) if packed else {}
    everything = case.options == "everything"
    if case.kernel == DECODE:
        q = Array((B, 17 * HKV if case.options == "17 rows" else HQ, 1, case.d), dtype)
    if everything or case.options.startswith("bias"):
        options |= dict(bias=Array((HQ, T, T), dtype))
    if everything:
        options |= dict(sinks=Array((HQ,), dtype))
    device = Device(case.arch)
    with device.current():
        if case.kernel == APPEND:
            rf.append_kv(k, v, k, v, np.zeros(B, int))
        elif case.options == "paged":
            blocks = Array((B * T // 16, HKV, 16, case.d), dtype)
            rf.attention_decode(q, blocks, blocks, np.full(B, T), Array((B, T // 16), np.int32))
        elif case.kernel == DECODE:
            rf.attention_decode(q, k, v, np.full(B, T))
        elif case.kernel.endswith("forward"):
            (rf.attention_varlen if packed else rf.attention)(q, k, v, **starts, **options)
        else:
            lse = Array(q.shape[:-1], statistic)
            if everything:
                options |= dict(dlse=lse, wrt=("q", "k", "v", "bias", "sinks"))
            backward = rf.attention_varlen_backward if packed else rf.attention_backward
            backward(q, q, k, v, q, lse, **starts, **options)
    return device.programs


def resources(case):
    """Rows of the table: what each kernel that a call loads takes, or why there is none."""
    try:
        loaded = programs(case)
    except rf.TileError as error:
        return {str(case): f"does not fit: {error.needed} bytes needed, {error.available} there"}
    rows = {}
    for program in loaded:
        used = compiler.usage(kept.compile_log(program.text, program.arch)[1])
        assert program.launched.keys() <= used.keys()
        for kernel, numbers in sorted(used.items()):
            rows[f"{case}: {program.file} {kernel}"] = dict(
                zip(COLUMNS, [*(numbers[name] for name in USED), *program.launched.get(kernel, (0, 0))], strict=True)
            )
    return rows


# ---- the table ---------------------------------------------------------------------------------------------


def read():
    """NVRTC's version, and the rows as `resources` gives them."""
    table = json.loads(TABLE.read_text())
    return table["nvrtc"], {
        key: row if isinstance(row, str) else dict(zip(table["columns"], row, strict=True))
        for key, row in table["kernels"].items()
    }


def write():
    """Make the table, a line for each kernel; none if a kernel does not compile."""
    with ProcessPoolExecutor() as pool:
        jobs = {case: pool.submit(resources, case) for case in CASES}
    failed = {case: job.exception() for case, job in jobs.items() if job.exception()}
    if failed:
        sys.exit("\n".join(f"{case}: {error}" for case, error in failed.items()))
    rows = {key: row for job in jobs.values() for key, row in job.result().items()}
    lines = [
        f"  {json.dumps(key)}: {json.dumps(row if isinstance(row, str) else list(row.values()))}"
        for key, row in rows.items()
    ]
    head = f' "nvrtc": {json.dumps(compiler._compiler())},\n "columns": {json.dumps(COLUMNS)},\n'
    TABLE.write_text("{\n" + head + ' "kernels": {\n' + ",\n".join(lines) + "\n }\n}\n")
    print(f"{len(rows)} rows; these spill, those in common calls marked by *:")
    common = tuple(f"{case}:" for case in CASES if case.common)
    for key, row in rows.items():
        if spilled(row):
            print("*" if key.startswith(common) else " ", f'"{key}": {spilled(row)},')


def spilled(row):
    """Bytes of a thread that go to memory and come back for want of registers: (stored, loaded), or None."""
    if isinstance(row, str) or not (row["spill_stores"] or row["spill_loads"]):
        return None
    return row["spill_stores"], row["spill_loads"]


def of(case, rows):
    """The rows of one case."""
    return {key: row for key, row in rows.items() if key.partition(":")[0] == str(case)}


# ---- tests -------------------------------------------------------------------------------------------------

WHOLE_KERNEL = re.compile(r'^extern "C" __global__.*?^\}$', re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_plans_of_every_head_dimension_are_what_kernels_expect(arch, dtype):
    """Their static assertions: compiled without the kernels, which takes no time, for each size of shared memory."""
    pytest.importorskip("cupy")
    refused = {}
    for kernel, d in product(FA2, (1, 20, 100, 250, *range(8, 257, 8))):
        try:
            program = programs(Case(arch, kernel, dtype, d, "plain"))[0]
        except rf.TileError:  # float64, for want of shared memory
            assert (arch, dtype) == ("sm_86", "float64") and d > 160
            continue
        try:
            kept.compile_log(WHOLE_KERNEL.sub("", program.text), arch)
        except rf.BackendError as error:
            refused.setdefault(str(error).splitlines()[1], []).append(f"{kernel} d={d}")
    assert not refused


@each_case
def test_resources(case):
    pytest.importorskip("cupy")
    rows, (version, table) = resources(case), read()
    available = hardware.CHIPS[case.arch.removesuffix("a")].on_chip_bytes
    for key, row in rows.items():
        if not isinstance(row, str):
            assert row["registers"] * row["threads"] <= REGISTERS, key
            assert row["shared"] + row["dynamic_shared"] <= available, key
    recorded = of(case, table)
    again = "python tests/test_cupy_raw_offline.py --write"
    assert rows.keys() == recorded.keys(), again
    if compiler._compiler() == version:
        assert rows == recorded, again
        return
    for key, row in rows.items():  # another NVRTC gives out other registers
        if isinstance(row, str) or isinstance(recorded[key], str):
            assert row == recorded[key], key
        else:
            assert all(row[name] == recorded[key][name] for name in LAUNCHED), key
            assert spilled(row) is None or spilled(recorded[key]), key


def test_the_table_has_these_cases_and_no_other():
    _, table = read()
    assert {key.partition(":")[0] for key in table} == {str(case) for case in CASES}


def test_common_calls_and_tensor_cores_do_not_spill():
    _, table = read()
    common = {key for case in CASES if case.common for key in of(case, table)}
    common |= {key for key in table if ": mma/" in key or ": sm90/" in key}
    spilling = {key: spilled(table[key]) for key in common if spilled(table[key])}
    assert spilling.keys() == SPILLS.keys(), "fix a kernel, or take out what is fixed"
    for key, most in SPILLS.items():
        assert all(now <= then for now, then in zip(spilling[key], most, strict=True)), key


def test_every_file_is_compiled_for_every_architecture():
    """A new file that no case reaches shows here."""
    files = {path.relative_to(compiler.CUDA).as_posix() for path in compiler.CUDA.rglob("*.cu")}
    reached = {arch: set() for arch in ARCHITECTURES}
    for case in CASES:
        try:
            reached[case.arch] |= {program.file for program in programs(case)}
        except rf.TileError:
            pass
    assert set().union(*reached.values()) == files
    common = set.intersection(*reached.values())
    assert {f"{name}.cu" for name in (*KERNELS, "side_gradients", APPEND)} <= common


def disassembler():
    """nvdisasm, of a CUDA toolkit or of the wheel that holds nothing else."""
    found = shutil.which("nvdisasm")
    with suppress(metadata.PackageNotFoundError):
        files = metadata.files("nvidia-cuda-nvdisasm") or ()
        found = found or next((str(file.locate()) for file in files if file.name == "nvdisasm"), None)
    return found or pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")


@pytest.mark.parametrize("arch", ARCHITECTURES[1:])
def test_few_rows_of_16_bits_run_on_tensor_cores(arch, tmp_path):
    """At d = 128 and for 16 keys: S takes 2 products for each 32 numbers and 8 keys, O one for each 8 columns."""
    pytest.importorskip("cupy")
    tool, file = disassembler(), tmp_path / "kernel.cubin"
    (program,) = programs(Case(arch, DECODE, "bfloat16", 128, "paged"))
    assert program.file == "fa2_few_rows.cu"
    file.write_bytes(kept.compile_log(program.text, program.arch)[0])
    code = subprocess.run([tool, "-c", file], capture_output=True, text=True, check=True, timeout=120).stdout
    found = Counter(re.findall(r"\b(HMMA|LDGSTS)\b", code))
    assert found["HMMA"] == 2 * 4 * 2 + 16 and found["LDGSTS"] >= 16


@pytest.mark.parametrize("options", ["plain", "paged", "17 rows"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_few_rows_ask_for_Q_before_keys_and_wait_for_no_length(d, options, tmp_path):
    """What is asked for behind a queue of copies comes microseconds later. So, from the place where kernels before have
    ended to the first copy: lengths, each in two words that nothing looks at, then Q, at which nothing looks either,
    and little arithmetic."""
    pytest.importorskip("cupy")
    if (d, options) == (256, "17 rows"):
        pytest.skip("no case of the table")
    (program,) = programs(Case("sm_90a", DECODE, "float16", d, options))
    file = tmp_path / "kernel.cubin"
    file.write_bytes(kept.compile_log(program.text, program.arch)[0])
    code = subprocess.run([disassembler(), "-c", file], capture_output=True, text=True, check=True, timeout=120).stdout
    begun = code[code.index("ACQBULK") : code.index("LDGSTS")]
    loads = re.findall(r"\b(LDG\.E[\w.]*) (R\d+),", begun)
    lengths = [register for name, register in loads if name == "LDG.E.STRONG.GPU"]
    assert len(lengths) == len(set(lengths)) == 2 * 2  # of queries and of keys; nothing here wants the offset
    # No instruction on the way to the copies has one of them as an operand
    for name, register in loads:
        first, words = int(register[1:]), 4 if "128" in name else 1
        behind = begun[begun.index(f"{name} {register},") :].split(";")[1:]
        operands = "|".join(f"R{n}" for n in range(first, first + words))
        assert not [line for line in behind if re.search(rf"(?<!\w)({operands})\b", line)], (name, register)
    eights = 4 if options == "17 rows" else 1  # of rows
    assert sum(name.startswith("LDG.E.128") for name, _ in loads) == eights * d // 32
    assert not re.findall(r"LDG\.E\.128", code[code.index("LDGSTS") : code.index("HMMA")])
    assert begun.count(";") < (170 if options == "plain" else 300)


def instructions(program, kernel, tmp_path):
    """How often each instruction stands in a kernel, without its modifiers."""
    file = tmp_path / "kernel.cubin"
    file.write_bytes(kept.compile_log(program.text, program.arch)[0])
    code = subprocess.run([disassembler(), "-c", file], capture_output=True, text=True, check=True, timeout=120).stdout
    (body,) = re.findall(rf"^\.text\.{kernel}:$(.*?)(?=^\.text|\Z)", code, re.DOTALL | re.MULTILINE)
    return Counter(re.findall(r"^\s*/\*\w+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9]+)", body, re.MULTILINE))


@pytest.mark.parametrize("arch", ARCHITECTURES[1:])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_gradients_of_16_bits_run_on_tensor_cores(d, arch, tmp_path):
    """A warp has sixteen keys and 64 rows of Q at a time, or 32 and 32, for four products; rows of which the band hides
    some are in code of their own. In dQ it has its share of all rows and keys. The sums of dQ go to memory sixteen
    bytes at a time where the hardware can. On sm_90 of a call that its own kernel leaves to this one."""
    pytest.importorskip("cupy")
    options = "causal, M given" if arch == "sm_90a" else "causal"
    program, side = programs(Case(arch, "fa2_backward", "bfloat16", d, options))
    assert (program.file, side.file) == ("mma/fa2_backward.cu", "side_gradients.cu")
    found = instructions(program, "fa2_backward_keys", tmp_path)
    warps, pieces = program.launched["fa2_backward_keys"][0] // 32, d // 8  # of 16 x 8 numbers, in sixteen rows
    br, bc, sixteens, parts = (
        int(re.search(rf"int {name} = (\d+);", program.text)[1]) for name in ("BR", "BC", "SIXTEENS", "COLUMN_PARTS")
    )
    rows = br * bc // (warps * 16 * sixteens)  # of a warp
    wide = 2 * sixteens * pieces // (2 * parts) > 8 and d > 64
    partly = min(rows, (32 if wide else 64) // sixteens)
    products = 2 * (rows + partly) + 2 * (rows + partly) // parts + 2 * rows * (parts - 1) // parts
    turns = 2 if br * d > 64 * 32 * warps else 1  # of dQ, each half of the rows
    assert found["HMMA"] == sixteens * products // 16 * pieces + br // 16 * pieces * (bc // 16) // warps // turns
    assert sixteens == 2 or d >= 128
    assert found["LDSM"] <= (0.47 if sixteens == 2 else 0.64 if br > 32 else 0.75) * found["HMMA"]
    additions = sum(count for name, count in found.items() if name.startswith("RED"))
    assert additions == br // 16 * pieces // warps // turns * (1 if int(re.search(r"\d+", arch)[0]) >= 90 else 4)
    assert not found.keys() & {"LDL", "STL"}


@pytest.mark.parametrize("arch", ARCHITECTURES[1:])
@pytest.mark.parametrize("d", [64, 128])
def test_many_rows_of_16_bits_run_on_tensor_cores(arch, d, tmp_path):
    """A warp's tile takes a product for each 16 rows, 8 keys and 16 numbers of d, and as many of P V; operands come
    four registers at a time, from copies that pass registers by. Nothing goes to memory in between. On sm_90 of a call
    that its own kernel leaves to this one."""
    pytest.importorskip("cupy")
    options = "M given" if arch == "sm_90a" else "plain"
    (program,) = programs(Case(arch, "fa2_forward", "bfloat16", d, options))
    assert program.file == "mma/fa2_forward.cu"
    found = instructions(program, "fa2_forward", tmp_path)
    br, bc = (int(re.search(rf"\b{name} = (\d+);", program.text)[1]) for name in ("BR", "BC"))
    steps = d // 16, min(d // 16, 4 if arch in ("sm_100a", "sm_120") else 16)  # of P V and of Q K^T that are unrolled
    assert found["HMMA"] == br // 64 * (bc // 8) * sum(steps)
    assert found["LDSM"] == br // 64 * steps[1] + bc // 16 * sum(steps)
    assert found["LDGSTS"] >= (br + 2 * bc) // 16 * (d // 64)
    assert not found["LDL"] and not found["STL"]


@pytest.mark.parametrize("options", ["short", "causal", "packed"])
@pytest.mark.parametrize("dtype, d", [("bfloat16", 64), ("bfloat16", 128), ("float16", 128)])
def test_backward_products_of_warpgroups_overlap(dtype, d, options, tmp_path):
    """The assembler leaves them side by side, no register goes to memory, and most exponentials are taken as dS is
    computed, whether something is hidden or not. A band has two loops, of steps where it hides something and where it
    does not, and at d = 128 a third dQ, where a warpgroup sees nothing."""
    pytest.importorskip("cupy")
    tool, file = disassembler(), tmp_path / "kernel.cubin"
    program = next(p for p in programs(Case("sm_90a", "fa2_backward", dtype, d, options)) if p.file.startswith("sm90/"))
    cubin, log = kept.compile_log(program.text, program.arch)
    assert not re.findall(r"\(C75\d\d\).*", log)
    file.write_bytes(cubin)
    code = subprocess.run([tool, "-c", file], capture_output=True, text=True, check=True, timeout=120).stdout
    code = code[code.index(".text.fa2_backward_keys") :]
    names = r"HGMMA|WARPGROUP\.DEPBAR|WARPGROUP\.ARRIVE|BRA|MUFU\.EX2|FADD|FMUL|LDL|STL|REDG|UBLKRED|UIADD3\.64"
    code = re.findall(rf"({names})\b", code)
    found = Counter(code)
    br, bc, band = 128 if d == 64 else 64, 128, options != "short"
    # S and dP are sums over d, dQ over keys, dK and dV over rows; dP has 64 rows at a time, and so has dQ where one
    # warpgroup computes all of it
    loops = 1 + band
    times = 2 if d == 64 else loops + band  # dQ
    assert found["HGMMA"] == loops * (d // 16 * (1 + br // 64) + 2 * br // 16) + times * bc // 16
    # Of a factor in shared memory the lower word moves: whole ones would be added to in 64 bits in front of a product
    assert not found["UIADD3.64"]
    # A thread has twice 32 numbers of dQ and adds four at a time, or one thread those of each warpgroup in bulk
    assert not found.keys() & {"LDL", "STL"}
    assert (found["REDG"], found["UBLKRED"]) == ((2 * 32 // 4, 0) if d == 64 else (0, 2))
    # What follows the wait for dP, up to a branch or the next products: dP - delta, or P dP, which began with -delta
    behind = [re.split("BRA|WARPGROUP.ARRIVE", part)[0] for part in " ".join(code).split("WARPGROUP.DEPBAR")[1:]]
    first = "FMUL" if d == 64 else "FADD"
    computing = [part.partition(first)[2] for part in behind if part.count(first) == 32]
    summed = d * ("constexpr int DIVIDED = 1;" in program.text)  # numbers of dK and dV of a thread, of each share
    assert d == 128 or found["FADD"] - summed < 32  # delta is nowhere else taken off
    assert len(computing) == loops * br // 64  # of each 64 rows
    # Where nothing is hidden, the second 64 rows' exponentials are taken as the products before them run: a branch
    # makes them as many as elsewhere, and the kernel slower (bench/notes/sm90.md, run I)
    together = computing[:-1] if d == 64 else computing
    assert all(part.count("MUFU.EX2") > 16 for part in together), [part.count("MUFU.EX2") for part in computing]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("d, T, options", [
    (128, 4096, {}), (128, 1024, {}), (64, 4096, {}), (128, 4096, {"causal": True}), (128, 1024, {"causal": True}),
    (128, 512, {"causal": True}), (128, 4096, {"causal": True, "deterministic": True}), (64, 4096, {"causal": True}),
    (128, 5824, {"B": 1, "group": 16}), (128, 8192, {"group": 16, "causal": True}),
    (64, 8192, {"group": 32, "causal": True}),
    (128, 2048, {"group": 4, "causal": True}), (64, 2048, {"group": 4, "causal": True}),
    (128, 4096, {"deterministic": True}), (64, 4096, {"causal": True, "deterministic": True}),
    (128, 1152, {"causal": True, "deterministic": True}),
    (128, 2048, {"B": 4, "group": 8, "causal": True, "deterministic": True}),
    (64, 8192, {"group": 32, "causal": True, "deterministic": True}),
    (128, 2048, {"causal": True}), (128, 1536, {"causal": True}), (64, 512, {"causal": True, "deterministic": True}),
    (128, 1024, {"causal": True, "deterministic": True}), (128, 512, {"deterministic": True}),
])  # fmt: skip
def test_no_copies_stand_between_backward_products(dtype, d, T, options, tmp_path):
    """The words that all factors share stay where products take them from (UPPER_HALVES): between products that follow
    each other there are additions, and a copy for fewer than one of eight, at d = 64 for at most one of three. In none
    of these forms, pairs among them, does a register go to memory or the assembler wait between products."""
    pytest.importorskip("cupy")
    device = Device("sm_90a")
    with device.current():
        options = dict(options)
        B, group = options.pop("B", 16384 // T), options.pop("group", 1)
        x, k = (Array((B, 2048 // d // n, T, d), DTYPES[dtype]) for n in (1, group))
        rf.attention_backward(x, x, k, k, x, Array(x.shape[:3], np.float32), **options)
    program = next(p for p in device.programs if p.file == "sm90/fa2_backward.cu")
    assert ("TOGETHER = 1;" in program.text) == (group > 1)
    cubin, log = kept.compile_log(program.text, program.arch)
    assert not re.findall(r"\(C75\d\d\).*", log)
    (tmp_path / "kernel.cubin").write_bytes(cubin)
    command = [disassembler(), "-c", tmp_path / "kernel.cubin"]
    code = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    code = code[code.index(".text.fa2_backward_keys") :]
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", code, re.MULTILINE)
    places = [n for n, name in enumerate(found) if name == "HGMMA"]
    between = [found[n + 1 : following] for n, following in zip(places, places[1:], strict=False) if following - n < 10]
    assert len(between) > len(places) * 2 // 3
    copies = sum(names.count("UMOV") for names in between)
    assert 3 * copies <= len(between) if d == 64 else 8 * copies < len(between)
    assert not {"LDL", "STL"} & set(found)


@pytest.mark.parametrize("options", ["plain", "causal", "packed", "deterministic"])
@pytest.mark.parametrize("dtype, d", [("bfloat16", 192), ("bfloat16", 256), ("float16", 256)])
def test_backward_products_of_many_columns_overlap(dtype, d, options, tmp_path):
    """A warpgroup for S and dV, one for dP and dK, one for dQ: none goes to memory for want of registers, or has the
    assembler wait between its products."""
    pytest.importorskip("cupy")
    program = next(p for p in programs(Case("sm_90a", "fa2_backward", dtype, d, options)) if p.file.startswith("sm90/"))
    assert program.file == "sm90/fa2_backward_wide.cu"
    cubin, log = kept.compile_log(program.text, program.arch)
    assert not re.findall(r"\(C75\d\d\).*", log)
    assert not any(spilled(used) for used in compiler.usage(log).values())
    found = instructions(program, "fa2_backward_keys", tmp_path)
    # S and dP are sums over d; dV and dK over 64 rows; dQ over 64 keys, in patches of 64 columns at d = 256
    assert found["HGMMA"] == 2 * d // 16 + 4 * (2 + 2 + 4 if d == 256 else 1 + 1 + 3)
    # dQ's sums, and in a fixed order the count of who has added to them
    assert found["REDG"] == d // 8 + (options == "deterministic") and not found.keys() & {"LDL", "STL"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("d", [128, 192, 256])
@pytest.mark.parametrize("name, options", [
    ("causal", dict(causal=True)), ("causal, groups", dict(causal=True, group=4)), ("window", dict(window=(300, 20))),
    ("packed", {}), ("packed, causal", dict(causal=True)), ("packed, causal, groups", dict(causal=True, group=4)),
    ("packed, window", dict(window=(300, 20))),
])  # fmt: skip
def test_no_form_in_a_fixed_order_goes_to_memory_for_want_of_registers(dtype, d, name, options):
    """Threads that take turns, and rows that go down, take registers of warps that have few."""
    pytest.importorskip("cupy")
    device, options = Device("sm_90a"), options | {"deterministic": True}
    group, T, dtype = options.pop("group", 1), 512, DTYPES[dtype]
    with device.current():
        if "packed" in name:
            x, k, starts = Array((T, 8, d), dtype), Array((T, 8 // group, d), dtype), np.array([0, 200, T], np.int32)
            lse = Array((8, T), np.float32)
            rf.attention_varlen_backward(x, x, k, k, x, lse, starts, starts, layout="bthd", **options)
        else:
            x, k = Array((32, 8, T, d), dtype), Array((32, 8 // group, T, d), dtype)
            rf.attention_backward(x, x, k, k, x, Array(x.shape[:3], np.float32), **options)
    (program,) = (p for p in device.programs if p.file.startswith("sm90/fa2_backward"))
    assert ("_wide" in program.file) == (d > 128) and "FUSED = 1" not in program.text
    log = kept.compile_log(program.text, program.arch)[1]
    assert not re.findall(r"\(C75\d\d\).*", log)
    assert not any(spilled(used) for used in compiler.usage(log).values())


@pytest.mark.parametrize("arch, dtype", [("sm_75", "float32"), ("sm_90a", "float32"), ("sm_90a", "float64")])
def test_products_run_on_the_units_that_the_plan_chose(arch, dtype, tmp_path):
    """Tensor cores would cut float32 to fewer bits; only kernels that split its numbers first may use them. float64 is
    multiplied by those that take it; its other multiply-adds are the exponential."""
    pytest.importorskip("cupy")
    tool, file = disassembler(), tmp_path / "kernel.cubin"
    program, *more = programs(Case(arch, "fa2_forward", dtype, 64, "plain"))
    assert [one.file for one in more] == ["mma/split_inputs.cu"] * ((arch, dtype) == ("sm_90a", "float32"))
    file.write_bytes(kept.compile_log(program.text, program.arch)[0])
    code = subprocess.run([tool, "-c", file], capture_output=True, text=True, check=True, timeout=120).stdout
    found = Counter(re.findall(r"\b(FFMA|DFMA|HMMA|DMMA)\b", code))
    if arch == "sm_75":
        assert found.keys() == {"FFMA"} and found.total() > 100
    elif dtype == "float32":
        assert found.keys() == {"HMMA", "FFMA"} and found["HMMA"] > found["FFMA"]
    else:  # 16 x 8 pieces: 8 of S and 8 of O a warp, each unrolled twice
        assert found.keys() == {"DMMA", "DFMA"} and found["DMMA"] >= 16


def _structs(file):
    """The members of each struct of a file: [(type, name, count or None)]."""
    text = re.sub(r"//.*", "", (compiler.CUDA / file).read_text())
    found = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", text, re.DOTALL):
        found[name] = []
        for statement in filter(None, map(str.strip, body.split(";"))):
            if statement.startswith("typedef"):
                continue
            kind, names = re.fullmatch(r"(?:const )?(long long|\w+)\*? (.+)", statement, re.DOTALL).groups()
            for member in re.split(r",\s*", names):
                found[name].append((kind, *re.fullmatch(r"(\w+)(?:\[(\w+)\])?", member).groups()))
    return found


@pytest.mark.parametrize("file, words", [("call.cuh", launch.FIELDS), ("append_kv.cu", append_kv.FIELDS)])
def test_fields_are_those_of_the_struct(file, words):
    """The text's own assertion compares their number; this compares names and order."""
    structs, fields = _structs(file), []
    for kind, name, count in structs["Call"]:
        if kind in structs:
            fields += [f"{name}.{part}" for _, part, _ in structs[kind]]
        elif count:
            fields += [f"{name}.{n}" for n in range(getattr(launch, count))]
        elif name != "unused":  # half a word
            fields.append(name)
    assert fields == words


def main():
    parser = argparse.ArgumentParser(description="Make kernel_resources.json anew.")
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args()
    write()


if __name__ == "__main__":
    main()
