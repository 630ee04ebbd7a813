"""Keys in the order of a number that each key has. The numbers may change."""

import heapq
from collections.abc import Iterator
from itertools import count
from math import inf

from msgspec import Struct


class Entry(Struct, order=True, gc=False):
    """Key with its number. It is no tuple, so that Python's garbage collector need not visit dicts of entries."""

    rank: float
    age: float
    key: str


class Ranking:
    """Keys, the least number first. Among keys with equal numbers, the least `age` is first: a time or a count.

    To set or yield a key takes O(log n) on average.
    A heap keeps outdated entries until they come to the front. `set` rebuilds a large heap of mostly outdated entries.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._heap: list[Entry] = []
        self._count = count()

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    @property
    def least(self) -> float:
        """Least number of all keys; infinity without keys."""
        return first.rank if (first := self.first()) else inf

    def set(self, key: str, rank: float, age: float | None = None) -> None:
        """Give a key a number. Among equal numbers the least `age` is first; with None, the least recently set key."""
        self._entries[key] = entry = Entry(rank, next(self._count) if age is None else age, key)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def discard(self, key: str) -> None:
        """Remove a key if present."""
        self._entries.pop(key, None)

    def first(self) -> Entry | None:
        """Return the entry of the first key; None without keys."""
        while self._heap and self._entries.get(self._heap[0].key) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def pop_until(self, rank: float) -> Iterator[str]:
        """Yield the keys whose number is at most `rank`, and remove them."""
        while self.least <= rank and (first := self.first()):
            self.discard(first.key)
            yield first.key

    def in_order(self) -> Iterator[str]:
        """Yield the keys in order. During the iteration keys may be removed, but `set` must not be called."""
        passed = []
        try:
            while entry := self.first():
                passed.append(heapq.heappop(self._heap))
                yield entry.key
        finally:
            for entry in passed:
                if self._entries.get(entry.key) is entry:
                    heapq.heappush(self._heap, entry)
