"""Who is told what happens: metrics and the log in an engine, a tally in the simulator."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from manthan.manager.sessions.session import Drop, Eviction
from manthan.manager.work import LoadResult, SpillResult, Verdict


class Restored(NamedTuple):
    """A restore, or a prefetch, that has ended: so many blocks of its chain are hot again; `causes` of what failed.

    beside: blocks of other KV cache groups that came back with them.
    """

    session_id: str
    blocks: int
    good: int
    answers: Sequence[LoadResult]
    causes: Collection[str]
    is_prefetch: bool = False
    beside: int = 0


class Observer:
    """Looks on; what is not overridden is of no interest."""

    def judged(self, verdict: Verdict) -> None:
        """Every rank has measured what codecs do to the model's KV, and this is the worst that any has found."""

    def spilled(self, answers: Sequence[SpillResult]) -> None:
        """Every rank has stored a block."""

    def not_spilled(self, causes: Collection[str]) -> None:
        """A block could not be stored."""

    def evicted(self, eviction: Eviction) -> None:
        """A session went cold."""

    def dropped(self, drop: Drop) -> None:
        """Codes left the cold store."""

    def restored(self, restored: Restored) -> None:
        """Blocks came back."""

    def prefetch_hit(self) -> None:
        """A prefetched session's request found it hot."""

    def looked_up(self, outcome: str) -> None:
        """A prompt was looked up in a shared store: found, nothing, unanswered."""

    def store_answers(self, is_up: bool) -> None:
        """Whether the cold store answers."""
