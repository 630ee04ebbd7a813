"""Words about what may happen thousands of times."""

import threading
import time
from collections import Counter


class Sparing:
    """Each thing is said when it happens first, and then once in so many seconds, with how often it has. For any
    thread."""

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s, self._lock = quiet_s, threading.Lock()
        self._unsaid: Counter[str] = Counter()
        self._quiet_until: dict[str, float] = {}

    def due(self, what: str) -> int:
        """It happens once more: how often it has since it was last said, if it is to be said now; else 0."""
        with self._lock:
            self._unsaid[what] += 1
            if time.monotonic() < self._quiet_until.get(what, 0.0):
                return 0
            self._quiet_until[what] = time.monotonic() + self._quiet_s
            return self._unsaid.pop(what)
