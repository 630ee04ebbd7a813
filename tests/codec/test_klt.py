"""Calibrated sections: sizes, what comes back, and what is refused."""

from dataclasses import replace

import numpy as np
import profiles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manthan.codec import BlockFormat, BlockShape, CodecError, NonFiniteError, ProfileError, get_codec
from manthan.codec.base import Dtype, Section, SectionKind
from manthan.codec.cpu.klt import PARTS
from manthan.codec.cpu.numbers import as_floats, as_numbers
from manthan.codec.errors import SizeError, WireError
from manthan.codec.model import ModelFacts
from manthan.codec.profile import PRESETS
from manthan.codec.registry import codec_names, needs_profile

PROFILE = profiles.built()
TOKENS = 16
SECTION = Section(SectionKind.KEYS, "klt-5x", profiles.LAYERS, TOKENS, profiles.HEADS, profiles.HEAD_DIM)
FACTS = ModelFacts(profiles.ROPE, PROFILE)


def data(section, seed=99, first=160):
    """Of a section's dtype, and positions."""
    keys, values, positions = profiles.kv(section.tokens, seed, first)
    x = {1: keys, 2: values, 3: np.stack([keys, values])}[section.kind]
    return as_numbers(x.copy(), section.dtype), positions


def encoded(codec, x, section, positions):
    out = np.full(codec.max_nbytes(section), 255, np.uint8)
    return out[: codec.encode(x, section, positions, out)].copy()


def error(codec, section):
    x, positions = data(section)
    back = codec.decode(encoded(codec, x, section, positions), section, positions)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    wrong = as_floats(back) - as_floats(x)
    means = as_floats(x).mean(axis=-2, keepdims=True)
    return float(np.square(wrong).mean() / np.square(as_floats(x) - means).mean())


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32])
@pytest.mark.parametrize("kind", [SectionKind.KEYS, SectionKind.VALUES, SectionKind.BOTH])
def test_what_comes_back(kind, dtype):
    section = replace(SECTION, kind=kind, dtype=dtype)
    errors = [error(get_codec(name, profiles.HEAD_DIM, FACTS), replace(section, codec=name)) for name in PRESETS]
    assert errors == sorted(errors)
    assert errors[0] < 0.02
    assert errors[-1] < 0.2


@pytest.mark.parametrize("name", PRESETS)
def test_as_small_as_its_name_says(name):
    codec, sizes = get_codec(name, profiles.HEAD_DIM, FACTS), 0
    for kind in (SectionKind.KEYS, SectionKind.VALUES):
        section = replace(SECTION, kind=kind, codec=name, tokens=64)
        sizes += sum(encoded(codec, *_swap(data(section, seed), section)).size for seed in range(4)) / 4
    bf16 = 2 * 2 * profiles.LAYERS * 64 * profiles.SIZE
    assert bf16 / sizes > 0.97 * PRESETS[name]
    assert PROFILE.info.ratios[name] >= PRESETS[name]


def _swap(made, section):
    return made[0], section, made[1]


def test_a_mean_however_large_costs_nothing():
    """Keys with a bias, as Qwen2.5 has them: means here are several times the deviation that errors are relative to."""
    section = replace(SECTION, codec="klt-8x", dtype=Dtype.FLOAT32)
    assert error(get_codec("klt-8x", profiles.HEAD_DIM, FACTS), section) < 0.1


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32])
@pytest.mark.parametrize("kind", [SectionKind.KEYS, SectionKind.VALUES, SectionKind.BOTH])
@pytest.mark.parametrize("scale", [30, 1e3])
def test_numbers_that_are_far_from_the_profile_never_fail(kind, dtype, scale):
    """They take escapes, and then larger steps; and never more than the most."""
    section = replace(SECTION, kind=kind, dtype=dtype)
    codec = get_codec("klt-5x", profiles.HEAD_DIM, FACTS)
    x, positions = far(section, scale)
    codes = encoded(codec, x, section, positions)
    back = codec.decode(codes, section, positions)
    assert codes.size <= codec.max_nbytes(section)
    in_floats = codec.decode(codes, replace(section, dtype=Dtype.FLOAT32), positions)
    assert np.array_equal(back, as_numbers(in_floats.copy(), dtype))
    wrong = components(in_floats, section, positions) - components(as_floats(x), section, positions)
    assert 0 < np.abs(wrong).max() < 0.501 * (2.0 ** codes[1] + 1), "half of a doubled step, and half of a step"


def components(x, section, positions):
    """Keys and values in steps from the profile's mean, in float64, [rows, tokens, C]."""
    made = []
    for kind, part in zip(PARTS[section.kind], x.reshape(-1, *x.shape[-4:]), strict=True):
        is_key = kind is SectionKind.KEYS
        still = profiles.ROPE.turn_back(part.astype(float), positions) if is_key else part.astype(float)
        for layer, vectors in zip(PROFILE.layers, still, strict=True):
            basis = layer.keys if is_key else layer.values
            rows = vectors.transpose(1, 0, 2).reshape(section.tokens, -1)
            made.append((rows - basis.mean) @ basis.forward.astype(float) / basis.steps[section.codec])
    return np.stack(made)


