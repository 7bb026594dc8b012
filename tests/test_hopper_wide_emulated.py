"""The backward kernels of sm_90 for more than 128 columns against the oracle, on the CPU (-m emulated)."""

from contextlib import nullcontext

import emulator
import numpy as np
import pytest
import test_hopper_backward_emulated as narrow
from test_forward import make, normal
from test_hopper_backward_emulated import check, prepared

import rawflash as rf
from rawflash import sm90
from rawflash.backends.cupy_raw import compile, fa2_backward, launch

pytestmark = pytest.mark.emulated
FILE = "sm90/fa2_backward_wide.cu"
DTYPES = ("bfloat16", "float16")

# d and dv lie in whole slabs of 64 columns on chip, 128 to 256 of them; 64 rows and 64 keys at a time. The warpgroups
# are up to two steps apart, so some calls have more steps than that.
CALLS = {
    "one row, one key": dict(Tq=1, Tk=1, d=256),
    "one tile": dict(Tq=64, Tk=64, d=256),
    "one tile, d = 192, dv = 128": dict(Tq=64, Tk=64, d=192, dv=128),
    "one more": dict(Tq=65, Tk=65, d=256),
    "one less": dict(B=1, Tq=63, Tk=63, d=192),
    "many steps": dict(B=1, Hq=1, Tq=450, Tk=40, d=256),
    "many steps, many stages": dict(B=1, Hq=1, Tq=450, Tk=64, d=136),
    "d = 136": dict(Tq=130, Tk=70, d=136),
    "d = 200, dv = 136": dict(Tq=70, Tk=130, d=200, dv=136),
    "d = 192, dv = 128": dict(Tq=100, Tk=140, d=192, dv=128, causal=True),
    "d = 256, dv = 64": dict(Tq=70, Tk=90, d=256, dv=64),
    "d = 128, dv = 256": dict(Tq=70, Tk=90, d=128, dv=256, causal=True),
    "d = 8, dv = 192": dict(Tq=70, Tk=90, d=8, dv=192),
    "d = 192, dv = 256": dict(Tq=70, Tk=90, d=192, dv=256),
    "causal": dict(B=1, Tq=150, Tk=300, d=256, causal=True),
    "causal, more rows": dict(B=1, Tq=300, Tk=150, d=256, causal=True),
    "causal, heads in turn": dict(B=2, Hq=3, Hkv=1, Tq=140, Tk=130, d=160, causal=True),
    "rows without keys": dict(Tq=200, Tk=10, d=256, causal=True),
    "nothing visible": dict(Tq=90, d=256, causal=True, q_offset=-1000),
    "everything visible": dict(Tq=90, d=192, causal=True, q_offset=1000),
    "offsets": dict(B=3, Tq=100, Tk=140, d=144, causal=True, q_offset=np.array([-70, 3, 90])),
    "window": dict(B=1, Tq=300, d=256, window=(70, 20)),
    "window to the left": dict(B=1, Tq=200, d=192, window=(20, None)),
    "window of one key": dict(B=1, Tq=200, d=256, window=(0, 0)),
    "groups": dict(B=2, Hq=6, Hkv=2, Tq=90, Tk=70, d=256),
    "one key head": dict(B=1, Hq=5, Hkv=1, Tq=70, d=192, dv=128, causal=True),
    "lengths": dict(B=3, Tq=150, Tk=200, d=256, q_lengths=[150, 20, 0], kv_lengths=[130, 200, 64]),
    "other lengths": dict(B=3, Tq=150, Tk=200, d=192, dv=128, q_lengths=[70, 150, 128], kv_lengths=[0, 1, 199]),
    "lengths, causal": dict(
        B=3, Tq=150, Tk=200, d=136, q_lengths=[100, 20, 149], kv_lengths=[130, 200, 90], causal=True),
    "sinks": dict(B=2, Tq=70, d=256, sinks=lambda rng, dtype: np.array([-np.inf, 0.5], np.float32)),
    "a huge sink": dict(Tq=70, d=192, sinks=lambda rng, dtype: np.array([90.0, -90.0], dtype)),
    "scale": dict(Tq=70, d=256, scale=1.5),
    "scores of thousands": dict(Tq=100, Tk=140, d=256, size=500.0, causal=True),
    "small probabilities": dict(  # for float16, when they are not scaled; dV of them is no small number
        B=1, Tq=64, Tk=60, d=136, size_of_dout=1e4, sinks=lambda rng, dtype: np.array([15.0, 14.0], np.float32)),
    "softcap": dict(B=1, Tq=150, Tk=130, d=256, softcap=2.0, causal=True),
    "alibi": dict(B=1, Hq=4, Hkv=2, Tq=150, Tk=140, d=192, dv=128, alibi_slopes=np.array([0.5, 0.1, 0.02, -0.01])),
    "softcap, alibi": dict(
        B=3, Hq=2, Hkv=1, Tq=150, Tk=200, d=136, softcap=3.0, alibi_slopes=np.array([0.3, 0.05]), window=(90, 70),
        q_lengths=[150, 20, 0], kv_lengths=[130, 200, 64]),
    "softcap, alibi, offsets": dict(
        B=2, Hq=2, Tq=140, Tk=150, d=256, softcap=3.0, alibi_slopes=np.array([[0.3, 0.05], [1.0, 0.0]]), causal=True,
        q_offset=np.array([-40, 70])),
    "many steps, softcap": dict(B=1, Hq=1, Tq=700, Tk=60, d=136, softcap=2.0),
    "many steps, softcap, d = 192": dict(B=1, Hq=1, Tq=700, Tk=60, d=192, softcap=2.0),
    "many steps, softcap, d = 256": dict(B=1, Hq=1, Tq=700, Tk=60, d=256, softcap=2.0),
    "causal, groups, softcap": dict(B=1, Hq=4, Hkv=2, Tq=150, Tk=190, d=192, causal=True, softcap=2.0),
    "causal, groups, alibi": dict(
        B=1, Hq=4, Hkv=2, Tq=150, Tk=140, d=256, causal=True, alibi_slopes=np.array([0.5, 0.1, 0.02, -0.01])),
}  # fmt: skip
PACKED = {
    "packed": dict(Tq=200, Tk=300, d=256, cu=([3, 80, 80, 199], [0, 130, 150, 290]), causal=True),
    "packed, d = 192, dv = 128": dict(Tq=200, Tk=300, d=192, dv=128, cu=([0, 64, 100, 200], [10, 138, 140, 300])),
    "packed, window, sinks": dict(
        Hq=4, Hkv=2, Tq=210, Tk=190, d=136, cu=([0, 1, 130, 210], [0, 60, 188, 188]), window=(50, 9), sinks=normal(4)),
    "packed, offsets": dict(
        Tq=90, Tk=120, d=200, dv=136, cu=([0, 50, 90], [0, 60, 110]), causal=True, q_offset=np.array([5, -9])),
    "packed, softcap, alibi": dict(
        Hq=4, Hkv=2, Tq=210, Tk=190, d=256, cu=([0, 1, 130, 210], [0, 60, 188, 188]), causal=True, softcap=3.0,
        alibi_slopes=np.array([0.3, 0.05, 0.0, 1.0])),
}  # fmt: skip


