"""docs/examples/gpt.py: its gradient, its checkpoints, its cache, and that it learns."""

import importlib.util
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import rawflash as rf

PATH = Path(rf.__file__).parents[1] / "docs" / "examples" / "gpt.py"
SPEC = importlib.util.spec_from_file_location("gpt_example", PATH)
gpt = importlib.util.module_from_spec(SPEC)
sys.modules["gpt_example"] = gpt  # its dataclass looks itself up there
SPEC.loader.exec_module(gpt)

SMALL = gpt.Config(layers=2, width=16, heads=4, kv_heads=2, context=24, batch=4, warmup=5, rate=1e-2)


@pytest.fixture(scope="module")
def text():
    return gpt.read_text()


def bits(training):
    """Every array of a training, as its bytes."""
    return {
        f"{kind} {name}": array.tobytes() for kind in "pmv" for name, array in training._arrays(kind).items()
    }


def test_the_text(text):
    learnt, held_out = text
    assert len(learnt) > 300_000 and len(held_out) == (len(learnt) + len(held_out)) // 10
    assert b" statement " in bytes(learnt)
    assert gpt.unigram_bits(np.arange(256, dtype=np.uint8)) == 8
    assert gpt.unigram_bits(np.array([7, 7, 9, 9], np.uint8)) == 1
    assert gpt.unigram_bits(np.array([7, 7], np.uint8)) == 0


def test_a_batch_is_windows_of_the_text(text):
    data = text[0]
    tokens = gpt.batch(data, 3, SMALL)
    assert tokens.shape == (4, 25)
    assert all(bytes(row.tolist()) in bytes(data) for row in tokens)
    np.testing.assert_array_equal(tokens, gpt.batch(data, 3, SMALL))
    assert (tokens != gpt.batch(data, 4, SMALL)).any()


def test_gradient_of_the_loss(text):
    """In float64, along random directions in the space of each parameter; and the loss by its formula."""
    config = replace(SMALL, batch=2, context=6)
    rng = np.random.default_rng(0)
    params = {name: p.astype(np.float64) for name, p in gpt.initial(config, np).items()}
    tokens = gpt.batch(text[0], 0, config)
    loss, gradients = gpt.loss_and_gradients(params, tokens, config, np)
    assert set(gradients) == set(params)

    logits = gpt.forward(params, tokens[:, :-1], config)[0]
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    seen = np.take_along_axis(p, tokens[:, 1:, None], axis=-1)
    np.testing.assert_allclose(loss, -np.log2(seen).mean(), rtol=1e-13)

    h = 1e-5
    for name, gradient in gradients.items():
        direction = rng.standard_normal(gradient.shape)

        def along(step, name=name, direction=direction):
            moved = params | {name: params[name] + step * direction}
            return gpt.loss_and_gradients(moved, tokens, config, np)[0]

        numeric = (along(h) - along(-h)) / (2 * h)
        np.testing.assert_allclose((gradient * direction).sum(), numeric, rtol=1e-7, atol=1e-9, err_msg=name)


def test_one_step_of_adam(text):
    """The first step moves every parameter with a gradient by the rate, against its sign."""
    training = gpt.Training(replace(SMALL, warmup=1, rate=0.5), np)
    before = {name: p.copy() for name, p in training.params.items()}
    _, gradients = gpt.loss_and_gradients(before, gpt.batch(text[0], 0, training.config), training.config, np)
    training.update(text[0])
    for name, g in gradients.items():
        large = np.abs(g) > 1e-4  # below, Adam's epsilon counts
        moved = training.params[name] - before[name]
        np.testing.assert_allclose(moved[large], -0.5 * np.sign(g[large]), rtol=2e-3)
        assert large.any(), name


def test_it_learns(text):
    data, held_out = text
    training = gpt.Training(SMALL, np)
    for _ in range(150):
        training.update(data)
    losses = training.read_losses()
    assert 7.9 < losses[0] < 8.2  # it begins without an opinion
    before = gpt.evaluate(gpt.initial(SMALL, np), held_out[:5000], SMALL, np)
    after = gpt.evaluate(training.params, held_out[:5000], SMALL, np)
    assert 7.9 < before < 8.2
    assert np.mean(losses[-20:]) < 4.2 and after < 4.2 < gpt.unigram_bits(data) < gpt.unigram_bits(held_out) + 0.2


