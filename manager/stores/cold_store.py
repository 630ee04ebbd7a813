"""Where codes lie: cold stores by kind. A store belongs to one rank and is called from several threads."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from manthan.manager.stores.arena import Arena, room, usable
from manthan.manager.stores.memory import Buffer as Buffer
from manthan.manager.stores.memory import Chunks, Kept, Memory

Found: TypeAlias = Buffer | str | None
"""What was read: a block; the cause why what is there cannot be used, a metric label; or None, if nothing is there."""

STORE_FULL = "store_full"
"""The cause of a refusal: the bytes do not fit in what is left of the budget."""


class Landing(ABC):
    """Memory of whoever reads, which blocks may come to lie in. For the thread that reads."""

    @abstractmethod
    def room(self, nbytes: int, blocks: int = 1) -> Buffer:
        """So many bytes for so many blocks, wherever they are."""

    @abstractmethod
    def lend(self, memory: Buffer, give_back: Callable[[], object]) -> None:
        """Blocks are read where they lie in this memory, which the reader reaches as it reaches its own. give_back: to
        be called when it has done with them."""

    @abstractmethod
    def lose(self) -> None:
        """Rooms that were given may be written to at any time from now on: they are not to be used again."""


class ColdStoreError(Exception):
    """A store did not do what was asked; `cause` is a metric label."""

    cause: str = "store"


class ColdStore(ABC):
    """Encoded blocks by KV cache group and block key.

    Whoever keeps the store's books, the heart or scripts in Redis, reserves bytes before a block is encoded. The store
    itself counts what it has, and refuses what does not fit.
    """

    @abstractmethod
    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        """Keep blocks; keys that are there already are replaced. tenant: whose they are, for a store that seals them.

        Returns those that were not kept, each with the cause, a metric label.
        """

    @abstractmethod
    def read(
        self, group: int, keys: Sequence[bytes], tenant: str = "", into: "Landing | None" = None
    ) -> Iterator[Found]:
        """The blocks, in order. tenant: who asks. Raises ColdStoreError where it cannot tell.

        Each is the reader's own, or never changes: it stays as it is when the block is dropped. into: where those may
        come to lie that the store reads itself; what it lends then stays as it is until `into` gives it back.
        """

    @abstractmethod
    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        """Those of these blocks that are not there. Raises ColdStoreError where it cannot tell."""

    @abstractmethod
    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        """Remove blocks; unknown keys are ignored."""

    def reached(self, step: int) -> None:  # noqa: B027 most stores are one rank's alone
        """All drops that were ordered up to this step of the engine, by its number, are carried out on this rank.

        Before the first step nothing is asked for."""

    @abstractmethod
    def cleared(self, place: str) -> "ColdStore":
        """An empty store to use instead of this one from now on, which may be this one; `place` is the directory's
        name for it."""

    @abstractmethod
    def close(self) -> None:
        """Let go of memory, connections and threads."""

    @abstractmethod
    def room(self, nbytes: int) -> int:
        """What a block of so many bytes takes of the budget."""


class FrontStore(ColdStore):
    """One that may stand in front of another: see `manthan.manager.stores.tiered`."""

    @property
    @abstractmethod
    def usable(self) -> int:
        """Bytes that blocks should take, at most."""

    @property
    @abstractmethod
    def used(self) -> int:
        """Bytes that blocks take, those that are being written too."""

    @abstractmethod
    def names(self) -> list[tuple[int, bytes]]:
        """KV cache group and key of the blocks that are there, in the order in which they were stored."""

    @abstractmethod
    def cleared(self, place: str) -> "FrontStore":
        """See ColdStore."""


class HostStore(FrontStore):
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

    def cleared(self, place: str) -> "HostStore":
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


COLD_STORES = ("host", "device", "disk", "redis")
"""What `tiers.kind` may be; "device" is GPU memory, which the worker half manages itself."""
