"""Lists of sessions for users: filtered, sorted, and a page at a time.

Besides blocks, sessions of models with sliding windows or recurrent states have resume points: lengths from which the
session can go on, with the blocks of windows or states needed there.
"""

import heapq
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from itertools import islice
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from manthan.manager.fronts import FrontTiers
from manthan.manager.session.blocks import SAVED, Rows
from manthan.manager.session.manager import SessionManager
from manthan.manager.session.table import Session, SessionState, qualified

MOST = 1000
"""Number of sessions, the first in the eviction policy's order, that are searched for a tenant's own sessions."""
STATES = list(SessionState)


class Sort(StrEnum):
    """Sort key of a list of sessions.

    Bytes are estimates. HOT_BYTES takes a session to be wholly in vLLM's pool if a request of it runs, or if it fits
    there behind more recently used ones. Any other session counts with its unsaved blocks only. COLD_BYTES takes every
    saved block to have the codec's expected size.
    """

    LAST_USED = auto()
    TOKENS = auto()
    COLD_BYTES = auto()
    HOT_BYTES = auto()
    ID = auto()
    STATE = auto()
    EXPECTED = auto()


class Query(NamedTuple):
    """Filter and order of a list of sessions. A filter of None passes all."""

    states: Collection[SessionState] | None = None
    bound: str | None = None  # tenant that asks, and sees only its own sessions, with the ids that it gave
    tenant: str | None = None  # tenant of the sessions to list
    tier: str | None = None  # name of a tier that has some of the session's blocks
    pinned: bool | None = None
    prefix: str = ""  # beginning of the ids
    sort: Sort = Sort.LAST_USED
    descending: bool = True
    limit: int = 100
    offset: int = 0  # number of sessions before the page


@dataclass(frozen=True)
class Held:
    """Saved blocks of a session in a tier. bytes: of these, and of resume points' blocks."""

    tokens: int
    blocks: int
    bytes: int


@dataclass(frozen=True)
class SessionInfo:
    """Session as shown to users. Bytes are of all ranks together. Times have the offset given to `Listing.page`."""

    id: str  # for a tenant that asks, without the tenant's prefix
    tenant: str
    state: SessionState
    tokens: int
    blocks: int
    hot_blocks: int  # number of blocks in vLLM's pool
    cold_blocks: int  # number of saved blocks
    hot_bytes: int
    cold_bytes: int  # of saved blocks and of resume points in the tiers
    tiers: Mapping[str, Held]  # by name of a tier that has some of the saved blocks or resume points, the fastest first
    created: float
    last_used: float
    requests: int
    pinned: bool
    priority: int
    expected_return: float | None  # time told by the client, or estimated for the tool
    tool: str  # name of the tool that the client waits for
    parent: str | None  # id of the session for which this one works, as a sub-agent
    lossy_tokens: int  # see `Session.lossy_tokens`
    exact: bool = True  # True if no block, resident or saved, is lossy
    level: int | None = None  # least refinements of a saved block; None without saved blocks or without refinements
    engine: int = 0  # index of the data-parallel engine


Key: TypeAlias = tuple[float | str, str]
"""Value to sort a session by, and its id, so that no two keys are equal and pages do not overlap."""


class Page(NamedTuple):
    """Page of a list."""

    total: int  # number of sessions on all pages
    keys: list[Key]  # of the sessions on this page
    sessions: list[SessionInfo]


