"""Least recently used."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, ClassVar

from manthan.policies.base import EvictionPolicy, SessionView, in_order


class LRU(EvictionPolicy):
    """The session unused for longest goes first. O(1) an event."""

    name: ClassVar[str] = "lru"

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._order: OrderedDict[str, None] = OrderedDict()

    def used(self, session: SessionView) -> None:
        self._order[session.session_id] = None
        self._order.move_to_end(session.session_id)

    def forget(self, session_id: str) -> None:
        self._order.pop(session_id, None)

    def victims(self) -> Iterator[str]:
        return in_order(self._order)
