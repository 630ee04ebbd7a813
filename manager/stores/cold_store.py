"""Where codes lie: cold stores by kind. A store belongs to one rank and is called from several threads."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

Buffer = NDArray[np.uint8]


class ColdStoreError(Exception):
    """A store did not do what was asked; `cause` is a metric label."""

    cause: ClassVar[str] = "store"


class ColdStoreFullError(ColdStoreError):
    """The bytes asked for do not fit in what is left of the budget."""

    cause: ClassVar[str] = "store_full"


class ColdStore(ABC):
    """Encoded blocks by key, within a byte budget.

    Bytes are reserved before a block is encoded and become used when it is put: used and reserved bytes
    together never exceed the budget.
    """

    kind: ClassVar[str]

    @abstractmethod
    def reserve(self, nbytes: int) -> None:
        """Set bytes aside; raises ColdStoreFullError."""

    @abstractmethod
    def unreserve(self, nbytes: int) -> None:
        """Give back what was reserved and will not be put."""

    @abstractmethod
    def put_all(self, blocks: Mapping[bytes, Buffer]) -> dict[bytes, str]:
        """Keep blocks whose bytes are reserved; keys that are there already are replaced.

        Returns those that were not kept, each with the cause, a metric label; they stay reserved.
        """

    @abstractmethod
    def read(self, keys: Sequence[bytes]) -> Iterator[Buffer | None]:
        """The blocks, in order; None for each that is not there. Raises ColdStoreError where it cannot tell."""

    @abstractmethod
    def absent(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of these blocks that are not there. Raises ColdStoreError where it cannot tell."""

    @abstractmethod
    def drop(self, keys: Iterable[bytes]) -> None:
        """Remove blocks; unknown keys are ignored."""

    def go_first(self, keys: Sequence[bytes]) -> None:  # noqa: B027 most stores have one tier
        """A store with a tier in front of another moves these blocks out of it before all others, in this order."""

    @abstractmethod
    def cleared(self, place: str) -> "ColdStore":
        """An empty store to use instead of this one from now on, which may be this one; `place` is the directory's
        name for it. What is being put keeps its reservations."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections and threads."""


class HostStore(ColdStore):
    """Codes in this process's memory."""

    kind: ClassVar[str] = "host"

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.peak = 0
        """The most bytes ever used and reserved together."""
        self._lock = threading.Lock()
        self._blocks: dict[bytes, Buffer] = {}
        self._used = 0
        self._reserved = 0

    def reserve(self, nbytes: int) -> None:
        with self._lock:
            free = self.max_bytes - self._used - self._reserved
            if nbytes > free:
                raise ColdStoreFullError(f"{nbytes} bytes do not fit: {free} of {self.max_bytes} are free")
            self._reserved += nbytes
            self.peak = max(self.peak, self._used + self._reserved)

    def unreserve(self, nbytes: int) -> None:
        with self._lock:
            self._reserved -= nbytes

    def put(self, key: bytes, buf: Buffer) -> None:
        """`put_all` of one."""
        with self._lock:
            self._reserved -= buf.nbytes
            self._used += buf.nbytes - self._pop(key)
            self._blocks[key] = buf

    def put_all(self, blocks: Mapping[bytes, Buffer]) -> dict[bytes, str]:
        for key, buf in blocks.items():
            self.put(key, buf)
        return {}

    def get(self, keys: Sequence[bytes]) -> list[Buffer | None]:
        """`read` as a list."""
        with self._lock:
            return [self._blocks.get(key) for key in keys]

    def read(self, keys: Sequence[bytes]) -> Iterator[Buffer | None]:
        return iter(self.get(keys))

    def absent(self, keys: Sequence[bytes]) -> list[bytes]:
        with self._lock:
            return [key for key in keys if key not in self._blocks]

    def drop(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._used -= self._pop(key)

    def clear(self) -> None:
        """Remove all blocks; reservations stay."""
        with self._lock:
            self._blocks.clear()
            self._used = 0

    def cleared(self, place: str) -> "HostStore":
        self.clear()
        return self

    def close(self) -> None:
        self.clear()

    @property
    def used(self) -> int:
        """Bytes of the blocks in the store."""
        with self._lock:
            return self._used

    def _pop(self, key: bytes) -> int:
        old = self._blocks.pop(key, None)
        return 0 if old is None else old.nbytes


COLD_STORES = (HostStore.kind, "device", "redis", "tiered")
"""What `cold_store.kind` may be; "device" is GPU memory, which the worker half manages itself."""
