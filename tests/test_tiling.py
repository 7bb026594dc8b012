"""Blocks from M: the formula, the byte sum, the granule, and honest refusals."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rawflash import masks as M
from rawflash import tiling
from rawflash.errors import BackendError, ProblemError, TileError
from rawflash.hardware import CHIPS, Chip, chip, chip_of, kernels_on
from rawflash.problem import Problem
from rawflash.tiling import (
    DAO_BACKWARD_BLOCKS, RESIDENT, SPLIT_INPUTS, SPLIT_LEAST, STREAMED, Tiles, key_ranges, parts_of, plan_tiles,
)  # fmt: skip
from rawflash.traffic import visits

LOOPS = Chip("loops", 1 << 16, 1, "loops")
VECTOR = Chip("vector", 1 << 16, 16, "vector", 512)
ITEM = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def problem(algorithm="fa2", T=4096, d=64, **more):
    return Problem(**({"Tq": T, "Tk": T, "d": d, "dv": d, "algorithm": algorithm} | more))


# ---- the formula -----------------------------------------------------------------------------------


@pytest.mark.parametrize("M", [4096, 16384, 65536])
@pytest.mark.parametrize("d", [16, 64])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_equations_44_and_79(algorithm, M, d):
    """|outer| = M / (blocks d), |inner| = min of that and d, where blocks divide evenly."""
    for direction, blocks in (("forward", 4), ("backward", 8)):
        tiles = plan_tiles(problem(algorithm, d=d, sram=4 * M), LOOPS, direction)
        queries_outside = (algorithm, direction) == ("fa2", "forward")
        outer, inner = (tiles.br, tiles.bc) if queries_outside else (tiles.bc, tiles.br)
        assert outer == M // (blocks * d)
        assert inner == min(M // (blocks * d), d)
        assert tiles.order == ("ij" if queries_outside else "ji")
        assert len(tiles.resident) == blocks
        assert tiles.smem_bytes == 4 * tiles.elements <= 4 * M


def test_backward_with_queries_outside():
    ji = plan_tiles(problem(sram=1 << 18), LOOPS, "backward")
    ij = plan_tiles(problem(sram=1 << 18), LOOPS, "backward", order="ij")
    assert (ij.br, ij.bc) == (ji.bc, ji.br)


def test_blocks_of_dao_overflow():
    """M / (4 d) in the backward pass: eight blocks of M / 4 elements."""
    ours = plan_tiles(problem(sram=1 << 18), LOOPS, "backward")
    theirs = plan_tiles(problem(sram=1 << 18), LOOPS, "backward", blocks=DAO_BACKWARD_BLOCKS)
    assert theirs.bc == 2 * ours.bc
    assert ours.smem_bytes <= 1 << 18 < theirs.smem_bytes


def test_float32_accumulators_count():
    """float16 tiles of Q, K, V beside float32 O and S: the formula's blocks overflow, the plan does not."""
    tiles = plan_tiles(problem(dtype="float16", d=128), chip("sm_90"), "forward")
    sizes = {tile.name: tile.itemsize for tile in tiles.resident}
    assert sizes == {"Q": 2, "O": 4, "K or V": 2, "S": 4}
    assert tiles.smem_bytes <= 232448
    assert tiles.br % 16 == tiles.bc % 16 == 0


def test_rowwise_keeps_keys_when_they_fit():
    small = plan_tiles(problem("rowwise", T=64, sram=1 << 16), LOOPS, "forward")
    large = plan_tiles(problem("rowwise", T=1024, sram=1 << 16), LOOPS, "forward")
    assert small.order == RESIDENT and small.bc == 64
    assert large.order == STREAMED and large.br <= (1 << 14) // 1024  # at most M / T rows


def test_numba_cpu_blocks_are_granules_up_to_512():
    tiles = plan_tiles(problem(d=8, T=10**6), Chip("c", 1 << 24, 16, "vector", 512), "forward")
    assert tiles.br == 512 and tiles.bc == 16
    tiles = plan_tiles(problem(d=8, T=20), VECTOR, "forward")
    assert tiles.br == 32  # 20 rounded up


# ---- properties ------------------------------------------------------------------------------------

problems = st.builds(
    problem,
    algorithm=st.sampled_from(("fa1", "fa2", "standard", "rowwise")),
    T=st.just(0),
    Tq=st.integers(0, 3000),
    Tk=st.integers(0, 3000),
    d=st.integers(1, 300),
    dv=st.integers(1, 300),
    dtype=st.sampled_from(tuple(ITEM)),
    softcap=st.sampled_from((None, 2.0)),
    sram=st.integers(1, 1 << 20),
)
chips = st.sampled_from((LOOPS, VECTOR, *CHIPS.values()))
directions = st.sampled_from(("forward", "backward"))


def available(problem, chip):
    """Bytes that tiles may have: on a GPU never more than it has."""
    return min(problem.sram, chip.on_chip_bytes) if chip.name.startswith("sm_") else problem.sram


@given(problems, chips, directions, st.sampled_from((None, "ij")))
def test_plan_fits_or_refuses(problem, chip, direction, order):
    if (problem.algorithm, direction) != ("fa2", "backward"):
        order = None
    try:
        tiles = plan_tiles(problem, chip, direction, order=order)
    except TileError as error:
        assert error.needed > error.available == available(problem, chip)
        assert str(error.needed) in str(error) and str(error.available) in str(error)
        if error.needed > chip.on_chip_bytes and chip.name.startswith("sm_"):
            return  # no sram= is large enough there
        more = replace(problem, sram=error.needed)  # the numbers are the truth
        assert plan_tiles(more, chip, direction, order=order).smem_bytes <= error.needed
        less = replace(problem, sram=error.needed - 1)
        with pytest.raises(TileError):
            plan_tiles(less, chip, direction, order=order)
        return
    assert tiles.smem_bytes <= available(problem, chip)
    whole_keys = tiles.order == RESIDENT
    assert tiles.br > 0 and tiles.br % chip.granule == 0
    assert tiles.bc > 0 and (whole_keys or tiles.bc % chip.granule == 0)
    assert tiles.br < problem.Tq + chip.granule or tiles.br == chip.granule
    assert tiles.bc < problem.Tk + chip.granule or tiles.bc == chip.granule
    if chip.most_rows and problem.algorithm in ("fa1", "fa2"):
        assert max(tiles.br, tiles.bc) <= chip.most_rows
    text = str(tiles)
    assert all(tile.name in text for tile in tiles.resident) and str(available(problem, chip)) in text


@given(problems, directions)
def test_more_memory_never_makes_the_outer_block_smaller(problem, direction):
    outer = []
    for sram in (1 << 20, 1 << 21, 1 << 22):
        tiles = plan_tiles(replace(problem, sram=sram, algorithm="fa2"), LOOPS, direction)
        outer.append(tiles.br if tiles.order == "ij" else tiles.bc)
    assert outer == sorted(outer)


# ---- chips -----------------------------------------------------------------------------------------


def test_chips():
    assert {name: row.on_chip_bytes for name, row in CHIPS.items()} == {
        "sm_75": 65536, "sm_80": 166912, "sm_86": 101376, "sm_89": 101376,
        "sm_90": 232448, "sm_100": 232448, "sm_120": 101376,
    }  # fmt: skip
    assert (
        chip_of("numpy_tiled").on_chip_bytes
        == chip_of("numba_cpu").on_chip_bytes
        == chip("cpu").on_chip_bytes
    )
    assert (chip_of("numpy_tiled").granule, chip_of("numba_cpu").granule) == (1, 16)
    with pytest.raises(ProblemError, match="arch is 'sm_1'; expected one of 'cpu', 'sm_75'"):
        chip("sm_1")
    with pytest.raises(BackendError):
        chip_of("cupy_raw")


def test_a_cache_is_advice_and_sram_is_a_limit():
    """A head dimension too large for L2 still runs on a CPU, unless the caller set M."""
    soft = Chip("cpu", 1 << 16, 16, "vector", 512, hard=False)
    tiles = plan_tiles(problem(d=2048), soft, "backward")
    assert tiles.smem_bytes == tiles.on_chip_bytes > 1 << 16
    with pytest.raises(TileError, match="sram=65536"):
        plan_tiles(problem(d=2048, sram=1 << 16), soft, "backward")
    with pytest.raises(TileError, match=r"blocks of 16 rows need .* bytes; M is 65536 bytes \(sm_75\)"):
        plan_tiles(problem(d=2048), chip("sm_75"), "backward")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_few_heads_are_shared_out_to_the_cores_of_a_cpu(direction):
    """Blocks on a CPU: 16 at least, or such of 64 rows; M given, they are what the formula says."""
    soft = Chip("cpu", 1 << 22, 16, "vector", 256, hard=False)

    def rows(**how):
        tiles = plan_tiles(problem(Tq=4096, Tk=4096, d=16, dv=16, **how), soft, direction)
        return tiles.br if tiles.order == "ij" else tiles.bc

    assert (rows(B=4, Hq=4, Hkv=4), rows(B=1, Hq=1, Hkv=1)) == (256, 256)
    few = problem(B=1, Hq=2, Hkv=2, Tq=1000, Tk=1000, d=16, dv=16)
    tiles = plan_tiles(few, soft, direction)
    assert (tiles.br if tiles.order == "ij" else tiles.bc) == 112  # 125, down to whole granules: 9 blocks a head
    assert rows(B=1, Hq=1, Hkv=1, sram=1 << 22) == 256
    short = plan_tiles(replace(few, Tq=300, Tk=300), soft, direction)
    assert (short.br if short.order == "ij" else short.bc) == 64


# ---- 16-bit products on tensor cores -----------------------------------------------------------------

HALF = dict(dtype="bfloat16", backend="numba_cuda", scale=0.1)


def on_halves(direction, name="sm_90", **more):
    return plan_tiles(problem(**(HALF | more)), kernels_on("numba_cuda", chip(name)), direction)


