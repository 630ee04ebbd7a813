"""Blocks of engines with several numbers of ranks, in RAM and in folders that earlier servers have left."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from manthan.manager.tiers.arena_tier import RamTier
from manthan.manager.tiers.disk import DiskTier, counts_in, found_in, open_rank, remove_others
from manthan.manager.tiers.joined import Shard, ShardedTier
from manthan.manager.tiers.tier import Buffer, Found, Tier

KEYS = [bytes([n]) * 32 for n in range(6)]
ROOM = 1 << 20


def buf(*parts: int) -> Buffer:
    """Shards that begin with these numbers, one behind the other."""
    return np.concatenate([np.full(100, part, np.uint8) for part in parts])


class Causes(RamTier):
    """Tier that cannot read anything."""

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> list[Found]:  # type: ignore[override]
        return ["disk"] * len(keys)


def put(tier: Tier, keys: Sequence[bytes], part: int) -> None:
    assert tier.put_all(0, {key: buf(part) for key in keys}) == {}


def read(tier: Tier, keys: Sequence[bytes] = KEYS) -> list[object]:
    """What each block's shards begin with; None, or the cause."""
    found = list(tier.read(0, keys))
    return [each[::100].tolist() if isinstance(each, np.ndarray) else each for each in found]


@pytest.fixture
def tiers() -> list[RamTier]:
    """One's own, those of two ranks, and that of one of three."""
    return [RamTier(ROOM) for _ in range(4)]


@pytest.fixture
def sharded(tiers: list[RamTier]) -> ShardedTier:
    return ShardedTier(tiers[0], [tiers[1:3], tiers[3:]])


def test_what_was_stored_again_is_read_and_not_the_older_copy(tiers: list[RamTier], sharded: ShardedTier) -> None:
    put(tiers[3], KEYS, 4)
    put(sharded, KEYS[2:4], 1)
    assert read(sharded) == [[4], [4], [1], [1], [4], [4]]
    assert read(sharded, KEYS[1:3]) == [[4], [1]]


def test_a_block_is_read_in_the_shards_that_are_whole(tiers: list[RamTier], sharded: ShardedTier) -> None:
    put(tiers[0], [KEYS[0], KEYS[5]], 1)
    put(tiers[1], KEYS[1:4], 2)
    put(tiers[2], [KEYS[1], KEYS[3]], 3)
    put(tiers[3], [KEYS[2], KEYS[5]], 4)
    assert read(sharded) == [[1], [2, 3], [4], [2, 3], None, [1]]
    assert read(sharded, KEYS[2:3] + KEYS[5:]) == [[4], [4]], "of whom the one before is"
    assert sharded.absent(0, KEYS) == [KEYS[4]]


def test_a_shard_that_cannot_be_read_is_a_failure_and_no_other_block(tiers: list[RamTier]) -> None:
    broken = Causes(ROOM)
    sharded = ShardedTier(tiers[0], [[tiers[1], broken]])
    put(tiers[1], KEYS[:1], 2)
    assert read(sharded, KEYS[:2]) == ["disk", None]


def test_what_is_dropped_is_dropped_everywhere(tiers: list[RamTier], sharded: ShardedTier) -> None:
    copy = RamTier(ROOM)
    sharded = ShardedTier(tiers[0], [tiers[1:3], tiers[3:]], [copy])
    every = [*tiers, copy]
    for part, tier in enumerate(every):
        put(tier, KEYS, part)
    sharded.drop(0, iter(KEYS[:2]))
    assert [len(tier._blocks) for tier in every] == [4] * 5
    other = sharded.cleared("elsewhere")
    assert not any(tier._blocks for tier in every)
    for tier in every[1:]:
        put(tier, KEYS, 9)
    assert read(other) == [None] * 6, "nobody else's are read behind a reset"
    assert put(other, KEYS[:1], 8) is None
    assert list(tiers[0]._blocks) == [(0, KEYS[0])]


# -- folders of earlier servers ---------------------------------------------------------------------------

MODEL = "model-0123456789ab"


def left(path: Path, count: int, keys: Sequence[bytes] = KEYS) -> None:
    """Blocks of a server with so many ranks."""
    for at in range(count):
        tier = open_rank(path, MODEL, Shard(at, count), ROOM)
        put(tier, keys, 10 * count + at)
        tier.close()


def opened(path: Path, at: int, count: int) -> DiskTier:
    tier = open_rank(path, MODEL, Shard(at, count), 0, is_left=True)
    assert isinstance(tier, DiskTier)
    return tier


def test_several_ranks_read_what_one_has_left_and_all_may_drop_it(tmp_path: Path) -> None:
    left(tmp_path, 1)
    assert counts_in(tmp_path / MODEL) == [1]
    own = [open_rank(tmp_path, MODEL, Shard(at, 2), ROOM) for at in range(2)]
    ranks = [ShardedTier(own[at], [[opened(tmp_path, 0, 1)]]) for at in range(2)]
    put(own[1], KEYS[:1], 21)
    assert [read(rank) for rank in ranks] == [[[10]] * 6, [[21], *[[10]] * 5]]
    for rank in ranks:
        rank.drop(0, KEYS[:2])
    assert [read(rank) for rank in ranks] == [[None, None, *[[10]] * 4]] * 2
    for rank in ranks:
        rank.close()
    assert found_in(tmp_path / MODEL, Shard(0, 1)).keys() == {(0, key) for key in KEYS[2:]}
    again = opened(tmp_path, 0, 1)
    assert read(again) == [None, None, *[[10]] * 4]
    again.close()


def test_a_folder_that_somebody_writes_to_is_not_one_that_was_left(tmp_path: Path) -> None:
    left(tmp_path, 1)
    own = DiskTier(tmp_path / MODEL / "rank-0-of-1", ROOM)
    with pytest.raises(BlockingIOError):
        DiskTier(tmp_path / MODEL / "rank-0-of-1", 0, is_left=True)
    own.close()


def test_numbers_of_ranks_that_are_not_read_are_removed(tmp_path: Path) -> None:
    for count in (1, 2, 4):
        left(tmp_path, count)
    removed = remove_others(tmp_path, MODEL, {1, 2})
    assert sorted(removed) == [f"{MODEL}/rank-{at}-of-4" for at in range(4)]
    assert counts_in(tmp_path / MODEL) == [1, 2]