class Listing:
    """Sessions of an engine. A page costs about O(n log(offset + limit)) for n sessions, by HOT_BYTES O(n log n).

    tiers: names of all tiers, the fastest first.
    """

    def __init__(self, manager: SessionManager, fronts: FrontTiers, tiers: Sequence[str]) -> None:
        self._manager, self._table, self._blocks = manager, manager.table, manager.blocks
        self._fronts, self._tiers = fronts, tiers

    def page(self, query: Query, offset: float = 0.0) -> Page:
        """Return a page of the table's sessions that pass the query. offset: seconds to add to the manager's clock."""
        chosen = [session for session in self._table.by_id.values() if self._is_wanted(session, query)]
        value = self._value(query.sort)
        keys = ((value(session), session.session_id) for session in chosen)
        end = query.offset + query.limit
        best = heapq.nlargest(end, keys) if query.descending else heapq.nsmallest(end, keys)
        page = best[query.offset :]
        sessions = [self._table.by_id[session_id] for _, session_id in page]
        return Page(len(chosen), page, [self.info(session, query.bound, offset) for session in sessions])

    def find(self, told_id: str, bound: str | None) -> Session | None:
        """Return the session of an id; None if there is none, or if it is not of tenant `bound` (None for any)."""
        session = self._table.by_id.get(told_id if bound is None else qualified(told_id, bound))
        return session if session is not None and bound in (None, session.tenant) else None

    def order(self, bound: str | None) -> Iterator[str]:
        """Yield ids in the policy's order, first victim first; for a tenant, only its own among the first MOST."""
        for session in islice(self._table.victims(self._table.order), None if bound is None else MOST):
            if bound in (None, session.tenant):
                yield session.session_id if bound is None else session.told_id

    def states(self, bound: str | None) -> dict[SessionState, int]:
        if bound is None:
            return {state: self._table.states[state] for state in SessionState}
        found = Counter(session.state for session in self._table.by_id.values() if session.tenant == bound)
        return {state: found[state] for state in SessionState}

    def info(self, session: Session, bound: str | None = None, offset: float = 0.0) -> SessionInfo:
        """Return what is known of a session, its blocks counted one by one. bound, offset: see `find` and `page`."""
        blocks, shape, rows = self._blocks, self._table.shape, session.rows
        saved = rows[blocks.is_saved(rows)]
        points = session.point_rows
        points = points[blocks.is_saved(points)]
        resident = self._manager.pool.lookup(shape.main, blocks.hashes(rows))
        hot = sum(block_id >= 0 for block_id in resident)
        held = {name: self._held(tier, saved, points) for tier, name in enumerate(self._tiers)}
        return SessionInfo(
            id=session.session_id if bound is None else session.told_id,
            tenant=session.tenant,
            state=session.state,
            tokens=len(rows) * shape.block_tokens,
            blocks=len(rows),
            hot_blocks=hot,
            cold_blocks=len(saved),
            hot_bytes=hot * shape.pool_nbytes,
            cold_bytes=self._blocks.nbytes_of(saved) + self._blocks.nbytes_of(points),
            tiers={name: each for name, each in held.items() if each.bytes},
            created=round(session.created + offset, 3),
            last_used=round(session.last_used + offset, 3),
            requests=session.uses,
            pinned=session.is_pinned,
            priority=session.priority,
            expected_return=None if session.expected is None else round(session.expected + offset, 3),
            tool=session.tool,
            parent=session.parent,
            lossy_tokens=session.lossy_tokens,
            exact=bool(self._manager.is_exact(saved).all()) and not self._manager.pool.marks.lossy(resident),
            level=int(blocks.level[saved].min()) if len(saved) and shape.groups[shape.main].levels > 1 else None,
        )

    def _held(self, tier: int, saved: Rows, points: Rows) -> Held:
        has = np.array([self._fronts.has(tier, moved) for moved in range(self._fronts.all_moved + 1)])
        saved, points = saved[has[self._blocks.moved[saved]]], points[has[self._blocks.moved[points]]]
        nbytes = self._blocks.nbytes_of(saved) + self._blocks.nbytes_of(points)
        return Held(len(saved) * self._table.shape.block_tokens, len(saved), nbytes)

    def _is_wanted(self, session: Session, query: Query) -> bool:
        name = session.session_id if query.bound is None else session.told_id
        return (
            query.bound in (None, session.tenant)
            and query.tenant in (None, session.tenant)
            and (query.states is None or session.state in query.states)
            and query.pinned in (None, session.is_pinned)
            and name.startswith(query.prefix)
            and (query.tier is None or (query.tier in self._tiers and self._is_in(query.tier, session)))
        )

    def _is_in(self, name: str, session: Session) -> bool:
        """True if a tier has some of the session's saved blocks. Last blocks leave a fast tier before first blocks."""
        saved, fronts, tier = self._saved(session), self._fronts, self._tiers.index(name)
        if tier == len(fronts) and fronts.keeps_behind:  # this tier has all saved blocks and resume points
            return saved > 0 or bool(session.points)
        at = 0 if tier < len(fronts) else saved - 1
        return saved > 0 and fronts.has(tier, int(self._blocks.moved[session.rows[at]]))

    def _value(self, sort: Sort) -> Callable[[Session], float | str]:
        """Return a function from a session to the value of a sort key."""
        values: dict[Sort, Callable[[Session], float | str]] = {
            Sort.LAST_USED: attrgetter("last_used"),
            Sort.TOKENS: lambda session: len(session.rows),
            Sort.COLD_BYTES: self._cold_nbytes,
            Sort.ID: attrgetter("session_id"),
            Sort.STATE: lambda session: STATES.index(session.state),
            Sort.EXPECTED: lambda session: math.inf if session.expected is None else session.expected,
        }
        return self._resident().__getitem__ if sort == Sort.HOT_BYTES else values[sort]

    def _cold_nbytes(self, session: Session) -> int:
        points = self._blocks.nbytes_of(session.point_rows) if session.points else 0
        return self._saved(session) * self._table.shape.cold_nbytes + points

    def _saved(self, session: Session) -> int:
        """Return the number of saved blocks, by bisection, because the saved blocks are usually the first ones."""
        rows, status = session.rows, self._blocks.status
        if session.is_cold:
            return len(rows)
        return bisect_left(rows, True, key=lambda row: not status[row] & SAVED)

    def _resident(self) -> dict[Session, int]:
        """Return an estimate of the number of resident blocks of each session; see `Sort`."""
        room, resident = self._manager.pool.size, dict[Session, int]()
        for session in sorted(self._table.by_id.values(), key=attrgetter("last_used"), reverse=True):
            length = len(session.rows)
            fits = length <= room or bool(session.requests)
            resident[session] = length if fits else length - self._saved(session)
            room -= resident[session]
        return resident
