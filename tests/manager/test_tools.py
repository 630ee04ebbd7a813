"""Tools that sessions wait for: how long they take is learned."""

import pytest
from talks import Talks

from manthan.manager.events import Restored
from manthan.manager.session.hints import ENOUGH_PAUSES, LAST_PAUSES, MOST_TOOLS, SURE_PAUSES, ToolTimes


@pytest.fixture
def talks() -> Talks:
    """Return an engine on which a session has waited for a tool, 4 seconds each time."""
    talks = Talks(driver={"prefetch_lead_s": 1.0})
    turns(talks, [4.0] * ENOUGH_PAUSES)
    return talks


def turns(talks: Talks, pauses: list[float], tool: str = "search", **hints: object) -> None:
    """Have a session wait for a tool for these times, and in the end again."""
    for pause in pauses:
        talks.talk("a one two", "a", tool=tool, **hints)
        talks.now += pause
    talks.talk("a one two", "a", tool=tool, **hints)


def away(talks: Talks, session_id: str) -> float | None:
    """Return for how long a session is expected to be away."""
    session = talks.session(session_id)
    return None if session.expected is None else session.expected - session.last_used


def test_a_tool_takes_the_median_of_its_last_pauses(talks: Talks) -> None:
    turns(talks, [6.0, 5.0, 300.0, 400.0], "tests")
    assert away(talks, "a") == (6.0 + 300.0) / 2


@pytest.mark.parametrize(
    ("tool", "tenant", "expected"), [("search", "", 4.0), ("other", "", None), ("search", "x", None)]
)
def test_other_sessions_of_the_tenant_wait_as_long(
    talks: Talks, tool: str, tenant: str, expected: float | None
) -> None:
    talks.talk("b one two", None, tenant, tool=tool)
    [session_id] = talks.states().keys() - {"a"}
    assert away(talks, session_id) == expected


def test_a_client_s_own_word_counts_more_and_its_pause_is_learned_nevertheless(talks: Talks) -> None:
    turns(talks, [9.0] * LAST_PAUSES, expect_return_s=50)
    assert away(talks, "a") == 50
    talks.talk("a one two", "a", tool="search")
    assert away(talks, "a") == 9.0


def test_only_the_pause_that_follows_is_for_the_tool(talks: Talks) -> None:
    talks.now += 4.0
    for _ in range(LAST_PAUSES):
        talks.talk("a one two", "a")
        assert away(talks, "a") is None
        talks.now += 1000.0
    talks.talk("a one two", "a", tool="search")
    assert away(talks, "a") == 4.0


@pytest.mark.parametrize(
    ("pauses", "is_loaded"),
    [
        ([20.0, 22.0, 24.0, 26.0] * 2, True),
        ([20.0] * (SURE_PAUSES - 1), False),
        ([5.0, 22.0, 24.0, 60.0] * 2, False),
    ],
    ids=["alike", "too few", "too different"],
)
def test_a_session_is_prefetched_for_a_tool_only_if_its_pauses_are_many_and_alike(
    pauses: list[float], is_loaded: bool
) -> None:
    talks = Talks(driver={"prefetch_lead_s": 1.0})
    turns(talks, pauses, "build")
    session = talks.session("a")
    assert session.expected is not None, "policies are told the median in any case"
    talks.rest()
    talks.overwrite()
    talks.now = session.expected - 1.1
    talks.step()
    assert talks.resident("a one two") == 0
    talks.now = session.expected - 0.9
    talks.step()
    assert (talks.resident("a one two") == 3) == is_loaded
    assert [event.session_id for event in talks.told(Restored)] == ["a"] * is_loaded


def test_a_client_s_own_word_is_sure_whatever_the_tool_takes() -> None:
    talks = Talks(driver={"prefetch_lead_s": 1.0})
    turns(talks, [5.0, 60.0] * SURE_PAUSES, "build", expect_return_s=20)
    assert talks.session("a").is_sure
    assert talks.driver.prefetcher.expected.least == talks.now + 19.0
    talks.talk("a one two", "a", tool="build")
    assert not talks.session("a").is_sure
    assert talks.driver.prefetcher.expected.least == float("inf")


def test_prefetches_for_tools_take_no_unsaved_block() -> None:
    """The pool is full of a session that is not saved: nobody's only KV goes for a guess."""
    talks = Talks(blocks=6, driver={"prefetch_lead_s": 1.0})
    turns(talks, [20.0] * SURE_PAUSES, "build")
    talks.rest()
    talks.talk("p q r s t u", "other")
    session = talks.session("a")
    assert session.expected is not None
    talks.now = session.expected - 0.5
    talks.holds = True
    talks.driver.prefetcher.look_at = 0.0
    work = talks.step()
    assert not work.loads
    assert talks.resident("p q r s t u") == 6


def test_the_number_of_tools_that_are_remembered_is_bounded() -> None:
    times = ToolTimes()
    for number in range(MOST_TOOLS + 2):
        times.took("", f"tool-{number}", 1.0)
        times.took("", "search", 5.0)
    assert len(times._pauses) == MOST_TOOLS
    assert times.expected("", "search")[0] == 5.0, "it was waited for last"
