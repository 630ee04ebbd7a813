"""Messages between the scheduler half and the worker halves of the connector: at most one each way in a step."""

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
    """Message from the scheduler half to each worker half.

    Workers obey `cancels`, `revokes`, `place` and `drops`, then `loads`. Stores begin after the step's forward pass.
    """

    place: str | None = None
    """Argument for `Tier.cleared`, by which workers drop all earlier compressed blocks; None to drop none."""
    has_new_weights: bool = False  # True if weights have changed, or may have, since the last step
    drops: Sequence[BlocksDropped | BlocksTrimmed] = ()
    stores: Sequence[Transfer] = ()
    loads: Sequence[Transfer] = ()
    tokens: int = 0  # number of tokens that the model computes in this step
    failed: dict[str, Sequence[int]] = field(default_factory=dict)
    """By request id, ids of blocks to report to vLLM as failed: vLLM waits for loads of them that never begin."""
    cancels: bool = False
    """True to end transfers early, because the prefix cache is being reset. Blocks not transferred count as failed."""
    may_calibrate: bool = False
    """True if a codec's profile (statistics) may be made of this step's KV: no request in the engine has a tenant."""
    revokes: bool = False  # True to give up stores whose blocks are not all read yet, because requests need the blocks


class Candidate(NamedTuple):
    """Profile of a codec, made from the KV of requests."""

    path: Path  # its file
    shape: MemoryShape  # sizes of blocks in that codec


@dataclass
class ManthanWorkerMetadata(KVConnectorWorkerMetadata):
    """Message from a worker half to the scheduler half, with news since the last. vLLM joins the ranks' messages."""

    results: list[TransferResult] = field(default_factory=list)  # one for each ended transfer and rank
    gathered: list[int] = field(default_factory=list)
    """Ids of stores whose blocks a rank has read, or will not read. No id comes later than the store's result."""
    verdicts: list[Verdict] = field(default_factory=list)  # newest measurements of the codecs' errors by each guard
    measured: dict[int, int] = field(default_factory=dict)
    """By rank, number of blocks that the guard has taken for its first verdict, if the number has changed."""
    candidate: Candidate | None = None
    errors: list[str] = field(default_factory=list)  # names of the worker half's methods that raised an exception

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
