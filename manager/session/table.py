"""Sessions: by id, by name, by their last block, and in the order of the policy. Only this module changes their blocks.

A session is a growing list of blocks. A block hash covers the whole prefix, so a block has the same position in every
session.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from enum import StrEnum, auto
from itertools import count, islice
from math import inf

import numpy as np
from msgspec import Struct, field

from manthan.manager.pool import Owner
from manthan.manager.session.blocks import (
    MOST_INNER,
    NO_ROWS,
    BlockTable,
    MemoryShape,
    Rows,
    common_prefix,
    first_false,
)
from manthan.policies import EvictionPolicy, SessionView
from manthan.policies.ranking import Ranking

REMEMBERED = 1024
"""Least number of remembered sessions without KV. More if more sessions have KV."""
MOST_RELATIVES = 64
"""Most sessions of a family, because each drop checks all of them. Later sessions are not relatives."""

_NO_REQUESTS: frozenset[str] = frozenset()


class SessionState(StrEnum):
    """ACTIVE: a request runs. IDLE: none does. COLD: none does, and all blocks are saved."""

    ACTIVE = auto()
    IDLE = auto()
    COLD = auto()


class ResumePoint(Struct, eq=False, gc=False):
    """Blocks of further KV cache groups needed to continue behind a block: a window's last blocks, or a state.

    row: of the block. depth: number of blocks before the point. rows: of the further groups' blocks. ends_prompt: True
    if a prompt ended at the point.
    """

    row: int
    depth: int
    rows: Rows
    ends_prompt: bool = False
    sessions: "dict[Session, None]" = field(default_factory=dict)


class Session(Struct, eq=False, gc=False):
    """Conversation or agent.

    Python's garbage collector ignores sessions, because a full collection would take seconds with many sessions. So
    every reference cycle through a session must be broken when the session is forgotten.

    name: the client's; None without a name. number: of all sessions of this engine. rows: of the session's blocks.
    Times are seconds on the engine's monotonic clock.
    """

    session_id: str
    name: str | None
    tenant: str
    number: int
    created: float
    last_used: float
    owner: Owner = ("", "")
    """Tenant and name, or number of a session without a name, common to the branches of a named session.

    A nameless session that repeats an older session's whole prompt has the older session's owner.
    """
    rows: Rows = field(default_factory=lambda: NO_ROWS)
    requests: frozenset[str] = _NO_REQUESTS
    is_cold: bool = False
    points: tuple[ResumePoint, ...] = ()
    """Resume points, the deepest last."""
    prompt_depth: int = 0
    """Depth of the resume point at the end of the last prompt, kept besides the deepest."""
    refusals: int = 0
    """Number of consecutive refusals for lack of room in the tiers."""
    refused_until: float = 0.0
    """Time until which the session is not saved, after a failed store."""
    saving_since: float | None = None
    """Begin of the saving; None if the session is not being saved."""
    is_pressed: bool = False
    """True if the session is being saved because memory is short."""
    stored: int = 0
    """Blocks saved since the last request's begin, or since the session went cold."""
    stored_nbytes: int = 0

    # Facts for policies; see SessionView.
    uses: int = 0
    gap: float | None = None
    tokens: int = 0
    """Tokens of the conversation at the last request's end, or of a running request's prompt."""
    prompt_tokens: int = 0
    added_tokens: int = 0
    answer_tokens: int = 0
    left_tokens: int = 0
    ending: str = ""
    """Ending of the last answer; empty during a request, or if unknown."""
    lossy_tokens: int = 0
    """Cached tokens of the last request, decoded or computed behind decoded ones."""
    tip: bytes = b""
    """Last block hash at the last use. A session without blocks is recognized by the hash."""

    # Hints of the client; see Hints.
    is_pinned: bool = False
    pinned_until: float | None = None
    keeps: tuple[tuple[float, int], ...] = ()
    """End of time and number of first tokens of each kept range."""
    kept: int = 0
    """Number of first blocks kept for the ranges; 0 for a pinned session."""
    ttl_s: float | None = None
    priority: int = 0
    expected: float | None = None
    is_sure: bool = True
    """True if the expected return is sure enough for a prefetch."""
    tool: str = ""
    """Tool awaited by the client."""
    stays_out: bool = False
    """True if no KV of the session may reach a tier."""
    parent: str | None = None
    """Name of the session that this session works for, possibly unknown."""
    family: str | None = None
    """Name of the first ancestor, in a family of several; see `SessionTable.join`."""
    answer: bytes = b""
    """Hash of the first full block with the last answer; empty for none."""
    prompt_end: str = ""
    """Number of full blocks of the last prompt, and the tokens behind them; empty if unknown."""

    def __post_init__(self) -> None:
        self.owner = self.tenant, f"#{self.number}" if self.name is None else f"={self.name}"

    @property
    def state(self) -> SessionState:
        """State for users."""
        if self.requests:
            return SessionState.ACTIVE
        return SessionState.COLD if self.is_cold else SessionState.IDLE

    @property
    def told_id(self) -> str:
        """Id for the tenant."""
        return self.session_id.removeprefix(_prefix(self.tenant, self.session_id))

    @property
    def point_rows(self) -> Rows:
        """Rows of the blocks of further KV cache groups at the resume points."""
        return np.unique(np.concatenate([NO_ROWS, *(point.rows for point in self.points)]))

    def has(self, row: int, depth: int) -> bool:
        """True if the session has the block with this row and depth."""
        return depth < len(self.rows) and self.rows[depth] == row


