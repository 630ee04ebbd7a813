"""One rank's store that others use too: what they put and read, in which order, and what if it is gone."""

import multiprocessing
import os
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
from store_players import play, refused

from manthan.manager.stores.arena import GRANULE, room
from manthan.manager.stores.cold_store import Buffer, ColdStoreError, HostStore
from manthan.manager.stores.served import BATCH, RemoteStore, ServedStoreError, ServingStore, StoreServer

BUDGET = 200 * GRANULE
KEYS = [bytes([n]) * 32 for n in range(40)]


class Ranks(NamedTuple):
    """What two ranks see, and the store that is behind it."""

    kept: HostStore
    first: ServingStore
    second: RemoteStore


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    name, kept = secrets.token_hex(8), HostStore(BUDGET)
    ranks = Ranks(kept, ServingStore(kept, StoreServer(kept, name)), RemoteStore(name, room))
    yield ranks
    ranks.second.close()
    ranks.first.close()


def buffer(nbytes: int, value: int = 0) -> Buffer:
    return np.full(nbytes, value, np.uint8)


def test_what_one_rank_stores_the_other_reads_and_it_is_there_once(ranks: Ranks) -> None:
    blocks = {key: buffer(1001 + n, n) for n, key in enumerate(KEYS)}
    assert len(blocks) > 2 * BATCH
    mine = {key: buf for n, (key, buf) in enumerate(blocks.items()) if n % 2}
    others = {key: buf for key, buf in blocks.items() if key not in mine}
    assert ranks.second.put_all(3, mine) == ranks.first.put_all(3, others) == {}
    for store in ranks.first, ranks.second:
        for key, buf in zip(KEYS, store.read(3, KEYS), strict=True):
            assert buf is not None
            assert np.array_equal(buf, blocks[key])
        assert list(store.read(0, KEYS[:2])) == [None, None]
        assert store.absent(3, [KEYS[0], b"x" * 32]) == [b"x" * 32]
    assert ranks.kept.used == sum(ranks.second.room(buf.nbytes) for buf in blocks.values())


def test_blocks_that_are_not_there_leave_gaps(ranks: Ranks) -> None:
    ranks.second.put_all(0, {KEYS[1]: buffer(10, 1), KEYS[BATCH + 1]: buffer(20, 2)})
    found = [None if buf is None else buf.nbytes for buf in ranks.second.read(0, KEYS[: BATCH + 3])]
    assert found == [None, 10, *[None] * (BATCH - 1), 20, None]


def test_the_budget_is_that_of_the_one_store(ranks: Ranks) -> None:
    assert ranks.first.put_all(0, {KEYS[0]: buffer(120 * GRANULE)}) == {}
    assert ranks.second.put_all(0, {KEYS[1]: buffer(120 * GRANULE)}) == {KEYS[1]: "store_full"}
    ranks.second.drop(0, [KEYS[0]])
    assert ranks.kept.used == 120 * GRANULE, "drops are for the rank that has the store"


def test_a_put_waits_for_drops_that_the_other_rank_has_not_made_yet(ranks: Ranks) -> None:
    ranks.first.put_all(0, {KEYS[0]: buffer(120 * GRANULE)})
    ranks.second.reached(7)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(ranks.second.put_all, 0, {KEYS[1]: buffer(120 * GRANULE)})
        with pytest.raises(TimeoutError):
            answer.result(timeout=0.2)
        ranks.first.drop(0, [KEYS[0]])
        ranks.first.reached(7)
        assert answer.result(timeout=30) == {}
    assert ranks.kept.names() == [(0, KEYS[1])]


def test_what_was_encoded_before_a_reset_is_not_kept_behind_it(ranks: Ranks) -> None:
    first = ranks.first.cleared("")
    assert ranks.second.put_all(0, {KEYS[0]: buffer(10)}) == {KEYS[0]: "reset"}
    with pytest.raises(ServedStoreError, match="reset"):
        list(ranks.second.read(0, KEYS[:1]))
    second = ranks.second.cleared("")
    assert second.put_all(0, {KEYS[0]: buffer(10)}) == {}
    assert first.absent(0, KEYS[:1]) == []


def test_what_is_encoded_behind_a_reset_waits_for_it(ranks: Ranks) -> None:
    """Otherwise it would go with what the reset is about."""
    second = ranks.second.cleared("")
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(second.put_all, 0, {KEYS[0]: buffer(10)})
        with pytest.raises(TimeoutError):
            answer.result(timeout=0.2)
        ranks.first.cleared("")
        assert answer.result(timeout=30) == {}
    assert ranks.kept.names() == [(0, KEYS[0])]


def test_a_rank_that_is_gone_is_a_store_that_does_not_answer(ranks: Ranks) -> None:
    ranks.second.put_all(0, {KEYS[0]: buffer(10)})
    alone = RemoteStore(secrets.token_hex(8), room)
    assert alone.put_all(0, {KEYS[0]: buffer(10)}) == {KEYS[0]: "store_down"}
    with pytest.raises(ColdStoreError) as raised:
        list(alone.read(0, KEYS[:1]))
    assert raised.value.cause == "store_down"


def test_nobody_waits_for_a_rank_that_ends() -> None:
    name, kept = secrets.token_hex(8), HostStore(BUDGET)
    first, second = ServingStore(kept, StoreServer(kept, name)), RemoteStore(name, room)
    second.reached(1)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(second.put_all, 0, {KEYS[0]: buffer(10)})
        with pytest.raises(TimeoutError):
            answer.result(timeout=0.2)
        first.close()
        assert answer.result(timeout=30) == {KEYS[0]: "store_down"}
    assert second.put_all(0, {KEYS[0]: buffer(10)}) == {KEYS[0]: "store_down"}


def test_what_fails_there_is_told_with_its_cause(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    class FailedError(ColdStoreError):
        cause = "disk"

    def fails(*_: object) -> None:
        raise FailedError

    monkeypatch.setattr(ranks.kept, "read", fails)
    with pytest.raises(ServedStoreError) as raised:
        list(ranks.second.read(0, KEYS[:1]))
    assert raised.value.cause == "disk"
    monkeypatch.setattr(ranks.kept, "put_all", lambda *_: 1 / 0)
    assert ranks.second.put_all(0, {KEYS[0]: buffer(10)}) == {KEYS[0]: "internal"}
    assert ranks.second.absent(0, KEYS[:1]) == KEYS[:1], "the next question is another one"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_is_not_let_in() -> None:
    name, kept = secrets.token_hex(8), HostStore(BUDGET)
    first = ServingStore(kept, StoreServer(kept, name))
    other = multiprocessing.get_context("spawn").Process(target=refused, args=(name,))
    other.start()
    other.join(60)
    assert (other.exitcode, kept.names()) == (0, [])
    first.close()


def test_processes_and_threads_at_once() -> None:
    name, kept = secrets.token_hex(8), HostStore(64 << 20)
    first = ServingStore(kept, StoreServer(kept, name))
    spawning = multiprocessing.get_context("spawn")
    others = [spawning.Process(target=play, args=(name, seed, 66)) for seed in (1, 2)]
    for other in others:
        other.start()
    play(name, 3, 66)
    for other in others:
        other.join(60)
        assert other.exitcode == 0
    assert len(kept.names()) == 3 * 66
    kept.check()
    threads = {thread.name for thread in threading.enumerate()}
    first.close()
    assert "manthan-serve" in threads
