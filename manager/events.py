"""Events of an engine, in one stream: changes of sessions, blocks and stores.

Histories of sessions, KV events, metrics, the log, traces and the driver subscribe. Times are seconds. Bytes are of all
ranks together.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any

from msgspec import Struct

from manthan.codec.fidelity import Fidelity
from manthan.manager.pool import Mark


class DropCause(StrEnum):
    """Reason for dropping compressed blocks."""

    BUDGET = auto()  # no room
    REDUNDANT = auto()  # no room, and the pool has the computed KV
    FAILED = auto()  # the block cannot be read or stored
    ABANDONED = auto()  # no session can use the block any more
    RESET = auto()  # all KV is dropped
    EXPIRED = auto()  # past `ttl_s`
    RELEASED = auto()  # on demand


class Event(Struct, frozen=True):
    """Base of the events."""


class Turn(Event, frozen=True, tag=True, array_like=True):
    """A request of a session ended."""

    session_id: str
    tokens: int  # of the session
    blocks: int  # of the session
    seconds: float  # since the request came
    found: int  # number of the prompt's tokens that were resident or loaded
    lossy: int  # number of found tokens that were decoded or derived


class Evicted(Event, frozen=True, tag=True, array_like=True):
    """A session went cold."""

    session_id: str
    blocks: int  # of the session
    beside: int  # number of blocks of further KV cache groups at the session's resume points
    tokens: int  # of the session
    pool_nbytes: int  # of all these blocks in the pool
    stored: int  # number of newly saved blocks
    stored_nbytes: int
    cold_nbytes: int  # of all these blocks, compressed
    exact: int  # number of blocks with exact tokens
    idle_s: float  # seconds from the last request to the begin of the saving
    took_s: float  # seconds of the saving
    is_pressed: bool  # true if memory was short, false if the session was idle for long enough


class Restored(Event, frozen=True, tag=True, array_like=True):
    """A load ended."""

    session_id: str
    blocks: int  # number of the session's blocks to load
    good: int  # number of these before the first failure
    beside: int  # number of loaded blocks of further KV cache groups
    nbytes: int  # of the compressed blocks
    seconds: float
    causes: Collection[str]  # of failures
    request_id: str | None  # of the request that waited; None for a prefetch


class Lost(Event, frozen=True, tag=True, array_like=True):
    """A session lost compressed blocks."""

    session_id: str
    blocks: int
    nbytes: int
    cause: DropCause


class Pinned(Event, frozen=True, tag=True, array_like=True):
    """A session was pinned, or is pinned no more."""

    session_id: str
    is_pinned: bool


class Parent(Event, frozen=True, tag=True, array_like=True):
    """A client named a session's parent session."""

    session_id: str
    parent: str


class EncodingBegins(Event, frozen=True):
    """Blocks with these marks are about to be encoded."""

    marks: Sequence[Mark]


class Loading(Event, frozen=True):
    """Blocks of a codec with refinements, at these levels, are about to be decoded for a request."""

    levels: Sequence[int]


class BlocksSaved(Event, frozen=True):
    """Every rank has stored these consecutive blocks."""

    group: int
    block_hashes: Sequence[bytes]
    first: int  # position of the first one in the session
    seconds: float | None = None  # for a block on the slowest rank; None if another engine stored the blocks


class BlocksDropped(Event, frozen=True):
    """Blocks leave the tiers."""

    group: int
    block_hashes: Sequence[bytes]
    cause: DropCause


class BlocksTrimmed(Event, frozen=True):
    """Blocks lost all refinements above a level, for lack of room."""

    group: int
    block_hashes: Sequence[bytes]
    level: int


class StoreFailed(Event, frozen=True):
    """A block could not be stored. causes: causes on the ranks, which are labels of a metric."""

    causes: Collection[str]


class Overwritten(Event, frozen=True):
    """The pool was found to have overwritten blocks of a session before they were saved. blocks: their number."""

    blocks: int


class GivenUp(Event, frozen=True):
    """Unsaved blocks of a session stay unsaved, because all blocks in the full tiers are worth more."""

    session_id: str
    blocks: int


class PrefetchHit(Event, frozen=True):
    """A request found the session resident thanks to a prefetch."""

    session_id: str


class LookedUp(Event, frozen=True):
    """A prompt was looked up in a shared store. outcome: found, nothing or unanswered."""

    session_id: str
    outcome: str


class StoreIsUp(Event, frozen=True):
    """A shared store answers, or stopped answering."""

    is_up: bool


FIRST_BLOCKS = 64  # number of blocks that a rank measures for its first verdict


@dataclass(frozen=True)
class Verdict:
    """Measurement by a rank of the error that codecs add to the model's KV."""

    rank: int
    measured: Sequence[Fidelity] = ()  # for each lossy codec, the configured one first; empty if it failed
    compute_s: float = 0.0  # seconds in which the model computes a token of a prompt; 0 if unknown

    def is_slow(self, choice: int) -> bool:
        """True if loading a token in this codec takes longer than computing the token."""
        return 0 < self.compute_s < self.measured[choice].decode_s


class Judged(Event, frozen=True):
    """The guard has decided on a codec, by the verdict of the worst rank."""

    verdict: Verdict
    choice: int  # index of the codec from now on
    codec: str  # name of that codec
    is_new: bool  # true if it differs from the one before, or if this is the first decision

    @property
    def is_slow(self) -> bool:
        """True if the configured codec is faithful, but not used, because decoding is slower than computing."""
        return self.choice > 0 and self.verdict.measured[0].is_faithful and self.verdict.is_slow(0)


class Unjudged(Event, frozen=True):
    """The guard has withdrawn its decision, after a failure or with new weights."""


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
