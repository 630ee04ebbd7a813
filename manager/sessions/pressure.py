"""Memory pressure: how far a KV pool is from overwriting KV that exists nowhere else, and what is done about it."""

from collections.abc import Iterator
from itertools import repeat
from typing import Protocol

from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import BlockName, Drop

LOW_WATERMARK, HIGH_WATERMARK = 0.1, 0.25
"""Shares of the pool that should hold nothing worth keeping. Below the low one, sessions are evicted, idle or not,
until the high one is reached."""
WINDOW_SHARE = 16
"""A block is out of the pool's reach until it is copied to be encoded: at most one in so many blocks of the pool."""


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
        return self._left if self._manager.may_lose else len(self._queue)

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
        if not self._manager.may_lose:
            return len(self._queue)
        if self._left < wanted:
            self._left = self._manager.safe(self._queue.names(), max(wanted, self._ahead))
        return self._left


class Pressure:
    """Has sessions evicted before a pool of `blocks` blocks overwrites them.

    low, high: shares of the pool.
    """

    def __init__(
        self,
        manager: SessionMemoryManager,
        queue: FreeQueue,
        blocks: int,
        low: float = LOW_WATERMARK,
        high: float = HIGH_WATERMARK,
    ) -> None:
        self._manager = manager
        self.low, self._high = int(low * blocks), int(high * blocks)
        self.window = max(1, blocks // WINDOW_SHARE)
        self.runway = Runway(queue, manager, ahead=self._high)
        self._queue = queue

    def relieve(self, now: float) -> None:
        """Below the low watermark, evict sessions until the high one is reached.

        Where no idle session is left for that, blocks of those that wait for a request to begin are saved, in the order
        in which the pool would overwrite them.
        """
        enough = self._high - self._manager.on_their_way
        if self.runway.at_least >= min(self.low, enough):  # a walk would change nothing
            return
        left = self.runway.length(self.low)
        if left < self.low and not self._manager.relieve(enough - left, now):  # it was walked to the high one just now
            self._manager.save(self._queue.names(), self._high, self.window - self._manager.on_their_way)
