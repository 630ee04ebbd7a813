"""`manthan calibrate`: a profile of a small model, where it lies, and what is refused."""

from dataclasses import replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from manthan.codec import BlockFormat, BlockShape
from manthan.codec.calibration import ProfileBuilder
from manthan.codec.cpu.numbers import as_floats, bf16_bits
from manthan.codec.model import ModelFacts
from manthan.codec.profile import DIVERGENCES, LEVELS, Profile, ProfileInfo
from manthan.codec.rope import Rope
from manthan.codec.wire import FINGERPRINT_LEN
from manthan.manager.cli import app
from manthan.manager.commands.calibrate import Metric
from manthan.manager.config.profiles import profile_path

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
from latent_model import LATENT, LAYERS, VOCAB, make_latent_model

from manthan.manager.calibration.model import MANY, ModelReader, _Weights

MODEL = Path(__file__).parents[1] / "data" / "tiny-llama"
TEXT = (files("manthan.manager.calibration") / "text.txt").read_text()


def run(*words):
    return CliRunner().invoke(app, ["calibrate", *map(str, words)])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """By what errors do to its predictions, of 4,096 tokens, for two ranks: (what was printed, profile)."""
    path = tmp_path_factory.mktemp("profiles") / "tiny.safetensors"
    result = run(MODEL, "--tokens", 4096, "--out", path, "--tensor-parallel-size", 2)
    assert result.exit_code == 0, result.output
    return result.output, Profile.load(path)


def test_a_profile_tells_its_model_and_every_rank_has_its_heads(calibrated):
    said, profile = calibrated
    info = profile.info
    assert "4 layers, 2 KV heads of 128 numbers" in said
    assert "metric fisher" in said
    assert (info.model, info.layers, info.heads, info.head_dim) == (str(MODEL), 4, 2, 128)
    assert info.rope == Rope(tuple(10000.0 ** (-np.arange(0, 128, 2) / 128)))
    assert info.tokens > 2000
    assert len(info.text) == 64
    for rank in range(2):
        groups = profile.for_rank(rank, 2).groups
        assert [group.place for group in groups] == [(0, 2, 0, 1), (2, 2, 0, 1)]
        assert all(group.weigher.any() for group in groups), "gradients tell how much tokens are looked at"
    assert list(info.bits) == sorted(info.bits)
    assert info.bits[-1] < 16 * 0.9
    for preset, level in LEVELS.items():
        assert f"{preset}: {info.bits[level]:.2f} bits a number, and headers; " in said
        assert f"; {(*info.divergences, 0)[level]:.2g} nats" in said
        assert level > 3 or info.bits[level] < 16 / float(preset[4:-1])
    assert not np.array_equal(profile.ranks[0][0].mean, profile.ranks[1][0].mean)
    # Errors are large in numbers in which they do little, and in layers in which they do.
    first = np.square(groups[0].inverse).mean(0).reshape(2, 2, -1)
    assert first[0, 0].max() > 2 * first[0, 0].min()
    kept = [np.square(group.inverse).mean(0).reshape(2, 2, -1)[:, 0].mean(1) for group in groups]
    assert np.max(kept) > 1.4 * np.min(kept)


def test_levels_diverge_as_blocks_of_their_codecs_do(calibrated):
    """On tokens behind those that were read: decoded as one section by the command, and in blocks here."""
    _, profile = calibrated
    reader, info = ModelReader(str(MODEL), "cpu"), profile.info
    _, [held] = reader.pieces(TEXT, 4096)
    assert info.divergences == pytest.approx(reader.divergences(profile, held))
    assert all(coarse > 2 * fine > 0 for coarse, fine in pairwise(info.divergences))
    prefix, rest = held[:1536], held[1536:]
    layers = reader._cache(prefix, info)
    exact = [[each.keys, each.values] for each in layers]
    changed = np.stack([[x[0].numpy() for x in parts] for parts in exact], 1)  # keys and values, layers, heads
    shape = BlockShape(4, 1, 32, 128)
    for rank in range(2):
        facts = ModelFacts(info.rope, profile.for_rank(rank, 2))
        form = BlockFormat("klt-8x", shape, bytes(FINGERPRINT_LEN), facts=facts)
        for first in range(0, len(prefix), 32):
            at = np.s_[:, :, rank : rank + 1, first : first + 32]
            block = form.encode(*bf16_bits(changed[at]), key=b"", first_token=first, exact=4 if first == 0 else 0)
            changed[at] = as_floats(np.stack(form.decode(block, key=b"")))
    with torch.no_grad():
        wanted = reader._predictions(rest, exact)
        found = reader._predictions(rest, torch.from_numpy(changed)[:, :, None].swapaxes(0, 1))
    nats = float((wanted.exp() * (wanted - found)).sum(-1).mean())
    assert nats == pytest.approx(info.divergences[LEVELS["klt-8x"]], rel=0.2)


