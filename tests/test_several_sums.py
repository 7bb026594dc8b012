"""Several sums of dQ in a fixed order (SUMS in sm90/backward.cuh), on the CPU (-m emulated)."""

from dataclasses import replace

import emulator
import numpy as np
import pytest
import test_hopper_wide_emulated as wide
from test_hopper_backward_emulated import (  # noqa: F401
    DTYPES, FILE, TURN, TURN_ALONE, TURN_APART, check, check_caught, check_turns, device_by_name, fused, many_heads,
    paired, prepared, taken, undivided, zeros,
)  # fmt: skip

from rawflash import sections, sm90, tiling
from rawflash.backends.cupy_raw import compile, fa2_backward, launch
from rawflash.backends.cupy_raw.launch import blocks_of
from rawflash.hardware import chip, kernels_on
from rawflash.problem import Problem
from rawflash.tiles import Divided

pytestmark = pytest.mark.emulated
CAUSAL = dict(causal=True)
LENGTHS = dict(B=3, Hq=1, Tq=350, Tk=500, q_lengths=[350, 129, 0], kv_lengths=[260, 500, 77])
OFFSETS = dict(B=3, Hq=1, Tq=300, Tk=500, q_offset=np.array([-100, 20, 700]))

# By how blocks of keys are divided: without a mask not at all, the last ones or all of them alike, by rows or by heads;
# under one into up to so many parts, of which so many go up. Behind that whether neighbouring blocks of keys may have
# different sums; what SUMS is.
ROUND = {
    "d = 64": (dict(B=1, Hq=2, Tq=500, Tk=500, d=64), "", False, 2),
    "d = 64, residues": (dict(B=2, Hq=1, Tq=500, Tk=600, d=64), "", True, 4),
    "d = 128": (dict(B=1, Hq=2, Tq=400, Tk=500, d=128), "", True, 2),
    "fewer rows": (dict(B=1, Hq=2, Tq=150, Tk=900, d=128), "", False, 2),
    "one block of rows": (dict(B=2, Hq=1, Tq=64, Tk=400, d=128), "", False, 2),
    "more rows": (dict(B=1, Hq=2, Tq=900, Tk=150, d=64), "", True, 4),
    "groups": (dict(B=1, Hq=4, Hkv=2, Tq=300, Tk=400, d=64), "", True, 2),
    "groups, d = 128": (dict(B=1, Hq=3, Hkv=1, Tq=200, Tk=300, d=128), "", True, 2),
    "lengths": (LENGTHS | dict(d=64), "", True, 4),
    "lengths, d = 128": (LENGTHS | dict(d=128), "", False, 2),
    "softcap": (dict(B=1, Hq=2, Tq=300, Tk=300, d=128, softcap=3.0), "", False, 2),
    "d < dv": (dict(B=1, Hq=2, Tq=150, Tk=290, d=64, dv=128), "", True, 2),
    "d < dv, groups": (dict(B=2, Hq=2, Hkv=1, Tq=150, Tk=290, d=48, dv=96), "", True, 2),
    "softcap, d = 64": (dict(B=1, Hq=2, Tq=300, Tk=300, d=64, softcap=3.0), "all in 2", True, 4),
    "the last ones in two": (dict(B=1, Hq=2, Tq=500, Tk=500, d=64), "the last in 2", True, 4),
    "the last ones in two, d = 128": (dict(B=1, Hq=2, Tq=400, Tk=500, d=128), "the last in 2", False, 2),
    "the last ones in two, groups": (dict(B=1, Hq=4, Hkv=2, Tq=300, Tk=400, d=64), "the last in 2", True, 2),
    "halves and thirds": (dict(B=1, Hq=2, Tq=900, Tk=400, d=64), "halves, 3", False, 2),
    "all in two": (dict(B=1, Hq=2, Tq=500, Tk=500, d=64), "all in 2", True, 8),
    "all in two, d = 128": (dict(B=1, Hq=2, Tq=400, Tk=500, d=128), "all in 2", True, 4),
    "all in four": (dict(B=1, Hq=1, Tq=1200, Tk=600, d=64), "all in 4", True, 8),
    "all in four, fewer rows": (dict(B=1, Hq=2, Tq=200, Tk=900, d=64), "all in 4", True, 8),
    "by heads": (dict(B=1, Hq=4, Hkv=2, Tq=300, Tk=400, d=64), "by heads in 2", False, 2),
    "by heads and rows": (dict(B=1, Hq=4, Hkv=2, Tq=300, Tk=300, d=128), "by heads in 4", False, 2),
    "by heads, residues": (dict(B=1, Hq=4, Hkv=2, Tq=500, Tk=600, d=64), "by heads in 2", True, 4),
    "by heads and rows, residues": (dict(B=1, Hq=2, Hkv=1, Tq=900, Tk=600, d=64), "by heads in 4", True, 4),
    "by heads and rows, residues, lengths": (LENGTHS | dict(Hq=3, Hkv=1, d=64), "by heads in 6", True, 4),
    "by heads and rows, residues, alibi": (
        dict(B=1, Hq=2, Hkv=1, Tq=600, Tk=700, d=64, alibi_slopes=np.array([0.5, 0.1])), "by heads in 8", True, 4),
    "by rows": (dict(B=1, Hq=1, Tq=700, Tk=500, d=64), "by heads in 4", True, 8),
    "by rows, lengths": (LENGTHS | dict(d=128), "by heads in 3", True, 4),
    "pairs": (dict(B=1, Hq=2, Tq=400, Tk=500, d=128), "pairs", False, 2),
    "pairs, fewer rows": (dict(B=2, Hq=1, Tq=150, Tk=900, d=128), "pairs", False, 2),
    "pairs, more rows": (dict(B=1, Hq=2, Tq=900, Tk=300, d=128), "pairs", False, 2),
    "pairs, groups": (dict(B=1, Hq=4, Hkv=2, Tq=300, Tk=400, d=128), "pairs", True, 2),
    "pairs, the last ones in two": (dict(B=1, Hq=2, Tq=400, Tk=500, d=128), "pairs, the last in 2", False, 2),
    "pairs, all in two": (dict(B=1, Hq=2, Tq=400, Tk=500, d=128), "pairs, all in 2", True, 2),
    "pairs, all in four": (dict(B=1, Hq=1, Tq=600, Tk=800, d=128), "pairs, all in 4", True, 4),
    "pairs, all in six": (dict(B=1, Hq=1, Tq=800, Tk=1000, d=128), "pairs, all in 6", True, 4),
    "pairs, groups, all in three": (dict(B=1, Hq=3, Hkv=1, Tq=400, Tk=500, d=128), "pairs, all in 3", False, 2),
    "d = 256": (dict(B=1, Hq=2, Tq=200, Tk=260, d=256), "", False, 2),
    "d = 192, residues": (dict(B=1, Hq=2, Tq=300, Tk=300, d=192, dv=128), "", True, 4),
    "d = 256, groups": (dict(B=1, Hq=4, Hkv=2, Tq=200, Tk=260, d=256), "", True, 4),
    "d = 256, lengths": (
        dict(B=2, Hq=1, Tq=200, Tk=260, d=256, q_lengths=[200, 70], kv_lengths=[100, 260]), "", True, 4),
}  # fmt: skip
LATE = {
    "late": (dict(B=1, Hq=2, Tq=600, Tk=700, d=64), "late", False, 2),
    "late, residues": (dict(B=2, Hq=1, Tq=600, Tk=600, d=64), "late", True, 4),
    "late, d = 128": (dict(B=1, Hq=1, Tq=700, Tk=900, d=128), "late", True, 2),
    "late, more rows": (dict(B=1, Hq=1, Tq=900, Tk=600, d=128), "late", False, 2),
    "late, lengths": (LENGTHS | dict(d=64), "late", True, 4),
    "late, offsets": (OFFSETS | dict(d=128), "late", False, 2),
    "late, alibi": (dict(B=1, Hq=2, Tq=500, Tk=500, d=64, alibi_slopes=np.array([0.5, 0.1])), "late", True, 4),
    "late, a window": (dict(B=1, Hq=2, Tq=400, Tk=500, d=64, window=(None, 37)), "late", True, 4),
    "late, d = 256": (dict(B=1, Hq=2, Tq=400, Tk=400, d=256), "late", False, 2),
    "late, d = 256, residues": (dict(B=1, Hq=2, Tq=400, Tk=300, d=256), "late", True, 4),
    "late, groups": (dict(B=1, Hq=4, Hkv=2, Tq=400, Tk=600, d=64), "late", True, 2),
    "late, groups, d = 128": (dict(B=2, Hq=3, Hkv=1, Tq=350, Tk=400, d=128), "late", True, 2),
    "late, groups, lengths": (LENGTHS | dict(Hq=3, Hkv=1, d=64), "late", True, 2),
    "late, groups, d < dv": (dict(B=1, Hq=4, Hkv=2, Tq=300, Tk=400, d=64, dv=128), "late", True, 2),
    "late, groups, d = 256": (dict(B=1, Hq=4, Hkv=2, Tq=300, Tk=260, d=256), "late", True, 2),
    "late, groups, d = 192": (OFFSETS | dict(Hq=3, Hkv=1, d=192, dv=128), "late", True, 2),
    "late, d = 192": (dict(B=1, Hq=2, Tq=300, Tk=400, d=192, dv=128), "late", True, 4),
    "late, d = 192, offsets": (OFFSETS | dict(d=192), "late", False, 2),
    "late, d = 256, lengths": (LENGTHS | dict(d=256), "late", True, 4),
}  # fmt: skip
DIAGONAL = {
    "two parts": (dict(B=1, Hq=2, Tq=640, Tk=640, d=64), "2/1", True, 4),
    "two parts, d = 128": (dict(B=2, Hq=1, Tq=400, Tk=600, d=128), "2/1", True, 2),
    "two parts, d = 128, more rows": (dict(B=1, Hq=1, Tq=900, Tk=600, d=128), "2/1", True, 2),
    "two parts, an odd block": (dict(B=1, Hq=3, Tq=384, Tk=384, d=64), "2/1", False, 2),
    "two parts, offsets": (OFFSETS | dict(d=128), "2/1", False, 2),
    "two parts, softcap": (dict(B=1, Hq=2, Tq=500, Tk=500, d=64, softcap=3.0), "2/1", True, 2),
    "two parts, residues": (dict(B=1, Hq=1, Tq=1100, Tk=1200, d=64), "2/1", True, 4),
    "three parts": (dict(B=1, Hq=2, Tq=640, Tk=640, d=64), "3/1", True, 6),
    "three parts, d = 128": (dict(B=1, Hq=1, Tq=700, Tk=900, d=128), "3/2", False, 3),
    "three parts, up": (dict(B=1, Hq=1, Tq=640, Tk=768, d=128), "3/3", False, 3),
    "three parts, more rows": (dict(B=1, Hq=1, Tq=1200, Tk=760, d=128), "3/1", False, 3),
    "three parts, fewer rows": (dict(B=1, Hq=1, Tq=600, Tk=1300, d=64), "3/2", False, 3),
    "three parts, lengths": (LENGTHS | dict(d=64), "3/1", False, 3),
    "three parts, a window": (dict(B=1, Hq=2, Tq=600, Tk=700, d=128, window=(None, 37)), "3/2", False, 3),
    "five parts": (dict(B=2, Hq=1, Tq=700, Tk=600, d=64), "5/2", True, 5),
    "four parts, d = 128, offsets": (OFFSETS | dict(Tq=500, Tk=700, d=128), "4/3", True, 4),
    "two parts, groups": (dict(B=1, Hq=4, Hkv=2, Tq=400, Tk=500, d=64), "2/1", True, 2),
    "two parts, groups, d = 128": (OFFSETS | dict(Hq=2, Hkv=1, d=128), "2/1", True, 2),
    "three parts, groups, d = 128": (LENGTHS | dict(Hq=3, Hkv=1, d=128), "3/2", True, 3),
    "three parts, groups, alibi": (
        dict(B=1, Hq=3, Hkv=1, Tq=650, Tk=300, d=64, alibi_slopes=np.array([0.5, 0.1, 0.0])), "3/1", True, 3),
    "four parts, alibi": (dict(B=1, Hq=2, Tq=500, Tk=500, d=64, alibi_slopes=np.array([0.5, 0.1])), "4/2", False, 4),
}  # fmt: skip
BY_HEAD = {
    "by head, late": (dict(B=1, Hq=4, Hkv=2, Tq=400, Tk=600, d=64), "by head, late", True, 4),
    "by head, late, d = 128": (dict(B=2, Hq=3, Hkv=1, Tq=400, Tk=350, d=128), "by head, late", True, 2),
    "by head, late, lengths": (LENGTHS | dict(Hq=3, Hkv=1, d=64), "by head, late", False, 2),
    "by head, late, d < dv": (dict(B=1, Hq=4, Hkv=2, Tq=300, Tk=400, d=64, dv=128), "by head, late", True, 2),
    "by head, late, alibi": (
        dict(B=2, Hq=4, Hkv=2, Tq=300, Tk=300, d=64, alibi_slopes=np.array([0.5, 0.1, 0.0, 0.3])),
        "by head, late", False, 2),
    "by head, two parts": (dict(B=1, Hq=4, Hkv=2, Tq=500, Tk=600, d=64), "by head, 2/1", True, 4),
    "by head, three parts, d = 128": (dict(B=2, Hq=3, Hkv=1, Tq=350, Tk=400, d=128), "by head, 3/1", True, 3),
    "by head, two parts, offsets": (OFFSETS | dict(Hq=2, Hkv=1, d=128), "by head, 2/1", False, 2),
    "by head, two parts, lengths": (LENGTHS | dict(Hq=4, Hkv=2, d=64), "by head, 2/1", True, 4),
    "by head, three parts, more rows": (dict(B=1, Hq=3, Hkv=1, Tq=900, Tk=384, d=64), "by head, 3/2", False, 3),
}  # fmt: skip
BANDS = {
    name: (options if "window" in options else options | CAUSAL, *more)
    for name, (options, *more) in (LATE | DIAGONAL | BY_HEAD).items()
}
CASES = {name: (options | {"deterministic": True}, *more) for name, (options, *more) in (ROUND | BANDS).items()}


