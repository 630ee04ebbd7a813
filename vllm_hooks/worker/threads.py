"""Threads beside the model's."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Collection
from functools import partial
from queue import Empty, SimpleQueue

from vllm.logger import init_logger

logger = init_logger("vllm.manthan.worker")


class JobThreads:
    """Threads that do jobs in the order in which they are given.

    Giving one neither waits nor raises. An exception of a job costs a line in the log.

    Args:
        count: number of threads.
        cpus: CPUs on which they may run; empty for those of the caller.
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
        """Wait until all jobs that were given are done. After a shutdown there are none."""
        if any(thread.is_alive() for thread in self._threads):
            all_idle = threading.Barrier(len(self._threads) + 1)
            for _ in self._threads:
                self.submit(all_idle.wait)
            all_idle.wait()

    def shutdown(self) -> None:
        """Drop the jobs that have not begun, and wait for the others."""
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
            except Exception:  # the next job is another one
                logger.exception("Manthan: a job has failed")


def allowed_cpus() -> set[int]:
    """CPUs that a CPU worker was given, by taskset or a cgroup; empty if that cannot be told.

    vLLM binds the worker to some of them, and its threads inherit that. They would run only when the model does not.
    The parent process has no such binding.
    """
    parent = multiprocessing.parent_process()
    try:
        return os.sched_getaffinity(parent.pid if parent and parent.pid else 0)
    except (AttributeError, OSError) as error:  # not on Linux, or the parent is gone
        logger.debug("Manthan: the CPUs that may be used are not known: %s", error)
        return set()
