"""Least frequently used, with counts that fade.

Each request counts 1 when it comes, and half as much after each `half_life_s`. This is the combined recency and
frequency of D. Lee et al., "LRFU: A Spectrum of Policies that Subsumes the Least Recently Used and Least Frequently
Used Policies", IEEE Transactions on Computers 50(12), 2001, with F(x) = (1/2)^(x / half life): a short half life makes
it LRU, a long one LFU.

All counts fade alike, so their order does not change while nobody is used, and no clock is needed: instead of the
count at this moment, the logarithm of what it was worth at time 0 is kept, log2(sum of 2^(t / half life)) over
requests at t.
"""

import math
from typing import Any, ClassVar

from pydantic import Field

from manthan.policies.base import PolicyOptions, RankedPolicy, SessionView


class LFUOptions(PolicyOptions):
    """half_life_s: seconds after which a request counts half as much."""

    half_life_s: float = Field(default=600.0, ge=1, description="a plain number of seconds, 1 or more, such as 600")


class LFU(RankedPolicy):
    """The session with the fewest requests goes first, old requests counting less. O(log n) an event.

    Of one that enters with a history, having been evicted before, the requests are taken to have come at even
    distances since it began.
    """

    name: ClassVar[str] = "lfu"
    Options: ClassVar[type[PolicyOptions]] = LFUOptions
    options: LFUOptions

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._counts: dict[str, tuple[int, float]] = {}
        """Requests of each session, and the logarithm of their faded sum."""

    def rank(self, session: SessionView) -> float:
        now = session.last_used / self.options.half_life_s
        uses, count = self._counts.get(session.session_id, (0, 0.0))
        if not uses:
            count = now + self._history(session)
        elif session.uses > uses:
            count = _log2_sum(count, now + math.log2(session.uses - uses))
        self._counts[session.session_id] = session.uses, count
        return count

    def _history(self, session: SessionView) -> float:
        """log2 of what `uses` requests count, one fading step apart: (1 - q^uses) / (1 - q), q = 2^-step."""
        if session.uses < 2:
            return 0.0
        step = (session.last_used - session.created) / (session.uses - 1) / self.options.half_life_s * math.log(2)
        return math.log2(math.expm1(-step * session.uses) / math.expm1(-step) if step > 0 else session.uses)

    def forget(self, session_id: str) -> None:
        super().forget(session_id)
        self._counts.pop(session_id, None)


def _log2_sum(a: float, b: float) -> float:
    """log2(2^a + 2^b), of numbers too large to be raised."""
    return max(a, b) + math.log2(1 + 2 ** -abs(a - b))
