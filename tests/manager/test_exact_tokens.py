"""Which tokens are kept exact, by example: blocks of 16 tokens; codes of one take 100 bytes, all of it exact 500."""

from engine import Engine
from spills import spilled, take_spills


def evict(engine: Engine) -> dict[str, int]:
    """Everything idle goes cold; what had to be encoded, by last word, and how many tokens of it exact."""
    engine.sweep()
    orders = take_spills(engine.manager, 99)
    for order in orders:
        spilled(engine.manager, order.key, {0: 100, 4: 150, 16: 500}[order.exact], engine.now)
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
