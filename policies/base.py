"""Interface of an eviction policy, and the facts about a session that it decides by."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from manthan.policies.ranking import Ranking


class SessionView(NamedTuple):
    """Facts about one session. Times are seconds on the manager's clock.

    tokens: of all full blocks of the session.
    nbytes: size of these blocks in a tier, compressed.
    uses: requests up to now, the running one included.
    gap: seconds between the last request's end and the next one's begin; None before the second request.
    added_tokens: tokens that the last request added to what was known.
    answer_tokens: tokens that were generated for it.
    left_tokens: tokens of the conversation that the last request changed and left behind.
    expected: time at which the client said it would return; None if it said nothing.
    ending: tool that the client waits for, or else how the last answer ended; empty if that is unknown.
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
    ending: str = ""


class PolicyOptions(BaseModel):
    """Options of a policy. A field's description completes the sentence "policy.FIELD must be …"."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool(cls, value: object, info: ValidationInfo) -> object:
        """Refuse `true` for a number, which Python would take for 1."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation in (int, float):
            raise ValueError("a truth value is not a number")
        return value


class EvictionPolicy(ABC):
    """Order of sessions, first victim first. A policy decides and never acts.

    Victims lose their compressed blocks first, and vLLM overwrites their saved blocks first. An engine has one
    instance, and more for client priorities and tenants' quotas. Each hears of every session that enters, is used, or
    leaves.
    """

    name: ClassVar[str]
    Options: ClassVar[type[PolicyOptions]] = PolicyOptions

    def __init__(self, options: Any = None) -> None:
        """Take an instance of `Options`, or None for the defaults."""
        self.options = self.Options() if options is None else options

    @classmethod
    def family(cls, options: Any = None) -> Callable[[], Self]:
        """Return a maker of an engine's instances. Instances of a policy that learns may share what it learned."""
        return lambda: cls(options)

    @abstractmethod
    def used(self, session: SessionView) -> None:
        """Take note that a session entered this place, or that a request of it began or ended there.

        `uses` tells requests apart.
        """

    @abstractmethod
    def forget(self, session_id: str) -> None:
        """Take note that a session left this place for any reason. Ignore unknown ids."""

    def evicted(self, session_id: str) -> None:
        """Take note that a session left this place because this policy chose it. It may come back."""
        self.forget(session_id)

    def superseded(self, session_id: str) -> None:  # noqa: B027 most policies need not know
        """Take note that another session continues from the middle of this one, as after an edited message."""

    @abstractmethod
    def victims(self) -> Iterator[str]:
        """Session ids, first victim first. During an iteration sessions may leave, but none is used."""


def in_order(queue: Collection[str], begin: Callable[[Any], Iterator[str]] = iter) -> Iterator[str]:
    """Keys of a dict or the like, from which keys may be removed meanwhile. O(1) a key.

    Args:
        queue: the dict.
        begin: `reversed` to begin with the last key.
    """
    passed: set[str] = set()
    while fresh := [key for key in islice(begin(queue), 2 * len(passed) + 8) if key not in passed]:
        for key in fresh:
            passed.add(key)
            if key in queue:
                yield key


class RankedPolicy(EvictionPolicy):
    """Base of policies that give a session a number at each use. The lowest goes first, of equals the older.

    O(log n) an event.
    """

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._ranking = Ranking()

    @abstractmethod
    def rank(self, session: SessionView) -> float:
        """Number of a session that was just used."""

    def used(self, session: SessionView) -> None:
        self._ranking.set(session.session_id, self.rank(session))

    def forget(self, session_id: str) -> None:
        self._ranking.discard(session_id)

    def victims(self) -> Iterator[str]:
        return self._ranking.in_order()
