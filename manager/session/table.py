"""Table that finds sessions by id, by name, by last block, and in the eviction policy's order.

Only this module changes a session's blocks. A session is a growing list of blocks. A block hash covers the whole
prefix, so a block has the same depth, the number of blocks before it, in every session. A row is a block's number in
the BlockTable. A block is saved if a tier (RAM, GPU memory, disk, Redis) has it, compressed.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum, auto
from hashlib import blake2b
from itertools import count, islice
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field

from manthan.manager.pool import Owner
from manthan.manager.session.blocks import MOST_INNER, NO_ROWS, NOBODY, BlockTable, MemoryShape, Rows, common_prefix
from manthan.policies import EvictionPolicy, SessionView

REMEMBERED = 1024  # about the number of sessions recognized by their last block, plus 2 for each in the table
MOST_RELATIVES = 64  # most sessions of a family, because each drop checks all of them. Later sessions do not join

_NO_REQUESTS: frozenset[str] = frozenset()
_viewed = attrgetter(
    *("created", "last_used", "uses", "gap", "added_tokens", "answer_tokens", "left_tokens", "expected")
)  # attributes of a session that `SessionView` has in this order


class Shares(NamedTuple):
    """Shares of the tiers' budget. 1 is the whole budget."""

    pinned: float = 0.25  # of all pinned sessions together; also the part of a tenant's share for its pinned sessions
    tenants: Mapping[str, float] = {}  # by tenant; "*" stands for each tenant without a share of its own
    heads: float = 0.25  # of the first blocks that several sessions have in common, which are stored exact

    def of_tenant(self, tenant: str) -> float:
        """Return the share of a tenant; 1 without a quota, and for no tenant."""
        others = 1.0 if tenant in ("", NOBODY) else self.tenants.get("*", 1.0)
        return self.tenants.get(tenant, others)


class SessionState(StrEnum):
    """ACTIVE: a request runs. COLD: no request runs, and all blocks are saved in a tier. IDLE: not active, not cold."""

    ACTIVE = auto()
    IDLE = auto()
    COLD = auto()


class ResumePoint(Struct, eq=False, gc=False):
    """Length of a session at which a request can continue, with the blocks of further KV cache groups needed there.

    These blocks are the last blocks of a sliding window, or a recurrent state.
    """

    row: int  # row of the session's last block before the point
    depth: int  # number of the session's blocks before the point
    rows: Rows  # rows of the further groups' blocks
    ends_prompt: bool = False  # True if the point was the last that a prompt had
    sessions: "dict[Session, None]" = field(default_factory=dict)  # sessions that have the point


