"""The path beside a GPU, with CUDA's part played on the CPU: what comes back, and that everybody is answered once."""

import random
from collections.abc import Callable
from itertools import count
from typing import Any

import fake_cuda
import numpy as np
import pytest
import torch
from fake_cuda import BLOCKS, TOKENS

from manthan.codec.base import Numbers
from manthan.codec.gpu.paged import PagedCodec
from manthan.manager.tiers.arena import room
from manthan.manager.work import GroupBlocks, GroupKeys, Load, LoadResult, SpillBlock, SpillResult
from manthan.vllm_hooks.messages import ManthanMetadata
from manthan.vllm_hooks.worker import gpu_path
from manthan.vllm_hooks.worker.blocks import DeviceMemory
from manthan.vllm_hooks.worker.gpu_path import GpuPath
from manthan.vllm_hooks.worker.tiers import Tier, Tiers

GROUP = 5
FORMS = (0, 3, TOKENS)


class World:
    """A path over a cache of random numbers. place: bytes of the tiers on the device and on the host. staging: of the
    buffers between. codec: makes one for a group."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        place: tuple[int, int],
        staging: int = 1 << 14,
        codec: Callable[..., PagedCodec] = fake_cuda.paged_codec,
    ) -> None:
        self.gpu = fake_cuda.install(monkeypatch)
        monkeypatch.setattr(gpu_path, "STAGING_BYTES", staging)
        monkeypatch.setattr(gpu_path, "RESTORE_STAGING_BYTES", staging)
        self.codec = codec(group=GROUP)
        self.memory = DeviceMemory(self.codec.layout)
        tiers = [Tier(torch.zeros(nbytes, dtype=torch.uint8)) if nbytes else None for nbytes in place]
        self.tiers = Tiers(*tiers)
        self.path = GpuPath({GROUP: self.codec}, self.tiers, forms=FORMS)

    def nbytes(self, exact: int) -> int:
        return self.codec.form(exact).nbytes

    def spill(self, *spills: SpillBlock) -> list[SpillResult]:
        """Encode blocks; the answers."""
        self.path.submit_spills(ManthanMetadata(spills=list(spills)))
        self.path.take_finished_loads()
        return self.path.take_report().spills

    def submit(self, keys: list[bytes], block_ids: list[int], **more: Any) -> None:
        load = Load("request", (GroupBlocks(GROUP, keys, block_ids),), **more)
        self.path.submit_loads(ManthanMetadata(loads=[load]))

    def load(self, keys: list[bytes], block_ids: list[int], **more: Any) -> LoadResult:
        """Decode blocks; what is reported of it."""
        self.submit(keys, block_ids, **more)
        finished = self.path.take_finished_loads()
        assert finished == (set() if more.get("is_prefetch") else {"request"})
        [result] = self.path.take_report().loads
        return result

    def drop(self, *keys: bytes) -> None:
        self.path.submit_loads(ManthanMetadata(drops=[GroupKeys(GROUP, list(keys))]))

    def numbers(self, block_id: int) -> np.ndarray:
        """Keys and values, [2, layers, heads, tokens, head_dim]."""
        return np.stack(self.memory.gather(block_id)).copy()

    def encoded(self, numbers: Numbers, spill: SpillBlock) -> np.ndarray:
        """The block, as numpy makes it."""
        told = {"key": spill.key, "first_token": spill.first_token, "exact": spill.exact}
        return self.codec.format.encode(*numbers, **told)

    def as_restored(self, numbers: Numbers, spill: SpillBlock) -> np.ndarray:
        """What a block's numbers become, as numpy says."""
        return np.stack(self.codec.format.decode(self.encoded(numbers, spill), key=spill.key))


def key(n: int) -> bytes:
    return n.to_bytes(32, "big")


def order(n: int, exact: int = 0, block_id: int | None = None) -> SpillBlock:
    return SpillBlock(key(n), GROUP, n if block_id is None else block_id, TOKENS * n, exact)


