"""Encoded blocks of one rank in Redis, and RAM in front of them."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
from redis.exceptions import OutOfMemoryError

from manthan.manager.stores.arena import usable
from manthan.manager.stores.cold_store import Buffer, ColdStore, ColdStoreError, HostStore
from manthan.manager.stores.redis.client import Circuit, Client, StoreOomError, pipelined
from manthan.manager.stores.redis.index import BATCH, batches
from manthan.manager.stores.redis.schema import Namespace

BATCH_BYTES = 4 << 20
"""About what one pipeline moves."""
FIRST_NBYTES = 256 << 10
"""What a block is taken for before one was seen."""
AHEAD_THREADS = 2
"""Threads of a store that fetch what is read next."""


class RedisStore(ColdStore):
    """One rank's blocks in one namespace. The namespace's books say what may be put.

    ttl_s: seconds a session lives after its last use; blocks are written to live a quarter longer, see RedisIndex.
    """

    def __init__(self, client: Client, circuit: Circuit, namespace: Namespace, rank: int, ttl_s: float) -> None:
        self._client, self._circuit = client, circuit
        self.namespace, self._rank = namespace, rank
        self._ttl_ms = round(1250 * ttl_s)
        self._ahead = ThreadPoolExecutor(AHEAD_THREADS, "manthan-fetch")
        self._nbytes: dict[int, int] = {}  # of a group's block, as the last ones were: those of one read are much alike

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer]) -> dict[bytes, str]:
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

    def read(self, group: int, keys: Sequence[bytes]) -> Iterator[Buffer | None]:
        """Raises StoreDownError. One batch is fetched while the one before it is used.

        If that did not take long enough for another thread to begin, this one fetches: it would only wait.
        """
        following, left = self._next(group, keys)
        values = self._fetch(group, following)
        while values:
            following, left = self._next(group, left)
            ahead = self._ahead.submit(self._fetch, group, following) if following else None
            values.reverse()
            while values:  # let go of each when it has been used: the next batch gets its memory
                value = values.pop()
                yield None if value is None else np.frombuffer(value, np.uint8)
            if ahead is not None:
                values = self._fetch(group, following) if ahead.cancel() else ahead.result()

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
        self._ahead.shutdown(wait=True, cancel_futures=True)
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


class TieredStore(ColdStore):
    """RAM in front of another store: what was stored or read last is read from RAM. All is written to both.

    max_bytes: of RAM; what was not used for longest makes room there.
    """

    def __init__(self, behind: ColdStore, max_bytes: int) -> None:
        self.behind = behind
        self.ram = HostStore(max_bytes)
        self._lock = threading.Lock()
        self._order: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        """What is in RAM, least recently used first."""

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer]) -> dict[bytes, str]:
        refused = self.behind.put_all(group, blocks)
        for key, buf in blocks.items():
            if key not in refused:
                self._keep(group, key, buf)
        return refused

    def read(self, group: int, keys: Sequence[bytes]) -> Iterator[Buffer | None]:
        """Raises what the store behind raises, when it comes to the first block that is not in RAM."""
        with self._lock:
            near = {key for key in keys if (group, key) in self._order}
            for key in keys:
                if key in near:
                    self._order.move_to_end((group, key))
        far = self.behind.read(group, [key for key in keys if key not in near])
        for key in keys:
            if key in near:
                buf = next(self.ram.read(group, [key]))
                if buf is None:  # it had to make room meanwhile
                    buf = next(self.behind.read(group, [key]))
            else:
                buf = next(far)
                if buf is not None:
                    self._keep(group, key, buf)
            yield buf

    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        return self.behind.absent(group, self.ram.absent(group, keys))

    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        keys = list(keys)
        with self._lock:
            for key in keys:
                self._order.pop((group, key), None)
            self.ram.drop(group, keys)
        self.behind.drop(group, keys)

    def go_first(self, group: int, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in reversed(keys):
                if (group, key) in self._order:
                    self._order.move_to_end((group, key), last=False)

    def cleared(self, place: str) -> "TieredStore":
        """A new one with nothing in RAM; what is under way in this one is forgotten with it."""
        return TieredStore(self.behind.cleared(place), self.ram.max_bytes)

    def close(self) -> None:
        self.ram.close()
        self.behind.close()

    def room(self, nbytes: int) -> int:
        """What it takes of the store behind: what is in RAM beside that has a budget of its own."""
        return self.behind.room(nbytes)

    def _keep(self, group: int, key: bytes, buf: Buffer) -> None:
        spare = self.ram.max_bytes - usable(self.ram.max_bytes)
        need = self.ram.room(buf.nbytes)
        with self._lock:
            self._order.pop((group, key), None)
            self.ram.drop(group, [key])
            if need + spare > self.ram.max_bytes:
                return
            while self._order and self.ram.available < need + spare:
                (of, oldest), _ = self._order.popitem(last=False)
                self.ram.drop(of, [oldest])
            if not self.ram.put_all(group, {key: buf}):
                self._order[group, key] = None
