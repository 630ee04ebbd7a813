"""The engine on the CPU: a step's metadata in, blocks in the store and in the cache, and an answer to each job."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from key_files import write_keys
from paged_cache import cpu_blocks, paged, write
from threadpoolctl import ThreadpoolController

from manthan.manager.config.model import SealingConfig
from manthan.manager.tiers.arena_tier import RamTier
from manthan.manager.tiers.joined import Shard
from manthan.manager.tiers.sealed import OVERHEAD, SealedTier, Sealer, keys_of
from manthan.manager.tiers.tier import TierError
from manthan.manager.transfer import Transfer, TransferResult
from manthan.vllm_hooks.connector import ManthanConnector
from manthan.vllm_hooks.messages import ManthanMetadata, ManthanWorkerMetadata
from manthan.vllm_hooks.worker import engine_cpu
from manthan.vllm_hooks.worker.engine_cpu import CpuEngine
from manthan.vllm_hooks.worker.half import WorkerHalf

pytestmark = pytest.mark.usefixtures("engine_config")

GROUP = 2
KEYS = [bytes([n]) * 32 for n in range(4)]
TARGETS = [4, 5, 6, 7]
CPU = torch.device("cpu")


class Worker:
    """An engine over a cache whose first four blocks are written."""

    def __init__(self, fails_whole: bool = False, max_bytes: int = 1 << 20) -> None:
        self.caches, layers, spec = paged("vec", torch.bfloat16, 32, 128)
        self.blocks = cpu_blocks(self.caches, layers, spec, group=GROUP)
        for block in range(len(KEYS)):
            write(self.caches, layers, block, spec, seed=block)
        self.store = RamTier(max_bytes)
        self.engine = CpuEngine({GROUP: self.blocks}, self.store, 2, CPU, fails_whole)

    def wait(self, count: int = 1) -> ManthanWorkerMetadata:
        """What is reported, once there are so many answers."""
        whole = ManthanWorkerMetadata()
        deadline = time.monotonic() + 20
        while len(whole.results) < count:
            assert time.monotonic() < deadline
            whole = whole.aggregate(self.engine.take_report() or ManthanWorkerMetadata())
            time.sleep(0.0005)
        return whole

    def submit(self, keys: list[bytes] = KEYS, **more: Any) -> Transfer:
        """Store blocks from the first on."""
        job = jobs.store(keys, range(len(keys)), group=GROUP, **more)
        self.engine.submit_stores(ManthanMetadata(stores=[job]))
        return job

    def store_all(self, exact: int = 0, keys: list[bytes] = KEYS) -> TransferResult:
        job = self.submit(keys, exact_tokens=exact)
        report = self.wait()
        [result] = report.results
        assert result.job_id == job.job_id
        return result

    def load(self, keys: list[bytes] = KEYS, request_id: str | None = "request", tenant: str = "") -> TransferResult:
        job = jobs.load(keys, TARGETS[: len(keys)], request_id, group=GROUP, tenant=tenant)
        self.engine.submit_loads(ManthanMetadata(loads=[job]))
        [result] = self.wait().results
        return result


class Held:
    """Method of an object whose calls, or those `when` says so, wait until it is let go. They are of other threads."""

    def __init__(self, owner: Any, name: str, when: Callable[..., bool] = lambda *_: True) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        call = getattr(owner, name)

        def held(*args: Any) -> Any:
            if when(*args):
                self.began.set()
                assert threading.current_thread() is not threading.main_thread()
                assert self.go_on.wait(20)
            return call(*args)

        setattr(owner, name, held)


@pytest.fixture
def start() -> Iterator[Callable[..., Worker]]:
    workers = []

    def make(**options: Any) -> Worker:
        workers.append(Worker(**options))
        return workers[-1]

    yield make
    for worker in workers:
        worker.engine.shutdown()


def test_the_model_s_thread_stands_aside_for_a_restore_and_for_nothing_else(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does until the restore has ended: a test that takes forever shows that it is not told."""
    monkeypatch.setattr("manthan.vllm_hooks.worker.engine.REST_S", 1e6)
    worker = start()
    worker.engine.rest()
    worker.store_all()
    worker.load(request_id=None)
    worker.engine.rest()
    loads = [jobs.load(KEYS, TARGETS, name, group=GROUP) for name in ("one", "two")]
    worker.engine.submit_loads(ManthanMetadata(loads=loads))
    ended: set[str] = set()
    while len(ended) < 2:
        worker.engine.rest()
        now = worker.engine.take_ended().requests
        assert now
        ended |= now
    worker.engine.rest()