@pytest.fixture(params=[False, True], ids=["forwards", "backwards"])
def device(request, monkeypatch):
    emulator.install(monkeypatch, backwards=request.param)


zeros, late, late_in_last_head = narrow.zeros, narrow.late, narrow.late_in_last_head


@pytest.fixture
def device_by_name(request, monkeypatch):
    emulator.install(monkeypatch, backwards=len(request.node.name) % 2 == 1)


ORDER_GAINS = sm90._order_gains


@pytest.fixture(autouse=True)
def one_sum(monkeypatch):
    """Calls here have few blocks of keys, and are to have what many have."""
    monkeypatch.setattr(sm90, "WGMMA_SUMS", {256: (0.0, 0.0)})
    monkeypatch.setattr(sm90, "_order_gains", lambda *_: False)


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """How often the kernels for many columns were launched."""
    calls = []
    run = launch.Launcher.run

    def counted(self, kernel, *arguments, **more):
        if kernel == "fa2_backward_keys" and arguments[3:] == (fa2_backward.WIDE_THREADS,):
            calls.append(kernel)
        return run(self, kernel, *arguments, **more)

    monkeypatch.setattr(launch.Launcher, "run", counted)
    return calls


@pytest.mark.parametrize("name", [*CALLS, *PACKED])
def test_calls(name, device_by_name, taken):
    """Either dtype, tables on the host or on the device, in turn."""
    n = [*CALLS, *PACKED].index(name)
    case = prepared((CALLS | PACKED)[name], DTYPES[n % 2])
    check(case, case.reference(), small_on_device=n % 4 < 2)
    assert taken == ["fa2_backward_keys"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["causal", "d = 192, dv = 128", "other lengths", "packed", "small probabilities"])
