"""Which blocks leave the tier in front of a slower one."""

from engine import SHAPE, Engine, chain

from manthan.manager.sessions.fast_tier import Fast


def test_who_was_just_read_does_not_make_room_for_itself() -> None:
    """Four blocks fit. a was used before b; its tail made room, comes back when a returns, and stays."""
    engine = Engine(fast=[Fast(4 * SHAPE.cold_nbytes, fills_on_read=True)])
    for text, name in (("a one two", "a"), ("b one", "b")):
        engine.talk(text, name)
        engine.evict()
        [moved] = engine.manager.take_moves()
    assert moved == chain("a one two")[-1:]
    request = engine.start("a one two", "a")
    engine.manager.restore_started(request, chain("a one two"))
    engine.manager.restore_finished(request)
    assert engine.manager.take_moves() == [chain("b one")[-1:]]
    engine.finish(request, "a one two")
    engine.evict()
    assert engine.manager.take_moves() == [[]]
    assert not any(engine.manager.tier_of(key, 0) for key in chain("a one two"))


def test_each_tier_lets_go_by_itself_and_what_is_read_comes_into_those_in_front() -> None:
    """Two blocks fit into the first, four into the second. a, which is read last, is the last to go there too."""
    engine = Engine(fast=[Fast(blocks * SHAPE.cold_nbytes, fills_on_read=True) for blocks in (2, 4)])
    chains = {name: chain(f"{name} one") for name in "abc"}
    moved: list[list[list[bytes]]] = []
    for name in "abc":
        engine.talk(f"{name} one", name)
        engine.evict()
        moved.append(engine.manager.take_moves())
    (a, b, c), tiers = chains.values(), engine.manager.tier_of
    assert moved == [[[], []], [a[::-1], []], [b[::-1], a[::-1]]]
    assert [tiers(keys[0], 0) for keys in (a, b, c)] == [2, 1, 0]
    for name, was in (("a", 2), ("c", 1)):
        assert tiers(chains[name][0], 0) == was
        request = engine.start(f"{name} one", name)
        engine.manager.restore_started(request, chains[name])
        engine.manager.restore_finished(request)
        assert tiers(chains[name][0], 0) == 0
        engine.finish(request, f"{name} one")
        engine.evict()
        moved.append(engine.manager.take_moves())
    assert moved[3:] == [[c[::-1], b[::-1]], [a[::-1], []]]
