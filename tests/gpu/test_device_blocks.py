"""Latents, fp8 and recurrent states on a GPU: the CPU's bytes and numbers."""

import device_blocks
import numpy as np
import pytest
import torch
from device_blocks import IDS, KEYS, LAYERS, TARGETS, World

from manthan.benchmarks import made_up
from manthan.codec.base import Dtype
from manthan.codec.cpu.numbers import table
from manthan.codec.gpu.klt_codec import KltPagedCodec
from manthan.codec.gpu.raw import RawPagedCodec
from manthan.codec.gpu.wht_codec import WhtPagedCodec
from manthan.codec.model import ModelFacts

CUDA = torch.device("cuda", 0)
FP8 = [Dtype.FLOAT8_E4M3, Dtype.FLOAT8_E5M2]


@pytest.mark.parametrize("exact", [0, 4, 16])
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (256, 32), (96, 16), (480, 40)])
def test_latents_by_kernels(latent: int, rope: int, exact: int) -> None:
    device_blocks.latents(WhtPagedCodec, "wht-5x", latent, rope, exact=exact, device=CUDA).check()


@pytest.mark.parametrize(("tokens", "exact"), [(64, 0), (64, 4), (128, 0), (9, 2), (33, 33)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_latents_of_any_dtype_in_blocks_of_any_size(dtype: torch.dtype, tokens: int, exact: int) -> None:
    device_blocks.latents(WhtPagedCodec, tokens=tokens, exact=exact, dtype=dtype, device=CUDA).check()


@pytest.mark.parametrize(("tokens", "exact"), [(64, 0), (64, 4), (64, 64), (2, 0)], ids=str)
def test_latents_with_opaque_bytes(tokens: int, exact: int) -> None:
    """Index keys of 132 bytes a token. Two tokens of them are no multiple of 16, and go number by number."""
    device_blocks.latents(WhtPagedCodec, tokens=tokens, exact=exact, device=CUDA, opaque=132).check()


@pytest.mark.parametrize("exact", [0, 4, 16])
@pytest.mark.parametrize("opaque", [0, 132])
@pytest.mark.parametrize("kind", FP8)
def test_latents_in_fp8(kind: Dtype, opaque: int, exact: int) -> None:
    device_blocks.latents(WhtPagedCodec, exact=exact, device=CUDA, opaque=opaque, fp8=kind).check()


@pytest.mark.parametrize("exact", [0, 4, 16])
def test_keys_and_values_with_opaque_bytes(exact: int) -> None:
    device_blocks.kv(WhtPagedCodec, exact=exact, device=CUDA, opaque=256).check()


@pytest.mark.parametrize("exact", [0, 4, 16])
def test_keys_and_values_with_opaque_bytes_in_a_calibrated_codec(exact: int) -> None:
    rope = made_up.rope_of(64)
    facts = ModelFacts(rope, made_up.profile(LAYERS, 3, 64, rope))
    world = device_blocks.kv(KltPagedCodec, "klt-8x", exact=exact, device=CUDA, facts=facts, opaque=256)
    assert world.encode() == [None] * 4
    right = [world.numbers(block)[2] for block in IDS]
    assert world.decode() == [None] * 4
    for target, index in zip(TARGETS, right, strict=True):
        assert np.array_equal(world.numbers(target)[2], index)


@pytest.mark.parametrize("at", [400, 20_000, -9])
def test_damage_in_opaque_bytes_or_in_latents_is_found(at: int) -> None:
    world = device_blocks.latents(WhtPagedCodec, tokens=64, device=CUDA, opaque=132)
    assert world.encode() == [None] * 4
    block = world.block(1).copy()
    block[at] ^= 1
    world.write(1, block)
    before = world.bits.clone()
    assert world.decode() == [None, "checksum", None, None]
    world.check_others(before, [TARGETS[0], *TARGETS[2:]])


def test_latents_that_are_not_finite_or_damaged() -> None:
    world = device_blocks.latents(WhtPagedCodec, exact=2, device=CUDA)
    for cache in world.codec.layout.caches:
        cache[IDS[2]].view(16, 576)[9, 100] = float("inf")
    assert world.encode() == [None, None, "decode", None]
    world = device_blocks.latents(WhtPagedCodec, exact=2, device=CUDA)
    world.encode()
    for i, at in ((0, -40), (1, 300), (2, 400)):
        block = world.block(i).copy()
        block[at] ^= 1
        world.write(i, block)
    before = world.bits.clone()
    assert world.decode() == ["checksum"] * 3 + [None]
    kept = [block for block in range(device_blocks.BLOCKS) if block != TARGETS[3]]
    assert torch.equal(world.bits[:, kept], before[:, kept])


@pytest.mark.parametrize("exact", [0, 4, 16])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 64), (8, 128), (1, 256), (5, 40)])
@pytest.mark.parametrize("kind", FP8)
def test_fp8_by_kernels(kind: Dtype, heads: int, head_dim: int, exact: int) -> None:
    device_blocks.fp8(WhtPagedCodec, "wht-5x", kind, heads, head_dim, exact=exact, device=CUDA).check()


