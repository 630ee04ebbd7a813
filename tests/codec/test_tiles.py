"""Variance-normalized tiles: the format, what they are for, refusals."""

from dataclasses import replace

import numpy as np
import pytest
import xxhash

from manthan.codec import BlockFormat, BlockShape, NonFiniteError, UnknownCodecError, get_codec, section_codec
from manthan.codec.base import Dtype, Section, SectionKind
from manthan.codec.cpu.tiles import Places, TileSections
from manthan.codec.errors import HeadDimError, SizeError
from manthan.codec.registry import TILED
from manthan.codec.tables.constants import tables

NAME = "k4v2-tiles"
LAYERS, HEADS, TOKENS = 2, 3, 32
DTYPES = [Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32]
KINDS = [SectionKind.KEYS, SectionKind.VALUES]


def section_of(kind=SectionKind.KEYS, head_dim=64, tokens=TOKENS, dtype=Dtype.FLOAT32):
    return Section(kind, NAME, LAYERS, tokens, HEADS, head_dim, dtype)


def noise(section, seed=0):
    return np.random.default_rng(seed).standard_normal(section.shape, np.float32)


def places_of(section):
    return np.arange(section.tokens, dtype=np.int64)


def encoded(x, section):
    codec = TileSections(TILED[NAME], section.head_dim)
    out = np.full(codec.max_nbytes(section), 255, np.uint8)
    assert codec.encode(x, section, places_of(section), out) == out.size
    return out


def decoded(codes, section):
    return TileSections(TILED[NAME], section.head_dim).decode(codes, section, places_of(section))


def roundtrip(x, section):
    return decoded(encoded(x, section), section)


