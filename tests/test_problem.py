"""The validator: bad calls raise the right error and touch nothing; good calls become records.

The tables below are the rules of the contract, one line per rule. A bad call is the good call of its
function with something replaced; the error must name the argument and say what was expected, and neither
``out`` nor any input may have changed.
"""

import dataclasses
import math
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import rawflash as rf
from rawflash import masks as M
from rawflash.backends import lookup
from rawflash.problem import Problem, check

try:
    import torch
except ImportError:  # optional: what these tests say of PyTorch is then not checked
    torch = None

B, HQ, HKV, TQ, TK, D, DV = 2, 4, 2, 5, 7, 8, 6


class OnGpu:
    """What an array in device memory looks like from outside: its interface and nothing behind it."""

    def __init__(self, *shape, typestr="<f4"):
        self.shape = shape
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (1 << 40, False),
            "version": 3,
        }


def arr(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def good_forward():
    return dict(
        q=arr(B, HQ, TQ, D),
        k=arr(B, HKV, TK, D),
        v=arr(B, HKV, TK, DV),
        out=np.full((B, HQ, TQ, DV), 7.0, np.float32),
        backend="numpy_tiled",
    )


def good_backward():
    call = good_forward()
    del call["out"]
    out, lse = rf.attention(**call, return_lse=True)
    return call | dict(dout=arr(B, HQ, TQ, DV), o=out, lse=lse)


def good_varlen():
    return dict(
        q=arr(HQ, 9, D),
        k=arr(HKV, 11, D),
        v=arr(HKV, 11, DV),
        cu_seqlens_q=[0, 4, 9],
        cu_seqlens_k=[0, 5, 11],
        out=np.full((HQ, 9, DV), 7.0, np.float32),
        backend="numpy_tiled",
    )


def good_varlen_backward():
    call = good_varlen()
    del call["out"]
    out, lse = rf.attention_varlen(**call, return_lse=True)
    return call | dict(dout=arr(HQ, 9, DV), o=out, lse=lse)


def good_vjp():
    return good_forward() | {"wrt": ("q", "k", "v")}


def good_merge():
    return dict(outs=[arr(2, 3, 4), arr(2, 3, 4)], lses=[arr(2, 3), arr(2, 3)])


def good_dropout_mask():
    return dict(p=0.5, seed=1, shape=(1, 2, 3, 4))


FUNCTIONS = {
    "forward": (rf.attention, good_forward),
    "backward": (rf.attention_backward, good_backward),
    "varlen": (rf.attention_varlen, good_varlen),
    "varlen_backward": (rf.attention_varlen_backward, good_varlen_backward),
    "vjp": (rf.attention_vjp, good_vjp),
    "merge": (rf.merge_attention, good_merge),
    "dropout_mask": (rf.dropout_mask, good_dropout_mask),
    "dense": (M.Dense, lambda: dict(array=[[True, False]])),
    "prefix": (M.Prefix, lambda: dict(length=3)),
}

F16, F64 = np.float16, np.float64
FULL = (B, HQ, TQ, TK)


def frozen(array):
    array.flags.writeable = False
    return array


# name of the rule: (function, what is replaced, words that the message must hold: first the argument)
BAD = {
    # q, k, v
    "q is None": ("forward", dict(q=None), ["q", "array"]),
    "q is a list": ("forward", dict(q=[[1.0]]), ["q", "list", "array"]),
    "k is None": ("forward", dict(k=None), ["k", "array"]),
    "v is a string": ("forward", dict(v="values"), ["v", "str"]),
    "q is a number": ("forward", dict(q=3.0), ["q"]),
    "q has no axes": ("forward", dict(q=np.array(1.0, np.float32)), ["q", "axes"]),
    "q has one axis": ("forward", dict(q=arr(8)), ["q", "(8,)"]),
    "k has other number of axes": ("forward", dict(k=arr(HKV, TK, D)), ["k", f"({HKV}, {TK}, {D})"]),
    "v has other number of axes": ("forward", dict(v=arr(TK, DV)), ["v"]),
    "k of other head dimension": (
        "forward",
        dict(k=arr(B, HKV, TK, D + 1)),
        ["k", "(2, 2, 7, 9)", "*, 8)", "q"],
    ),
    "k of other batch": ("forward", dict(k=arr(B + 1, HKV, TK, D)), ["k", "(3, 2, 7, 8)", "q"]),
    "v of other batch": ("forward", dict(v=arr(1, HKV, TK, DV)), ["v", "(1, 2, 7, 6)"]),
    "v of other length": ("forward", dict(v=arr(B, HKV, TK + 1, DV)), ["v", "(2, 2, 8, 6)", "7"]),
    "v of other heads": ("forward", dict(v=arr(B, HQ, TK, DV)), ["v", "(2, 4, 7, 6)", "k"]),
    "heads do not divide": (
        "forward",
        dict(k=arr(B, 3, TK, D), v=arr(B, 3, TK, DV)),
        ["q", "4", "3", "multiple"],
    ),
    "more key heads than query heads": ("forward", dict(k=arr(B, 8, TK, D), v=arr(B, 8, TK, DV)), ["q", "8"]),
    "no key heads": ("forward", dict(k=arr(B, 0, TK, D), v=arr(B, 0, TK, DV)), ["k", "0"]),
    "no query heads": ("forward", dict(q=arr(B, 0, TQ, D), out=None), ["q", "0"]),
    "no head dimension": ("forward", dict(q=arr(B, HQ, TQ, 0), k=arr(B, HKV, TK, 0)), ["q", "dimension"]),
    "no value dimension": ("forward", dict(v=arr(B, HKV, TK, 0), out=None), ["v", "dimension"]),
    "leading axes differ": (
        "forward",
        dict(q=arr(2, 3, 1, 4, 2), k=arr(3, 2, 1, 4, 2), v=arr(3, 2, 1, 4, 2), out=None),
        ["k", "(3, 2, 1, 4, 2)", "(2, 3"],
    ),
    "q of integers": ("forward", dict(q=np.ones((B, HQ, TQ, D), int)), ["q", "int64", "float16"]),
    "q of complex": ("forward", dict(q=arr(B, HQ, TQ, D, dtype=complex)), ["q", "complex128"]),
    "q of bool": ("forward", dict(q=np.ones((B, HQ, TQ, D), bool)), ["q", "bool"]),
    "q of objects": ("forward", dict(q=arr(B, HQ, TQ, D).astype(object)), ["q", "object"]),
    "q of long double": ("forward", dict(q=arr(B, HQ, TQ, D).astype(np.longdouble)), ["q", "float32"]),
    "k of other dtype": ("forward", dict(k=arr(B, HKV, TK, D, dtype=F64)), ["k", "float64", "float32", "q"]),
    "v of other dtype": ("forward", dict(v=arr(B, HKV, TK, DV, dtype=F16)), ["v", "float16", "float32", "q"]),
    "v bfloat16 beside float16": (
        "forward",
        dict(
            q=arr(4, 2, dtype=F16), k=arr(4, 2, dtype=F16), out=None, v=arr(4, 2).astype(ml_dtypes.bfloat16)
        ),
        ["v", "bfloat16"],
    ),
    "ragged q as bytes": ("forward", dict(q=b"12345678"), ["q"]),
    # numbers that the dtype of the computation cannot hold: they would come out as NaN
    "softcap too large": ("forward", dict(softcap=1e39), ["softcap is 1e+39", "float32"]),
    "softcap too small": ("forward", dict(softcap=1e-50), ["softcap is 1e-50", "float32"]),
    "scale too large": ("forward", dict(scale=-1e300), ["scale is -1e+300", "float32"]),
    "scale too small": ("forward", dict(scale=1e-45), ["scale is 1e-45", "float32"]),
    "softcap too small for float64": (
        "forward",
        dict(q=arr(4, 2, dtype=F64), k=arr(4, 2, dtype=F64), v=arr(4, 2, dtype=F64), out=None, softcap=1e-310),
        ["softcap is 1e-310", "float64"],
    ),
    "q_lengths a number": ("forward", dict(q_lengths=3), ["q_lengths is 3", "(B,) = (2,)"]),
    "mask of ragged lists": ("dense", dict(array=[[True], [True, False]]), ["mask", "ragged"]),
    "mask with a mask": ("dense", dict(array=np.ma.masked_equal([True, False], False)), ["mask", "masked"]),
    "prefix too large": ("prefix", dict(length=np.array(2**63 + 5, np.uint64)), ["prefix", "2**63"]),
    # layout
    "layout unknown": ("forward", dict(layout="bhdt"), ["layout", "bhdt", "bhtd", "bthd"]),
    "layout None": ("forward", dict(layout=None), ["layout", "None"]),
    "layout an array": ("forward", dict(layout=np.array(["bhtd", "bthd"])), ["layout"]),
    "layout does not fit the arrays": (
        "forward",
        dict(layout="bthd", k=arr(B, TK, HKV, D + 1)),
        ["k", "(2, 7, 2, 9)"],
    ),
    "layout bthd, heads differ": (
        "forward",
        dict(q=arr(B, TQ, HQ, D), k=arr(B, TK, 3, D), v=arr(B, TK, 3, DV), layout="bthd", out=None),
        ["q", "3", "multiple"],
    ),
    # mask
    "mask of ints": ("forward", dict(mask=np.ones(FULL, int)), ["mask", "int64", "bool"]),
    "mask of floats": ("forward", dict(mask=np.zeros(FULL)), ["mask", "float64", "bool"]),
    "mask of other shape": ("forward", dict(mask=np.ones((TK, TQ), bool)), ["mask", "(2, 4, 5, 7)"]),
    "mask with five axes": ("forward", dict(mask=np.ones((1, *FULL), bool)), ["mask", "four"]),
    "mask is a class": ("forward", dict(mask=M.Causal), ["mask"]),
    "mask is a list": ("forward", dict(mask=[[True]]), ["mask", "list"]),
    "mask is a string": ("forward", dict(mask="causal"), ["mask", "str"]),
    "mask object does not fit": ("forward", dict(mask=M.Segments([0, 1])), ["mask", "q_ids", "5"]),
    # causal, window, q_offset
    "causal an int": ("forward", dict(causal=1), ["causal", "1", "True or False"]),
    "causal a string": ("forward", dict(causal="upper_left"), ["causal", "upper_left", "True or False"]),
    "causal None": ("forward", dict(causal=None), ["causal", "None"]),
    "window an int": ("forward", dict(window=3), ["window", "3", "pair"]),
    "window of three": ("forward", dict(window=(1, 2, 3)), ["window", "(1, 2, 3)", "pair"]),
    "window negative": ("forward", dict(window=(-1, 0)), ["window", "-1", ">= 0"]),
    "window of floats": ("forward", dict(window=(1.0, 0)), ["window", "1.0", "int"]),
    "window of bools": ("forward", dict(window=(True, 0)), ["window", "True", "int"]),
    "window a string": ("forward", dict(window="ab"), ["window", "ab"]),
    "q_offset a float": ("forward", dict(q_offset=1.0), ["q_offset", "1.0", "int"]),
    "q_offset a bool": ("forward", dict(q_offset=True), ["q_offset", "True", "int"]),
    "q_offset of floats": ("forward", dict(q_offset=np.zeros(B)), ["q_offset", "float64", "integers"]),
    "q_offset of other length": ("forward", dict(q_offset=[1, 2, 3]), ["q_offset", "(3,)", "(2,)"]),
    "q_offset with two axes": ("forward", dict(q_offset=np.zeros((B, 1), int)), ["q_offset", "(2, 1)"]),
    "q_offset a string": ("forward", dict(q_offset="lower"), ["q_offset"]),
    "q_offset enormous": ("forward", dict(q_offset=2**80), ["q_offset"]),
    "q_offset enormous, in an array": ("forward", dict(q_offset=[2**62, 0], causal=True), ["q_offset"]),
    "q_offset unsigned and enormous": (
        "forward",
        dict(q_offset=np.array([2**64 - 1, 0], np.uint64)),
        ["q_offset"],
    ),
    # lengths
    "q_lengths of floats": ("forward", dict(q_lengths=[1.0, 2.0]), ["q_lengths", "float64", "integers"]),
    "q_lengths too long": ("forward", dict(q_lengths=[1, TQ + 1]), ["q_lengths", "6", "5"]),
    "kv_lengths too long": ("forward", dict(kv_lengths=[TK + 1, 0]), ["kv_lengths", "8", "7"]),
    "kv_lengths negative": ("forward", dict(kv_lengths=np.array([-1, 2])), ["kv_lengths", "-1", "0"]),
    "kv_lengths of other length": ("forward", dict(kv_lengths=[1]), ["kv_lengths", "(1,)", "(2,)"]),
    "q_lengths an int": ("forward", dict(q_lengths=3), ["q_lengths"]),
    "q_lengths with two axes": ("forward", dict(q_lengths=[[1, 2]]), ["q_lengths", "(1, 2)"]),
    "q_lengths ragged": ("forward", dict(q_lengths=[[1], [1, 2]]), ["q_lengths"]),
    "q_lengths of bools": ("forward", dict(q_lengths=[True, False]), ["q_lengths", "bool"]),
    "kv_lengths unsigned and enormous": (
        "forward",
        dict(kv_lengths=np.array([2**63, 1], np.uint64)),
        ["kv_lengths"],
    ),
    # bias, alibi, softcap, sinks
    "bias float64 beside float32": ("forward", dict(bias=np.zeros(FULL)), ["bias", "float64", "float32"]),
    "bias float16 beside float32": (
        "forward",
        dict(bias=np.zeros(FULL, F16)),
        ["bias", "float16", "float32"],
    ),
    "bias of bools": ("forward", dict(bias=np.zeros(FULL, bool)), ["bias", "bool", "float32"]),
    "bias of other shape": ("forward", dict(bias=arr(TQ, TK + 1)), ["bias", "(5, 8)", "(2, 4, 5, 7)"]),
    "bias with five axes": ("forward", dict(bias=arr(1, *FULL)), ["bias", "(2, 4, 5, 7)"]),
    "bias a number": ("forward", dict(bias=1.0), ["bias"]),
    "bias a mask": ("forward", dict(bias=M.Causal()), ["bias"]),
    "alibi of ints": ("forward", dict(alibi_slopes=np.ones(HQ, int)), ["alibi_slopes", "int64", "float"]),
    "alibi of key heads": ("forward", dict(alibi_slopes=arr(HKV)), ["alibi_slopes", "(2,)", "(4,)"]),
    "alibi transposed": ("forward", dict(alibi_slopes=arr(HQ, B)), ["alibi_slopes", "(4, 2)", "(2, 4)"]),
    "alibi ragged": ("forward", dict(alibi_slopes=[[1.0], [1.0, 2.0]]), ["alibi_slopes"]),
    "alibi a number": ("forward", dict(alibi_slopes=0.5), ["alibi_slopes"]),
    "softcap 0": ("forward", dict(softcap=0), ["softcap", "0", "> 0"]),
    "softcap negative": ("forward", dict(softcap=-2.0), ["softcap", "-2.0", "> 0"]),
    "softcap NaN": ("forward", dict(softcap=math.nan), ["softcap", "nan"]),
    "softcap a string": ("forward", dict(softcap="30"), ["softcap", "30"]),
    "softcap beyond floats": ("forward", dict(softcap=10**400), ["softcap"]),
    "sinks of key heads": ("forward", dict(sinks=arr(HKV)), ["sinks", "(2,)", "(4,)"]),
    "sinks with two axes": ("forward", dict(sinks=arr(B, HQ)), ["sinks", "(2, 4)"]),
    "sinks float64 beside float32": ("forward", dict(sinks=np.zeros(HQ)), ["sinks", "float64", "float32"]),
    "sinks a number": ("forward", dict(sinks=0.0), ["sinks"]),
    # numbers and choices
    "dropout 1": ("forward", dict(dropout=1.0), ["dropout", "1.0", "< 1"]),
    "dropout negative": ("forward", dict(dropout=-0.1), ["dropout", "-0.1", "0 <="]),
    "dropout NaN": ("forward", dict(dropout=math.nan), ["dropout", "nan"]),
    "dropout None": ("forward", dict(dropout=None), ["dropout", "None"]),
    "dropout True": ("forward", dict(dropout=True), ["dropout", "True"]),
    "seed negative": ("forward", dict(seed=-1), ["seed", "-1", "2**64"]),
    "seed 2**64": ("forward", dict(seed=2**64), ["seed", "2**64"]),
    "seed a float": ("forward", dict(seed=1.0), ["seed", "1.0", "int"]),
    "seed None": ("forward", dict(seed=None), ["seed", "None"]),
    "seed a bool": ("forward", dict(seed=True), ["seed", "True"]),
    "scale NaN": ("forward", dict(scale=math.nan), ["scale", "nan"]),
    "scale infinite": ("forward", dict(scale=math.inf), ["scale", "inf"]),
    "scale a string": ("forward", dict(scale="auto"), ["scale", "auto"]),
    "scale an array": ("forward", dict(scale=arr(HQ)), ["scale"]),
    "scale beyond floats": ("forward", dict(scale=10**400), ["scale"]),
    "algorithm unknown": ("forward", dict(algorithm="fa3"), ["algorithm", "fa3", "fa2"]),
    "algorithm None": ("forward", dict(algorithm=None), ["algorithm", "None"]),
    "backend unknown": ("forward", dict(backend="cuda"), ["backend", "cuda", "numba_cuda"]),
    "backend a list": ("forward", dict(backend=["numba_cpu"]), ["backend", "numba_cpu"]),
    "deterministic an int": ("forward", dict(deterministic=1), ["deterministic", "1", "True or False"]),
    "return_lse a string": ("forward", dict(return_lse="yes"), ["return_lse", "yes", "True or False"]),
    "sram 0": ("forward", dict(sram=0), ["sram", "0", "positive"]),
    "sram a float": ("forward", dict(sram=1e5), ["sram", "100000.0", "int"]),
    "sram a bool": ("forward", dict(sram=True), ["sram", "True"]),
    # out
    "out of other shape": (
        "forward",
        dict(out=np.full((B, HQ, TQ, DV + 1), 7.0, np.float32)),
        ["out", "(2, 4, 5, 6)"],
    ),
    "out in other layout": (
        "forward",
        dict(out=np.full((B, TQ, HQ, DV), 7.0, np.float32)),
        ["out", "(2, 4, 5, 6)"],
    ),
    "out of other dtype": ("forward", dict(out=np.full((B, HQ, TQ, DV), 7.0)), ["out", "float64", "float32"]),
    "out read-only": (
        "forward",
        dict(out=frozen(np.full((B, HQ, TQ, DV), 7.0, np.float32))),
        ["out", "read-only"],
    ),
    "out whose rows overlap": (
        "forward",
        dict(out=np.lib.stride_tricks.as_strided(
            np.full(B * HQ * TQ * DV, 7.0, np.float32), (B, HQ, TQ, DV), [4 * n for n in (HQ * TQ * DV, TQ * DV, 1, 1)]
        )),
        ["out has strides", "its own memory"],
    ),
    "out a list": ("forward", dict(out=[0.0]), ["out", "list"]),
    # names
    "unknown option": ("forward", dict(casual=True), ["casual", "causal", "did you mean"]),
    "unknown option, torch's": ("forward", dict(is_causal=True), ["is_causal", "causal", "did you mean"]),
    "unknown option, nothing like it": ("forward", dict(zzz=1), ["zzz", "causal", "layout"]),
    "forward takes no wrt": ("forward", dict(wrt=("q",)), ["wrt"]),
    "forward takes no dout": ("forward", dict(dout=arr(B, HQ, TQ, DV)), ["dout"]),
    "forward takes no lse": ("forward", dict(lse=arr(B, HQ, TQ)), ["lse"]),
    "forward takes no dlse": ("forward", dict(dlse=arr(B, HQ, TQ)), ["dlse"]),
    "forward takes no direction": ("forward", dict(direction="backward"), ["direction"]),
    "forward takes no cu_seqlens": (
        "forward",
        dict(
            q=arr(HQ, TQ, D),
            k=arr(HKV, TK, D),
            v=arr(HKV, TK, DV),
            out=None,
            cu_seqlens_q=[0, TQ],
            cu_seqlens_k=[0, TK],
        ),
        ["cu_seqlens"],
    ),
    "vjp takes no dlse": ("vjp", dict(dlse=arr(B, HQ, TQ)), ["dlse"]),
    # devices
    **{
        f"{name} on another device": ("forward", {name: OnGpu(2, 2)}, [name, "GPU", "CPU", "device"])
        for name in (
            "k",
            "v",
            "mask",
            "bias",
            "sinks",
            "alibi_slopes",
            "q_lengths",
            "kv_lengths",
            "q_offset",
            "out",
        )
    },
    "q alone on the device": ("forward", dict(q=OnGpu(B, HQ, TQ, D)), ["GPU", "CPU", "device"]),
    **{
        f"backward: {name} on another device": (
            "backward",
            {name: OnGpu(2, 2)},
            [name, "GPU", "CPU", "device"],
        )
        for name in ("dout", "o", "lse", "dlse")
    },
    **{
        f"varlen: {name} on another device": (
            "varlen",
            {name: OnGpu(3, typestr="<i4")},
            [name, "GPU", "CPU", "device"],
        )
        for name in ("cu_seqlens_q", "cu_seqlens_k")
    },
    # backward
    "backward takes no out": ("backward", dict(out=np.zeros((B, HQ, TQ, DV), np.float32)), ["out"]),
    "dout of other shape": (
        "backward",
        dict(dout=arr(B, HQ, TQ, D)),
        ["dout", "(2, 4, 5, 8)", "(2, 4, 5, 6)"],
    ),
    "dout of other dtype": (
        "backward",
        dict(dout=arr(B, HQ, TQ, DV, dtype=F64)),
        ["dout", "float64", "float32"],
    ),
    "dout None": ("backward", dict(dout=None), ["dout"]),
    "o of other shape": ("backward", dict(o=arr(B, HQ, TQ + 1, DV)), ["o", "(2, 4, 6, 6)", "(2, 4, 5, 6)"]),
    "o of other dtype": ("backward", dict(o=arr(B, HQ, TQ, DV, dtype=F16)), ["o", "float16", "float32"]),
    "o None": ("backward", dict(o=None), ["o"]),
    "lse of other shape": ("backward", dict(lse=arr(B, HQ, TQ, 1)), ["lse", "(2, 4, 5, 1)", "(2, 4, 5)"]),
    "lse float64 beside float32": (
        "backward",
        dict(lse=arr(B, HQ, TQ, dtype=F64)),
        ["lse", "float64", "float32"],
    ),
    "lse None": ("backward", dict(lse=None), ["lse"]),
    "dlse of other shape": ("backward", dict(dlse=arr(HQ, TQ)), ["dlse", "(4, 5)", "(2, 4, 5)"]),
    "dlse of other dtype": ("backward", dict(dlse=arr(B, HQ, TQ, dtype=F16)), ["dlse", "float16", "float32"]),
    "wrt a string": ("backward", dict(wrt="q"), ["wrt", "'q'", "sequence"]),
    "wrt a set": ("backward", dict(wrt={"q"}), ["wrt", "sequence"]),
    "wrt unknown": ("backward", dict(wrt=("q", "dk")), ["wrt", "dk", "'k'"]),
    "wrt twice": ("backward", dict(wrt=("q", "q")), ["wrt", "once"]),
    "wrt arrays": ("backward", dict(wrt=[arr(2)]), ["wrt"]),
    "wrt bias without bias": ("backward", dict(wrt=("bias",)), ["wrt", "bias"]),
    "wrt sinks without sinks": ("backward", dict(wrt=("sinks",)), ["wrt", "sinks"]),
    "vjp: wrt unknown": ("vjp", dict(wrt=("mask",)), ["wrt", "mask"]),
    # varlen
    "cu_seqlens_q None": ("varlen", dict(cu_seqlens_q=None), ["cu_seqlens_q"]),
    "cu_seqlens_k None": ("varlen", dict(cu_seqlens_k=None), ["cu_seqlens_k"]),
    "cu_seqlens both None": ("varlen", dict(cu_seqlens_q=None, cu_seqlens_k=None), ["cu_seqlens"]),
    "cu_seqlens falls": (
        "varlen",
        dict(cu_seqlens_q=[0, 5, 4]),
        ["cu_seqlens_q", "[0, 5, 4]", "never falls"],
    ),
    "cu_seqlens out of range": ("varlen", dict(cu_seqlens_k=[0, 5, 12]), ["cu_seqlens_k", "12", "11"]),
    "cu_seqlens negative": ("varlen", dict(cu_seqlens_k=[-1, 5, 11]), ["cu_seqlens_k", "-1", "0"]),
    "cu_seqlens of floats": (
        "varlen",
        dict(cu_seqlens_q=np.array([0.0, 4.0, 9.0])),
        ["cu_seqlens_q", "float64"],
    ),
    "cu_seqlens empty": ("varlen", dict(cu_seqlens_q=np.zeros(0, int)), ["cu_seqlens_q", "(0,)", "(B + 1,)"]),
    "cu_seqlens of an empty list": ("varlen", dict(cu_seqlens_q=[]), ["cu_seqlens_q", "(0,)", "(B + 1,)"]),
    "cu_seqlens with two axes": ("varlen", dict(cu_seqlens_q=[[0, 4, 9]]), ["cu_seqlens_q", "(1, 3)"]),
    "cu_seqlens ragged": ("varlen", dict(cu_seqlens_q=[[0], [4, 9]]), ["cu_seqlens_q"]),
    "cu_seqlens of other batch": ("varlen", dict(cu_seqlens_k=[0, 11]), ["cu_seqlens_k", "(2,)", "(3,)"]),
    "cu_seqlens a number": ("varlen", dict(cu_seqlens_q=9), ["cu_seqlens_q"]),
    "cu_seqlens unsigned and enormous": (
        "varlen",
        dict(cu_seqlens_q=np.array([0, 4, 2**64 - 1], np.uint64)),
        ["cu_seqlens_q"],
    ),
    "varlen with a batch axis": ("varlen", dict(q=arr(1, HQ, 9, D)), ["q", "(1, 4, 9, 8)", "total_q"]),
    "varlen, two axes": (
        "varlen",
        dict(q=arr(9, D), k=arr(11, D), v=arr(11, DV)),
        ["q", "(9, 8)", "total_q"],
    ),
    "varlen takes no mask": ("varlen", dict(mask=np.ones((9, 11), bool)), ["mask", "cu_seqlens"]),
    "varlen takes no mask object": ("varlen", dict(mask=M.Causal()), ["mask", "cu_seqlens"]),
    "varlen takes no bias": ("varlen", dict(bias=arr(9, 11)), ["bias", "cu_seqlens"]),
    "varlen takes no q_lengths": ("varlen", dict(q_lengths=[4, 5]), ["q_lengths", "cu_seqlens"]),
    "varlen takes no kv_lengths": ("varlen", dict(kv_lengths=[4, 5]), ["kv_lengths", "cu_seqlens"]),
    "varlen: alibi of other batch": (
        "varlen",
        dict(alibi_slopes=arr(3, HQ)),
        ["alibi_slopes", "(3, 4)", "(2, 4)"],
    ),
    "varlen: q_offset of other batch": ("varlen", dict(q_offset=[0, 1, 2]), ["q_offset", "(3,)", "(2,)"]),
    "varlen: out of other shape": (
        "varlen",
        dict(out=np.full((9, HQ, DV), 7.0, np.float32)),
        ["out", "(4, 9, 6)"],
    ),
    "varlen backward takes no bias": ("varlen_backward", dict(bias=arr(9, 11), wrt=("bias",)), ["bias"]),
    "varlen backward: lse of other shape": ("varlen_backward", dict(lse=arr(2, HQ, 9)), ["lse", "(4, 9)"]),
    "varlen backward: cu_seqlens fall": (
        "varlen_backward",
        dict(cu_seqlens_k=[3, 2, 1]),
        ["cu_seqlens_k", "falls"],
    ),
    # merging
    "merge nothing": ("merge", dict(outs=[], lses=[]), ["outs", "0"]),
    "merge other counts": ("merge", dict(lses=[arr(2, 3)]), ["lses", "1", "2"]),
    "merge other shapes": ("merge", dict(outs=[arr(2, 3, 4), arr(2, 3, 5)]), ["outs", "(2, 3, 5)"]),
    "merge other dtypes": ("merge", dict(outs=[arr(2, 3, 4), arr(2, 3, 4, dtype=F64)]), ["outs", "float64"]),
    "merge lse of other shape": ("merge", dict(lses=[arr(2, 3), arr(2, 4)]), ["lses", "(2, 4)"]),
    "merge integers": ("merge", dict(outs=[np.ones((2, 3, 4), int)] * 2), ["outs", "int64"]),
    "merge integer lse": ("merge", dict(lses=[np.ones((2, 3), int)] * 2), ["lses", "int64"]),
    "merge None": ("merge", dict(outs=None, lses=None), ["outs"]),
    "merge numbers": ("merge", dict(outs=[1.0, 2.0]), ["outs"]),
    # dropout_mask
    "dropout_mask: p": ("dropout_mask", dict(p=1.5), ["p is 1.5", "< 1"]),
    "dropout_mask: seed": ("dropout_mask", dict(seed=2**64), ["seed", "2**64"]),
    "dropout_mask: three sizes": ("dropout_mask", dict(shape=(1, 2, 3)), ["shape", "(1, 2, 3)"]),
    "dropout_mask: negative size": ("dropout_mask", dict(shape=(1, 2, -3, 4)), ["shape", "-3"]),
    "dropout_mask: float size": ("dropout_mask", dict(shape=(1, 2, 3.0, 4)), ["shape", "3.0"]),
    "dropout_mask: one number": ("dropout_mask", dict(shape=4), ["shape", "4"]),
    "dropout_mask: an array without axes": ("dropout_mask", dict(shape=np.array(3)), ["shape", "four ints"]),
    "dropout_mask: more than memory has": ("dropout_mask", dict(shape=(1, 1, 1, 2**70)), ["shape", "2**61"]),
    "merge arrays without axes": (
        "merge",
        dict(outs=[np.array(1, np.float32)] * 2, lses=[np.array(1, np.float32)] * 2),
        ["outs", "()"],
    ),
}
if torch is not None:
    BAD |= {
        "torch q requires grad": (
            "forward",
            dict(q=torch.zeros(B, HQ, TQ, D, requires_grad=True), out=None),
            ["q", "grad", "detach"],
        ),
        "torch v requires grad": (
            "forward",
            dict(v=torch.zeros(B, HKV, TK, DV, requires_grad=True)),
            ["v", "grad"],
        ),
        "torch tensor of eight bits": (
            "forward",
            dict(q=torch.zeros(B, HQ, TQ, D).to(torch.float8_e4m3fn), out=None),
            ["q is a Tensor", "NumPy"],
        ),
        "torch tensor that is a lazy negative": (
            "forward",
            dict(q=torch.zeros(B, HQ, TQ, D, dtype=torch.complex64).conj().imag, out=None),
            ["q is a Tensor", "NumPy"],
        ),
        "out that repeats its elements": (
            "forward",
            dict(
                q=torch.zeros(2, 4, 8), k=torch.zeros(2, 4, 8), v=torch.zeros(2, 4, 8),
                out=torch.zeros(1).expand(2, 4, 8),
            ),
            ["out has strides (0, 0, 0)"],
        ),
        "torch tensor without memory": (
            "forward",
            dict(q=torch.empty(B, HQ, TQ, D, device="meta"), out=None),
            ["q"],
        ),
        "sparse torch tensor": (
            "forward",
            dict(q=torch.eye(4).to_sparse(), k=arr(4, 4), v=arr(4, 4), out=None),
            ["q"],
        ),
        "dout requires grad": (
            "backward",
            dict(dout=torch.zeros(B, HQ, TQ, DV, requires_grad=True)),
            ["dout", "grad"],
        ),
        "out of another kind": ("forward", dict(out=torch.zeros(B, HQ, TQ, DV)), ["out", "Tensor"]),
    }


def everything(call):
    """Bytes of all host arrays of a call, by name."""
    found = {}
    for name, value in call.items():
        for n, item in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            if isinstance(item, np.ndarray):
                found[name, n] = item.tobytes()
            elif torch is not None and (
                isinstance(item, torch.Tensor) and item.device.type == "cpu" and item.layout == torch.strided
            ):
                bits = item.detach().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
                found[name, n] = bits.numpy().tobytes()
    return found


@pytest.mark.parametrize("rule", BAD)
def test_bad_call(rule, no_gpu):
    function, replaced, words = BAD[rule]
    function, good = FUNCTIONS[function]
    call = good() | replaced
    before = everything(call)
    with pytest.raises(rf.ProblemError) as caught:
        function(**call)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, rf.RawflashError)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    # The rule, in the contract's words; three messages say it otherwise.
    assert any(rule in message for rule in ("expected", "did you mean", "so pass")), message
    assert everything(call) == before, "an argument changed"


