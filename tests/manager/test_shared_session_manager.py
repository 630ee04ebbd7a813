"""The manager by example, where other engines share its store. The store's room is in bytes: a block takes 100."""

from typing import Any

import pytest
from engine import SHAPE, Engine, chain
from integrity import check_integrity

from manthan.manager.sessions.budget import Shares
from manthan.manager.sessions.marks import Mark
from manthan.manager.sessions.session import Session

TTL_S = 1e4


class Shared(Engine):
    """An engine of which `other` is another."""

    def __init__(self, **more: Any) -> None:
        super().__init__(shared_ttl_s=TTL_S, **more)

    def find(self, request: str, text: str, first: int = 0) -> None:
        sizes = [SHAPE.cold_nbytes] * (len(chain(text)) - first)
        self.manager.remote.found(request, chain(text), sizes)

    def changes(self) -> dict[str, Session | None]:
        return dict(self.manager.table.take_changes())


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


def test_of_what_is_found_a_session_is_served_its_own(engine: Shared) -> None:
    request = engine.start("a b c d", "alice")
    engine.find(request, "a b c d")
    assert engine.manager.match(chain("a b c d"), request) == 0
    engine.manager.served_elsewhere(request, 3)
    assert engine.manager.match(chain("a b c d"), request) == 3
    engine.manager.served_elsewhere("gone", 3)


@pytest.mark.parametrize(("name", "hints"), [(None, {}), ("alice", {"quality": "exact"})])
def test_without_a_name_or_to_who_wants_exact_kv_nothing_is_served(
    engine: Shared, name: str | None, hints: dict[str, str]
) -> None:
    request = engine.start("a b c d", name, **hints)
    engine.find(request, "a b c d")
    engine.manager.served_elsewhere(request, 3)
    assert engine.manager.match(chain("a b c d"), request) == 0


def test_what_is_found_extends_what_is_known(engine: Shared) -> None:
    engine.talk("a b", "alice")
    engine.evict()
    request = engine.start("a b c d", "alice")
    assert engine.manager.remote.known(chain("a b c d")) == 2
    engine.find(request, "a b c", first=2)
    assert engine.manager.match(chain("a b c d")) == 3


def test_what_is_found_counts_towards_nobody_s_share() -> None:
    engine = Shared(capacity=4, shares=Shares(tenants={"*": 0.5}))
    request = engine.start("a b c d", "alice")
    engine.find(request, "a b c")
    assert engine.manager.blocks.reserved == 3 * SHAPE.cold_nbytes
    assert engine.manager.budget.left("acme") == engine.manager.budget.nbytes // 2
    check_integrity(engine.manager)


def test_a_block_that_others_may_replace_counts_as_decoded(engine: Shared) -> None:
    engine.talk("a b", "alice")
    engine.evict()
    assert set(engine.manager.stored_marks(chain("a b"))) == {Mark.DECODED}


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
    engine.manager.sweep(engine.now + 2 * TTL_S)
    assert engine.changes() == {"alice": None}


def test_sessions_without_a_name_carry_the_engines() -> None:
    engine = Shared(label="gpu-7")
    engine.talk("a b")
    assert list(engine.chains()) == ["anonymous-gpu-7-1"]