@pytest.fixture(params=["device", "host", "device and host"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """With room for so many blocks that are all exact, in one tier or in two."""

    def made(blocks: int = 10, **more: Any) -> World:
        whole = blocks * fake_cuda.paged_codec().form(TOKENS).nbytes
        place = {"device": (whole, 0), "host": (0, whole), "device and host": (whole // 3, whole)}[request.param]
        return World(monkeypatch, place, **more)

    return made


# -- what comes back ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "staging", "chunk"),
    [(fake_cuda.varying_codec, 1 << 16, 1024), (fake_cuda.paged_codec, 1, 3)],
    ids=["varying", "fixed, in pieces"],
)
def test_blocks_of_all_forms_come_back_as_numpy_says(
    make: Callable[..., World],
    monkeypatch: pytest.MonkeyPatch,
    staging: int,
    chunk: int,
    codec: Callable[..., PagedCodec],
) -> None:
    """Stored, dropped, replaced and read in any order, in one piece and in several; exact tokens bit for bit. Room is
    what blocks take, not what they might.

    staging: 1 is room for one block of any kind.
    """
    monkeypatch.setattr(gpu_path, "LOAD_CHUNK", chunk)
    world, rng = make(6, staging=staging, codec=codec), random.Random(staging + chunk)
    stored: dict[bytes, np.ndarray] = {}
    read = in_pieces = 0
    for _ in range(100):
        spills = [
            order(rng.randrange(40), rng.choice(FORMS), rng.randrange(BLOCKS // 2)) for _ in range(rng.randrange(1, 4))
        ]
        spills = list({spill.key: spill for spill in spills}.values())
        for spill, result in zip(spills, sorted_like(spills, world.spill(*spills)), strict=True):
            assert result.cause in (None, "store_full")
            if result.cause is None:
                assert result.nbytes == room(len(world.encoded(world.numbers(spill.block_id), spill)))
                stored[spill.key] = world.as_restored(world.numbers(spill.block_id), spill)
        gone = [key for key in stored if rng.random() < 0.1]
        world.drop(*gone)
        stored = {name: kept for name, kept in stored.items() if name not in gone}
        in_pieces += sum(len(block.extents) > 1 for tier in world.tiers.all for block in tier.blocks().values())
        keys = rng.sample(sorted(stored), min(len(stored), 6))
        targets = rng.sample(range(BLOCKS // 2, BLOCKS), len(keys))
        if keys:
            before = [cache.clone() for cache in world.codec.layout.caches]
            result, kept = world.load(keys, targets), [tier.blocks() for tier in world.tiers.all]
            assert result.failed == []
            assert result.nbytes == sum(kept[(GROUP, name) not in kept[0]][GROUP, name].nbytes for name in keys)
            assert world.path.take_failed_blocks() == set()
            right = [(world.numbers(to) == stored[name]).all() for name, to in zip(keys, targets, strict=True)]
            assert all(right)
            others = [block for block in range(BLOCKS) if block not in targets]
            pairs = zip(before, world.codec.layout.caches, strict=True)
            assert all(torch.equal(then[others], now[others]) for then, now in pairs)
            read += len(keys)
        rooms = [room(block.nbytes) for tier in world.tiers.all for block in tier.blocks().values()]
        assert world.tiers.used == sum(rooms)
    assert read > 200
    assert in_pieces > 0


def sorted_like(spills: list[SpillBlock], results: list[SpillResult]) -> list[SpillResult]:
    by_key = {result.key: result for result in results}
    assert len(by_key) == len(results) == len(spills)
    return [by_key[spill.key] for spill in spills]


@pytest.mark.parametrize("exact", [0, TOKENS])
def test_damage_is_found_and_nothing_is_written(make: Callable[..., World], exact: int) -> None:
    world = make()
    world.spill(*(order(n, exact) for n in range(3)))
    tier = world.tiers.first
    [extent] = tier.blocks()[GROUP, key(1)].extents
    tier.codes[extent.start + world.nbytes(exact) - 9] ^= 1
    before = world.numbers(41)
    assert world.load([key(n) for n in range(3)], [40, 41, 42]).failed == [(GROUP, key(1), "checksum")]
    assert world.path.take_failed_blocks() == {41, 42}
    assert np.array_equal(world.numbers(41), before)


# -- answers ------------------------------------------------------------------------------------------


def answers(world: World, polls: int = 5) -> tuple[int, list[tuple[int, bytes, str]]]:
    """How often the load was answered, and what was reported of it, which must be once."""
    finished, reports = 0, []
    for _ in range(polls):
        finished += len(world.path.take_finished_loads())
        report = world.path.take_report()
        reports += report.loads if report else []
    [result] = reports
    return finished, result.failed


@pytest.mark.parametrize("is_prefetch", [False, True])
@pytest.mark.parametrize("reached", [None, 1, 2], ids=["before", "while it is checked", "while it is decoded"])
def test_a_load_on_a_gpu_that_breaks_is_answered_once(
    make: Callable[..., World], reached: int | None, is_prefetch: bool
) -> None:
    """Events of a load: what the model was given; checked; decoded."""
    world = make()
    world.spill(order(0), order(1))
    world.gpu.broken = reached is None
    world.gpu.events, world.gpu.reached = 0, reached or 0
    world.submit([key(0), key(1)], [40, 41], is_prefetch=is_prefetch)
    finished = len(world.path.take_finished_loads())
    assert finished == (not is_prefetch and reached != 1)
    report = world.path.take_report()
    world.gpu.broken = True
    more, failed = answers(world) if report is None else (0, report.loads[0].failed)
    assert finished + more == (0 if is_prefetch else 1)
    assert failed == [(GROUP, key(0), "internal")]
    assert world.path.take_failed_blocks() == ({40, 41} if not is_prefetch and reached != 2 else set())


@pytest.mark.parametrize("what", ["batch", "encode"])
def test_spills_that_raise_are_answered_once_and_take_no_room(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    world = make()
    real, calls = getattr(world.codec, what), count(1)

    def second_time(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(world.codec, what, second_time)
        results = world.spill(order(1), order(2, 3), order(3))
    assert sorted(result.cause or "" for result in results) == ["", "", "internal"]
    assert world.tiers.used == sum(result.nbytes for result in results)
    assert world.spill(order(4))[0].cause is None


@pytest.mark.parametrize("reached", [None, 0], ids=["before", "while they are encoded"])
def test_spills_on_a_gpu_that_breaks_are_answered_once_and_take_no_room(
    make: Callable[..., World], reached: int | None
) -> None:
    world = make()
    world.gpu.broken, world.gpu.reached = reached is None, 0
    world.path.submit_spills(ManthanMetadata(spills=[order(1), order(2, 3)]))
    world.path.take_finished_loads()
    before = world.path.take_report()
    assert (before is None) == (reached == 0)
    world.gpu.broken = True
    world.path.take_finished_loads()
    report = before or world.path.take_report()
    assert sorted((result.key, result.cause) for result in report.spills) == [
        (key(1), "internal"),
        (key(2), "internal"),
    ]
    assert world.tiers.used == 0
    assert world.path.take_report() is None