@pytest.mark.parametrize("direction, name, d, shape, smem_bytes", [
    ("forward", "sm_90", 128, (128, 64), 65536),
    ("forward", "sm_80", 64, (128, 128), 49152),
    ("forward", "sm_86", 128, (128, 32), 49152),  # two of them at once
    ("forward", "sm_120", 40, (128, 128), 49152),  # rows of 64 numbers
    ("backward", "sm_90", 128, (64, 128), 148480),
    ("backward", "sm_80", 64, (128, 128), 133120),
    ("backward", "sm_89", 64, (64, 128), 82944),
    ("backward", "sm_89", 72, (64, 64), 74240),  # Q and dO of one step
])  # fmt: skip
def test_products_of_halves_on_tensor_cores(direction, name, d, shape, smem_bytes):
    tiles = on_halves(direction, name, d=d)
    assert (tiles.family, tiles.br, tiles.bc) == ("mma", *shape)
    assert tiles.smem_bytes == smem_bytes <= chip(name).on_chip_bytes
    assert "16-bit numbers on tensor cores" in str(tiles)
    sizes = {tile.name: tile.itemsize for tile in tiles.resident if tile.name in ("Q", "dS", "O", "dK")}
    assert sizes == ({"Q": 2, "O": 4} if direction == "forward" else {"Q": 2, "dS": 2, "dK": 4})


@pytest.mark.parametrize("options", [
    dict(dtype="float32"), dict(dtype="float64"), dict(algorithm="fa1"), dict(dv=32), dict(d=129, dv=129),
    dict(bias=(1, 1, 4096, 4096)), dict(alibi=True), dict(softcap=2.0), dict(dropout=0.1), dict(mask="dense"),
    dict(scale=0.0), dict(scale=-1.0), dict(sram=8192 + 4096),
])  # fmt: skip
def test_other_problems_of_that_chip_have_the_plan_of_simt(options):
    for direction in ("forward", "backward"):
        try:
            expected = plan_tiles(problem(**(HALF | options)), kernels_on("cupy_raw", chip("sm_75")), direction)
        except TileError:
            expected = None
        same = replace(kernels_on("numba_cuda", chip("sm_90")), on_chip_bytes=chip("sm_75").on_chip_bytes, name="sm_75")
        assert same.family == "halves"
        if expected is None:
            with pytest.raises(TileError):
                plan_tiles(problem(**(HALF | options)), same, direction)
        else:
            assert plan_tiles(problem(**(HALF | options)), same, direction) == expected
            assert expected.family == "simt"


def test_gradients_of_halves_without_atomics():
    assert on_halves("forward", deterministic=True).family == "mma"
    assert on_halves("backward", deterministic=True).family == "simt"
    assert on_halves("forward", "sm_75").family == "simt"


@given(st.integers(1, 128), st.integers(1, 1 << 18), directions, st.sampled_from(sorted(CHIPS)))
def test_halves_fit_the_limit_of_the_caller(d, sram, direction, name):
    try:
        tiles = on_halves(direction, name, d=d, sram=sram)
    except TileError:
        return
    assert tiles.smem_bytes <= min(sram, chip(name).on_chip_bytes)


def test_halves_do_not_share_out_keys():
    asked = problem(**(HALF | dict(causal=True, T=2048, Hq=8, Hkv=8)))
    row = replace(kernels_on("numba_cuda", chip("sm_90")), processors=132)
    assert plan_tiles(asked, row, "forward").parts == 1
    assert plan_tiles(replace(asked, softcap=1.0), row, "forward").parts > 1


def by_raw(name="sm_100", processors=None, **more):
    row = replace(kernels_on("cupy_raw", chip(name)), processors=processors)
    return plan_tiles(problem(**(HALF | dict(backend="cupy_raw") | more)), row, "forward")


@pytest.mark.parametrize("name, d, dv, shape, smem_bytes", [
    ("sm_100", 64, 64, (128, 128), 48 << 10),
    ("sm_100", 20, 33, (128, 128), 48 << 10),
    ("sm_100", 128, 128, (128, 64), 64 << 10),
    ("sm_100", 72, 40, (128, 64), 56 << 10),  # rows of Q are as long as those of O, or longer
    ("sm_100", 40, 72, (128, 64), 56 << 10),
    ("sm_100", 192, 128, (64, 64), 64 << 10),
    ("sm_100", 256, 256, (64, 64), 96 << 10),
    ("sm_80", 256, 256, (64, 32), 64 << 10),  # two thread blocks share 163 KiB
    ("sm_86", 64, 64, (128, 128), 48 << 10),
    ("sm_89", 128, 128, (128, 32), 48 << 10),
    ("sm_120", 256, 256, (64, 64), 96 << 10),
])  # fmt: skip
def test_forward_of_halves_by_cupy_raw(name, d, dv, shape, smem_bytes):
    tiles = by_raw(name, d=d, dv=dv)
    assert (tiles.br, tiles.bc, tiles.smem_bytes, tiles.family) == (*shape, smem_bytes, "mma")
    assert tiles.threads == 128 and tiles.br % (16 * 4) == 0
    assert "tensor cores" in str(tiles) and str(tiles.on_chip_bytes) in str(tiles)


@pytest.mark.parametrize("options", [
    dict(softcap=2.0), dict(bias=(1, 1, 4, 4)), dict(alibi=True), dict(dropout=0.5), dict(mask="dense"),
    dict(scale=1.0), dict(deterministic=True), dict(causal=True), dict(varlen=True), dict(sinks=True),
])  # fmt: skip
def test_forward_of_halves_by_cupy_raw_takes_every_option(options):
    """Blocks are narrower where scores are worked on."""
    tiles = by_raw(d=64, dv=64, **options)
    plain = {"deterministic", "causal", "varlen", "sinks"} & options.keys()
    assert (tiles.family, tiles.br, tiles.bc) == ("mma", 128, 128 if plain else 64)


def test_other_calls_of_halves_are_multiply_adds():
    assert by_raw("sm_75").family == "simt"
    assert by_raw(sram=8 << 10, d=32, dv=32).family == "simt"
    assert by_raw(algorithm="fa1").family == "simt"
    assert by_raw(T=tiling.MMA_LONGEST).family == "simt"
    for d, dv in ((257, 64), (64, 257)):  # no kernel has them, but `explain` says what a plan would be
        for direction in ("forward", "backward"):
            wide = problem(**(HALF | dict(backend="cupy_raw", d=d, dv=dv)))
            assert plan_tiles(wide, kernels_on("cupy_raw", chip("sm_100")), direction).family == "simt"
    assert by_raw(dtype="float32").family == "split inputs"


@given(st.integers(1, 256), st.integers(1, 256), st.integers(1, 1 << 18), st.sampled_from(sorted(CHIPS)))
def test_forward_of_halves_by_cupy_raw_fits_the_limit_of_the_caller(d, dv, sram, name):
    try:
        tiles = by_raw(name, d=d, dv=dv, sram=sram)
    except TileError:
        return
    assert tiles.smem_bytes <= min(sram, chip(name).on_chip_bytes)


def test_few_blocks_of_halves_are_low_and_share_keys():
    """Not more thread blocks than multiprocessors: lower ones, and, if these are few as well, parts of the keys."""
    assert by_raw(processors=132, T=2048, Hq=32).br == 128  # 512 of them
    low = by_raw(processors=132, T=2048, Hq=8)
    assert (low.br, low.bc, low.parts) == (64, 256, 1)
    few = by_raw(processors=132, T=4096, Hq=1)
    assert few.br == 64 and few.parts == 4 and few.part_keys % few.bc == 0
    assert by_raw(processors=132, T=4096, Hq=1, sram=1 << 18).br == 128
    assert by_raw(processors=132, T=512, Hq=1).parts == 1  # merging would take longer


