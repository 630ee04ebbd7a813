"""Profiles: files, digests, cuts, what is refused; and what a builder makes of keys and values."""

import json
from dataclasses import replace

import numpy as np
import profiles
import pytest
from safetensors.numpy import save

from manthan.codec.calibration import RATIOS, SAMPLE, ProfileBuilder, decoded
from manthan.codec.cpu import klt
from manthan.codec.cpu.numbers import as_floats, bf16_bits
from manthan.codec.errors import ProfileError
from manthan.codec.profile import (
    DIVERGENCES,
    GROUP,
    Profile,
    ProfileInfo,
    _digest,
    _metadata,
    _tensors,
    rank_heads,
)
from manthan.codec.rope import Rope
from manthan.codec.tables import levels

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
    assert Profile.of(found.info, found.ranks).digest == made.digest  # of all tensors
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_digest_is_of_everything():
    info = PROFILE.info
    digests = {PROFILE.digest, profiles.built(512).digest}
    for other in (
        replace(info, model="x"),
        replace(info, text="x"),
        replace(info, rope=None),
        replace(info, metric="x"),
        replace(info, divergences=info.divergences[:-1]),
    ):
        digests.add(Profile.of(other, PROFILE.ranks).digest)
    group = PROFILE.groups[0]
    for what in GROUP:
        changed = replace(group, **{what: getattr(group, what) + 1})
        digests.add(Profile.of(info, [[changed]]).digest)
    digests.add(Profile.of(info, [[replace(group, place=(0, 3, 0, 1))]]).digest)
    assert len(digests) == 8 + len(GROUP)
    assert Profile.of(info, PROFILE.ranks).digest == PROFILE.digest


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


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tables": np.full(256, 192, np.uint8)}, "a table of number 192 or higher"),
        ({"tables": np.zeros(65, np.uint8)}, "of shape"),
        ({"scale": np.zeros(256, np.float32)}, "a deviation of 0"),
        ({"mean": np.full(256, np.nan, np.float32)}, "not finite"),
        ({"weigher": np.zeros(256, np.float32)}, "of shape"),
        ({"place": (2, 2, 0, 2)}, "are not all of 3 layers"),
    ],
)
def test_content_that_does_not_fit_together(tmp_path, change, sentence):
    first, *others = PROFILE.groups
    path = saved(tmp_path, Profile.of(PROFILE.info, [[replace(first, **change), *others]]))
    with pytest.raises(ProfileError, match=f"does not fit together: .*{sentence}"):
        Profile.load(path)


def test_a_profile_of_an_older_version_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("manthan.codec.profile.FORMAT", "manthan profile 1")
        old = profiles.built()
        path = saved(tmp_path, old)
    assert old.ranks[0][0].mean.tobytes() == PROFILE.ranks[0][0].mean.tobytes()
    assert old.digest != PROFILE.digest  # and so is the fingerprint of blocks
    with pytest.raises(ProfileError, match=r"p\.safetensors was made by an older `manthan calibrate`: run it again\."):
        Profile.load(path)


def test_a_profile_that_tells_no_divergences_is_loaded_and_keeps_its_digest(tmp_path):
    metadata, tensors = _metadata(PROFILE), dict(_tensors(PROFILE))
    del metadata["info"]["divergences"]
    digest = _digest(metadata, tensors.items())
    path = tmp_path / "old.safetensors"
    path.write_bytes(save(tensors, {"manthan": json.dumps(metadata | {"digest": digest})}))
    found = Profile.load(path)
    assert found.info == replace(PROFILE.info, divergences=())
    assert digest == found.digest == Profile.of(found.info, found.ranks).digest
    found.save(path)
    assert Profile.load(path).digest == digest


def test_divergences_without_a_model_go_by_the_errors_in_the_metric():
    """Errors of fresh tokens that are encoded and decoded, in the space of the components; here all tokens weigh 1."""
    keys, values, positions = profiles.kv(512, seed=5)
    bits = bf16_bits(np.stack([keys, values]))
    costs = np.zeros(len(levels.STEPS))
    for level, back in enumerate(decoded(PROFILE, bits, positions)):
        apart = as_floats(back) - as_floats(bits)
        apart[0] = profiles.ROPE.turn_back(apart[0], positions)
        for group in PROFILE.groups:
            first, count, *_ = group.place
            rows = apart[:, first : first + count].transpose(3, 1, 0, 2, 4).reshape(512, -1)
            costs[level] += np.square(rows @ group.forward).sum()
    told = np.array(PROFILE.info.divergences)
    assert told == pytest.approx(DIVERGENCES[2] / costs[2] * costs, rel=0.1)
    assert told[2] == pytest.approx(DIVERGENCES[2])


