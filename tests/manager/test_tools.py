"""What is learned of tools from sessions that wait for them."""

from engine import IDLE_AFTER_S, Engine

from manthan.manager.sessions.tools import ENOUGH, LAST, MOST_TOOLS, ToolTimes


def turns(engine: Engine, name: str, pauses: list[float], tool: str, tenant: str = "", **hints: object) -> None:
    """A session that waits for the tool for so long each time, and in the end again."""
    for pause in pauses:
        engine.talk(f"{name} one two", name, tenant, tool=tool, **hints)
        engine.now += pause
    engine.talk(f"{name} one two", name, tenant, tool=tool, **hints)


def away(engine: Engine, name: str) -> float | None:
    session = engine.session(name)
    return None if session.expected is None else session.expected - session.last_used


def test_a_tool_takes_as_long_as_it_mostly_took() -> None:
    engine = Engine()
    turns(engine, "a", [4.0, 6.0, 300.0], "search")
    assert away(engine, "a") == 6.0
    engine.talk("b one two", "b", tool="search")
    assert away(engine, "b") == 6.0, "others wait for it as long"
    engine.talk("c one two", "c", tool="another")
    assert away(engine, "c") is None


def test_what_the_client_says_itself_counts_more_and_its_pause_is_learned_nevertheless() -> None:
    engine = Engine()
    turns(engine, "a", [4.0] * ENOUGH, "search", expect_return_s=50)
    assert away(engine, "a") == 50
    engine.talk("b one two", "b", tool="search")
    assert away(engine, "b") == 4.0


def test_only_the_pause_that_follows_is_for_the_tool() -> None:
    engine = Engine()
    turns(engine, "a", [4.0] * ENOUGH, "search")
    engine.now += 4.0
    engine.talk("a one two", "a")
    engine.now += 1000.0
    for _ in range(LAST):
        engine.talk("a one two", "a")
        assert away(engine, "a") is None
        engine.now += 1000.0
    engine.talk("a one two", "a", tool="search")
    assert away(engine, "a") == 4.0


def test_a_tenant_learns_nothing_of_another_s_tools() -> None:
    engine = Engine()
    turns(engine, "a", [4.0] * ENOUGH, "search", tenant="acme")
    assert away(engine, "acme/a") == 4.0
    engine.talk("b one two", "b", "beta", tool="search")
    assert away(engine, "beta/b") is None


def test_a_session_that_waits_for_a_tool_is_prefetched_before_it_is_done() -> None:
    engine = Engine(prefetch_lead_s=1.0)
    turns(engine, "a", [60.0] * ENOUGH, "tests")
    engine.evict()
    assert engine.manager.prefetch_blocks(engine.now) == 0
    assert engine.manager.next_deadline == engine.now - IDLE_AFTER_S + 59.0
    assert engine.manager.prefetch_blocks(engine.now - IDLE_AFTER_S + 59.0) == 3


def test_what_is_kept_of_tools_is_bounded() -> None:
    times = ToolTimes()
    for number in range(MOST_TOOLS + 10):
        times.took("", f"tool-{number}", 1.0)
        times.took("", "search", 5.0)
    assert len(times) == MOST_TOOLS
    assert times.expected("", "search") == 5.0
    for pause in [1.0] * (LAST // 2 + 1):
        times.took("", "search", pause)
    assert times.expected("", "search") == 1.0, "only the last ones count"
