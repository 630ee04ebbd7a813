"""GPU codec for blocks of opaque bytes: states of recurrent layers, and KV caches in a byte format of vLLM's own.

States are kept exact or in fewer bits; all else is kept exact. torch's operations move the bytes, and CUDA kernels
compute the checksums. Encoding, verifying and decoding never make the host wait for the device.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat
from manthan.codec.cpu.state import STATE_CODECS, StateCodec
from manthan.codec.errors import ShapeError
from manthan.codec.gpu.cuda_codec import Job, constants, sources
from manthan.codec.gpu.nvrtc import ALONE, Module
from manthan.codec.gpu.paged import ALIGNMENT, GOOD, Batch, PagedCodec, RawLayout
from manthan.codec.gpu.states import StateCoder

BYTES_AT_ONCE = 2**27
"""Most bytes of the blocks processed at once, unless a block is larger. Temporaries take about three times as much."""
SOURCES = ("common.cu", "seal.cu")


class RawPagedCodec(PagedCodec):
    """`PagedCodec` for opaque bytes. An encoded block has one section: the bytes by layer, or output of `StateCoder`.

    `Batch.exact` is ignored: all blocks have `form(0)`. kernels: of the checksum, `seals` if None. Raises CompileError,
    and ShapeError if the layers' sizes do not add up to a block of `format`.
    """

    layout: RawLayout

    def __init__(self, layout: RawLayout, format: BlockFormat, kernels: Module | None = None) -> None:
        super().__init__(layout, format)
        form, found = self.form(0), math.prod(format.shape.numbers)
        nbytes = sum(cache.shape[1] for cache in layout.caches)
        if nbytes != found:
            raise ShapeError(f"a block of {format.shape} has {found} bytes: the layers have {nbytes}.")
        self._nbytes, self._raw_nbytes, self._start = form.nbytes, nbytes, form.starts[0]
        state, codes_states = format.facts.state, format.codec in STATE_CODECS.values()
        self._coder = StateCoder(StateCodec(format.codec, state)) if state and codes_states else None
        self._unit = layout.unit
        self._caches = [cache.view(self._unit) for cache in layout.caches]
        self._kernels = kernels or seals(self.device)
        self._job = Job(nbytes=form.nbytes, head_nbytes=form.header.nbytes)

    def encode(self, batch: Batch, buffer: Tensor) -> None:
        """Encode. Status is GOOD for all blocks, except for states that `StateCoder` cannot encode."""
        batch.status.fill_(GOOD)
        with torch.inference_mode():
            for some in self._batches(batch):
                rows = self._unsealed(batch, some)
                _units(buffer).index_copy_(0, self._places(batch.offsets[some]), _units(rows.view(-1)))
        self._launch("seal", batch, buffer)

    def verify(self, batch: Batch, buffer: Tensor) -> None:
        self._launch("verify", batch, buffer)

    def decode(self, batch: Batch, buffer: Tensor) -> None:
        with torch.inference_mode():
            for some in self._batches(batch):
                rows, block_ids = self._rows(buffer, batch.offsets[some]), batch.block_ids[some]
                good, at = (batch.status[some] == GOOD)[:, None], self._start
                if self._coder is not None:
                    rows, at = self._coder.decode(rows[:, at : at + self._coder.nbytes]), 0
                for cache, new in self._by_layer(rows, at):
                    old = cache.index_select(0, block_ids)
                    cache.index_copy_(0, block_ids, torch.where(good, new, old))

    def _unsealed(self, batch: Batch, some: slice) -> Tensor:
        """Return encoded blocks without checksums, uint8 [n, nbytes]. With a `StateCoder`, write their status."""
        block_ids, headers = batch.block_ids[some], batch.headers[some]
        rows = torch.zeros((len(block_ids), self._nbytes), dtype=torch.uint8, device=self.device)
        rows[:, : headers.shape[1]] = headers
        if self._coder is None:
            self._gather(block_ids, rows, self._start)
            return rows
        states = torch.empty((len(block_ids), self._raw_nbytes), dtype=torch.uint8, device=self.device)
        self._gather(block_ids, states, 0)
        encoded, batch.status[some] = self._coder.encode(states)
        rows[:, self._start : self._start + encoded.shape[1]] = encoded
        return rows

    def _gather(self, block_ids: Tensor, rows: Tensor, start: int) -> None:
        """Copy the paged blocks' bytes to `rows`, uint8 [n, bytes], from byte `start` of each row on."""
        for cache, place in self._by_layer(rows, start):
            place.copy_(cache.index_select(0, block_ids))

    def _by_layer(self, rows: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each layer's cache and the layer's columns of `rows`, uint8 [n, bytes], both as the layout's unit.

        start: byte of a row at which the first layer begins.
        """
        units, at = rows.view(self._unit), start // self._unit.itemsize
        for cache in self._caches:
            end = at + cache.shape[1]
            yield cache, units[:, at:end]
            at = end

    def _rows(self, buffer: Tensor, offsets: Tensor) -> Tensor:
        """Return a copy of the encoded blocks at `offsets` of the buffer, uint8 [n, nbytes]."""
        return _units(buffer).index_select(0, self._places(offsets)).view(torch.uint8).view(len(offsets), self._nbytes)

    def _places(self, offsets: Tensor) -> Tensor:
        """Return the indices, in `_units` of the buffer, of all units of the blocks at byte offsets `offsets`."""
        runs = torch.arange(self._nbytes // ALIGNMENT, device=offsets.device)
        return (offsets[:, None] // ALIGNMENT + runs).view(-1)

    def _batches(self, batch: Batch) -> Iterator[slice]:
        """Yield slices of the batch: the blocks that are processed at once."""
        n, step = len(batch.block_ids), max(1, BYTES_AT_ONCE // max(self._nbytes, self._raw_nbytes))
        return (slice(first, min(first + step, n)) for first in range(0, n, step))

    def _launch(self, name: str, batch: Batch, buffer: Tensor) -> None:
        """Launch a kernel with a block of threads for each encoded block."""
        job = self._job.of(batch, buffer)
        self._kernels.launch(name, job, job.n * ALONE)


def _units(buffer: Tensor) -> Tensor:
    """Return the buffer's whole units of ALIGNMENT bytes, as int64 [units, 2]."""
    return buffer[: len(buffer) // ALIGNMENT * ALIGNMENT].view(torch.int64).view(-1, ALIGNMENT // 8)


@lru_cache
def seals(device: torch.device) -> Module:
    """Return the kernels that write and verify checksums of blocks of any content. Raises CompileError."""
    return Module(f"{constants(128, Dtype.BFLOAT16, True)}\n{sources(SOURCES)}", device)