@pytest.fixture(autouse=True)
def several(monkeypatch, undivided):  # noqa: F811
    """Short calls have several sums, too."""
    monkeypatch.setattr(sm90, "WGMMA_SUMS", {256: (np.inf, np.inf)})
    monkeypatch.setattr(sm90, "WGMMA_SUMS_KEYS", 0)
    monkeypatch.setattr(sm90, "WGMMA_SUMS_ONCE", (0.0, 0.0))
    monkeypatch.setattr(sm90, "WGMMA_SUMS_SHORT", {256: ()})
    monkeypatch.setattr(sm90, "WGMMA_SUMS_UNEVEN", np.inf)
    monkeypatch.setattr(sm90, "WGMMA_DIAGONAL", (np.inf, np.inf, np.inf))
    monkeypatch.setattr(sm90, "WGMMA_SUMS_GROUP", {False: np.inf, True: np.inf})
    monkeypatch.setattr(sm90, "_is_by_head", lambda *_: False)


def plan(how, residues, monkeypatch, request):
    """Blocks of keys are divided as ``how`` says."""
    how, _, up = how.partition("/")
    parts = int(how[-1]) if how[-1:].isdigit() else 1

    def in_parts(blocks):
        if parts == 1:
            return Divided()
        if how == "halves, 3":
            return Divided(2, blocks - 2, 3)
        return Divided(0, min(4, blocks - 2) if "last" in how else blocks, parts)

    def levels(problem, processors, bc):
        if parts == 1:
            return Divided()
        keys = blocks_of(problem.Tk, bc)
        long = min(blocks_of(problem.Tq, bc), keys)
        level = blocks_of(long, parts)
        assert blocks_of(long, level) == parts, "as many as there are blocks of rows"
        return Divided(0, problem.B * problem.Hkv * keys, parts, level, int(up), keys)

    if how.startswith("by head, "):
        monkeypatch.setattr(sm90, "_is_by_head", lambda *_: True)
        how = how.removeprefix("by head, ")

    def by_heads(problem, processors, br, bc):
        return in_parts(problem.B * problem.Hkv * blocks_of(problem.Tk, bc))

    monkeypatch.setattr(sm90, "WGMMA_SUMS_ROWS", (0, 0) if residues else (np.inf, np.inf))
    monkeypatch.setattr(sm90, "_levels", levels)
    monkeypatch.setattr(sm90, "_divided", lambda blocks, *_: in_parts(blocks))
    if how.startswith("by heads"):
        monkeypatch.setattr(sm90, "_divided_by_heads", by_heads)
    if how.startswith("pairs"):
        request.getfixturevalue("paired")
        monkeypatch.setattr(sm90, "WGMMA_FUSED_LAG", 1.0)


