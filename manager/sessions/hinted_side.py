"""What clients say of their sessions, and what becomes of it."""

import math
from collections.abc import Iterable
from typing import Any

from manthan.manager.sessions.cold_side import ColdSide
from manthan.manager.sessions.deadlines import Deadlines
from manthan.manager.sessions.hints import Hints
from manthan.manager.sessions.session import Block, DropCause, Session, SessionState, qualified


class HintedSide(ColdSide):
    """The part of the session memory manager that obeys hints, or refuses to."""

    prefetch_lead_s: float | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._ttls = Deadlines()
        self._expected = Deadlines()
        self._to_prefetch: dict[str, float] = {}  # by session id, and when it is too late
        self._restoring: dict[str, list[Block]] = {}  # by id of a request, or of a prefetch

    def _take_hints(self, session: Session, hints: Hints, now: float) -> str:
        """Do as the client says; returns what is refused, in a sentence."""
        refused = ""
        if hints.pin or (session.pinned and hints.pin is None):
            refused = self._pin(session)
        elif hints.pin is False:
            self._unpin(session)
        session.ttl_s = hints.ttl_s or session.ttl_s
        if hints.priority is not None:
            session.priority = hints.priority
        if hints.expect_return_s is not None:
            session.expected = now + hints.expect_return_s
            if self.prefetch_lead_s is not None:
                self._expected.set(session.session_id, max(now, session.expected - self.prefetch_lead_s))
        if session.ttl_s is not None:
            self._ttls.set(session.session_id, now + session.ttl_s)
        return refused

    def _forget_session(self, session: Session, cause: DropCause) -> None:
        """The client wants nothing of it kept, neither codes nor bf16, nor that it be known again."""
        keys = [block.key for block in session.chain]
        self.table.remembered.forget(session)
        self._cut(session, 0, cause)
        self._releases += keys

    def _expire(self, now: float) -> None:
        for session_id in list(self._ttls.pop_due(now)):
            session = self.table.by_id.get(session_id)
            if session is not None and session.state in (SessionState.IDLE, SessionState.COLD):
                self._forget_session(session, DropCause.EXPIRED)
            elif session is not None and session.state is SessionState.EVICTING:
                self._ttls.set(session_id, now + 1.0)  # when a request runs, its end sets it

    # -- prefetch -------------------------------------------------------------------------------------

    def _prefetch_named(self, told_ids: Iterable[str], tenant: str) -> None:
        """A client says that sessions of its own are about to be used; names of others mean nothing."""
        sessions = (self.table.by_id.get(qualified(told_id, tenant)) for told_id in told_ids)
        self._to_prefetch |= {s.session_id: math.inf for s in sessions if s is not None and s.tenant == tenant}

    def prefetch_blocks(self, now: float) -> int:
        """Blocks of the longest cold session that is expected; 0 if there is none."""
        return max((len(session.chain) for session in self._awaited(now)), default=0)

    def _awaited(self, now: float) -> list[Session]:
        """Cold sessions to be prefetched. One that is idle still may go cold before it is expected."""
        for session_id in self._expected.pop_due(now):
            session = self.table.by_id.get(session_id)
            if session is not None and session.expected is not None:
                self._to_prefetch[session_id] = session.expected
        awaited = []
        for session_id, late in list(self._to_prefetch.items()):
            session = self.table.by_id.get(session_id)
            if session is None or late < now or _is_back(session, late):
                del self._to_prefetch[session_id]
            elif session.state is SessionState.COLD and prefetch_id(session_id) not in self._restoring:
                awaited.append(session)
        return awaited


def prefetch_id(session_id: str) -> str:
    """What a prefetch is called among the restores of requests."""
    return f"prefetch of {session_id}"


def _is_back(session: Session, late: float) -> bool:
    if late < math.inf:
        return session.expected is None
    return session.state in (SessionState.HOT, SessionState.IDLE)
