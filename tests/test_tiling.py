"""Blocks from M: the formula, the byte sum, the granule, and honest refusals."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawflash import masks as M
from rawflash import tiling
from rawflash.errors import BackendError, ProblemError, TileError
from rawflash.hardware import CHIPS, Chip, chip, chip_of, kernels_on
from rawflash.problem import Problem
from rawflash.sm90 import MMA_LONGEST
from rawflash.tiles import FEW_MMA, RESIDENT, SPLIT_INPUTS, STREAMED, Tiles
from rawflash.tiling import DAO_BACKWARD_BLOCKS, SPLIT_LEAST, key_ranges, parts_of, plan_tiles
from rawflash.traffic import visits

LOOPS = Chip("loops", 1 << 16, 1, "loops")
VECTOR = Chip("vector", 1 << 16, 16, "vector", 512)
H200 = replace(kernels_on("cupy_raw", chip("sm_90")), processors=132)
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
    assert by_raw(T=MMA_LONGEST).family == "simt"
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
            assert tiles.family == FEW_MMA or (arch == "sm_86" and d > 128)
            assert (tiles.parts - 1) * tiles.part_keys < 5000 <= tiles.parts * tiles.part_keys
    few = planned(d=64, dv=64)
    assert few.parts > 1 and few.br == 16 and planned(d=64, dv=64, Tq=5).br == 32
    assert few.parts * 4 <= 132 * 4 and planned(d=64, dv=64, B=100).parts == 1
    others = [dict(Tq=17), dict(dtype="float32"), dict(algorithm="fa1"), dict(varlen=True)]
    assert not any(planned(d=64, dv=64, **other).family == FEW_MMA for other in others)


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
    tiles = Tiles(16, tiling.FEW_MMA_STEP, family=FEW_MMA, parts=parts)
    for keys in (0, 1, 127, 128, 129, 5000, 8192, 10**6):
        count = tiling.parts_of(tiles, 0, keys)
        turn = tiling.FEW_MMA_STEP * tiling.FEW_MMA_WARPS
        turns = [len(range(part, -(-keys // turn), count)) for part in range(count)]
        _, most = tiling._few_mma_parts(keys, parts, tiling.FEW_MMA_STEP)
        assert 1 <= count <= parts and most == max(turns[0], 1) * turn
        assert count == 1 or min(turns) >= tiling.FEW_MMA_LEAST // turn


# ---- float64 products on tensor cores ---------------------------------------------------------------


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