def qualified(told_id: str, tenant: str) -> str:
    """Return a session's id among all tenants' sessions. The id is unique for tenant and told id."""
    return _prefix(tenant, told_id) + told_id


def _prefix(tenant: str, name: str) -> str:
    """Return the prefix of a tenant's session names; without a tenant, only for names that look like a tenant's."""
    if tenant:
        return tenant.replace("%", "%25").replace("/", "%2F") + "/"
    return "/" if "/" in name else ""


class Deadlines:
    """A time for each session id. O(log n) an event. Times are seconds on the engine's clock."""

    def __init__(self) -> None:
        self._when = Ranking()
        self.first = inf
        """The earliest time; infinity if there is none."""

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._when

    def __len__(self) -> int:
        return len(self._when)

    def set(self, session_id: str, when: float | None) -> None:
        """Set the time of a session, or remove the time with None."""
        if when is None:
            if session_id in self._when:
                self._when.discard(session_id)
                self._look()
        elif self._when.get(session_id) != when:
            self._when.set(session_id, when)
            self._look()

    def pop_due(self, now: float) -> Iterator[str]:
        """Yield ids of due sessions, each once."""
        while (first := self._when.first()) is not None and first[0] <= now:
            self._when.discard(first[2])
            self._look()
            yield first[2]

    def _look(self) -> None:
        first = self._when.first()
        self.first = inf if first is None else first[0]


class Order:
    """Sessions in the policy's order, all of a lower priority before a higher priority."""

    def __init__(self, make_policy: Callable[[], EvictionPolicy]) -> None:
        self._make_policy = make_policy
        self._levels: dict[int, EvictionPolicy] = {}
        self._level_of: dict[str, int] = {}

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._level_of

    def used(self, view: SessionView, priority: int) -> None:
        """Enter a session, or report the session's use to the policy."""
        before = self._level_of.get(view.session_id)
        if before is not None and before != priority:
            self._levels[before].forget(view.session_id)
        if priority not in self._levels:
            self._levels[priority] = self._make_policy()
            self._levels = dict(sorted(self._levels.items()))
        self._level_of[view.session_id] = priority
        self._levels[priority].used(view)

    def leave(self, session_id: str, *, evicted: bool = False) -> None:
        """Take a session out. evicted: True if chosen as the victim. Unknown ids are ignored."""
        if (level := self._level_of.pop(session_id, None)) is not None:
            policy = self._levels[level]
            (policy.evicted if evicted else policy.forget)(session_id)

    def superseded(self, session_id: str) -> None:
        """Report a superseded session to the policy; see EvictionPolicy.superseded."""
        if (level := self._level_of.get(session_id)) is not None:
            self._levels[level].superseded(session_id)

    def victims(self) -> Iterator[str]:
        """Yield session ids in the order of eviction. Sessions may leave during the iteration."""
        for policy in list(self._levels.values()):
            yield from policy.victims()


