"""Three simple FIFO queues.

J. Yang et al., "FIFO Queues Are All You Need for Cache Eviction", SOSP 2023. Newcomers enter a small queue. At its end
who was used more than once moves to the main queue; others go, and leave a ghost. Whoever comes back while its ghost
is there enters the main queue at once. At the end of the main queue who was used is put in again, with one use less to
its credit, which is 3 at most.

Sessions differ in size, so queues count bytes. The size of the cache, of which the small queue should take a tenth, is
what is in the place: when somebody has to go, that is what it holds. Ghosts stand for as many bytes as the main queue
may take of the most that was in the place at once.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from manthan.policies.base import EvictionPolicy, PolicyOptions, SessionView, in_order
from manthan.policies.byte_queue import ByteQueue

MOST_HITS = 3
PROMOTED_ABOVE = 1


class S3FIFOOptions(PolicyOptions):
    """small_share: of the bytes in the place, for sessions that have yet to come back."""

    small_share: float = Field(default=0.1, gt=0, lt=1, description="a share above 0 and below 1, such as 0.1")


class S3FIFO(EvictionPolicy):
    """Sessions that do not come back soon go early, in the order in which they came; the others stay. O(1) an event."""

    name: ClassVar[str] = "s3fifo"
    Options: ClassVar[type[PolicyOptions]] = S3FIFOOptions
    options: S3FIFOOptions

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._small, self._main, self._ghosts = ByteQueue(), ByteQueue(), ByteQueue()
        self._uses: dict[str, int] = {}
        self._hits: dict[str, int] = {}
        self._capacity = 0

    def used(self, session: SessionView) -> None:
        session_id = session.session_id
        uses = self._uses.get(session_id)
        self._uses[session_id] = session.uses
        if uses is None:
            self._hits[session_id] = 0
            is_main = self._ghosts.pop(session_id) > 0
        else:
            if session.uses > uses:
                self._hits[session_id] = min(self._hits[session_id] + 1, MOST_HITS)
            is_main = session_id in self._main
        (self._main if is_main else self._small).put(session_id, session.nbytes)
        self._capacity = max(self._capacity, self._small.nbytes + self._main.nbytes)

    def forget(self, session_id: str) -> None:
        if self._uses.pop(session_id, None) is not None:
            del self._hits[session_id]
            self._small.pop(session_id)
            self._main.pop(session_id)

    def evicted(self, session_id: str) -> None:
        if session_id in self._small or self._is_due(self._small.nbytes, self._main.nbytes):
            self._promote()
        if session_id in self._main:
            self._reinsert()
        if session_id in self._small:
            self._ghosts.put_last(session_id, self._small.size(session_id))
            self._ghosts.trim((1 - self.options.small_share) * self._capacity)
        self.forget(session_id)

    def _is_due(self, small_nbytes: int, main_nbytes: int) -> bool:
        """Whether the next victim is looked for in the small queue."""
        return small_nbytes >= self.options.small_share * (small_nbytes + main_nbytes)

    def _promote(self) -> None:
        """Move who was used more than once, up to the first that was not, to the main queue."""
        while (first := next(iter(self._small), None)) is not None and self._hits[first] > PROMOTED_ABOVE:
            self._hits[first] = 0
            self._main.put(first, self._small.pop(first))

    def _reinsert(self) -> None:
        """Put who was used, up to the first that was not, in again at the end of the main queue."""
        while self._hits[first := next(iter(self._main))]:
            self._hits[first] -= 1
            self._main.put_last(first, self._main.size(first))

    def victims(self) -> Iterator[str]:
        """Goes through the evictions to come and changes nothing: who moves to the main queue's end is `spared`."""
        small, main = in_order(self._small), in_order(self._main)
        small_left, main_left = self._small.nbytes, self._main.nbytes
        spared: deque[tuple[str, int]] = deque()
        while small_left or main_left:
            if self._is_due(small_left, main_left):
                session_id = next(small, None)
                if session_id is None:  # some left meanwhile
                    small_left = 0
                    continue
                small_left -= self._small.size(session_id)
                if self._hits[session_id] > PROMOTED_ABOVE:
                    main_left += self._small.size(session_id)
                    spared.append((session_id, 0))
                    continue
            else:
                session_id = self._next_of_main(main, spared)
                if session_id is None:
                    main_left = 0
                    continue
                main_left -= self._main.size(session_id) or self._small.size(session_id)
            yield session_id

    def _next_of_main(self, main: Iterator[str], spared: deque[tuple[str, int]]) -> str | None:
        while True:
            session_id = next(main, None)
            if session_id is not None:
                hits = self._hits[session_id]
            elif spared:
                session_id, hits = spared.popleft()
                if session_id not in self._hits:  # it left meanwhile
                    continue
            else:
                return None
            if not hits:
                return session_id
            spared.append((session_id, hits - 1))
