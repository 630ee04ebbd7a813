"""Allocator of blocks of different sizes in a single range of addresses, by best fit.

A hole is a run of free addresses. A block gets one extent if a hole is large enough: of the smallest such hole, and
among equal holes the lowest. Else it gets several extents, of the largest holes first, so that all free bytes can be
used. Less than GRANULE bytes a block are lost. Blocks of equal size leave holes of whole blocks, and have one extent.

In an arena filled to the last byte with blocks of many sizes, a block lies in hundreds of extents. With a fiftieth of
the bytes free, a block lies in one or two; see `usable`.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

GRANULE = 256  # bytes; extents begin and end at multiples


class Extent(NamedTuple):
    """Run of addresses. start, nbytes: multiples of GRANULE."""

    start: int
    nbytes: int


def room(nbytes: int) -> int:
    """Return the bytes that a block takes in the arena: `nbytes` rounded up to a multiple of GRANULE."""
    return -(-nbytes // GRANULE) * GRANULE


def usable(nbytes: int) -> int:
    """Return how many of an arena's bytes blocks should take at most, so that holes stay large."""
    return nbytes - nbytes // 50


def split(extents: Iterable[Extent], nbytes: int) -> tuple[tuple[Extent, ...], list[Extent]]:
    """Return the extents of the first room(nbytes) bytes of a block, and the rest's extents."""
    left, kept, rest = room(nbytes), list[Extent](), list[Extent]()
    for start, size in extents:
        keep = min(size, left)
        left -= keep
        kept += [Extent(start, keep)] if keep else []
        rest += [Extent(start + keep, size - keep)] if keep < size else []
    return tuple(kept), rest


class Arena:
    """Knows which addresses, from 0 on, are free. Has no memory behind them. Not thread-safe.

    Args:
        nbytes: Number of addresses, rounded down to a multiple of GRANULE. `join` adds more.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = 0  # number of addresses
        self.available = 0  # number of free bytes, in all holes
        # Holes by start, by end, and sorted by size and start. Two holes never touch each other.
        self._size_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._holes: list[tuple[int, int]] = []
        self._end = 0
        self.join(Extent(0, nbytes))

    def join(self, more: Extent) -> None:
        """Add addresses at the end, rounded down to a multiple of GRANULE."""
        size = more.nbytes - more.nbytes % GRANULE
        self.nbytes += size
        self._end = more.start + size
        self.free([Extent(more.start, size)])

    @property
    def used(self) -> int:
        return self.nbytes - self.available

    def allocate(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Return extents of room(nbytes) bytes in all; None if fewer are free."""
        found = self.allocate_some(nbytes, 1)
        return found[0] if found else None

    def allocate_some(self, nbytes: int, count: int) -> list[tuple[Extent, ...]]:
        """Return the extents of up to `count` blocks of `nbytes` bytes, the same that repeated `allocate` would give.

        One hole serves several blocks, because the rest of a hole is the best fit for the next block.
        """
        size = room(nbytes)
        found: list[tuple[Extent, ...]] = []
        while len(found) < count and size <= self.available:
            at = bisect_left(self._holes, (size, 0))
            if at == len(self._holes):
                found.append(self._in_pieces(size))
                continue
            fit = min(count - len(found), self._holes[at][0] // size)
            start, taken = self._take(at, fit * size)
            found += [(Extent(begin, size),) for begin in range(start, start + taken, size)]
        return found

    def free(self, extents: Iterable[Extent]) -> None:
        """Free allocated extents, or parts of them."""
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
        """Take `left` free bytes in as few extents as possible."""
        taken = []
        while left:
            largest = bisect_left(self._holes, (self._holes[-1][0], 0))
            taken.append(self._take(min(bisect_left(self._holes, (left, 0)), largest), left))
            left -= taken[-1].nbytes
        return tuple(taken)

    def _take(self, at: int, most: int) -> Extent:
        """Take up to `most` first bytes of hole number `at`."""
        size, start = self._holes[at]
        self._remove(start)
        taken = Extent(start, min(size, most))
        if taken.nbytes < size:
            self._add(start + taken.nbytes, size - taken.nbytes)
        self.available -= taken.nbytes
        return taken

    def _add(self, start: int, size: int) -> None:
        self._size_at[start] = size
        self._start_before[start + size] = start
        insort(self._holes, (size, start))

    def _remove(self, start: int) -> None:
        size = self._size_at.pop(start)
        del self._start_before[start + size]
        del self._holes[bisect_left(self._holes, (size, start))]
