"""Room for blocks of different sizes in one range of addresses: best fit, and in pieces rather than not at all.

A block gets one extent wherever some hole is large enough for it: the smallest that is, of equal ones the lowest. Only
where none is, it gets several, the largest holes first. So whatever is free can be used: what is lost is less than
GRANULE a block. Blocks of one size leave holes of whole blocks, and are never in pieces.

Filled to the last byte with blocks of many sizes, holes wear down to dust, and a block lies in hundreds of extents.
With a fiftieth left free it lies in one or two: whoever fills an arena should leave so much.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

GRANULE = 256
"""All extents begin and end at multiples of this, in bytes."""


class Extent(NamedTuple):
    """A run of addresses. start, nbytes: multiples of GRANULE."""

    start: int
    nbytes: int


def room(nbytes: int) -> int:
    """What a block of so many bytes takes: rounded up to a multiple of GRANULE."""
    return -(-nbytes // GRANULE) * GRANULE


def usable(nbytes: int) -> int:
    """So many of an arena's bytes should be used, so that holes stay large."""
    return nbytes - nbytes // 50


class Arena:
    """Addresses from 0 on, of which some are taken. It has no memory of its own, and is not thread-safe.

    nbytes: so many to begin with, rounded down to a multiple of GRANULE. `join` adds more.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = 0
        """How many addresses there are."""
        self.available = 0
        """Bytes that are free, wherever."""
        # Holes never touch each other. By where they begin and end, and by their size: starts in order, sizes in order.
        self._size_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._starts: dict[int, list[int]] = {}
        self._sizes: list[int] = []
        self._end = 0
        self.join(Extent(0, nbytes))

    def join(self, more: Extent) -> None:
        """Addresses behind all others are there from now on, rounded down. An extent reaches from those before over to
        these only if they touch."""
        size = more.nbytes - more.nbytes % GRANULE
        self.nbytes += size
        self._end = more.start + size
        self.free([Extent(more.start, size)])

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return self.nbytes - self.available

    def allocate(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Room for a block, room(nbytes) bytes in all; None if fewer are free."""
        size = room(nbytes)
        return None if size > self.available else self._in_pieces(size)

    def allocate_some(self, nbytes: int, count: int) -> list[tuple[Extent, ...]]:
        """Room for blocks of so many bytes each, or for as many of them as fit: what `allocate` would give one by one.

        What is left of the hole that fits best fits best again, so a hole is cut up at once.
        """
        size = room(nbytes)
        found: list[tuple[Extent, ...]] = []
        while len(found) < count and size <= self.available:
            at = bisect_left(self._sizes, size)
            if at == len(self._sizes):
                found.append(self._in_pieces(size))
                continue
            fit = min(count - len(found), self._sizes[at] // size)
            start, taken = self._take(self._sizes[at], fit * size)
            found += [(Extent(begin, size),) for begin in range(start, start + taken, size)]
        return found

    def shrink(self, extents: Iterable[Extent], nbytes: int) -> tuple[Extent, ...]:
        """Free all of a block's extents but the first room(nbytes) bytes; returns what it keeps."""
        left, kept = room(nbytes), []
        for start, size in extents:
            keep = min(size, left)
            left -= keep
            if keep:
                kept.append(Extent(start, keep))
            self.free([Extent(start + keep, size - keep)])
        return tuple(kept)

    def free(self, extents: Iterable[Extent]) -> None:
        """Extents that were allocated, or parts of such, are holes again."""
        for start, size in extents:
            if not size:
                continue
            self.available += size
            end = start + size
            if (before := self._start_before.get(start)) is not None:
                self._remove(before)
                start = before
            if (after := self._size_at.get(end)) is not None:
                self._remove(end)
                end += after
            self._add(start, end - start)

    def _in_pieces(self, left: int) -> tuple[Extent, ...]:
        """One extent of so many bytes, which are free, or as few as possible."""
        taken = []
        while left:
            at = min(bisect_left(self._sizes, left), len(self._sizes) - 1)
            taken.append(self._take(self._sizes[at], left))
            left -= taken[-1].nbytes
        return tuple(taken)

    def _take(self, size: int, most: int) -> Extent:
        """The beginning of the lowest hole of this size, at most so many bytes."""
        start = self._starts[size][0]
        self._remove(start)
        taken = Extent(start, min(size, most))
        if taken.nbytes < size:
            self._add(start + taken.nbytes, size - taken.nbytes)
        self.available -= taken.nbytes
        return taken

    def _add(self, start: int, size: int) -> None:
        self._size_at[start] = size
        self._start_before[start + size] = start
        if size not in self._starts:
            self._starts[size] = []
            insort(self._sizes, size)
        insort(self._starts[size], start)

    def _remove(self, start: int) -> None:
        size = self._size_at.pop(start)
        del self._start_before[start + size]
        starts = self._starts[size]
        del starts[bisect_left(starts, start)]
        if not starts:
            del self._starts[size]
            del self._sizes[bisect_left(self._sizes, size)]
