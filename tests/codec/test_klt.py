"""Calibrated sections: sizes by name, numbers far from the profile, and profiles that do not fit."""

from dataclasses import replace

import numpy as np
import profiles
import pytest
from kv import encoded

from manthan.codec import ProfileError, get_codec
from manthan.codec.base import Dtype, Section, SectionKind
from manthan.codec.cpu.numbers import as_floats, as_numbers
from manthan.codec.errors import SizeError
from manthan.codec.model import ModelFacts
from manthan.codec.profile import PRESETS
from manthan.codec.registry import codec_names, is_embedded, needs_profile

PROFILE = profiles.built()
TOKENS = 16
SECTION = Section(SectionKind.KEYS, "klt-5x", profiles.LAYERS, TOKENS, profiles.HEADS, profiles.HEAD_DIM)
FACTS = ModelFacts(profiles.ROPE, PROFILE)
each_kind = pytest.mark.parametrize("kind", [SectionKind.KEYS, SectionKind.VALUES])


def data(section, seed=99, scale=1):
    """Numbers of the section, and positions."""
    keys, values, positions = profiles.kv(section.tokens, seed, 160)
    x = keys if section.kind is SectionKind.KEYS else values
    return as_numbers(x * np.float32(scale), section.dtype), positions


@each_kind
@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32])
@pytest.mark.parametrize("scale", [30, 1e3])
def test_numbers_that_are_far_from_the_profile_take_escapes_and_then_larger_steps(kind, dtype, scale):
    section = replace(SECTION, kind=kind, dtype=dtype)
    codec = get_codec("klt-5x", profiles.HEAD_DIM, FACTS)
    x, positions = data(section, scale=scale)
    codes = encoded(codec, x, section, positions)
    back = codec.decode(codes, replace(section, dtype=Dtype.FLOAT32), positions)
    wrong = components(back, section, positions) - components(as_floats(x), section, positions)
    assert 0 < np.abs(wrong).max() < 0.501 * (2.0 ** codes[1] + 1), "half of a doubled step, and half of a step"


def components(x, section, positions):
    """Numbers in steps from the profile's mean, in float64, [layers, tokens, C]."""
    is_key, made = section.kind is SectionKind.KEYS, []
    still = profiles.ROPE.turn_back(x.astype(float), positions) if is_key else x.astype(float)
    for layer, vectors in zip(PROFILE.layers, still, strict=True):
        basis = layer.keys if is_key else layer.values
        rows = vectors.transpose(1, 0, 2).reshape(section.tokens, -1)
        made.append((rows - basis.mean) @ basis.forward.astype(float) / basis.steps[section.codec])
    return np.stack(made)


@pytest.mark.parametrize(
    "change",
    [{"layers": 2}, {"first_layer": 1}, {"heads": 3}, {"kind": SectionKind.BOTH}, {"head_dim": 64, "heads": 1}],
)
def test_a_section_that_the_profile_is_not_of(change):
    codec = get_codec("klt-5x", profiles.HEAD_DIM, FACTS)
    section = replace(SECTION, **change)
    with pytest.raises(SizeError, match="is not of the profile of made-up"):
        codec.decode(np.array([1, 0, 0, 0], np.uint8), section, np.arange(TOKENS))


def test_names():
    assert [name for name in codec_names() if needs_profile(name) and not is_embedded(name)] == list(PRESETS)
    with pytest.raises(ProfileError, match=r"klt-8x needs a profile of the model: run `manthan calibrate MODEL`\."):
        get_codec("klt-8x", profiles.HEAD_DIM)


@pytest.mark.parametrize(
    ("facts", "head_dim", "sentence"),
    [
        (ModelFacts(None, PROFILE), 32, "was made for another RoPE"),
        (ModelFacts(replace(profiles.ROPE, scale=1.5), PROFILE), 32, "was made for another RoPE"),
        (ModelFacts(replace(profiles.ROPE, interleaved=True), PROFILE), 32, "was made for another RoPE"),
        (FACTS, 64, "is for heads of 32 numbers, not 64"),
        (ModelFacts(profiles.ROPE, profiles.built(presets={"klt-8x": 8.0})), 32, "has no klt-5x: it has klt-8x"),
        (ModelFacts(profiles.ROPE, profiles.built(ranks=2)), 32, "is for 2 tensor-parallel ranks"),
    ],
)
def test_a_profile_that_does_not_fit(facts, head_dim, sentence):
    with pytest.raises(ProfileError, match=sentence):
        get_codec("klt-5x", head_dim, facts)
