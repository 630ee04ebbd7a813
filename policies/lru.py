"""Least recently used."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import ClassVar

from manthan.policies.base import EvictionPolicy, SessionView


class LRU(EvictionPolicy):
    """The session unused for longest goes first. O(1) an event."""

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[str, None] = OrderedDict()

    def used(self, session: SessionView) -> None:
        self._order[session.session_id] = None
        self._order.move_to_end(session.session_id)

    def forget(self, session_id: str) -> None:
        self._order.pop(session_id, None)

    def victims(self) -> Iterator[str]:
        return iter(self._order)
