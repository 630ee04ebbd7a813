"""Sessions by how their conversation ended, also those whose KV is gone: one that returns still has its history."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import repeat

from manthan.manager.sessions.session import Session


class Remembered:
    """Sessions by tenant and the last key of their chain when they were used last. The oldest are forgotten."""

    def __init__(self) -> None:
        self._by_tip: OrderedDict[tuple[str, bytes], Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_tip)

    def add(self, session: Session, limit: int) -> None:
        """A request of the session ended; keep `limit` sessions at most."""
        self.forget(session)
        if session.chain:
            session.tip = session.chain[-1].key
            self._by_tip[_place(session)] = session
            self._by_tip.move_to_end(_place(session))
        while len(self._by_tip) > limit:
            self._by_tip.popitem(last=False)

    def find(self, keys: Sequence[bytes], asked_id: str | None, tenant: str) -> Session | None:
        """The tenant's session whose conversation is the longest that these keys extend, if it may be called that."""
        found = map(self._by_tip.get, zip(repeat(tenant), reversed(keys)))
        return next((one for one in found if one is not None and asked_id in (None, one.asked_id)), None)

    def forget(self, session: Session) -> None:
        """The client does not want it any more."""
        if self._by_tip.get(_place(session)) is session:
            del self._by_tip[_place(session)]

    def clear(self) -> None:
        self._by_tip.clear()


def _place(session: Session) -> tuple[str, bytes]:
    return session.tenant, session.tip