def counters(case, constants):
    """Those of turns, at least, and of shares: bytes, as they are cleared."""
    return 4 * (case.q.shape[0] * case.q.shape[1] * blocks_of(case.q.shape[2], 64) * constants["SUMS"] + 400)


@pytest.mark.parametrize("name", CASES)
def test_several_sums(name, device_by_name, taken, zeros, monkeypatch, request):  # noqa: F811
    """Either dtype in turn. A wrong turn would be waited for. Nothing is cleared but counters: sums are NaN before."""
    options, how, residues, sums = CASES[name]
    plan(how, residues, monkeypatch, request)
    workspace, made = launch.Launcher.workspace, []
    monkeypatch.setattr(launch.Launcher, "workspace", lambda *of: made.append(workspace(*of)) or spoiled(made[-1]))
    case = prepared(options, DTYPES[list(CASES).index(name) % 2])
    check(case, case.reference())
    ((constants, nbytes),) = zeros
    assert taken == ["fa2_backward_keys"] and made
    assert constants["SUMS"] == sums and nbytes <= counters(case, constants)
    is_wide = case.q.shape[-1] > 128
    if not is_wide:
        assert constants["PAIRED"] == how.startswith("pairs") and constants["DIAGONAL"] == ("/" in how)
        assert constants["DIVIDED"] == (how not in ("", "late", "pairs"))
        assert constants["BY_HEAD"] == how.startswith("by head,")


