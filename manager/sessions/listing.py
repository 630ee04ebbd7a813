"""Sessions for those who look on: filtered, sorted, a page at a time, from a snapshot of the table."""

import heapq
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum, auto
from itertools import islice
from typing import NamedTuple, TypeAlias

from manthan.manager.sessions.session import (
    Block,
    CodeState,
    Held,
    Session,
    SessionInfo,
    SessionState,
    qualified,
)
from manthan.manager.sessions.table import SessionTable

MOST = 1000
"""Sessions that are looked through for those of one tenant."""
STATES = list(SessionState)
_COLD = CodeState.COLD


class Sort(StrEnum):
    """Key of a list of sessions. Bytes are estimates: blocks at the usual size. Blocks that a cold session shares with
    one in the pool do not count as hot."""

    LAST_USED = auto()
    TOKENS = auto()
    COLD_BYTES = auto()
    HOT_BYTES = auto()
    ID = auto()
    STATE = auto()
    EXPECTED = auto()


class Query(NamedTuple):
    """Filter and order of a list of sessions. A filter that is None passes all.

    bound: tenant that asks; it sees its own sessions only, under the names that it gave them. tenant: of the sessions.
    tier: name of a tier that has some of the session's blocks. prefix: of ids. offset: sessions before the page.
    """

    states: Collection[SessionState] | None = None
    bound: str | None = None
    tenant: str | None = None
    tier: str | None = None
    pinned: bool | None = None
    prefix: str = ""
    sort: Sort = Sort.LAST_USED
    descending: bool = True
    limit: int = 100
    offset: int = 0


Key: TypeAlias = tuple[float | str, str]
"""A session's value of the sort key, and its id, so that pages do not overlap."""


class Page(NamedTuple):
    """One page of a list. total: number of sessions on all pages. keys: sort keys of the sessions on this page."""

    total: int
    keys: list[Key]
    sessions: list[SessionInfo]