@pytest.mark.parametrize("exact", [0, 4, 32, 36, 128])
def test_blocks_go_and_come_back(start: Callable[..., Worker], exact: int) -> None:
    """The first `exact` tokens of the session keep every bit, whichever block they are in."""
    worker = start()
    sizes = [worker.blocks.format.max_nbytes(min(max(exact - 32 * n, 0), 32)) for n in range(4)]
    stored = worker.store_all(exact)
    assert (stored.failed, stored.nbytes.tolist()) == ({}, [*map(worker.store.room, sizes)])
    assert worker.store.used == sum(map(worker.store.room, sizes))
    loaded = worker.load()
    assert (loaded.failed, loaded.nbytes.tolist()) == ({}, sizes)
    assert worker.engine.take_ended() == ({"request"}, set(), set())
    assert worker.engine.take_ended() == (set(), set(), set())
    worker.load()
    assert worker.engine.take_loaded() == {"request"}
    assert worker.engine.take_ended() == (set(), set(), set())
    for n in range(4):
        kept, both = min(max(exact - 32 * n, 0), 32), [worker.blocks._memory.gather(at) for at in (n, 4 + n)]
        same = [(a == b).all(axis=(0, 1, 3)) for a, b in zip(*both, strict=True)]
        assert all(each[:kept].all() and not each[kept:].any() for each in same)


def test_a_request_hears_of_its_load_when_all_of_its_jobs_have_ended(start: Callable[..., Worker]) -> None:
    """They are answered one by one. A job that fails makes the request's load fail."""
    worker = start(fails_whole=True)
    worker.store_all(keys=KEYS[:2])
    good, bad = (jobs.load(KEYS[n : n + 2], TARGETS[n : n + 2], group=GROUP) for n in (0, 2))
    read = Held(worker.store, "read", lambda group, keys, *_: keys == KEYS[2:])
    worker.engine.submit_loads(ManthanMetadata(loads=[good, bad]))
    assert [result.job_id for result in worker.wait().results] == [good.job_id]
    assert worker.engine.take_ended() == (set(), set(), set())
    read.go_on.set()
    [result] = worker.wait().results
    assert (result.job_id, result.failed) == (bad.job_id, {0: "missing", 1: "missing"})
    assert worker.engine.take_ended() == ({"request"}, {"request"}, set())


def test_blocks_that_do_not_open_are_told_all_at_once(start: Callable[..., Worker], tmp_path: Path) -> None:
    """Or a session of another tenant would fail once for each of its blocks."""
    keys = keys_of(SealingConfig(key_file=str(write_keys(tmp_path / "keys", "k1"))))
    worker = start()
    worker.engine.store = SealedTier(worker.store, Sealer(keys, "place"), Shard(0, 1))
    by_tenant = {"": [0, 3], "acme": [1, 2]}
    for tenant, ids in by_tenant.items():
        for n in ids:
            job = jobs.store([KEYS[n]], [n], 32 * n, group=GROUP, tenant=tenant)
            worker.engine.submit_stores(ManthanMetadata(stores=[job]))
    room = worker.store.room(worker.blocks.format.max_nbytes(0) + OVERHEAD)
    assert [result.nbytes.tolist() for result in worker.wait(4).results] == [[room]] * 4
    assert worker.load().failed == {1: "seal", 2: "seal"}
    assert worker.load(tenant="acme").failed == {0: "seal", 3: "seal"}