def spoiled(array):
    """Memory that is NaN, as that of former calls may be."""
    np.asarray(array).view(np.uint8)[...] = emulator.STALE
    return array


@pytest.mark.parametrize("d, how", [(64, "late"), (64, "2/1"), (64, "4/2"), (256, "late")])
def test_rows_that_see_no_key(d, how, device_by_name, zeros, monkeypatch, request):  # noqa: F811
    """Nobody adds to their sums, and dq is 0."""
    plan(how, True, monkeypatch, request)
    case = prepared(dict(B=1, Hq=2, Tq=500, Tk=500, d=d, causal=True, q_offset=-200, deterministic=True), "float16")
    moved = wide.narrow.on_device(case, False)
    dq = np.asarray(moved.backward(*moved.forward())[0]).astype(np.float64)
    assert not dq[..., :200, :].any() and np.isfinite(dq).all() and dq[..., 200:, :].any(-1).all()
    check(case, case.reference())
    assert zeros[0][0]["SUMS"] > 1 and zeros[0][1] <= counters(case, zeros[0][0])


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", [
    "d = 64, residues", "d = 128", "the last ones in two", "all in four", "by heads and rows", "pairs, all in four",
    "d = 192, residues", "late, residues", "late, offsets", "late, d = 256, lengths", "two parts", "two parts, offsets",
    "two parts, d = 128, more rows", "three parts, fewer rows", "three parts, lengths",
])  # fmt: skip
def test_each_block_of_keys_adds_in_its_turn(name, early, monkeypatch, taken, request):  # noqa: F811
    """Not before: its number is exactly that of those that have added to these sums of the rows."""
    options, how, residues, _ = CASES[name]
    plan(how, residues, monkeypatch, request)
    waits = {TURN_ALONE: "true"}
    if options["d"] <= 128:
        waits |= {TURN: "DETERMINISTIC && !TURNS_APART", TURN_APART: "DETERMINISTIC && warp == 1 && lane == 0"}
    check_turns(options, early, waits, FILE if options["d"] <= 128 else wide.FILE, monkeypatch, taken)