def test_evaluate_is_the_loss(text):
    training = gpt.Training(SMALL, np)
    training.update(text[0])
    data = text[1][: 9 * 24 + 1]  # nine windows, in three batches the last of which is not full
    starts = np.arange(9) * 24
    loss, _ = gpt.loss_and_gradients(training.params, gpt.windows(data, starts, SMALL), SMALL, np)
    np.testing.assert_allclose(gpt.evaluate(training.params, data, SMALL, np), loss, rtol=1e-5)


# ---- checkpoints


def test_a_resumed_training_is_the_same_bit_for_bit(text, tmp_path):
    whole, first, second = (gpt.Training(SMALL, np) for _ in range(3))
    for _ in range(6):
        whole.update(text[0])
    for _ in range(3):
        first.update(text[0])
    first.save(tmp_path / "gpt.npz")
    second.load(tmp_path / "gpt.npz")
    assert second.step == 3 and bits(second) == bits(first) != bits(whole)
    for _ in range(3):
        second.update(text[0])
    assert bits(second) == bits(whole)
    assert second.read_losses() == whole.read_losses()
    assert [path.name for path in tmp_path.iterdir()] == ["gpt.npz"]


def test_a_save_that_fails_leaves_the_checkpoint_before(text, tmp_path):
    training = gpt.Training(SMALL, np)
    training.save(tmp_path / "gpt.npz")
    before = (tmp_path / "gpt.npz").read_bytes()
    training.update(text[0])

    def full(file, **_):
        file.write(b"half of it")
        raise OSError("No space left on device")

    with mock.patch.object(np, "savez", full), pytest.raises(OSError, match="No space left"):
        training.save(tmp_path / "gpt.npz")
    assert (tmp_path / "gpt.npz").read_bytes() == before
    training.save(tmp_path / "gpt.npz")
    assert (tmp_path / "gpt.npz").read_bytes() != before


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path):
    gpt.Training(SMALL, np).save(tmp_path / "gpt.npz")
    with pytest.raises(SystemExit, match="another configuration"):
        gpt.Training(replace(SMALL, heads=2), np).load(tmp_path / "gpt.npz")
    with pytest.raises(SystemExit, match="another text"):
        gpt.Training(SMALL, np, text=1).load(tmp_path / "gpt.npz")
    for damage in (b"", b"no archive", (tmp_path / "gpt.npz").read_bytes()[:-1000]):
        (tmp_path / "gpt.npz").write_bytes(damage)
        with pytest.raises(SystemExit, match="is no checkpoint"):
            gpt.Training(SMALL, np).load(tmp_path / "gpt.npz")


# ---- sampling


@pytest.mark.parametrize("parts", [(40,), (7, 1, 1, 15, 1, 1, 14), (1,) * 40], ids=["at once", "mixed", "one by one"])
def test_the_cache_changes_nothing(parts, text):
    """Logits with cached keys are those of the whole text; beyond the context, those of a sliding window."""
    training = gpt.Training(SMALL, np)
    for _ in range(5):
        training.update(text[0])
    params = {name: p.astype(np.float64) for name, p in training.params.items()}
    tokens = text[1][None, :40]  # more than the context of 24
    whole, _ = gpt.forward(params, tokens, SMALL, window=(SMALL.context - 1, None))
    cache = [(k.astype(np.float64), v.astype(np.float64)) for k, v in gpt.new_cache(SMALL, 48, np)]
    length, logits = 0, []
    for n in parts:
        logits.append(gpt.decode(params, tokens[:, length : length + n], cache, length, SMALL, np))
        length += n
    np.testing.assert_allclose(np.concatenate(logits, axis=1), whole, rtol=0, atol=1e-12 * np.abs(whole).max())


def test_sampling_draws_from_the_model(text):
    training = gpt.Training(SMALL, np)
    for _ in range(5):
        training.update(text[0])
    call = (training.params, b"The ", 20, SMALL, np)
    drawn = gpt.sample(*call)
    assert drawn == gpt.sample(*call) != gpt.sample(*call, seed=1)
    assert drawn.startswith(b"The ") and len(drawn) == 24

    # Next to zero temperature it is the likeliest byte each time, by recomputing the whole text.
    greedy = gpt.sample(*call, temperature=1e-6)
    expected = list(b"The ")
    for _ in range(20):
        window = (SMALL.context - 1, None)
        logits, _ = gpt.forward(training.params, np.array([expected]), SMALL, window=window)
        expected.append(int(logits[0, -1].argmax()))
    assert greedy == bytes(expected)


# ---- the command


SHORT = ["--layers", "1", "--width", "16", "--context", "16", "--batch", "2"]


