"""Which session a request belongs to, by example."""

import pytest
from engine import SHAPE, Engine

from manthan.manager.sessions.session import SessionState


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.mark.parametrize(
    ("turns", "chains"),
    [
        ([("a b c", None), ("a b c d e", None)], {"anonymous-1": "a b c d e"}),
        ([("a b c", None)] * 3, {"anonymous-1": "a b c"}),
        ([("a b", "alice"), ("x y", "bob"), ("a b c d", "alice")], {"alice": "a b c d", "bob": "x y"}),
        ([("a b", "alice"), ("a b c d", None)], {"alice": "a b c d"}),
        ([("a", "alice"), ("a b", "bob"), ("a b c d", None)], {"alice": "a", "bob": "a b c d"}),
    ],
    ids=["extended", "asked again", "by name", "without its name", "the longest"],
)
def test_a_request_continues_its_session(
    engine: Engine, turns: list[tuple[str, str | None]], chains: dict[str, str]
) -> None:
    for text, name in turns:
        engine.talk(text, name)
    assert engine.chains() == chains
    assert sum(engine.session(name).uses for name in chains) == len(turns)


def test_a_named_prompt_that_is_asked_again_is_not_a_fork_until_it_differs(engine: Engine) -> None:
    engine.talk("sys a b", "alice")
    again = engine.start("sys a", "alice")
    assert engine.session("alice").state is SessionState.HOT
    engine.finish(again, "sys a b")
    assert engine.chains() == {"alice": "sys a b"}
    differs = engine.start("sys a", "alice")
    engine.finish(differs, "sys a c")
    assert sorted(engine.chains().values()) == ["sys a b", "sys a c"]
    engine.start("", "alice")
    assert engine.session("alice").state is SessionState.IDLE


def test_a_fork_is_a_new_session_that_shares_the_prefix(engine: Engine) -> None:
    engine.talk("sys a b", "alice")
    engine.talk("sys a c", "alice")
    engine.talk("sys a d", "alice")
    assert sorted(engine.chains().values()) == ["sys a b", "sys a c", "sys a d"]
    assert "alice" in engine.chains()
    assert len(engine.manager.blocks) == 5
    shared = engine.session("alice").chain[0]
    assert (shared.users, shared.hot, shared.running) == (3, 3, 0)


def test_a_session_found_only_by_the_answer_is_continued(engine: Engine) -> None:
    first, second = engine.start("a", "alice"), engine.start("a", "alice")
    engine.finish(first, "a b")
    engine.finish(second, "a b c")
    assert engine.chains() == {"alice": "a b c"}


def test_requests_of_one_session_at_once_keep_it_hot_until_the_last_ends(engine: Engine) -> None:
    engine.talk("a b", "alice")
    first, second = engine.start("a b c", "alice"), engine.start("a b d", "alice")
    engine.finish(first, "a b c x")
    assert engine.states() == {"alice": "hot"}
    engine.finish(second, "a b c x y")
    assert engine.states() == {"alice": "idle"}
    assert engine.chains() == {"alice": "a b c x y"}


def test_requests_of_one_session_that_go_apart_become_two(engine: Engine) -> None:
    engine.talk("a b", "alice")
    first, second = engine.start("a b c", "alice"), engine.start("a b d", "alice")
    engine.finish(first, "a b c")
    engine.finish(second, "a b d")
    assert sorted(engine.chains().values()) == ["a b c", "a b d"]
    assert engine.manager.table.states == {SessionState.IDLE: 2, SessionState.HOT: 0}


def test_an_abort_with_less_than_the_session_has_changes_nothing(engine: Engine) -> None:
    engine.talk("a b")
    engine.talk("a b c d", "alice")  # another session, of another name, on the way
    engine.finish(engine.start("a b c d e", "alice"), "a b")
    assert engine.chains() == {"anonymous-1": "a b", "alice": "a b c d"}
    assert engine.session("anonymous-1").uses == 1


def test_an_abort_before_anything_was_computed_leaves_no_trace(engine: Engine) -> None:
    request = engine.start("a b c")
    assert engine.manager.table.states[SessionState.HOT] == 1
    engine.finish(request, "")
    assert engine.chains() == {}
    assert len(engine.manager.blocks) == 0
    assert +engine.manager.table.states == {}
    assert engine.manager.next_deadline is None


def test_short_sessions_are_not_tracked() -> None:
    engine = Engine(min_tokens=2 * SHAPE.block_tokens + 1)
    engine.talk("a b")
    assert engine.chains() == {}
    assert len(engine.manager.blocks) == 0
    engine.talk("a b c")
    assert list(engine.chains().values()) == ["a b c"]


def test_conversations_of_one_name_are_told_apart_however_they_come_and_go() -> None:
    engine = Engine()
    for n in (5, 3, 8, 1):
        engine.talk(f"sys t{n} u", "app")
    engine.finish(engine.start("sys t3 u", "app", release=True), "sys t3 u")
    engine.talk("sys t1 u v", "app")
    again = {n: engine.start(f"sys t{n} u", "app") for n in (1, 5, 8)}
    for n, request in again.items():
        [session] = [s for s in engine.manager.table.by_id.values() if request in s.requests]
        assert session.chain[1].key == f"sys t{n}".encode()
    assert sorted(engine.chains().values()) == ["sys t1 u v", "sys t5 u", "sys t8 u"]
