"""No request waits for a store: references end when blocks are needed, turns are saved soon, losses are counted."""

from typing import Any

import numpy as np
import pytest
from talks import Talks, long_text

from manthan.manager.driver import Work
from manthan.manager.events import Overwritten, StoreFailed
from manthan.manager.transfer import NEEDED, TransferResult

BLOCKS = 64
WINDOW = BLOCKS // 16
SAVED_AFTER_S = 2.0


class Chats(Talks):
    """A pool of 64 blocks, and tiers with room for all. Results are held."""

    def __init__(
        self, low: float = 0.25, high: float = 0.5, ranks: int = 1, holds: bool = True, **options: Any
    ) -> None:
        options |= {"low": low, "high": high, "ranks": ranks, "holds": holds}
        super().__init__(10_000, blocks=BLOCKS, idle_after_s=SAVED_AFTER_S, **options)

    def turn(self, who: str, blocks: int) -> None:
        """Have a request come, be served at once, and end."""
        self.finish(self.start(long_text(who, blocks), who))

    def wait(self, who: str, blocks: int) -> int | None:
        """Have a request come that has to wait. Return how many of its blocks could be loaded."""
        request = self.ask(long_text(who, blocks), who)
        resident = self.resident(long_text(who, blocks))
        return self.driver.matched(request, resident, blocks, blocks, self.now)

    @property
    def lost(self) -> int:
        """Number of blocks that were overwritten before they were saved."""
        return sum(event.blocks for event in self.told(Overwritten))


def count(work: Work) -> int:
    """Return how many blocks are to be stored."""
    return sum(map(len, work.stores))


@pytest.mark.invariant(2, "manager/driver.py", "if store.gathered == self._storing:", "if store.gathered > 0:")
@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_are_free_again_when_all_ranks_have_gathered_them(ranks: int) -> None:
    chats = Chats(ranks=ranks)
    chats.turn("chat", 60)
    work = chats.step()
    assert len(chats.pool) == BLOCKS - count(work) < BLOCKS
    ids = [job.job_id for job in work.stores]
    for _ in range(ranks - 1):
        chats.driver.gathered(ids)
        assert len(chats.pool) < BLOCKS
    chats.driver.gathered(ids)
    assert len(chats.pool) == BLOCKS
    assert chats.manager.blocks.storing == count(work)


def test_a_store_waits_only_for_ranks_that_keep_blocks_and_a_load_for_all() -> None:
    """Of three ranks with the same KV one keeps it, and what it takes there is what the block takes."""
    chats = Chats(ranks=3, driver={"storing": 1})
    chats.turn("chat", 4)
    chats.now += SAVED_AFTER_S
    [job] = chats.step().stores
    chats.driver.gathered([job.job_id])
    assert len(chats.pool) == BLOCKS
    chats.driver.answered([TransferResult(job.job_id, np.full(4, 50))], chats.now)
    assert chats.manager.usage().saved_nbytes == 4 * 50
    chats.overwrite()
    request = chats.start(long_text("chat", 6), "chat")
    [load] = chats.driver.loads_of(request)
    for _ in range(2):
        chats.driver.answered([TransferResult(load.job_id, np.full(4, 50))], chats.now)
        assert chats.driver.loads_of(request)
    chats.driver.answered([TransferResult(load.job_id, np.full(4, 50))], chats.now)
    assert not chats.driver.loads_of(request)


@pytest.mark.parametrize("needs", ["waiting", "running"])
def test_blocks_that_nobody_reads_yet_are_given_up_when_requests_need_them(needs: str) -> None:
    chats = Chats()
    chats.turn("chat", 60)
    work = chats.step()
    assert 0 < count(work) <= WINDOW
    assert not work.revokes
    assert not chats.step().revokes, "nobody needs more than is free"
    if needs == "waiting":
        chats.wait("other", BLOCKS)
    assert chats.step(taken=0 if needs == "waiting" else BLOCKS).revokes
    chats.gathered()
    for job in work.stores:
        chats.answer([job], failed=dict.fromkeys(range(len(job)), NEEDED))
    assert len(chats.pool) == BLOCKS
    assert chats.told(StoreFailed) == []
    assert not chats.step().revokes


def test_no_more_is_referenced_than_leaves_room_for_the_first_that_waits() -> None:
    chats = Chats(low=0.9, high=1.0)
    chats.turn("chat", 60)
    chats.wait("other", BLOCKS - 1)
    assert count(chats.step()) == 1
    assert len(chats.pool) == BLOCKS - 1


def test_blocks_that_are_overwritten_before_they_were_saved_are_counted_once() -> None:
    chats = Chats(low=0.0, high=0.0, holds=False)
    chats.turn("chat", 16)
    assert chats.lost == 0, "a first prompt loses nothing"
    chats.turn("other", BLOCKS)
    chats.turn("chat", 16)
    assert chats.lost == 16
    chats.turn("chat", 16)
    assert chats.lost == 16


def test_blocks_that_are_gone_when_their_store_is_to_begin_are_counted_too() -> None:
    chats = Chats(low=0.0, high=0.0, holds=False)
    chats.turn("chat", 4)
    chats.overwrite()
    assert chats.rest() == []
    assert chats.lost == 4
