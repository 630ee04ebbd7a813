"""Sessions and their blocks, kept consistent: every change of a chain or a state goes through here."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from manthan.manager.block_table import BlockTable
from manthan.manager.chains import ChainIndex
from manthan.manager.session import Block, Session, SessionState
from manthan.policies import EvictionPolicy, PolicyOptions, SessionView

_HOT_STATES = (SessionState.HOT, SessionState.IDLE)


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """What a block is worth: its tokens, its bytes as bf16 and as codes (all ranks together)."""

    block_tokens: int
    hot_nbytes: int
    cold_nbytes: int


class SessionTable:
    """All sessions: by id, by chain, by state, and in the order of the two policies."""

    def __init__(
        self, policy: type[EvictionPolicy], shape: MemoryShape, label: str = "", options: PolicyOptions | None = None
    ) -> None:
        self.shape = shape
        self.changed: dict[str, None] | None = None
        """Ids of sessions that are not what they were, where somebody asks for them."""
        self.blocks = BlockTable()
        self.by_id: dict[str, Session] = {}
        self.states: Counter[SessionState] = Counter()
        self.idle: OrderedDict[str, Session] = OrderedDict()
        """IDLE sessions in the order in which they became so."""
        self.chains = ChainIndex(label)
        self._hot_policy, self._cold_policy = policy.pair(options)

    def create(self, asked_id: str | None, now: float) -> Session:
        """A new session with an empty chain, HOT: a request of it runs or has just ended."""
        session = Session(self.chains.new_id(asked_id, self.by_id), asked_id, created=now, last_used=now)
        self.by_id[session.session_id] = session
        self.states[session.state] += 1
        return session

    def touch(self, session: Session) -> None:
        """The session, or what is stored of it, is not what it was."""
        if self.changed is not None:
            self.changed[session.session_id] = None

    def set_state(self, session: Session, state: SessionState, now: float) -> None:
        """Move a session to another state: its blocks' counts, the idle order and the hot policy follow."""
        self.touch(session)
        old = session.state
        hot = (state in _HOT_STATES) - (old in _HOT_STATES)
        running = (state is SessionState.HOT) - (old is SessionState.HOT)
        if hot or running:
            self.blocks.move(session.chain, hot=hot, running=running)
        self.states[old] -= 1
        self.states[state] += 1
        session.state = state
        self.idle.pop(session.session_id, None)
        self._hot_policy.forget(session.session_id)
        if state is SessionState.IDLE:
            session.idle_since = now
            self.idle[session.session_id] = session
            self._hot_policy.used(self.view(session, self.shape.hot_nbytes))

    def used(self, session: Session, now: float) -> None:
        """A request of the session began or ended."""
        self.touch(session)
        session.last_used = now
        self._cold_policy.used(self.view(session, self.shape.cold_nbytes))

    def extend(self, session: Session, keys: Sequence[bytes]) -> None:
        """Grow the chain of a HOT session."""
        self.touch(session)
        self.chains.remove(session)
        for key in keys:
            block = self.blocks.obtain(key, len(session.chain))
            self.blocks.change(block, users=+1, hot=+1, running=+1)
            session.chain.append(block)
        self.chains.add(session)

    def truncate(self, session: Session, length: int) -> None:
        """Cut the chain to `length` blocks; a session left with none is forgotten unless a request runs."""
        self.touch(session)
        self.chains.remove(session)
        cut = session.chain[length:]
        del session.chain[length:]
        hot, running = session.state in _HOT_STATES, session.state is SessionState.HOT
        for block in cut:
            self.blocks.change(block, users=-1, hot=-hot, running=-running)
        self.chains.add(session)
        if not session.chain and not session.requests:
            self._forget(session)

    def holders(self, block: Block) -> list[Session]:
        """The sessions whose chain holds a block; a scan, for what is rare."""
        depth = block.depth
        return [s for s in self.by_id.values() if depth < len(s.chain) and s.chain[depth] is block]

    def hot_victims(self) -> list[Session]:
        """IDLE sessions, the one to be evicted first first. A copy: the policies move as sessions go."""
        return [self.by_id[session_id] for session_id in self._hot_policy.victims()]

    def cold_victims(self) -> list[Session]:
        """All sessions, the one whose codes are to be dropped first first; a copy too."""
        return [self.by_id[session_id] for session_id in self._cold_policy.victims()]

    def view(self, session: Session, nbytes: int) -> SessionView:
        """What a policy is told of this session, whose blocks take so many bytes each in its place."""
        return SessionView(
            session_id=session.session_id,
            tokens=len(session.chain) * self.shape.block_tokens,
            nbytes=len(session.chain) * nbytes,
            created=session.created,
            last_used=session.last_used,
            uses=session.uses,
        )

    def _forget(self, session: Session) -> None:
        self.by_id.pop(session.session_id)
        self.idle.pop(session.session_id, None)
        self.states[session.state] -= 1
        self._hot_policy.forget(session.session_id)
        self._cold_policy.forget(session.session_id)
