"""Encode a prefix's KV into compressed blocks, as in the cold store, and decode the blocks.

A prefix's first tokens may be exact: a block stores their KV without loss.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manthan.benchmarks.quality_settings import LONG, Setting
from manthan.codec import BlockFormat

KV = tuple[NDArray[np.uint16], NDArray[np.uint16]]
"""Keys and values, each [layers, heads, tokens, head_dim], with the bits of bf16 as uint16."""


class Returned(NamedTuple):
    """Decoded block. nbytes: bytes of the encoded block."""

    keys: NDArray[np.uint16]
    values: NDArray[np.uint16]
    nbytes: int


class CodedPrefix:
    """Blocks of a prefix, encoded and decoded by a codec: once for each number of exact tokens that is asked for.

    form: format of the codec's blocks. kv: KV of the prefix, full blocks from position 0. threads: run the codec.
    """

    def __init__(self, form: BlockFormat, kv: KV, threads: ThreadPoolExecutor) -> None:
        self._format, self._kv, self._threads = form, kv, threads
        self._block_size = form.shape.tokens
        self._blocks: dict[tuple[int, int], Returned] = {}

    def kv(self, setting: Setting) -> KV:
        """Return the decoded KV of the prefix."""
        found = self._returned(self._counts(setting))
        return np.concatenate([block.keys for block in found], 2), np.concatenate([block.values for block in found], 2)

    def nbytes(self, setting: Setting) -> int:
        """Return the total bytes of the prefix's encoded blocks."""
        return sum(block.nbytes for block in self._returned(self._counts(setting)))

    def long_nbytes(self, setting: Setting) -> float:
        """Return the estimated bytes of a session of LONG tokens.

        A block counts with the mean bytes of the prefix's blocks that have the same number of exact tokens. If there
        are none, the prefix's last block is encoded with this number of exact tokens.
        """
        sizes: dict[int, list[int]] = {}
        counts = self._counts(setting)
        for exact, block in zip(counts, self._returned(counts), strict=True):
            sizes.setdefault(exact, []).append(block.nbytes)
        long, times = np.unique(setting.exact_tokens(LONG // self._block_size, self._block_size), return_counts=True)
        last = len(counts) - 1
        return sum(
            float(np.mean(sizes[exact] if exact in sizes else [self._one((last, exact)).nbytes])) * int(count)
            for exact, count in zip(long.tolist(), times, strict=True)
        )

    def _counts(self, setting: Setting) -> list[int]:
        """Return the number of exact tokens of each block."""
        counts: list[int] = setting.exact_tokens(self._kv[0].shape[2] // self._block_size, self._block_size).tolist()
        return counts

    def _returned(self, counts: Sequence[int]) -> list[Returned]:
        return list(self._threads.map(self._one, enumerate(counts)))

    def _one(self, which: tuple[int, int]) -> Returned:
        """Return a block. which: index of the block in the prefix, and number of its exact tokens."""
        if which not in self._blocks:
            number, exact = which
            first = number * self._block_size
            keys, values = (x[:, :, first : first + self._block_size] for x in self._kv)
            key = number.to_bytes(4, "little")
            encoded = self._format.encode(keys, values, key=key, first_token=first, exact=exact)
            keys, values = self._format.decode(encoded, key=key)
            self._blocks[which] = Returned(keys, values, encoded.nbytes)
        return self._blocks[which]
