"""Before the first eviction: blocks are held and measured, nobody goes cold meanwhile, and the codec is chosen."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine import SHAPE, Engine, chain

from manthan.codec.fidelity import Fidelity
from manthan.manager.guard import SAMPLE_TOKENS, Choice, Guard
from manthan.manager.observer import Observer
from manthan.manager.sessions.integrity import check_integrity
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import MemoryShape, Place
from manthan.manager.work import SpillBlock, Verdict
from manthan.policies import get_policy

FINER = MemoryShape(16, 500, {0: 140, 4: 180, 16: 500}, codec="finer")
WHOLE = MemoryShape(16, 500, dict.fromkeys((0, 4, 16), 500))
LONG = " ".join(f"w{n}" for n in range(20))


def fidelity(codec: str, noise: float) -> Fidelity:
    layers = np.full(3, noise, np.float32)
    return Fidelity(codec, 256, layers, layers, 1 - layers, 1 - layers, layers, 4.0)


def verdict(*noises: float) -> Verdict:
    return Verdict([fidelity(name, noise) for name, noise in zip(("coarse", "finer"), noises, strict=False)])


class Pool:
    """Which keys are in it, and who holds what."""

    def __init__(self) -> None:
        self.gone: set[bytes] = set()
        self.held: list[bytes] = []

    def hold(self, key: bytes) -> bytes | None:
        if key in self.gone:
            return None
        self.held.append(key)
        return key

    def hold_beside(self, group: int, key: bytes) -> bytes | None:
        return self.hold(key)

    def block_ids(self, blocks: Sequence[bytes]) -> list[int]:
        return list(map(len, blocks))

    def give_back(self, blocks: Sequence[bytes]) -> None:
        for block in blocks:
            self.held.remove(block)


class Told(Observer):
    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []

    def judged(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)


class World:
    """An engine with a guard, of so many ranks."""

    def __init__(self, ranks: int = 1, **more: Any) -> None:
        self.engine, self.pool, self.told = Engine(**more), Pool(), Told()
        self.manager = self.engine.manager
        choices = [Choice(SHAPE, 10_099), Choice(FINER, 9_999), Choice(WHOLE, 8_888)]
        self.guard: Guard[bytes] = Guard(self.manager, self.pool, choices, ranks, self.told)  # type: ignore[arg-type]

    def answered(self, verdicts: Sequence[Verdict]) -> None:
        self.pool.give_back(self.guard.answered(verdicts))

    def keys(self, orders: Sequence[SpillBlock]) -> list[bytes]:
        return [order.key for order in orders]


def test_nobody_is_evicted_before_the_answer() -> None:
    world = World()
    assert (world.guard.step(), world.guard.has_orders) == ([], False)
    world.engine.talk("a b c", "one")
    assert world.guard.has_orders
    orders = world.guard.step()
    assert world.keys(orders) == chain("a b c") == world.pool.held
    assert [order.first_token for order in orders] == [0, 16, 32]
    assert world.guard.is_measuring
    assert not world.guard.has_orders
    world.engine.sweep()
    assert not world.manager.relieve(10, world.engine.now)
    assert world.engine.spill() == []
    assert world.engine.states() == {"one": "idle"}
    assert world.guard.step() == []  # they are asked once

    world.answered([verdict(0.01)])

    assert world.pool.held == []
    assert not world.guard.is_measuring
    assert world.engine.evict() == chain("a b c")[::-1]
    assert world.engine.states() == {"one": "cold"}
    assert [found.codec for found in world.told.verdicts] == ["coarse"]
    assert world.manager.shape is SHAPE
    world.engine.talk("x y", "two")
    assert (world.guard.step(), world.guard.has_orders) == ([], False)


def test_as_many_tokens_are_measured_as_are_needed() -> None:
    world = World(sink_tokens=4)
    world.engine.talk(LONG, "long")
    orders = world.guard.step()
    assert len(orders) * 16 == SAMPLE_TOKENS
    assert [order.exact for order in orders] == [4] + [0] * 15


def test_a_finer_codec_is_ordered_and_its_bytes_are_reserved() -> None:
    world = World()
    world.engine.talk("a b", "one")
    world.guard.step()
    world.answered([verdict(0.9, 0.01)])
    world.engine.sweep()
    orders = world.manager.take_spills(10)
    assert [(order.codec, order.nbytes) for order in orders] == [("finer", 140)] * 2
    assert world.manager.blocks.reserved == 280
    assert world.manager.budget.total == 9_999
    world.engine.stored(chain("a b"), 130)
    assert world.manager.usage.cold_nbytes == 260
    assert world.told.verdicts[0].codec == "finer"


def test_where_no_codec_is_faithful_all_tokens_are_kept_exact() -> None:
    world = World()
    world.engine.talk("a b", "one")
    world.guard.step()
    world.answered([verdict(0.9, 0.8)])
    world.engine.sweep()
    orders = world.manager.take_spills(10)
    assert [(order.codec, order.exact, order.nbytes) for order in orders] == [("", 16, 500)] * 2
    assert world.told.verdicts[0].codec == "exact"


@pytest.mark.parametrize("order", [1, -1])
def test_the_worst_rank_decides(order: int) -> None:
    world = World(ranks=3)
    world.engine.talk("a b", "one")
    world.guard.step()
    answers = [verdict(0.01), verdict(0.9, 0.01), verdict(0.02)][::order]
    for answer in answers[:2]:
        world.answered([answer])
        assert world.guard.is_measuring
        assert not world.manager.may_evict
    world.answered(answers[2:])
    assert world.manager.shape is FINER
    assert [found.codec for found in world.told.verdicts] == ["finer"]


def test_where_nothing_could_be_measured_the_codec_is_kept() -> None:
    world = World()
    world.engine.talk("a b", "one")
    world.guard.step()
    world.answered([verdict()])
    assert world.manager.shape is SHAPE
    assert world.manager.may_evict


def test_a_session_that_is_not_in_the_pool_any_more_is_passed_over() -> None:
    """And does not keep the engine awake; used again, it is there again."""
    world = World()
    world.pool.gone = set(chain("a b"))
    world.engine.talk("a b", "one")
    assert world.guard.step() == []
    assert not world.guard.has_orders
    world.engine.talk("x y", "two")
    assert world.guard.has_orders
    assert world.keys(world.guard.step()) == chain("x y")

    again = World()
    again.pool.gone = set(chain("a b"))
    again.engine.talk("a b", "one")
    again.guard.step()
    again.pool.gone = set()
    again.engine.now += 1
    again.engine.talk("a b c", "one")
    assert again.keys(again.guard.step()) == chain("a b c")


def test_what_is_left_of_a_session_will_do() -> None:
    world = World()
    world.pool.gone = {chain("a b c")[0]}
    world.engine.talk("a b c", "one")
    assert world.keys(world.guard.step()) == chain("a b c")[1:]


def test_blocks_of_the_codec_before_stay_what_they_are() -> None:
    """A switch at any time: what is queued keeps its codec and its bytes, and what comes later has the other's."""
    engine = Engine()
    engine.talk("a b", "one")
    engine.sweep()
    engine.manager.recode(FINER, 5_000)
    engine.talk("x y", "two")
    engine.sweep()
    orders = engine.manager.take_spills(10)
    assert [(order.key[-1:], order.codec, order.nbytes) for order in orders] == [
        (b"b", "", 100),
        (b"a", "", 100),
        (b"y", "finer", 140),
        (b"x", "finer", 140),
    ]
    assert engine.manager.blocks.reserved == 480


