"""Time to live, renewed by each use, as in the prompt caches of hosted models."""

from typing import ClassVar

from pydantic import Field

from manthan.policies.base import PolicyOptions, RankedPolicy, SessionView


class TTLOptions(PolicyOptions):
    """ttl_s: seconds that a session lives after its last use."""

    ttl_s: float = Field(default=300.0, gt=0, description="a plain number of seconds above 0, such as 300")


class TTL(RankedPolicy):
    """The session whose time to live ends first goes first. O(log n) an event.

    It ends `ttl_s` after the session's last use, or when the client said that it would be back, if that is later. So
    among sessions of which no client said anything, this is the order of lru.
    """

    name: ClassVar[str] = "ttl"
    Options: ClassVar[type[PolicyOptions]] = TTLOptions
    options: TTLOptions

    def rank(self, session: SessionView) -> float:
        end = session.last_used + self.options.ttl_s
        return end if session.expected is None else max(end, session.expected)
