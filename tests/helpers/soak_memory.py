"""Memory and processor time of a server's processes, and how its memory grows."""

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import psutil

HOUR_S = 3600.0
MIB = 2**20
WINDOW_S = 120.0
STEADY_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(128 * 1024), "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
"""Environment of vLLM's CPU build, unless the caller's says otherwise. The build makes a oneDNN primitive for each new
number of tokens. It keeps 1,024 of them between large buffers, which glibc then cannot give back. Memory would grow for
hours, also without Manthan. See docs/troubleshooting.md."""


class Sample(NamedTuple):
    """Seconds since a server was ready, and bytes of its processes together."""

    seconds: float
    nbytes: int


class Slope(NamedTuple):
    """MiB an hour by least squares, and its standard error."""

    mib_per_hour: float
    standard_error: float


class Group:
    """The processes of a group that run now, by their names and numbers."""

    def __init__(self, pid: int) -> None:
        self._processes = {}
        for process in psutil.process_iter():
            try:
                if os.getpgid(process.pid) == pid:
                    self._processes[f"{process.name()} {process.pid}"] = process
            except (ProcessLookupError, psutil.Error):  # it has just ended
                continue

    def memory(self) -> dict[str, int]:
        """Return resident bytes by process, without pages of files and what processes share.

        The system takes pages of files away when other programs need room, and brings them back.
        """
        sizes = {name: process.memory_info() for name, process in self._living()}
        return {name: int(size.rss - size.shared) for name, size in sizes.items()}

    def processor_s(self) -> dict[str, float]:
        """Return processor seconds by name."""
        seconds: dict[str, float] = {}
        for name, process in self._living():
            times, name = process.cpu_times(), name.rsplit(" ", 1)[0]
            seconds[name] = seconds.get(name, 0.0) + times.user + times.system
        return seconds

    def _living(self) -> list[tuple[str, psutil.Process]]:
        alive = {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
        return [
            (name, process)
            for name, process in self._processes.items()
            if process.is_running() and process.status() not in alive
        ]


def slope(samples: Sequence[Sample], warm_up_s: float) -> Slope | None:
    """Fit the samples after the warm-up; None if there are fewer than three.

    The standard error takes samples for independent, which they are not quite: the true one is larger.
    """
    late = [sample for sample in samples if sample.seconds >= warm_up_s]
    if len(late) < 3:
        return None
    hours = np.array([sample.seconds for sample in late]) / HOUR_S
    mib = np.array([sample.nbytes for sample in late]) / MIB
    hours = hours - hours.mean()
    spread = float(hours @ hours)
    rate = float(hours @ mib) / spread
    rest = mib - mib.mean() - rate * hours
    return Slope(rate, math.sqrt(float(rest @ rest) / (len(late) - 2) / spread))


def rise(samples: Sequence[Sample], warm_up_s: float) -> float | None:
    """Return MiB by which the highest median of two minutes after the warm-up is above the first; None without two."""
    windows: dict[int, list[int]] = {}
    for sample in samples:
        if sample.seconds >= warm_up_s:
            windows.setdefault(int((sample.seconds - warm_up_s) / WINDOW_S), []).append(sample.nbytes)
    medians = [float(np.median(windows[at])) / MIB for at in sorted(windows)]
    return max(medians) - medians[0] if len(medians) > 1 else None
