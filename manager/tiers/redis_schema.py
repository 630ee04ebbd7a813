"""Names of Manthan's data in Redis, as docs/redis.md shows them, and times to live.

With its policy `volatile-ttl`, Redis first evicts the data with the shortest time left to live. Blocks' times to live
fall along a session, so a session's last blocks go first.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

from manthan.manager.tiers.shards import Shard

FALL, HALF = 0.25, 512
"""Share of the time to live that the end of an endless session lacks; depth of the block that lacks half this share."""
SAMPLES = 64  # most block hashes in the Redis hash of a session. Each is cut to its first 4 bytes
FIRST_TTL = 0.5  # share of the time to live that a block has from its store until its session is written


@dataclass(frozen=True)
class Namespace:
    """Part of a Redis, or of a disk, for a single model.

    prefix: begin of all keys in Redis. name: last part of the model's name, and a digest of every fact on which the
    meaning of compressed blocks depends, such as the weights.
    """

    prefix: str
    name: str

    @classmethod
    def of(cls, prefix: str, model: str, identity: Mapping[str, object]) -> "Namespace":
        """Return the namespace of a model. identity: every fact on which the meaning of compressed blocks depends."""
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
    """Return index and first 4 bytes of at most SAMPLES block hashes, with the last: "7:9f3a01bc 15:e07b33d2"."""
    count = len(block_hashes)
    some = {(n + 1) * count // SAMPLES - 1 for n in range(SAMPLES)} if count > SAMPLES else range(count)
    return " ".join(f"{at}:{block_hashes[at].hex()[:8]}" for at in sorted(some))


def shared_blocks(sampled: str, block_hashes: Sequence[bytes]) -> int:
    """Return how many of a prompt's first blocks a session has, as far as the session's `sample` tells.

    A block hash covers all earlier tokens, so all blocks before the last common hash are common, too.

    block_hashes: of the prompt.
    """
    pairs = (word.split(":") for word in sampled.split())
    some = ((int(at), start) for at, start in pairs)
    depths = (at for at, start in some if at < len(block_hashes) and block_hashes[at].hex()[:8] == start)
    return max(depths, default=-1) + 1


def iso(seconds: float) -> str:
    """Return Unix seconds as ISO 8601 in UTC: 2026-11-21T11:04:53Z."""
    return datetime.fromtimestamp(round(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
