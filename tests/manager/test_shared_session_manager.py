"""The manager by example, where other engines share its store. The store's room is in bytes: a block takes 100."""

import pytest
from engine import IDLE_AFTER_S, SHAPE, Engine, chain

from manthan.manager.sessions.budget import Shares
from manthan.manager.sessions.integrity import check_integrity
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import Drop, DropCause, Session, Stranger
from manthan.policies import get_policy


class Shared(Engine):
    """An engine of which `other` is another."""

    def __init__(self, capacity: int = 100, label: str = "", shares: Shares = Shares()) -> None:  # noqa: B008
        super().__init__(capacity)
        nbytes = capacity * SHAPE.cold_nbytes
        self.manager = SessionMemoryManager(
            get_policy("lru"), SHAPE, nbytes, IDLE_AFTER_S, label=label, shares=shares, is_shared=True
        )

    def find(self, request: str, text: str, first: int = 0) -> None:
        sizes = [SHAPE.cold_nbytes] * (len(chain(text)) - first)
        self.manager.elsewhere.found(request, chain(text), sizes)

    def changes(self) -> dict[str, Session | None]:
        return dict(self.manager.elsewhere.take_changes())


def stranger(session_id: str, blocks: int, last_used: float) -> Stranger:
    return Stranger(session_id, 1e9 + last_used, blocks * SHAPE.cold_nbytes, last_used)


@pytest.fixture
def engine() -> Shared:
    return Shared()


# -- what another engine has stored -------------------------------------------------------------------


def test_what_is_found_can_be_restored(engine: Shared) -> None:
    request = engine.start("a b c d", "alice")
    assert engine.manager.match(chain("a b c d")) == 0
    engine.find(request, "a b c")
    assert engine.manager.match(chain("a b c d")) == 3
    engine.manager.restore_started(request, chain("a b c"))
    engine.manager.restore_finished(request)
    engine.finish(request, "a b c d e")
    assert engine.evict() == chain("a b c d e")[:2:-1]  # the rest has its codes
    assert engine.chains() == {"alice": "a b c d e"}


def test_what_is_found_extends_what_is_known(engine: Shared) -> None:
    engine.talk("a b", "alice")
    engine.evict()
    request = engine.start("a b c d", "alice")
    assert engine.manager.elsewhere.known(chain("a b c d")) == 2
    engine.find(request, "a b c", first=2)
    assert engine.manager.match(chain("a b c d")) == 3


def test_known_is_what_is_hot_or_cold(engine: Shared) -> None:
    engine.talk("a b")
    assert engine.manager.elsewhere.known(chain("a b c")) == 2
    engine.evict()
    assert engine.manager.elsewhere.known(chain("a b c")) == 2
    assert engine.manager.elsewhere.known(chain("x a")) == 0


def test_what_is_hot_is_not_taken_for_stored(engine: Shared) -> None:
    engine.talk("a b", "alice")
    request = engine.start("a b c", "alice")
    engine.find(request, "a b c", first=2)
    assert engine.cold() == {"c"}


def test_an_answer_after_the_request_has_ended_changes_nothing(engine: Shared) -> None:
    request = engine.start("a b")
    engine.finish(request, "")
    engine.find(request, "a b")
    assert engine.manager.match(chain("a b")) == 0
    assert len(engine.manager.blocks) == 0


def test_a_request_that_is_given_up_leaves_a_session_that_goes_cold_for_free(engine: Shared) -> None:
    request = engine.start("a b c")
    engine.find(request, "a b c")
    engine.finish(request, "")
    assert engine.evict() == []
    assert engine.states() == {"anonymous-1": "cold"}
    assert engine.cold() == {"a", "b", "c"}


# -- what is gone -------------------------------------------------------------------------------------


def test_codes_that_are_gone_end_a_cold_session_there(engine: Shared) -> None:
    engine.talk("a b c", "alice")
    engine.evict()
    engine.manager.elsewhere.not_stored(chain("a b")[1:])
    assert engine.chains() == {"alice": "a"}
    assert Drop(0, [b"a b"], DropCause.FAILED) in engine.manager.take_drops()


def test_codes_that_are_gone_cost_a_hot_session_nothing_but_an_encoding(engine: Shared) -> None:
    engine.talk("a b c", "alice")
    engine.evict()
    request = engine.start("a b c d", "alice")
    engine.manager.elsewhere.not_stored(chain("a b")[1:])
    engine.finish(request, "a b c d")
    assert engine.evict() == [b"a b c d", b"a b"]


def test_a_session_that_expires_is_forgotten(engine: Shared) -> None:
    for text, name in (("s a", "alice"), ("s b", "bob")):
        engine.talk(text, name)
    engine.evict()
    engine.manager.elsewhere.expire(["alice", "nobody"])
    assert engine.chains() == {"bob": "s b"}
    assert engine.manager.take_drops() == [Drop(0, [b"s a"], DropCause.EXPIRED)]


def test_an_emptied_store_leaves_what_is_hot(engine: Shared) -> None:
    engine.talk("s a", "alice")
    engine.talk("s b", "bob")
    engine.evict()
    request = engine.start("s b c", "bob")
    engine.manager.elsewhere.emptied()
    assert engine.chains() == {"alice": "s", "bob": "s b"}  # bob's request has the head as bf16
    assert engine.manager.take_drops() == []
    engine.finish(request, "s b c")
    assert engine.evict() == [b"s b c", b"s b", b"s"]


