"""Templates that leave out what the model thought: answers that no later prompt has are not saved."""

import pytest
from integrity import check_integrity
from talks import SHAPE, Talks, last_words, text_of

from manthan.manager.events import DropCause
from manthan.manager.session.blocks import GroupShape, MemoryShape
from manthan.manager.session.manager import SessionManager

ENOUGH = SessionManager.enough
THOUGHT = "think1 think2"


def converse(talks: Talks, turns: int, thought: str = THOUGHT, who: str | None = "agent") -> str:
    """Have a session whose prompts leave thoughts out, and return its last prompt."""
    prompt = f"{who} sys"
    for at in range(turns):
        prompt += f" said{at} user{at}"
        talks.finish(talks.start(prompt, who), f"{prompt} {thought}".strip())
        check_integrity(talks.manager, talks.driver)
    return prompt


def stored(talks: Talks, who: str) -> str:
    """Return the last words of what is stored of a session with a thought."""
    prompt = converse(talks, 1, who=who)
    words = last_words(talks.rest()).split()
    assert set(talks.texts()[who].split()) >= set(prompt.split())
    return " ".join(words)


@pytest.mark.parametrize("turns", [ENOUGH, ENOUGH + 1])
def test_thoughts_are_not_saved_once_every_prompt_has_left_them_out(turns: int) -> None:
    talks = Talks(500, blocks=500)
    converse(talks, turns)
    talks.rest()
    assert stored(talks, "new") == "new sys said0 user0" + (f" {THOUGHT}" if turns == ENOUGH else "")
    assert talks.states()["new"] == "cold"
    assert talks.resident(f"new sys said0 user0 {THOUGHT}") == 6, "they stay in the pool while there is room"


def test_they_are_overwritten_before_what_is_to_be_saved_and_no_reason_to_save_anything() -> None:
    talks = Talks(500, blocks=20)
    talks.manager._left_out = ENOUGH
    talks.finish(talks.start("old1 old2 old3", "old"))
    prompt = converse(talks, 1, who="new")
    assert talks.driver.runway.length(20) == 13
    talks.overwrite(13)
    assert (talks.resident("old1 old2 old3"), talks.resident(f"{prompt} {THOUGHT}")) == (3, 4)


@pytest.mark.parametrize("turns", [ENOUGH - 1, 3 * ENOUGH])
def test_one_answer_that_comes_back_ends_the_belief(turns: int) -> None:
    talks = Talks(900, blocks=900)
    prompt = converse(talks, turns)
    talks.talk(f"{prompt} {THOUGHT} more end", "agent")
    converse(talks, ENOUGH, who="second")
    talks.rest()
    assert stored(talks, "new") == f"new sys said0 user0 {THOUGHT}"


def test_an_answer_that_comes_back_is_overwritten_no_sooner_than_other_unsaved_blocks() -> None:
    talks = Talks(500, blocks=500)
    prompt = converse(talks, ENOUGH + 1)
    assert f"{prompt} {THOUGHT}" not in {text_of(block.block_hash) for block in talks.pool.unsaved(500)}
    talks.finish(talks.start(f"{prompt} {THOUGHT} more", "agent"))
    unsaved = {text_of(block.block_hash) for block in talks.pool.unsaved(500)}
    assert unsaved >= {f"{prompt} think1", f"{prompt} {THOUGHT}"}


def test_neither_an_earlier_change_nor_the_same_prompt_again_tells_anything() -> None:
    talks = Talks(900, blocks=900)
    for at in range(2 * ENOUGH):
        who = f"agent{at}"
        talks.talk(f"{who} a b c think", who)
        request = talks.start(f"{who} a b c", who)
        talks.finish(request, f"{who} a b c other")
        talks.manager.cut(talks.session(who), 2, DropCause.BUDGET)
        talks.finish(talks.start(f"{who} a x y z u v", who))
    talks.rest()
    assert stored(talks, "new") == f"new sys said0 user0 {THOUGHT}"


def test_requests_of_a_session_at_once_tell_nothing() -> None:
    talks = Talks()
    talks.talk("agent a think1", "agent")
    requests = [talks.start(f"agent a think1 b{more}", "agent") for more in ("", " c")]
    assert talks.manager._left_out == 0
    for request in requests:
        talks.finish(request)


@pytest.mark.parametrize("hints", [{"pin": True}, {"keep": [{"from": 0, "to": 99, "seconds": 9}]}])
def test_a_session_that_its_client_keeps_keeps_its_answers(hints: dict[str, object]) -> None:
    talks = Talks(900, blocks=900)
    talks.manager._left_out = ENOUGH
    talks.talk("kept a think", "kept", **hints)
    assert last_words(talks.rest()) == "kept a think"


def test_a_session_that_would_be_too_short_keeps_its_answer() -> None:
    talks = Talks(min_tokens=48)
    talks.manager._left_out = ENOUGH
    talks.finish(talks.start("a b", "short"), "a b think1 think2")
    assert last_words(talks.rest()) == "a b think1 think2"


def test_the_policy_is_told_what_was_left_out_whether_it_was_saved_or_not() -> None:
    talks = Talks(900, blocks=900)
    told = set()
    prompt = converse(talks, 1)
    for at in range(2 * ENOUGH):
        prompt += f" more{at}"
        request = talks.start(prompt, "agent")
        told.add((talks.session("agent").left_tokens, talks.session("agent").added_tokens))
        talks.finish(request, f"{prompt} {THOUGHT}")
    assert told == {(2 * 16, 17)}


def test_with_resume_points_a_session_ends_at_that_of_its_prompt() -> None:
    shape = MemoryShape({0: SHAPE.groups[0], 1: GroupShape(16, 500, {0: 100})})
    talks = Talks(900, blocks=900, shape=shape)
    talks.manager._left_out = ENOUGH
    points = [talks.point(text, {1: 1}) for text in ("a b c think1", "a b c")]
    talks.finish(talks.start("a b c", "agent"), "a b c think1", points)
    talks.rest()
    assert (talks.texts(), talks.states()) == ({"agent": "a b c"}, {"agent": "cold"})
    assert talks.saved(1) == {"a b c"}
    check_integrity(talks.manager, talks.driver)
