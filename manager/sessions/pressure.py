"""Memory pressure: how far a KV pool is from overwriting KV that exists nowhere else, and what is done about it."""

from collections.abc import Iterator
from itertools import repeat
from typing import Protocol

from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import BlockName, Drop

IN_FLIGHT_SHARE = 4
"""A block under encoding is out of the pool's reach: at most one in so many blocks of the pool at a time."""
ADMISSION_WAIT_S = 3.0
"""How long a new request may wait for room, while sessions it would overwrite are being encoded."""


class FreeQueue(Protocol):
    """The free blocks of a KV pool, which are overwritten from the head on."""

    def __len__(self) -> int: ...

    def names(self) -> Iterator[BlockName | None]:
        """What each block holds, from the head on; None for nothing."""


class Runway:
    """The free blocks that are taken before one that is worth keeping.

    Blocks are taken from the head of the queue, so what counts is not how many of them are worthless but how many stand
    before the first that is not. Walking the queue is linear; it is walked `ahead` blocks far, and again only when as
    many may have been taken that fewer are left than are asked for.
    """

    def __init__(self, queue: FreeQueue, manager: SessionMemoryManager, ahead: int) -> None:
        self._queue, self._manager, self._ahead = queue, manager, ahead
        self._left = 0

    @property
    def at_least(self) -> int:
        """As many as are known of without a walk."""
        return self._left if self._manager.at_risk else len(self._queue)

    def taken(self, at_most: int) -> None:
        """So many blocks may have been taken out of the queue."""
        self._left -= at_most

    def dropped(self, drop: Drop) -> None:
        """These codes are gone: where the block is hot, it is worth keeping in the queue now, and was not before. Most
        are of sessions that were cold, and change nothing there."""
        is_of_chain = drop.group == self._manager.shape.group
        names = drop.keys if is_of_chain else zip(repeat(drop.group), drop.keys)
        if self._left > 0 and self._manager.safe(names, len(drop.keys)) < len(drop.keys):
            self._left = 0

    def length(self, wanted: int) -> int:
        """Blocks before the first one worth keeping; only exact below `wanted`."""
        if not self._manager.at_risk:
            return len(self._queue)
        if self._left < wanted:
            self._left = self._manager.safe(self._queue.names(), max(wanted, self._ahead))
        return self._left


class Pressure:
    """Has sessions evicted before a pool of `blocks` blocks overwrites them.

    low, high: shares of the pool, see `hot_pool` in the configuration.
    """

    def __init__(self, manager: SessionMemoryManager, queue: FreeQueue, blocks: int, low: float, high: float) -> None:
        self._manager = manager
        self.low, self._high = int(low * blocks), int(high * blocks)
        self.max_in_flight = max(1, blocks // IN_FLIGHT_SHARE)
        self.runway = Runway(queue, manager, ahead=self._high)
        self._waiting_since: dict[str, float] = {}

    def relieve(self, now: float) -> None:
        """Below the low watermark, evict sessions until the high one is reached."""
        enough = self._high - self._manager.on_their_way
        if self.runway.at_least >= min(self.low, enough):  # a walk would change nothing
            return
        left = self.runway.length(self.low)
        if left < self.low:  # then it has been walked as far as the high one just now
            self._manager.relieve(enough - left, now)

    def must_wait(self, request_id: str, needed: int, now: float) -> bool:
        """Whether sessions are being saved that this request would overwrite; bounded by ADMISSION_WAIT_S.

        needed: blocks that it is about to take out of the queue.
        """
        short = needed - self.runway.length(needed)
        if short <= 0:
            return False
        self._manager.relieve(short - self._manager.on_their_way, now, request_id)
        waited = now - self._waiting_since.setdefault(request_id, now)
        are_coming = self._manager.on_their_way > 0 or not self._manager.may_evict
        return are_coming and waited < ADMISSION_WAIT_S

    def admitted(self, request_id: str) -> None:
        """A request waits no longer, for whatever reason."""
        self._waiting_since.pop(request_id, None)
