"""No request waits for an encoding: references end when blocks are needed, turns are saved soon, losses counted."""

from collections.abc import Iterator

import jobs
import pytest
from engine import SHAPE
from told import all_told

from manthan.manager.driver import Driver, Work
from manthan.manager.observer import Observer
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import BlockName, DropCause
from manthan.manager.simulator.pool import SimulatedPool
from manthan.manager.work import NEEDED
from manthan.policies import get_policy

BLOCKS = 64
WINDOW = BLOCKS // 16
SAVED_AFTER_S = 2.0


class Counting(Observer):
    def __init__(self) -> None:
        self.lost = 0
        self.failures: list[str] = []

    def overwritten(self, blocks: int) -> None:
        self.lost += blocks

    def not_stored(self, causes: "set[str]") -> None:  # type: ignore[override]
        self.failures += causes


class Pool(SimulatedPool):
    """Counts how often its free queue is looked through."""

    walks = 0

    def names(self) -> Iterator[BlockName | None]:
        self.walks += 1
        return super().names()


def blocks(work: Work) -> int:
    return sum(map(len, work.stores))


class World:
    def __init__(self, low: float = 0.25, high: float = 0.5, ranks: int = 1) -> None:
        self.manager = SessionMemoryManager(get_policy("lru"), SHAPE, 10**6, idle_after_s=SAVED_AFTER_S)
        self.pool, self.seen = Pool(BLOCKS), Counting()
        told = {"low": low, "high": high, "observer": self.seen, "ranks": ranks}
        self.driver: Driver[int] = Driver(self.manager, self.pool, BLOCKS, **told)  # type: ignore[arg-type]

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

    def gathered(self, work: Work) -> None:
        self.driver.gathered([job.job_id for job in work.stores])

    def stored(self, work: Work, now: float, cause: str | None = None) -> None:
        for job in work.stores:
            failed = dict.fromkeys(range(len(job)), cause) if cause else {}
            self.driver.answered([jobs.done(job, 100, failed)], now)


def test_a_request_is_never_held_back_while_all_is_to_be_encoded() -> None:
    world = World()
    for n in range(4):
        world.turn(f"chat{n}", 16, n)
    work = world.driver.step(0, 4.0)
    assert work.stores
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
    assert world.driver.step(0, 1.0).stores
    assert world.driver.holds_blocks
    assert not world.driver.frees_soon


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_are_free_again_when_all_ranks_have_gathered_them(ranks: int) -> None:
    world = World(ranks=ranks)
    world.turn("chat", 60, 0.0)
    work = world.driver.step(0, 1.0)
    assert len(world.pool) == BLOCKS - blocks(work) < BLOCKS
    for _ in range(ranks - 1):
        world.gathered(work)
        assert len(world.pool) < BLOCKS
    world.gathered(work)
    assert len(world.pool) == BLOCKS
    assert world.manager.blocks.spilling == blocks(work)


@pytest.mark.parametrize("needs", ["waiting", "running"])
def test_blocks_that_nobody_reads_yet_are_given_up_when_requests_need_them(needs: str) -> None:
    world = World()
    world.turn("chat", 60, 0.0)
    work = world.driver.step(0, 1.0)
    assert 0 < blocks(work) <= WINDOW
    assert not work.revokes
    assert not world.driver.step(0, 1.1).revokes, "nobody needs more than is free"
    if needs == "waiting":
        world.ask("other", BLOCKS, 1.2)
    taken = 0 if needs == "waiting" else BLOCKS
    assert world.driver.step(taken, 1.3).revokes
    world.gathered(work)
    world.stored(work, 1.4, NEEDED)
    assert len(world.pool) == BLOCKS
    assert world.seen.failures == []
    assert not world.driver.step(0, 1.5).revokes


def test_no_more_is_referenced_than_leaves_room_for_the_first_that_waits() -> None:
    world = World(low=0.9, high=1.0)
    world.turn("chat", 60, 0.0)
    world.ask("other", BLOCKS - 1, 1.0)
    work = world.driver.step(0, 1.0)
    assert blocks(work) == 1
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


