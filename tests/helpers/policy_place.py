"""A place that a policy keeps within its bytes, told what the manager would tell it."""

from collections import Counter

from manthan.policies import EvictionPolicy, SessionView, get_policy


class Place:
    """Requests come one at a time, a second apart; each begins and ends. Sessions have one size, from first to last."""

    def __init__(self, policy: EvictionPolicy | str, capacity: int = 10**9) -> None:
        self.policy = get_policy(policy)() if isinstance(policy, str) else policy
        self.capacity = capacity
        self.present: dict[str, int] = {}
        self.uses: Counter[str] = Counter()
        self.created: dict[str, float] = {}
        self.now = 0.0

    def request(self, *session_ids: str, nbytes: int = 1) -> list[str]:
        """Who had to go for these requests."""
        gone = []
        for session_id in session_ids:
            self.now += 1
            self.uses[session_id] += 1
            self.created.setdefault(session_id, self.now)
            if session_id not in self.present:
                gone += self.make_room(nbytes)
                self.present[session_id] = nbytes
            view = SessionView(
                session_id,
                tokens=nbytes,
                nbytes=self.present[session_id],
                created=self.created[session_id],
                last_used=self.now,
                uses=self.uses[session_id],
            )
            self.policy.used(view)  # it begins
            self.policy.used(view)  # it ends
        return gone

    def make_room(self, nbytes: int) -> list[str]:
        gone = []
        while sum(self.present.values()) + nbytes > self.capacity:
            gone.append(self.evict())
        return gone

    def evict(self) -> str:
        """The policy's first victim goes."""
        session_id = next(self.policy.victims())
        del self.present[session_id]
        self.policy.evicted(session_id)
        return session_id

    def evict_all(self) -> list[str]:
        return [self.evict() for _ in list(self.present)]
