"""Codes that are being read for requests, and what becomes of those that could not be."""

from collections.abc import Iterable, Iterator, Sequence

from manthan.manager.sessions.anchors import Anchors
from manthan.manager.sessions.pruning import Pruning
from manthan.manager.sessions.session import Block, CodeState, DropCause, Session
from manthan.manager.sessions.table import SessionTable


class Restores:
    """running: the sessions of running requests, by request id."""

    def __init__(self, table: SessionTable, pruning: Pruning, anchors: Anchors, running: dict[str, Session]) -> None:
        self._has_codes = table.shape.group is not None
        self._table, self._blocks, self._pruning, self._running = table, table.blocks, pruning, running
        self._anchors = anchors
        self.under_way: dict[str, list[Block]] = {}
        """By id of a request, or of a prefetch."""
        self._read: dict[str, list[Block]] = {}  # by id of a running request

    def match(self, keys: Iterable[bytes]) -> int:
        """How many of these keys, from the first on without a gap, can be restored: those that are cold, or, where
        chains have no codes, known, and, where anchors are needed, no more than up to the deepest that stands."""
        count, best, find, cold = 0, 0, self._blocks.of_chain, CodeState.COLD
        has_codes, is_needed = self._has_codes, self._anchors.is_needed
        for key in keys:
            block = find(key)
            if block is None or (has_codes and block.code is not cold):
                break
            count += 1
            if is_needed and (anchor := self._anchors.at(key)) is not None and anchor.stands:
                best = count
        return best if is_needed else count

    def started(self, request_id: str, keys: Sequence[bytes]) -> None:
        found = keys if self._has_codes else ()
        blocks = [block for key in found if (block := self._blocks.of_chain(key)) is not None]
        if keys and (anchor := self._anchors.at(keys[-1])) is not None:
            blocks += anchor.parts
        self._blocks.pin(blocks, +1)
        self.under_way[request_id] = blocks

    def finished(self, request_id: str, failed: Iterable[bytes], beside: Iterable[tuple[int, bytes]] = ()) -> None:
        """failed: blocks of the chain that could not be read. beside: those of other groups, by group and key."""
        blocks = self.under_way.pop(request_id, [])
        self._blocks.pin(blocks, -1)
        if request_id in self._running:
            self._read[request_id] = [block for block in blocks if block.group is None]
        names: set[tuple[int | None, bytes]] = {(None, key) for key in failed} | set(beside)
        unreadable = [block for block in blocks if (block.group, block.key) in names]
        self._pruning.drop(unreadable, DropCause.FAILED)
        self._pruning.drop([block for block in blocks if not block.users], DropCause.ABANDONED)
        for block in unreadable:
            self._pruning.lose_anchors(block, DropCause.FAILED)
        self._pruning.bury([block for block in unreadable if block.group is None])
        if self._table.front is not None:
            self._table.front.read(blocks)

    def request_ended(self, request_id: str) -> None:
        self._read.pop(request_id, None)

    def read_by_running(self) -> Iterator[tuple[Session, list[Block]]]:
        """Sessions with a running request, and the blocks that were read for it."""
        return ((self._running[request_id], blocks) for request_id, blocks in self._read.items())