def test_the_bad_calls_are_bad_for_their_reason():
    """Without the replacement every call of the table is good, so it is the replacement that is refused."""
    for name, (function, good) in FUNCTIONS.items():
        call = good()
        out = call.get("out")
        function(**call)
        assert out is None or not (out == 7.0).any(), f"{name} wrote nothing, so it could not be seen to"
    assert len(BAD) > 45


@pytest.mark.parametrize(
    "replaced",
    [
        dict(q_lengths=[1, 2, 3]),
        dict(softcap=-1),
        dict(algorithm="fa9"),
        dict(bias=np.zeros((2, 2), np.float32)),
        dict(backend="cupy_raw"),
        dict(backend="numba_cpu", algorithm="rowwise"),
        dict(sram=1),
    ],
    ids=str,
)
def test_errors_leave_out_alone(replaced):
    """Whatever refuses a call, validator, look-up or plan of tiles: ``out`` is as it was."""
    call = good_forward()
    with pytest.raises(rf.RawflashError):
        rf.attention(**call | replaced)
    assert (call["out"] == 7.0).all()


@pytest.mark.parametrize("method", ["visible", "tile"])
def test_a_mask_of_the_users_that_raises_leaves_out_alone(method):
    class Raises(M.Mask):
        def visible(self, b, h, i, j, q_offset):
            return np.broadcast_to(True, np.broadcast_shapes(np.shape(i), np.shape(j)))

        def boom(self, *where):
            raise ZeroDivisionError

    setattr(Raises, method, Raises.boom)
    call = good_forward()
    with pytest.raises(ZeroDivisionError):
        rf.attention(**call | dict(mask=Raises(), backend="numpy_tiled"))
    assert (call["out"] == 7.0).all()


