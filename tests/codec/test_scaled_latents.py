"""Latents in fp8 with scales of their own: coded in one unit, their scales and RoPE's part as they were."""

import device_blocks
import numpy as np
import pytest
import scaled_latents
from device_blocks import BLOCKS
from fake_cuda import FormatCodec
from scaled_latents import V4, V32

from manthan.benchmarks import made_up
from manthan.codec import wire
from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat, BlockShape, Scales
from manthan.codec.cpu.numbers import as_floats, as_numbers
from manthan.codec.fidelity import Sample, measure
from manthan.codec.model import NO_FACTS, ModelFacts

KEY, LAYERS, TOKENS = b"k" * 32, 3, 64
PROFILE = made_up.profile(LAYERS, 4, 128, None, latent=512)


def format_of(codec: str, scales: Scales | None = V32) -> BlockFormat:
    shape = BlockShape(LAYERS, 1, TOKENS, 144, Dtype.FLOAT8_E4M3, 512, scales=scales)
    return BlockFormat(codec, shape, b"f" * 16, facts=ModelFacts(profile=PROFILE) if "klt" in codec else NO_FACTS)


def arrays_of(pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """RoPE's part with the scales, and the latents' bytes in pieces."""
    rows = pages.reshape(LAYERS, TOKENS, V32.row)
    return rows[:, None, :, 512:].copy(), rows[..., :512].reshape(LAYERS, TOKENS, 4, 128).swapaxes(1, 2).copy()


def numbers_of(turned: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """What such arrays stand for, read by the tests' own code."""
    rows = np.concatenate([codes.swapaxes(1, 2).reshape(LAYERS, TOKENS, 512), turned[:, 0]], -1)
    return scaled_latents.read(rows.reshape(LAYERS, -1), TOKENS)[0]


def pages(codec: str = "wht-5x") -> np.ndarray:
    x, turned = scaled_latents.made_up((LAYERS, TOKENS))
    if "klt" in codec:
        x = made_up.grouped_kv(PROFILE, TOKENS)[0].swapaxes(1, 2).reshape(LAYERS, TOKENS, 512)
    return scaled_latents.page(x, turned)


@pytest.mark.parametrize("exact", [0, 4])
@pytest.mark.parametrize(("codec", "most"), [("wht-5x", 0.012), ("wht-4x", 0.005), ("klt-8x", 0.02), ("k3v3", 0.04)])
def test_numbers_come_back_near_with_their_own_scales(codec: str, most: float, exact: int) -> None:
    form, arrays = format_of(codec), arrays_of(pages(codec))
    back = form.decode(form.encode(*arrays, key=KEY, first_token=64, exact=exact), key=KEY)
    assert np.array_equal(arrays[0], back[0])
    assert np.array_equal(arrays[1][:, :, :exact], back[1][:, :, :exact])
    was, now = numbers_of(*arrays), numbers_of(*back)
    assert 0 < np.square(was - now).sum() < most * np.square(was).sum()


@pytest.mark.parametrize("codec", ["wht-5x", "klt-8x"])
def test_a_common_unit_loses_less_than_the_bytes_own_numbers(codec: str) -> None:
    """Their scales differ from token to token and from piece to piece."""
    found = []
    for scales in (V32, None):
        form, arrays = format_of(codec, scales), arrays_of(pages(codec))
        codes = form.encode(*arrays, key=KEY, first_token=64, exact=0)
        was, now = numbers_of(*arrays), numbers_of(*form.decode(codes, key=KEY))
        found.append(len(codes) * np.square(was - now).sum())
    assert found[0] < 0.75 * found[1]


def test_scales_of_any_size_are_kept() -> None:
    """Those that are no powers of two; and a zero, which counts as 1."""
    form, (turned, codes) = format_of("wht-5x"), arrays_of(pages())
    scales = turned[..., :16].copy().view(np.float32)
    scales *= np.random.default_rng(1).uniform(1, 2, scales.shape).astype(np.float32)
    scales[1, 0, 9, 2] = 0
    turned[..., :16] = scales.view(np.uint8)
    codes[1, 2, 9] = as_numbers(np.full(128, 0.5, np.float32), Dtype.FLOAT8_E4M3)
    block = form.encode(turned, codes, key=KEY, first_token=0, exact=0)
    assert {section.codec for section in wire.parse(block).header.sections} == {"exact", "wht-5x"}
    back = form.decode(block, key=KEY)
    assert np.array_equal(back[0], turned)
    was, now = numbers_of(turned, codes), numbers_of(*back)
    assert np.square(was - now).sum() < 0.012 * np.square(was).sum()


@pytest.mark.parametrize("scale", [np.inf, np.float32(2.0**100)])
def test_a_block_with_a_scale_beyond_all_bounds_is_exact(scale: float) -> None:
    form, (turned, codes) = format_of("wht-5x"), arrays_of(pages())
    turned[2, 0, 63, :4] = np.array([scale], np.float32).view(np.uint8)
    block = form.encode(turned, codes, key=KEY, first_token=0, exact=0)
    assert {section.codec for section in wire.parse(block).header.sections} == {"exact"}
    assert all(map(np.array_equal, form.decode(block, key=KEY), (turned, codes)))


def test_the_guard_measures_what_attention_sees() -> None:
    """RoPE's part in bf16, and latents times their scales. Much is rounded back onto fp8's grid."""
    x, turned = scaled_latents.made_up((LAYERS, TOKENS))
    arrays = arrays_of(scaled_latents.page(x, turned))
    form = format_of("wht-5x")
    seen, latents = form.shape.floats(arrays)
    assert np.array_equal(seen[:, 0], as_floats(as_numbers(turned.copy(), Dtype.BFLOAT16)))
    assert np.array_equal(latents.swapaxes(1, 2).reshape(x.shape), numbers_of(*arrays))
    shape = BlockShape(LAYERS, 1, TOKENS, 64, Dtype.BFLOAT16, 512)
    plain = tuple(as_numbers(part.copy(), Dtype.BFLOAT16) for part in (seen, latents))
    found = measure(form, [Sample(arrays, 0)], None)
    of_bf16 = measure(BlockFormat("wht-5x", shape, b"f" * 16), [Sample(plain, 0)], None)
    assert found.is_faithful
    assert (0.2 * of_bf16.logit_noise < found.logit_noise).all()
    assert (found.logit_noise < of_bf16.logit_noise).all()


@pytest.mark.parametrize(("codec", "most"), [("wht-5x", 0.012), ("klt-8x", 0.02), ("k3v3", 0.04)])
@pytest.mark.parametrize("opaque", [0, 132])
def test_states_whose_scales_are_among_the_raw_bytes(codec: str, most: float, opaque: int) -> None:
    """DeepSeek V4's, alone and with an index."""
    profile = made_up.profile(LAYERS, 7, 64, None, latent=448)
    numbers = made_up.grouped_kv(profile, BLOCKS * TOKENS)[0].swapaxes(1, 2).reshape(LAYERS, BLOCKS, TOKENS, 448)
    more = {"facts": ModelFacts(profile=profile), "numbers": numbers} if "klt" in codec else {}
    world = device_blocks.scaled(FormatCodec, codec, V4, exact=4, opaque=opaque, **more)
    arrays, form = world.numbers(3), world.format
    back = form.decode(form.encode(*arrays, key=KEY, first_token=64, exact=4), key=KEY)
    assert all(np.array_equal(x, y) for n, (x, y) in enumerate(zip(arrays, back, strict=True)) if n != 1)
    assert np.array_equal(arrays[1][:, :, :4], back[1][:, :, :4])
    (_, was), (_, now) = form.shape.floats(arrays), form.shape.floats(back)
    assert 0 < np.square(was - now).sum() < most * np.square(was).sum()
