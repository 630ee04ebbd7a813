"""What leaves the cold store to make room: the budget in bytes, shares of it, and the order of dropping."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from manthan.manager.sessions.blocks import NOBODY
from manthan.manager.sessions.exact import ExactTokens
from manthan.manager.sessions.place import Place
from manthan.manager.sessions.pruning import Pruning
from manthan.manager.sessions.session import Block, CodeState, DropCause, Session, SessionState
from manthan.manager.sessions.table import SessionTable
from manthan.policies import EvictionPolicy


class Shares(NamedTuple):
    """Shares of the cold store's budget for all pinned sessions together and for each tenant.

    "*" stands for each tenant without a share of its own. 1 is the whole budget.

    Of its share, a tenant's pinned sessions may take as much as all may of the whole: where shares add up to no more
    than 1, nobody's pins keep others from theirs.
    """

    pinned: float = 0.25
    tenants: Mapping[str, float] = {}
    heads: float = 0.25
    """Of heads that sessions share, which are kept exact."""

    def of_tenant(self, tenant: str) -> float:
        """The share of one tenant; who is nobody's tenant has no quota of its own."""
        others = 1.0 if tenant in ("", NOBODY) else self.tenants.get("*", 1.0)
        return self.tenants.get(tenant, others)


class ColdBudget:
    """Keeps the cold store within its bytes, which are hard: a block is ordered to be encoded only while it fits.

    Redis evicts by itself: the budget is then of what this engine keeps account of.
    """

    def __init__(
        self,
        table: SessionTable,
        pruning: Pruning,
        exact: ExactTokens,
        make_policy: Callable[[], EvictionPolicy],
        nbytes: int,
        shares: Shares,
    ) -> None:
        self._table, self._blocks, self._pruning = table, table.blocks, pruning
        self._exact, self._make_policy = exact, make_policy
        self.nbytes, self.shares = nbytes, shares

    @property
    def free(self) -> int:
        return self.nbytes - self._blocks.reserved

    def left(self, tenant: str) -> int:
        """How many bytes more a tenant's share allows; what there is in all for one without a quota."""
        share = self.shares.of_tenant(tenant)
        used = self._blocks.reserved_of[tenant] if share < 1 else 0
        return int(share * self.nbytes) - used

    def holds(self, nbytes: int, tenant: str) -> bool:
        """Whether so many bytes fit at all, should nobody else of this engine have anything in the cold store."""
        return nbytes <= min(1.0, self.shares.of_tenant(tenant)) * self.nbytes

    def bound(self, block: Block) -> int:
        """The most bytes that the block's codes would take."""
        return self._table.shape.bounds[self._exact.wanted(block)]

    def make_room(self, sizes: Sequence[int], session: Session) -> int:
        """Drop codes until so much of the session fits, or all that is worth less than it is gone.

        Returns how many of these sizes, from the first on, fit together. A tenant that has used up its share makes
        room among its own.
        """
        wanted, tenant = sum(sizes), session.tenant
        if self.shares.of_tenant(tenant) < 1:
            self._drop_until(lambda: wanted - self.left(tenant), session, tenant)
            wanted = max(0, min(wanted, self.left(tenant)))
        self._drop_until(lambda: wanted - self.free, session)
        fits = min(wanted, self.free)
        if sum(sizes) <= fits:
            return len(sizes)
        return sum(1 for total in accumulate(sizes) if total <= fits)

    def _drop_until(self, short: Callable[[], int], session: Session, tenant: str | None = None) -> None:
        """Drop in the policy's order, of one tenant or of all, until nothing is short or it is the session's turn."""
        if short() <= 0:
            return
        for victim in self._table.cold_victims(tenant):
            if victim is session or short() <= 0:
                break
            self._drop_tail(victim, short())

    def _drop_tail(self, victim: Session, short: int) -> None:
        """Drop codes from the victim's tail until so many bytes more are free. It keeps the blocks in the pool that the
        model computed: they can be encoded again. Decoded ones go with their codes."""
        if victim.state is SessionState.COLD:
            length, freed, cold = len(victim.chain), 0, CodeState.COLD
            while length and freed < short and not victim.chain[length - 1].pins:
                length -= 1
                last = victim.chain[length]
                freed += last.encoding.nbytes if last.users == 1 and last.code is cold else 0
            length = self._pruning.usable(victim, length) if length < len(victim.chain) else length
            if length == 0:
                self._table.leave_cold(victim, evicted=True)
            if length < len(victim.chain):
                self._pruning.cut(victim, length, DropCause.BUDGET)
        elif victim.state is SessionState.IDLE:
            codes = [b for b in reversed(victim.chain) if b.users == 1 and b.droppable]
            before = accumulate((block.encoding.nbytes for block in codes), initial=0)
            given = [block for block, freed in zip(codes, before, strict=False) if freed < short]
            left = short - sum(block.encoding.nbytes for block in given)
            length = min((b.depth for b in given if not self._pruning.is_computed(b)), default=len(victim.chain))
            self._pruning.give(victim, [block for block in given if block.depth < length], DropCause.BUDGET)
            self._table.touch(victim)
            if length < len(victim.chain):
                self._pruning.cut(victim, length, DropCause.BUDGET)
                if not victim.chain:
                    return
            if len(given) == len(codes):
                if left > 0:
                    self._pruning.leave_anchors(victim, DropCause.BUDGET)
                self._table.leave_cold(victim)  # until it is used or evicted: nobody need look at it again before

    # -- shares ---------------------------------------------------------------------------------------

    def enter_tenant(self, tenant: str) -> None:
        """The codes of this tenant's sessions count towards its share."""
        if tenant not in self._table.cold_of and self.shares.of_tenant(tenant) < 1:
            self._table.cold_of[tenant] = Place(self._make_policy)

    def pin(self, session: Session) -> str:
        """Pin a session, or keep it pinned as it grows; returns in a sentence why not, if so."""
        needed = sum(map(self._pin_nbytes, session.chain)) + session.beside_nbytes
        if refused := self._refusal(session, needed):
            self.unpin(session)
            return refused
        session.pinned = True
        self._pruning.pinned.put(session, needed)
        self._table.leave_cold(session)
        return ""

    def _pin_nbytes(self, block: Block) -> int:
        """Number of bytes that a block counts in a pinned session. A head that sessions share is kept exact within the
        heads' share, so that a pin counts only what the block would take otherwise."""
        nbytes, exact, _ = block.encoding
        if not nbytes:
            return self.bound(block)
        return min(nbytes, self.bound(block)) if exact >= self._table.shape.block_tokens else nbytes

    def _refusal(self, session: Session, needed: int) -> str:
        """Why the session cannot be pinned, if so: in words that tell its tenant nothing of what others have."""
        pinned, tenant = self._pruning.pinned, session.tenant
        others, own = (nbytes - pinned.of(session) for nbytes in (pinned.total, pinned.of_tenant[tenant]))
        whole, part = self.shares.pinned, min(1.0, self.shares.of_tenant(tenant))
        said = f"tiers.pinned_share is {whole:g}" + (f", the tenant's share {part:g}" if part < 1 else "")
        if own + needed > (allowed := int(whole * part * self.nbytes)):
            return (
                f"pin is refused: pinned sessions may take {allowed} bytes of the cold store ({said}), {own} are "
                f"taken, and this session needs {needed}"
            )
        if others + needed > int(whole * self.nbytes):
            return f"pin is refused: {needed} bytes are not left of what all tenants' pinned sessions may take ({said})"
        return ""

    def unpin(self, session: Session) -> None:
        session.pinned = False
        if self._pruning.pinned.take(session):
            self._table.enter_cold(session)
