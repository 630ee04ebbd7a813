"""A cache that is not there: what another policy would have found in a place, simulated on a sample of its sessions.

C. Waldspurger et al., "Cache Modeling and Optimization using Miniature Simulations", USENIX ATC 2017: a cache scaled
down together with its requests, these chosen by a hash, finds about the share that the whole one would.
"""

from manthan.policies.base import EvictionPolicy, SessionView


class ShadowCache:
    """The sessions that a place under `policy` would hold, and how many bytes of each, without any KV.

    As in a real place, whoever goes first loses its tail, and only as much as is needed; a session whose own turn it is
    keeps what fits.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.kept: dict[str, int] = {}
        self.nbytes = 0

    def request(self, session: SessionView, known: float, capacity: float) -> float:
        """A request of the session has ended, which stays in its full length; others make room within so many bytes.

        known: of its bytes, those that an unlimited cache would have found. Returns how many were found.
        """
        found = min(self.kept.get(session.session_id, 0), known)
        self._keep(session.session_id, max(1, session.nbytes))
        self.policy.used(session)
        if self.nbytes > capacity:
            self._make_room(session.session_id, capacity)
        return found

    def forget(self, session_id: str) -> None:
        """The session is over, whatever the policy; unknown ids are ignored."""
        if session_id in self.kept:
            self._keep(session_id, 0)
            self.policy.forget(session_id)

    def superseded(self, session_id: str) -> None:
        """See EvictionPolicy.superseded."""
        if session_id in self.kept:
            self.policy.superseded(session_id)

    def inherit(self, session_id: str, origin: str) -> None:
        """The session goes on from the middle of another, whose KV it finds; the other's own end is worth nothing."""
        if nbytes := self.kept.get(origin, 0):
            self.forget(origin)
            self._keep(session_id, nbytes)

    def _make_room(self, newcomer: str, capacity: float) -> None:
        for victim in self.policy.victims():
            short = self.nbytes - capacity
            if short <= 0:
                return
            left = self.kept[victim] - short
            self._keep(victim, max(0, int(left)))
            if left < 1:
                self.policy.evicted(victim)
            if victim == newcomer:
                return

    def _keep(self, session_id: str, nbytes: int) -> None:
        self.nbytes += nbytes - self.kept.get(session_id, 0)
        if nbytes:
            self.kept[session_id] = nbytes
        else:
            self.kept.pop(session_id, None)
