"""Stores that the CPU reaches beside a GPU, which PyTorch on the CPU plays: what is lent is read where it lies, what is
read lands in a ring, and whatever happens, what was lent is given back."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import numpy as np
import pytest
import torch
from integrity import check_store
from key_files import write_keys
from store_world import GROUP, StoreWorld

from manthan.manager.config.model import EncryptionConfig
from manthan.manager.stores.cold_store import ColdStore, HostStore
from manthan.manager.stores.disk.store import DiskError, DiskStore
from manthan.manager.stores.sealed import SealedStore, Sealer, keys_of
from manthan.manager.stores.tiered import TieredStore
from manthan.vllm_hooks import compat
from manthan.vllm_hooks.messages import GroupKeys, ManthanMetadata
from manthan.vllm_hooks.worker import pinned
from manthan.vllm_hooks.worker.pinned import PinnedRam

pytestmark = pytest.mark.usefixtures("engine_config")

SOURCES = 24
MIB = 1 << 20
PIECE = 64 << 10


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr(pinned, "PIECE", PIECE)
    for name in ("pin", "unpin"):
        monkeypatch.setattr(compat, name, lambda memory: None)


Start = Callable[..., StoreWorld]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    worlds: list[StoreWorld] = []

    def make(kind: str, ram_nbytes: int = MIB, varies: bool = False, slots: int = 4, **sizes: int) -> StoreWorld:
        def store(device: torch.device) -> ColdStore:
            made: ColdStore = DiskStore(tmp_path / "disk", 16 * MIB)
            if "sealed" in kind:
                made = SealedStore(
                    made,
                    Sealer(keys_of(EncryptionConfig(key_file=str(write_keys(tmp_path / "keys", "k1")))), "place"),
                    0,
                )
            if "ram" not in kind:
                return made
            ram = PinnedRam(ram_nbytes, device)
            ram.start()
            ram.wait()
            return TieredStore(HostStore(ram_nbytes, ram), made)

        codec = fake_cuda.varying_codec(group=GROUP) if varies else fake_cuda.paged_codec(group=GROUP)
        sizes = {"staging": 24 << 10, "slot": 16 << 10} | sizes
        worlds.append(StoreWorld(codec, store, SOURCES, slots=slots, **sizes))
        return worlds[-1]

    yield make
    for world in worlds:
        world.path.shutdown()


def front(world: StoreWorld) -> HostStore:
    assert isinstance(world.store, TieredStore)
    assert isinstance(world.store.front, HostStore)
    return world.store.front


def nothing_is_lent(world: StoreWorld) -> bool:
    return all(kept.lent == 0 for kept in front(world)._blocks.values()) and front(world)._lent == 0


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("varies", [False, True], ids=["fixed", "varies"])
@pytest.mark.parametrize("kind", ["disk", "sealed disk", "ram", "ram before a sealed disk"])
def test_blocks_go_and_come_back(start: Start, kind: str, varies: bool, slots: int) -> None:
    world = start(kind, varies=varies, slots=slots)
    world.spill()
    for count in (SOURCES, 5, 1):
        assert world.load(world.keys[:count]).failed == []
        assert world.load(world.keys[-count:], is_prefetch=True).failed == []
    if "ram" in kind:
        assert nothing_is_lent(world)
        check_store(front(world))


@pytest.mark.parametrize("room", [2, 3, 7])
def test_what_is_not_in_ram_comes_from_behind_and_makes_room_there(start: Start, room: int) -> None:
    world = start("ram", ram_nbytes=room * 6_000)
    world.spill()
    rng = random.Random(room)
    for _ in range(6):
        some = rng.sample(world.keys, rng.randrange(1, SOURCES))
        assert world.load(some).failed == []
        assert nothing_is_lent(world)
        assert front(world).used <= front(world).usable
        check_store(front(world))
    assert 0 < len(front(world).names()) < SOURCES


def test_what_is_in_ram_is_not_copied_by_the_cpu(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor read from behind."""
    world = start("ram")
    world.spill()
    whole = [kept for kept in front(world)._blocks.values() if len(kept.extents) == 1]
    assert len(whole) > SOURCES - 4, "few lie in two pieces"
    places = {kept.extents[0].start for kept in whole}
    memory, sources = front(world)._memory.lendable, []
    copy = compat.copy_blocks

    def seen(froms: torch.Tensor, tos: torch.Tensor, sizes: torch.Tensor) -> None:
        sources.extend(froms.tolist())
        copy(froms, tos, sizes)

    monkeypatch.setattr(compat, "copy_blocks", seen)
    monkeypatch.setattr(world.store.behind, "read", lambda *_: iter(()))  # type: ignore[attr-defined]
    assert world.load(world.keys).failed == []
    assert memory is not None
    begin = memory.__array_interface__["data"][0]
    assert places <= {at - begin for at in sources}


