"""In which order blocks of keys come in the backward pass of sm_90, by rawflash/sections.py."""

from dataclasses import replace

import numpy as np
import pytest

from rawflash import sections, sm90, tiling
from rawflash.backends.cupy_raw import fa2_backward
from rawflash.hardware import chip, kernels_on
from rawflash.problem import Problem
from rawflash.tiles import WGMMA

H200 = replace(kernels_on("cupy_raw", chip("sm_90")), processors=132)


def planned(**options):
    """The problem, its tiles, and their constants."""
    options = dict(B=1, Hq=8, T=4096, d=128, deterministic=True) | options
    T, defaults = options.pop("T"), dict(Hkv=options["Hq"], dv=options["d"])
    problem = Problem(**dict(Tq=T, Tk=T) | defaults | options, dtype="bfloat16", backend="cupy_raw")
    tiles = tiling.plan_tiles(problem, H200, "backward")
    assert tiles.family == WGMMA
    return problem, tiles, dict(tiles.constants)


def of_call(problem, tiles):
    """Heads in turn, and blocks of keys of each; as the kernels are launched."""
    together = 1 + dict(tiles.constants).get("PAIRED", 0)
    return fa2_backward._heads_in_turn(problem, tiles), -(-problem.Tk // (tiles.bc * together)) * together


def simulated(lengths, heads, late, group, residues, processors):
    """When all are done: step by step, the one that can be done first."""
    rows, blocks = max(lengths) // group, range(len(lengths))
    grid = [(block, head) for block in (*blocks[late:][::-1], *blocks[:late]) for head in range(heads)]
    sums, turns = {}, {}
    for block, head in grid:
        seen = range(rows - lengths[block] // group, rows)
        places = [(block < late, block % residues, head, row) for row in (seen[::-1] if block < late else seen)]
        sums[block, head] = places
        for place in places:
            turns.setdefault(place, []).append((block, head))
    free, idle, running = dict.fromkeys(turns, 0.0), [0.0] * processors, {}
    while grid or running:
        possible = []
        if grid and idle:
            possible.append((min(idle), 0, grid[0]))
        for work, (n, at) in running.items():
            if n == len(sums[work]):
                possible.append((at, 1, work))
            elif turns[sums[work][n]][0] == work:
                possible.append((max(at + group, free[sums[work][n]]), 2, work))
        at, what, work = min(possible)
        if what == 0:
            idle.remove(at)
            running[grid.pop(0)] = 0, at + sections.BLOCK_STEPS
        elif what == 1:
            del running[work]
            idle.append(at)
        else:
            n, place = running[work][0], sums[work][running[work][0]]
            turns[place].pop(0)
            free[place] = at + sections.TURN_STEPS
            running[work] = n + 1, at
    return max(idle)


@pytest.mark.parametrize("seed", range(60))
def test_the_end_of_turns_is_that_of_a_simulation(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    heads, group, residues, blocks = (int(rng.integers(*of)) for of in ((1, 4), (1, 3), (1, 3), (4, 9)))
    rows, processors = int(rng.integers(1, 3)), (3, 5)[seed % 2]
    most = int(rng.integers(blocks // 2, blocks + 1))  # fewer rows than keys
    lengths = [min(blocks - n, most) * rows * group for n in range(blocks)]
    lengths[-1] *= seed % 4 > 0  # no row sees the last keys
    monkeypatch.setattr(sections, "WGMMA_PROCESSORS", processors)
    ends = {late: sections._end_of_turns(lengths, heads, late, group, residues) for late in range(blocks + 1)}
    wanted = {late: simulated(lengths, heads, late, group, residues, processors) for late in ends}
    assert ends == pytest.approx(wanted)


@pytest.mark.parametrize("options, late", [
    (dict(Hq=6, T=8192), 44), (dict(Hq=8, d=64), 16), (dict(Hq=12, T=3072, d=64), 10),
    (dict(Hq=16, Hkv=8, d=64), 16), (dict(Hq=6, Hkv=2, T=5120), 22), (dict(Hq=6, d=256), 44),
    # Not what takes least time, but nearly: nearer to half, and not fewer
    (dict(Hq=32, T=1536, d=64), 8), (dict(Hq=17, T=4224, d=64), 22), (dict(Hq=14, T=2688), 17),
    (dict(Hq=16, T=2304, d=64), 7), (dict(Hq=16, T=2432, d=64), 8), (dict(Hq=14, T=1408), 6),
])  # fmt: skip
def test_as_many_blocks_of_keys_are_late_as_take_least_time(options, late):
    problem, tiles, constants = planned(**options, causal=True)
    heads, key_blocks = of_call(problem, tiles)
    assert sections.section_and_late(problem, tiles, heads, key_blocks) == (heads, late)
    group = 1 if constants.get("BY_HEAD") else problem.group
    rows = [sm90.rows_that_see(problem, j, tiles.bc) for j in range(0, problem.Tk, tiles.bc)]
    lengths = [-(-n // tiles.br) * group for n in rows]
    ends = {}
    for n in range(4, 15):
        end = sections._end_of_turns(lengths, heads, key_blocks * n // 16, group, constants["RESIDUES"])
        ends.setdefault(key_blocks * n // 16, end * (1 + 0.00125 * abs(n - 8) + 0.01 * (n < 8)))
    assert late == min(ends, key=ends.get)


@pytest.mark.parametrize("least, late", [(3.5, 46), (np.inf, 34)])
def test_many_columns_have_more_late_blocks_of_keys(least, late, monkeypatch):
    """Where there are many, whatever takes least time."""
    assert sections.LATE_WIDE == (3.5, 11)
    monkeypatch.setattr(sections, "LATE_WIDE", (least, 11))
    problem, tiles, _ = planned(Hq=14, Hkv=7, T=4352, d=192, causal=True)
    assert sections.section_and_late(problem, tiles, *of_call(problem, tiles)) == (7, late)


@pytest.mark.parametrize("options, in_order", [
    # In pairs, under a mask, where query heads share keys: all in two turns, half, all, as many as come in two turns
    (dict(Hq=32, Hkv=8, causal=True), 8), (dict(Hq=32, Hkv=8, T=5120, causal=True), 8),
    (dict(Hq=32, Hkv=8, T=7168, causal=True), 4), (dict(B=2, Hq=32, Hkv=8, T=6144, causal=True), 16),
    (dict(B=4, Hq=32, Hkv=8, T=6144, causal=True), 5),
    # Where two or three share them, five eighths for a while
    (dict(Hq=16, Hkv=8, T=8576, causal=True), 5), (dict(B=2, Hq=12, Hkv=4, T=8704, causal=True), 8),
    (dict(Hq=16, Hkv=8, T=8192, causal=True), 8), (dict(Hq=16, Hkv=8, T=9472, causal=True), 5),
    (dict(Hq=16, Hkv=8, T=10240, causal=True), 8), (dict(B=2, Hq=32, Hkv=8, T=4608, causal=True), 16),
    # Of very many blocks of keys two turns sooner
    (dict(Hq=14, Hkv=7, T=12032, causal=True), 7), (dict(Hq=14, Hkv=7, T=12288, causal=True), 2),
    (dict(Hq=10, Hkv=5, T=12288, causal=True), 5), (dict(Hq=30, Hkv=5, T=14592, causal=True), 5),
    (dict(Hq=30, Hkv=5, T=15104, causal=True), 2),
    # Where they do not: all, more than half, all; of few blocks of keys those in two turns; else by when they end
    (dict(Hq=7, T=8192, causal=True), 7), (dict(Hq=10, T=8192, causal=True), 6), (dict(Hq=12, T=8192, causal=True), 12),
    (dict(B=2, Hq=32, T=2048, causal=True), 16), (dict(B=8, Hq=16, T=2048, causal=True), 16),
    (dict(Hq=52, T=2048, causal=True), 13), (dict(Hq=48, T=2048, causal=True), 0),
    (dict(B=4, Hq=16, T=3072, causal=True), 11), (dict(B=4, Hq=16, causal=True), 0),
    (dict(Hq=16, T=8192, causal=True), 16), (dict(Hq=17, T=8192, causal=True), 0), (dict(Hq=16, causal=True), 0),
    (dict(Hq=16, T=6144, causal=True), 16), (dict(Hq=15, T=6144, causal=True), 0),
    (dict(Hq=16, T=5888, causal=True), 0), (dict(B=8, Hq=16, T=1024, causal=True), 0),
    # In pairs, no mask
    (dict(Hq=28, T=1024), 28), (dict(Hq=36, T=1024), 0), (dict(Hq=16, T=8192), 16), (dict(Hq=17, T=8192), 0),
    # One by one, no mask
    (dict(Hq=60, T=512), 60), (dict(Hq=80, T=512), 27), (dict(Hq=150, T=512), 30), (dict(Hq=300, T=512), 0),
    (dict(Hq=256, T=512, d=64), 64), (dict(B=16, Hq=16, T=384, d=64), 86), (dict(B=8, Hq=40, T=640, d=64), 0),
    (dict(Hq=400, T=448, d=256), 0), (dict(Hq=40, Tq=120, T=1024, d=256), 0),
    (dict(B=4, Hq=16, T=2048, varlen=True), 16), (dict(B=4, Hq=40, T=2048, varlen=True), 40),
    (dict(B=8, Hq=105, Hkv=15, T=768, d=64, dv=128), 20), (dict(B=8, Hq=15, T=768, d=64, dv=128), 40),
    (dict(B=3, Hq=105, Hkv=15, T=1664, d=64, dv=128), 15), (dict(B=8, Hq=48, Hkv=3, T=768, d=64, dv=128), 8),
    (dict(B=8, Hq=36, Hkv=6, T=640), 24), (dict(B=8, Hq=24, Hkv=6, T=640), 48), (dict(B=6, Hq=30, Hkv=5, T=768), 30),
    (dict(B=2, Hq=112, Hkv=16, T=384, d=256), 32), (dict(Hq=128, Hkv=2, T=16384, sinks=True), 2),
    # Rows go down, in sections alike
    (dict(B=8, Hq=28, Hkv=7, T=1280, d=96, causal=True), 19), (dict(Hq=80, Hkv=5, T=7872, d=64, causal=True), 3),
    (dict(B=8, Hq=32, Hkv=8, T=1024, causal=True), 32), (dict(B=8, Hq=32, Hkv=2, T=2048, d=64, causal=True), 16),
    (dict(B=2, Hq=32, Hkv=16, T=8192, d=64, causal=True, softcap=8.0), 32),
    (dict(Hq=64, Hkv=32, T=512, d=64, causal=True), 32), (dict(Hq=96, Hkv=1, T=2048, causal=True), 1),
    (dict(B=8, Hq=24, Hkv=3, T=960, d=64, dv=128, causal=True), 12), (dict(Hq=72, Hkv=9, T=2112, d=96, causal=True), 9),
    (dict(Hq=32, Hkv=8, d=256, causal=True), 4), (dict(Hq=32, Hkv=8, T=4608, d=256, causal=True), 4),
    (dict(Hq=32, Hkv=8, d=256, causal=True, varlen=True), 2),
    # Of many columns all in up to 2.6 turns, sections alike in up to four
    (dict(B=4, Hq=24, Hkv=8, T=1536, d=256, causal=True), 8), (dict(B=8, Hq=24, Hkv=8, T=3072, d=256, causal=True), 8),
    # Of many blocks of keys in up to 3.6, but of 256 columns if few share them
    (dict(B=2, Hq=20, Hkv=5, T=5120, d=256, causal=True), 5), (dict(B=2, Hq=25, Hkv=5, T=5120, d=256, causal=True), 1),
    (dict(Hq=56, Hkv=7, T=6272, d=192, dv=128, causal=True), 4),
    (dict(B=3, Hq=12, Hkv=3, T=5760, d=192, causal=True), 5),
    (dict(B=8, Hq=64, Hkv=8, T=2944, d=256, causal=True), 5),
    (dict(B=4, Hq=32, Hkv=8, T=2048, d=256, causal=True), 7), (dict(B=8, Hq=24, Hkv=8, T=2944, d=256, causal=True), 5),
    # Not so where sequences are packed, whose blocks of keys are in one line
    (dict(Hq=128, Hkv=16, T=2176, d=64, causal=True, varlen=True), 15),
    (dict(Hq=80, Hkv=16, T=832, d=256, causal=True, varlen=True), 1),
    (dict(Hq=20, Hkv=4, T=5120, d=256, causal=True), 4), (dict(Hq=24, Hkv=6, T=3072, d=192, dv=128, causal=True), 6),
    (dict(Hq=48, Hkv=12, T=2048, d=256, causal=True), 6), (dict(Hq=32, Hkv=8, T=3072, d=256, causal=True), 4),
])  # fmt: skip
def test_how_many_heads_a_section_has_in_a_fixed_order(options, in_order):
    """0: as many as :func:`_section` finds."""
    problem, tiles, constants = planned(**options)
    heads, key_blocks = of_call(problem, tiles)
    assert constants["SUMS"] == 1 and sections._section_in_order(problem, tiles, heads, key_blocks) == in_order
    section, late = sections.section_and_late(problem, tiles, heads, key_blocks)
    assert late == 0 and section == min(in_order, heads) or not in_order and 1 <= section < heads


@pytest.mark.parametrize("options, found", [
    (dict(Hq=48, T=3072, d=64), (16, 0)), (dict(Hq=28, T=1024, d=64), (28, 0)), (dict(Hq=64, d=64), (13, 0)),
    (dict(Hq=20, T=1024, d=256), (7, 0)), (dict(Hq=4, d=256), (2, 0)), (dict(Hq=16, Hkv=4, T=2048, d=256), (2, 0)),
    (dict(Hq=16, T=1024, d=256), (16, 0)), (dict(Hq=4, causal=True), (4, 0)),
    (dict(Hq=24, d=64, causal=True), (8, 16)), (dict(Hq=32, Hkv=16, d=256, causal=True), (4, 32)),
    (dict(Hq=32, Hkv=16, d=64, causal=True), (16, 16)), (dict(Hq=28, T=3072, d=64, causal=True), (28, 13)),
    # Without a mask fewer heads where more query heads share one's keys, of many columns, or of few blocks of keys
    (dict(B=2, Hq=120, Hkv=15, T=704, d=256), (1, 0)), (dict(B=2, Hq=30, T=704, d=256), (12, 0)),
    (dict(B=4, Hq=32, Hkv=8, T=1408, d=64), (8, 0)), (dict(B=4, Hq=32, Hkv=8, T=1664, d=64), (16, 0)),
    (dict(B=2, Hq=24, Hkv=6, T=2048, d=64), (12, 0)),
    # Two that share keys, up to 40 turns; of 256 columns and few keys in sections of at most 2.25 turns
    (dict(B=8, Hq=16, Hkv=8, T=2432, d=256, causal=True), (6, 19)),
    (dict(B=8, Hq=16, Hkv=8, T=2432, d=192, dv=128, causal=True), (8, 19)),
    (dict(Hq=72, Hkv=36, T=4608, d=192, dv=128, causal=True), (4, 36)),
    # Few columns: all heads in more turns, where their sums have 120 MiB (10 heads) and no more (8 heads of more rows)
    (dict(Hq=13, T=12288, d=64, causal=True), (13, 48)), (dict(Hq=14, T=12288, d=64, causal=True), (3, 48)),
    (dict(Hq=12, T=12288, d=64, causal=True), (12, 54)), (dict(Hq=10, T=12288, d=64, causal=True), (10, 66)),
    (dict(Hq=8, T=16384, d=64, causal=True), (2, 64)), (dict(Hq=16, T=8192, d=64, causal=True), (16, 32)),
    # Where query heads share keys, 100 MiB
    (dict(Hq=32, Hkv=16, T=7104, d=64, causal=True), (4, 28)),
    (dict(Hq=32, Hkv=16, T=6336, d=64, causal=True), (16, 40)),
    (dict(Hq=32, Hkv=16, T=6464, d=64, causal=True), (6, 25)),
    (dict(Hq=16, Hkv=8, T=10112, d=64, causal=True), (8, 49)),
    (dict(Hq=16, T=8192, d=64, dv=128, causal=True), (4, 32)), (dict(Hq=9, T=3072, d=256, causal=True), (5, 24)),
])  # fmt: skip
def test_how_many_heads_a_section_has_where_dq_has_several_sums(options, found):
    problem, tiles, constants = planned(**options)
    assert constants["SUMS"] > 1 and sections.section_and_late(problem, tiles, *of_call(problem, tiles)) == found


def test_sections_of_drawn_calls():
    """Of any call on sm_90 not more heads than there are."""
    rng, kinds = np.random.default_rng(0), set()
    for _ in range(400):
        group, Hkv = (int(rng.choice(n)) for n in ((1, 1, 2, 4, 8), (1, 2, 3, 5, 8, 16, 33)))
        Tq, Tk = (int(2 ** rng.uniform(6, 13.5)) for _ in range(2))
        B, d = int(rng.choice((1, 1, 2, 5, 16))), int(rng.choice((64, 96, 128, 192, 256)))
        options = dict(B=B, Hq=group * Hkv, Hkv=Hkv, Tq=Tq, Tk=Tk if rng.random() < 0.5 else Tq, d=d)
        options |= dict(deterministic=bool(rng.random() < 0.8), varlen=bool(rng.random() < 0.15))
        options |= (dict(), dict(causal=True), dict(window=(100, 0)))[int(rng.choice((0, 1, 1, 1, 2)))]
        problem, tiles, constants = planned(**options)
        heads, key_blocks = of_call(problem, tiles)
        section, late = sections.section_and_late(problem, tiles, heads, key_blocks)
        assert isinstance(section, int) and 1 <= section <= heads and 0 <= late <= key_blocks, options
        undivided = constants["SUMS"] > 1 and problem.has_band and not tiles.divided.threads
        assert late == 0 or undivided, options
        kinds.add((constants["SUMS"] > 1, constants.get("PAIRED"), tiles.lag > 0, section == heads, late > 0))
    assert len(kinds) > 12


@pytest.mark.parametrize("options, plan", [  # PAIRED, SUMS, BY_HEAD
    (dict(Hq=32, Hkv=8, causal=True), (1, 1, 0)), (dict(Hq=12, Hkv=4, T=5120, causal=True), (0, 1, 0)),
    (dict(Hq=6, Hkv=2, T=5120, causal=True), (0, 2, 1)), (dict(Hq=8, Hkv=4, causal=True), (0, 2, 0)),
    # Rows go down, or with more blocks of keys pairs
    (dict(Hq=24, Hkv=6, causal=True), (0, 1, 0)), (dict(Hq=28, Hkv=7, causal=True), (1, 1, 0)),
    (dict(Hq=64, Hkv=8, causal=True), (1, 1, 0)),
    # Pairs, where two query heads share keys
    (dict(Hq=22, Hkv=11, causal=True), (0, 2, 0)), (dict(Hq=24, Hkv=12, causal=True), (1, 1, 0)),
    (dict(Hq=24, Hkv=12, d=64, causal=True), (0, 2, 0)), (dict(Hq=12, causal=True), (0, 2, 0)),
    # Few columns, four query heads that share keys: where blocks of keys are divided by rows, or nearly fill two turns
    (dict(Hq=32, Hkv=8, T=3072, d=64, causal=True), (0, 1, 0)),
    (dict(Hq=24, Hkv=8, T=3072, d=64, causal=True), (0, 2, 0)),
    (dict(Hq=32, Hkv=8, T=3712, d=64, causal=True), (0, 1, 0)),
    (dict(Hq=32, Hkv=8, T=3840, d=64, causal=True), (0, 2, 0)),
    (dict(Hq=32, Hkv=8, T=4352, d=64, causal=True), (0, 1, 0)),
    (dict(Hq=16, Hkv=4, T=3776, d=64, causal=True), (0, 3, 0)),
    (dict(Hq=8, Hkv=2, T=7296, d=64, causal=True), (0, 3, 0)),
    (dict(Hq=4, Hkv=1, T=5120, d=64, causal=True), (0, 4, 1)),
    (dict(Hq=13, causal=True), (1, 1, 0)),
    # Short ones under a mask
    (dict(Hq=4, T=896, causal=True), (0, 4, 0)), (dict(Hq=5, T=896, causal=True), (0, 1, 0)),
    (dict(Hq=4, T=640, causal=True), (0, 1, 0)), (dict(Hq=18, T=896, causal=True), (0, 1, 0)),
    (dict(Hq=20, T=896, causal=True), (0, 2, 0)), (dict(Hq=57, T=896, causal=True), (0, 1, 0)),
    (dict(Hq=16, Hkv=2, T=1280, causal=True), (0, 2, 1)), (dict(Hq=24, Hkv=3, T=1280, causal=True), (0, 1, 0)),
    (dict(Hq=11, T=2048, d=256, causal=True), (0, 4, 0)), (dict(Hq=12, T=2048, d=256, causal=True), (0, 2, 0)),
    (dict(Hq=14, T=1024, causal=True), (0, 2, 0)), (dict(Hq=15, T=1024, causal=True), (0, 1, 0)),
    (dict(Hq=17, T=1024, causal=True), (0, 2, 0)), (dict(Hq=10, T=1536, causal=True), (0, 2, 0)),
    (dict(Hq=4, Hkv=2, T=512, causal=True), (0, 4, 0)), (dict(Hq=4, Hkv=2, T=384, causal=True), (0, 1, 0)),
    # No mask: long ones of few columns, or short ones of few heads
    (dict(Hq=48, T=3072, d=64), (0, 2, 0)), (dict(Hq=48, T=2944, d=64), (0, 1, 0)),
    (dict(Hq=45, T=2944, d=64), (0, 2, 0)), (dict(Hq=132, d=64), (0, 2, 0)), (dict(Hq=133, d=64), (0, 1, 0)),
    (dict(Hq=64, T=640, d=64), (0, 1, 0)), (dict(Hq=55, T=640, d=64), (0, 2, 0)),
    (dict(Hq=16, T=1024), (1, 2, 0)), (dict(Hq=8, T=1024), (1, 2, 0)), (dict(Hq=8, T=512), (0, 2, 0)),
    (dict(Hq=17, T=1024), (1, 1, 0)), (dict(Hq=1, T=128), (0, 1, 0)),
    (dict(Hq=26, T=1152), (1, 1, 0)), (dict(Hq=29, T=1152), (0, 1, 0)),
    (dict(Hq=35, T=512, d=256), (0, 2, 0)), (dict(Hq=16, T=512, d=256), (0, 2, 0)),
    (dict(Hq=17, T=512, d=256), (0, 1, 0)),
])  # fmt: skip
def test_pairs_and_several_sums(options, plan):
    _, _, constants = planned(**options)
    assert tuple(constants.get(name, 0) for name in ("PAIRED", "SUMS", "BY_HEAD")) == plan


@pytest.mark.parametrize("options, section", [
    (dict(Hq=12, Hkv=2, B=3, T=6144), 6), (dict(Hq=72, Hkv=9, B=2, T=3904), 9), (dict(Hq=4, Hkv=2, B=8, T=7424), 8),
    (dict(Hq=64, Hkv=8, B=3, T=2816, d=64), 12), (dict(Hq=60, Hkv=30, T=8960, d=96), 6),
    (dict(Hq=128, Hkv=16, B=3, T=2624, d=64, dv=128), 16), (dict(Hq=15, Hkv=5, T=16384), 5),
    (dict(Hq=6, Hkv=3, T=12864), 3), (dict(Hq=60, Hkv=20, T=16384), 20),
    (dict(Hq=30, Hkv=5, B=3, T=3392), 15), (dict(Hq=256, Hkv=1, B=9, T=8192), 1),
    # Others as ever: few blocks of keys, one query head each, rows of others alone, many columns, bands, packed ones
    (dict(Hq=64, Hkv=8, T=1024, d=64), 0), (dict(Hq=12, B=3, T=6144), 0), (dict(Hq=90, Hkv=30, B=4, T=1600), 0),
    (dict(Hq=12, Hkv=6, B=9, T=7424, d=256), 0), (dict(Hq=12, Hkv=2, B=3, T=6144, window=(9, 0)), 0),
    (dict(Hq=12, Hkv=2, B=3, T=6144, varlen=True), 0), (dict(Hq=34, Hkv=17, B=8, T=1536), 0),
])  # fmt: skip
def test_sections_of_query_heads_that_share_keys_without_an_order(options, section):
    """As measured (bench/notes/sm90.md, run AN); alike, as far as heads can be."""
    problem, tiles, _ = planned(**options, causal="window" not in options, deterministic=False)
    heads, key_blocks = of_call(problem, tiles)
    assert not tiles.in_order and sections._section_of_shared(problem, tiles, heads, key_blocks) == section
    assert not section or sections.section_and_late(problem, tiles, heads, key_blocks) == (section, 0)
