"""The worker's way on the CPU: a step's metadata in, blocks in the store and in the cache, and an answer to each."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from key_files import write_keys
from paged_cache import cpu_blocks, paged, write

from manthan.manager.config.model import SealingConfig
from manthan.manager.tiers.ram import RamTier
from manthan.manager.tiers.sealed import OVERHEAD, SealedTier, Sealer, keys_of
from manthan.manager.tiers.tier import TierError
from manthan.manager.work import GroupBlocks, Load, LoadResult, SpillBlock, SpillResult
from manthan.vllm_hooks.messages import ManthanMetadata, ManthanWorkerMetadata
from manthan.vllm_hooks.worker.host_path import HostPath

pytestmark = pytest.mark.usefixtures("engine_config")

GROUP = 2
KEYS = [bytes([n]) * 32 for n in range(4)]
TARGETS = [4, 5, 6, 7]
CPU = torch.device("cpu")


class Worker:
    """A path over a cache whose first four blocks are written."""

    def __init__(self, fails_whole: bool = False, max_bytes: int = 1 << 20) -> None:
        self.caches, layers, spec = paged("vec", torch.bfloat16, 32, 128)
        self.blocks = cpu_blocks(self.caches, layers, spec, group=GROUP)
        for block in range(len(KEYS)):
            write(self.caches, layers, block, spec, seed=block)
        self.store = RamTier(max_bytes)
        self.path = HostPath({GROUP: self.blocks}, self.store, 2, CPU, fails_whole)

    def wait(self, count: int = 1) -> ManthanWorkerMetadata:
        """What is reported, once there are so many answers."""
        whole = ManthanWorkerMetadata()
        deadline = time.monotonic() + 20
        while len(whole.spills) + len(whole.loads) < count:
            assert time.monotonic() < deadline
            whole = whole.aggregate(self.path.take_report() or ManthanWorkerMetadata())
            time.sleep(0.0005)
        return whole

    def spill(self, exact: int = 0, keys: list[bytes] = KEYS) -> list[SpillResult]:
        spills = [SpillBlock(key, GROUP, n, 32 * n, exact) for n, key in enumerate(keys)]
        self.path.submit_spills(ManthanMetadata(spills=spills))
        return sorted(self.wait(len(keys)).spills)

    def load(self, keys: list[bytes] = KEYS, is_prefetch: bool = False, tenant: str = "") -> LoadResult:
        part = GroupBlocks(GROUP, keys, TARGETS[: len(keys)])
        self.path.submit_loads(ManthanMetadata(loads=[Load("request", (part,), is_prefetch, tenant)]))
        [result] = self.wait().loads
        return result

    def taken(self) -> tuple[set[str], set[str], set[int]]:
        return self.path.take_finished_loads(), self.path.take_failed_loads(), self.path.take_failed_blocks()

    def same(self, exact: int) -> bool:
        """Whether so many tokens of the blocks that were loaded are those that were spilled."""
        pairs = [(self.blocks._memory.gather(n), self.blocks._memory.gather(4 + n)) for n in range(len(KEYS))]
        return all(
            (a[:, :, :exact] == b[:, :, :exact]).all() for was, now in pairs for a, b in zip(was, now, strict=True)
        )


@pytest.fixture
def start() -> Iterator[Callable[..., Worker]]:
    workers = []

    def make(**options: Any) -> Worker:
        workers.append(Worker(**options))
        return workers[-1]

    yield make
    for worker in workers:
        worker.path.shutdown()


def test_the_model_s_thread_stands_aside_for_a_restore_and_for_nothing_else(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does until the restore has ended: a test that takes forever shows that it is not told."""
    monkeypatch.setattr("manthan.vllm_hooks.worker.path.REST_S", 1e6)
    worker = start()
    worker.path.rest()
    worker.spill()
    worker.load(is_prefetch=True)
    worker.path.rest()
    part = GroupBlocks(GROUP, KEYS, TARGETS)
    worker.path.submit_loads(ManthanMetadata(loads=[Load(name, (part,)) for name in ("one", "two")]))
    ended: set[str] = set()
    while len(ended) < 2:
        worker.path.rest()
        now = worker.path.take_finished_loads()
        assert now
        ended |= now
    worker.path.rest()


@pytest.mark.parametrize("exact", [0, 4, 32])
def test_blocks_go_and_come_back(start: Callable[..., Worker], exact: int) -> None:
    worker = start()
    nbytes = worker.blocks.format.max_nbytes(exact)
    for result, key in zip(worker.spill(exact), KEYS, strict=True):
        assert result[:3] == (key, GROUP, None)
        assert result.nbytes == worker.store.room(nbytes)
    assert worker.store.used == 4 * worker.store.room(nbytes)
    loaded = worker.load()
    assert loaded[:3] == ("request", [], 4 * nbytes)
    assert worker.taken() == ({"request"}, set(), set())
    assert worker.taken() == (set(), set(), set())
    assert worker.same(exact)
    assert not worker.same(32) or exact == 32


