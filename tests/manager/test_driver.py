"""The serving loop by example: what of a session that went cold is restored."""

from dataclasses import replace

import jobs
import pytest
from engine import IDLE_AFTER_S, SHAPE, chain
from integrity import check_integrity
from spills import spilled, take_spills

from manthan.manager.driver import A_STEP, Driver
from manthan.manager.observer import Observer
from manthan.manager.sessions.hints import Hints
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import Place
from manthan.manager.simulator.pool import SimulatedPool
from manthan.policies import get_policy

KEYS = chain("a b c d e f")
MORE = chain("a b c d e f g h")


class Hits(Observer):
    def __init__(self) -> None:
        self.prefetched = 0

    def prefetch_hit(self) -> None:
        self.prefetched += 1


class Served:
    """An engine that computes so many blocks again of those that it finds. One session has been there."""

    def __init__(self, again: int, hints: Hints) -> None:
        manager = SessionMemoryManager(
            get_policy("lru"), SHAPE, 100 * SHAPE.cold_nbytes, IDLE_AFTER_S, prefetch_lead_s=1.0
        )
        self.pool, self.hits = SimulatedPool(50), Hits()
        self.driver: Driver[int] = Driver(manager, self.pool, 50, low=0.05, high=0.1, observer=self.hits, again=again)
        self.driver.started("first", KEYS, "A", 0.0, tokens=96, blocks=6, hints=hints)
        blocks = self.pool.take(6)
        for block, key in zip(blocks, KEYS, strict=True):
            self.pool.cache(block, key)
        self.driver.finished("first", KEYS, 1.0, 97)
        self.pool.give_back(blocks)

    def go_cold(self) -> None:
        spilled = []
        while len(spilled) < len(KEYS):
            work = self.driver.step(0, 2.0 + IDLE_AFTER_S)
            assert 0 < len(jobs.names(work.stores)) <= self.driver.pressure.window
            spilled += jobs.names(work.stores)
            self.driver.answered([jobs.done(job, 100) for job in work.stores], 12.0)
        assert set(spilled) == set(KEYS)
        assert len(self.pool.hit(KEYS)) == len(KEYS), "what is saved stays in the pool"
        self.pool.give_back(self.pool.take(len(self.pool)))  # until others overwrite it

    def come_back(self, now: float, hot: int) -> int | None:
        """How many blocks behind those that the engine takes from its pool are restored."""
        self.driver.started("second", MORE, "A", now, tokens=128, blocks=8)
        wanted = self.driver.wanted("second", MORE[: self.driver.usable(128)], hot, 8, now)
        self.driver.admitted("second", MORE, hot, self.driver.usable(128), 8 - hot)
        return wanted


@pytest.mark.parametrize("again", [0, 1])
def test_what_is_computed_again_is_not_restored(again: int) -> None:
    served = Served(again, Hints())
    served.go_cold()
    assert served.come_back(20.0, hot=0) == 6 - again


def test_nothing_is_restored_where_the_last_block_alone_would_be() -> None:
    served = Served(1, Hints())
    served.go_cold()
    assert served.come_back(20.0, hot=5) == 0


@pytest.mark.parametrize("again", [0, 1])
def test_a_prefetched_session_is_found_although_some_is_computed_again(again: int) -> None:
    served = Served(again, Hints(expect_return_s=19.0))
    served.go_cold()
    [load] = served.driver.step(0, 19.5).loads
    served.driver.answered([jobs.done(load, 100)], 19.6)
    assert len(served.pool.hit(KEYS)) == 6
    assert served.come_back(20.0, hot=6 - again) == 0
    assert served.hits.prefetched == 1


