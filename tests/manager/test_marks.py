"""Marks of blocks by example: decoded KV is not encoded, and goes with its compressed block."""

from collections.abc import Callable

import pytest
from integrity import check_integrity
from talks import GROUP, Talks, name, names

from manthan.manager.events import BlocksDropped
from manthan.manager.pool import Mark
from manthan.manager.session.blocks import GroupShape, MemoryShape
from manthan.manager.session.manager import Shares

TEXT = "a b c"
E, DERIVED, D = Mark


def back() -> Talks:
    """Return an engine whose only session is back, all of it decoded."""
    talks = Talks(capacity=4)
    talks.talk(TEXT, "alice")
    talks.rest()
    talks.overwrite()
    request = talks.start(TEXT, "alice")
    assert marks(talks, request) == [D] * 3
    talks.finish(request, TEXT)
    return talks


def marks(talks: Talks, request: str) -> list[Mark]:
    """Return the marks of a request's blocks."""
    return [talks.pool.marks[block] for block in talks.running[request].block_ids]


# -- decoded KV ---------------------------------------------------------------------------------------


def budget(talks: Talks) -> None:
    talks.talk("v w x y", "bob")
    talks.step()


def ttl(talks: Talks) -> None:
    talks.talk(TEXT, "alice", ttl_s=1.0)


def release(talks: Talks) -> None:
    talks.talk(TEXT, "alice", release=True)


def damage(talks: Talks) -> None:
    rows = talks.session("alice").rows
    talks.manager.load_started("another", rows)
    talks.manager.load_finished("another", [(0, block_hash) for block_hash in names(TEXT)])


@pytest.mark.parametrize("drop", [budget, ttl, release, damage])
def test_a_decoded_block_goes_with_its_compressed_block(drop: Callable[[Talks], None]) -> None:
    talks = back()
    drop(talks)
    encoded = talks.rest() + talks.rest()
    assert not set(encoded) & set(names(TEXT))
    assert talks.resident("a") == 0
    assert "alice" not in talks.states()


def test_a_decoded_block_s_compressed_block_is_not_dropped_before_others() -> None:
    talks = Talks(capacity=4)
    for text, who in (("x", "old"), (TEXT, "alice")):
        talks.talk(text, who)
        talks.rest()
    talks.overwrite()
    request = talks.start(TEXT, "alice")
    talks.talk("y z", "bob")  # one block is free
    talks.rest()
    assert [drop.block_hashes for drop in talks.told(BlocksDropped)] == [names("x")]
    talks.finish(request, TEXT)


FAMILY = {"alice": "a b c d", "bob": "a b c", "carol": "a"}
"""Sessions with a common beginning."""


def cold_family() -> Talks:
    talks = Talks(shares=Shares(heads=0))
    for who, text in FAMILY.items():
        talks.talk(text, who)
    talks.rest()
    talks.overwrite()
    return talks


def test_a_block_that_a_request_computes_again_is_lost_to_nobody() -> None:
    talks = cold_family()
    del talks.tier[0, name("a b c")]
    request = talks.start("a b c", "bob")
    assert marks(talks, request) == [D, D, DERIVED]
    talks.finish(request, "a b c")
    assert talks.texts() == FAMILY
    assert talks.rest() == [name("a b c")]


@pytest.mark.parametrize("asks", [False, True])
def test_nobody_keeps_what_is_behind_a_decoded_block_whose_compressed_block_is_lost(asks: bool) -> None:
    """asks: a request is about to compute the block again, but is aborted."""
    talks = cold_family()
    talks.finish(talks.start("a b", "bob"), "a b")  # decoded
    request = talks.ask("a", "carol") if asks else ""
    talks.manager.load_started("another", talks.session("carol").rows)
    talks.manager.load_finished("another", [(0, name("a"))])
    assert talks.texts() == (FAMILY if asks else {})
    if asks:
        talks.finish(request, "")
    assert talks.rest() == []
    assert talks.texts() == {}
    assert talks.resident("a") == 0
    check_integrity(talks.manager)


def test_blocks_computed_behind_decoded_ones_are_encoded_once() -> None:
    talks = back()
    talks.talk(f"{TEXT} d", "alice")
    assert talks.rest() + talks.rest() == [name(f"{TEXT} d")]


# -- who is offered which -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configured", "asked", "offered"),
    [("exact", None, 0), ("any", "exact", 0), ("exact", "exact", 0), ("exact", "any", 3)],
)
def test_a_request_for_exact_kv_is_offered_no_other(configured: str, asked: str | None, offered: int) -> None:
    talks = Talks(quality=configured)
    talks.talk(TEXT, "alice")
    talks.rest()
    talks.overwrite()
    request = talks.start(TEXT, "alice", **({"quality": asked} if asked else {}))
    assert talks.running[request].loaded == offered
    assert (talks.manager.asker(request) is None) == (not offered)


# -- marks of loaded blocks and of those computed behind them -----------------------------------------


def served(missing: str = "", **more: object) -> list[Mark]:
    """Return marks of a session that returns, and of a block behind it. Its first blocks are kept exact.

    missing: text whose last block cannot be loaded.
    """
    talks = Talks(**{"sink_tokens": 32} | more)
    groups = {group: 1 for group in talks.manager.shape.groups if group}
    request = talks.start("a b c d", "A")
    talks.finish(request, "a b c d", [talks.point("a b c d", groups)] if groups else [])
    talks.rest()
    talks.overwrite()
    talks.tier.pop((0, name(missing)), None)
    request = talks.start("a b c d e", "A")
    assert talks.running[request].loaded == 4
    return marks(talks, request)[:5]


def test_exact_blocks_stay_exact_beside_decoded_ones() -> None:
    assert served() == [E, E, D, D, DERIVED]


def test_blocks_computed_after_a_load_failed_are_marked_as_computed() -> None:
    assert served(missing="a b") == [E] * 5
    assert served(missing="a b c d") == [E, E, D, DERIVED, DERIVED]


@pytest.mark.parametrize("is_lossless", [False, True])
def test_blocks_computed_behind_a_decoded_state_are_derived(is_lossless: bool) -> None:
    shape = MemoryShape({0: GROUP, 1: GroupShape(16, 500, {0: 50}, is_lossless=is_lossless)})
    assert served(sink_tokens=64, shape=shape) == [E, E, E, E, E if is_lossless else DERIVED]
