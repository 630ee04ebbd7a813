"""Policy `lru`: the least recently used session goes first."""

from typing import ClassVar

from manthan.policies.base import RankedPolicy, SessionView


class LRU(RankedPolicy):
    """Policy whose first victim is the least recently used session. Each call takes O(log n)."""

    name: ClassVar[str] = "lru"

    def rank(self, session: SessionView) -> float:
        return session.last_used
