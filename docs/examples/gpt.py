"""A GPT over bytes that trains on any text: forward and backward through rawflash, on NumPy or CuPy arrays.

    python gpt.py                                  # on text that comes with Python
    python gpt.py book.txt --plot loss.svg --sample 400
    python gpt.py --checkpoint gpt.npz             # stop it any time ...
    python gpt.py --checkpoint gpt.npz --resume    # ... and go on, bit for bit as if it had not stopped
    python gpt.py --device gpu                     # the same on a GPU
    python gpt.py --compare                        # time of a step beside dense attention

The code below has no branch for the device: `xp` is NumPy or CuPy, and everything else follows the arrays.
"""

import argparse
import json
import math
import os
import sys
import time
import zipfile
import zlib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from unittest import mock

import numpy as np

import rawflash as rf
from rawflash.layers import gelu, gpt_block, gpt_block_backward, rms_norm, rms_norm_backward, rope

VOCABULARY = 256  # bytes
BETA1, BETA2, EPSILON = 0.9, 0.99, 1e-8  # Adam's


@dataclass(frozen=True)
class Config:
    """What a run depends on, besides the text. Two runs of the same are the same."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 2  # grouped queries: half the cache
    context: int = 256
    batch: int = 8
    rate: float = 3e-3
    warmup: int = 50  # steps in which the rate rises to that
    seed: int = 0


# ---- text ----------------------------------------------------------------------------------------


def read_text(path=None):
    """Bytes to learn from, and held-out ones: the last tenth. Without a path, Python's language reference."""
    if path is None:
        from pydoc_data import topics

        text = "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    else:
        text = Path(path).read_bytes()
    data = np.frombuffer(text, np.uint8)
    cut = len(data) - len(data) // 10
    return data[:cut], data[cut:]


def unigram_bits(data):
    """Bits per byte of the best guess that does not look at the bytes before: their entropy."""
    counts = np.bincount(data, minlength=VOCABULARY)
    p = counts[counts > 0] / len(data)
    return float(-(p * np.log2(p)).sum())


def windows(data, starts, config):
    """Tokens (B, T + 1): the input, and shifted by one the byte to predict."""
    return data[starts[:, None] + np.arange(config.context + 1)].astype(np.int64)


def batch(data, step, config):
    """The batch of a step is a function of its number, so that a resumed run needs no state of a generator."""
    rng = np.random.default_rng([config.seed, step])
    return windows(data, rng.integers(0, len(data) - config.context, config.batch), config)


# ---- model ---------------------------------------------------------------------------------------


def initial(config, xp):
    """Parameters by name, float32. Drawn on the host: the same numbers on every device."""
    rng = np.random.default_rng(config.seed)
    D, d, F = config.width, config.width // config.heads, 4 * config.width

    def normal(fan_in, fan_out, size=1.0):
        return rng.standard_normal((fan_in, fan_out)) * (size / math.sqrt(fan_in))

    params = {"embed": rng.standard_normal((VOCABULARY, D))}
    for n in range(config.layers):
        quiet = 1 / math.sqrt(2 * config.layers)  # what is added to the residual, 2 * layers times
        block = {
            "norm1": np.ones(D),
            "wq": normal(D, D),
            "wk": normal(D, config.kv_heads * d),
            "wv": normal(D, config.kv_heads * d),
            "wo": normal(D, D, quiet),
            "norm2": np.ones(D),
            "w1": normal(D, F),
            "w2": normal(F, D, quiet),
        }
        params |= {f"{n}.{name}": array for name, array in block.items()}
    params |= {"norm": np.ones(D), "head": normal(D, VOCABULARY, 0.1)}
    return {name: xp.asarray(array, dtype=xp.float32) for name, array in params.items()}


def block_of(params, n):
    """Parameters of block ``n`` by the names of `rawflash.layers.gpt_block`."""
    prefix = f"{n}."
    return {name.removeprefix(prefix): array for name, array in params.items() if name.startswith(prefix)}


def forward(params, tokens, config, **options):
    """Logits (B, T, 256) of the next byte, and what the backward pass needs."""
    x = params["embed"][tokens]
    saved = []
    for n in range(config.layers):
        out, kept = gpt_block(
            x, block_of(params, n), config.heads, config.kv_heads, return_saved=True, **options
        )
        saved.append((x, kept))
        x = out
    h = rms_norm(x, params["norm"])
    return h @ params["head"], (saved, x, h)


