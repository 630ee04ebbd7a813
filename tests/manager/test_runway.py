"""Distance of a pool from overwriting unsaved blocks, and when its free queue has to be walked again."""

import pytest
from talks import Talks, long_text

from manthan.manager.driver import Runway
from manthan.manager.events import DropCause
from manthan.manager.simulator.pool import SimulatedPool

BLOCKS = 64


class Queue(SimulatedPool):
    """Counts how often it is looked through."""

    walks = 0

    def runway(self, most: int) -> int:
        self.walks += 1
        return super().runway(most)


def engine(low: float, high: float) -> tuple[Talks, Queue]:
    """Return an engine whose results are held, with sessions "a" and "b" of 20 blocks each, and its pool."""
    queue = Queue(BLOCKS)
    talks = Talks(1000, pool=queue, low=low, high=high, holds=True)
    for who in "ab":
        talks.finish(talks.start(long_text(who, 20), who))
    return talks, queue


def test_the_queue_is_walked_only_when_too_many_may_have_been_taken() -> None:
    queue = Queue(BLOCKS)
    runway = Runway(queue, ahead=30)
    assert runway.length(10) == 30
    runway.taken(20)
    assert (runway.length(10), queue.walks) == (10, 1)
    runway.taken(1)
    assert (runway.length(10), queue.walks) == (30, 2)
    assert (runway.length(40), queue.walks) == (40, 3)
    runway.forget()
    assert (runway.length(1), queue.walks) == (30, 4)


@pytest.mark.parametrize("is_resident", [True, False])
def test_dropped_blocks_count_where_the_pool_has_them(is_resident: bool) -> None:
    talks, _ = engine(low=0.0, high=0.0)
    talks.holds = False
    talks.rest()
    if not is_resident:
        talks.overwrite()
    assert talks.driver.runway.length(BLOCKS) == BLOCKS
    talks.manager._drop(talks.session("a").rows, DropCause.BUDGET)
    assert talks.driver.runway.length(BLOCKS) == BLOCKS - 20 * is_resident


def test_memory_is_not_short_while_enough_is_being_stored() -> None:
    talks, queue = engine(low=0.5, high=0.75)
    assert talks.pool.runway(BLOCKS) == 24
    assert talks.driver.wanted == 0.75 * BLOCKS - 24
    while talks.manager.blocks.storing < 8:  # a sixteenth of the pool each step
        assert talks.step().stores
        talks.gathered()
    assert talks.driver.wanted == 0
    walks = queue.walks
    talks.step()
    assert queue.walks == walks, "a walk would change nothing"
    talks.answer()
    assert talks.driver.wanted == 0
    assert talks.pool.runway(BLOCKS) == 24 + len(talks.saved()) > 32


def test_a_session_is_saved_when_the_pool_is_about_to_overwrite_it_and_others_are_not() -> None:
    talks, _ = engine(low=0.25, high=0.3)
    talks.holds = False
    assert talks.save() == []
    talks.start(long_text("new", 10))
    talks.save()
    assert talks.states() == {"a": "cold", "b": "idle", "anonymous-1": "active"}
    assert talks.session("a").is_pressed
