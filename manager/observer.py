"""Who is told what happens: metrics and the log in an engine, a tally in the simulator."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from manthan.manager.sessions.marks import Mark
from manthan.manager.sessions.session import Drop, Eviction, MemoryShape, News
from manthan.manager.transfer import Answers
from manthan.manager.work import Verdict


class Restored(NamedTuple):
    """A restore, or a prefetch, that has ended: so many blocks of its chain are hot again; `causes` of what failed.

    nbytes: of the compressed blocks that were read. beside: blocks of other KV cache groups that came back with them.
    request_id: for whom; None of a prefetch.
    """

    session_id: str
    blocks: int
    good: int
    nbytes: int
    seconds: float
    causes: Collection[str]
    request_id: str | None = None
    beside: int = 0

    @classmethod
    def of(cls, session_id: str, shape: MemoryShape, loads: Answers, request_id: str | None = None) -> "Restored":
        """Restored blocks are those before the first that failed or, with windows or states, none if any failed."""
        group, failed = shape.main_group, loads.failed
        chain = [(group, key) for job in loads.jobs if job.group == group for key in job.block_hashes]
        good, beside = len(chain), sum(map(len, loads.jobs)) - len(chain)
        if failed:
            good = next((at for at, name in enumerate(chain) if name in failed), good)
        if shape.beside and failed:
            good = beside = 0
        causes = list(failed.values())
        return cls(session_id, len(chain), good, loads.nbytes, loads.seconds, causes, request_id, beside)

    @property
    def is_prefetch(self) -> bool:
        """True if no request waited for it."""
        return self.request_id is None


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

    def stored(self, blocks: int, seconds: float) -> None:
        """Every rank has stored so many blocks; each took the slowest rank so long."""

    def encodes(self, marks: Sequence[Mark]) -> None:
        """Blocks of these marks are about to be encoded."""

    def served_lossy(self, tokens: int) -> None:
        """A request has ended; so many of its cached tokens were decoded, or computed behind decoded ones."""

    def not_stored(self, causes: Collection[str]) -> None:
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
