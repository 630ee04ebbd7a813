"""Slots of a tier: given, put, dropped, and never more or fewer of them."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from manthan.manager.stores.slots import SlotTable

SLOTS = 5
KEYS = st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"])


def test_blocks_are_found_up_to_the_first_that_is_missing() -> None:
    table = SlotTable(3)
    for key in (b"a", b"b"):
        table.put(key, table.take())
    slots = table.get([b"a", b"b"])
    assert len(set(slots)) == 2
    assert table.get([b"a", b"x", b"b"]) == slots[:1]
    assert table.get([b"x", b"a"]) == []


def test_the_oldest_goes_first_and_use_makes_young() -> None:
    table = SlotTable(3)
    for key in (b"a", b"b", b"c"):
        table.put(key, table.take())
    assert table.take() is None
    table.used([b"a"])
    key, slot = table.pop_oldest()
    assert key == b"b"
    assert table.free == 0  # its slot counts as taken
    table.give_back(slot)
    assert table.take() == slot


class Slots(RuleBasedStateMachine):
    """Every slot is free, taken, or holds one block."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.taken, self.held = SlotTable(SLOTS), [], {}

    @rule()
    def take(self) -> None:
        slot = self.table.take()
        assert (slot is None) == (len(self.taken) + len(self.held) == SLOTS)
        if slot is not None:
            assert slot not in self.taken
            assert slot not in self.held.values()
            self.taken.append(slot)

    @rule(key=KEYS)
    def put(self, key: bytes) -> None:
        if self.taken:
            self.held[key] = self.taken.pop()
            self.table.put(key, self.held[key])

    @rule()
    def give_back(self) -> None:
        if self.taken:
            self.table.give_back(self.taken.pop())

    @rule(keys=st.lists(KEYS))
    def drop(self, keys: list[bytes]) -> None:
        self.table.drop(keys)
        for key in keys:
            self.held.pop(key, None)

    @rule()
    def clear(self) -> None:
        self.table.clear()
        self.held.clear()

    @invariant()
    def agrees(self) -> None:
        assert len(self.table) == len(self.held)
        assert self.table.free == SLOTS - len(self.held) - len(self.taken)
        for key, slot in self.held.items():
            assert self.table.get([key]) == [slot]


TestSlots = Slots.TestCase
