"""Latents in fp8 with scales of their own on a GPU: the CPU's bytes and numbers."""

import device_blocks
import numpy as np
import pytest
import torch
from device_blocks import BLOCKS, IDS, KEYS, LAYERS, TARGETS, World
from scaled_latents import LATENT, V4, V32

from manthan.benchmarks import made_up
from manthan.codec.block import Scales
from manthan.codec.cpu.numbers import as_floats
from manthan.codec.gpu.k3v3_codec import K3v3PagedCodec
from manthan.codec.gpu.klt_codec import KltPagedCodec
from manthan.codec.gpu.wht_codec import WhtPagedCodec
from manthan.codec.model import ModelFacts

CUDA = torch.device("cuda", 0)
KINDS = pytest.mark.parametrize("scales", [V32, V4], ids=["V3.2", "V4"])
EXACT = pytest.mark.parametrize("exact", [0, 4, 64])


@EXACT
@KINDS
@pytest.mark.parametrize("opaque", [0, 132])
@pytest.mark.parametrize("preset", ["wht-5x", "wht-4x"])
def test_the_cpu_s_bytes(scales: Scales, preset: str, opaque: int, exact: int) -> None:
    device_blocks.scaled(WhtPagedCodec, preset, scales, exact=exact, device=CUDA, opaque=opaque).check()


@KINDS
@pytest.mark.parametrize(("tokens", "exact"), [(16, 0), (16, 3), (128, 0), (33, 5)])
def test_blocks_of_any_size(scales: Scales, tokens: int, exact: int) -> None:
    device_blocks.scaled(WhtPagedCodec, "wht-5x", scales, tokens=tokens, exact=exact, device=CUDA).check()


@EXACT
@KINDS
def test_a_codec_with_a_scale_for_each_vector(scales: Scales, exact: int) -> None:
    device_blocks.scaled(K3v3PagedCodec, "k3v3", scales, exact=exact, device=CUDA).check()


def test_scales_of_any_size() -> None:
    """Zeros, which count as 1, and scales that are no powers of two; one beyond all bounds is reported."""
    world = device_blocks.scaled(WhtPagedCodec, "wht-5x", device=CUDA)
    scales = world.bits[..., : 64 * 656].unflatten(2, (64, 656))[..., 512:528]
    floats = scales.contiguous().view(torch.float32) * (1 + torch.rand(*scales.shape[:-1], 4, device=CUDA))
    floats[1, :, 9, 2] = 0
    scales.copy_(floats.view(torch.uint8))
    world.check()
    scales[1, IDS[2], 30, 4:8] = torch.tensor([float("inf")], device=CUDA).view(torch.uint8)
    assert world.encode() == [None, None, "decode", None]


@EXACT
@KINDS
@pytest.mark.parametrize("opaque", [0, 132])
@pytest.mark.parametrize("preset", ["klt-5x", "klt-8x"])
def test_a_calibrated_codec_is_about_the_cpu_s(scales: Scales, preset: str, opaque: int, exact: int) -> None:
    """Each reads what the other wrote; the scales, RoPE's part and the opaque bytes are as they were."""
    latent = LATENT[scales]
    profile = made_up.profile(LAYERS, latent // scales.piece, scales.piece, None, latent=latent)
    numbers = made_up.grouped_kv(profile, BLOCKS * 64)[0].swapaxes(1, 2).reshape(LAYERS, BLOCKS, 64, latent)
    facts = ModelFacts(profile=profile)
    told = {"exact": exact, "opaque": opaque, "device": CUDA, "facts": facts, "numbers": numbers}
    world = device_blocks.scaled(KltPagedCodec, preset, scales, **told)
    before = world.bits.clone()
    assert world.encode() == [None] * 4
    for _ in range(2):
        assert world.decode() == [None] * 4
        for i, target in enumerate(TARGETS):
            check_near(world, i, target)
            world.write(i, world.by_numpy(i))  # and then what the CPU wrote
    world.check_others(before, TARGETS)


def check_near(world: World, i: int, target: int) -> None:
    shape, exact = world.format.shape, world.exact
    right, found = world.format.decode(world.block(i), key=KEYS[i]), world.numbers(target)
    was = world.numbers(IDS[i])
    assert all(np.array_equal(x, y) for n, (x, y) in enumerate(zip(was, found, strict=True)) if n != 1)
    assert np.array_equal(was[1][:, :, :exact], found[1][:, :, :exact])
    assert (right[1] != found[1]).mean() < 0.05
    (_, x), (_, y) = shape.floats(right), shape.floats(found)
    assert np.square(x - y).sum() < 1e-3 * np.square(x).sum()
    (_, z) = shape.floats(was)
    assert np.square(z - y).sum() < 0.03 * np.square(z).sum()
    assert as_floats(found[1], shape.dtype).any()


@pytest.mark.parametrize("at", [400, 20_000, -9])
@KINDS
def test_damage_is_found_and_nothing_is_written(scales: Scales, at: int) -> None:
    world = device_blocks.scaled(WhtPagedCodec, "wht-5x", scales, device=CUDA, opaque=132)
    assert world.encode() == [None] * 4
    block = world.block(1).copy()
    block[at] ^= 1
    world.write(1, block)
    before = world.bits.clone()
    assert world.decode() == [None, "checksum", None, None]
    world.check_others(before, [TARGETS[0], *TARGETS[2:]])
