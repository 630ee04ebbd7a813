"""Exact tokens of a session: its first ones are stored as they are."""

import sys

from manthan.manager.sessions.session import Block, MemoryShape


class ExactTokens:
    """sink: number of a session's first tokens that are kept exact."""

    def __init__(self, shape: MemoryShape, sink: int) -> None:
        self._shape, self._sink, self._wanted_sink = shape, sink, sink

    def keep_all(self, all_exact: bool) -> None:
        """Keep every token exact from now on, or only those of the sink."""
        self._sink = sys.maxsize if all_exact else self._wanted_sink

    @property
    def are_none(self) -> bool:
        """True if no token of any session is kept exact."""
        return not self._sink

    def wanted(self, block: Block) -> int:
        """Return how many of the block's first tokens are to be kept exact, should it be encoded now."""
        if not self._sink:
            return 0
        tokens = self._shape.tokens_of(block.group)
        left = self._sink - block.depth * tokens
        return min(left, tokens) if left > 0 else 0
