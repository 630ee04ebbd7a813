"""The engine on a GPU, with CUDA's part played on the CPU: what comes back, and that everybody is answered once."""

import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import fake_cuda
import jobs
import numpy as np
import pytest
import torch
from fake_cuda import BLOCKS, TOKENS, used
from integrity import check_erased
from some_blocks import until

from manthan.codec.base import Numbers
from manthan.codec.gpu.paged import PagedCodec
from manthan.manager.events import BlocksDropped, DropCause
from manthan.manager.tiers.arena import room
from manthan.manager.tiers.arena_tier import RamTier
from manthan.manager.tiers.peer import PeerServer, PeerTier
from manthan.manager.tiers.tier import Tier
from manthan.manager.transfer import Transfer, TransferResult
from manthan.vllm_hooks.messages import ManthanMetadata, ManthanWorkerMetadata
from manthan.vllm_hooks.worker import engine_cuda
from manthan.vllm_hooks.worker.engine_cuda import CudaEngine
from manthan.vllm_hooks.worker.slabs import Slab, Slabs, Staging

GROUP = 5
FORMS = (0, 3, TOKENS)


class World:
    """An engine over a cache of random numbers. place: bytes of the tiers on the device and on the host. staging: of
    the buffers between. codec: makes one for a group. gpu: another engine's."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        place: tuple[int, int],
        staging: int = 1 << 14,
        codec: Callable[..., PagedCodec] = fake_cuda.paged_codec,
        secondary: Tier | None = None,
        keeps: bool = True,
        gpu: fake_cuda.Gpu | None = None,
    ) -> None:
        self.gpu = gpu or fake_cuda.install(monkeypatch)
        monkeypatch.setattr(engine_cuda, "STAGING_BYTES", staging)
        monkeypatch.setattr(engine_cuda, "RESTORE_STAGING_BYTES", staging)
        self.codec = codec(group=GROUP)
        self.memory = fake_cuda.memory_of(self.codec.layout)
        tiers = [Slab(torch.zeros(nbytes, dtype=torch.uint8)) if nbytes else None for nbytes in place]
        self.tiers = Slabs(*tiers)
        self.engine = CudaEngine({GROUP: [self.codec]}, self.tiers, forms=FORMS, secondary=secondary, keeps=keeps)

    def nbytes(self, exact: int) -> int:
        return self.codec.form(exact).nbytes

    def store(self, *stores: Transfer) -> list[TransferResult]:
        """Encode blocks; the answers, in the order of the jobs."""
        self.engine.submit_stores(ManthanMetadata(stores=list(stores)))
        found = {result.job_id: result for result in self.reports(len(stores)).results}
        return [found[job.job_id] for job in stores]

    def reports(self, results: int = 1) -> ManthanWorkerMetadata:
        """What is reported, until there are so many results."""
        whole, until = ManthanWorkerMetadata(), time.monotonic() + 20
        while len(whole.results) < results:
            assert time.monotonic() < until
            ended = self.engine.take_ended()
            self.told = self.told[0] | ended.requests, self.told[1] | ended.bad_blocks
            whole = whole.aggregate(self.engine.take_report() or ManthanWorkerMetadata())
        assert not self.gpu.raced
        return whole

    told: tuple[set[str], set[int]] = (set(), set())
    """Requests and bad blocks of which vLLM has heard."""

    def submit(self, keys: list[bytes], block_ids: list[int], request_id: str | None = "request") -> None:
        job = jobs.load(keys, block_ids, request_id, group=GROUP)
        with suppress(RuntimeError):  # as the connector does if the GPU is broken
            self.engine.begin_step()
        self.engine.submit_loads(ManthanMetadata(loads=[job]))

    def load(self, keys: list[bytes], block_ids: list[int], request_id: str | None = "request") -> TransferResult:
        """Decode blocks; what is reported of it."""
        self.told = set(), set()
        self.submit(keys, block_ids, request_id)
        [result] = self.reports().results
        assert self.told[0] == ({request_id} if request_id else set())
        return result

    def drop(self, *keys: bytes) -> None:
        self.engine.submit_loads(ManthanMetadata(drops=[BlocksDropped(GROUP, list(keys), DropCause.BUDGET)]))

    def release(self, *keys: bytes) -> None:
        self.engine.submit_loads(ManthanMetadata(drops=[BlocksDropped(GROUP, list(keys), DropCause.RELEASED)]))

    def raw(self) -> bytes:
        """All that can be read in the tiers."""
        secondary = [] if self.engine.store is None else self.engine.store._chunks.values()
        return b"".join([*(tier.buffer.numpy().tobytes() for tier in self.tiers.all), *map(bytes, secondary)])

    def numbers(self, block_id: int) -> np.ndarray:
        """Keys and values, [2, layers, heads, tokens, head_dim]."""
        return np.stack(self.memory.gather(block_id)).copy()

    def encoded(self, numbers: Numbers, job: Transfer) -> np.ndarray:
        """The block, as numpy makes it."""
        told = {"key": job.block_hashes[0], "first_token": job.first_token, "exact": job.exacts(TOKENS)[0]}
        return self.codec.format.encode(*numbers, **told)

    def as_restored(self, numbers: Numbers, job: Transfer) -> np.ndarray:
        """What a block's numbers become, as numpy says."""
        return np.stack(self.codec.format.decode(self.encoded(numbers, job), key=job.block_hashes[0]))


