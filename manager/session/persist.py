"""Links between engines: sessions go to the next engine by a journal on disk, and to other engines by Redis.

After `JournalLink.adopt`, links never wait: threads of the journal and the Redis client do the I/O. A resume point is a
length of a session at which every KV cache group has the blocks needed to continue. A block is saved if a tier has it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manthan.manager.events import BlocksDropped, DropCause, LookedUp, StoreIsUp
from manthan.manager.pool import BlockName, Mark
from manthan.manager.session.blocks import NO_GROUP, NO_ROWS, NOBODY, FrontTier, Rows, common_prefix, first_false
from manthan.manager.session.manager import Request, SessionManager
from manthan.manager.session.table import ResumePoint, Session
from manthan.manager.tiers.journal import GONE, Journal, JournalBlock, JournalPoint, JournalSession, SavedBlocks
from manthan.manager.tiers.redis import iso, sample, shared_blocks
from manthan.manager.tiers.redis_sessions import LookupResult, RedisSessions, SessionRecord
from manthan.manager.transfer import on_each

WAIT_S = 0.005  # most seconds that a request waits for Redis to say which of its blocks exist there
HISTORY = (
    *("name", "tenant", "uses", "gap", "tokens", "added_tokens", "answer_tokens", "left_tokens"),
    *("prompt_depth", "prompt_end", "ttl_s", "priority", "stays_out", "parent"),
)
"""Attributes of a session copied unchanged into the journal."""
TIMES = ("created", "last_used", "expected")  # attributes of a session with times; in the journal, Unix seconds
FACTS = (*HISTORY, *TIMES, "is_pinned")
Inner: TypeAlias = Sequence[Sequence[int]]  # by row, the value of `BlockTable.inner`; empty for no refinements


class _Link:
    """Base of the links: enters blocks that an earlier or another engine has stored in the last tier.

    fronts: fast tiers in front of the last tier, which is a disk or Redis. They do not have the entered blocks yet.
    """

    def __init__(self, manager: SessionManager, fronts: Sequence[FrontTier]) -> None:
        self._manager, self._all_moved = manager, (1 << len(fronts)) - 1
        manager.table.take_changes()  # the first call makes the table note changes

    def _enter_saved(
        self, rows: Rows, nbytes: ArrayLike, exact: ArrayLike, marks: ArrayLike, tenant: str, inner: Inner = ()
    ) -> None:
        """Mark rows as saved if a session or a resume point uses them and they are neither saved nor being stored.

        nbytes, exact, marks, tenant: see `BlockTable.save`. inner: for the first rows; the others have no refinements.
        """
        blocks = self._manager.blocks
        is_new = (blocks.status[rows] == 0) & (blocks.users[rows] > 0)
        new = rows[is_new]
        nbytes, exact, marks = (np.broadcast_to(values, rows.shape)[is_new] for values in (nbytes, exact, marks))
        known = [sizes for sizes, is_taken in zip(inner, is_new.tolist(), strict=False) if is_taken]
        blocks.save(new, nbytes, exact, marks, tenant, *self._manager.levels_of(new, known))
        blocks.move(new, self._all_moved)
        self._manager.announce(new[blocks.group[new] != NO_GROUP])


# -- the journal --------------------------------------------------------------------------------------


class Adopted(NamedTuple):
    """Result of `JournalLink.adopt`."""

    sessions: int  # number of sessions entered, now cold
    written: int  # number of sessions in the journal
    blocks: int  # number of blocks now saved
    nbytes: int  # bytes of these compressed blocks on all ranks
    dropped: int  # number of blocks dropped, because no entered session uses them or a rank lacks them


class _Left(NamedTuple):
    """Session of an earlier engine, cut at the first missing block. Times are seconds on this engine's clock."""

    session_id: str
    facts: Mapping[str, Any]
    blocks: Sequence[JournalBlock]
    points: Sequence[JournalPoint]

    def kept(self, length: int) -> list[JournalPoint]:
        """Return the resume points that a session of `length` blocks needs: at its end, and at its last prompt's."""
        depths = {length, min(length, self.facts["prompt_depth"])}
        return [point for point in self.points if point.depth in depths]


class BlockNotes(Protocol):
    """Bytes that the journal keeps with blocks: contents of KV events."""

    def packed(self, names: Sequence[BlockName]) -> list[bytes]:
        """Return the bytes of each block; empty for none."""

    def update(self, packed: Iterable[tuple[BlockName, bytes]]) -> None:
        """Take the bytes that an earlier engine kept with blocks. Each block has a row in the BlockTable."""


