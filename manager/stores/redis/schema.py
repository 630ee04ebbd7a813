"""How Manthan's data is named in Redis. docs/redis.md shows it with redis-cli.

    PREFIX namespaces                      set: the namespaces
    PREFIX {NAME}:info                     hash: what the namespace's codes are of, and the bytes in use
    PREFIX {NAME}:session:ID               hash: a session, for people
    PREFIX {NAME}:chain:ID                 list: what other KV cache groups have for it, then its blocks in order
    PREFIX {NAME}:sessions                 sorted set: session ids by the time at which they expire, Unix seconds
    PREFIX {NAME}:blocks                   sorted set: blocks stored by all ranks, by the time at which they expire
    PREFIX {NAME}:pending                  sorted set: blocks being written, by the time their reservation ends
    PREFIX {NAME}:sizes                    hash: block to its bytes, or those reserved for it, of all ranks together
    PREFIX {NAME}:users                    hash: block to the number of sessions that hold it
    PREFIX {NAME}:tips                     hash: a chain's last block to its session
    PREFIX NAME:block:{KEY:GROUP}:RANK     string: one rank's encoded block, see manthan.codec.wire

Where codes are sealed, ID and KEY are names that `manthan.manager.stores.keyring` makes of them.

In the books a block is KEY:GROUP, its block key in hexadecimal and its KV cache group. It is in `blocks` or in
`pending`, never in both, and has a size; the field `used_bytes` of `info` is what the sizes add up to.

Braces are hash tags: in a Redis Cluster the bookkeeping of a namespace is in one slot, and so are a block's shards.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import compress, repeat
from typing import NamedTuple, TypeAlias
from urllib.parse import quote

from manthan.manager.sessions.session import SessionInfo

BlockId: TypeAlias = tuple[int, bytes]
"""KV cache group and block key."""

SESSION = ("session",)
"""What the sealed name of a session is about, besides what the session is called."""
FORMAT = 2
"""The version of this schema, which is part of a namespace's name."""
BOOKKEEPING = ("info", "sessions", "blocks", "pending", "sizes", "users", "tips")
"""The books of a namespace, in the order in which scripts get them."""


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

    def block(self, block: BlockId, rank: int) -> str:
        return f"{self.prefix}{self.name}:block:{{{member(block)}}}:{rank}"


def member(block: BlockId) -> str:
    """What a block is called in the books."""
    group, key = block
    return f"{key.hex()}:{group}"


def of_member(text: str) -> BlockId:
    """The block of that name."""
    key, _, group = text.partition(":")
    return int(group), bytes.fromhex(key)


def quoted(session_id: str) -> str:
    """A session's id as part of a key: what a shell or a line of a log might stumble over is percent-encoded."""
    return quote(session_id, safe="@~+,=")


def iso(seconds: float) -> str:
    """Unix seconds as ISO 8601 in UTC: 2026-11-21T11:04:53Z."""
    return datetime.fromtimestamp(round(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class StoredBlock(NamedTuple):
    """One block; whether all ranks have stored its codes, and in how many bytes together."""

    key: bytes
    group: int
    stored: bool
    nbytes: int

    @property
    def id(self) -> BlockId:
        return self.group, self.key


@dataclass(frozen=True, slots=True)
class StoredChain:
    """The blocks of a chain, by columns, since it is told at each use and has thousands: their keys, of each 1 if all
    ranks have stored its codes or else 0, and in how many bytes together."""

    group: int = 0
    keys: tuple[bytes, ...] = ()
    stored: bytes = b""
    nbytes: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def ids(self) -> Iterator[BlockId]:
        return zip(repeat(self.group), self.keys)

    @property
    def blocks(self) -> Iterator[StoredBlock]:
        columns = zip(self.keys, self.stored, self.nbytes, strict=True)
        return (StoredBlock(key, self.group, bool(stored), nbytes) for key, stored, nbytes in columns)

    @property
    def stored_nbytes(self) -> int:
        return sum(compress(self.nbytes, self.stored))


class SessionRecord(NamedTuple):
    """What the store is to know of a session: `info`, in which times are Unix seconds, its chain up to the last block
    that is stored or gone on behind, and the stored blocks of other groups with which that is done. Of one that is gone
    nothing."""

    session_id: str
    info: SessionInfo | None = None
    chain: StoredChain = StoredChain()
    beside: tuple[StoredBlock, ...] = ()
