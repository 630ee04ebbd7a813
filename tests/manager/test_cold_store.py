"""The in-process cold store: a budget that holds at every moment, from any number of threads."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from integrity import check_store

from manthan.manager.tiers import ram as memory
from manthan.manager.tiers.arena import GRANULE, room
from manthan.manager.tiers.ram import RamTier
from manthan.manager.tiers.tier import Buffer

BUDGET = 100 * GRANULE


def buffer(nbytes: int, value: int = 0) -> Buffer:
    return np.full(nbytes, value, np.uint8)


def keep(store: RamTier, key: bytes, nbytes: int, value: int = 0, group: int = 0) -> bool:
    """Whether it was kept."""
    refused = store.put_all(group, {key: buffer(nbytes, value)})
    assert refused in ({}, {key: "store_full"})
    return not refused


def held(store: RamTier, key: bytes, group: int = 0) -> int | None:
    """The value that fills a kept block."""
    (buf,) = store.read(group, [key])
    if buf is None:
        return None
    assert np.unique(buf).size == 1
    return int(buf[0])


def test_what_is_put_can_be_read_in_the_order_asked() -> None:
    store = RamTier(BUDGET)
    assert keep(store, b"a", 40 * GRANULE, 1)
    assert keep(store, b"b", 60 * GRANULE, 2)
    b, missing, a = store.read(0, [b"b", b"x", b"a"])
    assert b is not None
    assert a is not None
    assert missing is None
    assert (b.nbytes, b[0], a.nbytes, a[0]) == (60 * GRANULE, 2, 40 * GRANULE, 1)
    assert (store.used, store._arena.available, store.peak) == (BUDGET, 0, BUDGET)


def test_groups_are_kept_apart() -> None:
    store = RamTier(BUDGET)
    keep(store, b"a", 100, 1, group=0)
    keep(store, b"a", 200, 2, group=3)
    assert (held(store, b"a"), held(store, b"a", 3), held(store, b"a", 1)) == (1, 2, None)
    assert store.absent(1, [b"a"]) == [b"a"]
    store.drop(0, [b"a"])
    assert (held(store, b"a"), held(store, b"a", 3)) == (None, 2)
    assert store.absent(0, [b"a", b"b"]) == [b"a", b"b"]
    assert store.absent(3, [b"a", b"b"]) == [b"b"]


def test_what_does_not_fit_is_refused_and_takes_nothing() -> None:
    store = RamTier(BUDGET)
    keep(store, b"a", 90 * GRANULE)
    blocks = {b"b": buffer(8 * GRANULE), b"c": buffer(3 * GRANULE), b"d": buffer(2 * GRANULE)}
    assert store.put_all(0, blocks) == {b"c": "store_full"}
    assert store.used == store.peak == BUDGET
    assert store.absent(0, list(blocks)) == [b"c"]


def test_putting_a_key_again_replaces_it_and_counts_it_once() -> None:
    store = RamTier(BUDGET)
    keep(store, b"a", 40 * GRANULE, 1)
    keep(store, b"a", 30 * GRANULE, 2)
    assert (store.used, held(store, b"a")) == (30 * GRANULE, 2)
    assert keep(store, b"a", BUDGET, 3)
    assert held(store, b"a") == 3


@pytest.mark.parametrize("bound", [1000, GRANULE, 5 * GRANULE + 1])
def test_blocks_that_are_smaller_than_expected_leave_their_room_to_others(bound: int) -> None:
    """A store accounts for what a block has and not for what it might have had: nothing leaks."""
    store, rng = RamTier(BUDGET), random.Random(bound)
    for _ in range(50):
        sizes = {bytes([at]): rng.randrange(1, bound + 1) for at in range(BUDGET // room(bound))}
        assert store.put_all(0, {key: buffer(size) for key, size in sizes.items()}) == {}
        assert store.used == sum(map(store.room, sizes.values()))
        store.drop(0, sizes)
        assert store._arena.available == BUDGET
    assert keep(store, b"a", BUDGET)
    check_store(store)


def test_a_block_that_is_dropped_while_it_is_read_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes may be another's already."""
    store = RamTier(GRANULE)
    keep(store, b"a", 4, 7)
    whole = store._memory.read

    def read(kept: object) -> Buffer:
        store.drop(0, [b"a"])
        keep(store, b"a", 4, 9)
        return whole(kept)

    monkeypatch.setattr(store._memory, "read", read)
    assert list(store.read(0, [b"a"])) == [None]


def test_blocks_may_lie_in_several_chunks_and_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CHUNK", 3 * GRANULE)
    store, rng = RamTier(40 * GRANULE), np.random.default_rng(1)
    blocks = {bytes([at]): rng.integers(0, 256, size, np.uint8) for at, size in enumerate([1, 700, 2000, 300, 4000])}
    assert store.put_all(0, blocks) == {}
    store.drop(0, [b"\0", b"\3"])
    last = {b"last": rng.integers(0, 256, store._arena.available - 10, np.uint8)}
    assert store.put_all(0, last) == {}
    assert len(store._blocks[0, b"last"].extents) > 1
    kept = {key: buf for key, buf in (blocks | last).items() if key not in (b"\0", b"\3")}
    for buf, found in zip(kept.values(), store.read(0, list(kept)), strict=True):
        np.testing.assert_array_equal(buf, found)


def test_many_threads_never_exceed_the_budget_or_mix_blocks_up() -> None:
    budget, threads, rounds = 20 * GRANULE, 8, 2_000
    store = RamTier(budget)
    start = threading.Barrier(threads)

    def hammer(seed: int) -> int:
        rng = random.Random(seed)
        refused = 0
        start.wait()
        for _ in range(rounds):
            key, nbytes = rng.randrange(20), rng.randrange(1, 4 * GRANULE)
            if not keep(store, bytes([key]), nbytes, key):
                refused += 1
                store.drop(0, [bytes([rng.randrange(20)])])
            assert store.used <= budget
            assert held(store, bytes([key])) in (None, key)
        return refused

    with ThreadPoolExecutor(threads) as pool:
        refused = sum(pool.map(hammer, range(threads)))
    assert refused  # the budget was reached
    assert store.peak <= budget
    left = [buf for buf in store.read(0, [bytes([key]) for key in range(20)]) if buf is not None]
    assert store.used == sum(room(buf.nbytes) for buf in left)
    check_store(store)
    store.close()
    assert keep(store, b"all", budget)  # nothing leaked
