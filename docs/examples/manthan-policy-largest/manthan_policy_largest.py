"""An eviction policy for Manthan: large sessions make room for many small ones."""

from typing import ClassVar

from pydantic import Field

from manthan.policies import PolicyOptions, RankedPolicy, SessionView


class LargestOptions(PolicyOptions):
    """spared_tokens: longer sessions go first; the others are all alike, so that the one unused for longest goes."""

    spared_tokens: int = Field(default=4096, ge=0, description="a whole number of tokens, 0 or more, such as 4096")


class Largest(RankedPolicy):
    """The largest session goes first."""

    name: ClassVar[str] = "largest"
    Options: ClassVar[type[PolicyOptions]] = LargestOptions
    options: LargestOptions

    def rank(self, session: SessionView) -> float:
        return -max(session.tokens, self.options.spared_tokens)