class JournalLink(_Link):
    """Writes sessions to the journal for the next engine, and enters those of an earlier engine.

    In the journal, times are Unix seconds. fronts: fast tiers in front of the disk. notes: None without KV events.
    """

    def __init__(
        self,
        journal: Journal,
        manager: SessionManager,
        fronts: Sequence[FrontTier],
        notes: BlockNotes | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(manager, fronts)
        self._journal, self._notes, self._clock = journal, notes, clock
        self._told: dict[str, int | None] = {}
        """By id of a session in the journal, the `_digest` of its blocks there; None if the session has others now."""
        self._inner: Mapping[BlockName, Sequence[int]] = {}  # see `adopt`
        self._is_reset = False
        self.close = journal.close

    def tell(self, now: float) -> None:
        """Hand the sessions changed since the last call to the journal's thread."""
        changes = self._manager.table.take_changes()
        if not self._is_reset:
            self._journal.tell(list(self._records(changes, now)))

    def reset(self) -> None:
        """Empty the journal, and write no more, because this engine's weights may no longer be those of its start."""
        self._is_reset = True
        self._journal.clear()

    def _records(self, changes: Iterable[tuple[str, Session | None]], now: float) -> Iterator[JournalSession]:
        offset = self._clock() - now
        for session_id, session in changes:
            if session in self._manager.saving:
                continue  # the end of the saving changes the session again
            rows, points = (NO_ROWS, []) if session is None else self._saved(session)
            if session is None or not len(rows):
                if session_id in self._told:
                    del self._told[session_id]
                    yield JournalSession(session_id)
                continue
            before, self._told[session_id] = self._told.get(session_id), self._digest(rows, points)
            saved = None if self._told[session_id] == before else self._saved_blocks(rows, points)
            times = {name: None if (when := getattr(session, name)) is None else when + offset for name in TIMES}
            is_pinned = session.is_pinned and session.pinned_until is None
            facts = {name: getattr(session, name) for name in HISTORY} | times | {"is_pinned": is_pinned}
            yield JournalSession(session_id, facts, saved)

    def _saved(self, session: Session) -> tuple[Rows, list[ResumePoint]]:
        """Return a session's saved first rows, cut to a resume point if one is needed, and the saved resume points."""
        blocks, points = self._manager.blocks, self._manager.points
        rows = session.rows[: blocks.saved_prefix(session.rows)]
        standing = [point for point in session.points if point.depth <= len(rows) and points.stands(point)]
        if points.is_needed:
            rows = rows[: standing[-1].depth if standing else 0]
        return rows, standing

    def _digest(self, rows: Rows, points: Sequence[ResumePoint]) -> int:
        """Return a hash of a session's saved blocks, exact tokens and marks, to detect a change."""
        blocks = self._manager.blocks
        ends = blocks.hashes(np.array([*rows[-1:].tolist(), *(point.row for point in points)], np.int32))
        return hash((*ends, blocks.exact[rows].tobytes(), blocks.mark[rows].tobytes()))

    def _saved_blocks(self, rows: Rows, points: Iterable[ResumePoint]) -> SavedBlocks:
        found = tuple(JournalPoint(point.depth, self._journal_blocks(point.rows)) for point in points)
        return SavedBlocks(self._journal_blocks(rows), found)

    def _journal_blocks(self, rows: Rows) -> tuple[JournalBlock, ...]:
        blocks, hashes = self._manager.blocks, self._manager.blocks.hashes(rows)
        groups = list(map(self._manager.pool_group, blocks.group[rows].tolist()))
        numbers = blocks.depth[rows].tolist(), blocks.exact[rows].tolist(), blocks.mark[rows].tolist()
        names = list(zip(groups, hashes, strict=True))
        notes = [b""] * len(names) if self._notes is None else self._notes.packed(names)
        return tuple(map(JournalBlock, hashes, groups, *numbers, notes))

    def adopt(
        self,
        ranks: Sequence[Mapping[BlockName, int]],
        now: float,
        others: Mapping[BlockName, int] | None = None,
        inner: Mapping[BlockName, Sequence[int]] | None = None,
    ) -> Adopted:
        """Enter the journal's sessions as cold, each up to its first block missing on a rank. Drop all further blocks.

        The budget and the tenants' shares may not have room for all. So the most recently used sessions are entered
        first, and of each session the first blocks. The driver must have subscribed to the events by now.

        Args:
            ranks: for each rank, by block, the bytes that the block takes of the rank's part of the budget.
            now: seconds on this engine's clock.
            others: by block stored by another number of ranks, the bytes of all ranks' parts; 0 if a part is missing.
            inner: by block with refinements, the value of `BlockTable.inner`.
        """
        self._inner = inner or {}
        manager, offset, weigh, others = self._manager, self._clock() - now, on_each(len(ranks)), others or {}
        table, names = manager.table, list(dict.fromkeys([*(name for rank in ranks for name in rank), *others]))
        whole = [name for name in names if all(name in rank for rank in ranks)]
        sizes = {name: nbytes for name, nbytes in others.items() if nbytes}
        sizes |= {name: weigh([rank[name] for rank in ranks]) + others.get(name, 0) for name in whole}
        written = list(self._journal.sessions())
        left = [one for each in written if (one := self._left(each, sizes, offset)) is not None]
        left.sort(key=lambda one: float(one.facts["last_used"]), reverse=True)
        entered = [(one, session) for one in left if (session := self._adopt(one, sizes)) is not None]
        for one, session in reversed(entered):  # the policy sees the most recently used session last
            table.set_cold(session, True)
            table.remember(session)
            table.enter_order(session)
            table.resident.leave(session.session_id)
            manager.said.adopted(session, one.facts["is_pinned"], now)
        for _, session in entered:
            if session.parent:
                table.join(session, session.parent)
        table.take_changes()
        for each in written:
            same, self._told[each.session_id] = table.by_id.get(each.session_id), None
            if same is not None and self._saved_blocks(*self._saved(same)) == each.saved:
                self._told[each.session_id] = self._digest(*self._saved(same))
        again = [(session_id, table.by_id.get(session_id)) for session_id, told in self._told.items() if told is None]
        self._journal.tell(list(self._records(again, now)))
        are_saved = manager.blocks.are_saved(names)
        strays = sorted(name for name, is_saved in zip(names, are_saved, strict=True) if not is_saved)
        for group, some in groupby(strays, itemgetter(0)):
            manager.events(BlocksDropped(group, [block_hash for _, block_hash in some], DropCause.ABANDONED))
        usage = manager.usage()
        return Adopted(len(entered), len(written), usage.saved_blocks, usage.saved_nbytes, len(strays))

    def _left(self, written: JournalSession, sizes: Mapping[BlockName, int], offset: float) -> _Left | None:
        """Return a session up to its first missing block; None if nothing is left, or if the facts are damaged.

        sizes: by block that no rank lacks, the bytes that the block takes of the budget.
        """
        shape, saved, there = self._manager.shape, written.saved or GONE, sizes.keys()
        blocks = list(takewhile(lambda block: not shape.stores_main or block.name in there, saved.blocks))
        points = [point for point in saved.points if there >= {part.name for part in point.parts}]
        points = [point for point in points if 0 < point.depth <= len(blocks)]
        if not blocks or (shape.needs_points and not points):
            return None
        try:
            known = {"parent": None, **written.facts}  # older journals lack the parent
            facts = {name: known[name] for name in FACTS}
            facts |= {name: None if facts[name] is None else facts[name] - offset for name in TIMES}
        except (KeyError, TypeError):
            return None
        return _Left(written.session_id, facts, blocks, points)

    def _adopt(self, left: _Left, sizes: Mapping[BlockName, int]) -> Session | None:
        """Enter a session's first blocks, as many as there is room for. Return None without room or with a known id."""
        manager, facts, tenant = self._manager, left.facts, left.facts["tenant"]
        length = self._fitting(left, sizes)
        if not length or left.session_id in manager.table.by_id:
            return None
        session = manager.table.create(facts["name"], tenant, facts["created"], left.session_id)
        for name in (*HISTORY, *TIMES):
            setattr(session, name, facts[name])
        hashes = [block.block_hash for block in left.blocks[:length]]
        rows = manager.blocks.enter(manager.shape.session_group, hashes, 0)
        manager.table.extend(session, rows)
        count = session.prompt_end.partition(":")[0]
        if count.isdecimal() and int(count) <= length:
            manager.table.enter_prompt(session, session.prompt_end)
        self._save(rows, left.blocks[:length], self._main_sizes(sizes), tenant)
        kept = left.kept(length)
        spare = [point for point in reversed(left.points) if point.depth < length and point not in kept]
        for point in (*kept, *spare):
            if point in kept or self._missing(point.parts, sizes).sum() <= self._room(tenant):
                parts = [(part.group, part.block_hash, part.position) for part in point.parts]
                placed = manager.points.place(session, point.depth, parts)
                placed.ends_prompt |= point not in kept
                self._save(placed.rows, point.parts, sizes, tenant)
                manager.points.stored(placed.rows.tolist())
        return session

    def _main_sizes(self, sizes: Mapping[BlockName, int]) -> Mapping[BlockName, int]:
        """Return the sizes of sessions' blocks. If only resume points' blocks are stored, sessions' have no bytes."""
        return sizes if self._manager.shape.stores_main else {}

    def _room(self, tenant: str) -> int:
        return min(self._manager.free_nbytes, self._manager.left_to(tenant))

    def _save(self, rows: Rows, blocks: Sequence[JournalBlock], sizes: Mapping[BlockName, int], tenant: str) -> None:
        if self._notes is not None:
            self._notes.update((block.name, block.note) for block in blocks if block.note)
        nbytes = [sizes.get(block.name, 0) for block in blocks]
        marks = [Mark.DERIVED if block.mark else Mark.EXACT for block in blocks]
        inner = [self._inner.get(block.name, ()) if block.name in sizes else () for block in blocks]
        self._enter_saved(rows, nbytes, [block.exact for block in blocks], marks, tenant, inner)

    def _fitting(self, left: _Left, sizes: Mapping[BlockName, int]) -> int:
        """Return the number of a session's first blocks that fit; the depth of a resume point if one is needed."""
        room = self._room(left.facts["tenant"])
        taken = np.cumsum(self._missing(left.blocks, self._main_sizes(sizes)))
        if not self._manager.points.is_needed:
            return int(np.searchsorted(taken, room, side="right"))
        for depth in sorted((point.depth for point in left.points), reverse=True):
            parts = dict.fromkeys(part for point in left.kept(depth) for part in point.parts)
            if taken[depth - 1] + self._missing(list(parts), sizes).sum() <= room:
                return depth
        return 0

    def _missing(self, blocks: Sequence[JournalBlock], sizes: Mapping[BlockName, int]) -> NDArray[np.int64]:
        """Return the bytes that each block will add to the taken budget; 0 for a block saved with another session."""
        names = [block.name for block in blocks]
        return np.where(self._manager.blocks.are_saved(names), 0, [sizes.get(name, 0) for name in names])


# -- Redis --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _PromptLookup:
    """Question to Redis about a request: how many blocks of `hashes[first:]` does Redis have, from the first on?"""

    request: Request
    hashes: Sequence[bytes]
    first: int
    deadline: float | None = None
    """Time at which the request continues without an answer; None until the request waits for nothing else."""


class RedisLink(_Link):
    """Looks up blocks stored by other engines in Redis, and publishes this engine's sessions there.

    needed: returns the blocks of further KV cache groups that a session needs to continue behind its first n blocks,
    given n. Each is a group and a position. None for a model with a single group.
    """

    def __init__(
        self,
        sessions: RedisSessions,
        manager: SessionManager,
        fronts: Sequence[FrontTier],
        needed: Callable[[int], Iterable[tuple[int, int]]] | None = None,
    ) -> None:
        super().__init__(manager, fronts)
        self.sessions, self._needed = sessions, needed
        self._lookups: dict[str, _PromptLookup] = {}
        self._was_up: bool | None = None
        self.start, self.close = sessions.start, sessions.close

    def look_up(self, request: Request, usable: int) -> None:
        """Ask Redis for a new request's blocks, from the first neither resident nor saved. Pass over short prompts.

        usable: see `Driver.matched`.
        """
        manager, hashes, session_id = self._manager, request.hashes[:usable], request.session.session_id
        main, marks = manager.shape.main, manager.pool.marks
        ids = manager.pool.lookup(main, hashes)
        is_served = np.array([at >= 0 and marks.serves(at, request.asker) for at in ids], np.bool_)
        first = first_false(is_served | manager.blocks.is_saved(request.rows[: len(hashes)]))
        if not manager.min_blocks <= len(hashes) > first:
            return

        def needed(count: int) -> list[BlockName]:
            return [(group, block_hash) for group, block_hash, _ in self._parts(hashes, first + count)]

        known = None if self._needed is None else needed
        if self.sessions.look_up(request.request_id, session_id, main, hashes[first:], known):
            self._lookups[request.request_id] = _PromptLookup(request, hashes, first)

    def _parts(self, hashes: Sequence[bytes], depth: int) -> list[tuple[int, bytes, int]]:
        """Return group, hash and position of each block of further groups needed to continue behind `depth` blocks."""
        needed = () if self._needed is None else self._needed(depth)
        return [(group, hashes[at], at) for group, at in needed]

    def awaits(self, request_id: str, now: float) -> bool:
        """True if a request that is ready to run should still wait for Redis, in all at most WAIT_S seconds."""
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return False
        if lookup.deadline is None:
            lookup.deadline = now + WAIT_S
        if self.sessions.is_up and now < lookup.deadline:
            return True
        del self._lookups[request_id]
        self._manager.events(LookedUp(lookup.request.session.session_id, "unanswered"))
        return False

    def forget(self, request_id: str) -> None:
        """Forget the question about a request that has ended."""
        self._lookups.pop(request_id, None)

    def hear(self) -> None:
        """Enter the blocks found by Redis's answers since the last call. Report a change of `sessions.is_up`."""
        if self.sessions.is_up is not self._was_up:
            self._was_up = self.sessions.is_up
            self._manager.events(StoreIsUp(self._was_up))
            if self._was_up:
                self._manager.store_is_back()
        for request_id, result in self.sessions.take().items() if self.sessions.has_answers else ():
            if (lookup := self._lookups.pop(request_id, None)) is None:
                continue
            if result.sizes:
                self._found(lookup, result)
                lookup.request.has_brought(shared_blocks(result.sampled, lookup.hashes))
            is_of_use = result.sizes and (self._needed is None or result.point is not None)
            self._manager.events(LookedUp(lookup.request.session.session_id, "found" if is_of_use else "nothing"))

    def _found(self, lookup: _PromptLookup, result: LookupResult) -> None:
        """Enter blocks stored by another engine. Their mark is DERIVED, because the true one is not known here."""
        manager, session = self._manager, lookup.request.session
        rows = lookup.request.rows[: lookup.first + len(result.sizes)]
        known = common_prefix(session.rows, rows)
        if known == len(session.rows):
            manager.table.extend(session, rows[known:])
        self._enter_saved(rows[lookup.first :], result.sizes, 0, Mark.DERIVED, NOBODY)
        depth = lookup.first + result.point.blocks if result.point else 0
        if result.point and session.has(int(rows[depth - 1]), depth - 1):
            others = manager.points.place(session, depth, self._parts(lookup.hashes, depth)).rows
            self._enter_saved(others, result.point.sizes, 0, Mark.DERIVED, NOBODY)
            manager.points.stored(others.tolist())

    def tell(self, drops: Iterable[BlocksDropped], now: float) -> None:
        """Publish in Redis the sessions changed since the last call. Tell Redis of the drops."""
        offset, changes = time.time() - now, self._manager.table.take_changes()
        self.sessions.tell([self._record(session_id, session, offset) for session_id, session in changes], drops)

    def _record(self, session_id: str, session: Session | None, offset: float) -> SessionRecord:
        """Return the record of a session for Redis. offset: seconds from the manager's clock to Unix time."""
        if session is None:
            return SessionRecord(session_id)
        blocks = self._manager.blocks
        rows = np.concatenate([session.rows, session.point_rows])
        saved = rows[blocks.is_saved(rows)]
        columns = blocks.group[saved].tolist(), blocks.hashes(saved), blocks.depth[saved].tolist()
        fields = {
            "tenant": session.tenant,
            "state": session.state,
            "tokens": len(session.rows) * self._manager.shape.block_tokens,
            "blocks": len(saved),
            "bytes": blocks.nbytes_of(saved),
            "requests": session.uses,
            "hashes": sample(blocks.hashes(session.rows)),
            "created": iso(session.created + offset),
            "last_used": iso(session.last_used + offset),
        }
        return SessionRecord(session_id, fields, session.last_used + offset, list(zip(*columns, strict=True)))

    def reset(self) -> str:
        """Begin a new namespace for blocks in Redis, and return its name. Blocks stored before are not found in it."""
        self._lookups.clear()
        return self.sessions.reset()
