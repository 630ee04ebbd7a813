"""Models with several KV cache groups: chains are gone on from where what the other groups need is cold as well."""

from dataclasses import replace

import pytest
from integrity import check_integrity
from spills import spilled, take_spills
from told import told

from manthan.manager.sessions.hints import NO_HINTS, Hints
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import MemoryShape, Outcome, Place, SessionState
from manthan.policies import get_policy

WINDOW = 0
SHAPE = MemoryShape(16, 1000, {0: 100}, group=1, beside={WINDOW: {0: 50}}, hot_beside={WINDOW: 200})
KEYS = [bytes([n]) * 32 for n in range(20)]


class World:
    """A manager whose orders are carried out at once, unless they are lost. stored: names of what is in the store."""

    def __init__(self, capacity: int = 10_000, shape: MemoryShape = SHAPE, sink: int = 0) -> None:
        self.manager = SessionMemoryManager(
            get_policy("lru"), shape, capacity, idle_after_s=10, min_tokens=16, sink_tokens=sink
        )
        self.stored: set[tuple[int, bytes]] = set()
        self.gone: set[tuple[int, bytes]] = set()

    def turn(
        self, name: str, blocks: int, now: float, keys: list[bytes] = KEYS, hints: Hints = NO_HINTS
    ) -> Outcome | None:
        """A request that ends with so many blocks; an anchor takes the last two of the window's."""
        manager = self.manager
        manager.request_started(f"{name}-{now}", keys[: blocks - 1], name, now, tokens=16 * blocks - 8, hints=hints)
        beside = [(WINDOW, keys[at], at) for at in range(max(0, blocks - 2), blocks)]
        outcome = manager.request_finished(
            f"{name}-{now}", keys[:blocks], now, tokens=16 * blocks + 3, places=[Place(blocks, beside)]
        )
        self.carry_out(now)
        return outcome

    def carry_out(self, now: float) -> None:
        manager = self.manager
        for _ in range(20):
            for drop in manager.take_drops():
                self.stored -= {(drop.group, key) for key in drop.keys}
            orders = take_spills(manager, 100)
            if not orders:
                break
            for order in orders:
                name = (SHAPE.group if order.group is None else order.group), order.key
                if name in self.gone:
                    manager.lost(order.key, now, order.group)
                else:
                    self.stored.add(name)
                    spilled(manager, order.key, order.nbytes, now, order.group)
                check_integrity(manager)
        manager.take_releases()
        check_integrity(manager)

    def idle(self, now: float) -> None:
        self.manager.sweep(now)
        self.carry_out(now)

    def names(self, group: int) -> list[int]:
        return sorted(KEYS.index(key) for of, key in self.stored if of == group)

    def state(self, name: str) -> SessionState | None:
        session = self.manager.table.by_id.get(name)
        return None if session is None else session.state


@pytest.fixture
def world() -> World:
    return World()


def test_an_anchor_is_cold_at_once_and_the_chain_when_it_is_idle(world: World) -> None:
    world.turn("s", 5, 0)
    assert world.names(WINDOW) == [3, 4]
    assert world.names(SHAPE.group) == []
    world.idle(100)
    assert world.names(SHAPE.group) == [0, 1, 2, 3, 4]
    assert world.state("s") is SessionState.COLD
    assert world.manager.match(KEYS) == 5
    assert world.manager.match(KEYS[:4]) == 0
    assert world.manager.blocks.cold_nbytes == 5 * 100 + 2 * 50


def test_until_a_deeper_one_stands_the_one_before_is_kept(world: World) -> None:
    world.turn("s", 5, 0)
    world.gone = {(WINDOW, KEYS[7])}
    world.turn("s", 8, 1)
    assert world.names(WINDOW) == [3, 4]
    world.idle(100)
    assert world.manager.match(KEYS) == 5
    assert world.names(SHAPE.group) == [0, 1, 2, 3, 4]


def test_a_session_without_an_anchor_is_not_kept(world: World) -> None:
    world.gone = {(WINDOW, KEYS[4])}
    world.turn("s", 5, 0)
    world.idle(100)
    assert world.state("s") is None
    assert not world.stored


