"""Profiles: files, digests, cuts, what is refused; and what a builder makes of keys and values."""

from dataclasses import replace

import numpy as np
import profiles
import pytest
from safetensors.numpy import save

from manthan.codec.calibration import SAMPLE, ProfileBuilder
from manthan.codec.errors import ProfileError
from manthan.codec.profile import FORMAT, GROUP, PRESETS, Basis, Profile, ProfileInfo, rank_heads
from manthan.codec.rope import Rope

PROFILE = profiles.built()


def saved(tmp_path, profile=PROFILE):
    path = tmp_path / "deep" / "p.safetensors"
    profile.save(path)
    return path


@pytest.mark.parametrize("rope", [None, profiles.ROPE, Rope((1.0, 0.1), 1.2, True)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_saved_is_loaded(tmp_path, rope, ranks):
    made = profiles.built(rope=rope, ranks=ranks)
    path = saved(tmp_path, made)
    found = Profile.load(path)
    assert (found.info, found.digest) == (made.info, made.digest)
    assert Profile.of(found.info, found.frequencies, found.ranks, found.groups).digest == made.digest  # of all tensors
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_digest_is_of_everything():
    info = PROFILE.info
    digests = {PROFILE.digest, profiles.built(512).digest}
    for other in (
        replace(info, model="x"),
        replace(info, text="x"),
        replace(info, rope=None),
        replace(info, metric="x"),
    ):
        digests.add(Profile.of(other, PROFILE.frequencies, PROFILE.ranks, PROFILE.groups).digest)
    other = PROFILE.frequencies.copy()
    other[0, 0:2] += np.array([1, -1], np.int16).astype(np.uint16)
    digests.add(Profile.of(info, other, PROFILE.ranks, PROFILE.groups).digest)
    basis = PROFILE.layers[0].keys
    for changed in (replace(basis, steps=basis.steps | {"klt-5x": 9.0}), replace(basis, mean=basis.mean + 1)):
        layers = [replace(PROFILE.layers[0], keys=changed), *PROFILE.layers[1:]]
        digests.add(Profile.of(info, PROFILE.frequencies, [layers], PROFILE.groups).digest)
    group = PROFILE.groups[0][0]
    for what in GROUP:
        changed = replace(group, **{what: getattr(group, what) + 1})
        digests.add(Profile.of(info, PROFILE.frequencies, PROFILE.ranks, [[changed]]).digest)
    digests.add(Profile.of(info, PROFILE.frequencies, PROFILE.ranks, [[replace(group, place=(0, 3, 0, 1))]]).digest)
    assert len(digests) == 10 + len(GROUP)
    assert Profile.of(info, PROFILE.frequencies, PROFILE.ranks, PROFILE.groups).digest == PROFILE.digest


def test_every_damaged_byte_is_seen(tmp_path):
    path = saved(tmp_path)
    content = path.read_bytes()
    for at in np.random.default_rng(0).integers(0, len(content), 60):
        damaged = bytearray(content)
        damaged[at] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(ProfileError, match=r"p\.safetensors"):
            Profile.load(path)
    for size in (0, 4, 100, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ProfileError, match="is no profile, or a damaged one"):
            Profile.load(path)


def test_what_cannot_be_read(tmp_path):
    with pytest.raises(ProfileError, match=r"none\.safetensors cannot be read: No such file"):
        Profile.load(tmp_path / "none.safetensors")
    other = tmp_path / "weights.safetensors"
    other.write_bytes(save({"a": np.zeros(3)}, {"format": "pt"}))
    with pytest.raises(ProfileError, match="is no profile"):
        Profile.load(other)


def reseal(path, change):
    """Write the file anew, its digest right, with something changed in it."""
    profile = Profile.load(path)
    change(profile)
    Profile.of(profile.info, profile.frequencies, profile.ranks).save(path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda p: p.layers[0].keys.tables.update({"klt-5x": np.full(64, 255, np.uint8)}),
            "a table of number 112 or higher",
        ),
        (lambda p: p.layers[0].keys.tables.update({"klt-5x": np.zeros(65, np.uint8)}), "of shape"),
        (lambda p: p.layers[0].keys.steps.update({"klt-5x": 0.0}), "a step of 0"),
        (lambda p: p.layers[1].values.mean.__setitem__(0, np.nan), "not finite"),
        (lambda p: p.layers[1].values.scale.__setitem__(0, 0), "scales"),
        (lambda p: p.frequencies.__setitem__((0, 0), 9), "frequencies"),
    ],
)
def test_content_that_does_not_fit_together(tmp_path, change, sentence):
    path = saved(tmp_path)
    reseal(path, change)
    with pytest.raises(ProfileError, match=f"does not fit together: .*{sentence}"):
        Profile.load(path)


