"""Sessions by when something is due."""

from collections.abc import Iterator

from manthan.policies.ranking import Ranking


def earliest(*times: float | None) -> float | None:
    """The first of these times that is one."""
    first = None
    for when in times:
        if when is not None and (first is None or when < first):
            first = when
    return first


class Deadlines:
    """A time for each session id. O(log n) an event; times in seconds on the manager's clock."""

    def __init__(self) -> None:
        self._when = Ranking()
        self.first: float | None = None
        """The earliest time. It is asked for at each step, and mostly there is none."""

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._when

    def __len__(self) -> int:
        return len(self._when)

    def set(self, session_id: str, when: float | None) -> None:
        """Set or, with None, take back the time of a session."""
        if when is None:
            self._when.discard(session_id)
        elif self._when.get(session_id) != when:
            self._when.set(session_id, when)
        self._look()

    def pop_due(self, now: float) -> Iterator[str]:
        """Session ids whose time has come, each once."""
        while (first := self._when.first()) is not None and first[0] <= now:
            self._when.discard(first[2])
            self._look()
            yield first[2]

    def _look(self) -> None:
        first = self._when.first()
        self.first = None if first is None else first[0]
