"""Events of an engine, in one stream: changes of sessions, of blocks and of the shared tier (Redis).

A saved block is compressed, in a tier such as RAM or a disk. A resume point is a length of a session at which every KV
cache group has the blocks needed to continue. Histories of sessions, KV events, metrics, the log, traces and the driver
subscribe. Times are seconds. Bytes are of all ranks together.
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
    REDUNDANT = auto()  # no room, and the pool still has KV of the block that was computed, not decoded
    FAILED = auto()  # the block cannot be read
    NOT_STORED = auto()  # a rank could not store the block, or gave up storing it
    ABANDONED = auto()  # no session can use the block any more
    RESET = auto()  # all KV is dropped
    EXPIRED = auto()  # the session was not used for `ttl_s` seconds
    RELEASED = auto()  # a client or an operator released the session


class Event(Struct, frozen=True):
    """Base of the events."""


class Turn(Event, frozen=True, tag=True, array_like=True):
    """A request of a session ended."""

    session_id: str
    tokens: int  # number of the session's tokens
    blocks: int  # number of the session's full blocks
    seconds: float  # from the request's arrival to its end
    found: int  # number of the prompt's tokens that were resident or loaded
    lossy: int  # number of found tokens in blocks with the mark DECODED or DERIVED; see `Mark`


class Evicted(Event, frozen=True, tag=True, array_like=True):
    """A session went cold: no request of it runs, and all its full blocks are saved in a tier."""

    session_id: str
    blocks: int  # number of blocks of the main KV cache group, whose block hashes make up the session
    at_points: int  # number of blocks of further KV cache groups at the session's resume points
    tokens: int  # number of tokens in `blocks`
    pool_nbytes: int  # bytes that `blocks` and `at_points` take in the pool
    stored: int  # number of blocks saved since the last request began; the others were saved before
    stored_nbytes: int  # bytes of the `stored` compressed blocks
    cold_nbytes: int  # bytes of the compressed blocks of `blocks` and `at_points`
    exact: int  # number of these `blocks` in which some tokens are kept exact
    idle_s: float  # seconds from the last request's end to the begin of saving
    took_s: float  # seconds from the begin of saving to its end
    is_pressed: bool  # true if blocks were saved because memory was short


class Restored(Event, frozen=True, tag=True, array_like=True):
    """A load ended."""

    session_id: str
    blocks: int  # number of blocks of the main KV cache group to load, or of the session if only points are stored
    good: int  # number of `blocks` before the first failure; after any failure 0 if resume points are needed
    at_points: int  # number of loaded blocks of further KV cache groups
    nbytes: int  # bytes of the compressed blocks
    seconds: float  # duration on the slowest rank
    causes: Collection[str]  # cause of each failure
    request_id: str | None  # id of the request that waited; None for a prefetch


class Lost(Event, frozen=True, tag=True, array_like=True):
    """A session lost compressed blocks. left: number of blocks that it keeps."""

    session_id: str
    blocks: int
    nbytes: int
    cause: DropCause
    left: int


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
    """Blocks are about to be decoded for a request. Their codec has refinements, parts that make decoded KV finer."""

    levels: Sequence[int]  # for each block whose KV the codec has changed, its number of refinements


class BlocksSaved(Event, frozen=True):
    """These consecutive blocks are saved now."""

    group: int
    block_hashes: Sequence[bytes]
    first: int  # position of the first block in the session
    seconds: float | None = None  # mean time of a block on the slowest rank; None if not stored by this engine


class BlocksDropped(Event, frozen=True):
    """Compressed blocks leave the tiers."""

    group: int
    block_hashes: Sequence[bytes]
    cause: DropCause


class BlocksTrimmed(Event, frozen=True):
    """Compressed blocks lost their last refinements, for lack of room."""

    group: int
    block_hashes: Sequence[bytes]
    level: int  # number of refinements left


class StoreFailed(Event, frozen=True):
    """A block could not be stored. causes: the different causes on all ranks, each a label of a metric."""

    causes: Collection[str]


class Overwritten(Event, frozen=True):
    """The pool was found to have overwritten unsaved blocks of a session. blocks: number of these blocks."""

    blocks: int


class GivenUp(Event, frozen=True):
    """Unsaved blocks of a session stay unsaved, because all blocks in the full tiers are worth more."""

    session_id: str
    blocks: int


class PrefetchHit(Event, frozen=True):
    """A request found the session resident thanks to a prefetch."""

    session_id: str


class LookedUp(Event, frozen=True):
    """A prompt's blocks were looked up in the shared tier (Redis). outcome: found, nothing or unanswered."""

    session_id: str
    outcome: str


class StoreIsUp(Event, frozen=True):
    """The shared tier (Redis) has begun to answer, or does not answer any more."""

    is_up: bool


FIRST_BLOCKS = 64  # number of blocks that a rank measures for its first verdict


@dataclass(frozen=True)
class Verdict:
    """Measurement by a rank of the error that codecs add to the model's KV. The guard chooses the codec by it."""

    rank: int
    measured: Sequence[Fidelity] = ()  # for each lossy codec, the coarsest first; empty if the measurement failed
    compute_s: float = 0.0  # seconds that the model takes to compute a token of a prompt; 0 if unknown

    def is_slow(self, choice: int) -> bool:
        """True if decoding a token takes longer than computing it. choice: index of the codec in `measured`."""
        return 0 < self.compute_s < self.measured[choice].decode_s


class Judged(Event, frozen=True):
    """The guard has decided on a codec that all ranks' verdicts allow."""

    verdict: Verdict  # of the worst rank
    choice: int  # index in `Guard`'s choices of the codec used from now on
    codec: str  # name of this codec
    is_new: bool  # true if the previous decision was for another codec, or if none was made with these codecs
    configured: int = 0  # index of the configured codec. A choice before it is no fallback

    @property
    def is_fallback(self) -> bool:
        """True if a codec finer than the configured one is used."""
        return self.choice > self.configured

    @property
    def is_slow(self) -> bool:
        """True if the configured codec is faithful, but not used, because decoding is slower than computing."""
        at = self.configured
        return self.is_fallback and self.verdict.measured[at].is_faithful and self.verdict.is_slow(at)


class Unjudged(Event, frozen=True):
    """The guard has withdrawn its decision, after a failure or with new weights."""


class Events:
    """Stream of events. Subscribers are called in the order of their subscription."""

    def __init__(self) -> None:
        self._subscribers: list[tuple[Callable[[Any], None], tuple[type, ...]]] = []

    def subscribe(self, take: Callable[[Any], None], *kinds: type) -> None:
        """Have `take` called with each later event of the classes `kinds`; of all classes if none is given."""
        self._subscribers.append((take, kinds or (object,)))

    def __call__(self, event: Event) -> None:
        for take, kinds in self._subscribers:
            if isinstance(event, kinds):
                take(event)
