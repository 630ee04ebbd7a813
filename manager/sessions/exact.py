"""Which of a session's tokens are kept exact: its first ones, and those at its end when it was evicted last."""

import sys
from collections.abc import Iterable

from manthan.manager.sessions.session import Block, MemoryShape, Session


class ExactTokens:
    """sink: how many of a session's first tokens. window: how many of its last; whole blocks of them are.

    A block that several sessions share is exact as long as one of them has it among its last.
    """

    def __init__(self, shape: MemoryShape, sink: int, window: int) -> None:
        self._shape, self._block_tokens, self._sink, self._wanted_sink = shape, shape.block_tokens, sink, sink
        self._window_blocks = -(-window // shape.block_tokens)

    def keep_all(self, all_exact: bool) -> None:
        """Keep every token exact from now on, or none but those of the sink and the window."""
        self._sink = sys.maxsize if all_exact else self._wanted_sink

    @property
    def sink_blocks(self) -> int:
        """How many of a chain's first blocks have some of a session's first tokens."""
        return -(-self._sink // self._block_tokens)

    @property
    def are_none(self) -> bool:
        """Whether no token of any session is kept exact."""
        return not (self._sink or self._window_blocks)

    def wanted(self, block: Block) -> int:
        """How many of the block's first tokens are to be kept exact, should it be encoded now."""
        if block.windows:
            return self._block_tokens
        if not self._sink:
            return 0
        tokens = self._shape.tokens_of(block.group)
        left = self._sink - block.depth * tokens
        return min(left, tokens) if left > 0 else 0

    def move_window(self, session: Session) -> None:
        """The session is about to be evicted: its window is the end of its chain now."""
        chain, old = session.chain, session.window
        if not (self._window_blocks or old):
            return
        session.window = range(max(0, len(chain) - self._window_blocks), len(chain))
        _count(chain, session.window, +1)
        _count(chain, old, -1)

    def cut(self, session: Session, length: int) -> None:
        """The session's chain is about to be shortened."""
        old = session.window
        if not old:
            return
        _count(session.chain, range(max(old.start, length), old.stop), -1)
        session.window = range(min(old.start, length), min(old.stop, length))

    def finer(self, session: Session) -> list[Block]:
        """The session's blocks whose codes keep more tokens exact than they are wanted to by now."""
        if not self._window_blocks:
            return []
        return [block for block in session.chain if block.droppable and block.encoding.exact > self.wanted(block)]


def _count(chain: list[Block], places: Iterable[int], by: int) -> None:
    for depth in places:
        chain[depth].windows += by
