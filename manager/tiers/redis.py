"""Redis: the connection, the names and times to live of Manthan's data, and a tier that several engines may share.

docs/redis.md shows the names. With its policy `volatile-ttl`, Redis first evicts the data with the shortest time left
to live. Blocks' times to live fall along a session, so a session's last blocks go first. A circuit breaker makes a
server that hangs cost one timeout, not thousands.
"""

import hashlib
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np
import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.connection import parse_url
from redis.exceptions import AuthenticationError, AuthorizationError, OutOfMemoryError, RedisError, ResponseError
from redis.retry import Retry

from manthan.manager.config.model import REDIS_PASSWORD, ConfigError, RedisConfig
from manthan.manager.tiers.joined import Shard
from manthan.manager.tiers.tier import STORE_FULL, Buffer, Found, Tier, TierError
from manthan.manager.transfer import STORE_DOWN

Client: TypeAlias = Any  # redis.Redis, whose annotations leave open which values are bytes and which are str

TIMEOUT_S = 2.0  # seconds to wait for a connection or an answer, unless the URL has a socket_timeout
RETRIES = 1  # times that redis-py repeats a failed command
BREAK_FIRST_S, BREAK_MOST_S = 0.25, 4.0  # see Circuit
OLDEST_VERSION = 7  # of the server
BATCH = 512  # commands in a pipeline, at most
BATCH_BYTES = 4 << 20  # approximate bytes of a batch: the blocks that one pipeline moves
FIRST_NBYTES = 256 << 10  # assumed bytes of a block, until the first block is stored or read
AHEAD_THREADS = 2  # threads of a RedisTier that fetch next batches: one for a restore, and one for a prefetch
FALL, HALF = 0.25, 512
"""Share of the time to live that the end of an endless session lacks; depth of the block that lacks half this share."""
SAMPLES = 64  # most block hashes in the Redis hash of a session. Each is cut to its first 4 bytes
FIRST_TTL = 0.5  # share of the time to live that a block has from its store until its session is written


class RedisUnreachableError(ConfigError):
    """Error: the server does not answer."""


class Circuit:
    """Circuit breaker. After a failed command, no command is sent for some time.

    The time doubles from BREAK_FIRST_S to BREAK_MOST_S with each failure in a row. Up to half is cut at random. `wake`
    is called when `is_up` changes, on the thread whose command changed it.
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
                longest = min(BREAK_MOST_S, BREAK_FIRST_S * 2 ** min(self._failures - 1, 16))
                self._until = time.monotonic() + longest * random.uniform(0.5, 1.0)
            changed = self.is_up is not was_up
        if changed:
            self._wake()


def connect(config: RedisConfig, threads: int = 1) -> Client:
    """Return a client with timeouts for all commands. Nothing is sent yet. Raises ConfigError.

    Args:
        threads: Number of threads that use the client at once, without those of RedisTier. A thread without a free
            connection would time out.
    """
    try:
        timeout_s = float(parse_url(config.url).get("socket_timeout", TIMEOUT_S))
        pool = redis.BlockingConnectionPool.from_url(
            config.url,
            password=os.environ.get(REDIS_PASSWORD) or None,
            max_connections=threads + AHEAD_THREADS + 1,
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
    """Send commands, up to BATCH together. Return the answers, in order: errors, too, unless `raise_on_error`."""
    answers: list[Any] = []
    for start in range(0, len(commands), BATCH):
        pipeline = client.pipeline(transaction=False)
        for command in commands[start : start + BATCH]:
            pipeline.execute_command(*command)
        answers += pipeline.execute(raise_on_error)
    return answers


@dataclass(frozen=True)
class Namespace:
    """Part of a Redis, or of a disk, for a single model."""

    prefix: str  # first part of all keys in Redis
    name: str  # last part of the model's name, and a digest; see `of`

    @classmethod
    def of(cls, prefix: str, model: str, identity: Mapping[str, object]) -> "Namespace":
        """Return a model's namespace. identity: facts, such as the weights, that decide what stored blocks mean."""
        text = json.dumps(identity, sort_keys=True, default=str)
        slug = re.sub(r"[^a-z0-9.]+", "-", model.rstrip("/").rpartition("/")[2].lower()).strip("-")[:40]
        return cls(prefix, f"{slug or 'model'}-{hashlib.sha256(text.encode()).hexdigest()[:12]}")

    def session(self, session_id: str) -> str:
        """Return the key of a session's Redis hash. Characters that a shell would interpret are percent-encoded."""
        return f"{self.prefix}{{{self.name}}}:session:{quote(session_id, safe='@~+,=/', errors='surrogatepass')}"

    def block(self, group: int, block_hash: bytes, shard: Shard) -> str:
        """Return the key in Redis of a compressed block's shard (a rank's part). group: index of the KV cache group."""
        return f"{self.prefix}{self.name}:block:{block_hash.hex()}:{group}:{shard}"


def block_ttl_s(ttl_s: float, depth: int) -> float:
    """Return the time to live, from the session's last use, of the block with `depth` blocks before it, in seconds."""
    return ttl_s * (1 - FALL * depth / (depth + HALF))


