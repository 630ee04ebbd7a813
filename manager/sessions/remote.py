"""Blocks that other engines have stored in a tier which engines share."""

from collections.abc import Sequence
from itertools import takewhile

from manthan.manager.sessions.anchors import Anchors
from manthan.manager.sessions.blocks import NOBODY
from manthan.manager.sessions.marks import Mark
from manthan.manager.sessions.session import Block, CodeState, Encoding, FoundAnchor, Session, common_prefix
from manthan.manager.sessions.table import SessionTable


class RemoteBlocks:
    """Enters blocks that a lookup has found into the sessions that asked for them."""

    def __init__(self, table: SessionTable, anchors: Anchors, running: dict[str, Session]) -> None:
        self._table, self._blocks, self._anchors, self._running = table, table.blocks, anchors, running

    def known(self, keys: Sequence[bytes]) -> int:
        """Number of these blocks, up to the first gap, that this engine has itself, resident or saved."""
        blocks = map(self._blocks.get, keys)
        return sum(1 for _ in takewhile(lambda b: b is not None and (b.hot or b.code is CodeState.COLD), blocks))

    def found(
        self, request_id: str, keys: Sequence[bytes], sizes: Sequence[int], anchor: FoundAnchor | None = None
    ) -> None:
        """The store has the last `len(sizes)` of these blocks. Those before them were known.

        Args:
            sizes: Bytes of each, of all ranks together.
            anchor: Blocks of other groups that it has behind some of them.
        """
        session = self._running.get(request_id)
        if session is None:
            return
        known = common_prefix(session.chain, keys)
        if known == len(session.chain):
            self._table.extend(session, keys[known:])
        for key, nbytes in zip(keys[len(keys) - len(sizes) :], sizes, strict=True):
            self._store(self._blocks.get(key), nbytes)
        if anchor is not None and self._anchors.is_needed and self._is_at(session, anchor, keys):
            placed = self._anchors.place(session, anchor.depth, anchor.parts)
            for (group, key, _), nbytes in zip(anchor.parts, anchor.sizes, strict=True):
                self._store(self._blocks.get(key, group), nbytes)
            self._anchors.settle(placed)

    def _is_at(self, session: Session, anchor: FoundAnchor, keys: Sequence[bytes]) -> bool:
        """True if the session's chain goes as far as the anchor, with these keys."""
        end = anchor.depth
        return 0 < end <= len(session.chain) and session.chain[end - 1].key == keys[end - 1]

    def _store(self, block: Block | None, nbytes: int) -> None:
        if block is not None and block.code is CodeState.NONE and block.users:
            self._blocks.store(block, Encoding.of(nbytes), NOBODY)
            block.mark = Mark.DERIVED  # nothing tells what it was
            self._blocks.mark_moved(block, self._table.fronts.all_moved)
