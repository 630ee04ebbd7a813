"""Tiers of one engine alone, with a hard budget: their base, and the tier in RAM."""

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from manthan.manager.tiers.arena import Arena, Extent, room, usable
from manthan.manager.tiers.tier import STORE_FULL, Buffer, Tier
from manthan.manager.transfer import RESET

Name: TypeAlias = tuple[int, bytes]
"""KV cache group and hash of a block."""
CHUNK = 64 << 20
"""Bytes of memory that are allocated at once, when they are needed."""


@dataclass(slots=True, eq=False)
class Placed:
    """A block in a tier.

    Args:
        nbytes: Size of the block.
        room: Bytes of the budget that it takes.
        extents: Its addresses in RAM.
        sequence: Number of its file on disk.
    """

    name: Name
    nbytes: int
    room: int
    extents: tuple[Extent, ...] = ()
    sequence: int = 0
    is_dropped: bool = False


class LocalTier(Tier):
    """Keeps the books of blocks, and erases what is dropped.

    The bytes of a dropped block are erased on a thread, or by the put that needs their room. They count as free at
    once. Their room is used again only after that.

    Args:
        max_bytes: Budget, which holds at every moment.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.peak = 0
        """Largest number of bytes that were taken."""
        self._lock = threading.Lock()
        """Lock of all attributes below. No I/O while it is held."""
        self._taken = 0  # by blocks, by those that are being written, and by those that are not erased
        self._blocks: dict[Name, Placed] = {}
        self._writing: dict[Name, object] = {}  # by block, the put that is writing it
        self._dropped: deque[Placed] = deque()
        self._dropped_nbytes = 0  # taken by blocks that are dropped and not erased
        self._erasing = threading.Lock()
        """Held while a block is erased, and taken before the other one."""
        self._eraser: threading.Thread | None = None

    @abstractmethod
    def _write(self, placed: Placed, buf: Buffer) -> str | None:
        """Write a block. Returns a cause if that is not possible."""

    @abstractmethod
    def _erase(self, placed: Placed) -> None:
        """Erase what a block has on the medium."""

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        causes = {key: self._put((group, key), buf) for key, buf in blocks.items()}
        return {key: cause for key, cause in causes.items() if cause is not None}

    def _put(self, name: Name, buf: Buffer) -> str | None:
        """Return a cause if the block is not stored."""
        mine = object()
        with self._lock:
            self._remove(name)
            self._writing[name] = mine
        placed = Placed(name, buf.nbytes, self.room(buf.nbytes))
        is_placed = self._place(placed)
        cause: str | None = "internal"
        try:
            cause = self._write(placed, buf) if is_placed else STORE_FULL
        finally:
            with self._lock:
                is_wanted = self._writing.get(name) is mine
                if is_wanted:
                    del self._writing[name]
                if is_wanted and cause is None:
                    self._blocks[name] = placed
                elif is_placed:
                    self._discard(placed)
                self._erase_soon()
                is_stored = is_wanted or name in self._writing or name in self._blocks
        return cause or (None if is_stored else RESET)

    def absent(self, group: int, keys: Iterable[bytes]) -> list[bytes]:
        with self._lock:
            return [key for key in keys if (group, key) not in self._blocks]

    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._remove((group, key))
            self._erase_soon()

    def cleared(self, place: str) -> "LocalTier":
        with self._lock:
            for name in [*self._blocks, *self._writing]:
                self._remove(name)
            self._erase_soon()
        return self

    def names(self) -> list[Name]:
        """Return the blocks that are there, in the order in which they were stored."""
        with self._lock:
            return list(self._blocks)

    @property
    def used(self) -> int:
        """Bytes that blocks take, and those that are being written."""
        with self._lock:
            return self._taken - self._dropped_nbytes

    @property
    def usable(self) -> int:
        """Bytes that blocks should take at most."""
        return self.max_bytes

    # -- books; the caller holds the lock ---------------------------------------------------------------

    def _remove(self, name: Name) -> None:
        self._writing.pop(name, None)
        if (placed := self._blocks.pop(name, None)) is not None:
            self._discard(placed)

    def _discard(self, placed: Placed) -> None:
        self._dropped_nbytes += placed.room
        placed.is_dropped = True
        self._dropped.append(placed)

    def _take(self, placed: Placed) -> bool:
        """Take room for a block. Returns False if there is none."""
        if self._taken + placed.room > self.max_bytes:
            return False
        self._taken += placed.room
        self.peak = max(self.peak, self._taken)
        return True

    def _give_back(self, placed: Placed) -> None:
        self._taken -= placed.room

    def _erase_soon(self) -> None:
        if self._dropped and self._eraser is None:
            self._eraser = threading.Thread(target=self._erase_all, name="manthan-erase", daemon=True)
            self._eraser.start()

    # -- without the lock -------------------------------------------------------------------------------

    def _place(self, placed: Placed) -> bool:
        """Take room for a block, which dropped ones may yet have. Returns False if there is none."""
        while True:
            with self._lock:
                if self._take(placed):
                    return True
                may_fit = self._taken - self._dropped_nbytes + placed.room <= self.max_bytes
            if not may_fit:
                return False
            if not self._erase_one():  # what another thread was erasing is free now
                with self._lock:
                    return self._take(placed)

    def _erase_one(self) -> bool:
        """Erase the block that was dropped first; False if there is none."""
        with self._erasing:
            with self._lock:
                if not self._dropped:
                    return False
                placed = self._dropped.popleft()
            self._erase(placed)
            with self._lock:
                self._dropped_nbytes -= placed.room
                self._give_back(placed)
        return True

    def _erase_all(self) -> None:
        while True:
            while self._erase_one():
                pass
            with self._lock:
                if not self._dropped:
                    self._eraser = None
                    return


class RamTier(LocalTier):
    """Blocks in this process's memory. Bytes are copied on the way in and on the way out."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._arena = Arena(max_bytes)
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

    @property
    def usable(self) -> int:
        """Bytes that blocks should take at most: some that are free keep holes large."""
        return usable(self._arena.nbytes)

    def _take(self, placed: Placed) -> bool:
        extents = self._arena.allocate(placed.room)
        placed.extents = extents or ()
        return extents is not None and super()._take(placed)

    def _give_back(self, placed: Placed) -> None:
        super()._give_back(placed)
        self._arena.free(placed.extents)

    def _write(self, placed: Placed, buf: Buffer) -> None:
        at = 0
        for piece in self._pieces(placed.extents, placed.nbytes):
            piece[:] = buf[at : at + piece.nbytes]
            at += piece.nbytes

    def _erase(self, placed: Placed) -> None:
        for piece in self._pieces(placed.extents, placed.room):
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
