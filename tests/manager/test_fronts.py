"""Estimates of the blocks in tiers in front of a slower one. The workers keep these tiers by LRU."""

from talks import SHAPE, Talks, names

from manthan.manager.session.blocks import FrontTier


class Tiered(Talks):
    """blocks: number of blocks that each front tier holds."""

    def __init__(self, *blocks: int, fills_on_read: bool = True) -> None:
        fronts = [FrontTier(count * SHAPE.cold_nbytes, fills_on_read) for count in blocks]
        super().__init__(driver={"fronts": fronts})

    def use(self, text: str) -> None:
        """Have a session, named as the first word, ask and go cold. Its saved blocks are loaded."""
        self.overwrite()
        request = self.start(text, text.split()[0])
        self.step()
        self.finish(request, text)
        self.rest()

    def tiers(self, text: str) -> list[int]:
        """Return the fastest tier of each block."""
        return list(map(self.driver.fronts.tier_of, self.manager.blocks.find(0, names(text)).tolist()))


def test_a_session_that_was_just_read_does_not_make_room_for_itself() -> None:
    """Four blocks fit. The tail of a makes room for b, is back when a returns, and stays."""
    talks = Tiered(4)
    for text in ("a one two", "b one"):
        talks.use(text)
    assert (talks.tiers("a one two"), talks.tiers("b one")) == ([0, 0, 1], [0, 0])
    talks.use("a one two")
    assert (talks.tiers("a one two"), talks.tiers("b one")) == ([0, 0, 0], [0, 1])


def test_each_tier_makes_room_by_itself_and_blocks_that_are_read_come_into_those_in_front() -> None:
    """Two blocks fit into the first tier, and four into the second."""
    talks, seen = Tiered(2, 4), []
    for who in "abcac":
        talks.use(f"{who} one")
        seen.append([set(talks.tiers(f"{each} one")) for each in "abc"[: len(seen) + 1]])
    assert seen == [[{0}], [{1}, {0}], [{2}, {1}, {0}], [{0}, {2}, {1}], [{1}, {2}, {0}]]
    fronts = talks.driver.fronts
    assert [fronts.has(tier, 0b01) for tier in range(3)] == [False, True, True]
    assert fronts.keeps_behind


def test_a_tier_that_reads_do_not_fill_is_in_front_of_one_that_has_the_other_blocks() -> None:
    talks = Tiered(2, fills_on_read=False)
    for text in ("a one", "b one", "a one"):
        talks.use(text)
    assert (talks.tiers("a one"), talks.tiers("b one")) == ([1, 1], [0, 0])
    fronts = talks.driver.fronts
    assert [(fronts.has(0, moved), fronts.has(1, moved)) for moved in (0, 1)] == [(True, False), (False, True)]
    assert not fronts.keeps_behind