BESIDE = MemoryShape(16, 500, {0: 100}, group=1, beside={0: {0: 50}}, hot_beside={0: 200})


class Groups:
    """Chains beside which a window's last block is needed, and a guard."""

    def __init__(self) -> None:
        self.manager = SessionMemoryManager(get_policy("lru"), BESIDE, 10_000, idle_after_s=10, min_tokens=16)
        self.pool = Pool()
        choices = [Choice(BESIDE, 10_000), Choice(replace(BESIDE, codec="finer"), 10_000)]
        self.guard: Guard[bytes] = Guard(self.manager, self.pool, choices, 1, Told())  # type: ignore[arg-type]

    def turn(self, name: str, blocks: int, most: int = 9) -> bytes:
        """Returns the key of the window's block that the session ends with."""
        keys, last = [f"{name}{n}".encode() for n in range(blocks)], f"window of {name}{blocks}".encode()
        self.manager.request_started(name, keys[:-1], name, 0.0, tokens=16 * blocks)
        self.manager.request_finished(
            name, keys, 0.0, tokens=16 * blocks, places=[Place(len(keys), [(0, last, blocks - 1)])]
        )
        self.guard.keep(most)
        return last

    def open(self) -> list[tuple[int | None, bytes]]:
        """What is ordered when the ranks have answered."""
        done = self.guard.answered([verdict(0.01)])
        orders = [(order.group, order.key) for order in self.manager.take_spills(10)]
        self.pool.give_back(done)
        assert self.pool.held == []
        check_integrity(self.manager)
        return orders


def test_what_sessions_need_beside_their_chains_is_held_until_it_may_be_encoded() -> None:
    world = Groups()
    first, second = world.turn("a", 2), world.turn("b", 3)
    assert world.pool.held == [first, second]
    world.guard.step()
    assert world.manager.take_spills(10) == []
    grown = world.turn("a", 4)
    assert set(world.open()) == {(0, second), (0, grown)}


def test_not_more_is_held_than_may_be() -> None:
    world = Groups()
    world.turn("a", 2)
    last = world.turn("b", 3, most=1)
    assert world.pool.held == [last]
    world.guard.step()
    world.open()


def test_nothing_is_held_where_nobody_knows_when_there_is_something_to_measure() -> None:
    world = Groups()
    last = world.turn("a", 2)
    world.pool.gone = {b"a0", b"a1"}
    assert world.pool.held == [last]
    assert world.guard.step() == []
    assert world.pool.held == []
    world.turn("b", 2)
    world.manager.reset()
    assert world.guard.step() == []
    assert world.pool.held == []
    assert world.open() == []
