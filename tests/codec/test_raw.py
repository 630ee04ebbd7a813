"""Blocks of bytes on a GPU, played on the CPU: the same encoded blocks as numpy's, and the same bytes
back."""

import numpy as np
import pytest
import torch
from fake_cuda import raw_codec

from manthan.codec import wire
from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.errors import ShapeError
from manthan.codec.gpu import raw
from manthan.codec.gpu.paged import GOOD, Batch, PagedLayout, RawLayout, status_cause
from manthan.codec.gpu.raw import RawPagedCodec

TOKENS, BLOCKS = 8, 12
EXACT = "exact"


def codec(sizes: tuple[int, ...], stride: int, first: int = 0, group: int = 3) -> RawPagedCodec:
    """Layers of so many bytes a block, one behind the other in blocks of `stride` bytes of one allocation."""
    torch.manual_seed(0)
    memory = torch.randint(0, 256, (first + BLOCKS * stride,), dtype=torch.uint8)
    starts = np.cumsum([first, *sizes[:-1]]).tolist()
    caches = [memory.as_strided((BLOCKS, size), (stride, 1), at) for size, at in zip(sizes, starts, strict=True)]
    run = int(np.gcd.reduce(sizes)) // TOKENS
    shape = BlockShape(1, sum(sizes) // TOKENS // run, TOKENS, run, Dtype.UINT8)
    return raw_codec(RawLayout(tuple(caches), shape), BlockFormat(EXACT, shape, b"f" * 16, group))


def numbers(of: RawPagedCodec, block_id: int) -> np.ndarray:
    together = torch.cat([cache[block_id] for cache in of.layout.caches])
    return together.numpy().reshape(of.format.shape.numbers)


def batch_of(of: RawPagedCodec, block_ids: list[int], offsets: list[int]) -> Batch:
    keys = [bytes([n]) * 32 for n in range(len(block_ids))]
    return of.batch(0, keys, block_ids, [TOKENS * n for n in range(len(block_ids))], offsets)


LAYOUTS = [
    ((64, 128, 64), 256, 0, torch.int64),
    ((64, 128, 64), 512, 64, torch.int64),
    ((72, 24), 100, 4, torch.int32),
    ((88, 8), 98, 2, torch.int16),
    ((104, 24), 131, 1, torch.uint8),
    ((800,), 800, 0, torch.int64),
]


@pytest.mark.parametrize("at_once", [1, 2**20])
@pytest.mark.parametrize(("sizes", "stride", "first", "unit"), LAYOUTS)
def test_encoded_blocks_are_numpys_and_come_back(
    sizes: tuple[int, ...],
    stride: int,
    first: int,
    unit: torch.dtype,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raw, "BYTES_AT_ONCE", at_once)
    of = codec(sizes, stride, first)
    assert of.layout.unit is unit
    room = of.form(0).nbytes
    offsets = [2 * room + 16, 0, room]
    buffer = torch.full((3 * room + 23,), 7, dtype=torch.uint8)  # a tail that is no whole run
    batch = batch_of(of, [5, 2, 9], offsets)
    of.encode(batch, buffer)
    assert batch.status.tolist() == [GOOD] * 3
    for n, (block_id, at) in enumerate(zip([5, 2, 9], offsets, strict=True)):
        none = np.empty(of.format.shape.value_numbers, np.uint8)
        told = {"key": bytes([n]) * 32, "first_token": TOKENS * n, "exact": 0}
        assert np.array_equal(buffer[at : at + room].numpy(), of.format.encode(numbers(of, block_id), none, **told))
    assert (buffer[2 * room : 2 * room + 16] == 7).all(), "what lies between blocks is left alone"
    before = [cache.clone() for cache in of.layout.caches]
    back = batch_of(of, [0, 7, 3], offsets)
    of.verify(back, buffer)
    assert back.status.tolist() == [GOOD] * 3
    of.decode(back, buffer)
    for then, now in zip(before, of.layout.caches, strict=True):
        right = then.clone()
        right[[0, 7, 3]] = then[[5, 2, 9]]
        assert torch.equal(now, right)


@pytest.mark.parametrize(
    ("at", "cause"), [(0, "checksum"), (wire.KEY_AT, "checksum"), (230, "checksum"), (-1, "checksum")]
)
def test_a_damaged_block_is_found_and_left_alone(at: int, cause: str) -> None:
    of = codec((64, 128, 64), 256)
    room = of.form(0).nbytes
    buffer = torch.zeros(2 * room, dtype=torch.uint8)
    batch = batch_of(of, [5, 2], [0, room])
    of.encode(batch, buffer)
    buffer[room + at % room] ^= 1
    before = [cache.clone() for cache in of.layout.caches]
    back = batch_of(of, [0, 7], [0, room])
    of.verify(back, buffer)
    assert [status_cause(status) for status in back.status.tolist()] == [None, cause]
    of.decode(back, buffer)
    for then, now in zip(before, of.layout.caches, strict=True):
        assert torch.equal(now[0], then[5])
        assert torch.equal(now[1:], then[1:])


def test_layers_of_another_size_are_refused() -> None:
    of = codec((64, 128, 64), 256)
    with pytest.raises(ShapeError, match=r"has 256 bytes: the layers have 128\."):
        raw_codec(RawLayout(of.layout.caches[1:2], of.layout.shape), of.format)
    with pytest.raises(ShapeError, match="the paged cache has"):
        raw_codec(RawLayout(of.layout.caches, BlockShape(1, 1, 1, 256, Dtype.UINT8)), of.format)


def test_opaque_layers_whose_blocks_lie_further_apart_are_copied_apart() -> None:
    near, far = torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 128, dtype=torch.uint8)[:, :64]
    opaque = RawLayout((near, far), BlockShape(2, 1, 1, 64, Dtype.UINT8))
    coded = (torch.zeros(4, 2 * 2 * 8 * 32).bfloat16(),)
    runs = PagedLayout(coded, 2, 8, 32, 1024, 64, 128, 0, 32, opaque=opaque).raw()
    assert [(len(run.caches), 2 * run.block_stride) for run in runs] == [(1, 64), (1, 128)]
