"""Background job that wakes an engine without requests when an idle session is due to be saved."""

import logging
from collections.abc import Callable

from apscheduler.executors.debug import DebugExecutor
from apscheduler.schedulers.background import BackgroundScheduler

LATE_SHARE = 0.25  # longest delay of a due session's eviction, as a share of idle.after_s
SHORTEST_S = 0.01  # least seconds between two calls of `due`

logger = logging.getLogger("vllm.manthan.sweeper")


class Sweeper:
    """Calls `due` periodically, and `ring` if `due` returned True. Both run on the job's thread.

    idle_after_s: seconds until an idle session is due. The period is LATE_SHARE of this.
    """

    def __init__(self, idle_after_s: float, due: Callable[[], bool], ring: Callable[[], None]) -> None:
        self._due, self._ring = due, ring
        # APScheduler logs each start and stop, and each call that it skips because the last one still runs. Set here,
        # because vLLM's import sets up logging anew.
        logger.setLevel(logging.ERROR)
        # UTC, because APScheduler would look for the machine's time zone. DebugExecutor runs jobs on the scheduler's
        # thread. Python ends thread pools before a process that was not shut down: each tick would then be an error.
        self._scheduler = BackgroundScheduler(timezone="UTC", logger=logger, executors={"default": DebugExecutor()})
        self._scheduler.add_job(
            self._tick,
            "interval",
            seconds=max(LATE_SHARE * idle_after_s, SHORTEST_S),
            coalesce=True,
            max_instances=1,
            misfire_grace_time=None,  # on a busy machine a late call is better than none
        )

    def start(self) -> None:
        self._scheduler.start()

    def stop(self) -> None:
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    def _tick(self) -> None:
        if self._due():
            self._ring()
