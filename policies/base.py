"""What a policy is told of a session, and what it answers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from manthan.policies.ranking import Ranking


class SessionView(NamedTuple):
    """One session as a policy sees it. Times are seconds on the manager's clock.

    tokens: of all full blocks of its chain. nbytes: what they take in this place, bf16 in the hot pool and codes in the
    cold store. uses: requests so far; the one that runs counts.
    gap: seconds between the last request's end and the next one's begin; None before the second request.
    added_tokens: what its last request brought that was not known before. answer_tokens: what was generated then.
    left_tokens: what of the conversation the last request left behind, by changing what had been said.
    expected: when the client said that it would be back, which it does when an agent waits for a tool; None if it did
    not say.
    """

    session_id: str
    tokens: int = 0
    nbytes: int = 0
    created: float = 0.0
    last_used: float = 0.0
    uses: int = 1
    gap: float | None = None
    added_tokens: int = 0
    answer_tokens: int = 0
    left_tokens: int = 0
    expected: float | None = None


class PolicyOptions(BaseModel):
    """Options of a policy. A field's description completes the sentence "policy.FIELD must be …"."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool(cls, value: object, info: ValidationInfo) -> object:
        """Python takes True for 1, a user who writes `true` does not."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation in (int, float):
            raise ValueError("a truth value is not a number")
        return value


class EvictionPolicy(ABC):
    """Orders the sessions of one place by who goes first. A policy decides; it never acts.

    An engine has an instance for each place that fills up: the hot pool (who is evicted), the cold store (who is
    dropped), and a fast tier in front of a slower one (who moves). Where clients set priorities or tenants have quotas
    there are more. Each is told of every session that enters its place, is used in it, or leaves it.
    """

    name: ClassVar[str]
    Options: ClassVar[type[PolicyOptions]] = PolicyOptions

    def __init__(self, options: Any = None) -> None:
        """options: an instance of `Options`; None for the defaults."""
        self.options = self.Options() if options is None else options

    @classmethod
    def family(cls, options: Any = None) -> Callable[[], Self]:
        """What makes an engine's instances; a policy that learns may let them share what it has learned."""
        return lambda: cls(options)

    @abstractmethod
    def used(self, session: SessionView) -> None:
        """A session entered this place, or a request of it began or ended there: `uses` tells requests apart."""

    @abstractmethod
    def forget(self, session_id: str) -> None:
        """A session left this place, for whatever reason; unknown ids are ignored."""

    def evicted(self, session_id: str) -> None:
        """A session left this place because this policy had it go first. It may come back."""
        self.forget(session_id)

    def superseded(self, session_id: str) -> None:  # noqa: B027 most policies need not know
        """Another session went on from the middle of this one, as when a user edits an earlier message."""

    @abstractmethod
    def victims(self) -> Iterator[str]:
        """Session ids, the one to go first first. While one iterates, sessions may leave, but none is used."""


def in_order(queue: Collection[str], begin: Callable[[Any], Iterator[str]] = iter) -> Iterator[str]:
    """The keys of a dict or the like, while keys may be taken out of it. O(1) a key.

    begin: `reversed` for the last come first.
    """
    passed: set[str] = set()
    while fresh := [key for key in islice(begin(queue), 2 * len(passed) + 8) if key not in passed]:
        for key in fresh:
            passed.add(key)
            if key in queue:
                yield key


class RankedPolicy(EvictionPolicy):
    """Base of policies that give each session a number when it is used; the lowest goes first, of equals the older.

    O(log n) an event.
    """

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._ranking = Ranking()

    @abstractmethod
    def rank(self, session: SessionView) -> float:
        """The number of a session that was just used."""

    def used(self, session: SessionView) -> None:
        self._ranking.set(session.session_id, self.rank(session))

    def forget(self, session_id: str) -> None:
        self._ranking.discard(session_id)

    def victims(self) -> Iterator[str]:
        return self._ranking.in_order()
