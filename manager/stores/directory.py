"""What an engine asks of, and tells to, whoever keeps the books of a cold store that engines share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from manthan.manager.sessions.session import Drop, Stranger
from manthan.manager.stores.redis.schema import BlockId, SessionRecord

Needed: TypeAlias = Callable[[int], Sequence[BlockId]]
"""What who goes on behind so many blocks of a chain needs of other KV cache groups."""


class Anchored(NamedTuple):
    """So many of the blocks that a request asked for have behind them what other KV cache groups need, in so many bytes
    each."""

    blocks: int
    sizes: Sequence[int]


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
    anchored: dict[str, Anchored] = field(default_factory=dict)
    """By request id, the most of those blocks that can be gone on behind, where that was asked."""
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
    def look_up(self, request_id: str, group: int, keys: Sequence[bytes], needed: Needed | None = None) -> bool:
        """Ask which of these are stored that this engine does not know of, and, with `needed`, behind how many of them
        one can go on. False if no answer will come. needed: is called on another thread, perhaps."""

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
