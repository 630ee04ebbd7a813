"""Cosines and sines of RoPE for the GPU codecs.

They are computed by numpy on the CPU, so that encoded blocks are equal on every device, and kept in RAM.
"""

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from manthan.codec.rope import Rope

KEPT_BYTES = 2**26
"""Most bytes of tables kept, for the first blocks of a session. Tables of later blocks are computed at each call."""


class Turns:
    """Cosines and sines of blocks of `tokens` tokens. Safe to use from several threads.

    rope: None for a codec without RoPE: the tables then have no pairs. pinned: True to return pinned memory, from which
    copies to a GPU are asynchronous.
    """

    def __init__(self, rope: Rope | None, tokens: int, *, pinned: bool) -> None:
        self._rope, self._tokens, self._pinned = rope or Rope(()), tokens, pinned
        self._shape = (2, tokens, len(self._rope.frequencies))
        self._most = KEPT_BYTES // max(1024, 4 * int(np.prod(self._shape)))
        self._kept = torch.empty((0, *self._shape))
        self._growing = threading.Lock()

    def of(self, first_tokens: Sequence[int] | npt.NDArray[np.int64]) -> torch.Tensor:
        """Return cosines, then sines, float32 [blocks, 2, tokens, pairs]. Do not write to the tensor: it may be shared.

        first_tokens: position of each block's first token.
        """
        places = np.array(first_tokens, np.int64)
        rows, inside = np.divmod(places, self._tokens)
        if not len(rows) or inside.any() or rows.max() >= self._most:
            return self._in_place(self._reckoned(places))
        kept = self._upto(int(rows.max()) + 1)
        if (np.diff(rows) == 1).all():  # consecutive blocks, as in a session: a view, no copy
            return kept[int(rows[0]) : int(rows[-1]) + 1]
        return self._in_place(kept[torch.from_numpy(rows)])

    def _upto(self, blocks: int) -> torch.Tensor:
        """Return the tables of at least a session's first `blocks` blocks, [blocks or more, 2, tokens, pairs]."""
        with self._growing:
            there = len(self._kept)
            if there < blocks:
                more = self._tokens * np.arange(there, min(max(blocks, 2 * there), self._most))
                self._kept = self._in_place(torch.cat([self._kept, self._reckoned(more)]))
            return self._kept

    def _reckoned(self, places: npt.NDArray[np.int64]) -> torch.Tensor:
        positions = (places[:, None] + np.arange(self._tokens)).ravel()
        tables = [table.reshape(len(places), *self._shape[1:]) for table in self._rope.tables(positions)]
        return torch.from_numpy(np.stack(tables, axis=1))

    def _in_place(self, made: torch.Tensor) -> torch.Tensor:
        return made.pin_memory() if self._pinned and made.numel() else made
