"""The forward kernel of sm_90 against the oracle, without a GPU (-m emulated).

See test_cupy_raw_emulated.py for what that can show, and emulator_hopper.hpp for what it finds beside wrong numbers.
"""

import re
from dataclasses import replace

import emulator
import numpy as np
import pytest
from strategies import DTYPES
from test_cupy_raw_emulated import on_device
from test_forward import make
from tolerances import assert_close

from rawflash import hardware, problem, sm90, tiling
from rawflash.backends.cupy_raw import compile, fa2_forward, launch

pytestmark = pytest.mark.emulated
FILE = "sm90/fa2_forward.cu"


class Here:
    """A device of a few multiprocessors: which files were loaded, how they are to be changed first, all counters."""

    def __init__(self, monkeypatch, backwards=False, processors=2):
        self.monkeypatch, self.files, self.changes, self.counters = monkeypatch, [], [], []
        emulator.install(monkeypatch, backwards)
        chip = replace(hardware.CHIPS["sm_90"], processors=processors)
        monkeypatch.setattr(hardware, "_gpu", lambda device: chip)
        monkeypatch.setattr(sm90, "WGMMA_FEWEST", 0.0)  # pieces of work: few are this kernel's too
        loads, counts = compile.load, launch.Launcher.counters

        def load(text, arch, options=()):
            self.files.append(re.findall(r'#line 1 "(.*\.cu)"', text)[-1])
            for old, new in self.changes:
                if old not in text:
                    raise LookupError(old)  # no AssertionError: a kernel that is not broken is not seen, either
                text = text.replace(old, new)
            return loads(text, arch, options)

        def counters(launcher, count):
            self.counters.append(np.zeros(count, np.uint32))
            assert counts  # the real one gives zeros, too
            return self.counters[-1].ctypes.data

        monkeypatch.setattr(compile, "load", load)
        monkeypatch.setattr(launch.Launcher, "counters", counters)

    def results(self, case, small_on_device=False, **options):
        """``out, lse`` of a case, by the kernel of this page; counters are zeros afterwards."""
        problem._MEMO.clear()
        out, lse = on_device(case, small_on_device).forward(**options)
        assert self.files[-1:] == [FILE]
        assert not any(x.any() for x in self.counters)
        return np.asarray(out), np.asarray(lse)

    def check(self, case, reference=None, **options):
        reference = reference or case.reference()
        out, lse = self.results(case, **options)
        assert_close("out", out, reference)
        assert_close("lse", lse, reference)


@pytest.fixture(params=[False, True], ids=["forwards", "backwards"])
def here(request, monkeypatch):
    return Here(monkeypatch, request.param)


@pytest.fixture
def one(monkeypatch, request):
    """One order of threads for each name of a test, in turn."""
    return Here(monkeypatch, len(request.node.name) % 2 == 1)


# ---- calls --------------------------------------------------------------------------------------------


def normal(*shape):
    return lambda rng, dtype: (3 * rng.standard_normal(shape)).astype(dtype)


