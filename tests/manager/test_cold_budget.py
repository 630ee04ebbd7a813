"""The manager by example: a full cold store, and restores. The store's room is in blocks."""

from engine import Engine, chain

from manthan.manager.sessions.session import DropCause


def dropped(engine: Engine, cause: DropCause = DropCause.BUDGET) -> list[str]:
    """The last words of the blocks dropped since the last call, in order, all for one reason."""
    drops = engine.manager.take_drops()
    assert {drop.cause for drop in drops} <= {cause}
    return [key.decode().split()[-1] for drop in drops for key in drop.keys]


def restore(engine: Engine, text: str, failed: str = "") -> str:
    """A request for a cold session whose blocks are read back, but for one and those behind it."""
    request = engine.start(text)
    keys = chain(text)[: engine.manager.match(chain(text))]
    engine.manager.restore_started(request, keys)
    engine.manager.restore_finished(request, [chain(failed)[-1]] if failed else [])
    return request


# -- a full store -------------------------------------------------------------------------------------


def test_the_least_recently_used_session_makes_room_tail_first() -> None:
    engine = Engine(capacity=6)
    for text in ("a b c", "d e f"):
        engine.talk(text)
        engine.evict()
    engine.talk("x y")
    assert engine.evict() == chain("x y")[::-1]
    assert dropped(engine) == ["b", "c"]
    assert engine.chains()["anonymous-1"] == "a"
    assert engine.cold() == {"a", "d", "e", "f", "x", "y"}


def test_a_shared_prefix_is_stored_once_and_dropped_last() -> None:
    engine = Engine(capacity=5)
    for word in "abc":
        engine.talk(f"sys {word}")
    assert sorted(engine.evict()) == sorted([b"sys", b"sys a", b"sys b", b"sys c"])
    engine.talk("x y")
    engine.evict()
    assert dropped(engine) == ["a"]
    engine.talk("z w")
    engine.evict()
    assert dropped(engine) == ["b", "c"]
    engine.talk("u v")
    engine.evict()
    assert dropped(engine) == ["sys", "y"]


def test_a_session_larger_than_the_store_keeps_its_head() -> None:
    engine = Engine(capacity=3)
    engine.talk("old")
    engine.evict()
    engine.talk("a b c d e")
    engine.sweep()
    assert dropped(engine) == ["old"]
    assert engine.manager.take_releases() == chain("a b c d e")[3:]  # the policy gave them up
    engine.stored(engine.spill())
    assert engine.chains() == {"anonymous-2": "a b c"}
    assert engine.cold() == {"a", "b", "c"}


def test_a_session_worth_less_than_all_codes_is_given_up() -> None:
    engine = Engine(capacity=2)
    engine.talk("a b")
    engine.evict()
    engine.talk("old older")
    engine.finish(restore(engine, "a b"), "a b")
    engine.manager.relieve(1, engine.now)
    assert list(engine.chains().values()) == ["a b"]
    assert dropped(engine) == []
    assert engine.manager.take_releases() == [*reversed(chain("a b")), *chain("old older")]  # saved, and given up


# -- restore ------------------------------------------------------------------------------------------


def test_what_matches_is_the_unbroken_run_from_the_first_key_on() -> None:
    engine = Engine()
    engine.talk("a b c")
    engine.evict()
    assert engine.manager.match(chain("a b c d")) == 3
    assert engine.manager.match(chain("a b c")[1:]) == 2
    assert engine.manager.match(chain("a x")) == 1
    assert engine.manager.match(chain("x b c")) == 0
    assert engine.manager.match([]) == 0


def test_codes_that_are_being_read_are_never_dropped() -> None:
    engine = Engine(capacity=2)
    engine.talk("a b")
    engine.evict()
    fork = engine.start("a b x")
    engine.manager.restore_started("r-other", chain("a b"))
    engine.finish(fork, "a b x")
    engine.sweep()
    assert dropped(engine) == []
    assert engine.cold() == {"a", "b"}
    engine.manager.restore_finished("r-other")
    engine.talk("y z")
    engine.evict()
    assert engine.cold() == {"y", "z"}


def test_codes_that_cannot_be_read_are_dropped_and_encoded_anew() -> None:
    engine = Engine()
    engine.talk("a b c")
    engine.evict()
    request = restore(engine, "a b c", failed="a b")
    assert dropped(engine, DropCause.FAILED) == ["b"]
    assert engine.manager.match(chain("a b c")) == 1
    engine.finish(request, "a b c")
    assert engine.evict() == chain("a b")[1:]


def test_many_sessions_may_lose_their_common_head_at_once() -> None:
    engine = Engine(capacity=3_000)
    for i in range(2_000):
        engine.talk(f"sys {i}")
    engine.evict()
    engine.manager.restore_started("reader", [b"sys"])
    engine.manager.restore_finished("reader", [b"sys"])
    assert engine.chains() == {}
    assert len(engine.manager.blocks) == 0
