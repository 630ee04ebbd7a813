"""Codes that are being read for requests, and what becomes of those that could not be."""

import sys
from collections.abc import Iterable, Sequence

from manthan.manager.sessions.anchors import Anchors
from manthan.manager.sessions.marks import Mark
from manthan.manager.sessions.pruning import Pruning
from manthan.manager.sessions.session import Block, CodeState, DropCause, Session, common_prefix
from manthan.manager.sessions.table import SessionTable


class Restores:
    """running: the sessions of running requests, by request id."""

    def __init__(self, table: SessionTable, pruning: Pruning, anchors: Anchors, running: dict[str, Session]) -> None:
        self._has_codes = table.shape.group is not None
        self._table, self._blocks, self._pruning, self._running = table, table.blocks, pruning, running
        self._anchors = anchors
        self.under_way: dict[str, list[Block]] = {}
        """By id of a request, or of a prefetch."""
        self.own: dict[str, int] = {}
        """By request id, how many blocks of its prompt its own session, or another of the same name, has brought this
        far; behind them a request takes only exact ones."""

    def match(self, keys: Sequence[bytes], request_id: str = "") -> int:
        """How many of these keys, from the first on without a gap, can be restored: those that are cold, or, where
        chains have no codes, known, and, where anchors are needed, no more than up to the deepest that stands."""
        blocks, count, cold = self._run(keys, request_id), -1, CodeState.COLD
        if self._has_codes:
            count = next((at for at, block in enumerate(blocks) if block.code is not cold), -1)
        count = len(blocks) if count < 0 else count
        own = sys.maxsize
        if blocks and request_id in self.own:
            own = max(0, self.own[request_id] - blocks[0].depth)
            if self._has_codes:
                count = next((at for at in range(own, count) if not self.is_exact(blocks[at])), count)
        if not self._anchors.is_needed:
            return count
        ends = range(count, 0, -1)
        return next((end for end in ends if self._stands(keys[end - 1], end <= own)), 0)

    def _stands(self, key: bytes, is_own: bool) -> bool:
        """True if a request can go on behind this block, from exact blocks where it is not its own."""
        anchor = self._anchors.at(key)
        return anchor is not None and anchor.stands and (is_own or all(map(self.is_exact, anchor.parts)))

    def is_exact(self, block: Block) -> bool:
        """True if the compressed block gives back, bit for bit, what was computed from exact blocks."""
        return block.mark is Mark.EXACT and self._table.shape.is_exact(block.group, block.encoding)

    def started(self, request_id: str, keys: Sequence[bytes]) -> None:
        blocks = self._run(keys, request_id) if self._has_codes else []
        if keys and (anchor := self._anchors.at(keys[-1])) is not None:
            blocks += anchor.parts
        self._blocks.pin(blocks, +1)
        self.under_way[request_id] = blocks

    def finished(self, request_id: str, failed: Iterable[bytes] = (), beside: Iterable[tuple[int, bytes]] = ()) -> None:
        """failed: blocks of the chain that could not be read. beside: those of other groups, by group and key."""
        blocks = self.under_way.pop(request_id, [])
        self._blocks.pin(blocks, -1)
        names: set[tuple[int | None, bytes]] = {(None, key) for key in failed} | set(beside)
        unreadable = [block for block in blocks if (block.group, block.key) in names] if names else []
        self._pruning.drop(unreadable, DropCause.FAILED)
        self._pruning.drop([block for block in blocks if not block.users], DropCause.ABANDONED)
        for block in unreadable:
            self._pruning.lose_anchors(block, DropCause.FAILED)
        self._pruning.bury([block for block in unreadable if block.group is None])
        self._table.fronts.read(blocks)

    def _run(self, keys: Sequence[bytes], request_id: str) -> list[Block]:
        """Blocks of these keys, up to the first that nobody names: the request's session has most of them in a row, so
        that they need not be looked up one by one."""
        first = self._blocks.get(keys[0]) if keys else None
        if first is None:
            return []
        session, at = self._running.get(request_id), first.depth
        if session is None or at >= len(session.chain) or session.chain[at] is not first:
            return self._blocks.run(keys)
        own = session.chain[at : at + len(keys)]
        common = common_prefix(own, keys)
        return own if common == len(keys) else own[:common] + self._blocks.run(keys[common:])
