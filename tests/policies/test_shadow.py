"""A shadow finds what a place under its policy would find, and holds no more than there is room for."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from manthan.policies import SessionView
from manthan.policies.lru import LRU
from manthan.policies.returns import Returns
from manthan.policies.shadow import ShadowCache

ROOM = 1000
REQUESTS = st.lists(st.tuples(st.integers(0, 9).map(str), st.integers(1, 400), st.booleans()), max_size=80)
"""Whose request, by how many bytes the session grows, and whether it is over before."""


class PlainLRU:
    """Bytes of sessions, the one unused for longest first, whose tail goes first."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, int] = OrderedDict()

    def request(self, name: str, nbytes: int, known: int) -> int:
        found = min(self.kept.pop(name, 0), known)
        self.kept[name] = nbytes
        while (over := sum(self.kept.values()) - ROOM) > 0:
            first, size = next(iter(self.kept.items()))
            if size > over:
                self.kept[first] = size - over
            else:
                del self.kept[first]
        return found


def requests_of(events: list[tuple[str, int, bool]]) -> list[tuple[SessionView, int, bool]]:
    """A view of each request, how much of it was known before, and whether the session's earlier ones are over."""
    sizes: dict[str, int] = {}
    views = []
    for number, (name, more, is_over) in enumerate(events):
        known = 0 if is_over else sizes.get(name, 0)
        sizes[name] = known + more
        view = SessionView(name, sizes[name], sizes[name], last_used=number, uses=number + 1)
        views.append((view, known, is_over))
    return views


@given(REQUESTS)
def test_a_shadow_of_lru_is_as_a_plain_lru_cache(events: list[tuple[str, int, bool]]) -> None:
    shadow, plain = ShadowCache(LRU()), PlainLRU()
    for view, known, is_over in requests_of(events):
        if is_over:
            shadow.forget(view.session_id)
            plain.kept.pop(view.session_id, None)
        assert shadow.request(view, known, ROOM) == plain.request(view.session_id, view.nbytes, known)
        assert shadow.kept == plain.kept


@given(REQUESTS)
def test_books_agree_under_a_policy_that_lets_newcomers_pass_by(events: list[tuple[str, int, bool]]) -> None:
    shadow = ShadowCache(Returns())
    for view, known, _ in requests_of(events):
        shadow.request(view, known, ROOM)
        assert shadow.nbytes == sum(shadow.kept.values()) <= ROOM
        assert sorted(shadow.policy.victims()) == sorted(shadow.kept)


def test_whoever_goes_on_from_another_finds_what_that_one_had() -> None:
    shadow = ShadowCache(LRU())
    shadow.request(SessionView("origin", 600, 600), 0, ROOM)
    shadow.inherit("fork", "origin")
    shadow.inherit("other", "nobody")
    assert shadow.request(SessionView("fork", 500, 500, last_used=1.0), 400, ROOM) == 400
    assert shadow.kept == {"fork": 500}
    assert list(shadow.policy.victims()) == ["fork"]