def far(section, scale):
    x, positions = data(replace(section, dtype=Dtype.FLOAT32))
    return as_numbers(x * np.float32(scale), section.dtype), positions


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("kind", [SectionKind.KEYS, SectionKind.VALUES, SectionKind.BOTH])
@pytest.mark.parametrize("tokens", [1, 12, 16, 128])
def test_a_section_takes_what_is_expected_and_never_much_more(name, kind, tokens):
    """The bound is a third above what is expected; so is what is reserved for a block."""
    section = replace(SECTION, kind=kind, codec=name, tokens=tokens)
    codec = get_codec(name, profiles.HEAD_DIM, FACTS)
    expected, most = codec.expected_nbytes(section), codec.max_nbytes(section)
    assert most == -(-expected * 27 // 20)
    sizes = [encoded(codec, *_swap(data(section, seed), section)).size for seed in range(8)]
    assert np.mean(sizes) == pytest.approx(expected, rel=0.12)
    assert max(sizes) <= most


@pytest.mark.parametrize("bad", [0x7FC0, 0x7F80, 0xFF80])
def test_what_is_not_finite_is_refused(bad):
    codec = get_codec("klt-8x", profiles.HEAD_DIM, FACTS)
    x, positions = data(SECTION)
    x[1, 0, 5, 3] = bad
    with pytest.raises(NonFiniteError, match="vector 37 holds a NaN or an infinity") as caught:
        encoded(codec, x, SECTION, positions)
    assert caught.value.index == 37


@settings(deadline=None)
@given(st.data())
def test_damaged_codes_are_refused_or_are_numbers_of_the_shape(data_):
    codec = get_codec("klt-8x", profiles.HEAD_DIM, FACTS)
    section = replace(SECTION, kind=SectionKind.BOTH, codec="klt-8x")
    x, positions = data(section) if data_.draw(st.booleans()) else far(section, 1e3)
    codes = encoded(codec, x, section, positions)
    for _ in range(data_.draw(st.integers(1, 4))):
        codes[data_.draw(st.integers(0, codes.size - 1))] ^= 1 << data_.draw(st.integers(0, 7))
    codes = codes[: data_.draw(st.integers(0, codes.size)) if data_.draw(st.booleans()) else codes.size]
    try:
        back = codec.decode(codes, section, positions)
    except CodecError as refused:
        assert str(refused).endswith(".")  # noqa: PT017 either is right
    else:
        assert (back.shape, back.dtype) == (x.shape, x.dtype)


def test_lengths_that_cannot_be():
    codec = get_codec("klt-5x", profiles.HEAD_DIM, FACTS)
    x, positions = data(SECTION)
    codes = encoded(codec, x, SECTION, positions)
    for wrong in (codes[:3], codes[:20], codes[:-1], np.zeros(codec.max_nbytes(SECTION) + 1, np.uint8)):
        with pytest.raises(SizeError, match="bytes are not"):
            codec.decode(wrong, SECTION, positions)


@pytest.mark.parametrize(
    "change",
    [{"layers": 4}, {"first_layer": 1}, {"heads": 3}, {"kind": SectionKind.STATE}, {"head_dim": 64, "heads": 1}],
)
def test_a_section_that_the_profile_is_not_of(change):
    codec = get_codec("klt-5x", profiles.HEAD_DIM, FACTS)
    section = replace(SECTION, **change)
    with pytest.raises(SizeError, match="is not of the profile of made-up"):
        codec.decode(np.array([1, 0, 0, 0], np.uint8), section, np.arange(TOKENS))


def test_names():
    assert [name for name in codec_names() if needs_profile(name)] == list(PRESETS)
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


def test_a_block_with_the_first_tokens_exact():
    """As the cold store has them; and with another profile the fingerprint is another, which is a miss."""
    shape = BlockShape(profiles.LAYERS, profiles.HEADS, TOKENS, profiles.HEAD_DIM)
    mark = bytes.fromhex(PROFILE.digest)[:16]
    keys, values, _ = profiles.kv(TOKENS, seed=3)
    keys, values = (as_numbers(x.copy(), Dtype.BFLOAT16) for x in (keys, values))
    form = BlockFormat("klt-8x", shape, mark, facts=FACTS)
    block = form.encode(keys, values, key=b"k", first_token=0, exact=4)
    assert block.size < form.max_nbytes(4)
    assert block.size == pytest.approx(form.expected_nbytes(4), rel=0.12)
    back = form.decode(block, key=b"k")
    for x, y in zip((keys, values), back, strict=True):
        assert np.array_equal(x[:, :, :4], y[:, :, :4])
        assert not np.array_equal(x[:, :, 4:], y[:, :, 4:])
    other = profiles.built(512)
    wrong = BlockFormat("klt-8x", shape, bytes.fromhex(other.digest)[:16], facts=ModelFacts(profiles.ROPE, other))
    with pytest.raises(WireError, match="fingerprint"):
        wrong.decode(block, key=b"k")
