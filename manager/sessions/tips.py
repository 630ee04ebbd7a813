"""Sessions by the last block of their chain, their tip. Its hash covers all that came before it."""

from collections import OrderedDict, defaultdict
from collections.abc import Container, Iterator, Sequence
from itertools import count, islice, repeat
from typing import TypeVar

from manthan.manager.sessions.session import Block, Session, common_prefix, qualified

K = TypeVar("K")


class Tips:
    """Sessions that have KV, and those that are remembered: their KV is gone. No tenant finds another's.

    Sessions that clients named are found by requests of that name, and by requests without one.

    Args:
        label: Tells this engine's sessions without a name from other engines'.
    """

    def __init__(self, label: str = "") -> None:
        self._anonymous_name = f"anonymous-{label}-" if label else "anonymous-"
        self._ending = defaultdict[tuple[str, bytes], dict[Session, None]](dict)
        """By tenant and last key, sessions that have KV, the first that came first."""
        self._named = defaultdict[tuple[str, str | None], dict[Session, None]](dict)
        """By tenant and name; None for all of a tenant."""
        self._prompts: dict[tuple[str, bytes, str], Session] = {}
        """By tenant, key of a prompt's last full block, and what is behind it, the session that asked it last."""
        self._prompt_of: dict[Session, tuple[str, bytes, str]] = {}
        self._remembered: OrderedDict[tuple[str, bytes], Session] = OrderedDict()
        """By tenant and tip, also those whose KV is gone. The oldest are forgotten."""
        self._anonymous = defaultdict[str, Iterator[int]](lambda: count(1))  # by tenant, who learns nothing of others
        self._forks = defaultdict[str, Iterator[int]](lambda: count(2))

    def add(self, session: Session) -> None:
        """Enter a session with KV."""
        for name in {session.asked_id, None}:
            self._named[session.tenant, name][session] = None

    def remove(self, session: Session) -> None:
        """Take out a session without KV."""
        for name in {session.asked_id, None}:
            _discard(self._named, (session.tenant, name), session)
        self._forget_prompt(session)

    def enter(self, session: Session) -> None:
        """Enter a session whose chain has changed."""
        if session.chain:
            self._ending[session.tenant, session.chain[-1].key][session] = None

    def leave(self, session: Session) -> None:
        """Take out a session whose chain is about to change."""
        if session.chain:
            _discard(self._ending, (session.tenant, session.chain[-1].key), session)

    def longest(self, keys: Sequence[bytes], asked_id: str | None, tenant: str) -> Session | None:
        """Return the session with KV, of this name or any, whose chain is the longest that these keys begin with."""
        found = (session for key in reversed(keys) for session in self._ending.get((tenant, key), ()))
        return next((session for session in found if asked_id in (None, session.asked_id)), None)

    def asks(self, session: Session, keys: Sequence[bytes]) -> None:
        """Note that a prompt with these full blocks, and `Session.prompt_end`, is the session's last one."""
        self._forget_prompt(session)
        if keys and session.prompt_end:
            name = session.tenant, keys[-1], session.prompt_end
            self._prompts[name], self._prompt_of[session] = session, name

    def asked(self, keys: Sequence[bytes], end: str, tenant: str) -> Session | None:
        """Return the session whose last prompt this is, and which still has its KV."""
        found = self._prompts.get((tenant, keys[-1], end)) if keys and end else None
        return found if found is not None and len(found.chain) >= len(keys) else None

    def _forget_prompt(self, session: Session) -> None:
        name = self._prompt_of.pop(session, None)
        if name is not None and self._prompts.get(name) is session:
            del self._prompts[name]

    def nearest(self, keys: Sequence[bytes], asked_id: str | None, tenant: str) -> tuple[int, Session | None]:
        """Return how many keys at their beginning some session, of this name or any, has, and one that has so many."""
        best, found = 0, None
        for session in self._named.get((tenant, asked_id), ()) if keys else ():
            chain = session.chain
            if best < len(chain) and chain[best].key == keys[best]:
                best, found = common_prefix(chain, keys, best + 1), session
                if best == len(keys):
                    break
        return best, found

    def holder(self, block: Block, tenant: str) -> Session | None:
        """Return a session of the tenant whose chain has the block."""
        found = block.origin
        if found is None or found.tenant != tenant:
            found = next(self.holders(block, tenant), None)
            block.origin = block.origin or found
        return found

    def holders(self, block: Block, tenant: str) -> Iterator[Session]:
        """Yield the tenant's sessions whose chain has the block. A scan, which may be ended early."""
        some = self._named.get((tenant, None), ()) if block.users else ()
        return (session for session in some if session.has(block))

    def has_several(self, block: Block, tenant: str) -> bool:
        """True if more than one session of the tenant has the block."""
        return block.users > 1 and len(list(islice(self.holders(block, tenant), 2))) > 1

    # -- sessions whose KV may be gone ----------------------------------------------------------------

    def remember(self, session: Session, limit: int) -> None:
        """A request of the session ended. Keep `limit` sessions at most."""
        self.forget(session)
        if session.chain:
            session.tip = session.chain[-1].key
            self._remembered[session.tenant, session.tip] = session
            self._remembered.move_to_end((session.tenant, session.tip))
        while len(self._remembered) > limit:
            self._remembered.popitem(last=False)

    def recall(self, keys: Sequence[bytes], asked_id: str | None, tenant: str) -> Session | None:
        """Return the remembered session, of this name or any, whose conversation is the longest that these keys
        extend."""
        found = map(self._remembered.get, zip(repeat(tenant), reversed(keys)))
        return next((one for one in found if one is not None and asked_id in (None, one.asked_id)), None)

    def forget(self, session: Session) -> None:
        """Remember the session no longer."""
        if self._remembered.get((session.tenant, session.tip)) is session:
            del self._remembered[session.tenant, session.tip]

    # -- names ----------------------------------------------------------------------------------------

    def new_id(self, asked_id: str | None, tenant: str, taken: Container[str]) -> str:
        """Return the client's name, with a number behind it for a fork, or `anonymous-N` without a name."""
        if asked_id is None:
            names = (f"{self._anonymous_name}{n}" for n in self._anonymous[tenant])
        else:
            names = (asked_id if n == 1 else f"{asked_id}~{next(self._forks[tenant])}" for n in count(1))
        return next(name for told in names if (name := qualified(told, tenant)) not in taken)

    def forget_tenant(self, tenant: str) -> None:
        """Drop the name counters of a tenant without sessions."""
        self._anonymous.pop(tenant, None)
        self._forks.pop(tenant, None)


def _discard(index: dict[K, dict[Session, None]], key: K, session: Session) -> None:
    del index[key][session]
    if not index[key]:
        del index[key]
