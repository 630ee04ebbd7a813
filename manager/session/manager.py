"""Session memory manager: decides which blocks are stored, loaded and dropped.

The manager does no I/O, starts no thread, reads no clock and knows neither torch nor vLLM. A driver calls the manager
from a single thread, and hands the returned transfers to the workers.

Tiers (RAM, GPU memory, disk, Redis) keep compressed blocks. A session is cold if no request runs and all its blocks are
saved in a tier. A row is a block's number in the BlockTable, and its depth the number of blocks before it in a session.
A resume point is a length of a session at which every KV cache group has the blocks needed to continue: with a single
group of full attention, any length. A block's level is the number of its refinements: parts behind the base that can be
cut off. A mark tells if KV is exact, decoded, or derived (computed behind decoded blocks). Lossy KV is decoded or
derived. Heads are first blocks that sessions share. Sessions are relatives if the hint `parent_session_id` makes them
parents, children or further kin.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, count, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manthan.manager import events
from manthan.manager.config.model import Quality
from manthan.manager.events import DropCause, Events
from manthan.manager.pool import MARKS, Asker, BlockName, Mark, Pool, Runway
from manthan.manager.session.blocks import (
    HIGH,
    LOSSLESS,
    MOST_INNER,
    NO_GROUP,
    NO_ROWS,
    SAVED,
    STORING,
    BlockTable,
    Mask,
    MemoryShape,
    Rows,
    common_prefix,
    first_false,
    runs,
)
from manthan.manager.session.hints import NO_HINTS, Hints, SaidBySession
from manthan.manager.session.resume_points import ResumePoints
from manthan.manager.session.table import Session, SessionState, SessionTable, Shares, digest_of
from manthan.manager.transfer import JOB_BLOCKS, Answers, Transfer
from manthan.policies import EvictionPolicy, PolicyOptions
from manthan.policies.ranking import Ranking

DOUBLINGS = 5  # most doublings of the wait before a session is saved again, after the tiers failed or had no room
MOST_HEADS = 512  # most first blocks of a session, shared with others, that are stored again at a time
STRIDE = 32  # `lead_overwritten` looks up every 32nd block of a session in the pool
LOOKED_AT = 32  # most sessions that `lead_overwritten` looks at
STEP_BLOCKS = 64  # most blocks in a call of `to_order`, because each block takes time. A step makes one call
BEHIND = 64  # a step makes another call of `to_order` for each 64 calls that wait
AFTERWARDS = {"evict": "go cold", "expect": "be expected back", "release": "be released"}
"""Orders of an operator that are refused while a request of the session runs, each with words for the refusal."""


class PointParts(NamedTuple):
    """Resume point of a session, as the driver knows it."""

    depth: int  # number of the session's blocks up to the point
    parts: Sequence[tuple[int, bytes, int]]  # group, block hash and position of each needed block of windows or states


@dataclass(slots=True, eq=False)
class Request:
    """Request that waits or runs in vLLM."""

    request_id: str
    session: Session
    hashes: Sequence[bytes]  # of the prompt's full blocks
    rows: Rows  # of the prompt's full blocks
    tokens: int  # number of the prompt's tokens
    began: float  # time of the request's arrival
    hints: Hints
    own: int = 0
    """Number of the prompt's first blocks that the client's sessions have. Blocks loaded behind these are exact."""
    quality: Quality = "any"  # see `Hints`

    # Noted by the driver.
    lossy: int = 0  # number of prompt tokens whose cached KV is decoded or derived
    exact: set[int] = field(default_factory=set)  # ids of the pool's blocks that a load fills with exact KV
    found: int | None = None  # number of the prompt's blocks found resident or loaded; None until `Driver.admitted`
    is_again: bool = False  # true after a preemption: then the request's own blocks are found, which do not count
    computed: int = 0  # number of the request's full blocks in the prefix cache
    saves_after: float = 0.0  # time from which the `computed` blocks are considered for saving
    was_loaded: bool = False  # true if a load has brought at least one block
    is_unserved: bool = False  # true if a tier did not answer a load, so that the request gets no further load
    taken: int = 0  # number of the request's blocks at the last call of `Driver.admitted`; 0 after `Driver.matched`

    @property
    def asker(self) -> Asker | None:
        """Owner of the session, with "high" as third item for a request of high quality; None for exact KV only."""
        if self.quality == "exact":
            return None
        return (*self.session.owner, "high") if self.quality == "high" else self.session.owner

    def has_brought(self, blocks: int) -> None:
        """Note that the client's session has the prompt's first `blocks` blocks in another engine.

        A nameless session ignores this, because only names are common to engines. So does a request for exact KV.
        """
        if self.session.name is not None and self.quality != "exact":
            self.own = max(self.own, blocks)


class Store:
    """Transfer of blocks from the pool to the tiers, to begin or under way."""

    def __init__(self, transfer: Transfer, rows: Rows, exact: NDArray[np.uint16], replaces: Mask) -> None:
        self.transfer, self.rows = transfer, rows
        self.exact = exact  # number of first tokens of each block that are stored exact
        self.replaces = replaces  # for each block, True if it is saved already, and is stored again
        self.answers = Answers([transfer])
        self.block_ids: list[int] = transfer.block_ids.tolist()  # referenced until all ranks have gathered the blocks
        self.gathered = 0  # number of ranks that have gathered the blocks: read them from the pool
        self.is_void = False  # true after a reset, which makes the result worthless


class Outcome(NamedTuple):
    """Reply to a request's hints, for the client."""

    session_id: str  # shown to the tenant
    is_pinned: bool
    refused: str  # reason for a refusal, in a sentence; empty for none
    lossy_tokens: int = 0  # see `Request.lossy`


class StoresBegun(NamedTuple):
    """Stores that `SessionManager._begin` has begun for some rows."""

    plans: list[Store]
    taken: int  # number of rows, from the first on, whose blocks are in the stores
    is_gone: bool = False  # true if the next row's block was absent from the pool, or decoded, before room was made


class Usage(NamedTuple):
    """Counts of sessions, resume points and blocks, and bytes."""

    sessions: dict[SessionState, int]  # by state
    points: int  # number of resume points whose blocks of windows and states are all saved
    unsaved_blocks: int  # number of unsaved blocks of sessions, resume points and requests
    saved_blocks: int
    exact_blocks: int  # number of saved blocks of which at least one token is stored exact
    pool_nbytes: int  # bytes that the saved blocks take in the pool when resident
    saved_nbytes: int  # bytes of the compressed blocks
    budget_nbytes: int  # budget of the tiers


