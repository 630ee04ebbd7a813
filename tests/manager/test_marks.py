"""Marks of blocks by example: decoded KV is not encoded, and goes with its compressed block."""

import pytest
from talks import Talks, name

from manthan.manager.pool import Mark

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
    assert (talks.driver.asker(request) is None) == (not offered)
