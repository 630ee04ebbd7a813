"""The manager by example: eviction, memory pressure, reset."""

from collections.abc import Callable

import pytest
from engine import IDLE_AFTER_S, Engine, chain
from integrity import check_integrity
from spills import spilled

from manthan.manager.sessions.session import Drop, DropCause


@pytest.fixture
def engine() -> Engine:
    return Engine()


# -- sweep and eviction -------------------------------------------------------------------------------


def test_a_sweep_takes_what_is_due_and_nothing_else(engine: Engine) -> None:
    engine.talk("a b")
    engine.now = 3.0
    engine.talk("x y")
    engine.manager.sweep(IDLE_AFTER_S - 0.1)
    assert not engine.manager.has_work
    engine.manager.sweep(IDLE_AFTER_S)
    assert engine.states() == {"anonymous-1": "evicting", "anonymous-2": "idle"}
    assert engine.manager.has_work


def test_blocks_are_released_only_when_their_codes_are_stored(engine: Engine) -> None:
    engine.talk("a b")
    engine.sweep()
    assert engine.manager.take_releases() == []
    head, tail = chain("a b")
    assert engine.spill(limit=1) == [tail]  # vLLM overwrites tails first
    assert engine.spill() == [head]
    assert engine.manager.take_releases() == []
    engine.stored([tail])
    assert engine.manager.take_releases() == [tail]
    assert engine.states() == {"anonymous-1": "evicting"}
    engine.stored([head])
    assert engine.manager.take_releases() == [tail, head]  # all of it is in order now
    assert engine.states() == {"anonymous-1": "cold"}
    assert not engine.manager.has_work
    assert engine.manager.match(chain("a b c")) == 2


def test_an_eviction_is_accounted_for(engine: Engine) -> None:
    engine.talk("a b c")
    engine.sweep()
    keys = engine.spill()
    engine.now += 2
    engine.stored(keys)
    (eviction,) = engine.manager.take_evictions()
    assert eviction == ("anonymous-1", 3, 0, 48, 1500, 3, 300, 300, IDLE_AFTER_S, 2.0, 0, False)
    assert engine.manager.take_evictions() == []


def test_an_unknown_or_repeated_answer_is_ignored(engine: Engine) -> None:
    engine.talk("a b")
    engine.evict()
    for key in (b"a", b"unknown"):
        spilled(engine.manager, key, 50, engine.now)
        engine.manager.spill_failed(key, engine.now)
        engine.manager.lost(key, engine.now)
    assert engine.states() == {"anonymous-1": "cold"}
    assert engine.cold() == {"a", "b"}


def test_a_second_eviction_after_a_return_encodes_nothing(engine: Engine) -> None:
    engine.talk("a b c")
    assert len(engine.evict()) == 3
    engine.manager.take_evictions()
    for _ in range(5):
        engine.finish(engine.start("a b c"), "a b c")
        assert engine.evict() == []
        assert engine.states() == {"anonymous-1": "cold"}
        assert engine.manager.take_evictions()[0].encoded == 0
    engine.talk("a b c d e")
    assert engine.evict() == chain("a b c d e")[:2:-1]


def test_a_return_in_the_middle_of_an_eviction_takes_back_what_only_waits(engine: Engine) -> None:
    engine.talk("a b c")
    engine.sweep()
    first, second, third = engine.spill(limit=1)[0], *chain("a b c")[1::-1]
    request = engine.start("a b c d")
    engine.stored([first])
    assert engine.manager.take_releases() == [first]  # it is saved
    assert engine.spill() == []
    assert engine.manager.blocks.queued == 0
    assert not engine.manager.has_work
    engine.finish(request, "a b c d")
    engine.sweep()
    assert engine.spill() == [chain("a b c d")[3], second, third]  # the stored one is kept


def test_lost_blocks_cut_their_session(engine: Engine) -> None:
    engine.talk("a b c d")
    engine.sweep()
    d, c, b, a = engine.spill()
    engine.stored([d, c])
    engine.manager.lost(b, engine.now)
    assert engine.chains() == {"anonymous-1": "a"}
    assert engine.manager.take_drops() == [Drop(0, [c, d], DropCause.ABANDONED)]
    engine.stored([a])
    assert engine.states() == {"anonymous-1": "cold"}


