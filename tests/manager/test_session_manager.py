"""The manager by example: saving and memory pressure."""

from typing import Any

import numpy as np
import pytest
from talks import IDLE_AFTER_S, Talks, last_words, names

from manthan.manager.events import DropCause, Evicted, StoreFailed
from manthan.manager.session.blocks import NO_ROWS, BlockTable
from manthan.manager.session.manager import BEHIND

SHORT: dict[str, Any] = {"blocks": 64, "low": 0.04, "high": 0.0626}
"""Blocks are saved until 4 can be overwritten, once fewer than 2 can."""


@pytest.fixture
def talks() -> Talks:
    return Talks()


@pytest.fixture
def slow() -> Talks:
    """Have stores end only when the test says so, and gather one block at a time."""
    return Talks(blocks=16, holds=True)


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


def test_a_prompt_gets_its_own_rows_whatever_rows_are_likely() -> None:
    table = BlockTable()
    known, other = table.enter(0, names("a b c"), 0), table.enter(0, names("a x y z"), 0)
    assert known[0] == other[0]
    for likely in (NO_ROWS, known, known[:2], other, np.concatenate([known[:2], other])):
        assert table.enter(0, names("a b c"), 0, likely).tolist() == known.tolist()


def test_blocks_that_crowd_in_one_place_of_the_index_are_found_and_freed() -> None:
    table, group = BlockTable(), 0
    hashes = [bytes(8) + n.to_bytes(8, "big") + n.to_bytes(8, "big") + bytes(8) for n in range(100)]  # all begin alike
    rows = table.enter(group, hashes, 0)
    assert len(set(rows.tolist())) == 100
    assert table.find(group, hashes).tolist() == rows.tolist()
    table.free_unneeded(rows[:60])
    assert table.find(group, hashes).tolist() == [-1] * 60 + rows[60:].tolist()
    assert table.find(group + 1, hashes).tolist() == [-1] * 100, "another group has the same hashes"
    assert table.enter(group, hashes[::-1], 0)[:40].tolist() == rows[60:][::-1].tolist()
    assert len(table) == 100


def test_a_failed_store_leaves_the_session_idle_and_is_tried_again() -> None:
    talks = Talks(holds=True)
    talks.talk("a b", "s")
    talks.now = IDLE_AFTER_S
    talks.step()
    talks.answer(failed={1: "no space"})
    assert talks.states() == {"s": "idle"}
    assert talks.dropped() == [("b", DropCause.NOT_STORED)], "a rank may have stored it"
    assert talks.told(StoreFailed) == [StoreFailed(["no space"])]
    assert talks.driver.next_deadline == talks.now + 2 * IDLE_AFTER_S
    talks.holds = False
    talks.now = talks.driver.next_deadline
    assert last_words(talks.save()) == "b"
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


def test_pressure_saves_blocks_of_running_requests() -> None:
    """They would be overwritten as soon as the requests end."""
    talks = Talks(blocks=16, low=0.2, high=0.3)
    prompt = "a b c d e f g h i j k l m n"
    request = talks.start(prompt, "s")
    assert last_words(talks.save()) == prompt
    talks.finish(request, f"{prompt} o")
    assert last_words(talks.rest()) == "o"
    assert talks.states() == {"s": "cold"}


def test_pressure_saves_nothing_of_a_preempted_request() -> None:
    """Its blocks are free: others need them."""
    talks = Talks(blocks=16, low=0.2, high=0.3)
    talks.driver.cached(talks.start("a b c d e f g h i j k l m n", "s"), 0)
    assert talks.save() == []


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
    talks.manager.order_some()
    assert overwritten(talks, "a b c,x y z") == "c b x y z a"


def test_the_more_waits_to_be_put_into_order_the_more_a_step_does() -> None:
    talks = Talks(blocks=6)
    talks.manager.to_order += [(talks.pool.keep, NO_ROWS)] * 3 * BEHIND
    talks.manager.order_some()
    assert len(talks.manager.to_order) == 3 * BEHIND - 4
    for _ in range(200):
        talks.manager.order_some()
    assert not talks.manager.to_order


def test_saved_blocks_are_put_into_order_while_sessions_wait_to_be_saved(slow: Talks) -> None:
    """An engine steps on as long as there is something to order."""
    slow.talk("a b c", "s")
    slow.now = IDLE_AFTER_S
    slow.step()
    assert slow.manager.saving
    slow.manager.to_order.append((slow.pool.keep, NO_ROWS))
    slow.step()
    assert slow.manager.saving
    assert not slow.manager.to_order
