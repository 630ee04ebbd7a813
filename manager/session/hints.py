"""Hints: a client's instructions for a session, in a request, and a sentence for each mistake in them.

A field's description completes the sentence "HINT must be …". The cold store is all tiers (RAM, GPU memory, disk,
Redis), which keep compressed blocks.
"""

import reprlib
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from math import inf
from statistics import quantiles
from typing import TYPE_CHECKING, Annotated, Self

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from manthan.manager.config.model import QUALITY, Quality
from manthan.manager.config.resolve import first_mistake, must_be, nearest
from manthan.manager.events import DropCause, Pinned
from manthan.manager.session.blocks import Rows
from manthan.manager.session.table import Session
from manthan.policies.ranking import Ranking

if TYPE_CHECKING:
    from manthan.manager.session.manager import SessionManager

WHERE = "kv_transfer_params.manthan"  # key of hints in a request
LONGEST_NAME = 256  # most characters of a session's id, a tenant's name or a tool's name
MOST_PREFETCHES = 64
HIGHEST_PRIORITY = 10


class HintError(ValueError):
    """Unusable hints, in a sentence for the client."""


def _printable(name: str) -> str:
    if not name.isprintable():  # logs and metrics show the name
        raise ValueError("not printable")
    return name


def check_session_id(session_id: str | None) -> None:
    """Raise HintError for a session's id that is too long or not printable, because logs and a page show it."""
    if session_id and (len(session_id) > LONGEST_NAME or not session_id.isprintable()):
        shown = reprlib.repr(session_id)
        raise HintError(f"session_id must have at most {LONGEST_NAME} printable characters, not {shown}")


LONGEST_S = 30 * 86_400  # longest time in a hint, in seconds: 30 days
Seconds = Annotated[float, Field(strict=True, gt=0, le=LONGEST_S, allow_inf_nan=False)]
PrintableName = Annotated[str, Field(strict=True, max_length=LONGEST_NAME), AfterValidator(_printable)]
SessionId = Annotated[PrintableName, Field(min_length=1)]
SessionIds = Annotated[
    tuple[SessionId, ...],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(max_length=MOST_PREFETCHES),
]
Priority = Annotated[int, Field(strict=True, ge=-HIGHEST_PRIORITY, le=HIGHEST_PRIORITY)]
SECONDS = f"a number of seconds above 0, and at most {LONGEST_S} (30 days)"
TOOL_NAME = f"a tool's name, of at most {LONGEST_NAME} printable characters"
MOST_KEEPS = 16
MOST_TOKENS = 10_000_000
KEEPS = (
    f"a list of up to {MOST_KEEPS} objects with from, to and seconds: token numbers from 0 to {MOST_TOKENS}, from "
    f"below to, and {SECONDS}"
)
PRIORITY = f"a whole number from -{HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}"
SESSION_ID = f"a session id of 1 to {LONGEST_NAME} printable characters"
SESSION_IDS = f"a session id or a list of up to {MOST_PREFETCHES}, each of 1 to {LONGEST_NAME} printable characters"


