"""GreedyDual-Size-Frequency.

L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HP Laboratories
HPL-98-69, 1998: priority = L + frequency · cost / size; the lowest goes first, and L becomes its priority, so that who
is not used is overtaken by newcomers in the end.

The cost here is the time that recomputing a session takes, in units of one token without attention. A token attends to
all before it, so n tokens cost n + n²/K: at n = K attention costs as much as all the rest.

Where K comes from, for an 8 B model: Qwen3-8B has 6.95 G parameters beside its embeddings, which is 13.9 GFLOP a
token, a multiplication and an addition each. Its 36 layers of 32 heads of size 128 take 4 · 36 · 4,096 · i FLOP for
the scores and the sums of the token behind i others, and 295 kFLOP · n² for n tokens. The two are equal at n = 47,000,
if both run at the same pace; the default is that, rounded. The same sum gives 60,000 for Qwen3-32B (31.2 G, 64 layers
of 64 heads).
"""

from typing import Any, ClassVar

from pydantic import Field

from manthan.policies.base import PolicyOptions, RankedPolicy, SessionView


class GDSFOptions(PolicyOptions):
    """attention_tokens: tokens of a session at which attention costs as much as all the rest of recomputing it."""

    attention_tokens: float = Field(
        default=50_000.0, ge=1, description="a plain number of tokens, 1 or more, such as 50000"
    )


class GDSF(RankedPolicy):
    """The session that saves least time for the bytes it takes goes first, by length and requests. O(log n) an event.

    All its requests count, also those before it was evicted: the paper cannot know them, a session's history can.
    """

    name: ClassVar[str] = "gdsf"
    Options: ClassVar[type[PolicyOptions]] = GDSFOptions
    options: GDSFOptions

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.age = 0.0
        """L in the paper: the priority of who went last."""

    def rank(self, session: SessionView) -> float:
        cost = session.tokens + session.tokens**2 / self.options.attention_tokens
        return self.age + session.uses * cost / max(1, session.nbytes)

    def evicted(self, session_id: str) -> None:
        if (rank := self._ranking.get(session_id)) is not None:
            self.age = max(self.age, rank)
        self.forget(session_id)