def test_few_rows_and_long_keys_of_halves_fill_the_device():
    """Two thread blocks for each multiprocessor, of 64 rows where there are no more, or few keys; else of 128."""

    def planned(Tq, Tk, Hq=16, d=128, **more):
        asked = problem(**(HALF | dict(backend="cupy_raw", B=1, Hq=Hq, Hkv=Hq, Tq=Tq, Tk=Tk, d=d, dv=d) | more))
        tiles = plan_tiles(asked, kernels_on("cupy_raw", replace(chip("sm_100"), processors=132)), "forward")
        return tiles.br, tiles.bc, tiles.parts * -(-Tq // tiles.br) * Hq

    assert planned(17, 65536) == planned(64, 65536) == (64, 128, 256)
    assert planned(64, 65536, Hq=32, d=64) == (64, 256, 256)
    assert planned(128, 65536) == planned(256, 65536) == (128, 64, 256)
    assert planned(128, 8192) == (64, 128, 256)
    assert planned(64, 4096, Hq=1000) == (64, 128, 1000)
    assert planned(64, 65536, softcap=20.0) == planned(64, 65536, bias=(1, 1, 1, 65536)) == (64, 64, 256)


def test_options_of_halves_leave_registers_to_scores():
    """Blocks for one option, and for several, by the wider of d and dv."""
    mask, bias = M.PrefixLM(3), (1, 1, 1, 1)
    one, several = dict(dropout=0.1), dict(dropout=0.1, bias=bias)
    for d in (64, 128, 192, 256):
        for more in (one, dict(mask=mask), dict(bias=bias)):
            tiles = by_raw(d=d, dv=64, T=4096, Hq=64, **more)
            assert (tiles.br, tiles.bc) == tiling.RAW_WORKED[d]
        for more in (several, dict(mask=mask, softcap=5.0)):
            tiles = by_raw(d=d, dv=64, T=4096, Hq=64, **more)
            assert (tiles.br, tiles.bc) == tiling.RAW_SEVERAL[d]


# ---- 16-bit gradients of cupy_raw ---------------------------------------------------------------------


def raw_backward(name="sm_100", processors=None, **more):
    asked = problem(**(dict(dtype="bfloat16", backend="cupy_raw") | more))
    return plan_tiles(asked, replace(kernels_on("cupy_raw", chip(name)), processors=processors), "backward")


@pytest.mark.parametrize("name, d, dv, shape, smem_bytes, layout", [
    ("sm_100", 64, 64, (128, 128, 256), 166000, (2, 2, 1)),
    ("sm_100", 128, 128, (64, 128, 256), 181360, (2, 2, 2)),
    ("sm_80", 128, 128, (64, 128, 256), 148592, (1, 1, 1)),  # no room for a second dS
    ("sm_80", 192, 192, (64, 64, 256), 164976, (1, 1, 2)),
    ("sm_100", 256, 256, (128, 64, 256), 230512, (1, 2, 4)),  # four warps share 32 keys
    ("sm_100", 192, 256, (128, 64, 256), 205936, (1, 2, 4)),
    ("sm_100", 192, 192, (64, 64, 256), 173168, (2, 1, 2)),
    ("sm_80", 256, 1, (128, 64, 256), 156784, (1, 2, 4)),
    ("sm_80", 256, 256, (64, 64, 256), 148080, (1, 1, 2)),
    ("sm_89", 64, 7, (64, 128, 256), 99440, (2, 2, 1)),
    ("sm_89", 128, 128, (64, 64, 128), 74352, (1, 1, 1)),
    ("sm_120", 250, 250, (32, 32, 128), 74096, (1, 1, 2)),
    ("sm_86", 130, 190, (32, 64, 256), 90480, (1, 1, 2)),
])  # fmt: skip
def test_gradients_of_halves_on_tensor_cores(name, d, dv, shape, smem_bytes, layout):
    tiles = raw_backward(name, d=d, dv=dv)
    assert (tiles.family, tiles.br, tiles.bc, tiles.threads) == ("mma", *shape)
    assert tuple(dict(tiles.constants).values()) == layout  # blocks of dS, sixteens of keys of a warp, parts of columns
    assert tiles.smem_bytes == smem_bytes <= chip(name).on_chip_bytes
    assert "on tensor cores" in str(tiles)
    assert tiles.threads == 2 * tiles.bc * (2 if max(d, dv) > 128 else 1)


@pytest.mark.parametrize("options", [
    dict(bias=(1, 1, 4096, 4096)), dict(alibi=True), dict(softcap=2.0), dict(dropout=0.1), dict(mask="dense"),
    dict(scale=0.0), dict(scale=-1.0), dict(deterministic=True), dict(varlen=True), dict(causal=True, window=(3, 3)),
])  # fmt: skip
def test_gradients_of_halves_take_every_option(options):
    """Warps have sixteen keys where scores are more than products and a band, and one dS where dQ is not added."""
    tiles, plain = raw_backward(**options), raw_backward()
    assert (tiles.family, tiles.br, tiles.bc, tiles.threads) == (plain.family, plain.br, plain.bc, plain.threads)
    worked = options.keys() & {"bias", "alibi", "softcap", "dropout", "mask"}
    layout = (1, 1, 1) if "deterministic" in options else (2, 1, 1) if worked else (2, 2, 1)
    assert tuple(dict(tiles.constants).values()) == layout


@pytest.mark.parametrize("options", [
    dict(dtype="float64"), dict(algorithm="fa1"), dict(sram=20000), dict(name="sm_75"),
])  # fmt: skip
def test_other_gradients_have_other_kernels(options):
    tiles = raw_backward(**options)
    assert tiles.family != "mma" and not tiles.threads


@given(st.integers(1, 256), st.integers(1, 256), st.integers(9000, 1 << 18), st.sampled_from(sorted(CHIPS)))
def test_gradients_of_halves_fit_the_limit_of_the_caller(d, dv, sram, name):
    try:
        tiles = raw_backward(name, d=d, dv=dv, sram=sram)
    except TileError:
        return
    assert tiles.smem_bytes <= min(sram, chip(name).on_chip_bytes)
    if tiles.family == "mma":  # a thread has one number of lse or delta
        assert tiles.threads >= 2 * tiles.br


def test_fewer_keys_where_processors_would_be_idle():
    """64 keys a block: many blocks of 128 but too few, or such of uneven work; not where that saves nothing."""
    few = dict(B=1, Hq=16, Hkv=16, T=1024, d=128)
    assert raw_backward(processors=132, causal=True, **few).bc == 64
    assert raw_backward(processors=None, causal=True, **few).bc == 128
    assert raw_backward(processors=132, **few).bc == 128  # 128 blocks, all alike
    assert raw_backward(processors=132, **(few | dict(Hq=4, Hkv=4))).bc == 64  # 32 of them
    assert raw_backward(processors=132, causal=True, **(few | dict(B=64))).bc == 128
    assert [raw_backward(processors=132, **(few | dict(B=B))).bc for B in (2, 3, 4, 5)] == [128] * 4
    assert raw_backward(processors=132, causal=True, sram=1 << 18, **few).bc == 128


# ---- keys shared out over thread blocks -------------------------------------------------------------


def on_processors(n, T=2048, heads=8, **more):
    row = replace(kernels_on("cupy_raw", chip("sm_90")), processors=n)
    asked = problem(T=T, Hq=heads, Hkv=heads, backend="cupy_raw", **more)
    return asked, plan_tiles(asked, row, "forward")


def test_keys_are_shared_out_where_processors_would_be_idle():
    _, tiles = on_processors(132, causal=True)  # 128 blocks, of 2 to 32 steps
    assert (tiles.parts, tiles.part_keys) == (2, 1024)
    assert "keys in up to 2 parts of 1024" in str(tiles)
    _, tiles = on_processors(132, T=128 * 1024, heads=1, Tq=1)
    assert tiles.parts * tiles.part_keys >= 128 * 1024
    assert 32 <= tiles.parts <= 64


@pytest.mark.parametrize("n, options", [
    (None, dict(causal=True)),  # a chip of the table, not a device that was asked
    (132, {}),  # 128 blocks of 32 steps
    (132, dict(causal=True, heads=64)),
    (132, dict(causal=True, algorithm="fa1")),
    (132, dict(T=150, heads=1)),
    (132, dict(Tq=0)),
    (132, dict(Tk=0)),
])  # fmt: skip
def test_keys_are_not_shared_out_for_nothing(n, options):
    _, tiles = on_processors(n, **options)
    assert (tiles.parts, tiles.part_keys) == (1, 0)


@given(
    st.integers(1, 3000), st.integers(0, 3000), st.booleans(), st.none() | st.integers(0, 400),
    st.sampled_from(["float16", "float32", "float64"]), st.integers(1, 200),
)  # fmt: skip
def test_parts_cover_what_blocks_of_rows_see(Tq, Tk, causal, left, dtype, processors):
    window = None if left is None else (left, 0)
    asked, tiles = on_processors(processors, Tq=Tq, Tk=Tk, heads=2, causal=causal, window=window, dtype=dtype)
    ranges = key_ranges(asked, tiles.br, tiles.bc, Tq, Tk, Tk - Tq)
    pairs = sum(-(-(high - low) // tiles.bc) for low, high in ranges if high > low)
    assert 2 * pairs == visits(asked, tiles.br, tiles.bc).pairs
    assert tiles.part_keys % tiles.bc == 0
    for low, high in ranges:
        assert high - low <= tiles.parts * tiles.part_keys or tiles.parts == 1
        assert 1 <= parts_of(tiles, low, high) <= tiles.parts


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
def test_few_rows_of_16_bits_on_a_gpu(arch):
    """Queues fit every head dimension's shared memory, or the plan is that of the general kernel."""
    row = replace(kernels_on("cupy_raw", chip(arch)), processors=132)

    def planned(**sizes):
        fixed = dict(B=2, Hq=8, Hkv=2, Tq=1, Tk=5000, dtype="float16", backend="cupy_raw")
        return plan_tiles(Problem(**(fixed | sizes)), row, "forward")

    for d in (1, 20, 64, 96, 128, 192, 256):
        for Tq in (1, 8):
            tiles = planned(d=d, dv=d, Tq=Tq)
            assert tiles.smem_bytes <= row.on_chip_bytes
            assert tiles.family == tiling.FEW_MMA or (arch == "sm_86" and d > 128)
            assert (tiles.parts - 1) * tiles.part_keys < 5000 <= tiles.parts * tiles.part_keys
    few = planned(d=64, dv=64)
    assert few.parts > 1 and few.br == 16 and planned(d=64, dv=64, Tq=5).br == 32
    assert few.parts * 4 <= 132 * 4 and planned(d=64, dv=64, B=100).parts == 1
    others = [dict(Tq=17), dict(dtype="float32"), dict(algorithm="fa1"), dict(varlen=True)]
    assert not any(planned(d=64, dv=64, **other).family == tiling.FEW_MMA for other in others)


def test_queues_of_few_rows_are_longer_where_a_multiprocessor_has_one_block():
    row = replace(kernels_on("cupy_raw", chip("sm_90")), processors=132)

    def queue(**sizes):
        fixed = dict(Hq=32, Hkv=8, Tq=1, Tk=8192, dtype="bfloat16", backend="cupy_raw")
        tiles = plan_tiles(Problem(**(fixed | sizes)), row, "forward")
        assert tiles.resident[0].name == "K or V"
        return tiles.resident[0].bytes

    assert queue(B=16, d=128, dv=128) == queue(B=1, d=128, dv=128) == 128 << 10
    assert queue(B=16, d=64, dv=64) == tiling.FEW_MMA_UNITS_ALONE * (16 << 10)
    assert queue(B=64, d=128, dv=128) == tiling.FEW_MMA_UNITS * (32 << 10) and queue(B=64, d=64, dv=64) == 64 << 10


@pytest.mark.parametrize("parts", [1, 3, 16, 64])
def test_parts_of_few_rows_cover_their_keys(parts):
    """`parts_of` of fa2_few_rows.cu, as the plan has it: turns go round, no part is empty or larger than it says."""
    tiles = Tiles(16, tiling.FEW_MMA_STEP, family=tiling.FEW_MMA, parts=parts)
    for keys in (0, 1, 127, 128, 129, 5000, 8192, 10**6):
        count = tiling.parts_of(tiles, 0, keys)
        turn = tiling.FEW_MMA_STEP * tiling.FEW_MMA_WARPS
        turns = [len(range(part, -(-keys // turn), count)) for part in range(count)]
        _, most = tiling._few_mma_parts(keys, parts, tiling.FEW_MMA_STEP)
        assert 1 <= count <= parts and most == max(turns[0], 1) * turn
        assert count == 1 or min(turns) >= tiling.FEW_MMA_LEAST // turn


# ---- sm_90's own kernels -----------------------------------------------------------------------------


WGMMA = dict(dtype="bfloat16", backend="cupy_raw", B=2, Hq=8, Hkv=2)
H200 = replace(kernels_on("cupy_raw", chip("sm_90")), processors=132)


def on_warpgroups(**more):
    return plan_tiles(problem(**(WGMMA | more)), H200, "forward")


@pytest.mark.parametrize("more, stores", [
    ({}, True), (dict(d=64, dv=64), True), (dict(dv=64), True), (dict(causal=False, window=(None, 3)), True),
    (dict(window=(None, 9)), True), (dict(Tq=1), True), (dict(Tk=1536), True), (dict(Tk=1537), False),
    (dict(d=64, dv=64, Tk=1024), True), (dict(d=64, dv=64, Tq=1025), False), (dict(Hkv=64), False),
    (dict(Hkv=128), True), (dict(Hq=512, Hkv=128, T=1024), False), (dict(B=8, Hq=12, Hkv=12), True),
    (dict(B=8, Hq=11, Hkv=11), False),
    (dict(window=(50, None)), False), (dict(causal=False), False), (dict(causal=False, window=(50, 3)), False),
    (dict(ragged=True), False), (dict(varlen=True), False), (dict(deterministic=True), False), (dict(d=64), False),
])  # fmt: skip
def test_calls_whose_first_dQ_is_stored(more, stores):
    """Short ones of many heads whose band has no lower end: where it has one, and with lengths, who comes first is not
    known. Not where the same rows of many query heads come together."""
    asked = problem(**WGMMA | dict(B=1, Hq=128, Hkv=128, T=512, d=128, dv=128, causal=True) | more)
    tiles = plan_tiles(asked, H200, "backward")
    constants = dict(tiles.constants)
    assert tiles.family == "wgmma" and constants["STORES"] == stores
    assert not (stores and asked.d == 128 and constants["FUSED"])


@pytest.mark.parametrize("d, dv, shape, buffers, own", [
    (64, 64, (256, 64), 2, True),
    (8, 40, (256, 64), 2, True),
    (128, 128, (128, 128), 2, True),
    (96, 96, (128, 128), 2, True),
    (192, 128, (128, 128), 1, False),
    (192, 192, (128, 96), 1, False),
    (256, 256, (128, 80), 1, False),
    (64, 256, (128, 80), 2, True),  # O has no room in Q's place
])  # fmt: skip
def test_blocks_of_warpgroups(d, dv, shape, buffers, own):
    for dtype in ("float16", "bfloat16"):
        tiles = on_warpgroups(d=d, dv=dv, dtype=dtype)
        assert (tiles.family, tiles.br, tiles.bc) == ("wgmma", *shape)
        assert tiles.smem_bytes <= chip("sm_90").on_chip_bytes
        constants = dict(tiles.constants)
        assert constants["Q_BUFFERS"] == buffers and constants["OWN_O"] == own
        groups = tiles.br // 64  # registers are given out by warpgroups, and these enter with what all can have
        entering = 65536 // (128 * (groups + 1)) // 8 * 8
        taken = constants["PRODUCER_REGISTERS"] + groups * constants["CONSUMER_REGISTERS"]
        assert taken <= (groups + 1) * min(entering, 168)
        assert "wgmma" in str(tiles) and "tensor maps" in str(tiles)


@pytest.mark.parametrize("more", [dict(), dict(causal=True), dict(window=(3, 5)), dict(ragged=True)])
def test_short_heads_have_blocks_of_their_own(more):
    for rows, shape in ((128, (128, 128)), (192, (128, 128)), (193, (256, 64)), (5000, (256, 64))):
        tiles = on_warpgroups(d=64, dv=64, Tq=rows, Tk=rows, B=64, **more)
        assert (tiles.br, tiles.bc) == shape
        constants = dict(tiles.constants)
        assert constants["EVERY_OWN"] == (shape == (256, 64)) != constants["TURNS"]
        assert tiles.smem_bytes <= chip("sm_90").on_chip_bytes
        entering = 65536 // (tiles.br * 2 + 128) // 8 * 8
        taken = constants["PRODUCER_REGISTERS"] + tiles.br // 64 * constants["CONSUMER_REGISTERS"]
        assert taken <= (tiles.br // 64 + 1) * entering


def test_bands_of_whole_or_packed_sequences_have_blocks_of_their_own():
    two, three = (128, 128), (192, 64)
    for rows, more, shape in (
        (4096, dict(), two), (4096, dict(causal=True), three), (4096, dict(window=(9, None)), three),
        (4096, dict(causal=True, ragged=True), two), (4096, dict(varlen=True), two),
        (4096, dict(causal=True, varlen=True), three), (20000, dict(causal=True, varlen=True), three),
        (192, dict(causal=True), two), (193, dict(causal=True), three), (8192, dict(causal=True), three),
        (8193, dict(causal=True), two),
    ):  # fmt: skip
        tiles = on_warpgroups(d=128, dv=128, Tq=rows, Tk=rows, B=64, **more)
        assert (tiles.br, tiles.bc) == shape


def test_what_leaves_more_registers_for_options():
    for option in (dict(alibi=True), dict(softcap=3.0)):
        assert [on_warpgroups(d=d, dv=d, **option).bc for d in (64, 128, 192, 256)] == [128, 96, 96, 64]
        assert on_warpgroups(**option).br == 128


@pytest.mark.parametrize("options", [
    dict(causal=True), dict(window=(3, 5)), dict(varlen=True), dict(ragged=True), dict(softcap=2.0), dict(alibi=True),
    dict(sinks=True), dict(scale=0.3), dict(Tk=1), dict(deterministic=True), dict(layout="bthd"),
])  # fmt: skip
def test_problems_of_warpgroups(options):
    tiles, uneven = on_warpgroups(**options), {"causal", "window", "varlen", "ragged"}
    assert tiles.family == "wgmma"
    assert tiles.grid == min(132, 16 * -(-options.get("Tq", 4096) // tiles.br))
    assert dict(tiles.constants)["DYNAMIC"] == bool(uneven & options.keys())


def test_the_last_pieces_are_shared_where_that_gains():
    """Of 132 multiprocessors: as many pieces as rows / 128 or rows / 256 for each of 16 heads."""
    for more, shared in (
        (dict(), False), (dict(B=32, d=64, dv=64, Tq=2048, Tk=2048), True), (dict(B=8, Hq=16, Tq=2048, Tk=2176), True),
        (dict(B=8, Hq=16, Tq=2048, Tk=2048), False),  # pieces of fewer blocks of keys: 64 / 132 of 16 are less than 8
        (dict(B=1, Hq=4, Tq=2112, Tk=1920), False),  # 64 / 132 of 15, which are too few anyhow
        (dict(B=1, Hq=4, Tq=2112, Tk=8192), True), (dict(B=1, Hq=4, Tq=4224, Tk=8192), False),  # 68 pieces, 132
        (dict(Tk=1 << 23), True), (dict(Tk=1 << 29), False),  # more blocks of keys than 32 bits count
        (dict(B=1, Hq=64, d=256, dv=256), True),
    ):  # fmt: skip
        tiles = on_warpgroups(**(dict(d=128, dv=128) | more))
        to_dv = -(-tiles.resident[-1].cols // 64) * 64
        assert dict(tiles.constants)["BALANCED"] == shared
        assert tiles.parts_bytes == (132 * tiles.br * (to_dv + 8) * 4 if shared else 0)
        assert ("shared by 132" in str(tiles)) == shared
        pieces = -(-more.get("Tq", 4096) // tiles.br) * more.get("B", 2) * more.get("Hq", 8)
        assert tiles.grid == (132 if shared else min(132, pieces))
    long = dict(B=8, Hq=16, Tq=2048, Tk=4096, d=128, dv=128)
    assert on_warpgroups(**long).parts_bytes > 0
    for option in ("causal", "ragged", "varlen", "alibi"):  # not alike, or of many registers
        assert on_warpgroups(**long, **{option: True}).parts_bytes == 0
    assert on_warpgroups(**long, softcap=3.0).parts_bytes == 0
    assert on_warpgroups(**long, sinks=True).parts_bytes > 0


@pytest.mark.parametrize("options", [
    dict(dtype="float32"), dict(dtype="float64"), dict(algorithm="fa1"), dict(dv=36), dict(d=264, dv=264),
    dict(page=16), dict(bias=(1, 1, 4096, 4096)), dict(dropout=0.1), dict(mask="dense"), dict(scale=0.0),
    dict(scale=-1.0), dict(scale=1e25), dict(softcap=1e30), dict(sram=65536), dict(Tq=16), dict(Tk=0),
    dict(boxes=False), dict(B=1 << 24, Tq=17),
])  # fmt: skip
def test_other_problems_go_where_they_went(options):
    plan = on_warpgroups(**options)
    assert plan.family != "wgmma" and plan.grid == 0 and plan.constants == (
        (("P_STAYS", 1),) if plan.family == "double" else ()
    )
    elsewhere = plan_tiles(problem(**(WGMMA | options)), replace(H200, name="sm_91"), "forward")
    assert plan == replace(elsewhere, chip="sm_90")


def test_few_pieces_are_left_to_kernels_that_share_keys_out():
    for pieces in (16, 48, 56):
        family = "wgmma" if pieces > 0.4 * 132 else "mma"
        small = WGMMA | dict(B=pieces // 8, Hkv=8, Tq=100, Tk=100)
        assert plan_tiles(problem(**small), H200, "forward").family == family
        assert plan_tiles(problem(**small), replace(H200, processors=None), "forward").family == "wgmma"
        for options in ({}, dict(deterministic=True), dict(d=256)):  # which shares keys out itself, or is faster still
            assert plan_tiles(problem(**(small | options)), H200, "backward").family == "wgmma"
    assert on_warpgroups(B=1, Hq=1, Hkv=1, Tq=128, Tk=16384).parts > 1


def test_other_chips_have_no_warpgroups():
    for row in CHIPS.values():
        for backend in ("cupy_raw", "numba_cuda"):
            family = plan_tiles(problem(**(WGMMA | dict(backend=backend))), kernels_on(backend, row), "forward").family
            assert (family == "wgmma") == ((row.name, backend) == ("sm_90", "cupy_raw"))


@pytest.mark.parametrize("arch, d, dv, bc", [
    ("sm_90", 16, 16, 64), ("sm_90", 64, 64, 64), ("sm_90", 96, 96, 64), ("sm_90", 64, 97, 32), ("sm_90", 128, 128, 32),
    ("sm_90", 136, 136, 24), ("sm_90", 160, 144, 24), ("sm_80", 64, 64, 64), ("sm_80", 96, 96, 32),
])  # fmt: skip
def test_float64_blocks_in_which_P_stays(arch, d, dv, bc):
    asked = problem(dtype="float64", d=d, dv=dv, causal=True, backend="cupy_raw")
    on = kernels_on("cupy_raw", chip(arch))
    plan = plan_tiles(asked, on, "forward")
    assert (plan.family, plan.br, plan.bc, plan.constants) == ("double", 128, bc, (("P_STAYS", 1),))
    assert [tile.rows for tile in plan.resident if tile.where == "on-chip"] == [128, bc, bc]
    for option in (dict(alibi=True), dict(softcap=2.0), dict(algorithm="fa1")):
        other = plan_tiles(replace(asked, **option), on, "forward")
        assert "P_STAYS" not in dict(other.constants)


@given(blocks=st.integers(1, 5000), rows=st.integers(1, 300), group=st.integers(1, 8), processors=st.integers(1, 150))
@example(blocks=1, rows=5, group=8, processors=132)
def test_the_last_blocks_of_keys_are_divided(blocks, rows, group, processors):
    """Into one turn of all multiprocessors, or two, which end earlier than one whole block of keys."""
    divided = tiling._divided(blocks, rows, group, processors)
    halved, others, parts = divided[:3]
    if not divided.threads:
        assert divided == tiling.Divided() and divided.more == 0
        return
    assert halved + others == blocks % processors
    assert 2 * halved <= processors and parts * others <= processors
    assert 1 < parts <= min(rows, tiling.WGMMA_DIVIDED_MOST)
    assert divided.more == halved + (parts - 1) * others
    assert (0.5 * (halved > 0) + 1 / parts) * rows * group < rows * group


@given(blocks=st.integers(1, 2500), rows=st.integers(1, 150), group=st.integers(1, 8), processors=st.integers(1, 150))
@example(blocks=1024, rows=64, group=1, processors=114)
@example(blocks=3, rows=64, group=1, processors=1)
def test_clusters_are_divided_as_a_whole(blocks, rows, group, processors):
    """Both blocks of keys of each, between pairs of blocks of rows; each multiprocessor has at most one in a turn."""
    divided = tiling._divided(2 * blocks, 2 * rows, group, processors, 2)
    halved, others, parts = divided[:3]
    processors = max(processors, 2)
    assert halved % 2 == others % 2 == 0 and 2 * halved <= processors and parts * others <= processors
    if divided.threads:
        assert halved + others == 2 * (blocks % (processors // 2)) and 1 < parts <= rows


@given(keys=st.integers(1, 200), rows=st.integers(1, 200), heads=st.integers(1, 5), level=st.integers(1, 200))
@example(keys=33, rows=33, heads=2, level=16)
def test_blocks_of_threads_of_levels(keys, rows, heads, level):
    """Of the last blocks of keys of a head so many have one each, those before them two, and so on."""
    parts = -(-min(keys, rows) // level)
    divided = tiling.Divided(0, heads * keys, parts, level, 1, keys)
    assert divided.threads == heads * sum(min(n // level + 1, parts) for n in range(keys))


@pytest.mark.parametrize("heads, Tq, Tk", [(1, 4096, 4096), (3, 3072, 3072), (2, 9000, 3000), (2, 3000, 9000)])
def test_parts_go_up_and_down(heads, Tq, Tk):
    """All rows have a part, and dQ as many sums as a block of keys has parts."""
    tiles = in_order(Hq=heads, Tq=Tq, Tk=Tk, causal=True)
    divided, keys = tiles.divided, -(-Tk // 128)
    assert dict(tiles.constants)["DIAGONAL"] and divided.keys == keys and divided.others == heads * keys
    assert divided.parts * divided.level * 128 >= min(Tq, keys * 128) and 1 <= divided.up <= divided.parts
    assert divided.parts == dict(tiles.constants)["SUMS"]


def test_a_block_of_rows_has_no_parts():
    constants = dict(in_order(Hq=1, Tq=128, Tk=1024, causal=True).constants)
    assert constants["SUMS"] == 2 and not constants["DIAGONAL"]


def test_pieces_that_begin_in_turn():
    """The third one two later than the second, the last two later than that."""
    assert tiling.last_end([5.0, 4.0, 3.0, 3.0], 1, 1, 4) == 5.0
    assert tiling.last_end([5.0, 4.0, 3.0, 3.0], 1, 1, 4, turn=2.0, in_turn=3) == 7.0
    assert tiling.last_end([5.0, 4.0, 3.0, 3.0], 2, 2, 8, turn=2.0, in_turn=3) == 7.0  # each head by itself


@pytest.mark.parametrize("options, paired", [
    (dict(), 1), (dict(B=1, Tq=16384, Tk=16384), 1), (dict(d=96, dv=72), 1), (dict(Hq=64, Hkv=16), 1),
    (dict(Tq=2048), 1), (dict(Tq=1920), 0), (dict(Tq=4159), 1), (dict(Tq=4161), 1), (dict(Tk=4097), 1),
    (dict(Tk=4225), 1), (dict(causal=True), 1), (dict(causal=True, Tq=3840, Tk=3840), 0), (dict(window=(None, 9)), 1),
    (dict(causal=True, Tq=2048), 0), (dict(causal=True, Tk=4225), 1), (dict(causal=True, Tq=4224), 1),
    (dict(window=(3000, 0)), 0), (dict(window=(3000, None)), 0), (dict(causal=True, deterministic=True), 1),
    (dict(deterministic=True), 1), (dict(causal=True, B=16, Tq=1024, Tk=1024, deterministic=True), 0),
    (dict(B=16, Tq=1024, Tk=1024, deterministic=True), 1), (dict(B=32, Tq=512, Tk=512, deterministic=True), 0),
    (dict(causal=True, B=16, Tq=1024, Tk=1024), 0), (dict(ragged=True), 0), (dict(sinks=True), 0),
    (dict(d=64, dv=64), 0), (dict(dv=64), 0), (dict(d=256, dv=256), 0), (dict(Hq=4, Hkv=4), 1),
    (dict(Hq=32, Hkv=4, causal=True), 0), (dict(Hq=32, Hkv=8, causal=True), 1),
    # An odd number of blocks of keys
    (dict(Tk=2560), 1), (dict(Tk=2432), 0), (dict(Tk=2688), 1), (dict(causal=True, Tq=4224, Tk=4224), 0),
    (dict(causal=True, Tq=4450, Tk=4450), 1), (dict(Tk=1152, deterministic=True), 1),
    (dict(Tk=896, deterministic=True), 0), (dict(causal=True, Tq=2176, Tk=2176, deterministic=True), 1),
    (dict(causal=True, Tq=1920, Tk=1920, deterministic=True), 0),
    # Few blocks of keys
    (dict(Hq=1, Hkv=1), 1), (dict(Hq=1, Hkv=1, causal=True), 0), (dict(B=1, Hq=2, Hkv=2), 0),
    (dict(Hq=3, Hkv=3, causal=True, deterministic=True), 0),
    (dict(Hq=4, Hkv=4, causal=True, deterministic=True), 1), (dict(Hq=1, Hkv=1, causal=True, deterministic=True), 0),
    (dict(B=1, Hq=2, Hkv=2, deterministic=True), 1),
    (dict(B=1, Hq=1, Hkv=1, deterministic=True), 0), (dict(B=1, Hq=1, Hkv=1, causal=True, deterministic=True), 0),
])  # fmt: skip
def test_which_calls_have_pairs_of_blocks_of_threads(options, paired):
    """Long ones at d = 128, whose rows others prepare. Under a mask whose band has no lower end, by how many rows see a
    block of keys on average; where a block is alone, by how many there are."""
    fixed = dict(B=4, Hq=16, Hkv=16, Tq=4096, Tk=4096, d=128, dv=128, dtype="bfloat16", backend="cupy_raw")
    tiles = plan_tiles(problem(**(fixed | options)), H200, "backward")
    assert tiles.family == tiling.WGMMA and dict(tiles.constants).get("PAIRED", 0) == paired
    assert tiles.smem_bytes <= H200.on_chip_bytes


@pytest.mark.parametrize("options, fused", [
    (dict(), 1), (dict(Tq=4225), 1), (dict(Tk=896), 0), (dict(causal=True, Tk=1920), 0), (dict(window=(9000, 0)), 0),
    (dict(causal=True, B=16, Tq=1024, Tk=1024), 0), (dict(causal=True, B=8, Tq=2048, Tk=2048), 1),
    (dict(d=64, dv=64), 0), (dict(B=16, d=64, dv=64), 0), (dict(d=64, dv=64, Tq=4225), 0),
    (dict(d=64, dv=64, Tk=4225, causal=True), 1),
    (dict(d=64, dv=64, B=32, Tq=512, Tk=512), 0), (dict(d=64, dv=64, B=16, Tq=1024, Tk=1024, causal=True), 1),
    (dict(d=64, dv=64, B=64, Tq=512, Tk=512, causal=True), 1),
])  # fmt: skip
def test_which_calls_in_a_fixed_order_have_rows_that_others_prepare(options, fused):
    """At d = 128 those in pairs; of less than some rows a block of keys none, nor at d = 64 without a mask. The first
    one to add stores."""
    fixed = dict(B=4, Hq=16, Hkv=16, Tq=4096, Tk=4096, d=128, dv=128, dtype="bfloat16", backend="cupy_raw")
    tiles = plan_tiles(problem(**(fixed | options), deterministic=True), H200, "backward")
    constants = dict(tiles.constants)
    assert tiles.family == tiling.WGMMA and constants["FUSED"] == fused
    assert constants["PAIRED"] == (fused and tiles.br == 64) and constants["APART"] == (tiles.br == 128)
    assert constants["FIRST_STORES"]


@pytest.mark.parametrize("options", [dict(), dict(Tq=4225), dict(B=16, Tq=1024, Tk=1024)])
def test_others_clear_sums_in_a_fixed_order(options, monkeypatch):
    """At d = 64 without a mask, if they prepare rows: the first one to add does not store."""
    monkeypatch.setattr(tiling, "WGMMA_FUSED_IN_ORDER", {64: 544, 128: 768})
    monkeypatch.setattr(tiling, "WGMMA_SUMS", {256: (0.0, 0.0)})
    fixed = dict(B=4, Hq=16, Hkv=16, Tq=4096, Tk=4096, d=64, dv=64, dtype="bfloat16", backend="cupy_raw")
    constants = dict(plan_tiles(problem(**(fixed | options), deterministic=True), H200, "backward").constants)
    assert (constants["FUSED"], constants["APART"], constants["FIRST_STORES"]) == (1, 1, 0)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("options, fused", [
    (dict(), 1), (dict(B=2), 1), (dict(B=1, T=8192), 1), (dict(B=1, T=1024), 1), (dict(B=1, T=1024, causal=True), 0),
    (dict(B=8, T=384), 0), (dict(B=8, T=512), 1), (dict(T=2048, causal=True), 0), (dict(B=1, Hq=1), 0),
    (dict(B=1, Hq=8, Hkv=2), 0), (dict(B=1, Hq=6, Hkv=6, T=1024), 1), (dict(B=4, Hq=16, T=2048, causal=True), 1),
    (dict(sinks=True), 0),
])  # fmt: skip
def test_which_calls_have_rows_that_others_prepare(options, fused, d):
    """Without a mask all that are long enough, unless they have few blocks of keys, which are divided by heads then."""
    options = dict(B=4, Hq=8, T=4096) | options
    T, Hkv = options.pop("T"), options.pop("Hkv", options["Hq"])
    tiles = plan_tiles(
        problem(**options, Hkv=Hkv, Tq=T, Tk=T, d=d, dv=d, dtype="bfloat16", backend="cupy_raw"), H200, "backward")
    assert tiles.family == tiling.WGMMA and (tiles.lag > 0) == fused


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=9)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("empty", [dict(B=0), dict(Tq=0), dict(Tk=0), dict(B=0, Tq=0, Tk=0)])
def test_plans_of_calls_without_anything(direction, dtype, empty):
    """There are such calls."""
    for d in (16, 64, 128):
        sizes = dict(B=2, Tq=40, Tk=300, Hq=4, Hkv=2, d=d, dv=d) | empty
        for softcap in (None, 5.0):
            call = problem(**sizes, dtype=dtype, causal=True, softcap=softcap, backend="cupy_raw")
            assert plan_tiles(call, H200, direction).smem_bytes <= H200.on_chip_bytes


few = st.integers(1, 30)


@given(lengths=lengths, heads=few, section=few, processors=few, seed=few)
def test_when_the_last_multiprocessor_is_done(lengths, heads, section, processors, seed):
    """As if each took the next piece in turn, whoever is free first."""
    last = np.random.default_rng(seed).permutation(lengths).tolist()
    pieces = []
    for first in range(0, heads, section):
        some = min(section, heads - first)
        pieces += np.repeat(last if first + section >= heads else lengths, some).tolist()
    ends = np.zeros(processors)
    for piece in pieces:
        ends[np.argmin(ends)] += piece
    assert tiling.last_end(lengths, heads, section, processors, last) == ends.max()
    assert max(sum(pieces) / processors, max(lengths)) <= ends.max() <= sum(pieces)


@given(lengths=lengths, heads=few, usual=few, most=few, processors=few)
def test_heads_of_a_section(lengths, heads, usual, most, processors):
    """Others than usual only if the end comes earlier by what is asked for, and not more than there may be."""
    usual = min(usual, heads)
    order = tuple(sorted(lengths, reverse=True))
    found = tiling.heads_of_section(order, order, heads, usual, most, processors)
    if found == usual:
        return
    assert usual / 2 <= found <= most
    ends = [tiling.last_end(order, heads, n, processors) for n in (usual, found)]
    assert ends[0] - ends[1] > tiling.SECTION_GAIN * sum(lengths) * heads / processors


@pytest.mark.parametrize("heads, usual, most, found", [
    (16, 16, 32, 16), (17, 16, 32, 17), (17, 16, 16, 9), (20, 16, 32, 20), (64, 16, 32, 16), (24, 21, 42, 24),
    (24, 21, 21, 12), (6, 5, 5, 3), (1, 1, 2, 1), (100_000, 16, 32, 16),
])  # fmt: skip
def test_the_last_section_has_not_too_few_heads(heads, usual, most, found):
    """Of 17 heads the last would begin with its longest piece when others are nearly done."""
    order = tuple(float(n) for n in range(32, 0, -1))
    assert tiling.heads_of_section(order, order, heads, usual, most, 132) == found
    assert tiling.heads_of_section((7.0,) * 32, (7.0,) * 32, heads, usual, most, 132) == usual


@given(Tq=st.integers(1, 40), Tk=st.integers(1, 40), at=st.integers(0, 39), size=st.integers(1, 9), data=st.data())
def test_rows_and_keys_of_a_band(Tq, Tk, at, size, data):
    """Those that see, and are seen, from the first to the last."""
    sides = st.one_of(st.none(), st.integers(0, 40))
    window = data.draw(st.tuples(sides, sides))
    x = problem(B=1, Hq=1, Hkv=1, Tq=Tq, Tk=Tk, d=8, dv=8, dtype="bfloat16", window=window)
    lower, upper = x.band.bounds()
    distance = np.arange(Tk) - (np.arange(Tq)[:, None] + Tk - Tq)
    visible = (lower <= distance) & (distance <= upper)
    if at < Tk:
        assert tiling.rows_that_see(x, at, size) == visible[:, at : at + size].any(1).sum()
    if at < Tq:
        assert tiling.keys_seen(x, at, size) == visible[at : at + size].any(0).sum()


@pytest.mark.parametrize("options, sums", [  # SUMS, RESIDUES, DIAGONAL, and in how many parts
    (dict(Hq=1, T=16384, d=64), (4, 2, 0, 1)), (dict(Hq=1, T=16384, d=64, causal=True), (4, 2, 1, 2)),
    (dict(Hq=1, T=16384), (2, 1, 0, 1)), (dict(Hq=1, T=16384, causal=True), (2, 1, 1, 2)),
    (dict(Hq=1, T=16384, d=256), (4, 2, 0, 1)), (dict(Hq=1, T=16384, d=256, causal=True), (4, 2, 0, 1)),
    (dict(d=64), (4, 2, 0, 1)), (dict(), (2, 1, 0, 1)), (dict(d=256), (4, 2, 0, 1)), (dict(causal=True), (2, 1, 1, 2)),
    (dict(window=(None, 9)), (2, 1, 1, 2)), (dict(Hq=16, T=4096, causal=True), (1, 1, 0, 1)),
    (dict(Hq=1, causal=True, d=64), (7, 1, 1, 7)), (dict(Hq=1, causal=True), (7, 1, 1, 7)),
    (dict(Hq=2, causal=True), (4, 1, 1, 4)), (dict(Hq=1, causal=True, d=256), (4, 2, 0, 1)),
    (dict(Hq=3, T=8192, causal=True, d=64), (6, 2, 1, 3)), (dict(Hq=3, T=8192, causal=True), (3, 1, 1, 3)),
    (dict(Hq=16, Hkv=4, d=64), (2, 1, 0, 1)), (dict(Hq=16, Hkv=4), (2, 1, 0, 1)),
    (dict(Hq=16, Hkv=4, d=256), (4, 2, 0, 1)), (dict(T=2048, Tq=16384), (2, 1, 0, 2)),
    (dict(T=2048, Hq=1, causal=True), (8, 1, 1, 8)), (dict(T=6144, Hq=1, causal=True), (5, 1, 1, 5)),
    (dict(T=1408, Hq=5, causal=True), (4, 1, 1, 4)), (dict(T=1024, causal=True), (4, 1, 1, 4)),
    (dict(T=1024, Hq=16, causal=True), (1, 1, 0, 1)), (dict(T=1024, Hq=24, causal=True), (2, 1, 0, 1)),
    (dict(T=1024), (8, 4, 0, 4)), (dict(T=1024, Hq=32), (1, 1, 0, 1)), (dict(T=1024, Hq=64), (1, 1, 0, 1)),
    (dict(Hq=8, Hkv=4, causal=True), (2, 1, 1, 2)), (dict(Hq=16, Hkv=4, d=64, causal=True), (2, 1, 1, 2)),
    (dict(Hq=32, Hkv=16, d=64, causal=True), (2, 1, 0, 1)), (dict(Hq=8, Hkv=4, d=256, causal=True), (2, 1, 0, 1)),
    (dict(Hq=4, Hkv=2, T=2048, causal=True), (6, 1, 1, 6)), (dict(Hq=8, Hkv=1, causal=True), (2, 1, 0, 1)),
    (dict(Hq=4, Hkv=2, causal=True), (2, 1, 1, 2)), (dict(Hq=10, d=256, causal=True), (2, 1, 0, 1)),
    (dict(Hq=9, T=8192, d=256, causal=True), (4, 2, 0, 1)), (dict(Hq=32, d=64, dv=128, causal=True), (2, 1, 0, 1)),
    (dict(Hq=72, Hkv=36, T=4608, d=192, dv=128, causal=True), (2, 1, 0, 1)),  # 20 turns, of two query heads
    (dict(Hq=36, T=4608, d=192, dv=128, causal=True), (1, 1, 0, 1)),
    (dict(B=8, Hq=32, Hkv=16, T=1024, d=256, causal=True), (2, 1, 0, 1)),
    (dict(B=8, Hq=64, Hkv=32, T=960, d=256, causal=True), (1, 1, 0, 1)),
    (dict(Hq=108, Hkv=36, T=4608, d=192, dv=128, causal=True), (1, 1, 0, 1)),
    (dict(B=2, Hq=64, Hkv=32, T=5376, d=192, dv=128, causal=True), (2, 1, 0, 1)),  # 41 turns, of 1 GiB less 1 %
    (dict(B=2, Hq=64, Hkv=32, T=5504, d=192, dv=128, causal=True), (1, 1, 0, 1)),
])  # fmt: skip
def test_which_calls_have_several_sums(options, sums):
    """In a fixed order, those of few heads (SUMS in cuda/sm90/backward.cuh)."""
    tiles = in_order(**options)
    assert tiles.family == tiling.WGMMA
    constants = dict(tiles.constants)
    assert (*(constants[name] for name in ("SUMS", "RESIDUES", "DIAGONAL")), tiles.divided.parts) == sums


@pytest.mark.parametrize("options", [
    dict(deterministic=False), dict(deterministic=False, causal=True), dict(varlen=True),
    dict(varlen=True, causal=True), dict(window=(500, 0)), dict(window=(500, None)),
    dict(Hq=32, Hkv=4, causal=True), dict(Hq=64), dict(Hq=64, causal=True), dict(T=2048, Tq=16385),
    dict(T=2048, Tq=16385, causal=True), dict(Tq=511), dict(Hq=5, T=896, causal=True), dict(Hq=256, Hkv=4, T=16384),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("d", [64, 128, 256])
def test_which_calls_have_not(options, d):
    if d == 256 and options.get("T") == 896:  # twice as many blocks of keys
        options = options | dict(T=448)
    if d == 64 and options == dict(Hq=64):  # whose blocks of keys may be eight times as many
        options = dict(Hq=133)
    tiles = in_order(**options, d=d)
    assert tiles.family == tiling.WGMMA and dict(tiles.constants)["SUMS"] == 1


@pytest.mark.parametrize("options, sums, together, divided", [
    (dict(B=2, Hq=8, T=2048, d=64, dv=128), 2, 1, (0, 32, 4)), (dict(Hq=16, T=5824, d=64), 2, 1, (0, 46, 8)),
    (dict(Hq=48, Hkv=3, T=2560, d=64, dv=128), 2, 0, (0, 60, 2)), (dict(B=4, Hq=16, T=896), 1, 1, (0, 28, 4)),
    (dict(B=4, Hq=16, T=2752, d=64, dv=128), 2, 0, (66, 22, 6)),
    (dict(Hq=45, Hkv=3, T=1920, d=64, dv=128), 2, 0, (0, 45, 2)),
    (dict(B=2, Hq=16, T=1920, d=64, dv=128), 1, 1, (0, 30, 4)),
    (dict(B=4, Hq=16, T=768), 1, 1, (0, 24, 4)),  # too short for pairs of so few
    (dict(Hq=16, T=3008), 2, 0, (0, 24, 5)),
])  # fmt: skip
def test_query_heads_come_together_without_a_mask_as_far_as_l2_holds_their_sums(options, sums, together, divided):
    """Blocks of keys begin at rows of their own. Where L2 does not hold those of all heads, one comes after the other
    if there are blocks of keys enough for that; else all begin at the same rows, and add to one sum."""
    tiles = in_order(**dict(Hkv=1) | options)
    assert tiles.family == tiling.WGMMA
    assert [dict(tiles.constants)[name] for name in ("SUMS", "TOGETHER")] == [sums, together]
    assert tiles.divided[:3] == divided


@pytest.mark.parametrize("options, paired", [
    (dict(B=4, Hq=5, T=4224, d=96), 1), (dict(B=8, Hq=18, T=2944), 1), (dict(Hq=48, T=1408), 1),  # some divided
    (dict(Hq=36, T=1408), 1),
    (dict(Hq=24, T=1408), 0), (dict(Hq=72, T=1408), 0),  # in two turns; nothing to divide
])  # fmt: skip
def test_an_odd_number_of_blocks_of_keys_has_pairs_if_there_is_room_for_one_more(options, paired):
    """In a fixed order without a mask."""
    tiles = in_order(**options)
    assert tiles.family == tiling.WGMMA and dict(tiles.constants)["PAIRED"] == paired


@pytest.mark.parametrize("options", [
    dict(Hq=72, Hkv=36, T=4608, d=192, dv=128, causal=True), dict(Hq=8, causal=True), dict(Hq=2, d=256)])  # fmt: skip
def test_where_no_call_is_to_have_several_sums_none_has(options, monkeypatch):
    """As tests ask for that want one sum."""
    assert dict(in_order(**options).constants)["SUMS"] > 1
    monkeypatch.setattr(tiling, "WGMMA_SUMS", {256: (0.0, 0.0)})
    assert dict(in_order(**options).constants)["SUMS"] == 1


@pytest.mark.parametrize("options, by_head", [
    (dict(Hq=8, Hkv=1), 1), (dict(Hq=8, Hkv=2), 1), (dict(Hq=4, Hkv=2), 1), (dict(Hq=8, Hkv=4), 0),
    (dict(Hq=2, Hkv=1, T=2048), 0), (dict(Hq=32, Hkv=1), 0), (dict(Hq=8, Hkv=1, causal=False), 0),
    (dict(Hq=17, Hkv=1, d=64), 0), (dict(Hq=8, Hkv=2, T=8192), 1), (dict(Hq=32, Hkv=2, T=2048), 0),
    (dict(Hq=4, Hkv=1, T=1024), 1),
    (dict(Hq=8, Hkv=1, d=256), 0), (dict(Hq=8, Hkv=1, deterministic=False), 0), (dict(Hq=8, Hkv=1, varlen=True), 0),
    (dict(Hq=8, Hkv=1, d=64), 1), (dict(Hq=4), 0),
    # With more than eight of more than 64 columns, and with more than 16, up to fewer turns
    (dict(Hq=16, Hkv=1), 0), (dict(Hq=16, Hkv=1, d=64), 1), (dict(Hq=12, Hkv=1), 1), (dict(Hq=12, Hkv=1, T=5120), 0),
    (dict(Hq=8, Hkv=1, T=8192), 1), (dict(Hq=24, Hkv=1, T=2048), 0), (dict(Hq=24, Hkv=1, T=2048, d=64), 0),
    (dict(Hq=20, Hkv=1, T=1664), 1), (dict(Hq=24, Hkv=2, T=2048), 1), (dict(Hq=10, Hkv=1, T=5120), 1),
    (dict(Hq=11, Hkv=1, T=5120), 0), (dict(Hq=20, Hkv=1, T=2048), 0), (dict(Hq=20, Hkv=1, T=2048, d=64), 0),
])  # fmt: skip
def test_which_query_heads_have_blocks_of_threads_of_their_own(options, by_head):
    """BY_HEAD: those that share few blocks of keys, but have as many as multiprocessors are busy with."""
    tiles = in_order(**dict(causal=True) | options)
    constants = dict(tiles.constants)
    assert constants.get("BY_HEAD", 0) == by_head
    if by_head:
        assert constants["DIVIDED"] and constants["ONE_HEAD"] and constants["SUMS"] > 1


@pytest.mark.parametrize("options, sets", [
    (dict(d=64, dv=128), 2), (dict(d=40, dv=72), 2), (dict(d=64, softcap=3.0), 2), (dict(d=64), 1), (dict(), 1),
    (dict(softcap=3.0), 1), (dict(d=64, dv=128, deterministic=False), 1), (dict(d=64, dv=128, causal=True), 2),
    (dict(d=64, dv=128, varlen=True), 2), (dict(d=64, dv=128, Hq=64), 2),
])  # fmt: skip
def test_warpgroups_that_add_to_all_of_dQ_have_sums_of_their_own(options, sets):
    """In a fixed order."""
    assert dict(in_order(**options).constants)["SETS"] == sets


def in_order(**options):
    options = dict(B=1, Hq=4, T=4096, d=128, deterministic=True, dtype="bfloat16", backend="cupy_raw") | options
    return plan_tiles(problem(**dict(Hkv=options["Hq"], dv=options["d"]) | options), H200, "backward")


@pytest.mark.parametrize("options, divided", [
    (dict(), (66, 2, 8)), (dict(d=64, dv=64, Hq=32, Hkv=32), (0, 4, 8)), (dict(causal=True), (0, 0, 1)),
    (dict(deterministic=True), (66, 2, 8)), (dict(ragged=True), (0, 0, 1)), (dict(d=256, dv=256), (0, 0, 1)),
    (dict(B=32, Tq=512, Tk=512), (0, 0, 1)),
])  # fmt: skip
def test_which_calls_have_divided_blocks_of_keys(options, divided):
    fixed = dict(B=4, Hq=16, Hkv=16, Tq=4096, Tk=4096, d=128, dv=128, dtype="bfloat16", backend="cupy_raw")
    tiles = plan_tiles(problem(**(fixed | options)), H200, "backward")
    assert tiles.family == tiling.WGMMA and tiles.divided[:3] == divided
    assert dict(tiles.constants).get("DIVIDED", 0) == (divided != (0, 0, 1))
    assert ("the last 68 blocks of keys by 148 blocks of threads" in str(tiles)) == (divided == (66, 2, 8))


@pytest.mark.parametrize("options, divided", [
    (dict(), (0, 64, 2)), (dict(causal=True), (0, 64, 4)), (dict(window=(100, 0)), (0, 64, 2)),
    (dict(Hkv=32), (66, 2, 8)), (dict(Hkv=8, Tq=4096, Tk=4096), (0, 0, 1)), (dict(deterministic=True), (0, 64, 2)),
    (dict(Hq=1, d=64, dv=64, causal=True), (0, 64, 4)), (dict(Hq=1, Tq=64), (0, 0, 1)),
    (dict(d=256, dv=256), (0, 0, 1)), (dict(B=4, Tq=2048, Tk=2048), (0, 64, 2)), (dict(B=8), (0, 0, 1)),
    (dict(Tq=512, Tk=512), (0, 4, 16)), (dict(Hq=6, Tq=512, Tk=512), (0, 4, 12)), (dict(Hq=7, Hkv=7), (0, 52, 2)),
    (dict(Hkv=2, causal=True), (0, 128, 2)), (dict(Hkv=4, causal=True), (0, 0, 1)),
])  # fmt: skip
def test_few_blocks_of_keys_are_divided_by_heads(options, divided):
    """Less than one for each multiprocessor, or less time by a tenth where a mask leaves some few rows. Among so many
    as there are query heads at most, or a multiple of these."""
    fixed = dict(B=1, Hq=32, Hkv=1, Tq=8192, Tk=8192, d=128, dv=128, dtype="bfloat16", backend="cupy_raw")
    tiles = plan_tiles(problem(**(fixed | options)), H200, "backward")
    constants = dict(tiles.constants)
    if constants.get("FUSED"):
        assert options.get("Hkv", 7) > 4 and tiles.divided[:3] == divided
    else:
        assert tiles.divided[:3] == divided and constants.get("TOGETHER", 0) == (divided[1] > 0 or "causal" in options)
    assert not (constants.get("STORES") and constants.get("TOGETHER"))


@pytest.mark.parametrize("heads, T, d, parts, in_order", [
    # A mask, few heads: as many as the longest then take no longer than all together
    (6, 2048, 128, 2, (3, 7, 1)), (8, 2048, 128, 2, (2, 9, 1)), (10, 2048, 128, 1, (2, 9, 1)),
    (5, 4096, 128, 2, (2, 17, 1)), (6, 4096, 128, 1, (2, 17, 1)), (3, 8192, 128, 2, (3, 25, 1)),
    (4, 4096, 64, 2, (2, 16, 1)), (12, 2048, 64, 1, (1, 0, 0)), (16, 1024, 128, 1, (1, 0, 0)),
    (8, 384, 128, 1, (1, 0, 0)),
])  # fmt: skip
def test_blocks_of_keys_of_uneven_lengths_are_divided(heads, T, d, parts, in_order):
    """As measured (bench/notes/sm90.md, run AB). In a fixed order into so many parts, of as many rows as so many blocks
    of keys, so many of which go up (DIAGONAL)."""
    fixed = dict(B=1, Hq=heads, Hkv=heads, Tq=T, Tk=T, d=d, dv=d, dtype="bfloat16", backend="cupy_raw", causal=True)
    assert plan_tiles(problem(**fixed), H200, "backward").divided.parts == parts
    assert plan_tiles(problem(**fixed, deterministic=True), H200, "backward").divided[2:5] == in_order


@pytest.mark.parametrize("heads, T, d, parts, in_order", [
    ((16, 4), 512, 64, 4, 4), ((10, 5), 2048, 64, 2, 3), ((24, 12), 1024, 64, 2, 2), ((24, 6), 1500, 128, 4, 4),
    ((16, 4), 3000, 64, 4, 3), ((24, 6), 4096, 128, 2, 2), ((64, 8), 3000, 128, 4, 4), ((96, 3), 4096, 128, 8, 8),
    ((6, 3), 3000, 128, 4, 4),
])  # fmt: skip
def test_blocks_of_keys_of_few_query_heads_are_divided(heads, T, d, parts, in_order):
    """As above; in a fixed order by heads alone. Of many query heads into more parts."""
    Hq, Hkv = heads
    fixed = dict(B=1, Hq=Hq, Hkv=Hkv, Tq=T, Tk=T, d=d, dv=d, dtype="bfloat16", backend="cupy_raw", causal=True)
    assert plan_tiles(problem(**fixed), H200, "backward").divided.parts == parts
    assert plan_tiles(problem(**fixed, deterministic=True), H200, "backward").divided.parts == in_order


@pytest.mark.parametrize("options, together, fused", [
    (dict(), 0, 1), (dict(Hkv=8), 0, 1), (dict(Hkv=4), 1, 0), (dict(Hkv=8, Tq=2048, Tk=2048), 1, 0),
    (dict(Hkv=16, Tq=2048, Tk=2048), 0, 1), (dict(Hkv=4, causal=False), 0, 1), (dict(Hkv=4, deterministic=True), 0, 1),
    (dict(B=1, Hq=64, Hkv=8, Tq=3328, Tk=3328, deterministic=True), 1, 0),
    (dict(Hkv=8, window=(500, 0)), 1, 0), (dict(Hkv=4, d=64, dv=64), 1, 0), (dict(Hkv=4, B=64, Tq=512, Tk=512), 0, 0),
    (dict(Hkv=8, Tq=2048, Tk=2048, varlen=True), 0, 0), (dict(Hkv=4, varlen=True), 1, 0),
])  # fmt: skip
def test_rows_of_many_query_heads_come_together(options, together, fused):
    """Under a mask, from four on; from eight where there would be pairs, or sequences are packed; in a fixed order not
    in pairs; in short calls the first dQ is stored."""
    fixed = dict(B=8, Hq=32, Hkv=32, Tq=4096, Tk=4096, d=128, dv=128, dtype="bfloat16", backend="cupy_raw", causal=True)
    tiles = plan_tiles(problem(**(fixed | options)), H200, "backward")
    constants = dict(tiles.constants)
    assert (constants["TOGETHER"], constants["FUSED"], constants["DIVIDED"] * together) == (together, fused, 0)


@pytest.mark.parametrize("group, B, T, down", [
    (1, 8, 2048, False), (2, 8, 2048, False), (2, 8, 2176, False), (4, 8, 8192, False), (3, 8, 4608, False),
    (8, 8, 30000, False), (4, 8, 512, True), (4, 8, 384, True), (4, 8, 256, False),
    # Few blocks of keys for each multiprocessor
    (4, 2, 2048, False), (4, 2, 1536, True), (4, 1, 2048, True), (8, 1, 3072, True), (8, 1, 3456, False),
])  # fmt: skip
def test_rows_of_grouped_heads_go_down_in_a_fixed_order(group, B, T, down):
    """As measured (bench/notes/sm90.md, runs AG and AK): otherwise in pairs, or the last keys first."""
    fixed = dict(B=B, Hq=8 * group, Hkv=8, Tq=T, Tk=T, d=128, dv=128, dtype="bfloat16", backend="cupy_raw", causal=True)
    constants = dict(plan_tiles(problem(**fixed, deterministic=True), H200, "backward").constants)
    assert (constants["TOGETHER"], constants["LAST_FIRST"]) == ((1, 0) if down else (0, 1))
    assert constants["PAIRED"] == (not down and T > 512)


@pytest.mark.parametrize("lag, divided", [(68, (66, 2, 8)), (67, (0, 0, 1))])
def test_divided_blocks_of_keys_are_those_whose_rows_no_other_finishes(lag, divided, monkeypatch):
    monkeypatch.setattr(tiling, "WGMMA_FUSED_LAG", (lag + 0.5) / H200.processors)
    asked = problem(B=4, Hq=16, Hkv=16, T=4096, d=128, dtype="bfloat16", backend="cupy_raw")
    tiles = plan_tiles(asked, H200, "backward")
    assert tiles.lag == lag and tiles.divided[:3] == divided


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_backward_passes_of_16_bits_on_sm_90(dtype):
    """Tiles of cuda/sm90/fa2_backward.cu, for what that has; other calls and other chips are planned as ever."""

    def planned(arch="sm_90", direction="backward", backend="cupy_raw", **options):
        fixed = dict(B=2, Hq=8, Hkv=2, Tq=300, Tk=5000, d=64, dv=64, dtype=dtype, backend=backend)
        return plan_tiles(Problem(**(fixed | options)), kernels_on(backend, chip(arch)), direction)

    for d in range(8, 129, 8):
        for dv in (8, 64, 72, 128):
            tiles = planned(d=d, dv=dv, causal=True)
            assert tiles.family == tiling.WGMMA
            assert (tiles.br, tiles.bc) == (64 if max(d, dv) > 64 else 128, 128)
            assert tiles.smem_bytes <= chip("sm_90").on_chip_bytes
    for d, dv in [*((d, d) for d in range(136, 257, 8)), (192, 128), (8, 136), (256, 64), (256, 192)]:
        tiles = planned(d=d, dv=dv, causal=True)
        assert tiles.family == tiling.WGMMA and (tiles.br, tiles.bc) == (64, 64)
        slabs = -(-d // 64) + -(-dv // 64)
        stages, places = {6: (3, 1), 7: (2, 2), 8: (2, 1)}.get(slabs, (3, 2))
        switches = {"FIRST_STORES": 0, "LAST_FIRST": 0, "SUMS": 1, "RESIDUES": 1, "DIAGONAL": 0, "ONE_HEAD": 0}
        assert dict(tiles.constants) == {"STAGES": stages, "P_TILES": places, "DQ_COLUMNS": 64} | switches
        assert tiles.smem_bytes + 16 <= chip("sm_90").on_chip_bytes
        in_order = planned(d=d, dv=dv, causal=True, deterministic=True)
        assert in_order.smem_bytes == tiles.smem_bytes + 16  # two barriers
        assert dict(in_order.constants) == dict(tiles.constants) | {"FIRST_STORES": 1}
    assert planned(d=128, deterministic=True).family == tiling.WGMMA
    # The last keys first, unless that lets query heads that share key heads wait for each other
    for options, last_first in (
        (dict(causal=True), 1), (dict(), 0), (dict(causal=True, window=(50, None)), 0), (dict(causal=True, Hkv=2), 0),
    ):  # fmt: skip
        tiles = planned(**dict(d=256, Hkv=8, deterministic=True) | options)
        assert dict(tiles.constants)["LAST_FIRST"] == last_first
    for options, together, last_first in (
        (dict(), 1, 0), (dict(d=64), 1, 0), (dict(varlen=True), 1, 0), (dict(softcap=3.0), 1, 0), (dict(Hkv=8), 0, 1),
        (dict(Tk=512), 1, 0), (dict(Tq=256, Tk=256), 0, 1), (dict(causal=False), 0, 0),
        (dict(causal=False, window=(50, 0)), 1, 0),
    ):  # fmt: skip
        tiles = planned(**dict(d=96, causal=True, deterministic=True, B=20) | options)
        assert [dict(tiles.constants)[name] for name in ("TOGETHER", "LAST_FIRST")] == [together, last_first]
    for options in (dict(softcap=3.0), dict(alibi=True), dict(d=256, softcap=3.0), dict(d=256, alibi=True)):
        tiles = planned(**options, Tq=5000)
        assert tiles.family == tiling.WGMMA and not dict(tiles.constants).get("FUSED")
    assert (planned(softcap=3.0).br, planned(alibi=True).br) == (64, 128)  # as registers are few
    assert planned(varlen=True, sinks=True).family == planned(varlen=True, sinks=True, d=256).family == tiling.WGMMA
    for line in ("barriers", "P and dS in 16, sums in 32 bits", "products by warpgroups (wgmma)"):
        assert line in str(planned())
    others = [
        dict(d=20), dict(dv=132), dict(d=264), dict(boxes=False), dict(Tq=0), dict(Tk=0),
        dict(d=136, dropout=0.1), dict(dropout=0.1), dict(bias=(1, 1, 1, 9)), dict(scale=-1.0),
        dict(softcap=1e-31), dict(softcap=3e38, scale=3e9), dict(sram=1 << 18), dict(algorithm="fa1"),
        dict(dtype="float32"), dict(arch="sm_100"), dict(arch="sm_80"), dict(backend="numba_cuda"),
    ]  # fmt: skip
    assert not any(planned(**other).family == tiling.WGMMA for other in others)


# ---- float32 from parts that were split before ---------------------------------------------------------------------


def float32(direction="forward", arch="sm_90", **more):
    return plan_tiles(problem(backend="cupy_raw", **more), kernels_on("cupy_raw", chip(arch)), direction)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("d", [8, 64, 72, 128])
def test_float32_is_split_before(d, direction):
    tiles = float32(direction, d=d, dv=d)
    wide = d > 64
    assert tiles.family == SPLIT_INPUTS and tiles.smem_bytes <= tiles.on_chip_bytes
    assert (tiles.br, tiles.bc) == ((128, 64) if direction == "forward" else (64, 64) if wide else (64, 128))
    matrices = {tile.name: tile.bytes for tile in tiles.resident if tile.itemsize == 2}
    assert matrices["K"] == 3 * tiles.bc * (128 if wide else 64) * 2
    assert "split once before" in str(tiles)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("more", [
    dict(T=SPLIT_LEAST - 1), dict(Tq=1), dict(Tk=100), dict(window=(SPLIT_LEAST // 2, 0)), dict(d=136, dv=136),
    dict(dv=136), dict(sram=232448), dict(softcap=1.0), dict(alibi=True), dict(dropout=0.1), dict(bias=(1, 1, 1, 4096)),
    dict(page=16), dict(dtype="float64"), dict(dtype="float16"), dict(algorithm="fa1"), dict(arch="sm_80"),
    dict(arch="sm_89"),
], ids=str)  # fmt: skip
def test_other_calls_are_not(more, direction):
    if not ({"page"} & more.keys() and direction == "backward"):
        assert float32(direction, **more).family != SPLIT_INPUTS


def test_only_forward_passes_are_split_before_if_deterministic():
    assert float32(deterministic=True).family == SPLIT_INPUTS
    assert float32("backward", deterministic=True).family == "split"