def test_the_command(tmp_path, capsys):
    (tmp_path / "text").write_bytes(b"A text that is as short as it may be. " * 20)
    files = ["--checkpoint", str(tmp_path / "gpt.npz"), "--plot", str(tmp_path / "loss.svg")]
    gpt.main([str(tmp_path / "text"), *SHORT, *files, "--steps", "4", "--every", "2", "--sample", "9"])
    printed = capsys.readouterr().out
    assert "step     4" in printed and "held out:" in printed and "\nThe " in printed

    gpt.main([str(tmp_path / "text"), *SHORT, *files, "--steps", "7", "--resume"])
    printed = capsys.readouterr().out
    assert "step     5" in printed and "step     4" not in printed
    root = ElementTree.parse(tmp_path / "loss.svg").getroot()
    curves = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(curve.get("points").split()) for curve in curves] == [7, 7]

    gpt.main([str(tmp_path / "text"), *SHORT, "--steps", "5", "--seconds", "0"])
    assert "step" not in capsys.readouterr().out


def test_dense_attention_is_the_same_model(text, capsys):
    """`compare` checks the losses of both; it can fail."""
    small = replace(SMALL, layers=1)
    gpt.compare(text[0], small, np, lengths=(40,), steps=1)
    assert "T = 40" in capsys.readouterr().out
    dense = gpt.dense

    def broken(T, xp):
        functions = dense(T, xp)
        return functions | {"attention": lambda q, k, v, **_: functions["attention"](q, k, v[:, ::-1])}

    with mock.patch.object(gpt, "dense", broken), pytest.raises(AssertionError, match="something else"):
        gpt.compare(text[0], small, np, lengths=(40,), steps=1)


def test_dense_gradients(text):
    config = replace(SMALL, batch=2)
    params = {name: p.astype(np.float64) for name, p in gpt.initial(config, np).items()}
    tokens = gpt.batch(text[0], 0, config)
    loss, gradients = gpt.loss_and_gradients(params, tokens, config, np)
    with mock.patch.multiple("rawflash.layers.multi_head", **gpt.dense(24, np)):
        expected, dense = gpt.loss_and_gradients(params, tokens, config, np)
    np.testing.assert_allclose(loss, expected, rtol=1e-13)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, dense[name], rtol=0, atol=1e-12 * np.abs(dense[name]).max())


def test_wrong_commands(tmp_path):
    with pytest.raises(SystemExit):
        gpt.main(["--resume"])
    (tmp_path / "text").write_bytes(b"too short")
    with pytest.raises(SystemExit, match="the text has 9 bytes"):
        gpt.main([str(tmp_path / "text")])


@pytest.mark.parametrize("flags", [
    ["--every", "0"], ["--batch", "0"], ["--context", "0"], ["--heads", "0"], ["--seed", "-1"],
    ["--checkpoint", "{}"], ["--checkpoint", "{}/nobody/a.npz"], ["--plot", "{}/nobody/a.svg"],
    ["{}"], ["{}/nobody.txt"], ["{}/short.txt"], ["{}/short.txt", "--compare"], ["{}/some.txt", "--compare"],
])  # fmt: skip
def test_commands_that_cannot_end_well_end_at_once(flags, tmp_path, monkeypatch):
    (tmp_path / "short.txt").write_bytes(bytes(169))
    (tmp_path / "some.txt").write_bytes(bytes(3000))
    monkeypatch.setattr(gpt, "train", None)
    with pytest.raises(SystemExit) as ended:
        gpt.main([flag.format(tmp_path) for flag in ["--context", "16", *flags]])
    assert ended.value.code not in (0, None)


def test_a_prompt_of_any_bytes(tmp_path, capsysbinary):
    gpt.main(["--steps", "1", "--layers", "1", "--width", "8", "--heads", "2", "--kv-heads", "1", "--context", "16",
              "--sample", "3", "--prompt", "\udcff"])  # fmt: skip
    assert b"held out" in capsysbinary.readouterr().out


@pytest.mark.gpu
def test_a_gpu_trains_the_same(text):
    """To rounding: float32 sums in another order, which a few steps of Adam do not blow up."""
    import cupy

    host, device = gpt.Training(SMALL, np), gpt.Training(SMALL, cupy)
    for _ in range(5):
        host.update(text[0])
        device.update(text[0])
    np.testing.assert_allclose(device.read_losses(), host.read_losses(), rtol=1e-4)
    for name, p in device.params.items():
        assert type(p) is cupy.ndarray, name
    assert len(gpt.sample(device.params, b"The ", 9, SMALL, cupy)) == 13
