"""Jobs as a driver makes them, and ranks' results of them."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

from manthan.manager.transfer import Transfer, TransferResult

_IDS = count(1_000_000)


def store(
    block_hashes: Sequence[bytes], block_ids: Sequence[int], first_token: int = 0, exact_tokens: int = 0, **more: Any
) -> Transfer:
    """Return a store of blocks that follow each other. more: `group`, `codec`, `mark` and `tenant`."""
    return _job("store", block_hashes, block_ids, first_token=first_token, exact_tokens=exact_tokens, **more)


def load(
    block_hashes: Sequence[bytes], block_ids: Sequence[int], request_id: str | None = "request", **more: Any
) -> Transfer:
    return _job("load", block_hashes, block_ids, request_id=request_id, **more)


def _job(
    direction: Any, block_hashes: Sequence[bytes], block_ids: Sequence[int], group: int = 0, **more: Any
) -> Transfer:
    return Transfer(next(_IDS), direction, group, list(block_hashes), np.array(block_ids, np.int32), **more)


def done(job: Transfer, nbytes: int = 0, failed: dict[int, str] | None = None, seconds: float = 0.0) -> TransferResult:
    """Result of a job on a rank. nbytes: of each block."""
    failed = failed or {}
    sizes = [0 if at in failed else nbytes for at in range(len(job))]
    return TransferResult(job.job_id, np.array(sizes, np.int64), failed, seconds)
