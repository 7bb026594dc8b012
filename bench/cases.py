"""What is measured: the cases, by name and in groups.

A case is a problem and what is asked of it. Its name is read from it, ``forward/bfloat16/d128/T4096/causal``, and is
its identity in the records; which backends, algorithms and peers run it by default is not part of the name.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

TOKENS = 16384  # B T of a GPU case that names no B
WIDTH = 2048  # H d of one that names no H
BACKWARD_FLOPS = 2.5  # times those of the forward pass: five products of T x T x d beside two
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
DIRECTIONS = ("forward", "backward")
MASKS = (False, True)

SIXTEEN_BITS = ("torch-flash", "torch-cudnn", "fa4")
# Each compiles for seconds to half a minute a case: see --warm of bench.run
SLOW_TO_COMPILE = ("flex", "jax-cudnn", "jax-xla")


@dataclass(frozen=True)
class Case:
    """One problem, and what is asked of it.

    Attributes
    ----------
    measure : {"time", "memory", "sweep", "start", "overhead"}
        Time of a call; its extra memory; its time over M; a first call; host time of a warm call.
    direction : {"forward", "backward", "decode"}
    device : {"gpu", "cpu"}
    page : int
        Keys of a block of a paged cache; 0: contiguous.
    packed : tuple of int
        Rows, and keys, of packed sequences that lie one behind the other: Tq and Tk are their sum. None: a batch.
    backends, algorithms : tuple of str
        Ours, each with each.
    peers : tuple of str
        Who is measured beside us, see :mod:`bench.peers`.
    extra : bool
        Extra memory is reported beside the time.
    deterministic : bool
        Ours are measured in a fixed order, too.
    what : str
        Only "overhead": which call.
    """

    measure: str = "time"
    direction: str = "forward"
    device: str = "gpu"
    dtype: str = "bfloat16"
    B: int = 1
    Hq: int = 1
    Hkv: int = 1
    Tq: int = 1
    Tk: int = 1
    d: int = 64
    dv: int = 64
    causal: bool = False
    page: int = 0
    packed: tuple[int, ...] = ()
    backends: tuple[str, ...] = ("cupy_raw",)
    algorithms: tuple[str, ...] = ("fa2",)
    peers: tuple[str, ...] = ()
    extra: bool = False
    deterministic: bool = False
    what: str = ""

    @cached_property
    def name(self) -> str:
        """Identity of the case; sizes that are what its device's grid has are left out."""
        first = [self.device] * (self.device == "cpu") + [self.measure] * (self.measure != "time")
        if self.measure == "overhead":
            return "/".join([*first, self.what])
        if self.measure == "start":
            return "/".join([*first, self.dtype])
        decode = self.direction == "decode"
        parts = [*first, self.direction, self.dtype, f"d{self.d}" + (f"v{self.dv}" if self.dv != self.d else "")]
        parts += [f"T{self.Tk}"] if decode or self.Tq == self.Tk else [f"T{self.Tq}x{self.Tk}"]
        usual = (TOKENS // self.Tq, WIDTH // self.d) if self.device == "gpu" and not decode else (1, None)
        if (self.B, self.Hq) != usual:
            parts.append(f"B{self.B}H{self.Hq}")
        parts += [f"Hkv{self.Hkv}"] * (self.Hkv != self.Hq)
        parts += [f"page{self.page}"] * (self.page > 0)
        if self.packed:
            least, most = min(self.packed), max(self.packed)
            parts.append(f"packed{len(self.packed)}" + (f"x{most}" if least == most else f"of{least}to{most}"))
        parts += ["causal"] * self.causal + ["deterministic"] * self.deterministic
        return "/".join(parts)

    @property
    def flops(self) -> float:
        """2 T T (d + dv) for each head of each sequence, half of it when causal; backward 2.5 times that."""
        pairs = sum(n * n for n in self.packed) if self.packed else self.B * self.Tq * self.Tk
        forward = 2 * self.Hq * pairs * (self.d + self.dv) * (0.5 if self.causal else 1.0)
        return forward * (BACKWARD_FLOPS if self.direction == "backward" else 1.0)

    @property
    def cache_bytes(self) -> int:
        """Bytes of K and V: what a decoding step has to read."""
        return self.B * self.Hkv * self.Tk * (self.d + self.dv) * ITEMSIZE[self.dtype]

    @property
    def input_bytes(self) -> int:
        """Bytes of all inputs of the pass."""
        rows = self.B * self.Hq * self.Tq * (self.d + (self.dv if self.direction == "backward" else 0))
        return self.cache_bytes + rows * ITEMSIZE[self.dtype]

    @property
    def bound_by_memory(self) -> bool:
        """Is its rate in bytes? Else in floating-point operations."""
        return self.direction == "decode"


def usual(d: int, T: int, **others) -> Case:
    """A GPU case with B T = 16384 and H d = 2048, unless others are named."""
    B, H = others.pop("B", None) or max(TOKENS // T, 1), others.pop("H", None) or WIDTH // d
    return Case(B=B, Hq=H, Hkv=others.pop("Hkv", H), Tq=T, Tk=T, d=d, dv=d, **others)


def both_ways(*cases: Case) -> list[Case]:
    """Each forward and backward, full and causal."""
    return [
        replace(case, direction=direction, causal=causal)
        for case, direction, causal in itertools.product(cases, DIRECTIONS, MASKS)
    ]


GRID = [(d, T) for d in (64, 128) for T in (512, 1024, 2048, 4096, 8192, 16384)] + [(256, 2048), (256, 8192)]
NUMBA = [size for size in GRID if size[0] <= 128]  # also by numba_cuda, which has tensor-core kernels for them
EFFICIENT = {(64, 4096), (128, 4096)}  # of the grid, also by torch's memory-efficient attention


def _grid() -> list[Case]:
    cases = both_ways(*(usual(d, T, peers=SIXTEEN_BITS) for d, T in GRID))
    for n, case in enumerate(cases):
        more = ("torch-efficient",) * ((case.d, case.Tk) in EFFICIENT)
        more += SLOW_TO_COMPILE
        cases[n] = replace(case, peers=case.peers + more)
    return cases


def _float32() -> list[Case]:
    sizes = [(d, T) for d in (64, 128) for T in (2048, 4096, 8192)]
    return both_ways(*(usual(d, T, dtype="float32", peers=("torch-efficient",)) for d, T in sizes))


def _numba() -> list[Case]:
    """Both GPU backends: bfloat16 where the grid is, and float32, which numba_cuda has in plain arithmetic only."""
    cases = both_ways(*(usual(d, T) for d, T in NUMBA))
    cases += [usual(d, 4096, dtype="float32", causal=causal) for d in (64, 128) for causal in MASKS]
    return [replace(case, backends=("cupy_raw", "numba_cuda")) for case in cases]


def _dense() -> list[Case]:
    """Shapes at which a dense formula still fits, beside what a user of CuPy writes today."""
    shapes = [dict(B=4, H=16, T=4096, d=128), dict(B=1, H=8, T=2048, d=64)]
    ours = dict(algorithms=("fa2", "fa1"), peers=("dense-cupy",), extra=True)
    return [
        *(usual(**shape, dtype="float32", causal=causal, backends=("cupy_raw", "numba_cuda"), **ours)
          for shape in shapes for causal in MASKS),
        *(usual(**shapes[1], dtype="float32", direction="backward", causal=causal, **ours) for causal in MASKS),
        *(usual(**shapes[1], dtype="float16", causal=causal, **ours) for causal in MASKS),
    ]  # fmt: skip


def decode(B: int, Hq: int, Hkv: int, T: int, d: int, dtype: str = "bfloat16", page: int = 0, **others) -> Case:
    """One query a sequence over caches of T keys."""
    return Case(direction="decode", dtype=dtype, B=B, Hq=Hq, Hkv=Hkv, Tq=1, Tk=T, d=d, dv=d, page=page, **others)


def _decode() -> list[Case]:
    peers = ("torch-cudnn", "torch-flash")
    shapes = [
        (16, 32, 8, 8192, 128), (1, 32, 8, 8192, 128), (1, 32, 8, 131072, 128), (64, 32, 8, 8192, 128),
        (16, 32, 32, 8192, 128), (16, 32, 8, 8192, 64), (16, 32, 8, 8192, 128, "float16"),
    ]  # fmt: skip
    return [decode(*shape, page=page, peers=peers) for shape in shapes for page in (0, 16, 64)]


def _memory() -> list[Case]:
    """float16: what CuPy multiplies."""
    peers = ("torch-flash", "torch-math", "dense-cupy")
    return [
        usual(64, T, B=1, H=8, dtype="float16", measure="memory", direction=direction, causal=True, peers=peers)
        for direction in DIRECTIONS for T in (1024, 2048, 4096, 8192, 16384)
    ]  # fmt: skip


def _sweep() -> list[Case]:
    how = dict(measure="sweep")
    return [
        usual(d, 4096, dtype=dtype, direction=direction, **how)
        for dtype in ("float32", "bfloat16") for d in (64, 128) for direction in DIRECTIONS
    ]  # fmt: skip


def _ragged() -> list[Case]:
    """Lengths that are a multiple of nothing."""
    shapes = [usual(d, T, B=B, peers=SIXTEEN_BITS) for d in (64, 128) for T, B in ((4097, 4), (1000, 16))]
    return [case for case in both_ways(*shapes) if case.causal or case.d == 128]


def _packed() -> list[Case]:
    """Sequences alike, short and long, and some of many lengths; the last with fewer key heads."""
    mixed = (4096, 64, 2048, 300, 1024, 3000, 777, 1500, 128, 2500, 947)
    sizes = [(128, 16, (2048,) * 8), (128, 16, (256,) * 64), (128, 16, mixed), (64, 32, mixed), (128, 4, mixed)]
    peers = ("torch-flash", "fa4")
    return both_ways(*(usual(d, TOKENS, Hkv=Hkv, packed=lengths, peers=peers) for d, Hkv, lengths in sizes))


def _order() -> list[Case]:
    """Backward passes in a fixed order: the grid, other head dimensions, and query heads that share keys."""
    sizes = [*(usual(d, T) for d, T in GRID), *(usual(96, T, H=16) for T in (2048, 8192))]
    sizes += [replace(usual(192, T, H=16), dv=128) for T in (2048, 8192)]
    sizes += [usual(128, T, B=B, H=32, Hkv=Hkv) for Hkv in (8, 1) for T, B in ((2048, 4), (8192, 1))]
    sizes += [usual(256, T, Hkv=2) for T in (2048, 8192)]
    how = dict(direction="backward", deterministic=True)
    return [replace(case, causal=causal, **how) for case in sizes for causal in MASKS]


def _few() -> list[Case]:
    """Few rows of few heads and long keys: fewer blocks of rows than a device has multiprocessors."""
    sizes = [(128, 16, (17, 64, 128, 256)), (64, 32, (17, 64, 128, 256)), (128, 4, (17, 128))]
    return [
        Case(B=1, Hq=H, Hkv=H, Tq=Tq, Tk=Tk, d=d, dv=d, peers=("torch-flash", "torch-cudnn"))
        for d, H, rows in sizes for Tk in (8192, 65536) for Tq in rows
    ]  # fmt: skip


OVERHEAD = ("attention", "attention-lse", "attention-torch", "attention-numba_cuda", "attention_backward")


def on_cpu(dtype: str, H: int, T: int, d: int, **others) -> Case:
    """One sequence on the CPU, beside PyTorch."""
    how = dict(device="cpu", backends=("numba_cpu",), peers=("torch-cpu",)) | others
    return usual(d, T, B=1, H=H, dtype=dtype, **how)


def _cpu() -> list[Case]:
    heads = {256: 32, 512: 16, 1024: 8, 2048: 4, 4096: 2, 8192: 2}
    return both_ways(
        *(on_cpu("float32", H, T, d) for T, H in heads.items() for d in (32, 64, 80, 128)),
        *(on_cpu("float32", 8, T, d, Hkv=2) for T in (512, 2048) for d in (64, 128)),
        *(on_cpu(dtype, H, T, d) for dtype in ("float64", "bfloat16") for T, H in ((512, 8), (2048, 2))
          for d in (64, 128)),
    )  # fmt: skip


def _cpu_sweep() -> list[Case]:
    return [
        on_cpu("float32", 4, T, d, causal=causal, direction=direction, measure="sweep", peers=())
        for T, d, causal in ((1024, 32, False), (1024, 64, False), (1024, 64, True), (2048, 128, False))
        for direction in DIRECTIONS
    ]


_CPU = dict(device="cpu", backends=("numba_cpu",))

_GROUPS: dict[str, list[Case]] = {
    "grid": _grid(),
    "grid-fp16": both_ways(*(usual(d, T, dtype="float16", peers=SIXTEEN_BITS)
                             for d in (64, 128) for T in (2048, 8192))),
    "gqa": both_ways(*(usual(128, T, B=B, H=32, Hkv=Hkv, peers=SIXTEEN_BITS)
                       for Hkv in (8, 1) for T, B in ((2048, 4), (8192, 1)))),
    "float32": _float32(),
    "float64": both_ways(*(usual(d, 4096, B=2, dtype="float64") for d in (64, 128))),
    "dense": _dense(),
    "decode": _decode(),
    "numba": _numba(),
    "ragged": _ragged(),
    "order": _order(),
    "packed": _packed(),
    "few": _few(),
    "overhead": [Case(measure="overhead", what=what, dtype="float32",
                      backends=("numba_cuda" if "numba" in what else "cupy_raw",)) for what in OVERHEAD],
    "start": [Case(measure="start", dtype=dtype) for dtype in ("bfloat16", "float16", "float32", "float64")],
    "sweep": _sweep(),
    "memory": _memory(),
    "cpu": _cpu(),
    "cpu-decode": [decode(1, 8, 8, 32768, 128, dtype, peers=("torch-cpu",), **_CPU)
                   for dtype in ("float32", "bfloat16")],
    "cpu-start": [Case(measure="start", dtype="float32", **_CPU)],
    "cpu-memory": [on_cpu("float32", 1, 65536, 64, causal=True, direction=direction, measure="memory", peers=())
                   for direction in DIRECTIONS],
    "cpu-sweep": _cpu_sweep(),
    "quick": both_ways(on_cpu("float32", 4, 512, 64)) + [on_cpu("float64", 2, 256, 64)],
}  # fmt: skip


def _merged(a: Case, b: Case) -> Case:
    """The case of one name in two groups: all that either runs."""
    both = {
        field: tuple(dict.fromkeys(getattr(a, field) + getattr(b, field)))
        for field in ("backends", "algorithms", "peers")
    }
    extra = a.extra or b.extra
    if replace(a, **both, extra=extra) != replace(b, **both, extra=extra):
        raise ValueError(f"two cases are named {a.name}")
    return replace(a, **both, extra=extra)


CASES: dict[str, Case] = {}
for _case in itertools.chain.from_iterable(_GROUPS.values()):
    CASES[_case.name] = _merged(CASES.get(_case.name, _case), _case)
GROUPS: dict[str, tuple[str, ...]] = {group: tuple(case.name for case in cases) for group, cases in _GROUPS.items()}


def select(patterns: Iterable[str], device: str | None = None) -> Sequence[Case]:
    """Cases of groups, or whose names fit a pattern of the shell; each once, in the order asked for.

    Raises
    ------
    ValueError
        A pattern that is no group and fits no name.
    """
    found: dict[str, Case] = {}
    for pattern in patterns:
        names = GROUPS.get(pattern) or fnmatch.filter(CASES, pattern)
        if not names:
            raise ValueError(f"no group and no case is named {pattern!r}; groups: {', '.join(GROUPS)}")
        found |= {name: CASES[name] for name in names}
    return [case for case in found.values() if device is None or case.device == device]