def error(x, y):
    """Relative, of the numbers' squares."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    return ((x - y) ** 2).sum() / (x**2).sum()


def in_cache(x, dtype, vectors):
    return vectors.to_bf16(x) if dtype is Dtype.BFLOAT16 else x.astype(dtype.numpy)


def as_floats(x, vectors):
    return vectors.from_bf16(x) if x.dtype == np.uint16 else x.astype(np.float32)


# ---- the format


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_decoding_follows_the_format(head_dim, kind):
    """Against a decoder written from the format's description alone, in float64."""
    section = section_of(kind, head_dim, tokens=5)
    codes = encoded(noise(section) * 300, section)
    tiles, width = LAYERS * HEADS, head_dim // 8
    bits, lines, columns = (4, head_dim, 5) if kind is SectionKind.KEYS else (2, 5, head_dim)
    at, parts = 0, []
    for size in (tiles, 2 * tiles * (2 * lines + columns), tiles * 5 * bits * width):
        parts.append(codes[at : at + size])
        at += -(-size // 16) * 16
    assert at == codes.size
    kept = (parts[1].view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(tiles, -1).astype(np.float64)
    expected = np.zeros((tiles, 5, head_dim))
    hadamard = np.zeros((head_dim, head_dim))
    for start, end in ((0, 64), (64, head_dim)):  # 80 = 64 + 16
        parity = [[(i & j).bit_count() % 2 for j in range(end - start)] for i in range(end - start)]
        hadamard[start:end, start:end] = 1 - 2 * np.array(parity).reshape(end - start, end - start)
    for tile in range(tiles):
        starts, steps, scales = np.split(kept[tile], [lines, 2 * lines])
        for t in range(5):
            planes = parts[2].reshape(tiles, 5, bits, width)[tile, t]
            rows = np.unpackbits(planes, axis=1, bitorder="little")
            q = np.array([int("".join(map(str, column)), 2) for column in rows.T])
            of_keys = kind is SectionKind.KEYS
            y = (q * steps + starts) * scales[t] if of_keys else (q * steps[t] + starts[t]) * scales
            power = 2.0 ** (127 - int(parts[0][tile]))
            expected[tile, t] = hadamard @ y * tables(head_dim, 4, True).weights * power
    found = decoded(codes, section).reshape(expected.shape)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-2)


def integers(shape):
    """float32, exact and the same in any language: sums of bytes of splitmix64, and a bias in every eighth channel."""
    with np.errstate(over="ignore"):
        z = (np.arange(np.prod(shape), dtype=np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    four = z.view(np.uint8).reshape(*shape, 8)[..., 4:].astype(np.float32)
    return four.sum(-1) - 510 + (np.arange(shape[-1]) % 8 == 3).astype(np.float32) * 3000


GOLDEN = {
    64: ["c1f7d80967facbfe", "ba87226fdff55841"],
    80: ["673a88b8d2f900ee", "6ebcc555191be068"],
    128: ["b6cda206da7737cd", "f814568befb433b8"],
    256: ["304d38c89881c45d", "3f319210b24c4b47"],
}


@pytest.mark.parametrize("head_dim", GOLDEN)
def test_the_format_has_not_changed(head_dim):
    """Blocks in a store outlive the process that wrote them: a change of these needs a new codec name."""
    section = section_of(SectionKind.BOTH, head_dim, dtype=Dtype.BFLOAT16)
    x = (integers(section.shape).view(np.uint32) >> 16).astype(np.uint16)
    codes = encoded(x, section)
    assert [xxhash.xxh3_64_hexdigest(a.tobytes()) for a in (codes, decoded(codes, section))] == GOLDEN[head_dim]


@pytest.mark.parametrize(("tokens", "head_dim", "ratio"), [(128, 64, 4.5), (128, 128, 4.7), (16, 64, 3.27)])
def test_what_tiles_save(tokens, head_dim, ratio):
    """bf16 bytes over those of a block, header and entries counted in: small tiles save little."""
    shape = BlockShape(30, 3, tokens, head_dim)
    found = 2 * 2 * 30 * 3 * tokens * head_dim / BlockFormat(NAME, shape, bytes(16)).max_nbytes(0)
    assert found == pytest.approx(ratio, rel=0.02)


def test_a_section_of_both_kinds_is_keys_and_values():
    both = section_of(SectionKind.BOTH)
    x = noise(both)
    parts = [encoded(part, replace(both, kind=kind)) for part, kind in zip(x, KINDS, strict=True)]
    assert np.array_equal(encoded(x, both), np.concatenate(parts))


@pytest.mark.parametrize("kind", KINDS)
def test_a_tiles_codes_do_not_depend_on_others(kind):
    section = replace(section_of(kind), layers=5)  # more tiles than are worked on at once
    one = replace(section, layers=1, heads=1)
    x = noise(section)
    assert np.array_equal(roundtrip(x, section)[4:, 2:], roundtrip(x[4:, 2:], one))


# ---- what it is for


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 13, 16, 128])
@pytest.mark.parametrize("head_dim", [32, 40, 64, 96, 128, 256, 512])
def test_a_round_trip_loses_little(head_dim, tokens, dtype, vectors):
    for kind, most in ((SectionKind.KEYS, 0.013), (SectionKind.VALUES, 0.16)):
        section = section_of(kind, head_dim, tokens, dtype)
        x = in_cache(noise(section), dtype, vectors)
        y = roundtrip(x, section)
        assert (y.shape, y.dtype) == (section.shape, dtype.numpy)
        assert error(as_floats(x, vectors), as_floats(y, vectors)) < most


def test_channels_that_all_tokens_have_large_do_no_harm():
    """What a bias does to keys that RoPE hardly turns; single vectors lose dozens of times more by it."""
    section = section_of(tokens=128)
    x = noise(section)
    plain = roundtrip(x, section) - x
    x[..., 29:32] += 40
    x[..., 61:] -= 28
    biased = roundtrip(x, section) - x
    assert (biased**2).sum() < 1.5 * (plain**2).sum()
    alone = section_codec("k4v2", 64)
    codes = np.zeros(alone.max_nbytes(section), np.uint8)
    alone.encode(x, section, places_of(section), codes)
    assert ((alone.decode(codes, section, places_of(section)) - x) ** 2).sum() > 20 * (biased**2).sum()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_may_be_of_any_length(kind):
    """Evened out: a token a thousand times shorter than others keeps its direction."""
    section = section_of(kind, tokens=16)
    lengths = (2.0 ** -np.arange(16)).astype(np.float32)
    x = noise(section) * lengths[:, None]
    y = roundtrip(x, section)
    assert max(error(x[:, :, t], y[:, :, t]) for t in range(10)) < 0.2


@pytest.mark.parametrize("size", [1e-37, 1e-20, 1.0, 1e20, 1e37])
def test_numbers_of_any_size(size):
    section = section_of(SectionKind.BOTH)
    x = noise(section) / np.float32(6)
    keys, values = roundtrip(x * np.float32(size), section) / np.float32(size)
    assert error(x[0], keys) < 0.01
    assert error(x[1], values) < 0.14


def test_edges_come_back_finite(vectors):
    """Zeros, one-hot, denormal, mixed magnitudes."""
    x = vectors.edges(64)
    for kind in KINDS:
        for tokens in (1, 4, len(x)):
            section = Section(kind, NAME, len(x) // tokens, tokens, 1, 64, Dtype.FLOAT32)
            assert np.isfinite(roundtrip(x[: len(x) // tokens * tokens].reshape(section.shape), section)).all()


def test_equal_numbers_come_back():
    section = section_of(SectionKind.BOTH)
    for x in (np.zeros(section.shape, np.float32), -np.zeros(section.shape, np.float32)):
        assert not roundtrip(x, section).view(np.uint32).any()
    x = np.full(section.shape, 3.0, np.float32)
    assert roundtrip(x, section) == pytest.approx(x, rel=0.05)


def test_float16_stays_within_its_range():
    section = section_of(SectionKind.BOTH, dtype=Dtype.FLOAT16)
    x = np.full(section.shape, 65504, np.float16)
    x[..., ::7] = -65504
    assert np.isfinite(roundtrip(x, section)).all()


# ---- refusals


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT32])
def test_numbers_that_are_not_finite_are_refused(value, dtype, vectors):
    section = replace(section_of(dtype=dtype), layers=4)
    x = in_cache(noise(section), dtype, vectors)
    bits = np.array([value], np.float32).view(np.uint32)[0] >> 16
    x[3, 2, 3, 5] = bits if dtype is Dtype.BFLOAT16 else value
    with pytest.raises(NonFiniteError, match="vector 355 holds a NaN or an infinity") as refusal:
        encoded(x, section)
    assert refusal.value.index == 11 * TOKENS + 3


@pytest.mark.parametrize("kind", KINDS)
def test_scales_that_no_encoder_writes_are_refused(kind):
    section = section_of(kind)
    codes = encoded(noise(section), section)
    places = Places.of(TILED[NAME], section.vector_kinds[0], LAYERS * HEADS, TOKENS, 64)
    for at, value in ((places.exponents.start + 2, 255), (places.exponents.start + 2, 7)):
        damaged = codes.copy()
        damaged[at] = value
        with pytest.raises(NonFiniteError, match="a scale of tile 2 is not finite, or too large"):
            decoded(damaged, section)
    for part in range(2 * places.lines + places.columns):
        damaged = codes.copy()
        damaged[places.scales].view("<u2").reshape(LAYERS * HEADS, -1)[4, part] |= 0x7F80
        with pytest.raises(NonFiniteError, match="a scale of tile 4 is not finite, or too large"):
            decoded(damaged, section)


@pytest.mark.parametrize("kind", KINDS)
def test_any_other_codes_come_back_finite(kind):
    """Also those that no encoder makes, at the largest exponent and scales that pass."""
    section, rng = section_of(kind), np.random.default_rng(0)
    places = Places.of(TILED[NAME], section.vector_kinds[0], LAYERS * HEADS, TOKENS, 64)
    for exponent in (8, 127, 254):
        codes = rng.integers(0, 256, places.nbytes, np.uint8)
        codes[places.exponents] = exponent
        scales = codes[places.scales].view("<u2")
        scales[:] = rng.integers(0, (127 + 40) << 7, scales.size) | rng.integers(0, 2, scales.size) << 15
        assert np.isfinite(decoded(codes, section)).all()


def test_codes_of_another_length_are_refused():
    section = section_of()
    codes = encoded(noise(section), section)
    for damaged in (codes[:-16], np.concatenate([codes, codes[:16]])):
        with pytest.raises(SizeError, match="bytes are not the codes of"):
            decoded(damaged, section)


def test_it_is_no_codec_of_single_vectors():
    with pytest.raises(UnknownCodecError, match=f"'{NAME}' is not one of single vectors: section_codec makes it"):
        get_codec(NAME, 64)
    with pytest.raises(HeadDimError):
        section_codec(NAME, 60)