def sample(block_hashes: Sequence[bytes]) -> str:
    """Return index and first 4 bytes of at most SAMPLES block hashes, the last included: "7:9f3a01bc 15:e07b33d2"."""
    count = len(block_hashes)
    some = {(n + 1) * count // SAMPLES - 1 for n in range(SAMPLES)} if count > SAMPLES else range(count)
    return " ".join(f"{at}:{block_hashes[at].hex()[:8]}" for at in sorted(some))


def shared_blocks(sampled: str, block_hashes: Sequence[bytes]) -> int:
    """Return how many of a prompt's first blocks a session has, as far as the session's `sample` tells.

    A block hash covers all earlier tokens, so all blocks before the last common hash are common, too.

    block_hashes: of the prompt.
    """
    starts = {int(at): start for at, start in (word.split(":") for word in sampled.split())}
    common = (at for at in starts if at < len(block_hashes) and block_hashes[at].hex()[:8] == starts[at])
    return max(common, default=-1) + 1


def iso(seconds: float) -> str:
    """Return Unix seconds as ISO 8601 in UTC: 2026-11-21T11:04:53Z."""
    return datetime.fromtimestamp(round(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class RedisTier(Tier):
    """Tier of one shard (a rank's part) of each block in a namespace. Redis may evict any block at any time.

    Args:
        ttl_s: Seconds from a session's last use until its first block expires. `RedisSessions` renews the blocks.
        writes: False if another rank writes the same shards, so that this tier only reads.
    """

    def __init__(
        self, client: Client, circuit: Circuit, namespace: Namespace, shard: Shard, ttl_s: float, writes: bool = True
    ) -> None:
        self._client, self._circuit, self._writes = client, circuit, writes
        self._namespace, self._shard = namespace, shard
        self._ttl_ms = round(1000 * FIRST_TTL * ttl_s)
        self._fetchers = ThreadPoolExecutor(AHEAD_THREADS, "manthan-fetch")
        self._nbytes: dict[int, int] = {}  # by KV cache group, mean bytes of the blocks that were last stored or read

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        refused: dict[bytes, str] = {}
        self._learn(group, [buf.nbytes for buf in blocks.values()])
        left = iter(blocks.items() if self._writes else ())
        while some := dict(islice(left, self._batch(group))):
            commands = [("SET", self._name(group, key), buf.data, "PX", self._ttl_ms) for key, buf in some.items()]
            try:
                answers = self._ask(commands)
            except TierError as error:
                refused |= dict.fromkeys(some, error.cause)
                continue
            full = [key for key, answer in zip(some, answers, strict=True) if isinstance(answer, Exception)]
            refused |= dict.fromkeys(full, STORE_FULL)
        return refused

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Found]:
        """See Tier. While the caller uses a batch, another thread fetches the next batch."""
        left, done = iter(keys), 0

        def begin() -> Future[list[bytes | None]] | None:
            some = list(islice(left, self._batch(group)))
            return self._fetchers.submit(self._fetch, group, some) if some else None

        ahead = begin()
        try:
            while ahead is not None:
                values = ahead.result()
                ahead = begin()
                values.reverse()
                while values:  # each block's memory is freed after its use, for the next batch
                    value, done = values.pop(), done + 1
                    yield None if value is None else np.frombuffer(value, np.uint8)
        except TierError as error:
            yield from [error.cause] * (len(keys) - done)
        finally:
            if ahead is not None:
                ahead.cancel()

    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        try:
            there = self._ask([("EXISTS", self._name(group, key)) for key in keys])
        except TierError:
            return []
        return [key for key, count in zip(keys, there, strict=True) if not count]

    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        """Do nothing, because other engines may use the blocks. `RedisSessions` deletes blocks."""

    def cleared(self, place: str) -> "RedisTier":
        """See Tier. Puts that have not ended still write into the old namespace."""
        other = copy(self)
        other._namespace = Namespace(self._namespace.prefix, place)
        return other

    def of(self, shard: Shard) -> "RedisTier":
        """Return a tier of another shard. It uses this tier's connections and threads."""
        other = copy(self)
        other._shard, other._nbytes = shard, {}
        return other

    def close(self) -> None:
        self._fetchers.shutdown(cancel_futures=True)
        self._client.close()

    def room(self, nbytes: int) -> int:
        return nbytes

    def _batch(self, group: int) -> int:
        return max(1, BATCH_BYTES // self._nbytes.get(group, FIRST_NBYTES))

    def _learn(self, group: int, sizes: Sequence[int]) -> None:
        if sizes:
            self._nbytes[group] = max(1, sum(sizes) // len(sizes))

    def _fetch(self, group: int, keys: Sequence[bytes]) -> list[bytes | None]:
        values: list[bytes | None] = self._ask([("GET", self._name(group, key)) for key in keys])
        self._learn(group, [len(value) for value in values if value is not None])
        return values

    def _ask(self, commands: Sequence[tuple[object, ...]]) -> list[Any]:
        """Return the commands' answers, in order. A full memory's error is an answer. Other errors raise TierError."""
        with self._circuit.guard():
            answers = pipelined(self._client, commands, raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception) and not isinstance(answer, OutOfMemoryError):
                    raise answer
        return answers

    def _name(self, group: int, key: bytes) -> str:
        return self._namespace.block(group, key, self._shard)
