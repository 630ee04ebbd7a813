"""Rules for every lossy codec: what comes back, sizes, and refusals of numbers and of encoded bytes."""

from dataclasses import replace

import numpy as np
import profiles
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from kv import encoded, integers, places_from, rope

from manthan.codec import CodecError, NonFiniteError, get_codec
from manthan.codec.base import Dtype, Section, SectionKind
from manthan.codec.cpu.klt import REFINEMENT
from manthan.codec.cpu.numbers import as_floats, as_numbers
from manthan.codec.errors import SizeError
from manthan.codec.model import ModelFacts

FACTS = ModelFacts(profiles.ROPE, profiles.built())
KEYS, VALUES, BOTH = SectionKind.KEYS, SectionKind.VALUES, SectionKind.BOTH
ERRORS = {
    ("wht-4x", KEYS): 0.0015,
    ("wht-4x", VALUES): 0.3,
    ("wht-5x", KEYS): 0.004,
    ("wht-5x", VALUES): 0.7,
    ("klt-5x", BOTH): 0.002,
    ("klt-8x", BOTH): 0.01,
    ("klt-12x", BOTH): 0.03,
    ("klt-20x", BOTH): 0.1,
    ("k3v3", KEYS): 0.15,
    ("k3v3", VALUES): 0.5,
}
"""Errors of keys and of values that have a mean of many deviations, in parts of their variance."""
each_codec = pytest.mark.parametrize(("name", "kind"), ERRORS)
each_dtype = pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32])


def sample(name, kind, dtype=Dtype.BFLOAT16, *, tokens=16, seed=99, scale=1):
    """Codec, numbers, section and positions."""
    keys, values, positions = profiles.kv(tokens, seed, 160)
    x = np.float32(scale) * {KEYS: keys, VALUES: values, BOTH: np.stack([keys, values])}[kind]
    section = Section(kind, name, profiles.LAYERS, tokens, profiles.HEADS, profiles.HEAD_DIM, dtype)
    return get_codec(name, profiles.HEAD_DIM, FACTS), as_numbers(x, dtype), section, positions


def parts(codec, x, section, positions):
    """Return the base's bytes, and the refinements."""
    out = np.full(2 * codec.max_nbytes(section), 255, np.uint8)
    nbytes, refinements = codec.encode_parts(x, section, positions, out)
    return out[:nbytes].copy(), refinements


@each_codec
@each_dtype
def test_numbers_come_back_within_the_codec_s_error_in_each_dtype(name, kind, dtype):
    codec, x, section, positions = sample(name, kind, dtype)
    codes = parts(codec, x, section, positions)
    back = codec.decode_parts(*codes, section, positions)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    in_floats = codec.decode_parts(*codes, replace(section, dtype=Dtype.FLOAT32), positions)
    assert np.array_equal(back, as_numbers(in_floats.copy(), dtype))
    exact = as_floats(x)
    wrong = np.square(in_floats - exact).mean() / np.square(exact - exact.mean(axis=-2, keepdims=True)).mean()
    assert 0 < wrong < ERRORS[name, kind]


@each_codec
@pytest.mark.parametrize("tokens", [1, 12, 16, 128])
def test_a_section_takes_about_the_expected_bytes_and_never_more_than_the_most(name, kind, tokens):
    codec, _, section, _ = sample(name, kind, tokens=tokens)
    expected, most = codec.expected_nbytes(section), codec.max_nbytes(section)
    coded = [parts(*sample(name, kind, tokens=tokens, seed=seed)) for seed in range(8)]
    sizes = [base.size + sum(body.size for body in bodies) for base, bodies in coded]
    if codec.levels > 1:  # the numbers are like those of the profile
        expected -= REFINEMENT * (1 + len(coded[0][1]))
        assert np.mean(sizes) == pytest.approx(expected, rel=0.12)
    else:
        assert most == (-(-expected * 27 // 20) if codec.varies else expected)
    assert max(sizes) <= most


@each_codec
@pytest.mark.parametrize("bad", [0x7FC0, 0x7F80, 0xFF80])
def test_numbers_that_are_not_finite_are_refused(name, kind, bad):
    codec, x, section, positions = sample(name, kind)
    of_keys = x.reshape(-1, *section.shape[-4:])[0]
    of_keys[1, 0, 5, 3] = of_keys[2, 1, 15, 31] = bad
    with pytest.raises(NonFiniteError, match="vector 37 holds a NaN"):
        parts(codec, x, section, positions)


@each_codec
def test_codes_of_impossible_lengths_are_refused(name, kind):
    codec, x, section, positions = sample(name, kind)
    codes, _ = parts(codec, x, section, positions)
    most = () if codec.levels > 1 else (np.zeros(codec.max_nbytes(section) + 1, np.uint8),)  # zeros are padding
    for wrong in (codes[:3], codes[:20], codes[:-1], *most):
        with pytest.raises(SizeError, match=r"bytes (are|do) not"):
            codec.decode(wrong, section, positions)


@each_codec
@settings(deadline=None)
@given(data=st.data())
def test_damaged_codes_are_refused_or_are_numbers_of_the_shape(name, kind, data):
    codec, x, section, positions = sample(name, kind, scale=data.draw(st.sampled_from([1, 1000])))
    codes, refinements = parts(codec, x, section, positions)
    for _ in range(data.draw(st.integers(1, 4))):
        part = data.draw(st.sampled_from([codes, *refinements]))
        part[data.draw(st.integers(0, part.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    codes = codes[: data.draw(st.integers(0, codes.size)) if data.draw(st.booleans()) else codes.size]
    try:
        back = codec.decode_parts(codes, refinements, section, positions)
    except CodecError as refused:
        assert str(refused).endswith(".")  # noqa: PT017 either is right
    else:
        assert (back.shape, back.dtype) == (x.shape, x.dtype)


GOLDEN = {
    ("wht-5x", 64): ["70da618314ca6324", "74b88bef76d358a3"],
    ("wht-5x", 80): ["1b0c976940bb0f33", "eb415aff7170c5a3"],
    ("wht-5x", 128): ["b8c3a55e39adc77e", "21554d04ce7f67af"],
    ("wht-5x", 256): ["18d3bf4741f5fcea", "109c4fd3ade57bcf"],
    ("k3v3", 64): ["3d86320062b121a8", "0648dc5b8b4af8bc"],
    ("k3v3", 80): ["c27fd3409bf00b5b", "dc440704caaf01af"],
    ("k3v3", 128): ["ad4fe163a9b2170d", "46637c098419135b"],
    ("k3v3", 256): ["739155cd0f6284a2", "a18583507ce1a75e"],
}


@pytest.mark.parametrize(("name", "head_dim"), GOLDEN)
def test_the_format_has_not_changed(name, head_dim):
    """Blocks in a store outlive the process that wrote them: a change of these needs a new codec name."""
    codec, made = get_codec(name, head_dim, ModelFacts(rope(head_dim))), [b"", b""]
    for kind, x in zip((SectionKind.KEYS, SectionKind.VALUES), integers((2, 2, 3, 16, head_dim)), strict=True):
        section = Section(kind, name, 2, 16, 3, head_dim)
        codes = encoded(codec, (x.view(np.uint32) >> 16).astype(np.uint16), section, places_from(48))
        made[0] += codes.tobytes()
        made[1] += codec.decode(codes, section, places_from(48)).tobytes()
    assert list(map(xxhash.xxh3_64_hexdigest, made)) == GOLDEN[name, head_dim]
