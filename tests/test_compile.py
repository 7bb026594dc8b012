"""Text to cubin: headers, NVRTC, the disk cache and loading. No GPU is needed, except where a test says so."""

import hashlib
import os
import subprocess
import sys
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rawflash.backends.cupy_raw import compile as compiler
from rawflash.errors import BackendError

cupy = pytest.importorskip("cupy")

COPY = 'extern "C" __global__ void copy(float *x) { x[threadIdx.x] = x[threadIdx.x + 32]; }\n'
SPILLS = r"""
__device__ __noinline__ float helper(float x) { return x * x; }
extern "C" __global__ void reverse(float *x) {
    __shared__ float s[64];
    s[threadIdx.x] = helper(x[threadIdx.x]);
    __syncthreads();
    x[threadIdx.x] = s[63 - threadIdx.x];
}
// 96 live values in the 32 registers that 2048 threads an SM leave to each
extern "C" __global__ void __launch_bounds__(1024, 2) spills(float *x) {
    float a[96];
    #pragma unroll
    for (int i = 0; i < 96; ++i) a[i] = x[i * 1024 + threadIdx.x];
    #pragma unroll 1
    for (int r = 0; r < 10; ++r) {
        #pragma unroll
        for (int i = 0; i < 96; ++i) a[i] = a[i] * a[(i + 1) % 96] + a[(i * 7) % 96];
    }
    #pragma unroll
    for (int i = 0; i < 96; ++i) x[i * 1024 + threadIdx.x] = a[i];
}
"""
ROOT = Path(compiler.__file__).parents[3]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty cache of the test's own; the folder does not exist yet."""
    path = tmp_path / "a" / "cache"
    monkeypatch.setenv("RAWFLASH_CACHE_DIR", str(path))
    return path


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Puts files where the kernels' text is looked for."""
    root = tmp_path / "cuda"
    monkeypatch.setattr(compiler, "CUDA", root)

    def put(files):
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return put


@pytest.fixture
def compiled(monkeypatch):
    """The architectures that NVRTC was asked for, one entry a compile."""
    calls = []
    through = compiler._compile

    def counting(text, arch, options):
        calls.append(arch)
        return through(text, arch, options)

    monkeypatch.setattr(compiler, "_compile", counting)
    return calls


def files(folder):
    return sorted(folder.iterdir())


def python(*lines, **environment):
    """A fresh interpreter that runs the lines."""
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


# ---- text


def test_headers_are_put_in_once_and_lines_keep_their_numbers(texts):
    texts({
        "tile.cuh": "struct Tile {};\n",
        "softmax.cuh": '#include "tile.cuh"\nfloat softmax;\n',
        "mma/wrap.cuh": '#include "../tile.cuh"\n  #  include "softmax.cuh"\n',  # from where it lies, or from the root
        "mma/kernel.cu": '#include <cuda_fp16.h>\n#include "wrap.cuh"\n// #include "absent.cuh"\nint main_line_4;\n',
    })
    text = compiler.source("mma/kernel.cu", 'constexpr int BR = 64;\n#include "tile.cuh"\n')
    assert text.count("struct Tile") == text.count("float softmax") == 1
    assert text.index("BR = 64") < text.index("struct Tile") < text.index("softmax;") < text.index("main_line_4")
    assert "#include <cuda_fp16.h>" in text
    assert '#include "tile.cuh"' not in text
    lines = text.split("\n")
    assert lines[0] == '#line 1 "preamble"'
    assert lines[lines.index("int main_line_4;") - 2] == '#line 3 "mma/kernel.cu"'


def test_a_header_that_is_not_there_is_named_with_the_line_that_wants_it(texts):
    texts({"tile.cuh": '\n#include "nowhere.cuh"\n', "kernel.cu": '#include "tile.cuh"\n'})
    with pytest.raises(BackendError, match=r"tile\.cuh\(2\).*nowhere\.cuh"):
        compiler.source("kernel.cu", "")


@pytest.mark.parametrize(
    ("preamble", "header", "kernel", "place"),
    [
        ("int BR = 64;\nwrong", "int a;\n", "int c;\n", "preamble(2)"),
        ("", "int a;\nint b;\nwrong\n", "int c;\n", "tile.cuh(3)"),
        ("", "int a;\n\n\n\n\n", "int c;\n\nwrong here;\n", "mma/kernel.cu(4)"),
    ],
)
def test_an_error_names_the_file_and_line(texts, preamble, header, kernel, place):
    texts({"tile.cuh": header, "mma/kernel.cu": '#include "tile.cuh"\n' + kernel})
    with pytest.raises(BackendError) as caught:
        compiler.cubin(compiler.source("mma/kernel.cu", preamble), "sm_90a", ("-DNOTHING",))
    message = str(caught.value)
    assert f"{place}: error" in message
    assert "sm_90a" in message and "-DNOTHING" in message


