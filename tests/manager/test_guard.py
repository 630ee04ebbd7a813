"""Before the first eviction: blocks are held and measured, nobody goes cold meanwhile, and the codec is chosen."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from engine import SHAPE, Engine, chain

from manthan.codec.fidelity import Fidelity
from manthan.manager.guard import SAMPLE_TOKENS, Choice, Guard
from manthan.manager.observer import Observer
from manthan.manager.sessions.session import MemoryShape
from manthan.manager.work import SpillBlock, Verdict

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

    def block_id(self, block: bytes) -> int:
        return len(block)

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

    world.guard.answered([verdict(0.01)])

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
    world.guard.answered([verdict(0.9, 0.01)])
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
    world.guard.answered([verdict(0.9, 0.8)])
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
        world.guard.answered([answer])
        assert world.guard.is_measuring
        assert not world.manager.may_evict
    world.guard.answered(answers[2:])
    assert world.manager.shape is FINER
    assert [found.codec for found in world.told.verdicts] == ["finer"]


def test_where_nothing_could_be_measured_the_codec_is_kept() -> None:
    world = World()
    world.engine.talk("a b", "one")
    world.guard.step()
    world.guard.answered([verdict()])
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
