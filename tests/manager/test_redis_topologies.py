"""Sentinel and Redis Cluster, with real servers."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis_cluster import cluster_url, running_cluster, wait_until_ok
from redis_connections import PASSWORD, assert_threads_get_through, reaches, refusal
from redis_data import GROUP, Engine, blocks_of, ids, keys_of, record, redis_config, rooms
from redis_sentinel import Sentinel
from redis_server import RedisServer, running

from manthan.manager.stores.redis.client import StoreDownError, check, connect
from manthan.manager.stores.redis.index import Collected, Grant, Reserved


def until_up(what: Callable[[], int]) -> int:
    """What it returns, once the store is up again."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            return what()
        except StoreDownError:
            time.sleep(0.1)
    raise AssertionError("the store did not come back")


# -- Sentinel -----------------------------------------------------------------------------------------


@pytest.fixture
def master(tmp_path: Path) -> Iterator[RedisServer]:
    yield from running(tmp_path)


@pytest.fixture
def sentinel(tmp_path: Path, master: RedisServer) -> Iterator[Sentinel]:
    with Sentinel(tmp_path, master) as server:
        yield server


def test_sentinel_says_where_the_master_is(master: RedisServer, sentinel: Sentinel) -> None:
    assert reaches(redis_config(sentinel.url), master)
    assert reaches(redis_config(sentinel.url.removesuffix("0") + "4"), master, db=4)


def test_the_first_sentinel_that_answers_is_enough(master: RedisServer, sentinel: Sentinel) -> None:
    url = sentinel.url.replace("://", "://127.0.0.1:1,")
    assert reaches(redis_config(url), master)


def test_the_user_is_the_masters_not_the_sentinels(
    master: RedisServer, sentinel: Sentinel, monkeypatch: pytest.MonkeyPatch
) -> None:
    master.client.execute_command("ACL", "SETUSER", "manthan", "on", f">{PASSWORD}", "~*", "+@all")
    monkeypatch.setenv("MANTHAN_REDIS_PASSWORD", PASSWORD)
    assert reaches(redis_config(sentinel.url, username="manthan"), master)
    monkeypatch.setenv("MANTHAN_REDIS_PASSWORD", f"{PASSWORD}-but-wrong")
    assert "refuses user manthan" in refusal(redis_config(sentinel.url, username="manthan"))


def test_a_service_that_sentinel_does_not_know(sentinel: Sentinel) -> None:
    url = sentinel.url.replace("mymaster", "other")
    assert refusal(redis_config(url)).startswith(f"Redis at {url} cannot be used (No master found for 'other'")


def test_a_session_goes_through_sentinel_and_back(sentinel: Sentinel) -> None:
    assert_round_trip(sentinel.url)


def test_no_thread_is_refused_a_connection_behind_sentinel(sentinel: Sentinel) -> None:
    assert_threads_get_through(connect(redis_config(sentinel.url, connections=2)))


def test_a_paused_sentinel_and_a_paused_master_cost_their_timeouts(master: RedisServer, sentinel: Sentinel) -> None:
    for server in (sentinel, master):
        engine = Engine(redis_config(sentinel.url, timeout_s=0.2))
        server.pause()
        with pytest.raises(StoreDownError):
            engine.attach()
        server.resume()
        assert until_up(lambda engine=engine: len(engine.attach())) > 0


# -- Cluster ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture
def cluster(nodes: list[RedisServer]) -> list[RedisServer]:
    """Three empty nodes, which stay up."""
    for node in nodes:
        node.client.flushall()
    return nodes


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[list[RedisServer]]:
    """Three nodes to be stopped."""
    with running_cluster(tmp_path) as nodes:
        yield nodes


def test_a_session_goes_through_a_cluster_and_back(cluster: list[RedisServer]) -> None:
    config = redis_config(cluster_url(cluster))
    check(connect(config), config)
    assert_round_trip(config.url)


