"""Events of an engine, in one stream: changes of sessions, blocks and stores.

Histories of sessions, KV events, metrics, the log and traces subscribe. Subscribers change nothing in the heart. Times
are seconds. Bytes are of all ranks together.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any, TypeAlias

from manthan.codec.fidelity import Fidelity
from manthan.manager.pool import Mark


class DropCause(StrEnum):
    """Reason for dropping compressed blocks.

    BUDGET: no room. REDUNDANT: no room, and the pool has the computed KV. FAILED: unreadable. ABANDONED: used by no
    session. RESET: all KV is void. EXPIRED: too old. RELEASED: by the client's order.
    """

    BUDGET = auto()
    REDUNDANT = auto()
    FAILED = auto()
    ABANDONED = auto()
    RESET = auto()
    EXPIRED = auto()
    RELEASED = auto()


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a session ended.

    tokens, blocks: of the session. seconds: since the request came. found: prompt tokens resident or loaded. lossy:
    found tokens that were decoded, or computed behind decoded ones.
    """

    session_id: str
    tokens: int
    blocks: int
    seconds: float
    found: int
    lossy: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """A session went cold.

    blocks, tokens: of the session. beside: blocks of further KV cache groups at the session's resume points.
    pool_nbytes: of all these blocks in the pool. stored, stored_nbytes: newly saved blocks. cold_nbytes: of all
    compressed blocks. exact: blocks with exact tokens. idle_s: since the last request. took_s: from the first store's
    begin. is_pressed: True if memory was short, False if the session was idle for long enough.
    """

    session_id: str
    blocks: int
    beside: int
    tokens: int
    pool_nbytes: int
    stored: int
    stored_nbytes: int
    cold_nbytes: int
    exact: int
    idle_s: float
    took_s: float
    is_pressed: bool


@dataclass(frozen=True, slots=True)
class Restored:
    """A load ended.

    blocks: number to load. good: number before the first failure. beside: of further KV cache groups. nbytes: of the
    compressed blocks. causes: of failures. request_id: the waiting request; None for a prefetch.
    """

    session_id: str
    blocks: int
    good: int
    beside: int
    nbytes: int
    seconds: float
    causes: Collection[str]
    request_id: str | None


@dataclass(frozen=True, slots=True)
class Lost:
    """A session lost compressed blocks."""

    session_id: str
    blocks: int
    nbytes: int
    cause: DropCause


@dataclass(frozen=True, slots=True)
class Pinned:
    """A session was pinned, or is pinned no more."""

    session_id: str
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class Parent:
    """A client named a session's parent session."""

    session_id: str
    parent: str


@dataclass(frozen=True, slots=True)
class EncodingBegins:
    """Blocks with these marks are about to be encoded."""

    marks: Sequence[Mark]


@dataclass(frozen=True, slots=True)
class BlocksSaved:
    """Every rank has stored these blocks. first: position of the first block in the session; positions are consecutive.

    seconds: for a block on the slowest rank; None if another engine stored the blocks.
    """

    group: int
    block_hashes: Sequence[bytes]
    first: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class BlocksDropped:
    """Blocks leave the tiers."""

    group: int
    block_hashes: Sequence[bytes]
    cause: DropCause


@dataclass(frozen=True, slots=True)
class BlocksTrimmed:
    """Blocks lost all refinements above a level, for lack of room."""

    group: int
    block_hashes: Sequence[bytes]
    level: int


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """A block could not be stored. causes: reasons."""

    causes: Collection[str]


@dataclass(frozen=True, slots=True)
class Overwritten:
    """The pool overwrote needed blocks of sessions before the blocks were saved."""

    blocks: int


@dataclass(frozen=True, slots=True)
class PrefetchHit:
    """A request found the session resident thanks to a prefetch."""

    session_id: str


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A prompt was looked up in a shared store. outcome: found, nothing or unanswered."""

    session_id: str
    outcome: str


@dataclass(frozen=True, slots=True)
class StoreIsUp:
    """A shared store answers, or stopped answering."""

    is_up: bool


FIRST_BLOCKS = 64
"""Number of blocks that a rank measures for its first verdict."""


@dataclass(frozen=True)
class Verdict:
    """Measurement by a rank of the error that codecs add to KV of the model.

    measured: of each lossy codec, the configured codec first; none after a failure. compute_s: model's seconds to
    compute a token of a prompt; 0 if unknown.
    """

    rank: int
    measured: Sequence[Fidelity] = ()
    compute_s: float = 0.0

    def is_slow(self, choice: int) -> bool:
        """True if loading a token in this codec takes longer than computing the token."""
        return 0 < self.compute_s < self.measured[choice].decode_s


@dataclass(frozen=True, slots=True)
class Judged:
    """Decision of the guard: the worst rank's verdict, and the index and name of the codec in use.

    is_new: True if another codec was in use before, or none was judged.
    """

    verdict: Verdict
    choice: int
    codec: str
    is_new: bool

    @property
    def is_slow(self) -> bool:
        """True if the configured codec is faithful, and unused because decoding is slower than computing."""
        return self.choice > 0 and self.verdict.measured[0].is_faithful and self.verdict.is_slow(0)


@dataclass(frozen=True, slots=True)
class Unjudged:
    """The guard has no verdict any more."""


Event: TypeAlias = (
    Turn
    | Evicted
    | Restored
    | Lost
    | Pinned
    | Parent
    | EncodingBegins
    | BlocksSaved
    | BlocksDropped
    | BlocksTrimmed
    | StoreFailed
    | Overwritten
    | PrefetchHit
    | LookedUp
    | StoreIsUp
    | Judged
    | Unjudged
)


class Events:
    """Stream of events. Subscribers are called in the order of their subscription."""

    def __init__(self) -> None:
        self._subscribers: list[tuple[Callable[[Any], None], tuple[type, ...]]] = []

    def subscribe(self, take: Callable[[Any], None], *kinds: type) -> None:
        """Have `take` called with each event from now on, of the given kinds or of all."""
        self._subscribers.append((take, kinds or (object,)))

    def __call__(self, event: Event) -> None:
        for take, kinds in self._subscribers:
            if isinstance(event, kinds):
                take(event)