def test_orders_of_threads(name, dtype, device, taken):
    case = prepared((CALLS | PACKED)[name], dtype)
    check(case, case.reference())
    assert taken


# Blocks of keys add to dQ in turn, the first keys first, or under a mask without lower end the last ones
IN_ORDER = {name: ((CALLS | PACKED)[name], "") for name in (
    "one row, one key", "one more", "many steps", "d = 200, dv = 136", "d = 128, dv = 256", "causal",
    "causal, more rows", "causal, heads in turn", "nothing visible", "offsets", "window", "window to the left",
    "window of one key", "groups", "one key head", "lengths", "other lengths", "lengths, causal", "sinks", "softcap",
    "softcap, alibi", "causal, groups, softcap", "causal, groups, alibi", *PACKED,
)} | {
    "longest first behind": (dict(B=2, Hq=2, Tq=250, Tk=250, d=256, causal=True), "late"),
    "longest first behind, in the last head": (
        dict(B=1, Hq=3, Tq=200, Tk=250, d=192, dv=128, causal=True), "late_in_last_head"),
    "longest first behind, more rows than keys": (dict(B=1, Hq=2, Tq=300, Tk=230, d=136, causal=True), "late"),
    "longest first behind, lengths": (
        dict(B=3, Hq=1, Tq=200, Tk=250, d=256, causal=True, q_lengths=[200, 129, 0], kv_lengths=[130, 250, 77]),
        "late"),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_ORDER)
def test_deterministic(name, monkeypatch, taken, zeros, request):
    """A wrong turn would be waited for. The first one stores, so that nothing is cleared but counters, where it is
    known that some block of keys comes to all rows."""
    options, how = IN_ORDER[name]
    if how:
        request.getfixturevalue(how)
    emulator.install(monkeypatch, backwards=False)
    case = prepared(options | {"deterministic": True}, DTYPES[len(name) % 2])
    check(case, case.reference(), small_on_device=len(name) % 3 == 0)
    assert taken == ["fa2_backward_keys"]
    may_miss_rows = (
        "packed" in name or case.options.keys() & {"q_offset", "q_lengths"}
        or case.q.shape[2] > case.k.shape[2] and case.options.keys() & {"causal", "window"}
    )
    grouped = case.q.shape[-3] > case.k.shape[-3]  # rows go down then
    assert not (zeros[0][0]["LAST_FIRST"] and grouped)
    assert zeros[0][0]["FIRST_STORES"] and (zeros[0][1] >= 4 * 64 * 64) == bool(may_miss_rows)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options, in_order", [
    (dict(Hq=4, Hkv=2, Tq=300, d=192), True), (dict(Hq=5, Hkv=1, Tq=130, Tk=200, d=256), True),
    (dict(Hq=2, Hkv=2, Tq=200, d=256), False),
])  # fmt: skip
def test_a_fixed_order_where_none_is_asked_for(options, in_order, deterministic, monkeypatch, device_by_name, taken):
    """Where query heads share keys: by the kernel of those that ask for one, and with as many counters."""
    monkeypatch.setattr(sm90, "_order_gains", ORDER_GAINS)
    done, launched = [], fa2_backward._wgmma
    monkeypatch.setattr(fa2_backward, "_wgmma", lambda problem, *rest: done.append(problem) or launched(problem, *rest))
    case = prepared(dict(causal=True, B=1, deterministic=deterministic) | options, "bfloat16")
    check(case, case.reference())
    assert taken and [problem.deterministic for problem in done] == [in_order or deterministic] * len(done)


