"""Sessions that are listed, their order, and what is told of each."""

import random

import pytest
from talks import GROUP, Talks

from manthan.manager.listing import Held, Listing, Query, Sort
from manthan.manager.pool import Mark
from manthan.manager.session.blocks import FrontTier
from manthan.manager.session.table import SessionState


def listing_of(talks: Talks) -> Listing:
    """Return a listing whose tiers are called by their numbers."""
    fronts = talks.driver.fronts
    return Listing(talks.manager, fronts, [str(tier) for tier in range(len(fronts) + 1)])


def ids(talks: Talks, **query: object) -> list[str]:
    return [name for _, name in listing_of(talks).page(Query(**query)).keys]  # type: ignore[arg-type]


@pytest.fixture
def talks() -> Talks:
    """Cold: a, of acme, and b; idle: c, of acme and pinned, and dd; active: e."""
    made = Talks()
    made.talk("a one", "a", tenant="acme")
    made.now = 1.0
    made.talk("b one two", "b")
    made.rest()
    made.talk("c one two three", "c", tenant="acme", pin=True, expect_return_s=5)
    made.now += 1.0
    made.talk("d one two", "dd")
    made.now += 1.0
    made.talk("e one two three four", "e")
    made.start("e one two three four five", "e")
    return made


def test_a_tenant_finds_its_own_by_the_names_it_gave_them(talks: Talks) -> None:
    listing = listing_of(talks)
    page = listing.page(Query(bound="acme"))
    assert [info.id for info in page.sessions] == ["c", "a"]
    assert ids(talks, bound="acme", prefix="c") == ["acme/c"]
    assert ids(talks, bound="acme", tenant="beta") == []
    assert (listing.find("a", "acme"), listing.find("acme/a", None)) == (talks.session("acme/a"),) * 2
    assert listing.find("b", "acme") is listing.find("a", "") is listing.find("a", None) is None
    assert listing.find("acme/a", "") is None, "nobody's name for a session may look like this"
    assert listing.find("b", "") is talks.session("b")
    assert listing.states("acme") == {"active": 0, "idle": 1, "cold": 1}
    assert listing.states(None) == {"active": 1, "idle": 2, "cold": 2}
    assert list(listing.order(None)) == ["acme/a", "b", "dd", "e"], "what is pinned is never dropped"
    assert list(listing.order("acme")) == ["a"]


def test_what_is_told_of_a_session(talks: Talks) -> None:
    listing = listing_of(talks)
    cold, idle = listing.info(talks.session("b")), listing.info(talks.session("acme/c"))
    assert (cold.tokens, cold.blocks, cold.hot_blocks, cold.cold_blocks) == (48, 3, 3, 3)
    assert (cold.hot_bytes, cold.cold_bytes) == (3 * GROUP.pool_nbytes, 3 * GROUP.cold_nbytes)
    assert cold.tiers == {"0": Held(48, 3, 3 * GROUP.cold_nbytes)}
    assert (idle.hot_bytes, idle.cold_bytes, idle.tiers) == (4 * GROUP.pool_nbytes, 0, {})
    assert (idle.pinned, idle.expected_return) == (True, talks.now - 2.0 + 5.0)
    assert listing.info(talks.session("acme/c"), "acme", 100.0).id == "c"
    assert listing.info(talks.session("b"), None, 100.0).created == cold.created + 100.0
    assert (cold.exact, idle.exact) == (False, True)
    hashes = talks.manager.blocks.hashes(talks.session("acme/c").rows)
    talks.pool.marks.set(talks.pool.lookup(0, hashes)[-1:], Mark.DERIVED, ("acme", "c"))
    assert not listing.info(talks.session("acme/c")).exact, "computed behind decoded blocks"
    talks.overwrite()
    cold = listing.info(talks.session("b"))
    assert (cold.hot_blocks, cold.hot_bytes, cold.cold_blocks) == (0, 0, 3)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_session_s_blocks_are_in_the_tiers_that_have_them(keeps: bool) -> None:
    """Two blocks fit into the fast tier, so that tails leave it."""
    talks = Talks(driver={"fronts": [FrontTier(2 * GROUP.cold_nbytes, fills_on_read=keeps)]})
    for text in ("a one two", "b one"):
        talks.talk(text, text[0])
        talks.rest()
        talks.step()  # the estimate follows with the next step
    infos = {info.id: info for info in listing_of(talks).page(Query()).sessions}
    three, two = (Held(16 * blocks, blocks, blocks * GROUP.cold_nbytes) for blocks in (3, 2))
    assert infos["a"].tiers == {"1": three}
    assert infos["b"].tiers == {"0": two} | ({"1": two} if keeps else {})
    assert ids(talks, tier="0") == ["b"]
    assert set(ids(talks, tier="1")) == ({"a", "b"} if keeps else {"a"})


