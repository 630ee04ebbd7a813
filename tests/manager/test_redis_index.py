"""The books of a namespace, on a real server: two engines, two ranks, and whatever can come between them."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis_data import session_info
from redis_server import RedisServer, running

from manthan.manager.stores.directory import Anchored, Room
from manthan.manager.stores.redis.client import Circuit, StoreOomError
from manthan.manager.stores.redis.index import Grant, RedisIndex, Reserved
from manthan.manager.stores.redis.reader import Reader
from manthan.manager.stores.redis.schema import BlockId, Namespace, SessionRecord, StoredBlock, StoredChain, member

NAMESPACE = Namespace.of("manthan:", "models/Tiny Llama", {"codec": "k3v3"})
FACTS = {"codec": "k3v3", "block_tokens": 32}
RANKS, GROUP, TTL_S = 2, 1, 1000
BOUND, NBYTES = 200, 150
"""What is reserved for a block, and what it takes, of both ranks."""
BUDGET = 8 * BOUND
GRANTED, STORED, FULL = Reserved(Grant.GRANTED), Reserved(Grant.STORED, NBYTES), Reserved(Grant.FULL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


@pytest.fixture
def raw(server: RedisServer) -> redis.Redis:
    server.client.flushall()
    return server.client


def engine(server: RedisServer, owner: str = "one", ttl_s: float = TTL_S, **options: int) -> RedisIndex:
    client = redis.Redis(port=server.port, protocol=2)
    return RedisIndex(client, Circuit(), NAMESPACE, owner, RANKS, BUDGET, ttl_s, **options)


@pytest.fixture
def one(server: RedisServer, raw: redis.Redis) -> RedisIndex:
    return engine(server)


@pytest.fixture
def two(server: RedisServer, raw: redis.Redis) -> RedisIndex:
    return engine(server, "two")


def keys(text: str) -> list[bytes]:
    """A chain's block keys: one a letter, each over all letters up to its own."""
    return [text[: n + 1].encode() for n in range(len(text))]


def ids(text: str) -> list[BlockId]:
    return [(GROUP, key) for key in keys(text)]


def rooms(text: str, nbytes: int = BOUND) -> list[Room]:
    return [Room(key, GROUP, nbytes) for key in keys(text)]


def record(session_id: str, text: str, stored: str | None = None, **info: Any) -> SessionRecord:
    """A session of which all blocks are stored, or those that `stored` has a letter of. info: see session_info."""
    good = text if stored is None else stored
    named = tuple(keys(text))
    chain = StoredChain(GROUP, named, bytes(letter in good for letter in text), (NBYTES,) * len(named))
    return SessionRecord(session_id, session_info(session_id, requests=3, **info), chain)


def store(index: RedisIndex, raw: redis.Redis, blocks: list[Room]) -> list[Reserved]:
    """Reserve blocks and write what was granted, as the ranks do."""
    answers, _ = index.reserve(blocks)
    for room, answer in zip(blocks, answers, strict=True):
        if answer.grant is Grant.GRANTED:
            for rank in range(RANKS):
                raw.set(NAMESPACE.block((room.group, room.key), rank), "x" * 75, px=round(1250 * TTL_S))
    return answers


def used(raw: redis.Redis) -> int:
    """The bytes in use, which must be those of all blocks and reservations."""
    with redis.Redis(port=raw.connection_pool.connection_kwargs["port"], protocol=2) as client:
        assert Reader(client, "manthan:").disagreement(NAMESPACE.name) is None
    return int(raw.hget(NAMESPACE.key("info"), "used_bytes"))


def found(index: RedisIndex, text: str) -> int:
    """How many blocks are found, with the bytes they have."""
    sizes = index.look_up(GROUP, keys(text))
    assert sizes == [NBYTES] * len(sizes)
    return len(sizes)


def kept(raw: redis.Redis) -> set[str]:
    """The last letters of the blocks that lie in Redis, on both ranks."""
    names = [name.split(":") for name in raw.scan_iter("*:block:*")]
    assert all(name[4] == f"{GROUP}}}" for name in names)
    blocks = [bytes.fromhex(name[3].strip("{")).decode() for name in names]
    assert all(blocks.count(block) == RANKS for block in blocks)
    return {block[-1] for block in blocks}


# -- reservations -------------------------------------------------------------------------------------