def assert_round_trip(url: str) -> None:
    """All that an engine asks of its books and of its two ranks' stores, by two engines."""
    mine = Engine(redis_config(url), owner="engine-a")
    theirs = Engine(redis_config(url), owner="engine-b")
    keys = keys_of("a", 40)
    assert mine.attach() == theirs.attach() == mine.index.incarnation() == "incarnation"

    assert mine.index.reserve(rooms(keys)) == ([Reserved(Grant.GRANTED)] * 40, 100_000)
    assert theirs.index.look_up(GROUP, keys) == []
    for rank, store in enumerate(mine.stores):
        assert store.put_all(GROUP, blocks_of(keys, rank)) == {}
    assert mine.index.save(record("alice", keys), mine.facts) == ("saved", [], [])

    assert theirs.index.look_up(GROUP, keys_of("a", 50)) == [2000] * 40
    for rank, store in enumerate(theirs.stores):
        found = dict(zip(keys, store.read(GROUP, keys), strict=True))
        assert {key: bytes(buf) for key, buf in found.items() if buf is not None} == {
            key: bytes(buf) for key, buf in blocks_of(keys, rank).items()
        }
    assert theirs.index.reserve(rooms(keys[:3])) == ([Reserved(Grant.STORED, 2000)] * 3, 80_000)
    assert [(s.session_id, s.nbytes) for s in theirs.index.strangers(9)] == [("alice", 80_000)]
    assert mine.index.strangers(9) == []
    assert mine.index.collect() == Collected([], 80_000)

    mine.put(keys_of("b", 5))
    mine.index.release(ids(keys_of("b", 5)))
    assert list(mine.stores[1].read(GROUP, keys_of("b", 5))) == [None] * 5
    assert not theirs.index.forget("alice")
    mine.index.leave(["alice"])
    assert mine.index.collect() == Collected([], 0)
    assert [list(store.read(GROUP, keys)) for store in mine.stores] == [[None] * 40] * 2


def test_the_blocks_of_a_session_are_spread_over_the_nodes(cluster: list[RedisServer]) -> None:
    engine = Engine(redis_config(cluster_url(cluster)))
    engine.attach()
    engine.save("alice", keys_of("a", 40))
    counts = [len(node.client.keys("manthan:tiny*:block:*")) for node in cluster]
    assert sum(counts) == 80
    assert all(counts)


def test_one_node_of_a_cluster_is_enough_to_find_the_others(cluster: list[RedisServer]) -> None:
    assert_round_trip(cluster_url(cluster[:1]))


def test_a_wrong_password_is_told_the_same_of_a_cluster(
    cluster: list[RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANTHAN_REDIS_PASSWORD", PASSWORD)
    sentence = refusal(redis_config(cluster_url(cluster), username="manthan"))
    assert "refuses user manthan (invalid username-password pair or user is disabled.)" in sentence


def test_no_thread_is_refused_a_connection_to_a_cluster(cluster: list[RedisServer]) -> None:
    assert_threads_get_through(connect(redis_config(cluster_url(cluster), connections=2)))


def test_a_cluster_may_be_down_when_an_engine_starts(mortal: list[RedisServer]) -> None:
    for node in mortal:
        node.kill()
    engine = Engine(redis_config(cluster_url(mortal)))
    with pytest.raises(StoreDownError):
        engine.attach()
    assert engine.stores[0].put_all(GROUP, blocks_of(keys_of("a", 1), 0)) == {keys_of("a", 1)[0]: "store_down"}
    for node in mortal:
        node.start()
    wait_until_ok(mortal)
    assert until_up(lambda: len(engine.attach())) > 0


def test_a_cluster_that_goes_down_is_a_store_that_is_down(mortal: list[RedisServer]) -> None:
    engine = Engine(redis_config(cluster_url(mortal), timeout_s=0.2))
    engine.attach()
    engine.save("alice", keys_of("a", 3))
    for node in mortal:
        node.pause()
    with pytest.raises(StoreDownError):
        engine.index.look_up(GROUP, keys_of("a", 3))
    with pytest.raises(StoreDownError):
        list(engine.stores[0].read(GROUP, keys_of("a", 3)))
    for node in mortal:
        node.resume()
    assert until_up(lambda: engine.index.look_up(GROUP, keys_of("a", 3))) == [2000] * 3
    for node in mortal:
        node.kill()
    with pytest.raises(StoreDownError):
        engine.index.look_up(GROUP, keys_of("a", 3))