# ---- compiler


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_cubin_is_an_elf_file_of_the_architecture(arch):
    code = compiler.cubin(COPY, arch)
    assert code[:4] == b"\x7fELF"
    assert b"copy" in code
    # the program headers come last in the file, whole: their offset, size and number stand in its header
    at = int.from_bytes(code[32:40], "little")
    size, number = (int.from_bytes(code[i : i + 2], "little") for i in (54, 56))
    assert at + size * number == len(code)


def test_the_a_of_sm_90a_reaches_the_compiler():
    text = 'extern "C" __global__ void f() { asm volatile("wgmma.fence.sync.aligned;"); }'
    assert compiler.cubin(text, "sm_90a")
    with pytest.raises(BackendError, match="wgmma"):
        compiler.cubin(text, "sm_90")


def test_options_reach_the_compiler():
    text = 'extern "C" __global__ void f(int *x) { *x = NUMBER; static_assert(__cplusplus >= 201703L); }'
    assert compiler.cubin(text, "sm_80", ("-DNUMBER=3",))
    with pytest.raises(BackendError, match="NUMBER"):
        compiler.cubin(text, "sm_80")


@pytest.mark.parametrize("arch", ["sm_11", "compute_90", "nonsense"])
def test_an_architecture_that_is_none(arch):
    with pytest.raises(BackendError, match=arch):
        compiler.cubin(COPY, arch)


def test_a_long_log_starts_at_the_first_error_and_ends():
    text = "__device__ void f() { int unused; }\n" + "wrong;\n" * 90
    with pytest.raises(BackendError) as caught:
        compiler.cubin(text, "sm_80")
    lines = str(caught.value).split("\n")
    assert "kernel.cu(2): error" in lines[1]
    assert len(lines) == compiler.LOG_LINES + 2
    assert lines[-1].startswith("... and ")


def test_usage_reads_registers_spills_and_shared_memory():
    code, log = compiler.compile_log(SPILLS, "sm_90a")
    assert code[:4] == b"\x7fELF"
    usage = compiler.usage(log)
    assert set(usage) == {"reverse", "spills"}  # kernels, not the functions that they call
    assert usage["reverse"]["shared"] == 64 * 4
    assert usage["reverse"]["spill_stores"] == usage["reverse"]["spill_loads"] == 0
    assert usage["spills"]["registers"] == 32
    assert min(usage["spills"][key] for key in ("spill_stores", "spill_loads", "stack")) > 0
    assert usage["spills"]["shared"] == 0


def test_usage_of_nothing():
    assert compiler.usage("ptxas info    : 0 bytes gmem\n") == {}


def test_versions():
    major, minor = compiler.nvrtc_version()
    assert major >= 12 and minor >= 0
    assert f"{major}.{minor}" in compiler._compiler()


def test_without_cupy_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    for call in (compiler.nvrtc_version, lambda: compiler.cubin(COPY, "sm_80"), lambda: compiler.load(COPY, "sm_80")):
        with pytest.raises(BackendError, match=r'pip install "rawflash\[cuda13\]"'):
            call()


def test_without_nvrtc_the_error_says_what_to_install(monkeypatch):
    def missing():
        raise RuntimeError("no libnvrtc")

    cuda = SimpleNamespace(nvrtc=SimpleNamespace(getVersion=missing))
    monkeypatch.setattr(compiler, "_cupy", lambda: SimpleNamespace(cuda=cuda))
    with pytest.raises(BackendError, match=r"rawflash\[cuda13\].*no libnvrtc"):
        compiler.cubin(COPY, "sm_80")


# ---- disk cache


def test_a_text_is_compiled_once(folder, compiled):
    first = compiler.cubin(COPY, "sm_80")
    assert compiler.cubin(COPY, "sm_80") == first
    assert compiled == ["sm_80"]
    (file,) = files(folder)
    assert file.suffix == ".cubin"
    assert file.read_bytes() == hashlib.sha256(first).digest() + first


def test_the_key_holds_all_that_the_code_depends_on(folder, compiled, monkeypatch):
    compiler.cubin(COPY, "sm_80")
    compiler.cubin(COPY + " ", "sm_80")
    compiler.cubin(COPY, "sm_90a")
    compiler.cubin(COPY, "sm_80", ("-DA=1", "-DB=2"))
    compiler.cubin(COPY, "sm_80", ("-DB=2", "-DA=1"))
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_compiler", lambda: "13.99.1")
        compiler.cubin(COPY, "sm_80")
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "OPTIONS", ("--std=c++20",))
        compiler.cubin(COPY, "sm_80")
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "CACHE_FORMAT", -1)
        compiler.cubin(COPY, "sm_80")
    assert len(compiled) == len(files(folder)) == 8


