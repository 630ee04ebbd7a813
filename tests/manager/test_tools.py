"""Tools that sessions wait for: how long they take is learned."""

import pytest
from talks import Talks

from manthan.manager.session.hints import ENOUGH_PAUSES, LAST_PAUSES, MOST_TOOLS, ToolTimes


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


def test_the_number_of_tools_that_are_remembered_is_bounded() -> None:
    times = ToolTimes()
    for number in range(MOST_TOOLS + 2):
        times.took("", f"tool-{number}", 1.0)
        times.took("", "search", 5.0)
    assert len(times) == MOST_TOOLS
    assert times.expected("", "search") == 5.0, "it was waited for last"
