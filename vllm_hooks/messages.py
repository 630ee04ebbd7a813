"""What the two halves of the connector tell each other, once a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from manthan.manager.work import GroupKeys, Load, LoadResult, Name, SpillBlock, SpillResult, Verdict


@dataclass
class ManthanMetadata(KVConnectorMetadata):
    """Scheduler to worker. Loads may begin at once, after place and drops; spills when the step's KV is computed."""

    place: str | None = None
    """Not None: the KV of old is void. An emptied store is used from now on; the directory's name for it."""
    drops: Sequence[GroupKeys] = ()
    spills: Sequence[SpillBlock] = ()
    loads: Sequence[Load] = ()
    tokens: int = 0
    """Number of tokens that the model computes in this step."""
    model_rests: bool = False
    """Nothing is computed in this step."""
    step: int = 0
    """Its number, counted from the engine's start."""
    failed: list[Load] = field(default_factory=list)
    """Loads that were promised to vLLM and will not be: requests wait for an answer."""
    cancels: bool = False
    """True if orders that have not begun are to be answered as failed, since the prefix cache is reset."""
    revokes: bool = False
    """True if earlier orders whose blocks are not read yet are to be given up, since requests need the blocks."""


@dataclass
class ManthanWorkerMetadata(KVConnectorWorkerMetadata):
    """Worker to scheduler: what ended since the last step, on all ranks."""

    spills: list[SpillResult] = field(default_factory=list)
    loads: list[LoadResult] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    copied: list[Name] = field(default_factory=list)
    """Blocks that are to be encoded and need not stay in the pool any more; each once, before its answer."""
    errors: list[str] = field(default_factory=list)
    """Calls of the worker half that raised."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ManthanWorkerMetadata":
        assert isinstance(other, ManthanWorkerMetadata)
        return ManthanWorkerMetadata(
            self.spills + other.spills,
            self.loads + other.loads,
            self.verdicts + other.verdicts,
            self.copied + other.copied,
            self.errors + other.errors,
        )
