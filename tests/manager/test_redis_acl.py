"""The least that a Redis user of ours must be allowed. docs/redis.md has these lines.

From Redis 7.2 on the client also sends CLIENT SETINFO, and goes on if that is refused; `+client|setinfo`, which 7.0
does not know, keeps it out of the ACL log.
"""

from collections.abc import Callable, Iterator

import pytest
import redis
from redis_cluster import cluster_url, running_cluster
from redis_data import GROUP, Engine, ids, keys_of, record, redis_config, rooms
from redis_server import RedisServer, running
from typer.testing import CliRunner

from manthan.manager.cli import app
from manthan.manager.config.model import RedisConfig
from manthan.manager.config.resolve import ConfigError
from manthan.manager.stores.cold_store import ColdStoreError
from manthan.manager.stores.redis.client import check, connect
from manthan.manager.stores.redis.index import RedisIndex
from manthan.manager.stores.redis.schema import Namespace, member

PASSWORD = "not-for-the-log"
ENGINE_ACL = (
    "ACL SETUSER manthan on >PASSWORD ~manthan:* "
    "+client|setname +select +info +time +eval +eval_ro "
    "+get +set +exists +expireat +unlink +del +ttl +strlen "
    "+hget +hmget +hgetall +hset +hsetnx +hdel +hexists +hincrby +hlen "
    "+llen +lrange +rpush "
    "+sadd +smembers +srem "
    "+zadd +zcard +zcount +zmscore +zrange +zrangebyscore +zrem +zscore"
)
INSPECT_ACL = (
    "ACL SETUSER manthan-inspect on >PASSWORD %R~manthan:* "
    "+client|setname +select +info +time +eval_ro "
    "+strlen +ttl +hget +hgetall +llen +lrange +smembers +zcount +zrange +zscore"
)
CLUSTER_TOO = "+cluster|slots +command"
"""What a client asks a Redis Cluster besides."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("acl"))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A cluster of one."""
    with running_cluster(tmp_path_factory.mktemp("cluster"), count=1) as [node]:
        yield node


