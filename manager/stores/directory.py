"""What an engine asks of, and tells to, whoever keeps the books of a cold store that engines share."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from manthan.manager.sessions.session import Drop, Stranger
from manthan.manager.stores.redis.schema import BlockId, SessionRecord


class Room(NamedTuple):
    """Room for one block: so many bytes at most, of all ranks together."""

    key: bytes
    group: int
    nbytes: int


@dataclass
class Answers:
    """What has come back since the last look. Each list is in order; blocks are named by group and key."""

    granted: list[BlockId] = field(default_factory=list)
    """Blocks to encode now: there is room for them."""
    stored: list[tuple[int, bytes, int]] = field(default_factory=list)
    """Blocks that need no encoding: another engine has stored them, in so many bytes of all ranks."""
    refused: list[tuple[int, bytes, str]] = field(default_factory=list)
    """Blocks for which there is no room, or no answer; with the cause."""
    found: dict[str, list[int]] = field(default_factory=dict)
    """By request id, the bytes of the blocks that are stored of those it asked for, from the first on without a gap."""
    lost: list[BlockId] = field(default_factory=list)
    """Blocks that are not stored after all."""
    expired: list[str] = field(default_factory=list)
    """Sessions whose time to live has passed."""
    emptied: bool = False
    """Whether all that was stored is gone."""
    used: int | None = None
    """Bytes in the store or reserved there, whoever's they are; None if nobody has counted."""
    strangers: list[Stranger] | None = None
    """Sessions of other engines in that store, or None if nobody has looked."""


class Directory(ABC):
    """Never makes its caller wait: answers are fetched with `take`, in the same step at the earliest."""

    @abstractmethod
    def start(self) -> None:
        """The engine is about to serve."""

    @abstractmethod
    def reserve(self, rooms: Sequence[Room]) -> None:
        """Ask for room for blocks; each is answered as granted, stored or refused."""

    @abstractmethod
    def look_up(self, request_id: str, group: int, keys: Sequence[bytes]) -> bool:
        """Ask which of these are stored that this engine does not know of. False if no answer will come."""

    @abstractmethod
    def tell(self, records: Iterable[SessionRecord], drops: Iterable[Drop], departed: Iterable[Stranger]) -> None:
        """Say what has changed: sessions, codes that are dropped, and other engines' sessions that have to go."""

    @abstractmethod
    def reset(self) -> str:
        """Forget everything; returns where codes are kept from now on, as the ranks' stores understand it."""

    @abstractmethod
    def take(self) -> Answers:
        """What has come back since the last call."""

    @property
    @abstractmethod
    def has_answers(self) -> bool:
        """Whether `take` would have something."""

    @property
    @abstractmethod
    def is_up(self) -> bool:
        """Whether the store answers."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is under way, within a bounded time."""
