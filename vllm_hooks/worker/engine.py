"""Base class and threads of the engines, which store a rank's KV blocks compressed in tiers, and load them back."""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from queue import Empty, Queue
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.logger import init_logger

from manthan.codec.errors import WireError
from manthan.manager.events import BlocksTrimmed
from manthan.manager.tiers.tier import Buffer, Found, Tier, TierError
from manthan.manager.transfer import RESET, Transfer, TransferResult
from manthan.vllm_hooks.messages import ManthanMetadata, ManthanWorkerMetadata

if TYPE_CHECKING:
    from manthan.vllm_hooks.worker.slabs import Slabs

logger = init_logger("vllm.manthan.worker")

MISSING = "missing"  # cause of a failure: the block is in no tier
REST_S = sys.getswitchinterval()
"""Most seconds that the model's thread pauses for a load, in a step without compute.

Without a pause, such steps would take Python's lock (GIL) from the loading thread half of the time.
"""


class CancelledError(Exception):
    """Ends a job that is no longer wanted. The argument is the job's cause of failure; RESET without an argument."""


class Ended(NamedTuple):
    """Ended loads, for vLLM."""

    requests: set[str]  # ids of requests whose load ended
    failed: set[str]  # ids of the requests among these whose whole load counts as failed
    bad_blocks: set[int]  # ids of the pool's blocks that the loads of the other requests did not fill


