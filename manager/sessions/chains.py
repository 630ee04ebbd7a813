"""Which session a request belongs to: the one whose chain it extends."""

from collections.abc import Container, Sequence
from itertools import count

from manthan.manager.sessions.session import Block, Session


def common_prefix(chain: Sequence[Block], keys: Sequence[bytes]) -> int:
    """Length of the leading run that a chain and a list of keys share.

    A block key covers the whole prefix before it, so one that agrees settles all before it.
    """
    low, high = 0, min(len(chain), len(keys))
    while low < high:
        middle = (low + high + 1) // 2
        if chain[middle - 1].key == keys[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


class ChainIndex:
    """Sessions by the last key of their chain.

    Sessions that clients named are found by requests of that name, and by requests without one.

    label: tells this engine's sessions without a name from other engines'.
    """

    def __init__(self, label: str = "") -> None:
        self._anonymous_name = f"anonymous-{label}-" if label else "anonymous-"
        self._tips: dict[bytes, dict[str | None, Session]] = {}
        self._named: dict[str, dict[str, Session]] = {}
        self._anonymous = count(1)
        self._forks = count(2)

    def find(self, keys: Sequence[bytes], asked_id: str | None) -> Session | None:
        """The session that these keys belong to; None means a new one or a fork.

        That is one of this name which has all of them, for a prompt that is asked again; otherwise the one with the
        longest chain that is a prefix of them.
        """
        named = self._named.get(asked_id or "", {}).values() if keys else ()
        again = (session for session in named if common_prefix(session.chain, keys) == len(keys))
        return next(again, None) or next((s for key in reversed(keys) if (s := self.at(key, asked_id))), None)

    def at(self, tip: bytes, asked_id: str | None) -> Session | None:
        """The session whose chain ends with that key."""
        sessions = self._tips.get(tip, {})
        if asked_id in sessions or asked_id is not None:
            return sessions.get(asked_id)
        return next(iter(sessions.values()), None)

    def add(self, session: Session) -> None:
        """Enter a session under its tip; one of the same name that is there already keeps the place."""
        if session.chain:
            self._tips.setdefault(session.chain[-1].key, {}).setdefault(session.asked_id, session)
            if session.asked_id is not None:
                self._named.setdefault(session.asked_id, {})[session.session_id] = session

    def remove(self, session: Session) -> None:
        """Take a session out, before its chain changes."""
        tip = session.chain[-1].key if session.chain else b""
        sessions = self._tips.get(tip, {})
        if sessions.get(session.asked_id) is session:
            del sessions[session.asked_id]
            if not sessions:
                del self._tips[tip]
        named = self._named.get(session.asked_id or "", {})
        if named.pop(session.session_id, None) and not named:
            del self._named[session.asked_id or ""]

    def new_id(self, asked_id: str | None, taken: Container[str]) -> str:
        """What the client called it, with a number behind it for a fork; `anonymous-N` without a name."""
        if asked_id is None:
            return next(name for n in self._anonymous if (name := f"{self._anonymous_name}{n}") not in taken)
        if asked_id not in taken:
            return asked_id
        return next(name for n in self._forks if (name := f"{asked_id}~{n}") not in taken)
