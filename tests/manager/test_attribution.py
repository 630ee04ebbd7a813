"""The session of each request, and what is remembered of sessions that lost their KV or were changed."""

import pytest
from talks import Talks, names

from manthan.manager.events import BlocksDropped, DropCause
from manthan.manager.session import table


@pytest.fixture
def talks() -> Talks:
    return Talks()


@pytest.fixture
def small() -> Talks:
    """Have a tier with room for four blocks: each session that is saved pushes others out."""
    return Talks(capacity=4)


def uses(talks: Talks) -> dict[str, int]:
    return {session_id: talks.session(session_id).uses for session_id in talks.states()}


def push_out(talks: Talks) -> None:
    """Have a session that is as large as the tier, so that all others lose what was saved."""
    talks.rest()
    talks.now += 1
    talks.talk("w x y z", "large")
    talks.rest()
    assert set(talks.texts()) == {"large"}


# -- the session of a request -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turns", "texts"),
    [
        ([("a b c", None), ("a b c d e", None)], {"anonymous-1": "a b c d e"}),
        ([("a b c", None)] * 3, {"anonymous-1": "a b c"}),
        ([("a b", "alice"), ("x y", "bob"), ("a b c d", "alice")], {"alice": "a b c d", "bob": "x y"}),
        ([("a b", "alice"), ("a b c d", None)], {"alice": "a b c d"}),
        ([("a", "alice"), ("a b", "bob"), ("a b c d", None)], {"alice": "a", "bob": "a b c d"}),
        ([("a b", "alice"), ("a b c d", "bob")], {"alice": "a b", "bob": "a b c d"}),
        (
            [("a b", "bob"), ("a b c d", "alice"), ("a b x y", "alice")],
            {"bob": "a b", "alice": "a b c d", "alice~2": "a b x y"},
        ),
        ([("sys a b", "alice")] * 2, {"alice": "sys a b"}),
        ([("sys a b", "alice"), ("sys a c", "alice")], {"alice": "sys a b", "alice~2": "sys a c"}),
        ([("sys a b c d", "s"), ("sys title t", "s")], {"s": "sys a b c d", "s~2": "sys title t"}),
        (
            [("sys p a b", None), ("sys p", None), ("sys p c d", None)],
            {"anonymous-1": "sys p a b", "anonymous-2": "sys p", "anonymous-3": "sys p c d"},
        ),
    ],
)
def test_a_request_continues_its_session(
    talks: Talks, turns: list[tuple[str, str | None]], texts: dict[str, str]
) -> None:
    for text, name in turns:
        talks.talk(text, name)
    assert talks.texts() == texts
    assert sum(uses(talks).values()) >= len(turns)


def test_a_session_that_only_the_answer_tells_is_continued(talks: Talks) -> None:
    first, second = talks.start("a", "alice"), talks.start("a", "alice")
    talks.finish(first, "a b")
    talks.finish(second, "a b c")
    assert talks.texts() == {"alice": "a b c"}


@pytest.mark.parametrize(("text", "texts"), [("a b", []), ("a b c", ["a b c"])])
def test_short_sessions_are_not_tracked(text: str, texts: list[str]) -> None:
    talks = Talks(min_tokens=2 * 16 + 1)
    talks.talk(text)
    assert list(talks.texts().values()) == texts
    assert len(talks.manager.blocks) == len(" ".join(texts).split())


# -- sessions that lost their KV ----------------------------------------------------------------------


def test_a_session_that_comes_back_gets_another_id_if_its_own_is_taken(small: Talks) -> None:
    small.talk("a b", "s")
    push_out(small)
    small.talk("x y", "s")
    small.start("a b c", "s")
    assert uses(small) == {"large": 1, "s": 1, "s~2": 2}


@pytest.mark.parametrize(
    ("name", "tenant", "is_known"), [("s", "", True), (None, "", True), ("other", "", False), ("s", "acme", False)]
)
def test_a_session_without_kv_is_known_by_its_name_or_none(
    small: Talks, name: str | None, tenant: str, is_known: bool
) -> None:
    small.talk("a b", "s")
    push_out(small)
    small.start("a b c", name, tenant)
    assert (uses(small).get("s") == 2) is is_known


def test_the_oldest_sessions_without_kv_are_forgotten(small: Talks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "REMEMBERED", 1)
    for at in range(8):
        small.talk(f"{at} a b c", f"s{at}")
        small.rest()
    for at in range(8):
        small.start(f"{at} a b c d", f"s{at}")
    assert [uses(small)[f"s{at}"] == 2 for at in range(8)] == [False] * 3 + [True] * 5


# -- sessions that were changed -----------------------------------------------------------------------


def test_a_changed_conversation_goes_on_with_its_history(talks: Talks) -> None:
    talks.talk("sys a b", "old")
    talks.talk("sys a b c d", "old")
    talks.now = 7.0
    talks.start("sys a b x")
    changed = talks.session("anonymous-1")
    assert (changed.uses, changed.gap, changed.left_tokens) == (3, 7.0, 2 * 16)
    assert talks.texts()["old"] == "sys a b c d"


# -- answers that come back changed -------------------------------------------------------------------


def test_a_session_whose_thinking_is_left_out_goes_on(talks: Talks) -> None:
    talks.finish(talks.start("sys a b", "s"), "sys a b think1 think2 answer")
    talks.rest()
    request = talks.start("sys a b answer c", "s")
    assert talks.texts() == {"s": "sys a b"}
    assert (talks.session("s").uses, talks.session("s").left_tokens) == (2, 3 * 16)
    assert talks.told(BlocksDropped) == [
        BlocksDropped(0, names("sys a b think1 think2 answer")[3:], DropCause.ABANDONED)
    ]
    talks.finish(request, "sys a b answer c think3 answer2")
    assert talks.texts() == {"s": "sys a b answer c think3 answer2"}


def test_a_longer_prompt_within_the_old_answer_s_block_leaves_the_answer_out(talks: Talks) -> None:
    manager = talks.manager
    manager.request_started("q", names("a b"), "s", 0.0, tokens=35)
    manager.request_finished("q", names("a b think thought"), 0.0, tokens=70)
    manager.request_started("again", names("a b"), "s", 1.0, tokens=35)  # another answer is wanted: both may be
    assert talks.texts() == {"s": "a b think thought"}
    manager.request_finished("again", names("a b other"), 1.0, tokens=50)
    assert talks.texts() == {"s": "a b think thought", "s~2": "a b other"}
    manager.request_started("next", names("a b"), "s", 2.0, tokens=45)
    assert sorted(talks.texts().values()) in (["a b", "a b other"], ["a b", "a b think thought"])


def test_without_a_name_a_changed_answer_may_be_somebody_else_s(talks: Talks) -> None:
    talks.talk("sys a b think")
    talks.talk("sys a b answer c")
    assert talks.texts() == {"anonymous-1": "sys a b think", "anonymous-2": "sys a b answer c"}
    assert uses(talks)["anonymous-2"] == 2, "its history is known nevertheless"


def test_a_session_that_gets_the_id_of_one_that_is_gone_is_somebody_else(talks: Talks) -> None:
    """It is not served what was decoded for that one."""
    owners = set()
    for _ in range(2):
        talks.talk("a b c")
        owners.add(talks.session("anonymous-1").owner)
        talks.manager.forget_session(talks.session("anonymous-1"), DropCause.EXPIRED)
    assert len(owners) == 2
