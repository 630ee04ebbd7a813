"""Which tokens are kept exact, by example: blocks of 16 tokens; codes of one take 100 bytes, all of it exact 500."""

from engine import IDLE_AFTER_S, Engine, chain

from manthan.manager.sessions.session import CodeState


def exact(engine: Engine, name: str) -> list[int]:
    """How many tokens of each block of a session are exact."""
    return [block.encoding.exact for block in engine.session(name).chain]


def evict(engine: Engine) -> dict[str, int]:
    """Everything idle goes cold; what had to be encoded, by last word, and how many tokens of it exact."""
    engine.sweep()
    orders = engine.manager.take_spills(99)
    for order in orders:
        engine.manager.spilled(order.key, {0: 100, 4: 150, 16: 500}[order.exact], engine.now)
    engine.manager.take_releases()
    return {order.key.decode().split()[-1]: order.exact for order in orders}


def test_first_tokens_are_exact_in_part_of_a_block() -> None:
    engine = Engine(sink_tokens=4)
    engine.talk("a b c", "alice")
    assert evict(engine) == {"a": 4, "b": 0, "c": 0}
    assert engine.manager.usage.exact_blocks == 1
    assert engine.manager.usage.cold_nbytes == 350


def test_first_tokens_may_take_a_block_and_more() -> None:
    engine = Engine(sink_tokens=20)
    engine.talk("a b c", "alice")
    assert evict(engine) == {"a": 16, "b": 4, "c": 0}


def test_last_tokens_are_exact_in_whole_blocks() -> None:
    engine = Engine(window_tokens=20)
    engine.talk("a b c d", "alice")
    assert evict(engine) == {"a": 0, "b": 0, "c": 16, "d": 16}


def test_a_window_that_moves_on_is_encoded_again() -> None:
    engine = Engine(window_tokens=16)
    engine.talk("a b", "alice")
    assert evict(engine) == {"a": 0, "b": 16}
    engine.talk("a b c", "alice")
    assert evict(engine) == {"b": 0, "c": 16}
    assert exact(engine, "alice") == [0, 0, 16]
    assert engine.manager.usage.cold_nbytes == 700


def test_until_then_the_old_codes_stay() -> None:
    engine = Engine(window_tokens=16)
    engine.talk("a b", "alice")
    evict(engine)
    engine.talk("a b c", "alice")
    engine.sweep()
    assert engine.manager.blocks.reserved == 100 + (500 + 100) + 500
    assert engine.manager.take_drops() == []
    for order in engine.manager.take_spills(99):
        if order.key == b"a b":
            engine.manager.spill_failed(order.key, engine.now)
        else:
            engine.manager.spilled(order.key, 500, engine.now)
    assert engine.states() == {"alice": "cold"}
    assert exact(engine, "alice") == [0, 16, 16]
    assert engine.manager.match(chain("a b c")) == 3


def test_bf16_that_is_gone_costs_nothing_but_room() -> None:
    engine = Engine(window_tokens=16)
    engine.talk("a b", "alice")
    evict(engine)
    engine.talk("a b c", "alice")
    engine.sweep()
    for order in engine.manager.take_spills(99):
        if order.key == b"a b":
            engine.manager.lost(order.key, engine.now)
        else:
            engine.manager.spilled(order.key, 500, engine.now)
    assert engine.chains() == {"alice": "a b c"}
    assert engine.manager.match(chain("a b c")) == 3


def test_a_return_takes_it_back() -> None:
    engine = Engine(window_tokens=16)
    engine.talk("a b", "alice")
    evict(engine)
    engine.talk("a b c", "alice")
    engine.sweep()
    engine.start("a b c d", "alice")
    assert exact(engine, "alice") == [0, 16, 0]
    assert [block.code for block in engine.session("alice").chain] == [CodeState.COLD, CodeState.COLD, CodeState.NONE]
    assert engine.manager.take_spills(99) == []


def test_nothing_is_dropped_for_it() -> None:
    engine = Engine(capacity=11, window_tokens=16)
    engine.talk("a b", "alice")
    evict(engine)
    engine.talk("x", "bob")
    evict(engine)  # 600 and 500 bytes: the store is full
    assert engine.cold() == {"a", "b", "x"}
    engine.finish(engine.start("a b", "alice"), "a b c")
    engine.manager.relieve(1, engine.now)
    assert "b" not in {order.key.decode().split()[-1] for order in engine.manager.take_spills(99)}


def test_who_shares_a_block_keeps_it_exact() -> None:
    engine = Engine(window_tokens=16)
    engine.talk("a b", "alice")
    engine.talk("a b c", "bob")
    engine.now += IDLE_AFTER_S
    assert evict(engine) == {"a": 16, "b": 16, "c": 16}  # the head that both share too
