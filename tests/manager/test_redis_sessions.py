"""Lookups, hashes and times to live in a real Redis, as two engines use it."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from threading import Event
from typing import Any

import numpy as np
import pytest
from key_files import write_keys
from redis_server import RedisServer, running
from talks import Talks, names

from manthan.manager.config.model import RedisConfig, SealingConfig
from manthan.manager.events import BlocksDropped, DropCause, LookedUp
from manthan.manager.pool import BlockName
from manthan.manager.session.persist import RedisLink
from manthan.manager.tiers.joined import Shard
from manthan.manager.tiers.redis import (
    FALL,
    FIRST_TTL,
    SAMPLES,
    Circuit,
    Namespace,
    RedisTier,
    block_ttl_s,
    connect,
    sample,
    shared_blocks,
)
from manthan.manager.tiers.redis_sessions import LookupResult, RedisSessions, SessionRecord, StoredPoint
from manthan.manager.tiers.sealed import Sealer, keys_of

HERE, TTL_S, NBYTES, RANKS = Namespace("manthan:", "tiny-1"), 4000.0, 100, 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


class Player:
    """An engine's part: its sessions' thread, and the stores of its ranks.

    counts: numbers of ranks, its own first.
    """

    def __init__(
        self,
        server: RedisServer,
        name: str,
        namespace: Namespace = HERE,
        sealer: Sealer | None = None,
        counts: Sequence[int] = (RANKS,),
    ) -> None:
        self.config, self.namespace = RedisConfig(url=f"{server.url}?socket_timeout=0.5"), namespace
        facts, client = {"model": namespace.name, "engine": name}, connect(self.config)
        self.rung = threading.Event()
        self.circuit = Circuit()
        self.sessions = RedisSessions(client, self.circuit, namespace, counts, TTL_S, facts, self.rung.set, sealer)
        self.sessions.start()
        first = RedisTier(connect(self.config, 3), Circuit(), namespace, Shard(0, counts[0]), TTL_S)
        self.stores = [first.of(Shard(rank, counts[0])) for rank in range(counts[0])]

    def store(self, hashes: Sequence[bytes], group: int = 0, nbytes: int = NBYTES) -> None:
        for rank, store in enumerate(self.stores):
            bufs = {name: np.frombuffer((name + bytes([rank])) * 20, np.uint8)[:nbytes] for name in hashes}
            assert store.put_all(group, bufs) == {}

    def tell(self, session_id: str, owned: Sequence[bytes] | None, used: float | None = None, **fields: object) -> None:
        """owned: None if the session is forgotten."""
        if owned is None:
            self.sessions.tell([SessionRecord(session_id)], [])
            return
        blocks = [(0, name, depth) for depth, name in enumerate(owned)]
        used = time.time() if used is None else used
        said = {"state": "cold", "tokens": 16 * len(owned), **fields}
        self.sessions.tell([SessionRecord(session_id, said, used, blocks)], [])

    def ask(
        self,
        hashes: Sequence[bytes],
        needed: Callable[[int], Sequence[BlockName]] | None = None,
        session_id: str = "nobody",
    ) -> LookupResult:
        self.rung.clear()
        assert self.sessions.look_up("r", session_id, 0, hashes, needed)
        assert self.rung.wait(20)
        return self.sessions.take()["r"]

    def close(self) -> None:
        self.sessions.close()
        for store in self.stores:
            store.close()


Start = Callable[..., Player]


@pytest.fixture
def start(server: RedisServer) -> Iterator[Start]:
    server.client.flushall()
    players: list[Player] = []

    def make(name: str = "one", *options: object) -> Player:
        players.append(Player(server, name, *options))  # type: ignore[arg-type]
        return players[-1]

    yield make
    for player in players:
        player.close()


def blocks(text: str, count: int) -> list[bytes]:
    return [sha256(f"{text} {at}".encode()).digest() for at in range(count)]


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def hash_of(server: RedisServer, session_id: str, namespace: Namespace = HERE) -> dict[str, str]:
    return dict(server.client.hgetall(f"manthan:{{{namespace.name}}}:session:{session_id}"))


def left_ms(server: RedisServer, *hashes: bytes) -> list[int]:
    """Return what each block has to live, on the rank where that is least."""
    with server.client as client, client.pipeline() as pipeline:
        for name in hashes:
            for rank in range(RANKS):
                pipeline.pttl(HERE.block(0, name, Shard(rank, RANKS)))
        found = pipeline.execute()
    return [min(found[at : at + RANKS]) for at in range(0, len(found), RANKS)]


# -- lookups ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [[], [1], [1, 4], [4]])
def test_blocks_of_other_numbers_of_ranks_are_found_behind_each_other(start: Start, others: list[int]) -> None:
    """The first are of two ranks, then come some of one, of four, and of two again."""
    hashes = blocks("a", 400)
    for counts, part in (((2,), hashes[:40]), ((1,), hashes[40:90]), ((4,), hashes[90:390]), ((2,), hashes[390:])):
        start("writer", HERE, None, counts).store(part)
    reader, end = start("reader", HERE, None, (2, *others)), {(): 40, (1,): 90, (1, 4): 400, (4,): 40}[tuple(others)]
    sizes = [2] * 40 + [1] * 50 + [4] * 300 + [2] * 10
    assert reader.ask(hashes).sizes == [NBYTES * shards for shards in sizes[:end]]
    assert reader.ask(hashes[40:]).sizes == [NBYTES * shards for shards in sizes[40:end]]
    assert reader.ask(blocks("b", 5)).sizes == []


def test_a_session_s_larger_first_block_is_not_taken_for_the_others(start: Start) -> None:
    hashes, player = blocks("a", 600), start()
    player.store(hashes[:1], nbytes=3 * NBYTES)
    player.store(hashes[1:300])
    player.store(hashes[300:], nbytes=2 * NBYTES)
    sizes = player.ask(hashes).sizes
    assert len(sizes) == 600
    assert (sizes[0], {*sizes[1:256]}, {*sizes[256:]}) == (6 * NBYTES, {2 * NBYTES}, {4 * NBYTES})
    assert player.ask(hashes[:1]).sizes == sizes[:1]


def test_a_block_of_which_a_shard_is_missing_is_not_there(start: Start, server: RedisServer) -> None:
    hashes = blocks("a", 50)
    start("writer", HERE, None, (4,)).store(hashes)
    reader = start("reader", HERE, None, (1, 2, 4))
    assert len(reader.ask(hashes).sizes) == 50
    server.client.delete(HERE.block(0, hashes[33], Shard(3, 4)))
    assert len(reader.ask(hashes).sizes) == 33


def test_other_groups_are_found_in_any_number_of_shards(start: Start) -> None:
    hashes, (part,) = blocks("a", 3), blocks("part", 1)
    start("one", HERE, None, (1,)).store(hashes)
    start("four", HERE, None, (4,)).store([part], 1)
    reader = start("reader", HERE, None, (2, 1, 4))
    assert reader.ask(hashes, lambda count: [(1, part)]).point == StoredPoint(3, [4 * NBYTES])


def test_what_another_number_of_ranks_stored_is_renewed_and_deleted(start: Start, server: RedisServer) -> None:
    hashes = blocks("a", 3)
    start("one", HERE, None, (1,)).store(hashes)
    reader = start("reader", HERE, None, (2, 1))
    names = [HERE.block(0, each, Shard(0, 1)) for each in hashes]
    reader.ask(hashes)
    reader.tell("s", hashes)
    until(lambda: hash_of(server, "s"))
    assert min(map(server.client.pttl, names)) > 1000 * FIRST_TTL * TTL_S
    reader.sessions.tell([], [BlocksDropped(0, hashes, DropCause.RELEASED)])
    until(lambda: not server.client.exists(*names))


@pytest.mark.parametrize("count", [3, 700])
def test_another_engine_finds_what_one_has_stored(start: Start, count: int) -> None:
    hashes = blocks("a", count)
    start().store(hashes)
    other = start("two")
    assert other.ask([*hashes, *blocks("b", 5)]) == LookupResult([RANKS * NBYTES] * count)
    assert other.ask(blocks("b", 5)) == LookupResult([])


@pytest.mark.parametrize("count", [1, 17, 64, 700])
def test_another_engine_finds_which_of_them_are_the_session_s_own(start: Start, count: int) -> None:
    one, other, hashes = start(), start("two"), blocks("a", count)
    one.store(hashes)
    one.tell("alice", hashes, hashes=sample(hashes))
    until(lambda: other.ask(hashes, session_id="alice").sampled)
    own = other.ask(hashes, session_id="alice").sampled
    assert len(own.split()) == min(count, SAMPLES)
    assert shared_blocks(own, [*hashes, *blocks("b", 3)]) == count
    assert count - count // SAMPLES - 1 <= shared_blocks(own, hashes[:-1]) <= count - 1
    assert shared_blocks(own, blocks("b", count)) == 0
    assert shared_blocks(own, []) == 0
    assert other.ask(hashes, session_id="bob").sampled == ""


@pytest.mark.parametrize("count", [1, 20, 31, 32, 33, 150, 700])
def test_what_is_found_ends_before_the_first_hole(start: Start, server: RedisServer, count: int) -> None:
    player, hashes = start(), blocks("a", 800)
    player.store(hashes)
    holes = {count, *random.Random(count).sample(range(count, 800), 20)}
    server.client.delete(*(HERE.block(0, hashes[at], Shard(at % RANKS, RANKS)) for at in holes))
    assert player.ask(hashes) == LookupResult([RANKS * NBYTES] * count)


def test_the_first_lookup_finds_a_connection(start: Start, server: RedisServer) -> None:
    """A request waits for 5 ms: too short to connect as well."""
    server.client.config_resetstat()
    start("fresh")
    until(lambda: "cmdstat_exists" in server.client.info("commandstats"))


def test_a_request_that_could_begin_waits_five_milliseconds_and_goes_on_without(
    start: Start, server: RedisServer
) -> None:
    talks = Talks()
    link = RedisLink(start().sessions, talks.manager, ())
    server.pause()
    request_id = talks.ask("a b c", "alice")
    link.look_up(talks.manager.requests[request_id], 3)
    assert [link.awaits(request_id, now) for now in (30.0, 30.0049, 30.0051, 30.0)] == [True, True, False, False]
    assert talks.told(LookedUp) == [LookedUp("alice", "unanswered")]
    server.resume()


def test_a_session_goes_on_in_another_engine(start: Start, server: RedisServer) -> None:
    """All that Redis knows of it comes from the first engine's link, and reaches the other's manager by its own."""
    engines = [(Talks(is_shared=True), start(name)) for name in ("one", "two")]
    (one, here), (two, there) = engines
    mine, others = (RedisLink(player.sessions, talks.manager, ()) for talks, player in engines)
    one.talk("a b c", "alice")
    one.rest()
    here.store(names("a b c"))
    mine.tell([], one.now)
    until(lambda: there.ask(names("a b c"), session_id="alice").sampled)
    assert hash_of(server, "alice")["state"] == "cold"
    request_id = two.ask("a b c d", "alice")
    there.rung.clear()
    others.look_up(two.manager.requests[request_id], 4)
    assert others.awaits(request_id, two.now)
    assert there.rung.wait(20)
    assert others.sessions.has_answers
    others.hear()
    assert not others.awaits(request_id, two.now)
    assert two.manager.match(two.manager.requests[request_id], 0, 4) == 3


def test_the_deepest_point_with_all_that_other_groups_need_is_found(start: Start) -> None:
    player, hashes = start(), blocks("a", 100)
    player.store(hashes)
    player.store(hashes[20:41], group=1)

    def needed(count: int) -> list[BlockName]:
        return [(1, name) for name in hashes[max(0, count - 3) : count]]

    assert player.ask(hashes, needed).point == StoredPoint(41, [RANKS * NBYTES] * 3)
    assert player.ask(hashes[:22], needed).point is None


def test_after_a_reset_nothing_of_before_is_found(start: Start) -> None:
    player, hashes = start(), blocks("a", 3)
    player.store(hashes)
    name = player.sessions.reset()
    assert name.startswith(f"{HERE.name}-")
    assert player.ask(hashes) == LookupResult([])


def test_a_session_told_after_a_reset_is_written_to_the_new_namespace(
    start: Start, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    player, hashes = start(), blocks("a", 3)
    looks, goes_on, real = Event(), Event(), RedisSessions._found

    def found(*args: Any) -> list[int]:
        looks.set()
        assert goes_on.wait(20)
        return real(*args)

    monkeypatch.setattr(RedisSessions, "_found", found)
    player.sessions.look_up("r", "nobody", 0, hashes, None)
    assert looks.wait(20)
    new = Namespace(HERE.prefix, player.sessions.reset())
    player.tell("chat", hashes)
    goes_on.set()
    until(lambda: hash_of(server, "chat", new))
    assert not hash_of(server, "chat")


# -- sessions -----------------------------------------------------------------------------------------


def test_a_session_is_one_hash(start: Start, server: RedisServer) -> None:
    player = start()
    player.tell("alice", blocks("a", 3), tenant="")
    until(lambda: hash_of(server, "alice"))
    assert hash_of(server, "alice") == {
        **{"id": "alice", "model": "tiny-1", "engine": "one"},
        **{"state": "cold", "tokens": "48", "tenant": ""},
    }
    assert 0 < server.client.ttl(HERE.session("alice")) <= TTL_S
    player.tell("alice", blocks("a", 4), state="idle")
    until(lambda: hash_of(server, "alice")["tokens"] == "64")
    assert [name for name in server.client.keys("*") if "block" not in name] == ["manthan:{tiny-1}:session:alice"]


def test_two_models_and_two_tenants_with_one_id_keep_two_hashes(start: Start, server: RedisServer) -> None:
    other = Namespace("manthan:", "tiny-2")
    one, two = start("one"), start("two", other)
    one.tell("alice", blocks("a", 1))
    two.tell("alice", blocks("b", 2))
    one.tell("acme/alice", blocks("c", 3), tenant="acme")
    one.tell("globex/alice", blocks("d", 4), tenant="globex")
    until(lambda: len(server.client.keys("*:session:*")) == 4)
    found = [hash_of(server, "alice"), hash_of(server, "alice", other)]
    found += [hash_of(server, f"{tenant}/alice") for tenant in ("acme", "globex")]
    assert [one["tokens"] for one in found] == ["16", "32", "48", "64"]


def test_a_forgotten_session_s_hash_goes_unless_another_engine_has_it_now(start: Start, server: RedisServer) -> None:
    one, two = start("one"), start("two")
    one.tell("alice", blocks("a", 1))
    one.tell("bob", blocks("b", 1))
    until(lambda: hash_of(server, "bob"))
    two.tell("bob", blocks("b", 2))
    until(lambda: hash_of(server, "bob")["engine"] == "two")
    one.tell("alice", None)
    one.tell("bob", None)
    until(lambda: not hash_of(server, "alice"))
    one.tell("carol", blocks("c", 1))
    until(lambda: hash_of(server, "carol"))  # what was told before is done
    assert hash_of(server, "bob")["engine"] == "two"


def test_sealed_sessions_have_names_that_tell_nothing(start: Start, server: RedisServer, tmp_path: object) -> None:
    path = write_keys(tmp_path / "keys", "k2", "k1")  # type: ignore[operator]
    sealer = Sealer(keys_of(SealingConfig(key_file=str(path))), HERE.name)
    player = start("one", HERE, sealer)
    player.tell("alice", blocks("a", 1))
    until(lambda: server.client.keys("*:session:*"))
    assert hash_of(server, sealer.name("alice"))["tokens"] == "16"
    assert "alice" not in str(hash_of(server, sealer.name("alice"))) + str(server.client.keys("*"))


# -- times to live ------------------------------------------------------------------------------------


def test_times_to_live_fall_along_a_session_and_are_renewed_when_it_is_used(start: Start, server: RedisServer) -> None:
    player, hashes = start(), blocks("a", 300)
    player.store(hashes)
    assert 0 < left_ms(server, hashes[0])[0] <= FIRST_TTL * TTL_S * 1000
    player.tell("alice", hashes)
    until(lambda: left_ms(server, hashes[-1])[0] > FIRST_TTL * TTL_S * 1000)
    left = left_ms(server, *hashes)
    assert left == sorted(left, reverse=True)
    assert left[-1] > (1 - FALL) * TTL_S * 1000 - 60_000
    assert block_ttl_s(TTL_S, 0) == TTL_S
    player.tell("alice", [*hashes, *blocks("b", 1)], used=time.time() + 500)
    until(lambda: left_ms(server, hashes[0])[0] > TTL_S * 1000)


def test_a_server_that_is_full_evicts_tails_first(tmp_path_factory: pytest.TempPathFactory) -> None:
    flags = ("--maxmemory-policy", "volatile-ttl", "--maxmemory-samples", "64")
    for server in running(tmp_path_factory.mktemp("full"), *flags):
        player, hashes = Player(server, "one"), blocks("a", 400)
        player.store(hashes)
        player.tell("alice", hashes)
        until(lambda: left_ms(server, hashes[-1])[0] > FIRST_TTL * TTL_S * 1000)  # noqa: B023
        server.client.config_set("maxmemory", server.client.info("memory")["used_memory"] - 40_000)
        server.client.set("other", "x")
        server.client.config_set("maxmemory", 0)
        there = [left > 0 for left in left_ms(server, *hashes)]
        assert 0 < there.count(False) < 400
        assert all(there[:200])
        assert hash_of(server, "alice")
        player.close()


def test_what_is_released_is_deleted_for_all_engines_and_what_only_makes_room_stays(
    start: Start, server: RedisServer
) -> None:
    one, other, hashes = start(), start("two"), blocks("a", 6)
    one.store(hashes)
    assert other.ask(hashes) == LookupResult([RANKS * NBYTES] * 6)
    causes = [DropCause.BUDGET, DropCause.RELEASED, DropCause.EXPIRED, DropCause.FAILED, DropCause.ABANDONED]
    one.sessions.tell([], [BlocksDropped(0, [name], cause) for name, cause in zip(hashes, causes, strict=False)])
    until(lambda: not any(left > 0 for left in left_ms(server, *hashes[1:5])))
    shards = [Shard(rank, RANKS) for rank in range(RANKS)]
    assert sum(server.client.exists(HERE.block(0, name, shard)) for name in hashes for shard in shards) == 2 * RANKS
    assert other.ask(hashes) == LookupResult([RANKS * NBYTES]), "the other engine computes the rest again"


def test_what_is_released_while_redis_is_down_is_deleted_later_unless_it_is_stored_again(
    start: Start, server: RedisServer
) -> None:
    player, hashes = start(), blocks("a", 3)
    player.store(hashes)
    server.pause()
    assert player.ask(hashes) == LookupResult()
    player.sessions.tell(
        [], [BlocksDropped(0, hashes[:2], DropCause.RELEASED), BlocksDropped(0, hashes[2:], DropCause.FAILED)]
    )
    player.tell("alice", hashes[1:2])
    server.resume()
    until(lambda: left_ms(server, hashes[0])[0] < 0)
    assert all(left > 0 for left in left_ms(server, *hashes[1:]))


# -- a server that does not answer --------------------------------------------------------------------


def test_a_server_that_hangs_costs_one_timeout_and_is_told_later(start: Start, server: RedisServer) -> None:
    player, hashes = start(), blocks("a", 3)
    player.store(hashes)
    server.pause()
    try:
        assert player.ask(hashes) == LookupResult()
        assert not player.sessions.is_up
        assert not player.sessions.look_up("r", "nobody", 0, hashes)
        player.tell("alice", hashes)
    finally:
        server.resume()
    until(lambda: hash_of(server, "alice"))
    assert player.ask(hashes) == LookupResult([RANKS * NBYTES] * 3)


def test_a_session_that_cannot_be_written_costs_no_other_session_its_record(start: Start, server: RedisServer) -> None:
    player, hashes = start(), blocks("a", 1)
    player.store(hashes)
    server.pause()
    try:
        assert player.ask(hashes) == LookupResult()
        for session_id, owned in (("alice", hashes), ("\ud800", []), ("bob", [])):  # redis-py cannot encode the second
            player.tell(session_id, owned)
        player.sessions.tell([], [BlocksDropped(0, blocks("b", 1), DropCause.RELEASED)])
        until(lambda: player.circuit._failures > 1)  # the first record was tried
    finally:
        server.resume()
    until(lambda: hash_of(server, "bob"))
    assert hash_of(server, "alice")
    assert left_ms(server, *hashes)[0] > FIRST_TTL * TTL_S * 1000
    until(lambda: not player.sessions._is_behind)


def test_a_server_that_is_full_and_evicts_nothing_is_told_later(start: Start, server: RedisServer) -> None:
    player = start()
    server.client.config_set("maxmemory", 1)
    player.tell("alice", blocks("a", 1))
    time.sleep(0.1)
    assert player.sessions.is_up
    assert not hash_of(server, "alice")
    server.client.config_set("maxmemory", 0)
    until(lambda: hash_of(server, "alice"))


@pytest.mark.parametrize("cause", ["needed", "store_full"])
def test_a_store_that_fails_costs_other_engines_nothing(start: Start, server: RedisServer, cause: str) -> None:
    here, there = start("one"), start("two")
    talks = Talks(is_shared=True)
    link = RedisLink(there.sessions, talks.manager, ())
    talks.talk("a b c", "bob")  # it computes what the other engine then stores
    here.store(names("a b c"))
    talks.refuses = lambda _: cause
    talks.rest()
    link.tell(talks.told(BlocksDropped), talks.now)
    there.tell("carol", [])
    until(lambda: hash_of(server, "carol"))
    until(lambda: not there.sessions._is_behind)
    assert here.ask(names("a b c")) == LookupResult([RANKS * NBYTES] * 3)


def test_what_is_released_is_deleted_while_redis_is_full_and_evicts_nothing(start: Start, server: RedisServer) -> None:
    player, hashes = start(), blocks("a", 300)
    player.store(hashes, nbytes=660)
    player.tell("alice", hashes)
    until(lambda: hash_of(server, "alice"))
    server.client.config_set("maxmemory", server.client.info("memory")["used_memory"] - 100_000)
    try:
        player.tell("bob", blocks("b", 1))  # refused
        player.sessions.tell([SessionRecord("alice")], [BlocksDropped(0, hashes, DropCause.RELEASED)])
        until(lambda: not server.client.exists(HERE.session("alice"), HERE.block(0, hashes[0], Shard(0, RANKS))))
        until(lambda: hash_of(server, "bob"))
    finally:
        server.client.config_set("maxmemory", 0)


def test_a_lookup_does_not_wait_for_a_record_that_a_full_server_refuses(
    start: Start, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manthan.manager.tiers.redis_sessions.REST_S", 1e6)
    player, hashes = start(), blocks("a", 3)
    player.store(hashes)
    server.client.config_set("maxmemory", 1)
    try:
        player.tell("alice", hashes)
        time.sleep(0.1)
        assert player.ask(hashes) == LookupResult([RANKS * NBYTES] * 3)
    finally:
        server.client.config_set("maxmemory", 0)
