"""Who leaves a place first: the policy's order, below it the clients' priorities."""

from collections.abc import Callable, Iterator

from manthan.policies import EvictionPolicy, SessionView


class Place:
    """The sessions of the hot pool, the cold store, each in the order of its priority's policy.

    Sessions of a lower priority go before all of a higher one.
    """

    def __init__(self, make_policy: Callable[[], EvictionPolicy]) -> None:
        self._make_policy = make_policy
        self._levels: dict[int, EvictionPolicy] = {}
        self._level_of: dict[str, int] = {}

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._level_of

    def used(self, session: SessionView, priority: int) -> None:
        """A session entered, or was used."""
        before = self._level_of.get(session.session_id)
        if before is not None and before != priority:
            self._levels[before].forget(session.session_id)
        if priority not in self._levels:
            self._levels[priority] = self._make_policy()
            self._levels = dict(sorted(self._levels.items()))
        self._level_of[session.session_id] = priority
        self._levels[priority].used(session)

    def evicted(self, session_id: str) -> None:
        """A session left because it was its turn."""
        if (level := self._level_of.pop(session_id, None)) is not None:
            self._levels[level].evicted(session_id)

    def forget(self, session_id: str) -> None:
        """A session left; unknown ids are ignored."""
        if (level := self._level_of.pop(session_id, None)) is not None:
            self._levels[level].forget(session_id)

    def superseded(self, session_id: str) -> None:
        """See EvictionPolicy.superseded."""
        if (level := self._level_of.get(session_id)) is not None:
            self._levels[level].superseded(session_id)

    def victims(self) -> Iterator[str]:
        """Session ids, the one to go first first; sessions may leave while one iterates."""
        for policy in list(self._levels.values()):
            yield from policy.victims()
