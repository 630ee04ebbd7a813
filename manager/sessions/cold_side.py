"""What is in the cold store, and what leaves it to make room: the budget, shares of it, and the order of dropping."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from manthan.manager.sessions.exact_copies import ExactCopies
from manthan.manager.sessions.fast_tier import FastTier
from manthan.manager.sessions.place import Place
from manthan.manager.sessions.session import Block, CodeState, Drop, DropCause, Session, SessionState
from manthan.manager.sessions.table import MemoryShape, SessionTable
from manthan.policies import EvictionPolicy


class Shares(NamedTuple):
    """Of the cold store's budget, how much pinned sessions may take together, and each tenant; 1 for all of it."""

    pinned: float = 0.25
    tenant: float = 1.0
    tenants: Mapping[str, float] = {}

    def of_tenant(self, tenant: str) -> float:
        """The share of one tenant; who is nobody's tenant has no quota of its own."""
        return self.tenants.get(tenant, self.tenant if tenant else 1.0)


class Fast(NamedTuple):
    """A fast tier: its bytes, and whether what is read from the slower one behind it comes back to it."""

    nbytes: int
    fills_on_read: bool


class ColdSide:
    """The part of the session memory manager that keeps the cold store within its budget.

    make_policy: makes the instances that order the places. capacity_nbytes: the hard budget.
    fast: the tier that new codes go to, where a slower one is behind it. sink_tokens, window_tokens: how many of a
    session's first and last tokens have exact copies beside their codes; whole blocks do.
    """

    def __init__(
        self,
        make_policy: Callable[[], EvictionPolicy],
        shape: MemoryShape,
        capacity_nbytes: int,
        label: str,
        shares: Shares,
        fast: Fast | None,
        sink_tokens: int = 0,
        window_tokens: int = 0,
    ) -> None:
        self.shape = shape
        self.shares = shares
        self.total_blocks = capacity_nbytes // shape.cold_nbytes
        self.table = SessionTable(make_policy, shape, label)
        self.blocks = self.table.blocks
        sink, window = (-(-tokens // shape.block_tokens) for tokens in (sink_tokens, window_tokens))
        self.copies = ExactCopies(self.blocks, sink, window)
        self.pinned: dict[str, int] = {}
        """Blocks of each pinned session."""
        self._make_policy = make_policy
        if fast is not None:
            fast_blocks = fast.nbytes // shape.cold_nbytes
            self.table.front = FastTier(make_policy, self.blocks, fast_blocks, fast.fills_on_read)
        self._running: dict[str, Session] = {}  # by request id
        self._restored: dict[str, list[Block]] = {}  # by id of a running request
        self._queue: OrderedDict[bytes, None] = OrderedDict()  # the QUEUED blocks, first come first
        self._releases: list[bytes] = []
        self._drops: list[Drop] = []

    # -- the budget -----------------------------------------------------------------------------------

    @property
    def capacity_blocks(self) -> int:
        """How many blocks this engine may have in the cold store."""
        return self.total_blocks

    @property
    def _free(self) -> int:
        return self.capacity_blocks - self.blocks.reserved

    def _left(self, tenant: str) -> int:
        """How many blocks more a tenant's share allows; what there is in all for one without a quota."""
        share = self.shares.of_tenant(tenant)
        used = self.blocks.reserved_of[tenant] if share < 1 else 0
        return int(share * self.capacity_blocks) - used

    def _make_room(self, wanted: int, session: Session) -> int:
        """Drop codes until `wanted` blocks of the session fit, or all that is worth less than it is gone.

        Exact copies go before any codes. Returns how many blocks fit, at most `wanted`. A tenant that has used up its
        share makes room among its own.
        """
        tenant = session.tenant
        if self.shares.of_tenant(tenant) < 1:
            self.copies.make_room(wanted - self._left(tenant), tenant)
            self._drop_until(lambda: wanted - self._left(tenant), session, tenant)
            wanted = max(0, min(wanted, self._left(tenant)))
        self.copies.make_room(wanted - self._free)
        self._drop_redundant(wanted)
        self._drop_until(lambda: wanted - self._free, session)
        return max(0, min(wanted, self._free))

    def _drop_until(self, short: Callable[[], int], session: Session, tenant: str | None = None) -> None:
        """Drop in the policy's order, of one tenant or of all, until nothing is short or it is the session's turn."""
        if short() <= 0:
            return
        for victim in self.table.cold_victims(tenant):
            if tenant is None:
                self._drop_strangers(victim.last_used, short)
            if victim is session or short() <= 0:
                break
            self._drop_tail(victim, short())

    def _drop_strangers(self, before: float, short: Callable[[], int]) -> None:
        """Where engines share a store, others' sessions that were not used since `before` go first."""

    def _drop_redundant(self, wanted: int) -> None:
        """Codes that a running request has read, and that nobody else needs, go before any cold session."""
        for request_id, blocks in self._restored.items():
            session = self._running[request_id]
            while blocks and self._free < wanted and not session.pinned:
                block = blocks.pop()
                if block.users == 1 and block.running:
                    self._drop([block], DropCause.BUDGET)
                    self.table.touch(session)

    def _drop_tail(self, victim: Session, short: int) -> None:
        """Drop codes from the victim's tail until so many blocks more are free; its hot blocks it keeps."""
        if victim.state is SessionState.COLD:
            length, free = len(victim.chain), 0
            while length and free < short and not victim.chain[length - 1].pins:
                length -= 1
                free += victim.chain[length].users == 1 and victim.chain[length].droppable
            if length == 0:
                self.table.leave_cold(victim, evicted=True)
            if length < len(victim.chain):
                self._cut(victim, length, DropCause.BUDGET)
        elif victim.state is SessionState.IDLE:
            codes = [b for b in reversed(victim.chain) if b.users == 1 and b.droppable]
            self._drop(codes[:short], DropCause.BUDGET)
            self.table.touch(victim)
            if len(codes) <= short:
                self.table.leave_cold(victim)  # until it is used or evicted: nobody need look at it again before

    # -- shares ---------------------------------------------------------------------------------------

    def _enter_tenant(self, tenant: str) -> None:
        """The codes of this tenant's sessions count towards its share."""
        if tenant not in self.table.cold_of and self.shares.of_tenant(tenant) < 1:
            self.table.cold_of[tenant] = Place(self._make_policy)

    def _pin(self, session: Session) -> str:
        """Pin a session, or keep it pinned as it grows; returns in a sentence why not, if so."""
        allowed = int(self.shares.pinned * self.capacity_blocks)
        others = sum(self.pinned.values()) - self.pinned.get(session.session_id, 0)
        if others + len(session.chain) > allowed:
            self._unpin(session)
            return (
                f"pin is refused: pinned sessions may take {allowed} blocks of the cold store (quotas.pinned_share is "
                f"{self.shares.pinned:g}), {others} are taken, and this session has {len(session.chain)}"
            )
        session.pinned = True
        self.pinned[session.session_id] = len(session.chain)
        self.table.leave_cold(session)
        return ""

    def _unpin(self, session: Session) -> None:
        session.pinned = False
        if self.pinned.pop(session.session_id, None) is not None:
            self.table.enter_cold(session)

    # -- dropping -------------------------------------------------------------------------------------

    def _cut(self, session: Session, length: int, cause: DropCause) -> None:
        """Shorten a chain; codes, and in an eviction bf16 copies, that nobody needs any more go."""
        self._bury(self._shorten(session, length, cause))

    def _shorten(self, session: Session, length: int, cause: DropCause) -> list[Block]:
        cut = session.chain[length:]
        self._unwait(session, cut)
        self.copies.cut(session, length)
        self.table.truncate(session, length)
        if not session.chain:
            self.pinned.pop(session.session_id, None)
            session.pinned = False
        if session.state is SessionState.EVICTING:
            self._releases += [block.key for block in cut if not block.hot]
        self._drop([block for block in cut if not block.users], cause)
        self.copies.review(cut)
        return cut

    def _bury(self, blocks: Iterable[Block]) -> None:
        """Cold sessions end before the first of these blocks of a chain that is gone.

        Sessions that are being evicted look for themselves when they are done.
        """
        gone = next((block for block in blocks if block.gone), None)
        if gone is not None:
            for session in self.table.holders(gone):
                if session.state is SessionState.COLD:
                    self._shorten(session, gone.depth, DropCause.ABANDONED)

    def _drop(self, blocks: Iterable[Block], cause: DropCause) -> None:
        self._forget_codes([block for block in blocks if block.droppable], cause)

    def _forget_codes(self, blocks: Sequence[Block], cause: DropCause) -> None:
        for block in blocks:
            self.blocks.change(block, code=CodeState.NONE)
        if blocks:
            self._drops.append(Drop([block.key for block in blocks], cause))

    def _unwait(self, session: Session, blocks: Iterable[Block]) -> None:
        """An eviction waits for these no longer. Encodings go on; what only it had queued is taken back."""
        for block in blocks:
            if session in block.waiters:
                del block.waiters[session]
                session.pending -= 1
                if not block.waiters and block.code is CodeState.QUEUED:
                    del self._queue[block.key]
                    self.blocks.change(block, code=CodeState.NONE)
