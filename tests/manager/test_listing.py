"""Which sessions are listed, in which order, and how little is looked at for that."""

import random

import pytest
from engine import SHAPE, Engine
from told import listing_of

from manthan.manager.sessions.fast_tier import Fast
from manthan.manager.sessions.listing import Query, Sort
from manthan.manager.sessions.session import Held, SessionState


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
    return [name for _, name in listing_of(engine.manager).page(Query(**query)).keys]  # type: ignore[arg-type]


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
        ({"tier": "0"}, {"acme/a", "b"}),
    ],
)
def test_filters(engine: Engine, query: dict[str, object], found: set[str]) -> None:
    page = listing_of(engine.manager).page(Query(**query))  # type: ignore[arg-type]
    assert {info.id for info in page.sessions} == found
    assert page.total == len(found)


def test_a_tenant_finds_its_own_by_the_names_it_gave_them(engine: Engine) -> None:
    listing = listing_of(engine.manager)
    page = listing.page(Query(bound="acme"))
    assert [info.id for info in page.sessions] == ["c", "a"]
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


def test_what_is_told_of_a_session(engine: Engine) -> None:
    listing = listing_of(engine.manager)
    cold, idle = listing.info(engine.session("b")), listing.info(engine.session("acme/c"))
    assert (cold.tokens, cold.blocks, cold.hot_blocks, cold.cold_blocks) == (48, 3, 0, 3)
    assert (cold.hot_bytes, cold.cold_bytes) == (0, 3 * SHAPE.cold_nbytes)
    assert cold.tiers == {"0": Held(48, 3, 3 * SHAPE.cold_nbytes)}
    assert (idle.hot_bytes, idle.cold_bytes, idle.tiers) == (4 * SHAPE.hot_nbytes, 0, {})
    assert (idle.pinned, idle.expected_return) == (True, engine.now - 2.0 + 5.0)
    assert listing.info(engine.session("acme/c"), "acme", 100.0).id == "c"
    assert listing.info(engine.session("b"), None, 100.0).created == cold.created + 100.0


def test_a_session_s_codes_are_in_the_tiers_that_they_are_in() -> None:
    """Two blocks fit into the fast tier, so that tails leave it."""
    for keeps in (True, False):
        engine = Engine(fast=[Fast(2 * SHAPE.cold_nbytes, fills_on_read=keeps)])
        engine.talk("a one two", "a")
        engine.evict()
        engine.manager.settle_tiers()
        engine.talk("b one", "b")
        engine.evict()
        engine.manager.settle_tiers()
        infos = {info.id: info for info in listing_of(engine.manager).page(Query()).sessions}
        three, two = (Held(16 * blocks, blocks, blocks * SHAPE.cold_nbytes) for blocks in (3, 2))
        assert infos["a"].tiers == {"1": three}
        assert infos["b"].tiers == {"0": two} | ({"1": two} if keeps else {})
        assert ids(engine, tier="0") == ["b"]
        assert set(ids(engine, tier="1")) == ({"a", "b"} if keeps else {"a"})


def keys_of(engine: Engine, sort: Sort) -> dict[str, float | str]:
    """What each session is sorted by, asked of it alone."""
    sessions = engine.manager.table.by_id.values()
    infos = {session.session_id: listing_of(engine.manager).info(session) for session in sessions}
    states = list(SessionState)
    return {
        name: {
            Sort.LAST_USED: info.last_used,
            Sort.TOKENS: info.blocks,
            Sort.COLD_BYTES: info.cold_blocks * SHAPE.cold_nbytes,
            Sort.HOT_BYTES: info.hot_blocks if info.state != SessionState.COLD else 0,
            Sort.ID: name,
            Sort.STATE: states.index(SessionState(info.state)),
            Sort.EXPECTED: float("inf") if info.expected_return is None else info.expected_return,
        }[sort]
        for name, info in infos.items()
    }


@pytest.fixture(scope="module")
def busy() -> Engine:
    """Many sessions of all kinds, of which some have come and gone."""
    rng, made = random.Random(0), Engine(capacity=600)
    for number in range(150):
        made.now += rng.choice((0.0, 1.0))
        name, tenant = f"s{rng.randrange(90)}", f"t{rng.randrange(3)}" if number % 3 else ""
        said = rng.choice(({}, {}, {"expect_return_s": 5.0}, {"pin": True}, {"release": True}))
        words = " ".join(f"{name}-{word}" for word in range(rng.randrange(1, 6)))
        if number % 5:
            made.talk(words, name, tenant=tenant, **said)
        else:
            made.start(words, name, tenant=tenant)
        if number % 25 == 0:
            made.evict()
    return made


@pytest.mark.parametrize("sort", Sort)
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    "query", [{}, {"bound": "t1"}, {"states": {SessionState.COLD}}, {"prefix": "t"}, {"pinned": False}]
)
def test_every_page_is_that_of_all_sessions_sorted(
    busy: Engine, sort: Sort, descending: bool, query: dict[str, object]
) -> None:
    keys = keys_of(busy, sort)
    chosen = [
        (keys[name], name)
        for name, session in busy.manager.table.by_id.items()
        if session.tenant == query.get("bound", session.tenant)
        and session.state in query.get("states", SessionState)  # type: ignore[operator]
        and name.startswith(str(query.get("prefix", "")))
        and (session.pinned is False or "pinned" not in query)
    ]
    chosen.sort(reverse=descending)
    assert len(busy.manager.table.by_id) > 60
    for limit in (1, 7, 100):
        for offset in (0, 3, 40, len(chosen) - 1, len(chosen)):
            asked = Query(sort=sort, descending=descending, limit=limit, offset=offset, **query)  # type: ignore[arg-type]
            page = listing_of(busy.manager).page(asked)
            ids = [name for _, name in chosen[offset : offset + limit]]
            assert page.total == len(chosen)
            assert [name for _, name in page.keys] == ids
            if sort not in (Sort.COLD_BYTES, Sort.HOT_BYTES, Sort.TOKENS):
                assert page.keys == chosen[offset : offset + limit]
