"""Policy that evicts the sessions least likely to return soon."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

from pydantic import Field

from manthan.policies.base import EvictionPolicy, PolicyOptions, SessionView, in_order
from manthan.policies.ranking import Ranking
from manthan.policies.return_model import AGES, ReturnModel


class ReturnsOptions(PolicyOptions):
    """Options of the model."""

    window: int = Field(
        default=4096, ge=64, le=1 << 20, description="the number of newest requests to learn from, 64 to 1048576"
    )
    refit_every: int = Field(
        default=64, ge=1, description="a number of requests between two estimates of the same piece, 1 or more"
    )
    prior: float = Field(default=8.0, gt=0, description="a weight above 0, in returns of sessions")


class Returns(EvictionPolicy):
    """Estimates when each session returns, and evicts the sessions with the lowest Gittins index first.

    The policy that users choose as `returns` is a subclass. It begins with the order of `lru`, and follows this one
    when this has been found to keep more of the KV that returning sessions need.

    A session returns when its client sends the next request. Many sessions never return. From requests, a model (see
    return_model) learns which sessions return, and when. The Gittins index of a session is the chance that the session
    returns, divided by the expected seconds of waiting, if the wait ends at the best moment. The index is not
    divided by a session's bytes. Superseded sessions are evicted before all others.

    Age is the time since a session's last use, and is cut into pieces (AGES). A session has one index for each piece.
    `victims` ranks a session anew after the session has passed into another piece. With n sessions, each call of
    `used`, each victim and each new ranking takes O(log n) on average.
    """

    name: ClassVar[str] = "returns"
    Options: ClassVar[type[ReturnsOptions]] = ReturnsOptions
    options: ReturnsOptions

    def __init__(self, options: Any = None, model: ReturnModel | None = None) -> None:
        super().__init__(options)
        o = self.options
        self.model = model if model is not None else ReturnModel(o.window, o.refit_every, o.prior)
        self._now = 0.0
        self._index: dict[str, tuple[float, list[float]]] = {}
        """Time of each session's last use, and the session's index in each piece of age."""
        self._worth, self._passes = Ranking(), Ranking()
        """Sessions ranked by their index now; and sessions by the time at which they reach the next piece of age."""
        self._superseded: OrderedDict[str, None] = OrderedDict()
        """The first victims: sessions from whose middle another went on, as after an edit of an earlier message."""

    @classmethod
    def family(cls, options: Any = None) -> Callable[[], Self]:
        first = cls(options)
        return lambda: cls(options, first.model)

    def used(self, session: SessionView) -> None:
        session_id = session.session_id
        self._superseded.pop(session_id, None)
        self._now = max(self._now, session.last_used)
        self._index[session_id] = session.last_used, self.model.observe(session)
        self._rank(session_id)

    def forget(self, session_id: str) -> None:
        self._superseded.pop(session_id, None)
        self._index.pop(session_id, None)
        self._worth.discard(session_id)
        self._passes.discard(session_id)

    def superseded(self, session_id: str) -> None:
        if session_id in self._index:
            Returns.forget(self, session_id)  # not `self.forget`, because a subclass may override it
            self._superseded[session_id] = None

    def victims(self) -> Iterator[str]:
        yield from in_order(self._superseded)
        while (first := self._passes.first()) is not None and first.rank < self._now:
            self._rank(first.key)
        yield from self._worth.in_order()

    def _rank(self, session_id: str) -> None:
        """Rank a session by its index for the piece of age in which the session is now."""
        last_used, index = self._index[session_id]
        piece = 0
        while piece < len(AGES) and last_used + AGES[piece] < self._now:
            piece += 1
        self._worth.set(session_id, index[piece], last_used)
        if piece < len(AGES):
            self._passes.set(session_id, last_used + AGES[piece])
        else:
            self._passes.discard(session_id)
