"""Which blocks leave the tier in front of a slower one."""

from engine import SHAPE, Engine, chain

from manthan.manager.sessions.fast_tier import Fast


def test_who_was_just_read_does_not_make_room_for_itself() -> None:
    """Four blocks fit. a was used before b; its tail made room, comes back when a returns, and stays."""
    engine = Engine(fast=Fast(4 * SHAPE.cold_nbytes, fills_on_read=True))
    for text, name in (("a one two", "a"), ("b one", "b")):
        engine.talk(text, name)
        engine.evict()
        moved = engine.manager.take_moves()
    assert moved == chain("a one two")[-1:]
    request = engine.start("a one two", "a")
    engine.manager.restore_started(request, chain("a one two"))
    engine.manager.restore_finished(request)
    assert engine.manager.take_moves() == chain("b one")[-1:]
    engine.finish(request, "a one two")
    engine.evict()
    assert engine.manager.take_moves() == []
    assert not any(engine.manager.has_moved(key, 0) for key in chain("a one two"))