@dataclass(eq=False)
class Storing:
    """Store under way. nbytes, failed, inner: as in `TransferResult`."""

    job: Transfer
    nbytes: NDArray[np.int64] = field(init=False)
    left: int = field(init=False)  # number of blocks without an outcome yet
    failed: dict[int, str] = field(default_factory=dict)
    inner: dict[int, Sequence[int]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.nbytes, self.left = np.zeros(len(self.job), np.int64), len(self.job)


class Engine:
    """Takes jobs (transfers), does them in the background, and reports ended jobs.

    The base class is used until vLLM has allocated the KV cache. The model's thread calls all public methods but
    `read`. No method waits unless its docstring says so. An engine overrides `_load` and `_store`, which begin a job to
    be answered later. If they raise, the job is refused. fails_whole: True if one bad block fails a request's whole
    load; False if the blocks before it count as loaded. keeps: False if another rank stores this rank's blocks, so that
    stores are neither begun nor answered.
    """

    def __init__(self, fails_whole: bool = False, keeps: bool = True) -> None:
        self.decode_s: dict[str, float] = {}
        """By codec name, seconds in which the GPU decodes a token; empty if the CPU decodes."""
        self._fails_whole, self._keeps = fails_whole, keeps
        self._lock = threading.Condition()
        self._begun = set[int]()  # ids of the step's jobs that are begun or refused. `fail` refuses the rest
        self._open: dict[str, set[int]] = {}  # by request id, ids of the request's load jobs under way
        self._bad: dict[str, set[int]] = {}
        """By request id, ids of the pool's blocks that the request's ended load jobs did not fill."""
        self._report = ManthanWorkerMetadata()
        self._ended = Ended(set(), set(), set())

    def begin_step(self) -> None:
        """Note that vLLM has queued all work of earlier steps on the GPU, and none of this step's forward pass."""

    def submit_loads(self, metadata: ManthanMetadata) -> None:
        """Obey a step's orders as `_prepare` says, then begin the step's loads."""
        self._begun.clear()
        self._open_all(metadata.loads)
        self._prepare(metadata)
        self._begin(metadata.loads, self._load)

    def submit_stores(self, metadata: ManthanMetadata) -> None:
        """Begin a step's stores. Call after the step's forward pass."""
        if self._keeps:
            self._begin(metadata.stores, self._store)

    def _begin(self, jobs: Sequence[Transfer], begin: Callable[[Transfer], None]) -> None:
        for job in jobs:
            self._begun.add(job.job_id)
            try:
                begin(job)
            except Exception as error:  # any error costs this job alone
                self._refuse(job, cause_of(error))

    def _prepare(self, metadata: ManthanMetadata) -> None:
        """Obey `cancels`, `revokes`, `place` and `drops` of ManthanMetadata."""

    def _load(self, job: Transfer) -> None: ...

    def _store(self, job: Transfer) -> None: ...

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Found]:
        """Yield compressed blocks for other ranks, as `Tier.read` does. May be called on any thread."""
        return iter([None] * len(keys))

    def wait(self) -> None:
        """Wait until no job that has begun reads or writes the paged cache."""

    def shutdown(self) -> None:
        """Wait for the jobs under way, and free threads and memory."""

    def rest(self) -> None:
        """Wait REST_S at most while threads load blocks. Called in steps without compute."""
        with self._lock:
            self._lock.wait_for(lambda: not self._awaits_threads(), REST_S)

    def _awaits_threads(self) -> bool:
        """True if threads load blocks, and the model's thread has nothing to do for a load yet."""
        return False

    def take_ended(self) -> Ended:
        """Return the loads ended since the last call, for vLLM."""
        with self._lock:
            taken, self._ended = self._ended, Ended(set(), set(), set())
            return taken

    def take_loaded(self) -> set[str]:
        """Return the ids of requests whose load has ended since the last `take_ended`; none if one of them has failed.

        `take_ended` then does not return these. Failed loads are left to it, because vLLM hears of bad blocks only from
        a worker's step.
        """
        self._poll()
        with self._lock:
            if self._ended.failed or self._ended.bad_blocks:
                return set()
            taken = set(self._ended.requests)
            self._ended.requests.clear()
            return taken

    def _poll(self) -> None:
        """Look which loads have ended."""

    def take_report(self) -> ManthanWorkerMetadata | None:
        """Return results and ids of gathered stores since the last call, for the scheduler half; None without any."""
        with self._lock:
            taken, self._report = self._report, ManthanWorkerMetadata()
            return taken if taken.results or taken.gathered else None

    def fail(self, jobs: Sequence[Transfer]) -> None:
        """Refuse the jobs among `jobs` that are neither begun nor refused. Called after submitting has raised."""
        self._open_all([job for job in jobs if job.direction == "load"])
        for job in jobs:
            if job.job_id not in self._begun:
                self._refuse(job, "internal")

    def fail_requests(self, blocks: Mapping[str, Sequence[int]]) -> None:
        """End loads that vLLM waits for, but for which there is no job. blocks: the pool's block ids by request id."""
        for request_id, block_ids in blocks.items():
            self._open.setdefault(request_id, set())
            self._end(request_id, -1, block_ids)

    def _open_all(self, loads: Iterable[Transfer]) -> None:
        """Note all of a step's loads, so that a request's load ends with the last of its jobs."""
        with self._lock:
            for job in loads:
                if job.request_id is not None and job.job_id not in self._begun:
                    self._open.setdefault(job.request_id, set()).add(job.job_id)

    def _gathered(self, job: Transfer) -> None:
        """Report that a store reads the pool's blocks no longer. Called once for each store, before its answer."""
        with self._lock:
            self._report.gathered.append(job.job_id)

    def _stored(self, storing: Storing, sizes: Mapping[int, Sequence[int]], failed: Mapping[int, str]) -> None:
        """Note the outcome of some of a store's blocks, and answer the store after the last of its blocks.

        sizes: by index in the job, what the block takes of the budget in bytes: its first part, its first two parts,
        and so on to all parts. failed: cause by index in the job.
        """
        with self._lock:
            for at, (*inner, nbytes) in sizes.items():
                storing.nbytes[at] = nbytes
                if inner:
                    storing.inner[at] = inner
            storing.failed.update(failed)
            storing.left -= len(sizes) + len(failed)
            if storing.left:
                return
        seconds = time.monotonic() - storing.began
        self._answer(TransferResult(storing.job.job_id, storing.nbytes, storing.failed, seconds, storing.inner))

    def _refuse(self, job: Transfer, cause: str) -> None:
        """Answer that a job has failed before it began."""
        if job.direction == "store":
            self._gathered(job)
        self._answer(TransferResult.refused(job, cause))
        self._loaded(job, 0)

    def _answer(self, result: TransferResult) -> None:
        with self._lock:
            self._report.results.append(result)

    def _answer_load(self, job: Transfer, sizes: Sequence[int], failed: dict[int, str], began: float) -> None:
        """Answer a load. sizes: bytes of the good first blocks. failed: as in `TransferResult`."""
        nbytes = np.zeros(len(job), np.int64)
        nbytes[: len(sizes)] = sizes
        self._answer(TransferResult(job.job_id, nbytes, failed, time.monotonic() - began))

    @staticmethod
    def _drop(metadata: ManthanMetadata, *tiers: "Tier | Slabs") -> None:
        """Drop and trim blocks in these tiers."""
        for drop, tier in product(metadata.drops, tiers):
            if isinstance(drop, BlocksTrimmed):
                tier.trim(drop.group, drop.block_hashes, drop.level + 1)
            else:
                tier.drop(drop.group, drop.block_hashes)

    @staticmethod
    def _put(
        tier: Tier, job: Transfer, blocks: Mapping[int, Buffer]
    ) -> tuple[dict[int, Sequence[int]], dict[int, str]]:
        """Put compressed blocks of a store into a tier. Return arguments for `_stored`. blocks: by index in the job."""
        hashes = job.block_hashes
        try:
            causes = tier.put_all(job.group, {hashes[at]: buf for at, buf in blocks.items()}, job.tenant)
            failed = {at: causes[hashes[at]] for at in blocks if hashes[at] in causes}
            return {at: tier.rooms(buf) for at, buf in blocks.items() if at not in failed}, failed
        except Exception as error:  # any error costs these blocks, not the thread
            return {}, dict.fromkeys(blocks, cause_of(error))

    def _loaded(self, job: Transfer, good: int) -> None:
        """Note for vLLM that a load has ended. good: number of first blocks that were loaded."""
        if job.request_id is not None:
            self._end(job.request_id, job.job_id, job.block_ids[good:].tolist())

    def _end(self, request_id: str, job_id: int, bad_blocks: Sequence[int]) -> None:
        with self._lock:
            left, bad = self._open[request_id], self._bad.setdefault(request_id, set())
            left.discard(job_id)
            bad.update(bad_blocks)
            if left:
                return
            del self._open[request_id], self._bad[request_id]
            if bad and self._fails_whole:
                self._ended.failed.add(request_id)
            else:
                self._ended.bad_blocks.update(bad)
            self._ended.requests.add(request_id)
            self._lock.notify_all()


