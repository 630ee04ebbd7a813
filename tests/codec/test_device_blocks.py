"""States, and latents with opaque bytes, on a GPU, played on the CPU: numpy's blocks, and the same numbers back."""

from dataclasses import replace

import device_blocks
import numpy as np
import pytest
import torch
from device_blocks import FIRST_TOKENS, IDS, KEYS, TARGETS
from fake_cuda import FormatCodec, copy_exact, raw_codec
from scaled_latents import V4, V32

from manthan.codec.base import Dtype
from manthan.codec.block import Scales
from manthan.codec.gpu import raw
from manthan.codec.gpu.cuda_codec import addresses, exact_jobs, is_aligned, scales_of
from manthan.codec.gpu.paged import Batch
from manthan.codec.gpu.raw import RawPagedCodec


@pytest.mark.parametrize("at_once", [1, 2**26])
@pytest.mark.parametrize("number", [Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16])
@pytest.mark.parametrize("option", ["bf16", "int8", "exact"])
def test_states(option: str, number: Dtype, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding comes back as zeros; rows of zeros, and the smallest numbers, are among them."""
    monkeypatch.setattr(raw, "STATE_BYTES_AT_ONCE", at_once)
    world = device_blocks.states(raw_codec, option, number)
    rows = world.bits[:, IDS[1], device_blocks.CONV :]
    rows[0, : 16 * 40] = 0
    rows[1, : 16 * 20 : 16] = 1
    world.check()


@pytest.mark.parametrize("exact", [0, 4, 16])
@pytest.mark.parametrize("opaque", [132, 64])
def test_latents_with_opaque_bytes(opaque: int, exact: int) -> None:
    device_blocks.latents(FormatCodec, opaque=opaque, exact=exact).check()
    device_blocks.kv(FormatCodec, opaque=opaque, exact=exact).check()


@pytest.mark.parametrize("kind", [Dtype.FLOAT8_E4M3, Dtype.FLOAT8_E5M2])
@pytest.mark.parametrize("opaque", [0, 132])
def test_latents_in_fp8(opaque: int, kind: Dtype) -> None:
    device_blocks.latents(FormatCodec, opaque=opaque, exact=4, fp8=kind).check()


@pytest.mark.parametrize("exact", [0, 4, 64])
@pytest.mark.parametrize("opaque", [0, 132])
@pytest.mark.parametrize("scales", [V32, V4], ids=["V3.2", "V4"])
def test_kernels_are_told_where_scales_lie(scales: Scales, opaque: int, exact: int) -> None:
    """Among the exact bytes of an encoded block: the exact sections, played on the CPU, have them there."""
    world = device_blocks.scaled(FormatCodec, "wht-5x", scales, opaque=opaque, exact=exact)
    world.check()
    layout, block = world.codec.layout, np.zeros(world.form.nbytes, np.uint8)
    there = addresses(layout)
    for job in exact_jobs(layout, there, world.form, exact):
        copy_exact(job, IDS[0], block, 1, out=True)
    told, shape = scales_of(layout, world.form), world.format.shape
    _, pieces, tokens, _ = shape.value_numbers
    rows = block[told["kept_at"] :][: shape.layers * tokens * told["kept_stride"]].reshape(shape.layers, tokens, -1)
    found = rows[..., : pieces * scales.nbytes].copy()
    floats = found.view(np.float32) if scales.nbytes == 4 else (found.astype(np.uint32) << 23).view(np.float32)
    right = scales.of(world.numbers(IDS[0]), shape)
    assert np.array_equal(floats.swapaxes(1, 2)[..., None], right)
    assert len(np.unique(right)) > 3


@pytest.mark.parametrize("exact", [0, 4, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_are_told_where_sections_that_stay_as_they_are_lie(dtype: torch.dtype, exact: int) -> None:
    """Played on the CPU: the bytes of other layers, RoPE's part, and the first tokens' latents, both ways."""
    world = device_blocks.latents(FormatCodec, opaque=132, exact=exact, dtype=dtype)
    layout = world.codec.layout
    there = addresses(layout)
    jobs, block = exact_jobs(layout, there, world.form, exact), np.zeros(world.form.nbytes, np.uint8)
    for job in jobs:
        copy_exact(job, IDS[0], block, dtype.itemsize, out=True)
    right, kept = world.by_numpy(0), 2 + (exact > 0)
    assert len(jobs) == kept
    for start, size in list(zip(world.form.starts, world.form.sizes, strict=True))[:kept]:
        assert np.array_equal(block[start : start + size], right[start : start + size])
    for job in jobs:
        copy_exact(job, TARGETS[0], block, dtype.itemsize, out=False)
    for n, (x, y) in enumerate(zip(world.numbers(IDS[0]), world.numbers(TARGETS[0]), strict=True)):
        some = slice(exact) if n == 1 else slice(None)
        assert np.array_equal(x[:, :, some], y[:, :, some])


def test_vectors_behind_opaque_bytes_at_odd_places_are_copied_number_by_number() -> None:
    assert is_aligned(device_blocks.latents(FormatCodec, opaque=132).codec.layout)
    assert not is_aligned(device_blocks.latents(FormatCodec, opaque=132, tokens=2).codec.layout)
    assert is_aligned(device_blocks.latents(FormatCodec, tokens=2).codec.layout)


def test_the_host_never_waits_for_the_device() -> None:
    """Meta tensors have no data: whatever asks for it, or for a size that depends on it, raises."""

    class NoKernels:
        def launch(self, *_: object) -> None:
            pass

    for option in ("int8", "bf16"):
        world = device_blocks.states(raw_codec, option)
        layout = replace(world.codec.layout, caches=tuple(cache.to("meta") for cache in world.codec.layout.caches))
        codec, buffer = RawPagedCodec(layout, world.format, NoKernels()), world.buffer.to("meta")
        batch = world.codec.batch(world.exact, KEYS, IDS, FIRST_TOKENS, world.offsets)
        batch = Batch(world.exact, *(part.to("meta") for part in batch[1:]))
        for step in (codec.encode, codec.verify, codec.decode):
            step(batch, buffer)
