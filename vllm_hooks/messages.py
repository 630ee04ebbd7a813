"""What the two halves of the connector tell each other, once a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


class SpillBlock(NamedTuple):
    """Encode this block of the paged cache and keep it under its key; exact: and an exact copy of it beside that."""

    key: bytes
    block_id: int
    exact: bool = False


class Load(NamedTuple):
    """Decode these codes into these blocks of the paged cache, for a request that waits for them.

    is_prefetch: no request waits; vLLM knows nothing of it, and the id is our own. exact: those of the keys that have
    an exact copy, which is to be used instead.
    """

    request_id: str
    keys: list[bytes]
    block_ids: list[int]
    is_prefetch: bool = False
    exact: frozenset[bytes] = frozenset()


@dataclass
class ManthanMetadata(KVConnectorMetadata):
    """Scheduler to worker, carried out in this order."""

    place: str | None = None
    """Not None: the KV of old is void. An emptied store is used from now on; the directory's name for it."""
    drops: list[bytes] = field(default_factory=list)
    copy_drops: list[bytes] = field(default_factory=list)
    """Blocks whose exact copy goes, and whose codes stay."""
    go_first: list[bytes] = field(default_factory=list)
    """The next blocks to leave a fast tier for the one behind it."""
    spills: list[SpillBlock] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    model_rests: bool = False
    """Nothing is computed in this step."""


class SpillResult(NamedTuple):
    """`cause` is None if the codes are in the rank's tier, and a metric label otherwise; `copy_cause` the same of the
    exact copy, if there should be one."""

    key: bytes
    cause: str | None
    seconds: float
    copy_cause: str | None = None


class LoadResult(NamedTuple):
    """`failed` are the keys that could not be loaded, each with its cause; `spoiled` those whose exact copy could not
    be, and that were decoded instead."""

    request_id: str
    failed: list[tuple[bytes, str]]
    nbytes: int
    seconds: float
    is_prefetch: bool = False
    spoiled: Sequence[tuple[bytes, str]] = ()


@dataclass
class ManthanWorkerMetadata(KVConnectorWorkerMetadata):
    """Worker to scheduler: what ended since the last step, on all ranks."""

    spills: list[SpillResult] = field(default_factory=list)
    loads: list[LoadResult] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ManthanWorkerMetadata":
        assert isinstance(other, ManthanWorkerMetadata)
        return ManthanWorkerMetadata(self.spills + other.spills, self.loads + other.loads)