def test_another_version(tmp_path, monkeypatch):
    path = saved(tmp_path)
    monkeypatch.setattr("manthan.codec.profile.FORMAT", "manthan profile 9")
    with pytest.raises(ProfileError, match=f"is '{FORMAT}': this version reads 'manthan profile 9'"):
        Profile.load(path)


def test_a_transform_that_cannot_be_undone():
    flat = Basis(np.zeros(4, np.float32), np.ones(4, np.float32), np.ones((4, 4), np.float16))
    with pytest.raises(ProfileError, match="cannot be undone"):
        _ = flat.inverse


def test_cuts():
    two = profiles.built(ranks=2)
    rank = two.for_rank(1, 2)
    assert rank.digest == two.digest
    assert rank.layers[0].keys.mean.shape == (profiles.HEAD_DIM,)
    assert np.array_equal(rank.layers[2].keys.mean, PROFILE.layers[2].keys.mean[profiles.HEAD_DIM :])
    with pytest.raises(ProfileError, match="is for 2 tensor-parallel ranks, and there are 1: run"):
        two.for_rank(0, 1)
    with pytest.raises(ProfileError, match="cut it with for_rank first"):
        _ = two.layers


@pytest.mark.parametrize(
    ("heads", "ranks", "each"),
    [(8, 1, [range(8)]), (4, 2, [range(2), range(2, 4)]), (2, 4, [range(1), range(1), range(1, 2), range(1, 2)])],
)
def test_heads_of_ranks(heads, ranks, each):
    assert [rank_heads(heads, rank, ranks) for rank in range(ranks)] == each


def errors(basis, x, preset):
    """Errors of rows [tokens, C] that are rounded to the preset's step."""
    step = basis.steps[preset]
    return np.rint((x - basis.mean) @ basis.forward / step) * step @ basis.inverse + basis.mean - x


def rows(numbers):
    """[tokens, C] of the first layer of [layers, heads, tokens, head_dim]."""
    return numbers[0].transpose(1, 0, 2).reshape(numbers.shape[2], -1)


def test_a_metric_moves_errors_to_where_they_weigh_little():
    keys, _, positions = profiles.kv(512, seed=5)
    x, shares = rows(profiles.ROPE.turn_back(keys, positions)), []
    for profile in (PROFILE, profiles.built(metric=True)):
        wrong = np.square(errors(profile.layers[0].keys, x, "klt-8x")).mean(0)
        shares.append(wrong[-16:].mean() / wrong[:16].mean())
    assert shares[1] < 0.5 * shares[0]


# ---- latents


def test_a_profile_of_latents_has_one_basis_a_layer_and_fits_any_number_of_ranks(tmp_path):
    made = profiles.built_of_latents(ranks=2)
    assert [len(layer.bases) for layer in made.layers] == [1] * profiles.LAYERS
    assert made.layers[0].keys.mean.shape == (profiles.LATENT,)
    made.save(tmp_path / "p")
    read = Profile.load(tmp_path / "p")
    assert read.digest == made.digest
    assert read.info == made.info
    assert read.info.latent == profiles.LATENT
    for rank in range(4):
        assert read.for_rank(rank, 4).layers == read.layers
    for preset, ratio in made.info.ratios.items():
        assert PRESETS[preset] <= ratio < 1.1 * PRESETS[preset]


INFO = ProfileInfo("m", 1, profiles.HEADS, profiles.HEAD_DIM, None, "none")


def test_first_tokens_and_what_is_not_finite_do_not_count():
    clean, dirty = ProfileBuilder(INFO), ProfileBuilder(INFO)
    keys, values, positions = profiles.kv(300, rope=None)
    clean.add(0, positions[4:], keys[0][:, 4:], values[0][:, 4:])
    keys, values = keys.copy(), values.copy()
    keys[0][:, :4] = 1e9
    keys, values = (np.concatenate([x, x[..., -2:, :]], -2) for x in (keys, values))
    keys[0][:, -1, 3], values[0][:, -2, 1] = np.nan, np.inf
    dirty.add(0, np.arange(302), keys[0], values[0])
    assert clean.finish().digest == dirty.finish().digest


def test_too_few_tokens():
    builder = ProfileBuilder(INFO)
    keys, values, positions = profiles.kv(69, rope=None)
    builder.add(0, positions, keys[0], values[0])
    with pytest.raises(ProfileError, match="52 tokens do not calibrate 64 numbers"):
        builder.finish()


def test_a_few_tokens_are_held_back_however_many_come():
    builder = ProfileBuilder(INFO)
    keys, values, _ = profiles.kv(4000, rope=None)
    for turn in range(8):
        builder.add(0, np.arange(4 + 4000 * turn, 4004 + 4000 * turn), keys[0], values[0])
        assert SAMPLE / 4 < len(builder._layers[0][0].held) <= SAMPLE
    assert builder.tokens == 8 * 3200
    assert set(builder.finish().info.ratios) == set(PRESETS)
