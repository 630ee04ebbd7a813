"""Prefetches: loads of a cold session's blocks into the prefix cache, before an expected request of the session.

A session is cold if no request of it runs, and all its full blocks are saved: compressed in a tier, such as RAM. A
resume point is a length of a session at which a model with sliding windows or recurrent states can continue.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

import numpy as np
from numpy.typing import NDArray

from manthan.manager.events import PrefetchHit
from manthan.manager.pool import MARKS, BlockName
from manthan.manager.session.blocks import Rows, common_prefix
from manthan.manager.session.manager import SessionManager
from manthan.manager.session.table import Session, qualified
from manthan.manager.transfer import RESET, STORE_DOWN, Answers, Transfer, TransferResult
from manthan.policies.ranking import Ranking

LEAD_S = 2.0
"""Seconds from a prefetch to the session's expected request, but at most half of idle.after_s. If loaded earlier, the
blocks might be overwritten again before the request."""
LOOKED_AT = 64  # number of expected sessions checked at a time
RETRY_S = 0.1  # seconds until the next search for room, after a search found none
PATIENCE = 2.0  # a prefetch is too late PATIENCE * idle.after_s after the expected request, or after a client's notice


def lead_s(idle_after_s: float) -> float:
    """Return the seconds from a prefetch to the session's expected request."""
    return min(LEAD_S, idle_after_s / 2)


@dataclass
class _Load:
    """Prefetch under way."""

    session_id: str
    number: int  # `Session.number`
    rows: Rows  # BlockTable rows: of the session's blocks, then of its last resume point; see `resume_points`
    block_ids: list[int]  # for each row, the pool's block, which is referenced
    is_loaded: list[bool]  # for each row, False if the block was resident
    marks: NDArray[np.uint8]  # for each row, the `Mark` of the KV that the load brings
    answers: Answers
    is_void: bool = False  # True after a reset

    def brings(self, row: int) -> bool:
        """True if the block with this row will be resident after this load, so that a request need not load it."""
        return not self.is_void and bool((self.rows == row).any())


