"""The manager by example: blocks lose refinements before any block is dropped."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from integrity import check_integrity
from talks import GROUP, Talks, names

from manthan.manager.events import BlocksDropped, BlocksTrimmed, DropCause, Loading
from manthan.manager.fronts import FrontTiers
from manthan.manager.listing import Listing
from manthan.manager.session.blocks import LEVELS, FrontTier, Level, MemoryShape
from manthan.manager.session.table import Shares

PARTS = (5, 8, 12, 20, 60)
"""Bytes of a block of 500 at each level."""
SHAPE = MemoryShape({0: replace(GROUP, bounds={0: 60, 16: 500}, levels=5)})


def shrinking(nbytes: int, parts: tuple[int, ...] = PARTS, **more: Any) -> Talks:
    """Return talks whose tiers have room for these bytes. Heads that sessions share are not exact."""
    shape, shares = replace(SHAPE, levels=more.pop("levels", LEVELS)), more.pop("shares", Shares(heads=0.0))
    talks = Talks(1, blocks=100, shape=shape, shares=shares, **more)
    talks.manager.budget_nbytes = nbytes
    talks.parts = parts
    return talks


def levels(talks: Talks) -> dict[str, list[int]]:
    """Return the levels of the blocks of each session."""
    blocks = talks.manager.blocks
    return {session_id: blocks.level[one.rows].tolist() for session_id, one in talks.manager.table.by_id.items()}


def loads(talks: Talks, prompt: str, who: str, **hints: Any) -> int:
    """Return how many blocks a request loads that asks for a text and one word more."""
    request = talks.start(f"{prompt} more", who, **hints)
    found = talks.running[request].loaded
    talks.finish(request)
    assert found is not None
    return found


def test_what_costs_least_goes_first_and_the_least_likely_sessions_tails_before_others() -> None:
    talks = shrinking(320)
    talks.go_cold("a b", "c d")
    assert talks.manager.blocks.saved_nbytes == 4 * 60
    talks.go_cold("e f")
    assert levels(talks) == {"a b": [4, 3], "c d": [4, 4], "e f": [4, 4]}
    assert [(event.block_hashes, event.level) for event in talks.told(BlocksTrimmed)] == [(names("a b")[1:], 3)]
    talks.go_cold("g h")
    assert levels(talks) == {"a b": [3, 3], "c d": [3, 3], "e f": [4, 4], "g h": [4, 4]}
    assert talks.manager.blocks.saved_nbytes == sum(talks.tier.values()) == 320
    check_integrity(talks.manager, talks.driver)


def test_no_block_is_dropped_while_an_idle_session_has_refinements() -> None:
    talks = shrinking(800)
    rng, drops = random.Random(3), 0

    def check(event: BlocksDropped) -> None:
        nonlocal drops
        drops += 1
        assert (event.cause, talks.manager.blocks.refined(1)) == (DropCause.BUDGET, 0)

    talks.manager.events.subscribe(check, BlocksDropped)
    for number in range(150):
        talks.go_cold(" ".join(f"{number}-{word}" for word in range(rng.randrange(1, 5))))
        assert talks.manager.blocks.taken_nbytes <= 800
        found = [max(of_session) for of_session in levels(talks).values()]
        assert all(one <= following for one, following in pairwise(found)), "a less likely session is finer"
        check_integrity(talks.manager, talks.driver)
    assert drops > 50
    told = {event.level for event in talks.told(BlocksTrimmed)}
    assert told == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("divergences", "left"),
    [
        ((0.032, 0.0075, 0.00096, 0.00012, 0.0), [3, 3, 3, 4, 4]),
        ((0.9, 0.8, 0.7, 0.6, 0.0), [2, 2, 2, 4, 4]),  # the last two levels cost the least together
    ],
)
def test_levels_go_by_what_they_cost_for_their_bytes(divergences: tuple[float, ...], left: list[int]) -> None:
    ratios = 20, 12, 8, 5, 1.6
    talks = shrinking(180, levels=[*map(Level, divergences, ratios)])
    talks.go_cold(*"abcde")
    assert [level for of_session in levels(talks).values() for level in of_session] == left


def test_sessions_that_are_pinned_kept_running_or_read_keep_refinements() -> None:
    talks = shrinking(330, shares=Shares(pinned=0.9, heads=0.0))
    talks.go_cold("a b", pin=True)
    talks.talk("c d", "c d", keep=[{"from": 0, "to": 16, "seconds": 1000}])
    talks.rest()
    talks.go_cold("e f", "g h")
    assert levels(talks)["a b"] == [4, 4]
    assert levels(talks)["c d"] == [4, 1]
    before, request = levels(talks)["e f"], talks.start("e f", "e f")
    assert max(before) > 0
    talks.go_cold("i")
    assert levels(talks) == {"a b": [4, 4], "c d": [4, 1], "e f": before, "g h": [3, 3], "i": [4]}
    talks.finish(request)
    check_integrity(talks.manager, talks.driver)


def test_blocks_that_are_read_or_stored_again_are_not_cut() -> None:
    talks = shrinking(320, driver={"prefetch_lead_s": 1.0})
    talks.go_cold("a b", "c d")
    talks.overwrite()
    talks.driver.steer("prefetch", talks.session("a b"), talks.now)
    talks.holds = True
    assert talks.step().loads
    rows, blocks = talks.session("c d").rows, talks.manager.blocks
    blocks.reserve(rows[:1], [60], "")
    talks.manager._trim_until(lambda: 1 << 40)
    assert levels(talks) == {"a b": [4, 4], "c d": [4, 0]}
    blocks.unreserve(rows[:1])
    talks.answer()
    talks.finish(talks.start("a b", "a b"))  # a session that was passed over gives refinements from its next use on
    talks.manager._trim_until(lambda: 1 << 40)
    assert levels(talks) == {"a b": [0, 0], "c d": [4, 0]}
    check_integrity(talks.manager, talks.driver)


def test_a_tenant_at_its_share_loses_its_own_refinements_only() -> None:
    talks = shrinking(1000, shares=Shares(tenants={"small": 0.2}, heads=0.0))
    talks.go_cold("a b", "c d")
    for text in ("e f", "g h", "i j"):
        talks.talk(text, text, tenant="small")
        talks.rest()
    assert levels(talks) | {"small/i j": [4, 4]} == {
        **{who: [4, 4] for who in ("a b", "c d", "small/i j")},
        "small/e f": [3, 3],
        "small/g h": [3, 3],
    }
    talks.manager.forget_session(talks.session("small/e f"), DropCause.RELEASED)
    check_integrity(talks.manager, talks.driver)


@pytest.mark.parametrize("level", range(5))
def test_a_request_gets_kv_that_is_as_fine_as_it_wants(level: int) -> None:
    talks = shrinking(10_000, PARTS[: level + 1])
    talks.go_cold("a b c")
    talks.overwrite()
    assert loads(talks, "a b c", "a b c", quality="exact") == (3 if level == 4 else 0)
    assert talks.told(Loading) == [Loading([])] * (level == 4)
    talks.overwrite()
    assert loads(talks, "a b c", "a b c", quality="high") == (3 if level >= 2 else 0)
    talks.overwrite()
    assert loads(talks, "a b c", "another") == (3 if level == 4 else 0)
    talks.overwrite()
    assert loads(talks, "a b c", "a b c") == 3
    assert talks.told(Loading)[-1] == Loading([level] * (3 if level < 4 else 0))
    # what was decoded is resident now
    request = talks.start("a b c more", "a b c", quality="high")
    assert talks.running[request].resident == (4 if level >= 2 else 0)
    talks.finish(request)


def test_prefetched_kv_is_as_coarse_as_what_it_was_decoded_from() -> None:
    for parts, resident in ((PARTS[:2], 0), (PARTS[:3], 3)):
        talks = shrinking(10_000, parts, driver={"prefetch_lead_s": 1.0})
        talks.go_cold("a b c")
        talks.overwrite()
        talks.driver.steer("prefetch", talks.session("a b c"), talks.now)
        talks.step()
        assert talks.resident("a b c") == 3
        request = talks.start("a b c more", "a b c", quality="high")
        assert talks.running[request].resident == resident
        talks.finish(request)


def test_the_list_shows_the_coarsest_level_and_tiers_in_front_count_what_is_left() -> None:
    talks = shrinking(220, driver={"fronts": [FrontTier(60, True)]})
    listing = Listing(talks.manager, talks.driver.fronts, ["host", "disk"])
    talks.go_cold("a b", "c d", "e f")
    shown = {name: listing.info(talks.session(name)) for name in ("a b", "e f")}
    assert (shown["a b"].level, shown["e f"].level) == (min(levels(talks)["a b"]), 4)
    assert shown["a b"].cold_bytes == sum(PARTS[level] for level in levels(talks)["a b"])
    check_integrity(talks.manager, talks.driver)
    plain = Talks()
    plain.go_cold("a")
    assert Listing(plain.manager, FrontTiers(plain.manager, ()), ["host"]).info(plain.session("a")).level is None
