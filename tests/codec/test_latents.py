"""Blocks of latents (MLA): RoPE's part exact, latents coded, and nothing else read."""

from dataclasses import replace

import numpy as np
import pytest
from kv import packed

from manthan.codec import wire
from manthan.codec.base import Dtype, SectionKind
from manthan.codec.block import BlockFormat, BlockShape, piece_dim, sections
from manthan.codec.cpu.numbers import as_floats
from manthan.codec.errors import HeadDimError, ProfileError, ShapeError, SizeError
from manthan.codec.fidelity import Sample, measure

PRINT, KEY = bytes(range(16)), b"k" * 32
SHAPE = BlockShape(layers=3, heads=1, tokens=16, head_dim=64, latent=512)
NOISE = 0.0125
"""Of latents, in energy, beside what they differ in: of a codec of about 4 bits."""
NOISE_OF_3_BITS = 0.039
"""Of the quantizer of Lloyd and Max it is 0.0345 for normal numbers."""


def numbers(vectors, shape=SHAPE, bias=0.0, seed=0, blocks=1):
    """RoPE's part and latents of one length, as behind an RMS norm, in pieces."""
    rng = np.random.default_rng(seed)
    tokens = blocks * shape.tokens
    latents = rng.standard_normal((shape.layers, tokens, shape.latent)) + bias * rng.standard_normal(shape.latent)
    latents /= np.sqrt(np.square(latents).mean(axis=2, keepdims=True))
    pieces = latents.reshape(shape.layers, tokens, -1, shape.value_numbers[-1]).swapaxes(1, 2)
    turned = rng.standard_normal((shape.layers, 1, tokens, shape.head_dim))
    both = (x.astype(np.float32) for x in (turned, pieces))
    return tuple(vectors.to_bf16(x) if shape.dtype is Dtype.BFLOAT16 else x.astype(shape.dtype.numpy) for x in both)


def noise_of(x, back):
    """Beside what tokens differ in; one alone differs from none."""
    x, back = as_floats(np.ascontiguousarray(x)), as_floats(np.ascontiguousarray(back))
    mean = x.mean(axis=2, keepdims=True) if x.shape[2] > 1 else 0
    return np.square(x - back).sum() / np.square(x - mean).sum()


@pytest.mark.parametrize("exact", range(SHAPE.tokens + 1))
def test_every_number_is_in_one_section(exact):
    covered = {SectionKind.KEYS: np.zeros(SHAPE.numbers, int), SectionKind.LATENT: np.zeros(SHAPE.value_numbers, int)}
    for section in sections("wht-5x", SHAPE, exact):
        tokens = slice(section.first_token, section.first_token + section.tokens)
        covered[section.kind][: section.layers, : section.heads, tokens, : section.head_dim] += 1
        is_coded = section.kind is SectionKind.LATENT and section.first_token >= exact
        assert section.codec == ("wht-5x" if is_coded else "exact")
    assert all((count == 1).all() for count in covered.values())


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32])
@pytest.mark.parametrize("exact", [0, 1, 4, 15, 16])
@pytest.mark.parametrize("name", ["wht-5x", "k3v3", "exact"])
def test_a_block_comes_back(name, exact, dtype, vectors):
    shape = replace(SHAPE, dtype=dtype)
    form, (turned, latents) = BlockFormat(name, shape, PRINT, group=3), numbers(vectors, shape)
    buf = form.encode(turned, latents, key=KEY, first_token=160, exact=exact)
    assert len(buf) <= form.max_nbytes(exact)
    header = wire.parse(buf, key=KEY, fingerprint=PRINT, group=3).header
    assert form.exact_of(header) == (exact or (shape.tokens if name == "exact" else 0))
    back_turned, back = form.decode(buf.tobytes(), key=KEY)
    assert (back.shape, back.dtype) == (latents.shape, latents.dtype)
    assert np.array_equal(back_turned, turned)
    assert np.array_equal(back[:, :, :exact], latents[:, :, :exact])
    if name == "exact":
        assert np.array_equal(back, latents)
    elif exact < shape.tokens:
        most = NOISE_OF_3_BITS if name == "k3v3" else NOISE if shape.tokens - exact > 1 else 2 * NOISE
        assert 0 < noise_of(latents[:, :, exact:], back[:, :, exact:]) < most


