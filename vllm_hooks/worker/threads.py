"""Threads beside the model's."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Collection
from functools import partial
from queue import Empty, SimpleQueue

from vllm.logger import init_logger

logger = init_logger("vllm.manthan.worker")


class Threads:
    """So many threads that do jobs in the order they are given. Giving them one neither waits nor raises; what a job
    raises costs a line in the log.

    cpus: where they may run; if there are none, where the caller may.
    """

    def __init__(self, count: int, name: str, cpus: Collection[int] = ()) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(cpus,), name=f"{name}-{n}", daemon=True) for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[..., object], *args: object) -> None:
        self._jobs.put(partial(job, *args))

    def wait(self) -> None:
        """Until all jobs that were given are done; after a shutdown there are none."""
        self.on_each(lambda: None)

    def on_each(self, job: Callable[[], object]) -> None:
        """Have each thread do a job once it has done its others, and wait for them all."""
        if not any(thread.is_alive() for thread in self._threads):
            return
        all_idle = threading.Barrier(len(self._threads) + 1)

        def do() -> None:
            try:
                job()
            finally:
                all_idle.wait()

        for _ in self._threads:
            self.submit(do)
        all_idle.wait()

    def shutdown(self) -> None:
        """Forget what was not begun, and wait for what was."""
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
        move_to(cpus)
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # the next job is another one
                logger.exception("Manthan: a job has failed")


def allowed_cpus() -> set[int]:
    """The CPUs that a CPU worker was given, by taskset or a cgroup; none where that cannot be told.

    vLLM binds it to some of them, and its threads inherit that: ours would only run when the model does not. The
    process that started it has no such binding.
    """
    parent = multiprocessing.parent_process()
    try:
        return os.sched_getaffinity(parent.pid if parent and parent.pid else 0)
    except (AttributeError, OSError) as error:  # not on Linux, or the parent is gone
        logger.debug("Manthan: the CPUs that may be used are not known: %s", error)
        return set()


def move_to(cpus: Collection[int]) -> None:
    """Run the calling thread on these CPUs, if there are any."""
    try:
        if cpus:
            os.sched_setaffinity(0, cpus)
    except OSError as error:
        logger.warning("Manthan: a thread stays on the model's CPUs: %s", error)