def test_blocks_that_do_not_open_are_told_all_at_once(start: Callable[..., Worker], tmp_path: Path) -> None:
    """Or a session of another tenant would fail once for each of its blocks."""
    keys = keys_of(SealingConfig(key_file=str(write_keys(tmp_path / "keys", "k1"))))
    worker = start()
    worker.path.store = SealedTier(worker.store, Sealer(keys, "place"), 0)
    spills = [SpillBlock(key, GROUP, n, 32 * n, tenant="acme" if n in (1, 2) else "") for n, key in enumerate(KEYS)]
    worker.path.submit_spills(ManthanMetadata(spills=spills))
    nbytes = worker.blocks.format.max_nbytes(0)
    assert [result.nbytes for result in worker.wait(4).spills] == [worker.store.room(nbytes + OVERHEAD)] * 4
    assert worker.load().failed == [(GROUP, KEYS[1], "seal"), (GROUP, KEYS[2], "seal")]
    assert worker.load(tenant="acme").failed == [(GROUP, KEYS[0], "seal"), (GROUP, KEYS[3], "seal")]


def test_what_does_not_fit_is_refused_and_takes_nothing(start: Callable[..., Worker]) -> None:
    nbytes = start().blocks.format.max_nbytes(0)
    worker = start(max_bytes=RamTier(1 << 20).room(nbytes) * 3)
    causes = [(result.cause, result.nbytes) for result in worker.spill()]
    assert sorted(causes, key=str) == [("store_full", 0), *[(None, worker.store.room(nbytes))] * 3]


class Broken(RamTier):
    """A store on fire."""

    def __init__(self, error: Exception) -> None:
        super().__init__(1 << 20)
        self._error = error

    def put_all(self, group: int, blocks: Any, tenant: str = "") -> Any:
        raise self._error

    def read(self, group: int, keys: Any, tenant: str = "", into: Any = None) -> Any:
        raise self._error


class DownError(TierError):
    cause = "store_down"


@pytest.mark.parametrize(("error", "cause"), [(OSError("fire"), "internal"), (DownError("down"), "store_down")])
def test_whatever_a_store_does_there_is_an_answer(start: Callable[..., Worker], error: Exception, cause: str) -> None:
    worker = start()
    worker.path.store = Broken(error)
    assert [result.cause for result in worker.spill()] == ["internal"] * 4
    assert worker.load().failed == [(GROUP, KEYS[0], cause)]
    assert worker.taken() == ({"request"}, set(), set(TARGETS))


def test_spills_are_begun_apart_from_loads(start: Callable[..., Worker]) -> None:
    """What the step computes is there only when spills are submitted."""
    worker = start()
    step = ManthanMetadata(spills=[SpillBlock(KEYS[0], GROUP, 0, 0, 32)])
    worker.path.submit_loads(step)
    for cache in worker.caches.values():
        cache[0] = 1.5  # what the model computes
    worker.path.submit_spills(step)
    worker.wait()
    worker.load(KEYS[:1])
    assert all((cache[4] == 1.5).all() for cache in worker.caches.values())


def test_nothing_touches_the_cache_once_it_was_waited_for(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before vLLM takes the cache's memory away."""
    worker = start()
    encode_all, began, may_go_on = worker.blocks.encode_all, threading.Event(), threading.Event()

    def slowly(*args: Any) -> Any:
        began.set()
        may_go_on.wait(20)
        return encode_all(*args)

    monkeypatch.setattr(worker.blocks, "encode_all", slowly)
    worker.path.submit_spills(ManthanMetadata(spills=[SpillBlock(KEYS[0], GROUP, 0, 0, 0)]))
    assert began.wait(20)
    waits = threading.Thread(target=worker.path.wait)
    waits.start()
    assert waits.is_alive()
    before = worker.path.take_report()
    assert before is None or not before.spills
    may_go_on.set()
    waits.join(20)
    report = worker.path.take_report()
    assert report is not None
    assert len(report.spills) == 1
    worker.path.shutdown()
    worker.path.wait()


@pytest.mark.parametrize("copies", [True, False])
def test_blocks_that_nobody_reads_yet_are_given_up_when_requests_need_them(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, copies: bool
) -> None:
    """Both threads wait for a store that does not answer. They read a GPU's blocks; a CPU's are copied first."""
    worker, began, may_go_on = start(), threading.Semaphore(0), threading.Event()
    put_all = worker.store.put_all

    def slowly(*args: Any) -> Any:
        began.release()
        assert may_go_on.wait(20)
        return put_all(*args)

    monkeypatch.setattr(worker.store, "put_all", slowly)
    if not copies:
        copy, encode_all = worker.blocks.copy, worker.blocks.encode_all
        monkeypatch.setattr(worker.blocks, "encode_all", lambda spills: encode_all(spills, copy(spills)))
        monkeypatch.setattr(worker.blocks, "copy", lambda spills: None)
    for n in range(2):
        worker.path.submit_spills(ManthanMetadata(spills=[SpillBlock(KEYS[n], GROUP, n, 32 * n)]))
        assert began.acquire(timeout=20)
    worker.path.submit_spills(ManthanMetadata(spills=[SpillBlock(KEYS[2], GROUP, 2, 64)]))
    worker.path._copiers.wait()
    worker.path.submit_loads(ManthanMetadata(revokes=True))
    report = worker.path.take_report()
    assert report is not None
    assert [key for _, key in report.copied] == KEYS[:3]
    assert report.spills == ([] if copies else [SpillResult(KEYS[2], GROUP, "needed", 0.0)])
    may_go_on.set()
    left = worker.wait(3 if copies else 2)
    assert {spill.cause for spill in left.spills} == {None}
    assert left.copied == [], "each is named once"
    assert worker.load(KEYS[:2]).failed == []
