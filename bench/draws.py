"""Random calls for ``bench.reliability``, the same for the same seed: sizes, options, numbers, how they lie in memory.

They come in sets (:class:`Kind`), each of which has the constants that the text of a kernel depends on in common.
Everything else is drawn for each call: compiling takes a thousand times as long as running.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench import dense

SETS = {"forward": 72, "backward": 72, "long": 16}  # of constants; long: backward, such as long calls have

HEADS = {  # d and dv; the first ones more often
    "forward": ((64, 64), (128, 128), (64, 64), (128, 128), (96, 96), (192, 128), (256, 256), (8, 200), (128, 64),
                (64, 128), (192, 192), (32, 32), (256, 64), (40, 72), (16, 8), (72, 248)),
    "backward": ((64, 64), (128, 128), (64, 64), (128, 128), (96, 96), (64, 128), (128, 64), (32, 32), (256, 256),
                 (192, 128), (8, 120), (72, 40), (192, 192), (64, 256), (256, 136), (16, 8)),
    "long": ((128, 128), (64, 64), (128, 72), (96, 128), (128, 128), (72, 80), (64, 40), (128, 128)),
}  # fmt: skip
ROWS = {"long": (193, 600), "short": (17, 192), "few": (1, 16)}  # by which the forward pass has other kernels
LONGEST_KEYS = 600
EDGES = (1, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320, 383, 384, 448, 511, 512, 513, 576)
BANDS = ("none", "causal", "causal", "window", "left", "right", "causal window")
LONG_BANDS = ("none", "causal", "right", "causal")
EVEN_ROWS, EVEN_KEYS = 128, 256  # whole ones of these: even numbers of blocks of 64 rows and of 128 keys, as in pairs
VIEWS = ("plain", "bthd", "turned", "wide")  # in memory (B, H, T, d) or (B, T, H, d); rows with more columns
SIZES = (1.0, 1.0, 1.0, 4.0, 30.0)  # of the queries
MOST_HEADS, MANY_HEADS = 8, 64  # of all sequences, usually and in some calls: the reference takes time


@dataclass(frozen=True)
class Where:
    """Device of the arrays and backend of the calls; None: who takes them."""

    device: str = "cuda"
    backend: str | None = None

    def options(self) -> dict[str, Any]:
        return {} if self.backend is None else {"backend": self.backend}


@dataclass(frozen=True)
class Kind:
    """What calls of one set have in common: all that the text of a kernel depends on."""

    part: str
    number: int
    dtype: str
    d: int
    dv: int
    rows: str
    packed: bool
    lengths: bool
    band: str
    softcap: bool
    alibi: bool
    sinks: str  # their dtype, or ""
    dlse: bool
    deterministic: bool

    @property
    def name(self) -> str:
        return f"{self.part}/{self.number}"

    @property
    def backward(self) -> bool:
        return self.part != "forward"


@dataclass
class Drawn:
    """One call, but for its numbers."""

    kind: Kind
    number: int
    seed: int
    B: int
    Hkv: int
    group: int
    Tq: int
    Tk: int
    options: dict[str, Any]
    cu_seqlens: tuple[list[int], list[int]] | None
    view: str
    size: float
    uneven: float  # by which the numbers of some keys are multiplied
    poisoned: bool
    on_device: bool  # lengths, offsets and starts

    def words(self) -> str:
        """To read in a list of failures."""
        k, shown = self.kind, {n: np.asarray(x).tolist() for n, x in self.options.items() if x is not None}
        shown |= {"cu_seqlens": self.cu_seqlens} if self.cu_seqlens else {}
        flags = [name for name in ("softcap", "alibi", "dlse", "deterministic") if getattr(k, name)]
        flags += [f"sinks {k.sinks}"] * bool(k.sinks) + ["poisoned"] * self.poisoned + ["tables"] * self.on_device
        sizes = f"B{self.B} H{self.Hkv * self.group}/{self.Hkv} T{self.Tq}x{self.Tk} d{k.d} dv{k.dv}"
        return (f"{k.dtype} {sizes} {k.band}, {' '.join(flags)} {shown} {self.view}, "
                f"q times {self.size}, keys times {self.uneven}")  # fmt: skip


def kinds(part: str, seed: int, count: int | None = None) -> list[Kind]:
    """The sets of constants of a part, in which head dimensions and dtypes take turns."""
    backward, found = part == "backward", []
    for n in range(SETS[part] if count is None else count):
        rng = np.random.default_rng([seed, list(SETS).index(part), n])

        def some(share: float, rng: np.random.Generator = rng) -> bool:
            return bool(rng.random() < share)

        dtype = ("bfloat16", "float16")[n % 2]
        d, dv = HEADS[part][n // 2 % len(HEADS[part])]
        if part == "long":  # a few options, as the others have kernels that are not planned in other ways
            band = LONG_BANDS[n % len(LONG_BANDS)]
            in_order = n % 5 in (1, 3)
            more = (False, False, "", bool(n % 3), in_order)
            found.append(Kind(part, n, dtype, d, dv, "long", False, False, band, *more))
            continue
        packed = some(0.25)
        rows = ("long", "short", "few")[int(rng.choice(3, p=(0.5, 0.3, 0.2) if backward else (0.6, 0.4, 0.0)))]
        found.append(Kind(
            part, n, dtype, d, dv, rows, packed, not packed and some(0.35), str(rng.choice(BANDS)),
            some(0.2), some(0.2), (dtype, "float32")[int(some(0.5))] if some(0.3) else "", backward and some(0.3),
            backward and some(0.3),
        ))  # fmt: skip
    return found


def draw(kind: Kind, number: int, seed: int) -> Drawn:
    """The same call for the same numbers."""
    rng = np.random.default_rng([seed, list(SETS).index(kind.part), kind.number, 1 + number])

    def length(low: int, high: int) -> int:
        edges = [n for n in EDGES if low <= n <= high]
        return int(rng.choice(edges)) if edges and rng.random() < 0.5 else int(rng.integers(low, high + 1))

    sequences = int(rng.integers(1, 5)) if kind.packed else int(rng.choice([1, 1, 2, 3]))
    B = 1 if kind.packed else sequences
    Hkv, group = int(rng.choice([1, 1, 2, 3])), int(rng.choice([1, 1, 2, 4]))
    if rng.random() < 0.1:  # more pieces of work than multiprocessors
        Hkv, group = int(rng.choice([16, 32])) // B, int(rng.choice([1, 2, 4]))
        group = min(group, max(MANY_HEADS // (B * Hkv), 1))
    elif B * Hkv * group > MOST_HEADS:
        Hkv, group = 1, min(group, MOST_HEADS // B)
    low, high = ROWS[kind.rows]
    Tq, Tk = length(low, high), length(1, LONGEST_KEYS)
    if rng.random() < 0.2:
        Tk = Tq
    if kind.part == "long" and rng.random() < 0.4:
        Tq, Tk = -(-Tq // EVEN_ROWS) * EVEN_ROWS, -(-Tk // EVEN_KEYS) * EVEN_KEYS
        if kind.band == "none":  # the last ones need not all exist
            Tq, Tk = Tq - int(rng.integers(60)), Tk - int(rng.integers(120))
    options: dict[str, Any] = {}
    cu = None
    if kind.packed:
        cu = _starts(rng, sequences, Tq), _starts(rng, sequences, Tk)
    if kind.lengths:
        which = rng.integers(1, 4)  # of queries, of keys, of both
        for bit, name, longest in ((1, "q_lengths", Tq), (2, "kv_lengths", Tk)):
            if which & bit:
                drawn = rng.integers(0, longest + 1, B)
                options[name] = np.where(rng.random(B) < 0.2, rng.choice([0, longest], B), drawn)
    if "causal" in kind.band:
        options["causal"] = True
    if kind.band in ("window", "left", "right", "causal window"):
        left, right = (int(rng.choice([0, 3, int(rng.integers(1, 300)), 128])) for _ in range(2))
        options["window"] = None if kind.band == "right" else left, None if kind.band == "left" else right
    if kind.band != "none" or kind.alibi:
        far = (0, 0, 0, Tk - Tq, -1000, 1000)
        how = rng.integers(4)
        if how == 1:
            options["q_offset"] = int(rng.choice([*far, *rng.integers(-Tq - 2, Tk + 3, 6)]))
        elif how == 2:
            options["q_offset"] = rng.integers(-Tq - 2, Tk + 3, sequences)
    if kind.softcap:
        options["softcap"] = float(rng.choice([0.5, 5.0, 30.0]))
    if rng.random() < 0.2:
        options["scale"] = float(rng.choice([1.0, 0.3, 0.05]))
    uneven = float(rng.choice([1.0, 1.0, 1.0, 10.0, 40.0]))
    return Drawn(
        kind, number, int(rng.integers(2**31)), B, Hkv, group, Tq, Tk, options, cu, str(rng.choice(VIEWS)),
        float(rng.choice(SIZES)), uneven, bool(rng.random() < 0.7), bool(rng.random() < 0.5),
    )  # fmt: skip


def _starts(rng: np.random.Generator, sequences: int, rows: int) -> list[int]:
    """Where sequences begin and the last one ends; rows before and after them are padding, some have none."""
    return [int(n) for n in np.sort(rng.integers(0, rows + 1, sequences + 1))]


@dataclass
class Made:
    """A drawn call with its numbers: what is passed, and what the reference is given."""

    arrays: dict[str, Any]
    options: dict[str, Any]
    cu_seqlens: tuple[Any, Any] | None
    clean: dense.Call
    dlse: Any
    empty_rows: Any
    nothing: Any = None  # is visible to any row

    def axes(self, a: Any) -> Any:
        """A result as ``(B, H, T, ...)``; one number a head stays as it is."""
        if a.ndim == 1:
            return a
        if self.cu_seqlens is not None:
            a = a[None]
        return a.transpose(1, 2) if self.options.get("layout") == "bthd" and a.ndim == 4 else a


def positions(x: Drawn) -> tuple[np.ndarray, ...]:
    """For each row, then each key, ``(B, T)``: its sequence, below 0 in padding, and its place on the key axis."""
    found = []
    if x.cu_seqlens is not None:
        starts = [np.asarray(cu) for cu in x.cu_seqlens]
        counts = [np.diff(cu) for cu in starts]
        offsets = np.broadcast_to(x.options.get("q_offset", counts[1] - counts[0]), counts[0].shape)
        for cu, shift, padding, T in ((starts[0], offsets, -1, x.Tq), (starts[1], offsets * 0, -2, x.Tk)):
            sequence, place = np.full((1, T), padding), np.zeros((1, T), np.int64)
            for n, (first, last) in enumerate(zip(cu[:-1], cu[1:], strict=True)):
                sequence[0, first:last] = n
                place[0, first:last] = np.arange(last - first) + shift[n]
            found += [sequence, place]
        return tuple(found)
    of_q = np.broadcast_to(x.options.get("q_lengths", x.Tq), x.B)
    of_k = np.broadcast_to(x.options.get("kv_lengths", x.Tk), x.B)
    offsets = np.broadcast_to(x.options.get("q_offset", of_k - of_q), x.B)
    for lengths, shift, padding, T in ((of_q, offsets, -1, x.Tq), (of_k, offsets * 0, -2, x.Tk)):
        t = np.broadcast_to(np.arange(T), (x.B, T))
        found += [np.where(t < lengths[:, None], np.arange(x.B)[:, None], padding), t + shift[:, None]]
    return tuple(found)


def make(x: Drawn, where: Where) -> Made:
    """The numbers of a call, from its seed."""
    import torch

    k, options = x.kind, dict(x.options)
    generator = torch.Generator(where.device).manual_seed(x.seed)
    dtype = getattr(torch, k.dtype)

    def normal(*shape: int, dtype: Any = dtype, size: float = 1.0) -> Any:
        drawn = torch.randn(shape, generator=generator, device=where.device)
        return (drawn * size).to(dtype)

    def moved(a: Any) -> Any:
        return torch.as_tensor(np.asarray(a), device=where.device)

    Hq = x.Hkv * x.group
    q, keys = normal(x.B, Hq, x.Tq, k.d, size=x.size), normal(x.B, x.Hkv, x.Tk, k.d)
    if x.uneven != 1.0:  # half of the keys, or one, far from the others
        half = slice(0, x.Tk // 2) if x.seed % 3 == 0 else slice(x.Tk // 2, None) if x.seed % 3 == 1 else slice(0, 1)
        keys[:, :, half] *= x.uneven
    v, dout = normal(x.B, x.Hkv, x.Tk, k.dv), normal(x.B, Hq, x.Tq, k.dv)
    row_of, row_at, key_of, key_at = (moved(a) for a in positions(x))
    rows, apart = (row_of >= 0)[:, None], (row_at[:, None, :, None] - key_at[:, None, None, :])
    visible = row_of[:, None, :, None] == key_of[:, None, None, :]
    left, right = x.options.get("window", (None, None))
    right = 0 if x.options.get("causal") and right is None else right
    if x.options.get("causal"):
        visible = visible & (apart >= 0)
    if left is not None:
        visible = visible & (apart <= left)
    if right is not None:
        visible = visible & (apart >= -right)
    clean = dense.Call(q, keys, v, visible, rows, softcap=options.get("softcap"), scale=options.get("scale"))
    empty_rows = (rows & ~visible.any(-1)).any()
    if k.sinks:
        options["sinks"] = clean.sinks = normal(Hq, dtype=getattr(torch, k.sinks), size=2.0)
    if k.alibi:
        slopes = torch.rand(Hq, generator=generator, device=where.device)
        options["alibi_slopes"], clean.slopes, clean.distance = slopes, slopes[:, None, None], apart.abs()
    dlse = None
    if k.backward:
        clean.dout = dout
        if k.dlse:
            clean.dlse = dlse = normal(x.B, Hq, x.Tq, dtype=torch.float32)
        if k.deterministic:
            options["deterministic"] = True
    passed = {"q": q, "k": keys, "v": v, "dout": dout}
    if x.poisoned:
        padding = {"q": ~rows, "k": key_of[:, None] < 0, "v": key_of[:, None] < 0, "dout": ~rows}
        passed = {name: a.masked_fill(padding[name][..., None], math.nan) for name, a in passed.items()}
    passed = {name: _laid(a, x.view) for name, a in passed.items()}
    if x.view == "bthd":
        options["layout"] = "bthd"
    cu: tuple[Any, Any] | None = x.cu_seqlens
    if cu is not None:
        passed = {name: a[0] for name, a in passed.items()}
        dlse = None if dlse is None else dlse[0]
    if x.on_device:
        for name in ("q_lengths", "kv_lengths", "q_offset"):
            if isinstance(options.get(name), np.ndarray):
                options[name] = moved(options[name])
        cu = None if cu is None else (moved(cu[0]), moved(cu[1]))
    return Made(passed, options | where.options(), cu, clean, dlse, empty_rows, ~visible.any())


def _laid(a: Any, view: str) -> Any:
    """The same numbers in other memory; what lies between them is NaN."""
    if view == "wide":
        home = a.new_full((*a.shape[:-1], a.shape[-1] + 8), math.nan)
        home[..., : a.shape[-1]] = a
        return home[..., : a.shape[-1]]
    if view == "plain":
        return a
    turned = a.transpose(1, 2).contiguous()
    return turned if view == "bthd" else turned.transpose(1, 2)


def served(made: Made, direction: str) -> str:
    """Which kernel has a call, as its plan says."""
    import rawflash as rf

    cu = {} if made.cu_seqlens is None else dict(zip(("cu_seqlens_q", "cu_seqlens_k"), made.cu_seqlens, strict=True))
    a = made.arrays
    plan = rf.explain(a["q"], a["k"], a["v"], direction, **cu, **made.options)
    constants = dict(plan.tiles.constants)
    way = " in pairs" if constants.get("PAIRED") else " by heads" if constants.get("TOGETHER") else ""
    return f"{plan.kernel}{way}, {plan.tiles.family}"


def traits(x: Drawn) -> list[str]:
    """What a call has, of what is asked for."""
    k, o = x.kind, x.options
    ragged = k.packed or k.lengths
    has = {
        k.dtype: True, "causal": "causal" in o, "window": "window" in o, "q_offset": "q_offset" in o,
        "lengths": k.lengths, "packed": k.packed, "softcap": k.softcap, "ALiBi": k.alibi, "sinks": bool(k.sinks),
        "dlse": k.dlse, "deterministic": k.deterministic, "grouped heads": x.group > 1,
        "one key head": x.group > 1 and x.Hkv == 1, "d != dv": k.d != k.dv, "above 128 columns": max(k.d, k.dv) > 128,
        "T = 1": 1 in (x.Tq, x.Tk), "Tq != Tk": x.Tq != x.Tk, "T % 128 = 64": 64 in (x.Tq % 128, x.Tk % 128),
        "more than 132 blocks of 128 rows": x.B * x.Hkv * x.group * -(-x.Tq // 128) > 132,
        "(B, T, H, d)": x.view in ("bthd", "turned"), "rows apart": x.view == "wide",
        "NaN in padding": x.poisoned and ragged,
        "tables on the GPU": x.on_device and (ragged or isinstance(o.get("q_offset"), np.ndarray)),
    }  # fmt: skip
    return [name for name, is_so in has.items() if is_so]


def call(made: Made, backward: bool) -> dict[str, Any]:
    """Results of a call, by name."""
    import rawflash as rf

    q, k, v, dout = (made.arrays[name] for name in ("q", "k", "v", "dout"))
    cu, options = made.cu_seqlens, made.options
    forward = {name: value for name, value in options.items() if name != "deterministic"}
    if cu is None:
        out, lse = rf.attention(q, k, v, return_lse=True, **forward)
    else:
        out, lse = rf.attention_varlen(q, k, v, *cu, return_lse=True, **forward)
    found = {"out": out, "lse": lse}
    if backward:
        wrt = ("q", "k", "v", "sinks") if "sinks" in options else ("q", "k", "v")
        more = options | {"dlse": made.dlse, "wrt": wrt}
        if cu is None:
            grads = rf.attention_backward(dout, q, k, v, out, lse, **more)
        else:
            grads = rf.attention_varlen_backward(dout, q, k, v, out, lse, *cu, **more)
        found |= {"d" + name: gradient for name, gradient in zip(wrt, grads, strict=True)}
    return found


def expected_of(made: Made, results: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What results are to be, and their errors allowed: gradients start from this very out and lse."""
    given = (made.axes(results["out"]), made.axes(results["lse"]))
    return dense.reference(made.clean, None if made.clean.dout is None else given)


def ratios(made: Made, results: dict[str, Any], expected: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Ratio of error to allowed error of each result, on the device."""
    dtypes, found = made.clean.dtypes(), {}
    for name, (exact, allowed) in expected.items():
        if results[name].dtype != dtypes[name]:
            raise ValueError(f"{name} is {results[name].dtype}; expected {dtypes[name]}")
        found[name] = dense.ratio(made.axes(results[name]), exact, allowed)
    return found
