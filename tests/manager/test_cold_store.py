"""The in-process cold store: a budget that holds at every moment, from any number of threads."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from manthan.manager.stores.cold_store import Buffer, ColdStoreError, ColdStoreFullError, HostStore


def buffer(nbytes: int, value: int = 0) -> Buffer:
    return np.full(nbytes, value, np.uint8)


def keep(store: HostStore, key: bytes, nbytes: int, value: int = 0) -> None:
    store.reserve(nbytes)
    store.put(key, buffer(nbytes, value))


def held(store: HostStore, key: bytes) -> int | None:
    """The value that fills a kept block."""
    (buf,) = store.get([key])
    return None if buf is None else int(buf[0])


def test_what_is_put_can_be_got_in_the_order_asked() -> None:
    store = HostStore(100)
    keep(store, b"a", 40, 1)
    keep(store, b"b", 60, 2)
    b, missing, a = store.get([b"b", b"x", b"a"])
    assert b is not None
    assert a is not None
    assert missing is None
    assert (b.nbytes, b[0], a.nbytes, a[0]) == (60, 2, 40, 1)
    assert store.used == 100


def test_reserved_bytes_count_and_the_refusal_says_what_is_free() -> None:
    store = HostStore(100)
    keep(store, b"a", 30)
    store.reserve(50)
    with pytest.raises(ColdStoreFullError, match=r"^21 bytes do not fit: 20 of 100 are free$") as error:
        store.reserve(21)
    assert isinstance(error.value, ColdStoreError)
    assert error.value.cause == "store_full"
    store.reserve(20)
    assert (store.used, store.peak) == (30, 100)


def test_a_refused_reservation_takes_nothing() -> None:
    store = HostStore(100)
    for _ in range(3):
        with pytest.raises(ColdStoreFullError):
            store.reserve(101)
    store.reserve(100)


def test_unreserved_and_dropped_bytes_are_free_again() -> None:
    store = HostStore(100)
    store.reserve(100)
    store.unreserve(100)
    keep(store, b"a", 100)
    store.drop([b"a", b"unknown", b"a"])
    assert store.used == 0
    assert held(store, b"a") is None
    keep(store, b"b", 100)


def test_putting_a_key_again_replaces_it_and_counts_it_once() -> None:
    store = HostStore(100)
    keep(store, b"a", 40, 1)
    keep(store, b"a", 30, 2)
    assert (store.used, held(store, b"a")) == (30, 2)
    store.reserve(70)


def test_clearing_keeps_reservations() -> None:
    store = HostStore(100)
    keep(store, b"a", 40)
    store.reserve(60)
    store.clear()
    assert (store.used, held(store, b"a")) == (0, None)
    store.reserve(40)
    with pytest.raises(ColdStoreFullError):
        store.reserve(1)


def test_a_block_that_is_read_outlives_its_drop() -> None:
    store = HostStore(100)
    keep(store, b"a", 4, 7)
    (buf,) = store.get([b"a"])
    store.drop([b"a"])
    assert buf is not None
    assert buf.tolist() == [7, 7, 7, 7]


def test_many_threads_never_exceed_the_budget_or_mix_blocks_up() -> None:
    budget, threads, rounds = 1_000, 8, 2_000
    store = HostStore(budget)
    start = threading.Barrier(threads)

    def hammer(seed: int) -> int:
        rng = random.Random(seed)
        refused = 0
        start.wait()
        for _ in range(rounds):
            key, nbytes = rng.randrange(20), rng.randrange(1, 200)
            try:
                store.reserve(nbytes)
            except ColdStoreFullError:
                refused += 1
                store.drop([bytes([rng.randrange(20)])])
                continue
            if rng.random() < 0.2:
                store.unreserve(nbytes)
            else:
                store.put(bytes([key]), buffer(nbytes, key))
            assert held(store, bytes([key])) in (None, key)
        return refused

    with ThreadPoolExecutor(threads) as pool:
        refused = sum(pool.map(hammer, range(threads)))
    assert refused  # the budget was reached
    assert store.peak <= budget
    left = [buf for buf in store.get([bytes([key]) for key in range(20)]) if buf is not None]
    assert store.used == sum(buf.nbytes for buf in left)
    store.clear()
    store.reserve(budget)  # no reservation leaked
