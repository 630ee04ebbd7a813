"""Limit on log lines about events that may happen thousands of times."""

import threading
import time
from collections import Counter


class Sparing:
    """Tells when to log events of a subject: the first, and then at most one in `quiet_s` seconds. Thread-safe."""

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s, self._lock = quiet_s, threading.Lock()
        self._unsaid: Counter[str] = Counter()
        self._quiet_until: dict[str, float] = {}

    def due(self, what: str) -> int:
        """Count an event of `what`. Return the number of events since the last line if a line is due; else 0."""
        with self._lock:
            self._unsaid[what] += 1
            if time.monotonic() < self._quiet_until.get(what, 0.0):
                return 0
            self._quiet_until[what] = time.monotonic() + self._quiet_s
            return self._unsaid.pop(what)