class Prefetcher:
    """Loads one session at a time. A request waits only for a prefetch that brings the request's next block.

    Args:
        ranks: number of ranks, each of which answers every transfer.
        spare: number of free blocks that prefetches leave to requests.
        lead_s: seconds from a prefetch to the session's expected request; None for no prefetches.
    """

    def __init__(self, manager: SessionManager, ranks: int, spare: int, lead_s: float | None) -> None:
        self._manager, self._pool, self._runway = manager, manager.pool, manager.runway
        self._ranks, self._spare, self._lead_s = ranks, spare, lead_s or 0.0
        self.is_on = lead_s is not None  # True if sessions of this model can be prefetched
        self._main = manager.shape.main
        self.expected = Ranking()  # by id of an expected session, the time at which to enter it into `to_load`
        self.to_load: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """By id of a session to prefetch: the time after which a prefetch is too late, and `Session.uses` at entry."""
        self.load: _Load | None = None  # the prefetch under way
        self.ready: dict[int, tuple[str, int, Rows]] = {}
        """By first loaded row: id, `Session.number` and rows of a session that was prefetched and not used since."""
        self._look_after = 0.0
        self.look_at = inf  # time of the next search for room; infinity if none is planned
        self.was_settled = False  # True if a prefetch has ended since the last step, so that another may begin
        manager.said.expected = self._look_out
        manager.table.gone.append(self._forget)

    def _look_out(self, session: Session, now: float) -> None:
        self.expected.discard(session.session_id)
        if self.is_on and session.is_sure and session.expected is not None:
            self.expected.set(session.session_id, max(now, session.expected - self._lead_s))

    def expect(self, told_ids: Iterable[str], tenant: str, now: float) -> None:
        """Note that a client is about to use sessions. Unknown ids, other tenants' and active sessions are ignored."""
        if not self.is_on:
            return
        late = now + PATIENCE * self._manager.idle_after_s
        for told_id in told_ids:
            session = self._manager.table.by_id.get(qualified(told_id, tenant))
            if session is not None and session.tenant == tenant and not session.requests:
                self.to_load[session.session_id] = late, session.uses

    def _forget(self, session: Session) -> None:
        self.expected.discard(session.session_id)
        self.to_load.pop(session.session_id, None)

    def _awaited(self, now: float) -> list[Session]:
        """Return the loadable sessions of the first LOOKED_AT in `to_load`. Remove used, late and too large sessions.

        A session that is not cold yet stays in `to_load`, because it may go cold before its request. If there are more
        than LOOKED_AT sessions, those that stay move to the end.
        """
        by_id, points = self._manager.table.by_id, self._manager.points
        for session_id in self.expected.pop_until(now):
            session = by_id[session_id]
            if session.expected is not None:
                late = session.expected + PATIENCE * self._manager.idle_after_s
                self.to_load[session_id] = late, session.uses
        awaited = []
        are_more = len(self.to_load) > LOOKED_AT
        for session_id, (late, uses) in list(islice(self.to_load.items(), LOOKED_AT)):
            session = by_id[session_id]
            is_whole = not points.is_needed or (session.points and points.stands(session.points[-1]))
            is_loadable = session.is_cold and is_whole
            will_never_fit = is_loadable and self._size(session) > self._pool.size - self._spare
            if late < now or session.uses > uses or will_never_fit:
                del self.to_load[session_id]
                continue
            if is_loadable:
                awaited.append(session)
            if are_more:
                self.to_load.move_to_end(session_id)
        return awaited

    def admitted(self, rows: Rows, resident: int, usable: int) -> None:
        """Note that vLLM has allocated a request's blocks. Report a hit if a prefetch made these blocks resident.

        A prefetch hits if all blocks that session and prompt have in common were resident, or `usable` blocks were.
        rows: of the prompt's full blocks. resident, usable: see `Driver.matched`.
        """
        first = next((row for row in rows[:resident][::-1].tolist() if row in self.ready), None)
        if first is None:
            return
        session_id, _, own = self.ready.pop(first)
        if resident >= min(common_prefix(own, rows), usable):
            self._manager.events(PrefetchHit(session_id))

    def step(self, now: float, waiting: int) -> Sequence[Transfer]:
        """Return the loads to begin, if a session is due and has room. waiting: blocks that waiting requests need."""
        if self.load is not None or not self.is_on:
            return []
        self.was_settled = False
        if now < self._look_after:
            self.look_at = self._look_after
            return []
        self.look_at = inf
        sessions = self._awaited(now)
        if not sessions:
            return []
        # A prefetch leaves `left` blocks to requests. It overwrites no unsaved block, and spares blocks of `_exact`.
        left = self._spare + waiting
        wanted = min(max(map(self._size, sessions)), len(self._pool) - left)
        room = max(0, self._runway.length(left + wanted) - left) if wanted > 0 else 0
        exact = self._exact(room)
        session = next((one for one in sessions if self._size(one) <= room and self._spares(one, exact)), None)
        if session is None:
            self._look_after = now + RETRY_S
            return []
        del self.to_load[session.session_id]
        self.load = self._begin(session)
        jobs = self.load.answers.jobs
        if not jobs:
            self._settle(self.load, now)
        return jobs

    def _exact(self, most: int) -> list[tuple[int, int]]:
        """Return index in the free queue, and row, of each block with exact KV that the tiers have only in lossy form.

        most: number of first blocks of the free queue to search.
        """
        manager, marks = self._manager, self._pool.marks
        ahead = [(at, block) for at, block in self._pool.saved(most) if not marks[block.block_id]]
        rows = manager.blocks.find([block.group for _, block in ahead], [block.block_hash for _, block in ahead])
        is_lossy = (rows >= 0) & ~manager.is_exact(rows)  # no session has a block without a row
        return [(at, row) for (at, _), row, lost in zip(ahead, rows.tolist(), is_lossy, strict=True) if lost]

    def _spares(self, session: Session, exact: Sequence[tuple[int, int]]) -> bool:
        """True if a prefetch of a session overwrites none of the blocks `exact` but its own. exact: see `_exact`."""
        own = {*session.rows.tolist(), *(session.points[-1].rows.tolist() if session.points else ())}
        return all(at >= self._size(session) or row in own for at, row in exact)

    def _size(self, session: Session) -> int:
        """Return the number of blocks that a prefetch of a session takes."""
        return len(session.rows) + (len(session.points[-1].rows) if session.points else 0)

    def _begin(self, session: Session) -> _Load:
        """Begin a load: reference the session's resident blocks, and take free blocks for the rest."""
        manager, blocks = self._manager, self._manager.blocks
        point_rows = manager.load_started(f"prefetch of {session.session_id}", session.rows)
        rows = np.concatenate([session.rows, point_rows])
        groups = np.array([manager.pool_group(group) for group in blocks.group[rows].tolist()])
        hashes = blocks.hashes(rows)
        ids = np.full(len(rows), -1, np.int64)
        numbers = list(dict.fromkeys(groups.tolist()))
        for group in numbers:
            at = np.nonzero(groups == group)[0]
            ids[at] = self._pool.lookup(group, [hashes[i] for i in at.tolist()])
        self._runway.taken(len(ids))
        self._pool.hold(ids[ids >= 0].tolist())
        missing = ids < 0
        ids[missing] = self._pool.take(int(missing.sum()))
        is_stored = blocks.group[rows] >= 0
        jobs = []
        for group in numbers:
            at = np.nonzero((groups == group) & missing & is_stored)[0]
            if len(at):
                jobs.append(manager.load_job(group, [hashes[i] for i in at.tolist()], ids[at].tolist(), session))
        depth = 0 if manager.shape.stores_main else len(session.rows)
        answers, marks = Answers(jobs, session.session_id, depth), manager.loaded_marks(rows)
        return _Load(session.session_id, session.number, rows, ids.tolist(), missing.tolist(), marks, answers)

    def answered(self, result: TransferResult, now: float) -> None:
        """Take a rank's result of the load under way."""
        assert self.load is not None
        if self.load.answers.add(result, self._ranks):
            self._settle(self.load, now)

    def _settle(self, ended: _Load, now: float) -> None:
        """Enter the blocks loaded by every rank into the prefix cache, and give all blocks back."""
        manager, failed = self._manager, ended.answers.failed
        names = [(manager.pool_group(group), name) for group, name in map(manager.blocks.name, ended.rows.tolist())]
        if not ended.is_void:
            self._enter(ended, names, failed)
        self.load, self.was_settled = None, True
        self._pool.free(ended.block_ids[::-1])  # tails are overwritten first
        bad = [name for name, cause in failed.items() if cause not in (STORE_DOWN, RESET)]
        manager.load_finished(f"prefetch of {ended.session_id}", bad)
        if ended.is_void:
            return
        main = [name for group, name in names if group == self._main]
        for number in reversed(dict.fromkeys(group for group, _ in names)):
            self._pool.keep(number, [name for group, name in names if group == number][::-1])
        loaded = [row for row, is_loaded in zip(ended.rows.tolist(), ended.is_loaded, strict=True) if is_loaded]
        if loaded and not failed:
            own = ended.rows[: len(main)]
            there = {row: ready for row, ready in self.ready.items() if ready[1] in manager.table.by_number}
            self.ready = there | {loaded[0]: (ended.session_id, ended.number, own)}
        manager.events(ended.answers.restored(self._main, manager.points.is_needed))

    def _enter(self, ended: _Load, names: Sequence[BlockName], failed: Iterable[BlockName]) -> None:
        """Enter loaded blocks into the prefix cache, up to the first that failed or that no session needs any more.

        If a request has computed the same block meanwhile, the computed block is kept, and the loaded block is freed.
        """
        manager, blocks = self._manager, self._manager.blocks
        bad, session = set(failed), manager.table.by_number.get(ended.number)
        is_coarse = manager.is_coarse(ended.rows)
        owner = None if session is None else session.owner
        for at, (row, (group, block_hash)) in enumerate(zip(ended.rows.tolist(), names, strict=True)):
            if (group, block_hash) in bad or not blocks.users[row]:
                if group == self._main:
                    return
                continue
            if (bad and group != self._main) or not ended.is_loaded[at] or blocks.group[row] < 0:
                continue
            [other] = self._pool.lookup(group, [block_hash])
            if other >= 0:
                self._pool.hold([other])
                self._pool.free([ended.block_ids[at]])
                ended.block_ids[at] = other
                continue
            mark = MARKS[ended.marks[at]]
            self._pool.marks.set([ended.block_ids[at]], mark, owner, bool(is_coarse[at]))
            self._pool.cache(ended.block_ids[at], group, block_hash, int(blocks.depth[row]))

    def reset(self) -> None:
        """Note that all KV was dropped. Blocks of the load under way will not enter the prefix cache."""
        self.ready.clear()
        if self.load is not None:
            self.load.is_void = True

    def abandon(self) -> list[int]:
        """Forget the load under way. Return its block ids, which the caller frees."""
        ended, self.load = self.load, None
        return [] if ended is None else ended.block_ids

    def drain(self, result: TransferResult) -> list[int]:
        """Take a rank's result. If every rank has answered, forget the load and return its block ids; else none."""
        if self.load is None or all(job.job_id != result.job_id for job in self.load.answers.jobs):
            return []
        return self.abandon() if self.load.answers.add(result, self._ranks) else []
