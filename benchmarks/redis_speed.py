"""How fast blocks go to Redis and come back, in MB/s: Manthan's RedisStore beside redis-py, pipelined by hand.

Both have a client of the same configuration, the same values, names of the same length and the same number of commands
in a pipeline; both expire what they set. First all puts, then all gets: each round does both, and whoever came second
comes first in the next.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

from manthan.benchmarks.redis_report import OURS, RAW
from manthan.manager.config.model import RedisConfig
from manthan.manager.stores.cold_store import Buffer
from manthan.manager.stores.redis.client import Circuit, Client, check, connect
from manthan.manager.stores.redis.schema import Namespace
from manthan.manager.stores.redis.store import BATCH_BYTES, RedisStore

TTL_S = 3600.0


class WrongBytesError(RuntimeError):
    """A block came back as something else."""


@dataclass(frozen=True)
class Sizes:
    """What is moved in a round: so many blocks of so many incompressible bytes. One more round warms up.

    rounds: an even number, so that each arm is as often the first.
    """

    blocks: int
    block_bytes: int
    rounds: int
    seed: int

    @property
    def megabytes(self) -> float:
        return self.blocks * self.block_bytes / 1e6


@dataclass(frozen=True)
class Raw:
    """redis-py, as one would use it: one connection, pipelines of `batch` commands."""

    client: Client
    batch: int

    def put(self, values: dict[str, bytes]) -> None:
        for some in (
            list(values.items())[at : at + self.batch] for at in range(0, len(list(values.items())), self.batch)
        ):
            pipeline = self.client.pipeline(transaction=False)
            for name, value in some:
                pipeline.set(name, value, px=round(1000 * TTL_S))
            pipeline.execute()

    def get(self, names: list[str]) -> Iterator[bytes | None]:
        for some in (names[at : at + self.batch] for at in range(0, len(names), self.batch)):
            pipeline = self.client.pipeline(transaction=False)
            for name in some:
                pipeline.get(name)
            yield from pipeline.execute()


class SameBytes:
    """As many blocks as a session has, of those that an engine has put there, read again by redis-py alone."""

    def __init__(self, config: RedisConfig, blocks: int) -> None:
        client = connect(config)
        names = itertools.islice(client.scan_iter(f"{config.prefix}*:block:*", count=1000), blocks)
        self._names = [name.decode() for name in names]
        _expect(len(self._names) == blocks)
        self._raw = Raw(client, max(1, BATCH_BYTES // int(client.strlen(self._names[0]))))

    def read_s(self) -> float:
        began = time.perf_counter()
        _use(self._raw.get(self._names))
        return time.perf_counter() - began


def measure_speed(config: RedisConfig, sizes: Sizes, step: Callable[[str], None]) -> dict[str, Any]:
    """MB/s of each round, by operation and arm, and with what they were measured. The keys stay."""
    check(connect(config), config)
    here, raw_names = Namespace(config.prefix, "ours"), Namespace(config.prefix, "raws")
    store = RedisStore(connect(config), Circuit(), here, 0, TTL_S)
    client = connect(config)
    raw = Raw(client, max(1, BATCH_BYTES // sizes.block_bytes))
    blocks = dict(_blocks(sizes))
    values = {raw_names.block(0, key, 0): buf.tobytes() for key, buf in blocks.items()}
    arms: dict[str, list[tuple[str, Callable[[], object]]]] = {
        "put": [(OURS, lambda: _expect(not store.put_all(0, blocks))), (RAW, lambda: raw.put(values))],
        "get": [(OURS, lambda: _use(store.read(0, list(blocks)))), (RAW, lambda: _use(raw.get(list(values))))],
    }
    rates: dict[str, dict[str, list[float]]] = {operation: {OURS: [], RAW: []} for operation in arms}
    try:
        for operation, both in arms.items():
            for number in range(sizes.rounds + 1):
                for arm, call in both if number % 2 else reversed(both):
                    step(f"{operation}, round {number} of {sizes.rounds}: {arm}")
                    rate = _rate(call, sizes)
                    if number:
                        rates[operation][arm].append(rate)
        _compare(blocks, store, values, raw)
        return {"rates": rates, "batch": raw.batch, "megabytes": sizes.megabytes} | _with_what(client)
    finally:
        store.close()
        client.close()


def _blocks(sizes: Sizes) -> Iterator[tuple[bytes, Buffer]]:
    rng = np.random.default_rng(sizes.seed)
    for _ in range(sizes.blocks):
        yield os.urandom(32), rng.integers(0, 256, sizes.block_bytes, np.uint8)


def _rate(call: Callable[[], object], sizes: Sizes) -> float:
    began = time.perf_counter()
    call()
    return sizes.megabytes / (time.perf_counter() - began)


def _use(values: Iterator[Any]) -> None:
    for value in values:
        _expect(value is not None)


def _expect(right: bool) -> None:
    if not right:
        raise WrongBytesError("Redis did not keep all blocks: it needs more memory")


def _compare(blocks: dict[bytes, Buffer], store: RedisStore, values: dict[str, bytes], raw: Raw) -> None:
    pairs = zip(blocks.values(), store.read(0, list(blocks)), raw.get(list(values)), strict=True)
    if not all(ours is not None and buf.tobytes() == ours.tobytes() == theirs for buf, ours, theirs in pairs):
        raise WrongBytesError("blocks came back with other bytes than they were put with")


def _with_what(client: Client) -> dict[str, str]:
    """Versions, and the parser that redis-py uses."""
    connection = client.connection_pool.get_connection()  # type: ignore[union-attr]
    try:
        parser = type(connection._parser).__name__.strip("_")
    finally:
        client.connection_pool.release(connection)  # type: ignore[union-attr]
    info = client.info("server")
    return {
        "redis": str(info["redis_version"]),
        "redis-py": metadata.version("redis"),
        "hiredis": metadata.version("hiredis"),
        "parser": parser,
    }
