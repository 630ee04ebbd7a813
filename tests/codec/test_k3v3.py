"""The 3-bit Lloyd-Max codec: its format, accuracy and edges."""

from dataclasses import replace

import numpy as np
import pytest
import xxhash
from kv import sums

from manthan.codec import NonFiniteError, get_codec
from manthan.codec.base import Dtype, Section, SectionKind
from manthan.codec.errors import SizeError
from manthan.codec.k3v3 import quantizer
from manthan.codec.tables.rotation import block_sizes, sign

HEAD_DIMS = [32, 40, 64, 80, 96, 128, 192, 256, 512]
LARGEST = float.fromhex("0x1.fep127")


def section_of(x, dtype=Dtype.FLOAT32, kind=SectionKind.KEYS):
    return Section(kind, "k3v3", 1, len(x), 1, x.shape[-1], dtype)


def encoded(x, section):
    codec = get_codec("k3v3", section.head_dim)
    out = np.full(codec.max_nbytes(section), 255, np.uint8)
    assert codec.encode(x.reshape(section.shape), section, np.arange(section.tokens), out) == len(out)
    return out


def decoded(codes, section):
    return get_codec("k3v3", section.head_dim).decode(codes, section, np.arange(section.tokens))


def roundtrip(x, dtype=Dtype.FLOAT32):
    section = section_of(x, dtype)
    return decoded(encoded(x, section), section).reshape(x.shape)


def test_the_quantizer_is_the_one_that_max_printed():
    levels, thresholds = quantizer()
    assert levels == pytest.approx([0.2451, 0.7560, 1.3439, 2.1520], abs=1e-4)
    assert thresholds == pytest.approx([0.5006, 1.0500, 1.7480], abs=1e-4)


@pytest.mark.parametrize("head_dim", [96, 128])
def test_decoding_follows_the_format(head_dim):
    """Against a decoder written from the format's description alone, in float64."""
    x = np.random.default_rng(0).standard_normal((21, head_dim)).astype(np.float32)
    codes = encoded(x, section_of(x))
    scales = (codes[: 2 * 21].view("<u2").astype(np.uint32) << 16).view(np.float32)
    planes = codes[48 : 48 + 21 * 3 * head_dim // 8].reshape(21, 3, head_dim // 8)
    digits = np.unpackbits(planes, axis=2, bitorder="little").astype(int)
    expected = (-1.0) ** digits[:, 0] * quantizer().levels[2 * digits[:, 1] + digits[:, 2]]
    start = 0
    for size in block_sizes(head_dim):
        parity = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
        part = slice(start, start + size)
        expected[:, part] = expected[:, part] @ np.array(parity) / np.sqrt(size)
        start += size
    expected *= np.array([sign(i) for i in range(head_dim)]) * scales[:, None]
    assert decoded(codes, section_of(x)).reshape(21, -1) == pytest.approx(expected, abs=1e-5)


GOLDEN = {
    64: ["965ba360aaf8387f", "ebc812f46658edac"],
    80: ["6f9d4e7b6aedd146", "01f6a7d545cea1cd"],
    128: ["5d8f7c01b3e37526", "4d8ad55e145ce018"],
    256: ["418a451e78d1e5b5", "fcba471fa61997d1"],
}


@pytest.mark.parametrize("head_dim", GOLDEN)
def test_the_format_has_not_changed(head_dim):
    """Blocks in a store outlive the process that wrote them: a change of these needs a new codec name."""
    x = sums((100, head_dim)) * (1 + np.arange(head_dim) % 16 // 15 * 8).astype(np.float32)
    section = section_of(x, Dtype.BFLOAT16, SectionKind.BOTH)
    both = (np.stack([x, x]).view(np.uint32) >> 16).astype(np.uint16)
    exact = replace(section, dtype=Dtype.FLOAT32)
    codes = encoded(np.stack([x, x]), exact)
    found = xxhash.xxh3_64_hexdigest(codes.tobytes()), xxhash.xxh3_64_hexdigest(decoded(codes, section).tobytes())
    assert list(found) == GOLDEN[head_dim]
    assert decoded(encoded(both, section), section).dtype == np.uint16


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_edges_stay_finite(head_dim, vectors):
    x = vectors.edges(head_dim)
    bf16 = vectors.to_bf16(np.clip(x, -LARGEST, LARGEST))
    for y in (roundtrip(x), vectors.from_bf16(roundtrip(bf16, Dtype.BFLOAT16))):
        assert np.isfinite(y).all()
        assert np.abs(y).max() <= LARGEST


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_encoding_refuses_what_is_not_finite(value):
    x = np.ones((50, 128), np.float32)
    x[5, 127], x[-1, 0] = value, np.inf
    with pytest.raises(NonFiniteError, match="vector 5 holds a NaN or an infinity") as refusal:
        encoded(x, section_of(x))
    assert refusal.value.index == 5


@pytest.mark.parametrize("scale", [0x7F80, 0xFF80, 0x7FC1])
def test_decoding_refuses_a_scale_that_is_not_finite(scale):
    x = np.ones((50, 64), np.float32)
    codes = encoded(x, section_of(x))
    codes[:100].view("<u2")[39] = scale
    with pytest.raises(NonFiniteError, match="the scale of vector 39 is not finite"):
        decoded(codes, section_of(x))
    with pytest.raises(SizeError, match="bytes are not the codes of"):
        decoded(codes[:-16], section_of(x))
