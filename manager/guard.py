"""Choice of the codec by measurements on KV of the served model.

Blocks are encoded with the finest lossy codec until every rank has measured enough blocks, unless an earlier server's
guard has chosen the configured codec on the same weights. Measuring continues, and may change the choice to a finer or
a coarser codec. A recheck computes a restored prompt again, and gives the divergence between the predictions of the
next token behind restored and computed KV. Rechecks can only refuse codecs.
"""

from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from manthan.codec.cpu.exact import EXACT
from manthan.manager.events import Judged, Unjudged, Verdict
from manthan.manager.session.blocks import MemoryShape
from manthan.manager.session.manager import SessionManager

COARSER = 0.8  # a coarser codec replaces the codec in use only if its noise is at most this share of each limit

RECHECKS, MOST_DIVERGENCE = 20, 0.25  # number of last rechecks that count, and limit of their mean divergence in nats


class Choice(NamedTuple):
    """Codec that may be chosen: the sizes of its blocks, and the bytes that such blocks can take in the tiers."""

    shape: MemoryShape
    capacity_nbytes: int


class Guard:
    """Chooses the codec. choices: the configured codec, then finer codecs, and last "exact".

    is_approved: true if an earlier server's guard has chosen the configured codec. It is then used from the start.
    """

    def __init__(
        self, manager: SessionManager, choices: Sequence[Choice], ranks: int, is_approved: bool = False
    ) -> None:
        self._manager, self._choices, self._ranks = manager, list(choices), ranks
        self._finest = len(choices) - 2
        self._verdicts: dict[int, Verdict] = {}
        self._judged: int | None = None
        self._was_offered = False  # true if a codec was offered since the last decision
        self._configured = 0  # index of the configured codec
        self._divergences: deque[float] = deque(maxlen=RECHECKS)
        self._coarsest = 0  # index of the first choice that rechecks have not refused
        self._used = 0 if is_approved else self._finest
        self._use(self._used)

    @property
    def is_exact(self) -> bool:
        """True if blocks are stored exact, because no lossy codec suits the model."""
        return self._used > self._finest

    def answered(self, verdicts: Sequence[Verdict]) -> None:
        """Take verdicts. Given one of each rank, use the coarsest codec that suits all; if one failed, `_unjudge`."""
        lossy = self._finest + 1  # verdicts from before an `offer` lack the offered codec
        self._verdicts.update((one.rank, one) for one in verdicts if len(one.measured) in (0, lossy))
        found = list(self._verdicts.values())
        if len(found) < self._ranks:
            return
        if not all(verdict.measured for verdict in found):
            self._unjudge()
            return
        choice = next((at for at in range(self._coarsest, lossy) if self._may_use(at, found)), lossy)
        worst = max(found, key=lambda verdict: (verdict.is_slow(0), verdict.measured[0].excess))
        was, self._judged = self._judged, choice
        self._use(choice)
        codec = worst.measured[choice].codec if choice <= self._finest else EXACT
        self._manager.events(Judged(worst, choice, codec, choice != was or self._was_offered, self._configured))
        self._was_offered = False

    def offer(self, choice: Choice) -> None:
        """Add a codec coarser than all others. The codec in use stays until all ranks have measured the new codec."""
        self._choices = [choice, *self._choices]
        self._finest, self._used, self._configured = self._finest + 1, self._used + 1, self._configured + 1
        self._coarsest += self._coarsest > 0
        self._judged = None if self._judged is None else self._judged + 1
        self._was_offered = True
        self._verdicts.clear()

    def rechecked(self, divergence: float) -> float | None:
        """Take the divergence that a recheck has measured, in nats.

        If the mean of the last RECHECKS divergences is too large, refuse the codec in use and all coarser ones, and
        return the mean. Else return None. Blocks of an earlier codec, restored later, count too.
        """
        if self._used > self._finest:
            return None
        self._divergences.append(divergence)
        mean = fmean(self._divergences)
        if len(self._divergences) < RECHECKS or mean <= MOST_DIVERGENCE:
            return None
        self._coarsest = self._used + 1
        self._use(self._coarsest)
        self.answered(())
        return mean

    def reset(self) -> None:
        """Forget all measurements and rechecks, because weights may be new."""
        self._divergences.clear()
        self._coarsest = 0
        self._unjudge()

    def _unjudge(self) -> None:
        """Forget all verdicts. Use the finest lossy codec, or "exact" if rechecks have refused all lossy ones."""
        self._verdicts.clear()
        self._judged = None
        self._use(max(self._finest, self._coarsest))
        self._manager.events(Unjudged())

    def _may_use(self, choice: int, found: Sequence[Verdict]) -> bool:
        limit = 1.0 if self._judged is None or choice >= self._judged else COARSER
        noise = max(verdict.measured[choice].excess for verdict in found)
        return noise <= limit and not any(verdict.is_slow(choice) for verdict in found)

    def _use(self, choice: int) -> None:
        if choice != self._used:
            self._divergences.clear()
        self._used = choice
        self._manager.recode(*self._choices[choice], all_exact=choice > self._finest)
