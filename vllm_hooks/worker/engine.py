"""Interface of the engines, between blocks of a rank's paged cache and compressed blocks, and threads."""

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger

from manthan.manager.tiers.tier import Found, Tier, TierError
from manthan.manager.transfer import RESET, Transfer, TransferResult
from manthan.vllm_hooks.messages import ManthanMetadata, ManthanWorkerMetadata

logger = init_logger("vllm.manthan.worker")

MISSING = "missing"
"""Cause of a failure: the block is in no tier."""
REST_S = sys.getswitchinterval()
"""Most seconds that the model's thread pauses for a load, in a step without compute.

Without a pause, such steps would take half of the interpreter's time from the loading thread.
"""


class CancelledError(Exception):
    """End of a job without a fault. The argument is the cause, RESET without an argument."""


class Ended(NamedTuple):
    """Ended loads: the requests, the requests with a failed load, and the bad blocks of all further requests."""

    requests: set[str]
    failed: set[str]
    bad_blocks: set[int]


class Engine:
    """Worker of transfers: takes jobs, does them in the background, and reports ended jobs.

    The base class does nothing, and serves until there is a KV cache. The caller is the model's thread. No method
    raises, and no method waits unless the docstring says so.

    Args:
        fails_whole: True if a request's load fails as a whole. Otherwise only the blocks from the first bad block on
            fail.
    """

    def __init__(self, fails_whole: bool = False) -> None:
        self.decode_s: Mapping[str, float] | None = None
        """Seconds to decode a token by codec, on a GPU; None if the CPU decodes."""
        self._fails_whole = fails_whole
        self._lock = threading.Condition()
        self._begun = set[int]()
        """Ids of the last step's jobs whose answer is ensured, even if submitting raises."""
        self._open: dict[str, set[int]] = {}
        """Loads under way, by request id."""
        self._bad: dict[str, set[int]] = {}
        """Blocks unusable for vLLM, by request id."""
        self._report = ManthanWorkerMetadata()
        self._ended = Ended(set(), set(), set())

    def submit_loads(self, metadata: ManthanMetadata) -> None:
        """Carry out a step's resets and drops, then begin the step's loads."""
        self._begun.clear()
        self._open_all(metadata.loads)
        self._prepare(metadata)
        self._begin(metadata.loads, self._load)

    def submit_stores(self, metadata: ManthanMetadata) -> None:
        """Begin a step's stores, behind the model's work of the step."""
        self._begin(metadata.stores, self._store)

    def _begin(self, jobs: Sequence[Transfer], begin: Callable[[Transfer], None]) -> None:
        for job in jobs:
            self._begun.add(job.job_id)
            try:
                begin(job)
            except Exception as error:  # any error costs this job alone
                self._refuse(job, cause_of(error))

    def _prepare(self, metadata: ManthanMetadata) -> None:
        """Carry out resets, drops and revocations. Take note of the step."""

    def _load(self, job: Transfer) -> None:
        """Begin a load. Every load is answered, after an exception by the caller."""

    def _store(self, job: Transfer) -> None:
        """Begin a store. Every store is answered, after an exception by the caller."""

    def wait(self) -> None:
        """Wait until no begun job reads or writes the paged cache."""

    def shutdown(self) -> None:
        """Wait for the jobs under way, and free threads and memory."""

    def rest(self) -> None:
        """Wait a moment if threads load blocks for a request. The model computes nothing now."""
        with self._lock:
            self._lock.wait_for(lambda: not self._awaits_threads(), REST_S)

    def _awaits_threads(self) -> bool:
        """True if threads load, and no load has ended yet."""
        return False

    def take_ended(self) -> Ended:
        """Return the loads ended since the last call, for vLLM."""
        with self._lock:
            taken, self._ended = self._ended, Ended(set(), set(), set())
            return taken

    def take_report(self) -> ManthanWorkerMetadata | None:
        """Return the transfers ended since the last call, for the scheduler half; None without any."""
        with self._lock:
            taken, self._report = self._report, ManthanWorkerMetadata()
            return taken if taken.results or taken.gathered else None

    def fail(self, jobs: Sequence[Transfer]) -> None:
        """Answer the last step's jobs not begun."""
        self._open_all([job for job in jobs if job.direction == "load"])
        for job in jobs:
            if job.job_id not in self._begun:
                self._refuse(job, "internal")

    def fail_requests(self, blocks: Mapping[str, Sequence[int]]) -> None:
        """End loads awaited by vLLM without a job, given their blocks by request id."""
        for request_id, block_ids in blocks.items():
            self._open.setdefault(request_id, set())
            self._end(request_id, -1, block_ids)

    def _open_all(self, loads: Iterable[Transfer]) -> None:
        """Register all of a step's loads, so that no request ends before the last of the request's loads."""
        with self._lock:
            for job in loads:
                if job.request_id is not None and job.job_id not in self._begun:
                    self._open.setdefault(job.request_id, set()).add(job.job_id)

    def _gathered(self, job: Transfer) -> None:
        """Report the last read of the pool's blocks by a store, once, before the result."""
        with self._lock:
            self._report.gathered.append(job.job_id)

    def _refuse(self, job: Transfer, cause: str) -> None:
        """Answer a job not begun."""
        if job.direction == "store":
            self._gathered(job)
        self._answer(TransferResult.refused(job, cause))
        self._loaded(job, 0)

    def _answer(self, result: TransferResult) -> None:
        with self._lock:
            self._report.results.append(result)

    def _loaded(self, job: Transfer, good: int) -> None:
        """Note for vLLM the end of a load with `good` usable first blocks."""
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


