"""Keys in the order of a number each has, as these numbers change."""

import heapq
from collections.abc import Iterator
from itertools import count

STRIDE = 4
"""Entries of the old heap that are looked at at a time: it is empty long before the new one is as large."""
Entry = tuple[float, int, str]


class Ranking:
    """The least number first, of equals the one that was set first. O(log n) an operation, and none takes much longer:

    a heap in which what is out of date is passed over. When most of it is, another is begun, and the old one is moved
    there a little with each key that is set or taken out.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._heap: list[Entry] = []
        self._old: list[Entry] = []
        self._count = count()

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> float | None:
        """Its number; None if it is not there."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def set(self, key: str, rank: float) -> None:
        entry = rank, next(self._count), key
        self._entries[key] = entry
        heapq.heappush(self._heap, entry)
        self._tidy()

    def _tidy(self) -> None:
        """Drop a few entries that are out of date, so that they are never many more than those that count."""
        if not self._old and len(self._heap) > 2 * len(self._entries) + 64:
            self._old, self._heap = self._heap, []
        for _ in range(min(STRIDE, len(self._old))):
            entry = self._old.pop()  # what is left is a heap still
            if self._entries.get(entry[2]) is entry:
                heapq.heappush(self._heap, entry)

    def discard(self, key: str) -> None:
        """Take it out if it is there."""
        if self._entries.pop(key, None) is not None:
            self._tidy()

    def clear(self) -> None:
        self._entries.clear()
        self._heap, self._old = [], []

    def first(self) -> Entry | None:
        """Number, age and key of the one in front."""
        if not self._entries:
            return None
        return self._front()[0]

    def in_order(self) -> Iterator[str]:
        """The keys, the first first. While one iterates, keys may be taken out, but none is set."""
        passed = []
        try:
            while heap := self._front():
                entry = heapq.heappop(heap)
                passed.append(entry)
                yield entry[2]
        finally:
            for entry in passed:
                if self._entries.get(entry[2]) is entry:
                    heapq.heappush(self._heap, entry)

    def _front(self) -> list[Entry]:
        """The heap that has the first entry, in front; an empty one if there is none."""
        for heap in (self._heap, self._old):
            while heap and self._entries.get(heap[0][2]) is not heap[0]:
                heapq.heappop(heap)
        if not self._old or not self._heap:
            return self._heap or self._old
        return min(self._heap, self._old, key=lambda heap: heap[0])
