"""The manager by example: saving and memory pressure."""

from collections.abc import Iterator
from typing import Any

import pytest
from talks import IDLE_AFTER_S, Talks, last_words, names

from manthan.manager.events import DropCause, Evicted, StoreFailed
from manthan.policies.lru import LRU

SHORT: dict[str, Any] = {"blocks": 64, "low": 0.04, "high": 0.0626}
"""Blocks are saved until 4 can be overwritten, once fewer than 2 can."""


@pytest.fixture
def talks() -> Talks:
    return Talks()


@pytest.fixture
def slow() -> Talks:
    """Have stores end only when the test says so, and gather one block at a time."""
    return Talks(blocks=16, holds=True)


def stored(talks: Talks) -> str:
    """Take a step, and return the last words of the blocks that it begins to store."""
    return last_words(name for job in talks.step().stores for name in job.block_hashes)


# -- saving -------------------------------------------------------------------------------------------


def test_a_session_is_cold_when_all_its_blocks_are_stored_and_stays_resident(slow: Talks) -> None:
    slow.talk("a b", "s")
    slow.now = IDLE_AFTER_S
    slow.step()
    slow.gathered()
    slow.step()
    head, tail = slow.jobs.values()
    slow.answer([tail])
    assert (slow.states(), slow.driver.has_work) == ({"s": "idle"}, True)
    slow.answer([head])
    slow.step()
    assert (slow.states(), slow.driver.has_work) == ({"s": "cold"}, False)
    assert slow.resident("a b") == 2


def test_an_eviction_is_accounted_for() -> None:
    talks = Talks(holds=True)
    talks.talk("a b c", "s")
    talks.now = IDLE_AFTER_S
    talks.step()
    talks.now += 2.0
    talks.answer()
    assert talks.told(Evicted) == [Evicted("s", 3, 0, 48, 1500, 3, 300, 300, 0, IDLE_AFTER_S, 2.0, False)]


def test_a_request_ends_the_saving_of_its_session(slow: Talks) -> None:
    slow.talk("a b c", "s")
    slow.now = IDLE_AFTER_S
    assert stored(slow) == "a"
    request = slow.start("a b c", "s")
    slow.gathered()
    slow.answer()
    assert (stored(slow), slow.driver.has_orders) == ("", False)
    slow.finish(request, "a b c d")
    slow.holds = False
    assert last_words(slow.rest()) == "b c d"


def test_a_failed_store_leaves_the_session_idle_and_is_tried_again() -> None:
    talks = Talks(holds=True)
    talks.talk("a b", "s")
    talks.now = IDLE_AFTER_S
    talks.step()
    talks.answer(failed={1: "no space"})
    assert talks.states() == {"s": "idle"}
    assert talks.dropped() == [("b", DropCause.FAILED)], "a rank may have stored it"
    assert talks.told(StoreFailed) == [StoreFailed(["no space"])]
    assert talks.driver.next_deadline == talks.now + IDLE_AFTER_S
    talks.holds = False
    assert last_words(talks.rest()) == "b"
    assert talks.states() == {"s": "cold"}


def test_all_idle_sessions_are_saved_on_demand(talks: Talks) -> None:
    talks.talk("a b", "cold")
    talks.rest()
    for who in ("one", "two"):
        talks.talk(f"{who} x", who)
    talks.start("r s", "runs")
    assert talks.manager.save_all(talks.now) == 2
    assert last_words(talks.save()) == "one x two x"
    assert talks.states() == {"cold": "cold", "one": "cold", "two": "cold", "runs": "active"}


# -- memory pressure ----------------------------------------------------------------------------------


