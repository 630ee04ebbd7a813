"""Which sessions are listed, in which order, and how little is looked at for that."""

import pytest
from engine import SHAPE, Engine

from manthan.manager.sessions.fast_tier import Fast
from manthan.manager.sessions.listing import Query, Sort, Tier
from manthan.manager.sessions.session import SessionState


@pytest.fixture
def engine() -> Engine:
    """Cold: a, of acme, and b; idle: c, of acme and pinned, and dd; hot: e."""
    made = Engine()
    made.talk("a one", "a", tenant="acme")
    made.now = 1.0
    made.talk("b one two", "b")
    made.evict()
    made.talk("c one two three", "c", tenant="acme", pin=True, expect_return_s=5)
    made.now += 1.0
    made.talk("d one two", "dd")
    made.now += 1.0
    made.talk("e one two three four", "e")
    made.start("e one two three four five", "e")
    return made


def ids(engine: Engine, **query: object) -> list[str]:
    return [info.session_id for info in engine.manager.listing.page(Query(**query)).sessions]  # type: ignore[arg-type]


def test_who_was_used_last_is_first(engine: Engine) -> None:
    assert ids(engine) == ["e", "dd", "acme/c", "b", "acme/a"]
    assert ids(engine, descending=False) == ["acme/a", "b", "acme/c", "dd", "e"]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"states": {SessionState.COLD}}, {"acme/a", "b"}),
        ({"states": {SessionState.IDLE, SessionState.HOT}}, {"acme/c", "dd", "e"}),
        ({"states": {SessionState.EVICTING}}, set()),
        ({"tenant": "acme"}, {"acme/a", "acme/c"}),
        ({"tenant": ""}, {"b", "dd", "e"}),
        ({"pinned": True}, {"acme/c"}),
        ({"pinned": False, "tenant": "acme"}, {"acme/a"}),
        ({"prefix": "acme/"}, {"acme/a", "acme/c"}),
        ({"prefix": "d"}, {"dd"}),
        ({"tier": Tier.SLOW}, {"acme/a", "b"}),
        ({"tier": Tier.FAST}, {"acme/a", "b"}),
    ],
)
def test_filters(engine: Engine, query: dict[str, object], found: set[str]) -> None:
    page = engine.manager.listing.page(Query(**query))  # type: ignore[arg-type]
    assert {info.session_id for info in page.sessions} == found
    assert page.total == len(found)


def test_a_tenant_finds_its_own_by_the_names_it_gave_them(engine: Engine) -> None:
    listing = engine.manager.listing
    page = listing.page(Query(bound="acme"))
    assert [info.told_id for info in page.sessions] == ["c", "a"]
    assert ids(engine, bound="acme", prefix="c") == ["acme/c"]
    assert ids(engine, bound="acme", tenant="beta") == []
    assert (listing.find("a", "acme"), listing.find("acme/a", None)) == (engine.session("acme/a"),) * 2
    assert listing.find("b", "acme") is listing.find("a", "") is listing.find("a", None) is None
    assert listing.find("acme/a", "") is None, "nobody's name for a session may look like this"
    assert listing.find("b", "") is engine.session("b")
    assert listing.states("acme") == {"hot": 0, "idle": 1, "evicting": 0, "cold": 1}
    assert listing.states(None) == {"hot": 1, "idle": 2, "evicting": 0, "cold": 2}
    assert list(listing.order(None)) == ["acme/c", "dd"]
    assert list(listing.order("acme")) == ["c"]


@pytest.mark.parametrize(
    ("sort", "rising"),
    [
        (Sort.TOKENS, ["acme/a", "b", "dd", "acme/c", "e"]),
        (Sort.ID, ["acme/a", "acme/c", "b", "dd", "e"]),
        (Sort.STATE, ["e", "acme/c", "dd", "acme/a", "b"]),
        (Sort.COLD_BYTES, ["acme/c", "dd", "e", "acme/a", "b"]),
        (Sort.HOT_BYTES, ["acme/a", "b", "dd", "acme/c", "e"]),
        (Sort.EXPECTED, ["acme/c", "acme/a", "b", "dd", "e"]),
    ],
)
def test_sorted(engine: Engine, sort: Sort, rising: list[str]) -> None:
    assert ids(engine, sort=sort, descending=False) == rising
    assert ids(engine, sort=sort) == rising[::-1]


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 9])
def test_pages_are_parts_of_the_whole(engine: Engine, limit: int) -> None:
    whole = ids(engine, sort=Sort.STATE)
    pages = [engine.manager.listing.page(Query(sort=Sort.STATE, limit=limit, offset=at)) for at in range(0, 9, limit)]
    assert [info.session_id for page in pages for info in page.sessions] == whole
    assert {page.total for page in pages} == {5}
    assert sorted((key for page in pages for key in page.keys), reverse=True) == [
        key for page in pages for key in page.keys
    ]


def test_what_is_told_of_a_session(engine: Engine) -> None:
    listing = engine.manager.listing
    cold, idle = listing.info(engine.session("b")), listing.info(engine.session("acme/c"))
    assert (cold.tokens, cold.blocks, cold.hot_blocks, cold.cold_blocks) == (48, 3, 0, 3)
    assert (cold.hot_nbytes, cold.cold_nbytes, cold.moved_nbytes) == (0, 3 * SHAPE.cold_nbytes, 0)
    assert (idle.hot_nbytes, idle.cold_nbytes, idle.told_id) == (4 * SHAPE.hot_nbytes, 0, "c")
    assert (idle.pinned, idle.expected) == (True, engine.now - 2.0 + 5.0)


def test_a_session_s_codes_are_in_the_tiers_that_they_are_in() -> None:
    """Two blocks fit into the fast tier, so that tails leave it."""
    for keeps in (True, False):
        engine = Engine(fast=Fast(2 * SHAPE.cold_nbytes, fills_on_read=keeps))
        engine.talk("a one two", "a")
        engine.evict()
        engine.manager.take_moves()
        engine.talk("b one", "b")
        engine.evict()
        engine.manager.take_moves()
        infos = {info.session_id: info for info in engine.manager.listing.page(Query()).sessions}
        assert {name: info.moved_nbytes for name, info in infos.items()} == {"a": 3 * SHAPE.cold_nbytes, "b": 0}
        assert ids(engine, tier=Tier.FAST) == ["b"]
        assert set(ids(engine, tier=Tier.SLOW)) == ({"a", "b"} if keeps else {"a"})
