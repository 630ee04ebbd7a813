"""Marks by example: what was decoded is not encoded, and goes with its compressed copy; shared heads are kept exact."""

from collections.abc import Callable

import jobs
import pytest
from engine import IDLE_AFTER_S, Engine, chain
from integrity import check_integrity
from spills import spilled, take_spills

from manthan.manager.driver import Driver
from manthan.manager.sessions.budget import Shares
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.marks import Mark
from manthan.manager.sessions.session import BlockName, MemoryShape, Place
from manthan.manager.simulator.pool import SimulatedPool
from manthan.policies import get_policy

TEXT = "a b c"


class Back(Engine):
    """Alice's session went cold, and is back: all of it was decoded."""

    def __init__(self, **more: object) -> None:
        self.marks: dict[BlockName, Mark] = {}
        super().__init__(capacity=4, mark=lambda name: self.marks.get(name, Mark.EXACT), **more)
        self.talk(TEXT, "alice")
        self.evict()
        request = self.start(TEXT, "alice")
        assert self.manager.match(chain(TEXT), request) == 3
        self.manager.restore_started(request, chain(TEXT))
        self.manager.restore_finished(request)
        self.marks |= dict.fromkeys(chain(TEXT), Mark.DECODED)
        self.finish(request, TEXT)
        self.manager.take_releases()


def budget(engine: Back) -> None:
    engine.talk("v w x y", "bob")
    engine.sweep()
    engine.manager.take_drops()


def ttl(engine: Back) -> None:
    engine.talk(TEXT, "alice", ttl_s=1.0)
    engine.sweep()


def release(engine: Back) -> None:
    engine.talk(TEXT, "alice", release=True)


def damage(engine: Back) -> None:
    engine.manager.restore_started("another", chain(TEXT))
    engine.manager.restore_finished("another", chain(TEXT))


@pytest.mark.parametrize("drop", [budget, ttl, release, damage])
def test_a_decoded_block_goes_with_its_compressed_copy(drop: Callable[[Back], None]) -> None:
    engine = Back()
    drop(engine)
    released, encoded = engine.manager.take_releases(), engine.spill()
    for _ in range(2):
        engine.sweep()
        encoded += engine.spill()
        released += engine.manager.take_releases()
    assert set(released) >= set(chain(TEXT))
    assert not set(encoded) & set(chain(TEXT))


def test_a_decoded_block_s_compressed_copy_is_not_dropped_before_others() -> None:
    engine = Back()
    engine.talk("x", "old")
    engine.evict()
    request = engine.start(TEXT, "alice")
    engine.talk("y z", "bob")  # two blocks for one that is free: old's goes, although alice has hers in the pool
    engine.sweep()
    dropped = {key for drop in engine.manager.take_drops() for key in drop.keys}
    assert dropped == {b"x"}
    engine.finish(request, TEXT)


def test_nobody_keeps_a_tail_of_what_goes_behind_a_decoded_block() -> None:
    marks: dict[BlockName, Mark] = {}
    engine = Engine(mark=lambda name: marks.get(name, Mark.EXACT))
    texts = {"alice": "a b c d", "bob": "a b c", "carol": "a"}
    for name, text in texts.items():
        engine.talk(text, name)
    engine.evict()

    def come_back(name: str, unreadable: bytes) -> str:
        request = engine.start(texts[name], name)
        engine.manager.restore_started(request, chain(texts[name]))
        engine.manager.restore_finished(request, [unreadable])
        return request

    request = come_back("bob", b"a b c")  # which is computed again: alice's is not lost
    marks |= {b"a": Mark.DECODED, b"a b": Mark.DECODED, b"a b c": Mark.DERIVED}
    engine.finish(request, texts["bob"])
    assert engine.chains()["alice"] == texts["alice"]
    request = come_back("carol", b"a")  # bob's only copy may not be encoded: he loses what is behind it, c too
    assert engine.chains() == {"alice": "a b", "carol": "a"}
    check_integrity(engine.manager)
    engine.finish(request, texts["carol"])


def test_what_was_computed_behind_decoded_blocks_is_encoded_once() -> None:
    engine = Back()
    engine.talk(f"{TEXT} d", "alice")
    engine.marks[chain(f"{TEXT} d")[-1]] = Mark.DERIVED
    assert engine.evict() == chain(f"{TEXT} d")[-1:]


@pytest.mark.parametrize(
    ("configured", "asked", "offered"),
    [("exact", None, 0), ("any", "exact", 0), ("exact", "exact", 0), ("exact", "any", 3)],
)
def test_who_wants_exact_kv_is_offered_none_that_was_not(configured: str, asked: str | None, offered: int) -> None:
    engine = Engine(quality=configured)
    engine.talk(TEXT, "alice")
    engine.evict()
    request = engine.start(TEXT, "alice", **({"quality": asked} if asked else {}))
    assert engine.manager.match(chain(TEXT), request) == offered
    assert (engine.manager.asker(request) is None) == (not offered)


def exact_tokens(engine: Engine, text: str) -> int:
    block = engine.manager.blocks.get(chain(text)[-1])
    assert block is not None
    return block.encoding.exact