@pytest.mark.parametrize("name", [
    name for name in IN_ORDER
    if not name.startswith(("nothing", "one row", "many", "window of one", "packed, offsets"))  # one block, or none
])  # fmt: skip
def test_each_block_of_keys_adds_in_its_turn(name, monkeypatch, taken, request):
    """Not before: its number is exactly that of those that have added to the rows."""
    options, how = IN_ORDER[name]
    if how:
        request.getfixturevalue(how)
    narrow.check_turns(options, True, {narrow.TURN_ALONE: "true"}, FILE, monkeypatch, taken)


@pytest.mark.parametrize("wait", ["in the first patch", "in the last patch", "nowhere"])
@pytest.mark.parametrize("name", ["causal", "one key head", "many steps"])
def test_who_adds_waits_for_its_turn(name, wait, device_by_name, taken, monkeypatch):
    """Before the turn is told, what the first one stores is spoiled: it is stored after that."""
    case = prepared(IN_ORDER[name][0] | {"deterministic": True}, "bfloat16")
    break_backward(monkeypatch, narrow.TURN_ALONE, narrow.SPOILED)
    waits = "if (DETERMINISTIC && patch == 0)\n                await(barriers + TURN, parity);"
    new = {"in the last patch": waits.replace("patch == 0", "patch + 1 == PATCHES"), "nowhere": ""}
    break_backward(monkeypatch, waits, new.get(wait, waits))
    with nullcontext() if wait == "in the first patch" else pytest.raises(AssertionError):
        check(case, case.reference())
    assert taken


@pytest.mark.parametrize("view", ["transposed", "sliced", "broadcast", "fortran"])
def test_strides(view, device_by_name, taken):
    narrow.check_strides(view, taken, d=192)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout(dtype, device_by_name, taken):
    case = make(B=2, Hq=4, Hkv=2, Tq=100, Tk=70, d=192, dv=128, dtype=dtype, layout="bthd", causal=True)
    for name in ("q", "k", "v", "dout"):
        setattr(case, name, np.ascontiguousarray(getattr(case, name).swapaxes(1, 2)))
    check(case, case.reference())
    assert taken


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scores", narrow.SCORES)
def test_a_row_that_sees_a_nan_is_nan(scores, dtype, device_by_name, taken):
    narrow.check_rows_that_see_a_nan(taken, d=256, dtype=dtype, **narrow.SCORES[scores])


@pytest.mark.parametrize("scores", narrow.SCORES)
def test_rows_that_see_a_nan_and_are_numbers_are_caught(scores, device_by_name, monkeypatch):
    break_backward(monkeypatch, "least_or_nan(PLAIN", "fminf(PLAIN")
    with pytest.raises(AssertionError):
        narrow.check_rows_that_see_a_nan([1], d=256, **narrow.SCORES[scores])


def test_what_overflows_is_hidden_where_it_is_not_seen(device_by_name, taken):
    narrow.check_what_overflows(taken, d=192)


def test_two_calls_do_not_add_up(device_by_name):
    narrow.check_two_calls(d=256)


