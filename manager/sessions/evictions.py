"""Sessions on their way from hot to cold: what is encoded for them, and what becomes of it."""

from manthan.manager.sessions.budget import ColdBudget
from manthan.manager.sessions.exact import ExactTokens
from manthan.manager.sessions.orders import Orders
from manthan.manager.sessions.pruning import Pruning
from manthan.manager.sessions.session import (
    Block,
    CodeState,
    DropCause,
    Encoding,
    Eviction,
    Session,
    SessionState,
)
from manthan.manager.sessions.table import SessionTable


class Evictions:
    """idle_after_s: how long pressure leaves a session alone whose eviction failed.

    may_replace: whether codes in the store can be replaced by others of the same block.
    """

    def __init__(
        self,
        table: SessionTable,
        orders: Orders,
        pruning: Pruning,
        budget: ColdBudget,
        exact: ExactTokens,
        idle_after_s: float,
        may_replace: bool,
    ) -> None:
        self._table, self._blocks, self._orders, self._pruning = table, table.blocks, orders, pruning
        self._budget, self._exact, self._idle_after_s, self._may_replace = budget, exact, idle_after_s, may_replace
        self._stale: set[bytes] = set()  # being encoded since before a reset

    def evict(self, session: Session, now: float) -> None:
        """Queue what has no codes yet, tail first, so that the head stays hot for longest."""
        self._table.set_state(session, SessionState.EVICTING, now)
        session.evict_began, session.evict_encoded, session.evict_nbytes = now, 0, 0
        self._exact.move_window(session)
        needed = [block for block in session.chain if block.code is CodeState.NONE]
        wanted = list(map(self.wanted, needed))
        fits = self._budget.make_room([encoding.nbytes for encoding in wanted], session)
        if fits < len(needed):
            self._pruning.cut(session, needed[fits].depth, DropCause.BUDGET)
        for block, encoding in zip(reversed(needed[:fits]), reversed(wanted[:fits]), strict=True):
            self._orders.encode(block, encoding, session.tenant)  # who has it stored pays for it
        if self._may_replace:
            self._replace(session)
        for block in session.chain:
            if block.in_flight:
                block.waiters[session] = None
                session.pending += 1
            elif not block.hot:
                self._orders.releases.append(block.key)
        self._finish(session, now)

    def wanted(self, block: Block) -> Encoding:
        """What its codes would be, should it be encoded now."""
        exact, shape = self._exact.wanted(block), self._table.shape
        return Encoding(shape.bounds[exact], exact, shape.codec)

    def _replace(self, session: Session) -> None:
        """What is no longer at the session's end need not be exact; the old codes stay until there are others.

        This loses no more than once either: what was exact came back as it was.
        """
        for block in self._exact.finer(session):
            wanted = self.wanted(block)
            if wanted.nbytes <= min(self._budget.free, self._budget.left(block.tenant)):
                self._orders.encode(block, wanted, block.tenant)

    def relieve(self, wanted: int, now: float) -> bool:
        """Evict idle sessions in policy order until `wanted` exposed blocks are under way; whether any was chosen."""
        goal = max(0, self._blocks.exposed - wanted)
        chosen = False
        if self._blocks.exposed > goal:
            for session in self._table.hot_victims():
                if session.retry_after <= now and any(block.exposed for block in reversed(session.chain)):
                    self._table.hot.evicted(session.session_id)
                    self.evict(session, now)
                    chosen = True
                    if self._blocks.exposed <= goal:
                        break
        return chosen

    def spilled(self, key: bytes, nbytes: int, now: float) -> None:
        """Every rank has put the codes of this block into its tier, where they take so many bytes together."""
        if key in self._stale:
            self.failed(key, now)
        if (block := self._spilling(key)) is None:
            return
        self._blocks.store(block, block.encoding._replace(nbytes=nbytes))
        if not block.hot:
            self._orders.releases.append(key)
        for session in self._waiters_of(block):
            self._table.touch(session)
            session.evict_encoded += 1
            session.evict_nbytes += nbytes
            self._finish(session, now)
        if not block.users:
            self._pruning.drop([block], DropCause.ABANDONED)

    def failed(self, key: bytes, now: float) -> None:
        """A rank could not store this block: its sessions stay hot, unless there are older codes of it."""
        if (block := self._spilling(key)) is None:
            return
        if block.old is not None and key not in self._stale:
            self._keep_old(block, now)
            return
        cause = DropCause.RESET if key in self._stale else DropCause.FAILED
        self._stale.discard(key)
        self._pruning.forget_codes([block], cause)  # some rank may have stored its shard
        for session in self._waiters_of(block):
            self._pruning.unwait(session, session.chain)
            session.retry_after = now + self._idle_after_s
            self._table.set_state(session, SessionState.IDLE, now)
        self._pruning.bury([block])

    def lost(self, key: bytes, now: float) -> None:
        """A block that was to be encoded is not in the pool any more: what follows it is of no use."""
        if (block := self._spilling(key)) is None:
            return
        if block.old is not None and key not in self._stale:
            self._keep_old(block, now)
            return
        self._stale.discard(key)
        self._blocks.forget(block)
        for session in self._waiters_of(block):
            self._pruning.cut(session, block.depth, DropCause.ABANDONED)
            self._finish(session, now)
        self._pruning.bury([block])

    def reset(self) -> None:
        """What is being encoded now is void when it is answered."""
        self._stale.update(block.key for block in self._blocks)

    def _keep_old(self, block: Block, now: float) -> None:
        """The codes that there were are good, only larger than they need be."""
        self._blocks.revert(block)
        if not block.hot:
            self._orders.releases.append(block.key)
        for session in self._waiters_of(block):
            self._finish(session, now)
        if not block.users:
            self._pruning.drop([block], DropCause.ABANDONED)

    def _finish(self, session: Session, now: float) -> None:
        if session.pending or not session.chain:
            return
        self._table.set_state(session, SessionState.COLD, now)
        self._pruning.bury(session.chain)
        if not session.chain:
            return
        self._orders.evictions.append(
            Eviction(
                session_id=session.session_id,
                blocks=len(session.chain),
                tokens=len(session.chain) * self._table.shape.block_tokens,
                encoded=session.evict_encoded,
                encoded_nbytes=session.evict_nbytes,
                cold_nbytes=sum(block.encoding.nbytes for block in session.chain),
                idle_s=session.evict_began - session.last_used,
                took_s=now - session.evict_began,
                exact=sum(block.encoding.exact > 0 for block in session.chain),
            )
        )

    def _spilling(self, key: bytes) -> Block | None:
        block = self._blocks.get(key)
        return block if block is not None and block.code is CodeState.SPILLING else None

    def _waiters_of(self, block: Block) -> list[Session]:
        """The sessions that waited for a block, which is answered for now."""
        sessions = list(block.waiters)
        block.waiters.clear()
        for session in sessions:
            session.pending -= 1
        return sessions
