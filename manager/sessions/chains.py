"""Which session a request belongs to: the one of its tenant whose chain it extends."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from itertools import count

from manthan.manager.sessions.session import Block, Session, qualified


def common_prefix(chain: Sequence[Block], keys: Sequence[bytes]) -> int:
    """Length of the leading run that a chain and a list of keys share. O(log n).

    A block key covers the whole prefix before it, so one that agrees settles all before it.
    """
    both = range(min(len(chain), len(keys)))
    return bisect_left(both, True, key=lambda place: chain[place].key != keys[place])


class SortedChains:
    """Sessions in the order of their chains' keys: those that begin alike stand together.

    A look compares O(log sessions) chains, however many begin alike. A session is taken out while its chain changes.
    """

    def __init__(self) -> None:
        self._sessions: list[Session] = []

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: Session, keys: Sequence[bytes]) -> None:
        """Enter a session whose chain has these keys."""
        self._sessions.insert(self._place(keys), session)

    def remove(self, session: Session, keys: Sequence[bytes]) -> None:
        """Take out a session that was added with these keys."""
        del self._sessions[self._sessions.index(session, self._place(keys))]  # it is one of those with that very chain

    def first(self, keys: Sequence[bytes]) -> Session | None:
        """A session that has all of these keys, the one with no others if there is one."""
        place = self._place(keys)
        found = self._sessions[place] if place < len(self) else None
        return found if found is not None and common_prefix(found.chain, keys) == len(keys) else None

    def has_several(self, keys: Sequence[bytes]) -> bool:
        """Whether more than one session has all of these keys."""
        some = self._sessions[(place := self._place(keys)) : place + 2]
        return len(some) == 2 and common_prefix(some[1].chain, keys) == len(keys)

    def nearest(self, keys: Sequence[bytes]) -> tuple[int, Session | None]:
        """How many keys at their beginning some session has, and one that has so many."""
        place = self._place(keys)
        beside = self._sessions[max(0, place - 1) : place + 1]
        return max(((common_prefix(s.chain, keys), s) for s in beside), key=lambda found: found[0], default=(0, None))

    def _place(self, keys: Sequence[bytes]) -> int:
        """Before which of the sessions a chain of these keys stands."""

        def is_behind(session: Session) -> bool:
            common = common_prefix(session.chain, keys)
            if common == min(len(session.chain), len(keys)):
                return len(session.chain) >= len(keys)
            return session.chain[common].key > keys[common]

        return bisect_left(self._sessions, True, key=is_behind)


class ChainIndex:
    """Sessions by the last key of their chain, and by its beginning. No tenant finds another's.

    Sessions that clients named are found by requests of that name, and by requests without one.

    label: tells this engine's sessions without a name from other engines'.
    """

    def __init__(self, label: str = "") -> None:
        self._anonymous_name = f"anonymous-{label}-" if label else "anonymous-"
        self._tips: dict[tuple[str, bytes], dict[str | None, Session]] = {}  # by tenant and key
        self._sorted: dict[tuple[str, str | None], SortedChains] = {}  # by tenant and name; None for all of a tenant
        self._anonymous = defaultdict[str, Iterator[int]](lambda: count(1))  # by tenant, who learns nothing of others
        self._forks = defaultdict[str, Iterator[int]](lambda: count(2))

    def find(self, keys: Sequence[bytes], asked_id: str | None, tenant: str) -> Session | None:
        """The session that these keys belong to; None means a new one or a fork.

        That is one of this name which has all of them, for a prompt that is asked again; otherwise the one with the
        longest chain that is a prefix of them.
        """
        again = self.of(tenant, asked_id).first(keys) if keys and asked_id is not None else None
        found = (s for key in reversed(keys) if (s := self.at(key, asked_id, tenant)))
        return again or next(found, None)

    def at(self, tip: bytes, asked_id: str | None, tenant: str) -> Session | None:
        """The session whose chain ends with that key."""
        sessions = self._tips.get((tenant, tip), {})
        if asked_id in sessions or asked_id is not None:
            return sessions.get(asked_id)
        return next(iter(sessions.values()), None)

    def of(self, tenant: str, asked_id: str | None = None) -> SortedChains:
        """The sessions of that name, or all, of a tenant; to be looked at only."""
        return self._sorted.get((tenant, asked_id)) or SortedChains()

    def add(self, session: Session) -> None:
        """Enter a session; under its tip one of the same name that is there already keeps the place."""
        if session.chain:
            keys = [block.key for block in session.chain]
            self._tips.setdefault((session.tenant, keys[-1]), {}).setdefault(session.asked_id, session)
            for owner in _owners(session):
                self._sorted.setdefault(owner, SortedChains()).add(session, keys)

    def remove(self, session: Session) -> None:
        """Take a session out, before its chain changes."""
        if not session.chain:
            return
        keys = [block.key for block in session.chain]
        tip = session.tenant, keys[-1]
        sessions = self._tips.get(tip, {})
        if sessions.get(session.asked_id) is session:
            del sessions[session.asked_id]
            if not sessions:
                del self._tips[tip]
        for owner in _owners(session):
            self._sorted[owner].remove(session, keys)
            if not self._sorted[owner]:
                del self._sorted[owner]

    def new_id(self, asked_id: str | None, tenant: str, taken: Container[str]) -> str:
        """What the client called it, with a number behind it for a fork; `anonymous-N` without a name."""
        if asked_id is None:
            names = (f"{self._anonymous_name}{n}" for n in self._anonymous[tenant])
        else:
            names = (asked_id if n == 1 else f"{asked_id}~{next(self._forks[tenant])}" for n in count(1))
        return next(name for told in names if (name := qualified(told, tenant)) not in taken)


def _owners(session: Session) -> set[tuple[str, str | None]]:
    return {(session.tenant, None), (session.tenant, session.asked_id)}