def loss_and_gradients(params, tokens, config, xp):
    """Mean bits per byte as an array without axes, and the gradient of every parameter."""
    options = {"deterministic": True}  # resuming is bit for bit
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits, (saved, x, h) = forward(params, inputs, config, **options)

    # Cross-entropy in bits: its gradient is (softmax - one_hot) / ln 2, of the mean over all bytes.
    one_hot = (targets[..., None] == xp.arange(VOCABULARY)).astype(logits.dtype)
    logits -= logits.max(axis=-1, keepdims=True)
    p = xp.exp(logits)
    total = p.sum(axis=-1, keepdims=True)
    loss = ((xp.log(total) - (logits * one_hot).sum(axis=-1, keepdims=True)) / math.log(2)).mean()
    dlogits = (p / total - one_hot) / (math.log(2) * targets.size)

    gradients = {"head": by_rows(h).T @ by_rows(dlogits)}
    dx, gradients["norm"] = rms_norm_backward(dlogits @ params["head"].T, x, params["norm"])
    for n in reversed(range(config.layers)):
        x, kept = saved[n]
        dx, of_block = gpt_block_backward(
            dx, x, block_of(params, n), config.heads, config.kv_heads, saved=kept, **options
        )
        gradients |= {f"{n}.{name}": gradient for name, gradient in of_block.items()}
    # A product with one-hot rows adds up the gradients of equal bytes in a fixed order, unlike atomic adds.
    bytes_in = (inputs[..., None] == xp.arange(VOCABULARY)).astype(dx.dtype)
    gradients["embed"] = by_rows(bytes_in).T @ by_rows(dx)
    return loss, gradients


def by_rows(x):
    return x.reshape(-1, x.shape[-1])


# ---- training ------------------------------------------------------------------------------------


class Training:
    """Parameters, Adam's moments and the losses so far: all that a checkpoint holds, with a checksum of the text."""

    def __init__(self, config, xp, text=0):
        self.config, self.xp, self.text = config, xp, text
        self.params = initial(config, xp)
        self.m = {name: xp.zeros_like(p) for name, p in self.params.items()}
        self.v = {name: xp.zeros_like(p) for name, p in self.params.items()}
        self.losses = []  # of every step; arrays until they are read, so that a GPU is not waited for

    @property
    def step(self):
        return len(self.losses)

    def update(self, data):
        """One step of Adam (Kingma and Ba 2015, algorithm 1), in place."""
        xp, config = self.xp, self.config
        tokens = xp.asarray(batch(data, self.step, config))
        loss, gradients = loss_and_gradients(self.params, tokens, config, xp)
        self.losses.append(loss)
        t = self.step
        rate = config.rate * min(1.0, t / max(config.warmup, 1)) * math.sqrt(1 - BETA2**t) / (1 - BETA1**t)
        for name, p in self.params.items():
            g, m, v = gradients[name], self.m[name], self.v[name]
            m += (1 - BETA1) * (g - m)
            v += (1 - BETA2) * (g * g - v)
            p -= rate * m / (xp.sqrt(v) + EPSILON)

    def read_losses(self):
        """The losses as numbers; waits for a GPU."""
        self.losses = [float(loss) for loss in self.losses]
        return self.losses

    def save(self, path):
        """Write a checkpoint next to ``path``, then rename it: there is a whole one at any time."""
        path = Path(path)
        state = {f"{kind}/{name}": on_host(array) for kind in "pmv" for name, array in self._arrays(kind).items()}
        about = json.dumps(asdict(self.config) | {"text": self.text})
        part = path.with_name(path.name + ".part")
        with open(part, "wb") as file:
            np.savez(file, about=about, losses=np.array(self.read_losses()), **state)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)

    def load(self, path):
        """Go on from a checkpoint of the same configuration and text."""
        if not Path(path).exists():
            raise SystemExit(f"there is no checkpoint {path} to go on from")
        try:
            with open(path, "rb") as file, np.load(file) as state:
                about = json.loads(str(state["about"]))
                if about != asdict(self.config) | {"text": self.text}:
                    raise SystemExit(f"{path} was written by another configuration, or with another text: {about}")
                for kind in "pmv":
                    for name, array in self._arrays(kind).items():
                        array[...] = self.xp.asarray(state[f"{kind}/{name}"])
                self.losses = state["losses"].tolist()
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise SystemExit(f"{path} is no checkpoint of this script: {error}") from None

    def _arrays(self, kind):
        return {"p": self.params, "m": self.m, "v": self.v}[kind]


