"""Heads that several sessions share are kept exact, so that all of them may be served from one compressed copy."""

from collections.abc import Callable, Iterator, Sequence

from manthan.manager.sessions.budget import ColdBudget
from manthan.manager.sessions.marks import Mark
from manthan.manager.sessions.pruning import Pruning
from manthan.manager.sessions.session import Block, CodeState, Encoding, Session
from manthan.manager.sessions.table import SessionTable


class SharedHeads:
    """Chooses the blocks of shared heads whose tokens are all kept exact, within a share of the budget.

    Most shared first: within a session from the head on, because every session that has a block has those before it. A
    block makes way for one that more sessions share: it is encoded again from the exact copy in the pool.

    Args:
        wanted: returns the encoding of a block that is not shared.
    """

    def __init__(
        self, table: SessionTable, budget: ColdBudget, pruning: Pruning, wanted: Callable[[Block], Encoding]
    ) -> None:
        self._table, self._budget, self._pruning, self._wanted = table, budget, pruning, wanted
        self._kept: dict[Block, None] = {}

    def add_to(self, blocks: Sequence[Block], wanted: list[Encoding], tenant: str) -> None:
        """Replace the encodings in `wanted` of those `blocks` that are to be kept exact."""
        left: float | None = None
        for at, block in enumerate(blocks):
            if not self._is_shared(block) or self._pruning.mark(block) is not Mark.EXACT:
                return
            left = self._left(tenant) if left is None else left
            encoding = self._exact(block)
            left -= encoding.nbytes
            if left < 0:
                return
            wanted[at] = encoding
            self._kept[block] = None

    def replacements(self, session: Session) -> Iterator[tuple[Block, Encoding]]:
        """Blocks with a compressed copy and an exact copy in the pool, and the encoding that is to replace the former:
        an exact one for the session's shared head, a lossy one for blocks that make way for it."""
        left: float | None = None
        for block in session.chain:
            if not self._is_shared(block):
                return
            if not block.droppable or self._is_kept(block) or self._pruning.mark(block) is not Mark.EXACT:
                continue
            left = self._left(block.tenant) if left is None else left
            encoding = self._exact(block)
            if encoding.nbytes > min(self._budget.free, self._budget.left(block.tenant)):
                return
            left -= encoding.nbytes
            if left < 0:
                yield from self._demoted(block)
                return
            self._kept[block] = None
            yield block, encoding

    def _demoted(self, block: Block) -> Iterator[tuple[Block, Encoding]]:
        needed = self._exact(block).nbytes
        for kept in sorted(self._kept, key=lambda kept: (kept.users, -kept.depth)):
            if needed <= 0 or kept.users >= block.users:
                return
            if kept.droppable and self._pruning.mark(kept) is Mark.EXACT:
                needed -= kept.encoding.nbytes
                yield kept, self._wanted(kept)

    def _is_shared(self, block: Block) -> bool:
        shape = self._table.shape
        return block.users > 1 and shape.group is not None and shape.block_tokens in shape.bounds

    def _exact(self, block: Block) -> Encoding:
        tokens = self._table.shape.block_tokens
        return Encoding.of(self._table.shape.bounds[tokens], tokens, self._wanted(block).codec)

    def _left(self, tenant: str) -> float:
        """Bytes of the share that are left to a tenant; one with a quota has a part of its own."""
        self._kept = {block: None for block in self._kept if self._is_kept(block)}
        part = min(1.0, self._budget.shares.of_tenant(tenant))
        taken = sum(block.encoding.nbytes for block in self._kept if part == 1 or block.tenant == tenant)
        return self._budget.shares.heads * part * self._budget.nbytes - taken

    def _is_kept(self, block: Block) -> bool:
        return block.code is not CodeState.NONE and block.encoding.exact >= self._table.shape.block_tokens
