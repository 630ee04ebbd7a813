"""Interface of an eviction policy, and the facts that it is told about a session."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from manthan.policies.ranking import Ranking


class SessionView(NamedTuple):
    """Facts about a session. Times are seconds on the manager's clock."""

    session_id: str
    tokens: int = 0  # number of tokens in the session's full blocks
    nbytes: int = 0  # approximate bytes of these blocks in a tier, compressed, on all ranks
    created: float = 0.0  # time of the session's first request
    last_used: float = 0.0  # time at which a request last began or ended
    uses: int = 1  # number of requests up to now, the running request included
    gap: float | None = None  # seconds between the two newest requests; None before the second request
    added_tokens: int = 0  # number of tokens of the newest request that were not known before
    answer_tokens: int = 0  # number of tokens that the newest request generated
    left_tokens: int = 0  # number of earlier tokens that the newest request changed or left out
    expected: float | None = None  # time at which the client said that it would return; None if it said nothing
    ending: str = ""  # tool that the client waits for, or else how the last answer ended; empty if unknown


class PolicyOptions(BaseModel):
    """Options of a policy, immutable, from the configuration's `policy` section.

    A field's description completes the sentence "policy.FIELD must be …", which users read after a wrong value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool(cls, value: object, info: ValidationInfo) -> object:
        """Refuse `true` for a number, because Python would read 1."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation in (int, float):
            raise ValueError("a truth value is not a number")
        return value


class EvictionPolicy(ABC):
    """Order of sessions, first victim first. A policy decides, and the manager acts.

    Victims lose their compressed blocks first, and vLLM overwrites their saved blocks first. An engine has several
    instances, such as one for each priority and quota. An instance is told of the entry, the uses and the leaving of
    its sessions. The scheduler's thread makes all calls: none may wait, do I/O or raise, and each takes O(log n).
    """

    name: ClassVar[str]
    """Name in the configuration and of `--manthan-policy`."""
    Options: ClassVar[type[PolicyOptions]] = PolicyOptions
    """Class of the policy's options."""

    def __init__(self, options: Any = None) -> None:
        """Make an instance without sessions. options: an instance of `Options`; None for the defaults."""
        self.options = self.Options() if options is None else options

    @classmethod
    def family(cls, options: Any = None) -> Callable[[], Self]:
        """Return a function that makes the instances of one engine. Override it if these share what they learn.

        Args:
            options: an instance of `Options`; None for the defaults.
        """
        return lambda: cls(options)

    @abstractmethod
    def used(self, session: SessionView) -> None:
        """Take note that a session has compressed blocks from now on, or that a request of it began or ended.

        Args:
            session: the facts as of now. The begin and the end of the same request have equal `uses`.
        """

    @abstractmethod
    def forget(self, session_id: str) -> None:
        """Take a session out that left for a reason other than `evicted`, such as a release. Ignore unknown ids."""

    def evicted(self, session_id: str) -> None:
        """Take out a session that lost all compressed blocks because `victims` named it. The session may come back."""
        self.forget(session_id)

    def superseded(self, session_id: str) -> None:  # noqa: B027 most policies need not know
        """Take note that another session went on from the middle of this one, as after an edited message."""

    @abstractmethod
    def victims(self) -> Iterator[str]:
        """Return the ids of all present sessions, each once, first victim first.

        The manager passes over sessions that cannot be evicted now, and stops when it has enough room. During the
        iteration sessions may leave, but `used` is not called.
        """


def in_order(queue: Collection[str]) -> Iterator[str]:
    """Yield the keys of a dict, though keys may be removed during the iteration. Each key takes O(1)."""
    passed: set[str] = set()
    while fresh := [key for key in islice(queue, 2 * len(passed) + 8) if key not in passed]:
        for key in fresh:
            passed.add(key)
            if key in queue:
                yield key


class RankedPolicy(EvictionPolicy):
    """Base of policies that give each session a number at each use. The lowest number is the first victim.

    Of equal numbers, the session unused for longer is first. Each call takes O(log n).
    """

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._ranking = Ranking()

    @abstractmethod
    def rank(self, session: SessionView) -> float:
        """Return the number of a session that was just used: any float but NaN."""

    def used(self, session: SessionView) -> None:
        self._ranking.set(session.session_id, self.rank(session))

    def forget(self, session_id: str) -> None:
        self._ranking.discard(session_id)

    def victims(self) -> Iterator[str]:
        return self._ranking.in_order()
