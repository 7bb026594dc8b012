"""What keeps compiled kernels apart on disk: one name, one function."""

import importlib
import pkgutil

import numpy as np
import pytest

import rawflash as rf

numba_cpu = pytest.importorskip("rawflash.backends.numba_cpu")


def dispatchers():
    """Every compiled function of the backend, by identity, helpers in closures included."""
    found = {}
    for module_info in pkgutil.iter_modules(numba_cpu.__path__):
        module = importlib.import_module(f"{numba_cpu.__name__}.{module_info.name}")
        values = list(vars(module).values())
        for kernels in getattr(module, "_kernels", {}).values():
            values += kernels if isinstance(kernels, tuple) else (kernels,)
        for value in values:
            if hasattr(value, "py_func") and hasattr(value, "overloads"):
                found[id(value)] = value
    return list(found.values())


def test_no_two_compiled_functions_share_a_name():
    """Numba tells functions of one name apart by a number that each process counts anew.

    Kernels that were compiled in different processes and loaded into one would then share the wrong helper;
    bfloat16 results were once stored as float16 that way.
    """
    names = [(d.py_func.__module__, d.py_func.__qualname__) for d in dispatchers()]
    assert len(names) > 40
    assert len(set(names)) == len(names), sorted(n for n in names if names.count(n) > 1)


@pytest.mark.parametrize(("algorithm", "T"), [("fa1", 5), ("fa2", 5), ("fa2", 9)])
def test_one_signature_a_kernel(algorithm, T):
    """Whatever is read-only, strided or absent, a kernel is compiled once a compute dtype."""
    fa = {
        direction: importlib.import_module(f"{numba_cpu.__name__}.{algorithm}_{direction}")
        for direction in ("forward", "backward")
    }
    q = np.linspace(-1, 1, 2 * T * 4, dtype=np.float32).reshape(1, 2, T, 4)
    q.flags.writeable = False
    lengths = np.array([3])
    lengths.flags.writeable = False
    slopes = np.array([[0.5, 0.25]])
    slopes.flags.writeable = False
    calls = [
        {},
        {"q_lengths": lengths, "kv_lengths": lengths, "q_offset": lengths},
        {"alibi_slopes": slopes, "layout": "bthd"},
        {"bias": np.zeros((T, T), np.float32), "sinks": np.zeros(2, np.float32)},
        {"mask": np.ones((T, T), bool), "causal": True},
    ]
    for options in calls:
        x = q.swapaxes(1, 2) if options.get("layout") == "bthd" else q
        o, lse = rf.attention(x, x, x, return_lse=True, algorithm=algorithm, **options)
        lse.flags.writeable = False
        wrt = ("q", "k", "v", *(name for name in ("bias", "sinks") if name in options))
        rf.attention_backward(o, x, x, x, o, lse, wrt=wrt, algorithm=algorithm, **options)
    few = importlib.import_module(f"{numba_cpu.__name__}.few_rows")
    for module in (few if (algorithm, T) == ("fa2", 5) else fa["forward"], fa["backward"]):
        for key, kernels in module._kernels.items():
            if "float32" in key:  # of fa2 with and without the options that touch scores
                for kernel in kernels if isinstance(kernels, tuple) else (kernels,):
                    assert len(kernel.signatures) == 1, kernel.signatures
