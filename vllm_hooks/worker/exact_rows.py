"""Exact copies of paged blocks in the memory of the paged cache's device."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from manthan.codec import wire
from manthan.codec.gpu.paged import PagedCodec


class ExactRows:
    """Paged blocks as they are to rows of an encoded block's size, and back; on the current stream, without waiting.

    A block's copy is its bytes in all layers as the cache has them, in `parts` rows with a header and a checksum each.
    codec: seals and verifies them; its layout's caches are [blocks, elements], with nothing else in a block.
    """

    def __init__(self, codec: PagedCodec, parts: int) -> None:
        self._codec, self.parts = codec, parts
        self._caches = codec.layout.caches
        self._numbers = len(self._caches) * self._caches[0].shape[1]
        self._payload = codec.nbytes - wire.HEADER.size

    def make(self, block_ids: Tensor, slots: Tensor, headers: Tensor) -> Tensor:
        """The copies of n blocks, uint8 [n * parts, nbytes]. slots: int64, all rows in order. headers: of all rows."""
        n = len(block_ids)
        with torch.inference_mode():
            numbers = torch.stack([cache.index_select(0, block_ids) for cache in self._caches], 1)
            flat = numbers.view(n, -1).view(torch.uint8)
            payloads = pad(flat, (0, self.parts * self._payload - flat.shape[1]))
            rows = pad(payloads.view(-1, self._payload), (wire.HEADER.size, 0))
            self._codec.seal(rows, slots, headers)
        return rows

    def write(self, block_ids: Tensor, rows: Tensor, slots: Tensor, headers: Tensor, status: Tensor) -> None:
        """Write copies back into those of n blocks all of whose rows are as they were made.

        status: int32 [n * parts]; at 0 or above for a good row, as `status_cause` explains otherwise. What a codec
        calls a scale is a number here: whether it is finite does not matter.
        """
        n, caches = len(block_ids), self._caches
        self._codec.verify(rows, slots, headers, status)
        with torch.inference_mode():
            good = (status >= 0).view(n, self.parts).all(1)
            flat = rows[:, wire.HEADER.size :].reshape(n, -1)[:, : self._numbers * caches[0].itemsize]
            new = flat.contiguous().view(caches[0].dtype).view(n, len(caches), -1)
            old = torch.stack([cache.index_select(0, block_ids) for cache in caches], 1)
            for cache, numbers in zip(caches, torch.where(good[:, None, None], new, old).unbind(1), strict=True):
                cache.index_copy_(0, block_ids, numbers)
