"""Which blocks have an exact copy beside their codes: those of a session's first tokens, and those of its last."""

from collections.abc import Iterable
from itertools import islice

from manthan.manager.sessions.blocks import BlockTable
from manthan.manager.sessions.session import Block, CodeState, Session


class ExactCopies:
    """The copies come together with the codes or never: bf16 that was restored from codes has lost already.

    They are worth less than any codes: without its copies a session comes back, only a little worse. So codes take
    their room, and those of sessions that were used least recently go first. A block of several sessions has one copy,
    for as long as one of them has the block in its sink or in its window.
    sink: blocks that a session begins with. window: blocks that it ends with.
    """

    def __init__(self, blocks: BlockTable, sink: int, window: int) -> None:
        is_on = blocks.exact_parts > 0
        self._blocks, self._sink, self._window = blocks, sink if is_on else 0, window if is_on else 0
        self._drops: list[bytes] = []

    def take_drops(self) -> list[bytes]:
        """Blocks that lose their copy and keep their codes. Before any spill taken later is begun."""
        taken, self._drops = self._drops, []
        return taken

    @property
    def has_drops(self) -> bool:
        return bool(self._drops)

    # -- sessions -------------------------------------------------------------------------------------

    def used(self, session: Session) -> None:
        """The session's copies go last of all now: its window first among them, then its sink."""
        for block in reversed(self._places(session)):
            if block.exact:
                self._blocks.copies.move_to_end(block.key)

    def move_window(self, session: Session) -> None:
        """The session is about to be evicted: its window is the end of its chain now."""
        chain, old = session.chain, session.window
        session.window = range(max(0, len(chain) - self._window), len(chain))
        for depth in session.window:
            chain[depth].windows += 1
        for depth in old:
            chain[depth].windows -= 1
        self.review([chain[depth] for depth in old])

    def cut(self, session: Session, length: int) -> None:
        """The session's chain is about to be shortened."""
        old = session.window
        for depth in range(max(old.start, length), old.stop):
            session.chain[depth].windows -= 1
        session.window = range(min(old.start, length), min(old.stop, length))

    def order(self, session: Session, free: int, left: int) -> None:
        """What is about to be encoded of the session's sink and window gets a copy, as far as there is room.

        free: blocks' room that nobody has taken. left: how much of it the session's tenant may take. The copies of
        others make room for these; their codes do not.
        """
        places, parts = self._places(session), self._blocks.exact_parts
        if not places:
            return
        self.used(session)
        wanted = [b for b in places if b.code is CodeState.QUEUED and not b.exact and b.tenant == session.tenant]
        del wanted[max(0, left // parts) :]
        others = len(self._blocks.copies) - sum(block.exact for block in places)
        free += parts * self._drop_first(-(-(len(wanted) * parts - free) // parts), others)
        for block in reversed(wanted[: max(0, free // parts)]):
            self._blocks.mark_exact(block, True)

    def _places(self, session: Session) -> list[Block]:
        """The blocks of its sink, and then those of its window, the last one first."""
        chain = session.chain
        window = range(session.window.stop - 1, max(self._sink, session.window.start) - 1, -1)
        return chain[: self._sink] + [chain[depth] for depth in window]

    # -- copies ---------------------------------------------------------------------------------------

    def make_room(self, short: int, tenant: str | None = None) -> None:
        """Drop copies, of one tenant or of all, until so many blocks more fit, or there are none to drop."""
        if copies := len(self._blocks.copies):
            self._drop_first(-(-short // self._blocks.exact_parts), copies, tenant)

    def made(self, block: Block, everywhere: bool) -> None:
        """Every rank has answered for the copy; it may have become superfluous meanwhile."""
        if everywhere:
            self.review([block])
        else:
            self.spoiled([block.key])

    def review(self, blocks: Iterable[Block]) -> None:
        """Copies of these blocks that no session wants any more go; those in use are looked at again afterwards."""
        if self._blocks.copies:
            self._drop([b for b in blocks if b.copy_droppable and not (b.windows or b.depth < self._sink)])

    def spoiled(self, keys: Iterable[bytes]) -> None:
        """These copies are not what they should be on every rank."""
        blocks = map(self._blocks.get, keys)
        self._drop([block for block in blocks if block is not None and block.copy_droppable])

    def count(self, session: Session) -> int:
        """How many of the session's blocks have a copy."""
        return sum(block.exact for block in self._places(session))

    def of(self, keys: Iterable[bytes]) -> frozenset[bytes]:
        """Those of these blocks that have a copy, or are about to get one."""
        copies = self._blocks.copies
        return frozenset(filter(copies.__contains__, keys)) if copies else frozenset()

    def _drop_first(self, count: int, among: int, tenant: str | None = None) -> int:
        """Drop so many of the first copies, if there are; how many that were."""
        if count <= 0:
            return 0
        first = islice(self._blocks.copies.values(), among)
        fit = (block for block in first if block.copy_droppable and tenant in (None, block.tenant))
        return self._drop(list(islice(fit, count)))

    def _drop(self, blocks: list[Block]) -> int:
        self._drops += [block.key for block in blocks if block.code is CodeState.COLD]
        for block in blocks:
            self._blocks.mark_exact(block, False)
        return len(blocks)
