"""Allocator of addresses for compressed KV blocks of different sizes, from a single range, by best fit.

An extent is a run of addresses of a block. A hole is a run of free addresses. A block gets one extent if any hole is
large enough: in the smallest large enough hole, and among equal holes in the lowest. Else the block gets several
extents, in the largest holes first, so that all free bytes can be used. In an arena filled to the last byte with blocks
of many sizes, a block can lie in hundreds of extents. With a fiftieth of the bytes free, it lies in one or two.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

GRANULE = 256  # bytes; extents begin and end at multiples


class Extent(NamedTuple):
    """Run of `nbytes` addresses from `start` on. In an arena both numbers are multiples of GRANULE."""

    start: int
    nbytes: int


def room(nbytes: int) -> int:
    """Return the bytes that a block takes in the arena: `nbytes` rounded up to a multiple of GRANULE."""
    return -(-nbytes // GRANULE) * GRANULE


def usable(nbytes: int) -> int:
    """Return the most bytes that blocks should take in an arena of `nbytes` bytes, so that holes stay large."""
    return nbytes - nbytes // 50


def split(extents: Iterable[Extent], nbytes: int) -> tuple[tuple[Extent, ...], list[Extent]]:
    """Split a block's extents. Return the extents of the first room(nbytes) bytes, and the extents of the rest."""
    left, kept, rest = room(nbytes), list[Extent](), list[Extent]()
    for start, size in extents:
        keep = min(size, left)
        left -= keep
        kept += [Extent(start, keep)] if keep else []
        rest += [Extent(start + keep, size - keep)] if keep < size else []
    return tuple(kept), rest


class Arena:
    """Record of the free addresses in a range from 0 on. It has no memory at the addresses. Not thread-safe.

    nbytes: number of addresses, rounded down to a multiple of GRANULE. `join` adds more addresses.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = 0  # number of addresses
        self.available = 0  # number of free bytes, in all holes. Two holes never touch each other
        self._size_at: dict[int, int] = {}  # by start of a hole
        self._start_before: dict[int, int] = {}  # by end of a hole
        self._holes: list[tuple[int, int]] = []  # size and start of each, sorted
        self.join(Extent(0, nbytes))

    def join(self, more: Extent) -> None:
        """Add free addresses, which must lie behind all others. Round their number down to a multiple of GRANULE."""
        size = more.nbytes - more.nbytes % GRANULE
        self.nbytes += size
        self.free([Extent(more.start, size)])

    @property
    def used(self) -> int:
        return self.nbytes - self.available

    def allocate(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Take room(nbytes) bytes. Return their extents; None if fewer bytes are free."""
        return next(iter(self.allocate_some(nbytes, 1)), None)

    def allocate_some(self, nbytes: int, count: int) -> list[tuple[Extent, ...]]:
        """Return the extents of up to `count` blocks of `nbytes` bytes each, as repeated calls of `allocate` would.

        Several blocks are taken from a hole at once, because the rest of a hole is the best fit for the next block.
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
        """Take the first bytes, at most `most`, of the hole at index `at` of `_holes`."""
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
