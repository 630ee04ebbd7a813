"""Encode recurrent states of Mamba and linear attention layers, in bf16 or in 8 bits with a scale for each row.

A layer's state is all that the layer keeps of the tokens so far. A part of it is all heads' matrices, or the last
inputs of a short convolution. In float32 the matrices take a tenth of a session's bytes or more. The inputs are few,
and are kept exact. The encoded parts stand one behind the other, each for all layers:

    kept exact     the part's bytes, layer after layer
    bf16           uint16 [numbers], rounded to the nearest, ties to even
    int8           float32 [rows], the scales; int8 [rows, numbers of a row]

A matrix row's scale is the largest magnitude / 127. An error is at most half the scale, before rounding to the dtype.
Padding is not kept, and is decoded to zeros.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from manthan.codec.base import ByteArray, Codec, Dtype, Numbers, Positions, Section
from manthan.codec.cpu.numbers import Floats, as_floats, as_numbers
from manthan.codec.errors import NonFiniteError, ShapeError, SizeError

STATE_CODECS = {"bf16": "state-bf16", "int8": "state-int8"}
"""Codec names, by the name in the configuration."""
LEVELS = 127


@dataclass(frozen=True)
class StatePart:
    """Part of a layer's state: the matrices, or the inputs of the convolution."""

    nbytes: int  # in a single layer
    row: int = 0  # count of numbers in a matrix's row, the last dimension; 0 for a part that is kept exact
    dtype: Dtype = Dtype.UINT8


@dataclass(frozen=True)
class StateLayout:
    """Layout of a block's bytes: `layer_nbytes` for each layer, with the parts first and padding at the end."""

    layers: int
    layer_nbytes: int
    parts: tuple[StatePart, ...]


class StateCodec(Codec):
    """Codec of states, named in STATE_CODECS. Methods with a section raise ShapeError if its layout differs."""

    def __init__(self, name: str, layout: StateLayout) -> None:
        self.name, self.layout, self.is_int8 = name, layout, name == STATE_CODECS["int8"]

    def max_nbytes(self, section: Section) -> int:
        expected = self.layout.layers * self.layout.layer_nbytes
        if section.dtype is not Dtype.UINT8 or math.prod(section.shape) != expected:
            raise ShapeError(f"{section.shape} in {section.dtype.name} are not the {expected} bytes of states.")
        return sum(map(self.coded_nbytes, self.layout.parts))

    def encode(self, x: Numbers, section: Section, positions: Positions, out: ByteArray) -> int:
        self.max_nbytes(section)  # raises ShapeError
        pages, start, end = x.reshape(self.layout.layers, self.layout.layer_nbytes), 0, 0
        for part in self.layout.parts:
            found = np.ascontiguousarray(pages[:, start : start + part.nbytes])
            start += part.nbytes
            for made in self._encoded(found, part):
                plain = made.reshape(-1).view(np.uint8)
                out[end : end + plain.size] = plain
                end += plain.size
        return end

    def decode(self, encoded: ByteArray, section: Section, positions: Positions) -> Numbers:
        nbytes = self.max_nbytes(section)
        if encoded.size != nbytes:
            raise SizeError(f"{encoded.size} bytes are not states of {section.layers} layers: {nbytes} are.")
        layout, start, end = self.layout, 0, 0
        pages: ByteArray = np.zeros((layout.layers, layout.layer_nbytes), np.uint8)
        for part in layout.parts:
            some = encoded[end : end + self.coded_nbytes(part)]
            pages[:, start : start + part.nbytes] = self._decoded(some, part).view(np.uint8).reshape(layout.layers, -1)
            start, end = start + part.nbytes, end + some.size
        return pages.reshape(section.shape)

    def is_exact(self, part: StatePart) -> bool:
        """True if the part is kept exact: it must be, or encoding would make it no smaller."""
        return not part.row or (part.dtype.numpy.itemsize <= 2 and not self.is_int8)

    def coded_nbytes(self, part: StatePart) -> int:
        """Return the encoded bytes of a part, for all layers."""
        if self.is_exact(part):
            return self.layout.layers * part.nbytes
        numbers = self.layout.layers * part.nbytes // part.dtype.numpy.itemsize
        return numbers + 4 * (numbers // part.row) if self.is_int8 else 2 * numbers

    def _encoded(self, found: ByteArray, part: StatePart) -> list[npt.NDArray[np.generic]]:
        """Return the arrays to write for a part. found: the part's bytes, uint8 [layers, nbytes]."""
        if self.is_exact(part):
            return [found]
        x = as_floats(found.reshape(-1).view(part.dtype.numpy)).reshape(-1, part.row)
        largest = np.abs(x).max(axis=1)
        if not np.isfinite(largest).all():
            at = int(np.argmin(np.isfinite(largest)))
            raise NonFiniteError(f"row {at} of the recurrent states has a number that is not finite.")
        if not self.is_int8:
            return [as_numbers(x.copy(), Dtype.BFLOAT16)]
        scales: Floats = largest / np.float32(LEVELS)
        steps = np.divide(x, scales[:, None], out=np.zeros_like(x), where=scales[:, None] > 0)
        return [scales, np.clip(np.rint(steps), -LEVELS, LEVELS).astype(np.int8)]

    def _decoded(self, encoded: ByteArray, part: StatePart) -> npt.NDArray[np.generic]:
        """Return a part's decoded bytes or numbers, for all layers."""
        if self.is_exact(part):
            return encoded
        if not self.is_int8:
            return as_numbers(as_floats(encoded.view(np.uint16)), part.dtype)
        rows = encoded.size // (part.row + 4)
        scales, steps = encoded[: 4 * rows].copy().view(np.float32), encoded[4 * rows :].view(np.int8)
        return as_numbers(steps.reshape(rows, part.row) * scales[:, None], part.dtype)