def of_blocks(sizes: Sequence[int], count: int) -> NDArray[np.int64]:
    """Return int64 [count]: the sizes, then 0 for all further blocks."""
    nbytes = np.zeros(count, np.int64)
    nbytes[: len(sizes)] = sizes
    return nbytes


def other_causes(
    job: Transfer, behind: Sequence[int], found: Found, values: Iterator[Found], store: Tier
) -> Mapping[int, str]:
    """Causes of further unreadable blocks, so that a session does not fail once for each block.

    Args:
        behind: positions in the job of the blocks behind the first bad block, with contents from `values`.
        found: content of the first bad block.
    """
    if found is None:
        absent = set(store.absent(job.group, [job.block_hashes[at] for at in behind]))
        return {at: MISSING for at in behind if job.block_hashes[at] in absent}
    if isinstance(found, str):
        return {at: buf for at, buf in zip(behind, values, strict=False) if isinstance(buf, str)}
    return {}


def cause_of(error: Exception) -> str:
    """Cause of a job's failure, for metrics. An unknown exception is logged."""
    if isinstance(error, CancelledError):
        return str(error) or RESET
    if isinstance(error, TierError):
        return error.cause
    logger.warning("Manthan: a transfer has failed: %s: %s", type(error).__name__, error)
    return "internal"


class JobThreads:
    """Threads that do jobs in the order of submission. An exception of a job costs a line in the log.

    Args:
        cpus: CPUs of the threads; empty for the caller's CPUs.
    """

    def __init__(self, count: int, name: str, cpus: Collection[int] = ()) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(cpus,), name=f"{name}-{n}", daemon=True) for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[..., object], *args: object) -> None:
        """Give the threads a job."""
        self._jobs.put(partial(job, *args))

    def wait(self) -> None:
        """Wait until all submitted jobs are done. After a shutdown there are none."""
        if any(thread.is_alive() for thread in self._threads):
            all_idle = threading.Barrier(len(self._threads) + 1)
            for _ in self._threads:
                self.submit(all_idle.wait)
            all_idle.wait()

    def shutdown(self) -> None:
        """Drop the jobs not begun, and wait for the running jobs."""
        try:
            while True:
                self._jobs.get_nowait()
        except Empty:
            pass
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
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # the next job may succeed
                logger.exception("Manthan: a job has failed")


def allowed_cpus() -> set[int]:
    """CPUs of a CPU worker's parent process; empty if unknown.

    vLLM binds the worker to some of them. Threads with the worker's binding would run only while the model rests.
    """
    parent = multiprocessing.parent_process()
    try:
        return os.sched_getaffinity(parent.pid if parent and parent.pid else 0)
    except (AttributeError, OSError) as error:  # not on Linux, or the parent is gone
        logger.debug("Manthan: the CPUs that may be used are not known: %s", error)
        return set()
