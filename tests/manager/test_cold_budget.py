"""The manager by example: a full tier, and loads. The tier's room is in blocks."""

from typing import Any

import pytest
from integrity import check_empty, check_integrity
from talks import Talks, last_words, name, names

from manthan.manager.events import DropCause, GivenUp

SHORT: dict[str, Any] = {"blocks": 6, "low": 0.5, "high": 0.5}
"""Of a pool of 6 blocks, 3 are to hold nothing unsaved."""


def dropped(talks: Talks, cause: DropCause = DropCause.BUDGET) -> str:
    """Return the last words of the blocks dropped so far, all for this reason."""
    assert {of_event for _, of_event in talks.dropped()} <= {cause}
    return " ".join(words for words, _ in talks.dropped())


# -- a full tier --------------------------------------------------------------------------------------


@pytest.mark.invariant(
    8, "manager/session/manager.py", "last = cut[blocks.users[cut] == 1]", "last = session.rows[: len(cut)]"
)
def test_the_least_recently_used_session_makes_room_tail_first() -> None:
    talks = Talks(capacity=6)
    talks.go_cold("a b c", "d e f", "x y")
    assert dropped(talks) == "b c"
    assert talks.texts() == {"a b c": "a", "d e f": "d e f", "x y": "x y"}


@pytest.mark.invariant(7, "manager/session/manager.py", "last = cut[blocks.users[cut] == 1]", "last = cut")
@pytest.mark.invariant(
    7, "manager/session/manager.py", "needed = rows[blocks.status[rows] == 0][:room]", "needed = rows[:room]"
)
def test_a_head_that_sessions_share_is_stored_once_and_dropped_last() -> None:
    talks = Talks(capacity=5)
    for word in "abc":
        talks.talk(f"sys {word}", word)
    assert sorted(last_words(talks.rest()).split()) == ["a", "b", "c", "sys"]
    drops = []
    for text in ("x y", "z w", "u v"):
        talks.go_cold(text)
        drops.append(dropped(talks))
    assert drops == ["a", "a b c", "a b c sys y"]


def test_a_session_larger_than_the_tier_is_saved_from_its_head_on() -> None:
    talks = Talks(capacity=3)
    talks.go_cold("old", "a b c d e")
    assert dropped(talks) == "old"
    assert (talks.texts(), talks.states()) == ({"a b c d e": "a b c d e"}, {"a b c d e": "idle"})
    assert talks.saved() == {"a", "a b", "a b c"}


@pytest.fixture
def given_up() -> Talks:
    """Return an engine short of memory, which gave up the end of a session because the tier is full."""
    talks = Talks(capacity=2, **SHORT)
    talks.go_cold("a b")
    talks.talk("old older oldest one", "old")
    talks.finish(talks.start("a b", "a b"), "a b")
    talks.save()
    return talks


def test_a_session_worth_less_than_all_that_is_saved_is_given_up_when_memory_is_short(given_up: Talks) -> None:
    talks = given_up
    assert (talks.texts(), dropped(talks)) == ({"a b": "a b", "old": "old older"}, "")
    assert [(event.session_id, event.blocks) for event in talks.told(GivenUp)] == [("old", 2)]
    assert talks.resident("old older oldest one") == 4, "what is given up is found until it is overwritten"
    talks.pool.take(2)
    assert talks.resident("a b") == talks.resident("old older") == 2, "what was given up is overwritten first"


def test_blocks_that_were_given_up_and_used_again_are_overwritten_last(given_up: Talks) -> None:
    pool = given_up.pool
    held = [block for block in pool.lookup(0, names("old older oldest one")) if block >= 0]
    pool.hold(held)
    pool.free(held[::-1])
    assert pool.runway(6) == 2, "only what is saved comes before them"


@pytest.mark.parametrize("group", [0, 1])
def test_blocks_that_no_session_needs_are_given_up_when_memory_is_short(group: int) -> None:
    """States in the middle of a prompt, say. Else they would stay for as long as anything saved can be overwritten."""
    talks = Talks(capacity=20, **SHORT)
    unneeded = [name("unneeded0"), name("unneeded1")]
    block_ids = talks.pool.take(2)
    for number, block_id in enumerate(block_ids):
        talks.pool.cache(block_id, group, unneeded[number], number)
    talks.pool.free(block_ids)
    talks.go_cold("a b", "c d")
    talks.talk("e f", "e f")
    assert talks.resident("a b") == talks.resident("c d") == talks.resident("e f") == 2
    assert talks.pool.lookup(group, unneeded) == [-1, -1]


# -- a full tier that need not hold what the pool holds -----------------------------------------------


@pytest.mark.parametrize(("is_exclusive", "drops", "stored"), [(False, "a b", "x y"), (True, "", "")])
def test_an_idle_session_is_saved_into_free_room_only_if_the_tier_is_exclusive(
    is_exclusive: bool, drops: str, stored: str
) -> None:
    talks = Talks(capacity=4, is_exclusive=is_exclusive)
    talks.go_cold("a b", "c d")
    talks.talk("x y", "x y")
    assert last_words(talks.rest()) == stored
    assert dropped(talks) == drops
    assert talks.resident("x y") == 2


@pytest.mark.parametrize(
    ("is_exclusive", "drops", "cause"), [(False, "b a", DropCause.BUDGET), (True, "c", DropCause.REDUNDANT)]
)
def test_redundant_copies_make_room_first_if_the_tier_is_exclusive(
    is_exclusive: bool, drops: str, cause: DropCause
) -> None:
    """The running request's blocks are in the pool. They can be stored again when it has ended."""
    talks = Talks(capacity=4, is_exclusive=is_exclusive, **SHORT)
    talks.go_cold("a b", "c d")
    request = talks.start("c d", "c d")
    talks.talk("x y", "x y")
    talks.save()
    assert dropped(talks, cause) == drops
    check_integrity(talks.manager, talks.driver)
    talks.finish(request, "c d")


# -- loads --------------------------------------------------------------------------------------------


def test_many_sessions_may_lose_their_common_head_at_once() -> None:
    talks = Talks(capacity=2000, blocks=1000, driver={"prefetch_lead_s": 1.0})
    for at in range(500):
        talks.talk(f"sys {at}", f"{at}")
    talks.rest()
    talks.overwrite()
    talks.tier.clear()
    talks.driver.steer("prefetch", talks.session("0"), talks.now)
    assert talks.step().loads
    check_empty(talks.manager)