def test_nvrtc_is_told_apart_by_its_wheels_or_by_its_own_word(monkeypatch):
    installed = {}

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    ask = compiler._compiler.__wrapped__
    told = {ask()}
    assert told == {"{}.{}".format(*compiler.nvrtc_version())}
    wheels = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
    for wheel, number in zip(wheels, ("13.0.48", "13.0.88", "12.9.86"), strict=True):
        installed[wheel] = number
        told.add(ask())
    assert len(told) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:20],
        lambda content: content[: compiler.CHECKSUM_BYTES],
        lambda content: content[:-1],
        lambda content: content[:100] + bytes([content[100] ^ 1]) + content[101:],
        lambda content: hashlib.sha256(b"").digest(),
    ],
    ids=["empty", "inside the checksum", "checksum alone", "last byte", "one bit", "valid but nothing"],
)
def test_a_damaged_file_is_replaced(folder, compiled, damage):
    code = compiler.cubin(COPY, "sm_80")
    (file,) = files(folder)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert compiler.cubin(COPY, "sm_80") == code
    assert len(compiled) == 2
    assert files(folder) == [file] and file.read_bytes() == whole


def test_a_folder_that_cannot_be_made(tmp_path, compiled, monkeypatch):
    plain = tmp_path / "plain"
    plain.write_text("a file")
    for place in (plain, plain / "below"):  # below a regular file nothing can be made, not even by root
        monkeypatch.setenv("RAWFLASH_CACHE_DIR", str(place))
        assert compiler.cubin(COPY, "sm_80")[:4] == b"\x7fELF"
    assert len(compiled) == 2
    assert plain.read_text() == "a file"


def test_a_folder_where_the_file_should_be(folder, compiled):
    code = compiler.cubin(COPY, "sm_80")
    (file,) = files(folder)
    file.unlink()
    file.mkdir()
    assert compiler.cubin(COPY, "sm_80") == code
    assert files(folder) == [file]


@pytest.mark.parametrize("broken", ["write_bytes", "replace"])
def test_a_folder_that_cannot_be_written(folder, compiled, monkeypatch, broken):
    def refuse(*args):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(*((Path, "write_bytes") if broken == "write_bytes" else (os, "replace")), refuse)
    codes = {compiler.cubin(COPY, "sm_80") for _ in range(2)}
    assert len(codes) == 1 and len(compiled) == 2
    assert files(folder) == []  # nothing half written stays


def test_a_file_that_cannot_be_read(folder, compiled, monkeypatch):
    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    code = compiler.cubin(COPY, "sm_80")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert compiler.cubin(COPY, "sm_80") == code
    assert len(compiled) == 2


def test_where_the_folder_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("RAWFLASH_CACHE_DIR", str(tmp_path / "own"))
    assert compiler.cache_folder() == tmp_path / "own"
    monkeypatch.setenv("RAWFLASH_CACHE_DIR", "")
    assert compiler.cache_folder() == tmp_path / "xdg" / "rawflash"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert compiler.cache_folder() == tmp_path / ".cache" / "rawflash"


def test_without_a_home_nothing_is_kept(monkeypatch, compiled):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("RAWFLASH_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert compiler.cubin(COPY, "sm_80") == compiler.cubin(COPY, "sm_80")
    assert len(compiled) == 2


def test_threads_that_want_one_text(folder):
    start = threading.Barrier(8)

    def job(_):
        start.wait(timeout=60)
        return compiler.cubin(SPILLS, "sm_90a")

    with ThreadPoolExecutor(8) as pool:
        codes = set(pool.map(job, range(8)))
    assert len(codes) == 1
    (file,) = files(folder)
    assert codes == {file.read_bytes()[compiler.CHECKSUM_BYTES :]}


@pytest.mark.slow
def test_processes_that_want_one_text(folder, tmp_path):
    """They start together on an empty folder; then one finds the file, and needs neither CuPy nor NVRTC."""
    go = tmp_path / "go"
    lines = (
        "import hashlib, pathlib, sys, time",
        "from rawflash.backends.cupy_raw import compile as compiler",
        "compiler.nvrtc_version()",
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.001)",
        f"print(hashlib.sha256(compiler.cubin({SPILLS!r}, 'sm_90a')).hexdigest())",
    )
    processes = [python(*lines) for _ in range(4)]
    go.touch()
    hashes = {output(process) for process in processes}
    (file,) = files(folder)
    assert hashes == {file.read_bytes()[: compiler.CHECKSUM_BYTES].hex()}
    later = python(lines[0], lines[1], lines[-1], "print('cupy' in sys.modules)")
    found, loaded = output(later).split()
    assert {found} == hashes
    if "nvidia" in compiler._compiler():  # told by a wheel
        assert loaded == "False"


