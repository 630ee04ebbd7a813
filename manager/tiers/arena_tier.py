"""Base class of the tiers that keep compressed blocks at addresses, within a hard budget; and the tier in RAM."""

import logging
import threading
from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from manthan.manager.pool import BlockName
from manthan.manager.tiers.arena import Arena, Extent, room, split, usable
from manthan.manager.tiers.tier import STORE_FULL, Buffer, Tier, part_ends
from manthan.manager.transfer import RESET

logger = logging.getLogger("vllm.manthan.tier")

CHUNK = 64 << 20  # bytes of memory that RamTier allocates at once, on demand


@dataclass(slots=True, eq=False)
class Placed:
    """Stored block and its addresses, or a cut-off end of a block and the end's addresses."""

    extents: tuple[Extent, ...]
    nbytes: int  # of the block, without headers that the tier adds; 0 for a cut-off end
    digest: int | None = 0  # checksum of the block, in a disk tier only; None if unknown, because the block was cut
    sequence: int = 0  # number of the write, in a disk tier only
    is_dropped: bool = False  # True if the block was dropped, or was cut and has another `Placed` now
    inner: tuple[int, ...] = ()  # offset, in bytes, at which each part but the last ends; see `tier.part_ends`
    cut: "tuple[BlockName, Placed] | None" = None  # of an end: its block, and `Placed` of the parts that stay


