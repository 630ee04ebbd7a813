"""Clock of the sweep: a background job that reports a due session."""

import logging
from collections.abc import Callable

from apscheduler.executors.debug import DebugExecutor
from apscheduler.schedulers.background import BackgroundScheduler

LATE_SHARE = 0.25
"""Longest delay of a session's eviction, as a share of the idle time."""
SHORTEST_S = 0.01

logger = logging.getLogger("vllm.manthan.sweeper")


class Sweeper:
    """Calls `due` periodically and, after True, calls `ring`. Both run on the job's thread.

    idle_after_s: time until sessions are due; see LATE_SHARE.
    """

    def __init__(self, idle_after_s: float, due: Callable[[], bool], ring: Callable[[], None]) -> None:
        self._due, self._ring = due, ring
        # The scheduler tells of each start and stop, and of each call that it leaves out since the last one is not
        # over. Said here: vLLM undoes what is said before it is imported.
        logger.setLevel(logging.ERROR)
        # In UTC, so that nobody looks for the machine's time zone. On the scheduler's own thread, because Python shuts
        # pools of threads before it ends, and an engine that is not shut down would be told so at each tick.
        self._scheduler = BackgroundScheduler(timezone="UTC", logger=logger, executors={"default": DebugExecutor()})
        self._scheduler.add_job(
            self._tick,
            "interval",
            seconds=max(LATE_SHARE * idle_after_s, SHORTEST_S),
            coalesce=True,
            max_instances=1,
            misfire_grace_time=None,  # on a busy machine a late sweep is better than none
        )

    def start(self) -> None:
        self._scheduler.start()

    def stop(self) -> None:
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    def _tick(self) -> None:
        if self._due():
            self._ring()