class TokenRange(BaseModel):
    """Tokens from `start` to before `end` of a session. Their compressed blocks, and all before, are kept `seconds`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    start: int = Field(alias="from", strict=True, ge=0)
    end: int = Field(alias="to", strict=True, le=MOST_TOKENS)
    seconds: Seconds

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.start >= self.end:
            raise ValueError("an empty range")
        return self


class Hints(BaseModel):
    """Hints of a request about its session. A hint with its default value changes nothing.

    pin: True keeps the compressed blocks when others are dropped; False ends a pin. keep: ranges of tokens, each kept
    for a time. ttl_s: seconds after the last use until the session is forgotten. priority: sessions of lower priority
    are dropped before those of higher priority, under every policy; 0 without any hint. release: drop the session at
    this request's end, unless another of its requests runs. expect_return_s: approximate seconds from this request's
    end until the client returns; None to learn from waits for `tool`. prefetch: ids of sessions about to be used.
    parent_session_id: session that this session works for. quality: "exact" to take exact KV only, "high" also KV from
    blocks of level `HIGH` or finer (see `Level`), "any" all decoded KV; None for the configured quality.
    store: False if no KV of this and later requests of the session may reach a tier; True to allow this again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pin: bool | None = Field(default=None, strict=True, description="true or false")
    keep: tuple[TokenRange, ...] = Field(default=(), max_length=MOST_KEEPS, description=KEEPS)
    ttl_s: Seconds | None = Field(default=None, description=SECONDS)
    priority: Priority | None = Field(default=None, description=PRIORITY)
    release: bool = Field(default=False, strict=True, description="true or false")
    expect_return_s: Seconds | None = Field(default=None, description=SECONDS)
    tool: PrintableName = Field(default="", description=TOOL_NAME)
    prefetch: SessionIds = Field(default=(), description=SESSION_IDS)
    parent_session_id: SessionId | None = Field(default=None, description=SESSION_ID)
    tenant: PrintableName = Field(default="", description=f"a name of at most {LONGEST_NAME} printable characters")
    quality: Quality | None = Field(default=None, description=QUALITY)
    store: bool | None = Field(default=None, strict=True, description="true or false")

    @model_validator(mode="after")
    def _check_release(self) -> Self:
        for hint in ("pin", "keep", "expect_return_s", "tool"):
            if self.release and getattr(self, hint):
                raise ValueError(
                    f"{WHERE}: release drops the session when this request ends, but {hint} keeps it: give one of them"
                )
        return self

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the given hints."""
        return tuple(name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default)


NO_HINTS = Hints()


def parse_hints(value: object) -> Hints:
    """Return the hints of a request. value: mapping at `WHERE` in the request, or None. Ignore hints with value None.

    Raises: HintError for an unknown hint, a wrong value, or hints that contradict each other.
    """
    if value is None:
        return NO_HINTS
    if not isinstance(value, Mapping):
        raise HintError(f"{WHERE} must be a mapping of hints to values, not {reprlib.repr(value)}")
    for name in value:
        if name not in Hints.model_fields:
            hint = nearest(str(name)[:LONGEST_NAME], Hints.model_fields)
            raise HintError(f"{WHERE}: unknown hint {reprlib.repr(str(name))}{hint}")
    try:
        return Hints.model_validate({name: given for name, given in value.items() if given is not None})
    except ValidationError as error:
        first = first_mistake(error)
        if not first.key:
            raise HintError(first.said) from None
        name, right = first.field, Hints.model_fields[first.field].description
        raise HintError(must_be(f"{WHERE}.{name}", right, value[name], show=reprlib.repr)) from None


LAST_PAUSES = 32  # number of a tool's latest pauses that count
ENOUGH_PAUSES = 3  # least number of pauses from which a tool's duration is estimated
SURE_PAUSES = 8  # least number of pauses for a prefetch of a session that waits for the tool
SURE_RATIO = 2.0  # largest ratio of the pauses' third quartile to the first for such a prefetch
MOST_TOOLS = 4096  # most tools remembered, of all tenants. The tool without a new pause for longest is forgotten first


class ToolTimes:
    """Pauses of sessions that waited for a tool: seconds from a request's end to the next request's begin.

    Each tenant's tools have pauses of their own.
    """

    def __init__(self) -> None:
        self._pauses: OrderedDict[tuple[str, str], deque[float]] = OrderedDict()  # by tenant and tool

    def took(self, tenant: str, tool: str, seconds: float) -> None:
        """Note that a tenant's session has waited `seconds` for a tool."""
        pauses = self._pauses.setdefault((tenant, tool), deque(maxlen=LAST_PAUSES))
        self._pauses.move_to_end((tenant, tool))
        pauses.append(seconds)
        if len(self._pauses) > MOST_TOOLS:
            self._pauses.popitem(last=False)

    def expected(self, tenant: str, tool: str) -> tuple[float | None, bool]:
        """Return the median of a tool's pauses in seconds, and whether it is sure enough for a prefetch.

        The median is None while there are too few pauses. It is sure if there are enough pauses that differ little.
        """
        pauses = self._pauses.get((tenant, tool), ())
        if len(pauses) < ENOUGH_PAUSES:
            return None, False
        low, middle, high = quantiles(pauses, n=4)
        return middle, len(pauses) >= SURE_PAUSES and high <= SURE_RATIO * low


