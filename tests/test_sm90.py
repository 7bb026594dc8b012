"""Plans of the kernels of sm_90: which calls they take, blocks, and how the work is shared out."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_tiling import H200, problem

from rawflash import sm90
from rawflash.hardware import CHIPS, chip, kernels_on
from rawflash.problem import Problem
from rawflash.tiles import Divided
from rawflash.tiling import plan_tiles

WGMMA = dict(dtype="bfloat16", backend="cupy_raw", B=2, Hq=8, Hkv=2)


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


@given(blocks=st.integers(1, 5000), rows=st.integers(1, 300), group=st.integers(1, 8), processors=st.integers(1, 150))
@example(blocks=1, rows=5, group=8, processors=132)
def test_the_last_blocks_of_keys_are_divided(blocks, rows, group, processors):
    """Into one turn of all multiprocessors, or two, which end earlier than one whole block of keys."""
    divided = sm90._divided(blocks, rows, group, processors)
    halved, others, parts = divided[:3]
    if not divided.threads:
        assert divided == Divided() and divided.more == 0
        return
    assert halved + others == blocks % processors
    assert 2 * halved <= processors and parts * others <= processors
    assert 1 < parts <= min(rows, sm90.WGMMA_DIVIDED_MOST)
    assert divided.more == halved + (parts - 1) * others
    assert (0.5 * (halved > 0) + 1 / parts) * rows * group < rows * group


@given(blocks=st.integers(1, 2500), rows=st.integers(1, 150), group=st.integers(1, 8), processors=st.integers(1, 150))
@example(blocks=1024, rows=64, group=1, processors=114)
@example(blocks=3, rows=64, group=1, processors=1)
def test_clusters_are_divided_as_a_whole(blocks, rows, group, processors):
    """Both blocks of keys of each, between pairs of blocks of rows; each multiprocessor has at most one in a turn."""
    divided = sm90._divided(2 * blocks, 2 * rows, group, processors, 2)
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
    divided = Divided(0, heads * keys, parts, level, 1, keys)
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
    assert sm90.last_end([5.0, 4.0, 3.0, 3.0], 1, 1, 4) == 5.0
    assert sm90.last_end([5.0, 4.0, 3.0, 3.0], 1, 1, 4, turn=2.0, in_turn=3) == 7.0
    assert sm90.last_end([5.0, 4.0, 3.0, 3.0], 2, 2, 8, turn=2.0, in_turn=3) == 7.0  # each head by itself


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
    (dict(Hq=32, Hkv=4, causal=True), 1), (dict(Hq=32, Hkv=8, causal=True), 1),
    # An odd number of blocks of keys
    (dict(Tk=2560), 1), (dict(Tk=2432), 0), (dict(Tk=2688), 1), (dict(causal=True, Tq=4224, Tk=4224), 0),
    (dict(causal=True, Tq=4450, Tk=4450), 1), (dict(Tk=1152, deterministic=True), 1),
    (dict(Tk=896, deterministic=True), 0), (dict(causal=True, Tq=2176, Tk=2176, deterministic=True), 1),
    (dict(causal=True, Tq=1920, Tk=1920, deterministic=True), 0),
    # Few blocks of keys
    (dict(Hq=1, Hkv=1), 1), (dict(Hq=1, Hkv=1, causal=True), 0), (dict(B=1, Hq=2, Hkv=2), 1),
    (dict(Hq=3, Hkv=3, causal=True, deterministic=True), 0),
    (dict(Hq=4, Hkv=4, causal=True, deterministic=True), 1), (dict(Hq=1, Hkv=1, causal=True, deterministic=True), 0),
    (dict(B=1, Hq=2, Hkv=2, deterministic=True), 1),
    (dict(B=1, Hq=1, Hkv=1, deterministic=True), 1), (dict(B=1, Hq=1, Hkv=1, causal=True, deterministic=True), 0),
])  # fmt: skip
def test_which_calls_have_pairs_of_blocks_of_threads(options, paired):
    """Long ones at d = 128, whose rows others prepare. Under a mask whose band has no lower end, by how many rows see a
    block of keys on average; where a block is alone, by how many there are."""
    fixed = dict(B=4, Hq=16, Hkv=16, Tq=4096, Tk=4096, d=128, dv=128, dtype="bfloat16", backend="cupy_raw")
    tiles = plan_tiles(problem(**(fixed | options)), H200, "backward")
    assert tiles.family == "wgmma" and dict(tiles.constants).get("PAIRED", 0) == paired
    assert tiles.smem_bytes <= H200.on_chip_bytes


@pytest.mark.parametrize("options, fused", [
    (dict(), 1), (dict(Tq=4225), 1), (dict(Tk=896), 0), (dict(causal=True, Tk=1920), 0), (dict(window=(9000, 0)), 0),
    (dict(Tq=641, Tk=704), 1), (dict(Tq=640, Tk=704), 0), (dict(causal=True, B=2, Hq=49, Hkv=49, Tq=1280, Tk=1280), 0),
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
    assert tiles.family == "wgmma" and constants["FUSED"] == fused
    assert constants["PAIRED"] == (fused and tiles.br == 64) and constants["APART"] == (tiles.br == 128)
    assert constants["FIRST_STORES"]


@pytest.mark.parametrize("options", [dict(), dict(Tq=4225), dict(B=16, Tq=1024, Tk=1024)])
def test_others_clear_sums_in_a_fixed_order(options, monkeypatch):
    """At d = 64 without a mask, if they prepare rows: the first one to add does not store."""
    monkeypatch.setattr(sm90, "WGMMA_FUSED_IN_ORDER", {64: 544, 128: 768})
    monkeypatch.setattr(sm90, "WGMMA_SUMS", {256: (0.0, 0.0)})
    fixed = dict(B=4, Hq=16, Hkv=16, Tq=4096, Tk=4096, d=64, dv=64, dtype="bfloat16", backend="cupy_raw")
    constants = dict(plan_tiles(problem(**(fixed | options), deterministic=True), H200, "backward").constants)
    assert (constants["FUSED"], constants["APART"], constants["FIRST_STORES"]) == (1, 1, 0)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("options, fused", [
    (dict(), 1), (dict(B=2), 1), (dict(B=1, T=8192), 1), (dict(B=1, T=1024), 1), (dict(B=1, T=1024, causal=True), 0),
    (dict(B=8, T=384), 0), (dict(B=8, T=512), 1), (dict(T=2048, causal=True), 0), (dict(B=1, Hq=6, Hkv=6, T=1024), 1),
    (dict(B=4, Hq=16, T=2048, causal=True), 1), (dict(sinks=True), 0),
])  # fmt: skip
def test_which_calls_have_rows_that_others_prepare(options, fused, d):
    """Without a mask all that are long enough, if blocks of keys are not few."""
    options = dict(B=4, Hq=8, T=4096) | options
    T, Hkv = options.pop("T"), options.pop("Hkv", options["Hq"])
    tiles = plan_tiles(
        problem(**options, Hkv=Hkv, Tq=T, Tk=T, d=d, dv=d, dtype="bfloat16", backend="cupy_raw"), H200, "backward")
    assert tiles.family == "wgmma" and (tiles.lag > 0) == fused


@pytest.mark.parametrize("shape, deterministic, fused", [  # query heads, key heads, B, T, d
    ((9, 1, 1, 3904, 128), False, 1), ((16, 4, 1, 1152, 128), False, 1), ((3, 1, 2, 3712, 128), False, 1),
    ((2, 2, 1, 4224, 128), False, 0), ((16, 1, 2, 4224, 128), False, 0), ((32, 1, 1, 5824, 96), False, 0),
    ((1, 1, 4, 4416, 128), False, 1), ((24, 8, 1, 1408, 96), False, 0), ((7, 1, 1, 4736, 128), False, 0),
    ((5, 5, 5, 3904, 128), False, 1), ((8, 1, 4, 832, 128), False, 0), ((36, 3, 1, 1920, 64), False, 0),
    ((36, 3, 1, 1728, 96), False, 0), ((7, 1, 1, 6080, 96), False, 0), ((9, 1, 1, 7488, 64), False, 1),
    ((8, 1, 1, 2304, 64), False, 1), ((48, 3, 3, 640, 64), False, 0),
    ((9, 1, 1, 3904, 128), True, 1), ((9, 1, 3, 1216, 128), True, 1), ((16, 1, 4, 1152, 96), True, 1),
    ((32, 1, 1, 5824, 96), True, 1), ((2, 2, 1, 4224, 128), True, 0), ((16, 1, 2, 4224, 128), True, 0),
    ((36, 36, 1, 1408, 128), True, 1), ((28, 28, 2, 896, 128), True, 0), ((24, 24, 1, 1408, 128), True, 0),
    ((20, 4, 3, 1152, 128), True, 1), ((4, 1, 2, 1728, 96), True, 0), ((12, 1, 1, 2624, 128), True, 0),
    ((35, 5, 1, 768, 128), True, 0), ((12, 12, 1, 3456, 128), True, 1),
])  # fmt: skip
def test_without_a_mask_rows_of_others_go_by_steps(shape, deterministic, fused):
    """As measured (bench/notes/sm90.md, run AP)."""
    Hq, Hkv, B, T, d = shape
    fixed = dict(B=B, Hq=Hq, Hkv=Hkv, Tq=T, Tk=T, d=d, dv=d, dtype="bfloat16", backend="cupy_raw")
    tiles = plan_tiles(problem(**fixed, deterministic=deterministic), H200, "backward")
    assert tiles.family == "wgmma" and dict(tiles.constants)["FUSED"] == fused


@pytest.mark.parametrize("heads, Tq, Tk, d, deterministic, fused", [  # for each multiprocessor
    (4, 7424, 7424, 128, False, 0), (8, 4096, 4096, 128, False, 1),  # 1.8 pairs; 1.9
    (4, 16128, 16128, 64, False, 0), (8, 9152, 9152, 64, False, 1),  # 3.8 of one block of threads; 4.4
    (1, 832, 9856, 128, True, 1), (4, 1472, 15872, 64, True, 0), (4, 1024, 16896, 64, True, 1),  # 0.6; 3.8, 4.0
])  # fmt: skip
def test_under_a_mask_rows_of_others_take_enough_blocks_of_keys(heads, Tq, Tk, d, deterministic, fused):
    fixed = dict(B=1, Hq=heads, Hkv=heads, Tq=Tq, Tk=Tk, d=d, dv=d, dtype="bfloat16", backend="cupy_raw")
    tiles = plan_tiles(problem(**fixed, causal=True, deterministic=deterministic), H200, "backward")
    assert tiles.family == "wgmma" and dict(tiles.constants)["FUSED"] == fused


@pytest.mark.parametrize("options, lag, paired, divided, steps", [
    (dict(), 1, 0, (0, 0, 1), 30 + 6),  # two blocks of keys of two heads on four multiprocessors
    (dict(Tk=260), 1, 0, (0, 0, 1), 2 * 36), (dict(Tk=260), 1, 1, (0, 0, 1), 2 * 36),
    (dict(Hkv=4, Tk=90), 1, 0, (0, 0, 1), 36), (dict(Hkv=4, Tk=90), 1, 1, (0, 0, 1), 2 * 36),
    (dict(Hkv=5, Tk=90), 1, 1, (0, 0, 1), 3 * 36),
    (dict(Tk=260), 1, 0, (0, 2, 2), 36 + 15 + 6 + 1), (dict(Hkv=3), 1, 0, (0, 0, 1), 2 * 36),
    (dict(Tk=260), 1, 1, (0, 4, 2), 36 + 18 + 6 + 1),  # three of five pairs of blocks of rows
    (dict(Tk=600), 1, 0, (2, 4, 4), 36 + 15 + 6 + 1 + 9 + 6 + 2),
    (dict(), 0, 0, (0, 4, 2), 2 * (2 * 10 + 6)), (dict(), 0, 0, (0, 4, 3), 3 * (10 + 6)),
    (dict(), 0, 0, (0, 4, 6), 6 * (5 + 6)), (dict(), 0, 0, (0, 4, 9), 9 * (4 + 6)),
    (dict(d=64, dv=64), 1, 0, (0, 4, 2), 18 + 6 + 1),
])  # fmt: skip
def test_steps_of_blocks_of_keys_without_a_mask(options, lag, paired, divided, steps):
    """Of three query heads for each of two key heads, and ten blocks of rows."""
    fixed = dict(B=1, Hkv=2, Tq=640, Tk=256, d=128, dv=128, dtype="bfloat16", backend="cupy_raw") | options
    of = problem(Hq=3 * fixed["Hkv"], **fixed)
    tiles = plan_tiles(of, H200, "backward")
    constants = dict(tiles.constants) | {"PAIRED": paired, "TOGETHER": int(not lag and divided[1] > 0)}
    tiles = replace(tiles, lag=lag, divided=Divided(*divided), constants=tuple(constants.items()))
    assert sm90._steps_without_mask(of, tiles, 4) == steps
    assert not paired or sm90._steps_without_mask(of, tiles, 5) == steps  # one cannot be half of a pair


@pytest.mark.parametrize("T, deterministic, fused", [(440, False, 0), (448, False, 1), (700, True, 1), (640, True, 0)])
def test_rows_of_a_last_block_count_as_a_whole_one_in_a_fixed_order(T, deterministic, fused):
    fixed = dict(B=8, Hq=8, Hkv=8, Tq=T, Tk=T, d=128, dv=128, dtype="bfloat16", backend="cupy_raw")
    tiles = plan_tiles(problem(**fixed, deterministic=deterministic), H200, "backward")
    assert tiles.family == "wgmma" and (tiles.lag > 0) == fused


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=9)


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
    assert sm90.last_end(lengths, heads, section, processors, last) == ends.max()
    assert max(sum(pieces) / processors, max(lengths)) <= ends.max() <= sum(pieces)


@given(lengths=lengths, heads=few, usual=few, most=few, processors=few)
def test_heads_of_a_section(lengths, heads, usual, most, processors):
    """Others than usual only if the end comes earlier by what is asked for, and not more than there may be."""
    usual = min(usual, heads)
    order = tuple(sorted(lengths, reverse=True))
    found = sm90.heads_of_section(order, order, heads, usual, most, processors)
    if found == usual:
        return
    assert usual / 2 <= found <= most
    ends = [sm90.last_end(order, heads, n, processors) for n in (usual, found)]
    assert ends[0] - ends[1] > sm90.SECTION_GAIN * sum(lengths) * heads / processors


@pytest.mark.parametrize("heads, usual, most, found", [
    (16, 16, 32, 16), (17, 16, 32, 17), (17, 16, 16, 9), (20, 16, 32, 20), (64, 16, 32, 16), (24, 21, 42, 24),
    (24, 21, 21, 12), (6, 5, 5, 3), (1, 1, 2, 1), (100_000, 16, 32, 16),
])  # fmt: skip
def test_the_last_section_has_not_too_few_heads(heads, usual, most, found):
    """Of 17 heads the last would begin with its longest piece when others are nearly done."""
    order = tuple(float(n) for n in range(32, 0, -1))
    assert sm90.heads_of_section(order, order, heads, usual, most, 132) == found
    assert sm90.heads_of_section((7.0,) * 32, (7.0,) * 32, heads, usual, most, 132) == usual


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
        assert sm90.rows_that_see(x, at, size) == visible[:, at : at + size].any(1).sum()
    if at < Tq:
        assert sm90.keys_seen(x, at, size) == visible[at : at + size].any(0).sum()


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
    assert tiles.family == "wgmma"
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
    assert tiles.family == "wgmma" and dict(tiles.constants)["SUMS"] == 1


@pytest.mark.parametrize("options, sums, together, divided", [
    (dict(B=2, Hq=8, T=2048, d=64, dv=128), 2, 1, (0, 32, 4)), (dict(Hq=16, T=5824, d=64), 2, 1, (0, 46, 8)),
    (dict(Hq=48, Hkv=3, T=2560, d=64, dv=128), 2, 0, (0, 60, 2)), (dict(B=4, Hq=16, T=896), 2, 0, (0, 32, 4)),
    (dict(B=4, Hq=16, T=2752, d=64, dv=128), 2, 0, (66, 22, 6)),
    (dict(Hq=45, Hkv=3, T=1920, d=64, dv=128), 2, 0, (0, 45, 2)),
    (dict(B=2, Hq=16, T=1920, d=64, dv=128), 1, 1, (0, 30, 4)), (dict(B=4, Hq=16, T=768), 1, 1, (0, 24, 4)),
    (dict(Hq=16, T=3008), 2, 0, (0, 24, 5)),
    # Where some are divided by rows in less time, these are, and not by heads unevenly
    (dict(Hq=4, T=11008, d=64), 4, 0, (66, 20, 6)), (dict(Hq=12, Hkv=3, T=3712, d=64, dv=128), 2, 0, (66, 21, 6)),
    (dict(Hq=5, T=12544, d=64), 4, 0, (66, 32, 4)), (dict(Hq=8, Hkv=2, T=9344, d=64), 2, 0, (0, 14, 8)),
    (dict(Hq=9, Hkv=3, T=3456, d=64), 2, 1, (0, 81, 3)), (dict(B=3, Hq=4, T=4224, d=64), 2, 0, (66, 33, 4)),
    (dict(Hq=6, T=10688, d=64), 2, 1, (0, 84, 3)), (dict(B=8, Hq=48, Hkv=3, T=768, d=64, dv=128), 1, 1, (0, 144, 4)),
    (dict(Hq=4, Hkv=4, T=5120, d=64, dv=128), 4, 1, (0, 160, 3)),  # not of one query head
    # Two to four query heads of few columns: in up to eight parts, neighbouring ones with sums of their own
    (dict(Hq=2, T=4160, d=64), 4, 1, (0, 33, 4)), (dict(Hq=2, T=5376, d=64), 4, 1, (0, 42, 6)),
    (dict(Hq=4, T=5696, d=64), 4, 1, (0, 45, 8)), (dict(Hq=5, T=5696, d=64), 2, 1, (0, 45, 5)),
    (dict(Hq=1, T=4160, d=64), 8, 1, (0, 33, 4)), (dict(Hq=1, T=3200, d=64), 8, 1, (0, 25, 4)),
    (dict(Hq=2, T=4160, d=64, dv=128), 2, 1, (0, 33, 4)), (dict(Hq=16, T=1024, d=64), 2, 1, (0, 8, 16)),
])  # fmt: skip
def test_query_heads_come_together_without_a_mask_as_far_as_l2_holds_their_sums(options, sums, together, divided):
    """Blocks of keys begin at rows of their own. Where L2 does not hold those of all heads, one comes after the other
    if there are blocks of keys enough for that; else all begin at the same rows, and add to one sum."""
    tiles = in_order(**dict(Hkv=1) | options)
    assert tiles.family == "wgmma"
    assert [dict(tiles.constants)[name] for name in ("SUMS", "TOGETHER")] == [sums, together]
    assert tiles.divided[:3] == divided


@pytest.mark.parametrize("options, paired", [
    (dict(B=4, Hq=5, T=4224, d=96), 1), (dict(B=8, Hq=18, T=2944), 1), (dict(Hq=48, T=1408), 1),  # some divided
    (dict(Hq=36, T=1408), 1),
    (dict(Hq=24, T=1408), 0), (dict(Hq=72, T=1408), 1),  # in two turns, and one more; in six, and one more
    # Seven blocks of keys: of few heads, and of more where they are shared
    (dict(B=2, Hq=13, T=896), 1), (dict(B=2, Hq=25, T=896), 0), (dict(B=2, Hq=29, T=896), 0),
    (dict(B=8, Hq=20, Hkv=5, T=896), 1), (dict(B=4, Hq=60, Hkv=30, T=896), 1), (dict(B=4, Hq=68, Hkv=34, T=896), 0),
    (dict(B=2, Hq=87, Hkv=29, T=640), 0), (dict(B=2, Hq=87, Hkv=29, Tq=896, T=640), 0),  # five
    (dict(B=2, Hq=13, Tq=4096, T=896, deterministic=False), 0),
    (dict(B=8, Hq=24, Hkv=4, Tq=1500, T=1920, causal=True), 0),
])  # fmt: skip
def test_which_odd_numbers_of_blocks_of_keys_have_pairs(options, paired):
    """In a fixed order without a mask."""
    tiles = in_order(**options)
    assert tiles.family == "wgmma" and dict(tiles.constants)["PAIRED"] == paired


@pytest.mark.parametrize("options", [
    dict(Hq=72, Hkv=36, T=4608, d=192, dv=128, causal=True), dict(Hq=8, causal=True), dict(Hq=2, d=256)])  # fmt: skip
def test_where_no_call_is_to_have_several_sums_none_has(options, monkeypatch):
    """As tests ask for that want one sum."""
    assert dict(in_order(**options).constants)["SUMS"] > 1
    monkeypatch.setattr(sm90, "WGMMA_SUMS", {256: (0.0, 0.0)})
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
    assert tiles.family == "wgmma" and tiles.divided[:3] == divided
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
        assert options.get("Hkv", 7) >= 4 and tiles.divided[:3] == divided
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
    ((16, 4), 512, 64, 8, 4), ((10, 5), 2048, 64, 2, 3), ((24, 12), 1024, 64, 2, 2), ((24, 6), 1500, 128, 4, 4),
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
    (dict(), 0, 1), (dict(Hkv=8), 0, 1), (dict(Hkv=4), 0, 1), (dict(Hkv=8, Tq=2048, Tk=2048), 1, 0),
    (dict(Hkv=4, Tq=3072, Tk=3072), 1, 0), (dict(Hkv=16, Tq=2048, Tk=2048), 0, 1),
    (dict(Hkv=4, causal=False), 0, 1), (dict(Hkv=4, deterministic=True), 0, 1),
    (dict(B=1, Hq=64, Hkv=8, Tq=3328, Tk=3328, deterministic=True), 1, 0),
    (dict(Hkv=8, window=(500, 0)), 1, 0), (dict(Hkv=4, d=64, dv=64), 1, 0), (dict(Hkv=16, B=64, Tq=512, Tk=512), 0, 0),
    (dict(Hkv=8, Tq=2048, Tk=2048, varlen=True), 0, 0), (dict(Hkv=4, varlen=True), 1, 0),
])  # fmt: skip
def test_rows_of_many_query_heads_come_together(options, together, fused):
    """Under a mask, from four on, from eight where sequences are packed; not in pairs; in short calls the first dQ is
    stored."""
    fixed = dict(B=8, Hq=32, Hkv=32, Tq=4096, Tk=4096, d=128, dv=128, dtype="bfloat16", backend="cupy_raw", causal=True)
    tiles = plan_tiles(problem(**(fixed | options)), H200, "backward")
    constants = dict(tiles.constants)
    assert (constants["TOGETHER"], constants["FUSED"]) == (together, fused)


@pytest.mark.parametrize("processors, divided", [(4, (0, 2, 2)), (2, (0, 0, 1)), (1, (0, 0, 1))])
def test_parts_that_are_done_first(processors, divided):
    """Two query heads, blocks of keys of four and of two blocks of rows. A block of threads takes 4 steps more than it
    has, one that shares a block of keys 7: whole, 12 and 8 steps; by heads, twice 11 and twice 9; heads by rows, four
    times 9 and four times 8."""
    asked = problem(B=1, Hq=2, Hkv=1, T=256, d=128, dtype="bfloat16", backend="cupy_raw", causal=True)
    assert sm90._divided_by_heads(asked, processors, 64, 128)[:3] == divided


@pytest.mark.parametrize("heads, B, T, d, parts", [
    ((8, 1), 1, 5120, 64, 8), ((8, 1), 1, 6144, 64, 8), ((16, 2), 2, 2944, 128, 4), ((12, 4), 1, 5120, 128, 3),
    ((20, 4), 1, 2048, 128, 5), ((32, 2), 1, 2304, 64, 8), ((48, 6), 1, 3328, 128, 4), ((24, 2), 1, 1536, 128, 12),
    ((28, 4), 1, 2048, 128, 4), ((36, 9), 1, 3072, 128, 1), ((32, 1), 1, 8192, 128, 4),
])  # fmt: skip
def test_parts_of_query_heads_that_share_keys(heads, B, T, d, parts):
    """As measured (bench/notes/sm90.md, run AN): of as many query heads each, unless these are seven."""
    fixed = dict(B=B, Hq=heads[0], Hkv=heads[1], Tq=T, Tk=T, d=d, dv=d, dtype="bfloat16", backend="cupy_raw")
    assert plan_tiles(problem(**fixed, causal=True), H200, "backward").divided.parts == parts


@pytest.mark.parametrize("options, parts", [
    (dict(Hq=16, T=5824), 8), (dict(Hq=32, T=5824, d=96), 8), (dict(Hq=7, T=4736), 7),
    (dict(Hq=12, Hkv=3, T=3712, d=64, dv=128), 4), (dict(Hq=7, B=4, T=4608, d=64, dv=128), 6),
])  # fmt: skip
def test_parts_of_unlike_numbers_of_heads_take_as_long_as_the_longest(options, parts):
    """Without a mask, where all blocks of keys run at once (bench/notes/sm90.md, run AO)."""
    fixed = dict(B=1, Hkv=1, d=128, dtype="bfloat16", backend="cupy_raw") | options
    tiles = plan_tiles(problem(**dict(dv=fixed["d"]) | fixed), H200, "backward")
    assert tiles.family == "wgmma" and tiles.divided.parts == parts and dict(tiles.constants)["TOGETHER"]


@pytest.mark.parametrize("options, parts", [
    (dict(Hq=32, T=8192), 8), (dict(B=4, Hq=24, Hkv=2, T=1984), 4), (dict(B=8, Hq=48, Hkv=3, T=768, d=64, dv=128), 4),
    (dict(Hq=64, Hkv=8, B=3, T=1088), 1),  # not divided at all
    (dict(Hq=71, T=2048), 16), (dict(Hq=128, T=2048), 16),  # of more, where there can be no more parts
    (dict(Hq=80, Hkv=4, T=8192, d=64), 2),  # or where two gain, and five do not
])  # fmt: skip
def test_in_a_fixed_order_parts_have_up_to_four_query_heads(options, parts):
    """As measured (bench/notes/sm90.md, run AO)."""
    tiles = in_order(**dict(Hkv=1, causal=True) | options)
    assert tiles.family == "wgmma" and tiles.divided.parts == parts and dict(tiles.constants)["SUMS"] == 1


@pytest.mark.parametrize("T", [1024, 2048, 4096])
def test_no_other_number_of_parts_is_much_better(T):
    """Of any number of heads, by going through the grid: those whose parts are of as many heads are preferred, by as
    much as they may be worse."""
    for group in (*range(2, 40), 51, 58, 62, 74, 128):
        fixed = dict(B=1, Hq=group, Hkv=1, T=T, d=128, dtype="bfloat16", backend="cupy_raw", causal=True)

        def end(parts, group=group):
            heads = [group * (n + 1) // parts - group * n // parts for n in range(min(parts, group))]
            return sm90.last_end([(T - j) // 64 * n + 7 for j in range(0, T, 128) for n in heads], 1, 1, 132)

        found = plan_tiles(problem(**fixed), H200, "backward").divided.parts
        assert found >= group or end(found) <= 1.16 * min(end(n) for n in range(2, min(group, 17)))


@pytest.mark.parametrize("d, dv", [(64, 64), (128, 128), (256, 256), (64, 128)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_empty_batches_are_those_of_other_kernels(d, dv, causal, deterministic):
    fixed = dict(B=0, Hq=8, Hkv=2, T=2048, d=d, dv=dv, dtype="bfloat16", backend="cupy_raw")
    assert plan_tiles(problem(**fixed, causal=causal, deterministic=deterministic), H200, "backward").family != "wgmma"


def test_long_calls_are_planned_by_some_of_their_blocks(monkeypatch):
    """Not in time that grows with them."""
    asked, seen = sm90.rows_that_see, []
    monkeypatch.setattr(sm90, "rows_that_see", lambda *of: seen.append(of) or asked(*of))
    call = problem(B=1, Hq=8, Hkv=1, T=1 << 29, d=128, dtype="bfloat16", backend="cupy_raw", causal=True)
    assert plan_tiles(call, H200, "backward").family == "wgmma" and 0 < len(seen) < 1000


@pytest.mark.parametrize("options, in_order", [
    # Many columns: by query heads of a key head, and by blocks of keys for each multiprocessor
    (dict(), True), (dict(B=8), True), (dict(B=32), False), (dict(Hq=10, T=8192), True), (dict(Hq=10, B=32), False),
    (dict(Hq=4), True), (dict(Hq=4, T=8192), False), (dict(Hq=8, T=8192), False), (dict(Hq=2), False),
    (dict(d=192, dv=128, B=32), True), (dict(d=192, dv=128, Hq=8, B=8), True), (dict(d=192, dv=128, Hq=8, B=16), True),
    (dict(d=192, dv=128, Hq=6, B=2), True), (dict(d=192, dv=128, Hq=6, B=8), False),
    # Of 256 columns more where turns are not nearly full, up to six
    (dict(Hq=8, B=5), True), (dict(Hq=8, B=4), False), (dict(Hq=8, B=8), False), (dict(Hq=6, B=5), True),
    (dict(Hq=4, B=5), False), (dict(Hq=8, B=11), True), (dict(Hq=8, B=13), False),
    (dict(d=192, dv=128, Hq=6, B=5), False),
    # Only where the band has an upper end alone, all rows and keys are known, and about as many
    (dict(causal=False), False), (dict(window=(500, 0)), False), (dict(varlen=True), False), (dict(ragged=True), False),
    (dict(Tk=4096), True), (dict(Tk=4160), False), (dict(Tq=4160), False),
    # Few columns, few blocks of keys in more than one turn, but not in two whole ones
    (dict(d=128, dv=128, Hkv=4, B=9, T=1024), True), (dict(d=128, dv=128, Hkv=4, B=8, T=1024), False),
    (dict(d=128, dv=128, Hkv=4, B=9, T=1280), False), (dict(d=128, dv=128, Hkv=4, B=4, T=1024), False),
    (dict(d=128, dv=128, Hkv=8, B=9, T=1024), False), (dict(d=64, dv=64, Hkv=4, B=9, T=1024), True),
    (dict(d=64, dv=128, Hkv=4, B=9, T=1024), False),
    # More columns of V than of K, no mask: where most multiprocessors would have nothing to do in the end
    (dict(d=64, dv=128, causal=False, Hq=10, Hkv=10), True), (dict(d=64, dv=128, causal=False, Hkv=16), False),
    (dict(d=64, dv=128, causal=False, Hq=10, Hkv=10, T=1920), False), (dict(d=64, dv=64, causal=False, Hkv=10), False),
    (dict(d=64, dv=128, causal=False, Hq=10, Hkv=10, softcap=1.0), False),
    (dict(d=64, dv=128, causal=False, Hq=4, Hkv=4, T=5120), False),  # divided anyway
    (dict(d=64, dv=128, causal=False, Hq=64, T=18304), False),  # not divided in an order either: too many bytes of sums
    # Many columns without a mask, many heads: from sixteen blocks of keys on, up to 192 columns
    (dict(d=192, dv=128, causal=False, Hkv=16, B=8), True), (dict(d=192, dv=128, causal=False, B=40, T=1024), True),
    (dict(d=192, dv=128, causal=False, Hkv=16, B=12, T=960), False), (dict(causal=False, Hkv=16, B=8), False),
    (dict(d=192, dv=128, causal=False, B=4), False), (dict(d=192, causal=False, Hkv=16, B=8), False),
    (dict(d=192, dv=128, causal=False, Hkv=16, T=16384), True),
    (dict(d=192, dv=128, causal=False, Hkv=16, T=16448), False),
    (dict(d=192, dv=128, causal=False, Hkv=16, B=8, softcap=1.0), False),
    (dict(d=192, dv=128, causal=False, Hkv=16, B=8, alibi=True), False),
    # Few rows, and rows that see no key
    (dict(d=128, dv=128, B=200, T=64), False), (dict(d=128, dv=128, Hkv=4, B=20, Tq=768, Tk=512), False),
])  # fmt: skip
def test_a_fixed_order_where_none_is_asked_for(options, in_order):
    """As measured (bench/notes/sm90.md, run AN), and then just as where one is."""
    fixed = dict(B=1, Hq=16, Hkv=2, T=2048, d=256, dv=256, dtype="bfloat16", backend="cupy_raw", causal=True) | options
    T = fixed.pop("T")
    asked = problem(**(dict(Tq=T, Tk=T) | fixed))
    tiles = plan_tiles(asked, H200, "backward")
    assert tiles.family == "wgmma" and tiles.in_order == in_order == ("in a fixed order" in str(tiles))
    other = plan_tiles(replace(asked, deterministic=True), H200, "backward")
    assert not other.in_order
    if in_order:
        assert replace(tiles, in_order=False) == other


@pytest.mark.parametrize("group, B, T, down", [
    (1, 8, 2048, False), (2, 8, 2048, False), (2, 8, 2176, False), (4, 8, 8192, False), (3, 8, 4608, False),
    (8, 8, 30000, False), (4, 8, 512, True), (4, 8, 384, True), (4, 8, 256, False),
    # Few blocks of keys for each multiprocessor, or a few more than two or four; three to five query heads
    (3, 1, 5120, True), (4, 1, 5120, True), (5, 1, 9216, True), (6, 1, 5120, False),
    (4, 1, 4096, False), (4, 1, 6144, False), (4, 1, 8192, False), (4, 2, 5376, False),
    (4, 2, 2048, False), (4, 2, 1536, True), (4, 1, 2048, True), (8, 1, 3072, True), (8, 1, 3456, False),
])  # fmt: skip
def test_rows_of_grouped_heads_go_down_in_a_fixed_order(group, B, T, down):
    """As measured (bench/notes/sm90.md, runs AG, AK and AN): otherwise in pairs, or the last keys first."""
    fixed = dict(B=B, Hq=8 * group, Hkv=8, Tq=T, Tk=T, d=128, dv=128, dtype="bfloat16", backend="cupy_raw", causal=True)
    constants = dict(plan_tiles(problem(**fixed, deterministic=True), H200, "backward").constants)
    assert (constants["TOGETHER"], constants["LAST_FIRST"]) == ((1, 0) if down else (0, 1))
    assert constants["PAIRED"] == (not down and T > 512)


@pytest.mark.parametrize("lag, divided", [(68, (66, 2, 8)), (67, (0, 0, 1))])
def test_divided_blocks_of_keys_are_those_whose_rows_no_other_finishes(lag, divided, monkeypatch):
    monkeypatch.setattr(sm90, "WGMMA_FUSED_LAG", (lag + 0.5) / H200.processors)
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
            assert tiles.family == "wgmma"
            assert (tiles.br, tiles.bc) == (64 if max(d, dv) > 64 else 128, 128)
            assert tiles.smem_bytes <= chip("sm_90").on_chip_bytes
    for d, dv in [*((d, d) for d in range(136, 257, 8)), (192, 128), (8, 136), (256, 64), (256, 192)]:
        tiles = planned(d=d, dv=dv, causal=True)
        assert tiles.family == "wgmma" and (tiles.br, tiles.bc) == (64, 64)
        slabs = -(-d // 64) + -(-dv // 64)
        stages, places = {6: (3, 1), 7: (2, 2), 8: (2, 1)}.get(slabs, (3, 2))
        switches = {"FIRST_STORES": 0, "LAST_FIRST": 0, "SUMS": 1, "RESIDUES": 1, "DIAGONAL": 0, "ONE_HEAD": 0}
        assert dict(tiles.constants) == {"STAGES": stages, "P_TILES": places, "DQ_COLUMNS": 64} | switches
        assert tiles.smem_bytes + 16 <= chip("sm_90").on_chip_bytes
        in_order = planned(d=d, dv=dv, causal=True, deterministic=True)
        assert in_order.smem_bytes == tiles.smem_bytes + 16  # two barriers
        assert dict(in_order.constants) == dict(tiles.constants) | {"FIRST_STORES": 1}
    assert planned(d=128, deterministic=True).family == "wgmma"
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
        assert tiles.family == "wgmma" and not dict(tiles.constants).get("FUSED")
    assert (planned(softcap=3.0).br, planned(alibi=True).br) == (64, 128)  # as registers are few
    assert planned(varlen=True, sinks=True).family == planned(varlen=True, sinks=True, d=256).family == "wgmma"
    for line in ("barriers", "P and dS in 16, sums in 32 bits", "products by warpgroups (wgmma)"):
        assert line in str(planned())
    others = [
        dict(d=20), dict(dv=132), dict(d=264), dict(boxes=False), dict(Tq=0), dict(Tk=0),
        dict(d=136, dropout=0.1), dict(dropout=0.1), dict(bias=(1, 1, 1, 9)), dict(scale=-1.0),
        dict(softcap=1e-31), dict(softcap=3e38, scale=3e9), dict(sram=1 << 18), dict(algorithm="fa1"),
        dict(dtype="float32"), dict(arch="sm_100"), dict(arch="sm_80"), dict(backend="numba_cuda"),
    ]  # fmt: skip
    assert not any(planned(**other).family == "wgmma" for other in others)