def other_causes(
    job: Transfer, behind: Sequence[int], found: Found, values: Iterator[Found], store: Tier
) -> Mapping[int, str]:
    """Return causes, by index in the job, for unreadable blocks behind the first bad block of a load.

    All are reported together, so that the session does not fail once for each of them. found: result of reading the
    first bad block. behind: indices in the job of later blocks. values: yields the results of reading these blocks.
    """
    if found is None:
        absent = set(store.absent(job.group, [job.block_hashes[at] for at in behind]))
        return {at: MISSING for at in behind if job.block_hashes[at] in absent}
    if isinstance(found, str):
        return {at: buf for at, buf in zip(behind, values, strict=False) if isinstance(buf, str)}
    return {}


def cause_of(error: Exception) -> str:
    """Return the cause of a job's failure, a metric's label. Log an unexpected exception."""
    if isinstance(error, CancelledError):
        return str(error) or RESET
    if isinstance(error, TierError | WireError):
        return error.cause
    logger.warning("Manthan: a transfer has failed: %s: %s", type(error).__name__, error)
    return "internal"


class JobThreads:
    """Threads that take jobs, here functions, in the order of submission. An exception of a job is logged.

    cpus: CPUs that the threads may run on; empty for the CPUs of the creating thread.
    """

    def __init__(self, count: int, name: str, cpus: Collection[int] = ()) -> None:
        self._jobs: Queue[Callable[[], object] | None] = Queue()
        self._threads = [
            threading.Thread(target=self._run, args=(cpus,), name=f"{name}-{n}", daemon=True) for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[..., object], *args: object) -> None:
        self._jobs.put(partial(job, *args))

    def wait(self) -> None:
        """Wait until all submitted jobs are done. After a shutdown there are none."""
        self._jobs.join()

    def shutdown(self) -> None:
        """Drop the jobs that have not begun, and wait for the others."""
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()
                self._jobs.task_done()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, cpus: Collection[int]) -> None:
        try:
            if cpus:
                os.sched_setaffinity(0, cpus)
        except OSError as error:
            logger.warning("Manthan: a thread stays on the model's CPUs: %s", error)
        while True:
            try:
                if (job := self._jobs.get()) is None:
                    return
                job()
            except Exception:  # the next job may succeed
                logger.exception("Manthan: a job has failed")
            finally:
                self._jobs.task_done()


def allowed_cpus() -> set[int]:
    """Return the CPUs that a worker's parent process may use, or this process without a parent; empty if unknown.

    vLLM binds the worker to some of these CPUs, and the model keeps those busy. A thread bound to the same CPUs would
    wait for the model.
    """
    parent = multiprocessing.parent_process()
    try:
        return os.sched_getaffinity(parent.pid if parent and parent.pid else 0)
    except (AttributeError, OSError) as error:  # not on Linux, or the parent is gone
        logger.debug("Manthan: the CPUs that may be used are not known: %s", error)
        return set()


def model_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event after the work queued on the model's stream; None on a CPU. Call on the model's thread."""
    return None if device.type == "cpu" else torch.cuda.current_stream(device).record_event()


def behind(model: torch.cuda.Event | None, device: torch.device) -> torch.cuda.StreamContext:
    """Return a context with a new stream that waits for event `model`; without an event, one that changes nothing."""
    stream = None
    if model is not None:
        stream = torch.cuda.Stream(device)
        stream.wait_event(model)
    return torch.cuda.stream(stream)
