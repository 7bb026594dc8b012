"""Hypothesis strategies for whole calls: arrays and options together, as a `Case`.

``problems()`` draws calls of `rawflash.attention` and its gradient, ``varlen_problems()`` those of
`rawflash.attention_varlen`. Every option of the contract is drawn; a test narrows the draw by arguments::

    @given(problems(dtypes=("float64",), exclude=("dropout",), backend="numpy_tiled"))
    def test_something(case):
        ref = case.reference()
        out, lse = case.forward()
        grads = case.backward(out, lse)

Numbers come from a drawn integer seed, never element by element, so that drawing is fast and the printed
`Case` says how to make them again. Everything shrinks towards one head, contiguous arrays, no options.
"""

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import rawflash as rf
from rawflash import masks as M

DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
ALGORITHMS = ("fa2", "fa1", "standard", "rowwise")
VIEWS = ("contiguous", "transposed", "sliced", "broadcast", "strided_last", "reversed", "fortran")
LAYOUTS = ("bhtd", "bthd")
VALUES = ("normal", "large", "integers", "constant_rows")
FEATURES = (
    "causal",
    "window",
    "q_offset",
    "q_lengths",
    "kv_lengths",
    "mask",
    "bias",
    "alibi_slopes",
    "softcap",
    "sinks",
    "dropout",
    "scale",
    "dlse",
    "deterministic",
    "sram",
    "layout",
)
NOT_VARLEN = ("mask", "bias", "q_lengths", "kv_lengths")

# Lengths: nothing, one, primes, and one less and one more than the powers of two that tiles like.
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 23, 31, 32, 33, 37, 40, 0)
HEAD_DIMS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 19, 31, 32, 33, 40)
SRAM = (1 << 16, 1 << 18, 1 << 20)  # bytes; small enough for several tiles, large enough for one


