"""Cosines and sines for a GPU's codec: reckoned by numpy, so that codes are the same on every device, and kept."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from manthan.codec.rope import Floats, Rope

KEPT_BYTES = 2**26


class Turns:
    """Of blocks of so many tokens. rope: None for no pairs. Safe to use from several threads."""

    def __init__(self, rope: Rope | None, tokens: int) -> None:
        self._rope, self._tokens = rope or Rope(()), tokens
        self._nbytes = 8 * tokens * len(self._rope.frequencies)
        self._block = lru_cache(KEPT_BYTES // max(1024, self._nbytes))(self._reckoned)

    def of(self, first_tokens: Sequence[int]) -> Floats:
        """[blocks, 2, tokens, pairs] of blocks that begin at these places."""
        made = np.empty((len(first_tokens), 2, self._tokens, len(self._rope.frequencies)), np.float32)
        if made.size:
            for block, first_token in zip(made, first_tokens, strict=True):
                block[:] = self._block(first_token)
        return made

    def _reckoned(self, first_token: int) -> Floats:
        return np.stack(self._rope.tables(np.arange(first_token, first_token + self._tokens, dtype=np.int64)))
