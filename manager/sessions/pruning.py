"""How chains get shorter, and what goes with it: codes that nobody needs, evictions that wait for them, pins."""

from collections.abc import Callable, Iterable, Sequence

from manthan.manager.sessions.anchors import Anchors
from manthan.manager.sessions.marks import Mark
from manthan.manager.sessions.orders import Orders
from manthan.manager.sessions.pins import Pins
from manthan.manager.sessions.session import (
    Block,
    BlockName,
    CodeState,
    DropCause,
    News,
    NewsKind,
    Session,
    SessionState,
)
from manthan.manager.sessions.table import SessionTable

_NONE = CodeState.NONE


class Pruning:
    """Sessions keep a head of their chain that is hot or cold throughout; the rest goes. Cold ones keep no more than
    can be gone on from."""

    def __init__(
        self,
        table: SessionTable,
        orders: Orders,
        anchors: Anchors,
        mark: Callable[[BlockName], Mark | None],
    ) -> None:
        self._table, self._orders, self._anchors, self._mark = table, orders, anchors, mark
        self.pinned = Pins()

    def mark(self, block: Block) -> Mark | None:
        """Mark of the copy in the pool; None if there is none."""
        return self._mark(block.name)

    def is_computed(self, block: Block) -> bool:
        """True if the pool has a copy that the model computed."""
        return self.mark(block) in (Mark.EXACT, Mark.DERIVED)

    def cut(self, session: Session, length: int, cause: DropCause) -> None:
        """Shorten a chain; codes, and in an eviction bf16 copies, that nobody needs any more go."""
        self.bury(self._shorten(session, length, cause))

    def to_anchor(self, session: Session) -> None:
        """A cold session ends with its deepest anchor."""
        length = self.usable(session, len(session.chain))
        if session.state is SessionState.COLD and length < len(session.chain):
            self.cut(session, length, DropCause.ABANDONED)

    def usable(self, session: Session, length: int) -> int:
        """How many of so many first blocks of its chain are worth keeping cold: up to its deepest anchor."""
        return self._anchors.deepest(session, length)

    def leave_anchors(self, session: Session, cause: DropCause) -> None:
        """The session gives up where it could be gone on from."""
        self._anchors.cut(session, 0, cause)

    def lose_anchors(self, block: Block, cause: DropCause) -> None:
        """A block of another group is not to be had: nobody goes on from where it is needed."""
        for session in self._anchors.lost(block, cause):
            self.to_anchor(session)

    def _shorten(self, session: Session, length: int, cause: DropCause) -> list[Block]:
        if session.state in (SessionState.COLD, SessionState.EVICTING):
            length = self.usable(session, length)
        cut = session.chain[length:]
        self._tell(session, cut, cause)
        self.unwait(session, cut)
        self._anchors.cut(session, length, cause)
        self._table.truncate(session, length)
        if not session.chain:
            self.pinned.take(session)
            session.pinned, session.pinned_until = False, None
        is_evicted = session.state is SessionState.EVICTING
        self._orders.releases += [
            block.key for block in cut if not block.hot and (is_evicted or self.mark(block) is Mark.DECODED)
        ]
        self.drop([block for block in cut if not block.users], cause)
        return cut

    def _tell(self, session: Session, blocks: Sequence[Block], cause: DropCause) -> None:
        """The session loses these; what has no codes is not missed."""
        cold = CodeState.COLD
        lost = [block.encoding.nbytes for block in blocks if block.code is cold]
        if lost:
            kind = NewsKind.RELEASED if cause in (DropCause.RELEASED, DropCause.EXPIRED) else NewsKind.DROPPED
            news = News(session.session_id, kind, blocks=len(lost), nbytes=sum(lost), cause=str(cause))
            self._orders.news.append(news)

    def bury(self, blocks: Iterable[Block]) -> None:
        """Cold sessions end before the first of these blocks of a chain that is gone; idle ones before the first whose
        only copy was decoded, which may not be encoded again.

        Sessions that are being evicted look for themselves when they are done.
        """
        lost = [block for block in blocks if block.code is _NONE and block.users]
        decoded = next((block for block in lost if block.hot and self.mark(block) is Mark.DECODED), None)
        if decoded is not None:
            ends = self._end_before(decoded, SessionState.IDLE)
            self._orders.releases.append(decoded.key)
            for lost_blocks in ends:  # of which cold sessions may have had no codes
                self.bury(lost_blocks)
        gone = next((block for block in lost if not block.hot), None)  # the idle ones may have been the last
        if gone is not None:
            self._end_before(gone, SessionState.COLD)

    def _end_before(self, block: Block, state: SessionState) -> list[list[Block]]:
        """Cut the sessions of that state before the block. Returns the blocks that each has lost."""
        holders = [one for one in self._table.by_id.values() if one.state is state and one.has(block)]
        return [self._shorten(session, block.depth, DropCause.ABANDONED) for session in holders]

    def forget_session(self, session: Session, cause: DropCause) -> None:
        """Nothing of it is to be kept, neither codes nor bf16, nor that it be known again."""
        keys = [block.key for block in session.chain]
        self._table.tips.forget(session)
        self.cut(session, 0, cause)
        self._orders.releases += keys

    def give(self, session: Session, blocks: Sequence[Block], cause: DropCause) -> None:
        """Drop codes that a session has in the pool as well."""
        self._tell(session, blocks, cause)
        self.drop(blocks, cause)

    def drop(self, blocks: Iterable[Block], cause: DropCause) -> None:
        """Drop the codes of those that may be."""
        cold = CodeState.COLD
        if droppable := [block for block in blocks if block.code is cold and not block.pins]:
            self.forget_codes(droppable, cause)

    def forget_codes(self, blocks: Sequence[Block], cause: DropCause) -> None:
        self._orders.forget_codes(blocks, cause)

    def unwait(self, session: Session, blocks: Iterable[Block]) -> None:
        """An eviction waits for these no longer. Encodings go on; what only it had queued is taken back."""
        if not session.pending:
            return
        for block in blocks:
            if block.waiters and session in block.waiters:
                block.await_no_longer(session)
                session.pending -= 1
                if not block.waiters and block.code is CodeState.QUEUED:
                    self._orders.take_back(block)
