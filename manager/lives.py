"""What happened to each session lately, for those who look at one: a ring of events each, and a bound on all."""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any, NamedTuple

from pydantic import ByteSize

from manthan.manager.observer import Observer, Restored
from manthan.manager.sessions.session import Eviction, News
from manthan.manager.sessions.table import SessionTable

EVENTS_A_SESSION = 64
MOST_EVENTS = 65_536
"""Of all sessions together. Beyond them goes the life of the session to which nothing happened for longest."""


class EventKind(StrEnum):
    TURN = auto()
    EVICTED = auto()
    RESTORED = auto()
    PREFETCHED = auto()
    DROPPED = auto()
    PINNED = auto()
    UNPINNED = auto()
    RELEASED = auto()


@dataclass(frozen=True, slots=True)
class Event:
    """at: seconds on the clock of `Lives`. tokens, blocks: of the conversation, or those that went or came back.
    bytes: of codes. seconds: how long it took. saved_tokens: that were not computed. text: a short sentence."""

    at: float
    kind: EventKind
    text: str
    tokens: int | None = None
    blocks: int | None = None
    bytes: int | None = None
    seconds: float | None = None
    saved_tokens: int | None = None


class Life(NamedTuple):
    """born: when its session was created, which tells it from another of the same id."""

    born: float
    events: deque[Event]


class Lives(Observer):
    """table: has the sessions that there are. clock: in seconds."""

    def __init__(
        self,
        table: SessionTable,
        block_tokens: int,
        clock: Callable[[], float],
        most: int = MOST_EVENTS,
    ) -> None:
        self._sessions, self._block_tokens, self._clock, self._most = table.by_id, block_tokens, clock, most
        table.forgotten.append(self.forget)
        self._lives: OrderedDict[str, Life] = OrderedDict()
        """By id, the one to which something happened last last."""
        self._count = 0

    def __len__(self) -> int:
        """How many events there are in all."""
        return self._count

    def of(self, session_id: str) -> Sequence[Event]:
        """The oldest first."""
        session, life = self._sessions.get(session_id), self._lives.get(session_id)
        return [] if session is None or life is None or life.born != session.created else list(life.events)

    def evicted(self, eviction: Eviction) -> None:
        tokens, nbytes, seconds = eviction.tokens, eviction.cold_nbytes, eviction.took_s
        note = f"{eviction.encoded} of {eviction.blocks} blocks encoded"
        text = f"Went cold in {seconds:.3g} s: {tokens} tokens, {_size(nbytes)} of codes ({note})."
        self._add(eviction.session_id, EventKind.EVICTED, text, tokens, eviction.blocks, nbytes, seconds)

    def restored(self, restored: Restored) -> None:
        tokens, nbytes, seconds = restored.good * self._block_tokens, restored.nbytes, restored.seconds
        kind = EventKind.PREFETCHED if restored.is_prefetch else EventKind.RESTORED
        when, saved = ("before a request, in", None) if restored.is_prefetch else ("in", tokens)
        note = f" ({', '.join(sorted(set(restored.causes)))})" if restored.causes else ""
        text = f"Came back {when} {seconds:.3g} s: {tokens} tokens out of {_size(nbytes)} of codes{note}."
        self._add(restored.session_id, kind, text, tokens, restored.good, nbytes, seconds, saved)

    def happened(self, news: News) -> None:
        name, kind, blocks = news.session_id, EventKind(news.kind), news.blocks
        match kind:
            case EventKind.TURN:
                found, seconds = news.found, news.seconds
                text = f"A request ended after {seconds:.3g} s with {news.tokens} tokens; {found} were not computed."
                self._add(name, kind, text, news.tokens, blocks, None, seconds, found)
            case EventKind.DROPPED:
                tokens = blocks * self._block_tokens
                text = f"Lost {_size(news.nbytes)} of codes, of {tokens} tokens ({news.cause})."
                self._add(name, kind, text, tokens, blocks, news.nbytes)
            case EventKind.UNPINNED:
                self._add(name, kind, "Is not pinned any more.")
            case _:
                self._add(name, kind, f"Was {kind}.")

    def _add(self, session_id: str, kind: EventKind, text: str, *numbers: Any) -> None:
        """Add an event. numbers: values for the fields after `text`."""
        session = self._sessions.get(session_id)
        if session is None:
            self.forget(session_id)
            return
        life = self._lives.get(session_id)
        if life is None or life.born != session.created:
            self.forget(session_id)
            life = self._lives[session_id] = Life(session.created, deque(maxlen=EVENTS_A_SESSION))
        self._count += len(life.events) < EVENTS_A_SESSION
        life.events.append(Event(self._clock(), kind, text, *numbers))
        self._lives.move_to_end(session_id)
        while self._count > self._most:
            self.forget(next(iter(self._lives)))

    def forget(self, session_id: str) -> None:
        """Drop the events of a session that is gone. There may be no news of that: vLLM may overwrite its blocks."""
        life = self._lives.pop(session_id, None)
        self._count -= len(life.events) if life is not None else 0


def _size(nbytes: int) -> str:
    return ByteSize(nbytes).human_readable()