@pytest.mark.parametrize("kind", FP8)
def test_each_fp8_number_is_read(kind: Dtype) -> None:
    """All that there are, denormal ones too, next to each other; what is not finite is reported."""
    world = device_blocks.fp8(WhtPagedCodec, "wht-5x", kind, heads=2, device=CUDA)
    finite = torch.from_numpy(np.flatnonzero(np.isfinite(table(kind))).astype(np.uint8)).to(CUDA)
    for block in IDS:
        world.bits[:, block] = finite.repeat(-(-world.bits.shape[2] // len(finite)))[: world.bits.shape[2]]
    world.check()
    world.bits[1, IDS[2], 300] = 0x7F
    assert world.encode() == [None, None, "decode", None]


@pytest.mark.parametrize("kind", FP8)
def test_fp8_in_a_calibrated_codec_is_about_the_cpu_s(kind: Dtype) -> None:
    rope = made_up.rope_of(64)
    facts = ModelFacts(rope, made_up.profile(LAYERS, 3, 64, rope))
    world = device_blocks.fp8(KltPagedCodec, "klt-8x", kind, exact=4, device=CUDA, facts=facts)
    assert world.encode() == [None] * 4
    blocks = [world.block(i) for i in range(4)]
    assert world.decode() == [None] * 4
    for i, target in enumerate(TARGETS):
        right, found = world.format.decode(blocks[i], key=KEYS[i]), world.numbers(target)
        for x, y in zip(right, found, strict=True):
            assert x[:, :, :4].tobytes() == y[:, :, :4].tobytes()
            assert (x != y).mean() < 0.05
            noise = np.square(table(kind)[x] - table(kind)[y]).sum() / np.square(table(kind)[x]).sum()
            assert noise < 1e-3


@pytest.mark.parametrize("number", [Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16])
@pytest.mark.parametrize("option", ["bf16", "int8", "exact"])
def test_states(option: str, number: Dtype) -> None:
    states(option, number).check()


@pytest.mark.parametrize(("padding", "apart"), [(64, 76), (66, 3), (2**20 + 2**14 - 2144, 4)], ids=["4", "1", "large"])
def test_bytes_of_any_size_and_alignment(padding: int, apart: int) -> None:
    """Layers lie at multiples of 4 bytes, of 1 byte, or take a megabyte each."""
    device_blocks.states(RawPagedCodec, "exact", padding=padding, apart=apart, device=CUDA).check()


@pytest.mark.parametrize("option", ["bf16", "int8", "exact"])
def test_damaged_states(option: str) -> None:
    device_blocks.damaged(states(option))


def states(option: str, number: Dtype = Dtype.FLOAT32) -> World:
    """Rows of zeros, and the smallest numbers, are among them."""
    world = device_blocks.states(RawPagedCodec, option, number, device=CUDA)
    rows = world.bits[:, IDS[1], device_blocks.CONV :]
    rows[0, : 16 * 40] = 0
    rows[1, : 16 * 20 : 16] = 1
    return world


@pytest.mark.parametrize("option", ["bf16", "int8"])
def test_states_that_are_not_finite_are_reported(option: str) -> None:
    world = states(option)
    at = device_blocks.CONV + 4 * 16 * 5
    world.bits[1, IDS[2], at : at + 4] = torch.tensor([float("nan")]).view(torch.uint8).to(CUDA)
    assert world.encode() == [None, None, "decode", None]
