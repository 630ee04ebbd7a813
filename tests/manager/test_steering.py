"""What an operator asks of a session."""

from math import inf

import pytest
from integrity import check_empty
from talks import IDLE_AFTER_S, Talks, last_words

from manthan.manager.events import DropCause, Lost, Pinned, Turn
from manthan.manager.session.manager import AFTERWARDS, Shares
from manthan.manager.session.prefetch import PATIENCE


@pytest.fixture
def talks() -> Talks:
    """Return an engine with a session of three blocks. Pinned sessions may take as much."""
    talks = Talks(shares=Shares(pinned=0.03), driver={"prefetch_lead_s": 1.0})
    talks.talk("a one two", "a")
    return talks


def steer(talks: Talks, what: str, seconds: float | None = None, tool: str = "") -> str:
    return talks.driver.steer(what, talks.session("a"), talks.now, seconds, tool)


def loaded(talks: Talks, now: float) -> int:
    """Return how many blocks are prefetched at a time, after the pool has lost all."""
    talks.now = now
    talks.overwrite()
    return sum(map(len, talks.step().loads))


def test_an_idle_session_is_saved_at_once(talks: Talks) -> None:
    assert steer(talks, "evict") == steer(talks, "evict") == ""
    assert last_words(talks.save()) == "a one two"
    assert talks.states() == {"a": "cold"}
    assert (steer(talks, "evict"), talks.save()) == ("", [])


@pytest.mark.parametrize("what", AFTERWARDS)
def test_a_session_with_a_running_request_is_left_alone(talks: Talks, what: str) -> None:
    talks.start("a one two three", "a")
    assert steer(talks, what).startswith("a request of it runs; it can ")
    assert (talks.save(), talks.states(), talks.session("a").expected) == ([], {"a": "active"}, None)


# -- prefetch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("later", "blocks"), [(0.0, 3), (PATIENCE * IDLE_AFTER_S + 0.1, 0)])
def test_a_cold_session_is_prefetched_while_that_is_worth_it(talks: Talks, later: float, blocks: int) -> None:
    talks.rest()
    assert steer(talks, "prefetch") == ""
    assert loaded(talks, talks.now + later) == blocks


def test_nothing_is_prefetched_of_a_model_whose_sessions_cannot_be() -> None:
    talks = Talks()
    talks.talk("a one", "a")
    assert steer(talks, "prefetch") == "sessions of this model cannot be prefetched"


def test_a_session_that_is_expected_back_is_prefetched_in_time(talks: Talks) -> None:
    talks.rest()
    asked = talks.now
    assert steer(talks, "expect", 60.0) == ""
    assert talks.driver.next_deadline == asked + 59
    assert [loaded(talks, asked + seconds) for seconds in (58, 59)] == [0, 3]


def test_what_was_said_last_of_a_return_holds(talks: Talks) -> None:
    talks.rest()
    steer(talks, "expect", 60.0)
    steer(talks, "expect", tool="unknown")
    assert (talks.session("a").expected, talks.driver.next_deadline) == (None, inf)


# -- pins ---------------------------------------------------------------------------------------------


def test_a_pin_ends_when_it_was_to(talks: Talks) -> None:
    assert steer(talks, "pin", 1.0) == ""
    assert talks.driver.next_deadline == 1.0
    for talks.now, is_pinned in ((0.9, True), (1.0, False)):
        talks.step()
        assert talks.session("a").is_pinned is is_pinned
    assert talks.told(Pinned) == [Pinned("a", True), Pinned("a", False)]


def test_the_last_pin_holds_and_each_change_is_told_once(talks: Talks) -> None:
    for what, seconds in (("pin", 5.0), ("pin", None)):
        assert steer(talks, what, seconds) == ""
    talks.rest(100.0)
    assert talks.session("a").is_pinned
    assert steer(talks, "unpin") == steer(talks, "unpin") == ""
    assert talks.told(Pinned) == [Pinned("a", True), Pinned("a", False)]


@pytest.mark.parametrize(("hints", "is_pinned"), [({}, False), ({"pin": True}, True)])
def test_a_pin_for_a_while_lasts_over_turns_and_for_good_if_a_hint_says_so(
    talks: Talks, hints: dict[str, bool], is_pinned: bool
) -> None:
    steer(talks, "pin", 5.0)
    assert talks.talk("a one two", "a", **hints).is_pinned
    talks.rest(6.0)
    assert talks.session("a").is_pinned is is_pinned


# -- release ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["idle", "being saved", "cold"])
def test_a_released_session_is_forgotten(talks: Talks, state: str) -> None:
    talks.holds = state == "being saved"
    if state != "idle":
        talks.now += IDLE_AFTER_S
        talks.step()
    assert steer(talks, "release") == ""
    talks.answer()
    talks.step()
    assert (talks.tier, talks.resident("a one two")) == ({}, 0)
    check_empty(talks.manager)


def test_turns_and_releases_are_told(talks: Talks) -> None:
    talks.now = 2.0
    request = talks.start("a one two three", "a")
    talks.now = 3.5
    talks.finish(request, "a one two three")
    assert talks.told(Turn)[1:] == [Turn("a", tokens=65, blocks=4, seconds=1.5, found=48, lossy=0)]
    talks.rest()
    steer(talks, "release")
    assert talks.told(Lost) == [Lost("a", 4, 400, DropCause.RELEASED, 0)]
