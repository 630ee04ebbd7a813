"""Names of Manthan's data in Redis. docs/redis.md shows it with redis-cli.

    manthan:{NAME}:session:ID           hash: a session, for people
    manthan:NAME:block:KEY:GROUP:RANK   string: one rank's compressed block, see manthan.codec.wire

KEY is vLLM's block hash, GROUP the KV cache group. With `volatile-ttl` the server evicts what has the shortest time to
live. Times to live fall along a session, so that its tail goes first.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

FALL, HALF = 0.25, 512
"""Share of the time to live that the last block of an endless session has less than the first; at depth HALF, half of
that."""
SAMPLES = 64
"""Largest number of block hashes that a session's hash names, by their first bytes."""
FIRST_TTL = 0.5
"""Share of the time to live that a block is stored with, until its session is told."""


@dataclass(frozen=True)
class Namespace:
    """Part of a Redis, or of a disk, that one model has.

    Args:
        prefix: Beginning of all names in Redis.
        name: Last part of the model's name, and a digest of all that decides what its compressed blocks mean.
    """

    prefix: str
    name: str

    @classmethod
    def of(cls, prefix: str, model: str, identity: Mapping[str, object]) -> "Namespace":
        """Return the namespace of a model. identity: facts that tell its blocks from others'."""
        text = json.dumps(identity, sort_keys=True, default=str)
        slug = re.sub(r"[^a-z0-9.]+", "-", model.rstrip("/").rpartition("/")[2].lower()).strip("-")[:40]
        return cls(prefix, f"{slug or 'model'}-{hashlib.sha256(text.encode()).hexdigest()[:12]}")

    def session(self, session_id: str) -> str:
        """Return the key of a session's hash. Special characters of a shell are percent-encoded."""
        return f"{self.prefix}{{{self.name}}}:session:{quote(session_id, safe='@~+,=/', errors='surrogatepass')}"

    def block(self, group: int, key: bytes, rank: int) -> str:
        return f"{self.prefix}{self.name}:block:{key.hex()}:{group}:{rank}"


def lives_s(ttl_s: float, depth: int) -> float:
    """Seconds that the block at this depth lives after its session's last use."""
    return ttl_s * (1 - FALL * depth / (depth + HALF))


def sample(keys: Sequence[bytes]) -> str:
    """Return the first bytes of some of a session's block hashes, the last one among them: "7:9f3a01bc 15:e07b33d2"."""
    count = len(keys)
    some = {(n + 1) * count // SAMPLES - 1 for n in range(SAMPLES)} if count > SAMPLES else range(count)
    return " ".join(f"{at}:{keys[at].hex()[:8]}" for at in sorted(some))


def shared_blocks(sampled: str, keys: Sequence[bytes]) -> int:
    """Number of blocks that a prompt begins with and that are also a session's, as far as its `sample` tells.

    The last block hash in common is enough, because a block hash covers all tokens before it.
    """
    pairs = (word.split(":") for word in sampled.split())
    depths = (int(at) for at, start in pairs if int(at) < len(keys) and keys[int(at)].hex()[:8] == start)
    return max(depths, default=-1) + 1


def iso(seconds: float) -> str:
    """Unix seconds as ISO 8601 in UTC: 2026-11-21T11:04:53Z."""
    return datetime.fromtimestamp(round(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