def test_a_mask_of_the_users_needs_no_tile_classes():
    class Odd(M.Mask):
        def visible(self, b, h, i, j, q_offset):
            return np.broadcast_arrays((i + j) % 2 == 1, b + h)[0]

    call = good_forward()
    odd = (np.arange(TQ)[:, None] + np.arange(TK)) % 2 == 1
    expected = rf.attention(**call | dict(mask=odd, out=None))
    np.testing.assert_allclose(rf.attention(**call | dict(mask=Odd(), backend="numpy_tiled")), expected, atol=1e-6)


@pytest.mark.parametrize("which", ["q", "k", "v", "sinks"])
def test_a_pullback_needs_its_inputs(which):
    x = {"q": arr(2, 4, 4), "k": arr(2, 4, 4), "v": arr(2, 4, 4), "sinks": arr(2)}
    home = x[which] if which != "sinks" else np.zeros((2, 4, 4), np.float32)
    if which == "sinks":
        x["sinks"] = home.reshape(-1)[:2]
    with pytest.raises(rf.ProblemError, match="out overlaps an input"):
        rf.attention_vjp(x["q"], x["k"], x["v"], sinks=x["sinks"], out=home)


@pytest.mark.parametrize("original", [
    np.asfortranarray, lambda a: a.astype(">f4"), lambda a: a.repeat(2, -1)[..., ::2],
])  # fmt: skip
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_a_pullback_needs_what_was_copied_for_the_kernel(which, original):
    x = {name: arr(2, 4, 4) for name in "qkv"}
    x[which] = original(arr(2, 4, 4))
    out = x[which] if x[which].dtype.isnative else x[which].view(np.float32)
    with pytest.raises(rf.ProblemError, match="out overlaps an input"):
        rf.attention_vjp(**x, out=out)
    rf.attention_vjp(**x, out=arr(2, 4, 4))


