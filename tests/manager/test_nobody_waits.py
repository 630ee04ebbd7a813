"""No request waits for an encoding: references end when blocks are needed, turns are encoded ahead, losses counted."""

from collections.abc import Iterator

import pytest
from engine import SHAPE
from told import all_told

from manthan.manager.driver import Driver, Work
from manthan.manager.observer import Observer
from manthan.manager.sessions.evictions import AHEAD_AFTER_S
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import BlockName
from manthan.manager.simulator.pool import SimulatedPool
from manthan.manager.work import NEEDED, SpillResult
from manthan.policies import get_policy

BLOCKS = 64
WINDOW = BLOCKS // 16


class Counting(Observer):
    def __init__(self) -> None:
        self.lost = 0
        self.failures: list[str] = []

    def overwritten(self, blocks: int) -> None:
        self.lost += blocks

    def not_spilled(self, causes: "set[str]") -> None:  # type: ignore[override]
        self.failures += causes


class Pool(SimulatedPool):
    """Counts how often its free queue is looked through."""

    walks = 0

    def names(self) -> Iterator[BlockName | None]:
        self.walks += 1
        return super().names()


class World:
    def __init__(self, low: float = 0.25, high: float = 0.5) -> None:
        self.manager = SessionMemoryManager(get_policy("lru"), SHAPE, 10**6, idle_after_s=300.0)
        self.pool, self.seen = Pool(BLOCKS), Counting()
        self.driver: Driver[int] = Driver(self.manager, self.pool, BLOCKS, low=low, high=high, observer=self.seen)

    def keys(self, name: str, blocks: int) -> list[bytes]:
        return [f"{name}{n}".ljust(32).encode() for n in range(blocks)]

    def ask(self, name: str, blocks: int, now: float) -> int | None:
        """A request comes; returns what can be restored for it."""
        keys = self.keys(name, blocks)
        self.driver.started(name, keys, name, now, tokens=16 * blocks + 1, blocks=blocks)
        return self.driver.wanted(name, keys, len(self.pool.hit(keys)), blocks, now)

    def answer(self, name: str, blocks: int, now: float) -> None:
        """It gets its blocks, and ends."""
        keys = self.keys(name, blocks)
        hot = self.pool.hit(keys)
        self.pool.touch(hot)
        new = self.pool.take(blocks - len(hot))
        self.driver.admitted(name, keys, len(hot), blocks, len(new))
        self.pool.cache_all(new, keys[len(hot) :])
        self.driver.finished(name, keys, now, 16 * blocks + 1)
        self.pool.give_back([*reversed(new), *reversed(hot)])

    def turn(self, name: str, blocks: int, now: float) -> None:
        assert self.ask(name, blocks, now) == 0
        self.answer(name, blocks, now)

    def copied(self, work: Work) -> None:
        self.driver.copied([(spill.group, spill.key) for spill in work.spills])

    def stored(self, work: Work, now: float, cause: str | None = None) -> None:
        results = [SpillResult(spill.key, spill.group, cause, 0.0, 100) for spill in work.spills]
        self.driver.answered(results, [], now)


def test_a_request_is_never_held_back_while_all_is_to_be_encoded() -> None:
    world = World()
    for n in range(4):
        world.turn(f"chat{n}", 16, n)
    work = world.driver.step(0, 4.0)
    assert work.spills
    for n in range(4, 8):
        assert world.ask(f"chat{n}", 12, 5.0) == 0


def test_nor_is_the_free_queue_walked_for_it() -> None:
    world = World()
    for n in range(4):
        world.turn(f"chat{n}", 16, n)
    world.driver.step(0, 4.0)
    walks = world.pool.walks
    for n in range(100):
        world.ask(f"new{n}", 16, 5.0)
    assert world.pool.walks == walks > 0


def test_vllm_is_not_told_to_wait_for_blocks_that_are_to_be_encoded() -> None:
    world = World()
    world.turn("chat", 60, 0.0)
    assert world.driver.step(0, 1.0).spills
    assert world.driver.holds_blocks
    assert not world.driver.frees_soon


def test_blocks_are_free_again_when_they_are_copied() -> None:
    world = World()
    world.turn("chat", 60, 0.0)
    work = world.driver.step(0, 1.0)
    assert len(world.pool) == BLOCKS - len(work.spills) < BLOCKS
    world.copied(work)
    assert len(world.pool) == BLOCKS
    assert world.manager.blocks.spilling == len(work.spills)


