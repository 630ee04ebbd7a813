"""Sessions by when something is due."""

import heapq
from collections.abc import Iterator


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
        self._when: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._when

    def __len__(self) -> int:
        return len(self._when)

    def set(self, session_id: str, when: float | None) -> None:
        """Set or, with None, take back the time of a session."""
        if when is None:
            self._when.pop(session_id, None)
        elif self._when.get(session_id) != when:
            self._when[session_id] = when
            heapq.heappush(self._heap, (when, session_id))

    @property
    def first(self) -> float | None:
        """The earliest time, or None."""
        while self._heap and self._when.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> Iterator[str]:
        """Session ids whose time has come, each once."""
        while (first := self.first) is not None and first <= now:
            session_id = heapq.heappop(self._heap)[1]
            del self._when[session_id]
            yield session_id

    def clear(self) -> None:
        self._when.clear()
        self._heap.clear()
