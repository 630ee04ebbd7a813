"""Threads that write to a disk for those who would not wait forever for it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

R = TypeVar("R")
THREADS = 4


class HangsError(Exception):
    """The disk does not answer. Jobs that have begun go on when it does."""


class Writers:
    """timeout_s: after how long without any answer of the disk it counts as one that hangs."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(THREADS, "manthan-write")
        self._answers = 0
        self._hanging: list[Future[Any]] = []
        self._lock = threading.Lock()
        """Of what hangs."""

    def run(self, job: Callable[[], R]) -> R:
        """What the job gives. It may take long, as compaction does, if only the disk answers now and then. Raises
        HangsError, at once as long as another job hangs."""
        with self._lock:
            self._hanging = [other for other in self._hanging if not other.done()]
            if self._hanging:
                raise HangsError
        future = self._threads.submit(job)
        while True:
            before = self._answers
            try:
                return future.result(self._timeout_s)
            except TimeoutError:
                if self._answers == before:
                    break
        if not future.cancel():
            with self._lock:
                self._hanging.append(future)
        raise HangsError

    def answered(self) -> None:
        """The disk has done something for one of the jobs."""
        self._answers += 1

    def shutdown(self) -> None:
        """Does not wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)
