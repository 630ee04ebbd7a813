"""Sessions on their way from hot to cold: what is encoded for them, and what becomes of it."""

from collections.abc import Iterable, Sequence
from itertools import islice, repeat

from manthan.manager.sessions.anchors import Anchors
from manthan.manager.sessions.budget import ColdBudget
from manthan.manager.sessions.exact import ExactTokens
from manthan.manager.sessions.marks import Mark
from manthan.manager.sessions.orders import Orders
from manthan.manager.sessions.pruning import Pruning
from manthan.manager.sessions.session import (
    NO_CODES,
    Anchor,
    Beside,
    Block,
    BlockName,
    CodeState,
    DropCause,
    Encoding,
    Eviction,
    Session,
    SessionState,
)
from manthan.manager.sessions.shared_heads import SharedHeads
from manthan.manager.sessions.table import SessionTable

_NONE, _QUEUED, _SPILLING, _ = CodeState  # looked up once, see `manthan.manager.sessions.blocks`

DOUBLINGS = 5
"""A session that the cold store has no room for is idle for twice as long each time, up to so often."""


class Evictions:
    """idle_after_s: how long pressure leaves a session alone whose eviction failed."""

    def __init__(
        self,
        table: SessionTable,
        orders: Orders,
        pruning: Pruning,
        budget: ColdBudget,
        exact: ExactTokens,
        anchors: Anchors,
        idle_after_s: float,
    ) -> None:
        self._anchors = anchors
        self._table, self._blocks, self._orders, self._pruning = table, table.blocks, orders, pruning
        self._budget, self._exact, self._idle_after_s = budget, exact, idle_after_s
        self._stale: set[Block] = set()  # being encoded since before a reset
        self._heads = SharedHeads(table, budget, pruning, self.wanted)

    def anchor(self, session: Session, depth: int, parts: Beside) -> None:
        """Queue what other groups need to go on from behind so many blocks of the session's chain."""
        anchor = self._anchors.place(session, depth, parts)
        needed = [part for part in anchor.parts if part.code is CodeState.NONE]
        if any(self._pruning.mark(part) is Mark.DECODED for part in needed):
            self._anchors.leave(session, anchor, DropCause.ABANDONED)
            return
        wanted = list(map(self.wanted, needed))
        if self._budget.make_room([encoding.nbytes for encoding in wanted], session) < len(needed):
            self._anchors.leave(session, anchor, DropCause.BUDGET)
            return
        for part, encoding in zip(needed, wanted, strict=True):
            self._orders.encode(part, encoding, session.tenant)
        self._anchors.settle(anchor)

    def evict(self, session: Session, now: float, is_hot: bool = True, is_pressed: bool = False) -> None:
        """Queue what has no codes yet, tail first, so that the head stays hot for longest.

        Args:
            is_hot: False if the pool has lost all blocks.
            is_pressed: see Eviction.
        """
        if self._anchors.is_needed:
            self._cut_to_anchor(session)
            if not session.chain:
                return
        self._table.set_state(session, SessionState.EVICTING, now)
        session.evict_began, session.evict_encoded, session.evict_nbytes = now, 0, 0
        session.evict_pressed = is_pressed
        needed = [block for block in session.chain if block.code is _NONE]
        decoded = next((block for block in needed if self._pruning.mark(block) is Mark.DECODED), None)
        if decoded is not None:  # its compressed copy is gone: it may not be encoded again
            self._pruning.cut(session, decoded.depth, DropCause.ABANDONED)
            if not session.chain:
                return
            needed = [block for block in session.chain if block.code is _NONE]
        wanted = self._wanted_of_chain(needed)
        self._heads.add_to(needed, wanted, session.tenant)
        fits = self._budget.make_room([encoding.nbytes for encoding in wanted], session)
        if fits < len(needed):
            self._pruning.cut(session, needed[fits].depth, DropCause.BUDGET)  # and on to an anchor
            fits = sum(block.depth < len(session.chain) for block in needed[:fits])
        self._orders.encode_all(needed[:fits][::-1], wanted[:fits][::-1], session.tenant)  # who has it stored pays
        if is_hot:
            for block, encoding in self._heads.replacements(session):
                self._orders.encode(block, encoding, block.tenant)
        self._wait(session)
        self._finish(session, now)

    def _wait(self, session: Session) -> None:
        """Wait for its blocks that are queued, or being encoded."""
        alone, pending = (session,), 0
        for block in session.chain:
            code = block.code
            if code is _QUEUED or code is _SPILLING:
                if block.waiters:
                    block.await_codes(session)
                else:
                    block.waiters = alone
                pending += 1
        session.pending += pending

    def _cut_to_anchor(self, session: Session) -> None:
        """What is behind its deepest anchor nobody could go on from: it is vLLM's to overwrite. Nor is anybody dropped
        for what would not fit if all others were."""
        fits = (anchor.depth for anchor in reversed(session.anchors) if self._could_fit(session, anchor))
        lengths = {
            DropCause.ABANDONED: self._pruning.usable(session, len(session.chain)),
            DropCause.BUDGET: next(fits, 0),
        }
        for cause, length in lengths.items():
            if length < len(session.chain):
                self._pruning.cut(session, length, cause)

    def _could_fit(self, session: Session, anchor: Anchor) -> bool:
        blocks = (*session.chain[: anchor.depth], *anchor.parts)
        nbytes = sum(block.encoding.nbytes or self.wanted(block).nbytes for block in blocks)
        return self._budget.holds(nbytes, session.tenant)

    def wanted(self, block: Block) -> Encoding:
        """What its codes would be, should it be encoded now."""
        exact, shape = self._exact.wanted(block), self._table.shape
        if block.group is None and shape.group is None:
            return NO_CODES
        if block.group is None:
            return Encoding(shape.bounds[exact], exact, shape.codec)
        bounds = shape.beside[block.group]
        exact = exact if exact in bounds else 0  # a state has no first tokens
        return Encoding(bounds[exact], exact, "" if block.group in shape.settled else shape.codec)

    def _wanted_of_chain(self, blocks: Sequence[Block]) -> list[Encoding]:
        """The same of blocks of a chain, most of which are alike."""
        if self._exact.are_none:
            return [self.wanted(block) for block in blocks[:1]] * len(blocks)
        exact_of, made = self._exact.wanted, dict[int, Encoding]()
        found = []
        for block in blocks:
            encoding = made.get(exact := exact_of(block))
            if encoding is None:
                encoding = made[exact] = self.wanted(block)
            found.append(encoding)
        return found

    def try_again(self, now: float) -> None:
        """Sessions that were refused are idle again when they have waited for long enough; and one of them if something
        has left the store, which may be the room that it needs."""
        freed, self._orders.has_freed = self._orders.has_freed, False
        self._table.take_up(now, earlier=freed)

    def relieve(self, wanted: int, now: float) -> bool:
        """Evict idle sessions in policy order until `wanted` exposed blocks are under way, because memory is short.
        Returns whether any was chosen."""
        goal = max(0, self._blocks.exposed - wanted)
        chosen = False
        if self._blocks.exposed > goal:
            for session in self._table.hot_victims():
                if session.retry_after <= now and any(block.exposed for block in reversed(session.chain)):
                    self._table.hot.evicted(session.session_id)
                    self.evict(session, now, is_pressed=True)
                    chosen = True
                    if self._blocks.exposed <= goal:
                        break
        return chosen

    def save(self, names: Iterable[BlockName | None], walked: int, most: int, running: Iterable[Session]) -> None:
        """Queue up to `most` of the first `walked` of these free blocks: what only running sessions need, and nothing
        has codes of. running: such sessions."""
        if self._anchors.is_needed or self._table.shape.group is None:
            return
        found = (self._blocks.named(name) for name in islice(names, walked) if name is not None)
        left = {block for block in found if block is not None and block.code is _NONE and block.running}
        left = {block for block in left if self._pruning.is_computed(block)}
        for session in running if left else ():
            some = [block for block in reversed(session.chain) if block in left][:most]
            wanted = self._wanted_of_chain(some)
            fits = self._budget.make_room([encoding.nbytes for encoding in wanted], session) if some else 0
            if fits:
                self._orders.encode_all(some[:fits], wanted[:fits], session.tenant)
            left.difference_update(some)
            if not left or (most := most - fits) <= 0:
                return

    def spilled(self, keys: Sequence[bytes], sizes: Iterable[int], now: float, group: int | None = None) -> None:
        """Every rank has put the codes of these blocks of a group into its tier, where they take so many bytes."""
        names = keys if group is None else zip(repeat(group), keys)
        stale, run, nbytes = self._stale, list[Block](), list[int]()
        waiters: object = None
        for block, size in zip(map(self._blocks.named, names), sizes, strict=True):
            if block is None or block.code is not _SPILLING:
                continue
            is_stale = bool(stale) and block in stale
            if run and (block.waiters is not waiters or is_stale or group is not None):
                self._settle(run, nbytes, now)
                run, nbytes = [], []
            waiters = block.waiters
            if is_stale:
                self._fail(block, now)
            else:
                run.append(block)
                nbytes.append(size)
        if run:
            self._settle(run, nbytes, now)

    def _settle(self, run: Sequence[Block], sizes: Sequence[int], now: float) -> None:
        """Blocks of chains for which the same session waits, or nobody, or one for which others do, are stored."""
        self._blocks.settle(run, sizes)
        last, nbytes = run[-1], sum(sizes)
        if last.group is not None:
            self._release(last)
        else:
            self._orders.releases += [block.key for block in run]
        waiters = last.waiters
        for block in run:
            block.waiters = ()
        for session in waiters:
            self._table.touch(session)
            session.pending -= len(run)
            session.evict_encoded += len(run)
            session.evict_nbytes += nbytes
            if not session.pending:
                self._finish(session, now)
        if last.group is not None:
            self._anchors.stored(last)
        for block in run:
            if not block.users:
                self._pruning.drop([block], DropCause.ABANDONED)

    def failed(self, key: bytes, now: float, group: int | None = None, is_full: bool = False) -> None:
        """A rank could not store this block: its sessions stay hot, unless there are older codes of it. Pressure leaves
        them be for a while.

        is_full: for lack of room. Each time that this happens to a session it is left alone for twice as long, or until
        something else has left the store.
        """
        if (block := self._spilling(key, group)) is not None:
            self._fail(block, now, is_full)

    def _fail(self, block: Block, now: float, is_full: bool = False) -> None:
        is_stale = block in self._stale
        self._stale.discard(block)
        if block.old is not None and not is_stale:
            self._keep_old(block, now)
            return
        cause = DropCause.RESET if is_stale else DropCause.FAILED
        self._pruning.forget_codes([block], cause)  # some rank may have stored its shard
        self._pruning.lose_anchors(block, cause)
        for session in self._waiters_of(block):
            self._pruning.unwait(session, session.chain)
            session.retry_after = now + self._idle_after_s
            self._table.set_state(session, SessionState.IDLE, now)
            if is_full:
                self._put_off(session, now)
        self._pruning.bury([block])

    def _put_off(self, session: Session, now: float) -> None:
        """The store has less room than the budget says, and nobody knows when it will have more."""
        session.refusals = min(session.refusals + 1, DOUBLINGS)
        session.retry_after = now + self._idle_after_s * 2**session.refusals
        self._table.put_off_until(session, session.retry_after - self._idle_after_s)

    def lost(self, key: bytes, now: float, group: int | None = None) -> None:
        """A block that was to be encoded is not in the pool any more: what follows it is of no use."""
        if (block := self._spilling(key, group)) is None:
            return
        if block.old is not None and block not in self._stale:
            self._keep_old(block, now)
            return
        self._stale.discard(block)
        self._blocks.forget(block)
        self._pruning.lose_anchors(block, DropCause.ABANDONED)
        for session in self._waiters_of(block):
            self._pruning.cut(session, block.depth, DropCause.ABANDONED)
            self._finish(session, now)
        self._pruning.bury([block])

    def reset(self) -> None:
        """What is being encoded now is void when it is answered."""
        self._stale.update(self._blocks)

    def _keep_old(self, block: Block, now: float) -> None:
        """The codes that there were are good, only larger than they need be."""
        self._blocks.revert(block)
        self._release(block)
        for session in self._waiters_of(block):
            self._finish(session, now)
        if not block.users:
            self._pruning.drop([block], DropCause.ABANDONED)

    def _release(self, block: Block) -> None:
        """Have the pool overwrite its bf16 copy before others; those of other groups are vLLM's affair, unless chains
        have no others."""
        if block.group is not None and self._table.shape.group is None:
            block = self._blocks.get(block.key) or block
        if block.group is None:
            self._orders.releases.append(block.key)

    def _finish(self, session: Session, now: float) -> None:
        if session.pending or not session.chain:
            return
        self._table.set_state(session, SessionState.COLD, now)
        session.refusals = 0
        self._pruning.bury(session.chain)
        self._pruning.to_anchor(session)
        if not session.chain:
            return
        self._anchors.tidy(session)
        self._orders.keep(session.chain)
        shape, beside = self._table.shape, session.beside if session.anchors else ()
        codes = [block.encoding for block in session.chain]
        self._orders.evictions.append(
            Eviction(
                session_id=session.session_id,
                blocks=len(session.chain),
                beside=len(beside),
                tokens=len(session.chain) * shape.block_tokens,
                hot_nbytes=len(session.chain) * shape.pool_nbytes(None)
                + sum(shape.pool_nbytes(block.group) for block in beside),
                encoded=session.evict_encoded,
                encoded_nbytes=session.evict_nbytes,
                cold_nbytes=sum([code.nbytes for code in codes]) + session.beside_nbytes,
                idle_s=session.evict_began - session.last_used,
                took_s=now - session.evict_began,
                exact=sum([code.exact > 0 for code in codes]),
                is_pressed=session.evict_pressed,
            )
        )

    def _spilling(self, key: bytes, group: int | None) -> Block | None:
        block = self._blocks.get(key, group)
        return block if block is not None and block.code is _SPILLING else None

    def _waiters_of(self, block: Block) -> Sequence[Session]:
        """The sessions that waited for a block, which is answered for now."""
        sessions, block.waiters = tuple(block.waiters), ()
        for session in sessions:
            session.pending -= 1
        return sessions
