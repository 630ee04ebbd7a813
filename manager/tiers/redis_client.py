"""Connections to Redis, and a circuit breaker, so that a server that hangs costs one timeout, not thousands."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.connection import parse_url
from redis.exceptions import AuthenticationError, AuthorizationError, OutOfMemoryError, RedisError, ResponseError
from redis.retry import Retry

from manthan.manager.config.model import REDIS_PASSWORD, ConfigError, RedisConfig
from manthan.manager.tiers.tier import STORE_FULL, TierError
from manthan.manager.transfer import STORE_DOWN

Client: TypeAlias = Any  # redis.Redis: its annotations leave open what is bytes and what is str

TIMEOUT_S = 2.0  # seconds to wait for a connection or an answer, unless the URL has a socket_timeout
RETRIES = 1  # times that redis-py repeats a failed command
BREAK_FIRST_S, BREAK_MOST_S = 0.25, 4.0  # see Circuit
OLDEST_VERSION = 7  # of the server
BATCH = 512  # commands in a pipeline, at most


class RedisUnreachableError(ConfigError):
    """Error: the server does not answer."""


class Circuit:
    """Circuit breaker. After a failed command, no command is sent for some time.

    The time doubles from BREAK_FIRST_S to BREAK_MOST_S with each failure in a row. Up to half is cut at random.

    Args:
        wake: Called when `is_up` changes, on the thread whose command changed it.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._failures = 0
        self._until = 0.0
        self.last_error = ""

    @property
    def is_up(self) -> bool:
        return not self._failures

    @property
    def wait_s(self) -> float:
        """Seconds until the next command may be sent."""
        return max(0.0, self._until - time.monotonic()) if self._failures else 0.0

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Run commands in this context. Raises TierError for errors of Redis, and while no command may be sent."""
        if self.wait_s:
            raise TierError(f"Redis is not asked for another {self.wait_s:.1f} s: {self.last_error}", STORE_DOWN)
        try:
            yield
        except OutOfMemoryError as error:
            self._note()
            raise TierError(str(error), STORE_FULL) from None
        except (RedisError, OSError) as error:  # also for answers such as BUSY, LOADING and READONLY
            self._note(f"{type(error).__name__}: {error}")
            raise TierError(str(error), STORE_DOWN) from None
        self._note()

    def _note(self, failure: str = "") -> None:
        """Note the end of a command. failure: the error's text; empty if Redis has answered."""
        with self._lock:
            was_up = self.is_up
            self._failures = self._failures + 1 if failure else 0
            if failure:
                self.last_error = failure
                longest = min(BREAK_MOST_S, BREAK_FIRST_S * 2 ** (self._failures - 1))
                self._until = time.monotonic() + longest * random.uniform(0.5, 1.0)
            changed = self.is_up is not was_up
        if changed:
            self._wake()


def connect(config: RedisConfig, threads: int = 1) -> Client:
    """Return a client with timeouts for all commands. Nothing is sent yet. Raises ConfigError.

    Args:
        threads: Number of threads that use the client at once. A thread without a free connection would time out.
    """
    try:
        timeout_s = float(parse_url(config.url).get("socket_timeout", TIMEOUT_S))
        pool = redis.BlockingConnectionPool.from_url(
            config.url,
            password=os.environ.get(REDIS_PASSWORD) or None,
            max_connections=threads + 1,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(ExponentialWithJitterBackoff(cap=timeout_s / 4, base=0.02), RETRIES),
            client_name="manthan",
            protocol=2,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"tiers.redis.url is {config.url!r}, which redis-py does not take: {error}.") from None
    return redis.Redis(connection_pool=pool)


def check(client: Client, config: RedisConfig) -> str:
    """Check the server's version and settings. Return advice to the operator, in a sentence; empty for none.

    Raises:
        RedisUnreachableError: The server does not answer.
        ConfigError: The server refuses us or is too old, or redis-py does not take the URL.
    """
    server = f"Redis at {config.url}"
    try:
        info = client.info()
    except (AuthenticationError, AuthorizationError, ResponseError) as error:
        raise ConfigError(
            f"{server} refuses us ({error}): name the user in tiers.redis.url, as in redis://USER@HOST, and set its "
            f"password in the environment variable {REDIS_PASSWORD}."
        ) from None
    except (RedisError, OSError) as error:
        raise RedisUnreachableError(
            f"{server} does not answer ({error}): sessions that leave the GPU are recomputed until it does."
        ) from None
    except TypeError as error:
        raise ConfigError(f"tiers.redis.url is {config.url!r}, which redis-py does not take: {error}.") from None
    version = str(info["redis_version"])
    if int(version.partition(".")[0]) < OLDEST_VERSION:
        raise ConfigError(f"{server} has version {version}: {OLDEST_VERSION}.0 or newer is needed.")
    if info.get("maxmemory") and info.get("maxmemory_policy") == "noeviction":
        return (
            f"{server} has maxmemory-policy noeviction, so that it refuses writes when it is full: set it to "
            "volatile-ttl."
        )
    return ""


def pipelined(client: Client, commands: Sequence[tuple[Any, ...]], *, raise_on_error: bool = True) -> list[Any]:
    """Send commands, up to BATCH together. Return the answers, in order."""
    answers: list[Any] = []
    for start in range(0, len(commands), BATCH):
        pipeline = client.pipeline(transaction=False)
        for command in commands[start : start + BATCH]:
            pipeline.execute_command(*command)
        answers += pipeline.execute(raise_on_error)
    return answers