@pytest.fixture(autouse=True)
def clean(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANTHAN_REDIS_PASSWORD", PASSWORD)
    server.client.flushall()


def allow(server: RedisServer, acl: str, without: str = "") -> str:
    """Make the user of that line, less one command; returns its name. What was refused before is forgotten."""
    words = acl.replace("PASSWORD", PASSWORD).split()
    assert f"+{without}" in words or not without
    with server.client as client:
        client.execute_command("ACL", "DELUSER", words[2])
        client.execute_command(*(word for word in words if word != f"+{without}"))
        client.execute_command("ACL", "LOG", "RESET")
    return words[2]


def refused(server: RedisServer) -> set[str]:
    """What the server would not let a user do, but for CLIENT SETINFO, which newer servers know; see above."""
    return {entry["object"] for entry in server.client.acl_log()} - {"client|setinfo"}


def commands_of(acl: str) -> list[str]:
    return [word[1:] for word in acl.split() if word.startswith("+")]


def engine_config(server: RedisServer) -> RedisConfig:
    return redis_config(server.url.removesuffix("0") + "1", username="manthan")


def everything(config: RedisConfig) -> None:
    """All that engines do, and an operator who looks."""
    check(connect(config), config)
    mine, theirs = Engine(config, owner="engine-a"), Engine(config, owner="engine-b")
    keys = keys_of("a", 4)
    gone = Namespace("manthan:", "nobodys-any-more")
    RedisIndex(mine.client, mine.index._circuit, gone, "engine-a", mine.ranks, mine.budget, 9).attach(mine.facts, "x")
    mine.index._pipelined([("DEL", gone.key("info"))])
    assert mine.attach() == mine.index.incarnation()
    mine.save("alice", keys)
    assert len(theirs.index.look_up(GROUP, keys)) == 4
    assert all(buf is not None for buf in theirs.stores[1].read(GROUP, keys))
    theirs.put(keys)  # stored already: looked at, and not written again
    assert [stranger.nbytes for stranger in theirs.index.strangers(9)] == [8000]
    assert theirs.index.save(record("alice", keys[:2]), theirs.facts).verdict == "stale"
    assert mine.index.save(record("alice", keys[:3]), mine.facts).verdict == "saved"
    mine.put(keys_of("b", 2))
    mine.index.release(ids(keys_of("b", 2)))
    look(config)
    lose_a_size(mine, keys[3])
    expire(mine)
    mine.save("bob", keys)
    mine.index.leave(["alice", "bob"])
    assert mine.index.collect().used == 0


def lose_a_size(engine: Engine, key: bytes) -> None:
    """As if the server had evicted it: the books are made up again without the block."""
    name = engine.index.namespace.key("sizes")
    engine.index._pipelined([("HDEL", name, member((GROUP, key)))])
    assert engine.index.collect().used == 6000


def expire(engine: Engine) -> None:
    """A session whose time is over, and a block that nobody went on to save, are collected."""
    index = engine.index
    short = RedisIndex(
        engine.client, index._circuit, index.namespace, "engine-a", engine.ranks, engine.budget, 0, pending_s=-1
    )
    short.reserve(rooms(keys_of("c", 1)))
    engine.put(keys_of("d", 1))
    short.save(record("carol", keys_of("d", 1)), engine.facts)
    assert short.collect().expired == ["carol"]


def fill(config: RedisConfig) -> None:
    """Save a session as the default user, who has no password."""
    engine = Engine(config.model_copy(update={"password_env": "NONE"}))
    engine.attach()
    engine.save("alice", keys_of("a", 4))


def look(config: RedisConfig) -> None:
    for args in ([], ["--session", "alice"], ["--json"]):
        result = CliRunner().invoke(app, ["inspect", config.url, "--username", config.username, *args])
        assert (result.exit_code, result.stderr) == (0, "")
        assert "alice" in result.stdout
    result = CliRunner().invoke(app, ["inspect", config.url, "--username", config.username, "--check"])
    assert (result.exit_code, result.stderr) == (0, "")


def test_an_engine_needs_no_more(server: RedisServer) -> None:
    allow(server, ENGINE_ACL)
    everything(engine_config(server))
    assert refused(server) == set()


@pytest.mark.parametrize("command", commands_of(ENGINE_ACL))
def test_an_engine_needs_each_of_its_commands(server: RedisServer, command: str) -> None:
    allow(server, ENGINE_ACL, without=command)
    assert fails(everything, engine_config(server))
    assert refused(server) == {command}


def fails(what: Callable[[RedisConfig], None], config: RedisConfig) -> bool:
    try:
        what(config)
    except (ColdStoreError, ConfigError, AssertionError):
        return True
    return False


def test_an_engine_reaches_nothing_but_its_prefix(server: RedisServer) -> None:
    allow(server, ENGINE_ACL)
    client = connect(engine_config(server))
    for command in (("GET", "other"), ("SET", "other", "x"), ("EVAL", "return redis.call('GET', 'other')", "0")):
        with pytest.raises(redis.exceptions.RedisError, match=r"permissions|can't access"):
            client.execute_command(*command)


@pytest.mark.parametrize(("acl", "what"), [(ENGINE_ACL, everything), (INSPECT_ACL, look)], ids=["engine", "inspect"])
def test_a_cluster_needs_two_more(node: RedisServer, acl: str, what: Callable[[RedisConfig], None]) -> None:
    config = redis_config(cluster_url([node]), username=allow(node, f"{acl} {CLUSTER_TOO}"))
    fill(redis_config(config.url))
    what(config)
    assert refused(node) == set()
    for command in commands_of(CLUSTER_TOO):
        allow(node, f"{acl} {CLUSTER_TOO}", without=command)
        assert fails(what, config)
        assert refused(node) == {command}


# -- manthan inspect ----------------------------------------------------------------------------------


@pytest.fixture
def filled(server: RedisServer) -> RedisConfig:
    """As the user that only looks, on a server with a session."""
    url = server.url.removesuffix("0") + "1"
    fill(redis_config(url))
    return redis_config(url, username="manthan-inspect")


def test_inspect_needs_no_more(server: RedisServer, filled: RedisConfig) -> None:
    allow(server, INSPECT_ACL)
    look(filled)
    assert refused(server) == set()


@pytest.mark.parametrize("command", commands_of(INSPECT_ACL))
def test_inspect_needs_each_of_its_commands(server: RedisServer, filled: RedisConfig, command: str) -> None:
    allow(server, INSPECT_ACL, without=command)
    assert fails(look, filled)
    assert refused(server) == {command}


def test_who_may_inspect_can_neither_write_nor_read_codes(server: RedisServer, filled: RedisConfig) -> None:
    allow(server, INSPECT_ACL + " +@all")
    client = connect(filled)
    block = client.keys("manthan:*:block:*")[0]
    client.get(block)
    for command in (("SET", "manthan:x", "x"), ("DEL", block), ("EXPIRE", block, "1"), ("GET", "other")):
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command)
    allow(server, INSPECT_ACL)
    with pytest.raises(redis.exceptions.NoPermissionError):
        connect(filled).get(block)
