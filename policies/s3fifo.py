"""Three simple FIFO queues.

J. Yang et al., "FIFO Queues Are All You Need for Cache Eviction", SOSP 2023. Newcomers enter a small queue. At its end
who was used more than once moves to the main queue; others go, and leave a ghost. Whoever comes back while its ghost
is there enters the main queue at once. At the end of the main queue who was used is put in again, with one use less to
its credit, which is 3 at most.

Sessions differ in size, so queues count bytes. The size of the cache, of which the small queue should take a tenth, is
what is in the place: when somebody has to go, that is what it holds. Ghosts stand for as many bytes as the main queue
may take of the most that was in the place at once.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from manthan.policies.base import EvictionPolicy, PolicyOptions, SessionView, in_order
from manthan.policies.byte_queue import ByteQueue

MOST_HITS = 3
PROMOTED_ABOVE = 1


class _Look:
    """A look at the victims: whom the evictions to come move to the main queue's end, and with how many hits."""

    def __init__(self) -> None:
        self.moves: list[tuple[str, int]] = []
        self.before: dict[str, int] = {}
        """How many moves there were before each victim."""
        self.waiting: OrderedDict[str, int] = OrderedDict()
        """Who stands behind all that main had at first, and with how many hits."""
        self._made = 0

    def move(self, session_id: str, hits: int) -> None:
        self.moves.append((session_id, hits))
        self.waiting[session_id] = hits

    def moves_before(self, session_id: str) -> list[tuple[str, int]]:
        """The moves before this victim that were not asked for yet."""
        first, self._made = self._made, max(self._made, self.before.get(session_id, 0))
        return self.moves[first : self._made]


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
        self._look = _Look()

    def used(self, session: SessionView) -> None:
        if self._look.before:  # what was seen may not be so any more
            self._look = _Look()
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
        for moved, hits in self._look.moves_before(session_id):
            if moved in self._hits:  # it has not left
                self._hits[moved] = hits
                self._main.put_last(moved, self._small.pop(moved) or self._main.size(moved))
        if session_id in self._small:
            self._ghosts.put_last(session_id, self._small.size(session_id))
            self._ghosts.trim((1 - self.options.small_share) * self._capacity)
        self.forget(session_id)

    def victims(self) -> Iterator[str]:
        """Goes through the evictions to come. Whom they move stays until one of those who come after it has gone."""
        self._look = look = _Look()
        small, main = in_order(self._small), in_order(self._main)
        small_left, main_left = self._small.nbytes, self._main.nbytes
        while small_left or main_left:
            if small_left >= self.options.small_share * (small_left + main_left):
                session_id = next(small, None)
                if session_id is None:  # some left meanwhile
                    small_left = 0
                    continue
                small_left -= self._small.size(session_id)
                if self._hits[session_id] > PROMOTED_ABOVE:
                    main_left += self._small.size(session_id)
                    look.move(session_id, 0)
                    continue
            else:
                session_id = self._next_of_main(main, look)
                if session_id is None:
                    main_left = 0
                    continue
                main_left -= self._main.size(session_id) or self._small.size(session_id)
            look.before[session_id] = len(look.moves)
            yield session_id

    def _next_of_main(self, main: Iterator[str], look: _Look) -> str | None:
        """The next without hits; those that have some move to the end, with one less."""
        while True:
            session_id = next(main, None)
            if session_id is not None:
                if session_id in look.waiting:  # it has been moved
                    continue
                hits = self._hits[session_id]
            elif look.waiting:
                session_id, hits = look.waiting.popitem(last=False)
                if session_id not in self._hits:  # it left meanwhile
                    continue
            else:
                return None
            if not hits:
                return session_id
            look.move(session_id, hits - 1)