def test_blocks_are_granted_while_there_is_room(one: RedisIndex, raw: redis.Redis) -> None:
    answers, used = one.reserve(rooms("abcdefghij"))
    assert answers == [GRANTED] * 8 + [FULL] * 2
    assert used == BUDGET
    one.release(ids("ab")[1:])
    assert one.reserve([Room(b"large", GROUP, BOUND + 1), Room(b"small", GROUP, BOUND)]) == ([FULL, GRANTED], BUDGET)


def test_a_reservation_is_counted_once(one: RedisIndex, two: RedisIndex) -> None:
    one.reserve(rooms("abc"))
    assert two.reserve(rooms("abc")) == ([GRANTED] * 3, 3 * BOUND)
    assert two.reserve(rooms("abc", BOUND - 1)) == ([GRANTED] * 3, 3 * BOUND)
    assert two.reserve(rooms("abc", BOUND + 1)) == ([GRANTED] * 3, 3 * BOUND + 3)


def test_what_another_engine_has_stored_needs_no_encoding(one: RedisIndex, two: RedisIndex, raw: redis.Redis) -> None:
    store(one, raw, rooms("abc"))
    one.save(record("alice", "abc"), FACTS)
    assert two.reserve(rooms("abcd")) == ([STORED] * 3 + [GRANTED], 3 * NBYTES + BOUND)


def test_what_the_server_has_evicted_by_itself_is_stored_again(
    one: RedisIndex, two: RedisIndex, raw: redis.Redis
) -> None:
    store(one, raw, rooms("abc"))
    one.save(record("alice", "abc"), FACTS)
    raw.delete(NAMESPACE.block((GROUP, b"ab"), 1))
    assert two.reserve(rooms("abc")) == ([STORED, GRANTED, STORED], 2 * NBYTES + BOUND)


def test_full_memory_is_told_from_a_dead_server(server: RedisServer, one: RedisIndex, raw: redis.Redis) -> None:
    raw.config_set("maxmemory", "1")
    try:
        with pytest.raises(StoreOomError):
            one.reserve(rooms("abc"))
        assert raw.keys() == []
        one.release(ids("abc"), force=True)  # deleting works all the same
    finally:
        raw.config_set("maxmemory", "0")


# -- sessions -----------------------------------------------------------------------------------------


def test_a_session_is_readable(one: RedisIndex, raw: redis.Redis) -> None:
    store(one, raw, rooms("abc"))
    assert one.save(record("alice", "abc"), FACTS).verdict == "saved"
    name = f"manthan:{{{NAMESPACE.name}}}:session:alice"
    assert NAMESPACE.name.startswith("tiny-llama-")
    assert raw.hgetall(name) == {
        "id": "alice",
        "state": "cold",
        "tokens": "96",
        "blocks": "3",
        "bytes": "450",
        "codec": "k3v3",
        "requests": "3",
        "created": "2001-09-09T01:46:40Z",
        "last_used": "2004-11-09T11:33:20Z",
        "owner": "one",
    }
    assert raw.lrange(NAMESPACE.chain("alice"), 0, -1) == [member(block) for block in ids("abc")]
    assert TTL_S - 10 < raw.ttl(name) <= TTL_S


def test_ids_that_clients_chose_cannot_break_a_key(one: RedisIndex, raw: redis.Redis) -> None:
    store(one, raw, rooms("a"))
    one.save(record("{x} *\n:é", "a"), FACTS)
    [name] = raw.scan_iter("*:session:*")
    assert name == f"manthan:{{{NAMESPACE.name}}}:session:%7Bx%7D%20%2A%0A%3A%C3%A9"
    assert raw.hget(name, "id") == "{x} *\n:é"
    assert one.forget("{x} *\n:é")
    assert not list(raw.scan_iter("*:session:*"))


def test_only_what_a_saved_session_holds_is_found(one: RedisIndex, two: RedisIndex, raw: redis.Redis) -> None:
    store(one, raw, rooms("abc"))
    assert found(two, "abcd") == 0
    one.save(record("alice", "abc", stored="ab"), FACTS)
    assert found(two, "abcd") == 2
    one.save(record("alice", "abc"), FACTS)
    assert found(two, "abcd") == 3
    assert found(two, "xabc") == 0


