"""First in, first out."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, ClassVar

from manthan.policies.base import EvictionPolicy, SessionView, in_order


class FIFO(EvictionPolicy):
    """The session that came first goes first, however often it was used since. O(1) an event.

    It came when it entered this place: a session that was evicted and restored is new.
    """

    name: ClassVar[str] = "fifo"

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._order: OrderedDict[str, None] = OrderedDict()

    def used(self, session: SessionView) -> None:
        self._order[session.session_id] = None

    def forget(self, session_id: str) -> None:
        self._order.pop(session_id, None)

    def victims(self) -> Iterator[str]:
        return in_order(self._order)
