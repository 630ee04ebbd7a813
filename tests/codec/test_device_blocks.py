"""Recurrent states on a GPU, played on the CPU: the same encoded blocks as numpy's, and the same numbers back."""

from dataclasses import replace

import device_blocks
import pytest
from device_blocks import FIRST_TOKENS, IDS, KEYS
from fake_cuda import raw_codec

from manthan.codec.base import Dtype
from manthan.codec.gpu import states
from manthan.codec.gpu.paged import Batch
from manthan.codec.gpu.raw import RawPagedCodec


@pytest.mark.parametrize("at_once", [1, 2**26])
@pytest.mark.parametrize("number", [Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16])
@pytest.mark.parametrize("option", ["bf16", "int8", "exact"])
def test_states(option: str, number: Dtype, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding comes back as zeros; rows of zeros, and the smallest numbers, are among them."""
    monkeypatch.setattr(states, "BYTES_AT_ONCE", at_once)
    world = device_blocks.states(raw_codec, option, number)
    rows = world.bits[:, IDS[1], device_blocks.CONV :]
    rows[0, : 16 * 40] = 0
    rows[1, : 16 * 20 : 16] = 1
    world.check()


def test_the_host_never_waits_for_the_device() -> None:
    """Meta tensors have no data: whatever asks for it, or for a size that depends on it, raises."""

    class NoKernels:
        def launch(self, *_: object) -> None:
            pass

    for option in ("int8", "bf16"):
        world = device_blocks.states(raw_codec, option)
        layout = replace(world.codec.layout, caches=tuple(cache.to("meta") for cache in world.codec.layout.caches))
        codec, codes = RawPagedCodec(layout, world.format, NoKernels()), world.codes.to("meta")
        batch = world.codec.batch(world.exact, KEYS, IDS, FIRST_TOKENS, world.offsets)
        batch = Batch(world.exact, *(part.to("meta") for part in batch[1:]))
        for step in (codec.encode, codec.verify, codec.decode):
            step(batch, codes)