@pytest.mark.parametrize(("share", "kept"), [(0.0, 0), (0.25, 2), (0.5, 3)])
def test_shared_heads_are_kept_exact_within_a_share(share: float, kept: int) -> None:
    engine = Engine(capacity=40, shares=Shares(heads=share))
    for last in "xyz":
        engine.talk(f"s t u {last}")
    engine.evict()
    assert [exact_tokens(engine, text) for text in ("s", "s t", "s t u")] == [16] * kept + [0] * (3 - kept)
    assert exact_tokens(engine, "s t u x") == 0


def evict(engine: Engine) -> None:
    """Everything idle goes cold, and takes as many bytes as it may."""
    engine.sweep()
    for order in take_spills(engine.manager, 100):
        spilled(engine.manager, order.key, order.nbytes, engine.now)


def test_a_head_makes_way_for_one_that_more_sessions_share() -> None:
    engine = Engine(capacity=40)
    for last in "xy":
        engine.talk(f"s t {last}", last)
    evict(engine)
    assert [exact_tokens(engine, text) for text in ("s", "s t")] == [16, 16]
    for _ in range(3):
        for last in "klmn":
            engine.talk(f"p {last}", last)
        evict(engine)
    assert [exact_tokens(engine, text) for text in ("s", "s t", "p")] == [16, 0, 16]


def test_what_another_engine_has_stored_counts_as_lossy() -> None:
    """It may have replaced what this one has stored, in whatever codec."""
    engine = Engine(capacity=40, shared_ttl_s=1e6)
    for last in "xy":
        engine.talk(f"s {last}")
    engine.sweep()
    for order in take_spills(engine.manager, 10):
        assert (order.exact == 16) == (order.key == b"s")
        engine.manager.encodes(order.key, None, Mark.EXACT)
        spilled(engine.manager, order.key, 100, engine.now)
    assert engine.manager.stored_marks([b"s"]) == [Mark.DECODED]
    assert engine.manager.match(chain("s z"), engine.start("s z", "z")) == 0


# -- the driver: marks of what is loaded and of what is computed behind it ---------------------------------


class Served:
    """A session of which some blocks are kept exact is cold. lossless: see MemoryShape."""

    def __init__(self, lossless: tuple[int, ...] = (), exact: int = 2, parts: str = "") -> None:
        shape = MemoryShape(16, 500, {0: 100, 16: 500}, beside={1: {0: 50}}, lossless=lossless)
        shape = shape if parts else MemoryShape(16, 500, {0: 100, 16: 500})
        manager = SessionMemoryManager(get_policy("lru"), shape, 10_000, IDLE_AFTER_S, sink_tokens=16 * exact)
        self.manager, self.pool = manager, SimulatedPool(20)
        self.keys = chain("a b c d")
        manager.request_started("first", self.keys, "A", 0.0)
        self.parts = [(1, key, 3) for key in chain(parts)[-1:]] if parts else []
        manager.request_finished("first", self.keys, 1.0, places=[Place(4, self.parts)] if parts else [])
        manager.sweep(2.0 + IDLE_AFTER_S)
        for order in take_spills(manager, 10):
            spilled(manager, order.key, order.nbytes, 12.0, order.group)
        self.driver: Driver[int] = Driver(manager, self.pool, 20, low=0.05, high=0.1)
        self.driver.started("second", [*self.keys, b"e"], "A", 20.0, tokens=81, blocks=6)
        self.driver.hits("second", [[]])
        self.blocks = self.pool.take(6)
        beside = [(1, [key], [self.blocks[5]]) for _, key, _ in self.parts]
        self.driver.restoring("second", self.keys, self.blocks[:4], beside)

    def marks(self, failed: int | None = None) -> list[Mark]:
        """Of the session's blocks and the one that is computed behind them, when its load has ended."""
        chains, *others = self.driver.step(0, 20.0).loads
        bad = {} if failed is None else {failed: "missing"}
        self.driver.answered([jobs.done(chains, failed=bad), *map(jobs.done, others)], 21.0)
        self.driver.computed("second", self.blocks[:5])
        return [self.pool.marks[block] for block in self.blocks[:5]]


def test_exact_blocks_stay_exact_beside_decoded_ones() -> None:
    assert Served().marks() == [Mark.EXACT, Mark.EXACT, Mark.DECODED, Mark.DECODED, Mark.DERIVED]


def test_what_is_computed_since_a_load_failed_is_marked_as_computed() -> None:
    assert Served().marks(failed=1) == [Mark.EXACT] * 5
    assert Served().marks(failed=3) == [Mark.EXACT, Mark.EXACT, Mark.DECODED, Mark.DERIVED, Mark.DERIVED]


def test_a_decoded_state_is_as_good_as_a_decoded_block() -> None:
    """All of the chain is exact, but what is computed goes on from a state that is not."""
    assert Served(exact=4, parts="a b c d").marks() == [*[Mark.EXACT] * 4, Mark.DERIVED]
    assert Served(exact=4, parts="a b c d", lossless=(1,)).marks() == [Mark.EXACT] * 5
