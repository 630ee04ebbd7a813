"""Jobs as a driver makes them, and what ranks answer."""

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np

from manthan.manager.transfer import Transfer, TransferResult

_IDS = count(1_000_000)


def store(
    keys: Sequence[bytes], block_ids: Sequence[int], first_token: int = 0, exact_tokens: int = 0, **more: Any
) -> Transfer:
    """A store of blocks that follow each other. more: `group`, `codec`, `mark` and `tenant`."""
    return _job("store", keys, block_ids, first_token=first_token, exact_tokens=exact_tokens, **more)


def load(keys: Sequence[bytes], block_ids: Sequence[int], request_id: str | None = "request", **more: Any) -> Transfer:
    return _job("load", keys, block_ids, request_id=request_id, **more)


def _job(direction: Any, keys: Sequence[bytes], block_ids: Sequence[int], group: int = 0, **more: Any) -> Transfer:
    return Transfer(next(_IDS), direction, group, list(keys), np.array(block_ids, np.int32), **more)


def done(job: Transfer, nbytes: int = 0, failed: dict[int, str] | None = None, seconds: float = 0.0) -> TransferResult:
    """What a rank answers. nbytes: of each block."""
    failed = failed or {}
    sizes = [0 if at in failed else nbytes for at in range(len(job))]
    return TransferResult(job.job_id, np.array(sizes, np.int64), failed, seconds)


def names(jobs: Iterable[Transfer]) -> list[bytes]:
    """Block hashes of jobs, from each one's tail on, as they are saved."""
    return [key for job in jobs for key in reversed(job.block_hashes)]
