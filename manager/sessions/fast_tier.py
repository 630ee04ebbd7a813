"""Which codes leave a fast tier for the slower one behind it: GPU memory for RAM, RAM for Redis."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from manthan.manager.sessions.blocks import BlockTable
from manthan.manager.sessions.place import Place
from manthan.manager.sessions.session import Block, CodeState, Session, SessionState
from manthan.policies import EvictionPolicy


class Fast(NamedTuple):
    """A fast tier: its bytes, and whether what is read from the slower one behind it comes back to it."""

    nbytes: int
    fills_on_read: bool


class FastTier(Place):
    """Sessions with codes in the fast tier, in the policy's order.

    The workers keep the tier; here it is only said which blocks are to go first when they need room in it.
    """

    def __init__(self, make_policy: Callable[[], EvictionPolicy], blocks: BlockTable, fast: Fast) -> None:
        super().__init__(make_policy)
        self._blocks, self._fast = blocks, fast

    @property
    def nbytes(self) -> int:
        """Its budget."""
        return self._fast.nbytes

    @property
    def keeps_behind(self) -> bool:
        """Whether the slower tier behind it has all codes, also those that are here."""
        return self._fast.fills_on_read

    def choose(self, sessions: Mapping[str, Session]) -> list[bytes]:
        """The blocks to go first, so that what is being encoded fits: tails of the sessions whose turn it is.

        Where reading brings codes back, not of a session in use: it was read just now, and is the last to go when it
        is cold again.
        """
        short = self._blocks.stored - self._blocks.moved - self._fast.nbytes
        chosen: list[bytes] = []
        if short > 0:
            for session_id in self.victims():
                session = sessions[session_id]
                if self._fast.fills_on_read and session.state is not SessionState.COLD:
                    continue
                short = self._choose_of(session, short, chosen)
                if short <= 0:
                    break
                self.evicted(session_id)
        return chosen

    def _choose_of(self, session: Session, short: int, chosen: list[bytes]) -> int:
        for block in reversed(session.chain):
            if short <= 0:
                break
            if block.code is CodeState.COLD and not block.moved:
                self._blocks.mark_moved(block, True)
                chosen.append(block.key)
                short -= block.encoding.nbytes
        return short

    def read(self, blocks: Iterable[Block]) -> None:
        """These codes were read."""
        if self._fast.fills_on_read:
            for block in blocks:
                if block.moved:
                    self._blocks.mark_moved(block, False)
