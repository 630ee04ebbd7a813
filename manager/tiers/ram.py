"""RAM that blocks lie in, by address."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from manthan.manager.tiers.arena import Arena, Extent, room, usable
from manthan.manager.tiers.tier import STORE_FULL, Buffer, FrontTier, Landing

CHUNK = 64 << 20
"""Memory is taken in pieces of so many bytes, as it is needed."""


@dataclass(slots=True, eq=False)
class Kept:
    """A block in memory: where, and how many bytes it has. lent: to so many readers. is_dropped: its room is free when
    the last of them has given it back."""

    extents: tuple[Extent, ...]
    nbytes: int
    lent: int = 0
    is_dropped: bool = False


class Memory(ABC):
    """Bytes by address."""

    @property
    @abstractmethod
    def spans(self) -> Sequence[Extent]:
        """The addresses that may be used, in order. There may come more behind them; none goes."""

    @property
    @abstractmethod
    def lendable(self) -> Buffer | None:
        """All of it, by address, if it can be read where it lies; else it has to be copied."""

    def start(self) -> None:  # noqa: B027 most memory is there at once
        """It is used from now on."""

    @abstractmethod
    def close(self) -> None:
        """It is not used any more."""

    @abstractmethod
    def _piece(self, start: int, nbytes: int) -> Buffer:
        """A view of what is at these addresses, or of the first of them."""

    def write(self, kept: Kept, buf: Buffer) -> None:
        at = 0
        for piece in self._pieces(kept):
            piece[:] = buf[at : at + piece.nbytes]
            at += piece.nbytes

    def read(self, kept: Kept) -> Buffer:
        """A copy."""
        return np.concatenate(list(self._pieces(kept)))

    def _pieces(self, kept: Kept) -> Iterator[Buffer]:
        """A block's bytes as views, in order."""
        left = kept.nbytes
        for start, size in kept.extents:
            end = start + min(size, left)
            left -= end - start
            while start < end:
                piece = self._piece(start, end - start)
                yield piece
                start += piece.nbytes


class Chunks(Memory):
    """So many bytes; the system gives them when they are first written."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._chunks: dict[int, Buffer] = {}

    @property
    def spans(self) -> Sequence[Extent]:
        return (Extent(0, self._nbytes),)

    @property
    def lendable(self) -> None:
        return None

    def close(self) -> None:
        """Nothing: it goes when nobody has it any more."""

    def _piece(self, start: int, nbytes: int) -> Buffer:
        number, at = divmod(start, CHUNK)
        if number not in self._chunks:
            self._chunks.setdefault(number, np.empty(min(CHUNK, self._nbytes - number * CHUNK), np.uint8))
        return self._chunks[number][at : at + nbytes]


class RamTier(FrontTier):
    """Codes in this process's memory, within a budget that holds at every moment.

    max_bytes: the budget. memory: where they lie, if there is more to be said of it; what it has not got yet is not
    there to be used. Bytes are copied on the way in; on the way out where they cannot be lent. A block that is being
    written is not there yet.
    """

    def __init__(self, max_bytes: int, memory: Memory | None = None) -> None:
        self.max_bytes = max_bytes
        self.peak = 0
        """The most bytes ever used."""
        self._lock = threading.Lock()
        self._memory = memory or Chunks(max_bytes)
        self._arena = Arena(0)
        self._spans = 0
        """So many of the memory's are the arena's."""
        self._lent = 0
        """Bytes of dropped blocks that somebody still reads."""
        self._blocks: dict[tuple[int, bytes], Kept] = {}
        self._grow()

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        return {key: STORE_FULL for key, buf in blocks.items() if not self._put((group, key), buf)}

    def _put(self, block: tuple[int, bytes], buf: Buffer) -> bool:
        with self._lock:
            self._grow()
            self._remove(block)
            extents = self._arena.allocate(buf.nbytes)
            self.peak = max(self.peak, self._arena.used)
        if extents is None:
            return False
        kept = Kept(extents, buf.nbytes)
        self._memory.write(kept, buf)
        with self._lock:
            self._remove(block)  # somebody else may have put it meanwhile
            self._blocks[block] = kept
        return True

    def read(
        self, group: int, keys: Sequence[bytes], tenant: str = "", into: Landing | None = None
    ) -> Iterator[Buffer | None]:
        if into is not None and (memory := self._memory.lendable) is not None:
            return self._lend(group, keys, into, memory)
        return (self._read((group, key)) for key in keys)

    def _read(self, block: tuple[int, bytes]) -> Buffer | None:
        kept = self._blocks.get(block)
        if kept is None:
            return None
        buf = self._memory.read(kept)
        with self._lock:  # if it was dropped meanwhile, others' bytes may be among these
            return buf if self._blocks.get(block) is kept else None

    def _lend(self, group: int, keys: Sequence[bytes], into: Landing, memory: Buffer) -> Iterator[Buffer | None]:
        with self._lock:
            found = [self._blocks.get((group, key)) for key in keys]
            lent = [kept for kept in found if kept is not None]
            for kept in lent:
                kept.lent += 1
        into.lend(memory, partial(self._take_back, lent))
        return (None if kept is None else self._view(kept, memory) for kept in found)

    def _view(self, kept: Kept, memory: Buffer) -> Buffer:
        if len(kept.extents) > 1:
            return self._memory.read(kept)
        start = kept.extents[0].start
        return memory[start : start + kept.nbytes]

    def _take_back(self, lent: Sequence[Kept]) -> None:
        with self._lock:
            for kept in lent:
                kept.lent -= 1
                if kept.is_dropped and not kept.lent:
                    self._lent -= room(kept.nbytes)
                    self._arena.free(kept.extents)

    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        with self._lock:
            return [key for key in keys if (group, key) not in self._blocks]

    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._remove((group, key))

    def reached(self, step: int) -> None:
        self._memory.start()

    def cleared(self, place: str) -> "RamTier":
        """This one; what is being put is kept when it is whole."""
        with self._lock:
            for block in list(self._blocks):
                self._remove(block)
        return self

    def close(self) -> None:
        self.cleared("")
        self._memory.close()

    def room(self, nbytes: int) -> int:
        return room(nbytes)

    @property
    def used(self) -> int:
        with self._lock:
            return self._arena.used - self._lent

    @property
    def usable(self) -> int:
        """Some bytes that are free keep holes large."""
        with self._lock:
            self._grow()
            return usable(self._arena.nbytes)

    def names(self) -> list[tuple[int, bytes]]:
        with self._lock:
            return list(self._blocks)

    def _remove(self, block: tuple[int, bytes]) -> None:
        kept = self._blocks.pop(block, None)
        if kept is None:
            return
        if kept.lent:
            kept.is_dropped = True
            self._lent += room(kept.nbytes)
        else:
            self._arena.free(kept.extents)

    def _grow(self) -> None:
        """What the memory has got meanwhile is the arena's."""
        spans = self._memory.spans
        while self._spans < len(spans):
            self._arena.join(spans[self._spans])
            self._spans += 1