def test_a_long_chain_is_found_in_a_few_questions(one: RedisIndex, raw: redis.Redis) -> None:
    one.budget = 5000 * BOUND
    chain = [f"{n:064}".encode() for n in range(3000)]
    store(one, raw, [Room(key, GROUP, BOUND) for key in chain])
    blocks = StoredChain(GROUP, tuple(chain), b"\1" * len(chain), tuple(1 + at % BOUND for at in range(len(chain))))
    one.save(SessionRecord("long", session_info("long"), blocks), FACTS)
    before = raw.info("commandstats")["cmdstat_eval"]["calls"]
    assert one.look_up(GROUP, [*chain, b"more"]) == list(blocks.nbytes)
    assert raw.info("commandstats")["cmdstat_eval"]["calls"] - before <= 10
    assert raw.llen(NAMESPACE.chain("long")) == 3000


def test_blocks_go_with_the_last_session_that_holds_them(one: RedisIndex, two: RedisIndex, raw: redis.Redis) -> None:
    store(one, raw, rooms("sa"))
    one.save(record("alice", "s"), FACTS)
    one.save(record("alice", "sa"), FACTS)  # holds each of them once
    store(two, raw, rooms("sb"))
    two.save(record("bob", "sb"), FACTS)
    assert one.forget("alice")
    assert kept(raw) == {"s", "b"}
    assert two.forget("bob")
    assert kept(raw) == set()
    assert not raw.exists(*(NAMESPACE.key(part) for part in ("users", "blocks", "sizes", "tips")))
    assert used(raw) == 0


def test_a_session_that_loses_its_tail_frees_it(one: RedisIndex, raw: redis.Redis) -> None:
    store(one, raw, rooms("abcd"))
    one.save(record("alice", "abcd"), FACTS)
    one.save(record("alice", "ab"), FACTS)
    assert kept(raw) == {"a", "b"}
    assert found(one, "abcd") == 2


def test_saving_says_what_is_not_stored_after_all(one: RedisIndex, raw: redis.Redis) -> None:
    store(one, raw, rooms("ab"))
    assert one.save(record("alice", "abc"), FACTS).lost == [(GROUP, b"abc")]
    assert found(one, "abc") == 2


# -- two engines --------------------------------------------------------------------------------------


def test_the_engine_that_takes_a_session_further_owns_it(one: RedisIndex, two: RedisIndex, raw: redis.Redis) -> None:
    store(one, raw, rooms("ab"))
    one.save(record("alice", "ab"), FACTS)
    store(two, raw, rooms("abc"))
    assert two.save(record("alice", "abc", created=2.0e9), FACTS).verdict == "saved"
    assert raw.hmget(NAMESPACE.session("alice"), "owner", "created") == ["two", "2001-09-09T01:46:40Z"]
    assert not one.forget("alice")
    assert one.save(record("alice", "ab"), FACTS).verdict == "stale"
    assert raw.llen(NAMESPACE.chain("alice")) == 3


def test_two_conversations_of_one_name_are_kept_apart(one: RedisIndex, two: RedisIndex, raw: redis.Redis) -> None:
    store(one, raw, rooms("ab"))
    one.save(record("alice", "ab"), FACTS)
    store(two, raw, rooms("xy"))
    assert two.save(record("alice", "xy"), FACTS).verdict == "conflict"
    assert raw.lrange(NAMESPACE.chain("alice"), 0, -1) == [member(block) for block in ids("ab")]


def test_a_name_that_was_given_up_and_taken_meanwhile(one: RedisIndex, two: RedisIndex, raw: redis.Redis) -> None:
    """What looks as it was left is not: it is as long, but another conversation."""
    store(one, raw, rooms("abc"))
    one.save(record("alice", "abc"), FACTS)
    two.forget("alice", owned=False)
    store(two, raw, rooms("xyz"))
    two.save(record("alice", "xyz"), FACTS)
    assert one.save(record("alice", "abc"), FACTS).verdict == "conflict"


def test_a_session_without_a_name_that_went_on_is_pointed_out(
    one: RedisIndex, two: RedisIndex, raw: redis.Redis
) -> None:
    store(one, raw, rooms("ab"))
    one.save(record("anonymous-one-1", "ab"), FACTS)
    store(two, raw, rooms("abc"))
    assert two.save(record("anonymous-two-1", "abc"), FACTS).absorbed == ["anonymous-one-1"]
    assert two.forget("anonymous-one-1", owned=False)
    assert kept(raw) == {"a", "b", "c"}