def test_a_failed_spill_leaves_the_session_hot_and_is_tried_again(engine: Engine) -> None:
    engine.talk("a b")
    engine.sweep()
    tail, head = engine.spill()
    engine.stored([tail])
    engine.manager.spill_failed(head, engine.now)
    assert engine.states() == {"anonymous-1": "idle"}
    assert engine.manager.take_releases() == [tail]  # it is saved
    assert engine.manager.take_drops() == [Drop(0, [head], DropCause.FAILED)]  # a rank may have stored it
    assert not engine.manager.relieve(10, engine.now + 1)
    assert engine.manager.next_deadline == engine.now + IDLE_AFTER_S
    assert engine.manager.relieve(10, engine.now + IDLE_AFTER_S)
    assert engine.evict() == [head]
    assert engine.states() == {"anonymous-1": "cold"}


# -- memory pressure ----------------------------------------------------------------------------------


def test_relief_goes_in_policy_order_and_no_further_than_wanted(engine: Engine) -> None:
    for text in ("a b", "c d", "e f"):
        engine.talk(text)
    engine.talk("a b a")
    assert engine.manager.blocks.exposed == 7
    assert engine.manager.relieve(3, engine.now)
    assert engine.states() == {
        "anonymous-1": "idle",
        "anonymous-2": "evicting",
        "anonymous-3": "evicting",
    }
    assert engine.manager.blocks.exposed == 3


def test_relief_passes_over_sessions_that_vllm_may_overwrite_without_loss(engine: Engine) -> None:
    engine.talk("a b")
    engine.evict()
    engine.finish(engine.start("a b"), "a b")  # idle again, with codes
    engine.talk("c d")
    assert engine.manager.relieve(100, engine.now)
    assert engine.states() == {"anonymous-1": "idle", "anonymous-2": "evicting"}
    assert not engine.manager.relieve(100, engine.now)


# -- reset --------------------------------------------------------------------------------------------


def test_codes_from_before_a_reset_never_match_again(engine: Engine) -> None:
    engine.talk("a b")
    engine.evict()
    engine.manager.reset()
    assert engine.manager.match(chain("a b")) == 0
    assert engine.chains() == {}
    drops = engine.manager.take_drops()
    assert {(key, d.cause) for d in drops for key in d.keys} == {(k, DropCause.RESET) for k in chain("a b")}
    assert not engine.manager.has_work


@pytest.mark.parametrize("answer", ["all_spilled", "spill_failed", "lost"])
def test_a_spill_under_way_at_a_reset_is_dropped_when_it_ends(engine: Engine, answer: str) -> None:
    settle: Callable[..., None] = getattr(engine.manager, answer)
    engine.talk("a b")
    engine.sweep()
    (tail,) = engine.spill(limit=1)
    engine.manager.reset()
    engine.talk("a b")  # computed anew, under the same keys
    engine.sweep()
    settle(*([[tail], [100]] if answer == "all_spilled" else [tail]), engine.now)
    assert engine.manager.match(chain("a b")) == 0
    engine.manager.take_drops()
    engine.talk("a b")
    engine.evict()
    assert engine.manager.match(chain("a b")) == 2


def test_a_restore_under_way_at_a_reset_pins_nothing_computed_later(engine: Engine) -> None:
    engine.talk("a b")
    engine.evict()
    request = engine.start("a b c")
    engine.manager.restore_started(request, chain("a b"))
    engine.manager.reset()
    assert engine.manager.match(chain("a b")) == 0
    assert len(engine.manager.blocks) == 0
    engine.finish(request, "a b c")
    engine.evict()
    engine.manager.restore_finished(request, chain("a b"))
    assert engine.manager.match(chain("a b c")) == 3


def test_a_running_session_survives_a_reset_without_its_past(engine: Engine) -> None:
    engine.talk("a b", "alice")
    request = engine.start("a b c", "alice")
    engine.manager.reset()
    assert engine.chains() == {"alice": ""}
    engine.finish(request, "a b c")
    assert engine.chains() == {"alice": "a b c"}
    assert engine.states() == {"alice": "idle"}


def test_a_reset_takes_a_session_along_that_was_cold_only_as_far_as_another_is_hot(engine: Engine) -> None:
    for name in ("running", "cold"):
        engine.talk("a b c", name)
    engine.evict()
    request = engine.start("a b c", "running")
    engine.manager.restore_started(request, chain("a b c"))
    engine.manager.restore_finished(request, chain("a"))
    assert engine.states() == {"running": "hot", "cold": "cold"}
    engine.manager.reset()
    assert engine.chains() == {"running": ""}
    check_integrity(engine.manager)
