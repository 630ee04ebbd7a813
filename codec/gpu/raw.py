"""GPU codec for blocks of opaque bytes: states of recurrent layers, and KV caches in a byte format of vLLM's own.

States are kept exact or in fewer bits, with the bytes and numbers of `manthan.codec.cpu.state`; all else is kept exact.
torch's operations move and encode the bytes, and CUDA kernels compute the checksums. Encoding, verifying and decoding
never make the host wait for the device.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat
from manthan.codec.cpu.numbers import LARGEST
from manthan.codec.cpu.state import LEVELS, STATE_CODECS, StateCodec, StatePart
from manthan.codec.errors import ShapeError
from manthan.codec.gpu.cuda_codec import Job, constants, module
from manthan.codec.gpu.nvrtc import ALONE, Module
from manthan.codec.gpu.paged import ALIGNMENT, DTYPES, GOOD, Batch, PagedCodec, RawLayout

BYTES_AT_ONCE = 2**27
"""Most bytes of the blocks processed at once, unless a block is larger. Temporaries take about three times as much."""
STATE_BYTES_AT_ONCE = 2**26
"""Most bytes of float32 numbers of states at once, unless a layer has more. Temporaries take four times as much."""
SOURCES = ("common.cu", "seal.cu")
NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


class RawPagedCodec(PagedCodec):
    """`PagedCodec` for opaque bytes. An encoded block has one section: the bytes by layer, or output of `StateCoder`.

    `Batch.exact` does not matter: all forms are equal. kernels: of the checksum; None for seal.cu's. Raises
    CompileError, and ShapeError if the layers' sizes do not add up to a block of `format`.
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
        self._kernels = kernels or module(constants(128, Dtype.BFLOAT16, True), SOURCES, self.device)
        self._job = Job(head_nbytes=form.header.nbytes)

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
                rows = _units(buffer).index_select(0, self._places(batch.offsets[some])).view(torch.uint8)
                rows, block_ids = rows.view(-1, self._nbytes), batch.block_ids[some]
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
        states, start = rows, self._start
        if self._coder is not None:
            states, start = rows.new_empty((len(block_ids), self._raw_nbytes)), 0
        for cache, columns in self._by_layer(states, start):
            columns.copy_(cache.index_select(0, block_ids))
        if self._coder is not None:
            encoded, batch.status[some] = self._coder.encode(states)
            rows[:, self._start : self._start + encoded.shape[1]] = encoded
        return rows

    def _by_layer(self, rows: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each layer's cache and the layer's columns of `rows`, uint8 [n, bytes], both as the layout's unit.

        start: byte of a row at which the first layer begins.
        """
        units, at = rows.view(self._unit), start // self._unit.itemsize
        for cache in self._caches:
            end = at + cache.shape[1]
            yield cache, units[:, at:end]
            at = end

    def _places(self, offsets: Tensor) -> Tensor:
        """Return the indices, in `_units` of the buffer, of all units of the blocks at byte offsets `offsets`."""
        runs = torch.arange(self._nbytes // ALIGNMENT, device=offsets.device)
        return (offsets[:, None] // ALIGNMENT + runs).view(-1)

    def _batches(self, batch: Batch) -> Iterator[slice]:
        """Yield slices of the batch: the blocks that are processed at once."""
        n, step = len(batch.block_ids), max(1, BYTES_AT_ONCE // max(self._nbytes, self._raw_nbytes))
        return (slice(first, min(first + step, n)) for first in range(0, n, step))

    def _launch(self, name: str, batch: Batch, buffer: Tensor) -> None:
        job = self._job.of(batch, buffer)
        self._kernels.launch(name, job, job.n * ALONE)


def _units(buffer: Tensor) -> Tensor:
    """Return the buffer's whole units of ALIGNMENT bytes, as int64 [units, 2]."""
    return buffer[: len(buffer) // ALIGNMENT * ALIGNMENT].view(torch.int64).view(-1, ALIGNMENT // 8)


class _Place(NamedTuple):
    """Part of a state, of all layers.

    at: offset in a layer's bytes. start: offset in the encoded state. nbytes: encoded bytes of all layers.
    """

    part: StatePart
    at: int
    start: int
    nbytes: int

    @property
    def numbers(self) -> int:
        """Count of the part's numbers in one layer."""
        return self.part.nbytes // self.part.dtype.numpy.itemsize


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to `dtype`, ties to even. x: float32, finite and within the range of `dtype`."""
    if dtype == torch.bfloat16:  # by its bits, because some devices' casts flush denormal numbers
        bits = x.view(torch.int32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).to(torch.int16).view(torch.bfloat16)
    return x.to(dtype)


class StateCoder:
    """Coder of n states of all layers: uint8 [n, layers * bytes of a layer] to uint8 [n, nbytes] and back."""

    def __init__(self, codec: StateCodec) -> None:
        self._codec, self._layers, self._layer_nbytes = codec, codec.layout.layers, codec.layout.layer_nbytes
        self._places = tuple(self._placed(codec))
        self.nbytes = sum(place.nbytes for place in self._places)

    def encode(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return encoded states, and status int32 [n]: GOOD, or the least index, in a part, of a non-finite row."""
        n, device = len(states), states.device
        pages = states.view(n, self._layers, self._layer_nbytes)
        encoded = torch.empty((n, self.nbytes), dtype=torch.uint8, device=device)
        status = torch.full((n,), GOOD, dtype=torch.int32, device=device)
        for place, found in self._parts(pages):
            if self._codec.is_exact(place.part):
                encoded[:, place.start : place.start + place.nbytes] = found.reshape(n, -1)
                continue
            for first, last in self._some(place, n):
                numbers = found[:, first:last].reshape(n, -1).view(NUMBERS[place.part.dtype])
                x = numbers.to(torch.float32).view(n, -1, place.part.row)
                largest = x.abs().amax(2)
                status = torch.minimum(status, _first_bad(largest, first * place.numbers // place.part.row))
                made = self._coded(x, largest)
                for span, part in zip(self._spans(place, first, last), made, strict=True):
                    encoded[:, span] = part.reshape(n, -1).view(torch.uint8)
        return encoded, status

    def decode(self, encoded: Tensor) -> Tensor:
        """Return the states, uint8 [n, layers * bytes of a layer]; padding is zeros."""
        n = len(encoded)
        pages = torch.zeros((n, self._layers, self._layer_nbytes), dtype=torch.uint8, device=encoded.device)
        for place, to in self._parts(pages):
            if self._codec.is_exact(place.part):
                to.copy_(encoded[:, place.start : place.start + place.nbytes].reshape(to.shape))
                continue
            for first, last in self._some(place, n):
                x = self._decoded(
                    [encoded[:, span].contiguous() for span in self._spans(place, first, last)], place.part
                )
                limit = LARGEST[place.part.dtype]
                numbers = cast(x.clamp(-limit, limit), NUMBERS[place.part.dtype])
                to[:, first:last] = numbers.view(torch.uint8).view(n, last - first, -1)
        return pages.view(n, -1)

    def _coded(self, x: Tensor, largest: Tensor) -> list[Tensor]:
        """Return what is stored of float32 [n, rows, numbers of a row]: numbers in bf16, or scales and steps.

        largest: each row's largest magnitude, [n, rows].
        """
        if not self._codec.is_int8:
            limit = LARGEST[Dtype.BFLOAT16]
            return [cast(x.clamp(-limit, limit), torch.bfloat16)]
        # A tensor, because CUDA divides by a Python number as a multiplication with the inverse.
        levels = torch.full((), float(LEVELS), device=x.device)
        scales = largest / levels
        some = scales[:, :, None] > 0
        steps = torch.where(some, x / torch.where(some, scales[:, :, None], 1.0), 0.0)
        return [scales, steps.round().clamp(-LEVELS, LEVELS).to(torch.int8)]

    def _decoded(self, parts: list[Tensor], part: StatePart) -> Tensor:
        """Undo `_coded`: return float32 [n, numbers]."""
        if not self._codec.is_int8:
            return parts[0].view(torch.bfloat16).to(torch.float32)
        scales, steps = parts[0].view(torch.float32), parts[1].view(torch.int8)
        x = steps.view(*scales.shape, part.row).to(torch.float32) * scales[:, :, None]
        return x.view(len(x), -1)

    def _spans(self, place: _Place, first: int, last: int) -> list[slice]:
        """Return slices of an encoded state, for each result of `_coded` of layers `first` to `last` (exclusive)."""

        def span(start: int, each: int) -> slice:
            return slice(start + first * each, start + last * each)

        if not self._codec.is_int8:
            return [span(place.start, 2 * place.numbers)]
        scales = 4 * (place.numbers // place.part.row)
        return [span(place.start, scales), span(place.start + self._layers * scales, place.numbers)]

    def _some(self, place: _Place, n: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of layers to handle at once, as (first layer, end)."""
        step = max(1, STATE_BYTES_AT_ONCE // (4 * n * place.numbers))
        return ((first, min(first + step, self._layers)) for first in range(0, self._layers, step))

    def _parts(self, pages: Tensor) -> Iterator[tuple[_Place, Tensor]]:
        """Yield each part, and the part's bytes as a view of [n, layers, bytes of a layer]."""
        return ((place, pages[:, :, place.at : place.at + place.part.nbytes]) for place in self._places)

    def _placed(self, codec: StateCodec) -> Iterator[_Place]:
        at = start = 0
        for part in codec.layout.parts:
            place = _Place(part, at, start, codec.coded_nbytes(part))
            yield place
            at, start = at + part.nbytes, start + place.nbytes


def _first_bad(largest: Tensor, first: int) -> Tensor:
    """Return int32 [n]: `first` plus the index of the first non-finite row of [n, rows]; GOOD without any."""
    rows = torch.arange(first, first + largest.shape[1], dtype=torch.int32, device=largest.device)
    return torch.where(torch.isfinite(largest), GOOD, rows).amin(1)