def fill(talks: Talks, left: int, who: str = "s") -> None:
    """Have sessions of two blocks each, until the pool has few empty ones."""
    for at in range((talks.pool.runway(len(talks.pool)) - left) // 2):
        talks.talk(f"{who}{at} x", f"{who}{at}")


def test_nothing_is_saved_early_above_the_low_watermark() -> None:
    talks = Talks(**SHORT)
    fill(talks, 2)
    assert talks.save() == []


def test_pressure_saves_what_is_overwritten_next_until_the_high_watermark() -> None:
    talks = Talks(**SHORT)
    fill(talks, 2)
    talks.finish(talks.start("s0 x", "s0"), "s0 x")  # is overwritten last now
    talks.overwrite(2)
    talks.talk("y z", "last")
    assert last_words(talks.save()) == "s1 x s2 x"
    assert talks.pool.runway(64) == 4
    assert [event.session_id for event in talks.told(Evicted) if event.is_pressed] == ["s1", "s2"]


def test_saved_blocks_are_room() -> None:
    talks = Talks(**SHORT)
    fill(talks, 0)
    talks.rest()
    talks.talk("y z", "last")
    assert talks.save() == []


def under_pressure(prompt: str = "a b c d e f g h i j k l m n") -> tuple[Talks, str]:
    """Have a request of a new session run, when memory is short, and return its id."""
    talks = Talks(blocks=16, low=0.2, high=0.3)
    request = talks.start(prompt, "s")
    assert last_words(talks.save()) == prompt
    return talks, request


def test_pressure_saves_blocks_of_running_requests() -> None:
    """They would be overwritten as soon as the requests end."""
    talks, request = under_pressure()
    talks.finish(request, "a b c d e f g h i j k l m n o")
    assert last_words(talks.rest()) == "o"
    assert talks.states() == {"s": "cold"}


# -- the order in which the pool overwrites -----------------------------------------------------------


def overwritten(talks: Talks, text: str) -> str:
    """Take the pool's blocks one by one, and return those of the words in the order in which they go."""
    hashes, order = [block_hash for words in text.split(",") for block_hash in names(words)], list[bytes]()
    while len(talks.pool):
        talks.pool.take(1)
        there = talks.pool.lookup(0, hashes)
        gone = [name for name, at in zip(hashes, there, strict=True) if at < 0]
        order += [name for name in dict.fromkeys(gone) if name not in order]
    return last_words(order)


@pytest.mark.parametrize(("priority", "order"), [(0, "b a d c sys"), (1, "d c b a sys")])
def test_saved_blocks_are_overwritten_in_the_policy_s_order(priority: int, order: str) -> None:
    """The tails go first, and heads that sessions share last."""
    talks = Talks(blocks=5)
    talks.talk("sys a b", "first", priority=priority)
    talks.talk("sys c d", "second")
    talks.rest()
    talks.step(taken=1)
    assert overwritten(talks, "sys a b,sys c d") == order


def test_the_pool_puts_a_few_saved_blocks_into_order_at_a_time() -> None:
    talks = Talks(blocks=6)
    for text in ("a b c", "x y z"):
        talks.talk(text, text)
        talks.rest()
    talks.pool.lead(0, names("x y z"))
    talks.manager.lead_overwritten(2)
    assert overwritten(talks, "a b c,x y z") == "c b x y z a"


class NewestFirst(LRU):
    """Sessions that were used last go first, as where all return after about as long."""

    name = "newest-first"

    def victims(self) -> Iterator[str]:
        return iter(list(super().victims())[::-1])


def test_sessions_whose_blocks_are_gone_do_not_take_the_turn_of_others() -> None:
    talks = Talks(blocks=6, policy=NewestFirst)
    for text in ("a b", "c d", "e f"):
        talks.talk(text, text)
        talks.rest()
    talks.pool.lead(0, names("e f")[::-1])
    talks.pool.free(talks.pool.take(2))
    talks.manager.lead_overwritten(2)
    assert overwritten(talks, "a b,c d") == "d c b a"
    assert [session.session_id for session in talks.manager.table.resident_victims()] == ["c d", "a b"]


def test_blocks_of_sessions_that_are_in_use_keep_their_turn() -> None:
    talks = Talks(blocks=6)
    talks.talk("a b", "used")
    talks.talk("c d", "cold")
    talks.rest()
    talks.start("a b", "used")
    talks.step(taken=1)
    talks.pool.take(2)
    assert overwritten(talks, "c d") == "d c"
    assert talks.resident("a b") == 2
