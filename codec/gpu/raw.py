"""Blocks of bytes that nobody looks into, between a paged cache and encoded blocks on a GPU: states of recurrent
layers, and caches of fp8 or of codes of vLLM's own.

The bytes are moved by torch's operations, on whatever device; on a GPU the kernels of all codecs make the checksums,
since torch would start one operation a kibibyte. Nothing here makes the host wait for the device.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from manthan.codec.block import BlockFormat
from manthan.codec.errors import ShapeError
from manthan.codec.gpu.cuda_codec import Job, constants, sources
from manthan.codec.gpu.nvrtc import ALONE, Module
from manthan.codec.gpu.paged import ALIGNMENT, GOOD, Batch, PagedCodec, RawLayout
from manthan.codec.gpu.torch_codec import checksums, header_status
from manthan.codec.registry import SPECS
from manthan.codec.wire import CHECKSUM

BYTES_AT_ONCE = 2**27
"""Of encoded blocks: temporaries are about three times as large."""
SOURCES = ("common.cu", "seal.cu")
ANY_CODEC = SPECS["k3v3"]
"""What `seal.cu` is compiled beside: it has to do with none."""


class RawPagedCodec(PagedCodec):
    """`PagedCodec` for them: a block is one section, its bytes as they are, layer by layer.

    All of its forms are one: no first token is more exact than others. kernels: `seals`; None for torch's own
    operations. Raises ShapeError.
    """

    layout: RawLayout

    def __init__(self, layout: RawLayout, format: BlockFormat, kernels: Module | None = None) -> None:
        super().__init__(layout, format)
        form = self.form(0)
        [found] = form.sizes
        nbytes = sum(cache.shape[1] for cache in layout.caches)
        if nbytes != found:
            raise ShapeError(f"a block of {format.shape} has {found} bytes: the layers have {nbytes}.")
        self._nbytes, self._start = form.nbytes, form.starts[0]
        self._unit = layout.unit
        self._caches = [cache.view(self._unit) for cache in layout.caches]
        self._kernels = kernels
        self._job = Job(nbytes=form.nbytes, head_nbytes=form.header.nbytes)

    def encode(self, batch: Batch, codes: Tensor) -> None:
        """Any bytes can be: each status becomes GOOD."""
        batch.status.fill_(GOOD)
        with torch.inference_mode():
            for some in self._batches(batch):
                rows = self._gathered(batch.block_ids[some], batch.headers[some])
                if self._kernels is None:
                    rows[:, CHECKSUM] = checksums(rows).view(-1, 1).view(torch.uint8)
                _units(codes).index_copy_(0, self._places(batch.offsets[some]), _units(rows.view(-1)))
        self._launch("seal", batch, codes)

    def verify(self, batch: Batch, codes: Tensor) -> None:
        self._launch("verify", batch, codes)
        if self._kernels is None:
            with torch.inference_mode():
                for some in self._batches(batch):
                    rows = self._rows(codes, batch.offsets[some])
                    batch.status[some] = header_status(rows, batch.headers[some])

    def decode(self, batch: Batch, codes: Tensor) -> None:
        with torch.inference_mode():
            for some in self._batches(batch):
                rows, block_ids = self._rows(codes, batch.offsets[some]), batch.block_ids[some]
                good = (batch.status[some] == GOOD)[:, None]
                for cache, new in self._by_layer(rows):
                    old = cache.index_select(0, block_ids)
                    cache.index_copy_(0, block_ids, torch.where(good, new, old))

    def _gathered(self, block_ids: Tensor, headers: Tensor) -> Tensor:
        """Encoded blocks [n, nbytes], unsealed."""
        rows = torch.zeros((len(block_ids), self._nbytes), dtype=torch.uint8, device=self.device)
        rows[:, : headers.shape[1]] = headers
        for cache, place in self._by_layer(rows):
            place.copy_(cache.index_select(0, block_ids))
        return rows

    def _by_layer(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each layer's cache, and its part of encoded blocks [n, nbytes], in units."""
        units, at = rows.view(self._unit), self._start // self._unit.itemsize
        for cache in self._caches:
            end = at + cache.shape[1]
            yield cache, units[:, at:end]
            at = end

    def _rows(self, codes: Tensor, offsets: Tensor) -> Tensor:
        """Encoded blocks [n, nbytes], out of a buffer."""
        return _units(codes).index_select(0, self._places(offsets)).view(torch.uint8).view(len(offsets), self._nbytes)

    def _places(self, offsets: Tensor) -> Tensor:
        """Of the blocks that begin at these bytes, in runs of ALIGNMENT bytes."""
        runs = torch.arange(self._nbytes // ALIGNMENT, device=offsets.device)
        return (offsets[:, None] // ALIGNMENT + runs).view(-1)

    def _batches(self, batch: Batch) -> Iterator[slice]:
        """Runs of as many blocks as are worked on at once."""
        n, step = len(batch.block_ids), max(1, BYTES_AT_ONCE // self._nbytes)
        return (slice(first, min(first + step, n)) for first in range(0, n, step))

    def _launch(self, name: str, batch: Batch, codes: Tensor) -> None:
        """A block of threads for each block, where there are kernels."""
        if self._kernels is not None:
            job = self._job.of(batch, codes)
            self._kernels.launch(name, job, job.n * ALONE)


def _units(codes: Tensor) -> Tensor:
    """A buffer as runs of ALIGNMENT bytes, int64 [n, 2], without what is left over at its end."""
    return codes[: len(codes) // ALIGNMENT * ALIGNMENT].view(torch.int64).view(-1, ALIGNMENT // 8)


@lru_cache
def seals(device: torch.device) -> Module:
    """The kernels that seal blocks and check them, whatever is in them. Raises CompileError."""
    return Module(f"{constants(ANY_CODEC, 128, torch.bfloat16, True, True)}\n{sources(SOURCES)}", device)