def test_a_restore_reads_the_anchor_too_and_its_loss_ends_the_session(world: World) -> None:
    world.turn("s", 5, 0)
    world.idle(100)
    world.manager.request_started("again", KEYS[:6], "s", 101, tokens=100)
    world.manager.restore_started("again", KEYS[:5])
    assert world.manager.blocks.get(KEYS[4], WINDOW).pins == 1
    check_integrity(world.manager)
    world.manager.restore_finished("again", [], [(WINDOW, KEYS[4])])
    world.carry_out(102)
    assert world.manager.match(KEYS) == 0
    assert (WINDOW, KEYS[4]) not in world.stored
    world.manager.request_finished("again", KEYS[:5], 103, tokens=90)
    world.carry_out(103)
    world.idle(200)
    assert world.state("s") is None


ALONE = MemoryShape(16, 0, {0: 0}, group=None, beside={WINDOW: {0: 50}}, hot_beside={WINDOW: 500})
"""No layer has full attention: chains are keys only."""


def test_of_windows_alone_only_anchors_are_kept() -> None:
    world = World(shape=ALONE)
    world.turn("s", 5, 0)
    assert world.manager.match(KEYS) == 5  # the pool may have lost them already
    world.idle(100)
    assert world.stored == {(WINDOW, KEYS[3]), (WINDOW, KEYS[4])}
    assert list(filter(world.manager.is_saved, KEYS)) == KEYS[3:5]
    assert world.state("s") is SessionState.COLD
    assert world.manager.blocks.cold_nbytes == 100
    assert told(world.manager, "s").cold_bytes == 100
    [eviction] = world.manager.take_evictions()
    assert (eviction.hot_nbytes, eviction.cold_nbytes) == (1000, 100)
    assert (world.manager.match(KEYS), world.manager.match(KEYS[:4])) == (5, 0)


def test_windows_alone_keep_to_the_budget_and_whole_sessions_go() -> None:
    world = World(capacity=250, shape=ALONE)
    chains = {name: [bytes([50 + 20 * at + n]) * 32 for n in range(9)] for at, name in enumerate("abc")}
    for at, (name, keys) in enumerate(chains.items()):
        world.turn(name, 5, at, keys)
        world.idle(100 * at + 50)
    assert world.manager.blocks.reserved == 200
    assert [world.manager.match(keys) for keys in chains.values()] == [0, 5, 5]
    assert world.state("a") is None


def test_a_window_that_is_stored_late_leaves_the_pool_then() -> None:
    world = World(shape=ALONE)
    manager = world.manager
    manager.request_started("r", KEYS[:4], "s", 0, tokens=70)
    manager.request_finished("r", KEYS[:5], 0, tokens=80, places=[Place(5, [(WINDOW, KEYS[4], 4)])])
    [order] = take_spills(manager, 10)
    manager.sweep(50)
    assert manager.take_releases() == KEYS[4::-1]  # the last is held still
    spilled(manager, order.key, 50, 51, order.group)
    assert manager.take_releases() == [KEYS[4]]
    check_integrity(manager)


def test_exact_tokens_of_a_larger_block() -> None:
    """It has the tokens of two blocks of the chain."""
    beside = {WINDOW: {0: 50, 8: 60, 32: 90}}
    shape = replace(SHAPE, bounds={0: 100, 8: 120, 16: 150}, beside=beside, tokens_beside={WINDOW: 32})
    world = World(shape=shape, sink=40)
    world.manager.request_started("r", KEYS[:4], "s", 0, tokens=70)
    world.manager.request_finished(
        "r", KEYS[:4], 0, tokens=80, places=[Place(4, [(WINDOW, KEYS[1], 0), (WINDOW, KEYS[3], 1)])]
    )
    assert {order.first_token: order.exact for order in take_spills(world.manager, 10)} == {0: 32, 32: 8}


def test_states_stay_in_their_codec_when_the_others_change() -> None:
    world = World(shape=replace(SHAPE, settled={WINDOW}))
    world.manager.recode(replace(SHAPE, settled={WINDOW}, codec="wht-4x"), 10_000)
    world.manager.request_started("r", KEYS[:4], "s", 0, tokens=70)
    world.manager.request_finished("r", KEYS[:5], 0, tokens=80, places=[Place(5, [(WINDOW, KEYS[4], 4)])])
    world.manager.sweep(50)
    codecs = {order.group: order.codec for order in take_spills(world.manager, 10)}
    assert codecs == {WINDOW: "", None: "wht-4x"}