@pytest.mark.parametrize("options", [
    dict(mask=M.Dense(np.ones((4, 4), bool))), dict(mask=np.ones((4, 4), bool)), dict(alibi_slopes=[0.5, 1.0]),
    dict(kv_lengths=[3, 4]), dict(scale=np.float32(0.5), window=(1, None), bias=np.float32(0.5).reshape(())),
])  # fmt: skip
def test_a_pullback_takes_an_out_of_its_own(options):
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 2, 4, 4)).astype(np.float32)
    out, pullback = rf.attention_vjp(q, k, v, out=np.zeros_like(q), **options)
    for a, b in zip(pullback(dout), rf.attention_vjp(q, k, v, **options)[1](dout), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_pullback_needs_its_slopes():
    home = np.zeros((2, 4, 4), np.float32)
    with pytest.raises(rf.ProblemError, match="out overlaps an input"):
        rf.attention_vjp(*(arr(2, 4, 4) for _ in "qkv"), alibi_slopes=home.reshape(-1)[:2], out=home)


# ---- backends -----------------------------------------------------------------------------------------

GPU_CALL = dict(q=OnGpu(B, HQ, TQ, D), k=OnGpu(B, HKV, TK, D), v=OnGpu(B, HKV, TK, DV))


@pytest.mark.parametrize(
    "replaced, words",
    [
        (dict(backend="cupy_raw"), ["cupy_raw", "q", "CPU"]),
        (dict(backend="numba_cuda"), ["numba_cuda", "q", "CPU"]),
        (dict(backend="numba_cpu", algorithm="standard"), ["numba_cpu", "standard", "numpy_tiled"]),
        (dict(backend="numba_cpu", algorithm="rowwise"), ["numba_cpu", "rowwise", "numpy_tiled"]),
        (dict(**GPU_CALL, backend="numpy_tiled", out=None), ["numpy_tiled", "CPU", "GPU"]),
        (dict(**GPU_CALL, backend="numba_cpu", out=None), ["numba_cpu", "CPU", "GPU"]),
    ],
    ids=lambda x: str({n: v for n, v in x.items() if isinstance(v, str)}) if isinstance(x, dict) else "",
)
def test_backend_that_cannot(replaced, words, no_gpu):
    """A backend that cannot take these arrays, or has no such algorithm: BackendError says who has it."""
    call = good_forward() | replaced
    with pytest.raises(rf.BackendError) as caught:
        rf.attention(**call)
    message = str(caught.value)
    assert not isinstance(caught.value, rf.ProblemError)
    for word in words:
        assert word in message, message
    assert call["out"] is None or (call["out"] == 7.0).all()


@pytest.mark.parametrize("backend", ["numpy_tiled", "numba_cpu"])
def test_cpu_backend_on_gpu_arrays_is_not_sent_to_pip(backend):
    """Installing something does not help a CPU backend to take GPU arrays; the message must not say so."""
    with pytest.raises(rf.BackendError) as caught:
        rf.attention(**GPU_CALL, backend=backend)
    assert "pip install" not in str(caught.value)


def test_dropout_mask_like_a_gpu_array():
    """``like`` asks for its kind and device: where there is no GPU library, that is a BackendError."""
    with pytest.raises(rf.BackendError):
        rf.dropout_mask(0.5, 1, (1, 1, 1, 4), like=OnGpu(2, 2))


def test_gpu_arrays_in_other_functions():
    gpu = OnGpu(B, HQ, TQ, DV)
    with pytest.raises(rf.BackendError):
        rf.attention_backward(gpu, *GPU_CALL.values(), gpu, OnGpu(B, HQ, TQ))
    with pytest.raises(rf.BackendError):
        rf.merge_attention([gpu, gpu], [OnGpu(B, HQ, TQ)] * 2)
    with pytest.raises(rf.BackendError):
        rf.attention_varlen(OnGpu(4, 9, 8), OnGpu(2, 9, 8), OnGpu(2, 9, 8), [0, 9], [0, 9])


def test_error_classes():
    assert issubclass(rf.ProblemError, rf.RawflashError) and issubclass(rf.ProblemError, ValueError)
    for error in (rf.TileError, rf.BackendError):
        assert issubclass(error, rf.RawflashError) and not issubclass(error, ValueError)
    error = rf.TileError("too small", needed=100, available=10)
    assert (error.needed, error.available, str(error)) == (100, 10, "too small")


def test_tile_error_carries_the_numbers():
    with pytest.raises(rf.TileError) as caught:
        rf.attention(**good_forward() | dict(sram=1))
    assert caught.value.available == 1 < caught.value.needed
    assert str(caught.value.needed) in str(caught.value)


# ---- the record ---------------------------------------------------------------------------------------


def of(q=(B, HQ, TQ, D), k=(B, HKV, TK, D), v=(B, HKV, TK, DV), dtype=np.float32, **options):
    """`check` on arrays of these shapes."""
    return check(*(arr(*shape, dtype=dtype) for shape in (q, k, v)), **options)


def test_every_default():
    problem, x = of()
    assert problem == Problem(
        B=2,
        Hq=4,
        Hkv=2,
        Tq=5,
        Tk=7,
        d=8,
        dv=6,
        dtype="float32",
        scale=1 / math.sqrt(8),
        causal=False,
        window=None,
        mask=None,
        ragged=False,
        varlen=False,
        bias=None,
        alibi=False,
        softcap=None,
        sinks=False,
        dropout=0.0,
        seed=0,
        layout="bhtd",
        algorithm="fa2",
        backend=problem.backend,
        deterministic=False,
        sram=None,
    )
    assert problem.backend in ("numba_cpu", "numpy_tiled"), "None picks by the arrays: these are CPU arrays"
    assert (x.out, x.return_lse, x.wrt, x.copied, x.packed, x.kind) == (
        None,
        False,
        ("q", "k", "v"),
        [],
        False,
        "numpy",
    )
    assert (x.bias, x.alibi_slopes, x.sinks, x.dout, x.o, x.lse, x.dlse) == (None,) * 7
    v = x.visibility
    assert (v.q_offset.tolist(), v.q_lengths.tolist(), v.kv_lengths.tolist()) == ([2, 2], [5, 5], [7, 7])
    assert v.mask is None and v.predicate() is None


@pytest.mark.parametrize(
    "option, value",
    [
        ("mask", None),
        ("causal", False),
        ("window", None),
        ("q_offset", None),
        ("q_lengths", None),
        ("kv_lengths", None),
        ("bias", None),
        ("alibi_slopes", None),
        ("softcap", None),
        ("sinks", None),
        ("dropout", 0.0),
        ("seed", 0),
        ("scale", None),
        ("layout", "bhtd"),
        ("algorithm", "fa2"),
        ("backend", None),
        ("deterministic", False),
        ("out", None),
        ("return_lse", False),
        ("sram", None),
    ],
)
def test_a_default_may_be_given(option, value):
    """Passing the default of the contract is the same call; and every option of the contract is an option."""
    assert of(**{option: value})[0] == of()[0]
    assert option in rf.Options.__annotations__


def test_no_options_beyond_the_contract():
    assert len(rf.Options.__annotations__) == 20


def test_every_algorithm_has_a_backend():
    """With backend=None each of the four algorithms finds kernels for CPU arrays, forward and backward."""
    for algorithm in ("standard", "rowwise", "fa1", "fa2"):
        for direction in ("forward", "backward"):
            kernel, _ = lookup(of(algorithm=algorithm)[0], direction)
            assert callable(kernel)


def test_problem_is_frozen_and_hashable():
    problem = of(window=[2, None], bias=arr(TQ, TK), mask=M.Causal() | M.Prefix(2))[0]
    assert isinstance(hash(problem), int)
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.B = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        del problem.scale


def test_equal_calls_make_equal_problems():
    """Equal to other data, other strides and other spellings of a value; different for every other option."""

    def call(**options):
        return of(
            **dict(window=(2, 1), bias=arr(1, TK), sinks=arr(HQ), seed=3, dropout=0.5, scale=1.0) | options
        )[0]

    assert call() == call() and hash(call()) == hash(call())
    same = call(
        window=[np.int64(2), 1], bias=arr(1, TK) + 1, seed=np.uint64(3), scale=1, dropout=np.float64(0.5)
    )
    assert same == call() and hash(same) == hash(call())
    assert repr(same) == repr(call()), "a NumPy scalar does not stay in the record"
    others = [
        dict(window=(2, 2)),
        dict(bias=arr(TQ, 1)),
        dict(bias=None),
        dict(sinks=None),
        dict(seed=4),
        dict(causal=True),
        dict(dropout=0.25),
        dict(scale=2.0),
        dict(mask=M.Prefix(1)),
        dict(mask=np.ones((1, 1), bool)),
        dict(alibi_slopes=arr(HQ)),
        dict(softcap=1.0),
        dict(algorithm="fa1"),
        dict(deterministic=True),
        dict(sram=1 << 16),
        dict(kv_lengths=[1, 2]),
        dict(backend="numpy_tiled"),
        dict(q=(B, HQ, TQ + 1, D)),
        dict(v=(B, HKV, TK, DV + 1)),
        dict(k=(B, HQ, TK, D), v=(B, HQ, TK, DV)),
        dict(dtype=np.float64, bias=None, sinks=None),
    ]
    problems = [call(), *(call(**other) for other in others)]
    assert len({call(bias=None), *problems}) == len(problems), "some option is not in the record"
    # Lengths and offsets are data, as masks are: kernels do not depend on them.
    assert call(q_lengths=[1, 2]) == call(kv_lengths=[3, 0], q_offset=[4, -4])


def test_record_of_every_option():
    mask = M.Causal() & M.Segments(np.zeros(TQ, int), np.zeros(TK, int))
    problem, x = of(
        mask=mask,
        causal=True,
        window=(3, None),
        q_offset=-1,
        q_lengths=[0, 5],
        kv_lengths=np.array([7, 0]),
        bias=arr(HQ, 1, TK),
        alibi_slopes=[0.5, 0.25, 0.1, 0.0],
        softcap=30,
        sinks=arr(HQ),
        dropout=0.5,
        seed=2**64 - 1,
        scale=2,
        algorithm="fa1",
        backend="numpy_tiled",
        deterministic=True,
        return_lse=True,
        sram=1 << 17,
    )
    assert (problem.mask, problem.causal, problem.window) == ("(Causal & Segments)", True, (3, None))
    assert (problem.bias, problem.alibi, problem.softcap, problem.sinks) == ((1, 4, 1, 7), True, 30.0, True)
    assert (problem.dropout, problem.seed, problem.scale, problem.sram) == (0.5, 2**64 - 1, 2.0, 1 << 17)
    assert (problem.algorithm, problem.backend, problem.deterministic, problem.ragged) == (
        "fa1",
        "numpy_tiled",
        True,
        True,
    )
    assert (problem.band.lower, problem.band.upper) == (-3, 0)
    v = x.visibility
    assert (v.q_offset.tolist(), v.q_lengths.tolist(), v.kv_lengths.tolist()) == ([-1, -1], [0, 5], [7, 0])
    assert x.return_lse and x.alibi_slopes.dtype == np.float64
    np.testing.assert_array_equal(x.alibi_slopes, [[0.5, 0.25, 0.1, 0.0]] * 2)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [2, 2]),
        (dict(q_lengths=[5, 1]), [2, 6]),
        (dict(kv_lengths=[0, 3]), [-5, -2]),
        (dict(q_lengths=[3, 0], kv_lengths=[1, 7]), [-2, 7]),
        (dict(q_offset=0, kv_lengths=[0, 3]), [0, 0]),
        (dict(q_offset=-9), [-9, -9]),
        (dict(q_offset=[4, -4]), [4, -4]),
        (dict(q_offset=np.array([4, -4], np.int16)), [4, -4]),
        (dict(q_offset=np.int32(6)), [6, 6]),
        *([(dict(q_offset=torch.tensor([1, -1])), [1, -1])] if torch is not None else []),
    ],
    ids=str,
)
def test_alignment(options, expected):
    """None is kv_length - q_length of each batch entry; anything else is taken as it is."""
    offset = of(**options)[1].visibility.q_offset
    assert offset.dtype == np.int64 and offset.tolist() == expected