def test_a_turn_is_saved_two_seconds_after_it_ended_and_stays_in_the_pool() -> None:
    world = World(low=0.0, high=0.0)
    world.turn("chat", 6, 0.0)
    assert not world.driver.step(0, SAVED_AFTER_S - 0.1).stores
    assert world.driver.next_deadline == SAVED_AFTER_S
    first = world.driver.step(0, SAVED_AFTER_S)
    assert blocks(first) == WINDOW
    world.gathered(first)
    world.stored(first, 2.3)
    rest = world.driver.step(0, 2.4)
    assert blocks(first) + blocks(rest) == 6
    world.gathered(rest)
    world.stored(rest, 2.5)
    assert [str(session.state) for session in all_told(world.manager)] == ["cold"]
    assert world.ask("chat", 6, 2.6) == 0, "it is in the pool"
    assert len(world.pool.hit(world.keys("chat", 6))) == 6
    assert world.manager.blocks.cold == 6


def save(world: "World", now: float) -> None:
    """All that is idle is saved."""
    while (work := world.driver.step(0, now)).stores:
        world.gathered(work)
        world.stored(work, now)
    world.driver.step(0, now)


def test_saved_blocks_are_overwritten_behind_those_that_hold_nothing_and_before_all_others() -> None:
    world = World(low=0.0, high=0.0)
    for name in ("unsaved", "first", "second"):
        world.turn(name, 8, 0.0)
    for name in ("first", "second"):
        world.manager.steer("evict", world.manager.table.by_id[name], 0.0)
    save(world, 0.0)
    held = [name for name in world.pool.names() if name is not None]
    assert len(world.pool) - len(held) == BLOCKS - 24
    assert held == [key for name in ("first", "second", "unsaved") for key in reversed(world.keys(name, 8))]
    world.turn("first", 8, 0.5)
    world.driver.step(0, 0.6)
    held = [name for name in world.pool.names() if name is not None]
    assert held == [key for name in ("second", "first", "unsaved") for key in reversed(world.keys(name, 8))]


def test_a_head_that_sessions_share_is_overwritten_behind_what_is_theirs_alone() -> None:
    world = World(low=0.0, high=0.0)
    for name in ("one", "two"):
        keys = [*world.keys("head", 4), *world.keys(name, 4)]
        world.keys = lambda _, blocks, keys=keys: keys[:blocks]  # type: ignore[method-assign]
        world.turn(name, 8, 0.0)
        del world.keys
    save(world, SAVED_AFTER_S)
    held = [name for name in world.pool.names() if name is not None]
    assert held[-4:] == [*reversed(world.keys("head", 4))]


def test_a_saved_block_stands_in_its_place_whenever_it_comes_free() -> None:
    """As when a request is preempted, or aborted, or its blocks are freed late."""
    world = World(low=0.0, high=0.0)
    world.turn("saved", 8, 0.0)
    save(world, SAVED_AFTER_S)
    world.turn("unsaved", 8, 3.0)
    blocks = world.pool.hit(world.keys("saved", 8))
    world.pool.touch(blocks)
    world.driver.step(0, 3.1)
    world.pool.give_back(reversed(blocks))
    held = [name for name in world.pool.names() if name is not None]
    assert held == [key for name in ("saved", "unsaved") for key in reversed(world.keys(name, 8))]


def test_a_half_empty_pool_overwrites_nothing() -> None:
    world = World(low=0.0, high=0.0)
    for turn in range(10):
        world.turn("chat", 16 + turn, 10.0 * turn)
        save(world, 10.0 * turn + SAVED_AFTER_S)
        assert len(world.pool.hit(world.keys("chat", 16 + turn))) == 16 + turn
    assert world.seen.lost == 0


def test_what_the_cold_store_gives_up_is_not_next_to_be_overwritten() -> None:
    """The pool has the only copy then."""
    world = World(low=0.0, high=0.0)
    for name in ("a", "b"):
        world.turn(name, 4, 0.0)
    save(world, SAVED_AFTER_S)
    world.turn("a", 4, 3.0)
    world.manager.budget.nbytes = 8 * 100
    world.turn("new", 4, 4.0)
    world.driver.step(0, 4.0)
    session = next(one for one in world.manager.table.by_id.values() if one.session_id == "a")
    world.manager._pruning.give(session, session.chain, DropCause.BUDGET)
    world.driver.step(0, 4.1)
    held = [name for name in world.pool.names() if name is not None]
    assert held[:4] == [*reversed(world.keys("b", 4))]
    assert set(held[4:]) == {*world.keys("a", 4), *world.keys("new", 4)}


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
    assert not world.driver.step(0, SAVED_AFTER_S).stores
    assert world.seen.lost == 4
