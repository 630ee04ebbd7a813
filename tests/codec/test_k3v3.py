"""The 3-bit Lloyd-Max codec: its format, quantizer and edges."""

import numpy as np
import pytest
from kv import as_floats, encoded, to_bf16

from manthan.codec import NonFiniteError, get_codec
from manthan.codec.base import Dtype, Section, SectionKind

LARGEST = float.fromhex("0x1.fep127")


def coded(x, dtype=Dtype.FLOAT32):
    """Codec, section and encoded bytes of vectors [n, head_dim]."""
    section = Section(SectionKind.KEYS, "k3v3", 1, len(x), 1, x.shape[-1], dtype)
    codec = get_codec("k3v3", section.head_dim)
    return codec, section, encoded(codec, x.reshape(section.shape), section, np.arange(len(x)))


def roundtrip(x, dtype=Dtype.FLOAT32):
    codec, section, codes = coded(x, dtype)
    return codec.decode(codes, section, np.arange(len(x))).reshape(x.shape)


def edges(head_dim):
    """[n, head_dim] float32, all finite: zeros, one-hot, denormal, huge and mixed magnitudes."""
    rng = np.random.default_rng(1)
    noise, eye = rng.standard_normal((4, head_dim)), np.eye(head_dim)[[0, 1, head_dim // 2, head_dim - 1]]
    largest = float.fromhex("0x1.fep127")
    signs = np.sign(noise)
    groups = [
        np.zeros((1, head_dim)),
        -np.zeros((1, head_dim)),
        eye,
        -eye * largest,
        signs * largest,
        signs * 2.0**-126,
        signs * 2.0**-133,
        noise * 1e-38,
        noise * 1e-44,
        noise * 1e37,
        np.ones((1, head_dim)),
        np.full((1, head_dim), largest),
        np.full((1, head_dim), np.finfo(np.float32).max),
        noise * np.exp(rng.uniform(-80, 80, (4, head_dim))),
        np.where(np.arange(head_dim) < head_dim // 2, largest, 1e-45)[None],
        np.where(np.arange(head_dim) < head_dim - 8, 1e-3, 1e-40)[None],
    ]
    return np.concatenate(groups).astype(np.float32)


@pytest.mark.parametrize("head_dim", [32, 40, 64, 80, 96, 128, 192, 256, 512])
def test_edges_stay_finite(head_dim):
    x = edges(head_dim)
    bf16 = to_bf16(np.clip(x, -LARGEST, LARGEST))
    for y in (roundtrip(x), as_floats(roundtrip(bf16, Dtype.BFLOAT16))):
        assert np.isfinite(y).all()
        assert np.abs(y).max() <= LARGEST


@pytest.mark.parametrize("scale", [0x7F80, 0xFF80, 0x7FC1])
def test_a_scale_that_is_not_finite_is_refused(scale):
    codec, section, codes = coded(np.ones((50, 64), np.float32))
    codes[:100].view("<u2")[39] = scale
    with pytest.raises(NonFiniteError, match="the scale of vector 39 is not finite"):
        codec.decode(codes, section, np.arange(50))
