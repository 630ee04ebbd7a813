"""A cold store that has less room than the budget says: sessions that it refuses wait, and uneven ranks share it."""

import math
from itertools import pairwise

import jobs
from engine import IDLE_AFTER_S, SHAPE, Engine, chain
from integrity import check_integrity
from told import told

from manthan.manager.driver import Driver
from manthan.manager.sessions.evictions import DOUBLINGS
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.simulator.pool import SimulatedPool
from manthan.manager.work import on_each
from manthan.policies import get_policy

LONGEST_S = 2**DOUBLINGS * IDLE_AFTER_S


def tries(engine: Engine, until: float, is_full: bool = True) -> list[float]:
    """Times up to then at which something is encoded by a sweep; nothing of it finds room."""
    times = []
    while (due := engine.manager.next_deadline) is not None and due <= until:
        engine.now = due
        engine.manager.sweep(due)
        if orders := engine.spill():
            times.append(due)
            assert times.count(due) < 5, "it is tried again at once"
        for key in orders:
            engine.manager.spill_failed(key, due, is_full=is_full)
        check_integrity(engine.manager)
    return times


def test_a_session_without_room_is_tried_less_and_less_often() -> None:
    engine = Engine()
    engine.talk("a b")
    times = tries(engine, 100 * LONGEST_S)
    waits = [later - earlier for earlier, later in pairwise(times)]
    assert waits[:DOUBLINGS] == [IDLE_AFTER_S * 2**n for n in range(1, DOUBLINGS + 1)]
    assert set(waits[DOUBLINGS:]) == {LONGEST_S}
    assert engine.states() == {"anonymous-1": "idle"}


def test_other_failures_are_tried_again_as_soon_as_the_session_is_idle_again() -> None:
    engine = Engine()
    engine.talk("a b")
    times = tries(engine, 20 * IDLE_AFTER_S, is_full=False)
    assert times == [n * IDLE_AFTER_S for n in range(1, 21)]


def test_it_is_tried_when_something_else_has_left_the_store() -> None:
    engine = Engine()
    engine.talk("x y", "other")
    engine.evict()
    engine.talk("a b", "refused")
    tries(engine, 20 * LONGEST_S)
    engine.talk("x y", "other", release=True)
    engine.manager.take_drops()
    engine.manager.sweep(engine.now)
    assert engine.manager.next_deadline == engine.now + IDLE_AFTER_S
    assert engine.evict() == [*reversed(chain("a b"))]
    assert engine.states() == {"refused": "cold"}
    check_integrity(engine.manager)


def test_of_several_one_is_tried_for_each_that_leaves() -> None:
    """Otherwise a store that is full would be asked for room for all of them whenever anything goes."""
    engine = Engine()
    for text in ("u v", "x y"):
        engine.talk(text, text)
    engine.evict()
    for text in ("a b", "c d", "e f"):
        engine.talk(text, text)
    tries(engine, 20 * LONGEST_S)
    for left, text in ((2, "u v"), (1, "x y")):
        engine.talk(text, text, release=True)
        engine.now += IDLE_AFTER_S / 10
        engine.manager.sweep(engine.now)
        assert len(engine.manager.table.put_off) == left


def test_a_request_ends_the_waiting_and_success_forgets_it() -> None:
    engine = Engine()
    engine.talk("a b", "refused")
    tries(engine, 20 * LONGEST_S)
    request = engine.start("a b c", "refused")
    assert not len(engine.manager.table.put_off)
    engine.finish(request, "a b c")
    assert engine.manager.next_deadline == engine.now + IDLE_AFTER_S
    engine.evict()
    assert engine.session("refused").refusals == 0


class Uneven:
    """Two ranks, each with half of a store of so many bytes, of which one takes more for every block."""

    SIZES = 50, 30

    def __init__(self, capacity: int, sessions: int) -> None:
        manager = SessionMemoryManager(get_policy("lru"), SHAPE, capacity, IDLE_AFTER_S)
        self.pool, self.used, self.peak = SimulatedPool(200), [0, 0], 0
        self.stored: set[bytes] = set()
        self.room = capacity // 2
        self.driver: Driver[int] = Driver(manager, self.pool, 200, low=0.05, high=0.1, ranks=2, weigh=on_each(2))
        self.refused = 0
        for number in range(sessions):
            keys = chain(f"{number} a b c")
            self.driver.started(f"r{number}", keys, f"s{number}", float(number), tokens=64, blocks=4)
            blocks = self.pool.take(4)
            for block, key in zip(blocks, keys, strict=True):
                self.pool.cache(block, key)
            self.driver.finished(f"r{number}", keys, float(number), 65)
            self.pool.give_back(blocks)

    def step(self, now: float) -> None:
        work = self.driver.step(0, now)
        for drop in work.drops:
            for key in self.stored.intersection(drop.keys):
                self.stored.remove(key)
                self.used = [used - size for used, size in zip(self.used, self.SIZES, strict=True)]
        for job in work.stores:
            failed = dict[int, str]()
            for at in reversed(range(len(job))):
                if max(self.used) + self.SIZES[0] > self.room:
                    failed[at] = "store_full"
                    continue
                self.stored.add(job.block_hashes[at])
                self.used = [used + size for used, size in zip(self.used, self.SIZES, strict=True)]
            self.refused += len(failed)
            self.driver.answered([jobs.done(job, self.SIZES[0], failed), jobs.done(job, self.SIZES[1])], now)


def test_a_store_that_others_fill_is_asked_less_and_less_often() -> None:
    """Its other blocks are stored meanwhile, and kept: a session needs no more than what is missing."""
    world = Uneven(capacity=8000, sessions=1)
    world.room = 160
    for n in range(200):
        world.step(100.0 + n * IDLE_AFTER_S)
    assert world.refused <= DOUBLINGS + 200 * IDLE_AFTER_S / LONGEST_S + 1
    assert world.driver.manager.usage.cold_blocks == 3
    world.room = 200
    for n in range(200, 240):
        world.step(100.0 + n * IDLE_AFTER_S)
    assert told(world.driver.manager, "s0").state == "cold"


def test_no_rank_is_full_while_the_budget_is_not() -> None:
    """Of 50 and 30 bytes a block, 8000 would hold 100 blocks; of the larger ones half of that holds 80."""
    world = Uneven(capacity=8000, sessions=40)
    for n in range(10):
        world.step(100.0 + n * IDLE_AFTER_S)
    assert world.refused == 0
    assert max(world.used) == world.room
    assert world.driver.manager.usage.cold_nbytes == 8000
    assert math.isclose(world.used[1] / world.used[0], 0.6)
