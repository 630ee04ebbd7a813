"""Sessions that are least likely to return soon go first."""

import heapq
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from manthan.policies.base import EvictionPolicy, PolicyOptions, SessionView, in_order
from manthan.policies.return_model import AGES, KINDS, LEVELS, STEP, ReturnModel, kind_of


class ReturnsOptions(PolicyOptions):
    """Options of the model."""

    window: int = Field(default=4096, ge=64, le=1 << 20, description="a number of requests to learn from, 64 or more")
    refit_every: int = Field(
        default=64, ge=1, description="a number of requests between two estimates, at least, 1 or more"
    )
    prior: float = Field(default=8.0, gt=0, description="a number of returns above 0")


class Returns(EvictionPolicy):
    """Predicts when a session returns, and keeps the sessions that pay most for their room.

    Most sessions never return, and the others return after times that have a shape. A model (see return_model) learns
    both online from the features of a session. A session's worth is the Gittins index of waiting for it: returns per
    second of room, at the best moment to give up.

    Sessions of one kind and of about the same factor (a level) share a queue, in which only age tells them apart. The
    index rises with age to a peak and then falls, so the least of a queue is at one of its ends. O(levels) a victim,
    O(1) a use.
    """

    name: ClassVar[str] = "returns"
    Options: ClassVar[type[PolicyOptions]] = ReturnsOptions
    options: ReturnsOptions

    def __init__(self, options: Any = None, model: ReturnModel | None = None) -> None:
        super().__init__(options)
        o = self.options
        self.model = model if model is not None else ReturnModel(o.window, o.refit_every, o.prior)
        self._now = 0.0
        self._levels: list[OrderedDict[str, float]] = [OrderedDict() for _ in range(KINDS * LEVELS)]
        self._level_of: dict[str, int] = {}
        self._superseded: OrderedDict[str, None] = OrderedDict()

    def used(self, session: SessionView) -> None:
        self.forget(session.session_id)
        self._now = max(self._now, session.last_used)
        known = self.model.buckets(session)
        self.model.observe(session, known)
        level = round(self.model.log_factor(known) / STEP) + LEVELS // 2
        level = min(max(level, 0), LEVELS - 1) + LEVELS * kind_of(known)
        self._level_of[session.session_id] = level
        self._levels[level][session.session_id] = session.last_used

    def forget(self, session_id: str) -> None:
        self._superseded.pop(session_id, None)
        if (level := self._level_of.pop(session_id, None)) is not None:
            del self._levels[level][session_id]

    def superseded(self, session_id: str) -> None:
        if session_id in self._level_of:
            self.forget(session_id)
            self._superseded[session_id] = None

    def victims(self) -> Iterator[str]:
        yield from in_order(self._superseded)
        index = self.model.table()
        passed: set[str] = set()
        ends: list[tuple[float, float, int, bool, str]] = []
        """Worth, last use, level, whether from the newest end, and session id of each queue's two ends."""
        queues = {
            (level, newest): in_order(queue, reversed if newest else iter)
            for level, queue in enumerate(self._levels)
            if queue
            for newest in (False, True)
        }

        def push(level: int, newest: bool) -> None:
            session_id = next((key for key in queues[level, newest] if key not in passed), None)
            if session_id is not None:
                last_used = self._levels[level][session_id]
                worth = index[level][bisect_left(AGES, self._now - last_used)]
                heapq.heappush(ends, (worth, last_used, level, newest, session_id))

        for end in queues:
            push(*end)
        while ends:
            _, _, level, newest, session_id = heapq.heappop(ends)
            if session_id in self._levels[level] and session_id not in passed:
                passed.add(session_id)
                yield session_id
            push(level, newest)
