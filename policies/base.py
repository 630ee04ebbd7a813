"""Interface of an eviction policy, and the facts about a session that a policy is told."""

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
    gap: float | None = None  # seconds from the last use to the newest request's begin; None before the second request
    added_tokens: int = 0  # number of the newest prompt's tokens that the session did not have before
    answer_tokens: int = 0  # number of tokens that the newest request generated
    left_tokens: int = 0  # number of the session's earlier tokens that the newest prompt changed or left out
    expected: float | None = None  # time of the next request, by the client or the awaited tool; None if unknown
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
    """Order of sessions, first victim first. A policy decides, and the session manager acts.

    The first victim is the first to lose compressed blocks in a tier, and saved blocks in vLLM's prefix cache. An
    engine has several instances, such as one for each priority and quota. An instance is told when a session enters, is
    used, and leaves. The scheduler's thread makes all calls. None may wait, do I/O or raise, and each should take
    O(log n) for n sessions.
    """

    name: ClassVar[str]
    """Name for the configuration, and for the option `--manthan-policy`."""
    Options: ClassVar[type[PolicyOptions]] = PolicyOptions
    """Class of the policy's options."""

    def __init__(self, options: Any = None) -> None:
        """Make an instance without sessions. options: an instance of `Options`; None for the defaults."""
        self.options = self.Options() if options is None else options

    @classmethod
    def family(cls, options: Any = None) -> Callable[[], Self]:
        """Return a function that makes one engine's instances. Override `family` if these share what they learn.

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
        """Take out a session that left for another reason than an eviction, such as a release. Ignore unknown ids."""

    def evicted(self, session_id: str) -> None:
        """Take out a session that lost all compressed blocks because `victims` named it. The session may come back."""
        self.forget(session_id)

    def superseded(self, session_id: str) -> None:  # noqa: B027 most policies need not know
        """Take note that another session continued from the middle of this session, as after an edited message."""

    @abstractmethod
    def victims(self) -> Iterator[str]:
        """Return the ids of all present sessions, each once, first victim first.

        The manager passes over sessions that cannot be evicted now, and stops when it has enough room. During the
        iteration sessions may leave, but `used` is not called.
        """


def in_order(queue: Collection[str]) -> Iterator[str]:
    """Yield the keys of a dict. Keys may be removed during the iteration. Each key takes O(1) on average."""
    passed: set[str] = set()
    while fresh := [key for key in islice(queue, 2 * len(passed) + 8) if key not in passed]:
        for key in fresh:
            passed.add(key)
            if key in queue:
                yield key


class RankedPolicy(EvictionPolicy):
    """Base of policies that give a session a number at each use. The session with the lowest number goes first.

    Of sessions with equal numbers, the least recently used goes first. Each call takes O(log n).
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