class Session(Struct, eq=False, gc=False):
    """Conversation or agent.

    Python's garbage collector ignores sessions, because a full collection would take seconds with many sessions. So
    every reference cycle through a session must be broken when the session is forgotten. Times are seconds on the
    engine's monotonic clock.
    """

    session_id: str
    name: str | None  # given by the client
    tenant: str
    number: int  # unique among all sessions that this engine ever had
    created: float
    last_used: float
    owner: Owner = ("", "")
    """Pair of the tenant, and "=NAME" or, for a nameless session, "#NUMBER". Only sessions of the same owner are served
    the session's lossy KV from the prefix cache. All branches of a named session have the same owner.

    A nameless session that repeats an older session's whole prompt has the older session's owner.
    """
    rows: Rows = field(default_factory=lambda: NO_ROWS)  # rows of the session's blocks
    requests: frozenset[str] = _NO_REQUESTS  # ids of the running requests
    is_cold: bool = False
    points: tuple[ResumePoint, ...] = ()  # resume points, the deepest last
    prompt_depth: int = 0  # depth of the resume point at the last prompt's end; 0 if only the deepest is kept
    refusals: int = 0  # number, at most DOUBLINGS, of consecutive stores that failed or found no room in the tiers
    refused_until: float = 0.0  # after a failed store, time until which a shortage of blocks saves none of the session
    is_pressed: bool = False  # True if the session is being saved because the pool is short of blocks
    stored: int = 0  # number of blocks saved since the last request began, or since the session went cold if later
    stored_nbytes: int = 0  # compressed bytes of these blocks

    # Facts for policies; see SessionView.
    uses: int = 0
    gap: float | None = None
    tokens: int = 0  # tokens of the conversation at the last request's end, or of a running request's prompt
    prompt_tokens: int = 0
    added_tokens: int = 0
    answer_tokens: int = 0
    left_tokens: int = 0
    ending: str = ""  # ending of the last answer; empty during a request, or if unknown
    lossy_tokens: int = 0  # number of the last request's cached tokens with lossy KV: decoded, or computed from such KV
    tip: bytes = b""  # hash of the last block at the last request's end, by which a session without KV is recognized

    # Hints of the client; see Hints.
    is_pinned: bool = False
    pinned_until: float | None = None
    keeps: tuple[tuple[float, int], ...] = ()
    """For each hint to keep first tokens: the time until which to keep the tokens, and the number of tokens."""
    kept: int = 0  # number of first blocks not dropped for lack of room, because of `keeps`; 0 for a pinned session
    ttl_s: float | None = None
    priority: int = 0
    expected: float | None = None
    is_sure: bool = True  # True if `expected` is sure enough for a prefetch
    tool: str = ""  # name of the tool that the client waits for
    stays_out: bool = False  # True if no KV of the session may reach a tier
    parent: str | None = None  # name of the session that this session works for, even if there is no such session
    family: str | None = None  # name of the family, which is the first ancestor's; see `SessionTable.join`
    answer: bytes = b""  # hash of the first full block that has a token of the last answer; empty for none
    prompt_end: str = ""  # `digest_of` the last prompt

    def __post_init__(self) -> None:
        self.owner = self.tenant, f"#{self.number}" if self.name is None else f"={self.name}"

    @property
    def state(self) -> SessionState:
        """State shown to users."""
        if self.requests:
            return SessionState.ACTIVE
        return SessionState.COLD if self.is_cold else SessionState.IDLE

    @property
    def told_id(self) -> str:
        """Id shown to the tenant: `session_id` without the tenant's prefix."""
        return self.session_id.removeprefix(_prefix(self.tenant, self.session_id))

    @property
    def point_rows(self) -> Rows:
        """Rows of the blocks of further KV cache groups that the session's resume points need."""
        return np.unique(np.concatenate([NO_ROWS, *(point.rows for point in self.points)]))

    def has(self, row: int, depth: int) -> bool:
        """True if the session has the block with this row and depth."""
        return depth < len(self.rows) and self.rows[depth] == row


def qualified(told_id: str, tenant: str) -> str:
    """Return a session's id with the tenant's prefix, so that sessions of two tenants never have the same id."""
    return _prefix(tenant, told_id) + told_id


def _prefix(tenant: str, name: str) -> str:
    """Return the prefix of a tenant's session ids. Without a tenant, "/" for a name with a slash, and else none."""
    if tenant:
        return tenant.replace("%", "%25").replace("/", "%2F") + "/"
    return "/" if "/" in name else ""


class Order:
    """Sessions in the order in which they lose blocks: by priority, the lowest first, then in the policy's order."""

    def __init__(self, make_policy: Callable[[], EvictionPolicy]) -> None:
        self._make_policy = make_policy
        self._levels: dict[int, EvictionPolicy] = {}  # by priority
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
        """Take a session out. evicted: True if the policy chose the session as a victim. Unknown ids are ignored."""
        if (level := self._level_of.pop(session_id, None)) is not None:
            policy = self._levels[level]
            (policy.evicted if evicted else policy.forget)(session_id)

    def superseded(self, session_id: str) -> None:
        """Report to the policy that a new session continues this one; see EvictionPolicy.superseded."""
        if (level := self._level_of.get(session_id)) is not None:
            self._levels[level].superseded(session_id)

    def victims(self) -> Iterator[str]:
        """Yield session ids, first victim first. Sessions may leave during the iteration."""
        for policy in list(self._levels.values()):
            yield from policy.victims()


class _Several(Struct, gc=False):
    """Sessions with the same key. It is no tuple, because the garbage collector would visit a dict of tuples."""

    sessions: tuple[Session, ...]


