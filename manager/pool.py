"""A KV pool as the driver sees it, vLLM's or the simulator's: block ids, the prefix cache, and the free queue.

The free queue has, from the head on, blocks that hold nothing, saved ones, and unsaved ones. The pool takes blocks from
its head.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol, TypeAlias

BlockName: TypeAlias = tuple[int, bytes]
"""KV cache group and block hash."""
Owner: TypeAlias = tuple[str, str]
"""Tenant and name of the session whose return brought decoded KV back. Branches of one session share it."""
Asker: TypeAlias = Owner | tuple[str, str, str]
"""Owner that asks for KV, with "high" behind it if it takes none that was decoded from coarse blocks."""


class Mark(IntEnum):
    """Origin of a resident block's KV.

    EXACT: the model computed it from exact blocks, or the exact codec gave it back bit for bit. DERIVED: the model
    computed it behind a decoded block. DECODED: a lossy codec wrote it. Decoded KV is never encoded again.
    """

    EXACT = 0
    DERIVED = 1
    DECODED = 2


MARKS = tuple(Mark)
"""By number. To look one up is ten times as fast as to call `Mark`."""


class Marks:
    """Mark and owner of each block of a pool, by block id. A new block is EXACT.

    Args:
        blocks: number of blocks in the pool.
    """

    def __init__(self, blocks: int) -> None:
        self._marks = [Mark.EXACT] * blocks
        self._owners: dict[int, Owner | None] = {}
        self._coarse: set[int] = set()

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
            self._coarse.discard(block_id)
            if mark:
                self._owners[block_id] = owner
            else:
                self._owners.pop(block_id, None)

    def coarsen(self, block_ids: Iterable[int]) -> None:
        """Note that blocks, which are marked, are too coarse for requests of high quality."""
        self._coarse.update(block_ids)

    def clear(self, block_ids: Iterable[int]) -> None:
        """Forget the marks of blocks that were allocated anew."""
        if self._owners:
            self.set(block_ids, Mark.EXACT, None)

    def copy(self, source: int, target: int) -> None:
        """Give a copy of a block the mark and the owner of its source."""
        self.set((target,), self[source], self._owners.get(source))
        if source in self._coarse:
            self.coarsen((target,))

    def serves(self, block_id: int, asker: Asker | None) -> bool:
        """True if this block may be served to a request. None stands for one that wants exact KV."""
        if block_id not in self._owners or asker is None:
            return block_id not in self._owners
        return self._owners[block_id] == asker[:2] and (len(asker) == 2 or block_id not in self._coarse)


class Unsaved(NamedTuple):
    """A free block whose KV exists nowhere else."""

    group: int
    block_hash: bytes
    block_id: int


class Pool(Protocol):
    """KV blocks of all KV cache groups."""

    marks: Marks
    """By block id. Cleared when the pool hands a block out."""

    @property
    def size(self) -> int:
        """Number of blocks that requests can have."""

    def __len__(self) -> int:
        """Number of free blocks."""

    def lookup(self, group: int, block_hashes: Sequence[bytes]) -> list[int]:
        """Return the block id of each of these blocks in the prefix cache, -1 for one that is not there."""

    def hold(self, block_ids: Sequence[int]) -> None:
        """Reference blocks once more. Nobody overwrites a referenced block."""

    def take(self, count: int) -> list[int]:
        """Return blocks from the head of the free queue, each referenced once. Their KV is lost."""

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each. The first of those that come free is overwritten first."""

    def cache(self, block_id: int, group: int, block_hash: bytes, position: int) -> None:
        """Enter a block into the prefix cache. `position`: its index among the blocks of its session and group."""

    def keep(self, group: int, block_hashes: Sequence[bytes]) -> None:
        """Note that blocks are saved: the pool overwrites them before unsaved ones, the first first."""

    def lead(self, group: int, block_hashes: Sequence[bytes]) -> None:
        """Overwrite these saved blocks before other saved ones, in this order."""

    def forget(self, group: int, block_hashes: Sequence[bytes]) -> None:
        """Note that blocks are saved no more: the pool overwrites them last, the first at the very end."""

    def release(self, group: int, block_hashes: Sequence[bytes]) -> None:
        """Take blocks out of the prefix cache, and overwrite those that nobody references next, the last first."""

    def runway(self, most: int) -> int:
        """Return how many free blocks are taken before the first unsaved one, up to `most`."""

    def unsaved(self, most: int) -> Iterator[Unsaved]:
        """Yield the unsaved blocks among the first `most` of the free queue, from the head on."""

    def redundant(self, spare: int) -> Iterator[Unsaved]:
        """Yield saved blocks that the pool need not overwrite soon, the one that it would overwrite last first.

        Args:
            spare: number of free saved blocks that are left out, those that the pool overwrites first.
        """
