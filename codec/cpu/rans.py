"""Small integers to words and back, by range asymmetric numeral systems (rANS; Duda, 2013), many streams side by side.

Integers come in rows: a row is a layer's, [components, tokens], and every component has a table of frequencies. Number
i of a row belongs to stream i % streams; all streams of a row share one run of words (Giesen, "Interleaved entropy
coders", 2014), so that as many threads can decode it in step: each knows from the others' states which word is its.

    x = state of the stream, 2**16 to 2**32 - 1; f, c = frequency and sum of those before it, of 2**12
    encode, from the last number to the first:
        x >= f * 2**20:  the low 16 bits of x become a word, x = x // 2**16
        x = x // f * 2**12 + c + x % f
    decode, from the first to the last:
        s = the symbol with c <= x % 2**12 < c + f;  x = f * (x // 2**12) + x % 2**12 - c
        x < 2**16:  x = x * 2**16 + the next word

A state begins at 2**16, where the decoder must find it again. Integers of -127 to 127 are symbols; what has no
frequency is the symbol ESCAPE, and behind it, as a word of its own, the integer: -32,768 to 32,767. Words stand in the
order in which they are decoded.
"""

from types import ModuleType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from manthan.codec.errors import DamagedError
from manthan.codec.tables.frequencies import SCALE

LOWEST = 1 << 16
STREAM_NUMBERS = 1024
STREAMS_MAX = 32

Integers = npt.NDArray[np.int16]
Words = npt.NDArray[np.uint16]


class Rows(NamedTuple):
    """What is known of rows before their numbers are. components: int64 [rows]. tables: uint8 [sum of components], the
    frequencies of each. tokens, streams: of every row."""

    components: npt.NDArray[np.int64]
    tables: npt.NDArray[np.uint8]
    tokens: int
    streams: int


class Coded(NamedTuple):
    """states: uint32 [rows, streams]. sizes: int64 [rows], of each row in words. words: of all rows."""

    states: npt.NDArray[np.uint32]
    sizes: npt.NDArray[np.int64]
    words: Words


def streams_of(numbers: int) -> int:
    """How many streams a row of so many numbers has: a power of 2, about 1,024 numbers each, at most 32."""
    return min(STREAMS_MAX, 1 << max(0, (numbers - 1) // STREAM_NUMBERS).bit_length())


class Coder:
    """frequencies: uint16 [tables, 256], each table's sum 4,096, that of ESCAPE at least 1 and none 4,096."""

    def __init__(self, frequencies: npt.NDArray[np.uint16]) -> None:
        wide = frequencies.astype(np.uint32)
        before = np.cumsum(wide, axis=1, dtype=np.uint32) - wide
        self._encoding = before << np.uint32(16) | wide
        symbols = np.repeat(np.tile(np.arange(256, dtype=np.uint32), len(wide)), wide.ravel()).reshape(-1, SCALE)
        slots = np.arange(SCALE, dtype=np.uint32)
        f, c = (np.take_along_axis(x, symbols.astype(np.int64), 1) for x in (wide, before))
        self._decoding = symbols << np.uint32(24) | f << np.uint32(12) | (slots - c)

    def _kernels(self) -> ModuleType:
        from manthan.codec.cpu import numba_rans

        return numba_rans

    def encode(self, numbers: Integers, rows: Rows, most: int) -> Coded | None:
        """The rows' numbers, one row behind the other; None where they take more than `most` words."""
        states = np.empty((len(rows.components), rows.streams), np.uint32)
        sizes = np.empty(len(rows.components), np.int64)
        words = np.empty(most, np.uint16)
        first = self._kernels().encode(numbers, *rows, self._encoding, states, sizes, words)
        return None if first < 0 else Coded(states, sizes, words[first:])

    def decode(self, coded: Coded, rows: Rows) -> Integers:
        """The rows' numbers. Raises DamagedError for words that no encoder writes."""
        numbers = np.empty(int(rows.components.sum()) * rows.tokens, np.int16)
        whole = int(coded.sizes.sum()) == coded.words.size and bool((coded.states >= LOWEST).all())
        if not whole or not self._kernels().decode(*coded, *rows, self._decoding, numbers):
            raise DamagedError("entropy-coded numbers do not end where they should: the codes are damaged.")
        return numbers
