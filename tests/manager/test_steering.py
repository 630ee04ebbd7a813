"""What an operator may ask of a session, and what comes of it."""

import pytest
from engine import IDLE_AFTER_S, Engine, chain
from integrity import check_integrity
from spills import take_spills

from manthan.manager.sessions.budget import Shares
from manthan.manager.sessions.manager import PATIENCE
from manthan.manager.sessions.session import NewsKind


@pytest.fixture
def engine() -> Engine:
    made = Engine(prefetch_lead_s=1.0, shares=Shares(pinned=0.03))
    made.talk("a one two", "a")
    made.manager.take_news()
    return made


def kinds(engine: Engine) -> list[tuple[str, str]]:
    return [(news.session_id, str(news.kind)) for news in engine.manager.take_news()]


def test_an_idle_session_goes_cold_at_once(engine: Engine) -> None:
    manager, session = engine.manager, engine.session("a")
    assert manager.steer("evict", session, engine.now) == ""
    assert engine.states() == {"a": "evicting"}
    assert manager.steer("evict", session, engine.now) == ""
    engine.stored(engine.spill())
    assert engine.states() == {"a": "cold"}
    assert manager.steer("evict", session, engine.now) == ""
    assert engine.spill() == []
    check_integrity(engine.manager)


def test_a_running_session_neither_goes_cold_nor_away_nor_is_expected(engine: Engine) -> None:
    engine.start("a one two three")
    for what in ("evict", "expect", "release"):
        assert engine.manager.steer(what, engine.session("a"), engine.now).startswith("a request of it runs; it can ")
    assert engine.states() == {"a": "hot"}


def test_a_cold_session_is_prefetched_while_that_is_worth_it(engine: Engine) -> None:
    manager = engine.manager
    engine.evict()
    assert manager.steer("prefetch", engine.session("a"), engine.now) == ""
    assert manager.prefetch_blocks(engine.now) == 3
    assert manager.prefetch_blocks(engine.now + PATIENCE * IDLE_AFTER_S + 0.1) == 0


def test_nothing_is_prefetched_of_a_model_whose_sessions_cannot_be() -> None:
    engine = Engine()
    engine.talk("a one", "a")
    assert engine.manager.steer("prefetch", engine.session("a"), 0.0) == "sessions of this model cannot be prefetched"


def test_pins_end_when_they_were_to(engine: Engine) -> None:
    manager, session = engine.manager, engine.session("a")
    assert manager.steer("pin", session, engine.now, 1.0) == ""
    assert engine.manager.next_deadline == 1.0
    engine.manager.sweep(0.9)
    assert session.pinned
    engine.manager.sweep(1.0)
    assert not session.pinned
    assert kinds(engine) == [("a", "pinned"), ("a", "unpinned")]
    assert manager.steer("pin", session, 6.0, 5.0) == manager.steer("pin", session, 7.0) == ""
    engine.manager.sweep(100.0)
    assert session.pinned, "the second pin is for good"
    assert manager.steer("unpin", session, 101.0) == manager.steer("unpin", session, 102.0) == ""
    assert kinds(engine) == [("a", "pinned"), ("a", "unpinned")]


def test_a_pin_for_a_while_lasts_over_turns_and_a_hint_makes_it_last_for_good(engine: Engine) -> None:
    session = engine.session("a")
    engine.manager.steer("pin", session, engine.now, 5.0)
    engine.talk("a one two", "a")
    assert (session.pinned, session.pinned_until) == (True, 5.0)
    engine.talk("a one two", "a", pin=True)
    engine.manager.sweep(6.0)
    assert session.pinned


def test_a_pin_stays_when_others_come_to_share_its_head(engine: Engine) -> None:
    """The head is kept exact then, at the expense of the heads' share: five times what the pin may take."""
    session = engine.session("a")
    assert engine.manager.steer("pin", session, engine.now) == ""
    engine.talk("a one two b", "b")
    engine.sweep()
    for order in take_spills(engine.manager, 99):
        engine.stored([order.key], order.nbytes)
    assert [block.encoding.exact for block in session.chain] == [16, 16, 16]
    assert engine.talk("a one two", "a").refused == ""
    assert session.pinned
    check_integrity(engine.manager)
    engine.talk("a one two three", "a")
    assert not session.pinned, "its own blocks count as before"


@pytest.mark.parametrize("state", ["idle", "evicting", "cold"])
def test_what_is_released_is_forgotten(engine: Engine, state: str) -> None:
    manager = engine.manager
    if state != "idle":
        engine.sweep()
        keys = engine.spill()
        if state == "cold":
            engine.stored(keys)
    assert engine.states() == {"a": state}
    assert manager.steer("release", engine.session("a"), engine.now) == ""
    if state == "evicting":
        engine.stored(keys)
    assert engine.states() == {}
    assert manager.match(chain("a one two")) == 0
    assert manager.blocks.reserved == 0
    check_integrity(manager)


def test_news(engine: Engine) -> None:
    engine.now = 2.0
    request = engine.start("a one two three")
    engine.now = 3.5
    engine.manager.request_finished(request, chain("a one two"), engine.now, tokens=60, found=32)
    [turn] = engine.manager.take_news()
    assert (turn.kind, turn.tokens, turn.blocks, turn.seconds, turn.found) == (NewsKind.TURN, 64, 3, 1.5, 32)
    engine.evict()
    engine.manager.steer("release", engine.session("a"), engine.now)
    [released] = engine.manager.take_news()
    assert (released.kind, released.blocks, released.nbytes, released.cause) == ("released", 3, 300, "released")


def test_who_is_expected_back_is_prefetched_in_time(engine: Engine) -> None:
    manager, session = engine.manager, engine.session("a")
    engine.evict()
    assert manager.steer("expect", session, engine.now, 60.0) == ""
    assert (session.expected, manager.next_deadline) == (engine.now + 60, engine.now + 59)
    assert manager.prefetch_blocks(engine.now + 58) == 0
    assert manager.prefetch_blocks(engine.now + 59) == 3
    assert manager.steer("expect", session, engine.now, tool="unknown") == ""
    assert (session.expected, manager.next_deadline) == (None, None), "what was said last holds"
    check_integrity(manager)
