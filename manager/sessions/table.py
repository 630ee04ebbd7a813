"""Sessions and their blocks, kept consistent: every change of a chain or a state goes through here."""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from manthan.manager.sessions.blocks import BlockTable
from manthan.manager.sessions.deadlines import Deadlines
from manthan.manager.sessions.fast_tier import Fast, FastTiers
from manthan.manager.sessions.place import Place
from manthan.manager.sessions.session import HOT_STATES, MemoryShape, Session, SessionState
from manthan.manager.sessions.tips import Tips
from manthan.policies import EvictionPolicy, SessionView

_HOT, _IDLE, _EVICTING, _COLD = SessionState  # looked up once, see `manthan.manager.sessions.blocks`

REMEMBERED = 1024
"""How many sessions without KV are remembered at least; as many as there are with KV otherwise."""


class SessionTable:
    """All sessions: by id, by chain, by state, and in the order of the policies."""

    def __init__(
        self,
        make_policy: Callable[[], EvictionPolicy],
        shape: MemoryShape,
        label: str = "",
        fast: Sequence[Fast] = (),
    ) -> None:
        self.shape = shape
        self.changed: dict[str, None] | None = None
        """Ids of sessions that are not what they were, where somebody asks for them."""
        self.forgotten: list[Callable[[str], None]] = []
        """Each is told of sessions that are gone, by id."""
        self.blocks = BlockTable()
        self.by_id: dict[str, Session] = {}
        self.states: Counter[SessionState] = Counter()
        self.idle: OrderedDict[str, Session] = OrderedDict()
        """IDLE sessions in the order in which they became so, but for those that are put off."""
        self.put_off = Deadlines()
        """IDLE sessions that no sweep looks at, until when."""
        self.tips = Tips(label)
        self.hot = Place(make_policy)
        """HOT and IDLE sessions."""
        self.cold = Place(make_policy)
        """Sessions that may have codes, but for those that are pinned, or had nothing to give in their turn."""
        self.cold_of: dict[str, Place] = {}
        """The same for each tenant that has a quota, and sessions."""
        self._sessions_of: Counter[str] = Counter()  # by tenant
        self.fronts = FastTiers(self.blocks, fast)
        """Sessions that have codes in fast tiers, where there are some in front of a slower one."""

    # -- sessions -------------------------------------------------------------------------------------

    def create(self, asked_id: str | None, tenant: str, now: float) -> Session:
        """A new session with an empty chain, HOT: a request of it runs or has just ended."""
        session_id = self.tips.new_id(asked_id, tenant, self.by_id)
        return self.adopt(session_id, asked_id, tenant, now, now)

    def adopt(self, session_id: str, asked_id: str | None, tenant: str, created: float, last_used: float) -> Session:
        """The same of an id that nobody has yet."""
        session = Session(session_id, asked_id, created=created, last_used=last_used, tenant=tenant)
        self._enter(session)
        return session

    def revive(self, session: Session) -> None:
        """A remembered session whose KV is gone has a request again: it is as a new one, but for its history."""
        if session.session_id in self.by_id:
            session.session_id = self.tips.new_id(session.asked_id, session.tenant, self.by_id)
        session.state, session.pending = SessionState.HOT, 0
        session.retry_after, session.refusals = 0.0, 0
        self._enter(session)

    def _enter(self, session: Session) -> None:
        self.by_id[session.session_id] = session
        self.states[session.state] += 1
        self._sessions_of[session.tenant] += 1
        self.tips.add(session)

    def touch(self, session: Session) -> None:
        """The session, or what is stored of it, is not what it was."""
        if self.changed is not None:
            self.changed[session.session_id] = None

    def take_changes(self) -> list[tuple[str, Session | None]]:
        """Return the sessions that have changed since the last call, by id; None for one that is gone."""
        taken, self.changed = self.changed or {}, {}
        return [(session_id, self.by_id.get(session_id)) for session_id in taken]

    def set_state(self, session: Session, state: SessionState, now: float) -> None:
        """Move a session to another state: its blocks' counts, the idle order and the places follow."""
        self.touch(session)
        old = session.state
        hot = (state in HOT_STATES) - (old in HOT_STATES)
        running = (state is _HOT) - (old is _HOT)
        if hot or running:
            self.blocks.move(session.chain, hot=hot, running=running)
        self.states[old] -= 1
        self.states[state] += 1
        session.state = state
        self._leave_idle(session)
        if hot < 0:
            self.hot.forget(session.session_id)
        if state is _IDLE:
            session.idle_since = now
            self.idle[session.session_id] = session
            if session.session_id not in self.hot:
                self.hot.used(self.view(session, self.shape.hot_nbytes), session.priority)
        elif (state is _EVICTING or state is _COLD) and session.session_id not in self.cold:
            self.enter_cold(session)
        if state is _COLD:
            self.fronts.used(session.session_id)

    def put_off_until(self, session: Session, when: float) -> None:
        """An IDLE session is as one that has become so then."""
        del self.idle[session.session_id]
        self.put_off.set(session.session_id, when)

    def take_up(self, now: float, *, earlier: bool) -> None:
        """Sessions that were put off until now are idle as others, and, if so, the next one `earlier` than it was to
        be."""
        if self.put_off.first is None:
            return
        names = [*self.put_off.pop_due(now), *([*islice(self.put_off.pop_due(math.inf), 1)] if earlier else [])]
        for name in names:
            session = self.idle[name] = self.by_id[name]
            session.idle_since = session.retry_after = now

    def used(self, session: Session, now: float) -> None:
        """A request of the session, which is HOT, began or ended."""
        self.touch(session)
        session.last_used = now
        self.hot.used(self.view(session, self.shape.hot_nbytes), session.priority)
        self.enter_cold(session)

    def told(self, session: Session) -> None:
        """Of a session without a request something is known that policies learn from: they are told of its last request
        again."""
        self.touch(session)
        if session.session_id in self.hot:
            self.hot.used(self.view(session, self.shape.hot_nbytes), session.priority)
        if session.session_id in self.cold:
            self.enter_cold(session)

    # -- chains ---------------------------------------------------------------------------------------

    def extend(self, session: Session, keys: Sequence[bytes]) -> None:
        """Grow the chain of a HOT session."""
        self.touch(session)
        self.tips.leave(session)
        self.blocks.join(keys, session)
        self.tips.enter(session)

    def truncate(self, session: Session, length: int) -> None:
        """Cut the chain to `length` blocks; a session left with none is forgotten unless a request runs."""
        self.touch(session)
        self.tips.leave(session)
        cut = session.chain[length:]
        del session.chain[length:]
        self.tips.enter(session)
        hot, running = session.state in HOT_STATES, session.state is _HOT
        self.blocks.leave(cut, session, hot=hot, running=running)
        if not session.chain and not session.requests:
            self._forget(session)

    def remember(self, session: Session) -> None:
        """A request of the session ended: by this chain it will be known again."""
        self.tips.remember(session, REMEMBERED + 2 * len(self.by_id))

    # -- who goes first -------------------------------------------------------------------------------

    def hot_victims(self) -> Iterator[Session]:
        """IDLE sessions, the one to be evicted first first; sessions may leave while one iterates."""
        sessions = map(self.by_id.__getitem__, self.hot.victims())
        return (session for session in sessions if session.state is _IDLE)

    def cold_victims(self, tenant: str | None = None) -> Iterator[Session]:
        """Sessions, of one tenant or of all, the one whose codes are to be dropped first first; likewise."""
        place = self.cold if tenant is None else self.cold_of[tenant]
        return map(self.by_id.__getitem__, place.victims())

    def enter_cold(self, session: Session) -> None:
        """The session may have codes to give from now on."""
        if session.pinned:
            return
        view = self.view(session, self.shape.cold_nbytes)
        self.cold.used(view, session.priority)
        if (place := self.cold_of.get(session.tenant)) is not None:
            place.used(view, session.priority)

    def leave_cold(self, session: Session, *, evicted: bool = False) -> None:
        """The session has nothing to give; `evicted`: no more, because it was its turn."""
        for place in self._cold_places(session):
            (place.evicted if evicted else place.forget)(session.session_id)

    def superseded(self, session: Session) -> None:
        """Another session went on from the middle of this one's chain."""
        for place in (self.hot, *self._cold_places(session)):
            place.superseded(session.session_id)

    def view(self, session: Session, nbytes: int) -> SessionView:
        """What a policy is told of this session, the blocks of whose chain take so many bytes each in its place."""
        blocks = len(session.chain)
        return SessionView(  # by place, which is faster
            session.session_id,
            blocks * self.shape.block_tokens,
            blocks * nbytes + (session.beside_nbytes if session.anchors else 0),
            session.created,
            session.last_used,
            session.uses,
            session.gap,
            session.added_tokens,
            session.answer_tokens,
            session.left_tokens,
            session.expected,
        )

    def _cold_places(self, session: Session) -> Iterator[Place]:
        yield self.cold
        if (place := self.cold_of.get(session.tenant)) is not None:
            yield place

    def _leave_idle(self, session: Session) -> None:
        self.idle.pop(session.session_id, None)
        if self.put_off.first is not None:
            self.put_off.set(session.session_id, None)

    def _forget(self, session: Session) -> None:
        self.by_id.pop(session.session_id)
        self._leave_idle(session)
        self.states[session.state] -= 1
        self.hot.forget(session.session_id)
        self.leave_cold(session)
        self.fronts.forget(session.session_id)
        self.tips.remove(session)
        self._sessions_of[session.tenant] -= 1
        if not self._sessions_of[session.tenant]:  # tenants may be as many as clients make up
            del self._sessions_of[session.tenant]
            self.cold_of.pop(session.tenant, None)
            self.tips.forget_tenant(session.tenant)
        for tell in self.forgotten:
            tell(session.session_id)