def on_host(array):
    """A NumPy array of it."""
    return array.get() if hasattr(array, "get") else array


def evaluate(params, data, config, xp):
    """Bits per byte of held-out text, by all windows that do not overlap."""
    starts = np.arange(0, len(data) - config.context, config.context)
    total = 0.0
    for first in range(0, len(starts), config.batch):
        tokens = xp.asarray(windows(data, starts[first : first + config.batch], config))
        logits, _ = forward(params, tokens[:, :-1], config)
        logits -= logits.max(axis=-1, keepdims=True)
        log_p = xp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        log_p -= xp.log(xp.exp(logits).sum(axis=-1))
        total -= float(log_p.sum(dtype=xp.float64))
    return total / math.log(2) / (len(starts) * config.context)


# ---- sampling with a cache of keys and values ----------------------------------------------------


def new_cache(config, length, xp):
    """Keys and values of each block: (1, length, Hkv, d), layout "bthd"."""
    shape = (1, length, config.kv_heads, config.width // config.heads)
    return [(xp.zeros(shape, xp.float32), xp.zeros(shape, xp.float32)) for _ in range(config.layers)]


def decode(params, tokens, cache, length, config, xp):
    """Logits (1, T, 256) after ``tokens (1, T)``; ``length`` tokens before them are in the cache.

    The equations of `gpt_block`; only the new rows are computed. Old keys were rotated when they came, and
    a query sees as many of them as in training.
    """
    B, T = tokens.shape
    d = config.width // config.heads
    before = xp.full((B,), length, xp.int64)
    positions = (length + xp.arange(T))[:, None]
    x = params["embed"][tokens]
    for n, (k_cache, v_cache) in enumerate(cache):
        p = block_of(params, n)
        n1 = rms_norm(x, p["norm1"])
        q = rope((n1 @ p["wq"]).reshape(B, T, config.heads, d), positions)
        k = rope((n1 @ p["wk"]).reshape(B, T, config.kv_heads, d), positions)
        v = (n1 @ p["wv"]).reshape(B, T, config.kv_heads, d)
        rf.append_kv(k_cache, v_cache, k, v, before, layout="bthd")
        o = rf.attention_decode(
            q, k_cache, v_cache, before + T, causal=True, window=(config.context - 1, None), layout="bthd"
        )
        x = x + o.reshape(B, T, config.width) @ p["wo"]
        x = x + gelu(rms_norm(x, p["norm2"]) @ p["w1"]) @ p["w2"]
    return rms_norm(x, params["norm"]) @ params["head"]


def sample(params, prompt, count, config, xp, temperature=0.8, seed=0):
    """The prompt and ``count`` bytes after it, drawn one by one."""
    rng = np.random.default_rng(seed)
    text = list(prompt) or [ord("\n")]
    cache = new_cache(config, len(text) + count, xp)
    new, length = text, 0
    for _ in range(count):
        logits = decode(params, xp.asarray([new]), cache, length, config, xp)
        length += len(new)
        scores = on_host(logits[0, -1]).astype(np.float64) / temperature
        cumulative = np.exp(scores - scores.max()).cumsum()
        new = [int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))]
        text += new
    return bytes(text)


# ---- a picture -----------------------------------------------------------------------------------


