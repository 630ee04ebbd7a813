"""Policy `lru`: the least recently used session is evicted first."""

from typing import ClassVar

from manthan.policies.base import RankedPolicy, SessionView


class LRU(RankedPolicy):
    """The session unused for longest."""

    name: ClassVar[str] = "lru"

    def rank(self, session: SessionView) -> float:
        return session.last_used