def test_sections_of_heads(monkeypatch, device_by_name, taken):
    narrow.check_sections(monkeypatch, taken, Tk=200, d=192, nbytes=1 << 20)


@pytest.mark.parametrize("overlap", ["true", "false"])
@pytest.mark.parametrize("name", ["many steps", "causal, heads in turn", "packed"])
def test_both_orders_of_products(name, overlap, device_by_name, taken, monkeypatch):
    case = prepared((CALLS | PACKED)[name], "bfloat16")
    break_backward(monkeypatch, "OVERLAP = TO_D < 256 && TO_V < 256", f"OVERLAP = {overlap}")
    check(case, case.reference())
    assert taken


def relative_errors(case):
    """Root mean squares of the errors of dq, dk and dv, by those of what the oracle says."""
    moved, oracle = narrow.on_device(case, False), case.reference().oracle
    found = zip(("dq", "dk", "dv"), moved.backward(*moved.forward())[:3], strict=True)
    return {name: rms(np.asarray(x, np.float64) - oracle[name]) / rms(oracle[name]) for name, x in found}


def rms(x):
    return np.sqrt(np.mean(np.square(x)))


def slopes_rounded_once(case):
    """What is left of `relative_errors` of dq and dk where dS alone has 16 bits, and the results."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (case.q, case.k, case.v, case.dout))
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    P = np.exp(S - S.max(-1, keepdims=True))
    P /= P.sum(-1, keepdims=True)
    dP = dout @ v.swapaxes(-1, -2)
    dS = P * (dP - (P * dP).sum(-1, keepdims=True) + case.dlse[..., None])
    rounded = dS.astype(case.q.dtype).astype(np.float64)
    errors = {}
    for name, product in (("dq", lambda x: x @ k), ("dk", lambda x: x.swapaxes(-1, -2) @ q)):
        made = (product(rounded) / np.sqrt(q.shape[-1])).astype(case.q.dtype)
        true = product(dS) / np.sqrt(q.shape[-1])
        errors[name] = rms(made.astype(np.float64) - true) / rms(true)
    return errors


@pytest.mark.parametrize("broken", [False, True])
def test_slopes_come_from_probabilities_in_32_bits(broken, device_by_name, taken, monkeypatch):
    """Of P in 16 bits, dS would have a second rounding: errors 1.2 times as large."""
    case = prepared(dict(B=1, Tq=192, Tk=192, d=136), "bfloat16")
    if broken:
        old, P = "const float4 P = from[n * WARPGROUP]", "from[n * WARPGROUP]"
        sixteen = ", ".join(f"widen<TYPE>(narrow<TYPE>({P}.{x}))" for x in "xyzw")
        break_backward(monkeypatch, old, f"const float4 P = make_float4({sixteen})")
    errors, least = relative_errors(case), slopes_rounded_once(case)
    assert taken and all(errors[name] > 0.95 * least[name] for name in least)
    assert all(errors[name] < 1.05 * least[name] for name in least) != broken


@pytest.mark.parametrize("broken", [False, True])
def test_small_probabilities_keep_their_bits(broken, device_by_name, taken, monkeypatch):
    """Of 2^-27 and less, in dV."""
    if broken:
        break_backward(monkeypatch, "TYPE == FLOAT16 ? 15 : 0", "0")
    errors = relative_errors(prepared(CALLS["small probabilities"], "float16"))
    assert taken and (max(errors.values()) < 2.0**-11) != broken


# A warpgroup that is late in this place: others go on for a while.
LATE = {
    "scores, before S": "// S^T = K Q^T\n            float S",
    "scores, before P is written": "// The other warpgroup has the same",
    "scores, before dV": "// dV += P^T dO",
    "slopes, before dP": "// dP^T = V dO^T\n            float dP",
    "slopes, before P is read": "const float4* const from",
    "slopes, before dK": "// dK += dS^T Q",
    "rows, before dQ": "// dQ_i = dS K\n            float x",
    "copies": "#pragma unroll\n        for (int n = 0; n < BR / WARP_LANES; n++)\n            numbers",
}  # fmt: skip


def delayed(place):
    assert compile.source(FILE, "").count(LATE[place]) == 1
    return LATE[place], "for (int late = 0; late < 50; late++)\n__nanosleep(1);\n" + LATE[place]


@pytest.mark.parametrize("place", LATE)
@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("many steps")])
def test_a_warpgroup_is_late(name, place, device_by_name, taken, monkeypatch):
    case = prepared(CALLS[name], "bfloat16")
    break_backward(monkeypatch, *delayed(place))
    check(case, case.reference())
    assert taken


@pytest.mark.parametrize("options", [
    dict(dropout=0.1), dict(sram=1 << 17),
    dict(mask=rf.masks.PrefixLM(5)), dict(bias=np.zeros((20, 20), np.float32)), dict(scale=-0.5), dict(d=132),
], ids=lambda options: next(iter(options)))  # fmt: skip
def test_other_calls_go_another_way(options, device_by_name, taken):
    case = make(B=1, Tq=20, dtype="bfloat16", **{"d": 136} | options)
    case.wrt = ("q", "k", "v")
    check(case, case.reference())
    assert not taken


# ---- the tests can fail ---------------------------------------------------------------------------------------

AT_ONCE = "has a factor more\n                await_place();", "has a factor more"
BROKEN = {
    "": ("causal", "", ""),
    "slopes are those of the first head": (
        "causal, groups, alibi", "begin_head(call, work.b, rows.h)", "begin_head(call, work.b, work.first_head)"),
    "slopes are those of the first sequence": (
        "softcap, alibi, offsets", "begin_head(call, work.b, rows.h)", "begin_head(call, 0, rows.h)"),
    "dS is not less where scores are capped": ("softcap", "x[0] * slopes[0]", "x[0]"),
    "dV is less where scores are capped": (
        "softcap", "= pair(x[0], x[1])", "= pair(x[0] * slopes[0], x[1] * slopes[1])"),
    "the band is a row wide of the mark": ("causal", "BAND ? (int)clamp(j - call", "BAND ? (int)clamp(j - 1 - call"),
    "all tiles are taken for plain": ("causal", "if (i0 >= plain_from && i0 + BR <= plain_to)", "if (true)"),
    "keys that follow are left": ("lengths", "call.rows_k && left < BC", "call.rows_k && false"),
    "rows that follow are left": ("packed", "return i0 + BR > work.q_length &&", "return false &&"),
    "rows are used before they are cleared": (
        "packed", "meet_from_apart(BOTH_MEET, BOTH);  // rows", "announce(BOTH_MEET, BOTH);  // rows"),
    "dS is not fenced": ("one tile", "fence_shared();\n            announce(DS_THERE", "announce(DS_THERE"),
    "dS is not waited for": ("one tile", "meet(DS_THERE + part, BOTH)", "announce(DS_THERE + part, BOTH)"),
    "P is written over": (
        "many steps, many stages", "await(barriers + P_READ + part, ((work.steps - steps) / P_TILES & 1) ^ 1);", ";",
        "slopes, before P is read"),
    "the one P is written over": (
        "many steps", "await(barriers + P_READ + part, ((work.steps - steps) / P_TILES & 1) ^ 1);", ";",
        "slopes, before P is read"),
    "P is written over, softcap": ("many steps, softcap", *AT_ONCE, "slopes, before P is read"),
    "P is written over, softcap, dP is late": ("many steps, softcap", *AT_ONCE, "slopes, before dP"),
    "P is written over, softcap, d = 192": ("many steps, softcap, d = 192", *AT_ONCE, "slopes, before P is read"),
    "P is written over, softcap, d = 192, dP is late": ("many steps, softcap, d = 192", *AT_ONCE, "slopes, before dP"),
    "P is written over, softcap, d = 256": ("many steps, softcap, d = 256", *AT_ONCE, "slopes, before P is read"),
    "dS is written over": (
        "many steps", "meet(DS_READ + part, BOTH)", "announce(DS_READ + part, BOTH)", "rows, before dQ"),
    "P is not waited for": (
        "one tile", "await(barriers + P_THERE + place, (work.steps - steps) / P_TILES & 1);", ";",
        "scores, before P is written"),
    "P stays too large": ("one tile", "dV, P_LESS,", "dV, 1.0f,"),
    "Q is given back early": (
        "many steps", "if (last >= 0)\n                    arrive_as_warp(barriers + Q_READ + last, lane)",
        "arrive_as_warp(barriers + Q_READ + stage, lane)", "slopes, before dK"),
    "dO is given back early": (
        "many steps", "if (last >= 0)\n                    arrive_as_warp(barriers + O_READ + last, lane)",
        "arrive_as_warp(barriers + O_READ + stage, lane)", "scores, before dV"),
    "S is read early": ("one tile", "            await_products<0>();\n\n            // P =", "            // P ="),
    "dP is read early": ("one tile", "await_products<0>();  // dP\n", "\n"),
    "dV is read early": ("one tile", "await_products<0>();  // dV", ""),
    "dK is read early": ("one tile", "await_products<0>();  // dK", ""),
    "dQ is read early": ("one tile", "await_products<0>();  // x", ";"),
    "delta is left out": ("one tile", "P_LESS * *row_of(call.delta", "0.0f * *row_of(call.delta"),
    "lse is in other units": ("one tile", "lse * LOG2E - P_POWER", "lse - P_POWER"),
    "heads of a group share a block of sums": (
        "groups", "block_at(call, work, rows.h,", "block_at(call, work, work.first_head,"),
    "sequences share a block of sums": ("packed", "q_start / BR + b;", "q_start / BR;"),
    "all of dQ is its first columns": ("one tile", "moved(K_across, patch * ", "moved(K_across, 0 * "),
    "all of dK is its first columns": ("one tile", "moved(y, c * ", "moved(y, 0 * "),
    "dK is not scaled": ("one tile", "(float)call.scale, ONE", "1.0f, ONE"),
}  # fmt: skip


BROKEN_IN_ORDER = {
    "": ("causal", "", ""),
    "nobody stores": ("causal", "FIRST_STORES && turn_at(call, work, i0) == 0", "false"),
    "all store": ("causal", "FIRST_STORES && turn_at(call, work, i0) == 0", "true"),
}  # fmt: skip


def break_backward(monkeypatch, old, new):
    monkeypatch.setattr(narrow, "FILE", FILE)
    narrow.break_backward(monkeypatch, old, new)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_are_caught(name, device_by_name, taken, monkeypatch):
    which, old, new, *places = BROKEN[name]
    case = prepared((CALLS | PACKED)[which], "float16")
    for place in places:
        break_backward(monkeypatch, *delayed(place))
    break_backward(monkeypatch, old, new)
    with pytest.raises(AssertionError) if old else nullcontext():
        check(case, case.reference())
    assert taken


@pytest.mark.parametrize("name", BROKEN_IN_ORDER)
def test_broken_kernels_in_order_are_caught(name, monkeypatch, taken):
    which, old, new = BROKEN_IN_ORDER[name]
    emulator.install(monkeypatch, backwards=False)
    case = prepared(IN_ORDER[which][0] | {"deterministic": True}, "float16")
    break_backward(monkeypatch, old, new)
    with pytest.raises(AssertionError) if old else nullcontext():
        check(case, case.reference())
    assert taken


def test_a_kernel_that_does_not_hide_dS_is_caught(device_by_name, monkeypatch):
    break_backward(monkeypatch, "seen.hide(x, i0);\n            unsigned dS", "unsigned dS")
    with pytest.raises(AssertionError):
        test_what_overflows_is_hidden_where_it_is_not_seen(None, [1])
