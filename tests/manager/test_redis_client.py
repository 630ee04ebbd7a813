"""Connections to real Redis servers: every kind of URL, who is let in, and what is said where that fails."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from certificates import Authority
from redis_connections import PASSWORD, assert_threads_get_through, reaches, refusal
from redis_data import GROUP, Engine, blocks_of, keys_of, record, redis_config, rooms
from redis_server import RedisServer, free_port, running

from manthan.manager.config.resolve import ConfigError
from manthan.manager.stores.redis.client import (
    RedisUnreachableError,
    StoreDownError,
    StoreOomError,
    check,
    connect,
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    yield from running(tmp_path)


@pytest.mark.parametrize("db", ["", "/", "/0", "/3"])
def test_a_url_names_host_port_and_database(server: RedisServer, db: str) -> None:
    config = redis_config(f"redis://127.0.0.1:{server.port}{db}")
    assert reaches(config, server, db=int(db.strip("/") or 0))


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    for server in running(tmp_path, "--unixsocket", str(path)):
        assert reaches(redis_config(f"unix://{path}"), server)


def test_connections_say_whose_they_are(server: RedisServer) -> None:
    client = connect(redis_config(server.url))
    client.ping()
    assert "manthan" in [other["name"] for other in server.client.client_list()]


def test_more_threads_than_connections_wait_for_each_other(server: RedisServer) -> None:
    client = connect(redis_config(server.url, connections=2))
    assert_threads_get_through(client)
    assert len(client.connection_pool._connections) == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://127.0.0.1:6379/one", "redis.url must end in the number of a database, such as /0: "),
        ("redis+sentinel://127.0.0.1/mymaster/one", "redis.url must end in the number of a database, such as /0: "),
        ("redis+sentinel://127.0.0.1", "redis.url must end in the name of the Sentinel's service, as in /mymaster/0: "),
        ("redis://127.0.0.1:http", "redis.url: '127.0.0.1:http' must be HOST:PORT, separated by commas if several"),
        ("redis://127.0.0.1:99999", "redis.url: '127.0.0.1:99999' must be HOST:PORT, separated by commas if several"),
        ("redis://one..two", "redis.url: 'one..two' must be HOST:PORT, separated by commas if several"),
        ("redis+cluster://one,,two", "redis.url: 'one,,two' must be HOST:PORT, separated by commas if several"),
        ("redis://one,two", "redis.url names several servers, which takes redis+cluster:// or redis+sentinel://: "),
    ],
)
def test_addresses_that_are_none_are_refused_without_a_connection(url: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        connect(redis_config(url))
    assert str(error.value) == expected + (url if expected.endswith(": ") else "")


# -- who is let in ------------------------------------------------------------------------------------


@pytest.fixture
def guarded(server: RedisServer) -> RedisServer:
    """A server with a user for us, and a default user with the same password."""
    with server.client as client:
        for user in ("manthan", "default"):
            client.execute_command("ACL", "SETUSER", user, "on", "resetpass", f">{PASSWORD}", "~*", "+@all")
    return server


@pytest.mark.parametrize("username", ["manthan", ""])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_the_password_comes_from_a_file(guarded: RedisServer, tmp_path: Path, username: str, end: str) -> None:
    path = tmp_path / "password"
    path.write_bytes(f"{PASSWORD}{end}".encode())
    config = redis_config(guarded.url, username=username, password_file=str(path))
    assert reaches(config, guarded, password=PASSWORD)
    assert connect(config).acl_whoami() == (username or "default")


@pytest.mark.parametrize(("variable", "flags"), [("MANTHAN_REDIS_PASSWORD", {}), ("OURS", {"password_env": "OURS"})])
def test_the_password_comes_from_the_environment(
    guarded: RedisServer, monkeypatch: pytest.MonkeyPatch, variable: str, flags: dict[str, str]
) -> None:
    monkeypatch.setenv(variable, PASSWORD)
    assert reaches(redis_config(guarded.url, username="manthan", **flags), guarded, password=PASSWORD)


@pytest.mark.parametrize(("username", "who"), [("manthan", "user manthan"), ("", "the default user")])
def test_a_wrong_password_is_answered_with_where_it_comes_from(
    guarded: RedisServer, monkeypatch: pytest.MonkeyPatch, username: str, who: str
) -> None:
    monkeypatch.setenv("MANTHAN_REDIS_PASSWORD", f"{PASSWORD}-but-wrong")
    assert refusal(redis_config(guarded.url, username=username)) == (
        f"Redis at {guarded.url} refuses {who} (invalid username-password pair or user is disabled.): set "
        "redis.username, and the password in redis.password_file or in the environment variable MANTHAN_REDIS_PASSWORD."
    )


def test_no_password_where_one_is_needed(guarded: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANTHAN_REDIS_PASSWORD", raising=False)
    assert "refuses the default user (Authentication required.)" in refusal(redis_config(guarded.url))


def test_a_password_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "password"
    config = redis_config("redis://127.0.0.1", password_file=str(path))
    assert refusal(config) == f"redis.password_file: {path} cannot be read: No such file or directory"
    path.write_bytes(b"\xff\xfe")
    assert refusal(config) == f"redis.password_file: {path} cannot be read: it is not UTF-8"


def test_a_user_without_rights_is_answered_with_the_acl(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.client.execute_command("ACL", "SETUSER", "weak", "on", f">{PASSWORD}", "+client|setname")
    monkeypatch.setenv("MANTHAN_REDIS_PASSWORD", PASSWORD)
    sentence = refusal(redis_config(server.url, username="weak"))
    assert sentence.startswith(f"Redis at {server.url} does not grant what is needed (")
    assert sentence.endswith("): see the ACL in docs/redis.md.")


# -- TLS ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ca")


@pytest.fixture(params=["no", "yes"], ids=["server only", "client too"])
def tls(tmp_path: Path, authority: Authority, request: pytest.FixtureRequest) -> Iterator[tuple[RedisServer, str]]:
    """A server that may want certificates of its clients, and its URL."""
    port, files = free_port(), authority.sign("server")
    flags = ["--tls-port", str(port), "--tls-auth-clients", request.param, "--tls-ca-cert-file", authority.files.cert]
    for server in running(tmp_path, *flags, "--tls-cert-file", files.cert, "--tls-key-file", files.key):
        yield server, f"rediss://localhost:{port}/0"


def test_tls_with_our_own_authority(tls: tuple[RedisServer, str], authority: Authority) -> None:
    server, url = tls
    mine = authority.sign("client")
    config = redis_config(url, tls_ca_file=authority.files.cert, tls_cert_file=mine.cert, tls_key_file=mine.key)
    assert reaches(config, server)
    server.client.config_set("tls-auth-clients", "no")
    assert reaches(redis_config(url, tls_ca_file=authority.files.cert), server)


def test_tls_without_a_certificate_where_one_is_wanted(tls: tuple[RedisServer, str], authority: Authority) -> None:
    server, url = tls
    server.client.config_set("tls-auth-clients", "yes")
    assert f"Redis at {url} cannot be used (" in refusal(redis_config(url, tls_ca_file=authority.files.cert))


def test_tls_with_an_authority_that_we_do_not_trust(tls: tuple[RedisServer, str], tmp_path: Path) -> None:
    _, url = tls
    other = Authority(tmp_path, "other")
    for config in (redis_config(url, tls_ca_file=other.files.cert), redis_config(url)):
        sentence = refusal(config)
        assert f"Redis at {url} cannot be used (" in sentence
        assert "certificate verify failed" in sentence


@pytest.mark.parametrize("key", ["tls_ca_file", "tls_cert_file", "tls_key_file"])
def test_tls_files_that_cannot_be_read(key: str) -> None:
    config = redis_config("rediss://127.0.0.1", **{key: "/none.pem"})
    assert refusal(config) == f"redis.{key}: /none.pem cannot be read"


# -- servers that do not serve ------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "redis+sentinel"])
def test_a_server_that_is_not_there(scheme: str) -> None:
    url = f"{scheme}://127.0.0.1:{free_port()}" + ("/mymaster" if "sentinel" in scheme else "")
    config = redis_config(url)
    with pytest.raises(RedisUnreachableError) as error:
        check(connect(config), config)
    assert error.value.what in str(error.value)
    assert refusal(config).startswith(f"Redis at {url} cannot be used (")
    assert refusal(config).endswith(
        "): correct redis.url, start the server, or set redis.required to false to serve without it until it answers."
    )


def test_something_else_on_that_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1000)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        config = redis_config(f"redis://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(RedisUnreachableError):
            check(connect(config), config)


def test_a_server_that_is_paused_costs_its_timeouts_and_not_more(server: RedisServer) -> None:
    engine = Engine(redis_config(server.url, timeout_s=0.2))
    engine.attach()
    engine.save("alice", keys_of("a", 3))
    server.pause()
    with pytest.raises(StoreDownError):
        engine.index.look_up(GROUP, keys_of("a", 3))
    with pytest.raises(StoreDownError):
        list(engine.stores[0].read(GROUP, keys_of("a", 3)))
    with pytest.raises(RedisUnreachableError):
        check(connect(engine.config), engine.config)
    server.resume()
    assert Engine(engine.config).index.look_up(GROUP, keys_of("a", 3)) == [2000] * 3


@pytest.mark.parametrize(("version", "serves"), [("6.2.14", False), ("7.0.0", True), ("10.0.0", True)])
def test_a_server_that_is_too_old(version: str, serves: bool) -> None:
    class Server:
        def info(self, section: str) -> dict[str, str]:
            return {"redis_version": version}

    config = redis_config("redis://127.0.0.1:6379")
    if serves:
        check(cast(Any, Server()), config)
    else:
        with pytest.raises(ConfigError) as error:
            check(cast(Any, Server()), config)
        assert str(error.value) == f"Redis at {config.url} has version 6.2.14: 7.0 or newer is needed."


def test_a_server_whose_memory_is_full_takes_what_makes_room_or_takes_none(server: RedisServer) -> None:
    engine = Engine(redis_config(server.url))
    engine.attach()
    for name in ("alice", "bob"):
        engine.save(name, keys_of(name, 20))
    engine.put(keys_of("carol", 5))
    server.client.config_set("maxmemory", 1)

    keys = keys_of("dave", 3)
    assert engine.stores[0].put_all(GROUP, blocks_of(keys, 0)) == dict.fromkeys(keys, "store_oom")
    with pytest.raises(StoreOomError):
        engine.index.reserve(rooms(keys))
    assert engine.index.forget("alice")
    assert engine.index.save(record("carol", keys_of("carol", 5)), engine.facts) == ("saved", [], [])
    assert engine.index.save(record("bob", keys_of("bob", 5)), engine.facts) == ("saved", [], [])
    found = [engine.index.look_up(GROUP, keys_of(name, 20)) for name in ("alice", "bob", "carol")]
    assert list(map(len, found)) == [0, 5, 5]
    assert engine.index.collect().used == 20_000
