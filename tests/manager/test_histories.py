"""Histories of sessions: what they say, and how much of it is kept."""

import pytest
from talks import Talks

from manthan.manager import histories
from manthan.manager.events import DropCause, Evicted, Lost, Parent, Pinned, Restored
from manthan.manager.histories import EVENTS_A_SESSION, EventKind, Histories, HistoryEvent


class Looked(Talks):
    """Talks, and histories of their sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.histories = Histories(self.manager, lambda: self.now)
        self.manager.events.subscribe(self.histories)

    def life(self, session_id: str) -> list[HistoryEvent]:
        session = self.manager.table.by_id.get(session_id)
        return [] if session is None else list(self.histories.of(session))


@pytest.fixture
def talks() -> Looked:
    return Looked()


def test_a_life_is_told_in_order_with_numbers_and_words(talks: Looked) -> None:
    talks.talk("a one two", "a")
    talks.rest()
    talks.now = 30.0
    tell = talks.manager.events
    tell(Restored("a", 3, 2, 0, 250, 0.125, ["missing"], "r"))
    tell(Restored("a", 3, 3, 0, 300, 0.5, [], None))
    tell(Lost("a", 1, 100, DropCause.BUDGET, 2))
    tell(Lost("a", 2, 200, DropCause.FAILED, 0))
    tell(Evicted("a", 3, 0, 48, 900, 1, 100, 300, 0, 0.1, 0.5, True))
    tell(Pinned("a", True))
    tell(Pinned("a", False))
    tell(Parent("a", "b"))
    life = talks.life("a")
    assert [(event.kind, event.at) for event in life] == [
        ("turn", 0.0),
        ("evicted", 10.0),
        *(
            (kind, 30.0)
            for kind in ("restored", "prefetched", "dropped", "dropped", "evicted", "pinned", "unpinned", "parent")
        ),
    ]
    assert {event.kind for event in life} == set(EventKind)
    assert [event.text for event in life] == [
        "A request ended after 0 s with 49 tokens; 0 of the prompt were in the cache.",
        "Went cold after 10 s idle: 48 tokens, 300B compressed (3 of 3 blocks encoded ahead).",
        "Came back in 0.125 s: 32 tokens out of 250B (missing).",
        "Came back before a request, in 0.5 s: 48 tokens out of 300B.",
        "Was cut for want of room: its last 16 tokens, 100B compressed, are dropped.",
        "Lost 200B of compressed blocks, 32 tokens (failed).",
        "Memory was short. Went cold after 0.1 s idle: 48 tokens, 300B compressed "
        "(1 of 3 blocks encoded in 0.5 s, the others before).",
        "Was pinned.",
        "Is not pinned any more.",
        "Works for b.",
    ]
    assert (life[2].saved_tokens, life[2].tokens, life[2].blocks, life[2].bytes) == (32, 32, 2, 250)
    assert life[3].saved_tokens is None


def test_a_life_has_a_bounded_number_of_events(talks: Looked) -> None:
    for _ in range(EVENTS_A_SESSION + 5):
        talks.now += 1.0
        talks.talk("a one two", "a")
    life = talks.life("a")
    assert (len(life), talks.histories._count) == (EVENTS_A_SESSION, EVENTS_A_SESSION)
    assert (life[0].at, life[-1].at) == (6.0, EVENTS_A_SESSION + 5.0)


def test_beyond_the_bound_the_life_goes_to_which_nothing_was_added_for_the_longest(
    talks: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histories, "MOST_EVENTS", 5)
    for name in ("a", "b", "a", "c", "a", "c"):
        talks.talk(f"{name} one", name)
    assert [len(talks.life(name)) for name in ("a", "b", "c")] == [3, 0, 2]
    assert talks.histories._count == 5


def test_nobody_is_told_of_a_session_that_had_the_same_name_before(talks: Looked) -> None:
    talks.talk("a one two", "a")
    talks.driver.steer("release", talks.session("a"), talks.now)
    assert talks.histories._count == 0
    talks.now = 3.0
    request = talks.start("x one", "a")
    assert talks.life("a") == []
    talks.finish(request, "x one two")
    assert [event.at for event in talks.life("a")] == [3.0]
    assert talks.histories._count == 1


def test_blocks_that_were_encoded_as_they_came_were_encoded_ahead(talks: Looked) -> None:
    talks.talk("a one two", "a")
    talks.manager.events(Evicted("a", 3, 0, 48, 900, 3, 300, 300, 0, 1.2, 0.0, False))
    assert talks.life("a")[-1].text.endswith("(3 of 3 blocks encoded ahead).")


def test_a_session_that_was_saved_before_it_was_idle_has_nothing_left_to_encode(talks: Looked) -> None:
    talks.talk("a one two", "a")
    talks.manager.events(Evicted("a", 3, 0, 48, 900, 0, 0, 300, 0, 1.2, 0.0, False))
    text = "Went cold after 1.2 s idle: 48 tokens, 300B compressed (no block was left to encode)."
    assert talks.life("a")[-1].text == text
