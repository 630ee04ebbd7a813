"""Rows of entropy-coded numbers as bytes, little-endian:

    | words of each row | states of each row's streams, u32 | words of all rows, u16 |

How many words a row has is u16, or u32 where a row is so long that it might not fit.
"""

import numpy as np

from manthan.codec.base import Codes
from manthan.codec.cpu.rans import Coded, Rows, streams_of
from manthan.codec.errors import SizeError

WORDS_A_NUMBER = 28 / 16
"""At most: 12 bits for the escape, and 16 behind it."""


def row_front(numbers: int) -> int:
    """Bytes ahead of the words for a row of so many numbers."""
    return _counts(numbers).itemsize + 4 * streams_of(numbers)


def front(rows: Rows) -> int:
    """Bytes ahead of the words."""
    return len(rows.components) * row_front(_numbers(rows))


def write(coded: Coded, rows: Rows, out: Codes) -> int:
    """Into the front of `out`; how many bytes."""
    sizes = coded.sizes.astype(_counts(_numbers(rows)))
    at = 0
    for part in (sizes, coded.states.astype("<u4"), coded.words.astype("<u2", copy=False)):
        out[at : at + part.nbytes] = np.ascontiguousarray(part).view(np.uint8).ravel()
        at += part.nbytes
    return at


def parse(codes: Codes, rows: Rows) -> Coded:
    """The opposite. Raises SizeError."""
    count, dtype, begin = len(rows.components), _counts(_numbers(rows)), front(rows)
    if codes.size < begin or (codes.size - begin) % 2:
        raise SizeError(f"{codes.size} bytes are not {count} entropy-coded rows: {begin} and words of 2 bytes are.")
    at = count * dtype.itemsize
    sizes = codes[:at].copy().view(dtype).astype(np.int64)
    states = codes[at:begin].copy().view("<u4").reshape(count, rows.streams).astype(np.uint32)
    return Coded(states, sizes, codes[begin:].copy().view("<u2").astype(np.uint16, copy=False))


def _numbers(rows: Rows) -> int:
    return int(rows.components[0]) * rows.tokens


def _counts(numbers: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype("<u2" if numbers * WORDS_A_NUMBER < 1 << 16 else "<u4")
