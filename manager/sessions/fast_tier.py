"""Estimate of the compressed blocks in each fast tier: GPU memory before RAM, RAM before a disk, a disk before Redis.

The workers keep these tiers by LRU. The estimate is for those who ask where a session's blocks are.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from manthan.manager.sessions.blocks import BlockTable
from manthan.manager.sessions.session import Block, CodeState, Session, SessionState


class Fast(NamedTuple):
    """A fast tier: its bytes, and whether what is read from a slower one behind it comes back to it."""

    nbytes: int
    fills_on_read: bool


class FastTiers:
    """The tiers in front of the last one, fastest first; none of them where there is one place for all codes.

    A tier has a number, the fastest 0; the last one's is how many of these there are.
    """

    def __init__(self, blocks: BlockTable, fast: Sequence[Fast]) -> None:
        self._blocks = blocks
        self._used: list[OrderedDict[str, None]] = [OrderedDict() for _ in fast]
        """By tier, ids of sessions with codes there, the one that went cold last last."""
        self.budgets = tuple(each.nbytes for each in fast)
        """In bytes."""
        self.all_moved = (1 << len(fast)) - 1
        """`Block.moved` of a block whose codes are only in the last tier."""
        self._fills_on_read = any(each.fills_on_read for each in fast)
        self.keeps_behind = self._fills_on_read or not fast
        """Whether the last tier has all codes, also those that are in others."""

    def __len__(self) -> int:
        return len(self._used)

    def used(self, session_id: str) -> None:
        """A session went cold, so that its codes are in all of them."""
        for order in self._used:
            order[session_id] = None
            order.move_to_end(session_id)

    def forget(self, session_id: str) -> None:
        """The session is gone."""
        for order in self._used:
            order.pop(session_id, None)

    def settle(self, sessions: Mapping[str, Session]) -> None:
        """Mark the tails of the least recently used sessions as moved, until the rest fits each tier's budget.

        Sessions in use are skipped where reads fill the tier: their blocks were just read.
        """
        for tier, (order, budget) in enumerate(zip(self._used, self.budgets, strict=True)):
            short = self._blocks.stored - self._blocks.moved[tier] - budget
            emptied = []
            for session_id in order if short > 0 else ():
                session = sessions[session_id]
                if self._fills_on_read and session.state is not SessionState.COLD:
                    continue
                for block in reversed(session.chain):
                    if short <= 0:
                        break
                    if block.code is CodeState.COLD and not block.moved >> tier & 1:
                        self._blocks.mark_moved(block, block.moved | 1 << tier)
                        short -= block.encoding.nbytes
                if short <= 0:
                    break
                emptied.append(session_id)
            for session_id in emptied:
                del order[session_id]

    def read(self, blocks: Iterable[Block]) -> None:
        """These codes were read: those tiers have them now that are in front of the one that had."""
        if self._fills_on_read:
            for block in blocks:
                if block.moved & 1:
                    self._blocks.mark_moved(block, block.moved & (block.moved + 1))

    def has(self, tier: int, moved: int) -> bool:
        """Whether a tier has the codes of a block that left these; see `Block.moved`."""
        return not moved >> tier & 1 if tier < len(self) else self.keeps_behind or moved == self.all_moved

    def has_all(self, tier: int) -> bool:
        """Whether a tier has all codes."""
        return tier == len(self) and self.keeps_behind
