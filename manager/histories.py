"""Histories of sessions for users: the last events of each session, and at most MOST_EVENTS events in all."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import TypeAlias

from msgspec import msgpack

from manthan.manager.config.resolve import human_bytes
from manthan.manager.events import DropCause, Event, Evicted, Lost, Parent, Pinned, Restored, Turn
from manthan.manager.session.manager import SessionManager
from manthan.manager.session.table import Session

EVENTS_A_SESSION = 64
MOST_EVENTS = 65_536  # of all sessions; the history to which nothing was added for longest is dropped first

Told: TypeAlias = Turn | Evicted | Restored | Lost | Pinned | Parent
"""Events that enter histories. Each is kept as a few dozen bytes, which Python's garbage collector ignores."""
_encode, _decode = msgpack.Encoder().encode, msgpack.Decoder(tuple[float, Told]).decode


class EventKind(StrEnum):
    TURN = auto()
    EVICTED = auto()
    RESTORED = auto()
    PREFETCHED = auto()
    DROPPED = auto()
    PINNED = auto()
    UNPINNED = auto()
    PARENT = auto()


@dataclass(frozen=True, slots=True)
class HistoryEvent:
    """Event of a session, for people.

    at: time on the clock of `Histories`. text: a short sentence. tokens, blocks: number of tokens, and of blocks, that
    the session has after a turn, or that were evicted, restored or dropped. bytes: bytes of compressed blocks. seconds:
    duration. saved_tokens: number of a request's tokens not computed, because they were resident or restored.
    """

    at: float
    kind: EventKind
    text: str
    tokens: int | None = None
    blocks: int | None = None
    bytes: int | None = None
    seconds: float | None = None
    saved_tokens: int | None = None


class Histories:
    """Histories of an engine's sessions, from its stream of events. clock: returns a time in seconds."""

    def __init__(self, manager: SessionManager, clock: Callable[[], float]) -> None:
        self._table, self._block_tokens = manager.table, manager.shape.block_tokens
        self._clock = clock
        self._histories: OrderedDict[str, tuple[bytes, ...]] = OrderedDict()
        """Encoded events by session id; the most recently extended history is last."""
        self._count = 0
        manager.table.gone.append(lambda session: self._forget(session.session_id))

    def of(self, session: Session) -> Sequence[HistoryEvent]:
        """Return a session's last events, the oldest first."""
        return [self._told(*_decode(each)) for each in self._histories.get(session.session_id, ())]

    def __call__(self, event: Event) -> None:
        """Add an event of the stream to the session's history."""
        if not isinstance(event, Told) or event.session_id not in self._table.by_id:
            return
        history = self._histories.get(event.session_id, ())
        self._count += len(history) < EVENTS_A_SESSION
        self._histories[event.session_id] = (*history, _encode((self._clock(), event)))[-EVENTS_A_SESSION:]
        self._histories.move_to_end(event.session_id)
        while self._count > MOST_EVENTS:
            self._forget(next(iter(self._histories)))

    def _told(self, at: float, event: Told) -> HistoryEvent:
        """Return an event as people read it. at: time of the event."""
        match event:
            case Turn(_, tokens, blocks, seconds, found):
                text = f"A request ended after {seconds:.3g} s with {tokens} tokens; "
                text += f"{found} of the prompt were in the cache."
                return HistoryEvent(at, EventKind.TURN, text, tokens, blocks, None, seconds, found)
            case Evicted(_, blocks, tokens=tokens, cold_nbytes=nbytes, took_s=seconds):
                why = "Memory was short. " if event.is_pressed else ""
                before = ", the others before" if event.stored < blocks else ""
                took = f"in {seconds:.3g} s" if seconds >= 5e-4 else "ahead"
                encoded = f"{event.stored} of {blocks} blocks encoded {took}{before}"
                encoded = encoded if event.stored else "no block was left to encode"
                size = f"{tokens} tokens, {human_bytes(nbytes)} compressed"
                text = f"{why}Went cold after {event.idle_s:.3g} s idle: {size} ({encoded})."
                return HistoryEvent(at, EventKind.EVICTED, text, tokens, blocks, nbytes, seconds)
            case Restored(_, _, good, nbytes=nbytes, seconds=seconds):
                tokens, is_prefetch = good * self._block_tokens, event.request_id is None
                saved = None if is_prefetch else tokens
                kind = EventKind.PREFETCHED if is_prefetch else EventKind.RESTORED
                when = "before a request, in" if is_prefetch else "in"
                note = f" ({', '.join(sorted(set(event.causes)))})" if event.causes else ""
                text = f"Came back {when} {seconds:.3g} s: {tokens} tokens out of {human_bytes(nbytes)}{note}."
                return HistoryEvent(at, kind, text, tokens, good, nbytes, seconds, saved)
            case Lost(_, blocks, nbytes, cause):
                size, tokens = human_bytes(nbytes), blocks * self._block_tokens
                text = f"Lost {size} of compressed blocks, {tokens} tokens ({cause})."
                if cause is DropCause.BUDGET:
                    text = f"Was cut for want of room: its last {tokens} tokens, {size} compressed, are dropped."
                return HistoryEvent(at, EventKind.DROPPED, text, tokens, blocks, nbytes)
            case Pinned(_, is_pinned):
                if is_pinned:
                    return HistoryEvent(at, EventKind.PINNED, "Was pinned.")
                return HistoryEvent(at, EventKind.UNPINNED, "Is not pinned any more.")
            case Parent(_, parent):
                return HistoryEvent(at, EventKind.PARENT, f"Works for {parent}.")

    def _forget(self, session_id: str) -> None:
        self._count -= len(self._histories.pop(session_id, ()))
