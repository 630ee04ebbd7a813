"""What other engines have in a cold store that engines share, and what its directory is to be told of ours."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from manthan.manager.sessions.anchors import Anchors
from manthan.manager.sessions.blocks import ELSEWHERE
from manthan.manager.sessions.chains import common_prefix
from manthan.manager.sessions.marks import Mark
from manthan.manager.sessions.pruning import Pruning
from manthan.manager.sessions.session import (
    Block,
    CodeState,
    DropCause,
    Encoding,
    FoundAnchor,
    Session,
    SessionState,
    Stranger,
)
from manthan.manager.sessions.table import SessionTable


class Elsewhere:
    """Takes in what the store's directory says, and keeps account of what it is to be told.

    The budget is of all engines together: what others have stored is not this one's to use. Their sessions make room
    by their age beside the policy's order of this engine's own.
    """

    def __init__(self, table: SessionTable, pruning: Pruning, anchors: Anchors, running: dict[str, Session]) -> None:
        self._table, self._blocks, self._pruning, self._running = table, table.blocks, pruning, running
        self._anchors = anchors
        self.nbytes = 0
        """Bytes in the store that this engine does not know of."""
        self._strangers: deque[Stranger] = deque()  # in the order of their last use
        self._departed: list[Stranger] = []

    def listen(self) -> None:
        """From now on somebody asks for changes."""
        self._table.changed = {}

    # -- what the directory says ----------------------------------------------------------------------

    def known(self, keys: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on without a gap, this engine has, as bf16 or as codes."""
        blocks = map(self._blocks.get, keys)
        return sum(1 for _ in takewhile(lambda b: b is not None and (b.hot or b.code is CodeState.COLD), blocks))

    def found(
        self, request_id: str, keys: Sequence[bytes], sizes: Sequence[int], anchor: FoundAnchor | None = None
    ) -> None:
        """The store has the last of these blocks, which take so many bytes; those before them were known. anchor: that
        it has behind some of them."""
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
        """Whether the session's chain goes as far as the anchor, with these keys."""
        end = anchor.depth
        return 0 < end <= len(session.chain) and session.chain[end - 1].key == keys[end - 1]

    def _store(self, block: Block | None, nbytes: int) -> None:
        """Another engine had it stored."""
        if block is not None and block.code is CodeState.NONE and block.users:
            self._blocks.store(block, Encoding.of(nbytes), ELSEWHERE)
            block.mark = Mark.DERIVED  # nothing tells what it was
            self._blocks.mark_moved(block, self._table.fronts.all_moved)
            self.nbytes = max(0, self.nbytes - nbytes)

    def counted(self, used: int | None, strangers: Iterable[Stranger] | None) -> None:
        """So many bytes are in the store or about to be, whoever's they are; and these are others' sessions.

        None for what nobody has counted.
        """
        if used is not None:
            self.nbytes = max(0, used - self._blocks.stored)
        if strangers is not None:
            mine = self._table.by_id
            others = (stranger for stranger in strangers if stranger.session_id not in mine)
            self._strangers = deque(sorted(others, key=lambda stranger: stranger.last_used))

    def not_stored(self, keys: Iterable[bytes], beside: Iterable[tuple[int, bytes]] = ()) -> None:
        """These codes are not there any more. beside: those of other groups, by group and key."""
        names = [*((None, key) for key in keys), *beside]
        blocks = [block for group, key in names if (block := self._blocks.get(key, group)) is not None]
        self._pruning.drop(blocks, DropCause.FAILED)
        for block in blocks:
            if block.group is None:
                self._pruning.bury([block])
            elif block.code is CodeState.NONE:
                self._pruning.lose_anchors(block, DropCause.FAILED)

    def expire(self, session_ids: Iterable[str]) -> None:
        """These sessions were not used for so long that their codes are gone."""
        for session_id in session_ids:
            session = self._table.by_id.get(session_id)
            if session is None or session.state is SessionState.EVICTING:
                continue
            if session.state is SessionState.COLD:
                self._pruning.cut(session, 0, DropCause.EXPIRED)
            else:
                self._pruning.drop([block for block in session.chain if block.users == 1], DropCause.EXPIRED)
                self._pruning.leave_anchors(session, DropCause.EXPIRED)
                self._table.touch(session)

    def emptied(self) -> None:
        """All codes are gone, but for what is being written."""
        gone = [block for block in self._blocks if block.droppable]
        for block in gone:
            self._blocks.forget(block)
        for block in gone:
            if block.group is not None:
                self._pruning.lose_anchors(block, DropCause.FAILED)
        for session in [s for s in self._table.by_id.values() if s.state is SessionState.COLD]:
            self._pruning.end_before_gone(session)
        self.nbytes, self._strangers = 0, deque()

    def reset(self) -> None:
        self.nbytes, self._strangers, self._departed = 0, deque(), []
        if self._table.changed is not None:
            self._table.changed = {}

    # -- what the directory is to be told -------------------------------------------------------------

    def take_changes(self) -> list[tuple[str, Session | None]]:
        """Sessions that are not what they were at the last call, by id; None for one that is gone."""
        taken, self._table.changed = self._table.changed or {}, {}
        return [(session_id, self._table.by_id.get(session_id)) for session_id in taken]

    def take_departed(self) -> list[Stranger]:
        """Other engines' sessions that have to make room."""
        taken, self._departed = self._departed, []
        return taken

    def make_room(self, before: float, short: Callable[[], int]) -> None:
        """Others' sessions that were not used since `before` go, until nothing is short."""
        while self._strangers and short() > 0 and self._strangers[0].last_used < before:
            stranger = self._strangers.popleft()
            self._departed.append(stranger)
            self.nbytes = max(0, self.nbytes - stranger.nbytes)

    def __bool__(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._departed or self._table.changed)