def test_strangers_are_others_sessions_oldest_first(one: RedisIndex, two: RedisIndex, raw: redis.Redis) -> None:
    for index, name, text in ((two, "x", "x"), (one, "mine", "m"), (two, "y", "yz")):
        store(index, raw, rooms(text))
        index.save(record(name, text), FACTS)
        raw.zincrby(NAMESPACE.key("sessions"), {"x": -2, "mine": -1, "y": 0}[name], name)
    strangers = one.strangers(10)
    assert [(s.session_id, s.nbytes) for s in strangers] == [("x", NBYTES), ("y", 2 * NBYTES)]
    assert strangers[0].expires < strangers[1].expires


def test_a_stranger_that_was_used_meanwhile_stays(one: RedisIndex, two: RedisIndex, raw: redis.Redis) -> None:
    store(two, raw, rooms("x"))
    two.save(record("x", "x"), FACTS)
    [stranger] = one.strangers(10)
    raw.zincrby(NAMESPACE.key("sessions"), 5, "x")
    assert not one.forget("x", owned=False, until=stranger.expires)
    assert kept(raw) == {"x"}


# -- time, and engines that die -----------------------------------------------------------------------


def expire_now(raw: redis.Redis, part: str, *members: str) -> None:
    """The time has passed for these members of a sorted set."""
    raw.zadd(NAMESPACE.key(part), dict.fromkeys(members, time.time() - 1), xx=True)


def test_a_use_renews_a_session_and_its_blocks(server: RedisServer, raw: redis.Redis) -> None:
    one = engine(server, ttl_s=1000)
    store(one, raw, rooms("ab"))
    one.save(record("alice", "ab"), FACTS)
    for name in (NAMESPACE.session("alice"), *(NAMESPACE.block(block, rank) for block in ids("ab") for rank in (0, 1))):
        raw.expire(name, 5)
    again = engine(server, "again", ttl_s=1000)  # as after a restart
    assert again.save(record("alice", "ab"), FACTS).verdict == "saved"
    assert raw.ttl(NAMESPACE.session("alice")) > 900
    assert all(raw.ttl(NAMESPACE.block(block, rank)) > 900 for block in ids("ab") for rank in (0, 1))


def test_a_use_that_changes_no_block_writes_none(one: RedisIndex, two: RedisIndex, raw: redis.Redis) -> None:
    store(one, raw, rooms("abc"))
    one.save(record("alice", "abc"), FACTS)
    names = [NAMESPACE.key("blocks"), *(NAMESPACE.block(block, 0) for block in ids("abc"))]
    raw.expire(NAMESPACE.session("alice"), 5)
    raw.zadd(NAMESPACE.key("sessions"), {"alice": 5})
    raw.config_resetstat()
    used = record("alice", "abc", state="idle", last_used=1.2e9)
    assert one.save(used, FACTS) == ("saved", [], [])
    assert raw.hmget(NAMESPACE.session("alice"), "state", "last_used", "created") == [
        "idle",
        "2008-01-10T21:20:00Z",
        "2001-09-09T01:46:40Z",
    ]
    assert raw.ttl(NAMESPACE.session("alice")) > TTL_S - 10
    assert raw.zscore(NAMESPACE.key("sessions"), "alice") > time.time() + TTL_S - 10
    assert "cmdstat_lrange" not in raw.info("commandstats")
    lasts = [raw.ttl(name) for name in names[1:]] + [raw.zscore(names[0], member((GROUP, b"a"))) - time.time()]
    assert all(left > TTL_S + 200 for left in lasts)  # longer than the session, even if used once more
    store(two, raw, rooms("abcd"))
    two.save(record("alice", "abcd"), FACTS)
    assert one.save(used, FACTS).verdict == "stale"
    raw.flushall()
    assert one.save(used, FACTS).lost == ids("abc")


def test_shared_blocks_live_as_long_as_the_session_that_lives_longest(
    server: RedisServer, one: RedisIndex, raw: redis.Redis
) -> None:
    store(one, raw, rooms("sa"))
    one.save(record("alice", "sa"), FACTS)
    store(one, raw, rooms("sb"))
    one.save(record("bob", "sb"), FACTS)
    expire_now(raw, "sessions", "alice")
    expire_now(raw, "blocks", member((GROUP, b"sa")))
    assert found(one, "sa") == 1
    assert one.collect().expired == ["alice"]
    assert kept(raw) == {"s", "b"}
    assert not raw.exists(NAMESPACE.session("alice"), NAMESPACE.chain("alice"))
    assert found(one, "sb") == 2


