"""What clients make up, names, salts and times, leaves nothing behind."""

import gc
import tracemalloc

import pytest

from manthan.manager.sessions.hints import HintError, Hints, check_session_id, parse_hints
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import MemoryShape
from manthan.policies import get_policy

MANY = 15_000


@pytest.mark.parametrize(("name", "tenant"), [("session-%d", ""), (None, "salt-%d")])
def test_nothing_is_left_of_sessions_that_are_gone(name: str | None, tenant: str) -> None:
    made = SessionMemoryManager(get_policy("lru"), MemoryShape(16, 1000, {0: 200}), 10**9, 300.0)
    hints = Hints(release=True, ttl_s=1e6, priority=3)

    def ask(n: int) -> None:
        keys = [n.to_bytes(32, "big")]
        made.request_started("r", keys, name and name % n, float(n), hints=hints, tenant=tenant and tenant % n)
        made.request_finished("r", keys, n + 0.5)
        made.take_news()
        made.take_drops()
        made.take_releases()

    ask(0)
    gc.collect()
    tracemalloc.start()
    for n in range(1, MANY):
        ask(n)
    gc.collect()
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not made.table.by_id
    assert made.next_deadline is None
    assert left < 2**17


@pytest.mark.parametrize("session_id", ["x" * 257, "a\nb", "\x1b[2J"])
def test_an_id_that_cannot_be_shown_is_refused(session_id: str) -> None:
    with pytest.raises(HintError, match="session_id must have at most 256 printable characters"):
        check_session_id(session_id)


@pytest.mark.parametrize("hint", ["ttl_s", "expect_return_s"])
def test_seconds_have_a_bound(hint: str) -> None:
    assert getattr(parse_hints({hint: 2_592_000}), hint) == 2_592_000
    with pytest.raises(HintError, match=f"{hint} must be .* at most 2592000 .30 days., not"):
        parse_hints({hint: 2_592_001})