class SessionsBy:
    """Sessions by a key with few sessions each, in the order of arrival.

    A session alone under a key has no separate container, so Python's garbage collector has less to visit.
    """

    def __init__(self) -> None:
        self._first: dict[object, Session] = {}
        """First session of each key."""
        self._others: dict[object, dict[Session, None]] = {}

    def __len__(self) -> int:
        return len(self._first)

    def items(self) -> Iterator[tuple[object, Iterable[Session]]]:
        """Yield the keys and the sessions of each."""
        return ((key, self.get(key)) for key in self._first)

    def get(self, key: object, default: Iterable[Session] = ()) -> Iterable[Session]:
        """Return the sessions of a key."""
        first = self._first.get(key)
        return default if first is None else (first, *self._others.get(key, ()))

    def add(self, key: object, session: Session) -> None:
        """Enter a session, once."""
        if self._first.setdefault(key, session) is not session:
            self._others.setdefault(key, {})[session] = None

    def remove(self, key: object, session: Session) -> None:
        """Take out a contained session."""
        others = self._others.get(key, {})
        if self._first[key] is not session:
            del others[session]
        elif others:
            self._first[key] = next(iter(others))
            del others[self._first[key]]
        else:
            del self._first[key]
        if not others:
            self._others.pop(key, None)


