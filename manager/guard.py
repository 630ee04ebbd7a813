"""Choose the codec by what ranks measure of KV of this very model.

Blocks are encoded with the finest lossy codec until every rank has measured enough of them. Measuring goes on after
that, and the choice changes in both directions.
"""

from collections.abc import Sequence
from typing import NamedTuple

from manthan.codec.cpu.exact import EXACT
from manthan.manager.observer import Judgement, Observer
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import MemoryShape
from manthan.manager.work import Verdict

COARSER = 0.8
"""Share of each limit that noise must stay below before a coarser codec takes a finer one's place again."""


class Choice(NamedTuple):
    """A codec that may be used: what blocks weigh in it, and how many bytes of them the cold store holds."""

    shape: MemoryShape
    capacity_nbytes: int


class Guard:
    """Args:
    choices: the configured codec first, then finer ones, "exact" last, where all tokens are kept as they are.
    ranks: number of ranks that answer.
    """

    def __init__(
        self, manager: SessionMemoryManager, choices: Sequence[Choice], ranks: int, observer: Observer
    ) -> None:
        self._manager, self._choices, self._ranks, self._observer = manager, choices, ranks, observer
        self._finest = len(choices) - 2
        self._verdicts: dict[int, Verdict] = {}
        self._judged: int | None = None
        self._use(self._finest)

    def answered(self, verdicts: Sequence[Verdict]) -> None:
        """Take each rank's newest measurement; the worst rank decides."""
        self._verdicts.update((verdict.rank, verdict) for verdict in verdicts)
        found = list(self._verdicts.values())
        if len(found) < self._ranks:
            return
        if not all(verdict.measured for verdict in found):
            self.reset()
            return
        place = next((at for at in range(self._finest + 1) if self._may_use(at, found)), self._finest + 1)
        worst = max(found, key=lambda verdict: (verdict.is_slow(0), verdict.measured[0].excess))
        was, self._judged = self._judged, place
        self._use(place)
        codec = worst.measured[place].codec if place <= self._finest else EXACT
        self._observer.judged(Judgement(worst, place, codec, place != was))

    def reset(self) -> None:
        """Forget what was measured: it failed, or other weights compute from now on."""
        self._verdicts.clear()
        self._judged = None
        self._use(self._finest)
        self._observer.judged(None)

    def _may_use(self, place: int, found: Sequence[Verdict]) -> bool:
        limit = 1.0 if self._judged is None or place >= self._judged else COARSER
        noise = max(verdict.measured[place].excess for verdict in found)
        return noise <= limit and not any(verdict.is_slow(place) for verdict in found)

    def _use(self, place: int) -> None:
        self._manager.recode(*self._choices[place], all_exact=place > self._finest)
