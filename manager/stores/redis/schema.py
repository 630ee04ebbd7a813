"""How Manthan's data is named in Redis. docs/redis.md shows it with redis-cli.

    PREFIX namespaces                      set: the namespaces
    PREFIX {NAME}:info                     hash: what the namespace's codes are of
    PREFIX {NAME}:session:ID               hash: a session, for people
    PREFIX {NAME}:chain:ID                 list: its block keys in order, hexadecimal
    PREFIX {NAME}:sessions                 sorted set: session ids by the time at which they expire, Unix seconds
    PREFIX {NAME}:blocks                   sorted set: block keys stored by all ranks, by the time at which they expire
    PREFIX {NAME}:pending                  sorted set: block keys being written, by the time their reservation ends
    PREFIX {NAME}:users                    hash: block key to the number of sessions that hold it
    PREFIX {NAME}:tips                     hash: a chain's last block key to its session
    PREFIX NAME:block:{KEY}:RANK           string: one rank's encoded block, see manthan.codec.wire

Braces are hash tags: in a Redis Cluster the bookkeeping of a namespace is in one slot, and so are a block's shards.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import quote

FORMAT = 1
"""The version of this schema, which is part of a namespace's name."""
BOOKKEEPING = ("info", "sessions", "blocks", "pending", "users", "tips")


@dataclass(frozen=True)
class Namespace:
    """One model's part of a Redis: everything in it was made by the same model, codec and layout.

    name: the model's last name and a digest of all that decides what its codes mean.
    """

    prefix: str
    name: str

    @classmethod
    def of(cls, prefix: str, model: str, identity: Mapping[str, object]) -> "Namespace":
        """The namespace of a model, by what tells its codes from others'; of its own name the last part only."""
        text = json.dumps({"format": FORMAT, **identity}, sort_keys=True, default=str)
        slug = re.sub(r"[^a-z0-9.]+", "-", model.rstrip("/").rpartition("/")[2].lower()).strip("-")[:40]
        return cls(prefix, f"{slug or 'model'}-{hashlib.sha256(text.encode()).hexdigest()[:12]}")

    def apart(self, epoch: str) -> "Namespace":
        """A namespace beside this one, for KV that must not be mixed with it."""
        return Namespace(self.prefix, f"{self.name}-{epoch}")

    @property
    def all_names(self) -> str:
        return f"{self.prefix}namespaces"

    def key(self, part: str) -> str:
        """The key of one of BOOKKEEPING."""
        return f"{self.prefix}{{{self.name}}}:{part}"

    def session(self, session_id: str) -> str:
        return self.key(f"session:{quoted(session_id)}")

    def chain(self, session_id: str) -> str:
        return self.key(f"chain:{quoted(session_id)}")

    def block(self, key: bytes, rank: int) -> str:
        return f"{self.prefix}{self.name}:block:{{{key.hex()}}}:{rank}"


def quoted(session_id: str) -> str:
    """A session's id as part of a key: what a shell or a line of a log might stumble over is percent-encoded."""
    return quote(session_id, safe="@~+,=")


def iso(seconds: float) -> str:
    """Unix seconds as ISO 8601 in UTC: 2026-11-21T11:04:53Z."""
    return datetime.fromtimestamp(round(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class StoredBlock(NamedTuple):
    """One block of a chain, and whether all ranks have stored its codes."""

    key: bytes
    stored: bool


class SessionRecord(NamedTuple):
    """A session as other engines and people see it. Times are Unix seconds; `chain` ends with the last stored block."""

    session_id: str
    state: str
    chain: tuple[StoredBlock, ...]
    created: float
    last_used: float
    requests: int