def test_by_bytes_in_the_pool_those_come_first_that_were_used_last() -> None:
    """An estimate: the pool has what was used last, as far as that fits, and what is not saved."""
    talks = Talks(blocks=8)
    for text in ("a one two", "b one two"):
        talks.talk(text, text[0])
        talks.rest()
    talks.talk("c one two", "c")
    page = listing_of(talks).page(Query(sort=Sort.HOT_BYTES))
    assert page.keys == [(3, "c"), (3, "b"), (0, "a")]
    assert [info.hot_blocks for info in page.sessions] == [3, 3, 2]
    talks.talk("d one two", "d")
    talks.talk("e one two", "e")
    assert dict(map(reversed, listing_of(talks).page(Query(sort=Sort.HOT_BYTES)).keys)) == {
        **{"c": 3, "d": 3, "e": 3},  # nothing of these is saved
        **{"a": 0, "b": 0},
    }


def keys_of(talks: Talks, sort: Sort) -> dict[str, float | str]:
    """Return the sort key of each session, asked of it alone."""
    listing, states = listing_of(talks), list(SessionState)
    if sort is Sort.HOT_BYTES:
        return {name: key for key, name in listing.page(Query(sort=sort, limit=1000)).keys}
    infos = {session.session_id: listing.info(session) for session in talks.manager.table.by_id.values()}
    return {
        name: {
            Sort.LAST_USED: info.last_used,
            Sort.TOKENS: info.blocks,
            Sort.COLD_BYTES: info.cold_blocks * GROUP.cold_nbytes,
            Sort.ID: name,
            Sort.STATE: states.index(SessionState(info.state)),
            Sort.EXPECTED: float("inf") if info.expected_return is None else info.expected_return,
        }[sort]
        for name, info in infos.items()
    }


@pytest.fixture(scope="module")
def busy() -> Talks:
    """Many sessions of all kinds, of which some have come and gone."""
    rng, made = random.Random(0), Talks(capacity=600, blocks=400)
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
            made.rest()
    return made


@pytest.mark.parametrize("sort", Sort)
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    "query", [{}, {"bound": "t1"}, {"states": {SessionState.COLD}}, {"prefix": "t"}, {"pinned": False}]
)
def test_every_page_is_that_of_all_sessions_sorted(
    busy: Talks, sort: Sort, descending: bool, query: dict[str, object]
) -> None:
    keys = keys_of(busy, sort)
    chosen = [
        (keys[name], name)
        for name, session in busy.manager.table.by_id.items()
        if session.tenant == query.get("bound", session.tenant)
        and session.state in query.get("states", SessionState)  # type: ignore[operator]
        and name.startswith(str(query.get("prefix", "")))
        and (session.is_pinned is False or "pinned" not in query)
    ]
    chosen.sort(reverse=descending)
    assert len(busy.manager.table.by_id) > 60
    for limit in (1, 7, 100):
        for offset in (0, 3, 40, len(chosen) - 1, len(chosen)):
            asked = Query(sort=sort, descending=descending, limit=limit, offset=offset, **query)  # type: ignore[arg-type]
            page = listing_of(busy).page(asked)
            assert page.total == len(chosen)
            assert page.keys == chosen[offset : offset + limit]
