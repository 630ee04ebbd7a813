"""Published codecs and formats as plain references, for comparison: `manthan eval quality --codec kvarn`.

The references are in the repository, not in the wheel. Each encodes a tile into real bytes, so that its bits per number
can be measured. A tile has one head's keys or values in one layer of a block, float32 [tokens, head_dim]. Only KVTC
encodes all heads and several layers together.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from manthan.codec.base import ByteArray, Codec, Kind, Numbers, Positions, Section
from manthan.codec.cpu.numbers import as_floats, as_numbers
from manthan.codec.model import NO_FACTS, ModelFacts

Floats = npt.NDArray[np.float32]


def pack(numbers: npt.NDArray[np.integer], bits: int) -> ByteArray:
    """Return whole numbers from 0 to 2**bits - 1 as bytes, `bits` bits each, lowest bit first."""
    digits = np.asarray(numbers, np.uint32).reshape(-1, 1) >> np.arange(bits, dtype=np.uint32) & 1
    return np.packbits(digits.astype(np.uint8).ravel(), bitorder="little")


def unpack(encoded: ByteArray, bits: int, count: int) -> npt.NDArray[np.int64]:
    """Return the first `count` whole numbers that `pack` has packed."""
    digits = np.unpackbits(encoded, count=bits * count, bitorder="little").reshape(count, bits).astype(np.int64)
    found: npt.NDArray[np.int64] = digits @ (1 << np.arange(bits))
    return found


def halves(x: Floats) -> ByteArray:
    """Return the bytes of the numbers rounded to fp16."""
    return np.ascontiguousarray(x, "<f2").view(np.uint8).ravel()


@dataclass(frozen=True)
class Peer:
    """Preset (codec with its settings) for `manthan.codec.registry`.

    Args:
        name: codec's name.
        encode: function from a tile and "key" or "value" to bytes. Equal shapes and kinds take equally many bytes.
        decode: function from bytes, "key" or "value", and the tile's shape to the tile.
    """

    name: str
    encode: Callable[[Floats, Kind], ByteArray]
    decode: Callable[[ByteArray, Kind, tuple[int, int]], Floats]

    def codec(self, head_dim: int, facts: ModelFacts = NO_FACTS) -> "PeerCodec":
        return PeerCodec(self)

    def bits(self, x: Floats, kind: Kind) -> float:
        """Return the encoded bits per number of a tile."""
        return 8 * self.encode(x, kind).size / x.size


class PeerCodec(Codec):
    """Codec that encodes the tiles of a section (numbers of a block) by a peer, one after another."""

    def __init__(self, peer: Peer) -> None:
        self.name, self._peer = peer.name, peer

    def max_nbytes(self, section: Section) -> int:
        return sum(section.layers * section.heads * self._size(section, kind) for kind in section.vector_kinds)

    def encode(self, x: Numbers, section: Section, positions: Positions, out: ByteArray) -> int:
        at = 0
        tiles = as_floats(x).reshape(len(section.vector_kinds), -1, section.tokens, section.head_dim)
        for kind, of_kind in zip(section.vector_kinds, tiles, strict=True):
            for tile in of_kind:
                encoded = self._peer.encode(tile, kind)
                out[at : at + encoded.size] = encoded
                at += encoded.size
        return at

    def decode(self, encoded: ByteArray, section: Section, positions: Positions) -> Numbers:
        at, made, shape = 0, [], (section.tokens, section.head_dim)
        for kind in section.vector_kinds:
            size = self._size(section, kind)
            for _ in range(section.layers * section.heads):
                made.append(self._peer.decode(encoded[at : at + size], kind, shape))
                at += size
        return as_numbers(np.stack(made).astype(np.float32).reshape(section.shape), section.dtype)

    def _size(self, section: Section, kind: Kind) -> int:
        return self._peer.encode(np.ones((section.tokens, section.head_dim), np.float32), kind).size
