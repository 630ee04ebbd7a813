"""Encoded blocks of one rank in Redis."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
from redis.exceptions import OutOfMemoryError

from manthan.manager.stores.cold_store import Buffer, ColdStore, ColdStoreError, Landing
from manthan.manager.stores.redis.client import Circuit, Client, StoreOomError, pipelined
from manthan.manager.stores.redis.index import BATCH, batches
from manthan.manager.stores.redis.schema import Namespace

BATCH_BYTES = 4 << 20
"""About what one pipeline moves."""
FIRST_NBYTES = 256 << 10
"""What a block is taken for before one was seen."""
AHEAD_THREADS = 2
"""Threads of a store that fetch what is read next: for whoever restores, and whoever prefetches."""
AHEAD = 1
"""Batches that are fetched, or wait to be, beside the one that is wanted next."""


class _Fetchers:
    """Threads that fetch, each for one reader at a time."""

    def __init__(self) -> None:
        self._all: list[ThreadPoolExecutor] = []
        self._idle: list[ThreadPoolExecutor] = []
        self._lock = threading.Lock()

    def take(self) -> ThreadPoolExecutor:
        with self._lock:
            if not self._idle:
                self._all.append(ThreadPoolExecutor(1, "manthan-fetch"))
                self._idle.append(self._all[-1])
            return self._idle.pop()

    def give_back(self, one: ThreadPoolExecutor) -> None:
        with self._lock:
            self._idle.append(one)

    def close(self) -> None:
        for one in self._all:
            one.shutdown(wait=True, cancel_futures=True)


def _buffer(value: bytes | None, into: Landing | None) -> Buffer | None:
    if value is None:
        return None
    buf = np.frombuffer(value, np.uint8)
    if into is None:
        return buf
    room = into.room(buf.nbytes)
    room[:] = buf
    return room


class RedisStore(ColdStore):
    """One rank's blocks in one namespace. The namespace's books say what may be put.

    ttl_s: seconds a session lives after its last use; blocks are written to live a quarter longer, see RedisIndex.
    """

    def __init__(self, client: Client, circuit: Circuit, namespace: Namespace, rank: int, ttl_s: float) -> None:
        self._client, self._circuit = client, circuit
        self.namespace, self._rank = namespace, rank
        self._ttl_ms = round(1250 * ttl_s)
        self._fetchers = _Fetchers()
        self._nbytes: dict[int, int] = {}  # of a group's block, as the last ones were: those of one read are much alike

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        refused: dict[bytes, str] = {}
        self._learn(group, [buf.nbytes for buf in blocks.values()])
        for some in batches(list(blocks.items()), self._batch(group)):
            try:
                with self._circuit.guard():
                    answers = self._pipelined(
                        [("SET", self._name(group, key), buf.data, "PX", self._ttl_ms) for key, buf in some]
                    )
            except ColdStoreError as error:
                answers = [error] * len(some)
            for (key, _), answer in zip(some, answers, strict=True):
                if isinstance(answer, Exception):
                    refused[key] = answer.cause if isinstance(answer, ColdStoreError) else StoreOomError.cause
        return refused

    def read(
        self, group: int, keys: Sequence[bytes], tenant: str = "", into: Landing | None = None
    ) -> Iterator[Buffer | None]:
        """Raises StoreDownError. While a batch is used, another thread fetches the next ones.

        One alone, since bytes that several allocate in turn cost twice the processor time. Each block goes `into` its
        place before the next one is asked for: were many copied at once, the fetching thread would run dry meanwhile.
        """
        some, left = self._next(group, keys)
        if not left:
            for value in self._fetch(group, some):
                yield _buffer(value, into)
            return
        fetcher = self._fetchers.take()
        ahead: deque[Future[list[bytes | None]]] = deque()
        try:
            while some or ahead:
                while some and len(ahead) <= AHEAD:
                    ahead.append(fetcher.submit(self._fetch, group, some))
                    some, left = self._next(group, left)
                values = ahead.popleft().result()
                values.reverse()
                while values:  # let go of each when it has been used: the next batch gets its memory
                    yield _buffer(values.pop(), into)
        finally:
            for future in ahead:
                future.cancel()
            self._fetchers.give_back(fetcher)

    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        gone: list[bytes] = []
        for some in batches(keys, BATCH):
            with self._circuit.guard():
                there = self._pipelined([("EXISTS", self._name(group, key)) for key in some])
            gone += [key for key, count in zip(some, there, strict=True) if not count]
        return gone

    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        """Nothing: a block goes when no engine's session holds it, which the namespace's books tell."""

    def cleared(self, place: str) -> "RedisStore":
        """The store of another namespace; blocks under way still go to this one's."""
        other = copy(self)
        other.namespace = replace(self.namespace, name=place)
        return other

    def close(self) -> None:
        self._fetchers.close()
        self._client.close()

    def room(self, nbytes: int) -> int:
        return nbytes

    def _batch(self, group: int) -> int:
        """Blocks in one pipeline."""
        return max(1, BATCH_BYTES // self._nbytes.get(group, FIRST_NBYTES))

    def _next(self, group: int, keys: Sequence[bytes]) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """The blocks of the next pipeline, and the rest."""
        count = self._batch(group)
        return keys[:count], keys[count:]

    def _learn(self, group: int, sizes: Sequence[int]) -> None:
        if sizes:
            self._nbytes[group] = max(1, sum(sizes) // len(sizes))

    def _fetch(self, group: int, keys: Sequence[bytes]) -> list[bytes | None]:
        if not keys:
            return []
        with self._circuit.guard():
            values: list[bytes | None] = self._pipelined([("GET", self._name(group, key)) for key in keys])
        self._learn(group, [len(value) for value in values if value is not None])
        return values

    def _pipelined(self, commands: Sequence[tuple[object, ...]]) -> list[Any]:
        """Answers in order; that the server's memory is full is one of them, all other errors are raised."""
        answers = pipelined(self._client, commands, raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, OutOfMemoryError):
                raise answer
        return answers

    def _name(self, group: int, key: bytes) -> str:
        return self.namespace.block((group, key), self._rank)
