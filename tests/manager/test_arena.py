"""Room for blocks of different sizes: nothing overlaps, nothing leaks, and all that is free can be used."""

from copy import deepcopy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from integrity import check_store

from manthan.manager.tiers.arena import GRANULE, Arena, Extent, room, split


def total(extents: tuple[Extent, ...]) -> int:
    return sum(extent.nbytes for extent in extents)


def test_the_smallest_hole_that_is_large_enough_is_taken_and_of_equal_ones_the_lowest() -> None:
    arena = Arena(20 * GRANULE)
    blocks = [arena.allocate(size * GRANULE) for size in (3, 1, 2, 1, 4, 1, 2, 1, 5)]
    for at in (0, 2, 4, 6):  # holes of 3 at 0, of 2 at 4, of 4 at 7, of 2 at 12
        arena.free(blocks[at])
    assert arena.allocate(2 * GRANULE) == (Extent(4 * GRANULE, 2 * GRANULE),)
    assert arena.allocate(2 * GRANULE) == (Extent(12 * GRANULE, 2 * GRANULE),)
    assert arena.allocate(2 * GRANULE) == (Extent(0, 2 * GRANULE),)
    assert arena.allocate(4 * GRANULE) == (Extent(7 * GRANULE, 4 * GRANULE),)
    check_store(arena)


class Blocks(RuleBasedStateMachine):
    """Next to a plain list of granules, each of which has a block or none."""

    granules = 40

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(self.granules * GRANULE + 100)
        self.owner: list[int | None] = [None] * self.granules
        self.blocks: dict[int, tuple[Extent, ...]] = {}
        self.count = 0

    def _mark(self, extents: tuple[Extent, ...], before: int | None, after: int | None) -> None:
        for start, nbytes in extents:
            assert nbytes > 0
            assert start % GRANULE == nbytes % GRANULE == 0
            for at in range(start // GRANULE, (start + nbytes) // GRANULE):
                assert self.owner[at] == before
                self.owner[at] = after

    def _longest_hole(self) -> int:
        text = "".join("." if owner is None else "x" for owner in self.owner)
        return max(map(len, text.split("x")))

    @rule(nbytes=st.integers(1, 12 * GRANULE))
    def allocate(self, nbytes: int) -> None:
        need, longest = room(nbytes), self._longest_hole() * GRANULE
        extents = self.arena.allocate(nbytes)
        assert (extents is None) == (need > self.owner.count(None) * GRANULE)
        if extents is None:
            return
        assert total(extents) == need
        assert need - nbytes < GRANULE
        assert (len(extents) == 1) == (need <= longest)
        self.count += 1
        self._mark(extents, None, self.count)
        self.blocks[self.count] = extents

    @rule(nbytes=st.integers(1, 6 * GRANULE), count=st.integers(0, 8))
    def allocate_some(self, nbytes: int, count: int) -> None:
        """The same as one after the other."""
        other, expected = deepcopy(self.arena), []
        while len(expected) < count and (extents := other.allocate(nbytes)) is not None:
            expected.append(extents)
        assert self.arena.allocate_some(nbytes, count) == expected
        for extents in expected:
            self.count += 1
            self._mark(extents, None, self.count)
            self.blocks[self.count] = extents

    @rule(which=st.integers(0, 10**6))
    def free(self, which: int) -> None:
        if self.blocks:
            block = list(self.blocks)[which % len(self.blocks)]
            extents = self.blocks.pop(block)
            self._mark(extents, block, None)
            self.arena.free(extents)

    @rule(which=st.integers(0, 10**6), share=st.floats(0, 1))
    def shrink(self, which: int, share: float) -> None:
        if not self.blocks:
            return
        block = list(self.blocks)[which % len(self.blocks)]
        extents = self.blocks.pop(block)
        nbytes = round(total(extents) * share)
        kept, rest = split(extents, nbytes)
        self.arena.free(rest)
        assert total(kept) == room(nbytes)
        assert kept == () or kept[:-1] == extents[: len(kept) - 1]
        self._mark(extents, block, None)
        self._mark(kept, None, block)
        if kept:
            self.blocks[block] = kept

    @invariant()
    def agrees(self) -> None:
        check_store(self.arena)
        assert self.arena.available == self.owner.count(None) * GRANULE
        assert self.arena.used + self.arena.available == self.arena.nbytes


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