class ArenaTier(Tier):
    """Tier that knows which block is at which addresses, and erases dropped blocks.

    The bytes of a dropped block, or of a cut-off end, count as free at once. They are erased on a thread, or by a put
    that needs the room. Their addresses are used again only after the erasure.

    max_bytes: budget. No put exceeds it, but blocks of an earlier server may. arena: addresses that blocks can get.
    """

    can_trim = True

    def __init__(self, max_bytes: int, arena: Arena) -> None:
        self.max_bytes = max_bytes
        self.peak = 0  # largest number of bytes ever taken, not yet erased blocks included
        self._lock = threading.Lock()  # held to change the attributes below, or to read several; never during I/O
        self._arena = arena
        self._blocks: OrderedDict[BlockName, Placed] = OrderedDict()  # least recently stored or touched first
        self._writing: dict[BlockName, object] = {}  # by block being written, an object that stands for the newest put
        self._dropped: deque[Placed] = deque()
        self._dropped_nbytes = 0  # bytes of dropped blocks not yet erased
        self._erasing = threading.Lock()  # held during an erasure, and taken before `_lock`
        self._eraser: threading.Thread | None = None

    @abstractmethod
    def _write(self, name: BlockName, placed: Placed, buf: Buffer) -> str | None:
        """Write a block. Return the cause of a failure, or None. A disk tier sets digest and sequence of `placed`."""

    @abstractmethod
    def _erase(self, extents: tuple[Extent, ...]) -> None: ...

    def _shorten(self, name: BlockName, placed: Placed) -> None:
        """Write the new size of a cut block to the medium, before the cut-off end is erased. Do nothing in RAM."""

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        causes = {key: self._put((group, key), buf) for key, buf in blocks.items()}
        return {key: cause for key, cause in causes.items() if cause is not None}

    def _put(self, name: BlockName, buf: Buffer) -> str | None:
        """Store a block. Return the cause if it is not stored, or None."""
        mine = object()
        with self._lock:
            self._remove(name)
            self._writing[name] = mine
        placed = Placed((), buf.nbytes)
        try:
            placed.inner = part_ends(buf)[:-1]
            placed.extents = self._allocate(self.room(buf.nbytes)) or ()
            cause = self._write(name, placed, buf) if placed.extents else STORE_FULL
        except Exception as error:  # any error costs this block alone
            logger.warning("Manthan: a block cannot be stored: %s: %s", type(error).__name__, error)
            cause = "internal"
        with self._lock:
            is_wanted = self._writing.get(name) is mine
            if is_wanted:
                del self._writing[name]
            if is_wanted and cause is None:
                self._blocks[name] = placed
            else:
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

    def trim(self, group: int, keys: Iterable[bytes], parts: int) -> None:
        with self._lock:
            for name in [(group, key) for key in keys]:
                placed = self._blocks.get(name)
                if placed is not None and parts <= len(placed.inner):
                    nbytes, inner = placed.inner[parts - 1], placed.inner[: parts - 1]
                    extents, rest = split(placed.extents, self.room(nbytes))
                    placed.is_dropped = True
                    self._blocks[name] = left = Placed(extents, nbytes, None, placed.sequence, inner=inner)
                    self._discard(Placed(tuple(rest), 0, cut=(name, left)))
            self._erase_soon()

    def cleared(self, place: str) -> "ArenaTier":
        with self._lock:
            for name in [*self._blocks, *self._writing]:
                self._remove(name)
            self._erase_soon()
        return self

    def touch(self, group: int, keys: Sequence[bytes]) -> None:
        """Mark blocks as used now, in reverse order. So `make_room` drops the last of `keys` before the first."""
        with self._lock:
            for name in [(group, key) for key in reversed(keys)]:
                if name in self._blocks:
                    self._blocks.move_to_end(name)

    def make_room(self, nbytes: int) -> bool:
        """Drop the least recently used blocks until `nbytes` of `usable` are free. Return False if they cannot be."""
        with self._lock:
            free = self.usable - self._arena.used + self._dropped_nbytes
            while free < nbytes <= self.usable and self._blocks:
                name, placed = next(iter(self._blocks.items()))
                free += sum(extent.nbytes for extent in placed.extents)
                self._remove(name)
            self._erase_soon()
        return free >= nbytes

    @property
    def used(self) -> int:
        """Bytes taken by blocks, blocks being written included."""
        with self._lock:
            return self._arena.used - self._dropped_nbytes

    @property
    def usable(self) -> int:
        """Most bytes that the caller should store, so that holes stay large. `put_all` stores up to `max_bytes`."""
        return usable(self.max_bytes)

    # -- the caller holds the lock ----------------------------------------------------------------------

    def _remove(self, name: BlockName) -> None:
        self._writing.pop(name, None)
        if (placed := self._blocks.pop(name, None)) is not None:
            self._discard(placed)

    def _discard(self, placed: Placed) -> None:
        self._dropped_nbytes += sum(extent.nbytes for extent in placed.extents)
        placed.is_dropped = True
        self._dropped.append(placed)

    def _erase_soon(self) -> None:
        if self._dropped and self._eraser is None:
            self._eraser = threading.Thread(target=self._erase_all, name="manthan-erase", daemon=True)
            self._eraser.start()

    # -- without the lock -------------------------------------------------------------------------------

    def _allocate(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Return the addresses of `nbytes` bytes; None if they do not fit. Erase dropped blocks as needed."""
        can_erase = True
        while True:
            with self._lock:
                fits = self._arena.used + nbytes <= self.max_bytes  # a file of an earlier budget may have more room
                if fits and (extents := self._arena.allocate(nbytes)) is not None:
                    self.peak = max(self.peak, self._arena.used)
                    return extents
                if not can_erase or self._arena.available + self._dropped_nbytes < nbytes:
                    return None
            can_erase = self._erase_one()  # False if another thread has erased the last dropped block

    def _erase_one(self) -> bool:
        """Erase the block, or the cut-off end, that was dropped first. Return False if there is none."""
        with self._erasing:
            with self._lock:
                if not self._dropped:
                    return False
                placed = self._dropped.popleft()
            if placed.cut is not None and not placed.cut[1].is_dropped:
                self._shorten(*placed.cut)
            self._erase(placed.extents)
            with self._lock:
                self._dropped_nbytes -= sum(extent.nbytes for extent in placed.extents)
                self._arena.free(placed.extents)
        return True

    def _erase_all(self) -> None:
        while True:
            while self._erase_one():
                pass
            with self._lock:
                if not self._dropped:
                    self._eraser = None
                    return


class RamTier(ArenaTier):
    """Tier in this process's memory. `put_all` and `read` copy the bytes."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, Arena(max_bytes))
        self._chunks: dict[int, Buffer] = {}

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Buffer | None]:
        return (self._read((group, key)) for key in keys)

    def _read(self, name: BlockName) -> Buffer | None:
        placed = self._blocks.get(name)
        if placed is None:
            return None
        buf = np.concatenate([np.empty(0, np.uint8), *self._pieces(placed.extents, placed.nbytes)])
        with self._lock:  # if the block was dropped meanwhile, the bytes may be those of another block
            return buf if self._blocks.get(name) is placed else None

    def close(self) -> None:
        self.cleared("")
        while self._erase_one():
            pass

    def room(self, nbytes: int) -> int:
        return room(max(1, nbytes))

    def _write(self, name: BlockName, placed: Placed, buf: Buffer) -> None:
        at = 0
        for piece in self._pieces(placed.extents, placed.nbytes):
            piece[:] = buf[at : at + piece.nbytes]
            at += piece.nbytes

    def _erase(self, extents: tuple[Extent, ...]) -> None:
        for piece in self._pieces(extents, sum(extent.nbytes for extent in extents)):
            piece[:] = 0

    def _pieces(self, extents: Sequence[Extent], left: int) -> Iterator[Buffer]:
        """Yield views of the memory at the first `left` bytes of extents, in order. Allocate missing memory."""
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
