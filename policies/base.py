"""What a policy is told of a session, and what it answers."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class SessionView:
    """One session as a policy sees it. Times are seconds on the manager's clock, sizes are bytes."""

    session_id: str
    tokens: int
    hot_bytes: int
    cold_bytes: int
    created: float
    last_used: float
    uses: int


class EvictionPolicy(ABC):
    """Orders sessions by who goes first.

    The manager keeps one instance for the hot pool (who is evicted) and one for the cold store (who is
    dropped), tells each of every session that enters, is used, or leaves its place, and takes victims from
    the front. A policy decides; it never acts.
    """

    name: ClassVar[str]

    @abstractmethod
    def used(self, session: SessionView) -> None:
        """A session entered this place or was used in it."""

    @abstractmethod
    def forget(self, session_id: str) -> None:
        """A session left this place; unknown ids are ignored."""

    @abstractmethod
    def victims(self) -> Iterator[str]:
        """Session ids, the one to go first first. The policy must not be told anything while one iterates."""
