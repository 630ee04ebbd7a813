"""A tier in RAM."""

from collections.abc import Iterator, Sequence

import numpy as np

from manthan.manager.tiers.arena import Arena, Extent, room
from manthan.manager.tiers.arena_tier import ArenaTier, Name, Placed
from manthan.manager.tiers.tier import Buffer

CHUNK = 64 << 20
"""Bytes of memory that are allocated at once, when they are needed."""


class RamTier(ArenaTier):
    """Blocks in this process's memory. Bytes are copied on the way in and on the way out."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, Arena(max_bytes))
        self._chunks: dict[int, Buffer] = {}

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Buffer | None]:
        return (self._read((group, key)) for key in keys)

    def _read(self, name: Name) -> Buffer | None:
        placed = self._blocks.get(name)
        if placed is None:
            return None
        buf = np.concatenate([np.empty(0, np.uint8), *self._pieces(placed.extents, placed.nbytes)])
        with self._lock:  # if it was dropped meanwhile, these may be another block's bytes
            return buf if self._blocks.get(name) is placed else None

    def close(self) -> None:
        self.cleared("")
        while self._erase_one():
            pass

    def room(self, nbytes: int) -> int:
        return room(max(1, nbytes))

    def _write(self, name: Name, placed: Placed, buf: Buffer) -> None:
        at = 0
        for piece in self._pieces(placed.extents, placed.nbytes):
            piece[:] = buf[at : at + piece.nbytes]
            at += piece.nbytes

    def _erase(self, extents: tuple[Extent, ...]) -> None:
        for piece in self._pieces(extents, sum(extent.nbytes for extent in extents)):
            piece[:] = 0

    def _pieces(self, extents: Sequence[Extent], left: int) -> Iterator[Buffer]:
        """Yield views of the first `left` bytes of extents, in order."""
        for start, size in extents:
            end = start + min(size, left)
            left -= end - start
            while start < end:
                number, at = divmod(start, CHUNK)
                if number not in self._chunks:
                    self._chunks.setdefault(number, np.empty(min(CHUNK, self.max_bytes - number * CHUNK), np.uint8))
                piece = self._chunks[number][at : at + end - start]
                yield piece
                start += piece.nbytes