def test_a_restore_reads_the_anchor_behind_the_block_that_is_computed_again() -> None:
    """What stands there is needed before it, and is not dropped while it is read."""
    window = 1
    shape = replace(SHAPE, beside={window: {0: 50}}, hot_beside={window: 200})
    manager = SessionMemoryManager(get_policy("lru"), shape, 100 * SHAPE.cold_nbytes, IDLE_AFTER_S)
    driver: Driver[int] = Driver(manager, SimulatedPool(50), 50, low=0.05, high=0.1, again=1, last_tokens=0)
    manager.request_started("first", KEYS, "A", 0.0, tokens=96)
    manager.request_finished("first", KEYS, 1.0, places=[Place(6, [(window, KEYS[4], 4)])])
    manager.sweep(2.0 + IDLE_AFTER_S)
    for order in take_spills(manager, 100):
        spilled(manager, order.key, order.nbytes, 12.0, order.group)
    driver.started("second", MORE, "A", 20.0, tokens=96, blocks=8)
    assert driver.usable(96) == 6
    assert driver.wanted("second", MORE[:6], 0, 8, 20.0) == 5
    driver.restoring("second", MORE[:6], [1, 2, 3, 4, 5], [(window, [KEYS[4]], [6])])
    chains, states = driver.step(0, 20.0).loads
    assert [chains.block_hashes, states.block_hashes] == [KEYS[:5], [KEYS[4]]]
    [part] = manager.table.by_id["A"].beside
    assert part.pins == 1
    driver.answered([jobs.done(chains, 100)], 20.5)
    assert part.pins == 1, "one job of two has ended"
    driver.answered([jobs.done(states, failed={0: "missing"})], 21.0)
    assert manager.match(KEYS) == 0, "nobody looks for it again"
    check_integrity(manager)


def test_who_rests_begins_nothing_until_it_goes_on() -> None:
    served = Served(0, Hints())
    served.driver.rests = True
    assert not served.driver.step(0, 2.0 + IDLE_AFTER_S).stores
    served.driver.rests = False
    served.go_cold()


def test_what_was_found_of_a_prompt_is_what_was_hot_and_what_was_restored() -> None:
    served = Served(0, Hints())
    served.go_cold()
    served.come_back(20.0, hot=0)
    served.driver.restoring("second", KEYS, [1, 2, 3, 4, 5, 6])
    [load] = served.driver.step(0, 20.0).loads
    served.driver.answered([jobs.done(load, 100, {4: "missing"})], 20.1)
    served.driver.admitted("second", MORE, 0, served.driver.usable(128), 8)
    assert served.driver.found("second") == 4 * 16
    served.driver.finished("second", MORE, 21.0, 129)
    assert served.driver.found("second") == 0


def test_a_long_session_goes_cold_by_so_many_blocks_a_step() -> None:
    """Tail first, and released likewise; and when it goes cold again, with nothing to encode, too."""
    blocks = 2 * A_STEP + 10
    keys = [n.to_bytes(32, "big") for n in range(blocks)]
    manager = SessionMemoryManager(get_policy("lru"), SHAPE, blocks * SHAPE.bounds[0], IDLE_AFTER_S)
    pool = SimulatedPool(8 * blocks)
    driver: Driver[int] = Driver(manager, pool, 8 * blocks, low=0.0, high=0.0)

    def turn(now: float) -> None:
        driver.started("request", keys, "A", now, tokens=16 * blocks, blocks=blocks)
        taken = pool.take(blocks)
        for block, key in zip(taken, keys, strict=True):
            pool.cache(block, key)
        driver.finished("request", keys, now, 16 * blocks)
        pool.give_back(taken)

    turn(1.0)
    spilled, kept = [], []
    while driver.has_work or not spilled:
        work = driver.step(0, 2.0 + IDLE_AFTER_S)
        assert len(jobs.names(work.stores)) <= A_STEP
        spilled += jobs.names(work.stores)
        driver.answered([jobs.done(job, 1) for job in work.stores], 12.0)
        kept.append(len(pool._kept))
        check_integrity(manager)
    assert spilled == keys[::-1]
    assert (min(kept), kept[-1]) == (A_STEP, blocks)
    assert [name for name in pool.names() if name is not None] == spilled
    pool.give_back(pool.take(len(pool)))
    turn(20.0)
    kept = [0]
    while driver.has_work or len(kept) < 2:
        assert not driver.step(0, 22.0 + IDLE_AFTER_S).stores
        kept.append(len(pool._kept))
        assert kept[-1] - kept[-2] <= A_STEP
    assert (len(kept) > 3, kept[-1]) == (True, blocks)
    assert [name for name in pool.names() if name is not None] == spilled
    check_integrity(manager)