@dataclass(repr=False)
class Case:
    """One call: its arrays and its options. ``how`` says how the arrays were made, for printing only."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    options: dict
    dlse: np.ndarray | None = None
    wrt: tuple = ("q", "k", "v")
    cu_seqlens: tuple | None = None
    how: dict = field(default_factory=dict)

    def __repr__(self):
        arrays = {name: getattr(self, name) for name in ("q", "k", "v", "dout", "dlse")}
        lines = [f"{name}: {_shown(array)}" for name, array in arrays.items()]
        if self.cu_seqlens is not None:
            lines += [f"cu_seqlens_q: {self.cu_seqlens[0]!r}", f"cu_seqlens_k: {self.cu_seqlens[1]!r}"]
        lines += [f"{name}={_shown(value)}" for name, value in self.options.items()]
        lines += [f"wrt={self.wrt!r}", "made with " + ", ".join(f"{n}={x!r}" for n, x in self.how.items())]
        return "Case(\n    " + "\n    ".join(lines) + ")"

    def forward(self, **more):
        """``(out, lse)`` by `rawflash`; ``more`` overrides options."""
        options = self.options | {"return_lse": True} | more
        if self.cu_seqlens is None:
            return rf.attention(self.q, self.k, self.v, **options)
        return rf.attention_varlen(self.q, self.k, self.v, *self.cu_seqlens, **options)

    def backward(self, out, lse, **more):
        """The gradients by `rawflash`, in the order of ``wrt``."""
        options = self.options | {"dlse": self.dlse, "wrt": self.wrt} | more
        if self.cu_seqlens is None:
            return rf.attention_backward(self.dout, self.q, self.k, self.v, out, lse, **options)
        return rf.attention_varlen_backward(
            self.dout, self.q, self.k, self.v, out, lse, *self.cu_seqlens, **options
        )

    def reference(self, **more):
        """What the oracle says of this call and the errors allowed; see `tolerances.reference`."""
        from tolerances import reference

        options = self.options | {"dlse": self.dlse, "wrt": self.wrt} | more
        if self.cu_seqlens is not None:
            options |= {"cu_seqlens_q": self.cu_seqlens[0], "cu_seqlens_k": self.cu_seqlens[1]}
        return reference(self.q, self.k, self.v, self.dout, **options)


def _shown(value):
    """An array as dtype, shape and byte strides, a short one by its elements; a mask by its structure."""
    if isinstance(value, M.Mask):
        return f"masks: {value.kind}"
    if isinstance(value, np.ndarray):
        short = f" {value.tolist()}" if value.size <= 8 and value.dtype.kind in "iub" else ""
        return f"{value.dtype.name} {value.shape} strides {value.strides}{short}"
    return repr(value)


# ---- arrays ----------------------------------------------------------------------------------------


def fill(rng, shape, kind, dtype=np.float64):
    """Numbers of a kind: "normal", "large" (30 times that), "integers" (sparse, tiny), "constant_rows"."""
    if kind == "integers":  # products and sums are exact in every dtype
        array = rng.integers(-2, 3, shape) * (rng.random(shape) < 0.5)
    elif kind == "constant_rows":
        array = np.broadcast_to(rng.standard_normal((*shape[:-1], 1)), shape)
    else:
        array = rng.standard_normal(shape) * (30.0 if kind == "large" else 1.0)
    return array.astype(dtype)


def restride(array, view):
    """The same elements in other memory; what lies between them is NaN, so that reading it shows.

    "broadcast" is the exception: the first entry of the first axis longer than 1 is repeated, with stride 0.
    """
    if view == "contiguous" or array.ndim < 2:
        return array
    if view == "fortran":  # the last axis is the one farthest apart
        return np.asfortranarray(array)
    if view == "broadcast":
        axis = next((a for a, n in enumerate(array.shape[:-1]) if n > 1), None)
        return array if axis is None else np.broadcast_to(array.take([0], axis), array.shape)
    if view == "transposed":  # stored with all axes but the last reversed
        order = (*reversed(range(array.ndim - 1)), array.ndim - 1)
        return np.ascontiguousarray(array.transpose(order)).transpose(order)
    if view == "reversed":  # rows stored backwards: negative strides
        return np.ascontiguousarray(array[..., ::-1, :])[..., ::-1, :]
    if view == "sliced":  # a window of something larger
        home = np.full([2 * n + 1 for n in array.shape[:-1]] + [array.shape[-1] + 3], np.nan, array.dtype)
        window = home[tuple(slice(1, None, 2) for _ in array.shape[:-1]) + (slice(2, -1),)]
    elif view == "strided_last":
        home = np.full(array.shape[:-1] + (2 * array.shape[-1],), np.nan, array.dtype)
        window = home[..., ::2]
    else:
        raise ValueError(view)
    window[...] = array
    return window


def _restride_drawn(draw, arrays, views, how):
    """Give each array of a dict its own strides, most often those it has."""
    for name in arrays:
        view = draw(st.sampled_from(("contiguous", *views)))
        if view != "contiguous":
            arrays[name] = restride(arrays[name], view)
            how[f"{name}_view"] = view


def broadcast_shapes(shape):
    """Every shape that broadcasts to ``shape``: some axes 1, some leading axes left out."""
    axes = st.tuples(*(st.sampled_from((1, n)) for n in shape))
    return st.builds(lambda full, cut: full[cut:], axes, st.integers(0, len(shape)))


# ---- masks -----------------------------------------------------------------------------------------


def mask_arrays(B, Hq, Tq, Tk):
    """Boolean arrays broadcastable to ``(B, Hq, Tq, Tk)``, also all False and all True."""

    def make(shape, seed, density):
        return np.asarray(np.random.default_rng(seed).random(shape) < density)

    return st.builds(make, broadcast_shapes((B, Hq, Tq, Tk)), _seeds, st.sampled_from((1.0, 0.7, 0.3, 0.0)))


_seeds = st.integers(0, 2**32 - 1)


def _per_batch(B, low, high):
    """An int, or one int per batch entry as an array."""
    one = st.integers(low, high)
    return one | st.lists(one, min_size=B, max_size=B).map(lambda n: np.array(n, np.int64))


def _segment_ids(B, T):
    """Ids of ``T`` positions, shared or per batch entry, sorted (packed sequences) or not."""

    def make(seed, shared, ordered, most):
        ids = np.random.default_rng(seed).integers(0, most, (T,) if shared else (B, T))
        return np.sort(ids) if ordered else ids

    return st.builds(make, _seeds, st.booleans(), st.booleans(), st.integers(1, 4))


def mask_leaves(B, Hq, Tq, Tk):
    """One mask that is not composed of others. A new mask class gets its line here."""
    side = st.none() | st.integers(0, max(Tq, Tk) + 2)
    return st.one_of(
        st.builds(M.Causal),
        st.builds(M.SlidingWindow, side, side),
        st.builds(M.Dense, mask_arrays(B, Hq, Tq, Tk)),
        st.builds(M.Prefix, _per_batch(B, 0, Tk + 1)),
        st.builds(M.PrefixLM, _per_batch(B, 0, Tk + 1)),
        st.builds(M.Segments, _segment_ids(B, Tq), _segment_ids(B, Tk)),
        st.builds(M.Lengths, _per_batch(B, 0, Tq + 1), _per_batch(B, 0, Tk + 1)),
    )


def masks(B, Hq, Tq, Tk, max_leaves=4):
    """Masks for a call of this shape, composed with ``&`` and ``|``."""

    def compose(children):
        return st.builds(lambda a, b, both: a & b if both else a | b, children, children, st.booleans())

    return st.recursive(mask_leaves(B, Hq, Tq, Tk), compose, max_leaves=max_leaves)


def tile_sizes(largest=48):
    """Rows and columns of a tile ``(br, bc)``: one, primes, powers of two and their neighbours."""
    sizes = [n for n in (1, 2, 3, 4, 5, 7, 8, 13, 15, 16, 17, 31, 32, 33, 48) if n <= largest]
    return st.tuples(st.sampled_from(sizes), st.sampled_from(sizes))


# ---- options ---------------------------------------------------------------------------------------


def _lengths(B, longest):
    """Lengths of B sequences, 0 and the whole included, as list or array of either int."""
    values = st.lists(st.integers(0, longest) | st.sampled_from((0, longest)), min_size=B, max_size=B)
    return st.builds(
        lambda n, kind: n if kind is list else np.array(n, kind),
        values,
        st.sampled_from((list, np.int64, np.int32)),
    )


def _offsets(B, Tq, Tk):
    """q_offset: an int of either sign, far outside now and then, or one per batch entry."""
    one = st.integers(-Tq - 2, Tk + 2) | st.sampled_from((0, Tk - Tq, -1000, 1000))
    many = st.lists(one, min_size=B, max_size=B)
    return one | many.map(lambda n: np.array(n, np.int64)) | many.map(lambda n: np.array(n, np.int32))


def _side_dtype(draw, dtype):
    """bias and sinks: the dtype of q, or float32."""
    return draw(st.sampled_from((dtype, DTYPES["float32"])))


def _draw_options(draw, features, rng, shape, dtype, lengths=True):
    """The options of the chosen features, for a call of ``shape = (B, Hq, Tq, Tk)``."""
    B, Hq, Tq, Tk = shape
    options = {}
    side = st.none() | st.integers(0, max(Tq, Tk) + 1)
    simple = {
        "causal": st.just(True),
        "window": st.tuples(side, side),
        "q_offset": _offsets(B, Tq, Tk),
        "q_lengths": _lengths(B, Tq),
        "kv_lengths": _lengths(B, Tk),
        "mask": mask_arrays(*shape) | masks(*shape),
        "softcap": st.sampled_from((2.0, 30.0, 0.5)),
        "scale": st.sampled_from((1.0, 0.3, -0.5, 0.0)),
        "deterministic": st.just(True),
        "sram": st.sampled_from(SRAM),
    }
    for name, strategy in simple.items():
        if name in features:
            options[name] = draw(strategy)
    if "bias" in features:
        bias = np.asarray(rng.standard_normal(draw(broadcast_shapes(shape)))).astype(_side_dtype(draw, dtype))
        hidden = draw(st.sampled_from((0.0, 0.2, 1.0)))
        bias[rng.random(bias.shape) < hidden] = -np.inf
        options["bias"] = bias
    if "alibi_slopes" in features:
        shapes = ((Hq,), (B, Hq))
        slopes = rng.random(draw(st.sampled_from(shapes))).astype(
            draw(st.sampled_from((np.float32, np.float64)))
        )
        options["alibi_slopes"] = slopes
    if "sinks" in features:
        options["sinks"] = rng.standard_normal(Hq).astype(_side_dtype(draw, dtype))
    if "dropout" in features:
        options["dropout"] = draw(st.sampled_from((0.5, 0.1, 0.9)))
        options["seed"] = draw(st.integers(0, 2**64 - 1))
    return options


def _wrt(draw, options):
    """Which gradients: all there are, or some of them in any order."""
    names = ["q", "k", "v"] + [name for name in ("bias", "sinks") if name in options]
    return (
        tuple(names)
        if draw(st.booleans())
        else tuple(draw(st.permutations(names))[: draw(st.integers(1, 5))])
    )


def _features(exclude):
    """Names of the options that a case has: each with probability 1/4, so that most pairs meet."""
    switches = {
        name: st.sampled_from((False, False, False, True)) for name in FEATURES if name not in exclude
    }
    return st.fixed_dictionaries(switches).map(lambda on: {name for name in on if on[name]})


def _poison(case, batch_first):
    """Overwrite padding that has memory of its own with NaN. ``batch_first``: arrays (B, H, T, .)."""
    options = case.options
    for length, names in (("q_lengths", ("q", "dout")), ("kv_lengths", ("k", "v"))):
        if length in options:
            for name in names:
                view = batch_first[name]
                if 0 not in view.strides:
                    for b, n in enumerate(options[length]):
                        view[b, :, n:] = np.nan
    bias = options.get("bias")
    if bias is not None and bias.ndim == 4 and bias.shape[0] == len(batch_first["q"]):
        for b in range(len(bias)):
            if bias.shape[2] > 1 and "q_lengths" in options:
                bias[b, :, options["q_lengths"][b] :] = np.nan
            if bias.shape[3] > 1 and "kv_lengths" in options:
                bias[b, :, :, options["kv_lengths"][b] :] = np.nan


@st.composite
def problems(
    draw,
    dtypes=tuple(DTYPES),
    dims=(2, 3, 4, 5),
    max_batch=3,
    max_kv_heads=2,
    max_group=3,
    max_length=40,
    max_head_dim=40,
    views=VIEWS,
    values=VALUES,
    exclude=(),
    algorithms=ALGORITHMS,
    **fixed,
):
    """A `Case` for `rawflash.attention`, with any combination of options.

    Parameters
    ----------
    dtypes, dims, views, values, algorithms : sequences
        What to choose from. ``dims`` is the number of axes of q.
    max_batch, max_kv_heads, max_group, max_length, max_head_dim : int
        Largest sizes; the batch may be 0 and so may both lengths.
    exclude : sequence of str
        Names out of `FEATURES` that the case must not have.
    **fixed
        Options that every case has, such as ``backend="numba_cpu"``.
    """
    sizes = st.sampled_from([n for n in LENGTHS if n <= max_length])
    widths = st.sampled_from([n for n in HEAD_DIMS if n <= max_head_dim])
    dtype = DTYPES[draw(st.sampled_from([name for name in DTYPES if name in dtypes]))]
    ndim = draw(st.sampled_from(dims))
    most = max_batch if ndim == 4 else min(max_batch, 2)  # several leading axes multiply
    batches = st.sampled_from([*range(1, most + 1)] * 3 + [0])
    lead = tuple(draw(batches) for _ in range(ndim - 3))
    Hkv = 1 if ndim == 2 else draw(st.integers(1, max_kv_heads))
    Hq = 1 if ndim == 2 else Hkv * draw(st.integers(1, max_group))
    Tq, Tk, d, dv = draw(sizes), draw(sizes), draw(widths), draw(widths)
    B = int(np.prod(lead, dtype=int))
    features = draw(_features(exclude)) - set(fixed)

    how = {"seed": draw(_seeds), "values": draw(st.sampled_from(values)), "features": sorted(features)}
    rng = np.random.default_rng(how["seed"])
    options = _draw_options(draw, features, rng, (B, Hq, Tq, Tk), dtype) | fixed
    if "layout" in features:
        options["layout"] = "bthd"
    if "algorithm" not in fixed:
        options["algorithm"] = draw(st.sampled_from(algorithms))

    def shaped(H, T, width):
        if ndim == 2:
            return (T, width)
        return (*lead, T, H, width) if options.get("layout") == "bthd" else (*lead, H, T, width)

    arrays = {
        "q": fill(rng, shaped(Hq, Tq, d), how["values"], dtype),
        "k": fill(rng, shaped(Hkv, Tk, d), "normal" if how["values"] == "large" else how["values"], dtype),
        "v": fill(rng, shaped(Hkv, Tk, dv), "normal", dtype),
        "dout": fill(rng, shaped(Hq, Tq, dv), "normal", dtype),
    }
    _restride_drawn(draw, arrays, views, how)
    case = Case(**arrays, options=options, wrt=_wrt(draw, options), how=how)
    if "dlse" in features:
        shape = (Tq,) if ndim == 2 else (*lead, Hq, Tq)
        case.dlse = rng.standard_normal(shape).astype(np.float64 if dtype == np.float64 else np.float32)
    # Only arrays whose canonical form is a view can be written to through it.
    if features & {"q_lengths", "kv_lengths"} and ndim <= 4 and draw(st.booleans()):
        how["poisoned"] = True
        heads = {
            name: (a if options.get("layout") != "bthd" or ndim == 2 else a.swapaxes(-3, -2))
            for name, a in arrays.items()
        }
        _poison(case, {name: a[(None,) * (4 - ndim)] for name, a in heads.items()})
    return case


@st.composite
def varlen_problems(
    draw,
    dtypes=tuple(DTYPES),
    max_batch=4,
    max_kv_heads=2,
    max_group=3,
    max_length=23,
    max_head_dim=24,
    views=VIEWS,
    values=VALUES,
    exclude=(),
    algorithms=ALGORITHMS,
    **fixed,
):
    """A `Case` for `rawflash.attention_varlen`; parameters as in `problems`.

    There may be no sequence, empty sequences, and rows before the first and after the last one; half of the
    time those rows are NaN.
    """
    sizes = st.sampled_from([n for n in LENGTHS if n <= max_length])
    widths = st.sampled_from([n for n in HEAD_DIMS if n <= max_head_dim])
    dtype = DTYPES[draw(st.sampled_from([name for name in DTYPES if name in dtypes]))]
    B = draw(st.sampled_from([*range(1, max_batch + 1), 0]))
    Hkv = draw(st.integers(1, max_kv_heads))
    Hq = Hkv * draw(st.integers(1, max_group))
    d, dv = draw(widths), draw(widths)
    cu, totals = [], []
    for _ in "qk":
        lengths = [draw(sizes) for _ in range(B)]
        offsets = np.cumsum([draw(st.integers(0, 3)), *lengths])
        totals.append(int(offsets[-1]) + draw(st.integers(0, 3)))
        kind = draw(st.sampled_from((list, np.int32, np.int64)))
        cu.append(offsets.tolist() if kind is list else offsets.astype(kind))
    longest = [int(np.diff(offsets).max(initial=0)) for offsets in cu]
    features = draw(_features((*exclude, *NOT_VARLEN))) - set(fixed)

    how = {"seed": draw(_seeds), "values": draw(st.sampled_from(values)), "features": sorted(features)}
    rng = np.random.default_rng(how["seed"])
    options = _draw_options(draw, features, rng, (B, Hq, *longest), dtype) | fixed
    if "layout" in features:
        options["layout"] = "bthd"
    if "algorithm" not in fixed:
        options["algorithm"] = draw(st.sampled_from(algorithms))
    swap = options.get("layout") == "bthd"

    poison = draw(st.booleans())
    how["poisoned"] = poison
    arrays = {}
    for name, H, side, width in (("q", Hq, 0, d), ("k", Hkv, 1, d), ("v", Hkv, 1, dv), ("dout", Hq, 0, dv)):
        kind = (
            "normal" if name in ("v", "dout") or (name == "k" and how["values"] == "large") else how["values"]
        )
        array = fill(rng, (totals[side], H, width), kind, dtype)
        if poison:
            array[: cu[side][0]] = np.nan
            array[cu[side][-1] :] = np.nan
        arrays[name] = array if swap else np.ascontiguousarray(array.swapaxes(0, 1))
    # A broadcast view would repeat a poisoned row inside a sequence.
    _restride_drawn(draw, arrays, [view for view in views if view != "broadcast"], how)
    case = Case(**arrays, options=options, wrt=_wrt(draw, options), cu_seqlens=tuple(cu), how=how)
    if "dlse" in features:
        case.dlse = rng.standard_normal((Hq, totals[0])).astype(
            np.float64 if dtype == np.float64 else np.float32
        )
    return case


# ---- caches ----------------------------------------------------------------------------------------

NOT_DECODE = ("q_lengths", "kv_lengths", "mask", "bias", "dropout", "dlse", "layout")
UNUSED = (-1, 2**31 - 1, 0)  # entries of a block table that nobody may look up


@dataclass(repr=False)
class Decode:
    """A call of `rawflash.attention_decode`, and the same without a cache.

    ``q (B, Hq, Tq, d)``, ``k (B, Hkv, Tk, d)`` and ``v (B, Hkv, Tk, dv)`` are those of the call without a cache.
    ``page`` is the number of rows of a block, 0 for contiguous caches; ``spare`` how many rows or blocks the caches
    have beyond what they need.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    kv_lengths: np.ndarray
    options: dict
    page: int = 0
    spare: int = 0
    layout: str = "bhtd"
    how: dict = field(default_factory=dict)

    def __repr__(self):
        parts = [f"{name}={_shown(value)}" for name, value in vars(self).items() if name not in ("options", "how")]
        parts += [f"{name}={_shown(value)}" for name, value in {**self.options, **self.how}.items()]
        return "Decode(\n    " + "\n    ".join(parts) + ")"

    def turned(self, array):
        """From ``(B, H, T, d)`` to the layout of the call, or back."""
        return np.ascontiguousarray(array.swapaxes(1, 2)) if self.layout == "bthd" else array

    def caches(self, order=0, filled=None):
        """``(k_cache, v_cache, block_table)``, NaN wherever nothing may be read; blocks in an ``order`` of their own.

        ``filled``: how many keys of each sequence are there yet.
        """
        lengths, (B, Hkv, Tk, _) = self.kv_lengths, self.k.shape
        if not self.page:
            blocks, rows, table = B, Tk + self.spare, None
        else:
            rng = np.random.default_rng(order)
            needed = -(-lengths // self.page)
            blocks, rows = int(needed.sum()) + self.spare, self.page
            table = rng.choice(UNUSED, (B, -(-Tk // rows) + self.spare)).astype((np.int32, np.int64)[order % 2])
            used = np.arange(table.shape[1]) < needed[:, None]
            table[used] = rng.permutation(blocks)[: used.sum()]
        caches = [np.full((blocks, Hkv, rows, x.shape[-1]), np.nan, x.dtype) for x in (self.k, self.v)]
        for cache, keys in zip(caches, (self.k, self.v), strict=True):
            for b, length in enumerate(lengths if filled is None else filled):
                for j in range(0, int(length), rows or 1):
                    n = min(rows, int(length) - j)
                    cache[b if table is None else table[b, j // rows], :, :n] = keys[b, :, j : j + n]
        return (*map(self.turned, caches), table)

    def newest(self, n):
        """``k_new`` and ``v_new``: the last ``n`` keys of each sequence."""
        at = (self.kv_lengths[:, None] - n + np.arange(n))[:, None, :, None]
        return [self.turned(np.take_along_axis(x, at, axis=2)) for x in (self.k, self.v)]

    def forward(self, order=0, **more):
        """``(out, lse)`` by `rawflash`; ``more`` overrides options."""
        k_cache, v_cache, table = self.caches(order)
        options = self.options | {"return_lse": True, "layout": self.layout} | more
        return rf.attention_decode(self.turned(self.q), k_cache, v_cache, self.kv_lengths, table, **options)

    def reference(self, **more):
        """What the oracle says of the call without a cache; see `tolerances.reference`."""
        from tolerances import reference

        q, k, v = map(self.turned, (self.q, self.k, self.v))
        options = self.options | {"layout": self.layout, "kv_lengths": self.kv_lengths}
        return reference(q, k, v, **options | more)


@st.composite
def decode_problems(
    draw, dtypes=tuple(DTYPES), pages=(0, 1, 2, 3, 5, 8, 16, 17, 20), max_rows=16, max_length=70, exclude=(), **fixed
):
    """A `Decode`, with any combination of its options; parameters as in `problems`, ``pages`` what to choose from."""
    dtype = DTYPES[draw(st.sampled_from([name for name in DTYPES if name in dtypes]))]
    B, Hkv, group = draw(st.sampled_from((1, 2, 3, 0))), draw(st.integers(1, 2)), draw(st.integers(1, 4))
    Tq = draw(st.sampled_from([n for n in (1, 2, 3, 5, 8, 9, 16, 0) if n <= max_rows]))
    d, dv = (draw(st.sampled_from([n for n in HEAD_DIMS if n <= 24])) for _ in range(2))
    lengths = np.array(draw(st.lists(st.integers(0, max_length), min_size=B, max_size=B)), np.int64)
    Tk = int(lengths.max(initial=0))
    page = draw(st.sampled_from(pages))
    layout = draw(st.sampled_from(LAYOUTS))
    features = draw(_features((*exclude, *NOT_DECODE))) - set(fixed)
    how = {"seed": draw(_seeds)}
    rng = np.random.default_rng(how["seed"])
    options = _draw_options(draw, features, rng, (B, Hkv * group, Tq, Tk), dtype) | fixed
    q, k, v = (
        fill(rng, shape, "normal", dtype)
        for shape in ((B, Hkv * group, Tq, d), (B, Hkv, Tk, d), (B, Hkv, Tk, dv))
    )
    lengths = lengths.astype(draw(st.sampled_from((np.int32, np.int64))))
    return Decode(q, k, v, lengths, options, page, draw(st.integers(0, 3)), layout, how)