# -- a budget for all ---------------------------------------------------------------------------------


def test_what_others_have_stored_takes_room() -> None:
    engine = Shared(capacity=5)
    engine.manager.elsewhere.counted(300, None)
    assert engine.manager.budget.nbytes == 200
    engine.talk("a b c")
    engine.evict()
    assert engine.cold() == {"a", "b"}


def test_what_is_found_is_counted_once() -> None:
    engine = Shared(capacity=5)
    engine.manager.elsewhere.counted(300, None)
    engine.find(engine.start("a b c"), "a b c")
    assert engine.manager.elsewhere.nbytes == 0
    engine.manager.elsewhere.counted(300, None)
    assert engine.manager.budget.nbytes == 500


def test_the_oldest_goes_first_whoever_has_it() -> None:
    engine = Shared(capacity=6)
    engine.now = 100.0
    engine.talk("a b", "alice")
    engine.evict()
    engine.manager.elsewhere.counted(600, [stranger("new", 2, last_used=500.0), stranger("old", 2, last_used=50.0)])
    engine.talk("x y", "bob")
    engine.evict()
    assert [s.session_id for s in engine.manager.elsewhere.take_departed()] == ["old"]
    assert engine.cold() == {"a", "b", "x", "y"}
    engine.talk("z w", "carol")
    engine.evict()
    assert engine.manager.elsewhere.take_departed() == []  # alice is older
    assert engine.chains() == {"bob": "x y", "carol": "z w"}


def test_what_others_store_takes_back_no_pin_and_no_codes() -> None:
    """Shares are of what an engine may have at that moment, which becomes less."""
    engine = Shared(capacity=12, shares=Shares(pinned=0.25, tenants={"small": 0.25}))
    assert engine.talk("a b c", "alice", pin=True).pinned
    engine.talk("x y z", "bob", "small")
    engine.evict()
    engine.manager.elsewhere.counted(engine.manager.blocks.stored + 500, None)
    check_integrity(engine.manager)
    assert engine.session("alice").pinned
    assert engine.cold() == {"a", "b", "c", "x", "y", "z"}
    assert engine.talk("s", "carol", pin=True).refused == (
        "pin is refused: pinned sessions may take 175 bytes of the cold store (quotas.pinned_share is 0.25), 300 are "
        "taken, and this session needs 100"
    )
    engine.talk("v w", "dave", "small")
    engine.evict()
    assert engine.cold() == {"a", "b", "c", "s", "v"}, "who stores more keeps to what the share is now"
    check_integrity(engine.manager)


def test_what_others_have_stored_counts_towards_nobody_s_share() -> None:
    engine = Shared(capacity=10, shares=Shares(tenant=0.3, tenants={"": 0.3}))
    engine.talk("n o", "chat")
    engine.evict()
    engine.find(engine.start("a b c d e", "chat", "acme"), "a b c d e")
    engine.find(engine.start("x y z", "chat", "globex"), "x y")
    check_integrity(engine.manager)
    engine.talk("s", "another")
    engine.evict()
    assert engine.manager.take_drops() == []
    assert {"n", "o", "s", "a", "e", "x"} <= engine.cold()


def test_a_session_that_came_here_is_no_stranger() -> None:
    engine = Shared(capacity=2)
    engine.talk("a b", "alice")
    engine.evict()
    engine.manager.elsewhere.counted(200, [stranger("alice", 2, last_used=-5.0)])
    engine.talk("x y", "bob")
    engine.evict()
    assert engine.manager.elsewhere.take_departed() == []


# -- what the directory is told -----------------------------------------------------------------------


def test_every_change_of_a_session_is_told_once(engine: Shared) -> None:
    request = engine.start("a b", "alice")
    assert engine.changes().keys() == {"alice"}
    assert engine.changes() == {}
    engine.finish(request, "a b c")
    assert engine.changes().keys() == {"alice"}
    engine.sweep()
    assert engine.changes().keys() == {"alice"}
    keys = engine.spill()
    engine.stored(keys[:1])
    assert engine.changes().keys() == {"alice"}  # progress
    engine.stored(keys[1:])
    engine.changes()
    engine.manager.elsewhere.expire(["alice"])
    assert engine.changes() == {"alice": None}


def test_a_loss_of_codes_is_told() -> None:
    engine = Shared(capacity=3)
    engine.talk("a b c", "alice")
    engine.evict()
    engine.finish(engine.start("a b c", "alice"), "a b c")
    engine.now += 1
    engine.talk("x", "bob")
    engine.changes()
    engine.manager.relieve(1, engine.now)
    assert "alice" in engine.changes()


def test_sessions_without_a_name_carry_the_engines() -> None:
    engine = Shared(label="gpu-7")
    engine.talk("a b")
    assert list(engine.chains()) == ["anonymous-gpu-7-1"]


def test_a_reset_leaves_nothing_to_tell(engine: Shared) -> None:
    engine.talk("a b", "alice")
    engine.evict()
    engine.manager.elsewhere.counted(900, [stranger("x", 1, 0.0)])
    engine.manager.reset()
    assert engine.changes() == {}
    assert engine.manager.budget.nbytes == 10000


def test_a_hot_session_that_expires_keeps_what_others_share(engine: Shared) -> None:
    engine.talk("s a", "alice")
    engine.talk("s b", "bob")
    engine.evict()
    engine.finish(engine.start("s a", "alice"), "s a")
    engine.manager.elsewhere.expire(["alice"])
    assert engine.cold() == {"s", "b"}