def test_a_block_that_is_dropped_while_the_gpu_reads_it_stays_until_then(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = start("ram")
    world.spill()
    copy, dropped = compat.copy_blocks, []

    def drop(*told: torch.Tensor) -> None:
        if not dropped:
            front(world).drop(GROUP, world.keys)
            dropped.append(front(world).used)
            others = {bytes([200, n]): np.full(20_000, 255, np.uint8) for n in range(10)}
            front(world).put_all(GROUP, others)
        copy(*told)

    monkeypatch.setattr(compat, "copy_blocks", drop)
    assert world.load(world.keys).failed == []
    assert dropped == [0]
    assert front(world).used == 10 * front(world).room(20_000)
    assert nothing_is_lent(world)
    check_store(front(world))


def test_whatever_fails_what_was_lent_is_given_back(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    world = start("ram")
    world.spill()
    kept = front(world)._blocks[GROUP, world.keys[9]]
    memory = front(world)._memory.lendable
    assert memory is not None
    memory[kept.extents[0].start + 400] ^= 1
    assert world.load(world.keys).failed == [(GROUP, world.keys[9], "checksum")]
    assert nothing_is_lent(world)

    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(compat, "copy_blocks", broken)
        assert world.load(world.keys).failed == [(GROUP, world.keys[0], "internal")]
    assert nothing_is_lent(world)
    world.path.submit_loads(ManthanMetadata(drops=[GroupKeys(GROUP, world.keys[3:5])]))
    assert world.load(world.keys).failed == [(GROUP, key, "missing") for key in world.keys[3:5]]
    assert nothing_is_lent(world)


def test_a_disk_that_fails_in_the_middle_costs_what_is_behind(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that cannot be read is read block by block."""
    world = start("disk")
    world.spill()
    assert isinstance(world.store, DiskStore)
    at = world.store._index[GROUP, world.keys[11]].record.offset
    segment = type(world.store._index[GROUP, world.keys[11]].segment)
    read_run = segment.read_run

    def read(self: Any, run: Any, memory: Any) -> Any:
        if any(record.offset == at for record in run):
            raise OSError(5, "Input/output error")
        return read_run(self, run, memory)

    with monkeypatch.context() as patch:
        patch.setattr(segment, "read_run", read)
        assert world.load(world.keys).failed == [(GROUP, world.keys[11], DiskError.cause)]
    assert world.load(world.keys).failed == []


def test_a_disk_that_hangs_is_given_up_and_its_ring_too(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is read in the end is written to memory that nobody uses."""
    import os
    import threading

    world = start("disk")
    world.spill()
    assert isinstance(world.store, DiskStore)
    world.store._timeout_s = 0.2
    hung, real, before = threading.Event(), os.preadv, world.intakes[0].ring._memory

    def hang(*arguments: Any) -> int:
        hung.wait(60)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", hang)
        assert world.load(world.keys).failed == [(GROUP, world.keys[0], "store_down")]
    ring = world.intakes[0].ring
    assert not np.shares_memory(ring._memory, before)
    hung.set()
    while world.store._stuck is not None and not world.store._stuck.done():
        pass
    assert world.load(world.keys).failed == []


def test_ram_is_used_as_far_as_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    may_go_on, pinned_pieces = threading.Semaphore(1), []

    def pin(memory: torch.Tensor) -> None:
        may_go_on.acquire()
        pinned_pieces.append(memory.nbytes)

    monkeypatch.setattr(compat, "pin", pin)
    ram = PinnedRam(4 * PIECE, torch.device("cpu"))
    store = HostStore(4 * PIECE, ram)
    store.reached(1)
    half = store.room(PIECE // 2 - 512)
    blocks = {bytes([n]): np.full(half, n, np.uint8) for n in range(8)}
    assert len(store.put_all(0, blocks)) == 6, "one piece is there"
    may_go_on.release(2)
    while len(ram.spans) < 3:
        pass
    assert list(store.put_all(0, dict(list(blocks.items())[2:]))) == [bytes([6]), bytes([7])]
    may_go_on.release(10)
    ram.wait()
    assert ram.is_whole
    assert sum(pinned_pieces) == sum(span.nbytes for span in ram.spans) == 4 * PIECE
    assert store.put_all(0, dict(list(blocks.items())[6:])) == {}
    for key, buf in zip(blocks, store.read(0, list(blocks)), strict=True):
        assert buf is not None
        assert set(buf.tolist()) == {key[0]}
    check_store(store)


def test_who_stops_does_not_wait_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    unpinned: list[int] = []
    monkeypatch.setattr(compat, "unpin", lambda memory: unpinned.append(memory.nbytes))
    ram = PinnedRam(10_000 * PIECE, torch.device("cpu"))
    ram.start()
    ram.close()
    assert 0 < len(unpinned) < 10_000
    assert list(ram.spans) == []


def test_a_limit_in_the_middle_leaves_what_there_is(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    pieces = iter(range(3))

    def pin(memory: torch.Tensor) -> None:
        if next(pieces, None) is None:
            raise RuntimeError("cudaHostRegister failed: out of memory")

    monkeypatch.setattr(compat, "pin", pin)
    ram = PinnedRam(5 * PIECE, torch.device("cpu"))
    assert len(ram.spans) == 1
    TieredStore(HostStore(5 * PIECE, ram), HostStore(1)).reached(1)
    ram.wait()
    assert len(ram.spans) == 3
    store = HostStore(5 * PIECE, ram)
    assert store.available == 3 * (PIECE - 256)
