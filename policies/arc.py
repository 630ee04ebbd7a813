"""Adaptive replacement cache.

N. Megiddo and D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.

Two lists hold the sessions that were used once (T1 in the paper) and those that were used again (T2), each in the
order of use. Two more remember ghosts, sessions that went from the one (B1) and from the other (B2). A session that
comes back while it is a ghost shows that its list had too little room: the size that T1 should have, p, moves.

Sessions differ in size, so all lists and p count bytes rather than pages. Nobody tells a policy how large its place
is: c is the most that was there at once. Ghosts of T1 are kept up to c together with T1, all lists together up to 2c.

One thing differs: the paper chooses a victim for a page that is about to enter, and where T1 has just the size p and
the page was in B2, takes it from T1. Here a victim is chosen before anybody knows who enters.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from manthan.policies.base import EvictionPolicy, SessionView, in_order
from manthan.policies.byte_queue import ByteQueue


class ARC(EvictionPolicy):
    """Sessions used once and those used again share the place; who went too early gets more of it. O(1) an event."""

    name: ClassVar[str] = "arc"

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._once, self._again = ByteQueue(), ByteQueue()  # T1, T2
        self._once_ghosts, self._again_ghosts = ByteQueue(), ByteQueue()  # B1, B2
        self._target = 0.0  # p
        self._capacity = 0  # c
        self._uses: dict[str, int] = {}

    def used(self, session: SessionView) -> None:
        session_id = session.session_id
        if session_id not in self._uses:
            is_again = self._was_missed(session_id)
        else:
            is_again = session_id in self._again or session.uses > self._uses[session_id]
        self._uses[session_id] = session.uses
        if is_again:
            self._once.pop(session_id)
        (self._again if is_again else self._once).put_last(session_id, session.nbytes)
        self._capacity = max(self._capacity, self._once.nbytes + self._again.nbytes)

    def _was_missed(self, session_id: str) -> bool:
        """Whether one that enters went not long ago; the list that it was in should have had more room."""
        once, again = self._once_ghosts, self._again_ghosts
        if session_id in once:
            ratio = max(1.0, again.nbytes / once.nbytes)
            self._target = min(self._target + ratio * once.pop(session_id), self._capacity)
        elif session_id in again:
            ratio = max(1.0, once.nbytes / again.nbytes)
            self._target = max(self._target - ratio * again.pop(session_id), 0)
        else:
            return False
        return True

    def forget(self, session_id: str) -> None:
        if self._uses.pop(session_id, None) is not None:
            self._once.pop(session_id)
            self._again.pop(session_id)

    def evicted(self, session_id: str) -> None:
        for queue, ghosts in ((self._once, self._once_ghosts), (self._again, self._again_ghosts)):
            if session_id in queue:
                ghosts.put_last(session_id, queue.size(session_id))
        self.forget(session_id)
        self._once_ghosts.trim(self._capacity - self._once.nbytes)
        kept = self._once.nbytes + self._again.nbytes + self._once_ghosts.nbytes
        self._again_ghosts.trim(2 * self._capacity - kept)

    def victims(self) -> Iterator[str]:
        once, again = in_order(self._once), in_order(self._again)
        left = self._once.nbytes
        while True:
            first, then = (once, again) if left > self._target else (again, once)
            session_id = next(first, None)
            if session_id is None and (session_id := next(then, None)) is None:
                return
            left -= self._once.size(session_id)
            yield session_id
