"""Which blocks are in front, and what is read from where. The rest is in test_tiers.py."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from some_blocks import blocks_of, same

from manthan.manager.tiers.arena import GRANULE
from manthan.manager.tiers.arena_tier import RamTier
from manthan.manager.tiers.disk import DiskTier, room
from manthan.manager.tiers.joined import StackedTier
from manthan.manager.tiers.tier import Buffer, Found

MIB = 1 << 20


class Behind(RamTier):
    """A tier that says what it was asked for, refuses some blocks, and may be down."""

    def __init__(self) -> None:
        super().__init__(32 * MIB)
        self.asked, self.refuses, self.is_down = list[bytes](), set[bytes](), False

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        taken = {key: buf for key, buf in blocks.items() if key not in self.refuses}
        return super().put_all(group, taken) | {key: "store_oom" for key in blocks if key in self.refuses}

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Found]:
        for key in keys:
            self.asked.append(key)
            yield "store_down" if self.is_down else next(super().read(group, [key]))


@pytest.fixture
def behind() -> Behind:
    return Behind()


@pytest.fixture
def stack(behind: Behind) -> StackedTier:
    """RAM for ten granules, and some bytes that are left free."""
    return StackedTier(RamTier(11 * GRANULE), behind)


def in_front(stack: StackedTier, keys: Iterable[bytes]) -> list[int]:
    gone = stack.front.absent(0, list(keys))
    return [at for at, key in enumerate(keys) if key not in gone]


def test_blocks_that_were_used_last_are_in_front_as_far_as_bytes_go(stack: StackedTier, behind: Behind) -> None:
    blocks = blocks_of(*[granules * GRANULE for granules in (4, 1, 3, 2)])
    keys = list(blocks)
    assert stack.put_all(0, blocks) == {}
    assert in_front(stack, keys) == [0, 1, 2, 3]
    assert same(stack.read(0, keys[:1]), blocks, keys[:1])
    more = blocks_of(4 * GRANULE, seed=1)
    stack.put_all(0, more)  # makes the two go that were not used for longest
    assert in_front(stack, blocks | more) == [0, 3, 4]
    assert stack.front.used == 10 * GRANULE
    assert behind.asked == []
    assert same(stack.read(0, keys), blocks, keys)
    assert behind.asked == keys[1:3]


def test_what_is_refused_behind_is_not_in_front_either(stack: StackedTier, behind: Behind) -> None:
    blocks = blocks_of(100, 100)
    first, _ = blocks
    stack.put_all(0, blocks)
    behind.refuses = {first}
    assert stack.put_all(0, blocks) == {first: "store_oom"}
    assert in_front(stack, blocks) == [1]


def test_while_it_is_down_behind_what_is_in_front_is_read(stack: StackedTier, behind: Behind) -> None:
    blocks = blocks_of(GRANULE, GRANULE)
    stack.put_all(0, blocks)
    behind.is_down = True
    *found, far = stack.read(0, [*blocks, b"far"])
    assert same(iter(found), blocks, list(blocks))
    assert far == "store_down"


def test_what_makes_room_while_it_is_read_comes_from_behind(stack: StackedTier, behind: Behind) -> None:
    blocks = blocks_of(*[2 * GRANULE] * 4)
    keys = list(blocks)
    stack.put_all(0, blocks)
    found = stack.read(0, keys)
    assert same(iter([next(found)]), blocks, keys[:1])
    stack.put_all(0, blocks_of(10 * GRANULE, seed=1))
    assert in_front(stack, keys) == []
    assert same(found, blocks, keys[1:])
    assert behind.asked == keys[1:]


def test_a_disk_in_front_has_what_it_had_before(behind: Behind, tmp_path: Path) -> None:
    blocks = blocks_of(*[60_000] * 20)
    keys = list(blocks)
    stack = StackedTier(DiskTier(tmp_path, MIB), behind)
    assert stack.put_all(0, blocks) == {}
    fit = stack.front.usable // room(60_000)
    assert in_front(stack, keys) == list(range(20 - fit, 20))
    assert same(stack.read(0, keys[-fit:]), blocks, keys[-fit:])
    assert behind.asked == []
    assert same(stack.read(0, keys[:1]), blocks, keys[:1])
    assert in_front(stack, keys) == [0, *range(20 - fit, 19)], "the tail of what was read went"
    stack.close()
    again = StackedTier(DiskTier(tmp_path, MIB), Behind())
    assert same(again.read(0, [*keys[-4:-1], keys[0]]), blocks, [*keys[-4:-1], keys[0]])
    again.put_all(0, blocks_of(60_000, seed=1))  # the one stored first goes
    assert in_front(again, keys) == [0, *range(21 - fit, 19)]
    again.close()


def test_what_cannot_be_read_in_front_comes_from_behind(behind: Behind, tmp_path: Path) -> None:
    blocks = blocks_of(*[5000] * 20)
    stack = StackedTier(DiskTier(tmp_path, MIB), behind)
    stack.put_all(0, blocks)
    for placed in list(stack.front._blocks.values())[::2]:
        with (tmp_path / "blocks").open("r+b") as file:
            file.seek(placed.extents[0].start + 600)
            file.write(b"?" * 10)
    assert same(stack.read(0, list(blocks)), blocks, list(blocks))
    assert behind.asked == list(blocks)[::2]
    assert isinstance(next(stack.read(0, [next(iter(blocks))])), np.ndarray)
    stack.close()