@pytest.mark.parametrize("seed", range(40))
def test_any_call(seed, device_by_name, taken, zeros, monkeypatch, request):  # noqa: F811
    """Drawn, the same ones each time."""
    rng = np.random.default_rng(seed)
    d, causal, B = (64, 128, 192)[seed % 3], bool(seed // 3 % 2), int(rng.integers(1, 4))
    heads, (Tq, Tk) = int(rng.integers(1, 4)), rng.integers(1, 701, (2, 2)).min(0).tolist()
    group = int(rng.integers(1, 3))
    options = dict(B=B, Hq=heads * group, Hkv=heads, Tq=Tq, Tk=Tk, d=d, causal=causal, deterministic=True)
    if rng.random() < 0.3:
        options |= dict(q_lengths=rng.integers(0, Tq + 1, B).tolist(), kv_lengths=rng.integers(0, Tk + 1, B).tolist())
    elif causal and rng.random() < 0.5:
        options["q_offset"] = rng.integers(-Tq, Tk + 1, B)
    hows = ["late"] if causal else [""]
    if d <= 128:
        blocks = blocks_of(min(Tq, Tk), 128)
        some = [n for n in range(2, 6) if blocks_of(blocks, blocks_of(blocks, n)) == n]
        parts = [f"{n}/{up}" for n in some for up in range(1, n + 1)]
        by_head = [f"by head, {how}" for how in ("late", *parts)] * (group > 1)
        hows = ["late", *parts, *by_head] if causal else ["", "all in 2", "all in 4", "by heads in 2"]
    how = str(rng.choice(hows))
    if how == "all in 4" and Tq < 512 or how == "all in 2" and Tq < 256:
        how = ""  # not more parts than blocks of rows
    plan(how, bool(rng.integers(2)), monkeypatch, request)
    case = prepared(options, DTYPES[seed % 2])
    check(case, case.reference())
    assert taken == ["fa2_backward_keys"] and zeros[0][0]["SUMS"] > 1


@pytest.mark.parametrize("heads, T, section, late", [(9, 4096, 5, 32), (8, 8192, 2, 64), (5, 4096, 5, 52)])
def test_sections_and_late_blocks_of_keys(heads, T, section, late, monkeypatch):
    """All heads at once, if they are few; else so many that they come in two turns, or end evenly."""
    monkeypatch.undo()
    problem = Problem(B=1, Hq=heads, Hkv=heads, Tq=T, Tk=T, d=256, dv=256, dtype="bfloat16", backend="cupy_raw",
                      causal=True, deterministic=True)  # fmt: skip
    tiles = tiling.plan_tiles(problem, replace(kernels_on("cupy_raw", chip("sm_90")), processors=132), "backward")
    sums = dict(tiles.constants)["SUMS"]
    assert sums > 1 and sections._section_of_sums(problem, tiles, heads, T // tiles.bc, sums) == (section, late)


@pytest.mark.parametrize("heads, T, d, words", [
    (1, 4096, 128, (7, 5, 7)), (1, 4096, 64, (7, 5, 7)), (2, 4096, 128, (2, 9, 4)), (3, 8192, 128, (1, 25, 3)),
    (5, 4096, 256, (320, 52, 1)),
])  # fmt: skip
def test_words_of_divided_blocks_of_keys(heads, T, d, words, monkeypatch):
    """Parts that go up, blocks of keys of a level, and parts; or blocks of keys that are whole, and late ones."""
    monkeypatch.undo()
    problem = Problem(B=1, Hq=heads, Hkv=heads, Tq=T, Tk=T, d=d, dv=d, dtype="bfloat16", backend="cupy_raw",
                      causal=True, deterministic=True)  # fmt: skip
    tiles = tiling.plan_tiles(problem, replace(kernels_on("cupy_raw", chip("sm_90")), processors=132), "backward")
    schedule = fa2_backward._schedule(problem, tiles, tiles.divided, T // tiles.bc)
    assert tuple(schedule[name] for name in ("whole", "halved", "parts")) == words


# ---- the tests can fail ---------------------------------------------------------------------------------------

IS_THERE = "SUMS == 1 || *turns(call, at) > 0 ?"
LATER, DOWN, LAST = "which > 0 ? -BR : BR", "is_down ? -BR : BR", "part.number + 1 < part.count && work"
BROKEN = {
    "": ("late", "", ""),
    "sums that nobody has added to are read": ("late", IS_THERE, "true ?"),
    "sums that nobody has added to are read, d = 256": ("late, d = 256", IS_THERE, "true ?"),
    "sums that nobody has added to are read, without a mask": ("fewer rows", IS_THERE, "true ?"),
    "only the first sums are read": (
        "d = 64", "n < SUMS * SETS; n++)\n            x[0].x", "n < 1; n++)\n            x[0].x"),
    "only the first sums are read, d = 256": (
        "late, d = 256", "n < SUMS * SETS; n++)\n            x[0].x", "n < 1; n++)\n            x[0].x"),
    "sums of one warpgroup are read twice": ("d < dv", "n % SETS * (BR * TO_D / 4)", "0 * (BR * TO_D / 4)"),
    "warpgroups add to the same sums": (
        "d < dv", "(BY_KEYS && SETS == 1 ? 0 : n * PATCH)", "(BY_KEYS ? 0 : n * PATCH)"),
    "shares of the second head are those of the first": (
        "by head, late", "part.number += (int)place.nth * part.count,", ""),
    "shares are summed of one head": ("by head, two parts", ", part.count *= heads;", ";"),
    "shares lie in those of other blocks of keys": (
        "by head, two parts", "counted * heads * (DIAGONAL ? (unsigned)call.parts : 1);", "counted * heads;"),
    "query heads are the first ones of their groups": (
        "by head, late, d = 128", "(BY_HEAD ? (int)place.nth : 0)", "0"),
    "the last kernel reads those of other sequences": ("late, residues", "b + n * call.B", "b + n"),
    "turns are as if neighbours had the same sums": ("d = 64, residues", "- mine) / RESIDUES;", "- mine);"),
    "turns are as if neighbours had the same sums, late": ("late, residues", "- mine) / RESIDUES;", "- mine);"),
    "turns are as if neighbours had the same sums, d = 256": (
        "d = 192, residues", "- mine) / RESIDUES;", "- mine);"),
    "neighbours have the same sums": ("two parts", "+ work.j0 / KEYS % RESIDUES)", ")"),
    "sums are those of the sequence alone": ("late, residues", "work.b + (which *", "work.b + 0 * (which *"),
    "sums lie where those of other sequences are": (
        "late, residues", "KEYS % RESIDUES) * (int)call.B;", "KEYS % RESIDUES);"),
    "who has come round adds to the same sums": (
        "d = 128", "ROUND && i0 < work.own ? work.sums +", "false ? work.sums +"),
    "who has come round adds to the same sums, pairs": (
        "pairs", "ROUND && i0 < work.own ? work.sums +", "false ? work.sums +"),
    "turns go on for who has come round": ("d = 64", "ROUND && i0 < work.own ? all - mine", "false ? all - mine"),
    "own rows are a block later": (
        "d = 128", "(first < last ? first : last);", "(first < last ? first : last) + STEP_ROWS;"),
    "own rows may be behind the last ones": ("fewer rows", "(first < last ? first : last);", "first;"),
    "late ones go up": ("late", LATER, "BR"),
    "late ones go up, d = 256": ("late, d = 256", LATER, "BR"),
    "second parts go up": ("two parts", DOWN, "BR"),
    "last parts are those of the last keys first": (
        "three parts, d = 128", "(is_longer ? level : level - longer) - 1 - n / of", "n / of"),
    "parts that others follow are those of the last keys first": (
        "three parts, more rows", "last * level + keys - 1 - n / each, up", "last * level + n / each, up"),
    "turns are those of the first part": ("three parts, up", "before = i0 - work.behind;", "before = i0;"),
    "turns of parts that go down begin with the first keys": ("three parts", "mine - end) /", "mine) /"),
    "all blocks of keys have all parts": (
        "four parts, d = 128, offsets", "begun < work.late ? begun : work.late;", "begun;"),
    "parts have rows of the next one": ("two parts", LAST, "false && work"),
    "the last part is as long as others": ("two parts, offsets", LAST, "work"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_are_caught(name, device_by_name, taken, monkeypatch, request):  # noqa: F811
    which, old, new = BROKEN[name]
    options, how, residues, _ = CASES[which]
    file = wide.FILE if options["d"] > 128 else FILE
    assert not old or compile.source(file, "").count(old) == 1
    plan(how, residues, monkeypatch, request)
    monkeypatch.setattr(wide.narrow, "FILE", file)
    check_caught(which, old, new, {which: options}, monkeypatch, taken)