#: Blocks have 256 rows and 64 keys at d = 64, else 128 and 128; 80 keys at d = 256.
CALLS = {
    "whole blocks": dict(Tq=256, Tk=384, d=128),
    "one key": dict(Tq=17, Tk=1, d=64),
    "one more than whole blocks": dict(Tq=193, Tk=257, d=64),
    "one less": dict(Tq=127, Tk=255, d=128),
    "causal": dict(Tq=300, d=128, causal=True),
    "causal, three warpgroups": dict(Tq=400, d=64, causal=True),
    "causal, rows without keys": dict(Tq=300, Tk=100, d=64, causal=True, sinks=normal(2)),
    "causal, the diagonal at the end of blocks": dict(Tq=256, Tk=383, d=128, causal=True),
    "offsets per batch": dict(Tq=150, Tk=290, d=128, causal=True, q_offset=np.array([-130, 128])),
    "nothing visible": dict(Tq=150, Tk=290, d=128, causal=True, q_offset=-1000),
    "window": dict(Tq=400, d=128, window=(130, 7)),
    "window before the keys": dict(Tq=300, Tk=140, d=128, window=(20, 20), q_offset=0),
    "narrow window": dict(Tq=300, d=64, window=(3, 0)),
    "window open to the right": dict(Tq=300, d=128, window=(70, None)),
    "lengths": dict(B=3, Tq=150, Tk=300, d=128, q_lengths=[150, 0, 40], kv_lengths=[129, 300, 0]),
    "lengths, causal": dict(B=3, Tq=150, Tk=300, d=64, q_lengths=[150, 100, 40], kv_lengths=[7, 200, 256],
                            causal=True),
    "grouped heads": dict(B=1, Hq=6, Hkv=2, Tq=140, Tk=200, d=64, causal=True),
    "softcap": dict(Tq=140, Tk=200, d=128, softcap=5.0, size=10.0),
    "softcap far above": dict(Tq=140, Tk=200, d=64, softcap=1e4),
    "alibi": dict(Tq=140, Tk=300, d=128, alibi_slopes=np.array([0.5, 0.01]), causal=True),
    "everything": dict(Tq=200, Tk=300, d=64, alibi_slopes=np.array([0.5, 0.01]), softcap=9.0, window=(150, 40),
                       sinks=normal(2), kv_lengths=[250, 300], q_lengths=[200, 77]),
    "192, 128": dict(B=1, Tq=140, Tk=300, d=192, dv=128, causal=True),
    "192": dict(B=1, Tq=140, Tk=200, d=192),
    "256": dict(B=1, Tq=140, Tk=170, d=256, causal=True),
    "96": dict(B=1, Tq=140, Tk=200, d=96),
    "8, 200": dict(B=1, Tq=140, Tk=200, d=8, dv=200),
    "many pieces": dict(B=3, Hq=3, Tq=260, Tk=40, d=64, causal=True),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(one, name):
    n = list(CALLS).index(name)
    one.check(make(dtype=("bfloat16", "float16")[n % 2], **CALLS[name]), small_on_device=n % 3 == 0)


@pytest.mark.parametrize("keys, section", [(1024, 2), (1025, 4), (20, 6)])
def test_sections_of_heads(one, monkeypatch, keys, section):
    """Smaller ones up to 1024 keys, and fewer heads in the last one; of some sizes all heads are in one."""
    of_head = 1024 * (64 + 64) * 2
    monkeypatch.setattr(sm90, "WGMMA_SECTION_SHORT", 2 * of_head)
    monkeypatch.setattr(sm90, "WGMMA_SECTION", 5 * of_head)
    sections, original = [], launch.Launcher.call

    def call(launcher, *of):
        made = original(launcher, *of)
        sections.append(launcher.words[launch._WORD["section"]])
        return made

    monkeypatch.setattr(launch.Launcher, "call", call)
    one.check(make(B=3, Hq=2, Tq=140, Tk=keys, d=64, dtype="bfloat16", causal=True))
    assert sections == [section]


@pytest.mark.parametrize("options, section", [
    (dict(Hq=17, T=4096), 17),  # usual: 16, and one at last
    (dict(Hq=20, T=4096), 20), (dict(Hq=16, T=4096), 16), (dict(B=4, Hq=16, T=4096), 16), (dict(Hq=33, T=2048), 33),
    (dict(B=2, Hq=16, T=8192), 8), (dict(Hq=40, Hkv=8, T=4096), 8), (dict(Hq=40, T=1024), 20),
    (dict(Hq=17, T=4096, causal=False), 16), (dict(B=200, Hq=17, T=4096), 16),
])  # fmt: skip
def test_sections_by_when_they_end(options, section):
    """In small calls of so many heads that the last section has not too few."""
    how = dict(B=1, d=128, causal=True) | options
    T, d = how.pop("T"), how.pop("d")
    x = problem.Problem(**dict(Hkv=how["Hq"]) | how, Tq=T, Tk=T, dv=d, d=d, dtype="bfloat16", backend="cupy_raw")
    h200 = replace(hardware.kernels_on("cupy_raw", hardware.chip("sm_90")), processors=132)
    tiles = tiling.plan_tiles(x, h200, "forward")
    assert fa2_forward._section(x, tiles) == section


@pytest.mark.parametrize("options", [
    dict(), dict(causal=True), dict(causal=True, q_offset=-70), dict(window=(70, 40)), dict(window=(3, None), Tk=700),
    dict(kv_lengths=[250, 7], q_lengths=[400, 77]), dict(kv_lengths=[700, 300], causal=True, Tk=700),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("row", [0, 1])
def test_all_shapes_at_64(one, monkeypatch, row, options):
    """Whatever the length: the table goes by it."""
    shape = replace(sm90.WGMMA_FORWARD[64][row], least=0)
    monkeypatch.setitem(sm90.WGMMA_FORWARD, 64, (shape,))
    one.check(make(**(dict(B=2, Hq=2, Tq=400, Tk=420, d=64, dtype=("bfloat16", "float16")[row % 2]) | options)))


def test_padding_is_never_read(here):
    """NaN behind the lengths, in Q, K and V, and around each head."""
    case = make(B=2, Tq=150, Tk=300, d=128, dtype="bfloat16", q_lengths=[150, 40], kv_lengths=[129, 3])
    reference = case.reference()
    for b in range(2):
        case.q[b, :, case.options["q_lengths"][b] :] = np.nan
        for x in (case.k, case.v):
            x[b, :, case.options["kv_lengths"][b] :] = np.nan
    here.check(case, reference)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_packed_sequences(here, dtype, causal, d):
    """Boxes reach into the next sequence, and into rows that no sequence owns."""
    case = make(lead=(), Hq=4, Hkv=2, Tq=420, Tk=560, d=d, dtype=dtype, causal=causal)
    case.cu_seqlens = ([2, 150, 150, 167, 400], [1, 130, 140, 140, 500])
    if d == 128:  # the first places in line are nobody's
        case.cu_seqlens = ([200, 200, 395, 396, 410], [1, 130, 340, 340, 500])
    reference = case.reference()
    of_q, of_k = case.cu_seqlens
    for x, (first, *_, last) in ((case.q, of_q), (case.k, of_k), (case.v, of_k)):
        x[:, :first] = x[:, last:] = np.nan
    here.check(case, reference)


def test_other_strides(here):
    """Heads and rows may change places, and rows may have more columns than the matrix."""
    case = make(B=2, Hq=2, Tq=150, Tk=200, d=64, dtype="bfloat16")
    reference = case.reference()
    for name in "qkv":
        array = getattr(case, name)
        wide = np.full((*array.shape[:1], array.shape[2], array.shape[1], 72), np.nan, array.dtype)
        wide[..., :64] = array.transpose(0, 2, 1, 3)
        setattr(case, name, wide[..., :64].transpose(0, 2, 1, 3))
    here.check(case, reference)


DRAWN = {  # and how many pieces there are, of 128 rows
    "pieces without keys": (dict(B=2, Hq=2, Tq=300, Tk=300, d=256, causal=True, q_offset=-140), 12),
    "lengths": (dict(B=3, Hq=2, Tq=300, Tk=300, d=256, q_lengths=[300, 0, 10], kv_lengths=[0, 300, 130]), 18),
    "two places for Q": (dict(B=2, Hq=2, Tq=300, Tk=300, d=128, q_lengths=[300, 0], kv_lengths=[0, 300]), 12),
}


@pytest.mark.parametrize("processors", [1, 3, 7])
@pytest.mark.parametrize("name", DRAWN)
def test_each_piece_is_drawn_once(monkeypatch, name, processors):
    """Whether it has keys or not; a block of threads finds its first piece without a draw, and draws once in vain."""
    how, pieces = DRAWN[name]
    here = Here(monkeypatch, processors == 3, processors)
    here.changes.append(("call.counters[0] = 0;", ";"))
    problem._MEMO.clear()
    on_device(make(dtype="bfloat16", **how)).forward()
    assert here.files == [FILE] and here.counters[-1][0] == pieces


@pytest.mark.parametrize("processors", [1, 3, 100])
def test_any_number_of_blocks_of_threads_shares_the_pieces(monkeypatch, processors):
    here = Here(monkeypatch, processors=processors)
    for causal in (False, True):
        here.check(make(B=2, Hq=3, Tq=300, Tk=260, d=128, dtype="bfloat16", causal=causal))


# ---- the static maximum -------------------------------------------------------------------------------


def scores(name, T=600, d=64, B=1, H=2, dtype="bfloat16"):
    """A call whose scores are far from alike; the kernel goes from the last key to the first."""
    case = make(B=B, Hq=H, Tq=200, Tk=T, d=d, dtype=dtype)
    q, k, v = (np.array(x, np.float32) for x in (case.q, case.k, case.v))
    what, _, how = name.partition(" ")
    if what in ("early", "late"):  # the keys of one half
        k[:, :, slice(0, T // 2) if what == "early" else slice(T // 2, T)] *= float(how)
    elif what == "key":  # one of them
        k[:, :, int(how)] *= 300
    elif what == "rising":
        k *= np.linspace(float(how), 0, T)[:, None]
    elif what == "falling":
        k *= np.linspace(0, float(how), T)[:, None]
    elif what == "all":  # every row: scores of 8 t up to t, not of random signs
        q[...], k[...] = 1, 0
        k[..., 0] = np.linspace(float(how), 0, T)
    elif what == "dip":  # what is before it is far above what is behind it
        q[...], k[...] = 1, 0
        k[:, :, :128, 0], k[:, :, 128:384, 0] = float(how), -float(how)
    elif what == "sums":  # each exponential is finite, and with these values what they are multiplied to
        q[...], k[...] = 1, 0
        k[:, :, : T // 2, 0] = float(how)
        v *= 1e-6
    elif what == "values":
        q[...], k[...] = 1, 0
        k[..., 0] = np.linspace(300, 0, T)
        v *= 1e37
    elif what == "masked":
        case.options |= dict(causal=True, q_offset=int(how))
        k[:, :, :100] *= 40
    elif what == "window":
        case.options |= dict(window=(int(how), 3), q_offset=300)
        k *= np.linspace(50, 0, T)[:, None]
    for name, x in (("q", q), ("k", k), ("v", v)):
        setattr(case, name, x.astype(DTYPES[dtype]))
    return case


SCORES = (
    "early 10", "early 40", "early 1000", "late 40", "late 1000", "key 0", "key 300", "key 599", "rising 50",
    "falling 50", "rising 2000", "all 1000", "all -1000", "values 0", "sums 700", "dip 4000", "masked 0", "masked -100",
    "masked 350", "window 200",
)  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_scores_far_from_alike(one, name):
    one.check(scores(name, d=64 if SCORES.index(name) % 2 else 128))


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("name", [name for name in SCORES if name not in ("values 0", "sums 700")])  # not in its range
def test_scores_far_from_alike_in_float16(one, name, stays, monkeypatch):
    """The maximum follows there. Where it stays, as it can be told to: P ends at 2^16, O is not finite where one was
    above, and the piece is done again."""
    monkeypatch.setenv("RAWFLASH_EXACT_MAXIMUM", "0" if stays else "")
    text = f"constexpr int STATIC_MAXIMUM = {int(stays)};"
    one.changes += [(text, text)]
    one.check(scores(name, d=128 if SCORES.index(name) % 2 else 64, dtype="float16"))


def test_an_attention_sink_in_float16_is_no_reason_to_do_pieces_again(one, monkeypatch):
    case = make(B=1, Hq=2, Tq=200, Tk=600, d=64, dtype="float16")
    case.q[..., 0], case.k[:, :, 0, 0] = 4, 32  # the first key 16 above the others
    one.changes += [("&& !__all_sync(WARP, !again)", "&& false")]
    one.check(case)
    monkeypatch.setenv("RAWFLASH_EXACT_MAXIMUM", "0")
    with pytest.raises(AssertionError):
        one.check(case)


@pytest.mark.parametrize("d", [64, 128, 192])
def test_some_warps_have_pieces_done_again(here, d):
    """Others have stored their rows, and wait for no one that does not come."""
    case = make(B=1, Hq=3, Tq=200, Tk=300, d=d, dtype="bfloat16", causal=True)
    case.q[:, 1, 20:24] *= 400
    case.q[:, 2, 70:] *= 400
    here.check(case)


@pytest.mark.parametrize("where", ["q", "k", "v", "v inf"])
def test_what_is_not_a_number_stays_in_the_rows_that_see_it(one, where):
    case = make(B=1, Hq=1, Tq=200, Tk=300, d=64, dtype="bfloat16", causal=True)
    reference = case.reference()
    i, j = 50, 220  # row i sees keys up to 100 + i
    getattr(case, where[0])[0, 0, i if where == "q" else j, 3] = np.inf if where == "v inf" else np.nan
    out, lse = one.results(case)
    rows = np.arange(200)
    sees = rows == i if where == "q" else rows + 100 >= j
    seen = out[0, 0, sees].astype(np.float32)
    assert not np.isfinite(seen if where in "qk" else seen[:, 3]).any()
    assert np.isnan(lse[0, 0, sees]).all() == (where in "qk")
    if where not in "qk":  # 0 times it is NaN, too: hidden values are to be finite
        out[..., 3] = np.asarray(reference.oracle["out"][..., 3], out.dtype)
        sees[:] = False
    for name, x in (("out", out), ("lse", lse)):  # the others are those of the clean call
        want = np.asarray(reference.oracle[name])
        assert_close(name, np.where(sees.reshape(200, *[1] * (x.ndim - 3)), want, x.astype(want.dtype)), reference)


def test_scores_near_the_largest_float32(one):
    """Where log2(e) times a score overflows: the steps that are taken again have no such product."""
    case = make(B=1, Hq=1, Tq=40, Tk=300, d=64, dtype="bfloat16", scale=1.0)
    case.q[...], case.k[...] = 0, 0
    case.q[..., 0] = 1
    case.k[..., 0] = (3.3e38 * np.linspace(0.2, 0.8, 300)).astype(case.k.dtype)
    case.k[:, :, 150:, 0] *= -1
    out, lse = one.results(case)
    highest = case.k[0, 0, :, 0].astype(np.float64).max()
    of_highest = case.k[0, 0, :, 0].astype(np.float64) == highest
    np.testing.assert_allclose(lse, highest, rtol=1e-6)
    want = case.v[0, 0, of_highest].astype(np.float64).mean(0)
    np.testing.assert_allclose(out[0, 0].astype(np.float64), np.tile(want, (40, 1)), atol=2e-2)


@pytest.mark.parametrize("first", [True, False])
def test_highest_scores_anywhere(first, one):
    """Of which the product with log2(e) overflows: below 0 as well as above it."""
    case = make(B=1, Hq=1, Tq=40, Tk=300, d=64, dtype="bfloat16", scale=1.0)
    case.q[...], case.k[...] = 0, 0
    case.q[..., 0] = 1
    case.k[..., 0] = (3.3e38 * np.linspace(0.2, 0.8, 300)).astype(case.k.dtype)
    case.k[:, :, slice(0, 150) if first else slice(150, 300), 0] *= -1
    _, lse = one.results(case)
    np.testing.assert_allclose(lse, case.k[0, 0, :, 0].astype(np.float64).max(), rtol=1e-6)


@pytest.mark.parametrize("dtype, number", [
    ("bfloat16", 13824.0), ("float16", 4884.0), ("float16", 6832.0), ("float16", 6884.0), ("float16", 13824.0),
])  # fmt: skip
def test_the_rounding_of_a_large_maximum(dtype, number, one):
    """m times the scale, rounded, is off by more powers of two than P has: the piece is done again."""
    case = make(B=1, Hq=1, Tq=40, Tk=100, d=64, dtype=dtype)
    case.q[...], case.k[...] = number, number
    out, lse = one.results(case)
    want = np.tile(case.v[0, 0].astype(np.float64).mean(0), (40, 1))
    np.testing.assert_allclose(out[0, 0].astype(np.float64), want, atol=4e-3)
    np.testing.assert_allclose(lse, float(case.q[0, 0, 0, 0]) ** 2 * 8 + np.log(100), rtol=1e-6)


def test_first_blocks_of_minus_infinity(one):
    """A row whose first scores are all -inf has no maximum yet, but sees other keys in later blocks."""
    case = make(B=1, Hq=1, Tq=256, Tk=256, d=128, dtype="bfloat16", window=(100, 0))
    case.q[..., 0] = 1
    case.k[..., 128:, 0] = -np.inf
    out, lse = one.results(case)
    plain = make(B=1, Hq=1, Tq=256, Tk=256, d=128, dtype="bfloat16", window=(100, 0))
    plain.q[...], plain.k[...], plain.v[...] = case.q, case.k, case.v
    plain.k[..., 128:, 0] = 0
    s = plain.q[0, 0, 128:228].astype(np.float64) @ plain.k[0, 0, :128].astype(np.float64).T / np.sqrt(128)
    rows, keys = np.arange(128, 228)[:, None], np.arange(128)[None]
    s[keys < rows - 100] = -np.inf  # of the first 128 keys; the others are hidden by -inf
    np.testing.assert_allclose(lse[0, 0, 128:228], np.log(np.exp(s).sum(1)), atol=2e-3)


def test_low_scores_behind_minus_infinity(one):
    """Such a row's other keys may be so far below 0 that P without a maximum is 0: it has seen keys all the same."""
    case = make(B=1, Hq=1, Tq=256, Tk=256, d=128, dtype="bfloat16", window=(100, 0))
    case.q[..., 0], case.q[..., 1:] = 1, 0
    case.k[..., 128:, 0], case.k[..., :128, 0] = -np.inf, -2048
    _, lse = one.results(case)
    seen = 100 - np.arange(100)  # of the first 128 keys, by row 128 and those behind it
    np.testing.assert_allclose(lse[0, 0, 128:228], np.log(seen) - 2048 / np.sqrt(128), rtol=1e-6)


# ---- pieces that blocks of threads share --------------------------------------------------------------


class Sharing(Here):
    """Where pieces are alike, the last ones are shared whatever that costs."""

    def __init__(self, monkeypatch, backwards=False, processors=4):
        super().__init__(monkeypatch, backwards, processors)
        monkeypatch.setattr(sm90, "WGMMA_BALANCED_LEAST", 1)
        monkeypatch.setattr(sm90, "WGMMA_BALANCED_COST", -1.0)
        self.changes.append(("constexpr int BALANCED = 1;", "constexpr int BALANCED = 1;"))  # it is there

    def results(self, case, small_on_device=False, **options):
        answer = super().results(case, small_on_device, **options)
        assert self.counters  # words by which one waits for another
        return answer


#: Multiprocessors; and calls: of as many pieces as given, each of so many blocks of keys
SHARED = {
    "4 of 5 between 3": (3, dict(Hq=2, Tq=200, Tk=600, d=128)),
    "6 of 5 between 4": (4, dict(Hq=2, Tq=300, Tk=600, d=128)),
    "8 of 8 between 3, some whole": (3, dict(Hq=4, Tq=200, Tk=1000, d=128)),
    "18 of 3 between 4, most whole": (4, dict(B=2, Hq=3, Tq=300, Tk=260, d=128)),
    "2 of 8 between 7": (7, dict(Hq=2, Tq=100, Tk=900, d=128, sinks=normal(2))),
    "1 of 3 between 11": (11, dict(Hq=1, Tq=17, Tk=300, d=128)),
    "3 of 1 between 2": (2, dict(Hq=3, Tq=17, Tk=100, d=128)),
    "4 of 4 between 4, nothing is shared": (4, dict(Hq=4, Tq=100, Tk=512, d=128)),
    "6 of 10 between 4, own blocks": (4, dict(Hq=2, Tq=520, Tk=600, d=64)),
    "8 of 5 between 5, grouped heads": (5, dict(B=2, Hq=4, Hkv=2, Tq=200, Tk=257, d=64, sinks=normal(4))),
    "1 of 14 between 4": (4, dict(Hq=1, Tq=256, Tk=840, d=64)),
    "4 of 4 between 3, 192": (3, dict(Hq=2, Tq=140, Tk=300, d=192)),
    "2 of 3 between 4, 256": (4, dict(Hq=1, Tq=140, Tk=170, d=256)),
    "4 of 3 between 3, 8 and 200": (3, dict(Hq=2, Tq=140, Tk=200, d=8, dv=200)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SHARED)
def test_shared_pieces(monkeypatch, name, dtype):
    processors, options = SHARED[name]
    backwards = (len(name) + len(dtype)) % 2 == 1
    Sharing(monkeypatch, backwards, processors).check(make(**(dict(B=1, dtype=dtype) | options)))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", [name for name in SCORES if not name.startswith(("masked", "window"))])
def test_parts_of_scores_far_from_alike(monkeypatch, name, d):
    """What one part cannot hold has the whole piece done again, by the one that merges."""
    Sharing(monkeypatch, len(name) % 2 == 1, 3).check(scores(name, d=d))


@pytest.mark.parametrize("half", ["early", "late"])
@pytest.mark.parametrize("what", ["nan", "inf"])
def test_what_is_not_a_number_in_one_part(monkeypatch, what, half):
    """It is in every row of its head, whichever part it comes in; another head has none of it."""
    case = make(B=1, Hq=2, Tq=100, Tk=600, d=128, dtype="bfloat16")
    reference = case.reference()
    case.v[0, 0, 20 if half == "early" else 580, 3] = float(what)
    out, lse = Sharing(monkeypatch, processors=3).results(case)
    want = np.asarray(reference.oracle["out"], np.float64)
    assert not np.isfinite(out[0, 0, :, 3].astype(np.float64)).any()
    clean = out.astype(np.float64)
    clean[0, 0, :, 3] = want[0, 0, :, 3]
    assert_close("out", clean, reference)
    assert_close("lse", lse, reference)


def test_pieces_that_are_done_again_have_the_bits_of_whole_ones(monkeypatch):
    case = scores("rising 50", d=128)
    with pytest.MonkeyPatch.context() as one:
        whole = Here(one, processors=3).results(case)
    for _ in range(2):
        for x, y in zip(whole, Sharing(monkeypatch, processors=3).results(case), strict=True):
            np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))


def test_shares_have_the_same_bits_again(monkeypatch):
    """In the same memory, and with threads in another order."""
    case, found = make(B=1, Hq=2, Tq=300, Tk=600, d=64, dtype="bfloat16"), []
    for backwards in (False, True):
        here = Sharing(monkeypatch, backwards, 5)
        found += [here.results(case), here.results(case)]
    for out, lse in found[1:]:
        np.testing.assert_array_equal(out.view(np.uint16), found[0][0].view(np.uint16))
        np.testing.assert_array_equal(lse, found[0][1])


def between(processors, **options):
    return processors, lambda: make(**(dict(B=1, Hq=2, Tq=300, Tk=600, d=128, dtype="bfloat16") | options))


BROKEN_SHARES = {
    "parts are added as they are": (("kept[r] = exp2_approximately(shift[r] - now)", "kept[r] = 1.0f"), *between(4)),
    "the sum of a part is not added": (("l[r] = fmaf(l[r], kept[r], more[r] * added[r])", "l[r] *= kept[r]"),
                                       *between(4)),
    "one part too few": (("x <= others", "x < others"), *between(4)),
    "of another one": (("place_in_line() + x)", "place_in_line() + 2 * x)"), *between(7, Hq=1, Tq=300, Tk=900)),
    "nobody merges": (("others == FOR_ANOTHER", "others != 0"), *between(4)),
    "a part is for nobody": (("others == FOR_ANOTHER", "false"), *between(4)),
    "words are not left as zeros": (("*word = 0;", ""), *between(4)),
    "rows by warpgroup": (
        ("* CONSUMERS + part) * WARPGROUP", "* CONSUMERS + group) * WARPGROUP"), *between(4, d=64, Tq=520)
    ),
    "the end of another piece": (("(last - (BALANCED ? share.from : 0))", "(last - share.from / 2)"), *between(4)),
    "what is not finite counts nothing": (
        ("now), added[r] = exp2_approximately(shift[2 + r] - now);",
         "now), added[r] = exp2_approximately(shift[2 + r] - now);\n"
         "            if (added[r] == 0) { l[r] *= kept[r]; return; }"),
        3, lambda: scores("dip 4000", d=128),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_SHARES)
def test_broken_shares_are_seen(monkeypatch, name):
    change, processors, case = BROKEN_SHARES[name]
    here, case = Sharing(monkeypatch, processors=processors), case()
    reference = case.reference()
    here.check(case, reference)
    here.changes.append(change)
    with pytest.raises(AssertionError):
        here.check(case, reference)


# ---- kernels that are broken on purpose ---------------------------------------------------------------


def packed():
    case = make(lead=(), Hq=1, Tq=180, Tk=200, d=64, dtype="bfloat16")
    case.cu_seqlens = ([0, 100, 180], [0, 130, 200])
    return case


def behind_padding():
    case = make(lead=(), Hq=1, Tq=600, Tk=200, d=64, dtype="bfloat16")
    case.cu_seqlens = ([300, 520, 600], [0, 130, 200])
    return case


def padded():
    case = make(B=1, Tq=150, Tk=300, d=128, dtype="bfloat16", kv_lengths=[129])
    case.v[:, :, 129:] = np.nan
    return case


def plain(**options):
    return lambda: make(**(dict(B=1, Hq=2, Tq=300, Tk=400, d=128, dtype="bfloat16") | options))


RELEASE = "        if (leads())\n            arrive(&rest.empty_K[k]);\n"
WAIT = "        if (BESIDE || !there_K)\n            await(&rest.full_K[k], n / STAGES & 1);\n"
BROKEN = {
    "a sum of any size": (("!(total[r] < MOST_SUM)", "false"), lambda: scores("sums 700")),
    "outputs of any size": (("| !(finite[2 * r] + finite[2 * r + 1] == 0.0f)", ""), lambda: scores("values 0", d=128)),
    "pieces are not done again": (("&& !__all_sync(WARP, !again)", "&& false"), lambda: scores("rising 50")),
    "no rescaling": (("if (WAY != FIXED && moves)", "if (false)"), plain(causal=True, dtype="float16")),
    "NaN behind the last key": (("clear_values(piece, j0);", ""), padded),
    "one key fewer": (("position + call.band_upper + 1,", "position + call.band_upper,"), plain(causal=True)),
    "one key more on the left": (("piece.lower + row - from", "piece.lower + row - 1 - from"), plain(window=(20, 20))),
    "boxes into the next sequence": (
        ("PACKED ? first + WARP_ROWS <= stored : first < stored", "first < stored"), packed
    ),
    "a sequence begins a place later": (
        ("const bool later = begin(b + half) <= place;", "const bool later = begin(b + half) < place;"), packed
    ),
    "places before the first sequence are its own": (
        ("        if (place.block < 0)\n            return false;\n", ""), behind_padding
    ),
    "padding before the sequences is left": (
        ("row < padding.first ? row : row + padding.sequences", "row + padding.sequences"), behind_padding
    ),
    "one column fewer": (("left < 2 ? left : 2", "left < 2 ? 0 : 2"), plain(causal=True, q_offset=97)),
    "counts of other rows": (
        ("int from = x * ROWS", "int from = (CONSUMERS - 1 - x) * ROWS"), plain(d=64, causal=True)
    ),
    "rows of a piece before": (("given % 2 ?", "(given + warp) % 2 ?"), plain(d=64, causal=True)),
    "the same halves are exchanged": (("odd ? left : right", "odd ? right : left"), plain(Hq=1, Tq=100, d=256)),
    "the counter is not cleared": (("call.counters[0] = 0", "call.counters[0] = 1"), plain(causal=True)),
    "K is released before it was read": (
        (WAIT, WAIT + RELEASE), plain(Hq=1, Tq=100)
    ),
    "the next K is taken to be there": (
        ("there_K = ended(", "there_K = true || ended("), plain(d=64, Hq=1, Tq=200, Tk=900)
    ),
    "the next V is taken to be there": (
        ("there_V = ended(", "there_V = true || ended("), plain(d=64, Hq=1, Tq=200, Tk=900)
    ),
    "the next piece's K is taken to be there": (
        ("there_K = there_V = false;", "there_K = true, there_V = false;"), plain(d=64, Hq=1, Tq=200)
    ),
    "V is released before it was read": (
        ("await_products<BESIDE ? 1 : 0>();", "await_products<1>();"), plain(d=64, Hq=1, Tq=200, Tk=900)
    ),
    "O is not made visible to copies": (
        ("        fence_shared();\n        __syncwarp();", "        __syncwarp();"), plain()
    ),
    "O is overwritten before it was read": (
        ("        if (lane == 0)\n            await_stores_read<0>();\n", ""), plain(B=2, Hq=4)
    ),
    "a part of the sum is left out": (("int y = 1; y < CHAINS", "int y = 2; y < CHAINS"), plain()),
    "P of the step before is not waited for": (
        ("l[0] + l[1];\n            await_products<0>();", "l[0] + l[1];\n            await_products<1>();"), plain()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_are_seen(monkeypatch, name):
    """Each with the call that is right without the change."""
    here, (change, case) = Here(monkeypatch, processors=1), BROKEN[name]
    case = case()
    reference = (replace(case, v=np.nan_to_num(case.v)) if name.startswith("NaN") else case).reference()
    here.check(case, reference)
    here.changes.append(change)
    if name.startswith("K is"):  # and only then
        here.changes.append((RELEASE + "        if constexpr (!BESIDE", "        if constexpr (!BESIDE"))
    with pytest.raises(AssertionError):
        here.check(case, reference)


# ---- switches -----------------------------------------------------------------------------------------


def test_the_exact_maximum_can_be_asked_for(one, monkeypatch):
    """And then scores that rise do no harm even where nothing is done again, by less than float32's range in a step."""
    monkeypatch.setenv("RAWFLASH_EXACT_MAXIMUM", "1")
    text = "constexpr int STATIC_MAXIMUM = 0;"
    one.changes += [(text, text)]
    one.check(scores("all 1000", d=128))
    one.check(scores("rising 50"))
    one.changes += [("&& !__all_sync(WARP, !again)", "&& false")]
    one.check(scores("rising 8", dtype="float16"))
    one.check(scores("all 40", d=128, dtype="float16"))
    one.check(scores("all 300"))
    one.changes += [("catch_up(sums, alpha);", ";")]
    with pytest.raises(AssertionError):
        one.check(scores("all 40", d=128, dtype="float16"))


def test_waits_can_be_bounded(one, monkeypatch):
    case = make(B=1, Tq=40, Tk=140, d=64, dtype="bfloat16")
    with pytest.raises(LookupError, match="#define BOUNDED"):
        one.changes.append(("#define BOUNDED", "#define BOUNDED"))
        one.results(case)
    monkeypatch.setenv("RAWFLASH_BOUNDED", "1")
    one.check(case)


def test_results_have_the_same_bits_again_whoever_does_the_pieces(monkeypatch):
    case, found = scores("rising 50"), []
    for processors, backwards in ((1, False), (2, True), (5, False)):
        found.append(Here(monkeypatch, backwards, processors).results(case))
    for out, lse in found[1:]:
        np.testing.assert_array_equal(out.view(np.uint16), found[0][0].view(np.uint16))
        np.testing.assert_array_equal(lse, found[0][1])
