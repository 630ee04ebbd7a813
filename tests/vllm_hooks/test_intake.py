"""Memory that a GPU copies from: a ring whose slots are used again once what was read is copied, and pinned RAM."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from integrity import check_store

from manthan.manager.tiers.ram import RamTier
from manthan.manager.tiers.tier import Buffer
from manthan.vllm_hooks import compat
from manthan.vllm_hooks.worker import pinned
from manthan.vllm_hooks.worker.intake import Ring, address, batches
from manthan.vllm_hooks.worker.pinned import PinnedRam

CPU = torch.device("cpu")
SLOT = 1000
PIECE = 64 << 10


class Event:
    """In an event's place; it is reached when somebody waits for it."""

    reached = False

    def synchronize(self) -> None:
        self.reached = True


def place(ring: Ring, buf: Buffer) -> int | None:
    """Where it is in the ring; None for elsewhere."""
    at = address(buf) - address(ring._memory)
    return at if 0 <= at < ring._memory.nbytes else None


def copied(ring: Ring, *bufs: Buffer) -> Event:
    event: Any = Event()
    ring.copied(np.array([address(buf) for buf in bufs], np.int64), event)
    return event


def test_a_slot_is_filled_again_when_all_of_it_is_copied() -> None:
    ring = Ring(SLOT, 2, CPU)
    one, two, three = ring.room(600), ring.room(600), ring.room(400)
    assert [place(ring, buf) for buf in (one, two, three)] == [0, SLOT, SLOT + 600]
    assert place(ring, ring.room(1)) is None, "nothing is copied yet"
    first = copied(ring, two)
    second = copied(ring, one)
    four = ring.room(500)
    assert (place(ring, four), first.reached, second.reached) == (0, True, True)
    assert place(ring, ring.room(600)) is None, "a block of the second slot is not copied"
    copied(ring, three)
    assert place(ring, ring.room(600)) == SLOT


def test_what_is_lent_is_given_back_once() -> None:
    ring, back = Ring(SLOT, 1, CPU), list[str]()
    memory = np.zeros(5000, np.uint8)
    ring.lend(memory, lambda: back.append("given"))
    room = ring.room(10)
    ats = np.array([address(memory[10:]), address(memory) + 5000, address(room)], np.int64)
    assert ring.are_pinned(ats).tolist() == [True, False, True]
    assert [ring.is_read(buf) for buf in (memory[10:], room, memory[10:].copy())] == [False, True, True]
    ring.clear()
    ring.clear()
    assert back == ["given"]
    assert ring.are_pinned(ats).tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("sizes", "cut"), [((40,) * 5, [2, 2, 1]), ((10, 90, 100, 1), [2, 1, 1]), ((300, 10), [1, 1]), ((), [])]
)
def test_a_batch_is_full_before_it_is_too_large(sizes: tuple[int, ...], cut: list[int]) -> None:
    values = (np.zeros(size, np.uint8) for size in sizes)
    assert [len(batch) for batch in batches(values, lambda buf: buf.nbytes, 100)] == cut


def test_nothing_is_read_behind_what_is_not_there() -> None:
    values = iter([np.zeros(1, np.uint8), None, np.zeros(1, np.uint8)])
    assert [len(batch) for batch in batches(values, lambda buf: 1, 100)] == [2]
    assert len(list(values)) == 1


# -- pinned RAM ---------------------------------------------------------------------------------------


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pin pieces of 64 KiB, and none of them really."""
    monkeypatch.setattr(pinned, "PIECE", PIECE)
    for name in ("pin", "unpin"):
        monkeypatch.setattr(compat, name, lambda memory: None)


@pytest.mark.usefixtures("in_pieces")
def test_ram_is_used_as_far_as_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Semaphore(1)
    monkeypatch.setattr(compat, "pin", lambda memory: may_go_on.acquire())
    ram = PinnedRam(4 * PIECE, CPU)
    store = RamTier(4 * PIECE, ram)
    half = store.room(PIECE // 2 - 512)
    blocks = {bytes([n]): np.full(half, n, np.uint8) for n in range(8)}
    assert len(store.put_all(0, blocks)) == 6, "one piece is there"
    may_go_on.release(10)
    ram.wait()
    assert ram.is_whole
    assert store.put_all(0, dict(list(blocks.items())[2:])) == {}
    for key, buf in zip(blocks, store.read(0, list(blocks)), strict=True):
        assert buf is not None
        assert set(buf.tolist()) == {key[0]}
    check_store(store)


@pytest.mark.usefixtures("in_pieces")
def test_a_limit_in_the_middle_leaves_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = iter(range(3))

    def pin(memory: torch.Tensor) -> None:
        if next(pieces, None) is None:
            raise RuntimeError("cudaHostRegister failed: out of memory")

    monkeypatch.setattr(compat, "pin", pin)
    ram = PinnedRam(5 * PIECE, CPU)
    ram.start()
    ram.wait()
    assert len(ram.spans) == 3
    assert RamTier(5 * PIECE, ram)._arena.available == 3 * (PIECE - 256)
