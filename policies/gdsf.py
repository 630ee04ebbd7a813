"""GreedyDual-Size-Frequency.

L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HP Laboratories
HPL-98-69, 1998: priority = L + frequency · cost / size. The lowest priority goes first, and L becomes that priority, so
that newcomers overtake sessions that are not used.

The cost here is the time that recomputing a session takes, in units of one token without attention. A token attends to
all before it: n tokens cost n + n²/K, so at n = K attention costs as much as all the rest.

K for an 8 B model: Qwen3-8B has 6.95 G parameters without its embeddings. With a multiplication and an addition each,
they cost 13.9 GFLOP a token. Its 36 layers of 32 heads of size 128 take 4 · 36 · 4,096 · i FLOP for a token behind i
others, and 295 kFLOP · n² for n tokens. Both are equal at n = 47,000. The same sum gives 60,000 for Qwen3-32B (31.2 G,
64 layers of 64 heads).
"""

from typing import Any, ClassVar

from manthan.policies.base import RankedPolicy, SessionView

ATTENTION_TOKENS = 50_000.0
"""K: tokens of a session at which attention costs as much as all the rest of recomputing it."""


class GDSF(RankedPolicy):
    """Session that saves the least time for its bytes first, by length and requests. O(log n) an event.

    All requests of a session count, also those before it was evicted: the paper cannot know them.
    """

    name: ClassVar[str] = "gdsf"

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.age = 0.0
        """L in the paper: priority of the last victim."""

    def rank(self, session: SessionView) -> float:
        cost = session.tokens + session.tokens**2 / ATTENTION_TOKENS
        return self.age + session.uses * cost / max(1, session.nbytes)

    def evicted(self, session_id: str) -> None:
        self.age = max(self.age, self._ranking.get(session_id) or 0.0)
        self.forget(session_id)