@pytest.mark.parametrize(
    "dims, layout",
    [
        (2, "bhtd"),
        (2, "bthd"),
        (3, "bhtd"),
        (3, "bthd"),
        (4, "bhtd"),
        (4, "bthd"),
        (5, "bhtd"),
        (5, "bthd"),
        (6, "bhtd"),
        (6, "bthd"),
    ],
)
def test_canonical_form(dims, layout):
    """``(B, H, T, width)``, with the numbers where the layout says, in the user's memory."""
    lead = {2: (), 3: (), 4: (2,), 5: (2, 3), 6: (2, 1, 3)}[dims]
    heads = {"q": 1 if dims == 2 else 4, "k": 1 if dims == 2 else 2, "v": 1 if dims == 2 else 2}
    rows, width = {"q": 5, "k": 7, "v": 7}, {"q": 8, "k": 8, "v": 6}
    users = {}
    for name in "qkv":
        tail = (rows[name], heads[name]) if layout == "bthd" else (heads[name], rows[name])
        users[name] = arr(*lead, *(tail if dims > 2 else (rows[name],)), width[name])
    problem, x = check(**users, layout=layout)
    batch = math.prod(lead)
    assert (problem.B, problem.Hq, problem.Hkv, problem.Tq, problem.Tk) == (
        batch,
        heads["q"],
        heads["k"],
        5,
        7,
    )
    assert problem.group == heads["q"] // heads["k"]
    for name, user in users.items():
        canonical = getattr(x, name)
        assert canonical.shape == (batch, heads[name], rows[name], width[name])
        assert np.shares_memory(canonical, user)
        for b, place in enumerate(np.ndindex(lead)):
            for h in range(heads[name]):
                want = (
                    user[place][:, h]
                    if layout == "bthd" and dims > 2
                    else user[place][h]
                    if dims > 2
                    else user
                )
                np.testing.assert_array_equal(canonical[b, h], want)
    assert x.copied == []
    out_tail = (5, heads["q"], 6) if layout == "bthd" else (heads["q"], 5, 6)
    assert x.user_shapes["out"] == ((*lead, *out_tail) if dims > 2 else (5, 6))
    assert x.user_shapes["lse"] == ((*lead, heads["q"], 5) if dims > 2 else (5,))


