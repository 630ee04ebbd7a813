"""Messages between the two halves of the connector, one each way in a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from manthan.manager.events import BlocksDropped, Verdict
from manthan.manager.session.blocks import MemoryShape
from manthan.manager.transfer import Transfer, TransferResult


@dataclass
class ManthanMetadata(KVConnectorMetadata):
    """Message from scheduler to worker.

    Loads may begin at once, after place and drops. Stores begin when the step's KV is computed.
    """

    place: str | None = None
    """Name of the emptied store that is used from now on, because the KV of old is void; None for no change."""
    drops: Sequence[BlocksDropped] = ()
    stores: Sequence[Transfer] = ()
    loads: Sequence[Transfer] = ()
    tokens: int = 0
    """Number of tokens that the model computes in this step."""
    model_rests: bool = False
    """True if nothing is computed in this step."""
    step: int = 0
    """Number of the step, counted from the engine's start."""
    failed: dict[str, Sequence[int]] = field(default_factory=dict)
    """Blocks of loads that were promised to vLLM and will not be, by the id of the request that waits."""
    cancels: bool = False
    """True if jobs that have not begun are to be answered as failed, since the prefix cache is reset."""
    may_calibrate: bool = False
    """True if no request of this step has a tenant, so that its KV may shape the model's profile."""
    revokes: bool = False
    """True if stores whose blocks are not read yet are to be given up, since requests need the blocks."""


class Candidate(NamedTuple):
    """Profile made from traffic. path: of its file. shape: sizes of blocks in its codec."""

    path: Path
    shape: MemoryShape


@dataclass
class ManthanWorkerMetadata(KVConnectorWorkerMetadata):
    """Message from worker to scheduler: transfers that ended since the last step, on all ranks."""

    results: list[TransferResult] = field(default_factory=list)
    """Results, one for each job and rank."""
    gathered: list[int] = field(default_factory=list)
    """Ids of stores whose blocks need not stay in the pool any more; once for each rank, not after its result."""
    verdicts: list[Verdict] = field(default_factory=list)
    candidate: Candidate | None = None
    errors: list[str] = field(default_factory=list)
    """Calls of the worker half that raised."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ManthanWorkerMetadata":
        assert isinstance(other, ManthanWorkerMetadata)
        return ManthanWorkerMetadata(
            self.results + other.results,
            self.gathered + other.gathered,
            self.verdicts + other.verdicts,
            self.candidate or other.candidate,
            self.errors + other.errors,
        )
