"""Which sessions are restored before their request comes, by example."""

import pytest
from engine import IDLE_AFTER_S, Engine, chain

from manthan.manager.sessions.session import DropCause

LEAD_S = 2.0


@pytest.fixture
def engine() -> Engine:
    return Engine(prefetch_lead_s=LEAD_S)


def taken(engine: Engine, room: int = 100) -> str | None:
    prefetch = engine.manager.take_prefetch(room, engine.now)
    return None if prefetch is None else prefetch.session_id


def test_a_session_is_due_so_long_before_it_is_expected(engine: Engine) -> None:
    engine.talk("a b c", "A", expect_return_s=20)
    engine.evict()
    assert engine.manager.next_deadline == 20 - LEAD_S
    engine.now = 17.9
    assert (engine.manager.prefetch_blocks(engine.now), taken(engine)) == (0, None)
    engine.now = 18.0
    assert engine.manager.prefetch_blocks(engine.now) == 3
    prefetch = engine.manager.take_prefetch(3, engine.now)
    assert prefetch is not None
    assert (prefetch.session_id, prefetch.keys) == ("A", chain("a b c"))
    engine.manager.prefetch_finished("A", True, (), engine.now)
    assert engine.states() == {"A": "idle"}
    assert taken(engine) is None


def test_one_that_goes_cold_when_it_is_due_already_is_restored_then(engine: Engine) -> None:
    engine.talk("a b", "A", expect_return_s=IDLE_AFTER_S + 1)
    engine.now = IDLE_AFTER_S - 0.5
    assert taken(engine) is None  # it is hot still
    engine.now = 0.0
    engine.evict()
    assert taken(engine) == "A"


def test_one_that_does_not_fit_is_taken_until_it_is_late(engine: Engine) -> None:
    engine.talk("a b c", "A", expect_return_s=20)
    engine.talk("x y", "X", expect_return_s=20)
    engine.evict()
    engine.now = 18.0
    assert taken(engine, room=2) == "X"
    engine.now = 20.0
    assert taken(engine, room=3) == "A"
    engine.talk("q r s", "Q", expect_return_s=20)
    engine.evict()
    engine.now += 11.0
    assert taken(engine) is None


def test_another_session_s_request_can_ask_for_it_even_when_it_is_late(engine: Engine) -> None:
    engine.talk("a b c", "A", expect_return_s=1)
    engine.evict()
    assert taken(engine) is None
    engine.talk("x y", "X", prefetch=("A", "unheard of", "X"))
    assert taken(engine) == "A"
    engine.evict()
    assert taken(engine) is None  # X was hot when it was asked for


def test_one_that_was_back_meanwhile_is_not_restored_when_it_is_cold_again(engine: Engine) -> None:
    engine.talk("a b c", "A")
    engine.evict()
    engine.talk("x y", "X", prefetch=("A",))
    engine.now += 1
    engine.talk("a b c d", "A")
    engine.manager.relieve(99, engine.now)
    engine.stored(engine.spill())
    assert engine.states()["A"] == "cold"
    assert taken(engine) is None


def test_one_that_no_pool_can_hold_is_given_up(engine: Engine) -> None:
    engine.talk("a b c", "A", expect_return_s=20)
    engine.talk("x y", "X", expect_return_s=20)
    engine.evict()
    engine.now = 18.0
    assert engine.manager.prefetch_blocks(engine.now, most=2) == 2
    assert taken(engine) == "X"


def test_one_that_is_on_its_way_is_not_taken_again(engine: Engine) -> None:
    engine.talk("a b c", "A")
    engine.evict()
    engine.talk("x y", "X", prefetch=("A",))
    assert taken(engine) == "A"
    engine.talk("x y z", "X", prefetch=("A",))
    assert (engine.manager.prefetch_blocks(engine.now), taken(engine)) == (0, None)
    engine.manager.prefetch_finished("A", False, chain("a b c")[2:], engine.now)
    assert engine.manager.take_drops()[0].cause is DropCause.FAILED
    assert all(block.pins == 0 for block in engine.manager.blocks)
    prefetch = engine.manager.take_prefetch(100, engine.now)  # what is left of it
    assert prefetch is not None
    assert prefetch.keys == chain("a b")
