"""What clients say of their sessions, and what becomes of it."""

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from manthan.manager.sessions.cold_side import ColdSide
from manthan.manager.sessions.deadlines import Deadlines
from manthan.manager.sessions.hints import Hints
from manthan.manager.sessions.session import Block, DropCause, Session, SessionState, qualified


class Awaited(NamedTuple):
    """A session to be prefetched, unless it is used before; `uses` it had when that was said.

    late: after that time it is not worth it.
    """

    late: float
    uses: int


class HintedSide(ColdSide):
    """The part of the session memory manager that obeys hints, or refuses to."""

    prefetch_lead_s: float | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._ttls = Deadlines()
        self._expected = Deadlines()
        self._to_prefetch: dict[str, Awaited] = {}  # by session id
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

    def _prefetch_named(self, told_ids: Iterable[str], tenant: str, late: float) -> None:
        """A client says that sessions of its own are about to be used; those of others, and hot ones, are ignored."""
        for told_id in told_ids:
            session = self.table.by_id.get(qualified(told_id, tenant))
            if session is None or session.tenant != tenant:
                continue
            if session.state in (SessionState.EVICTING, SessionState.COLD):
                self._to_prefetch[session.session_id] = Awaited(late, session.uses)

    def prefetch_blocks(self, now: float, most: int = sys.maxsize) -> int:
        """Blocks of the longest cold session that is expected; 0 if there is none. Those that are longer than `most`,
        which is all that there can ever be room for, are expected no more.
        """
        for session in self._awaited(now):
            if len(session.chain) > most:
                del self._to_prefetch[session.session_id]
        return max((len(session.chain) for session in self._awaited(now)), default=0)

    def _awaited(self, now: float) -> list[Session]:
        """Cold sessions to be prefetched. One that is idle still may go cold before it is expected."""
        for session_id in self._expected.pop_due(now):
            session = self.table.by_id.get(session_id)
            if session is not None and session.expected is not None:
                self._to_prefetch[session_id] = Awaited(session.expected, session.uses)
        awaited = []
        for session_id, (late, uses) in list(self._to_prefetch.items()):
            session = self.table.by_id.get(session_id)
            if session is None or late < now or session.uses > uses:
                del self._to_prefetch[session_id]
            elif session.state is SessionState.COLD and prefetch_id(session_id) not in self._restoring:
                awaited.append(session)
        return awaited


def prefetch_id(session_id: str) -> str:
    """What a prefetch is called among the restores of requests."""
    return f"prefetch of {session_id}"
