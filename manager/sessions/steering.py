"""What is asked of a session beside its requests: go cold now, come back, be expected, stay, go."""

from manthan.manager.sessions.evictions import Evictions
from manthan.manager.sessions.pruning import Pruning
from manthan.manager.sessions.session import DropCause, Session, SessionState
from manthan.manager.sessions.table import SessionTable
from manthan.manager.sessions.wishes import Wishes


class Steering:
    """Each method does what would be done some time, or on a client's hint, and returns in a sentence why not, if so.

    patience_s: how long a prefetch that finds no room is worth it.
    """

    def __init__(
        self,
        evictions: Evictions,
        wishes: Wishes,
        pruning: Pruning,
        table: SessionTable,
        patience_s: float,
    ) -> None:
        self._evictions, self._wishes, self._pruning, self._table = evictions, wishes, pruning, table
        self._patience_s = patience_s

    def evict(self, session: Session, now: float) -> str:
        """As if it were idle for long enough; what is cold, or on its way, stays so."""
        if session.state is SessionState.HOT:
            return "a request of it runs; it can go cold when that has ended"
        if session.state is SessionState.IDLE:
            self._evictions.evict(session, now)
        return ""

    def prefetch(self, session: Session, now: float) -> str:
        """As if it were expected any moment; what is hot stays so."""
        if not self._wishes.may_prefetch:
            return "sessions of this model cannot be prefetched"
        self._wishes.expect([session.told_id], session.tenant, now + self._patience_s)
        return ""

    def expect(self, session: Session, now: float, seconds: float | None = None, tool: str = "") -> str:
        """Its client will be back in so long, or when the tool is done."""
        if session.requests:
            return "a request of it runs; it can be expected back when that has ended"
        self._wishes.await_return(session, seconds, tool, session.last_used if seconds is None else now)
        self._table.told(session)
        return ""

    def pin(self, session: Session, now: float, seconds: float | None = None) -> str:
        """Its codes are kept whatever comes, for so long; None for good."""
        return self._wishes.pin(session, None if seconds is None else now + seconds)

    def unpin(self, session: Session, now: float) -> str:
        """They are not any more."""
        self._wishes.unpin(session)
        return ""

    def release(self, session: Session, now: float) -> str:
        """It is forgotten."""
        if session.requests:
            return "a request of it runs; it can be released when that has ended"
        self._pruning.forget_session(session, DropCause.RELEASED)
        return ""
