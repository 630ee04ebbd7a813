"""Latents, fp8 and recurrent states on a GPU, by torch's operations on the CPU: the same encoded blocks as numpy's, and
the same numbers back."""

from dataclasses import replace

import device_blocks
import numpy as np
import pytest
import torch
from device_blocks import FIRST_TOKENS, IDS, KEYS, TARGETS

from manthan.codec import wire
from manthan.codec.base import Dtype
from manthan.codec.cpu.fp8 import narrowed, table
from manthan.codec.errors import CodecError
from manthan.codec.gpu import states
from manthan.codec.gpu.paged import Batch, PagedLayout
from manthan.codec.gpu.raw import RawPagedCodec
from manthan.codec.gpu.torch_codec import TorchPagedCodec
from manthan.codec.gpu.torch_vectors import cast

FP8 = [Dtype.FLOAT8_E4M3, Dtype.FLOAT8_E5M2]


@pytest.mark.parametrize("exact", [0, 4, 16])
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (256, 32), (96, 16)])
@pytest.mark.parametrize("codec", ["k4v4c", "k3v3"])
def test_latents(codec: str, latent: int, rope: int, exact: int) -> None:
    device_blocks.latents(TorchPagedCodec, codec, latent, rope, exact=exact).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_latents_of_any_dtype(dtype: torch.dtype) -> None:
    device_blocks.latents(TorchPagedCodec, "k4v4c", tokens=9, exact=2, dtype=dtype).check()


@pytest.mark.parametrize("exact", [0, 4, 16])
@pytest.mark.parametrize("kind", FP8)
@pytest.mark.parametrize("codec", ["k4v4c", "k3v3"])
def test_fp8(codec: str, kind: Dtype, exact: int) -> None:
    device_blocks.fp8(TorchPagedCodec, codec, kind, exact=exact).check()


@pytest.mark.parametrize("kind", FP8)
def test_numbers_are_rounded_to_fp8_as_by_numpy(kind: Dtype) -> None:
    """Halfway between neighbours, at both ends, and in between."""
    known = np.unique(table(kind)[np.isfinite(table(kind))]).astype(np.float64)
    x = np.concatenate([known, (known[1:] + known[:-1]) / 2, known * 1.03, [1e6, -1e6, 1e-30, -1e-30]])
    x = x.astype(np.float32)
    number = {Dtype.FLOAT8_E4M3: torch.float8_e4m3fn, Dtype.FLOAT8_E5M2: torch.float8_e5m2}[kind]
    found = cast(torch.from_numpy(x), number).view(torch.uint8).numpy()
    assert np.array_equal(found, narrowed(x, kind))


@pytest.mark.parametrize("kind", FP8)
def test_fp8_that_is_not_finite_is_reported(kind: Dtype) -> None:
    world = device_blocks.fp8(TorchPagedCodec, "k4v4c", kind)
    world.bits[1, IDS[2], 300] = 0x7F
    assert world.encode() == [None, None, "decode", None]


def test_what_numpy_kept_whole_is_of_a_form_that_can_be_read() -> None:
    """Blocks that the CPU's codec does not take, as another engine may have left them."""
    world = device_blocks.fp8(TorchPagedCodec, "k4v4c", exact=16)
    world.exact = 0
    for block in IDS:
        world.bits[0, block, 0] = 0x7F
    for i in range(4):
        world.write(i, world.by_numpy(i))
    world.exact = 16
    world.check_decoding()


def test_damaged_latents_are_told_apart_and_not_written() -> None:
    world = device_blocks.latents(TorchPagedCodec, "k4v4c", exact=2)
    world.encode()
    blocks = [world.block(i).copy() for i in range(4)]
    for i, at in ((0, len(blocks[0]) - 40), (1, 300), (2, 20)):
        blocks[i][at] ^= 1
        world.write(i, blocks[i])
    world.write(2, wire.seal(blocks[2]))
    before = world.bits.clone()
    assert world.decode() == ["checksum", "checksum", "fingerprint", None]
    kept = [block for block in range(device_blocks.BLOCKS) if block != TARGETS[3]]
    assert torch.equal(world.bits[:, kept], before[:, kept])


@pytest.mark.parametrize("at_once", [1, 2**26])
@pytest.mark.parametrize("number", [Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16])
@pytest.mark.parametrize("option", ["bf16", "int8", "exact"])
def test_states(option: str, number: Dtype, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding comes back as zeros; rows of zeros, and the smallest numbers, are among them."""
    monkeypatch.setattr(states, "BYTES_AT_ONCE", at_once)
    world = device_blocks.states(RawPagedCodec, option, number)
    rows = world.bits[:, IDS[1], device_blocks.CONV :]
    rows[0, : 16 * 40] = 0
    rows[1, : 16 * 20 : 16] = 1
    world.check()


@pytest.mark.parametrize("option", ["bf16", "int8"])
def test_the_largest_states_stay_finite(option: str) -> None:
    world = device_blocks.states(RawPagedCodec, option)
    numbers = world.bits[:, IDS[0], device_blocks.CONV : -64].contiguous().view(torch.float32)
    numbers[:, ::16] = torch.finfo(torch.float32).max
    world.bits[:, IDS[0], device_blocks.CONV : -64] = numbers.view(torch.uint8)
    with np.errstate(over="ignore"):
        world.check()


@pytest.mark.parametrize("option", ["bf16", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_states_that_are_not_finite_are_reported(option: str, bad: float) -> None:
    world = device_blocks.states(RawPagedCodec, option)
    at = device_blocks.CONV + 4 * 16 * 5
    world.bits[1, IDS[1], at : at + 4] = torch.tensor([bad]).view(torch.uint8)
    assert world.encode() == [None, "decode", None, None]
    with pytest.raises(CodecError):
        world.by_numpy(1)
    for i in (0, 2, 3):
        assert np.array_equal(world.block(i), world.by_numpy(i))


def test_the_host_never_waits_for_the_device() -> None:
    """Meta tensors have no data: whatever asks for it, or for a size that depends on it, raises."""
    made = [
        device_blocks.latents(TorchPagedCodec, "k4v4c", exact=4),
        device_blocks.fp8(TorchPagedCodec, "k4v4c"),
        device_blocks.states(RawPagedCodec, "int8"),
        device_blocks.states(RawPagedCodec, "bf16"),
    ]
    for world in made:
        caches = tuple(cache.to("meta") for cache in world.codec.layout.caches)
        layout = replace(world.codec.layout, caches=caches)
        if isinstance(layout, PagedLayout) and layout.latents:
            layout = replace(layout, latents=replace(layout.latents, caches=caches))
        codec, codes = type(world.codec)(layout, world.format), world.codes.to("meta")
        batch = world.codec.batch(world.exact, KEYS, IDS, FIRST_TOKENS, world.offsets)
        batch = Batch(world.exact, *(part.to("meta") for part in batch[1:]))
        for step in (codec.encode, codec.verify, codec.decode):
            step(batch, codes)
