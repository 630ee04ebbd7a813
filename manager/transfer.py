"""Messages between scheduler and workers: a transfer of KV blocks, and the transfer's result on each rank."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from manthan.manager.events import Restored
from manthan.manager.pool import BlockName, Mark

STORE_DOWN = "store_down"  # cause of a failure: a disk, server or other rank does not answer, but may have the blocks
RESET = "reset"  # cause of a transfer's early end: the prefix cache is reset
NEEDED = "needed"  # cause for blocks not stored, because requests need the pool's blocks at once. It is no failure
JOB_BLOCKS = 64  # most blocks of a store. The block pool gets all of them back together, once they are read


@dataclass(frozen=True, eq=False)
class Transfer:
    """Job that copies blocks of one KV cache group from the block pool to the tiers ("store"), or back ("load").

    Tiers have compressed blocks. The blocks of a store are consecutive, and have the same codec, mark and tenant. A
    request's load has at most one job for each group. All these jobs begin in the same step.
    """

    job_id: int  # unique in the engine's life
    direction: Literal["store", "load"]
    group: int
    block_hashes: Sequence[bytes]  # in the order of the tokens
    block_ids: NDArray[np.int32]  # blocks of the paged cache to read or write
    first_token: int = 0  # of a store, position in the session of the first block's first token; 0 for a load
    exact_tokens: int = 0  # of a store, position in the session where the blocks' lossless first tokens end; 0 if none
    codec: str = ""  # of a store, name of the blocks' codec; empty for the configured codec
    mark: Mark = Mark.EXACT  # of a store, origin of the blocks' KV, written into their headers
    tenant: str = ""  # tenant of the session
    request_id: str | None = None  # of a load, the waiting request; None for a prefetch, which no request waits for

    def __len__(self) -> int:
        return len(self.block_hashes)

    def first_tokens(self, block_tokens: int) -> list[int]:
        """Return the position in the session of each block's first token."""
        return [self.first_token + n * block_tokens for n in range(len(self))]

    def exacts(self, block_tokens: int) -> list[int]:
        """Return, for each block, the number of its first tokens that are stored losslessly."""
        left = self.exact_tokens - self.first_token
        return [min(max(left - n * block_tokens, 0), block_tokens) for n in range(len(self))]

    def part(self, start: int, stop: int, block_tokens: int) -> "Transfer":
        hashes, ids = self.block_hashes[start:stop], self.block_ids[start:stop]
        return replace(self, block_hashes=hashes, block_ids=ids, first_token=self.first_token + start * block_tokens)


@dataclass(frozen=True, eq=False)
class TransferResult:
    """Result of a transfer on a rank. In a load, every block behind the first failed block counts as not loaded."""

    job_id: int
    nbytes: NDArray[np.int64]  # for each block, bytes taken of the tier (store) or read (load); 0 for a failed block
    failed: dict[int, str] = field(default_factory=dict)  # by index in the job: cause of the failure, a metric's label
    seconds: float = 0.0  # duration of the job
    inner: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Of a store, by a block's index in the job: the bytes taken of the tier by the block's base, by base and first
    refinement, and so on to all refinements but the last; see `tiers.tier.part_ends`.

    Blocks without refinements are left out. If the tier cannot trim, all blocks are left out.
    """

    @classmethod
    def refused(cls, job: Transfer, cause: str) -> "TransferResult":
        """Return the result of a job that never began: all blocks of a store failed, or the first block of a load."""
        blocks = range(len(job)) if job.direction == "store" else range(1)
        return cls(job.job_id, np.zeros(len(job), np.int64), dict.fromkeys(blocks, cause))


class Answers:
    """Jobs that are settled together, with the ranks' results so far.

    session_id: of a load; empty for a store. depth: of a load, the number of blocks that end at the loaded resume point
    if only blocks of resume points are stored, else 0.
    """

    def __init__(self, jobs: Sequence[Transfer], session_id: str = "", depth: int = 0) -> None:
        self.jobs, self._session_id, self._depth = jobs, session_id, depth
        self.results: list[TransferResult] = []

    def add(self, result: TransferResult, ranks: int) -> bool:
        """Add a result unless it was added before. Return True if each of `ranks` ranks has now answered every job."""
        if all(result is not other for other in self.results):
            self.results.append(result)
        return len(self.results) >= ranks * len(self.jobs)

    @property
    def failed(self) -> dict[BlockName, str]:
        """Cause of the failure, by group and hash, of each block that failed on any rank.

        STORE_DOWN and RESET, which leave the block in the tier, yield to other ranks' causes.
        """
        jobs = {job.job_id: job for job in self.jobs}
        told = [(cause, jobs[each.job_id], at) for each in self.results for at, cause in each.failed.items()]
        told.sort(key=lambda one: one[0] not in (STORE_DOWN, RESET))
        return {(job.group, job.block_hashes[at]): cause for cause, job, at in told}

    @property
    def seconds(self) -> float:
        return max((result.seconds for result in self.results), default=0.0)

    def restored(self, main: int, fails_whole: bool, request_id: str | None = None) -> Restored:
        """Return the event of an ended load. The blocks of group `main` before its first failed block are good.

        fails_whole: True if a failure in any group leaves no good block.
        """
        failed = self.failed
        good = blocks = self._depth or sum(len(job) for job in self.jobs if job.group == main)
        further = sum(map(len, self.jobs)) - (0 if self._depth else blocks)
        if failed:
            names = ((main, name) for job in self.jobs if job.group == main for name in job.block_hashes)
            good = next((at for at, name in enumerate(names) if name in failed), good)
            if fails_whole:
                good = further = 0
        nbytes, causes = sum(int(result.nbytes.sum()) for result in self.results), list(failed.values())
        return Restored(self._session_id, blocks, good, further, nbytes, self.seconds, causes, request_id)


Weigh: TypeAlias = Callable[[Sequence[int]], int]
"""Function that takes a block's bytes on each rank, and returns the bytes charged to the budget of all ranks."""


def weighed(ranks: Iterable[Sequence[int]], weigh: Weigh) -> list[int]:
    """Return the bytes that `weigh` charges for a block's first part, for its first two parts, and so on.

    ranks: for each rank, the bytes there of the first part, of the first two parts, and so on.
    """
    return [weigh(sizes) for sizes in zip(*ranks, strict=False)]


def on_each(ranks: int) -> Weigh:
    """Return a function that charges `ranks * max(size over ranks)`, so that no rank is full before the budget is."""
    return lambda sizes: ranks * max(sizes)