def test_what_an_engine_left_half_written_is_collected(server: RedisServer, one: RedisIndex, raw: redis.Redis) -> None:
    dead = engine(server, "dead")
    store(dead, raw, rooms("abc"))
    store(one, raw, rooms("x"))
    one.save(record("alice", "x"), FACTS)
    assert one.collect().used == 3 * BOUND + NBYTES
    expire_now(raw, "pending", *map(member, ids("abc")))
    assert one.collect() == ([], NBYTES)
    assert kept(raw) == {"x"}


def test_books_end_with_the_last_session(server: RedisServer, raw: redis.Redis) -> None:
    """Nothing stays in Redis for ever when no engine comes back."""
    one = engine(server)
    one.attach({"model": "tiny"}, "first")
    store(one, raw, rooms("ab"))
    one.save(record("alice", "ab"), FACTS)
    one.reserve(rooms("xyz"))
    assert [name for name in raw.scan_iter("*") if raw.ttl(name) < 0] == ["manthan:namespaces"]
    raw.delete(NAMESPACE.key("info"))
    other = Namespace("manthan:", "other")
    RedisIndex(redis.Redis(port=server.port), Circuit(), other, "one", 1, 1, 1).attach({"model": "x"}, "x")
    assert raw.smembers("manthan:namespaces") == {"other"}


def test_an_emptied_namespace_is_noticed(one: RedisIndex, raw: redis.Redis) -> None:
    assert one.attach({"model": "tiny"}, "first") == "first"
    assert one.attach({"model": "tiny"}, "second") == one.incarnation() == "first"
    raw.flushall()
    assert one.incarnation() == ""
    assert one.attach({"model": "tiny"}, "third") == "third"
    assert raw.hget(NAMESPACE.key("info"), "model") == "tiny"
    assert raw.smembers("manthan:namespaces") == {NAMESPACE.name}


def test_two_models_share_nothing() -> None:
    names = {
        Namespace.of("manthan:", "a/tiny", {"codec": codec, "weights": weights}).name
        for weights in ("one", "two")
        for codec in ("k3v3", "wht-4x")
    }
    assert len(names) == 4
    assert all(name.startswith("tiny-") for name in names)


def test_the_shards_of_a_block_and_the_books_have_a_slot_each() -> None:
    from redis.crc import key_slot

    assert len({key_slot(NAMESPACE.block((GROUP, b"a"), rank).encode()) for rank in range(8)}) == 1
    assert len({key_slot(NAMESPACE.block(block, 0).encode()) for block in ids("abcdefgh")}) > 4
    books = [NAMESPACE.key("info"), NAMESPACE.session("alice"), NAMESPACE.chain("bob")]
    assert len({key_slot(name.encode()) for name in books}) == 1


def test_the_folder_of_a_model_does_not_matter_for_its_name(tmp_path: Path) -> None:
    assert Namespace.of("m:", "/data/Qwen3-8B/", {}).name.startswith("qwen3-8b-")


# -- what other KV cache groups have for a session ----------------------------------------------------

STATE = 3


def anchored(session_id: str, text: str, places: str, stored: str | None = None) -> SessionRecord:
    """A session with a state behind each of these letters."""
    beside = tuple(
        StoredBlock(key, STATE, True, NBYTES) for key, letter in zip(keys(text), text, strict=True) if letter in places
    )
    return record(session_id, text, stored)._replace(beside=beside)


def states(text: str, places: str) -> list[Room]:
    return [Room(key, STATE, BOUND) for key, letter in zip(keys(text), text, strict=True) if letter in places]


def last_state(text: str, at: int) -> list[BlockId]:
    """What is needed behind so many blocks."""
    return [(STATE, keys(text)[at - 1])]


def test_the_deepest_place_is_found_that_can_be_gone_on_behind(
    one: RedisIndex, two: RedisIndex, raw: redis.Redis
) -> None:
    store(one, raw, [*rooms("abcde"), *states("abcde", "bd")])
    one.save(anchored("alice", "abcde", "bd"), FACTS)
    assert two.anchored(5, lambda at: last_state("abcde", at)) == Anchored(4, [NBYTES])
    assert two.anchored(3, lambda at: last_state("abcde", at)) == Anchored(2, [NBYTES])
    assert two.anchored(1, lambda at: last_state("abcde", at)) is None
    both = [(STATE, key) for key in (keys("abcde")[1], keys("abcde")[3])]
    needed = {5: [both[0], (STATE, b"none")], 4: [(STATE, b"none"), both[1]], 3: both, 2: both, 1: both}
    assert two.anchored(5, needed.__getitem__) == Anchored(3, [NBYTES] * 2)
    assert two.anchored(1, lambda at: []) is None, "all of it would be computed again"


