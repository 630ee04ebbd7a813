"""A tier in RAM."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from manthan.manager.tiers.arena import Arena, Extent, room
from manthan.manager.tiers.arena_tier import ArenaTier, Name, Placed
from manthan.manager.tiers.tier import Buffer

CHUNK = 64 << 20
"""Bytes of memory that are taken at once, when they are needed."""


class Memory(ABC):
    """Bytes by address."""

    @property
    @abstractmethod
    def spans(self) -> Sequence[Extent]:
        """Addresses that may be used, in order. More may come behind them; none goes."""

    def start(self) -> None:  # noqa: B027 most memory is there at once
        """Take note that the memory is used from now on. Called again and again."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory."""

    @abstractmethod
    def _piece(self, start: int, nbytes: int) -> Buffer:
        """Return a view of these addresses, or of the first of them."""

    def write(self, placed: Placed, buf: Buffer) -> None:
        at = 0
        for piece in self._pieces(placed.extents, placed.nbytes):
            piece[:] = buf[at : at + piece.nbytes]
            at += piece.nbytes

    def read(self, placed: Placed) -> Buffer:
        """Return a copy of a block."""
        return np.concatenate([np.empty(0, np.uint8), *self._pieces(placed.extents, placed.nbytes)])

    def erase(self, extents: Sequence[Extent]) -> None:
        for piece in self._pieces(extents, sum(extent.nbytes for extent in extents)):
            piece[:] = 0

    def _pieces(self, extents: Sequence[Extent], left: int) -> Iterator[Buffer]:
        """Yield views of the first `left` bytes of extents, in order."""
        for start, size in extents:
            end = start + min(size, left)
            left -= end - start
            while start < end:
                piece = self._piece(start, end - start)
                yield piece
                start += piece.nbytes


class Chunks(Memory):
    """Memory of this process. The system gives its pages when they are first written."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._chunks: dict[int, Buffer] = {}

    @property
    def spans(self) -> Sequence[Extent]:
        return (Extent(0, self._nbytes),)

    def close(self) -> None:
        """Do nothing: memory goes with the last reference to it."""

    def _piece(self, start: int, nbytes: int) -> Buffer:
        number, at = divmod(start, CHUNK)
        if number not in self._chunks:
            self._chunks.setdefault(number, np.empty(min(CHUNK, self._nbytes - number * CHUNK), np.uint8))
        return self._chunks[number][at : at + nbytes]


class RamTier(ArenaTier):
    """Blocks in this process's memory.

    Bytes are copied on the way in and on the way out.

    Args:
        memory: Where blocks lie. Memory that it has not got yet is not used.
    """

    def __init__(self, max_bytes: int, memory: Memory | None = None) -> None:
        super().__init__(max_bytes, Arena(0))
        self._memory = memory or Chunks(max_bytes)
        self._spans = 0  # number of the memory's spans that are the arena's
        self._grow()

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Buffer | None]:
        return (self._read((group, key)) for key in keys)

    def _read(self, name: Name) -> Buffer | None:
        placed = self._blocks.get(name)
        if placed is None:
            return None
        buf = self._memory.read(placed)
        with self._lock:  # if it was dropped meanwhile, others' bytes may be among these
            return buf if self._blocks.get(name) is placed else None

    def close(self) -> None:
        self.cleared("")
        while self._erase_one():
            pass
        self._memory.close()

    def room(self, nbytes: int) -> int:
        return room(max(1, nbytes))

    @property
    def usable(self) -> int:
        with self._lock:
            self._grow()
        return super().usable

    def _write(self, name: Name, placed: Placed, buf: Buffer) -> None:
        self._memory.start()
        self._memory.write(placed, buf)

    def _erase(self, extents: tuple[Extent, ...]) -> None:
        self._memory.erase(extents)

    def _take(self, nbytes: int) -> tuple[Extent, ...] | None:
        self._grow()
        return super()._take(nbytes)

    def _grow(self) -> None:
        """Add to the arena what the memory has got meanwhile."""
        spans = self._memory.spans
        while self._spans < len(spans):
            self._arena.join(spans[self._spans])
            self._spans += 1
