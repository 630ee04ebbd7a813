"""The two forms of work between scheduler and workers: a transfer, and what became of it on one rank."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from manthan.manager.sessions.marks import Mark


@dataclass(frozen=True)
class Transfer:
    """One job: consecutive blocks of one KV cache group go from the pool to the primary tier, or back.

    job_id: unique in the engine's life.
    block_hashes: of the blocks, in the order of the tokens.
    block_ids: int32, where in the paged cache each block is read or written.
    first_token: position in the session of the first block's first token.
    exact_tokens: of a store, how many of the session's first tokens keep every bit.
    codec: of a store, the name of the blocks' codec; empty for the configured one.
    mark: of a store, the mark of the blocks, which stands in their headers.
    tenant: whose blocks they are.
    request_id: of a load, the request that waits for it; None if none waits.
    """

    job_id: int
    direction: Literal["store", "load"]
    group: int
    block_hashes: list[bytes]
    block_ids: np.ndarray
    first_token: int = 0
    exact_tokens: int = 0
    codec: str = ""
    mark: Mark = Mark.EXACT
    tenant: str = ""
    request_id: str | None = None


@dataclass(frozen=True)
class TransferResult:
    """What became of a transfer on one rank.

    nbytes: int64, of each compressed block; 0 where the block failed.
    failed: by index in the job, the cause, which is a metric's label.
    seconds: that the job took.
    """

    job_id: int
    nbytes: np.ndarray
    failed: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
