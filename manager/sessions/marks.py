"""Marks: which blocks of the KV pool the model computed exactly, and whom the others may be served to."""

from collections.abc import Iterable
from enum import IntEnum


class Mark(IntEnum):
    """Origin of a resident block's KV.

    EXACT: the model computed it from exact blocks, or the exact codec gave it back bit for bit. DERIVED: the model
    computed it behind a decoded block. DECODED: a lossy codec wrote it. Decoded KV is never encoded again.
    """

    EXACT = 0
    DERIVED = 1
    DECODED = 2


Owner = tuple[str, str]
"""Tenant and name of the session whose return brought decoded KV back; branches of one session share it."""


class Marks:
    """Mark and owner of each block of a pool, by block id. A block is EXACT until somebody says otherwise.

    Args:
        blocks: number of blocks in the pool.
    """

    def __init__(self, blocks: int) -> None:
        self._marks = [Mark.EXACT] * blocks
        self._owners: dict[int, Owner | None] = {}

    def __bool__(self) -> bool:
        """True if any block is not exact."""
        return bool(self._owners)

    def __getitem__(self, block_id: int) -> Mark:
        return self._marks[block_id]

    def lossy(self, block_ids: Iterable[int]) -> set[int]:
        """Return those of these blocks that are not exact."""
        return self._owners.keys() & block_ids if self._owners else set()

    def set(self, block_ids: Iterable[int], mark: Mark, owner: Owner | None) -> None:
        """Mark blocks. An exact block has no owner."""
        for block_id in block_ids:
            self._marks[block_id] = mark
            if mark:
                self._owners[block_id] = owner
            else:
                self._owners.pop(block_id, None)

    def clear(self, block_ids: Iterable[int]) -> None:
        """Forget the marks of blocks that were allocated anew."""
        if self._owners:
            self.set(block_ids, Mark.EXACT, None)

    def copy(self, source: int, target: int) -> None:
        """Give a copy of a block the mark and the owner of its source."""
        self.set((target,), self[source], self._owners.get(source))

    def serves(self, block_id: int, owner: Owner | None) -> bool:
        """True if this block may be served to sessions of `owner`; None stands for a request that wants exact KV."""
        return block_id not in self._owners or (owner is not None and self._owners[block_id] == owner)