def plot(losses, unigram, path):
    """The loss of every step and its running mean, as an SVG file."""
    width, height, left, top, right, bottom = 680, 380, 52, 20, 16, 44
    if not losses:
        raise SystemExit("there are no losses to draw yet: --steps is 0")
    high = math.ceil(max(*losses, unigram))
    last = max(len(losses), 2)

    def x(step):
        return left + (step - 1) / (last - 1) * (width - left - right)

    def y(bits):
        return height - bottom - bits / high * (height - top - bottom)

    def line(values, color, thick):
        points = " ".join(f"{x(n + 1):.1f},{y(value):.1f}" for n, value in enumerate(values))
        return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{thick}"/>'

    def text(where_x, where_y, words, anchor="middle"):
        return f'<text x="{where_x:.1f}" y="{where_y:.1f}" text-anchor="{anchor}">{words}</text>'

    mean, means = losses[0], []
    for n, loss in enumerate(losses):
        mean += (loss - mean) * max(0.05, 1 / (n + 1))
        means.append(mean)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for bits in range(high + 1):
        parts.append(f'<path d="M{left} {y(bits):.1f}H{width - right}" stroke="#ddd"/>')
        parts.append(text(left - 8, y(bits) + 4, bits, "end"))
    for n in range(5):
        step = 1 + round(n / 4 * (last - 1))
        parts.append(text(x(step), height - bottom + 18, step))
    parts += [
        text((left + width - right) / 2, height - 8, "step"),
        f'<text transform="translate(16 {height / 2}) rotate(-90)" text-anchor="middle">bits per byte</text>',
        line(losses, "#9ecae1", 1),
        line(means, "#08519c", 2),
        f'<path d="M{left} {y(unigram):.1f}H{width - right}" stroke="#d94801" stroke-dasharray="6 4"/>',
        text(width - right - 4, y(unigram) - 6, f"unigram entropy {unigram:.2f}", "end"),
        "</svg>",
    ]
    Path(path).write_text("\n".join(parts) + "\n")


# ---- beside dense attention ----------------------------------------------------------------------


def dense(T, xp):
    """Causal attention over T rows by its formula, and its gradients; called as rawflash's are by a layer.

    P, which has T x T elements a head, is kept for the backward pass in the place of the log-sum-exp, as a
    framework that records operations keeps it.
    """
    hide = xp.where(xp.tri(T, dtype=bool), 0, -np.inf).astype(xp.float32)

    def grouped(x, kv_heads):
        """(B, T, H, d) as (B, Hkv, group, T, d): query heads beside those that share their keys."""
        return x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1]).transpose(0, 2, 3, 1, 4)

    def flat(x):
        return x.transpose(0, 3, 1, 2, 4).reshape(x.shape[0], x.shape[3], -1, x.shape[-1])

    def attention(q, k, v, **_):
        q, k, v = (grouped(x, k.shape[2]) for x in (q, k, v))
        P = q @ k.swapaxes(-1, -2)
        P *= 1 / math.sqrt(q.shape[-1])
        P += hide
        P -= P.max(axis=-1, keepdims=True)
        xp.exp(P, out=P)
        P /= P.sum(axis=-1, keepdims=True)
        return flat(P @ v), P

    def attention_backward(dout, q, k, v, o, P, **_):
        dout, q, k, v, o = (grouped(x, k.shape[2]) for x in (dout, q, k, v, o))
        dS = dout @ v.swapaxes(-1, -2)
        dS -= (dout * o).sum(axis=-1, keepdims=True)
        dS *= P
        dS *= 1 / math.sqrt(q.shape[-1])
        dk = (dS.swapaxes(-1, -2) @ q).sum(axis=2, keepdims=True)
        dv = (P.swapaxes(-1, -2) @ dout).sum(axis=2, keepdims=True)
        return flat(dS @ k), flat(dk), flat(dv)

    return {"attention": attention, "attention_backward": attention_backward}


def compare(data, config, xp, lengths=(1024, 4096), steps=3):
    """Print the time of a training step with the attention of rawflash and with dense attention in its place."""
    if len(data) <= max(lengths):
        raise SystemExit(f"the text has {len(data)} bytes to learn from; expected over {max(lengths)}")
    print(f"one step, batch 1, best of {steps}    rawflash       dense    dense / rawflash")
    for T in lengths:
        long = replace(config, context=T, batch=1)
        best = {}
        own = {"attention": rf.attention, "attention_backward": rf.attention_backward}
        for name, functions in (("rawflash", own), ("dense", dense(T, xp))):
            training = Training(long, xp)
            with mock.patch.multiple("rawflash.layers.multi_head", **functions):
                seconds = []
                for _ in range(steps + 1):  # the first one compiles
                    start = time.perf_counter()
                    training.update(data)
                    losses = training.read_losses()
                    seconds.append(time.perf_counter() - start)
            best[name] = min(seconds[1:]), losses
        (fast, losses), (slow, expected) = best.values()
        assert np.allclose(losses, expected, rtol=1e-4), "dense attention computes something else"
        print(f"T = {T:<5} {'':<22} {fast * 1e3:8.0f} ms {slow * 1e3:8.0f} ms {slow / fast:19.2f}", flush=True)


