"""What happened to each session lately, for those who look at one: a ring of events each, and a bound on all."""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from enum import StrEnum, auto
from typing import NamedTuple

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


class Event(NamedTuple):
    """at: seconds on the clock of `Lives`. tokens, blocks: of the conversation, or those that went or came back.
    nbytes: of codes. seconds: how long it took. saved: tokens that were not computed. note: a few words more."""

    at: float
    kind: EventKind
    tokens: int | None = None
    blocks: int | None = None
    nbytes: int | None = None
    seconds: float | None = None
    saved: int | None = None
    note: str = ""


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
        self._add(
            eviction.session_id,
            EventKind.EVICTED,
            tokens=eviction.tokens,
            blocks=eviction.blocks,
            nbytes=eviction.cold_nbytes,
            seconds=eviction.took_s,
            note=f"{eviction.encoded} of {eviction.blocks} blocks encoded",
        )

    def restored(self, restored: Restored) -> None:
        tokens = restored.good * self._block_tokens
        self._add(
            restored.session_id,
            EventKind.PREFETCHED if restored.is_prefetch else EventKind.RESTORED,
            tokens=tokens,
            blocks=restored.good,
            nbytes=sum(answer.nbytes for answer in restored.answers),
            seconds=max((answer.seconds for answer in restored.answers), default=0.0),
            saved=None if restored.is_prefetch else tokens,
            note=", ".join(sorted(set(restored.causes))),
        )

    def happened(self, news: News) -> None:
        kind = EventKind(news.kind)
        if kind is EventKind.TURN:
            self._add(
                news.session_id, kind, tokens=news.tokens, blocks=news.blocks, seconds=news.seconds, saved=news.found
            )
        elif kind is EventKind.DROPPED:
            tokens = news.blocks * self._block_tokens
            self._add(news.session_id, kind, tokens=tokens, blocks=news.blocks, nbytes=news.nbytes, note=news.cause)
        else:
            self._add(news.session_id, kind)

    def _add(
        self,
        session_id: str,
        kind: EventKind,
        tokens: int | None = None,
        blocks: int | None = None,
        nbytes: int | None = None,
        seconds: float | None = None,
        saved: int | None = None,
        note: str = "",
    ) -> None:
        session = self._sessions.get(session_id)
        if session is None:
            self.forget(session_id)
            return
        life = self._lives.get(session_id)
        if life is None or life.born != session.created:
            self.forget(session_id)
            life = self._lives[session_id] = Life(session.created, deque(maxlen=EVENTS_A_SESSION))
        self._count += len(life.events) < EVENTS_A_SESSION
        life.events.append(Event(self._clock(), kind, tokens, blocks, nbytes, seconds, saved, note))
        self._lives.move_to_end(session_id)
        while self._count > self._most:
            self.forget(next(iter(self._lives)))

    def forget(self, session_id: str) -> None:
        """Drop the events of a session that is gone. There may be no news of that: vLLM may overwrite its blocks."""
        life = self._lives.pop(session_id, None)
        self._count -= len(life.events) if life is not None else 0


def in_words(event: Event) -> str:
    """A short sentence."""
    tokens, seconds = f"{event.tokens} tokens", f"{event.seconds or 0:.3g} s"
    nbytes, note = ByteSize(event.nbytes or 0).human_readable(), f" ({event.note})" if event.note else ""
    sentences = {
        EventKind.TURN: f"A request ended after {seconds} with {tokens}; {event.saved} were not computed.",
        EventKind.EVICTED: f"Went cold in {seconds}: {tokens}, {nbytes} of codes{note}.",
        EventKind.RESTORED: f"Came back in {seconds}: {tokens} out of {nbytes} of codes{note}.",
        EventKind.PREFETCHED: f"Came back before a request, in {seconds}: {tokens} out of {nbytes} of codes{note}.",
        EventKind.DROPPED: f"Lost {nbytes} of codes, of {tokens}{note}.",
        EventKind.PINNED: "Was pinned.",
        EventKind.UNPINNED: "Is not pinned any more.",
        EventKind.RELEASED: "Was released.",
    }
    return sentences[event.kind]
