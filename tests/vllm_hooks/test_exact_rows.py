"""Exact copies as rows, as a GPU makes them, on the CPU with the codec of plain PyTorch."""

import numpy as np
import pytest
import torch
from paged_cache import BLOCKS, HEADS, LAYERS, PRINT, gpu_like, shape_of, write

from manthan.codec import exact, wire
from manthan.codec.gpu.paged import BAD_CHECKSUM, BAD_HEADER, PagedCodec
from manthan.codec.gpu.torch_codec import TorchPagedCodec
from manthan.codec.registry import SPECS
from manthan.vllm_hooks.worker.exact_rows import ExactRows
from manthan.vllm_hooks.worker.layout import paged_layout, probe_layers

KEYS = [bytes([i]) * 32 for i in range(3)]
IDS = [3, 1, 6]


class Cache:
    """A paged cache with three blocks written to, and the rows of their copies."""

    def __init__(self, dtype: torch.dtype = torch.float16, order: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        caches, layers, spec = gpu_like(order)
        self.caches = {name: cache.to(dtype) for name, cache in caches.items()}
        spec = type(spec)(block_size=16, num_kv_heads=HEADS, head_size=64, dtype=dtype)
        probed = probe_layers(self.caches, layers, BLOCKS, shape_of(spec))
        for block in IDS:
            write(self.caches, layers, block, spec, seed=block)
        self.header = wire.BlockHeader("lloyd3", b"", PRINT, LAYERS, *shape_of(spec))
        self.codec: PagedCodec = TorchPagedCodec(SPECS["lloyd3"], paged_layout(probed, shape_of(spec)), self.header)
        self.parts = exact.exact_parts(self.header, dtype.itemsize)
        self.made = ExactRows(self.codec, self.parts)
        keys = [part for key in KEYS for part in exact.part_keys(key, self.parts)]
        self.headers = torch.from_numpy(wire.header_rows(self.header, keys))
        self.slots = torch.arange(len(keys))

    def make(self) -> torch.Tensor:
        return self.made.make(torch.tensor(IDS), self.slots, self.headers)

    def write(self, rows: torch.Tensor, ids: list[int]) -> list[int]:
        """The worst status of each copy."""
        status = torch.zeros(len(rows), dtype=torch.int32)
        self.made.write(torch.tensor(ids), rows, self.slots, self.headers, status)
        return status.view(-1, self.parts).amin(1).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_copies_come_back_bit_for_bit_and_nothing_else_is_written(dtype: torch.dtype, order: tuple[int, ...]) -> None:
    cache = Cache(dtype, order)
    before = {name: one.clone() for name, one in cache.caches.items()}
    rows = cache.make().clone()
    assert rows.shape == (3 * cache.parts, cache.codec.nbytes)
    assert min(cache.write(rows, [5, 2, 7])) >= 0
    for name, now in cache.caches.items():
        assert torch.equal(now[[5, 2, 7]].view(torch.uint8), before[name][IDS].view(torch.uint8))
        assert torch.equal(now[[0, 1, 3, 4, 6]], before[name][[0, 1, 3, 4, 6]])


def test_rows_are_parts_as_the_wire_has_them() -> None:
    cache = Cache()
    rows = cache.make().numpy()
    keys = [part for key in KEYS for part in exact.part_keys(key, cache.parts)]
    for key, row in zip(keys, rows, strict=True):
        assert wire.parse(row, key=key, fingerprint=PRINT).header.codec == "lloyd3"
    payloads = rows[: cache.parts, wire.HEADER.size :].ravel()
    numbers = np.concatenate([one[3].contiguous().view(torch.uint8).numpy().ravel() for one in cache.caches.values()])
    assert np.array_equal(payloads[: numbers.size], numbers)
    assert not payloads[numbers.size :].any()


def test_a_copy_with_a_bad_part_is_left_out_and_the_others_are_not() -> None:
    cache = Cache()
    before = {name: one.clone() for name, one in cache.caches.items()}
    rows = cache.make().clone()
    rows[1, 1000] ^= 1
    rows[cache.parts :][: cache.parts] = rows[cache.parts :][: cache.parts].flip(0).clone()
    bad = cache.write(rows, [5, 2, 7])
    assert bad[0] == BAD_CHECKSUM
    assert bad[1] < BAD_HEADER  # another part's key
    assert bad[2] >= 0
    for name, now in cache.caches.items():
        assert torch.equal(now[7], before[name][6])
        assert not now[[5, 2]].any()


def test_numbers_that_are_no_scales_are_no_damage() -> None:
    """What stands where an encoded block has its scales may be anything: half a float32 for instance."""
    cache = Cache(torch.float32)
    for one in cache.caches.values():
        one[3].view(torch.int32)[:] = 0x3F807F80
    assert min(cache.write(cache.make(), [5, 2, 7])) >= 0
    assert all(torch.equal(one[5], one[3]) for one in cache.caches.values())
