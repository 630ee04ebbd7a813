"""Blocks of bytes on a GPU: what torch moves there and the kernels seal is what the CPU makes of the same bytes."""

import math

import pytest
import torch

from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.gpu.paged import GOOD, RawLayout, status_cause
from manthan.codec.gpu.raw import RawPagedCodec, seals

TOKENS, BLOCKS = 16, 24
SOURCES, TARGETS = [3, 17, 8, 0], [5, 1, 20, 11]


def codec(sizes: tuple[int, ...], stride: int, device: str, group: int = 2) -> RawPagedCodec:
    """Layers one behind the other in blocks of `stride` bytes; the same numbers on every device."""
    memory = torch.randint(0, 256, (BLOCKS * stride,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    memory = memory.to(device)
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    caches = tuple(memory.as_strided((BLOCKS, size), (stride, 1), at) for size, at in zip(sizes, starts, strict=True))
    run = math.gcd(*sizes) // TOKENS // 2  # a header has room for so many
    shape = BlockShape(1, sum(sizes) // TOKENS // run, TOKENS, run, Dtype.UINT8)
    kernels = seals(torch.device(device, 0)) if device == "cuda" else None
    return RawPagedCodec(RawLayout(caches, shape), BlockFormat("exact", shape, b"f" * 16, group), kernels)


@pytest.mark.parametrize(
    ("sizes", "stride"),
    [((128, 64), 192), ((4096,) * 8, 32768), ((64, 192), 268), ((3 << 20, 1 << 20), 5 << 20)],
    ids=["small", "layers", "odd", "large"],
)
def test_encoded_blocks_are_the_cpus_and_come_back(sizes: tuple[int, ...], stride: int) -> None:
    on_gpu, on_cpu = (codec(sizes, stride, device) for device in ("cuda", "cpu"))
    room = on_cpu.form(0).nbytes
    told = [bytes([n]) * 32 for n in range(4)], SOURCES, [16 * n for n in range(4)], [n * room for n in range(4)]
    made = []
    for each in (on_gpu, on_cpu):
        codes = torch.full((4 * room,), 9, dtype=torch.uint8, device=each.device)
        batch = each.batch(0, *told)
        each.encode(batch, codes)
        assert batch.status.tolist() == [GOOD] * 4
        made.append(codes)
    assert torch.equal(made[0].cpu(), made[1])
    made[0][2 * room + 300] ^= 1
    before = [cache.clone() for cache in on_gpu.layout.caches]
    back = on_gpu.batch(0, told[0], TARGETS, told[2], told[3])
    on_gpu.verify(back, made[0])
    assert [status_cause(status) for status in back.status.tolist()] == [None, None, "checksum", None]
    on_gpu.decode(back, made[0])
    for then, now in zip(before, on_gpu.layout.caches, strict=True):
        right = then.clone()
        for n in (0, 1, 3):
            right[TARGETS[n]] = then[SOURCES[n]]
        assert torch.equal(now, right)
