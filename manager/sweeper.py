"""Background job that wakes an engine without requests when work is due, such as saving an idle session."""

import logging
from collections.abc import Callable

from apscheduler.executors.debug import DebugExecutor
from apscheduler.schedulers.background import BackgroundScheduler

LATE_SHARE = 0.25  # period of the calls of `due`, and so the longest delay of due work, as a share of `idle_after_s`
SHORTEST_S = 0.01  # least seconds between two calls of `due`

logger = logging.getLogger("vllm.manthan.sweeper")


class Sweeper:
    """Background job that calls `due` periodically, and `wake` if `due` returned True. Both run on the job's thread.

    idle_after_s: shortest delay after which work becomes due. The period is LATE_SHARE of it, and at least SHORTEST_S.
    """

    def __init__(self, idle_after_s: float, due: Callable[[], bool], wake: Callable[[], None]) -> None:
        self._due, self._wake = due, wake
        # APScheduler logs each start and stop, and each call that it skips because the last one still runs. The level
        # is set here, not at import, because vLLM's import sets up logging anew.
        logger.setLevel(logging.ERROR)
        # UTC is given, because APScheduler would else look for the machine's time zone. DebugExecutor runs jobs on
        # APScheduler's thread, not in a pool. At exit Python ends pools first, and each later tick would be an error.
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
            self._wake()
