"""KV pool of the driver, vLLM's or the simulator's: block ids, the prefix cache, and the free queue.

The free queue has, from the head on, empty blocks, saved blocks, and unsaved blocks. The pool takes blocks from the
head.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol, TypeAlias

BlockName: TypeAlias = tuple[int, bytes]  # KV cache group and block hash
Owner: TypeAlias = tuple[str, str]
"""Tenant and name of the session whose return brought decoded KV back, common to the session's branches."""
Asker: TypeAlias = Owner | tuple[str, str, str]
"""Owner of a request for KV, followed by "high" if KV decoded from coarse blocks is refused."""


class Mark(IntEnum):
    """Origin of a resident block's KV."""

    EXACT = 0  # computed from exact blocks, or restored bit for bit by the exact codec
    DERIVED = 1  # computed behind a decoded block
    DECODED = 2  # written by a lossy codec, and never encoded again


MARKS = tuple(Mark)  # marks by number. A lookup is ten times as fast as a call of `Mark`


class Marks:
    """Mark and owner of each block of a pool, by block id. A new block is EXACT."""

    def __init__(self) -> None:
        self._owners: dict[int, Owner | None] = {}  # of all blocks that are not exact
        self.decoded, self._coarse = set[int](), set[int]()

    def __bool__(self) -> bool:
        """True if any block is not exact."""
        return bool(self._owners)

    def __getitem__(self, block_id: int) -> Mark:
        if block_id not in self._owners:
            return Mark.EXACT
        return Mark.DECODED if block_id in self.decoded else Mark.DERIVED

    def lossy(self, block_ids: Iterable[int]) -> set[int]:
        """Return the lossy blocks of `block_ids`."""
        return self._owners.keys() & block_ids if self._owners else set()

    def set(self, block_ids: Iterable[int], mark: Mark, owner: Owner | None) -> None:
        """Mark blocks. An exact block has no owner."""
        marked = dict.fromkeys(block_ids, owner)
        self._coarse.difference_update(marked if self._coarse else ())
        (self.decoded.update if mark is Mark.DECODED else self.decoded.difference_update)(marked)
        if mark:
            self._owners.update(marked)
        else:
            for block_id in self.lossy(marked):
                del self._owners[block_id]

    def coarsen(self, block_ids: Iterable[int]) -> None:
        """Note marked blocks as too coarse for requests of high quality."""
        self._coarse.update(block_ids)

    def clear(self, block_ids: Iterable[int]) -> None:
        """Mark newly allocated blocks EXACT."""
        if self._owners:
            self.set(block_ids, Mark.EXACT, None)

    def copy(self, source: int, target: int) -> None:
        """Give a copy of a block the source's mark and owner."""
        self.set((target,), self[source], self._owners.get(source))
        if source in self._coarse:
            self.coarsen((target,))

    def serves(self, block_id: int, asker: Asker | None) -> bool:
        """True if a request of `asker` may be served this block. None stands for a request for exact KV."""
        if block_id not in self._owners or asker is None:
            return block_id not in self._owners
        return self._owners[block_id] == asker[:2] and (len(asker) == 2 or block_id not in self._coarse)


class FreeBlock(NamedTuple):
    """Block of the free queue that the prefix cache still has."""

    group: int
    block_hash: bytes
    block_id: int


class Pool(Protocol):
    """KV blocks of all KV cache groups."""

    marks: Marks  # by block id. Cleared when the pool hands a block out

    @property
    def size(self) -> int:
        """Number of blocks for requests."""

    def __len__(self) -> int:
        """Number of free blocks."""

    def lookup(self, group: int, block_hashes: Sequence[bytes]) -> list[int]:
        """Return the block id of each block in the prefix cache, -1 for an absent block."""

    def hold(self, block_ids: Sequence[int]) -> None:
        """Reference blocks once more. A referenced block is never overwritten."""

    def take(self, count: int) -> list[int]:
        """Return blocks from the head of the free queue, each referenced once. The KV is lost."""

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop a reference of each block. Of the blocks now free, the first is overwritten first."""

    def cache(self, block_id: int, group: int, block_hash: bytes, position: int) -> None:
        """Enter a block into the prefix cache. `position`: index within the block's session and group."""

    def loaded(self, block_ids: Sequence[int]) -> None:
        """Note referenced blocks that are saved, before the prefix cache has them."""

    def keep(self, group: int, block_hashes: Sequence[bytes]) -> None:
        """Note saved blocks: the pool overwrites them before unsaved blocks, in this order."""

    def lead(self, group: int, block_hashes: Sequence[bytes]) -> None:
        """Overwrite these saved blocks before all further saved blocks, in this order."""

    def forget(self, group: int, block_hashes: Sequence[bytes]) -> None:
        """Note blocks that are no longer saved: the pool overwrites them last, the first at the very end."""

    def give_up(self, group: int, block_hashes: Sequence[bytes]) -> None:
        """Overwrite these blocks next, the last first, as if they were saved. Referenced blocks are left as they are.

        The blocks stay in the prefix cache until then. A request that uses a block makes it an unsaved one again.
        """

    def release(self, group: int, block_hashes: Sequence[bytes]) -> None:
        """Take blocks out of the prefix cache. Blocks without a reference are overwritten next, the last first."""

    def runway(self, most: int) -> int:
        """Return the number of free blocks before the first unsaved block, at most `most`."""

    def unsaved(self, most: int) -> Iterator[FreeBlock]:
        """Yield the unsaved blocks among the first `most` of the free queue, from the head on."""

    def saved(self, most: int) -> Iterator[tuple[int, FreeBlock]]:
        """Yield the saved blocks, but those given up, among the first `most` of the free queue, each with its index."""

    def redundant(self, spare: int) -> Iterator[FreeBlock]:
        """Yield saved blocks of computed KV that the pool will not overwrite soon, the one overwritten last first.

        Args:
            spare: number of free saved blocks to leave out: the blocks overwritten first.
        """


class Runway:
    """Number of blocks in the free queue before the first unsaved block.

    Counting walks the free queue. It is walked again only when requests may have taken too many blocks since.

    Args:
        ahead: least number of blocks to look at in a walk.
    """

    def __init__(self, pool: Pool, ahead: int) -> None:
        self.pool, self.ahead, self._left = pool, ahead, 0

    def taken(self, at_most: int) -> None:
        """Note that at most so many blocks were taken from the head of the queue."""
        self._left -= at_most

    def forget(self) -> None:
        """Count anew at the next question, because saved blocks became unsaved."""
        self._left = 0

    def length(self, wanted: int) -> int:
        """Return the number of blocks. A result below `wanted` is exact; others may be too low."""
        if self._left < wanted:
            self._left = self.pool.runway(max(wanted, self.ahead))
        return self._left
