"""Codec that keeps a section's numbers bit for bit."""

import math

from manthan.codec.base import ByteArray, Codec, Numbers, Positions, Section
from manthan.codec.errors import SizeError

EXACT = "exact"


class ExactCodec(Codec):
    """Codec of any numbers, finite or not."""

    name = EXACT

    def max_nbytes(self, section: Section) -> int:
        return math.prod(section.shape) * section.dtype.numpy.itemsize

    def encode(self, x: Numbers, section: Section, positions: Positions, out: ByteArray) -> int:
        nbytes = self.max_nbytes(section)
        out[:nbytes].view(x.dtype).reshape(section.shape)[...] = x
        return nbytes

    def decode(self, encoded: ByteArray, section: Section, positions: Positions) -> Numbers:
        """Return a view of `encoded`."""
        nbytes = self.max_nbytes(section)
        if encoded.size != nbytes:
            raise SizeError(f"{encoded.size} bytes are not {section.shape} in {section.dtype.name}: {nbytes} are.")
        return encoded.view(section.dtype.numpy).reshape(section.shape)
