"""Sessions and blocks in a real Redis, written as engines write them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from manthan.manager.config.model import RedisConfig
from manthan.manager.config.resolve import load_config
from manthan.manager.sessions.session import SessionInfo
from manthan.manager.stores.directory import Room
from manthan.manager.stores.redis.client import Circuit, Client, connect
from manthan.manager.stores.redis.index import Grant, RedisIndex
from manthan.manager.stores.redis.schema import BlockId, Namespace, SessionRecord, StoredChain
from manthan.manager.stores.redis.store import RedisStore

BLOCK_TOKENS, SHARD_BYTES, GROUP = 16, 1000, 0
SPARE_BYTES = 250
"""So many bytes more are reserved for a shard than it turns out to need."""
TTL_S = 88_200
"""Half an hour above a day: what is left of it reads the same, however slow a test is."""


def redis_config(url: str, **values: object) -> RedisConfig:
    return load_config(
        env={}, flags={f"redis.{key}": value for key, value in {"url": url, "ttl_s": TTL_S, **values}.items()}
    ).redis


def keys_of(text: str, count: int) -> list[bytes]:
    """The chain of a conversation that begins with this text."""
    return [sha256(f"{text} {at}".encode()).digest() for at in range(count)]


def blocks_of(keys: Sequence[bytes], rank: int) -> dict[bytes, np.ndarray]:
    """What a rank has encoded: bytes that tell key and rank."""
    return {key: np.frombuffer((key + bytes([rank])) * 100, np.uint8)[:SHARD_BYTES] for key in keys}


def record(
    session_id: str, keys: Sequence[bytes], *, last_used: float | None = None, requests: int = 1, ranks: int = 2
) -> SessionRecord:
    used = time.time() if last_used is None else last_used
    chain = StoredChain(GROUP, tuple(keys), b"\1" * len(keys), (ranks * SHARD_BYTES,) * len(keys))
    return SessionRecord(session_id, session_info(session_id, used - 60, used, requests=requests), chain)


def session_info(
    session_id: str, created: float = 1.0e9, last_used: float = 1.1e9, *, state: str = "cold", requests: int = 1
) -> SessionInfo:
    """A session that is said to be stored; what its record does not tell is zero."""
    return SessionInfo(
        *(session_id, "", state, 0, 0, 0, 0, 0, created, last_used, requests, False, 0, None),
        hot_nbytes=0,
        tiers=(),
        told_id=session_id,
    )


def rooms(keys: Sequence[bytes], ranks: int = 2) -> list[Room]:
    """What is asked for before these blocks are encoded."""
    return [Room(key, GROUP, ranks * (SHARD_BYTES + SPARE_BYTES)) for key in keys]


def ids(keys: Sequence[bytes]) -> list[BlockId]:
    return [(GROUP, key) for key in keys]


@dataclass
class Engine:
    """Books and stores of one engine, without the engine. capacity: of blocks that need no spare bytes."""

    config: RedisConfig
    model: str = "org/Tiny-1B"
    ranks: int = 2
    capacity: int = 100
    owner: str = "engine-a"
    client: Client = field(init=False)
    index: RedisIndex = field(init=False)
    stores: list[RedisStore] = field(init=False)

    def __post_init__(self) -> None:
        self.client = connect(self.config)
        namespace = Namespace.of(self.config.prefix, self.model, {"ranks": self.ranks})
        ttl = self.config.ttl_s
        self.index = RedisIndex(self.client, Circuit(), namespace, self.owner, self.ranks, self.budget, ttl)
        self.stores = [RedisStore(self.client, Circuit(), namespace, rank, ttl) for rank in range(self.ranks)]

    @property
    def budget(self) -> int:
        return self.capacity * self.ranks * SHARD_BYTES

    @property
    def name(self) -> str:
        return self.index.namespace.name

    @property
    def facts(self) -> dict[str, object]:
        return {
            "model": self.model,
            "dtype": "bfloat16",
            "codec": "k3v3",
            "block_tokens": BLOCK_TOKENS,
            "ranks": self.ranks,
            "budget_bytes": self.budget,
        }

    def attach(self) -> str:
        return self.index.attach(self.facts, "incarnation")

    def put(self, keys: Sequence[bytes]) -> None:
        """Reserve and store blocks of all ranks."""
        answers, _ = self.index.reserve(rooms(keys, self.ranks))
        assert Grant.FULL not in [answer.grant for answer in answers]
        for rank, store in enumerate(self.stores):
            assert store.put_all(GROUP, blocks_of(keys, rank)) == {}

    def save(self, session_id: str, keys: Sequence[bytes], **fields: float) -> None:
        self.put(keys)
        saved = self.index.save(record(session_id, keys, ranks=self.ranks, **fields), self.facts)  # type: ignore[arg-type]
        assert (saved.verdict, saved.lost) == ("saved", [])

    def close(self) -> None:
        for store in self.stores:
            store.close()
        self.client.close()
