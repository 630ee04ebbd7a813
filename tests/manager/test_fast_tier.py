"""What is reckoned of the tiers in front of a slower one; the workers keep them by LRU."""

from engine import SHAPE, Engine, chain

from manthan.manager.sessions.fast_tier import Fast


def go_cold(engine: Engine, text: str, name: str) -> None:
    engine.talk(text, name)
    engine.evict()
    engine.manager.settle_tiers()


def restore(engine: Engine, text: str, name: str) -> None:
    request = engine.start(text, name)
    engine.manager.restore_started(request, chain(text))
    engine.manager.restore_finished(request)
    engine.manager.settle_tiers()
    engine.finish(request, text)
    engine.evict()
    engine.manager.settle_tiers()


def tiers(engine: Engine, text: str) -> list[int]:
    """The fastest tier of each block."""
    return [engine.manager.tier_of(key, 0) for key in chain(text)]


def test_who_was_just_read_does_not_make_room_for_itself() -> None:
    """Four blocks fit. a was used before b; its tail made room, comes back when a returns, and stays."""
    engine = Engine(fast=[Fast(4 * SHAPE.cold_nbytes, fills_on_read=True)])
    go_cold(engine, "a one two", "a")
    go_cold(engine, "b one", "b")
    assert (tiers(engine, "a one two"), tiers(engine, "b one")) == ([0, 0, 1], [0, 0])
    restore(engine, "a one two", "a")
    assert (tiers(engine, "a one two"), tiers(engine, "b one")) == ([0, 0, 0], [0, 1])


def test_each_tier_lets_go_by_itself_and_what_is_read_comes_into_those_in_front() -> None:
    """Two blocks fit into the first, four into the second. What is read last is the last to go there too."""
    engine = Engine(fast=[Fast(blocks * SHAPE.cold_nbytes, fills_on_read=True) for blocks in (2, 4)])
    seen = []
    for name in "abc":
        go_cold(engine, f"{name} one", name)
    for name in " ac":
        if name != " ":
            restore(engine, f"{name} one", name)
        seen.append([set(tiers(engine, f"{each} one")) for each in "abc"])
    assert seen == [[{2}, {1}, {0}], [{0}, {2}, {1}], [{1}, {2}, {0}]]
