"""Sessions for those who look on: filtered, sorted, a page at a time. All of them are asked by columns; only those of
the page, and a few of those that are in the pool, are looked at one by one.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum, auto
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from manthan.manager.sessions.columns import FREE, STATES
from manthan.manager.sessions.session import (
    HOT_STATES,
    Block,
    CodeState,
    Held,
    Session,
    SessionInfo,
    SessionState,
    qualified,
)
from manthan.manager.sessions.table import SessionTable

Rows: TypeAlias = NDArray[np.intp]
Measures: TypeAlias = NDArray[Any]
LAST = chr(0x10FFFF)
"""No name has a character behind it."""
FEW = 8
"""A part of the sessions is put in order by itself if it is smaller than one in so many."""
MOST = 1000
"""Sessions that are looked through for those of one tenant."""
_COLD = CodeState.COLD


class Sort(StrEnum):
    """What sessions are sorted by. Bytes are estimates: so many blocks at the usual size. What a cold session shares
    with one in the pool does not count there."""

    LAST_USED = auto()
    TOKENS = auto()
    COLD_BYTES = auto()
    HOT_BYTES = auto()
    ID = auto()
    STATE = auto()
    EXPECTED = auto()


class Query(NamedTuple):
    """Which sessions, in which order. None for all.

    bound: the tenant that asks: sessions of others are not there, and its own have the names that it gave them. prefix:
    of ids. tier: its number; with codes there. limit, offset: of the page; offset counts from 0.
    """

    states: Collection[SessionState] | None = None
    bound: str | None = None
    tenant: str | None = None
    tier: int | None = None
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
        self._table, self._columns = table, table.columns

    def page(self, query: Query) -> Page:
        """Sessions that have KV, or a request."""
        self._columns.catch_up()
        rows = self._rows(query)
        best = self._best(query, rows)
        return Page(len(rows), best, [self.info(self._table.by_id[session_id]) for _, session_id in best])

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
        """How many sessions there are in each state."""
        if bound is None:
            return {state: self._table.states[state] for state in SessionState}
        self._columns.catch_up()
        own = self._columns.state[self._columns.tenant == self._columns.number(bound)]
        return {state: int(np.count_nonzero(own == place)) for place, state in enumerate(STATES)}

    def info(self, session: Session) -> SessionInfo:
        """Counted block by block."""
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
            session_id=session.session_id,
            tenant=session.tenant,
            state=session.state,
            tokens=len(chain) * shape.block_tokens,
            blocks=len(chain),
            hot_blocks=hot,
            cold_blocks=cold,
            cold_nbytes=nbytes,
            created=session.created,
            last_used=session.last_used,
            requests=session.uses,
            pinned=session.pinned,
            priority=session.priority,
            expected=session.expected,
            hot_nbytes=hot * shape.hot_nbytes,
            tiers=[self._held(tier, blocks, sizes) for tier in range(len(self._table.fronts) + 1)],
            told_id=session.told_id,
            awaits=session.awaits,
            lossy_tokens=session.lossy_tokens,
        )

    def _held(self, tier: int, blocks: Mapping[int, int], sizes: Mapping[int, int]) -> Held:
        has = self._table.fronts.has
        return Held(
            sum(count for moved, count in blocks.items() if has(tier, moved)),
            sum(nbytes for moved, nbytes in sizes.items() if has(tier, moved)),
        )

    # -- which ----------------------------------------------------------------------------------------

    def _rows(self, query: Query) -> Rows:
        columns = self._columns
        state = columns.state
        is_wanted = state != FREE
        if query.states is not None:
            is_wanted &= np.isin(state, [STATES.index(each) for each in query.states])
        for tenant in {query.bound, query.tenant} - {None}:
            is_wanted &= columns.tenant == columns.number(str(tenant))
        if query.pinned is not None:
            is_wanted &= columns.pinned == query.pinned
        rows = self._begin_so(query.prefix, query.bound) if query.prefix else np.flatnonzero(is_wanted)
        rows = rows[is_wanted[rows]] if query.prefix else rows
        return rows if query.tier is None else self._with_codes_in(query.tier, rows)

    def _begin_so(self, prefix: str, bound: str | None) -> Rows:
        """Those of whose names, or of whose ids, begin so: these stand together."""
        ids, by_id, found = self._columns.ids, self._table.by_id, []
        for begin in {prefix} if bound is None else {qualified(prefix, bound), qualified(f"{prefix}/", bound)[:-1]}:
            found += ids[ids.bisect_left(begin) : ids.bisect_right(begin + LAST)]
        return np.array([by_id[name].row for name in found], np.intp)

    def _with_codes_in(self, tier: int, rows: Rows) -> Rows:
        cold, has_all = STATES.index(SessionState.COLD), self._table.fronts.has_all(tier)
        is_there = self._columns.state[rows] == cold if has_all else np.zeros(len(rows), np.bool_)
        for at in np.flatnonzero(~is_there):
            is_there[at] = self._has_codes_in(self._columns.session(rows[at]), tier)
        chosen: Rows = rows[is_there]
        return chosen

    def _has_codes_in(self, session: Session, tier: int) -> bool:
        """Tails leave a fast tier first."""
        cold, fronts = _cold(session), self._table.fronts
        if fronts.has_all(tier):
            return cold > 0 or bool(session.anchors)
        return cold > 0 and fronts.has(tier, session.chain[0 if tier < len(fronts) else cold - 1].moved)

    # -- in which order -------------------------------------------------------------------------------

    def _best(self, query: Query, rows: Rows) -> list[Key]:
        """What the sessions of the page are sorted by, and their ids."""
        end = min(query.offset + query.limit, len(rows))
        if query.offset >= end:
            return []
        if query.sort is Sort.ID:
            names = self._in_order(rows, end, query.descending)
            return [(name, name) for name in names[query.offset :]]
        values = self._measured(query.sort, rows)
        order = -values if query.descending else values
        first, last = np.partition(order, [query.offset, end - 1])[[query.offset, end - 1]]
        before = int(np.count_nonzero(order < first))
        if first == last:
            return self._tied(query, rows, values, order == first, end - before)[query.offset - before :]
        head = self._tied(query, rows, values, order == first, len(rows))
        between = (order > first) & (order < last)
        middle = list(zip(values[between].tolist(), map(self._name, rows[between]), strict=True))
        left = end - before - len(head) - len(middle)
        tail = self._tied(query, rows, values, order == last, left)
        return [*head[query.offset - before :], *sorted(middle, reverse=query.descending), *tail]

    def _tied(self, query: Query, rows: Rows, values: Measures, are: NDArray[np.bool_], count: int) -> list[Key]:
        """The first so many of those that are tied, which are in the order of their ids."""
        value = values[are.argmax()].item()
        return [(value, name) for name in self._in_order(rows[are], count, query.descending)]

    def _name(self, row: np.intp) -> str:
        return self._columns.session(int(row)).session_id

    def _in_order(self, rows: Rows, count: int, descending: bool) -> list[str]:
        """The first so many of these sessions' ids."""
        if FEW * len(rows) < len(self._columns):
            return sorted(map(self._name, rows), reverse=descending)[:count]
        is_one = np.zeros(self._columns.rows, np.bool_)
        is_one[rows] = True
        ids, by_id = self._columns.ids, self._table.by_id
        names = (name for name in (reversed(ids) if descending else ids) if is_one[by_id[name].row])
        return list(islice(names, count))

    def _measured(self, sort: Sort, rows: Rows) -> Measures:
        """What each of these sessions is sorted by."""
        columns, block_nbytes = self._columns, self._table.shape.cold_nbytes
        if sort is Sort.LAST_USED:
            return columns.used[rows]
        if sort is Sort.EXPECTED:
            return columns.expected[rows]
        if sort is Sort.STATE:
            return columns.state[rows]
        blocks = columns.blocks[rows]
        if sort is Sort.COLD_BYTES:
            for at in np.flatnonzero(columns.state[rows] != STATES.index(SessionState.COLD)):
                blocks[at] = _cold(columns.session(rows[at]))
            return blocks * block_nbytes + columns.beside[rows]
        if sort is Sort.HOT_BYTES:
            state = columns.state[rows]
            blocks *= np.isin(state, [STATES.index(each) for each in HOT_STATES])
            for at in np.flatnonzero(state == STATES.index(SessionState.EVICTING)):
                blocks[at] = _hot(columns.session(rows[at]))
        return blocks


def _is_cold(block: Block) -> bool:
    return block.code is CodeState.COLD


def _cold(session: Session) -> int:
    """How many of its first blocks have codes; nearly always these are all that do."""
    chain = session.chain
    if not chain or not _is_cold(chain[0]):
        return 0
    return len(chain) if _is_cold(chain[-1]) else bisect_left(chain, True, key=lambda block: not _is_cold(block))


def _hot(session: Session) -> int:
    """How many blocks of a session that is being evicted are believed to be in the pool, by others that have them: one
    that has a block there has all before it."""
    if not session.chain or not session.chain[0].hot:
        return 0
    return bisect_left(session.chain, True, key=lambda block: not block.hot)
