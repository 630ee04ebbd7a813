"""Coder of recurrent states in bf16 or 8 bits, by torch's own operations, on any device.

It gives the same bytes and numbers as `manthan.codec.cpu.state`, and never makes the host wait for the device. A part
of a state is all heads' matrices, or the last inputs of a short convolution. The inputs are stored exactly.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from manthan.codec.base import Dtype
from manthan.codec.cpu.numbers import LARGEST
from manthan.codec.cpu.state import LEVELS, StateCodec, StatePart
from manthan.codec.gpu.paged import DTYPES, GOOD

BYTES_AT_ONCE = 2**26
"""Most bytes of float32 numbers handled at once, unless a layer has more. Temporaries take about four times as much."""
NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


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
        step = max(1, BYTES_AT_ONCE // (4 * n * place.numbers))
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
