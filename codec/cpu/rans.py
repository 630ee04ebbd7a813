"""Encode small integers to bytes, and decode, by range asymmetric numeral systems (rANS; Duda, 2013) in many streams.

A row has the integers of a layer's keys or values, in `klt` of a group: [components, tokens]. A component has a table
of frequencies. Number i of a row belongs to stream i % streams. All streams of a row share one sequence of 16-bit words
(Giesen, "Interleaved entropy coders", 2014), so that many threads can decode a row in step. A thread finds its next
word from the states of all streams.

    x: state of a stream, 2**16 to 2**32 - 1
    f, c: frequency of a symbol, and sum of the earlier symbols' frequencies; all frequencies sum to 2**12

    encode, from the last number to the first:
        if x >= f * 2**20: the low 16 bits of x become a word, and x = x // 2**16
        x = x // f * 2**12 + c + x % f
    decode, from the first number to the last:
        the symbol is the one with c <= x % 2**12 < c + f
        x = f * (x // 2**12) + x % 2**12 - c
        if x < 2**16: x = x * 2**16 + the next word

An encoder's state begins at 2**16, and a decoder's must end there. Integers of -127 to 127 are symbols. An integer
without a frequency in the table is the symbol ESCAPE, followed by the integer, -32,768 to 32,767, as a word. Words
stand in the order of decoding. As bytes, little-endian:

    | count of each row's words | states of each row's streams, u32 | words of all rows, u16 |

A count is u16, or u32 for rows that may have 2**16 words or more.

If a section is larger than its bound, quantization steps are doubled until the section fits. The integers are divided
by 2**doublings and rounded, ties to even. After the last doubling all integers are 0. They fit, because a 0 takes fewer
bits than a table's average symbol.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from manthan.codec.base import ByteArray
from manthan.codec.cpu.numbers import kernels
from manthan.codec.errors import DamagedError, SizeError
from manthan.codec.tables.frequencies import SCALE

VERSION, START = 1, 4
"""Version of an encoded section, and bytes of the front: version u8, doublings u8 (`klt`: k), 2 zero bytes."""
LOWEST = 1 << 16
STREAM_NUMBERS = 1024
STREAMS_MAX = 32
WORDS_A_NUMBER = 28 / 16
"""Most words of a number: 12 bits for the escape, and 16 for the number."""
MOST_DOUBLINGS = 16
"""Doublings after which all 16-bit numbers are 0."""
FURTHEST = 32767
"""Largest magnitude of a number of 16 bits."""

Integers = npt.NDArray[np.int16]


class Rows(NamedTuple):
    """Layout of rows, which a decoder must know.

    tables: uint8 [rows, components], index of each component's table in the `Coder`.
    tokens, streams: counts in every row.
    """

    tables: npt.NDArray[np.uint8]
    tokens: int
    streams: int

    @property
    def counts(self) -> np.dtype[np.unsignedinteger]:
        """Dtype of a row's count of words."""
        most = self.tables.shape[1] * self.tokens * WORDS_A_NUMBER
        return np.dtype("<u2" if most < 1 << 16 else "<u4")

    @property
    def front(self) -> int:
        """Bytes ahead of the words."""
        return len(self.tables) * (self.counts.itemsize + 4 * self.streams)


def streams_of(numbers: int) -> int:
    """Number of streams of a row: the least power of 2 with at most 1,024 numbers a stream, but at most 32."""
    return min(STREAMS_MAX, 1 << max(0, (numbers - 1) // STREAM_NUMBERS).bit_length())


def check_front(encoded: ByteArray, codec: str, most_doublings: int) -> int:
    """Return the number of doublings, or k of `klt`, from the front of an encoded section. Raises DamagedError."""
    front: list[int] = encoded[:START].tolist()
    if front != [VERSION, front[1], 0, 0] or front[1] > most_doublings:
        raise DamagedError(f"bytes of {codec} begin with {bytes(front).hex()}: 01000000 does.")
    return front[1]


class Coder:
    """Coder with frequencies uint16 [tables, 256]. A table sums to 4,096; ESCAPE has at least 1, no symbol 4,096."""

    def __init__(self, frequencies: npt.NDArray[np.uint16]) -> None:
        wide = frequencies.astype(np.uint32)
        before = np.cumsum(wide, axis=1, dtype=np.uint32) - wide
        self.encoding = before << np.uint32(16) | wide
        symbols = np.repeat(np.tile(np.arange(256, dtype=np.uint32), len(wide)), wide.ravel()).reshape(-1, SCALE)
        slots = np.arange(SCALE, dtype=np.uint32)
        f, c = (np.take_along_axis(x, symbols.astype(np.int64), 1) for x in (wide, before))
        self.decoding = symbols << np.uint32(24) | f << np.uint32(12) | (slots - c)

    def write(self, numbers: Integers, rows_of: Callable[[int], Rows], out: ByteArray) -> tuple[int, int]:
        """Write whole numbers into the first bytes of `out`, with the fewest doublings of the steps that fit.

        numbers: of all rows, row by row. rows_of: returns the layout of the rows for a number of doublings.

        Returns: the number of doublings, and the number of written bytes.
        """
        for doublings in range(MOST_DOUBLINGS + 1):
            rows, halved = rows_of(doublings), numbers
            if doublings:
                halved = np.rint(np.ldexp(numbers.astype(np.float64), -doublings)).astype(np.int16)
            states = np.empty((len(rows.tables), rows.streams), np.uint32)
            sizes = np.empty(len(rows.tables), np.int64)
            words = np.empty((out.size - rows.front) // 2 + 2, np.uint16)
            first = kernels().encode(halved, rows.tables, rows.tokens, self.encoding, states, sizes, words)
            if first >= 0:
                at = 0
                for part in (sizes.astype(rows.counts), states.astype("<u4"), words[first:].astype("<u2")):
                    out[at : at + part.nbytes] = part.ravel().view(np.uint8)
                    at += part.nbytes
                return doublings, at
        raise AssertionError(f"{numbers.size} zeros do not fit into {out.size} bytes")

    def read(self, encoded: ByteArray, rows: Rows) -> Integers:
        """Return the numbers that `write` wrote, still divided by 2**doublings. Raises SizeError, DamagedError."""
        count, begin, dtype = len(rows.tables), rows.front, rows.counts
        if encoded.size < begin or (encoded.size - begin) % 2:
            raise SizeError(f"{encoded.size} bytes are not {count} rows of rANS: {begin} and words of 2 bytes are.")
        at = count * dtype.itemsize
        sizes = encoded[:at].copy().view(dtype).astype(np.int64)
        states = encoded[at:begin].copy().view("<u4").reshape(count, rows.streams).astype(np.uint32)
        words = encoded[begin:].copy().view("<u2").astype(np.uint16, copy=False)
        numbers = np.empty(rows.tables.size * rows.tokens, np.int16)
        whole = int(sizes.sum()) == words.size and bool((states >= LOWEST).all())
        if not whole or not kernels().decode(states, sizes, words, rows.tables, rows.tokens, self.decoding, numbers):
            raise DamagedError("entropy-coded numbers do not end where they should: the block is damaged.")
        return numbers
