"""A session memory manager whose cold store other engines share, and which outlives the engine."""

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any

from manthan.manager.sessions.chains import common_prefix
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import CodeState, DropCause, Session, SessionState, Stranger


class SharedSessionManager(SessionMemoryManager):
    """Takes in what the store's directory says, and keeps account of what the directory is to be told.

    The budget is of all engines together: what others have stored is not this one's to use. Their sessions make room
    by their age beside the policy's order of this engine's own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.elsewhere = 0
        """Blocks in the store that this engine does not know."""
        self._strangers: list[Stranger] = []  # in the order of their last use
        self._departed: list[Stranger] = []
        self.table.changed = {}

    @property
    def capacity_blocks(self) -> int:
        return max(0, self.total_blocks - self.elsewhere)

    # -- what the directory says ----------------------------------------------------------------------

    def known(self, keys: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on without a gap, this engine has, as bf16 or as codes."""
        blocks = map(self.blocks.get, keys)
        return sum(1 for _ in takewhile(lambda b: b is not None and (b.hot or b.code is CodeState.COLD), blocks))

    def found(self, request_id: str, keys: Sequence[bytes], first: int) -> None:
        """The store has these blocks, from the `first` of them on; those before it were known."""
        session = self._running.get(request_id)
        if session is None:
            return
        known = common_prefix(session.chain, keys)
        if known == len(session.chain):
            self.table.extend(session, keys[known:])
        for key in keys[first:]:
            block = self.blocks.get(key)
            if block is not None and block.code is CodeState.NONE and block.users:
                block.tenant = ""  # another engine had it stored
                self.blocks.change(block, code=CodeState.COLD)
                self.elsewhere = max(0, self.elsewhere - 1)

    def counted(self, used: int | None, strangers: Iterable[Stranger] | None) -> None:
        """So many blocks are in the store or about to be, whoever's they are; and these are others' sessions.

        None for what nobody has counted.
        """
        if used is not None:
            self.elsewhere = max(0, used - self.blocks.cold - self.blocks.spilling)
        if strangers is not None:
            mine = self.table.by_id
            self._strangers = sorted((s for s in strangers if s.session_id not in mine), key=lambda s: s.last_used)

    def not_stored(self, keys: Iterable[bytes]) -> None:
        """These codes are not there any more."""
        blocks = [block for key in keys if (block := self.blocks.get(key)) is not None]
        self._drop(blocks, DropCause.FAILED)
        for block in blocks:
            self._bury([block])

    def expire(self, session_ids: Iterable[str]) -> None:
        """These sessions were not used for so long that their codes are gone."""
        for session_id in session_ids:
            session = self.table.by_id.get(session_id)
            if session is None or session.state is SessionState.EVICTING:
                continue
            if session.state is SessionState.COLD:
                self._cut(session, 0, DropCause.EXPIRED)
            else:
                self._drop([block for block in session.chain if block.users == 1], DropCause.EXPIRED)
                self.table.touch(session)

    def emptied(self) -> None:
        """All codes are gone, but for what is being written."""
        for block in [block for block in self.blocks if block.droppable]:
            self.blocks.change(block, code=CodeState.NONE)
        for session in [s for s in self.table.by_id.values() if s.state is SessionState.COLD]:
            if session.chain:  # an earlier one may have taken it along
                self._bury(session.chain)
        self.elsewhere, self._strangers = 0, []

    def reset(self) -> None:
        super().reset()
        self.elsewhere, self._strangers, self._departed = 0, [], []
        self.table.changed = {}

    # -- what the directory is to be told -------------------------------------------------------------

    def take_changes(self) -> list[tuple[str, Session | None]]:
        """Sessions that are not what they were at the last call, by id; None for one that is gone."""
        assert self.table.changed is not None
        taken, self.table.changed = self.table.changed, {}
        return [(session_id, self.table.by_id.get(session_id)) for session_id in taken]

    def take_departed(self) -> list[Stranger]:
        """Other engines' sessions that have to make room."""
        taken, self._departed = self._departed, []
        return taken

    def _drop_strangers(self, before: float, short: Callable[[], int]) -> None:
        while self._strangers and short() > 0 and self._strangers[0].last_used < before:
            stranger = self._strangers.pop(0)
            self._departed.append(stranger)
            self.elsewhere = max(0, self.elsewhere - stranger.blocks)

    @property
    def has_work(self) -> bool:
        return super().has_work or bool(self._departed or self.table.changed)
