"""The estimate of the tiers in front of a slower one, which the workers keep by LRU."""

import pytest
from talks import SHAPE, Talks, names

from manthan.manager.session.blocks import FrontTier


def talks_of(*blocks: int) -> Talks:
    """Return an engine with front tiers that have room for these numbers of blocks."""
    return Talks(driver={"fronts": [FrontTier(count * SHAPE.cold_nbytes, fills_on_read=True) for count in blocks]})


def go_on(talks: Talks, text: str) -> None:
    """Have a session come, which loads what is saved of it, and go cold."""
    talks.overwrite()
    request = talks.start(text, text)
    talks.step()
    talks.finish(request, text)
    talks.rest()
    talks.step()


def tiers(talks: Talks, text: str) -> list[int]:
    """Return the number of the fastest tier of each block."""
    return [talks.driver.fronts.tier_of(row) for row in talks.manager.blocks.find(0, names(text)).tolist()]


def test_a_session_that_was_just_read_does_not_make_room_for_itself() -> None:
    """Four blocks fit. The tail of a, which was used before b, made room. It comes back when a returns, and stays."""
    talks = talks_of(4)
    go_on(talks, "a one two")
    go_on(talks, "b one")
    assert (tiers(talks, "a one two"), tiers(talks, "b one")) == ([0, 0, 1], [0, 0])
    go_on(talks, "a one two")
    assert (tiers(talks, "a one two"), tiers(talks, "b one")) == ([0, 0, 0], [0, 1])


@pytest.mark.parametrize(("returns", "fastest"), [("", [2, 1, 0]), ("a", [0, 2, 1]), ("ac", [1, 2, 0])])
def test_each_tier_makes_room_by_itself_and_what_is_read_comes_into_those_in_front(
    returns: str, fastest: list[int]
) -> None:
    """Two blocks fit into the first tier, four into the second. What is read last leaves last."""
    talks = talks_of(2, 4)
    for who in "abc" + returns:
        go_on(talks, f"{who} one")
    assert [tiers(talks, f"{who} one") for who in "abc"] == [[tier] * 2 for tier in fastest]
