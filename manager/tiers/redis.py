"""Tier (store of compressed blocks) in Redis, which several engines may share."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from itertools import islice
from typing import Any

import numpy as np
from redis.exceptions import OutOfMemoryError

from manthan.manager.tiers.redis_client import Circuit, Client, pipelined
from manthan.manager.tiers.redis_schema import FIRST_TTL, Namespace
from manthan.manager.tiers.shards import Shard
from manthan.manager.tiers.tier import STORE_FULL, Buffer, Found, Tier, TierError

BATCH_BYTES = 4 << 20  # approximate bytes of a batch: the blocks that one pipeline moves
FIRST_NBYTES = 256 << 10  # assumed bytes of a block, until the first block is stored or read
AHEAD_THREADS = 2  # threads that fetch the next batch while the caller decodes; for one restore and one prefetch


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
        if not self._writes:
            return refused
        self._learn(group, [buf.nbytes for buf in blocks.values()])
        items, count = list(blocks.items()), self._batch(group)
        for start in range(0, len(items), count):
            some = items[start : start + count]
            commands = [("SET", self._name(group, key), buf.data, "PX", self._ttl_ms) for key, buf in some]
            try:
                answers = self._ask(commands)
            except TierError as error:
                refused |= dict.fromkeys(dict(some), error.cause)
                continue
            full = [key for (key, _), answer in zip(some, answers, strict=True) if isinstance(answer, Exception)]
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
