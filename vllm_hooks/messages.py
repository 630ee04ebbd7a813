"""What the two halves of the connector tell each other, once a step."""

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


class SpillBlock(NamedTuple):
    """Encode this block of the paged cache and keep it under its key.

    group: the KV cache group. first_token: the place of its first token in the chain. exact: how many of its first
    tokens are kept as they are.
    """

    key: bytes
    group: int
    block_id: int
    first_token: int
    exact: int = 0


class GroupBlocks(NamedTuple):
    """Encoded blocks of a KV cache group, and the blocks of the paged cache that they go to."""

    group: int
    keys: list[bytes]
    block_ids: list[int]


class Load(NamedTuple):
    """Decode codes into blocks of the paged cache, for a request that waits for them.

    is_prefetch: no request waits; vLLM knows nothing of it, and the id is our own.
    """

    request_id: str
    parts: tuple[GroupBlocks, ...]
    is_prefetch: bool = False


class GroupKeys(NamedTuple):
    """Blocks of a KV cache group."""

    group: int
    keys: list[bytes]


@dataclass
class ManthanMetadata(KVConnectorMetadata):
    """Scheduler to worker, carried out in this order; spills only once the model's step was begun: a block may be named
    in the very step that computes it."""

    place: str | None = None
    """Not None: the KV of old is void. An emptied store is used from now on; the directory's name for it."""
    drops: list[GroupKeys] = field(default_factory=list)
    go_first: list[GroupKeys] = field(default_factory=list)
    """The next blocks to leave a fast tier for the one behind it."""
    loads: list[Load] = field(default_factory=list)
    spills: list[SpillBlock] = field(default_factory=list)
    model_rests: bool = False
    """Nothing is computed in this step."""


class SpillResult(NamedTuple):
    """`cause` is None if the codes are in the rank's tier, and a metric label otherwise; `nbytes`: what they take
    there."""

    key: bytes
    group: int
    cause: str | None
    seconds: float
    nbytes: int = 0


class LoadResult(NamedTuple):
    """`failed`: what could not be loaded, as group, key and cause. `nbytes`: of the codes of what could."""

    request_id: str
    failed: list[tuple[int, bytes, str]]
    nbytes: int
    seconds: float
    is_prefetch: bool = False


@dataclass
class ManthanWorkerMetadata(KVConnectorWorkerMetadata):
    """Worker to scheduler: what ended since the last step, on all ranks."""

    spills: list[SpillResult] = field(default_factory=list)
    loads: list[LoadResult] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ManthanWorkerMetadata":
        assert isinstance(other, ManthanWorkerMetadata)
        return ManthanWorkerMetadata(self.spills + other.spills, self.loads + other.loads)
