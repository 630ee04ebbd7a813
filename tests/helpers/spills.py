"""Blocks that a manager wants encoded, one by one, and the answers to them."""

from typing import NamedTuple

from manthan.manager.sessions.manager import SessionMemoryManager


class SpillOrder(NamedTuple):
    """Encode the block of this key. The fields are those of a `SpillRun` and of its encodings."""

    key: bytes
    first_token: int
    exact: int
    codec: str
    nbytes: int
    group: int | None = None
    tenant: str = ""


def take_spills(manager: SessionMemoryManager, limit: int) -> list[SpillOrder]:
    """Return up to `limit` blocks to encode now."""
    return [
        SpillOrder(key, first, exact, codec, nbytes, run.group, run.tenant)
        for run in manager.take_spill_runs(limit)
        for key, first, (nbytes, exact, codec) in zip(run.keys, run.first_tokens, run.encodings, strict=True)
    ]


def spilled(manager: SessionMemoryManager, key: bytes, nbytes: int, now: float, group: int | None = None) -> None:
    """Tell the manager that every rank has stored this block."""
    manager.all_spilled((key,), (nbytes,), now, group)
