"""What numpy_tiled counts is what the closed forms say, and what the papers say."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import problems, varlen_problems

import rawflash as rf
from rawflash import hardware, masks
from rawflash.arrays import Result
from rawflash.backends import lookup
from rawflash.backends.numpy_tiled.fa2_backward import fa2_backward
from rawflash.backends.numpy_tiled.counting import counted as run_counted
from rawflash.backends.numpy_tiled.memory import Memory
from rawflash.errors import TileError
from rawflash.hardware import chip_of
from rawflash.problem import Problem, check
from rawflash.tiles import FEW_MMA, WGMMA, Tiles
from rawflash.tiling import DAO_BACKWARD_BLOCKS, plan_tiles
from rawflash.traffic import Traffic, traffic, visits

T, D = 256, 16
SIZES = (4096, 8192, 16384)  # M in elements
ALGORITHMS = ("standard", "rowwise", "fa1", "fa2")


def run(
    q,
    k,
    v,
    *,
    order=None,
    tiles=None,
    dout=None,
    dlse=None,
    wrt=("q", "k", "v"),
    cu_seqlens=(None, None),
    **options,
):
    """Run numpy_tiled with a memory in hand: the tiles, the memory and the prediction."""
    options = {"backend": "numpy_tiled"} | options
    more = {"cu_seqlens_q": cu_seqlens[0], "cu_seqlens_k": cu_seqlens[1]}
    direction = "forward" if dout is None else "backward"
    if dout is not None:
        if cu_seqlens[0] is None:
            o, lse = rf.attention(q, k, v, return_lse=True, **options)
        else:
            o, lse = rf.attention_varlen(q, k, v, *cu_seqlens, return_lse=True, **options)
        more |= {"dout": dout, "o": o, "lse": lse, "dlse": dlse, "wrt": wrt, "direction": direction}
    problem, x = check(q, k, v, **more, **options)
    tiles = tiles or plan_tiles(problem, lookup(problem, direction)[1], direction, order=order)
    memory = run_counted(problem, x, direction, tiles=tiles).memory
    asked = {"dlse": dlse is not None, "wrt": wrt} if dout is not None else {}
    return tiles, memory, traffic(problem, tiles, direction, visibility=x.visibility, **asked)


def square(T=T, d=D, dtype=np.float32):
    rng = np.random.default_rng(7)
    return [rng.standard_normal((T, d)).astype(dtype) for _ in range(4)]


def counted(algorithm, direction, M, **options):
    q, k, v, dout = square()
    backward = {"dout": dout} if direction == "backward" else {}
    return run(q, k, v, algorithm=algorithm, sram=4 * M, **backward, **options)


VARIANTS = [(a, d, {}) for a in ALGORITHMS for d in ("forward", "backward")]
VARIANTS += [("fa2", "backward", {"order": "ij"}), ("fa2", "backward", {"deterministic": True})]
VARIANTS += [("fa2", "forward", {"causal": True}), ("fa1", "backward", {"window": (30, 9)})]


@pytest.mark.parametrize("M", SIZES)
@pytest.mark.parametrize(("algorithm", "direction", "options"), VARIANTS)
def test_counts_equal_the_closed_forms(algorithm, direction, options, M):
    _, memory, predicted = counted(algorithm, direction, M, **options)
    assert memory.traffic() == predicted
    assert 0 < memory.peak <= M
    assert predicted.flops > 0


@given(
    st.one_of(problems(backend="numpy_tiled"), varlen_problems(backend="numpy_tiled")),
    st.sampled_from((3000, 20000)),
    st.sampled_from(("ij", "ji")),
)
def test_counts_equal_the_closed_forms_for_any_call(case, sram, order):
    """Ragged blocks, masks, lengths, grouped heads, every option: still exactly."""
    options = case.options | {"sram": sram}
    backward = {"dout": case.dout, "dlse": case.dlse, "wrt": case.wrt}
    order = order if options.get("algorithm") == "fa2" else None
    for more in ({}, backward | {"order": order}):
        try:
            _, memory, predicted = run(
                case.q, case.k, case.v, cu_seqlens=case.cu_seqlens or (None, None), **more, **options
            )
        except TileError as error:
            assert error.needed > sram
            return
        assert memory.traffic() == predicted


# ---- the equations, by hand ------------------------------------------------------------------------


def test_standard_moves_4_T2_and_7_T2():
    _, memory, _ = counted("standard", "forward", 4096)
    crossed = {name: (memory.loads[name], memory.stores[name]) for name in ("S", "P")}
    assert crossed == {"S": (T * T, T * T), "P": (T * T, T * T)}  # equation 30
    _, memory, _ = counted("standard", "backward", 4096)
    crossed = {name: (memory.loads[name], memory.stores[name]) for name in ("P", "dP", "dS")}
    # 7 T^2, and P stored once more because the forward pass did not
    assert crossed == {"P": (2 * T * T, T * T), "dP": (T * T, T * T), "dS": (2 * T * T, T * T)}


def test_fa2_forward_by_hand():
    tiles, memory, _ = counted("fa2", "forward", 4096)
    Tr = T // tiles.br
    assert dict(memory.loads) == {"Q": T * D, "K": Tr * T * D, "V": Tr * T * D}
    assert dict(memory.stores) == {"O": T * D, "lse": T}


def test_parts_of_the_keys_by_hand():
    """Rows 0-3 see keys 0-3, one part; rows 4-7 keys 0-7, two; rows 8-9 keys 0-9, three."""
    problem = Problem(Tq=10, Tk=10, d=3, dv=5, causal=True)
    whole = traffic(problem, Tiles(4, 4), "forward")
    parts = traffic(problem, Tiles(4, 4, parts=3, part_keys=4), "forward")
    stored = 2 * 4 + 3 * 2
    assert parts.load("O") == stored * 5 and parts.store("O") == (10 + stored) * 5
    assert parts.load("Q") == (10 + 4 + 2 * 2) * 3
    assert parts.load("m") == parts.store("m") == parts.store("l") == stored
    assert (parts.load("K"), parts.load("V")) == (whole.load("K"), whole.load("V"))
    two = traffic(problem, Tiles(4, 4, parts=2, part_keys=4), "forward")
    assert two.store("O") == (10 + 2 * 4 + 2 * 2) * 5


def test_rowwise_loads_keys_once_if_they_fit():
    q, k, v, _ = square()
    _, memory, _ = run(q, k, v, algorithm="rowwise", sram=4 * 4 * T * D)
    assert memory.traffic().elements == 4 * T * D
    tiles, memory, _ = run(q, k, v, algorithm="rowwise", sram=4 * 2 * T * D)
    assert memory.loads["K"] == -(-T // tiles.br) * T * D  # T^3 d / M with |I| = M / T


def test_backward_steps():
    """An inner step costs 3 |I| d with K/V outside, 4 |J| d with Q outside."""
    tiles, ji, _ = counted("fa2", "backward", 4096, order="ji")
    Tc = T // tiles.bc
    assert ji.loads["Q"] + (ji.loads["dO"] - T * D) + ji.stores["dQ"] == 3 * Tc * T * D
    tiles, ij, _ = counted("fa2", "backward", 4096, order="ij")
    Tr = T // tiles.br
    assert ij.loads["K"] + ij.loads["V"] + ij.stores["dK"] + ij.stores["dV"] == 4 * Tr * T * D


# ---- what follows from them ------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_traffic_falls_as_one_over_M(algorithm, direction):
    """T^2 d^2 / M: twice the memory, half the traffic, up to the O(T d) that is always there."""
    fixed = 8 * T * D
    moved = [counted(algorithm, direction, M)[1].traffic().elements for M in SIZES]
    for less, more in zip(moved[1:], moved[:-1], strict=True):
        assert more / 2 - fixed <= less <= more / 2 + fixed
    asymptotic = T * T * D * D / np.array(SIZES)
    assert (np.array(moved) - fixed <= 64 * asymptotic).all()


def test_rowwise_traffic_falls_as_one_over_M_and_is_larger():
    long = Problem(Tq=8192, Tk=8192, d=64, dv=64, backend="numpy_tiled", algorithm="rowwise")
    chip = chip_of("numpy_tiled")
    moved = {}
    for algorithm in ("rowwise", "fa2"):
        for M in (1 << 15, 1 << 16, 1 << 17):
            p = replace(long, algorithm=algorithm, sram=4 * M)
            moved[algorithm, M] = traffic(p, plan_tiles(p, chip, "forward"), "forward").elements
    assert 1.7 < moved["rowwise", 1 << 15] / moved["rowwise", 1 << 16] < 2.7
    assert 1.7 < moved["rowwise", 1 << 16] / moved["rowwise", 1 << 17] < 2.7
    assert all(moved["rowwise", M] > 20 * moved["fa2", M] for M in (1 << 15, 1 << 16, 1 << 17))


@pytest.mark.parametrize("M", SIZES)
def test_fa2_forward_moves_less_than_fa1(M):
    fa1, fa2 = (counted(name, "forward", M)[1].traffic() for name in ("fa1", "fa2"))
    assert fa2.elements < fa1.elements
    assert fa2.row_elements < fa1.row_elements


@pytest.mark.parametrize("M", [2048, 4096, 8192])
def test_backward_moves_less_with_keys_outside(M):
    ji, ij = (counted("fa2", "backward", M, order=order)[1].traffic() for order in ("ji", "ij"))
    assert ji.elements < ij.elements


@pytest.mark.parametrize("order", ["ji", "ij"])
def test_the_memory_refuses_blocks_of_M_over_4d_in_the_backward_pass(order):
    """Dao et al. 2022 state M / (4 d) for eight resident blocks; M / (8 d) is what fits."""
    q, k, v, dout = square()
    p = Problem(Tq=T, Tk=T, d=D, dv=D, algorithm="fa2", backend="numpy_tiled", sram=4 * 4096)
    theirs = plan_tiles(p, chip_of("numpy_tiled"), "backward", order=order, blocks=DAO_BACKWARD_BLOCKS)
    with pytest.raises(TileError, match="does not fit: .* of M = 4096 are taken") as caught:
        run(q, k, v, dout=dout, tiles=theirs, algorithm="fa2", sram=4 * 4096)
    assert caught.value.needed > caught.value.available == 4 * 4096
    run(q, k, v, dout=dout, order=order, algorithm="fa2", sram=4 * 4096)


def test_order_may_be_given_to_the_kernel():
    q, k, v, dout = square()
    o, lse = rf.attention(q, k, v, return_lse=True, backend="numpy_tiled")
    problem, x = check(q, k, v, dout=dout, o=o, lse=lse, direction="backward", backend="numpy_tiled")
    counts = {}
    for order in ("ij", "ji"):
        result, memory = Result(problem, x), Memory(None)
        grads = {name: result.canonical(name) for name in "qkv"}
        fa2_backward(problem, Tiles(64, 64), x, grads, memory=memory, order=order)
        counts[order] = memory.traffic()
        assert counts[order] == traffic(problem, Tiles(64, 64), "backward", order=order)
    assert counts["ij"].elements > counts["ji"].elements


# ---- the records -----------------------------------------------------------------------------------


def test_flops_of_the_slides():
    """4 T^2 d + 3 T^2 forward; backward 8 T^2 d + 2 T^2 + 2 T d and S again: 2 T^2 d + 2 T^2."""
    p = Problem(Tq=64, Tk=64, d=8, dv=8, algorithm="standard", backend="numpy_tiled")
    tiles = Tiles(16, 16, order="products")
    assert traffic(p, tiles, "forward").flops == 4 * 64 * 64 * 8 + 3 * 64 * 64
    assert traffic(p, tiles, "backward").flops == 10 * 64 * 64 * 8 + 4 * 64 * 64 + 2 * 64 * 8
    fa2 = replace(p, algorithm="fa2")
    twice = replace(fa2, deterministic=True)
    assert traffic(fa2, tiles, "backward").flops == traffic(p, tiles, "backward").flops
    again = 4 * 64 * 64 * 8 + 4 * 64 * 64 + 2 * 64 * 8  # S and dP, their two operations each, gamma
    assert traffic(twice, tiles, "backward").flops == traffic(fa2, tiles, "backward").flops + again
    in_turn = replace(tiles, family=WGMMA)
    assert traffic(twice, in_turn, "backward") == traffic(fa2, in_turn, "backward") == traffic(fa2, tiles, "backward")


def test_causal_visits_the_lower_triangle():
    p = Problem(Tq=64, Tk=64, causal=True)
    assert visits(p, 16, 16).pairs == 4 + 3 + 2 + 1
    assert visits(p, 16, 16, dense=True).pairs == 16


@given(
    st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(-50, 50)),
    st.tuples(st.integers(1, 11), st.integers(1, 11)),
    st.none() | st.integers(-30, 30),
    st.none() | st.integers(0, 30),
)
def test_bands_are_counted_as_their_blocks_are(sizes, blocks, lower, width):
    """The closed forms against a walk over every pair of blocks: any band, offset and ragged blocks."""
    rows, keys, offset = sizes
    band = masks.Band(lower, None if width is None else width + (-30 if lower is None else lower))
    lengths = np.array([offset]), np.array([rows]), np.array([keys])
    seen = masks.Visibility(band, None, *lengths)
    walked = masks.Visibility(masks.Band(None, None), band, *lengths)
    problem = Problem(Hq=3, Hkv=3, Tq=rows, Tk=keys)
    assert visits(problem, *blocks, seen) == replace(visits(problem, *blocks, walked), masked=0)
    assert visits(problem, *blocks, seen, dense=True).cells == 3 * rows * keys


def test_records_print_and_compare():
    record = Traffic.of({"Q": 6, "lse": 2, "K": 0}, {"O": 4}, flops=40)
    assert record == Traffic.of({"Q": 6, "lse": 2}, {"O": 4})
    assert (record.loaded, record.stored, record.elements, record.row_elements) == (6, 4, 10, 2)
    assert (record.load("lse"), record.store("Q")) == (2, 0)
    assert "40 floating-point operations, 4.0 an element moved" in str(record)
    assert hash(record) == hash(Traffic.of({"Q": 6, "lse": 2}, {"O": 4}))


def test_memory_is_strict():
    memory = Memory(10, np.float64)
    memory.load("Q", np.ones((2, 4)))
    memory.load("lse", np.ones(100))  # row statistics are not charged
    memory.load("K", np.ones((2, 4)), into="Q")  # over Q
    with pytest.raises(TileError) as caught:
        memory.alloc("S", (3, 1))
    assert (caught.value.needed, caught.value.available) == (88, 80)
    memory.free("Q")
    memory.alloc("S", (5, 2))
    assert memory.peak == 10 and memory.resident == {"S": 10}
    assert "peak 10 elements on chip, M = 10" in str(memory)


def test_few_rows_on_tensor_cores_read_keys_once_for_each_tile_of_rows():
    """More rows of query heads than a tile has take another block of threads, which reads all keys again."""
    device = replace(hardware.kernels_on("cupy_raw", hardware.chip("sm_90")), processors=132)
    keys = {}
    for heads in (8, 32, 33, 128):
        p = Problem(Hq=heads, Hkv=1, Tq=1, Tk=4096, d=128, dv=128, dtype="bfloat16", backend="cupy_raw")
        tiles = plan_tiles(p, device, "forward")
        assert tiles.family == FEW_MMA
        keys[heads] = traffic(p, tiles, "forward").load("K") / (4096 * 128)
    assert keys == {8: 1, 32: 1, 33: 2, 128: 4}
