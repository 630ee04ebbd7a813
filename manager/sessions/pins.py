"""What pinned sessions take of the cold store, and what it comes to."""

from collections import Counter

from manthan.manager.sessions.session import Session


class Pins:
    """Bytes of each pinned session. O(1) a change and a question."""

    def __init__(self) -> None:
        self.nbytes: dict[str, int] = {}
        """By session id."""
        self.of_tenant: Counter[str] = Counter()
        self.total = 0

    def of(self, session: Session) -> int:
        """0 for one that is not pinned."""
        return self.nbytes.get(session.session_id, 0)

    def put(self, session: Session, nbytes: int) -> None:
        """The session is pinned, or has grown."""
        self._add(session, nbytes - self.of(session))
        self.nbytes[session.session_id] = nbytes

    def take(self, session: Session) -> bool:
        """It is not pinned any more; whether it was."""
        self._add(session, -self.of(session))
        return self.nbytes.pop(session.session_id, None) is not None

    def _add(self, session: Session, nbytes: int) -> None:
        self.total += nbytes
        self.of_tenant[session.tenant] += nbytes
        if not self.of_tenant[session.tenant]:  # tenants may be as many as clients make up
            del self.of_tenant[session.tenant]