class Broken(RamTier):
    """A store on fire."""

    def __init__(self, error: Exception) -> None:
        super().__init__(1 << 20)
        self._error = error

    def put_all(self, group: int, blocks: Any, tenant: str = "") -> Any:
        raise self._error

    def read(self, group: int, keys: Any, tenant: str = "") -> Any:
        raise self._error


@pytest.mark.invariant(
    6,
    "vllm_hooks/worker/engine_cpu.py",
    "except Exception as error:  # vLLM must get an answer, whatever happened",
    "except CancelledError as error:",
)
@pytest.mark.parametrize(
    ("error", "cause"), [(OSError("fire"), "internal"), (TierError("down", "store_down"), "store_down")]
)
def test_whatever_a_store_does_there_is_an_answer(start: Callable[..., Worker], error: Exception, cause: str) -> None:
    worker = start()
    worker.engine.store = Broken(error)
    assert worker.store_all().failed == dict.fromkeys(range(4), cause)
    assert worker.load().failed == {0: cause}
    assert worker.engine.take_loaded() == set()
    assert worker.engine.take_ended() == ({"request"}, set(), set(TARGETS))


def test_a_job_that_cannot_be_begun_fails_and_costs_no_other(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, event = start(), engine_cpu.model_event
    worker.store_all()
    bad, good = (jobs.load(KEYS[n : n + 2], TARGETS[n : n + 2], name, group=GROUP) for n, name in ((0, "a"), (2, "b")))
    stores = [jobs.store(KEYS[n : n + 1], [n], group=GROUP) for n in range(2)]
    broken = iter([True, False] * 2)

    def broken_by_turns(device: torch.device) -> torch.cuda.Event | None:
        if next(broken):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return event(device)

    monkeypatch.setattr(engine_cpu, "model_event", broken_by_turns)
    worker.engine.submit_loads(ManthanMetadata(loads=[bad, good]))
    worker.engine.submit_stores(ManthanMetadata(stores=stores))
    report = worker.wait(4)
    assert {result.job_id: result.failed for result in report.results} == {
        **{bad.job_id: {0: "internal"}, good.job_id: {}},
        **{stores[0].job_id: {0: "internal"}, stores[1].job_id: {}},
    }
    assert sorted(report.gathered) == [job.job_id for job in stores]
    assert worker.engine.take_ended() == ({"a", "b"}, set(), {*TARGETS[:2]})
    worker.engine.fail([bad, good, *stores])
    assert worker.engine.take_report() is None, "each is answered once"


@pytest.mark.invariant(
    3,
    "vllm_hooks/worker/engine_cpu.py",
    "threads.submit(self._read, job, self.store, model_event(self._device), self._cancelled)",
    "self._read(job, self.store, model_event(self._device), self._cancelled)",
)
@pytest.mark.invariant(
    3,
    "vllm_hooks/worker/engine_cpu.py",
    "self._gatherers.submit(self._gather, gathering, model)",
    "self._gather(gathering, model)",
)
def test_the_thread_that_orders_transfers_does_none_and_waits_for_none(start: Callable[..., Worker]) -> None:
    """It is the scheduler's, where one process does all."""
    worker = start()
    worker.store_all()
    of_blocks, of_store = ("gather", "encode", "decode"), ("put_all", "read")
    held = [Held(worker.blocks, name) for name in of_blocks] + [Held(worker.store, name) for name in of_store]
    worker.submit()
    worker.engine.submit_loads(ManthanMetadata(loads=[jobs.load(KEYS, TARGETS, group=GROUP)]))
    assert worker.engine.take_report() is None
    for some in (held[2::2], held):  # what is stored again is missing for a moment, and is loaded before
        for each in some:
            each.go_on.set()
        if some is not held:
            assert [result.failed for result in worker.wait(1).results] == [{}]
    assert [result.failed for result in worker.wait(1).results] == [{}]
    assert all(each.began.is_set() for each in held)


@pytest.mark.invariant(
    10,
    "vllm_hooks/connector.py",
    "if self._try(engine.submit_loads, metadata, otherwise=False) is False:",
    "if self._try(engine.submit_stores, metadata, otherwise=False) is False:",
)
def test_a_block_is_stored_after_the_step_that_computes_it(start: Callable[..., Worker]) -> None:
    """vLLM has its hash when that step begins, and the step names it."""
    worker, connector, half = start(), object.__new__(ManthanConnector), object.__new__(WorkerHalf)
    half.engine, half.guard, half.calibrator, connector.worker = worker.engine, None, None, half
    half.of_this_rank = lambda metadata: metadata  # type: ignore[method-assign]
    made_up: Any = None
    connector.bind_connector_metadata(ManthanMetadata(stores=[jobs.store(KEYS[:1], [0], 0, 32, group=GROUP)]))
    connector.start_load_kv(made_up)
    worker.engine.wait()
    assert worker.engine.take_report() is None
    for cache in worker.caches.values():
        cache[0] = 1.5  # what the model computes
    connector.wait_for_save()
    worker.wait()
    worker.load(KEYS[:1])
    assert all((cache[4] == 1.5).all() for cache in worker.caches.values())


def test_nothing_touches_the_cache_once_it_was_waited_for(start: Callable[..., Worker]) -> None:
    """As before vLLM takes the cache's memory away."""
    worker = start()
    encode = Held(worker.blocks, "encode")
    job = worker.submit(KEYS[:1])
    assert encode.began.wait(20)
    waits = threading.Thread(target=worker.engine.wait)
    waits.start()
    assert waits.is_alive()
    before = worker.engine.take_report()
    assert before is None or not before.results
    encode.go_on.set()
    waits.join(20)
    report = worker.engine.take_report()
    assert report is not None
    assert [result.job_id for result in report.results] == [job.job_id]
    worker.engine.shutdown()
    worker.engine.wait()


def test_blocks_are_gathered_as_far_as_the_staging_goes_and_others_are_given_back_when_needed(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store does not answer: of the first job one block is gathered, which is all that there is room for."""
    monkeypatch.setattr(engine_cpu, "COPIES_BYTES", 1)
    worker = start()
    put_all = Held(worker.store, "put_all")
    first, second = worker.submit(KEYS[:2]), worker.submit(KEYS[2:])
    assert put_all.began.wait(20)
    assert worker.engine.take_report() is None
    worker.engine.submit_loads(ManthanMetadata(revokes=True))
    worker.engine._gatherers.wait()
    report = worker.engine.take_report()
    assert report is not None
    assert sorted(report.gathered) == [first.job_id, second.job_id]
    assert [(result.job_id, result.failed) for result in report.results] == [
        (second.job_id, {0: "needed", 1: "needed"})
    ]
    put_all.go_on.set()
    left = worker.wait()
    assert [(result.job_id, result.failed) for result in left.results] == [(first.job_id, {1: "needed"})]
    assert left.gathered == [], "each is named once"
    third = worker.submit(KEYS[2:])
    assert worker.wait().results[0].job_id == third.job_id, "there is room again"
    assert worker.load(KEYS[:1]).failed == {}


def test_the_pool_has_its_blocks_back_before_they_are_encoded(start: Callable[..., Worker]) -> None:
    worker = start()
    encode = Held(worker.blocks, "encode")
    job = worker.submit()
    worker.engine._gatherers.wait()
    report = worker.engine.take_report()
    assert report is not None
    assert (report.gathered, report.results) == ([job.job_id], [])
    encode.go_on.set()
    assert worker.wait().results[0].failed == {}


def test_numpys_products_take_one_core_each(start: Callable[..., Worker]) -> None:
    blas = ThreadpoolController().select(prefix="libscipy_openblas")
    blas.limit(limits=2)
    start()
    assert [library["num_threads"] for library in blas.info()] == [1]
