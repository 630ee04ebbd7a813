"""How far a pool is from what is worth keeping, and when its queue has to be walked again."""

from collections.abc import Iterator

from engine import Engine

from manthan.manager.sessions.pressure import Pressure, Runway
from manthan.manager.sessions.session import BlockName, Drop, DropCause


class Queue:
    """Free blocks by name, and how often they were looked at."""

    def __init__(self, names: str) -> None:
        self._names = [name.encode() for name in names.split()]
        self.walks = 0

    def __len__(self) -> int:
        return len(self._names)

    def names(self) -> Iterator[BlockName | None]:
        self.walks += 1
        return iter(self._names)


def keys_of(engine: Engine, name: str) -> list[bytes]:
    return [block.key for block in engine.session(name).chain]


def test_dropped_codes_count_where_the_blocks_are_hot() -> None:
    engine = Engine()
    engine.talk("cold one", "cold")
    engine.evict()
    engine.talk("hot one", "hot")
    engine.evict()
    engine.talk("hot one two", "hot")
    engine.talk("risk", "risk")
    queue = Queue("")
    queue._names = [*keys_of(engine, "cold"), *keys_of(engine, "hot")[:2], *keys_of(engine, "risk"), b"free", b"free"]
    runway = Runway(queue, engine.manager, ahead=6)
    assert runway.length(3) == 4
    cold, hot = keys_of(engine, "cold"), keys_of(engine, "hot")[:2]
    engine.manager._pruning.cut(engine.session("cold"), 0, DropCause.BUDGET)
    runway.dropped(Drop(0, cold, DropCause.BUDGET))
    assert runway.length(3) == 4
    assert queue.walks == 1, "what is cold is not missed in the pool"
    session = engine.session("hot")
    engine.manager._pruning.give(session, session.chain[:2], DropCause.BUDGET)
    runway.dropped(Drop(0, hot, DropCause.BUDGET))
    assert runway.length(3) == 2
    assert queue.walks == 2


def test_the_queue_is_not_walked_while_all_that_could_be_wanted_is_on_its_way() -> None:
    engine = Engine()
    engine.talk("a b c d", "alice")
    engine.talk("x y z", "bob")
    queue = Queue("")
    queue._names = [b"free", *keys_of(engine, "alice"), *keys_of(engine, "bob")]
    pressure = Pressure(engine.manager, queue, blocks=8, low=0.25, high=0.5)
    for _ in range(3):
        pressure.relieve(engine.now)
        assert queue.walks == 1
    assert sorted(engine.states().values()) == ["evicting", "idle"]
    engine.stored(engine.spill())
    del queue._names[1:5]  # released, and taken
    pressure.relieve(engine.now)
    assert queue.walks == 2
    assert sorted(engine.states().values()) == ["cold", "evicting"]
