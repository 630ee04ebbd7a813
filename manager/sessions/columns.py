"""What sessions are listed by, in columns: who looks on asks all sessions at once, on the scheduler's thread."""

import math
from array import array

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedList

from manthan.manager.sessions.session import Session, SessionState

STATES = list(SessionState)
"""A state's number is its place here."""
_NUMBERS = {state: number for number, state in enumerate(STATES)}
FREE = -1
"""The state of a row that is no session's."""
BEHIND = 32
"""Rows are brought up to date when so many sessions have changed, or when somebody looks."""


class Numbers:
    """A small number for each name that is in use."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._users: list[int] = []  # by number
        self._free: list[int] = []

    def get(self, name: str) -> int | None:
        return self._of.get(name)

    def take(self, name: str) -> int:
        """The name's number; it has one user more."""
        number = self._of.get(name)
        if number is None:
            if not self._free:
                self._free.append(len(self._users))
                self._users.append(0)
            number = self._of[name] = self._free.pop()
        self._users[number] += 1
        return number

    def leave(self, name: str) -> None:
        """It has one user less; without any the number may be another's."""
        number = self._of[name]
        self._users[number] -= 1
        if not self._users[number]:
            del self._of[name]
            self._free.append(number)


class Columns:
    """A row for each session that is entered, and all ids in order. Between two looks rows may be behind."""

    def __init__(self) -> None:
        self._used, self._expected = array("d"), array("d")
        self._blocks, self._beside, self._tenant = array("q"), array("q"), array("q")
        self._state, self._pinned = array("b"), array("b")
        self._sessions: list[Session | None] = []
        self._free: list[int] = []
        self._tenants = Numbers()
        self._changed: dict[Session, None] = {}
        self.ids: SortedList[str] = SortedList()

    def __len__(self) -> int:
        return len(self.ids)

    def enter(self, session: Session) -> None:
        """The session has a row from now on."""
        if not self._free:
            self._grow()
        session.row = row = self._free.pop()
        self._sessions[row] = session
        self._tenant[row] = self._tenants.take(session.tenant)
        self.ids.add(session.session_id)
        self._write(session)

    def _grow(self) -> None:
        self._free.append(len(self._sessions))
        self._sessions.append(None)
        for column in (self._used, self._expected, self._blocks, self._beside, self._tenant, self._pinned):
            column.append(0)
        self._state.append(FREE)

    def leave(self, session: Session) -> None:
        """It has no row any more."""
        self._changed.pop(session, None)
        self._state[session.row] = FREE
        self._sessions[session.row] = None
        self._free.append(session.row)
        session.row = -1
        self._tenants.leave(session.tenant)
        self.ids.remove(session.session_id)

    def touch(self, session: Session) -> None:
        """The session is not what it was, or will not be in a moment."""
        if len(self._changed) >= BEHIND:
            self.catch_up()
        self._changed[session] = None

    def _write(self, session: Session) -> None:
        row = session.row
        if row < 0:  # it has left, and is done with
            return
        self._used[row] = session.last_used
        self._expected[row] = math.inf if session.expected is None else session.expected
        self._blocks[row] = len(session.chain)
        self._beside[row] = session.beside_nbytes if session.anchors else 0
        self._state[row] = _NUMBERS[session.state]
        self._pinned[row] = session.pinned

    # -- for those who look ---------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        return len(self._sessions)

    def session(self, row: int) -> Session:
        """Whose row it is."""
        session = self._sessions[row]
        assert session is not None
        return session

    def number(self, name: str) -> int:
        """Of a tenant in its column; FREE for one that has no session."""
        number = self._tenants.get(name)
        return FREE if number is None else number

    def catch_up(self) -> None:
        """Bring all rows up to date."""
        for session in self._changed:
            self._write(session)
        self._changed.clear()

    @property
    def used(self) -> NDArray[np.float64]:
        """When each session was used last, in seconds on the manager's clock; [rows], like all of these a copy."""
        return np.array(self._used)

    @property
    def expected(self) -> NDArray[np.float64]:
        """When its client said that it would be back; infinite where it did not say."""
        return np.array(self._expected)

    @property
    def blocks(self) -> NDArray[np.int64]:
        """Of its chain."""
        return np.array(self._blocks)

    @property
    def beside(self) -> NDArray[np.int64]:
        """Bytes of codes of its anchors."""
        return np.array(self._beside)

    @property
    def tenant(self) -> NDArray[np.int64]:
        """See `number`."""
        return np.array(self._tenant)

    @property
    def state(self) -> NDArray[np.int8]:
        """Its place in STATES, or FREE."""
        return np.array(self._state)

    @property
    def pinned(self) -> NDArray[np.bool_]:
        return np.array(self._pinned, np.bool_)
