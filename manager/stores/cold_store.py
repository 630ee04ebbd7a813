"""Where codes lie: cold stores by kind. A store belongs to one rank and is called from several threads."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from manthan.manager.stores.arena import Arena, Extent, room, usable

Buffer = NDArray[np.uint8]
Found: TypeAlias = Buffer | str | None
"""What was read: a block; the cause why what is there cannot be used, a metric label; or None, if nothing is there."""

CHUNK = 64 << 20
"""Memory is taken in pieces of so many bytes, as it is needed."""
STORE_FULL = "store_full"
"""The cause of a refusal: the bytes do not fit in what is left of the budget."""


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
    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Found]:
        """The blocks, in order. tenant: who asks. Raises ColdStoreError where it cannot tell.

        Each is the reader's own, or never changes: it stays as it is when the block is dropped.
        """

    @abstractmethod
    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        """Those of these blocks that are not there. Raises ColdStoreError where it cannot tell."""

    @abstractmethod
    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        """Remove blocks; unknown keys are ignored."""

    def go_first(self, group: int, keys: Sequence[bytes]) -> None:  # noqa: B027 most stores have one tier
        """A store with a tier in front of another moves these blocks out of it before all others, in this order."""

    def reached(self, step: int) -> None:  # noqa: B027 most stores are one rank's alone
        """All drops that were ordered up to this step of the engine, by its number, are carried out on this rank."""

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


class _Kept(NamedTuple):
    """A block in memory: where, and how many bytes it has."""

    extents: tuple[Extent, ...]
    nbytes: int


class _Memory:
    """Bytes by address; the system gives them when they are first written."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._chunks: dict[int, Buffer] = {}

    def write(self, kept: _Kept, buf: Buffer) -> None:
        at = 0
        for piece in self._pieces(kept):
            piece[:] = buf[at : at + piece.nbytes]
            at += piece.nbytes

    def read(self, kept: _Kept) -> Buffer:
        """A copy."""
        return np.concatenate(list(self._pieces(kept)))

    def _pieces(self, kept: _Kept) -> Iterator[Buffer]:
        """A block's bytes as views, in order: one for each extent and each chunk that it lies in."""
        left = kept.nbytes
        for start, size in kept.extents:
            end = start + min(size, left)
            left -= end - start
            while start < end:
                number, at = divmod(start, CHUNK)
                piece = self._chunk(number)[at : at + end - start]
                yield piece
                start += piece.nbytes

    def _chunk(self, number: int) -> Buffer:
        if number not in self._chunks:
            self._chunks.setdefault(number, np.empty(min(CHUNK, self._nbytes - number * CHUNK), np.uint8))
        return self._chunks[number]


class HostStore(FrontStore):
    """Codes in this process's memory, within a budget that holds at every moment.

    max_bytes: the budget. Bytes are copied on the way in and out; a block that is being written is not there yet.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.peak = 0
        """The most bytes ever used."""
        self._lock = threading.Lock()
        self._arena = Arena(max_bytes)
        self._memory = _Memory(self._arena.nbytes)
        self._blocks: dict[tuple[int, bytes], _Kept] = {}

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        return {key: STORE_FULL for key, buf in blocks.items() if not self._put((group, key), buf)}

    def _put(self, block: tuple[int, bytes], buf: Buffer) -> bool:
        with self._lock:
            self._remove(block)
            extents = self._arena.allocate(buf.nbytes)
            self.peak = max(self.peak, self._arena.used)
        if extents is None:
            return False
        kept = _Kept(extents, buf.nbytes)
        self._memory.write(kept, buf)
        with self._lock:
            self._remove(block)  # somebody else may have put it meanwhile
            self._blocks[block] = kept
        return True

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Buffer | None]:
        return (self._read((group, key)) for key in keys)

    def _read(self, block: tuple[int, bytes]) -> Buffer | None:
        kept = self._blocks.get(block)
        if kept is None:
            return None
        buf = self._memory.read(kept)
        with self._lock:  # if it was dropped meanwhile, others' bytes may be among these
            return buf if self._blocks.get(block) is kept else None

    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        with self._lock:
            return [key for key in keys if (group, key) not in self._blocks]

    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._remove((group, key))

    def cleared(self, place: str) -> "HostStore":
        """This one; what is being put is kept when it is whole."""
        with self._lock:
            for block in list(self._blocks):
                self._remove(block)
        return self

    def close(self) -> None:
        self.cleared("")

    def room(self, nbytes: int) -> int:
        return room(nbytes)

    @property
    def used(self) -> int:
        with self._lock:
            return self._arena.used

    @property
    def usable(self) -> int:
        """Some bytes that are free keep holes large."""
        return usable(self.max_bytes)

    @property
    def available(self) -> int:
        """Bytes that blocks can still take."""
        with self._lock:
            return self._arena.available

    def names(self) -> list[tuple[int, bytes]]:
        with self._lock:
            return list(self._blocks)

    def check(self) -> None:
        """Raise IntegrityError if the books of its memory do not agree with themselves."""
        with self._lock:
            self._arena.check()

    def _remove(self, block: tuple[int, bytes]) -> None:
        kept = self._blocks.pop(block, None)
        if kept is not None:
            self._arena.free(kept.extents)


COLD_STORES = ("host", "device", "disk", "redis", "tiered")
"""What `cold_store.kind` may be; "device" is GPU memory, which the worker half manages itself."""
