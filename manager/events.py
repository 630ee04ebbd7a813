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
    """Reason for dropping compressed blocks.

    BUDGET: no room. REDUNDANT: no room, and the pool has the computed KV. FAILED: the block cannot be read or stored.
    ABANDONED: no session can use it any more. RESET: all KV is dropped. EXPIRED: past `ttl_s`. RELEASED: on demand.
    """

    BUDGET = auto()
    REDUNDANT = auto()
    FAILED = auto()
    ABANDONED = auto()
    RESET = auto()
    EXPIRED = auto()
    RELEASED = auto()


class Event(Struct, frozen=True):
    """Base of the events."""


class Turn(Event, frozen=True):
    """A request of a session ended.

    tokens, blocks: number of the session's. seconds: time since the request came. found: number of the prompt's tokens
    that were resident or loaded. lossy: number of found tokens that were decoded or derived.
    """

    session_id: str
    tokens: int
    blocks: int
    seconds: float
    found: int
    lossy: int


class Evicted(Event, frozen=True):
    """A session went cold.

    blocks, tokens: number of the session's. beside: number of blocks of further KV cache groups at its resume points.
    pool_nbytes: bytes of all these blocks in the pool. stored, stored_nbytes: number and bytes of newly saved blocks.
    cold_nbytes: bytes of all these blocks, compressed. exact: number of blocks with exact tokens. idle_s: seconds from
    the last request to the begin of the saving. took_s: seconds of the saving. is_pressed: True if memory was short,
    False if the session was idle for long enough.
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


class Restored(Event, frozen=True):
    """A load ended.

    blocks: number of the session's blocks to load. good: number of these before the first failure. beside: number of
    loaded blocks of further KV cache groups. nbytes: bytes of the compressed blocks. causes: causes of failures.
    request_id: the request that waited; None for a prefetch.
    """

    session_id: str
    blocks: int
    good: int
    beside: int
    nbytes: int
    seconds: float
    causes: Collection[str]
    request_id: str | None


class Lost(Event, frozen=True):
    """A session lost compressed blocks."""

    session_id: str
    blocks: int
    nbytes: int
    cause: DropCause


class Pinned(Event, frozen=True):
    """A session was pinned, or is pinned no more."""

    session_id: str
    is_pinned: bool


class Parent(Event, frozen=True):
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
    """Every rank has stored these consecutive blocks. first: position of the first one in the session.

    seconds: time for a block on the slowest rank; None if another engine stored the blocks.
    """

    group: int
    block_hashes: Sequence[bytes]
    first: int
    seconds: float | None = None


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
    """Measurement by a rank of the error that codecs add to the model's KV.

    measured: for each lossy codec, the configured one first; empty if it failed. compute_s: seconds in which the model
    computes a token of a prompt; 0 if unknown.
    """

    rank: int
    measured: Sequence[Fidelity] = ()
    compute_s: float = 0.0

    def is_slow(self, choice: int) -> bool:
        """True if loading a token in this codec takes longer than computing the token."""
        return 0 < self.compute_s < self.measured[choice].decode_s


class Judged(Event, frozen=True):
    """The guard has decided on a codec, by the verdict of the worst rank.

    choice, codec: index and name of the codec from now on. is_new: True if it differs from the one before, or if this
    is the first decision.
    """

    verdict: Verdict
    choice: int
    codec: str
    is_new: bool

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
