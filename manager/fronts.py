"""Estimate of the compressed blocks in each front tier, for questions about the tiers that have a session.

A front tier is a fast tier in front of a slower tier: GPU memory in front of RAM, RAM in front of a disk or Redis, or a
disk in front of Redis. The workers keep recently used blocks in front tiers. Only the workers know which blocks.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from manthan.manager.events import Evicted
from manthan.manager.session.blocks import FrontTier, Rows
from manthan.manager.session.manager import SessionManager
from manthan.manager.session.table import Session


class FrontTiers:
    """Front tiers, the fastest first.

    Tiers are numbered from 0, the fastest. The last tier, behind all front tiers, has the number `len(self)`.
    """

    def __init__(self, manager: SessionManager, tiers: Sequence[FrontTier]) -> None:
        self._table, self._blocks = manager.table, manager.blocks
        self._used: list[OrderedDict[str, None]] = [OrderedDict() for _ in tiers]
        """By front tier, ids of the sessions that have blocks there, in the order in which they last went cold."""
        self.budgets = tuple(each.nbytes for each in tiers)  # in bytes
        self.all_moved = (1 << len(tiers)) - 1  # `BlockTable.moved` of a block in the last tier only
        self._fills_on_read = any(each.fills_on_read for each in tiers)
        self.keeps_behind = self._fills_on_read or not tiers
        """True if the last tier has all blocks, also those that a front tier has."""
        if tiers:
            manager.table.gone.append(self._forget)
            manager.read = self.read
            manager.events.subscribe(self._evicted, Evicted)

    def __len__(self) -> int:
        return len(self._used)

    def _evicted(self, event: Evicted) -> None:
        for order in self._used:
            order[event.session_id] = None
            order.move_to_end(event.session_id)

    def _forget(self, session: Session) -> None:
        for order in self._used:
            order.pop(session.session_id, None)

    def settle(self) -> None:
        """Note for each front tier that blocks have left it, until the rest of its blocks fits the tier's budget.

        Sessions lose blocks in the order in which they went cold, each from the end. If reads fill front tiers, skip
        sessions that are not cold, because their blocks were read or stored recently.
        """
        blocks = self._blocks
        for tier, (order, budget) in enumerate(zip(self._used, self.budgets, strict=True)):
            short = blocks.taken_nbytes - blocks.moved_nbytes[tier] - budget
            emptied = []
            for session_id in order if short > 0 else ():
                session = self._table.by_id[session_id]
                if self._fills_on_read and not session.is_cold:
                    continue
                rows = session.rows[::-1]
                rows = rows[blocks.is_saved(rows) & ((blocks.moved[rows] >> tier & 1) == 0)]
                freed = np.cumsum(blocks.nbytes[rows].astype(np.int64))
                rows = rows[: int(np.searchsorted(freed, short)) + 1]
                blocks.move(rows, blocks.moved[rows] | np.uint8(1 << tier))
                short -= int(freed[len(rows) - 1]) if len(rows) else 0
                if short <= 0:
                    break
                emptied.append(session_id)
            for session_id in emptied:
                del order[session_id]

    def read(self, rows: Rows) -> None:
        """Note that blocks were read. If reads fill front tiers, all tiers faster than the one read have them now."""
        if self._fills_on_read:
            rows = rows[(self._blocks.moved[rows] & 1) > 0]
            moved = self._blocks.moved[rows]
            self._blocks.move(rows, moved & (moved + 1))

    def tier_of(self, row: int) -> int:
        """Return the number of the fastest tier that has a saved block. row: the block's row in the BlockTable."""
        moved = int(self._blocks.moved[row])
        return (~moved & (moved + 1)).bit_length() - 1

    def has(self, tier: int, moved: int) -> bool:
        """True if a tier has a block. tier: number of the tier. moved: the block's value in `BlockTable.moved`."""
        return not moved >> tier & 1 if tier < len(self) else self.keeps_behind or moved == self.all_moved
