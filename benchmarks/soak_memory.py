"""Resident memory of a server and everything it started, sampled while it works, and how it grows."""

import math
import os
import threading
import time
from typing import NamedTuple, Self

import numpy as np
import psutil

INTERVAL_S = 1.0
HOUR_S = 3600.0


class Sample(NamedTuple):
    """seconds: since the first sample. nbytes: RSS of all processes together; shared pages count in each."""

    seconds: float
    nbytes: int
    processes: int


class Slope(NamedTuple):
    """MiB an hour by least squares, and its standard error."""

    mib_per_hour: float
    standard_error: float


class MemorySampler:
    """Samples a process group from a thread of its own, until it is left."""

    def __init__(self, group: int) -> None:
        self.samples: list[Sample] = []
        self._group = group
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        while True:
            sizes = group_rss(self._group)
            self.samples.append(Sample(time.monotonic() - began, sum(sizes), len(sizes)))
            if self._stop.wait(INTERVAL_S):
                return


def group_rss(group: int) -> list[int]:
    """RSS of each process of this group, in bytes."""
    sizes = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group:
                sizes.append(int(process.memory_info().rss))
        except (ProcessLookupError, psutil.Error):  # it has just ended
            continue
    return sizes


def slope(samples: list[Sample], warm_up_s: float) -> Slope | None:
    """Of the samples after the warm-up; None if there are fewer than three.

    The standard error takes samples for independent, which they are not quite: the true one is larger.
    """
    late = [sample for sample in samples if sample.seconds >= warm_up_s]
    if len(late) < 3:
        return None
    hours = np.array([sample.seconds for sample in late]) / HOUR_S
    mib = np.array([sample.nbytes for sample in late]) / 2**20
    hours = hours - hours.mean()
    spread = float(hours @ hours)
    rate = float(hours @ mib) / spread
    rest = mib - mib.mean() - rate * hours
    return Slope(rate, math.sqrt(float(rest @ rest) / (len(late) - 2) / spread))