def test_a_token_takes_what_the_command_says():
    """DeepSeek-V3: 61 layers, 1,152 bytes each in bf16; see docs/codec.md."""
    shape = BlockShape(61, 1, 16, 64, latent=512)
    token = BlockFormat("wht-5x", shape, PRINT).expected_nbytes(0) / 16
    assert 61 * 1152 / token == pytest.approx(2.96, abs=0.01)


def forged(change, exact=4):
    """A block in good order with other sections."""
    form = BlockFormat("wht-5x", SHAPE, PRINT)
    header = form.header(KEY, 0, exact)
    header = replace(header, sections=tuple(change(list(header.sections))))
    return packed(header, [np.zeros(64, np.uint8)] * len(header.sections))


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found[1:],
        lambda found: found[:2],
        lambda found: [found[0], *(replace(section, kind=SectionKind.VALUES) for section in found[1:])],
        lambda found: [replace(found[0], head_dim=32), *found[1:]],
        lambda found: [*found[:2], replace(found[2], heads=2, head_dim=256)],
        lambda found: list(sections("wht-5x", replace(SHAPE, latent=0), 4)),
    ],
    ids=["no keys", "no codes", "values", "fewer numbers", "other pieces", "keys and values"],
)
def test_other_sections_are_refused(change):
    with pytest.raises(SizeError, match="are not a block of"):
        BlockFormat("wht-5x", SHAPE, PRINT).decode(forged(change), key=KEY)


def test_keys_and_values_are_not_taken_for_latents(vectors):
    turned, latents = numbers(vectors)
    with pytest.raises(ShapeError, match="are not a block of"):
        BlockFormat("wht-5x", SHAPE, PRINT).encode(turned, turned, key=KEY, first_token=0, exact=0)
    with pytest.raises(ShapeError, match="are not a block of"):
        BlockFormat("wht-5x", replace(SHAPE, latent=0), PRINT).encode(turned, latents, key=KEY, first_token=0, exact=0)


@pytest.mark.parametrize(("latent", "piece"), [(512, 128), (256, 128), (384, 128), (320, 80), (64, 64), (96, 96)])
def test_pieces_are_as_large_as_they_may_be(latent, piece):
    assert piece_dim(latent) == piece
    assert replace(SHAPE, latent=latent).value_numbers == (3, latent // piece, 16, piece)


def test_a_latent_that_cannot_be_cut(vectors):
    with pytest.raises(HeadDimError, match=r"^a latent of 500 numbers is not supported"):
        BlockFormat("wht-5x", replace(SHAPE, latent=500), PRINT)


def test_calibrated_codecs_are_refused():
    with pytest.raises(
        ProfileError, match=r"^codec klt-8x is calibrated, and latents \(MLA\) take no profile: use wht"
    ):
        BlockFormat("klt-8x", SHAPE, PRINT)


# ---- the guard's measure


def measured(codec, both, blocks=8):
    shape = replace(SHAPE, layers=both[0].shape[0])
    at = [slice(n * 16, n * 16 + 16) for n in range(blocks)]
    samples = [Sample(both[0][:, :, some], both[1][:, :, some], some.start) for some in at]
    return measure(BlockFormat(codec, shape, PRINT), samples, None)


def test_a_bias_of_latents_is_what_tells_codecs_apart(vectors):
    both = numbers(vectors, bias=12.0, blocks=8)
    assert measured("wht-5x", both).is_faithful
    assert not measured("k3v3", both).is_faithful
    assert measured("k3v3", numbers(vectors, blocks=8)).is_faithful