def test_a_transform_that_cannot_be_undone():
    flat = replace(PROFILE.groups[0], transform=np.ones((256, 256), np.float16))
    with pytest.raises(ProfileError, match="cannot be undone"):
        _ = flat.forward


def test_cuts():
    two = profiles.built(ranks=2)
    rank = two.for_rank(1, 2)
    assert rank.digest == two.digest
    shape = 2, 2, profiles.HEADS, profiles.HEAD_DIM  # layers, keys and values
    assert np.array_equal(rank.groups[0].mean, PROFILE.groups[0].mean.reshape(shape)[:, :, 1].ravel())
    with pytest.raises(ProfileError, match="is for 2 tensor-parallel ranks, and there are 1: run"):
        two.for_rank(0, 1)
    with pytest.raises(ProfileError, match="cut it with for_rank first"):
        _ = two.groups


@pytest.mark.parametrize(
    ("heads", "ranks", "each"),
    [(8, 1, [range(8)]), (4, 2, [range(2), range(2, 4)]), (2, 4, [range(1), range(1), range(1, 2), range(1, 2)])],
)
def test_heads_of_ranks(heads, ranks, each):
    assert [rank_heads(heads, rank, ranks) for rank in range(ranks)] == each


def errors(profile, x):
    """Mean squares of the errors of the first group's rows [tokens, C] at the finest lossy level."""
    group = profile.groups[0]
    j = klt.shifts_of(group, x)
    q = klt.finest((x - group.mean) @ group.forward, j)
    return np.square(
        klt.places(group, q, j, 0, klt.EXACT - 1).T @ group.inverse / (levels.FINE * 256) + group.mean - x
    ).mean(0)


def test_a_metric_moves_errors_to_where_they_weigh_little():
    keys, values, positions = profiles.kv(512, seed=5)
    both = np.stack([profiles.ROPE.turn_back(keys, positions), values], 1)[:2]
    x, shares = both.transpose(3, 0, 1, 2, 4).reshape(512, -1), []
    for profile in (PROFILE, profiles.built(metric=True)):
        of_keys = errors(profile, x).reshape(2, 2, -1)[0, 0]
        shares.append(of_keys[-16:].mean() / of_keys[:16].mean())
    assert shares[1] < 0.5 * shares[0]


# ---- latents


def test_a_profile_of_latents_has_one_kind_and_fits_any_number_of_ranks(tmp_path):
    made = profiles.built_of_latents(ranks=2)
    assert [group.mean.size for group in made.groups] == [2 * profiles.LATENT, profiles.LATENT]
    made.save(tmp_path / "p")
    read = Profile.load(tmp_path / "p")
    assert read.digest == made.digest
    assert read.info == made.info
    assert read.info.latent == profiles.LATENT
    for rank in range(4):
        assert read.for_rank(rank, 4).groups == read.groups
    assert all(16 / bits >= ratio for bits, ratio in zip(made.info.bits, RATIOS, strict=False))


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
        assert SAMPLE / 4 < len(builder._joints[0][0].held) <= SAMPLE
    assert builder.tokens == 8 * 3200
    assert len(builder.finish().info.bits) == len(levels.STEPS) + 1


def test_a_token_far_from_all_others_is_calibrated_with():
    builder = ProfileBuilder(replace(PROFILE.info, metric="fisher"))
    for start in range(0, 1024, 128):
        keys, values, positions = profiles.kv(128, seed=start, first=start)
        if not start:
            values[:, :, -7] *= 1e6  # held back, and not among those that steps are searched with
        for layer in range(profiles.LAYERS):
            builder.add(layer, positions, keys[layer], values[layer])
            builder.weigh(layer, np.eye(profiles.SIZE), np.eye(profiles.SIZE))
    assert max(builder.finish().info.bits) < 16
