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

    Loads may begin at once, after `place` and `drops` were obeyed. Stores begin when the step's KV is computed.
    """

    place: str | None = None
    """Argument for `Tier.cleared`, because all earlier KV is dropped; None for no change."""
    drops: Sequence[BlocksDropped | BlocksTrimmed] = ()
    stores: Sequence[Transfer] = ()
    loads: Sequence[Transfer] = ()
    tokens: int = 0
    """Number of tokens that the model computes in this step."""
    failed: dict[str, Sequence[int]] = field(default_factory=dict)
    """By request id, blocks whose loads vLLM waits for, but which will not come; to report as failed."""
    cancels: bool = False
    """True to answer jobs that have not begun as failed, because the prefix cache is reset."""
    may_calibrate: bool = False
    """True if a profile may be made from this step's KV, because no request in it has a tenant."""
    revokes: bool = False
    """True to give up stores whose blocks are not gathered yet, because requests need these blocks."""


class Candidate(NamedTuple):
    """Profile made from traffic. path: its file. shape: sizes of blocks in its codec."""

    path: Path
    shape: MemoryShape


@dataclass
class ManthanWorkerMetadata(KVConnectorWorkerMetadata):
    """Message from worker to scheduler, with news since the last step. vLLM has all ranks' messages joined."""

    results: list[TransferResult] = field(default_factory=list)
    """Results, one for each job and rank."""
    gathered: list[int] = field(default_factory=list)
    """Ids of stores whose blocks are gathered, so that the pool may reuse them; once a rank, not after the result."""
    verdicts: list[Verdict] = field(default_factory=list)
    measured: dict[int, int] = field(default_factory=dict)
    """Number of blocks that a rank's guard has looked at before the first verdict, by rank, where it changed."""
    candidate: Candidate | None = None
    errors: list[str] = field(default_factory=list)

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