def test_what_is_held_out_is_behind_what_is_read_or_a_small_part_of_it():
    reader = ModelReader(str(MODEL), "cpu")
    read, [held] = reader.pieces(TEXT, 4094)
    assert reader.pieces(TEXT, 6141)[0] == [*read, held]
    whole, [last] = reader.pieces(TEXT, 10**6)
    assert len(whole) + 1 >= MANY
    assert reader.pieces(TEXT, 2047 * len(whole)) == (whole, [last])
    assert [len(pieces) for pieces in reader.pieces(TEXT[:6000], 10**6)] == [1, 0]


def test_gradients_are_of_keys_before_they_are_turned():
    """What the log-probability gains with a small change of keys before RoPE is the same, reckoned on either side."""
    rng, places, rope = np.random.default_rng(0), np.arange(5), Rope((1.0, 0.1), scale=2.0)
    keys, gradient, change = rng.standard_normal((3, 1, 5, 6)).astype(np.float32)
    weights = _Weights(ProfileInfo("made-up", 1, 1, 6, rope, "fisher"))
    weights.add([gradient, gradient], places)
    gained = ((rope.turn(keys + change, places) - rope.turn(keys, places)) * gradient).sum((0, 2))
    own, _ = weights.with_directions(*weights._totals)
    before = replace(rope, scale=1 / rope.scale).turn_back(gradient, places)
    assert np.allclose((change * before).sum((0, 2)), gained, rtol=1e-4)
    assert np.allclose(own, before[0].T @ before[0], rtol=1e-4)


def test_a_profile_of_latents_is_made_by_what_errors_do_to_predictions(tmp_path):
    """They are what vLLM caches, and a profile with a metric keeps the predictions better than one without."""
    folder = tmp_path / "model"
    folder.mkdir()
    reader, rng = ModelReader(make_latent_model(folder), "cpu"), np.random.default_rng(0)
    info = reader.info("fisher", "")
    assert (info.layers, info.heads, info.head_dim, info.rope, info.latent) == (
        LAYERS,
        LATENT // 128,
        128,
        None,
        LATENT,
    )
    pieces = [rng.integers(0, VOCAB, 400).tolist() for _ in range(3)]
    builder, steps = ProfileBuilder(info), []
    reader.read(builder, pieces, True, lambda: steps.append(1))
    assert len(steps) == len(pieces)
    made = builder.finish()
    assert made.info.kinds == ("keys",)
    assert sum(group.mean.size for group in made.groups) == LATENT * LAYERS
    [weights] = builder._metrics[0]
    assert np.allclose(weights, weights.T)
    assert np.trace(weights) > 0
    # behind an RMS norm with weights of GAIN over the root of 512, which make_latent_model leaves at 1
    energy = np.square(builder._joints[0][0].held[:, :LATENT]).sum(1).mean()
    assert energy == pytest.approx(LATENT, rel=0.05)


@pytest.mark.slow
def test_without_a_metric_it_lies_in_the_cache_folder(cache, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("too little memory\nfor float32")

    monkeypatch.setattr(ModelReader, "divergences", fail)
    result = run(MODEL, "--tokens", 1024, "--metric", "none")
    assert result.exit_code == 0, result.output
    assert "the levels' divergences are estimated: too little memory\n" in result.output
    path = profile_path(str(MODEL))
    assert path.parent == cache / "manthan" / "profiles"
    assert path.name.startswith("tiny-llama-")
    info = Profile.load(path).info
    assert info.metric == Metric.none
    assert info.divergences[2] == pytest.approx(DIVERGENCES[2])


def test_places(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    path = profile_path("Qwen/Qwen3-8B")
    assert path.parent == tmp_path / ".cache" / "manthan" / "profiles"
    assert path.name.startswith("qwen-qwen3-8b-")
    assert profile_path(str(MODEL)) != profile_path(str(MODEL), 2)
    for name, text in (("config.json", "{}"), ("model.safetensors", "123")):
        before = profile_path(str(tmp_path))
        (tmp_path / name).write_text(text)
        assert profile_path(str(tmp_path)) != before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("no/such-model",), "no/such-model cannot be loaded by Transformers"),
        ((MODEL, "--text", "nowhere"), "nowhere"),
        ((MODEL, "--text", "short.txt"), "tokens, and calibrating takes 1023 at least"),
    ],
)
def test_refusals_are_sentences(words, sentence, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "short.txt").write_text("Too short.")
    monkeypatch.chdir(tmp_path)
    result = run(*words, "--out", tmp_path / "p.safetensors")
    assert result.exit_code == 1
    assert sentence in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "p.safetensors").exists()


def test_without_torch(monkeypatch):
    monkeypatch.setattr("manthan.manager.commands.calibrate.find_spec", lambda name: name != "torch")
    result = run(MODEL)
    assert result.exit_code == 1
    assert "it takes torch, which is not installed here" in result.output