# ---- the command ---------------------------------------------------------------------------------


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", metavar="TEXT", nargs="?", help="a file; by default text that comes with Python")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="NumPy or CuPy arrays")
    parser.add_argument("--steps", type=int, default=300, help="of training, those of a checkpoint included")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop training after these")
    parser.add_argument("--every", type=int, default=50, help="steps between two lines of progress")
    parser.add_argument("--checkpoint", metavar="PATH", help="save to this file, at every line and at the end")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--plot", metavar="SVG", help="draw the losses")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="write N bytes after the prompt")
    parser.add_argument("--prompt", default="The ", help="what the sample goes on from")
    parser.add_argument("--compare", action="store_true", help="time a step beside dense attention, and stop")
    for field in fields(Config):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=field.type, default=field.default, help=f"default {field.default}")
    options = parser.parse_args(argv)
    if options.resume and not options.checkpoint:
        parser.error("--resume needs --checkpoint")
    for name in ("layers", "width", "heads", "kv_heads", "context", "batch", "every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; expected at least 1")
    if options.seed < 0:
        parser.error(f"--seed is {options.seed}; expected at least 0")
    for name in ("checkpoint", "plot"):  # what is written at the end is looked at in the beginning
        path = getattr(options, name)
        if path and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            parser.error(f"--{name} is {path}; expected a file in a folder that exists")
    return options


def train(training, data, options):
    """Update until the steps or the seconds are over; print progress."""
    config, first, start = training.config, training.step, time.perf_counter()
    done, then = first, start
    while training.step < options.steps and time.perf_counter() - start < options.seconds:
        training.update(data)
        if training.step % options.every == 0 or training.step in (first + 1, options.steps):
            recent = training.read_losses()[done:]
            now = time.perf_counter()
            milliseconds = (now - then) / len(recent) * 1e3
            print(
                f"step {training.step:5}   {sum(recent) / len(recent):6.3f} bits per byte   "
                f"{milliseconds:7.0f} ms a step   {now - start:6.1f} s",
                flush=True,
            )
            done, then = training.step, now
            if options.checkpoint:
                training.save(options.checkpoint)
    if options.checkpoint:
        training.save(options.checkpoint)
    tokens = (training.step - first) * config.batch * config.context
    return tokens, time.perf_counter() - start


def main(argv=None):
    options = arguments(argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a sample may have bytes that a terminal has no letter for
    xp = np
    if options.device == "gpu":
        try:
            import cupy as xp
        except ImportError as error:
            raise SystemExit(f"--device gpu needs CuPy: {error}") from None
    config = Config(**{field.name: getattr(options, field.name) for field in fields(Config)})
    try:
        data, held_out = read_text(options.text)
    except OSError as error:
        raise SystemExit(f"{options.text}: {error.strerror}") from None
    if len(held_out) <= config.context:
        least = 10 * config.context + 10
        raise SystemExit(f"the text has {len(data) + len(held_out)} bytes; expected at least {least}")
    if options.compare:
        return compare(data, config, xp)
    training = Training(config, xp, zlib.crc32(held_out, zlib.crc32(data)))
    if options.resume:
        training.load(options.checkpoint)
    count = sum(p.size for p in training.params.values())
    print(f"{count:,} parameters, {len(data):,} bytes to learn from, {len(held_out):,} held out", flush=True)
    tokens, seconds = train(training, data, options)
    print(f"{tokens:,} bytes in {seconds:.1f} s")
    bits = evaluate(training.params, held_out, config, xp)
    print(f"held out: {bits:.3f} bits per byte; entropy of its single bytes: {unigram_bits(held_out):.3f}")
    if options.plot:
        plot(training.read_losses(), unigram_bits(data), options.plot)
    if options.sample:
        text = sample(training.params, options.prompt.encode(errors="surrogateescape"), options.sample, config, xp)
        print(text.decode(errors="replace"))


if __name__ == "__main__":
    main()
