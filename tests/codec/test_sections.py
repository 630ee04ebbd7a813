"""Codecs of sections: the exact one, and those that take a section's vectors one by one."""

from dataclasses import replace

import numpy as np
import pytest

from manthan.codec import KindError, NonFiniteError, get_codec
from manthan.codec.base import Dtype, Section, SectionKind
from manthan.codec.cpu.vectors import FLOAT16_MAX
from manthan.codec.errors import SizeError
from manthan.codec.registry import SPECS

SECTION = Section(SectionKind.KEYS, "k3v3", 3, 5, 2, 80)
POSITIONS = np.arange(5, dtype=np.int64)


def bits(section, seed=0):
    """Any numbers, also those that are none."""
    rng = np.random.default_rng(seed)
    nbytes = section.dtype.numpy.itemsize * int(np.prod(section.shape))
    return rng.integers(0, 256, nbytes, np.uint8).view(section.dtype.numpy).reshape(section.shape)


def normal(section, vectors, seed=0):
    x = np.random.default_rng(seed).standard_normal(section.shape, np.float32)
    return vectors.to_bf16(x) if section.dtype is Dtype.BFLOAT16 else x.astype(section.dtype.numpy)


def encoded(codec, x, section):
    out = np.full(codec.max_nbytes(section), 255, np.uint8)
    return out[: codec.encode(x, section, POSITIONS, out)]


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("kind", SectionKind)
def test_exact_is_bit_for_bit(kind, dtype):
    section = replace(SECTION, kind=kind, codec="exact", dtype=dtype)
    codec, x = get_codec("exact", 80), bits(section)
    codes = encoded(codec, x, section)
    assert codes.size == x.nbytes
    back = codec.decode(codes, section, POSITIONS)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    assert back.tobytes() == x.tobytes()


def test_exact_takes_what_is_not_in_one_piece():
    section = replace(SECTION, codec="exact")
    codec, x = get_codec("exact", 80), bits(replace(section, tokens=8))[:, :, 2:7]
    assert np.array_equal(codec.decode(encoded(codec, x, section), section, POSITIONS), x)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32])
def test_vectors_are_encoded_in_their_order(name, dtype, vectors):
    codec, by_vectors = get_codec(name, 80), get_codec(name, 80)
    for kind, kinds in (("KEYS", ["key"]), ("VALUES", ["value"]), ("BOTH", ["key", "value"])):
        section = replace(SECTION, kind=SectionKind[kind], codec=name, dtype=dtype)
        x = normal(section, vectors)
        wide = (x if dtype is Dtype.BFLOAT16 else x.astype(np.float32)).reshape(len(kinds), -1, 80)
        codes = [by_vectors.encode(part, kind) for part, kind in zip(wide, kinds, strict=True)]
        found = encoded(codec, x, section)
        assert np.array_equal(found, np.concatenate(codes))
        right = [
            by_vectors.decode(part, 30, kind, np.uint16 if dtype is Dtype.BFLOAT16 else np.float32)
            for part, kind in zip(codes, kinds, strict=True)
        ]
        back = codec.decode(found, section, POSITIONS)
        assert back.dtype == x.dtype
        assert np.array_equal(back, np.concatenate(right).reshape(section.shape).astype(x.dtype))


def test_float16_stays_within_its_range():
    section = replace(SECTION, dtype=Dtype.FLOAT16)
    codec, x = get_codec("k3v3", 80), np.full(section.shape, FLOAT16_MAX, np.float16)
    x[..., ::7] = -FLOAT16_MAX
    back = codec.decode(encoded(codec, x, section), section, POSITIONS)
    assert np.isfinite(back).all()
    assert back.max() == FLOAT16_MAX


@pytest.mark.parametrize("value", [0x7F80, 0xFF80, 0x7FC0])
def test_what_is_not_finite_is_refused_by_codes_and_kept_by_exact(value):
    x = np.zeros(SECTION.shape, np.uint16)
    x[1, 1, 2, 7] = value
    codec = get_codec("k3v3", 80)
    with pytest.raises(NonFiniteError) as refusal:
        encoded(codec, x, SECTION)
    assert refusal.value.index == 1 * 10 + 1 * 5 + 2
    exact, section = get_codec("exact", 80), replace(SECTION, codec="exact")
    assert np.array_equal(exact.decode(encoded(exact, x, section), section, POSITIONS), x)


@pytest.mark.parametrize("name", ["exact", "k3v3"])
@pytest.mark.parametrize("change", [-16, -1, 1, 16])
def test_codes_of_another_length_are_refused(name, change):
    section = replace(SECTION, codec=name)
    codec = get_codec(name, 80)
    codes = np.zeros(codec.max_nbytes(section) + change, np.uint8)
    with pytest.raises(SizeError, match=f"{codes.size} bytes are not"):
        codec.decode(codes, section, POSITIONS)


@pytest.mark.parametrize("kind", [SectionKind.STATE, SectionKind.RAW])
def test_what_has_no_vectors_has_no_codes_of_vectors(kind):
    with pytest.raises(KindError, match=f"kind {kind.name} holds no vectors"):
        get_codec("k3v3", 80).max_nbytes(replace(SECTION, kind=kind))
