"""What an engine asks of, and tells to, whoever keeps the books of its cold store."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from manthan.manager.sessions.session import Drop, Stranger
from manthan.manager.stores.redis.schema import SessionRecord


@dataclass
class Answers:
    """What has come back since the last look. Each list is in order."""

    granted: list[bytes] = field(default_factory=list)
    """Blocks to encode now: there is room for them."""
    stored: list[bytes] = field(default_factory=list)
    """Blocks that need no encoding: another engine has stored them."""
    refused: list[tuple[bytes, str]] = field(default_factory=list)
    """Blocks for which there is no room, or no answer; with the cause."""
    found: dict[str, int] = field(default_factory=dict)
    """By request id, how many of the keys it asked for are stored, from the first on without a gap."""
    lost: list[bytes] = field(default_factory=list)
    """Blocks that are not stored after all."""
    expired: list[str] = field(default_factory=list)
    """Sessions whose time to live has passed."""
    emptied: bool = False
    """Whether all that was stored is gone."""
    used: int | None = None
    """Blocks in the store, whoever's they are; None if nobody has counted."""
    strangers: list[Stranger] | None = None
    """Sessions of other engines in that store, or None if nobody has looked."""


class Directory(ABC):
    """Never makes its caller wait: answers are fetched with `take`, in the same step at the earliest.

    is_shared: whether there is anything to look up, or anybody to tell.
    """

    is_shared: ClassVar[bool]

    @abstractmethod
    def start(self) -> None:
        """The engine is about to serve."""

    @abstractmethod
    def reserve(self, keys: Sequence[bytes]) -> None:
        """Ask for room for blocks; each is answered as granted, stored or refused."""

    @abstractmethod
    def look_up(self, request_id: str, keys: Sequence[bytes]) -> bool:
        """Ask how many of these are stored that this engine does not know of. False if no answer will come."""

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


class LocalDirectory(Directory):
    """For a store of this engine alone: the manager's own count is all that there is to know."""

    is_shared = False
    is_up = True

    def __init__(self) -> None:
        self._granted: list[bytes] = []

    def start(self) -> None:
        pass

    def reserve(self, keys: Sequence[bytes]) -> None:
        self._granted += keys

    def look_up(self, request_id: str, keys: Sequence[bytes]) -> bool:
        return False

    def tell(self, records: Iterable[SessionRecord], drops: Iterable[Drop], departed: Iterable[Stranger]) -> None:
        pass

    def reset(self) -> str:
        return ""

    def take(self) -> Answers:
        taken, self._granted = self._granted, []
        return Answers(granted=taken)

    @property
    def has_answers(self) -> bool:
        return bool(self._granted)

    def close(self) -> None:
        pass