class SessionManager:
    """Decides for an engine which blocks are stored, loaded and dropped.

    Args:
        policy: class that orders the sessions with compressed blocks; the first lose theirs first.
        capacity_nbytes: hard budget of the tiers, all ranks together.
        idle_after_s: seconds from the end of a session's last request until the session is saved.
        min_tokens: least length of a session, rounded up to blocks. Shorter sessions are forgotten once no request of
            theirs runs.
        label: part of the ids of sessions without a name, different for each engine.
        shares: shares of the budget for pinned sessions, for tenants, and for first blocks that sessions share.
        sink_tokens: number of first tokens of each session that are kept exact.
        quality: quality of requests without a hint of quality; see `Hints`.
        is_shared: True if several engines use the same tier.
        ttl_s: default of the hint `ttl_s`, the seconds from a session's last use until it is forgotten; None for never.
        is_exclusive: True if tiers last no longer than the pool, so that a full tier need not hold resident blocks.
    """

    pool: Pool  # set by `bind`
    runway: Runway  # `runway.ahead` is the number of blocks wanted in the free queue before its first unsaved block
    enough = 16  # number of consecutive prompts that leave out the last answer, after which no answer is saved

    def __init__(
        self,
        policy: type[EvictionPolicy],
        shape: MemoryShape,
        capacity_nbytes: int,
        idle_after_s: float,
        events: Events,
        *,
        min_tokens: int = 0,
        label: str = "",
        options: PolicyOptions | None = None,
        shares: Shares = Shares(),  # noqa: B008
        sink_tokens: int = 0,
        quality: Quality = "any",
        is_shared: bool = False,
        ttl_s: float | None = None,
        is_exclusive: bool = False,
    ) -> None:
        self.shape, self.budget_nbytes, self.shares = shape, capacity_nbytes, shares
        self.idle_after_s, self.events, self.quality = idle_after_s, events, quality
        self.min_blocks = max(1, -(-min_tokens // shape.block_tokens))
        self.blocks = BlockTable()
        self.table = SessionTable(policy.family(options), shape, self.blocks, label, shares)
        self.points = ResumePoints(self)
        self.said = SaidBySession(self, ttl_s)
        self.requests: dict[str, Request] = {}
        self.job_ids = count()
        self._is_shared, self._is_exclusive = is_shared, is_exclusive
        self._sink, self._wanted_sink = sink_tokens, sink_tokens
        self.due = Ranking()  # by id of an idle session, the time at which the session is to be saved
        self.saving: dict[Session, float] = {}  # for each idle session being saved, the time at which saving began
        self._loading: dict[str, Rows] = {}  # by id of a load, the pinned rows: they are not dropped
        self._torn: set[int] = set()  # pinned rows to drop after their loads, because ranks may have different copies
        self._heads: set[int] = set()  # rows of the heads that are stored exact
        self.read: Callable[[Rows], None] | None = None  # called at a load's end with those of its rows that are saved
        self._heirs: dict[Session, None] = {}
        """Sessions to enter into the policy's order again, because others no longer share some of their blocks."""
        self._heads_only: dict[Session, None] = {}
        """Sessions out of the policy's order, because relatives share, or hints keep, all blocks left to drop."""
        self.to_order = deque[tuple[Callable[[int, list[bytes]], None], Rows]]()
        """Functions of the pool that `order_some` has to call, each with rows. Rows unsaved by then are left out."""
        self._led: list[tuple[int, int]] = []  # last choice of `lead_overwritten`: `Session.number`, number of blocks
        self._left_out = 0  # number of the latest consecutive prompts that leave out their session's last answer

    def bind(self, runway: Runway) -> None:
        """Use the runway's pool."""
        self.runway, self.pool = runway, runway.pool

    def recode(self, shape: MemoryShape, capacity_nbytes: int, all_exact: bool = False) -> None:
        """Encode in another codec from now on. Saved blocks stay. all_exact: True to store every token exact."""
        self.shape = self.table.shape = shape
        self.budget_nbytes = capacity_nbytes
        self._sink = 1 << 62 if all_exact else self._wanted_sink

    # -- requests -------------------------------------------------------------------------------------

    def request_started(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        name: str | None,
        now: float,
        *,
        tokens: int | None = None,
        hints: Hints = NO_HINTS,
        tenant: str = "",
        tail: bytes | None = None,
    ) -> Request:
        """Find or make the session of a new request. Return the request.

        Args:
            hashes: block hashes of the prompt's full blocks.
            name: the client's name for the session; None without a name.
            tokens: number of the prompt's tokens; None if there are none behind the full blocks.
            tail: the prompt's tokens behind the full blocks, as bytes; None if unknown.
        """
        likely = next((session.rows for session in self.table.named(name, tenant)), NO_ROWS)
        rows = self.blocks.enter(self.shape.session_group, hashes, 0, likely)
        self.blocks.refer(self.blocks.holds, rows, +1)
        session = self.table.attribute(hashes, rows, name, tenant, now)
        prompt = len(hashes) * self.shape.block_tokens if tokens is None else tokens
        length = self.table.kept(session, rows, name, prompt)
        left = len(session.rows) - length
        if self._leaves_answer_out(session, hashes, rows):
            left = session.tokens // self.shape.block_tokens - length
        if left:
            session.left_tokens = left * self.shape.block_tokens
        known = 0 if session.tokens and not session.left_tokens else len(self.blocks.used(rows))
        self._begin_use(session, request_id, now, prompt, known * self.shape.block_tokens)
        if length < len(session.rows):  # the old answer is no longer needed
            self.cut(session, length, DropCause.ABANDONED)
        digest, quality = digest_of(tenant, hashes, tail), hints.quality or self.quality
        request = Request(request_id, session, hashes, rows, prompt, now, hints, quality=quality)
        if quality != "exact":
            request.own = self.table.own_blocks(session, rows, digest)
        self.requests[request_id] = request
        self.table.enter_prompt(session, digest)
        if hints.store is not None:
            self.table.stay_out(session, not hints.store)
        if (parent := hints.parent_session_id) and parent != session.name:
            if parent != session.parent:
                self.events(events.Parent(session.session_id, parent))
            self.table.join(session, parent)
        return request

    def _leaves_answer_out(self, session: Session, hashes: Sequence[bytes], rows: Rows) -> bool:
        """True if a prompt continues the session but leaves out the session's last answer. Count such prompts.

        Some chat templates leave out the model's thinking. A single prompt with the answer sets the count to 0.
        """
        before = session.prompt_tokens // self.shape.block_tokens
        if session.requests or not session.answer or before >= len(hashes):
            return False
        if hashes[before] == session.answer:
            self._left_out = 0
            if len(session.rows) <= before and self.shape.stores_main:  # `_end_use` told the pool to overwrite it soon
                behind = rows[before:]
                self.pool.forget(self.shape.main, self.blocks.hashes(behind[~self.blocks.is_saved(behind)]))
                self.runway.forget()
            return False
        is_left_out = common_prefix(session.rows, rows) >= before - 1  # else the client changed an earlier message
        self._left_out += is_left_out
        return is_left_out

    def request_finished(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        now: float,
        *,
        tokens: int | None = None,
        points: Sequence[PointParts] = (),
        ending: str = "",
    ) -> tuple[Outcome, list[Store]]:
        """Note the end of a request. Return the reply to its hints, and the begun stores of resume points.

        Args:
            hashes: block hashes of all full computed blocks, of prompt and answer.
            tokens: number of tokens of prompt and answer; None if there are none behind the blocks.
            points: resume points whose blocks the pool has now, the deepest first.
            ending: reason for the answer's end, such as a stop token; see `SessionView.ending`.
        """
        request = self.requests.pop(request_id)
        session, held, lossy = request.session, request.rows, request.lossy
        more = self.blocks.enter(self.shape.session_group, hashes[len(held) :], len(held))
        self.blocks.refer(self.blocks.holds, more, +1)
        rows = np.concatenate([held[: len(hashes)], more])
        total = len(hashes) * self.shape.block_tokens if tokens is None else tokens
        if common_prefix(session.rows, rows) < len(rows):
            # sessions may have grown since the request came
            home = self.table.find(rows, session.name, session.tenant, session)
            if home is None:
                home = self.table.create(session.name, session.tenant, now) if len(session.rows) else session
            if home is not session:
                self._begin_use(home, request_id, now, session.tokens, len(home.rows) * self.shape.block_tokens)
                self.said.live_on(session, now)  # its time may have passed during the request
                self._end_use(session, request_id, now)
                home.stays_out |= session.stays_out
                home.ttl_s = home.ttl_s or session.ttl_s
                if session.parent is not None:
                    self.table.join(home, session.parent)
                session = home
            new = rows[len(session.rows) :]
            self.table.extend(session, new)
            if not self.shape.stores_main:  # blocks that are never stored count as saved
                self.blocks.save(new[~self.blocks.is_saved(new)], 0, 0, 0, session.tenant)
        session.answer_tokens = max(0, total - session.tokens)
        session.tokens = max(session.tokens, total)
        session.lossy_tokens, session.ending = lossy, ending
        plans = self._place(session, points) if len(session.rows) == len(rows) else []
        seconds, found = now - request.began, (request.found or 0) * self.shape.block_tokens
        self.events(events.Turn(session.session_id, session.tokens, len(session.rows), seconds, found, lossy))
        refused = self.said.take(session, request.hints, now)
        self.blocks.refer(self.blocks.holds, np.concatenate([held, more]), -1)
        if request.hints.release and len(session.rows) and session.requests == {request_id}:
            self.table.end(session, request_id)
            self.forget_session(session, DropCause.RELEASED)
        else:
            self._end_use(session, request_id, now)
        self._drop_unneeded(held)
        return Outcome(session.told_id, session.is_pinned, refused, lossy), plans

    def _begin_use(self, session: Session, request_id: str, now: float, tokens: int, known_tokens: int) -> None:
        self._stop_saving(session)
        if not session.requests:
            self.said.returned(session, now)
            session.stored = session.stored_nbytes = session.refusals = 0
            if session.uses:
                session.gap = max(0.0, now - session.last_used)
        before = session.tokens if session.tokens and not session.left_tokens else known_tokens
        session.added_tokens = max(0, tokens - before)
        session.tokens = session.prompt_tokens = tokens
        session.uses += 1
        session.expected, session.ending = None, ""
        self.table.begin(session, request_id)
        self.table.used(session, now)

    def _end_use(self, session: Session, request_id: str, now: float) -> None:
        self.table.end(session, request_id)
        self.table.used(session, now)
        if session.requests:
            return
        if len(session.rows) < self.min_blocks:
            self.cut(session, 0, DropCause.ABANDONED)
        else:
            self.table.remember(session)
            length = session.prompt_tokens // self.shape.block_tokens
            session.answer = self.blocks.name(int(session.rows[length]))[1] if length < len(session.rows) else b""
            is_kept = session.is_pinned or session.kept
            if session.answer and self._left_out >= self.enough and length >= self.min_blocks and not is_kept:
                own = self._own_hashes(session.rows[length:])
                self.cut(session, length, DropCause.ABANDONED)
                if self.shape.stores_main:  # the pool overwrites the answer before unsaved blocks
                    self.pool.keep(self.shape.main, own[::-1])
            session.left_tokens = 0
            self.due.set(session.session_id, now + self.idle_after_s)

    def _place(self, session: Session, points: Sequence[PointParts]) -> list[Store]:
        """Enter a session's resume points from `min_blocks` on, and begin to store their blocks. Return the stores."""
        wanted = [point for point in points if point.depth >= self.min_blocks]
        if not wanted or session.stays_out:
            return []
        session.prompt_depth = wanted[1].depth if wanted[1:] else 0
        self.points.tidy(session)
        plans: list[Store] = []
        for depth, parts in wanted:
            point = self.points.place(session, depth, parts)
            point.ends_prompt |= depth == wanted[-1].depth
            rows = point.rows
            for group in np.unique(self.blocks.group[rows]).tolist():
                needed = rows[(self.blocks.group[rows] == group) & (self.blocks.status[rows] == 0)]
                begun = self._begin(needed, session, is_pressed=True)
                plans += begun.plans
                if begun.taken < len(needed):
                    self.points.leave(session, point, DropCause.ABANDONED)
                    break
        self.points.tidy(session)
        return plans

    # -- loads ----------------------------------------------------------------------------------------

    def match(self, request: Request, resident: int, usable: int) -> int:
        """Return the number of blocks behind the resident ones that a load can bring for a request.

        The blocks are saved, without a gap, and as fine as the request's quality demands. Behind the first
        `Request.own` blocks they are exact. If resume points are needed, the blocks end at a resume point.

        resident, usable: see `Driver.matched`.
        """
        blocks, rows, is_high = self.blocks, request.rows[resident:usable], request.quality == "high"
        length = blocks.saved_prefix(rows)
        if is_high and self.shape.stores_main:
            length = first_false(~self.is_coarse(rows[:length]))
        own = max(0, request.own - resident)
        if self.shape.stores_main and length > own:
            length = own + first_false(self.is_exact(rows[own:length]))
        if not self.points.is_needed:
            return length
        for end in range(length, 0, -1):
            point = self.points.at.get(int(rows[end - 1]))
            if point is None or not self.points.stands(point) or (is_high and self.is_coarse(point.rows).any()):
                continue  # the point cannot be loaded, or is too coarse
            if end <= own or self.is_exact(point.rows).all():
                return end
        return 0

    def is_coarse(self, rows: Rows) -> Mask:
        """Return a mask of the saved `rows`: True if a block is too coarse for requests of high quality."""
        is_coarse: Mask = self.blocks.level[rows] < HIGH
        return is_coarse & ~self._is_whole(rows) if is_coarse.any() else is_coarse

    def is_exact(self, rows: Rows) -> Mask:
        """Return a mask of the saved `rows`: True if a block decodes, bit for bit, to KV with the mark EXACT."""
        is_exact: Mask = self._is_whole(rows) & (self.blocks.mark[rows] == Mark.EXACT)
        return is_exact

    def _is_whole(self, rows: Rows) -> Mask:
        """Return a mask of the saved `rows`: True if a block decodes, bit for bit, to the KV that was encoded.

        False for blocks that are being stored again, because some rank may have a lossy copy by now.
        """
        blocks = self.blocks
        is_whole: Mask = blocks.level[rows] >= LOSSLESS
        for number, group in self.shape.groups.items():
            of_group = True if not self.points.is_needed else blocks.group[rows] == number
            is_whole |= of_group & (group.is_lossless | (blocks.exact[rows] >= group.tokens))
        if blocks.storing:
            is_whole &= blocks.status[rows] & STORING == 0
        return is_whole

    def load_started(self, load_id: str, rows: Rows) -> Rows:
        """Pin the rows that a load reads, with those of the resume point behind `rows`. Return the point's rows."""
        point = self.points.at.get(int(rows[-1])) if len(rows) else None
        point_rows = NO_ROWS if point is None else point.rows
        self._loading[load_id] = np.concatenate([rows if self.shape.stores_main else NO_ROWS, point_rows])
        self.blocks.refer(self.blocks.pins, self._loading[load_id], +1)
        return point_rows

    def load_job(
        self, group: int, hashes: Sequence[bytes], ids: Sequence[int], session: Session, request_id: str | None = None
    ) -> Transfer:
        """Return a new job that loads blocks for a session. ids: the pool's blocks to load into."""
        job_id, block_ids, tenant = next(self.job_ids), np.array(ids, np.int32), session.tenant
        return Transfer(job_id, "load", group, list(hashes), block_ids, tenant=tenant, request_id=request_id)

    def load_finished(self, load_id: str, failed: Sequence[BlockName] = ()) -> None:
        """Unpin a load's rows. Drop blocks that no session has, and `failed` (unreadable) ones that no load reads."""
        rows = self._loading.pop(load_id, NO_ROWS)
        blocks = self.blocks
        groups, hashes = zip(*failed, strict=True) if failed else ((), ())
        bad = blocks.find(groups, hashes).tolist()  # -1 for a block without a row
        blocks.refer(blocks.holds, rows, +1)  # so that no row is freed before the end
        blocks.refer(blocks.pins, rows, -1)
        torn = self._torn and self._torn.intersection(rows[blocks.pins[rows] == 0].tolist())
        self._torn -= torn
        lost = rows[np.isin(rows, [*bad, *torn])] if bad or torn else NO_ROWS
        unused = blocks.unused(rows)
        unused = unused[(blocks.holds[unused] == 1) & ~np.isin(unused, lost)]
        self.drop(unused[blocks.is_droppable(unused)], DropCause.ABANDONED)
        if len(lost):
            self._lose(lost)
        if self.read is not None:
            self.read(rows[blocks.is_saved(rows)])
        blocks.refer(blocks.holds, rows, -1)

    def _lose(self, rows: Rows) -> None:
        """Drop compressed blocks that cannot be used. The caller holds the rows.

        Sessions without a running request are cut before such a block, unless the block can be stored again: it is
        resident and not decoded, or in the prompt of a running request.
        """
        blocks, used = self.blocks, rows[self.blocks.users[rows] > 0]
        self.drop(rows[blocks.is_droppable(rows)], DropCause.FAILED)
        for row in used.tolist():
            for session in self.points.lose(row, DropCause.FAILED):
                self._end_at_point(session)
            if blocks.group[row] != self.shape.session_group:
                continue
            is_asked = blocks.holds[row] > 1  # a request has the block in its prompt, too; the caller has one hold
            is_computed = is_asked or self._pool_marks(np.array([row], np.int32))[0] != Mark.DECODED
            depth = int(blocks.depth[row])
            for session in list(self.table.holders(row)):
                if is_computed:
                    self._save_later(session)
                elif not session.requests:
                    self.cut(session, depth, DropCause.ABANDONED)

    def loaded_marks(self, rows: Rows) -> NDArray[np.uint8]:
        """Return the mark for each of the pool's blocks into which one of these rows is loaded.

        With a shared tier all are DECODED, because another engine may have replaced a block by one of another codec.
        """
        if self._is_shared:
            return np.full(len(rows), Mark.DECODED, np.uint8)
        return np.where(self._is_whole(rows), self.blocks.mark[rows], np.uint8(Mark.DECODED))

    # -- stores ---------------------------------------------------------------------------------------

    def plan_stores(self, now: float, room: int, wanted: int) -> list[Store]:
        """Begin stores and return them. The pool's blocks are referenced until the driver gives them back.

        Args:
            room: most free blocks that these stores may reference. Up to 2 * MOST_HEADS heads may exceed it.
            wanted: number of blocks to save because memory is short; 0 for none.
        """
        for session_id in list(self.due.pop_until(now)):
            session = self.table.by_id[session_id]
            if session.stays_out:
                self._forget_overwritten(session, now)
            self._save_soon(session, now, is_pressed=False)
        plans = self._save_next_overwritten(room, wanted, now) if wanted > 0 else []
        room -= sum(len(plan.rows) for plan in plans)
        for session in list(self.saving):
            if room <= 0:
                break
            plans += (more := self._save(session, room, now))
            room -= sum(len(plan.rows) for plan in more)
        return plans

    def order_some(self) -> None:
        """Make the first call in `to_order`, and one more for each BEHIND calls that wait."""
        for _ in range(min(len(self.to_order), 1 + len(self.to_order) // BEHIND)):
            call, rows = self.to_order.popleft()
            rows = rows[self.blocks.is_saved(rows)]
            if call != self.pool.lead and self.points.is_needed:  # another group's block may have the row by now
                rows = rows[self.blocks.group[rows] == self.shape.session_group]
            edges = np.flatnonzero(np.diff(self.blocks.group[rows])) + 1
            for part in np.split(rows, edges)[::-1]:  # of several calls of `Pool.lead`, the last one's blocks are first
                if len(part):
                    call(self.pool_group(int(self.blocks.group[part[0]])), self.blocks.hashes(part))
            if call == self.pool.forget:
                self.runway.forget()

    def _forget_overwritten(self, session: Session, now: float) -> None:
        """At its first overwritten block, cut a session that stays out of the tiers. Set a time to check again."""
        rows, blocks = session.rows, self.blocks
        is_resident = np.array(self.pool.lookup(self.shape.main, blocks.hashes(rows))) >= 0
        is_stored = blocks.is_saved(rows) & (blocks.group[rows] != NO_GROUP)
        self.cut(session, first_false(is_resident | is_stored), DropCause.ABANDONED)
        if len(session.rows):
            self._put_off(session, now)

    def save_all(self, now: float) -> int:
        """Begin to save all idle sessions that may be saved and are not cold. Return the number being saved."""
        for session in list(self.table.by_id.values()):
            if not session.requests and not session.is_cold:
                self._save_soon(session, now, is_pressed=False)
        return len(self.saving)

    def _save_soon(self, session: Session, now: float, *, is_pressed: bool) -> None:
        """Have `plan_stores` save an idle session's blocks, in each call until the session is cold or put off."""
        if session.stays_out or session.is_cold or session in self.saving:
            return
        self.due.discard(session.session_id)
        if self.points.is_needed and not self._end_at_point(session, is_leaving=True):
            return
        self.saving[session], session.is_pressed = now, is_pressed

    def _stop_saving(self, session: Session) -> None:
        """Stop saving a session, and forget the time at which it was to be saved."""
        self.due.discard(session.session_id)
        if self.saving.pop(session, None) is not None:
            self.table.touch(session)

    def _save(self, session: Session, room: int, now: float) -> list[Store]:
        """Begin to store a session's blocks, the first ones first, because later blocks are worthless without them."""
        blocks, rows = self.blocks, session.rows
        if self.points.is_needed:  # the session may be too large even for empty tiers
            known = np.concatenate([rows, session.point_rows])
            taken = blocks.nbytes_of(known) + int(blocks.reserved[known].sum(dtype=np.int64))
            unsaved = int((blocks.status[rows] == 0).sum())
            if taken + unsaved * self.shape.groups[self.shape.main].bounds[0] > self.budget_nbytes:
                self.cut(session, 0, DropCause.BUDGET)
                return []
        needed = rows[blocks.status[rows] == 0][:room]
        makes_room = session.is_pinned or (session.is_pressed and not self._is_exclusive)
        plans, taken, is_gone = self._begin(needed, session, is_pressed=makes_room)
        if is_gone:  # blocks behind a lost block are worthless
            if lost := self.pool.lookup(self.shape.main, blocks.hashes(needed)).count(-1):
                self.events(events.Overwritten(lost))
            self.cut(session, int(blocks.depth[needed[taken]]), DropCause.ABANDONED)
        elif taken < len(needed):
            if not session.refusals:  # while tiers are full, the pool spares the session's saved blocks, too
                self.to_order += ((self.pool.forget, part) for part in reversed(split(rows)))
            self._put_off(session, now)
            return plans
        if session in self.saving and self.table.by_id.get(session.session_id) is session:
            plans += self._replace_heads(session)
            self._check_cold(session, now)
        return plans

    def _put_off(self, session: Session, now: float, is_refused: bool = True) -> None:
        """Save or check a session later. is_refused: True to double the wait, as after a failure or without room."""
        self._stop_saving(session)
        session.refusals = min(session.refusals + is_refused, DOUBLINGS)
        if not session.requests:
            self.due.set(session.session_id, now + self.idle_after_s * 2**session.refusals)

    def _save_next_overwritten(self, room: int, wanted: int, now: float) -> list[Store]:
        """Begin to store the unsaved blocks that the pool overwrites next, and have their idle sessions saved.

        Blocks that no session needs, such as states in the middle of a prompt, are never saved. The pool overwrites
        them next. Whole sessions are not saved if resume points are needed, or exclusive tiers are full. An idle
        session for which no room can be made is worth less than all sessions in the tiers. It is cut before its first
        block without room, and the pool may overwrite its further blocks.
        """
        main, unsaved = self.shape.main, dict[int, dict[bytes, None]]()
        for each in self.pool.unsaved(wanted + self.runway.ahead) if self.shape.stores_main else ():
            unsaved.setdefault(each.group, {})[each.block_hash] = None  # a block may have copies
        found = {group: self.blocks.find(group, list(hashes)) for group, hashes in unsaved.items()}
        for group, rows in found.items():
            self.pool.give_up(group, list(compress(unsaved[group], (rows < 0).tolist())))
        rows = found.get(main, np.empty(0, np.int32))
        rows = rows[rows >= 0]
        saved = rows[self.blocks.is_saved(rows)][:wanted]
        self.pool.keep(main, self.blocks.hashes(saved))
        most = min(room, wanted - len(saved))
        if most <= 0:
            return []
        rows = rows[(self.blocks.status[rows] == 0) & (self.blocks.users[rows] > 0)]
        plans: list[Store] = []
        for number in dict.fromkeys(self._origins(rows).tolist()):
            session = self.table.by_number.get(number)
            if session is None or session.stays_out or session.refused_until > now:
                continue
            own = np.sort(self.blocks.depth[rows[self.blocks.origin[rows] == number]])[: max(0, most)]
            own = session.rows[own[own < len(session.rows)]]
            if not session.requests:
                session.is_pressed = True
                has_room = not self._is_exclusive or self.free_nbytes >= self.shape.cold_nbytes
                if has_room and not self.points.is_needed:
                    self._save_soon(session, now, is_pressed=True)
            if len(own):
                begun = self._begin(own, session, is_pressed=True)
                plans += begun.plans
                most -= begun.taken
                if begun.taken < len(own) and not begun.is_gone and not session.requests:
                    depth = int(self.blocks.depth[own[begun.taken]])
                    self.cut(session, depth, DropCause.BUDGET, rest=self.pool.give_up)
            if most <= 0:
                break
        return plans

    def _origins(self, rows: Rows) -> NDArray[np.int32]:
        """Return for each row `Session.number` of a session that has the block; 0 for none."""
        for row in rows[self.blocks.origin[rows] == 0].tolist():
            if not self.blocks.origin[row]:
                for session in islice(self.table.holders(row), 1):
                    self.blocks.change_origin(session.rows, 0, session.number)
        return self.blocks.origin[rows]

    def save_running(self, request: Request, most: int, now: float) -> list[Store]:
        """Begin to store up to `most` of the computed blocks of a running request's prompt. Return the stores.

        Called when memory is short, because the blocks would be overwritten soon after the request's end.
        """
        rows, session = request.rows[: request.computed], request.session
        needed = rows[self.blocks.status[rows] == 0][:most]
        if self.points.is_needed or session.stays_out or session.refused_until > now:
            return []
        return self._begin(needed, session, is_pressed=not self._is_exclusive).plans

    def _begin(self, rows: Rows, session: Session, *, is_pressed: bool, exact: ArrayLike | None = None) -> StoresBegun:
        """Begin to store blocks, up to the first that the pool lacks or has decoded, or that finds no room.

        Args:
            rows: rows of the blocks, of one group. The first get room first.
            is_pressed: True to drop blocks of less worth as if memory were short. Exclusive tiers drop only then.
            exact: number of first tokens of each block to store exact; None for the numbers of `_exact_tokens`.
        """
        if not len(rows):
            return StoresBegun([], 0)
        group = int(self.blocks.group[rows[0]])
        shape = self.shape.groups[group]
        is_full = not is_pressed and self._is_exclusive and self.free_nbytes < min(shape.bounds.values())
        hashes = self.blocks.hashes(rows[:1] if is_full else rows)
        ids = self.pool.lookup(group, hashes)
        marks = np.array([self.pool.marks[at] if at >= 0 else Mark.DECODED for at in ids], np.uint8)
        length = first_false(marks != Mark.DECODED)
        is_gone = length < len(rows)
        if not length or is_full:
            return StoresBegun([], 0, not length)  # the first block cannot be stored, or no block fits
        rows, marks = rows[:length], marks[:length]
        counts = self._exact_tokens(rows, marks, group, session.tenant) if exact is None else np.resize(exact, length)
        bounds = np.array([shape.bounds[tokens] for tokens in counts.tolist()], np.int64)
        needed, before = rows, self.blocks.saved_nbytes
        self.blocks.refer(self.blocks.holds, needed, +1)
        fits = self._make_room(bounds, session, is_pressed)
        if self.blocks.saved_nbytes < before:  # making room may have released some of the pool's blocks, too
            fits = first_false(np.array(self.pool.lookup(group, hashes[:fits])) >= 0)
        self.pool.hold(ids[:fits])
        is_gone = is_gone and fits == length
        rows, marks, counts = rows[:fits], marks[:fits], counts[:fits]
        replaces = self.blocks.is_saved(rows)
        self.blocks.reserve(rows, bounds[:fits], session.tenant)
        self.blocks.refer(self.blocks.holds, needed, -1)
        if not fits:
            return StoresBegun([], 0, is_gone)
        self.events(events.EncodingBegins([MARKS[mark] for mark in marks.tolist()]))
        whole = counts == shape.tokens
        breaks = np.zeros(fits, np.int32)
        breaks[1:] = (counts[1:] > 0) & ~whole[:-1]
        plans = []
        for part in runs(rows, (marks, np.cumsum(breaks)), self.blocks.depth[rows], JOB_BLOCKS):
            first, kept = int(self.blocks.depth[rows[part.start]]) * shape.tokens, int(counts[part].sum())
            end, mark = first + kept if kept else 0, Mark(int(marks[part.start]))
            job_id, block_ids, tenant = next(self.job_ids), np.array(ids[part], np.int32), session.tenant
            transfer = Transfer(job_id, "store", group, hashes[part], block_ids, first, end, shape.codec, mark, tenant)
            plans.append(Store(transfer, rows[part], counts[part].astype(np.uint16), replaces[part]))
        return StoresBegun(plans, fits, is_gone)

    def sink_tokens(self, rows: Rows, group: int) -> NDArray[np.int64]:
        """Return how many of each block's tokens are among the session's first tokens, which are stored exact."""
        tokens = self.shape.groups[group].tokens
        return np.clip(self._sink - self.blocks.depth[rows].astype(np.int64) * tokens, 0, tokens)

    def _exact_tokens(self, rows: Rows, marks: NDArray[np.uint8], group: int, tenant: str) -> NDArray[np.int64]:
        """Return the number of each block's first tokens to store exact.

        Shared heads with exact KV in the pool are exact as a whole, if the heads' share of the budget allows.
        """
        shape, counts = self.shape.groups[group], self.sink_tokens(rows, group)
        if counts.any():
            counts[~np.isin(counts, list(shape.bounds))] = 0  # a recurrent state has no tokens to keep exact
        if group == self.shape.session_group and shape.tokens in shape.bounds and self.shares.heads:
            shared = first_false((self.blocks.users[rows] > 1) & (marks == Mark.EXACT))
            if shared:
                room = self._heads_left(tenant) // shape.bounds[shape.tokens]
                head = rows[: min(shared, int(max(0, room)))]
                counts[: len(head)] = shape.tokens
                self._heads.update(head.tolist())
        return counts

    def stored(self, store: Store, nbytes: Mapping[int, int], now: float, inner: Mapping[int, Sequence[int]]) -> None:
        """Note which of a store's blocks every rank has stored.

        nbytes: by index in the store of each such block, the bytes that the block takes of the budget. inner: by index
        in the store, see `TransferResult.inner`; bytes of all ranks together.
        """
        blocks, transfer = self.blocks, store.transfer
        good = np.array(sorted(nbytes), np.int64)
        dropped = store.replaces[good] & ~blocks.is_saved(store.rows[good])
        if dropped.any():  # the older block was dropped meanwhile, and perhaps the new one with it
            self.store_failed(store, good[dropped].tolist(), now, is_refused=False)
            good = good[~dropped]
        rows = store.rows[good]
        for row in rows[blocks.is_saved(rows)][:1].tolist():  # sessions that share one of the blocks share the first
            for session in self.table.holders(row):
                self.table.touch(session)
        sizes, parts = [nbytes[at] for at in good.tolist()], [inner.get(at, ()) for at in good.tolist()]
        mark = Mark.DERIVED if self._is_shared else transfer.mark  # another engine may replace a shared tier's block
        blocks.save(rows, sizes, store.exact[good], mark, None, *self.levels_of(rows, parts))
        self.announce(rows, store.answers.seconds / len(store.rows))
        if self.points.is_needed:
            self.points.stored(rows.tolist())
        for number in np.unique(blocks.origin[rows]).tolist():
            if (user := self.table.by_number.get(number)) is not None:
                self.table.touch(user)
                self.table.enter_order_again(user)
                self.table.enter_refined(user)
                own = rows[blocks.origin[rows] == number]
                user.stored += len(own)
                user.stored_nbytes += blocks.nbytes_of(own)
                if user.state is SessionState.IDLE and not user.stays_out and user not in self.saving:
                    self._check_cold(user, now)
        self._drop_unneeded(rows)
        for session in list(self.saving):
            self._check_cold(session, now)

    def levels_of(self, rows: Rows, parts: Sequence[Sequence[int]]) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        """Return the values for columns `level` and `inner` of rows. parts: for each row, `inner`; empty if unknown."""
        level, inner = np.zeros(len(rows), np.uint8), np.zeros((len(rows), MOST_INNER), np.uint32)
        for number, group in self.shape.groups.items():
            level[self.blocks.group[rows] == number] = group.level
        for at, sizes in enumerate(parts):
            if sizes:
                level[at] = len(sizes)
                inner[at, : len(sizes)] = sizes[:MOST_INNER]
        return level, inner

    def announce(self, rows: Rows, seconds: float | None = None) -> None:
        """Report saved rows to subscribers and the pool. seconds: see `BlocksSaved`."""
        blocks = self.blocks
        groups = blocks.group[rows]
        for part in runs(rows, (groups,), blocks.depth[rows], len(rows)):
            group, hashes = int(groups[part.start]), blocks.hashes(rows[part])
            self.events(events.BlocksSaved(group, hashes, int(blocks.depth[rows[part.start]]), seconds))
            self.pool.keep(group, hashes[::-1])

    def store_failed(
        self, store: Store, failed: Sequence[int], now: float, is_refused: bool, torn: Sequence[int] = ()
    ) -> None:
        """Note blocks that some rank has not stored. failed: their indices in the store. is_refused: see `_put_off`.

        torn: those of `failed` that some ranks may have stored and others not. An older block is then dropped.
        """
        blocks, rows, torn_rows = self.blocks, store.rows[list(failed)], store.rows[list(torn)]
        is_first = (blocks.status[rows] & STORING) == blocks.status[rows]  # without an older compressed block
        gone = rows[is_first | store.is_void]
        if len(gone):  # some rank may have stored a part
            cause = DropCause.RESET if store.is_void else DropCause.NOT_STORED
            self.events(events.BlocksDropped(store.transfer.group, blocks.hashes(gone), cause))
        users = {session: None for session in self.saving if np.isin(session.rows, rows).any()}
        users |= {one.session: None for one in self.requests.values() if np.isin(one.rows, rows).any()}
        for number in np.unique(blocks.origin[rows]).tolist():
            if (session := self.table.by_number.get(number)) is not None:
                users[session] = None
        points = [session for row in rows.tolist() for session in self.points.lose(row, DropCause.FAILED)]
        blocks.refer(blocks.holds, rows, +1)
        blocks.unreserve(rows)
        for session in points:
            self._end_at_point(session)
        torn_rows = torn_rows[blocks.is_saved(torn_rows)]
        self._torn.update(torn_rows[blocks.pins[torn_rows] > 0].tolist())
        self._lose(torn_rows[blocks.pins[torn_rows] == 0])
        blocks.refer(blocks.holds, rows, -1)
        for session in users:
            if self.table.by_id.get(session.session_id) is not session:
                continue  # it has lost all blocks with the torn ones
            self._put_off(session, now, is_refused)
            session.refused_until = now + self.idle_after_s * 2**session.refusals

    def store_is_back(self) -> None:
        """Have refused sessions without a running request saved after the usual wait: the tier answers again."""
        for session in self.table.by_id.values():
            if session.refusals and not session.requests:
                session.refusals, session.refused_until = 0, 0.0
                self.due.set(session.session_id, session.last_used + self.idle_after_s)

    def _check_cold(self, session: Session, now: float) -> None:
        """Make a session cold if all its blocks are saved."""
        blocks, rows = self.blocks, session.rows
        if not len(rows) or not blocks.is_saved(rows).all():
            return
        began = self.saving.get(session, now)
        self._stop_saving(session)
        self.table.set_cold(session, True)
        self.table.enter_order_again(session)
        session.refusals = 0
        if self.points.is_needed:
            if not self._end_at_point(session):
                return
            self.points.tidy(session)
        rows = session.rows
        if self.pool.lookup(self.shape.main, blocks.hashes(rows[:1])) != [-1]:
            self.to_order += ((self.pool.keep, part) for part in split(rows[::-1]))  # the tail is overwritten first
        point_rows = session.point_rows
        pool_nbytes = sum(self.shape.groups[group].pool_nbytes for group in blocks.group[point_rows].tolist())
        self.events(
            events.Evicted(
                session.session_id,
                blocks=len(rows),
                at_points=len(point_rows),
                tokens=len(rows) * self.shape.block_tokens,
                pool_nbytes=len(rows) * self.shape.pool_nbytes + pool_nbytes,
                stored=session.stored,
                stored_nbytes=session.stored_nbytes,
                cold_nbytes=blocks.nbytes_of(rows) + blocks.nbytes_of(point_rows),
                exact=int((blocks.exact[rows] > 0).sum()),
                idle_s=began - session.last_used,
                took_s=now - began,
                is_pressed=session.is_pressed,
            )
        )
        session.stored = session.stored_nbytes = 0

    def lead_overwritten(self, most: int) -> None:
        """Have the pool overwrite at most `most` saved blocks of cold sessions next, in the policy's order of sessions.

        Of each session, blocks of its resume points are overwritten first, then its other blocks, the last first.
        Blocks that sessions share are overwritten after all others.
        """
        if not self.shape.stores_main:
            return
        chosen, rows, count = [], list[Rows](), 0
        for session in islice(self.table.victims(self.table.resident), LOOKED_AT):
            if count >= most:
                break
            if not session.is_cold:  # with a full tier, many sessions may wait to be saved
                continue
            ids = self.pool.lookup(self.shape.main, self.blocks.hashes(session.rows[::STRIDE]))
            depth = min(STRIDE * (len(ids) - ids.count(-1)), len(session.rows))  # sessions lose their last blocks first
            if not depth:
                self.table.resident.leave(session.session_id)
            else:
                chosen.append((session.number, depth))
                rows += [point.rows for point in session.points if len(point.sessions) == 1]
                rows.append(session.rows[:depth][::-1])
                count += depth
        if chosen != self._led:
            self._led = chosen
            own = np.concatenate([NO_ROWS, *rows])[:most]
            is_shared = self.blocks.users[own] > 1
            if is_shared.any():
                shared = np.unique(own[is_shared])
                shared = shared[np.argsort(-self.blocks.depth[shared], kind="stable")]
                own = np.concatenate([own[~is_shared], shared])
            self.to_order += ((self.pool.lead, part) for part in reversed(split(own)))

    # -- heads common to sessions ---------------------------------------------------------------------

    def _replace_heads(self, session: Session) -> list[Store]:
        """Begin to store again, exact, a session's lossy heads of which the pool has exact KV. Return the stores.

        At most MOST_HEADS of these heads are stored again each time that the session is saved. Exact heads have a share
        of the budget. If it is full, exact heads that fewer sessions share are stored again, lossy, to make room.
        """
        blocks, rows, shape = self.blocks, session.rows, self.shape.groups[self.shape.main]
        if not self.shape.stores_main or shape.tokens not in shape.bounds or not self.shares.heads:
            return []
        shared = rows[: first_false(blocks.users[rows] > 1)]
        lossy = shared[(blocks.status[shared] == SAVED) & (blocks.pins[shared] == 0)]
        lossy = lossy[(blocks.exact[lossy] < shape.tokens) & (blocks.level[lossy] < LOSSLESS)]
        lossy = lossy[blocks.tenant[lossy] == blocks.tenant_number(session.tenant)][:MOST_HEADS]
        if not len(lossy):
            return []
        lossy = lossy[: first_false(self._pool_marks(lossy) == Mark.EXACT)]
        bound = shape.bounds[shape.tokens]
        fits = min(self.free_nbytes, self.left_to(session.tenant)) // bound
        room = int(self._heads_left(session.tenant) // bound)
        chosen = lossy[: max(0, min(fits, room))]
        plans = self._begin(chosen, session, is_pressed=False, exact=shape.tokens).plans if len(chosen) else []
        self._heads.update(row for plan in plans for row in plan.rows.tolist())
        if len(chosen) < len(lossy) and room < fits:
            plans += self._demote(int(blocks.users[lossy[len(chosen)]]), bound, session)
        return plans

    def _demote(self, users: int, needed: int, session: Session) -> list[Store]:
        """Begin to store again, lossy, a tenant's exact heads of fewer than `users` sessions: about `needed` bytes."""
        blocks, main, rows = self.blocks, self.shape.main, np.array(list(self._heads), np.int32)
        can_shrink = (blocks.users[rows] < users) & (blocks.status[rows] == SAVED) & (blocks.pins[rows] == 0)
        can_shrink &= (blocks.tenant[rows] == blocks.tenant_number(session.tenant)) & (blocks.group[rows] == main)
        rows = rows[can_shrink & (self.sink_tokens(rows, main) < self.shape.block_tokens)]
        rows = rows[np.lexsort((-blocks.depth[rows], blocks.users[rows]))]
        rows = rows[self._pool_marks(rows) == Mark.EXACT][:MOST_HEADS] if len(rows) else rows
        rows = rows[: int(np.searchsorted(np.cumsum(blocks.nbytes[rows].astype(np.int64)), needed)) + 1]
        self._heads.difference_update(rows.tolist())
        return self._begin(rows, session, is_pressed=False, exact=self.sink_tokens(rows, main)).plans

    def _heads_left(self, tenant: str) -> float:
        """Return free bytes of the heads' share of the budget; at most the free bytes of the tenant's part of it."""
        blocks, budget = self.blocks, self.shares.heads * self.budget_nbytes
        rows = np.array(sorted(self._heads), np.int32)
        is_exact = (blocks.status[rows] > 0) & (blocks.exact[rows] >= self.shape.block_tokens)
        rows = rows[is_exact | (blocks.status[rows] & STORING > 0)]
        self._heads = set(rows.tolist())
        nbytes = blocks.nbytes[rows].astype(np.int64) + blocks.reserved[rows]
        left: float = budget - nbytes.sum()
        if (part := self.shares.of_tenant(tenant)) < 1:
            left = min(left, part * budget - nbytes[blocks.tenant[rows] == blocks.tenant_number(tenant)].sum())
        return left

    def _pool_marks(self, rows: Rows) -> NDArray[np.uint8]:
        """Return the marks of the pool's blocks for rows of one group; DECODED for an absent block."""
        ids = self.pool.lookup(self.pool_group(int(self.blocks.group[rows[0]])), self.blocks.hashes(rows))
        return np.array([self.pool.marks[at] if at >= 0 else Mark.DECODED for at in ids], np.uint8)

    def pool_group(self, group: int) -> int:
        """Return the KV cache group of a row's block in the pool. group: value of the row's column `group`."""
        return self.shape.main if group == NO_GROUP else group

    # -- the budget -----------------------------------------------------------------------------------

    @property
    def free_nbytes(self) -> int:
        """Bytes of the budget that are neither taken nor reserved."""
        return self.budget_nbytes - self.blocks.taken_nbytes

    def left_to(self, tenant: str) -> int:
        """Return the bytes left of a tenant's share of the budget; the whole budget for a tenant without a quota."""
        share = self.shares.of_tenant(tenant)
        used = self.blocks.taken_by(tenant) if share < 1 else 0
        return int(share * self.budget_nbytes) - used

    def _make_room(self, bounds: NDArray[np.int64], session: Session, is_pressed: bool) -> int:
        """Trim compressed blocks, then drop some, until new blocks fit.

        Dropping stops at `session` in the policy's order. Trimming does not stop there: it may cut refinements of any
        session without a running request.

        Return the number of new blocks, from the first on, that fit together. Only the tenant's own blocks make room in
        a full share of the session's tenant. bounds: most bytes of each new block. is_pressed: see `_begin`.
        """
        total = np.cumsum(bounds)
        wanted, tenant = int(total[-1]), session.tenant
        self.table.enter_order_again(session)  # so that `_drop_until` ends at the session
        may_drop = is_pressed or not self._is_exclusive
        if self.shares.of_tenant(tenant) < 1:
            if may_drop:
                self._trim_until(lambda: wanted - self.left_to(tenant), tenant)
                self._drop_until(lambda: wanted - self.left_to(tenant), session, tenant, is_pressed=is_pressed)
            wanted = max(0, min(wanted, self.left_to(tenant)))
        if self._is_exclusive and wanted > self.free_nbytes and is_pressed:
            self._drop_redundant(wanted - self.free_nbytes)
        if may_drop:
            self._trim_until(lambda: wanted - self.free_nbytes)
            self._drop_until(lambda: wanted - self.free_nbytes, session, is_pressed=is_pressed)
        return int(np.searchsorted(total, min(wanted, self.free_nbytes), side="right"))

    def _trim_until(self, short: Callable[[], int], tenant: str | None = None) -> None:
        """Cut refinements of a tenant's sessions, or of all for None, until `short()`, the missing bytes, is 0 or less.

        Cut first the level whose loss costs least: added divergence, times the chance that a block is read, for each
        byte freed. At a level, sessions are cut in the policy's order. The chance is estimated as n ** -0.5, where n is
        the number of blocks with at least this level. About n blocks are likelier to be read than the next block cut.
        """
        levels, victims = self.shape.levels, dict[int, Iterator[Session]]()
        for level in range(1, len(levels)):
            if self.blocks.refined(level):
                victims[level] = self.table.victims(self.table.orders[tenant, level])

        def worth(level: int) -> float:
            coarse, fine = levels[level - 1], levels[level]
            divergence = max(coarse.divergence - fine.divergence, 1e-9)
            chance: float = self.blocks.refined(level) ** -0.5
            return (1 / fine.ratio - 1 / coarse.ratio) / (divergence * chance)

        while short() > 0 and victims:
            level = max(victims, key=worth)
            victim = next(victims[level], None)
            if victim is None:
                del victims[level]
            elif not victim.requests:
                self._trim(victim, level, short())
                victims = {each: some for each, some in victims.items() if self.blocks.refined(each)}

    def _trim(self, victim: Session, level: int, short: int) -> None:
        """Cut blocks that only `victim` has, the last first, to `level` - 1 refinements, to free `short` bytes."""
        blocks, rows = self.blocks, victim.rows[victim.kept :]
        if not victim.kept:
            own_points = [point.rows for point in victim.points if len(point.sessions) == 1]
            rows = np.concatenate([*own_points, rows])
        freed = blocks.nbytes[rows].astype(np.int64) - blocks.inner[rows, level - 1]
        own = (blocks.users[rows] == 1) & (blocks.pins[rows] == 0) & (blocks.status[rows] == SAVED)
        own &= (blocks.inner[rows, level - 1] > 0) & (freed > 0)
        rows, freed = rows[own][::-1], np.cumsum(freed[own][::-1])
        cut = rows[: int(np.searchsorted(freed, short)) + 1]
        if len(cut) == len(rows):
            self.table.leave_refined(victim, level)
        for group in np.unique(blocks.group[cut]).tolist():
            of_group = cut[blocks.group[cut] == group]
            self.events(events.BlocksTrimmed(group, blocks.hashes(of_group), level - 1))
            blocks.trim(of_group, level - 1)
            self.table.touch(victim)
        self.points.recount(victim)

    def _drop_until(
        self, short: Callable[[], int], session: Session, tenant: str | None = None, *, is_pressed: bool = False
    ) -> None:
        """Drop blocks of a tenant's sessions, or of all for None, until `short()`, the missing bytes, is 0 or less.

        Victims are taken in the policy's order. Stop at `session`, which needs the room.
        """
        while short() > 0:
            while self._heirs:  # entered here, because no session may enter during the next loop
                heir, _ = self._heirs.popitem()
                self._heads_only.pop(heir, None)
                self.table.enter_order_again(heir)
            for victim in self.table.victims(self.table.orders[tenant, 0]):
                if victim is session or self._heirs or short() <= 0:
                    break
                if not victim.requests:
                    self._drop_tail(victim, short(), is_pressed)
            if not self._heirs:
                return

    def _drop_tail(self, victim: Session, short: int, is_pressed: bool) -> None:
        """Drop compressed blocks from the end of a session, to free `short` bytes or all that the session can.

        The session is cut before the dropped blocks, with one exception. If memory is not short (not `is_pressed`), a
        session that is not cold is not cut before blocks that are resident and not decoded, because these can be stored
        again. If memory is short, it is cut before these, too: they would soon be stored again.
        First blocks that relatives share are dropped after the last blocks of all these relatives.
        """
        before = self.free_nbytes
        self.points.leave_spare(victim, DropCause.BUDGET)
        short -= self.free_nbytes - before
        if short <= 0:
            return
        blocks, rows, was_cold = self.blocks, victim.rows, victim.is_cold
        pinned = np.nonzero(blocks.pins[rows] > 0)[0]
        floor = int(pinned[-1]) + 1 if len(pinned) else 0
        own = (blocks.users[rows] == 1) & blocks.is_droppable(rows) & (blocks.nbytes[rows] > 0)
        own[: victim.kept] = False
        if kept := max(victim.kept, self._family_head(victim)):
            floor = max(floor, kept)
            if not own[floor:].any():
                if not own.any() and floor == kept:
                    self.table.leave_order(victim)
                    self._heads_only[victim] = None
                    if was_cold:  # else the session enters the order again when more of its blocks are saved
                        self.cut(victim, floor, DropCause.BUDGET)
                return
        freed = np.cumsum(np.where(own, blocks.nbytes[rows], 0)[floor:][::-1].astype(np.int64))
        length = len(rows) - min(int(np.searchsorted(freed, short)) + 1, len(freed))
        gone, end = rows[length:][own[length:]], len(rows)
        if not was_cold and (not len(freed) or freed[-1] < short):
            self.points.cut(victim, 0, DropCause.BUDGET)
            if not own.any() and victim.session_id in self.due:  # all its saved blocks are shared, pinned or kept
                self.table.leave_order(victim)
                self._heirs |= dict.fromkeys(one for one in self.table.relatives(victim) if one.is_cold)
                return
        if was_cold:
            end = length
        elif is_pressed and len(gone):
            end = int(blocks.depth[gone[0]])
        elif len(gone):
            resident = gone[: first_false(self._pool_marks(gone) != Mark.DECODED)]
            gone = gone[len(resident) :]
            end = int(blocks.depth[gone[0]]) if len(gone) else end
            self._tell_lost(victim, resident, DropCause.REDUNDANT, len(rows))
            self.drop(resident, DropCause.REDUNDANT)
            self._save_later(victim)
        if end == 0 or not blocks.status[rows[:end]].any() or (end == kept and not own[:end].any()):
            self.table.leave_order(victim, evicted=was_cold and end == 0)
            if end and kept:
                self._heads_only[victim] = None
        if end < len(rows):
            self.cut(victim, end, DropCause.BUDGET, rest=self.pool.give_up if is_pressed else None)

    def _family_head(self, session: Session) -> int:
        """Return the number of a session's first blocks that a relative shares and still needs.

        Such a relative is pinned, has first blocks that hints keep, or is in the policy's order. Its running requests'
        prompts count, too.
        """
        shared = 0
        for one in self.table.relatives(session):
            if one.is_pinned or one.kept or one.session_id in self.table.order:
                asked = (self.requests[each].rows for each in one.requests if each in self.requests)
                shared = max(shared, *(common_prefix(session.rows, rows) for rows in (one.rows, *asked)))
        return shared

    def _own_hashes(self, rows: Rows) -> list[bytes]:
        """Return the hashes of a session's rows, without rows that another session or a running request has."""
        return self.blocks.hashes(rows[(self.blocks.users[rows] == 1) & (self.blocks.holds[rows] == 0)])

    def _save_later(self, session: Session) -> None:
        """Note that a session has lost compressed blocks that can be stored again. Have an idle session saved later."""
        self.table.set_cold(session, False)
        if not session.requests:
            self.due.set(session.session_id, session.last_used + self.idle_after_s)

    def _drop_redundant(self, short: int) -> None:
        """Drop compressed copies of resident blocks that were not decoded, to free `short` bytes.

        Begin with the blocks that the pool overwrites last. Leave shared blocks, and sessions that are pinned or kept.
        """
        blocks, main = self.blocks, self.shape.main
        names = (each.block_hash for each in self.pool.redundant(self.runway.ahead) if each.group == main)
        while short > 0 and (some := list(dict.fromkeys(islice(names, JOB_BLOCKS)))):
            rows = blocks.find(main, some)
            rows = rows[rows >= 0]
            rows = rows[(blocks.users[rows] == 1) & (blocks.status[rows] == SAVED) & (blocks.pins[rows] == 0)]
            users = {number: self.table.by_number.get(number) for number in blocks.origin[rows].tolist()}
            free = [number for number, one in users.items() if one is not None and not (one.is_pinned or one.kept)]
            rows = rows[np.isin(blocks.origin[rows], free)]
            freed = np.cumsum(blocks.nbytes[rows].astype(np.int64))
            rows = rows[: int(np.searchsorted(freed, short)) + 1]
            short -= blocks.nbytes_of(rows)
            for number in np.unique(blocks.origin[rows]).tolist():
                self._save_later(self.table.by_number[number])
            self.drop(rows, DropCause.REDUNDANT)

    # -- dropping -------------------------------------------------------------------------------------

    def cut(
        self,
        session: Session,
        length: int,
        cause: DropCause,
        rest: Callable[[int, Sequence[bytes]], None] | None = None,
    ) -> None:
        """Shorten a session to the first `length` blocks; if cold or being saved, to the deepest resume point in these.

        Blocks behind that no other session uses are dropped from the tiers, and released from the pool if decoded.
        rest: `Pool.give_up` or `Pool.release`, called for resident blocks that nothing else uses; None for no call.
        """
        blocks, own = self.blocks, self._own_hashes(session.rows[length:]) if rest else []
        if session.is_cold or session in self.saving:
            length = self.points.deepest(session, length)
        cut = session.rows[length:]
        if not len(cut) and length:
            return
        is_saved = blocks.is_saved(cut)
        self._tell_lost(session, cut[is_saved], cause, length)
        if rest and cause is DropCause.BUDGET and not is_saved.all():
            self.events(events.GivenUp(session.session_id, int((~is_saved).sum())))
        heirs = [one for one in self.table.relatives(session) if common_prefix(one.rows, session.rows) > length]
        self.points.cut(session, length, cause)
        last = cut[blocks.users[cut] == 1]
        if len(last) and self.pool.marks:  # the pool overwrites blocks with decoded KV next
            decoded = last[self._pool_marks(last) == Mark.DECODED]
            self.pool.release(self.shape.main, blocks.hashes(decoded))
        dropped = last[blocks.is_droppable(last)]
        self.table.truncate(session, length)  # frees no saved row: `drop` does
        self.drop(dropped, cause)
        single = cut[blocks.users[cut] == 1]
        heirs += [one for one in self._heads_only if len(single) and np.isin(single, one.rows).any()]
        self._heirs |= dict.fromkeys(heirs)
        if not len(session.rows):
            self._stop_saving(session)
            self._heirs.pop(session, None)
            self._heads_only.pop(session, None)
            self.said.forget(session)
        if rest:
            rest(self.shape.main, own)

    def _end_at_point(self, session: Session, is_leaving: bool = False) -> int:
        """Cut a session that is cold or `is_leaving` (soon saved) at its deepest resume point. Return its length."""
        length = self.points.deepest(session, len(session.rows))
        if length < len(session.rows) and (session.is_cold or is_leaving):
            self.cut(session, length, DropCause.ABANDONED)
        return len(session.rows)

    def _tell_lost(self, session: Session, rows: Rows, cause: DropCause, left: int) -> None:
        if len(rows) and self.shape.stores_main:
            self.events(events.Lost(session.session_id, len(rows), self.blocks.nbytes_of(rows), cause, left))

    def drop(self, rows: Rows, cause: DropCause) -> None:
        """Drop the compressed blocks of rows, all saved and not pinned."""
        if not len(rows):
            return
        for number in np.unique(self.blocks.group[rows]).tolist():
            of_group = rows[self.blocks.group[rows] == number]
            if number != NO_GROUP:
                hashes = self.blocks.hashes(of_group)
                self.events(events.BlocksDropped(number, hashes, cause))
                self.pool.forget(number, hashes)
                self.runway.forget()
            self.blocks.drop(of_group)

    def _drop_unneeded(self, rows: Rows) -> None:
        """Drop the compressed blocks of rows that no session and no running request has."""
        unneeded = self.blocks.unused(rows)
        if len(unneeded):
            unneeded = unneeded[(self.blocks.holds[unneeded] == 0) & self.blocks.is_droppable(unneeded)]
            self.drop(unneeded, DropCause.ABANDONED)

    def forget_session(self, session: Session, cause: DropCause) -> None:
        """Drop all of a session: its blocks that nothing else uses, compressed and resident, and its id and name."""
        self.table.forget_tip(session)
        self.cut(session, 0, cause, rest=self.pool.release)

    def reset(self) -> None:
        """Take all blocks from sessions, and drop all saved KV. The driver later ends stores by `store_failed`."""
        for load_id in list(self._loading):
            self.load_finished(load_id)
        for session in list(self.table.by_id.values()):
            self.cut(session, 0, DropCause.RESET)
        rows = self.blocks.rows()  # the rest are rows of running requests
        self.drop(rows[self.blocks.is_droppable(rows)], DropCause.RESET)
        if self.table.changed is not None:
            self.table.changed = {}

    def forget_resident(self, now: float) -> None:
        """Note that the pool has lost all KV. Cut each session at its deepest resume point before an unsaved block."""
        for session in list(self.table.by_id.values()):
            self._stop_saving(session)
            saved = self.blocks.saved_prefix(session.rows)
            if saved < len(session.rows):
                self.cut(session, self.points.deepest(session, saved), DropCause.ABANDONED)
            if len(session.rows) and not session.requests and not session.is_cold:
                self._save_soon(session, now, is_pressed=False)
                self._check_cold(session, now)

    # -- orders and questions -------------------------------------------------------------------------

    def steer(self, what: str, session: Session, now: float, seconds: float | None = None, tool: str = "") -> str:
        """Obey an operator's order for a session. Return the reason for a refusal, in a sentence; empty for none.

        Args:
            what: "evict", "expect", "pin", "unpin" or "release".
            seconds: for "pin", seconds from `now` until the pin ends, None for no end; for "expect", seconds until the
                client returns, None if only the tool is known.
            tool: for "expect", the tool that the client waits for; empty for none.
        """
        if session.requests and what in AFTERWARDS:
            return f"a request of it runs; it can {AFTERWARDS[what]} when that has ended"
        match what:
            case "evict" if session.stays_out:
                return "its client said that nothing of it is to be stored"
            case "evict" if not session.is_cold:
                self._save_soon(session, now, is_pressed=False)
            case "expect":
                self.said.await_return(session, seconds, tool, session.last_used if seconds is None else now)
                self.table.touch(session)
                if session.session_id in self.table.order:
                    self.table.enter_order(session)
            case "pin":
                return self.said.pin(session, None if seconds is None else now + seconds)
            case "unpin":
                self.said.unpin(session)
            case "release":
                self.forget_session(session, DropCause.RELEASED)
        return ""

    def usage(self) -> Usage:
        """Return counts of sessions and blocks, and the tiers' bytes, as of now."""
        blocks, groups = self.blocks, self.shape.groups
        saved = {group: count for group, count in blocks.saved_blocks.items() if group != NO_GROUP}
        return Usage(
            {state: self.table.states[state] for state in SessionState},
            len(self.points.standing),
            len(blocks) - sum(blocks.saved_blocks.values()),
            sum(saved.values()),
            blocks.exact_blocks,
            sum(count * groups[group].pool_nbytes for group, count in saved.items() if group in groups),
            blocks.saved_nbytes,
            self.budget_nbytes,
        )


def split(rows: Rows) -> list[Rows]:
    """Return `rows` in parts of at most STEP_BLOCKS rows."""
    return [rows[at : at + STEP_BLOCKS] for at in range(0, len(rows), STEP_BLOCKS)]