class SessionsBy:
    """Sessions by a number or text, in the order of `add`. The garbage collector does not visit the sessions."""

    def __init__(self) -> None:
        self._found: dict[int | str, Session | _Several] = {}

    def __getitem__(self, key: int | str) -> tuple[Session, ...]:
        found = self._found.get(key)
        if found is None:
            return ()
        return found.sessions if isinstance(found, _Several) else (found,)

    def add(self, key: int | str, session: Session) -> None:
        """Enter a session. It must not be entered under this key yet."""
        others = self[key]
        self._found[key] = _Several((*others, session)) if others else session

    def remove(self, key: int | str, session: Session) -> None:
        """Take out a session. The key must have the session."""
        others = tuple(one for one in self[key] if one is not session)
        if others:
            self._found[key] = _Several(others) if others[1:] else others[0]
        else:
            del self._found[key]


class SessionTable:
    """All sessions with blocks or a running request, and remembered sessions with neither.

    A request finds only sessions of the request's tenant. A request with a session name finds only sessions of this
    name. label: see `SessionManager`.
    """

    def __init__(
        self, policy: Callable[[], EvictionPolicy], shape: MemoryShape, blocks: BlockTable, label: str, shares: Shares
    ) -> None:
        self.shape, self.blocks, self._shares = shape, blocks, shares
        self.by_id: dict[str, Session] = {}
        self.by_number: dict[int, Session] = {}
        self.states: Counter[SessionState] = Counter()
        self.resident = Order(policy)
        """Sessions that may have resident blocks. Each leaves if a check finds none, and enters again when used."""
        self.orders = defaultdict[tuple[str | None, int], Order](lambda: Order(policy))
        """Orders of unpinned sessions. A key has a tenant with a quota, or None for all tenants, and a number n.

        The order for n = 0 has the sessions that may have compressed blocks to drop. An order for a larger n has those
        that may have compressed blocks with at least n refinements: parts of a block that can be cut off.
        """
        self.order = self.orders[None, 0]
        self.changed: dict[str, None] | None = None  # ids of changed sessions; None before `take_changes`
        self.gone: list[Callable[[Session], None]] = []  # functions to call with each forgotten session
        self._numbers = count(1)
        self._ending = SessionsBy()  # sessions with blocks, by the row of their last block
        self._named = SessionsBy()  # named sessions, by `qualified` name
        self._of_tenant = defaultdict[str, dict[Session, None]](dict)
        self._families: dict[tuple[str, str], dict[Session, None]] = {}
        """Sessions with a parent or a child, by tenant and the name of the family; see `join`."""
        self._prompts: dict[str, Session] = {}  # session that last had a prompt, by `Session.prompt_end`
        self._remembered: dict[bytes, Session] = {}
        """Sessions by tenant + `Session.tip`, with or without blocks. Many of the oldest are removed at once."""
        self._anonymous_name = f"anonymous-{label}-" if label else "anonymous-"
        self._anonymous = defaultdict[str, Iterator[int]](lambda: count(1))  # by tenant, numbers of nameless sessions
        self._forks = defaultdict[str, Iterator[int]](lambda: count(2))

    def create(self, name: str | None, tenant: str, now: float, session_id: str = "") -> Session:
        """Enter a new session without blocks. session_id: the id; empty to make one."""
        session = Session(session_id or self._new_id(name, tenant), name, tenant, next(self._numbers), now, now)
        session.stays_out = any(other.stays_out for other in self.named(name, tenant))
        self._enter(session)
        return session

    def named(self, name: str | None, tenant: str) -> tuple[Session, ...]:
        """Return the tenant's sessions of this name; none without a name."""
        return () if name is None else self._named[qualified(name, tenant)]

    def parent_of(self, name: str | None, tenant: str) -> str | None:
        """Return the parent of the tenant's first session of this name with a parent; None without such a session."""
        return next((one.parent for one in self.named(name, tenant) if one.parent), None)

    def stay_out(self, session: Session, stays_out: bool) -> None:
        """Set `stays_out` of a session, and of all the tenant's sessions of the same name."""
        for one in (session, *self.named(session.name, session.tenant)):
            one.stays_out = stays_out
            self.touch(one)

    def _enter(self, session: Session) -> None:
        self.by_id[session.session_id] = self.by_number[session.number] = session
        self.states[session.state] += 1
        self._of_tenant[session.tenant][session] = None
        if session.name is not None:
            self._named.add(qualified(session.name, session.tenant), session)
        if session.parent is not None:  # a remembered session is entered again
            self.join(session, session.parent)
        elif session.name is not None and (session.tenant, session.name) in self._families:
            self._join(session, session.name)

    def join(self, session: Session, parent: str) -> None:
        """Note the parent of a session, by name. The session joins its parent's family, which begins with the parent.

        A session of the parent's name may come later, and then brings its earlier children into its own family.
        """
        session.parent = parent
        parents = list(islice(self.named(parent, session.tenant), MOST_RELATIVES))
        family = next((one.family for one in parents if one.family), parent)
        followers = self._families.get((session.tenant, session.name or ""), {})  # children that came before it
        for one in (session, *parents, *followers):
            self._join(one, family)
        self.touch(session)

    def _join(self, session: Session, family: str) -> None:
        if session.family != family:
            for one in self.relatives(session):  # blocks kept for the old family's sake may be dropped now
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
        """Return the further sessions of a session's family."""
        found = () if session.family is None else self._families[session.tenant, session.family]
        return [one for one in found if one is not session]

    def touch(self, session: Session) -> None:
        """Note a change of a session, or of the session's stored blocks."""
        if self.changed is not None:
            self.changed[session.session_id] = None

    def take_changes(self) -> list[tuple[str, Session | None]]:
        """Return id and session of each session changed since the last call; None for a forgotten session."""
        taken, self.changed = self.changed or {}, {}
        return [(session_id, self.by_id.get(session_id)) for session_id in taken]

    def begin(self, session: Session, request_id: str) -> None:
        """Note a session's new request."""
        self._set_state(session, session.requests | {request_id}, is_cold=False)

    def end(self, session: Session, request_id: str) -> None:
        """Note the end of a session's request."""
        self._set_state(session, session.requests - {request_id} or _NO_REQUESTS, session.is_cold)

    def set_cold(self, session: Session, is_cold: bool) -> None:
        """Set `is_cold` of a session: True if all its blocks are saved."""
        if session.is_cold is not is_cold:
            self._set_state(session, session.requests, is_cold)

    def _set_state(self, session: Session, requests: frozenset[str], is_cold: bool) -> None:
        self.touch(session)
        self.states[session.state] -= 1
        session.requests, session.is_cold = requests, is_cold
        self.states[session.state] += 1

    def used(self, session: Session, now: float) -> None:
        """Note the begin or the end of a session's request."""
        self.touch(session)
        session.last_used = now
        self.enter_order(session)

    def extend(self, session: Session, rows: Rows) -> None:
        """Add blocks to the end of a session."""
        if not len(rows):
            return
        self._set_rows(session, np.concatenate([session.rows, rows]))
        self.blocks.refer(self.blocks.users, rows, +1)
        self.blocks.change_origin(rows, 0, session.number)
        self.set_cold(session, False)

    def truncate(self, session: Session, length: int) -> None:
        """Cut a session to `length` blocks. A session without blocks is forgotten unless a request runs."""
        self.touch(session)
        if len(cut := session.rows[length:]):
            self._set_rows(session, session.rows[:length].copy())
            self.blocks.change_origin(cut, session.number, 0)
            self.blocks.refer(self.blocks.users, cut, -1)
        if not length and not session.requests and self.by_id.get(session.session_id) is session:
            self._forget(session)

    def _set_rows(self, session: Session, rows: Rows) -> None:
        self.touch(session)
        if len(session.rows):
            self._ending.remove(int(session.rows[-1]), session)
        session.rows = rows
        if len(rows):
            self._ending.add(int(rows[-1]), session)

    def _forget(self, session: Session) -> None:
        del self.by_id[session.session_id], self.by_number[session.number]
        self.states[session.state] -= 1
        self.leave_order(session)
        self.resident.leave(session.session_id)
        if session.name is not None:
            self._named.remove(qualified(session.name, session.tenant), session)
        self.enter_prompt(session, "")
        self._leave_family(session)
        del self._of_tenant[session.tenant][session]
        if not self._of_tenant[session.tenant]:  # clients may make up any number of tenants
            del self._of_tenant[session.tenant]
            for key in [key for key in self.orders if key[0] == session.tenant]:
                del self.orders[key]
            self._anonymous.pop(session.tenant, None)
            self._forks.pop(session.tenant, None)
        for tell in self.gone:
            tell(session)

    def victims(self, order: Order) -> Iterator[Session]:
        """Yield the sessions of `order`, first victim first."""
        return map(self.by_id.__getitem__, order.victims())

    def enter_order(self, session: Session) -> None:
        """Enter a session into its orders, or report a use of the session to their policies."""
        view = self._view(session)
        self.resident.used(view, session.priority)
        levels = 0 if session.is_pinned else self.shape.groups[self.shape.main].levels
        for order in self._orders(session, 0, levels):
            order.used(view, session.priority)

    def enter_refined(self, session: Session) -> None:
        """Enter a session into the orders for refinements, because newly stored blocks may have some to cut."""
        levels = 0 if session.is_pinned else self.shape.groups[self.shape.main].levels
        for order in self._orders(session, 1, levels):
            if session.session_id not in order:
                order.used(self._view(session), session.priority)

    def enter_order_again(self, session: Session) -> None:
        """Enter a session if it has left the orders, because it may have compressed blocks to drop again."""
        if session.session_id not in self.order:
            self.enter_order(session)

    def leave_order(self, session: Session, *, evicted: bool = False) -> None:
        """Take out a session that is pinned or has no block to drop. evicted: True if the policy chose it as victim."""
        for order in self._orders(session, 0, 1):
            order.leave(session.session_id, evicted=evicted)
        self.leave_refined(session, 1)

    def leave_refined(self, session: Session, level: int) -> None:
        """Take a session out of the orders for `level` and more refinements, because none of these is left to cut."""
        for order in self._orders(session, level, MOST_INNER + 1):
            order.leave(session.session_id)

    def _orders(self, session: Session, level: int, levels: int) -> list[Order]:
        """Return the session's orders for the numbers from `level` up to `levels - 1`; see `orders`."""
        tenants = [None, session.tenant] if self._shares.of_tenant(session.tenant) < 1 else [None]
        return [self.orders[tenant, each] for tenant in tenants for each in range(level, levels)]

    def _view(self, session: Session) -> SessionView:
        blocks = len(session.rows)
        nbytes = self.blocks.nbytes_of(session.point_rows) if session.points else 0
        sizes = blocks * self.shape.block_tokens, blocks * self.shape.cold_nbytes + nbytes
        return SessionView._make((session.session_id, *sizes, *_viewed(session), session.tool or session.ending))

    def attribute(self, hashes: Sequence[bytes], rows: Rows, name: str | None, tenant: str, now: float) -> Session:
        """Return the session that a prompt belongs to, or a new session. hashes, rows: of the prompt's full blocks.

        The prompt belongs to a session if it extends the session's blocks, even if their KV is gone. With a name, it
        also belongs to a session of which only the last answer comes back changed. If the prompt continues from the
        middle of a session, the client has changed an earlier message. A new session then inherits the older history.
        """
        found = self.find(rows, name, tenant, next(iter(self.named(name, tenant)), None))
        known = len(found.rows) if found is not None else 0
        tips = map(self._remembered.get, map(tenant.encode().__add__, reversed(hashes[known:])))
        remembered = next((one for one in tips if one is not None and name in (None, one.name)), None)
        if remembered is not None:
            row = self.blocks.row(self.shape.session_group, remembered.tip)
            is_superseded = row >= 0 and self.blocks.users[row] > 0 and self._holder(row, tenant) is not None
            if not is_superseded:  # else a session with blocks has the last block, and takes precedence
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

    def find(self, rows: Rows, name: str | None, tenant: str, likely: Session | None = None) -> Session | None:
        """Return the session with blocks that a prompt extends; None if the prompt begins a new session, or a branch.

        The result is the longest session whose blocks are the prompt's first blocks. With a name, a session that has
        all the prompt's blocks goes first: its client asks the same prompt again. Without a name, a longer prompt that
        begins with blocks common to several sessions is a branch. likely: session of this name and tenant to try first.
        """
        if likely is not None and self._ends_alone(likely, rows):
            return likely
        used = self.blocks.used(rows)
        if name is None:
            found = self._longest(used, None, tenant)
            if found is not None and found.name is None and len(found.rows) < len(rows):
                is_start = self._has_several(int(found.rows[-1]), tenant)
                return None if is_start else found  # a begin of several sessions, such as a system prompt
            return found
        known, near = self._nearest(used, name, tenant)
        found = self._longest(used[:known], name, tenant)
        is_again = near is not None and known == len(rows)
        return near if is_again and (found is None or len(found.rows) < known) else found

    def _ends_alone(self, session: Session, rows: Rows) -> bool:
        """True if rows begin with a session's blocks, no other session has its last block, and none has the next."""
        known, users = len(session.rows), self.blocks.users
        if not 0 < known <= len(rows) or rows[known - 1] != session.rows[-1] or users[rows[known - 1]] != 1:
            return False
        return known == len(rows) or not users[rows[known]]

    def kept(self, session: Session, rows: Rows, name: str | None, tokens: int) -> int:
        """Return the number of first blocks that a session keeps when a prompt comes that belongs to the session.

        If a block differs from the prompt's, the session keeps the blocks before. If the prompt has only the session's
        first blocks, the session keeps all blocks, unless the last answer comes back shorter: a named session's prompt
        then has more tokens than the last prompt. In this case the session keeps the prompt's blocks.
        """
        length = common_prefix(session.rows, rows)
        if length < min(len(session.rows), len(rows)):
            return length
        is_next = name is not None and 0 < session.prompt_tokens < tokens and not session.requests
        return length if is_next else len(session.rows)

    def own_blocks(self, session: Session, rows: Rows, prompt: str) -> int:
        """Return the number of a prompt's first blocks that the session, or a session of the same name, has.

        Behind these blocks, only exact blocks are loaded for the request. A request without a name that repeats a
        session's whole prompt counts as a request of this session's client. prompt: see `digest_of`.
        """
        if session.name is not None:
            if self._ends_alone(session, rows):
                return len(session.rows)
            return self._nearest(self.blocks.used(rows), session.name, session.tenant)[0]
        origin = None if len(session.rows) else self._prompts.get(prompt)
        if origin is not None and len(origin.rows) >= len(rows):
            session.owner = origin.owner
            return len(rows)
        return common_prefix(session.rows, rows)

    def enter_prompt(self, session: Session, prompt: str) -> None:
        """Note a session's newest prompt. prompt: see `digest_of`; empty for no prompt."""
        if self._prompts.get(session.prompt_end) is session:
            del self._prompts[session.prompt_end]
        session.prompt_end = prompt
        if prompt:
            self._prompts[prompt] = session

    def _longest(self, rows: Rows, name: str | None, tenant: str) -> Session | None:
        """Return the longest session whose last block is among these rows. name: None for sessions of any name."""
        for row in reversed(rows.tolist()):
            for session in self._ending[row]:
                if session.tenant == tenant and name in (None, session.name):
                    return session
        return None

    def _nearest(self, rows: Rows, name: str | None, tenant: str) -> tuple[int, Session | None]:
        """Return the largest number of these rows, from the first on, that a session begins with, and the session.

        name: None for sessions of any name.
        """
        best, found = 0, None
        some: Iterable[Session] = self._of_tenant.get(tenant, ()) if name is None else self.named(name, tenant)
        for session in some if len(rows) else ():
            if best < len(session.rows) and session.rows[best] == rows[best]:
                best, found = common_prefix(session.rows, rows), session
                if best == len(rows):
                    break
        return best, found

    def _with_changed_answer(self, rows: Rows, name: str | None, tenant: str) -> Session | None:
        """Return the session of this name whose whole last prompt, but not the answer, is at the begin of these rows.

        The chat template has then left out the model's thinking, or the client has changed the answer. Return None
        without a name, because the prompt may be a different client's.
        """
        known, origin = (0, None) if name is None else self._nearest(self.blocks.used(rows), name, tenant)
        if origin is None or origin.requests or not 0 < known < min(len(origin.rows), len(rows)):
            return None
        prompt = origin.prompt_tokens
        return origin if prompt and known >= prompt // self.shape.block_tokens else None

    def _inherit(self, session: Session, rows: Rows) -> None:
        """Give `session` the history of another session that begins with the same rows and then has other blocks.

        `session` gets no history if several sessions have the last common block, or a request of the older one runs.
        """
        known = len(self.blocks.used(rows))
        origin = self._holder(int(rows[known - 1]), session.tenant) if known else None
        if origin is None:  # only other tenants' sessions have all of the rows
            known, origin = self._nearest(rows[:known], None, session.tenant)
        if origin is None or known == len(origin.rows) or origin.requests:
            return
        if self._has_several(int(origin.rows[known - 1]), session.tenant):
            return
        session.created, session.uses, session.last_used = origin.created, origin.uses, origin.last_used
        session.left_tokens = (len(origin.rows) - known) * self.shape.block_tokens
        for order in (*self.orders.values(), self.resident):
            order.superseded(origin.session_id)

    def _holder(self, row: int, tenant: str) -> Session | None:
        """Return a session of the tenant that has the block with this row; None without one."""
        found = self.by_number.get(int(self.blocks.origin[row]))
        if found is None or found.tenant != tenant:
            found = next(self.holders(row, tenant), None)
        return found

    def holders(self, row: int, tenant: str | None = None) -> Iterator[Session]:
        """Yield the sessions of a tenant, or of all for None, that have the block. The search visits each session."""
        some: Iterable[Session] = self.by_id.values() if tenant is None else self._of_tenant.get(tenant, ())
        depth = int(self.blocks.depth[row])
        return (session for session in some if session.has(row, depth))

    def _has_several(self, row: int, tenant: str) -> bool:
        """True if several sessions of the tenant have the block."""
        return self.blocks.users[row] > 1 and len(list(islice(self.holders(row, tenant), 2))) > 1

    def remember(self, session: Session) -> None:
        """Note the session's last block at the end of a request, so that later prompts with it find the session."""
        self.forget_tip(session)
        if len(session.rows):
            _, session.tip = self.blocks.name(int(session.rows[-1]))
            tip = session.tenant.encode() + session.tip
            self._remembered.pop(tip, None)  # the newest is the last
            self._remembered[tip] = session
        most = REMEMBERED + 2 * len(self.by_id)
        if len(self._remembered) > most + most // 8:
            for tip in list(islice(self._remembered, len(self._remembered) - most)):
                del self._remembered[tip]

    def forget_tip(self, session: Session) -> None:
        """Undo `remember`."""
        tip = session.tenant.encode() + session.tip
        if self._remembered.get(tip) is session:
            del self._remembered[tip]

    def _revive(self, session: Session) -> None:
        """Enter a remembered session again, which has left the table. It has no pin and no kept range."""
        if session.session_id in self.by_id:
            session.session_id = self._new_id(session.name, session.tenant)
        session.is_cold, session.refusals, session.refused_until = False, 0, 0.0
        self._enter(session)

    def _new_id(self, name: str | None, tenant: str) -> str:
        """Return the client's name, with a number for a branch, or `anonymous-N` without a name."""
        taken: Container[str] = self.by_id
        if name is None:
            names = (f"{self._anonymous_name}{n}" for n in self._anonymous[tenant])
        else:
            names = (name if n == 1 else f"{name}~{next(self._forks[tenant])}" for n in count(1))
        return next(full for told in names if (full := qualified(told, tenant)) not in taken)


def digest_of(tenant: str, hashes: Sequence[bytes], tail: bytes | None) -> str:
    """Return a prompt's number of full blocks, ":", and a digest of tenant and prompt; "" if 0, or if `tail` is None.

    hashes, tail: see `SessionManager.request_started`.
    """
    if tail is None or not hashes:
        return ""
    whole = b"\0".join((tenant.encode(), hashes[-1], tail))
    return f"{len(hashes)}:{blake2b(whole, digest_size=16).hexdigest()}"
