"""The forward kernel of sm_90, compiled without a GPU: what the assembler made of its loops.

Products that run beside exponentials are all that the kernel is; the assembler may undo that without a word, or with
one that nobody reads. So: nothing is spilled, products are not serialised, and in each loop of steps the exponentials
stand between the wait for S and the wait for O.
"""

import re
import subprocess
from functools import cache

import kept
import numpy as np
import pytest
from strategies import DTYPES
from test_cupy_raw_offline import Array, Device, disassembler

import rawflash as rf
from rawflash.backends.cupy_raw import compile as compiler

B, HQ, HKV, T = 2, 8, 4, 1024
STARTS = np.array([0, T // 3, T])
LENGTHS = dict(kv_lengths=[5, 900])
RICH = dict(softcap=9.0, alibi_slopes=[0.5, 0.2, 0.1, 0.0] * 2, window=(300, 9), **LENGTHS)
#: dtype, d, dv, options, and loops of steps: of whole blocks, before them of those that give the maximum, behind them
#: of those that are masked on the left, and of pieces that are done again
CASES = {
    "full": ("bfloat16", 128, 128, {}, 2),
    "full, 64, shared": ("bfloat16", 64, 64, {}, 2),
    "full, 64, long": ("bfloat16", 64, 64, {}, 2),
    "causal": ("bfloat16", 128, 128, dict(causal=True), 3),
    "causal, 64": ("bfloat16", 64, 64, dict(causal=True), 3),
    "causal, 64, long": ("bfloat16", 64, 64, dict(causal=True), 3),
    "full, long, shared": ("bfloat16", 128, 128, {}, 2),
    "full, 64, long, shared": ("bfloat16", 64, 64, {}, 2),
    "full, 192, long, shared": ("bfloat16", 192, 192, {}, 2),
    "float16, 256, long, shared": ("float16", 256, 256, {}, 2),
    "float16": ("float16", 128, 128, {}, 2),
    "float16, causal, 64": ("float16", 64, 64, dict(causal=True), 3),
    "window": ("bfloat16", 128, 128, dict(window=(300, 9)), 4),
    "window, 64": ("bfloat16", 64, 64, dict(window=(300, None)), 4),
    "lengths": ("bfloat16", 128, 128, LENGTHS, 2),
    "packed": ("bfloat16", 128, 128, dict(cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, causal=True), 3),
    "packed, 64": ("float16", 64, 64, dict(cu_seqlens_q=STARTS, cu_seqlens_k=STARTS), 2),
    "options": ("bfloat16", 128, 128, RICH, 4),
    "options, 64": ("bfloat16", 64, 64, RICH, 4),
    "192, 128": ("bfloat16", 192, 128, dict(causal=True), 3),
    "192": ("bfloat16", 192, 192, {}, 2),
    "96": ("bfloat16", 96, 96, dict(causal=True), 3),
    "256": ("bfloat16", 256, 256, {}, 2),
    "float16, causal, 256": ("float16", 256, 256, dict(causal=True), 3),
}  # fmt: skip


@cache
def assembled(name):
    """The program that a call loads, the assembler's log, and the instructions of its kernel."""
    pytest.importorskip("cupy")
    dtype, d, dv, options, _ = CASES[name]
    packed, device = "cu_seqlens_q" in options, Device("sm_90a")
    lead = () if packed else (B,)
    rows = T if "long" not in name else 9 * T if "shared" in name else 2 * T
    q, k, v = (Array((*lead, h, rows, n), DTYPES[dtype]) for h, n in ((HQ, d), (HKV, d), (HKV, dv)))
    with device.current():
        (rf.attention_varlen if packed else rf.attention)(q, k, v, **options)
    (program,) = device.programs
    assert program.file == "sm90/fa2_forward.cu"
    assert ("constexpr int BALANCED = 1;" in program.text) == ("shared" in name)
    code, log = kept.compile_log(program.text, program.arch)
    return program, code, log


def instructions(code, folder):
    """The kernel's, and where its labels are among them."""
    file = folder / "kernel.cubin"
    file.write_bytes(code)
    command = [disassembler(), "-c", file]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    found, labels = [], {}
    for line in text[text.index(".text.fa2_forward") :].splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(found)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+([^/\s].*?)\s*;", line):
            found.append(instruction[1])
        elif line.startswith(".section") and found:
            break
    return found, labels


def loops_of_steps(found, labels):
    """The innermost loops that have products: lists of instructions."""
    spans = []
    for n, instruction in enumerate(found):
        target = re.search(r"\bBRA\b.*`\((\.L\w+)\)", instruction)
        first = labels.get(target[1], n) if target else n
        # A wait that has to be tried again stands behind all the rest, and jumps back
        if any("HGMMA" in x for x in found[first:n]) and not any("EXIT" in x for x in found[first:n]):
            spans.append((first, n))
    inner = [s for s in spans if not any(s != t and s[0] <= t[0] and t[1] <= s[1] for t in spans)]
    return [found[first : last + 1] for first, last in inner]


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_spilled_or_serialised(name):
    program, _, log = assembled(name)
    used = compiler.usage(log)["fa2_forward"]
    threads, _ = program.launched["fa2_forward"]
    assert used["registers"] * threads <= 65536
    assert max(used["spill_stores"], used["spill_loads"]) == 0
    warnings = re.findall(r"C75\d\d.*", log)
    assert not warnings


@pytest.mark.parametrize("name", CASES)
def test_exponentials_run_beside_products(name, tmp_path):
    program, code, _ = assembled(name)
    _, d, dv, options, count = CASES[name]
    loops = loops_of_steps(*instructions(code, tmp_path))
    assert len(loops) == count
    br, bc = (int(re.search(rf"constexpr int {n} = (\d+);", program.text)[1]) for n in ("BR", "BC"))
    assert br % 64 == 0
    for loop in loops:
        waits = [n for n, x in enumerate(loop) if "WARPGROUP.DEPBAR" in x]
        beside = br // 64 < 4  # the warpgroup's own products; those of four run beside others'
        assert ["0x1" in loop[n] for n in waits] == ([True, False] if beside else [False])  # S, then O, or both
        exponentials = [n for n, x in enumerate(loop) if "MUFU.EX2" in x]
        between = [n for n in exponentials if waits[0] < n < (waits[1] if beside else len(loop))]
        assert exponentials == between
        extra = bc // 2 if "softcap" in options else 0  # its own
        assert bc // 2 + extra <= len(between) <= bc // 2 + extra + 2  # and alpha
        assert sum("HGMMA" in x for x in loop) == -(-d // 16) + bc // 16
        # Four find out before their exponentials end whether the next copies have
        asked = [n for n, x in enumerate(loop) if "SYNCS.PHASECHK" in x and "TRYWAIT" not in x]
        assert len(asked) == (0 if beside else 2) and all(n < exponentials[-1] for n in asked)
        forbidden = [x for x in loop if re.search(r"\b(LDL|STL|MEMBAR|CALL|LDG)", x)]
        assert not forbidden
