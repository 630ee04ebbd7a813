"""What clients make up, names, salts and times, leaves nothing behind."""

import gc
import tracemalloc

import pytest

from manthan.manager.sessions.hints import HintError, Hints, check_session_id, parse_hints
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import MemoryShape
from manthan.policies import get_policy

MANY = 100_000


def manager() -> SessionMemoryManager:
    return SessionMemoryManager(get_policy("lru"), MemoryShape(16, 1000, {0: 200}), 10**9, 300.0)


def ask(made: SessionMemoryManager, n: int, name: str | None, tenant: str, hints: Hints) -> None:
    keys = [n.to_bytes(32, "big")]
    made.request_started("r", keys, name, float(n), hints=hints, tenant=tenant)
    made.request_finished("r", keys, n + 0.5)
    made.take_news()
    made.take_drops()
    made.take_releases()


@pytest.mark.parametrize("what", ["released sessions", "salts"])
def test_nothing_is_left_of_sessions_that_are_gone(what: str) -> None:
    made = manager()
    hints = Hints(release=True, ttl_s=1e6, priority=3)
    ask(made, 0, "a", "", hints)
    gc.collect()
    tracemalloc.start()
    for n in range(1, MANY):
        name, tenant = (f"session-{n}", "") if what == "released sessions" else (None, f"salt-{n}")
        ask(made, n, name, tenant, hints)
    gc.collect()
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not made.table.by_id
    assert made.next_deadline is None
    assert left < 2**20


@pytest.mark.parametrize("session_id", ["x" * 257, "a\nb", "\x1b[2J"])
def test_an_id_that_cannot_be_shown_is_refused(session_id: str) -> None:
    with pytest.raises(HintError, match="session_id must have at most 256 printable characters"):
        check_session_id(session_id)


@pytest.mark.parametrize("hint", ["ttl_s", "expect_return_s"])
def test_seconds_have_a_bound(hint: str) -> None:
    assert getattr(parse_hints({hint: 2_592_000}), hint) == 2_592_000
    with pytest.raises(HintError, match=f"{hint} must be .* at most 2592000 .30 days., not"):
        parse_hints({hint: 2_592_001})