class Listing:
    """Reads a table of sessions, and changes nothing there. A page costs O(n log page) of n sessions.

    tiers: their names, the fastest first.
    """

    def __init__(self, table: SessionTable, tiers: Sequence[str]) -> None:
        self._table, self._tiers = table, tiers

    def page(self, query: Query, offset: float = 0.0) -> Page:
        """Return a page of the sessions that have KV, or a request. offset: seconds to add to
        the manager's clock."""
        chosen = [session for session in self._table.by_id.values() if self._is_wanted(session, query)]
        keys = ((self._value(query.sort, session), session.session_id) for session in chosen)
        end = query.offset + query.limit
        best = heapq.nlargest(end, keys) if query.descending else heapq.nsmallest(end, keys)
        page = best[query.offset :]
        sessions = [self._table.by_id[session_id] for _, session_id in page]
        return Page(len(chosen), page, [self.info(session, query.bound, offset) for session in sessions])

    def find(self, told_id: str, bound: str | None) -> Session | None:
        """The session of that id, for a tenant one of its own by the name that it gave it; None: for who sees all."""
        session = self._table.by_id.get(told_id if bound is None else qualified(told_id, bound))
        return session if session is not None and bound in (None, session.tenant) else None

    def order(self, bound: str | None) -> Iterator[str]:
        """Ids of idle sessions, the one that leaves the hot pool first first; a tenant's own among the first MOST."""
        for session in islice(self._table.hot_victims(), None if bound is None else MOST):
            if bound in (None, session.tenant):
                yield session.session_id if bound is None else session.told_id

    def states(self, bound: str | None) -> dict[SessionState, int]:
        """Return the number of sessions in each state."""
        if bound is None:
            return {state: self._table.states[state] for state in SessionState}
        found = Counter(session.state for session in self._table.by_id.values() if session.tenant == bound)
        return {state: found[state] for state in SessionState}

    def info(self, session: Session, bound: str | None = None, offset: float = 0.0) -> SessionInfo:
        """Return what is told of a session, counted block by block. See `page`."""
        shape, chain = self._table.shape, session.chain
        hot = cold = nbytes = 0
        blocks, sizes = Counter[int](), Counter[int]()  # by the tiers that they left
        for block in chain:
            if block.hot:
                hot += 1
            if block.code is _COLD:
                cold += 1
                nbytes += block.encoding.nbytes
                if block.moved:
                    blocks[block.moved] += 1
                    sizes[block.moved] += block.encoding.nbytes
        for block in session.beside if session.anchors else ():
            if block.code is _COLD:
                nbytes += block.encoding.nbytes
                if block.moved:
                    sizes[block.moved] += block.encoding.nbytes
        blocks[0], sizes[0] = cold - blocks.total(), nbytes - sizes.total()
        return SessionInfo(
            id=session.session_id if bound is None else session.told_id,
            tenant=session.tenant,
            state=session.state,
            tokens=len(chain) * shape.block_tokens,
            blocks=len(chain),
            hot_blocks=hot,
            cold_blocks=cold,
            hot_bytes=hot * shape.hot_nbytes,
            cold_bytes=nbytes,
            tiers={
                name: held for tier, name in enumerate(self._tiers) if (held := self._held(tier, blocks, sizes)).bytes
            },
            created=round(session.created + offset, 3),
            last_used=round(session.last_used + offset, 3),
            requests=session.uses,
            pinned=session.pinned,
            priority=session.priority,
            expected_return=None if session.expected is None else round(session.expected + offset, 3),
            tool=session.awaits,
            lossy_tokens=session.lossy_tokens,
        )

    def _held(self, tier: int, blocks: Mapping[int, int], sizes: Mapping[int, int]) -> Held:
        has = self._table.fronts.has
        count = sum(count for moved, count in blocks.items() if has(tier, moved))
        nbytes = sum(nbytes for moved, nbytes in sizes.items() if has(tier, moved))
        return Held(count * self._table.shape.block_tokens, count, nbytes)

    def _is_wanted(self, session: Session, query: Query) -> bool:
        if query.bound is not None and session.tenant != query.bound:
            return False
        if query.tenant is not None and session.tenant != query.tenant:
            return False
        if query.states is not None and session.state not in query.states:
            return False
        if query.pinned is not None and session.pinned != query.pinned:
            return False
        name = session.session_id if query.bound is None else session.told_id
        if not name.startswith(query.prefix):
            return False
        if query.tier is None:
            return True
        return query.tier in self._tiers and self._is_in(self._tiers.index(query.tier), session)

    def _is_in(self, tier: int, session: Session) -> bool:
        """True if a tier has some of the session's blocks. Tails leave a fast tier first."""
        cold, fronts = _cold(session), self._table.fronts
        if fronts.has_all(tier):
            return cold > 0 or bool(session.anchors)
        return cold > 0 and fronts.has(tier, session.chain[0 if tier < len(fronts) else cold - 1].moved)

    def _value(self, sort: Sort, session: Session) -> float | str:
        shape = self._table.shape
        match sort:
            case Sort.LAST_USED:
                return session.last_used
            case Sort.EXPECTED:
                return math.inf if session.expected is None else session.expected
            case Sort.STATE:
                return STATES.index(session.state)
            case Sort.ID:
                return session.session_id
            case Sort.COLD_BYTES:
                return _cold(session) * shape.cold_nbytes + (session.beside_nbytes if session.anchors else 0)
            case Sort.HOT_BYTES:
                return _hot(session)
            case Sort.TOKENS:
                return len(session.chain)


def _is_cold(block: Block) -> bool:
    return block.code is CodeState.COLD


def _cold(session: Session) -> int:
    """Return the number of first blocks that are cold; nearly always no others are."""
    chain = session.chain
    if not chain or not _is_cold(chain[0]):
        return 0
    return len(chain) if _is_cold(chain[-1]) else bisect_left(chain, True, key=lambda block: not _is_cold(block))


def _hot(session: Session) -> int:
    """Return the number of first blocks in the pool. A cold session's count as hot nowhere."""
    if session.state is SessionState.COLD or not session.chain or not session.chain[0].hot:
        return 0
    return bisect_left(session.chain, True, key=lambda block: not block.hot)
