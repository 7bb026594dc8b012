"""Shared settings of the suite: how many problems Hypothesis draws, and fixtures.

Examples per property test: 30, or ``RAWFLASH_EXAMPLES``. Profiles, chosen by ``--hypothesis-profile`` or
``HYPOTHESIS_PROFILE``: "default"; "ci" (the one where the variable ``CI`` is set), the same problems on
every run; "thorough", at least 500 problems.
"""

import os
import sys
import time
from itertools import product
from pathlib import Path

import gpu_record
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from strategies import DTYPES

import rawflash as rf
from rawflash import arrays

DEFAULT = "not gpu and not emulated and not simulated"  # what runs where no marker is asked for, see setup.cfg
EXAMPLES = int(os.environ.get("RAWFLASH_EXAMPLES", "30"))

# No deadline: the first call of a kernel compiles it, and machines are shared. Drawing a whole call takes
# milliseconds, which the health check on slow generation would count against a busy machine.
_COMMON = dict(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", max_examples=EXAMPLES, **_COMMON)
settings.register_profile("ci", max_examples=EXAMPLES, derandomize=True, **_COMMON)
settings.register_profile("thorough", max_examples=max(500, EXAMPLES), **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default"))


def pytest_addoption(parser):
    parser.addoption("--gpu-part", type=gpu_record.part_named, metavar="N/OF",
                     help="with -m gpu: run the N-th of OF parts of the tests; see gpu_record.py")  # fmt: skip


def pytest_configure(config):
    """Of several processes of ``pytest -n N`` each has one thread for products of NumPy, which would else be as many as
    there are cores; with ``-m gpu`` each has another GPU first, and the others behind it."""
    if config.option.gpu_part and config.option.markexpr != "gpu":
        raise pytest.UsageError("--gpu-part is for -m gpu")
    if getattr(config.option, "numprocesses", None):  # the process that starts the others
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    worker, gpus = os.environ.get("PYTEST_XDIST_WORKER", ""), len(list(Path("/dev").glob("nvidia[0-9]*")))
    if config.option.markexpr == "gpu" and worker and gpus > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        first = int(worker.removeprefix("gw"))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str((first + n) % gpus) for n in range(gpus))


@pytest.hookimpl(trylast=True)  # a part is one of the tests that -m has left
def pytest_collection_modifyitems(config, items):
    """GPU tests that take long come first, as with ``--maxschedchunk 1`` none begins late then: those of numba_cuda
    compile for minutes, and the oracle of 4097 rows takes as long."""
    if config.option.markexpr == "gpu":
        items.sort(key=lambda item: "test_gpu_numba" not in item.nodeid and "-4097]" not in item.nodeid)
    if config.option.gpu_part:
        gpu_record.take_part(config, items)


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """After ``pytest -m gpu``: its record. Each of xdist's processes gets here; the first has seen all reports."""
    if not hasattr(config, "workerinput"):
        gpu_record.after_pytest(terminalreporter, exitstatus, config)


@pytest.fixture(scope="session", autouse=True)
def compiled(request, tmp_path_factory):
    """Of several processes each compiles some kernels of numba_cpu: all compiling all is half of a first run's time."""
    config = request.config
    if "PYTEST_XDIST_WORKER" not in os.environ or config.option.markexpr != DEFAULT:
        return
    folder = tmp_path_factory.getbasetemp().parent / "compiled"  # one for all processes of this run
    folder.mkdir(exist_ok=True)
    kernels = [f"{direction} {dtype}" for direction, dtype in product(("backward", "forward"), ("float32", "float64"))]
    kernels += ["forward float16", "forward bfloat16"]
    for name in kernels:
        try:
            (folder / name).mkdir()
        except FileExistsError:  # another process compiles it
            continue
        try:
            _compile(*name.split())
        finally:
            (folder / f"{name} done").touch()
    end = time.monotonic() + 300
    while time.monotonic() < end and not all((folder / f"{name} done").exists() for name in kernels):
        time.sleep(0.1)


def _compile(direction, dtype):
    few, many = (np.zeros((1, n, 2), DTYPES[dtype]) for n in (2, 16))
    for algorithm in ("fa1", "fa2"):
        for options in ({}, {"softcap": 1.0}):  # kernels of fa2 that touch scores are others than those that do not
            run = dict(algorithm=algorithm, backend="numba_cpu", **options)
            if direction == "backward":
                rf.attention_backward(many, many, many, many, many, np.zeros(many.shape[:2], dtype), **run)
                continue
            if algorithm == "fa2":  # has another kernel for few rows, for each dtype
                rf.attention(few, few, few, **run)
            if dtype in ("float32", "float64"):
                rf.attention(many, many, many, **run)


@pytest.fixture(autouse=True)
def no_earlier_calls(monkeypatch):
    """What one test's calls were planned with (tables, chips) is nothing to the next."""
    monkeypatch.setattr("rawflash.problem._MEMO", {})


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine without the packages that GPUs need: where they are, with a driver or without, CUDA has its own say of
    arrays that are on none."""
    for package in ("cupy", "numba_cuda"):
        monkeypatch.setitem(sys.modules, package, None)
    arrays.require_cupy.cache_clear()
    yield
    arrays.require_cupy.cache_clear()


@pytest.fixture
def rng():
    """A generator with a fixed seed: a test that fails fails again."""
    return np.random.default_rng(20220527)


@pytest.fixture(params=["numpy_tiled", "numba_cpu"])
def cpu_backend(request):
    """The name of each backend that runs everywhere. One that cannot load is a failure, not a skip."""
    return request.param
