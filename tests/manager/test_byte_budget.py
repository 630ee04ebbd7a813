"""The cold store's budget in bytes: an upper bound is reserved, and what was not needed comes back."""

from engine import Engine


def test_what_codes_did_not_take_is_free_again() -> None:
    engine = Engine(capacity=6)  # and 99 bytes
    engine.talk("a b c", "alice")
    engine.sweep()
    assert engine.manager.blocks.reserved == 300
    engine.stored(engine.spill(), nbytes=60)
    assert engine.manager.blocks.reserved == 180
    assert engine.manager.budget.free == 699 - 180
    engine.talk("v w x y z", "bob")
    engine.evict()
    assert engine.cold() == {"a", "b", "c", *"vwxyz"}  # by their bounds they would not fit


def test_a_bound_is_never_overdrawn_though_it_may_turn_out_too_much() -> None:
    engine = Engine(capacity=3)
    engine.talk("a b c d", "alice")
    engine.sweep()
    assert len(engine.spill()) == 3
    assert engine.chains() == {"alice": "a b c"}


def test_as_much_is_dropped_as_is_short() -> None:
    engine = Engine(capacity=5)
    engine.talk("a b c d e", "alice")
    engine.sweep()
    engine.stored(engine.spill(), nbytes=90)  # 450 of 599
    engine.now += 1
    engine.talk("x y", "bob")
    engine.sweep()
    assert engine.manager.blocks.reserved == 450 - 90 + 200
    assert engine.chains() == {"alice": "a b c d", "bob": "x y"}
