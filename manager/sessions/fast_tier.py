"""Which codes leave a fast tier for the slower one behind it: GPU memory for RAM, RAM for a disk, a disk for Redis."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from manthan.manager.sessions.blocks import BlockTable
from manthan.manager.sessions.place import Place
from manthan.manager.sessions.session import Block, CodeState, Session, SessionState
from manthan.policies import EvictionPolicy, SessionView


class Fast(NamedTuple):
    """A fast tier: its bytes, and whether what is read from a slower one behind it comes back to it."""

    nbytes: int
    fills_on_read: bool


class FastTier(Place):
    """Sessions with codes in a fast tier, in the policy's order.

    The workers keep the tier; here it is only said which blocks are to go first when they need room in it.
    number: how many others are in front of it.
    """

    def __init__(self, make_policy: Callable[[], EvictionPolicy], blocks: BlockTable, fast: Fast, number: int) -> None:
        super().__init__(make_policy)
        self._blocks, self.fast, self._number = blocks, fast, number
        self._bit = 1 << number

    def choose(self, sessions: Mapping[str, Session]) -> list[bytes]:
        """The blocks to go first, so that what is being encoded fits: tails of the sessions whose turn it is.

        Where reading brings codes back, not of a session in use: it was read just now, and is the last to go when it
        is cold again.
        """
        short = self._blocks.stored - self._blocks.moved[self._number] - self.fast.nbytes
        chosen: list[bytes] = []
        if short > 0:
            for session_id in self.victims():
                session = sessions[session_id]
                if self.fast.fills_on_read and session.state is not SessionState.COLD:
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
            if block.code is CodeState.COLD and not block.moved & self._bit:
                self._blocks.mark_moved(block, block.moved | self._bit)
                chosen.append(block.key)
                short -= block.encoding.nbytes
        return short


class FastTiers:
    """The tiers in front of the last one, fastest first; none of them where there is one place for all codes.

    A tier has a number, the fastest 0; the last one's is how many of these there are.
    """

    def __init__(self, make_policy: Callable[[], EvictionPolicy], blocks: BlockTable, fast: Sequence[Fast]) -> None:
        self._blocks = blocks
        self._tiers = tuple(FastTier(make_policy, blocks, each, number) for number, each in enumerate(fast))
        self.budgets = tuple(each.nbytes for each in fast)
        """In bytes."""
        self.all_moved = (1 << len(fast)) - 1
        """`Block.moved` of a block whose codes are only in the last tier."""
        self._fills_on_read = any(each.fills_on_read for each in fast)
        self.keeps_behind = self._fills_on_read or not fast
        """Whether the last tier has all codes, also those that are in others."""

    def __len__(self) -> int:
        return len(self._tiers)

    def used(self, session: SessionView, priority: int) -> None:
        """A session went cold, so that its codes are in all of them."""
        for tier in self._tiers:
            tier.used(session, priority)

    def forget(self, session_id: str) -> None:
        for tier in self._tiers:
            tier.forget(session_id)

    def choose(self, sessions: Mapping[str, Session]) -> list[list[bytes]]:
        """Of each tier, the blocks to go first; see FastTier."""
        return [tier.choose(sessions) for tier in self._tiers]

    def read(self, blocks: Iterable[Block]) -> None:
        """These codes were read: those tiers have them now that are in front of the one that had."""
        if self._fills_on_read:
            for block in blocks:
                if block.moved & 1:
                    self._blocks.mark_moved(block, block.moved & (block.moved + 1))

    def has(self, tier: int, moved: int) -> bool:
        """Whether a tier has the codes of a block that left these; see `Block.moved`."""
        return not moved >> tier & 1 if tier < len(self._tiers) else self.keeps_behind or moved == self.all_moved

    def has_all(self, tier: int) -> bool:
        """Whether a tier has all codes."""
        return tier == len(self._tiers) and self.keeps_behind
