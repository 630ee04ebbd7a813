"""A store in front of another: what is where, and what comes from behind."""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from integrity import check_store
from some_blocks import blocks_of, same

from manthan.manager.tiers.arena import GRANULE
from manthan.manager.tiers.disk import DiskTier
from manthan.manager.tiers.disk_segment import room
from manthan.manager.tiers.ram import RamTier
from manthan.manager.tiers.stack import StackedTier
from manthan.manager.tiers.tier import Buffer, Tier, TierError

MIB = 1 << 20


class Behind(Tier):
    """A store that says what it was asked for."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, bytes], Buffer] = {}
        self.refuses: set[bytes] = set()
        self.asked: list[bytes] = []
        self.is_down = False

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        self.blocks |= {(group, key): buf for key, buf in blocks.items() if key not in self.refuses}
        return {key: "store_oom" for key in blocks if key in self.refuses}

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "", into: object = None) -> Iterator[Buffer | None]:
        for key in keys:
            if self.is_down:
                raise TierError
            self.asked.append(key)
            yield self.blocks.get((group, key))

    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in keys if (group, key) not in self.blocks]

    def drop(self, group: int, keys: object) -> None:
        pass

    def cleared(self, place: str) -> "Behind":
        return Behind()

    def close(self) -> None:
        pass

    def room(self, nbytes: int) -> int:
        return nbytes


@pytest.fixture
def behind() -> Behind:
    return Behind()


@pytest.fixture
def tiered(behind: Behind) -> StackedTier:
    """RAM for ten granules, and some bytes that are left free."""
    return StackedTier(RamTier(11 * GRANULE), behind)


def in_ram(tiered: StackedTier, blocks: Mapping[bytes, Buffer], group: int = 0) -> list[int]:
    """The places of those that are in RAM."""
    gone = tiered.front.absent(group, list(blocks))
    assert {key for key in blocks if key not in gone} == {key for of, key in tiered._order if of == group}
    return [at for at, key in enumerate(blocks) if key not in gone]


def test_what_was_used_last_is_in_ram_as_far_as_bytes_go(tiered: StackedTier, behind: Behind) -> None:
    blocks = blocks_of(*[granules * GRANULE for granules in (4, 1, 3, 2)])
    keys = list(blocks)
    assert tiered.put_all(0, blocks) == {}
    assert in_ram(tiered, blocks) == [0, 1, 2, 3]
    assert same(tiered.read(0, keys[:1]), blocks, keys[:1])
    more = blocks_of(4 * GRANULE, seed=1)
    tiered.put_all(0, more)  # makes the two go that were not used for longest
    assert in_ram(tiered, blocks | more) == [0, 3, 4]
    assert (tiered.front.used, tiered.front.peak) == (10 * GRANULE, 10 * GRANULE)
    assert behind.asked == []
    assert same(tiered.read(0, keys), blocks, keys)
    assert behind.asked == keys[1:3]
    check_store(tiered.front)


def test_what_is_refused_behind_is_not_in_ram_either(tiered: StackedTier, behind: Behind) -> None:
    blocks = blocks_of(100, 100)
    first, _ = blocks
    behind.refuses = {first}
    assert tiered.put_all(0, blocks) == {first: "store_oom"}
    assert in_ram(tiered, blocks) == [1]
    assert tiered.absent(0, list(blocks)) == [first]


def test_while_it_is_down_behind_what_is_in_ram_is_read(tiered: StackedTier, behind: Behind) -> None:
    blocks = blocks_of(GRANULE, GRANULE)
    tiered.put_all(0, blocks)
    behind.is_down = True
    assert same(tiered.read(0, list(blocks)), blocks, list(blocks))
    found = tiered.read(0, [*blocks, b"far"])
    assert [next(found) is not None for _ in blocks] == [True, True]
    with pytest.raises(TierError):
        next(found)


def test_what_has_to_leave_ram_while_it_is_read_comes_from_behind(tiered: StackedTier, behind: Behind) -> None:
    blocks = blocks_of(*[2 * GRANULE] * 4)
    keys = list(blocks)
    tiered.put_all(0, blocks)
    found = tiered.read(0, keys)
    first = next(found)
    tiered.put_all(0, blocks_of(10 * GRANULE, seed=1))
    assert tiered.front.absent(0, keys) == keys
    assert first is not None
    assert bytes(first) == bytes(blocks[keys[0]])
    assert same(found, blocks, keys[1:])
    assert behind.asked == keys[1:]


def test_dropped_blocks_and_a_cleared_store(tiered: StackedTier) -> None:
    blocks = blocks_of(100, 200)
    tiered.put_all(0, blocks)
    tiered.drop(0, [*list(blocks)[:1], b"unknown"])
    assert in_ram(tiered, blocks) == [1]
    other = tiered.cleared("elsewhere")
    assert other.absent(0, list(blocks)) == list(blocks)
    assert other.front.used == 0
    assert other.front.max_bytes == tiered.front.max_bytes


# -- a disk in front ------------------------------------------------------------------------------------


@pytest.fixture
def on_disk(behind: Behind, tmp_path: Path) -> Iterator[StackedTier]:
    tiered = StackedTier(DiskTier(tmp_path, MIB), behind)
    yield tiered
    tiered.close()


def test_what_a_disk_has_is_not_asked_for_behind_and_found_again(
    on_disk: StackedTier, behind: Behind, tmp_path: Path
) -> None:
    blocks = blocks_of(*[60_000] * 20)
    keys = list(blocks)
    assert on_disk.put_all(0, blocks) == {}
    fit = on_disk.front.usable // room(60_000)
    assert on_disk.front.absent(0, keys) == keys[: 20 - fit]
    assert same(on_disk.read(0, keys[-fit:]), blocks, keys[-fit:])
    assert behind.asked == []
    assert same(on_disk.read(0, keys[:1]), blocks, keys[:1])
    assert behind.asked == keys[:1]
    assert on_disk.front.absent(0, keys) == [*keys[1 : 20 - fit], keys[-1]], "the tail of what was read went"
    on_disk.close()
    again = StackedTier(DiskTier(tmp_path, MIB), behind)
    assert same(again.read(0, [*keys[-4:-1], keys[0]]), blocks, [*keys[-4:-1], keys[0]])
    assert behind.asked == keys[:1]
    again.put_all(0, blocks_of(60_000, seed=1))  # the one stored first goes
    assert again.front.absent(0, keys) == keys[1 : 22 - fit]
    again.close()


def test_what_cannot_be_read_in_front_comes_from_behind(on_disk: StackedTier, behind: Behind, tmp_path: Path) -> None:
    blocks = blocks_of(*[5000] * 20)
    keys = list(blocks)
    on_disk.put_all(0, blocks)
    for path in tmp_path.glob("*.seg"):
        with path.open("r+b") as file:
            for at in range(200, path.stat().st_size, 10 * 4096):
                file.seek(at)
                file.write(b"?" * 10)
    assert same(on_disk.read(0, keys), blocks, keys)
    assert 0 < len(behind.asked) < 20


def test_each_of_three_tiers_lets_go_of_tails_first(behind: Behind, tmp_path: Path) -> None:
    tiered = StackedTier(RamTier(2 * MIB), StackedTier(DiskTier(tmp_path, MIB), behind))
    blocks = blocks_of(*[60_000] * 10)
    keys = list(blocks)
    tiered.put_all(0, blocks)
    list(tiered.behind.read(0, keys))
    fit = tiered.behind.front.usable // room(60_000)
    tiered.put_all(0, blocks_of(*[60_000] * (fit - 10 + 3), seed=1))
    assert tiered.behind.front.absent(0, keys) == keys[-3:]
    assert tiered.front.absent(0, keys) == []
    other = tiered.cleared("elsewhere")
    assert [other.front.used, other.behind.front.used] == [0, 0]
    assert other.absent(0, keys) == keys
    other.close()


def test_what_is_dropped_while_it_is_written_is_not_there(behind: Behind) -> None:
    class Late(RamTier):
        def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
            tiered.drop(group, blocks)
            return super().put_all(group, blocks)

    tiered = StackedTier(Late(MIB), behind)
    tiered.put_all(0, blocks_of(100))
    assert (tiered.front.used, list(tiered._order), tiered._coming) == (0, [], {})


def test_a_disk_in_front_that_hangs_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, hung = StackedTier(DiskTier(tmp_path / "disk", 4 * MIB, timeout_s=0.1), Behind()), threading.Event()
    blocks = blocks_of(5000, 5000)
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", lambda *_: hung.wait(60))
        assert store.put_all(0, blocks) == {}
        assert same(store.read(0, list(blocks)), blocks, list(blocks))
        store.close()
        hung.set()
