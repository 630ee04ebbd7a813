"""Messages between the two halves of the connector: one each way in a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from manthan.manager.events import BlocksDropped, BlocksTrimmed, Verdict
from manthan.manager.session.blocks import MemoryShape
from manthan.manager.transfer import Transfer, TransferResult


@dataclass
class ManthanMetadata(KVConnectorMetadata):
    """Message from scheduler to worker.

    Loads may begin at once, after `place` and `drops`. Stores begin when the step's KV is computed.
    """

    place: str | None = None
    """Name of the emptied store to use from now on, because all earlier KV is void; None for no change."""
    drops: Sequence[BlocksDropped | BlocksTrimmed] = ()
    stores: Sequence[Transfer] = ()
    loads: Sequence[Transfer] = ()
    tokens: int = 0
    """Number of tokens computed by the model in this step."""
    model_rests: bool = False
    """True if the model computes nothing in this step."""
    step: int = 0
    """Number of the step, counted from the engine's start."""
    failed: dict[str, Sequence[int]] = field(default_factory=dict)
    """Blocks of loads promised to vLLM and given up, by the id of the waiting request."""
    cancels: bool = False
    """True to answer jobs not begun as failed, because the prefix cache is reset."""
    may_calibrate: bool = False
    """True if no request of the step has a tenant. The KV may then shape the model's profile."""
    revokes: bool = False
    """True to give up stores with unread blocks, because requests need the blocks."""


class Candidate(NamedTuple):
    """Profile made from traffic. path: of its file. shape: sizes of blocks in its codec."""

    path: Path
    shape: MemoryShape


@dataclass
class ManthanWorkerMetadata(KVConnectorWorkerMetadata):
    """Message from worker to scheduler: transfers ended since the last step, on all ranks."""

    results: list[TransferResult] = field(default_factory=list)
    """Results, one for each job and rank."""
    gathered: list[int] = field(default_factory=list)
    """Ids of stores whose blocks may leave the pool; once for each rank, never after the result."""
    verdicts: list[Verdict] = field(default_factory=list)
    measured: dict[int, int] = field(default_factory=dict)
    """Number of blocks that a rank's guard has looked at before the first verdict, by rank, where it changed."""
    candidate: Candidate | None = None
    errors: list[str] = field(default_factory=list)
    """Calls of the worker half that raised."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ManthanWorkerMetadata":
        assert isinstance(other, ManthanWorkerMetadata)
        return ManthanWorkerMetadata(
            self.results + other.results,
            self.gathered + other.gathered,
            self.verdicts + other.verdicts,
            self.measured | other.measured,
            self.candidate or other.candidate,
            self.errors + other.errors,
        )