@pytest.mark.parametrize(
    "shapes",
    [
        ((0, HQ, TQ, D), (0, HKV, TK, D), (0, HKV, TK, DV)),
        ((2, 0, HQ, TQ, D), (2, 0, HKV, TK, D), (2, 0, HKV, TK, DV)),
        ((B, HQ, 0, D), (B, HKV, TK, D), (B, HKV, TK, DV)),
        ((B, HQ, TQ, D), (B, HKV, 0, D), (B, HKV, 0, DV)),
        ((0, D), (0, D), (0, DV)),
        ((1, 1, 1, 1),) * 3,
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(causal=True),
        dict(mask=np.ones((1, 1), bool)),
        dict(mask=M.Prefix(1)),
        dict(bias=np.zeros((1, 1, 1, 1), np.float32)),
        dict(window=(0, 0)),
    ],
    ids=str,
)
def test_empty_calls_are_legal(shapes, options, cpu_backend):
    """B = 0, Tq = 0 and Tk = 0: results of the right shape, no key seen, no gradient."""
    q, k, v = (arr(*shape) for shape in shapes)
    if q.size and k.size:
        return
    out, lse = rf.attention(q, k, v, return_lse=True, backend=cpu_backend, **options)
    assert out.shape == (*q.shape[:-1], v.shape[-1]) and not out.any()
    assert lse.shape == q.shape[:-1] and np.isneginf(lse).all() and lse.dtype == np.float32
    grads = rf.attention_backward(np.ones_like(out), q, k, v, out, lse, backend=cpu_backend, **options)
    for grad, argument in zip(grads, (q, k, v), strict=True):
        assert grad.shape == argument.shape and not grad.any()


