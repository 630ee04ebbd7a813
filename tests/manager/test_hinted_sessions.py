"""What the manager does with hints: pins, times to live, priorities, release; and with tenants' shares."""

from engine import IDLE_AFTER_S, Engine, chain

from manthan.manager.sessions.budget import Shares
from manthan.manager.sessions.session import DropCause


def dropped(engine: Engine) -> list[tuple[str, str]]:
    """The last words of dropped blocks, each with the cause."""
    return [(key.decode().split()[-1], drop.cause) for drop in engine.manager.take_drops() for key in drop.keys]


# -- pins ---------------------------------------------------------------------------------------------


def test_a_pinned_session_stays_while_younger_ones_go() -> None:
    engine = Engine(capacity=8)
    assert engine.talk("a b", "old", pin=True).pinned
    engine.evict()
    for i in range(5):
        engine.now += 1
        engine.talk(f"c{i} d{i} e{i}")
        engine.evict()
    assert {"a", "b"} <= engine.cold()
    assert len(engine.cold()) == 8


def test_a_session_that_is_pinned_no_longer_goes_in_its_turn() -> None:
    engine = Engine(capacity=8)
    engine.talk("a b", "old", pin=True)
    assert not engine.talk("a b x", "old", pin=False).pinned
    engine.evict()
    for i in range(3):
        engine.now += 1
        engine.talk(f"c{i} d{i} e{i}")
        engine.evict()
    assert not {"a", "b", "x"} & engine.cold()


def test_a_pin_beyond_the_share_is_refused_in_a_sentence() -> None:
    engine = Engine(capacity=8)
    engine.talk("a", "first", pin=True)
    outcome = engine.talk("c d", "second", pin=True)
    assert outcome[:3] == (
        "second",
        False,
        "pin is refused: pinned sessions may take 224 bytes of the cold store (tiers.pinned_share is 0.25), 100 are "
        "taken, and this session needs 200",
    )
    assert not engine.session("second").pinned


def test_a_pinned_session_that_outgrows_the_share_is_pinned_no_longer_and_goes_in_its_turn() -> None:
    engine = Engine(capacity=8)
    engine.talk("a b", "old", pin=True)
    outcome = engine.talk("a b c", "old")
    assert (outcome.pinned, outcome.refused[:14]) == (False, "pin is refused")
    engine.evict()
    engine.now += 1
    engine.talk(" ".join(f"w{i}" for i in range(8)))
    engine.evict()
    assert not {"a", "b", "c"} & engine.cold()


# -- time to live, priority, release ------------------------------------------------------------------


def test_a_session_is_forgotten_when_its_time_is_over() -> None:
    engine = Engine()
    engine.talk("a b", "short", ttl_s=100)
    engine.talk("c d", "long")
    engine.evict()
    assert engine.manager.next_deadline == 100
    engine.manager.sweep(99.9)
    assert dropped(engine) == []
    engine.manager.sweep(100)
    assert sorted(dropped(engine)) == [("a", DropCause.EXPIRED), ("b", DropCause.EXPIRED)]
    assert engine.chains() == {"long": "c d"}


def test_each_use_begins_the_time_anew() -> None:
    engine = Engine()
    engine.talk("a b", "s", ttl_s=5)
    engine.now = 4
    request = engine.start("a b c", "s")
    engine.manager.sweep(8)
    engine.now = 9
    engine.finish(request, "a b c d")
    engine.manager.sweep(13.9)
    assert engine.chains() == {"s": "a b c d"}
    engine.manager.sweep(14)
    assert engine.chains() == {}


def test_a_session_that_is_being_evicted_is_forgotten_afterwards() -> None:
    engine = Engine()
    engine.talk("a b", ttl_s=IDLE_AFTER_S)
    engine.now = IDLE_AFTER_S
    engine.manager.sweep(engine.now - 0.1)
    engine.manager.relieve(9, engine.now)
    keys = engine.spill()
    engine.manager.sweep(engine.now)
    engine.stored(keys)
    assert engine.states() == {"anonymous-1": "cold"}
    engine.manager.sweep(engine.now + 1)
    assert engine.states() == {}


def test_lower_priorities_go_first_whatever_the_policy_says() -> None:
    engine = Engine(capacity=4)
    for text, priority in (("a b", 3), ("c d", -1)):
        engine.talk(text, priority=priority)
        engine.evict()
    engine.talk("e f", priority=3)
    engine.evict()
    assert engine.cold() == {"a", "b", "e", "f"}


def test_hot_sessions_of_lower_priority_are_evicted_first() -> None:
    engine = Engine()
    engine.talk("a b", "high", priority=1)
    engine.talk("c d", "low", priority=-1)
    engine.manager.relieve(1, engine.now)
    assert engine.states() == {"high": "idle", "low": "evicting"}


def test_a_released_session_leaves_nothing() -> None:
    engine = Engine()
    engine.talk("sys a b", "s")
    engine.talk("sys c", "other")
    engine.evict()
    engine.manager.take_drops()
    engine.talk("sys a b d e", "s", release=True)
    assert sorted(dropped(engine)) == [("a", DropCause.RELEASED), ("b", DropCause.RELEASED)]
    assert set(engine.manager.take_releases()) == set(chain("sys a b d e")[1:] + chain("sys"))
    assert engine.chains() == {"other": "sys c"}


# -- tenants ------------------------------------------------------------------------------------------


def test_a_tenant_makes_room_among_its_own_sessions() -> None:
    engine = Engine(capacity=8, shares=Shares(tenants={"*": 0.5}))
    engine.talk("a b c", tenant="quiet")
    engine.evict()
    for i in range(5):
        engine.now += 1
        engine.talk(f"x{i} y{i}", tenant="loud")
        engine.evict()
    assert engine.cold() == {"a", "b", "c", "x3", "y3", "x4", "y4"}


# -- prefetch -----------------------------------------------------------------------------------------


def test_codes_are_not_dropped_while_they_are_fetched() -> None:
    engine = Engine(capacity=2, prefetch_lead_s=2.0)
    engine.talk("a b", "agent", expect_return_s=60)
    engine.evict()
    engine.manager.take_prefetch(9, 58)
    engine.now = 59
    engine.talk("c d")
    engine.evict()
    assert engine.cold() == {"a", "b"}
