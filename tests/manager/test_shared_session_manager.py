"""Sessions of an engine whose tier others share. A compressed block takes 100 bytes."""

import time

import pytest
from shared_talks import TTL_S, SharedTalks
from talks import SHAPE, names

from manthan.manager.events import BlocksDropped, BlocksSaved, DropCause, LookedUp
from manthan.manager.pool import Mark
from manthan.manager.session.persist import WAIT_S
from manthan.manager.session.table import Shares
from manthan.manager.tiers.redis import iso, sample

WHOLE = sample(names("a b c d"))


@pytest.fixture
def talks() -> SharedTalks:
    return SharedTalks()


# -- blocks that another engine has stored ------------------------------------------------------------


def test_found_blocks_can_be_loaded(talks: SharedTalks) -> None:
    request = talks.ask("a b c d", "alice")
    assert talks.match(request) == 0
    talks.find(request, 3, sample(names("a b c")))
    assert talks.match(request) == 3
    assert talks.told(BlocksSaved) == [BlocksSaved(0, names("a b c"), 0, None)]
    assert talks.told(LookedUp) == [LookedUp("alice", "found")]
    talks.serve(request)
    assert talks.running[request].loaded == 3
    talks.finish(request, "a b c d e")
    assert talks.rest() == names("a b c d e")[3:], "the first ones are saved"
    assert talks.texts() == {"alice": "a b c d e"}


@pytest.mark.parametrize(("own", "count"), [("", 0), (sample(names("a b c")), 3), (WHOLE, 4)])
def test_a_session_is_served_its_own_blocks_among_those_found(talks: SharedTalks, own: str, count: int) -> None:
    request = talks.ask("a b c d", "alice")
    talks.find(request, 4, own)
    assert talks.match(request) == count


@pytest.mark.parametrize(("who", "hints"), [(None, {}), ("alice", {"quality": "exact"})])
def test_found_blocks_are_not_served_without_a_name_or_to_requests_for_exact_kv(
    talks: SharedTalks, who: str | None, hints: dict[str, str]
) -> None:
    request = talks.ask("a b c d", who, **hints)
    talks.find(request, 4, WHOLE)
    assert talks.match(request) == 0


def test_only_blocks_that_are_not_here_are_asked_for(talks: SharedTalks) -> None:
    talks.talk("a b", "alice")
    talks.rest()
    talks.overwrite()
    talks.talk("a b c", "alice")  # b is saved, and c is resident
    request = talks.ask("a b c d e", "alice")
    assert talks.redis.asked[request][:2] == ("alice", names("a b c d e")[3:])
    talks.find(request, 1, WHOLE)
    talks.serve(request)
    assert (talks.running[request].resident, talks.running[request].loaded) == (3, 1)
    assert talks.ask("a b c", "alice") not in talks.redis.asked
    request = talks.ask("a b c d e", "bob")
    assert talks.redis.asked[request][:2] == ("bob", names("a b c d e")[2:]), "alice's c is not for others"


def test_found_blocks_count_towards_nobody_s_share_and_are_in_no_front_tier() -> None:
    talks = SharedTalks(capacity=4, shares=Shares(tenants={"*": 0.5}))
    request = talks.ask("a b c d", "alice", tenant="acme")
    talks.find(request, 3)
    blocks = talks.manager.blocks
    assert blocks.saved_nbytes == blocks.moved_nbytes[0] == 3 * SHAPE.cold_nbytes
    assert talks.manager.left_to("acme") == talks.manager.budget_nbytes // 2


def test_a_block_that_others_may_replace_counts_as_decoded(talks: SharedTalks) -> None:
    talks.talk("a b", "alice")
    talks.rest()
    rows = talks.session("alice").rows
    assert talks.manager.blocks.mark[rows].tolist() == [Mark.DERIVED] * 2
    assert set(talks.manager.loaded_marks(rows)) == {Mark.DECODED}


def test_a_lookup_that_takes_too_long_is_forgotten(talks: SharedTalks) -> None:
    request = talks.ask("a b", "alice")
    assert not talks.serve(request), "it waits"
    talks.now += WAIT_S
    assert talks.serve(request)
    assert talks.told(LookedUp) == [LookedUp("alice", "unanswered")]
    talks.find(request, 2, WHOLE)
    assert talks.told(BlocksSaved) == []


# -- what Redis is told -------------------------------------------------------------------------------


def told(talks: SharedTalks) -> dict[str, object]:
    """Return the state of each session that is told with a step; None for one that is forgotten."""
    talks.step()
    return {record.session_id: record.fields and record.fields["state"] for record in talks.redis.records}


def test_every_change_of_a_session_is_told_once() -> None:
    talks = SharedTalks(holds=True)
    request = talks.start("a b", "alice")
    assert told(talks) == {"alice": "active"}
    assert told(talks) == {}
    talks.finish(request, "a b c")
    assert told(talks) == {"alice": "idle"}
    talks.now += 10
    talks.step()
    talks.gathered()
    talks.answer(failed={2: "error"})
    assert told(talks) == {"alice": "idle"}
    assert talks.redis.records[0].blocks == [(0, name, at) for at, name in enumerate(names("a b"))]
    talks.now += 100
    talks.step()
    talks.answer()
    assert told(talks) == {"alice": "cold"}
    talks.now += 2 * TTL_S
    assert told(talks) == {"alice": None}
    assert [drop.cause for drop in talks.redis.drops] == [DropCause.NOT_STORED, DropCause.EXPIRED]
    assert talks.redis.drops == talks.told(BlocksDropped)


def test_a_record_tells_all_of_a_session(talks: SharedTalks) -> None:
    talks.now = 100.0
    talks.talk("a b", "alice", tenant="acme")
    talks.now += 10
    talks.step()
    began = time.time()
    talks.step()
    [record] = talks.redis.records
    assert began - 11 < record.used < time.time() - 9
    assert record.fields == {
        **{"tenant": "acme", "state": "cold", "tokens": 32, "blocks": 2, "bytes": 200, "requests": 1},
        "hashes": sample(names("a b")),
        **dict.fromkeys(("created", "last_used"), iso(record.used)),
    }


def test_sessions_without_a_name_carry_the_engine_s() -> None:
    talks = SharedTalks(label="gpu-7")
    talks.ask("a b")
    assert list(talks.states()) == ["anonymous-gpu-7-1"]