class SaidBySession:
    """Does what hints ask for, or refuses it: pins, times to live, expected returns. ttl_s: see `SessionManager`."""

    def __init__(self, manager: "SessionManager", ttl_s: float | None) -> None:
        self._manager, self._table, self._ttl_s = manager, manager.table, ttl_s
        self.pinned: dict[Session, int] = {}  # by pinned or kept session, its bytes of the share `Shares.pinned`
        self.ttls, self.pins = Ranking(), Ranking()
        """By session id: in `ttls` the time to forget the session, in `pins` the next end of a pin or kept range."""
        self._tools = ToolTimes()
        self.expected: Callable[[Session, float], None] = lambda session, now: None
        """Function of the prefetcher for a changed expected return: takes the session, and the begin of its wait."""

    def take(self, session: Session, hints: Hints, now: float) -> str:
        """Do what a request's hints ask for. Return the reason for a refusal, in a sentence; empty for none."""
        refused = ""
        if hints.pin or (session.is_pinned and hints.pin is None):
            refused = self.pin(session, session.pinned_until if hints.pin is None else None)
        elif hints.pin is False:
            self.unpin(session)
        if hints.keep:
            session.keeps = tuple((now + each.seconds, each.end) for each in hints.keep)
        refused_range = self._renew(session, now)
        session.ttl_s = hints.ttl_s or session.ttl_s
        if hints.priority is not None:
            session.priority = hints.priority
        if hints.tool or hints.expect_return_s is not None:
            self.await_return(session, hints.expect_return_s, hints.tool, now)
        self.live_on(session, now)
        return refused or refused_range

    def live_on(self, session: Session, now: float) -> None:
        """Begin a session's time to live anew."""
        if (ttl_s := session.ttl_s or self._ttl_s) is not None:
            self.ttls.set(session.session_id, now + ttl_s)

    def await_return(self, session: Session, seconds: float | None, tool: str, since: float) -> None:
        """Note that the client returns `seconds` after `since`. If None, the tool's median pause counts, if known."""
        session.tool, session.is_sure = tool, True
        if seconds is None:
            seconds, session.is_sure = self._tools.expected(session.tenant, tool)
        session.expected = None if seconds is None else since + seconds
        self.expected(session, since)

    def returned(self, session: Session, now: float) -> None:
        """Note that a request begins in a session without running requests."""
        if session.tool:
            self._tools.took(session.tenant, session.tool, max(0.0, now - session.last_used))
            session.tool = ""

    def pin(self, session: Session, until: float | None) -> str:
        """Pin a session, with blocks that are new since an earlier pin, until time `until`; None for no end.

        Return the reason for a refusal; empty for none. A refusal also ends a pin that the session had before.
        """
        if refused := self._count("pin", session, session.rows):
            self.unpin(session)
            return refused
        was_pinned, session.is_pinned, session.pinned_until = session.is_pinned, True, until
        self._table.leave_order(session)
        self._renew(session)
        if not was_pinned:
            self._table.touch(session)
            self._manager.events(Pinned(session.session_id, True))
        return ""

    def unpin(self, session: Session) -> None:
        """End a session's pin."""
        was_pinned, session.is_pinned, session.pinned_until = session.is_pinned, False, None
        if was_pinned:
            self._table.enter_order(session)
            self._table.touch(session)
            self._manager.events(Pinned(session.session_id, False))
        self._renew(session)

    def _renew(self, session: Session, now: float = -inf) -> str:
        """Set the number of first blocks to keep, and the next end of a pin or range. Drop ranges that end by `now`.

        Blocks are kept up to the largest end of a range left, because KV is worthless without all earlier KV. If resume
        points (lengths at which a model with windows or states can continue) are needed, the whole session is kept,
        because its deepest resume point is at the end. Return the reason for a refusal; empty for none.
        """
        session.keeps, refused = tuple(each for each in session.keeps if each[0] > now), ""
        before, session.kept = session.kept, 0
        if not session.is_pinned:
            tokens = max((end for _, end in session.keeps), default=0)
            is_whole = tokens and self._manager.points.is_needed
            kept = len(session.rows) if is_whole else -(-tokens // self._manager.shape.block_tokens)
            session.kept = min(len(session.rows), kept)
            self.pinned.pop(session, None)
            if session.kept and (refused := self._count("keep", session, session.rows[: session.kept])):
                session.kept, session.keeps = 0, ()
            if session.kept < before:
                self._table.enter_order_again(session)
        self.pins.discard(session.session_id)
        ends = session.pinned_until, *(until for until, _ in session.keeps)
        if known := [until for until in ends if until is not None]:
            self.pins.set(session.session_id, min(known))
        return refused

    def _count(self, hint: str, session: Session, rows: Rows) -> str:
        """Count the bytes of a session's first blocks `rows` and of its resume points as pinned, if there is room.

        First take the spare resume points from the session. A block counts with the codec's largest size if not saved,
        or if exact because sessions share it. Return a refusal's reason, without facts of other tenants; else empty.
        """
        manager, blocks, tenant = self._manager, self._manager.blocks, session.tenant
        manager.points.leave_spare(session, DropCause.ABANDONED)
        point_rows = session.point_rows
        needed = blocks.nbytes_of(point_rows) + int(blocks.reserved[point_rows].sum())
        if manager.shape.stores_main:
            shape = manager.shape.groups[manager.shape.main]
            counts = manager.sink_tokens(rows, manager.shape.main)
            bounds = np.array([shape.bounds.get(tokens, shape.bounds[0]) for tokens in counts.tolist()], np.int64)
            nbytes = blocks.nbytes[rows].astype(np.int64)
            is_bound = (nbytes == 0) | ((blocks.exact[rows] >= shape.tokens) & (bounds < nbytes))
            needed += int(np.where(is_bound, bounds, nbytes).sum())
        self.pinned.pop(session, None)
        own = sum(nbytes for other, nbytes in self.pinned.items() if other.tenant == tenant)
        whole, part = manager.shares.pinned, min(1.0, manager.shares.of_tenant(tenant))
        said = f"tiers.pinned_share is {whole:g}" + (f", the tenant's share {part:g}" if part < 1 else "")
        if own + needed > (allowed := int(whole * part * manager.budget_nbytes)):
            return (
                f"{hint} is refused: pinned sessions may take {allowed} bytes of the cold store ({said}), {own} are "
                f"taken, and this session needs {needed}"
            )
        if sum(self.pinned.values()) + needed > int(whole * manager.budget_nbytes):
            return (
                f"{hint} is refused: {needed} bytes are not left of what all tenants' pinned sessions may take ({said})"
            )
        self.pinned[session] = needed
        return ""

    def adopted(self, session: Session, was_pinned: bool, now: float) -> None:
        """Obey the hints that a session had in an earlier engine. was_pinned: True if pinned there, without an end."""
        if was_pinned:
            self.pin(session, None)
        self.expected(session, now)
        if session.ttl_s is not None:
            self.ttls.set(session.session_id, session.last_used + session.ttl_s)

    def expire(self, now: float) -> None:
        """Forget sessions past their time to live, and end pins and kept ranges."""
        for session in [self._table.by_id[session_id] for session_id in self.pins.pop_until(now)]:
            if session.pinned_until is not None and session.pinned_until <= now:
                self.unpin(session)
            self._renew(session, now)
        for session in [self._table.by_id[session_id] for session_id in self.ttls.pop_until(now)]:
            if not session.requests:  # a request's end sets the time anew
                self._manager.forget_session(session, DropCause.EXPIRED)

    def forget(self, session: Session) -> None:
        """Forget the pins and times of a session that has no blocks any more."""
        session.is_pinned, session.pinned_until, session.keeps, session.kept = False, None, (), 0
        self.pinned.pop(session, None)
        self.ttls.discard(session.session_id)
        self.pins.discard(session.session_id)