def test_pins_count_windows() -> None:
    world = World(capacity=1000, shape=ALONE)
    chains = [[bytes([50 + 20 * at + n]) * 32 for n in range(9)] for at in range(3)]
    pinned = [world.turn(str(at), 5, at, keys, hints=Hints(pin=True)) for at, keys in enumerate(chains)]
    assert [outcome.pinned for outcome in pinned if outcome] == [True, True, False]  # 100 bytes each, of 250


def test_what_is_told_of_a_session_counts_its_anchor(world: World) -> None:
    world.turn("s", 5, 0)
    assert world.manager.usage.anchors == 1
    assert told(world.manager, "s").cold_bytes == 2 * 50
    world.idle(100)
    [eviction] = world.manager.take_evictions()
    assert (eviction.blocks, eviction.beside, eviction.tokens) == (5, 2, 80)
    assert (eviction.hot_nbytes, eviction.cold_nbytes) == (5 * 1000 + 2 * 200, 5 * 100 + 2 * 50)
    assert (eviction.encoded, eviction.encoded_nbytes) == (5, 500)
    info, usage = told(world.manager, "s"), world.manager.usage
    assert (info.blocks, info.cold_blocks, info.cold_bytes) == (5, 5, 600)
    assert (usage.cold_blocks, usage.cold_nbytes, usage.pool_nbytes) == (7, 600, 5400)
    world.manager.reset()
    world.carry_out(101)
    assert world.manager.usage.anchors == world.manager.usage.pool_nbytes == 0


def test_nobody_is_dropped_for_a_session_that_could_never_fit() -> None:
    world = World(capacity=1050)
    others = [bytes([100 + n]) * 32 for n in range(20)]
    world.turn("a", 4, 0)
    world.idle(20)
    world.turn("b", 12, 30, others)
    world.idle(50)
    assert world.state("b") is None
    assert world.manager.match(KEYS) == 4


def test_anchors_of_idle_sessions_make_room(world: World) -> None:
    world = World(capacity=250)
    others = [bytes([100 + n]) * 32 for n in range(20)]
    world.turn("a", 4, 0)
    world.turn("b", 4, 1, others)
    assert len(world.stored) == 4
    world.turn("c", 4, 2, [bytes([200 + n]) * 32 for n in range(20)])
    assert world.manager.usage.anchors == 2
    assert (WINDOW, KEYS[3]) not in world.stored, "the session that was used first"


def test_blocks_beside_are_encoded_before_those_of_chains(world: World) -> None:
    manager = world.manager
    world.turn("a", 4, 0)
    manager.sweep(50)
    manager.request_started("r", KEYS[10:14], "b", 50, tokens=70)
    manager.request_finished(
        "r", KEYS[10:14], 50, tokens=70, places=[Place(4, [(WINDOW, KEYS[at], at) for at in (12, 13)])]
    )
    assert [order.group for order in take_spills(manager, 3)] == [WINDOW, WINDOW, None]


def test_the_same_prompt_is_gone_on_from_though_the_answer_is_wanted_anew(world: World) -> None:
    """Or comes back without what the model thought: there is an anchor where the prompt ends, too."""
    manager = world.manager
    places = [Place(depth, [(WINDOW, KEYS[at], at) for at in (depth - 2, depth - 1)]) for depth in (9, 6, 1)]
    for turn, of_turn in enumerate((places[:2], [])):
        manager.request_started(f"r{turn}", KEYS[:7], "a", 50 * turn, tokens=112)
        if turn:
            assert (manager.match(KEYS[:6]), manager.match(KEYS[:12])) == (6, 9)
        manager.request_finished(f"r{turn}", KEYS[:9], 50 * turn, tokens=150, places=of_turn)
        world.carry_out(50 * turn)
        world.idle(50 * turn + 20)
    assert world.names(WINDOW) == [4, 5, 7, 8]
    assert manager.usage.anchors == 2
    world.turn("a", 12, 100)
    world.idle(120)
    assert world.names(WINDOW) == [10, 11]
    assert (manager.match(KEYS[:9]), manager.match(KEYS)) == (0, 12)
