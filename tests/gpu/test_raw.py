"""Blocks of bytes on a GPU: what torch moves there and the kernels seal is what numpy makes of the same bytes."""

import math

import numpy as np
import pytest
import torch

from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.gpu.paged import GOOD, RawLayout, status_cause
from manthan.codec.gpu.raw import RawPagedCodec

TOKENS, BLOCKS = 16, 24
SOURCES, TARGETS = [3, 17, 8, 0], [5, 1, 20, 11]


def codec(sizes: tuple[int, ...], stride: int, group: int = 2) -> RawPagedCodec:
    """Layers one behind the other in blocks of `stride` bytes."""
    memory = torch.randint(0, 256, (BLOCKS * stride,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    memory = memory.to("cuda")
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    caches = tuple(memory.as_strided((BLOCKS, size), (stride, 1), at) for size, at in zip(sizes, starts, strict=True))
    run = math.gcd(*sizes) // TOKENS // 2  # a header has room for so many
    shape = BlockShape(1, sum(sizes) // TOKENS // run, TOKENS, run, Dtype.UINT8)
    return RawPagedCodec(RawLayout(caches, shape), BlockFormat("exact", shape, b"f" * 16, group))


@pytest.mark.parametrize(
    ("sizes", "stride"),
    [((128, 64), 192), ((4096,) * 8, 32768), ((64, 192), 268), ((3 << 20, 1 << 20), 5 << 20)],
    ids=["small", "layers", "odd", "large"],
)
def test_encoded_blocks_are_the_cpus_and_come_back(sizes: tuple[int, ...], stride: int) -> None:
    on_gpu = codec(sizes, stride)
    room, shape = on_gpu.form(0).nbytes, on_gpu.format.shape
    told = [bytes([n]) * 32 for n in range(4)], SOURCES, [16 * n for n in range(4)], [n * room for n in range(4)]
    codes = torch.full((4 * room,), 9, dtype=torch.uint8, device="cuda")
    batch = on_gpu.batch(0, *told)
    on_gpu.encode(batch, codes)
    assert batch.status.tolist() == [GOOD] * 4
    for n, source in enumerate(SOURCES):
        numbers = torch.cat([cache[source] for cache in on_gpu.layout.caches]).cpu().numpy().reshape(shape.numbers)
        none = np.empty(shape.value_numbers, np.uint8)
        block = on_gpu.format.encode(numbers, none, key=told[0][n], first_token=16 * n, exact=0)
        assert np.array_equal(codes[n * room : (n + 1) * room].cpu().numpy(), block)
    codes[2 * room + 300] ^= 1
    before = [cache.clone() for cache in on_gpu.layout.caches]
    back = on_gpu.batch(0, told[0], TARGETS, told[2], told[3])
    on_gpu.verify(back, codes)
    assert [status_cause(status) for status in back.status.tolist()] == [None, None, "checksum", None]
    on_gpu.decode(back, codes)
    for then, now in zip(before, on_gpu.layout.caches, strict=True):
        right = then.clone()
        for n in (0, 1, 3):
            right[TARGETS[n]] = then[SOURCES[n]]
        assert torch.equal(now, right)


def test_another_block_than_was_asked_for_is_refused() -> None:
    of, other = codec((128, 64), 192), codec((128, 64), 192, group=3)
    codes = torch.zeros(of.form(0).nbytes, dtype=torch.uint8, device="cuda")
    of.encode(of.batch(0, [bytes(32)], [5], [0], [0]), codes)
    for wanted in (of.batch(0, [b"x" * 32], [1], [0], [0]), other.batch(0, [bytes(32)], [1], [0], [0])):
        of.verify(wanted, codes)
        assert status_cause(wanted.status.tolist()[0]) == "key"