@pytest.mark.parametrize(
    "shape",
    [
        (),
        (1,),
        (TK,),
        (TQ, 1),
        (TQ, TK),
        (1, TQ, TK),
        (HQ, 1, TK),
        (HQ, 1, 1),
        (B, 1, 1, TK),
        (B, HQ, 1, 1),
        (1, HQ, TQ, TK),
        FULL,
        (1, 1, 1, 1),
    ],
    ids=str,
)
def test_broadcasting_of_mask_and_bias(shape):
    problem, x = of(mask=np.ones(shape, bool), bias=arr(*shape))
    want = (1,) * (4 - len(shape)) + shape
    assert problem.bias == x.bias.shape == want
    assert x.user_shapes["bias"] == shape
    assert problem.mask == "Dense" and x.visibility.mask.array.shape == want


def test_bias_and_sinks_may_be_float32_beside_anything():
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        _, x = of(dtype=dtype, bias=arr(TQ, TK), sinks=arr(HQ))
        assert x.bias.dtype == x.sinks.dtype == np.float32
        of(dtype=dtype, bias=arr(TQ, TK, dtype=dtype), sinks=arr(HQ, dtype=dtype))


@pytest.mark.parametrize(
    "slopes",
    [
        arr(HQ),
        arr(B, HQ),
        arr(HQ, dtype=np.float64),
        arr(HQ, dtype=np.float16),
        arr(HQ).astype(ml_dtypes.bfloat16),
        [0.5, 0.25, 0.125, 0.0],
        arr(B, 2 * HQ)[:, ::2],
        *([torch.ones(HQ)] if torch is not None else []),
    ],
    ids=lambda s: f"{type(s).__name__} {np.shape(s)}",
)
def test_alibi_slopes_as_float_of_any_kind(slopes):
    _, x = of(alibi_slopes=slopes)
    assert x.alibi_slopes.shape == (B, HQ)
    np.testing.assert_array_equal(x.alibi_slopes, np.broadcast_to(np.asarray(slopes, np.float64), (B, HQ)))


def test_lengths_of_any_integer_kind():
    for kind in (list, tuple, np.int8, np.int32, np.uint16, np.int64, np.uint64):
        lengths = kind([3, 0]) if kind in (list, tuple) else np.array([3, 0], kind)
        v = of(q_lengths=lengths, kv_lengths=lengths)[1].visibility
        assert v.q_lengths.tolist() == v.kv_lengths.tolist() == [3, 0] and v.q_lengths.dtype == np.int64
        assert v.q_offset.tolist() == [0, 0]
    if torch is not None:
        assert of(q_lengths=torch.tensor([3, 0]))[1].visibility.q_lengths.tolist() == [3, 0]
    empty = of((0, HQ, TQ, D), (0, HKV, TK, D), (0, HKV, TK, DV), q_lengths=[], kv_lengths=np.zeros(0, int))
    assert empty[1].visibility.q_lengths.shape == (0,)


def test_compute_dtype():
    assert [
        of(dtype=t)[0].compute_dtype for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
    ] == ["float32", "float32", "float32", "float64"]


def test_gradients_take_their_place():
    call = good_backward()
    dlse = arr(B, HQ, TQ)
    problem, x = check(**call, dlse=dlse, wrt=["v", "q"], direction="backward")
    assert x.wrt == ("v", "q") and problem == of(backend="numpy_tiled")[0]
    for name in ("dout", "o", "lse"):
        assert np.shares_memory(getattr(x, name), call[name])
    assert x.dlse.shape == x.lse.shape == (B, HQ, TQ)
    q = arr(TQ, D)
    _, x = check(q, q, q, dout=q, o=q, lse=arr(TQ), direction="backward")
    assert x.lse.shape == (1, 1, TQ) and x.dout.shape == (1, 1, TQ, D)