def key(n: int) -> bytes:
    return n.to_bytes(32, "big")


def order(n: int, exact: int = 0, block_id: int | None = None, blocks: int = 1) -> Transfer:
    """A store of blocks from number n on, of the first of which so many tokens are exact."""
    first = n if block_id is None else block_id
    names = [key(n + at) for at in range(blocks)]
    return jobs.store(names, range(first, first + blocks), TOKENS * n, TOKENS * n + exact, group=GROUP)


@pytest.fixture(params=[pytest.param("device", marks=pytest.mark.slow), "host", "device and host"])
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
    [(fake_cuda.varying_codec, 1 << 16, 1024), pytest.param(fake_cuda.paged_codec, 1, 3, marks=pytest.mark.slow)],
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
    monkeypatch.setattr(engine_cuda, "LOAD_CHUNK", chunk)
    world, rng = make(6, staging=staging, codec=codec), random.Random(staging + chunk)
    stored: dict[bytes, np.ndarray] = {}
    read = in_pieces = 0
    for _ in range(100):
        stores = [
            order(rng.randrange(40), rng.choice(FORMS), rng.randrange(BLOCKS // 2)) for _ in range(rng.randrange(1, 4))
        ]
        stores = list({job.block_hashes[0]: job for job in stores}.values())
        for job, result in zip(stores, world.store(*stores), strict=True):
            assert result.failed in ({}, {0: "store_full"})
            if not result.failed:
                [block_id] = job.block_ids.tolist()
                assert result.nbytes.tolist() == [room(len(world.encoded(world.numbers(block_id), job)))]
                stored[job.block_hashes[0]] = world.as_restored(world.numbers(block_id), job)
        gone = [key for key in stored if rng.random() < 0.1]
        world.drop(*gone)
        stored = {name: kept for name, kept in stored.items() if name not in gone}
        in_pieces += sum(len(block.extents) > 1 for tier in world.tiers.all for block in tier.blocks().values())
        keys = rng.sample(sorted(stored), min(len(stored), 6))
        targets = rng.sample(range(BLOCKS // 2, BLOCKS), len(keys))
        if keys:
            before = [cache.clone() for cache in world.codec.layout.caches]
            result, kept = world.load(keys, targets), [tier.blocks() for tier in world.tiers.all]
            assert result.failed == {}
            assert result.nbytes.tolist() == [kept[(GROUP, name) not in kept[0]][GROUP, name].nbytes for name in keys]
            assert world.told[1] == set()
            right = [(world.numbers(to) == stored[name]).all() for name, to in zip(keys, targets, strict=True)]
            assert all(right)
            others = [block for block in range(BLOCKS) if block not in targets]
            pairs = zip(before, world.codec.layout.caches, strict=True)
            assert all(torch.equal(then[others], now[others]) for then, now in pairs)
            read += len(keys)
        for tier in world.tiers.all:
            check_erased(tier)
        rooms = [room(block.nbytes) for tier in world.tiers.all for block in tier.blocks().values()]
        assert used(world.tiers) == sum(rooms)
    assert read > 200
    assert in_pieces > 0


def test_blocks_of_one_job_have_exact_tokens_by_their_place(make: Callable[..., World]) -> None:
    """It may be more than the staging buffer holds, and the pool has its blocks back together."""
    world = make(staging=1)
    job = order(0, TOKENS + 3, blocks=4)
    assert job.exacts(TOKENS) == [TOKENS, 3, 0, 0]
    world.engine.submit_stores(ManthanMetadata(stores=[job]))
    report = world.reports()
    assert report.gathered == [job.job_id]
    assert report.results[0].nbytes.tolist() == [room(world.nbytes(exact)) for exact in job.exacts(TOKENS)]
    assert world.load(job.block_hashes, [40, 41, 42, 43]).failed == {}
    for n, exact in enumerate(job.exacts(TOKENS)):
        same = (world.numbers(n) == world.numbers(40 + n)).all(axis=(0, 1, 2, 4))
        assert same[:exact].all()
        assert not same[exact:].any()


@pytest.mark.parametrize("exact", [0, TOKENS])
def test_damage_is_found_and_nothing_is_written(make: Callable[..., World], exact: int) -> None:
    world = make()
    world.store(*(order(n, exact) for n in range(3)))
    tier = world.tiers.first
    [extent] = tier.blocks()[GROUP, key(1)].extents
    tier.buffer[extent.start + world.nbytes(exact) - 9] ^= 1
    before = world.numbers(41)
    assert world.load([key(n) for n in range(3)], [40, 41, 42]).failed == {1: "checksum"}
    assert world.told[1] == {41, 42}
    assert np.array_equal(world.numbers(41), before)


def test_what_is_under_way_at_once_does_not_disturb_other_work(make: Callable[..., World]) -> None:
    """Room is taken over while it is still being read, written, moved or erased, and the GPU lags behind."""
    world, rng, n = make(6, staging=1, codec=fake_cuda.varying_codec), random.Random(3), count()
    stored, storing, loads = dict[bytes, int](), dict[int, tuple[bytes, int]](), 0
    world.gpu.reached = 0
    for step in range(150):
        drops = [name for name in stored if rng.random() < 0.1]
        for name in drops:
            del stored[name]
        names = rng.sample(sorted(stored), min(len(stored), rng.randrange(4)))
        some = [jobs.load(names, rng.sample(range(BLOCKS // 2, BLOCKS), len(names)), str(step), group=GROUP)]
        dropped = [BlocksDropped(GROUP, drops, DropCause.RELEASED)]
        world.engine.submit_loads(ManthanMetadata(drops=dropped, loads=some if names else []))
        stores = [order(next(n), rng.choice(FORMS), rng.randrange(BLOCKS // 2)) for _ in range(rng.randrange(3))]
        storing |= {job.job_id: (job.block_hashes[0], int(job.block_ids[0])) for job in stores}
        world.engine.submit_stores(ManthanMetadata(stores=stores))
        world.gpu.reached = max(world.gpu.reached, world.gpu.events - rng.randrange(12))
        world.engine.take_ended()
        report = world.engine.take_report() or ManthanWorkerMetadata()
        for result in report.results:
            name, block_id = storing.pop(result.job_id, (b"", 0))
            assert result.failed in ({}, {0: "store_full"} if name else {})
            loads += not name
            stored |= {name: block_id} if name and not result.failed else {}
        assert not world.gpu.raced
    assert loads > 50
    assert len(stored) > 3


def marks_of(world: World, gone: int, kept: int) -> list[bytes]:
    """Some pieces that only the first blocks have, all of which are in the tiers."""
    blocks = [world.encoded(world.numbers(n), order(n)).tobytes() for n in range(gone + kept)]
    marks = {block[at : at + 24] for block in blocks[:gone] for at in range(len(block) - 23)}
    marks -= {block[at : at + 24] for block in blocks[gone:] for at in range(len(block) - 23)}
    some, raw = sorted(marks)[:: len(marks) // 50], world.raw()
    assert all(mark in raw for mark in some)
    return some


def test_bytes_of_what_is_released_cannot_be_read_from_the_tiers(make: Callable[..., World]) -> None:
    """Neither where they are, nor where they were before the device had no room for them."""
    world = make(6)
    gone, kept = [key(n) for n in range(3)], [key(n) for n in range(3, 6)]
    results = world.store(*(order(n) for n in range(6)))
    assert [result.failed for result in results] == [{}] * 6
    marks = marks_of(world, len(gone), len(kept))
    world.release(*gone)
    raw = world.raw()
    assert not any(mark in raw for mark in marks)
    assert world.load(kept, [*range(40, 43)]).failed == {}


@pytest.mark.parametrize("blocks", [1.5, 40])
def test_bytes_of_what_is_released_cannot_be_read_before_or_in_a_secondary_tier(
    second: Callable[..., World], blocks: float
) -> None:
    """In front of it is room for few, so that what leaves makes room, or for all."""
    world = second(blocks)
    world.engine.store._chunks[0] = np.zeros(1 << 24, np.uint8)  # numpy's own may hold bytes of an earlier test
    names = [key(n) for n in range(12)]
    world.store(*(order(n) for n in range(12)))
    assert world.load(names, [*range(30, 42)]).failed == {}
    marks = marks_of(world, 6, 6)
    world.release(*names[:6])
    until(lambda: not any(mark in raw for raw in [world.raw()] for mark in marks))
    check_erased(world.tiers.host)
    assert world.load(names[6:], [*range(42, 48)]).failed == {}


# -- answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_id", ["request", None])
@pytest.mark.parametrize("reached", [None, 1, 2], ids=["before", "while it is checked", "while it is decoded"])
def test_a_load_on_a_gpu_that_breaks_is_answered_once(
    make: Callable[..., World], reached: int | None, request_id: str | None
) -> None:
    """Events of a load: what the model was given; checked; decoded."""
    world = make()
    world.store(order(0, blocks=2))
    world.gpu.broken = reached is None
    world.gpu.events, world.gpu.reached = 0, reached or 0
    world.submit([key(0), key(1)], [40, 41], request_id)
    ended = [world.engine.take_ended()]
    assert bool(ended[0].requests) == (request_id is not None and reached != 1)
    results = getattr(world.engine.take_report(), "results", [])
    world.gpu.broken = True
    for _ in range(5):
        ended.append(world.engine.take_ended())
        results += getattr(world.engine.take_report(), "results", [])
    assert [name for each in ended for name in each.requests] == [name for name in [request_id] if name]
    assert [result.failed for result in results] == [{0: "internal"}]
    bad = set().union(*(each.bad_blocks for each in ended))
    assert bad == ({40, 41} if request_id is not None and reached != 2 else set())


def test_a_load_waits_for_what_the_model_was_given_in_earlier_steps_alone(make: Callable[..., World]) -> None:
    world, model = make(), torch.cuda.current_stream()
    world.store(order(0))
    model.clock[model] = 7
    world.engine.begin_step()
    model.clock[model] = 8  # the step's forward pass
    world.engine.submit_loads(ManthanMetadata(loads=[jobs.load([key(0)], [40], "request", group=GROUP)]))
    world.reports()
    assert [staging.stream.clock.get(model) for staging in world.engine._restores[:1]] == [7]


def test_vllm_may_hear_of_good_loads_between_two_steps(make: Callable[..., World]) -> None:
    """Of each once; and of all in a step if one has failed, because of its bad blocks."""
    world = make()
    world.store(order(0))
    world.submit([key(0)], [40], "good")
    assert world.engine.take_loaded() == {"good"}
    assert world.engine.take_loaded() == set()
    assert world.engine.take_ended() == (set(), set(), set())
    world.submit([key(0)], [41], "another")
    world.submit([key(9)], [42], "bad")
    assert world.engine.take_loaded() == set()
    assert world.engine.take_ended() == ({"another", "bad"}, set(), {42})


@pytest.mark.parametrize("what", ["batch", "encode"])
def test_stores_that_raise_are_answered_once_and_take_no_room(
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
        results = world.store(order(1), order(2, 3, blocks=2), order(4))
    assert [result.failed for result in results] == [{}, {0: "internal"}, {}]
    assert used(world.tiers) == sum(int(result.nbytes.sum()) for result in results)
    assert world.store(order(5))[0].failed == {}


def test_a_store_without_room_for_some_blocks_and_an_error_for_the_rest_is_answered_once(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    assert next(n for n in count() if world.store(order(n, TOKENS))[0].failed) < 30
    real, calls = world.tiers.take, count(1)

    def second_time(*args: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("no room can be looked for")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(world.tiers, "take", second_time)
        [result] = world.store(order(30, TOKENS, block_id=30, blocks=3))
    assert result.failed == {0: "store_full", 1: "internal", 2: "internal"}
    assert not world.engine._waiting


@pytest.mark.parametrize("reached", [None, 0], ids=["before", "while they are encoded"])
def test_stores_on_a_gpu_that_breaks_are_answered_once_and_take_no_room(
    make: Callable[..., World], reached: int | None
) -> None:
    world = make()
    world.gpu.broken, world.gpu.reached = reached is None, 0
    stores = [order(1), order(2, 3)]
    world.engine.submit_stores(ManthanMetadata(stores=stores))
    world.engine.take_ended()
    before = world.engine.take_report()
    assert (before is None) == (reached == 0)
    world.gpu.broken = True
    world.engine.take_ended()
    report = before or world.engine.take_report()
    assert [(result.job_id, result.failed) for result in report.results] == [
        (job.job_id, {0: "internal"}) for job in stores
    ]
    assert report.gathered == [job.job_id for job in stores]
    assert used(world.tiers) == 0
    assert world.engine.take_report() is None


# -- a secondary tier ---------------------------------------------------------------------------------


class Slow(RamTier):
    """A secondary tier that can be held up. reads: so many blocks were read."""

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.reads = 0

    def put_all(self, *args: Any) -> dict[bytes, str]:
        assert self.goes_on.wait(20)
        return super().put_all(*args)

    def read(self, *args: Any) -> Iterator[Any]:
        for buf in super().read(*args):
            assert self.goes_on.wait(20)
            self.reads += 1
            yield buf


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    """An engine whose tier on the host has room for so many blocks that are all exact, with a secondary tier."""
    made: list[World] = []

    def make(blocks: float, codec: Callable[..., PagedCodec] = fake_cuda.paged_codec) -> World:
        whole = fake_cuda.paged_codec().form(TOKENS).nbytes
        made.append(World(monkeypatch, (0, int(blocks * whole)), 1 << 14, codec, Slow()))
        return made[-1]

    yield make
    for world in made:
        world.engine.shutdown()


@pytest.mark.parametrize("codec", [fake_cuda.paged_codec, fake_cuda.varying_codec])
@pytest.mark.parametrize("blocks", [1.5, 4, 40])
def test_blocks_go_through_a_small_primary_tier_to_a_secondary_one_and_back(
    second: Callable[..., World], blocks: float, codec: Callable[..., PagedCodec]
) -> None:
    """Where there is room for one block, for a few, or for all."""
    world = second(blocks, codec)
    stores = [order(n, (0, 3, TOKENS)[n % 3]) for n in range(24)]
    right = [world.as_restored(world.numbers(n), job) for n, job in enumerate(stores)]
    results = world.store(*stores)
    store = world.engine.store
    assert [result.failed for result in results] == [{}] * 24
    assert sum(int(result.nbytes.sum()) for result in results) == store.used
    reads = store.reads
    for request_id in ("request", None):
        for cache in world.codec.layout.caches:
            cache[24:] = 0
        found = world.load([key(n) for n in range(24)], list(range(30, 54)), request_id)
        assert (found.failed, world.told[1]) == ({}, set())
        assert all(np.array_equal(world.numbers(30 + n), right[n]) for n in range(24))
    assert (store.reads == reads) == (blocks == 40), "what is in the primary tier is not read"
    assert not world.engine._primary.pins


def test_a_block_as_large_as_the_primary_tier_is_loaded_and_a_larger_one_refused(
    second: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fake_cuda.paged_codec().form(TOKENS).nbytes
    world = second(room(whole) / whole)
    [stored] = world.store(order(0, TOKENS))
    assert not stored.failed
    world.tiers.clear()
    assert not world.load([key(0)], [40]).failed
    world.tiers.clear()
    monkeypatch.setattr(world.tiers.host.arena, "allocate", lambda nbytes: None)  # as if no RAM had room for it
    assert world.load([key(0)], [40]).failed == {0: "store_full"}


def test_a_gpu_that_fails_does_not_keep_the_secondary_tier_from_its_end(
    second: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, closed = second(4), list[bool]()
    world.store(order(0))
    monkeypatch.setattr(world.engine.store, "close", lambda: closed.append(True))
    monkeypatch.setattr(world.gpu, "broken", True)
    world.engine.shutdown()
    assert closed == [True]


def test_stores_wait_for_a_secondary_tier_and_are_given_back_when_their_blocks_are_needed(
    second: Callable[..., World],
) -> None:
    world = second(2.5)
    world.engine.store.goes_on.clear()
    first, second_one = order(0, 3 * TOKENS, blocks=3), order(3, TOKENS)
    world.engine.submit_stores(ManthanMetadata(stores=[first, second_one]))
    world.engine.take_ended()
    assert world.engine.take_report() is None, "there is room for two of the first one's blocks"
    world.engine.submit_loads(ManthanMetadata(revokes=True))
    report = world.engine.take_report()
    assert report.gathered == [first.job_id, second_one.job_id]
    assert [(result.job_id, result.failed) for result in report.results] == [(second_one.job_id, {0: "needed"})]
    world.engine.store.goes_on.set()
    [result] = world.reports().results
    assert (result.job_id, result.failed) == (first.job_id, {2: "needed"})
    assert world.load(first.block_hashes[:2], [40, 41]).failed == {}


def test_blocks_that_cannot_be_read_for_the_secondary_tier_are_answered(
    second: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = second(40)

    def unreadable(stored: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(world.tiers.host, "read", unreadable)
        assert world.store(order(0, blocks=2))[0].failed == {0: "internal", 1: "internal"}
    assert (used(world.tiers), world.engine._writing) == (0, 0)
    assert world.store(order(0, blocks=2))[0].failed == {}


def test_a_store_that_is_larger_than_the_primary_tier_goes_through_it(second: Callable[..., World]) -> None:
    world = second(2.5)
    job = order(0, 6 * TOKENS, blocks=10)
    [result] = world.store(job)
    assert result.failed == {}
    assert world.load(job.block_hashes, list(range(30, 40))).failed == {}


def test_of_a_secondary_tier_that_misses_or_damages_blocks_what_comes_before_is_good(
    second: Callable[..., World],
) -> None:
    world = second(1.5)
    world.store(*(order(n) for n in range(12)))
    store = world.engine.store
    store.drop(GROUP, [key(6), key(8)])
    world.tiers.clear()
    assert world.load([key(n) for n in range(12)], list(range(30, 42))).failed == {6: "missing", 8: "missing"}
    assert world.told[1] == set(range(36, 42))
    [buf] = store.read(GROUP, [key(3)])
    bad = buf.copy()
    bad[-9] ^= 1
    store.put_all(GROUP, {key(3): bad})
    world.tiers.clear()
    assert world.load([key(n) for n in range(6)], list(range(30, 36))).failed == {3: "checksum"}
    assert world.told[1] == {33, 34, 35}
    assert not world.engine._primary.pins


@pytest.mark.parametrize("secondary", [None, RamTier(1 << 24)], ids=["RAM", "RAM and a disk"])
def test_a_rank_that_keeps_nothing_reads_what_another_rank_keeps(
    monkeypatch: pytest.MonkeyPatch, secondary: Tier | None
) -> None:
    """From its RAM or a tier behind, in the newest version, with room for two blocks at a time."""
    whole, name = fake_cuda.paged_codec().form(TOKENS).nbytes, f"manthan-test-{secrets.token_hex(8)}"
    keeper = World(monkeypatch, (0, (4 if secondary else 40) * whole), secondary=secondary)
    stores = [order(n, (0, 3, TOKENS)[n % 3]) for n in range(12)]
    assert [result.failed for result in keeper.store(*stores)] == [{}] * 12
    right = [keeper.as_restored(keeper.numbers(n), job) for n, job in enumerate(stores)]
    server = PeerServer(name, keeper.engine.read)
    reader = World(monkeypatch, (0, int(2.5 * whole)), secondary=PeerTier(name, 60), keeps=False, gpu=keeper.gpu)
    reader.engine.submit_stores(ManthanMetadata(stores=stores))
    reader.engine.take_ended()
    assert reader.engine.take_report() is None, "the keeper answers"

    def load() -> dict[int, str]:
        found = reader.load([key(n) for n in range(12)], list(range(30, 42)))
        good = min(found.failed, default=12)
        assert reader.told[1] == set(range(30 + good, 42))
        assert all(np.array_equal(reader.numbers(30 + n), right[n]) for n in range(good))
        assert (len(reader.tiers.host.blocks()), used(reader.tiers)) == (0, 0)
        assert not reader.engine._primary.pins
        return found.failed

    assert load() == load() == {}
    again, before = order(4, TOKENS), right[4]
    right[4] = keeper.as_restored(keeper.numbers(4), again)
    assert not np.array_equal(before, right[4])
    reader.submit([key(4)], [50])
    until(lambda: bool(reader.engine._primary.pins))
    keeper.store(again)
    reader.submit([key(4)], [51], "another")
    assert [result.failed for result in reader.reports(2).results] == [{}, {}]
    assert np.array_equal(reader.numbers(50), before)
    assert np.array_equal(reader.numbers(51), right[4]), "a load reads what was stored before it, though another has it"
    assert load() == {}
    keeper.drop(key(5))
    assert load() == {5: "missing"}
    server.close()
    assert load() == dict.fromkeys(range(12), "store_down")
    for world in (keeper, reader):
        world.engine.shutdown()


def test_what_is_still_read_when_the_cache_goes_is_not_loaded(second: Callable[..., World]) -> None:
    world = second(40)
    world.store(order(0, blocks=2))
    world.tiers.clear()
    world.engine.store.goes_on.clear()
    world.submit([key(0), key(1)], [40, 41])
    before = world.numbers(40)
    world.engine.wait()
    world.engine.store.goes_on.set()
    [result] = world.reports().results
    assert (result.failed, world.told) == ({0: "reset"}, ({"request"}, {40, 41}))
    assert np.array_equal(world.numbers(40), before)


def test_after_a_reset_nothing_of_before_is_found(second: Callable[..., World]) -> None:
    """Neither what was being written to the secondary tier, nor what was being read from it."""
    world = second(40)
    world.store(order(0, blocks=2))
    world.tiers.clear()
    world.engine.store.goes_on.clear()
    world.engine.submit_stores(ManthanMetadata(stores=[order(2)]))
    world.submit([key(0), key(1)], [40, 41])
    world.engine.take_ended()
    world.engine.submit_loads(ManthanMetadata(place="anew"))
    world.engine.store.goes_on.set()
    read, written = sorted(world.reports(2).results, key=lambda result: -len(result.nbytes))
    assert read.failed == {0: "reset"}
    assert written.failed == {}, "the manager drops it"
    assert world.told[1] == {40, 41}
    assert len(world.tiers.host.blocks()) == used(world.tiers) == 0


def test_a_block_that_is_being_copied_at_a_reset_is_not_kept(second: Callable[..., World]) -> None:
    world = second(40)
    world.store(order(0))
    world.tiers.clear()
    write = world.tiers.host.write

    def resetting(*args: Any) -> None:
        write(*args)
        world.engine.submit_loads(ManthanMetadata(place="anew"))

    world.tiers.host.write = resetting
    assert world.load([key(0)], [40]).failed == {0: "reset"}
    assert len(world.tiers.host.blocks()) == used(world.tiers) == 0


def test_a_load_that_waits_for_room_hears_of_a_store_that_fails(
    second: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = second(4.2)
    world.engine._stores = Staging(1 << 20, torch.device("cpu"))  # a store is encoded in one piece
    assert world.store(order(0, TOKENS))[0].failed == {}
    world.engine.store.goes_on.clear()
    stores = [order(10, 4 * TOKENS, blocks=4), order(20, 4 * TOKENS, blocks=4)]
    world.engine.submit_stores(ManthanMetadata(stores=stores))
    world.engine.take_ended()
    world.submit([key(0)], [40])
    world.engine.store.goes_on.set()
    until(lambda: world.engine._written and world.engine._lock._waiters)  # the load waits for room

    def no_memory(*args: Any) -> None:
        time.sleep(0.1)  # the load finds that the second store has all room
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(world.codec, "encode", no_memory)
        world.told = world.engine.take_ended().requests, set()
    assert [result.failed for result in world.reports(3).results] == [{}, dict.fromkeys(range(4), "internal"), {}]
    assert world.told == ({"request"}, set())


def test_vllm_hears_of_bad_blocks_with_the_result_that_the_driver_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sooner, vLLM would compute them behind decoded blocks while they still count as loaded."""
    world = World(monkeypatch, (0, 10 * fake_cuda.paged_codec().form(TOKENS).nbytes))
    world.store(order(0, blocks=3))
    world.gpu.events = world.gpu.reached = 0
    world.submit([key(0), key(9), key(1)], [40, 41, 42])
    [loading] = world.engine._loadings
    world.gpu.reached = max(chunk.checked._number for chunk in loading.chunks) + 1  # and not decoded
    assert not any(world.engine.take_ended())
    assert world.engine.take_report() is None
    world.gpu.reached = float("inf")
    assert world.engine.take_ended().bad_blocks == {41, 42}
    report = world.engine.take_report()
    assert report is not None
    assert [result.failed for result in report.results] == [{1: "missing"}]