@pytest.mark.parametrize("needs", ["waiting", "running"])
def test_blocks_that_nobody_reads_yet_are_given_up_when_requests_need_them(needs: str) -> None:
    world = World()
    world.turn("chat", 60, 0.0)
    work = world.driver.step(0, 1.0)
    assert 0 < len(work.spills) <= WINDOW
    assert not work.revokes
    assert not world.driver.step(0, 1.1).revokes, "nobody needs more than is free"
    if needs == "waiting":
        world.ask("other", BLOCKS, 1.2)
    taken = 0 if needs == "waiting" else BLOCKS
    assert world.driver.step(taken, 1.3).revokes
    world.driver.copied([(spill.group, spill.key) for spill in work.spills])
    world.stored(work, 1.4, NEEDED)
    assert len(world.pool) == BLOCKS
    assert world.seen.failures == []
    assert not world.driver.step(0, 1.5).revokes


def test_no_more_is_referenced_than_leaves_room_for_the_first_that_waits() -> None:
    world = World(low=0.9, high=1.0)
    world.turn("chat", 60, 0.0)
    world.ask("other", BLOCKS - 1, 1.0)
    work = world.driver.step(0, 1.0)
    assert len(work.spills) == 1
    assert len(world.pool) == BLOCKS - 1


def test_blocks_of_a_waiting_request_are_at_risk_and_its_own_hits_are_no_room() -> None:
    """An unsaved block of a session counts as worth keeping also while its next request waits."""
    world = World(low=0.0, high=0.0)
    world.turn("a", 16, 0.0)
    world.turn("b", 16, 1.0)
    world.pool.take(BLOCKS - 32)
    assert world.manager.safe(world.pool.names(), BLOCKS) == 0
    world.ask("a", 40, 2.0)
    assert world.manager.safe(world.pool.names(), BLOCKS) == 0


def test_a_turn_is_encoded_ahead_two_seconds_after_it_ended_if_nothing_else_is() -> None:
    world = World(low=0.0, high=0.0)
    world.turn("chat", 6, 0.0)
    assert AHEAD_AFTER_S == 2.0
    assert not world.driver.step(0, AHEAD_AFTER_S - 0.1).spills
    assert world.driver.next_deadline == AHEAD_AFTER_S
    first = world.driver.step(0, AHEAD_AFTER_S)
    assert len(first.spills) == WINDOW
    assert not world.driver.step(0, 2.1).spills, "threads are busy"
    world.copied(first)
    assert not world.driver.step(0, 2.2).spills, "they still are"
    world.stored(first, 2.3)
    rest = world.driver.step(0, 2.4)
    assert len(first.spills) + len(rest.spills) == 6
    world.stored(rest, 2.5)
    assert [str(session.state) for session in all_told(world.manager)] == ["idle"]
    assert len(world.pool.hit(world.keys("chat", 6))) == 6, "it stays in the pool"
    assert world.manager.blocks.cold == 6


def test_a_session_is_cold_once_vllm_has_overwritten_its_end_and_what_is_left_stays() -> None:
    world = World(low=0.0, high=0.0)
    world.turn("chat", 6, 0.0)
    for now in (2.0, 2.1):  # WINDOW blocks a step
        work = world.driver.step(0, now)
        world.copied(work)
        world.stored(work, now)
    assert world.manager.usage.hot_blocks == world.manager.blocks.cold == 6
    world.turn("other", BLOCKS - 2, 3.0)
    assert len(world.pool.hit(world.keys("chat", 6))) == 2
    assert not world.driver.step(0, 3.1).spills
    assert {session.id: str(session.state) for session in all_told(world.manager)} == {
        "chat": "cold",
        "other": "idle",
    }
    assert world.manager.usage.hot_blocks == BLOCKS - 2
    assert len(world.pool.hit(world.keys("chat", 6))) == 2, "the rest is overwritten when vLLM needs it"
    assert world.ask("chat", 6, 3.2) == 4


def test_what_is_overwritten_before_it_was_encoded_is_counted_once() -> None:
    world = World(low=0.0, high=0.0)
    world.turn("chat", 16, 0.0)
    assert world.seen.lost == 0, "a first prompt loses nothing"
    world.turn("other", BLOCKS, 1.0)
    world.turn("chat", 16, 1.5)
    assert world.seen.lost == 16
    world.turn("chat", 16, 1.6)
    assert world.seen.lost == 16


def test_what_is_gone_when_its_encoding_is_to_begin_is_counted_too() -> None:
    world = World(low=0.0, high=0.0)
    world.turn("chat", 4, 0.0)
    world.pool.give_back(world.pool.take(BLOCKS))
    assert not world.driver.step(0, AHEAD_AFTER_S).spills
    assert world.seen.lost == 4
