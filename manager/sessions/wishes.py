"""What clients say of their sessions, and what becomes of it: pins, times to live, expected returns."""

import sys
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from manthan.manager.sessions.anchors import Anchors
from manthan.manager.sessions.budget import ColdBudget
from manthan.manager.sessions.deadlines import Deadlines, earliest
from manthan.manager.sessions.hints import Hints
from manthan.manager.sessions.orders import Orders
from manthan.manager.sessions.pruning import Pruning
from manthan.manager.sessions.restores import Restores
from manthan.manager.sessions.session import DropCause, News, NewsKind, Prefetch, Session, SessionState, qualified
from manthan.manager.sessions.table import SessionTable
from manthan.manager.sessions.tools import ToolTimes

LOOKED_AT = 64
"""So many of the sessions that are expected are looked at at a time."""


class Awaited(NamedTuple):
    """A session to be prefetched, unless it is used before; `uses` it had when that was said.

    late: after that time it is not worth it.
    """

    late: float
    uses: int


class Wishes:
    """Obeys hints, or refuses to.

    prefetch_lead_s: an expected session is restored so many seconds before; None for never. ttl_s: seconds after its
    last use that a session is forgotten of which no hint says it; None for never.
    """

    def __init__(
        self,
        table: SessionTable,
        pruning: Pruning,
        budget: ColdBudget,
        restores: Restores,
        anchors: Anchors,
        orders: Orders,
        prefetch_lead_s: float | None,
        ttl_s: float | None = None,
    ) -> None:
        self._table, self._pruning, self._budget, self._restores = table, pruning, budget, restores
        self._anchors, self._orders, self._lead_s = anchors, orders, prefetch_lead_s
        self._ttl_s, self._ttls = ttl_s, Deadlines()
        self._expected = Deadlines()
        self._pins = Deadlines()
        self._to_prefetch: OrderedDict[str, Awaited] = OrderedDict()  # by session id
        self._tools = ToolTimes()
        table.forgotten.append(self.forget)

    def forget(self, session_id: str) -> None:
        """A session is gone, and with it what was said of it."""
        for deadlines in (self._ttls, self._expected, self._pins):
            if session_id in deadlines:
                deadlines.set(session_id, None)
        self._to_prefetch.pop(session_id, None)

    @property
    def next_deadline(self) -> float | None:
        ttl, expected, pin = self._ttls.first, self._expected.first, self._pins.first
        return None if ttl is expected is pin is None else earliest(ttl, expected, pin)

    def take(self, session: Session, hints: Hints, now: float) -> str:
        """Do as the client says; returns what is refused, in a sentence."""
        refused = ""
        if hints.pin or (session.pinned and hints.pin is None):
            refused = self.pin(session, session.pinned_until if hints.pin is None else None)
        elif hints.pin is False:
            self.unpin(session)
        session.ttl_s = hints.ttl_s or session.ttl_s
        if hints.priority is not None:
            session.priority = hints.priority
        if hints.tool or hints.expect_return_s is not None:
            self.await_return(session, hints.expect_return_s, hints.tool, now)
        if (ttl_s := session.ttl_s or self._ttl_s) is not None:
            self._ttls.set(session.session_id, now + ttl_s)
        return refused

    def await_return(self, session: Session, seconds: float | None, tool: str, since: float) -> None:
        """Its client will be back in about so many seconds; None for when the tool is done, if that is known. What was
        said before does not hold any more."""
        session.awaits = tool
        if seconds is None:
            seconds = self._tools.expected(session.tenant, tool)
        session.expected = None if seconds is None else since + seconds
        self._look_out(session, since)

    def _look_out(self, session: Session, now: float) -> None:
        """Have it prefetched in time, if it is expected."""
        if self._lead_s is not None:
            expected = session.expected
            due = None if expected is None else max(now, expected - self._lead_s)
            self._expected.set(session.session_id, due)

    def returned(self, session: Session, now: float) -> None:
        """A request of it begins while it has no other."""
        if session.awaits:
            self._tools.took(session.tenant, session.awaits, max(0.0, now - session.last_used))
            session.awaits = ""

    def pin(self, session: Session, until: float | None) -> str:
        """Pin it, or keep it pinned as it grows, until then; None for good. Returns in a sentence why not, if so."""
        was_pinned = session.pinned
        refused = self._budget.pin(session)
        session.pinned_until = None if refused else until
        self._pins.set(session.session_id, session.pinned_until)
        if session.pinned != was_pinned:
            self._tell_pin(session)
        return refused

    def unpin(self, session: Session) -> None:
        was_pinned, session.pinned_until = session.pinned, None
        self._pins.set(session.session_id, None)
        self._budget.unpin(session)
        if was_pinned:
            self._tell_pin(session)

    def _tell_pin(self, session: Session) -> None:
        self._table.touch(session)
        self._orders.news.append(News(session.session_id, NewsKind.PINNED if session.pinned else NewsKind.UNPINNED))

    def adopted(self, session: Session, was_pinned: bool, now: float) -> None:
        """The session comes from an earlier process; what was said of it there holds, if it still can."""
        if was_pinned:
            self._budget.pin(session)
        self._look_out(session, now)
        if session.ttl_s is not None:
            self._ttls.set(session.session_id, session.last_used + session.ttl_s)

    def expire(self, now: float) -> None:
        """Forget sessions whose time to live is over, and pins."""
        due = self.next_deadline
        if due is None or due > now:
            return
        for session_id in list(self._pins.pop_due(now)) if self._pins else ():
            pinned = self._table.by_id.get(session_id)
            if pinned is not None and pinned.pinned_until is not None and pinned.pinned_until <= now:
                self.unpin(pinned)
        for session_id in list(self._ttls.pop_due(now)) if self._ttls else ():
            session = self._table.by_id.get(session_id)
            if session is not None and session.state in (SessionState.IDLE, SessionState.COLD):
                self._pruning.forget_session(session, DropCause.EXPIRED)
            elif session is not None and session.state is SessionState.EVICTING:
                self._ttls.set(session_id, now + 1.0)  # when a request runs, its end sets it

    # -- prefetch -------------------------------------------------------------------------------------

    @property
    def may_prefetch(self) -> bool:
        return self._lead_s is not None

    def expect(self, told_ids: Iterable[str], tenant: str, late: float) -> None:
        """A client says that sessions of its own are about to be used; those of others, and hot ones, are ignored."""
        if not self.may_prefetch:
            return
        for told_id in told_ids:
            session = self._table.by_id.get(qualified(told_id, tenant))
            if session is None or session.tenant != tenant:
                continue
            if session.state in (SessionState.EVICTING, SessionState.COLD):
                self._to_prefetch[session.session_id] = Awaited(late, session.uses)

    def prefetch_blocks(self, now: float, most: int = sys.maxsize) -> int:
        """Blocks of the longest cold session that is expected, of all groups; 0 if there is none. Those that are longer
        than `most`, which is all that there can ever be room for, are expected no more.
        """
        if not self.may_prefetch:
            return 0
        longest = 0
        for session in self._awaited(now):
            if (size := self._size(session)) > most:
                del self._to_prefetch[session.session_id]
            else:
                longest = max(longest, size)
        return longest

    def take_prefetch(self, room: int, now: float) -> Prefetch | None:
        """Return the first cold session that is expected and fits into so many blocks; answer it with `prefetched`. Its
        codes are not dropped until then. Those that do not fit wait until they are late."""
        session = next((session for session in self._awaited(now) if self._size(session) <= room), None)
        if session is None:
            return None
        del self._to_prefetch[session.session_id]
        keys = [block.key for block in session.chain]
        self._restores.started(_prefetch_id(session.session_id), keys)
        return Prefetch(session.session_id, keys, self._beside(session), session.tenant)

    def _beside(self, session: Session) -> tuple[tuple[int, bytes, int], ...]:
        """Group, key and depth of the blocks of the anchor that a cold session ends with, if the model needs one."""
        anchor = session.anchors[-1] if session.anchors else None
        parts = anchor.parts if anchor is not None else ()
        return tuple((part.group, part.key, part.depth) for part in parts if part.group is not None)

    def _size(self, session: Session) -> int:
        """How many blocks its prefetch takes."""
        return len(session.chain) + len(self._beside(session))

    def prefetched(
        self,
        session_id: str,
        complete: bool,
        failed: Iterable[bytes],
        now: float,
        beside: Iterable[tuple[int, bytes]] = (),
    ) -> None:
        """All blocks of the session are hot now, or not all. failed, beside: see `Restores.finished`."""
        self._restores.finished(_prefetch_id(session_id), failed, beside)
        session = self._table.by_id.get(session_id)
        if complete and session is not None and session.state is SessionState.COLD:
            self._table.set_state(session, SessionState.IDLE, now)

    def _awaited(self, now: float) -> list[Session]:
        """Cold sessions to be prefetched, among the first LOOKED_AT. One that is idle still may go cold before it is
        expected; where there are more it lets others go ahead."""
        for session_id in self._expected.pop_due(now):
            session = self._table.by_id.get(session_id)
            if session is not None and session.expected is not None:
                self._to_prefetch[session_id] = Awaited(session.expected, session.uses)
        awaited = []
        are_more = len(self._to_prefetch) > LOOKED_AT
        for session_id, (late, uses) in list(islice(self._to_prefetch.items(), LOOKED_AT)):
            session = self._table.by_id.get(session_id)
            if session is None or late < now or session.uses > uses:
                del self._to_prefetch[session_id]
            elif self._is_cold(session) and _prefetch_id(session_id) not in self._restores.under_way:
                awaited.append(session)
            elif are_more:
                self._to_prefetch.move_to_end(session_id)
        return awaited

    def _is_cold(self, session: Session) -> bool:
        """Whether all that the session goes on with is in the cold store."""
        if session.state is not SessionState.COLD:
            return False
        return not self._anchors.is_needed or bool(session.anchors and session.anchors[-1].stands)


def _prefetch_id(session_id: str) -> str:
    """What a prefetch is called among the restores of requests."""
    return f"prefetch of {session_id}"
