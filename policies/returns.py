"""Our own: who is least likely to come back soon goes first."""

import heapq
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field

from manthan.policies.base import EvictionPolicy, PolicyOptions, SessionView, in_order
from manthan.policies.return_model import AGES, KINDS, ReturnModel, kind_of

STEP, LEVELS = 0.5, 17
LOG_FACTORS = STEP * np.arange(-(LEVELS // 2), LEVELS // 2 + 1, dtype=np.float64)
"""Sessions are kept by the logarithm of their return's factor, in steps."""


class ReturnsOptions(PolicyOptions):
    """How it learns."""

    window: int = Field(default=4096, ge=64, le=1 << 20, description="a number of requests to learn from, 64 or more")
    refit_every: int = Field(
        default=64, ge=1, description="a number of requests between two estimates, at least, 1 or more"
    )
    prior: float = Field(default=8.0, gt=0, description="a number of returns above 0")


class Returns(EvictionPolicy):
    """Predicts from kind and history when a session returns, and keeps those that pay most for their room.

    Most sessions never return, and the others do so after times that have a shape. A model (see return_model) learns
    both online: from how many requests a session had, what the last one added, how long the answer was, the pause
    before it, how long the session is, whether it went on from the middle of another, and when the client said that it
    would be back, which counts for as much as was true of it before. What a session is worth is the Gittins index of
    waiting for it: returns per second of room, at the best moment to give up.

    Sessions of one kind and of about the same factor (a level) share a queue, in which only age tells them apart; the
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
        self._index: list[list[float]] = []
        self._version = -1

    @classmethod
    def family(cls, options: Any = None) -> Callable[[], Self]:
        first = cls(options)
        return lambda: cls(options, first.model)

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
        if self._version != self.model.version:
            self._version, self._index = self.model.version, self.model.table(LOG_FACTORS)
        ends = list(self._ends())
        heapq.heapify(ends)
        queues: dict[tuple[int, bool], Iterator[str]] = {}
        passed: set[str] = set()
        while ends:
            _, _, level, newest, session_id = heapq.heappop(ends)
            queue = self._levels[level]
            if session_id in queue and session_id not in passed:
                passed.add(session_id)
                yield session_id
            rest = queues.setdefault((level, newest), in_order(queue, reversed if newest else iter))
            following = next((key for key in rest if key not in passed), None)
            if following is not None:
                last_used = queue[following]
                heapq.heappush(ends, (self._worth(level, last_used), last_used, level, newest, following))

    def _ends(self) -> Iterator[tuple[float, float, int, bool, str]]:
        """The oldest and the newest of each queue: its worth, when it was used, the level, whether it is the newest."""
        for level, queue in enumerate(self._levels):
            if queue:
                oldest, newest = next(iter(queue)), next(reversed(queue))
                yield self._worth(level, queue[oldest]), queue[oldest], level, False, oldest
                if newest != oldest:
                    yield self._worth(level, queue[newest]), queue[newest], level, True, newest

    def _worth(self, level: int, last_used: float) -> float:
        return self._index[level][bisect_left(AGES, self._now - last_used)]
