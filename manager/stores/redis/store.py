"""Encoded blocks of one rank in Redis, and RAM in front of them."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from redis.exceptions import OutOfMemoryError

from manthan.manager.stores.cold_store import Buffer, ColdStore, ColdStoreError
from manthan.manager.stores.redis.client import Circuit, Client, StoreOomError, pipelined
from manthan.manager.stores.redis.index import BATCH, batches
from manthan.manager.stores.redis.schema import Namespace

BATCH_BYTES = 4 << 20
"""About what one pipeline moves."""
AHEAD_THREADS = 2
"""Threads of a store that fetch what is read next."""


class RedisStore(ColdStore):
    """One rank's blocks in one namespace. Bytes are reserved in the namespace's books, not here.

    nbytes: of an encoded block. ttl_s: seconds a session lives after its last use; blocks are written to live a quarter
    longer, see RedisIndex.
    """

    kind: ClassVar[str] = "redis"

    def __init__(
        self, client: Client, circuit: Circuit, namespace: Namespace, rank: int, nbytes: int, ttl_s: float
    ) -> None:
        self._client, self._circuit = client, circuit
        self.namespace, self._rank = namespace, rank
        self._ttl_ms = round(1250 * ttl_s)
        self._batch = max(1, BATCH_BYTES // nbytes)
        self._ahead = ThreadPoolExecutor(AHEAD_THREADS, "manthan-fetch")

    def reserve(self, nbytes: int) -> None:
        """Nothing: see the class."""

    def unreserve(self, nbytes: int) -> None:
        """Nothing: see the class."""

    def put_all(self, blocks: Mapping[bytes, Buffer]) -> dict[bytes, str]:
        refused: dict[bytes, str] = {}
        for some in batches(list(blocks.items()), self._batch):
            try:
                with self._circuit.guard():
                    answers = self._pipelined(
                        [("SET", self._name(key), buf.data, "PX", self._ttl_ms) for key, buf in some]
                    )
            except ColdStoreError as error:
                answers = [error] * len(some)
            for (key, _), answer in zip(some, answers, strict=True):
                if isinstance(answer, Exception):
                    refused[key] = answer.cause if isinstance(answer, ColdStoreError) else StoreOomError.cause
        return refused

    def read(self, keys: Sequence[bytes]) -> Iterator[Buffer | None]:
        """Raises StoreDownError. One batch is fetched while the one before it is used.

        If that did not take long enough for another thread to begin, this one fetches: it would only wait.
        """
        some = list(batches(keys, self._batch))
        values = self._fetch(some[0]) if some else []
        for following in [*some[1:], []]:
            ahead = self._ahead.submit(self._fetch, following) if following else None
            values.reverse()
            while values:  # let go of each when it has been used: the next batch gets its memory
                value = values.pop()
                yield None if value is None else np.frombuffer(value, np.uint8)
            if ahead is not None:
                values = self._fetch(following) if ahead.cancel() else ahead.result()

    def absent(self, keys: Sequence[bytes]) -> list[bytes]:
        gone: list[bytes] = []
        for some in batches(keys, BATCH):
            with self._circuit.guard():
                there = self._pipelined([("EXISTS", self._name(key)) for key in some])
            gone += [key for key, count in zip(some, there, strict=True) if not count]
        return gone

    def drop(self, keys: Iterable[bytes]) -> None:
        """Nothing: a block goes when no engine's session holds it, which the namespace's books tell."""

    def cleared(self, place: str) -> "RedisStore":
        """The store of another namespace; blocks under way still go to this one's."""
        other = RedisStore.__new__(RedisStore)
        other.__dict__ |= self.__dict__ | {"namespace": replace(self.namespace, name=place)}
        return other

    def close(self) -> None:
        self._ahead.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _fetch(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._circuit.guard():
            return self._pipelined([("GET", self._name(key)) for key in keys])

    def _pipelined(self, commands: Sequence[tuple[object, ...]]) -> list[Any]:
        """Answers in order; that the server's memory is full is one of them, all other errors are raised."""
        answers = pipelined(self._client, commands, raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, OutOfMemoryError):
                raise answer
        return answers

    def _name(self, key: bytes) -> str:
        return self.namespace.block(key, self._rank)


class TieredStore(ColdStore):
    """RAM in front of another store: what was stored or read last is read from RAM. All is written to both."""

    kind: ClassVar[str] = "tiered"

    def __init__(self, behind: ColdStore, max_bytes: int) -> None:
        self.behind = behind
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[bytes, Buffer] = OrderedDict()
        self._used = 0

    def reserve(self, nbytes: int) -> None:
        self.behind.reserve(nbytes)

    def unreserve(self, nbytes: int) -> None:
        self.behind.unreserve(nbytes)

    def put_all(self, blocks: Mapping[bytes, Buffer]) -> dict[bytes, str]:
        refused = self.behind.put_all(blocks)
        for key, buf in blocks.items():
            if key not in refused:
                self._keep(key, buf)
        return refused

    def read(self, keys: Sequence[bytes]) -> Iterator[Buffer | None]:
        """Raises what the store behind raises, when it comes to the first block that is not in RAM."""
        with self._lock:
            near = {key: self._blocks[key] for key in keys if key in self._blocks}
            for key in near:
                self._blocks.move_to_end(key)
        far = self.behind.read([key for key in keys if key not in near])
        for key in keys:
            buf = near.get(key)
            if buf is None:
                buf = next(far)
                if buf is not None:
                    self._keep(key, buf)
            yield buf

    def absent(self, keys: Sequence[bytes]) -> list[bytes]:
        with self._lock:
            far = [key for key in keys if key not in self._blocks]
        return self.behind.absent(far)

    def drop(self, keys: Iterable[bytes]) -> None:
        keys = list(keys)
        with self._lock:
            for key in keys:
                self._remove(key)
        self.behind.drop(keys)

    def go_first(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in reversed(keys):
                if key in self._blocks:
                    self._blocks.move_to_end(key, last=False)

    def cleared(self, place: str) -> "TieredStore":
        """A new one with nothing in RAM; what is under way in this one is forgotten with it."""
        return TieredStore(self.behind.cleared(place), self.max_bytes)

    def close(self) -> None:
        self.behind.close()

    @property
    def used(self) -> int:
        """Bytes in RAM."""
        with self._lock:
            return self._used

    def _keep(self, key: bytes, buf: Buffer) -> None:
        with self._lock:
            self._remove(key)
            while self._blocks and self._used + buf.nbytes > self.max_bytes:
                self._remove(next(iter(self._blocks)))
            if buf.nbytes <= self.max_bytes:
                self._blocks[key] = buf
                self._used += buf.nbytes

    def _remove(self, key: bytes) -> None:
        old = self._blocks.pop(key, None)
        self._used -= 0 if old is None else old.nbytes
