"""Sessions of an engine in this process that go cold when a test says so."""

import time
from collections.abc import Iterable
from typing import Any

from manthan.manager.session.table import Session


def evict(half: Any, sessions: Iterable[Session] | None = None) -> None:
    """Have these sessions saved, or all, but for those of which a request runs.

    half: the engine's scheduler half.
    """
    for session in list(half.manager.table.by_id.values() if sessions is None else sessions):
        half.driver.steer("evict", session, time.monotonic())
    half.steered()
