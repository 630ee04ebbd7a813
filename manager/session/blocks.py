"""Table of the KV blocks of sessions, requests and resume points. Saved blocks are compressed, in tiers with a budget.

A session is a list of blocks. A resume point is a length of a session at which every KV cache group has the blocks
needed to continue. A block's row is its number in this table. Facts about blocks are in columns, arrays indexed by row:
about 120 bytes a block, without a Python object. Bytes are of all ranks together. Only this module changes columns.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manthan.codec.profile import DIVERGENCES
from manthan.manager.pool import BlockName

Rows: TypeAlias = NDArray[np.int32]
Mask: TypeAlias = NDArray[np.bool_]

NO_ROWS: Rows = np.zeros(0, np.int32)
NO_GROUP = -1  # group of sessions' blocks if only resume points are stored; see `MemoryShape.stores_main`
NOBODY = "\0"  # tenant of blocks stored by another engine: counts towards no share, and is no tenant's name

SAVED, STORING = 1, 2  # bits of the column `status`; STORING while a store of the block is under way
MOST_INNER = 4  # most refinements of a compressed block: parts behind the base that make decoded KV finer
HIGH, LOSSLESS = 2, 4  # least level for requests with `quality: high`, and level that keeps every bit; see `Level`
_EMPTY, _GONE = -1, -2  # slots of the hash index: never used, and freed
_FIRST_ROWS = 256
_WAYS = 16  # slots of a bucket of the hash index, looked at together
_AT_ONCE = 1 << 15  # rows entered into a new index at a time
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # odd constant that spreads numbers over the index


class Level(NamedTuple):
    """Facts about the compressed blocks of a level. A level is a number of refinements; level 0 is the base alone."""

    divergence: float  # of the model's predictions, in nats, caused by the decoded KV
    ratio: float  # bytes of a block in the pool, divided by those of the compressed block


LEVELS = tuple(map(Level, DIVERGENCES, (20, 12, 8, 5, 1.6)))
"""Levels 0, 1 and so on of a model without measurements of its own."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Sizes of a block of a KV cache group, all ranks together."""

    tokens: int
    pool_nbytes: int
    bounds: Mapping[int, int]  # most bytes of a compressed block, by its number of exact first tokens; 0 is a key
    typical: int = 0  # expected bytes of a compressed block without exact tokens; 0 to expect `bounds[0]`
    codec: str = ""  # name of the codec; empty for the configured codec
    is_lossless: bool = False  # true if the codec keeps every bit
    levels: int = 1  # number of levels of a new block: 1, and 1 for each refinement
    level: int = 0
    """Level of a block if its refinements are unknown. For a codec without refinements, the level of LEVELS whose
    divergence is similar."""

    @property
    def cold_nbytes(self) -> int:
        """Approximate bytes of a compressed block without exact tokens."""
        return self.typical or self.bounds[0]


@dataclass(frozen=True)
class MemoryShape:
    """Sizes of the blocks of all stored KV cache groups."""

    groups: Mapping[int, GroupShape]
    main: int = 0  # group whose block hashes make up sessions
    stores_main: bool = True
    """False if no layer attends to all of a session. Then only blocks of resume points are stored."""
    levels: Sequence[Level] = LEVELS
    """Facts about the blocks of each level, from level 0 on: by the model's profile, which calibrated codecs need."""

    @cached_property
    def session_group(self) -> int:
        """Value of the column `group` for the blocks of sessions."""
        return self.main if self.stores_main else NO_GROUP

    @cached_property
    def needs_points(self) -> bool:
        """True if a request can continue a session from its resume points only, not from every block."""
        return len(self.groups) > 1 or not self.stores_main

    @cached_property
    def block_tokens(self) -> int:
        """Number of tokens in a session's block."""
        return self.groups[self.main].tokens

    @cached_property
    def cold_nbytes(self) -> int:
        """Approximate bytes of a session's compressed block; 0 if not stored."""
        return self.groups[self.main].cold_nbytes if self.stores_main else 0

    @cached_property
    def pool_nbytes(self) -> int:
        """Bytes of a session's block in the pool; 0 if not stored."""
        return self.groups[self.main].pool_nbytes if self.stores_main else 0

    @cached_property
    def ratio(self) -> float:
        """Compression ratio of the main group."""
        main = self.groups[self.main]
        return main.pool_nbytes / main.cold_nbytes

    @cached_property
    def sizes(self) -> set[int]:
        """Sizes of compressed blocks to plan with: all groups' bounds, and the main group's approximate size."""
        bounds = {nbytes for group in self.groups.values() for nbytes in group.bounds.values()}
        return {self.groups[self.main].cold_nbytes, *bounds}