def test_a_place_far_from_the_end_is_found_with_few_questions(
    one: RedisIndex, two: RedisIndex, raw: redis.Redis
) -> None:
    chain = [f"{n:04}".encode() for n in range(600)]
    one.reserve([Room(chain[20], STATE, BOUND)])
    raw.zadd(NAMESPACE.key("blocks"), {member((STATE, chain[20])): time.time() + 100})
    calls = raw.info("commandstats")["cmdstat_eval"]["calls"]
    assert two.anchored(600, lambda at: [(STATE, chain[at - 1])]) == Anchored(21, [BOUND])
    assert raw.info("commandstats")["cmdstat_eval"]["calls"] - calls < 20


def test_other_groups_blocks_live_with_the_session(one: RedisIndex, raw: redis.Redis) -> None:
    store(one, raw, [*rooms("abc"), *states("abc", "ac")])
    one.save(anchored("alice", "abc", "ac"), FACTS)
    assert used(raw) == 5 * NBYTES
    assert raw.hget(NAMESPACE.session("alice"), "bytes") == str(5 * NBYTES)
    assert raw.hget(NAMESPACE.session("alice"), "blocks") == "3"
    one.save(anchored("alice", "abc", "c"), FACTS)  # though its chain is the same
    assert raw.exists(NAMESPACE.block((STATE, keys("abc")[0]), 0)) == 0
    assert raw.exists(NAMESPACE.block((STATE, keys("abc")[2]), 0)) == 1
    assert used(raw) == 4 * NBYTES
    one.save(anchored("alice", "abc", "c"), FACTS)  # a touch
    assert used(raw) == 4 * NBYTES
    one.forget("alice")
    assert used(raw) == 0
    assert list(raw.scan_iter("*:block:*")) == []


def test_another_anchor_behind_the_same_chain_is_written(one: RedisIndex, two: RedisIndex, raw: redis.Redis) -> None:
    """One that another engine has stored, so that nothing was reserved for it here."""
    store(one, raw, [*rooms("abc"), *states("abc", "c")])
    one.save(anchored("alice", "abc", "c"), FACTS)
    store(two, raw, states("abc", "b"))
    two.save(anchored("bob", "ab", "b"), FACTS)
    one.save(anchored("alice", "abc", "b"), FACTS)
    two.forget("bob")
    assert one.anchored(3, lambda at: last_state("abc", at)) == Anchored(2, [NBYTES])


def test_what_is_stored_before_its_chain_is_somebody_s(one: RedisIndex, two: RedisIndex, raw: redis.Redis) -> None:
    """A state is stored at once, the chain when the session is idle."""
    store(one, raw, states("abc", "c"))
    one.save(anchored("alice", "abc", "c", stored=""), FACTS)
    assert raw.zcard(NAMESPACE.key("pending")) == 0
    assert used(raw) == NBYTES
    assert found(two, "abc") == 0
    store(one, raw, rooms("abc"))
    one.save(anchored("alice", "abc", "c"), FACTS)
    assert found(two, "abc") == 3
    assert used(raw) == 4 * NBYTES


def test_who_goes_on_from_another_engine_s_session_takes_it_over(
    one: RedisIndex, two: RedisIndex, raw: redis.Redis
) -> None:
    store(one, raw, [*rooms("abc"), *states("abc", "bc")])
    one.save(anchored("alice", "abc", "bc"), FACTS)
    store(two, raw, [*rooms("abcd"), *states("abcd", "d")])
    assert two.save(anchored("alice", "abcd", "d"), FACTS).verdict == "saved"
    assert one.save(anchored("alice", "abc", "bc"), FACTS).verdict == "stale"
    assert one.save(anchored("alice", "abx", "x", stored=""), FACTS).verdict == "conflict"
    assert raw.hget(NAMESPACE.session("alice"), "owner") == "two"
    assert used(raw) == 5 * NBYTES  # its own state, and no other
