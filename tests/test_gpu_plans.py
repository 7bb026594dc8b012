"""What tests/test_gpu.py says of plans, without a GPU: a plan that changes is known here before a GPU is there."""

from types import SimpleNamespace

import numpy as np
import pytest
import test_gpu
from strategies import DTYPES
from test_cupy_raw_offline import Array, Device

from rawflash import problem

TABLES = {
    "test_blocks_of_keys_in_a_fixed_order": test_gpu.IN_ORDER,
    "test_blocks_of_keys_of_few_heads_in_a_fixed_order": test_gpu.SEVERAL,
    "test_the_first_dQ_is_stored": test_gpu.STORED,
    "test_rows_that_others_prepare_and_finish": test_gpu.FUSED,
    "test_blocks_of_keys_that_are_divided_by_heads": test_gpu.BY_HEADS,
    "test_pairs_of_blocks_of_threads": test_gpu.PAIRED,
}


def arrays(Hq, Tq, d, dtype, B=1, Hkv=None, Tk=None, dv=None, few=5, **options):
    """A call whose arrays have addresses and no numbers, and no reference."""
    Hkv, Tk = Hkv or Hq, Tk or Tq
    shapes = {"q": (B, Hq, Tq, d), "k": (B, Hkv, Tk, d), "v": (B, Hkv, Tk, dv or d)}
    made = {name: Array(shape, DTYPES[dtype]) for name, shape in shapes.items()}
    tables = {name: np.asarray(value) if isinstance(value, list) else value for name, value in options.items()}
    return SimpleNamespace(options=tables, **made), None


def planned(test, name, monkeypatch):
    """A test on a GPU, up to where it would compute."""
    monkeypatch.setattr(problem, "_MEMO", {})
    monkeypatch.setattr(test_gpu, "make_many", arrays)
    monkeypatch.setattr(test_gpu, "on_gpu", lambda case: case)
    monkeypatch.setattr(test_gpu, "check_backward_again_and_again", lambda *_: None)
    with Device("sm_90a").current():
        getattr(test_gpu, test)(name, "bfloat16", monkeypatch)


@pytest.mark.parametrize("test, name", [(test, name) for test, table in TABLES.items() for name in table])
def test_plans_are_as_tests_on_a_gpu_say(test, name, monkeypatch):
    planned(test, name, monkeypatch)


@pytest.mark.parametrize("test, name, table, other", [
    ("test_pairs_of_blocks_of_threads", "plain", "PAIRED", dict(Hq=60, Tq=384, Tk=512, d=64)),
    ("test_rows_that_others_prepare_and_finish", "plain", "FUSED", dict(Hq=60, Tq=400, d=256)),
    ("test_blocks_of_keys_of_few_heads_in_a_fixed_order", "no mask, d = 64", "SEVERAL",
     (dict(Hq=900, Tq=9, d=64), 1, 0)),
    ("test_blocks_of_keys_in_a_fixed_order", "causal", "IN_ORDER", dict(Hq=40, Hkv=20, Tq=700, d=128, causal=True)),
    ("test_the_first_dQ_is_stored", "a thousand rows", "STORED", dict(Hq=20, Tq=1000, d=64)),
    ("test_blocks_of_keys_that_are_divided_by_heads", "no mask", "BY_HEADS", dict(Hq=80, Tq=500, d=128)),
])  # fmt: skip
def test_other_plans_are_caught(test, name, table, other, monkeypatch):
    monkeypatch.setitem(getattr(test_gpu, table), name, other)
    with pytest.raises(AssertionError):
        planned(test, name, monkeypatch)
