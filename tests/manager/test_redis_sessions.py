"""Lookups, hashes and times to live in a real Redis, as two engines use it."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from types import SimpleNamespace

import numpy as np
import pytest
from engine import Engine
from key_files import write_keys
from redis_server import RedisServer, running

from manthan.manager.config.model import RedisConfig, SealingConfig
from manthan.manager.redis_link import RedisLink
from manthan.manager.sessions.session import Drop, DropCause
from manthan.manager.tiers.redis import RedisTier
from manthan.manager.tiers.redis_client import Circuit, connect
from manthan.manager.tiers.redis_schema import FALL, FIRST_TTL, SAMPLES, Namespace, lives_s, sample, shared_blocks
from manthan.manager.tiers.redis_sessions import Anchored, LookupResult, RedisSessions, SessionRecord
from manthan.manager.tiers.sealed import Sealer, keys_of

HERE, TTL_S, NBYTES, RANKS = Namespace("manthan:", "tiny-1"), 4000.0, 100, 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


class Player:
    """An engine's part: its sessions' thread, and the stores of two ranks."""

    def __init__(
        self, server: RedisServer, name: str, namespace: Namespace = HERE, sealer: Sealer | None = None
    ) -> None:
        self.config, self.namespace = RedisConfig(url=f"{server.url}?socket_timeout=0.5"), namespace
        facts, client = {"model": namespace.name, "engine": name}, connect(self.config)
        self.rung = threading.Event()
        self.circuit = Circuit()
        self.sessions = RedisSessions(client, self.circuit, namespace, RANKS, TTL_S, facts, self.rung.set, sealer)
        self.sessions.start()
        self.stores = [RedisTier(connect(self.config, 3), Circuit(), namespace, rank, TTL_S) for rank in range(RANKS)]

    def store(self, keys: Sequence[bytes], group: int = 0) -> None:
        for rank, store in enumerate(self.stores):
            bufs = {key: np.frombuffer((key + bytes([rank])) * 9, np.uint8)[:NBYTES] for key in keys}
            assert store.put_all(group, bufs) == {}

    def tell(self, session_id: str, keys: Sequence[bytes] | None, used: float | None = None, **fields: object) -> None:
        """keys: None if the session is forgotten."""
        if keys is None:
            self.sessions.tell([SessionRecord(session_id)], [])
            return
        blocks = [(0, key, depth) for depth, key in enumerate(keys)]
        used = time.time() if used is None else used
        said = {"state": "cold", "tokens": 16 * len(keys), **fields}
        self.sessions.tell([SessionRecord(session_id, said, used, blocks)], [])

    def ask(
        self,
        keys: Sequence[bytes],
        needed: Callable[[int], Sequence[tuple[int, bytes]]] | None = None,
        session_id: str = "nobody",
    ) -> LookupResult:
        self.rung.clear()
        assert self.sessions.look_up("r", session_id, 0, keys, needed)
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


def chain(text: str, count: int) -> list[bytes]:
    return [sha256(f"{text} {at}".encode()).digest() for at in range(count)]


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def hash_of(server: RedisServer, session_id: str, namespace: Namespace = HERE) -> dict[str, str]:
    return dict(server.client.hgetall(f"manthan:{{{namespace.name}}}:session:{session_id}"))


def left_ms(server: RedisServer, *keys: bytes) -> list[int]:
    """What a block has to live, on the rank where that is least."""
    with server.client as client, client.pipeline() as pipeline:
        for key in keys:
            for rank in range(RANKS):
                pipeline.pttl(HERE.block(0, key, rank))
        found = pipeline.execute()
    return [min(found[at : at + RANKS]) for at in range(0, len(found), RANKS)]


# -- lookups ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 700])
def test_another_engine_finds_what_one_has_stored(start: Start, count: int) -> None:
    keys = chain("a", count)
    start().store(keys)
    other = start("two")
    assert other.ask([*keys, *chain("b", 5)]) == LookupResult([RANKS * NBYTES] * count)
    assert other.ask(chain("b", 5)) == LookupResult([])


@pytest.mark.parametrize("count", [1, 17, 64, 700])
def test_another_engine_finds_which_of_them_are_the_session_s_own(start: Start, count: int) -> None:
    one, other, keys = start(), start("two"), chain("a", count)
    one.store(keys)
    one.tell("alice", keys, hashes=sample(keys))
    until(lambda: other.ask(keys, session_id="alice").sampled)
    own = other.ask(keys, session_id="alice").sampled
    assert len(own.split()) == min(count, SAMPLES)
    assert shared_blocks(own, [*keys, *chain("b", 3)]) == count
    assert count - count // SAMPLES - 1 <= shared_blocks(own, keys[:-1]) <= count - 1
    assert shared_blocks(own, chain("b", count)) == 0
    assert shared_blocks(own, []) == 0
    assert other.ask(keys, session_id="bob").sampled == ""


def test_a_block_that_a_rank_does_not_have_is_not_there(start: Start, server: RedisServer) -> None:
    player, keys = start(), chain("a", 6)
    player.store(keys)
    server.client.delete(HERE.block(0, keys[4], 1))
    assert player.ask(keys) == LookupResult([RANKS * NBYTES] * 4)


@pytest.mark.parametrize("count", [1, 20, 31, 32, 33, 150, 700])
def test_what_is_found_ends_before_the_first_hole(start: Start, server: RedisServer, count: int) -> None:
    player, keys = start(), chain("a", 800)
    player.store(keys)
    holes = {count, *random.Random(count).sample(range(count, 800), 20)}
    server.client.delete(*(HERE.block(0, keys[at], at % RANKS) for at in holes))
    assert player.ask(keys) == LookupResult([RANKS * NBYTES] * count)


def test_a_request_that_could_begin_waits_five_milliseconds_and_goes_on_without(
    start: Start, server: RedisServer
) -> None:
    player, engine, said = start(), Engine(), list[str]()
    observer = SimpleNamespace(looked_up=said.append)
    link = RedisLink(player.sessions, engine.manager, observer, None)  # type: ignore[arg-type]
    server.pause()
    link.look_up("r", "nobody", chain("a", 99), 10.0)
    assert [link.awaits("r", now) for now in (30.0, 30.0049, 30.0051, 30.0)] == [True, True, False, False]
    assert said == ["unanswered"]
    server.resume()


def test_the_deepest_place_with_all_that_other_groups_need_is_found(start: Start) -> None:
    player, keys = start(), chain("a", 100)
    player.store(keys)
    player.store(keys[20:41], group=1)

    def needed(count: int) -> list[tuple[int, bytes]]:
        return [(1, key) for key in keys[max(0, count - 3) : count]]

    assert player.ask(keys, needed).anchored == Anchored(41, [RANKS * NBYTES] * 3)
    assert player.ask(keys[:22], needed).anchored is None


def test_after_a_reset_nothing_of_before_is_found(start: Start) -> None:
    player, keys = start(), chain("a", 3)
    player.store(keys)
    name = player.sessions.reset()
    assert name.startswith(f"{HERE.name}-")
    assert player.ask(keys) == LookupResult([])


# -- sessions -----------------------------------------------------------------------------------------


def test_a_session_is_one_hash(start: Start, server: RedisServer) -> None:
    player = start()
    player.tell("alice", chain("a", 3), tenant="")
    until(lambda: hash_of(server, "alice"))
    assert hash_of(server, "alice") == {
        **{"id": "alice", "model": "tiny-1", "engine": "one"},
        **{"state": "cold", "tokens": "48", "tenant": ""},
    }
    assert 0 < server.client.ttl(HERE.session("alice")) <= TTL_S
    player.tell("alice", chain("a", 4), state="idle")
    until(lambda: hash_of(server, "alice")["tokens"] == "64")
    assert [name for name in server.client.keys("*") if "block" not in name] == ["manthan:{tiny-1}:session:alice"]


def test_two_models_and_two_tenants_with_one_id_keep_two_hashes(start: Start, server: RedisServer) -> None:
    other = Namespace("manthan:", "tiny-2")
    one, two = start("one"), start("two", other)
    one.tell("alice", chain("a", 1))
    two.tell("alice", chain("b", 2))
    one.tell("acme/alice", chain("c", 3), tenant="acme")
    one.tell("globex/alice", chain("d", 4), tenant="globex")
    until(lambda: len(server.client.keys("*:session:*")) == 4)
    found = [hash_of(server, "alice"), hash_of(server, "alice", other)]
    found += [hash_of(server, f"{tenant}/alice") for tenant in ("acme", "globex")]
    assert [one["tokens"] for one in found] == ["16", "32", "48", "64"]


def test_a_forgotten_session_s_hash_goes_unless_another_engine_has_it_now(start: Start, server: RedisServer) -> None:
    one, two = start("one"), start("two")
    one.tell("alice", chain("a", 1))
    one.tell("bob", chain("b", 1))
    until(lambda: hash_of(server, "bob"))
    two.tell("bob", chain("b", 2))
    until(lambda: hash_of(server, "bob")["engine"] == "two")
    one.tell("alice", None)
    one.tell("bob", None)
    until(lambda: not hash_of(server, "alice"))
    one.tell("carol", chain("c", 1))
    until(lambda: hash_of(server, "carol"))  # what was told before is done
    assert hash_of(server, "bob")["engine"] == "two"


def test_sealed_sessions_have_names_that_tell_nothing(start: Start, server: RedisServer, tmp_path: object) -> None:
    path = write_keys(tmp_path / "keys", "k2", "k1")  # type: ignore[operator]
    sealer = Sealer(keys_of(SealingConfig(key_file=str(path))), HERE.name)
    player = start("one", HERE, sealer)
    player.tell("alice", chain("a", 1))
    until(lambda: server.client.keys("*:session:*"))
    assert hash_of(server, sealer.name("alice"))["tokens"] == "16"
    assert "alice" not in str(hash_of(server, sealer.name("alice"))) + str(server.client.keys("*"))


# -- times to live ------------------------------------------------------------------------------------


def test_times_to_live_fall_along_a_session_and_are_renewed_when_it_is_used(start: Start, server: RedisServer) -> None:
    player, keys = start(), chain("a", 300)
    player.store(keys)
    assert 0 < left_ms(server, keys[0])[0] <= FIRST_TTL * TTL_S * 1000
    player.tell("alice", keys)
    until(lambda: left_ms(server, keys[-1])[0] > FIRST_TTL * TTL_S * 1000)
    left = left_ms(server, *keys)
    assert left == sorted(left, reverse=True)
    assert left[-1] > (1 - FALL) * TTL_S * 1000 - 60_000
    assert lives_s(TTL_S, 0) == TTL_S
    player.tell("alice", [*keys, *chain("b", 1)], used=time.time() + 500)
    until(lambda: left_ms(server, keys[0])[0] > TTL_S * 1000)


def test_a_server_that_is_full_evicts_tails_first(tmp_path_factory: pytest.TempPathFactory) -> None:
    flags = ("--maxmemory-policy", "volatile-ttl", "--maxmemory-samples", "64")
    for server in running(tmp_path_factory.mktemp("full"), *flags):
        player, keys = Player(server, "one"), chain("a", 400)
        player.store(keys)
        player.tell("alice", keys)
        until(lambda: left_ms(server, keys[-1])[0] > FIRST_TTL * TTL_S * 1000)  # noqa: B023
        server.client.config_set("maxmemory", server.client.info("memory")["used_memory"] - 40_000)
        server.client.set("other", "x")
        server.client.config_set("maxmemory", 0)
        there = [left > 0 for left in left_ms(server, *keys)]
        assert 0 < there.count(False) < 400
        assert all(there[:200])
        assert hash_of(server, "alice")
        player.close()


def test_what_is_released_is_deleted_for_all_engines_and_what_only_makes_room_stays(
    start: Start, server: RedisServer
) -> None:
    one, other, keys = start(), start("two"), chain("a", 6)
    one.store(keys)
    assert other.ask(keys) == LookupResult([RANKS * NBYTES] * 6)
    causes = [DropCause.BUDGET, DropCause.RELEASED, DropCause.EXPIRED, DropCause.FAILED, DropCause.ABANDONED]
    one.sessions.tell([], [Drop(0, [key], cause) for key, cause in zip(keys, causes, strict=False)])
    until(lambda: not any(left > 0 for left in left_ms(server, *keys[1:5])))
    assert sum(server.client.exists(HERE.block(0, key, rank)) for key in keys for rank in range(RANKS)) == 2 * RANKS
    assert other.ask(keys) == LookupResult([RANKS * NBYTES]), "the other engine computes the rest again"


def test_what_is_released_while_redis_is_down_is_deleted_later_unless_it_is_stored_again(
    start: Start, server: RedisServer
) -> None:
    player, keys = start(), chain("a", 3)
    player.store(keys)
    server.pause()
    assert player.ask(keys) == LookupResult()
    player.sessions.tell([], [Drop(0, keys[:2], DropCause.RELEASED), Drop(0, keys[2:], DropCause.FAILED)])
    player.tell("alice", keys[1:2])
    server.resume()
    until(lambda: left_ms(server, keys[0])[0] < 0)
    assert all(left > 0 for left in left_ms(server, *keys[1:]))


# -- a server that does not answer --------------------------------------------------------------------


def test_a_server_that_hangs_costs_one_timeout_and_is_told_later(start: Start, server: RedisServer) -> None:
    player, keys = start(), chain("a", 3)
    player.store(keys)
    server.pause()
    try:
        assert player.ask(keys) == LookupResult()
        assert not player.sessions.is_up
        assert not player.sessions.look_up("r", "nobody", 0, keys)
        player.tell("alice", keys)
    finally:
        server.resume()
    until(lambda: hash_of(server, "alice"))
    assert player.ask(keys) == LookupResult([RANKS * NBYTES] * 3)


def test_a_server_that_is_full_and_evicts_nothing_is_told_later(start: Start, server: RedisServer) -> None:
    player = start()
    server.client.config_set("maxmemory", 1)
    player.tell("alice", chain("a", 1))
    time.sleep(0.1)
    assert player.sessions.is_up
    assert not hash_of(server, "alice")
    server.client.config_set("maxmemory", 0)
    until(lambda: hash_of(server, "alice"))
