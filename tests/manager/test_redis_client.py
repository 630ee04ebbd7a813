"""The client of Redis: URLs, connections, what start-up says of a server, and the circuit breaker."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from loaded import load_config
from redis import exceptions
from redis_server import RedisServer, running

from manthan.manager.config.model import ConfigError, RedisConfig
from manthan.manager.tiers import redis as redis_tier
from manthan.manager.tiers.redis import (
    BREAK_FIRST_S,
    BREAK_MOST_S,
    Circuit,
    RedisUnreachableError,
    check,
    connect,
)
from manthan.manager.tiers.tier import TierError


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    yield from running(tmp_path)


@pytest.mark.parametrize(
    "url", ["redis://h", "redis://h:7/3", "rediss://user@h:7/0?ssl_ca_certs=/ca.pem", "unix:///run/redis.sock"]
)
def test_urls_that_are_good(url: str) -> None:
    assert connect(load_config(env={}, flags={"tiers.redis.url": url}).tiers.redis).connection_pool is not None


@pytest.mark.parametrize(
    "url",
    [
        "h:6379",
        "http://h",
        "redis://",
        "redis://u:secret@h",
        "redis://h?password=secret",
        "redis://h?pass%77ord=secret",
        "redis://h:x",
        "unix://",
    ],
)
def test_urls_that_are_refused_without_showing_a_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^argument: tiers.redis.url must be redis://USER@HOST:PORT/DB") as raised:
        load_config(env={}, flags={"tiers.redis.url": url})
    assert "secret" not in str(raised.value)


def test_an_option_that_redis_py_does_not_have() -> None:
    config = RedisConfig(url="redis://127.0.0.1:1?tls=yes")
    with pytest.raises(ConfigError, match="which redis-py does not take"):
        check(connect(config), config)


@pytest.mark.parametrize(("options", "seconds"), [("", 2.0), ("?socket_timeout=0.5", 0.5)])
def test_a_command_ends_within_two_seconds_unless_the_url_has_another_time(options: str, seconds: float) -> None:
    pool = connect(RedisConfig(url=f"redis://127.0.0.1:1{options}")).connection_pool
    assert pool.timeout == seconds
    assert {pool.connection_kwargs[name] for name in ("socket_timeout", "socket_connect_timeout")} == {seconds}


def test_a_user_and_a_password(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.client.execute_command("ACL", "SETUSER", "manthan", "on", ">hush", "~manthan:*", "+@all")
    config = RedisConfig(url=server.url.replace("//", "//manthan@"))
    with pytest.raises(ConfigError, match=r"refuses us .* environment variable MANTHAN_REDIS_PASSWORD"):
        check(connect(config), config)
    monkeypatch.setenv("MANTHAN_REDIS_PASSWORD", "hush")
    check(connect(config), config)
    assert connect(config).set("manthan:x", 1)


def test_start_up_says_if_a_full_server_would_refuse_writes(server: RedisServer) -> None:
    config = RedisConfig(url=server.url)
    assert check(connect(config), config) == "", "it is never full"
    server.client.config_set("maxmemory", 100 << 20)
    said = check(connect(config), config)
    assert said == (
        f"Redis at {server.url} has maxmemory-policy noeviction, so that it refuses writes when it is full: set it to "
        "volatile-ttl."
    )
    server.client.config_set("maxmemory-policy", "volatile-ttl")
    assert check(connect(config), config) == ""


def test_a_server_that_does_not_answer() -> None:
    config = RedisConfig(url="redis://127.0.0.1:1")
    with pytest.raises(RedisUnreachableError, match="does not answer"):
        check(connect(config), config)


# -- the circuit ------------------------------------------------------------------------------------------


class World:
    """A circuit, a clock that stands until it is moved, and jitter as it is set: 0 the shortest, 1 the longest."""

    def __init__(self) -> None:
        self.now, self.jitter, self.rings = 1000.0, 1.0, 0
        self.circuit = Circuit(self._wake)

    def _wake(self) -> None:
        self.rings += 1

    def uniform(self, low: float, high: float) -> float:
        return low + self.jitter * (high - low)

    def command(self, error: Exception | None = None) -> None:
        with self.circuit.guard():
            if error:
                raise error

    def fail(self) -> float:
        """Fail as soon as a command is let through; returns the wait until the next one."""
        self.now += self.circuit.wait_s
        with pytest.raises(TierError):
            self.command(exceptions.ConnectionError("refused"))
        return self.circuit.wait_s


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(redis_tier, "time", SimpleNamespace(monotonic=lambda: world.now))
    monkeypatch.setattr(redis_tier, "random", world)
    return world


def test_a_circuit_is_closed_at_first_and_after_an_answer(world: World) -> None:
    for _ in range(2):
        assert (world.circuit.is_up, world.circuit.wait_s, world.rings) == (True, 0, 0)
        world.command()


def test_after_a_failure_no_command_is_let_through_for_a_while(world: World) -> None:
    wait = world.fail()
    assert not world.circuit.is_up
    world.now += wait * 0.99
    with (
        pytest.raises(TierError, match=r"not asked for another .* ConnectionError: refused"),
        world.circuit.guard(),
    ):
        raise AssertionError("was let through")
    world.now += wait * 0.01
    world.command()
    assert world.circuit.is_up


@pytest.mark.parametrize(("jitter", "share"), [(1.0, 1.0), (0.0, 0.5)])
def test_the_wait_doubles_up_to_a_bound(world: World, jitter: float, share: float) -> None:
    world.jitter = jitter
    waits = [world.fail() for _ in range(7)]
    longest = [BREAK_FIRST_S * 2**at for at in range(4)] + [BREAK_MOST_S] * 3
    assert waits == pytest.approx([share * wait for wait in longest])


def test_a_server_that_is_down_for_hours_is_asked_as_seldom_as_one_that_is_down_for_a_minute(world: World) -> None:
    waits = [world.fail() for _ in range(1100)]
    assert waits[-1] == waits[10] > 0


def test_it_rings_when_the_state_changes_and_not_else(world: World) -> None:
    world.fail()
    world.fail()
    assert world.rings == 1
    world.now += 10
    world.command()
    world.command()
    assert world.rings == 2


@pytest.mark.parametrize(
    "error",
    [
        exceptions.ConnectionError("refused"),
        exceptions.TimeoutError("too slow"),
        exceptions.BusyLoadingError("loading"),
        exceptions.ResponseError("READONLY You can't write against a read only replica."),
        exceptions.NoPermissionError("this user has no permissions"),
        OSError("broken pipe"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_the_client_raises_is_a_store_that_is_down(world: World, error: Exception) -> None:
    with pytest.raises(TierError) as raised:
        world.command(error)
    assert str(raised.value) == str(error)
    assert raised.value.cause == "store_down"
    assert str(error) in world.circuit.last_error
    assert not world.circuit.is_up


def test_that_the_memory_is_full_is_an_answer(world: World) -> None:
    for rings in (0, 2):  # the second time after a failure
        with pytest.raises(TierError) as raised:
            world.command(exceptions.OutOfMemoryError("used memory > 'maxmemory'"))
        assert raised.value.cause == "store_full"
        assert (world.circuit.is_up, world.rings) == (True, rings)
        world.now += 0 if rings else world.fail()


def test_our_own_mistakes_are_not_the_stores(world: World) -> None:
    with pytest.raises(KeyError):
        world.command(KeyError("x"))
    assert world.circuit.is_up
