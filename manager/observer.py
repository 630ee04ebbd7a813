"""Who is told what happens: metrics and the log in an engine, a tally in the simulator."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from manthan.manager.sessions.marks import Mark
from manthan.manager.sessions.session import Drop, Eviction, MemoryShape, News
from manthan.manager.work import Load, LoadResult, Name, SpillResult, Verdict


class Restored(NamedTuple):
    """A restore, or a prefetch, that has ended: so many blocks of its chain are hot again; `causes` of what failed.

    beside: blocks of other KV cache groups that came back with them. request_id: for whom; of a prefetch our own.
    """

    session_id: str
    blocks: int
    good: int
    answers: Sequence[LoadResult]
    causes: Collection[str]
    is_prefetch: bool = False
    beside: int = 0
    request_id: str = ""

    @classmethod
    def of(
        cls, session_id: str, shape: MemoryShape, load: Load, answers: Sequence[LoadResult], failed: Mapping[Name, str]
    ) -> "Restored":
        """failed: causes by block. What is before the first that failed came back, or, with windows or states,
        nothing."""
        group = shape.main_group
        blocks = sum(len(part.keys) for part in load.parts if part.group == group)
        good, beside = blocks, load.blocks - blocks
        if failed:
            chain = ((group, key) for part in load.parts if part.group == group for key in part.keys)
            good = next((at for at, name in enumerate(chain) if name in failed), blocks)
        if shape.beside and failed:
            good = beside = 0
        causes = list(failed.values())
        return cls(session_id, blocks, good, answers, causes, load.is_prefetch, beside, load.request_id)


class Judgement(NamedTuple):
    """Decision of the guard: the worst rank's verdict, the place among its codecs and the name of the codec in use.

    is_new: True if another codec was in use before, or none was judged.
    """

    verdict: Verdict
    place: int
    codec: str
    is_new: bool

    @property
    def is_slow(self) -> bool:
        """True if the configured codec is faithful, and not used because the model computes faster than it decodes."""
        return self.place > 0 and self.verdict.measured[0].is_faithful and self.verdict.is_slow(0)


class Observer:
    """Looks on; what is not overridden is of no interest."""

    def judged(self, judgement: Judgement | None) -> None:
        """Every rank has measured what codecs do to the model's KV; None if there is no verdict any more."""

    def spilled(self, answers: Sequence[SpillResult]) -> None:
        """Every rank has stored a block."""

    def encodes(self, marks: Sequence[Mark]) -> None:
        """Blocks of these marks are about to be encoded."""

    def served_lossy(self, tokens: int) -> None:
        """A request has ended; so many of its cached tokens were decoded, or computed behind decoded ones."""

    def not_spilled(self, causes: Collection[str]) -> None:
        """A block could not be stored."""

    def overwritten(self, blocks: int) -> None:
        """So many blocks that are needed were overwritten before they were encoded."""

    def evicted(self, eviction: Eviction) -> None:
        """A session went cold."""

    def happened(self, news: News) -> None:
        """Something else happened to a session."""

    def dropped(self, drop: Drop) -> None:
        """Codes left the cold store."""

    def restored(self, restored: Restored) -> None:
        """Blocks came back."""

    def prefetch_hit(self) -> None:
        """A prefetched session's request found it hot."""

    def looked_up(self, outcome: str) -> None:
        """A prompt was looked up in a shared store: found, nothing, unanswered."""

    def arrived(self, session_id: str) -> None:
        """A lookup has found blocks of the session, which a request of it can load."""

    def store_answers(self, is_up: bool) -> None:
        """Whether the cold store answers."""
