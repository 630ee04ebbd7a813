"""What `tiers.redis.url` may be, connections by it, and what start-up says of a server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from loaded import load_config
from redis_server import RedisServer, running

from manthan.manager.config.model import ConfigError, RedisConfig
from manthan.manager.tiers.redis_client import RedisUnreachableError, check, connect


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
    ["h:6379", "http://h", "redis://", "redis://u:secret@h", "redis://h?password=secret", "redis://h:x", "unix://"],
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