def test_importing_loads_no_cupy():
    process = python(
        "import sys, rawflash, rawflash.backends.cupy_raw.compile as compiler",
        "compiler.usage(''), compiler.cache_folder()",
        "print('cupy' in sys.modules)",
    )
    assert output(process) == "False"


# ---- device


@pytest.fixture
def machine(monkeypatch):
    """Pretended devices, the current one, and what was loaded and set."""
    state = SimpleNamespace(current=0, loaded=[], attributes=[])

    class Module:
        def load(self, code):
            state.loaded.append((state.current, code))

    cuda = SimpleNamespace(
        Module=Module,
        Device=lambda number: SimpleNamespace(compute_capability=("90", "120", "80", "100")[number]),
        runtime=SimpleNamespace(getDevice=lambda: state.current),
        driver=SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
            funcSetAttribute=lambda *args: state.attributes.append(args),
        ),
        nvrtc=cupy.cuda.nvrtc,
    )
    monkeypatch.setattr(compiler, "_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(compiler, "_modules", {})
    monkeypatch.setattr(compiler, "_loading", {})
    compiler.arch_of.cache_clear()
    yield state
    compiler.arch_of.cache_clear()


def test_architectures_of_devices(machine):
    assert [compiler.arch_of(number) for number in range(4)] == ["sm_90a", "sm_120", "sm_80", "sm_100a"]


def test_a_module_is_loaded_once_a_device(machine, compiled):
    first = compiler.load(COPY, "sm_80")
    assert compiler.load(COPY, "sm_80") is first
    assert machine.loaded == [(0, compiler.cubin(COPY, "sm_80"))]
    assert compiler.load(COPY, "sm_90a") is not first
    machine.current = 1
    assert compiler.load(COPY, "sm_80") is not first
    assert [device for device, _ in machine.loaded] == [0, 0, 1]
    assert compiled == ["sm_80", "sm_90a"]


def test_threads_load_a_module_once(machine, compiled):
    start = threading.Barrier(8)

    def job(_):
        start.wait(timeout=60)
        return compiler.load(SPILLS, "sm_90a")

    with ThreadPoolExecutor(8) as pool:
        modules = set(pool.map(job, range(8)))
    assert len(modules) == len(machine.loaded) == len(compiled) == 1


def test_a_text_that_fails_fails_again(machine):
    for _ in range(2):
        with pytest.raises(BackendError, match="wrong"):
            compiler.load("wrong", "sm_80")
    assert machine.loaded == []


def test_shared_memory_is_asked_for_by_the_function(machine):
    compiler.allow_shared(SimpleNamespace(ptr=77), 200_000)
    assert machine.attributes == [(77, 8, 200_000)]


@pytest.mark.gpu
def test_a_loaded_function_runs_with_all_the_shared_memory_there_is():
    text = r"""
    struct Words { float *x; long long n; };
    extern "C" __global__ void reverse(const __grid_constant__ Words words) {
        float *x = words.x;
        const int n = words.n;
        extern __shared__ float s[];
        for (int i = threadIdx.x; i < n; i += blockDim.x) s[i] = x[i];
        __syncthreads();  // all of s is there
        for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = s[n - 1 - i];
    }
    """
    device = cupy.cuda.Device()
    function = compiler.load(text, compiler.arch_of(device.id)).get_function("reverse")
    nbytes = device.attributes["MaxSharedMemoryPerBlockOptin"]
    compiler.allow_shared(function, nbytes)
    n = nbytes // 4
    x = cupy.arange(n, dtype=np.float32)
    function(1, 256, array("q", [x.data.ptr, n]), nbytes)
    np.testing.assert_array_equal(x.get(), np.arange(n, dtype=np.float32)[::-1])


def test_kernels_that_begin_early_await_those_before():
    """All kernels of such a text do, before anything else that another may have written: so it has one."""
    texts = {path.relative_to(compiler.CUDA).as_posix(): path.read_text() for path in compiler.CUDA.rglob("*.cu*")}
    assert [name for name, text in texts.items() if compiler.AWAITING in text] == ["fa2_few_rows.cu"]
    kernel = texts["fa2_few_rows.cu"].split("__global__")
    assert len(kernel) == 2 and kernel[1].count(compiler.AWAITING) == 1
    assert "return;" not in kernel[1].partition(compiler.AWAITING)[0]
    assert len(compiler._EARLY) == 72  # CUlaunchAttribute of cuda.h
