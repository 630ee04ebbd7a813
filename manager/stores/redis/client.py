"""Connections to Redis: from a configuration to a client, and one sentence for whatever is wrong with it."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import SplitResult, urlsplit

import redis
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    OutOfMemoryError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.retry import Retry
from redis.sentinel import Sentinel

from manthan.manager.config.model import ConfigError, RedisConfig
from manthan.manager.stores.cold_store import ColdStoreError
from manthan.manager.work import STORE_DOWN

Client: TypeAlias = Any  # redis.Redis or RedisCluster: their annotations leave open what is bytes and what is str

NO_ANSWER = (RedisError, RedisClusterException, OSError)
"""What redis-py raises, and the sockets of a connection under construction."""
RETRIES = 1
"""After the first try of a command, with jitter between; then the circuit is open for a while."""
BREAK_FIRST_S, BREAK_MOST_S = 0.25, 4.0
OLDEST_VERSION = 7


class StoreDownError(ColdStoreError):
    """Redis did not answer, or answers that it cannot serve."""

    cause = STORE_DOWN


class StoreOomError(ColdStoreError):
    """Redis has reached its maxmemory."""

    cause = "store_oom"


class RedisUnreachableError(ConfigError):
    """A server that does not answer, or not as Redis does; `what` says so without advice to the operator."""

    def __init__(self, config: RedisConfig, error: Exception) -> None:
        self.what = f"Redis at {config.url} cannot be used ({error})"
        super().__init__(
            f"{self.what}: correct redis.url, start the server, or set redis.required to false to serve without it "
            "until it answers."
        )


class LazyCluster:
    """A cluster's client, made at the first use: it asks the nodes for the slots at once, and they may be down."""

    def __init__(self, make: Callable[[], RedisCluster]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._made: RedisCluster | None = None

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._make()
        return getattr(self._made, name)

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


class Circuit:
    """Lets no command through for a while after one has failed, so that a dead server costs one timeout and not
    thousands. The while doubles with each failure, up to BREAK_MOST_S, with jitter.

    ring: called, on whatever thread, when the state changes.
    """

    def __init__(self, ring: Callable[[], None] = lambda: None) -> None:
        self._ring = ring
        self._lock = threading.Lock()
        self._failures = 0
        self._until = 0.0
        self.last_error = ""

    @property
    def is_up(self) -> bool:
        """Whether the last command was answered."""
        return not self._failures

    @property
    def wait_s(self) -> float:
        """Seconds until the next command is let through."""
        return max(0.0, self._until - time.monotonic()) if self._failures else 0.0

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Run commands in this context; raises StoreDownError or StoreOomError for what redis-py raises."""
        if self.wait_s:
            raise StoreDownError(f"Redis is not asked for another {self.wait_s:.1f} s: {self.last_error}")
        try:
            yield
        except OutOfMemoryError as error:
            self._answered()
            raise StoreOomError(str(error)) from None
        except (NoPermissionError, ResponseError) as error:
            # Busy or loading, read only after a failover, a script killed: an answer, but not one that helps.
            self._failed(str(error))
            raise StoreDownError(str(error)) from None
        except NO_ANSWER as error:
            self._failed(f"{type(error).__name__}: {error}")
            raise StoreDownError(str(error)) from None
        self._answered()

    def _answered(self) -> None:
        with self._lock:
            changed, self._failures = bool(self._failures), 0
        if changed:
            self._ring()

    def _failed(self, why: str) -> None:
        with self._lock:
            changed = not self._failures
            self._failures += 1
            self.last_error = why
            longest = min(BREAK_MOST_S, BREAK_FIRST_S * 2 ** (self._failures - 1))
            self._until = time.monotonic() + longest * random.uniform(0.5, 1.0)
        if changed:
            self._ring()


def password(config: RedisConfig) -> str | None:
    """The password from redis.password_file, or else from the environment; None for none. Raises ConfigError."""
    if config.password_file:
        try:
            return Path(config.password_file).read_text(encoding="utf-8").strip("\r\n") or None
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"redis.password_file: {config.password_file} cannot be read: {why}") from None
    return os.environ.get(config.password_env) or None


def connect(config: RedisConfig, threads: int = 1) -> Client:
    """A client whose commands end within their timeouts. Nothing is sent yet.

    threads: how many will use it at once. Each has a connection of its own then, for one that waits for others' looks
    as if the server did not answer; one too many for the pool waits all the same. The pools for Sentinel and for a
    cluster's nodes would refuse it instead, so they have no limit but the threads. Raises ConfigError.
    """
    parts = urlsplit(config.url)
    scheme, _, kind = parts.scheme.partition("+")
    options: dict[str, Any] = {
        "username": config.username or None,
        "password": password(config),
        "socket_timeout": config.timeout_s,
        "socket_connect_timeout": config.timeout_s,
        "retry": Retry(ExponentialWithJitterBackoff(cap=config.timeout_s / 4, base=0.02), RETRIES),
        "client_name": "manthan",
        "protocol": 2,
    }
    if scheme == "rediss":
        options |= _tls(config)
    if kind == "cluster":
        nodes = [ClusterNode(host, port) for host, port in _addresses(parts, 6379)]
        return LazyCluster(lambda: RedisCluster(startup_nodes=nodes, **options))
    if kind == "sentinel":
        service, _, db = parts.path.strip("/").partition("/")
        if not service:
            raise ConfigError(
                f"redis.url must end in the name of the Sentinel's service, as in /mymaster/0: {config.url}"
            )
        plain = {name: value for name, value in options.items() if name.startswith(("socket_", "ssl", "protocol"))}
        plain["retry"] = Retry(NoBackoff(), 0)  # the connection that asks them is tried again already
        sentinel = Sentinel(_addresses(parts, 26379), sentinel_kwargs=plain, **options, db=_db(db, config))
        return sentinel.master_for(service)
    if scheme == "unix":
        at: dict[str, Any] = {"path": parts.path, "connection_class": redis.UnixDomainSocketConnection}
    else:
        (host, port), *others = _addresses(parts, 6379)
        if others:
            raise ConfigError(
                f"redis.url names several servers, which takes redis+cluster:// or redis+sentinel://: {config.url}"
            )
        tls = {"connection_class": redis.SSLConnection} if scheme == "rediss" else {}
        at = {"host": host, "port": port, "db": _db(parts.path.strip("/"), config), "socket_keepalive": True, **tls}
    options.pop("ssl", None)
    most = max(config.connections, threads)
    pool = redis.BlockingConnectionPool(max_connections=most, timeout=config.timeout_s, **at, **options)
    return redis.Redis(connection_pool=pool)


def check(client: Client, config: RedisConfig) -> None:
    """Raise ConfigError, in one sentence, for a server that does not answer, lets us not in, or is too old."""
    with in_a_sentence(config):
        version = str(_any_node(client.info("server"))["redis_version"])
    if int(version.partition(".")[0]) < OLDEST_VERSION:
        raise ConfigError(f"Redis at {config.url} has version {version}: {OLDEST_VERSION}.0 or newer is needed.")


@contextmanager
def in_a_sentence(config: RedisConfig) -> Iterator[None]:
    """Run commands in this context; raises ConfigError for what redis-py raises."""
    try:
        yield
    except NO_ANSWER as error:
        # A cluster's client wraps what its nodes said.
        cause = error.__cause__ if isinstance(error, RedisClusterException) else error
        raise _sentence(config, error, cause) from None


def _sentence(config: RedisConfig, error: Exception, cause: BaseException | None) -> ConfigError:
    server = f"Redis at {config.url}"
    if isinstance(cause, AuthenticationError | AuthorizationError):
        who = f"user {config.username}" if config.username else "the default user"
        return ConfigError(
            f"{server} refuses {who} ({cause}): set redis.username, and the password in redis.password_file or in the "
            f"environment variable {config.password_env}."
        )
    if isinstance(cause, NoPermissionError):
        return ConfigError(f"{server} does not grant what is needed ({cause}): see the ACL in docs/redis.md.")
    return RedisUnreachableError(config, error)


def pipelined(client: Client, commands: Sequence[tuple[Any, ...]], *, raise_on_error: bool = True) -> list[Any]:
    """The answers to some commands that are sent together."""
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    answers: list[Any] = pipeline.execute(raise_on_error)
    return answers


def _any_node(answer: dict[str, Any]) -> dict[str, Any]:
    """A cluster answers node by node."""
    return answer if "redis_version" in answer else next(iter(answer.values()))


def _tls(config: RedisConfig) -> dict[str, Any]:
    for key in ("tls_ca_file", "tls_cert_file", "tls_key_file"):
        path = getattr(config, key)
        if path and not os.access(path, os.R_OK):
            raise ConfigError(f"redis.{key}: {path} cannot be read")
    return {
        "ssl": True,
        "ssl_ca_certs": config.tls_ca_file or None,
        "ssl_certfile": config.tls_cert_file or None,
        "ssl_keyfile": config.tls_key_file or None,
    }


def _addresses(parts: SplitResult, default_port: int) -> list[tuple[str, int]]:
    """HOST:PORT,HOST:PORT; IPv6 in brackets."""
    found = []
    for address in parts.netloc.split(","):
        try:
            one = urlsplit(f"//{address}")
            (one.hostname or "").encode("idna")  # as the resolver will, whose UnicodeError nobody expects
            found.append((one.hostname or "", one.port or default_port))
        except ValueError:
            found.append(("", 0))
    if not all(host for host, _ in found):
        raise ConfigError(f"redis.url: {parts.netloc!r} must be HOST:PORT, separated by commas if several")
    return found


def _db(text: str, config: RedisConfig) -> int:
    if not (text or "0").isdecimal():
        raise ConfigError(f"redis.url must end in the number of a database, such as /0: {config.url}")
    return int(text or 0)
