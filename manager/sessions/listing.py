"""Sessions for those who look on: filtered, sorted, a page at a time. What a session is sorted and filtered by costs
O(log n) of its blocks at most; only those of the page are counted block by block.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import StrEnum, auto
from typing import NamedTuple, TypeAlias

from manthan.manager.sessions.session import (
    HOT_STATES,
    Block,
    CodeState,
    Session,
    SessionInfo,
    SessionState,
    qualified,
)
from manthan.manager.sessions.table import SessionTable


class Sort(StrEnum):
    """What sessions are sorted by. Bytes are estimates: so many blocks at the usual size."""

    LAST_USED = auto()
    TOKENS = auto()
    COLD_BYTES = auto()
    HOT_BYTES = auto()
    ID = auto()
    STATE = auto()
    EXPECTED = auto()


class Tier(StrEnum):
    """FAST: where there is a slower tier behind it. SLOW: that one, or the only one."""

    FAST = auto()
    SLOW = auto()


class Query(NamedTuple):
    """Which sessions, in which order. None for all.

    bound: the tenant that asks: sessions of others are not there, and its own have the names that it gave them. prefix:
    of ids. tier: with codes there. limit, offset: of the page; offset counts from 0.
    """

    states: Collection[SessionState] | None = None
    bound: str | None = None
    tenant: str | None = None
    tier: Tier | None = None
    pinned: bool | None = None
    prefix: str = ""
    sort: Sort = Sort.LAST_USED
    descending: bool = True
    limit: int = 100
    offset: int = 0


Key: TypeAlias = tuple[float | str, str]
"""What a session is sorted by, and its id, so that pages do not overlap."""


class Page(NamedTuple):
    """total: how many sessions there are in all pages. keys: what the sessions of this one are sorted by."""

    total: int
    keys: list[Key]
    sessions: list[SessionInfo]


class Listing:
    """Looks into a table of sessions, and changes nothing there."""

    def __init__(self, table: SessionTable) -> None:
        self._table = table

    def page(self, query: Query) -> Page:
        """Sessions that have KV, or a request."""
        found = list(self._filtered(query))
        measure = self._measures()[query.sort]
        end = query.offset + query.limit
        choose = heapq.nlargest if query.descending else heapq.nsmallest
        best = choose(end, ((measure(session), session.session_id) for session in found))[query.offset :]
        return Page(len(found), best, [self.info(self._table.by_id[session_id]) for _, session_id in best])

    def find(self, told_id: str, bound: str | None) -> Session | None:
        """The session of that id, for a tenant one of its own by the name that it gave it; None: for who sees all."""
        session = self._table.by_id.get(told_id if bound is None else qualified(told_id, bound))
        return session if session is not None and bound in (None, session.tenant) else None

    def order(self, bound: str | None) -> Iterator[str]:
        """Ids of idle sessions, the one that leaves the hot pool first first."""
        for session in self._table.hot_victims():
            if bound in (None, session.tenant):
                yield session.session_id if bound is None else session.told_id

    def states(self, bound: str | None) -> dict[SessionState, int]:
        """How many sessions there are in each state."""
        if bound is None:
            return {state: self._table.states[state] for state in SessionState}
        own = [session.state for session in self._table.by_id.values() if session.tenant == bound]
        return {state: own.count(state) for state in SessionState}

    def info(self, session: Session) -> SessionInfo:
        """Counted block by block."""
        shape, chain = self._table.shape, session.chain
        hot = 0
        for block in chain:
            hot += block.hot > 0
        cold = [block for block in chain if block.code is CodeState.COLD]
        coded = (*cold, *(block for block in session.beside if block.code is CodeState.COLD))
        return SessionInfo(
            session_id=session.session_id,
            tenant=session.tenant,
            state=session.state,
            tokens=len(chain) * shape.block_tokens,
            blocks=len(chain),
            hot_blocks=hot,
            cold_blocks=len(cold),
            cold_nbytes=sum(block.encoding.nbytes for block in coded),
            created=session.created,
            last_used=session.last_used,
            requests=session.uses,
            pinned=session.pinned,
            priority=session.priority,
            expected=session.expected,
            hot_nbytes=hot * shape.hot_nbytes,
            moved_nbytes=sum(block.encoding.nbytes for block in coded if block.moved),
            told_id=session.told_id,
        )

    # -- which ----------------------------------------------------------------------------------------

    def _filtered(self, query: Query) -> Iterator[Session]:
        sessions: Iterable[Session] = self._table.by_id.values()
        if query.states is not None:
            sessions = (session for session in sessions if session.state in query.states)
        for tenant in (query.bound, query.tenant):
            if tenant is not None:
                sessions = _of_tenant(sessions, tenant)
        if query.pinned is not None:
            sessions = (session for session in sessions if session.pinned is query.pinned)
        if query.prefix:
            sessions = (session for session in sessions if _name(session, query.bound).startswith(query.prefix))
        if query.tier is not None:
            sessions = (session for session in sessions if self._has_codes_in(session, query.tier))
        return iter(sessions)

    def _has_codes_in(self, session: Session, tier: Tier) -> bool:
        """Tails leave a fast tier first."""
        cold = _cold(session)
        if tier is Tier.FAST:
            return cold > 0 and not session.chain[0].moved
        if self._table.front is None or self._table.front.keeps_behind:
            return cold > 0 or bool(session.anchors)
        return cold > 0 and session.chain[cold - 1].moved

    # -- in which order -------------------------------------------------------------------------------

    def _measures(self) -> dict[Sort, Callable[[Session], float | str]]:
        shape, states = self._table.shape, list(SessionState)
        return {
            Sort.LAST_USED: lambda session: session.last_used,
            Sort.TOKENS: lambda session: len(session.chain),
            Sort.COLD_BYTES: lambda session: (
                _cold(session) * shape.cold_nbytes + (session.beside_nbytes if session.anchors else 0)
            ),
            Sort.HOT_BYTES: _hot,
            Sort.ID: lambda session: session.session_id,
            Sort.STATE: lambda session: states.index(session.state),
            Sort.EXPECTED: lambda session: math.inf if session.expected is None else session.expected,
        }


def _of_tenant(sessions: Iterable[Session], tenant: str) -> Iterator[Session]:
    return (session for session in sessions if session.tenant == tenant)


def _name(session: Session, bound: str | None) -> str:
    return session.session_id if bound is None else session.told_id


def _is_cold(block: Block) -> bool:
    return block.code is CodeState.COLD


def _cold(session: Session) -> int:
    """How many of its first blocks have codes; nearly always these are all that do."""
    chain = session.chain
    if not chain or not _is_cold(chain[0]):
        return 0
    return len(chain) if _is_cold(chain[-1]) else bisect_left(chain, True, key=lambda block: not _is_cold(block))


def _hot(session: Session) -> int:
    """How many blocks are believed to be in the pool: a session that has one there has all before it."""
    if session.state in HOT_STATES:
        return len(session.chain)
    if not session.chain or not session.chain[0].hot:
        return 0
    return bisect_left(session.chain, True, key=lambda block: not block.hot)
