"""Interface to the block pool of vLLM or of the simulator: block ids, the prefix cache, and the free queue.

A resident block is in the prefix cache. A saved block has a compressed copy in a tier, such as RAM or a disk. From its
head on, the free queue has blocks without a hash, then saved blocks of all groups and blocks given up, then all others.
The pool hands out blocks from the head, to be overwritten.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol, TypeAlias

from msgspec import Struct

BlockName: TypeAlias = tuple[int, bytes]  # KV cache group and block hash
Owner: TypeAlias = tuple[str, str]
"""Tenant and name of a session, common to all branches of the session; see `Session.owner`.

A lossy block (see `Mark`) has the owner of the session for which its KV was made, and serves only this owner.
"""
Asker: TypeAlias = Owner | tuple[str, str, str]
"""Owner of a request's session, followed by "high" if the request refuses coarse blocks; see `Marks.set`."""


class Mark(IntEnum):
    """Origin of a resident block's KV. A block that is DERIVED or DECODED is lossy."""

    EXACT = 0  # computed behind exact blocks only, or such KV restored bit for bit
    DERIVED = 1  # computed behind a lossy block, or such KV restored bit for bit
    DECODED = 2  # changed by a lossy codec; never encoded again


MARKS = tuple(Mark)  # marks by value. MARKS[value] is ten times as fast as Mark(value)


class _Lossy(Struct, frozen=True, gc=False):
    """Facts about lossy blocks of a session."""

    mark: Mark
    owner: Owner | None
    is_coarse: bool = False


class Marks:
    """Marks and owners of blocks of a pool, by block id. A new block is EXACT. watch: gets ids of new lossy blocks."""

    def __init__(self, watch: Callable[[Iterable[int]], None] = lambda block_ids: None) -> None:
        self._watch = watch
        self._lossy: dict[int, _Lossy] = {}  # by block id; exact blocks are left out
        self.decoded = set[int]()

    def __bool__(self) -> bool:
        """True if any block is lossy."""
        return bool(self._lossy)

    def __getitem__(self, block_id: int) -> Mark:
        found = self._lossy.get(block_id)
        return Mark.EXACT if found is None else found.mark

    def lossy(self, block_ids: Iterable[int]) -> set[int]:
        """Return the ids among `block_ids` of lossy blocks."""
        return self._lossy.keys() & block_ids if self._lossy else set()

    def set(self, block_ids: Iterable[int], mark: Mark, owner: Owner | None, is_coarse: bool = False) -> None:
        """Mark blocks. An exact block has no owner.

        is_coarse: True if the blocks are too coarse for requests with the hint `quality: high`.
        """
        marked = dict.fromkeys(block_ids, _Lossy(mark, owner, is_coarse))
        (self.decoded.update if mark is Mark.DECODED else self.decoded.difference_update)(marked)
        if mark:
            self._lossy.update(marked)
            self._watch(marked)
        else:
            for block_id in self.lossy(marked):
                del self._lossy[block_id]

    def clear(self, block_ids: Iterable[int]) -> None:
        """Mark newly allocated blocks EXACT."""
        if self._lossy:
            self.set(block_ids, Mark.EXACT, None)

    def copy(self, source: int, target: int) -> None:
        """Give block `target`, a copy of block `source`, the same mark and owner."""
        found = self._lossy.get(source, _Lossy(Mark.EXACT, None))
        self.set((target,), found.mark, found.owner, found.is_coarse)

    def serves(self, block_id: int, asker: Asker | None) -> bool:
        """True if a request of `asker` may use this block. None stands for a request that takes exact KV only."""
        found = self._lossy.get(block_id)
        if found is None or asker is None:
            return found is None
        return found.owner == asker[:2] and (len(asker) == 2 or not found.is_coarse)


class FreeBlock(NamedTuple):
    """Block of the free queue that the prefix cache still has."""

    group: int
    block_hash: bytes
    block_id: int


class Pool(Protocol):
    """KV blocks of all KV cache groups."""

    marks: Marks  # by block id. A block's mark is cleared when the pool hands the block out

    @property
    def size(self) -> int:
        """Number of all blocks, free or not, that requests can have."""

    def __len__(self) -> int:
        """Number of free blocks."""

    def lookup(self, group: int, block_hashes: Sequence[bytes]) -> list[int]:
        """Return the block id of each block in the prefix cache, -1 for an absent block."""

    def hold(self, block_ids: Sequence[int]) -> None:
        """Reference blocks once more. A referenced block is never overwritten."""

    def take(self, count: int) -> list[int]:
        """Return `count` blocks from the head of the free queue, each referenced once. Their KV is lost."""

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block. Of the blocks that are free then, the first is overwritten first."""

    def cache(self, block_id: int, group: int, block_hash: bytes, position: int) -> None:
        """Enter a block into the prefix cache. `position`: index within the block's session and group."""

    def loaded(self, block_ids: Sequence[int]) -> None:
        """Note that referenced blocks are saved. The prefix cache need not have these blocks yet."""

    def keep(self, group: int, block_hashes: Sequence[bytes]) -> None:
        """Note that blocks are saved. The pool overwrites them before unsaved blocks, in this order."""

    def lead(self, group: int, block_hashes: Sequence[bytes]) -> None:
        """Have the pool overwrite these saved blocks before all further saved blocks, in the given order."""

    def forget(self, group: int, block_hashes: Sequence[bytes]) -> None:
        """Note that blocks are no longer saved. The pool overwrites them last, the first of them at the very end."""

    def give_up(self, group: int, block_hashes: Sequence[bytes]) -> None:
        """Have the pool overwrite these blocks next, the last first, as if saved. Leave referenced blocks alone.

        Until overwritten, the blocks stay in the prefix cache. A block that a request uses counts as unsaved again.
        """

    def release(self, group: int, block_hashes: Sequence[bytes]) -> None:
        """Take blocks out of the prefix cache. The pool overwrites the free ones next, the last first."""

    def runway(self, most: int) -> int:
        """Return the number of blocks in the free queue before the first unsaved block, but at most `most`."""

    def unsaved(self, most: int) -> Iterator[FreeBlock]:
        """Yield the unsaved blocks among the first `most` of the free queue, from the head on."""

    def saved(self, most: int) -> Iterator[tuple[int, FreeBlock]]:
        """Yield saved blocks among the first `most` of the free queue, each with its index. Skip blocks given up."""

    def redundant(self, spare: int) -> Iterator[FreeBlock]:
        """Yield saved blocks that will not be overwritten soon, unless their KV was decoded.

        Referenced blocks come first. Free blocks follow, those first that are overwritten last. spare: number of free
        saved blocks to leave out, from the head of the free queue on.
        """


class Runway:
    """Number of blocks in the free queue before the first unsaved block.

    Counting walks the free queue. The queue is walked again only if requests may have taken too many blocks since.
    ahead: least number of blocks to look at in a walk.
    """

    def __init__(self, pool: Pool, ahead: int) -> None:
        self.pool, self.ahead, self._left = pool, ahead, 0

    def taken(self, at_most: int) -> None:
        """Note that at most `at_most` blocks were taken from the head of the queue."""
        self._left -= at_most

    def forget(self) -> None:
        """Have the next call of `length` count anew, because saved blocks became unsaved."""
        self._left = 0

    def length(self, wanted: int) -> int:
        """Return the number of blocks. A result below `wanted` is exact. A larger result may be too low."""
        if self._left < wanted:
            self._left = self.pool.runway(max(wanted, self.ahead))
        return self._left
