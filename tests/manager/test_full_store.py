"""A tier that has less room than the budget says: sessions that it refuses wait, and uneven ranks share it."""

from itertools import pairwise

import numpy as np
import pytest
from talks import IDLE_AFTER_S, Talks

from manthan.manager.session.manager import DOUBLINGS
from manthan.manager.tiers.tier import STORE_FULL
from manthan.manager.transfer import NEEDED, STORE_DOWN, Transfer, TransferResult, on_each

LONGEST_S = 2**DOUBLINGS * IDLE_AFTER_S


@pytest.fixture
def full() -> Talks:
    """Return an engine with a session, and a tier that refuses all blocks."""
    talks = Talks()
    talks.refuses = lambda block: STORE_FULL
    talks.talk("a b", "refused")
    return talks


def tries(talks: Talks, count: int) -> list[float]:
    """Return the next times at which something is stored."""
    times = list[float]()
    while len(times) < count:
        talks.now = talks.driver.next_deadline
        if talks.step().stores:
            times.append(talks.now)
        assert not talks.step().stores, "it is tried again at once"
    return times


def waits(talks: Talks, count: int) -> list[float]:
    """Return the seconds between the next tries."""
    return [later - earlier for earlier, later in pairwise(tries(talks, count + 1))]


@pytest.mark.parametrize("cause", [STORE_FULL, "broken"])
def test_a_session_that_the_tiers_refuse_is_tried_less_and_less_often(cause: str, full: Talks) -> None:
    full.refuses = lambda block: cause
    doubled = [IDLE_AFTER_S * 2**n for n in range(1, DOUBLINGS + 1)]
    assert waits(full, DOUBLINGS + 2) == [*doubled, LONGEST_S, LONGEST_S]
    assert full.states() == {"refused": "idle"}


def test_a_store_that_gave_its_blocks_back_is_tried_again_after_the_idle_time(full: Talks) -> None:
    full.refuses = lambda block: NEEDED
    assert waits(full, 9) == [IDLE_AFTER_S] * 9


def test_once_the_store_is_back_sessions_are_saved_at_once(full: Talks) -> None:
    full.refuses = lambda block: STORE_DOWN
    tries(full, DOUBLINGS)
    full.manager.store_is_back()
    assert full.driver.next_deadline is not None
    assert full.driver.next_deadline <= full.now


def test_a_request_ends_the_waiting(full: Talks) -> None:
    tries(full, DOUBLINGS)
    full.talk("a b c", "refused")
    assert full.driver.next_deadline == full.now + IDLE_AFTER_S


def test_pressure_does_not_ask_again_for_a_session_that_waits() -> None:
    talks = Talks(blocks=4, low=0.9, high=0.9)
    talks.refuses = lambda block: STORE_FULL
    talks.talk("a b", "idle")
    running = talks.start("x y", "runs")
    stored = [len(talks.step().stores) for _ in range(10)]
    assert sum(stored) == 2, "each is tried once"
    talks.finish(running, "x y")


class Uneven(Talks):
    """Two ranks with an equal part of the tier. One takes more for every block."""

    SIZES = 50, 30

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks, ranks=2, driver={"weigh": on_each(2)})
        self.room = self.manager.budget_nbytes // 2
        self.used, self.refused = [0, 0], 0

    def _result(self, job: Transfer, failed: dict[int, str], rank: int) -> TransferResult:
        fits = min(len(job), (self.room - self.used[rank]) // self.SIZES[rank])
        self.used[rank] += fits * self.SIZES[rank]
        self.refused += len(job) - fits
        sizes = np.full(len(job), self.SIZES[rank])
        return TransferResult(job.job_id, sizes, dict.fromkeys(range(fits, len(job)), STORE_FULL))


def test_no_rank_is_full_while_the_budget_is_not() -> None:
    """A budget of 8000 bytes holds 80 blocks, of 50 bytes on the larger rank. By their sums, it would hold 100."""
    talks = Uneven(80)
    for number in range(20):
        talks.talk(f"{number} a b c", f"{number}")
    talks.rest()
    assert talks.refused == 0
    assert talks.used == [4000, 2400]
    assert talks.manager.usage().saved_nbytes == 8000
