"""Where chains can be gone on from, for models with several KV cache groups: what the other groups need stands at a few
places of a chain only, the last blocks of a window or a recurrent state.

An anchor goes cold as soon as its place is reached, since the pool loses such blocks first. Of those that stand, a
session keeps the deepest, that where its last prompt ends (to which a client returns that wants another answer, or
leaves out what the model thought), and, while not all of its chain is cold, the deepest that can be restored already.
What a cold chain has behind its deepest anchor is worth nothing.
"""

from collections.abc import Callable, Iterable

from manthan.manager.sessions.blocks import BlockTable
from manthan.manager.sessions.orders import Orders
from manthan.manager.sessions.session import HOT_STATES, Anchor, Beside, Block, CodeState, DropCause, Session


class Anchors:
    """All of them, and who needs them. is_needed: whether the model has groups that need any. touch: is told of
    sessions whose anchors are others than before."""

    def __init__(self, blocks: BlockTable, orders: Orders, is_needed: bool, touch: Callable[[Session], None]) -> None:
        self._blocks, self._orders, self.is_needed, self._touch = blocks, orders, is_needed, touch
        self._at: dict[bytes, Anchor] = {}
        self._of: dict[Block, dict[bytes, Anchor]] = {}
        self._standing: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._at)

    @property
    def standing(self) -> int:
        """How many are in the cold store with all that belongs to them."""
        return len(self._standing)

    def at(self, key: bytes) -> Anchor | None:
        """That behind the block of this key."""
        return self._at.get(key)

    def with_part(self, block: Block) -> Iterable[Anchor]:
        """Those that a block of another group belongs to."""
        return self._of.get(block, {}).values()

    def place(self, session: Session, depth: int, parts: Beside) -> Anchor:
        """The session wants one behind so many blocks of its chain."""
        last = session.chain[depth - 1]
        anchor = self._at.get(last.key)
        if anchor is None:
            blocks = [self._blocks.obtain_beside(*part, session) for part in parts]
            anchor = self._at[last.key] = Anchor(last.key, depth, blocks)
            self._blocks.use(blocks, +1)
            for block in blocks:
                self._of.setdefault(block, {})[anchor.key] = anchor
        if session not in anchor.sessions:
            anchor.sessions[session] = None
            session.anchors.append(anchor)
            session.anchors.sort(key=lambda anchor: anchor.depth)
            self._touch(session)
        return anchor

    def deepest(self, session: Session, length: int) -> int:
        """How much of so many first blocks of its chain ends with an anchor, be it still in the making."""
        if not self.is_needed:
            return length
        return max((anchor.depth for anchor in session.anchors if anchor.depth <= length), default=0)

    def is_hot(self, block: Block) -> bool:
        """Whether a session whose KV is in the pool goes on with a block of some."""
        return any(session.state in HOT_STATES for anchor in self.with_part(block) for session in anchor.sessions)

    def cut(self, session: Session, length: int, cause: DropCause) -> None:
        """The session's chain is about to be shortened."""
        for anchor in [anchor for anchor in session.anchors if anchor.depth > length]:
            self.leave(session, anchor, cause)

    def leave(self, session: Session, anchor: Anchor, cause: DropCause) -> None:
        """The session needs it no more; what nobody needs goes."""
        self._touch(session)
        session.anchors.remove(anchor)
        del anchor.sessions[session]
        if not anchor.sessions:
            self._remove(anchor, cause)

    def stored(self, block: Block) -> None:
        """A block of some is cold now."""
        for anchor in list(self.with_part(block)):
            for session in anchor.sessions:
                self._touch(session)
            self.settle(anchor)

    def settle(self, anchor: Anchor) -> None:
        """Where it stands, its sessions need hardly any of those before it."""
        if anchor.stands:
            self._standing.add(anchor.key)
            for session in list(anchor.sessions):
                self.tidy(session)

    def tidy(self, session: Session) -> None:
        """The session leaves those that a deeper one makes worthless: that behind the last block is none without the
        codes of all before it, so that the deepest that has them is kept until then."""
        standing = [anchor for anchor in session.anchors if anchor.stands]
        if len(standing) < 2:
            return
        chain = session.chain
        cold = next((at for at, block in enumerate(chain) if block.code is not CodeState.COLD), len(chain))
        ready = [anchor for anchor in standing if anchor.depth <= cold]
        for anchor in standing[:-1]:
            if anchor not in ready[-1:] and anchor.depth != session.prompt_depth:
                self.leave(session, anchor, DropCause.ABANDONED)

    def lost(self, block: Block, cause: DropCause) -> list[Session]:
        """A block of some is not to be had: they are none any more. Returns whose they were."""
        found: dict[Session, None] = {}
        for anchor in list(self.with_part(block)):
            for session in list(anchor.sessions):
                found[session] = None
                self.leave(session, anchor, cause)
        return list(found)

    def _remove(self, anchor: Anchor, cause: DropCause) -> None:
        del self._at[anchor.key]
        self._standing.discard(anchor.key)
        idle = []
        for block in anchor.parts:
            of_block = self._of[block]
            del of_block[anchor.key]
            if not of_block:
                del self._of[block]
                idle.append(block)
        self._blocks.use(anchor.parts, -1)
        for block in idle:
            if block.code is CodeState.QUEUED:
                self._orders.take_back(block)
        self._orders.forget_codes([block for block in idle if block.droppable], cause)
