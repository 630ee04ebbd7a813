"""Anchors in a store that engines share, and anchors of sessions that are expected: the manager by example."""

import pytest
from integrity import check_integrity
from spills import spilled, take_spills

from manthan.manager.sessions.hints import Hints
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import FoundAnchor, MemoryShape, Place, Prefetch, SessionState
from manthan.policies import get_policy

CHAIN, WINDOW, STATE = 1, 0, 2
SHAPE = MemoryShape(16, 1000, {0: 100}, group=CHAIN, beside={WINDOW: {0: 50}, STATE: {0: 70}})
KEYS = [bytes([n]) * 32 for n in range(20)]
Part = tuple[int, bytes, int]


def beside(depth: int) -> list[Part]:
    """What is needed behind so many blocks: the last two of the window, and the last state."""
    window = [(WINDOW, KEYS[at], at) for at in range(max(0, depth - 2), depth)]
    return [*window, (STATE, KEYS[depth - 1], depth - 1)]


def anchor(depth: int) -> FoundAnchor:
    return FoundAnchor(depth, beside(depth), [50 if group == WINDOW else 70 for group, _, _ in beside(depth)])


class One:
    """An engine whose orders are carried out at once."""

    def __init__(self) -> None:
        self.manager = SessionMemoryManager(
            get_policy("lru"), SHAPE, 10_000, 10, min_tokens=16, prefetch_lead_s=1.0, shared_ttl_s=1e6
        )

    def start(self, request: str, blocks: int, now: float, session: str | None = None, **hints: object) -> None:
        self.manager.request_started(request, KEYS[:blocks], session, now, hints=Hints(**hints))

    def finish(self, request: str, blocks: int, now: float) -> None:
        self.manager.request_finished(request, KEYS[:blocks], now, places=[Place(blocks, beside(blocks))])
        self.carry_out(now)

    def carry_out(self, now: float) -> None:
        for order in take_spills(self.manager, 1000):
            spilled(self.manager, order.key, order.nbytes, now, order.group)
            check_integrity(self.manager)

    def go_cold(self, blocks: int, now: float) -> None:
        self.start("first", blocks, now, "alice")
        self.finish("first", blocks, now)
        self.manager.sweep(now + 10)
        self.carry_out(now + 10)
        assert self.state("alice") is SessionState.COLD

    def state(self, name: str) -> SessionState | None:
        session = self.manager.table.by_id.get(name)
        return None if session is None else session.state

    def dropped(self) -> set[tuple[int, bytes]]:
        check_integrity(self.manager)
        return {(drop.group, key) for drop in self.manager.take_drops() for key in drop.keys}


@pytest.fixture
def one() -> One:
    return One()


# -- what another engine has stored -------------------------------------------------------------------


def test_a_chain_is_gone_on_from_where_another_engine_has_an_anchor(one: One) -> None:
    one.start("r", 8, 0, "alice")
    one.manager.remote.found("r", KEYS[:6], [100] * 6)
    assert one.manager.match(KEYS[:8]) == 0
    one.manager.remote.found("r", KEYS[:6], [100] * 6, anchor(5))
    check_integrity(one.manager)
    assert one.manager.match(KEYS[:8]) == 5
    assert one.manager.usage.cold_nbytes == 6 * 100 + 2 * 50 + 70
    one.manager.restore_started("r", KEYS[:5])
    one.manager.restore_finished("r")
    one.finish("r", 9, 1)
    assert one.dropped() == set()  # there is a deeper one, before which not all is cold
    one.manager.sweep(20)
    one.carry_out(20)
    assert one.dropped() == {(group, key) for group, key, _ in beside(5)}
    assert one.manager.match(KEYS) == 9


def test_a_deeper_anchor_takes_the_place_of_one_s_own(one: One) -> None:
    one.go_cold(5, 0)
    one.start("r", 10, 20, "alice")
    one.manager.remote.found("r", KEYS[:8], [100] * 3, anchor(8))
    assert one.dropped() == {(group, key) for group, key, _ in beside(5)}
    assert one.manager.match(KEYS) == 8


# -- sessions that are expected -----------------------------------------------------------------------


def test_a_prefetch_is_of_the_chain_and_its_anchor(one: One) -> None:
    one.go_cold(5, 0)
    one.start("who asks", 0, 20, prefetch=("alice",))
    assert one.manager.prefetch_blocks(20) == 5 + 3
    assert one.manager.take_prefetch(7, 20) is None
    assert one.manager.take_prefetch(8, 20) == Prefetch("alice", KEYS[:5], tuple(beside(5)))
    assert one.manager.blocks.get(KEYS[4], STATE).pins == 1
    one.manager.prefetch_finished("alice", True, [], 21)
    check_integrity(one.manager)
    assert one.state("alice") is SessionState.IDLE
    assert one.manager.is_missed((STATE, KEYS[4]))
    assert one.manager.is_missed((WINDOW, KEYS[3]))
    assert not one.manager.is_missed((WINDOW, KEYS[2]))  # the window has gone on
    assert one.manager.is_missed(KEYS[2])
    one.manager.sweep(40)
    assert take_spills(one.manager, 100) == []  # the codes were kept
    assert one.state("alice") is SessionState.COLD
    assert not one.manager.is_missed((STATE, KEYS[4]))


def test_a_prefetch_that_finds_no_anchor_ends_the_session(one: One) -> None:
    one.go_cold(5, 0)
    one.start("who asks", 0, 20, prefetch=("alice",))
    one.manager.take_prefetch(8, 20)
    one.manager.prefetch_finished("alice", False, [], 21, [(STATE, KEYS[4])])
    assert (STATE, KEYS[4]) in one.dropped()
    assert one.state("alice") is None