class SessionTable:
    """All sessions with blocks or a request, and remembered sessions without. No tenant finds a foreign session.

    Named sessions are found by requests of the same name, and by requests without a name.

    Args:
        make_policy: makes an instance of the policy for each order.
        label: part of the ids of sessions without a name, to tell engines apart.
    """

    def __init__(
        self, make_policy: Callable[[], EvictionPolicy], shape: MemoryShape, blocks: BlockTable, label: str = ""
    ) -> None:
        self.shape, self.blocks = shape, blocks
        self.by_id: dict[str, Session] = {}
        self.by_number: dict[int, Session] = {}
        self.states: Counter[SessionState] = Counter()
        self.order = Order(make_policy)
        """Sessions with compressed blocks to give, unpinned and not yet emptied in their turn."""
        self.resident = Order(make_policy)
        """Sessions with possible blocks in the pool: used since the last check found none."""
        self.order_of: dict[str, Order] = {}
        """Order of each tenant with a quota and sessions."""
        self.refined = defaultdict[tuple[str | None, int], Order](lambda: Order(make_policy))
        """Sessions with possible blocks to cut to below a level, by tenant with a quota, or None for all, and level.

        Empty for a codec with a single level.
        """
        self.changed: dict[str, None] | None = None
        """Ids of changed sessions; None without a reader."""
        self.gone: list[Callable[[Session], None]] = []
        """Called with each forgotten session."""
        self._numbers = count(1)
        self._ending = SessionsBy()
        """Sessions with blocks, by the row of their last block."""
        self._named = SessionsBy()
        """Named sessions, by tenant and name."""
        self._of_tenant = defaultdict[str, dict[Session, None]](dict)
        self._families: dict[tuple[str, str], dict[Session, None]] = {}
        """Sessions with a parent or a child, by tenant and the name of their first ancestor."""
        self._prompts: dict[bytes, Session] = {}
        """Last session with a prompt, by `_prompt_key`."""
        self._prompt_of: dict[Session, bytes] = {}
        self._remembered: dict[bytes, Session] = {}
        """Sessions by tenant and tip, sessions without blocks included. The oldest are forgotten, several at a time."""
        self._anonymous_name = f"anonymous-{label}-" if label else "anonymous-"
        self._anonymous = defaultdict[str, Iterator[int]](lambda: count(1))  # by tenant, as a secret
        self._forks = defaultdict[str, Iterator[int]](lambda: count(2))

    # -- sessions -------------------------------------------------------------------------------------

    def create(self, name: str | None, tenant: str, now: float, session_id: str = "") -> Session:
        """Enter a new session without blocks. session_id: the id, if known."""
        session = Session(session_id or self._new_id(name, tenant), name, tenant, next(self._numbers), now, now)
        session.stays_out = any(other.stays_out for other in self._alike(session))
        self._enter(session)
        return session

    def _alike(self, session: Session) -> Iterable[Session]:
        """Return the client's sessions of the same name."""
        return () if session.name is None else self._called(session.name, session.tenant)

    def _called(self, name: str | None, tenant: str) -> Iterable[Session]:
        """Return a tenant's sessions of the name, or all."""
        return self._of_tenant.get(tenant, ()) if name is None else self._named.get((tenant, name))

    def stay_out(self, session: Session, stays_out: bool) -> None:
        """Keep a session, and sessions of the same name, out of the tiers, or no longer."""
        for one in (session, *self._alike(session)):
            one.stays_out = stays_out
            self.touch(one)

    def _enter(self, session: Session) -> None:
        self.by_id[session.session_id] = self.by_number[session.number] = session
        self.states[session.state] += 1
        self._of_tenant[session.tenant][session] = None
        if session.name is not None:
            self._named.add((session.tenant, session.name), session)
        if session.parent is not None:  # a remembered session
            self.join(session, session.parent)
        elif session.name is not None and (session.tenant, session.name) in self._families:
            self._join(session, session.name)

    def join(self, session: Session, parent: str) -> None:
        """Note the parent of a session, by name. An ancestor and all descendants are a family.

        The parent may stay unknown. Sessions in a circle of names are relatives.
        """
        session.parent = parent
        parents = list(islice(self._named.get((session.tenant, parent)), MOST_RELATIVES))
        family = next((one.family for one in parents if one.family), parent)
        for one in (session, *parents):
            self._join(one, family)
        self.touch(session)

    def _join(self, session: Session, family: str) -> None:
        if session.family != family:
            for one in self.relatives(session):  # blocks kept for each other may go
                self.enter_order_again(one)
            self.enter_order_again(session)
            self._leave_family(session)
            members = self._families.setdefault((session.tenant, family), {})
            if len(members) < MOST_RELATIVES:
                members[session], session.family = None, family

    def _leave_family(self, session: Session) -> None:
        if session.family is not None:
            members = self._families[session.tenant, session.family]
            del members[session]
            if not members:
                del self._families[session.tenant, session.family]
            session.family = None

    def relatives(self, session: Session) -> list[Session]:
        """Return the rest of the session's family."""
        found = () if session.family is None else self._families[session.tenant, session.family]
        return [one for one in found if one is not session]

    def touch(self, session: Session) -> None:
        """Note a change of a session, or of the session's stored blocks."""
        if self.changed is not None:
            self.changed[session.session_id] = None

    def take_changes(self) -> list[tuple[str, Session | None]]:
        """Return the sessions changed since the last call, by id; None for a finished session."""
        taken, self.changed = self.changed or {}, {}
        return [(session_id, self.by_id.get(session_id)) for session_id in taken]

    def begin(self, session: Session, request_id: str) -> None:
        """Note a session's new request."""
        self._set_requests(session, session.requests | {request_id})
        self.set_cold(session, False)

    def end(self, session: Session, request_id: str) -> None:
        """Note the end of a session's request."""
        self._set_requests(session, session.requests - {request_id} or _NO_REQUESTS)

    def _set_requests(self, session: Session, requests: frozenset[str]) -> None:
        def change() -> None:
            session.requests = requests

        self._count(session, change)

    def set_cold(self, session: Session, is_cold: bool) -> None:
        """Note whether all blocks of a session are saved."""

        def change() -> None:
            session.is_cold = is_cold

        if session.is_cold is not is_cold:
            self._count(session, change)

    def _count(self, session: Session, change: Callable[[], object]) -> None:
        self.touch(session)
        before = session.state
        change()
        self.states[before] -= 1
        self.states[session.state] += 1

    def used(self, session: Session, now: float) -> None:
        """Note the begin or the end of a session's request."""
        self.touch(session)
        session.last_used = now
        self.enter_order(session)

    def told(self, session: Session) -> None:
        """Report a session with new facts to the policy again."""
        self.touch(session)
        if session.session_id in self.order:
            self.enter_order(session)

    def extend(self, session: Session, rows: Rows) -> None:
        """Add blocks to the end of a session."""
        if not len(rows):
            return
        self.touch(session)
        self._leave_end(session)
        session.rows = np.concatenate([session.rows, rows])
        self._enter_end(session)
        self.blocks.use(rows, +1)
        self.blocks.belong(rows, session.number)
        self.set_cold(session, False)

    def truncate(self, session: Session, length: int) -> Rows:
        """Cut a session to `length` blocks and return the rows cut off, partly free by now.

        A session without blocks is forgotten unless a request runs.
        """
        self.touch(session)
        cut = session.rows[length:]
        if len(cut):
            self._leave_end(session)
            session.rows = session.rows[:length].copy()
            self._enter_end(session)
            self.blocks.leave(cut, session.number)
            self.blocks.use(cut, -1)
        if not length and not session.requests:
            self._forget(session)
        return cut

    def _forget(self, session: Session) -> None:
        if self.by_id.get(session.session_id) is not session:
            return
        del self.by_id[session.session_id], self.by_number[session.number]
        self.states[session.state] -= 1
        self.leave_order(session)
        self.resident.leave(session.session_id)
        if session.name is not None:
            self._named.remove((session.tenant, session.name), session)
        self._forget_prompt(session)
        self._leave_family(session)
        del self._of_tenant[session.tenant][session]
        if not self._of_tenant[session.tenant]:  # clients may make up any number of tenants
            del self._of_tenant[session.tenant]
            self.order_of.pop(session.tenant, None)
            for key in [key for key in self.refined if key[0] == session.tenant]:
                del self.refined[key]
            self._anonymous.pop(session.tenant, None)
            self._forks.pop(session.tenant, None)
        for tell in self.gone:
            tell(session)

    # -- the policy's order ---------------------------------------------------------------------------

    def victims(self, tenant: str | None = None) -> Iterator[Session]:
        """Yield sessions, of a tenant or of all, in the order of losing compressed blocks."""
        order = self.order if tenant is None else self.order_of[tenant]
        return map(self.by_id.__getitem__, order.victims())

    def resident_victims(self) -> Iterator[Session]:
        """Yield sessions, maybe resident, in the order of being overwritten."""
        return map(self.by_id.__getitem__, self.resident.victims())

    def enter_order(self, session: Session) -> None:
        """Note the use of a session, or new compressed blocks to give."""
        view = self._view(session)
        self.resident.used(view, session.priority)
        if session.is_pinned:
            return
        levels = self.shape.groups[self.shape.main].levels
        for order in (*self._orders(session), *(self.refined[key] for key in self._refined(session, levels))):
            order.used(view, session.priority)

    def enter_refined(self, session: Session) -> None:
        """Note stored blocks of a session, with possible refinements."""
        levels = 0 if session.is_pinned else self.shape.groups[self.shape.main].levels
        for key in self._refined(session, levels):
            if session.session_id not in self.refined[key]:
                self.refined[key].used(self._view(session), session.priority)

    def leave_refined(self, session: Session, level: int) -> None:
        """Note a session without blocks to cut to below a level."""
        for key in self._refined(session, MOST_INNER + 1, level):
            if key in self.refined:
                self.refined[key].leave(session.session_id)

    def refined_victims(self, level: int, tenant: str | None) -> Iterator[Session]:
        """Yield sessions, of a tenant or of all, in the order of cutting blocks to below a level."""
        return map(self.by_id.__getitem__, self.refined[tenant, level].victims())

    def _refined(self, session: Session, levels: int, level: int = 1) -> Iterator[tuple[str | None, int]]:
        """Yield the keys of a session's orders from a level on."""
        tenants = [None, session.tenant] if session.tenant in self.order_of else [None]
        return ((tenant, each) for tenant in tenants for each in range(level, levels))

    def enter_order_again(self, session: Session) -> None:
        """Note compressed blocks to give, if the session has left the order."""
        if session.session_id not in self.order:
            self.enter_order(session)

    def leave_order(self, session: Session, *, evicted: bool = False) -> None:
        """Note a session without blocks to give. evicted: True if all were given in the session's turn."""
        for order in self._orders(session):
            order.leave(session.session_id, evicted=evicted)
        self.leave_refined(session, 1)

    def superseded(self, session: Session) -> None:
        """Note another session's continuation from the middle of this session."""
        for order in (*self._orders(session), *self.refined.values(), self.resident):
            order.superseded(session.session_id)

    def _orders(self, session: Session) -> Iterator[Order]:
        yield self.order
        if (order := self.order_of.get(session.tenant)) is not None:
            yield order

    def _view(self, session: Session) -> SessionView:
        blocks, beside = len(session.rows), {int(row) for point in session.points for row in point.rows}
        nbytes = self.blocks.nbytes[list(beside)].sum(dtype=int) if beside else 0
        return SessionView(
            session.session_id,
            blocks * self.shape.block_tokens,
            blocks * self.shape.cold_nbytes + int(nbytes),
            session.created,
            session.last_used,
            session.uses,
            session.gap,
            session.added_tokens,
            session.answer_tokens,
            session.left_tokens,
            session.expected,
            session.tool or session.ending,
        )

    # -- the session of a request ---------------------------------------------------------------------

    def attribute(self, hashes: Sequence[bytes], rows: Rows, name: str | None, tenant: str, now: float) -> Session:
        """Return the session of a prompt.

        The result is the session extended by the prompt, a remembered session without KV, a session whose last answer
        comes back changed, or a new session. A new session from the middle of an older session inherits the older one's
        history, because the client changed an earlier message.
        """
        found = self.find(rows, name, tenant)
        known = len(found.rows) if found is not None else 0
        remembered = self._recall(hashes[known:], name, tenant)
        if remembered is not None and not self._is_superseded(remembered):
            if self.by_id.get(remembered.session_id) is not remembered:
                self._revive(remembered)
            return remembered
        if found is not None:
            return found
        if (continued := self._with_changed_answer(rows, name, tenant)) is not None:
            return continued
        session = self.create(name, tenant, now)
        self._inherit(session, rows)
        return session

    def find(self, rows: Rows, name: str | None, tenant: str) -> Session | None:
        """Return the session with KV extended by a prompt. None means a new session, or a branch.

        A session of the name with the whole prompt is preferred, for a prompt asked again. Otherwise the result is the
        longest session at the begin of the prompt.
        """
        used = self._used(rows)
        if name is None:
            found = self._longest(used, None, tenant)
            return None if found is None or self._is_common_start(found, rows) else found
        known, near = self._nearest(used, name, tenant)
        found = self._longest(used[:known], name, tenant)
        is_again = near is not None and known == len(rows)
        return near if is_again and (found is None or len(found.rows) < known) else found

    def kept(self, session: Session, rows: Rows, name: str | None, tokens: int) -> int:
        """Return the number of blocks a session keeps when a prompt with these rows and tokens comes.

        All, unless the last answer comes back changed: then the common first blocks. Such a prompt is longer than the
        last prompt, and shorter than the last prompt with the answer.
        """
        length = common_prefix(session.rows, rows)
        if length < min(len(session.rows), len(rows)):
            return length
        is_next = name is not None and 0 < session.prompt_tokens < tokens and not session.requests
        return length if is_next else len(session.rows)

    def own_blocks(
        self, session: Session, hashes: Sequence[bytes], rows: Rows, tail: bytes | None, can_be_kin: bool = True
    ) -> int:
        """Return the number of a prompt's first blocks brought by the session, or by a session of the same name.

        Behind these blocks, the request takes exact blocks only. A nameless client that repeats a whole prompt counts
        as the same client.
        """
        if session.name is not None:
            return self._nearest(self._used(rows), session.name, session.tenant)[0]
        if not len(session.rows) and can_be_kin and hashes and (end := prompt_end(hashes, tail)):
            origin = self._prompts.get(_prompt_key(session.tenant, hashes[-1], end))
            if origin is not None and len(origin.rows) >= len(hashes):
                session.owner = origin.owner
                return len(hashes)
        return common_prefix(session.rows, rows)

    def asks(self, session: Session, hashes: Sequence[bytes], tail: bytes | None) -> None:
        """Note a session's newest prompt."""
        self.enter_prompt(session, hashes, prompt_end(hashes, tail))

    def enter_prompt(self, session: Session, hashes: Sequence[bytes], end: str) -> None:
        """Note a session's newest prompt: the full blocks, and the end; see `Session.prompt_end`."""
        self._forget_prompt(session)
        session.prompt_end = end
        if hashes and end:
            key = _prompt_key(session.tenant, hashes[-1], end)
            self._prompts[key], self._prompt_of[session] = session, key

    def _forget_prompt(self, session: Session) -> None:
        key = self._prompt_of.pop(session, None)
        if key is not None and self._prompts.get(key) is session:
            del self._prompts[key]

    def _used(self, rows: Rows) -> Rows:
        """Return the leading rows with a session."""
        return rows[: first_false(self.blocks.users[rows] > 0)]

    def _longest(self, rows: Rows, name: str | None, tenant: str) -> Session | None:
        """Return the longest session, of this name or any, with the last block among these rows."""
        for row in reversed(rows.tolist()):
            for session in self._ending.get(row, ()):
                if session.tenant == tenant and name in (None, session.name):
                    return session
        return None

    def _nearest(self, rows: Rows, name: str | None, tenant: str) -> tuple[int, Session | None]:
        """Return the most first rows of a single session, of this name or any, and the session."""
        best, found = 0, None
        for session in self._called(name, tenant) if len(rows) else ():
            if best < len(session.rows) and session.rows[best] == rows[best]:
                best, found = common_prefix(session.rows, rows), session
                if best == len(rows):
                    break
        return best, found

    def _is_common_start(self, session: Session, rows: Rows) -> bool:
        """True if several sessions continue from this session's end, as from a system prompt."""
        if session.name is not None or len(session.rows) == len(rows):
            return False
        return self._has_several(int(session.rows[-1]), len(session.rows) - 1, session.tenant)

    def _is_superseded(self, remembered: Session) -> bool:
        """True if a live session has this session's last block. The request then belongs to a live session."""
        row = self.blocks.row(self.shape.session_group, remembered.tip)
        return row >= 0 and self.blocks.users[row] > 0 and self._holder(row, remembered.tenant) is not None

    def _with_changed_answer(self, rows: Rows, name: str | None, tenant: str) -> Session | None:
        """Return the session of the name whose whole last prompt, without the answer, the rows repeat.

        The template has left out the model's thinking, or the client has changed the answer. Without a name, the client
        may be a different client.
        """
        if name is None:
            return None
        known, origin = self._nearest(self._used(rows), name, tenant)
        if origin is None or origin.requests or not 0 < known < min(len(origin.rows), len(rows)):
            return None
        prompt = origin.prompt_tokens
        return origin if prompt and known >= prompt // self.shape.block_tokens else None

    def _inherit(self, session: Session, rows: Rows) -> None:
        """Take over the history of the only session with the begin of these rows and a different continuation."""
        known = len(self._used(rows))
        origin = self._holder(int(rows[known - 1]), session.tenant) if known else None
        if origin is None:  # only foreign tenants have all of the rows
            known, origin = self._nearest(rows[:known], None, session.tenant)
        if origin is None or known == len(origin.rows) or origin.requests:
            return
        if self._has_several(int(origin.rows[known - 1]), known - 1, session.tenant):
            return
        session.created, session.uses, session.last_used = origin.created, origin.uses, origin.last_used
        session.left_tokens = (len(origin.rows) - known) * self.shape.block_tokens
        self.superseded(origin)

    def _holder(self, row: int, tenant: str) -> Session | None:
        """Return a session of the tenant with the block."""
        found = self.by_number.get(int(self.blocks.origin[row]))
        if found is None or found.tenant != tenant:
            found = next(self.holders(row, int(self.blocks.depth[row]), tenant), None)
        return found

    def holders(self, row: int, depth: int, tenant: str | None = None) -> Iterator[Session]:
        """Yield the sessions, of a tenant or all, with the block. A scan."""
        some = self.by_id.values() if tenant is None else self._called(None, tenant)
        return (session for session in some if session.has(row, depth))

    def _has_several(self, row: int, depth: int, tenant: str) -> bool:
        """True if several sessions of the tenant have the block."""
        return self.blocks.users[row] > 1 and len(list(islice(self.holders(row, depth, tenant), 2))) > 1

    def _enter_end(self, session: Session) -> None:
        if len(session.rows):
            self._ending.add(int(session.rows[-1]), session)

    def _leave_end(self, session: Session) -> None:
        if len(session.rows):
            self._ending.remove(int(session.rows[-1]), session)

    # -- sessions possibly without KV ------------------------------------------------------------------

    def remember(self, session: Session) -> None:
        """Note the block by which a session will be recognized, at a request's end."""
        self.forget_tip(session)
        if len(session.rows):
            session.tip = self.blocks.hashes(session.rows[-1:])[0]
            tip = session.tenant.encode() + session.tip
            self._remembered.pop(tip, None)  # the newest is the last
            self._remembered[tip] = session
        most = REMEMBERED + 2 * len(self.by_id)
        if len(self._remembered) > most + most // 8:
            for tip in list(islice(self._remembered, len(self._remembered) - most)):
                del self._remembered[tip]

    def forget_tip(self, session: Session) -> None:
        """Remember a session no longer."""
        tip = session.tenant.encode() + session.tip
        if self._remembered.get(tip) is session:
            del self._remembered[tip]

    def _recall(self, hashes: Sequence[bytes], name: str | None, tenant: str) -> Session | None:
        """Return the remembered session, of this name or any, with the longest conversation extended by `hashes`."""
        found = map(self._remembered.get, map(tenant.encode().__add__, reversed(hashes)))
        return next((one for one in found if one is not None and name in (None, one.name)), None)

    def _revive(self, session: Session) -> None:
        """Enter a remembered session again, new except for the history."""
        if session.session_id in self.by_id:
            session.session_id = self._new_id(session.name, session.tenant)
        session.is_cold, session.saving_since = False, None
        session.refusals, session.refused_until = 0, 0.0
        self._enter(session)

    def _new_id(self, name: str | None, tenant: str) -> str:
        """Return the client's name, with a number for a branch, or `anonymous-N` without a name."""
        taken: Container[str] = self.by_id
        if name is None:
            names = (f"{self._anonymous_name}{n}" for n in self._anonymous[tenant])
        else:
            names = (name if n == 1 else f"{name}~{next(self._forks[tenant])}" for n in count(1))
        return next(full for told in names if (full := qualified(told, tenant)) not in taken)


def prompt_end(hashes: Sequence[bytes], tail: bytes | None) -> str:
    """Return the distinction between prompts with the same full blocks; see `Session.prompt_end`."""
    return "" if tail is None else f"{len(hashes)}:{tail.hex()}"


def _prompt_key(tenant: str, last: bytes, end: str) -> bytes:
    """Return the key of a tenant's prompt: the hash of the last full block, and the end; see `prompt_end`."""
    return b"\0".join((tenant.encode(), end.encode(), last))  # no tuple, for the garbage collector