class FrontTier(NamedTuple):
    """Tier in front of a slower tier."""

    nbytes: int  # budget
    fills_on_read: bool  # true if blocks read from a slower tier come back to the front tier


class BlockTable:
    """Rows of all blocks that are used, held, pinned, saved or being stored; see the columns. Others have no row.

    Other modules may read the columns.
    """

    def __init__(self) -> None:
        self._hashes = np.zeros((_FIRST_ROWS, 0), np.uint64)
        self.group = np.zeros(_FIRST_ROWS, np.int8)  # KV cache group
        self.depth = np.zeros(_FIRST_ROWS, np.int32)  # position in a session, among the blocks of the same group
        self.users = np.zeros(_FIRST_ROWS, np.int32)  # number of sessions with the block; of further groups, points
        self.holds = np.zeros(_FIRST_ROWS, np.int32)  # number of prompts with the block, and of calls that keep its row
        self.pins = np.zeros(_FIRST_ROWS, np.int16)  # number of loads that read the block, and so keep it from a drop
        self.status = np.zeros(_FIRST_ROWS, np.uint8)  # bits: SAVED if every rank's block is in a tier; STORING
        self.nbytes = np.zeros(_FIRST_ROWS, np.uint32)  # of the compressed block; 0 if not saved
        self.reserved = np.zeros(_FIRST_ROWS, np.uint32)  # most bytes that the store under way may take
        self.exact = np.zeros(_FIRST_ROWS, np.uint16)  # number of first tokens that the compressed block keeps exact
        self.mark = np.zeros(_FIRST_ROWS, np.uint8)  # `Mark` of the KV that was encoded
        self.level = np.zeros(_FIRST_ROWS, np.uint8)  # number of refinements; without any, see `GroupShape.level`
        self.inner = np.zeros((_FIRST_ROWS, MOST_INNER), np.uint32)
        """Bytes of the base, of base and first refinement, and so on, without those of the whole block; then zeros."""
        self.moved = np.zeros(_FIRST_ROWS, np.uint8)  # bit n: has left front tier n, by estimate; see `FrontTiers`
        self.tenant = np.zeros(_FIRST_ROWS, np.int32)  # number of the tenant whose share counts the block
        self.origin = np.zeros(_FIRST_ROWS, np.int32)  # `Session.number` of a session with the block; 0 if unknown
        self._slot = np.zeros(_FIRST_ROWS, np.int32)  # slot of the hash index that has the row
        self._columns = list(vars(self))
        self.freed: Callable[[Rows], None] = lambda rows: None  # called with rows that are about to be freed
        self._free = np.arange(_FIRST_ROWS, dtype=np.int32)[::-1].copy()
        self._free_count = _FIRST_ROWS
        self._index = np.full((2 * _FIRST_ROWS // _WAYS, _WAYS), _EMPTY, np.int32)
        self._index_used = 0
        self._tenants: dict[str, int] = {}
        self._tenant_nbytes = np.zeros(8, np.int64)
        self.saved_nbytes = 0  # bytes of compressed blocks in the tiers
        self.reserved_nbytes = 0  # bytes reserved for stores under way
        self.saved_blocks: dict[int, int] = {}  # number of saved blocks by group
        self.storing = 0  # number of blocks of stores under way
        self.exact_blocks = 0  # number of saved blocks with exact tokens
        self._refined = np.zeros(MOST_INNER + 1, np.int64)  # number of saved blocks, by refinements to cut
        self.moved_nbytes = [0] * 8  # for each front tier, bytes of saved blocks that have left it, by estimate

    def __len__(self) -> int:
        return len(self._free) - self._free_count

    def rows(self) -> Rows:
        """Return all rows in use."""
        used = np.ones(len(self._free), np.bool_)
        used[self._free[: self._free_count]] = False
        return np.nonzero(used)[0].astype(np.int32)

    def find(self, groups: ArrayLike, block_hashes: Sequence[bytes]) -> Rows:
        """Return the row of each block, -1 for a block without a row. groups: group of each block, or of all."""
        if not block_hashes or not len(self):
            return np.full(len(block_hashes), -1, np.int32)
        return self._probe(np.asarray(groups, np.int8), self._words(block_hashes))[0]

    def row(self, group: int, block_hash: bytes) -> int:
        """Return a block's row, or -1."""
        return int(self.find(group, [block_hash])[0])

    def enter(
        self, groups: ArrayLike, block_hashes: Sequence[bytes], depths: ArrayLike, likely: Rows = NO_ROWS
    ) -> Rows:
        """Return the rows of blocks. Unknown blocks get new rows.

        Args:
            groups: group of each block, or of all.
            block_hashes: hash of each block, none twice in a group.
            depths: depth of each block, or of the first if the blocks are consecutive.
            likely: rows of the same groups that the first blocks probably have. Rows that are right need no search.

        Raises:
            ValueError: Block hashes have different lengths.
        """
        if not block_hashes:
            return NO_ROWS
        if not self._hashes.shape[1]:
            self._hashes = np.zeros((len(self._free), len(block_hashes[0]) // 8), np.uint64)
        words, likely = self._words(block_hashes), likely[: len(block_hashes)]
        known = 0
        if len(likely):
            known = first_false((self._hashes.take(likely, axis=0) == words[: len(likely)]).ravel()) // words.shape[1]
            if known == len(words):
                return likely
        numbers, places, words = np.asarray(groups, np.int8), np.asarray(depths, np.int32), words[known:]
        numbers = numbers[known:] if numbers.ndim else numbers
        places = places[known:] if places.ndim else np.arange(places + known, places + known + len(words))
        self._make_room(len(words))
        rows, buckets = self._probe(numbers, words)
        new = rows < 0
        if not new.all():
            words, places, buckets = words[new], places[new], buckets[new]
            numbers = numbers[new] if numbers.ndim else numbers
        if len(words):  # facts in the other columns are set when the block is saved
            added = self._free[self._free_count - len(words) : self._free_count][::-1].copy()
            rows[new] = added
            self._free_count -= len(words)
            self._hashes[added], self.group[added], self.depth[added] = words, numbers, places
            self._place(added, buckets)
        return np.concatenate([likely[:known], rows]) if known else rows

    def hashes(self, rows: Rows) -> list[bytes]:
        """Return the block hashes of rows."""
        if not len(rows):
            return []
        found: list[bytes] = self._hashes.take(rows, axis=0).view(f"V{8 * self._hashes.shape[1]}").ravel().tolist()
        return found

    def name(self, row: int) -> BlockName:
        """Return the group and the block hash of a row."""
        return int(self.group[row]), self._hashes[row].tobytes()

    def _words(self, block_hashes: Sequence[bytes]) -> NDArray[np.uint64]:
        length, joined = 8 * self._hashes.shape[1], b"".join(block_hashes)
        if len(joined) != length * len(block_hashes) or len(block_hashes[0]) != length:
            raise ValueError(f"a block hash must have {length} bytes, as the first one had")
        return np.frombuffer(joined, np.uint64).reshape(len(block_hashes), -1)

    def _buckets(self, groups: NDArray[np.int8], words: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the bucket of the index at which the search for each block begins."""
        spread = (np.bitwise_xor.reduce(words, axis=1) + groups.astype(np.uint64)) * _SPREAD
        buckets: NDArray[np.int64] = (spread >> np.uint64(65 - len(self._index).bit_length())).astype(np.int64)
        return buckets

    def _probe(self, groups: NDArray[np.int8], words: NDArray[np.uint64]) -> tuple[Rows, NDArray[np.int64]]:
        """Return the row of each block, -1 for an unknown block, and the bucket at which its search has ended.

        groups: group of each block, or of all.
        """
        found, ends = np.full(len(words), -1, np.int32), self._buckets(groups, words)
        left, last = np.arange(len(words)), len(self._index) - 1
        while len(left):
            rows = self._index.take(ends[left], axis=0)  # several times as fast as `[]`
            at, way = np.nonzero(self._hashes[rows, 0] == words[left, :1])
            if len(at):
                near, at = rows[at, way], left[at]
                same = (self._hashes.take(near, axis=0) == words.take(at, axis=0)).all(axis=1)
                same &= (near >= 0) & (self.group[near] == (groups[at] if groups.ndim else groups))
                found[at[same]] = near[same]
            is_full = rows[:, -1] != _EMPTY  # slots are used in their order
            if not is_full.any():
                break
            left = left[is_full & (found[left] < 0)]
            ends[left] = (ends[left] + 1) & last
        return found, ends

    def _make_room(self, count: int) -> None:
        """Have free rows, and slots of the index, for `count` more blocks."""
        while self._free_count < count:
            self._grow()
        if 2 * (self._index_used + count) > self._index.size:
            self._rebuild(count)

    def _place(self, rows: Rows, buckets: NDArray[np.int64]) -> None:
        """Enter rows into the index."""
        last, index = len(self._index) - 1, self._index.ravel()
        while len(rows):
            slots = buckets * _WAYS + (self._index.take(buckets, axis=0) < 0).argmax(axis=1)
            before = index[slots]
            index[slots] = np.where(before < 0, rows, before)  # a full bucket stays as it is
            placed = index[slots] == rows  # if two rows want one slot, one gets it
            if placed.all():
                self._index_used += int(np.count_nonzero(before == _EMPTY))
                self._slot[rows] = slots
                return
            self._index_used += int((before[placed] == _EMPTY).sum())
            self._slot[rows[placed]] = slots[placed]
            rows, buckets = rows[~placed], (buckets + (before >= 0))[~placed] & last

    def _rebuild(self, more: int) -> None:
        rows = self.rows()
        size = self._index.size
        while 3 * (len(rows) + more) > size:
            size *= 2
        self._index, self._index_used = np.full((size // _WAYS, _WAYS), _EMPTY, np.int32), 0
        for at in range(0, len(rows), _AT_ONCE):  # arrays for all rows at once would take much memory
            some = rows[at : at + _AT_ONCE]
            self._place(some, self._buckets(self.group[some], self._hashes.take(some, axis=0)))

    def _grow(self) -> None:
        old = len(self._free)
        new = old + max(_FIRST_ROWS, old // 2)
        for name in self._columns:
            column = getattr(self, name)
            grown = np.zeros((new, *column.shape[1:]), column.dtype)
            grown[:old] = column
            setattr(self, name, grown)
        free = np.zeros(new, np.int32)
        free[: self._free_count] = self._free[: self._free_count]
        free[self._free_count : self._free_count + new - old] = np.arange(new - 1, old - 1, -1)
        self._free, self._free_count = free, self._free_count + new - old

    def refer(self, column: NDArray[Any], rows: Rows, by: int) -> None:
        """Add `by` to `column` (users, holds or pins) in rows, none twice. Free rows that are then unneeded."""
        column[rows] += by
        if by < 0:
            self.free_unneeded(rows)

    def change_origin(self, rows: Rows, old: int, new: int) -> None:
        """Set the column `origin` to `new` in rows where it is `old`. Both are numbers of sessions, or 0."""
        self.origin[rows[self.origin[rows] == old]] = new

    def used(self, rows: Rows) -> Rows:
        """Return the rows before the first whose block no session has."""
        return rows[: first_false(self.users[rows] > 0)]

    def unused(self, rows: Rows) -> Rows:
        """Return the rows among `rows` without users."""
        users = self.users[rows]
        return NO_ROWS if users.all() else rows[users == 0]

    def free_unneeded(self, rows: Rows) -> None:
        """Free the rows among `rows` that nothing uses, holds, pins, saves or stores."""
        gone = self.unused(rows)  # in most calls, no row is left here
        if not len(gone):
            return
        gone = gone[(self.holds[gone] == 0) & (self.pins[gone] == 0) & (self.status[gone] == 0)]
        self.freed(gone)
        self._index.ravel()[self._slot[gone]] = _GONE
        self.group[gone] = -128  # no group's number, so that an old copy of the row matches no group
        self._free[self._free_count : self._free_count + len(gone)] = gone
        self._free_count += len(gone)

    def nbytes_of(self, rows: Rows) -> int:
        """Return the bytes of the compressed blocks of rows."""
        return int(self.nbytes[rows].sum(dtype=np.int64))

    def is_saved(self, rows: Rows) -> Mask:
        """Return a mask of the saved rows."""
        saved: Mask = (self.status[rows] & SAVED) > 0
        return saved

    def saved_prefix(self, rows: Rows) -> int:
        """Return the number of rows before the first that is not saved."""
        return first_false(self.is_saved(rows))

    def are_saved(self, names: Sequence[BlockName]) -> Mask:
        """Return a mask of the saved blocks among `names`, of any groups."""
        rows = self.find([group for group, _ in names], [block_hash for _, block_hash in names])
        return (rows >= 0) & self.is_saved(rows)

    def is_droppable(self, rows: Rows) -> Mask:
        """Return a mask of the rows with a droppable compressed block: saved, and not pinned."""
        droppable: Mask = self.is_saved(rows) & (self.pins[rows] == 0)
        return droppable

    def reserve(self, rows: Rows, bounds: ArrayLike, tenant: str) -> None:
        """Note the begin of a store of rows. bounds: most bytes of each. Blocks saved before stay until `save`."""
        new = rows[(self.status[rows] & SAVED) == 0]
        self.tenant[new] = self.tenant_number(tenant)
        self.status[rows] |= STORING
        self.reserved[rows] = bounds
        self.storing += len(rows)
        self.reserved_nbytes += self._charge(rows, self.reserved[rows], +1)

    def unreserve(self, rows: Rows) -> None:
        """Note that a store of rows has failed. A block saved before stays."""
        self._end_store(rows)
        self.free_unneeded(rows)

    def refined(self, level: int) -> int:
        """Return the number of saved blocks that have at least `level` refinements to cut."""
        return int(self._refined[level:].sum())

    def save(
        self,
        rows: Rows,
        nbytes: ArrayLike,
        exact: ArrayLike,
        mark: ArrayLike,
        tenant: str | None = None,
        level: ArrayLike = 0,
        inner: ArrayLike = 0,
    ) -> None:
        """Note that every rank has saved these rows. Arguments are a value for each row, or a value for all.

        nbytes, exact, mark, level, inner: see the columns. tenant: tenant whose share counts the rows; None for the
        tenant given to `reserve`.
        """
        if tenant is not None:
            self.tenant[rows] = self.tenant_number(tenant)
        self._end_store(rows[(self.status[rows] & STORING) > 0])
        self._uncount(rows[self.is_saved(rows)])
        self.status[rows] |= SAVED
        self.nbytes[rows], self.exact[rows], self.mark[rows] = nbytes, exact, mark
        self.level[rows], self.inner[rows] = level, inner
        self._count(rows, +1)

    def trim(self, rows: Rows, level: int) -> None:
        """Note that saved rows were cut to `level` refinements; each had more."""
        moved = self.moved[rows]
        self._uncount(rows)
        self.status[rows] |= SAVED
        self.nbytes[rows], self.level[rows] = self.inner[rows, level], level
        self.inner[rows, level:] = 0
        self._count(rows, +1)
        self.move(rows, moved)

    def drop(self, rows: Rows) -> None:
        """Note that the compressed blocks of saved rows are dropped."""
        self._uncount(rows)
        self.nbytes[rows] = self.inner[rows] = 0
        self.free_unneeded(rows)

    def move(self, rows: Rows, moved: ArrayLike) -> None:
        """Set `moved` of saved rows; see the column."""
        for tier, sign in ((tier, sign) for tier in range(8) for sign in (-1, +1)):
            bits = self.moved[rows] if sign < 0 else np.broadcast_to(np.asarray(moved, np.uint8), rows.shape)
            nbytes = self.nbytes[rows][(bits >> tier & 1) > 0]
            self.moved_nbytes[tier] += sign * int(nbytes.sum(dtype=np.int64))
        self.moved[rows] = moved

    def _end_store(self, rows: Rows) -> None:
        self.reserved_nbytes += self._charge(rows, self.reserved[rows], -1)
        self.status[rows] &= ~np.uint8(STORING)
        self.reserved[rows] = 0
        self.storing -= len(rows)

    def _uncount(self, rows: Rows) -> None:
        if not len(rows):
            return
        if self.moved[rows].any():
            self.move(rows, 0)
        self._count(rows, -1)
        self.status[rows] &= ~np.uint8(SAVED)

    def _count(self, rows: Rows, sign: int) -> None:
        self.saved_nbytes += self._charge(rows, self.nbytes[rows], sign)
        self.exact_blocks += sign * int((self.exact[rows] > 0).sum())
        refined = (self.inner.take(rows, axis=0) > 0).sum(axis=1)
        self._refined += sign * np.bincount(refined, minlength=len(self._refined))
        for group, count in enumerate(np.bincount(self.group[rows] + 1).tolist(), NO_GROUP):
            if count:
                self.saved_blocks[group] = self.saved_blocks.get(group, 0) + sign * count

    def tenant_number(self, tenant: str) -> int:
        """Return a tenant's number. While the tenant's blocks take no bytes, the number may change."""
        number = self._tenants.get(tenant)
        if number is None:  # clients may make up any number of tenants
            self._tenants = {name: taken for name, taken in self._tenants.items() if self._tenant_nbytes[taken]}
            number = next(at for at in range(len(self._tenants) + 1) if at not in self._tenants.values())
            self._tenants[tenant] = number
            if number >= len(self._tenant_nbytes):
                self._tenant_nbytes = np.append(self._tenant_nbytes, np.zeros(len(self._tenant_nbytes), np.int64))
        return number

    def taken_by(self, tenant: str) -> int:
        """Return the bytes taken or reserved by a tenant's blocks."""
        number = self._tenants.get(tenant)
        return 0 if number is None else int(self._tenant_nbytes[number])

    @property
    def taken_nbytes(self) -> int:
        """Bytes taken or reserved by compressed blocks."""
        return self.saved_nbytes + self.reserved_nbytes

    def _charge(self, rows: Rows, nbytes: NDArray[np.uint32], sign: int) -> int:
        """Add `sign` times the bytes of rows to those that their tenants take. Return the sum."""
        if len(rows):
            counts = np.bincount(self.tenant[rows], weights=nbytes, minlength=len(self._tenant_nbytes))
            self._tenant_nbytes += sign * counts.astype(np.int64)
        return sign * int(nbytes.sum(dtype=np.int64))


def first_false(mask: Mask) -> int:
    """Return the index of the first false value; the length if there is none."""
    at = int(mask.argmin()) if len(mask) else 0
    return at if len(mask) and not mask[at] else len(mask)


def common_prefix(rows: Rows, others: Rows) -> int:
    """Return the number of equal rows before the first difference between a session's or a prompt's rows and others'.

    A block hash covers the whole prefix, so that all rows before an equal row are equal.
    """
    both = min(len(rows), len(others))
    if not both or rows[both - 1] == others[both - 1]:
        return both
    return first_false(rows[:both] == others[:both])


def runs(rows: Rows, keys: Collection[NDArray[np.generic]], depths: NDArray[np.int32], most: int) -> list[slice]:
    """Cut `rows` into runs of consecutive depths and equal keys, of `most` rows at most. Return a slice for each run.

    keys: arrays with a value for each row. Rows of a run have the same value in each array.
    """
    breaks = np.zeros(len(rows) + 1, np.bool_)
    breaks[0] = breaks[-1] = True
    breaks[1:-1] = np.diff(depths) != 1
    for key in keys:
        breaks[1:-1] |= key[1:] != key[:-1]
    edges = np.nonzero(breaks)[0].tolist()
    return [slice(at, min(at + most, end)) for start, end in pairwise(edges) for at in range(start, end, most)]
