"""What is kept of what happened to sessions, and how much of it."""

import pytest
from engine import Engine

from manthan.manager.lives import EVENTS_A_SESSION, EventKind, Lives
from manthan.manager.observer import Restored
from manthan.manager.sessions.session import News, NewsKind


@pytest.fixture
def engine() -> Engine:
    return Engine()


def told(engine: Engine, lives: Lives) -> None:
    """What happened since the last call."""
    for eviction in engine.manager.take_evictions():
        lives.evicted(eviction)
    for news in engine.manager.take_news():
        lives.happened(news)


def lives_of(engine: Engine, most: int = 100) -> Lives:
    return Lives(engine.manager.table, 16, lambda: engine.now, most)


def test_a_life_is_told_in_order_with_numbers_and_words(engine: Engine) -> None:
    lives = lives_of(engine)
    engine.talk("a one two", "a")
    told(engine, lives)
    engine.evict()
    told(engine, lives)
    engine.now = 30.0
    lives.restored(Restored("a", 3, 2, 250, 0.125, ["missing"], "r"))
    lives.restored(Restored("a", 3, 3, 300, 0.5, []))
    lives.happened(News("a", NewsKind.DROPPED, blocks=1, nbytes=100, cause="budget"))
    lives.happened(News("a", NewsKind.PINNED))
    life = lives.of("a")
    assert [(event.kind, event.at) for event in life] == [
        ("turn", 0.0),
        ("evicted", 10.0),
        *((kind, 30.0) for kind in ("restored", "prefetched", "dropped", "pinned")),
    ]
    assert [event.text for event in life] == [
        "A request ended after 0 s with 48 tokens; 0 were not computed.",
        "Went cold in 0 s: 48 tokens, 300B of codes (3 of 3 blocks encoded).",
        "Came back in 0.125 s: 32 tokens out of 250B of codes (missing).",
        "Came back before a request, in 0.5 s: 48 tokens out of 300B of codes.",
        "Lost 100B of codes, of 16 tokens (budget).",
        "Was pinned.",
    ]
    assert (life[2].saved_tokens, life[2].tokens, life[2].blocks, life[2].bytes) == (32, 32, 2, 250)
    assert life[3].saved_tokens is None


def test_every_kind_of_news_has_words(engine: Engine) -> None:
    lives = lives_of(engine)
    engine.talk("a one two", "a")
    for kind in NewsKind:
        lives.happened(News("a", kind))
    assert [event.kind for event in lives.of("a")] == [EventKind(kind) for kind in NewsKind]
    assert all(event.text.endswith(".") for event in lives.of("a"))


def test_a_life_has_no_more_than_so_many_events(engine: Engine) -> None:
    lives = lives_of(engine, most=1000)
    for _ in range(EVENTS_A_SESSION + 5):
        engine.now += 1.0
        engine.talk("a one two", "a")
        told(engine, lives)
    life = lives.of("a")
    assert (len(life), len(lives)) == (EVENTS_A_SESSION, EVENTS_A_SESSION)
    assert (life[0].at, life[-1].at) == (6.0, EVENTS_A_SESSION + 5.0)


def test_beyond_the_bound_the_life_of_who_was_quiet_for_longest_goes(engine: Engine) -> None:
    lives = lives_of(engine, most=5)
    for name in ("a", "b", "a", "c", "a", "c"):
        engine.talk(f"{name} one", name)
        told(engine, lives)
    assert [len(lives.of(name)) for name in ("a", "b", "c")] == [3, 0, 2]
    assert len(lives) == 5


def test_nobody_is_told_of_a_session_that_had_the_same_name_before(engine: Engine) -> None:
    lives = lives_of(engine)
    engine.talk("a one two", "a")
    told(engine, lives)
    engine.manager.steer("release", engine.session("a"), engine.now)
    told(engine, lives)
    assert lives.of("a") == []
    engine.now = 3.0
    engine.talk("x one", "a")
    assert lives.of("a") == []
    told(engine, lives)
    assert [event.at for event in lives.of("a")] == [3.0]
    assert len(lives) == 1


def test_nothing_is_left_of_sessions_whose_blocks_were_overwritten(engine: Engine) -> None:
    """There is no news of these: vLLM needed the room before they were encoded."""
    lives = lives_of(engine, most=10_000)
    for number in range(100):
        engine.talk(f"{number} one two", f"session-{number}")
        told(engine, lives)
        engine.sweep()
        for key in engine.spill():
            engine.manager.lost(key, engine.now)
        told(engine, lives)
    assert not engine.manager.table.by_id
    assert len(lives) == 0