# ---- copies -------------------------------------------------------------------------------------------


def strided(view, shape=(B, HQ, TQ, D)):
    home = arr(*(3 * n for n in shape))
    big = home[tuple(slice(n) for n in shape)]
    return {
        "contiguous": lambda: arr(*shape),
        "sliced": lambda: home[1::3, ::3, 2::3, 4 : 4 + shape[-1]],
        "transposed": lambda: np.ascontiguousarray(big.transpose(2, 1, 0, 3)).transpose(2, 1, 0, 3),
        "reversed rows": lambda: big[:, :, ::-1],
        "broadcast batch": lambda: np.broadcast_to(big[:1], shape),
        "broadcast rows": lambda: np.broadcast_to(big[:, :, :1], shape),
        "offset": lambda: big,
        "read-only": lambda: frozen(big),
        "width 1": lambda: np.broadcast_to(home[:, :, :, ::7], home[:, :, :, ::7].shape)[:B, :HQ, :TQ, :1],
        # copied:
        "strided last": lambda: home[: shape[0], : shape[1], : shape[2], : 2 * shape[3] : 2],
        "reversed last": lambda: big[..., ::-1],
        "fortran": lambda: np.asfortranarray(big),
        "broadcast last": lambda: np.broadcast_to(big[..., :1], shape),
        "byte-swapped": lambda: big.astype(">f4"),
        "misaligned": lambda: (
            np.frombuffer(b"\0" + big.tobytes(), np.uint8)[1:].view(np.float32).reshape(shape)
        ),
        "record field": lambda: np.zeros(shape, np.dtype([("x", "f4"), ("y", "u1")]))["x"],
    }[view]()


VIEWS = (
    "contiguous",
    "sliced",
    "transposed",
    "reversed rows",
    "broadcast batch",
    "broadcast rows",
    "offset",
    "read-only",
    "width 1",
)
COPIES = (
    "strided last",
    "reversed last",
    "fortran",
    "broadcast last",
    "byte-swapped",
    "misaligned",
    "record field",
)


@pytest.mark.parametrize("view", VIEWS)
def test_no_copy_when_the_last_axis_is_contiguous(view):
    q = strided(view)
    k = arr(B, HKV, TK, q.shape[-1])
    _, x = check(q, k, k)
    assert np.shares_memory(x.q, q) and x.copied == []
    assert x.q.strides == q.strides
    np.testing.assert_array_equal(x.q, q)


@pytest.mark.parametrize("view", COPIES)
def test_one_copy_otherwise(view):
    """Only the array in question is copied, once, and the record names it once."""
    q = strided(view)
    k = arr(B, HKV, TK, q.shape[-1])
    _, x = check(q, k, k)
    assert not np.shares_memory(x.q, q) and x.copied == ["q"]
    assert x.q.flags.aligned and x.q.dtype == np.float32 and x.q.dtype.isnative and x.q.strides[-1] == 4
    np.testing.assert_array_equal(x.q, q)
    assert np.shares_memory(x.k, k) and np.shares_memory(x.v, k)


def test_one_copy_is_one_copy():
    """Checking a call allocates nothing of the size of q; with a strided last axis, that size once."""
    home = arr(1, 8, 512, 256)
    tight, wide = np.ascontiguousarray(home[..., ::2]), home[..., ::2]
    for q, copies in ((tight, 0), (wide, 1)):
        tracemalloc.start()
        kept = check(q, tight, tight)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert kept[1].copied == ["q"] * copies
        assert copies * q.nbytes <= peak < (copies + 0.5) * q.nbytes


@pytest.mark.parametrize("view", COPIES)
def test_copies_in_the_backward_pass_are_named(view):
    call = good_backward()
    call["dout"], call["v"] = strided(view, (B, HQ, TQ, DV)), strided(view, (B, HKV, TK, DV))
    _, x = check(**call, direction="backward")
    assert sorted(x.copied) == ["dout", "v"]


def test_five_axes_with_several_leading_strides():
    """Leading axes that no single stride describes are copied at most once, others not at all."""
    home = arr(3, 2, HQ, TQ, D)
    q = home.swapaxes(0, 1)
    k = arr(2, 3, HKV, TK, D)
    _, x = check(q, k, k)
    np.testing.assert_array_equal(x.q, q.reshape(6, HQ, TQ, D))
    assert x.copied in ([], ["q"]), "explain says so when it was copied"
    assert np.shares_memory(x.k, k)
    _, x = check(q[..., ::2], k[..., ::2], k)
    assert x.copied == ["q", "k"], "one copy serves both reasons"


# ---- varlen -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_varlen_canonical_form(layout):
    call = good_varlen() | dict(cu_seqlens_q=[1, 4, 4, 8], cu_seqlens_k=np.array([0, 5, 6, 11], np.int32))
    if layout == "bthd":
        call |= {name: np.ascontiguousarray(call[name].swapaxes(0, 1)) for name in ("q", "k", "v", "out")}
    problem, x = check(**call, layout=layout)
    assert (problem.varlen, problem.ragged, problem.layout) == (True, False, layout)
    assert (problem.B, problem.Hq, problem.Hkv, problem.Tq, problem.Tk) == (3, HQ, HKV, 4, 5), (
        "the longest of each"
    )
    assert (
        x.packed
        and x.q.shape == (1, HQ, 9, D)
        and x.k.shape == (1, HKV, 11, D)
        and x.v.shape == (1, HKV, 11, DV)
    )
    assert np.shares_memory(x.q, call["q"]) and x.copied == []
    v = x.visibility
    assert (x.q_starts.tolist(), x.k_starts.tolist()) == ([1, 4, 4], [0, 5, 6])
    assert (v.q_lengths.tolist(), v.kv_lengths.tolist(), v.q_offset.tolist()) == (
        [3, 0, 4],
        [5, 1, 5],
        [2, 1, 1],
    )
    q = call["q"].swapaxes(0, 1) if layout == "bthd" else call["q"]
    k = call["k"].swapaxes(0, 1) if layout == "bthd" else call["k"]
    np.testing.assert_array_equal(x.rows(x.q, 2, 3, "q"), q[3, 4:8])
    np.testing.assert_array_equal(x.rows(x.k, 1, 1, "k"), k[1, 5:6])
    assert x.rows(x.q, 1, 0, "q").shape == (0, D)
    assert x.user_shapes["out"] == call["out"].shape and x.user_shapes["lse"] == (HQ, 9)


def test_rows_without_varlen():
    _, x = of(q_lengths=[5, 2], kv_lengths=[0, 7])
    np.testing.assert_array_equal(x.rows(x.q, 1, 3, "q"), x.q[1, 3, :2])
    np.testing.assert_array_equal(x.rows(x.v, 1, 1, "k"), x.v[1, 1])
    assert x.rows(x.k, 0, 0, "k").shape == (0, D)


@pytest.mark.parametrize("cu", [[0], [3], [0, 0], [9, 9], [2, 2, 2]], ids=str)
def test_varlen_without_rows(cu, cpu_backend):
    """No sequence, or only empty ones: everything is padding."""
    call = good_varlen() | dict(cu_seqlens_q=cu, cu_seqlens_k=cu, out=None, backend=cpu_backend)
    out, lse = rf.attention_varlen(**call, return_lse=True)
    assert out.shape == (HQ, 9, DV) and not out.any() and np.isneginf(lse).all()
    del call["out"]
    grads = rf.attention_varlen_backward(arr(HQ, 9, DV), **call, o=out, lse=lse)
    assert not any(grad.any() for grad in grads)


def test_varlen_accepts_none_for_what_it_does_not_take():
    call = good_varlen()
    plain = rf.attention_varlen(**call).copy()
    again = rf.attention_varlen(**call, mask=None, bias=None, q_lengths=None, kv_lengths=None)
    np.testing.assert_array_equal(again, plain)
